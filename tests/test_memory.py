"""The memory tasks: oracles, brute force over policies without memory, and POPGym's own record of its card game."""

import itertools
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN, REWARD, TERMINATED, TRUNCATED
from envs_shared.gym_tasks.memory import MEMORYLESS_CEILING
from envs_shared.gym_tasks.vector import make_vec

CARDS = {
    "RepeatPreviousEasy-v0": (4, 1),
    "RepeatPreviousMedium-v0": (32, 2),
    "RepeatPreviousHard-v0": (64, 3),
}
MAZES = {"TMaze10-v0": 10, "TMaze20-v0": 20, "TMaze50-v0": 50}
RECORD = Path(__file__).parent / "data" / "popgym_repeat_previous.jsonl"
EPISODES = [json.loads(line) for line in RECORD.read_text().splitlines()[1:]]
FORWARD, UP, DOWN = range(3)


def make(env_id, num_envs, seed):
    """A vector environment and its first observations."""
    envs = gym.make_vec(env_id, num_envs=num_envs)
    return envs, envs.reset(seed=seed)[0]


def play_cards(env_id, num_envs, seed, policy):
    """Returns [B] and suits shown [cards, B] of one episode, for `policy(suits shown so far)`."""
    envs, obs = make(env_id, num_envs, seed)
    shown, returns = [obs], 0.0
    for _ in range(52 * CARDS[env_id][1] - 1):
        obs, rewards, terminated, truncated, _ = envs.step(policy(shown))
        shown.append(obs)
        returns = returns + rewards
        assert not truncated.any()
        assert terminated.all() == terminated.any() == (len(shown) == 52 * CARDS[env_id][1])
    return returns, np.array(shown)


@pytest.mark.parametrize("episode", EPISODES, ids=lambda e: f"{e['task']}-{e['seed']}")
@pytest.mark.parametrize("cards", ["given", "dealt"])
def test_repeat_previous_is_popgyms(episode, cards):
    """popgym's rewards and endings for its cards and actions; and from its seed, its cards too."""
    envs, obs = make(f"{episode['task']}-v0", 1, episode["seed"])
    if cards == "given":
        envs.reset(seed=12345)
        envs.suits[:] = episode["observations"]
        obs = envs.observe()
    observations, rest = [obs[0]], []
    for action in episode["actions"]:
        obs, *step = envs.step(np.array([action]))
        observations.append(obs[0])
        rest.append([x[0] for x in step[:3]])
    assert observations == episode["observations"]
    rewards, terminated, truncated = zip(*rest, strict=True)
    assert rewards == tuple(episode["rewards"])
    assert terminated == tuple(episode["terminated"])
    assert truncated == tuple(episode["truncated"])


@pytest.mark.parametrize(("env_id", "rule"), CARDS.items())
def test_remembering_the_right_card_earns_one(env_id, rule):
    k, decks = rule

    def remember(shown, lag=k):
        return shown[-lag] if len(shown) >= lag else np.zeros_like(shown[0])

    returns, shown = play_cards(env_id, 50, 1, remember)
    np.testing.assert_allclose(returns, 1.0, rtol=0, atol=1e-12)
    for lag in (k - 1, k + 1):
        assert play_cards(env_id, 50, 1, lambda shown, lag=lag: remember(shown, lag))[0].mean() < -0.3
    counts = (shown[..., None] == np.arange(4)).sum(0)  # [B, 4]
    assert (counts == 13 * decks).all()


@pytest.mark.parametrize(("env_id", "rule"), CARDS.items())
def test_card_policies_without_memory(env_id, rule):
    """Chance is -0.5, and naming another suit than the one shown is the best that a look at one card gives."""
    _, decks = rule
    rng = np.random.default_rng(0)
    random, _ = play_cards(env_id, 8000, 2, lambda shown: rng.integers(0, 4, 8000))
    other, _ = play_cards(env_id, 8000, 3, lambda shown: (shown[-1] + 1) % 4)
    same, _ = play_cards(env_id, 8000, 4, lambda shown: shown[-1])
    for returns, probability in ((random, 1 / 4), (other, 13 * decks / (52 * decks - 1))):
        assert abs(returns.mean() - (2 * probability - 1)) < 4 * returns.std() / np.sqrt(8000)
    assert same.mean() < random.mean() < other.mean()
    suits = np.arange(52 * decks) % 4
    chances = [[np.mean(np.delete(suits, card) == suit) for suit in range(4)] for card in range(4)]
    assert MEMORYLESS_CEILING[env_id] == pytest.approx(2 * np.max(chances, axis=1).mean() - 1, abs=6e-4)


