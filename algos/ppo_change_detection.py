"""PPO that decides where a pretrained change detector looks, corrects itself and stops, in one file.

A pair of pictures of two dates is classified patch by patch from coarse pictures. Every patch (query) then either stops
or goes on: it pays for a glimpse of its own window at full resolution and is corrected by what that shows.
Paper: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347).

    python algos/ppo_change_detection.py                             # first run: synthetic pairs, 4 minutes on one core
    python algos/ppo_change_detection.py --data-dir LEVIR-CD --image-size 256 --patch-size 16 --warm-iterations 500
    torchrun --nproc-per-node 2 algos/ppo_change_detection.py        # several GPUs (or CPU processes)
    python algos/ppo_change_detection.py --evaluate runs/.../checkpoint.pt --predict before.png after.png

What is computed, for each query n of each pair:

    (1) r_t = beta (log p_{t+1}(y) - log p_t(y)) + g(p_{t+1}) - g(p_t) - cost, while the query goes on; log p >= -7
    (2) g(p) = 1[p says change] (2 y - F), the gain in F1 = 2 TP / (predicted + true) by one more prediction, linearized
    (3) A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}, delta_t = r_t + gamma (1 - done_t) V(s_{t+1}) - V(s_t)
    (4) pi(a | s) = pi(stop | q) N(correction | mean(q, glimpse), sigma)^(1 - stop)
    (5) L = E[-min(ratio A, clip(ratio, 1 - eps, 1 + eps) A)] + c_v (V - R)^2 / 2 - c_e H(stop) + c_j cross entropy

Shapes: T steps, B pairs, N queries, D embedding, R correction, C classes, K queries that go on, P side of a patch.
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
from typing import Literal, NoReturn

import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: a second, kept out of the timings
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributions import Bernoulli, Normal
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]  # for envs_shared
from envs_shared.change_tasks import data as change_data
from envs_shared.change_tasks import scores as change_scores

SCRIPT = "ppo_change_detection"
COARSE, CORRECTION_DIM = 4, 8  # pixels averaged along each side for the coarse pictures; width R of a correction
MOBILENET_BLOCKS = "1 16 1 1, 6 24 2 2, 6 32 3 2, 6 64 4 2, 6 96 3 1, 6 160 3 2, 6 320 1 1"  # table 2 of its paper
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
SUPERVISED_STEPS = 20  # gradient steps of an iteration before PPO
METRICS = ("policy_loss", "value_loss", "entropy", "joint_loss", "approx_kl", "clip_fraction", "grad_norm")


@dataclass
class Args:
    """Change detection that looks closely only where that pays: supervised pretraining, then PPO."""

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
    env_id: str = "buildings"
    """synthetic pairs: buildings, or buildings-cloudy, where clouds cover much and a look at them shows nothing"""
    data_dir: str | None = None
    """folder of a real set, in place of --env-id: train/{A,B,label}, {A,B,label} with list/*.txt, or prefixes"""
    dir_names: tuple[str, str, str] = ("A", "B", "label")
    """--data-dir: names of the folders of the first date, the second date and the labels"""
    data_seed: int = 1
    """seed of the synthetic pairs"""
    num_train_pairs: int = 4096
    """synthetic pairs to train on; --data-dir: all crops of train"""
    num_eval_pairs: int = 500
    """synthetic pairs to tune thresholds on, and as many others to test on; --data-dir: all crops of val and test"""
    image_size: int = 64
    """side of a picture in pixels; those of --data-dir are cut into crops of this size"""
    patch_size: int = 8
    """side P of a query's patch in pixels, a multiple of 4"""
    num_classes: int = 2
    """classes C: unchanged and changed; 3: unchanged, appeared, vanished; --data-dir: labels hold 0 to C - 1"""

    # Decisions
    num_steps: int = 2
    """steps T of an episode, the most looks that a query can take"""
    cost: float = 0.04
    """price of a look, in the units of eq. 1"""
    beta: float = 0.1
    """weight of the gain in log-likelihood in eq. 1"""
    credit: Literal["query", "image"] = "query"
    """reward of each query by itself, or the mean over the pair for all of them"""
    evidence: Literal["glimpse", "none"] = "glimpse"
    """what a look shows: the window at full resolution, or nothing new"""
    tile: int = 1
    """side, in queries, of the squares that are looked at as a whole: one that goes on takes along the others"""

    # Algorithm
    backbone_weights: str | None = None
    """state dict of torchvision's MobileNetV2 to begin with; without, a small network is trained from nothing"""
    pretrain_iterations: int = 40
    """iterations of supervised training of the coarse classifier, of 20 gradient steps each"""
    warm_iterations: int = 60
    """iterations of supervised training of the corrections, of 20 gradient steps each"""
    num_iterations: int = 100
    """iterations of PPO, and of cross entropy alone for the same number of gradient steps, as a control"""
    batch_size: int = 32
    """pairs of a gradient step before PPO, over all processes"""
    num_envs: int = 128
    """pairs B of a rollout, over all processes"""
    learning_rate: float = 1e-3
    """Adam's learning rate"""
    supervised_lr: float = 3e-3
    """Adam's learning rate before PPO"""
    anneal_lr: bool = True
    """hold the learning rate for a third of each stage, then lower it linearly to zero"""
    gamma: float = 1.0
    """discount gamma"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches of an epoch"""
    update_epochs: int = 1
    """epochs over each rollout"""
    clip_coef: float = 0.2
    """epsilon of the clipped ratio"""
    ent_coef: float = 0.003
    """weight c_e of the entropy of the stop decision"""
    vf_coef: float = 0.5
    """weight c_v of the value loss"""
    joint_coef: float = 50.0
    """weight c_j of the classification loss"""
    max_grad_norm: float = 1.0
    """largest global norm of the gradient"""
    buffer_device: Literal["cpu", "cuda"] | None = None
    """where rollouts are kept; without, where the networks are"""
    bf16: bool = False
    """run the networks in bfloat16 (autocast), for CUDA"""

    # Prediction
    predict: tuple[str, str] | None = None
    """with --evaluate: two pictures of one size, to write the map of where change is likely"""
    output: str = "change_map.png"
    """file of the change map, which must not exist"""


# ---- Networks --------------------------------------------------------------------------------------------------------


def conv_norm(dim_in: int, dim_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm and ReLU6."""
    conv = nn.Conv2d(dim_in, dim_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(dim_out), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Block of MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381), with torchvision's names of parameters."""

    def __init__(self, dim_in: int, dim_out: int, stride: int, expansion: int):
        super().__init__()
        hidden, self.is_residual = dim_in * expansion, stride == 1 and dim_in == dim_out
        widen = [] if expansion == 1 else [conv_norm(dim_in, hidden, 1)]
        narrow = nn.Conv2d(hidden, dim_out, 1, bias=False), nn.BatchNorm2d(dim_out)
        self.conv = nn.Sequential(*widen, conv_norm(hidden, hidden, 3, stride, hidden), *narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 for ImageNet; `forward` gives features [B, 32, H / 8, W / 8] of pictures [B, 3, H, W] in [0, 1]."""

    def __init__(self):
        super().__init__()
        layers, dim_in = [conv_norm(3, 32, 3, 2)], 32
        for expansion, dim, number, stride in (map(int, block.split()) for block in MOBILENET_BLOCKS.split(",")):
            for i in range(number):
                layers.append(InvertedResidual(dim_in, dim, 1 if i else stride, expansion))
                dim_in = dim
        self.features = nn.Sequential(*layers, conv_norm(dim_in, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], device=x.device).view(2, 3, 1, 1)
        return self.features[:7]((x - mean) / std)


class Backbone(nn.Module):
    """Coarse pairs [B, 6, H / 4, W / 4] in [0, 1] to queries [B, N, D], one a patch."""

    def __init__(self, args: Args, embed_dim: int = 64):
        super().__init__()
        self.side, kernel, dim = args.image_size // args.patch_size, args.patch_size // COARSE, 32
        if args.backbone_weights:
            self.mobilenet, kernel, dim = MobileNetV2(), 1, 96
        else:
            self.stem = nn.Sequential(nn.Conv2d(6, dim, 3, padding=1), nn.GELU())
        self.patch = nn.Sequential(nn.Conv2d(dim, embed_dim, kernel, kernel), nn.GELU())
        self.mix = nn.ModuleList([nn.Conv2d(embed_dim, embed_dim, 3, padding=1) for _ in range(2)])
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, coarse: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "mobilenet"):
            dates = coarse.unflatten(1, (2, 3)).flatten(0, 1)
            dates = self.mobilenet(F.interpolate(dates, scale_factor=float(COARSE), mode="bilinear"))
            a, b = dates.unflatten(0, (-1, 2)).unbind(1)
            x = F.adaptive_avg_pool2d(torch.cat((a, b, (a - b).abs()), 1), self.side)
        else:
            x = self.stem(coarse - 0.5)
        x = self.patch(x)  # [B, D, side, side]
        for mix in self.mix:
            x = x + F.gelu(mix(x))
        return self.norm(x.flatten(2).transpose(1, 2))


class Refiner(nn.Module):
    """What is paid for: a glimpse of a query's window, and a transformer block that reads it and the neighbours."""

    def __init__(self, args: Args, dim: int = 64, glimpse_dim: int = 24, num_heads: int = 4):
        super().__init__()
        self.num_heads, self.evidence = num_heads, args.evidence
        self.date = nn.Conv2d(3, glimpse_dim, args.patch_size // 2, args.patch_size // 4)
        self.compare = nn.Conv2d(2 * glimpse_dim, glimpse_dim, 1)
        self.read, self.step = nn.Linear(glimpse_dim * 25, dim), nn.Embedding(args.num_steps, dim)
        self.kv = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.q, self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim // 2)), nn.Linear(dim // 2, dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.mean = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, CORRECTION_DIM))

    def forward(self, query, neighbours, window, step) -> torch.Tensor:
        """Mean corrections [K, R] of queries [K, D] by keys and values [K, 9, D], windows [K, 6, w, w] and step [K]."""
        x = query + self.step(step)
        if self.evidence == "glimpse":
            pixels = (window.unflatten(1, (2, 3)).flatten(0, 1) - 127.5) / 255  # [2 K, 3, w, w]
            dates = F.relu(self.date(pixels)).reshape(len(x), 2 * self.date.out_channels, 5, 5)
            x = x + self.read(F.relu(self.compare(dates)).flatten(1))
        q = self.q(x).unflatten(-1, (self.num_heads, 1, -1))  # [K, heads, 1, d]
        k, v = neighbours.unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attention = ((q * k).sum(-1, keepdim=True) / math.sqrt(q.shape[-1])).softmax(2)  # [K, heads, 9, 1]
        x = x + self.out((attention * v).sum(2).flatten(1))
        return self.mean(x + self.ff(x))


class ChangeDetector(nn.Module):
    """Backbone, policy, value and class heads, and the refiner."""

    def __init__(self, args: Args, embed_dim: int = 64):
        super().__init__()
        self.args = args
        self.backbone, self.refiner = Backbone(args, embed_dim), Refiner(args, embed_dim)
        self.up = nn.Linear(CORRECTION_DIM, embed_dim, bias=False)  # correction to query
        nn.init.normal_(self.up.weight)  # large, so that corrections matter from the first gradient step on
        self.log_std = nn.Parameter(torch.full((CORRECTION_DIM,), -2.0))
        self.class_head = make_head(embed_dim, args.num_classes)
        inputs = embed_dim * (1 + (args.tile > 1)) + args.num_steps
        self.policy_head, self.value_head = make_head(inputs, 1), make_head(inputs, 1)

    def decide(self, obs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of stopping and values, [B, N] each, of an observation."""
        query, args = obs["query"], self.args
        if args.tile > 1:
            query = torch.cat((query, change_data.tile_mean(query, args.tile)), -1)
        step = F.one_hot(obs["step"].clamp(max=args.num_steps - 1), args.num_steps).to(query.dtype)
        query = torch.cat((query, step.unsqueeze(1).expand(-1, query.shape[1], -1)), -1)
        logit, value = self.policy_head(query).float(), self.value_head(query).float()
        return change_data.tile_mean(logit, args.tile).squeeze(-1), value.squeeze(-1)

    def correct(self, obs: dict, goes_on: torch.Tensor) -> torch.Tensor:
        """Means [K, R] of the corrections where `goes_on` [B, N], reading only these windows."""
        query, patch, device, means = obs["query"], self.args.patch_size, goes_on.device, []
        side, near = self.args.image_size // patch, torch.arange(-1, 2, device=device)
        windows = obs["memory"].unfold(2, 3 * patch // 2, patch).unfold(3, 3 * patch // 2, patch)  # a view
        memory = self.refiner.kv(query)  # [B, N, 2 d]
        for index in goes_on.nonzero().split(512 if device.type == "cpu" else goes_on.numel()):  # what fits the cache
            b, n = index.unbind(1)
            row, column = n // side, n % side
            rows, columns = ((x.unsqueeze(1) + near).clamp(0, side - 1) for x in (row, column))  # the border repeats
            neighbours = memory[b[:, None, None], rows.unsqueeze(2) * side + columns.unsqueeze(1)].flatten(1, 2)
            means.append(self.refiner(query[b, n], neighbours, windows[b, :, row, column], obs["step"][b]))
        return torch.cat(means)


def make_head(dim_in: int, dim_out: int) -> nn.Sequential:
    """A hidden layer of 64."""
    return nn.Sequential(nn.LayerNorm(dim_in), nn.Linear(dim_in, 64), nn.GELU(), nn.Linear(64, dim_out))


def load_backbone(network: ChangeDetector, path: str) -> None:
    """Load a state dict of torchvision's MobileNetV2, all of it; exits with code 2 where it is none."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        network.backbone.mobilenet.load_state_dict(state)
    except Exception as error:
        fail(f"--backbone-weights {path}: no state dict of torchvision's MobileNetV2 ({type(error).__name__})")
    if RANK == 0:
        print(f"--backbone-weights {path}: {len(state)} of {len(state)} tensors matched")


# ---- Storage ---------------------------------------------------------------------------------------------------------


class RolloutBuffer:
    """A rollout of T steps of B pairs in tensors made at the first `add`, on one device.

    Every field is [T, B, ...]. `add` raises ValueError where a shape is not that of the first step.
    """

    def __init__(self, num_steps: int, device: torch.device):
        self.num_steps, self.device, self.data, self.position = num_steps, device, {}, 0

    def add(self, obs: dict, **fields: torch.Tensor) -> None:
        """Store a step: the entries of the observation, and raw_corr, stop, log_prob, value, reward, done and so on."""
        step = {f"obs_{name}": x for name, x in obs.items()} | fields
        if not self.data:
            shapes = {name: (self.num_steps, *x.shape) for name, x in step.items()}
            self.data = {name: x.new_zeros(shapes[name], device=self.device) for name, x in step.items()}
        if self.position == self.num_steps:
            raise ValueError(f"the buffer is full after {self.num_steps} steps")
        for name, x in step.items():
            if x.shape != self.data[name].shape[1:]:
                raise ValueError(f"{name} is {list(x.shape)}, the buffer holds {list(self.data[name].shape[1:])}")
            self.data[name][self.position].copy_(x.detach())
        self.position += 1

    def compute_returns_and_advantage(self, last_value, last_done, gamma: float, gae_lambda: float) -> None:
        """Set advantages and returns [T, B, N] from the value and done [B, N] after the last step (eq. 3)."""
        rewards, values, dones = (self.data[name] for name in ("reward", "value", "done"))
        last_value, last_done = last_value.to(self.device), last_done.to(self.device)
        self.data["advantage"] = compute_gae(rewards, values, dones, last_value, last_done, gamma, gae_lambda)
        self.data["return"] = self.data["advantage"] + values

    def get_generator(self, num_minibatches: int, device: torch.device):
        """Shuffled minibatches of the T * B steps on `device`: {"obs": {...}, field: [n, ...]}."""
        flat = {name: x[: self.position].flatten(0, 1) for name, x in self.data.items()}
        for index in torch.randperm(len(flat["reward"]), device=self.device).tensor_split(num_minibatches):
            batch = {name: x[index].to(device, non_blocking=True) for name, x in flat.items()}
            yield batch | {"obs": {name[4:]: x for name, x in batch.items() if name.startswith("obs_")}}


# ---- PPO -------------------------------------------------------------------------------------------------------------


def compute_gae(rewards, values, dones, last_value, last_done, gamma: float, gae_lambda: float) -> torch.Tensor:
    """Advantages [T, ...] (eq. 3); dones[t] says whether the episode was over before step t, `last_done` after T."""
    advantages, advantage = torch.empty_like(rewards), torch.zeros_like(last_value)
    next_value, next_done = last_value, last_done
    for t in range(len(rewards) - 1, -1, -1):
        is_on = 1.0 - next_done.to(rewards.dtype)
        delta = rewards[t] + gamma * is_on * next_value - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * is_on * advantage
        next_value, next_done = values[t], dones[t]
    return advantages


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the labels [...] that count of logits [..., C]; 0 where none does."""
    total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="sum")
    return total / (labels >= 0).sum().clamp(min=1)


class RewardCalculator:
    """Rewards of eq. 1 and 2, with a running F1."""

    def __init__(self, args: Args):
        self.args, self.running_f1, self.logits = args, torch.tensor(0.5), None  # logits [B, N, C] before the step

    def compute_reward(self, logits, labels, stop_decision, pre_action_mask, done_mask) -> tuple[torch.Tensor, dict]:
        """Rewards [B, N] of the step to `logits` [B, N, C], and settled_acc, the accuracy of the queries that are done.

        `stop_decision`, `pre_action_mask` and `done_mask` [B, N]: who stops, was active before, and is done after.
        """
        args, goes_on, is_counted = self.args, pre_action_mask & ~stop_decision, labels >= 0
        gains, f1 = [], self.running_f1.to(logits.device)
        for z in (logits if self.logits is None else self.logits, logits):
            log_likelihood = z.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).clamp(min=-7.0)
            gains.append(args.beta * log_likelihood + (z.softmax(-1)[..., 0] < 0.5) * (2.0 * (labels > 0) - f1))
        gain = ((gains[1] - gains[0]) * is_counted).unsqueeze(-1)
        reward = (change_data.tile_mean(gain, args.tile).squeeze(-1) - args.cost) * goes_on  # a tile shares its gain
        if args.credit == "image":
            reward = reward.mean(1, keepdim=True) * pre_action_mask
        self.logits = logits
        is_right = (logits.argmax(-1) == labels)[done_mask & is_counted]
        return reward, {"settled_acc": is_right.float().mean()}

    def finish(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Move the running F1 towards that of an episode's last logits."""
        said, true = (logits.softmax(-1)[..., 0] < 0.5) & (labels >= 0), labels > 0
        tp, *both = sum_over_ranks(torch.stack([x.sum().float() for x in (said & true, said, true)])).cpu()
        self.running_f1 = torch.lerp(self.running_f1, 2 * tp / sum(both).clamp(min=1), 0.05)


class TransformerRLEnv:
    """The decision process over a batch of pairs; it never sees a label."""

    def __init__(self, network: ChangeDetector):
        self.network, self.args = network, network.args

    def reset(self, batch_data: dict) -> dict:
        """Observation of pairs {"images": uint8 [B, 6, H + P / 2, W + P / 2]}, reflected beyond their borders.

        query [B, N, D]; memory: the pictures, of which only the windows paid for are read; active [B, N]; step [B].
        """
        images, margin = batch_data["images"], self.args.patch_size // 4
        coarse = F.avg_pool2d(images[:, :, margin:-margin, margin:-margin].float(), COARSE) / 255
        query, self.batch_size = self.network.backbone(coarse).float(), len(images)
        active = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
        step = torch.zeros(len(images), dtype=torch.long, device=query.device)
        self.obs = {"query": query, "memory": images, "active": active, "step": step}
        return self.obs

    @property
    def final_logits(self) -> torch.Tensor:
        """Logits [B, N, C] of all queries as they are now."""
        return self.network.class_head(self.obs["query"]).float()

    def step(self, action: dict) -> tuple[dict, torch.Tensor, dict]:
        """Apply {"stop": [B, N], "correction": [B, N, D]}: next observation, done [B, N] and info."""
        obs, pre_action_mask = self.obs, self.obs["active"]
        goes_on = pre_action_mask & ~action["stop"]
        query = obs["query"] + action["correction"] * goes_on.unsqueeze(-1)
        self.obs = obs | {"query": query, "active": goes_on, "step": obs["step"] + 1}
        done = ~goes_on | (self.obs["step"] >= self.args.num_steps).unsqueeze(1)
        return self.obs, done, {"pre_action_mask": pre_action_mask, "cls_input_q": query, "step": obs["step"]}


class PPOAgent:
    """The policy over a network, and its update."""

    def __init__(self, network: ChangeDetector, lr: torch.Tensor | None = None):
        self.network, self.args = network, network.args
        self.optimizer = None if lr is None else torch.optim.Adam(network.parameters(), lr, fused=True)

    def get_action(self, obs: dict, stop: torch.Tensor | None = None, deterministic: bool = False) -> tuple:
        """Action {"correction", "stop"}, raw correction [B, N, R], vote to stop, log-prob and value [B, N] (eq. 4).

        `stop` [B, N] takes the decision in place of the policy. Deterministic: likely decisions, mean corrections.
        """
        network, log_prob, value = self.network, None, None
        if stop is None:
            logit, value = network.decide(obs)
            stop = logit > 0
            if not deterministic:  # one draw a tile
                stop = change_data.spread_tiles(torch.rand_like(logit), self.args.tile) < logit.sigmoid()
            log_prob = Bernoulli(logits=logit, validate_args=False).log_prob(stop.float())
        goes_on = change_data.any_in_tile(obs["active"] & ~stop, self.args.tile)
        correction = torch.zeros_like(obs["query"])
        raw_corr = correction[..., :CORRECTION_DIM].clone()
        mean = network.correct(obs, goes_on).float()
        sample = mean if deterministic else mean + network.log_std.detach().exp() * torch.randn_like(mean)
        raw_corr[goes_on], correction[goes_on] = sample, network.up(sample).float()
        if log_prob is not None:
            log_prob[goes_on] += Normal(mean, network.log_std.exp(), validate_args=False).log_prob(sample).sum(-1)
        return {"correction": correction, "stop": ~goes_on}, raw_corr, stop, log_prob, value

    def update(self, batch: dict) -> torch.Tensor:
        """One gradient step of eq. 5 on a minibatch of the buffer; returns the METRICS [7]."""
        args, network, obs = self.args, self.network, batch["obs"]
        active, goes_on = obs["active"], batch["goes_on"]
        with torch.autocast(active.device.type, torch.bfloat16, enabled=args.bf16):
            logit, value = network.decide(obs)
            center = network.correct(obs, goes_on).float()
            refined = obs["query"][goes_on] + network.up(center)
            logits, refined_logits = network.class_head(batch["cls_query"]), network.class_head(refined)
        stop = Bernoulli(logits=logit, validate_args=False)
        log_prob = stop.log_prob(batch["stop"].float())
        correction = torch.zeros_like(log_prob)
        normal = Normal(center, network.log_std.exp(), validate_args=False)
        correction[goes_on] = normal.log_prob(batch["raw_corr"][goes_on]).sum(-1)
        log_ratio = (log_prob + correction - batch["log_prob"]) * active
        total = sum_over_ranks(torch.stack([(batch["advantage"] ** k * active).sum() for k in (0, 1, 2)]))
        mean, square = total[1:] / total[0].clamp(min=1)
        advantage = (batch["advantage"] - mean) / ((square - mean**2).clamp(min=0).sqrt() + 1e-8)
        ratio, count = log_ratio.exp(), total[0].clamp(min=1) / WORLD_SIZE
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = (-torch.minimum(ratio * advantage, clipped * advantage) * active).sum() / count
        value_loss = ((value - batch["return"]).square() * active).sum() / 2 / count
        entropy = (stop.entropy() * active).sum() / count
        # On stored queries it trains the class head; on those corrected anew, by one step, the refiner as well
        labels = batch["labels"]
        joint_loss = cross_entropy(logits, labels) + cross_entropy(refined_logits, labels[goes_on])
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + args.joint_coef * joint_loss
        grad_norm = self.take_step(loss)
        with torch.no_grad():
            approx_kl = ((ratio - 1 - log_ratio) * active).sum() / count
            clip_fraction = (((ratio - 1).abs() > args.clip_coef) & active).sum() / count
        metrics = (policy_loss, value_loss, entropy, joint_loss, approx_kl, clip_fraction, grad_norm)
        return torch.stack([x.detach().float() for x in metrics])

    def supervise(self, batch: dict, refine: bool, metrics: torch.Tensor) -> None:
        """One gradient step of cross entropy, coarse or with `refine` after each look; adds loss and norm to `metrics`.

        A random share of the queries goes on, so that corrections are learned next to queries that have stopped.
        """
        env, num_steps, loss = TransformerRLEnv(self.network), self.args.num_steps, 0.0
        with torch.autocast(batch["images"].device.type, torch.bfloat16, enabled=self.args.bf16):
            with torch.set_grad_enabled(not refine):
                obs = env.reset(batch)
            if not refine:
                loss = cross_entropy(env.final_logits, batch["labels"])
            share = 0.1 + 0.8 * torch.rand(len(obs["active"]), 1, device=obs["active"].device)
            for _ in range(num_steps if refine else 0):
                stop = torch.rand_like(obs["query"][..., 0]) < (1 - share) ** self.args.tile**-2
                obs, _, _ = env.step(self.get_action(obs, stop)[0])
                loss = loss + cross_entropy(env.final_logits, batch["labels"]) / num_steps
        metrics.add_(torch.stack((loss.detach(), self.take_step(loss))))

    def take_step(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradient step on `loss`, averaged over processes; returns the norm of the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        (loss / WORLD_SIZE).backward()
        sum_gradients(self.network.parameters())
        grad_norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        return grad_norm


@torch.no_grad()
def collect_rollouts(agent: PPOAgent, rewards: RewardCalculator, buffer: RolloutBuffer, batch: dict) -> torch.Tensor:
    """Play an episode on every pair of a batch into the buffer: return, looks and settled accuracy, means [3]."""
    env, args, labels = TransformerRLEnv(agent.network), agent.args, batch["labels"]
    obs, buffer.position = env.reset(batch), 0
    rewards.logits = env.final_logits
    done, total = torch.zeros_like(obs["active"]), torch.zeros(3, device=labels.device)
    for _ in range(args.num_steps):
        action, raw_corr, stop, log_prob, value = agent.get_action(obs)
        next_obs, next_done, info = env.step(action)
        mask, goes_on = info["pre_action_mask"], next_obs["active"]
        reward, accuracy = rewards.compute_reward(env.final_logits, labels, action["stop"], mask, next_done)
        fields = {"raw_corr": raw_corr, "stop": stop, "goes_on": goes_on, "log_prob": log_prob, "value": value}
        fields |= {"reward": reward, "done": done, "labels": labels}
        buffer.add(obs, **fields, cls_query=info["cls_input_q"], step_indices=info["step"])
        total[:2] += torch.stack((reward.mean(), goes_on.float().mean()))
        obs, done, total[2] = next_obs, next_done, accuracy["settled_acc"]
    rewards.finish(rewards.logits, labels)
    buffer.compute_returns_and_advantage(agent.network.decide(obs)[1], done, args.gamma, args.gae_lambda)
    return total


# ---- Evaluation and checkpoints --------------------------------------------------------------------------------------


@torch.no_grad()
def classify(network: ChangeDetector, images: torch.Tensor, rule=None, chunk: int = 64) -> tuple:
    """Logits [M, N, C], looks [M, N] and ms per pair of pictures [M, 6, h, w], stopping by a rule or the policy."""
    env, agent, logits, looks, device = TransformerRLEnv(network), PPOAgent(network), [], [], network.log_std.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    for part in images.split(chunk):
        with torch.autocast(device.type, torch.bfloat16, enabled=network.args.bf16):
            obs = env.reset({"images": part.to(device)})
            total = torch.zeros_like(obs["active"], dtype=torch.int64)
            for step in range(network.args.num_steps):
                stop = rule(1.0 - env.final_logits.softmax(-1)[..., 0], step) if rule else None
                obs, _, _ = env.step(agent.get_action(obs, stop, deterministic=True)[0])
                total += obs["active"]
        logits.append(env.final_logits.cpu())
        looks.append(total.cpu())
    return torch.cat(logits), torch.cat(looks), 1e3 * (clock() - start) / len(images)


def evaluate(network: ChangeDetector, control: ChangeDetector, val, test) -> tuple[dict[str, float], dict[str, tuple]]:
    """Scores of all methods on `test`, thresholds tuned on `val`; and logits [M, N, C] and looks [M, N] by method."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(network.args.seed % 2**63)
        return change_scores.compare_methods(partial(classify, network), partial(classify, control), val, test)


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
    check_range(args, "torch_threads eval_episodes num_iterations batch_size num_envs num_steps update_epochs", 1)
    check_range(args, "num_train_pairs num_eval_pairs tile", 1)
    check_range(args, "learning_rate supervised_lr max_grad_norm", 0, above=True)
    check_range(args, "seed data_seed checkpoint_interval eval_interval pretrain_iterations warm_iterations cost", 0)
    check_range(args, "beta clip_coef ent_coef vf_coef joint_coef", 0)
    check_range(args, "gamma gae_lambda", 0, 1)
    check_range(args, "num_classes", 2, 3 if args.data_dir is None else 255)
    check_range(args, "patch_size", 4, 256)
    check_range(args, "num_minibatches", 1, args.num_steps * args.num_envs // WORLD_SIZE)
    side = args.image_size // args.patch_size
    if args.image_size % args.patch_size or args.patch_size % COARSE or side < 2:
        fail("--image-size must be a multiple, by 2 or more, of --patch-size, and that a multiple of 4")
    if side % args.tile:
        fail(f"--tile {args.tile} does not divide the {side} patches of a side")
    for name in ("num_envs", "batch_size"):
        if (value := getattr(args, name)) % WORLD_SIZE:
            fail(f"--{name.replace('_', '-')} {value} does not divide among {WORLD_SIZE} processes")
    if Path(args.run_dir).exists() and not Path(args.run_dir).is_dir():  # told before pairs are drawn
        fail(f"--run-dir {args.run_dir}: not a folder")
    if args.predict and not args.evaluate:
        fail("--predict needs --evaluate")
    if args.buffer_device == "cuda" and not (args.evaluate or (args.cuda and torch.cuda.is_available())):
        fail("--buffer-device cuda: no GPU is used")
    if args.track and not args.evaluate and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if given, and leave a run folder with result.json."""
    wall_start, cpu_start = time.time(), time.process_time()
    device, is_main = setup_device(args), RANK == 0
    first_warm, first_ppo = args.pretrain_iterations, args.pretrain_iterations + args.warm_iterations
    num_iterations, start_step = first_ppo + args.num_iterations, checkpoint["global_step"] if checkpoint else 0
    if checkpoint and checkpoint["iteration"] >= num_iterations and Path(args.resume).with_name("result.json").exists():
        fail(f"--resume {args.resume}: its {args.num_iterations} iterations are done; raise --num-iterations")
    seed_everything(args.seed)  # the same weights in every process
    lr = torch.tensor(args.supervised_lr, device=device)  # a tensor: set once for both
    networks = [ChangeDetector(args).to(device, memory_format=torch.channels_last).eval() for _ in range(2)]
    if args.backbone_weights and checkpoint is None:
        load_backbone(networks[0], args.backbone_weights)
    pairs, val, test = change_data.load_pairs(args, fail).values()
    agent, control = (PPOAgent(network, lr) for network in networks)
    run_path = make_run_folder(args, checkpoint) if is_main else None
    seed_everything(args.seed, 2, RANK, start_step)
    rewards = RewardCalculator(args)
    buffer = RolloutBuffer(args.num_steps, torch.device(args.buffer_device or device.type))

    progress = {"iteration": 0, "global_step": 0, "history": []}
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
        for learner, prefix in ((agent, ""), (control, "control_")):
            learner.network.load_state_dict(checkpoint[f"{prefix}agent"])
            learner.optimizer.load_state_dict(checkpoint[f"{prefix}optimizer"])
            learner.optimizer.param_groups[0]["lr"] = lr
        rewards.running_f1 = checkpoint["running_f1"]
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
            dist.all_gather_object(ranks, state)
        if is_main:
            seconds = {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
            content = {"script": SCRIPT, "args": asdict(args) | {"resume": None}, "ranks": ranks, **progress, **seconds}
            for learner, prefix in ((agent, ""), (control, "control_")):
                content[f"{prefix}agent"] = learner.network.state_dict()
                content[f"{prefix}optimizer"] = learner.optimizer.state_dict()
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", content | {"running_f1": rewards.running_f1})

    size, num_envs = args.batch_size // WORLD_SIZE, args.num_envs // WORLD_SIZE
    backbone, autocast = agent.network.backbone, partial(torch.autocast, device.type, torch.bfloat16, args.bf16)
    can_capture = device.type == "cuda" and WORLD_SIZE == 1 and not args.backbone_weights
    if args.compile:
        for module in (module for network in networks for module in (network.backbone, network.refiner)):
            module.compile(dynamic=True)
    elif args.cuda_graphs and can_capture:
        sample = torch.zeros(size, 6, *[args.image_size // COARSE] * 2, device=device)
        with autocast(cache_enabled=False):
            torch.cuda.make_graphed_callables(backbone.train(), (sample,))  # which is eager in eval mode
    if checkpoint is None:
        save()
    metrics, loop_start = torch.zeros(2, device=device), time.time()
    bar = tqdm(total=num_iterations, initial=progress["iteration"], unit="iteration", disable=not is_main)
    if is_main:
        bar.write(f"run folder {run_path}")
    while (iteration := progress["iteration"]) < num_iterations:
        stage = (iteration >= first_warm) + (iteration >= first_ppo)  # 0: pretraining, 1: warm start, 2: PPO
        begin, end = (0, first_warm, first_ppo, num_iterations)[stage : stage + 2]
        lr.fill_(args.learning_rate if stage == 2 else args.supervised_lr)
        if args.anneal_lr:
            lr.mul_(min(1.0, 1.5 * (1.0 - (iteration - begin) / (end - begin))))
        metrics.zero_()
        scalars = {"charts/learning_rate": lr.item(), "charts/stage": stage}
        backbone.train(stage == 0 and can_capture)  # replays its CUDA graph; batch norm keeps its statistics otherwise
        if stage < 2:
            for _ in range(SUPERVISED_STEPS):
                agent.supervise(change_data.draw_batch(pairs, size, device), stage == 1, metrics)
            losses = (sum_over_ranks(metrics) / SUPERVISED_STEPS / WORLD_SIZE).tolist()
            scalars |= {"losses/cross_entropy": losses[0], "losses/grad_norm": losses[1]}
            num_pairs, shown = SUPERVISED_STEPS * args.batch_size, {"loss": f"{losses[0]:.3f}"}
        else:
            if iteration == first_ppo:
                control.network.load_state_dict(agent.network.state_dict())
                control.optimizer.load_state_dict(copy.deepcopy(agent.optimizer.state_dict()))
                control.optimizer.param_groups[0]["lr"] = lr

            # Collect a rollout, optimize for some epochs of minibatches, and train the control on the same pairs
            rollout = change_data.draw_batch(pairs, num_envs, device)
            with autocast():
                totals = collect_rollouts(agent, rewards, buffer, rollout)
            update = torch.zeros(len(METRICS), device=device)
            for _ in range(args.update_epochs):
                for minibatch in buffer.get_generator(args.num_minibatches, device):
                    update += agent.update(minibatch)
                    num_rows = max(1, len(minibatch["labels"]) // args.num_steps)
                    index = torch.randint(num_envs, (num_rows,), device=device)
                    control.supervise({name: x[index] for name, x in rollout.items()}, True, metrics)
            num_updates = args.update_epochs * args.num_minibatches * WORLD_SIZE
            losses, totals = (sum_over_ranks(update) / num_updates).tolist(), sum_over_ranks(totals) / WORLD_SIZE
            scalars |= {f"losses/{name}": value for name, value in zip(METRICS, losses, strict=True)}
            scalars["losses/control"] = (sum_over_ranks(metrics) / num_updates)[0].item()
            mean_return, looks, settled_acc = totals.tolist()
            scalars |= {"charts/episodic_return": mean_return, "charts/looks": looks, "charts/settled_acc": settled_acc}
            scalars["charts/running_f1"] = rewards.running_f1.item()
            num_pairs, shown = args.num_envs, {"return": f"{mean_return:.3f}", "looks": f"{looks:.2f}"}

        # Log, evaluate, checkpoint
        step, iteration = progress["global_step"] + num_pairs, iteration + 1
        progress |= {"iteration": iteration, "global_step": step}
        if not all(map(math.isfinite, losses)):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite after {step} pairs: {losses}")
        is_last = iteration == num_iterations
        if is_main:
            scalars["charts/pairs_per_second"] = int((step - start_step) / (time.time() - loop_start))
            scalars["charts/cpu_seconds"] = time.process_time() - cpu_start
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
            if stage == 2:
                progress["history"].append([step, mean_return])
            bar.set_postfix(shown, refresh=False)
            bar.update()
        if is_main and not is_last and args.eval_interval and iteration % args.eval_interval == 0:
            part = change_data.Pairs(*(x[: args.eval_episodes] for x in val))
            found = classify(agent.network.eval(), part.images)
            for name, value in change_scores.score_maps(part, *found[:2], threshold=0.5).items():
                writer.add_scalar(f"eval/val_{name}", value, step)
        if is_last or (args.checkpoint_interval and iteration % args.checkpoint_interval == 0):
            save()
    bar.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if not is_main:
        return
    eval_metrics, found = evaluate(*(network.eval() for network in networks), val, test)
    step, history = progress["global_step"], progress["history"]
    for name, value in eval_metrics.items():
        writer.add_scalar(name, value, step)
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/ppo_f1"}
    result |= {"metrics": eval_metrics, "env_steps": step}
    result |= {"wall_seconds": time.time() - wall_start, "cpu_seconds": time.process_time() - cpu_start}
    result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result |= {"torch": torch.__version__, "commit": get_commit(), "args": asdict(args)}
    if figure := change_scores.draw_pairs(test, found["coarse"][0], *found["ppo"]):
        figure.savefig(run_path / "changes.png", dpi=100)
        writer.add_figure("eval/changes", figure, step)
    title, path = f"{args.env_id}, seed {args.seed}", run_path / "learning_curve.png"
    plot_learning_curve(path, writer, history, title, "pairs of all stages", "PPO: return, mean over queries")
    writer.close()
    write_atomically(run_path / "result.json", json.dumps(result, indent=2).encode())
    print(change_scores.format_table(eval_metrics))
    print(f"{title}: {change_scores.summarize(eval_metrics)}", end=" ")
    print(f"after {step:,} pairs in {result['wall_seconds']:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, evaluate a checkpoint, or predict with it."""
    args, checkpoint = tyro.cli(Args, args=argv), None
    torch.set_float32_matmul_precision("medium")  # on CPUs oneDNN instead of MKL, on CUDA TF32
    if args.evaluate and (args.resume or WORLD_SIZE > 1):
        fail("--resume and --evaluate exclude each other, and --evaluate is for one process")
    if path := args.resume or args.evaluate:
        checkpoint = load_checkpoint(path)
        saved = Args(**checkpoint["args"])
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        fixed = "image_size patch_size num_classes num_steps tile evidence backbone_weights env_id data_seed"
        fixed = [*fixed.split(), "num_envs", "pretrain_iterations", "warm_iterations", "num_train_pairs", "seed"]
        for name in fixed if args.resume else fixed[:7]:
            if getattr(args, name) != (trained := getattr(saved, name)):
                fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {path} was trained with {trained}")
    check_args(args)
    if args.data_dir is not None:
        args.env_id = Path(args.data_dir).resolve().name
    if not args.evaluate:
        return train(args, checkpoint)
    device = setup_device(args)
    network, control = (ChangeDetector(args).to(device).eval() for _ in range(2))
    network.load_state_dict(checkpoint["agent"])
    has_control = checkpoint["iteration"] > args.pretrain_iterations + args.warm_iterations  # made when PPO begins
    control.load_state_dict(checkpoint["control_agent" if has_control else "agent"])
    if args.predict:
        return print(change_data.write_change_map(args, partial(classify, network), fail))
    _, val, test = change_data.load_pairs(args, fail).values()
    for name, value in evaluate(network, control, val, test)[0].items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: --resume the checkpoint.pt in the run folder to go on")
