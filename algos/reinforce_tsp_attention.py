"""The attention model for the travelling salesman problem (TSP), trained by REINFORCE, in one file.

Papers: Kool, van Hoof, Welling 2019, "Attention, Learn to Solve Routing Problems!" (arXiv:1803.08475);
Kwon et al. 2020, "POMO: Policy Optimization with Multiple Optima" (arXiv:2010.16011).

    python algos/reinforce_tsp_attention.py                # first run: 20 nodes, 3 to 4 minutes on one core
    python algos/reinforce_tsp_attention.py --env-id tsp50-uniform --batch-size 512 --num-epochs 200   # full size, GPU
    torchrun --nproc-per-node 2 algos/reinforce_tsp_attention.py   # several GPUs (or CPU processes)
    python algos/reinforce_tsp_attention.py --evaluate runs/.../checkpoint.pt --data my.txt --solve tours.txt

What is computed, numbered as in Kool et al.:

    (1)   p(pi | s) = prod_t p(pi_t | s, pi_1 ... pi_{t-1})
    (2,3) h = BN(h + MHA(h)), h = BN(h + FF(h)), three times: the encoder
    (4-6) g = MHA from [mean of h, h of the first node, h of the last node] to the unvisited nodes: the glimpse
    (7,8) u_j = C tanh(g . k_j / sqrt(D)), -inf where node j has been visited; p(pi_t = j | s, ...) = softmax(u)_j
    (9)   grad L = E[ (L(pi) - b(s)) grad log p(pi | s) ], with the baseline b(s) of --baseline

Shapes: B instances, N nodes, P tours of each instance, D embedding, H heads, d = D / H.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "gymnasium>=1.4", "tyro>=0.9", "tensorboard>=2.18",
#     "wandb>=0.19", "tqdm>=4.66", "matplotlib>=3.9", "pillow>=10.0",
# ]
# ///

import copy
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
from typing import Literal, NamedTuple, NoReturn

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: a second, kept out of the timings
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]  # for envs_shared, and for your own environments
from envs_shared.tsp_tasks import instances as tsp

SCRIPT = "reinforce_tsp_attention"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


@dataclass
class Args:
    """Attention model and REINFORCE on random TSP instances, or on those of a file."""

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
    env_id: str = "tsp20-uniform"
    """instances to train on: tspN-uniform (in the unit square) or tspN-gaussian (standard normal), with N nodes"""
    train_path: str | None = None
    """train on the instances of this file, in units of the largest, instead of fresh ones at every step"""
    data: tuple[str, ...] = ()
    """files to evaluate on: .tsp (TSPLIB), else ml4co text; without, --eval-episodes instances of --env-id"""
    solve: str | None = None
    """with --evaluate and --data: write the best tours found to this file, in the ml4co text format"""

    # Algorithm
    num_epochs: int = 35
    """epochs; an epoch is the unit of validation, of checkpoints and of the rollout baseline's update"""
    steps_per_epoch: int = 100
    """gradient steps of an epoch"""
    batch_size: int = 32
    """instances B of a gradient step, over all processes"""
    learning_rate: float = 5e-4
    """Adam's learning rate"""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """keep the learning rate, or lower it to zero along half a cosine"""
    lr_drop: float = 0.0
    """share of the steps, at the end, that are taken at a tenth of the learning rate"""
    weight_decay: float = 1e-6
    """Adam's weight decay (L2)"""
    max_grad_norm: float = 1.0
    """largest global norm of the gradient"""
    baseline: Literal["pomo", "rollout", "exponential"] = "pomo"
    """b(s) of eq. 9: mean over one tour from every node, greedy tour of the best policy so far, or running mean"""
    baseline_update: Literal["t-test", "mean"] = "t-test"
    """rollout: the policy becomes the baseline once it is better by a paired t-test, or by its mean alone"""
    baseline_instances: int = 10_000
    """rollout: instances on which policy and baseline are compared after each epoch"""
    norm: Literal["batch", "instance"] = "batch"
    """normalization in the encoder"""
    num_layers: int = 3
    """layers of the encoder"""
    num_samples: int = 100
    """evaluation: tours of each instance that are sampled, of which the best counts"""
    bf16: bool = False
    """run the network in bfloat16 (autocast), for CUDA"""


