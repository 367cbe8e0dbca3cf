"""Write tables and learning curves of runs, into the pages of docs/ or into a page of your own.

    python -m benchmark.report --out report   # the suites in RUNS: report/results.md and report/figures
    python -m benchmark.report                # docs/results.md, the tables and pictures of all pages
    python -m benchmark.report --check        # whether the published figures follow from the runs in RUNS
    python -m benchmark.report --csv FILE     # the points of all learning curves as one long table

With --out, the page shows the suites that have run in RUNS. Without it, new runs of suites that are in
benchmark/suites are added to benchmark/results, and all results there go into the pages, between <!-- NAME
--> and <!-- /NAME -->, and into docs/figures. Committed runs that RUNS lacks are kept. Runs that were made
with uncommitted changes are refused.

With --check, nothing is written. All that is published of a run, its thinned curve too, is computed again
from the events in RUNS and compared with benchmark/results, and the pages with what those results make of
them. What differs is named, and the exit code is then 1.

With --csv, only FILE is written: a row for each point of a curve, from benchmark/results or, if RUNS is
given, from the runs in RUNS.
"""

import csv
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmark import common  # first: it says what to install

# isort: split
import numpy as np
from scipy import stats

from benchmark import change_detection_pages, machines, records
from benchmark.code import mark
from benchmark.common import require
from benchmark.intervals import choose_center, find_interval, find_ratio
from benchmark.machines import machine_line
from benchmark.markdown import make_table, replace_section, show
from benchmark.pictures import METRICS, draw
from benchmark.records import get_values
from benchmark.runs import NOT_RUN
from benchmark.studies import go_search, learned, on_gpu, ppo_update, tsp_networks

STUDIES = {  # each by its own program; what makes its tables
    "change_detection": change_detection_pages,
    "go_search": go_search,
    "on_gpu": on_gpu,
    "ppo_update": ppo_update,
    "tsp_networks": tsp_networks,
}
SUMMARY_NUMBER = re.compile(r"{([^\s}]+) ([^\s}]+) ([^\s}]+)}")  # {CELL QUANTITY FORMAT}
MAX_SINGLE = 5  # with up to so many seeds, tables show the single values
LEGEND = (
    "Values are means. Brackets hold the value of each seed, or with six or more seeds Student's 95 % "
    "interval.\nA match has Wilson's interval. CPU-s is the median of whole runs with their evaluations, "
    "which may differ between\nprograms."
)


@dataclass
class Args:
    """Command line."""

    runs: Path | None = None  # folder of runs, in place of runs/benchmark
    out: Path | None = None  # folder for a page and its figures, instead of docs/
    check: bool = False  # compare RUNS with what is published, and write nothing
    csv: Path | None = None  # file for the points of all learning curves, and write nothing else


# ---- Tables ------------------------------------------------------------------------------------------------


def show_interval(interval: tuple | None):
    """Write an interval in brackets; nothing if there is none."""
    return f" ({' to '.join(map(show, interval))})" if interval and np.isfinite(interval).all() else ""


def show_effect(value: float, interval: tuple | None, neutral: float):
    """Write a difference or a ratio with its interval; bold if the interval excludes the `neutral` value."""
    is_beyond_noise = interval and (interval[0] > neutral or interval[1] < neutral)
    text = f"**{show(value)}**" if is_beyond_noise else show(value)
    return f"{text}{show_interval(interval)}"


def show_mean(cell: dict, metric: str):
    """Write the mean of a metric over the seeds, and in brackets the single values or an interval."""
    values = get_values(cell, metric)
    text = show(np.mean(values))
    if 1 < len(values) <= MAX_SINGLE:
        return f"{text} ({', '.join(map(show, values))})"
    own = [get_values(cell, f"{metric}_{end}")[0] for end in ("low", "high")]  # of a match
    return text + show_interval(find_interval(values) or own)


def show_center(values: list, find):
    """Write what `find` says of the values of all seeds, and how many got to the threshold if not all did."""
    if not values:
        return "-"
    num_reached = np.isfinite(values).sum()
    text = show(find(values))
    return text if num_reached == len(values) else f"{text} ({num_reached} of {len(values)})"


def list_processors(*cells: dict):
    """Name the processors of all runs of cells."""
    return machines.list_processors([run for cell in cells for run in cell["runs"]])


