"""CPU-seconds of rl4co's AttentionModel policy: a REINFORCE step with a greedy baseline, and greedy decoding.

Prints one JSON line. Run by benchmark/tsp_speed.py in an environment of its own (requirements-rl4co.txt).
"""

import argparse
import json
import statistics
import sys
import time

import torch
from rl4co.envs import TSPEnv
from rl4co.models.zoo.am import AttentionModelPolicy
from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """Counts dispatched operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
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

    result = {}
    for name, fn in (("train_step", train_step), ("greedy_decode", decode)):
        times = []
        for i in range(args.repeats + 3):
            start = time.process_time()
            fn()
            if i >= 3:
                times.append(time.process_time() - start)
        result[name] = statistics.median(times)
    with CountOperations() as counter:
        train_step()
    json.dump(result | {"operations": counter.count}, sys.stdout)


if __name__ == "__main__":
    main()
