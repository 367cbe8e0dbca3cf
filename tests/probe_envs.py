"""Tiny environments with known optima, registered as `probe_envs:Name-v0`."""

import random
from collections import deque

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


class Digits(OneStep):
    """MultiDiscrete([2, 5]): 1 for each component that names the digit shown; optimum 2."""

    observation_space = gym.spaces.Box(0, 1, (2, 5))
    action_space = gym.spaces.MultiDiscrete([2, 5])

    def draw(self):
        self.digits = self.np_random.integers([2, 5])
        return np.eye(5, dtype=np.float32)[self.digits]

    def score(self, action):
        return float((action == self.digits).sum())


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


class Opaque(Fixed):
    """Holds an object that is no plain data, so that its state cannot be saved."""

    def __init__(self):
        super().__init__()
        self.simulator = object()


class NoLimit(Endless):
    """Reward 1 for ever, and nothing that ends an episode."""

    def __init__(self):
        super().__init__()
        self.limit = np.inf


class Broken(Endless):
    """Observations that turn into NaN."""

    def step(self, action):
        return np.full(1, np.nan, np.float32), *super().step(action)[1:]


class NotFinite(Fixed):
    """An observation or a reward that is NaN once, at the third step of each episode."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def step(self, action):
        obs, reward, *rest = super().step(action)
        is_due = self.steps == 3
        obs[1] = np.nan if is_due and self.where == "obs" else obs[1]
        return obs, np.nan if is_due and self.where == "reward" else reward, *rest


class GlobalRandom(Fixed):
    """Draws from numpy's and Python's global generators and from its own space."""

    def observe(self):
        noise = np.random.uniform(-0.3, 0.3) + random.uniform(-0.3, 0.3)
        return 0.3 * self.observation_space.sample() + np.float32(noise)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(obs.sum()), *rest


class GlobalNoise(Fixed):
    """Observations that are drawn from the global generators of Python, numpy and torch."""

    def observe(self):
        return np.float32([random.uniform(-1, 1), np.random.uniform(-1, 1) + torch.rand(()).item()])


class Holder(gym.Env):
    """Holds what people's environments hold, and shows all of it: one array under two names, sums by key, and so on."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.array = np.zeros(2)
        self.same_array = self.array
        self.list = [0]
        self.lists = {"same": self.list, ("a", 1): (0, deque([1], 3))}
        self.goals = gym.spaces.Dict(a=gym.spaces.Tuple([gym.spaces.Discrete(9)] * 2))
        self.generator = None  # made when it is first used

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.goals.seed(seed)
        self.steps = 0
        return np.zeros(5, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.generator = self.generator or np.random.default_rng(self.np_random.integers(99))
        self.array += self.generator.random(2)
        self.list[0] += self.steps
        self.lists["a", 1][1].append(int(action))
        sums = [self.same_array.sum(), self.lists["same"][0], sum(self.lists["a", 1][1])]
        obs = np.array([*sums, *self.goals.sample()["a"]], np.float32)
        return (
            obs,
            0.0,
            self.steps == 7,
            False,
            {"episode": {"r": 1e9, "l": 1}},
        )  # a name that others use, too


class Odd(Fixed):
    """Holds a value that plain data cannot tell from another."""

    def __init__(self, value):
        super().__init__()
        self.value = value


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


class Views(Fixed):
    """Two views of one array: copies of them would part."""

    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(4, np.float32)
        self.position = self.buffer[:2]


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
    """Images of bytes, 3 channels of 16 x 20 pixels (one in layout HW), all values different from step to step."""

    def __init__(self, layout):
        self.order = {"CHW": (0, 1, 2), "HWC": (1, 2, 0), "HW": (1, 2, 0)}[layout]
        self.index = (..., 0) if layout == "HW" else ...
        self.observation_space = gym.spaces.Box(0, 255, self.observe(0).shape, np.uint8)

    @staticmethod
    def pixels(step):
        """The image [3, 16, 20] after `step` steps."""
        return (np.arange(3 * 16 * 20).reshape(3, 16, 20) * 7 + 31 * step).astype(np.uint8)

    def observe(self, step):
        return self.pixels(step).transpose(self.order)[self.index]


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


class Counters(Clock):
    """MultiDiscrete observations, flat or [2, 2], whose components count the steps from their own starts."""

    def __init__(self, shape=(4,)):
        self.sizes, self.starts = (np.array(x).reshape(shape) for x in ([2, 5, 3, 4], [0, -1, 4, 0]))
        self.observation_space = gym.spaces.MultiDiscrete(self.sizes, start=self.starts)

    def observe(self, step):
        return self.starts + step % self.sizes


class BabyAIMissionSpace(gym.spaces.Text):
    """Named like BabyAI's, by which its missions are known."""


class Grid(Clock):
    """Observations like MiniGrid's, with a text: the same in all episodes, or marked as one that varies."""

    def __init__(self, mission=None):
        text = (BabyAIMissionSpace if mission == "BabyAIMissionSpace" else gym.spaces.Text)(20)
        text.ordered_placeholders = [["red", "blue"]] if mission == "ordered_placeholders" else None
        self.observation_space = gym.spaces.Dict(
            direction=gym.spaces.Discrete(4),
            image=gym.spaces.Box(0, 255, (3, 2, 3), np.uint8),
            mission=text,
        )

    def observe(self, step):
        image = np.random.default_rng(step).integers((11, 6, 3), size=(3, 2, 3)).astype(np.uint8)
        return {"direction": (step + 1) % 4, "image": image, "mission": "go"}


class Unsupported(gym.Env):
    """Spaces given by name, to be refused."""

    def __init__(self, spaces):
        box, discrete = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
        self.observation_space, self.action_space = {
            "dict": (gym.spaces.Dict(a=box), discrete),
            "image": (gym.spaces.Box(0, 255, (84, 84, 3), np.uint8), discrete),
            "floatimage": (gym.spaces.Box(0, 1, (84, 84, 3)), discrete),
            "smallimage": (gym.spaces.Box(0, 255, (16, 15, 3), np.uint8), discrete),
            "manychannels": (gym.spaces.Box(0, 255, (16, 16, 5), np.uint8), discrete),
            "volume": (gym.spaces.Box(0, 255, (1, 16, 16, 3), np.uint8), discrete),
            "multibinary": (box, gym.spaces.MultiBinary(3)),
        }[spaces]

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}


