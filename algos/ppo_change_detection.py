"""PPO that decides where a change detector looks closely, in one file.

Two pictures of one place are classified from coarse copies. Each patch of them is a query: an embedding, from which the
classes of its cells (squares of a few pixels) are read. Then it stops, or pays for a look at its own window at full
resolution, which gives a correction, one number a cell, that is mapped and added to the embedding. PPO learns which of
the two. The looks of a query are an episode.
Paper: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347).

    python algos/ppo_change_detection.py                   # first run: synthetic pairs, minutes on one core
    python algos/ppo_change_detection.py --data-dir LEVIR-CD --image-size 256 --coarse-iterations 200 \
        --refine-iterations 800 --ppo-iterations 400 --num-envs 64       # full size: a folder of real pairs
    python algos/ppo_change_detection.py --pretrained runs/.../checkpoint.pt --cost 0.1   # PPO alone, at another price
    python algos/ppo_change_detection.py --evaluate runs/.../best.pt --predict A B --output maps   # of files or folders
    torchrun --nproc-per-node 2 algos/ppo_change_detection.py   # several GPUs (CPU processes: --no-cuda)

Three stages, one after the other:

    coarse   cross entropy trains backbone and class head on the coarse pictures; nobody looks
    refine   cross entropy trains the refiner (it makes a look) and the class head; every query looks; from here on the
             backbone is fixed
    ppo      eq. 5 trains policy and value head, refiner and class head; --pretrained begins here

What PPO computes for each query, whose cells have the classes y (one step by default, where eq. 3 is A = r - V):

    (1) r_t = w(p_{t+1}) - w(p_t) - cost, where a query goes on at step t; it stops for good otherwise, at no cost
    (2) w(p) = mean over its cells of beta max(log p(y), -7) + 1[p(no change) < 1/2] (2 [y is change] - F), the worth of
        a classification. F is a running F1 = 2 TP / (predicted + true) of the last maps: one more prediction of change
        alters it in proportion to 2 [y is change] - F1
    (3) A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t), without t + 1 after a stop
    (4) pi(a | s) = pi(stop | s), or pi(go on | s) N(correction | mean(s, window), sigma)
    (5) L = E[-sum min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + c1 (V - return)^2 / 2 - c2 H(go on)] + c3 cross
        entropy. The sum is over the two factors of eq. 4, each with a ratio of its own (Fan et al. 2019,
        arXiv:1903.01344); A has mean 0 and deviation 1 in each minibatch

Shapes: T steps, B pairs, N queries, G cells of a query, C classes, D embedding, E features, K queries that go on;
S side of a picture, P of a patch, c of a cell, in pixels.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "tyro>=0.9", "tensorboard>=2.18", "wandb>=0.19", "tqdm>=4.66", "matplotlib>=3.9",
#     "pillow>=10.0",
# ]
# ///

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
from torch.distributions import Bernoulli, Normal
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [
    str(Path(__file__).resolve().parents[1]),
    os.getcwd(),
]  # for envs_shared, and for your own environments
from envs_shared.change_tasks import data as change_data
from envs_shared.change_tasks import scores as change_scores

SCRIPT = "ppo_change_detection"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
SUPERVISED_STEPS = 20  # gradient steps of an iteration of the first two stages


@dataclass
class Args:
    """Change detection that looks closely only where that pays: a detector, then PPO."""

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
    env_id: str = "buildings"  # synthetic pairs: buildings, buildings-cloudy, or prints
    data_dir: str | None = None  # folder of a real set, in place of --env-id
    # its folders of the first date, the second and the labels
    dir_names: tuple[str, str, str] = ("A", "B", "label")
    data_seed: int = 1  # seed of the synthetic pairs
    num_train_pairs: int = 2048  # synthetic pairs to train on; val and test have 5 times --eval-episodes each
    image_size: int = 64  # side S of a picture in pixels; those of --data-dir are cut into crops of this size
    patch_size: int = 8  # side P of a query's patch in pixels
    cell_size: int = 2  # side c of a cell in pixels, which has a class of its own
    coarse_size: int = 4  # side in pixels of what is averaged into a pixel of the coarse pictures
    num_classes: int = 2  # classes C: unchanged and changed; synthetic with 3: unchanged, appeared, vanished
    # a look shows both dates; or the first one the first date, then both
    look_at: Literal["pair", "dates"] = "pair"
    jitter: float = 0.05  # brightness and contrast of each date change by up to this in training

    # Algorithm
    refiner_dim: int = 64  # channels of the refiner, which takes most of a look's time
    pretrained: str | None = None  # checkpoint whose detector is taken, with its pairs; PPO begins at once
    coarse_iterations: int = 50  # iterations of the first stage, of 20 gradient steps
    refine_iterations: int = 40  # iterations of the second stage, of 20 gradient steps
    ppo_iterations: int = 60  # iterations of the third stage, of a rollout each
    batch_size: int = 16  # pairs of a gradient step of the first two stages, over all processes
    supervised_lr: float = 3e-3  # of Adam in the first two stages
    learning_rate: float = 1e-3  # of Adam in the third stage
    anneal_lr: bool = True  # hold the learning rate for a third of each stage, then lower it linearly to zero
    num_envs: int = 128  # pairs B of a rollout, over all processes
    num_steps: int = 1  # steps T of an episode, the most looks that a query can take
    cost: float = 0.015  # price of a look, in the units of eq. 2
    beta: float = 0.1  # weight of the log-likelihood in eq. 2
    gamma: float = 1.0  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 3
    num_minibatches: int = 4  # minibatches of an epoch
    update_epochs: int = 1  # epochs over each rollout
    clip_coef: float = 0.2  # clipping range epsilon of the surrogate, eq. 5
    vf_coef: float = 0.5  # value coefficient c1, eq. 5
    ent_coef: float = 0.003  # entropy coefficient c2, eq. 5
    joint_coef: float = 50.0  # coefficient c3 of the cross entropy, eq. 5
    max_grad_norm: float = 1.0  # largest global norm of the gradient (inf: no limit)

    # Prediction
    # with --evaluate: two pictures of one place, or two folders of them
    predict: tuple[str, str] | None = None
    output: str = "change_maps"  # --predict: folder for a mask and a map of probability of each pair


# ---- Networks --------------------------------------------------------------------------------------------------------


def make_head(dim_in: int, dim_out: int) -> nn.Sequential:
    """A perceptron with one hidden layer of 64 units."""
    return nn.Sequential(nn.LayerNorm(dim_in), nn.Linear(dim_in, 64), nn.GELU(), nn.Linear(64, dim_out))


class Backbone(nn.Module):
    """Coarse pairs [B, 6, h, w] in [-0.5, 0.5] to queries [B, N, D], one a patch; the same for pictures of any size."""

    def __init__(self, args: Args, embed_dim: int, dim: int = 32):
        super().__init__()
        patch = args.patch_size // args.coarse_size
        self.stem = nn.Conv2d(6, dim, 3, padding=1)
        self.to_patches = nn.Conv2d(dim, embed_dim, patch, patch)
        self.mix = nn.ModuleList([nn.Conv2d(embed_dim, embed_dim, 3, padding=1) for _ in range(2)])
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, coarse: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.to_patches(F.gelu(self.stem(coarse))))  # [B, D, S / P, S / P]
        for mix in self.mix:
            x = x + F.gelu(mix(x))
        return self.norm(x.flatten(2).transpose(1, 2))


class Refiner(nn.Module):
    """What is paid for: convolutions at full resolution, and the correction that a query gets from them."""

    def __init__(self, args: Args, embed_dim: int, date_dim: int = 16, num_blocks: int = 2):
        super().__init__()
        dim = args.refiner_dim
        self.side = args.patch_size // args.cell_size
        self.sees_pair = args.look_at == "pair"
        self.read_date = nn.Conv2d(3, date_dim, 2 * args.cell_size, args.cell_size)
        self.compare = nn.Conv2d(3 * date_dim, dim, 2)
        self.from_query = nn.Linear(embed_dim, dim)
        self.from_step = nn.Embedding(args.num_steps, dim)
        self.blocks = nn.ModuleList([nn.Conv2d(dim, dim, 3, padding=1) for _ in range(num_blocks)])
        self.mean = nn.Conv2d(dim, 1, 1)

    def read(self, pixels: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Features [K, E, h / c - 2, w / c - 2] of the cells of windows or whole pictures [K, 6, h, w].

        They lose a cell on each side. The step [K] matters with --look-at dates alone.
        """
        dates = F.relu(self.read_date(pixels.unflatten(1, (2, 3)).flatten(0, 1)))
        dates = dates.unflatten(0, (-1, 2))  # [K, 2, E', y, x]
        if not self.sees_pair:
            is_seen = step.unsqueeze(1) >= torch.arange(2, device=step.device)  # [K, 2]
            dates = dates * is_seen[:, :, None, None, None]
        difference = (dates[:, :1] - dates[:, 1:]).abs()
        return F.relu(self.compare(torch.cat((dates, difference), 1).flatten(1, 2)))

    def correct(self, query: torch.Tensor, features: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Mean corrections [K, G], one number a cell, of queries [K, D] with features [K, E, side, side]."""
        x = features + (self.from_query(query) + self.from_step(step))[:, :, None, None]
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.mean(x).flatten(1)


class Agent(nn.Module):
    """The detector (backbone, refiner, class head), policy and value head."""

    def __init__(self, args: Args, embed_dim: int = 64):
        super().__init__()
        self.coarse_size = args.coarse_size
        self.patch_size = args.patch_size
        self.margin = args.cell_size  # which the refiner reads around a window, and loses
        self.num_steps = args.num_steps
        self.num_cells = (args.patch_size // args.cell_size) ** 2
        self.backbone = Backbone(args, embed_dim)
        self.refiner = Refiner(args, embed_dim)
        self.up = nn.Linear(self.num_cells, embed_dim, bias=False)  # correction to query
        nn.init.normal_(self.up.weight)  # large, so that corrections matter from the first gradient step on
        self.log_std = nn.Parameter(torch.full((self.num_cells,), -2.0))
        self.class_head = nn.Linear(embed_dim, self.num_cells * args.num_classes)
        self.policy_head = make_head(embed_dim + args.num_steps, 1)
        nn.init.zeros_(self.policy_head[-1].weight)
        nn.init.constant_(
            self.policy_head[-1].bias, 1e-3
        )  # likelier to look, so that the detector alone is complete
        self.value_head = make_head(embed_dim + args.num_steps, 1)
        self.register_buffer("running_f1", torch.tensor(0.5))  # F of eq. 2

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Queries [B, N, D] of pictures [B, 6, S + 2 c, S + 2 c], which are averaged first."""
        inner = images[:, :, self.margin : -self.margin, self.margin : -self.margin]
        return self.backbone(F.avg_pool2d(inner, self.coarse_size))

    def classify(self, query: torch.Tensor) -> torch.Tensor:
        """Logits [..., G, C] of queries [..., D]."""
        return self.class_head(query).unflatten(-1, (self.num_cells, -1))

    def decide(self, query: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of going on and values V, [B, N] each, of queries [B, N, D] at step [B]."""
        one_hot = (step.unsqueeze(1) == torch.arange(self.num_steps, device=step.device)).to(
            query.dtype
        )  # [B, T]
        state = torch.cat((query, one_hot.unsqueeze(1).expand(-1, query.shape[1], -1)), -1)
        return self.policy_head(state).squeeze(-1), self.value_head(state).squeeze(-1)

    def look(self, images: torch.Tensor, query: torch.Tensor, step: torch.Tensor, index=None) -> torch.Tensor:
        """Mean corrections [K, G] of the queries `index` [K] of all B N, which read their own windows and no others.

        Of pictures [B, 6, S + 2 c, S + 2 c], queries [B, N, D] and step [B]. Where all look (None), the pictures are
        read as wholes, which saves what neighbouring windows share. On a CPU, in parts that fit its cache.
        """
        num_queries = query.shape[1]
        chunk = 256 if images.device.type == "cpu" else len(images) * num_queries
        means = []
        if index is None:
            step = step.unsqueeze(1).expand(-1, num_queries)
            num_pairs = max(chunk // num_queries, 1)
            for start in range(0, len(images), num_pairs):
                part = slice(start, start + num_pairs)
                features = self.refiner.read(images[part], step[part, 0])  # [b, E, S / c, S / c]
                for axis in (2, 3):
                    features = features.unfold(axis, self.refiner.side, self.refiner.side)
                features = features.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # [b N, E, side, side]
                means.append(self.refiner.correct(query[part].flatten(0, 1), features, step[part].flatten()))
            return torch.cat(means)

        size = self.patch_size + 2 * self.margin
        windows = images.unfold(2, size, self.patch_size).unfold(3, size, self.patch_size)  # a view
        padded = F.pad(index, (0, -len(index) % 64))  # few sizes, as torch prepares kernels for each
        for part in padded.split(chunk):
            pair = part // num_queries
            place = part % num_queries
            row = place // windows.shape[3]
            features = self.refiner.read(windows[pair, :, row, place % windows.shape[3]], step[pair])
            means.append(self.refiner.correct(query[pair, place], features, step[pair]))
        return torch.cat(means)[: len(index)]


# ---- Storage ---------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """An episode of each query of B pairs: T steps, until nobody is active any more."""

    images: torch.Tensor  # [B, 6, S + 2 c, S + 2 c], of all steps
    labels: torch.Tensor  # [B, N, G], of all steps
    query: torch.Tensor  # [T, B, N, D] before the step
    after: torch.Tensor  # [T, B, N, D] after it
    active: torch.Tensor  # [T, B, N] had not stopped before; what the others have does not count
    goes_on: torch.Tensor  # [T, B, N] decided to look
    correction: torch.Tensor  # [T, B, N, G], zero where there was no look
    log_probs: torch.Tensor  # [T, B, N, 2] of decision and correction
    values: torch.Tensor  # [T, B, N], as are the next
    rewards: torch.Tensor
    advantages: torch.Tensor

    def read_rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows [n] of T B, for a minibatch."""
        pair = rows % len(self.images)
        minibatch = {
            "images": self.images[pair],
            "labels": self.labels[pair],
            "step": rows // len(self.images),
        }
        return minibatch | {name: getattr(self, name).flatten(0, 1)[rows] for name in self._fields[2:]}


# ---- PPO -------------------------------------------------------------------------------------------------------------


def get_worth(logits: torch.Tensor, labels: torch.Tensor, f1: torch.Tensor, beta: float) -> torch.Tensor:
    """w of eq. 2, [B, N] of logits [B, N, G, C] and labels [B, N, G], where -1 does not count."""
    log_probs = logits.log_softmax(-1)
    is_counted = labels >= 0
    log_likelihood = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).clamp(min=-7.0)
    says_change = log_probs[..., 0] < math.log(0.5)
    worth = beta * log_likelihood + says_change * (2.0 * (labels > 0) - f1)  # [B, N, G]
    return (worth * is_counted).sum(-1) / is_counted.sum(-1).clamp(min=1)


def compute_gae(rewards, values, goes_on, gamma: float, gae_lambda: float) -> torch.Tensor:
    """Advantages [T, ...], eq. 3; an episode is over where it does not go on, and after the last step."""
    advantages = torch.empty_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    next_value = torch.zeros_like(rewards[0])  # nothing follows the last step
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value * goes_on[t] - values[t]
        advantage = delta + gamma * gae_lambda * advantage * goes_on[t]
        advantages[t] = advantage
        next_value = values[t]
    return advantages


def get_log_probs(go_logits, normal: Normal, goes_on, index, correction) -> torch.Tensor:
    """Log of the two factors of eq. 4, [B, N, 2], of decisions [B, N] and corrections [K, G] of the queries `index`.

    That of a correction is 0 where there is none.
    """
    decision = Bernoulli(logits=go_logits, validate_args=False).log_prob(goes_on.float())
    drawn = torch.zeros_like(decision).flatten().index_add(0, index, normal.log_prob(correction).sum(-1))
    return torch.stack((decision, drawn.view_as(decision)), -1)


@torch.no_grad()
def collect_rollout(agent: Agent, images, labels, args: Args) -> tuple[Rollout, dict[str, float]]:
    """An episode of each query of pictures [B, 6, S + 2 c, S + 2 c] and labels [B, N, G]; means over all processes."""
    steps = []
    query = agent.encode(images)  # [B, N, D]
    active = torch.ones_like(query[..., 0], dtype=torch.bool)  # [B, N]
    worth = get_worth(agent.classify(query), labels, agent.running_f1, args.beta)  # [B, N]
    for t in range(args.num_steps):
        step = torch.full((len(images),), t, device=images.device)
        go_logits, values = agent.decide(query, step)
        goes_on = active & (torch.rand_like(go_logits) < go_logits.sigmoid())
        index = goes_on.flatten().nonzero().squeeze(1)  # [K]
        normal = Normal(agent.look(images, query, step, index), agent.log_std.exp(), validate_args=False)
        drawn = normal.sample()  # [K, G]
        correction = drawn.new_zeros(goes_on.numel(), agent.num_cells).index_copy(0, index, drawn)
        after = query.flatten(0, 1).index_add(0, index, agent.up(drawn)).view_as(query)
        logits = agent.classify(after)
        new_worth = get_worth(logits, labels, agent.running_f1, args.beta)
        row = {"query": query, "after": after, "active": active, "goes_on": goes_on, "values": values}
        row["correction"] = correction.view(*goes_on.shape, -1)
        row["log_probs"] = get_log_probs(go_logits, normal, goes_on, index, drawn)
        row["rewards"] = (new_worth - worth - args.cost) * goes_on  # eq. 1
        steps.append(row)
        query = after
        active = goes_on
        worth = new_worth
        if len(index) == 0:
            break
    row = {name: torch.stack([step[name] for step in steps]) for name in row}  # [T, B, N, ...]
    advantages = compute_gae(row["rewards"], row["values"], row["goes_on"], args.gamma, args.gae_lambda)
    rollout = Rollout(images, labels, advantages=advantages, **row)

    # F of eq. 2 follows the F1 of the last classifications
    is_counted = labels >= 0
    is_changed = labels > 0
    says_change = (logits.softmax(-1)[..., 0] < 0.5) & is_counted
    counts = sum_over_ranks(
        torch.stack(((says_change & is_changed).sum(), says_change.sum() + is_changed.sum()))
    )
    agent.running_f1.lerp_(2 * counts[0] / counts[1].clamp(min=1), 0.05)

    # Accuracy of the cells that no look was paid for
    settled = ~rollout.goes_on[0].unsqueeze(-1) & is_counted
    is_right = settled & (logits.argmax(-1) == labels)
    totals = torch.stack((rollout.rewards.sum(), rollout.goes_on.sum(), is_right.sum(), settled.sum()))
    total_return, num_looks, num_right, num_settled = sum_over_ranks(totals).tolist()
    num_queries = active.numel() * WORLD_SIZE
    scalars = {"charts/episodic_return": total_return / num_queries, "charts/looks": num_looks / num_queries}
    if num_settled > 0:
        scalars["charts/settled_acc"] = num_right / num_settled
    return rollout, scalars | {"charts/running_f1": agent.running_f1.item()}


# In the order of what `update_minibatch` returns
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "cross_entropy", "grad_norm")


