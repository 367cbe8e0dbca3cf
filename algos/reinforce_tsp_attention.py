"""The attention model for the travelling salesman problem (TSP), trained by REINFORCE, in one file.

Papers: Kool et al. 2019, arXiv:1803.08475 (model, baseline), and Kwon et al. 2020, arXiv:2010.16011 (POMO).

    python reinforce_tsp_attention.py                       # learns 20 nodes in minutes on one CPU core
    # Nearly the method of Kool et al.; docs/reinforce_tsp_attention.md says what differs
    python reinforce_tsp_attention.py --baseline rollout --optimizer adam --learning-rate 1e-4 --no-anneal-lr
    torchrun --nproc-per-node 2 reinforce_tsp_attention.py  # two GPUs, or with --no-cuda two CPU processes
    python reinforce_tsp_attention.py --evaluate runs/NAME/best.pt --data my_instances.txt --solve my_tours

Equations, numbered as by Kool et al.:
    (1)  p(pi | s) = prod_t p(pi_t | s, pi_1 ... pi_{t-1}) for a tour pi of an instance s
    (2)  h'     = BN(h + MHA(h)), in each of three encoder layers; h has an embedding h_i of each node
    (3)  h      = BN(h' + FF(h'))
    (4)  h_c    = [mean of h, h of the last node, h of the first node], the context; while a tour is empty,
                  learned vectors v^l and v^f replace the last two
    (5)  q      = W^Q h_c,  k_i = W^K h_i,  v_i = W^V h_i, for each head
    (6)  u_j    = q . k_j / sqrt(d), or -inf if j has been visited; the glimpse is g = sum_j softmax(u)_j v_j
    (7)  u_j    = 10 tanh(W^O g . k_j / sqrt(D)), or -inf if j has been visited. These k_j have a W^K of their
                  own. (The paper has a further W^Q in front of W^O; their product is one matrix)
    (8)  p(pi_t = j | s, pi_1 ... pi_{t-1}) = softmax(u)_j
    (9)  grad E[L(pi)] = E[ (L(pi) - b(s)) grad log p(pi | s) ], where L(pi) is the length of the tour

What differs from the papers, mainly: POMO begins a tour at each node, so its loss does not train where to
begin. But greedy decoding builds one tour, whose first node comes from the policy: a term of our own in
compute_loss trains that choice. Inputs are scaled to the unit square. Muon trains most matrices. The learning
rate falls from the first epoch on. docs/reinforce_tsp_attention.md has the full list.

Shapes: B instances (M to evaluate), N nodes, P tours of each instance, Q queries, D embedding, H heads,
d = D / H.

The file has two parts. The algorithm comes first, with its loop in `train`. The part `Run` at the end is
about the run folder, the log, checkpoints, processes and the command line.
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
from collections import namedtuple
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# --data and --train-path need the folder envs_shared, which is beside this file or beside its folder
sys.path += map(str, Path(__file__).resolve().parents[:2])
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# On one GPU, the update is recorded as a CUDA graph, which saves CPU overhead. Set this to False for edits
# that a graph cannot record, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
# Whether this CPU multiplies bfloat16 fast, as GPUs do; older versions of torch cannot tell
CPU_HAS_BFLOAT16 = getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16", False)
# Independent streams of random numbers, as in seed_everything(args.seed, WEIGHTS)
WEIGHTS, TRAINING, EVALUATION, FINAL_EVALUATION = range(4)
# For the part `Run`: if one of these settings changes with --resume, the score of best.pt no longer counts.
# The seed is one of them, as it chooses the instances of evaluations
TASK_SETTINGS = ("env_id", "data", "seed", "eval_episodes")
# Named in the message about a checkpoint that does not fit. This one decides which parameters Muon trains and
# which Adam trains, and the states of both optimizers fit no other division
NETWORK_FLAGS = "--optimizer"

# Defined in the part `Run` at the end, but used before it:
#   total(x)            sums a tensor over all processes; with one process it changes nothing
#   sum_gradients(net)  does that with the gradients of a network
#   seed_everything     seeds all random generators from a few integers
#   Recorded(f, ...)    a function that calls f; on one GPU, it records f as a CUDA graph and replays that
#   fail(message)       prints one line and exits with code 2
#   run.load(name=part) lets checkpoints hold the state of a part; restores it with --resume and --evaluate
#   run.open            opens the run folder and the log, and shows the progress bar
#   run.iteration       counts epochs; the run ends when it reaches the length that run.open was given
#   run.step            counts the instances trained on
#   run.should_evaluate tells whether it is time to evaluate
#   run.keep            logs the scores of an evaluation, and writes best.pt unless an older one is better
#   run.log             logs numbers by name

# If your nodes have more numbers, edit to_unit_square and tour_length, which take all numbers of a node as
# coordinates, and augment_x8, which needs two
POINT_DIM = 2  # x and y of a node
EMBED_DIM = 128  # D
NUM_HEADS = 8  # H
make_map = partial(nn.Linear, EMBED_DIM, EMBED_DIM, bias=False)
MULTISTART_NODES = 5000  # instances with more nodes are scored by the first of DECODINGS alone

# What the encoder gives the decoder. As h_c joins three vectors, the query W^Q h_c is a sum of three terms:
# of the mean of h, of the last node and of the first node. The encoder computes them once, for each node that
# may come in that place, and a step only looks up two rows and adds them:
#     first_queries  [B, N + 1, D]  row i: term of the first node if it is i, plus that of the mean
#     last_queries   [B, N + 1, D]  row i: term of the last node if it is i
#     k, v           [B, H, N, d]   of eq. 6
#     logit_k        [B, N, D]      k of eq. 7, already times W^O / sqrt(D): see AttentionModel.forward
# Row N of both tables is for empty tours: that of v^f in first_queries, and that of v^l in last_queries
Encoded = namedtuple("Encoded", "first_queries last_queries k v logit_k")
# Instances to evaluate on: points [M, N, 2] in float64, reference tours [M, N] or None, and a function that
# measures tours, such as tour_length
Instances = namedtuple("Instances", "points tours measure")


@dataclass
class Args:
    """Attention model and REINFORCE on random instances of the TSP, or on those of a file."""

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
    eval_interval: int = 0  # epochs between evaluations (0: a tenth of the run, or more if they are slow)
    eval_episodes: int = 1000  # random instances per evaluation (0: never evaluate, or 1,000 with --evaluate)
    # Instances
    env_id: str = "tsp20-uniform"  # random instances: tspN-uniform (unit square) or tspN-gaussian, of N nodes
    train_path: str | None = None  # train on this file instead; evaluations are still on --data or --env-id
    data: str | None = None  # evaluate on this file, see read_instances; needs envs_shared/tsplib.py
    solve: str | None = None  # with --evaluate and --data: new folder for the tours of the last of DECODINGS
    # The algorithm
    num_epochs: int = 35  # epochs; after each one, --baseline rollout may replace its baseline policy
    steps_per_epoch: int = 100  # gradient steps per epoch
    batch_size: int = 32  # instances of a gradient step, in total across processes
    baseline: Literal["pomo", "rollout"] = "pomo"  # b(s): mean of N tours, or a baseline policy's greedy tour
    baseline_instances: int = 10_000  # rollout: for the t-test of a new baseline policy; 1,000 or more
    baseline_level: float = 0.05  # rollout: significance level of that test (0.5: any shorter mean passes)
    optimizer: Literal["muon", "adam"] = "muon"  # for the matrices that map embeddings; Adam trains the rest
    learning_rate: float = 1e-3  # Adam learning rate; a step of Muon has a root mean square of 0.4 times it
    anneal_lr: bool = True  # lower the learning rate to zero along a half cosine
    weight_decay: float = 0.0  # decoupled weight decay (AdamW) of the parameters that Adam trains
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm (1e9: never; 0: no training)


# ---- Networks ----------------------------------------------------------------------------------------------
def to_unit_square(points):
    """Move and scale each instance [B, N, 2], in any unit, into the unit square."""
    offset = points - points.amin(1, keepdim=True)
    return offset / offset.amax((1, 2), keepdim=True).clamp(min=1e-30)  # 0 if all points coincide


def split_heads(x):
    """Split projected embeddings [B, N, D] into heads [B, H, N, d]."""
    return x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2).contiguous()


def attend(q, k, v, log_mask=0.0):
    """Return attention [B, Q, D] of queries [B, Q, D] to keys and values [B, H, N, d], before W^O."""
    # The 1 / sqrt(d) of eq. 6 is applied to q instead of u: the result is the same, and q is often smaller
    q = split_heads(q) / k.shape[-1] ** 0.5
    u = (q @ k.mT).add_(log_mask)  # [B, H, Q, N]
    return (u.softmax(-1) @ v).transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward network, on embeddings [B, N, D], each with skip and batch norm."""

    def __init__(self):
        super().__init__()
        self.project_q = make_map()
        self.project_k = make_map()
        self.project_v = make_map()
        self.project_out = make_map()
        self.ff = nn.Sequential(nn.Linear(EMBED_DIM, 512), nn.ReLU(), nn.Linear(512, EMBED_DIM))
        self.norm1 = nn.BatchNorm1d(EMBED_DIM)
        self.norm2 = nn.BatchNorm1d(EMBED_DIM)

    def forward(self, h):
        k = split_heads(self.project_k(h))  # [B, H, N, d]
        v = split_heads(self.project_v(h))
        attention = self.project_out(attend(self.project_q(h), k, v))
        rows = self.norm1((h + attention).flatten(0, 1))  # eq. 2, [B N, D]
        return self.norm2(rows + self.ff(rows)).view_as(h)  # eq. 3


