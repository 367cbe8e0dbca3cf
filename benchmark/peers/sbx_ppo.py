"""SBX's PPO, which is Stable-Baselines3's with network and update in JAX, on a gymnasium task, on one core.

The settings are the defaults of CleanRL's ppo.py. These differences are left: SBX has no clipped value loss
(it takes the argument and ignores it), clips the gradients of policy and value apart, has orthogonal weights
in the last layer of the policy alone, and lowers the learning rate before the first update, CleanRL and ours
after it. Compiling takes seconds, all of them in the first rollout and its update:
`steps_per_second_compiled` is the rate of the rollouts that follow.
"""

import dataclasses
import os
from pathlib import Path

from benchmark.peers import peer, sb3_ppo


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_ppo_parser(__doc__)
    parser.add_argument("--eval-interval", type=int, default=0, help="rollouts between evaluations")
    return parser


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    # One core: the threads that JAX makes for several cost CPU-seconds
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["JAX_PLATFORMS"] = "cpu"
    from sbx import PPO

    arguments = sb3_ppo.CLEANRL.arguments | {"policy_kwargs": {"ortho_init": True}}
    settings = dataclasses.replace(sb3_ppo.CLEANRL, arguments=arguments)
    names = Path(__file__).stem, "sbx-rl"
    sb3_ppo.train(args, *names, settings, PPO, "MlpPolicy", compiles_first=True)


if __name__ == "__main__":
    main()
