"""PPO learns where a change detector should look closely. It needs envs_shared/change_pairs.py, too.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO); Fan et al. 2019, arXiv:1903.01344 (two ratios).

    python ppo_change_detection.py                      # learns the synthetic task haze in about a minute
    # Your own pairs, without PPO: see "When to use it". A large folder takes more --detector-iterations
    python ppo_change_detection.py --data-dir LEVIR-CD --image-size 64 --ppo-iterations 0
    python ppo_change_detection.py --evaluate runs/NAME/best.pt --predict A B --output maps
    python ppo_change_detection.py --pretrained runs/NAME/checkpoint.pt --detector-iterations 0  # only PPO
    torchrun --nproc-per-node 2 ppo_change_detection.py # two GPUs, or with --no-cuda two CPU processes

Your own pictures need envs_shared/change_folders.py, too.

In: two pictures of one place, of equal size. Out: for each pixel the probability that it has changed, a mask
of the changed pixels, and where the policy looked. The detector is a small network that is trained here. It
sees coarse pictures, in which squares of 4 x 4 pixels are averaged into one. It divides a picture into
patches of 8 x 8 pixels, a patch into 4 x 4 cells of 2 x 2 pixels, and classifies each cell as changed or not.
A look reads one window, which is a patch with a border of one cell, at full resolution, and corrects the
patch's map. Looks cost time or money in practice; here looking once at all patches costs `--cost` of F1.

    coarse pictures --embed--> embedding [D] --classify--> logits of the patch's cells [G]
                                    +
    window of a look --read--> correction [G] --up--> [D]    the sum is the next embedding, classified again
                            `-> features [E]                 added up over looks, for the policy alone

A correction is not added to the logits, because the policy reads the embedding: so it knows at its next
decision what the look has found. The detector is trained first, with random looks. Then PPO learns which
patches are worth a look. It also goes on training `read`, `up` and `classify`, but not `embed`: a rollout
stores embeddings, so that an update need not repeat `embed` and all earlier looks.

When to use it. For the best map, train the detector alone (--ppo-iterations 0): the untrained policy always
looks. If a patch can look only once and you want fewer looks, you need no PPO either: with --look-above
LEVEL, a patch looks if the mean probability of change in its coarse map is above LEVEL. At its end, a run
prints the best level on val. PPO can also learn when it pays to look again. But with the reward of this file,
it is not the strongest method: in training, all dates and labels are known, so one can compute what each look
would gain, and a network that learns to predict these gains (not in this file) does at least as well. Use PPO
if your reward is one of all looks together; it would take the place of eq. 1 in `play`. The task haze is
there to test it.

The synthetic task haze: four patches in ten are roofs with stripes, which coarse pictures hide. On a quarter
of the roofs, the stripes turn between the first and the last date. Half of the roofs are under haze at the
first date: no look can tell whether they have changed. T is the number J of dates, and look number t shows
the first t dates. So the first look finds no change; it only shows whether there is haze, and so whether a
second look is worth its price.

A patch may look T times (--num-steps). Real pairs (--data-dir) have T = 1 unless --num-steps says otherwise:
the only look shows both dates, and no decision follows it. Then gamma, lambda and the features that a look
gives the policy have no effect. In general, look t shows the first J - T + t dates, and at least one, so that
look T shows all.

Equations of this file. Each patch is an episode. Its cells have labels y (1 if at least half of the pixels
that count are changed) and probabilities p:
    (1) r_t = u(p_{t+1}) - u(p_t) - price if the patch looks at step t, else 0, and the patch stops for good.
        price = 2 x the share of changed pixels in training x cost
    (2) u(p) = mean over the patch's cells of [ 1[p > F / 2] (2 y - F) + beta max(log likelihood of y, -7) ].
        F is a running mean of F1 = 2 TP / (predicted + true) of the training maps, with cells called changed
        where p > F / 2. u is the utility of a map. Its first term stands for F1: to call one more cell
        changed raises F1 in proportion to 2 y - F, on average a gain if p > F / 2 (see below eq. 5).
    In eq. 3 to 5, a patch's state s is what the policy knows of it. Its action a is to stop, or to look and
    then draw a correction of G numbers. V(s) is the expected sum of rewards from s on. The advantage A says
    how much better than V(s) the action turned out:
    (3) A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); V and A are 0 after a
        stop and after step T
    (4) pi(a | s) = pi(stop | s), or pi(look | s) N(correction | mean, sigma); `read` gives the mean from the
        window, after the decision to look. The correction is drawn, so that it is an action. It goes into
        the embedding, which the policy reads at its next decision: so PPO can train `read` to help later
        decisions, where the cross entropy of eq. 5 trains it for the present map alone. (In the task haze,
        that has not raised the score.)
    (5) L = E[ -sum min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + c1 (V - R)^2 / 2 - c2 entropy(pi(look)) ]
        + c3 cross entropy; the sum is over the two factors of eq. 4, each with its own ratio, and R = A + V.
        E is over the steps of active patches, those that have not stopped

Why a larger sum of rewards means a larger F1. One more predicted cell adds 2 y to the numerator of F1 and 1
to its denominator, so F1 rises by (2 y - F) / (predicted + true): on average a gain if p > F / 2. Let there
be N cells, of which share * N are changed, and as many predicted: predicted + true = 2 * share * N. If one
look at every patch raises the mean of u by x, F1 rises by x * N / (2 * share * N) = x / (2 * share). These
looks cost `--cost` of F1. So they pay for themselves if x = 2 * share * cost, and that is the price of a
look. (share is that of pixels, about that of cells.) The term with beta pays for surer probabilities, even if
no cell crosses the threshold F / 2.

For example, a tenth of the pixels of the task haze are changed, so that --cost 0.3 makes a price of 2 * 0.1 *
0.3 = 0.06. Let F be 0.7, and a look find that all cells of a patch are changed that were called unchanged: u
rises by 2 - 0.7 = 1.3. If that happens in one look of twenty, looks gain 1.3 / 20 = 0.065 on average, a
little more than they cost.

Shapes (in the code, F is `f1`):
    B pairs of a batch, n rows of a minibatch, K windows, M pairs of H x W pixels before cropping
    T steps, J dates, C bands, h x w patches of a pair, G cells of a patch
    D embedding, E features that a look shows the policy
    sides in pixels: S of a picture, S' of a coarse one, P of a patch, c of a cell, s = P + 2 c of a window

The file has two parts. The algorithm comes first, with its loop in `train`. The part `Run` at the end is
about the run folder, the log, checkpoints, processes and the command line.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.4", "numpy", "pillow", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import copy
import math
import operator
import os
import random
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Normal
from torch.nn import Conv2d, functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# The folder envs_shared is beside this file, or beside its folder
sys.path += map(str, Path(__file__).resolve().parents[:2])
from envs_shared import change_pairs

RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
CUDA_GRAPHS = True  # for the class `Recorded` of the part `Run`, which this script does not use
EMBED_DIM = 64  # D: size of a patch's embedding
DETECTOR_STEPS = 20  # gradient steps per iteration that trains the detector
# Independent streams of random numbers, as in seed_everything(args.seed, WEIGHTS)
WEIGHTS, TRAINING = range(2)
# For the part `Run`: if one of these settings changes with --resume, the score of best.pt no longer counts.
# Add your own that change the task or its score
TASK_SETTINGS = "env_id data_dir val_share ignore_index seed image_size eval_episodes num_steps cost".split()
# Named in the message about a checkpoint that does not fit
NETWORK_FLAGS = (
    "--env-id (pairs of --data-dir and --predict have two dates), --patch-size, --cell-size, --coarse-size"
)

# Defined at the end, but used before it:
#   total(x)            sums a tensor over all processes; with one process it changes nothing
#   sum_gradients       sums the gradients of a network over all processes
#   seed_everything     seeds all random generators from a few integers
#   run.load(name=part) lets checkpoints hold the state of a part, and restores it if the run is resumed
#   run.log, run.keep   log numbers by name; `keep` gets those of an evaluation and also writes best.pt
#   print_line, fail    print one line; `fail` also exits with code 2
#   make_bar            shows how far an evaluation has come
#   call_or_fail(f, x)  returns f(x), or fails if pictures or folders do not fit


@dataclass
class Args:
    """Change detection that looks closely only where it pays: a detector, then PPO."""

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
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate on the test pairs, without training
    eval_interval: int = 0  # iterations between evaluations (0: a tenth of the run, or more if they are slow)
    eval_episodes: int = 500  # val pairs per evaluation, and synthetic test pairs (0: never evaluate)
    predict: tuple[str, ...] | None = None  # with --evaluate: two pictures or folders, and labels if any
    output: str = "change_maps"  # new folder for the maps of --predict
    threshold: float | None = None  # with --evaluate: mask threshold of probability, not the checkpoint's
    look_above: float | None = None  # with --evaluate: look by this level, see look_above, not by the policy
    # The pairs
    env_id: str = "haze"  # synthetic pairs: haze; haze-3 or haze-4, with more dates
    data_dir: str | None = None  # real pairs, of two dates, instead: {train,val,test}/{A,B,label}/x.png
    val_share: float = 0.0  # share for val, and for test, of a folder that is not split, see load_pairs
    ignore_index: int | None = None  # value of a label's pixels that do not count, such as 128
    num_train_pairs: int = 1024  # synthetic pairs to train on
    image_size: int = 32  # side S of random crops to train on, and of synthetic pairs, in pixels
    # Patches and looks
    patch_size: int = 8  # side P of a patch in pixels
    cell_size: int = 2  # side c of a cell in pixels
    coarse_size: int = 4  # side in pixels of the square averaged into one pixel of the coarse picture
    num_steps: int = 0  # looks T of a patch at most (0: 1 with --data-dir, else one for each date)
    cost: float = 0.3  # F1 that looking once at all patches costs; the price of eq. 1 is 2 share cost
    beta: float = 0.1  # weight beta of the log likelihood, eq. 2
    # The detector
    pretrained: str | None = None  # checkpoint of this script whose weights (policy too) a run starts from
    detector_iterations: int = 24  # iterations that train the detector, of 20 gradient steps
    batch_size: int = 16  # pairs per gradient step of the detector, in total across processes
    detector_lr: float = 3e-3  # Adam learning rate of the detector
    # PPO
    ppo_iterations: int = 84  # iterations of PPO
    num_envs: int = 256  # pairs B of a rollout, in total across processes
    learning_rate: float = 3e-3  # Adam learning rate of PPO
    head_lr_scale: float = 3.0  # learning rate of the policy and value heads, as a multiple of the others'
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the whole run
    gamma: float = 1.0  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 3
    num_minibatches: int = 8  # minibatches that each epoch splits the rollout into
    update_epochs: int = 1  # epochs over each rollout
    clip_coef: float = 0.2  # clipping range eps of the ratios, eq. 5
    vf_coef: float = 0.5  # value coefficient c1, eq. 5
    ent_coef: float = 0.1  # entropy coefficient c2, eq. 5
    joint_coef: float = 50.0  # cross entropy coefficient c3, eq. 5
    log_std: float = -3.0  # initial log of the standard deviation sigma of corrections, eq. 4
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm (1e9: never; 0: no training)


# ---- Networks ----------------------------------------------------------------------------------------------
class Detector(nn.Module):
    """A small network that classifies the cells of patches. To use another, keep these methods and sizes.

    embed       coarse pictures [B, J C, S', S'] -> an embedding of each patch [B, D, h, w]
    read        windows of K patches at full resolution [K, J C, s, s], and which dates are shown [K, J]
                -> corrections [K, G], features for the policy [K, E]
    classify    embeddings [B, D, h, w] -> logits of change of each patch's cells [B, G, h, w]
    num_cells, num_features    G and E

    Cells are in rows from the top left of a patch, as pixel_unshuffle orders the labels. Four rules, which no
    error reminds you of:
    1. `read` ignores dates that are not shown. Their features are 0, as features are added up over looks.
    2. `classify` takes each patch alone, because a look is paid for the utility of its own patch's map.
    3. `embed` shares no weights with the other two: PPO trains these, and no loss would keep `embed` good.
    4. In evaluation mode, in which PPO plays and updates, a window always gives the same output, whatever
       else is in the batch. Otherwise PPO's ratios would compare two different networks.
    """

    def __init__(self, args):
        super().__init__()
        num_dates = change_pairs.count_dates(args)
        self.num_dates = num_dates
        self.num_features = (num_dates - 1) * 16  # E: 16 of each date but the last
        patch = args.patch_size // args.coarse_size  # side of a patch in coarse pixels
        self.embed = nn.Sequential(
            Conv2d(num_dates * change_pairs.NUM_BANDS, 32, 3, padding=1),  # [B, 32, S', S']
            nn.GELU(),
            Conv2d(32, EMBED_DIM, patch, patch),  # [B, D, h, w]
            nn.GELU(),
            Conv2d(EMBED_DIM, EMBED_DIM, 3, padding=1),
        )
        self.num_cells = (args.patch_size // args.cell_size) ** 2  # G
        self.classify = Conv2d(EMBED_DIM, self.num_cells, 1)
        # From windows to corrections. The sizes are those of the defaults: a patch of 8 pixels and a border
        # of one cell of 2 pixels on each side make a window of 12 x 12; the last layers have one number for
        # each of the 4 x 4 cells
        self.read_date = Conv2d(change_pairs.NUM_BANDS, 16, 2 * args.cell_size, args.cell_size)  # 12 -> 5
        self.refiner = nn.Sequential(
            Conv2d((2 * num_dates - 1) * 16, 32, 2),  # 5 -> 4
            nn.ReLU(),
            Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            Conv2d(32, 1, 1),
        )

    def read(self, windows, is_shown):
        """Read windows [K, J C, s, s], of which only the dates with `is_shown` [K, J] are visible."""
        pictures = windows.unflatten(1, (self.num_dates, -1)).flatten(0, 1)  # [K J, C, s, s]
        dates = self.read_date(pictures).relu().unflatten(0, (-1, self.num_dates))  # [K, J, 16, 5, 5]
        dates = dates * is_shown[:, :, None, None, None]
        differences = (dates[:, 1:] - dates[:, :1]).abs()  # of the later dates to the first
        corrections = self.refiner(torch.cat((dates, differences), 1).flatten(1, 2))  # [K, 1, 4, 4]
        # Features for the policy: of each channel the largest minus the smallest value in the window, which
        # is small in haze. They are an input of their own, because cross entropy trains corrections for the
        # map alone, and whether there is haze does not change the map yet. A date that is not shown has range
        # 0. The last date is left out: no decision follows the look that shows it
        ranges = (dates.amax((3, 4)) - dates.amin((3, 4)))[:, :-1]  # [K, J - 1, 16]
        return corrections.flatten(1), ranges.flatten(1)


class Agent(nn.Module):
    """The detector, and the policy and value heads."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.detector = Detector(args)
        # Maps corrections to embeddings. It has no bias, so that a patch that does not look gets up(0) = 0
        self.up = Conv2d(self.detector.num_cells, EMBED_DIM, 1, bias=False)
        nn.init.normal_(self.up.weight)  # large, so that corrections matter from the first gradient step on
        self.log_std = nn.Parameter(torch.full((self.detector.num_cells, 1, 1), args.log_std))
        # Policy and value, each with half of the 128 hidden features
        self.heads = nn.Sequential(
            Conv2d(EMBED_DIM + self.detector.num_features, 128, 1),
            nn.Tanh(),
            Conv2d(128, 2, 1, groups=2),
        )
        nn.init.zeros_(self.heads[-1].weight)
        # At first a patch looks with probability sigmoid(2) = 0.88, so that PPO sees what later looks earn
        self.heads[-1].bias.data = torch.tensor([2.0, 0.0])
        self.register_buffer("running_f1", torch.tensor(0.5))  # F of eq. 2
        self.register_buffer("changed_share", torch.tensor(0.0))  # of the pixels in training, eq. 1

    def decide(self, embedding, seen):
        """Return the logits of a look and the values V, [B, h, w] each.

        Inputs are the embedding [B, D, h, w] and `seen` [B, E, h, w], the sum of the features of all looks so
        far, in which a date that several looks show counts several times. The step is not an input: with the
        default two looks, `seen` is zero before the first one and not after it. If you have many looks and
        values are inaccurate, add it.
        """
        return self.heads(torch.cat((embedding, seen), 1)).unbind(1)

    def look(self, images, step_indices, looks):
        """Read the windows of patches with `looks` [B, h, w] in pictures [B, J C, S, S] at steps [B].

        Returns the means of the corrections in eq. 4 [B, G, h, w] and features [B, E, h, w], zeros for
        patches that do not look.
        """
        windows = change_pairs.cut_windows(images, self.args)  # [B, h, w, J C, s, s]
        is_shown = change_pairs.show_dates(step_indices, self.args).expand(*looks.shape, -1)  # [B, h, w, J]
        if images.is_cuda:
            # Read all windows, and multiply by the mask: shapes are fixed and the host never waits
            found = torch.cat(self.detector.read(windows.flatten(0, 2), is_shown.flatten(0, 2)), 1)
            grid = found.view(*looks.shape, -1) * looks.unsqueeze(-1)  # [B, h, w, G + E]
        else:
            # Leave out what does not look, so that a CPU spends time on looks only
            found = torch.cat(self.detector.read(windows[looks], is_shown[looks]), 1)
            grid = found.new_zeros(*looks.shape, found.shape[1])  # [B, h, w, G + E]
            grid[looks] = found
        return grid.movedim(-1, 1).tensor_split([self.detector.num_cells], 1)  # after the first G


