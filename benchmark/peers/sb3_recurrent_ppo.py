"""RecurrentPPO of sb3-contrib, which is PPO with an LSTM, on a memory task of popgym or ours, on one thread.

--settings ours: LSTM and hidden layers of 64, as in algos/r2d2_lstm.py. The rest was chosen among twelve
settings on three seeds (101 to 103) of RepeatPreviousEasy, by the CPU-seconds to two evaluations in a row at
0.9: with a gamma of 0.98, none got there in 60,000 steps; with 0.5 and 64 steps, 5 epochs and a learning rate
of 3e-3, it took 16 CPU-seconds, and with those below 4.3. Others had 16, 32 or 128 steps, batches of 128,
256 or 512, 10 epochs, learning rates of 1e-3 or 5e-3, or a gamma of 0.
--settings zoo: those that RL Baselines3 Zoo has tuned for CartPole without velocities, its smallest task with
Discrete actions that takes memory (CartPoleNoVel-v1 in
https://github.com/DLR-RM/rl-baselines3-zoo/blob/22e3ff2450fd92033f7f032915e1f64894a09584/hyperparams/ppo_lstm.yml):
normalized observations and rewards, and for policy and value an LSTM and a ReLU layer of 64 each, without
orthogonal weights. The entry is for 100,000 steps.
--settings zoo-untuned: the same entry before it was tuned
(https://github.com/DLR-RM/rl-baselines3-zoo/blob/038ab1617a486b7d918be8056697bf34caeefbcd/hyperparams/ppo_lstm.yml),
with the network as it is in sb3-contrib: LSTMs of 256 for policy and value, then two layers of 64 each.
"""

from pathlib import Path

from benchmark.peers import peer, sb3_ppo

SETTINGS = {
    "ours": sb3_ppo.Settings(
        num_envs=16,
        arguments={"n_steps": 16, "batch_size": 128, "n_epochs": 5, "gae_lambda": 0.9, "gamma": 0.5}
        | {"learning_rate": 5e-3, "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": [64]}},
        falling=("learning_rate",),
    ),
    "zoo-untuned": sb3_ppo.Settings(
        num_envs=8,
        arguments={"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98}
        | {"learning_rate": 1e-3, "clip_range": 0.2, "ent_coef": 0.0},
        falling=("learning_rate", "clip_range"),
    ),
    "zoo": sb3_ppo.Settings(
        num_envs=8,
        arguments={"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98}
        | {"learning_rate": 1e-3, "clip_range": 0.2, "ent_coef": 0.0}
        | {
            "policy_kwargs": {
                "lstm_hidden_size": 64,
                "net_arch": {"pi": [64], "vf": [64]},
                "ortho_init": False,
            }
        },
        is_normalized=True,
        falling=("learning_rate", "clip_range"),
    ),
}


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_parser(__doc__, "popgym:popgym-RepeatPreviousEasy-v0")
    parser.add_argument("--total-timesteps", type=peer.count, default=500_000)
    parser.add_argument("--eval-interval", type=int, default=0, help="rollouts between evaluations")
    parser.add_argument("--settings", choices=SETTINGS, default="ours")
    parser.add_argument(
        "--stop-return", type=float, help="stop after two evaluations in a row at this return"
    )
    return parser


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    from sb3_contrib import RecurrentPPO
    from torch import nn

    settings = SETTINGS[args.settings]
    if args.settings == "zoo":
        settings.arguments["policy_kwargs"]["activation_fn"] = nn.ReLU
    names = Path(__file__).stem, "sb3-contrib"
    sb3_ppo.train(args, *names, settings, RecurrentPPO, "MlpLstmPolicy", args.stop_return)


if __name__ == "__main__":
    main()
