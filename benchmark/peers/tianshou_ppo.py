"""Tianshou's PPO (its algorithm, collector and replay buffer) on CartPole-v1, on one thread.

The settings are the defaults of CleanRL's ppo.py. Four environments are stepped in one process
(DummyVectorEnv). Its value loss takes the larger of the losses with and without clipping; time limits are not
failures.
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
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import ActionReprNet
    from tianshou.utils.torch_utils import policy_within_training_step
    from tqdm import tqdm

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    run = peer.Run(args, Path(__file__).stem, peer.get_version("tianshou"))
    envs = DummyVectorEnv([lambda: gymnasium.make(args.env_id)] * NUM_ENVS)
    envs.seed(args.seed)
    action_space = envs.action_space[0]
    num_inputs = envs.observation_space[0].shape[0]

    class Critic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = peer.make_mlp(num_inputs, 1, 1.0)

        def forward(self, obs):
            return self.layers(torch.as_tensor(obs, dtype=torch.float32))

    class Actor(ActionReprNet):
        def __init__(self):
            super().__init__()
            self.layers = peer.make_mlp(num_inputs, int(action_space.n), 0.01)

        def forward(self, obs, state=None, info=None):
            return self.layers(torch.as_tensor(obs, dtype=torch.float32)), state

    rollout = NUM_ENVS * NUM_STEPS
    num_updates = args.total_timesteps // rollout
    optimizer = AdamOptimizerFactory(2.5e-4, eps=1e-5)
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=Actor(), action_space=action_space),
        critic=Critic(),
        optim=optimizer.with_lr_scheduler_factory(LRSchedulerFactoryLinear(num_updates, rollout, rollout)),
        eps_clip=0.2,
        value_clip=True,
        vf_coef=0.25,  # of the squared error, where the others take 0.5 of half of it
        ent_coef=0.01,
        max_grad_norm=0.5,
        gae_lambda=0.95,
        gamma=0.99,
        max_batchsize=rollout,  # values of a rollout in one call, as in the other programs
    )
    collector = Collector(algorithm, envs, VectorReplayBuffer(rollout, NUM_ENVS))
    collector.reset()
    for update in tqdm(range(num_updates), unit="rollout"):
        with policy_within_training_step(algorithm.policy):
            stats = collector.collect(n_step=rollout)
            algorithm.update(collector.buffer, batch_size=rollout // NUM_MINIBATCHES, repeat=NUM_EPOCHS)
        collector.reset_buffer(keep_statistics=True)
        found = {"charts/episodic_return": float(stats.returns.mean())} if len(stats.returns) else {}
        run.log((update + 1) * rollout, found)
    run.finish(num_updates * rollout, {"charts/num_updates": num_updates})


if __name__ == "__main__":
    main()
