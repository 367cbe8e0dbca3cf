"""Small tasks that a policy without memory cannot solve, stepped for all environments at once in numpy.

`import envs_shared.gym_tasks.memory` registers them with gymnasium; a command line imports it by itself with
`--env-id envs_shared.gym_tasks.memory:TMaze20-v0`.

    id                                    observation          actions                solved  without memory
    RepeatPrevious{Easy,Medium,Hard}-v0   Discrete(4), a suit  4: a suit              0.95    -0.49
    TMaze{10,20,50}-v0                    Box(2), cue, flag    3: forward, up, down   0.95    0
    CartPoleNoVelocity-v0                 Box(2), x and theta  2: left, right         475     about 85

Every task has its own vector form with NEXT_STEP autoreset: the step after an ended episode ignores its action and
returns the first observation of the next episode with reward 0. `gym.make` gives the same task as a single
environment, which for the card game and the maze is the vector form of one environment, seed for seed.
"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv, VectorObservationWrapper
from gymnasium.vector.utils import batch_space

# Mean return of the best policy that sees the current observation alone: by counting cards, by symmetry, and for
# CartPole the best that a cross-entropy search over tables of the angle has found (84 in the mean of 4000 episodes),
# which proves no bound.
MEMORYLESS_CEILING = {
    "RepeatPreviousEasy-v0": -0.49,
    "RepeatPreviousMedium-v0": -0.495,
    "RepeatPreviousHard-v0": -0.497,
    "TMaze10-v0": 0.0,
    "TMaze20-v0": 0.0,
    "TMaze50-v0": 0.0,
    "CartPoleNoVelocity-v0": 85.0,
}


class MemoryTask(VectorEnv):
    """What the tasks share: the count of steps, and NEXT_STEP autoreset.

    A task sets the two single spaces before it calls `__init__` and defines
    `start(mask [B])`, which begins episodes there; `act(actions [B]) -> (rewards, terminated, truncated)`, each [B];
    and `observe() -> observations [B, ...]`. `self.steps` [B] counts the actions of the running episodes.
    """

    def __init__(self, num_envs: int):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.steps = np.zeros(num_envs, np.int64)
        self.done = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode everywhere, with all random numbers from one generator; returns observations, info."""
        super().reset(seed=seed)
        self.steps[:] = 0
        self.done[:] = False
        self.start(np.ones(self.num_envs, bool))
        return self.observe(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Take `actions` [B]; where the last step ended an episode, begin the next one instead."""
        is_start = self.done
        self.steps += 1
        rewards, terminated, truncated = self.act(actions)
        if is_start.any():
            rewards[is_start] = 0.0
            terminated[is_start] = truncated[is_start] = False
            self.steps[is_start] = 0
            self.start(is_start)
        self.done = terminated | truncated
        return self.observe(), rewards, terminated, truncated, {}


class RepeatPrevious(MemoryTask):
    """POPGym's card game (Morad et al. 2023, arXiv:2303.01859): say which suit was shown a while ago.

    `num_decks` decks of 52 are shuffled together and dealt one card a step, without replacement; the observation is
    the suit in {0, 1, 2, 3}. After the n-th card, from the k-th on, the right action is the suit of card n - k + 1
    (k = 1 would be the card just shown). Right and wrong answers give +1 and -1 over the number of scored steps,
    52 num_decks - k, so that returns lie in [-1, 1]; earlier actions give 0. The last card terminates the episode,
    after 52 num_decks - 1 steps. A guess is right one time in four: a mean return of -0.5. Without memory it pays
    to name any suit but the one shown, of which one card fewer is left for the other place: 2 * 13 / 51 - 1 with a
    single deck. One environment with a seed is dealt the cards that popgym 1.0.7 deals with it.
    """

    def __init__(self, num_envs: int = 1, k: int = 4, num_decks: int = 1):
        self.single_observation_space = gym.spaces.Discrete(4)
        self.single_action_space = gym.spaces.Discrete(4)
        super().__init__(num_envs)
        self.k, self.num_cards = k, 52 * num_decks
        self.index = np.arange(num_envs)
        self.suits = np.zeros((num_envs, self.num_cards), np.int64)  # [B, cards] in the order shown

    def start(self, mask: np.ndarray) -> None:
        """Shuffle the cards; they are dealt from the end, and card i has suit i mod 4."""
        cards = np.tile(np.arange(self.num_cards), (mask.sum(), 1))
        self.suits[mask] = self.np_random.permuted(cards, axis=1)[:, ::-1] % 4

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compare the actions [B] with the suits k cards back, counted from the card that is about to be shown."""
        is_right = actions == self.suits[self.index, self.steps - self.k]
        is_scored = self.steps >= self.k
        rewards = np.where(is_right, 1.0, -1.0) * is_scored / (self.num_cards - self.k)
        return rewards, self.steps == self.num_cards - 1, np.zeros(self.num_envs, bool)

    def observe(self) -> np.ndarray:
        """The suits shown now [B]."""
        return self.suits[self.index, self.steps]


class TMaze(MemoryTask):
    """A corridor of `length` cells and a junction, where a cue seen at the start tells which way to turn.

    After Bakker 2001, "Reinforcement learning with long short-term memory". The observation is (cue, at junction):
    the cue is +1 (up) or -1 (down), each with probability 1/2, in the first observation of an episode and 0 in all
    others, even if the agent stays in the first cell; the flag is 1 at the junction. Actions: 0 forward, 1 up,
    2 down. In the corridor up and down do nothing; at the junction forward does nothing, and a turn terminates the
    episode with reward +1 if it follows the cue and -1 if not. All other rewards are 0. Episodes are truncated after
    4 `length` + 20 steps. Any policy without memory, a random one too, turns the right way half the time: 0.

    Bakker's maze shows the cue for as long as the agent stays in the first cell, has four compass actions, and
    rewards the right turn with 4, the wrong one and standing still with -0.1.
    """

    def __init__(self, num_envs: int = 1, length: int = 20):
        self.single_observation_space = gym.spaces.Box(
            np.array([-1, 0], np.float32), np.array([1, 1], np.float32)
        )
        self.single_action_space = gym.spaces.Discrete(3)
        super().__init__(num_envs)
        self.length, self.max_steps = length, 4 * length + 20
        self.position = np.zeros(num_envs, np.int64)  # [B] cells from the start; the junction is at `length`
        self.cue = np.zeros(num_envs)  # [B] +1 or -1

    def start(self, mask: np.ndarray) -> None:
        """Put the agents in the first cell and draw new cues."""
        self.position[mask] = 0
        self.cue[mask] = self.np_random.integers(0, 2, mask.sum()) * 2.0 - 1.0

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Move along the corridor, or turn at its end."""
        terminated = (self.position == self.length) & (actions != 0)
        turn = np.where(actions == 1, 1.0, -1.0)  # [B] +1 up, -1 down
        rewards = turn * self.cue * terminated
        self.position = np.minimum(self.position + (actions == 0), self.length)
        return rewards, terminated, (self.steps >= self.max_steps) & ~terminated

    def observe(self) -> np.ndarray:
        """Cue and flag [B, 2]."""
        return np.stack((self.cue * (self.steps == 0), self.position == self.length), axis=1).astype(
            np.float32
        )


class HideVelocities(VectorObservationWrapper):
    """Keeps cart position (metres) and pole angle (radians) of CartPole's observations [B, 4], without velocities."""

    def __init__(self, envs: VectorEnv):
        super().__init__(envs)
        self.single_observation_space = without_velocities(envs.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, envs.num_envs)

    def observations(self, observations: np.ndarray) -> np.ndarray:
        """Observations [B, 2]."""
        return observations[:, [0, 2]]


def without_velocities(space: gym.spaces.Box) -> gym.spaces.Box:
    """The box of components 0 and 2 of CartPole's observations."""
    return gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=space.dtype.type)