class AttentionModel(nn.Module):
    """Encoder of Kool et al. and the projections of their decoder, with 708,608 parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(POINT_DIM, EMBED_DIM)
        self.layers = nn.Sequential(EncoderLayer(), EncoderLayer(), EncoderLayer())
        # W^Q in three parts, one for each part of the context
        self.project_graph = make_map()
        self.project_last = make_map()
        self.project_first = make_map()
        # W^K and W^V of eq. 5, W^O and W^K of eq. 7
        self.project_k = make_map()
        self.project_v = make_map()
        self.project_out = make_map()
        self.project_logit_k = make_map()
        # v^f and v^l of empty tours
        self.placeholders = nn.Parameter(torch.empty(2, EMBED_DIM).uniform_(-1, 1))

    def forward(self, points):
        """Encode points [B, N, 2] in any unit, and return what the decoder needs of them, an Encoded."""
        h = self.layers(self.embed(to_unit_square(points).float()))  # [B, N, D]
        # Empty tours have the placeholders as node N
        v_first, v_last = self.placeholders
        first = torch.cat((h, v_first.expand(len(h), 1, -1)), 1)  # [B, N + 1, D]
        last = torch.cat((h, v_last.expand(len(h), 1, -1)), 1)
        first_queries = self.project_graph(h.mean(1, keepdim=True)) + self.project_first(first)
        last_queries = self.project_last(last)
        k = split_heads(self.project_k(h))  # [B, H, N, d]
        v = split_heads(self.project_v(h))
        # (W^O g) . k_j = g . (k_j W^O), so W^O can be applied to the keys, once, instead of to each glimpse
        logit_k = self.project_logit_k(h) @ self.project_out.weight / EMBED_DIM**0.5  # [B, N, D]
        return Encoded(first_queries, last_queries, k, v, logit_k)


def pick_rows(table, nodes):
    """Return rows [B, P, D] of a table [B, N + 1, D]: row nodes[b, p] of instance b, for nodes [B, P]."""
    # `embedding` picks rows of one table, in which node i of instance b is row b (N + 1) + i. It is used for
    # its backward pass: with `gather`, an update with 20 nodes takes a tenth longer
    row_offset = torch.arange(len(table), device=table.device).unsqueeze(1) * table.shape[1]
    return nn.functional.embedding(nodes + row_offset, table.flatten(0, 1))


def decoder_step(encoded, q, is_open):
    """Return log p [B, P, N] of the next node of P tours of each instance.

    q [B, P, D]: the queries of the tours. is_open [B, P, N]: the nodes that may come next.
    """
    log_mask = torch.where(is_open, 0.0, -torch.inf)
    glimpse = attend(q, encoded.k, encoded.v, log_mask.unsqueeze(1))  # eq. 6, [B, P, D]
    logits = 10 * torch.bmm(glimpse, encoded.logit_k.mT).tanh() + log_mask  # eq. 7
    return logits.log_softmax(-1)  # eq. 8


# ---- REINFORCE ---------------------------------------------------------------------------------------------
def tour_length(points, tours):
    """Return lengths [B, P] of closed tours [B, P, N] through points [B, N, 2]."""
    stops = points.unsqueeze(1).take_along_dim(tours.unsqueeze(-1), 2)  # [B, P, N, 2]
    return (stops - stops.roll(-1, 2)).norm(dim=-1).sum(-1)


def find_open_nodes(points, visited, last):
    """Return which nodes may come next, [B, P, N] booleans.

    visited [B, P, N]: the nodes that a tour has visited; last [B, P]: the newest of them, or N if there is
    none. If your tours must keep other rules, edit this function alone: no other line says where a tour may
    begin or go. `points` [B, N, 2] are for rules that depend on the instance.
    """
    return ~visited


def sample_nodes(log_probs):
    """Draw nodes [B, P] with log-probabilities [B, P, N].

    This is torch.multinomial without waiting for the GPU, so that a CUDA graph can record it.
    """
    # -log(-log(U)) of uniform U is Gumbel noise, and argmax(log p + noise) is distributed as p. Both ends of
    # U are cut off. At 0, the noise is -inf, and an open node could not be told from a closed one. At 1, to
    # which a device might round, it is inf, and log p + noise of a closed node would be NaN
    uniform = torch.rand_like(log_probs).clamp_(1e-30, 1 - 1e-7)
    return (log_probs - (-uniform.log()).log()).argmax(-1)


def pick_likeliest(log_probs):
    """Return the most likely nodes [B, P] by log-probabilities [B, P, N]."""
    return log_probs.argmax(-1)


def rollout(points, encoded, choose, multistart=False):
    """Build a tour of each instance [B, N, 2] node by node or, with `multistart`, a tour from each node.

    `choose` is sample_nodes or pick_likeliest. Returns
        tours            [B, P, N]
        log_likelihood   [B, P]  log p of the tours, eq. 1; with `multistart`, the first node is given, so
                                 that its step does not count
        start_log_probs  [B, N]  log p of each node as the first one
    """
    num_nodes = points.shape[1]
    nodes = torch.arange(num_nodes, device=points.device)
    visited = torch.zeros_like(points[:, None, :, 0], dtype=torch.bool)  # [B, 1, N]
    last = torch.full_like(visited[:, :, 0], num_nodes, dtype=torch.long)  # [B, 1], N: no node yet
    first_queries = pick_rows(encoded.first_queries, last)  # [B, P, D]
    tours = []
    log_likelihood = 0.0
    for t in range(num_nodes):
        is_open = find_open_nodes(points, visited, last)
        q = first_queries + pick_rows(encoded.last_queries, last)  # eq. 4, 5
        log_probs = decoder_step(encoded, q, is_open)  # [B, P, N], where P = 1 in the first step
        if t == 0:
            start_log_probs = log_probs.squeeze(1)
        if t == 0 and multistart:
            # From now on there are N tours of each instance, and tour j begins at node j. In the TSP, every
            # node is open then, and `chosen` is not used. If your find_open_nodes closes node j, so that its
            # log-probability is -inf, tour j begins at a node that `choose` picks
            chosen = choose(log_probs.detach().expand(-1, num_nodes, -1))  # [B, N]
            last = torch.where(start_log_probs > -torch.inf, nodes, chosen)
        else:
            last = choose(log_probs.detach())  # [B, P]
            log_p = log_probs.take_along_dim(last.unsqueeze(-1), -1).squeeze(-1)
            log_likelihood = log_likelihood + log_p  # eq. 1
        if t == 0:
            first_queries = pick_rows(encoded.first_queries, last)
        visited = visited | (nodes == last.unsqueeze(-1))  # [B, P, N]
        tours.append(last)
    return torch.stack(tours, -1), log_likelihood, start_log_probs


def compute_loss(agent, baseline_policy, baseline, points):
    """Return for each instance the loss, and the mean lengths of sampled tours and of the baseline, [B] each.

    With `rollout`, the gradient of the loss is an unbiased estimate of eq. 9. With `pomo`, a first term
    trains tours that begin at each node equally often, and a second one trains the choice of the first node;
    docs/reinforce_tsp_attention.md shows what both estimate.
    """
    encoded = agent(points)
    tours, log_likelihood, start_log_probs = rollout(points, encoded, sample_nodes, baseline == "pomo")
    lengths = tour_length(points, tours)  # [B, P]
    if baseline == "pomo":
        baseline_lengths = lengths.mean(1, keepdim=True)  # Kwon et al., eq. 3
        advantages = lengths - baseline_lengths
        loss = (log_likelihood * advantages).mean(1)
        # The choice of the first node: as there is a tour from each node j, the expected advantage over first
        # nodes is a plain sum, of p(j) advantages[j], and needs no log-likelihood. Only p has a gradient
        loss = loss + (start_log_probs.exp() * advantages).sum(1)
    elif baseline == "rollout":
        # Greedy tours of a policy that `train` keeps in evaluation mode and without gradients
        greedy_tours, _, _ = rollout(points, baseline_policy(points), pick_likeliest)
        baseline_lengths = tour_length(points, greedy_tours)
        loss = (log_likelihood * (lengths - baseline_lengths)).mean(1)
    else:
        fail(f"--baseline {baseline}: compute_loss has no rule for it")
    return loss, lengths.mean(1), baseline_lengths.mean(1)


def update_weights(agent, baseline_policy, optimizers, args, points):
    """Take one gradient step; returns what is logged, tensors by name.

    `points` [B, N, 2] are this process's share of the batch. Shapes are fixed and the host never waits, so
    that a CUDA graph can record it.
    """
    losses, lengths, baselines = compute_loss(agent, baseline_policy, args.baseline, points)
    loss = losses.sum() / args.batch_size  # what this process adds to the mean
    agent.zero_grad()
    loss.backward()
    sum_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    return {
        "policy_loss": total(loss.detach()),
        "tour_length": total(lengths.sum() / args.batch_size),
        "baseline_length": total(baselines.sum() / args.batch_size),
        "grad_norm": grad_norm,
    }


@torch.no_grad()
def is_better(agent, baseline_policy, points, level):
    """Test if the policy's greedy tours are shorter, by a one-sided paired t-test.

    Each process has other points [n, N, 2]; the test is on those of all processes.
    """
    agent.eval()
    differences = []
    for part in points.split(1000):
        tours, _, _ = rollout(part, agent(part), pick_likeliest)
        baseline_tours, _, _ = rollout(part, baseline_policy(part), pick_likeliest)
        differences.append(tour_length(part, tours) - tour_length(part, baseline_tours))
    d = torch.cat(differences)  # [n, 1]
    num = len(d) * WORLD_SIZE
    mean = total(d.sum()) / num
    variance = total((d - mean).square().sum()) / (num - 1)
    t = mean / (variance / num).sqrt()
    return torch.special.ndtr(t) < level  # normal instead of t distribution, since num is large


def orthogonalize(x):
    """Return about U V^T of each matrix U S V^T of a stack x [K, m, n]: all singular values become about 1.

    So a step of Muon is equally large in all directions. Five Newton-Schulz steps do it without an SVD.
    """
    if x.shape[1] > x.shape[2]:  # y y^T below is then the smaller of the two products
        return orthogonalize(x.mT).mT
    y = x.bfloat16() if x.is_cuda or CPU_HAS_BFLOAT16 else x  # where bfloat16 is fast
    # Divided by its Frobenius norm, the root of the sum of its squared singular values, a matrix has none
    # above 1. Each step keeps U and V, and maps a singular value s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5.
    # After five steps, all but tiny ones are roughly between 0.7 and 1.2 (numbers of Jordan et al.)
    y = nn.functional.normalize(y.flatten(1)).view_as(y)
    for _ in range(5):
        # y becomes 3.4445 y + (-4.7750 G + 2.0315 G G) y, where G = y y^T
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Steps along orthogonalized momentum (Jordan et al. 2024); batches matrices of equal shape.

    torch.optim.Muon reads its learning rate on the host, which a CUDA graph cannot record, and computes in
    bfloat16 on any device: on a CPU that is slow at it, its steps took 499 ms and those of this class 29 ms.
    """

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        by_shape = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for shape, params in by_shape.items():
            # Nesterov momentum: m becomes 0.95 m + 0.05 g, and with this new m the update is 0.95 m + 0.05 g
            updates = []
            for p in params:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                updates.append(p.grad.lerp(momentum, 0.95))
            # The entries of U V^T of an m x n matrix have a root mean square of 1 / sqrt(max(m, n)). They are
            # scaled so that the entries of a step have one of 0.4 times the learning rate. (torch's Muon has
            # 0.2 with adjust_lr_fn="match_rms_adamw")
            step_size = group["lr"] * 0.4 * max(shape) ** 0.5
            for p, update in zip(params, orthogonalize(torch.stack(updates))):
                p.sub_(step_size * update)


