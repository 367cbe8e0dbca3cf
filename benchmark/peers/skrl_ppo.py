"""skrl's PPO (its agent, memory and sequential trainer) on CartPole-v1, on one thread.

The settings are the defaults of CleanRL's ppo.py, and these differences are left: skrl normalizes the
advantages of a rollout and not of a minibatch, takes the clipped value loss alone, lowers the learning rate
with each epoch, has Adam's eps at 1e-8, and trains on the steps in which gymnasium's vector environment
resets an environment.
"""

from pathlib import Path

from benchmark.peers import peer

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES = 4, 128, 4, 4


def make_parser():
    """Make the parser of the command line's flags."""
    return peer.make_ppo_parser(__doc__)


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    import gymnasium
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
    from skrl.trainers.torch import SequentialTrainer
    from skrl.utils import set_seed

    torch.set_num_threads(1)
    set_seed(args.seed)
    run = peer.Run(args, Path(__file__).stem, peer.get_version("skrl"))
    envs = gymnasium.make_vec(args.env_id, num_envs=NUM_ENVS, vectorization_mode="sync")
    records = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
    env = wrap_env(records)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}

    class Policy(CategoricalMixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces)
            CategoricalMixin.__init__(self)
            self.layers = peer.make_mlp(self.num_observations, self.num_actions, 0.01)

        def compute(self, inputs, role=""):
            return self.layers(inputs["observations"]), {}

    class Value(DeterministicMixin, Model):
        def __init__(self):
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.layers = peer.make_mlp(self.num_observations, 1, 1.0)

        def compute(self, inputs, role=""):
            return self.layers(inputs["observations"]), {}

    num_updates = args.total_timesteps // (NUM_ENVS * NUM_STEPS)
    settings = PPO_CFG(
        rollouts=NUM_STEPS,
        learning_epochs=NUM_EPOCHS,
        mini_batches=NUM_MINIBATCHES,
        discount_factor=0.99,
        gae_lambda=0.95,
        learning_rate=2.5e-4,
        learning_rate_scheduler=torch.optim.lr_scheduler.LambdaLR,
        learning_rate_scheduler_kwargs={"lr_lambda": lambda epoch: 1 - epoch / NUM_EPOCHS / num_updates},
        grad_norm_clip=0.5,
        ratio_clip=0.2,
        value_clip=0.2,
        entropy_loss_scale=0.01,
        value_loss_scale=0.25,  # of the squared error, where the others take 0.5 of half of it
        time_limit_bootstrap=True,
    )
    settings.experiment.write_interval = settings.experiment.checkpoint_interval = 0

    class Recording(PPO):
        """Logs the mean return of the episodes that ended in a rollout, after its update."""

        def update(self, *, timestep, timesteps):
            super().update(timestep=timestep, timesteps=timesteps)
            returns = [float(value) for value in records.return_queue]
            records.return_queue.clear()
            found = {"charts/episodic_return": sum(returns) / len(returns)} if returns else {}
            run.log((timestep + 1) * NUM_ENVS, found)

    agent = Recording(
        models={"policy": Policy(), "value": Value()},
        memory=RandomMemory(memory_size=NUM_STEPS, num_envs=NUM_ENVS, device="cpu"),
        cfg=settings,
        **spaces,
    )
    trainer = {"timesteps": num_updates * NUM_STEPS, "headless": True, "close_environment_at_exit": False}
    SequentialTrainer(env=env, agents=agent, cfg=trainer).train()
    run.finish(num_updates * NUM_STEPS * NUM_ENVS, {"charts/num_updates": num_updates})


if __name__ == "__main__":
    main()
