"""Proximal Policy Optimization (PPO) for discrete and continuous actions, in one file.

Papers: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347);
Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE" (arXiv:1506.02438).

    python algos/ppo.py                                    # first run: CartPole-v1, seconds on one core
    python algos/ppo.py --env-id HalfCheetah-v5 --norm-obs --norm-reward --total-timesteps 1000000 \
        --num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10 \
        --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95   # full size, continuous control
    torchrun --nproc-per-node 2 algos/ppo.py               # several GPUs (CPU processes: --no-cuda)

What is computed, numbered as in the PPO paper:

    (6)   ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)
    (7)   L^CLIP  = E[ min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t) ] --clip-coef eps
    (8)   L^KLPEN = E[ ratio_t A_t - beta KL(pi_old, pi) ]                     --kl-coef beta, in place of (7)
    (9)   L       = E[ L^CLIP - c1 (V(s_t) - R_t)^2 / 2 + c2 entropy(pi(. | s_t)) ]
    (11)  A_t     = delta_t + (gamma lambda) delta_{t+1} + ... to the end of the episode or the rollout
    (12)  delta_t = r_t + gamma V(s_{t+1}) - V(s_t), with V(s_{t+1}) = 0 only where s_{t+1} is terminal

Shapes: T time steps of a rollout, B parallel environments, N rows of a minibatch, D flattened observation, A action
components, P parameters of the policy's distribution.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11", "numpy>=1.26", "gymnasium>=1.4", "tyro>=0.9", "tensorboard>=2.18", "wandb>=0.19", "tqdm>=4.66",
# ]
# ///

import importlib.util
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch._dynamo  # what torch.optim imports on first use: a second, kept out of the timings
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path += [str(Path(__file__).resolve().parents[1]), os.getcwd()]  # for envs_shared, and for your own environments
from envs_shared.gym_tasks.columns import EPISODE_LENGTH, EPISODE_RETURN, NUM_EXTRA, REWARD, TERMINATED, TRUNCATED
from envs_shared.gym_tasks.normalization import BoxUnits, RewardScaler, RunningMeanStd
from envs_shared.gym_tasks.scores import EpisodeScores, own_random_numbers, play_episodes
from envs_shared.gym_tasks.vector import make_vec, num_values

SCRIPT = "ppo"
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun


@dataclass
class Args:
    """PPO on any gymnasium environment with flat observations."""

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
    capture_video: bool = False  # film environment 0 of every evaluation, into the run folder
    resume: str | None = None  # checkpoint.pt to go on from, with its settings; flags override most of them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate, without training
    checkpoint_interval: int = 10  # iterations between checkpoints (0: only at the start and the end)
    eval_interval: int = 0  # iterations between evaluations (0: up to ten a run, in at most a fifth of all steps)
    eval_episodes: int = 100  # episodes of the evaluation at the end; those on the way are fewer or simpler
    compile: bool = False  # compile the hot functions with torch.compile (pays on long runs)
    cuda_graphs: bool = True  # on one GPU, record the steps of fixed shape as CUDA graphs and replay them

    # Environment
    env_id: str = "CartPole-v1"  # gymnasium id; `module:Name-v0` imports the module first
    vectorization: Literal["auto", "sync", "async", "torch"] = "auto"  # auto: its own form, else sync; torch: our port
    num_envs: int = 32  # parallel environments B, over all processes

    # Algorithm
    total_timesteps: int = 100_000  # environment steps over all environments; the last rollout is completed
    learning_rate: float = 4e-3  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_steps: int = 64  # steps T of each environment in a rollout
    gamma: float = 0.98  # discount gamma
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, eq. 11
    num_minibatches: int = 4  # minibatches of an epoch
    update_epochs: int = 5  # epochs K over each rollout
    norm_adv: bool = True  # normalize advantages within each minibatch
    norm_obs: bool = False  # normalize observations by running mean and variance
    norm_reward: bool = False  # divide rewards by the running deviation of the discounted return
    clip_coef: float = 0.2  # clipping range epsilon of the surrogate, eq. 7
    clip_vloss: bool = False  # clip the value update by clip_coef too
    ent_coef: float = 0.0  # entropy coefficient c2, eq. 9
    vf_coef: float = 0.5  # value coefficient c1, eq. 9
    max_grad_norm: float = 0.5  # largest global norm of the gradient (inf: no limit)
    target_kl: float | None = None  # end the epochs of a rollout once the mean approx_kl of one exceeds this
    kl_coef: float = 0.0  # penalty beta of eq. 8; above zero it replaces the clipping of eq. 7


# ---- Networks --------------------------------------------------------------------------------------------------------


def make_mlp(num_in: int, num_out: int, std: float) -> nn.Sequential:
    """Two hidden tanh layers of 64; orthogonal weights, of gain `std` in the last layer, and zero biases."""
    mlp = nn.Sequential(nn.Linear(num_in, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_out))
    for layer, gain in zip(mlp[::2], (math.sqrt(2), math.sqrt(2), std), strict=True):
        nn.init.orthogonal_(layer.weight, gain)  # Andrychowicz et al. 2021, section 3.2
        nn.init.zeros_(layer.bias)
    return mlp


class Agent(nn.Module):
    """Separate actor and critic.

    The actor's output are policy parameters [P]: A x max(n) logits for A discrete components (padded to the largest and
    masked), or A means and A state-independent log deviations for a Box, in units of the box.
    """

    def __init__(self, obs_dim: int, action_space: gym.Space, norm_obs: bool = False):
        super().__init__()
        self.continuous = isinstance(action_space, gym.spaces.Box)
        if self.continuous:
            self.action_dim = num_outputs = math.prod(action_space.shape)
            self.actor_logstd = nn.Parameter(torch.zeros(num_outputs))
        else:
            sizes = torch.as_tensor(num_values(action_space))  # [A]
            is_padding = torch.arange(int(sizes.max())) >= sizes[:, None]  # [A, max(n)]
            self.action_dim = len(sizes)
            num_outputs = is_padding.numel()
            self.register_buffer("logit_mask", is_padding.float() * -1e8, persistent=False)
        self.critic = make_mlp(obs_dim, 1, 1.0)
        self.actor = make_mlp(obs_dim, num_outputs, 0.01)
        self.to_env = BoxUnits(action_space) if self.continuous else nn.Identity()  # actions of the environment
        self.normalize = RunningMeanStd((obs_dim,)) if norm_obs else nn.Identity()

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V(s) [...] of observations [..., D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def get_policy_params(self, obs: torch.Tensor) -> torch.Tensor:
        """Policy parameters [..., P] at observations [..., D]."""
        out = self.actor(self.normalize(obs))
        return torch.cat((out, self.actor_logstd.expand_as(out)), -1) if self.continuous else out

    def get_distribution(self, policy_params: torch.Tensor) -> Normal | Categorical:
        """pi(. | s) of parameters [..., P], one factor per action component: batch shape [..., A]."""
        if self.continuous:
            mean, logstd = policy_params.chunk(2, -1)
            return Normal(mean, logstd.exp(), validate_args=False)
        logits = policy_params.unflatten(-1, self.logit_mask.shape) + self.logit_mask  # [..., A, max(n)]
        return Categorical(logits=logits, validate_args=False)

    def sample(self, obs: torch.Tensor) -> torch.Tensor:
        """Draw actions [B, A] of the policy at observations [B, D], without waiting for the device."""
        pi = self.get_distribution(self.get_policy_params(obs))
        if self.continuous:
            return pi.mean + pi.stddev * torch.randn_like(pi.mean)
        gumbel = -torch.empty_like(pi.logits).exponential_().log()
        return (pi.logits + gumbel).argmax(-1)  # Gumbel-max: a sample of softmax(logits)

    @torch.no_grad()
    def get_action(self, obs: torch.Tensor) -> torch.Tensor:
        """The most likely actions [..., A] at observations [..., D], for the environment."""
        return self.to_env(self.get_distribution(self.get_policy_params(obs)).mode)


# ---- Storage ---------------------------------------------------------------------------------------------------------


class RolloutStorage:
    """One rollout of T steps in B environments, preallocated on the training device.

    `rows[t + 1]` is what the environments answered to `actions[t]`, and the named tensors are views into its columns.
    The last row of one rollout is the first row of the next.
    """

    def __init__(self, envs, agent: Agent, num_steps: int, device: torch.device):
        self.rows = torch.zeros(num_steps + 1, envs.num_envs, envs.num_columns, device=device)
        self.rows[-1] = envs.rows
        self.obs = self.rows[..., : envs.obs_dim]  # [T + 1, B, D]
        extra = self.rows[..., envs.obs_dim :]
        self.rewards = extra[1:, :, REWARD]  # [T, B]
        self.terminated = extra[..., TERMINATED]  # [T + 1, B], 0 or 1, as is the next
        self.truncated = extra[..., TRUNCATED]
        self.episodes = extra[1:, :, EPISODE_RETURN : EPISODE_LENGTH + 1]  # [T, B, 2], return and length at an end
        self.final_obs = extra[1:, :, NUM_EXTRA:] if envs.same_step else None  # [T, B, D]
        dtype = torch.float32 if agent.continuous else torch.int64
        self.actions = torch.zeros(num_steps, envs.num_envs, agent.action_dim, dtype=dtype, device=device)  # [T, B, A]
        self.rollout: dict[str, torch.Tensor] = {}  # rows [T B, ...] by name, made by `compute_targets`


# ---- PPO -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def collect_rollout(agent: Agent, sample, envs, storage: RolloutStorage) -> None:
    """Fill `storage` with T steps; `sample` is `agent.sample`, recorded as a graph or not."""
    storage.rows[0].copy_(storage.rows[-1])
    for t in range(len(storage.actions)):
        storage.actions[t] = sample(storage.obs[t])
        storage.rows[t + 1].copy_(envs.step(agent.to_env(storage.actions[t])), non_blocking=True)


def compute_gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float, final_values=None):
    """Generalized advantage estimation, eq. 11 and 12 (Schulman et al. 2016, eq. 16).

    From rewards [T, B], values [T + 1, B] of all observations, terminated and truncated [T, B] bool to advantages and
    returns [T, B]. A terminated episode is worth nothing after its end, a truncated one V of its last observation: that
    is obs[t + 1] with NEXT_STEP autoreset; with SAME_STEP its value stands in `final_values` [T, B].
    """
    done = terminated | truncated
    next_values = values[1:] if final_values is None else torch.where(done, final_values, values[1:])
    delta = rewards + gamma * next_values * (~terminated) - values[:-1]  # eq. 12
    decay = gamma * gae_lambda * (~done)
    advantages = torch.empty_like(delta)
    last = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):  # eq. 11, from the end
        last = delta[t] + decay[t] * last
        advantages[t] = last
    return advantages, advantages + values[:-1]


@torch.no_grad()
def compute_targets(agent: Agent, storage: RolloutStorage, reward_scaler: RewardScaler, args: Args) -> None:
    """Fill `storage.rollout` with what the update needs, rows [T B, ...]; `valid` is 1 for real transitions, else 0."""
    terminated = storage.terminated[1:] > 0  # [T, B]
    truncated = storage.truncated[1:] > 0  # [T, B]
    done = storage.terminated + storage.truncated > 0  # [T + 1, B], at t that of the step before
    # With NEXT_STEP autoreset the step after a done only resets: it ignores its action, its reward means nothing
    valid = (~done[:-1] if storage.final_obs is None else torch.ones_like(done[1:])).float()  # [T, B]
    rewards = storage.rewards * valid
    if args.norm_reward:
        rewards = reward_scaler(rewards, done[1:], valid)
    values = agent.get_value(storage.obs)  # [T + 1, B], all in one call
    final_values = None if storage.final_obs is None else agent.get_value(storage.final_obs)
    advantages, returns = compute_gae(rewards, values, terminated, truncated, args.gamma, args.gae_lambda, final_values)
    policy_params = agent.get_policy_params(storage.obs[:-1])  # [T, B, P]
    log_probs = agent.get_distribution(policy_params).log_prob(storage.actions).sum(-1)  # [T, B]
    rollout = {"obs": storage.obs[:-1], "actions": storage.actions, "policy_params": policy_params, "valid": valid}
    rollout |= {"log_probs": log_probs, "values": values[:-1], "advantages": advantages, "returns": returns}
    for name, x in rollout.items():  # into the same memory each time, where CUDA graphs find it
        storage.rollout.setdefault(name, torch.empty_like(x).flatten(0, 1)).copy_(x.flatten(0, 1))


def explained_variance(rollout: dict[str, torch.Tensor]) -> float:
    """1 - Var(returns - values) / Var(returns) over the valid rows; not finite where the returns do not vary."""
    values, returns = (rollout[name][rollout["valid"] > 0].double() for name in ("values", "returns"))
    return (1 - (returns - values).var() / returns.var()).item()


def normalize_advantages(advantages: torch.Tensor, valid: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Advantages [N] to mean 0 and deviation 1 over the `count` valid rows of all processes; one alone is left."""
    mean = sum_over_ranks((advantages * valid).sum()) / count
    variance = sum_over_ranks(((advantages - mean).square() * valid).sum()) / count
    return torch.where(count > 1, (advantages - mean) / (variance.sqrt() + 1e-8), advantages)


