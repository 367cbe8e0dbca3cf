"""Stable-Baselines3's PPO on a gymnasium task, on one thread.

--settings tuned: those of RL Baselines3 Zoo for the task
(https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml, where LunarLander is still v2).
--settings equal: the defaults of algos/ppo.py with --no-norm-reward.
--settings cleanrl: the defaults of CleanRL's ppo.py.
With the last two, network, orthogonal weights, normalized advantages and Adam's eps of 1e-5 are SB3's own,
and the same in all three programs. These differences are left: if the value is clipped, CleanRL and ours take
the larger of the losses with and without clipping, and SB3 the loss with clipping; time limits are failures
in CleanRL alone; and SB3 lowers the learning rate before the first update, the others after it.

All evaluations during training play the same episodes, and begin in the states in which those of algos/ppo.py
begin. Scalars are logged after the update that follows a rollout, as our scripts do, with the seconds of that
update.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from benchmark.peers import peer

NUM_EVAL_EPISODES, NUM_EPISODES_ON_THE_WAY = 100, 10


@dataclass
class Settings:
    """Settings of PPO for a task."""

    num_envs: int
    arguments: dict  # of the class PPO
    is_normalized: bool = False  # observations and rewards, by VecNormalize
    falling: tuple[str, ...] = ()  # arguments that fall linearly to zero


TUNED = {
    "CartPole-v1": Settings(
        num_envs=8,
        arguments={"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8}
        | {"learning_rate": 1e-3, "clip_range": 0.2},
        falling=("learning_rate", "clip_range"),
    ),
    "Acrobot-v1": Settings(
        num_envs=16,
        arguments={"n_steps": 256, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94},
        is_normalized=True,
    ),
    "Pendulum-v1": Settings(
        num_envs=4,
        arguments={"n_steps": 1024, "n_epochs": 10, "gamma": 0.9, "gae_lambda": 0.95, "learning_rate": 1e-3}
        | {"use_sde": True, "sde_sample_freq": 4},
    ),
    "MountainCarContinuous-v0": Settings(
        num_envs=1,
        arguments={"n_steps": 8, "batch_size": 256, "n_epochs": 10, "gamma": 0.9999, "gae_lambda": 0.9}
        | {
            "learning_rate": 7.77e-5,
            "clip_range": 0.1,
            "ent_coef": 0.00429,
            "vf_coef": 0.19,
            "max_grad_norm": 5,
        }
        | {"use_sde": True, "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False}},
        is_normalized=True,
    ),
    "LunarLander-v3": Settings(
        num_envs=16,
        arguments={"n_steps": 1024, "batch_size": 64, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98}
        | {"ent_coef": 0.01},
    ),
}
# SB3 leaves out the 1/2 of the value loss, so that 0.25 here is 0.5 in the other two programs
EQUAL = Settings(
    num_envs=32,
    arguments={"n_steps": 64, "batch_size": 512, "n_epochs": 5, "gamma": 0.98, "gae_lambda": 0.95}
    | {"learning_rate": 4e-3, "clip_range": 0.2, "vf_coef": 0.25},
    falling=("learning_rate",),
)
CLEANRL = Settings(
    num_envs=4,
    arguments={"n_steps": 128, "batch_size": 128, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.95}
    | {"learning_rate": 2.5e-4, "clip_range": 0.2, "clip_range_vf": 0.2, "ent_coef": 0.01, "vf_coef": 0.25}
    | {"max_grad_norm": 0.5, "normalize_advantage": True},
    falling=("learning_rate",),
)


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_ppo_parser(__doc__)
    parser.add_argument("--eval-interval", type=int, default=0, help="rollouts between evaluations")
    parser.add_argument("--settings", choices=("tuned", "equal", "cleanrl"), default="tuned")
    return parser


def train(
    args,
    script: str,
    package: str,
    settings: Settings,
    model_class,
    policy: str,
    stop_return: float | None = None,
    compiles_first: bool = False,
) -> None:
    """Train a model to the end of --total-timesteps and evaluate it as our scripts do.

    With `stop_return`, training ends after two evaluations in a row at this return or above. With
    `compiles_first`, the steps per CPU-second after the first rollout and its update are a score, too.
    """
    import gymnasium
    import numpy as np
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
    from gymnasium import spaces
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize
    from tqdm import tqdm

    def make_env():  # without a render mode, LunarLander moves no particles, which saves half of a step
        env = gymnasium.make(args.env_id)
        # Of tasks for the LSTM. VecNormalize takes no Discrete ones, which become one-hot, as SB3 makes them
        # anyway, and as floats: SB3's buffer stores integers where the space has them, also of what
        # VecNormalize has divided
        kinds = (spaces.Tuple, spaces.MultiDiscrete, *((spaces.Discrete,) if settings.is_normalized else ()))
        if isinstance(env.observation_space, kinds):
            env = gymnasium.wrappers.FlattenObservation(env)
            env = gymnasium.wrappers.DtypeObservation(env, np.float32)
        return env

    start = time.process_time()
    try:
        make_env().close()
    except (gymnasium.error.Error, ImportError) as error:
        peer.fail(f"--env-id {args.env_id}: {error}")
    seconds_to_make = time.process_time() - start
    torch.set_num_threads(1)

    def draw_seed(number: int) -> int:
        """Return the seed that our scripts draw by the number of a stream: 2 is that of evaluations."""
        return int(np.random.SeedSequence([args.seed, number]).generate_state(1)[0]) % 2**30

    def make_envs(num_envs: int, seed: int, is_training: bool = False):
        envs = make_vec_env(make_env, n_envs=num_envs, seed=seed)
        if settings.is_normalized:
            return VecNormalize(envs, is_training, norm_reward=is_training, gamma=settings.arguments["gamma"])
        return envs

    run = peer.Run(args, script, peer.get_version(package))
    run.cpu_start -= seconds_to_make  # the first task imports its packages, which our scripts count too
    # The last rollout may end beyond the budget, where `left` is negative
    falls = {
        name: lambda left, start=settings.arguments[name]: start * max(left, 0) for name in settings.falling
    }
    eval_envs = make_envs(NUM_EPISODES_ON_THE_WAY, draw_seed(2))
    train_envs = make_envs(settings.num_envs, args.seed, is_training=True)
    model = model_class(policy, train_envs, seed=args.seed, device="cpu", **settings.arguments | falls)
    bar = tqdm(total=args.total_timesteps, unit="step")

    def evaluate(model, envs, num_episodes: int) -> dict[str, float]:
        start = run.cpu_seconds
        if envs is eval_envs:
            envs.seed(draw_seed(2))
        if settings.is_normalized:
            envs.obs_rms = train_envs.obs_rms
        episodes = evaluate_policy(model, envs, num_episodes, deterministic=True, return_episode_rewards=True)
        run.evaluation_seconds += run.cpu_seconds - start
        returns, lengths = map(np.array, episodes)
        names = ("eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length")
        return dict(zip(names, map(float, (returns.mean(), returns.std(), lengths.mean())), strict=True))

    class Record(BaseCallback):
        """Log the mean return of the episodes that ended in a rollout, after its update, and evaluations in
        between."""

        def __init__(self):
            super().__init__()
            self.num_rollouts, self.returns, self.num_solved = 0, [], 0
            self.spent: list[tuple[int, float]] = []  # steps and CPU-seconds of training, after each update

        def _on_step(self) -> bool:
            self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            return self.num_solved < 2

        def _on_rollout_start(self) -> None:
            if self.num_timesteps:
                self.record()

        def _on_training_end(self) -> None:
            self.record(is_last=True)

        def record(self, is_last: bool = False) -> None:
            self.num_rollouts += 1
            self.spent.append((self.num_timesteps, run.cpu_seconds - run.evaluation_seconds))
            bar.update(min(self.num_timesteps, args.total_timesteps) - bar.n)
            scalars = {}
            if self.returns:
                scalars["charts/episodic_return"] = float(np.mean(self.returns))
                bar.set_postfix({"return": f"{scalars['charts/episodic_return']:.2f}"}, refresh=False)
                self.returns = []
            if args.eval_interval and self.num_rollouts % args.eval_interval == 0 and not is_last:
                found = evaluate(self.model, eval_envs, NUM_EPISODES_ON_THE_WAY)
                scalars["eval/episodic_return"] = found["eval/episodic_return"]
                if stop_return is not None:
                    is_solved = found["eval/episodic_return"] >= stop_return
                    self.num_solved = self.num_solved + 1 if is_solved else 0
            if scalars:
                run.log(self.num_timesteps, scalars)

    record = Record()
    model.learn(args.total_timesteps, callback=record)
    bar.close()
    if args.eval_interval:
        scores = evaluate(model, eval_envs, NUM_EPISODES_ON_THE_WAY)
    else:
        final_envs = make_envs(min(settings.num_envs, NUM_EVAL_EPISODES), draw_seed(3))
        scores = evaluate(model, final_envs, NUM_EVAL_EPISODES)
    if compiles_first:
        (first_step, first_seconds), (step, seconds) = record.spent[0], record.spent[-1]
        scores["steps_per_second_compiled"] = (step - first_step) / (seconds - first_seconds)
    run.finish(model.num_timesteps, scores)


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    if args.settings == "tuned" and args.env_id not in TUNED:
        peer.fail(f"--env-id {args.env_id}: tuned settings are here for {', '.join(TUNED)}")
    settings = {"tuned": TUNED.get(args.env_id), "equal": EQUAL, "cleanrl": CLEANRL}[args.settings]
    from stable_baselines3 import PPO

    train(args, Path(__file__).stem, "stable-baselines3", settings, PPO, "MlpPolicy")


if __name__ == "__main__":
    main()
