"""AlphaZero for Go: a network learns from its own tree search and a replay pool ranked by loss, in one file.

Papers: Silver et al. 2017, "Mastering the game of Go without human knowledge" (Nature 550), and Silver et al.
2018, "A general reinforcement learning algorithm that masters chess, shogi, and Go through self-play"
(Science 362).

    python alphazero_go.py                                # learns 5x5 in minutes on one CPU core
    torchrun --nproc-per-node 2 alphazero_go.py           # two GPUs, or with --no-cuda two CPU processes
    python alphazero_go.py --gtp runs/NAME/best.pt        # plays in Sabaki or GoGui
    python alphazero_go.py --score-weight 0 --dirichlet-alpha 0.03 --epsilon-start 0.5 --epsilon-end 0.001 \
        --draw-moves 0 --random-fraction 0 --max-age 0 --first-q zero --num-workers 2   # source

The last command, `source` in the docs, has the values of the note that this script was written from. It ranks the
pool by loss alone, plays best or uniformly random moves, and ignores the score.

Values are from 0 to 1, for the side to move; v for one side is 1 - v for the other. Equations of this file:
    (1) score(s, a) = Q(s, a) + c P(a | s) sqrt(N(s)) / (N(s, a) + 1), where N(s) = 1 + sum_a N(s, a)
    (2) N(s, a) += 1, Q(s, a) += (v - Q(s, a)) / N(s, a), starting with Q(s, a) = V(s)
    (3) pi(a) = N(root, a) / sum_b N(root, b); P(a | root) = p(a | root) + eta d(a), d ~ Dirichlet(alpha). The
        noise is added, not mixed in by (1 - eta) p as in the papers, so P sums to 1 + eta
    (4) L_policy = sum_a pi(a) (log pi(a) - log p(a | s)): the cross entropy minus its minimum
    (5) L_value = (V(s) - (beta Q(root) + (1 - beta) z))^2, where the result z is 1 if the game was won and 0
        if it was lost, mixed with its score by --score-weight
    (6) L = g L_value / 0.25 + (1 - g) L_policy / log A, both at most 1 if V = 1/2 and p is uniform

A simulation follows eq. 1 from the root to a new position s'; eq. 2 then updates each edge of its path with
v = V(s'), or the result if the game is over. Q(root) is the mean of V(root) and all v. An epoch plays until
there are enough new records. The pool keeps the old and new records with the largest loss, and the network
trains on those of largest loss and on random ones. The first epochs learn V from random games, and the next
ones search by classic UCB.

Shapes: G parallel games, R some of them, M nodes of a tree, A = n^2 + 1 moves, E edges, B records;
G and B are those of one process.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "numpy", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import os
import random
import re
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from math import ceil, log
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# Where envs_shared is, unless it is beside this file
sys.path.append(str(Path(__file__).resolve().parent.parent))
from envs_shared.go import LEGAL_PLANE, NUM_PLANES, Boards, Go

RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# What is logged about an epoch of training: means over its minibatches, in the order in which update_network (the
# first four) and train_minibatch (the last two) stack them
METRICS = ("loss", "policy_loss", "value_loss", "grad_norm", "sampled_loss", "sampled_loss_after")
# On one GPU, record the search and the minibatch; replaying them saves CPU overhead. Set it to False for edits that
# need the host in between, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
OPEN, PENDING, OVER, ABSENT = range(4)  # status of a node: evaluated, being evaluated, end of a game, no node
ILLEGAL = -1e9  # Q and logit of illegal moves, in place of minus infinity
MAX_DESCENTS = 8  # attempts of a worker to find a leaf that no other worker has


@dataclass
class Args:
    """AlphaZero on Go boards of any size."""

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on a GPU if there is one
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    run_dir: str = "runs"  # parent folder of all run folders
    resume: str | None = None  # checkpoint.pt of a run to resume; its settings hold unless flags change them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate instead of training
    eval_interval: int = 0  # epochs between matches and checkpoints (0: ten a run, fewer if costly)
    eval_episodes: int = 100  # games against plain MCTS at the end; other matches have at most 40
    gtp: str | None = None  # checkpoint.pt or best.pt to play with by the Go Text Protocol
    resign_below: float = 0.0  # with --gtp, resign if the value is lower
    env_id: str = "Go-5x5"  # board, Go-2x2 to Go-19x19: area scoring, no suicide, positional superko
    komi: float = 0.5  # points for white
    score_weight: float = 0.5  # weight of the score, from 0 to 1, in the result z; the rest is who won
    num_games: int = 128  # parallel games of self-play G, in total across processes
    blocks: int = 3  # residual blocks of the network
    channels: int = 32  # channels of the network
    bf16: bool = False  # run the network in bfloat16
    simulations_start: int = 32  # simulations per move in the first epoch
    simulations_end: int = 48  # simulations per move in the last epoch, in the last match and with --gtp
    num_workers: Literal[1, 2] = 1  # threads that evaluate leaves; two pay off if a core or GPU is idle
    pseudo_limit: float = 0.1  # with two workers, limit k: a tree has at most k N(root) pseudo-visits
    c_puct: float = 0.5  # exploration c, eq. 1 and classic UCB
    first_q: Literal["value", "zero"] = "value"  # Q(s, a) before the first visit: V(s), eq. 2, or 0
    noise_weight: float = 0.25  # weight eta of the noise, eq. 3
    dirichlet_alpha: float = 0.4  # concentration of the noise, eq. 3; about 10 / A
    epsilon_start: float = 0.0  # share of random moves in the first epoch
    epsilon_end: float = 0.0  # share of random moves in the last epoch
    draw_moves: float = 0.33  # share of n^2: so many first moves are drawn from pi; later ones are the best
    num_epochs: int = 30  # epochs, including pretraining
    pretrain_value_epochs: int = 2  # first epochs, which learn V from random games with a frozen policy head
    pretrain_search_epochs: int = 2  # epochs after those, which search by classic UCB
    pool_size: int = 100_000  # records in the pool, in total across processes; eight per position
    generate_fraction: float = 0.05  # new records per epoch, as a share of the pool
    train_fraction: float = 0.15  # records trained on per epoch, as a share of the pool
    random_fraction: float = 0.75  # share of a minibatch drawn at random; the rest has the largest loss
    max_age: int = 30  # epochs after which a record is replaced first (0: never)
    batch_size: int = 128  # records of a minibatch B, in total across processes
    learning_rate: float = 4e-3  # AdamW learning rate
    anneal_lr: bool = True  # lower the learning rate linearly, to a hundredth
    weight_decay: float = 1e-2  # AdamW weight decay
    value_coef: float = 0.2  # weight g of the value loss, eq. 6
    q_weight_start: float = 0.05  # weight beta of Q(root) in the first epoch, eq. 5
    q_weight_end: float = 0.5  # weight beta of Q(root) in the last epoch, eq. 5


# ---- Networks ----------------------------------------------------------------------------------------------
def conv_norm(num_inputs, num_outputs, kernel_size):
    """Make a convolution that keeps the size of the board, and a batch normalization."""
    conv = nn.Conv2d(num_inputs, num_outputs, kernel_size, padding=kernel_size // 2, bias=False)
    return conv, nn.BatchNorm2d(num_outputs)


class Agent(nn.Module):
    """Residual tower with a policy head and a value head (Silver et al. 2017, methods)."""

    def __init__(self, size, args):
        super().__init__()
        width = args.channels
        self.bf16 = args.bf16
        # The tower: two convolutions a block, whose output is added to its input
        self.stem = nn.Sequential(*conv_norm(NUM_PLANES, width, 3), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList()
        for _ in range(args.blocks):
            layers = *conv_norm(width, width, 3), nn.ReLU(inplace=True), *conv_norm(width, width, 3)
            self.blocks.append(nn.Sequential(*layers))
        # Four planes for each head
        self.head_conv = nn.Sequential(*conv_norm(width, 8, 1), nn.ReLU(inplace=True))
        num_inputs = 4 * size**2
        self.policy_head = nn.Linear(num_inputs, size**2 + 1)
        self.value_head = nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, planes):
        """Return logits [B, A] and values [B] of planes [B, NUM_PLANES, n, n]."""
        with torch.autocast(planes.device.type, torch.bfloat16, enabled=self.bf16):
            # This memory format saves 5 % of a search on a CPU
            x = planes.to(torch.float32, memory_format=torch.channels_last)
            x = self.stem(x)  # [B, channels, n, n]
            for block in self.blocks:
                x = block(x).add_(x).relu_()
            policy, value = self.head_conv(x).split(4, 1)  # [B, 4, n, n] each
            logits = self.policy_head(policy.flatten(1))
            value = self.value_head(value.flatten(1)).squeeze(1)
        return logits.float(), value.float().sigmoid()


# ---- Storage -----------------------------------------------------------------------------------------------
class Records(namedtuple("Records", "planes policy q z loss epoch turn")):
    """B records: symmetric images of positions, as the side to move saw them, with training targets.

        planes    bool [B, NUM_PLANES, n, n]
        policy    pi of eq. 3, float16 [B, A]
        q, z      Q(root) and the result of eq. 5, [B] each
        loss      eq. 6, as last computed [B]
        epoch     when the record was made [B]
        turn      from 0 to 7 [B]: minibatch k may draw the record if k modulo 8 is its turn

    The eight images of a position have eight different turns.
    """

    def pick(self, index):
        """Return the records at an index."""
        return Records(*(x[index] for x in self))


def concatenate(parts):
    """Join records that were made one after the other."""
    return Records(*map(torch.cat, zip(*parts)))


def refill_pool(pool, new, capacity, oldest):
    """Add records; beyond the capacity, drop those of epochs before `oldest`, then those of least loss."""
    if pool:
        new = concatenate((pool, new))
    # A loss is at least 0 up to rounding, so that -1 ranks below every loss
    rank = new.loss.masked_fill(new.epoch < oldest, -1)
    return new.pick(rank.topk(min(capacity, len(rank))).indices)


def sample_pool(pool, number, batch_size, random_fraction, fixed_shapes: bool = False):
    """Choose indices of records [B]: the largest losses, then random; no two are images of one position.

    If fewer than B records have their turn, the batch is smaller; fixed shapes need B of them.
    """
    has_turn = pool.turn == number % 8
    rows = torch.arange(len(has_turn), device=has_turn.device)
    if not fixed_shapes:
        rows = rows[has_turn]
    loss = pool.loss[rows]
    is_other = ~has_turn[rows]
    # The minibatch: of random_fraction 0.75 and B = 128, 32 records of largest loss and 96 others
    num_ranked = min(len(rows), batch_size - round(random_fraction * batch_size))
    ranked = loss.masked_fill(is_other, -1).topk(num_ranked).indices
    # Sort by keys: 2 for the largest losses, random ones in [0, 1) for the others, and -1 for those without
    # their turn, which only fixed shapes leave among the rows
    keys = torch.rand_like(loss).scatter(0, ranked, 2.0).masked_fill(is_other, -1)
    return rows[keys.topk(min(len(rows), batch_size)).indices]


class SelfPlay:
    """G games, what was recorded at each of their moves, and the pool of records from finished games.

    T is the maximum number of moves. The pool is None until the first epoch of a stage has collected records.
    """

    def __init__(self, go, num_games):
        self.go = go
        shape = num_games, 2 * go.num_points
        with go.device:
            self.planes = torch.zeros(*shape, NUM_PLANES, go.size, go.size, dtype=torch.bool)  # [G, T, ...]
            self.policy = torch.zeros(*shape, go.num_actions, dtype=torch.float16)  # [G, T, A]
            self.q = torch.zeros(shape)  # [G, T]
        self.start()

    def start(self):
        """Begin new games and an empty pool."""
        self.boards = self.go.new(len(self.q))
        self.pool = None

    def state_dict(self):
        """Return all tensors by name."""
        return {
            "planes": self.planes,
            "policy": self.policy,
            "q": self.q,
            "boards": self.boards._asdict(),
            "pool": self.pool._asdict() if self.pool else None,
        }

    def load_state_dict(self, state):
        """Restore what `state_dict` returned; raises RuntimeError if the sizes differ."""
        # view_as refuses other sizes; copy_ alone would broadcast some of them
        self.q.copy_(state["q"].view_as(self.q))
        self.planes.copy_(state["planes"])
        self.policy.copy_(state["policy"])
        self.boards.put(slice(None), Boards(**state["boards"]))
        if state["pool"]:
            self.pool = Records(*(x.to(self.q.device) for x in state["pool"].values()))


# ---- AlphaZero ---------------------------------------------------------------------------------------------
def puct_scores(q, visits, prior, parent_visits, c):
    """Compute eq. 1 from Q, N(s, a) and P [..., A], and N(s) [..., 1]."""
    return q + c * prior * parent_visits.sqrt() / (visits + 1)


def ucb_scores(q, visits, prior, parent_visits, c):
    """Compute classic UCB (Auer et al. 2002); unvisited moves come first, by prior."""
    bonus = c * (parent_visits.log() / visits.clamp(min=1)).sqrt()
    return q + torch.where(visits > 0, bonus, 1e6 * (1 + prior))


def dirichlet_noise(prior, alpha):
    """Draw noise [R, A] of a Dirichlet distribution over the moves whose prior [R, A] is not zero."""
    # Gamma variables that are divided by their sum; float32 would round too many to zero
    concentration = torch.full_like(prior, alpha, dtype=torch.float64)
    noise = torch.distributions.Gamma(concentration, torch.ones_like(concentration)).sample() * (prior > 0)
    return (noise / noise.sum(1, keepdim=True)).float()


def compute_result(score, args, num_points):
    """Compute z of black [B] from its area minus that of white [B]; 1/2 is a draw."""
    # A mixture of who won, which is 0, 1/2 or 1, and the share of the board
    margin = score - args.komi
    share = (0.5 + margin / (2 * num_points)).clamp(0, 1)
    return (1 - args.score_weight) * (margin.sign() + 1) / 2 + args.score_weight * share


# Settings that change from epoch to epoch:
#     name               "random games" (they learn V), "search pretraining" or "self-play"
#     scores             how a search chooses: puct_scores (eq. 1) or ucb_scores
#     num_simulations    of each move
#     epsilon            share of random moves
#     q_weight           beta of eq. 5
#     value_coef         g of eq. 6
Stage = namedtuple("Stage", "name scores num_simulations epsilon q_weight value_coef")


def get_stage(epoch, num_actions, args):
    """Return the settings of an epoch of value pretraining, search pretraining or self-play."""
    t = epoch / max(1, args.num_epochs - 1)  # from 0 to 1

    def schedule(start: float, end: float):
        return (1 - t) * start + t * end

    stage = Stage(
        name="self-play",
        scores=puct_scores,
        num_simulations=round(schedule(args.simulations_start, args.simulations_end)),
        epsilon=schedule(args.epsilon_start, args.epsilon_end),
        q_weight=schedule(args.q_weight_start, args.q_weight_end),
        value_coef=args.value_coef,
    )
    if epoch < args.pretrain_value_epochs:
        return stage._replace(name="random games", value_coef=1.0)
    if epoch < args.pretrain_value_epochs + args.pretrain_search_epochs:
        # Classic UCB tries each move before it chooses
        num_simulations = max(stage.num_simulations, 5 * num_actions // 4)
        return stage._replace(name="search pretraining", scores=ucb_scores, num_simulations=num_simulations)
    return stage


class Worker:
    """Evaluates leaves. If there are two, each does it in a thread and, on a GPU, a stream of its own."""

    def __init__(self, evaluate, device):
        self.evaluate = evaluate
        # The number of threads of an operation is a setting of each thread
        self.thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaves = None  # what it evaluates
        self.job = None
        self.pseudo_edges = []  # where the search waits for those leaves

    def submit(self):
        """Start to evaluate the leaves in the thread."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        self.job = self.thread.submit(self.work, self.leaves.boards, self.leaves.legal)

    def work(self, boards, legal):
        """Evaluate in the worker's thread."""
        with torch.cuda.stream(self.stream):
            return self.evaluate(boards, legal)

    def wait(self):
        """Return logits [R, A] and values [R]; on a GPU, the search's stream waits for them."""
        output = self.job.result()
        self.job = None
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        return output


