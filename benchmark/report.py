"""Tables and learning curves of runs: the pages in docs/ of what benchmark/ has measured, or a page of your own.

    python benchmark/report.py --runs runs --out report   # your own runs: report/results.md, report/figures
    python benchmark/report.py --out report               # runs of suites: report/results/SUITE.json too
    python benchmark/report.py                            # docs/results.md, the tables and pictures of all pages

With --out, the page shows all suites in RUNS or RUNS/benchmark and the runs that have ended in RUNS. Without it, new
runs of suites that are in benchmark/suites go into benchmark/results, and what there is goes into the pages, between
<!-- NAME --> and <!-- /NAME -->, and into docs/figures. Nothing is lost: committed runs that a folder has not run yet
are kept, and runs of a tree with changes that no commit holds are refused.
"""

import argparse
import importlib
import math
import re
import sys
from pathlib import Path

import common
import numpy as np
import records
from common import ResultsError, show
from suite import SUMMARY_NUMBER

sys.path.append(str(common.BENCHMARK / "studies"))
STUDIES = ("change_detection", "go_search", "on_gpu", "tsp_networks")  # each by its own program
UNPUBLISHED = ("smoke", "gpu", "ppo_seeds")
SCRIPTS = ("ppo", "reinforce_tsp_attention", "r2d2_lstm", "ppo_change_detection", "alphazero_go")
METRICS = {  # in words
    "eval/episodic_return": "return",
    "charts/episodic_return": "return of training episodes, at the end",
    "eval/greedy_gap": "gap of greedy tours, %",
    "eval/f1": "F1 of changed pixels, on val",
    "eval/win_rate": "games won against plain MCTS",
}
STEPS = {
    "reinforce_tsp_attention": "instances",
    "rl4co_attention": "instances",
    "ppo_change_detection": "pairs",
    "alphazero_go": "moves of self-play",
}


# ---- Tables ----------------------------------------------------------------------------------------------------------


def show_interval(interval: tuple[float, float] | None, digits: int = 3) -> str:
    """Two numbers as people write them."""
    return " to ".join(show(end, digits) for end in interval) if interval else "-"


def show_quantity(cell: dict, quantity: str) -> str:
    """Median over the seeds; of what it took to the threshold where most runs never got there, what they were given."""
    values = np.array(records.get_values(cell, quantity))
    reached = "" if np.isfinite(values).all() else f" ({np.isfinite(values).sum()} of {len(values)})"
    median = float(np.median(values))
    if np.isinf(median) and quantity.endswith("_to_threshold"):
        column = 0 if quantity.startswith("steps") else 1
        given = float(np.median([run["curve"][-1][column] for run in cell["runs"]]))
        return f"over {show(given)}{reached}"
    return show(median) + reached


def make_ratio_line(ratio: dict, cells: dict[str, dict]) -> list[str]:
    """What was compared, the peer, both sides, and the ratio of the medians with its interval."""
    ours, peer = (cells[ratio[side]] for side in ("ours", "peer"))
    line = [ratio["title"], peer["runs"][0]["commit"] if peer["runs"] else peer["script"]]
    if not ours["runs"] or not peer["runs"]:
        empty = ours if not ours["runs"] else peer
        return [*line, "-", "-", empty["missing"][0]["error"]]
    quantities = ratio["quantity"], ratio.get("peer_quantity", ratio["quantity"])
    sides = list(zip((ours, peer), quantities, strict=True))
    line += [show_quantity(*side) for side in sides]
    found = records.find_ratio(*(records.get_values(*side) for side in sides), paired=ours is peer)
    if found is None:
        return [*line, "-"]
    low, high = found[1] or (0.0, math.inf)
    is_better = high < 1 if ratio["better"] == "lower" else low > 1
    digits = 5 if 0 < abs(found[0] - 1) < 0.01 else 3  # 1.0012 is not 1.00
    is_worse = low > 1 if ratio["better"] == "lower" else high < 1
    mark = "**" if is_better else "*" if is_worse else ""
    text = f"{mark}{show(found[0], digits)}{mark}"
    return [*line, f"{text} ({show_interval(found[1], digits)})"]


