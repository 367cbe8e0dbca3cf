"""R2D2: recurrent Q-learning from a prioritized replay of sequences, in one file.

Paper: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (ICLR).

    python r2d2_lstm.py                             # 50 steps of memory, in seconds on one CPU core
    python r2d2_lstm.py --no-recurrent --no-last-action-reward   # the control: a network without memory
    torchrun --nproc-per-node 2 r2d2_lstm.py        # two GPUs, or with --no-cuda two CPU processes
    python r2d2_lstm.py --evaluate runs/NAME/best.pt --eval-episodes 100

The default task, RepeatFirst, shows a card in each step, and always asks for the first one of the episode. A
feed-forward policy that sees the last 4 or 16 cards cannot know it. One that sees all 52 can, and PPO learns
that in fewer CPU-seconds. An LSTM is needed if a stack of whole episodes is too large.

Equations of the paper and of the papers it builds on; the numbering is ours:
    (1)  h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, the value rescaling
    (2)  y_t  = h( r_t + ... + gamma^(k-t-1) r_{k-1} + gamma^(k-t) h^-1( Q'(s_k, argmax_a Q(s_k, a)) ) ) with
         k = min(t + n, end of the episode) and target network Q'; the term with Q' is 0 if s_k is terminal
    (3)  L    = E[ w (y_t - Q(s_t, a_t))^2 / 2 ] over the trained steps, w = P^-beta / max P^-beta in a batch
    (4)  P    = p^alpha / sum p^alpha, where p = eta max_t |y_t - Q_t| + (1 - eta) mean_t |y_t - Q_t|
    (5)  epsilon_i = epsilon^(1 + 7 i / (B - 1)), the probability of a random action in environment i

A window has burn_in steps that only update the LSTM's state, learn_length trained steps, and n_step steps
that only provide targets. Windows begin learn_length steps apart, so each step is trained in one window. An
episode's last window may go on after its end: such steps are not trained (--last-window mask) or trained on the
target 0 (null). With overlap, this window begins earlier instead, and some steps are trained twice. Unlike in
the paper, rewards in targets are divided by their root mean square, and gradients are clipped.

Shapes: B environments, N windows in a batch, L steps in a window, m of them trained, n steps in a return,
D observation (one or more dimensions), A actions, H hidden units, R windows in the replay.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "numpy", "gymnasium>=1.4", "popgym", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import os
import random
import re
import sys
import time
from collections import deque, namedtuple
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(os.getcwd())  # --env-id my_module:MyTask-v0 finds my_module.py in the current folder
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
METRICS = ("q_loss", "td_error", "grad_norm")  # of an update, in its order: grad_norm stays last
# On one GPU, record acting and the update once; replaying them saves CPU overhead. Set it to False for edits that
# need the host in between, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
STATE_SIZE = 2  # vectors in the state of an LSTM: h and c


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
    eval_interval: int = 0  # iterations between evaluations and checkpoints (0: at most ten a run)
    eval_episodes: int = 10  # episodes per evaluation (0: never during training, 10 with --evaluate)
    env_id: str = "popgym:popgym-RepeatFirstEasy-v0"  # gymnasium id; `module:Name-v0` imports the module
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
    norm_reward: bool = True  # divide rewards in targets by the root mean square of all nonzero ones so far
    burn_in: int = 8  # steps at the start of a window that only update the LSTM's state
    learn_length: int = 26  # trained steps m of a window; the next one begins that many steps later
    last_window: Literal["mask", "overlap", "null"] = "mask"  # after the end: untrained, no steps, target 0
    n_step: int = 1  # steps n of the return before the bootstrap, eq. 2
    state_init: Literal["stored", "zero"] = "stored"  # LSTM's state at a window's start: as when acting, or 0
    buffer_size: int = 20_000  # windows R in the replay of each process
    checkpoint_replay: bool = True  # save the replay of process 0 in checkpoints (gigabytes for images)
    learning_starts: int = 2_000  # windows in all replays before the first update, times learn_length
    replay_ratio: float = 8.0  # mean number of updates that train on each step
    batch_size: int = 1024  # trained steps per update (N windows of m steps), in total across processes
    target_interval: int = 50  # updates between copies of the network to the target network
    epsilon: float = 0.4  # environment 0's probability of a random action; others have smaller ones, eq. 5
    max_grad_norm: float = 10.0  # larger gradients are scaled down to this norm (1e9: never)


# ---- Networks ----------------------------------------------------------------------------------------------
def make_head(width, num_outputs):
    """Make a head of the network: a hidden layer, and `num_outputs` outputs."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs))


