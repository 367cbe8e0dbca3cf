"""What PPO's page and the README show of the suite `ppo_tasks`: which flags for which task, beside other programs.

python benchmark/run.py benchmark/suites/ppo_tasks.toml && python benchmark/report.py    # the runs and their results
python benchmark/ppo_tasks.py                                                            # tables and picture of them
"""

from pathlib import Path

import common
import numpy as np
import records
import report
from common import show


def list_pairs(results: dict) -> list[tuple[dict, dict]]:
    """Our cell and the peer's of each task that has a threshold."""
    ratios = [ratio for ratio in results["ratios"] if ratio["quantity"] == "seconds_to_threshold"]
    return [tuple(results["cells"][ratio[side]] for side in ("ours", "peer")) for ratio in ratios]


def name_task(cell: dict) -> str:
    """Task of one of our cells, with its setting where there is more than one."""
    return cell["task"] + (f", {cell['setting']}" if cell["setting"] not in ("default", "ours") else "")


def show_quantity(cell: dict, quantity: str) -> str:
    """Median of what it took to the threshold; where most runs never got there, what they were given."""
    values = records.get_values(cell, quantity)
    if np.isfinite(np.median(values)):
        return report.show_threshold(cell, quantity)
    column = 0 if quantity == "steps_to_threshold" else 1
    given = float(np.median([run["curve"][-1][column] for run in cell["runs"]]))
    number = f"{given:,.0f}" if column == 0 else show(given)
    return f"over {number} ({np.isfinite(values).sum()} of {len(values)})"


def make_table(results: dict) -> str:
    """Markdown table of both programs, a line a task, then our flags."""
    lines = ["| task | solved at | steps | SB3's | ours / SB3's | CPU-s | SB3's | ours / SB3's |"]
    lines += ["|--|--:|--:|--:|--|--:|--:|--|"]
    for ours, peer in list_pairs(results):
        columns = [f"{name_task(ours)}", f"{ours['threshold']:g}"]
        for quantity in ("steps_to_threshold", "seconds_to_threshold"):
            ratio = records.find_ratio(*(records.get_values(cell, quantity) for cell in (ours, peer)))
            columns += [show_quantity(cell, quantity) for cell in (ours, peer)]
            columns += [f"**{show(ratio[0], 2)}** ({report.show_interval(ratio[1])})" if ratio else "-"]
        lines.append("| " + " | ".join(columns) + " |")
    flags = [f"- {name_task(ours)}: `{' '.join(ours['command'].split())}`" for ours, _ in list_pairs(results)]
    return "\n".join([*lines, "", *flags])


def make_speed_table(results: dict) -> str:
    """Markdown table of steps per CPU-second beside CleanRL, at equal settings."""
    lines = ["| settings of both | ours | CleanRL's | ours / CleanRL's |", "|--|--:|--:|--|"]
    for ratio in (ratio for ratio in results["ratios"] if ratio["quantity"] == "steps_per_second"):
        values = [records.get_values(results["cells"][ratio[side]], ratio["quantity"]) for side in ("ours", "peer")]
        found, interval = records.find_ratio(*values)
        numbers = " | ".join(f"{np.median(v):,.0f}" for v in values)
        title = ratio["title"].partition(", both with ")[2]
        lines.append(f"| {title} | {numbers} | **{found:.2f}** ({report.show_interval(interval)}) |")
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    """Learning curves until solved, a column a task and a line a seed: above by steps, below by CPU-seconds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    pairs = list_pairs(results)
    figure = Figure(figsize=(3.2 * len(pairs), 5.6), layout="constrained")
    for column, cells in zip(figure.subplots(2, len(pairs)).T, pairs, strict=True):
        for cell, label, color in zip(cells, ("algos/ppo.py", "SB3, rl-zoo"), ("C0", "C1"), strict=True):
            for i, run in enumerate(cell["runs"]):
                until = run["steps_to_threshold"] or float("inf")
                curve = np.array([point for point in run["curve"] if point[0] <= until])  # [steps, CPU-seconds, return]
                for x, axes in zip(curve.T, column, strict=False):
                    axes.plot(x, curve[:, 2], color=color, alpha=0.5, lw=1, label=None if i else label)
                    if run["steps_to_threshold"]:
                        axes.plot(x[-1], curve[-1, 2], ".", color=color)
        for axes in column:
            axes.axhline(cells[0]["threshold"], color="gray", ls=":", lw=1)
            axes.grid(alpha=0.3)
        column[0].set(title=name_task(cells[0]), xlabel="environment steps")
        column[0].xaxis.set_major_formatter(EngFormatter())
        column[1].set(xlabel="CPU-seconds of training", xscale="log")
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
    figure.axes[0].set_ylabel("return of the greedy policy")
    figure.axes[len(pairs)].set_ylabel("return of the greedy policy")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def sections(results: dict) -> dict[str, str]:
    """What the docs and the README show of the results, by the name of their section."""
    measured = report.describe_machines(results)
    ours, peer = list_pairs(results)[0]
    seconds, others = (np.median(records.get_values(cell, "seconds_to_threshold")) for cell in (ours, peer))
    return {
        "ppo_tasks": f"\n{make_table(results)}\n\n{measured}\n",
        "ppo_speed": f"\n{make_speed_table(results)}\n",
        "ppo_tasks_cell": f"{ours['task']} solved in {seconds:.1f} CPU-seconds (median of {len(ours['runs'])} seeds), "
        f"{others / seconds:.1f}x fewer than Stable-Baselines3 with the rl-zoo's settings",
    }


def main() -> None:
    """Write tables and picture from benchmark/results/ppo_tasks.json."""
    results = common.load_results("ppo_tasks")
    draw(results, common.FIGURES / "ppo_tasks.png")
    common.write_report(sections(results), "ppo")
    print(make_table(results))


if __name__ == "__main__":
    main()
