r"""algos/r2d2_lstm.py on memory tasks: LSTM and none, stored and zero state, burn-in and none, several seeds each.

python benchmark/r2d2_memory.py                              # about 45 minutes on one core
python benchmark/r2d2_memory.py --tasks TMaze20-v0           # some of the tasks; the results of the others are kept
pip install minigrid && PYTHONPATH=tests python benchmark/r2d2_memory.py --tasks MiniGrid-MemoryS9-v0 \
    minigrid_envs:MiniGrid-MemoryForcedS9-v0
python benchmark/r2d2_memory.py --report-only                # tables and figure from benchmark/results/r2d2_memory.json
"""

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from tqdm import tqdm

LATE = "--n-step 5 --target-interval 25 --replay-ratio 16 --batch-size 512"  # where rewards come late
GRID = f"{LATE} --learning-rate 2e-3 --gamma 0.97 --hidden-size 128 --epsilon 0.8"
ALL = {"LSTM": 5, "no memory": 2, "zero state": 2, "no burn-in": 2, "zero state, no burn-in": 2}
TASKS = {  # the id comes first; flags, and the number of seeds of each variant
    "RepeatPreviousEasy-v0": ("", ALL | {"LSTM": 10}),
    "RepeatPreviousEasy-v0, windows of 20": ("--learn-length 20", {"LSTM": 5, "last overlaps": 5, "null steps": 5}),
    "TMaze20-v0": (f"--total-timesteps 150000 {LATE} --learning-rate 1e-3 --learn-length 32 --epsilon 0.8", ALL),
    "CartPoleNoVelocity-v0": (
        f"--total-timesteps 400000 {LATE} --learning-rate 5e-4 --gamma 0.99 --hidden-size 128 --memory-span 10 "
        "--buffer-size 50000",
        {"LSTM": 5, "no memory": 1},
    ),
    "minigrid_envs:MiniGrid-MemoryForcedS9-v0": (f"--total-timesteps 150000 {GRID}", {"LSTM": 3}),
    "MiniGrid-MemoryS7-v0": (f"--total-timesteps 120000 {GRID}", {"LSTM": 3}),
    "MiniGrid-MemoryS9-v0": (f"--total-timesteps 200000 {GRID}", {"LSTM": 3}),
}
QUICK_TASKS = list(TASKS)[:4]  # minutes a run, and no package
VARIANTS = {
    "LSTM": "",
    "no memory": "--no-recurrent --no-last-action-reward",
    "zero state": "--state-init zero",
    "no burn-in": "--burn-in 0",
    "zero state, no burn-in": "--state-init zero --burn-in 0",
    "last overlaps": "--last-window overlap",
    "null steps": "--last-window null",
}


