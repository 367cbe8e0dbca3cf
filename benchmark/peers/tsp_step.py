"""CPU-seconds of a REINFORCE step with a greedy baseline, and of greedy decoding: ours or rl4co's, 64 instances.

Prints one line of JSON. Run by benchmark/speed.py, each side in its own environment.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

BATCH_SIZE, REPEATS, NUM_WARMUP = 64, 7, 3


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "rl4co"))
    parser.add_argument("num_nodes", type=int)
    parser.add_argument("precision", choices=("highest", "medium"))
    return parser


def make_ours(num_nodes: int):
    """A training step and greedy decoding, by the script's own functions."""
    import torch

    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from algos import reinforce_tsp_attention as am

    env_id, args = f"tsp{num_nodes}-uniform", am.Args(baseline="rollout", optimizer="adam")
    agent, baseline = am.AttentionModel(), am.Baseline(am.AttentionModel())
    baseline.is_warmup.zero_()
    rate = torch.tensor(1e-4)
    optimizers = am.make_optimizers(agent, args, rate, rate, False).values()
    loss_fn = am.partial(am.compute_loss, agent, am.score_tours, baseline)

    def train_step():
        am.update_weights(agent, optimizers, loss_fn, args, am.tsp.generate_points(env_id, BATCH_SIZE))

    @torch.inference_mode()
    def decode():
        points = am.tsp.generate_points(env_id, BATCH_SIZE)
        am.construct_tours(points, baseline.policy(points))

    return train_step, decode


def make_rl4co(num_nodes: int):
    """The same by rl4co's policy."""
    import torch
    from rl4co.envs import TSPEnv
    from rl4co.models.zoo.am import AttentionModelPolicy

    env = TSPEnv(generator_params={"num_loc": num_nodes})
    size = {"embed_dim": 128, "num_encoder_layers": 3, "num_heads": 8}
    policy, baseline = (AttentionModelPolicy(env_name="tsp", **size) for _ in range(2))
    baseline.eval()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-4)

    def train_step():
        td = env.reset(batch_size=[BATCH_SIZE])
        with torch.no_grad():
            greedy = baseline(td.clone(), env, phase="val", decode_type="greedy")["reward"]
        out = policy(td, env, phase="train", decode_type="sampling")
        loss = -((out["reward"] - greedy) * out["log_likelihood"]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    @torch.inference_mode()
    def decode():
        baseline(env.reset(batch_size=[BATCH_SIZE]), env, phase="test", decode_type="greedy")

    return train_step, decode


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.precision)
    torch.manual_seed(1)
    functions = {"ours": make_ours, "rl4co": make_rl4co}[args.side](args.num_nodes)
    found = {}
    for name, function in zip(("training step", "greedy decoding"), functions, strict=True):
        times = []
        for _ in range(NUM_WARMUP + REPEATS):
            start = time.process_time()
            function()
            times.append(time.process_time() - start)
        found[name] = statistics.median(times[NUM_WARMUP:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
