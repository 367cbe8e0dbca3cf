"""Tiny environments with known optima, registered as `probe_envs:Name-v0`."""

from functools import partial

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Task(gym.Env):
    """Observation 1, reward 1, and no end unless a subclass sets the `length` of episodes."""

    observation_space = Box(-1, 1, (1,))
    action_space = Discrete(2)
    length = np.inf

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), self.score(action), self.steps >= self.length, False, {}

    def observe(self):
        return np.ones(1, np.float32)

    def score(self, action):
        return 1.0


class Ledger(gym.Env):
    """Random rewards and endings, each flag with probability `p_end`; it keeps its true transitions."""

    observation_space = Box(-np.inf, np.inf, (3,))
    action_space = Discrete(4)

    def __init__(self, p_end=0.15):
        self.p_end = p_end
        self.episodes = []  # each a list of (obs, action, reward, next_obs, terminated, truncated)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes.append([])
        self.obs = self.np_random.normal(size=3).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        obs, self.obs = self.obs, self.np_random.normal(size=3).astype(np.float32)
        reward = float(self.np_random.normal())
        terminated, truncated = (bool(x) for x in self.np_random.random(2) < self.p_end)
        self.episodes[-1].append((obs, int(action), reward, self.obs, terminated, truncated))
        return self.obs, reward, terminated, truncated, {}


class OneStep(Task):
    """One action an episode."""

    length = 1

    def observe(self):
        if self.steps == 0:
            self.obs = self.draw()
        return self.obs


class Shifted(OneStep):
    """Discrete spaces that start at 3 and -1: 1 for answering 3, 4, 5 with -1, 0, 1; optimum 1."""

    observation_space = Discrete(3, start=3)
    action_space = Discrete(3, start=-1)

    def draw(self):
        return self.np_random.integers(3, 6)

    def score(self, action):
        return float(action == self.obs - 4)


class Sums(OneStep):
    """MultiDiscrete observations with starts of their own: 1 for naming the sum of both counts; optimum 1."""

    observation_space = MultiDiscrete([2, 3], start=[1, -1])
    action_space = Discrete(4)

    def draw(self):
        return self.np_random.integers([1, -1], [3, 2])

    def score(self, action):
        return float(action == self.obs.sum())


