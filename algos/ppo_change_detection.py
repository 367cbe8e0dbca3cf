"""PPO that decides where a change detector looks closely, in this file and envs_shared/change_pairs.py.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO); Fan et al. 2019, arXiv:1903.01344 (two ratios).

    python ppo_change_detection.py                       # learns the task haze in a minute on one CPU core
    python ppo_change_detection.py --data-dir LEVIR-CD --image-size 256 --num-steps 1        # real pairs
    python ppo_change_detection.py --pretrained runs/NAME/checkpoint.pt --cost 0.1           # PPO alone
    python ppo_change_detection.py --evaluate runs/NAME/best.pt --predict A B --output maps  # files, folders
    torchrun --nproc-per-node 2 ppo_change_detection.py  # two GPUs, or with --no-cuda two CPU processes

Two pictures of one place are divided into patches. Each patch is a query: an embedding of coarse pictures,
from which its cells (squares of a few pixels) are classified as changed or not. At each step a query stops
or pays for a look: its window at full resolution gives a correction, one number per cell, which is mapped to
an embedding and added. A look at the last step shows all dates, one at the step before all but the last.
The detector is trained first, by cross entropy with random looks. Then PPO learns where to look.

Equations of this file, for a query whose cells have labels y (1 is changed) and probabilities of change p:
    (1) r_t = w(p_{t+1}) - w(p_t) - cost if the query looks at step t; else it stops for good, and r_t = 0
    (2) w(p) = mean over labelled cells of beta max(log likelihood of y, -7) + 1[p > F/2] (2 y - F), the worth
        of its map; F is a running F1 = 2 TP / (predicted + true), which one more predicted cell moves by
        about (2 y - F) / (predicted + true), so cells are predicted as changed if p > F/2
    (3) A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); V = 0 after a stop
    (4) pi(a | s) = pi(stop | s), or pi(look | s) N(correction | mean(window), sigma)
    (5) L = E[ -sum min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + c1 (V - R)^2 / 2 - c2 entropy(pi(look)) ]
        + c3 cross entropy; the sum is over the two factors of eq. 4, each with its own ratio, and R = A + V

Shapes: T steps, B pairs, V dates, h x w queries of a pair, G cells of a query, D embedding, E features of all
dates but the last, K queries that look, n rows; S side of a picture, P of a patch, c of a cell, in pixels.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "numpy", "pillow", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
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

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
METRICS = "policy_loss value_loss entropy approx_kl clipfrac cross_entropy".split()  # per gradient step
DETECTOR_STEPS = 20  # gradient steps per iteration that trains the detector


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
    pretrained: str | None = None  # checkpoint of a trained detector (--ppo-iterations 0); skips its training
    detector_iterations: int = 24  # iterations that train the detector
    ppo_iterations: int = 84  # iterations of PPO
    batch_size: int = 16  # pairs per gradient step of the detector, in total across processes
    detector_lr: float = 3e-3  # Adam learning rate of the detector
    learning_rate: float = 3e-3  # Adam learning rate of PPO
    anneal_lr: bool = True  # lower both learning rates linearly to zero over the run
    num_envs: int = 256  # pairs B of a rollout, in total across processes
    cost: float = 0.09  # price of a look, eq. 1
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
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm


# ---- Networks ----------------------------------------------------------------------------------------------
class Agent(nn.Module):
    """The detector (backbone, refiner, class head), the policy head and the value head."""

    def __init__(self, args, embed_dim=64, date_dim=16, width=32):
        super().__init__()
        self.args, self.num_dates = args, change_pairs.ENV_IDS.get(args.env_id, 2)
        cell, patch, num_dates = args.cell_size, args.patch_size // args.coarse_size, self.num_dates
        coarse = Conv2d(3 * num_dates, width, 3, padding=1), nn.GELU(), Conv2d(width, embed_dim, patch, patch)
        self.backbone = nn.Sequential(*coarse, nn.GELU(), Conv2d(embed_dim, embed_dim, 3, padding=1))
        num_cells = (args.patch_size // cell) ** 2
        self.class_head = Conv2d(embed_dim, num_cells, 1)
        self.read_date = Conv2d(3, date_dim, 2 * cell, cell)
        compare = Conv2d(2 * num_dates * date_dim, width, 2), nn.ReLU(), Conv2d(width, width, 3, padding=1)
        self.refiner = nn.Sequential(*compare, nn.ReLU(), Conv2d(width, 1, 1))
        self.up = Conv2d(num_cells, embed_dim, 1, bias=False)  # maps corrections to embeddings
        nn.init.normal_(self.up.weight)  # large, so that corrections matter from the first gradient step on
        self.log_std = nn.Parameter(torch.full((num_cells, 1, 1), args.log_std))
        self.seen_dim = (num_dates - 1) * date_dim  # E, for all dates but the last
        hidden, last = Conv2d(embed_dim + self.seen_dim, 128, 1), Conv2d(128, 2, 1, groups=2)
        self.heads = nn.Sequential(hidden, nn.Tanh(), last)  # policy and value, each with half of `hidden`
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, 1e-3)  # so the detector alone looks everywhere
        self.register_buffer("running_f1", torch.tensor(0.5))  # F of eq. 2

    def decide(self, obs):
        """Return the logits of a look and the values V, [B, h, w] each; neither depends on the step."""
        return self.heads(torch.cat((obs["query"], obs["seen"]), 1)).unbind(1)

    def look(self, images, obs, looks):
        """Read the windows of queries with `looks` [B, h, w], and no others, in pictures [B, 3 V, S, S].

        Returns mean corrections [B, G, h, w] and `shown` [B, E, h, w], the range in the window of each
        feature of each date but the last. Both are zero for queries that do not look.
        """
        cell, patch, num_dates = self.args.cell_size, self.args.patch_size, self.num_dates
        x, size = F.pad(images, (cell,) * 4, mode="reflect"), patch + 2 * cell
        x = x.unfold(2, size, patch).unfold(3, size, patch)  # [B, 3 V, h, w, size, size], a view
        x = x.permute(0, 2, 3, 1, 4, 5)[looks].unflatten(1, (num_dates, 3))  # [K, V, 3, size, size]
        dates = self.read_date(x.flatten(0, 1)).relu().unflatten(0, (-1, num_dates))  # [K, V, 16, y, x]
        last_date = (obs["step_indices"] + num_dates - self.args.num_steps).clamp(min=0).view(-1, 1, 1)
        is_shown = torch.arange(num_dates, device=x.device) <= last_date.expand_as(looks)[looks].unsqueeze(1)
        dates = dates * is_shown[:, :, None, None, None]
        x = torch.cat((dates, (dates - dates[:, :1]).abs()), 1).flatten(1, 2)
        ranges = (dates.amax((3, 4)) - dates.amin((3, 4)))[:, :-1]
        rows = torch.cat((self.refiner(x).flatten(1), ranges.flatten(1)), 1)  # [K, G + E]
        grid = rows.new_zeros(*looks.shape, rows.shape[1]).masked_scatter(looks.unsqueeze(-1), rows)
        correction, shown = grid.movedim(-1, 1).tensor_split((len(self.log_std),), 1)
        return {"correction": correction, "shown": shown}


# ---- Environments ------------------------------------------------------------------------------------------
def load_pairs(args, device):
    """Return train, val and test pairs as described in envs_shared/change_pairs.py; exits if that fails."""
    try:
        try:
            splits = change_pairs.load_pairs(args)
        except LookupError:
            from envs_shared import change_folders

            splits = change_folders.read_folder(args.data_dir, args.patch_size, args.image_size)
    except (ValueError, OSError, ImportError) as error:
        fail(f"{error.__context__ or ''} {error}")
    return [torch.from_numpy(x).to(device) for x in splits.values()]


class ChangeEnv:
    """B pairs, where each query is an episode: it looks until it stops, at most T times."""

    def __init__(self, agent):
        self.agent, self.args = agent, agent.args

    def reset(self, images, labels):
        """Begin with pictures [B, 3 V, S, S] and labels [B, G, h, w], and return the first observation."""
        query = self.agent.backbone(F.avg_pool2d(images, self.args.coarse_size))  # [B, D, h, w]
        self.labels, self.final_logits = labels, self.agent.class_head(query)
        zeros = torch.zeros_like(query[:, :1])
        self.is_active = zeros.squeeze(1) == 0  # [B, h, w], not stopped yet
        seen, step = zeros.expand(-1, self.agent.seen_dim, -1, -1), zeros[:, 0, 0, 0].long()
        self.obs = {"query": query, "seen": seen, "step_indices": step}
        return self.obs

    def step(self, action):
        """Apply `correction` [B, G, h, w], `shown` [B, E, h, w] and `stop` [B, h, w] to all queries."""
        last_logits, mask, stop = self.final_logits, self.is_active, action["stop"]
        query = self.obs["query"] + self.agent.up(action["correction"])
        seen, step = self.obs["seen"] + action["shown"], self.obs["step_indices"] + 1
        self.obs = {"query": query, "seen": seen, "step_indices": step}
        self.is_active, self.final_logits = mask & ~stop, self.agent.class_head(query)
        rewards, info = compute_reward(
            self.final_logits, last_logits, self.labels, stop, mask, self.agent.running_f1, self.args
        )
        return self.obs, rewards, ~self.is_active, info | {"pre_action_mask": mask, "cls_query": query}


# ---- Storage -----------------------------------------------------------------------------------------------
class RolloutBuffer(list):
    """A list of the steps of a rollout: dictionaries of an observation, an action and its outcome."""

    def compute_returns_and_advantage(self, last_value, args):
        """Stack the steps into `data` [T, B, ...], and add the advantages of eq. 3 and the returns."""
        self.data = data = {name: torch.stack([step[name] for step in self]) for name in self[0]}
        gae = data["rewards"], data["values"], data["dones"], last_value, args.gamma, args.gae_lambda
        data["advantages"] = compute_gae(*gae)
        data["returns"] = data["advantages"] + data["values"]

    def get_minibatches(self, images, labels, args):
        """Yield the T B rows with pictures and labels, shuffled in each epoch, as dictionaries [n, ...]."""
        for _ in range(args.update_epochs):
            rows = torch.randperm(len(self) * len(images), device=images.device)
            for part in rows.tensor_split(args.num_minibatches):
                pairs = part % len(images)
                minibatch = {name: x.flatten(0, 1)[part] for name, x in self.data.items()}
                yield minibatch | {"images": images[pairs], "labels": labels[pairs]}


# ---- PPO ---------------------------------------------------------------------------------------------------
def compute_worth(logits, labels, f1, beta):
    """Compute w [B, h, w] of eq. 2 from logits and labels [B, G, h, w]."""
    log_likelihood = F.logsigmoid(logits * (2 * labels - 1)).clamp(min=-7)
    worth = beta * log_likelihood + (logits.sigmoid() > f1 / 2) * (2 * labels - f1)
    is_counted = labels >= 0
    return (worth * is_counted).sum(1) / is_counted.sum(1).clamp(min=1)


def compute_reward(logits, last_logits, labels, stop, pre_action_mask, f1, args):
    """Compute r_t [B, h, w] of eq. 1, and the accuracy of the cells of each query that has stopped."""
    looks = pre_action_mask & ~stop
    worth, last_worth = (compute_worth(x, labels, f1, args.beta) for x in (logits, last_logits))
    accuracy = ((logits > 0) == (labels > 0)).float().mean(1)
    return (worth - last_worth - args.cost) * looks, {"settled_acc": torch.where(looks, torch.nan, accuracy)}


def compute_gae(rewards, values, dones, last_value, gamma, gae_lambda):
    """Compute advantages [T, ...] from rewards, values, dones [T, ...] and the value after the last step."""
    advantages, advantage = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * last_value * ~dones[t] - values[t]
        advantages[t] = advantage = delta + gamma * gae_lambda * advantage * ~dones[t]  # eq. 3
        last_value = values[t]
    return advantages


def compute_log_probs(agent, logits, looks, means, correction):
    """Compute the logs [B, 2, h, w] of the two factors of eq. 4; without a look, the second is 0."""
    drawn = Normal(means, agent.log_std.exp(), validate_args=False).log_prob(correction).sum(1)
    return torch.stack((F.logsigmoid(torch.where(looks, logits, -logits)), drawn * looks), 1)


def play(agent, images, labels, args, rule=None, std=0.0):
    """Play an episode of each query of pictures [B, 3 V, S, S] with labels [B, G, h, w].

    A query looks if `rule(env, logits)` [B, h, w] is true or, without a rule, if the policy prefers to look.
    Corrections get noise of standard deviation `std`. Returns the final environment and a RolloutBuffer.
    """
    env, buffer = ChangeEnv(agent), RolloutBuffer()
    obs = env.reset(images, labels)
    for _ in range(args.num_steps):
        logits, values = agent.decide(obs)
        looks = env.is_active & (rule(env, logits) if rule else logits > 0)
        action = agent.look(images, obs, looks) | {"stop": ~looks}
        means = action["correction"]
        action["correction"] = means + torch.randn_like(means) * std * looks.unsqueeze(1)
        log_probs = compute_log_probs(agent, logits, looks, means, action["correction"])
        next_obs, rewards, dones, info = env.step(action)
        action |= {"log_probs": log_probs, "values": values, "rewards": rewards, "dones": dones}
        buffer.append(obs | action | info)
        obs = next_obs
    buffer.compute_returns_and_advantage(torch.zeros_like(values), args)  # no query looks after T steps
    return env, buffer


@torch.no_grad()
def collect_rollout(agent, images, labels, args):
    """Play episodes with sampled decisions and corrections; return a RolloutBuffer and what to log."""
    rule, std = lambda env, logits: torch.rand_like(logits) < logits.sigmoid(), agent.log_std.exp()
    env, buffer = play(agent, images, labels, args, rule, std)
    says_change = (env.final_logits.sigmoid() > agent.running_f1 / 2) * (labels >= 0)
    counts = torch.stack((2 * says_change * labels, says_change + labels.clamp(min=0)))  # [2, B, G, h, w]
    hits, total = average(counts.sum((1, 2, 3, 4)))
    agent.running_f1.lerp_(hits / (total + 1e-9), 0.2)
    data, scores = buffer.data, {"charts/running_f1": agent.running_f1}
    scores |= {"charts/looks": (~data["stop"]).float().sum(0), "charts/settled_acc": data["settled_acc"][-1]}
    scores["charts/episodic_return"] = data["rewards"].sum(0)
    return buffer, {name: average(x.nanmean()).item() for name, x in scores.items()}


def cross_entropy(logits, labels):
    """Compute this process's share of the mean cross entropy over all labels but those of -1."""
    is_counted = (labels >= 0).float()
    loss = F.binary_cross_entropy_with_logits(logits, labels, is_counted, reduction="sum")
    return loss / average(is_counted.sum()).clamp(min=1)


