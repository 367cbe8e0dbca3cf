"""Proximal Policy Optimization (PPO) for discrete and continuous actions, in one file.

Papers: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347);
Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE" (arXiv:1506.02438).

    python algos/ppo.py                                    # first run: CartPole-v1, seconds on one core
    python algos/ppo.py --env-id HalfCheetah-v5 --norm-obs --norm-reward --total-timesteps 1000000 \
        --num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10 \
        --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95   # full size, continuous control
    torchrun --nproc-per-node 2 algos/ppo.py               # several GPUs (or CPU processes)

What is computed, numbered as in the PPO paper:

    (5)   L^KLPEN = E[ ratio_t A_t - beta KL(pi_old, pi) ]                     --kl-coef beta
    (6)   ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)
    (7)   L^CLIP  = E[ min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t) ] --clip-coef eps
    (9)   L       = E[ L^CLIP - c1 (V(s_t) - R_t)^2 / 2 + c2 entropy(pi(. | s_t)) ]
    (11)  A_t     = delta_t + (gamma lambda) delta_{t+1} + ... to the end of the episode
    (12)  delta_t = r_t + gamma V(s_{t+1}) - V(s_t), with V(s_{t+1}) = 0 only where s_{t+1} is terminal

Shapes: T time steps of a rollout, B parallel environments, D flattened observation, A action components.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "gymnasium>=1.4", "tyro>=0.9", "tensorboard>=2.18",
#     "wandb>=0.19", "tqdm>=4.66", "matplotlib>=3.9", "pillow>=10.0",
# ]
# ///

import importlib.util
import io
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: a second, kept out of the timings
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]  # for envs_shared, and for your own environments
from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN, NUM_EXTRA, REWARD, TERMINATED, TRUNCATED
from envs_shared.gym_tasks.plain_state import get_plain_state, set_plain_state
from envs_shared.gym_tasks.vector import make_vec

SCRIPT = "ppo"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


@dataclass
class Args:
    """PPO on any gymnasium environment with flat observations."""

    # Experiment, logging and checkpoints
    exp_name: str = SCRIPT
    """name of this experiment, part of the run folder's name"""
    seed: int = 1
    """seed of every source of randomness"""
    torch_deterministic: bool = True
    """choose deterministic kernels on CUDA (the CPU ones always are)"""
    cuda: bool = True
    """train on CUDA where there is a GPU"""
    torch_threads: int = 1
    """CPU threads of torch; one is fastest for small networks, more than the free cores is far slower"""
    run_dir: str = "runs"
    """folder that holds the run folders"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline works)"""
    wandb_project_name: str = "reference-rl"
    """project at Weights & Biases"""
    wandb_entity: str | None = None
    """team at Weights & Biases"""
    capture_video: bool = False
    """record episodes of environment 0 into the run folder (without vectorization of its own)"""
    resume: str | None = None
    """checkpoint.pt to go on from, with its settings; other flags given here override them"""
    evaluate: str | None = None
    """checkpoint.pt to evaluate, without training"""
    checkpoint_interval: int = 10
    """iterations between checkpoints (0: only at the end)"""
    eval_interval: int = 0
    """iterations between evaluations (0: only at the end)"""
    eval_episodes: int = 100
    """episodes of an evaluation"""
    compile: bool = False
    """compile the hot functions with torch.compile (pays on long runs)"""
    cuda_graphs: bool = True
    """on one CUDA device, replay the fixed-shape steps as CUDA graphs"""

    # Environment
    env_id: str = "CartPole-v1"
    """gymnasium id; `module:Name-v0` imports the module first"""
    vectorization: Literal["auto", "sync", "async", "torch"] = "auto"
    """auto: the environment's own vector form, else sync; torch: the port in envs_shared, on the device"""
    num_envs: int = 64
    """parallel environments N, over all processes"""

    # Algorithm
    total_timesteps: int = 100_000
    """environment steps to train on, over all environments; the last rollout is completed"""
    learning_rate: float = 4e-3
    """Adam's learning rate"""
    anneal_lr: bool = True
    """lower the learning rate linearly to zero"""
    num_steps: int = 32
    """steps T of each environment in a rollout"""
    gamma: float = 0.98
    """discount gamma"""
    gae_lambda: float = 0.9
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches of an epoch"""
    update_epochs: int = 5
    """epochs K over each rollout"""
    norm_adv: bool = True
    """normalize advantages within each minibatch"""
    norm_obs: bool = False
    """normalize observations by running mean and variance"""
    norm_reward: bool = False
    """divide rewards by the running deviation of the discounted return"""
    clip_coef: float = 0.2
    """clipping range epsilon of the surrogate, eq. 7"""
    clip_vloss: bool = False
    """clip the value update by clip_coef too"""
    ent_coef: float = 0.0
    """entropy coefficient c2, eq. 9"""
    vf_coef: float = 0.5
    """value coefficient c1, eq. 9"""
    max_grad_norm: float = 0.5
    """largest global norm of the gradient"""
    target_kl: float | None = None
    """stop the epochs of a rollout once the mean approx_kl of an epoch exceeds this"""
    kl_coef: float = 0.0
    """penalty beta of eq. 5; above zero it replaces the clipping of eq. 7"""


# ---- Networks --------------------------------------------------------------------------------------------------------


def layer_init(layer: nn.Linear, std: float = math.sqrt(2), bias_const: float = 0.0) -> nn.Linear:
    """Orthogonal weights of gain `std` and constant bias (Andrychowicz et al. 2021, section 3.2)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Tanh(nn.Module):
    """tanh(x) as 2 sigmoid(2 x) - 1, to an absolute error of 1e-7; far faster than torch.tanh on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * torch.sigmoid(2.0 * x) - 1.0


class RunningMeanStd(nn.Module):
    """Mean and variance of everything seen, merged batch by batch (Chan et al. 1979); saved with the model."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: torch.Tensor, valid: torch.Tensor) -> None:
        """Merge the rows of `x` [..., *shape] where `valid` [...] is 1, over all processes."""
        x, weight = x.double(), valid.double().reshape(*valid.shape, *[1] * self.mean.dim())
        batch_dims = tuple(range(valid.dim()))
        n = sum_over_ranks(valid.double().sum())
        mean = sum_over_ranks((x * weight).sum(batch_dims)) / n.clamp(min=1)
        squares = sum_over_ranks(((x - mean).square() * weight).sum(batch_dims))
        total = (self.count + n).clamp(min=1)
        delta = mean - self.mean
        self.var.copy_((self.var * self.count + squares + delta.square() * self.count * n / total) / total)
        self.mean.add_(delta * n / total)
        self.count.add_(n)


