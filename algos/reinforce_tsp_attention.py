"""The attention model for the travelling salesman problem (TSP), trained by REINFORCE, in one file.

Papers: Kool et al. 2019, arXiv:1803.08475 (model, baseline), and Kwon et al. 2020, arXiv:2010.16011 (POMO).

    python reinforce_tsp_attention.py                       # learns 20 nodes in minutes on one CPU core
    python reinforce_tsp_attention.py --baseline rollout --optimizer adam --learning-rate 1e-4  # Kool et al.
    torchrun --nproc-per-node 2 reinforce_tsp_attention.py  # two GPUs, or with --no-cuda two CPU processes
    python reinforce_tsp_attention.py --evaluate runs/NAME/best.pt --data my_instances.txt --solve my_tours

Equations, numbered as by Kool et al.:
    (1)  p(pi | s) = prod_t p(pi_t | s, pi_1 ... pi_{t-1})
    (2)  h^_i   = BN(h_i + MHA_i(h_1 ... h_N)), then (3) h_i = BN(h^_i + FF(h^_i)), in each of three layers
    (4)  h_c    = [mean of h, h of the last node, h of the first node]; v^l and v^f while the tour is empty
    (5)  q      = W^Q h_c,  k_i = W^K h_i,  v_i = W^V h_i, for each head
    (6)  u_j    = q . k_j / sqrt(d), or -inf if j has been visited; the glimpse is g = sum_j softmax(u)_j v_j
    (7)  u_j    = C tanh(W^O g . k_j / sqrt(D)), or -inf if j has been visited, with other keys and C = 10
    (8)  p(pi_t = j | s, pi_1 ... pi_{t-1}) = softmax(u)_j
    (9)  grad L = E[ (L(pi) - b(s)) grad log p(pi | s) ]
A training step samples tours without gradient. One pass with gradient then gives eq. 1 for whole tours.
Unlike in POMO, the first node is learned. Unlike in both papers, inputs are scaled, learning rates decay,
and Muon trains most matrices.
Shapes: B instances (M in a file), N nodes, P tours each, T steps, Q = P T, D embedding, H heads, d = D / H.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "numpy", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import math
import os
import random
import re
import sys
import time
from collections import namedtuple
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # in this repository, envs_shared is there
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
METRICS = ("policy_loss", "tour_length", "baseline_length", "grad_norm")  # of an update, in its order
DECODINGS = ("greedy", "multistart", "multistart_x8")  # ways to build tours; the first selects best.pt
# On one GPU, record the update once an epoch; replaying it saves CPU overhead. Set it to False for edits that need
# the host in between, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
POINT_DIM = 2  # coordinates x and y of a node
EMBED_DIM = 128  # D
NUM_HEADS = 8  # H. Both divisions by 4 below are by sqrt(d) = sqrt(D / H): change them together
make_map = partial(nn.Linear, EMBED_DIM, EMBED_DIM, bias=False)
# Whether this CPU multiplies bfloat16 fast; GPUs do
CPU_HAS_BFLOAT16 = torch.cpu.get_capabilities().get("avx512_bf16")

# What the decoder needs. Row i of first_queries and last_queries [B, N + 1, D] is what node i adds to q of eq. 5
# as the first or the last node of a tour; row N is what v^f or v^l adds while the tour is empty. Rows of
# first_queries include the share of the mean of h. k and v [B, H, N, d] are those of eq. 6, and logit_k [B, N, D]
# is k of eq. 7 times W^O
Encoded = namedtuple("Encoded", "first_queries last_queries k v logit_k")
# Instances to evaluate on: points [M, N, 2] in float64, reference tours [M, N] or None, and a function that
# measures tours, such as tour_length
Instances = namedtuple("Instances", "points tours measure")


@dataclass
class Args:
    """Attention model and REINFORCE on random instances of the TSP, or on those of a file."""

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
    eval_interval: int = 0  # epochs between evaluations and checkpoints (0: at most ten a run)
    eval_episodes: int = 1000  # random instances per evaluation without --data (0: only with --evaluate)
    env_id: str = "tsp20-uniform"  # random instances: tspN-uniform (unit square) or tspN-gaussian, of N nodes
    train_path: str | None = None  # train on this file instead; evaluations are still on --data or --env-id
    data: str | None = None  # evaluate on this file: ML4CO text, or .tsp with envs_shared/tsplib.py
    solve: str | None = None  # with --evaluate and --data: new folder to write the shortest tours to
    num_epochs: int = 35  # epochs; after each one, --baseline rollout may replace its baseline policy
    steps_per_epoch: int = 100  # gradient steps per epoch
    batch_size: int = 32  # instances B of a gradient step, in total across processes
    baseline: Literal["pomo", "rollout"] = "pomo"  # b(s): mean of N tours, or a baseline policy's greedy tour
    baseline_instances: int = 10_000  # rollout: instances of the t-test below; use 1,000 or more
    baseline_level: float = 0.05  # rollout: t-test's level for a new baseline policy (0.5: if any better)
    optimizer: Literal["muon", "adam"] = "muon"  # for the matrices that map embeddings; Adam trains the rest
    learning_rate: float = 1e-3  # Adam learning rate; Muon's steps have a root mean square of 0.4 times it
    anneal_lr: bool = True  # lower the learning rates to zero along a half cosine
    weight_decay: float = 0.0  # decoupled weight decay (AdamW) of the parameters that Adam trains
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm (1e9: never)


# ---- Networks ----------------------------------------------------------------------------------------------
def split_heads(x):
    """Split projected embeddings [B, N, D] into heads [B, H, N, d]."""
    return x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2).contiguous()


def attend(q, k, v, log_mask=0.0):
    """Return attention [B, Q, D] of queries [B, Q, D] to keys and values [B, H, N, d], before W^O."""
    u = (split_heads(q) @ k.mT).add_(log_mask)  # [B, H, Q, N]
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
        # Keys are divided by 4 = sqrt(d) of eq. 6, instead of u
        k = split_heads(self.project_k(h) / 4)  # [B, H, N, d]
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
        self.placeholders = nn.Parameter(torch.empty(2, EMBED_DIM).uniform_(-1, 1))  # v^f and v^l

    def forward(self, points):
        """Encode points [B, N, 2] in any unit; projects each node once instead of at each decoding step."""
        # Move and scale each instance into the unit square
        offset = points - points.amin(1, True)
        size = offset.amax((1, 2), True).clamp(min=1e-30)  # of points that coincide it is 0
        h = self.layers(self.embed((offset / size).float()))  # [B, N, D]
        # Tours without nodes have the placeholders as node N, [B, N + 1, D]: v is v^f, then v^l
        first, last = (torch.cat((h, v.expand(len(h), 1, -1)), 1) for v in self.placeholders)
        # Keys and values of the glimpse, [B, H, N, d]; keys are divided by sqrt(d)
        k = split_heads(self.project_k(h) / 4)
        v = split_heads(self.project_v(h))
        # W^O is applied to the keys, since there are fewer of them: (W^O g) . k_j = g . (k_j W^O)
        logit_k = self.project_logit_k(h) @ self.project_out.weight / EMBED_DIM**0.5  # [B, N, D]
        first_queries = self.project_graph(h.mean(1, True)) + self.project_first(first)
        return Encoded(first_queries, self.project_last(last), k, v, logit_k)


def decode(encoded, first, last, log_mask):
    """Return u [B, P, T, N] of eq. 7, given first and last nodes [B, P, 1 or T] and log_mask [B, P, T, N]."""
    # Pick the queries of nodes from one table of all instances, in which node i of instance b is row
    # b (N + 1) + i. A row is picked often; the backward pass of `embedding`, which adds up its gradients, is
    # then several times as fast as that of `gather`
    row_offset = torch.arange(len(first), device=first.device).view(-1, 1, 1) * encoded.first_queries.shape[1]
    # [B, P, 1 or T, D] and [B, P, T, D]
    first_query = nn.functional.embedding(first + row_offset, encoded.first_queries.flatten(0, 1))
    last_query = nn.functional.embedding(last + row_offset, encoded.last_queries.flatten(0, 1))
    q = (first_query + last_query).flatten(1, 2)  # eq. 4, 5, [B, Q, D]
    log_mask = log_mask.flatten(1, 2)  # [B, Q, N]
    glimpse = attend(q, encoded.k, encoded.v, log_mask.unsqueeze(1))  # eq. 6, [B, Q, D]
    logits = 10 * torch.bmm(glimpse, encoded.logit_k.transpose(1, 2)).tanh() + log_mask  # eq. 7
    return logits.unflatten(1, last.shape[1:])  # [B, Q, N] to [B, P, T, N]


# ---- Storage -----------------------------------------------------------------------------------------------
def draw_points(env_id, num_instances, stored=None):
    """Draw points [B, N, 2]: new random ones, or random rows of a file's instances [M, N, 2]."""
    if stored is not None:
        return stored[torch.randint(len(stored), (num_instances,))]
    match = re.fullmatch(r"tsp([3-9]|[1-9]\d+)-(uniform|gaussian)", env_id)
    if not match:
        fail(f"--env-id {env_id}: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes")
    draw = torch.rand if match[2] == "uniform" else torch.randn
    return draw(num_instances, int(match[1]), POINT_DIM)