class Single(gym.Env):
    """One environment as `gym.make` returns it, played in the vector form of one environment.

    Same arguments, spaces, rewards and seeds as the vector form; `reset` begins the next episode. There is nothing to
    render: `render_mode` is what `gym.make` passes, and is ignored.
    """

    def __init__(self, task: type[MemoryTask], render_mode: str | None = None, **kwargs):
        self.vector = task(num_envs=1, **kwargs)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """Begin an episode; returns its first observation and an empty info."""
        super().reset(seed=seed)
        obs, info = self.vector.reset(seed=seed)
        return obs[0], info

    def step(self, action):
        """Take one action; returns observation, reward, terminated, truncated and an empty info."""
        obs, rewards, terminated, truncated, info = self.vector.step(np.array([action]))
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info


def make_single_cartpole(**kwargs) -> gym.Env:
    """CartPole without velocities as a single environment, which can render."""
    env = CartPoleEnv(**kwargs)
    space = without_velocities(env.observation_space)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], space)


def register_task(env_id: str, task: type[MemoryTask], **kwargs) -> None:
    """Register a task of this module under `env_id`, as vector and as single environment."""
    gym.register(
        env_id,
        entry_point=lambda **kw: Single(task, **kw),
        vector_entry_point=task,
        reward_threshold=0.95,
        kwargs=kwargs,
    )


register_task("RepeatPreviousEasy-v0", RepeatPrevious, k=4, num_decks=1)
register_task("RepeatPreviousMedium-v0", RepeatPrevious, k=32, num_decks=2)
register_task("RepeatPreviousHard-v0", RepeatPrevious, k=64, num_decks=3)
for length in (10, 20, 50):
    register_task(f"TMaze{length}-v0", TMaze, length=length)
gym.register(
    "CartPoleNoVelocity-v0",
    entry_point=make_single_cartpole,
    vector_entry_point=lambda **kwargs: HideVelocities(CartPoleVectorEnv(**kwargs)),
    max_episode_steps=500,
    reward_threshold=475.0,
)
