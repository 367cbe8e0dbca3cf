"""Tables and learning curves of runs: docs/results.md of what benchmark/run.py has run, or a page of your own.

    python benchmark/report.py --runs runs --out report   # your own runs: report/results.md, report/figures
    python benchmark/report.py --out report               # runs of suites: report/results/SUITE.json too
    python benchmark/report.py                            # docs/results.md, docs/figures, benchmark/results/SUITE.json
    python benchmark/report.py --report-only              # docs/results.md again, from benchmark/results alone

With --out, the page shows all suites in RUNS or RUNS/benchmark and the run folders in RUNS that the scripts have left,
of runs that still go on too. Without it, those of benchmark/suites but smoke, which shows no results. Nothing is lost:
a suite whose committed results have runs that its folder lacks is refused. The suite `ablations` is shown in the
scripts' pages too, each cell against the first of its task.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import common
import compare
import numpy as np
import records
import run_folders
from common import show

INTRODUCTION = """# Results

Written by [`benchmark/report.py`](../benchmark/report.py) from runs of
[`benchmark/run.py`](../benchmark/run.py). Two commands make the results of the suite `cpu` anew, without a network
once the packages are installed:

```bash
python benchmark/run.py benchmark/suites/cpu.toml
python benchmark/report.py
```

"""
LEGEND = """IQM is the interquartile mean over the seeds, the interval its 95 % bootstrap. Seconds and steps to the
threshold are medians, of the first point of the learning curve at the threshold. Seconds are {seconds}, which other
work on the machine lengthens; steps per second are those of training, up to the last point of the curve. Memory is main
memory, that of all processes of a run, the largest of the seeds."""


def show_interval(interval: tuple[float, float] | None) -> str:
    """Two numbers as people write them."""
    return "{} to {}".format(*map(show, interval)) if interval else "-"


def show_threshold(cell: dict, quantity: str) -> str:
    """Median over the seeds, and how many got there where not all did."""
    if cell["threshold"] is None:
        return ""
    if not any(run["curve"] for run in cell["runs"]):
        return "no curve"
    values = records.get_values(cell, quantity)
    num_solved = int(np.isfinite(values).sum())
    median = float(np.median(values))
    text = f"{median:,.0f}" if quantity.startswith("steps") and math.isfinite(median) else show(median)
    return text if num_solved == len(values) else f"{text} ({num_solved} of {len(values)})"


def make_cell_line(cell: dict) -> str:
    """The line of a cell."""
    values = records.get_values(cell, "headline")
    metric = cell["headline"].removeprefix("eval/")
    memory = [run["peak_memory_mb"] for run in cell["runs"] if run["peak_memory_mb"]]
    threshold = "" if cell["threshold"] is None else f"{cell['threshold']:g}"
    columns = [cell["task"], cell["setting"], len(values), metric]
    columns += [show(float(np.mean(values))), f"**{show(float(records.find_iqm(values)))}**"]
    columns += [show_interval(records.find_interval((values,), records.find_iqm)), threshold]
    columns += [show_threshold(cell, "seconds_to_threshold"), show_threshold(cell, "steps_to_threshold")]
    columns += [show(float(np.median(records.get_values(cell, "steps_per_second"))))]
    columns += [f"{max(memory):,.0f} MB" if memory else "-"]
    return "| " + " | ".join(map(str, columns)) + " |"


def make_table(cells: list[dict]) -> str:
    """Markdown table of the cells of a script, then their commands and what is missing."""
    head = "task | setting | seeds | metric | mean | IQM | 95 % interval | threshold | s to it | steps to it | steps/s"
    lines = [f"| {head} | memory |", "|--|--|--:|--|--:|--:|--|--:|--:|--:|--:|--:|"]
    lines += [make_cell_line(cell) for cell in cells if cell["runs"]]
    lines += [""] + [f"- {cell['task']}, {cell['setting']}: `{' '.join(cell['command'].split())}`" for cell in cells]
    for cell in cells:
        for error in dict.fromkeys(missing["error"] for missing in cell["missing"]):
            seeds = ", ".join(str(missing["seed"]) for missing in cell["missing"] if missing["error"] == error)
            what = "not run yet" if error == records.NOT_RUN else f"**failed**: {error}"
            lines.append(f"- {cell['task']}, {cell['setting']}, seeds {seeds}: {what}")
    return "\n".join(lines)


def describe_flags(cell: dict, first: dict) -> str:
    """The flags of the cell's command that `first` has not, and the names of those that only `first` has."""
    flags, others = (re.findall(r"--\S+(?: (?!--)\S+)*", " ".join(c["command"].split())) for c in (cell, first))
    new = " ".join(flag for flag in flags if cell is first or flag not in others)
    gone = " ".join(f for f in others if f.split()[0] not in {flag.split()[0] for flag in flags})
    return ", ".join(text for text in (f"`{new}`" if new else "", f"without `{gone}`" if gone else "") if text)