def parse_instance(line, place):
    """Parse a line into points [N, 2] and a tour, a list of N nodes from 0 or an empty one; exits if invalid."""
    coordinates, _, nodes = line.partition("output")
    try:
        points = np.array(coordinates.split(), float).reshape(-1, POINT_DIM)
        tour = [int(node) - 1 for node in nodes.split()]
    except ValueError:
        fail(f"{place}: must be `x y x y x y`, and may go on `output 1 3 2 1`, a tour of nodes from 1")
    if len(points) < 3 or not abs(points).max() < 1e100:
        fail(f"{place}: must have 3 or more nodes with finite coordinates, `x y x y x y`")
    if tour and (sorted(tour[1:]) != list(range(len(points))) or tour[0] != tour[-1]):
        fail(f"{place}: the tour must visit each node once and return to its first one, `output 1 3 2 1`")
    return points, tour[:-1]


def read_instances(path):
    """Read instances of equal size from ML4CO text, one a line, or one from a .tsp file; exits if unfit."""
    try:
        if path.lower().endswith(".tsp"):
            from envs_shared.tsplib import read_tsplib

            return Instances(*read_tsplib(path))
        lines = Path(path).read_text("utf-8-sig", "replace").splitlines()
    except ModuleNotFoundError:
        fail(f"{path}: needs envs_shared/tsplib.py; copy it into a folder envs_shared beside this script")
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except ValueError as error:  # of read_tsplib, with path and line
        fail(f"{error}")
    # One instance a line; blank lines do not count
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(parse_instance(line, f"{path}:{number}"))
            # Compare the numbers of nodes, and the lengths of tours, which are 0 without one
            if [*map(len, rows[-1])] != [*map(len, rows[0])]:
                fail(f"{path}:{number}: all lines must have as many nodes, and all or none of them a tour")
    if not rows:
        fail(f"{path}: is empty; each line must be an instance, `x y x y x y output 1 3 2 1`")
    points, tours = zip(*rows)
    return Instances(torch.tensor(np.stack(points)), torch.tensor(tours) if tours[0] else None, tour_length)


