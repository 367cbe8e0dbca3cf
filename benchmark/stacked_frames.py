"""The memory tasks of R2D2's page with stacked frames: the observation is that of the last k steps.

    python algos/ppo.py --env-id benchmark.stacked_frames:RepeatPreviousEasy-Stack4-v0 --gamma 0.5

At the start of an episode, copies of its first observation fill the stack. Needs popgym, and the tasks of
MiniGrid need minigrid.
"""

import gymnasium as gym


def make_stacked(env_id: str, num_frames: int, **kwargs):
    """Make the task `env_id` with observations of the last `num_frames` steps.

    Of MiniGrid's views, these are object, color and state of 7 x 7 cells, without direction and mission.
    """
    env = gym.make(env_id, **kwargs)
    if env_id.startswith("minigrid"):
        from minigrid.wrappers import ImgObsWrapper

        env = ImgObsWrapper(env)
    return gym.wrappers.FrameStackObservation(env, num_frames)


# The task of each short name, and the numbers of frames to register it with
TASKS = {
    "RepeatPreviousEasy": ("popgym:popgym-RepeatPreviousEasy-v0", (4,)),
    "RepeatPreviousMedium": ("popgym:popgym-RepeatPreviousMedium-v0", (32,)),
    "RepeatFirstEasy": ("popgym:popgym-RepeatFirstEasy-v0", (4, 16, 52)),
    "CartPoleNoVelocity": ("envs_shared.memory_tasks:CartPoleNoVelocity-v0", (2,)),
    "TMaze20": ("envs_shared.memory_tasks:TMaze20-v0", (24, 101)),
    # 64 views are 9,408 numbers, and algos/ppo.py accepts up to 10,000
    "MiniGridMemoryS7": ("minigrid:MiniGrid-MemoryS7-v0", (16, 64)),
}
for name, (env_id, stacks) in TASKS.items():
    for num_frames in stacks:
        gym.register(
            f"{name}-Stack{num_frames}-v0",
            make_stacked,
            kwargs={"env_id": env_id, "num_frames": num_frames},
        )