def make_ablation_line(cell: dict, first: dict) -> str:
    """The line of a cell in the table of its task, whose first cell is `first`."""
    columns = [cell["setting"], describe_flags(cell, first), len(cell["runs"])]
    if not cell["runs"]:
        return f"| {' | '.join(map(str, columns))} | {cell['missing'][0]['error']} | | | | | |"
    values = records.get_values(cell, "headline")
    columns += [show(float(np.mean(values))), "", "", ""]
    if cell is not first and first["runs"]:
        found = compare.compare_cell(records.get_values(first, "headline"), values, cell["better"])
        low, high = found["interval"] or (math.nan, math.nan)
        difference = f"{'+' if found['difference'] > 0 else ''}{show(found['difference'])}"
        columns[-3:] = [f"**{difference}**" if low > 0 or high < 0 else difference, show_interval(found["interval"])]
        columns += [f"{found['improvement']:.0%}"]
    columns += [f"{np.median(records.get_values(cell, q)):,.0f}" for q in ("env_steps", "cpu_seconds")]
    return "| " + " | ".join(map(str, columns)) + " |"


def make_ablations(results: dict) -> dict[str, str]:
    """What the pages of the scripts show of the suite, by script: each cell against the first of its task."""
    columns = "setting, flags, seeds, mean, difference, 95 % interval, probability of improvement, steps, CPU-s"
    pages = {}
    for script, all_cells in list_scripts(results).items():
        lines = [""]
        for task in dict.fromkeys(cell["task"] for cell in all_cells):
            cells = [cell for cell in all_cells if cell["task"] == task]
            metric = next((cell["headline"] for cell in cells if cell["headline"]), "").removeprefix("eval/")
            lines += [f"**{task}**, {metric}, {cells[0]['better']} is better", ""]
            lines += [f"| {columns.replace(', ', ' | ')} |", "|--|--|--:|--:|--:|--|--:|--:|--:|"]
            lines += [*(make_ablation_line(cell, cells[0]) for cell in cells), ""]
        pages[script] = "\n".join([*lines, describe_machines(results), ""])
    return pages


def make_ratio_table(results: dict) -> str:
    """The headline table: ours, peer, and the ratio of the medians."""
    lines = ["| what | peer | ours | peer's | ours / peer | 95 % interval | better is |", "|--|--|--:|--:|--:|--|--|"]
    for ratio in results["ratios"]:
        ours, peer = (results["cells"][ratio[side]] for side in ("ours", "peer"))
        columns = [ratio["title"], peer["runs"][0]["commit"] if peer["runs"] else peer["script"]]
        if ours["runs"] and peer["runs"]:
            quantities = ratio["quantity"], ratio.get("peer_quantity", ratio["quantity"])
            values = [records.get_values(cell, q) for cell, q in zip((ours, peer), quantities, strict=True)]
            found = records.find_ratio(*values, paired=ours is peer)
            columns += ["never" if np.isposinf(np.median(v)) else show(float(np.median(v))) for v in values]
            columns += [f"**{show(found[0])}**" if found else "-", show_interval(found and found[1])]
        else:
            empty = ours if not ours["runs"] else peer
            columns += ["-", "-", f"not run: {empty['missing'][0]['error']}", "-"]
        lines.append("| " + " | ".join([*columns, ratio["better"]]) + " |")
    return "\n".join(lines)