# In the order of `metrics` in `ppo_loss`
METRICS = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def ppo_loss(agent: Agent, minibatch: dict[str, torch.Tensor], count: torch.Tensor, args: Args):
    """The loss to minimize, minus eq. 9, as the mean over the `count` valid rows of all processes.

    `minibatch` has rows [N, ...] of `storage.rollout`; those with valid = 0 carry no weight. Returns the
    loss, whose gradients add up over processes, and this process's part of the METRICS [6].
    """
    pi = agent.get_distribution(agent.get_policy_params(minibatch["obs"]))
    advantages, valid = minibatch["advantages"], minibatch["valid"]
    log_ratio = pi.log_prob(minibatch["actions"]).sum(-1) - minibatch["log_probs"]  # [N]
    log_ratio = torch.where(valid > 0, log_ratio, 0.0)  # so that no row without weight can overflow
    ratio = log_ratio.exp()  # eq. 6
    if args.kl_coef > 0:  # eq. 8, with the exact KL
        pi_old = agent.get_distribution(minibatch["policy_params"])
        if agent.continuous:
            kl = kl_divergence(pi_old, pi).sum(-1)
        else:  # torch's own looks for probabilities of zero by a mask, which no CUDA graph can hold
            kl = (pi_old.probs * (pi_old.logits - pi.logits)).sum((-2, -1))
        policy_loss = args.kl_coef * kl - ratio * advantages
    else:  # eq. 7
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    values = agent.get_value(minibatch["obs"])
    value_loss = 0.5 * (values - minibatch["returns"]).square()
    if args.clip_vloss:  # the worse of it and of V held near its old value
        clipped_values = minibatch["values"] + (values - minibatch["values"]).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, 0.5 * (clipped_values - minibatch["returns"]).square())
    entropy = pi.entropy().sum(-1)
    loss = policy_loss + args.vf_coef * value_loss  # [N]
    if args.ent_coef > 0:  # else its backward pass is spared
        loss = loss - args.ent_coef * entropy  # minus eq. 9
    is_clipped = ((ratio - 1.0).abs() > args.clip_coef).float()
    # approx_kl: the low-variance estimate of KL(pi_old, pi) (Schulman 2020, http://joschu.net/blog/kl-approx.html)
    metrics = (value_loss, policy_loss, entropy, -log_ratio, ratio - 1.0 - log_ratio, is_clipped)
    return (loss * valid).sum() / count, (torch.stack(metrics).detach() * valid).sum(1) / count


