"""Gymnasium vector environments as one packed tensor per step, with a state that can be saved.

A script sees every environment through this interface, which `torch_cartpole.TorchCartPole` shares:

    envs.num_envs, envs.obs_dim, envs.single_action_space, envs.num_columns
    envs.same_step       whether an ended episode's last observation is in `final_obs` (else it is the next row's)
    envs.on_device       whether `step` runs on the device without the host, so that CUDA graphs can hold it
    envs.reset(seed)     -> observations [B, D]
    envs.step(actions)   -> rows [B, num_columns]; rows[:, :D] is the observation, then the columns below
    envs.reward_threshold  return at which the task counts as solved, or None
    envs.mutable_tensors()  -> the device tensors that `step` changes in place
    envs.state_dict()    -> plain data, or None where the state cannot be saved;  envs.load_state_dict(state)
"""

import math
from collections import deque
from pathlib import Path
from types import FunctionType

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

# Columns of a packed row after the D columns of the observation. The last two describe the episode that this step
# ended and are zero elsewhere. Environments with SAME_STEP autoreset append the episode's last observation (D columns).
REWARD, TERMINATED, TRUNCATED, EPISODE_RETURN, EPISODE_LENGTH, NUM_EXTRA = range(6)


def make_vec(
    env_id: str,
    num_envs: int,
    seed: int,
    vectorization: str = "auto",
    device: torch.device | str = "cpu",
    video_folder: Path | None = None,
):
    """Make `num_envs` environments and reset them with `seed`.

    Args:
        env_id: a gymnasium id; `module:Name-v0` imports the module first.
        vectorization: `auto` (the environment's own vector form where it has one, else `sync`), `sync`, `async`, or
            `torch` (the port in this package, on `device`).
        device: where the rows go; for CUDA, gymnasium's are kept in pinned memory.
        video_folder: record episodes of environment 0 there; `auto` then means `sync`.

    Returns:
        the environments and their first observations [B, D].

    Raises:
        ValueError: one line for the user: unknown id, missing package with the pip line that installs it, or spaces
            other than flat Box or Discrete observations and Discrete, MultiDiscrete or Box actions.
    """
    if vectorization == "torch":
        from envs_shared.torch_cartpole import TorchCartPole

        if env_id != TorchCartPole.env_id or video_folder is not None:
            raise ValueError(f"--vectorization torch has {TorchCartPole.env_id} alone, and records no video")
        envs = TorchCartPole(num_envs, device)
        return envs, envs.reset(seed)

    def make_single(index: int) -> gym.Env:
        if index > 0:
            return gym.make(env_id)
        env = gym.make(env_id, render_mode="rgb_array")
        return gym.wrappers.RecordVideo(env, str(video_folder), name_prefix="env0", disable_logger=True)

    try:
        if video_folder is None:
            mode = None if vectorization == "auto" else vectorization
            envs = gym.make_vec(env_id, num_envs=num_envs, vectorization_mode=mode)
        else:
            vector_class = AsyncVectorEnv if vectorization == "async" else SyncVectorEnv
            envs = vector_class([lambda i=i: make_single(i) for i in range(num_envs)])
        vec = GymVec(envs, pin_memory=torch.device(device).type == "cuda")
        spec = getattr(envs, "envs", [envs])[0].spec
        vec.reward_threshold = None if spec is None else spec.reward_threshold
        return vec, vec.reset(seed)
    except ModuleNotFoundError as error:
        name = error.name or getattr(error.__cause__, "name", None) or env_id.split(":")[0]
        hint = "run from the folder it is in, or " if name == env_id.split(":")[0].split(".")[0] else ""
        raise ValueError(f"no module named {name}; {hint}install it with `pip install {name}`") from error
    except ImportError as error:  # an environment that has moved to another package
        raise ValueError(str(error)) from error
    except gym.error.NamespaceNotFound as error:
        hint = (
            "pip install ale-py` and `--env-id ale_py:ALE/..." if "ALE" in str(error) else "pip install` of its package"
        )
        raise ValueError(f"{error} Try `{hint}`") from error
    except gym.error.Error as error:  # unknown id or version, or DependencyNotInstalled, whose text has the pip line
        raise ValueError(str(error)) from error