# ---- Pairs -------------------------------------------------------------------------------------------------
def load_pairs(args, device, splits=change_pairs.SPLITS):
    """Return the pairs of each split, uint8 [M, J C + 1, H, W]: pictures, then labels (change_pairs.py).

    With --val-share, a hash of a file's name chooses its split. Do not use it for tiles of one scene, which
    would come into several splits: name the pairs of each split in list/train.txt, val.txt and test.txt.
    """
    if args.data_dir:
        pairs = call_or_fail(import_folders().read_splits, args, splits)
    else:
        pairs = call_or_fail(change_pairs.draw_splits, args, splits)
    return [torch.from_numpy(pairs[split]).to(device) for split in splits]


# ---- Storage -----------------------------------------------------------------------------------------------
# A rollout is a dictionary of tensors [T, B, ...], row t of step t. What you add to a row in `play` is stored
# and batched too; its first dimension must be B:
#     embedding, seen, step_indices    state: [D, h, w], sum of the features shown [E, h, w], step from 0
#     cell_logits                      of the map before the step [G, h, w]
#     is_active                        which patches had not stopped before the step [h, w]
#     look_logits, values              of the policy that acted [h, w]
#     looks, correction                action [h, w], [G, h, w]
#     log_probs                        of the two factors of eq. 4 [2, h, w]
#     rewards                          [h, w]
#     advantages, returns              of eq. 3 and 5
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