# ---- REINFORCE ---------------------------------------------------------------------------------------------
def tour_length(points, tours):
    """Return lengths [B, P] of closed tours [B, P, N] through points [B, N, 2]."""
    stops = points.unsqueeze(1).take_along_dim(tours.unsqueeze(-1), 2)  # [B, P, N, 2]
    return (stops - stops.roll(-1, 2)).norm(dim=-1).sum(-1)


@torch.no_grad()
def construct_tours(points, encoded, multistart=False, sample=False):
    """Build a tour of points [B, N, 2], or one from each node; returns tours [B, P, N], lengths [B, P].

    Nodes are drawn from eq. 8 if `sample`; else each is the most likely one.
    """
    num_nodes = points.shape[1]
    num_tours = num_nodes if multistart else 1
    # The tours so far: log_mask is 0 for open nodes and -inf for visited ones. Before there is a first and a
    # last node, both are N, the row of the placeholders
    log_mask = encoded.logit_k.new_zeros(len(points), num_tours, 1, num_nodes)  # [B, P, 1, N]
    first = last = torch.full_like(log_mask[..., 0], num_nodes, dtype=torch.long)  # [B, P, 1]
    nodes = []  # [B, P, 1] each
    if multistart:
        nodes.append(torch.ones_like(first).cumsum(1) - 1)  # 0 ... N - 1: tour j begins at node j
    while len(nodes) < num_nodes:
        if nodes:
            first = nodes[0]
            last = nodes[-1]
            log_mask.scatter_(-1, last.unsqueeze(-1), -torch.inf)
        logits = decode(encoded, first, last, log_mask)  # [B, P, 1, N]
        if sample:
            # Draw from eq. 8: take the first open node whose cumulated probability reaches a random threshold
            # in (0, largest sum]. `multinomial` would make the host wait. Visited nodes have probability 0
            # and would repeat the sum before them; they get -inf, so that no rounding can ever select them
            cumulated = logits.softmax(-1).cumsum(-1) + log_mask
            largest = cumulated.amax(-1, True)
            threshold = largest * (1 - torch.rand_like(largest))
            node = (cumulated >= threshold).int().argmax(-1)  # the first one
        else:
            node = logits.argmax(-1)
        nodes.append(node)
    tours = torch.cat(nodes, -1)  # [B, P, N]
    return tours, tour_length(points, tours)


