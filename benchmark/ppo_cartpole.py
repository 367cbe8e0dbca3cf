"""CPU-seconds until CartPole-v1 is solved: algos/ppo.py against Stable-Baselines3 with tuned settings, side by side.

    python benchmark/ppo_cartpole.py                 # run seeds 1 to 10 of both, then write results, figure and tables
    python benchmark/ppo_cartpole.py --report-only   # figure and tables from benchmark/results/ppo_cartpole.json

Solved: two evaluations in a row, of 10 episodes with the most likely action each, have a mean return of at least 475;
the second one is the moment that counts. Both are evaluated every 2,048 steps. CPU-seconds count from the end of the
imports, on one thread, without the evaluations. The two take turns, seed by seed, so that a busy machine slows both
alike, and run to the end of their 100,000 steps.
"""

import argparse
import statistics
from pathlib import Path

import common
from tqdm import tqdm

CURVE, THRESHOLD, IN_A_ROW = "eval/episodic_return", 475, 2
OURS, SB3 = ("--eval-interval", 1), ("--eval-interval", 8)  # rollouts of 64 x 32 and of 8 x 32 steps


def keep(result: dict) -> dict:
    """What is kept of one run."""
    solved = common.find_threshold(result["curve"], THRESHOLD, in_a_row=IN_A_ROW)
    row = {"solved_step": solved and solved[0], "solved_cpu_seconds": solved and solved[1]}
    row |= {"eval_return": result["metrics"]["eval/episodic_return"], "total_cpu_seconds": result["cpu_seconds"]}
    return row | {"curve": result["curve"]}


def measure(seeds: list[int]) -> dict:
    """Run both on every seed, taking turns."""
    rows = []
    for seed in tqdm(seeds, unit="seed"):
        ours = common.run_script("ppo", "--seed", seed, *OURS, curve=CURVE)
        sb3 = common.run_peer("sb3", "sb3_ppo", "--seed", seed, *SB3, curve=CURVE)
        rows.append({"seed": seed, "ours": keep(ours), "sb3": keep(sb3)})
    return {"machine": common.describe_machine(), "rows": rows}


def summarize(results: dict) -> dict:
    """Medians over the seeds (an unsolved run counts as infinite), their ratio, and how many runs met which goal."""
    medians = {}
    for who in ("ours", "sb3"):
        seconds = [r[who]["solved_cpu_seconds"] for r in results["rows"]]
        medians[who] = statistics.median([float("inf") if s is None else s for s in seconds])
    ours = [r["ours"] for r in results["rows"]]
    return {
        **medians,
        "ratio": medians["sb3"] / medians["ours"],
        "in_five_seconds": sum((r["solved_cpu_seconds"] or 99.0) <= 5.0 for r in ours),
        "stays_solved": sum(r["eval_return"] >= 490.0 for r in ours),
        "num_seeds": len(ours),
    }


def make_table(results: dict) -> str:
    """Markdown table over the seeds."""

    def cell(value, form):
        return "not in 100k steps" if value is None else format(value, form)

    lines = [
        "| seed | CPU-s until solved | steps until solved | return of the final policy, 100 episodes "
        "| SB3 tuned: CPU-s | SB3 tuned: steps |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        (seconds, steps), (sb3_seconds, sb3_steps) = (
            (cell(row[who]["solved_cpu_seconds"], ".2f"), cell(row[who]["solved_step"], ",")) for who in ("ours", "sb3")
        )
        final = f"{row['ours']['eval_return']:.1f}"
        lines.append(f"| {row['seed']} | {seconds} | {steps} | {final} | {sb3_seconds} | {sb3_steps} |")
    s = summarize(results)
    lines.append(f"| **median** | **{s['ours']:.2f}** | | | **{s['sb3']:.2f}** | |")
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    """Learning curves until solved by steps and by CPU-seconds, a line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for who, label, color in (("sb3", "Stable-Baselines3, tuned", "tab:orange"), ("ours", "algos/ppo.py", "tab:blue")):
        for i, row in enumerate(results["rows"]):
            until = row[who]["solved_step"] or float("inf")
            steps, seconds, returns = zip(*(p for p in row[who]["curve"] if p[0] <= until), strict=True)
            for axes, x in ((by_steps, [s / 1000 for s in steps]), (by_seconds, seconds)):
                axes.plot(x, returns, color=color, alpha=0.55, lw=1.2, label=None if i else label)
                axes.plot(x[-1], returns[-1], ".", color=color)
    for axes, label in (
        (by_steps, "thousand environment steps"),
        (by_seconds, "CPU-seconds after imports, one thread"),
    ):
        axes.axhline(THRESHOLD, color="gray", ls=":", lw=1)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_steps.set_ylabel("return of the greedy policy, 10 episodes")
    by_steps.set_title(f"CartPole-v1, {len(results['rows'])} seeds, each until solved")
    by_seconds.set_title(f"the same runs by time (dotted: {THRESHOLD})")
    by_seconds.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def sections(results: dict) -> dict[str, str]:
    """What the docs and the README show of the results, by the name of their section."""
    s = summarize(results)
    text = (
        f"Solved within 5 CPU-seconds: {s['in_five_seconds']} of {s['num_seeds']} seeds. Final policy at 490 or more "
        f"over 100 episodes: {s['stays_solved']} of {s['num_seeds']}. Median {s['ours']:.2f} CPU-seconds against "
        f"{s['sb3']:.2f} of Stable-Baselines3 with tuned settings in the same run: {s['ratio']:.1f} times fewer.\n"
    )
    return {
        "ppo_cartpole": f"\n{make_table(results)}\n\n{text}\nMeasured on {common.machine_line(results['machine'])}\n",
        "ppo_cartpole_cell": f"CartPole-v1 solved in {s['ours']:.1f} CPU-seconds (median of {s['num_seeds']} seeds), "
        f"{s['ratio']:.1f}x fewer than tuned SB3",
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        common.save_results("ppo_cartpole", measure(args.seeds))
    results = common.load_results("ppo_cartpole")
    draw(results, common.FIGURES / "ppo_cartpole.png")
    common.write_report(sections(results), "ppo")
    print(make_table(results))
    print(f"ratio of the medians, SB3 / ours: {summarize(results)['ratio']:.2f}")


if __name__ == "__main__":
    main()
