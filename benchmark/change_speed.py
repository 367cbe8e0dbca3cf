"""Speed of algos/ppo_change_detection.py: a rollout and its parts, the updates, and classification by looks.

python benchmark/change_speed.py                   # a minute on one core
python benchmark/change_speed.py --compile         # with torch.compile; --bf16 and --cuda on a GPU
python benchmark/change_speed.py --report-only     # table from benchmark/results/change_speed.json

A rollout is that of 128 synthetic pairs of 64 queries, in which 0.45 looks per query are taken.
"""

import argparse
import math
import statistics
import sys
import time

import common

GOES_ON = (math.sqrt(1 + 4 * 0.45) - 1) / 2  # chance of going on in each of two steps, for 0.45 looks per query


def measure(use_compile: bool, bf16: bool, cuda: bool, num_repeats: int = 30) -> dict[str, float]:
    """Seconds (CPU-seconds of one thread, or seconds on a GPU), medians, and the looks that were taken."""
    sys.path.append(str(common.ROOT))
    import torch

    from algos import ppo_change_detection as cd
    from envs_shared.change_tasks import data as change_data

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(1)
    device = torch.device("cuda" if cuda else "cpu")
    args = cd.Args(num_train_pairs=256, num_eval_pairs=64, bf16=bf16)
    pairs = change_data.load_pairs(args, sys.exit)["train"]
    network = cd.ChangeDetector(args).to(device, memory_format=torch.channels_last).eval()
    with torch.no_grad():
        network.policy_head[-1].weight.zero_()
        network.policy_head[-1].bias.fill_(math.log(1 / GOES_ON - 1))
    if use_compile:
        network.backbone.compile()
        network.refiner.compile(dynamic=True)
    agent, rewards = cd.PPOAgent(network, torch.tensor(1e-9, device=device)), cd.RewardCalculator(args)
    buffer, env = cd.RolloutBuffer(args.num_steps, device), cd.TransformerRLEnv(network)
    batch, metrics, seconds = change_data.draw_batch(pairs, args.num_envs, device), torch.zeros(2, device=device), {}

    def timed(name, fn, *inputs):
        if cuda:
            torch.cuda.synchronize()
        clock = time.perf_counter if cuda else time.process_time
        start = clock()
        result = fn(*inputs)
        if cuda:
            torch.cuda.synchronize()
        seconds.setdefault(name, []).append(clock() - start)
        return result

    looks = []
    for _ in range(num_repeats):
        with torch.autocast(device.type, torch.bfloat16, bf16):
            looks.append(timed("rollout", cd.collect_rollouts, agent, rewards, buffer, batch)[1].item())
            with torch.no_grad():
                obs = timed("coarse pictures and backbone", env.reset, batch)
                for step in range(args.num_steps):
                    timed(f"stop and value heads, step {step}", network.decide, obs)
                    stop = torch.rand(obs["active"].shape, device=device) > GOES_ON
                    goes_on = obs["active"] & ~stop
                    timed(f"glimpse and transformer block, step {step}", network.correct, obs, goes_on)
                    action = agent.get_action(obs, stop)[0]
                    rewards.logits = env.final_logits
                    mask = obs["active"]
                    obs, done, _ = env.step(action)
                    logits = timed(f"class head, step {step}", lambda: env.final_logits)
                    inputs = logits, batch["labels"], action["stop"], mask, done
                    timed(f"reward, step {step}", rewards.compute_reward, *inputs)
        minibatch = next(buffer.get_generator(args.num_minibatches, device))
        timed("PPO update of 64 steps of a pair", agent.update, minibatch)
        part = {name: x[: args.batch_size] for name, x in batch.items()}
        timed("supervised update of 32 pairs", agent.supervise, part, True, metrics)
        images = pairs.images[:64]
        timed("classification", cd.classify, network, images, lambda p, step: torch.rand_like(p) > GOES_ON)
        timed("classification, everywhere", cd.classify, network, images, lambda p, step: torch.zeros_like(p).bool())
    medians = {name: statistics.median(values[5:]) for name, values in seconds.items()}
    rates = {"looks": statistics.mean(looks), "pairs": args.num_envs, "classified": len(images)}
    return rates | {"device": torch.cuda.get_device_name() if cuda else "cpu", "seconds": medians}


def make_table(results: dict) -> str:
    """Markdown table of a rollout and its parts, and two sentences."""
    lines = []
    for name, run in results["runs"].items():
        seconds, total = run["seconds"], run["seconds"]["rollout"]
        lines += [
            "",
            f"**{name}**, {run['looks']:.2f} looks per query",
            "",
            "| | ms per 128 pairs | share |",
            "|--|--:|--:|",
        ]
        parts = {}
        for part, value in seconds.items():
            if part.endswith(("step 0", "step 1")) or part.startswith("coarse"):
                part = part.split(", step")[0]
                parts[part] = parts.get(part, 0.0) + value
        parts["sampling, corrections, buffer, advantages"] = total - sum(parts.values())
        for part, value in {"rollout": total, **parts}.items():
            lines.append(f"| {part} | {1e3 * value:.1f} | {value / total:.0%} |")
        one, every = seconds["classification"], seconds["classification, everywhere"]
        update, supervised = seconds["PPO update of 64 steps of a pair"], seconds["supervised update of 32 pairs"]
        text = f"**{run['pairs'] / total:,.0f} pairs per second** of rollout. "
        text += (
            f"An update of PPO takes {1e3 * update:.0f} ms, one of the supervised stages {1e3 * supervised:.0f} ms. "
        )
        text += f"Classification with as many looks takes {1e3 * one / run['classified']:.2f} ms a pair, "
        text += f"{one / every:.0%} of the {1e3 * every / run['classified']:.2f} ms of two looks everywhere."
        lines += ["", text]
    return "\n".join(lines[1:])


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    return {"change_speed": f"\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--compile", "--bf16", "--cuda", "--report-only"):
        parser.add_argument(flag, action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        path = common.RESULTS / "change_speed.json"
        runs = common.load_results("change_speed")["runs"] if path.exists() else {}
        run = measure(args.compile, args.bf16, args.cuda)
        name = ", ".join([run["device"], *(flag for flag in ("compile", "bf16") if getattr(args, flag))])
        common.save_results("change_speed", {"machine": common.describe_machine(), "runs": runs | {name: run}})
    results = common.load_results("change_speed")
    common.write_report(sections(results), "ppo_change_detection")
    print(make_table(results))


if __name__ == "__main__":
    main()
