"""R2D2: recurrent Q-learning from a prioritized replay of sequences, in one file.

Paper: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (ICLR).

    python r2d2_lstm.py                             # episodes of 52 cards, in half a minute on one CPU core
    python r2d2_lstm.py --no-recurrent --no-last-action-reward   # the control: a network without memory
    torchrun --nproc-per-node 2 r2d2_lstm.py        # two GPUs, or with --no-cuda two CPU processes
    python r2d2_lstm.py --evaluate runs/NAME/best.pt --eval-episodes 100

The default task, RepeatFirst, shows 52 cards one by one, and always asks for the first one. A policy that
sees only a stack of the last few cards cannot know it. PPO on a stack of all 52 learns this faster: an LSTM
pays off if whole episodes do not fit into a stack.

Equations of the paper and of the papers it builds on; the numbering is ours:
    (1)  h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, the value rescaling
    (2)  y_t  = h( r_t + ... + gamma^(k-t-1) r_{k-1} + gamma^(k-t) h^-1( Q'(s_k, argmax_a Q(s_k, a)) ) ) with
         k = min(t + n, end of the episode) and target network Q'; the term with Q' is 0 if s_k is terminal
    (3)  L    = E[ w (y_t - Q(s_t, a_t))^2 / 2 ] over the trained steps, with importance-sampling weights
         w = P^-beta / max P^-beta, the maximum over the batch of one process
    (4)  P    = p^alpha / sum p^alpha, where p = eta max_t |y_t - Q_t| + (1 - eta) mean_t |y_t - Q_t|
    (5)  epsilon_i = epsilon^(1 + 7 i / (B - 1)), the probability of a random action in environment i

A window has burn_in steps that only update the LSTM's state, learn_length trained steps, and n_step steps
that only provide targets. The main differences to the paper:
    - one process steps a vector of environments, in place of 256 distributed actors;
    - windows begin learn_length steps apart, so that each step is trained in exactly one window (the paper's
      overlap by half), and a new window gets the largest priority (the paper's actors compute it);
    - a window is drawn 8 times on average (about once in the paper);
    - rewards in targets are divided by the root mean square of those that are not zero. h alone does not make
      one learning rate fit all tasks: it compresses large values, but only about halves small ones. Zeros do
      not count, as where rewards are rare, they would make the mean tiny and the quotients huge;
    - gradients are clipped, Adam has its usual eps of 1e-8, and images are not stacked (four in the paper);
    - settings are for small tasks on a CPU: n is 1 (5 in the paper), gamma 0.98 (0.997), H 64 (512), and the
      target network is copied every 100 updates (2,500). Forget gates begin with large biases.

Shapes: B environments, N windows in a batch, L steps in a window, m of them trained, n steps in a return,
D observation (one or more dimensions), A actions, H hidden units, R windows in the replay. All are numbers
of one process; only in eq. 5, B counts the environments of all processes.

The file has two parts. The algorithm comes first, with its loop in `train`. The part `Run` at the end is
about the run folder, the log, checkpoints, processes and the command line.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.4", "numpy", "gymnasium>=1.1", "popgym", "tyro", "tensorboard", "wandb", "tqdm"]
# ///
import math
import operator
import os
import random
import re
import shlex
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import FlattenObservation
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# --env-id my_module:MyTask-v0 finds my_module.py in the current folder, that of this file, and its parent
sys.path += [os.getcwd(), *map(str, Path(__file__).resolve().parents[:2])]
RANK = int(os.environ.get("RANK", 0))  # number of this process, from torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# On one GPU, acting and the update are recorded as CUDA graphs, which saves CPU overhead. Set this to False
# for edits that a graph cannot record, such as print, .item() or `if` on a tensor
CUDA_GRAPHS = True
MAX_EPISODE_STEPS = 10_000  # evaluations cut longer episodes
# Independent streams of random numbers, as in seed_everything(args.seed, WEIGHTS)
WEIGHTS, TRAINING, EVALUATION, FINAL_EVALUATION = range(4)
STATE_SIZE = 2  # vectors in the state of an LSTM: h and c
# For the part `Run`: if one of these settings changes with --resume, the score of best.pt no longer counts.
# The seed is one of them, as it chooses the episodes of evaluations
TASK_SETTINGS = ("env_id", "seed", "eval_episodes")
# Named in the message about a checkpoint that does not fit
NETWORK_FLAGS = "--env-id, --hidden-size, --recurrent, --last-action-reward"

# Defined in the part `Run` at the end, but used before it:
#   total(x)            sums a tensor over all processes; with one process it changes nothing
#   seed_everything     seeds all random generators from a few integers, and returns a seed for environments
#   Recorded(f, ...)    calls the function f; on one GPU, it records f as a CUDA graph and replays that
#   run.load(name=part) lets checkpoints hold the state of a part, and restores it if the run is resumed
#   run.log, run.keep   log numbers by name; `keep` gets those of an evaluation and also writes best.pt
#   fail(message)       prints one line and exits with code 2


@dataclass
class Args:
    """R2D2 on any gymnasium environment with discrete actions; observations may be uint8 images."""

    # The run
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run folder's name
    seed: int = 1  # seed of every source of randomness
    torch_deterministic: bool = True  # use deterministic cuDNN kernels, which matters with convolutions
    cuda: bool = True  # train on a GPU if there is one
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "reference-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases
    run_dir: str = "runs"  # parent folder of all run folders
    resume: str | None = None  # checkpoint.pt of a run to resume; its settings hold unless flags change them
    evaluate: str | None = None  # checkpoint.pt or best.pt to evaluate instead of training
    eval_interval: int = 0  # iterations between evaluations (0: a tenth of the run, or more if they are long)
    eval_episodes: int = 10  # episodes per evaluation (0: never during training, 10 with --evaluate)
    # The task and acting
    env_id: str = "popgym:popgym-RepeatFirstEasy-v0"  # gymnasium id; `module:Name-v0` imports the module
    num_envs: int = 32  # parallel environments, in total across processes
    num_steps: int = 16  # steps in each environment between rounds of updates
    total_timesteps: int = 100_000  # environment steps, in total across environments
    epsilon: float = 0.4  # environment 0's probability of a random action; others have smaller ones, eq. 5
    epsilon_exponent: float = 7.0  # eq. 5: the smallest probability is epsilon to the power of 1 + this
    # The network
    recurrent: bool = True  # use an LSTM; otherwise a feed-forward layer of equal width
    last_action_reward: bool = True  # also give the network the last action and reward: one-step memory
    hidden_size: int = 64  # width H of the encoder, the LSTM and the heads
    memory_span: float = 200.0  # time constant of the LSTM's slowest units at initialization, in steps
    # Windows and the replay
    burn_in: int = 8  # steps before the trained ones that only update the LSTM's state; see SequenceReplay
    learn_length: int = 26  # trained steps m of a window; the next one begins that many steps later
    state_init: Literal["stored", "zero"] = "stored"  # LSTM's state before a window: as when acting, or 0
    buffer_size: int = 20_000  # windows R in the replay of each process
    alpha: float = 0.9  # exponent of priorities in eq. 4; 0 draws all windows equally often
    beta: float = 0.6  # exponent of the importance-sampling weights, eq. 3
    eta: float = 0.9  # eq. 4: weight of the largest error of a window in its priority; the mean has the rest
    checkpoint_replay: bool = True  # save the replay of process 0 in checkpoints (gigabytes for images)
    # Targets
    n_step: int = 1  # steps n of the return before the bootstrap, eq. 2
    gamma: float = 0.98  # discount gamma
    rescale_epsilon: float = 1e-3  # eps of the value rescaling, eq. 1
    norm_reward: bool = True  # divide rewards in targets (not the network's input) by the RMS of nonzero ones
    target_interval: int = 100  # updates between copies of the network to the target network
    # Updates
    learning_starts: int = 2_000  # updates begin when more steps are stored; each window counts as m of them
    replay_ratio: float = 8.0  # how often a window is drawn on average, if stored after learning_starts
    batch_size: int = 1024  # trained steps per update, in total across processes; rounded down to windows
    learning_rate: float = 3e-3  # Adam learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    max_grad_norm: float = 10.0  # larger gradients are scaled down to this norm (1e9: never; 0: no training)


# ---- Networks ----------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Encoder, LSTM and dueling heads (Wang et al. 2016). It is in evaluation mode except in updates."""

    def __init__(self, envs, args):
        super().__init__()
        self.args = args
        self.num_actions = int(envs.single_action_space.n)

        # Is the observation an image? It is if it holds bytes, and its height and its width are at least 36
        # pixels, the fewest that the three convolutions accept (36 -> 8 -> 3 -> 1). Its layout is
        # [..., height, width, channels] if the last dimension is smaller than the third last, as in
        # [84, 84, 3], and else [..., height, width], as in [4, 84, 84]. All other observations are flattened.
        # Bytes are always divided by their largest value
        space = envs.single_observation_space
        is_bytes = space.dtype == np.uint8
        self.obs_scale = float(space.high.max()) if is_bytes else 1.0
        # Two ones in front give shapes of one or two dimensions three, too: [84, 84] is an image without
        # channels, and a vector [128] has the height 1, so that it is no image
        *_, third_last, second_last, last = [1, 1, *space.shape]
        self.is_channels_last = last < third_last
        shortest = min(second_last, third_last if self.is_channels_last else last)
        self.is_image = is_bytes and shortest >= 36

        # Encoder: for images, the convolutions of Mnih et al. 2015 (output channels, kernel, stride)
        width = args.hidden_size
        layers = []
        if self.is_image:
            for size in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                layers += [nn.LazyConv2d(*size), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(width), nn.ReLU())
        # A dummy pass tells the lazy layers their input sizes
        self.eval()
        self.encode(torch.zeros(1, *space.shape))

        # Core: an LSTM, which also reads the last action and reward
        num_inputs = width
        if args.last_action_reward:
            num_inputs += self.num_actions + 1
        if args.recurrent:
            self.core = nn.LSTM(num_inputs, width, batch_first=True)
            # Forget gates begin at sigmoid(log tau) = tau / (1 + tau), with tau from 1 to memory_span (after
            # Tallec & Ollivier 2018). torch adds two biases, each of four gates: forget gates are the second
            log_tau = torch.linspace(0, np.log(args.memory_span), width)
            for name, bias in self.core.named_parameters():
                if name.startswith("bias_ih"):
                    bias.data[width : 2 * width] = log_tau
                elif name.startswith("bias_hh"):
                    nn.init.zeros_(bias)
        else:
            self.core = nn.Linear(num_inputs, width)
        # Dueling heads
        self.advantage = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.num_actions))
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.eval()

    def encode(self, obs):
        """Encode rows of observations [N, *D] to [N, H]."""
        x = obs.float() / self.obs_scale
        if self.is_image:
            if self.is_channels_last:
                x = x.movedim(-1, -3)
            # All dimensions before the height, such as frames and channels, become one. An image of height
            # and width alone has none: unsqueeze adds it
            x = x.unsqueeze(1).flatten(1, -3)  # [N, C, height, width]
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
            h, c = state.unsqueeze(0).unbind(2)  # [1, N, H] each, as torch's LSTM takes them
            x, (h, c) = self.core(x, (h.contiguous(), c.contiguous()))  # [N, L, H]
            state = torch.stack((h[0], c[0]), 1)  # [N, 2, H]
        else:
            x = self.core(x).relu()
        # The mean of Q over all actions is the value
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(-1, keepdim=True)
        return q, state


