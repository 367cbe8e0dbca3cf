"""LeanRL's PPO (https://github.com/meta-pytorch/LeanRL) on a task with continuous actions, on one thread.

Its `ppo_continuous_action_torchcompile.py` is run, unchanged, from the folder leanrl/ of a checkout, which
--checkout or the environment variable LEANRL names. Another version of that file than the one of COMMIT is
refused. The settings are its defaults, which are those of CleanRL's `ppo_continuous_action.py`.

As it was written for gymnasium 0.29, today's is given the form that it expects, as in cleanrl_ppo.py. A
stand-in for wandb writes nothing: returns and CPU-seconds are logged once a rollout, as our scripts do.

CPU-seconds are those of the process and of the C++ compiler that it starts, after its imports. With
--compile, torch.compile translates acting, advantages and update, and nothing that an earlier run has
compiled is used. The final metrics give the steps per CPU-second from the third rollout on, which leaves the
compilation out.
"""

import contextlib
import io
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path

from benchmark.peers import cleanrl_ppo, peer

FILE = "leanrl/ppo_continuous_action_torchcompile.py"
COMMIT = "760837e0844e32bb5e1b06afb612ac694f7240ca"
SHA256 = "05959dff3490356aca30b3fbc5b5a4a5940da092cf1e4bd4f73bc936702eaa1b"
NUM_BURN_IN = 2  # rollouts until everything is compiled


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_ppo_parser(__doc__)
    parser.set_defaults(env_id="Pendulum-v1")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkout", default=os.environ.get("LEANRL"), help="folder (default: $LEANRL)")
    return parser


def find_seconds() -> float:
    """Return the CPU-seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    path = peer.find_file(args.checkout, FILE, "meta-pytorch/LeanRL", COMMIT, SHA256)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise in processes that do not end before the run
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    import gymnasium
    import tensordict.nn  # noqa: F401  # here and below, imports are kept out of the timing
    import torch
    import torch._dynamo
    import tqdm
    import tyro  # noqa: F401

    env = gymnasium.make(args.env_id)
    if not isinstance(env.action_space, gymnasium.spaces.Box):
        peer.fail(f"--env-id {args.env_id}: its actions are not continuous, which this PPO needs")
    env.close()
    torch.set_num_threads(1)
    returns: list[float] = []
    cleanrl_ppo.adapt_gymnasium(returns, is_continuous=True)
    sys.modules["wandb"] = types.ModuleType("wandb")
    sys.modules["wandb"].init = sys.modules["wandb"].log = lambda *values, **options: None

    versions = ", ".join(map(peer.get_version, ("tensordict", "torch")))
    run = peer.Run(args, Path(__file__).stem, f"leanrl {COMMIT[:7]}, {versions}")
    start = find_seconds()
    spent = []  # CPU-seconds until the end of each rollout and its update

    class Bar(tqdm.tqdm):
        def __iter__(self):
            for iteration in super().__iter__():
                yield iteration
                spent.append(find_seconds() - start)
                scalars = {"charts/cpu_seconds": spent[-1]}
                if returns:
                    scalars["charts/episodic_return"] = sum(returns) / len(returns)
                    returns.clear()
                run.log(iteration * rollout, scalars)

    tqdm.tqdm, rollout = Bar, 2048
    flags = ["--env-id", args.env_id, "--seed", args.seed, "--total-timesteps", args.total_timesteps]
    sys.argv = [str(path), *map(str, flags), "--no-cuda", *["--compile"] * args.compile]
    run.path = run.path.resolve()  # the script runs in a folder of its own
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        runpy.run_path(str(path), run_name="__main__")
    num_rollouts = len(spent)
    scores = {"charts/cpu_seconds": spent[-1]}
    if num_rollouts > NUM_BURN_IN:
        seconds = spent[-1] - spent[NUM_BURN_IN - 1]
        scores["steps_per_second_compiled"] = (num_rollouts - NUM_BURN_IN) * rollout / seconds
    run.finish(num_rollouts * rollout, scores)


if __name__ == "__main__":
    main()