class Agent(nn.Module):
    """Separate actor and critic, two hidden tanh layers of 64 each.

    The actor's output is a row of policy parameters P: K x max(n) logits for K discrete components (padded to the
    largest and masked), or A means and A state-independent log deviations for a Box.
    """

    def __init__(self, obs_dim: int, action_space: gym.Space, norm_obs: bool = False):
        super().__init__()
        self.continuous = isinstance(action_space, gym.spaces.Box)
        if self.continuous:
            self.action_dim = num_outputs = math.prod(action_space.shape)
            self.actor_logstd = nn.Parameter(torch.zeros(num_outputs))
        else:
            sizes = torch.as_tensor(np.atleast_1d(getattr(action_space, "nvec", getattr(action_space, "n", None))))
            self.action_dim, num_outputs = len(sizes), len(sizes) * int(sizes.max())
            is_padding = torch.arange(int(sizes.max())) >= sizes[:, None]  # [K, max(n)]
            self.register_buffer("logit_mask", is_padding.float() * -1e8, persistent=False)

        def mlp(num_out: int, std: float) -> nn.Sequential:
            hidden = layer_init(nn.Linear(obs_dim, 64)), Tanh(), layer_init(nn.Linear(64, 64)), Tanh()
            return nn.Sequential(*hidden, layer_init(nn.Linear(64, num_out), std))

        self.critic, self.actor = mlp(1, 1.0), mlp(num_outputs, 0.01)
        self.obs_stats = RunningMeanStd((obs_dim,)) if norm_obs else None
        self.return_stats = RunningMeanStd(())

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations [..., D] in units of their running deviation, clipped to 10 of them, with --norm-obs."""
        if self.obs_stats is None:
            return obs
        mean, std = self.obs_stats.mean.float(), (self.obs_stats.var + 1e-8).sqrt().float()
        return ((obs - mean) / std).clamp(-10.0, 10.0)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V(s) [...] of observations [..., D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def get_policy_params(self, obs: torch.Tensor) -> torch.Tensor:
        """Policy parameters [..., P] at observations [..., D]."""
        out = self.actor(self.normalize(obs))
        return torch.cat((out, self.actor_logstd.expand_as(out)), -1) if self.continuous else out

    def get_distribution(self, policy_params: torch.Tensor) -> Normal | Categorical:
        """pi(. | s) of parameters [..., P], one factor per action component: batch shape [..., A]."""
        if self.continuous:
            mean, logstd = policy_params.chunk(2, -1)
            return Normal(mean, logstd.exp(), validate_args=False)
        logits = policy_params.unflatten(-1, self.logit_mask.shape) + self.logit_mask  # [..., K, max(n)]
        return Categorical(logits=logits, validate_args=False)

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        """Sample actions [B, A] at observations [B, D], without waiting for the device."""
        pi = self.get_distribution(self.get_policy_params(obs))
        if self.continuous:
            return pi.mean + pi.stddev * torch.randn_like(pi.mean)
        gumbel = -torch.empty_like(pi.logits).exponential_().log()
        return (pi.logits + gumbel).argmax(-1)  # Gumbel-max: a sample of softmax(logits)


# ---- Storage ---------------------------------------------------------------------------------------------------------


class RolloutStorage:
    """One rollout of T steps in B environments, preallocated on the training device.

    `rows[t + 1]` is what the environments answered at step t, and the named tensors are views into its columns. The
    last row of one rollout is the first row of the next.
    """

    def __init__(self, envs, agent: Agent, num_steps: int, device: torch.device):
        num_envs, obs_dim = envs.num_envs, envs.obs_dim
        self.rows = torch.zeros(num_steps + 1, num_envs, envs.num_columns, device=device)
        self.obs = self.rows[..., :obs_dim]  # [T + 1, B, D]
        extra = self.rows[1:, :, obs_dim:]
        self.rewards, self.terminated, self.truncated = (
            extra[..., i] for i in (REWARD, TERMINATED, TRUNCATED)
        )  # [T, B]
        self.episodes = extra[..., EPISODE_RETURN : EPISODE_LENGTH + 1]  # [T, B, 2] return and length where one ended
        self.final_obs = extra[..., NUM_EXTRA:] if envs.same_step else None  # [T, B, D]
        dtype = torch.float32 if agent.continuous else torch.int64
        self.actions = torch.zeros(num_steps, num_envs, agent.action_dim, dtype=dtype, device=device)  # [T, B, A]
        self.prev_done = torch.zeros(num_envs, dtype=torch.bool, device=device)  # [B] at the step before this rollout
        self.discounted_return = torch.zeros(num_envs, device=device)  # [B] of running episodes, for --norm-reward
        self.carried = [self.rows[-1], self.prev_done, self.discounted_return]  # what one rollout leaves to the next


# ---- PPO -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def collect_rollout(act, envs, storage: RolloutStorage) -> None:
    """Fill `storage` with T steps of the policy `act` (obs [B, D] -> actions [B, A])."""
    storage.rows[0].copy_(storage.rows[-1])
    for t in range(len(storage.actions)):
        storage.actions[t] = act(storage.obs[t])
        storage.rows[t + 1].copy_(envs.step(storage.actions[t]), non_blocking=True)


def find_valid(done: torch.Tensor, prev_done: torch.Tensor, same_step: bool) -> torch.Tensor:
    """Which rows are real transitions, [T, B] bool.

    With NEXT_STEP autoreset (gymnasium's default) the step after a done only resets: the environment ignores its
    action and its reward means nothing, so that row is no experience. With SAME_STEP every row is real. `done` [T, B]
    is terminated or truncated at step t, `prev_done` [B] at the step before the first row.
    """
    return torch.ones_like(done) if same_step else ~torch.cat((prev_done[None], done[:-1]))


def compute_gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float, final_values=None):
    """Generalized advantage estimation, eq. 11 and 12 (Schulman et al. 2016, eq. 16).

    A terminated episode is worth nothing after its end, a truncated one V of its last observation. With NEXT_STEP
    autoreset that is obs[t + 1]; with SAME_STEP it is final_obs, and `final_values` [T, B] holds its V where an episode
    ended. Where both flags are set, terminated wins.

    From rewards [T, B], values [T + 1, B] of all observations, terminated and truncated [T, B] bool to advantages
    [T, B] and returns [T, B] = advantages + values[:-1].
    """
    done = terminated | truncated
    next_values = values[1:] if final_values is None else torch.where(done, final_values, values[1:])
    delta = rewards + gamma * next_values * (~terminated) - values[:-1]  # eq. 12
    decay = gamma * gae_lambda * (~done)
    advantages = torch.empty_like(delta)
    last = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):  # eq. 11, from the end
        advantages[t] = last = delta[t] + decay[t] * last
    return advantages, advantages + values[:-1]


def discount_rewards(rewards: torch.Tensor, done: torch.Tensor, start: torch.Tensor, gamma: float) -> torch.Tensor:
    """Running sums G_t = gamma G_{t-1} + r_t [T, B] that begin anew after a done; `start` [B] is updated in place."""
    sums = torch.empty_like(rewards)
    for t in range(len(rewards)):
        sums[t] = start.mul_(gamma).add_(rewards[t])
        start.mul_(~done[t])
    return sums


@torch.no_grad()
def compute_targets(agent: Agent, storage: RolloutStorage, args: Args) -> None:
    """Add to `storage` what the update needs: valid rows, old policy and log-probs, values, advantages, returns."""
    terminated, truncated = storage.terminated.bool(), storage.truncated.bool()
    done = terminated | truncated
    storage.valid = find_valid(done, storage.prev_done, same_step=storage.final_obs is not None).float()  # [T, B]
    storage.prev_done.copy_(done[-1])
    rewards = storage.rewards * storage.valid
    if args.norm_reward:
        sums = discount_rewards(rewards, done, storage.discounted_return, args.gamma)
        agent.return_stats.update(sums, storage.valid)
        rewards = (rewards / (agent.return_stats.var + 1e-8).sqrt().float()).clamp(-10.0, 10.0)
    storage.policy_params = agent.get_policy_params(storage.obs[:-1])  # [T, B, P]
    storage.log_probs = agent.get_distribution(storage.policy_params).log_prob(storage.actions).sum(-1)  # [T, B]
    storage.values = agent.get_value(storage.obs)  # [T + 1, B], all in one call
    final_values = None if storage.final_obs is None else agent.get_value(storage.final_obs)
    flags = terminated, truncated
    targets = compute_gae(rewards, storage.values, *flags, args.gamma, args.gae_lambda, final_values)
    storage.advantages, storage.returns = targets  # [T, B] each


def explained_variance(values: torch.Tensor, returns: torch.Tensor, valid: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the valid rows, all [T, B]; NaN where the returns do not vary."""
    values, returns = values[valid > 0].double(), returns[valid > 0].double()
    variance = returns.var(correction=0).item() if len(returns) else 0.0
    return 1 - (returns - values).var(correction=0).item() / variance if variance > 0 else math.nan


def normalize_advantages(advantages: torch.Tensor, valid: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Advantages [N] to mean 0 and deviation 1 over the valid rows of all processes; a single row is left as it is.

    `valid` [N] is 1 for real transitions, else 0; `count` is the number of valid rows over all processes.
    """
    mean = sum_over_ranks((advantages * valid).sum()) / count.clamp(min=1)
    variance = sum_over_ranks(((advantages - mean).square() * valid).sum()) / count.clamp(min=1)
    return torch.where(count > 1, (advantages - mean) / (variance.sqrt() + 1e-8), advantages)


def policy_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_coef: float) -> torch.Tensor:
    """Minus the clipped surrogate of eq. 7, per row [N]."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)


def value_loss(values, returns, old_values, clip_coef: float | None) -> torch.Tensor:
    """Half the squared error of V per row [N]; with `clip_coef`, the worse of it and of V held near its old value."""
    loss = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        loss = torch.max(loss, (clipped - returns).square())
    return 0.5 * loss


METRICS = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def ppo_loss(agent: Agent, minibatch: dict[str, torch.Tensor], count: torch.Tensor, args: Args):
    """The loss to minimize, minus eq. 9, as the mean over the `count` valid rows of all processes.

    `minibatch` has rows [N, ...] of `obs`, `actions`, `log_probs`, `values`, `advantages`, `returns`, `valid`, and
    `policy_params` of the old policy; rows with valid = 0 carry no weight. Returns the loss, whose gradients add up
    over processes, and this process's part of the METRICS [6].
    """
    pi = agent.get_distribution(agent.get_policy_params(minibatch["obs"]))
    advantages, valid = minibatch["advantages"], minibatch["valid"]
    log_ratio = pi.log_prob(minibatch["actions"]).sum(-1) - minibatch["log_probs"]  # [N]
    log_ratio = torch.where(valid > 0, log_ratio, 0.0)  # so that no row without weight can overflow
    ratio = log_ratio.exp()  # eq. 6
    if args.kl_coef > 0:  # eq. 5
        kl = kl_divergence(agent.get_distribution(minibatch["policy_params"]), pi).sum(-1)
        pg_loss = -(ratio * advantages - args.kl_coef * kl)
    else:
        pg_loss = policy_loss(ratio, advantages, args.clip_coef)
    values, value_clip = agent.get_value(minibatch["obs"]), args.clip_coef if args.clip_vloss else None
    v_loss = value_loss(values, minibatch["returns"], minibatch["values"], value_clip)
    entropy = pi.entropy().sum(-1)
    loss = pg_loss + args.vf_coef * v_loss  # [N], minus eq. 9
    if args.ent_coef > 0:
        loss = loss - args.ent_coef * entropy
    clipped = ((ratio - 1.0).abs() > args.clip_coef).float()
    # approx_kl: the low-variance estimate of KL(pi_old, pi) (Schulman 2020, http://joschu.net/blog/kl-approx.html)
    rows = torch.stack((v_loss, pg_loss, entropy, -log_ratio, ratio - 1.0 - log_ratio, clipped)).detach()  # [6, N]
    return (loss * valid).sum() / count, (rows * valid).sum(1) / count


def update_minibatch(agent: Agent, optimizer, storage: RolloutStorage, index, metrics, loss_fn, args: Args) -> None:
    """One gradient step on the rows `index` [N] of the flattened rollout; adds the minibatch's METRICS to `metrics`."""
    names = ("actions", "log_probs", "advantages", "returns", "valid", "policy_params")
    minibatch = {name: getattr(storage, name).flatten(0, 1)[index] for name in names}  # [N, ...]
    minibatch["obs"] = storage.obs[:-1].flatten(0, 1)[index]
    minibatch["values"] = storage.values[:-1].flatten(0, 1)[index]
    count = sum_over_ranks(minibatch["valid"].sum()).clamp(min=1)
    if args.norm_adv:
        minibatch["advantages"] = normalize_advantages(minibatch["advantages"], minibatch["valid"], count)
    optimizer.zero_grad(set_to_none=True)
    loss, minibatch_metrics = loss_fn(agent, minibatch, count, args)
    loss.backward()
    sum_gradients(agent.parameters())
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    metrics.add_(minibatch_metrics)


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Make and return Adam's state tensors, which CUDA graphs need; without weight decay the weights stay."""
    if not optimizer.state:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for x in (x for state in optimizer.state.values() for x in state.values()):
            x.zero_()
    return [x for state in optimizer.state.values() for x in state.values()]


def can_capture(args: Args, device: torch.device) -> bool:
    """Whether the steps of an iteration are recorded as CUDA graphs."""
    return args.cuda_graphs and device.type == "cuda" and WORLD_SIZE == 1


def capture_graph(fn, mutated: list[torch.Tensor]):
    """Record `fn()` as a CUDA graph and return the function that replays it.

    `fn` must have fixed shapes and never wait for the host. What its warm-up does to the tensors in `mutated` and to
    the random generator is undone, so that replaying gives the numbers of calling `fn` (to rounding).
    """
    saved, rng_state = [x.detach().clone() for x in mutated], torch.cuda.get_rng_state()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        fn()
    with torch.no_grad():
        for x, old in zip(mutated, saved, strict=True):
            x.copy_(old)
    torch.cuda.set_rng_state(rng_state)
    return graph.replay


def capture_policy(agent: Agent, storage: RolloutStorage):
    """`agent.act` as a CUDA graph over fixed tensors."""
    obs, actions = storage.obs[0].clone(), storage.actions[0].clone()
    replay = capture_graph(torch.inference_mode()(lambda: actions.copy_(agent.act(obs))), [])

    def act(new_obs: torch.Tensor) -> torch.Tensor:
        obs.copy_(new_obs)
        replay()
        return actions

    return act


# ---- Evaluation and checkpoints --------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(agent: Agent, args: Args, device: torch.device, video_folder: Path | None = None) -> dict[str, float]:
    """Play --eval-episodes episodes with the most likely action and frozen statistics; returns are of raw rewards.

    The environments are gymnasium's own and the same for every call with the same seed. Each contributes the same
    number of episodes (give or take one), so that short ones are not favoured.
    """
    seed = int(np.random.SeedSequence([args.seed, 1]).generate_state(1)[0])
    envs, obs = make_envs(args, min(args.num_envs, args.eval_episodes), seed, "auto", device, video_folder)
    quota = np.full(envs.num_envs, args.eval_episodes // envs.num_envs)
    quota[: args.eval_episodes % envs.num_envs] += 1
    episodes = []
    for _ in range(10_000 * quota.max()):
        if not quota.any():
            break
        rows = envs.step(agent.get_distribution(agent.get_policy_params(obs.to(device))).mode)
        obs, extra = rows[:, : envs.obs_dim], rows[:, envs.obs_dim :].numpy()
        ended = (extra[:, EPISODE_LENGTH] > 0) & (quota > 0)
        quota[ended] -= 1
        episodes.extend(extra[ended, EPISODE_RETURN : EPISODE_LENGTH + 1].tolist())
    if quota.any():  # environments that have no time limit
        print(f"{(quota > 0).sum()} episodes were cut off in evaluation and count with their return so far")
        episodes += np.stack((envs.envs.episode_returns, envs.envs.episode_lengths), 1)[quota > 0].tolist()
    envs.close()
    returns, lengths = np.array(episodes).T
    names = ("eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")
    return dict(zip(names, map(float, (returns.mean(), returns.std(), lengths.mean())), strict=True))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a kill at any moment leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """Write tensors, numbers, strings, lists and dicts, atomically."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint of this script, never unpickling code; exits with code 2 where the file is none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        fail(f"{path}: no such checkpoint")
    except Exception as error:
        fail(f"{path}: not a readable checkpoint ({type(error).__name__})")
    script = checkpoint.get("script") if isinstance(checkpoint, dict) else None
    if script != SCRIPT:
        fail(f"{path}: a checkpoint of {script}.py, not of {SCRIPT}.py" if script else f"{path}: not a checkpoint")
    if checkpoint.get("args", {}).keys() != {field.name for field in fields(Args)}:
        fail(f"{path}: written by a version of {SCRIPT}.py with other options")
    return checkpoint


# ---- Training --------------------------------------------------------------------------------------------------------


def fail(message: str) -> NoReturn:
    """Print one line for the user and exit with code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


def check_range(args: Args, names: str, low: float, high: float = sys.float_info.max, above: bool = False) -> None:
    """Exit with code 2 where one of the fields `names` (separated by spaces) lies outside [low, high], or at low."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and (not low <= value <= high or (above and value == low)):
            bound = f"above {low:g}" if above else f"in [{low:g}, {high:g}]"
            fail(f"--{name.replace('_', '-')} must be {bound}, not {value}")


def setup_device(args: Args) -> torch.device:
    """Threads, determinism and device of this process; joins the process group under torchrun."""
    torch.set_num_threads(args.torch_threads)
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(args.torch_deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if WORLD_SIZE > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(hours=2))
    return device


def seed_everything(seed: int, *stream: int) -> int:
    """Seed every generator from (seed, *stream) and return the number used, for environments."""
    derived = int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0])
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
    return derived


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Sum `x` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def sum_gradients(parameters) -> None:
    """Sum the gradients over all processes, in one message."""
    if dist.is_initialized():
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = sum_over_ranks(torch.cat([g.flatten() for g in grads]))
        for g, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(summed.view_as(g))


def make_run_folder(args: Args, checkpoint: dict | None) -> Path:
    """Create the run folder; an unfinished run that is resumed goes on in its own one."""
    if checkpoint is not None:
        path = Path(args.resume).resolve().parent
        is_run = (path / "args.json").exists() and not (path / "result.json").exists()
        if is_run and args.run_dir == checkpoint["args"]["run_dir"]:
            return path
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "-").replace(":", "-")
    while True:
        try:
            (Path(args.run_dir) / name).mkdir(parents=True)
            return Path(args.run_dir) / name
        except FileExistsError:
            name += "-"  # another run was started in the same second
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: cannot create {name} in it ({error.strerror})")


def make_writer(args: Args, run_path: Path, global_step: int) -> SummaryWriter:
    """args.json and TensorBoard events in the run folder, mirrored to Weights & Biases with --track."""
    write_atomically(run_path / "args.json", json.dumps(asdict(args), indent=2).encode())
    if args.track:
        import wandb

        name, project, entity = run_path.name, args.wandb_project_name, args.wandb_entity
        identity = {"project": project, "entity": entity, "name": name, "id": name, "resume": "allow"}
        wandb.init(**identity, dir=run_path, config=asdict(args), sync_tensorboard=True)
    writer = SummaryWriter(str(run_path), purge_step=global_step + 1 if global_step else None)
    if global_step == 0:
        table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
    return writer


def get_commit() -> str:
    """Commit of the repository that this script lies in, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def plot_learning_curve(path: Path, writer: SummaryWriter, history: list, title, xlabel, ylabel) -> None:
    """Draw history = [(step, value), ...] as a PNG and into TensorBoard; says so where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no learning_curve.png: pip install matplotlib")
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.plot(*zip(*history, strict=True), marker="o" if len(history) == 1 else None)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    writer.add_figure("charts/learning_curve", figure, history[-1][0])


def check_args(args: Args) -> None:
    """Exit with code 2 and one line for settings that cannot work."""
    check_range(args, "torch_threads eval_episodes num_envs total_timesteps num_steps num_minibatches", 0, above=True)
    check_range(args, "update_epochs learning_rate max_grad_norm target_kl", 0, above=True)
    check_range(args, "seed checkpoint_interval eval_interval clip_coef ent_coef vf_coef kl_coef", 0)
    check_range(args, "gamma gae_lambda", 0, 1)
    batch_size = args.num_envs * args.num_steps
    if args.num_envs % WORLD_SIZE:
        fail(f"--num-envs {args.num_envs} does not divide among {WORLD_SIZE} processes")
    if batch_size // WORLD_SIZE % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} does not divide a rollout of {batch_size // WORLD_SIZE} rows")
    if args.track and not args.evaluate and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")
    if args.capture_video and (args.vectorization == "torch" or importlib.util.find_spec("moviepy") is None):
        fail("--capture-video needs pip install 'gymnasium[other]', and does not go with --vectorization torch")


def make_envs(args: Args, num_envs: int, seed: int, vectorization: str, device, video_folder: Path | None):
    """Environments and their first observations [B, D]; exits with code 2 where they cannot be made."""
    try:
        return make_vec(args.env_id, num_envs, seed, vectorization, device, video_folder)
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if given, and leave a run folder with result.json."""
    wall_start, cpu_start = time.time(), time.process_time()
    device, is_main = setup_device(args), RANK == 0
    start_step = checkpoint["global_step"] if checkpoint else 0
    if start_step >= args.total_timesteps and Path(args.resume).with_name("result.json").exists():
        fail(f"--resume {args.resume}: its {start_step} steps are done; raise --total-timesteps")
    env_seed = seed_everything(args.seed, 0, RANK, start_step)
    env_args = args.num_envs // WORLD_SIZE, env_seed, args.vectorization, device
    envs, obs = make_envs(args, *env_args, None)
    run_path = make_run_folder(args, checkpoint) if is_main else None
    if args.capture_video and is_main:
        envs.close()
        envs, obs = make_envs(args, *env_args, run_path / f"videos_from_step_{start_step}")
    seed_everything(args.seed)  # the same weights in every process
    agent = Agent(envs.obs_dim, envs.single_action_space, args.norm_obs).to(device)
    seed_everything(args.seed, 2, RANK, start_step)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, so that CUDA graphs see it change
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-5, fused=True, capturable=can_capture(args, device))
    storage = RolloutStorage(envs, agent, args.num_steps, device)
    storage.obs[-1] = obs.to(device)
    batch_size = args.num_envs * args.num_steps // WORLD_SIZE  # rows of this process

    progress = {"iteration": 0, "global_step": 0, "solved": {}, "history": [], "recent_returns": []}
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.param_groups[0] |= {"lr": lr, "capturable": can_capture(args, device)}
        wall_start, cpu_start = wall_start - checkpoint["wall_seconds"], cpu_start - checkpoint["cpu_seconds"]
        state = checkpoint["ranks"][RANK] if len(checkpoint["ranks"]) == WORLD_SIZE else {"envs": None}
        if state["envs"] is None and is_main:
            print("the checkpoint does not hold the state of these environments: they start from a reset")
        elif state["envs"] is not None:
            envs.load_state_dict(state["envs"])
            for x, saved in zip(storage.carried, state["carried"], strict=True):
                x.copy_(saved)
            random.setstate(state["python_rng"])
            np.random.set_state(set_plain_state({}, state["numpy_rng"]))
            torch.set_rng_state(state["torch_rng"])
            if device.type == "cuda" and state["cuda_rng"] is not None:
                torch.cuda.set_rng_state(state["cuda_rng"])
    writer = make_writer(args, run_path, start_step) if is_main else None

    def save() -> None:
        state = {"envs": envs.state_dict(), "carried": [x.cpu() for x in storage.carried]}
        state |= {"python_rng": random.getstate(), "torch_rng": torch.get_rng_state()}
        state["numpy_rng"] = get_plain_state(np.random.get_state(legacy=False))
        state["cuda_rng"] = torch.cuda.get_rng_state() if device.type == "cuda" else None
        ranks = [state] * WORLD_SIZE
        if WORLD_SIZE > 1:  # as bytes: some integer types do not survive the trip as tensors
            torch.save(state, buffer := io.BytesIO())
            dist.all_gather_object(ranks, buffer.getvalue())
            ranks = [torch.load(io.BytesIO(content), weights_only=True) for content in ranks]
        if is_main:
            seconds = {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
            content = {"script": SCRIPT, "args": asdict(args) | {"resume": None}, "ranks": ranks, **progress, **seconds}
            content |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", content)

    # The three steps of an iteration; each is one CUDA graph where that can be
    metrics = torch.zeros(len(METRICS), device=device)
    index = torch.zeros(batch_size // args.num_minibatches, dtype=torch.int64, device=device)
    loss_fn = torch.compile(ppo_loss) if args.compile else ppo_loss
    collect_step = partial(collect_rollout, agent.act, envs, storage)
    targets_step = partial(compute_targets, agent, storage, args)
    update_step = partial(update_minibatch, agent, optimizer, storage, index, metrics, loss_fn, args)
    if can_capture(args, device):
        mutated = [storage.rows, storage.actions, *storage.carried, *envs.mutable_tensors(), metrics]
        mutated += [*agent.state_dict().values(), *init_optimizer_state(optimizer)]
        if envs.on_device:
            collect_step = capture_graph(collect_step, mutated)
        else:  # the environments run on the host between two replays of the policy
            collect_step = partial(collect_rollout, capture_policy(agent, storage), envs, storage)
        targets_step, update_step = (capture_graph(step, mutated) for step in (targets_step, update_step))
    if checkpoint is None:
        save()
    threshold, loop_start = envs.reward_threshold, time.time()
    bar = tqdm(total=args.total_timesteps, initial=start_step, unit="step", disable=not is_main)
    if is_main:
        bar.write(f"run folder {run_path}")
    while progress["global_step"] < args.total_timesteps:
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1.0 - progress["global_step"] / args.total_timesteps))

        # Collect a rollout, then its advantages and returns
        collect_step()
        targets_step()

        # Optimize the surrogate for K epochs of minibatches
        metrics.zero_()
        num_updates, kl_sum = 0, 0.0
        for _ in range(args.update_epochs):
            for minibatch_index in torch.randperm(batch_size, device=device).split(len(index)):
                index.copy_(minibatch_index)
                update_step()
            num_updates += args.num_minibatches
            if args.target_kl is not None:
                kl_before, kl_sum = kl_sum, sum_over_ranks(metrics[METRICS.index("approx_kl")].clone()).item()
                if (kl_sum - kl_before) / args.num_minibatches > args.target_kl:
                    break
        if args.norm_obs:
            agent.obs_stats.update(storage.obs[:-1], storage.valid)

        # Log, evaluate, checkpoint
        steps = progress["global_step"] + sum_over_ranks(storage.valid.sum(1)).cpu().long().cumsum(0).numpy()  # [T]
        losses = (sum_over_ranks(metrics) / num_updates).tolist()
        step, iteration = int(steps[-1]), progress["iteration"] + 1
        progress |= {"iteration": iteration, "global_step": step}
        if not all(map(math.isfinite, losses)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {losses}")
        if is_main:
            episodes = storage.episodes.cpu().numpy()  # [T, B, 2]
            for t in np.flatnonzero(episodes[:, :, 1].any(1)):  # the mean of the episodes that end on the same step
                ended = episodes[t, episodes[t, :, 1] > 0]
                progress["recent_returns"] = (progress["recent_returns"] + ended[:, 0].tolist())[-20:]
                writer.add_scalar("charts/episodic_return", ended[:, 0].mean(), int(steps[t]))
                writer.add_scalar("charts/episodic_length", ended[:, 1].mean(), int(steps[t]))
            scalars = {f"losses/{name}": value for name, value in zip(METRICS, losses, strict=True)}
            explained = explained_variance(storage.values[:-1], storage.returns, storage.valid)
            scalars["losses/explained_variance"] = explained
            scalars["charts/learning_rate"] = lr.item()
            scalars["charts/SPS"] = int((step - start_step) / (time.time() - loop_start))
            scalars["charts/cpu_seconds"] = cpu_seconds = time.process_time() - cpu_start
            if recent := progress["recent_returns"]:
                scalars["charts/return_last_20"] = mean_return = float(np.mean(recent))
                progress["history"].append([step, mean_return])
                bar.set_postfix({"return": f"{mean_return:.1f}"}, refresh=False)
                is_solved = threshold is not None and len(recent) == 20 and mean_return >= threshold
                if is_solved and not progress["solved"]:
                    progress["solved"] = {"solved_step": step, "solved_cpu_seconds": cpu_seconds}
                    bar.write(f"solved: last 20 episodes {mean_return:.1f} >= {threshold:g} at step {step:,}")
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
            bar.update(min(step, args.total_timesteps) - bar.n)
        is_last = step >= args.total_timesteps
        if is_main and not is_last and args.eval_interval and iteration % args.eval_interval == 0:
            for name, value in evaluate(agent, args, device).items():
                writer.add_scalar(name, value, step)
        if is_last or (args.checkpoint_interval and iteration % args.checkpoint_interval == 0):
            save()
    bar.close()
    envs.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if not is_main:
        return
    step, history = progress["global_step"], progress["history"]
    eval_metrics = evaluate(agent, args, device)
    for name, value in eval_metrics.items():
        writer.add_scalar(name, value, step)
    result = {
        "script": SCRIPT,
        "env_id": args.env_id,
        "seed": args.seed,
        "headline": "eval/episodic_return",
        "metrics": eval_metrics | progress["solved"],
        "env_steps": step,
        "wall_seconds": time.time() - wall_start,
        "cpu_seconds": time.process_time() - cpu_start,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": get_commit(),
        "args": asdict(args),
    }
    if history:
        title, path = f"{args.env_id}, seed {args.seed}", run_path / "learning_curve.png"
        plot_learning_curve(path, writer, history, title, "environment steps", "return, last 20 episodes")
    writer.close()
    write_atomically(run_path / "result.json", json.dumps(result, indent=2).encode())
    mean, std = eval_metrics["eval/episodic_return"], eval_metrics["eval/episodic_return_std"]
    verdict = "" if threshold is None else f" ({'solved' if mean >= threshold else 'not solved'}: {threshold:g} needed)"
    print(f"{args.env_id}: return {mean:.1f} +- {std:.1f} over {args.eval_episodes} episodes{verdict}", end=" ")
    print(f"after {step:,} steps in {result['wall_seconds']:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, or evaluate a checkpoint."""
    args, checkpoint = tyro.cli(Args, args=argv), None
    if args.evaluate and (args.resume or WORLD_SIZE > 1):
        fail("--resume and --evaluate exclude each other, and --evaluate is for one process")
    if path := args.resume or args.evaluate:
        checkpoint = load_checkpoint(path)
        saved = Args(**checkpoint["args"])
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        fixed = ("env_id", "norm_obs", "norm_reward", "seed", "num_envs", "num_steps", "vectorization", "capture_video")
        for name in fixed if args.resume else fixed[:2]:
            value, trained = getattr(args, name), getattr(saved, name)
            if value != trained:
                fail(f"--{name.replace('_', '-')} {value}: {path} was trained with {trained}")
    check_args(args)
    if not args.evaluate:
        return train(args, checkpoint)
    device = setup_device(args)
    envs, _ = make_envs(args, 1, args.seed, "auto", device, None)
    agent = Agent(envs.obs_dim, envs.single_action_space, args.norm_obs).to(device)
    agent.load_state_dict(checkpoint["agent"])
    folder = Path(args.evaluate).resolve().parent / f"videos_eval_{int(time.time())}" if args.capture_video else None
    for name, value in evaluate(agent, args, device, folder).items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: --resume the checkpoint.pt in the run folder to go on")
