"""The torch CartPole against gymnasium's own, step by step."""

import gymnasium as gym
import numpy as np
import torch

from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN, REWARD, TERMINATED, TRUNCATED
from envs_shared.gym_tasks.torch_cartpole import TorchCartPole
from envs_shared.gym_tasks.vector import make_vec


def test_every_step_agrees_with_gymnasium():
    """1,500 steps of 32 environments under random and balancing actions: observations, rewards, flags, episodes."""
    theirs, obs = make_vec("CartPole-v1", 32, seed=7)
    ours = TorchCartPole(32)
    ours.reset(0)
    rng = np.random.default_rng(3)
    num_terminated = num_truncated = 0
    ours.state.copy_(obs)
    for _ in range(1500):
        balance = (obs[:, 2] + 0.5 * obs[:, 3] + 0.02 * obs[:, 0] + 0.05 * obs[:, 1] > 0).numpy()
        random = rng.random(32) < np.linspace(0, 0.5, 32)
        actions = torch.tensor(np.where(random, rng.integers(0, 2, 32), balance))[:, None]
        resets = ours.done.clone()
        expected, found = theirs.step(actions), ours.step(actions)
        found[resets, :4] = expected[resets, :4]  # starts are random in both
        np.testing.assert_allclose(found[:, :4], expected[:, :4], rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(found[:, 4:], expected[:, 4:])
        num_terminated += expected[:, 4 + TERMINATED].sum()
        num_truncated += expected[:, 4 + TRUNCATED].sum()
        obs = expected[:, :4].clone()
        ours.state.copy_(obs)  # compare single steps, not the chaos of trajectories
    assert num_terminated > 30 and num_truncated > 20


def test_resets_draw_the_start_from_the_same_box_and_count_nothing():
    envs = TorchCartPole(20_000)
    start = envs.reset(1)
    assert start.abs().max() <= 0.05 and start.std(0).sub(0.1 / 12**0.5).abs().max() < 1e-3
    envs.done.fill_(True)
    rows = envs.step(torch.ones(20_000, 1, dtype=torch.int64))
    assert rows[:, :4].abs().max() <= 0.05 and rows[:, 4:].abs().max() == 0
    assert not torch.equal(rows[:, :4], start)
    rows = envs.step(torch.ones(20_000, 1, dtype=torch.int64))
    assert (rows[:, 4 + REWARD] == 1).all() and (envs.steps == 1).all()
    assert rows[:, 4 + EPISODE_RETURN].sum() == rows[:, 4 + EPISODE_LENGTH].sum() == 0


def test_spaces_are_gymnasiums():
    envs, real = TorchCartPole(2), gym.make("CartPole-v1")
    assert envs.single_observation_space == real.observation_space
    assert envs.single_action_space == real.action_space
    assert envs.reward_threshold == real.spec.reward_threshold
    assert envs.max_episode_steps == real.spec.max_episode_steps
