"""The attention model for the travelling salesman problem (TSP), trained by REINFORCE, in one file.

Papers: Kool, van Hoof, Welling 2019, "Attention, Learn to Solve Routing Problems!" (arXiv:1803.08475);
Kwon et al. 2020, "POMO: Policy Optimization with Multiple Optima" (arXiv:2010.16011).

    python algos/reinforce_tsp_attention.py                # first run: 20 nodes, minutes on one core
    python algos/reinforce_tsp_attention.py --env-id tsp50-uniform --batch-size 512 --num-epochs 200   # full size, GPU
    torchrun --nproc-per-node 2 algos/reinforce_tsp_attention.py   # several GPUs (CPU processes: --no-cuda)
    python algos/reinforce_tsp_attention.py --evaluate runs/.../best.pt --data my.txt --solve tours

What is computed, numbered as in Kool et al.:

    (1)   p(pi | s) = prod_t p(pi_t | s, pi_1 ... pi_{t-1})
    (2)   h^_i      = BN(h_i + MHA_i(h_1 ... h_n))                             one layer of the encoder, of three
    (3)   h_i       = BN(h^_i + FF(h^_i))
    (4)   h_c       = [mean of h, h of the last node, h of the first node]     v^l, v^f for the nodes where t = 1
    (5)   q = W^Q h_c,  k_i = W^K h_i,  v_i = W^V h_i                          of each head
    (6)   u_j       = q . k_j / sqrt(d), -inf where j has been visited; the glimpse g is sum_j softmax(u)_j v_j, of all
                      heads side by side
    (7)   u_j       = C tanh(W^O g . k_j / sqrt(D)), -inf where j has been visited, with keys of their own and C = 10
    (8)   p(pi_t = j | s, pi_1 ... pi_{t-1}) = softmax(u)_j
    (9)   grad L    = E[ (L(pi) - b(s)) grad log p(pi | s) ]                   --baseline is b(s)

Each training step samples tours node by node without gradient, and then computes eq. 1 of whole tours in one parallel
pass with gradient: once a tour is there, so are the contexts and the masks of all its steps.

Unlike theirs, points are scaled into the unit square by the network, the learning rates fall to zero, and the defaults
are the baseline of POMO and the optimizer Muon: about half of Adam's multi-start gap in the same time. Their settings:

    --baseline rollout --optimizer adam --learning-rate 1e-4 --no-anneal-lr --batch-size 512 --steps-per-epoch 2500 \
        --num-epochs 100

Shapes: B instances, N nodes, P tours of each instance, T steps of a tour, Q queries (tours, or tours times steps),
D embedding, H heads, d = D / H, M matrices of one shape.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "tyro>=0.9", "tensorboard>=2.18", "wandb>=0.19", "tqdm>=4.66", "matplotlib>=3.9",
#     "pillow>=10.0",
# ]
# ///

import copy
import ctypes
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
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
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [
    str(Path(__file__).resolve().parents[1]),
    os.getcwd(),
]  # for envs_shared, and for your own environments
from envs_shared.tsp_tasks import instances as tsp

SCRIPT = "reinforce_tsp_attention"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
CPU_HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
Decoding = Literal["greedy", "multistart", "multistart_x8"]


@dataclass
class Args:
    """Attention model and REINFORCE on random TSP instances, or on those of a file."""

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
    # tspN-uniform (in the unit square) or tspN-gaussian (standard normal), with N nodes
    env_id: str = "tsp20-uniform"
    # train on the instances of this file and choose best.pt by them, not by fresh ones
    train_path: str | None = None
    # files to evaluate on: .tsp (TSPLIB), else ml4co text; none: --eval-episodes of env_id
    data: tuple[str, ...] = ()
    # ways to choose tours in evaluations
    decoding: tuple[Decoding, ...] = ("greedy", "multistart", "multistart_x8")
    # with --evaluate and --data: new folder for the best tours, a file for each of the data
    solve: str | None = None

    # Algorithm
    num_epochs: int = 35  # epochs, which are the iterations here; after each the rollout baseline may change
    steps_per_epoch: int = 100  # gradient steps of an epoch
    batch_size: int = 32  # instances B of a gradient step, over all processes
    # of the matrices that map embeddings; Adam has all other parameters
    optimizer: Literal["muon", "adam"] = "muon"
    learning_rate: float = 1e-3  # of Adam
    muon_learning_rate: float = 2e-3  # of Muon
    anneal_lr: bool = True  # lower the learning rates to zero along half a cosine
    max_grad_norm: float = 1.0  # largest global norm of the gradient (inf: no limit)
    # b(s): mean over all starts, greedy, or running mean
    baseline: Literal["pomo", "rollout", "exponential"] = "pomo"
    # rollout: instances on which policy and baseline are compared after an epoch
    baseline_instances: int = 10_000
    num_layers: int = 3  # layers of the encoder


# ---- Networks --------------------------------------------------------------------------------------------------------


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Projected embeddings [B, N, D] by heads, [B * H, N, d]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2).flatten(0, 1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of queries [B, Q, D] to keys / sqrt(d) and values by heads [B * H, N, d], before W^O: [B, Q, D].

    `log_mask` [B, Q, N] is 0, and -inf where a node has been visited.
    """
    num_heads = len(k) // len(q)
    u = torch.bmm(split_heads(q, num_heads), k.transpose(1, 2)).unflatten(0, (-1, num_heads))  # [B, H, Q, N]
    if log_mask is not None:
        u = u + log_mask.unsqueeze(1)
    attended = torch.bmm(
        u.softmax(-1).flatten(0, 1), v
    )  # [B * H, Q, d]; torch's fused kernel takes longer on CPUs
    return attended.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    """Attention among the nodes and a feed-forward layer, each with a skip connection and a norm (eq. 2, 3)."""

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int):
        super().__init__()
        self.num_heads = num_heads
        self.project_q = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_k = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_v = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.ff = nn.Sequential(
            nn.Linear(embed_dim, ff_dim), nn.ReLU(inplace=True), nn.Linear(ff_dim, embed_dim)
        )
        self.norm1 = nn.BatchNorm1d(embed_dim)
        self.norm2 = nn.BatchNorm1d(embed_dim)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, N, D] to embeddings [B, N, D]."""
        k = split_heads(self.project_k(h), self.num_heads)  # [B * H, N, d]
        v = split_heads(self.project_v(h), self.num_heads)
        k = k / math.sqrt(k.shape[-1])
        h = h + self.project_out(attend(self.project_q(h), k, v))
        h = self.norm1(h.flatten(0, 1)).view_as(h)  # eq. 2
        return self.norm2((h + self.ff(h)).flatten(0, 1)).view_as(h)  # eq. 3


class AttentionModel(nn.Module):
    """Encoder of Kool et al. and the projections of their decoder; 708,608 parameters in the paper's size."""

    def __init__(self, num_layers: int = 3, embed_dim: int = 128, num_heads: int = 8, ff_dim: int = 512):
        super().__init__()
        self.num_heads = num_heads
        self.embed = nn.Linear(2, embed_dim)
        self.layers = nn.ModuleList([EncoderLayer(embed_dim, num_heads, ff_dim) for _ in range(num_layers)])
        # W^Q of eq. 5 is the three of them side by side, one for each part of the context
        self.project_graph = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_last = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_first = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_k = nn.Linear(embed_dim, embed_dim, bias=False)  # W^K and W^V of the glimpse, eq. 5
        self.project_v = nn.Linear(embed_dim, embed_dim, bias=False)
        self.project_out = nn.Linear(
            embed_dim, embed_dim, bias=False
        )  # W^O of eq. 7, which `forward` puts at its keys
        self.project_logit_k = nn.Linear(embed_dim, embed_dim, bias=False)  # W^K of eq. 7
        self.v_last = nn.Parameter(torch.empty(embed_dim).uniform_(-1.0, 1.0))  # v^l and v^f of eq. 4
        self.v_first = nn.Parameter(torch.empty(embed_dim).uniform_(-1.0, 1.0))

    def encode(self, points: torch.Tensor) -> torch.Tensor:
        """Embeddings h [B, N, D] of points [B, N, 2] in any unit."""
        h = self.embed(scale_to_unit_square(points).to(self.embed.weight.dtype))
        for layer in self.layers:
            h = layer(h)
        return h

    def forward(self, points: torch.Tensor) -> "NodeProjections":
        """All that the decoder needs of points [B, N, 2]."""
        h = self.encode(points)  # [B, N, D]
        k = split_heads(self.project_k(h), self.num_heads)  # [B * H, N, d]
        q_graph = self.project_graph(h.mean(1, keepdim=True))  # [B, 1, D]
        return NodeProjections(
            q_start=q_graph + self.project_last(self.v_last) + self.project_first(self.v_first),
            q_last=self.project_last(h),
            q_graph_first=q_graph + self.project_first(h),
            k=k / math.sqrt(k.shape[-1]),
            v=split_heads(self.project_v(h), self.num_heads),
            # W^O of the glimpses, which are many, stands at the keys: (W^O g) . k_j = g . (k_j W^O)
            logit_k=self.project_logit_k(h) @ self.project_out.weight / math.sqrt(h.shape[-1]),
        )


