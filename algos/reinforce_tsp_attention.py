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
Unlike in the papers, the first node is learned, inputs are scaled, learning rates decay, and Muon is used.
Shapes: B instances (M in a file), N nodes, P tours each, T steps, Q = P T, D embedding, H heads, d = D / H.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "numpy", "tyro", "tensorboard", "wandb", "tqdm"]
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

sys.path.append(os.getcwd())  # for envs_shared/tsplib.py, if --data is a .tsp
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
METRICS = ("policy_loss", "tour_length", "grad_norm")  # per update
DECODINGS = ("greedy", "multistart", "multistart_x8")
EMBED_DIM, NUM_HEADS = 128, 8  # D and H, so that sqrt(d) = 4
make_map = partial(nn.Linear, EMBED_DIM, EMBED_DIM, bias=False)
CPU_HAS_BFLOAT16 = getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16")
Encoded = namedtuple("Encoded", "first_queries last_queries k v logit_k")  # what the decoder needs
State = namedtuple("State", "first last log_mask")  # nodes [B, P, 1] (N: none yet), 0 or -inf [B, P, 1, N]
Instances = namedtuple("Instances", "points tours measure")  # [M, N, 2]; [M, N] or None; as tour_length


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
    eval_interval: int = 0  # epochs between evaluations and checkpoints (0: ten a run, fewer if costly)
    eval_episodes: int = 1000  # random instances per evaluation without --data (0: never evaluate)
    env_id: str = "tsp20-uniform"  # tspN-uniform (in the unit square) or tspN-gaussian, with N nodes
    train_path: str | None = None  # train on the instances of this file, in ML4CO text
    data: str | None = None  # evaluate on this file: ML4CO text, or .tsp with envs_shared/tsplib.py
    solve: str | None = None  # with --evaluate and --data: new folder to write the shortest tours to
    num_epochs: int = 35  # epochs; after each one, the rollout baseline may change
    steps_per_epoch: int = 100  # gradient steps per epoch
    batch_size: int = 32  # instances B of a gradient step, in total across processes
    baseline: Literal["pomo", "rollout"] = "pomo"  # b(s): mean of N tours, or the best policy's greedy tour
    baseline_instances: int = 10_000  # rollout: instances to compare the policy with the best (thousands)
    baseline_level: float = 0.05  # rollout: level of the t-test for a new best policy (0.5: any improvement)
    optimizer: Literal["muon", "adam"] = "muon"  # for the matrices that map embeddings; Adam trains the rest
    learning_rate: float = 1e-3  # Adam learning rate; Muon's steps have a root mean square of 0.4 times it
    anneal_lr: bool = True  # lower the learning rates to zero along a half cosine
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm


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
        self.project_q, self.project_k, self.project_v, self.project_out = (make_map() for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(EMBED_DIM, 512), nn.ReLU(), nn.Linear(512, EMBED_DIM))
        self.norm1, self.norm2 = nn.BatchNorm1d(EMBED_DIM), nn.BatchNorm1d(EMBED_DIM)

    def forward(self, h):
        k, v, shape = split_heads(self.project_k(h) / 4), split_heads(self.project_v(h)), h.shape[:2]
        h = self.norm1((h + self.project_out(attend(self.project_q(h), k, v))).flatten(0, 1))  # eq. 2
        return self.norm2(h + self.ff(h)).unflatten(0, shape)  # eq. 3


