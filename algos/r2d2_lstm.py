"""R2D2: recurrent Q-learning with stored states, burn-in and prioritized sequence replay, in one file.

Paper: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (ICLR).

    python algos/r2d2_lstm.py                              # first run: a memory task, a minute on one core
    python algos/r2d2_lstm.py --env-id ALE/Pong-v5 --total-timesteps 20000000 --hidden-size 512 --burn-in 40 \
        --learn-length 40 --n-step 5 --gamma 0.997 --learning-rate 1e-4 --buffer-size 50000 --target-interval 2500
    torchrun --nproc-per-node 2 algos/r2d2_lstm.py         # several GPUs (or CPU processes)

What is computed (section 2.3 of the paper; the numbers are this file's):

    (1)  h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, the value rescaling
    (2)  y_t  = h( r_t + ... + gamma^(k-t-1) r_(k-1) + gamma^(k-t) h^-1( Q'(s_k, argmax_a Q(s_k, a)) ) ) with
         k = min(t + n, end of the episode); no Q', the target network, where s_k is terminal
    (3)  L    = mean of w (y_t - Q(s_t, a_t))^2 / 2 over the learned steps, w = P^-beta / max P^-beta
    (4)  p    = eta max_t |y_t - Q_t| + (1 - eta) mean_t |y_t - Q_t| of a window, P = p^alpha / sum p^alpha
    (5)  epsilon_i = epsilon^(1 + 7 i / (B - 1)) of environment i

The LSTM is unrolled over windows | burn_in steps: state only | learn_length: loss | n_step: targets only |. The windows
of an episode follow each other every learn_length steps, so that each step is learned in exactly one; what a window
lacks before the start or after the end of its episode is padding without weight.

Shapes: T time, B parallel environments, N windows of a batch, D flattened observation, A actions, H hidden units.
"""

# /// script
# requires-python = ">=3.11"
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
from dataclasses import asdict, dataclass, fields, replace
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
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]  # for envs_shared, and for your own environments
from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN, NUM_EXTRA, REWARD, TERMINATED, TRUNCATED
from envs_shared.gym_tasks.memory import MEMORYLESS_CEILING
from envs_shared.gym_tasks.plain_state import get_plain_state, set_plain_state
from envs_shared.gym_tasks.vector import make_vec

SCRIPT = "r2d2_lstm"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
METRICS = ("q_loss", "q_value", "target", "td_error", "grad_norm")  # of an update, logged as losses/*


@dataclass
class Args:
    """R2D2 on any gymnasium environment with discrete actions; observations may be images."""

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
    env_id: str = "RepeatPreviousEasy-v0"
    """gymnasium id; `module:Name-v0` imports the module first"""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """auto: the environment's own vector form, else sync"""
    num_envs: int = 32
    """parallel environments B, over all processes"""

    # Algorithm
    total_timesteps: int = 500_000
    """environment steps to train on, over all environments; the last iteration is completed"""
    learning_rate: float = 3e-3
    """Adam's learning rate"""
    anneal_lr: bool = True
    """lower the learning rate linearly to zero"""
    num_steps: int = 16
    """steps of each environment between two rounds of updates"""
    gamma: float = 0.98
    """discount gamma"""
    reward_scale: float = 1.0
    """factor of the rewards in eq. 2, that brings values to the order of one"""
    recurrent: bool = True
    """an LSTM; --no-recurrent puts a feed-forward layer of equal width in its place"""
    hidden_size: int = 64
    """width H of the encoder, the LSTM and the heads"""
    memory_span: float = 1.0
    """steps that the LSTM's slowest units keep their content for at first"""
    burn_in: int = 8
    """steps at the start of a window that only bring the LSTM's state up to date"""
    learn_length: int = 16
    """steps of a window that are learned, and distance between two windows"""
    n_step: int = 1
    """steps n of the return before the bootstrap, eq. 2"""
    state_init: Literal["stored", "zero"] = "stored"
    """LSTM state at the start of a window: the one recorded when acting, or zero"""
    buffer_size: int = 50_000
    """windows in the replay, of each process"""
    learning_starts: int = 5_000
    """environment steps before the first update"""
    replay_ratio: float = 8.0
    """windows sampled per window collected: how often a step is learned on average"""
    batch_size: int = 64
    """windows N of an update, over all processes"""
    target_interval: int = 50
    """updates between two copies of the network to the target network"""
    epsilon: float = 0.4
    """exploration of the most exploring environment, eq. 5"""
    max_grad_norm: float = 10.0
    """largest global norm of the gradient"""
    bf16: bool = False
    """run the network in bfloat16 (autocast) in the updates, for CUDA"""
    checkpoint_replay: bool = False
    """save the replay in the checkpoint, so that a resumed run goes on exactly"""