def update_minibatch(agent: Agent, optimizer, loss_fn, rollout: dict, args: Args, index: torch.Tensor) -> torch.Tensor:
    """One gradient step on the rows `index` [N] of `rollout`; returns this process's part of the METRICS [6]."""
    minibatch = {name: x[index] for name, x in rollout.items()}
    count = sum_over_ranks(minibatch["valid"].sum()).clamp(min=1)
    if args.norm_adv:
        minibatch["advantages"] = normalize_advantages(minibatch["advantages"], minibatch["valid"], count)
    optimizer.zero_grad()
    loss, metrics = loss_fn(agent, minibatch, count, args)
    loss.backward()
    sum_gradients(agent.parameters())
    clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return metrics


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def make_env(env_id: str, **kwargs) -> gym.Env:
    """One environment, for training, evaluation and video alike: wrappers and arguments of your own go here.

    Those are noticed, and make the vector form a SyncVectorEnv; any other change needs --vectorization sync.
    """
    return gym.make(env_id, **kwargs)


def make_envs(args: Args, num_envs: int, seed: int, **kwargs):
    """`num_envs` environments, reset with `seed`; exits with code 2 where they cannot be made."""
    try:
        return make_vec(args.env_id, num_envs, seed, make_env=make_env, **kwargs)[0]  # [1] are the observations
    except ValueError as error:
        fail(f"--env-id {args.env_id}: {error}")