# What a worker evaluates: new nodes [R] of games [R], with their boards and legal moves. Their values will
# change edges [3, E], each a game, a node and a move. `ends` [G] are the nodes where all games' paths end
Leaves = namedtuple("Leaves", "games nodes boards legal edges ends")


class Search:
    """Trees of G games with M nodes each. Node 0 is the root.

    The last node is `nowhere`: it stands for a child that does not exist, and nothing that is written there
    counts. `best` caches each node's move of largest score, and `next` the child that this move leads to:

        root 0 -> next[0] = 3 -> next[3] = 7 -> next[7] = nowhere: node 7 is the leaf

    Both change only where statistics change. All values are for the side to move at their node. If
    `go.fixed_shapes` is set, a simulation computes all games, and the host never waits; what has no work
    in a simulation writes to `nowhere`. Then the caller must leave room in the trees (see `run`).
    """

    def __init__(self, go, workers, boards, num_simulations, args, scores=puct_scores, use_graphs=False):
        self.go = go
        self.workers = workers
        self.has_two = len(workers) > 1
        self.args = args
        self.scores = scores
        # Besides the root and a node for each simulation, there is `nowhere`
        shape = len(boards.to_play), num_simulations + 2
        self.nowhere = num_simulations + 1
        with go.device:
            # Of each edge: N(s, a), Q(s, a), P(a | s), pseudo-visits, and the node where it leads
            self.N, self.Q, self.P, self.pseudo = torch.zeros(4, *shape, go.num_actions)  # [G, M, A]
            self.child = torch.zeros(self.N.shape, dtype=torch.int64)  # [G, M, A]
            # Of each node
            self.value = torch.zeros(shape)  # [G, M], as all below
            self.best, self.next, self.status = torch.zeros(3, *shape, dtype=torch.int64)
            self.boards = Boards(*(torch.zeros(*shape, *x.shape[1:], dtype=x.dtype) for x in boards))
            # Of each game
            self.games = torch.arange(shape[0])  # [G]
            self.num_nodes = torch.zeros_like(self.games)
        self.start(boards)
        if use_graphs and go.fixed_shapes:
            # Two simulations set up what a recording must not, such as the plans of convolutions
            self.run(2)
            self.simulate = capture(self.simulate)
            self.start(boards)

    def start(self, boards):
        """Begin new trees, in the same memory, with boards [G] at the roots."""
        # Other tensors are written at a node before they are read there
        self.N.zero_()
        self.pseudo.zero_()
        self.child.fill_(self.nowhere)
        self.next.fill_(self.nowhere)
        self.status.fill_(ABSENT)
        self.num_nodes.fill_(1)
        roots = torch.zeros_like(self.games)
        no_edges = self.games.new_zeros(3, 0)
        self.add_nodes(self.workers[0], self.games, roots, boards, no_edges, roots)
        self.finish(self.workers[0])

    def run(self, num_simulations):
        """Run num_simulations in each game that is not over; they end early where a tree is full.

        With fixed shapes, the caller must not ask for more than the trees have room for.
        """
        if self.go.fixed_shapes:
            for _ in range(num_simulations):
                self.simulate()
            return
        # The workers take turns: each backs up its last leaves, then gets new ones
        room = self.nowhere - self.num_nodes
        left = room.clamp(max=num_simulations) * (self.status[:, 0] == OPEN)
        while left.any() or any(worker.leaves or worker.pseudo_edges for worker in self.workers):
            for worker in self.workers:
                self.finish(worker)
                games = left.nonzero().squeeze(1)
                if len(games):
                    # The games that get a leaf have one simulation less left
                    left[self.request(worker, games)] -= 1

    def simulate(self):
        """Run one simulation in all games, with one worker and fixed shapes."""
        self.request(self.workers[0], self.games)
        self.finish(self.workers[0])

    def select(self, mask):
        """Return the indices where a mask is true; with fixed shapes all, and the rest counts for nothing."""
        return slice(None) if self.go.fixed_shapes else mask.nonzero().squeeze(1)

    def descend(self, games):
        """Follow `next` from the roots of games [R]; returns edges [3, E], and where paths end [G].

        The last edge leads to a child that does not exist yet, to the end of a game, or to a pending node.
        """
        path = torch.zeros_like(games).unsqueeze(1)  # [R, 1], the roots
        jump = self.next[games]  # [R, M]
        # Pointer jumping: `path` holds the first k nodes, and `jump` leads from each node to the one k steps
        # below it; each turn doubles k, from 1. Paths of M nodes have all ended, as a tree has at most M - 1.
        # Without fixed shapes, the deepest of all paths decides when to stop
        while path.shape[1] <= self.nowhere:
            if not self.go.fixed_shapes and (path[:, -1] == self.nowhere).all():
                break
            path = torch.cat((path, jump.gather(1, path)), 1)
            jump = jump.gather(1, jump)

        # The end of a path is its last node before `nowhere`
        length = (path != self.nowhere).sum(1, keepdim=True)
        ends = torch.zeros_like(self.games)
        ends[games] = path.gather(1, length - 1).squeeze(1)

        # All paths, flattened: entry i is node[i] of game[i], or `nowhere` after the end of a path. A node before
        # the end has an edge to the next one, and an open end has one to the child that `request` will make.
        # Other ends have none
        game = games.unsqueeze(1).expand_as(path).flatten()
        node = path.flatten()
        goes_on = (node != ends[game]) | (self.status[game, node] == OPEN)
        is_edge = (node != self.nowhere) & goes_on
        node = node.masked_fill(~is_edge, self.nowhere)
        edges = torch.stack((game, node, self.best[game, node]))
        return edges[:, self.select(is_edge)], ends

    def find_leaves(self, worker, games):
        """Descend in games [R]; returns edges [3, E] to the leaves found, and the ends [G] of all paths.

        With two workers, a path may end at a node that the other one evaluates. It then gets a pseudo-visit,
        and the next descent may lead to another leaf. A tree has at most k N(root) pseudo-visits, and keeps
        them until the worker's leaves are evaluated.
        """
        if not self.has_two:
            return self.descend(games)
        found = []
        ends = torch.zeros_like(self.games)
        for _ in range(MAX_DESCENTS):
            edges, new_ends = self.descend(games)
            ends[games] = new_ends[games]

            # Who collided: the path ends at a leaf of the other worker. All others have found a leaf
            has_collided = self.status[self.games, ends] == PENDING  # [G]
            found.append(edges[:, ~has_collided[edges[0]]])
            games = games[has_collided[games]]

            # Who may try again: one more pseudo-visit is within the tree's limit, a share of N(root)
            num_pseudo = 1 + self.pseudo[games, 0].sum(1)
            num_visits = 1 + self.N[games, 0].sum(1)
            games = games[num_pseudo <= self.args.pseudo_limit * num_visits]
            if len(games) == 0:
                break

            # The pseudo-visit lowers the scores along the path
            edges = edges[:, torch.isin(edges[0], games)]
            self.pseudo[tuple(edges)] += 1
            worker.pseudo_edges.append(edges)
            self.choose(edges[:2])
        return torch.cat(found, 1), ends

    def request(self, worker, games):
        """Send a leaf of each of the games [R] to the worker; returns the games in which one was found."""
        edges, ends = self.find_leaves(worker, games)
        if self.has_two:
            # A game in which every descent collided gets no leaf
            games = games[self.status[games, ends[games]] != PENDING]

        # Expand: a path whose end is open gets a new node below it. `new` are the games of such paths; with
        # fixed shapes they are all games, and where a path ended at the end of a game (is_other), parent and
        # child are `nowhere`
        is_new = self.status[games, ends[games]] == OPEN
        selected = self.select(is_new)
        new = games[selected]
        is_other = ~is_new[selected]
        parents = ends[new].masked_fill(is_other, self.nowhere)
        moves = self.best[new, parents]
        nodes = self.num_nodes[new].masked_fill(is_other, self.nowhere)
        self.child[new, parents, moves] = nodes
        self.next[new, parents] = nodes
        self.num_nodes[games] += is_new
        ends[new] = torch.where(is_other, ends[new], nodes)

        # Play the moves that lead there
        boards = self.go.play(self.boards.pick((new, parents)), moves)
        self.add_nodes(worker, new, nodes, boards, edges, ends)
        return games

    def add_nodes(self, worker, games, nodes, boards, edges, ends):
        """Store boards [R] as nodes [R] of games [R], and send those that are not over to the worker."""
        self.boards.put((games, nodes), boards)
        over = boards.is_over
        self.status[games, nodes] = torch.where(over, OVER, PENDING)
        if self.go.fixed_shapes or over.any():
            # The value of a game's end is its result
            ended = self.select(over)
            score = self.go.score(boards.pick(ended))
            z = compute_result(score, self.args, self.go.num_points)
            is_black = boards.to_play[ended] == 1
            self.value[games[ended], nodes[ended]] = torch.where(is_black, z, 1 - z)
            to_go = self.select(~over)
            games = games[to_go]
            nodes = nodes[to_go]
            boards = boards.pick(to_go)
        if self.has_two:
            # Paths to the end of a game need no evaluation: they are backed up now, before the other worker's
            # next descents. is_over has an entry for each edge
            is_over = (self.status[self.games, ends] == OVER)[edges[0]]
            if is_over.any():
                finished = edges[:, is_over]
                self.backup(finished, ends)
                self.choose(finished[:2])
                edges = edges[:, ~is_over]
        legal = self.go.legal_moves(boards) if len(games) else None
        worker.leaves = Leaves(games, nodes, boards, legal, edges, ends)
        if len(games) and self.has_two:
            worker.submit()

    def finish(self, worker):
        """Wait for the worker's leaves, open them and back their values up."""
        if worker.leaves:
            games, nodes, boards, legal, edges, ends = worker.leaves
            worker.leaves = None
            if len(games):
                # A single worker needs no thread
                logits, values = worker.wait() if worker.job else worker.evaluate(boards, legal)
                # Ends of games, which are here only with fixed shapes, keep their values
                nodes = nodes.masked_fill(self.status[games, nodes] == OVER, self.nowhere)
                self.value[games, nodes] = values
                # OPEN as a tensor: a number written to indexed places is copied from the host, which no graph
                # can record
                self.status[games, nodes] = torch.full_like(nodes, OPEN)
                first_q = values.unsqueeze(1)
                if self.args.first_q == "zero":
                    first_q = torch.zeros_like(first_q)
                self.Q[games, nodes] = torch.where(legal, first_q, ILLEGAL)
                # A large number in place of infinity, so that a row without a legal move is not NaN
                self.P[games, nodes] = logits.masked_fill(~legal, ILLEGAL).softmax(1)
            self.backup(edges, ends)
            self.choose(torch.cat((edges[:2], torch.stack((games, nodes))), 1))
        # Remove the pseudo-visits that led this worker past the other one's leaves to its own
        for edges in worker.pseudo_edges:
            self.pseudo[tuple(edges)] -= 1
            self.choose(edges[:2])
        worker.pseudo_edges = []

    def backup(self, edges, ends):
        """Update edges [3, E] with the values of the nodes where their games' paths end [G], eq. 2."""
        edge = tuple(edges)
        game, node, _ = edge
        end = ends[game]
        value = self.value[game, end]
        # A value of the other side is 1 minus that of this one
        is_same_side = self.boards.to_play[game, node] == self.boards.to_play[game, end]
        v = torch.where(is_same_side, value, 1 - value)
        self.N[edge] += 1
        self.Q[edge] += (v - self.Q[edge]) / self.N[edge]

    def choose(self, places):
        """Find the best moves again after the statistics of `places` [2, E], game and node, have changed."""
        games, nodes = places
        q = self.Q[games, nodes]  # [E, A]
        visits = self.N[games, nodes]
        prior = self.P[games, nodes]
        parent_visits = 1 + visits.sum(1, keepdim=True)  # without pseudo-visits
        if self.has_two:
            visits = visits + self.pseudo[games, nodes]
        best = self.scores(q, visits, prior, parent_visits, self.args.c_puct).argmax(1)
        self.best[games, nodes] = best
        self.next[games, nodes] = self.child[games, nodes, best]

    def add_noise(self):
        """Add noise to the prior of the roots, eq. 3."""
        noise = dirichlet_noise(self.P[:, 0], self.args.dirichlet_alpha)
        self.P[:, 0] += self.args.noise_weight * noise
        self.choose((self.games, 0))

    def policy(self):
        """Return pi of eq. 3 [G, A]; NaN where nothing was searched."""
        visits = self.N[:, 0]
        return visits / visits.sum(1, keepdim=True)

    def root_values(self):
        """Return Q(root) [G], the mean of all values in the tree, including the root's own."""
        visits = self.N[:, 0]
        sum_of_values = self.value[:, 0] + (visits * self.Q[:, 0]).sum(1)
        return sum_of_values / (1 + visits.sum(1))

    def best_moves(self):
        """Return the most visited moves [G]; ties are broken by the largest Q + P / 50."""
        q = self.Q[:, 0].clamp(min=0)  # Q of an illegal move is ILLEGAL
        # Half of Q + P / 50 is below 1, so that it only decides between equal N
        return (self.N[:, 0] + 0.5 * q + 0.01 * self.P[:, 0]).argmax(1)