class AttentionModel(nn.Module):
    """Encoder of Kool et al. and the projections of their decoder, with 708,608 parameters."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Linear(2, EMBED_DIM), nn.Sequential(*(EncoderLayer() for _ in range(3)))
        # W^Q in three parts, one for each part of the context; W^K and W^V of eq. 5, W^O and W^K of eq. 7
        self.project_graph, self.project_last, self.project_first = (make_map() for _ in range(3))
        self.project_k, self.project_v = make_map(), make_map()
        self.project_out, self.project_logit_k = make_map(), make_map()
        self.placeholders = nn.Parameter(torch.empty(2, EMBED_DIM).uniform_(-1, 1))  # v^f and v^l

    def forward(self, points):
        """Encode points [B, N, 2] in any unit; projects each node once instead of at each decoding step."""
        offset = points - points.amin(1, True)
        unit_points = offset / offset.amax((1, 2), True).clamp(min=1e-30)
        h = self.layers(self.embed(unit_points.float()))  # [B, N, D]
        first, last = (torch.cat((h, v.expand(len(h), 1, -1)), 1) for v in self.placeholders)
        k, v = split_heads(self.project_k(h) / 4), split_heads(self.project_v(h))
        # W^O is applied to the keys, since there are fewer of them: (W^O g) . k_j = g . (k_j W^O)
        logit_k = self.project_logit_k(h) @ self.project_out.weight / EMBED_DIM**0.5
        first_queries = self.project_graph(h.mean(1, True)) + self.project_first(first)
        return Encoded(first_queries, self.project_last(last), k, v, logit_k)


def decode(encoded, first, last, log_mask):
    """Return u [B, P, T, N] of eq. 7, given first and last nodes [B, P, 1 or T] and log_mask [B, P, T, N]."""
    offset = torch.arange(len(first), device=first.device).view(-1, 1, 1) * encoded.first_queries.shape[1]
    first_query = nn.functional.embedding(first + offset, encoded.first_queries.flatten(0, 1))
    last_query = nn.functional.embedding(last + offset, encoded.last_queries.flatten(0, 1))
    q, log_mask = (first_query + last_query).flatten(1, 2), log_mask.flatten(1, 2)  # eq. 4, 5
    glimpse = attend(q, encoded.k, encoded.v, log_mask.unsqueeze(1))  # eq. 6
    logits = 10 * torch.bmm(glimpse, encoded.logit_k.transpose(1, 2)).tanh() + log_mask  # eq. 7
    return logits.unflatten(1, last.shape[1:])


# ---- Environments ------------------------------------------------------------------------------------------
def tour_length(points, tours):
    """Return lengths [B, P] of closed tours [B, P, N] through points [B, N, 2]."""
    stops = points.gather(1, tours.flatten(1).unsqueeze(-1).expand(-1, -1, 2)).view(*tours.shape, 2)
    return (stops - stops.roll(-1, 2)).norm(dim=-1).sum(-1)


class TspEnv:
    """Builds P tours of each instance; the only reward, at the end, is minus the closed tour's length."""

    def reset(self, points, num_tours):
        """Begin `num_tours` empty tours of each instance in points [B, N, 2]; returns the state."""
        self.points, self.nodes, (num_instances, num_nodes, _) = points, [], points.shape
        with points.device:
            nowhere = torch.full((num_instances, num_tours, 1), num_nodes)
            self.state = State(nowhere, nowhere, torch.zeros(num_instances, num_tours, 1, num_nodes))
        return self.state

    def step(self, node):
        """Visit an unvisited node [B, P, 1]; returns the state and the reward [B, P] (None until the end)."""
        self.nodes.append(node)
        self.state.log_mask.scatter_(-1, node.unsqueeze(-1), -torch.inf)
        self.state = State(self.nodes[0], node, self.state.log_mask)
        is_done = len(self.nodes) == self.points.shape[1]
        return self.state, -tour_length(self.points, torch.cat(self.nodes, -1)) if is_done else None


# ---- Storage -----------------------------------------------------------------------------------------------
def draw_points(env_id, num_instances, stored=None):
    """Draw points [B, N, 2]: new random ones, or random rows of a file's instances [M, N, 2]."""
    if stored is not None:
        return stored[torch.randint(len(stored), (num_instances,))]
    match = re.fullmatch(r"tsp([3-9]|[1-9]\d+)-(uniform|gaussian)", env_id)
    if not match:
        fail(f"--env-id {env_id}: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes")
    return (torch.rand if match[2] == "uniform" else torch.randn)(num_instances, int(match[1]), 2)


