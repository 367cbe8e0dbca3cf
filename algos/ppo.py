"""Proximal Policy Optimization (PPO) for discrete and continuous actions, in one file.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO), and 2016, arXiv:1506.02438 (advantage estimation).

    python ppo.py                                    # learns CartPole-v1 in seconds on one CPU core
    python ppo.py --env-id Pendulum-v1 --norm-obs --total-timesteps 200000   # continuous actions
    torchrun --nproc-per-node 2 ppo.py               # two GPUs, or with --no-cuda two CPU processes

Equations, numbered after the first paper:
    (6)   ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)
    (7)   L^CLIP  = E[ min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t) ]
    (9)   L       = E[ L^CLIP - c1 (V(s_t) - R_t)^2 / 2 + c2 entropy(pi(. | s_t)) ], R_t = A_t + V_old(s_t)
    (11)  A_t     = delta_t + gamma lambda A_{t+1}, without A_{t+1} at the end of an episode or of the rollout
    (12)  delta_t = r_t + gamma V(s_{t+1}) - V(s_t), where V(s_{t+1}) = 0 if s_{t+1} is terminal

Shapes: T steps, B environments, N = T B training rows, observations of shape D, A components of an action,
P numbers that define pi(. | s) for one s: the logits, or A means and A log standard deviations.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "numpy", "gymnasium[classic-control]>=1.4", "tyro", "tensorboard", "wandb", "tqdm"]
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

sys.path.append(os.getcwd())  # --env-id my_module:MyTask-v0 finds my_module.py in the current folder
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# What is logged about an update: means over the last epoch of a rollout
METRICS = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
# On one GPU, record acting and the update once; replaying them saves CPU overhead. Set it to False for edits that
# need the host in between, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True


@dataclass
class Args:
    """PPO on any gymnasium environment with flat observations."""

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on a GPU if there is one
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    capture_video: bool = False  # record evaluations' first environment in the run folder (needs moviepy)
    run_dir: str = "runs"  # parent folder of all run folders
    resume: str | None = None  # checkpoint.pt of a run to resume; its settings hold unless flags change them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate instead of training
    eval_interval: int = 0  # iterations between evaluations and checkpoints (0: at most ten a run)
    eval_episodes: int = 10  # episodes per evaluation (0: never during training, 10 with --evaluate)
    env_id: str = "CartPole-v1"  # gymnasium id; `module:Name-v0` imports the module first
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the task's own vector env, else sync
    num_envs: int = 32  # parallel environments B, in total across processes
    total_timesteps: int = 100_000  # environment steps, in total across environments
    learning_rate: float = 4e-3  # Adam learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_steps: int = 64  # rollout length T: steps in each environment
    gamma: float = 0.98  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 11
    num_minibatches: int = 4  # minibatches that each epoch splits the rollout into
    update_epochs: int = 5  # epochs K over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    norm_obs: bool = False  # normalize observations by their running mean and standard deviation
    norm_reward: bool = True  # divide rewards by the discounted return's running std, and clip to [-10, 10]
    clip_coef: float = 0.2  # clipping range eps of the ratio, eq. 7
    clip_vloss: bool = False  # also clip how far the value moves, by clip_coef
    ent_coef: float = 0.0  # entropy coefficient c2, eq. 9
    vf_coef: float = 0.5  # value coefficient c1, eq. 9
    max_grad_norm: float = 0.5  # larger gradients are scaled down to this norm (1e9: never)
    target_kl: float | None = None  # skip a rollout's other epochs if approx_kl exceeds this (None, 0: never)


# ---- Networks ----------------------------------------------------------------------------------------------
def make_mlp(num_inputs: int, num_outputs: int, last_gain: float):
    """Make an MLP for rows [N, *D]: two hidden tanh layers of 64, orthogonal weights, biases of zero."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, num_outputs),
    )
    for layer in network[1::2]:  # the linear ones
        nn.init.orthogonal_(layer.weight, last_gain if layer is network[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return network


class RunningMeanStd(nn.Module):
    """Running mean and variance, in float64, of all rows [N, *shape] that `update` saw in all processes."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x, weights):
        """Add the rows x [N, *shape] whose weight [N] is 1; rows of weight 0 do not count."""
        # Let d = x - mean, with the old mean. Of n rows in total, m are new. The n - m old ones have a sum(d)
        # of 0 and a sum(d^2) of (n - m) var. So the mean moves by shift = (sum(d) of new rows) / n, and
        #   new var = ((n - m) var + (sum(d^2) of new rows)) / n - shift^2
        #           = var + ((sum(d^2) of new rows) - m var) / n - shift^2
        # Sums of d instead of x avoid rounding errors (Chan et al. 1979). With W processes, `average` divides
        # m and both sums by W, and `count` is n / W, so that W cancels in every quotient. With one process,
        # it does nothing.
        weights = weights.double()
        d = x.double() - self.mean
        num_rows = average(weights.sum())
        d_sum = average(torch.tensordot(weights, d, 1))  # [*shape], the sum over rows of weight times d
        d_square_sum = average(torch.tensordot(weights, d.square(), 1))
        self.count += num_rows
        shift = d_sum / self.count
        self.var += (d_square_sum - num_rows * self.var) / self.count - shift.square()
        self.mean += shift

    def scale(self, x):
        """Divide x by the standard deviation, and clip it to [-10, 10]."""
        return (x / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def forward(self, x):
        """Normalize rows x [N, *shape] to mean 0 and standard deviation 1, clipped to [-10, 10]."""
        return self.scale(x - self.mean)


class Agent(nn.Module):
    """Separate actor and critic, and the statistics that normalize observations and rewards."""

    def __init__(self, envs, norm_obs: bool):
        super().__init__()
        self.space = envs.single_action_space
        self.is_continuous = isinstance(self.space, Box)
        num_outputs = math.prod(self.space.shape) if self.is_continuous else self.space.n
        obs_shape = envs.single_observation_space.shape
        num_inputs = math.prod(obs_shape)
        self.actor = make_mlp(num_inputs, num_outputs, last_gain=0.01)
        self.critic = make_mlp(num_inputs, 1, last_gain=1.0)
        if self.is_continuous:
            self.actor_logstd = nn.Parameter(torch.zeros(num_outputs))
        self.normalize = RunningMeanStd(obs_shape) if norm_obs else nn.Identity()
        self.return_stats = RunningMeanStd(())

    def get_policy_params(self, obs):
        """Return logits, or means and log standard deviations, [N, P] for normalized observations [N, *D]."""
        out = self.actor(obs)
        if self.is_continuous:
            out = torch.cat((out, self.actor_logstd.expand_as(out)), -1)
        return out

    def get_distribution(self, policy_params):
        """Return pi(. | s) for parameters [N, P] as N x A independent distributions.

        The log-probability of an action is the sum over its A components. `sample_actions` draws from these
        distributions by formulas of its own: change both together.
        """
        if self.is_continuous:
            mean, logstd = policy_params.chunk(2, -1)
            return Normal(mean, logstd.exp(), validate_args=False)
        # A = 1: logits [N, 1, P] make N x 1 distributions, so that log_prob takes actions [N, 1]
        return Categorical(logits=policy_params.unsqueeze(-2), validate_args=False)

    def to_env(self, actions):
        """Convert actions [B, A] to an array of what the environments take."""
        actions = actions.cpu().numpy().reshape(-1, *self.space.shape)
        if not self.is_continuous:
            return actions + self.space.start
        low, high = self.space.low, self.space.high
        if self.space.is_bounded():
            # -1 and 1 become the bounds of the box. Only the environment sees the scaled and clipped action;
            # log-probabilities are those of the action that was drawn
            actions = low + (high - low) * (actions + 1) / 2
        return actions.clip(low, high)


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs, video_folder=None):
    """Make environments, the first recorded on video if there is a folder for it; exits if unsupported.

    Training, each evaluation and each video have their own; a wrapper's statistics begin from scratch in each.
    """
    wrappers = []  # add your own, such as [gym.wrappers.TimeAwareObservation]; evaluations make new ones
    mode = args.vectorization
    if mode == "auto":
        # None is the task's own vector environment, if it has one; that one takes no wrappers
        mode = "sync" if wrappers else None
    render = {"render_mode": "rgb_array"} if video_folder else {}
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers, **render)
    except (gym.error.Error, ModuleNotFoundError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    obs_space = envs.single_observation_space
    action_space = envs.single_action_space
    if not obs_space.is_np_flattenable or flatdim(obs_space) > 10_000:  # excludes images
        fail(f"--env-id {args.env_id}: observations must flatten to at most 10,000 numbers, not {obs_space}")
    is_box = isinstance(action_space, Box) and action_space.low.size and action_space.dtype.kind == "f"
    if not is_box and not isinstance(action_space, Discrete):
        fail(f"--env-id {args.env_id}: actions must be Discrete or a Box of floats, not {action_space}")
    # In this mode, the step after an episode's end ignores the action, has reward 0 and returns the first
    # observation of the next episode. Such a step is no training data: see RolloutStorage
    next_step = gym.vector.AutoresetMode.NEXT_STEP
    if envs.metadata.get("autoreset_mode", next_step) != next_step:
        fail(f"--env-id {args.env_id}: the autoreset mode must be NEXT_STEP, gymnasium's default")
    if not isinstance(obs_space, Box) or not obs_space.shape:
        envs = FlattenObservation(envs)  # discrete observations become one-hot
    if video_folder:
        envs = RecordVideo(envs, video_folder, record_first_only=True)
    return envs


def check_video(args, envs):
    """Record one picture into a folder that is removed at once; exits if that is not possible."""
    if "rgb_array" not in envs.metadata.get("render_modes", []):
        fail(f"--capture-video: {args.env_id} has no render mode rgb_array")
    with tempfile.TemporaryDirectory() as folder:
        try:
            recorded = make_envs(args, 1, f"{folder}/videos")
            recorded.reset()
            recorded.close()
        except gym.error.Error as error:
            fail(f"--capture-video: {error}")


# ---- Storage -----------------------------------------------------------------------------------------------
# Training data of a rollout or minibatch, one row for each of N steps: normalized obs [N, *D], actions
# [N, A], and log_probs, values, advantages and returns [N] from before the update. The weight [N] of a row is
# 1, or 0 if the step only reset its environment. Rows of weight 0 are computed like the others and count for
# nothing. They stay because CUDA graphs need fixed shapes.
Batch = namedtuple("Batch", "obs actions log_probs values advantages returns weights")


class RolloutStorage:
    """T steps of B environments, in arrays of T + 1 rows.

        row t      obs s_t and action a_t of step t
        row t + 1  the outcome of step t: its reward, whether the episode ended, the next obs s_{t+1}, and
                   the sums over the episode up to and including step t

    So terminated[t] and truncated[t] say whether step t - 1 ended the episode. If it did, step t only resets
    the environment: lengths[t + 1] is 0, and its training row has weight 0. The last row begins the next
    rollout, which first copies it to row 0. All attributes are arrays of this form.
    """

    def __init__(self, envs, num_steps: int):
        shape = (num_steps + 1, envs.num_envs)
        action_shape = envs.single_action_space.shape
        self.obs = np.zeros((*shape, *envs.single_observation_space.shape), np.float32)  # [T + 1, B, *D]
        self.actions = np.zeros((*shape, math.prod(action_shape)), np.float32)  # [T + 1, B, A]
        self.rewards = np.zeros(shape, np.float32)  # [T + 1, B], as all below
        self.terminated, self.truncated = np.zeros((2, *shape), bool)
        # Of the episode so far: its length, its return, and the sum of gamma^age reward, whose standard
        # deviation scales rewards
        self.lengths, self.episode_returns, self.discounted = np.zeros((3, *shape), np.float32)


# ---- PPO ---------------------------------------------------------------------------------------------------
@torch.inference_mode()
def sample_actions(agent, obs):
    """Draw actions [B, A] for observations [B, *D] as they come from the environments."""
    policy_params = agent.get_policy_params(agent.normalize(obs))
    if agent.is_continuous:
        mean, logstd = policy_params.chunk(2, -1)
        return mean + logstd.exp() * torch.randn_like(mean)
    # A draw from get_distribution(policy_params), written out because it saves a fifth of the rollout's time:
    # with exponential noise E, -log(E) is Gumbel noise, and argmax(logits - log(E)) is distributed as
    # softmax(logits)
    log_noise = torch.empty_like(policy_params).exponential_().log()
    return (policy_params - log_noise).argmax(-1, keepdim=True)


def collect_rollout(agent, act, envs, storage, gamma: float, device):
    """Fill the storage with T steps; `act` is `sample_actions` of the agent, or its CUDA graph."""
    for array in vars(storage).values():
        array[0] = array[-1]
    for t in range(len(storage.obs) - 1):
        actions = act(torch.as_tensor(storage.obs[t], device=device)).cpu()
        obs, rewards, terminated, truncated, infos = envs.step(agent.to_env(actions))
        storage.actions[t] = actions
        storage.obs[t + 1] = obs
        storage.rewards[t + 1] = rewards
        storage.terminated[t + 1] = terminated
        storage.truncated[t + 1] = truncated
        # If step t - 1 ended an episode, step t only reset the environment: its length and sums are 0
        continues = ~(storage.terminated[t] | storage.truncated[t])
        storage.lengths[t + 1] = continues * (storage.lengths[t] + 1)
        storage.episode_returns[t + 1] = continues * (storage.episode_returns[t] + rewards)
        storage.discounted[t + 1] = continues * (gamma * storage.discounted[t] + rewards)


def check_finite(storage, env_id):
    """Exit with one line that names the first observation or reward that is NaN or infinite."""
    for name in ("obs", "rewards"):
        places = np.argwhere(~np.isfinite(getattr(storage, name)))  # [places, 2 or more]
        if len(places):
            t, b = places[0, :2]
            fail(f"{env_id}: {name} of environment {b} not finite in step {storage.lengths[t, b]:.0f}")


def compute_gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float):
    """Compute advantages and returns [T, B] from rewards and episode ends [T, B] and values [T + 1, B]."""
    delta = rewards + gamma * values[1:] * ~terminated - values[:-1]  # eq. 12; truncation bootstraps
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.zeros_like(values)  # [T + 1, B]
    for t in reversed(range(len(rewards))):
        advantages[t] = delta[t] + decay[t] * advantages[t + 1]  # eq. 11
    return advantages[:-1], advantages[:-1] + values[:-1]


@torch.no_grad()
def compute_batch(agent, storage, args, device):
    """Compute the training data of a rollout, and update the running statistics.

    The network and the observation statistics have not changed since the rollout, so one large pass gives
    the rollout's values and log-probabilities (up to rounding), and is cheaper than storing them in each step.
    Observation statistics are updated after it, return statistics before they scale the rewards. Dropout and
    batch norm do not fit in a network of your own: the script never calls train() or eval().
    """
    data = {name: torch.as_tensor(array, device=device) for name, array in vars(storage).items()}
    weights = (data["lengths"][1:] > 0).float().flatten()  # [N], N = T B, length 0: a reset
    rewards = data["rewards"][1:]  # [T, B]
    if args.norm_reward:
        agent.return_stats.update(data["discounted"][1:].flatten(), weights)
        rewards = agent.return_stats.scale(rewards)
    raw_obs = data["obs"].flatten(0, 1)  # [(T + 1) B, *D]
    obs = agent.normalize(raw_obs)
    values = agent.critic(obs).view(-1, storage.obs.shape[1])  # [T + 1, B]
    advantages, returns = compute_gae(
        rewards, values, data["terminated"][1:], data["truncated"][1:], args.gamma, args.gae_lambda
    )
    if args.norm_obs:
        agent.normalize.update(raw_obs[: len(weights)], weights)
    obs = obs[: len(weights)]  # without row T
    actions = data["actions"][:-1].flatten(0, 1)
    pi = agent.get_distribution(agent.get_policy_params(obs))
    return Batch(
        obs=obs,
        actions=actions,
        log_probs=pi.log_prob(actions).sum(-1),
        values=values[:-1].flatten(),
        advantages=advantages.flatten(),
        returns=returns.flatten(),
        weights=weights,
    )


def ppo_loss(agent, batch, args):
    """Compute the loss [N] and, in their order, the METRICS [6, N] of each row."""
    pi = agent.get_distribution(agent.get_policy_params(batch.obs))
    log_ratio = pi.log_prob(batch.actions).sum(-1) - batch.log_probs
    ratio = log_ratio.exp()  # eq. 6
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * batch.advantages, clipped_ratio * batch.advantages)  # eq. 7
    values = agent.critic(batch.obs).squeeze(-1)  # [N]
    value_loss = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:
        # The larger of this loss and the loss of a value that stays within clip_coef of the old one
        near_values = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, 0.5 * (near_values - batch.returns).square())
    entropy = pi.entropy().sum(-1)
    loss = policy_loss + args.vf_coef * value_loss  # the negative of eq. 9
    if args.ent_coef:  # skipping it at zero saves 6 % of an update
        loss = loss - args.ent_coef * entropy
    # approx_kl is the low-variance estimate of KL(pi_old, pi) (Schulman 2020, joschu.net/blog/kl-approx.html)
    approx_kl = ratio - 1 - log_ratio
    is_clipped = ((ratio - 1).abs() > args.clip_coef).float()
    metrics = torch.stack((value_loss, policy_loss, entropy, -log_ratio, approx_kl, is_clipped))
    return loss, metrics.detach()


def update_minibatch(agent, optimizer, args, *rows):
    """Take one gradient step on a minibatch, the fields of a Batch; returns the mean METRICS [6].

    Means are over the rows of weight 1 of all processes. Shapes are fixed and the host never waits, so that
    a CUDA graph can record it.
    """
    batch = Batch(*rows)
    # (Rows of weight 1 in all W processes) / W. As average(sum) is also divided by W, average(sum) / count is
    # the mean over all rows. For the gradient of the loss, average_gradients does the averaging.
    count = average(batch.weights.sum()).clamp(min=1)
    if args.norm_adv:  # to mean 0 and standard deviation 1
        mean = average((batch.weights * batch.advantages).sum()) / count
        deviation = batch.advantages - mean
        variance = average((batch.weights * deviation.square()).sum()) / count
        batch = batch._replace(advantages=deviation / (variance.sqrt() + 1e-8))
    loss, metrics = ppo_loss(agent, batch, args)
    optimizer.zero_grad()
    ((batch.weights * loss).sum() / count).backward()
    average_gradients(agent)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return average((batch.weights * metrics).sum(1) / count)


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(agent, args, device, stream, video_folder):
    """Score one episode with the most likely actions in each of `eval_episodes` environments."""
    envs = make_envs(args, args.eval_episodes or 10, video_folder if args.capture_video else None)
    obs, infos = envs.reset(seed=seed_everything(args.seed, stream))
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros_like(returns)
    is_running = lengths == 0
    while is_running.any() and lengths.max() < 10_000:
        obs = agent.normalize(torch.as_tensor(obs, dtype=torch.float32, device=device))
        actions = agent.get_distribution(agent.get_policy_params(obs)).mode
        obs, rewards, terminated, truncated, infos = envs.step(agent.to_env(actions))
        returns += rewards * is_running
        lengths += is_running
        is_running &= ~(terminated | truncated)
    envs.close()
    if is_running.any():
        tqdm.write(f"{is_running.sum()} evaluated episodes were cut at 10,000 steps", file=sys.stderr)
    return {
        "eval/episodic_return": float(returns.mean()),
        "eval/episodic_return_std": float(returns.std()),
        "eval/episodic_length": float(lengths.mean()),
    }


# ---- Training ----------------------------------------------------------------------------------------------
@dataclass
class Progress:
    """What a run has done so far."""

    iteration: int = 0
    step: int = 0  # environment steps trained on, in total across environments
    eval_steps: int = 0  # environment steps of evaluations
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # mean return of best.pt, None before the first evaluation
    last_score: float | None = None  # mean return of the newest policy, None if it was not evaluated


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
        for old, new in zip(memory, new_inputs):
            old.copy_(new)
        graph.replay()
        return output

    return replay


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


def set_up(args, checkpoint, learning_rate):
    """Make environments, agent and optimizer on the device of `learning_rate`; load `checkpoint` if given."""
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    if args.capture_video:
        check_video(args, envs)
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = Agent(envs, args.norm_obs).to(learning_rate.device)
    options = {"lr": learning_rate, "capturable": learning_rate.is_cuda}
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True, **options)
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        except (KeyError, RuntimeError, ValueError):
            fail(f"{args.evaluate or args.resume}: not the network of --env-id, --norm-obs and this file")
        optimizer.param_groups[0] |= options  # not the saved ones; do so for each group that you add
    return envs, agent, optimizer


def summarize(storage, batch, metrics):
    """Return what is logged about a rollout and its update: losses, and the episodes that ended."""
    scalars = {f"losses/{name}": x for name, x in zip(METRICS, metrics.tolist())}
    is_valid = batch.weights > 0
    returns = batch.returns[is_valid]
    unexplained = (returns - batch.values[is_valid]).var() / returns.var()
    scalars["losses/explained_variance"] = 1 - unexplained.item()
    is_done = (storage.terminated | storage.truncated)[1:]
    if is_done.any():
        scalars["charts/episodic_return"] = storage.episode_returns[1:][is_done].mean()
        scalars["charts/episodic_length"] = storage.lengths[1:][is_done].mean()
    return scalars


def train(args, run_path, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate, only score the checkpoint.

    Random numbers are seeded by --seed and 0 for the weights, 1 for training (and again in each iteration, by
    its number), 2 for evaluations during training (always the same episodes), 3 for --evaluate.
    """
    # Set up
    device = set_up_device(args)
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, so that graphs see it change
    envs, agent, optimizer = set_up(args, checkpoint, learning_rate)
    if args.evaluate:  # on episodes other than those that selected best.pt
        print(evaluate(agent, args, device, 3, run_path / f"videos_{Path(args.evaluate).stem}"))
        return
    progress = checkpoint["progress"] if checkpoint else Progress()
    parts = {"agent": agent, "optimizer": optimizer}
    save = partial(save_checkpoint, run_path, args, progress, parts)
    if RANK == 0:
        writer = open_run(run_path, args, progress.step)
        print(
            f"{run_path}: {type(envs.unwrapped).__name__}, {args.num_envs} environments, step {progress.step}"
        )
        if not checkpoint:
            save("checkpoint.pt")
        elif not (run_path / "best.pt").exists() or checkpoint["args"].env_id != args.env_id:
            progress.best_score = progress.last_score = None  # the next evaluation is the best one
        if progress.step >= args.total_timesteps:
            print(f"{run_path}: raise --total-timesteps to train on")

    def score_policy():
        """Evaluate, log the scores, and keep the policy in best.pt unless an earlier one was better."""
        scores = evaluate(agent, args, device, 2, run_path / f"videos_{progress.step}")
        for name, score in scores.items():
            writer.add_scalar(name, score, progress.step)
        progress.eval_steps += round(args.eval_episodes * scores["eval/episodic_length"])
        progress.last_score = scores["eval/episodic_return"]
        if progress.best_score is None or progress.last_score >= progress.best_score:
            progress.best_score = progress.last_score
            save("best.pt")
        save("checkpoint.pt")

    act = partial(sample_actions, agent)
    update = partial(update_minibatch, agent, optimizer, args)
    storage = RolloutStorage(envs, args.num_steps)
    storage.obs[-1], infos = envs.reset(seed=seed_everything(args.seed, 1, progress.iteration, RANK))
    use_graphs = CUDA_GRAPHS and learning_rate.is_cuda and WORLD_SIZE == 1
    eval_interval = args.eval_interval or args.total_timesteps // (10 * args.num_envs * args.num_steps) + 1
    saved_at = time.time()
    with tqdm(
        total=args.total_timesteps,
        initial=progress.step,
        mininterval=0.1 if sys.stderr.isatty() else 30,  # seconds
        disable=RANK > 0,
    ) as bar:
        while progress.step < args.total_timesteps:
            start = time.time()
            cpu_start = time.process_time()
            progress.iteration += 1
            progress.last_score = None  # the policy that this iteration makes has no score yet
            seed_everything(args.seed, 1, progress.iteration, RANK)

            # Learning rate: it falls linearly to zero. The recorded update of a GPU sees new values of tensors,
            # not of numbers: to anneal another setting, make it a tensor too
            if args.anneal_lr:
                learning_rate.fill_(args.learning_rate * (1 - progress.step / args.total_timesteps))

            # Collect T steps in each environment
            collect_rollout(agent, act, envs, storage, args.gamma, device)
            check_finite(storage, args.env_id)
            batch = compute_batch(agent, storage, args, device)

            # Update: K epochs over the rollout, in minibatches of equal size
            for _ in range(args.update_epochs):
                order = torch.randperm(len(batch.weights), device=device)
                shuffled = [x[order].chunk(args.num_minibatches) for x in batch]
                metrics = torch.zeros(len(METRICS), device=device)
                for minibatch in zip(*shuffled):  # each with the fields of a Batch
                    metrics += update(*minibatch)
                metrics /= args.num_minibatches  # means over the epoch
                if args.target_kl and metrics[METRICS.index("approx_kl")] > args.target_kl:
                    break
            if use_graphs:
                # Record after one iteration, as Adam creates its state in the first step
                act = capture(act, torch.as_tensor(storage.obs[0], device=device))
                update = capture(update, *minibatch)
                use_graphs = False

            # Count the steps of weight 1: the mean over processes times their number is the sum
            steps_taken = round(average(batch.weights.sum()).item() * WORLD_SIZE)
            progress.step += steps_taken
            progress.cpu_seconds += time.process_time() - cpu_start

            # Log, in process 0 alone: losses are of all processes, explained variance and episodes its own.
            # The rest of the loop must not call `average`, since the other processes do not get there
            if RANK > 0:
                continue
            scalars = summarize(storage, batch, metrics)
            if not metrics.isfinite().all():
                fail(f"{args.env_id}: losses are not finite at step {progress.step}")
            scalars["charts/learning_rate"] = learning_rate.item()
            scalars["charts/cpu_seconds"] = progress.cpu_seconds
            scalars["charts/SPS"] = steps_taken / (time.time() - start)
            for name, value in scalars.items():
                writer.add_scalar(name, value, progress.step)
            if "charts/episodic_return" in scalars:
                bar.set_postfix_str(f"return {scalars['charts/episodic_return']:.1f}", refresh=False)
            bar.update(min(progress.step, args.total_timesteps) - bar.n)

            # Save, before an evaluation that might fail
            is_last = progress.step >= args.total_timesteps
            is_due = is_last or progress.iteration % eval_interval == 0
            if is_due or time.time() - saved_at > 600:
                writer.flush()
                save("checkpoint.pt")
                saved_at = time.time()

            # Evaluate. Without --eval-interval, evaluations take at most a fifth of the steps so far. The
            # longest episode of the rollout predicts how many steps the next evaluation takes
            eval_steps = progress.eval_steps + args.eval_episodes * storage.lengths.max()
            is_affordable = args.eval_interval or eval_steps <= progress.step / 5
            if is_due and is_affordable and args.eval_episodes and not is_last:
                score_policy()

    # Evaluate the last policy
    if RANK > 0:
        return
    # None: the last policy is not evaluated yet, or there is no best.pt of this task
    if args.eval_episodes and None in (progress.best_score, progress.last_score):
        score_policy()
    writer.close()
    scores = "not evaluated"
    if progress.last_score is not None:
        scores = f"return of best.pt {progress.best_score:.1f}, of the last policy {progress.last_score:.1f}"
    print(f"{run_path}: {scores}")


def main(argv=None):
    """Read the command line; flags override the settings of a checkpoint."""
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    path = args.evaluate or args.resume
    if path:
        checkpoint = load_checkpoint(path)
        args = tyro.cli(Args, args=argv, default=checkpoint["args"])
    counts = "num_envs num_steps total_timesteps num_minibatches update_epochs".split()
    # Settings that are numbers must be at least 0, and these at least 1
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if type(value) in (int, float) and not value >= least:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be at least {least}")
    if args.num_envs % WORLD_SIZE:
        fail(f"--num-envs ({args.num_envs}) must be divisible by the number of processes ({WORLD_SIZE})")
    num_rows = args.num_steps * args.num_envs // WORLD_SIZE
    if num_rows % args.num_minibatches:
        fail(f"--num-minibatches ({args.num_minibatches}) must divide the {num_rows} steps of a rollout")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    run_path = Path(path).parent if path else Path(args.run_dir, re.sub("[:/]", "-", run_name))
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