class QNetwork(nn.Module):
    """Encoder, LSTM and dueling heads (Wang et al. 2016), and the statistics that scale rewards.

    Dropout and batch norm do not fit: the script never calls train() or eval().
    """

    def __init__(self, envs, args):
        super().__init__()
        self.args = args
        self.num_actions = int(envs.single_action_space.n)
        # Number of the rewards that are not zero, and sum of their squares. They begin at 1e-6, so that their
        # quotient is 1 before the first reward, and always with --no-norm-reward. Soon the 1e-6 matter little
        self.register_buffer("reward_sums", torch.full((2,), 1e-6).double())

        # Byte images have channels last [..., H, W, C], first [..., C, H, W], or none [H, W]. Images of floats are
        # flattened: let your environment return bytes
        space = envs.single_observation_space
        self.is_channels_last = len(space.shape) > 2 and space.shape[-1] < space.shape[-3]
        sides = space.shape[-3:-1] if self.is_channels_last else space.shape[-2:]
        self.obs_scale = float(space.high.max()) if space.dtype == np.uint8 else 1.0
        # The three convolutions below turn 36 pixels into 8, then 3, then 1. Smaller images are flattened
        self.is_image = self.obs_scale > 1 and len(sides) == 2 and min(sides) >= 36

        # Encoder: for images, the convolutions of Mnih et al. 2015 (output channels, kernel, stride)
        width = args.hidden_size
        layers = []
        if self.is_image:
            for size in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                layers += [nn.LazyConv2d(*size), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(width), nn.ReLU())
        self.encode(torch.zeros(1, *space.shape))  # a dummy pass tells the lazy layers their input sizes

        # Core: an LSTM, which also reads the last action and reward
        num_inputs = width
        if args.last_action_reward:
            num_inputs += self.num_actions + 1
        if args.recurrent:
            self.core = nn.LSTM(num_inputs, width, batch_first=True)
            # Forget gates begin at tau / (1 + tau), with tau from 1 to memory_span (Tallec & Ollivier 2018).
            # torch adds two bias vectors. Each holds those of the input, forget, cell and output gates, in this
            # order
            nn.init.zeros_(self.core.bias_hh_l0)
            log_tau = torch.linspace(0, np.log(args.memory_span), width)
            self.core.bias_ih_l0.data[width : 2 * width] = log_tau
        else:
            self.core = nn.Linear(num_inputs, width)
        # Dueling heads
        self.advantage = make_head(width, self.num_actions)
        self.value = make_head(width, 1)

    def encode(self, obs):
        """Encode rows of observations [N, *D] to [N, H]."""
        x = obs.float() / self.obs_scale
        if self.is_image:
            if self.is_channels_last:
                x = x.movedim(-1, -3)
            x = x.reshape(len(x), -1, *x.shape[-2:])  # stacked frames become channels
        return self.encoder(x)

    def forward(self, obs, last_action, last_reward, state):
        """Return Q [N, L, A] and the LSTM's state after the last step, which is (h, c) as a tensor [N, 2, H].

        Observations [N, L, *D] come after last_action [N, L], -1 if there is none, and last_reward [N, L].
        """
        x = self.encode(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])  # [N, L, H]
        if self.args.last_action_reward:
            actions = torch.arange(self.num_actions, device=x.device)
            is_last_action = last_action.unsqueeze(-1) == actions  # one-hot [N, L, A], or zeros for -1
            x = torch.cat((x, is_last_action, last_reward.unsqueeze(-1)), -1)
        if self.args.recurrent:
            # The kernels for GPUs need h and c in memory of their own
            h, c = state.transpose(0, 1).unsqueeze(1).contiguous()  # [1, N, H] each
            x, (h, c) = self.core(x, (h, c))  # [N, L, H]
            state = torch.cat((h, c)).transpose(0, 1)  # [N, 2, H]
        else:
            x = self.core(x).relu()
        # The mean of Q over all actions is the value
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(-1, keepdim=True)
        return q, state


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs: int):
    """Make environments whose observations are arrays of numbers; exits if they are not supported.

    Training and each evaluation have their own; a wrapper's statistics begin from scratch in each.
    """
    wrappers = []  # add your own, such as [gym.wrappers.TimeAwareObservation]; evaluations make new ones
    options = {}
    try:
        if "MiniGrid-" in args.env_id:
            # One-hot cells and the direction, without the text of the mission, in bytes
            from minigrid.wrappers import OneHotPartialObsWrapper

            numbers = partial(gym.wrappers.FilterObservation, filter_keys=["image", "direction"])
            bits = Box(0, 1, (7 * 7 * 20 + 4,), np.uint8)
            to_bits = partial(gym.wrappers.TransformObservation, func=np.uint8, observation_space=bits)
            wrappers += [OneHotPartialObsWrapper, numbers, gym.wrappers.FlattenObservation, to_bits]
        mode = args.vectorization
        if mode == "auto":
            # None is the task's own vector environment, if it has one; that one takes no wrappers
            mode = "sync" if wrappers else None
        if "ALE/" in args.env_id:
            import ale_py

            gym.register_envs(ale_py)
            # ALE's vector environment skips frames and gives one grey image of 84 x 84. Single ones, used with a
            # wrapper or --vectorization sync, give colour images of 210 x 160
            if mode is None:
                options = {"stack_num": 1, "reward_clipping": False}
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers, **options)
    except (gym.error.Error, ModuleNotFoundError) as error:
        fail(f"--env-id {args.env_id}: {error}")

    # Exit now if training would fail, or run wrong, later
    obs_space = envs.single_observation_space
    action_space = envs.single_action_space
    if not obs_space.is_np_flattenable:
        fail(f"--env-id {args.env_id}: observations must be a fixed number of numbers, not {obs_space}")
    if not isinstance(action_space, Discrete):
        fail(f"--env-id {args.env_id}: actions must be Discrete, not {action_space}")
    if envs.metadata.get("autoreset_mode") == AutoresetMode.DISABLED:
        fail(f"--env-id {args.env_id}: the autoreset mode must be NEXT_STEP or SAME_STEP, not DISABLED")
    if not isinstance(obs_space, Box) or not obs_space.shape:
        envs = gym.wrappers.vector.FlattenObservation(envs)  # discrete observations become one-hot
    return envs


