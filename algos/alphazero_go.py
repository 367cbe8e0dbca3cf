"""AlphaZero for Go and other board games, in one file: a network learns from its own tree search.

Papers: Silver et al. 2017, "Mastering the game of Go without human knowledge" (Nature 550), and Silver et al.
2018, "A general reinforcement learning algorithm that masters chess, shogi, and Go through self-play"
(Science 362).

    python alphazero_go.py                                # learns 5x5 in minutes on one CPU core
    torchrun --nproc-per-node 2 alphazero_go.py           # two GPUs, or with --no-cuda two CPU processes
    python alphazero_go.py --gtp runs/NAME/best.pt        # plays in Sabaki or GoGui

How it learns. A search grows a tree of moves from the position on the board. Each simulation walks down the
tree by eq. 1 to a new position s', and the network evaluates s'; then eq. 2 updates each edge of the walk, in
which v is V(s'), or the result if the game is over. The moves that were visited most are the best ones. An
epoch plays games against itself by such searches, puts their positions into a pool of records, and trains the
network to predict what the searches found (eq. 4) and how the games ended (eq. 5). The first epochs are a
pretraining: first V learns from random games. The policy has learned nothing then, so the next epochs search
by classic UCB, which does not weight moves by the prior; their visits are the policy's first targets.

Values are from 0 to 1, for the side to move; v for one side is 1 - v for the other. Equations of this file:
    (1) score(s, a) = Q(s, a) + c P(a | s) sqrt(N(s)) / (N(s, a) + 1), where N(s) = 1 + sum_a N(s, a), and the
        prior P(a | s) is the network's policy p(a | s)
    (2) N(s, a) += 1, Q(s, a) += (v - Q(s, a)) / N(s, a), starting with Q(s, a) = V(s)
    (3) pi(a) = N(root, a) / sum_b N(root, b). In self-play, the root's prior is p(a | s) + eta d(a) with
        noise d ~ Dirichlet(alpha), so that each move has a chance to be tried; its sum is 1 + eta
    (4) L_policy = sum_a pi(a) (log pi(a) - log p(a | s)). It has the gradient of the cross entropy, and is 0
        where p = pi, so that losses of records can be ranked
    (5) L_value = (V(s) - (beta Q(root) + (1 - beta) z))^2, where the result z is 1 if the game was won and 0
        if it was lost, mixed with its score by --score-weight
    (6) L = g L_value / 0.25 + (1 - g) L_policy / log A. A network that knows nothing, with V = 1/2 and
        uniform p, has at most L_value = 0.25 and L_policy = log A: the weight g compares losses of one scale

The main differences to the papers: records are chosen and dropped by their losses; V learns a mixture of
Q(root), who won and by how much; Q(s, a) begins at V(s); the first epochs are pretraining; each move begins a
new tree (theirs keep the subtree of the move); the noise is added (theirs: (1 - eta) p + eta d); c is
constant; and the network sees one position, its legal moves and the last move, not eight positions.

Shapes: G parallel games, R some of them, M nodes of a tree, A moves, K symmetries, T moves of the longest
game, B rows of a batch, such as positions or records; G and B are those of one process.

The file has two parts. The algorithm comes first, with its loop in `train`. The part `Run` at the end is
about the run folder, the log, checkpoints, processes and the command line. `go` are the rules of a game, of
envs_shared/go.py or another file in its place: its docstring says what this script asks of a game.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.4", "numpy", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import math
import operator
import os
import random
import re
import shlex
import sys
import time
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# envs_shared is in the folder of this file or in its parent
sys.path += map(str, Path(__file__).resolve().parents[:2])
from envs_shared.go import make_game

RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# On one GPU, a simulation and a minibatch are recorded as CUDA graphs, which saves CPU overhead. Set this to
# False for edits that a graph cannot record, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
# Independent streams of random numbers, as in seed_everything(args.seed, WEIGHTS). FINAL_EVALUATION is that
# of --evaluate, and PLAIN_EVALUATION that of the match against plain MCTS at the end of a run
WEIGHTS, TRAINING, EVALUATION, FINAL_EVALUATION, PLAIN_EVALUATION = range(5)
# For the part `Run`: if one of these settings changes with --resume, the score of best.pt no longer counts.
# The seed is one of them, as it chooses the openings of matches
TASK_SETTINGS = ("env_id", "komi", "seed", "eval_episodes")
# Named in the message about a checkpoint whose network or games do not fit
NETWORK_FLAGS = "--env-id, --blocks, --channels, --num-games"

# Defined in the part `Run` at the end, but used before it:
#   total(x)            sums a tensor over all processes; with one process it changes nothing
#   sum_gradients       sums the gradients of a network over all processes
#   seed_everything     seeds all random generators from a few integers
#   Recorded(f, ...)    a function that calls f; on one GPU, it records f as a CUDA graph and replays that
#   fail(message)       prints one line and exits with code 2
#   run.load(name=part) lets checkpoints hold the state of a part, and restores it if the run is resumed
#   run.iteration       counts epochs; the run ends when it reaches the length that run.open was given
#   run.step            counts the moves of self-play
#   run.should_evaluate tells whether it is time to evaluate
#   run.keep            logs the scores of an evaluation, and writes best.pt unless an older one is better
#   run.log             logs numbers by name


@dataclass
class Args:
    """AlphaZero on Go boards of 2x2 to 19x19."""

    # The run
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
    eval_interval: int = 0  # epochs between matches and checkpoints (0: ten a run, or fewer if they are slow)
    eval_episodes: int = 100  # games against plain MCTS at the end; other matches have at most 40 (0: none)
    gtp: str | None = None  # checkpoint.pt or best.pt to play with by the Go Text Protocol
    resign_below: float = 0.0  # with --gtp, resign if the value is lower

    # The game and the network
    env_id: str = "Go-5x5"  # board, Go-2x2 to Go-19x19: area scoring, no suicide, positional superko
    komi: float = 0.5  # points for white
    score_weight: float = 0.5  # weight of the score, from 0 to 1, in the result z; the rest is who won
    blocks: int = 3  # residual blocks of the network
    channels: int = 32  # channels of the network
    bf16: bool = False  # run the network in bfloat16

    # The search
    simulations_start: int = 32  # simulations per move at the start of the schedule, see get_stage
    simulations_end: int = 48  # simulations per move in the last epoch, against plain MCTS and with --gtp
    num_workers: Literal[1, 2] = 1  # threads that evaluate leaves; 2 is faster on two cores, not on a GPU
    pseudo_limit: float = 0.1  # with two workers: limit k of pseudo-visits, see select_free
    max_depth: int = 16  # longest path of a simulation; on a GPU, each level costs time even if unused
    c_puct: float = 0.5  # exploration c, eq. 1 and classic UCB
    first_q: Literal["value", "zero"] = "value"  # Q(s, a) before the first visit: V(s), eq. 2, or 0
    noise_weight: float = 0.25  # weight eta of the noise, eq. 3
    dirichlet_alpha: float = 0.4  # concentration of the noise, eq. 3; about 10 / A

    # Self-play
    num_games: int = 64  # parallel games of self-play in total; each process has its share G
    epsilon_start: float = 0.0  # share of random moves in the first epoch
    epsilon_end: float = 0.0  # share of random moves in the last epoch
    draw_moves: float = 0.33  # a game's first draw_moves * points moves are drawn from pi, later ones best
    num_epochs: int = 26  # epochs, including pretraining
    pretrain_value_epochs: int = 2  # first epochs, which learn V from random games and no policy
    pretrain_search_epochs: int = 2  # epochs after those, which search by classic UCB

    # The pool and training
    pool_size: int = 100_000  # records in the pool, in total across processes; K per position
    generate_fraction: float = 0.05  # new records per epoch, at least, as a share of the pool
    train_fraction: float = 0.15  # records trained on per epoch, as a share of the pool
    random_fraction: float = 0.75  # share of a minibatch drawn at random; the rest has the largest loss
    max_age: int = 30  # records older than so many epochs leave a full pool before all others (0: none do)
    batch_size: int = 128  # records of a minibatch in total; each process has its share B
    learning_rate: float = 4e-3  # AdamW learning rate
    anneal_lr: bool = True  # lower the learning rate linearly, to a hundredth in the last epoch
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
    """Residual tower with a policy head and a value head (Silver et al. 2017, methods).

    `go` gives the shape of the board and the number of moves A.
    """

    def __init__(self, go, args):
        super().__init__()
        width = args.channels
        self.bf16 = args.bf16
        # The tower: two convolutions a block, whose output is added to its input
        self.stem = nn.Sequential(*conv_norm(go.num_planes, width, 3), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList()
        for _ in range(args.blocks):
            layers = *conv_norm(width, width, 3), nn.ReLU(inplace=True), *conv_norm(width, width, 3)
            self.blocks.append(nn.Sequential(*layers))
        # Four planes for each head
        self.head_conv = nn.Sequential(*conv_norm(width, 8, 1), nn.ReLU(inplace=True))
        num_inputs = 4 * go.num_points
        self.policy_head = nn.Linear(num_inputs, go.num_actions)
        self.value_head = nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, planes):
        """Return logits [B, A] and values [B] from 0 to 1 of planes [B, planes, rows, columns]."""
        with torch.autocast(planes.device.type, torch.bfloat16, enabled=self.bf16):
            # This memory format saves 5 % of a search on a CPU
            x = planes.to(torch.float32, memory_format=torch.channels_last)
            x = self.stem(x)  # [B, channels, rows, columns]
            for block in self.blocks:
                x = block(x).add_(x).relu_()
            policy, value = self.head_conv(x).split(4, 1)  # [B, 4, rows, columns] each
            logits = self.policy_head(policy.flatten(1))
            value = self.value_head(value.flatten(1)).squeeze(1)
        return logits.float(), value.float().sigmoid()


# ---- Storage -----------------------------------------------------------------------------------------------
# B positions as the side to move saw them, with training targets:
#     planes    bool [B, planes, rows, columns]
#     legal     legal moves, bool [B, A]
#     policy    pi of eq. 3, float16 [B, A]
#     q, z      Q(root) and the result of eq. 5, [B] each
Positions = namedtuple("Positions", "planes legal policy q z")
# The pool holds the K symmetric forms of each position (turned, mirrored) as records of their own. They add:
#     loss    eq. 6, as last computed [B], perhaps by an older network. The largest ones are trained on in
#             any case, and the smallest ones are dropped first, so that training is spent on what the network
#             does not predict yet. If you leave a term of the loss out for some records, their loss is
#             smaller: they are then trained on less, and dropped sooner
#     epoch   when the record was made [B]
#     turn    from 0 to K - 1 [B]: minibatch i draws from the records whose turn is i modulo K. The K forms of
#             a position have different turns, so that a minibatch never has two forms of one position
#             (except in a tiny pool)
Records = namedtuple("Records", [*Positions._fields, "loss", "epoch", "turn"])


def pick(records, rows):
    """Return some rows of Positions or Records, or of another named tuple of tensors."""
    return type(records)(*(x[rows] for x in records))


def concatenate(parts):
    """Join Positions or Records that were made one after the other."""
    return type(parts[0])(*map(torch.cat, zip(*parts)))


def refill_pool(pool, new, capacity, oldest):
    """Add records; beyond the capacity, drop those of epochs before `oldest`, then those of least loss."""
    if pool:
        new = concatenate((pool, new))
    rank = new.loss.masked_fill(new.epoch < oldest, -torch.inf)
    return pick(new, rank.topk(min(capacity, len(rank))).indices)


def sample_pool(pool, turn, batch_size, random_fraction):
    """Choose rows [B] of records with this turn: those of the largest losses, then random ones.

    If fewer than B records have this turn, the batch is smaller.
    """
    rows = (pool.turn == turn).nonzero().squeeze(1)
    if not len(rows):  # in a tiny pool: take any records
        rows = torch.arange(len(pool.turn), device=pool.turn.device)
    # For example, with random_fraction 0.75 and B = 128: 32 records of largest loss and 96 random ones
    num_ranked = min(len(rows), batch_size - round(random_fraction * batch_size))
    ranked = pool.loss[rows].topk(num_ranked).indices
    # Sort by keys: 2 for the largest losses, random ones in [0, 1) for the others
    keys = torch.rand(len(rows), device=rows.device).scatter(0, ranked, 2.0)
    return rows[keys.topk(min(len(rows), batch_size)).indices]


class SelfPlay:
    """G games, the pool of records, and what will become records when the games end: `steps` [G, T, ...].

    The pool is None until the first epoch after `start` has collected records.
    """

    def __init__(self, go, num_games):
        self.go = go
        self.num_games = num_games
        shape = num_games, go.max_moves
        with go.device:
            self.steps = {
                "planes": torch.zeros(*shape, go.num_planes, *go.shape, dtype=torch.bool),
                "legal": torch.zeros(*shape, go.num_actions, dtype=torch.bool),
                "policy": torch.zeros(*shape, go.num_actions, dtype=torch.float16),
                "q": torch.zeros(shape),
                "to_play": torch.zeros(shape, dtype=torch.int8),
            }
        self.start()

    def start(self):
        """Begin new games and an empty pool."""
        self.boards = self.go.new(self.num_games)
        self.pool = None

    def state_dict(self):
        """Return all tensors by name."""
        pool = self.pool._asdict() if self.pool else None
        return {"steps": self.steps, "boards": self.boards._asdict(), "pool": pool}

    def load_state_dict(self, state):
        """Restore what `state_dict` returned; raises RuntimeError if the sizes differ."""
        for name, x in self.steps.items():
            # view_as refuses another number of elements, where copy_ alone would broadcast
            x.copy_(state["steps"][name].view_as(x))
        boards = {name: x.to(self.go.device) for name, x in state["boards"].items()}
        self.boards = self.boards._replace(**boards)
        if state["pool"]:
            self.pool = Records(*(x.to(self.go.device) for x in state["pool"].values()))


# ---- AlphaZero: the search ---------------------------------------------------------------------------------
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
    """Compute z of black [B] from its points minus those of white [B]; 1/2 is a draw."""
    # A mixture of who won, which is 0, 1/2 or 1, and the share of the board
    margin = score - args.komi
    share = (0.5 + margin / (2 * num_points)).clamp(0, 1)
    return (1 - args.score_weight) * (margin.sign() + 1) / 2 + args.score_weight * share


ILLEGAL = -1e9  # Q and logit of illegal moves, in place of minus infinity


class Search:
    """Trees of G games with M nodes each. Node 0 is the root, and a simulation adds at most one node.

    All values are for the side to move at their node. `evaluator` is a function from boards [R] and their
    legal moves [R, A] to logits [R, A] and values [R]. No game may be over at its root.

    For example, in a tree of nodes 0 to 4, move a leads from the root to node 3, and a simulation finds that
    b is the best move there, which was never played before:
        select     returns the path, its edges (0, a) and (3, b)
        expand     plays b on the board of node 3; this is node 5, and child[3, b] becomes 5
        evaluate   gets V(5) and the prior of node 5 from the network
        backup     moves Q(3, b) and Q(0, a) towards V(5), or towards 1 - V(5) where the other side is to move

    A CUDA graph cannot compute on a number of rows that depends on data. So with `go.fixed_shapes`, each
    simulation computes one board in every game. If its path ends at a node that exists, that board is not
    needed. It is still written, to the first free node, number num_nodes. This does no harm: no edge leads to
    that node, num_nodes does not grow, and the next new node is written over it.
    """

    def __init__(self, go, evaluator, boards, num_simulations, args, scores=puct_scores):
        self.go = go
        self.evaluator = evaluator
        self.args = args
        self.scores = scores
        shape = len(boards.to_play), num_simulations + 1
        with go.device:
            # Of each edge: N(s, a), Q(s, a), P(a | s), and the child where it leads, 0 if there is none yet
            self.edges = torch.zeros(3, *shape, go.num_actions)  # [3, G, M, A]
            self.N, self.Q, self.P = self.edges
            self.child = torch.zeros(self.N.shape, dtype=torch.int64)  # [G, M, A]
            # Of each node: V(s) or the result; whether paths lead on from it; its boards
            self.value = torch.zeros(shape)  # [G, M]
            self.is_open = torch.zeros(shape, dtype=torch.bool)  # [G, M]
            self.boards = type(boards)(*(torch.zeros(*shape, *x.shape[1:], dtype=x.dtype) for x in boards))
            # Of each game
            self.games = torch.arange(shape[0])  # [G]
            self.num_nodes = torch.zeros_like(self.games)  # [G]
        self.start(boards)
        if go.fixed_shapes:
            # This attribute replaces the method. If the recording held the search, each would hold the other,
            # and the trees would stay in the GPU's memory after their use: so it holds a weak reference
            self.simulate = Recorded(partial(Search.simulate, weakref.proxy(self)), go.device)

    def start(self, boards):
        """Begin new trees, in the same memory, with boards [G] at the roots."""
        # Other tensors are written at a node before they are read there
        self.N.zero_()
        self.child.zero_()
        self.is_open.zero_()
        self.num_nodes.fill_(1)
        self.num_left = self.N.shape[1] - 1  # simulations for which the trees have room
        root = torch.zeros_like(self.games)
        self.evaluate(*self.add(self.games, root, boards))
        self.is_open[:, 0] = False  # a child of number 0 is none, and ends a path

    def run(self, num_simulations):
        """Run simulations in all games."""
        self.num_left -= num_simulations
        if self.num_left < 0:
            raise ValueError("more simulations than the trees have room for")
        if self.args.num_workers == 2:
            run_two_workers(self, num_simulations)
            return
        for _ in range(num_simulations):
            self.simulate()

    def simulate(self):
        """Run one simulation in all games."""
        path = self.select(self.games)
        leaf, new = self.expand(self.games, path)
        self.evaluate(*new)
        self.backup(self.games, path, leaf)

    def select(self, games, pseudo=None):
        """Walk down from the roots of games [R] by eq. 1.

        Returns paths [2, depth, R] of edges: path[0] are the nodes where they start, path[1] their moves. A
        path ends with an edge that leads to no child yet or to the end of the game, or after --max-depth
        edges. A path that has ended repeats its last edge until all have, so path[:, -1] are the last edges.

        `pseudo` [G, M, A] are the pseudo-visits of --num-workers 2.
        """
        nodes = []
        moves = []
        node = torch.zeros_like(games)  # the roots
        for _ in range(self.args.max_depth):
            visits, q, prior = self.edges[:, games, node]  # [R, A] each
            parent_visits = 1 + visits.sum(1, keepdim=True)
            if pseudo is not None:
                visits = visits + pseudo[games, node]
            move = self.scores(q, visits, prior, parent_visits, self.args.c_puct).argmax(1)
            nodes.append(node)
            moves.append(move)
            # Paths that lead on go to the child; the others stay where they are
            child = self.child[games, node, move]
            leads_on = self.is_open[games, child]
            if not self.go.fixed_shapes and not leads_on.any():
                break
            node = torch.where(leads_on, child, node)
        return torch.stack((torch.stack(nodes), torch.stack(moves)))

    def expand(self, games, path):
        """Add the children to which the last edges of paths [2, depth, R] lead, unless they exist.

        A child exists if it is the end of a game, or if the path was cut off after --max-depth edges: its
        value is then backed up once more. Returns the leaf of each path [R], and what `add` returns: the new
        leaves that an evaluator must see, which may be fewer.
        """
        parent, move = path[:, -1]
        child = self.child[games, parent, move]
        is_new = child == 0
        free = self.num_nodes[games]
        leaf = torch.where(is_new, free, child)
        self.child[games, parent, move] = leaf
        self.num_nodes[games] += is_new
        rows = self.find(is_new)
        boards = self.go.play(self.boards.pick((games[rows], parent[rows])), move[rows])
        return leaf, self.add(games[rows], free[rows], boards)

    def add(self, games, nodes, boards):
        """Store boards [R] as nodes [R] of games [R]; the value of a game's end is its result.

        Returns games, nodes and boards of those that are not over, which an evaluator must see. With fixed
        shapes, both are done for all of them, and `store` replaces the values of those that are not over.
        """
        self.boards.put((games, nodes), boards)
        is_over = boards.is_over
        if self.go.fixed_shapes or is_over.any():
            rows = self.find(is_over)
            z = compute_result(self.go.score(boards.pick(rows)), self.args, self.go.num_points)
            self.value[games[rows], nodes[rows]] = torch.where(boards.to_play[rows] == 1, z, 1 - z)
        rows = self.find(~is_over)
        return games[rows], nodes[rows], boards.pick(rows)

    def find(self, mask):
        """Return the rows where a mask [R] is true; with fixed shapes all rows."""
        return slice(None) if self.go.fixed_shapes else mask.nonzero().squeeze(1)

    def evaluate(self, games, nodes, boards):
        """Let the evaluator give new nodes [R] with boards [R] their values and priors."""
        if len(games):
            legal = self.go.legal_moves(boards)
            self.store(games, nodes, boards, legal, *self.evaluator(boards, legal))

    def store(self, games, nodes, boards, legal, logits, values):
        """Store what the evaluator found for nodes [R], from which paths may now lead on."""
        # With fixed shapes, some games are over: their value stays the result
        is_over = boards.is_over
        self.is_open[games, nodes] = ~is_over
        self.value[games, nodes] = torch.where(is_over, self.value[games, nodes], values)
        first_q = values.unsqueeze(1)
        if self.args.first_q == "zero":
            first_q = torch.zeros_like(first_q)
        self.Q[games, nodes] = torch.where(legal, first_q, ILLEGAL)
        # A large number in place of infinity, so that a row without a legal move is not NaN
        self.P[games, nodes] = logits.masked_fill(~legal, ILLEGAL).softmax(1)

    def backup(self, games, path, leaf):
        """Update the edges of paths [2, depth, R] with the values of their leaves [R], eq. 2."""
        node, move = path
        value = self.value[games, leaf]
        # A value of the other side is 1 minus that of this one
        is_same_side = self.boards.to_play[games, node] == self.boards.to_play[games, leaf]
        v = torch.where(is_same_side, value, 1 - value)  # [depth, R]
        # An edge that a path repeats reads the same numbers each time, and writes the same
        edge = games.expand_as(node), node, move
        self.N[edge] += 1
        self.Q[edge] += (v - self.Q[edge]) / self.N[edge]

    def add_noise(self):
        """Add noise to the prior of the roots, eq. 3."""
        noise = dirichlet_noise(self.P[:, 0], self.args.dirichlet_alpha)
        self.P[:, 0] += self.args.noise_weight * noise

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
        # Half of (Q + P / 50) is below 1, so that it only decides between equal N
        return (self.N[:, 0] + 0.5 * q + 0.01 * self.P[:, 0]).argmax(1)


# ---- AlphaZero: the search by two workers ------------------------------------------------------------------
# Everything up to the next ruler belongs to --num-workers 2 alone. Two workers take turns on the same trees:
# while the leaves of one are evaluated, the other one selects. Until then, the value of a leaf is NaN
MAX_DESCENTS = 8  # attempts of a worker to find a leaf that the other one does not have


def select_free(search, games, pseudo):
    """Select paths in games [R] that do not end at a leaf which the other worker evaluates.

    A path that ends at such a leaf has collided. Each of its edges gets a pseudo-visit, which counts in
    N(s, a) of eq. 1 but neither in N(s) nor in Q. It makes these moves less attractive, and the next descent
    may find another leaf. (Virtual loss would mark each path in flight; this marks collided ones alone, so
    that a search without collisions is not changed.) At most k N(root) collided paths of a tree are marked at
    a time. Each has one edge at the root, so the sum of the pseudo-visits there is their number.

    Returns the games in which a path has not collided, these paths, and a list of the marked edges.
    """
    found = []
    pseudo_edges = []
    for _ in range(MAX_DESCENTS):
        path = search.select(games, pseudo)
        leaf = search.child[(games, *path[:, -1])]
        has_collided = (leaf > 0) & search.value[games, leaf].isnan()
        found.append((games[~has_collided], path[..., ~has_collided]))

        # Games whose path collided try again if one more pseudo-visit is within their limit
        num_pseudo = 1 + pseudo[games, 0].sum(1)
        num_visits = 1 + search.N[games, 0].sum(1)
        rows = has_collided & (num_pseudo <= search.args.pseudo_limit * num_visits)
        games = games[rows]
        if not len(games):
            break
        edge = games, *path[..., rows]
        pseudo[edge] += 1
        pseudo_edges.append(edge)

    # Paths of several descents become one tensor: shorter ones repeat their last edge
    games, paths = zip(*found)
    depth = max(path.shape[1] for path in paths)
    paths = [torch.cat((x, x[:, -1:].expand(-1, depth - x.shape[1], -1)), 1) for x in paths]
    return torch.cat(games), torch.cat(paths, 2), pseudo_edges


def work(search, left, pseudo):
    """Find leaves, evaluate them, and back them up, again and again.

    A worker evaluates in a thread of its own and, on a GPU, in a stream of its own. `left` [G] counts the
    simulations that both workers still have to begin. This is a generator: it yields while its thread
    evaluates, and run_two_workers then resumes the other worker.
    """
    thread = ThreadPoolExecutor(1)
    num_threads = torch.get_num_threads()
    device = search.go.device
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def evaluate(boards, legal):
        torch.set_num_threads(num_threads)  # which each thread of Python has for itself
        with torch.cuda.stream(stream):
            return search.evaluator(boards, legal)

    while left.any():
        # Select and expand. A game in which all descents collided gets no leaf
        games, path, pseudo_edges = select_free(search, left.nonzero().squeeze(1), pseudo)
        left[games] -= 1
        leaf, (new_games, nodes, boards) = search.expand(games, path)
        search.value[new_games, nodes] = torch.nan
        # Leaves whose value is known, such as ends of games, are backed up before the other worker descends.
        # All others are those of new_games
        is_known = ~search.value[games, leaf].isnan()
        search.backup(games[is_known], path[..., is_known], leaf[is_known])

        # Evaluate; meanwhile it is the other worker's turn
        job = None
        if len(new_games):
            legal = search.go.legal_moves(boards)
            if stream:
                stream.wait_stream(torch.cuda.current_stream())
            job = thread.submit(evaluate, boards, legal)
        yield

        # Back up, and remove the pseudo-visits
        if job:
            output = job.result()
            if stream:
                torch.cuda.current_stream().wait_stream(stream)
            search.store(new_games, nodes, boards, legal, *output)
            search.backup(games[~is_known], path[..., ~is_known], leaf[~is_known])
        for edge in pseudo_edges:
            pseudo[edge] -= 1
    thread.shutdown()


def run_two_workers(search, num_simulations):
    """Run simulations in all games; while one worker evaluates its leaves, the other one finds new leaves."""
    pseudo = torch.zeros_like(search.N)
    left = torch.full_like(search.games, num_simulations)
    for _ in zip_longest(work(search, left, pseudo), work(search, left, pseudo)):
        pass  # they take turns, from one `yield` to the next


# ---- AlphaZero: self-play and training ---------------------------------------------------------------------
# Settings that change from epoch to epoch:
#     name               what the progress bar shows
#     start              first epoch of these settings, which begins with new games and an empty pool
#     scores             how a search of self-play chooses: puct_scores (eq. 1) or ucb_scores; None for random
#                        games. Matches and --gtp use eq. 1 in all epochs
#     num_simulations    of each move
#     value_coef         g of eq. 6
#     epsilon            share of random moves
#     q_weight           beta of eq. 5
#     learning_rate      of AdamW
Stage = namedtuple("Stage", "name start scores num_simulations value_coef epsilon q_weight learning_rate")
RANDOM_GAMES = "random games"  # name of the first stage, which learns no policy


def get_stage(epoch, max_legal, args):
    """Return the settings of an epoch: of random games, of pretraining by classic UCB, or of self-play."""
    t = epoch / max(1, args.num_epochs - 1)  # from 0 to 1

    def schedule(start, end):
        return (1 - t) * start + t * end

    num_simulations = round(schedule(args.simulations_start, args.simulations_end))
    # Classic UCB tries each move once before it compares any; a quarter more is left to compare them
    num_ucb_simulations = max(num_simulations, 5 * max_legal // 4)
    search_start = args.pretrain_value_epochs
    self_play_start = search_start + args.pretrain_search_epochs
    stages = (
        # name, start, scores, num_simulations, value_coef
        (RANDOM_GAMES, 0, None, num_simulations, 1.0),
        ("search pretraining", search_start, ucb_scores, num_ucb_simulations, args.value_coef),
        ("self-play", self_play_start, puct_scores, num_simulations, args.value_coef),
    )
    begun = [stage for stage in stages if stage[1] <= epoch]
    return Stage(
        *begun[-1],
        epsilon=schedule(args.epsilon_start, args.epsilon_end),
        q_weight=schedule(args.q_weight_start, args.q_weight_end),
        learning_rate=schedule(args.learning_rate, args.learning_rate * (0.01 if args.anneal_lr else 1)),
    )


def make_self_play_search(agent, boards, stage, args):
    """Make the search of an epoch, by the network as it is now, in trees for games with boards [G]."""
    device = boards.to_play.device
    # On a GPU, one worker searches in fixed shapes, so that a CUDA graph can record a simulation
    go = make_game(args.env_id, device, fixed_shapes=device.type == "cuda" and args.num_workers == 1)
    return Search(go, make_evaluator(go, agent), boards, stage.num_simulations, args, stage.scores)


def choose_moves(boards, legal, go, search, stage, args):
    """Choose the moves of self-play on boards [G].

    Returns the policy to be learned [G, A], Q(root) [G] and the moves [G].
    """
    if stage.scores is None:
        # Random games, in which nothing is searched. The rules draw the moves: uniform ones would fill their
        # own eyes, and most games would last max_moves. No policy is learned, and Q is unknown: the result
        # takes its place
        policy = legal / legal.sum(1, keepdim=True)
        return policy, torch.full_like(policy[:, 0], torch.nan), go.random_moves(boards, legal)

    # Search
    search.start(boards)
    search.add_noise()
    search.run(stage.num_simulations)
    policy = search.policy()  # what the network learns

    # The first moves of a game are drawn, the later ones are the best
    draw_policy = policy  # what moves are drawn from; a temperature belongs here: it changes no target
    is_early = boards.num_moves < args.draw_moves * go.num_points
    drawn = torch.multinomial(draw_policy, 1).squeeze(1)
    moves = torch.where(is_early, drawn, search.best_moves())
    # A share epsilon of the moves is uniformly random
    is_random = torch.rand(len(moves), device=go.device) < stage.epsilon
    moves = torch.where(is_random, torch.multinomial(legal.float(), 1).squeeze(1), moves)
    return policy, search.root_values(), moves


def play_moves(self_play, go, search, stage, args):
    """Play a move in each game.

    Returns the games [R] that end with it, and the Positions of all moves of these games.
    """
    boards = self_play.boards
    legal = go.legal_moves(boards)
    policy, q, moves = choose_moves(boards, legal, go, search, stage, args)

    # Write the position at index num_moves of its game, then play
    step = {
        "planes": go.planes(boards, legal),
        "legal": legal,
        "policy": policy.half(),
        "q": q,
        "to_play": boards.to_play,
    }
    for name, x in step.items():
        self_play.steps[name][torch.arange(len(q), device=go.device), boards.num_moves] = x
    boards = go.play(boards, moves)

    # Which games have ended, and the results [G] of black. To end games early, as by resignation, set their
    # entries of the variable is_over, before `ended` is computed, and write their results into z. If you
    # forget z, it is NaN, which ends the run, so that nothing is trained on the score of an unfinished game
    is_over = boards.is_over
    z = compute_result(go.score(boards), args, go.num_points).masked_fill(~boards.is_over, torch.nan)
    if (~is_over & (boards.num_moves >= go.max_moves)).any():
        fail(f"{args.env_id}: a game takes more than its max_moves ({go.max_moves})")

    # New games take the place of those that have ended
    ended = is_over.nonzero().squeeze(1)
    num_moves = boards.num_moves[ended]
    boards.put(ended, go.new(len(ended)))
    self_play.boards = boards

    # The positions of all their moves, with z as seen by the side that moved
    is_move = torch.arange(go.max_moves, device=go.device) < num_moves.unsqueeze(1)  # [R, T]
    steps = {name: x[ended][is_move] for name, x in self_play.steps.items()}
    z = z[ended].unsqueeze(1).expand_as(is_move)[is_move]
    z = torch.where(steps.pop("to_play") == 1, z, 1 - z)
    steps["q"] = torch.where(steps["q"].isnan(), z, steps["q"])
    return ended, Positions(**steps, z=z)


def make_symmetries(positions, go):
    """Return the K symmetric forms of positions [B]: form k of position b is row k B + b.

    A field with a value for each point or move needs a line here.
    """
    forms = []
    for points, moves in zip(go.point_images, go.move_images):
        planes = positions.planes.flatten(2)[..., points].view_as(positions.planes)
        form = positions._replace(
            planes=planes, legal=positions.legal[:, moves], policy=positions.policy[:, moves]
        )
        forms.append(form)
    return concatenate(forms)


def make_records(positions, agent, go, stage, epoch):
    """Make the K records of each of positions [B], with their losses."""
    forms = make_symmetries(positions, go)
    row = torch.arange(len(forms.z), device=go.device)
    num_positions = len(positions.z)
    # The number of the position plus that of the form
    turn = (row % num_positions + row // num_positions) % len(go.move_images)
    loss = compute_losses(agent, forms, stage)
    return Records(*forms, loss=loss, epoch=torch.full_like(turn, epoch), turn=turn)


def collect_positions(self_play, go, search, num_positions, stage, args, bar):
    """Play until finished games have at least so many positions; returns them, and the number of all moves.

    This moves the bar by half an epoch.
    """
    parts = []
    num_found = 0
    # New games begin together, and short ones end first: stopping with these would fill the pool with short
    # games. So if there is no pool yet, wait for the end of each game that has begun
    is_awaited = torch.full_like(self_play.boards.is_over, self_play.pool is None)
    while num_found < num_positions or is_awaited.any():
        ended, positions = play_moves(self_play, go, search, stage, args)
        is_awaited[ended] = False
        parts.append(positions)
        bar.update(0.5 * min(len(positions.z), max(0, num_positions - num_found)) / num_positions)
        num_found += len(positions.z)
    num_moves = len(parts) * len(is_awaited)  # each call of play_moves made one in each game
    return concatenate(parts), num_moves


def alphazero_loss(agent, records, stage):
    """Compute eq. 6, 4 and 5 for each record, [B] each."""
    logits, values = agent(records.planes)
    # Illegal moves have probability zero; their logarithms become 0, as 0 times infinity would be NaN
    illegal = ~records.legal
    log_probs = logits.masked_fill(illegal, -torch.inf).log_softmax(1).masked_fill(illegal, 0)
    policy = records.policy.float()
    policy_loss = (torch.xlogy(policy, policy) - policy * log_probs).sum(1)  # eq. 4
    target = stage.q_weight * records.q + (1 - stage.q_weight) * records.z
    value_loss = (values - target).square()  # eq. 5
    g = stage.value_coef
    loss = g * value_loss / 0.25 + (1 - g) * policy_loss / math.log(policy.shape[1])  # eq. 6
    return {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss}


@torch.no_grad()
def compute_losses(agent, records, stage):
    """Compute eq. 6 for records [B], in parts that fit into a CPU's cache. Leaves the agent in eval mode."""
    agent.eval()
    losses = []
    for part in zip(*(x.split(512) for x in records)):
        losses.append(alphazero_loss(agent, type(records)(*part), stage)["loss"])
    return torch.cat(losses)


