"""AlphaZero for Go with asynchronous batched search and a replay pool ranked by loss, in one file.

Papers: Silver et al. 2018, "A general reinforcement learning algorithm that masters chess, shogi, and Go through
self-play" (Science 362); Silver et al. 2017, "Mastering the game of Go without human knowledge" (Nature 550).

    python algos/alphazero_go.py                           # first run: 5x5, minutes on two cores
    python algos/alphazero_go.py --env-id Go-9x9 --num-games 1024 --blocks 6 --channels 64 --bf16 --pool-size 500000 \
        --simulations-start 64 --simulations-end 400 --num-epochs 400 --batch-size 128   # full size, on a GPU
    torchrun --nproc-per-node 2 algos/alphazero_go.py      # several GPUs (or CPU processes)
    python algos/alphazero_go.py --gtp CHECKPOINT          # play against it from Sabaki, GoGui or GNU Go

What is computed, with values v in [0, 1] from the side to move, v = 1 - v for the other side:

    (1) score(s, a) = Q(s, a) + c sqrt(max(N(s), 1)) / (N(s, a) + 1) P(a | s)      the move followed in the tree
    (2) Q(s, a) = mean of the leaf evaluations below the edge                      --fpu where there are none
    (3) P(root) + eta noise, or (1 - eta) P(root) + eta noise, noise ~ Dirichlet   --noise
    (4) L_policy = -sum_a pi(a) log p(a), pi = N(s, .) / sum N(s, .)
    (5) L_value = (v - (alpha Q(s) + (1 - alpha) z))^2, z = 1 for a won game, 0 for a lost one
    (6) L = g L_value / 0.25 + (1 - g) L_policy / log A                            both scales are 1 for a blank guess
    (7) rank(record) = g (v - target)^2 / 0.25 + (1 - g) KL(pi, p) / log A         its loss less what no one can learn

Shapes: G games side by side, R some of them, B batch, A = n^2 + 1 moves, D depth of a path in the tree.
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
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: a second, kept out of the timings
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]  # for envs_shared
from envs_shared.go_tasks import gtp
from envs_shared.go_tasks.files import draw_board
from envs_shared.go_tasks.match import RolloutEvaluator, choose_random_moves, compute_elo, format_games, play_match
from envs_shared.go_tasks.rules import NUM_PLANES, Boards, Go

SCRIPT = "alphazero_go"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


@dataclass
class Args:
    """AlphaZero on Go boards of any size."""

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
    gtp: str | None = None
    """checkpoint.pt to play with as a GTP engine, without training"""

    # Environment
    env_id: str = "Go-5x5"
    """board, from Go-2x2 to Go-19x19: area scoring, no suicide, positional superko"""
    komi: float = 0.5
    """points for white; whole numbers allow draws"""
    score_weight: float = 0.0
    """share of the score in z: 0 counts won games alone, above that also by how much they are won"""
    num_games: int = 128
    """games of self-play side by side G, over all processes"""

    # Network
    blocks: int = 3
    """residual blocks"""
    channels: int = 32
    """channels of the residual tower"""
    bf16: bool = False
    """run the network in bfloat16: twice as fast on GPUs and on CPUs that have it"""

    # Search
    simulations_start: int = 32
    """simulations per move in the first epoch"""
    simulations_end: int = 48
    """simulations per move in the last epoch, and in evaluation and play"""
    num_slots: Literal[1, 2] = 2
    """batches in flight: two let the tree and the network work at the same time"""
    pseudo_limit: float = 0.1
    """largest share k of pseudo visits in the visits of a root; beyond it a colliding request waits"""
    c_puct: float = 1.25
    """exploration c, eq. 1"""
    fpu: Literal["zero", "parent"] = "parent"
    """first-play value Q of an edge without visits, eq. 2: lost, or what the network thinks of its parent"""
    noise: Literal["additive", "convex", "none"] = "convex"
    """noise on the prior of the root in self-play, eq. 3"""
    noise_weight: float = 0.25
    """weight eta of that noise"""
    dirichlet_alpha: float = 0.03
    """concentration of that noise on 19x19, scaled up by 361 / n^2 on smaller boards"""
    move_choice: Literal["temperature", "epsilon"] = "temperature"
    """in self-play: in proportion to visits for n^2 / 3 moves, then the most visited; or epsilon-greedy"""
    epsilon_start: float = 0.5
    """share of random moves in the first epoch, with --move-choice epsilon"""
    epsilon_end: float = 0.001
    """share of random moves in the last epoch"""

    # Learning
    num_epochs: int = 20
    """epochs of self-play and training, those of pretraining included"""
    pretrain_value_epochs: int = 0
    """first epochs that learn the value of random games with a frozen policy head"""
    pretrain_search_epochs: int = 0
    """epochs after those that search with a uniform prior and classic UCB"""
    pool_size: int = 100_000
    """records in the replay pool, over all processes; each of the eight images of a position is one"""
    generate_fraction: float = 0.05
    """new records of an epoch, as a share of the pool's size"""
    train_fraction: float = 0.15
    """records trained on in an epoch, as a share of the pool's size"""
    replay_order: Literal["loss", "mix", "uniform"] = "mix"
    """train on the largest losses of eq. 7, on half drawn in proportion to them and half at random, or all at random"""
    loss_clamp: float = 0.5
    """largest loss of eq. 7 that counts in the ranking"""
    max_reuse: int = 12
    """times a record is trained on, at most, while others are left"""
    max_age: int = 30
    """epochs after which a record is evicted first"""
    holdout_fraction: float = 0.05
    """share of games that are kept out of the pool, to measure the losses on"""
    batch_size: int = 128
    """records of a minibatch, over all processes"""
    learning_rate: float = 4e-3
    """AdamW's learning rate"""
    anneal_lr: bool = True
    """lower the learning rate linearly to a hundredth"""
    weight_decay: float = 1e-2
    """AdamW's weight decay"""
    value_coef: float = 0.2
    """share g of the value in the loss, eq. 6"""
    q_weight_start: float = 0.05
    """weight alpha of the search's Q in the value target in the first epoch, eq. 5"""
    q_weight_end: float = 0.5
    """weight alpha in the last epoch"""
    gamma: float = 1.0
    """decay of z towards 1/2 for every move that the game went on"""
    arena_interval: int = 5
    """epochs between matches against the copy from the last match (0: none)"""
    arena_games: int = 40
    """games of such a match"""


# ---- Networks --------------------------------------------------------------------------------------------------------