def choose_moves(boards, legal, go, search, stage, args):
    """Choose the moves of self-play on boards [G]; returns pi [G, A], Q(root) [G] and the moves [G].

    In random games nothing is searched: pi is uniform over the legal moves, and Q is NaN.
    """
    if stage.name == "random games":
        policy = legal / legal.sum(1, keepdim=True)
        q = torch.full_like(policy[:, 0], torch.nan)  # unknown: z takes its place when the game is over
        return policy, q, go.draw_moves(boards, legal)

    # Search
    search.start(boards)
    search.add_noise()
    search.run(stage.num_simulations)
    policy = search.policy()
    q = search.root_values()

    # The first moves of a game are drawn from pi, the later ones are the best; a share epsilon is random
    is_early = boards.num_moves < args.draw_moves * go.num_points
    moves = torch.where(is_early, torch.multinomial(policy, 1).squeeze(1), search.best_moves())
    is_random = torch.rand_like(q) < stage.epsilon
    moves = torch.where(is_random, go.draw_moves(boards, legal, fill_eyes=True), moves)
    return policy, q, moves


def play_moves(games, go, search, stage, args):
    """Play a move in each game of `games` (a SelfPlay), and return the records of those that end with it."""
    boards = games.boards
    legal = go.legal_moves(boards)
    policy, q, moves = choose_moves(boards, legal, go, search, stage, args)

    # Record the position at index num_moves of its game, then play
    rows = torch.arange(len(q), device=go.device), boards.num_moves
    games.planes[rows] = go.planes(boards, legal)
    games.policy[rows] = policy.half()
    games.q[rows] = q
    games.boards = go.play(boards, moves)

    # Which R games have ended
    ended = games.boards.is_over.nonzero().squeeze(1)
    boards = games.boards.pick(ended)

    # z of each move of these games, as seen by the side that moved
    step = torch.arange(games.q.shape[1], device=go.device)  # [T]
    z = compute_result(go.score(boards), args, go.num_points).unsqueeze(1)
    z = torch.where(step % 2 == 0, z, 1 - z)  # [R, T], as black begins
    is_move = step < boards.num_moves.unsqueeze(1)  # [R, T]
    q = games.q[ended][is_move]
    z = z[is_move]

    # New games take their place
    games.boards.put(ended, go.new(len(ended)))
    # Set later: make_images sets epoch and turn, and compute_losses finds the loss
    loss, epoch, turn = torch.zeros(3, len(z), device=go.device)
    return Records(
        planes=games.planes[ended][is_move],
        policy=games.policy[ended][is_move],
        q=torch.where(q.isnan(), z, q),
        z=z,
        loss=loss,
        epoch=epoch,
        turn=turn,
    )


