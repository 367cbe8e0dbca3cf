"""Proximal Policy Optimization (PPO) for discrete and continuous actions, in one file.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO), and 2016, arXiv:1506.02438 (advantage estimation).

    python ppo.py                                    # learns CartPole-v1 in seconds on one CPU core
    python ppo.py --env-id Pendulum-v1 --norm-obs --total-timesteps 200000   # continuous actions
    torchrun --nproc-per-node 2 ppo.py               # two GPUs, or with --no-cuda two CPU processes

Equations, numbered after the first paper:
    (6)   ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t), where pi_old is the policy that acted
    (7)   L^CLIP  = min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t)
    (9)   L       = E[ L^CLIP - c1 (V(s_t) - R_t)^2 / 2 + c2 entropy(pi(. | s_t)) ], R_t = A_t + V_old(s_t)
          (the paper does not halve the squared error)
    (11)  A_t     = delta_t + gamma lambda A_{t+1}, without A_{t+1} at the end of an episode or of the rollout
    (12)  delta_t = r_t + gamma V(s_{t+1}) - V(s_t), where V(s_{t+1}) = 0 if s_{t+1} is terminal

Shapes: T steps, B environments of one process, N rows of a rollout or minibatch, observations of shape D,
A components of an action.

The file has two parts. The algorithm comes first, with its loop in `train`. The part `Run` at the end is
about the run folder, the log, checkpoints, processes and the command line.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.4", "numpy", "gymnasium[classic-control]>=1.1", "tyro", "tensorboard", "wandb", "tqdm"
# ]
# ///
import math
import operator
import os
import random
import re
import shlex
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
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import FlattenObservation
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# --env-id my_module:MyTask-v0 finds my_module.py in the current folder, in the folder of this file, or in the
# folder above it
sys.path += [os.getcwd(), *map(str, Path(__file__).resolve().parents[:2])]
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# On one GPU, acting and the update are recorded as CUDA graphs, which saves CPU overhead. Set this to False
# for edits that a graph cannot record, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
# Independent streams of random numbers, as in seed_everything(args.seed, WEIGHTS)
WEIGHTS, TRAINING, EVALUATION, FINAL_EVALUATION = range(4)
MAX_EPISODE_STEPS = 10_000  # evaluations cut longer episodes
# For the part `Run`: if one of these settings changes with --resume, the score of best.pt no longer counts.
# The seed is one of them, as it chooses the episodes of evaluations
TASK_SETTINGS = ("env_id", "seed", "eval_episodes")
NETWORK_FLAGS = "--env-id, --norm-obs"  # named in the message about a checkpoint that does not fit

# Used below, and defined in the part `Run` at the end:
#   fail(message)          prints one line and exits with code 2
#   total(x)               sums a tensor over all processes; with one process it changes nothing
#   sum_gradients(agent)   does the same with all gradients
#   seed_everything(...)   seeds all random generators, and returns a seed for environments
#   Recorded(function)     calls the function; on one GPU, it records and replays it as a CUDA graph
#   run.load(name=part)    saves a part in checkpoints, and restores it in a resumed run
#   run.should_evaluate()  tells whether it is time to evaluate
#   run.keep(scores, ...)  logs the scores of an evaluation, and writes best.pt if they are the best so far
#   run.log(scalars)       logs numbers by name, and writes checkpoint.pt if it is time


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
    eval_interval: int = 0  # iterations between evaluations (0: at tenths of the run, see should_evaluate)
    eval_episodes: int = 10  # episodes per evaluation (0: never during training, 10 with --evaluate)
    # The task
    env_id: str = "CartPole-v1"  # gymnasium id; `module:Name-v0` imports the module first
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the task's own vector env, else sync
    num_envs: int = 32  # parallel environments in total; each process has its share B
    total_timesteps: int = 100_000  # environment steps, in total across environments
    # The rollout and its advantages. Gamma and the learning rate are tuned on CartPole-v1; elsewhere, begin
    # with 0.99 and 3e-4
    num_steps: int = 64  # rollout length T: steps in each environment
    gamma: float = 0.98  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 11
    norm_obs: bool = False  # normalize observations by their running mean and standard deviation
    norm_reward: bool = True  # divide rewards by the std of discounted returns so far, clip to [-10, 10]
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

    def update(self, x):
        """Add the rows x [N, *shape]. No rows change nothing."""
        x = x.double()
        # Mean and variance of the new rows of all processes
        num_rows = total(self.count.new_tensor(len(x)))
        divisor = num_rows.clamp(min=1)  # 0 / 0 would be NaN
        new_mean = total(x.sum(0)) / divisor
        new_var = total((x - new_mean).square().sum(0)) / divisor
        # Join them with those of all rows before (Chan et al. 1979). If s is the share of the new rows,
        #   mean = (1 - s) old mean + s new mean
        #   var  = (1 - s) old var  + s new var  + s (1 - s) (new mean - old mean)^2
        # The tensors change in place, because CUDA graphs read them where they are
        self.count += num_rows
        share = num_rows / self.count.clamp(min=1)
        shift = new_mean - self.mean
        self.mean += share * shift
        self.var += share * (new_var - self.var + (1 - share) * shift.square())

    def scale(self, x):
        """Divide x by the standard deviation, and clip it to [-10, 10]."""
        return (x / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def forward(self, x):
        """Normalize x [..., *shape] to mean 0 and standard deviation 1, clipped to [-10, 10]."""
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
        self.return_stats = RunningMeanStd(())  # of discounted sums of rewards; scales rewards

    def get_values(self, obs):
        """Return V(s) [N] for normalized observations [N, *D]."""
        return self.critic(obs).squeeze(-1)

    def get_distribution(self, obs):
        """Return pi(. | s), N x A independent distributions, for normalized observations [N, *D].

        The log-probability of an action is the sum over its A components.
        """
        out = self.actor(obs)
        # Without validate_args=False, the distributions would wait for the GPU to check their numbers
        if self.is_continuous:
            return Normal(out, self.actor_logstd.exp().expand_as(out), validate_args=False)
        # One component: logits [N, 1, choices], so that log_prob takes actions [N, 1], as for a Box
        return Categorical(logits=out.unsqueeze(-2), validate_args=False)

    def sample(self, pi):
        """Draw actions [N, A] from a distribution of get_distribution.

        As pi.sample(), which waits for the GPU and so cannot be recorded as a CUDA graph.
        """
        if self.is_continuous:
            return pi.mean + pi.stddev * torch.randn_like(pi.mean)
        # With exponential noise E, argmax(logits - log(E)) is distributed as softmax(logits) (Gumbel-max)
        noise = torch.empty_like(pi.logits).exponential_()
        return (pi.logits - noise.log()).argmax(-1)

    def to_env(self, actions):
        """Convert actions [B, A] to an array of what the environments take.

        Log-probabilities are always those of the action that was drawn: only the environment sees the scaled
        and clipped one.
        """
        actions = actions.numpy(force=True).reshape(-1, *self.space.shape)  # [B, *shape of the space]
        if not self.is_continuous:
            return actions + self.space.start  # [B], as the shape of Discrete is ()
        # In a component with two finite bounds, -1 and 1 become the bounds; other components are not scaled
        low, high = self.space.low, self.space.high
        with np.errstate(all="ignore"):  # an infinite bound gives NaN, which np.where leaves out
            scaled = low + (high - low) * (actions + 1) / 2
            actions = np.where(np.isfinite(high - low), scaled, actions)
        return actions.clip(low, high)


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs, video_folder=None):
    """Make environments; exits if they are not supported.

    With a folder and --capture-video, the first one is recorded. Each evaluation makes its own environments,
    so do not add a wrapper that learns statistics, such as NormalizeObservation: it would start again there,
    and the policy would see differently scaled observations. Use --norm-obs.
    """
    wrappers = []  # add your own, such as [gym.wrappers.TimeAwareObservation]
    mode = args.vectorization
    if mode == "auto":
        # None: gymnasium takes the task's own vector environment if it has one. That is fast, but it cannot
        # have wrappers of single environments
        mode = "sync" if wrappers else None
    is_filmed = video_folder and args.capture_video
    render = {"render_mode": "rgb_array"} if is_filmed else {}
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers, **render)
        if is_filmed:
            envs = gym.wrappers.vector.RecordVideo(envs, video_folder, record_first_only=True)
    except (gym.error.Error, ModuleNotFoundError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if envs.num_envs != num_envs:
        fail(
            f"--env-id {args.env_id}: always has {envs.num_envs} environments; use --num-envs "
            f"{envs.num_envs * WORLD_SIZE} and --eval-episodes {envs.num_envs}"
        )
    obs_space = envs.single_observation_space
    action_space = envs.single_action_space
    if not obs_space.is_np_flattenable or flatdim(obs_space) > 10_000:
        fail(f"--env-id {args.env_id}: observations must flatten to at most 10,000 numbers, not {obs_space}")
    # A Box of floats that is not empty
    is_box = isinstance(action_space, Box) and action_space.dtype.kind == "f" and flatdim(action_space) > 0
    if not is_box and not isinstance(action_space, Discrete):
        fail(f"--env-id {args.env_id}: actions must be Discrete or a Box of floats, not {action_space}")
    # RolloutStorage is made for one autoreset mode: the step after an episode's end only resets the
    # environment. Some environments declare their mode as a string
    autoreset = envs.metadata.get("autoreset_mode")
    if autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value):
        fail(f"--env-id {args.env_id}: metadata['autoreset_mode'] must be NEXT_STEP, not {autoreset}")
    if not isinstance(obs_space, Box) or not obs_space.shape:
        envs.metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP  # FlattenObservation refuses strings
        envs = FlattenObservation(envs)  # discrete observations become one-hot
    return envs


def check_evaluation(args, training_envs):
    """Make and film the environments of an evaluation once, so that an error ends the run now, not later."""
    if args.capture_video and "rgb_array" not in training_envs.metadata.get("render_modes", []):
        fail(f"--capture-video: {args.env_id} has no render mode rgb_array")
    if args.capture_video and not hasattr(gym.wrappers.vector, "RecordVideo"):
        fail(f"--capture-video needs gymnasium 1.2, not {gym.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        envs = make_envs(args, args.eval_episodes or 10, f"{folder}/videos")
        envs.reset()  # records the first picture
        envs.close()


# ---- Storage -----------------------------------------------------------------------------------------------
# Training data of a rollout or minibatch, one row for each of N steps: normalized obs [N, *D], actions
# [N, A], and log_probs, values, advantages and returns [N] from before the update
Batch = namedtuple("Batch", "obs actions log_probs values advantages returns")


class RolloutStorage:
    """T steps of B environments, in arrays of T + 1 rows.

    Row t holds the observation and action of step t. The outcome of step t is in row t + 1: its reward,
    whether it ended the episode, the next observation, and the sums over the episode so far. An example, in
    which step 8 ends an episode, and step 9 only resets the environment and ignores its action:

        row                          7     8     9                10       11
        of the step with this number:
          obs                        s_7   s_8   the last one     s_0      s_1      of the next episode
          actions                    a_7   a_8   ignored          a_0      a_1
          is it trained on           yes   yes   no               yes      yes
        outcome of the step before:
          rewards                    r_6   r_7   r_8              0        r_0
          terminated or truncated    no    no    yes              no       no
          lengths                    7     8     9                0        1

    So lengths[t + 1] is 0 if step t only reset its environment. Row T begins the next rollout. All attributes
    are such arrays, as start_rollout and to_tensors go through all of them.
    """

    def __init__(self, envs, num_steps):
        shape = (num_steps + 1, envs.num_envs)
        num_components = math.prod(envs.single_action_space.shape)
        self.obs = np.zeros((*shape, *envs.single_observation_space.shape), np.float32)  # [T + 1, B, *D]
        self.actions = np.zeros((*shape, num_components), np.float32)  # [T + 1, B, A], floats if discrete too
        self.rewards = np.zeros(shape, np.float32)  # [T + 1, B], as all below
        self.terminated = np.zeros(shape, bool)
        self.truncated = np.zeros(shape, bool)
        # Of the episode so far: its length, its return, and r_t + gamma r_{t-1} + gamma^2 r_{t-2} + ..., by
        # whose running standard deviation --norm-reward divides rewards
        self.lengths = np.zeros(shape, np.float32)
        self.episode_returns = np.zeros(shape, np.float32)
        self.discounted = np.zeros(shape, np.float32)

    def start_rollout(self):
        """Copy the last row of each array, the end of the previous rollout, to the first row."""
        for array in vars(self).values():
            array[0] = array[-1]

    def to_tensors(self, device):
        """Return each array as a tensor, by its name."""
        return {name: torch.as_tensor(array, device=device) for name, array in vars(self).items()}


# ---- PPO ---------------------------------------------------------------------------------------------------
@torch.inference_mode()
def sample_actions(agent, obs):
    """Draw actions [B, A] for observations [B, *D] as they come from the environments."""
    return agent.sample(agent.get_distribution(agent.normalize(obs)))


def collect_rollout(agent, act, envs, storage, gamma, device):
    """Fill the storage with T steps; `act` is `sample_actions` of the agent."""
    storage.start_rollout()
    for t in range(len(storage.obs) - 1):
        actions = act(torch.as_tensor(storage.obs[t], device=device)).cpu()
        obs, rewards, terminated, truncated, infos = envs.step(agent.to_env(actions))
        storage.actions[t] = actions
        storage.terminated[t + 1] = terminated
        storage.truncated[t + 1] = truncated
        # If step t - 1 ended an episode, step t only reset the environment: its length and sums are 0
        continues = ~(storage.terminated[t] | storage.truncated[t])
        storage.lengths[t + 1] = continues * (storage.lengths[t] + 1)
        with np.errstate(over="ignore", invalid="ignore"):  # check_finite reports what float32 cannot hold
            storage.obs[t + 1] = obs
            storage.rewards[t + 1] = rewards
            storage.episode_returns[t + 1] = continues * (storage.episode_returns[t] + storage.rewards[t + 1])
            storage.discounted[t + 1] = continues * (gamma * storage.discounted[t] + storage.rewards[t + 1])


def check_finite(env_id, obs, rewards):
    """Exit if an observation [..., B, *D] or a reward [..., B] is not finite in float32."""
    for name, array in (("an observation", obs), ("a reward", rewards)):
        with np.errstate(over="ignore"):
            array = np.asarray(array, np.float32)
        is_finite = np.isfinite(array).reshape(*rewards.shape, -1).all(-1)  # of the shape of rewards
        if not is_finite.all():
            index = np.argwhere(~is_finite)[0, -1]
            fail(f"{env_id}: {name} of environment {index} is not finite, or too large for float32")


def compute_gae(rewards, values, terminated, truncated, gamma, gae_lambda):
    """Compute advantages and returns [T, B] from rewards and episode ends [T, B] and values [T + 1, B].

    Numbers of steps that only reset have no meaning, and the batch leaves them out. They do not leak into
    earlier steps, as decay is 0 where an episode ends.
    """
    values = values.float()  # sums need float32, even if you run the network in bfloat16
    delta = rewards + gamma * values[1:] * ~terminated - values[:-1]  # eq. 12; truncation bootstraps
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.zeros_like(values)  # [T + 1, B]
    for t in reversed(range(len(rewards))):
        advantages[t] = delta[t] + decay[t] * advantages[t + 1]  # eq. 11
    return advantages[:-1], advantages[:-1] + values[:-1]


@torch.no_grad()
def compute_batch(agent, storage, args, device):
    """Return the training data of a rollout as a Batch, and update the running statistics.

    The network and the statistics of observations are still those that acted. So one large pass gives the
    values and log-probabilities of the rollout, up to rounding. It is cheaper than storing them in each step.
    """
    data = storage.to_tensors(device)
    # Steps that only reset an environment are left out of the batch and of all statistics
    is_trained = data["lengths"][1:] > 0  # [T, B]
    # Rewards, scaled by statistics that include this rollout
    rewards = data["rewards"][1:]  # [T, B]
    if args.norm_reward:
        agent.return_stats.update(data["discounted"][1:][is_trained])
        rewards = agent.return_stats.scale(rewards)
    # Values of all T + 1 observations, and advantages of T steps
    raw_obs = data["obs"]  # [T + 1, B, *D]
    obs = agent.normalize(raw_obs)  # [T + 1, B, *D]
    values = agent.get_values(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])  # [T + 1, B]
    advantages, returns = compute_gae(
        rewards, values, data["terminated"][1:], data["truncated"][1:], args.gamma, args.gae_lambda
    )
    # Log-probabilities of the actions. The last B observations, of row T, have no action yet
    obs = obs[:-1][is_trained]  # [N, *D]
    actions = data["actions"][:-1][is_trained]  # [N, A]
    log_probs = agent.get_distribution(obs).log_prob(actions).sum(-1)
    # The statistics of observations change last, as log_probs above need those that acted
    if args.norm_obs:
        agent.normalize.update(raw_obs[:-1][is_trained])
    return Batch(
        obs=obs,
        actions=actions,
        log_probs=log_probs,
        values=values[:-1][is_trained],
        advantages=advantages[is_trained],
        returns=returns[is_trained],
    )


def shuffle_rows(num_rows, length, device):
    """Return `length` row numbers: all rows in random order, then some of them again.

    Without the steps that only reset, a rollout has fewer than T B rows. A few repeated rows fill an epoch up
    to T B, so that minibatches keep their size, as a CUDA graph needs.
    """
    order = torch.randperm(num_rows, device=device)
    return order[torch.arange(length, device=device) % num_rows]


def ppo_loss(agent, batch, args):
    """Compute the loss of a minibatch, and metrics: a dictionary of names and tensors."""
    pi = agent.get_distribution(batch.obs)
    log_ratio = pi.log_prob(batch.actions).sum(-1) - batch.log_probs
    ratio = log_ratio.exp()  # eq. 6
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * batch.advantages, clipped_ratio * batch.advantages).mean()  # eq. 7
    values = agent.get_values(batch.obs)
    value_loss = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:
        # The larger of this loss and the loss of a value that stays within clip_coef of the old one
        near_values = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, 0.5 * (near_values - batch.returns).square())
    value_loss = value_loss.mean()
    entropy = pi.entropy().sum(-1).mean()
    loss = policy_loss + args.vf_coef * value_loss  # the negative of eq. 9
    if args.ent_coef > 0:  # else its backward pass would cost 2 % of a run for nothing
        loss = loss - args.ent_coef * entropy
    return loss, {
        "value_loss": value_loss,
        "policy_loss": policy_loss,
        "entropy": entropy,
        # Two estimates of KL(pi_old, pi), k1 and k3 in Schulman 2020, joschu.net/blog/kl-approx.html. The
        # second one is never negative and varies less. Both names are CleanRL's
        "old_approx_kl": -log_ratio.mean(),
        "approx_kl": (ratio - 1 - log_ratio).mean(),
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }


def update_minibatch(agent, optimizer, args, batch):
    """Take one gradient step on a minibatch, and return its metrics.

    Means are over the minibatches of all processes, which have equally many rows. Shapes are fixed and
    nothing waits for the GPU, so that a CUDA graph can record it.
    """
    if args.norm_adv:  # to mean 0 and standard deviation 1
        advantages = batch.advantages - total(batch.advantages.mean()) / WORLD_SIZE
        variance = total(advantages.square().mean()) / WORLD_SIZE
        batch = batch._replace(advantages=advantages / (variance.sqrt() + 1e-8))
    loss, metrics = ppo_loss(agent, batch, args)
    optimizer.zero_grad()
    (loss / WORLD_SIZE).backward()
    sum_gradients(agent)  # over processes
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    means = total(torch.stack(list(metrics.values())).detach()) / WORLD_SIZE  # all in one message
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
    bar = make_bar("steps", leave=False, delay=2)
    while is_running.any() and lengths.max() < MAX_EPISODE_STEPS:
        obs = torch.as_tensor(obs, dtype=torch.float32, device=device)
        actions = agent.get_distribution(agent.normalize(obs)).mode
        obs, rewards, terminated, truncated, infos = envs.step(agent.to_env(actions))
        check_finite(args.env_id, obs, rewards)
        returns += np.where(is_running, rewards, 0)
        lengths += is_running
        bar.update(is_running.sum())
        is_running &= ~(np.asarray(terminated, bool) | np.asarray(truncated, bool))
    bar.close()
    envs.close()
    if is_running.any():
        line = f"{is_running.sum()} evaluated episodes were cut at {MAX_EPISODE_STEPS} steps"
        tqdm.write(line, file=sys.stderr)
    return {
        "eval/episodic_return": returns.mean(),
        "eval/episodic_return_std": returns.std(),
        "eval/episodic_length": lengths.mean(),
    }


# ---- Training ----------------------------------------------------------------------------------------------
def summarize(agent, storage, batch, args):
    """Return what is logged about this process's rollout, beside the losses."""
    scalars = {}
    is_done = (storage.terminated | storage.truncated)[1:]
    if is_done.any():
        scalars["charts/episodic_return"] = storage.episode_returns[1:][is_done].mean()
        scalars["charts/episodic_length"] = storage.lengths[1:][is_done].mean()
    variance = batch.returns.var()
    if variance > 0:
        unexplained = (batch.returns - batch.values).var() / variance
        scalars["losses/explained_variance"] = 1 - unexplained.item()
    if args.norm_reward:
        # How many of the rewards that are not 0 are clipped. These look equal to the agent, whatever their
        # size: if there are many, use --no-norm-reward
        rewards = storage.rewards[1:]
        rewards = rewards[rewards != 0]
        limit = 10 * (agent.return_stats.var + 1e-8).sqrt().item()
        if len(rewards):
            scalars["charts/clipped_rewards"] = np.mean(np.abs(rewards) >= limit)
    return scalars


