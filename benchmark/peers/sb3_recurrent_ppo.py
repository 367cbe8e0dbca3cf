"""RecurrentPPO of sb3-contrib, PPO with an LSTM, on a memory task of ours, on one thread.

LSTM and hidden layers of 64 and the discount are those of algos/r2d2_lstm.py. The rest was chosen among three settings
on one seed (101) of RepeatPreviousEasy-v0 after 60,000 steps: a return of 0.61 with those below; 0.04 with a
learning rate of 1e-3; and 0.56 with 1e-3, 32 steps, 10 epochs and lambda 0.8, after RL Baselines3 Zoo's for CartPole
without velocities, which have 8 environments, 20 epochs and a falling clip range.
"""

from pathlib import Path

import peer
import sb3_ppo

SETTINGS = sb3_ppo.Settings(
    num_envs=16,
    arguments={"n_steps": 64, "batch_size": 256, "n_epochs": 5, "gae_lambda": 0.9, "gamma": 0.98}
    | {"learning_rate": 3e-3, "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": [64]}},
    falling=("learning_rate",),
)


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "RepeatPreviousEasy-v0")
    parser.add_argument("--total-timesteps", type=peer.count, default=500_000)
    parser.add_argument("--eval-interval", type=int, default=0, help="rollouts between evaluations")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    from sb3_contrib import RecurrentPPO

    sb3_ppo.train(args, Path(__file__).stem, "sb3-contrib", SETTINGS, RecurrentPPO, "MlpLstmPolicy")


if __name__ == "__main__":
    main()