# ---- Detector ----------------------------------------------------------------------------------------------
def cross_entropy(logits, labels):
    """Compute this process's part of the mean cross entropy over all cells that count.

    With another loss, mind three things. Eq. 2 needs calibrated probabilities: with a focal loss, or a larger
    weight for changed cells, p > F / 2 calls far more cells than are changed. --joint-coef is set for the
    size of this loss. And gradients and logged values are summed over processes, so that a mean of this
    process's cells, such as a Dice loss, must be divided by WORLD_SIZE.
    """
    is_counted = (labels != change_pairs.UNCOUNTED).float()
    loss = functional.binary_cross_entropy_with_logits(logits, labels, is_counted, reduction="sum")
    return loss / total(is_counted.sum()).clamp(min=1)


def detector_loss(agent, images, labels, args):
    """Compute the mean cross entropy of T + 1 maps: the coarse one, and one after each of T random looks."""
    # Each pair has its own rate, the probability that an active patch looks: maps must be right with few
    # looks and with many
    rate = torch.rand(len(images), 1, 1, device=images.device)
    embedding = agent.detector.embed(functional.avg_pool2d(images, args.coarse_size))  # [B, D, h, w]
    loss = cross_entropy(agent.detector.classify(embedding), labels)
    looks = torch.ones_like(embedding[:, 0], dtype=torch.bool)  # [B, h, w]
    for step in range(args.num_steps):
        looks = looks & (torch.rand_like(embedding[:, 0]) < rate)
        step_indices = torch.full((len(images),), step, device=images.device)
        correction, _ = agent.look(images, step_indices, looks)
        embedding = embedding + agent.up(correction)
        loss = loss + cross_entropy(agent.detector.classify(embedding), labels)
    return loss / (args.num_steps + 1)


