"""The memory tasks: oracles, and brute force over policies without memory."""

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


def test_the_single_maze_is_the_vector_of_one():
    """The step after an end begins an episode, and ignores its action."""
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
            obs, *rest, _ = envs.step(np.array([UP]))
            np.testing.assert_array_equal(env.reset()[0], obs[0])
            assert obs[0, 0] and not np.any(rest)  # a cue, no reward, no end
    assert ends >= 4


def test_hidden_velocities():
    """CartPole-v1 with the same seed and actions, reduced to position and angle, up to the limit of steps."""
    envs, obs = make("CartPoleNoVelocity-v0", 8, 3)
    full = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")
    full_obs, _ = full.reset(seed=3)
    np.testing.assert_array_equal(obs, full_obs[:, [0, 2]])
    for t in range(500):
        balance = (full_obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0).astype(int)
        obs, *rest, _ = envs.step(balance)
        full_obs, *expected, _ = full.step(balance)
        np.testing.assert_equal([obs, *rest], [full_obs[:, [0, 2]], *expected])
        assert rest[2].all() == (t == 499)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 9, 13])
def test_the_hint_is_in_view_at_the_forced_start(size):
    """The agent begins beside it, at the closed end, and looks along the hallway. Observations are bits."""
    pytest.importorskip("minigrid")
    env = gym.make(f"envs_shared.memory_tasks:MiniGrid-MemoryForcedS{size}-v0")
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        plain = env.unwrapped
        assert obs.shape == (984,) and obs.dtype == np.uint8
        np.testing.assert_array_equal(obs[:4], np.eye(4)[plain.agent_dir])
        assert (*plain.agent_pos,) == (1, size // 2)
        image = plain.gen_obs()["image"]
        hint = plain.grid.get(1, size // 2 - 1)
        assert hint.type in ("key", "ball")
        x, y = plain.relative_coords(1, size // 2 - 1)
        assert image[x, y, 0] == {"key": 5, "ball": 6}[hint.type]
        assert obs[4:].reshape(7, 7, 20)[x, y, image[x, y, 0]] == 1
