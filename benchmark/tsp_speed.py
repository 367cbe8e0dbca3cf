"""CPU-seconds of algos/reinforce_tsp_attention.py against rl4co's AttentionModel policy, side by side on one thread.

    python benchmark/tsp_speed.py                  # run both in turns, then write results and the tables in the docs
    python benchmark/tsp_speed.py --report-only    # tables from benchmark/results/tsp_speed.json

A training step at batch 64 is a sampled rollout, the greedy rollout of a frozen baseline, backward, clipping and Adam;
decoding is one greedy tour of each of 64 instances. Each side runs with both of torch's settings for float32 products
on the CPU: "highest" takes MKL, "medium" oneDNN (in float32 too, unless the CPU has AMX). Both keep freed memory, as
the script has glibc do.
"""

import argparse
import json
import statistics
import subprocess
import sys

import common
from tqdm import tqdm

BATCH_SIZE, REPEATS, ROUNDS = 64, 7, 2
PRECISIONS = ("highest", "medium")
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_MAX_": "0"}


def measure_ours(num_nodes: int, precision: str) -> dict:
    """Time and operations of the script's own functions."""
    sys.path += [str(common.ROOT), str(common.PEERS)]
    import torch
    from tsp_timing import measure

    from algos import reinforce_tsp_attention as am

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(1)
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

    return measure(train_step, decode, REPEATS)


def run_json(*command) -> dict:
    """Run a command in its own process and read the last line that it prints."""
    environment = common.ENVIRONMENT | KEEP_MEMORY
    run = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def measure() -> dict:
    """Run both sides in turns."""
    python, rows = common.make_peer_environment("rl4co"), []
    cells = [(r, n, precision) for r in range(ROUNDS) for n in (20, 50, 100) for precision in PRECISIONS]
    for _, num_nodes, precision in tqdm(cells, unit="pair"):
        ours = run_json(sys.executable, __file__, "--ours", num_nodes, precision)
        peer = common.PEERS / "rl4co_tsp_speed.py"
        theirs = run_json(python, peer, num_nodes, BATCH_SIZE, REPEATS, precision)
        rows.append({"num_nodes": num_nodes, "precision": precision, "ours": ours, "rl4co": theirs})
    return {"machine": common.describe_machine(), "rows": rows}


def summarize(results: dict) -> dict[int, dict]:
    """By number of nodes: medians over the rounds of each side and setting, and ratios of the best setting of each."""
    summary = {}
    for num_nodes in sorted({row["num_nodes"] for row in results["rows"]}):
        cell = summary[num_nodes] = {}
        for what in ("train_step", "greedy_decode"):
            for side in ("ours", "rl4co"):
                for precision in PRECISIONS:
                    keys = (num_nodes, precision)
                    rows = [r[side][what] for r in results["rows"] if (r["num_nodes"], r["precision"]) == keys]
                    cell[what, side, precision] = statistics.median(rows)
            best = {side: min(cell[what, side, p] for p in PRECISIONS) for side in ("ours", "rl4co")}
            cell[what, "ratio"] = best["rl4co"] / best["ours"]
    return summary


def make_table(results: dict) -> str:
    """Markdown table of milliseconds and ratios."""
    lines = [
        "| nodes | what | ours, MKL | ours, oneDNN | rl4co, MKL | rl4co, oneDNN | rl4co / ours, the best of each |",
        "|--:|--|--:|--:|--:|--:|--:|",
    ]
    for num_nodes, cell in summarize(results).items():
        for what, name in (("train_step", "training step"), ("greedy_decode", "greedy decoding")):
            times = [f"{1e3 * cell[what, side, p]:.0f} ms" for side in ("ours", "rl4co") for p in PRECISIONS]
            lines.append(f"| {num_nodes} | {name} | {' | '.join(times)} | **{cell[what, 'ratio']:.2f}** |")
    return "\n".join(lines)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    row = results["rows"][0]
    counts = [f"{row[side]['operations']:,} and {row[side]['views']:,} views" for side in ("ours", "rl4co")]
    text = f"Operations dispatched by a training step on TSP20: {counts[0]}; rl4co: {counts[1]}."
    machine = common.machine_line(results["machine"])
    return {"tsp_speed": f"\n{make_table(results)}\n\n{text}\n\nCPU-seconds of one thread, measured on {machine}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", nargs=2, metavar=("NUM_NODES", "PRECISION"), help="measure one cell, print JSON")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if args.ours:
        return print(json.dumps(measure_ours(int(args.ours[0]), args.ours[1])))
    if not args.report_only:
        common.save_results("tsp_speed", measure())
    results = common.load_results("tsp_speed")
    common.write_report(sections(results), "reinforce_tsp_attention")
    print(make_table(results))


if __name__ == "__main__":
    main()
