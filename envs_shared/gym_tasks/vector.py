"""Gymnasium vector environments as one packed tensor per step, with a state that can be saved.

A script sees every environment through this interface, which `torch_cartpole.TorchCartPole` shares:

    envs.num_envs, envs.obs_dim, envs.single_action_space, envs.num_columns
    envs.image_shape     (C, H, W) where an observation is an image with values 0..255, flattened in that order, or None
    envs.obs_dtype       type that holds the rows' observations: uint8 for bytes and one-hot rows, else float32
    envs.obs_scale       their largest value where they are bytes (255 for images), else 1
    envs.same_step       whether an ended episode's last observation is in `final_obs` (else it is the next row's)
    envs.on_device       whether `step` runs on the device without the host, so that CUDA graphs can hold it
    envs.reset(seed)     -> observations [B, D]
    envs.step(actions)   -> rows [B, num_columns]; rows[:, :D] is the observation, then those in columns.py
    envs.rows            the rows of the last step; after a reset the observations, and zeros
    envs.reward_threshold  return at which the task counts as solved, or None
    envs.state_dict()    -> plain data, or None where the state cannot be saved;  envs.load_state_dict(state)
"""

import math
import random
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from envs_shared.gym_tasks import packages
from envs_shared.gym_tasks.columns import (
    EPISODE_LENGTH,
    EPISODE_RETURN,
    NUM_EXTRA,
    REWARD,
    TERMINATED,
    TRUNCATED,
)
from envs_shared.gym_tasks.plain_state import get_plain_state, set_plain_state
from envs_shared.gym_tasks.torch_cartpole import TorchCartPole

EPISODE = "episode_of_row"  # in `infos`, where environments that count themselves have "episode"


def make_vec(
    env_id: str,
    num_envs: int,
    seed: int,
    vectorization: str = "auto",
    device: torch.device | str = "cpu",
    video_folder: Path | None = None,
    images: bool = False,
    make_env: Callable[..., gym.Env] = gym.make,
):
    """Make `num_envs` environments and reset them with `seed`.

    Args:
        env_id: a gymnasium id; `module:Name-v0` imports the module first, which the ids of MiniGrid, BabyAI, Atari
            (`ALE/Pong-v5`) and POPGym (`popgym-...`) do without being told.
        vectorization: `auto` (the environment's own vector form where it has one, else `sync`), `sync`, `async`, or
            `torch` (the port in this package, on `device`).
        device: where the rows go; for CUDA, gymnasium's are kept in pinned memory.
        video_folder: record episodes of environment 0 there; `auto` then means `sync`.
        images: also accept images of bytes, which are put channels first and flattened.
        make_env: makes a single environment in place of `gymnasium.make`, with the same arguments; where it adds
            nothing to that, `auto` still means the vector form.

    Returns:
        the environments and their first observations [B, D].

    Raises:
        ValueError: one line for the user: unknown id, missing package with the pip line that installs it, or spaces
            other than flat Box, Discrete or MultiDiscrete observations and Discrete, MultiDiscrete or Box actions.
    """
    try:
        torch.empty(num_envs, 1000)  # less than what a rollout of them takes
    except RuntimeError:
        raise ValueError(f"memory does not hold {num_envs} environments") from None
    if vectorization == "torch":
        if env_id != TorchCartPole.env_id or video_folder is not None:
            raise ValueError(f"--vectorization torch has {TorchCartPole.env_id} alone, and records no video")
        envs = TorchCartPole(num_envs, device)
        return envs, envs.reset(seed)

    env_id, kwargs = packages.look_up(env_id)
    if "stack_num" in kwargs and (vectorization != "auto" or video_folder is not None):
        raise ValueError("ALE/ tasks have --vectorization auto alone, and record no video")

    def make_single(index: int) -> gym.Env:
        is_filmed = video_folder is not None and index == 0
        env = make_env(env_id, **({"render_mode": "rgb_array"} if is_filmed else {}))
        for wrapper in kwargs.get("wrappers", ()):
            env = wrapper(env)
        if not is_filmed:
            return env
        return gym.wrappers.RecordVideo(env, str(video_folder), name_prefix="env0", disable_logger=True)

    try:
        if video_folder is None and vectorization == "auto" and adds_nothing(make_env, env_id):
            envs = gym.make_vec(env_id, num_envs=num_envs, **kwargs)
        else:
            vector_class = AsyncVectorEnv if vectorization == "async" else SyncVectorEnv
            envs = vector_class([lambda i=i: make_single(i) for i in range(num_envs)])
        vec = GymVec(envs, torch.device(device).type == "cuda", images)
        spec = getattr(envs, "envs", [envs])[0].spec
        vec.reward_threshold = None if spec is None else spec.reward_threshold
        return vec, vec.reset(seed)
    except ModuleNotFoundError as error:
        name = error.name or getattr(error.__cause__, "name", None) or env_id.split(":")[0]
        is_users = name == env_id.split(":")[0].split(".")[0] and name not in packages.MODULES
        hint = "run from the folder it is in, or " if is_users else ""
        pip_name = "ale-py" if name == "ale_py" else name
        raise ValueError(f"no module named {name}; {hint}install it with `pip install {pip_name}`") from error
    except ImportError as error:  # an environment that has moved to another package
        raise ValueError(str(error)) from error
    except gym.error.NamespaceNotFound as error:
        raise ValueError(f"{error} Try `pip install` of its package") from error
    except (
        gym.error.Error
    ) as error:  # unknown id or version, or DependencyNotInstalled, whose text has the pip line
        raise ValueError(str(error)) from error
    except TypeError as error:
        if video_folder is None or "render_mode" not in str(error):
            raise
        raise ValueError(f"to be filmed, it has to take render_mode ({error})") from error


