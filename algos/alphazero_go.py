"""AlphaZero for Go with asynchronous batched search and a replay pool ranked by loss, in one file.

Papers: Silver et al. 2018, "A general reinforcement learning algorithm that masters chess, shogi, and Go through
self-play" (Science 362); Silver et al. 2017, "Mastering the game of Go without human knowledge" (Nature 550);
Danihelka et al. 2022, "Policy improvement by planning with Gumbel" (ICLR), for the roots in self-play.

    python algos/alphazero_go.py                           # first run: 5x5, minutes on two cores
    python algos/alphazero_go.py --env-id Go-9x9 --komi 7.5 --num-games 1024 --blocks 6 --channels 64 --bf16 \
        --pool-size 500000 --simulations-start 64 --simulations-end 400 --num-epochs 400 --num-slots 2   # on a GPU
    torchrun --nproc-per-node 2 algos/alphazero_go.py      # several GPUs (CPU processes: --no-cuda)
    python algos/alphazero_go.py --gtp CHECKPOINT          # play against it from Sabaki or GoGui

What is computed, with values v in [0, 1] from the side to move, v = 1 - v for the other side:

    (1) score(s, a) = Q(s, a) + c sqrt(max(N(s), 1)) / (N(s, a) + 1) P(a | s)      the move followed in the tree
    (2) Q(s, a) = mean of the leaf evaluations below the edge; the network's value of s where there are none
    (3) P(root) + eta noise, or (1 - eta) P(root) + eta noise, noise ~ Dirichlet   --noise, where roots do not go by (8)
    (4) L_policy = -sum_a pi(a) log p(a), pi = N(s, .) / sum N(s, .), or by eq. 8
    (5) L_value = (v - (alpha Q(s) + (1 - alpha) z))^2, z by `compute_result`: 1 won, 0 lost, mixed with the score
    (6) L = g L_value / 0.25 + (1 - g) L_policy / log A + h L_owner                all are about 1 for a blank guess
        L_owner = mean over points of (o - owner at the end of the game)^2         1 own, -1 other, 0 nobody's
    (7) rank(record) = g (v - target)^2 / 0.25 + (1 - g) KL(pi, p) / log A         what of it can be learned away
    (8) pi(a) = softmax(l(a)), l(a) = log P(a | s) + (50 + max_b N(s, b)) Q(s, a), completed by `improve_logits`;
        --root-selection gumbel searches the moves of largest g(a) + l(a), g ~ Gumbel, then the better half, and so on

Stages, in epochs: --pretrain-value-epochs of random games, from which the value is learned; --pretrain-search-epochs of
search by classic UCB, where the prior orders first visits alone, with 5 A // 4 simulations or more; then self-play.
Each epoch plays on until enough records are new, and trains on the pool. Games and pool begin anew in each stage.

Shapes: G games side by side, R some of them, M nodes of a tree, A = n^2 + 1 moves, D longest path from a root to a
leaf, E edges of several paths, B records of a batch.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "tyro>=0.9", "tensorboard>=2.18", "wandb>=0.19", "tqdm>=4.66", "matplotlib>=3.9",
#     "pillow>=10.0",
# ]
# ///

import copy
import json
import math
import os
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: a second, kept out of the timings
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [
    str(Path(__file__).resolve().parents[1]),
    os.getcwd(),
]  # for envs_shared, and for your own environments
from envs_shared.go_tasks import gtp
from envs_shared.go_tasks.files import draw_analysis
from envs_shared.go_tasks.match import (
    MATCH_SCORES,
    RolloutEvaluator,
    choose_random_moves,
    compute_elo,
    play_match,
)
from envs_shared.go_tasks.rules import LEGAL_PLANE, NUM_PLANES, STORED_TYPES, Boards, Go

SCRIPT = "alphazero_go"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


@dataclass
class Args:
    """AlphaZero on Go boards of any size."""

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
    gtp: str | None = None  # checkpoint.pt or best.pt to play with as a GTP engine, without training
    resign_below: float = 0.0  # with --gtp, resign where the value v is less (0: never)

    # Environment
    env_id: str = "Go-5x5"  # board, Go-2x2 to Go-19x19: area scoring, no suicide, positional superko
    komi: float = 0.5  # points for white; whole numbers allow draws
    # share of the score in z: 0 counts won games alone, else also by how much they are won
    score_weight: float = 0.5
    num_games: int = 128  # games of self-play side by side G, over all processes

    # Network
    blocks: int = 3  # residual blocks
    channels: int = 32  # channels of the residual tower
    bf16: bool = False  # run the network in bfloat16: twice as fast on GPUs and CPUs that have it, on others far slower

    # Search
    simulations_start: int = 32  # simulations per move in the first epoch
    simulations_end: int = 48  # simulations per move in the last epoch, and in evaluation and play
    num_slots: Literal[1, 2] = 1  # batches in flight; two pay where the network takes as long as the tree
    # with two, largest share k of pseudo visits in N(root); beyond it a request fails
    pseudo_limit: float = 0.1
    c_puct: float = 0.5  # exploration c, eq. 1
    root_selection: Literal["gumbel", "puct"] = "gumbel"  # in self-play: eq. 8, or eq. 1 with noise
    gumbel_moves: int = 16  # moves that are searched side by side in the first round, eq. 8
    noise: Literal["additive", "convex"] = "convex"  # on the prior of puct roots, eq. 3
    noise_weight: float = 0.25  # weight eta of that noise
    # concentration of that noise on 19x19, scaled up by 361 / n^2 on smaller boards
    dirichlet_alpha: float = 0.03
    epsilon_start: float = 0.0  # share of random moves in the first epoch; the others are then the best ones
    epsilon_end: float = 0.0  # share of random moves in the last epoch

    # Algorithm
    num_epochs: int = 30  # epochs of self-play and training, those of pretraining included
    # first epochs that learn the value of random games with a frozen policy head
    pretrain_value_epochs: int = 2
    pretrain_search_epochs: int = 2  # epochs after those, of search by classic UCB with c_puct for its c
    pool_size: int = 100_000  # records in the replay pool, over all processes; a position makes eight of them
    generate_fraction: float = 0.05  # new records of an epoch, as a share of the pool's size
    train_fraction: float = 0.15  # records trained on in an epoch, as a share of the pool's size
    # largest losses of eq. 7, half drawn by them, or at random
    replay_order: Literal["loss", "mix", "uniform"] = "mix"
    loss_clamp: float = 0.5  # largest loss of eq. 7 that counts where records are drawn
    max_reuse: int = 12  # times a record is trained on, at most, while there are batches of others
    max_age: int = 30  # epochs after which a record is evicted first
    batch_size: int = 128  # records of a minibatch B, over all processes
    learning_rate: float = 4e-3  # of AdamW
    anneal_lr: bool = True  # lower the learning rate linearly, towards a hundredth
    weight_decay: float = 1e-2  # of AdamW
    value_coef: float = 0.2  # share g of the value in the loss, eq. 6
    owner_coef: float = 0.3  # weight h of the owners of the points in the loss, eq. 6
    # weight alpha of the search's Q in the value target in the first epoch, eq. 5
    q_weight_start: float = 0.05
    q_weight_end: float = 0.5  # weight alpha in the last epoch


# ---- Networks --------------------------------------------------------------------------------------------------------


class ConvNorm(nn.Module):
    """Convolution and batch normalization."""

    def __init__(self, num_in: int, num_out: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm2d(num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Agent(nn.Module):
    """Residual tower with a policy head and a value head (Silver et al. 2017, methods)."""

    def __init__(self, size: int, args: Args):
        super().__init__()
        width = args.channels
        self.autocasts = args.bf16
        self.stem = ConvNorm(NUM_PLANES, width, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleList([ConvNorm(width, width, 3), ConvNorm(width, width, 3)]) for _ in range(args.blocks)
        )
        self.policy_conv = ConvNorm(width, 4, 1)
        self.value_conv = ConvNorm(width, 4, 1)
        self.policy_head = nn.Linear(4 * size**2, size**2 + 1)
        self.value_head = nn.Sequential(nn.Linear(4 * size**2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.owner_head = nn.Linear(width, 1)  # learned for what it teaches the tower, as in KataGo (Wu 2019)

    def forward(self, planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [B, A], values [B] in [0, 1] and owners [B, n^2] in [-1, 1] of planes [B, NUM_PLANES, n, n]."""
        with torch.autocast(planes.device.type, torch.bfloat16, enabled=self.autocasts):
            x = self.stem(planes.to(self.policy_head.weight.dtype, memory_format=torch.channels_last)).relu()
            for first, second in self.blocks:
                x = (x + second(first(x).relu())).relu()  # [B, channels, n, n]
            logits = self.policy_head(self.policy_conv(x).relu().flatten(1))
            value = self.value_head(self.value_conv(x).relu().flatten(1)).squeeze(1)
            owner = self.owner_head(x.permute(0, 2, 3, 1)).flatten(1)  # [B, n^2]
        return logits.float(), value.float().sigmoid(), owner.float().tanh()