# ---- Environments ------------------------------------------------------------------------------------------
def make_envs(args, num_envs):
    """Make environments; exits if they are not supported.

    Each evaluation makes its own environments, so do not add a wrapper that learns statistics, such as
    NormalizeObservation: it would start again there, and the policy would see differently scaled
    observations.
    """
    wrappers = []  # add your own, such as [gym.wrappers.TimeAwareObservation]
    # Wrappers need single environments. Without wrappers, gymnasium chooses the task's own vector
    # environment, if it has one, when mode is None. Try "async" if a step of your task takes milliseconds
    mode = "sync" if wrappers else None
    try:
        envs = gym.make_vec(args.env_id, num_envs, mode, wrappers=wrappers)
    except (gym.error.Error, ModuleNotFoundError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if envs.num_envs != num_envs:
        fail(
            f"--env-id {args.env_id}: always has {envs.num_envs} environments; set --num-envs (per process) "
            "and --eval-episodes to that number"
        )
    if not isinstance(envs.single_action_space, Discrete):
        fail(f"--env-id {args.env_id}: actions must be Discrete, not {envs.single_action_space}")
    # Player is made for this autoreset mode: the step after an episode's end only resets the environment.
    # The mode may also be given by its value, a string
    autoreset = envs.metadata.get("autoreset_mode")
    if autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value):
        fail(f"--env-id {args.env_id}: metadata['autoreset_mode'] must be NEXT_STEP, not {autoreset}")
    space = envs.single_observation_space
    if not space.is_np_flattenable:
        fail(f"--env-id {args.env_id}: observations must be a fixed number of numbers, not {space}")
    dtypes = {np.asarray(part).dtype for part in tree_leaves(space.sample())}
    if len(dtypes) > 1 and np.dtype(np.uint8) in dtypes:
        fail(f"--env-id {args.env_id}: a wrapper must scale bytes that stand beside other numbers: {space}")
    if not isinstance(space, Box) or not space.shape:
        envs.metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP  # FlattenObservation takes no string
        envs = FlattenObservation(envs)  # discrete observations become one-hot
    return envs