def train(args, run):
    """Train the agent of a run; with --evaluate, only score it."""
    # Set up
    device = set_up_device(args)
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    if args.eval_episodes or args.evaluate:
        check_evaluation(args, envs)
    seed_everything(args.seed, WEIGHTS)  # the weights are the same in every process
    agent = Agent(envs, args.norm_obs).to(device)
    agent.eval()  # except in updates, which matters to layers such as dropout and batch norm
    run.load(agent=agent)
    scored_agent = agent  # what evaluations score: here you can put a moving average of the weights
    if args.evaluate:  # in other episodes than those that selected best.pt
        num_episodes = args.eval_episodes or 10
        print_line(f"{args.evaluate}: {num_episodes} episodes of {args.env_id} with the most likely actions")
        videos = run.path / f"videos_{Path(args.evaluate).stem}"
        print_scores(evaluate(scored_agent, args, device, FINAL_EVALUATION, videos))
        return
    # Adam keeps this very tensor, and so does a CUDA graph: the loop puts the present rate into it
    learning_rate = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(
        agent.parameters(), learning_rate, eps=1e-5, fused=True, capturable=device.type == "cuda"
    )
    run.load(optimizer=optimizer)
    act = Recorded(partial(sample_actions, agent), device)
    # A recording freezes settings. With `args`, it is made again if the loop changes one
    update = Recorded(partial(update_minibatch, agent, optimizer, args), device, args)
    storage = RolloutStorage(envs, args.num_steps)
    # The first observations go to the last row, where the next rollout begins. A resumed run begins with new
    # episodes: their seed depends on run.iteration, so that they are not those of the first iteration again
    seed = seed_everything(args.seed, TRAINING, run.iteration, RANK)
    storage.obs[-1], infos = envs.reset(seed=seed)
    run.open(f"{type(envs.unwrapped).__name__}, {args.num_envs} environments, {device}", args.total_timesteps)

    while True:
        # Evaluate, if it is time. Checkpoints say whether an evaluation is due, so that --resume repeats one
        # that was cut off
        if run.should_evaluate():
            scores = evaluate(scored_agent, args, device, EVALUATION, run.path / f"videos_{run.step}")
            eval_steps = args.eval_episodes * scores["eval/episodic_length"]  # should_evaluate limits them
            run.keep(scores, "eval/episodic_return", eval_steps)
        if run.step >= args.total_timesteps:
            break

        # New random numbers in each iteration: so neither evaluations nor a resume change what training
        # draws. + 1, as the reset above has used the first number
        seed_everything(args.seed, TRAINING, run.iteration + 1, RANK)

        # Learning rate: it falls linearly to zero
        rate = args.learning_rate
        if args.anneal_lr:
            rate *= 1 - run.step / args.total_timesteps
        learning_rate.fill_(rate)

        # Collect T steps in each environment
        collect_rollout(agent, act, envs, storage, args.gamma, device)
        check_finite(args.env_id, storage.obs, storage.rewards)
        batch = compute_batch(agent, storage, args, device)
        num_rows = len(batch.returns)  # without steps that only reset an environment

        # Update: K epochs over the rollout, in minibatches of equal size
        agent.train()
        for _ in range(args.update_epochs):
            sums = {}  # of the metrics of this epoch; those of the last epoch are logged
            order = shuffle_rows(num_rows, args.num_steps * envs.num_envs, device)
            for rows in order.chunk(args.num_minibatches):
                minibatch = Batch(*(x[rows] for x in batch))
                for name, value in update(minibatch).items():
                    sums[name] = sums.get(name, 0) + value
            metrics = {name: x / args.num_minibatches for name, x in sums.items()}
            if args.target_kl and metrics["approx_kl"] > args.target_kl:
                break
        agent.eval()

        # Log, and save checkpoint.pt if it is time
        run.iteration += 1
        run.step += int(total(torch.tensor(num_rows, device=device)))
        scalars = {f"losses/{name}": x.item() for name, x in metrics.items()}
        scalars |= summarize(agent, storage, batch, args)
        scalars["charts/learning_rate"] = rate
        run.log(scalars)

    envs.close()
    run.close()


# ---- Run ---------------------------------------------------------------------------------------------------
# What follows is the same in all scripts of this family, but for `Progress` and `main`
if sys.stderr is None:  # closed by a shell, as by 2>&-, but the progress bar needs a stream
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0
    step: int = 0  # environment steps trained on, in total across environments
    eval_steps: int = 0  # environment steps of evaluations
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # mean return of best.pt, None before the first evaluation of the task
    last_score: float | None = None  # mean return of the newest policy, None before its evaluation
    score_name: str = ""  # name of these scores, empty before the first evaluation
    is_due: bool = False  # is it time to evaluate the newest policy


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
    counts = ("num_envs", "total_timesteps", "num_minibatches", "update_epochs")  # from 1
    shares = ("gamma", "gae_lambda")  # up to 1
    for name, value in vars(args).items():
        if value == "":
            fail(f"--{name.replace('_', '-')} is empty, perhaps because a variable of the shell is not set")
        if type(value) not in (int, float):  # a bool is neither
            continue
        least = 1 if name in counts else 0
        most = 1 if name in shares else 1e30
        if name == "num_steps":
            least = 2  # an only step might be one that just resets, and there would be nothing to train on
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
        return None  # process 0 does it
    run = Run(args, args.env_id, checkpoint)
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
