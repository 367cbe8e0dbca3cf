"""Stable-Baselines3's PPO on a gymnasium task, on one thread.

--settings tuned: those of RL Baselines3 Zoo for CartPole-v1, with linear schedules
(https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml).
--settings equal: the defaults of algos/ppo.py. Network, orthogonal weights and normalized advantages are alike already;
SB3's Adam has eps 1e-5.

Scalars are logged after the update that follows a rollout, as our scripts do, with the seconds of that update.
"""

from pathlib import Path

import peer

NUM_EVAL_EPISODES, NUM_EPISODES_ON_THE_WAY = 100, 10
TUNED = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8}
# SB3 leaves out the 1/2 of the value loss, so that its 0.25 is our 0.5
EQUAL = {"n_steps": 32, "batch_size": 512, "n_epochs": 5, "gae_lambda": 0.9, "clip_range": 0.2, "vf_coef": 0.25}


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "CartPole-v1")
    parser.add_argument("--total-timesteps", type=peer.at_least(1), default=100_000)
    parser.add_argument("--eval-interval", type=peer.at_least(0), default=0, help="rollouts between evaluations")
    parser.add_argument("--settings", choices=("tuned", "equal"), default="tuned")
    return parser


def train(args, script: str, package: str, num_envs: int, make_model) -> None:
    """Train `make_model(envs)` to the end of --total-timesteps and evaluate it as our scripts do."""
    import gymnasium
    import numpy as np
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from tqdm import tqdm

    import envs_shared.gym_tasks.memory  # noqa: F401  # registers our tasks

    try:
        gymnasium.make(args.env_id).close()
    except (gymnasium.error.Error, ImportError) as error:
        peer.fail(f"--env-id {args.env_id}: {error}")
    torch.set_num_threads(1)
    final_seed, seed = (int(np.random.SeedSequence([args.seed, i]).generate_state(1)[0]) for i in (1, 2))
    eval_envs = make_vec_env(args.env_id, n_envs=NUM_EPISODES_ON_THE_WAY, seed=seed)
    run = peer.Run(args, script)
    bar = tqdm(total=args.total_timesteps, unit="step")

    def evaluate(model, envs, num_episodes: int) -> dict[str, float]:
        episodes = evaluate_policy(model, envs, num_episodes, deterministic=True, return_episode_rewards=True)
        returns, lengths = map(np.array, episodes)
        names = ("eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")
        return dict(zip(names, map(float, (returns.mean(), returns.std(), lengths.mean())), strict=True))

    class Record(BaseCallback):
        """Logs the mean return of the last 20 training episodes, and evaluations, after each rollout's update."""

        def __init__(self):
            super().__init__()
            self.num_rollouts = 0

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps:
                self.record()

        def _on_training_end(self) -> None:
            self.record()

        def record(self) -> None:
            self.num_rollouts += 1
            bar.update(min(self.num_timesteps, args.total_timesteps) - bar.n)
            scalars = {}
            if returns := [episode["r"] for episode in self.model.ep_info_buffer][-20:]:
                scalars["charts/return_last_20"] = float(np.mean(returns))
                bar.set_postfix({"return": f"{scalars['charts/return_last_20']:.2f}"}, refresh=False)
            if args.eval_interval and self.num_rollouts % args.eval_interval == 0:
                start = run.cpu_seconds
                found = evaluate(self.model, eval_envs, NUM_EPISODES_ON_THE_WAY)
                run.evaluation_seconds += run.cpu_seconds - start
                scalars["eval/episodic_return"] = found["eval/episodic_return"]
            if scalars:
                run.log(self.num_timesteps, scalars)

    model = make_model(make_vec_env(args.env_id, n_envs=num_envs, seed=args.seed))
    model.learn(args.total_timesteps, callback=Record())
    bar.close()
    envs = make_vec_env(args.env_id, n_envs=min(num_envs, NUM_EVAL_EPISODES), seed=final_seed)
    metrics = evaluate(model, envs, NUM_EVAL_EPISODES)
    run.finish(next(iter(metrics)), metrics, model.num_timesteps, peer.get_version(package))


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    from stable_baselines3 import PPO

    is_tuned = args.settings == "tuned"
    settings = TUNED | {"clip_range": lambda remaining: 0.2 * remaining} if is_tuned else EQUAL
    learning_rate = 1e-3 if is_tuned else 4e-3

    def make_model(envs):
        return PPO(
            "MlpPolicy",
            envs,
            learning_rate=lambda remaining: learning_rate * remaining,
            gamma=0.98,
            seed=args.seed,
            device="cpu",
            **settings,
        )

    train(args, Path(__file__).stem, "stable-baselines3", 8 if is_tuned else 64, make_model)


if __name__ == "__main__":
    main()