def make_ratio_table(results: list[dict]) -> str:
    """Markdown table of ours and others, a line for each ratio of each suite."""
    rows = [make_ratio_line(ratio, suite["cells"]) for suite in results for ratio in suite["ratios"]]
    return common.make_table("what | peer | ours: | peer's: | ours / peer, 95 % interval:", rows)


def name_metric(tag: str) -> str:
    """A metric in words."""
    return METRICS.get(tag) or tag.removeprefix("eval/").replace("_", " ")


def make_script_line(cell: dict) -> list[str]:
    """The line of a cell in the short table of its script."""
    values = records.get_values(cell, "headline")
    interval = records.find_interval((values,), np.mean)
    result = show(float(np.mean(values))) + (f" ({show_interval(interval)})" if interval else "")
    quantity, end = "cpu_seconds", ""
    if cell["threshold"] is not None and any(run["curve"] for run in cell["runs"]):
        quantity, end = "seconds_to_threshold", f", to reach {cell['threshold']:g}"
    metric = name_metric(cell["headline"])
    time = show_quantity(cell, quantity) + end
    return [f"{cell['task']}, {cell['setting']}", metric, result, time, len(values)]


def make_script_table(cells: list[dict], others: list[list] = ()) -> str:
    """Markdown table of cells that have run, of `others`, lines of that form, and what is missing."""
    rows = [make_script_line(cell) for cell in cells if cell["runs"]]
    table = common.make_table("task, setting | metric | result: | CPU-s: | seeds:", [*rows, *others])
    return "\n".join([table, "", *list_missing(cells)])


def list_missing(cells: list[dict]) -> list[str]:
    """What has not run or has failed, a line for each cell and reason, as a list."""
    lines = []
    for cell in cells:
        for error in dict.fromkeys(missing["error"] for missing in cell["missing"]):
            seeds = ", ".join(
                str(missing["seed"]) for missing in cell["missing"] if missing["error"] == error
            )
            what = error if error == records.NOT_RUN else f"**failed**: {error}"
            lines.append(f"- {cell['task']}, {cell['setting']}, seeds {seeds}: {what}")
    return lines


def show_metric(cell: dict, metric: str) -> str:
    """Mean of a metric over the seeds with its range; of one run, with the interval that the run gives itself."""
    values = records.get_values(cell, metric)
    low, high = min(values), max(values)
    if len(values) == 1:
        low, high = (records.get_values(cell, f"{metric}_{end}")[0] for end in ("low", "high"))
    text = show(float(np.mean(values)))
    return text if low == high or math.isnan(low) else f"{text} ({show(low)} to {show(high)})"


def make_column_table(results: dict, columns: dict[str, str]) -> str:
    """Markdown table of the cells of a suite with metrics of one's choice, and their command lines."""
    cells = [cell for cell in results["cells"].values() if cell["runs"]]
    rows = []
    for cell in cells:
        metrics = [show_metric(cell, metric) for metric in columns.values()]
        seconds = show(float(np.median(records.get_values(cell, "cpu_seconds"))))
        rows.append([f"{cell['task']}, {cell['setting']}", *metrics, seconds, len(cell["runs"])])
    head = ["task, setting", *(f"{column}:" for column in columns), "CPU-s:", "seeds:"]
    legend = "Means over the seeds, in brackets the lowest and the highest; CPU-seconds, of the whole run, are medians."
    if all(len(cell["runs"]) == 1 for cell in cells):  # one match each, whose time is not that of learning
        head, rows = head[:-2], [row[:-2] for row in rows]
        legend = "In brackets 95 % intervals."
    missing = list_missing(list(results["cells"].values()))
    return "\n".join(
        [common.make_table(" | ".join(head), rows), "", legend, "", *list_commands(cells), *missing]
    )