def make_images(records, symmetries, epoch):
    """Make the eight symmetric images of records [B]; image k of record b is row k B + b."""
    planes = records.planes.flatten(2)[..., symmetries[:, :-1]]  # [B, NUM_PLANES, 8, n^2]
    policy = records.policy[:, symmetries]  # [B, 8, A]
    # Image k of position i has turn i + k, modulo 8: each turn has one image of each position
    position = torch.arange(len(records.z), device=symmetries.device)
    turn = (position + position.new_tensor(range(8)).unsqueeze(1)).flatten() % 8
    return Records(
        planes=planes.permute(2, 0, 1, 3).reshape(-1, *records.planes.shape[1:]),
        policy=policy.transpose(0, 1).flatten(0, 1),
        q=records.q.repeat(8),
        z=records.z.repeat(8),
        loss=records.loss.repeat(8),
        epoch=torch.full_like(turn, epoch),
        turn=turn,
    )


def collect_images(games, go, search, num_positions, epoch, stage, args, bar):
    """Play until finished games have enough positions; returns their images and the number of moves.

    The bar counts the positions up to `num_positions`.
    """
    records = []
    num_found = 0
    num_moves = 0
    while num_found < num_positions:
        new = play_moves(games, go, search, stage, args)
        records.append(new)
        bar.update(min(len(new.z), num_positions - num_found))
        num_found += len(new.z)
        num_moves += len(games.q)
    return make_images(concatenate(records), go.symmetries, epoch), num_moves