class Player:
    """Plays in B environments. Its arrays [B, ...] hold what the newest step has led to.

    An example of one environment, in which action a_9 ends an episode. The next step only resets the
    environment, which ignores its action:

        obs           s_8   s_9   s_10   s_0   s_1   of the next episode
        last_action   a_7   a_8   a_9    -1    a_0
        rewards       r_7   r_8   r_9    0     r_0
        lengths       8     9     10     0     1
        is_over       no    no    yes    no    no    terminated or truncated

    `returns` are the sums of the rewards of the episode so far. `state` [B, 2, H] is the LSTM's before it
    reads the observation, 0 at the start of an episode.
    """

    def __init__(self, agent, envs, epsilons, seed):
        self.agent = agent
        self.envs = envs
        self.epsilons = epsilons  # [B]
        size = envs.num_envs
        self.last_action = np.full(size, -1)
        self.rewards = np.zeros(size)
        self.returns = np.zeros(size)
        self.lengths = np.zeros(size, int)
        self.is_terminated = np.zeros(size, bool)
        self.is_over = np.zeros(size, bool)
        self.state = epsilons.new_zeros(size, STATE_SIZE, agent.args.hidden_size)
        obs, infos = envs.reset(seed=seed)
        self.obs = self.to_array(obs)

    def to_array(self, obs):
        """Return observations as a new array [B, *D], since some environments reuse theirs."""
        is_bytes = self.envs.single_observation_space.dtype == np.uint8
        array = np.asarray(obs, np.uint8 if is_bytes else np.float32).copy()
        self.check("observation", array)
        return array

    def check(self, name, x):
        """Exit with one line that names the first observation or reward that cannot be trained on."""
        is_good = np.abs(x) < 1e18  # not NaN, and the square fits into float32
        if not is_good.all():
            i = np.argwhere(~is_good)[0, 0]
            fail(
                f"--env-id {self.agent.args.env_id}: {name} of environment {i} in step {self.lengths[i]} "
                "of an episode: not a number below 1e18 in size"
            )

    def get_inputs(self):
        """Return what the network reads next, as tensors: one step in each environment, L = 1."""
        arrays = self.obs, self.last_action, np.float32(self.rewards)
        obs, last_action, last_reward = (torch.as_tensor(x, device=self.state.device) for x in arrays)
        return obs.unsqueeze(1), last_action.unsqueeze(1), last_reward.unsqueeze(1), self.state

    @torch.no_grad()
    def act(self, obs, last_action, last_reward, state):
        """Choose actions [B], at random with probability epsilon; returns them and the next state.

        The network is in evaluation mode. A network that explores by noise of its own must draw it in this
        mode, too.
        """
        q, state = self.agent(obs, last_action, last_reward, state)  # [B, 1, A], [B, 2, H]
        # Draw a random action everywhere, and take it with probability epsilon: shapes are fixed
        best_action = q.squeeze(1).argmax(-1)
        is_random = torch.rand_like(self.epsilons) < self.epsilons
        random_action = torch.randint_like(best_action, q.shape[-1])
        return torch.where(is_random, random_action, best_action), state

    def step(self):
        """Take a step in each environment."""
        actions, state = self.act(*self.get_inputs())
        actions = actions.cpu().numpy()
        first_action = self.envs.single_action_space.start  # the network counts from 0
        obs, rewards, terminated, truncated, infos = self.envs.step(actions + first_action)
        # Where an episode was over, this step has begun the next one: there is no last action, no reward and
        # no memory
        is_step = ~self.is_over
        self.last_action = np.where(is_step, actions, -1)
        # As floats, because the square of a reward of a small type such as int8 overflows
        self.rewards = np.where(is_step, np.asarray(rewards, np.float64), 0.0)
        self.returns = np.where(is_step, self.returns, 0.0) + self.rewards
        self.lengths = np.where(is_step, self.lengths + 1, 0)
        self.is_terminated = np.asarray(terminated, bool)
        self.is_over = self.is_terminated | np.asarray(truncated, bool)
        self.state = state * torch.as_tensor(is_step, device=state.device)[:, None, None]
        self.check("reward", self.rewards)
        self.obs = self.to_array(obs)