class ConvNorm(nn.Module):
    """Convolution and batch normalization, or with `is_folded` one convolution that does the same."""

    def __init__(self, num_in: int, num_out: int, kernel_size: int, is_folded: bool):
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, kernel_size, padding=kernel_size // 2, bias=is_folded)
        self.norm = nn.Identity() if is_folded else nn.BatchNorm2d(num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Agent(nn.Module):
    """Residual tower with a policy head and a value head (Silver et al. 2017, methods)."""

    def __init__(self, size: int, args: Args, is_folded: bool = False):
        super().__init__()
        make, width, self.autocasts = partial(ConvNorm, is_folded=is_folded), args.channels, args.bf16 and not is_folded
        self.stem = make(NUM_PLANES, width, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleList([make(width, width, 3) for _ in range(2)]) for _ in range(args.blocks)
        )
        self.policy_conv, self.value_conv = make(width, 4, 1), make(width, 4, 1)
        self.policy_head = nn.Linear(4 * size**2, size**2 + 1)
        self.value_head = nn.Sequential(nn.Linear(4 * size**2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, A] of all moves and values [B] in [0, 1] of planes [B, NUM_PLANES, n, n]."""
        with torch.autocast(planes.device.type, torch.bfloat16, enabled=self.autocasts):
            x = self.stem(planes.to(self.policy_head.weight.dtype, memory_format=torch.channels_last)).relu()
            for first, second in self.blocks:
                x = (x + second(first(x).relu())).relu()  # [B, channels, n, n]
            logits = self.policy_head(self.policy_conv(x).relu().flatten(1))
            value = self.value_head(self.value_conv(x).relu().flatten(1)).squeeze(1)
        return logits.float(), value.float().sigmoid()

    @torch.no_grad()
    def fold_into(self, other: "Agent") -> "Agent":
        """Write this network into `other`, made with is_folded: the same function with the batch norms folded in."""
        for mine, folded in zip(self.modules(), other.modules(), strict=True):
            if isinstance(mine, nn.Linear):
                mine_params = mine.weight, mine.bias
            elif isinstance(mine, ConvNorm):
                norm, conv, folded = mine.norm, mine.conv, folded.conv
                statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
                mine_params = fuse_conv_bn_weights(conv.weight, None, *statistics)
            else:
                continue
            folded.weight.copy_(mine_params[0])
            folded.bias.copy_(mine_params[1])
        return other


# ---- Storage ---------------------------------------------------------------------------------------------------------


class Records(NamedTuple):
    """What self-play learns from: M positions, as their side to move saw them."""

    planes: torch.Tensor  # bool [M, NUM_PLANES n^2]
    visits: torch.Tensor  # float16 [M, A] distribution of the visits of the search
    q: torch.Tensor  # [M] value of the search
    z: torch.Tensor  # [M] result of the game


class Pool:
    """Records ranked by their loss (eq. 7); each of the eight images of a position is one."""

    def __init__(self, capacity: int, num_actions: int, device: torch.device):
        planes = torch.zeros(capacity, NUM_PLANES * (num_actions - 1), dtype=torch.bool, device=device)
        visits = torch.zeros(capacity, num_actions, dtype=torch.float16, device=device)
        self.records = Records(planes, visits, *torch.zeros(2, capacity, device=device))
        self.loss = torch.zeros(capacity, device=device)  # of eq. 7, as last computed
        # The epoch it was made in, how often it was trained on, and a number that is the same for all images
        self.epoch, self.num_uses, self.position = torch.zeros(3, capacity, dtype=torch.int64, device=device)
        self.size, self.num_positions = 0, 0

    def add(self, images: Records, loss: torch.Tensor, epoch: int, max_age: int | None) -> int:
        """Put in images of positions [8 M, ...] with their loss [8 M]; returns how many records were evicted.

        Beyond the capacity those older than `max_age` epochs leave first, then those of the lowest loss, be they old or
        new; the oldest if it is None.
        """
        num_new, capacity = len(loss), len(self.loss)
        if num_new == 0:
            return 0
        keys = torch.cat((self.loss[: self.size], loss))
        epochs = torch.cat((self.epoch[: self.size], torch.full_like(loss, epoch, dtype=torch.int64)))
        keys = epochs.float() if max_age is None else keys.masked_fill(epochs < epoch - max_age, -1)
        num_evicted = max(0, self.size + num_new - capacity)
        evicted = keys.topk(num_evicted, largest=False).indices
        stays = torch.ones_like(loss, dtype=torch.bool)
        stays[evicted[evicted >= self.size] - self.size] = False
        rows = stays.nonzero()[:, 0]
        free = torch.arange(self.size, capacity, device=loss.device)
        index = torch.cat((evicted[evicted < self.size], free))[: len(rows)]
        for mine, new in zip(self.records, images, strict=True):
            mine[index] = new[rows]
        position = self.num_positions + rows % (num_new // 8)
        self.loss[index], self.epoch[index], self.num_uses[index], self.position[index] = loss[rows], epoch, 0, position
        self.num_positions += num_new // 8
        self.size = min(capacity, self.size + num_new)
        return num_evicted

    def sample(self, num_records: int, args: Args) -> torch.Tensor:
        """Index of up to `num_records` records in the --replay-order, no two of them images of the same position."""
        is_free = self.num_uses[: self.size] < args.max_reuse
        loss = (self.loss[: self.size].clamp(max=args.loss_clamp) + 1e-6) * is_free
        count = min(8 * num_records, self.size)  # which are images of `num_records` positions at least

        def draw(weights: torch.Tensor) -> torch.Tensor:
            total = (weights.double() + 1e-12).cumsum(0)
            drawn = torch.rand(count, dtype=torch.float64, device=total.device) * total[-1]
            return torch.searchsorted(total, drawn).clamp(max=self.size - 1)

        if args.replay_order == "loss":  # equal ones, as those at the clamp are, in random order
            index = (loss + 1e-6 * torch.rand_like(loss)).topk(count).indices
        elif args.replay_order == "mix":
            is_even = torch.arange(count, device=loss.device) % 2 == 0
            index = torch.where(is_even, draw(loss), draw(is_free))
        else:
            index = draw(is_free)
        _, inverse = self.position[index].unique(return_inverse=True)
        place = torch.arange(count, device=loss.device)
        first = torch.full_like(place, count).scatter_reduce(0, inverse, place, "amin")
        return index[first[inverse] == place][:num_records]

    def rank(self) -> torch.Tensor:
        """Place of each record [size], 0 for the largest loss to 1."""
        order = self.loss[: self.size].argsort(descending=True)
        places = torch.linspace(0, 1, self.size, device=order.device)
        return torch.empty_like(places).scatter_(0, order, places)

    def state_dict(self) -> dict:
        """What a checkpoint needs of it."""
        names = ("loss", "epoch", "num_uses", "position")
        tensors = dict(zip(Records._fields, self.records, strict=True)) | {name: getattr(self, name) for name in names}
        return {name: x[: self.size].clone() for name, x in tensors.items()} | {"num_positions": self.num_positions}

    def load_state_dict(self, state: dict) -> None:
        """Take over the records of another pool, as many as there is room for."""
        self.size, self.num_positions = min(len(self.loss), len(state["loss"])), state["num_positions"]
        for name, x in state.items():
            if name != "num_positions":
                mine = getattr(self.records, name, getattr(self, name, None))
                mine[: self.size] = x[: self.size].to(mine.device)


# ---- AlphaZero -------------------------------------------------------------------------------------------------------


def puct_scores(q, visit_counts, prior, parent_visits, c_puct: float) -> torch.Tensor:
    """Eq. 1 for q, visit counts N(s, a) and prior [..., A], and visits N(s) [...] of their state."""
    return q + c_puct * parent_visits.clamp(min=1).sqrt().unsqueeze(-1) * prior / (visit_counts + 1)


def ucb1_scores(q, visit_counts, prior, parent_visits, c_puct: float) -> torch.Tensor:
    """Q + c sqrt(log N(s) / N(s, a)), infinite without visits (Auer et al. 2002): the prior counts for nothing."""
    bonus = (parent_visits.clamp(min=1).log().unsqueeze(-1) / visit_counts.clamp(min=1)).sqrt()
    return q + torch.where(visit_counts > 0, c_puct * bonus, 1e6)


def add_dirichlet_noise(prior: torch.Tensor, alpha: float, weight: float, kind: str) -> torch.Tensor:
    """Eq. 3 for the prior [R, A] of roots, zero where a move is illegal; not a distribution where it is additive."""
    noise = torch._standard_gamma(torch.full_like(prior, alpha, dtype=torch.float64)) * (prior > 0)
    noise = (noise / noise.sum(1, keepdim=True).clamp(min=1e-300)).float()
    return (prior if kind == "additive" else (1 - weight) * prior) + weight * noise


def compute_result(score: torch.Tensor, komi: float, score_weight: float, num_points: int) -> torch.Tensor:
    """z of black [B] for area scores [B]: 1 won, 0 lost, 1/2 drawn, mixed with the share of the board by which."""
    margin = score.float() - komi
    share = (0.5 + margin / (2 * num_points)).clamp(0, 1)
    return (1 - score_weight) * (margin.sign() + 1) / 2 + score_weight * share


def decay_result(z: torch.Tensor, moves_left: torch.Tensor, gamma: float) -> torch.Tensor:
    """1/2 + gamma^t (z - 1/2), t moves before the end: decay that leaves v and 1 - v the two sides of one value."""
    return 0.5 + gamma**moves_left * (z - 0.5)


def compute_losses(logits, value, legal, visits, target) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy loss of eq. 4, value loss of eq. 5 and KL(visits, policy), each [B]."""
    log_prob = logits.masked_fill(~legal, -torch.inf).log_softmax(1).masked_fill(~legal, 0.0)
    policy_loss = -(visits * log_prob).sum(1)
    return policy_loss, (value - target).square(), policy_loss + (visits * visits.clamp(min=1e-12).log()).sum(1)


def mix_losses(policy_loss: torch.Tensor, value_loss: torch.Tensor, num_actions: int, value_coef: float):
    """Eq. 6 and 7: both scaled to 1 for a network that knows nothing, weighted by value_coef g."""
    return value_coef * value_loss / 0.25 + (1 - value_coef) * policy_loss / math.log(num_actions)


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


class NetworkEvaluator:
    """Logits [R, A] and values [R] of positions by a network; on CUDA by a graph of fixed size where that can be."""

    def __init__(self, network: Agent, go: Go, num_games: int, use_graph: bool):
        self.network, self.go, self.replay, self.host = network, go, None, None
        self.device = network.policy_head.weight.device
        self.names, shapes = ("logits", "values"), {"planes": (num_games, NUM_PLANES, go.size, go.size)}
        shapes |= {"logits": (num_games, go.num_points + 1), "values": (num_games,)}
        if self.device != go.device:  # the tree is on the host: pinned buffers to and fro
            types = {"planes": torch.bool}
            self.host = {k: torch.zeros(x, dtype=types.get(k), pin_memory=True) for k, x in shapes.items()}
        if use_graph:
            self.planes = torch.zeros(shapes["planes"], dtype=torch.bool, device=self.device)
            self.outputs = [torch.zeros(shapes[name], device=self.device) for name in self.names]
            self.replay = capture_graph(self.fill_outputs, [])

    @torch.no_grad()
    def fill_outputs(self) -> None:
        """Run the network on `planes`, in fixed places of memory."""
        for mine, new in zip(self.outputs, self.network(self.planes), strict=True):
            mine.copy_(new)

    def __call__(self, boards: Boards, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the positions, with legal moves [R, A], and run the network on them."""
        planes, rows = self.go.planes(boards, legal), slice(len(legal))
        if self.host:
            planes = self.host["planes"][rows].copy_(planes).to(self.device, non_blocking=True)
        if self.replay:
            self.planes[rows] = planes
            self.replay()
            outputs = [x[rows] for x in self.outputs]
        elif self.device.type == "cpu":  # small parts, which stay in the cache
            parts = [self.network(part) for part in planes.split(64)]
            outputs = [torch.cat(x) for x in zip(*parts, strict=True)]
        else:
            outputs = self.network(planes)
        if self.host:
            outputs = [self.host[k][rows].copy_(x, non_blocking=True) for k, x in zip(self.names, outputs, strict=True)]
        return tuple(outputs)


class Slot:
    """A worker with one batch of leaves on its way, at most one of each game: a stream of a GPU or a thread of the CPU.

    Also the paths [G, D] to its leaves, as edges: node * A + move.
    """

    def __init__(self, evaluator, num_games: int, max_depth: int, device: torch.device):
        self.evaluator, self.busy_seconds, self.outputs = evaluator, 0.0, None
        self.games = torch.arange(0, device=device)  # those with a leaf on its way
        self.edges = torch.zeros(num_games, max_depth, dtype=torch.int64, device=device)
        self.depth, self.leaf, self.num_pseudo = torch.zeros(3, num_games, dtype=torch.int64, device=device)
        self.is_gpu, self.waits = evaluator.device.type == "cuda", device.type == "cpu"
        if self.is_gpu:
            self.stream = torch.cuda.Stream(evaluator.device)
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        else:
            self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))

    def submit(self, games: torch.Tensor, boards: Boards, legal: torch.Tensor) -> None:
        """Start the evaluation of the leaves of `games` [R], positions with legal moves [R, A], and return at once."""
        self.games, self.boards, self.legal = games, boards, legal
        if not self.is_gpu:
            self.future = self.thread.submit(self.work)
            return
        if self.outputs is not None:
            self.busy_seconds += self.start.elapsed_time(self.end) / 1e3
        self.stream.wait_stream(torch.cuda.current_stream(self.evaluator.device))
        with torch.cuda.stream(self.stream):
            self.start.record()
            self.outputs = self.evaluator(boards, legal)
            self.end.record()

    @torch.no_grad()
    def work(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the thread does."""
        start = time.perf_counter()
        outputs = self.evaluator(self.boards, self.legal)
        self.busy_seconds += time.perf_counter() - start
        return outputs

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, A] and values [R] once they are there; the host waits for a GPU only if the tree is its own."""
        if not self.is_gpu:
            return self.future.result()
        self.end.synchronize() if self.waits else torch.cuda.current_stream().wait_event(self.end)
        return self.outputs


OPEN, IN_FLIGHT, OVER, ABSENT = range(4)  # what a node is
ILLEGAL = -1e9  # Q of illegal moves


class Search:
    """Monte-Carlo trees of G games side by side, as arrays over games and nodes; the master that owns them.

    Node 0 to M - 1 of game g have the numbers g M to g M + M - 1, the first is the root; number G M stands for none.
    """

    def __init__(
        self, go: Go, evaluators: list, num_games: int, max_simulations: int, args: Args, komi=None, scores=puct_scores
    ):
        self.go, self.args, self.komi = go, args, args.komi if komi is None else komi
        self.num_games, self.num_actions, device, self.compute_scores = num_games, go.num_points + 1, go.device, scores
        self.max_nodes = 2 * max_simulations + 2  # what is kept of the last move's tree, and what comes to it
        self.max_kept = self.max_nodes - max_simulations
        self.none = num_games * self.max_nodes
        self.roots = torch.arange(num_games, device=device) * self.max_nodes
        shape = self.none + 1, self.num_actions
        self.edges = torch.zeros(shape[0], 3, shape[1], device=device)  # visits and pseudo visits, Q, prior
        self.pseudo = torch.zeros(shape, dtype=torch.int32, device=device)
        self.child = torch.full(shape, self.none, dtype=torch.int32, device=device)
        self.parent = torch.full(shape[:1], self.none, device=device)
        self.status = torch.full(shape[:1], ABSENT, dtype=torch.int8, device=device)
        self.visits = torch.zeros(shape[0], device=device)  # N(s), the evaluation of s itself included
        self.value = torch.zeros(shape[0], device=device)  # of the network, or the result
        narrow = (torch.int8, torch.int16, torch.bool, torch.int8, torch.int16, torch.int8, torch.int16, torch.int64)
        one = go.new(1)
        self.wide = [x.dtype for x in one]
        one = one._replace(history=one.history[:, :1])  # of a node only the hash of its own position
        rows = (torch.zeros(shape[0], *x.shape[1:], dtype=t, device=device) for x, t in zip(one, narrow, strict=True))
        self.states = Boards(*rows)
        self.num_nodes, self.root_pseudo = torch.zeros(2, num_games, dtype=torch.int64, device=device)
        depth = min(self.max_nodes, go.max_moves) + 1
        self.slots = [Slot(evaluator, num_games, depth, device) for evaluator in evaluators]
        self.counts = dict.fromkeys(("turns", "sent", "descents", "collisions", "evaluated", "kept", "roots"), 0)

    @torch.no_grad()
    def reset(self, boards: Boards, games: torch.Tensor | None = None) -> None:
        """Begin new trees for `games` [R], all if not given; `boards` are those of all G games."""
        self.boards, slot = boards, self.slots[0]
        games = torch.arange(self.num_games, device=self.go.device) if games is None else games
        if len(games) == 0:
            return
        roots, part = self.roots[games], boards.pick(games)
        self.num_nodes[games], self.parent[roots] = 1, self.none
        legal = self.add_nodes(roots, part)
        slot.depth[games], slot.leaf[games] = 0, roots
        going = ~part.is_over
        if going.any():
            slot.submit(games[going], part.pick(going), legal[going])
            self.finish(slot)

    def add_nodes(self, nodes: torch.Tensor, boards: Boards) -> torch.Tensor:
        """Write the positions of new nodes [R]; returns their legal moves [R, A]."""
        position = boards.history.gather(1, boards.num_moves.unsqueeze(1))
        for mine, new in zip(self.states, boards._replace(history=position), strict=True):
            mine[nodes] = new.to(mine.dtype)
        over = boards.is_over
        self.status[nodes] = torch.where(over, OVER, IN_FLIGHT).to(torch.int8)
        self.child[nodes], self.visits[nodes] = self.none, 1.0
        self.edges[nodes] = 0.0
        if over.any():
            z = compute_result(self.go.score(boards.pick(over)), self.komi, self.args.score_weight, self.go.num_points)
            self.value[nodes[over]] = torch.where(boards.to_play[over] == 1, z, 1 - z)
        return self.go.legal_moves(boards)

    def descend(self, slot: Slot, games: torch.Tensor) -> None:
        """Follow the highest scores from the roots of `games` [R] to where the tree ends, into the slot's paths."""
        node, depth = self.roots[games], 0
        while len(games):
            visit_counts, q, prior = self.edges[node].unbind(1)  # [R, A] each
            move = self.compute_scores(q, visit_counts, prior, self.visits[node], self.args.c_puct).argmax(1)
            edge = node * self.num_actions + move
            child = self.child.view(-1)[edge].long()
            slot.edges[games, depth], slot.leaf[games] = edge, child
            depth += 1
            slot.depth[games] = depth
            goes_on = (self.status[child] == OPEN).nonzero()[:, 0]
            games, node = games[goes_on], child[goes_on]

    def path(self, slot: Slot, games: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Edges [R, D] of the slot's paths in `games`, and which of them are one, bool [R, D]."""
        depth = slot.depth[games].unsqueeze(1)
        step = torch.arange(int(depth.max()), device=depth.device)
        return slot.edges[games, : len(step)], step < depth

    def add_pseudo_visits(self, slot: Slot, games: torch.Tensor, count: torch.Tensor) -> None:
        """Add `count` [R] pseudo visits to the edges of the slot's paths."""
        edges, is_edge = self.path(slot, games)
        count, edges = count.unsqueeze(1).expand_as(edges)[is_edge], edges[is_edge]
        self.pseudo.view(-1)[edges] += count.int()
        self.edges.view(-1)[edges + edges // self.num_actions * (2 * self.num_actions)] += count

    def request(self, slot: Slot, games: torch.Tensor) -> torch.Tensor:
        """Select a leaf in each of `games` [R] and send it on its way; returns the games where that went well.

        Whoever comes upon a leaf of the other slot adds a pseudo visit to its path and descends again, as long as the
        root has at most k N(root) of them; beyond that the request fails.
        """
        other, pending, done = self.slots[1 - self.slots.index(slot)] if len(self.slots) > 1 else slot, games, []
        while len(pending):
            self.descend(slot, pending)
            collided = self.status[slot.leaf[pending]] == IN_FLIGHT
            done.append(pending[~collided])
            self.counts["descents"] += len(pending)
            pending = pending[collided]
            room = self.args.pseudo_limit * self.visits[self.roots[pending]] - self.root_pseudo[pending]
            self.counts["collisions"] += len(pending)
            pending = pending[room >= 1]
            if len(pending):
                one = torch.ones_like(pending)
                self.add_pseudo_visits(slot, pending, one)
                other.num_pseudo[pending] += one
                self.root_pseudo[pending] += one
        games = torch.cat(done) if done else games
        if len(games):
            self.expand(slot, games)
        return games

    def expand(self, slot: Slot, games: torch.Tensor) -> None:
        """Add the new leaves of `games` [R] to the trees and submit them; games that are over are known at once."""
        new = games[slot.leaf[games] == self.none]
        if len(new):
            edges, is_edge = self.path(slot, new)
            last = edges.gather(1, slot.depth[new].unsqueeze(1) - 1)[:, 0]
            parent, move = last // self.num_actions, last % self.num_actions
            boards = Boards(*(x[parent].to(t) for x, t in zip(self.states, self.wide, strict=True)))
            # The past for superko: of the game up to the root, then of the path
            root_moves, step = self.boards.num_moves[new].unsqueeze(1), torch.arange(edges.shape[1], device=new.device)
            passed = self.states.history[edges // self.num_actions, 0].masked_fill(~is_edge, 0)
            column = torch.where(is_edge, root_moves + step, self.go.max_moves)
            boards = boards._replace(history=self.boards.history[new].scatter(1, column, passed))
            leaf = self.roots[new] + self.num_nodes[new]
            self.num_nodes[new] += 1
            self.child.view(-1)[last], self.parent[leaf], slot.leaf[new] = leaf.int(), parent, leaf
            boards = self.go.play(boards, move)
            legal = self.add_nodes(leaf, boards)
            going = self.status[leaf] == IN_FLIGHT
            if going.any():
                slot.submit(new[going], boards.pick(going), legal[going])
                self.counts["evaluated"] += len(slot.games)
        over = games[self.status[slot.leaf[games]] == OVER]
        if len(over):
            self.backup(slot, over, self.value[slot.leaf[over]])

    def finish(self, slot: Slot) -> None:
        """Wait for the slot's batch, clear its pseudo visits and back its values up."""
        if not len(games := slot.games):
            return
        logits, values = slot.wait()
        leaf, slot.games = slot.leaf[games], games[:0]
        q = values if self.args.fpu == "parent" else torch.zeros_like(values)
        self.edges[leaf, 1] = torch.where(slot.legal, q.unsqueeze(1), ILLEGAL)
        self.edges[leaf, 2] = logits.masked_fill(~slot.legal, -torch.inf).softmax(1)
        self.status[leaf], self.value[leaf] = OPEN, values
        has_pseudo = games[slot.num_pseudo[games] > 0]
        if len(has_pseudo):
            count = slot.num_pseudo[has_pseudo]
            self.add_pseudo_visits(slot, has_pseudo, -count)
            self.root_pseudo[has_pseudo] -= count
            slot.num_pseudo[has_pseudo] = 0
        self.backup(slot, games, values)

    def backup(self, slot: Slot, games: torch.Tensor, values: torch.Tensor) -> None:
        """Count the leaf values [R], of the side to move there, into the means along the slot's paths."""
        edges, is_edge = self.path(slot, games)
        is_other = (slot.depth[games].unsqueeze(1) - torch.arange(edges.shape[1], device=edges.device)) % 2 == 1
        values = torch.where(is_other, 1 - values.unsqueeze(1), values.unsqueeze(1))[is_edge]
        edges = edges[is_edge]
        node, flat = edges // self.num_actions, self.edges.view(-1)
        self.visits[node] += 1
        index = edges + node * (2 * self.num_actions)
        counts = flat[index] + 1
        flat[index] = counts
        old = flat[index + self.num_actions]
        flat[index + self.num_actions] = old + (values - old) / (counts - self.pseudo.view(-1)[edges])

    @torch.no_grad()
    def run(self, num_simulations: int, until: float = math.inf) -> None:
        """Search `num_simulations` times in every game, or until time.monotonic() is `until`."""
        open_games = self.status[self.roots] == OPEN
        left = torch.where(open_games, num_simulations, 0)
        while True:
            for slot in self.slots:
                self.finish(slot)
                games = left.nonzero()[:, 0]
                if len(games) and time.monotonic() < until:
                    sent = self.request(slot, games)
                    left[sent] -= 1
                    self.counts["turns"] += len(games)
                    self.counts["sent"] += len(sent)
                elif len(games):
                    left.zero_()
            if not any(len(slot.games) for slot in self.slots) and not left.any():
                return

    @torch.no_grad()
    def advance(self, moves: torch.Tensor, boards: Boards, is_new: torch.Tensor) -> None:
        """Go on to `boards`, after `moves` [G], with the trees below; games that are new, bool [G], begin new trees."""
        new_root = self.child[self.roots, moves].long()
        has_tree = ~is_new & (self.status[new_root] == OPEN)
        self.counts["kept"] += int(self.visits[new_root[has_tree]].sum())
        self.counts["roots"] += int(self.visits[self.roots].sum())
        # Who has the new root among its ancestors, found in jumps of doubling length
        inside = torch.zeros_like(self.status, dtype=torch.bool)
        inside[new_root[has_tree]] = True
        jump = self.parent
        for _ in range(self.slots[0].edges.shape[1].bit_length()):
            inside, jump = inside | inside[jump], jump[jump]
        inside = inside[:-1].view(self.num_games, self.max_nodes)
        inside &= torch.arange(self.max_nodes, device=inside.device) < self.num_nodes.unsqueeze(1)
        rank = inside.cumsum(1) - 1
        inside &= rank < self.max_kept  # the oldest; parents are older than children
        game, place = inside.nonzero(as_tuple=True)
        source, target = self.roots[game] + place, self.roots[game] + rank[game, place]
        new_number = torch.full_like(self.parent, self.none)
        new_number[source] = target
        child, parent = new_number[self.child[source].long()].int(), new_number[self.parent[source]]
        for x in (self.edges, self.status, self.visits, self.value, *self.states):
            x[target] = x[source]
        self.child[target] = child
        self.parent[target] = parent  # none for the new root
        self.num_nodes = inside.sum(1)
        self.reset(boards, (~has_tree).nonzero()[:, 0])

    def add_noise(self) -> None:
        """Eq. 3 at the roots."""
        if self.args.noise != "none":
            alpha = self.args.dirichlet_alpha * 361 / self.go.num_points
            prior = self.edges[self.roots, 2]
            self.edges[self.roots, 2] = add_dirichlet_noise(prior, alpha, self.args.noise_weight, self.args.noise)

    def visit_counts(self) -> torch.Tensor:
        """Visits of the moves at the roots, [G, A]."""
        return self.edges[self.roots, 0]

    def root_values(self) -> torch.Tensor:
        """Q of the roots [G], the mean over all leaf evaluations, that of the root itself included."""
        counts, q, _ = self.edges[self.roots].unbind(1)
        return (self.value[self.roots] + (counts * q).sum(1)) / (1 + counts.sum(1))

    def find_line(self, move: int) -> list[int]:
        """A move of game 0 and those that follow it by most visits."""
        line, node = [move], int(self.child[0, move])
        while node != self.none and self.edges[node, 0].any():
            line.append(int(self.edges[node, 0].argmax()))
            node = int(self.child[node, line[-1]])
        return line


class Thinker:
    """Searches the positions of one game, going on with the tree of the position before."""

    def __init__(self, go: Go, evaluators: list[NetworkEvaluator], args: Args):
        self.go, self.evaluators, self.args, self.positions, self.komi = go, evaluators, args, [], None

    @torch.no_grad()
    def think(self, positions: list[Boards], komi: float, until: float, num_simulations: int | None) -> gtp.Analysis:
        """Search the last of `positions`, which is not over: so many simulations (None: as trained), or `until`."""
        follows = all(a is b for a, b in zip(self.positions, positions, strict=False)) and komi == self.komi
        if self.positions and follows and len(positions) >= len(self.positions):
            for boards in positions[len(self.positions) :]:
                self.search.advance(boards.last_move, boards, torch.tensor([False]))
        else:
            size = max(MAX_TREE, self.args.simulations_end)
            self.search = Search(self.go, self.evaluators, 1, size, self.args, komi=komi)
            self.search.reset(positions[-1])
        self.positions, self.komi, search = list(positions), komi, self.search
        wanted = self.args.simulations_end if num_simulations is None else num_simulations
        search.run(max(0, min(wanted, search.max_nodes - int(search.num_nodes[0]) - 1)), until)
        visits, q, prior = (x.tolist() for x in search.edges[0])
        lines = {move: search.find_line(move) for move, count in enumerate(visits) if count}
        return gtp.Analysis(visits, q, prior, lines)


class SelfPlay:
    """G games side by side and the records of those that are not over."""

    def __init__(self, go: Go, num_games: int, args: Args):
        self.go, self.args, device = go, args, go.device
        self.boards = go.new(num_games)
        shape = num_games, go.max_moves
        self.planes = torch.zeros(*shape, NUM_PLANES * go.num_points, dtype=torch.bool, device=device)
        self.visits = torch.zeros(*shape, go.num_points + 1, dtype=torch.float16, device=device)
        self.q, self.to_play = torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int8, device=device)
        self.is_holdout = torch.rand(num_games, device=device) < args.holdout_fraction

    @torch.no_grad()
    def play_moves(self, search: Search | None, num_simulations: int, epsilon: float) -> tuple[Records, Records]:
        """A move in each game, searched or else at random: what `finish_games` gives for those that ended."""
        go, boards, args = self.go, self.boards, self.args
        legal = go.legal_moves(boards)
        if search is None:
            moves = choose_random_moves(go, boards, legal, fill_eyes=False)
            visits, q = legal / legal.sum(1, keepdim=True), torch.full_like(self.q[:, 0], torch.nan)
        else:
            search.add_noise()
            search.run(num_simulations)
            counts, q = search.visit_counts(), search.root_values()
            visits = counts / counts.sum(1, keepdim=True)
            moves = visits.argmax(1)
            if args.move_choice == "epsilon":
                is_random = torch.rand_like(q) < epsilon
                moves = torch.where(is_random, choose_random_moves(go, boards, legal), moves)
            else:
                is_early = boards.num_moves < go.num_points // 3
                moves = torch.where(is_early, torch.multinomial(visits, 1)[:, 0], moves)
        games = torch.arange(len(moves), device=go.device)
        self.planes[games, boards.num_moves] = go.planes(boards, legal).flatten(1)
        self.visits[games, boards.num_moves], self.q[games, boards.num_moves] = visits.half(), q
        self.to_play[games, boards.num_moves] = boards.to_play
        self.boards = boards = go.play(boards, moves)
        over = boards.is_over
        records = self.finish_games(over.nonzero()[:, 0])
        boards.replace_rows(over, go.new(int(over.sum())))
        self.is_holdout = torch.where(over, torch.rand_like(q) < args.holdout_fraction, self.is_holdout)
        if search is not None:
            search.advance(moves, boards, over)
        return records

    def finish_games(self, games: torch.Tensor) -> tuple[Records, Records]:
        """Records of `games` [R], which are over: those to learn from, and those of games that are held out."""
        boards, args = self.boards.pick(games), self.args
        z = compute_result(self.go.score(boards), args.komi, args.score_weight, self.go.num_points).unsqueeze(1)
        moves_left = boards.num_moves.unsqueeze(1) - torch.arange(self.q.shape[1], device=games.device)
        to_play, is_move = self.to_play[games], moves_left > 0
        z = decay_result(torch.where(to_play == 1, z, 1 - z), moves_left, args.gamma)[is_move]
        q = self.q[games][is_move]
        records = Records(self.planes[games][is_move], self.visits[games][is_move], torch.where(q.isnan(), z, q), z)
        held_out = self.is_holdout[games].unsqueeze(1).expand_as(is_move)[is_move]
        return tuple(Records(*(x[rows] for x in records)) for rows in (~held_out, held_out))

    def state_dict(self) -> dict:
        """What a checkpoint needs of it."""
        last = int(self.boards.num_moves.max())
        state = {name: getattr(self, name)[:, :last].clone() for name in ("planes", "visits", "q", "to_play")}
        return state | {"boards": list(self.boards), "is_holdout": self.is_holdout}

    def load_state_dict(self, state: dict) -> None:
        """Go on with the games of a checkpoint."""
        self.boards = Boards(*(x.to(self.go.device) for x in state["boards"]))
        self.is_holdout = state["is_holdout"].to(self.go.device)
        for name in ("planes", "visits", "q", "to_play"):
            getattr(self, name)[:, : state[name].shape[1]] = state[name].to(self.go.device)


def make_images(records: Records, symmetries: torch.Tensor) -> Records:
    """All images [8 M] of records [M], image k of record m in row k M + m."""
    planes = records.planes.unflatten(1, (NUM_PLANES, -1))
    planes = torch.cat([planes[..., s[:-1]].flatten(1) for s in symmetries])
    visits = torch.cat([records.visits[:, s] for s in symmetries])
    return Records(planes, visits, records.q.repeat(8), records.z.repeat(8))


def record_losses(network, records: Records, size: int, q_weight: float) -> tuple:
    """The three losses of `compute_losses`, each [M]."""
    planes = records.planes.view(-1, NUM_PLANES, size, size)
    logits, value = network(planes)
    legal = torch.cat((planes[:, 4].flatten(1), torch.ones_like(planes[:, 0, 0, :1])), 1)
    target = q_weight * records.q + (1 - q_weight) * records.z  # eq. 5
    return compute_losses(logits, value, legal, records.visits.float(), target)


@torch.no_grad()
def rank_losses(network, records: Records, size: int, q_weight: float, value_coef: float, chunk=512) -> torch.Tensor:
    """Eq. 7 for records [M], by a network in evaluation mode."""
    losses = []
    for part in zip(*(x.split(chunk) for x in records), strict=True):
        _, value_loss, kl = record_losses(network, Records(*part), size, q_weight)
        losses.append(mix_losses(kl, value_loss, size**2 + 1, value_coef))
    return torch.cat(losses) if losses else records.q


METRICS = ("policy_loss", "value_loss", "kl", "loss", "grad_norm")
SCORES = ("win_rate", "win_rate_low", "win_rate_high", "margin")  # of a match
HOLDOUT_SIZE = 2048  # positions of games kept out of the pool
MAX_TREE = 10_000  # simulations that the tree of a game of GTP has room for


def update_network(agent: Agent, optimizer, records: Records, size: int, q_weight: float, value_coef: float):
    """One gradient step of eq. 6 on a minibatch; returns its METRICS [5]. With value_coef 1 the policy head stays."""
    policy_loss, value_loss, kl = (x.mean() for x in record_losses(agent, records, size, q_weight))
    loss = mix_losses(policy_loss, value_loss, size**2 + 1, value_coef)
    optimizer.zero_grad(set_to_none=True)
    (loss / WORLD_SIZE).backward()
    if value_coef == 1:
        for p in (*agent.policy_conv.parameters(), *agent.policy_head.parameters()):
            p.grad = None
    sum_gradients(agent.parameters())
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    return torch.stack((policy_loss, value_loss, kl, loss, grad_norm)).detach()


def describe_pool(pool: Pool, ranks: torch.Tensor, trained: torch.Tensor) -> dict[str, float]:
    """How the pool stands and how ranks have moved since `ranks`, the places before training; 1 is the whole pool."""
    now, before = pool.rank()[trained], ranks[trained]
    return {
        "pool/size": pool.size,
        "pool/loss": pool.loss[: pool.size].mean().item(),
        "pool/loss_median": pool.loss[: pool.size].median().item(),
        "pool/age": (pool.epoch[: pool.size].max() - pool.epoch[: pool.size]).float().mean().item(),
        "pool/uses": pool.num_uses[: pool.size].float().mean().item(),
        "pool/rank_before": before.mean().item(),
        "pool/rank_after": now.mean().item(),
        "pool/rank_shift": (now - before).abs().mean().item(),
    }


def describe_search(search: Search, num_simulations: int, seconds: float) -> dict[str, float]:
    """How the search went in `seconds` of self-play with `num_simulations` over all games."""
    counts, num_workers = search.counts, 1 if search.slots[0].is_gpu else len(search.slots)
    busy = sum(slot.busy_seconds for slot in search.slots) / num_workers
    return {
        "search/sims_per_second": num_simulations / seconds,
        "search/fail_rate": 1 - counts["sent"] / max(1, counts["turns"]),
        "search/collision_rate": counts["collisions"] / max(1, counts["descents"]),
        "search/slot_fill": counts["evaluated"] / max(1, counts["turns"]),
        "search/device_idle": max(0.0, 1 - busy / seconds),
        "search/root_reuse": counts["kept"] / max(1, counts["roots"]),
    }


# ---- Evaluation and checkpoints --------------------------------------------------------------------------------------


def make_player(go: Go, evaluators: list, args: Args, **options):
    """A function from boards [R] to the moves [R] that `args.simulations_end` simulations visit most."""

    def choose_moves(boards: Boards) -> torch.Tensor:
        search = Search(go, evaluators, len(boards.to_play), args.simulations_end, args, **options)
        search.reset(boards)
        search.run(args.simulations_end)
        return search.visit_counts().argmax(1)

    return choose_moves


@torch.no_grad()
def evaluate(network: Agent, args: Args, device: torch.device) -> tuple[dict[str, float], dict[str, dict]]:
    """Matches of --eval-episodes games against random moves and against plain MCTS with as many simulations.

    Returns the metrics and what `play_match` gives, by opponent.
    """
    go, tree_go = Go(get_size(args)), Go(get_size(args), device)
    evaluators = make_evaluators(network, tree_go, args.eval_episodes, args)
    seed = int(np.random.SeedSequence([args.seed, 1]).generate_state(1)[0])
    metrics, matches = {}, {}
    generator = torch.Generator().manual_seed(seed)

    def move_at_random(boards: Boards) -> torch.Tensor:
        return choose_random_moves(go, boards, go.legal_moves(boards), generator)

    def search(boards: Boards) -> torch.Tensor:
        return make_player(tree_go, evaluators, args)(Boards(*(x.to(device) for x in boards))).cpu()

    plain_mcts = make_player(go, [RolloutEvaluator(go, args.komi, seed)], args, scores=ucb1_scores)
    for name, opponent in (("random", move_at_random), ("mcts", plain_mcts)):
        matches[name] = match = play_match(go, (search, opponent), args.eval_episodes, args.komi, seed)
        for key in SCORES:
            metrics[f"eval/{key}_{name}"] = match[key]
    return metrics, matches


def compete(go: Go, network: Agent, reference: Agent, args: Args, epoch: int, run_path: Path, progress: dict) -> dict:
    """A match of the network against the copy from the last match, into the Elo of `progress` and an SGF file."""
    players = [make_player(go, make_evaluators(x, go, args.arena_games, args), args) for x in (network, reference)]
    seed = int(np.random.SeedSequence([args.seed, 3, epoch]).generate_state(1)[0])
    match = play_match(go, players, args.arena_games, args.komi, seed)
    progress["elo"] += compute_elo(match["win_rate"], args.arena_games)
    text = format_games(match, go.size, args.komi, SCRIPT, f"{SCRIPT}, {args.arena_interval} epochs before")
    write_atomically(run_path / f"games_epoch_{epoch:04d}.sgf", text.encode())
    return {f"arena/{name}": match[name] for name in SCORES} | {"arena/elo": progress["elo"]}


def draw_search(network: Agent, args: Args, moves: list[int]):
    """Picture of a search in the middle of the game `moves`; None where matplotlib is missing."""
    go = Go(get_size(args))
    positions = [go.new(1)]
    for move in moves[: len(moves) // 3]:
        positions.append(go.play(positions[-1], torch.tensor([move])))
    boards, evaluators = positions[-1], make_evaluators(network, go, 1, args)
    analysis = Thinker(go, evaluators, args).think(positions, args.komi, math.inf, None)
    heat, colour = torch.tensor(analysis.visits), "black" if int(boards.to_play) == 1 else "white"
    title = f"{colour} to play, {analysis.values[int(heat.argmax())]:.0%} for it after the best move"
    points = boards.stones[0, go.cells].tolist()
    return draw_board(points, go.size, (heat / heat.sum()).tolist(), int(boards.last_move), title)


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
    if not re.fullmatch(r"Go-(\d+)x\1", args.env_id) or not 2 <= get_size(args) <= 19:
        fail(f"--env-id {args.env_id}: Go-2x2 to Go-19x19")
    check_range(args, "torch_threads eval_episodes num_games blocks channels simulations_start simulations_end", 1)
    check_range(args, "num_epochs batch_size max_reuse arena_games", 1)
    check_range(args, "seed checkpoint_interval eval_interval pretrain_value_epochs pretrain_search_epochs max_age", 0)
    check_range(args, "noise_weight weight_decay arena_interval", 0)
    check_range(args, "learning_rate c_puct dirichlet_alpha loss_clamp", 0, above=True)
    check_range(args, "score_weight epsilon_start epsilon_end value_coef q_weight_start q_weight_end gamma", 0, 1)
    check_range(args, "pseudo_limit holdout_fraction", 0, 0.5)
    check_range(args, "generate_fraction train_fraction", 0, 1, above=True)
    check_range(args, "komi", -(get_size(args) ** 2), get_size(args) ** 2)
    check_range(args, "pool_size", 8 * args.batch_size)
    for name in ("num_games", "batch_size", "pool_size"):
        if (value := getattr(args, name)) % WORLD_SIZE:
            fail(f"--{name.replace('_', '-')} {value} does not divide among {WORLD_SIZE} processes")
    if args.track and not (args.evaluate or args.gtp) and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")


def get_size(args: Args) -> int:
    """Lines of the board."""
    return int(args.env_id.split("x")[1])


def interpolate(start: float, end: float, epoch: int, args: Args) -> float:
    """Schedule from `start` in the first epoch to `end` in the last."""
    return start + (end - start) * epoch / max(1, args.num_epochs - 1)


def make_network(size: int, args: Args, device: torch.device) -> Agent:
    """A network for search, with folded batch norms and in bfloat16 with --bf16."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    network = Agent(size, args, is_folded=True).to(device, dtype, memory_format=torch.channels_last).eval()
    if args.compile:
        network.compile(dynamic=True)
    return network.requires_grad_(False)


def make_evaluators(network: Agent, go: Go, num_games: int, args: Args) -> list[NetworkEvaluator]:
    """One for each slot."""
    use_graph = args.cuda_graphs and not args.compile and network.policy_head.weight.is_cuda
    return [NetworkEvaluator(network, go, num_games, use_graph) for _ in range(args.num_slots)]


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if given, and leave a run folder with result.json."""
    wall_start, cpu_start = time.time(), time.process_time()
    device, is_main = setup_device(args), RANK == 0
    start_step = checkpoint["global_step"] if checkpoint else 0
    is_done = checkpoint is not None and checkpoint["iteration"] >= args.num_epochs
    if is_done and Path(args.resume).with_name("result.json").exists():
        fail(f"--resume {args.resume}: its {args.num_epochs} epochs are done; raise --num-epochs")
    seed_everything(args.seed)  # the same weights in every process
    size, first_search = get_size(args), args.pretrain_value_epochs
    first_play = first_search + args.pretrain_search_epochs
    agent = Agent(size, args).to(device, memory_format=torch.channels_last)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=lr, weight_decay=args.weight_decay, fused=True)
    network, reference = (agent.fold_into(make_network(size, args, device)) for _ in range(2))
    run_path = make_run_folder(args, checkpoint) if is_main else None
    seed_everything(args.seed, 2, RANK, start_step)
    go, num_games = Go(size, device), args.num_games // WORLD_SIZE
    self_play, pool = SelfPlay(go, num_games, args), Pool(args.pool_size // WORLD_SIZE, size**2 + 1, device)
    holdout = Records(*(x[:0] for x in pool.records))

    progress = {"iteration": 0, "global_step": 0, "elo": 0.0, "history": [[0, 0.0]]}
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
        agent.load_state_dict(checkpoint["agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.param_groups[0] |= {"lr": lr, "weight_decay": args.weight_decay}
        agent.fold_into(network)
        reference.load_state_dict(checkpoint["reference"])
        wall_start, cpu_start = wall_start - checkpoint["wall_seconds"], cpu_start - checkpoint["cpu_seconds"]
        if len(checkpoint["ranks"]) == WORLD_SIZE:
            state = checkpoint["ranks"][RANK]
            self_play.load_state_dict(state["self_play"])
            pool.load_state_dict(state["pool"])
            holdout = Records(*(x.to(device) for x in state["holdout"]))
            torch.set_rng_state(state["torch_rng"])
            if device.type == "cuda" and state["cuda_rng"] is not None:
                torch.cuda.set_rng_state(state["cuda_rng"])
        elif is_main:
            print(f"{len(checkpoint['ranks'])} processes made the replay pool: with {WORLD_SIZE} it starts empty")
    writer = make_writer(args, run_path, start_step) if is_main else None

    def save() -> None:
        cuda_rng = torch.cuda.get_rng_state() if device.type == "cuda" else None
        state = {"torch_rng": torch.get_rng_state(), "cuda_rng": cuda_rng, "self_play": self_play.state_dict()}
        ranks = [state | {"pool": pool.state_dict(), "holdout": list(holdout)}]
        if WORLD_SIZE > 1:
            buffer, contents = (
                io.BytesIO(),
                [None] * WORLD_SIZE,
            )  # as bytes, so that tensors of every device travel alike
            torch.save(ranks[0], buffer)
            dist.gather_object(buffer.getvalue(), contents if is_main else None)
            if is_main:
                ranks = [torch.load(io.BytesIO(x), weights_only=True, map_location="cpu") for x in contents]
        if is_main:
            seconds = {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
            content = {"script": SCRIPT, "args": asdict(args) | {"resume": None}, "ranks": ranks, **progress, **seconds}
            content |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", content | {"reference": reference.state_dict()})

    if args.compile:
        agent.compile(dynamic=True)
    evaluators = make_evaluators(network, go, num_games, args)
    num_new = max(1, int(args.generate_fraction * len(pool.loss)))
    num_updates = math.ceil(args.train_fraction * args.pool_size / args.batch_size)
    batch_size = args.batch_size // WORLD_SIZE
    if checkpoint is None:
        save()
    bar = tqdm(total=args.num_epochs, initial=progress["iteration"], unit="epoch", disable=not is_main)
    if is_main:
        bar.write(f"run folder {run_path}")
    while (epoch := progress["iteration"]) < args.num_epochs:
        stage = (epoch >= first_search) + (epoch >= first_play)  # 0: random games, 1: uniform prior, 2: self-play
        if epoch > 0 and epoch in (first_search, first_play):
            pool.size, holdout = 0, Records(*(x[:0] for x in holdout))  # another kind of games begins
            self_play = SelfPlay(go, num_games, args)
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1.0 - 0.99 * epoch / args.num_epochs))
        num_simulations = round(interpolate(args.simulations_start, args.simulations_end, epoch, args))
        epsilon = interpolate(args.epsilon_start, args.epsilon_end, epoch, args)
        q_weight = interpolate(args.q_weight_start, args.q_weight_end, epoch, args)

        # Prepare: play until there are enough new records, with trees that begin anew after the network has changed
        play_start, num_moves, parts, search = time.perf_counter(), 0, [], None
        value_coef = 1.0 if stage == 0 else args.value_coef
        if stage > 0:
            scores = puct_scores if stage == 2 else ucb1_scores
            search = Search(go, evaluators, num_games, num_simulations, args, scores=scores)
            search.reset(self_play.boards)
        while 8 * sum(len(records[0].q) for records in parts) < num_new:
            parts.append(self_play.play_moves(search, num_simulations, epsilon))
            num_moves += num_games
        seconds = time.perf_counter() - play_start
        new, held_out = (Records(*map(torch.cat, zip(*x, strict=True))) for x in zip(*parts, strict=True))
        holdout = Records(*(torch.cat(x)[-HOLDOUT_SIZE:] for x in zip(holdout, held_out, strict=True)))
        images = make_images(new, go.symmetries)
        max_age = None if args.replay_order == "uniform" else args.max_age
        evicted = pool.add(images, rank_losses(network, images, size, q_weight, value_coef), epoch, max_age)

        # Train on what the pool holds, ranking what was trained on anew after each batch
        ranks, trained, metrics = pool.rank(), [], torch.zeros(len(METRICS), device=device)
        sampled_loss = torch.zeros(2, device=device)
        for _ in range(num_updates):
            index = pool.sample(batch_size, args)
            batch = Records(*(x[index] for x in pool.records))
            metrics += update_network(agent.train(), optimizer, batch, size, q_weight, value_coef)
            loss = rank_losses(agent.eval(), batch, size, q_weight, value_coef)
            sampled_loss += torch.stack((pool.loss[index].mean(), loss.mean()))
            pool.loss[index] = loss
            pool.num_uses[index] += 1
            trained.append(index)
        if WORLD_SIZE > 1:
            for x in agent.buffers():
                x.copy_(sum_over_ranks(x.float()) / WORLD_SIZE)
        agent.fold_into(network)

        # Log, evaluate, checkpoint
        totals = torch.cat((metrics / num_updates, sampled_loss / num_updates))
        losses = (sum_over_ranks(totals) / WORLD_SIZE).tolist()
        num_played = sum_over_ranks(torch.tensor(num_moves, device=device)).item()
        step, iteration = progress["global_step"] + num_played, epoch + 1
        progress |= {"iteration": iteration, "global_step": step}
        if not all(map(math.isfinite, losses)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite after {step} moves: {losses}")
        is_last = iteration == args.num_epochs
        if is_main:
            scalars = {f"losses/{name}": value for name, value in zip(METRICS, losses, strict=False)}
            scalars |= {"charts/learning_rate": lr.item(), "charts/num_simulations": num_simulations}
            scalars |= {"charts/stage": stage, "charts/q_weight": q_weight}
            scalars["charts/moves_per_second"] = num_moves / seconds
            scalars["charts/cpu_seconds"] = time.process_time() - cpu_start
            scalars |= describe_pool(pool, ranks, torch.cat(trained)) | {"pool/evicted": evicted}
            scalars |= {"pool/sampled_loss": losses[-2], "pool/sampled_loss_after": losses[-1]}
            if len(holdout.q):
                with torch.no_grad():
                    kept = record_losses(network, holdout, size, q_weight)
                scalars |= {f"losses/holdout_{name}": x.mean().item() for name, x in zip(METRICS, kept, strict=False)}
            if search is not None:
                scalars |= describe_search(search, num_moves * num_simulations, seconds)
        if args.arena_interval and iteration % args.arena_interval == 0:
            if is_main:
                scalars |= compete(go, network, reference, args, iteration, run_path, progress)
                progress["history"].append([step, progress["elo"]])
            reference.load_state_dict(network.state_dict())
        if is_main:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
            bar.set_postfix({"loss": f"{losses[3]:.3f}", "elo": f"{progress['elo']:.0f}"}, refresh=False)
            bar.update()
        if is_main and not is_last and args.eval_interval and iteration % args.eval_interval == 0:
            for name, value in evaluate(network, args, device)[0].items():
                writer.add_scalar(name, value, step)
        if is_last or (args.checkpoint_interval and iteration % args.checkpoint_interval == 0):
            save()
    bar.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if not is_main:
        return
    eval_metrics, matches = evaluate(network, args, device)
    eval_metrics["eval/elo"] = progress["elo"]
    step, history = progress["global_step"], progress["history"]
    for name, value in eval_metrics.items():
        writer.add_scalar(name, value, step)
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/win_rate_mcts"}
    result |= {"metrics": eval_metrics, "env_steps": step}
    result |= {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
    result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result |= {"torch": torch.__version__, "commit": get_commit(), "args": asdict(args)}
    for name, match in matches.items():
        text = format_games(match, size, args.komi, SCRIPT, name)
        write_atomically(run_path / f"games_{name}.sgf", text.encode())
    if figure := draw_search(network, args, matches["mcts"]["games"][0]):
        figure.savefig(run_path / "board.png", dpi=120)
        writer.add_figure("eval/board", figure, step)
    title, path = f"{args.env_id}, seed {args.seed}", run_path / "learning_curve.png"
    plot_learning_curve(path, writer, history, title, "moves of self-play", "Elo, from matches with itself before")
    writer.close()
    write_atomically(run_path / "result.json", json.dumps(result, indent=2).encode())
    rates = [f"{name} {eval_metrics[f'eval/win_rate_{name}']:.0%}" for name in matches]
    verdict = f"wins against {' and '.join(rates)} of {args.eval_episodes} games, Elo {progress['elo']:+.0f}"
    print(f"{args.env_id}: {verdict} after {step:,} moves in {result['wall_seconds']:.1f} s; run folder {run_path}")


def play_gtp(network: Agent, args: Args, device: torch.device) -> None:
    """Answer GTP commands on stdin until `quit`."""
    sys.stdin.reconfigure(errors="replace")
    go = Go(get_size(args))
    thinker = Thinker(go, make_evaluators(network, go, 1, args), args)
    gtp.Engine(thinker.think, SCRIPT, get_commit(), go.size, args.komi).serve(sys.stdin)


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, evaluate a checkpoint, or play with it."""
    args, checkpoint = tyro.cli(Args, args=argv), None
    torch.set_float32_matmul_precision("medium")  # on CPUs oneDNN instead of MKL, on CUDA TF32
    if sum(map(bool, (args.resume, args.evaluate, args.gtp))) > 1 or (WORLD_SIZE > 1 and (args.evaluate or args.gtp)):
        fail("--resume and --evaluate and --gtp exclude each other, and the last two are for one process")
    if path := args.resume or args.evaluate or args.gtp:
        checkpoint = load_checkpoint(path)
        saved = Args(**checkpoint["args"])
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        fixed = ["env_id", "blocks", "channels", "num_games", "pool_size", "seed", "score_weight", "komi", "gamma"]
        fixed += ["pretrain_value_epochs", "pretrain_search_epochs"]
        for name in fixed if args.resume else fixed[:3]:
            if getattr(args, name) != (trained := getattr(saved, name)):
                fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {path} was trained with {trained}")
        if args.resume and "ranks" not in checkpoint:
            fail(f"--resume {path}: a checkpoint to play with, without the replay pool")
    check_args(args)
    if not (args.evaluate or args.gtp):
        return train(args, checkpoint)
    device = setup_device(args)
    agent = Agent(get_size(args), args).to(device)
    agent.load_state_dict(checkpoint["agent"])
    network = agent.eval().fold_into(make_network(get_size(args), args, device))
    if args.gtp:
        return play_gtp(network, args, device)
    for name, value in (evaluate(network, args, device)[0] | {"eval/elo": checkpoint["elo"]}).items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: --resume the checkpoint.pt in the run folder to go on")