def make_ratio_table(results: dict):
    """Write a line for each ratio of ours and others: the centers of both sides, and their ratio with its
    interval.

    A column names the processors of a line if not all cells of the suite have the same one.
    """
    head = "what | ours / peer, 95 % interval: | ours: | peer's: | seeds: | peer"
    are_mixed = "," in list_processors(*results["cells"].values())
    if are_mixed:
        head += " | processor"
    rows = []
    for ratio in results["ratios"]:
        our_cell = results["cells"][ratio["ours"]]
        peer_cell = results["cells"][ratio["peer"]]
        ours = get_values(our_cell, ratio["quantity"])
        peer = get_values(peer_cell, ratio.get("peer_quantity") or ratio["quantity"])
        name = peer_cell["runs"][0]["commit"] if peer else peer_cell["script"]
        center = choose_center(ours, peer)
        if ours and peer:
            effect = show_effect(*find_ratio(ours, peer), 1)
            if any(value <= 0 for value in ours + peer):
                effect = "- (values are not all positive)"
        else:
            lacking = peer_cell if ours else our_cell
            effect = lacking["missing"][0]["error"]
        row = [
            mark(ratio["title"], our_cell["runs"] + peer_cell["runs"]),
            effect,
            show_center(ours, center),
            show_center(peer, center),
            f"{len(ours)} / {len(peer)}",
            name,
        ]
        if are_mixed:
            row.append(list_processors(our_cell, peer_cell))
        rows.append(row)
    return make_table(head, rows)


def make_difference_table(results: dict, metric: str):
    """Write a line for each pair of ours and others: the difference of their means, with Welch's interval."""
    rows = []
    for ours, peer in dict.fromkeys((ratio["ours"], ratio["peer"]) for ratio in results["ratios"]):
        our_cell = results["cells"][ours]
        peer_cell = results["cells"][peer]
        values = get_values(our_cell, metric)
        others = get_values(peer_cell, metric)
        effect = NOT_RUN
        if values and others:
            effect = show_effect(np.mean(values) - np.mean(others), find_interval(values, others), 0)
        name = mark(f"{our_cell['task']}, {our_cell['setting']}", our_cell["runs"] + peer_cell["runs"])
        rows.append([name, peer_cell["setting"], effect, f"{len(values)} / {len(others)}"])
    return make_table("task, ours | peer | ours - peer, 95 % interval: | seeds:", rows)


def make_cell_table(cells: list, columns: dict):
    """Write a table with a line for each cell that has run, and list what is missing.

    A column shows the metric that it names, or what its function says of a cell.
    """
    if "," in list_processors(*cells):
        columns = columns | {"processor": list_processors}
    rows, missing = [], []
    for cell in cells:
        name = f"{cell['task']}, {cell['setting']}"
        if cell["runs"]:
            shown = [find(cell) if callable(find) else show_mean(cell, find) for find in columns.values()]
            seconds = show_center(get_values(cell, "cpu_seconds"), np.median)
            rows.append([mark(name, cell["runs"]), *shown, seconds, len(cell["runs"])])
        missing += [f"- {name}, seed {lost['seed']}: {lost['error']}" for lost in cell["missing"]]
    head = " | ".join(["task, setting", *(f"{title}:" for title in columns), "CPU-s:", "seeds:"])
    return "\n".join([make_table(head, rows), "", *missing]).rstrip()


def make_comparison(cells: list, has_thresholds: bool = False):
    """Write a table that holds each cell against the first one of its task; `has_thresholds` adds steps and
    seconds."""
    first = {}
    for cell in cells:
        first.setdefault(cell["task"], cell)

    def show_difference(cell):
        base = first[cell["task"]]
        if cell is base or not base["runs"]:
            return ""
        values = get_values(cell, "headline")
        others = get_values(base, "headline")
        return show_effect(np.mean(values) - np.mean(others), find_interval(values, others), 0)

    columns = {
        "metric": lambda cell: METRICS.get(cell["headline"], cell["headline"]),
        "result": "headline",
        "difference, 95 % interval": show_difference,
    }
    if has_thresholds and any(cell["threshold"] is not None for cell in cells):
        columns["steps to the threshold"] = lambda cell: show_reached(cell, "steps_to_threshold")
        columns["seconds to it"] = lambda cell: show_reached(cell, "seconds_to_threshold")
    return make_cell_table(cells, columns)


def show_reached(cell: dict, quantity: str):
    """Write the median of a quantity of a threshold; a dash for a cell without one."""
    return "-" if cell["threshold"] is None else show_center(get_values(cell, quantity), np.median)