def take_step(agent, optimizer, loss, args):
    """Take one gradient step; each process has its part of the mean loss."""
    optimizer.zero_grad()
    loss.backward()
    sum_gradients(agent)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()


# ---- PPO ---------------------------------------------------------------------------------------------------
def compute_utility(logits, labels, f1, beta):
    """Compute u [B, h, w] of eq. 2 from logits and labels [B, G, h, w]; cells with label 255 do not count.

    With another u, another price fits: change it in `play` and in `train`, and the score of `evaluate`.
    """
    log_likelihood = functional.logsigmoid(logits * (2 * labels - 1)).clamp(min=-7)
    utility = beta * log_likelihood + (logits.sigmoid() > f1 / 2) * (2 * labels - f1)
    is_counted = labels != change_pairs.UNCOUNTED
    return (utility * is_counted).sum(1) / is_counted.sum(1).clamp(min=1)


def compute_gae(rewards, values, looks, gamma, gae_lambda):
    """Compute advantages [T, ...] from rewards, values and looks [T, ...]; all patches stop at the end.

    Rows after a stop mean nothing: mask them with is_active.
    """
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
    decision = functional.logsigmoid(torch.where(looks, logits, -logits))
    normal = Normal(means, agent.log_std.exp(), validate_args=False)
    drawn = normal.log_prob(correction).sum(1)
    return torch.stack((decision, drawn * looks), 1)