def update_network(agent, optimizer, records, num_records, stage):
    """Take one gradient step on a minibatch of `num_records` in all processes; returns means of it to log."""
    losses = alphazero_loss(agent, records, stage)
    metrics = {name: x.sum() / num_records for name, x in losses.items()}
    optimizer.zero_grad()
    metrics["loss"].backward()
    sum_gradients(agent)
    metrics = {name: total(x.detach()) for name, x in metrics.items()}
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    return metrics


def train_minibatch(agent, optimizer, pool, stage, rows):
    """Train on rows [B] of the pool; returns means of the minibatch to log.

    The losses of these records in the pool become those after the step.
    """
    records = pick(pool, rows)
    num_records = total(torch.full((), float(len(rows)), device=rows.device))
    # If you freeze layers: train() makes their batch norms update again, so call eval() on those after it
    metrics = update_network(agent.train(), optimizer, records, num_records, stage)
    loss_after = compute_losses(agent, records, stage)
    pool.loss[rows] = loss_after
    metrics["sampled_loss"] = total(records.loss.sum()) / num_records
    metrics["sampled_loss_after"] = total(loss_after.sum()) / num_records
    return metrics


def train_epoch(agent, optimizer, pool, num_minibatches, num_turns, stage, args, bar):
    """Train on minibatches of the pool; returns the means of what they log.

    This moves the bar by half an epoch.
    """
    # Random games show no good moves: g of eq. 6 is 1, so that the policy has no gradient. AdamW would still
    # decay its last layer: without requires_grad, it leaves that alone. In another network, freeze here each
    # layer that only the policy uses
    agent.policy_head.requires_grad_(stage.name != RANDOM_GAMES)
    batch_size = args.batch_size // WORLD_SIZE
    update = partial(train_minibatch, agent, optimizer, pool, stage)
    if pool.turn.bincount(minlength=num_turns).min() >= batch_size:  # all minibatches have one size
        update = Recorded(update, pool.turn.device)  # a new one, as pool and stage are those of an epoch
    sums = {}
    for i in range(num_minibatches):
        rows = sample_pool(pool, i % num_turns, batch_size, args.random_fraction)
        for name, value in update(rows).items():
            sums[name] = sums.get(name, 0) + value
        bar.update(0.5 / num_minibatches)
    optimizer.zero_grad()  # frees the gradients, which games and matches do not need
    return {name: x / num_minibatches for name, x in sums.items()}


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.inference_mode()
def evaluate_network(go, network, boards, legal):
    """Return logits [R, A] and values [R] of a network."""
    planes = go.planes(boards, legal)
    # On a CPU, in parts of about 6000 points of boards, which fit into its cache
    num_parts = 1 if planes.is_cuda else 1 + len(planes) * go.num_points // 6000
    logits, values = zip(*[network(part) for part in planes.chunk(num_parts)])
    return torch.cat(logits), torch.cat(values)


