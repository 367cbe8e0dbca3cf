# minigrid_one_hot.py
"""MiniGrid's tasks with observations of bits, registered as OneHot-<id>."""

from functools import partial

import gymnasium as gym
import minigrid  # noqa: F401, which registers its tasks
import numpy as np
from minigrid.wrappers import OneHotPartialObsWrapper


class OneHot(gym.ObservationWrapper):
    """The direction (4 bits), then object, color and state of 7 x 7 cells (20 bits each), without mission."""

    def __init__(self, env):
        super().__init__(OneHotPartialObsWrapper(env))
        self.observation_space = gym.spaces.Box(0, 1, (4 + 7 * 7 * 20,), np.uint8)

    def observation(self, obs):
        return np.append(np.eye(4)[obs["direction"]], obs["image"]).astype(np.uint8)


def make(env_id, **options):
    return OneHot(gym.make(env_id, **options))


for env_id in [env_id for env_id in gym.registry if env_id.startswith("MiniGrid-")]:
    gym.register(f"OneHot-{env_id}", partial(make, env_id))
