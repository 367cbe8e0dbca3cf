"""MiniGrid's Memory with a start from which the hint is in view: `--env-id minigrid_envs:MiniGrid-MemoryForcedS9-v0`.

Nothing has to be explored to see the hint: what is left is to remember it, and to compare it with the objects at the
end of the hallway.
"""

import gymnasium as gym
import numpy as np
from minigrid.envs.memory import MemoryEnv


class MemoryForced(MemoryEnv):
    """The agent starts beside the hint, at the closed end of the starting room, and looks along the hallway."""

    def _gen_grid(self, width, height):
        super()._gen_grid(width, height)
        self.agent_pos = np.array((1, height // 2))


for size in (7, 9, 13):
    gym.register(f"MiniGrid-MemoryForcedS{size}-v0", MemoryForced, kwargs={"size": size})
