"""R2D2: recurrent Q-learning from a prioritized replay of sequences, in one file.

Paper: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (ICLR).

    python r2d2_lstm.py                             # learns a memory task in seconds on one CPU core
    python r2d2_lstm.py --no-recurrent --no-last-action-reward   # the control: a network without memory
    torchrun --nproc-per-node 2 r2d2_lstm.py        # two GPUs, or with --no-cuda two CPU processes
    python r2d2_lstm.py --evaluate runs/NAME/best.pt --eval-episodes 100

Equations of the paper and of the papers it builds on; the numbering is ours:
    (1)  h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, the value rescaling
    (2)  y_t  = h( r_t + ... + gamma^(k-t-1) r_{k-1} + gamma^(k-t) h^-1( Q'(s_k, argmax_a Q(s_k, a)) ) ) with
         k = min(t + n, end of the episode) and target network Q'; the term with Q' is 0 if s_k is terminal
    (3)  L    = E[ w (y_t - Q(s_t, a_t))^2 / 2 ] over the trained steps, w = P^-beta / max P^-beta in a batch
    (4)  P    = p^alpha / sum p^alpha, where p = eta max_t |y_t - Q_t| + (1 - eta) mean_t |y_t - Q_t|
    (5)  epsilon_i = epsilon^(1 + 7 i / (B - 1)), the probability of a random action in environment i

A window has burn_in steps that only update the LSTM's state, learn_length trained steps, and n_step steps
that only provide targets. Windows begin learn_length steps apart, so each step is trained in one window; with
--last-window overlap, an episode's last window begins earlier, and some steps are trained twice. Unlike in
the paper, rewards in targets are divided by their root mean square, and gradients are clipped.

Shapes: B environments, N windows in a batch, L steps in a window, m of them trained, n steps in a return,
D observation (one or more dimensions), A actions, H hidden units, R windows in the replay.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "numpy", "gymnasium>=1.4", "popgym", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import os
import random
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(os.getcwd())  # --env-id my_module:MyTask-v0 finds my_module.py in the current folder
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
METRICS = ("q_loss", "td_error", "grad_norm")  # per update
CUDA_GRAPHS = True  # on one GPU, record acting and the update once; replaying them saves CPU overhead


@dataclass
class Args:
    """R2D2 on any gymnasium environment with discrete actions; observations may be uint8 images."""

    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on a GPU if there is one
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    run_dir: str = "runs"  # parent folder of all run folders
    resume: str | None = None  # checkpoint.pt of a run to resume; its settings hold unless flags change them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate instead of training
    eval_interval: int = 0  # iterations between evaluations and checkpoints (0: ten a run, fewer if costly)
    eval_episodes: int = 10  # episodes per evaluation (0: never during training, 10 with --evaluate)
    env_id: str = "popgym:popgym-RepeatPreviousEasy-v0"  # gymnasium id; `module:Name-v0` imports the module
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the task's own vector env, else sync
    num_envs: int = 32  # parallel environments B, in total across processes
    recurrent: bool = True  # use an LSTM; otherwise a feed-forward layer of equal width
    last_action_reward: bool = True  # also give the network the last action and reward: one-step memory
    hidden_size: int = 64  # width H of the encoder, the LSTM and the heads
    memory_span: float = 50.0  # time constant of the LSTM's slowest units at initialization, in steps
    total_timesteps: int = 100_000  # environment steps, in total across environments
    learning_rate: float = 3e-3  # Adam learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    num_steps: int = 16  # steps in each environment between rounds of updates
    gamma: float = 0.98  # discount gamma
    norm_reward: bool = True  # divide rewards in targets by the root mean square of all nonzero ones
    burn_in: int = 8  # steps at the start of a window that only update the LSTM's state
    learn_length: int = 16  # trained steps m of a window; the next one begins that many steps later
    last_window: Literal["mask", "overlap", "null"] = "mask"  # steps past the end: masked, avoided, target 0
    n_step: int = 1  # steps n of the return before the bootstrap, eq. 2
    state_init: Literal["stored", "zero"] = "stored"  # a window's first LSTM state: as when acting, or 0
    buffer_size: int = 20_000  # windows R in the replay of each process
    checkpoint_replay: bool = True  # save the replay of process 0 in checkpoints (gigabytes for images)
    learning_starts: int = 2_000  # learn_length times the windows in all replays before the first update
    replay_ratio: float = 8.0  # mean number of updates that train on each step
    batch_size: int = 1024  # trained steps per update (N windows of m steps), in total across processes
    target_interval: int = 50  # updates between copies of the network to the target network
    epsilon: float = 0.4  # probability of random actions in environment 0, the largest one, eq. 5
    max_grad_norm: float = 10.0  # larger gradients are scaled down to this norm


# ---- Networks ----------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Encoder, LSTM and dueling heads (Wang et al. 2016), and the statistics that scale rewards."""

    def __init__(self, envs, args):
        super().__init__()
        space, width = envs.single_observation_space, args.hidden_size
        self.args, self.num_actions = args, int(envs.single_action_space.n)
        self.register_buffer("reward_sums", torch.full((2,), 1e-6).double())  # count and sum of squares
        self.obs_scale = float(space.high.max()) if space.dtype == np.uint8 else 1.0
        self.is_image = self.obs_scale > 1 and len(space.shape) > 1 and sorted(space.shape)[-2] >= 36
        layers = []
        if self.is_image:  # convolutions of Mnih et al. 2015: output channels, kernel, stride
            for size in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                layers += [nn.LazyConv2d(*size), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(width), nn.ReLU())
        self.encode(torch.zeros(1, 1, *space.shape))  # a dummy pass tells the lazy layers their input sizes
        num_inputs = width + (self.num_actions + 1) * args.last_action_reward
        if args.recurrent:  # forget gates tau / (1 + tau), tau from 1 to memory_span (Tallec & Ollivier 2018)
            self.core = nn.LSTM(num_inputs, width, batch_first=True)
            nn.init.zeros_(self.core.bias_hh_l0)
            log_tau = torch.linspace(0, np.log(args.memory_span), width)
            self.core.bias_ih_l0.data[width : 2 * width] = log_tau
        else:
            self.core = nn.Linear(num_inputs, width)
        sizes = self.num_actions, 1
        heads = (nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size)) for size in sizes)
        self.advantage, self.value = heads

    def encode(self, obs):
        """Encode observations [N, L, *D] to [N, L, H]; images may have channels first, last or not at all."""
        x = obs.flatten(0, 1).float() / self.obs_scale
        if self.is_image:
            is_last = x.dim() == 4 and x.shape[-1] < x.shape[1]  # where the channels are
            x = x.movedim(-1, 1) if is_last else x.reshape(len(x), -1, *x.shape[-2:])
        return self.encoder(x).unflatten(0, obs.shape[:2])

    def forward(self, obs, last_action, last_reward, state):
        """Return Q [N, L, A] and the LSTM's state after the last step, which is (h, c) as a tensor [N, 2, H].

        Observations [N, L, *D] come after last_action [N, L], -1 if there is none, and last_reward [N, L].
        """
        x = self.encode(obs)
        if self.args.last_action_reward:
            actions = torch.arange(self.num_actions, device=x.device)
            x = torch.cat((x, last_action.unsqueeze(-1) == actions, last_reward.unsqueeze(-1)), -1)
        if self.args.recurrent:
            h, c = state.transpose(0, 1).unsqueeze(1).contiguous()  # [1, N, H] each
            x, state = self.core(x, (h, c))  # [N, L, H]
            state = torch.cat(state).transpose(0, 1)  # [N, 2, H]
        else:
            x = self.core(x).relu()
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True), state


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs: int) -> gym.vector.VectorEnv:
    """Make environments whose observations are arrays of numbers; exits if they are not supported."""
    wrappers, kwargs = [], {}  # add your own, such as gym.wrappers.TimeAwareObservation
    try:
        if "MiniGrid-" in args.env_id:  # one-hot cells and the direction, without the text of the mission
            from minigrid.wrappers import OneHotPartialObsWrapper

            numbers = partial(gym.wrappers.FilterObservation, filter_keys=["image", "direction"])
            bits = gym.spaces.Box(0, 1, (984,), np.uint8)  # 20 for each of 7 x 7 cells, and the direction's 4
            to_bits = partial(gym.wrappers.TransformObservation, func=np.uint8, observation_space=bits)
            wrappers += [OneHotPartialObsWrapper, numbers, gym.wrappers.FlattenObservation, to_bits]
        if "ALE/" in args.env_id:
            import ale_py

            gym.register_envs(ale_py)
            if args.vectorization == "auto" and not wrappers:  # one grey 84 x 84 image per four frames
                kwargs = {"stack_num": 1, "reward_clipping": False}
        auto_mode = "sync" if wrappers else None  # None: the task's own vector environment, if it has one
        mode = auto_mode if args.vectorization == "auto" else args.vectorization
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers, **kwargs)
        if not isinstance(envs.single_observation_space, gym.spaces.Box):
            envs = gym.wrappers.vector.FlattenObservation(envs)  # discrete observations become one-hot
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    space, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(space, gym.spaces.Box) or not isinstance(actions, gym.spaces.Discrete):
        fail(f"--env-id {args.env_id}: needs arrays to observe and Discrete actions, not {space}, {actions}")
    return envs