def alphazero_loss(agent, records, stage):
    """Compute eq. 6, 4 and 5 for each record, [3, B]."""
    logits, values = agent(records.planes)
    points = records.planes[:, LEGAL_PLANE].flatten(1)
    legal = nn.functional.pad(points, (0, 1), value=True)  # [B, A]; a pass is always legal
    # Illegal moves have probability zero; their logarithms become 0, as 0 times infinity would be NaN
    log_probs = logits.masked_fill(~legal, -torch.inf).log_softmax(1).masked_fill(~legal, 0)
    policy = records.policy.float()
    policy_loss = (torch.xlogy(policy, policy) - policy * log_probs).sum(1)  # eq. 4
    target = stage.q_weight * records.q + (1 - stage.q_weight) * records.z
    value_loss = (values - target).square()  # eq. 5
    g = stage.value_coef
    loss = g * value_loss / 0.25 + (1 - g) * policy_loss / log(legal.shape[1])  # eq. 6
    return torch.stack((loss, policy_loss, value_loss))


@torch.no_grad()
def compute_losses(agent, records, stage):
    """Compute eq. 6 for records [B] in eval mode, which stays on, in parts that fit into a CPU's cache."""
    agent.eval()
    losses = []
    for part in zip(*(x.split(512) for x in records)):
        losses.append(alphazero_loss(agent, Records(*part), stage)[0])
    return torch.cat(losses)


