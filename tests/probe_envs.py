"""Tiny environments with known optima, registered as `probe_envs:Name-v0`."""

import random
from functools import partial

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Endless(gym.Env):
    """Reward 1 for ever: with a time limit that only truncates, V = 1 / (1 - gamma) everywhere."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, ending="truncate"):
        self.ending, self.limit, self.steps = ending, 10, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        at_limit = self.steps >= self.limit
        terminated = at_limit and self.ending == "terminate"
        return np.ones(1, np.float32), 1.0, terminated, at_limit and not terminated, {}


class Ledger(gym.Env):
    """Random rewards and endings (terminated, truncated, or both at once); keeps a ledger of its true transitions.

    Each of the two flags is up with probability `p_end` at a step.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Discrete(4)

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


class OneStep(gym.Env):
    """One action an episode; `score(obs, action)` is the reward."""

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.draw()
        return self.obs, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.obs, self.score(action), True, False, {}


class Shifted(OneStep):
    """Discrete observations and actions that start at 3 and -1: 1 for answering 3, 4, 5 with -1, 0, 1; optimum 1."""

    observation_space = gym.spaces.Discrete(3, start=3)
    action_space = gym.spaces.Discrete(3, start=-1)

    def draw(self):
        return self.np_random.integers(3, 6)

    def score(self, action):
        return float(action == self.obs - 4)


class Sums(OneStep):
    """MultiDiscrete observations with starts of their own: 1 for naming the sum of both counts; optimum 1."""

    observation_space = gym.spaces.MultiDiscrete([2, 3], start=[1, -1])
    action_space = gym.spaces.Discrete(4)

    def draw(self):
        return self.np_random.integers([1, -1], [3, 2])

    def score(self, action):
        return float(action == self.obs.sum())


class Quadrants(OneStep):
    """Images of bytes, 16 x 20 pixels of noise: 1 for naming the quarter that is brighter; optimum 1."""

    observation_space = gym.spaces.Box(0, 255, (16, 20), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def draw(self):
        self.brighter = self.np_random.integers(4)
        image = self.np_random.integers(0, 120, (2, 8, 2, 10))
        image[self.brighter // 2, :, self.brighter % 2] += 80
        return image.reshape(16, 20).astype(np.uint8)

    def score(self, action):
        return float(action == self.brighter)


class Aim(OneStep):
    """Box [2, 1]: minus the squared distance to the target shown; optimum 0. Refuses actions outside the box."""

    observation_space = gym.spaces.Box(-1, 1, (2, 1))
    action_space = gym.spaces.Box(-1, 1, (2, 1))

    def draw(self):
        return self.np_random.uniform(-0.8, 0.8, (2, 1)).astype(np.float32)

    def score(self, action):
        return -float(((action - self.obs) ** 2).sum())


class FarAim(Aim):
    """The same in a box [2, 50], with distances in half-widths of it."""

    action_space = gym.spaces.Box(2, 50, (2, 1))

    def score(self, action):
        return super().score((action - 26) / 24)


class Fixed(gym.Env):
    """Episodes of `length` steps, reward = rank of this environment among those made (0, 1, 2, ...)."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    made = 0

    def __init__(self, length=5):
        self.length, self.rank = length, Fixed.made
        Fixed.made += 1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action):
        self.steps += 1
        return self.observe(), float(self.rank), self.steps >= self.length, False, {}


class NoLimit(Endless):
    """Reward 1 for ever, and nothing that ends an episode."""

    def __init__(self):
        super().__init__()
        self.limit = np.inf


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


class GlobalNoise(Fixed):
    """Observations that are drawn from the global generators of Python, numpy and torch."""

    def observe(self):
        return np.float32([random.uniform(-1, 1), np.random.uniform(-1, 1) + torch.rand(()).item()])


class HalfEndless(gym.Env):
    """Every second one, by its seed, never ends; the others end after 4 steps. Reward 1 a step."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.length = (4, np.inf)[seed % 2]
        self.steps = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.ones(1, np.float32), 1.0, self.steps >= self.length, False, {}


class Clock(gym.Env):
    """Episodes of 3 steps whose observations are known from the number of the step: see the subclasses."""

    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(self.steps), {}

    def step(self, action):
        self.steps += 1
        return self.observe(self.steps), 0.0, self.steps == 3, False, {}


class Picture(Clock):
    """Images of bytes with 3 channels (one in layout HW), all values different from step to step."""

    def __init__(self, layout, height=36, width=40):
        self.order = {"CHW": (0, 1, 2), "HWC": (1, 2, 0), "HW": (1, 2, 0)}[layout]
        self.index, self.size = (..., 0) if layout == "HW" else ..., (3, height, width)
        self.observation_space = gym.spaces.Box(0, 255, self.observe(0).shape, np.uint8)

    def pixels(self, step):
        """The image [3, height, width] after `step` steps."""
        return (np.arange(np.prod(self.size)).reshape(self.size) * 7 + 31 * step).astype(np.uint8)

    def observe(self, step):
        return self.pixels(step).transpose(self.order)[self.index]


class Pair(Clock):
    """A number of 0 to 3 and a vector: observations of several parts, in a Tuple."""

    observation_space = gym.spaces.Tuple((gym.spaces.Discrete(4), gym.spaces.Box(-9, 9, (2,))))

    def observe(self, step):
        return step, np.float32([-step, 0.5])


class DictOfBox(gym.Env):
    """Only its spaces are looked at."""

    observation_space = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,)))
    action_space = gym.spaces.Discrete(2)


class Recall(gym.Env):
    """A cue of +1 or -1 is shown at the start; the fifth action gets 1 for naming it and -1 if not; optimum 1."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.cue = 0, int(self.np_random.integers(2))
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        is_last = self.steps == 5
        reward = (1.0 if action == self.cue else -1.0) * is_last
        return np.array([0, self.steps == 4], np.float32), reward, is_last, False, {}


def make_vec(env_id, num_envs, options, **_):
    return SyncVectorEnv([lambda: gym.make(env_id) for _ in range(num_envs)], **options)


def register(name, entry_point, **kwargs):
    """Register `name` as it is, as `SameStep<name>`, and as `Reused<name>`, which has one array for all steps."""
    gym.register(f"{name}-v0", entry_point, disable_env_checker=True, order_enforce=False, **kwargs)
    forms = {"SameStep": {"autoreset_mode": AutoresetMode.SAME_STEP}, "Reused": {"copy": False}}
    for form, options in forms.items():
        make = partial(make_vec, f"{name}-v0", options=options)
        gym.register(f"{form}{name}-v0", vector_entry_point=make)


ENVIRONMENTS = (
    Endless,
    Ledger,
    Shifted,
    Sums,
    Quadrants,
    Aim,
    FarAim,
    Fixed,
    NoLimit,
    GlobalNoise,
    HalfEndless,
)
for env_class in (*ENVIRONMENTS, Recall, Pair):
    register(env_class.__name__, env_class)
register("EndlessTerminating", Endless, kwargs={"ending": "terminate"})
register("Unsupporteddict", DictOfBox)
for where in ("obs", "reward"):
    register(f"NotFinite{where}", NotFinite, kwargs={"where": where})
for layout in ("CHW", "HWC", "HW"):
    register(f"Picture{layout}", Picture, kwargs={"layout": layout})
    register(f"SmallPicture{layout}", Picture, kwargs={"layout": layout, "height": 35})
