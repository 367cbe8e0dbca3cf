"""Slow and plain computations that several tests compare with."""

import itertools

import numpy as np
import torch

from algos import ppo
from envs_shared import tsplib


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def brute_force_advantages(rewards, values, next_values, terminated, truncated, gamma, lam):
    """Sum (gamma lambda)^k delta_{t+k} up to the end of the episode or of the data, straight from eq. 11."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            future = 0.0 if terminated[k] else next_values[k]
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * future - values[k])
            if terminated[k] or truncated[k]:
                break
        advantages.append(total)
    return np.array(advantages)


def compare_rollout(agent, storage, batch, b, steps, center=0.0, scale=1.0, reward_scale=1.0):
    """Compare a rollout of PPO with all steps that environment b has made; return how many episodes ended.

    A step is (obs, action, reward, next_obs, terminated, truncated). Gamma is 0.9 and lambda 0.8.
    """
    # The batch has the rows of all steps that do not just reset, in the order of the storage
    is_trained = np.asarray(storage.lengths)[1:] > 0
    rows = torch.tensor((np.cumsum(is_trained) - 1).reshape(is_trained.shape)[is_trained[:, b], b])
    last_steps = zip(*steps[-len(rows) :], strict=True)
    obs, actions, rewards, next_obs, terminated, truncated = map(np.array, last_steps)
    obs, next_obs = ((x - center) / scale for x in (obs, next_obs))
    inputs = (torch.tensor(x, dtype=torch.float32) for x in (obs, next_obs))
    values, next_values = (agent.critic(x)[:, 0].detach().numpy() for x in inputs)
    advantages = brute_force_advantages(
        rewards / reward_scale, values, next_values, terminated, truncated, 0.9, 0.8
    )
    assert_close(batch.obs[rows], obs)
    np.testing.assert_array_equal(ppo.Agent.to_env(agent, batch.actions[rows]), actions)
    assert_close(batch.values[rows], values)
    assert_close(batch.advantages[rows], advantages)
    assert_close(batch.returns[rows], advantages + values)
    # Sums over the episodes that ended in the rollout
    episodes = [[]]
    for _, _, reward, _, terminated, truncated in steps:
        episodes[-1].append(reward)
        if terminated or truncated:
            episodes.append([])
    ends = np.flatnonzero(storage.terminated[1:, b] | storage.truncated[1:, b])
    ended = episodes[:-1][-len(ends) :]
    assert storage.lengths[1:][ends, b].tolist() == [len(x) for x in ended]
    assert_close(storage.episode_returns[1:][ends, b], [sum(x) for x in ended])
    discounted = [sum(0.9**k * r for k, r in enumerate(reversed(x))) for x in ended]
    assert_close(storage.discounted[1:][ends, b], discounted)
    return len(ends)


def solve_exactly(points, distance=tsplib.euclidean):
    """Return the length of the shortest tour of points [N, 2] by dynamic programming (Held and Karp 1962)."""
    points = torch.as_tensor(points, dtype=torch.float64)
    d = distance(points[:, None], points[None]).numpy()
    m = len(points) - 1  # nodes but the one that tours begin with
    best = np.full((1 << m, m), np.inf)  # [subset of them, the last one that was visited]
    best[1 << np.arange(m), np.arange(m)] = d[0, 1:]
    subsets = np.arange(1 << m)
    sizes = sum(subsets >> j & 1 for j in range(m))
    for size, last in itertools.product(range(2, m + 1), range(m)):
        chosen = subsets[(sizes == size) & (subsets >> last & 1 == 1)]
        best[chosen, last] = (best[chosen ^ 1 << last] + d[1:, last + 1]).min(1)
    return (best[-1] + d[1:, 0]).min()