def scale_to_unit_square(points: torch.Tensor) -> torch.Tensor:
    """Points [B, N, 2] moved and scaled, aspect kept, so that they just fit into the unit square."""
    offset = points - points.amin(1, keepdim=True)
    return offset / offset.amax((1, 2), keepdim=True).clamp(min=torch.finfo(points.dtype).tiny)


# ---- Storage ---------------------------------------------------------------------------------------------------------


class NodeProjections(NamedTuple):
    """What the decoder needs of B instances: each node is projected once (eq. 5), not at each of the N steps."""

    q_start: torch.Tensor  # [B, 1, D] the query at t = 1: of the graph and the placeholders v^l, v^f
    q_last: torch.Tensor  # [B, N, D] what each node, as the last one, adds to a query
    q_graph_first: torch.Tensor  # [B, N, D] what the graph and each node, as the first one, add to a query
    k: torch.Tensor  # [B * H, N, d] keys of the glimpse by heads, over sqrt(d)
    v: torch.Tensor  # [B * H, N, d] values of the glimpse by heads
    logit_k: torch.Tensor  # [B, N, D] keys of eq. 7, with W^O, over sqrt(D)


# ---- REINFORCE -------------------------------------------------------------------------------------------------------


def take_nodes(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows [B, P, T, D] of x [B, N, D] at index [B, P, T]; faster than gather where there is a gradient."""
    num_instances, num_nodes = x.shape[:2]
    first_rows = (
        torch.arange(num_instances, device=x.device) * num_nodes
    )  # of each instance, among those of all
    return F.embedding(index + first_rows[:, None, None], x.flatten(0, 1))


def compute_queries(nodes: NodeProjections, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """q of eq. 5, [B, P * T, D], in the contexts (eq. 4) of first nodes [B, P, 1] and last nodes [B, P, T].

    W^Q [mean of h, h_last, h_first] is a sum of three products, each of which `nodes` has.
    """
    return (take_nodes(nodes.q_last, last) + take_nodes(nodes.q_graph_first, first)).flatten(1, 2)


def compute_logits(nodes: NodeProjections, q: torch.Tensor, log_mask: torch.Tensor) -> torch.Tensor:
    """u of eq. 7, [B, Q, N], of queries [B, Q, D]; `log_mask` [B, Q, N] is 0, and -inf for visited nodes."""
    glimpse = attend(q, nodes.k, nodes.v, log_mask)  # g of eq. 6, [B, Q, D]
    u = torch.bmm(glimpse, nodes.logit_k.transpose(1, 2))  # [B, Q, N]
    return log_mask + 10.0 * torch.tanh(u)  # eq. 7


def sample_nodes(logits: torch.Tensor) -> torch.Tensor:
    """Nodes [B, P] drawn from eq. 8 of logits [B, P, N], without waiting for the device.

    The cumulated probabilities are compared with one random number, always below the last of them.
    """
    cumulated = logits.softmax(-1).cumsum(-1)
    noise = torch.empty_like(cumulated[..., :1]).uniform_(0.0, 1.0 - 1e-6)
    return (cumulated <= noise * cumulated[..., -1:]).sum(-1)


@torch.no_grad()
def construct_tours(points, nodes: NodeProjections, num_tours=1, starts=None, sample=False):
    """Build P = `num_tours` tours of each instance node by node: tours [B, P, N] and their lengths [B, P].

    They begin at `starts` [B, P] (None: where the policy chooses), and go on with the most likely node at each step,
    or with `sample` with one drawn from eq. 8.
    """
    env = tsp.TspEnv()
    state = env.reset(points, num_tours)
    for t in range(points.shape[1]):
        if t == 0 and starts is not None:
            state, reward, _ = env.step(starts)
            continue
        if t == 0:
            q = nodes.q_start.expand(-1, num_tours, -1)  # [B, P, D]
        else:
            q = compute_queries(nodes, state.nodes[0].unsqueeze(-1), state.nodes[-1].unsqueeze(-1))
        logits = compute_logits(nodes, q, state.log_mask)  # [B, P, N]
        state, reward, _ = env.step(sample_nodes(logits) if sample else logits.argmax(-1))
    return state.tours, -reward


def score_tours(nodes: NodeProjections, tours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of tours [B, P, N] by eq. 1 without its first factor, [B, P], and log p of each node as the first, [B, N].

    All steps at once, of all tours. The last step is left out: one node is left, and its probability is 1.
    """
    num_nodes = tours.shape[-1]
    chosen = tours[:, :, 1:-1]  # [B, P, T], T = N - 2
    steps = torch.arange(1, num_nodes - 1, device=tours.device)
    places = tours.argsort(-1)  # [B, P, N], at which step each node is visited
    is_open = places.unsqueeze(2) >= steps.unsqueeze(1)  # [B, P, T, N]
    log_mask = torch.where(is_open, 0.0, -math.inf).flatten(1, 2)
    q = compute_queries(nodes, tours[:, :, :1], tours[:, :, :-2])  # [B, P * T, D]
    log_probs = compute_logits(nodes, q, log_mask).log_softmax(-1)  # [B, P * T, N], eq. 8
    log_probs = log_probs.gather(-1, chosen.flatten(1).unsqueeze(-1)).view_as(chosen)
    start_logits = compute_logits(
        nodes, nodes.q_start, log_mask.new_zeros(len(tours), 1, num_nodes)
    )  # [B, 1, N]
    return log_probs.sum(-1), start_logits.log_softmax(-1).squeeze(1)  # eq. 1


def reinforce_loss(lengths, baseline, log_likelihood) -> torch.Tensor:
    """The mean over [B, P] whose gradient is eq. 9."""
    return ((lengths - baseline) * log_likelihood).mean()


def pomo_loss(
    lengths: torch.Tensor, log_likelihood: torch.Tensor, start_log_probs: torch.Tensor
) -> torch.Tensor:
    """REINFORCE over one tour from every node, with their mean as the baseline (Kwon et al. eq. 2, 3).

    lengths and log_likelihood [B, N] are of the tours that begin at each node. Nothing in them teaches the policy where
    to begin when it builds a single tour. So the expected length over that choice, by start_log_probs [B, N], is added:
    all of its outcomes are there, it needs no sampling.
    """
    mean = lengths.mean(1, keepdim=True)
    return (
        reinforce_loss(lengths, mean, log_likelihood)
        + (start_log_probs.exp() * (lengths - mean)).sum(1).mean()
    )


def t_test(differences: torch.Tensor) -> float:
    """p-value of the one-sided paired t-test that the mean of `differences` [n] is below zero; 1 if they do not vary.

    The normal tail stands for Student's: with 10,000 instances a p of 0.05 is off by 0.00002.
    """
    x = differences.double()
    standard_error = (x.std() / math.sqrt(len(x))).item()
    return math.erfc(-x.mean().item() / standard_error / math.sqrt(2)) / 2 if standard_error > 0 else 1.0


@torch.no_grad()
def get_greedy_lengths(agent: AttentionModel, points: torch.Tensor) -> torch.Tensor:
    """Lengths [n] of the greedy tours of points [n, N, 2]; the processes share the work."""
    lengths = torch.zeros(len(points), device=points.device)
    chunk = tsp.get_chunk_size(points.shape[1], points.device)
    agent.eval()
    for start in range(RANK * chunk, len(points), WORLD_SIZE * chunk):
        part = points[start : start + chunk]
        lengths[start : start + chunk] = construct_tours(part, agent(part))[1].squeeze(1)
    return sum_over_ranks(lengths)


class Baseline(nn.Module):
    """What b(s) of eq. 9 remembers: the best policy so far, and a mean of lengths (b(s) of `rollout` at first)."""

    def __init__(self, agent: AttentionModel):
        super().__init__()
        self.policy = copy.deepcopy(agent).eval().requires_grad_(False)
        self.register_buffer("running_mean", torch.zeros(()))
        self.register_buffer("is_warmup", torch.ones(()))  # a tensor, so that CUDA graphs see it change

    def hold(self, points: torch.Tensor) -> None:
        """Keep points [n, N, 2] and the greedy lengths of its policy, to compare others with."""
        self.points = points
        self.lengths = get_greedy_lengths(self.policy, points)

    def take_if_better(self, agent: AttentionModel) -> bool:
        """Whether the policy is better on what is held, by a t-test at 5 %; then it is the baseline's."""
        is_better = t_test(get_greedy_lengths(agent, self.points) - self.lengths) < 0.05
        if is_better:
            self.policy.load_state_dict(agent.state_dict())
        return is_better


# In the order of what `update_weights` returns
METRICS = ("policy_loss", "tour_length", "baseline_length", "log_likelihood", "grad_norm")


def compute_loss(encode, score, baseline: Baseline, points: torch.Tensor, args: Args):
    """Sample tours of points [B, N, 2] without gradient, score them with it: the loss, and METRICS[1:4].

    `encode` is the agent and `score` is `score_tours`, compiled or not.
    """
    num_instances, num_nodes = points.shape[:2]
    nodes = encode(points)
    if args.baseline == "pomo":
        starts = torch.arange(num_nodes, device=points.device).expand(num_instances, -1)
        tours, lengths = construct_tours(points, nodes, num_nodes, starts, sample=True)  # [B, N, N], [B, N]
        log_likelihood, start_log_probs = score(nodes, tours)
        loss = pomo_loss(lengths, log_likelihood, start_log_probs)
        return loss, lengths.mean(), lengths.mean(), log_likelihood.detach().mean()

    tours, lengths = construct_tours(points, nodes, sample=True)  # [B, 1, N], [B, 1]
    log_likelihood, start_log_probs = score(nodes, tours)
    log_likelihood = log_likelihood + start_log_probs.gather(1, tours[:, :, 0])  # eq. 1, all factors
    b = baseline.running_mean.clone()  # of the steps before this one
    baseline.running_mean.lerp_(sum_over_ranks(lengths.mean() / WORLD_SIZE), 0.2)
    if args.baseline == "rollout":
        greedy_lengths = construct_tours(points, baseline.policy(points))[1]
        b = torch.where(baseline.is_warmup > 0, b, greedy_lengths)
    return (
        reinforce_loss(lengths, b, log_likelihood),
        lengths.mean(),
        b.mean(),
        log_likelihood.detach().mean(),
    )


def update_weights(
    agent: AttentionModel, optimizers, loss_fn, args: Args, points: torch.Tensor
) -> torch.Tensor:
    """One gradient step on points [B, N, 2] by `loss_fn` of them; returns the METRICS [5] of this process."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss, *metrics = loss_fn(points, args)
    (loss / WORLD_SIZE).backward()
    sum_gradients(agent.parameters())
    grad_norm = clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    return torch.stack((loss.detach(), *metrics, grad_norm))


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """About U V^T of matrices x = U S V^T, [M, m, n], by five Newton-Schulz steps, in bfloat16 where that is fast.

    Each is y <- (a I + b y y^T + c (y y^T)^2) y with a = 3.4445, b = -4.7750, c = 2.0315.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    y = x.bfloat16() if x.is_cuda or CPU_HAS_BFLOAT16 else x
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalized momentum of each matrix (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    torch.optim.Muon with adjust_lr_fn="match_rms_adamw" and no weight decay, but the learning rate stays a tensor, so
    that CUDA graphs see it change, and matrices of one shape are stepped together.
    """

    def __init__(self, params, lr: torch.Tensor, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for shape in {p.shape for p in group["params"]}:
            params = [p for p in group["params"] if p.shape == shape]
            updates = []
            for p in params:
                if p not in self.state:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - group["momentum"])
                updates.append(p.grad.lerp(momentum, group["momentum"]))  # Nesterov's
            length = group["lr"] * 0.2 * math.sqrt(max(shape))  # as long as a typical step of Adam
            for p, update in zip(params, orthogonalize(torch.stack(updates)), strict=True):
                p.sub_(length * update)


def make_optimizers(
    agent: AttentionModel, args: Args, lr: torch.Tensor, muon_lr: torch.Tensor, capturable: bool
):
    """By name: Adam as "optimizer", and with --optimizer muon "muon" for the matrices that map embeddings."""
    maps = [m for m in agent.modules() if isinstance(m, nn.Linear) and m is not agent.embed]
    matrices = [m.weight for m in maps] if args.optimizer == "muon" else []
    others = [p for p in agent.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = {"optimizer": torch.optim.Adam(others, lr, fused=True, capturable=capturable)}
    return optimizers | ({"muon": Muon(matrices, muon_lr)} if matrices else {})


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def apply_symmetries(points: torch.Tensor) -> torch.Tensor:
    """The eight images of points [B, N, 2] under the symmetries of the square, [8, B, N, 2] (Kwon et al. table 1)."""
    x, y = points.unbind(-1)
    images = [(x, y), (y, x), (-x, y), (y, -x), (x, -y), (-y, x), (-x, -y), (-y, -x)]
    return torch.stack([torch.stack(image, -1) for image in images])


@torch.no_grad()
def propose_tours(agent: AttentionModel, decoding: Decoding, points: torch.Tensor):
    """Yield candidate tours [B, P, N] of points [B, N, 2] in any unit, with frozen statistics and no random number.

    greedy: one tour of most likely steps; multistart: one from every node; multistart_x8: the same for each of the
    eight symmetric images.
    """
    agent.eval()
    starts = torch.arange(points.shape[1], device=points.device).expand(points.shape[:2])
    for image in apply_symmetries(points) if decoding == "multistart_x8" else [points]:
        if decoding == "greedy":
            yield construct_tours(image, agent(image))[0]
        else:
            yield construct_tours(image, agent(image), points.shape[1], starts)[0]


def evaluate(agent: AttentionModel, device: torch.device, instances: list, decodings) -> tuple[dict, dict]:
    """Metrics of the shortest tours of instances, and those tours by decoding (`tsp.find_shortest`)."""
    found = {
        name: tsp.find_shortest(partial(propose_tours, agent, name), instances, device) for name in decodings
    }
    return tsp.summarize(found, instances), found


def load_points(args: Args) -> tuple:
    """Points [M, N, 2] of --train-path, if any, and instances to evaluate on; exits with code 2 on files of no use."""
    try:
        if args.solve is not None:
            tsp.check_new_folder(args.solve)
        training_points = tsp.read_points(None if args.evaluate else args.train_path, args.env_id)
        return training_points, tsp.load_instances(args.data, args.env_id, args.eval_episodes)
    except ValueError as error:
        fail(str(error))


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
    may_be_zero = "seed checkpoint_interval eval_interval".split()
    for name, value in vars(args).items():
        is_number = type(value) in (int, float)
        if is_number and not (value > 0 or (value == 0 and name in may_be_zero)):
            fail(
                f"--{name.replace('_', '-')} {value}: has to be {'at least' if name in may_be_zero else 'above'} 0"
            )
    try:
        tsp.parse_env_id(args.env_id)
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")
    if args.batch_size % WORLD_SIZE:
        fail(f"--batch-size {args.batch_size} does not divide among {WORLD_SIZE} processes")
    if not args.decoding:
        fail("--decoding: name at least one")
    if args.solve is not None and not (args.evaluate and args.data):
        fail("--solve needs --evaluate and --data")


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if there is one, and leave a run folder with result.json."""
    progress = {
        "iteration": 0,
        "global_step": 0,
        "eval_steps": 0,
        "seconds": [0.0, 0.0],
        "eval_seconds": [0.0, 0.0],
    }
    progress |= {"best_length": math.inf, "baseline_start": 0, "baseline_updates": 0}
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
    start = read_clock() - progress["seconds"]
    step = progress["global_step"]
    device = setup_device(args)

    # Streams of the seed: 1 weights; 2 samples, of each process; 3 instances; 4 those of the baseline; 5 of validation
    training_points, instances = load_points(args)
    goal = "gap" if any(instance.tour is not None for instance in instances) else "length"
    draw_points = partial(tsp.draw_points, args.env_id, training_points)
    draw_held = partial(draw_points, args.baseline_instances, args.seed, 4, distinct=True)
    validation = tsp.make_instances(
        "validation", draw_points(10 * args.eval_episodes, args.seed, 5, distinct=True)
    )
    seed_everything(args.seed, 1)
    agent = AttentionModel(args.num_layers).to(device)
    baseline = Baseline(agent).to(device)
    seed_everything(args.seed, 2, RANK, step)
    use_graphs = args.cuda_graphs and device.type == "cuda" and WORLD_SIZE == 1
    lr = torch.tensor(args.learning_rate, device=device)  # tensors, so that CUDA graphs see them change
    muon_lr = torch.tensor(args.muon_learning_rate, device=device)
    optimizers = make_optimizers(agent, args, lr, muon_lr, use_graphs)

    parts = {"agent": agent, "baseline": baseline} | optimizers
    saved = None if checkpoint is None else checkpoint["args"]
    if checkpoint is not None:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        for optimizer, rate in zip(optimizers.values(), (lr, muon_lr), strict=False):
            optimizer.param_groups[0] |= {"lr": rate, "capturable": use_graphs}
        if WORLD_SIZE == 1:
            torch.set_rng_state(checkpoint["torch_rng"])
    is_same_task = saved is not None and (args.env_id, args.train_path) == (saved.env_id, saved.train_path)
    if not is_same_task:  # best_length is of other instances; its best.pt stays in the old folder
        progress["best_length"] = math.inf
    if not is_same_task or args.baseline != saved.baseline:
        progress["baseline_start"] = progress["iteration"]
        baseline.policy.load_state_dict(agent.state_dict())
        first_points = draw_points(args.batch_size, args.seed, 3, progress["iteration"]).to(device)
        baseline.running_mean.copy_(get_greedy_lengths(agent, first_points).mean())
    if RANK == 0:
        run_path, writer = open_run(args if is_same_task else replace(args, resume=None), step)
        best_path = run_path / "best.pt"
        if not is_same_task:
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)
    if args.baseline == "rollout":
        baseline.hold(draw_held(progress["baseline_updates"]).to(device))

    # The step of an iteration, one CUDA graph where that can be
    encode = torch.compile(agent) if args.compile else agent
    score = torch.compile(score_tours) if args.compile else score_tours
    loss_fn = partial(compute_loss, encode, score, baseline)
    update = partial(update_weights, agent, optimizers.values(), loss_fn, args)
    if use_graphs:
        update = CudaGraph(update)

    epoch_size = args.steps_per_epoch * args.batch_size  # instances, over all processes
    eval_interval = args.eval_interval or math.ceil(args.num_epochs / 10)
    num_instances = step + (args.num_epochs - progress["iteration"]) * epoch_size
    bar = tqdm(total=num_instances, initial=step, unit="instance", disable=RANK > 0)
    while progress["iteration"] < args.num_epochs:
        # Update the weights on fresh instances
        agent.train()
        baseline.is_warmup.fill_(progress["iteration"] == progress["baseline_start"])
        points = draw_points(epoch_size, args.seed, 3, progress["iteration"]).to(device)
        totals = torch.zeros(len(METRICS), device=device)
        for i, batch in enumerate(points.split(args.batch_size)):
            if args.anneal_lr:
                done = (progress["iteration"] + i / args.steps_per_epoch) / args.num_epochs
                factor = (1.0 + math.cos(math.pi * done)) / 2
                lr.fill_(args.learning_rate * factor)
                muon_lr.fill_(args.muon_learning_rate * factor)
            totals += update(batch.tensor_split(WORLD_SIZE)[RANK])
            bar.update(args.batch_size)
        for buffer in agent.buffers():  # running statistics: the mean over processes
            buffer.copy_(sum_over_ranks(buffer.float()) / WORLD_SIZE)
        step += epoch_size
        progress |= {"iteration": progress["iteration"] + 1, "global_step": step}

        # The policy becomes the baseline once it is better
        if args.baseline == "rollout" and baseline.take_if_better(agent):
            progress["baseline_updates"] += 1
            baseline.hold(draw_held(progress["baseline_updates"]).to(device))

        # Measure what is new
        means = (sum_over_ranks(totals) / (args.steps_per_epoch * WORLD_SIZE)).tolist()
        scalars = {f"losses/{name}": mean for name, mean in zip(METRICS, means, strict=True)}
        if not all(map(math.isfinite, means)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {scalars}")
        if RANK > 0:
            continue
        seconds = read_clock() - start - progress["eval_seconds"]
        scalars |= {"charts/wall_seconds": seconds[0], "charts/cpu_seconds": seconds[1]}
        scalars |= {"charts/instances_per_second": step / seconds[0], "charts/learning_rate": lr.item()}
        scalars |= {"charts/baseline_updates": progress["baseline_updates"]}

        # Evaluate, keep the policy that scored best, log and save
        is_last = progress["iteration"] >= args.num_epochs
        is_allowed = args.eval_interval > 0 or progress["eval_steps"] <= step / 4  # by instances
        if is_last or (is_allowed and progress["iteration"] % eval_interval == 0):
            eval_start = read_clock()
            scalars |= evaluate(agent, device, instances, ["greedy"])[0]
            length = evaluate(agent, device, validation, ["greedy"])[0]["eval/greedy_length"]
            scalars["eval/validation_length"] = length
            if not best_path.exists() or length <= progress["best_length"]:
                progress["best_length"] = length
                save_checkpoint(best_path, args, progress, {"agent": agent})
            progress["eval_steps"] += len(instances) + len(validation)
            progress["eval_seconds"] = (read_clock() - eval_start + progress["eval_seconds"]).tolist()
            bar.set_postfix({goal: f"{scalars[f'eval/greedy_{goal}']:.2f}"}, refresh=False)
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

    # Score the final policy and the best one on instances that chose neither
    decodings = list(dict.fromkeys(("greedy", *args.decoding)))
    metrics, found = evaluate(agent, device, instances, decodings)
    best = metrics
    if best_path.exists() and load_checkpoint(best_path)["global_step"] != step:
        agent.load_state_dict(load_checkpoint(best_path)["agent"])
        best, _ = evaluate(agent, device, instances, decodings)
    metrics = metrics | {name.replace("eval/", "best/"): value for name, value in best.items()}
    figure = tsp.draw_tours(instances, found["greedy"][0])
    if figure is not None:
        writer.add_figure("eval/tours", figure, step)
    writer.close()
    seconds = read_clock() - start
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": f"eval/greedy_{goal}"}
    result |= {"metrics": metrics, "env_steps": step, "wall_seconds": seconds[0], "cpu_seconds": seconds[1]}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    result |= {"torch": torch.__version__, "args": asdict(args)}
    (run_path / "result.json.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_path / "result.json.tmp", run_path / "result.json")
    scores = ", ".join(f"{metrics[f'eval/{decoding}_{goal}']:.2f} {decoding}" for decoding in decodings)
    print(
        f"{args.env_id}: {goal}{' in %' if goal == 'gap' else ''} {scores}, of {len(instances)} instances",
        end=" ",
    )
    print(f"after {step:,} instances in {seconds[0]:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, or evaluate a checkpoint."""
    args = tyro.cli(Args, args=argv)
    torch.set_float32_matmul_precision("medium")  # on CPUs oneDNN instead of MKL, on CUDA TF32
    if (
        sys.platform == "linux"
    ):  # freed memory is kept: to give it back and get it anew took a fifth of each step
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: none
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
    checkpoint = None
    if args.evaluate is not None and (args.resume is not None or WORLD_SIZE > 1):
        fail("--resume and --evaluate exclude each other, and --evaluate is for one process")
    path = args.resume if args.evaluate is None else args.evaluate
    if path is not None:
        checkpoint = load_checkpoint(path)
        saved = checkpoint["args"]
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        for name in (
            ("num_layers",) if args.resume is None else ("num_layers", "seed", "optimizer", "eval_episodes")
        ):
            if getattr(args, name) != getattr(saved, name):
                fail(f"--{name.replace('_', '-')}: {path} was trained with {getattr(saved, name)}")
    if args.resume is not None:
        if "optimizer" not in checkpoint:
            fail(f"--resume {path}: has no optimizer state; give the checkpoint.pt beside it")
        is_done = checkpoint["iteration"] >= args.num_epochs
        if is_done and Path(path).with_name("result.json").exists():
            fail(f"--resume {path}: its {checkpoint['iteration']} epochs are done; raise --num-epochs")
    check_args(args)
    if args.evaluate is None:
        return train(args, checkpoint)

    device = setup_device(args)
    _, instances = load_points(args)
    agent = AttentionModel(args.num_layers).to(device)
    agent.load_state_dict(checkpoint["agent"])
    metrics, found = evaluate(agent, device, instances, args.decoding)
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")
    if args.solve is not None:
        tsp.write_tours(args.solve, instances, tsp.choose_shortest(found))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: a training goes on with --resume and the checkpoint.pt in its run folder")
