"""Proximal Policy Optimization (PPO) for discrete and continuous actions, in one file.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO), and 2016, arXiv:1506.02438 (advantage estimation).

    python ppo.py                                    # learns CartPole-v1 in seconds on one CPU core
    python ppo.py --env-id Pendulum-v1 --norm-obs --total-timesteps 200000   # continuous actions
    torchrun --nproc-per-node 2 ppo.py               # two GPUs, or with --no-cuda two CPU processes

Equations, numbered after the first paper:
    (6)   ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t), the ratio in that equation
    (7)   L^CLIP  = min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t)
    (9)   L       = E[ L^CLIP - c1 (V(s_t) - R_t)^2 / 2 + c2 entropy(pi(. | s_t)) ], R_t = A_t + V_old(s_t);
          here the squared error is halved
    (11)  A_t     = delta_t + gamma lambda A_{t+1}, without A_{t+1} at the end of an episode or of the rollout
    (12)  delta_t = r_t + gamma V(s_{t+1}) - V(s_t), where V(s_{t+1}) = 0 if s_{t+1} is terminal

Shapes: T steps, B environments of one process, N = T B training rows, observations of shape D, A components
of an action, P numbers that define pi(. | s) for one s: the logits, or A means and A log standard deviations.

The file has two parts. The algorithm comes first, with its loop in `train`. The part `Run` at the end is
about the run folder, the log, checkpoints, processes and the command line.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy", "gymnasium[classic-control]>=1.4", "tyro", "tensorboard", "wandb", "tqdm"
# ]
# ///
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import namedtuple
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, flatdim
from gymnasium.wrappers.vector import FlattenObservation, RecordVideo
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# --env-id my_module:MyTask-v0 finds my_module.py in the current folder, that of this file, and its parent
sys.path += [os.getcwd(), *map(str, Path(__file__).resolve().parents[:2])]
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# On one GPU, record acting and the update once; replaying them saves CPU overhead. Set it to False for edits
# that need the host in between, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
# What the part `Run` must know of this script
TASK_SETTINGS = ("env_id",)  # if one changes with --resume, the score of best.pt is forgotten
NETWORK_FLAGS = "--env-id, --norm-obs"  # named in the message about a checkpoint that does not fit
SCORE = "return"  # name, in messages, of the score that run.keep gets


@dataclass
class Args:
    """PPO on any gymnasium environment whose observations can be flattened."""

    # The run
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # use deterministic cuDNN kernels, which matters with convolutions
    cuda: bool = True  # train on a GPU if there is one
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    capture_video: bool = False  # record evaluations' first environment in the run folder (needs moviepy)
    run_dir: str = "runs"  # parent folder of all run folders
    resume: str | None = None  # checkpoint.pt of a run to resume; its settings hold unless flags change them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate instead of training
    eval_interval: int = 0  # iterations between evaluations (0: a tenth of the run, or more if costly)
    eval_episodes: int = 10  # episodes per evaluation (0: never during training, 10 with --evaluate)
    # The task
    env_id: str = "CartPole-v1"  # gymnasium id; `module:Name-v0` imports the module first
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the task's own vector env, else sync
    num_envs: int = 32  # parallel environments in total; each process has its share B
    total_timesteps: int = 100_000  # environment steps, in total across environments
    # The rollout and its advantages
    num_steps: int = 64  # rollout length T: steps in each environment
    gamma: float = 0.98  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 11
    norm_obs: bool = False  # normalize observations by their running mean and standard deviation
    norm_reward: bool = True  # divide rewards by the std of their discounted past sum, clip to [-10, 10]
    # The update
    learning_rate: float = 4e-3  # Adam learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_minibatches: int = 4  # minibatches that each epoch splits the rollout into
    update_epochs: int = 5  # epochs K over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clipping range eps of the ratio, eq. 7
    clip_vloss: bool = False  # also clip how far the value moves, by clip_coef
    ent_coef: float = 0.0  # entropy coefficient c2, eq. 9
    vf_coef: float = 0.5  # value coefficient c1, eq. 9
    max_grad_norm: float = 0.5  # larger gradients are scaled down to this norm (1e9: never; 0: no training)
    target_kl: float | None = None  # skip the remaining epochs if approx_kl exceeds this (None, 0: never)


# ---- Networks ----------------------------------------------------------------------------------------------
def make_mlp(num_inputs, num_outputs, last_gain):
    """Make an MLP for rows [N, *D]: two hidden tanh layers of 64, orthogonal weights, biases of zero."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, num_outputs),
    )
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, last_gain if layer is network[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)
    return network