class Player:
    """Plays in B environments, and holds the network's next inputs.

    After each step, `read` lists pairs (environment, reading). A reading is the network's input at one step:
    (obs, last_action, last_reward, state). In an episode's first one, the last three are -1, 0 and zeros.
    """

    def __init__(self, agent, envs, args, epsilons, device, seed: int):
        self.agent, self.envs, self.args, self.epsilons = agent, envs, args, epsilons.to(device)
        self.same_step = envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.SAME_STEP
        self.is_over, self.read = np.zeros(envs.num_envs, bool), []
        self.returns = self.lengths = np.zeros(envs.num_envs, int)  # of the current episodes
        self.dtype = np.uint8 if envs.single_observation_space.dtype == np.uint8 else np.float32
        obs, _ = envs.reset(seed=seed)
        with device:
            self.obs = torch.as_tensor(np.array(obs, self.dtype))  # [B, *D]
            self.last_action, self.last_reward = torch.zeros(len(obs)).long(), torch.zeros(len(obs))  # [B]
            self.state = torch.zeros(len(obs), 2, args.hidden_size)  # [B, 2, H]
        self.show(obs, self.returns, self.returns, ~self.is_over)

    def show(self, obs, actions, rewards, is_first):
        """Set the network's next inputs from arrays [B, ...]; an episode's first input is only its obs."""
        obs = np.array(obs, self.dtype)  # a copy, since some environments reuse their arrays
        last_action, last_reward = np.where(is_first, -1, actions), np.where(is_first, 0, rewards)
        rows = torch.as_tensor(np.float32((last_action, last_reward, ~is_first))).to(self.obs.device)
        self.obs.copy_(torch.as_tensor(obs))
        self.last_action.copy_(rows[0])
        self.last_reward.copy_(rows[1])
        self.state.mul_(rows[2, :, None, None])
        self.read += enumerate(zip(obs, last_action, last_reward, self.state.clone(), strict=True))

    @torch.no_grad()
    def act(self):
        """Choose actions [B], at random with probability epsilon; works in place, as CUDA graphs require."""
        inputs = (x.unsqueeze(1) for x in (self.obs, self.last_action, self.last_reward))  # L = 1
        q, state = self.agent(*inputs, self.state)
        is_random = torch.rand_like(self.epsilons) < self.epsilons
        random_action = torch.randint_like(self.last_action, q.shape[-1])
        self.last_action.copy_(torch.where(is_random, random_action, q.squeeze(1).argmax(-1)))
        self.state.copy_(state)
        return self.last_action

    def step(self, act):
        """Take a step in each environment with `act`, which is self.act or its CUDA graph."""
        actions, was_over, self.read = act().cpu().numpy().copy(), self.is_over, []
        answer = self.envs.step(actions + self.envs.single_action_space.start)
        obs, self.rewards, self.terminated, truncated, infos = answer
        self.is_over = self.terminated | truncated
        self.returns = self.returns * ~was_over + self.rewards
        self.lengths = self.lengths * ~was_over + (~was_over | self.same_step)  # a NEXT_STEP reset is no step
        for name, x in (("observation", obs), ("reward", self.rewards)):
            for i, *_ in np.argwhere(~np.isfinite(x)):
                fail(f"{self.args.env_id}: {name} of environment {i} is not finite in step {self.lengths[i]}")
        for i in np.flatnonzero(self.is_over & self.same_step):  # here obs already begins the next episode
            self.read += [(i, (infos["final_obs"][i], actions[i], self.rewards[i], self.state[i].clone()))]
        self.show(obs, actions, self.rewards, self.is_over if self.same_step else was_over)


