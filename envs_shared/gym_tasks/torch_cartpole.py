"""CartPole-v1 in torch: thousands of environments in a few kernels, on any device and inside CUDA graphs.

Same dynamics, rewards, limits and NEXT_STEP autoreset as gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983),
behind the interface that vector.py describes. The state is updated in place and nothing waits for the host.
"""

import math

import gymnasium as gym
import numpy as np
import torch

from envs_shared.gym_tasks.columns import NUM_EXTRA

GRAVITY, MASS_POLE, MASS_TOTAL, HALF_LENGTH, FORCE, TAU = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02  # SI units
X_LIMIT, THETA_LIMIT = 2.4, math.radians(12)  # metres, radians


def cartpole_dynamics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """One Euler step of `state` [B, 4] (x, x', theta, theta') under `action` [B] in {0: left, 1: right}."""
    _, x_dot, theta, theta_dot = state.unbind(-1)
    cos, sin = theta.cos(), theta.sin()
    force = FORCE * (2.0 * action.to(state.dtype) - 1.0)
    push = (force + MASS_POLE * HALF_LENGTH * theta_dot.square() * sin) / MASS_TOTAL
    theta_acc = (GRAVITY * sin - cos * push) / (
        HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * cos.square() / MASS_TOTAL)
    )
    x_acc = push - MASS_POLE * HALF_LENGTH * theta_acc * cos / MASS_TOTAL
    return state + TAU * torch.stack((x_dot, x_acc, theta_dot, theta_acc), -1)


class TorchCartPole:
    """`num_envs` CartPole-v1 environments on `device`; random numbers come from torch's generator of that device."""

    env_id = "CartPole-v1"
    same_step = False
    on_device = True
    reward_threshold = 475.0
    obs_dim = 4
    image_shape, obs_dtype, obs_scale = None, torch.float32, 1.0
    num_columns = obs_dim + NUM_EXTRA

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", max_episode_steps: int = 500):
        high = np.array([2 * X_LIMIT, np.inf, 2 * THETA_LIMIT, np.inf], dtype=np.float32)
        self.single_observation_space = gym.spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.state = torch.zeros(num_envs, 4, device=device)  # [B, 4]
        self.steps = torch.zeros(
            num_envs, device=device
        )  # [B] steps of the running episode, equal to its return
        self.done = torch.zeros(num_envs, dtype=torch.bool, device=device)  # [B] the next step resets
        self.rows = torch.zeros(
            num_envs, self.num_columns, device=device
        )  # [B, num_columns] of the last step

    def reset(self, seed: int) -> torch.Tensor:
        """Start new episodes and return their observations [B, 4]; seeds torch's generator of the device."""
        torch.manual_seed(seed)
        self.state.uniform_(-0.05, 0.05)
        self.steps.zero_()
        self.done.zero_()
        self.rows.zero_()
        self.rows[:, : self.obs_dim] = self.state
        return self.state.clone()

    def step(self, actions: torch.Tensor) -> torch.Tensor:
        """Step with actions [B, 1] and return the packed rows [B, num_columns]."""
        was_done = self.done.clone()
        start = torch.empty_like(self.state).uniform_(-0.05, 0.05)
        state = torch.where(was_done[:, None], start, cartpole_dynamics(self.state, actions[:, 0]))
        reward = 1.0 - was_done.float()
        steps = (self.steps + 1.0) * reward
        terminated = ((state[:, 0].abs() > X_LIMIT) | (state[:, 2].abs() > THETA_LIMIT)) & ~was_done
        truncated = steps >= self.max_episode_steps
        done = terminated | truncated
        ended_length = steps * done
        self.state.copy_(state)
        self.steps.copy_(steps)
        self.done.copy_(done)
        columns = (reward, terminated.float(), truncated.float(), ended_length, ended_length)
        self.rows.copy_(torch.cat((state, torch.stack(columns, -1)), -1))
        return self.rows

    def mutable_tensors(self) -> list[torch.Tensor]:
        """The tensors that `step` changes in place."""
        return [self.state, self.steps, self.done, self.rows]

    def state_dict(self) -> list[torch.Tensor]:
        """Copies of the state's tensors, on the CPU."""
        return [x.cpu().clone() for x in self.mutable_tensors()]

    def load_state_dict(self, state: list[torch.Tensor]) -> None:
        """Restore what `state_dict` returned; None, from a checkpoint without it, changes nothing."""
        for x, saved in zip(self.mutable_tensors(), state or self.mutable_tensors(), strict=True):
            x.copy_(saved)

    def close(self) -> None:
        """Nothing to release."""