def describe_machines(cells):
    """Say which machines the runs of cells used, the versions of other programs, and what is not equal to
    theirs."""
    runs = [run | {"task": cell["task"]} for cell in cells for run in cell["runs"]]
    if not runs:
        return ""
    peers = {run["commit"] for run in runs} - {run["machine"]["commit"] for run in runs}
    more = f" Others: {', '.join(sorted(peers))}." if peers else ""
    if peers and any(map(records.is_ours, cells)):  # not of matches, where one process holds both sides
        sides = {(run["task"], run["seed"], run["machine"]["commit"]) for run in runs}
        pairs = Counter((task, seed) for task, seed, _ in sides)
        if apart := {task for (task, _), number in pairs.items() if number > 1}:
            more += f" Not interleaved, as the sides ran at different commits: {', '.join(sorted(apart))}."
    return machine_line(runs, more)


def fill_summary(results: dict):
    """Fill the numbers into a suite's summary.

    They are means over the seeds as in the tables: geometric ones of speeds, of whole seconds medians.
    """
    averages = {"cpu_seconds": np.median, "steps_per_second": stats.gmean}

    def fill(match):
        name, quantity, form = match.groups()
        average = averages.get(quantity, np.mean)
        return format(average(get_values(results["cells"][name], quantity)), form).replace("%", " %")

    return SUMMARY_NUMBER.sub(fill, results["summary"])


# ---- Pages -------------------------------------------------------------------------------------------------


def join(*parts: str):
    """Join the parts of a page that are not empty."""
    return "\n\n".join(filter(None, parts)) + "\n"


def make_sections(published: dict):
    """Return the text of every section, by page and name, that shows results of suites and studies."""
    sections = {}
    ablations = published["ablations"]["cells"].values()
    for script in {cell["script"] for cell in ablations}:
        cells = [cell for cell in ablations if cell["script"] == script]
        sections[script, "ablations"] = "\n" + join(make_comparison(cells), describe_machines(cells))
    for name, results in published.items():
        for table in results["tables"]:
            cells = results["cells"].values()
            if table.get("differences"):
                parts = [make_difference_table(results, table["differences"])]
            elif table["columns"]:
                parts = [make_cell_table(cells, table["columns"]), LEGEND]
            else:
                parts = [make_ratio_table(results)]
                cells = [
                    results["cells"][ratio[side]] for ratio in results["ratios"] for side in ("ours", "peer")
                ]
            sections[table["page"], table["section"]] = "\n" + join(*parts, describe_machines(cells))
        if results["summary"]:
            for page in ("README", "index", "results"):
                if f"<!-- {name}_cell -->" in get_path(page).read_text():
                    sections[page, f"{name}_cell"] = fill_summary(results)
    for name, study in STUDIES.items():
        if results := records.load_results(name):  # without any, the pages stay as they are
            sections |= study.make_sections(results)
    return sections


def get_path(page: str):
    """Return the path of a page: the README, or one of docs/."""
    return common.ROOT / ("README.md" if page == "README" else f"docs/{page}.md")


def make_pages(published: dict):
    """Return the text of every page that has such sections, by its path."""
    pages = {}
    for (page, section), text in make_sections(published).items():
        path = get_path(page)
        before = pages.get(path) or path.read_text()
        pages[path] = replace_section(before, section, text)
    return pages


def publish(published: dict):
    """Write all pages and the pictures that they show; returns the paths of those that have changed."""
    pages = make_pages(published)
    before = {path: path.read_bytes() for path in (*pages, *common.FIGURES.glob("*.png"))}
    for path, text in pages.items():
        path.write_text(text)
    shown = "".join(pages.values())
    for name, results in published.items():
        if f"figures/{name}.png" in shown:
            draw(results, common.FIGURES / f"{name}.png")
    if results := records.load_results("change_detection"):
        change_detection_pages.draw(results, common.FIGURES / "change_detection.png")
    change_detection_pages.draw_task(common.FIGURES / "change_task.png")
    tsp_networks.draw(common.FIGURES / "tsp_networks.png")
    learned.draw(published, common.FIGURES)
    paths = {*before, *common.FIGURES.glob("*.png")}
    return sorted(path for path in paths if path.read_bytes() != before.get(path))


def write_own(suites: list, out: Path):
    """Write results.md for your own runs, with figures; returns its path."""
    parts = ["# Results"]
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for suite in suites:
        name = f"figures/{suite['suite']}.png"
        cells = suite["cells"].values()
        parts.append(f"## {suite['suite']}")
        if draw(suite, out / name):
            parts.append(f"![Learning curves]({name})")
        parts += [make_comparison(cells, has_thresholds=True), LEGEND]
        if suite["ratios"]:
            parts.append(make_ratio_table(suite))
        parts.append(describe_machines(cells))
    path = out / "results.md"
    path.write_text(join(*parts))
    return path