class RunningMeanStd(nn.Module):
    """Running mean and variance, in float64, of all rows [N, *shape] that `update` saw in all processes."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape).double())
        self.register_buffer("var", torch.ones(shape).double())
        self.register_buffer("count", torch.zeros(()).double())

    def update(self, x, weights):
        """Add the rows x [N, *shape] whose weight [N] is 1; rows of weight 0 do not count."""
        x = x.double()
        weights = weights.double()
        # Mean and variance of the new rows. `total` sums a tensor over all processes, and
        # tensordot(weights, x, 1) is the sum of weight times row, [*shape]
        num_rows = total(weights.sum())
        divisor = num_rows.clamp(min=1)
        new_mean = total(torch.tensordot(weights, x, 1)) / divisor
        new_var = total(torch.tensordot(weights, (x - new_mean).square(), 1)) / divisor
        # Join them with those of all rows before (Chan et al. 1979). If s is the share of the new rows,
        #   mean = (1 - s) old mean + s new mean
        #   var  = (1 - s) old var  + s new var  + s (1 - s) (new mean - old mean)^2
        # The tensors change in place, because CUDA graphs read them where they are
        self.count += num_rows
        share = num_rows / self.count
        shift = new_mean - self.mean
        self.mean += share * shift
        self.var += share * (new_var - self.var + (1 - share) * shift.square())

    def scale(self, x):
        """Divide x by the standard deviation, and clip it to [-10, 10]."""
        return (x / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def forward(self, x):
        """Normalize rows x [N, *shape] to mean 0 and standard deviation 1, clipped to [-10, 10]."""
        return self.scale(x - self.mean)


class Agent(nn.Module):
    """Separate actor and critic, and the statistics that normalize observations and rewards."""

    def __init__(self, envs, norm_obs):
        super().__init__()
        self.space = envs.single_action_space
        self.is_continuous = isinstance(self.space, Box)
        num_outputs = flatdim(self.space)  # the components of a Box, or the number of discrete actions
        obs_shape = envs.single_observation_space.shape
        num_inputs = math.prod(obs_shape)
        self.actor = make_mlp(num_inputs, num_outputs, last_gain=0.01)
        self.critic = make_mlp(num_inputs, 1, last_gain=1.0)
        if self.is_continuous:
            self.actor_logstd = nn.Parameter(torch.zeros(num_outputs))
        self.normalize = RunningMeanStd(obs_shape) if norm_obs else nn.Identity()
        self.return_stats = RunningMeanStd(())  # of RolloutStorage.discounted; its deviation scales rewards

    def get_values(self, obs):
        """Return V(s) [N] for normalized observations [N, *D]."""
        return self.critic(obs).squeeze(-1)

    def get_policy_params(self, obs):
        """Return logits, or means and log standard deviations, [N, P] for normalized observations [N, *D]."""
        out = self.actor(obs)
        if self.is_continuous:
            out = torch.cat((out, self.actor_logstd.expand_as(out)), -1)
        return out

    def get_distribution(self, policy_params):
        """Return pi(. | s) for parameters [N, P] as N x A independent distributions.

        The log-probability of an action is the sum over its A components.
        """
        if self.is_continuous:
            mean, logstd = policy_params.chunk(2, -1)
            return Normal(mean, logstd.exp(), validate_args=False)
        # A = 1: logits [N, 1, P] make N x 1 distributions, so that log_prob takes actions [N, 1]
        return Categorical(logits=policy_params.unsqueeze(-2), validate_args=False)

    def sample(self, policy_params):
        """Draw actions [N, A] from the distribution that get_distribution returns: change both together.

        The distributions' own `sample` is slower and makes the host wait, which a CUDA graph cannot record.
        """
        if self.is_continuous:
            mean, logstd = policy_params.chunk(2, -1)
            return mean + logstd.exp() * torch.randn_like(mean)
        # With exponential noise E, -log(E) is Gumbel noise, and argmax(logits - log(E)) is distributed as
        # softmax(logits)
        log_noise = torch.empty_like(policy_params).exponential_().log()
        return (policy_params - log_noise).argmax(-1, keepdim=True)

    def to_env(self, actions):
        """Convert actions [B, A] to an array of what the environments take."""
        actions = actions.numpy(force=True).reshape(-1, *self.space.shape)
        if not self.is_continuous:
            return actions + self.space.start
        low, high = self.space.low, self.space.high
        # -1 and 1 become the bounds of a component; one without two finite bounds stays as it is. Only the
        # environment sees the scaled and clipped action; log-probabilities are those of the one drawn
        with np.errstate(all="ignore"):
            scaled = low + (high - low) * (actions + 1) / 2
            actions = np.where(np.isfinite(high - low), scaled, actions)
        return actions.clip(low, high)


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs, video_folder=None):
    """Make environments; exits if they are not supported.

    With a folder and --capture-video, the first one is recorded. Each evaluation makes its own environments.
    So add no wrapper that learns statistics, such as NormalizeObservation: it would begin anew there, and
    show the policy other numbers.
    """
    wrappers = []  # add your own, such as [gym.wrappers.TimeAwareObservation]
    mode = args.vectorization
    if mode == "auto":
        # Wrappers need single environments. Otherwise None lets gymnasium take the task's own vector
        # environment if it has one
        mode = "sync" if wrappers else None
    is_filmed = video_folder and args.capture_video
    render = {"render_mode": "rgb_array"} if is_filmed else {}
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers, **render)
        if is_filmed:
            envs = RecordVideo(envs, video_folder, record_first_only=True)
    except (gym.error.Error, ModuleNotFoundError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if envs.num_envs != num_envs:
        fail(
            f"--env-id {args.env_id}: always has {envs.num_envs} environments; set --num-envs (per process) "
            "and --eval-episodes to that number"
        )
    obs_space = envs.single_observation_space
    action_space = envs.single_action_space
    if not obs_space.is_np_flattenable or flatdim(obs_space) > 10_000:  # a large picture
        fail(f"--env-id {args.env_id}: observations must flatten to at most 10,000 numbers, not {obs_space}")
    # A Box of floats that is not empty
    is_box = isinstance(action_space, Box) and action_space.dtype.kind == "f" and flatdim(action_space) > 0
    if not is_box and not isinstance(action_space, Discrete):
        fail(f"--env-id {args.env_id}: actions must be Discrete or a Box of floats, not {action_space}")
    # RolloutStorage is made for one autoreset mode, in which the step after an episode's end only resets. The
    # metadata name it by a member of gymnasium's AutoresetMode, or by its value
    autoreset = envs.metadata.get("autoreset_mode")
    if getattr(autoreset, "value", autoreset) != "NextStep":
        fail(f"--env-id {args.env_id}: metadata['autoreset_mode'] must be NEXT_STEP, not {autoreset}")
    if not isinstance(obs_space, Box) or not obs_space.shape:
        envs.metadata["autoreset_mode"] = gym.vector.AutoresetMode.NEXT_STEP  # the wrapper takes no text
        envs = FlattenObservation(envs)  # discrete observations become one-hot
    return envs


def check_evaluation(args, training_envs):
    """Exit now if the environments of an evaluation cannot be made or, with --capture-video, be recorded."""
    if args.capture_video and "rgb_array" not in training_envs.metadata.get("render_modes", []):
        fail(f"--capture-video: {args.env_id} has no render mode rgb_array")
    with tempfile.TemporaryDirectory() as folder:
        envs = make_envs(args, args.eval_episodes or 10, f"{folder}/videos")
        envs.reset()  # records the first picture
        envs.close()


# ---- Storage -----------------------------------------------------------------------------------------------
# Training data of a rollout or minibatch, one row for each of N steps: normalized obs [N, *D], actions
# [N, A], and log_probs, values, advantages and returns [N] from before the update. The weight [N] of a row is
# 1, or 0 if the step only reset its environment. Rows of weight 0 are computed like the others and count for
# nothing. They stay because CUDA graphs need fixed shapes.
Batch = namedtuple("Batch", "obs actions log_probs values advantages returns weights")


class RolloutStorage:
    """T steps of B environments, in arrays of T + 1 rows.

    Row t holds the observation and action of step t. The outcome of step t is in row t + 1: its reward,
    whether it ended the episode, the next observation, and the sums over the episode so far. An example, in
    which step 8 ends an episode, and step 9 only resets the environment and ignores its action:

        row                      7     8     9                10       11
        obs                      s_7   s_8   the last one     s_0      s_1      of the next episode
        actions                  a_7   a_8   ignored          a_0      a_1
        rewards                  r_6   r_7   r_8              0        r_0
        terminated or truncated  no    no    yes              no       no
        lengths                  7     8     9                0        1
        weight of the step       1     1     0                1        1

    So a step has weight 0 if lengths is 0 in the next row. Row T begins the next rollout. All attributes must
    be such arrays, because collect_rollout and compute_batch loop over them.
    """

    def __init__(self, envs, num_steps):
        shape = (num_steps + 1, envs.num_envs)
        self.obs = np.zeros((*shape, *envs.single_observation_space.shape), np.float32)  # [T + 1, B, *D]
        self.actions = np.zeros(
            (*shape, math.prod(envs.single_action_space.shape)), np.float32
        )  # [T + 1, B, A]
        self.rewards = np.zeros(shape, np.float32)  # [T + 1, B], as all below
        self.terminated, self.truncated = np.zeros((2, *shape), bool)
        # Of the episode so far: its length, its return, and r_t + gamma r_{t-1} + gamma^2 r_{t-2} + ..., by
        # whose running standard deviation --norm-reward divides rewards
        self.lengths, self.episode_returns, self.discounted = np.zeros((3, *shape), np.float32)


# ---- PPO ---------------------------------------------------------------------------------------------------
@torch.inference_mode()
def sample_actions(agent, obs):
    """Draw actions [B, A] for observations [B, *D] as they come from the environments."""
    return agent.sample(agent.get_policy_params(agent.normalize(obs)))


def collect_rollout(agent, act, envs, storage, gamma, device):
    """Fill the storage with T steps; `act` is `sample_actions` of the agent, or its CUDA graph."""
    # The last row of the previous rollout is the first one of this rollout
    for array in vars(storage).values():
        array[0] = array[-1]
    for t in range(len(storage.obs) - 1):
        actions = act(torch.as_tensor(storage.obs[t], device=device)).cpu()
        obs, rewards, terminated, truncated, infos = envs.step(agent.to_env(actions))
        storage.actions[t] = actions
        storage.terminated[t + 1] = terminated
        storage.truncated[t + 1] = truncated
        # If step t - 1 ended an episode, step t only reset the environment: its length and sums are 0
        continues = ~(storage.terminated[t] | storage.truncated[t])
        storage.lengths[t + 1] = continues * (storage.lengths[t] + 1)
        with np.errstate(all="ignore"):  # what does not fit into float32 is found by check_rollout
            storage.obs[t + 1] = obs
            storage.rewards[t + 1] = rewards
            storage.episode_returns[t + 1] = continues * (storage.episode_returns[t] + storage.rewards[t + 1])
            storage.discounted[t + 1] = continues * (gamma * storage.discounted[t] + storage.rewards[t + 1])


def check_rollout(storage, env_id):
    """Exit with one line that names the first observation or reward that cannot be trained on."""
    for name in ("obs", "rewards"):
        is_good = np.abs(getattr(storage, name)) < 1e18  # not NaN, and its square is a float32
        if not is_good.all():
            t, b = np.argwhere(~is_good)[0, :2]
            when = f"after {storage.lengths[t, b]:.0f} steps of an episode"
            fail(f"{env_id}: {name} of environment {b} {when}: not a number below 1e18 in size")


def compute_gae(rewards, values, terminated, truncated, gamma, gae_lambda):
    """Compute advantages and returns [T, B] from rewards and episode ends [T, B] and values [T + 1, B].

    What a step that only resets gets here means nothing. It reaches no other step, as decay is 0 in the step
    before.
    """
    delta = rewards + gamma * values[1:] * ~terminated - values[:-1]  # eq. 12; truncation bootstraps
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.zeros_like(values)  # [T + 1, B]
    for t in reversed(range(len(rewards))):
        advantages[t] = delta[t] + decay[t] * advantages[t + 1]  # eq. 11
    return advantages[:-1], advantages[:-1] + values[:-1]


@torch.no_grad()
def compute_batch(agent, storage, args, device):
    """Compute the training data of a rollout, and update the running statistics.

    The network and the observation statistics have not changed since the rollout, so one large pass gives the
    rollout's values and log-probabilities (up to rounding), and is cheaper than storing them in each step.
    """
    data = {name: torch.as_tensor(array, device=device) for name, array in vars(storage).items()}
    weights = (data["lengths"][1:] > 0).float().flatten()  # [N], N = T B
    # Rewards, scaled by statistics that include this rollout
    rewards = data["rewards"][1:]  # [T, B]
    if args.norm_reward:
        agent.return_stats.update(data["discounted"][1:].flatten(), weights)
        rewards = agent.return_stats.scale(rewards)
    # Values of all T + 1 observations, and advantages of T steps
    raw_obs = data["obs"].flatten(0, 1)  # [(T + 1) B, *D]
    obs = agent.normalize(raw_obs)
    values = agent.get_values(obs).unflatten(0, storage.rewards.shape)  # [T + 1, B]
    advantages, returns = compute_gae(
        rewards, values, data["terminated"][1:], data["truncated"][1:], args.gamma, args.gae_lambda
    )
    # Log-probabilities of the actions. The last B observations, of row T, have no action yet
    obs = obs[: len(weights)]
    actions = data["actions"][:-1].flatten(0, 1)
    pi = agent.get_distribution(agent.get_policy_params(obs))
    log_probs = pi.log_prob(actions).sum(-1)
    # The statistics of observations change last: everything above used those of the rollout
    if args.norm_obs:
        agent.normalize.update(raw_obs[: len(weights)], weights)
    return Batch(
        obs=obs,
        actions=actions,
        log_probs=log_probs,
        values=values[:-1].flatten(),
        advantages=advantages.flatten(),
        returns=returns.flatten(),
        weights=weights,
    )


def ppo_loss(agent, batch, args):
    """Compute the loss [N] of each row, and what is logged about it: a dictionary of names and tensors [N].

    Keep terms that you add in the shape [N], without means: rows of weight 0 must not count.
    """
    pi = agent.get_distribution(agent.get_policy_params(batch.obs))
    log_ratio = pi.log_prob(batch.actions).sum(-1) - batch.log_probs
    ratio = log_ratio.exp()  # eq. 6
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * batch.advantages, clipped_ratio * batch.advantages)  # eq. 7
    values = agent.get_values(batch.obs)
    value_loss = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:
        # The larger of this loss and the loss of a value that stays within clip_coef of the old one
        near_values = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, 0.5 * (near_values - batch.returns).square())
    entropy = pi.entropy().sum(-1)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # the negative of eq. 9
    return loss, {
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        # The plain estimate of the KL divergence below, by CleanRL's name
        "old_approx_kl": -log_ratio,
        # The low-variance estimate of KL(pi_old, pi) (Schulman 2020, joschu.net/blog/kl-approx.html)
        "approx_kl": ratio - 1 - log_ratio,
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float(),
    }


def update_minibatch(agent, optimizer, args, *fields):
    """Take one gradient step on a minibatch, the fields of a Batch; returns the mean of each metric.

    Means are over the rows of weight 1 of all processes. Shapes are fixed and the host never waits, so that
    a CUDA graph can record it; `capture` needs tensors as inputs, and so the fields come one by one.
    """
    batch = Batch(*fields)
    count = total(batch.weights.sum()).clamp(min=1)
    if args.norm_adv:  # to mean 0 and standard deviation 1
        mean = total((batch.weights * batch.advantages).sum()) / count
        deviation = batch.advantages - mean
        variance = total((batch.weights * deviation.square()).sum()) / count
        batch = batch._replace(advantages=deviation / (variance.sqrt() + 1e-8))
    loss, metrics = ppo_loss(agent, batch, args)
    optimizer.zero_grad()
    # As `count` is that of all processes, the sum of their gradients is the gradient of the mean loss
    ((batch.weights * loss).sum() / count).backward()
    sum_gradients(agent)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    stacked = torch.stack(list(metrics.values())).detach()  # [metrics, N]
    means = total((batch.weights * stacked).sum(1)) / count
    return dict(zip(metrics, means))


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(agent, args, device, seed_stream, video_folder):
    """Score one episode with the most likely actions in each of `eval_episodes` environments (0: ten)."""
    seed = seed_everything(args.seed, seed_stream)
    envs = make_envs(args, args.eval_episodes or 10, video_folder)
    obs, infos = envs.reset(seed=seed)
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros(envs.num_envs)
    is_running = np.ones(envs.num_envs, bool)
    while is_running.any() and lengths.max() < 10_000:
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
        if not (obs.abs() < 1e18).all():
            fail(f"{args.env_id}: an evaluation has an observation that is not a number below 1e18 in size")
        actions = agent.get_distribution(agent.get_policy_params(agent.normalize(obs))).mode
        obs, rewards, terminated, truncated, infos = envs.step(agent.to_env(actions))
        returns += np.where(is_running, rewards, 0)
        lengths += is_running
        is_running &= ~(np.asarray(terminated, bool) | np.asarray(truncated, bool))
    envs.close()
    if is_running.any():
        tqdm.write(f"{is_running.sum()} evaluated episodes were cut at 10,000 steps", file=sys.stderr)
    return {
        "eval/episodic_return": returns.mean(),
        "eval/episodic_return_std": returns.std(),
        "eval/episodic_length": lengths.mean(),
    }


def score_policy(agent, args, device, run):
    """Evaluate during training (see `train` for seeds), and keep the policy if it is the best so far."""
    scores = evaluate(agent, args, device, 2, run.path / f"videos_{run.step}")
    run.keep(scores, scores["eval/episodic_return"], args.eval_episodes * scores["eval/episodic_length"])


# ---- Training ----------------------------------------------------------------------------------------------
def summarize(storage, batch):
    """Return what is logged about this process's rollout: ended episodes, and how the critic predicted."""
    scalars = {}
    is_done = (storage.terminated | storage.truncated)[1:]
    if is_done.any():
        scalars["charts/episodic_return"] = storage.episode_returns[1:][is_done].mean()
        scalars["charts/episodic_length"] = storage.lengths[1:][is_done].mean()
    is_valid = batch.weights > 0
    returns = batch.returns[is_valid]
    variance = returns.var()
    if variance > 0:
        unexplained = (returns - batch.values[is_valid]).var() / variance
        scalars["losses/explained_variance"] = 1 - unexplained.item()
    return scalars


