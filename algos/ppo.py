"""Proximal Policy Optimization (PPO) for discrete and continuous actions, in one file.

Papers: Schulman et al. 2017, arXiv:1707.06347 (PPO), and 2016, arXiv:1506.02438 (advantage estimation).

    python ppo.py                                    # learns CartPole-v1 in seconds on one CPU core
    python ppo.py --env-id Pendulum-v1 --norm-obs --total-timesteps 200000   # continuous actions
    torchrun --nproc-per-node 2 ppo.py               # two GPUs, or with --no-cuda two CPU processes

Equations, numbered after the first paper:
    (6)   ratio_t = pi(a_t | s_t) / pi_old(a_t | s_t)
    (7)   L^CLIP  = E[ min(ratio_t A_t, clip(ratio_t, 1 - eps, 1 + eps) A_t) ]
    (8)   L^KLPEN = E[ ratio_t A_t - beta KL(pi_old, pi) ]
    (9)   L       = E[ L^CLIP - c1 (V(s_t) - R_t)^2 / 2 + c2 entropy(pi(. | s_t)) ], R_t = A_t + V_old(s_t)
    (11)  A_t     = delta_t + gamma lambda A_{t+1}, without A_{t+1} at the end of an episode or of the rollout
    (12)  delta_t = r_t + gamma V(s_{t+1}) - V(s_t), where V(s_{t+1}) = 0 if s_{t+1} is terminal

Shapes: T steps, B environments, N training rows, D observations, A action components, P policy parameters.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "numpy", "gymnasium[classic-control]>=1.4", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import os
import random
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(os.getcwd())  # --env-id my_module:MyTask-v0 finds my_module.py in the current folder
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
METRICS = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # per update
# Training data of a rollout or minibatch: obs [N, D], actions [N, A], policy_params [N, P], the others [N]
Batch = namedtuple("Batch", "obs actions policy_params log_probs values advantages returns")


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
    eval_interval: int = 0  # iterations between evaluations and checkpoints (0: ten a run, fewer if costly)
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
    norm_reward: bool = True  # divide rewards by the running standard deviation of the discounted return
    clip_coef: float = 0.2  # clipping range eps of the ratio, eq. 7
    clip_vloss: bool = False  # also clip how far the value moves, by clip_coef
    ent_coef: float = 0.0  # entropy coefficient c2, eq. 9
    vf_coef: float = 0.5  # value coefficient c1, eq. 9
    max_grad_norm: float = 0.5  # larger gradients are scaled down to this norm
    target_kl: float | None = None  # skip a rollout's remaining epochs when approx_kl exceeds this
    kl_coef: float = 0.0  # fixed KL penalty beta; if it is not zero, eq. 8 replaces eq. 7


# ---- Networks ----------------------------------------------------------------------------------------------
def make_mlp(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    """Make an MLP: two hidden tanh layers of 64, orthogonal weights, gain `last_gain` in the last layer."""
    layers = nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class RunningMeanStd(nn.Module):
    """Running mean and variance, in float64, of all rows [N, size] that `update` saw in all processes."""

    def __init__(self, size: int):
        super().__init__()
        for name, value in (("mean", 0.0), ("var", 1.0), ("count", 0.0)):
            self.register_buffer(name, torch.full((size,), value, dtype=torch.float64))

    def update(self, x):
        """Add rows [N, size]; subtracting the old mean first avoids rounding errors (Chan et al. 1979)."""
        delta = x.double() - self.mean
        rows = torch.stack((torch.ones_like(delta), delta, delta.square()))  # [3, N, size]
        num_rows, delta_sum, square_sum = average(rows.sum(1))
        self.count += num_rows
        shift = delta_sum / self.count
        self.var += (square_sum - num_rows * self.var) / self.count - shift.square()
        self.mean += shift

    def forward(self, x, center: bool = True):
        """Divide x [..., size], less the mean if `center`, by the standard deviation; clip to [-10, 10]."""
        return ((x - center * self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()


class Agent(nn.Module):
    """Separate actor and critic, and the statistics that normalize observations and rewards."""

    def __init__(self, envs, norm_obs: bool):
        super().__init__()
        self.space, (obs_dim,) = envs.single_action_space, envs.single_observation_space.shape
        self.is_continuous = isinstance(self.space, gym.spaces.Box)
        num_outputs = self.space.low.size if self.is_continuous else self.space.n
        self.actor, self.critic = make_mlp(obs_dim, num_outputs, 0.01), make_mlp(obs_dim, 1, 1.0)
        if self.is_continuous:
            self.actor_logstd = nn.Parameter(torch.zeros(num_outputs))
        self.normalize = RunningMeanStd(obs_dim) if norm_obs else nn.Identity()
        self.return_stats = RunningMeanStd(1)

    def get_policy_params(self, obs):
        """Return logits, or means and log standard deviations, [..., P] for observations [..., D]."""
        out = self.actor(obs)
        return torch.cat((out, self.actor_logstd.expand_as(out)), -1) if self.is_continuous else out

    def get_distribution(self, policy_params):
        """Return pi(. | s) for parameters [..., P]: one distribution [..., A] per component of the action."""
        if self.is_continuous:
            mean, logstd = policy_params.chunk(2, -1)
            return Normal(mean, logstd.exp(), validate_args=False)
        return Categorical(logits=policy_params.unsqueeze(-2), validate_args=False)

    def to_env(self, actions):
        """Convert actions [B, A] for the environments; -1 and 1 become the bounds of a bounded Box."""
        space, actions = self.space, actions.cpu().numpy().reshape(-1, *self.space.shape)
        if not self.is_continuous:
            return actions + space.start
        if space.is_bounded():
            actions = space.low + (space.high - space.low) * (actions + 1) / 2
        return actions.clip(space.low, space.high)


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs: int, video_folder: Path | None = None) -> gym.vector.VectorEnv:
    """Make environments, the first recorded on video if there is a folder for it; exits if unsupported."""
    wrappers = []  # add your own, such as [gym.wrappers.TimeAwareObservation]; evaluations make new ones
    auto_mode = "sync" if wrappers else None  # None: the task's own vector environment, if it has one
    mode = auto_mode if args.vectorization == "auto" else args.vectorization
    render = {"render_mode": "rgb_array"} if video_folder else {}
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers, **render)
        if video_folder:
            envs = gym.wrappers.vector.RecordVideo(envs, video_folder, record_first_only=True)
    except (gym.error.Error, ImportError, ValueError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    space, actions, modes = envs.single_observation_space, envs.single_action_space, gym.vector.AutoresetMode
    if not space.is_np_flattenable or gym.spaces.flatdim(space) > 10_000:  # excludes images
        fail(f"--env-id {args.env_id}: observations must flatten to at most 10,000 numbers, not {space}")
    if not isinstance(actions, gym.spaces.Box | gym.spaces.Discrete):
        fail(f"--env-id {args.env_id}: actions must be Box or Discrete, not {actions}")
    if envs.metadata.get("autoreset_mode", modes.NEXT_STEP) != modes.NEXT_STEP:
        fail(f"--env-id {args.env_id}: the autoreset mode must be NEXT_STEP, gymnasium's default")
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        envs = gym.wrappers.vector.FlattenObservation(envs)  # discrete observations become one-hot
    return envs


# ---- Storage -----------------------------------------------------------------------------------------------
class RolloutStorage:
    """T steps of B environments: row t holds the obs and action of step t, row t + 1 its outcome."""

    def __init__(self, envs, num_steps: int):
        shape, action_dim = (num_steps + 1, envs.num_envs), int(np.prod(envs.single_action_space.shape))
        self.obs = np.zeros((*shape, *envs.single_observation_space.shape), np.float32)  # [T + 1, B, D]
        self.actions = np.zeros((*shape, action_dim), np.float32)  # [T + 1, B, A]
        self.terminated, self.truncated = np.zeros((2, *shape), bool)  # [T + 1, B], as all below
        # The last three cover the episode so far: length, return, and a sum that discounts older rewards
        self.rewards, self.lengths, self.returns, self.discounted = np.zeros((4, *shape), np.float32)


# ---- PPO ---------------------------------------------------------------------------------------------------
@torch.inference_mode()
def collect_rollout(agent, envs, s: RolloutStorage, gamma: float, device):
    """Fill the storage with T steps of the current policy; row 0 is the previous rollout's last row."""
    for x in vars(s).values():
        x[0] = x[-1]
    for t in range(len(s.obs) - 1):
        params = agent.get_policy_params(agent.normalize(torch.as_tensor(s.obs[t], device=device)))
        if agent.is_continuous:
            actions = agent.get_distribution(params).sample().cpu()
        else:  # adding Gumbel noise samples from softmax(logits); saves a fifth of the rollout's time
            actions = (params - torch.empty_like(params).exponential_().log()).argmax(-1, keepdim=True).cpu()
        s.actions[t], answer = actions, envs.step(agent.to_env(actions))
        s.obs[t + 1], s.rewards[t + 1], s.terminated[t + 1], s.truncated[t + 1], _ = answer
        goes_on = ~(s.terminated[t] | s.truncated[t])
        s.lengths[t + 1] = goes_on * (s.lengths[t] + 1)
        s.returns[t + 1] = goes_on * (s.returns[t] + s.rewards[t + 1])
        s.discounted[t + 1] = goes_on * (gamma * s.discounted[t] + s.rewards[t + 1])


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
    """Compute advantages and returns, update running statistics, and drop reset steps (not training data)."""
    data = {name: torch.as_tensor(x, device=device) for name, x in vars(storage).items()}
    rewards = data["rewards"][1:]
    is_valid = data["lengths"][1:] > 0  # [T, B]; the step after an episode's end only resets: length 0
    if args.norm_reward:
        agent.return_stats.update(data["discounted"][1:][is_valid].unsqueeze(-1))
        rewards = agent.return_stats(rewards, center=False)
    obs = agent.normalize(data["obs"])
    values = agent.critic(obs).squeeze(-1)  # [T + 1, B]
    ends = data["terminated"][1:], data["truncated"][1:]
    gae = compute_gae(rewards, values, *ends, args.gamma, args.gae_lambda)
    policy_params = agent.get_policy_params(obs)
    log_probs = agent.get_distribution(policy_params).log_prob(data["actions"]).sum(-1)
    if args.norm_obs:
        agent.normalize.update(data["obs"][:-1][is_valid])
    rows = (obs, data["actions"], policy_params, log_probs, values, *gae)
    return Batch(*(x[: args.num_steps][is_valid] for x in rows))