# ---- Networks --------------------------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    """Encoder, LSTM, dueling heads (Wang et al. 2016): Q(history, .) of observation, previous action and reward."""

    def __init__(self, envs, args: Args):
        super().__init__()
        num_actions, hidden_size, num_inputs = int(envs.single_action_space.n), args.hidden_size, envs.obs_dim
        self.recurrent, self.obs_scale = args.recurrent, envs.obs_scale
        self.register_buffer("action_ids", torch.arange(num_actions), persistent=False)
        layers = []
        if envs.image_shape is not None:  # the convolutions of Mnih et al. 2015, smaller ones for sides under 36
            kernels = ((8, 4), (4, 2), (3, 1)) if min(envs.image_shape[1:]) >= 36 else ((3, 2), (3, 2), (3, 1))
            layers, channels = [nn.Unflatten(-1, envs.image_shape)], (envs.image_shape[0], 32, 64, 64)
            for c_in, c_out, (kernel, stride) in zip(channels[:-1], channels[1:], kernels, strict=True):
                layers += [nn.Conv2d(c_in, c_out, kernel, stride), nn.ReLU()]
            layers.append(nn.Flatten())
            num_inputs = nn.Sequential(*layers)(torch.zeros(1, envs.obs_dim)).shape[1]
        self.encoder = nn.Sequential(*layers, nn.Linear(num_inputs, hidden_size), nn.ReLU())
        num_inputs = hidden_size + num_actions + 1
        self.core = nn.LSTM(num_inputs, hidden_size) if args.recurrent else nn.Linear(num_inputs, hidden_size)
        if args.recurrent:  # forget gates tau / (1 + tau) with tau from 1 to memory_span (Tallec et al. 2018)
            self.core.bias_hh_l0.data.zero_()
            self.core.bias_ih_l0.data.chunk(4)[1].copy_(torch.linspace(0, math.log(args.memory_span), hidden_size))
        hidden = [nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU()) for _ in range(2)]
        self.advantage = hidden[0].append(nn.Linear(hidden_size, num_actions))
        self.value = hidden[1].append(nn.Linear(hidden_size, 1))

    def forward(self, obs, last_action, last_reward, state):
        """Q values [T, B, A] and the state after T steps, from the state (h, c) [B, 2, H] of the LSTM before them.

        last_action [T, B] (-1: none) and last_reward [T, B] led to obs [T, B, D].
        """
        x = self.encoder(obs.flatten(0, 1).float() / self.obs_scale).unflatten(0, obs.shape[:2])  # [T, B, H]
        one_hot = (last_action.unsqueeze(-1) == self.action_ids).to(x.dtype)  # [T, B, A]
        x = torch.cat((x, one_hot, last_reward.unsqueeze(-1).to(x.dtype)), -1)
        if self.recurrent:
            h, c = state.transpose(0, 1).unsqueeze(1).contiguous()  # [1, B, H] each
            x, (h, c) = self.core(x, (h, c))
            state = torch.cat((h, c)).transpose(0, 1)
        else:
            x = self.core(x).relu()
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True), state


# ---- Storage ---------------------------------------------------------------------------------------------------------


