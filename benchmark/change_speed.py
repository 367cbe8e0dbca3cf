"""Speed of algos/ppo_change_detection.py: the parts of a classification, and the updates.

python benchmark/change_speed.py                   # a minute on one core; --cuda on a GPU
python benchmark/change_speed.py --report-only     # table from benchmark/results/change_speed.json

On 32 synthetic pairs of 64 queries; CPU-seconds of one thread, or seconds on a GPU, medians.
"""

import argparse
import statistics
import sys
import time

import common

SHARE = 0.4  # of the queries that look


def measure(cuda: bool, num_repeats: int = 15) -> dict:
    """Seconds by part."""
    sys.path.append(str(common.ROOT))
    import torch

    from algos import ppo_change_detection as cd

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(1)
    device = torch.device("cuda" if cuda else "cpu")
    args = cd.Args(num_train_pairs=128, eval_episodes=1)
    train = cd.change_data.load_pairs(args, cd.fail)["train"]
    agent = cd.Agent(args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-9, device=device), fused=True)
    storage = cd.RolloutStorage(agent, args, device)
    rollout = cd.change_data.draw_batch(train, args, device, args.num_envs)
    images, labels = (x[:32] for x in rollout)
    query = agent.encode(images).detach()
    step = torch.zeros(32, dtype=torch.long, device=device)
    chosen = torch.randperm(query[..., 0].numel(), device=device)
    some = chosen[: int(SHARE * len(chosen))].sort().values
    rows = torch.arange(args.num_envs // args.num_minibatches, device=device)
    parts = {
        "coarse pictures, backbone, class head": lambda: agent.classify(agent.encode(images)),
        "stop and value heads": lambda: agent.decide(query, step),
        "a look everywhere, of whole pictures": lambda: agent.look(images, query, step),
        f"a look at {SHARE:.0%} of the queries, window by window": lambda: agent.look(images, query, step, some),
        "drawing a batch, with crops and jitter": lambda: cd.change_data.draw_batch(train, args, device, 32),
    }
    updates = {
        "update of the coarse stage, 16 pairs": lambda: cd.update_detector(
            agent, optimizer, 0, args, images[:16], labels[:16]
        ),
        "update of the refiner, 16 pairs": lambda: cd.update_detector(
            agent, optimizer, 1, args, images[:16], labels[:16]
        ),
        "rollout, 128 pairs": lambda: cd.collect_rollout(agent, storage, *rollout, args),
        "update of PPO, 32 pairs": lambda: cd.update_minibatch(agent, optimizer, storage, args, rows),
    }
    clock = time.perf_counter if cuda else time.process_time
    seconds = {}
    for name, fn in (parts | updates).items():
        times = []
        for _ in range(num_repeats):
            with torch.set_grad_enabled(name in updates):
                start = clock()
                fn()
                if cuda:
                    torch.cuda.synchronize()
            times.append(clock() - start)
        seconds[name] = statistics.median(times[2:])
    return {"device": torch.cuda.get_device_name() if cuda else "cpu", "seconds": seconds}


def make_table(results: dict) -> str:
    """Markdown table, and two sentences."""
    lines = []
    for name, run in results["runs"].items():
        seconds = run["seconds"]
        lines += ["", f"**{name}**", "", "| part, of 32 pairs where not said otherwise | ms |", "|--|--:|"]
        lines += [f"| {part} | {1e3 * value:.1f} |" for part, value in seconds.items()]
        coarse, heads, whole, some, *_ = seconds.values()
        text = f"The look is {whole / (coarse + whole):.0%} of a full pass. With {SHARE:.0%} of the looks a pass takes "
        lines += ["", f"{text}{(coarse + heads + some) / (coarse + whole):.0%} of the time of looking once everywhere."]
    return "\n".join(lines[1:])


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    return {"change_speed": f"\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--cuda", "--report-only"):
        parser.add_argument(flag, action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        run = measure(args.cuda)
        common.save_results("change_speed", {"machine": common.describe_machine(), "runs": {run["device"]: run}})
    results = common.load_results("change_speed")
    common.write_report(sections(results), "ppo_change_detection")
    print(make_table(results))


if __name__ == "__main__":
    main()