def measure_run(task: str, variant: str, seed: int) -> dict:
    """What is kept of one run."""
    flags = (*TASKS[task][0].split(), *VARIANTS[variant].split())
    result = common.run_script("r2d2_lstm", "--env-id", task.split(",")[0], "--seed", seed, *flags)
    curve = [[a, round(b, 2), round(c, 3)] for a, b, c in result["curve"][:: max(1, len(result["curve"]) // 60)]]
    row = {"task": task, "variant": variant, "seed": seed, "return": result["metrics"]["eval/episodic_return"]}
    row["best_return"] = result["metrics"]["best/episodic_return"]
    return row | {"steps": result["env_steps"], "cpu_seconds": result["cpu_seconds"], "curve": curve}


def measure(tasks: list[str], variants: list[str], rows: list[dict], jobs: int) -> None:
    """Run `variants` of `tasks`, `jobs` at a time; each is saved as it ends, in place of the same run in `rows`."""
    runs = [(t, v, s) for t in tasks for v in variants for s in range(1, 1 + TASKS[t][1].get(v, 0))]
    machine, keys = common.describe_machine(), ("task", "variant", "seed")
    with ThreadPoolExecutor(jobs) as pool:
        for new in tqdm(pool.map(lambda run: measure_run(*run), runs), total=len(runs), unit="run"):
            new |= {"commit": machine["commit"]}
            rows = [row for row in rows if any(row[key] != new[key] for key in keys)] + [new]
            common.save_results("r2d2_memory", {"machine": machine, "rows": rows})


def make_table(results: dict) -> str:
    """Markdown table over tasks and variants."""
    lines = [
        "| task | variant | return of the final policy, 100 episodes, a seed each | mean | of the best | CPU-s |",
        "|--|--|--|--:|--:|--:|",
    ]
    for task in TASKS:
        for variant in VARIANTS:
            rows = [r for r in results["rows"] if r["task"] == task and r["variant"] == variant]
            if rows:
                digits = 0 if rows[0]["return"] > 2 else 2
                returns = ", ".join(f"{r['return']:.{digits}f}" for r in rows)
                mean = statistics.mean(r["return"] for r in rows)
                seconds = statistics.median(r["cpu_seconds"] for r in rows)
                best = statistics.mean(r["best_return"] for r in rows)
                cells = (task, variant, returns, f"**{mean:.{digits}f}**", f"{best:.{digits}f}", f"{seconds:.0f}")
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_flags(results: dict) -> str:
    """Markdown list of the flags of each task."""
    measured = [task for task in TASKS if any(r["task"] == task for r in results["rows"])]
    return "\n".join(f"- {task}: `{TASKS[task][0] or 'no flags'}`" for task in measured)


def draw(results: dict, path: Path) -> None:
    """Learning curves by CPU-seconds, a panel a task, a colour a variant, a line a seed."""
    from matplotlib.figure import Figure

    measured = [task for task in TASKS if any(r["task"] == task for r in results["rows"])]
    columns = min(3, len(measured))
    num_rows = -(-len(measured) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * num_rows + 0.6), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).ravel()
    for axes in panels[len(measured) :]:
        axes.set_axis_off()
    handles = {}
    for axes, task in zip(panels, measured, strict=False):
        for i, variant in enumerate(VARIANTS):
            rows = [r for r in results["rows"] if r["task"] == task and r["variant"] == variant]
            for row in rows:
                _, seconds, returns = zip(*row["curve"], strict=True)
                (handles[variant],) = axes.plot(seconds, returns, color=f"C{i}", alpha=0.7, linewidth=1, label=variant)
        axes.set(title=task.split(":")[-1], xlabel="CPU-seconds", ylabel="return, last 20 episodes")
        axes.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=110)


def summarize(results: dict) -> str:
    """One line for README.md."""
    cells = []
    for task, name in (
        ("RepeatPreviousEasy-v0", "RepeatPrevious easy"),
        ("CartPoleNoVelocity-v0", "CartPole without velocities"),
    ):
        rows = [r for r in results["rows"] if r["task"] == task]
        variants = [[r["return"] for r in rows if r["variant"] == variant] for variant in ("LSTM", "no memory")]
        if all(variants):
            lstm, control = (statistics.mean(returns) for returns in variants)
            cells.append(f"{name} {lstm:.3g} (without memory {control:.3g})")
    return ", ".join(cells)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    commits = sorted({r["commit"] for r in results["rows"]})
    machine = f"Measured on {common.machine_line(results['machine'] | {'commit': ' and '.join(commits)})}"
    text = f"\n{make_table(results)}\n\n{make_flags(results)}\n\n{machine}\n"
    return {"r2d2_memory": text, "r2d2_memory_cell": summarize(results)}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=QUICK_TASKS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        old = common.load_results("r2d2_memory") if (common.RESULTS / "r2d2_memory.json").exists() else {"rows": []}
        measure(args.tasks, args.variants, old["rows"], args.jobs)
    results = common.load_results("r2d2_memory")
    draw(results, common.FIGURES / "r2d2_memory.png")
    common.write_report(sections(results), "r2d2_lstm")
    print(make_table(results))


if __name__ == "__main__":
    main()
