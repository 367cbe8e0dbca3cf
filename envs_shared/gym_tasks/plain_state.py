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


def is_plain(value) -> bool:
    """Whether `value` is of exactly one of PLAIN_TYPES: of a subclass, such as an enum, there is more to save."""
    return type(value) in PLAIN_TYPES


def list_generators(space: gym.Space) -> list[np.random.Generator]:
    """The generator of a space and those of the spaces it is made of."""
    parts = getattr(space, "spaces", ())
    parts = [*(parts.values() if isinstance(parts, dict) else parts), *vars(space).values()]
    spaces = [part for part in parts if isinstance(part, gym.Space)]
    return [space.np_random, *(generator for part in spaces for generator in list_generators(part))]


def get_plain_state(value, seen: dict | None = None):
    """Copy the state of an environment, its wrappers and sub-environments into tensors, numbers, lists and dicts.

    The result holds nothing that `torch.load(weights_only=True)` refuses. What is the same object in two places is so
    in the copy, too. Raises TypeError for what is not plain data, such as a handle into a simulator or a subprocess, a
    container of another type than Python's own or keys that are no text or numbers; also for two arrays that are views
    of one memory, as copies of them would part; and ValueError for an array that torch has no type for. `seen` maps
    objects, and the memory of arrays, to themselves (which keeps their ids) and their copies.
    """
    seen = {} if seen is None else seen
    if is_fixed(value):
        return None
    if is_plain(value):
        return value
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, (np.ndarray, np.generic)):
        memory = value
        while isinstance(getattr(memory, "base", None), np.ndarray):
            memory = memory.base
        if ("memory", id(memory)) in seen:
            raise TypeError("two views of one array")
        state = torch.from_numpy(np.array(value))  # TypeError for arrays of objects
        seen["memory", id(memory)] = memory, state
    elif isinstance(value, np.random.Generator):
        state = get_plain_state(value.bit_generator.state)
    elif isinstance(value, gym.Space):
        state = [get_plain_state(generator) for generator in list_generators(value)]
    elif isinstance(value, ENV_TYPES):
        state = {name: get_plain_state(member, seen) for name, member in vars(value).items()}
    elif type(value) is dict and all(
        is_plain(k) or (type(k) is tuple and all(map(is_plain, k))) for k in value
    ):
        state = {k: get_plain_state(v, seen) for k, v in value.items()}
    elif type(value) in (list, tuple, deque):
        state = (tuple if type(value) is tuple else list)(get_plain_state(v, seen) for v in value)
    else:
        raise TypeError(f"{type(value).__name__} is not plain data")
    seen[id(value)] = value, state
    return state


def set_plain_state(value, state, seen: dict | None = None):
    """Return `value` with the state that `get_plain_state` copied; environments and generators change in place.

    `seen` maps the states that are tensors, lists and dicts to what they have become.
    """
    seen = {} if seen is None else seen
    if is_fixed(value):
        return value
    if id(state) in seen:
        return seen[id(state)]
    if isinstance(state, torch.Tensor):
        new = state.numpy().copy()[()]  # [()] turns 0-d arrays back into numpy scalars
    elif isinstance(value, gym.Space):
        states = (
            state if isinstance(state, list) else [state]
        )  # checkpoints until 2026-11-24 have its own alone
        for generator, item in zip(list_generators(value), states, strict=False):
            set_plain_state(generator, item)
        new = value
    elif isinstance(value, ENV_TYPES):
        for name, item in state.items():
            setattr(value, name, set_plain_state(vars(value).get(name), item, seen))
        new = value
    elif isinstance(state, dict) and "bit_generator" in state:
        new = value if isinstance(value, np.random.Generator) else np.random.default_rng()
        new.bit_generator.state = {k: set_plain_state(None, v) for k, v in state.items()}
    elif isinstance(state, dict):
        old = value if isinstance(value, dict) else {}
        new = {k: set_plain_state(old.get(k), v, seen) for k, v in state.items()}
    elif isinstance(state, (list, tuple)):
        old = list(value)[: len(state)] if isinstance(value, (list, tuple, deque)) else []
        items = zip(old + [None] * (len(state) - len(old)), state, strict=True)
        new = [set_plain_state(a, b, seen) for a, b in items]
        if isinstance(value, deque):
            new = deque(new, value.maxlen)
        elif isinstance(state, tuple) or isinstance(value, tuple):
            new = tuple(new)
    else:
        return state
    seen[id(state)] = new
    return new