def train(args, run):
    """Train the agent of a run; with --evaluate, only score it.

    Numbers that seed_everything gets:
        (seed, 0)                      for the weights, which are the same in every process
        (seed, 1, iteration, process)  for a rollout and its update, from iteration 1 on. The first
                                       observations get the last iteration done: 0 in a new run
        (seed, 2)                      for evaluations during training: always the same episodes
        (seed, 3)                      for --evaluate: other episodes than those that selected best.pt
    """
    # Set up
    device = set_up_device(args)
    is_cuda = device.type == "cuda"
    if is_cuda:
        # The first steps, recordings and replays use one stream; the default one cannot be recorded in a
        # graph
        torch.cuda.set_stream(torch.cuda.Stream(device))
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    if args.eval_episodes or args.evaluate:
        check_evaluation(args, envs)
    seed_everything(args.seed, 0)
    agent = Agent(envs, args.norm_obs).to(device)
    agent.eval()
    run.load(agent=agent)
    if args.evaluate:
        print_scores(evaluate(agent, args, device, 3, run.path / f"videos_{Path(args.evaluate).stem}"))
        return
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, so that graphs see it change
    options = {"lr": learning_rate, "capturable": is_cuda}
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True, **options)
    run.load(optimizer=optimizer)
    # In a resumed run, run.load put saved options in place of these: put them back. If you add a group of
    # parameters, do so for it too. A group with another learning rate needs a tensor of its own, to be
    # annealed below
    optimizer.param_groups[0] |= options
    storage = RolloutStorage(envs, args.num_steps)
    # The first observations go into the last row, which collect_rollout copies to the first one
    storage.obs[-1], infos = envs.reset(seed=seed_everything(args.seed, 1, run.iteration, RANK))
    act = partial(sample_actions, agent)
    update = partial(update_minibatch, agent, optimizer, args)
    must_record = CUDA_GRAPHS and is_cuda and WORLD_SIZE == 1
    run.open(f"{type(envs.unwrapped).__name__}, {args.num_envs} environments, {device}", args.total_timesteps)

    while run.step < args.total_timesteps:
        # Evaluate, if it is time. Without --eval-interval, all evaluations together, this one included, may
        # take at most a fifth as many steps as training so far. Its episodes are predicted to be as long as
        # the longest one so far or, if none has ended, as 10,000 steps, where `evaluate` cuts them. It is
        # done at the top, so that --resume repeats an evaluation that was cut off
        if run.should_evaluate(args.eval_episodes * (run.longest or 10_000)):
            score_policy(agent, args, device, run)

        seed_everything(args.seed, 1, run.iteration + 1, RANK)

        # Learning rate: it falls linearly to zero. The recorded update of a GPU sees new values of tensors,
        # not of numbers such as those in `args`
        if args.anneal_lr:
            learning_rate.fill_(args.learning_rate * (1 - run.step / args.total_timesteps))

        # Collect T steps in each environment
        collect_rollout(agent, act, envs, storage, args.gamma, device)
        check_rollout(storage, args.env_id)
        batch = compute_batch(agent, storage, args, device)

        # Update: K epochs over the rollout, in minibatches of equal size. Training mode matters only to
        # layers such as dropout and batch norm
        agent.train()
        for _ in range(args.update_epochs):
            sums = {}
            for index in torch.randperm(len(batch.weights), device=device).chunk(args.num_minibatches):
                minibatch = Batch(*(x[index] for x in batch))
                for name, value in update(*minibatch).items():
                    sums[name] = sums.get(name, 0) + value
            metrics = {name: x / args.num_minibatches for name, x in sums.items()}  # means over the epoch
            if args.target_kl and metrics["approx_kl"] > args.target_kl:
                break

        # Record acting and the update, which runs neither, after the first iteration, as Adam creates its
        # state in the first step. The update is recorded in training mode, acting in evaluation mode
        if must_record:
            update = capture(update, *minibatch)
            agent.eval()
            act = capture(act, torch.as_tensor(storage.obs[0], device=device))
            must_record = False
        agent.eval()

        # Log. Steps that only reset an environment do not count. run.log also adds to run.step and
        # run.iteration, and saves checkpoint.pt if it is time
        scalars = {f"losses/{name}": x.item() for name, x in metrics.items()}
        scalars |= summarize(storage, batch)
        scalars["charts/learning_rate"] = learning_rate.item()
        num_steps = round(total(batch.weights.sum()).item())
        lengths = storage.lengths * (storage.terminated | storage.truncated)  # of episodes that ended
        run.longest = max(run.longest, int(lengths.max()))
        run.log(num_steps, scalars)

    # Evaluate the last policy, however many steps that takes
    if run.should_evaluate():
        score_policy(agent, args, device, run)
    envs.close()
    run.close()