class GymVec:
    """A gymnasium vector environment that answers each step with one packed float32 row per environment.

    The rows are one buffer, overwritten by the next step, so that a step is a single copy to the device.
    Raises ValueError for spaces other than the ones `make_vec` lists.
    """

    on_device = False
    reward_threshold: float | None = None

    def __init__(self, envs: VectorEnv, pin_memory: bool = False):
        autoreset_mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if autoreset_mode == AutoresetMode.DISABLED:
            raise ValueError("the environments must reset themselves, but their autoreset mode is DISABLED")
        self.same_step = autoreset_mode == AutoresetMode.SAME_STEP
        self.envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
        self.num_envs = envs.num_envs
        self.single_action_space = envs.single_action_space
        self.single_observation_space = envs.single_observation_space
        self.obs_dim = flat_obs_dim(envs.single_observation_space)
        check_action_space(envs.single_action_space)
        self.num_columns = self.obs_dim * (1 + self.same_step) + NUM_EXTRA
        self.rows = torch.zeros(self.num_envs, self.num_columns, pin_memory=pin_memory)
        self.rows_np = self.rows.numpy()

    def flatten(self, obs: np.ndarray) -> np.ndarray:
        """Observations [B, ...] to rows [B, D]; Discrete ones become one-hot."""
        space = self.single_observation_space
        if isinstance(space, gym.spaces.Discrete):
            one_hot = np.zeros((len(obs), self.obs_dim), np.float32)
            one_hot[np.arange(len(obs)), np.asarray(obs) - space.start] = 1.0
            return one_hot
        return np.asarray(obs).reshape(len(obs), -1)

    def reset(self, seed: int) -> torch.Tensor:
        """Start new episodes from `seed` and return their observations [B, D]."""
        for i, env in enumerate(getattr(self.envs.unwrapped, "envs", [self.envs.unwrapped])):
            env.action_space.seed(seed + i)  # for environments that sample from their own spaces
            env.observation_space.seed(seed + i)
        obs, _ = self.envs.reset(seed=seed)
        return torch.from_numpy(self.flatten(obs).astype(np.float32))

    def step(self, actions: torch.Tensor) -> torch.Tensor:
        """Step with actions [B, A], Box actions clipped to the box; returns packed rows [B, num_columns]."""
        space = self.single_action_space
        actions = actions.cpu().numpy().reshape(-1, *space.shape)
        actions = actions.clip(space.low, space.high) if isinstance(space, gym.spaces.Box) else actions + space.start
        obs, rewards, terminated, truncated, infos = self.envs.step(actions.astype(space.dtype))
        rows, d = self.rows_np, self.obs_dim
        rows[:, :d] = self.flatten(obs)
        rows[:, d:] = 0.0
        rows[:, d + REWARD], rows[:, d + TERMINATED], rows[:, d + TRUNCATED] = rewards, terminated, truncated
        if "episode" in infos:
            rows[:, d + EPISODE_RETURN], rows[:, d + EPISODE_LENGTH] = infos["episode"]["r"], infos["episode"]["l"]
        if self.same_step and (terminated | truncated).any():
            ended = np.flatnonzero(terminated | truncated)
            rows[ended, d + NUM_EXTRA :] = self.flatten(np.stack([infos["final_obs"][i] for i in ended]))
        return self.rows

    def mutable_tensors(self) -> list[torch.Tensor]:
        """Nothing: the state is on the host, out of reach of CUDA graphs."""
        return []

    def state_dict(self):
        """The environments' state as plain data, or None where it is more than plain data."""
        try:
            return get_plain_state(self.envs)
        except (TypeError, RecursionError):
            return None

    def load_state_dict(self, state) -> None:
        """Restore what `state_dict` returned, into environments made and reset the same way."""
        set_plain_state(self.envs, state)

    def close(self) -> None:
        """Release the environments."""
        self.envs.close()