def list_commands(cells: list[dict]) -> list[str]:
    """The command line of the first cell of each task, and what the others have set differently, as a list."""
    lines, first, has_flags = [], {}, False
    for cell in cells:
        other = first.setdefault((cell["script"], cell["task"]), cell)
        words = cell["command"].split()
        text = f"`{' '.join(words)}`"
        if cell is not other and records.is_ours(cell) and words[0] == other["command"].split()[0]:
            text = describe_flags(cell, other)
            has_flags = True
        lines.append(f"- {cell['task']}, {cell['setting']}: {text}")
    return ["Flags without a command are added to the first one of their task.", ""] * has_flags + lines


def describe_flags(cell: dict, first: dict) -> str:
    """The flags of the cell's command that `first` has not, and the names of those that only `first` has."""
    flags, others = (
        re.findall(r"--\S+(?: (?!--)\S+)*", " ".join(c["command"].split())) for c in (cell, first)
    )
    new = " ".join(flag for flag in flags if cell is first or flag not in others)
    gone = " ".join(f for f in others if f.split()[0] not in {flag.split()[0] for flag in flags})
    return ", ".join(
        text for text in (f"`{new}`" if new else "", f"without `{gone}`" if gone else "") if text
    )


def make_ablation_line(cell: dict, first: dict) -> list[str]:
    """The line of a cell in the table of its task, whose first cell is `first`."""
    line = [cell["setting"], describe_flags(cell, first)]
    if not cell["runs"]:
        return [*line, cell["missing"][0]["error"], "", "", ""]
    values, difference, improvement = records.get_values(cell, "headline"), "", ""
    if cell is not first and first["runs"]:
        found = records.compare_means(records.get_values(first, "headline"), values, cell["better"])
        low, high = found["interval"] or (math.nan, math.nan)
        text = f"{'+' if found['difference'] > 0 else ''}{show(found['difference'])}"
        difference = f"**{text}**" if low > 0 or high < 0 else text
        difference += f" ({show_interval(found['interval'])})" if found["interval"] else ""
        improvement = f"{found['improvement']:.0%}"
    seconds = show(float(np.median(records.get_values(cell, "cpu_seconds"))))
    return [*line, show(float(np.mean(values))), difference, improvement, seconds]


def make_ablations(results: dict) -> dict[str, str]:
    """What the pages of the scripts show of the suite, by script: each cell against the first of its task."""
    head = "setting | flags | mean: | difference, 95 % interval: | probability of improvement: | CPU-s:"
    pages = {}
    for script in dict.fromkeys(cell["script"] for cell in results["cells"].values()):
        mine = {name: cell for name, cell in results["cells"].items() if cell["script"] == script}
        lines = [""]
        for task in dict.fromkeys(cell["task"] for cell in mine.values()):
            cells = [cell for cell in mine.values() if cell["task"] == task]
            metric = name_metric(next((cell["headline"] for cell in cells if cell["headline"]), ""))
            num_seeds = max(len(cell["runs"]) for cell in cells)
            lines += [f"**{task}**, {metric}, {cells[0]['better']} is better, {num_seeds} seeds", ""]
            lines += [common.make_table(head, [make_ablation_line(cell, cells[0]) for cell in cells]), ""]
        pages[script] = "\n".join([*lines, describe_machines([results | {"cells": mine}]), ""])
    return pages


def describe_machines(results: list[dict]) -> str:
    """What the runs ran on, and the versions of others."""
    runs = [run for suite in results for cell in suite["cells"].values() for run in cell["runs"]]
    machines = [run["machine"] for run in runs if run["machine"]]
    if not machines:
        return ""
    commits = {machine["commit"] for machine in machines}
    peers = sorted({run["commit"] for run in runs} - commits - {"unknown"})
    others = f" Others: {', '.join(peers)}." if peers else ""
    gpus = {run["device"] for run in runs} - {"cpu", "none"}
    return common.machine_line(machines, gpus) + others