def ppo_loss(agent, batch, args):
    """Compute eq. 5, a mean over active queries, and METRICS for a minibatch of a RolloutBuffer."""
    is_active, looks = batch["pre_action_mask"], ~batch["stop"]  # [n, h, w]
    logits, values = agent.decide(batch)
    means = agent.look(batch["images"], batch, looks)["correction"]
    log_probs = compute_log_probs(agent, logits, looks, means, batch["correction"])  # [n, 2, h, w]
    is_taken = torch.stack((is_active, looks), 1)
    log_ratio = (log_probs - batch["log_probs"]) * is_taken  # masked before exp, as inf * 0 is not a number
    ratio = log_ratio.exp()
    count, mean = average(is_active.sum().float()).clamp(min=1), lambda x: (x * is_active).sum() / count
    advantages = batch["advantages"] - average(mean(batch["advantages"]))
    advantages = (advantages / (average(mean(advantages.square())).sqrt() + 1e-8)).unsqueeze(1)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -(torch.min(ratio * advantages, clipped_ratio * advantages) * is_taken).sum(1)
    value_loss = 0.5 * (values - batch["returns"]).square()
    entropy = F.softplus(logits) - logits * logits.sigmoid()
    # The stored embedding trains the class head; the mean correction, recomputed, trains the refiner
    query = batch["cls_query"] + agent.up(means - batch["correction"])
    labels = torch.where(is_active.unsqueeze(1), batch["labels"], -1.0)
    joint_loss = cross_entropy(agent.class_head(query), labels)
    loss = mean(policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy)
    is_clipped = (ratio - 1).abs() > args.clip_coef  # clipfrac and approx_kl are those of decisions
    metrics = (policy_loss, value_loss, entropy, (ratio - 1 - log_ratio)[:, 0], is_clipped[:, 0])
    return loss + args.joint_coef * joint_loss, torch.stack((*map(mean, metrics), joint_loss)).detach()


