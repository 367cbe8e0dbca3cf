"""Stable-Baselines3's PPO on CartPole-v1 with the tuned settings of RL Baselines3 Zoo, timed in CPU-seconds.

Prints one line of JSON: {"solved_step", "solved_cpu_seconds", "curve": [[step, cpu_seconds, mean of last 20], ...]}.
Settings: https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml, entry CartPole-v1.
"""

import argparse
import json
import time

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

CPU_START = time.process_time()  # after imports, as for ours
THRESHOLD, TOTAL_TIMESTEPS = 475.0, 100_000


class UntilSolved(BaseCallback):
    """Record the mean of the last 20 training episodes after each rollout; stop once it reaches the threshold."""

    def __init__(self):
        super().__init__()
        self.curve, self.solved = [], False

    def _on_step(self) -> bool:
        return not self.solved

    def _on_rollout_end(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer][-20:]
        if returns:
            self.curve.append([self.num_timesteps, time.process_time() - CPU_START, float(np.mean(returns))])
            self.solved = len(returns) == 20 and self.curve[-1][2] >= THRESHOLD


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    return parser


def main() -> None:
    seed = make_parser().parse_args().seed
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda remaining: 0.001 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=seed,
        device="cpu",
    )
    callback = UntilSolved()
    model.learn(TOTAL_TIMESTEPS, callback=callback)
    step, seconds, _ = callback.curve[-1] if callback.solved else (None, None, None)
    print(json.dumps({"solved_step": step, "solved_cpu_seconds": seconds, "curve": callback.curve}))


if __name__ == "__main__":
    main()