def evaluate_rollouts(go, komi, boards, legal):
    """Return random logits [R, A], and as values [R] the result of a random game each. With UCB: plain MCTS.

    The logits only decide in which order untried moves come, and between best moves that are equal otherwise.
    """
    logits = torch.rand(legal.shape, device=go.device)
    is_black = boards.to_play == 1
    scores = torch.zeros_like(boards.num_moves)
    rows = torch.arange(len(legal), device=go.device)  # games that are not over
    while len(rows):
        boards = go.play(boards, go.random_moves(boards, go.legal_moves(boards)))
        is_over = boards.is_over
        scores[rows[is_over]] = go.score(boards.pick(is_over))
        boards = boards.pick(~is_over)
        rows = rows[~is_over]
    won = ((scores - komi).sign() + 1) / 2  # by black
    return logits, torch.where(is_black, won, 1 - won)


def make_evaluator(go, agent):
    """Make a function that evaluates boards with a copy of the network as it is now."""
    return partial(evaluate_network, go, deepcopy(agent).eval())


def make_player(go, evaluator, num_simulations, args, scores=puct_scores):
    """Make a function from boards [R] to the moves [R] that a search finds best."""

    def find_moves(boards):
        """Search each of the boards from the root."""
        search = Search(go, evaluator, boards, num_simulations, args, scores)
        search.run(num_simulations)
        return search.best_moves()

    return find_moves


