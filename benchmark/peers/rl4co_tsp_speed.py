"""CPU-seconds of rl4co's AttentionModel policy: a REINFORCE step with a greedy baseline, and greedy decoding.

Prints one JSON line. Run by benchmark/tsp_speed.py in an environment of its own (requirements-rl4co.txt).
"""

import argparse
import json
import sys

import torch
from rl4co.envs import TSPEnv
from rl4co.models.zoo.am import AttentionModelPolicy
from tsp_timing import measure


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_nodes", type=int)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("repeats", type=int)
    parser.add_argument("precision", choices=("highest", "medium"))
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.precision)
    torch.manual_seed(1)
    env = TSPEnv(generator_params={"num_loc": args.num_nodes})
    size = {"embed_dim": 128, "num_encoder_layers": 3, "num_heads": 8}
    policy, baseline = (AttentionModelPolicy(env_name="tsp", **size) for _ in range(2))
    baseline.eval()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-4)

    def train_step():
        td = env.reset(batch_size=[args.batch_size])
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
        baseline(env.reset(batch_size=[args.batch_size]), env, phase="test", decode_type="greedy")

    json.dump(measure(train_step, decode, args.repeats), sys.stdout)


if __name__ == "__main__":
    main()