# ---- Run ---------------------------------------------------------------------------------------------------
# What follows is the same in all scripts of this family, but for `Progress` and `main`
if sys.stderr is None:  # as after 2>&-, but the bar needs a stream
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0
    step: int = 0  # environment steps trained on, in total across environments
    eval_steps: int = 0  # environment steps of evaluations
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # mean return of best.pt, None if there is none of this task
    last_score: float | None = None  # mean return of the newest policy, None if it was not evaluated
    is_due: bool = False  # is it time to evaluate the newest policy
    longest: int = 0  # length of the longest episode that has ended


class Run(Progress):
    """A run: its progress, folder, log, progress bar and checkpoints. Only process 0 writes and evaluates."""

    def __init__(self, args, task, checkpoint=None):
        """Begin a run of `task`, or continue that of a checkpoint from load_checkpoint."""
        self.args = args
        self.checkpoint = checkpoint
        self.parts = {}  # what checkpoints hold, by name
        self.resume_parts = {}  # what checkpoint.pt alone holds: a large replay, in scripts that have one
        self.bar = None
        if checkpoint:
            super().__init__(**checkpoint["progress"])
            self.path = checkpoint["path"].parent
        else:
            super().__init__()
            name = f"{task}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
            self.path = Path(args.run_dir, re.sub(r"[:/\\]", "-", name))

    def load(self, **parts):
        """Add parts to the checkpoints, and restore them if the run began with a checkpoint."""
        self.parts |= parts
        try:
            for name, part in parts.items():
                if self.checkpoint:
                    part.load_state_dict(self.checkpoint[name])
        except (KeyError, RuntimeError, TypeError, ValueError):
            fail(f"{self.checkpoint['path']}: not the network of {NETWORK_FLAGS} and this file")

    def open(self, description, length, position=None):
        """Open folder and log, and show a bar of `length` units; exits if the folder cannot be written to.

        The bar counts steps. In scripts with another unit, `position` says where the bar is.
        """
        if position is None:
            position = self.step
        position = min(position, length)
        self.tenths = 10 * position // length  # how many tenths of the run are done
        if RANK == 0:
            self.open_log()
            self.find_best()
            print_line(f"{self.path}: {description}, {position} of {length} done")
            if self.checkpoint:
                print_line(f"Continues from {self.checkpoint['path'].name}; next states go to checkpoint.pt")
            else:
                self.save()  # so that there is something to resume from now on
        # Where the bar is written to a file, every 30 seconds are enough
        seconds = 0.1 if os.isatty(2) else 30
        self.bar = tqdm(total=length, initial=position, mininterval=seconds, disable=RANK > 0)
        self.saved_at = time.time()
        self.start_clocks()

    def find_best(self):
        """Take the score to beat from best.pt; if it is missing or of another task, forget all scores."""
        path = self.path / "best.pt"
        best = load_checkpoint(path) if path.exists() else None
        if best and all(getattr(best["args"], x) == getattr(self.args, x) for x in TASK_SETTINGS):
            self.best_score = best["progress"]["best_score"]
        else:
            self.best_score = self.last_score = None

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
                    config=asdict(args),
                    sync_tensorboard=True,
                    resume="allow",
                    reinit="finish_previous",
                )
            except wandb.Error:
                fail("--track: Weights & Biases did not start; try `wandb login`, or WANDB_MODE=offline")
        try:
            # Hide what was logged after the checkpoint of a resumed run
            self.writer = SummaryWriter(str(self.path), purge_step=self.step + 1)
        except OSError as error:
            fail(f"{self.path}: cannot be written to ({error.strerror})")
        rows = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", self.step)

    def start_clocks(self):
        """Begin to measure the time of an iteration, without the evaluation before it."""
        self.start = time.time()
        self.cpu_start = time.process_time()

    def save(self, name="checkpoint.pt"):
        """Write all states to a side file and rename it: a kill leaves either the old or the new file."""
        checkpoint = {"args": asdict(self.args), "progress": asdict(self)}  # of self, the fields of Progress
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
                fail(f"{name} is {value} at step {self.step}")

    def log(self, num_steps, scalars, position=None):
        """Count an iteration of `num_steps` steps, log its scalars, move the bar (`position`: see `open`).

        Saves at each evaluation point, before an evaluation that might fail, and at least every ten minutes.
        """
        self.iteration += 1
        self.step += round(num_steps)  # round makes a number of Python; load_checkpoint takes none of NumPy
        self.cpu_seconds += time.process_time() - self.cpu_start
        self.last_score = None  # the policy that this iteration made has no score yet
        if RANK > 0:
            return
        speed = num_steps / (time.time() - self.start)
        self.write(scalars | {"charts/cpu_seconds": self.cpu_seconds, "charts/SPS": speed})
        if position is None:
            position = self.step
        self.bar.update(min(position, self.bar.total) - self.bar.n)
        # Evaluation points: each tenth of the run, or as --eval-interval says
        tenths = 10 * self.bar.n // self.bar.total
        if self.args.eval_interval:
            self.is_due = self.iteration % self.args.eval_interval == 0
        else:
            self.is_due = tenths > self.tenths
        self.tenths = tenths
        if self.is_due or tenths == 10 or time.time() - self.saved_at > 600:
            self.writer.flush()
            self.save()
            self.saved_at = time.time()
        self.start_clocks()

    def should_evaluate(self, num_steps=0):
        """Whether an evaluation is due, which takes `num_steps` steps by an estimate.

        The last policy is always evaluated. Without --eval-interval, the evaluations before it take at most a
        fifth as many steps as training, if the estimates are right.
        """
        if RANK > 0 or self.args.eval_episodes == 0 or self.last_score is not None:
            return False
        if self.tenths == 10:
            return True
        if self.args.eval_interval:
            return self.is_due
        return self.is_due and self.eval_steps + num_steps <= self.step / 5

    def keep(self, scores, score, num_steps):
        """Log the scores of an evaluation of `num_steps` steps; write best.pt unless an older one is better.

        `score` is the one that decides: the higher, the better.
        """
        self.write(scores)
        self.bar.set_postfix_str(f"{SCORE} {score:.4g}")
        self.eval_steps += round(num_steps)
        self.last_score = float(score)
        if self.best_score is None or score >= self.best_score:
            self.best_score = self.last_score
            self.save("best.pt")
        # Save the scores too; in a script that saves a large replay with them, only at the end
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
            best = f"{SCORE} of best.pt {self.best_score:.5g}"
            scores = f"{best}, of the last policy {self.last_score:.5g}"
        print_line(f"{self.path}: {scores}{text}")

    def say_how_to_resume(self):
        """After Ctrl-C, print the command that resumes the run, if it has begun."""
        if RANK == 0 and self.bar is not None:
            self.bar.close()
            command = f"python {__file__!r} --resume {f'{self.path}/checkpoint.pt'!r}"
            print(f"{self.path}: interrupted; to resume: {command}", file=sys.stderr)