def register(name, entry_point, **kwargs):
    """Register `name` as it is and, with SAME_STEP autoreset, as `SameStep<name>`."""
    gym.register(f"{name}-v0", entry_point, disable_env_checker=True, order_enforce=False, **kwargs)
    gym.register(
        f"SameStep{name}-v0",
        vector_entry_point=lambda num_envs, **_: SyncVectorEnv(
            [lambda: gym.make(f"{name}-v0") for _ in range(num_envs)], autoreset_mode=AutoresetMode.SAME_STEP
        ),
    )


for env_class in (
    Endless,
    Ledger,
    Digits,
    Shifted,
    Aim,
    FarAim,
    Fixed,
    Opaque,
    NoLimit,
    Broken,
    GlobalRandom,
    Views,
):
    register(env_class.__name__, env_class)
for env_class in (GlobalNoise, Sums, Quadrants, Recall, Holder, HalfEndless):
    register(env_class.__name__, env_class)
register("EndlessTerminating", Endless, kwargs={"ending": "terminate"})
for where in ("obs", "reward"):
    register(f"NotFinite{where}", NotFinite, kwargs={"where": where})
for layout in ("CHW", "HWC", "HW"):
    register(f"Picture{layout}", Picture, kwargs={"layout": layout})
register("Counters", Counters)
register("CountersSquare", Counters, kwargs={"shape": (2, 2)})
register("Grid", Grid)
register("MiniGrid-Probe", Grid)
register("BabyAI-Probe", Grid, kwargs={"mission": "BabyAIMissionSpace"})
register("MiniGrid-NoGrid", Unsupported, kwargs={"spaces": "dict"})
for spaces in ("dict", "image", "floatimage", "smallimage", "manychannels", "volume", "multibinary"):
    register(f"Unsupported{spaces}", Unsupported, kwargs={"spaces": spaces})
gym.register("NeedsMissing-v0", "a_package_that_is_missing.envs:Env")
gym.register(
    "DisabledAutoreset-v0",
    vector_entry_point=lambda num_envs, **_: SyncVectorEnv(
        [Endless for _ in range(num_envs)], autoreset_mode=AutoresetMode.DISABLED
    ),
)