def read_instances(path: str):
    """Read instances of equal size, one per line: `x y x y ... output 1 4 ... 1`; tours are optional."""
    try:
        if path.endswith(".tsp"):
            from envs_shared.tsplib import read_tsplib

            return Instances(*read_tsplib(path))
        text = Path(path).read_text("utf-8-sig").strip() or path  # so that an empty file is refused
        has_tours = "output" in text
        rows = np.loadtxt(text.replace("output", "").splitlines(), ndmin=2)  # [M, 2 N], or [M, 3 N + 1]
        num_nodes, rest = divmod(rows.shape[1] - has_tours, 2 + has_tours)
        points, tours = np.split(rows, [2 * num_nodes], 1)  # [M, 2 N], [M, N + 1] or [M, 0]
        is_tour = (np.sort(tours[:, :-1]) == np.arange(1, 1 + num_nodes * has_tours)).all(1)
        is_right = is_tour & (np.abs(points) < 1e100).all(1) & (num_nodes >= 3 and not rest)
        if not is_right.all():
            raise ValueError(f"instance {is_right.argmin() + 1} has under 3 points, infinite ones or no tour")
    except (ImportError, OSError, ValueError) as error:
        fail(f"{path}: {error}; ML4CO text has lines `x y x y x y output 1 3 2 1` of one length; no pickles")
    tours = torch.tensor(tours[:, :-1] - 1).long() if has_tours else None
    return Instances(torch.tensor(points.reshape(-1, num_nodes, 2)), tours, tour_length)


# ---- REINFORCE ---------------------------------------------------------------------------------------------
@torch.no_grad()
def construct_tours(points, encoded, multistart=False, sample=False):
    """Build a tour of points [B, N, 2], or one from each node; returns tours [B, P, N], lengths [B, P]."""
    env, n, reward = TspEnv(), points.shape[1], None
    state = env.reset(points, n if multistart else 1)
    if multistart:
        state, _ = env.step(torch.arange(n, device=points.device).view(1, -1, 1).expand(len(points), -1, 1))
    while reward is None:
        logits = decode(encoded, *state)  # [B, P, 1, N]
        if sample:  # from eq. 8: the first node whose cumulative probability reaches a number from (0, 1]
            cumulated = logits.softmax(-1).cumsum(-1)
            node = (cumulated < cumulated[..., -1:] * (1 - torch.rand_like(cumulated[..., :1]))).sum(-1)
        else:
            node = logits.argmax(-1)
        state, reward = env.step(node)
    return torch.cat(env.nodes, -1), -reward


def score_tours(encoded, tours):
    """Return log p [B, P] of tours [B, P, N] given their first nodes, and log p [B, N] of first nodes."""
    steps = torch.arange(1, tours.shape[2] - 1, device=tours.device)  # [T], T = N - 2: the last is forced
    is_open = tours.argsort(-1).unsqueeze(2) >= steps.unsqueeze(1)  # [B, P, T, N]; argsort: visit time
    log_mask = torch.where(is_open, 0.0, -torch.inf)
    log_probs = decode(encoded, tours[:, :, :1], tours[:, :, :-2], log_mask).log_softmax(-1)  # eq. 8
    log_likelihood = log_probs.gather(-1, tours[:, :, 1:-1].unsqueeze(-1)).sum((2, 3))  # eq. 1
    start_logits = decode(encoded, *TspEnv().reset(encoded.logit_k, 1))  # [B, 1, 1, N], of empty tours
    return log_likelihood, start_logits.flatten(1).log_softmax(-1)