def ppo_loss(agent, batch, args):
    """Compute the loss [N] of each row and the METRICS [6, N]."""
    pi = agent.get_distribution(agent.get_policy_params(batch.obs))
    log_ratio = pi.log_prob(batch.actions).sum(-1) - batch.log_probs
    ratio = log_ratio.exp()  # eq. 6
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * batch.advantages, clipped_ratio * batch.advantages)  # eq. 7
    if args.kl_coef:
        kl = kl_divergence(agent.get_distribution(batch.policy_params), pi).sum(-1)
        policy_loss = args.kl_coef * kl - ratio * batch.advantages  # eq. 8
    values = agent.critic(batch.obs).squeeze(-1)
    value_loss = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of this loss and that of a value clipped to near the old one
        near_values = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, 0.5 * (near_values - batch.returns).square())
    loss, entropy = policy_loss + args.vf_coef * value_loss, pi.entropy().sum(-1)
    if args.ent_coef:  # skipping it at zero saves 6 % of an update
        loss = loss - args.ent_coef * entropy  # the negative of eq. 9
    is_clipped = ((ratio - 1).abs() > args.clip_coef).float()
    # approx_kl is the low-variance estimate of KL(pi_old, pi) (Schulman 2020, joschu.net/blog/kl-approx.html)
    metrics = (value_loss, policy_loss, entropy, -log_ratio, ratio - 1 - log_ratio, is_clipped)
    return loss, torch.stack(metrics).detach()