def write_csv(suites: list, path: Path):
    """Write the curve points of all runs; returns their number."""
    rows = []
    for suite in suites:
        for cell in suite["cells"].values():
            for run in cell["runs"]:
                start = [suite["suite"], cell["script"], cell["task"], cell["setting"], run["seed"]]
                rows += [[*start, *point] for point in run["curve"]]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["suite", "script", "task", "setting", "seed", "step", "seconds", "score"])
        writer.writerows(rows)
    return len(rows)


def merge(old: dict, new: dict):
    """Add to `new` the committed runs that it lacks; returns the number of runs that are new.

    `old` has the suite's cells of today: what another command has run is left out. ResultsError for runs with
    uncommitted changes.
    """
    num_new = 0
    for name, cell in new["cells"].items():
        for run in cell["runs"]:
            is_clean = not run["machine"]["commit"].endswith("dirty")
            require(is_clean, f"{name}, seed {run['seed']} ran with uncommitted changes: run it again")
    for name, before in old["cells"].items():
        cell = new["cells"].setdefault(name, before)
        if cell["command"] != before["command"]:
            cell["runs"] = []
        num_new += sum(run not in before["runs"] for run in cell["runs"])
        runs = {run["seed"]: run for run in before["runs"] + cell["runs"]}
        cell |= before | {"runs": [*runs.values()], "missing": []}
    return num_new


def add_runs(suite: dict):
    """Add the new runs of a suite to benchmark/results, and say how many."""
    name = suite["suite"]
    if not (common.SUITES / f"{name}.toml").exists() or name == "smoke":
        print(f"{name}: not published; --out FOLDER shows it")
        return
    empty = {"cells": {key: cell | {"runs": []} for key, cell in suite["cells"].items()}}
    num_new = merge(records.load_published().get(name, empty), suite)
    path = common.RESULTS / f"{name}.json"
    records.save_results(path, {key: suite[key] for key in ("suite", "cells", "levels")})
    print(f"{name}: {num_new} new runs in benchmark/results/{name}.json")


def check_runs(suite: dict, published: dict):
    """Name what these runs lack of the published ones of a suite, and print how many are the same."""
    different = []
    num_same = 0
    for name, cell in suite["cells"].items():
        before = published["cells"].get(name, {"runs": []})
        old = {run["seed"]: run for run in before["runs"]}
        for run in json.loads(json.dumps(cell["runs"])):
            where = f"{suite['suite']}: {name}, seed {run['seed']}"
            known = old.get(run["seed"])
            if known is None:
                different.append(f"{where} is not published")
            elif keys := [key for key in run if run[key] != known.get(key)]:
                different.append(f"{where} has another {', '.join(keys)}")
            else:
                num_same += 1
    print(f"{suite['suite']}: {num_same} runs have what is published")
    return different


def check(suites: list):
    """Compare runs with what is published, and the pages with that; returns the exit code."""
    different = []
    for suite in suites:
        different += check_runs(suite, records.load_results(suite["suite"]) or {"cells": {}})
    pages = make_pages(records.load_published())
    different += [f"{path} is another page" for path, text in pages.items() if path.read_text() != text]
    for line in different:
        print(line)
    return 1 if different else 0


def main(args: Args):
    """Write pages, figures and results and say what has changed, or check them; returns the exit code."""
    require(not (args.check and args.out), "--check writes nothing: leave out --out")
    is_alone = not (args.check or args.out)
    require(is_alone or not args.csv, "--csv writes nothing but its file: leave out --check and --out")
    folder = args.runs or Path("runs/benchmark")
    suites = [records.collect(path.parent) for path in sorted(folder.glob("*/suite.json"))]
    if args.csv:
        shown = suites if args.runs else [*records.load_published().values()]
        require(shown, f"--runs {folder}: no runs to report")
        print(f"{args.csv}: {write_csv(shown, args.csv)} points")
        return 0
    require(suites or args == Args(), f"--runs {folder}: no runs to report")
    if args.check:
        return check(suites)
    if args.out:
        print(f"{write_own(suites, args.out)}: {', '.join(suite['suite'] for suite in suites)}")
        return 0
    if not suites:
        print(f"{folder}: no runs")
    for suite in suites:
        add_runs(suite)
    changed = publish(records.load_published())
    for path in changed:
        print(f"{path.relative_to(common.ROOT)}: written")
    if not changed:
        print("pages and pictures: as before")
    return 0


if __name__ == "__main__":
    common.run_main(main, Args, __doc__)