def update_network(agent, optimizer, records, stage):
    """Take one gradient step on a minibatch, and return the first four METRICS."""
    losses = alphazero_loss(agent, records, stage).mean(1)
    optimizer.zero_grad()
    losses[0].backward()
    if stage.value_coef == 1:
        # Epochs that learn V alone: the policy head stays as it is, since without a gradient AdamW does not even
        # decay its weights. In another network, name all layers here that only the policy uses
        agent.policy_head.zero_grad()
    average_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    return torch.cat((losses.detach(), grad_norm.unsqueeze(0)))


def train_minibatch(agent, optimizer, pool, batch_size, fixed_shapes, stage, args, number):
    """Train on minibatch `number` of the epoch; returns the METRICS.

    The losses of its records in the pool become those after the step.
    """
    index = sample_pool(pool, number, batch_size, args.random_fraction, fixed_shapes)
    records = pool.pick(index)
    # agent.train() also switches on the batch norms of layers that you froze; call eval() on those after it
    losses = update_network(agent.train(), optimizer, records, stage)
    loss_after = compute_losses(agent, records, stage)
    pool.loss[index] = loss_after
    return torch.cat((losses, torch.stack((records.loss.mean(), loss_after.mean()))))


def train_epoch(agent, optimizer, pool, num_minibatches, stage, args, bar, use_graphs=False):
    """Train on minibatches of the pool, which the bar counts; returns the mean METRICS."""
    batch_size = args.batch_size // WORLD_SIZE
    # Fixed shapes need a full minibatch for each of the eight turns
    fixed_shapes = pool.z.is_cuda and pool.turn.bincount(minlength=8).min().item() >= batch_size
    update = partial(train_minibatch, agent, optimizer, pool, batch_size, fixed_shapes, stage, args)
    metrics = []
    for number in torch.arange(num_minibatches, device=pool.z.device):
        # Record after one minibatch, as AdamW creates its state in the first step
        if use_graphs and fixed_shapes and len(metrics) == 1:
            update = capture(update, number)
        metrics.append(update(number).clone())
        bar.update()
    optimizer.zero_grad()  # so that copies of the network have no gradients
    # Average the statistics of batch norms, of which each process has its own. With one process, average does
    # nothing
    for statistics in agent.buffers():
        if statistics.is_floating_point():
            average(statistics)
    return average(torch.stack(metrics).mean(0))


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.inference_mode()
def evaluate_network(go, network, boards, legal):
    """Return logits [R, A] and values [R] of a network."""
    planes = go.planes(boards, legal)
    # On a CPU, in parts of about 6000 points of boards, which fit into its cache
    num_parts = 1 if planes.is_cuda else 1 + len(planes) * go.num_points // 6000
    logits = []
    values = []
    for part in planes.chunk(num_parts):
        outputs = network(part)
        logits.append(outputs[0])
        values.append(outputs[1])
    return torch.cat(logits), torch.cat(values)


def evaluate_rollouts(go, komi, boards, legal):
    """Return random logits [R, A], and as values [R] the result of a random game each. With UCB: plain MCTS.

    The logits only decide in which order untried moves come.
    """
    logits = torch.rand(legal.shape, device=go.device)
    won = ((go.finish_at_random(boards, legal) - komi).sign() + 1) / 2  # by black
    return logits, torch.where(boards.to_play == 1, won, 1 - won)


def make_workers(go, agent, args):
    """Make workers that evaluate leaves with a copy of the network as it is now."""
    # This memory format saves 3 % of a search on a CPU
    network = deepcopy(agent).eval().to(memory_format=torch.channels_last)
    return [Worker(partial(evaluate_network, go, network), go.device) for _ in range(args.num_workers)]


def make_player(go, workers, num_simulations, args, scores=puct_scores):
    """Make a function from boards [R] to the moves [R] that a search finds best."""

    def find_moves(boards):
        """Search each of the boards from the root."""
        search = Search(go, workers, boards, num_simulations, args, scores)
        search.run(num_simulations)
        return search.best_moves()

    return find_moves


def play_match(go, players, num_games, komi):
    """Play two functions from boards [R] to moves [R] against each other.

    Returns the first one's win rate, its mean margin in points after komi, and the number of moves. Each
    opening of two random moves is played from both sides. A draw is half a win.
    """
    # The openings
    num_openings = (num_games + 1) // 2
    boards = go.new(num_openings)
    for _ in range(2):
        boards = go.play(boards, go.draw_moves(boards, go.legal_moves(boards)))
    number = torch.arange(num_games, device=go.device)
    boards = boards.pick(number % num_openings)
    is_first_black = number < num_openings

    # Each player moves in all games where it is its turn
    while not boards.is_over.all():
        for player, is_black in zip(players, (is_first_black, ~is_first_black)):
            rows = (~boards.is_over & ((boards.to_play == 1) == is_black)).nonzero().squeeze(1)
            if len(rows):
                moving = boards.pick(rows)
                boards.put(rows, go.play(moving, player(moving)))

    # Margins of black become those of the first player
    margin = (go.score(boards) - komi) * (2 * is_first_black - 1)
    won = (margin.sign() + 1) / 2
    return won.mean().item(), margin.mean().item(), boards.num_moves.sum().item()


def evaluate(go, agent, best, args, *stream):
    """Play against `best` with a quarter of the simulations, or with all against plain MCTS if it is None.

    `stream` goes to seed_everything.
    """
    seed_everything(args.seed, *stream)
    num_games = args.eval_episodes
    num_simulations = args.simulations_end
    if best:
        # A match during training: fewer games, and a search that is as shallow for both
        num_games = min(40, num_games)
        num_simulations = ceil(num_simulations / 4)
        opponent = make_player(go, make_workers(go, best, args), num_simulations, args)
    else:
        # Plain MCTS: classic UCB, random games in place of the network, and won games alone count
        workers = [Worker(partial(evaluate_rollouts, go, args.komi), go.device)]
        plain_args = replace(args, score_weight=0.0, c_puct=1.25)
        opponent = make_player(go, workers, num_simulations, plain_args, ucb_scores)
    player = make_player(go, make_workers(go, agent, args), num_simulations, args)
    win_rate, margin, num_moves = play_match(go, (player, opponent), num_games, args.komi)
    suffix = "_best" if best else ""
    return {f"eval/win_rate{suffix}": win_rate, f"eval/margin{suffix}": margin, "eval/moves": num_moves}


# ---- Training ----------------------------------------------------------------------------------------------
@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0  # epochs
    step: int = 0  # moves of self-play, in total across processes
    eval_steps: int = 0  # moves of the matches against the best network
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # win rate of best.pt's network in its match, None before the first one
    last_score: float | None = None  # win rate of the newest network against the best, None if not evaluated
    win_rate: float | None = None  # of the newest network against plain MCTS, None before the last epoch