def play(agent, images, labels, args, is_training=False, rule=None):
    """Play an episode of each patch of pictures [B, J C, S, S] with labels [B, G, h, w].

    In training, decisions and corrections are drawn from the policy. Otherwise a patch looks if the policy
    prefers that to stopping, and corrections are means. For comparisons, `rule(row)` [B, h, w] says where
    to look instead; row holds what the rollout stores before the action. Returns the rollout and the final
    logits of the cells [B, G, h, w].
    """
    embedding = agent.detector.embed(functional.avg_pool2d(images, args.coarse_size))  # [B, D, h, w]
    cell_logits = agent.detector.classify(embedding)
    utility = compute_utility(cell_logits, labels, agent.running_f1, args.beta)
    price = 2 * agent.changed_share * args.cost
    # All patches are active (they have not stopped), and none has seen anything
    is_active = torch.ones_like(utility, dtype=torch.bool)  # [B, h, w]
    seen = embedding.new_zeros(len(images), agent.detector.num_features, *utility.shape[1:])  # [B, E, h, w]
    rows = []
    for step in range(args.num_steps):
        look_logits, values = agent.decide(embedding, seen)
        row = {
            "embedding": embedding,
            "seen": seen,
            "step_indices": torch.full((len(images),), step, device=images.device),
            "is_active": is_active,
            "cell_logits": cell_logits,
            "look_logits": look_logits,
            "values": values,
        }

        # Act: look, or stop for good
        if is_training:
            looks = torch.rand_like(look_logits) < look_logits.sigmoid()
        elif rule is None:
            looks = look_logits > 0
        else:
            looks = rule(row)
        looks = looks & is_active
        means, features = agent.look(images, row["step_indices"], looks)
        correction = means
        if is_training:
            correction = means + torch.randn_like(means) * agent.log_std.exp() * looks.unsqueeze(1)

        # The next state, and the reward
        is_active = looks
        seen = seen + features
        embedding = embedding + agent.up(correction)
        cell_logits = agent.detector.classify(embedding)
        next_utility = compute_utility(cell_logits, labels, agent.running_f1, args.beta)
        row |= {
            "looks": looks,
            "correction": correction,
            "log_probs": compute_log_probs(agent, look_logits, looks, means, correction),
            "rewards": (next_utility - utility - price) * looks,  # eq. 1
        }
        utility = next_utility
        rows.append(row)
    rollout = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return rollout, cell_logits


@torch.no_grad()
def collect_rollout(agent, images, labels, args):
    """Play episodes with sampled decisions and corrections; return the rollout and what to log."""
    rollout, cell_logits = play(agent, images, labels, args, is_training=True)
    looks = rollout["looks"]
    rollout["advantages"] = compute_gae(
        rollout["rewards"], rollout["values"], looks, args.gamma, args.gae_lambda
    )
    rollout["returns"] = rollout["advantages"] + rollout["values"]

    # Move the running F1 of eq. 2 towards that of this rollout's maps
    counts = change_pairs.count_pixels(cell_logits.sigmoid(), labels, agent.running_f1 / 2)
    f1 = change_pairs.compute_scores(total(counts))["eval/f1"]
    agent.running_f1 += 0.2 * (f1 - agent.running_f1)

    # Log means over this process's patches
    scalars = {
        "charts/running_f1": agent.running_f1.item(),
        "charts/looks": looks.float().sum(0).mean().item(),
        "charts/episodic_return": rollout["rewards"].sum(0).mean().item(),
    }
    # To see whether the policy stops where the map is right: the accuracy of patches that stopped before T
    # looks, at p > 0.5, which does not move with F. Cells that do not count are taken for unchanged
    is_right = (cell_logits > 0) == (labels == 1)  # [B, G, h, w]
    accuracy = is_right.float().mean(1)[~looks[-1]]
    if len(accuracy):
        scalars["charts/stopped_accuracy"] = accuracy.mean().item()
    return rollout, scalars