@torch.inference_mode()
def evaluate(agent: Agent, args: Args, device, num_episodes: int, stream: int, folder: Path) -> dict[str, float]:
    """Scores of the most likely actions, with frozen statistics and unscaled rewards; films go to `folder`.

    The environments are gymnasium's own, and the same for every call with the same `stream` of the seed.
    """
    seed = int(np.random.SeedSequence([args.seed, stream]).generate_state(1)[0])
    video_folder = folder if args.capture_video else None
    vectorization = "auto" if args.vectorization in ("auto", "torch") else "sync"
    with own_random_numbers(seed):  # training's stay what they are
        num_envs = min(args.num_envs, num_episodes)
        envs = make_envs(args, num_envs, seed, vectorization=vectorization, video_folder=video_folder)
        return play_episodes(envs, lambda obs: agent.get_action(obs.to(device)), num_episodes)


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
        fail(f"--nproc-per-node: more than {torch.cuda.device_count()} GPU(s); --no-cuda trains on CPU processes")
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
        checkpoint["args"] = Args(**{name: value for name, value in checkpoint["args"].items() if name in known})
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
    run_path = Path(args.run_dir, name.translate(str.maketrans("/:;,#?'", "-------")))  # what W&B refuses in an id
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
    may_be_zero = "seed checkpoint_interval eval_interval gamma gae_lambda clip_coef ent_coef vf_coef kl_coef".split()
    for name, value in vars(args).items():
        is_number = type(value) in (int, float)
        if is_number and not (value > 0 or (value == 0 and name in may_be_zero)):
            fail(f"--{name.replace('_', '-')} {value}: has to be {'at least' if name in may_be_zero else 'above'} 0")
        if name in ("gamma", "gae_lambda") and value > 1:
            fail(f"--{name.replace('_', '-')} {value}: has to be from 0 to 1")
    batch_size = args.num_envs * args.num_steps // WORLD_SIZE
    if args.num_envs % WORLD_SIZE:
        fail(f"--num-envs {args.num_envs} does not divide among {WORLD_SIZE} processes")
    if batch_size % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} does not divide a rollout of {batch_size} rows")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs pip install 'gymnasium[other]'")
    if args.capture_video:
        with TemporaryDirectory() as folder:  # the first frame of a film, to see that there can be one
            make_envs(args, 1, args.seed, video_folder=Path(folder, "film")).envs.close()


