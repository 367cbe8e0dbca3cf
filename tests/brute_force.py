"""Slow and plain computations that several tests compare with."""

import itertools

import numpy as np
import torch

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
