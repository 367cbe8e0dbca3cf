"""Scores of episodes: of those that end in training, and of those that a policy plays to be evaluated."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from tqdm import tqdm

from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN, REWARD

MAX_STEPS = 10_000  # of an evaluated episode, for environments without a time limit
WINDOW = 1_000  # steps that a return counts where episodes do not end


class EpisodeScores:
    """Scalars of the episodes that ended in a rollout, and the mean return of the last twenty, with a state to save."""

    def __init__(self):
        self.recent_returns: list[float] = []

    def summarize(self, episodes: torch.Tensor) -> dict[str, float]:
        """Scalars by tag, or {} where no episode ended.

        `episodes` [..., 2] holds return and length of an episode where one ended, and zeros elsewhere.
        """
        episodes = episodes[episodes[..., 1] > 0]  # [E, 2]
        if len(episodes) == 0:
            return {}
        self.recent_returns = (self.recent_returns + episodes[:, 0].tolist())[-20:]
        mean_return, mean_length = episodes.mean(0).tolist()
        return {
            "charts/episodic_return": mean_return,
            "charts/episodic_length": mean_length,
            "charts/return_last_20": float(np.mean(self.recent_returns)),
        }

    def state_dict(self) -> list[float]:
        """The last returns."""
        return self.recent_returns

    def load_state_dict(self, state: list[float]) -> None:
        """Restore what `state_dict` returned."""
        self.recent_returns = state


class EndlessScores:
    """Returns of every 1,000 steps, for environments of which no episode has ended yet, with a state to save."""

    def __init__(self):
        self.total = 0.0
        self.num_steps: float = 0  # minus infinity once an episode has ended

    def summarize(self, extra: torch.Tensor) -> dict[str, float]:
        """The mean return of the last 1,000 steps, by tag, once in as many; else {}.

        `extra` [T, B, NUM_EXTRA] holds the columns of T steps.
        """
        if (extra[..., EPISODE_LENGTH] > 0).any():
            self.num_steps = -np.inf
        self.total += extra[..., REWARD].sum(0).mean().item()
        self.num_steps += len(extra)
        if self.num_steps < WINDOW:
            return {}
        mean_return = self.total * WINDOW / self.num_steps
        self.total = 0.0
        self.num_steps = 0
        return {"charts/return_1000_steps": mean_return}

    def state_dict(self) -> dict[str, float]:
        """Both counters."""
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        vars(self).update(state)


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Inside, random numbers of torch on the CPU, of numpy and of Python are those of `seed`; outside, as if not."""
    kept = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed those of GPUs, too
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(kept[0])
        random.setstate(kept[1])


def play_episodes(
    envs, policy: Callable[[torch.Tensor], torch.Tensor], num_episodes: int
) -> dict[str, float]:
    """Mean and deviation of the returns and mean length of episodes under `policy`, from [B, D] to actions [B, A].

    Each environment plays the same number of them, give or take one, so that short ones are not favoured. An episode
    that has not ended after 10,000 steps is cut off, counts with its return so far and is its environment's last; the
    number of these is printed. A progress bar shows after some seconds. Closes `envs`.
    """
    quota = num_episodes // envs.num_envs + (np.arange(envs.num_envs) < num_episodes % envs.num_envs)
    episodes = []
    num_cut = 0
    bar = tqdm(desc="evaluation", unit="step", delay=3, leave=False)
    while (quota > 0).any():
        bar.update(envs.num_envs)
        extra = envs.step(policy(envs.rows[:, : envs.obs_dim]))[:, envs.obs_dim :].numpy()
        ended = (extra[:, EPISODE_LENGTH] > 0) & (quota > 0)
        quota[ended] -= 1
        episodes.extend(extra[ended, EPISODE_RETURN : EPISODE_LENGTH + 1].tolist())
        is_cut = (envs.envs.episode_lengths >= MAX_STEPS) & (quota > 0) & ~ended
        if is_cut.any():
            quota[is_cut] = 0
            num_cut += is_cut.sum()
            episodes += np.stack((envs.envs.episode_returns, envs.envs.episode_lengths), 1)[is_cut].tolist()
    if num_cut > 0:
        print(f"{num_cut} episodes were cut off in evaluation and count with their return so far")
    envs.close()
    returns, lengths = np.array(episodes).T
    return {
        "eval/episodic_return": float(returns.mean()),
        "eval/episodic_return_std": float(returns.std()),
        "eval/episodic_length": float(lengths.mean()),
    }
