"""Running statistics of what environments return, and actions in units of their box: modules with a state to save."""

import gymnasium as gym
import torch
import torch.distributed as dist
from torch import nn


def sum_over_processes(x: torch.Tensor) -> torch.Tensor:
    """Sum `x` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class RunningMeanStd(nn.Module):
    """Mean and variance of everything seen, merged batch by batch (Chan et al. 1979), in float64."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        """Merge the rows of `x` [..., *shape] where `valid` [...] is 1, over all processes."""
        x = x.double()
        weight = valid.double().reshape(*valid.shape, *[1] * self.mean.dim())
        batch_dims = tuple(range(valid.dim()))
        n = sum_over_processes(weight.sum())
        mean = sum_over_processes((x * weight).sum(batch_dims)) / n.clamp(min=1)
        squares = sum_over_processes(((x - mean).square() * weight).sum(batch_dims))
        total = (self.count + n).clamp(min=1)
        delta = mean - self.mean
        self.var.copy_((self.var * self.count + squares + delta.square() * self.count * n / total) / total)
        self.mean.add_(delta * n / total)
        self.count.add_(n)

    def get_std(self) -> torch.Tensor:
        """The running deviation [*shape], float32."""
        return (self.var + 1e-8).sqrt().float()

    def get_rms(self) -> torch.Tensor:
        """The running root mean square [*shape], float32."""
        return (self.var + self.mean.square()).sqrt().clamp(min=1e-8).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., *shape] in running deviations from the running mean, 10 at most."""
        return ((x - self.mean.float()) / self.get_std()).clamp(-10.0, 10.0)


class RewardScaler(nn.Module):
    """Divides rewards by the running deviation of the discounted return, which begins anew with each episode."""

    def __init__(self, num_envs: int, gamma: float):
        super().__init__()
        self.gamma = gamma
        self.stats = RunningMeanStd()
        self.register_buffer("running_return", torch.zeros(num_envs))  # [B] of the episodes that go on

    def forward(self, rewards: torch.Tensor, done: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Scale the rewards of T steps [T, B], to 10 at most; `done` ends episodes, `valid` marks what counts."""
        returns = torch.empty_like(rewards)
        for t in range(len(rewards)):
            self.running_return.mul_(self.gamma).add_(rewards[t])
            returns[t] = self.running_return
            self.running_return.mul_(~done[t])
        self.stats.update(returns, valid)
        return (rewards / self.stats.get_std()).clamp(-10.0, 10.0)

    def load_state_dict(self, state: dict, *args, **kwargs):
        """Restore a state; with another number of environments the running returns begin anew."""
        if state["running_return"].shape != self.running_return.shape:
            state = state | {"running_return": torch.zeros_like(self.running_return)}
        return super().load_state_dict(state, *args, **kwargs)


class BoxUnits(nn.Module):
    """From actions in units of a box, 0 its centre and -1 and 1 its sides, to actions inside it.

    Components without two finite sides are left in units of their own, and only cut off where there is a side.
    """

    def __init__(self, space: gym.spaces.Box):
        super().__init__()
        low, high = (torch.as_tensor(x, dtype=torch.float32).flatten() for x in (space.low, space.high))
        is_finite = low.isfinite() & high.isfinite()
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        self.register_buffer("center", torch.where(is_finite, low / 2 + high / 2, 0.0), persistent=False)
        self.register_buffer("scale", torch.where(is_finite, high / 2 - low / 2, 1.0), persistent=False)

    def forward(self, actions: torch.Tensor) -> torch.Tensor:
        """Actions [..., A] of a policy to actions [..., A] of the environment."""
        return (self.center + self.scale * actions).clamp(self.low, self.high)