def update_minibatch(agent, optimizer, batch, args):
    """Take one gradient step on the mean loss over the rows of all processes; returns mean METRICS [6]."""
    count = average(torch.full((), float(len(batch.obs)), device=batch.obs.device)).clamp(min=1)
    if args.norm_adv:  # to mean 0 and standard deviation 1
        advantages = batch.advantages - average(batch.advantages.sum()) / count
        std = (average(advantages.square().sum()) / count).sqrt()
        batch = batch._replace(advantages=advantages / (std + 1e-8))
    loss, metrics = ppo_loss(agent, batch, args)
    optimizer.zero_grad()
    (loss.sum() / count).backward()
    gradients = [parameter.grad for parameter in agent.parameters()]  # sent as one vector
    nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return average(metrics.sum(1) / count)


# ---- Evaluation --------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(agent, args, device, stream: int, video_folder: Path) -> dict[str, float]:
    """Score one episode with the most likely actions in each of `eval_episodes` environments."""
    envs = make_envs(args, args.eval_episodes or 10, video_folder if args.capture_video else None)
    obs, _ = envs.reset(seed=seed_everything(args.seed, stream))
    returns, lengths = np.zeros((2, len(obs)))
    is_running = lengths == 0
    while is_running.any() and lengths.max() < 10_000:  # longer episodes are cut
        obs = agent.normalize(torch.as_tensor(obs, dtype=torch.float32, device=device))
        actions = agent.get_distribution(agent.get_policy_params(obs)).mode
        obs, rewards, terminated, truncated, _ = envs.step(agent.to_env(actions))
        returns += rewards * is_running
        lengths += is_running
        is_running &= ~(terminated | truncated)
    envs.close()
    scores = {"return": returns.mean(), "return_std": returns.std(), "length": lengths.mean()}
    return {f"eval/episodic_{name}": float(score) for name, score in scores.items()}


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
    """Train, from `checkpoint` if there is one; with --evaluate, only score the checkpoint."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # more threads slow these networks down
    torch.backends.cudnn.deterministic = args.torch_deterministic
    use_cuda = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("nccl" if use_cuda else "gloo")
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = Agent(envs, args.norm_obs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    progress = checkpoint["progress"] if checkpoint else (0, 0, 0, 0.0, -np.inf, np.nan)
    iteration, step, eval_steps, cpu_seconds, best_return, last_return = progress
    if checkpoint:
        try:
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        except Exception as error:
            fail(f"{args.evaluate or args.resume}: does not fit --env-id or --norm-obs ({error})")
    if args.evaluate:  # on episodes other than those that selected best.pt
        return print(evaluate(agent, args, device, 3, Path(args.evaluate).parent / "videos_evaluate"))

    def save(name: str):
        progress = (iteration, step, eval_steps, cpu_seconds, best_return, last_return)
        states = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"args": asdict(args), "progress": progress} | states, run_path / f"{name}.tmp")
        os.replace(run_path / f"{name}.tmp", run_path / name)  # atomic: a kill leaves the old file or the new

    if RANK == 0:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}".replace(":", "-")
        run_path = Path(args.resume).parent if args.resume else Path(args.run_dir, name.replace("/", "-"))
        print(f"{run_path}: {args.num_envs} environments in {type(envs.unwrapped).__name__}, step {step}")
        if args.track:
            import wandb

            config = {"config": asdict(args), "sync_tensorboard": True, "resume": "allow"}
            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, id=run_path.name, **config)
        writer = SummaryWriter(str(run_path), purge_step=step + 1)
        rows = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
        checkpoint or save("checkpoint.pt")  # before training, so that a kill always leaves one
    storage = RolloutStorage(envs, args.num_steps)
    storage.obs[-1], _ = envs.reset(seed=seed_everything(args.seed, 1, iteration, RANK))
    longest_episode = 0
    eval_interval = args.eval_interval or args.total_timesteps // (10 * args.num_envs * args.num_steps) + 1
    seconds_per_line = 0.1 if sys.stderr.isatty() else 30
    bar = tqdm(total=args.total_timesteps, initial=step, mininterval=seconds_per_line, disable=RANK > 0)
    while step < args.total_timesteps:
        start, cpu_start = time.time(), time.process_time()
        iteration += 1
        seed_everything(args.seed, 1, iteration, RANK)
        lr = args.learning_rate * (1 - step / args.total_timesteps * args.anneal_lr)
        optimizer.param_groups[0]["lr"] = lr

        collect_rollout(agent, envs, storage, args.gamma, device)
        batch = compute_batch(agent, storage, args, device)
        for _ in range(args.update_epochs):
            order = torch.randperm(len(batch.obs), device=device)
            minibatches = zip(*(x[order].tensor_split(args.num_minibatches) for x in batch), strict=True)
            metrics = [update_minibatch(agent, optimizer, Batch(*rows), args) for rows in minibatches]
            metrics = dict(zip(METRICS, torch.stack(metrics).mean(0), strict=True))
            if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
                break
        num_rows = average(torch.tensor(float(len(batch.obs)), device=device)).item() * WORLD_SIZE
        step += round(num_rows)
        if RANK > 0:  # the log shows the environments of process 0
            continue
        cpu_seconds += time.process_time() - cpu_start
        scalars = {f"losses/{name}": x.item() for name, x in metrics.items()}
        if not np.isfinite([*scalars.values(), storage.obs.sum(), storage.rewards.sum()]).all():
            fail(f"{args.env_id}: observations, rewards or losses are not finite at step {step}")
        unexplained = (batch.returns - batch.values).var() / batch.returns.var()
        scalars |= {"losses/explained_variance": 1 - unexplained, "charts/cpu_seconds": cpu_seconds}
        scalars |= {"charts/learning_rate": lr, "charts/SPS": num_rows / (time.time() - start)}
        done = (storage.terminated | storage.truncated)[1:]
        if done.any():
            scalars["charts/episodic_return"] = storage.returns[1:][done].mean()
            scalars["charts/episodic_length"] = storage.lengths[1:][done].mean()
            bar.set_postfix_str(f"return {scalars['charts/episodic_return']:.1f}", refresh=False)
        bar.update(min(step, args.total_timesteps) - bar.n)
        longest_episode = max(longest_episode, storage.lengths.max())
        is_last = step >= args.total_timesteps
        is_due = is_last or iteration % eval_interval == 0
        is_affordable = eval_steps + args.eval_episodes * longest_episode <= step / 5  # at most a fifth
        if is_due and args.eval_episodes and (is_last or args.eval_interval or is_affordable):
            scalars |= evaluate(agent, args, device, 2, run_path / f"videos_{step}")
            eval_steps += args.eval_episodes * scalars["eval/episodic_length"]
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
        scores = f"return of best.pt {best_return:.1f}, of the last policy {last_return:.1f}"
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
    if args.num_envs % WORLD_SIZE:
        fail(f"--num-envs ({args.num_envs}) must be divisible by the number of processes ({WORLD_SIZE})")
    train(args, checkpoint)


if __name__ == "__main__":
    main()
    if RANK > 0:
        os._exit(0)  # a normal exit right after all_reduce can abort in gloo, and torchrun then stops rank 0