def ppo_loss(agent, batch, args):
    """Compute eq. 5 for a minibatch of a rollout, and what to log.

    Loss and metrics are this process's parts of means over active patches.
    """
    is_active = batch["is_active"]  # [n, h, w]
    looks = batch["looks"]
    count = total(is_active.sum().float()).clamp(min=1)

    def mean(x):  # this process's part of a mean; `total` sums the parts of all processes
        return (x * is_active).sum() / count

    # The ratios of the decision and of the correction. They are masked before exp, as inf * 0 is not a number
    logits, values = agent.decide(batch["embedding"], batch["seen"])
    means, _ = agent.look(batch["images"], batch["step_indices"], looks)
    log_probs = compute_log_probs(agent, logits, looks, means, batch["correction"])  # [n, 2, h, w]
    is_taken = torch.stack((is_active, looks), 1)
    log_ratio = (log_probs - batch["log_probs"]) * is_taken
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)

    # Advantages of mean 0 and standard deviation 1 over active patches
    advantages = batch["advantages"] - total(mean(batch["advantages"]))
    std = total(mean(advantages.square())).sqrt()
    advantages = (advantages / (std + 1e-8)).unsqueeze(1)

    # The terms of eq. 5
    policy_loss = -(torch.min(ratio * advantages, clipped_ratio * advantages) * is_taken).sum(1)
    value_loss = 0.5 * (values - batch["returns"]).square()
    entropy = functional.softplus(logits) - logits * logits.sigmoid()  # of the decision
    # The joint loss trains `read`, `up` and `classify` on the maps of all active patches after the step: with
    # the mean correction as it is now, or none where a patch stops. The stored embedding is a constant, so
    # `embed` gets no gradient
    embedding = batch["embedding"] + agent.up(means)
    labels = torch.where(is_active.unsqueeze(1), batch["labels"], change_pairs.UNCOUNTED)
    joint_loss = cross_entropy(agent.detector.classify(embedding), labels)
    loss = mean(policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy)
    loss = loss + args.joint_coef * joint_loss

    # Of the two ratios, those of decisions ([:, 0]) are logged
    approx_kl = ratio - 1 - log_ratio
    is_clipped = (ratio - 1).abs() > args.clip_coef
    metrics = {
        "policy_loss": mean(policy_loss),
        "value_loss": mean(value_loss),
        "entropy": mean(entropy),
        "approx_kl": mean(approx_kl[:, 0]),
        "clipfrac": mean(is_clipped[:, 0]),
        "cross_entropy": joint_loss,
    }
    return loss, {name: x.detach() for name, x in metrics.items()}


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.no_grad()
def predict(agent, args, pairs, rule=None):
    """Return probabilities [M, H, W] of change, looks and returns [M, h, w], of pairs [M, J C + 1, H, W].

    To save memory, only so many pairs are played at once as have MAX_PIXELS (change_pairs.py), but at least
    one, whole.
    """
    found = []
    bar = make_bar("pairs", total=len(pairs), leave=False, delay=2)
    for images, labels in change_pairs.split_parts(pairs, args):
        rollout, cell_logits = play(agent, images, labels, args, rule=rule)
        probability = change_pairs.join_cells(cell_logits.sigmoid(), args)
        looks = rollout["looks"].float().sum(0)
        found.append((probability, looks, rollout["rewards"].sum(0)))
        bar.update(len(images))
    bar.close()
    return [torch.cat(parts) for parts in zip(*found)]


def evaluate(agent, args, pairs, threshold=None, rule=None):
    """Score maps of pairs by pixel; without a threshold, take the one with the largest F1 on these pairs.

    The reward has the threshold F / 2 in its place, which is the best one if probabilities are calibrated.
    F1 less the price of the looks chooses best.pt. The return would not do: it contains the running F1 of
    eq. 2, which moves during the run, so that the same maps would get different returns later.
    """
    probability, looks, returns = predict(agent, args, pairs, rule)
    scores = change_pairs.score_maps(probability, pairs[:, -1], threshold)
    num_looks = looks.mean().item()
    scores["eval/looks"] = num_looks
    scores["eval/f1_less_price"] = scores["eval/f1"] - args.cost * num_looks
    scores["eval/episodic_return"] = returns.mean().item()
    return scores