def score_tours(encoded, tours):
    """Return log p [B, P] of tours [B, P, N] given their first nodes, and log p [B, N] of first nodes."""
    num_nodes = tours.shape[2]
    visit_time = tours.argsort(-1)  # [B, P, N], the inverse permutation
    # Step t = 1 ... N - 2 draws a node that is open then. The first node is scored below, the last is forced
    steps = torch.arange(1, num_nodes - 1, device=tours.device)  # [T]
    is_open = visit_time.unsqueeze(2) >= steps.unsqueeze(1)  # [B, P, T, N]
    log_mask = torch.where(is_open, 0.0, -torch.inf)
    log_probs = decode(encoded, tours[:, :, :1], tours[:, :, :-2], log_mask).log_softmax(-1)  # eq. 8
    log_likelihood = log_probs.gather(-1, tours[:, :, 1:-1].unsqueeze(-1)).sum((2, 3))  # eq. 1, [B, P]
    # One empty tour of each instance, without first and last node, and with all nodes open
    nowhere = torch.full_like(tours[:, :1, :1], num_nodes)
    start_logits = decode(encoded, nowhere, nowhere, torch.zeros_like(log_mask[:, :1, :1]))  # [B, 1, 1, N]
    return log_likelihood, start_logits.flatten(1).log_softmax(-1)


def compute_loss(agent, baseline_policy, points):
    """Return a loss with the gradient of eq. 9, and the mean lengths of sampled tours and of the baseline.

    Without `baseline_policy`, the baseline is that of POMO, and the loss also trains the first node.
    """
    is_pomo = baseline_policy is None
    encoded = agent(points)
    tours, lengths = construct_tours(points, encoded, is_pomo, sample=True)  # [B, P, N], [B, P]
    log_likelihood, start_log_probs = score_tours(encoded, tours)  # [B, P], [B, N]
    if is_pomo:
        baseline = lengths.mean(1, True)  # Kwon et al., eq. 3
    else:
        _, baseline = construct_tours(points, baseline_policy(points))  # greedy
        log_likelihood = log_likelihood + start_log_probs.gather(1, tours[:, :, 0])
    advantages = lengths - baseline
    loss = (log_likelihood * advantages).mean()
    if is_pomo:
        # Tour j begins at node j, so all first nodes are tried and none is drawn. Their expected advantage,
        # sum_j p(j) A_j, has an exact gradient without a log-likelihood. The sum is N times a mean
        loss = loss + (lengths.shape[1] * start_log_probs.exp() * advantages).mean()
    return loss, lengths.mean(), baseline.mean()


