"""R2D2: recurrent Q-learning with stored states, burn-in and prioritized sequence replay, in one file.

Paper: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (ICLR).

    python algos/r2d2_lstm.py                              # first run: a memory task, seconds on one core
    python algos/r2d2_lstm.py --env-id ALE/Pong-v5 --total-timesteps 20000000 --hidden-size 512 --burn-in 40 \
        --learn-length 40 --n-step 5 --gamma 0.997 --learning-rate 1e-4 --buffer-size 50000 --batch-size 2560 \
        --target-interval 2500                             # full size, pictures
    torchrun --nproc-per-node 2 algos/r2d2_lstm.py         # several GPUs (CPU processes: --no-cuda)

What is computed (section 2.3 of the paper; equations are numbered by this file):

    (1)  h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, the value rescaling
    (2)  y_t  = h( r_t + ... + gamma^(k-t-1) r_(k-1) + gamma^(k-t) h^-1( Q'(s_k, argmax_a Q(s_k, a)) ) ) with
         k = min(t + n, end of the episode); no Q', the target network, where s_k is terminal
    (3)  L    = mean of w (y_t - Q(s_t, a_t))^2 / 2 over the learned steps, w = P^-beta / max P^-beta
    (4)  p    = eta max_t |y_t - Q_t| + (1 - eta) mean_t |y_t - Q_t| of a window, P = p^alpha / sum p^alpha
    (5)  epsilon_i = epsilon^(1 + 7 i / (B - 1)) of environment i; eps, alpha, beta and eta are defaults of functions

The LSTM is unrolled over windows | burn_in steps: state only | learn_length: loss | n_step: targets only |. The windows
of an episode follow each other every learn_length steps, so that each step is learned in exactly one; what a window
lacks after the end of its episode has no weight (--last-window knows two other ways). Unlike the paper's, rewards are
divided by their root mean square, gradients clipped, and windows do not overlap in what they learn.

Shapes: T time, B parallel environments, N windows of a batch, L steps of a window, m of them learned, n of the return,
D flattened observation, A actions, H hidden units, S slots and R windows of the replay.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "gymnasium>=1.4", "tyro>=0.9", "tensorboard>=2.18", "wandb>=0.19", "tqdm>=4.66",
# ]
# ///

import json
import math
import os
import random
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
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [
    str(Path(__file__).resolve().parents[1]),
    os.getcwd(),
]  # for envs_shared, and for your own environments
from envs_shared.gym_tasks.columns import (
    EPISODE_LENGTH,
    EPISODE_RETURN,
    NUM_EXTRA,
    REWARD,
    TERMINATED,
    TRUNCATED,
)
from envs_shared.gym_tasks.memory import MEMORYLESS_CEILING  # and registers the memory tasks
from envs_shared.gym_tasks.normalization import RunningMeanStd
from envs_shared.gym_tasks.scores import EndlessScores, EpisodeScores, own_random_numbers, play_episodes
from envs_shared.gym_tasks.vector import make_vec

SCRIPT = "r2d2_lstm"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
METRICS = ("q_loss", "q_value", "target", "td_error", "grad_norm")  # of an update, logged as losses/*


@dataclass
class Args:
    """R2D2 on any gymnasium environment with discrete actions; observations may be images."""

    # Experiment, logging and checkpoints
    exp_name: str = SCRIPT  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # deterministic cuDNN kernels
    cuda: bool = True  # train on CUDA where there is a GPU
    torch_threads: int = 1  # CPU threads of torch; more than the free cores is far slower
    run_dir: str = "runs"  # folder that holds the run folders; a resumed run stays in its own
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline works)
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    resume: str | None = None  # checkpoint.pt to go on from, with its settings; flags override most of them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate, without training
    checkpoint_interval: int = 10  # iterations between checkpoints (0: only at the start and the end)
    # iterations between evaluations (0: up to ten a run, in at most a fifth of all steps)
    eval_interval: int = 0
    eval_episodes: int = 100  # episodes of the evaluation at the end; those on the way are fewer or simpler
    compile: bool = False  # compile the hot functions with torch.compile (pays on long runs)
    cuda_graphs: bool = True  # on one GPU, record the steps of fixed shape as CUDA graphs and replay them

    # Environment
    env_id: str = "RepeatPreviousEasy-v0"  # gymnasium id; `module:Name-v0` imports the module first
    # auto: the environment's own vector form, else sync
    vectorization: Literal["auto", "sync", "async"] = "auto"
    num_envs: int = 32  # parallel environments B, over all processes

    # Network
    recurrent: bool = True  # an LSTM; --no-recurrent puts a feed-forward layer of equal width in its place
    # the network reads the last action and reward too, which is memory of one step
    last_action_reward: bool = True
    hidden_size: int = 64  # width H of the encoder, the LSTM and the heads
    memory_span: float = 50.0  # steps that the LSTM's slowest units keep their content for at first

    # Algorithm
    total_timesteps: int = 100_000  # environment steps over all environments; the last iteration is completed
    learning_rate: float = 3e-3  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_steps: int = 16  # steps of each environment between two rounds of updates
    gamma: float = 0.98  # discount gamma
    norm_reward: bool = True  # learn from rewards over the root mean square of all that are not zero
    burn_in: int = 8  # steps at the start of a window that only bring the LSTM's state up to date
    learn_length: int = 16  # steps m of a window that are learned, and distance between two windows
    # past the end: no weight, moved back, or null steps
    last_window: Literal["mask", "overlap", "null"] = "mask"
    n_step: int = 1  # steps n of the return before the bootstrap, eq. 2
    # LSTM's state where a window starts: that of acting, or zero
    state_init: Literal["stored", "zero"] = "stored"
    buffer_size: int = 20_000  # windows R in the replay, of each process
    learning_starts: int = 2_000  # environment steps before the first update
    replay_ratio: float = 8.0  # how often a step is learned on average
    batch_size: int = 1024  # steps of an update, over all processes: its windows N times learn_length
    target_interval: int = 50  # updates between two copies of the network to the target network
    epsilon: float = 0.4  # exploration of the most exploring environment, eq. 5
    max_grad_norm: float = 10.0  # largest global norm of the gradient (inf: no limit)
    bf16: bool = False  # run the network in bfloat16 (autocast) in the updates, for CUDA
    checkpoint_replay: bool = False  # save the replay in checkpoints even if it takes more than 500 MB


# ---- Networks --------------------------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    """Encoder, LSTM, dueling heads (Wang et al. 2016): Q(history, .) of observation, last action and last reward."""

    def __init__(self, envs, args: Args):
        super().__init__()
        num_actions = int(envs.single_action_space.n)
        self.recurrent = args.recurrent
        self.last_action_reward = args.last_action_reward
        self.obs_scale = envs.obs_scale
        self.register_buffer("action_ids", torch.arange(num_actions), persistent=False)
        layers = []
        if (
            envs.image_shape is not None
        ):  # the convolutions of Mnih et al. 2015, smaller ones for sides under 36
            channels = (envs.image_shape[0], 32, 64, 64)
            kernels = (
                ((8, 4), (4, 2), (3, 1)) if min(envs.image_shape[1:]) >= 36 else ((3, 2), (3, 2), (3, 1))
            )
            layers.append(nn.Unflatten(-1, envs.image_shape))
            for c_in, c_out, (kernel, stride) in zip(channels[:-1], channels[1:], kernels, strict=True):
                layers += [nn.Conv2d(c_in, c_out, kernel, stride), nn.ReLU()]
            layers.append(nn.Flatten())
        num_features = nn.Sequential(*layers)(torch.zeros(1, envs.obs_dim)).shape[1]
        self.encoder = nn.Sequential(*layers, nn.Linear(num_features, args.hidden_size), nn.ReLU())
        num_inputs = args.hidden_size + (num_actions + 1) * args.last_action_reward
        self.core = (nn.LSTM if args.recurrent else nn.Linear)(num_inputs, args.hidden_size)
        if args.recurrent:  # forget gates tau / (1 + tau) with tau from 1 to memory_span (Tallec et al. 2018)
            log_tau = torch.linspace(0, math.log(args.memory_span), args.hidden_size)
            self.core.bias_hh_l0.data.zero_()
            self.core.bias_ih_l0.data.chunk(4)[1].copy_(log_tau)
        hidden = [nn.Sequential(nn.Linear(args.hidden_size, args.hidden_size), nn.ReLU()) for _ in range(2)]
        self.advantage = hidden[0].append(nn.Linear(args.hidden_size, num_actions))
        self.value = hidden[1].append(nn.Linear(args.hidden_size, 1))

    def forward(self, obs, last_action, last_reward, state):
        """Q values [T, B, A] and the state after T steps, from the state (h, c) [B, 2, H] of the LSTM before them.

        last_action [T, B] (-1: none) and last_reward [T, B] led to obs [T, B, D].
        """
        x = self.encoder(obs.flatten(0, 1).float() / self.obs_scale).unflatten(0, obs.shape[:2])  # [T, B, H]
        if self.last_action_reward:
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


class Actor(nn.Module):
    """What acting in B environments needs: what the network reads there next. Evaluation uses it alone."""

    def __init__(self, envs, args: Args, device: torch.device):
        super().__init__()
        self.same_step = envs.same_step
        self.register_buffer("obs", torch.zeros(envs.num_envs, envs.obs_dim, device=device))  # [B, D]
        self.register_buffer("last_action", torch.full((envs.num_envs,), -1, device=device))  # [B], -1: none
        self.register_buffer("last_reward", torch.zeros(envs.num_envs, device=device))  # [B]
        self.register_buffer(
            "state", torch.zeros(envs.num_envs, 2, args.hidden_size, device=device)
        )  # [B, 2, H]
        self.register_buffer("is_over", torch.zeros(envs.num_envs, dtype=torch.bool, device=device))  # [B]

    def observe(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take in `rows` [B, num_columns], which answered the last actions; where an episode begins, forget all before.

        Returns what the network would read if none began, so at the end of an episode its true last step: obs [B, D],
        last_action and last_reward [B].
        """
        obs_dim = self.obs.shape[1]
        obs, extra = rows[:, :obs_dim], rows[:, obs_dim:]
        is_over = extra[:, TERMINATED] + extra[:, TRUNCATED] > 0
        if self.same_step:  # an ended episode's last observation comes beside the first one of the next
            is_first = is_over
            final_obs = torch.where(is_over.unsqueeze(1), extra[:, NUM_EXTRA:], obs)
        else:  # NEXT_STEP autoreset: the step after the last one ignores its action and begins an episode
            is_first = self.is_over.clone()
            final_obs = obs
        final = (final_obs, self.last_action.clone(), extra[:, REWARD])
        self.obs.copy_(obs)
        self.last_action.masked_fill_(is_first, -1)
        self.last_reward.copy_(extra[:, REWARD] * ~is_first)
        self.state.mul_(~is_first[:, None, None])
        self.is_over.copy_(is_over)
        return final

    def act(self, agent: QNetwork, epsilons: torch.Tensor | None = None) -> torch.Tensor:
        """Actions [B] at what was observed last: greedy ones, or random ones with probability `epsilons` [B]."""
        q, state = agent(
            self.obs[None], self.last_action[None], self.last_reward[None], self.state
        )  # q [1, B, A]
        actions = q[0].argmax(-1)
        if epsilons is not None:
            random_actions = torch.randint_like(actions, q.shape[-1])
            actions = torch.where(torch.rand_like(epsilons) < epsilons, random_actions, actions)
        self.last_action.copy_(actions)
        self.state.copy_(state)
        return actions


