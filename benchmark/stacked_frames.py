"""The memory tasks of R2D2's page with stacked frames: the observation is that of the last k steps.

    python algos/ppo.py --env-id benchmark.stacked_frames:RepeatPreviousEasy-Stack4-v0 --gamma 0.5

At the start of an episode, copies of its first observation fill the stack. Needs popgym, and the tasks of MiniGrid need
minigrid.
"""

import gymnasium as gym


def make_stacked(env_id: str, num_frames: int, **kwargs) -> gym.Env:
    """Make the task `env_id` with observations of the last `num_frames` steps."""
    return gym.wrappers.FrameStackObservation(gym.make(env_id, **kwargs), num_frames)


def make_minigrid(env_id: str, num_frames: int, is_one_hot: bool, **kwargs) -> gym.Env:
    """Make a stack of MiniGrid's views of 7 x 7 cells, without direction and mission.

    A cell is one-hot, 20 numbers as in R2D2's observations, or MiniGrid's three: object, color and state.
    """
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper  # pip install minigrid

    env = gym.make(env_id, **kwargs)
    if is_one_hot:
        env = OneHotPartialObsWrapper(env)
    return gym.wrappers.FrameStackObservation(ImgObsWrapper(env), num_frames)


# The task of each short name, and the numbers of frames to register it with
TASKS = {
    "RepeatPreviousEasy": ("popgym:popgym-RepeatPreviousEasy-v0", (4,)),
    "RepeatPreviousMedium": ("popgym:popgym-RepeatPreviousMedium-v0", (32,)),
    "RepeatFirstEasy": ("popgym:popgym-RepeatFirstEasy-v0", (4, 16, 52)),
    "CartPoleNoVelocity": ("envs_shared.memory_tasks:CartPoleNoVelocity-v0", (2,)),
    "TMaze20": ("envs_shared.memory_tasks:TMaze20-v0", (24, 101)),
}
for name, (env_id, stacks) in TASKS.items():
    for num_frames in stacks:
        gym.register(
            f"{name}-Stack{num_frames}-v0",
            make_stacked,
            kwargs={"env_id": env_id, "num_frames": num_frames},
        )

# The largest stacks are those that algos/ppo.py accepts: 9,800 and 9,408 numbers
for name, is_one_hot, num_frames in (
    ("Bits", True, 4),
    ("Bits", True, 10),
    ("Cells", False, 16),
    ("Cells", False, 64),
):
    gym.register(
        f"MiniGridMemoryS7-{name}{num_frames}-v0",
        make_minigrid,
        kwargs={"env_id": "MiniGrid-MemoryS7-v0", "num_frames": num_frames, "is_one_hot": is_one_hot},
    )