def make_network(agent: Agent, args: Args) -> Agent:
    """A copy of `agent` for search: batch norms are folded into the convolutions, all in bfloat16 with --bf16."""
    network = copy.deepcopy(agent).eval().requires_grad_(False)
    for layer in list(network.modules()):
        if isinstance(layer, ConvNorm):
            layer.conv = fuse_conv_bn_eval(layer.conv, layer.norm)
            layer.norm = nn.Identity()
    network.autocasts = False
    network.to(torch.bfloat16 if args.bf16 else torch.float32, memory_format=torch.channels_last)
    if args.compile:
        network.compile(dynamic=True)
    return network


# ---- Storage ---------------------------------------------------------------------------------------------------------


class Records(NamedTuple):
    """What self-play learns from: B positions, as their side to move saw them."""

    planes: torch.Tensor  # bool [B, NUM_PLANES, n, n]
    visits: torch.Tensor  # float16 [B, A] pi of the search, eq. 4
    q: torch.Tensor  # [B] value of the search
    z: torch.Tensor  # [B] result of the game
    owner: (
        torch.Tensor
    )  # int8 [B, n^2] who had each point at the end of the game: 1 itself, -1 the other, 0 nobody

    def pick(self, index) -> "Records":
        """The records of an index, a mask or a slice."""
        return Records(*(x[index] for x in self))