# ---- Evaluation --------------------------------------------------------------------------------------------
def decode_greedy(agent, points):
    """Return one tour [B, 1, N] of each instance [B, N, 2]: the most likely node at each step."""
    tours, _, _ = rollout(points, agent(points), pick_likeliest)
    return tours


def decode_multistart(agent, points):
    """Return tours [B, N, N]: a greedy one from each node."""
    tours, _, _ = rollout(points, agent(points), pick_likeliest, multistart=True)
    return tours


def decode_multistart_x8(agent, points):
    """Return tours [B, 8 N, N]: those of decode_multistart for eight images of each instance."""
    return torch.cat([decode_multistart(agent, image) for image in augment_x8(points)], 1)


# Ways to build tours, by name; add your own here. All of them score the last policy, and with --evaluate any
# policy; earlier policies of a run are scored by the first one alone
DECODINGS = {
    "greedy": decode_greedy,
    "multistart": decode_multistart,
    "multistart_x8": decode_multistart_x8,
}


def list_decodings(instances):
    """Return the names of all decodings or, for instances of too many nodes, of the first one alone."""
    names = list(DECODINGS)
    if instances.points.shape[1] > MULTISTART_NODES:  # N tours of N nodes take a time that grows as N^3
        return names[:1]
    return names


def augment_x8(points):
    """Return the eight images [B, N, 2] of points [B, N, 2] under the symmetries of a square (Kwon et al.).

    The square has its centre at the origin; the network moves any image into the unit square.
    """
    return [x * x.new_tensor((a, b)) for x in (points, points.flip(-1)) for a in (1, -1) for b in (1, -1)]


