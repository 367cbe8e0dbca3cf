"""rl4co's AttentionModel on the travelling salesman problem: REINFORCE with the greedy rollout baseline, on
one thread.

Environment, policy, baseline and loss are those of rl4co. The loop around them is written here, with the
settings of `algos/reinforce_tsp_attention.py --baseline rollout --optimizer adam --learning-rate 5e-4`: Adam
without weight decay, gradients clipped to a norm of 1, a learning rate that falls after each epoch along half
a cosine, and the greedy rollout as the baseline from the first step. rl4co's own defaults are a constant
1e-4, a weight decay and a running mean as the baseline of the first epoch, for runs of a hundred million
instances. Products are in float32: bfloat16, which our script asks for, made rl4co slower on the processor of
the published runs.

With --baseline pomo, it is rl4co's POMO with the network of that class: six encoder layers with instance
norms, and no graph embedding in the context. Evaluations take one greedy tour, as without it.
"""

import math
import re
from pathlib import Path

from benchmark.peers import peer

ROLLOUT_BATCH_SIZE = 500  # instances per batch of the baseline's rollouts


def make_parser():
    """Make the parser of the flags, which have the names and meanings of our script's."""
    parser = peer.make_parser(__doc__, "tsp20-uniform")
    data = peer.ROOT / "benchmark/data/tsp/tsp20_uniform_500.txt"
    parser.add_argument("--data", default=data, help="evaluate on this file, in ML4CO text with tours")
    parser.add_argument("--num-epochs", type=peer.count, default=35)
    parser.add_argument("--steps-per-epoch", type=peer.count, default=100)
    parser.add_argument("--batch-size", type=peer.count, default=32, help="instances of a gradient step")
    parser.add_argument("--baseline-instances", type=peer.count, default=10_000, help="per comparison")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--baseline", choices=("rollout", "pomo"), default="rollout")
    return parser


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    match = re.fullmatch(r"tsp(\d+)-uniform", args.env_id)
    if not match:
        peer.fail(f"--env-id {args.env_id}: must be tspN-uniform, with N nodes")
    points, references = peer.read_ml4co(args.data, int(match[1]))
    import torch
    import torch._dynamo  # what torch.optim imports on first use: kept out of the timing
    from rl4co.envs import TSPEnv
    from rl4co.models.zoo.am import AttentionModel
    from rl4co.models.zoo.pomo import POMO
    from rl4co.utils.ops import unbatchify
    from tensordict import TensorDict
    from torch.utils.data import DataLoader
    from tqdm import tqdm

    torch.set_num_threads(1)
    torch.empty(8_000_000)  # glibc then keeps 64 MB of freed memory, as in our script
    run = peer.Run(args, Path(__file__).stem, peer.get_version("rl4co"))
    torch.manual_seed(args.seed)
    env = TSPEnv(generator_params={"num_loc": points.shape[1]})
    is_pomo = args.baseline == "pomo"
    model = POMO(env) if is_pomo else AttentionModel(env, baseline="rollout_only")
    policy, baseline = model.policy, model.baseline
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, fused=True)

    @torch.inference_mode()
    def evaluate() -> dict[str, float]:
        cpu_start = run.cpu_seconds
        policy.eval()
        td = env.reset(TensorDict({"locs": torch.from_numpy(points).float()}, batch_size=[len(points)]))
        tours = policy(td, env, phase="test", decode_type="greedy")["actions"].numpy()  # [M, N]
        scores = peer.score_tours(points, tours, references)
        run.evaluation_seconds += run.cpu_seconds - cpu_start
        return {f"eval/greedy_{name}": score for name, score in scores.items()}

    num_instances = args.steps_per_epoch * args.batch_size
    bar = tqdm(total=args.num_epochs * num_instances, unit="instance")
    options = {
        "batch_size": ROLLOUT_BATCH_SIZE, "device": "cpu", "dataset_size": args.baseline_instances
    }  # fmt: skip
    baseline.setup(policy, env, **options)
    for epoch in range(args.num_epochs):
        learning_rate = args.learning_rate / 2 * (1 + math.cos(math.pi * epoch / args.num_epochs))
        optimizer.param_groups[0]["lr"] = learning_rate
        dataset = baseline.wrap_dataset(
            env.dataset(num_instances), env, batch_size=ROLLOUT_BATCH_SIZE, device="cpu"
        )
        policy.train()
        for batch in DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=dataset.collate_fn):
            td = env.reset(batch)
            if is_pomo:
                num_starts = points.shape[1]
                out = policy(td, env, phase="train", num_starts=num_starts)
                reward, log_likelihood = (
                    unbatchify(out[name], (0, num_starts)) for name in ("reward", "log_likelihood")
                )
                loss = model.calculate_loss(td, batch, out, reward, log_likelihood)["loss"]
            else:
                loss = model.calculate_loss(td, batch, policy(td, env, phase="train"))["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            bar.update(args.batch_size)
        baseline.epoch_callback(policy, env, epoch=epoch, **options)
        greedy = evaluate()
        bar.set_postfix({"gap": f"{greedy['eval/greedy_gap']:.2f}"})
        if epoch + 1 < args.num_epochs:
            run.log((epoch + 1) * num_instances, greedy)
    bar.close()
    run.finish(bar.n, greedy)


if __name__ == "__main__":
    main()