def flat_obs_dim(space: gym.Space) -> int:
    """Width D of the flattened observation; raises ValueError for what a multilayer perceptron cannot read."""
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if not isinstance(space, gym.spaces.Box):
        raise ValueError(f"{type(space).__name__} observations are not supported, only flat Box and Discrete ones")
    if len(space.shape) > 2 or (len(space.shape) == 2 and space.dtype == np.uint8):
        raise ValueError(f"image observations {space.shape} are not supported, only flat Box and Discrete ones")
    return math.prod(space.shape)


def check_action_space(space: gym.Space) -> None:
    """Raise ValueError unless the actions are Discrete, MultiDiscrete (flat) or a Box of floats."""
    is_float_box = (
        isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and 0 not in space.shape
    )
    is_flat_multi = isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1
    if not (is_float_box or is_flat_multi or isinstance(space, gym.spaces.Discrete)):
        raise ValueError(
            f"{type(space).__name__} actions are not supported, only Discrete, MultiDiscrete and float Box"
        )


# What the state of an environment is made of, and what is made anew with it and need not be saved.
PLAIN_TYPES = (bool, int, float, str, type(None))
ENV_TYPES = (gym.Env, VectorEnv)
FIXED_TYPES = (gym.envs.registration.EnvSpec, AutoresetMode, FunctionType, type)


def is_fixed(value) -> bool:
    """Whether `value` is a constant that a newly made environment has too; arrays of text are maps and labels."""
    return isinstance(value, FIXED_TYPES) or (isinstance(value, np.ndarray) and value.dtype.kind in "SU")


def get_plain_state(value, owners: dict | None = None):
    """Copy the state of an environment, its wrappers and sub-environments into tensors, numbers, lists and dicts.

    The result holds nothing that `torch.load(weights_only=True)` refuses. Raises TypeError for a member that is not
    plain data, such as a handle into a simulator or a subprocess, and for two arrays that are views of one memory:
    copies of them would part. `owners` maps memory to the one array seen on it.
    """
    owners = {} if owners is None else owners
    if is_fixed(value):
        return None
    if isinstance(value, (np.ndarray, np.generic)):  # before PLAIN_TYPES: np.float64 is a float
        if isinstance(value, np.ndarray):
            memory = value
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            if owners.setdefault(id(memory), value) is not value:
                raise TypeError("two views of one array")
        return torch.from_numpy(np.array(value))  # TypeError for arrays of objects
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, np.random.Generator):
        return get_plain_state(value.bit_generator.state)
    if isinstance(value, gym.Space):
        return get_plain_state(value.np_random)
    if isinstance(value, dict):
        return {k: get_plain_state(v, owners) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [get_plain_state(v, owners) for v in value]
    if isinstance(value, ENV_TYPES):
        return get_plain_state(vars(value), owners)
    raise TypeError(f"{type(value).__name__} is not plain data")


def set_plain_state(value, state):
    """Return `value` with the state that `get_plain_state` copied; environments and generators change in place."""
    if is_fixed(value):
        return value
    if isinstance(state, torch.Tensor):
        return state.numpy().copy()[()]  # [()] turns 0-d arrays back into numpy scalars
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = set_plain_state(value.bit_generator.state, state)
    elif isinstance(value, gym.Space):
        set_plain_state(value.np_random, state)
    elif isinstance(value, ENV_TYPES):
        for name, item in state.items():
            setattr(value, name, set_plain_state(vars(value).get(name), item))
    elif isinstance(state, dict):
        old = value if isinstance(value, dict) else {}
        return {k: set_plain_state(old.get(k), v) for k, v in state.items()}
    elif isinstance(state, list):
        old = list(value)[: len(state)] if isinstance(value, (list, tuple, deque)) else []
        items = [set_plain_state(a, b) for a, b in zip(old + [None] * (len(state) - len(old)), state, strict=True)]
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        return tuple(items) if isinstance(value, tuple) else items
    else:
        return state
    return value