@torch.no_grad()
def evaluate(agent, instances, device, decodings=DECODINGS):
    """Score the shortest tours that each decoding finds; also returns the last decoding's tours [M, N]."""
    points, references, measure = instances
    agent.eval()
    scores = {}
    # In parts, to save memory: multi-start decoding masks N nodes in N tours of each instance
    parts = points.to(device).split(2**18 // points.shape[1] ** 2 + 1)
    bar = make_bar("instances", total=len(points) * len(decodings), leave=False, delay=2)
    for name in decodings:
        found = []
        for part in parts:
            tours = DECODINGS[name](agent, part)  # [B, P, N]
            shortest = measure(part, tours).argmin(1)  # [B], of P tours
            found.append(tours[range(len(part)), shortest].cpu())
            bar.update(len(part))
        tours = torch.cat(found)  # [M, N]
        lengths = measure(points, tours.unsqueeze(1))  # [M, 1]
        scores[f"eval/{name}_length"] = lengths.mean().item()
        if references is not None:
            best = measure(points, references.unsqueeze(1))
            gaps = 100 * (lengths - best) / best.abs()  # in percent; a measure of yours may be negative
            scores[f"eval/{name}_gap"] = gaps.mean().item()
            scores[f"eval/{name}_gap_std"] = gaps.std(correction=0).item()
    bar.close()
    return scores, tours


# ---- Instances ---------------------------------------------------------------------------------------------
def draw_points(env_id, num_instances, stored=None):
    """Draw points [B, N, 2]: new random ones, or random rows of a file's instances [M, N, 2]."""
    if stored is not None:
        return stored[torch.randint(len(stored), (num_instances,))]
    match = re.fullmatch(r"tsp([3-9]|[1-9]\d+)-(uniform|gaussian)", env_id)
    if not match:
        fail(f"--env-id {env_id}: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes")
    draw = torch.rand if match[2] == "uniform" else torch.randn
    return draw(num_instances, int(match[1]), POINT_DIM)


def use_files(name, *inputs):
    """Call a function of envs_shared/tsplib.py; exits if it is missing, or if a file does not fit."""
    try:
        from envs_shared import tsplib

        return getattr(tsplib, name)(*inputs)
    except ModuleNotFoundError:
        fail(
            f"{inputs[0]}: needs envs_shared/tsplib.py; copy it into a folder envs_shared beside this script"
        )
    except ValueError as error:  # whose text names the file
        fail(str(error))


def read_instances(path):
    """Read the instances of a file, all of one size; exits if there are none.

    It is a .tsp file of TSPLIB, or text of ML4CO with an instance on each line: `x y x y x y output 1 3 2 1`,
    where the tour after `output` may be left out. Evaluations measure text by `tour_length`, with your edits,
    and .tsp files by `measure_tours` of tsplib.py.
    """
    return Instances(*use_files("read_instances", path, POINT_DIM, tour_length))


def make_eval_instances(args):
    """Return the instances to evaluate on: with --evaluate, other ones than those that selected best.pt."""
    if args.data:
        return read_instances(args.data)
    seed_everything(args.seed, FINAL_EVALUATION if args.evaluate else EVALUATION)
    points = draw_points(args.env_id, args.eval_episodes or 1000)
    return Instances(points.double(), None, tour_length)  # float64, for exact lengths


# ---- Training ----------------------------------------------------------------------------------------------
def make_optimizers(agent, learning_rate, args):
    """Return Adam and Muon for the parameters of the agent; `learning_rate` is a tensor that both read."""
    # Muon is for the matrices that map embeddings to embeddings: those with `project` or `ff` anywhere in
    # their names, which counts for your own layers too. Adam trains the rest
    matrices = []
    others = []
    for name, p in agent.named_parameters():
        is_map = args.optimizer == "muon" and p.ndim == 2 and ("project" in name or "ff" in name)
        (matrices if is_map else others).append(p)
    adam = torch.optim.AdamW(
        others, learning_rate, weight_decay=args.weight_decay, fused=True, capturable=learning_rate.is_cuda
    )
    # As a group, because torch refuses a plain list that is empty, as `matrices` is with --optimizer adam
    muon = Muon([{"params": matrices}], {"lr": learning_rate})
    return adam, muon


def score_checkpoint(agent, instances, decodings, args, device):
    """Print the scores of --evaluate, and write the tours of --solve."""
    if args.solve:
        use_files("make_folder", args.solve)  # now, as it may fail
    num_instances, num_nodes, _ = instances.points.shape
    how = ", ".join(decodings)
    if num_nodes > MULTISTART_NODES:
        memory = 7e-8 * num_nodes**2  # measured
        how += f" alone, as there are more than {MULTISTART_NODES} nodes; about {memory:.1f} GB"
    print_line(f"{args.evaluate}: {num_instances} instances of {args.data or args.env_id}, tours by {how}")
    scores, tours = evaluate(agent, instances, device, decodings)
    print_scores(scores)
    if args.solve:
        use_files("write_tours", args.solve, args.data, instances, tours)


def train(args, run):
    """Train the agent of a run; with --evaluate, only score it."""
    # Set up
    device = set_up_device(args)
    torch.set_float32_matmul_precision("medium")  # TF32 on GPUs; bfloat16 on CPUs that multiply it fast
    # On a CPU with Linux, allocate 32 MB and free them at once: from then on, its C library (glibc) keeps
    # smaller blocks that are freed, instead of returning them to the system and requesting them again. With
    # default settings, a gradient step takes 5 % less time; results are the same
    torch.empty(8_000_000)
    seed_everything(args.seed, WEIGHTS)  # the weights are the same in every process
    agent = AttentionModel().to(device).eval()
    run.load(agent=agent)

    instances = make_eval_instances(args)
    decodings = list_decodings(instances)
    if args.evaluate:
        score_checkpoint(agent, instances, decodings, args, device)
        return

    # Of a file to train on, only the points are used: training minimizes tour_length, even if a .tsp file has
    # other distances. They are scaled to the unit square here, so that the sizes of gradients do not depend
    # on the file's unit. This is done in float64: in float32, points far from zero would lose digits
    stored = None
    if args.train_path:
        stored = to_unit_square(read_instances(args.train_path).points).float()

    # Optimizers
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, so that graphs see it change
    adam, muon = make_optimizers(agent, learning_rate, args)
    run.load(optimizer=adam, muon=muon)

    # Baseline policy: it starts as a copy of the agent, in evaluation mode, and stays in that mode
    baseline_policy = None
    if args.baseline == "rollout":
        baseline_policy = deepcopy(agent).requires_grad_(False)
        run.load(baseline_policy=baseline_policy)

    # Try all decodings now, on few nodes, since most of them run only after the last epoch
    if args.eval_episodes:
        for name in decodings:
            DECODINGS[name](agent, instances.points[:2, :20].to(device))

    update = Recorded(partial(update_weights, agent, baseline_policy, (adam, muon), args), device, args)
    run.open(f"{device}, scored on {args.data or args.env_id}", args.num_epochs, "epochs", "iteration")

    while True:
        # Evaluate, if it is time; at the top, so that --resume repeats an evaluation that was cut off
        if run.should_evaluate():
            # The last policy by all decodings, the others by the first one
            names = decodings if run.iteration >= args.num_epochs else decodings[:1]
            scores, _ = evaluate(agent, instances, device, names)
            score_name = f"eval/{decodings[0]}_gap"
            if score_name not in scores:  # without reference tours
                score_name = f"eval/{decodings[0]}_length"
            # The lower, the better. The number of instances is what the evaluation has cost
            run.keep(scores, score_name, len(instances.points), operator.le)
        if run.iteration >= args.num_epochs:
            break
        seed_everything(args.seed, TRAINING, run.iteration, RANK)

        # Learning rate: it falls to zero along a half cosine
        rate = args.learning_rate
        if args.anneal_lr:
            rate *= (1 + math.cos(math.pi * run.iteration / args.num_epochs)) / 2
        learning_rate.fill_(rate)

        # Gradient steps, each on new instances
        agent.train()
        sums = {}
        for _ in range(args.steps_per_epoch):
            points = draw_points(args.env_id, args.batch_size // WORLD_SIZE, stored).to(device)
            for name, value in update(points).items():
                sums[name] = sums.get(name, 0) + value
            run.bar.update(1 / args.steps_per_epoch)

        # Rollout baseline: the policy replaces the baseline policy if it is significantly better. First, the
        # statistics of its batch norms become means over all processes, so that all have the same policy
        if baseline_policy:
            run.average_statistics()
            points = draw_points(args.env_id, args.baseline_instances // WORLD_SIZE, stored).to(device)
            if is_better(agent, baseline_policy, points, args.baseline_level):
                baseline_policy.load_state_dict(agent.state_dict())
                run.baseline_updates += 1

        # Log, and save checkpoint.pt if it is time
        run.iteration += 1
        run.step += args.steps_per_epoch * args.batch_size
        scalars = {f"losses/{name}": x.item() / args.steps_per_epoch for name, x in sums.items()}
        scalars["charts/learning_rate"] = rate
        scalars["charts/baseline_updates"] = run.baseline_updates
        run.log(scalars)

    run.close()


# ---- Run ---------------------------------------------------------------------------------------------------
# What follows is the same in all scripts of this family, but for `Progress` and `main`
if sys.stderr is None:  # closed by a shell, as by 2>&-, but the progress bar needs a stream
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0  # epochs
    step: int = 0  # instances trained on, in total across processes
    eval_steps: int = 0  # instances of evaluations
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # gap or length of best.pt, None if there is none of this task
    last_score: float | None = None  # gap or length of the newest policy, None if it was not evaluated
    score_name: str = ""  # name of these scores, empty before the first evaluation
    is_due: bool = False  # is it time to evaluate the newest policy
    baseline_updates: int = 0  # times that the policy became that of the rollout baseline


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

    Returns the best score, or None if there is none, as with --evaluate.
    """
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    if args.resume and args.evaluate:
        fail("--resume and --evaluate exclude each other")
    if args.resume or args.evaluate:
        # Read the flags once more: those that are not given become the checkpoint's, not the defaults
        checkpoint = load_checkpoint(args.evaluate or args.resume)
        args = tyro.cli(Args, args=argv, default=checkpoint["args"])
    counts = ("num_epochs", "steps_per_epoch", "batch_size", "baseline_instances")  # from 1
    shares = ("baseline_level",)  # up to 1
    for name, value in vars(args).items():
        if value == "":
            fail(f"--{name.replace('_', '-')} is empty, perhaps because a variable of the shell is not set")
        if type(value) not in (int, float):  # a bool is neither
            continue
        least = 1 if name in counts else 0
        most = 1 if name in shares else 1e30
        if not least <= value <= most:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be from {least} to {most}")
    if args.batch_size % WORLD_SIZE:
        fail(f"--batch-size ({args.batch_size}) must be divisible by the number of processes ({WORLD_SIZE})")
    if args.baseline_instances < 2 * WORLD_SIZE:
        fail(f"--baseline-instances ({args.baseline_instances}) must be at least 2 for each process")
    if args.solve and not (args.evaluate and args.data):
        fail("--solve needs --evaluate and --data")
    if args.evaluate and RANK > 0:
        return None  # process 0 does it
    run = Run(args, Path(args.train_path or args.env_id).stem, checkpoint)
    try:
        train(args, run)
    except KeyboardInterrupt:
        run.say_how_to_resume()
        sys.exit(130)
    return None if args.evaluate else run.best_score


if __name__ == "__main__":
    main()
    if RANK > 0:
        sys.stdout.flush()
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
