"""Three memory tasks that popgym lacks. One file, which may be copied alone.

    python algos/r2d2_lstm.py --env-id envs_shared.memory_tasks:TMaze20-v0

  id                                  observation               actions                maximum  without memory
  TMaze{10,20,50}-v0                  Box(2): cue, junction     3: forward, up, down   1        0
  CartPoleNoVelocity-v0               Box(2): x, angle          2: left, right         500      about 85
  MiniGrid-MemoryForcedS{7,9,13}-v0   984 bits                  7 of MiniGrid          below 1  about 0.49

"Without memory" is the mean return of the best policy that sees the current observation alone. For the T-maze
it follows from symmetry. For CartPole it is the best that a search over tables of the angle has found, not a
bound. In MiniGrid such a policy can only guess.
"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector.utils import batch_space


class TMazeVector(gym.vector.VectorEnv):
    """B corridors of `length` cells, where a cue in the first observation tells which way to turn at the end.

    After Bakker 2001, "Reinforcement learning with long short-term memory". The cue is 1 (up) or -1 (down),
    each with probability 1/2, in the first observation of an episode, and 0 in all others. The second number
    is 1 at the junction. Actions: 0 forward, 1 up, 2 down. In the corridor, up and down do nothing. At the
    junction, forward does nothing, and a turn ends the episode with reward 1 if it follows the cue and -1 if
    not. All other rewards are 0. Episodes are truncated after 4 `length` + 20 steps. The step after an end
    begins the next episode (NEXT_STEP).

    Bakker's maze shows the cue for as long as the agent stays in the first cell, has four compass actions,
    and rewards the right turn with 4, the wrong one and standing still with -0.1.
    """

    def __init__(self, num_envs: int = 1, length: int = 20):
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self.num_envs, self.length, self.max_steps = num_envs, length, 4 * length + 20
        low, high = np.float32([-1, 0]), np.float32([1, 1])
        self.single_observation_space = gym.spaces.Box(low, high)
        self.single_action_space = gym.spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        # [B] each: steps of the episode, cells from the start (the junction is at `length`), and the cue
        self.steps, self.position, self.cue = np.zeros((3, num_envs), int)
        self.is_over = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Begin an episode in every corridor."""
        super().reset(seed=seed)
        self.is_over[:] = False
        return self.start(~self.is_over), {}

    def step(self, actions):
        """Take actions [B]; if the last step ended an episode, begin the next one instead."""
        was_over = self.is_over
        self.steps = self.steps + 1
        terminated = (self.position == self.length) & (actions != 0) & ~was_over
        truncated = (self.steps >= self.max_steps) & ~terminated & ~was_over
        rewards = np.where(actions == 1, self.cue, -self.cue) * terminated * 1.0
        self.position = np.minimum(self.position + (actions == 0), self.length)
        self.is_over = terminated | truncated
        return self.start(was_over), rewards, terminated, truncated, {}

    def start(self, mask):
        """Begin episodes where mask [B] is true; returns the observations [B, 2] of all corridors."""
        self.steps[mask] = self.position[mask] = 0
        self.cue[mask] = self.np_random.integers(0, 2, mask.sum()) * 2 - 1
        return np.float32((self.cue * (self.steps == 0), self.position == self.length)).T


class TMaze(gym.Env):
    """A single corridor; with the same seed, its episodes are those of TMazeVector with one corridor."""

    def __init__(self, length: int = 20, render_mode: str | None = None):
        self.envs = TMazeVector(1, length)
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Begin an episode."""
        super().reset(seed=seed)
        obs, info = self.envs.reset(seed=seed)
        return obs[0], info

    def step(self, action):
        """Take one action."""
        obs, rewards, terminated, truncated, info = self.envs.step(np.array([action]))
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info


def make_cartpole(**kwargs) -> gym.Env:
    """Make CartPole that shows only the cart's position and the pole's angle."""
    env = CartPoleEnv(**kwargs)
    space = hide_velocities(env.observation_space)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], space)


def make_cartpole_vector(**kwargs) -> gym.vector.VectorEnv:
    """Make the vector environment of the same task."""
    envs = CartPoleVectorEnv(**kwargs)
    space = hide_velocities(envs.single_observation_space)
    transform = gym.wrappers.vector.TransformObservation
    return transform(envs, lambda obs: obs[:, [0, 2]], single_observation_space=space)


def hide_velocities(space: gym.spaces.Box) -> gym.spaces.Box:
    """Return the box of the components 0 and 2."""
    return gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])


def make_memory_forced(**kwargs) -> gym.Env:
    """Make MiniGrid's Memory with a start from which the hint is in view.

    The agent starts beside the hint, at the closed end of the room, and looks along the hallway. Nothing has
    to be explored to see the hint: it only has to be remembered, and compared with the objects at the end of
    the hallway.
    """
    from minigrid.envs.memory import MemoryEnv  # pip install minigrid

    from envs_shared.minigrid_one_hot import OneHot  # observations of bits

    class MemoryForced(MemoryEnv):
        def _gen_grid(self, width, height):
            super()._gen_grid(width, height)
            self.agent_pos = np.array((1, height // 2))

    return OneHot(MemoryForced(**kwargs))


for length in (10, 20, 50):
    gym.register(f"TMaze{length}-v0", TMaze, vector_entry_point=TMazeVector, kwargs={"length": length})
gym.register(
    "CartPoleNoVelocity-v0", make_cartpole, vector_entry_point=make_cartpole_vector, max_episode_steps=500
)
for size in (7, 9, 13):
    gym.register(f"MiniGrid-MemoryForcedS{size}-v0", make_memory_forced, kwargs={"size": size})
