"""Environments of other packages, made so that the scripts can read them: MiniGrid, BabyAI, Atari and POPGym."""

import re

import gymnasium as gym
import numpy as np

GRID_SIZES = (11, 6, 3)  # MiniGrid's numbers of objects, colours and states of a cell


class OneHotGrid(gym.ObservationWrapper):
    """MiniGrid's view of the grid and direction as one flat vector of zeros and ones.

    A view of H x W cells becomes 20 H W + 4 bytes: for each cell, object (11), colour (6) and state (3) one-hot,
    then the direction (4). The text of the mission is left out. Raises ValueError for other spaces, and for tasks whose
    mission is another in every episode, such as BabyAI's.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        parts = getattr(env.observation_space, "spaces", None)
        if not isinstance(parts, dict) or "direction" not in parts or parts["image"].shape[2:] != (3,):
            raise ValueError(f"{env.observation_space} is not MiniGrid's view of the grid")
        mission = parts.get(
            "mission"
        )  # MiniGrid's have placeholders where they vary; BabyAI's do not say what varies
        if getattr(mission, "ordered_placeholders", None) or type(mission).__name__ == "BabyAIMissionSpace":
            raise ValueError("the text of its mission says what to do in an episode, and text is not read")
        height, width, _ = parts["image"].shape
        sizes = np.array([*GRID_SIZES * (height * width), 4])
        self.columns = np.cumsum(sizes) - sizes  # where the one-hot of each number begins
        self.observation_space = gym.spaces.Box(0, 1, (sizes.sum(),), np.uint8)

    def observation(self, observation: dict) -> np.ndarray:
        """Zeros and ones [20 H W + 4]."""
        one_hot = np.zeros(self.observation_space.shape, np.uint8)
        one_hot[self.columns + np.append(observation["image"], observation["direction"])] = 1
        return one_hot


# First word of an id -> the module that registers it, and what to pass to `gymnasium.make_vec`. Atari as in Mnih et
# al. 2015 (84 x 84 grey, maximum of two frames, 4 frames a step), but one frame at a time, rewards as the game counts
# them, episodes that end with the game, and the sticky actions of the v5 tasks.
PACKAGES = {
    "MiniGrid": ("minigrid", {"wrappers": [OneHotGrid]}),
    "BabyAI": ("minigrid", {"wrappers": [OneHotGrid]}),
    "ALE": ("ale_py", {"stack_num": 1, "reward_clipping": False}),
    "popgym": ("popgym", {}),
}
MODULES = {module for module, _ in PACKAGES.values()}


def look_up(env_id: str) -> tuple[str, dict]:
    """The id with the module that registers it, where that is known, and the arguments of `gymnasium.make_vec`."""
    name = env_id.rpartition(":")[2]
    module, kwargs = PACKAGES.get(re.split("[-/]", name)[0], (None, {}))
    if module is not None and name == env_id and env_id not in gym.registry:
        env_id = f"{module}:{env_id}"
    return env_id, kwargs