class SequenceReplay(nn.Module):
    """Prioritized replay of windows, preallocated on the training device.

    A slot [B] holds what the network read at a time t in every environment; slots are a ring, t lies at t modulo S.
    A window has the time of its first slot, its environment, how it ends and its LSTM state; windows are a ring, too.
    """

    def __init__(self, envs, args: Args, device: torch.device):
        super().__init__()
        self.same_step = envs.same_step
        self.burn_in = args.burn_in
        self.learn_length = args.learn_length
        self.last_window = args.last_window
        self.length = args.burn_in + args.learn_length + args.n_step  # L
        self.num_sampled = max(args.batch_size // WORLD_SIZE // args.learn_length, 1)  # N of this process
        # Slots outlive their windows: an episode has one slot more than steps, windows reach beyond what they learn
        num_slots = math.ceil(args.buffer_size / envs.num_envs) * (args.learn_length + 1) + 2 * self.length
        slots = (num_slots, envs.num_envs)
        windows = (args.buffer_size,)
        state_shape = (2, args.hidden_size)
        tensors = {
            "obs": torch.zeros(*slots, envs.obs_dim, dtype=envs.obs_dtype, device=device),  # [S, B, D]
            "last_action": torch.zeros(slots, dtype=torch.int64, device=device),  # [S, B]
            "last_reward": torch.zeros(slots, device=device),  # [S, B]
            "recent_state": torch.zeros(
                self.length, envs.num_envs, *state_shape, device=device
            ),  # [L, B, 2, H]
            "first": torch.zeros(windows, dtype=torch.int64, device=device),  # [R] time of the first slot
            "env": torch.zeros(windows, dtype=torch.int64, device=device),  # [R]
            "end": torch.zeros(
                windows, dtype=torch.int64, device=device
            ),  # [R] where its episode ends, else L - 1
            "is_warm": torch.zeros(
                windows, dtype=torch.bool, device=device
            ),  # [R] burns in on its episode alone
            "terminated": torch.zeros(windows, dtype=torch.bool, device=device),  # [R] the episode, at `end`
            "state": torch.zeros(
                *windows, *state_shape, device=device
            ),  # [R, 2, H] before the first slot that is read
            "priority": torch.zeros(
                windows, device=device
            ),  # [R] p of eq. 4; zero where there is no window yet
            # What the network would have read at `end`, where the slot holds the first step of another episode
            "end_obs": torch.zeros(*windows, envs.obs_dim, dtype=envs.obs_dtype, device=device),  # [R, D]
            "end_action": torch.zeros(windows, dtype=torch.int64, device=device),  # [R]
            "end_reward": torch.zeros(windows, device=device),  # [R]
            # On the host
            "time": torch.tensor(-1),  # of the latest slot
            "num_added": torch.tensor(0),  # windows since the start
            "episode_start": torch.zeros(envs.num_envs, dtype=torch.int64),  # [B] time of the first slot
            "next_learned": torch.zeros(
                envs.num_envs, dtype=torch.int64
            ),  # [B] time that no window has learned yet
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def add_step(self, actor: Actor, final: tuple, terminated: torch.Tensor, truncated: torch.Tensor) -> None:
        """Add a slot of what `actor` reads now; before it, the windows that `final`, of `observe`, completes.

        terminated and truncated [B] say where `final` is the end of an episode.
        """
        self.time += 1
        self.add_windows(final, terminated, terminated | truncated)
        slot = self.time % len(self.obs)
        self.obs[slot] = actor.obs.to(self.obs.dtype)
        self.last_action[slot] = actor.last_action
        self.last_reward[slot] = actor.last_reward
        self.recent_state[self.time % self.length] = actor.state

    def cut_episodes(self) -> None:
        """End all episodes as truncated at the latest slot; the next one begins others."""
        slot = self.time % len(self.obs)
        everywhere = torch.ones_like(self.next_learned, dtype=torch.bool)
        self.add_windows(
            (self.obs[slot], self.last_action[slot], self.last_reward[slot]), ~everywhere, everywhere
        )
        self.episode_start.fill_(self.time + 1)
        self.next_learned.fill_(self.time + 1)

    def add_windows(self, final: tuple, terminated: torch.Tensor, is_over: torch.Tensor) -> None:
        """Add the windows that have all their steps with `final`, or whose episode is over (`is_over` [B])."""
        device = self.priority.device
        obs, last_action, last_reward = final
        while True:  # an environment's last windows are complete all at once when its episode ends
            is_complete = self.time - self.next_learned >= self.length - 1 - self.burn_in
            env = (is_complete | (is_over & (self.next_learned < self.time))).nonzero().squeeze(1)  # [K]
            if len(env) == 0:
                break
            learned = self.next_learned[env]
            if self.last_window == "overlap":
                full = (self.time - self.learn_length).maximum(self.episode_start[env])
                learned = torch.where(is_over[env], learned.minimum(full), learned)
            first = learned - self.burn_in
            is_warm = first >= self.episode_start[env]
            start = torch.where(is_warm, first, learned)
            index = ((self.num_added + torch.arange(len(env))) % len(self.priority)).to(device)
            self.first[index] = first.to(device)
            self.env[index] = env.to(device)
            self.end[index] = (self.time - first).to(device)
            self.is_warm[index] = is_warm.to(device)
            self.terminated[index] = terminated[env].to(device)
            self.state[index] = self.recent_state[start % self.length, env]
            self.end_obs[index] = obs[env].to(self.obs.dtype)
            self.end_action[index] = last_action[env]
            self.end_reward[index] = last_reward[env]
            largest = self.priority.max()
            self.priority[index] = torch.where(largest > 0, largest, 1.0)
            self.num_added += len(env)
            self.next_learned[env] += self.learn_length
        begins = self.time + (
            0 if self.same_step else 1
        )  # the next episode, in NEXT_STEP autoreset a slot later
        self.episode_start[is_over] = begins
        self.next_learned[is_over] = begins

    def sample(
        self, num_windows: int, alpha: float = 0.9, beta: float = 0.6
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [N] drawn by P = p^alpha / sum p^alpha, stratified, and P^-beta / max P^-beta [N], eq. 3 and 4.

        Nothing waits for the device. Those of priority 0 are never drawn. Source: Schaul et al. 2016, arXiv:1511.05952.
        """
        cumulative = self.priority.pow(alpha).double().cumsum(0)
        noise = torch.rand(num_windows, dtype=torch.float64, device=cumulative.device)
        points = (torch.arange(num_windows, device=noise.device) + noise) / num_windows * cumulative[-1]
        index = torch.searchsorted(cumulative, points.clamp(min=1e-300))  # 0 would draw an empty window
        index = index.clamp(max=len(cumulative) - 1)  # sums that are not finite are beyond all
        weights = self.priority[index].pow(-alpha * beta)  # the sum in P cancels
        return index, weights / weights.max()

    def read_windows(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """The windows `index` [N]: what the network reads in L steps [L, N, ...], and the rest [N, ...].

        From its end on, where other episodes follow in the slots, a window has what was read at its end.
        """
        windows = {name: getattr(self, name)[index] for name in ("end", "is_warm", "terminated", "state")}
        env = self.env[index]
        steps = torch.arange(self.length, device=index.device).unsqueeze(1)  # [L, 1]
        slot = (self.first[index] + steps) % len(self.obs)  # [L, N]
        is_end = steps >= windows["end"]
        obs = self.obs[slot, env]
        windows["obs"] = torch.where(is_end.unsqueeze(-1), self.end_obs[index], obs)  # [L, N, D]
        windows["last_action"] = torch.where(is_end, self.end_action[index], self.last_action[slot, env])
        windows["last_reward"] = torch.where(is_end, self.end_reward[index], self.last_reward[slot, env])
        is_step = steps[: self.learn_length] < windows["end"] - self.burn_in  # [m, N]
        return windows | {"is_learned": is_step | (self.last_window == "null")}


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


@torch.no_grad()
def collect_steps(
    act, actor: Actor, envs, replay: SequenceReplay, num_steps: int
) -> tuple[torch.Tensor, int]:
    """Play `num_steps` steps in every environment into the replay; `act` is `actor.act`, recorded as a graph or not.

    Returns what columns.py lists [num_steps, B, NUM_EXTRA], and how many of the steps were real: a step that only
    resets is none.
    """
    extra = torch.zeros(num_steps, envs.num_envs, NUM_EXTRA)
    num_real = 0
    for t in range(num_steps):
        ends = envs.rows[:, envs.obs_dim :][:, [TERMINATED, TRUNCATED]] > 0  # [B, 2], of the step before
        last = actor.observe(envs.rows.to(actor.obs.device, non_blocking=True))
        replay.add_step(actor, last, *ends.unbind(1))
        num_real += envs.num_envs - (0 if envs.same_step else int(ends.any(1).sum()))
        rows = envs.step(act())
        extra[t] = rows[:, envs.obs_dim :][:, :NUM_EXTRA]
    return extra, num_real


def unroll(agent: QNetwork, windows: dict[str, torch.Tensor], args: Args) -> torch.Tensor:
    """Q values [m + n, N, A] of the windows' steps after the burn-in, which brings the state up to date first.

    Where the burn-in would reach back before the episode it is left out: the window starts from the stored state of its
    first learned step, which is zero at the episode's first.
    """
    steps = [windows[name] for name in ("obs", "last_action", "last_reward")]
    state = windows["state"] if args.state_init == "stored" else torch.zeros_like(windows["state"])
    autocast = partial(torch.autocast, state.device.type, torch.bfloat16, enabled=args.bf16)
    if args.burn_in > 0 and args.recurrent:
        with torch.no_grad(), autocast():
            _, burned = agent(*(x[: args.burn_in] for x in steps), state)
        state = torch.where(windows["is_warm"][:, None, None], burned.to(state.dtype), state)
    with (
        autocast()
    ):  # one of its own: weights that are cast without gradient are kept to the end of the context
        q, _ = agent(*(x[args.burn_in :] for x in steps), state)
    return q.float()


def compute_targets(q, target_q, rewards, end, terminated, gamma: float, n_step: int) -> torch.Tensor:
    """y_t [m, N] of eq. 2: n-step, double Q (van Hasselt et al. 2016), rescaled.

    q and target_q [m + n, N, A] of steps 0 to m + n - 1, rewards [m + n - 1, N] that followed them. Nothing follows
    step `end` [N] in [1, m + n - 1], where the episode may have `terminated` [N]; steps t >= end have zero.
    """
    t = torch.arange(len(q), device=q.device).unsqueeze(1)  # [m + n, 1]
    rewards = rewards * (t[:-1] < end)
    returns = rewards.unfold(0, n_step, 1) @ gamma ** torch.arange(n_step, device=q.device)  # [m, N]
    t = t[: len(returns)]
    bootstrap = (t + n_step).minimum(end)  # k [m, N]
    best_actions = q.argmax(-1, keepdim=True)  # [m + n, N, 1]
    values = inverse_value_rescale(target_q.gather(-1, best_actions).squeeze(-1))  # [m + n, N]
    values = values.gather(0, bootstrap) * ~(terminated & (bootstrap == end))  # [m, N]
    discount = gamma ** (bootstrap - t).clamp(min=0)
    return value_rescale(returns + discount * values) * (t < end)


def sequence_priority(td_errors: torch.Tensor, is_learned: torch.Tensor, eta: float = 0.9) -> torch.Tensor:
    """p [N] of eq. 4 from errors [m, N], over the steps that are learned [m, N]."""
    errors = td_errors.abs() * is_learned
    return eta * errors.amax(0) + (1.0 - eta) * errors.sum(0) / is_learned.sum(0)


def r2d2_loss(
    agent: QNetwork, target: QNetwork, windows: dict[str, torch.Tensor], weights, count, args: Args
):
    """Eq. 3 as the mean over the `count` learned steps of all processes, the windows' new priorities, and METRICS[:4].

    `windows` as `read_windows` gives them, with the `rewards` [L, N] to learn from, which may be normalized.
    """
    is_learned = windows["is_learned"]  # [m, N]
    # Action and reward of step t are what the network reads at t + 1
    actions = windows["last_action"][args.burn_in + 1 :][: args.learn_length]  # [m, N]
    rewards = windows["rewards"][args.burn_in + 1 :]  # [m + n - 1, N]
    q = unroll(agent, windows, args)  # [m + n, N, A]
    with torch.no_grad():
        target_q = unroll(target, windows, args)
        end = windows["end"] - args.burn_in
        targets = compute_targets(
            q, target_q, rewards, end, windows["terminated"], args.gamma, args.n_step
        )  # [m, N]
    q_taken = q[: args.learn_length].gather(-1, actions.unsqueeze(-1)).squeeze(-1)  # [m, N]
    td_errors = torch.where(is_learned, targets - q_taken, 0.0)
    losses = 0.5 * weights * td_errors.square()
    metrics = torch.stack((losses, q_taken, targets, td_errors.abs())).detach() * is_learned  # [4, m, N]
    priorities = sequence_priority(td_errors.detach(), is_learned)
    return losses.sum() / count, priorities, metrics.sum((1, 2)) / count


def update_network(
    agent, target, optimizer, replay: SequenceReplay, reward_stats, loss_fn, args: Args
) -> torch.Tensor:
    """One gradient step on sampled windows, and their new priorities; returns this process's part of METRICS [5]."""
    index, weights = replay.sample(replay.num_sampled)
    windows = replay.read_windows(index)
    windows["rewards"] = windows["last_reward"]
    if args.norm_reward:
        windows["rewards"] = windows["last_reward"] / reward_stats.get_rms()
    count = sum_over_ranks(windows["is_learned"].sum())
    optimizer.zero_grad()
    loss, priorities, metrics = loss_fn(agent, target, windows, weights, count, args)
    loss.backward()
    sum_gradients(agent.parameters())
    grad_norm = clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    replay.priority[index] = priorities.clamp(min=1e-8)  # a priority of zero would never be drawn again
    return torch.cat((metrics, grad_norm.unsqueeze(0) / WORLD_SIZE))


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def make_env(env_id: str, **kwargs) -> gym.Env:
    """One environment, for training and evaluation alike: wrappers and arguments of your own go here.

    Those are noticed, and make the vector form a SyncVectorEnv; any other change needs --vectorization sync.
    """
    return gym.make(env_id, **kwargs)


def make_envs(args: Args, num_envs: int, seed: int, **kwargs):
    """`num_envs` environments, reset with `seed`; exits with code 2 where they cannot be made."""
    try:
        envs, _ = make_vec(args.env_id, num_envs, seed, images=True, make_env=make_env, **kwargs)
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")
    if not isinstance(envs.single_action_space, gym.spaces.Discrete):
        fail(
            f"--env-id {args.env_id}: {type(envs.single_action_space).__name__} actions, but R2D2 needs Discrete"
        )
    return envs


@torch.inference_mode()
def evaluate(
    agent: QNetwork, args: Args, device: torch.device, num_episodes: int, stream: int
) -> dict[str, float]:
    """Scores of the greedy actions, in environments that are the same for every call with the same `stream`."""
    seed = int(np.random.SeedSequence([args.seed, stream]).generate_state(1)[0])
    with own_random_numbers(seed):  # training's stay what they are
        envs = make_envs(args, min(args.num_envs, num_episodes), seed, vectorization=args.vectorization)
        actor = Actor(envs, args, device)

        def play(_):
            actor.observe(envs.rows.to(device))
            return actor.act(agent)

        return play_episodes(envs, play, num_episodes)


# ---- Run (the same in all scripts) -----------------------------------------------------------------------------------


def fail(message: str) -> NoReturn:
    """Print one line for the user and exit with code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def setup_device(args: Args) -> torch.device:
    """Threads, device and, under torchrun, process group of this process."""
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    use_cuda = args.cuda and torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if use_cuda and local_rank >= torch.cuda.device_count():
        fail(
            f"--nproc-per-node: more than {torch.cuda.device_count()} GPU(s); --no-cuda trains on CPU processes"
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be recorded as a CUDA graph
    if WORLD_SIZE > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(hours=2))
    return device


def seed_everything(seed: int, *stream: int) -> int:
    """Seed the generators of Python, numpy and torch from (seed, *stream); returns the number used."""
    derived = int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0])
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
    return derived


def read_clock() -> np.ndarray:
    """Wall and CPU seconds."""
    return np.array([time.time(), time.process_time()])


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Sum `x` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def sum_gradients(parameters) -> None:
    """Sum the gradients over all processes, in one message."""
    if dist.is_initialized():
        grads = [p.grad for p in parameters if p.grad is not None]
        vector_to_parameters(sum_over_ranks(parameters_to_vector(grads)), grads)


def save_checkpoint(path: Path, args: Args, progress: dict, parts: dict) -> None:
    """Write settings, counters and states of `parts`, so that a kill at any moment leaves the old file or the new."""
    content = {"script": SCRIPT, "args": asdict(args) | {"resume": None}, "torch_rng": torch.get_rng_state()}
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(content | progress | states, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint of this script without unpickling code; exits with code 2 where the file is none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = {field.name for field in fields(Args)}  # those that are missing have their defaults
        checkpoint["args"] = Args(
            **{name: value for name, value in checkpoint["args"].items() if name in known}
        )
    except FileNotFoundError:
        fail(f"{path or repr(path)}: no such checkpoint")
    except Exception as error:
        fail(f"{path}: not a readable checkpoint ({type(error).__name__})")
    if checkpoint.get("script") != SCRIPT:
        fail(f"{path}: a checkpoint of {checkpoint.get('script')}.py, not of {SCRIPT}.py")
    return checkpoint


def open_run(args: Args, start_step: int) -> tuple[Path, SummaryWriter]:
    """The run folder, new or that of --resume, where an older result steps aside, and its log, also at W&B."""
    if args.track:
        try:
            import wandb

            wandb.login()
        except Exception as error:
            fail(f"--track: {error} (pip install wandb; wandb login, or WANDB_MODE=offline)")
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    run_path = Path(
        args.run_dir, name.translate(str.maketrans("/:;,#?'", "-------"))
    )  # what W&B refuses in an id
    if args.resume is not None:
        run_path = Path(args.resume).resolve().parent
    try:
        run_path.mkdir(parents=True, exist_ok=True)
        if (run_path / "result.json").exists():
            (run_path / "result.json").rename(run_path / f"result_{start_step}.json")
    except OSError as error:
        fail(f"--run-dir {args.run_dir}: cannot make or write {run_path} ({error.strerror})")
    print(f"run folder {run_path}")
    if args.track:
        identity = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        identity |= {"id": run_path.name, "name": run_path.name}
        wandb.init(**identity, resume="allow", dir=run_path, config=asdict(args), sync_tensorboard=True)
    return run_path, SummaryWriter(str(run_path), purge_step=None if args.resume is None else start_step + 1)


class CudaGraph:
    """Calls `fn` three times as it is, records the fourth call as a CUDA graph and replays that from then on.

    `fn` takes tensors of fixed shapes, which are copied to the same memory in each call, reads and writes other tensors
    where they are, and never waits for the host. What it returns is overwritten by the next call.
    """

    def __init__(self, fn):
        self.fn = fn
        self.num_calls = 0
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self, *inputs: torch.Tensor):
        self.num_calls += 1
        if self.num_calls < 4:
            return self.fn(*inputs)
        if self.num_calls == 4:
            self.inputs = [x.clone() for x in inputs]
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.outputs = self.fn(*self.inputs)
        for buffer, x in zip(self.inputs, inputs, strict=True):
            buffer.copy_(x)
        self.graph.replay()
        return self.outputs


# ---- Training --------------------------------------------------------------------------------------------------------


def check_args(args: Args) -> None:
    """Exit with code 2 and one line for settings that cannot work."""
    may_be_zero = "seed checkpoint_interval eval_interval gamma burn_in learning_starts epsilon".split()
    for name, value in vars(args).items():
        is_number = type(value) in (int, float)
        if is_number and not (value > 0 or (value == 0 and name in may_be_zero)):
            fail(
                f"--{name.replace('_', '-')} {value}: has to be {'at least' if name in may_be_zero else 'above'} 0"
            )
        if name in ("gamma", "epsilon") and value > 1:
            fail(f"--{name} {value}: has to be from 0 to 1")
        if name in ("num_envs", "batch_size") and value % WORLD_SIZE:
            fail(f"--{name.replace('_', '-')} {value} does not divide among {WORLD_SIZE} processes")
    if args.buffer_size < args.num_envs // WORLD_SIZE:
        fail(
            f"--buffer-size {args.buffer_size}: has to hold a window of each of {args.num_envs} environments"
        )
    if args.memory_span < 1:
        fail(f"--memory-span {args.memory_span}: has to be at least 1")
    if args.resume is None and args.evaluate is None and args.learning_starts >= args.total_timesteps:
        fail(f"--learning-starts {args.learning_starts}: --total-timesteps {args.total_timesteps} end before")


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if there is one, and leave a run folder with result.json."""
    progress = {
        "iteration": 0,
        "global_step": 0,
        "eval_steps": 0,
        "seconds": [0.0, 0.0],
        "eval_seconds": [0.0, 0.0],
    }
    progress |= {"num_updates": 0, "num_due": 0.0}  # updates so far, and due by the replay ratio
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
    start = read_clock() - progress["seconds"]
    step = progress["global_step"]
    device = setup_device(args)

    # Streams of the seed: 0 environments and 2 samples, of each process; 1 weights; 3 and 4 evaluations
    env_seed = seed_everything(args.seed, 0, RANK, step)
    envs = make_envs(
        args, args.num_envs // WORLD_SIZE, env_seed, vectorization=args.vectorization, device=device
    )
    seed_everything(args.seed, 1)
    try:
        agent = QNetwork(envs, args).to(device)
        target = QNetwork(envs, args).to(device).requires_grad_(False)
        actor = Actor(envs, args, device)
        replay = SequenceReplay(envs, args, device)
    except (RuntimeError, MemoryError) as error:
        fail(f"network and replay cannot be made (lower --buffer-size, --hidden-size or --num-envs): {error}")
    target.load_state_dict(agent.state_dict())
    seed_everything(args.seed, 2, RANK, step)
    use_graphs = args.cuda_graphs and device.type == "cuda" and WORLD_SIZE == 1
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, so that CUDA graphs see it change
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=use_graphs)
    reward_stats = RunningMeanStd().to(device)
    scores = EpisodeScores()
    endless_scores = EndlessScores()

    learning_starts = args.learning_starts
    parts = {"agent": agent, "target": target, "optimizer": optimizer, "reward_stats": reward_stats}
    parts |= {"scores": scores, "endless_scores": endless_scores}
    if WORLD_SIZE == 1:
        parts |= {"envs": envs, "actor": actor}
        if args.checkpoint_replay or sum(x.nbytes for x in replay.buffers()) < 500e6:
            parts["replay"] = replay
    if checkpoint is not None:
        has_replay = "replay" in parts and "replay" in checkpoint
        goes_on = WORLD_SIZE == 1 and checkpoint.get("envs") is not None
        for name, part in parts.items():
            if name in checkpoint and (name != "actor" or goes_on):
                part.load_state_dict(checkpoint[name])
        optimizer.param_groups[0] |= {"lr": lr, "capturable": use_graphs}
        if goes_on and has_replay:
            torch.set_rng_state(checkpoint["torch_rng"])
        elif has_replay:  # episodes start anew
            replay.cut_episodes()
        else:
            learning_starts += step
            if RANK == 0:
                print(
                    f"the replay starts empty: learning goes on at step {learning_starts} of {args.total_timesteps}"
                )
    if RANK == 0:
        run_path, writer = open_run(args, step)
        best_path = run_path / "best.pt"
        if checkpoint is None:
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)

    # Acting and the update, each one CUDA graph where that can be
    graph = CudaGraph if use_graphs else lambda fn: fn
    epsilons = epsilon_ladder(args.num_envs, args.epsilon)[RANK::WORLD_SIZE].to(device)  # [B]
    is_greedier = (epsilons <= epsilons.median()).cpu()  # [B], whose returns are shown
    act = graph(partial(actor.act, agent, epsilons))
    loss_fn = torch.compile(r2d2_loss) if args.compile else r2d2_loss
    update = graph(partial(update_network, agent, target, optimizer, replay, reward_stats, loss_fn, args))

    eval_interval = args.eval_interval or math.ceil(
        args.total_timesteps / 10 / (args.num_envs * args.num_steps)
    )
    bar = tqdm(total=args.total_timesteps, initial=step, unit="step", disable=RANK > 0)
    while step < args.total_timesteps:
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1.0 - step / args.total_timesteps))

        # Collect steps, and the windows that they complete
        num_added = int(replay.num_added)
        extra, num_real = collect_steps(act, actor, envs, replay, args.num_steps)  # [num_steps, B, NUM_EXTRA]
        rewards = extra.to(device)[..., REWARD]
        reward_stats.update(rewards, rewards != 0)
        counts = torch.tensor(
            [num_real, int(replay.num_added) - num_added, replay.num_added > 0], device=device
        )
        num_real, num_collected, num_ready = sum_over_ranks(counts).tolist()
        step += num_real

        # Update the network as often as the replay ratio says
        if step >= learning_starts and num_ready == WORLD_SIZE:
            progress["num_due"] += args.replay_ratio * num_collected / (replay.num_sampled * WORLD_SIZE)
        num_updates = int(progress["num_due"])
        metrics = torch.zeros(len(METRICS), device=device)
        for i in range(progress["num_updates"] + 1, progress["num_updates"] + num_updates + 1):
            metrics += update()
            if i % args.target_interval == 0:
                target.load_state_dict(agent.state_dict())
        progress |= {"iteration": progress["iteration"] + 1, "global_step": step}
        progress |= {
            "num_updates": progress["num_updates"] + num_updates,
            "num_due": progress["num_due"] - num_updates,
        }

        # Measure what is new
        means = (sum_over_ranks(metrics) / max(num_updates, 1)).tolist()
        if not all(map(math.isfinite, means)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {means}")
        if RANK > 0:
            continue
        scalars = {
            f"losses/{name}": mean for name, mean in zip(METRICS, means, strict=True) if num_updates > 0
        }
        scalars |= {"charts/num_updates": progress["num_updates"], "charts/learning_rate": lr.item()}
        seconds = read_clock() - start - progress["eval_seconds"]
        scalars |= {"charts/wall_seconds": seconds[0], "charts/cpu_seconds": seconds[1]}
        scalars["charts/SPS"] = step / seconds[0]
        scalars |= scores.summarize(extra[:, is_greedier, EPISODE_RETURN : EPISODE_LENGTH + 1])
        scalars |= endless_scores.summarize(extra[:, is_greedier])
        if scores.recent_returns:
            bar.set_postfix_str(
                f"return={np.mean(scores.recent_returns):.2f} at step {step:,}", refresh=False
            )
        bar.update(min(step, args.total_timesteps) - bar.n)

        # Evaluate, keep the policy that scored best, log and save
        is_last = step >= args.total_timesteps
        is_allowed = args.eval_interval > 0 or progress["eval_steps"] <= step / 4  # a fifth of all
        if is_last or (is_allowed and progress["iteration"] % eval_interval == 0):
            eval_start = read_clock()
            num_episodes = min(10, args.eval_episodes)
            scalars |= evaluate(agent, args, device, num_episodes, 3)
            score = scalars["eval/episodic_return"]
            if not best_path.exists() or score >= load_checkpoint(best_path)["best_return"]:
                save_checkpoint(best_path, args, progress | {"best_return": score}, {"agent": agent})
            progress["eval_steps"] += num_episodes * scalars["eval/episodic_length"]
            progress["eval_seconds"] = (read_clock() - eval_start + progress["eval_seconds"]).tolist()
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        if is_last or (args.checkpoint_interval and progress["iteration"] % args.checkpoint_interval == 0):
            progress["seconds"] = (read_clock() - start).tolist()
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)
    bar.close()
    envs.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if RANK > 0:
        return

    # Score the final policy and the best one on episodes that chose neither
    metrics = best = evaluate(agent, args, device, args.eval_episodes, 4)
    if best_path.exists() and load_checkpoint(best_path)["global_step"] != step:
        agent.load_state_dict(load_checkpoint(best_path)["agent"])
        best = evaluate(agent, args, device, args.eval_episodes, 4)
    metrics = metrics | {name.replace("eval/", "best/"): value for name, value in best.items()}
    writer.close()
    seconds = read_clock() - start
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/episodic_return"}
    result |= {"metrics": metrics, "env_steps": step, "wall_seconds": seconds[0], "cpu_seconds": seconds[1]}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    result |= {"torch": torch.__version__, "args": asdict(args)}
    (run_path / "result.json.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_path / "result.json.tmp", run_path / "result.json")
    score = f"{metrics['eval/episodic_return']:.2f} +- {metrics['eval/episodic_return_std']:.2f}"
    ceiling = MEMORYLESS_CEILING.get(args.env_id.split(":")[-1])
    score += "" if ceiling is None else f" (without memory {ceiling:g})"
    print(f"{args.env_id}: return {score} after {step:,} steps in {seconds[0]:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, or evaluate a checkpoint."""
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    if args.evaluate is not None and (args.resume is not None or WORLD_SIZE > 1):
        fail("--resume and --evaluate exclude each other, and --evaluate is for one process")
    path = args.resume if args.evaluate is None else args.evaluate
    if path is not None:
        checkpoint = load_checkpoint(path)
        saved = checkpoint["args"]
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        fixed = "env_id recurrent last_action_reward hidden_size".split()
        if args.resume is not None:
            fixed += "seed num_envs vectorization num_steps norm_reward burn_in learn_length n_step buffer_size".split()
        for name in fixed:
            if getattr(args, name) != getattr(saved, name):
                fail(f"--{name.replace('_', '-')}: {path} was trained with {getattr(saved, name)}")
    if args.resume is not None:
        if "optimizer" not in checkpoint:
            fail(f"--resume {path}: has no optimizer state; give the checkpoint.pt beside it")
        is_done = checkpoint["global_step"] >= args.total_timesteps
        if is_done and Path(path).with_name("result.json").exists():
            fail(f"--resume {path}: its {checkpoint['global_step']} steps are done; raise --total-timesteps")
    check_args(args)
    if args.evaluate is None:
        return train(args, checkpoint)

    device = setup_device(args)
    agent = QNetwork(make_envs(args, 1, args.seed), args).to(device)
    agent.load_state_dict(checkpoint["agent"])
    for name, value in evaluate(agent, args, device, args.eval_episodes, 4).items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: a training goes on with --resume and the checkpoint.pt in its run folder")
