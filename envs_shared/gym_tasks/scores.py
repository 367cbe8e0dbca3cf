"""Scores of episodes: of those that end in training, and of those that a policy plays to be evaluated."""

from collections.abc import Callable

import numpy as np
import torch

from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN

MAX_STEPS = 10_000  # of an evaluated episode, for environments without a time limit


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


def play_episodes(envs, policy: Callable[[torch.Tensor], torch.Tensor], num_episodes: int) -> dict[str, float]:
    """Mean and deviation of the returns and mean length of episodes under `policy`, from [B, D] to actions [B, A].

    Each environment plays the same number of them, give or take one, so that short ones are not favoured. Episodes that
    have not ended after 10,000 steps are cut off, count with their return so far, and are spoken of. Closes `envs`.
    """
    quota = num_episodes // envs.num_envs + (np.arange(envs.num_envs) < num_episodes % envs.num_envs)
    episodes = []
    for _ in range(MAX_STEPS * quota.max()):
        if not quota.any():
            break
        extra = envs.step(policy(envs.rows[:, : envs.obs_dim]))[:, envs.obs_dim :].numpy()
        ended = (extra[:, EPISODE_LENGTH] > 0) & (quota > 0)
        quota[ended] -= 1
        episodes.extend(extra[ended, EPISODE_RETURN : EPISODE_LENGTH + 1].tolist())
    if quota.any():
        print(f"{(quota > 0).sum()} episodes were cut off in evaluation and count with their return so far")
        episodes += np.stack((envs.envs.episode_returns, envs.envs.episode_lengths), 1)[quota > 0].tolist()
    envs.close()
    returns, lengths = np.array(episodes).T
    return {
        "eval/episodic_return": float(returns.mean()),
        "eval/episodic_return_std": float(returns.std()),
        "eval/episodic_length": float(lengths.mean()),
    }
