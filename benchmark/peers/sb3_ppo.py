"""Stable-Baselines3's PPO on a gymnasium task, on one thread.

--settings tuned: those of RL Baselines3 Zoo for CartPole-v1, with linear schedules
(https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml).
--settings equal: the defaults of algos/ppo.py. Network, orthogonal weights and normalized advantages are alike already;
SB3's Adam has eps 1e-5.
"""

from pathlib import Path

import peer

NUM_EVAL_EPISODES = 100
TUNED = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8}
# SB3 leaves out the 1/2 of the value loss, so that its 0.25 is our 0.5
EQUAL = {"n_steps": 32, "batch_size": 512, "n_epochs": 5, "gae_lambda": 0.9, "clip_range": 0.2, "vf_coef": 0.25}


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "CartPole-v1")
    parser.add_argument("--total-timesteps", type=peer.at_least(1), default=100_000)
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
        env = gymnasium.make(args.env_id)
    except (gymnasium.error.Error, ImportError) as error:
        peer.fail(f"--env-id {args.env_id}: {error}")
    threshold = env.spec.reward_threshold
    env.close()
    torch.set_num_threads(1)
    run = peer.Run(args, script)
    bar, solved = tqdm(total=args.total_timesteps, unit="step"), {}

    class Record(BaseCallback):
        """The mean return of the last 20 training episodes after each rollout, as our scripts log it."""

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            bar.update(min(self.num_timesteps, args.total_timesteps) - bar.n)
            returns = [episode["r"] for episode in self.model.ep_info_buffer][-20:]
            if returns:
                mean_return = float(np.mean(returns))
                run.log(self.num_timesteps, {"charts/return_last_20": mean_return})
                bar.set_postfix({"return": f"{mean_return:.2f}"}, refresh=False)
                if threshold is not None and len(returns) == 20 and mean_return >= threshold and not solved:
                    solved.update(solved_step=self.num_timesteps, solved_cpu_seconds=run.cpu_seconds)

    model = make_model(make_vec_env(args.env_id, n_envs=num_envs, seed=args.seed))
    model.learn(args.total_timesteps, callback=Record())
    bar.close()
    seed = int(np.random.SeedSequence([args.seed, 1]).generate_state(1)[0])
    envs = make_vec_env(args.env_id, n_envs=min(num_envs, NUM_EVAL_EPISODES), seed=seed)
    episodes = evaluate_policy(model, envs, NUM_EVAL_EPISODES, deterministic=True, return_episode_rewards=True)
    returns, lengths = map(np.array, episodes)
    names = ("eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")
    metrics = dict(zip(names, map(float, (returns.mean(), returns.std(), lengths.mean())), strict=True))
    run.finish(names[0], metrics | solved, model.num_timesteps, peer.get_version(package))


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