def describe_machines(results: dict) -> str:
    """What the runs ran on: machines, days, commits, versions."""
    runs = [run for cell in results["cells"].values() for run in cell["runs"]]
    machines = [run["machine"] for run in runs if run["machine"]]
    hardware = {f"{m['cores']} cores of {m['cpu']}, Python {m['python']}, gymnasium {m['gymnasium']}" for m in machines}
    gpus = sorted({run["device"] for run in runs} - {"cpu", "none"})
    commits = sorted({run["commit"] for cell in results["cells"].values() if is_ours(cell) for run in cell["runs"]})
    dates = sorted({m["date"] for m in machines})
    torch = sorted({run["torch"] for run in runs} - {"none"})
    days = " to ".join(sorted({*dates[:1], *dates[-1:]}))
    peers = sorted({run["commit"] for cell in results["cells"].values() for run in cell["runs"]} - set(commits))
    parts = [*sorted(hardware), *gpus, f"torch {', '.join(torch)}", f"commit {', '.join(commits)}", days]
    others = f" Others: {', '.join(peers)}." if peers else ""
    return f"Measured on {'; '.join(parts)}.{others}"


def is_ours(cell: dict) -> bool:
    """Whether the cell runs one of our scripts, and not a peer."""
    return "algos/" in cell["command"]


def list_scripts(results: dict) -> dict[str, list[dict]]:
    """Cells by script, ours first; peers are listed with their own scripts."""
    scripts = {}
    for cell in sorted(results["cells"].values(), key=lambda cell: not is_ours(cell)):
        scripts.setdefault(cell["script"], []).append(cell)
    return scripts


def list_curves(results: dict) -> dict[str, list[dict]]:
    """Cells that have learning curves, by task."""
    tasks = {}
    for cell in results["cells"].values():
        if any(run["curve"] for run in cell["runs"]):
            tasks.setdefault(cell["task"], []).append(cell)
    return tasks


def draw(results: dict, path: Path) -> None:
    """Learning curves by steps and by seconds, a row of two pictures a task: each seed, and the mean over the seeds."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    tasks = list_curves(results)
    figure = Figure(figsize=(13, 3.2 * len(tasks)), layout="constrained")
    for row, (task, cells) in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks.items(), strict=True):
        is_one_script = len({cell["script"] for cell in cells}) == 1
        for i, cell in enumerate(cells):
            color = f"C{i}" if len(cells) <= 10 else matplotlib.colormaps["tab20"](i % 20)
            label = cell["setting"] if is_one_script else f"{cell['script']}, {cell['setting']}"
            for column, axes in enumerate(row):
                curves = [
                    (np.array(run["curve"])[:, column], np.array(run["curve"])[:, 2])
                    for run in cell["runs"]
                    if run["curve"]
                ]
                for x, y in curves:
                    axes.plot(x, y, color=color, alpha=0.3, lw=0.8)
                grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 200)
                mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
                axes.plot(grid, mean, color=color, lw=2, label=label)
                if cell["threshold"] is not None:
                    axes.axhline(cell["threshold"], color="gray", ls=":", lw=1)
        labels = run_folders.name_steps(cells[0]["script"]), "CPU-seconds" if is_cpu(results) else "seconds"
        for axes, label in zip(row, labels, strict=True):
            axes.set(xlabel=label, title=task)
            axes.grid(alpha=0.3)
        row[0].xaxis.set_major_formatter(EngFormatter())
        row[0].set_ylabel(run_folders.name_curve(cells[0]["curve"]))
        row[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def is_cpu(results: dict) -> bool:
    """Whether all runs were on the CPU."""
    return all(run["device"] in ("cpu", "none") for cell in results["cells"].values() for run in cell["runs"])


def render(results: dict) -> str:
    """The chapter of a suite."""
    seconds = "CPU-seconds" if is_cpu(results) else "CPU-seconds where a run was on the CPU, else seconds"
    lines = [f"## Suite `{results['suite']}`", "", describe_machines(results), "", LEGEND.format(seconds=seconds), ""]
    if results["ratios"]:
        lines += ["### Ours and others", "", "Medians over the seeds, both sides run in turns on the same machine.", ""]
        lines += [make_ratio_table(results), ""]
    if list_curves(results):
        lines += ["### Learning curves", "", f"![Learning curves](figures/{figure_name(results)})", ""]
        lines += ["Thin: a seed each. Thick: their mean, where all have values. Dotted: the threshold.", ""]
    for script, cells in list_scripts(results).items():
        lines += [f"### {script}", "", make_table(cells), ""]
    return "\n".join(lines)


def figure_name(results: dict) -> str:
    """File name of a suite's picture."""
    return f"results_{results['suite']}.png"