def train(args: Args, checkpoint: dict | None = None) -> None:
    """Train as `args` say, from `checkpoint` if there is one, and leave a run folder with result.json."""
    progress = {"iteration": 0, "global_step": 0, "eval_steps": 0, "seconds": [0.0, 0.0], "eval_seconds": [0.0, 0.0]}
    if checkpoint is not None:
        progress = {name: checkpoint[name] for name in progress}
    start = read_clock() - progress["seconds"]
    step = progress["global_step"]
    device = setup_device(args)

    # Streams of the seed: 0 environments and 2 samples, of each process; 1 weights; 3 and 4 evaluations
    env_seed = seed_everything(args.seed, 0, RANK, step)
    envs = make_envs(args, args.num_envs // WORLD_SIZE, env_seed, vectorization=args.vectorization, device=device)
    seed_everything(args.seed, 1)
    agent = Agent(envs.obs_dim, envs.single_action_space, args.norm_obs).to(device)
    seed_everything(args.seed, 2, RANK, step)
    use_graphs = args.cuda_graphs and device.type == "cuda" and WORLD_SIZE == 1
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, so that CUDA graphs see it change
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-5, fused=True, capturable=use_graphs)
    reward_scaler = RewardScaler(envs.num_envs, args.gamma).to(device)
    scores = EpisodeScores()

    parts = {"agent": agent, "optimizer": optimizer, "reward_scaler": reward_scaler, "scores": scores}
    if WORLD_SIZE == 1:
        parts["envs"] = envs
    if checkpoint is not None:
        for name, part in parts.items():
            part.load_state_dict(checkpoint.get(name))
        optimizer.param_groups[0] |= {"lr": lr, "capturable": use_graphs}
        if WORLD_SIZE == 1 and checkpoint.get("envs") is not None:
            torch.set_rng_state(checkpoint["torch_rng"])
        else:
            reward_scaler.running_return.zero_()  # episodes start anew
    if RANK == 0:
        run_path, writer = open_run(args, step)
        best_path = run_path / "best.pt"
        if checkpoint is None:
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)

    # The steps of an iteration, each one CUDA graph where that can be
    graph = CudaGraph if use_graphs else lambda fn: fn
    storage = RolloutStorage(envs, agent, args.num_steps, device)
    if envs.on_device:
        collect = graph(partial(collect_rollout, agent, agent.sample, envs, storage))
    else:
        collect = partial(collect_rollout, agent, graph(agent.sample), envs, storage)
    add_targets = graph(partial(compute_targets, agent, storage, reward_scaler, args))
    loss_fn = torch.compile(ppo_loss) if args.compile else ppo_loss
    update = graph(partial(update_minibatch, agent, optimizer, loss_fn, storage.rollout, args))

    batch_size = args.num_envs * args.num_steps // WORLD_SIZE  # rows of this process
    eval_interval = args.eval_interval or math.ceil(args.total_timesteps / 10 / (args.num_envs * args.num_steps))
    bar = tqdm(total=args.total_timesteps, initial=step, unit="step", disable=RANK > 0)
    while step < args.total_timesteps:
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1.0 - step / args.total_timesteps))

        # Collect a rollout, then its advantages and returns
        collect()
        add_targets()

        # Optimize the surrogate for K epochs of minibatches
        epoch_metrics = []  # of each epoch, the mean METRICS [6] of its minibatches
        for _ in range(args.update_epochs):
            minibatches = torch.randperm(batch_size, device=device).split(batch_size // args.num_minibatches)
            # Cloned, as a graph writes over what it gave before
            metrics = torch.stack([update(index).clone() for index in minibatches])
            epoch_metrics.append(sum_over_ranks(metrics.mean(0)))
            if args.target_kl is not None and epoch_metrics[-1][METRICS.index("approx_kl")] > args.target_kl:
                break
        if args.norm_obs:
            agent.normalize.update(storage.rollout["obs"], storage.rollout["valid"])
        step += int(sum_over_ranks(storage.rollout["valid"].sum()))
        progress |= {"iteration": progress["iteration"] + 1, "global_step": step}

        # Measure what is new
        means = torch.stack(epoch_metrics).mean(0).tolist()
        scalars = {f"losses/{name}": mean for name, mean in zip(METRICS, means, strict=True)}
        if not all(map(math.isfinite, scalars.values())):
            raise SystemExit(f"{SCRIPT}.py: the losses are no longer finite at step {step}: {scalars}")
        if RANK > 0:
            continue
        scalars |= {"losses/explained_variance": explained_variance(storage.rollout), "charts/learning_rate": lr.item()}
        seconds = read_clock() - start - progress["eval_seconds"]
        scalars |= {"charts/wall_seconds": seconds[0], "charts/cpu_seconds": seconds[1]}
        scalars |= {"charts/SPS": step / seconds[0]} | scores.summarize(storage.episodes)
        if "charts/return_last_20" in scalars:
            bar.set_postfix_str(f"return={scalars['charts/return_last_20']:.1f} at step {step:,}", refresh=False)
        bar.update(min(step, args.total_timesteps) - bar.n)

        # Evaluate, keep the policy that scored best, log and save
        is_last = step >= args.total_timesteps
        is_allowed = args.eval_interval > 0 or progress["eval_steps"] <= step / 4
        if is_last or (is_allowed and progress["iteration"] % eval_interval == 0):
            eval_start = read_clock()
            num_episodes = min(10, args.eval_episodes)
            scalars |= evaluate(agent, args, device, num_episodes, 3, run_path / f"videos_step_{step}")
            score = scalars["eval/episodic_return"]
            if not best_path.exists() or score >= load_checkpoint(best_path)["best_return"]:
                save_checkpoint(best_path, args, progress | {"best_return": score}, {"agent": agent})
            progress["eval_steps"] += num_episodes * scalars["eval/episodic_length"]
            progress["eval_seconds"] = (read_clock() - eval_start + progress["eval_seconds"]).tolist()
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        if is_last or (args.checkpoint_interval and progress["iteration"] % args.checkpoint_interval == 0):
            progress["seconds"] = (read_clock() - start).tolist()
            writer.flush()  # so that the log never lacks what the checkpoint has
            save_checkpoint(run_path / "checkpoint.pt", args, progress, parts)
    bar.close()
    envs.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if RANK > 0:
        return

    # Score the final policy and the best one on episodes that chose neither
    metrics = best = evaluate(agent, args, device, args.eval_episodes, 4, run_path / "videos_final")
    if best_path.exists() and load_checkpoint(best_path)["global_step"] != step:
        agent.load_state_dict(load_checkpoint(best_path)["agent"])
        best = evaluate(agent, args, device, args.eval_episodes, 4, run_path / "videos_best")
    metrics = metrics | {name.replace("eval/", "best/"): value for name, value in best.items()}
    writer.close()
    seconds = read_clock() - start
    result = {"script": SCRIPT, "env_id": args.env_id, "seed": args.seed, "headline": "eval/episodic_return"}
    result |= {"metrics": metrics, "env_steps": step, "wall_seconds": seconds[0], "cpu_seconds": seconds[1]}
    result |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    result |= {"torch": torch.__version__, "args": asdict(args)}
    (run_path / "result.json.tmp").write_text(json.dumps(result, indent=2))
    os.replace(run_path / "result.json.tmp", run_path / "result.json")
    score = f"{metrics['eval/episodic_return']:.1f} +- {metrics['eval/episodic_return_std']:.1f}"
    print(f"{args.env_id}: return {score} after {step:,} steps in {seconds[0]:.1f} s; run folder {run_path}")


def main(argv: list[str] | None = None) -> None:
    """Command line: train, go on with a run, or evaluate a checkpoint."""
    args = tyro.cli(Args, args=argv)
    checkpoint = None
    if args.evaluate is not None and (args.resume is not None or WORLD_SIZE > 1):
        fail("--resume and --evaluate exclude each other, and --evaluate is for one process")
    path = args.resume if args.evaluate is None else args.evaluate
    if path is not None:
        checkpoint = load_checkpoint(path)
        saved = checkpoint["args"]
        args = tyro.cli(Args, args=argv, default=saved)  # flags given now override the saved ones
        fixed = ["env_id", "norm_obs"]
        if args.resume is not None:
            fixed += ["norm_reward", "seed", "num_envs", "vectorization"]
        for name in fixed:
            if getattr(args, name) != getattr(saved, name):
                fail(f"--{name.replace('_', '-')}: {path} was trained with {getattr(saved, name)}")
    if args.resume is not None:
        if "optimizer" not in checkpoint:
            fail(f"--resume {path}: has no optimizer state; give the checkpoint.pt beside it")
        is_done = checkpoint["global_step"] >= args.total_timesteps
        if is_done and Path(path).with_name("result.json").exists():
            fail(f"--resume {path}: its {checkpoint['global_step']} steps are done; raise --total-timesteps")
    check_args(args)
    if args.evaluate is None:
        return train(args, checkpoint)

    device = setup_device(args)
    envs = make_envs(args, 1, args.seed)
    agent = Agent(envs.obs_dim, envs.single_action_space, args.norm_obs).to(device)
    agent.load_state_dict(checkpoint["agent"])
    folder = Path(path).resolve().parent / f"videos_evaluate_{int(time.time())}"
    for name, value in evaluate(agent, args, device, args.eval_episodes, 4, folder).items():
        print(f"{name} {value:.2f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: a training goes on with --resume and the checkpoint.pt in its run folder")