def adds_nothing(make_env: Callable[..., gym.Env], env_id: str) -> bool:
    """Whether `make_env` gives what `gymnasium.make` gives, by wrappers and arguments, or nothing can be told."""
    if make_env is gym.make:
        return True
    try:
        env = make_env(env_id)
    except gym.error.Error:  # there is a vector form alone, or none at all
        return True
    env.close()
    try:
        plain = gym.make(env_id)
    except gym.error.Error:  # an id that `make_env` alone knows
        return False
    plain.close()
    return env.spec == plain.spec


class GymVec:
    """A gymnasium vector environment that answers each step with one packed float32 row per environment.

    The rows are one buffer, overwritten by the next step, so that a step is a single copy to the device.
    Raises ValueError for spaces other than the ones `make_vec` lists.
    """

    on_device = False
    reward_threshold: float | None = None

    def __init__(self, envs: VectorEnv, pin_memory: bool = False, images: bool = False):
        autoreset_mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if autoreset_mode == AutoresetMode.DISABLED:
            raise ValueError("the environments must reset themselves, but their autoreset mode is DISABLED")
        self.same_step = autoreset_mode == AutoresetMode.SAME_STEP
        self.envs = gym.wrappers.vector.RecordEpisodeStatistics(envs, stats_key=EPISODE)
        self.num_envs = envs.num_envs
        self.single_action_space = envs.single_action_space
        self.single_observation_space = space = envs.single_observation_space
        self.image_shape = get_image_shape(space) if images else None
        self.obs_dim = (
            flat_obs_dim(space, images) if self.image_shape is None else math.prod(self.image_shape)
        )
        is_bytes = isinstance(space, gym.spaces.Box) and space.dtype == np.uint8
        self.obs_dtype = torch.float32 if isinstance(space, gym.spaces.Box) and not is_bytes else torch.uint8
        self.obs_scale = float(max(space.high.max(), 1)) if is_bytes else 1.0
        check_action_space(envs.single_action_space)
        self.num_columns = self.obs_dim * (1 + self.same_step) + NUM_EXTRA
        self.rows = torch.zeros(self.num_envs, self.num_columns, pin_memory=pin_memory)
        self.rows_np = self.rows.numpy()

    def flatten(self, obs: np.ndarray) -> np.ndarray:
        """Observations [B, ...] to rows [B, D]; discrete ones become one-hot, images channels first."""
        space, obs = self.single_observation_space, np.asarray(obs)
        if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            sizes = num_values(space)
            columns = obs.reshape(len(obs), -1) - np.ravel(space.start) + np.cumsum(sizes) - sizes
            one_hot = np.zeros((len(obs), self.obs_dim), np.float32)
            np.put_along_axis(one_hot, columns, 1.0, axis=1)
            return one_hot
        if self.image_shape is not None and obs.ndim == 4 and obs.shape[1:] != self.image_shape:
            obs = np.moveaxis(obs, -1, 1)  # [B, H, W, C] -> [B, C, H, W]
        return obs.reshape(len(obs), -1)

    def reset(self, seed: int) -> torch.Tensor:
        """Start new episodes from `seed` and return their observations [B, D]."""
        for i, env in enumerate(getattr(self.envs.unwrapped, "envs", [self.envs.unwrapped])):
            env.action_space.seed(seed + i)  # for environments that sample from their own spaces
            env.observation_space.seed(seed + i)
        obs, _ = self.envs.reset(seed=seed)
        self.rows_np[:] = 0.0
        self.rows_np[:, : self.obs_dim] = self.flatten(obs)
        return self.rows[:, : self.obs_dim].clone()

    def step(self, actions: torch.Tensor) -> torch.Tensor:
        """Step with actions [B, A], Box actions clipped to the box; returns packed rows [B, num_columns]."""
        space = self.single_action_space
        actions = actions.cpu().numpy().reshape(-1, *space.shape)
        actions = (
            actions.clip(space.low, space.high)
            if isinstance(space, gym.spaces.Box)
            else actions + space.start
        )
        obs, rewards, terminated, truncated, infos = self.envs.step(actions.astype(space.dtype))
        rows, d = self.rows_np, self.obs_dim
        rows[:, :d] = self.flatten(obs)
        rows[:, d:] = 0.0
        rows[:, d + REWARD], rows[:, d + TERMINATED], rows[:, d + TRUNCATED] = rewards, terminated, truncated
        if EPISODE in infos:
            rows[:, d + EPISODE_RETURN], rows[:, d + EPISODE_LENGTH] = (
                infos[EPISODE]["r"],
                infos[EPISODE]["l"],
            )
        if self.same_step and (terminated | truncated).any():
            ended = np.flatnonzero(terminated | truncated)
            rows[ended, d + NUM_EXTRA :] = self.flatten(np.stack([infos["final_obs"][i] for i in ended]))
        return self.rows

    def state_dict(self):
        """The environments' state as plain data, that of numpy's and Python's generators, and the last rows.

        None where an environment is more than plain data.
        """
        try:
            state = {"envs": get_plain_state(self.envs), "rows": self.rows.clone()}
        except (TypeError, ValueError, RecursionError):
            return None
        return state | {"np_random": get_plain_state(np.random.get_state()), "random": random.getstate()}

    def load_state_dict(self, state) -> None:
        """Restore what `state_dict` returned, into environments made the same way; None changes nothing."""
        if state is None:
            return print(
                "the checkpoint does not hold the state of these environments: their episodes start anew"
            )
        set_plain_state(self.envs, state["envs"])
        self.rows.copy_(state["rows"])
        if "random" in state:  # checkpoints until 2026-11-24 lack both
            np.random.set_state(set_plain_state(None, state["np_random"]))
            random.setstate(state["random"])

    def close(self) -> None:
        """Release the environments."""
        self.envs.close()