# ---- Storage -----------------------------------------------------------------------------------------------
class SequenceReplay:
    """Prioritized replay of windows of L steps, in `data` {name: [R, L, ...] or [R, ...]}.

    An episode of 12 steps and its windows with burn_in 4 (b), learn_length 5 (m) and n_step 2 (t). Numbers
    are steps of the episode. Step 12 is the last observation, without an action:

        index      0  1  2  3  4  5  6  7  8  9 10
                   b  b  b  b  m  m  m  m  m  t  t
        window 1   0  0  0  0  0  1  2  3  4  5  6   begin 4, end 10: without burn-in
        window 2   1  2  3  4  5  6  7  8  9 10 11   begin 0, end 10
        window 3   6  7  8  9 10 11 12 12 12 12 12   begin 0, end 6: steps 10 and 11 are trained

    The real steps of a window are at the indices `begin` to `end`. Copies of the first and the last one fill
    the places before and after them. The network reads these, but its outputs there are not used.

    A burn-in is whole or absent, so that `begin` and one stored state describe it. It is absent if fewer than
    burn_in steps of the episode come before the trained ones. With the default settings, that is only so in
    the first window, whose state is zero anyway. If learn_length is less than burn_in, it is also so in later
    windows: with burn_in 4 and learn_length 2, in that which trains from step 2. These start from the state
    stored for their first trained step or, with --state-init zero, from zero in mid-episode.

    A step is stored with the action and reward that led to it. So those that follow it are at the next index.
    """

    def __init__(self, envs, args, device):
        self.args = args
        self.length = args.burn_in + args.learn_length + args.n_step  # L
        self.batch_windows = args.batch_size // (args.learn_length * WORLD_SIZE)  # N
        space = envs.single_observation_space
        is_bytes = space.dtype == np.uint8

        # The newest L steps of each environment, in rings: `newest` is the row of the last one. `starts` says
        # which step of an episode the next window trains first
        shape = self.length, envs.num_envs
        self.recent = {
            "obs": np.zeros((*shape, *space.shape), np.uint8 if is_bytes else np.float32),  # [L, B, *D]
            "last_action": np.zeros(shape, int),  # [L, B]; it led to the observation, as the rewards did
            "last_reward": np.zeros(shape, np.float32),  # what the network reads
            "reward": np.zeros(shape, np.float32),  # what it is trained on; another one if you add a bonus
        }
        self.recent_state = torch.zeros(*shape, STATE_SIZE, args.hidden_size, device=device)
        self.newest = 0
        self.starts = [0] * envs.num_envs

        size = args.buffer_size
        shape = size, self.length
        try:
            with device:
                dtype = torch.uint8 if is_bytes else torch.float32
                self.data = {
                    "obs": torch.zeros(*shape, *space.shape, dtype=dtype),  # [R, L, *D]
                    "last_action": torch.zeros(shape).long(),  # [R, L]
                    "last_reward": torch.zeros(shape),  # [R, L]
                    "reward": torch.zeros(shape),  # [R, L]
                    "state": torch.zeros(size, STATE_SIZE, args.hidden_size),  # [R, 2, H], before `begin`
                    "begin": torch.zeros(size).long(),  # index of the first real step, 0 or burn_in
                    "end": torch.zeros(size).long(),  # index of the last real step
                    "is_terminated": torch.zeros(size).bool(),  # is the last observation terminal
                    "priority": torch.zeros(size),  # p of eq. 4; 0 where no window is stored
                }
                # Number of the rewards that are not zero, and sum of their squares
                self.reward_sums = torch.zeros(2).double()
        except RuntimeError:
            fail(f"--buffer-size ({size}) must be smaller: the memory of {device} cannot hold the windows")
        self.num_added = 0  # windows stored so far, those that newer ones replaced among them

    def state_dict(self):
        """Return all windows, and the settings that they depend on, for a checkpoint.

        Steps that form no window yet are left out.
        """
        names = ("env_id", "burn_in", "learn_length", "n_step", "buffer_size")
        settings = {name: getattr(self.args, name) for name in names}
        counts = {"num_added": self.num_added, "reward_sums": self.reward_sums}
        return {"settings": settings} | counts | self.data

    def load_state_dict(self, state):
        """Restore a state_dict. If it is of other settings, the replay stays empty."""
        own = self.state_dict()
        if state["settings"] != own["settings"]:
            print_line(f"The replay begins empty, as it was of {state['settings']}")
            return
        self.num_added = state["num_added"]
        self.reward_sums.copy_(state["reward_sums"])
        for name, x in self.data.items():
            x.copy_(state[name])

    def add(self, player, rewards):
        """Add the player's newest step, which is trained on `rewards` [B], and store complete windows."""
        self.newest = (self.newest + 1) % len(self.recent_state)
        self.recent["obs"][self.newest] = player.obs
        self.recent["last_action"][self.newest] = player.last_action
        self.recent["last_reward"][self.newest] = player.rewards
        self.recent["reward"][self.newest] = rewards
        self.recent_state[self.newest] = player.state
        for i, step in enumerate(player.lengths):
            # A window is stored when so many steps have followed its first trained one, starts[i]: m + n - 1
            # make it complete. At the end of an episode, one is enough, as a trained step needs the reward
            # after it. What is left then may be more than one window
            num_more = 1 if player.is_over[i] else self.args.learn_length + self.args.n_step - 1
            while self.starts[i] + num_more <= step:
                self.store(player, i)
                self.starts[i] += self.args.learn_length
            if player.is_over[i]:
                self.starts[i] = 0

    def store(self, player, i):
        """Store the window of environment i that trains from step starts[i] on, with the largest priority."""
        newest_step = player.lengths[i]
        first_step = self.starts[i] - self.args.burn_in
        # Without burn-in, copies of the first trained step fill its places
        begin = 0 if first_step >= 0 else self.args.burn_in
        steps = np.arange(self.length) + first_step  # [L], steps of the episode
        steps = steps.clip(steps[begin], newest_step)
        rows = (self.newest - newest_step + steps) % len(self.recent_state)  # their places in the rings

        # Write it in place of the oldest one
        index = self.num_added % self.args.buffer_size
        self.num_added += 1
        for name, x in self.recent.items():
            self.data[name][index] = torch.as_tensor(x[rows, i])
        # Row rows[0] is of the first real step, also without burn-in, as copies of that step come before it
        self.data["state"][index] = self.recent_state[rows[0], i]
        self.data["begin"][index] = begin
        self.data["end"][index] = begin + int(steps[-1] - steps[begin])
        self.data["is_terminated"][index] = bool(player.is_terminated[i])  # its last step is the newest one
        largest = self.data["priority"].max()
        self.data["priority"][index] = largest.where(largest > 0, 1.0)

    def sample(self):
        """Draw window indices [N] by eq. 4, and weights w [N] of eq. 3.

        Draws are stratified (Schaul et al. 2016): the sum of all p^alpha is cut into N equal parts, and a
        random point in each of them belongs to the window that is drawn.
        """
        priority = self.data["priority"]
        # Without a window, p is 0, and 0^0 would be 1
        powers = priority.pow(self.args.alpha) * (priority > 0)
        cumulative = powers.double().cumsum(0)
        parts = torch.arange(self.batch_windows, device=priority.device)  # [N]
        # Points are float64, like the cumulated sum. searchsorted returns the first window whose sum is at
        # least the point. Places without a window add nothing to the sum, so it never returns them, even if
        # a point is rounded up to the whole sum
        points = (parts + torch.rand_like(parts, dtype=torch.float64)) / len(parts)
        index = torch.searchsorted(cumulative, points * cumulative[-1])
        weights = priority[index].pow(-self.args.alpha * self.args.beta)  # the sum in P cancels
        return index, weights / weights.max()


