"""PureJaxRL's PPO (https://github.com/luchris429/purejaxrl) on CartPole-v1 of gymnax, in JAX on one core.

Its `ppo.py` is imported, unchanged, from the folder purejaxrl/ of a checkout, which --checkout or the
environment variable PUREJAXRL names. Another version of that file than the one of COMMIT is refused. Its
`wrappers.py` imports brax and navix, whose tasks are not used here: empty modules stand in their place.

The whole training, environments included, is one compiled program. The last charts/cpu_seconds count the
compilation too. While the program runs, nothing can be read from it, so seconds in between are spread evenly
over its steps. The final metrics give the seconds of the compilation, and the steps per CPU-second without
it. CPU-seconds are those of all threads of the process after its imports; reading and logging the returns,
after the end, is left out.

--settings cleanrl: the defaults of CleanRL's ppo.py, which are those of this file too.
--settings ours: the defaults of algos/ppo.py, with --clip-vloss and --no-norm-reward.
Time limits are failures, as in CleanRL. Training ends with the last whole rollout.
"""

import os
import sys
import types
from pathlib import Path

from benchmark.peers import peer

COMMIT = "31756b197773a52db763fdbe6d635e4b46522a73"
SHA256 = "6650c9f8943ed67e8d287d0dd1536e49d8f603e04550cdc506727e46b34024fd"
COMMON = {"GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5, "NUM_MINIBATCHES": 4}
COMMON |= {"ACTIVATION": "tanh", "ANNEAL_LR": True}
SETTINGS = {
    "cleanrl": {"NUM_ENVS": 4, "NUM_STEPS": 128, "UPDATE_EPOCHS": 4}
    | {"LR": 2.5e-4, "GAMMA": 0.99, "ENT_COEF": 0.01},
    "ours": {"NUM_ENVS": 32, "NUM_STEPS": 64, "UPDATE_EPOCHS": 5}
    | {"LR": 4e-3, "GAMMA": 0.98, "ENT_COEF": 0.0},
}


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_ppo_parser(__doc__)
    parser.add_argument("--settings", choices=SETTINGS, default="cleanrl")
    parser.add_argument(
        "--checkout", default=os.environ.get("PUREJAXRL"), help="folder (default: $PUREJAXRL)"
    )
    return parser


def import_ppo(checkout: str | None):
    """Import ppo.py of a checkout of PureJaxRL."""
    path = peer.find_file(checkout, "purejaxrl/ppo.py", "luchris429/purejaxrl", COMMIT, SHA256)
    unused = {name: types.ModuleType(name) for name in ("brax", "brax.envs", "brax.envs.wrappers", "navix")}
    unused["brax"].envs = unused["brax.envs"]
    training = types.ModuleType("brax.envs.wrappers.training")
    training.EpisodeWrapper = training.AutoResetWrapper = None
    sys.modules |= unused | {"brax.envs.wrappers.training": training}
    sys.path.insert(0, str(path.parent))
    import ppo

    return ppo


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    # One core: the threads that JAX makes for several cost CPU-seconds
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["JAX_PLATFORMS"] = "cpu"
    ppo = import_ppo(args.checkout)
    import gymnax
    import jax
    import numpy as np

    if args.env_id not in gymnax.registered_envs:
        peer.fail(f"--env-id {args.env_id}: gymnax has {', '.join(gymnax.registered_envs)}")
    config = {"ENV_NAME": args.env_id, "TOTAL_TIMESTEPS": args.total_timesteps} | COMMON
    config |= SETTINGS[args.settings]
    versions = ", ".join(map(peer.get_version, ("gymnax", "jax")))
    run = peer.Run(args, Path(__file__).stem, f"purejaxrl {COMMIT[:7]}, {versions}")

    key = jax.random.PRNGKey(args.seed)
    train = jax.jit(ppo.make_train(config)).lower(key).compile()
    compile_seconds = run.cpu_seconds
    metrics = jax.block_until_ready(train(key))["metrics"]
    seconds = run.cpu_seconds

    # [updates, steps, environments]
    returns = np.asarray(metrics["returned_episode_returns"])
    is_end = np.asarray(metrics["returned_episode"])
    num_updates = len(returns)
    rollout = config["NUM_ENVS"] * config["NUM_STEPS"]
    for update in range(num_updates):
        spent = compile_seconds + (seconds - compile_seconds) * (update + 1) / num_updates
        scalars = {"charts/cpu_seconds": spent}
        if is_end[update].any():
            scalars["charts/episodic_return"] = float(returns[update][is_end[update]].mean())
        run.log((update + 1) * rollout, scalars)
    steps = num_updates * rollout
    rate = steps / (seconds - compile_seconds)
    scores = {"compile_cpu_seconds": compile_seconds, "steps_per_second_compiled": rate}
    run.finish(steps, scores | {"charts/cpu_seconds": seconds})


if __name__ == "__main__":
    main()