def detector_loss(agent, images, labels, args):
    """Compute the mean cross entropy before and after each step; each pair looks at its own random rate."""
    share = torch.rand(len(images), 1, 1, device=images.device)
    _, buffer = play(agent, images, labels, args, lambda env, logits: torch.rand_like(logits) < share)
    queries = buffer.data["query"][0], *buffer.data["cls_query"]
    loss = sum(cross_entropy(agent.class_head(x), labels) for x in queries) / len(queries)
    return loss, loss.detach()[None]


def take_step(agent, optimizer, loss, metrics, args):
    """Take one gradient step and return the mean metrics of all processes."""
    optimizer.zero_grad()
    loss.backward()
    gradients = [x.grad for x in agent.parameters() if x.grad is not None]  # sent as one vector
    nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return average(metrics)


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.no_grad()
def classify(agent, args, pairs, rule=None):
    """Return probabilities [M, H, W] of change, looks and returns [M, h, w], of pairs [M, 3 V + 1, H, W]."""
    found = []
    for part in pairs.split(max(1, 2**17 // pairs[0, 0].numel())):
        env, buffer = play(agent, *change_pairs.split_labels(part, args), args, rule)
        cells = F.pixel_shuffle(env.final_logits.sigmoid(), args.patch_size // args.cell_size)
        pixels = F.interpolate(cells, scale_factor=args.cell_size, mode="bilinear").squeeze(1)
        found.append((pixels, (~buffer.data["stop"]).float().sum(0), buffer.data["rewards"].sum(0)))
    return map(torch.cat, zip(*found, strict=True))


def evaluate(agent, args, pairs, threshold=None, rule=None):
    """Score maps of pairs by pixel; without a probability threshold, use the one with the largest F1."""
    probability, looks, returns = classify(agent, args, pairs, rule)
    is_counted, is_changed = pairs[:, -1] < 255, pairs[:, -1] == 1

    def score(threshold):  # F1 of all pixels that count
        says_change = (probability >= threshold) & is_counted
        total = says_change.sum() + is_changed.sum() + 1e-9
        return (2 * (says_change & is_changed).sum() / total).item()

    if threshold is None:
        threshold = max(np.linspace(0, 1, 101).tolist(), key=score)
    scores = {"eval/f1": score(threshold), "eval/threshold": threshold}
    return scores | {"eval/looks": looks.mean().item(), "eval/episodic_return": returns.mean().item()}


def print_rules(agent, args, val, test):
    """Print test F1 of the policy and of rules tuned on val; `threshold` is tuned to look as often."""
    _, looks, _ = classify(agent, args, val)
    coarse = []

    def rule(env, logits, level=1):  # looks T times, or not at all if the coarse map has less change
        coarse.append(env.final_logits.sigmoid().mean(1))  # [B, h, w]
        return (coarse[-1] > level) | (env.obs["step_indices"].view(-1, 1, 1) > 0)

    classify(agent, args, val, rule)
    level = torch.cat(coarse).quantile(1 - looks.mean() / args.num_steps)
    rules = {"nowhere": rule, "everywhere": partial(rule, level=-1), "threshold": partial(rule, level=level)}
    for name, chosen in (rules | {"PPO": None}).items():
        threshold = evaluate(agent, args, val, None, chosen)["eval/threshold"]
        scores = evaluate(agent, args, test, threshold, chosen)
        print(f"{name:>12}: F1 {scores['eval/f1']:.3f} on test at {scores['eval/looks']:.2f} looks a query")


def write_predictions(agent, args, threshold, device):
    """Write a mask and a map of the probability of change for each pair of --predict."""
    try:
        pairs = change_pairs.read_pairs(*args.predict, args.patch_size)
        Path(args.output).mkdir(parents=True)
    except (ValueError, OSError) as error:
        fail(f"--predict, --output: {error}")
    for name, (pair, height, width) in pairs.items():
        (probability,), looks, _ = classify(agent, args, torch.from_numpy(pair).to(device))
        probability = probability[:height, :width].cpu().numpy()
        for kind, x in (("mask", probability >= threshold), ("probability", probability)):
            Image.fromarray(np.uint8(255 * x)).save(Path(args.output, f"{name}_{kind}.png"))
        print(f"{name}: {(probability >= threshold).mean():.3f} changed, {looks.mean():.2f} looks a query")


# ---- Training ----------------------------------------------------------------------------------------------
def fail(message: str):
    """Print one line for the user and exit with code 2."""
    tqdm.write(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def average(x):
    """Average a tensor over all processes, in place."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x.div_(WORLD_SIZE))
    return x


def seed_everything(*stream: int) -> int:
    """Seed all random generators from the integers `stream`; returns a seed below 2^30 for environments."""
    seed = int(np.random.SeedSequence(stream).generate_state(1)[0]) % 2**30
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    return seed


def train(args, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate score it, or use it for --predict."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # more threads slow these networks down
    torch.backends.cudnn.deterministic = args.torch_deterministic
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("nccl" if use_cuda else "gloo")
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = Agent(args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), fused=True)
    progress = checkpoint["progress"] if checkpoint else (0, 0, 0, 0.0, -np.inf, np.nan, 0.5)
    iteration, step, eval_steps, cpu_seconds, best_return, last_return, threshold = progress
    try:
        if checkpoint:
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        elif args.pretrained:
            detector = torch.load(args.pretrained, map_location="cpu", weights_only=True)["agent"]
            agent.load_state_dict(detector | {"log_std": agent.log_std})
            iteration = args.detector_iterations
    except Exception as error:
        fail(f"{args.evaluate or args.resume or args.pretrained}: does not fit the flags ({error})")
    if args.predict:
        return write_predictions(agent, args, threshold, device)
    train_pairs, val, test = load_pairs(args, device)
    if args.evaluate:  # on pairs other than those that selected best.pt and its threshold
        return print(evaluate(agent, args, test, threshold))

    def save(name: str):
        progress = (iteration, step, eval_steps, cpu_seconds, best_return, last_return, threshold)
        states = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"args": asdict(args), "progress": progress} | states, run_path / f"{name}.tmp")
        os.replace(run_path / f"{name}.tmp", run_path / name)  # atomic: a kill leaves the old file or the new

    if RANK == 0:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
        run_path = Path(args.resume).parent if args.resume else Path(args.run_dir, name)
        print(f"{run_path}: {len(train_pairs)} train, {len(val)} val and {len(test)} test pairs, step {step}")
        if args.track:
            import wandb

            config = {"config": asdict(args), "sync_tensorboard": True, "resume": "allow"}
            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, id=run_path.name, **config)
        writer = SummaryWriter(str(run_path), purge_step=step + 1)
        rows = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
        checkpoint or save("checkpoint.pt")  # before training, so that a kill always leaves one
    num_iterations, val = args.detector_iterations + args.ppo_iterations, val[: args.eval_episodes]
    eval_interval = args.eval_interval or num_iterations // 10 + 1
    seconds_per_line = 0.1 if sys.stderr.isatty() else 30
    bar = tqdm(total=num_iterations, initial=iteration, mininterval=seconds_per_line, disable=RANK > 0)
    while iteration < num_iterations:
        start, cpu_start = time.time(), time.process_time()
        is_ppo, lr = iteration >= args.detector_iterations, 1 - iteration / num_iterations * args.anneal_lr
        lr *= args.learning_rate if is_ppo else args.detector_lr
        optimizer.param_groups[0]["lr"] = lr
        iteration += 1
        seed_everything(args.seed, 1, iteration, RANK)
        if is_ppo:
            batch = change_pairs.draw_batch(train_pairs, args.num_envs // WORLD_SIZE, args)
            buffer, scalars = collect_rollout(agent, *batch, args)
            losses = (ppo_loss(agent, x, args) for x in buffer.get_minibatches(*batch, args))
        else:
            sizes, scalars = [args.batch_size // WORLD_SIZE] * DETECTOR_STEPS, {}
            batches = (change_pairs.draw_batch(train_pairs, size, args) for size in sizes)
            losses = (detector_loss(agent, *batch, args) for batch in batches)
        metrics = [take_step(agent, optimizer, *loss, args) for loss in losses]
        num_pairs = args.num_envs if is_ppo else DETECTOR_STEPS * args.batch_size
        step += num_pairs
        if RANK > 0:  # the log is written by process 0
            continue
        cpu_seconds += time.process_time() - cpu_start
        metrics = torch.stack(metrics).mean(0).tolist()
        if not np.isfinite(metrics).all():
            fail(f"{args.env_id}: losses are not finite at step {step}")
        scalars |= zip((f"losses/{name}" for name in METRICS[-len(metrics) :]), metrics, strict=True)
        scalars |= {"charts/cpu_seconds": cpu_seconds, "charts/learning_rate": lr}
        scalars["charts/SPS"] = num_pairs / (time.time() - start)
        bar.update()
        is_last = iteration == num_iterations
        is_due = is_last or iteration % eval_interval == 0
        is_affordable = eval_steps + len(val) <= step / 5  # a fifth of the pairs trained on
        if is_due and args.eval_episodes and (is_last or args.eval_interval or is_affordable):
            scalars |= evaluate(agent, args, val)
            eval_steps, threshold = eval_steps + len(val), scalars["eval/threshold"]
            bar.set_postfix_str(f"F1 {scalars['eval/f1']:.3f}", refresh=False)
            if (last_return := scalars["eval/episodic_return"]) >= best_return:
                best_return = last_return
                save("best.pt")
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        if is_due:
            writer.flush()
            save("checkpoint.pt")
    if RANK == 0:
        bar.close()
        if args.eval_episodes:
            agent.load_state_dict(torch.load(run_path / "best.pt", weights_only=True)["agent"])
            print_rules(agent, args, val, test)
        scores = f"return of best.pt {best_return:.4f}, of the last policy {last_return:.4f}"
        print(f"{run_path}: {scores if args.eval_episodes else 'not evaluated'}")


def main(argv=None):
    """Read the command line; flags override the settings of a checkpoint."""
    args, checkpoint = tyro.cli(Args, args=argv), None
    if path := args.evaluate or args.resume:
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            args = tyro.cli(Args, args=argv, default=Args(**checkpoint["args"]))
        except Exception as error:
            fail(f"{path}: not a checkpoint of this script ({str(error).split('. ')[0]})")
    if args.num_envs % WORLD_SIZE or args.batch_size % WORLD_SIZE:
        fail(f"--num-envs and --batch-size must be divisible by the number of processes ({WORLD_SIZE})")
    patch = args.patch_size
    if args.image_size % patch or patch % args.cell_size or patch % args.coarse_size:
        fail("--image-size must be divisible by --patch-size, and --patch-size by --cell-size, --coarse-size")
    if args.predict and not args.evaluate:
        fail("--predict needs --evaluate")
    train(args, checkpoint)


if __name__ == "__main__":
    main()
    if RANK > 0:
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