def num_values(space: gym.spaces.Discrete | gym.spaces.MultiDiscrete) -> np.ndarray:
    """How many values each component of a discrete space has [components]."""
    return np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)


def flat_obs_dim(space: gym.Space, images: bool = False) -> int:
    """Width D of the flattened observation; raises ValueError for what a multilayer perceptron cannot read.

    `images`: whether images are read elsewhere, for the message.
    """
    only = (
        "only flat Box, Discrete and MultiDiscrete ones" + images * " and images of bytes from 16 x 16 pixels"
    )
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        return int(num_values(space).sum())
    if not isinstance(space, gym.spaces.Box):
        raise ValueError(f"{type(space).__name__} observations are not supported, {only}")
    if len(space.shape) > 2 or (len(space.shape) == 2 and space.dtype == np.uint8):
        raise ValueError(f"image observations {space.shape} are not supported, {only}")
    return math.prod(space.shape)


def get_image_shape(space: gym.Space) -> tuple[int, int, int] | None:
    """(C, H, W) of images of bytes of 16 pixels or more a side: [H, W], [H, W, C] with C <= 4, or [C, H, W]."""
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    first, *rest = space.shape if len(space.shape) == 3 else (1, *space.shape)
    channels, height, width = (rest[1], first, rest[0]) if rest[1] <= 4 else (first, *rest)
    return (channels, height, width) if min(height, width) >= 16 else None


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
