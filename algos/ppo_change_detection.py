"""PPO that decides where a change detector looks closely, in this file and envs_shared/change_pairs.py.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO); Fan et al. 2019, arXiv:1903.01344 (two ratios).

    python ppo_change_detection.py                       # learns the task haze in 80 seconds on one CPU core
    python ppo_change_detection.py --data-dir LEVIR-CD --image-size 256 --num-steps 1        # real pairs
    python ppo_change_detection.py --pretrained runs/NAME/checkpoint.pt --detector-iterations 0   # PPO alone
    python ppo_change_detection.py --evaluate runs/NAME/best.pt --predict A B --output maps  # files, folders
    torchrun --nproc-per-node 2 ppo_change_detection.py  # two GPUs, or with --no-cuda two CPU processes

Two pictures of one place are divided into patches. Each patch is a query: an embedding of coarse pictures,
from which its cells (squares of a few pixels) are classified as changed or not. At each step a query stops
or pays for a look: its window at full resolution gives a correction, one number per cell, which is mapped to
an embedding and added. A look at the last step shows all dates, a look one step earlier all but the last date.
The detector is trained first, by cross entropy with random looks. Then PPO learns where to look.

Equations of this file, for a query whose cells have labels y (1 is changed) and probabilities of change p:
    (1) r_t = w(p_{t+1}) - w(p_t) - 2 share cost if the query looks at step t; else it stops for good, and
        r_t = 0. `share` is the share of changed pixels in training. If about as many cells are predicted as
        are changed, predicted + true is 2 share of all cells. By eq. 2, F1 then rises by the rise of the mean
        w divided by 2 share, so that one look at each query costs `cost` of F1
    (2) w(p) = mean over labelled cells of beta max(log likelihood of y, -7) + 1[p > f1 / 2] (2 y - f1), the
        worth of its map; f1 is a running F1 = 2 TP / (predicted + true). One more predicted cell moves it by
        about (2 y - f1) / (predicted + true), which is expected to be positive if p > f1 / 2
    (3) A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); V = 0 after a stop
    (4) pi(a | s) = pi(stop | s), or pi(look | s) N(correction | mean(window), sigma)
    (5) L = E[ -sum min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + c1 (V - R)^2 / 2 - c2 entropy(pi(look)) ]
        + c3 cross entropy; the sum is over the two factors of eq. 4, each with its own ratio, and R = A + V

Shapes: T steps, B pairs, J dates, h x w queries of a pair, G cells of a query, D embedding, E features of all
dates but the last, K windows that are read, n rows; in pixels, S a picture's side, P a patch's, c a cell's.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "numpy", "pillow", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image
from torch import nn
from torch.distributions import Normal
from torch.nn import Conv2d
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # in this repository, envs_shared is there
from envs_shared import change_pairs

RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# What ppo_loss returns to be logged, in this order; a step of the detector logs the last one alone
METRICS = "policy_loss value_loss entropy approx_kl clipfrac cross_entropy".split()
DETECTOR_STEPS = 20  # gradient steps per iteration that trains the detector
# What the return on val depends on, apart from the network; the training pairs set the price of a look
get_task = attrgetter(
    *"env_id data_dir seed num_train_pairs image_size eval_episodes num_steps cost beta".split()
)


@dataclass
class Args:
    """Change detection that looks closely only where it pays: a detector, then PPO."""

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on a GPU if there is one
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    run_dir: str = "runs"  # parent folder of all run folders
    resume: str | None = None  # checkpoint.pt of a run to resume; its settings hold unless flags change them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate on the test pairs, without training
    eval_interval: int = 0  # iterations between evaluations and checkpoints (0: ten a run, fewer if costly)
    eval_episodes: int = 500  # val pairs per evaluation, and synthetic test pairs (0: never evaluate)
    predict: tuple[str, str] | None = None  # with --evaluate: two pictures, or two folders, to compare
    output: str = "change_maps"  # new folder for the masks and probability maps of --predict
    env_id: str = "haze"  # synthetic pairs: haze; haze-3 or haze-4, with more dates
    data_dir: str | None = None  # real pairs, of two dates, instead: {train,val,test}/{A,B,label}/x.png
    num_train_pairs: int = 1024  # synthetic pairs to train on
    image_size: int = 32  # side S of the random crops that are trained on, in pixels
    patch_size: int = 8  # side P of a query's patch in pixels
    cell_size: int = 2  # side c of a cell in pixels
    coarse_size: int = 4  # side in pixels of the square averaged into one pixel of the coarse copy
    num_steps: int = 2  # steps T of an episode: the maximum number of looks
    pretrained: str | None = None  # checkpoint whose weights a run starts from, such as a trained detector's
    detector_iterations: int = 24  # iterations that train the detector
    ppo_iterations: int = 84  # iterations of PPO
    batch_size: int = 16  # pairs per gradient step of the detector, in total across processes
    detector_lr: float = 3e-3  # Adam learning rate of the detector
    learning_rate: float = 3e-3  # Adam learning rate of PPO
    head_lr_scale: float = 3.0  # learning rate of the policy and value heads, as a multiple of the others'
    anneal_lr: bool = True  # lower both learning rates linearly to zero over the run
    num_envs: int = 256  # pairs B of a rollout, in total across processes
    cost: float = 0.3  # price: the F1 that one look at each query costs, eq. 1
    beta: float = 0.1  # weight beta of the log-likelihood, eq. 2
    gamma: float = 1.0  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 3
    num_minibatches: int = 8  # minibatches that each epoch splits the rollout into
    update_epochs: int = 1  # epochs over each rollout
    clip_coef: float = 0.2  # clipping range eps of the ratios, eq. 5
    vf_coef: float = 0.5  # value coefficient c1, eq. 5
    ent_coef: float = 0.1  # entropy coefficient c2, eq. 5
    joint_coef: float = 50.0  # cross entropy coefficient c3, eq. 5
    log_std: float = -3.0  # initial log of the standard deviation sigma of corrections, eq. 4
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm (1e9: never)


# ---- Networks ----------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """The detector (backbone, refiner, class head), the policy head and the value head.

    The script never calls train() or eval(), so dropout does not fit, and batch norm only in eval mode.
    """

    def __init__(self, args, embed_dim=64):
        super().__init__()
        self.args = args
        # Real pairs have two dates, whatever --env-id calls them
        self.num_dates = 2 if args.data_dir or args.predict else change_pairs.ENV_IDS.get(args.env_id, 2)
        # From the coarse pictures of all dates [B, 3 J, S', S'] to embeddings of patches [B, D, h, w]
        patch = args.patch_size // args.coarse_size  # side of a patch in coarse pixels
        self.backbone = nn.Sequential(
            Conv2d(3 * self.num_dates, 32, 3, padding=1),
            nn.GELU(),
            Conv2d(32, embed_dim, patch, patch),
            nn.GELU(),
            Conv2d(embed_dim, embed_dim, 3, padding=1),
        )
        num_cells = (args.patch_size // args.cell_size) ** 2
        self.class_head = Conv2d(embed_dim, num_cells, 1)
        # From the window of a query at full resolution to its correction, one number per cell, by way of 16
        # features of each date
        self.read_date = Conv2d(3, 16, 2 * args.cell_size, args.cell_size)
        self.refiner = nn.Sequential(
            Conv2d((2 * self.num_dates - 1) * 16, 32, 2),
            nn.ReLU(),
            Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            Conv2d(32, 1, 1),
        )
        # Maps corrections to embeddings. It must be linear without a bias: a query that does not look gets
        # up(0) = 0, and ppo_loss replaces up(correction) by up(mean) by adding up(mean - correction)
        self.up = Conv2d(num_cells, embed_dim, 1, bias=False)
        nn.init.normal_(self.up.weight)  # large, so that corrections matter from the first gradient step on
        self.log_std = nn.Parameter(torch.full((num_cells, 1, 1), args.log_std))
        # Policy and value, each with half of the 128 hidden features
        self.seen_dim = (self.num_dates - 1) * 16  # E
        self.heads = nn.Sequential(
            Conv2d(embed_dim + self.seen_dim, 128, 1), nn.Tanh(), Conv2d(128, 2, 1, groups=2)
        )
        nn.init.zeros_(self.heads[-1].weight)
        # At first a query looks with probability 0.88, so that PPO sees what later looks earn
        self.heads[-1].bias.data = torch.tensor([2.0, 0.0])
        self.register_buffer("running_f1", torch.tensor(0.5))  # f1 of eq. 2
        self.register_buffer("share", torch.tensor(0.0))  # of changed pixels in training, eq. 1

    def decide(self, obs):
        """Return the logits of a look and the values V, [B, h, w] each; neither depends on the step."""
        return self.heads(torch.cat((obs["query"], obs["seen"]), 1)).unbind(1)

    def read_windows(self, windows, is_shown):
        """Read windows [K, 3 J, size, size], of which the dates with `is_shown` [K, J] are visible.

        Returns [K, G + E]: mean corrections, then the range (largest minus smallest value in the window) of
        each feature of each date but the last. Cells are in rows from the top left, as pixel_unshuffle orders
        the labels.
        """
        images = windows.unflatten(1, (self.num_dates, 3)).flatten(0, 1)  # [K J, 3, size, size]
        # [K, J, 16, P / c + 1, P / c + 1]
        dates = self.read_date(images).relu().unflatten(0, (-1, self.num_dates))
        dates = dates * is_shown[:, :, None, None, None]
        differences = (dates[:, 1:] - dates[:, :1]).abs()  # of the later dates to the first
        corrections = self.refiner(torch.cat((dates, differences), 1).flatten(1, 2))
        ranges = (dates.amax((3, 4)) - dates.amin((3, 4)))[:, :-1]  # [K, J - 1, 16]
        return torch.cat((corrections.flatten(1), ranges.flatten(1)), 1)

    def look(self, images, obs, looks):
        """Read the windows of queries with `looks` [B, h, w] in pictures [B, 3 J, S, S].

        Returns mean corrections [B, G, h, w] and `shown` [B, E, h, w], the ranges that `read_windows`
        returns. Both are zero for queries that do not look.
        """
        # The window of a query is its patch and a border of one cell
        border = self.args.cell_size
        stride = self.args.patch_size
        size = stride + 2 * border
        padded = F.pad(images, (border,) * 4, mode="reflect")
        windows = padded.unfold(2, size, stride).unfold(3, size, stride)  # [B, 3 J, h, w, size, size], a view
        windows = windows.permute(0, 2, 3, 1, 4, 5)  # [B, h, w, 3 J, size, size]

        # Dates that a look shows: all at the last step, one less at each step before, at least the first.
        # For T = 3 steps:
        #                     step 0   step 1   step 2
        #     2 dates         1        1        1 2
        #     3 dates         1        1 2      1 2 3
        #     4 dates         1 2      1 2 3    1 2 3 4
        last_date = (obs["step_indices"] + self.num_dates - self.args.num_steps).clamp(min=0)  # [B]
        is_shown = torch.arange(self.num_dates, device=images.device) <= last_date.view(-1, 1, 1, 1)
        is_shown = is_shown.expand(*looks.shape, -1)  # [B, h, w, J]

        if images.is_cuda:
            # Read all windows, and multiply by the mask: shapes are fixed and the host never waits
            rows = self.read_windows(windows.flatten(0, 2), is_shown.flatten(0, 2))  # [B h w, G + E]
            grid = rows.view(*looks.shape, -1) * looks.unsqueeze(-1)
        else:
            # Leave out what does not look, which saves most of the time
            rows = self.read_windows(windows[looks], is_shown[looks])  # [K, G + E]
            grid = rows.new_zeros(*looks.shape, rows.shape[1]).masked_scatter(looks.unsqueeze(-1), rows)
        return grid.movedim(-1, 1).tensor_split((len(self.log_std),), 1)


# ---- Environments ------------------------------------------------------------------------------------------
def load_pairs(args, device):
    """Return train, val and test pairs as described in envs_shared/change_pairs.py; exits if that fails."""
    try:
        splits = change_pairs.load_pairs(args)
    except (ValueError, OSError) as error:
        fail(str(error))
    return [torch.from_numpy(pairs).to(device) for pairs in splits.values()]


class ChangeEnv:
    """B pairs, where each query is an episode: it looks until it stops, at most T times."""

    def __init__(self, agent):
        self.agent = agent
        self.args = agent.args

    def reset(self, images, labels):
        """Begin with pictures [B, 3 J, S, S] and labels [B, G, h, w], and return the first observation."""
        query = self.agent.backbone(F.avg_pool2d(images, self.args.coarse_size))  # [B, D, h, w]
        # Nothing has been seen yet, all queries are active (they have not stopped), and step 0 comes next
        zeros = torch.zeros_like(query[:, 0])  # [B, h, w]
        self.is_active = zeros == 0
        self.labels = labels
        seen = zeros.unsqueeze(1).expand(-1, self.agent.seen_dim, -1, -1)
        return self.observe(query, seen, zeros[:, 0, 0].long())

    def observe(self, query, seen, step_indices):
        """Classify the embeddings [B, D, h, w], compute their worth and return the observation."""
        self.final_logits = self.agent.class_head(query)  # of the cells, [B, G, h, w]
        self.worth = compute_worth(self.final_logits, self.labels, self.agent.running_f1, self.args.beta)
        self.obs = {"query": query, "seen": seen, "step_indices": step_indices}
        return self.obs

    def step(self, action):
        """Apply `correction` [B, G, h, w], `shown` [B, E, h, w] and `stop` [B, h, w] to all queries."""
        pre_action_mask = self.is_active
        looks = pre_action_mask & ~action["stop"]
        self.is_active = looks
        last_worth = self.worth
        query = self.obs["query"] + self.agent.up(action["correction"])
        obs = self.observe(query, self.obs["seen"] + action["shown"], self.obs["step_indices"] + 1)
        price = 2 * self.agent.share * self.args.cost
        rewards = (self.worth - last_worth - price) * looks  # eq. 1
        return obs, rewards, {"pre_action_mask": pre_action_mask, "cls_query": query}


# ---- Storage -----------------------------------------------------------------------------------------------
# A rollout is a dictionary of tensors [T, B, ...], row t of step t. What you add to obs, action or info is stored and
# batched too; it needs a name of its own and a first dimension B:
#     query, seen, step_indices    observation: embedding [D, h, w], what was shown [E, h, w], and t
#     stop, correction, shown      action [h, w], [G, h, w], [E, h, w]
#     log_probs, values            of the policy that acted, [2, h, w] and [h, w]
#     rewards                      outcome [h, w]; an episode ends at its stop
#     pre_action_mask              which queries had not stopped before the step
#     cls_query                    the embedding after the step, which is classified
#     advantages, returns          of eq. 3 and 5
def get_minibatches(rollout, images, labels, args):
    """Yield the T B rows with pictures and labels, shuffled in each epoch, as dictionaries [n, ...]."""
    num_pairs = len(images)
    for _ in range(args.update_epochs):
        order = torch.randperm(args.num_steps * num_pairs, device=images.device)
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = {name: x.flatten(0, 1)[rows] for name, x in rollout.items()}
            minibatch["images"] = images[rows % num_pairs]
            minibatch["labels"] = labels[rows % num_pairs]
            yield minibatch


# ---- PPO ---------------------------------------------------------------------------------------------------
def compute_worth(logits, labels, f1, beta):
    """Compute w [B, h, w] of eq. 2 from logits and labels [B, G, h, w]."""
    log_likelihood = F.logsigmoid(logits * (2 * labels - 1)).clamp(min=-7)
    worth = beta * log_likelihood + (logits.sigmoid() > f1 / 2) * (2 * labels - f1)
    is_counted = labels >= 0
    return (worth * is_counted).sum(1) / is_counted.sum(1).clamp(min=1)


def compute_gae(rewards, values, looks, gamma, gae_lambda):
    """Compute advantages [T, ...] from rewards, values and looks [T, ...]; all queries stop at the end."""
    advantages = torch.zeros_like(rewards)
    advantage = next_value = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value * looks[t] - values[t]
        advantage = delta + gamma * gae_lambda * advantage * looks[t]  # eq. 3
        advantages[t] = advantage
        next_value = values[t]
    return advantages


def compute_log_probs(agent, logits, looks, means, correction):
    """Compute the logs [B, 2, h, w] of the two factors of eq. 4; without a look, the second is 0."""
    decision = F.logsigmoid(torch.where(looks, logits, -logits))
    normal = Normal(means, agent.log_std.exp(), validate_args=False)
    drawn = normal.log_prob(correction).sum(1)
    return torch.stack((decision, drawn * looks), 1)


def play(agent, images, labels, args, rule=None, std=None):
    """Play an episode of each query of pictures [B, 3 J, S, S] with labels [B, G, h, w].

    A query looks if `rule(env, logits)` [B, h, w] is true or, without a rule, if the policy prefers to look.
    With `std`, corrections get noise of this standard deviation. Returns the final environment and a rollout.
    """
    env = ChangeEnv(agent)
    steps = []
    obs = env.reset(images, labels)
    for _ in range(args.num_steps):
        logits, values = agent.decide(obs)
        looks = env.is_active & (rule(env, logits) if rule else logits > 0)
        means, shown = agent.look(images, obs, looks)
        correction = means
        if std is not None:
            correction = means + torch.randn_like(means) * std * looks.unsqueeze(1)
        action = {"stop": ~looks, "correction": correction, "shown": shown}
        log_probs = compute_log_probs(agent, logits, looks, means, correction)
        next_obs, rewards, info = env.step(action)
        info |= {"log_probs": log_probs, "values": values, "rewards": rewards}
        steps.append(obs | action | info)
        obs = next_obs
    rollout = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    rollout["advantages"] = compute_gae(
        rollout["rewards"], rollout["values"], ~rollout["stop"], args.gamma, args.gae_lambda
    )
    rollout["returns"] = rollout["advantages"] + rollout["values"]
    return env, rollout


@torch.no_grad()
def collect_rollout(agent, images, labels, args):
    """Play episodes with sampled decisions and corrections; return the rollout and what to log."""
    env, rollout = play(
        agent,
        images,
        labels,
        args,
        lambda env, logits: torch.rand_like(logits) < logits.sigmoid(),
        agent.log_std.exp(),
    )
    # Move the running F1 of eq. 2 towards that of this rollout's maps, in total across processes. With one
    # process, average does nothing
    # In `counts`, row 0 is 2 TP and row 1 predicted + true, cell by cell; labels of -1 add nothing
    says_change = (env.final_logits.sigmoid() > agent.running_f1 / 2) * (labels >= 0)
    counts = torch.stack((2 * says_change * labels, says_change + labels.clamp(min=0)))  # [2, B, G, h, w]
    hits, total = average(counts.sum((1, 2, 3, 4)))
    agent.running_f1.lerp_(hits / (total + 1e-9), 0.2)
    # Log means over queries. settled_acc is the accuracy of the queries that have stopped, NaN if none has; here
    # cells that do not count are taken for unchanged
    accuracy = ((env.final_logits > 0) == (labels > 0)).float().mean(1)
    scores = {
        "charts/running_f1": agent.running_f1,
        "charts/looks": (~rollout["stop"]).float().sum(0),
        "charts/settled_acc": accuracy[~env.is_active],
        "charts/episodic_return": rollout["rewards"].sum(0),
    }
    return rollout, {name: average(x.mean()).item() for name, x in scores.items()}


def cross_entropy(logits, labels):
    """Compute the mean cross entropy over all labels but those of -1.

    This process's sum is divided by the mean count per process: averaged over processes, that is the mean over
    all.
    """
    is_counted = (labels >= 0).float()
    loss = F.binary_cross_entropy_with_logits(logits, labels, is_counted, reduction="sum")
    return loss / average(is_counted.sum()).clamp(min=1)


def ppo_loss(agent, batch, args):
    """Compute eq. 5, a mean over active queries, and METRICS for a minibatch of a rollout."""
    is_active = batch["pre_action_mask"]  # [n, h, w]
    looks = ~batch["stop"]
    count = average(is_active.sum().float()).clamp(min=1)

    def mean(x):  # this process's share of the mean over active queries
        return (x * is_active).sum() / count

    # The ratios of the decision and of the correction. They are masked before exp, as inf * 0 is not a number
    logits, values = agent.decide(batch)
    means, _ = agent.look(batch["images"], batch, looks)
    log_probs = compute_log_probs(agent, logits, looks, means, batch["correction"])  # [n, 2, h, w]
    is_taken = torch.stack((is_active, looks), 1)
    log_ratio = (log_probs - batch["log_probs"]) * is_taken
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)

    # Advantages of mean 0 and standard deviation 1 over active queries
    advantages = batch["advantages"] - average(mean(batch["advantages"]))
    std = average(mean(advantages.square())).sqrt()
    advantages = (advantages / (std + 1e-8)).unsqueeze(1)

    # The terms of eq. 5
    policy_loss = -(torch.min(ratio * advantages, clipped_ratio * advantages) * is_taken).sum(1)
    value_loss = 0.5 * (values - batch["returns"]).square()
    entropy = F.softplus(logits) - logits * logits.sigmoid()
    loss = mean(policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy)
    # cls_query holds up(correction) as it was sampled, without gradient. Replace it by the mean that the network
    # gives now, whose gradient trains the refiner. PPO does not train the backbone
    query = batch["cls_query"] + agent.up(means - batch["correction"])
    labels = torch.where(is_active.unsqueeze(1), batch["labels"], -1.0)
    joint_loss = cross_entropy(agent.class_head(query), labels)

    # Of the two ratios, those of decisions ([:, 0]) are logged
    approx_kl = ratio - 1 - log_ratio
    is_clipped = (ratio - 1).abs() > args.clip_coef
    metrics = [mean(x) for x in (policy_loss, value_loss, entropy, approx_kl[:, 0], is_clipped[:, 0])]
    return loss + args.joint_coef * joint_loss, torch.stack((*metrics, joint_loss)).detach()


def detector_loss(agent, batch, args):
    """Compute the mean cross entropy of the T + 1 maps before the first step and after each step.

    Each pair draws a rate, the probability that one of its queries looks at a step.
    """
    images, labels = batch
    rate = torch.rand(len(images), 1, 1, device=images.device)
    env, rollout = play(agent, images, labels, args, lambda env, logits: torch.rand_like(logits) < rate)
    queries = (rollout["query"][0], *rollout["cls_query"])
    loss = sum(cross_entropy(agent.class_head(query), labels) for query in queries) / len(queries)
    return loss, loss.detach()[None]


def take_step(agent, optimizer, loss, metrics, args):
    """Take one gradient step and return the mean metrics of all processes."""
    optimizer.zero_grad()
    loss.backward()
    average_gradients(agent)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return average(metrics)


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.no_grad()
def classify(agent, args, pairs, rule=None):
    """Return probabilities [M, H, W] of change, looks and returns [M, h, w], of pairs [M, 3 J + 1, H, W]."""
    found = []
    for part in pairs.split(max(1, 2**17 // pairs[0, 0].numel())):  # bounds the memory
        images, labels = change_pairs.split_labels(part, args)
        env, rollout = play(agent, images, labels, args, rule)
        cells = F.pixel_shuffle(env.final_logits.sigmoid(), args.patch_size // args.cell_size)
        pixels = F.interpolate(cells, scale_factor=args.cell_size, mode="bilinear")  # [m, 1, H, W]
        looks = (~rollout["stop"]).float().sum(0)  # [m, h, w]
        found.append((pixels.squeeze(1), looks, rollout["rewards"].sum(0)))
    return [torch.cat(parts) for parts in zip(*found)]


def evaluate(agent, args, pairs, threshold=None, rule=None):
    """Score maps of pairs by pixel; without a probability threshold, use the one with the largest F1."""
    probability, looks, returns = classify(agent, args, pairs, rule)
    f1, threshold = change_pairs.compute_f1(probability, pairs, threshold)
    num_looks = looks.mean().item()
    return {
        "eval/f1": f1,
        "eval/threshold": threshold,
        "eval/looks": num_looks,
        "eval/net": f1 - args.cost * num_looks,  # as --cost is the F1 that one look at each query costs
        "eval/episodic_return": returns.mean().item(),
        "eval/standard_error": returns.mean((1, 2)).std().item() / len(returns) ** 0.5,  # of this mean
    }


def look_above(level, env, logits):
    """Let queries look to the end if the mean probability of change in their coarse map is above `level`."""
    # `logits` are those of the decision to look; env.final_logits are those of the cells
    is_later = env.obs["step_indices"].view(-1, 1, 1) > 0
    return is_later | (env.final_logits.sigmoid().mean(1) > level)


def print_rules(agent, args, val, test, best):
    """Print test scores of the policy, of that in the checkpoint `best`, and of simple rules on its network.

    Returns the name of the rule whose F1 less the price of its looks is the largest.
    """
    net_f1 = {}

    def print_rule(name, rule=None):
        threshold = evaluate(agent, args, val, None, rule)["eval/threshold"]
        scores = evaluate(agent, args, test, threshold, rule)
        net_f1[name] = scores["eval/net"]
        print(
            f"{name:>12}: F1 {scores['eval/f1']:.3f} on test at {scores['eval/looks']:.2f} looks a query,"
            f" less their price {net_f1[name]:.3f}"
        )

    print_rule("last policy")
    agent.load_state_dict(best["agent"])
    print_rule("best.pt")
    # Rules that look above a threshold on the coarse map, from everywhere (0) to nowhere (1); "threshold" is the
    # one that earns most on val. If that is "everywhere" or "nowhere", they tie, and `max` names the one printed
    # first
    rules = [partial(look_above, level) for level in np.linspace(0, 1, 11) ** 3]
    print_rule("everywhere", rules[0])
    print_rule("nowhere", rules[-1])
    print_rule("threshold", max(rules, key=lambda rule: evaluate(agent, args, val, None, rule)["eval/net"]))
    return max(net_f1, key=net_f1.get)


def write_predictions(agent, args, threshold, device):
    """Write a mask, a map of the probability of change and a map of looks for each pair of --predict."""
    try:
        pairs = change_pairs.read_pairs(*args.predict, args.patch_size)
        if not pairs:
            fail(f"--predict {args.predict[0]}: no pictures")
        Path(args.output).mkdir(parents=True)
    except (ValueError, OSError) as error:
        fail(f"--predict, --output: {error}")
    for name, (pair, height, width) in pairs.items():
        probability, looks, _ = classify(agent, args, torch.from_numpy(pair).to(device))
        maps = {
            "mask": (probability >= threshold).float(),
            "probability": probability,
            "looks": F.interpolate(looks[None], scale_factor=args.patch_size)[0] / args.num_steps,
        }
        for kind, x in maps.items():  # from black for 0 to white for 1
            pixels = 255 * x[0, :height, :width].cpu().numpy()
            Image.fromarray(np.uint8(pixels)).save(Path(args.output, f"{name}_{kind}.png"))
        print(f"{name}: {looks.mean():.2f} looks a query")


# ---- Training ----------------------------------------------------------------------------------------------
@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0
    step: int = 0  # pairs trained on, in total across processes
    eval_steps: int = 0  # val pairs evaluated
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # eval/net of best.pt on val, None before the first evaluation
    last_score: float | None = None  # eval/net of the newest policy, None if it was not evaluated
    threshold: float = 0.5  # probability from which a pixel is called changed, tuned on val


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
    """Make agent and optimizer, from `checkpoint` or --pretrained if there is one."""
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = Agent(args).to(device)
    # The heads, which are found by their name, learn faster: the policy must tell haze apart before it stops
    # looking altogether
    groups = [{"params": x, "is_head": name.startswith("heads")} for name, x in agent.named_parameters()]
    optimizer = torch.optim.Adam(groups, fused=True)
    path = args.evaluate or args.resume or args.pretrained
    if path:
        saved = checkpoint or load_checkpoint(path)
        try:
            agent.load_state_dict(saved["agent"])
            if checkpoint:  # --pretrained gives the weights alone
                optimizer.load_state_dict(checkpoint["optimizer"])
        except (KeyError, RuntimeError, ValueError):
            fail(
                f"{path}: not the network of --env-id (pairs of --data-dir and --predict have two dates), "
                "--patch-size, --cell-size, --coarse-size and this file"
            )
    return agent, optimizer


def train(args, run_path: Path, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate score it, or use it for --predict.

    Random numbers come from seed_everything(args.seed, stream, ...): stream 0 for the weights, 1 for training
    (then the iteration and the process).
    """
    # Set up
    device = set_up_device(args)
    progress = checkpoint["progress"] if checkpoint else Progress()
    agent, optimizer = set_up(args, checkpoint, device)
    if args.predict:
        write_predictions(agent, args, progress.threshold, device)
        return
    train_pairs, val, test = load_pairs(args, device)
    if args.evaluate:  # on pairs other than those that selected best.pt and its threshold
        print(evaluate(agent, args, test, progress.threshold))
        return
    val = val[: args.eval_episodes]
    pixels = train_pairs[:, -1]  # their labels; the share of changed ones sets the price of a look, eq. 1
    agent.share.copy_((pixels == 1).sum() / (pixels != change_pairs.UNCOUNTED).sum())
    num_iterations = args.detector_iterations + args.ppo_iterations
    parts = {"agent": agent, "optimizer": optimizer}
    save = partial(save_checkpoint, run_path, args, progress, parts)
    if RANK == 0:
        writer = open_run(run_path, args, progress.step)
        print(
            f"{run_path}: {len(train_pairs)} train, {len(val)} val and {len(test)} test pairs, "
            f"step {progress.step}; {agent.share.item():.2%} are changed, so a look costs "
            f"{2 * agent.share.item() * args.cost:.4f}, "
            f"and all looks cost {args.num_steps * args.cost:.2f} of F1"
        )
        if not checkpoint:
            save("checkpoint.pt")
        elif not (run_path / "best.pt").exists() or get_task(args) != get_task(checkpoint["args"]):
            progress.best_score = None  # the next evaluation is the best one
        if progress.iteration >= num_iterations:
            print(f"{run_path}: raise --ppo-iterations to train on")

    def score_policy():
        """Evaluate on val, log the scores, and keep the policy in best.pt unless an older one was better.

        The score is F1 less the price of the looks. The return would not do: it contains the running F1 of
        eq. 2, which moves during the run, so that returns of two policies are not comparable.
        """
        scores = evaluate(agent, args, val)
        for name, score in scores.items():
            writer.add_scalar(name, score, progress.step)
        bar.set_postfix_str(f"F1 {scores['eval/f1']:.3f}", refresh=False)
        progress.eval_steps += len(val)
        progress.threshold = scores["eval/threshold"]
        progress.last_score = scores["eval/net"]
        if progress.best_score is None or progress.last_score >= progress.best_score:
            progress.best_score = progress.last_score
            save("best.pt")
        save("checkpoint.pt")

    eval_interval = args.eval_interval or num_iterations // 10 + 1
    saved_at = time.time()
    with tqdm(
        total=num_iterations,
        initial=progress.iteration,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # seconds
        disable=RANK > 0,
    ) as bar:
        while progress.iteration < num_iterations:
            start = time.time()
            cpu_start = time.process_time()
            is_ppo = progress.iteration >= args.detector_iterations
            compute_loss = ppo_loss if is_ppo else detector_loss
            names = METRICS if is_ppo else METRICS[-1:]

            # Learning rate: both fall linearly to zero over the run
            learning_rate = args.learning_rate if is_ppo else args.detector_lr
            if args.anneal_lr:
                learning_rate *= 1 - progress.iteration / num_iterations
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (args.head_lr_scale if group["is_head"] else 1)

            # Draw pairs for the detector, or collect a rollout for PPO
            progress.iteration += 1
            progress.last_score = None  # of the policy that this iteration makes
            seed_everything(args.seed, 1, progress.iteration, RANK)
            if is_ppo:
                num_pairs = args.num_envs
                images, labels = change_pairs.draw_batch(train_pairs, num_pairs // WORLD_SIZE, args)
                rollout, scalars = collect_rollout(agent, images, labels, args)
                minibatches = get_minibatches(rollout, images, labels, args)
            else:
                num_pairs = DETECTOR_STEPS * args.batch_size
                scalars = {}
                minibatches = (
                    change_pairs.draw_batch(train_pairs, args.batch_size // WORLD_SIZE, args)
                    for _ in range(DETECTOR_STEPS)
                )

            # Update
            metrics = []
            for minibatch in minibatches:
                loss, metric = compute_loss(agent, minibatch, args)
                metrics.append(take_step(agent, optimizer, loss, metric, args))
            means = torch.stack(metrics).mean(0).tolist()
            progress.step += num_pairs
            progress.cpu_seconds += time.process_time() - cpu_start

            # Log, in process 0 alone. The rest of the loop must not call `average`, since the other processes
            # do not get there
            if RANK > 0:
                continue
            for name, mean in zip(names, means, strict=True):
                if not np.isfinite(mean):
                    fail(f"{args.env_id}: {name} is not finite at step {progress.step}")
                scalars[f"losses/{name}"] = mean
            scalars["charts/learning_rate"] = learning_rate
            scalars["charts/cpu_seconds"] = progress.cpu_seconds
            scalars["charts/SPS"] = num_pairs / (time.time() - start)
            for name, value in scalars.items():
                writer.add_scalar(name, value, progress.step)
            bar.update()

            # Save, before an evaluation that might fail
            is_last = progress.iteration >= num_iterations
            is_due = is_last or progress.iteration % eval_interval == 0
            if is_due or time.time() - saved_at > 600:
                writer.flush()
                save("checkpoint.pt")
                saved_at = time.time()

            # Evaluate. Without --eval-interval, evaluations take at most a fifth of the pairs trained on
            is_affordable = args.eval_interval or progress.eval_steps + len(val) <= progress.step / 5
            if is_due and is_affordable and args.eval_episodes and not is_last:
                score_policy()

    # Evaluate the last policy, and compare best.pt with other rules
    if RANK > 0:
        return
    # None: the last policy is not evaluated yet, or there is no best.pt of this task
    if args.eval_episodes and None in (progress.best_score, progress.last_score):
        score_policy()
    writer.close()
    scores = "not evaluated"
    if args.eval_episodes:
        winner = print_rules(agent, args, val, test, load_checkpoint(run_path / "best.pt"))
        scores = (
            f"F1 less price on val: best.pt {progress.best_score:.4f}, the last policy {progress.last_score:.4f}; "
            f"{winner} earned most on test"
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
    counts = """num_train_pairs image_size patch_size cell_size coarse_size num_steps batch_size num_envs
        num_minibatches update_epochs""".split()
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if name in ("cost", "log_std"):
            least = -np.inf  # any number, but not NaN
        if type(value) in (int, float) and not value >= least:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be at least {least}")
    if args.num_envs % WORLD_SIZE or args.batch_size % WORLD_SIZE:
        fail(f"--num-envs and --batch-size must be divisible by the number of processes ({WORLD_SIZE})")
    patch = args.patch_size
    has_rest = args.image_size % patch or patch % args.cell_size or patch % args.coarse_size
    if has_rest or args.image_size == args.cell_size:
        fail(
            "--image-size must be divisible by --patch-size and larger than --cell-size, "
            "and --patch-size divisible by --cell-size and --coarse-size"
        )
    if args.predict and not args.evaluate:
        fail("--predict needs --evaluate")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
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