def fill_summary(results: dict) -> str:
    """The summary of a suite with its numbers: medians of seconds and steps, means of metrics, ratios of both."""

    def find(name: str, quantity: str) -> float:
        values = records.get_values(results["cells"][name], quantity)
        return float(np.median(values) if re.search("seconds|steps", quantity) else np.mean(values))

    def fill(match) -> str:
        names, quantity, form = match.groups()
        first, *second = (find(name, quantity) for name in names.split(":"))
        return format(first / second[0] if second else first, form)

    return SUMMARY_NUMBER.sub(fill, results["summary"])


# ---- Pictures --------------------------------------------------------------------------------------------------------


def list_curves(results: dict) -> dict[tuple[str, str], list[dict]]:
    """Cells that have learning curves, by task and by the curve's tag."""
    tasks = {}
    for cell in results["cells"].values():
        if cell["runs"] and all(run["curve"] for run in cell["runs"]):
            tasks.setdefault((cell["task"], cell["curve"]), []).append(cell)
    return tasks


def draw(results: dict, path: Path) -> None:
    """Learning curves of each task by steps and by seconds: each seed, the mean over the seeds, thresholds reached."""
    from matplotlib.figure import Figure

    tasks = list_curves(results)
    num_bands = math.ceil(
        len(tasks) / 5
    )  # of tasks beside each other, the two panels of each one above the other
    num_columns = math.ceil(len(tasks) / num_bands)
    rows, columns = 2 * num_bands, num_columns
    if len(tasks) == 1:
        rows, columns = 1, 2
    figure = Figure(figsize=(3.4 * columns, 2.9 * rows), layout="constrained")
    for i, ((task, _), cells) in enumerate(tasks.items()):
        band, column = divmod(i, num_columns)
        for offset, kind in enumerate(("steps", "seconds")):
            place = (2 * band + offset) * num_columns + column + 1
            axes = figure.add_subplot(rows, columns, place)
            axes.set_title(task, fontsize=10)
            draw_curves(axes, cells, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def draw_curves(axes, cells: list[dict], kind: str) -> None:
    """The learning curves of a task by `kind`: steps or seconds."""
    from matplotlib.ticker import EngFormatter

    is_one_script = len({cell["script"] for cell in cells}) == 1
    column, longest = (0 if kind == "steps" else 1), []
    # The second colour is the first other program's in all pictures
    cells = sorted(cells, key=lambda cell: (cell is not cells[0], records.is_ours(cell)))
    for i, cell in enumerate(cells):
        color = f"C{i}"
        label = cell["setting"] if is_one_script else f"{cell['script']}, {cell['setting']}"
        curves = []
        for run in cell["runs"]:
            curve = np.array(run["curve"])
            curves.append((curve[:, column], curve[:, 2]))
            axes.plot(*curves[-1], color=color, alpha=0.35, lw=0.8)
            if run.get(f"{kind}_to_threshold"):
                axes.plot(run[f"{kind}_to_threshold"], cell["threshold"], "o", ms=3, color=color)
        grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 200)
        axes.plot(
            grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0), color=color, lw=2, label=label
        )
        longest.append(max(x[-1] for x, _ in curves))
        if cell["threshold"] is not None:
            axes.axhline(cell["threshold"], color="gray", ls=":", lw=1)
    on_cpu = all(run["device"] in ("cpu", "none") for cell in cells for run in cell["runs"])
    seconds = "CPU-seconds" if on_cpu else "seconds"
    axes.set_xlabel(
        STEPS.get(cells[0]["script"], "environment steps") if kind == "steps" else seconds, fontsize=8
    )
    axes.set_ylabel(records.CURVES.get(cells[0]["curve"], "return"), fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if kind == "steps":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if len(cells) > 1:
            axes.legend(fontsize=7)
    elif max(longest) > 5 * min(longest):
        axes.set_xscale("log")


# ---- Pages -----------------------------------------------------------------------------------------------------------


def load_studies() -> list[tuple]:
    """The modules of the studies, each with its results, None if it has not run yet."""
    return [(importlib.import_module(name), common.load_results(name)) for name in STUDIES]


def list_shown(published: dict[str, dict], script: str) -> list[dict]:
    """The first cell of each task of a script; of the suite `cpu` those of tasks that no other suite has."""
    names = [name for name in published if name != "ablations" and not name.endswith("_speed")]
    first = {}
    for name in sorted(names, key=lambda name: (name == "cpu", name)):
        for cell in published[name]["cells"].values():
            if cell["script"] == script and cell["runs"]:
                first.setdefault(cell["task"], cell)
    return list(first.values())


def make_results(published: dict[str, dict]) -> dict[str, str]:
    """The sections of docs/results.md: ours and others, the short table of each script, and what all ran on."""
    compared = [results for results in published.values() if results["ratios"]]
    sections = {"ratios": f"{make_ratio_table(compared)}\n\n{describe_machines(compared)}"}
    for script in SCRIPTS:
        studies = [study for study in load_studies() if script == getattr(study[0], "PAGE", None)]
        others = [line for module, results in studies for line in module.list_lines(results)]
        sections[script] = make_script_table(list_shown(published, script), others).rstrip()
    shown = [results for name, results in published.items() if name != "ablations"]
    return sections | {"machines": describe_machines(shown)}


def list_drawn(published: dict[str, dict]) -> list[str]:
    """Suites with a table on a page and with learning curves of ours, but those of speed alone."""
    drawn = [name for name, results in published.items() if results["tables"] and list_curves(results)]
    drawn = [
        name
        for name in drawn
        if any(c["runs"] and records.is_ours(c) for c in published[name]["cells"].values())
    ]
    return [name for name in drawn if not name.endswith("_speed")]


def make_sections(published: dict[str, dict]) -> dict[tuple[str, str], str]:
    """(page, section): what stands there, of all suites and studies."""
    sections = {("results", section): f"\n{text}\n" for section, text in make_results(published).items()}
    for name, results in published.items():
        ours = [cell for cell in results["cells"].values() if cell["runs"] and records.is_ours(cell)]
        for table in results["tables"]:
            text = make_ratio_table([results])
            if "columns" in table:
                text = make_column_table(results, table["columns"])
            elif not name.endswith("_speed"):
                text += "\n\n" + "\n".join(
                    list_commands(ours) + list_missing(list(results["cells"].values()))
                )
            sections[table["page"], table["section"]] = f"\n{text}\n\n{describe_machines([results])}\n"
        if results["summary"]:
            sections["README", f"{name}_cell"] = fill_summary(results)
    for script, text in make_ablations(published["ablations"]).items():
        sections[script, "ablations"] = text
    for module, results in load_studies():
        sections |= module.make_sections(results)
    return sections


def make_pages(published: dict[str, dict]) -> dict[Path, str]:
    """The text of every page that shows results."""
    pages = {}
    for (page, section), content in make_sections(published).items():
        path = common.ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
        pages[path] = common.replace_section(pages.get(path) or path.read_text(), section, content)
    return pages


def publish(published: dict[str, dict]) -> None:
    """Write all pages and pictures."""
    pages = make_pages(published)
    for name in list_drawn(published):
        draw(published[name], common.FIGURES / f"{name}.png")
    for module, results in load_studies():
        if hasattr(module, "PAGE"):
            module.draw(results, common.FIGURES / f"{module.__name__}.png")
    for path, text in pages.items():
        common.write_atomically(path, text)
    print(f"{len(pages)} pages: {', '.join(published)}")


def render_own(suites: list[dict]) -> str:
    """results.md of a folder of one's own."""
    lines = ["# Results", ""]
    for results in suites:
        lines += [f"## Suite `{results['suite']}`" if results["suite"] != "runs" else "## Runs", ""]
        lines += [
            describe_machines([results]),
            "",
            make_ratio_table([results]) if results["ratios"] else "",
            "",
        ]
        if list_curves(results):
            lines += [f"![Learning curves](figures/{results['suite']}.png)", ""]
        for script in dict.fromkeys(cell["script"] for cell in results["cells"].values()):
            cells = [cell for cell in results["cells"].values() if cell["script"] == script]
            lines += [
                f"### {script}",
                "",
                make_script_table(cells),
                *list_commands([c for c in cells if c["command"]]),
            ]
            lines += [""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def check_nothing_is_lost(old: dict | None, new: dict, folder: Path) -> None:
    """Raise ResultsError where `old` has runs that `new` lacks, or where runs are not those of a commit."""
    before, after = (
        {(name, run["seed"]) for name, cell in results["cells"].items() for run in cell["runs"]}
        for results in (old or {"cells": {}}, new)
    )
    if lost := len(before - after):
        raise ResultsError(f"{folder} lacks {lost} runs of benchmark/results: finish the suite, or use --out")
    if dirty := records.list_dirty(new):
        first = (
            f"{folder} has {len(dirty)} runs of a tree with changes that no commit holds, such as {dirty[0]}"
        )
        raise ResultsError(f"{first}: commit and run them anew, or use --out")


def keep_committed(old: dict | None, new: dict) -> None:
    """Add to `new` the runs that it has not run yet and `old` has, of cells whose command is the same."""
    for name, cell in new["cells"].items():
        before = (old or {"cells": {}})["cells"].get(name, {"runs": []})
        not_run = {missing["seed"] for missing in cell["missing"] if missing["error"] == records.NOT_RUN}
        kept = [run for run in before["runs"] if run["seed"] in not_run]
        seeds = [run["seed"] for run in kept]
        cell["runs"] += kept
        cell["missing"] = [missing for missing in cell["missing"] if missing["seed"] not in seeds]
        cell["headline"] = cell["headline"] or before.get("headline")


def take_in(folders: list[Path]) -> None:
    """Put the runs of suites into benchmark/results; ResultsError where one of them loses or hides something."""
    suites = {folder: records.collect(folder) for folder in folders if folder.name not in UNPUBLISHED}
    suites = {folder: suite for folder, suite in suites.items() if has_runs(suite)}
    published = records.load_published()
    for folder, suite in suites.items():
        keep_committed(published.get(suite["suite"]), suite)
        check_nothing_is_lost(published.get(suite["suite"]), suite, folder)
    for suite in suites.values():
        common.save_results(suite["suite"], suite)


def has_runs(suite: dict) -> bool:
    """Whether any run of the suite has ended."""
    return any(cell["runs"] for cell in suite["cells"].values())


def write_own(suites: list[dict], args: argparse.Namespace) -> None:
    """results.md of one's own runs, with figures and results."""
    if not any(map(has_runs, suites)):
        raise ResultsError(f"{args.runs}: no runs to report")
    try:
        (args.out / "results").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"--out {args.out}: cannot be made ({error.strerror})") from None
    for suite in suites:
        common.write_atomically(args.out / "results" / f"{suite['suite']}.json", common.to_json(suite))
        if list_curves(suite):
            draw(suite, args.out / "figures" / f"{suite['suite']}.png")
    common.write_atomically(args.out / "results.md", render_own(suites))
    print(f"{args.out / 'results.md'}: {', '.join(suite['suite'] for suite in suites)}")


def make_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="folder of runs")
    parser.add_argument("--out", type=Path, help="folder for page, figures and results, instead of docs/")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Write the page, its figures and the results."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not args.runs.is_dir() and args.runs != parser.get_default("runs"):
        raise ResultsError(f"--runs {args.runs}: no such folder")
    if args.out and args.out.resolve() in (common.ROOT, common.ROOT / "docs", common.BENCHMARK):
        raise ResultsError(
            f"--out {args.out}: has files of this repository; leave the flag out to renew them"
        )
    paths = sorted([*args.runs.glob("*/suite.json"), *args.runs.glob("benchmark/*/suite.json")])
    folders = [path.parent for path in paths]
    if args.out:
        suites = [*map(records.collect, folders), records.collect_folders(args.runs)]
        write_own([suite for suite in suites if suite["cells"]], args)
    else:
        take_in([folder for folder in folders if (common.SUITES / f"{folder.name}.toml").exists()])
        publish(records.load_published())


if __name__ == "__main__":
    common.run_main(main)