class Pool:
    """Records ranked by their loss (eq. 7); each of the eight images of a position is one."""

    def __init__(self, capacity: int, size: int, device: torch.device):
        planes = torch.zeros(capacity, NUM_PLANES, size, size, dtype=torch.bool, device=device)
        visits = torch.zeros(capacity, size**2 + 1, dtype=torch.float16, device=device)
        owner = torch.zeros(capacity, size**2, dtype=torch.int8, device=device)
        self.records = Records(planes, visits, *torch.zeros(2, capacity, device=device), owner)
        self.loss = torch.zeros(capacity, device=device)  # of eq. 7, as last computed
        self.epoch = torch.zeros(capacity, dtype=torch.int64, device=device)  # that a record was made in
        self.num_uses = torch.zeros_like(self.epoch)  # how often it was trained on
        self.position = torch.zeros_like(self.epoch)  # a number that is the same for all images
        self.num_positions = 0
        self.size = 0

    def add(self, images: Records, loss: torch.Tensor, epoch: int, args: Args) -> None:
        """Put in images of positions [8 B, ...] with their loss [8 B].

        Beyond the capacity those older than --max-age leave first, then those of the lowest loss, be they old or new;
        with --replay-order uniform the oldest.
        """
        num_new = len(loss)
        capacity = len(self.loss)
        # Those with the smallest keys leave, of the old records and, after them, the new ones
        epochs = torch.cat((self.epoch[: self.size], torch.full_like(loss, epoch, dtype=torch.int64)))
        keys = torch.cat((self.loss[: self.size], loss)).masked_fill(epochs < epoch - args.max_age, -1)
        if args.replay_order == "uniform":
            keys = epochs.float()
        num_evicted = max(0, self.size + num_new - capacity)
        is_evicted = torch.zeros_like(keys, dtype=torch.bool)
        is_evicted[keys.topk(num_evicted, largest=False).indices] = True
        rows = (~is_evicted[self.size :]).nonzero()[:, 0]  # of the new ones that come in
        freed = is_evicted[: self.size].nonzero()[:, 0]
        unused = torch.arange(self.size, capacity, device=loss.device)
        index = torch.cat((freed, unused))[: len(rows)]  # where they go
        for mine, new in zip(self.records, images, strict=True):
            mine[index] = new[rows]
        self.loss[index] = loss[rows]
        self.epoch[index] = epoch
        self.num_uses[index] = 0
        self.position[index] = self.num_positions + rows % (num_new // 8)
        self.num_positions += num_new // 8
        self.size = min(capacity, self.size + num_new)

    def sample(self, num_records: int, args: Args) -> torch.Tensor:
        """Index of up to `num_records` records in the --replay-order, no two of them images of the same position."""
        is_free = self.num_uses[: self.size] < args.max_reuse
        loss = (self.loss[: self.size].clamp(max=args.loss_clamp) + 1e-6) * is_free
        count = min(
            8 * num_records, self.size
        )  # images of at least `num_records` positions, or nearly so where drawn
        if args.replay_order == "loss":  # equal ones, as those at the clamp are, in random order
            index = (loss.double() + 1e-6 * torch.rand_like(loss)).topk(count).indices
        elif args.replay_order == "mix":
            is_even = torch.arange(count, device=loss.device) % 2 == 0
            index = torch.where(is_even, draw_index(loss, count), draw_index(is_free, count))
        else:
            index = draw_index(is_free, count)
        # Of the images of a position, the one that was drawn first
        _, inverse = self.position[index].unique(return_inverse=True)
        place = torch.arange(count, device=loss.device)
        first = torch.full_like(place, count).scatter_reduce(0, inverse, place, "amin")
        return index[first[inverse] == place][:num_records]

    def describe(self, epoch: int) -> dict[str, float]:
        """How the pool stands in `epoch`: records, and the means of their loss, age in epochs and number of uses."""
        return {
            "pool/size": self.size,
            "pool/loss": self.loss[: self.size].mean().item(),
            "pool/age": epoch - self.epoch[: self.size].float().mean().item(),
            "pool/uses": self.num_uses[: self.size].float().mean().item(),
        }

    def state_dict(self) -> dict:
        """What a checkpoint needs of it."""
        tensors = self.records._asdict() | {name: getattr(self, name) for name in POOL_COLUMNS}
        state = {name: x[: self.size].clone() for name, x in tensors.items()}
        return state | {"num_positions": self.num_positions}

    def load_state_dict(self, state: dict) -> None:
        """Take over the records of a pool that was no larger."""
        self.size = len(state["loss"])
        self.num_positions = state["num_positions"]
        for name, mine in (
            self.records._asdict() | {name: getattr(self, name) for name in POOL_COLUMNS}
        ).items():
            mine[: self.size] = state[name][: self.size].to(mine.device)


POOL_COLUMNS = ("loss", "epoch", "num_uses", "position")  # beside those of Records


def draw_index(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Draw `count` rows one by one, without putting them back, in proportion to `weights` [B]; those of 0 come last.

    The order of log(weight) + Gumbel noise is that of such draws.
    """
    gumbel = -torch.empty_like(weights, dtype=torch.float32).exponential_().log()
    return (weights.float().clamp(min=1e-30).log() + gumbel).topk(count).indices


# ---- AlphaZero -------------------------------------------------------------------------------------------------------


def puct_scores(q, visit_counts, prior, parent_visits, c_puct: float) -> torch.Tensor:
    """Eq. 1 for q, visit counts N(s, a) and prior [..., A], and visits N(s) [...] of their state."""
    return q + c_puct * parent_visits.clamp(min=1).sqrt().unsqueeze(-1) * prior / (visit_counts + 1)


def ucb1_scores(q, visit_counts, prior, parent_visits, c_puct: float) -> torch.Tensor:
    """Q + c sqrt(log N(s) / N(s, a)) (Auer et al. 2002); moves without visits come first, by the prior among them."""
    bonus = (parent_visits.clamp(min=1).log().unsqueeze(-1) / visit_counts.clamp(min=1)).sqrt()
    return q + torch.where(visit_counts > 0, c_puct * bonus, 1e6 * (1 + prior))


def add_dirichlet_noise(prior: torch.Tensor, alpha: float, weight: float, kind: str) -> torch.Tensor:
    """Eq. 3 for the prior [R, A] of roots, zero where a move is illegal; not a distribution where it is additive."""
    noise = torch._standard_gamma(torch.full_like(prior, alpha, dtype=torch.float64)) * (prior > 0)
    noise = (noise / noise.sum(1, keepdim=True).clamp(min=1e-300)).float()
    return (prior if kind == "additive" else (1 - weight) * prior) + weight * noise


def improve_logits(prior, q, visit_counts, value) -> torch.Tensor:
    """l of eq. 8, [R, A]; Q of moves without visits is what value [R] and Q of the others, by prior, say of them."""
    seen = prior * (visit_counts > 0)
    mean = (seen * q).sum(1) / seen.sum(1).clamp(min=1e-9)
    num_visits = visit_counts.sum(1)
    mixed = (value + num_visits * mean) / (1 + num_visits)  # Danihelka et al. appendix D
    completed_q = torch.where(visit_counts > 0, q, mixed.unsqueeze(1))
    return prior.log() + (50 + visit_counts.amax(1, keepdim=True)) * completed_q


def plan_halving(num_moves: int, num_simulations: int) -> list[int]:
    """Sequential halving (Danihelka et al. section 3): simulation t is for a move that has had just plan[t] before."""
    num_rounds = max(1, math.ceil(math.log2(num_moves)))
    plan = []
    visits = 0  # of each move that is left
    while len(plan) < num_simulations:
        for _ in range(max(1, num_simulations // (num_rounds * num_moves))):
            plan += num_moves * [visits]
            visits += 1
        num_moves = max(2, num_moves // 2)
    return plan[:num_simulations]


def compute_result(score: torch.Tensor, komi: float, score_weight: float, num_points: int) -> torch.Tensor:
    """z of black [B] for area scores [B]: 1 won, 0 lost, 1/2 drawn, mixed with the share of the board by which."""
    margin = score.float() - komi
    share = (0.5 + margin / (2 * num_points)).clamp(0, 1)
    return (1 - score_weight) * (margin.sign() + 1) / 2 + score_weight * share


def compute_losses(logits, value, legal, visits, target):
    """Policy loss of eq. 4, value loss of eq. 5 and KL(visits, policy), each [B]."""
    log_prob = logits.masked_fill(~legal, -torch.inf).log_softmax(1).masked_fill(~legal, 0.0)
    policy_loss = -(visits * log_prob).sum(1)
    return (
        policy_loss,
        (value - target).square(),
        policy_loss + (visits * visits.clamp(min=1e-12).log()).sum(1),
    )


def mix_losses(policy_loss: torch.Tensor, value_loss: torch.Tensor, num_actions: int, value_coef: float):
    """Eq. 6 and 7: both scaled to 1 for a network that knows nothing, weighted by value_coef g."""
    return value_coef * value_loss / 0.25 + (1 - value_coef) * policy_loss / math.log(num_actions)


def move_subtrees(edge_child: torch.Tensor, new_root: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """New numbers [G M + 1] of nodes when the trees below `new_root` [R] stay; G M for those that leave.

    `edge_child` [G M + 1, A] holds the number of the node below each edge, G M where there is none; tree g has the
    numbers from g M on, with M = `num_nodes`. What stays closes ranks: the new root, the oldest of its tree, gets the
    number g M.
    """
    none = len(edge_child) - 1
    stays = torch.zeros(none + 1, dtype=torch.bool, device=edge_child.device)
    level = new_root
    while len(level):
        stays[level] = True
        children = edge_child[level]
        level = children[children != none].long()
    stays = stays[:-1].view(-1, num_nodes)  # [G, M]
    first = torch.arange(0, none, num_nodes, device=edge_child.device).unsqueeze(1)
    new_number = torch.full((none + 1,), none, device=edge_child.device)
    new_number[:-1] = torch.where(stays, first + stays.cumsum(1) - 1, none).flatten()
    return new_number


class NetworkEvaluator:
    """Logits [R, A] and values [R] by a network, of up to `num_games` positions; a CUDA graph always takes all."""

    def __init__(self, network: Agent, go: Go, num_games: int, use_graph: bool):
        self.network = CudaGraph(network) if use_graph else network
        self.go = go
        self.planes = None
        if use_graph:
            self.planes = torch.zeros(
                num_games, NUM_PLANES, go.size, go.size, dtype=torch.bool, device=go.device
            )

    @torch.no_grad()
    def __call__(self, boards: Boards, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the positions, with legal moves [R, A], and run the network on them."""
        planes = self.go.planes(boards, legal)
        num_rows = len(planes)
        if self.planes is not None:
            self.planes[:num_rows] = planes
            planes = self.planes
        parts = planes.split(len(planes) if planes.is_cuda else 64)  # small ones stay in the cache of a CPU
        logits, values, _ = (torch.cat(x)[:num_rows] for x in zip(*map(self.network, parts), strict=True))
        return logits, values


def make_evaluators(network: Agent, go: Go, num_games: int, args: Args) -> list[NetworkEvaluator]:
    """One for each slot."""
    use_graph = args.cuda_graphs and go.device.type == "cuda" and WORLD_SIZE == 1
    return [NetworkEvaluator(network, go, num_games, use_graph) for _ in range(args.num_slots)]


class Slot:
    """A batch of leaves on its way, at most one of each game, and the worker that evaluates it beside the master.

    The worker is a stream of the GPU or a thread of the CPU. `path` [G, D] holds the edges from a root to the leaf.
    """

    def __init__(self, evaluator, num_games: int, max_depth: int, device: torch.device):
        self.evaluator = evaluator
        self.games = torch.arange(0, device=device)  # those with a leaf on its way
        self.path = torch.zeros(num_games, max_depth, dtype=torch.int64, device=device)
        self.depth = torch.zeros(num_games, dtype=torch.int64, device=device)  # edges of the path
        self.leaf = torch.zeros_like(self.depth)
        self.num_pseudo = torch.zeros_like(self.depth)  # pseudo visits that the path has got
        self.stream = self.thread = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream()
        else:
            self.thread = ThreadPoolExecutor(
                1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
            )

    def submit(self, games: torch.Tensor, boards: Boards, legal: torch.Tensor) -> None:
        """Start the evaluation of the leaves of `games` [R], positions with legal moves [R, A], and return at once."""
        self.games = games
        self.boards = boards  # kept until it is done, so that no one else gets the memory
        self.legal = legal
        if self.stream is None:
            self.future = self.thread.submit(self.evaluator, boards, legal)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.outputs = self.evaluator(boards, legal)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, A] and values [R] once they are there; on a GPU it is the master's stream that waits."""
        if self.stream is None:
            return self.future.result()
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.outputs


OPEN, IN_FLIGHT, OVER, ABSENT = range(4)  # a node: evaluated, being evaluated, the end of a game, none at all
ILLEGAL = -1e9  # Q of illegal moves
MAX_DESCENTS = 8  # of a request in one game
MAX_TREE = 10_000  # simulations that half of the tree of a game of GTP has room for


class Search:
    """Monte-Carlo trees of G games side by side, and the master that owns them.

    Each tree has room for M nodes. Node i of game g has the number g M + i, its row in all tensors `node_...`
    [G M + 1, ...] and `edge_...` [G M + 1, A]; i = 0 is the root, and number G M stands for no node. The edge of a move
    at a node has the number node * A + move, its place in a flattened `edge_...`.
    """

    def __init__(
        self, go: Go, evaluators: list, num_games: int, max_simulations: int, args: Args, scores=puct_scores
    ):
        self.go = go
        self.args = args
        self.compute_scores = scores
        self.num_games = num_games
        self.num_actions = go.num_points + 1
        self.max_nodes = (
            2 * max_simulations + 2
        )  # M; where more than half of a tree is kept, fewer simulations fit
        self.none = num_games * self.max_nodes
        device = go.device
        self.roots = torch.arange(0, self.none, self.max_nodes, device=device)
        self.num_nodes = torch.zeros(num_games, dtype=torch.int64, device=device)

        shape = (self.none + 1, self.num_actions)
        self.edge_visits = torch.zeros(shape, device=device)  # N(s, a)
        self.edge_q = torch.zeros(shape, device=device)  # Q(s, a), for the side to move at s
        self.edge_prior = torch.zeros(shape, device=device)  # P(a | s)
        self.edge_pseudo = torch.zeros(shape, dtype=torch.int16, device=device)
        self.edge_child = torch.full(shape, self.none, dtype=torch.int32, device=device)
        self.node_visits = torch.zeros(
            self.none + 1, device=device
        )  # N(s), the evaluation of s itself included
        self.node_value = torch.zeros(self.none + 1, device=device)  # of the network, or the result
        self.node_status = torch.full((self.none + 1,), ABSENT, dtype=torch.int8, device=device)
        self.node_best = torch.zeros(
            self.none + 1, dtype=torch.int64, device=device
        )  # edge of the highest score
        one = go.new(1)
        self.types = Boards(
            *(x.dtype for x in one)
        )  # that the rules compute with; nodes are stored in smaller ones
        one = one._replace(history=one.history[:, :1])  # a node has the hash of its own position alone
        self.node_boards = one.to_types(STORED_TYPES).pick(
            torch.zeros(self.none + 1, dtype=torch.int64, device=device)
        )

        max_depth = min(self.max_nodes, go.max_moves) + 1
        self.gumbel = None  # g of eq. 8 at the roots, [G, A], in self-play by eq. 8: see `begin_halving`
        self.deepest = 0  # edges of the longest path into a tree so far
        self.slots = [Slot(evaluator, num_games, max_depth, device) for evaluator in evaluators]

    @torch.no_grad()
    def reset(self, boards: Boards, games: torch.Tensor | None = None) -> None:
        """Begin new trees for `games` [R], all if not given; `boards` are those of all G games."""
        self.boards = boards
        games = torch.arange(self.num_games, device=self.go.device) if games is None else games
        if len(games) == 0:
            return
        boards = boards.pick(games)
        roots = self.roots[games]
        self.num_nodes[games] = 1
        legal = self.add_nodes(roots, boards)
        going = (~boards.is_over).nonzero()[:, 0]
        if len(going):
            legal = legal[going]
            logits, values = self.slots[0].evaluator(boards.pick(going), legal)
            self.open_nodes(roots[going], legal, logits, values)

    def add_nodes(self, nodes: torch.Tensor, boards: Boards) -> torch.Tensor:
        """Write the positions of new nodes [R]; returns their legal moves [R, A]."""
        position = boards.history.gather(1, boards.num_moves.unsqueeze(1))
        self.node_boards.replace_rows(nodes, boards._replace(history=position).to_types(STORED_TYPES))
        self.node_status[nodes] = torch.where(boards.is_over, OVER, IN_FLIGHT).to(torch.int8)
        self.node_visits[nodes] = 1.0
        self.edge_child[nodes] = self.none
        for x in (self.edge_visits, self.edge_q, self.edge_prior, self.edge_pseudo):
            x[nodes] = 0
        over = boards.is_over.nonzero()[:, 0]
        if len(over):
            score = self.go.score(boards.pick(over))
            z = compute_result(score, self.args.komi, self.args.score_weight, self.go.num_points)
            self.node_value[nodes[over]] = torch.where(boards.to_play[over] == 1, z, 1 - z)
        return self.go.legal_moves(boards)

    def open_nodes(
        self, nodes: torch.Tensor, legal: torch.Tensor, logits: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write what the network says of nodes [R] with legal moves [R, A]; from then on searches go through them."""
        self.edge_q[nodes] = torch.where(legal, values.unsqueeze(1), ILLEGAL)
        self.edge_prior[nodes] = logits.masked_fill(~legal, -torch.inf).softmax(1)
        self.node_value[nodes] = values
        self.node_status[nodes] = OPEN
        self.choose_edges(nodes)

    def choose_edges(self, nodes: torch.Tensor) -> None:
        """Find the edges of the highest score at nodes [R], after something that it depends on has changed there."""
        visit_counts = self.edge_visits[nodes]  # [R, A]
        if len(self.slots) > 1:
            visit_counts = visit_counts + self.edge_pseudo[nodes]
        prior = self.edge_prior[nodes]
        parent_visits = self.node_visits[nodes]
        scores = self.compute_scores(self.edge_q[nodes], visit_counts, prior, parent_visits, self.args.c_puct)
        self.node_best[nodes] = nodes * self.num_actions + scores.argmax(1)

    def descend(self, slot: Slot, games: torch.Tensor) -> None:
        """Follow the highest scores from the roots of `games` [R] to where the tree ends, into the slot's paths.

        All go down together, as far as the longest path can reach: who has come to an end stays there, and nobody reads
        what is written beyond its depth.
        """
        node = self.roots[games]
        if self.gumbel is not None:
            self.node_best[node] = self.choose_root_edges(games)
        depth = torch.zeros_like(node)
        goes_on = torch.ones_like(node, dtype=torch.bool)
        for step in range(self.deepest + 1):
            edge = self.node_best[node]
            child = self.edge_child.view(-1)[edge].long()
            slot.path[games, step] = edge
            depth += goes_on
            goes_on = self.node_status[child] == OPEN
            node = torch.where(goes_on, child, node)
        slot.leaf[games] = child
        slot.depth[games] = depth

    def read_paths(self, slot: Slot, games: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Edges [E] of all the slot's paths in `games` [R], each with its path's place in `games` and its depth."""
        depth = slot.depth[games].unsqueeze(1)
        steps = torch.arange(self.deepest, device=depth.device)
        place, step = (steps < depth).nonzero(as_tuple=True)
        return slot.path[games[place], step], place, step

    def add_pseudo_visits(self, slot: Slot, games: torch.Tensor) -> None:
        """Add a pseudo visit to the paths to the slot's leaves in `games` [R], until `backup` takes it off."""
        slot.num_pseudo[games] += 1
        edges, _, _ = self.read_paths(slot, games)
        self.edge_pseudo.view(-1)[edges] += 1
        self.choose_edges(edges // self.num_actions)

    def request(self, slot: Slot, games: torch.Tensor) -> torch.Tensor:
        """Select a leaf in each of `games` [R] and send it on its way; returns the games where that went well.

        Who comes upon the leaf of the other slot makes the path to that leaf heavier by a pseudo visit, until it is
        evaluated, and descends again. The request fails where the pseudo visits would be more than k N(root), or after
        MAX_DESCENTS.
        """
        other = self.slots[0] if slot is self.slots[-1] else self.slots[-1]
        found = []
        pending = games
        for _ in range(MAX_DESCENTS):
            self.descend(slot, pending)
            if len(self.slots) == 1:
                found.append(pending)
                break
            collides = self.node_status[slot.leaf[pending]] == IN_FLIGHT
            found.append(pending[~collides])
            pending = pending[collides]
            roots = self.roots[pending]
            num_pseudo = self.edge_pseudo[roots].sum(
                1
            )  # of the whole tree, as each path has one edge at the root
            pending = pending[num_pseudo + 1 <= self.args.pseudo_limit * self.node_visits[roots]]
            if len(pending) == 0:
                break
            self.add_pseudo_visits(other, pending)
        found = torch.cat(found)
        if len(found):
            if self.gumbel is not None:
                self.root_requests[found, slot.path[found, 0] % self.num_actions] += 1
            self.deepest = max(self.deepest, int(slot.depth[found].max()))
            self.expand(slot, found)
        return found

    def expand(self, slot: Slot, games: torch.Tensor) -> None:
        """Add the new leaves of `games` [R] to the trees and submit them; games that are over are known at once."""
        new = games[slot.leaf[games] == self.none]
        if len(new):
            last_edge = slot.path[new, slot.depth[new] - 1]
            parent = last_edge // self.num_actions
            leaf = self.roots[new] + self.num_nodes[new]
            self.num_nodes[new] += 1
            self.edge_child.view(-1)[last_edge] = leaf.int()
            slot.leaf[new] = leaf
            # The past for superko: of the game up to the root, then of the path
            edges, place, step = self.read_paths(slot, new)
            history = self.boards.history[new]
            root_moves = self.boards.num_moves[new]
            history[place, root_moves[place] + step] = self.node_boards.history[edges // self.num_actions, 0]
            boards = self.node_boards.pick(parent).to_types(self.types)._replace(history=history)
            boards = self.go.play(boards, last_edge % self.num_actions)
            legal = self.add_nodes(leaf, boards)
            going = (~boards.is_over).nonzero()[:, 0]
            if len(going):
                slot.submit(new[going], boards.pick(going), legal[going])
        over = games[self.node_status[slot.leaf[games]] == OVER]
        if len(over):
            self.backup(slot, over, self.node_value[slot.leaf[over]])

    def finish(self, slot: Slot) -> None:
        """Wait for the slot's batch and back its values up."""
        games = slot.games
        if len(games) == 0:
            return
        logits, values = slot.wait()
        slot.games = games[:0]
        self.open_nodes(slot.leaf[games], slot.legal, logits, values)
        self.backup(slot, games, values)

    def backup(self, slot: Slot, games: torch.Tensor, values: torch.Tensor) -> None:
        """Count the leaf values [R], of the side to move there, into the means along the slot's paths."""
        edges, place, step = self.read_paths(slot, games)  # none of them twice, with one path a game
        values = values[place]
        num_plies = slot.depth[games][place] - step  # from the node of an edge to the leaf
        values = torch.where(num_plies % 2 == 1, 1 - values, values)
        nodes = edges // self.num_actions
        if len(self.slots) > 1:
            self.edge_pseudo.view(-1)[edges] -= slot.num_pseudo[games][place].to(torch.int16)
            slot.num_pseudo[games] = 0
        self.node_visits[nodes] += 1
        visit_counts = self.edge_visits.view(-1)[edges] + 1
        self.edge_visits.view(-1)[edges] = visit_counts
        q = self.edge_q.view(-1)[edges]
        self.edge_q.view(-1)[edges] = q + (values - q) / visit_counts  # eq. 2
        self.choose_edges(nodes)

    @torch.no_grad()
    def run(self, num_simulations: int, until: float = math.inf) -> None:
        """Search `num_simulations` times in every game, or until its tree is full or time.monotonic() is `until`."""
        room = self.max_nodes - self.num_nodes
        is_open = self.node_status[self.roots] == OPEN
        left = torch.where(is_open, room.clamp(max=num_simulations), 0)
        while any(len(slot.games) for slot in self.slots) or left.any():
            for slot in self.slots:
                self.finish(slot)
                if time.monotonic() >= until:
                    left.zero_()
                games = left.nonzero()[:, 0]
                if len(games):
                    sent = self.request(slot, games)
                    left[sent] -= 1

    @torch.no_grad()
    def advance(self, moves: torch.Tensor, boards: Boards) -> None:
        """Go on to `boards`, after `moves` [G], with the trees below, or with new ones where they have no such node."""
        new_root = self.edge_child[self.roots, moves].long()
        below = self.node_boards.pick(new_root)
        is_same = (below.stones == boards.stones).all(1) & (
            below.to_play == boards.to_play
        )  # no turn was left out
        has_tree = is_same & (self.node_status[new_root] == OPEN)
        # Rows of nodes that stay move to the front of their trees; then the numbers in them are translated
        new_number = move_subtrees(
            self.edge_child, new_root[has_tree], self.max_nodes
        )  # that of no node stays
        source = (new_number < self.none).nonzero()[:, 0]
        target = new_number[source]
        edge_tensors = (
            self.edge_visits,
            self.edge_q,
            self.edge_prior,
        )  # no pseudo visits between two searches
        node_tensors = (self.node_visits, self.node_value, self.node_status, *self.node_boards)
        for x in (*edge_tensors, *node_tensors):
            x[target] = x[source]
        self.node_best[target] = self.node_best[source] + (target - source) * self.num_actions
        self.edge_child[target] = new_number[self.edge_child[source].long()].int()
        self.num_nodes = torch.bincount(target // self.max_nodes, minlength=self.num_games)
        self.deepest = max(0, self.deepest - 1)
        self.reset(boards, (~has_tree).nonzero()[:, 0])

    def add_noise(self) -> None:
        """Eq. 3 at the roots."""
        alpha = self.args.dirichlet_alpha * 361 / self.go.num_points
        prior = self.edge_prior[self.roots]
        self.edge_prior[self.roots] = add_dirichlet_noise(
            prior, alpha, self.args.noise_weight, self.args.noise
        )
        self.choose_edges(self.roots)

    def begin_halving(self, num_simulations: int) -> None:
        """Draw the noise of eq. 8, and plan the next `num_simulations` at the roots."""
        prior = self.edge_prior[self.roots]
        self.gumbel = -torch.empty_like(prior).exponential_().log()
        self.root_requests = torch.zeros_like(prior, dtype=torch.int64)  # sent through each move
        most = min(self.args.gumbel_moves, self.num_actions)
        plans = torch.tensor([plan_halving(1 + k, num_simulations) for k in range(most)], device=prior.device)
        self.plan = plans[(prior > 0).sum(1).clamp(max=most) - 1]  # [G, num_simulations]

    def choose_root_edges(self, games: torch.Tensor) -> torch.Tensor:
        """The edge of largest g + l of eq. 8 at the roots of `games` [R], among moves simulated as often as planned."""
        requests = self.root_requests[games]
        planned = self.plan[games].gather(1, requests.sum(1, keepdim=True))  # for this simulation
        scores = (self.gumbel + self.improved_logits())[games].masked_fill(requests != planned, -torch.inf)
        return self.roots[games] * self.num_actions + scores.argmax(1)

    def improved_logits(self) -> torch.Tensor:
        """l of eq. 8 at the roots, [G, A]."""
        q = self.edge_q[self.roots]
        return improve_logits(
            self.edge_prior[self.roots], q, self.visit_counts(), self.node_value[self.roots]
        )

    def policy(self) -> torch.Tensor:
        """pi of eq. 4 at the roots, [G, A]."""
        if self.gumbel is not None:
            return self.improved_logits().softmax(1)
        visit_counts = self.visit_counts()
        return visit_counts / visit_counts.sum(1, keepdim=True)

    def best_moves(self) -> torch.Tensor:
        """Moves [G] of most visits, then largest Q + P / 50; at Gumbel roots, of largest g + l where most simulated."""
        if self.gumbel is None:
            q = self.edge_q[self.roots].clamp(min=0)
            return (self.visit_counts() + 0.5 * q + 0.01 * self.edge_prior[self.roots]).argmax(1)
        is_last = self.root_requests == self.root_requests.amax(1, keepdim=True)
        return (self.gumbel + self.improved_logits()).masked_fill(~is_last, -torch.inf).argmax(1)

    def visit_counts(self) -> torch.Tensor:
        """Visits of the moves at the roots, [G, A]."""
        return self.edge_visits[self.roots]

    def root_values(self) -> torch.Tensor:
        """Q of the roots [G], the mean over all leaf evaluations, that of the root itself included."""
        visit_counts = self.visit_counts()
        total = (visit_counts * self.edge_q[self.roots]).sum(1)
        return (self.node_value[self.roots] + total) / (1 + visit_counts.sum(1))

    def find_line(self, move: int) -> list[int]:
        """A move of game 0 and those that follow it by most visits."""
        line = [move]
        node = int(self.edge_child[0, move])
        while node != self.none and self.edge_visits[node].any():
            line.append(int(self.edge_visits[node].argmax()))
            node = int(self.edge_child[node, line[-1]])
        return line


class SelfPlay:
    """G games side by side and the records of those that are not over."""

    def __init__(self, go: Go, num_games: int, args: Args):
        self.go = go
        self.args = args
        self.num_games = num_games
        shape = (num_games, go.max_moves)
        self.planes = torch.zeros(*shape, NUM_PLANES, go.size, go.size, dtype=torch.bool, device=go.device)
        self.visits = torch.zeros(*shape, go.num_points + 1, dtype=torch.float16, device=go.device)
        self.q = torch.zeros(shape, device=go.device)
        self.begin()

    def begin(self) -> None:
        """New games, of another kind than those of before."""
        self.boards = self.go.new(self.num_games)

    def play(self, evaluators: list, num_positions: int, num_simulations: int, epsilon: float, epoch: int):
        """Play until there are `num_positions` to learn from: all images of these, the number of moves, and metrics.

        Trees begin anew. There are none in the stage of random games; in the next one they grow by classic UCB.
        """
        start = time.time()
        search = None
        first_search = self.args.pretrain_value_epochs
        if epoch >= first_search:
            scores = puct_scores
            if (
                epoch < first_search + self.args.pretrain_search_epochs
            ):  # each move once, and a quarter to choose by
                scores = ucb1_scores
                num_simulations = max(num_simulations, 5 * (self.go.num_points + 1) // 4)
            search = Search(self.go, evaluators, self.num_games, num_simulations, self.args, scores)
            search.reset(self.boards)
        learned = []
        num_moves = 0
        while sum(len(records.q) for records in learned) < num_positions:
            learned.append(self.play_moves(search, num_simulations, epsilon))
            num_moves += self.num_games
        metrics = {"charts/moves_per_second": num_moves / (time.time() - start)}
        records = Records(*map(torch.cat, zip(*learned, strict=True)))
        return make_images(records, self.go.symmetries), num_moves, metrics

    @torch.no_grad()
    def play_moves(self, search: Search | None, num_simulations: int, epsilon: float) -> Records:
        """A move in each game, searched or else at random: the records of games that ended with it."""
        boards = self.boards
        legal = self.go.legal_moves(boards)
        if search is None:
            moves = choose_random_moves(self.go, boards, legal, fill_eyes=False)
            visits = legal / legal.sum(1, keepdim=True)
            q = torch.full_like(self.q[:, 0], torch.nan)  # not known: z takes its place
        else:
            uses_gumbel = self.args.root_selection == "gumbel" and search.compute_scores is puct_scores
            if uses_gumbel:
                search.begin_halving(num_simulations)
            else:
                search.add_noise()
            search.run(num_simulations)
            q = search.root_values()
            visits = search.policy()
            moves = search.best_moves()
            if epsilon > 0:
                is_random = torch.rand_like(q) < epsilon
                moves = torch.where(is_random, choose_random_moves(self.go, boards, legal), moves)
            elif not uses_gumbel:  # in proportion to the visits, at first
                is_early = boards.num_moves < self.go.num_points // 3
                moves = torch.where(is_early, torch.multinomial(visits, 1)[:, 0], moves)
        row = (torch.arange(self.num_games, device=self.go.device), boards.num_moves)
        self.planes[row] = self.go.planes(boards, legal)
        self.visits[row] = visits.half()
        self.q[row] = q
        self.boards = self.go.play(boards, moves)
        ended = self.boards.is_over.nonzero()[:, 0]
        records = self.finish_games(ended)
        self.boards.replace_rows(ended, self.go.new(len(ended)))
        if search is not None:
            search.advance(moves, self.boards)
        return records

    def finish_games(self, games: torch.Tensor) -> Records:
        """The records of `games` [R], which are over."""
        boards = self.boards.pick(games)
        owner = self.go.owner(boards)  # [R, n^2]
        z = compute_result(
            owner.sum(1), self.args.komi, self.args.score_weight, self.go.num_points
        ).unsqueeze(1)
        step = torch.arange(self.q.shape[1], device=games.device)
        is_move = step < boards.num_moves.unsqueeze(1)  # [R, 2 n^2]
        to_play = (1 - 2 * (step % 2)).to(torch.int8)  # black begins
        z = torch.where(to_play == 1, z, 1 - z)[is_move]
        q = self.q[games][is_move]
        q = torch.where(q.isnan(), z, q)
        owner = (owner.unsqueeze(1) * to_play.unsqueeze(1))[is_move]
        return Records(self.planes[games][is_move], self.visits[games][is_move], q, z, owner)

    def state_dict(self) -> dict:
        """What a checkpoint needs of it."""
        last = int(self.boards.num_moves.max())
        state = {name: getattr(self, name)[:, :last].clone() for name in ("planes", "visits", "q")}
        return state | {"boards": self.boards._asdict()}

    def load_state_dict(self, state: dict) -> None:
        """Go on with the games of a checkpoint."""
        self.boards = Boards(**state["boards"]).to(self.go.device)
        for name in ("planes", "visits", "q"):
            getattr(self, name)[:, : state[name].shape[1]] = state[name].to(self.go.device)


def make_images(records: Records, symmetries: torch.Tensor) -> Records:
    """All images [8 B] of records [B], image k of record b in row k B + b."""
    planes = records.planes.flatten(2)  # [B, NUM_PLANES, n^2]
    planes = torch.cat([planes[..., s[:-1]] for s in symmetries]).view(-1, *records.planes.shape[1:])
    visits = torch.cat([records.visits[:, s] for s in symmetries])
    owner = torch.cat([records.owner[:, s[:-1]] for s in symmetries])
    return Records(planes, visits, records.q.repeat(8), records.z.repeat(8), owner)


METRICS = (
    "policy_loss",
    "value_loss",
    "kl",
    "owner_loss",
    "loss",
    "grad_norm",
)  # what `update_network` returns
TAGS = (
    *(f"losses/{name}" for name in METRICS),
    "pool/sampled_loss",
    "pool/sampled_loss_after",
)  # `train_minibatch`


def record_losses(network, records: Records, q_weight: float) -> tuple:
    """The three losses of `compute_losses` and that of the owners, each [B]."""
    logits, value, owner = network(records.planes)
    points = records.planes[:, LEGAL_PLANE].flatten(1)
    legal = torch.cat((points, torch.ones_like(points[:, :1])), 1)  # [B, A], the pass always
    target = q_weight * records.q + (1 - q_weight) * records.z  # eq. 5
    owner_loss = (owner - records.owner).square().mean(1)
    return *compute_losses(logits, value, legal, records.visits.float(), target), owner_loss


@torch.no_grad()
def rank_losses(network, records: Records, q_weight: float, value_coef: float) -> torch.Tensor:
    """Eq. 7 for records [B], by a network in evaluation mode."""
    losses = []
    for start in range(0, len(records.q), 512):  # parts, which stay in the cache
        _, value_loss, kl, _ = record_losses(network, records.pick(slice(start, start + 512)), q_weight)
        losses.append(mix_losses(kl, value_loss, records.visits.shape[1], value_coef))
    return torch.cat(losses)


def update_network(agent: Agent, optimizer, records: Records, args: Args, q_weight: float, value_coef: float):
    """One gradient step of eq. 6 on a minibatch; returns its METRICS [6]. With value_coef 1 the policy head stays."""
    policy_loss, value_loss, kl, owner_loss = (x.mean() for x in record_losses(agent, records, q_weight))
    loss = (
        mix_losses(policy_loss, value_loss, records.visits.shape[1], value_coef)
        + args.owner_coef * owner_loss
    )
    optimizer.zero_grad()
    (loss / WORLD_SIZE).backward()
    if value_coef == 1:
        for p in (*agent.policy_conv.parameters(), *agent.policy_head.parameters()):
            p.grad = None
    sum_gradients(agent.parameters())
    grad_norm = clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    return torch.stack((policy_loss, value_loss, kl, owner_loss, loss, grad_norm)).detach()


def train_minibatch(agent: Agent, optimizer, pool: Pool, args: Args, q_weight: float, value_coef: float):
    """A step on records of the pool, ranked anew after it; returns what TAGS names [8]."""
    index = pool.sample(args.batch_size // WORLD_SIZE, args)
    batch = pool.records.pick(index)
    metrics = update_network(agent.train(), optimizer, batch, args, q_weight, value_coef)
    loss = rank_losses(agent.eval(), batch, q_weight, value_coef)
    metrics = torch.cat((metrics, torch.stack((pool.loss[index].mean(), loss.mean()))))
    pool.loss[index] = loss
    pool.num_uses[index] += 1
    return metrics


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def make_player(go: Go, evaluators: list, args: Args, scores=puct_scores):
    """A function from boards [R] to the best moves [R] of a search with `args.simulations_end` simulations."""

    def choose_moves(boards: Boards) -> torch.Tensor:
        search = Search(go, evaluators, len(boards.to_play), args.simulations_end, args, scores)
        search.reset(boards)
        search.run(args.simulations_end)
        return search.best_moves()

    return choose_moves


@torch.no_grad()
def evaluate(network: Agent, args: Args, device: torch.device) -> tuple[dict[str, float], dict]:
    """Matches of --eval-episodes games against random moves and against plain MCTS with as many simulations.

    Returns the metrics and what `play_match` gives for the latter.
    """
    go = Go(get_size(args), device)
    generator = torch.Generator(device).manual_seed(args.seed)
    rollouts = RolloutEvaluator(go, args.komi, args.seed)  # won or lost, by however much
    player = make_player(go, make_evaluators(network, go, args.eval_episodes, args), args)
    opponents = {
        "random": lambda boards: choose_random_moves(go, boards, go.legal_moves(boards), generator),
        "mcts": make_player(go, [rollouts], replace(args, score_weight=0.0, c_puct=1.25), ucb1_scores),
    }
    metrics = {}
    for name, opponent in opponents.items():
        match = play_match(go, (player, opponent), args.eval_episodes, args.komi, args.seed)
        metrics |= {f"eval/{score}_{name}": match[score] for score in MATCH_SCORES if score in match}
    return metrics, match


@torch.no_grad()
def compete(network: Agent, reference: Agent, go: Go, args: Args, progress: dict) -> dict[str, float]:
    """Scores of a match of up to 40 games against `reference`, the best network so far, of the Elo in `progress`.

    It is played with a quarter of the simulations, to cost little.
    """
    num_games = min(40, args.eval_episodes)
    args = replace(args, simulations_end=math.ceil(args.simulations_end / 4))
    players = [make_player(go, make_evaluators(x, go, num_games, args), args) for x in (network, reference)]
    match = play_match(go, players, num_games, args.komi, args.seed + progress["iteration"])
    scores = {f"eval/{score}": match[score] for score in MATCH_SCORES if score in match}
    scores["eval/elo"] = progress["elo"] + compute_elo(match["win_rate"], match["distinct_games"])
    return scores | {"eval/moves": sum(map(len, match["games"]))}


class Thinker:
    """Searches the positions of one game, going on with the tree of the position before."""

    def __init__(self, network: Agent, args: Args, device: torch.device):
        self.go = Go(get_size(args), device)
        self.evaluators = make_evaluators(network, self.go, 1, args)
        self.args = args
        self.positions = []
        self.komi = None

    @torch.no_grad()
    def think(
        self, positions: list[Boards], komi: float, until: float, num_simulations: int | None
    ) -> gtp.Analysis:
        """Search the last of `positions`, which is not over: so many simulations (None: as trained), or `until`."""
        known = self.positions
        new = positions[len(known) - 1 :]
        if len(new) > 0 and komi == self.komi and all(a is b for a, b in zip(known, positions, strict=False)):
            for boards in new[1:]:
                boards = boards.to(self.go.device)
                self.search.advance(boards.last_move, boards)
        else:
            size = max(MAX_TREE, self.args.simulations_end)
            self.search = Search(self.go, self.evaluators, 1, size, replace(self.args, komi=komi))
            self.search.reset(positions[-1].to(self.go.device))
        self.positions = list(positions)
        self.komi = komi
        self.search.run(self.args.simulations_end if num_simulations is None else num_simulations, until)
        visits = self.search.edge_visits[0].tolist()
        lines = {move: self.search.find_line(move) for move, count in enumerate(visits) if count}
        return gtp.Analysis(visits, self.search.edge_q[0].tolist(), self.search.edge_prior[0].tolist(), lines)


def draw_search(network: Agent, args: Args, device: torch.device, moves: list[int]):
    """Picture of a search a third of the way through the game `moves`; None where matplotlib is missing."""
    go = Go(get_size(args))
    boards = go.new(1)
    for move in moves[: len(moves) // 3]:
        boards = go.play(boards, torch.tensor([move]))
    analysis = Thinker(network, args, device).think([boards], args.komi, math.inf, None)
    return draw_analysis(go, boards, analysis)


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


def get_size(args: Args) -> int:
    """Lines of the board."""
    return int(args.env_id.split("x")[1])


def check_args(args: Args) -> None:
    """Exit with code 2 and one line for settings that cannot work."""
    if not re.fullmatch(r"Go-(\d+)x\1", args.env_id) or not 2 <= get_size(args) <= 19:
        fail(f"--env-id {args.env_id}: Go-2x2 to Go-19x19")
    shares = (
        "score_weight epsilon_start epsilon_end value_coef q_weight_start q_weight_end resign_below".split()
    )
    shares += ["noise_weight", "pseudo_limit"]
    may_be_zero = (
        "seed checkpoint_interval eval_interval pretrain_value_epochs pretrain_search_epochs max_age".split()
    )
    may_be_zero += [*shares, "owner_coef", "weight_decay"]
    for name, value in vars(args).items():
        is_number = type(value) in (int, float) and name != "komi"
        if is_number and not (0 < value < math.inf or (value == 0 and name in may_be_zero)):
            fail(
                f"--{name.replace('_', '-')} {value}: not a number {'from' if name in may_be_zero else 'above'} 0"
            )
        if name in shares and value > 1:
            fail(f"--{name.replace('_', '-')} {value}: has to be from 0 to 1")
        if name in ("num_games", "batch_size", "pool_size") and value % WORLD_SIZE:
            fail(f"--{name.replace('_', '-')} {value} does not divide among {WORLD_SIZE} processes")
    if args.seed >= 2**62:
        fail(f"--seed {args.seed}: has to be below 2^62")
    if not abs(args.komi) <= get_size(args) ** 2:
        fail(f"--komi {args.komi}: more than the board has points")
    if args.pool_size < 8 * args.batch_size:
        fail(
            f"--pool-size {args.pool_size}: has to hold eight images of each of --batch-size {args.batch_size}"
        )


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if there is one, and leave a run folder with result.json."""
    progress = {
        "iteration": 0,
        "global_step": 0,
        "eval_steps": 0,
        "seconds": [0.0, 0.0],
        "eval_seconds": [0.0, 0.0],
    }
    progress["elo"] = 0.0  # of the best network
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
    start = read_clock() - progress["seconds"]
    step = progress["global_step"]
    device = setup_device(args)

    # Streams of the seed: 1 weights; 2 games and samples, of each process
    seed_everything(args.seed, 1)
    size = get_size(args)
    agent = Agent(size, args).to(device)
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.AdamW(agent.parameters(), lr, weight_decay=args.weight_decay, fused=True)
    seed_everything(args.seed, 2, RANK, step)
    go = Go(size, device)
    num_games = args.num_games // WORLD_SIZE
    self_play = SelfPlay(go, num_games, args)
    pool = Pool(args.pool_size // WORLD_SIZE, size, device)

    # The best network so far, which matches are against, is a part, too
    parts = {"agent": agent, "optimizer": optimizer, "reference": make_network(agent, args)}
    if WORLD_SIZE == 1:
        parts |= {"self_play": self_play, "pool": pool}
    if checkpoint is not None:
        for name, part in parts.items():
            if name in checkpoint:
                part.load_state_dict(checkpoint[name])
        optimizer.param_groups[0] |= {"lr": lr, "weight_decay": args.weight_decay}
        if WORLD_SIZE == 1 and "pool" in checkpoint:
            torch.set_rng_state(checkpoint["torch_rng"])
    network = make_network(agent, args)
    if RANK == 0:
        run_path, writer = open_run(args, step)
        best_path = run_path / "best.pt"
        if checkpoint is None:
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)
    if args.compile:
        agent.compile(dynamic=True)

    evaluators = make_evaluators(network, go, num_games, args)
    num_positions = math.ceil(
        args.generate_fraction * args.pool_size / WORLD_SIZE / 8
    )  # new ones of an epoch
    num_updates = math.ceil(args.train_fraction * args.pool_size / args.batch_size)
    stage_starts = (args.pretrain_value_epochs, args.pretrain_value_epochs + args.pretrain_search_epochs)
    eval_interval = args.eval_interval or math.ceil(args.num_epochs / 10)
    bar = tqdm(total=args.num_epochs, initial=progress["iteration"], unit="epoch", disable=RANK > 0)
    while progress["iteration"] < args.num_epochs:
        epoch = progress["iteration"]
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1.0 - 0.99 * epoch / args.num_epochs))
        t = epoch / max(1, args.num_epochs - 1)  # 0 in the first epoch, 1 in the last
        num_simulations = round((1 - t) * args.simulations_start + t * args.simulations_end)
        epsilon = (1 - t) * args.epsilon_start + t * args.epsilon_end
        q_weight = (1 - t) * args.q_weight_start + t * args.q_weight_end
        value_coef = 1.0 if epoch < args.pretrain_value_epochs else args.value_coef
        if epoch > 0 and epoch in stage_starts:  # another kind of games begins
            pool.size = 0
            self_play.begin()

        # Prepare: play until there are enough new records
        images, num_moves, scalars = self_play.play(
            evaluators, num_positions, num_simulations, epsilon, epoch
        )
        pool.add(images, rank_losses(network, images, q_weight, value_coef), epoch, args)

        # Train on what the pool holds, ranking what was trained on anew after each batch
        metrics = [
            train_minibatch(agent, optimizer, pool, args, q_weight, value_coef) for _ in range(num_updates)
        ]
        for buffer in agent.buffers():  # running statistics: the mean over processes
            buffer.copy_(sum_over_ranks(buffer.float()) / WORLD_SIZE)
        network.load_state_dict(make_network(agent, args).state_dict())
        step += int(sum_over_ranks(torch.tensor(num_moves, device=device)))
        progress |= {"iteration": epoch + 1, "global_step": step}

        # Measure what is new
        means = (sum_over_ranks(torch.stack(metrics).mean(0)) / WORLD_SIZE).tolist()
        scalars |= dict(zip(TAGS, means, strict=True))
        if not all(map(math.isfinite, means)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {scalars}")
        if RANK > 0:
            continue
        scalars |= pool.describe(epoch)
        seconds = read_clock() - start - progress["eval_seconds"]
        scalars |= {"charts/wall_seconds": seconds[0], "charts/cpu_seconds": seconds[1]}
        scalars["charts/learning_rate"] = lr.item()
        bar.update()

        # Play the best network, keep the new one where it wins half of the games or is the first, log and save
        is_last = progress["iteration"] >= args.num_epochs
        is_allowed = (
            args.eval_interval > 0 or progress["eval_steps"] <= step / 8
        )  # moves, dearer in few games at once
        if is_last or (is_allowed and progress["iteration"] % eval_interval == 0):
            eval_start = read_clock()
            scalars |= compete(network, parts["reference"], go, args, progress)
            if scalars["eval/win_rate"] >= 0.5 or progress["eval_steps"] == 0 or not best_path.exists():
                progress["elo"] = scalars["eval/elo"]
                parts["reference"].load_state_dict(network.state_dict())
                save_checkpoint(best_path, args, progress, {"agent": agent})
            progress["eval_steps"] += scalars["eval/moves"]
            progress["eval_seconds"] = (read_clock() - eval_start + progress["eval_seconds"]).tolist()
            shown = {"loss": f"{scalars['losses/loss']:.3f}", "elo": f"{scalars['eval/elo']:.0f}"}
            bar.set_postfix(shown, refresh=False)
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        if is_last or (args.checkpoint_interval and progress["iteration"] % args.checkpoint_interval == 0):
            progress["seconds"] = (read_clock() - start).tolist()
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)
    bar.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if RANK > 0:
        return

    # Score the final network and the best one against opponents that chose neither
    metrics, match = evaluate(network, args, device)
    best = metrics
    figure = draw_search(network, args, device, match["games"][0])
    if figure is not None:
        writer.add_figure("eval/board", figure, step)
    if best_path.exists() and load_checkpoint(best_path)["global_step"] != step:
        agent.load_state_dict(load_checkpoint(best_path)["agent"])
        best, _ = evaluate(make_network(agent, args), args, device)
    metrics = metrics | {name.replace("eval/", "best/"): value for name, value in best.items()}
    writer.close()
    seconds = read_clock() - start
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/win_rate_mcts"}
    result |= {"metrics": metrics, "env_steps": step, "wall_seconds": seconds[0], "cpu_seconds": seconds[1]}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    result |= {"torch": torch.__version__, "args": asdict(args)}
    (run_path / "result.json.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_path / "result.json.tmp", run_path / "result.json")
    rates = " and ".join(
        f"{metrics[f'eval/win_rate_{name}']:.0%} against {name}" for name in ("random", "mcts")
    )
    print(f"{args.env_id}: wins {rates}, of {metrics['eval/distinct_games_mcts']} distinct games", end=" ")
    print(f"after {step:,} moves in {seconds[0]:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, evaluate a checkpoint, or play with it."""
    args = tyro.cli(Args, args=argv)
    torch.set_float32_matmul_precision("medium")  # on CPUs oneDNN instead of MKL, on CUDA TF32
    checkpoint = None
    paths = [path for path in (args.resume, args.evaluate, args.gtp) if path is not None]
    if len(paths) > 1 or (WORLD_SIZE > 1 and len(paths) == 1 and args.resume is None):
        fail("--resume and --evaluate and --gtp exclude each other, and the last two are for one process")
    if paths:
        (path,) = paths
        checkpoint = load_checkpoint(path)
        saved = checkpoint["args"]
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        fixed = ["env_id", "blocks", "channels", "score_weight"]
        if args.resume is not None:
            fixed += "seed num_games pool_size komi pretrain_value_epochs pretrain_search_epochs".split()
        for name in fixed:
            if getattr(args, name) != getattr(saved, name):
                fail(f"--{name.replace('_', '-')}: {path} was trained with {getattr(saved, name)}")
    if args.resume is not None:
        if "optimizer" not in checkpoint:
            fail(f"--resume {path}: has no optimizer state; give the checkpoint.pt beside it")
        is_done = checkpoint["iteration"] >= args.num_epochs
        if is_done and Path(path).with_name("result.json").exists():
            fail(f"--resume {path}: its {checkpoint['iteration']} epochs are done; raise --num-epochs")
    if checkpoint is not None and "owner_head.weight" not in checkpoint.get("agent", {}):
        fail(f"{path}: its network has no owners of points; it is of an earlier form of this script")
    check_args(args)
    if args.evaluate is None and args.gtp is None:
        return train(args, checkpoint)

    device = setup_device(args)
    agent = Agent(get_size(args), args).to(device)
    agent.load_state_dict(checkpoint["agent"])
    network = make_network(agent, args)
    if args.gtp is not None:
        sys.stdin.reconfigure(errors="replace")
        sys.stdout.reconfigure(errors="replace")
        thinker = Thinker(network, args, device)
        engine = gtp.Engine(thinker.think, SCRIPT, get_size(args), args.komi, resign_below=args.resign_below)
        return engine.serve(sys.stdin)
    for name, value in evaluate(network, args, device)[0].items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: a training goes on with --resume and the checkpoint.pt in its run folder")