def update_weights(agent, baseline_policy, optimizers, args, points):
    """Take one gradient step on points [B, N, 2], and return METRICS [4].

    Shapes are fixed and the host never waits, so that a CUDA graph can record it.
    """
    loss, length, baseline_length = compute_loss(agent, baseline_policy, points)
    agent.zero_grad()
    loss.backward()
    average_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    # One number for each name in METRICS; numbers without a name are not logged
    return average(torch.stack((loss.detach(), length, baseline_length, grad_norm)))


@torch.no_grad()
def is_better(agent, baseline_policy, points, level):
    """Test if the policy's greedy tours of points [n, N, 2] are shorter, by a one-sided paired t-test."""
    agent.eval()
    differences = []
    for part in points.split(1000):
        lengths = [construct_tours(part, policy(part))[1] for policy in (agent, baseline_policy)]
        differences.append(lengths[0] - lengths[1])
    d = torch.cat(differences)  # [n, 1]
    # The statistics t of W processes have variance one each, and so has their mean times sqrt(W)
    t = average(d.mean() / d.std() * len(d) ** 0.5) * WORLD_SIZE**0.5
    return torch.special.ndtr(t) < level  # normal instead of t distribution, since n is in the thousands


def orthogonalize(x):
    """Approximate U V^T of x = U S V^T [M, m, n] by five Newton-Schulz steps, in bfloat16 if it is fast."""
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    y = x.bfloat16() if x.is_cuda or CPU_HAS_BFLOAT16 else x
    y = nn.functional.normalize(y.flatten(1)).view_as(y)
    for _ in range(5):
        # y becomes 3.4445 y + (-4.7750 G + 2.0315 G G) y, where G = y y^T
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Steps along orthogonalized momentum (Jordan et al. 2024); batches matrices of equal shape."""

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
            # The root mean square of a step is 0.4 times the learning rate, twice that of match_rms_adamw in
            # torch's Muon
            step_size = group["lr"] * 0.4 * max(shape) ** 0.5
            for p, update in zip(params, orthogonalize(torch.stack(updates))):
                p.sub_(update, alpha=step_size)


# ---- Evaluation --------------------------------------------------------------------------------------------
def apply_symmetries(points):
    """Return the eight images [B, N, 2] of points [B, N, 2] under the symmetries of the square."""
    return [x * x.new_tensor((a, b)) for x in (points, points.flip(-1)) for a in (1, -1) for b in (1, -1)]


@torch.no_grad()
def evaluate(agent, instances, device, decodings=DECODINGS):
    """Score the shortest tours that each decoding finds; also returns the last decoding's tours [M, N]."""
    points, references, measure = instances
    agent.eval()
    scores = {}
    # Parts of bounded memory: multi-start decoding masks N nodes in N tours of each instance
    parts = points.to(device).split(2**18 // points.shape[1] ** 2 + 1)
    for decoding in decodings:
        found = []
        for part in tqdm(parts, leave=False, delay=2):
            # P tours of each instance: 1, N or 8 N
            images = apply_symmetries(part) if decoding == "multistart_x8" else [part]
            tours = torch.cat([construct_tours(x, agent(x), decoding != "greedy")[0] for x in images], 1)
            shortest = measure(part, tours).argmin(1)  # [B], of P tours
            found.append(tours[range(len(part)), shortest].cpu())
        tours = torch.cat(found)  # [M, N]
        lengths = measure(points, tours.unsqueeze(1))  # [M, 1]
        scores[f"eval/{decoding}_length"] = lengths.mean().item()
        if references is not None:
            gaps = 100 * (lengths / measure(points, references.unsqueeze(1)) - 1)  # in percent
            scores[f"eval/{decoding}_gap"] = gaps.mean().item()
            scores[f"eval/{decoding}_gap_std"] = gaps.std(correction=0).item()
    return scores, tours


def write_tours(args, instances, tours):
    """Write tours [M, N] to the new folder --solve, in the format of --data, and their lengths."""
    path = Path(args.solve, Path(args.data).name)
    # Nodes count from 1, and tours return to the first one
    text = ""
    for points, tour in zip(instances.points.flatten(1).tolist(), (tours + 1).tolist()):
        closed_tour = [*tour, tour[0]]
        text += f"{' '.join(map(str, points))} output {' '.join(map(str, closed_tour))}\n"
    if path.suffix.lower() == ".tsp":
        from envs_shared.tsplib import format_tour

        path = path.with_suffix(".tour")
        text = format_tour(path.stem, tours[0])
    path.write_text(text)
    lengths = instances.measure(instances.points, tours.unsqueeze(1))  # [M, 1]
    np.savetxt(f"{path}.lengths", lengths, "%.10g")


# ---- Training ----------------------------------------------------------------------------------------------
@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0  # epochs
    step: int = 0  # instances trained on, in total across processes
    eval_steps: int = 0  # instances of evaluations
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # gap or length of best.pt, None before the first evaluation
    last_score: float | None = None  # gap or length of the newest policy, None if it was not evaluated
    baseline_updates: int = 0  # times that the policy became that of the rollout baseline


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


def set_up_device(args):
    """Set the thread count, select the device and, under torchrun, join the process group."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # more threads slow small networks down
    torch.backends.cudnn.deterministic = args.torch_deterministic
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if use_cuda else "cpu")
    if use_cuda:
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default stream cannot be recorded in a graph
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("nccl" if use_cuda else "gloo")
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
    """Make the policy, the optimizers and the policy of the rollout baseline, from `checkpoint` if given."""
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = AttentionModel().to(device)
    # Muon is for the matrices that map embeddings to embeddings: those with `project` or `ff` anywhere in their
    # names, which counts for your own layers too. Adam trains the rest
    matrices = []
    others = []
    for name, p in agent.named_parameters():
        is_map = p.ndim == 2 and ("project" in name or "ff" in name)
        (matrices if is_map and args.optimizer == "muon" else others).append(p)
    parts = {
        "agent": agent,
        "optimizer": torch.optim.AdamW(others, fused=True),
        "muon": Muon([{"params": matrices}], {}),
    }
    if args.baseline == "rollout":
        parts["baseline_policy"] = deepcopy(agent).eval().requires_grad_(False)
    if checkpoint:
        # Load each part that the checkpoint has. If it has no baseline policy, as after a POMO run, the agent's
        # weights take its place. Trained networks of the repository have no states of optimizers, which then
        # start from scratch
        states = {"baseline_policy": checkpoint["agent"]} | checkpoint
        try:
            for name in parts.keys() & states:
                parts[name].load_state_dict(states[name])
        except (KeyError, RuntimeError, ValueError):
            fail(f"{args.evaluate or args.resume}: does not fit --optimizer or the network of this file")
    return parts


def describe_instances(args):
    """Say what policies are scored on."""
    return args.data or f"{args.eval_episodes} random instances of {args.env_id}, seed {args.seed}"


def train(args, run_path, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate, only score the checkpoint.

    Random numbers are seeded by --seed and 0 for the weights, 1 for training (and again in each epoch, by its
    number), 2 for the instances of evaluations during training, 3 for those of --evaluate.
    """
    # Set up
    device = set_up_device(args)
    torch.set_float32_matmul_precision("medium")  # TF32 on GPUs; bfloat16 on CPUs that multiply it fast
    torch.empty(8_000_000)  # freed at once; glibc then keeps memory freed later: a step takes a fifth less
    seed_everything(args.seed, 3 if args.evaluate else 2)  # other instances than those that selected best.pt
    instances = Instances(draw_points(args.env_id, args.eval_episodes or 1000).double(), None, tour_length)
    if args.data:
        instances = read_instances(args.data)
    parts = set_up(args, checkpoint, device)
    agent = parts["agent"]
    optimizers = parts["optimizer"], parts["muon"]
    baseline_policy = parts.get("baseline_policy")
    # Evaluate only
    if args.evaluate:
        if args.solve:
            try:
                os.makedirs(args.solve)
            except OSError as error:
                fail(f"--solve {args.solve}: must be a new folder ({error.strerror})")
        scores, tours = evaluate(agent, instances, device)
        print({name: round(score, 4) for name, score in scores.items()})
        if args.solve:
            write_tours(args, instances, tours)
        return
    # Open the run folder
    stored = read_instances(args.train_path).points.float() if args.train_path else None
    progress = checkpoint["progress"] if checkpoint else Progress()
    save = partial(save_checkpoint, run_path, args, progress, parts)
    if RANK == 0:
        writer = open_run(run_path, args, progress.step)
        scored_on = describe_instances(args)
        print(f"{run_path}: on {device}, epoch {progress.iteration}, scored on {scored_on}")
        if not checkpoint:
            save("checkpoint.pt")
        elif not (run_path / "best.pt").exists() or scored_on != describe_instances(checkpoint["args"]):
            progress.best_score = progress.last_score = None  # the next evaluation is the best one
        if progress.iteration >= args.num_epochs:
            print(f"{run_path}: raise --num-epochs to train on")

    def score_policy(decodings):
        """Evaluate, log the scores, and keep the policy in best.pt unless an earlier one was better."""
        scores, _ = evaluate(agent, instances, device, decodings)
        for name, score in scores.items():
            writer.add_scalar(name, score, progress.step)
        progress.eval_steps += len(instances.points)
        progress.last_score = scores.get("eval/greedy_gap", scores["eval/greedy_length"])
        if progress.best_score is None or progress.last_score <= progress.best_score:
            progress.best_score = progress.last_score
            save("best.pt")
        save("checkpoint.pt")

    use_graphs = CUDA_GRAPHS and device.type == "cuda" and WORLD_SIZE == 1
    epoch_size = args.batch_size * args.steps_per_epoch
    eval_interval = args.eval_interval or args.num_epochs // 10 + 1
    saved_at = time.time()
    with tqdm(
        total=args.num_epochs * epoch_size,
        initial=progress.step,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # seconds
        disable=RANK > 0,
    ) as bar:
        while progress.iteration < args.num_epochs:
            start = time.time()
            cpu_start = time.process_time()
            seed_everything(args.seed, 1, progress.iteration, RANK)
            progress.last_score = None  # the policy that this epoch makes has no score yet
            agent.train()

            # Learning rate: it falls to zero along a half cosine. Each optimizer has one group of parameters; the
            # rates of a group that you add must be set here too
            share = progress.iteration / args.num_epochs if args.anneal_lr else 0
            lr = args.learning_rate / 2 * (1 + math.cos(math.pi * share))
            for optimizer in optimizers:
                optimizer.param_groups[0].update(lr=lr, weight_decay=args.weight_decay, capturable=use_graphs)

            # Gradient steps, each on new instances. A recording freezes the learning rate, so each epoch
            # makes its own. It does so after a step, as the optimizers create their states in the first one
            update = partial(update_weights, agent, baseline_policy, optimizers, args)
            metrics = 0.0  # means over the epoch, [4]
            for i in range(args.steps_per_epoch):
                points = draw_points(args.env_id, args.batch_size // WORLD_SIZE, stored).to(device)
                metrics += update(points) / args.steps_per_epoch
                if use_graphs and i == 0:
                    update = capture(update, points)
                bar.update(args.batch_size)
            # Statistics of batch norms: means over processes
            for buffer in agent.buffers():
                if buffer.is_floating_point():
                    average(buffer)

            # Rollout baseline: the policy replaces the baseline policy if it is significantly better
            if baseline_policy:
                points = draw_points(args.env_id, args.baseline_instances // WORLD_SIZE, stored).to(device)
                if is_better(agent, baseline_policy, points, args.baseline_level):
                    baseline_policy.load_state_dict(agent.state_dict())
                    progress.baseline_updates += 1
            progress.iteration += 1
            progress.step += epoch_size
            progress.cpu_seconds += time.process_time() - cpu_start

            # Log, in process 0 alone: metrics are of all processes. The rest of the loop must not call `average`,
            # since the other processes do not get there
            if RANK > 0:
                continue
            if not metrics.isfinite().all():
                fail(f"{args.env_id}: losses are not finite at instance {progress.step}")
            scalars = {f"losses/{name}": x for name, x in zip(METRICS, metrics.tolist())}
            scalars["charts/baseline_updates"] = progress.baseline_updates
            scalars["charts/cpu_seconds"] = progress.cpu_seconds
            scalars["charts/SPS"] = epoch_size / (time.time() - start)
            scalars["charts/learning_rate"] = lr
            for name, value in scalars.items():
                writer.add_scalar(name, value, progress.step)

            # Save, before an evaluation that might fail
            is_last = progress.iteration >= args.num_epochs
            is_due = is_last or progress.iteration % eval_interval == 0
            if is_due or time.time() - saved_at > 600:
                writer.flush()
                save("checkpoint.pt")
                saved_at = time.time()

            # Evaluate. Without --eval-interval, on at most a fifth as many instances as training
            num_evaluated = progress.eval_steps + len(instances.points)
            is_affordable = args.eval_interval or num_evaluated <= progress.step / 5
            if is_due and is_affordable and args.eval_episodes and not is_last:
                score_policy(DECODINGS[:1])
                bar.set_postfix_str(f"greedy {progress.last_score:.3f}", refresh=False)

    # Evaluate the last policy
    if RANK > 0:
        return
    # None: the last policy is not evaluated yet, or there is no best.pt for these instances
    if args.eval_episodes and None in (progress.best_score, progress.last_score):
        score_policy(DECODINGS)
    writer.close()
    scores = "not evaluated"
    if progress.last_score is not None:
        scores = (
            f"greedy score of best.pt {progress.best_score:.3f}, of the last policy {progress.last_score:.3f}"
        )
    print(f"{run_path}: {scores}")


def main(argv=None):
    """Read the command line; flags override the settings of a checkpoint."""
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    path = args.evaluate or args.resume
    if path:
        checkpoint = load_checkpoint(path)
        args = tyro.cli(Args, args=argv, default=checkpoint["args"])
    counts = "num_epochs steps_per_epoch batch_size baseline_instances".split()
    # Settings that are numbers must be at least 0, and these at least 1
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if type(value) in (int, float) and not value >= least:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be at least {least}")
    if args.batch_size % WORLD_SIZE:
        fail(f"--batch-size ({args.batch_size}) must be divisible by the number of processes ({WORLD_SIZE})")
    if args.solve and not (args.evaluate and args.data and WORLD_SIZE == 1):
        fail("--solve needs --evaluate and --data, and one process")
    run_name = (
        f"{Path(args.train_path or args.env_id).stem}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    )
    run_path = Path(path).parent if path else Path(args.run_dir, run_name)
    try:
        train(args, run_path, checkpoint)
    except KeyboardInterrupt:
        if RANK == 0 and not args.evaluate and (run_path / "checkpoint.pt").exists():
            print(
                f"{run_path}: interrupted; to resume: python {sys.argv[0]} --resume {run_path}/checkpoint.pt",
                file=sys.stderr,
            )
        sys.exit(130)


if __name__ == "__main__":
    main()
    if RANK > 0:
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
