"""algos/r2d2_lstm.py on memory tasks: LSTM and none, stored and zero state, burn-in and none, several seeds each.

python benchmark/r2d2_memory.py                              # about 45 minutes on one core
python benchmark/r2d2_memory.py --tasks TMaze20-v0           # some of the tasks; the results of the others are kept
pip install minigrid && python benchmark/r2d2_memory.py --tasks MiniGrid-MemoryS13-v0 --variants LSTM "no memory"
python benchmark/r2d2_memory.py --report-only                # tables and figure from benchmark/results/r2d2_memory.json
"""

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from tqdm import tqdm

TASKS = {  # flags, number of seeds of the LSTM and of each other variant
    "RepeatPreviousEasy-v0": ("", 10, 2),
    "TMaze20-v0": (
        "--total-timesteps 400000 --learning-rate 1e-3 --n-step 5 --learn-length 32 --memory-span 50 --epsilon 0.8 "
        "--replay-ratio 20 --batch-size 2048",
        *(5, 2),
    ),
    "CartPoleNoVelocity-v0": (
        "--total-timesteps 700000 --learning-rate 1e-3 --n-step 5 --gamma 0.99 --hidden-size 128 --memory-span 20 "
        "--buffer-size 50000",
        *(5, 1),
    ),
    "RepeatPreviousMedium-v0": (
        "--total-timesteps 2200000 --learning-rate 1e-3 --gamma 0 --burn-in 0 --learn-length 104 --hidden-size 256 "
        "--memory-span 64 --batch-size 3328 --replay-ratio 16",
        *(2, 1),
    ),
    "MiniGrid-MemoryS13-v0": (
        "--total-timesteps 1800000 --learning-rate 5e-4 --n-step 5 --gamma 0.99 --burn-in 8 --learn-length 40 "
        "--hidden-size 128 --memory-span 50 --epsilon 0.8 --replay-ratio 16 --batch-size 2560 --buffer-size 50000",
        *(2, 1),
    ),
}
QUICK_TASKS = ("RepeatPreviousEasy-v0", "TMaze20-v0", "CartPoleNoVelocity-v0")  # minutes a run, and no package
VARIANTS = {
    "LSTM": "",
    "no memory": "--no-recurrent --no-last-action-reward",
    "zero state": "--state-init zero",
    "no burn-in": "--burn-in 0",
    "zero state, no burn-in": "--state-init zero --burn-in 0",
}


def measure_run(env_id: str, variant: str, seed: int) -> dict:
    """What is kept of one run."""
    flags = (*TASKS[env_id][0].split(), *VARIANTS[variant].split())
    result = common.run_script("r2d2_lstm", "--env-id", env_id, "--seed", seed, *flags)
    curve = [[a, round(b, 2), round(c, 3)] for a, b, c in result["curve"][:: max(1, len(result["curve"]) // 60)]]
    row = {"env_id": env_id, "variant": variant, "seed": seed, "return": result["metrics"]["eval/episodic_return"]}
    return row | {"steps": result["env_steps"], "cpu_seconds": result["cpu_seconds"], "curve": curve}


def measure(tasks: list[str], variants: list[str], rows: list[dict], jobs: int) -> None:
    """Run `variants` of `tasks`, `jobs` at a time; each is saved as it ends, in place of the same run in `rows`."""
    runs = [(e, v, s) for e in tasks for v in variants for s in range(1, 1 + TASKS[e][1 if v == "LSTM" else 2])]
    machine, keys = common.describe_machine(), ("env_id", "variant", "seed")
    with ThreadPoolExecutor(jobs) as pool:
        for new in tqdm(pool.map(lambda run: measure_run(*run), runs), total=len(runs), unit="run"):
            new |= {"commit": machine["commit"]}
            rows = [row for row in rows if any(row[key] != new[key] for key in keys)] + [new]
            common.save_results("r2d2_memory", {"machine": machine, "rows": rows})


def make_table(results: dict) -> str:
    """Markdown table over tasks and variants."""
    lines = [
        "| task | variant | return of the final policy, 100 episodes, a seed each | mean | CPU-s |",
        "|--|--|--|--:|--:|",
    ]
    for env_id in TASKS:
        for variant in VARIANTS:
            rows = [r for r in results["rows"] if r["env_id"] == env_id and r["variant"] == variant]
            if rows:
                digits = 0 if rows[0]["return"] > 2 else 2
                returns = ", ".join(f"{r['return']:.{digits}f}" for r in rows)
                mean = statistics.mean(r["return"] for r in rows)
                seconds = statistics.median(r["cpu_seconds"] for r in rows)
                lines.append(f"| {env_id} | {variant} | {returns} | **{mean:.{digits}f}** | {seconds:.0f} |")
    return "\n".join(lines)


def make_flags(results: dict) -> str:
    """Markdown list of the flags of each task."""
    measured = [env_id for env_id in TASKS if any(r["env_id"] == env_id for r in results["rows"])]
    return "\n".join(f"- {env_id}: `{TASKS[env_id][0] or 'no flags'}`" for env_id in measured)


def draw(results: dict, path: Path) -> None:
    """Learning curves by CPU-seconds, a panel a task, a colour a variant, a line a seed."""
    from matplotlib.figure import Figure

    measured = [env_id for env_id in TASKS if any(r["env_id"] == env_id for r in results["rows"])]
    columns = min(3, len(measured))
    num_rows = -(-len(measured) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * num_rows + 0.6), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).ravel()
    for axes in panels[len(measured) :]:
        axes.set_axis_off()
    for axes, env_id in zip(panels, measured, strict=False):
        for i, variant in enumerate(VARIANTS):
            rows = [r for r in results["rows"] if r["env_id"] == env_id and r["variant"] == variant]
            for k, row in enumerate(rows):
                _, seconds, returns = zip(*row["curve"], strict=True)
                axes.plot(seconds, returns, color=f"C{i}", alpha=0.7, linewidth=1, label=None if k else variant)
        axes.set(title=env_id, xlabel="CPU-seconds", ylabel="return, last 20 episodes")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(VARIANTS))
    figure.savefig(path, dpi=110)


def summarize(results: dict) -> str:
    """One line for README.md."""
    cells = []
    for env_id, name in (
        ("RepeatPreviousEasy-v0", "RepeatPrevious easy"),
        ("CartPoleNoVelocity-v0", "CartPole without velocities"),
    ):
        rows = [r for r in results["rows"] if r["env_id"] == env_id]
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
