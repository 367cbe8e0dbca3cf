"""The memory tasks: oracles, brute force over policies without memory, and the same episodes in every
form."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

FORWARD, UP, DOWN = range(3)


def make(env_id, num_envs, seed):
    """Make a vector environment; returns it and its first observations."""
    envs = gym.make_vec(f"envs_shared.memory_tasks:{env_id}", num_envs=num_envs)
    return envs, envs.reset(seed=seed)[0]


# T-maze


@pytest.mark.parametrize("length", [10, 20, 50])
def test_turning_where_the_cue_points_earns_one(length):
    envs, obs = make(f"TMaze{length}-v0", 40, seed=1)
    cue = obs[:, 0].copy()
    assert set(cue) == {-1.0, 1.0} and (make(f"TMaze{length}-v0", 40, seed=2)[1] != obs).any()
    for t in range(1, length + 2):  # the last step forward does nothing
        obs, *rest, _ = envs.step(np.full(40, FORWARD))
        assert not obs[:, 0].any() and not np.any(rest)  # no cue, no reward, no end
        assert (obs[:, 1] == (t >= length)).all()
    follow = np.where(cue > 0, UP, DOWN)
    follow[0] = UP + DOWN - follow[0]  # one turns the wrong way
    _, rewards, terminated, truncated, _ = envs.step(follow)
    np.testing.assert_array_equal(rewards, [-1, *[1] * 39])
    assert terminated.all() and not truncated.any()


def test_no_maze_policy_without_memory_earns_more_than_nothing():
    """All 81 maps from the four observations to the three actions, under both cues, to the end."""
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
    (envs, _), (others, _) = (make("TMaze10-v0", 64, 5) for _ in range(2))
    rng, was_done, num_ends = np.random.default_rng(1), np.zeros(64, bool), 0
    for _ in range(100):
        actions = rng.integers(0, 3, 64)
        actions[:8] = FORWARD  # to the limit of steps
        obs, rewards, terminated, truncated, _ = step = envs.step(np.where(was_done, FORWARD, actions))
        np.testing.assert_equal(step[:4], others.step(np.where(was_done, UP, actions))[:4])
        is_done = terminated | truncated
        assert not rewards[was_done].any() and not (is_done & was_done).any()
        np.testing.assert_array_equal(obs[:, 0] != 0, was_done)
        was_done, num_ends = is_done, num_ends + is_done.sum()
    assert num_ends > 64


def test_the_single_maze_is_the_vector_of_one():
    env, (envs, expected) = gym.make("envs_shared.memory_tasks:TMaze10-v0"), make("TMaze10-v0", 1, 7)
    check_env(env.unwrapped, skip_render_check=True)
    np.testing.assert_array_equal(env.reset(seed=7)[0], expected[0])
    rng, ends = np.random.default_rng(2), 0
    for _ in range(500):
        action = rng.integers(3)
        step, expected = env.step(action), envs.step(np.array([action]))
        np.testing.assert_equal(step[:4], tuple(x[0] for x in expected[:4]))
        if step[2] or step[3]:
            ends += 1
            np.testing.assert_array_equal(env.reset()[0], envs.step(np.array([0]))[0][0])
    assert ends >= 4


# CartPole without velocities


def test_hidden_velocities():
    """CartPole-v1 with the same seed and actions, reduced to position and angle, up to the limit of steps."""
    single = gym.make("envs_shared.memory_tasks:CartPoleNoVelocity-v0")
    check_env(single.unwrapped, skip_render_check=True)
    expected, _ = gym.make("CartPole-v1").reset(seed=3)
    np.testing.assert_array_equal(single.reset(seed=3)[0], expected[[0, 2]])
    envs, obs = make("CartPoleNoVelocity-v0", 8, 3)
    full = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")
    full_obs, _ = full.reset(seed=3)
    np.testing.assert_array_equal(obs, full_obs[:, [0, 2]])
    np.testing.assert_array_equal(envs.observation_space.high, full.observation_space.high[:, [0, 2]])
    rng = np.random.default_rng(0)
    for t in range(700):
        balance = (full_obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0).astype(int)
        actions = balance if t < 600 else rng.integers(0, 2, 8)
        obs, *rest, _ = envs.step(actions)
        full_obs, *expected, _ = full.step(actions)
        np.testing.assert_equal([obs, *rest], [full_obs[:, [0, 2]], *expected])
        assert rest[2].all() == (t == 499)


# Stacked frames


@pytest.mark.parametrize(
    "name", ["RepeatPreviousEasy-Stack4", "RepeatPreviousMedium-Stack32", "RepeatFirstEasy-Stack52"]
)
def test_the_oldest_frame_of_a_stack_is_what_a_task_of_popgym_asks_for(name):
    env = gym.make(f"benchmark.stacked_frames:{name}-v0")
    obs, total, is_over = env.reset(seed=5)[0], 0.0, False
    while not is_over:
        obs, reward, terminated, truncated, _ = env.step(obs[0])
        total, is_over = total + reward, terminated or truncated
    assert total == pytest.approx(1.0)