def test_every_deal_is_another():
    envs, first = make("RepeatPreviousEasy-v0", 6, 1)
    decks = []
    for _ in range(3):
        suits = [first]
        for _ in range(51):
            suits.append(envs.step(np.zeros(6, int))[0])
        first = envs.step(np.zeros(6, int))[0]  # the next deal
        decks += list(np.array(suits).T)
    assert len({tuple(deck) for deck in decks}) == 18
    assert all(np.bincount(deck).tolist() == [13] * 4 for deck in decks)


def walk(envs, actions, num_envs):
    """Step once with the same action everywhere."""
    return envs.step(np.full(num_envs, actions))


@pytest.mark.parametrize(("env_id", "length"), MAZES.items())
def test_turning_where_the_cue_points_earns_one(env_id, length):
    envs, obs = make_vec(env_id, 40, seed=1)
    cue = obs[:, 0].numpy().copy()
    assert set(cue) == {-1.0, 1.0}
    for _ in range(length):
        rows = envs.step(torch.full((40, 1), FORWARD)).numpy()
        assert not rows[:, [0, *range(2, 7)]].any()  # no cue, no reward, no end
    assert (rows[:, 1] == 1).all()
    follow = np.where(cue > 0, UP, DOWN)
    follow[0] = UP + DOWN - follow[0]  # one turns the wrong way
    rows = envs.step(torch.from_numpy(follow)[:, None]).numpy()[:, 2:]
    expected = np.ones(40)
    expected[0] = -1
    np.testing.assert_array_equal(rows[:, REWARD], expected)
    np.testing.assert_array_equal(rows[:, EPISODE_RETURN], expected)
    np.testing.assert_array_equal(rows[:, EPISODE_LENGTH], length + 1)
    assert rows[:, TERMINATED].all() and not rows[:, TRUNCATED].any()
    assert envs.reward_threshold == 0.95


def test_no_maze_policy_without_memory_earns_more_than_nothing():
    """All 81 maps from the four observations to the three actions, under both cues, to the end of the episode."""
    seen = [(1, 0), (-1, 0), (0, 0), (0, 1)]
    policies = np.array(list(itertools.product(range(3), repeat=4))).repeat(2, axis=0)  # [162, 4]
    envs, _ = make("TMaze10-v0", 162, 1)
    envs.cue[:] = np.tile([1.0, -1.0], 81)
    obs = envs.observe()
    returns, running, lengths = np.zeros(162), np.ones(162, bool), np.zeros(162, int)
    for _ in range(60):
        column = [seen.index(tuple(o)) for o in obs.astype(int).tolist()]
        obs, rewards, terminated, truncated, _ = envs.step(policies[np.arange(162), column])
        returns += rewards * running
        lengths += running
        assert (rewards[truncated] == 0).all() and not (terminated & truncated).any()
        running &= ~(terminated | truncated)
    assert not running.any()
    assert set(lengths) == {11, 12, 60}
    assert set(returns) == {-1.0, 0.0, 1.0}
    assert (returns.reshape(81, 2).mean(1) == MEMORYLESS_CEILING["TMaze10-v0"]).all()


@pytest.mark.parametrize(("env_id", "length"), MAZES.items())
def test_random_turns_earn_nothing_on_average(env_id, length):
    envs, _ = make(env_id, 2000, 3)
    rng = np.random.default_rng(0)
    returns, running = np.zeros(2000), np.ones(2000, bool)
    for _ in range(4 * length + 20):
        _, rewards, terminated, truncated, _ = envs.step(rng.integers(0, 3, 2000))
        returns += rewards * running
        running &= ~(terminated | truncated)
    assert np.mean(returns != 0) > 0.9
    assert abs(returns.mean()) < 4 / np.sqrt(2000)


def test_the_maze_shows_the_cue_once_and_ends_in_time():
    """An agent that stays, or arrives and does not turn, sees no cue again and is stopped after 4 N + 20 steps."""
    for action in (UP, DOWN, FORWARD):
        envs, obs = make("TMaze10-v0", 5, 1)
        assert (abs(obs[:, 0]) == 1).all()
        for t in range(1, 61):
            obs, rewards, terminated, truncated, _ = walk(envs, action, 5)
            assert not obs[:, 0].any() and not rewards.any() and not terminated.any()
            assert (obs[:, 1] == (action == FORWARD and t >= 10)).all()
            assert truncated.all() == truncated.any() == (t == 60)
    envs, _ = make("TMaze10-v0", 1, 1)
    for action in [UP, FORWARD] * 10 + [FORWARD] * 39:
        obs, *_ = walk(envs, action, 1)
    _, rewards, terminated, truncated, _ = walk(envs, UP, 1)  # a turn in the last step is the end of the task
    assert abs(rewards[0]) == 1 and terminated[0] and not truncated[0]