# ---- Networks --------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Each feature of the rows [B * N, D] to mean 0, deviation 1: over the batch, or over the nodes of an instance."""

    def __init__(self, dim: int, over: str):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        if over == "batch":  # outside training by these running statistics
            self.register_buffer("running_mean", torch.zeros(dim))
            self.register_buffer("running_var", torch.ones(dim))
        self.over_batch = over == "batch"

    def forward(self, h: torch.Tensor, num_nodes: int) -> torch.Tensor:
        if self.over_batch:
            return F.batch_norm(h, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        per_instance = h.unflatten(0, (-1, num_nodes)).transpose(1, 2)  # [B, D, N]
        return F.instance_norm(per_instance, None, None, self.weight, self.bias).transpose(1, 2).flatten(0, 1)


def split_heads(x: torch.Tensor, num_nodes: int, num_parts: int, num_heads: int) -> tuple[torch.Tensor, ...]:
    """The parts of projected embeddings [B * N, parts * D], each by heads: [B * H, N, d]."""
    x = x.view(-1, num_nodes, num_parts, num_heads, x.shape[1] // num_parts // num_heads).permute(2, 0, 3, 1, 4)
    return x.reshape(num_parts, -1, *x.shape[3:]).unbind()


class EncoderLayer(nn.Module):
    """Attention among the nodes and a feed-forward layer, each with a skip connection and a norm (eq. 2, 3)."""

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int, norm: str):
        super().__init__()
        self.num_heads = num_heads
        self.project_qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.project_out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.ff = nn.Sequential(nn.Linear(embed_dim, ff_dim), nn.ReLU(inplace=True), nn.Linear(ff_dim, embed_dim))
        self.norm1, self.norm2 = Norm(embed_dim, norm), Norm(embed_dim, norm)

    def forward(self, h: torch.Tensor, num_nodes: int) -> torch.Tensor:
        """Embeddings [B * N, D] to embeddings [B * N, D]."""
        q, k, v = split_heads(self.project_qkv(h), num_nodes, 3, self.num_heads)  # [B * H, N, d] each
        # Written out: torch's fused kernel for the CPU takes longer at these sizes
        attention = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[2])).softmax(-1)
        attended = torch.bmm(attention, v).unflatten(0, (-1, self.num_heads)).transpose(1, 2).reshape_as(h)
        h = self.norm1(h + self.project_out(attended), num_nodes)
        return self.norm2(h + self.ff(h), num_nodes)


class AttentionModel(nn.Module):
    """Encoder and decoder of Kool et al.; 708,608 parameters in the paper's size."""

    def __init__(self, norm: str = "batch", num_layers: int = 3, embed_dim=128, num_heads=8, ff_dim=512):
        super().__init__()
        self.num_heads = num_heads
        self.embed = nn.Linear(2, embed_dim)
        self.layers = nn.ModuleList([EncoderLayer(embed_dim, num_heads, ff_dim, norm) for _ in range(num_layers)])
        # Of each node: query terms as part of the graph, as first and as last node; glimpse key and value; logit key
        self.project_nodes = nn.Linear(embed_dim, 6 * embed_dim, bias=False)
        self.project_out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.placeholders = nn.Parameter(torch.empty(2, embed_dim, 1).uniform_(-1.0, 1.0))  # for first and last node

    def encode(self, points: torch.Tensor) -> torch.Tensor:
        """Embeddings [B * N, D] of points [B, N, 2] in any unit."""
        h = self.embed(scale_to_unit_square(points).to(self.embed.weight.dtype).flatten(0, 1))
        for layer in self.layers:
            h = layer(h, points.shape[1])
        return h

    def forward(self, points: torch.Tensor) -> "DecoderTables":
        """The decoder's tables for points [B, N, 2]."""
        num_instances, num_nodes, _ = points.shape
        h, embed_dim, num_heads = self.encode(points), self.placeholders.shape[1], self.num_heads
        projected, logit_key = self.project_nodes(h).split([5 * embed_dim, embed_dim], 1)
        graph, first, last, key, value = split_heads(projected, num_nodes, 5, num_heads)  # [B * H, N, d] each
        # The output projection is moved from the glimpses, which are many, to the logit keys
        (logit_key,) = split_heads(logit_key @ self.project_out.weight, num_nodes, 1, num_heads)
        graph = graph.mean(1, keepdim=True)  # [B * H, 1, d]
        w_context = self.project_nodes.weight[embed_dim : 3 * embed_dim].view(2, embed_dim, embed_dim)
        start = torch.bmm(w_context, self.placeholders).sum(0)  # in place of both nodes
        start = graph + start.view(num_heads, 1, -1).repeat(num_instances, 1, 1)
        scores = torch.bmm(torch.cat((start, graph + first, last), 1), key.transpose(1, 2)) / math.sqrt(key.shape[2])
        scores = scores.unflatten(0, (num_instances, num_heads)).transpose(1, 2).contiguous()
        values = torch.bmm(value, logit_key.transpose(1, 2)) / math.sqrt(embed_dim)
        return DecoderTables(scores, values.view(num_instances, -1, num_nodes))