def fail(message: str):
    """Print one line for the user and exit with code 2."""
    tqdm.write(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def average(x):
    """Average a tensor that needs no gradient over all processes, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x.div_(WORLD_SIZE))
    return x


def average_gradients(network):
    """Average the gradients over all processes, in one message; parameters without one are left out."""
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    if WORLD_SIZE > 1:
        vector = average(nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(vector, gradients)


def seed_everything(*stream: int) -> int:
    """Seed all random generators from the integers `stream`; other integers give independent numbers.

    Returns the seed. If there are Gymnasium environments, environment i gets this seed + i, which is below 2^31.
    """
    seed = int(np.random.SeedSequence(stream).generate_state(1)[0]) % 2**30
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    return seed


def capture(function, *inputs):
    """Record `function` as a CUDA graph; return a function that replays it for inputs of the same shapes.

    Recording computes nothing. Numbers of Python, such as settings, are frozen in the recording; tensors are
    read again in each replay. A replay overwrites the output of the one before: clone what you keep.
    """
    memory = [x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        output = function(*memory)

    def replay(*new_inputs):
        for old, new in zip(memory, new_inputs):
            old.copy_(new)
        graph.replay()
        return output

    return replay


def set_up_processes(args):
    """Set the thread count, select the device and, under torchrun, join the process group."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # more threads slow small networks down
    torch.backends.cudnn.deterministic = args.torch_deterministic
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if use_cuda else "cpu")
    if use_cuda:
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default stream cannot be recorded in a graph
    if WORLD_SIZE > 1:
        # The other processes wait while process 0 plays a match, which may take hours
        torch.distributed.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(hours=9))
    return device


def save_checkpoint(run_path: Path, args, progress, parts, name: str):
    """Write all states to a side file and rename it, so that a kill leaves either the old or the new file."""
    states = {key: part.state_dict() for key, part in parts.items()}
    checkpoint = {"args": asdict(args), "progress": asdict(progress), **states}
    torch.save(checkpoint, run_path / f"{name}.tmp")
    os.replace(run_path / f"{name}.tmp", run_path / name)


def load_checkpoint(path):
    """Read a checkpoint of this script without executing anything in it; exits if it is not a valid one."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["args"] = Args(**checkpoint["args"])
        checkpoint["progress"] = Progress(**checkpoint["progress"])
        return checkpoint
    except Exception:
        fail(
            f"{path}: missing, or not a checkpoint of this version of {Path(__file__).name}; name a .pt file"
        )


def open_run(run_path: Path, args, step: int):
    """Make the run folder, and return the writer of its log; exits if the folder cannot be written to.

    With --track, Weights & Biases gets the log too.
    """
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            name=run_path.name,
            id=run_path.name,
            config=asdict(args),
            sync_tensorboard=True,
            resume="allow",
        )
    try:
        # Hide what was logged after the checkpoint of a resumed run
        writer = SummaryWriter(str(run_path), purge_step=step + 1)
    except OSError as error:
        fail(f"{run_path}: cannot be written to ({error.strerror})")
    rows = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
    return writer


def set_up(args, checkpoint, device):
    """Make board, networks, optimizer and games, from `checkpoint` if there is one."""
    go = Go(int(args.env_id.split("x")[1]), device)
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = Agent(go.size, args).to(device)
    options = {"weight_decay": args.weight_decay, "capturable": device.type == "cuda"}
    optimizer = torch.optim.AdamW(agent.parameters(), fused=True, **options)
    parts = {"agent": agent, "best": deepcopy(agent), "optimizer": optimizer}
    games = SelfPlay(go, args.num_games // WORLD_SIZE)
    if checkpoint:
        is_resumed = not (args.evaluate or args.gtp)
        try:
            for name in parts if is_resumed else ["agent"]:
                parts[name].load_state_dict(checkpoint[name])
            # Several processes save no games and no pool, and resume without them
            if is_resumed and "games" in checkpoint and WORLD_SIZE == 1:
                games.load_state_dict(checkpoint["games"])
        except (KeyError, RuntimeError, ValueError):
            path = args.evaluate or args.gtp or args.resume
            fail(
                f"{path}: not the network or the games of --env-id, --blocks, --channels, --num-games and this "
                "file, or only good to --evaluate"
            )
        optimizer.param_groups[0] |= options  # loading has put the saved ones in place of them
    return go, parts, games


def use_network(go, agent, args):
    """Print scores for --evaluate, or answer commands of the Go Text Protocol for --gtp."""
    if args.evaluate:
        print(evaluate(go, agent, None, args, 3))
        return
    from envs_shared.go_gtp import Engine

    Engine(go, partial(Search, go, make_workers(go, agent, args)), args).serve(sys.stdin)


def summarize(pool, metrics, epoch):
    """Return what is logged about an epoch's losses and the pool after it."""
    scalars = {f"losses/{name}": x for name, x in zip(METRICS, metrics.tolist())}
    scalars["pool/size"] = len(pool.z)
    scalars["pool/loss"] = pool.loss.mean()
    scalars["pool/age"] = epoch - pool.epoch.float().mean()
    return scalars