# The network's input at one step: the observation [*D], the action and the reward before it, and the LSTM's
# state [2, H] before it. In an episode's first reading, the last three are -1, 0 and zeros.
Reading = namedtuple("Reading", "obs last_action last_reward state")


class Player:
    """Plays in B environments, and holds the network's next inputs.

    After each step, `readings` lists pairs (environment, Reading): what the network is shown next, and before
    it, under SAME_STEP autoreset, the last observation of an episode that ended.
    """

    def __init__(self, agent, envs, args, epsilons, device, seed):
        self.agent = agent
        self.envs = envs
        self.args = args
        self.epsilons = epsilons.to(device)  # [B]
        self.is_same_step = envs.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
        self.dtype = np.uint8 if envs.single_observation_space.dtype == np.uint8 else np.float32
        num_envs = envs.num_envs
        self.is_over = np.zeros(num_envs, bool)  # whether the last step ended an episode
        self.returns = np.zeros(num_envs)  # of the current episodes, or of those that the last step ended
        self.lengths = np.zeros(num_envs, int)
        self.readings = []

        # The network's next inputs, changed in place, as CUDA graphs require
        obs, infos = envs.reset(seed=seed)
        with device:
            self.obs = torch.as_tensor(np.array(obs, self.dtype))  # [B, *D]
            self.last_action = torch.zeros(num_envs).long()
            self.last_reward = torch.zeros(num_envs)
            self.state = torch.zeros(num_envs, STATE_SIZE, args.hidden_size)  # [B, 2, H]
        self.show(obs, 0, 0, ~self.is_over)  # every environment begins an episode

    @torch.no_grad()
    def act(self):
        """Choose actions [B], at random with probability epsilon; works in place, as CUDA graphs require."""
        inputs = (x.unsqueeze(1) for x in (self.obs, self.last_action, self.last_reward))  # L = 1
        q, state = self.agent(*inputs, self.state)  # [B, 1, A], [B, 2, H]
        # Draw a random action everywhere, and take it with probability epsilon: shapes are fixed
        is_random = torch.rand_like(self.epsilons) < self.epsilons
        random_action = torch.randint_like(self.last_action, q.shape[-1])
        self.last_action.copy_(torch.where(is_random, random_action, q.squeeze(1).argmax(-1)))
        self.state.copy_(state)
        return self.last_action

    def step(self, act):
        """Take a step in each environment with `act`, which is self.act or its CUDA graph."""
        actions = act().cpu().numpy()
        obs, rewards, terminated, truncated, infos = self.envs.step(
            actions + self.envs.single_action_space.start
        )
        was_over = self.is_over
        self.rewards = np.array(rewards, np.float64)  # integers might overflow when they are squared
        self.terminated = terminated
        self.is_over = terminated | truncated
        # Where an episode was over, count again. Under NEXT_STEP autoreset, this step was only a reset, with
        # length and reward 0; under SAME_STEP, it was the first step of the next episode
        self.returns[was_over] = 0
        self.returns += self.rewards
        self.lengths[was_over] = 0
        self.lengths += ~was_over | self.is_same_step
        # Under SAME_STEP autoreset, `obs` already begins the next episode
        self.readings = []
        for i in np.flatnonzero(self.is_over & self.is_same_step):
            final_obs = infos["final_obs"][i]
            reading = Reading(final_obs, actions[i], self.rewards[i], self.state[i].clone())
            self.readings.append((i, reading))
        self.show(obs, actions, self.rewards, self.is_over if self.is_same_step else was_over)

    def show(self, obs, actions, rewards, is_first):
        """Set the network's next inputs from arrays [B, ...]; an episode's first input is only its obs."""
        for name, x in (("observation", obs), ("reward", rewards)):
            for i, *_ in np.argwhere(~np.isfinite(x)):  # the first bad number ends the program
                fail(f"{self.args.env_id}: {name} of environment {i} is not finite in step {self.lengths[i]}")
        obs = np.array(obs, self.dtype)  # a copy, since some environments reuse their arrays

        # Where an episode begins, there is no last action and no last reward, and the memory is empty
        last_action = np.where(is_first, -1, actions)
        last_reward = np.where(is_first, 0, rewards)
        # One copy to the device for three small arrays, stacked to [3, B]
        rows = torch.as_tensor(np.float32((last_action, last_reward, ~is_first)), device=self.obs.device)
        self.obs.copy_(torch.as_tensor(obs))
        self.last_action.copy_(rows[0])
        self.last_reward.copy_(rows[1])
        self.state.mul_(rows[2, :, None, None])

        # The same for the replay: map walks along the four arrays, and makes a Reading of each environment
        self.readings += enumerate(map(Reading, obs, last_action, last_reward, self.state.clone()))


