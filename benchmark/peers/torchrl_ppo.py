"""TorchRL's PPO (ClipPPOLoss, GAE, its collector and replay buffer) on CartPole-v1, on one thread.

The settings are the defaults of CleanRL's ppo.py. The parts are put together as in TorchRL's own examples,
with four environments in one process (SerialEnv). Advantages are computed once for each rollout, as in the
other programs. Its value loss takes the larger of the losses with and without clipping; time limits are not
failures.
"""

from pathlib import Path

from benchmark.peers import peer

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, NUM_MINIBATCHES, LEARNING_RATE = 4, 128, 4, 4, 2.5e-4


def make_parser():
    """Make the parser of the command line's flags."""
    return peer.make_ppo_parser(__doc__)


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
    from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE
    from tqdm import tqdm

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    run = peer.Run(args, Path(__file__).stem, peer.get_version("torchrl"))
    base = SerialEnv(NUM_ENVS, lambda: GymEnv(args.env_id, categorical_action_encoding=True))
    env = TransformedEnv(base, RewardSum())
    env.set_seed(args.seed)
    num_inputs = env.observation_spec["observation"].shape[-1]
    policy = peer.make_mlp(num_inputs, base.full_action_spec_unbatched["action"].space.n, 0.01)
    actor = ProbabilisticActor(
        TensorDictModule(policy, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(peer.make_mlp(num_inputs, 1, 1.0), in_keys=["observation"])
    rollout = NUM_ENVS * NUM_STEPS
    num_updates = args.total_timesteps // rollout
    collector = Collector(env, actor, frames_per_batch=rollout, total_frames=num_updates * rollout)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rollout),
        sampler=SamplerWithoutReplacement(),
        batch_size=rollout // NUM_MINIBATCHES,
    )
    find_advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    find_loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_coeff=0.01,
        critic_coeff=0.25,  # of the squared error, where the others take 0.5 of half of it
        loss_critic_type="l2",
        normalize_advantage=True,
        clip_value=True,
    )
    optimizer = torch.optim.Adam(find_loss.parameters(), LEARNING_RATE, eps=1e-5)
    for update, data in enumerate(tqdm(collector, total=num_updates, unit="rollout")):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update / num_updates)
        with torch.no_grad():
            find_advantages(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(NUM_EPOCHS):
            for minibatch in buffer:
                losses = find_loss(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(find_loss.parameters(), 0.5)
                optimizer.step()
        returns = data["next", "episode_reward"][data["next", "done"]]
        found = {"charts/episodic_return": float(returns.mean())} if len(returns) else {}
        run.log((update + 1) * rollout, found)
    run.finish(num_updates * rollout, {"charts/num_updates": num_updates})


if __name__ == "__main__":
    main()