def get_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This process's part of the mean over the labels [...] of all processes that count, of logits [..., C]."""
    count = sum_over_ranks((labels >= 0).sum()).clamp(min=1)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="sum") / count


def normalize_advantages(advantages: torch.Tensor, active: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Advantages [n, N] to mean 0 and deviation 1 over the `count` active queries of all processes."""
    mean = sum_over_ranks((advantages * active).sum()) / count
    variance = sum_over_ranks(((advantages - mean).square() * active).sum()) / count
    return (advantages - mean) / (variance.sqrt() + 1e-8)


def ppo_loss(
    agent: Agent, minibatch: dict[str, torch.Tensor], args: Args
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 5 as the mean over the active queries of all processes, and this process's part of the METRICS [:6].

    `minibatch` has rows [n, ...] as `Rollout.read_rows` gives them.
    """
    query, active, goes_on = (minibatch[name] for name in ("query", "active", "goes_on"))
    count = sum_over_ranks(active.sum()).clamp(min=1)
    index = goes_on.flatten().nonzero().squeeze(1)  # [K]
    go_logits, values = agent.decide(query, minibatch["step"])
    mean = agent.look(minibatch["images"], query, minibatch["step"], index)  # [K, G]
    normal = Normal(mean, agent.log_std.exp(), validate_args=False)
    correction = minibatch["correction"].flatten(0, 1)[index]
    log_probs = get_log_probs(go_logits, normal, goes_on, index, correction)  # [n, N, 2]
    log_ratio = log_probs - minibatch["log_probs"]
    log_ratio = log_ratio * torch.stack(
        (active, goes_on), -1
    )  # ratio 1 where there is no decision, or no correction
    ratio = log_ratio.exp()
    advantages = normalize_advantages(minibatch["advantages"], active, count).unsqueeze(-1)  # [n, N, 1]
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    policy_loss = policy_loss[..., 0] + policy_loss[..., 1] * goes_on
    returns = minibatch["advantages"] + minibatch["values"]
    value_loss = 0.5 * (values - returns).square()
    entropy = Bernoulli(logits=go_logits, validate_args=False).entropy()

    # Joint loss: what is stored has no gradient and trains the class head alone; a mean anew trains the refiner as well
    labels = minibatch["labels"]
    cross_entropy = get_cross_entropy(
        agent.classify(minibatch["after"]), labels.masked_fill(~active.unsqueeze(-1), -1)
    )
    refined = query.flatten(0, 1)[index] + agent.up(mean)
    cross_entropy = cross_entropy + get_cross_entropy(agent.classify(refined), labels.flatten(0, 1)[index])
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # [n, N]
    loss = (loss * active).sum() / count + args.joint_coef * cross_entropy  # eq. 5
    is_clipped = (ratio - 1.0).abs() > args.clip_coef  # approx_kl and clipfrac are those of the decisions
    approx_kl = ratio - 1.0 - log_ratio
    metrics = torch.stack((policy_loss, value_loss, entropy, approx_kl[..., 0], is_clipped[..., 0].float()))
    metrics = (metrics.detach() * active).sum((1, 2)) / count
    return loss, torch.cat((metrics, cross_entropy.detach().unsqueeze(0)))


def detector_loss(agent: Agent, images: torch.Tensor, labels: torch.Tensor, num_looks: int) -> torch.Tensor:
    """Cross entropy of the coarse classification (no looks), or the mean of those after each look of all queries."""
    if num_looks == 0:
        return get_cross_entropy(agent.classify(agent.encode(images)), labels)
    with torch.no_grad():  # the backbone is fixed from here on
        query = agent.encode(images)  # [B, N, D]
    losses = []
    for t in range(num_looks):
        step = torch.full((len(images),), t, device=images.device)
        query = query + agent.up(agent.look(images, query, step)).view_as(query)
        losses.append(get_cross_entropy(agent.classify(query), labels))
    return sum(losses) / num_looks


def take_step(agent: Agent, optimizer, args: Args, loss: torch.Tensor) -> torch.Tensor:
    """One gradient step; returns an equal share of the gradient's norm for each process, since metrics are summed."""
    optimizer.zero_grad()
    loss.backward()
    sum_gradients(agent.parameters())
    grad_norm = clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return grad_norm.unsqueeze(0) / WORLD_SIZE


def update_detector(agent: Agent, optimizer, num_looks: int, args: Args, images, labels) -> torch.Tensor:
    """One gradient step of the first stage (no looks) or of the second; returns loss and norm of the gradient [2]."""
    loss = detector_loss(agent, images, labels, num_looks)
    return torch.cat((loss.detach().unsqueeze(0), take_step(agent, optimizer, args, loss)))


def update_minibatch(
    agent: Agent, optimizer, rollout: Rollout, args: Args, rows: torch.Tensor
) -> torch.Tensor:
    """One gradient step of the third stage on the rows [n] of T B; returns this process's part of the METRICS [7]."""
    loss, metrics = ppo_loss(agent, rollout.read_rows(rows), args)
    return torch.cat((metrics, take_step(agent, optimizer, args, loss)))


# ---- Evaluation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def classify(agent: Agent, args: Args, images: torch.Tensor, rule=None, chunk: int = 32) -> tuple:
    """Logits [M, N, G, C], looks [M, N] and milliseconds per pair of pictures uint8 [M, S + 2 c, S + 2 c, 6].

    Who goes on is said by the likelier decision of the policy, or by `rule(query, logits, step)`; corrections are the
    means. Time is that of the CPU where that computes.
    """
    device = agent.log_std.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    found = []
    for part in images.split(chunk):
        part = change_data.to_float(part.to(device))
        query = agent.encode(part)
        active = torch.ones_like(query[..., 0], dtype=torch.bool)
        looks = torch.zeros_like(active, dtype=torch.int64)
        for t in range(args.num_steps):
            step = torch.full((len(part),), t, device=device)
            goes_on = (
                agent.decide(query, step)[0] > 0 if rule is None else rule(query, agent.classify(query), t)
            )
            active = active & goes_on
            index = active.flatten().nonzero().squeeze(1)  # [K]
            if len(index) == 0:
                break
            mean = agent.look(part, query, step, None if len(index) == active.numel() else index)
            query = query.flatten(0, 1).index_add(0, index, agent.up(mean)).view_as(query)
            looks += active
        found.append((agent.classify(query).cpu(), looks.cpu()))
    logits, looks = (torch.cat(x) for x in zip(*found, strict=True))
    return logits, looks, 1e3 * (clock() - start) / len(images)


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
    may_be_zero = (
        "seed data_seed checkpoint_interval eval_interval coarse_iterations refine_iterations ppo_iterations"
    )
    may_be_zero = (
        f"{may_be_zero} jitter cost beta gamma gae_lambda clip_coef vf_coef ent_coef joint_coef".split()
    )
    for name, value in vars(args).items():
        is_number = type(value) in (int, float)
        if is_number and not (value > 0 or (value == 0 and name in may_be_zero)):
            fail(
                f"--{name.replace('_', '-')} {value}: has to be {'at least' if name in may_be_zero else 'above'} 0"
            )
        if name in ("gamma", "gae_lambda") and value > 1:
            fail(f"--{name.replace('_', '-')} {value}: has to be from 0 to 1")
    for whole, part in (
        ("image_size", "patch_size"),
        ("patch_size", "cell_size"),
        ("patch_size", "coarse_size"),
    ):
        if getattr(args, whole) % getattr(args, part) or getattr(args, whole) == getattr(args, part):
            fail(
                f"--{whole.replace('_', '-')} has to be a multiple, by 2 or more, of --{part.replace('_', '-')}"
            )
    if args.data_dir is None and args.env_id not in change_data.ENV_IDS:
        fail(f"--env-id {args.env_id}: unknown pairs (known: {', '.join(change_data.ENV_IDS)})")
    most_classes = 3 if args.data_dir is None else 255
    if not 2 <= args.num_classes <= most_classes:
        fail(f"--num-classes {args.num_classes}: has to be from 2 to {most_classes}")
    if args.data_dir is None and args.env_id == "prints" and args.image_size % 8:
        fail(f"--image-size {args.image_size}: has to be a multiple of 8 for --env-id prints")
    if args.look_at == "dates" and args.num_steps < 2:
        fail("--look-at dates needs --num-steps 2 or more, to see both dates")
    for name in ("num_envs", "batch_size"):
        if getattr(args, name) % WORLD_SIZE:
            fail(
                f"--{name.replace('_', '-')} {getattr(args, name)} does not divide among {WORLD_SIZE} processes"
            )
    if args.num_minibatches > args.num_steps * args.num_envs // WORLD_SIZE:
        fail(
            f"--num-minibatches {args.num_minibatches}: a process has fewer rows, --num-steps times --num-envs"
        )
    if args.predict is not None and args.evaluate is None:
        fail("--predict needs --evaluate")


def load_detector(agent: Agent, args: Args) -> None:
    """Take the detector of --pretrained, all but its policy and value head."""
    heads = {
        name: x for name, x in agent.state_dict().items() if name.startswith(("policy_head", "value_head"))
    }
    agent.load_state_dict(load_checkpoint(args.pretrained)["agent"] | heads)


# What a network is made for, the pairs it learns from, and what else a run that goes on keeps
SHAPES = "patch_size cell_size coarse_size num_classes look_at num_steps refiner_dim".split()
PAIRS = "env_id data_seed num_train_pairs image_size eval_episodes".split()
RUN = "coarse_iterations refine_iterations num_envs cost seed".split()


def check_same(args: Args, saved: Args, path: str, names: list[str]) -> None:
    """Exit with code 2 where a setting is not that of the checkpoint."""
    for name in names:
        if getattr(args, name) != getattr(saved, name):
            fail(
                f"--{name.replace('_', '-')} {getattr(args, name)}: {path} was trained with {getattr(saved, name)}"
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
    progress |= {"best": [0, 0.0], "threshold": 0.5}  # stage and score of the best, threshold of the last
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
    start = read_clock() - progress["seconds"]
    step = progress["global_step"]
    device = setup_device(args)

    # Streams of the seed: 1 weights; 2 pairs and samples, of each process
    seed_everything(args.seed, 1)
    agent = Agent(args).to(device)
    if args.pretrained is not None and checkpoint is None:
        load_detector(agent, args)
    pairs = None
    if args.data_dir is not None:  # which tells what is wrong with it before there is a run folder
        pairs = change_data.load_pairs(args, fail)
    seed_everything(args.seed, 2, RANK, step)
    use_graphs = args.cuda_graphs and device.type == "cuda" and WORLD_SIZE == 1
    lr = torch.tensor(args.supervised_lr, device=device)  # a tensor, so that CUDA graphs see it change
    optimizer = torch.optim.Adam(
        agent.parameters(), lr, fused=True, capturable=use_graphs
    )  # skips what is fixed

    parts = {"agent": agent, "optimizer": optimizer}
    if checkpoint is not None:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        optimizer.param_groups[0] |= {"lr": lr, "capturable": use_graphs}
        if WORLD_SIZE == 1:
            torch.set_rng_state(checkpoint["torch_rng"])
    if RANK == 0:
        run_path, writer = open_run(args, step)
        best_path = run_path / "best.pt"
        if checkpoint is None:
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)
    train_pairs, val, test = (pairs or change_data.load_pairs(args, fail)).values()

    # The steps of the stages; those of the detector have fixed shapes, and are CUDA graphs where that can be
    if args.compile:
        agent.backbone.compile()
        agent.refiner.correct = torch.compile(agent.refiner.correct, dynamic=True)  # of any number of queries
    graph = CudaGraph if use_graphs else lambda fn: fn
    update_coarse = graph(partial(update_detector, agent, optimizer, 0, args))
    update_refiner = graph(partial(update_detector, agent, optimizer, args.num_steps, args))

    draw_batch = partial(change_data.draw_batch, train_pairs, args, device)
    num_envs = args.num_envs // WORLD_SIZE
    sizes = [args.coarse_iterations, args.refine_iterations, args.ppo_iterations]  # of the stages
    ends = np.cumsum(sizes)
    num_iterations = int(ends[-1])
    rules = [
        change_scores.make_rule("coarse"),
        change_scores.make_rule("everywhere", num_looks=args.num_steps),
        None,
    ]
    eval_interval = args.eval_interval or math.ceil(num_iterations / 10)
    bar = tqdm(total=num_iterations, initial=progress["iteration"], unit="iteration", disable=RANK > 0)
    while progress["iteration"] < num_iterations:
        stage = int((progress["iteration"] >= ends).sum())  # 0: coarse, 1: refine, 2: ppo
        share_left = (ends[stage] - progress["iteration"]) / sizes[stage]
        lr.fill_(args.learning_rate if stage == 2 else args.supervised_lr)
        if args.anneal_lr:
            lr.mul_(min(1.0, 1.5 * share_left))
        scalars = {"charts/learning_rate": lr.item(), "charts/stage": stage}

        # Train the detector, or collect a rollout and optimize eq. 5 in epochs of minibatches
        metrics = []  # of each gradient step; cloned, as a graph writes over what it gave before
        if stage < 2:
            update = update_refiner if stage == 1 else update_coarse
            for _ in range(SUPERVISED_STEPS):
                metrics.append(update(*draw_batch(args.batch_size // WORLD_SIZE)).clone())
            step += SUPERVISED_STEPS * args.batch_size
        else:
            rollout, found = collect_rollout(agent, *draw_batch(num_envs), args)
            scalars |= found
            for _ in range(args.update_epochs):
                rows = torch.randperm(len(rollout.values) * num_envs, device=device)
                for part in rows.tensor_split(args.num_minibatches):
                    metrics.append(update_minibatch(agent, optimizer, rollout, args, part))
            step += args.num_envs
        progress |= {"iteration": progress["iteration"] + 1, "global_step": step}

        # Measure what is new
        means = sum_over_ranks(torch.stack(metrics).mean(0)).tolist()
        scalars |= {f"losses/{name}": mean for name, mean in zip(METRICS[-len(means) :], means, strict=True)}
        if not all(map(math.isfinite, means)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {scalars}")
        if RANK > 0:
            continue
        seconds = read_clock() - start - progress["eval_seconds"]
        scalars |= {"charts/wall_seconds": seconds[0], "charts/cpu_seconds": seconds[1]}
        scalars |= {"charts/pairs_per_second": step / seconds[0]}
        goal = "charts/episodic_return" if stage == 2 else "losses/cross_entropy"
        bar.set_postfix({goal.split("/")[-1]: f"{scalars[goal]:.3f}"}, refresh=False)
        bar.update()

        # Evaluate on val, keep what scored best, log and save
        is_last = progress["iteration"] == num_iterations
        is_allowed = args.eval_interval > 0 or progress["eval_steps"] <= step / 4  # by pairs
        if is_last or (is_allowed and progress["iteration"] % eval_interval == 0):
            eval_start = read_clock()
            validated = change_scores.validate(partial(classify, agent, args), args, val, rules[stage])
            scalars |= {f"eval/val_{name}": value for name, value in validated.items()}
            progress["threshold"] = validated["threshold"]
            score = [stage, validated["score" if stage == 2 else "f1"]]  # a later stage is better
            if not best_path.exists() or score >= progress["best"]:
                progress["best"] = score
                save_checkpoint(best_path, args, progress, {"agent": agent})
            progress["eval_steps"] += len(val.pixels)
            progress["eval_seconds"] = (read_clock() - eval_start + progress["eval_seconds"]).tolist()
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

    # Score the final policy and the best one on test pairs, which chose neither
    metrics, found = change_scores.evaluate(partial(classify, agent, args), args, val, test)
    best = metrics
    figure = change_scores.draw_pairs(test, found["coarse"][0], *found["ppo"], args)
    if figure is not None:
        writer.add_figure("eval/changes", figure, step)
    print(change_scores.format_table(metrics))
    if best_path.exists() and load_checkpoint(best_path)["global_step"] != step:
        agent.load_state_dict(load_checkpoint(best_path)["agent"])
        best, _ = change_scores.evaluate(partial(classify, agent, args), args, val, test)
    metrics = metrics | {name.replace("eval/", "best/"): value for name, value in best.items()}
    writer.close()
    seconds = read_clock() - start
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/ppo_f1"}
    result |= {"metrics": metrics, "env_steps": step, "wall_seconds": seconds[0], "cpu_seconds": seconds[1]}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    result |= {"torch": torch.__version__, "args": asdict(args)}
    (run_path / "result.json.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_path / "result.json.tmp", run_path / "result.json")
    scores = "F1 {:.3f} at {:.2f} looks a query, everywhere {:.3f}, nowhere {:.3f}"
    names = ("ppo_f1", "ppo_looks", "everywhere_f1", "coarse_f1")
    scores = scores.format(*(metrics[f"eval/{name}"] for name in names))
    print(f"{args.env_id}: {scores}, after {step:,} pairs in {seconds[0]:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, evaluate a checkpoint, or predict with it."""
    args = tyro.cli(Args, args=argv)
    torch.set_float32_matmul_precision("medium")  # on CPUs oneDNN instead of MKL, on CUDA TF32
    checkpoint = None
    paths = [path for path in (args.resume, args.evaluate, args.pretrained) if path is not None]
    if len(paths) > 1 or (args.evaluate is not None and WORLD_SIZE > 1):
        fail("--resume and --evaluate and --pretrained exclude each other, and --evaluate is for one process")
    if paths:
        (path,) = paths
        checkpoint = load_checkpoint(path)
        saved = checkpoint["args"]
        if args.pretrained is not None:  # the rest is of a new run
            kept = (*SHAPES, *PAIRS, "data_dir", "dir_names")
            saved = replace(Args(), **{name: getattr(saved, name) for name in kept})
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
    if args.pretrained is not None:
        args.coarse_iterations = 0
        args.refine_iterations = 0
    if args.data_dir is not None:
        args.env_id = Path(args.data_dir).resolve().name
    if paths:
        check_same(args, saved, path, SHAPES if args.resume is None else [*SHAPES, *PAIRS, *RUN])
    if args.resume is not None:
        if "optimizer" not in checkpoint:
            fail(f"--resume {path}: has no optimizer state; give the checkpoint.pt beside it")
        num_iterations = args.coarse_iterations + args.refine_iterations + args.ppo_iterations
        is_done = checkpoint["iteration"] >= num_iterations
        if is_done and Path(path).with_name("result.json").exists():
            fail(
                f"--resume {path}: its {checkpoint['iteration']} iterations are done; raise --ppo-iterations"
            )
    check_args(args)
    if args.evaluate is None:
        return train(args, checkpoint if args.resume is not None else None)

    device = setup_device(args)
    agent = Agent(args).to(device)
    agent.load_state_dict(checkpoint["agent"])
    if args.predict is not None:
        threshold = checkpoint["threshold"]
        return change_data.write_predictions(args, partial(classify, agent, args), threshold, fail)
    _, val, test = change_data.load_pairs(args, fail).values()
    for name, value in change_scores.evaluate(partial(classify, agent, args), args, val, test)[0].items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: a training goes on with --resume and the checkpoint.pt in its run folder")