def print_line(line):
    """Print a line. If its reader is gone, as after `| head -n 1`, the run goes on."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def print_scores(scores):
    """Print the scores of --evaluate, a line each."""
    for name, value in scores.items():
        print_line(f"{name}: {value:.5g}")


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
        vector = total(nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(vector, gradients)  # back into each gradient


def seed_everything(*stream):
    """Seed all random generators from the integers `stream`; other integers give independent numbers.

    Zeros at its end do not count: (7, 1) and (7, 1, 0) give the same numbers. Returns the seed; it is below
    2^30, so that the number of an environment can be added where a C library takes less than 2^31.
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
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if use_cuda else "cpu")


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
        for old, new in zip(memory, new_inputs, strict=True):
            old.copy_(new)
        graph.replay()
        return output

    return replay


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
    """Read the command line and train; flags override the settings of a checkpoint."""
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    if args.resume and args.evaluate:
        fail("--resume and --evaluate exclude each other")
    if args.resume or args.evaluate:
        checkpoint = load_checkpoint(args.evaluate or args.resume)
        saved = checkpoint["args"]
        if args.resume and not saved.anneal_lr and "optimizer" in checkpoint:
            # If you add a rule that adapts the learning rate, go on with its last rate
            saved.learning_rate = float(checkpoint["optimizer"]["param_groups"][0]["lr"])
        args = tyro.cli(Args, args=argv, default=saved)
    counts = "num_envs num_steps total_timesteps num_minibatches update_epochs".split()
    shares = "gamma gae_lambda".split()
    for name, value in vars(args).items():
        if value == "":
            fail(f"--{name.replace('_', '-')} is empty, perhaps because a variable of the shell is not set")
        if type(value) not in (int, float):  # a bool is neither
            continue
        least = 1 if name in counts else 0
        most = 1 if name in shares else 1e30
        if not least <= value <= most:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be from {least} to {most}")
    if args.num_envs % WORLD_SIZE:
        fail(f"--num-envs ({args.num_envs}) must be divisible by the number of processes ({WORLD_SIZE})")
    num_rows = args.num_steps * args.num_envs // WORLD_SIZE
    if num_rows % args.num_minibatches:
        fail(f"--num-minibatches ({args.num_minibatches}) must divide the {num_rows} steps of a rollout")
    if args.norm_adv and num_rows == args.num_minibatches:
        fail(f"--norm-adv needs minibatches of at least 2 steps, not {num_rows} minibatches of 1")
    if args.evaluate and RANK > 0:
        return  # process 0 does it
    run = Run(args, args.env_id, checkpoint)
    try:
        train(args, run)
    except KeyboardInterrupt:
        run.say_how_to_resume()
        sys.exit(130)


if __name__ == "__main__":
    main()
    if RANK > 0:
        sys.stdout.flush()
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