def compute_loss(agent, best_policy, points):
    """Return a loss with the gradient of eq. 9 (POMO: plus that of the first node), and the mean length."""
    encoded, is_pomo = agent(points), best_policy is None
    tours, lengths = construct_tours(points, encoded, is_pomo, sample=True)  # [B, P, N], [B, P]
    log_likelihood, start_log_probs = score_tours(encoded, tours)  # [B, P], [B, N]
    if is_pomo:
        advantages = lengths - lengths.mean(1, True)  # Kwon et al., eq. 3
        log_likelihood = log_likelihood + lengths.shape[1] * start_log_probs.exp()  # trains the first node
    else:
        advantages = lengths - construct_tours(points, best_policy(points))[1]
        log_likelihood = log_likelihood + start_log_probs.gather(1, tours[:, :, 0])
    return (log_likelihood * advantages).mean(), lengths.mean()


def update_weights(agent, best_policy, optimizers, args, points):
    """Take one gradient step on points [B, N, 2], and return METRICS [3]."""
    loss, length = compute_loss(agent, best_policy, points)
    agent.zero_grad()
    loss.backward()
    average_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    return average(torch.stack((loss.detach(), length, grad_norm)))


@torch.no_grad()
def is_better(agent, best, points, level):
    """Test if the policy's greedy tours of points [n, N, 2] are shorter, by a one-sided paired t-test."""
    agent.eval()
    parts = points.split(1000)
    d = torch.cat([construct_tours(x, agent(x))[1] - construct_tours(x, best(x))[1] for x in parts])
    t = average(d.mean() / d.std() * len(d) ** 0.5) * WORLD_SIZE**0.5
    return torch.special.ndtr(t) < level  # normal instead of t distribution, since n is in the thousands