def play_match(go, players, num_games, komi):
    """Play two functions from boards [R] to moves [R] against each other.

    Returns the first one's win rate, its mean margin in points after komi, and the number of moves. Each
    opening of two random moves is played from both sides, the last one from one side if num_games is odd. A
    draw is half a win.
    """
    # The openings
    num_openings = (num_games + 1) // 2
    boards = go.new(num_openings)
    for _ in range(2):
        boards = go.play(boards, go.random_moves(boards, go.legal_moves(boards)))
    number = torch.arange(num_games, device=go.device)
    boards = boards.pick(number % num_openings)
    is_first_black = number < num_openings

    bar = make_bar("moves", leave=False, delay=2)
    # Each player moves in all games where it is its turn
    while not boards.is_over.all():
        for player, is_black in zip(players, (is_first_black, ~is_first_black)):
            rows = (~boards.is_over & ((boards.to_play == 1) == is_black)).nonzero().squeeze(1)
            if len(rows):
                moving = boards.pick(rows)
                boards.put(rows, go.play(moving, player(moving)))
                bar.update(len(rows))
    bar.close()

    # Margins of black become those of the first player
    margin = (go.score(boards) - komi) * (2 * is_first_black - 1)
    won = (margin.sign() + 1) / 2
    return won.mean().item(), margin.mean().item(), boards.num_moves.sum().item()


