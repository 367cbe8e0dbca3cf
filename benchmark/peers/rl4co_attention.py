"""rl4co's AttentionModel on the travelling salesman problem: REINFORCE with the greedy rollout baseline, on one thread.

Environment, policy, baseline (a running mean in the first epoch, then rollouts) and loss are rl4co's; the loop around
them stands here. As in algos/reinforce_tsp_attention.py --optimizer adam: Adam, clipping, and a learning rate along
half a cosine; and a weight decay of 1e-6. rl4co's own default is a constant 1e-4, for runs of a hundred million
instances.
"""

import time
from pathlib import Path

import peer

# An epoch is far shorter than Kool's of 1,280,000 instances, and so are its comparisons of policy and baseline
NUM_BASELINE_INSTANCES, ROLLOUT_BATCH_SIZE = 1000, 500
NUM_EVAL_INSTANCES = 100


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "tsp20-uniform")
    parser.add_argument("--num-epochs", type=peer.count, default=35)
    parser.add_argument("--steps-per-epoch", type=peer.count, default=100)
    parser.add_argument("--batch-size", type=peer.count, default=32, help="instances of a gradient step")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    import numpy as np
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing, as in ours
    from rl4co.envs import TSPEnv
    from rl4co.models.zoo.am import AttentionModel
    from tensordict import TensorDict
    from torch.utils.data import DataLoader
    from tqdm import tqdm

    from envs_shared.tsp_tasks import instances as tsp

    try:
        distribution, num_nodes = tsp.parse_env_id(args.env_id)
        if distribution != "uniform":
            raise ValueError("rl4co is trained on uniform points here")
    except ValueError as error:
        peer.fail(f"--env-id {args.env_id}: {error}")
    instances = tsp.make_test_instances(args.env_id, NUM_EVAL_INSTANCES)
    goal = "gap" if instances[0].tour is not None else "length"
    torch.set_num_threads(1)
    run = peer.Run(args, Path(__file__).stem, peer.get_version("rl4co"))
    torch.manual_seed(args.seed)
    env = TSPEnv(generator_params={"num_loc": num_nodes})
    model = AttentionModel(env, baseline="rollout")
    policy, baseline = model.policy, model.baseline
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.num_epochs * args.steps_per_epoch)
    points = torch.from_numpy(np.stack([instance.points for instance in instances]))

    @torch.inference_mode()
    def evaluate() -> dict[str, float]:
        policy.eval()
        start, cpu_start = time.perf_counter(), run.cpu_seconds
        td = env.reset(TensorDict({"locs": points.float()}, batch_size=[len(points)]))
        tours = policy(td, env, phase="test", decode_type="greedy")["actions"]  # [B, N]
        milliseconds = 1e3 * (time.perf_counter() - start) / len(points)
        assert (tours.sort(1).values == torch.arange(num_nodes)).all()
        lengths = tsp.tour_length(points, tours)
        found = tsp.summarize({"greedy": (list(tours.numpy()), lengths.numpy(), milliseconds)}, instances)
        run.evaluation_seconds += run.cpu_seconds - cpu_start
        return found

    num_instances = args.steps_per_epoch * args.batch_size
    bar = tqdm(total=args.num_epochs * num_instances, unit="instance")
    options = {"batch_size": ROLLOUT_BATCH_SIZE, "device": "cpu", "dataset_size": NUM_BASELINE_INSTANCES}
    start = run.cpu_seconds
    baseline.setup(policy, env, **options)
    for epoch in range(args.num_epochs):
        dataset = baseline.wrap_dataset(
            env.dataset(num_instances), env, batch_size=ROLLOUT_BATCH_SIZE, device="cpu"
        )
        policy.train()
        for batch in DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=dataset.collate_fn):
            td = env.reset(batch)
            loss = model.calculate_loss(td, batch, policy(td, env, phase="train"))["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update(args.batch_size)
        baseline.epoch_callback(policy, env, epoch=epoch, **options)
        greedy = evaluate()
        bar.set_postfix({goal: f"{greedy[f'eval/greedy_{goal}']:.2f}"})
        if epoch + 1 < args.num_epochs:
            run.log((epoch + 1) * num_instances, {f"eval/greedy_{goal}": greedy[f"eval/greedy_{goal}"]})
    bar.close()
    train_seconds = run.cpu_seconds - run.evaluation_seconds - start
    run.finish(bar.n, greedy | {"instances_per_cpu_second": bar.n / train_seconds})


if __name__ == "__main__":
    main()