def orthogonalize(x):
    """Approximate U V^T of x = U S V^T [M, m, n] by five Newton-Schulz steps, in bfloat16 if it is fast."""
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    y = x.bfloat16() if x.is_cuda or CPU_HAS_BFLOAT16 else x
    y = nn.functional.normalize(y.flatten(1)).view_as(y)
    for _ in range(5):
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Steps along orthogonalized momentum (Jordan et al. 2024); batches matrices of equal shape."""

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        trained = [p for p in group["params"] if p.grad is not None]  # without what a user has frozen
        for shape in {p.shape for p in trained}:
            params, updates = [p for p in trained if p.shape == shape], []
            for p in params:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                updates.append(p.grad.lerp(momentum, 0.95))  # Nesterov momentum
            step_size = group["lr"] * 0.4 * max(shape) ** 0.5  # twice match_rms_adamw of torch
            for p, update in zip(params, orthogonalize(torch.stack(updates)), strict=True):
                p.sub_(update, alpha=step_size)


# ---- Evaluation --------------------------------------------------------------------------------------------
def apply_symmetries(points):
    """Return the eight images [B, N, 2] of points [B, N, 2] under the symmetries of the square."""
    return [x * x.new_tensor((a, b)) for x in (points, points.flip(-1)) for a in (1, -1) for b in (1, -1)]


@torch.no_grad()
def evaluate(agent, instances, device, decodings=DECODINGS):
    """Score the shortest tours that each decoding finds; also returns the last decoding's tours [M, N]."""
    (points, references, measure), scores = instances, {}
    parts = points.to(device).split(2**18 // points.shape[1] ** 2 + 1)
    agent.eval()
    for decoding in decodings:
        found = []
        for part in tqdm(parts, decoding, leave=False, delay=2):
            images = apply_symmetries(part) if decoding == "multistart_x8" else [part]
            tours = torch.cat([construct_tours(x, agent(x), decoding != "greedy")[0] for x in images], 1)
            found.append(tours.take_along_dim(measure(part, tours).argmin(1)[:, None, None], 1).cpu())
        lengths = measure(points, torch.cat(found))  # [M, 1], of the shortest tours [M, 1, N]
        scores[f"eval/{decoding}_length"] = lengths.mean().item()
        if references is not None:
            gaps = 100 * (lengths / measure(points, references[:, None]) - 1)
            std, mean = torch.std_mean(gaps, correction=0)
            scores |= {f"eval/{decoding}_gap": mean.item(), f"eval/{decoding}_gap_std": std.item()}
    return scores, torch.cat(found).squeeze(1)


def write_tours(args, instances, tours):
    """Write tours [M, N] to the new folder --solve, in the format of --data."""
    rows = zip(instances.points.flatten(1).tolist(), (tours + 1).tolist(), strict=True)
    text = "".join(f"{' '.join(map(str, xy))} output {' '.join(map(str, [*t, t[0]]))}\n" for xy, t in rows)
    path = Path(f"{Path(args.solve)}.tmp", Path(args.data).name)
    if path.suffix == ".tsp":
        from envs_shared.tsplib import format_tour

        path, text = path.with_suffix(".tour"), format_tour(path.stem, tours[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.parent.rename(args.solve)


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


def fail(message: str):
    """Print one line for the user and exit with code 2."""
    tqdm.write(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def average(x):
    """Average a tensor over all processes, in place."""
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

    Returns a seed for environments. Environment i gets this seed + i, which stays below 2^31.
    """
    seed = int(np.random.SeedSequence(stream).generate_state(1)[0]) % 2**30
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    return seed


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


def save_checkpoint(run_path: Path, args, progress, parts: dict, name: str):
    """Write all states to a side file and rename it, so that a kill leaves either the old or the new file."""
    states = {key: part.state_dict() for key, part in parts.items()}
    checkpoint = {"args": asdict(args), "progress": asdict(progress), **states}
    torch.save(checkpoint, run_path / f"{name}.tmp")
    os.replace(run_path / f"{name}.tmp", run_path / name)


def load_checkpoint(path):
    """Read a checkpoint of this script, without executing anything in it; exits if the file is none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["args"] = Args(**checkpoint["args"])
        checkpoint["progress"] = Progress(**checkpoint["progress"])
        return checkpoint
    except Exception:
        fail(f"{path}: missing, or not a checkpoint of this version of {Path(__file__).name}")


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


def is_same_task(before, args) -> bool:
    """Whether two settings score policies on the same instances."""
    return (before.env_id, before.data, before.eval_episodes) == (args.env_id, args.data, args.eval_episodes)


def train(args, run_path: Path, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate, only score the checkpoint."""
    device = set_up_device(args)
    torch.empty(8_000_000)  # freed at once: glibc then keeps freed memory, which saves a fifth of a step
    torch.set_float32_matmul_precision("medium")  # TF32 on GPUs, and on CPUs oneDNN's kernels
    stored = read_instances(args.train_path).points.float() if args.train_path and not args.evaluate else None
    seed_everything(args.seed, 3 if args.evaluate else 2)  # other instances than those that selected best.pt
    instances = Instances(draw_points(args.env_id, args.eval_episodes).double(), None, tour_length)
    instances = read_instances(args.data) if args.data else instances
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = AttentionModel().to(device)
    maps = [p for p in agent.parameters() if p.ndim == 2 and min(p.shape) > 2] * (args.optimizer == "muon")
    others = [p for p in agent.parameters() if p not in set(maps)]
    optimizers = torch.optim.Adam(others, fused=True), Muon([{"params": maps}], {})
    best_policy = deepcopy(agent).eval().requires_grad_(False)  # for the rollout baseline; not best.pt
    baseline = best_policy if args.baseline == "rollout" else None
    parts = {"agent": agent, "best_policy": best_policy, "optimizer": optimizers[0], "muon": optimizers[1]}
    progress = checkpoint["progress"] if checkpoint else Progress()
    if checkpoint:
        try:
            for name in checkpoint.keys() & parts | {"agent"}:
                parts[name].load_state_dict(checkpoint[name])
        except (KeyError, RuntimeError, ValueError):
            fail(f"{args.evaluate or args.resume}: does not fit --optimizer")
    if args.evaluate:
        scores, tours = evaluate(agent, instances, device)
        print(scores)
        if args.solve:
            write_tours(args, instances, tours)
        return

    save = partial(save_checkpoint, run_path, args, progress, parts)
    if RANK == 0:
        writer = open_run(run_path, args, progress.step)
        print(f"{run_path}: {args.env_id} on {device}, epoch {progress.iteration}")
        if not checkpoint:
            save("checkpoint.pt")
        elif not (run_path / "best.pt").exists() or not is_same_task(checkpoint["args"], args):
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

    size, epoch_size = args.batch_size // WORLD_SIZE, args.batch_size * args.steps_per_epoch
    eval_interval = args.eval_interval or args.num_epochs // 10 + 1
    saved_at = time.time()
    with tqdm(
        total=args.num_epochs * epoch_size,
        initial=progress.step,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # seconds
        disable=RANK > 0,
    ) as bar:
        while progress.iteration < args.num_epochs:
            start, cpu_start, metrics = time.time(), time.process_time(), 0.0
            seed_everything(args.seed, 1, progress.iteration, RANK)
            progress.last_score = None  # of the policy that this epoch makes
            agent.train()

            # Learning rate: it falls to zero along a half cosine
            share = progress.iteration / args.num_epochs * args.anneal_lr
            lr = args.learning_rate / 2 * (1 + math.cos(math.pi * share))
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = lr

            # Gradient steps, each on new instances
            for _ in range(args.steps_per_epoch):
                points = draw_points(args.env_id, size, stored).to(device)
                metrics += update_weights(agent, baseline, optimizers, args, points) / args.steps_per_epoch
                bar.update(args.batch_size)
            for buffer in agent.buffers():  # batch norm statistics
                buffer.copy_(average(buffer.double()))

            # Rollout baseline: the policy becomes the baseline's if it is better beyond noise
            if baseline:
                points = draw_points(args.env_id, args.baseline_instances // WORLD_SIZE, stored).to(device)
                if is_better(agent, best_policy, points, args.baseline_level):
                    best_policy.load_state_dict(agent.state_dict())
            progress.iteration += 1
            progress.step += epoch_size
            progress.cpu_seconds += time.process_time() - cpu_start

            # Log, in process 0 alone
            if RANK > 0:
                continue
            if not metrics.isfinite().all():
                fail(f"{args.env_id}: losses are not finite at instance {progress.step}")
            scalars = {f"losses/{name}": x for name, x in zip(METRICS, metrics.tolist())}
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

            # Evaluate, without --eval-interval on at most a fifth as many instances as in training
            eval_steps = progress.eval_steps + len(instances.points)
            is_affordable = args.eval_interval or eval_steps <= progress.step / 5
            if is_due and is_affordable and args.eval_episodes and not is_last:
                score_policy(DECODINGS[:1])
                bar.set_postfix_str(f"greedy {progress.last_score:.3f}", refresh=False)

    # Evaluate the last policy
    if RANK > 0:
        return
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
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if type(value) in (int, float) and not value >= least:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be at least {least}")
    if args.batch_size % WORLD_SIZE:
        fail(f"--batch-size ({args.batch_size}) must be divisible by the number of processes ({WORLD_SIZE})")
    if args.solve and (Path(args.solve).exists() or not (args.evaluate and args.data)):
        fail(f"--solve {args.solve}: must be a new folder, and needs --evaluate and --data")
    if args.evaluate and not args.data and not args.eval_episodes:
        fail("--evaluate needs --eval-episodes or --data")
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    run_path = Path(path).parent if path else Path(args.run_dir, re.sub("[:/]", "-", name))
    try:
        train(args, run_path, checkpoint)
    except KeyboardInterrupt:
        newest = run_path / "checkpoint.pt"
        if RANK == 0 and newest.exists():
            how = f"python {sys.argv[0]} --resume {newest}"
            print(f"{run_path}: interrupted; to resume: {how}", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
    if RANK > 0:
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
