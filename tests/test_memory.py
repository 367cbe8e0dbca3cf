"""The memory tasks: oracles, brute force over policies without memory, and the same episodes in every form."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

MAZES = {"TMaze10-v0": 10, "TMaze20-v0": 20, "TMaze50-v0": 50}
FORWARD, UP, DOWN = range(3)


def make(env_id, num_envs, seed):
    """Make a vector environment; returns it and its first observations."""
    envs = gym.make_vec(f"envs_shared.memory_tasks:{env_id}", num_envs=num_envs)
    return envs, envs.reset(seed=seed)[0]


def check_equal(steps, others):
    """Compare observations, rewards and the two flags."""
    for a, b in zip(steps[:4], others[:4], strict=True):
        np.testing.assert_array_equal(a, b)


# RepeatPrevious of popgym


@pytest.fixture(scope="module")
def cards():
    """The suits shown, and popgym's rewards of each answer at each step, of 300 episodes of RepeatPreviousEasy."""
    env = gym.make("popgym:popgym-RepeatPreviousEasy-v0")
    shown, rewards = np.zeros((300, 52), int), np.zeros((300, 51, 4))
    for episode, suit in itertools.product(range(300), range(4)):
        shown[episode, 0], _ = env.reset(seed=episode)
        for t in range(51):
            shown[episode, t + 1], rewards[episode, t, suit], terminated, truncated, _ = env.step(suit)
            assert terminated == (t == 50) and not truncated
    return shown, rewards


def score(rewards, answers):
    """Returns [episodes] of answers [episodes, 51]."""
    return np.take_along_axis(rewards, answers[..., None], 2).sum((1, 2))


def test_remembering_the_fourth_card_back_earns_one(cards):
    """The card just shown is the first one back. Three or five cards back are no better than a guess."""
    shown, rewards = cards
    for lag, expected in ((3, -0.5), (4, 1.0), (5, -0.5)):
        answers = np.pad(shown, ((0, 0), (lag - 1, 0)))[:, :51]
        assert score(rewards, answers).mean() == pytest.approx(expected, abs=1e-9 if lag == 4 else 0.03)
    assert (rewards[:, :3] == 0).all() and np.allclose(abs(rewards[:, 3:]), 1 / 48)
    assert ((shown[..., None] == np.arange(4)).sum(1) == 13).all()


def test_no_card_policy_without_memory_earns_more_than_minus_049(cards):
    """All 256 maps from the suit shown to an answer. Best is another suit, of which one card more is left."""
    shown, rewards = cards
    policies = np.array(list(itertools.product(range(4), repeat=4)))  # [256, 4]
    returns = np.array([score(rewards, policy[shown[:, :51]]).mean() for policy in policies])
    num_same = (policies == np.arange(4)).sum(1)  # suits that are answered by themselves
    other, same = (
        2 * 13 / 51 - 1,
        2 * 12 / 51 - 1,
    )  # expected returns of an answer by another suit and the same
    expected = ((4 - num_same) * other + num_same * same) / 4
    assert expected.max() == pytest.approx(-0.49, abs=1e-3)
    assert abs(returns - expected).max() < 0.04 and returns.max() < -0.45


# T-maze


@pytest.mark.parametrize(("env_id", "length"), MAZES.items())
def test_turning_where_the_cue_points_earns_one(env_id, length):
    envs, obs = make(env_id, 40, seed=1)
    cue = obs[:, 0].copy()
    assert set(cue) == {-1.0, 1.0}
    for _ in range(length):
        obs, *rest, _ = envs.step(np.full(40, FORWARD))
        assert not obs[:, 0].any() and not np.any(rest)  # no cue, no reward, no end
    assert (obs[:, 1] == 1).all()
    follow = np.where(cue > 0, UP, DOWN)
    follow[0] = UP + DOWN - follow[0]  # one turns the wrong way
    _, rewards, terminated, truncated, _ = envs.step(follow)
    np.testing.assert_array_equal(rewards, [-1, *[1] * 39])
    assert terminated.all() and not truncated.any()


def test_no_maze_policy_without_memory_earns_more_than_nothing():
    """All 81 maps from the four observations to the three actions, under both cues, to the end of the episode."""
    seen = [(1, 0), (-1, 0), (0, 0), (0, 1)]
    policies = np.array(list(itertools.product(range(3), repeat=4))).repeat(2, axis=0)  # [162, 4]
    envs, _ = make("TMaze10-v0", 162, 1)
    envs.unwrapped.cue[:] = np.tile([1, -1], 81)
    obs = envs.unwrapped.start(np.zeros(162, bool))
    returns, running, lengths = np.zeros(162), np.ones(162, bool), np.zeros(162, int)
    for _ in range(60):
        column = [seen.index(tuple(o)) for o in obs.astype(int).tolist()]
        obs, rewards, terminated, truncated, _ = envs.step(policies[np.arange(162), column])
        returns += rewards * running
        lengths += running
        assert (rewards[truncated] == 0).all() and not (terminated & truncated).any()
        running &= ~(terminated | truncated)
    assert not running.any() and set(lengths) == {11, 12, 60} and set(returns) == {-1.0, 0.0, 1.0}
    assert (returns.reshape(81, 2).mean(1) == 0).all()