class Quadrants(OneStep):
    """Images of bytes, 16 x 20 pixels of noise: 1 for naming the quarter that is brighter; optimum 1."""

    observation_space = Box(0, 255, (16, 20), np.uint8)
    action_space = Discrete(4)

    def draw(self):
        self.brighter = self.np_random.integers(4)
        image = self.np_random.integers(0, 120, (2, 8, 2, 10))
        image[self.brighter // 2, :, self.brighter % 2] += 80
        return image.reshape(16, 20).astype(np.uint8)

    def score(self, action):
        return float(action == self.brighter)


class Quarters(Quadrants):
    """The same images with a channel, [16, 20, 1]."""

    observation_space = Box(0, 255, (16, 20, 1), np.uint8)

    def draw(self):
        return super().draw()[..., None]


class Noise(OneStep):
    """A normal number as the reward of one action, and 0.1 more for action 1: luck alone."""

    observation_space = Box(0, 1, (1,))

    def draw(self):
        return np.ones(1, np.float32)

    def score(self, action):
        return float(self.np_random.normal() + 0.1 * action)


class Aim(OneStep):
    """Box [2, 1]: minus the squared distance to the target shown, in half-widths of the box; optimum 0."""

    observation_space = Box(-1, 1, (2, 1))

    def __init__(self, low=-1.0, high=1.0):
        self.action_space = Box(low, high, (2, 1))
        self.middle, self.half_width = (high + low) / 2, (high - low) / 2

    def draw(self):
        return self.np_random.uniform(-0.8, 0.8, (2, 1)).astype(np.float32)

    def score(self, action):
        return -float((((action - self.middle) / self.half_width - self.obs) ** 2).sum())


class Fixed(Task):
    """Episodes of 5 steps, reward = rank of this environment among those made (0, 1, 2, ...)."""

    observation_space = Box(-1, 1, (2,))
    length, made = 5, 0

    def __init__(self):
        self.rank = Fixed.made
        Fixed.made += 1

    def observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def score(self, action):
        return float(self.rank)


class NotFinite(Fixed):
    """In every second environment, an observation or a reward is NaN at the third step of each episode."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def step(self, action):
        obs, reward, *rest = super().step(action)
        is_due = self.steps == 3 and self.rank % 2 == 1
        obs[1] = np.nan if is_due and self.where == "obs" else obs[1]
        return obs, np.nan if is_due and self.where == "reward" else reward, *rest


class Broken(Fixed):
    """An environment with a fault of its own: KeyError when it is made, reset, or in its seventh step."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.num_steps = 0
        if where == "making":
            self.look_up()

    def reset(self, **options):
        if self.where == "reset":
            self.look_up()
        return super().reset(**options)

    def step(self, action):
        self.num_steps += 1
        if self.where == "step" and self.num_steps == 7:
            self.look_up()
        return super().step(action)

    def look_up(self):
        return {}["a key that is missing"]


class Number(Fixed):
    """Observations are numbers of shape ()."""

    observation_space = Box(-1, 1, ())

    def observe(self):
        return np.float32(self.np_random.uniform(-1, 1))


class HalfEndless(Task):
    """Every second environment, by its seed, never ends; the others end after 4 steps."""

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.length = (4, np.inf)[seed % 2]
        return super().reset(seed=seed)


class Picture(Task):
    """Images of bytes with 3 channels (one in layout HW), all values different from step to step."""

    length = 3

    def __init__(self, layout, height=36):
        self.layout, self.size, self.steps = layout, (1 if layout == "HW" else 3, height, 40), 0
        self.observation_space = Box(0, 255, self.observe().shape, np.uint8)

    def pixels(self):
        """The image [channels, height, width]."""
        return (np.arange(np.prod(self.size)).reshape(self.size) * 7 + 31 * self.steps).astype(np.uint8)

    def observe(self):
        x = self.pixels()
        return {"CHW": x, "HW": x[0], "HWC": x.transpose(1, 2, 0)}[self.layout]


class Recall(Task):
    """A cue of +1 or -1 is shown at the start; the fifth action gets 1 for naming it, else -1; optimum 1."""

    observation_space = Box(-1, 1, (2,))
    length = 5

    def observe(self):
        if self.steps == 0:
            self.cue = int(self.np_random.integers(2))
        return np.float32([(2 * self.cue - 1) * (self.steps == 0), self.steps == 4])

    def score(self, action):
        return (1.0 if action == self.cue else -1.0) * (self.steps == 5)


class OtherForm(gym.vector.VectorWrapper):
    """The same steps as tensors of torch, with numbers as flags of an end, and any `mode` in the metadata."""

    def __init__(self, envs, mode):
        super().__init__(envs)
        self.metadata = {"autoreset_mode": mode} if mode else {}

    def reset(self, **options):
        obs, infos = self.env.reset(**options)
        return torch.as_tensor(obs), infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        flags = terminated.astype(np.int64), truncated.astype(np.float32)
        return *(torch.as_tensor(x) for x in (obs, rewards, *flags)), infos


# How vector environments of each form reset
MODES = {"SameStep": "SameStep", "Reused": "NextStep", "NoReset": "Disabled"}
OTHER_MODES = {"Other": "NextStep", "OtherSameStep": "SameStep", "Undeclared": None, "Eight": "NextStep"}


def make_vec(name, form, num_envs, **_):
    """Make `<form><name>`. Reused has one array for all steps, and Eight always eight environments."""
    made = [lambda: gym.make(f"{name}-v0")] * (8 if form == "Eight" else num_envs)
    mode = (MODES | OTHER_MODES)[form]
    envs = SyncVectorEnv(made, copy=form != "Reused", autoreset_mode=AutoresetMode(mode or "NextStep"))
    return OtherForm(envs, mode) if form in OTHER_MODES else envs


def register(name, entry_point, **kwargs):
    """Register `name` as it is, and in other forms."""
    gym.register(f"{name}-v0", entry_point, disable_env_checker=True, order_enforce=False, **kwargs)
    for form in MODES | OTHER_MODES:
        gym.register(f"{form}{name}-v0", vector_entry_point=partial(make_vec, name, form))


for env_class in (HalfEndless, Ledger, Fixed, Number, Recall, Shifted, Sums, Quadrants, Quarters, Noise, Aim):
    register(env_class.__name__, env_class)
register("FarAim", Aim, kwargs={"low": 2.0, "high": 50.0})
register("Endless", Task, max_episode_steps=10)  # a time limit that only truncates
register("EndlessTerminating", type("Short", (Task,), {"length": 10}))
BYTES_AND_FLOATS = Dict(bytes=Box(0, 255, (2,), np.uint8), floats=Box(-1, 1, (2,)))
register("BytesAndFloats", type("BytesAndFloats", (Task,), {"observation_space": BYTES_AND_FLOATS}))
register("TwoActions", type("TwoActions", (Task,), {"action_space": MultiDiscrete([2, 3])}))
for where in ("obs", "reward"):
    register(f"NotFinite{where}", NotFinite, kwargs={"where": where})
for where in ("making", "reset", "step"):
    register(f"Broken{where}", Broken, kwargs={"where": where})
for layout in ("CHW", "HWC", "HW"):
    register(f"Picture{layout}", Picture, kwargs={"layout": layout})
    register(f"SmallPicture{layout}", Picture, kwargs={"layout": layout, "height": 35})
    register(f"TallPicture{layout}", Picture, kwargs={"layout": layout, "height": 60})
gym.register("Pole-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=20)
