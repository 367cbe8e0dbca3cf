"""The state of environments, generators and what they hold as plain data, to save and to put back."""

from collections import deque
from types import FunctionType

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

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