# ---- Training ----------------------------------------------------------------------------------------------
def train(args, run):
    """Train the agent of a run; with --evaluate score it, or use it for --predict."""
    # Set up
    device = set_up_device(args)
    seed_everything(args.seed, WEIGHTS)  # the weights are the same in every process
    agent = Agent(args).to(device)
    agent.eval()
    if args.pretrained and not run.checkpoint:
        load_weights(agent, args.pretrained)
    run.load(agent=agent)
    threshold = run.threshold if args.threshold is None else args.threshold
    rule = None if args.look_above is None else partial(look_above, args.look_above)
    if args.predict:
        write_predictions(agent, args, threshold, device, rule)
        return
    if args.evaluate:  # on pairs other than those that selected best.pt and its threshold
        (test,) = load_pairs(args, device, ["test"])
        print_line(f"{args.evaluate}: {len(test)} test pairs at the threshold {threshold} of probability")
        print_scores(evaluate(agent, args, test, threshold, rule))
        return
    train_pairs, all_val, test = load_pairs(args, device)
    val = all_val[: args.eval_episodes]
    agent.changed_share.copy_(change_pairs.compute_share(train_pairs))
    if not agent.changed_share > 0:
        fail("no pixel of the train pairs is changed, or all that are have the value of --ignore-index")
    # The heads learn faster: the policy must learn to recognize haze before the price makes it stop looking
    others = [x for name, x in agent.named_parameters() if not name.startswith("heads.")]
    optimizer = torch.optim.Adam([{"params": others}, {"params": agent.heads.parameters()}], fused=True)
    run.load(optimizer=optimizer)
    num_iterations = args.detector_iterations + args.ppo_iterations
    price = 2 * agent.changed_share.item() * args.cost
    description = (
        f"{change_pairs.describe(train_pairs, val, all_val, test, agent.changed_share)}, {device}; "
        f"a look costs {price:.4f}, and all looks cost {args.num_steps * args.cost:.2f} of F1"
    )
    run.open(description, num_iterations, "iterations", "iteration")

    while True:
        # Evaluate, if it is time; at the top, so that --resume repeats an evaluation that was cut off
        if run.should_evaluate():
            scores = evaluate(agent, args, val)
            run.threshold = scores["eval/threshold"]
            run.keep(scores, "eval/f1_less_price", len(val))
        if run.iteration >= num_iterations:
            break
        seed_everything(args.seed, TRAINING, run.iteration + 1, RANK)
        is_ppo = run.iteration >= args.detector_iterations

        # Learning rate: it falls linearly to zero over the whole run. So with the defaults (24 of 108
        # iterations for the detector), PPO begins at 0.78 of --learning-rate
        learning_rate = args.learning_rate if is_ppo else args.detector_lr
        if args.anneal_lr:
            learning_rate *= 1 - run.iteration / num_iterations
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.param_groups[1]["lr"] = learning_rate * args.head_lr_scale

        scalars = {}
        metrics = []  # of each gradient step
        if is_ppo:
            # Collect an episode of each patch
            num_pairs = args.num_envs
            images, labels = change_pairs.draw_batch(train_pairs, num_pairs // WORLD_SIZE, args)
            rollout, scalars = collect_rollout(agent, images, labels, args)

            # Update: update_epochs passes over the rollout, in evaluation mode like the rollout itself
            for minibatch in get_minibatches(rollout, images, labels, args):
                loss, metric = ppo_loss(agent, minibatch, args)
                take_step(agent, optimizer, loss, args)
                metrics.append(metric)
        else:
            # Train the detector. Training mode matters only to layers such as dropout
            num_pairs = DETECTOR_STEPS * args.batch_size
            agent.train()
            for _ in range(DETECTOR_STEPS):
                images, labels = change_pairs.draw_batch(train_pairs, args.batch_size // WORLD_SIZE, args)
                loss = detector_loss(agent, images, labels, args)
                take_step(agent, optimizer, loss, args)
                metrics.append({"cross_entropy": loss.detach()})
        agent.eval()

        # Log means over the gradient steps, summed over processes, each of which has its part, and save
        # checkpoint.pt if it is time
        run.iteration += 1
        run.step += num_pairs
        for name in metrics[0]:
            mean = torch.stack([metric[name] for metric in metrics]).mean()
            scalars[f"losses/{name}"] = total(mean).item()
        scalars["charts/learning_rate"] = learning_rate
        run.log(scalars)

    # Compare the last policy and best.pt with other rules, unless --eval-episodes is 0
    text = ""
    if run.last_score is not None:
        winner = compare_rules(agent, args, val, test, run.path / "best.pt")
        text = f" (on {len(val)} val pairs); {winner} earned most on test"
    run.close(text)


# ---- Comparison and files ----------------------------------------------------------------------------------
def look_above(level, row):
    """Rule: look to the end if the mean probability of change in a patch's coarse map is above `level`.

    With --look-above, --evaluate and --predict look by it.
    """
    # All pairs are at the same step. After step 0, each patch that is still active has looked, and goes on
    has_looked = row["step_indices"][0] > 0
    return has_looked | (row["cell_logits"].sigmoid().mean(1) > level)


def compare_rules(agent, args, val, test, best_path):
    """Print test scores of the last policy, of best.pt, and of simple rules on the network of best.pt.

    Returns the name of the rule whose F1 less the price of its looks is the largest.
    """
    best = copy.deepcopy(agent)
    load_weights(best, best_path)
    levels = np.linspace(0, 1, 11) ** 3  # closer together near 0, where most mean probabilities are
    rules = {
        "last policy": [None],
        "best.pt": [None],
        "everywhere": [partial(look_above, 0)],
        "nowhere": [partial(look_above, 1)],
        "look above": [partial(look_above, level) for level in levels],
    }
    found = {}
    thresholds = {}
    for name, candidates in rules.items():
        network = agent if name == "last policy" else best
        # Choose the candidate that earns most on val. For each, `evaluate` also chooses there the probability
        # from which a pixel is called changed
        on_val = [evaluate(network, args, val, None, rule) for rule in candidates]
        i = np.argmax([scores["eval/f1_less_price"] for scores in on_val])
        thresholds[name] = on_val[i]["eval/threshold"]
        found[name] = evaluate(network, args, test, thresholds[name], candidates[i])
    # i and name are still those of the last rule, look above
    flags = f" (--look-above {levels[i]:.3g} --threshold {thresholds[name]:.2g})"
    found["all changed"] = change_pairs.score_all_changed(test)
    for name, scores in found.items():
        flag = flags if name == "look above" else ""
        print_line(
            f"{name:>12}: F1 {scores['eval/f1']:.3f} on test at {scores['eval/looks']:.2f} looks a patch,"
            f" less their price {scores['eval/f1_less_price']:.3f}{flag}"
        )
    if found["best.pt"]["eval/f1"] <= found["all changed"]["eval/f1"]:
        print_line("The mask of best.pt is no better than calling every pixel changed. Do not use it")
    if len(val) < 10:
        print_line(f"With {len(val)} val pairs, the choice of best.pt and all thresholds are a guess")
    if len(test) < 10:
        print_line(f"With {len(test)} test pairs, these scores are a guess")
    return max(found, key=lambda name: found[name]["eval/f1_less_price"])


def load_weights(agent, path):
    """Load the agent of a checkpoint, its running F1 too; exits if it does not fit."""
    try:
        agent.load_state_dict(load_checkpoint(path)["agent"])
    except (KeyError, RuntimeError):
        fail(f"{path}: does not fit {NETWORK_FLAGS} and this file")


def import_folders():
    """Import the file that reads and writes pictures; exits if it is missing."""
    try:
        from envs_shared import change_folders
    except ImportError:
        fail("--data-dir and --predict need envs_shared/change_folders.py beside change_pairs.py; copy it")
    return change_folders


def call_or_fail(function, *inputs):
    """Return function(*inputs); exits with one line if that raises an error of pictures, folders or files."""
    try:
        return function(*inputs)
    except (ValueError, OSError) as error:
        fail(str(error))


def write_predictions(agent, args, threshold, device, rule=None):
    """Write the maps of each pair of --predict, a picture of them, and print what was found."""
    predict_pairs = partial(predict, agent, args, rule=rule)
    call_or_fail(import_folders().write_predictions, args, predict_pairs, threshold, device, print_line)


# ---- Run ---------------------------------------------------------------------------------------------------
# What follows is the same in all scripts of this family, but for `Progress` and `main`
if sys.stderr is None:  # closed by a shell, as by 2>&-, but the progress bar needs a stream
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0
    step: int = 0  # pairs trained on, in total across processes
    eval_steps: int = 0  # val pairs evaluated
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # eval/f1_less_price of best.pt, None before the first evaluation
    last_score: float | None = None  # eval/f1_less_price of the newest policy, None if it was not evaluated
    score_name: str = ""  # name of these scores, empty before the first evaluation
    is_due: bool = False  # is it time to evaluate the newest policy
    threshold: float = 0.5  # probability from which a pixel is called changed, tuned on val


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
    if args.num_steps == 0:
        args.num_steps = 1 if args.data_dir else change_pairs.count_dates(args)
    counts = """num_train_pairs image_size patch_size cell_size coarse_size num_steps batch_size num_envs
        num_minibatches update_epochs""".split()
    shares = "gamma gae_lambda clip_coef val_share".split()
    for name, value in vars(args).items():
        if value == "":
            fail(f"--{name.replace('_', '-')} is empty, perhaps because a variable of the shell is not set")
        if type(value) not in (int, float):
            continue
        most = 1 if name in shares else 1e30
        if name == "ignore_index":
            most = 255
        least = 1 if name in counts else 0
        if name in ("cost", "log_std"):
            least = -most
        if not least <= value <= most:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be from {least} to {most}")
    if args.num_envs % WORLD_SIZE or args.batch_size % WORLD_SIZE:
        fail(f"--num-envs and --batch-size must be divisible by the number of processes ({WORLD_SIZE})")
    patch = args.patch_size
    has_rest = args.image_size % patch or patch % args.cell_size or patch % args.coarse_size
    if has_rest or args.image_size == args.cell_size:
        fail(
            "--image-size must be divisible by --patch-size and larger than --cell-size, "
            "and --patch-size divisible by --cell-size and --coarse-size"
        )
    for name in ("predict", "threshold", "look_above"):
        if getattr(args, name) is not None and not args.evaluate:
            fail(f"--{name.replace('_', '-')} needs --evaluate")
    if args.predict and len(args.predict) not in (2, 3):
        fail("--predict needs two pictures or two folders, and may have a third with the labels")
    if args.detector_iterations + args.ppo_iterations == 0:
        fail("--detector-iterations and --ppo-iterations are both 0")
    if args.evaluate and RANK > 0:
        return None  # process 0 does it
    task = Path(args.data_dir).resolve().name if args.data_dir else args.env_id
    run = Run(args, task, checkpoint)
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