class SequenceReplay:
    """Prioritized replay of windows, preallocated on the training device.

    Each environment has a ring of slots (slot k lies at k modulo its length). A slot is what the network reads at one
    step: the observation, and the action and reward that led to it. An episode of E steps fills E + 1 slots, its true
    last observation included. A row is a window: its first slot, environment, where the episode ends, LSTM state.
    """

    def __init__(self, envs, args: Args, device: torch.device):
        self.num_envs, self.obs_dim, self.same_step = envs.num_envs, envs.obs_dim, envs.same_step
        self.burn_in, self.learn_length = args.burn_in, args.learn_length
        self.length = args.burn_in + args.learn_length + args.n_step  # slots L of a window
        self.num_recent = self.length + 2 * args.num_steps  # latest slots whose states are kept
        # Slots outlive their rows: an episode has one slot more than steps, SAME_STEP may fill two slots at once
        num_slots = -(-args.buffer_size // envs.num_envs) * (args.learn_length + 1) * (1 + envs.same_step)
        self.num_slots = num_slots + 2 * self.num_recent
        zeros, integers = partial(torch.zeros, device=device), partial(torch.zeros, device=device, dtype=torch.int64)
        num_rows, num_slots, width = args.buffer_size, self.num_slots * envs.num_envs, (2, args.hidden_size)
        self.slots = {"obs": zeros(num_slots, envs.obs_dim, dtype=envs.obs_dtype), "last_action": integers(num_slots)}
        self.slots["last_reward"] = zeros(num_slots)
        self.rows = {"first": integers(num_rows), "env": integers(num_rows), "end": integers(num_rows)}
        self.rows |= {name: zeros(num_rows, dtype=torch.bool) for name in ("is_warm", "terminated")}
        self.rows["state"] = zeros(num_rows, *width)
        self.rows["end"] += self.burn_in + 1  # a valid one before rows are filled: a CUDA graph's warm-up reads them
        self.priority, self.num_added = zeros(num_rows), 0  # rows added since the start
        self.state, self.recent_states = zeros(envs.num_envs, *width), zeros(self.num_recent * envs.num_envs, *width)
        self.index = integers(envs.num_envs)  # where in `slots` the current ones are
        self.env_ids, self.position = np.arange(envs.num_envs), np.full(envs.num_envs, -1)
        # First slot of the running episode, first step in it that no window has taken yet [B]
        self.episode_start, self.next_learned = np.zeros((2, envs.num_envs), np.int64)
        self.ended = np.zeros(envs.num_envs, bool)  # the last step ended an episode
        self.pending: list[np.ndarray] = []  # [K, 6] windows of this collection that are not rows yet

    def write_slot(self, which: np.ndarray, obs, last_action, last_reward, state, is_first: np.ndarray) -> None:
        """Move the environments `which` [K] on by one slot; where `is_first` [K], an episode begins there."""
        self.position[which] += 1
        position, begun = self.position[which], which[is_first]
        self.episode_start[begun] = self.next_learned[begun] = self.position[begun]
        recent = position % self.num_recent * self.num_envs + which
        host = np.stack((which, position % self.num_slots * self.num_envs + which, recent, ~is_first))
        which, index, recent, keep = torch.from_numpy(host).to(self.index.device)  # [K] each
        self.index[which] = index
        self.slots["obs"][index] = obs.to(self.slots["obs"].dtype)
        self.slots["last_action"][index] = torch.where(keep > 0, last_action, -1)
        self.slots["last_reward"][index] = last_reward * keep
        self.state[which] = self.recent_states[recent] = state * keep[:, None, None]

    def begin_episodes(self, obs: torch.Tensor) -> None:
        """Every environment begins an episode with `obs` [B, D]; one that was running counts as truncated."""
        self.ended[:] = True
        self.complete_windows(np.zeros_like(self.ended))
        self.ended[:] = False
        self.write_slot(self.env_ids, obs.to(self.index.device), -1, self.state[:, 0, 0], self.state, self.env_ids >= 0)

    def add_step(self, actions: torch.Tensor, rows: torch.Tensor, state: torch.Tensor) -> None:
        """Store the `rows` that answered `actions` [B], `state` [B, 2, H] after them, and note completed windows."""
        terminated, truncated = (rows[:, self.obs_dim + i].numpy() > 0 for i in (TERMINATED, TRUNCATED))
        is_reset = self.ended & (not self.same_step)  # NEXT_STEP autoreset: this step only began an episode
        self.ended, ended = terminated | truncated, np.flatnonzero(terminated | truncated)
        rows = rows.to(self.index.device, non_blocking=True)
        obs, rewards = rows[:, : self.obs_dim], rows[:, self.obs_dim + REWARD]
        last_obs = obs.clone()
        if self.same_step:
            last_obs[ended] = rows[ended, self.obs_dim + NUM_EXTRA :]
        self.write_slot(self.env_ids, last_obs, actions, rewards, state, is_reset)
        self.complete_windows(terminated)
        if self.same_step and len(ended):
            self.write_slot(ended, obs[ended], -1, rewards[ended], self.state[ended], ended >= 0)

    def complete_windows(self, terminated: np.ndarray) -> None:
        """Note the windows that have all their slots, or end with an episode (`terminated` [B] or truncated)."""
        while True:  # an environment's last windows are complete all at once when its episode ends
            first = self.next_learned - self.burn_in
            is_complete = self.position - first >= self.length - 1
            ready = np.flatnonzero(is_complete | (self.ended & (self.next_learned < self.position)))
            if not len(ready):
                break
            first, learned, end = first[ready], self.next_learned[ready], (self.position - first)[ready]
            is_warm = first >= self.episode_start[ready]  # the episode has the steps to burn in on
            recent = np.where(is_warm, first, learned) % self.num_recent * self.num_envs + ready
            self.pending.append(np.stack((first, ready, end, is_warm, terminated[ready], recent)))
            self.next_learned[ready] += self.learn_length

    def add_windows(self) -> int:
        """Turn the windows completed since the last call into rows of the largest priority; returns their number."""
        device, num_rows = self.index.device, len(self.priority)
        pending = np.concatenate([np.zeros((6, 0), np.int64), *self.pending], 1)[:, -num_rows:]
        pending = torch.from_numpy(pending).to(device)  # [6, K]
        self.pending, num_added = [], pending.shape[1]
        rows = (self.num_added + torch.arange(num_added, device=device)) % num_rows
        self.num_added += num_added
        for x, values in zip(self.rows.values(), (*pending[:-1], self.recent_states[pending[-1]]), strict=True):
            x[rows] = values.to(x.dtype)
        largest = self.priority.max()
        self.priority[rows] = torch.where(largest > 0, largest, 1.0)
        return num_added

    def sample(self, num_windows: int, alpha: float = 0.9, beta: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [N] drawn by P = p^alpha / sum p^alpha, stratified, and weights P^-beta / max P^-beta [N], eq. 3 and 4.

        Nothing waits for the device. Rows of priority 0 are never drawn. Source: Schaul et al. 2016, arXiv:1511.05952.
        """
        cumulative = self.priority.pow(alpha).double().cumsum(0)
        noise = torch.rand(num_windows, dtype=torch.float64, device=cumulative.device)
        points = (torch.arange(num_windows, device=noise.device) + noise) / num_windows * cumulative[-1]
        index = torch.searchsorted(cumulative, points.clamp(min=1e-300)).clamp(max=len(cumulative) - 1)
        weights = self.priority[index].pow(-alpha * beta)
        return index, weights / weights.max()

    def read_windows(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """The windows of rows `index` [N]: obs [L, N, D], last_action, last_reward [L, N], and per window [N, ...]."""
        windows = {name: x[index] for name, x in self.rows.items()}
        steps = torch.arange(self.length, device=index.device).unsqueeze(1)
        slots = (windows["first"] + steps) % self.num_slots * self.num_envs + windows["env"]  # [L, N]
        return windows | {name: x[slots] for name, x in self.slots.items()}

    def tensors(self) -> list[torch.Tensor]:
        """What it holds between two collections, beside `num_added`; sharing memory with it."""
        host = map(torch.from_numpy, (self.position, self.episode_start, self.next_learned, self.ended))
        device = self.priority, self.state, self.recent_states, self.index
        return [*self.slots.values(), *self.rows.values(), *device, *host]


# ---- R2D2 ------------------------------------------------------------------------------------------------------------


def value_rescale(x: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """h(x) of eq. 1, written so that small x keep their precision in float32 (Pohlen et al. 2018, arXiv:1805.11593)."""
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + eps * x


def inverse_value_rescale(y: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    """h^-1(y), written without the difference of two nearly equal numbers that the textbook's form has."""
    k = 1.0 + 2.0 * eps
    w = 2.0 * y.abs() / (k + (k * k + 4.0 * eps * y.abs()).sqrt())
    return y.sign() * w * (w + 2.0)


def epsilon_ladder(num_envs: int, epsilon: float) -> torch.Tensor:
    """epsilon_i [B] of eq. 5 (Horgan et al. 2018, arXiv:1803.00933); one environment alone has epsilon."""
    return epsilon ** (1.0 + 7.0 * torch.arange(num_envs) / max(num_envs - 1, 1))


def arrange_sequences(steps: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Cut n collected steps [n, ...] into sequences [S, length, ...] the way DI-engine does; training does not use it.

    The last sequence overlaps the one before it, or is filled with null steps: the last with `done` True, `reward` 0.
    """
    n = len(steps["done"])
    first = torch.arange(0, n, length).clamp(max=max(n - length, 0))  # [S]
    index = first.unsqueeze(1) + torch.arange(length)  # [S, length]
    is_null = index >= n
    sequences = {name: x[index.clamp(max=n - 1)] for name, x in steps.items()}
    return sequences | {"done": sequences["done"] | is_null, "reward": sequences["reward"].masked_fill(is_null, 0)}


@torch.inference_mode()
def collect_steps(agent: QNetwork, envs, replay: SequenceReplay, epsilons: torch.Tensor | None, num_steps: int):
    """Play `num_steps` steps in every environment into the replay, epsilon-greedily with epsilons [B], or greedily.

    Returns the number of real steps (a step that only resets is none), and return and length of the episodes that
    ended [num_steps, B, 2], zero where none did.
    """
    num_real, episodes = 0, torch.zeros(num_steps, envs.num_envs, 2)
    for t in range(num_steps):
        num_real += envs.num_envs - (0 if envs.same_step else int(replay.ended.sum()))
        q, state = agent(*(x[replay.index].unsqueeze(0) for x in replay.slots.values()), replay.state)
        actions = q[0].argmax(-1)  # [B]
        if epsilons is not None:
            random_actions = torch.randint_like(actions, q.shape[-1])
            actions = torch.where(torch.rand_like(epsilons) < epsilons, random_actions, actions)
        rows = envs.step(actions.unsqueeze(1))
        replay.add_step(actions, rows, state)
        episodes[t] = rows[:, envs.obs_dim :][:, EPISODE_RETURN : EPISODE_LENGTH + 1]
    return num_real, episodes


def unroll(agent: QNetwork, windows: dict[str, torch.Tensor], args: Args) -> torch.Tensor:
    """Q values [m + n, N, A] of the windows' steps after the burn-in, which brings the state up to date first.

    A window that has nothing to burn in on starts from its stored state after it: zero, at the start of an episode.
    """
    steps = [windows[name] for name in ("obs", "last_action", "last_reward")]
    state = windows["state"] if args.state_init == "stored" else torch.zeros_like(windows["state"])
    if args.burn_in > 0 and args.recurrent:
        with torch.no_grad():
            _, burned = agent(*(x[: args.burn_in] for x in steps), state)
        state = torch.where(windows["is_warm"][:, None, None], burned.to(state.dtype), state)
    return agent(*(x[args.burn_in :] for x in steps), state)[0].float()


def compute_targets(q, target_q, rewards, end, terminated, args: Args) -> torch.Tensor:
    """y_t [m, N] of eq. 2: n-step, double Q (van Hasselt et al. 2016), rescaled.

    q and target_q [m + n, N, A] of steps 0 to m + n - 1, rewards [m + n - 1, N] that followed them. Nothing follows
    step `end` [N] in [1, m + n - 1], where the episode may have `terminated` [N]; rows t >= end mean nothing.
    """
    time = torch.arange(len(q), device=q.device).unsqueeze(1)
    rewards = rewards * args.reward_scale * (time[:-1] < end)
    returns = rewards.unfold(0, args.n_step, 1) @ args.gamma ** torch.arange(args.n_step, device=q.device)  # [m, N]
    time = time[: args.learn_length]
    bootstrap = (time + args.n_step).minimum(end)  # k [m, N]
    values = inverse_value_rescale(target_q.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1))  # [m + n, N]
    values = values.gather(0, bootstrap) * ~(terminated & (bootstrap == end))
    return value_rescale(returns + args.gamma ** (bootstrap - time).clamp(min=0) * values)


def sequence_priority(td_errors: torch.Tensor, is_real: torch.Tensor, eta: float = 0.9) -> torch.Tensor:
    """p [N] of eq. 4 from errors [T, N], over the steps that are real [T, N]."""
    errors = td_errors.abs() * is_real
    return eta * errors.amax(0) + (1.0 - eta) * errors.sum(0) / is_real.sum(0).clamp(min=1)


def r2d2_loss(agent: QNetwork, target: QNetwork, windows: dict[str, torch.Tensor], weights, count, args: Args):
    """Eq. 3 as the mean over the `count` real steps of all processes, the windows' new priorities, and METRICS [4]."""
    q = unroll(agent, windows, args)  # [m + n, N, A]
    end = windows["end"] - args.burn_in
    taken, rewards = (windows[name][args.burn_in + 1 :] for name in ("last_action", "last_reward"))
    with torch.no_grad():
        target_q = unroll(target, windows, args)
        targets = compute_targets(q, target_q, rewards, end, windows["terminated"], args)  # [m, N]
        is_real = torch.arange(args.learn_length, device=q.device).unsqueeze(1) < end  # [m, N]
    taken = taken[: args.learn_length].clamp(min=0)  # in the padding there may be none
    q_taken = q[: args.learn_length].gather(-1, taken.unsqueeze(-1)).squeeze(-1)
    td_errors = torch.where(is_real, targets - q_taken, 0.0)
    losses = 0.5 * weights * td_errors.square()
    rows = torch.stack((losses, q_taken, targets, td_errors.abs())).detach()  # [4, m, N]
    priorities = sequence_priority(td_errors.detach(), is_real)
    return losses.sum() / count, priorities, (rows * is_real).sum((1, 2)) / count


def update_weights(agent, target, optimizer, replay: SequenceReplay, metrics, loss_fn, args: Args) -> None:
    """One gradient step on sampled windows, and their new priorities; adds the update's METRICS to `metrics`."""
    index, weights = replay.sample(args.batch_size // WORLD_SIZE)
    windows = replay.read_windows(index)
    count = sum_over_ranks((windows["end"] - args.burn_in).clamp(max=args.learn_length).sum())
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(index.device.type, torch.bfloat16, enabled=args.bf16):
        loss, priorities, loss_metrics = loss_fn(agent, target, windows, weights, count, args)
    loss.backward()
    sum_gradients(agent.parameters())
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    replay.priority[index] = priorities.clamp(min=1e-8)  # a priority of zero would never be drawn again
    metrics.add_(torch.cat((loss_metrics, grad_norm.unsqueeze(0) / WORLD_SIZE)))


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
    """Whether an update is recorded as a CUDA graph."""
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


# ---- Evaluation and checkpoints --------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(agent: QNetwork, args: Args, device: torch.device) -> dict[str, float]:
    """Play --eval-episodes episodes greedily, in the same environments for every call with the same seed."""
    seed = int(np.random.SeedSequence([args.seed, 1]).generate_state(1)[0])
    envs, obs = make_envs(args, min(args.num_envs, args.eval_episodes), seed, "auto", device)
    quota = args.eval_episodes // envs.num_envs + (np.arange(envs.num_envs) < args.eval_episodes % envs.num_envs)
    replay = SequenceReplay(envs, replace(args, buffer_size=1, num_steps=1), device)  # for its reading of the present
    replay.begin_episodes(obs)
    episodes, limit = [], 10_000 * quota.max()
    while quota.any() and (limit := limit - 1) >= 0:
        ended = collect_steps(agent, envs, replay, None, 1)[1][0].numpy()  # [B, 2]
        replay.pending.clear()
        is_counted = (ended[:, 1] > 0) & (quota > 0)
        quota[is_counted] -= 1
        episodes.extend(ended[is_counted].tolist())
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
    check_range(args, "torch_threads eval_episodes total_timesteps num_steps learning_rate n_step", 0, above=True)
    check_range(args, "learn_length buffer_size batch_size replay_ratio max_grad_norm reward_scale", 0, above=True)
    check_range(args, "num_envs hidden_size memory_span target_interval", 1, 100_000)
    check_range(args, "seed checkpoint_interval eval_interval burn_in learning_starts", 0)
    check_range(args, "gamma epsilon", 0, 1)
    if not args.resume and not args.evaluate and args.learning_starts >= args.total_timesteps:
        fail(f"--learning-starts {args.learning_starts}: --total-timesteps {args.total_timesteps} end before")
    for name in ("num_envs", "batch_size"):
        if (value := getattr(args, name)) % WORLD_SIZE:
            fail(f"--{name.replace('_', '-')} {value} does not divide among {WORLD_SIZE} processes")
    if args.track and not args.evaluate and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")


def make_envs(args: Args, num_envs: int, seed: int, vectorization: str, device: torch.device):
    """Environments and their first observations [B, D]; exits with code 2 where they cannot be made."""
    try:
        made = make_vec(args.env_id, num_envs, seed, vectorization, device, images=True)
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")
    if not isinstance(made[0].single_action_space, gym.spaces.Discrete):
        fail(f"--env-id {args.env_id}: {type(made[0].single_action_space).__name__} actions, but R2D2 needs Discrete")
    return made


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if given, and leave a run folder with result.json."""
    wall_start, cpu_start = time.time(), time.process_time()
    device, is_main = setup_device(args), RANK == 0
    start_step = checkpoint["global_step"] if checkpoint else 0
    if start_step >= args.total_timesteps and Path(args.resume).with_name("result.json").exists():
        fail(f"--resume {args.resume}: its {start_step} steps are done; raise --total-timesteps")
    env_seed = seed_everything(args.seed, 0, RANK, start_step)
    envs, obs = make_envs(args, args.num_envs // WORLD_SIZE, env_seed, args.vectorization, device)
    seed_everything(args.seed)  # the same weights in every process
    try:
        agent, target = (QNetwork(envs, args).to(device) for _ in range(2))
        replay = SequenceReplay(envs, args, device)
    except (RuntimeError, MemoryError) as error:
        fail(f"network and replay cannot be made (lower --buffer-size, --hidden-size or --num-envs): {error}")
    run_path = make_run_folder(args, checkpoint) if is_main else None
    target.requires_grad_(False).load_state_dict(agent.state_dict())
    seed_everything(args.seed, 2, RANK, start_step)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, so that CUDA graphs see it change
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=can_capture(args, device))
    epsilons = epsilon_ladder(args.num_envs, args.epsilon)[RANK::WORLD_SIZE].to(device)  # [B]
    greedier = (epsilons <= epsilons.median()).cpu().numpy()  # whose returns are shown

    progress = {"iteration": 0, "global_step": 0, "solved": {}, "history": [], "recent_returns": [], "num_updates": 0}
    progress |= {"num_windows": 0, "num_sampled": 0, "num_due": 0.0}  # collected and sampled since learning started
    learning_starts = args.learning_starts
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
        for module, name in ((agent, "agent"), (target, "target"), (optimizer, "optimizer")):
            module.load_state_dict(checkpoint[name])
        optimizer.param_groups[0] |= {"lr": lr, "capturable": can_capture(args, device)}
        wall_start, cpu_start = wall_start - checkpoint["wall_seconds"], cpu_start - checkpoint["cpu_seconds"]
        state = checkpoint["ranks"][RANK] if len(checkpoint["ranks"]) == WORLD_SIZE else {"envs": None, "replay": None}
        if state["replay"] is not None:
            replay.num_added = state["num_added"]
            for x, saved in zip(replay.tensors(), state["replay"], strict=True):
                x.copy_(saved)
            random.setstate(state["python_rng"])
            np.random.set_state(set_plain_state({}, state["numpy_rng"]))
            torch.set_rng_state(state["torch_rng"])
            if device.type == "cuda" and state["cuda_rng"] is not None:
                torch.cuda.set_rng_state(state["cuda_rng"])
        else:
            learning_starts += start_step
        if state["envs"] is not None:
            envs.load_state_dict(state["envs"])
        elif is_main:
            print("the checkpoint does not hold the state of these environments: they start from a reset")
        if state["replay"] is None and is_main:
            print(f"the checkpoint has no replay: learning goes on at step {learning_starts} of {args.total_timesteps}")
    if checkpoint is None or state["envs"] is None:
        replay.begin_episodes(obs)
    writer = make_writer(args, run_path, start_step) if is_main else None

    def save() -> None:
        state = {"envs": None, "replay": None, "num_added": replay.num_added}
        if args.checkpoint_replay:  # the environments go on from their state only with the replay's slots of the past
            state |= {"envs": envs.state_dict(), "replay": replay.tensors()}
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
            content |= {"agent": agent.state_dict(), "target": target.state_dict()}
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", content | {"optimizer": optimizer.state_dict()})

    # The update, as one CUDA graph where that can be
    metrics = torch.zeros(len(METRICS), device=device)
    loss_fn = torch.compile(r2d2_loss) if args.compile else r2d2_loss
    update_step = partial(update_weights, agent, target, optimizer, replay, metrics, loss_fn, args)
    if can_capture(args, device):
        mutated = [*agent.state_dict().values(), *init_optimizer_state(optimizer), replay.priority, metrics]
        update_step = capture_graph(update_step, mutated)
    if checkpoint is None:
        save()
    threshold, loop_start = envs.reward_threshold, time.time()
    bar = tqdm(total=args.total_timesteps, initial=start_step, unit="step", disable=not is_main)
    if is_main:
        bar.write(f"run folder {run_path}")
    while progress["global_step"] < args.total_timesteps:
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1.0 - progress["global_step"] / args.total_timesteps))

        # Collect steps, and the windows that they complete
        num_real, episodes = collect_steps(agent, envs, replay, epsilons, args.num_steps)
        num_windows = replay.add_windows()
        counts = torch.tensor([num_real, num_windows, replay.num_added > 0], device=device)
        num_real, num_windows, num_ready = sum_over_ranks(counts).tolist()
        step, iteration = progress["global_step"] + num_real, progress["iteration"] + 1
        progress |= {"iteration": iteration, "global_step": step}

        # Update the network as often as the replay ratio says
        metrics.zero_()
        num_updates = 0
        if step >= learning_starts and num_ready == WORLD_SIZE:
            num_updates = int((progress["num_due"] + args.replay_ratio * num_windows) / args.batch_size)
            progress["num_due"] += args.replay_ratio * num_windows - num_updates * args.batch_size
            progress["num_windows"] += num_windows
            progress["num_sampled"] += num_updates * args.batch_size
        for _ in range(num_updates):
            update_step()
            progress["num_updates"] += 1
            if progress["num_updates"] % args.target_interval == 0:
                target.load_state_dict(agent.state_dict())

        # Log, evaluate, checkpoint
        losses = (sum_over_ranks(metrics) / max(num_updates, 1)).tolist()
        if not all(map(math.isfinite, losses)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {losses}")
        if is_main:
            scalars = {"charts/learning_rate": lr.item(), "charts/num_updates": progress["num_updates"]}
            if num_updates:
                scalars |= {f"losses/{name}": value for name, value in zip(METRICS, losses, strict=True)}
                scalars["charts/replay_ratio"] = progress["num_sampled"] / progress["num_windows"]
            ended = episodes[:, greedier][episodes[:, greedier, 1] > 0].numpy()  # [episodes, 2]
            if len(ended):
                progress["recent_returns"] = (progress["recent_returns"] + ended[:, 0].tolist())[-20:]
                scalars |= {"charts/episodic_return": ended[:, 0].mean(), "charts/episodic_length": ended[:, 1].mean()}
            scalars["charts/SPS"] = int((step - start_step) / (time.time() - loop_start))
            scalars["charts/cpu_seconds"] = cpu_seconds = time.process_time() - cpu_start
            if recent := progress["recent_returns"]:
                scalars["charts/return_last_20"] = mean_return = float(np.mean(recent))
                progress["history"].append([step, mean_return])
                bar.set_postfix({"return": f"{mean_return:.2f}"}, refresh=False)
                is_solved = threshold is not None and len(recent) == 20 and mean_return >= threshold
                if is_solved and not progress["solved"]:
                    progress["solved"] = {"solved_step": step, "solved_cpu_seconds": cpu_seconds}
                    bar.write(f"solved: last 20 episodes {mean_return:.2f} >= {threshold:g} at step {step:,}")
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
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/episodic_return"}
    result |= {"metrics": eval_metrics | progress["solved"], "env_steps": step}
    result |= {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
    result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result |= {"torch": torch.__version__, "commit": get_commit(), "args": asdict(args)}
    if history:
        title, path = f"{args.env_id}, seed {args.seed}", run_path / "learning_curve.png"
        plot_learning_curve(path, writer, history, title, "environment steps", "return, last 20 episodes")
    writer.close()
    write_atomically(run_path / "result.json", json.dumps(result, indent=2).encode())
    mean, std = eval_metrics["eval/episodic_return"], eval_metrics["eval/episodic_return_std"]
    verdict = "" if threshold is None else f" ({'solved' if mean >= threshold else 'not solved'}: {threshold:g} needed)"
    ceiling = MEMORYLESS_CEILING.get(args.env_id.split(":")[-1])
    verdict += "" if ceiling is None else f", without memory {ceiling:g}"
    print(f"{args.env_id}: return {mean:.2f} +- {std:.2f} over {args.eval_episodes} episodes{verdict}", end=" ")
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
        fixed = "env_id recurrent hidden_size seed num_envs vectorization num_steps burn_in learn_length n_step".split()
        for name in [*fixed, "buffer_size"] if args.resume else fixed[:3]:
            if getattr(args, name) != (trained := getattr(saved, name)):
                fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {path} was trained with {trained}")
    check_args(args)
    if not args.evaluate:
        return train(args, checkpoint)
    device = setup_device(args)
    envs, _ = make_envs(args, 1, args.seed, "auto", device)
    agent = QNetwork(envs, args).to(device)
    agent.load_state_dict(checkpoint["agent"])
    for name, value in evaluate(agent, args, device).items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: --resume the checkpoint.pt in the run folder to go on")