def evaluate(go, agent, args, best=None):
    """Play a match against plain MCTS, or a smaller one against the network `best`.

    The smaller one has at most 40 games, and a quarter of the simulations for both sides.
    """
    num_games = args.eval_episodes
    num_simulations = args.simulations_end
    if best:
        num_games = min(40, num_games)
        num_simulations = math.ceil(num_simulations / 4)
        opponent = make_player(go, make_evaluator(go, best), num_simulations, args)
    else:
        # Plain MCTS: classic UCB, random games in place of the network, and won games alone count
        plain_args = replace(args, score_weight=0.0, c_puct=1.25, num_workers=1)
        rollouts = partial(evaluate_rollouts, go, args.komi)
        opponent = make_player(go, rollouts, num_simulations, plain_args, ucb_scores)
    player = make_player(go, make_evaluator(go, agent), num_simulations, args)
    win_rate, margin, num_moves = play_match(go, (player, opponent), num_games, args.komi)
    suffix = "_best" if best else ""
    return {f"eval/win_rate{suffix}": win_rate, f"eval/margin{suffix}": margin, "eval/moves": num_moves}


def score_network(go, agent, best, args, run):
    """Play a match against the best network, which is replaced if the new one wins at least half of it.

    At the end of the run, also play against plain MCTS.
    """
    seed_everything(args.seed, EVALUATION, run.iteration)
    scores = evaluate(go, agent, args, best)
    # The first network that is evaluated, or evaluated after --resume changed one of TASK_SETTINGS, becomes
    # the best one in any case
    is_best = run.best_score is None or scores["eval/win_rate_best"] >= 0.5
    if is_best:
        best.load_state_dict(agent.state_dict())
    is_last = run.iteration >= args.num_epochs
    if is_last:
        seed_everything(args.seed, PLAIN_EVALUATION)
        scores = evaluate(go, agent, args) | scores  # eval/moves stays that of the match against `best`
        run.win_rate = scores["eval/win_rate"]
    # run.keep would compare this win rate with that of best.pt, whose opponent was another one. So is_better
    # ignores both, and says how the match has ended. The number of its moves is what the evaluation has cost
    run.keep(scores, "eval/win_rate_best", scores["eval/moves"], is_better=lambda *_: is_best)
    # With one process, checkpoint.pt holds the pool and is large, so that run.keep saves it only at the end
    # of the run. Here it is saved after each match: otherwise a resumed run would have the old `best`, and
    # play this match again
    if not is_last:
        run.save()