def test_the_step_after_the_end_begins_an_episode_and_ignores_the_action():
    results = []
    for late_action in (FORWARD, UP):
        envs, _ = make("TMaze10-v0", 64, 5)
        rng, log, was_done = np.random.default_rng(1), [], np.zeros(64, bool)
        for _ in range(100):
            actions = np.where(was_done, late_action, rng.integers(0, 3, 64))
            obs, rewards, terminated, truncated, _ = envs.step(actions)
            assert not rewards[was_done].any() and not (terminated | truncated)[was_done].any()
            np.testing.assert_array_equal(obs[:, 0] != 0, was_done)
            was_done = terminated | truncated
            log.append(np.column_stack((obs, rewards, terminated, truncated)))
        results.append(np.array(log))
    np.testing.assert_array_equal(*results)
    assert results[0][..., 3:].sum() > 64


def test_the_single_maze_is_the_vector_of_one():
    env, (envs, expected) = gym.make("envs_shared.memory_tasks:TMaze10-v0"), make("TMaze10-v0", 1, 7)
    check_env(env.unwrapped, skip_render_check=True)
    np.testing.assert_array_equal(env.reset(seed=7)[0], expected[0])
    rng, ends = np.random.default_rng(2), 0
    for _ in range(500):
        action = rng.integers(3)
        step, expected = env.step(action), envs.step(np.array([action]))
        check_equal(step, [x[0] for x in expected[:4]])
        if step[2] or step[3]:
            ends += 1
            np.testing.assert_array_equal(env.reset()[0], envs.step(np.array([0]))[0][0])
    assert ends >= 4


# CartPole without velocities


def test_hidden_velocities():
    """CartPole-v1 with the same seed and actions, reduced to position and angle, up to the limit of 500 steps."""
    check_env(gym.make("envs_shared.memory_tasks:CartPoleNoVelocity-v0").unwrapped, skip_render_check=True)
    envs, obs = make("CartPoleNoVelocity-v0", 8, 3)
    full = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")
    full_obs, _ = full.reset(seed=3)
    np.testing.assert_array_equal(obs, full_obs[:, [0, 2]])
    assert envs.single_observation_space.shape == envs.observation_space.shape[1:] == obs.shape[1:] == (2,)
    rng, truncations = np.random.default_rng(0), []
    for t in range(700):
        assert envs.observation_space.contains(obs)
        balance = (full_obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0).astype(int)
        actions = balance if t < 600 else rng.integers(0, 2, 8)
        obs, *rest = envs.step(actions)
        full_obs, *expected = full.step(actions)
        check_equal((obs, *rest), (full_obs[:, [0, 2]], *expected))
        truncations += [t] * rest[2].sum()
    assert truncations == [499] * 8


# MiniGrid


def test_the_hint_of_minigrid_is_in_view_from_the_start():
    """The mazes are those of MiniGrid-Memory with the same seeds, in which the hint is mostly out of view at first."""
    pytest.importorskip("minigrid")
    in_view = {"MemoryForced": 0, "Memory": 0}
    for size, seed in itertools.product((7, 9, 13), range(20)):
        grids = []
        for name, module in (("MemoryForced", "envs_shared.memory_tasks"), ("Memory", "minigrid")):
            env = gym.make(f"{module}:MiniGrid-{name}S{size}-v0")
            env.reset(seed=seed)
            assert name == "Memory" or tuple(env.unwrapped.agent_pos) == (1, size // 2)
            in_view[name] += env.unwrapped.agent_sees(1, size // 2 - 1)
            grids.append(env.unwrapped.grid.encode())
        np.testing.assert_array_equal(*grids)
    assert in_view["MemoryForced"] == 60 > 40 > in_view["Memory"]
    check_env(
        gym.make("envs_shared.memory_tasks:MiniGrid-MemoryForcedS9-v0").unwrapped, skip_render_check=True
    )


# All


@pytest.mark.parametrize("env_id", ["TMaze10-v0", "CartPoleNoVelocity-v0"])
def test_a_seed_fixes_the_history_of_each_environment(env_id):
    def history(seed):
        envs, obs = make(env_id, 16, seed)
        rng, history = np.random.default_rng(0), [obs]
        for _ in range(150):
            history.append(envs.step(np.full(16, rng.integers(envs.single_action_space.n)))[0])
        return np.array(history)

    first, again, other = history(1), history(1), history(2)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != first[:, :1]).any(axis=(0, 2)).sum() >= 3
