"""CleanRL's ppo.py as it is in its package, on one thread: how many steps it makes in a CPU-second.

The file is run unchanged. It was written for gym 0.23, so the module `gym` that it imports is made here of gymnasium:
an environment is seeded by its first reset, vector environments reset themselves within the step that ends an episode,
as they did, `reset` and `step` return what they returned, and infos are made for episodes that ended alone.
`distutils.util.strtobool`, which Python 3.12 no longer has, is made here too. CPU-seconds count from the first line of
the file, its imports being done already, to its last.

--settings own: CleanRL's defaults. --settings ours: the defaults of algos/ppo.py.
"""

import contextlib
import io
import runpy
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path

import peer

OURS = (
    "--num-envs 32 --num-steps 64 --learning-rate 4e-3 --gamma 0.98 --gae-lambda 0.95 --num-minibatches 4 "
    "--update-epochs 5 --clip-vloss False --ent-coef 0"
)
SETTINGS = {"own": [], "ours": OURS.split()}


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "CartPole-v1")
    parser.add_argument("--total-timesteps", type=peer.count, default=100_000)
    parser.add_argument("--settings", choices=("own", "ours"), default="own")
    return parser


def make_gym():
    """A module that has what CleanRL's file uses of gym 0.23."""
    import gymnasium
    import numpy as np
    from gymnasium.vector import AutoresetMode

    class RecordEpisodeStatistics(gymnasium.wrappers.RecordEpisodeStatistics):
        def seed(self, seed: int) -> None:
            super().reset(seed=seed)

    class SyncVectorEnv(gymnasium.vector.SyncVectorEnv):
        def __init__(self, env_fns):
            super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)

        def reset(self):
            return super().reset()[0]

        def step(self, actions):
            obs, rewards, terminated, truncated, infos = super().step(actions)
            done = terminated | truncated
            scores = infos["final_info"]["episode"] if done.any() else {"r": [], "l": []}
            episodes = [{"episode": {key: scores[key][i] for key in "rl"}} for i in np.flatnonzero(done)]
            return obs, rewards, done, episodes

    gym = types.ModuleType("gym")
    gym.make, gym.spaces = gymnasium.make, gymnasium.spaces
    gym.wrappers = types.SimpleNamespace(RecordEpisodeStatistics=RecordEpisodeStatistics)
    gym.vector = types.SimpleNamespace(SyncVectorEnv=SyncVectorEnv)
    return gym


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    import gymnasium
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    from tqdm import tqdm

    try:
        gymnasium.make(args.env_id).close()
    except (gymnasium.error.Error, ImportError) as error:
        peer.fail(f"--env-id {args.env_id}: {error}")
    torch.set_num_threads(1)
    distutils = types.ModuleType("distutils.util")
    distutils.strtobool = lambda text: text.lower() in ("y", "yes", "t", "true", "on", "1")
    sys.modules |= {"distutils": types.ModuleType("distutils"), "distutils.util": distutils, "gym": make_gym()}
    path = Path(find_spec("cleanrl").submodule_search_locations[0], "ppo.py")
    flags = ["--env-id", args.env_id, "--seed", args.seed, "--total-timesteps", args.total_timesteps, "--cuda", False]
    sys.argv = [str(path), *map(str, flags), *SETTINGS[args.settings]]

    run = peer.Run(args, Path(__file__).stem)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),  # where it writes its own log
        contextlib.redirect_stdout(io.StringIO()),
        tqdm(total=1, unit="run") as bar,
    ):
        found = runpy.run_path(str(path), run_name="__main__")
        bar.update()
    metrics = {"steps_per_cpu_second": found["global_step"] / run.cpu_seconds}
    run.finish("steps_per_cpu_second", metrics, found["global_step"], peer.get_version("cleanrl"))


if __name__ == "__main__":
    main()