@pytest.mark.parametrize("env_id", ["RepeatPreviousEasy-v0", "TMaze10-v0"])
def test_the_step_after_the_end_starts_anew_and_ignores_the_action(env_id):
    results = []
    for late_action in (0, 1):
        envs, _ = make(env_id, 64, 5)
        rng, log, starts = np.random.default_rng(1), [], 0
        was_done = np.zeros(64, bool)
        for _ in range(400):
            actions = np.where(was_done, late_action, rng.integers(0, envs.single_action_space.n, 64))
            obs, rewards, terminated, truncated, _ = envs.step(actions)
            assert not rewards[was_done].any() and not (terminated | truncated)[was_done].any()
            if env_id == "TMaze10-v0":
                np.testing.assert_array_equal(obs[:, 0] != 0, was_done)
            starts += was_done.sum()
            was_done = terminated | truncated
            log.append(np.column_stack((obs, rewards, terminated, truncated)))
        results.append(np.array(log))
        assert starts > 300
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("env_id", [*CARDS, *MAZES, "CartPoleNoVelocity-v0"])
def test_seeds(env_id):
    """One seed, one history, different in each environment; another seed, another history."""

    def history(seed, num_steps=150):
        envs, obs = make(env_id, 16, seed)
        rng, shape = np.random.default_rng(0), (16, -1)
        history = [obs.reshape(shape)]
        for _ in range(num_steps):
            obs, rewards, *_ = envs.step(np.full(16, rng.integers(envs.single_action_space.n)))
            history.append(np.column_stack((obs.reshape(shape), rewards))[:, : history[0].shape[1]])
        return np.array(history)

    first, again, other = history(1), history(1), history(2)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first != first[:, :1]).any(axis=(0, 2)).sum() >= 3


@pytest.mark.parametrize("env_id", ["RepeatPreviousMedium-v0", "TMaze10-v0"])
def test_the_single_environment_is_the_vector_of_one(env_id):
    env, (envs, expected) = gym.make(env_id), make(env_id, 1, 7)
    check_env(env.unwrapped, skip_render_check=True)
    obs, _ = env.reset(seed=7)
    rng, ends = np.random.default_rng(2), 0
    np.testing.assert_array_equal(obs, expected[0])
    for _ in range(500):
        action = rng.integers(env.action_space.n)
        step, expected = env.step(action), envs.step(np.array([action]))
        for a, b in zip(step[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(a, b[0])
        if step[2] or step[3]:
            ends += 1
            np.testing.assert_array_equal(env.reset()[0], envs.step(np.array([0]))[0][0])
    assert ends >= 4


def test_hidden_velocities():
    """CartPole-v1 with the same seed and actions, of which position and angle remain, up to the limit of 500 steps."""
    envs, obs = make("CartPoleNoVelocity-v0", 8, 3)
    full, full_obs = make("CartPole-v1", 8, 3)
    assert envs.single_observation_space.shape == envs.observation_space.shape[1:] == obs.shape[1:] == (2,)
    rng, lengths = np.random.default_rng(0), np.zeros(8, int)
    truncations = 0
    for t in range(1300):
        np.testing.assert_array_equal(obs, full_obs[:, [0, 2]])
        assert envs.observation_space.contains(obs)
        balance = (full_obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0).astype(int)
        actions = balance if t < 600 else rng.integers(0, 2, 8)
        obs, *rest = envs.step(actions)
        full_obs, *expected = full.step(actions)
        for a, b in zip(rest[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(a, b)
        lengths += 1
        assert (lengths[rest[2]] == 500).all()
        truncations += rest[2].sum()
        lengths[rest[1] | rest[2]] = -1  # the step that resets counts for no episode
    assert truncations == 8
    assert make_vec("CartPoleNoVelocity-v0", 2, 1)[0].reward_threshold == 475.0


def test_hidden_velocities_of_a_single_environment():
    env, full = gym.make("CartPoleNoVelocity-v0"), gym.make("CartPole-v1")
    obs, full_obs = env.reset(seed=3)[0], full.reset(seed=3)[0]
    for t in range(500):
        np.testing.assert_array_equal(obs, full_obs[[0, 2]])
        action = int(full_obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0)
        obs, reward, terminated, truncated, _ = env.step(action)
        full_obs = full.step(action)[0]
        assert (reward, terminated, truncated) == (1.0, False, t == 499)
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", MEMORYLESS_CEILING)
def test_what_counts_as_solved_takes_memory(env_id):
    for vectorization in ("auto", "sync"):
        envs, obs = make_vec(f"envs_shared.gym_tasks.memory:{env_id}", 2, 1, vectorization)
        assert envs.reward_threshold > MEMORYLESS_CEILING[env_id] + 0.9
        assert obs.shape == (2, envs.obs_dim)
