"""CleanRL's PPO as it is in its package, on one thread: `ppo.py`, or `ppo_continuous_action.py` for a box of
actions.

The files are run unchanged. They were written for gym 0.23 and gymnasium 0.28, so today's gymnasium is given
the form that they expect: vector environments reset themselves within the step that ends an episode, finished
episodes are a list of infos, `TransformObservation` needs no space, and the module `gym` is gymnasium with
the old return values of `reset` and `step`. `distutils.util.strtobool`, which Python 3.12 no longer has, is
made here too. CPU-seconds count from the first line of the file to its last; its imports are done before.

Everything that CleanRL logs is in the run folder. `charts/episodic_return` is written once a rollout, the
mean over the episodes that ended in it, as our scripts write it, and so is `charts/cpu_seconds`.

--settings own: CleanRL's defaults. --settings ours: the defaults of algos/ppo.py. --settings 8x256: CleanRL's
defaults, but for eight environments of 256 steps, in which a rollout has as many steps as in the default of
`ppo_continuous_action.py`, one environment of 2,048.
"""

import contextlib
import io
import runpy
import sys
import tempfile
import types
from importlib.util import find_spec
from pathlib import Path

from benchmark.peers import peer

OURS = (
    "--num-envs 32 --num-steps 64 --learning-rate 4e-3 --gamma 0.98 --gae-lambda 0.95 --num-minibatches 4 "
    "--update-epochs 5 --clip-vloss False --ent-coef 0"
)
SETTINGS = {"own": [], "ours": OURS.split(), "8x256": "--num-envs 8 --num-steps 256".split()}


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_ppo_parser(__doc__)
    parser.add_argument("--settings", choices=SETTINGS, default="own")
    return parser


def adapt_gymnasium(returns: list[float], is_continuous: bool):
    """Give gymnasium the form that CleanRL's files expect; returns of finished episodes are added to
    `returns`."""
    import gymnasium
    import numpy as np
    from gymnasium.vector import AutoresetMode

    class SyncVectorEnv(gymnasium.vector.SyncVectorEnv):
        def __init__(self, env_fns):
            super().__init__(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)

        def reset(self, seed=None):
            obs, infos = super().reset(seed=seed)
            return (obs, infos) if is_continuous else obs

        def step(self, actions):
            obs, rewards, terminated, truncated, infos = super().step(actions)
            done = terminated | truncated
            episodes = []
            for i in np.flatnonzero(done):
                scores = infos["final_info"]["episode"]
                episodes.append({"episode": {key: scores[key][i] for key in "rl"}})
                returns.append(float(scores["r"][i]))
            if is_continuous:
                return obs, rewards, terminated, truncated, {"final_info": episodes} if episodes else {}
            return obs, rewards, done, episodes

    class RecordEpisodeStatistics(gymnasium.wrappers.RecordEpisodeStatistics):
        def seed(self, seed: int) -> None:
            super().reset(seed=seed)

    class TransformObservation(gymnasium.wrappers.TransformObservation):
        def __init__(self, env, func):
            super().__init__(env, func, env.observation_space)

    gymnasium.vector.SyncVectorEnv = SyncVectorEnv
    gymnasium.wrappers.RecordEpisodeStatistics = RecordEpisodeStatistics
    gymnasium.wrappers.TransformObservation = TransformObservation
    distutils = types.ModuleType("distutils.util")
    distutils.strtobool = lambda text: text.lower() in ("y", "yes", "t", "true", "on", "1")
    sys.modules |= {"distutils": types.ModuleType("distutils"), "distutils.util": distutils, "gym": gymnasium}


def record_into(run: peer.Run, returns: list[float], bar):
    """Make SummaryWriter write into the run folder, with one mean return and the CPU-seconds of each
    rollout."""
    import torch.utils.tensorboard

    class Writer(torch.utils.tensorboard.SummaryWriter):
        def __init__(self, log_dir):
            super().__init__(str(run.path))
            self.add_text("program", run.program)

        def add_scalar(self, tag, value, step):
            if tag == "charts/episodic_return":
                return
            super().add_scalar(tag, value, step)
            if tag == "charts/SPS":  # the last scalar of a rollout
                super().add_scalar("charts/cpu_seconds", run.cpu_seconds, step)
                if returns:
                    super().add_scalar("charts/episodic_return", sum(returns) / len(returns), step)
                    returns.clear()
                bar.update(step - bar.n)

    torch.utils.tensorboard.SummaryWriter = Writer


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    import gymnasium
    import torch
    import torch._dynamo  # imported by torch.optim on first use: kept out of the timing
    from tqdm import tqdm

    try:
        env = gymnasium.make(args.env_id)
    except (gymnasium.error.Error, ImportError) as error:
        peer.fail(f"--env-id {args.env_id}: {error}")
    is_continuous = isinstance(env.action_space, gymnasium.spaces.Box)
    env.close()
    if is_continuous and args.settings == "ours":
        peer.fail("--settings ours: for discrete actions only")
    torch.set_num_threads(1)
    returns: list[float] = []
    adapt_gymnasium(returns, is_continuous)
    file = "ppo_continuous_action.py" if is_continuous else "ppo.py"
    path = Path(find_spec("cleanrl").submodule_search_locations[0], file)
    flags = [
        "--env-id",
        args.env_id,
        "--seed",
        args.seed,
        "--total-timesteps",
        args.total_timesteps,
        "--cuda",
        False,
    ]
    sys.argv = [str(path), *map(str, flags), *SETTINGS[args.settings]]

    args.run_dir = str(Path(args.run_dir).resolve())
    run = peer.Run(args, Path(__file__).stem, f"{peer.get_version('cleanrl')} {file}")
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        tqdm(total=args.total_timesteps, unit="step", mininterval=1) as bar,
    ):
        record_into(run, returns, bar)
        steps = runpy.run_path(str(path), run_name="__main__")["global_step"]
    seconds = run.cpu_seconds
    print(
        f"{args.env_id}: {run.program}: {steps:,} steps in {seconds:.1f} CPU-seconds; run folder {run.path}"
    )


if __name__ == "__main__":
    main()