def scale_to_unit_square(points: torch.Tensor) -> torch.Tensor:
    """Points [B, N, 2] moved and scaled, aspect kept, so that they just fit into the unit square."""
    offset = points - points.amin(1, keepdim=True)
    return offset / offset.amax((1, 2), keepdim=True).clamp(min=torch.finfo(points.dtype).tiny)


# ---- Storage ---------------------------------------------------------------------------------------------------------


class DecoderTables(NamedTuple):
    """All that the decoder needs of an instance, computed once.

    The query (eq. 4, 5) is a sum of a graph, a first-node and a last-node term, so its scores against the glimpse's
    keys are sums as well, and each term can be tabulated. From the attention weights on all is linear up to eq. 7, so
    values, output projection and logit keys merge into one matrix.
    """

    scores: torch.Tensor  # [B, 1 + 2 N, H, N] of graph and placeholders; graph and each first node; each last node
    values: torch.Tensor  # [B, H * N, N] from attention weights to the q . k_j / sqrt(D) of eq. 7


# ---- REINFORCE -------------------------------------------------------------------------------------------------------


def compute_logits(scores: torch.Tensor, bias: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """u of eq. 7, [B, Q, N] for Q queries of each instance, from glimpse scores [B, Q, H, N].

    bias [B, Q, N] is 0, and -inf where a node may not be visited; values [B, H * N, N] is a table.
    """
    attention = (scores + bias.unsqueeze(2)).softmax(-1)
    return torch.add(bias, torch.tanh(torch.bmm(attention.flatten(2), values)), alpha=10.0)


def sample_gumbel(*shape: int, device=None, generator=None) -> torch.Tensor:
    """Gumbel noise: argmax(logits + noise) is a sample of softmax(logits), without waiting for the device."""
    return -torch.empty(shape, device=device).exponential_(generator=generator).clamp_(min=1e-30).log()


@torch.no_grad()
def construct_tours(points, tables: DecoderTables, num_tours: int, starts=None, noise=None):
    """Build P = `num_tours` tours of each instance node by node: tours [B, P, N] and their lengths [B, P].

    They begin at `starts` [B, P] (None: where the policy chooses), and take the most likely node at each step, or with
    Gumbel `noise` [N, B, P, N] a sample of the policy.
    """
    env, num_nodes = tsp.TspEnv(), points.shape[1]
    state, reward, shape = env.reset(points, num_tours), None, (len(points), num_tours, *tables.scores.shape[2:])
    table = tables.scores.view(-1, tables.values.shape[1])  # [B * (1 + 2 N), H * N]
    rows = torch.arange(1, len(table), 1 + 2 * num_nodes, device=points.device).unsqueeze(1)  # [B, 1] of first node 0
    noises = [None] * num_nodes if noise is None else noise.unbind()
    for t in range(num_nodes):
        if t == 0 and starts is not None:
            node = starts
        elif t == num_nodes - 1:  # one is left
            node = state.log_mask.argmax(-1)
        else:
            if t == 1:
                context, rows = F.embedding(rows + node, table), rows + num_nodes  # [B, P, H * N]
            scores = context + F.embedding(rows + node, table) if t else table[rows - 1].expand(*shape[:2], -1)
            logits = compute_logits(scores.view(shape), state.log_mask, tables.values)
            node = (logits if noise is None else logits + noises[t]).argmax(-1)  # [B, P]
        state, reward, _ = env.step(node)
    return state.tours, -reward


def score_tours(tables: DecoderTables, tours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of all steps but the first of tours [B, P, N] at once (eq. 1), [B, P]; of each node as the first, [B, N].

    Each node but the last is left once, so the steps are taken in the order of the nodes left instead of in time. That
    needs no gathering: the scores of node i are row i of the table, and node j was open if it comes later than i.
    """
    num_nodes = tours.shape[-1]
    position, successor = torch.empty_like(tours), torch.empty_like(tours)
    position.scatter_(-1, tours, torch.arange(num_nodes, device=tours.device).expand_as(tours))
    successor.scatter_(-1, tours, tours.roll(-1, -1))
    is_end = position == num_nodes - 1  # [B, P, N]; nothing is chosen there
    is_open = (position.unsqueeze(-2) > position.unsqueeze(-1)) | is_end.unsqueeze(-1)  # [B, P, N, N]
    bias = is_open.log().flatten(1, 2)  # 0 or -inf
    start, first, last = tables.scores.split([1, num_nodes, num_nodes], 1)
    first = first.take_along_dim(tours[:, :, 0, None, None], 1)  # [B, P, H, N]
    scores = (first.unsqueeze(2) + last.unsqueeze(1)).flatten(1, 2)  # [B, P * N, H, N]
    log_probs = compute_logits(scores, bias, tables.values).log_softmax(-1)  # eq. 8
    log_probs = log_probs.view(is_open.shape).gather(-1, successor.unsqueeze(-1)).squeeze(-1)  # [B, P, N]
    start_logits = compute_logits(start, torch.zeros_like(start[:, :, 0]), tables.values)
    return log_probs.masked_fill(is_end, 0.0).sum(-1), start_logits.log_softmax(-1).squeeze(1)


def reinforce_loss(lengths, baseline, log_likelihood) -> torch.Tensor:
    """The mean over [B, P] whose gradient is eq. 9."""
    return ((lengths - baseline) * log_likelihood).mean()


def pomo_loss(lengths: torch.Tensor, log_likelihood: torch.Tensor, start_log_probs: torch.Tensor) -> torch.Tensor:
    """REINFORCE over one tour from every node, with their mean as the baseline (Kwon et al. eq. 2, 3).

    lengths and log_likelihood [B, N] are of the tours that begin at each node. Since all are there, the gradient of the
    expected length over the choice of the first node, start_log_probs [B, N], needs no sampling and is added.
    """
    mean = lengths.mean(1, keepdim=True)
    return reinforce_loss(lengths, mean, log_likelihood) + (start_log_probs.exp() * (lengths - mean)).sum(1).mean()


def t_test(differences: torch.Tensor) -> float:
    """p-value of the one-sided paired t-test that the mean of `differences` [n] is below zero; 1 if they do not vary.

    Student's tail is integrated numerically: with x = sqrt(n - 1) tan(phi) its density is a power of cos(phi).
    """
    x, dof = differences.double(), len(differences) - 1
    if not (std := x.std().item()) > 0:
        return 1.0
    t = -x.mean().item() / (std / math.sqrt(len(x)))
    low = math.atan(abs(t) / math.sqrt(dof))
    high = min(math.pi / 2, low + 40.0 / math.sqrt(dof))  # nothing is left beyond
    nodes, weights = np.polynomial.legendre.leggauss(200)
    cosines = np.cos((low + high) / 2 + (high - low) / 2 * nodes)
    log_constant = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - math.log(math.pi) / 2
    tail = math.exp(log_constant) * (high - low) / 2 * float(weights @ cosines ** (dof - 1))
    return tail if t > 0 else 1.0 - tail


def apply_symmetries(points: torch.Tensor) -> torch.Tensor:
    """The eight images of points [B, N, 2] under the symmetries of the square, [8 B, N, 2] (Kwon et al. table 1)."""
    x, y = points.unbind(-1)
    images = [(x, y), (y, x), (-x, y), (y, -x), (x, -y), (-y, x), (-x, -y), (-y, -x)]
    return torch.cat([torch.stack(image, -1) for image in images])


METRICS = ("policy_loss", "tour_length", "baseline_length", "log_likelihood", "grad_norm")


def compute_loss(agent_fn, score_fn, baseline_agent, points, running_mean, is_warmup, args: Args):
    """Sample tours of points [B, N, 2] without gradient, score them with it: the loss, and lengths, baseline and log p.

    `running_mean` and `is_warmup` (1 in the rollout baseline's first epoch, else 0) are scalars on the device.
    """
    (num_instances, num_nodes, _), tables = points.shape, agent_fn(points)
    sampled = DecoderTables(*(x.detach() for x in tables))
    if args.baseline == "pomo":
        starts = torch.arange(num_nodes, device=points.device).expand(num_instances, num_nodes)
        noise = sample_gumbel(num_nodes, num_instances, num_nodes, num_nodes, device=points.device)
        tours, lengths = construct_tours(points, sampled, num_nodes, starts, noise)
        log_likelihood, start_log_probs = score_fn(tables, tours)
        loss = pomo_loss(lengths, log_likelihood, start_log_probs)
        return loss, lengths, lengths.mean(), log_likelihood
    noise, repeat = sample_gumbel(num_nodes, num_instances, 1, num_nodes, device=points.device), 1
    if args.baseline == "rollout":  # the greedy tours of the baseline are built along with the sampled ones
        with torch.no_grad():
            greedy = baseline_agent(points)
        sampled = DecoderTables(*(torch.cat(pair) for pair in zip(sampled, greedy, strict=True)))
        noise, repeat = torch.cat((noise, torch.zeros_like(noise)), 1), 2
    tours, lengths = construct_tours(points.repeat(repeat, 1, 1), sampled, 1, None, noise)
    tours, (lengths, *greedy_lengths) = tours[:num_instances], lengths.split(num_instances)
    log_likelihood, start_log_probs = score_fn(tables, tours)
    log_likelihood = log_likelihood + start_log_probs.gather(1, tours[:, :, 0])
    baseline = running_mean.clone()  # of the steps before this one
    running_mean.lerp_(sum_over_ranks(lengths.mean() / WORLD_SIZE), 0.2)
    if args.baseline == "rollout":
        baseline = torch.where(is_warmup > 0, baseline, greedy_lengths[0])
    return reinforce_loss(lengths, baseline, log_likelihood), lengths, baseline.mean(), log_likelihood


def train_step(agent, optimizer, loss_fn, points, running_mean, is_warmup, metrics, args: Args) -> None:
    """One gradient step on points [B, N, 2]; adds the METRICS of this process to `metrics`."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(points.device.type, torch.bfloat16, enabled=args.bf16):
        loss, lengths, baseline, log_likelihood = loss_fn(points, running_mean, is_warmup, args)
    (loss / WORLD_SIZE).backward()
    sum_gradients(agent.parameters())
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    metrics.add_(torch.stack((loss.detach(), lengths.mean(), baseline, log_likelihood.detach().mean(), grad_norm)))


@torch.no_grad()
def get_greedy_lengths(agent, points: torch.Tensor, args: Args) -> torch.Tensor:
    """Lengths [n] of the greedy tours of points [n, N, 2]; the processes share the work."""
    lengths, chunk = torch.zeros(len(points), device=points.device), 4096 if points.is_cuda else 256
    agent.eval()
    for start in range(RANK * chunk, len(points), WORLD_SIZE * chunk):
        part = points[start : start + chunk]
        with torch.autocast(points.device.type, torch.bfloat16, enabled=args.bf16):
            lengths[start : start + chunk] = construct_tours(part, agent(part), 1)[1].squeeze(1)
    return sum_over_ranks(lengths)


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


# ---- Evaluation and checkpoints --------------------------------------------------------------------------------------

DECODINGS = ("greedy", "multistart", "multistart_x8", "sample")


def choose_tours(agent, points: torch.Tensor, decoding: str, args: Args, generator=None) -> torch.Tensor:
    """Candidate tours [B, P, N] of points [B, N, 2], in any unit, by one of the DECODINGS.

    greedy: one tour of most likely steps; multistart: one from every node; multistart_x8: the same for the eight
    symmetric images; sample: --num-samples random ones.
    """
    (num_instances, num_nodes, _), num_tours, starts, noise = points.shape, 1, None, None
    images = apply_symmetries(points) if decoding == "multistart_x8" else points
    if decoding.startswith("multistart"):
        num_tours, starts = num_nodes, torch.arange(num_nodes, device=points.device).expand(len(images), num_nodes)
    elif decoding == "sample":
        num_tours, shape = args.num_samples, (num_nodes, num_instances, args.num_samples, num_nodes)
        noise = sample_gumbel(*shape, device=points.device, generator=generator)
    with torch.autocast(points.device.type, torch.bfloat16, enabled=args.bf16):
        tours, _ = construct_tours(images, agent(images), num_tours, starts, noise)
    return tours.unflatten(0, (-1, num_instances)).transpose(0, 1).flatten(1, 2)


@torch.no_grad()
def solve(agent, args: Args, device: torch.device, instances: list, decodings=DECODINGS) -> dict[str, tuple]:
    """The best tour of each instance by decoding: tours [N], their lengths [M], milliseconds per instance."""
    groups, found = {}, {}
    for i, instance in enumerate(instances):
        groups.setdefault((len(instance.points), instance.metric), []).append(i)
    agent.eval()
    bar = tqdm(total=len(decodings) * len(instances), unit="instance", leave=False, delay=2.0)
    for decoding in decodings:
        tours, lengths, start = [None] * len(instances), np.zeros(len(instances)), time.perf_counter()
        generator = torch.Generator(device).manual_seed(args.seed % 2**63)
        for (num_nodes, metric), members in groups.items():
            num_tours = {
                "greedy": 1,
                "multistart": num_nodes,
                "multistart_x8": 8 * num_nodes,
                "sample": args.num_samples,
            }
            chunk = math.ceil(2 ** (24 if device.type == "cuda" else 18) / num_tours[decoding] / num_nodes)
            for part in (members[i : i + chunk] for i in range(0, len(members), chunk)):
                points = torch.from_numpy(np.stack([instances[i].points for i in part])).to(device)
                candidates = choose_tours(agent, points, decoding, args, generator)
                best = tsp.tour_length(points, candidates, metric).min(1)
                lengths[part] = best.values.cpu()
                chosen = candidates.take_along_dim(best.indices[:, None, None], 1).squeeze(1).cpu()  # [B, N]
                for i, tour in zip(part, chosen.numpy(), strict=True):
                    tours[i] = tour
                bar.update(len(part))
        found[decoding] = tours, lengths, 1e3 * (time.perf_counter() - start) / len(instances)
    bar.close()
    return found


def evaluate(agent, args: Args, device: torch.device, instances: list) -> dict[str, float]:
    """Lengths, gaps and time of all DECODINGS (`tsp.summarize`)."""
    return tsp.summarize(solve(agent, args, device, instances), instances)


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
    check_range(args, "torch_threads eval_episodes num_epochs steps_per_epoch batch_size num_layers", 0, above=True)
    check_range(args, "num_samples learning_rate max_grad_norm", 0, above=True)
    check_range(args, "seed checkpoint_interval eval_interval weight_decay", 0)
    check_range(args, "lr_drop", 0, 1)
    check_range(args, "baseline_instances", 2)
    try:
        tsp.parse_env_id(args.env_id)
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")
    if args.batch_size % WORLD_SIZE:
        fail(f"--batch-size {args.batch_size} does not divide among {WORLD_SIZE} processes")
    if args.track and not args.evaluate and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")
    if args.solve and not (args.evaluate and args.data):
        fail("--solve needs --evaluate and --data")


def load_files(args: Args) -> tuple[np.ndarray | None, list]:
    """Points [M, N, 2] of --train-path, and instances to evaluate on; exits with code 2 on files that will not do."""
    try:
        training_points = tsp.read_points(None if args.evaluate else args.train_path, args.env_id)
        instances = tsp.read_files(args.data)
        if args.solve:
            Path(args.solve).touch(exist_ok=False)
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"--solve {args.solve}: {error.strerror}")
    instances = instances or tsp.make_test_instances(args.env_id, args.eval_episodes)
    if RANK == 0 and (missing := tsp.add_reference_tours(instances)):
        print(f"no gap for {missing} instances without a reference tour (pip install elkai)", file=sys.stderr)
    return training_points, instances


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if given, and leave a run folder with result.json."""
    wall_start, cpu_start = time.time(), time.process_time()
    device, is_main = setup_device(args), RANK == 0
    start_step = checkpoint["global_step"] if checkpoint else 0
    is_done = checkpoint is not None and checkpoint["iteration"] >= args.num_epochs
    if is_done and Path(args.resume).with_name("result.json").exists():
        fail(f"--resume {args.resume}: its {checkpoint['iteration']} epochs are done; raise --num-epochs")
    training_points, instances = load_files(args)
    goal = "gap" if any(instance.tour is not None for instance in instances) else "length"
    run_path = make_run_folder(args, checkpoint) if is_main else None
    seed_everything(args.seed)  # the same weights in every process
    agent = AttentionModel(args.norm, args.num_layers).to(device)
    baseline_agent = copy.deepcopy(agent).eval()
    seed_everything(args.seed, 2, RANK, start_step)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, so that CUDA graphs see it change
    settings = {"weight_decay": args.weight_decay, "fused": True, "capturable": can_capture(args, device)}
    optimizer = torch.optim.Adam(agent.parameters(), lr, **settings)
    running_mean, is_warmup = torch.zeros((), device=device), torch.zeros((), device=device)
    num_nodes, batch_size = tsp.parse_env_id(args.env_id)[1], args.batch_size // WORLD_SIZE  # of this process
    points = torch.zeros(batch_size, num_nodes, 2, device=device)

    progress = {"iteration": 0, "global_step": 0, "baseline_updates": 0, "history": []}
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
        if args.env_id != checkpoint["args"]["env_id"]:  # its gaps are those of other instances
            progress["history"] = []
        agent.load_state_dict(checkpoint["agent"])
        baseline_agent.load_state_dict(checkpoint["baseline_agent"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.param_groups[0] |= {"lr": lr, **settings}
        running_mean.copy_(checkpoint["running_mean"])
        wall_start, cpu_start = wall_start - checkpoint["wall_seconds"], cpu_start - checkpoint["cpu_seconds"]
        if len(checkpoint["ranks"]) == WORLD_SIZE:
            state = checkpoint["ranks"][RANK]
            torch.set_rng_state(state["torch_rng"])
            if device.type == "cuda" and state["cuda_rng"] is not None:
                torch.cuda.set_rng_state(state["cuda_rng"])
    writer = make_writer(args, run_path, start_step) if is_main else None

    def save() -> None:
        cuda_rng = torch.cuda.get_rng_state() if device.type == "cuda" else None
        ranks = [state := {"torch_rng": torch.get_rng_state(), "cuda_rng": cuda_rng}] * WORLD_SIZE
        if WORLD_SIZE > 1:
            ranks = [None] * WORLD_SIZE
            dist.all_gather_object(ranks, state)
        if is_main:
            seconds = {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
            content = {"script": SCRIPT, "args": asdict(args) | {"resume": None}, "ranks": ranks, **progress, **seconds}
            content |= {"agent": agent.state_dict(), "baseline_agent": baseline_agent.state_dict()}
            content |= {"optimizer": optimizer.state_dict(), "running_mean": running_mean}
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", content)

    # The step of an iteration; one CUDA graph where that can be
    metrics = torch.zeros(len(METRICS), device=device)
    agent_fn, score_fn = (torch.compile(agent), torch.compile(score_tours)) if args.compile else (agent, score_tours)
    loss_fn = partial(compute_loss, agent_fn, score_fn, baseline_agent)
    step_fn = partial(train_step, agent, optimizer, loss_fn, points, running_mean, is_warmup, metrics, args)
    if can_capture(args, device):
        lr.zero_()  # so that weight decay leaves the weights alone when Adam's state is made
        mutated = [*agent.state_dict().values(), *init_optimizer_state(optimizer), running_mean, metrics]
        step_fn = capture_graph(step_fn, mutated)

    def hold_instances() -> tuple[torch.Tensor, torch.Tensor]:  # fresh ones [n, N, 2], and the baseline's lengths [n]
        size = min(args.baseline_instances, len(training_points) if args.train_path else args.baseline_instances)
        stream = args.seed, 4, progress["baseline_updates"]
        held = tsp.draw_points(args.env_id, training_points, size, *stream).to(device)
        return held, get_greedy_lengths(baseline_agent, held, args)

    held = hold_instances() if args.baseline == "rollout" else None
    if checkpoint is None:
        first_points = tsp.draw_points(args.env_id, training_points, args.batch_size, args.seed, 3, 0).to(device)
        running_mean.fill_(get_greedy_lengths(agent, first_points, args).mean())
        save()
    loop_start, instances_per_epoch = time.time(), args.steps_per_epoch * args.batch_size
    bar = tqdm(total=args.num_epochs * instances_per_epoch, initial=start_step, unit="instance", disable=not is_main)
    if is_main:
        bar.write(f"run folder {run_path}")
    while progress["iteration"] < args.num_epochs:
        metrics.zero_()
        is_warmup.fill_(progress["iteration"] == 0)
        agent.train()
        stream = args.seed, 3, progress["iteration"]
        fresh_points = tsp.draw_points(args.env_id, training_points, instances_per_epoch, *stream).to(device)
        for i in range(args.steps_per_epoch):
            done = (progress["iteration"] + i / args.steps_per_epoch) / args.num_epochs
            factor = (1.0 + math.cos(math.pi * done)) / 2 if args.lr_schedule == "cosine" else 1.0
            lr.fill_(args.learning_rate * factor * (0.1 if done >= 1.0 - args.lr_drop else 1.0))
            points.copy_(fresh_points[i * args.batch_size + RANK * batch_size :][:batch_size])
            step_fn()
            bar.update(args.batch_size)
        for buffer in agent.buffers():  # running statistics: the mean over processes
            sum_over_ranks(buffer).div_(WORLD_SIZE)

        # The policy becomes the baseline once it is better on held instances
        if held is not None:
            differences = get_greedy_lengths(agent, held[0], args) - held[1]
            if differences.mean() < 0 and (args.baseline_update == "mean" or t_test(differences) < 0.05):
                baseline_agent.load_state_dict(agent.state_dict())
                progress["baseline_updates"] += 1
                held = hold_instances()

        # Log, validate, checkpoint
        iteration, step = progress["iteration"] + 1, progress["global_step"] + instances_per_epoch
        progress |= {"iteration": iteration, "global_step": step}
        means = (sum_over_ranks(metrics) / args.steps_per_epoch / WORLD_SIZE).tolist()
        if not all(map(math.isfinite, means)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite after {step} instances: {means}")
        is_last = iteration == args.num_epochs
        if is_main:
            scalars = {f"losses/{name}": value for name, value in zip(METRICS, means, strict=True)}
            scalars["charts/tour_length"] = scalars.pop("losses/tour_length")
            scalars["charts/learning_rate"] = lr.item()
            scalars["charts/instances_per_second"] = int((step - start_step) / (time.time() - loop_start))
            scalars["charts/cpu_seconds"] = time.process_time() - cpu_start
            scalars["charts/baseline_updates"] = progress["baseline_updates"]
            validation = tsp.summarize(solve(agent, args, device, instances, ("greedy",)), instances)
            scalars[f"charts/greedy_{goal}"] = value = validation[f"eval/greedy_{goal}"]
            progress["history"].append([step, value])
            bar.set_postfix({goal: f"{value:.2f}"})
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
        if is_main and not is_last and args.eval_interval and iteration % args.eval_interval == 0:
            for name, value in evaluate(agent, args, device, instances).items():
                writer.add_scalar(name, value, step)
        if is_last or (args.checkpoint_interval and iteration % args.checkpoint_interval == 0):
            save()
    bar.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if not is_main:
        return
    found, step = solve(agent, args, device, instances), progress["global_step"]
    eval_metrics = tsp.summarize(found, instances)
    for name, value in eval_metrics.items():
        writer.add_scalar(name, value, step)
    result = {
        "script": SCRIPT,
        "env_id": args.env_id,
        "seed": args.seed,
        "headline": f"eval/greedy_{goal}",
        "metrics": eval_metrics,
        "env_steps": step,
        "wall_seconds": time.time() - wall_start,
        "cpu_seconds": time.process_time() - cpu_start,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": get_commit(),
        "args": asdict(args),
    }
    if figure := tsp.draw_tours(instances, found["greedy"][0]):
        figure.savefig(run_path / "tours.png", dpi=100)
        writer.add_figure("eval/tours", figure, step)
    labels = f"{args.env_id}, seed {args.seed}", "instances", f"{goal} of greedy tours{', %' if goal == 'gap' else ''}"
    plot_learning_curve(run_path / "learning_curve.png", writer, progress["history"], *labels)
    writer.close()
    write_atomically(run_path / "result.json", json.dumps(result, indent=2).encode())
    values = ", ".join(f"{eval_metrics[f'eval/{decoding}_{goal}']:.2f} {decoding}" for decoding in DECODINGS)
    print(f"{args.env_id}: {goal}{' in %' if goal == 'gap' else ''} {values}, of {len(instances)} instances", end=" ")
    print(f"after {step:,} instances in {result['wall_seconds']:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, or evaluate a checkpoint."""
    args, checkpoint = tyro.cli(Args, args=argv), None
    torch.set_float32_matmul_precision("medium")  # on CPUs oneDNN instead of MKL, on CUDA TF32
    if args.evaluate and (args.resume or WORLD_SIZE > 1):
        fail("--resume and --evaluate exclude each other, and --evaluate is for one process")
    if path := args.resume or args.evaluate:
        checkpoint = load_checkpoint(path)
        if args.resume and "optimizer" not in checkpoint:
            fail(f"--resume {path}: it holds the weights alone, for --evaluate")
        saved = Args(**checkpoint["args"])
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        is_unfinished = Path(path).with_name("args.json").exists() and not Path(path).with_name("result.json").exists()
        fixed = ("norm", "num_layers", "seed", "env_id", "train_path", "batch_size", "steps_per_epoch", "baseline")
        for name in fixed[:2] if args.evaluate else fixed if is_unfinished else fixed[:3]:
            value, trained = getattr(args, name), getattr(saved, name)
            if value != trained:
                fail(f"--{name.replace('_', '-')} {value}: {path} was trained with {trained}")
    check_args(args)
    if not args.evaluate:
        return train(args, checkpoint)
    device, (_, instances) = setup_device(args), load_files(args)
    agent = AttentionModel(args.norm, args.num_layers).to(device)
    agent.load_state_dict(checkpoint["agent"])
    found = solve(agent, args, device, instances)
    for name, value in tsp.summarize(found, instances).items():
        print(f"{name} {value:.4f}")
    if args.solve:
        shortest = np.argmin([lengths for _, lengths, _ in found.values()], 0)
        for i, k in enumerate(shortest):
            instances[i].tour = list(found.values())[k][0][i]
        Path(args.solve).write_text(tsp.format_ml4co(instances))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: --resume the checkpoint.pt in the run folder to go on")