# ---- R2D2 --------------------------------------------------------------------------------------------------
def value_rescale(x, eps):
    """Return h(x) of eq. 1 (Pohlen et al. 2018), rearranged to avoid subtracting nearly equal numbers."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def inverse_value_rescale(y, eps):
    """Return h^-1(y), rearranged in the same way, so that small values survive in float32."""
    # Let w = sqrt(|x| + 1) - 1. Then |x| = w (w + 2), and eq. 1 says |y| = w + eps |x| = eps w^2 + b w with
    # b = 1 + 2 eps. The positive root is (sqrt(b^2 + 4 eps |y|) - b) / (2 eps). Multiplied above and below by
    # sqrt(b^2 + 4 eps |y|) + b, it has no difference left
    b = 1 + 2 * eps
    w = 2 * y.abs() / (b + (b * b + 4 * eps * y.abs()).sqrt())
    return y.sign() * w * (w + 2)


def epsilon_ladder(args):
    """Return epsilon_i [B] of eq. 5 (Horgan et al. 2018)."""
    i = torch.arange(args.num_envs)
    return args.epsilon ** (1 + args.epsilon_exponent * i / max(args.num_envs - 1, 1))


def collect_steps(player, replay, args):
    """Take `num_steps` steps in each environment, and add them to the replay.

    Returns
        episodes       (return, length) of each one that ended in the half of the environments that explores
                       less (epsilon falls with i)
        num_steps      steps taken, in total across processes
        num_windows    windows stored, in total across processes; 0 until learning_starts is passed. Those
                       stored before it cause no updates, but updates may draw them later
    """
    half = player.envs.num_envs // 2
    num_old = replay.num_added
    num_steps = 0
    reward_sums = np.zeros(2)
    episodes = []
    for _ in range(args.num_steps):
        player.step()
        is_step = player.lengths > 0  # a step to length 0 only reset its environment
        # Training takes its rewards from here. Add a bonus of your own, such as one for rare observations:
        # player.rewards stay as they are, so scores do not contain it, and evaluations do not earn it
        rewards = player.rewards
        replay.add(player, rewards)
        num_steps += is_step.sum()
        reward_sums += np.count_nonzero(rewards * is_step), np.square(rewards * is_step).sum()
        for i in half + np.flatnonzero(player.is_over[half:]):
            episodes.append((player.returns[i], player.lengths[i]))

    # Updates begin when all processes have their share of learning_starts
    num_stored = replay.num_added * args.learn_length  # steps
    is_ready = num_stored > args.learning_starts / WORLD_SIZE
    device = replay.reward_sums.device
    replay.reward_sums += total(torch.tensor(reward_sums, device=device))
    counts = [num_steps, replay.num_added - num_old, is_ready]
    num_steps, num_windows, num_ready = total(torch.tensor(counts, device=device)).tolist()
    if num_ready < WORLD_SIZE:
        num_windows = 0
    return episodes, num_steps, num_windows


def unroll(agent, windows, args):
    """Return Q [N, m + n, A] of the steps after the burn-in.

    The burn-in only updates the state, and no gradient flows through it.
    """
    inputs = [windows[name] for name in ("obs", "last_action", "last_reward")]  # [N, L, ...] each
    state = windows["state"]  # before step `begin`
    if args.state_init == "zero":
        state = torch.zeros_like(state)
    if args.burn_in and args.recurrent:
        with torch.no_grad():
            _, burned_in = agent(*(x[:, : args.burn_in] for x in inputs), state)
        has_burn_in = windows["begin"] == 0
        state = torch.where(has_burn_in[:, None, None], burned_in, state)
    q, _ = agent(*(x[:, args.burn_in :] for x in inputs), state)
    return q


def compute_targets(q, target_q, rewards, last, is_terminated, args):
    """Return y_t of eq. 2 with double Q-learning (van Hasselt et al. 2016), and is_trained, both [N, m].

    Steps are counted from the first one after the burn-in: q and target_q [N, m + n, A] belong to steps 0 to
    m + n - 1, and rewards[:, t] [N, m + n - 1] follows step t. `last` [N] is the last real step of a window:
    m + n - 1, or less if the episode ended there. The window holds no reward after it, so only steps before
    it are trained. With m = 4 and n = 2, if the episode ended at step 3:

        t            0    1    2    3
        k            2    3    3    3    the step whose value is the bootstrap
        is_trained   yes  yes  yes  no
    """
    t = torch.arange(args.learn_length, device=q.device)  # [m]
    last = last.unsqueeze(1)  # [N, 1]
    is_trained = t < last  # [N, m]
    k = (t + args.n_step).minimum(last)  # [N, m]

    # Rewards after steps t to k - 1: unfold lists the n rewards after each step t, [N, m, n]. Those after
    # `last` are copies, and do not count
    is_real = torch.arange(rewards.shape[1], device=q.device) < last  # [N, m + n - 1]
    discounts = args.gamma ** torch.arange(args.n_step, device=q.device)
    returns = (rewards * is_real).unfold(1, args.n_step, 1) @ discounts  # [N, m]

    # The value of step k: its action is chosen by Q, and valued by Q'. A terminal step has none
    best_action = q.argmax(2, keepdim=True)  # [N, m + n, 1]
    best_q = target_q.gather(2, best_action).squeeze(2)  # [N, m + n]
    values = inverse_value_rescale(best_q, args.rescale_epsilon)
    is_terminal = is_terminated.unsqueeze(1) & (k == last)  # [N, m]
    values_at_k = values.gather(1, k) * ~is_terminal  # [N, m]
    targets = value_rescale(returns + args.gamma ** (k - t) * values_at_k, args.rescale_epsilon)
    return targets, is_trained


def sequence_priority(errors, is_trained, eta):
    """Compute p [N] of eq. 4 from absolute TD errors [N, m], which are 0 unless is_trained [N, m]."""
    return eta * errors.amax(1) + (1 - eta) * errors.sum(1) / is_trained.sum(1)


def r2d2_loss(agent, target, windows, weights, args):
    """Return three tensors [N, m]: the losses w (y - Q)^2 / 2 of eq. 3, the errors |y - Q|, and is_trained.

    Losses and errors of steps that are not trained are 0.
    """
    # The action and the reward that follow a step stand at the next index, see SequenceReplay. So those of
    # the first step after the burn-in are at index burn_in + 1. Of the actions, only the first m are trained
    last = windows["end"] - args.burn_in  # [N]
    rewards = windows["reward"][:, args.burn_in + 1 :]  # [N, m + n - 1]
    actions = windows["last_action"][:, args.burn_in + 1 :][:, : args.learn_length]  # [N, m]

    # Targets, from both networks. Only Q of the actions taken has a gradient
    q = unroll(agent, windows, args)  # [N, m + n, A]
    with torch.no_grad():
        target_q = unroll(target, windows, args)
        targets, is_trained = compute_targets(q, target_q, rewards, last, windows["is_terminated"], args)
    q_taken = q[:, : args.learn_length].gather(2, actions.unsqueeze(2)).squeeze(2)  # [N, m]
    td_errors = torch.where(is_trained, targets - q_taken, 0.0)
    losses = 0.5 * weights.unsqueeze(1) * td_errors.square()
    return losses, td_errors.detach().abs(), is_trained


def update_network(agent, target, optimizer, replay, args):
    """Take one gradient step on sampled windows, update their priorities, and return metrics by name.

    Shapes are fixed and the host never waits, so that a CUDA graph can record it.
    """
    index, weights = replay.sample()
    windows = {name: x[index] for name, x in replay.data.items()}
    if args.norm_reward:
        # The quotient is 1 before the first reward that is not zero
        num_rewards, sum_of_squares = replay.reward_sums.clamp(min=1e-99)
        windows["reward"] /= (sum_of_squares / num_rewards).sqrt()

    # The loss is this process's share of the mean over the trained steps of all processes. A term of your own
    # needs the same: mask it with is_trained, sum it, divide it by num_trained.
    # The network is in training mode here, as an LSTM on a GPU has gradients in that mode only, and as
    # dropout needs it. Do not add batch norm: it would also count the burn-in, and copies that fill windows
    agent.train()
    losses, errors, is_trained = r2d2_loss(agent, target, windows, weights, args)
    num_trained = total(is_trained.sum())
    loss = losses.sum() / num_trained
    optimizer.zero_grad()
    loss.backward()
    agent.eval()
    sum_gradients(agent)
    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()

    # A priority of zero would never be drawn again. NaN would break the draws, before run.log can say that
    # the losses are not finite
    priorities = sequence_priority(errors, is_trained, args.eta)
    replay.data["priority"][index] = priorities.nan_to_num().clamp(min=1e-8)
    return {
        "q_loss": total(loss.detach()),
        "td_error": total(errors.sum()) / num_trained,
        "grad_norm": grad_norm,
    }


# ---- Evaluation --------------------------------------------------------------------------------------------
def evaluate(agent, args, device, seed_stream):
    """Score one episode with greedy actions in each of `eval_episodes` environments (0: ten)."""
    seed = seed_everything(args.seed, seed_stream)
    envs = make_envs(args, args.eval_episodes or 10)
    player = Player(agent, envs, torch.zeros(envs.num_envs, device=device), seed)
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros(envs.num_envs)
    is_running = np.ones(envs.num_envs, bool)
    bar = make_bar("steps", leave=False, delay=2)
    while is_running.any() and lengths.max() < MAX_EPISODE_STEPS:
        player.step()
        returns += np.where(is_running, player.rewards, 0)
        lengths += is_running
        bar.update(is_running.sum())
        is_running &= ~player.is_over
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
def train(args, run):
    """Train the agent of a run; with --evaluate, only score it."""
    # Set up
    device = set_up_device(args)
    envs = make_envs(args, args.num_envs // WORLD_SIZE)
    if args.eval_episodes or args.evaluate:
        make_envs(args, args.eval_episodes or 10).close()  # fails now if an evaluation would fail later
    seed_everything(args.seed, WEIGHTS)  # the weights are the same in every process
    agent = QNetwork(envs, args).to(device)
    run.load(agent=agent)
    scored_agent = agent  # the network that evaluations score; if you add a moving average, put it here
    if args.evaluate:  # in other episodes than those that selected best.pt
        num_episodes = args.eval_episodes or 10
        print_line(f"{args.evaluate}: {num_episodes} episodes of {args.env_id} with greedy actions")
        print_scores(evaluate(scored_agent, args, device, FINAL_EVALUATION))
        return
    target = deepcopy(agent)
    learning_rate = torch.tensor(args.learning_rate, device=device)  # a tensor, so that graphs see it change
    optimizer = torch.optim.Adam(
        agent.parameters(), learning_rate, fused=True, capturable=device.type == "cuda"
    )
    run.load(target=target, optimizer=optimizer)
    # The replay, which is large: best.pt does not hold it. Each process resumes with that of process 0
    replay = SequenceReplay(envs, args, device)
    run.load(in_best=False, replay=replay)
    if not args.checkpoint_replay:
        del run.resume_parts["replay"]  # new checkpoints are without it
    update = Recorded(partial(update_network, agent, target, optimizer, replay, args), device, args)
    windows_per_update = replay.batch_windows * WORLD_SIZE
    # Each process gets large and small probabilities of random actions. A resumed run begins with new
    # episodes; as run.iteration is part of their seed, they differ from those at the start of the run
    epsilons = epsilon_ladder(args)[RANK::WORLD_SIZE].to(device)
    player = Player(agent, envs, epsilons, seed_everything(args.seed, TRAINING, run.iteration, RANK))
    player.act = Recorded(player.act, device)
    replay.add(player, player.rewards)  # the first observations; their rewards are zero
    run.open(
        f"{type(envs.unwrapped).__name__}, {args.num_envs} environments, {device}, "
        f"observations {envs.single_observation_space.shape} as {'images' if agent.is_image else 'vectors'}, "
        f"batches of {windows_per_update * args.learn_length} trained steps",
        args.total_timesteps,
    )

    while True:
        # Evaluate, if it is time; at the top, so that --resume repeats an evaluation that was cut off
        if run.should_evaluate():
            scores = evaluate(scored_agent, args, device, EVALUATION)
            run.keep(scores, "eval/episodic_return", args.eval_episodes * scores["eval/episodic_length"])
        if run.step >= args.total_timesteps:
            break
        # Seed each iteration anew: an evaluation seeds the same generators, and training must not depend on
        # whether there was one. It is + 1, as the environments above were seeded with run.iteration
        seed_everything(args.seed, TRAINING, run.iteration + 1, RANK)

        # Learning rate: it falls linearly to zero
        rate = args.learning_rate
        if args.anneal_lr:
            rate *= 1 - run.step / args.total_timesteps
        learning_rate.fill_(rate)

        # Collect steps in each environment, and store the windows that they complete
        episodes, num_steps, num_windows = collect_steps(player, replay, args)

        # Update as often as --replay-ratio asks for; the fraction of an update is left for later
        run.updates_due += args.replay_ratio * num_windows / windows_per_update
        num_updates = int(run.updates_due)
        run.updates_due -= num_updates
        metrics = {}
        for _ in range(num_updates):
            for name, value in update().items():
                metrics[name] = metrics.get(name, 0.0) + value / num_updates
            run.num_updates += 1
            if run.num_updates % args.target_interval == 0:
                target.load_state_dict(agent.state_dict())

        # Log, and save checkpoint.pt if it is time. Steps that only reset an environment do not count
        run.iteration += 1
        run.step += num_steps
        scalars = {f"losses/{name}": x.item() for name, x in metrics.items()}
        scalars["charts/num_updates"] = run.num_updates
        scalars["charts/learning_rate"] = rate
        if episodes:
            mean_return, mean_length = np.mean(episodes, 0)
            scalars["charts/episodic_return"] = mean_return
            scalars["charts/episodic_length"] = mean_length
        run.log(scalars)

    envs.close()
    run.close(f", {run.num_updates} updates")


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
    best_score: float | None = None  # mean return of best.pt, None if there is none of this task
    last_score: float | None = None  # mean return of the newest policy, None if it was not evaluated
    score_name: str = ""  # name of these scores, empty before the first evaluation
    is_due: bool = False  # is it time to evaluate the newest policy
    num_updates: int = 0
    updates_due: float = 0.0  # the fraction of an update that is left over


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
    counts = """num_envs hidden_size memory_span total_timesteps num_steps learn_length n_step buffer_size
        batch_size target_interval""".split()  # from 1
    shares = ("gamma", "alpha", "beta", "eta", "epsilon")  # up to 1
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
    least = args.learn_length * WORLD_SIZE
    if args.batch_size < least:
        fail(f"--batch-size ({args.batch_size}) must be at least {least}, a window in each process")
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