# ---- Storage -----------------------------------------------------------------------------------------------
class SequenceReplay:
    """Prioritized replay of whole windows of L readings, in `data` {name: [R, L, ...] or [R, ...]}.

    An episode of 12 steps and its windows with burn_in 2 (b), learn_length 5 (m) and n_step 1 (t):

        step      0  1  2  3  4  5  6  7  8  9 10 11 12      12: the observation after the last step
        window 1  m  m  m  m  m  t                           stored when step 5 is read
        window 2           b  b  m  m  m  m  m  t            stored when step 10 is read
        window 3                          b  b  m  m  t      stored when the episode ends; its end is padded

    So each window ends at the newest reading. The action and the reward of a step are in the reading after
    it. Window 1 lacks burn-in steps: copies of the first reading fill their places, and are not used.
    """

    def __init__(self, envs, args, device):
        self.args = args
        self.length = args.burn_in + args.learn_length + args.n_step  # L
        self.batch_windows = max(1, args.batch_size // (args.learn_length * WORLD_SIZE))  # N
        self.num_added = 0
        self.windows = []  # new windows, which `store` writes
        # For each environment, by its number: the newest readings of its episode (L at most), and how many of
        # them belong to the next window. Both count the copies in front of the episode's first reading
        self.recent = {}
        self.num_pending = {}
        size = args.buffer_size
        space = envs.single_observation_space
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        try:
            with device:
                self.data = {
                    "obs": torch.zeros(size, self.length, *space.shape, dtype=dtype),  # [R, L, *D]
                    "last_action": torch.zeros(size, self.length).long(),  # [R, L]
                    "last_reward": torch.zeros(size, self.length),  # [R, L]
                    "state": torch.zeros(size, STATE_SIZE, args.hidden_size),  # [R, 2, H], see `cut`
                    "end": torch.zeros(size).long(),  # index of the last reading; copies of it follow
                    "is_terminated": torch.zeros(size).bool(),  # did the episode terminate at `end`
                    "is_warm": torch.zeros(size).bool(),  # are all burn-in steps real, not padding
                    "priority": torch.zeros(size),  # p of eq. 4
                }
        except RuntimeError:
            fail(f"--buffer-size ({size}) must be smaller: the memory of {device} cannot hold the windows")

    def add(self, player):
        """Add the player's readings, and cut the windows that are complete or end with the episode."""
        burn_in = self.args.burn_in
        learn_length = self.args.learn_length
        for i, reading in player.readings:
            if reading.last_action == -1:
                # An episode begins. is_over of the player may still be that of the episode before it
                self.recent[i] = deque([reading] * (burn_in + 1), self.length)
                self.num_pending[i] = burn_in + 1
                continue
            self.recent[i].append(reading)
            self.num_pending[i] += 1
            is_over = player.is_over[i]
            # Cut a window if it is full, and, at the end of an episode, what is left if it has at least one
            # trained step and the reading after it. An end can need both
            while self.num_pending[i] == self.length or (is_over and self.num_pending[i] > burn_in + 1):
                num_readings = self.num_pending[i]
                if is_over and self.args.last_window == "overlap":
                    # Begin earlier if that is needed to have learn_length trained steps
                    num_readings = max(num_readings, burn_in + learn_length + 1)
                window = self.cut(list(self.recent[i])[-num_readings:], player.terminated[i])
                self.windows.append(window)
                # The next window shares the newest burn_in + n_step readings. After an episode, the number
                # means nothing until the next one begins
                self.num_pending[i] -= learn_length

    def cut(self, readings, is_terminated):
        """Return the window of these readings, by the names in `data`; copies of the last one fill it up."""
        padded = readings + readings[-1:] * (self.length - len(readings))
        # `add` puts the same object in front of an episode burn_in times. If the window begins with such copies,
        # its state is the one before the first trained step, and `unroll` leaves burn-in out. So do not replace
        # the readings in `recent` by changed copies: they would count as real steps
        is_warm = readings[0] is not readings[1]
        return {
            "obs": np.stack([x.obs for x in padded]),
            "last_action": [x.last_action for x in padded],
            "last_reward": [x.last_reward for x in padded],
            "state": readings[0 if is_warm else self.args.burn_in].state,
            "end": len(readings) - 1,
            "is_terminated": is_terminated,
            "is_warm": is_warm,
        }

    def store(self):
        """Replace the oldest windows by the new ones, with the largest priority; returns how many are new.

        All new windows are written at once, a field at a time: each copy to a GPU makes the host wait.
        """
        num_new = len(self.windows)
        if not num_new:
            return 0
        priority = self.data["priority"]
        self.num_added += num_new
        windows = self.windows[-len(priority) :]  # the newest, if there are more than places
        self.windows = []
        places = torch.arange(self.num_added - len(windows), self.num_added, device=priority.device)
        places %= len(priority)
        for name in windows[0]:
            values = [window[name] for window in windows]
            # States are on the device already
            values = torch.stack(values) if name == "state" else torch.as_tensor(np.array(values))
            self.data[name][places] = values.to(self.data[name])
        largest = priority.max()
        priority[places] = torch.where(largest > 0, largest, 1.0)
        return num_new

    def sample(self, alpha=0.9, beta=0.6):
        """Draw window indices [N] by eq. 4, and weights w [N] of eq. 3.

        Draws are stratified (Schaul et al. 2016): the sum of all p^alpha is cut into N equal parts, and a
        random place in each of them belongs to the window that is drawn.
        """
        cumulative = self.data["priority"].pow(alpha).double().cumsum(0)
        parts = torch.arange(self.batch_windows, device=cumulative.device)  # [N]
        places = parts + torch.rand_like(parts, dtype=torch.float64)  # float32 would round up to the end
        index = torch.searchsorted(cumulative, places / len(places) * cumulative[-1])
        index = index.clamp(max=len(cumulative) - 1)  # beyond the end only if a priority is not finite
        weights = self.data["priority"][index].pow(-alpha * beta)  # the sum in P cancels
        return index, weights / weights.max()

    def state_dict(self):
        """Return what a checkpoint keeps: all windows. Readings that form no window yet are left out."""
        return self.data | {"num_added": self.num_added}

    def load_state_dict(self, state):
        """Take over the windows of a checkpoint."""
        self.num_added = state["num_added"]
        for name, x in self.data.items():
            x.copy_(state[name])


# ---- R2D2 --------------------------------------------------------------------------------------------------
def value_rescale(x, eps=1e-3):
    """Return h(x) of eq. 1 (Pohlen et al. 2018), rearranged to avoid subtracting nearly equal numbers."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def inverse_value_rescale(y, eps=1e-3):
    """Return h^-1(y), rearranged in the same way, so that small values survive in float32."""
    # w = sqrt(|x| + 1) - 1 is the positive root of eps w^2 + k w = |y|, and |x| = w (w + 2)
    k = 1 + 2 * eps
    w = 2 * y.abs() / (k + (k * k + 4 * eps * y.abs()).sqrt())
    return y.sign() * w * (w + 2)


def epsilon_ladder(num_envs, epsilon):
    """Return epsilon_i [B] of eq. 5 (Horgan et al. 2018)."""
    return epsilon ** (1 + 7 * torch.arange(num_envs) / max(num_envs - 1, 1))


def collect_steps(player, act, replay, args):
    """Take `num_steps` steps in each environment, and add what was read before each to the replay.

    Returns (return, length) of episodes that ended in the half of the environments that explores less, the
    steps taken in all processes, and the new windows per process: 0 until learning_starts is reached.
    """
    episodes = []
    steps_taken = 0  # without those that only reset an environment
    num_rewards = 0  # that are not zero
    sum_of_squares = 0.0  # of rewards
    half = len(player.is_over) // 2
    for _ in range(args.num_steps):
        replay.add(player)
        player.step(act)
        for i in half + np.flatnonzero(player.is_over[half:]):
            episodes.append((player.returns[i], player.lengths[i]))
        steps_taken += (player.lengths > 0).sum()
        num_rewards += (player.rewards != 0).sum()
        sum_of_squares += np.square(player.rewards).sum()
    num_windows = replay.store()
    is_ready = replay.num_added * args.learn_length * WORLD_SIZE > args.learning_starts

    # Means over processes; with one process, average does nothing
    numbers = [steps_taken, num_windows, is_ready, num_rewards, sum_of_squares]
    means = average(torch.tensor(numbers, dtype=torch.float64, device=player.obs.device))
    if args.norm_reward:
        player.agent.reward_sums += means[3:]
    steps_taken, num_windows, share_ready = means[:3].tolist()
    if round(share_ready * WORLD_SIZE) < WORLD_SIZE:
        num_windows = 0  # wait for all processes
    return episodes, round(steps_taken * WORLD_SIZE), num_windows


def unroll(agent, windows, args):
    """Return Q [N, m + n, A] of the steps after burn_in, which updates the state without gradient."""
    inputs = [windows[name] for name in ("obs", "last_action", "last_reward")]  # [N, L, ...] each
    state = windows["state"]  # before the first reading, or before the first trained one if not is_warm
    if args.state_init == "zero":
        state = torch.zeros_like(state)
    if args.burn_in and args.recurrent:
        with torch.no_grad():
            _, burned_in = agent(*(x[:, : args.burn_in] for x in inputs), state)
        state = torch.where(windows["is_warm"][:, None, None], burned_in, state)
    q, _ = agent(*(x[:, args.burn_in :] for x in inputs), state)
    return q


def compute_targets(q, target_q, rewards, end, is_terminated, gamma, n_step):
    """Compute y_t [N, m] of eq. 2 with double Q-learning (van Hasselt et al. 2016).

    q and target_q [N, m + n, A] belong to steps 0 to m + n - 1; rewards[:, t] [N, m + n - 1] follows step t.
    Step `end` [N], from 1 to m + n - 1, is the last of the window or its episode; from there on y_t is zero.
    """
    steps = torch.arange(q.shape[1], device=q.device)  # [m + n]
    t = steps[:-n_step]  # [m]
    last = end.unsqueeze(1)  # [N, 1]
    k = (t + n_step).minimum(last)  # [N, m]

    # Rewards after steps t to k - 1: unfold lists the n rewards after each step t, [N, m, n]
    is_before_end = steps[:-1] < last  # [N, m + n - 1]
    discounts = gamma ** torch.arange(n_step, device=q.device)
    returns = (rewards * is_before_end).unfold(1, n_step, 1) @ discounts  # [N, m]

    # The value of step k: its action is chosen by Q, and valued by Q'. A terminal step has none
    best_action = q.argmax(2, keepdim=True)  # [N, m + n, 1]
    values = inverse_value_rescale(target_q.gather(2, best_action).squeeze(2))  # [N, m + n]
    is_terminal = is_terminated.unsqueeze(1) & (k == last)  # [N, m]
    values_at_k = values.gather(1, k) * ~is_terminal  # [N, m]
    discount = gamma ** (k - t).clamp(min=0)  # k < t only after the end, where y_t is zero
    return value_rescale(returns + discount * values_at_k) * (t < last)


def sequence_priority(td_errors, is_trained, eta=0.9):
    """Compute p [N] of eq. 4 from the TD errors [N, m] of steps where is_trained [N, m]."""
    errors = td_errors.abs() * is_trained
    return eta * errors.amax(1) + (1 - eta) * errors.sum(1) / is_trained.sum(1)


def r2d2_loss(agent, target, windows, weights, args):
    """Return eq. 3 and two METRICS as sums over the trained steps, their number, and new priorities [N]."""
    # Steps are counted from the first trained one. Those after the end of an episode are not trained
    end = windows["end"] - args.burn_in  # [N]
    is_trained = torch.arange(args.learn_length, device=end.device) < end.unsqueeze(1)  # [N, m]
    if args.last_window == "null":
        is_trained[:] = True  # they are, with target 0

    # The action and the reward of a step are in the reading after it
    first = args.burn_in + 1
    actions = windows["last_action"][:, first : first + args.learn_length]  # [N, m]
    num_rewards, sum_of_squares = agent.reward_sums
    rewards = windows["last_reward"][:, first:] / (sum_of_squares / num_rewards).sqrt()  # [N, m + n - 1]

    # Targets, from both networks. Only Q of the actions taken has a gradient
    q = unroll(agent, windows, args)  # [N, m + n, A]
    with torch.no_grad():
        target_q = unroll(target, windows, args)
        targets = compute_targets(
            q, target_q, rewards, end, windows["is_terminated"], args.gamma, args.n_step
        )  # [N, m]

    # Sums, which the caller divides by the number of trained steps in all processes
    q_taken = q[:, : args.learn_length].gather(2, actions.unsqueeze(2)).squeeze(2)  # [N, m]
    td_errors = (targets - q_taken) * is_trained
    losses = 0.5 * weights.unsqueeze(1) * td_errors.square()  # [N, m]
    # A metric of your own goes here, times is_trained, and into METRICS before grad_norm
    metrics = torch.stack((losses, td_errors.abs())).detach()  # [2, N, m]
    priorities = sequence_priority(td_errors.detach(), is_trained)
    return losses.sum(), metrics.sum((1, 2)), is_trained.sum(), priorities


def update_network(agent, target, optimizer, replay, args):
    """Take one gradient step on sampled windows, update their priorities, and return METRICS [3].

    Shapes are fixed and the host never waits, so that a CUDA graph can record it.
    """
    index, weights = replay.sample()
    windows = {name: x[index] for name, x in replay.data.items()}
    loss, metrics, num_trained, priorities = r2d2_loss(agent, target, windows, weights, args)
    # The number of steps in all processes, divided by the number of processes. As average(sum) is the sum
    # over all of them divided by the same number, average(sum) / num_trained is the mean over all steps
    num_trained = average(num_trained.float())
    optimizer.zero_grad()
    (loss / num_trained).backward()
    average_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    # A priority of zero would never be drawn again. NaN would break the draws, before the training loop can
    # say that the losses are not finite
    replay.data["priority"][index] = priorities.nan_to_num().clamp(min=1e-8)
    return torch.cat((average(metrics / num_trained), grad_norm.unsqueeze(0)))


# ---- Evaluation --------------------------------------------------------------------------------------------
def evaluate(agent, args, device, stream):
    """Score one episode with greedy actions in each of `eval_episodes` environments."""
    envs = make_envs(args, args.eval_episodes or 10)
    epsilons = torch.zeros(envs.num_envs)
    player = Player(agent, envs, args, epsilons, device, seed_everything(args.seed, stream))
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros_like(returns)
    is_running = lengths == 0
    while is_running.any() and lengths.max() < 10_000:
        player.step(player.act)
        returns += player.rewards * is_running
        lengths += is_running
        is_running &= ~player.is_over
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
    step: int = 0  # environment steps taken, in total across environments
    eval_steps: int = 0  # environment steps of evaluations
    cpu_seconds: float = 0.0  # of training in process 0
    best_score: float | None = None  # mean return of best.pt, None before the first evaluation
    last_score: float | None = None  # mean return of the newest policy, None if it was not evaluated
    num_updates: int = 0
    updates_due: float = 0.0  # the fraction of an update that is left over


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
    """Make environments, the parts of each checkpoint, and the replay (None with --evaluate).

    They are on the device of the tensor `learning_rate`, and loaded from `checkpoint` if there is one.
    """
    device = learning_rate.device
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    seed_everything(args.seed, 0)  # the same weights in every process
    agent = QNetwork(envs, args).to(device)
    target = deepcopy(agent)
    options = {"lr": learning_rate, "capturable": learning_rate.is_cuda}
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True, **options)

    # Load the checkpoint, of which --evaluate needs no more than this
    parts = {"agent": agent, "target": target, "optimizer": optimizer}
    if checkpoint:
        try:
            for name, part in parts.items():
                part.load_state_dict(checkpoint[name])
        except (KeyError, RuntimeError, ValueError):
            fail(
                f"{args.evaluate or args.resume}: not the network of --env-id, --hidden-size, "
                "--recurrent, --last-action-reward and this file"
            )
        optimizer.param_groups[0] |= options  # not the saved ones; do so for each group that you add
    if args.evaluate:
        return envs, parts, None

    # The replay: a new one, or that of the checkpoint if the task is the same. Windows of other lengths do
    # not fit into it
    replay = SequenceReplay(envs, args, device)
    if checkpoint and "replay" in checkpoint and checkpoint["args"].env_id == args.env_id:
        for name in ("burn_in", "learn_length", "n_step", "buffer_size"):
            saved = getattr(checkpoint["args"], name)
            if getattr(args, name) != saved:
                fail(f"--{name.replace('_', '-')} must be {saved}, as in the replay of {args.resume}")
        replay.load_state_dict(checkpoint["replay"])
    return envs, parts, replay


def train(args, run_path: Path, checkpoint=None):
    """Train, from `checkpoint` if there is one; with --evaluate, only score the checkpoint.

    Random numbers are seeded by --seed and 0 for the weights, 1 for training (and again in each iteration, by
    its number), 2 for evaluations during training (always the same episodes), 3 for --evaluate.
    """
    # Set up
    device = set_up_device(args)
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, so that graphs see it change
    envs, parts, replay = set_up(args, checkpoint, learning_rate)
    agent, target, optimizer = parts.values()
    if args.evaluate:  # on episodes other than those that selected best.pt
        print(evaluate(agent, args, device, 3))
        return
    progress = checkpoint["progress"] if checkpoint else Progress()
    save = partial(save_checkpoint, run_path, args, progress)
    all_parts = parts | {"replay": replay} if args.checkpoint_replay else parts
    if RANK == 0:
        writer = open_run(run_path, args, progress.step)
        print(
            f"{run_path}: {type(envs.unwrapped).__name__}, {args.num_envs} environments, step {progress.step}"
        )
        if not checkpoint:
            save(all_parts, "checkpoint.pt")
        else:
            # best.pt may be newer than checkpoint.pt. Without one of this task, the next score is the best
            progress.best_score = None
            if (run_path / "best.pt").exists():
                best = load_checkpoint(run_path / "best.pt")
                if best["args"].env_id == args.env_id:
                    progress.best_score = best["progress"].best_score
        if progress.step >= args.total_timesteps:
            print(f"{run_path}: raise --total-timesteps to train on")

    def score_policy():
        """Evaluate, log the scores, and keep the policy in best.pt unless an earlier one was better."""
        scores = evaluate(agent, args, device, 2)
        for name, score in scores.items():
            writer.add_scalar(name, score, progress.step)
        progress.eval_steps += round(args.eval_episodes * scores["eval/episodic_length"])
        progress.last_score = scores["eval/episodic_return"]
        if progress.best_score is None or progress.last_score >= progress.best_score:
            progress.best_score = progress.last_score
            save(parts, "best.pt")

    # Each process gets large and small probabilities of random actions
    epsilons = epsilon_ladder(args.num_envs, args.epsilon)[RANK::WORLD_SIZE]
    seed = seed_everything(args.seed, 1, progress.iteration, RANK)
    player = Player(agent, envs, args, epsilons, device, seed)
    act = player.act
    update = partial(update_network, agent, target, optimizer, replay, args)
    use_graphs = CUDA_GRAPHS and learning_rate.is_cuda and WORLD_SIZE == 1
    eval_interval = args.eval_interval or args.total_timesteps // (10 * args.num_envs * args.num_steps) + 1
    longest_episode = 0
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

            # Collect steps in each environment, and store the windows that they complete
            episodes, steps_taken, num_windows = collect_steps(player, act, replay, args)
            progress.step += steps_taken

            # Update as often as --replay-ratio asks for; the fraction of an update is left for later
            progress.updates_due += args.replay_ratio * num_windows / replay.batch_windows
            num_updates = int(progress.updates_due)
            progress.updates_due -= num_updates
            metrics = torch.zeros(len(METRICS), device=device)
            for _ in range(num_updates):
                metrics += update() / num_updates
                progress.num_updates += 1
                if progress.num_updates % args.target_interval == 0:
                    target.load_state_dict(agent.state_dict())  # in place, as the graph needs
            if use_graphs and num_updates and progress.num_updates > 2:
                # Record after some updates, as Adam creates its state in the first step
                act = capture(act)
                update = capture(update)
                use_graphs = False
            progress.cpu_seconds += time.process_time() - cpu_start

            # Log, in process 0 alone: losses are of all processes, episodes its own. The rest of the loop
            # must not call `average`, since the other processes do not get there
            if RANK > 0:
                continue
            if not metrics.isfinite().all():
                fail(f"{args.env_id}: losses are not finite at step {progress.step}")
            scalars = {f"losses/{name}": x for name, x in zip(METRICS, metrics.tolist()) if num_updates}
            scalars["charts/cpu_seconds"] = progress.cpu_seconds
            scalars["charts/SPS"] = steps_taken / (time.time() - start)
            scalars["charts/num_updates"] = progress.num_updates
            scalars["charts/learning_rate"] = learning_rate.item()
            if episodes:
                mean_return, mean_length = np.mean(episodes, 0)
                scalars["charts/episodic_return"] = mean_return
                scalars["charts/episodic_length"] = mean_length
                bar.set_postfix_str(f"return {mean_return:.2f}", refresh=False)
            for name, value in scalars.items():
                writer.add_scalar(name, value, progress.step)
            bar.update(min(progress.step, args.total_timesteps) - bar.n)

            # Save, before an evaluation that might fail
            is_last = progress.step >= args.total_timesteps
            is_due = is_last or progress.iteration % eval_interval == 0
            if is_due or time.time() - saved_at > 600:
                writer.flush()
                save(all_parts, "checkpoint.pt")
                saved_at = time.time()

            # Evaluate. Without --eval-interval, evaluations take at most a fifth of the steps so far. The
            # longest episode so far predicts how many steps the next evaluation takes
            longest_episode = max([longest_episode, *player.lengths, *(length for _, length in episodes)])
            eval_steps = progress.eval_steps + args.eval_episodes * longest_episode
            is_affordable = args.eval_interval or eval_steps <= progress.step / 5
            if is_due and is_affordable and args.eval_episodes and not is_last:
                score_policy()

    # Evaluate the last policy
    if RANK > 0:
        return
    # None: the last policy is not evaluated yet, or there is no best.pt of this task
    if args.eval_episodes and None in (progress.best_score, progress.last_score):
        score_policy()
        save(all_parts, "checkpoint.pt")
    writer.close()
    scores = "not evaluated"
    if None not in (progress.best_score, progress.last_score):
        scores = (
            f"return of best.pt {progress.best_score:.2f}, of the last policy {progress.last_score:.2f} "
            f"after {progress.num_updates} updates"
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
    counts = """num_envs hidden_size memory_span total_timesteps num_steps learn_length n_step buffer_size
        batch_size target_interval""".split()
    # Settings that are numbers must be at least 0, and these at least 1
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if type(value) in (int, float) and not value >= least:  # also if it is NaN
            fail(f"--{name.replace('_', '-')} ({value}) must be at least {least}")
    if args.num_envs % WORLD_SIZE:
        fail(f"--num-envs ({args.num_envs}) must be divisible by the number of processes ({WORLD_SIZE})")
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