# ---- Storage -----------------------------------------------------------------------------------------------
class SequenceReplay:
    """Prioritized replay of whole windows of L steps, in `data` {name: [R, L, ...] or [R, ...]}.

    A window consists of readings of Player, so a step's action and reward are in the reading after it.
    """

    def __init__(self, envs, args, device):
        self.args, self.length, self.num_added = args, args.burn_in + args.learn_length + args.n_step, 0
        self.batch_windows = max(1, args.batch_size // (args.learn_length * WORLD_SIZE))  # N
        self.steps = [[] for _ in range(envs.num_envs)]  # readings of each environment that are still needed
        self.starts = [0] * envs.num_envs  # where in them the next window begins
        size, space = (args.buffer_size, self.length), envs.single_observation_space
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        with device:
            self.data = {
                "obs": torch.zeros(*size, *space.shape, dtype=dtype),  # [R, L, *D]
                "last_action": torch.zeros(size).long(),  # [R, L]
                "last_reward": torch.zeros(size),  # [R, L]
                "state": torch.zeros(size[0], 2, args.hidden_size),  # state before the first unrolled step
                "end": torch.zeros(size[0]).long(),  # index of the last step; copies of it fill the rest
                "is_terminated": torch.zeros(size[0]).bool(),  # whether the episode terminated at `end`
                "is_warm": torch.zeros(size[0]).bool(),  # whether all burn-in steps are real, not padding
                "priority": torch.zeros(size[0]),  # p of eq. 4
            }

    def add(self, player):
        """Add the player's readings, and store the windows that are complete or end with the episode."""
        burn_in, learn_length = self.args.burn_in, self.args.learn_length
        num_kept = learn_length * (self.args.last_window == "overlap")  # steps kept before the next window
        for i, reading in player.read:
            steps, start, is_over = self.steps[i], self.starts[i], player.is_over[i]
            steps.append(reading)
            if reading[1] == -1:  # an episode begins; is_over is that of the previous one
                steps[:], start, is_over = [reading] * (burn_in + 1), 0, False
            while len(steps) >= start + self.length or (is_over and len(steps) > start + burn_in + 1):
                if is_over and num_kept:  # move the last window back, so that all of it can be trained
                    start = max(0, min(start, len(steps) - 1 - learn_length - burn_in))
                self.store(steps[start : start + self.length], player.terminated[i])
                del steps[: max(0, start + learn_length - num_kept)]
                start = min(start + learn_length, num_kept)
            self.starts[i] = start

    def store(self, window, is_terminated):
        """Replace the oldest window by this one, padded with its last reading; it gets the top priority."""
        obs, actions, rewards, states = zip(*window, *window[-1:] * (self.length - len(window)), strict=True)
        is_warm = window[0] is not window[1]  # copies of an episode's first reading pad its burn-in
        largest = self.data["priority"].max()
        state = states[0 if is_warm else self.args.burn_in]
        values = (np.stack(obs), actions, np.float32(rewards), state, len(window) - 1, is_terminated)
        values += (is_warm, largest + (largest == 0))
        for x, value in zip(self.data.values(), values, strict=True):
            x[self.num_added % len(x)] = torch.as_tensor(value)
        self.num_added += 1

    def sample(self, alpha: float = 0.9, beta: float = 0.6):
        """Draw window indices [N] by eq. 4, stratified (Schaul et al. 2016), and weights w [N] of eq. 3."""
        cumulative = self.data["priority"].pow(alpha).double().cumsum(0)
        places = torch.arange(self.batch_windows, device=cumulative.device)  # [N]
        places = places + torch.rand_like(places, dtype=torch.float64)  # float32 would round up to the end
        index = torch.searchsorted(cumulative, places / len(places) * cumulative[-1])
        index = index.clamp(max=len(cumulative) - 1)  # beyond the end only if a priority is not finite
        weights = self.data["priority"][index].pow(-alpha * beta)  # the sum in P cancels
        return index, weights / weights.max()


# ---- R2D2 --------------------------------------------------------------------------------------------------
def value_rescale(x, eps: float = 1e-3):
    """Return h(x) of eq. 1 (Pohlen et al. 2018), rearranged to avoid subtracting nearly equal numbers."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def inverse_value_rescale(y, eps: float = 1e-3):
    """Return h^-1(y), rearranged in the same way, so that small values survive in float32."""
    k = 1 + 2 * eps
    w = 2 * y.abs() / (k + (k * k + 4 * eps * y.abs()).sqrt())
    return y.sign() * w * (w + 2)


def epsilon_ladder(num_envs: int, epsilon: float):
    """Return epsilon_i [B] of eq. 5 (Horgan et al. 2018)."""
    return epsilon ** (1 + 7 * torch.arange(num_envs) / max(num_envs - 1, 1))


def unroll(agent, windows, args):
    """Return Q [N, m + n, A] of the steps after burn_in, which updates the state without gradient."""
    steps = [windows[name] for name in ("obs", "last_action", "last_reward")]
    state = windows["state"] * (args.state_init == "stored")  # if not is_warm: before the first trained step
    if args.burn_in and args.recurrent:
        with torch.no_grad():
            _, burned_in = agent(*(x[:, : args.burn_in] for x in steps), state)
        state = torch.where(windows["is_warm"][:, None, None], burned_in, state)
    return agent(*(x[:, args.burn_in :] for x in steps), state)[0]


def compute_targets(q, target_q, rewards, end, is_terminated, gamma: float, n_step: int):
    """Compute y_t [N, m] of eq. 2 with double Q-learning (van Hasselt et al. 2016).

    q and target_q [N, m + n, A] belong to steps 0 to m + n - 1; rewards[:, t] [N, m + n - 1] follows step t.
    Step `end` [N], from 1 to m + n - 1, is the last of the window or its episode; from there on y_t is zero.
    """
    t = torch.arange(q.shape[1], device=q.device)  # [m + n]
    end = end.unsqueeze(1)  # [N, 1]
    rewards = rewards * (t[:-1] < end)
    returns = rewards.unfold(1, n_step, 1) @ gamma ** torch.arange(n_step, device=q.device)  # [N, m]
    t = t[: returns.shape[1]]  # [m]
    k = (t + n_step).minimum(end)  # [N, m]
    values = inverse_value_rescale(target_q.gather(2, q.argmax(2, keepdim=True)).squeeze(2))  # [N, m + n]
    values = values.gather(1, k) * ~(is_terminated.unsqueeze(1) & (k == end))  # [N, m], terminal: no value
    discount = gamma ** (k - t).clamp(min=0)
    return value_rescale(returns + discount * values) * (t < end)


def sequence_priority(td_errors, is_trained, eta: float = 0.9):
    """Compute p [N] of eq. 4 from the TD errors [N, m] of steps where is_trained [N, m]."""
    errors = td_errors.abs() * is_trained
    return eta * errors.amax(1) + (1 - eta) * errors.sum(1) / is_trained.sum(1)


def r2d2_loss(agent, target, windows, weights, args):
    """Return eq. 3 and two METRICS as sums over the trained steps, their number, and new priorities [N]."""
    end = windows["end"] - args.burn_in  # [N]
    is_trained = torch.arange(args.learn_length, device=end.device) < end.unsqueeze(1)  # [N, m]
    is_trained |= args.last_window == "null"  # "null" also trains steps after the end, with target 0
    taken = slice(args.burn_in + 1, args.burn_in + 1 + args.learn_length)  # actions are read one step later
    actions = windows["last_action"][:, taken]  # [N, m]
    count, squares = agent.reward_sums
    rewards = windows["last_reward"][:, args.burn_in + 1 :] / (squares / count).sqrt()  # [N, m + n - 1]
    q = unroll(agent, windows, args)  # [N, m + n, A]
    with torch.no_grad():
        target_q = unroll(target, windows, args)
        ends = end, windows["is_terminated"]
        targets = compute_targets(q, target_q, rewards, *ends, args.gamma, args.n_step)  # [N, m]
    q_taken = q[:, : args.learn_length].gather(2, actions.unsqueeze(2)).squeeze(2)  # [N, m]
    td_errors = (targets - q_taken) * is_trained
    losses = 0.5 * weights.unsqueeze(1) * td_errors.square()
    metrics = torch.stack((losses, td_errors.abs())).detach()
    priorities = sequence_priority(td_errors.detach(), is_trained)
    return losses.sum(), metrics.sum((1, 2)), is_trained.sum(), priorities


def update_network(agent, target, optimizer, replay, args):
    """Take one gradient step on sampled windows, update their priorities, and return METRICS [3]."""
    index, weights = replay.sample()
    windows = {name: x[index] for name, x in replay.data.items()}
    loss, metrics, num_steps, priorities = r2d2_loss(agent, target, windows, weights, args)
    num_steps = average(num_steps.float())  # so that averages of sums / num_steps are means over all
    optimizer.zero_grad()
    (loss / num_steps).backward()
    gradients = [parameter.grad for parameter in agent.parameters()]  # sent as one vector
    nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    replay.data["priority"][index] = priorities.clamp(min=1e-8)  # zero would never be drawn again
    return torch.cat((average(metrics / num_steps), grad_norm.unsqueeze(0)))


def collect_steps(player, act, replay, args):
    """Take `num_steps` steps in each environment, and add the readings to the replay.

    Returns (return, length) of episodes that ended in the half of the environments that explores less, the
    steps taken in all processes, and the new windows per process: 0 until learning_starts is reached.
    """
    episodes, sums, half, num_added = [], np.zeros(3), len(player.is_over) // 2, replay.num_added
    for _ in range(args.num_steps):
        replay.add(player)
        player.step(act)
        ended = half + np.flatnonzero(player.is_over[half:])
        episodes += zip(player.returns[ended], player.lengths[ended], strict=True)
        sums += (player.lengths > 0).sum(), (player.rewards != 0).sum(), (player.rewards**2).sum()
    is_filled = replay.num_added * args.learn_length * WORLD_SIZE > args.learning_starts
    sums = torch.tensor([*sums, replay.num_added - num_added, is_filled], device=player.obs.device)
    player.agent.reward_sums += average(sums)[1:3] * args.norm_reward
    num_steps, _, _, num_windows, num_filled = sums.tolist()
    return episodes, round(num_steps * WORLD_SIZE), num_windows * (num_filled > 0.99)


def capture(function):
    """Record `function`, whose tensors stay in place, as a CUDA graph; return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        output = function()
    return lambda: graph.replay() or output


# ---- Evaluation --------------------------------------------------------------------------------------------
def evaluate(agent, args, device, stream: int) -> dict[str, float]:
    """Score one episode with greedy actions in each of `eval_episodes` environments."""
    envs = make_envs(args, args.eval_episodes or 10)
    seed, epsilons = seed_everything(args.seed, stream), torch.zeros(envs.num_envs)
    player = Player(agent, envs, args, epsilons, device, seed)
    returns, lengths = np.zeros((2, envs.num_envs))
    is_running = lengths == 0
    while is_running.any() and lengths.max() < 10_000:  # longer episodes are cut
        player.step(player.act)
        returns += player.rewards * is_running
        lengths += is_running
        is_running &= ~player.is_over
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
    use_graphs = CUDA_GRAPHS and use_cuda and WORLD_SIZE == 1
    if use_graphs:
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be recorded
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("nccl" if use_cuda else "gloo")
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = QNetwork(envs, args).to(device)
    target = deepcopy(agent)
    lr = torch.tensor(args.learning_rate, device=device)  # a tensor, so that CUDA graphs see it change
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=use_graphs)
    parts = {"agent": agent, "target": target, "optimizer": optimizer}
    replay = None if args.evaluate else SequenceReplay(envs, args, device)
    progress = checkpoint["progress"] if checkpoint else (0, 0, 0, 0.0, -np.inf, np.nan, 0, 0.0)
    iteration, step, eval_steps, cpu_seconds, best_return, last_return, num_updates, num_due = progress
    if checkpoint:
        try:
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
            optimizer.param_groups[0] |= {"lr": lr, "capturable": use_graphs}
            if replay and "replay" in checkpoint:
                replay.num_added = checkpoint["num_added"]
                for name, x in replay.data.items():
                    x.copy_(checkpoint["replay"][name])
        except Exception as error:
            fail(f"{args.evaluate or args.resume}: does not fit the environment or flags ({error})")
    if args.evaluate:  # on episodes other than those that selected best.pt
        return print(evaluate(agent, args, device, 3))

    def save(name: str):
        progress = (iteration, step, eval_steps, cpu_seconds, best_return, last_return, num_updates, num_due)
        states = {name: part.state_dict() for name, part in parts.items()}
        if args.checkpoint_replay and name == "checkpoint.pt":
            states |= {"replay": replay.data, "num_added": replay.num_added}
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
    epsilons = epsilon_ladder(args.num_envs, args.epsilon)[RANK::WORLD_SIZE]
    player = Player(agent, envs, args, epsilons, device, seed_everything(args.seed, 1, iteration, RANK))
    act, update = player.act, partial(update_network, agent, target, optimizer, replay, args)
    longest_episode = 0
    eval_interval = args.eval_interval or args.total_timesteps // (10 * args.num_envs * args.num_steps) + 1
    seconds_per_line = 0.1 if sys.stderr.isatty() else 30
    bar = tqdm(total=args.total_timesteps, initial=step, mininterval=seconds_per_line, disable=RANK > 0)
    while step < args.total_timesteps:
        start, cpu_start = time.time(), time.process_time()
        iteration += 1
        seed_everything(args.seed, 1, iteration, RANK)
        lr.fill_(args.learning_rate * (1 - step / args.total_timesteps * args.anneal_lr))
        episodes, num_steps, num_windows = collect_steps(player, act, replay, args)
        step += num_steps
        num_due = num_due % 1 + args.replay_ratio * num_windows / replay.batch_windows
        metrics = torch.zeros(len(METRICS), device=device)
        for _ in range(num_now := int(num_due)):
            metrics += update() / num_now
            num_updates += 1
            if num_updates % args.target_interval == 0:
                target.load_state_dict(agent.state_dict())
        if use_graphs and num_now and num_updates > 2:  # record only after warm-up calls
            act, update, use_graphs = capture(player.act), capture(update), False
        if RANK > 0:  # the log shows the environments of process 0
            continue
        cpu_seconds += time.process_time() - cpu_start
        if not metrics.isfinite().all():
            fail(f"{args.env_id}: losses are not finite at step {step}")
        scalars = {f"losses/{name}": x for name, x in zip(METRICS, metrics.tolist(), strict=True) if num_now}
        scalars |= {"charts/cpu_seconds": cpu_seconds, "charts/SPS": num_steps / (time.time() - start)}
        scalars |= {"charts/num_updates": num_updates, "charts/learning_rate": lr}
        if episodes:
            scalars["charts/episodic_return"], scalars["charts/episodic_length"] = np.mean(episodes, 0)
            bar.set_postfix_str(f"return {scalars['charts/episodic_return']:.2f}", refresh=False)
        bar.update(min(step, args.total_timesteps) - bar.n)
        longest_episode = max(longest_episode, player.lengths.max(), *(length for _, length in episodes))
        is_last = step >= args.total_timesteps
        is_due = is_last or iteration % eval_interval == 0
        is_affordable = eval_steps + args.eval_episodes * longest_episode <= step / 5  # at most a fifth
        if is_due and args.eval_episodes and (is_last or args.eval_interval or is_affordable):
            scalars |= evaluate(agent, args, device, 2)
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
        scores = f"return of best.pt {best_return:.2f}, of the last policy {last_return:.2f}"
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
