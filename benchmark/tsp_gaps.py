"""Gaps to the optimum of algos/reinforce_tsp_attention.py: default run, Adam alone and others, several seeds each.

    python benchmark/tsp_gaps.py                        # an hour on one core
    python benchmark/tsp_gaps.py --tasks default        # some of the tasks; the results of the others are kept
    python benchmark/tsp_gaps.py --report-only          # tables and figure from benchmark/results/tsp_gaps.json

Each final policy is evaluated on --data-dir/ENV_ID.txt, by default the instances of envs_shared/tsp_tasks/reference.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from tqdm import tqdm

TASKS = {  # flags, seeds
    "default": ("", [1, 2, 3, 4]),
    "Adam alone": ("--optimizer adam --learning-rate 5e-4 --num-epochs 40", [1, 2, 3, 4]),  # as much CPU time
    "gaussian": ("--env-id tsp20-gaussian --num-epochs 20 --steps-per-epoch 40", [1, 2, 3, 4, 5]),
}
DECODINGS = {"greedy": "greedy", "multistart": "multi-start", "multistart_x8": "x8 multi-start"}


def describe_run(task: str, run_path: Path, data: Path) -> dict:
    """What is kept of a run: its settings and curve, and the gaps of its final policy on `data`."""
    result = json.loads((run_path / "result.json").read_text())
    script = common.ROOT / "algos" / "reinforce_tsp_attention.py"
    command = [sys.executable, str(script), "--evaluate", str(run_path / "checkpoint.pt"), "--data", str(data)]
    command += ["--decoding", *DECODINGS]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=common.ENVIRONMENT)
    metrics = {k: float(v) for k, v in (line.split() for line in run.stdout.splitlines())}
    row = {"task": task, "seed": result["seed"], "instances": result["env_steps"], "cpu_seconds": result["cpu_seconds"]}
    row["num_evaluated"] = sum(1 for line in data.read_text().splitlines() if line.strip())
    row["metrics"] = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    curve = common.read_curve(run_path, "eval/greedy_gap")
    return row | {"curve": [[a, round(b, 2), round(c, 3)] for a, b, c in curve[:: max(1, len(curve) // 50)]]}


def measure(tasks: list[str], data_dir: Path, rows: list[dict]) -> dict:
    """Run every seed of `tasks`; their rows take the place of older ones in `rows`."""
    rows = [row for row in rows if row["task"] not in tasks]
    runs = [(name, seed) for name in tasks for seed in TASKS[name][1]]
    runs.sort(key=lambda run: run[1])  # tasks in turns, so that a busy hour is shared
    for task, seed in tqdm(runs, unit="run"):
        env_id = "tsp20-gaussian" if "gaussian" in TASKS[task][0] else "tsp20-uniform"
        with tempfile.TemporaryDirectory() as folder:
            flags = [*TASKS[task][0].split(), "--seed", seed]
            path = common.run_in_folder(folder, "reinforce_tsp_attention", *flags)
            rows.append(describe_run(task, path, data_dir / f"{env_id}.txt"))
    return {"machine": common.describe_machine(), "rows": rows}


def make_table(results: dict, tasks: list[str]) -> str:
    """Markdown table over tasks: means over seeds, and their range."""
    lines = ["| run | flags | seeds | instances | CPU-s | " + " | ".join(DECODINGS.values()) + " |"]
    lines.append("|--|--|--:|--:|--:" + "|--:" * len(DECODINGS) + "|")
    for task in tasks:
        rows = [row for row in results["rows"] if row["task"] == task]
        if rows:
            cells = []
            for decoding in DECODINGS:
                gaps = [row["metrics"][f"{decoding}_gap"] for row in rows]
                cells.append(f"**{statistics.mean(gaps):.2f}** ({min(gaps):.2f} to {max(gaps):.2f})")
            seconds = statistics.median(row["cpu_seconds"] for row in rows)
            flags = f"`{TASKS[task][0]}`" if TASKS[task][0] else ""
            lines.append(
                f"| {task} | {flags} | {len(rows)} | {rows[0]['instances']:,} | {seconds:.0f} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    """Learning curves by CPU-seconds: the default run and that of Adam alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for i, task in enumerate(("default", "Adam alone")):
        for k, row in enumerate(row for row in results["rows"] if row["task"] == task):
            _, seconds, gaps = zip(*row["curve"], strict=True)
            axes.plot(seconds, gaps, color=f"C{i}", alpha=0.7, lw=1.2, label=None if k else task)
    axes.set(xlabel="CPU-seconds, one thread", ylabel="gap of greedy tours, %", yscale="log")
    axes.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    axes.set_title("Gap to the optimum on 100 held-out instances, a line a seed", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def sections(results: dict) -> dict[str, str]:
    """What the docs and the README show of the results, by the name of their section."""
    num_evaluated = {row["num_evaluated"] for row in results["rows"]}
    line = f"Gaps in percent over {' or '.join(map(str, num_evaluated))} instances. Measured on "
    line += common.machine_line(results["machine"])
    rows = [row for row in results["rows"] if row["task"] == "default"]
    mean = {d: statistics.mean(row["metrics"][f"{d}_gap"] for row in rows) for d in DECODINGS}
    minutes = statistics.median(row["cpu_seconds"] for row in rows) / 60
    return {
        "tsp_gaps": f"\n{make_table(results, list(TASKS))}\n\n{line}\n",
        "tsp_gaps_cell": f"TSP20 in {minutes:.1f} CPU-minutes: {mean['greedy']:.1f} % above the optimum greedy, "
        f"{mean['multistart']:.2f} % multi-start, {mean['multistart_x8']:.2f} % with symmetries",
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--data-dir", type=Path, default=common.ROOT / "envs_shared" / "tsp_tasks" / "reference")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        known = (common.RESULTS / "tsp_gaps.json").exists()
        rows = common.load_results("tsp_gaps")["rows"] if known else []
        common.save_results("tsp_gaps", measure(args.tasks, args.data_dir, rows))
    results = common.load_results("tsp_gaps")
    draw(results, common.FIGURES / "tsp_gaps.png")
    common.write_report(sections(results), "reinforce_tsp_attention")
    print(make_table(results, list(TASKS)))


if __name__ == "__main__":
    main()