def train(args, run_path: Path, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate or --gtp, only use its network.

    Random numbers come from seed_everything(args.seed, stream, ...): stream 0 for the weights, 1 for training
    (then the epoch and the process), 2 for matches during training (then the epoch), 3 for --evaluate, 4 for
    the match against plain MCTS.
    """
    # Set up
    device = set_up_processes(args)
    go, parts, games = set_up(args, checkpoint, device)
    agent, best, optimizer = parts.values()
    if args.evaluate or args.gtp:
        use_network(go, agent, args)
        return
    progress = checkpoint["progress"] if checkpoint else Progress()
    whole = parts | {"games": games} if WORLD_SIZE == 1 else parts
    save = partial(save_checkpoint, run_path, args, progress)
    if RANK == 0:
        writer = open_run(run_path, args, progress.step)
        print(f"{run_path}: {args.num_games} games on {device}, step {progress.step}")
        if not checkpoint:
            save(whole, "checkpoint.pt")
        elif not (run_path / "best.pt").exists() or checkpoint["args"].komi != args.komi:
            progress.best_score = progress.win_rate = None  # the next network evaluated is the best one
        if progress.iteration >= args.num_epochs:
            print(f"{run_path}: raise --num-epochs to train on")

    def play_best():
        """Play against the best network and log the scores; best.pt keeps the new one if it wins half.

        The first network of a run, or of another komi, is kept in any case.
        """
        scores = evaluate(go, agent, best, args, 2, progress.iteration)
        for name, score in scores.items():
            writer.add_scalar(name, score, progress.step)
        progress.eval_steps += scores["eval/moves"]
        progress.last_score = scores["eval/win_rate_best"]
        if progress.best_score is None or progress.last_score >= 0.5:
            progress.best_score = progress.last_score
            best.load_state_dict(agent.state_dict())
            save(parts, "best.pt")
        save(whole, "checkpoint.pt")

    use_graphs = CUDA_GRAPHS and device.type == "cuda" and WORLD_SIZE == 1
    # On a GPU, one worker searches in fixed shapes, recorded or not
    search_go = Go(go.size, device, device.type == "cuda" and args.num_workers == 1)
    capacity = args.pool_size // WORLD_SIZE
    num_positions = ceil(args.generate_fraction * capacity / 8)  # new ones per epoch, of eight images each
    num_minibatches = ceil(args.train_fraction * args.pool_size / args.batch_size)
    epoch_length = num_positions + num_minibatches  # of the bar
    match_moves = min(40, args.eval_episodes) * 2 * go.num_points  # of a match, at most
    eval_interval = args.eval_interval or ceil(args.num_epochs / 10)
    saved_at = time.time()
    with tqdm(
        total=args.num_epochs * epoch_length,
        initial=progress.iteration * epoch_length,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # seconds
        disable=RANK > 0,
    ) as bar:
        while progress.iteration < args.num_epochs:
            start = time.time()
            cpu_start = time.process_time()
            epoch = progress.iteration
            progress.iteration += 1
            progress.last_score = None  # of the network that this epoch makes
            progress.win_rate = None
            seed_everything(args.seed, 1, progress.iteration, RANK)

            # Learning rate: it falls linearly to a hundredth. If you add parameter groups, set the rate of each
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - 0.99 * epoch / args.num_epochs
            optimizer.param_groups[0]["lr"] = learning_rate

            # Stage: another kind of games begins with new games and an empty pool
            stage = get_stage(epoch, go.num_actions, args)
            if stage.name != get_stage(epoch - 1, go.num_actions, args).name:
                games.start()

            # Collect: play until there are enough new records, which replace old ones in the pool. Random games
            # do not use the search
            search = Search(
                search_go,
                make_workers(search_go, agent, args),
                games.boards,
                stage.num_simulations,
                args,
                stage.scores,
                use_graphs,
            )
            images, num_moves = collect_images(games, go, search, num_positions, epoch, stage, args, bar)
            images = images._replace(loss=compute_losses(agent, images, stage))
            oldest = epoch - (args.max_age or args.num_epochs)
            games.pool = refill_pool(games.pool, images, capacity, oldest)
            collected = time.time()

            # Update: minibatches of the pool
            metrics = train_epoch(agent, optimizer, games.pool, num_minibatches, stage, args, bar, use_graphs)

            # Count the moves: the mean over processes times their number is the sum
            num_moves = round(average(torch.tensor(float(num_moves), device=device)).item() * WORLD_SIZE)
            progress.step += num_moves
            progress.cpu_seconds += time.process_time() - cpu_start

            # Log, in process 0 alone. The rest of the loop must not call `average`, since the other processes
            # do not get there
            if RANK > 0:
                continue
            if not metrics.isfinite().all():
                fail(f"{args.env_id}: losses are not finite at step {progress.step}")
            scalars = summarize(games.pool, metrics, epoch)
            scalars["charts/learning_rate"] = learning_rate
            scalars["charts/cpu_seconds"] = progress.cpu_seconds
            scalars["charts/moves"] = num_moves
            scalars["charts/SPS"] = num_moves / (time.time() - start)
            scalars["charts/collect_seconds"] = collected - start
            scalars["charts/train_seconds"] = time.time() - collected
            for name, value in scalars.items():
                writer.add_scalar(name, value, progress.step)
            bar.set_postfix_str(f"{stage.name}, loss {scalars['losses/loss']:.3f}", refresh=False)

            # Save, before a match that might fail
            is_last = progress.iteration >= args.num_epochs
            is_due = is_last or progress.iteration % eval_interval == 0
            if is_due or time.time() - saved_at > 600:
                writer.flush()
                save(whole, "checkpoint.pt")
                saved_at = time.time()

            # Evaluate. Without --eval-interval, matches take at most a fifth as many moves as self-play
            is_affordable = args.eval_interval or progress.eval_steps + match_moves <= progress.step / 5
            if is_due and is_affordable and args.eval_episodes and not is_last:
                play_best()

    # Evaluate the last network
    if RANK > 0:
        return
    if args.eval_episodes:
        # None: the last network is not evaluated yet, or there is no best.pt of this komi
        if None in (progress.best_score, progress.last_score):
            play_best()
        if progress.win_rate is None:
            scores = evaluate(go, agent, None, args, 4)
            progress.win_rate = scores["eval/win_rate"]
            for name in ("eval/win_rate", "eval/margin"):
                writer.add_scalar(name, scores[name], progress.step)
            save(whole, "checkpoint.pt")
    writer.close()
    score = "not evaluated"
    if progress.win_rate is not None:
        score = f"the last network wins {progress.win_rate:.0%} of its games against plain MCTS"
    print(f"{run_path}: {score}")


def main(argv=None):
    """Read the command line; flags override the settings of a checkpoint."""
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    path = args.evaluate or args.gtp or args.resume
    if path:
        checkpoint = load_checkpoint(path)
        args = tyro.cli(Args, args=argv, default=checkpoint["args"])
    counts = "num_games channels simulations_start simulations_end num_epochs pool_size batch_size".split()
    shares = """score_weight epsilon_start epsilon_end random_fraction generate_fraction value_coef
        q_weight_start q_weight_end draw_moves resign_below""".split()
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if name == "komi":
            least = -np.inf  # any number, but not NaN
        flag = f"--{name.replace('_', '-')} ({value})"
        if type(value) in (int, float) and not value >= least:  # also if it is NaN
            fail(f"{flag} must be at least {least}")
        if name in shares and value > 1:
            fail(f"{flag} must be at most 1")
        if name in "dirichlet_alpha generate_fraction train_fraction".split() and value == 0:
            fail(f"{flag} must be greater than 0")
    if not re.fullmatch(r"Go-([2-9]|1\d)x\1", args.env_id):
        fail(f"--env-id {args.env_id}: must be Go-2x2 to Go-19x19")
    if args.gtp and not find_spec("envs_shared.go_gtp"):
        fail("--gtp needs envs_shared/go_gtp.py beside envs_shared/go.py")
    if args.evaluate and not args.eval_episodes:
        fail("--evaluate needs --eval-episodes")
    if args.num_games % WORLD_SIZE or args.batch_size % WORLD_SIZE:
        fail(f"--num-games and --batch-size must be divisible by the number of processes ({WORLD_SIZE})")
    if args.pool_size < 8 * args.batch_size:
        # Only one image of each position may be in a minibatch
        fail(f"--pool-size ({args.pool_size}) must be at least eight times --batch-size ({args.batch_size})")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    run_path = Path(path).parent if path else Path(args.run_dir, re.sub("[:/]", "-", run_name))
    try:
        train(args, run_path, checkpoint)
    except KeyboardInterrupt:
        if RANK == 0 and not (args.evaluate or args.gtp) and (run_path / "checkpoint.pt").exists():
            print(
                f"{run_path}: interrupted; to resume: python {sys.argv[0]} --resume {run_path}/checkpoint.pt",
                file=sys.stderr,
            )
        sys.exit(130)


if __name__ == "__main__":
    main()
    if RANK > 0:
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