def render_page(suites: list[dict], is_published: bool = True) -> str:
    """results.md, of docs/ or of a folder of one's own."""
    return (INTRODUCTION if is_published else "# Results\n\n") + "\n".join(render(results) for results in suites)


def read_committed() -> dict[str, dict]:
    """Results of suites in benchmark/results, by name."""
    found = [json.loads(path.read_text()) for path in sorted(common.RESULTS.glob("*.json"))]
    return {results["suite"]: results for results in found if "suite" in results}


def check_nothing_is_lost(old: dict, new: dict, folder: Path) -> None:
    """Raise ResultsError where `old` has runs that `new` lacks."""
    lost = 0
    for name, cell in old["cells"].items():
        seeds = {run["seed"] for run in new["cells"].get(name, {"runs": []})["runs"]}
        lost += len({run["seed"] for run in cell["runs"]} - seeds)
    if lost:
        path = common.RESULTS / f"{old['suite']}.json"
        raise records.ResultsError(f"{folder} lacks {lost} runs that {path} has: finish the suite, or use --out")


def make_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="folder of runs")
    parser.add_argument("--out", type=Path, help="folder for page, figures and results, instead of docs/")
    parser.add_argument("--report-only", action="store_true", help="from benchmark/results, without run folders")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Write the page, its figures and the results."""
    args = make_parser().parse_args(argv)
    if args.report_only and args.out:
        raise records.ResultsError("--report-only writes docs/, and does not go with --out")
    suites, committed = {}, {} if args.out else read_committed()
    published = {path.stem for path in (common.ROOT / "benchmark" / "suites").glob("*.toml")} - {"smoke"}
    paths = [*args.runs.glob("*/suite.json"), *args.runs.glob("benchmark/*/suite.json")]
    for path in [] if args.report_only else sorted(paths):
        if not args.out and path.parent.name not in published:
            continue
        results = records.collect(path.parent)
        if any(cell["runs"] for cell in results["cells"].values()):
            check_nothing_is_lost(committed.get(path.parent.name, {"cells": {}}), results, path.parent)
            suites[path.parent.name] = results
    named = dict(sorted((committed | suites).items()))
    everything = list(named.values())
    groups = run_folders.collect(args.runs) if args.out else {}
    if not (everything if args.report_only else suites or groups):
        folder = common.RESULTS if args.report_only else args.runs
        raise records.ResultsError(f"{folder}: no runs to report")
    folder, data = (args.out, args.out / "results") if args.out else (common.ROOT / "docs", common.RESULTS)
    page = render_page(everything, not args.out)
    if groups:
        page = f"{page.rstrip()}\n\n{run_folders.render(groups)}"
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise records.ResultsError(f"--out {args.out}: cannot be made ({error.strerror})") from None
    for name, results in suites.items():
        common.write_atomically(data / f"{name}.json", common.to_json(results))
    for results in everything:
        if list_curves(results):
            draw(results, folder / "figures" / figure_name(results))
    for name, runs in groups.items():
        if run_folders.find_curves(runs):
            run_folders.draw(runs, folder / "figures" / f"{name}.png")
    common.write_atomically(folder / "results.md", page)
    if not args.out and "ablations" in named:
        for script, text in make_ablations(named["ablations"]).items():
            common.write_section(folder / f"{script}.md", "ablations", text)
    print(f"{folder / 'results.md'}: {', '.join([*named, *groups])}")


if __name__ == "__main__":
    try:
        main()
    except records.ResultsError as error:
        print(f"report.py: {error}", file=sys.stderr)
        sys.exit(2)