# ---- Training ----------------------------------------------------------------------------------------------
def train(args, run):
    """Train the agent of a run; with --evaluate, only score it, and with --gtp, only play."""
    # Set up
    device = set_up_device(args)
    is_cuda = device.type == "cuda"
    go = make_game(args.env_id, device)
    seed_everything(args.seed, WEIGHTS)  # the weights are the same in every process
    agent = Agent(go, args).to(device)
    # Matches are played against this network, and best.pt is a copy of it. Games are played by the newest one
    best = deepcopy(agent).requires_grad_(False)
    run.load(agent=agent)
    if args.gtp:
        from envs_shared.go_gtp import Engine

        Engine(go, partial(Search, go, make_evaluator(go, agent)), args).serve(sys.stdin)
        return
    if args.evaluate:
        print_line(f"{args.evaluate}: {args.eval_episodes} games of {args.env_id} against plain MCTS")
        seed_everything(args.seed, FINAL_EVALUATION)
        print_scores(evaluate(go, agent, args))
        return
    optimizer = torch.optim.AdamW(
        agent.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True, capturable=is_cuda
    )
    run.load(best=best, optimizer=optimizer)
    self_play = SelfPlay(go, args.num_games // WORLD_SIZE)
    if WORLD_SIZE == 1:
        # Games and pool are large: only checkpoint.pt holds them, and only if there is one process
        run.load(in_best=False, games=self_play)
    # Per epoch: positions that this process needs, which make K records each, and minibatches
    num_turns = len(go.move_images)
    capacity = args.pool_size // WORLD_SIZE
    num_positions = math.ceil(args.generate_fraction * capacity / num_turns)
    num_minibatches = math.ceil(args.train_fraction * args.pool_size / args.batch_size)
    games = f"{args.num_games} {'saved' if self_play.pool else 'new'} games and pool"
    run.open(f"{games} on {device}", args.num_epochs, "epochs", "iteration")

    while True:
        # Evaluate, if it is time; at the top, so that --resume repeats an evaluation that was cut off
        if run.should_evaluate():
            score_network(go, agent, best, args, run)
        if run.iteration >= args.num_epochs:
            break
        epoch = run.iteration
        run.win_rate = None  # of the network that this epoch makes
        # Seed each epoch anew: a match draws from the same generators, and must not change the games
        seed_everything(args.seed, TRAINING, epoch + 1, RANK)

        # Stage: another kind of games begins with new games and an empty pool
        stage = get_stage(epoch, go.max_legal, args)
        if epoch == stage.start:
            self_play.start()

        # Learning rate. If you add parameter groups, set the rate of each
        optimizer.param_groups[0]["lr"] = stage.learning_rate

        # Collect: play until there are enough new records, which replace old ones in the pool
        start = time.time()
        search = None
        if stage.scores:
            search = make_self_play_search(agent, self_play.boards, stage, args)
        positions, num_moves = collect_positions(self_play, go, search, num_positions, stage, args, run.bar)
        records = make_records(positions, agent, go, stage, epoch)
        oldest = epoch - (args.max_age or args.num_epochs)
        self_play.pool = refill_pool(self_play.pool, records, capacity, oldest)
        collected = time.time()

        # Update: minibatches of the pool
        metrics = train_epoch(
            agent, optimizer, self_play.pool, num_minibatches, num_turns, stage, args, run.bar
        )

        # Log, and save checkpoint.pt if it is time
        run.iteration += 1
        num_moves = int(total(torch.tensor(num_moves, device=device)))
        run.step += num_moves
        pool = self_play.pool
        scalars = {f"losses/{name}": x.item() for name, x in metrics.items()}
        scalars |= {
            "pool/size": len(pool.z),
            "pool/loss": pool.loss.mean(),
            "pool/age": epoch - pool.epoch.float().mean(),
            "charts/learning_rate": stage.learning_rate,
            "charts/moves": num_moves,
            "charts/collect_seconds": collected - start,
            "charts/train_seconds": time.time() - collected,
        }
        run.bar.set_postfix_str(f"{stage.name}, loss {scalars['losses/loss']:.3f}", refresh=False)
        run.log(scalars)

    text = ""
    if run.win_rate is not None:
        text = f", which wins {run.win_rate:.0%} of its games against plain MCTS"
    run.close(text)


# ---- Run ---------------------------------------------------------------------------------------------------
# What follows is the same in all scripts of this family, but for `Progress` and `main`
if sys.stderr is None:  # closed by a shell, as by 2>&-, but the progress bar needs a stream
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0  # epochs
    step: int = 0  # moves of self-play, in total across processes
    eval_steps: int = 0  # moves of the matches against the best network
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # win rate of best.pt against the best one before, None if not played
    last_score: float | None = None  # that of the newest network, None if not played
    score_name: str = ""  # name of these scores, empty before the first evaluation
    is_due: bool = False  # is it time to evaluate the newest network
    win_rate: float | None = None  # of the newest network against plain MCTS, None before the last epoch


class Run(Progress):  # asdict(run), which `save` writes, has the fields of Progress alone
    """A run: its progress, folder, log, progress bar and checkpoints. Only process 0 writes and evaluates."""

    def __init__(self, args, task, checkpoint=None):
        """Begin a run of `task`, or resume that of a checkpoint from load_checkpoint."""
        self.args = args
        self.settings = asdict(args)  # as they were given: a loop may change settings in `args`
        self.checkpoint = checkpoint
        self.parts = {}  # what checkpoints hold, by name
        self.resume_parts = {}  # what checkpoint.pt alone holds
        self.bar = None
        if checkpoint:
            super().__init__(**checkpoint["progress"])
            self.path = checkpoint["path"].parent
        else:
            super().__init__()
            name = f"{task}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
            self.path = Path(args.run_dir, re.sub(r"[:/\\]", "-", name))

    def load(self, in_best=True, **parts):
        """Let checkpoints hold the states of `parts`; if the run is resumed, restore them first.

        With in_best=False, only checkpoint.pt holds them, not best.pt: this is for large parts, such as a
        replay. The checkpoint of a resumed run must have the network `agent`. Another part that it lacks
        stays as it is, and a line says so. An optimizer gets back its state, such as moments, and its
        learning rate. Its other options, such as weight decay, are those of the present flags.
        """
        (self.parts if in_best else self.resume_parts).update(parts)
        if not self.checkpoint:
            return
        for name, part in parts.items():
            if name not in self.checkpoint and name != "agent":
                print_line(f"{self.checkpoint['path']} has no {name}: begins with a new one")
                continue
            # load_state_dict replaces the options of an optimizer by those saved: put the present ones back
            options = getattr(part, "param_groups", None)
            try:
                part.load_state_dict(self.checkpoint[name])
            except (KeyError, RuntimeError, TypeError, ValueError):
                fail(f"{self.checkpoint['path']}: does not fit {NETWORK_FLAGS} and this file")
            if options:
                part.param_groups = options
        self.restore_learning_rates()

    def restore_learning_rates(self):
        """Set the learning rates of all optimizers to those of the checkpoint, in the same tensors.

        This matters if you add a scheduler of torch: some of them change the rate of their optimizer when
        they are made, after it was restored. So each call of `load`, also that for the scheduler, sets all
        rates again.
        """
        for name, part in (self.parts | self.resume_parts).items():
            if hasattr(part, "param_groups") and name in self.checkpoint:
                for group, saved in zip(part.param_groups, self.checkpoint[name]["param_groups"]):
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(saved["lr"])
                    else:
                        group["lr"] = float(saved["lr"])

    def open(self, description, length, unit="steps", counter="step"):
        """Open folder and log, and show a bar; exits if the folder cannot be written to.

        The run ends when `counter`, a field of Progress, is `length`; `unit` is what it counts.
        """
        self.length = length
        self.counter = counter
        position = self.get_position()
        self.tenths = 10 * position // length  # how many tenths of the run are done
        if RANK == 0:
            self.open_log()
            self.find_best()
            print_line(f"{self.path}: {description}, {position} of {length} {unit} done")
            if self.checkpoint:
                print_line(f"Continues from {self.checkpoint['path'].name}; next states go to checkpoint.pt")
            else:
                self.save()  # so that there is something to resume from now on
        # Some scripts move the bar by fractions between two calls of `log`: n:.0f rounds them
        bar_format = "{l_bar}{bar}| {n:.0f}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        options = {"initial": position, "bar_format": bar_format, "disable": RANK > 0}
        self.bar = make_bar(unit, total=length, **options)
        self.saved_at = time.time()
        self.start_clocks()

    def get_position(self):
        """Return how much of the run's length is done."""
        return min(getattr(self, self.counter), self.length)

    def find_best(self):
        """Take the score to beat from best.pt, which may be newer than the checkpoint.

        If it is missing or of another task, the next evaluation counts as the best.
        """
        path = self.path / "best.pt"
        best = load_checkpoint(path) if path.exists() else None
        if best and all(getattr(best["args"], x) == self.settings[x] for x in TASK_SETTINGS):
            self.best_score = best["progress"]["best_score"]
            self.score_name = best["progress"]["score_name"]
        else:
            self.best_score = None
            self.last_score = None  # the newest policy was not evaluated on this task

    def open_log(self):
        """Open TensorBoard's log and, with --track, a run at Weights & Biases, which gets it too."""
        args = self.args
        name = self.path.name
        if args.track:
            import wandb

            try:
                wandb.init(
                    project=args.wandb_project_name,
                    entity=args.wandb_entity,
                    name=name,
                    id=name,
                    config=self.settings,
                    sync_tensorboard=True,
                    resume="allow",
                    reinit="finish_previous",
                )
            except wandb.Error:
                fail("--track: Weights & Biases did not start; try `wandb login`, or WANDB_MODE=offline")
        try:
            # A resumed run repeats the steps after its checkpoint. TensorBoard hides what they logged before
            self.writer = SummaryWriter(str(self.path), purge_step=self.step + 1)
        except OSError as error:
            fail(f"{self.path}: cannot be written to ({error.strerror})")
        rows = "".join(f"|{name}|{value}|\n" for name, value in self.settings.items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", self.step)

    def start_clocks(self):
        """Begin to measure an iteration, without the evaluation before it."""
        self.start = time.time()
        self.cpu_start = time.process_time()
        self.start_step = self.step

    def save(self, name="checkpoint.pt"):
        """Write all states to a side file and rename it: a kill leaves either the old or the new file."""
        self.writer.flush()  # first: a resumed run does not repeat what was logged before this checkpoint
        progress = asdict(self)
        for key, x in progress.items():
            if hasattr(x, "item"):  # a number of NumPy or torch, which load_checkpoint would refuse
                progress[key] = x.item()
        checkpoint = {"args": self.settings, "progress": progress}
        parts = self.parts if name == "best.pt" else self.parts | self.resume_parts
        for key, part in parts.items():
            checkpoint[key] = part.state_dict()
        path = self.path / name
        torch.save(checkpoint, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)

    def write(self, scalars):
        """Log scalars; one that is not finite ends the run with one line."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, self.step)
            if not math.isfinite(value):
                self.writer.flush()
                fail(f"{name} is {value} at step {self.step}")

    def average_statistics(self):
        """Average running statistics, such as those of batch norms, over all processes.

        Networks without a trainable parameter, such as frozen copies, are left out: they do not change in
        training, and some scripts have them in process 0 alone, which would wait for the others forever.
        Averaging does not change statistics that are equal in all processes.
        """
        if WORLD_SIZE == 1:
            return
        networks = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        for network in networks:
            if any(parameter.requires_grad for parameter in network.parameters()):
                for buffer in network.buffers():
                    if buffer.is_floating_point():
                        total(buffer.div_(WORLD_SIZE))

    def log(self, scalars):
        """Log the scalars of an iteration, and move the bar; call it after raising `iteration` and `step`.

        It saves checkpoint.pt at each evaluation point, so that nothing is lost if the evaluation then fails,
        and whenever the last save is ten minutes old.
        """
        self.average_statistics()
        self.last_score = None  # the new policy has no score yet
        if RANK > 0:
            return
        self.cpu_seconds += time.process_time() - self.cpu_start
        speed = (self.step - self.start_step) / (time.time() - self.start)
        self.write(scalars | {"charts/cpu_seconds": self.cpu_seconds, "charts/SPS": speed})
        position = self.get_position()
        self.bar.update(position - self.bar.n)
        # Evaluation points are the tenths of the run or, with --eval-interval, each so many iterations and
        # the end. There, an evaluation falls due, and stays due until it is done: should_evaluate may wait
        tenths_before = self.tenths
        self.tenths = 10 * position // self.length
        is_point = self.tenths > tenths_before
        if self.args.eval_interval:
            is_point = self.iteration % self.args.eval_interval == 0 or self.tenths == 10
        self.is_due = self.is_due or is_point
        if is_point or time.time() - self.saved_at > 600:
            self.save()
            self.saved_at = time.time()
        self.start_clocks()

    def should_evaluate(self):
        """Return whether to evaluate the newest policy now.

        The last policy is always evaluated. Before, evaluations fall due at evaluation points (see `log`).
        Without --eval-interval, an evaluation that is due is put off while the evaluations before it have
        taken more than a fifth of the steps that training has.
        """
        if RANK > 0 or self.args.eval_episodes == 0 or self.last_score is not None:
            return False
        is_affordable = self.args.eval_interval > 0 or self.eval_steps <= self.step / 5
        return self.tenths == 10 or (self.is_due and is_affordable)

    def keep(self, scores, name, num_steps, is_better=operator.ge):
        """Log the scores of an evaluation of `num_steps` steps; write best.pt unless an older one is better.

        `name` is that of the score which decides: the higher, the better, or with operator.le the lower.
        Scores of two names cannot be compared, so that the first one of another name counts as the best.
        """
        score = float(scores[name])
        self.write(scores)
        self.bar.set_postfix_str(f"{show_name(name)} {show_number(score)}")
        self.eval_steps += round(num_steps)
        self.is_due = False
        self.last_score = score
        is_first = self.best_score is None or name != self.score_name
        self.score_name = name
        if is_first or is_better(score, self.best_score):
            self.best_score = score
            self.save("best.pt")
        # Save the score in checkpoint.pt too. If that holds a large part, such as a replay, this is done only
        # at the end of the run: one that is resumed before the next save of `log` repeats this evaluation
        if not self.resume_parts or self.tenths == 10:
            self.save()
        self.start_clocks()

    def close(self, text=""):
        """Close bar and log, and print the scores, followed by what else a script has to say."""
        self.bar.close()
        if RANK > 0:
            return
        self.writer.close()
        if self.args.track:
            import wandb

            wandb.finish()
        scores = "not evaluated"
        if self.last_score is not None:
            name = show_name(self.score_name)
            best = show_number(self.best_score)
            scores = f"{name} of best.pt {best}, of the last policy {show_number(self.last_score)}"
        print_line(f"{self.path}: {scores}{text}")

    def say_how_to_resume(self):
        """After Ctrl-C, print the command that resumes the run, if it has begun."""
        if RANK > 0:
            return
        if self.bar is None:
            tqdm.write(f"{Path(__file__).name}: interrupted", file=sys.stderr)
            return
        self.bar.close()
        self.writer.flush()
        program = ["python"] if WORLD_SIZE == 1 else ["torchrun", "--nproc-per-node", str(WORLD_SIZE)]
        command = shlex.join([*program, __file__, "--resume", f"{self.path}/checkpoint.pt"])
        # Unlike print, this begins a new line if the bar of an evaluation is shown
        tqdm.write(f"{self.path}: interrupted; to resume: {command}", file=sys.stderr)


class Recorded:
    """A function of tensors that, on one GPU, runs as a CUDA graph, which saves CPU overhead.

    The first call is an ordinary one, in which optimizers create their states. The second call records the
    function and replays the recording, and later calls replay it. On a CPU, with several processes, or if
    CUDA_GRAPHS is False, all calls are ordinary ones.

    A recording reads its tensors again in each replay, but freezes numbers of Python. If a setting in `args`
    changes, the next call records again; if another number does, make a new Recorded. Inputs are tensors, or
    named tuples of tensors, whose shapes stay the same. A replay overwrites the output of the replay before:
    clone what you keep.
    """

    def __init__(self, function, device, args=None):
        self.function = function
        self.args = args
        self.is_on = CUDA_GRAPHS and device.type == "cuda" and WORLD_SIZE == 1
        self.num_calls = 0
        self.settings = None  # those of the recording

    def __call__(self, *inputs):
        """Call the function, or replay it for these inputs."""
        self.num_calls += 1
        if not self.is_on or self.num_calls == 1:
            return self.function(*inputs)
        settings = dict(vars(self.args)) if self.args else {}
        if settings != self.settings:
            self.settings = settings
            memory = tree_map(torch.clone, inputs)  # where each replay reads its inputs
            self.memory = tree_leaves(memory)
            self.graph = torch.cuda.CUDAGraph()
            # Recording computes nothing: the replay below does. It is on the current stream, that of
            # set_up_device, because torch cannot record the default one. The first call was on it, too
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.output = self.function(*memory)
        for old, new in zip(self.memory, tree_leaves(inputs), strict=True):
            assert old.shape == new.shape, "inputs of a recorded function must keep their shapes"
            old.copy_(new)
        self.graph.replay()
        return self.output


def make_bar(unit, **options):
    """Make a progress bar. If stderr is no terminal, such as a file, it writes a line every 30 seconds."""
    return tqdm(unit=f" {unit}", mininterval=0.1 if os.isatty(2) else 30, **options)


def show_name(score_name):
    """Return the name of a score as words: eval/episodic_return becomes episodic return."""
    return score_name.removeprefix("eval/").replace("_", " ")


def show_number(x):
    """Return a number with five digits, or with all digits before the point if these are more."""
    return f"{x:.0f}" if 99_999.5 <= abs(x) < 1e15 else f"{x:.5g}"


def print_line(line):
    """Print a line in process 0. If its reader has left, as `head -n 1` does, the run goes on."""
    if RANK > 0:
        return
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def print_scores(scores):
    """Print the scores of --evaluate, a line each."""
    for name, value in scores.items():
        print_line(f"{name}: {show_number(value)}")


def fail(message):
    """Print an error in one line and exit with code 2."""
    tqdm.write(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def total(x):
    """Sum a tensor that needs no gradient over all processes, in place; with one process nothing happens."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x)
    return x


def sum_gradients(network):
    """Sum the gradients over all processes, in one message; parameters without one are left out."""
    if WORLD_SIZE > 1:
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        # These two functions of torch join and split any tensors, not only parameters
        vector = total(nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(vector, gradients)


def seed_everything(*stream):
    """Seed all random generators from the integers `stream`; other integers give independent numbers.

    Returns the seed. It is below 2^30: gymnasium adds the number of an environment to it, and some
    environments accept only seeds below 2^31. Zeros at the end make no difference: (1, 0) is as (1,).
    """
    seed = int(np.random.SeedSequence(stream).generate_state(1)[0]) % 2**30
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def set_up_device(args):
    """Set the thread count, select the device and, under torchrun, join the process group."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads slow small networks down
    torch.backends.cudnn.deterministic = args.torch_deterministic
    use_cuda = args.cuda and torch.cuda.is_available()
    if WORLD_SIZE > 1 and not args.evaluate:  # --evaluate is for process 0 alone
        # The other processes wait while process 0 evaluates, which may take hours
        torch.distributed.init_process_group("nccl" if use_cuda else "gloo", timeout=timedelta(hours=9))
    if not use_cuda:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))  # number of this process on this machine
    if index >= torch.cuda.device_count():
        fail(f"more processes than GPUs ({torch.cuda.device_count()}): start fewer, or use --no-cuda")
    device = torch.device("cuda", index)
    # The default stream cannot be recorded in a graph. This also makes `device` the current one
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def load_checkpoint(path):
    """Read a checkpoint of this script without executing anything in it; exits if it is not a valid one."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["args"] = Args(**checkpoint["args"])
        Progress(**checkpoint["progress"])  # raises an error if it is of another version
        checkpoint["path"] = Path(path).resolve()  # links resolved: the run's own folder
        return checkpoint
    except Exception:
        fail(f"{path}: missing, or not a checkpoint of this version of the script; name a .pt file")


def main(argv=None):
    """Read the command line and train; flags override the settings of a checkpoint.

    Returns the best score, or None if there is none, as with --evaluate and --gtp.
    """
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    paths = [path for path in (args.resume, args.evaluate, args.gtp) if path]
    if len(paths) > 1:
        fail("--resume, --evaluate and --gtp exclude each other")
    if paths:
        checkpoint = load_checkpoint(paths[0])
        args = tyro.cli(Args, args=argv, default=checkpoint["args"])
    counts = """num_games channels simulations_start simulations_end max_depth num_epochs pool_size
        batch_size""".split()
    shares = """score_weight epsilon_start epsilon_end random_fraction generate_fraction value_coef
        q_weight_start q_weight_end draw_moves resign_below""".split()
    for name, value in vars(args).items():
        if value == "":
            fail(f"--{name.replace('_', '-')} is empty, perhaps because a variable of the shell is not set")
        if type(value) not in (int, float):  # a bool is neither
            continue
        least = 1 if name in counts else 0
        if name == "komi":
            least = -1e30
        most = 1 if name in shares else 1e30
        flag = f"--{name.replace('_', '-')} ({value})"
        if not least <= value <= most:  # also if it is NaN
            fail(f"{flag} must be from {least} to {most}")
        if name in "dirichlet_alpha generate_fraction train_fraction".split() and value == 0:
            fail(f"{flag} must be greater than 0")
    try:
        num_symmetries = len(make_game(args.env_id).move_images)
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")
    if args.gtp and not find_spec("envs_shared.go_gtp"):
        fail("--gtp needs envs_shared/go_gtp.py beside envs_shared/go.py")
    if args.evaluate and not args.eval_episodes:
        fail("--evaluate needs --eval-episodes")
    if args.num_games % WORLD_SIZE or args.batch_size % WORLD_SIZE:
        fail(f"--num-games and --batch-size must be divisible by the number of processes ({WORLD_SIZE})")
    if args.pool_size < num_symmetries * args.batch_size:
        # Only one symmetric form of each position may be in a minibatch
        fail(
            f"--pool-size ({args.pool_size}) must be at least {num_symmetries} x --batch-size "
            f"({args.batch_size})"
        )
    if not checkpoint and args.num_epochs <= args.pretrain_value_epochs:
        fail(
            f"--num-epochs ({args.num_epochs}) must be greater than --pretrain-value-epochs "
            f"({args.pretrain_value_epochs}), which learn no policy"
        )
    if args.gtp and WORLD_SIZE > 1:
        fail("--gtp needs one process: start it without torchrun")
    if args.evaluate and RANK > 0:
        return None  # process 0 does it
    run = Run(args, args.env_id, checkpoint)
    try:
        train(args, run)
    except KeyboardInterrupt:
        run.say_how_to_resume()
        sys.exit(130)
    return None if args.evaluate or args.gtp else run.best_score


if __name__ == "__main__":
    main()
    if RANK > 0:
        sys.stdout.flush()
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
