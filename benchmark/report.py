"""Write tables and learning curves of runs, into the pages of docs/ or into a page of your own.

    python benchmark/report.py --out report   # the suites in RUNS: report/results.md and report/figures
    python benchmark/report.py                # docs/results.md, the tables and pictures of all pages

With --out, the page shows the suites that have run in RUNS. Without it, new runs of suites that are in
benchmark/suites are added to benchmark/results, and all results there go into the pages, between
<!-- NAME --> and <!-- /NAME -->, and into docs/figures. Committed runs that RUNS lacks are kept. Runs that were made
with uncommitted changes are refused.
"""

import importlib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np
import records
import tyro
from common import require, show
from pictures import METRICS, draw

sys.path.append(str(common.BENCHMARK / "studies"))
STUDIES = ("change_detection", "go_search", "on_gpu", "tsp_networks")  # each by its own program
UNPUBLISHED = ("smoke", "gpu")
SUMMARY_NUMBER = re.compile(r"{([^\s}]+) ([^\s}]+) ([^\s}]+)}")  # {CELL QUANTITY FORMAT}
MAX_SINGLE = 5  # with up to so many seeds, tables show the single values
LEGEND = """The table shows means. Brackets hold the value of each seed, from six seeds on Student's 95 % interval,
and for a match Wilson's. CPU-seconds are medians of whole runs."""


@dataclass
class Args:
    """Command line."""

    runs: Path = Path("runs/benchmark")  # folder of runs
    out: Path | None = None  # folder for a page and its figures, instead of docs/


# ---- Tables ----------------------------------------------------------------------------------------------------------


def show_interval(interval: tuple[float, float] | None) -> str:
    """Write an interval in brackets; nothing if there is none."""
    return f" ({' to '.join(map(show, interval))})" if interval and math.isfinite(interval[0]) else ""


def show_mean(cell: dict, metric: str) -> str:
    """Write the mean of a metric over the seeds, and in brackets the single values or an interval."""
    values = records.get_values(cell, metric)
    text = show(np.mean(values))
    if 1 < len(values) <= MAX_SINGLE:
        return f"{text} ({', '.join(map(show, values))})"
    own = [records.get_values(cell, f"{metric}_{end}")[0] for end in ("low", "high")]  # of a match
    return text + show_interval(records.find_interval(values) or own)


def show_median(values: list[float]) -> str:
    """Write the median over the seeds, and how many got to the threshold if not all did."""
    num_reached = int(np.isfinite(values).sum())
    return show(np.median(values)) + f" ({num_reached} of {len(values)})" * (num_reached < len(values))


def list_processors(*cells: dict) -> str:
    """Name the processors of all runs of cells."""
    found = {run["machine"]["cpu"] for cell in cells for run in cell["runs"] if run["machine"]}
    return ", ".join(sorted(found))


def show_difference(cell: dict, base: dict) -> str:
    """Write by how much the mean headline differs from that of `base`, with Welch's interval; bold if beyond noise."""
    if cell is base or not base["runs"]:
        return ""
    values, others = (records.get_values(side, "headline") for side in (cell, base))
    interval = records.find_interval(values, others)
    mark = "**" * bool(interval and (interval[0] > 0 or interval[1] < 0))
    return f"{mark}{show(np.mean(values) - np.mean(others))}{mark}{show_interval(interval)}"


def make_ratio_table(results: dict) -> str:
    """Write a line for each ratio of ours and others: the medians of both sides, and their ratio with its interval.

    A column names the processors of a line if not all lines have the same one.
    """
    rows, are_mixed = [], "," in list_processors(*list_cells(results, results["ratios"]))
    for ratio in results["ratios"]:
        sides = list_cells(results, [ratio])
        values = [records.get_values(cell, ratio["quantity"]) for cell in sides]
        commits = [run["commit"] for run in sides[1]["runs"]] or [sides[1]["script"]]
        lacking = [cell["missing"][0]["error"] for cell in sides if not cell["runs"]]
        line = ["-", "-", *lacking[:1]]
        if not lacking:
            value, interval = records.find_ratio(*values)
            low, high = interval or (0.0, math.inf)
            mark = "**" * (low > 1 or high < 1)
            line = [*map(show_median, values), f"{mark}{show(value)}{mark}{show_interval(interval)}"]
        seeds = " / ".join(str(len(side)) for side in values)
        rows.append([ratio["title"], commits[0], *line, seeds, *[list_processors(*sides)] * are_mixed])
    head = "what | peer | ours: | peer's: | ours / peer, 95 % interval: | seeds:"
    return common.make_table(head + " | processor" * are_mixed, rows)


def make_cell_table(cells: list[dict], columns: dict) -> str:
    """Write a table with a line for each cell that has run, and list what is missing.

    A column shows the metric that it names, or what its function says of a cell.
    """
    rows, missing = [], []
    if "," in list_processors(*cells):
        columns = columns | {"processor": list_processors}
    for cell in cells:
        name = f"{cell['task']}, {cell['setting']}"
        if cell["runs"]:
            shown = [find(cell) if callable(find) else show_mean(cell, find) for find in columns.values()]
            rows.append(
                [name, *shown, show_median(records.get_values(cell, "cpu_seconds")), len(cell["runs"])]
            )
        missing += [f"- {name}, seed {lost['seed']}: {lost['error']}" for lost in cell["missing"]]
    head = " | ".join(["task, setting", *(f"{title}:" for title in columns), "CPU-s:", "seeds:"])
    return "\n".join([common.make_table(head, rows), "", *missing]).rstrip()


RESULT = {"metric": lambda cell: METRICS.get(cell["headline"], cell["headline"]), "result": "headline"}


def make_comparison(cells: list[dict]) -> str:
    """Write a table that holds each cell against the first one of its task."""
    first = {}
    for cell in cells:
        first.setdefault(cell["task"], cell)
    change = {"difference, 95 % interval": lambda cell: show_difference(cell, first[cell["task"]])}
    return make_cell_table(cells, RESULT | change)


def describe_machines(cells: list[dict]) -> str:
    """Say which machines the runs of cells used, the versions of other programs, and what is not equal to theirs."""
    runs = [(cell["task"], run["machine"], run) for cell in cells for run in cell["runs"] if run["machine"]]
    if not runs:
        return ""
    machines, commits = [machine for _, machine, _ in runs], {}
    gpus = ["with GPUs"] * any(cell["gpus"] and cell["runs"] for cell in cells)
    notes = [common.machine_line(machines, gpus)]
    if peers := {run["commit"] for *_, run in runs} - {machine["commit"] for machine in machines}:
        notes.append(f"Others: {', '.join(sorted(peers))}.")
        for task, machine, run in runs:
            commits.setdefault((task, run["seed"]), set()).add(machine["commit"])
        if apart := {task for (task, _), found in commits.items() if len(found) > 1}:
            notes.append(
                f"Not interleaved, as the sides ran at different commits: {', '.join(sorted(apart))}."
            )
        if not all("clock" in machine for machine in machines):
            notes.append("Our seconds of training leave out set-up, logging and saving, theirs do not.")
    return " ".join(notes)


def fill_summary(results: dict) -> str:
    """Fill the numbers into a suite's summary: medians of seconds and steps, means of metrics."""

    def fill(match) -> str:
        name, quantity, form = match.groups()
        average = np.median if re.search("seconds|steps", quantity) else np.mean
        return format(average(records.get_values(results["cells"][name], quantity)), form)

    return SUMMARY_NUMBER.sub(fill, results["summary"])


# ---- Pages -----------------------------------------------------------------------------------------------------------


def list_cells(results: dict, ratios=()) -> list[dict]:
    """List the cells of a suite, or of some of its ratios."""
    names = [ratio[side] for ratio in ratios for side in ("ours", "peer")]
    return [results["cells"][name] for name in names or results["cells"]]


def load_studies() -> list[tuple]:
    """Import the studies, each with its results, None if it has not run yet."""
    return [(importlib.import_module(name), common.load_results(name)) for name in STUDIES]


def make_pages(published: dict[str, dict]) -> dict[Path, str]:
    """Return the text of every page that shows results of suites and studies."""
    pages = {}

    def put(page: str, section: str, text: str) -> None:
        path = common.ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
        pages[path] = common.replace_section(pages.get(path) or path.read_text(), section, text)

    def add(page: str, section: str, cells: list[dict], *parts: str) -> None:
        text = "\n\n".join(filter(None, [*parts, describe_machines(cells)]))
        put(page, section, f"\n{text}\n")

    ablations = list_cells(published["ablations"])
    for script in {cell["script"] for cell in ablations}:
        cells = [cell for cell in ablations if cell["script"] == script]
        add(script, "ablations", cells, make_comparison(cells))
    for name, results in published.items():
        cells = list_cells(results)
        for table in results["tables"]:
            where = table["page"], table["section"]
            if columns := table.get("columns"):
                add(*where, cells, make_cell_table(cells, columns), LEGEND)
            else:
                add(*where, list_cells(results, results["ratios"]), make_ratio_table(results))
        if results["summary"]:
            put("README", f"{name}_cell", fill_summary(results))
    for module, results in load_studies():
        for (page, section), text in module.make_sections(results).items():
            put(page, section, text)
    return pages


def publish(published: dict[str, dict]) -> None:
    """Write all pages, and the pictures that they show."""
    pages = make_pages(published)
    for path, text in pages.items():
        common.write_atomically(path, text)
    shown = "".join(pages.values())
    for name, results in published.items():
        if f"figures/{name}.png" in shown:
            draw(results, common.FIGURES / f"{name}.png")
    for module, results in load_studies():
        if hasattr(module, "draw"):
            module.draw(results, common.FIGURES / f"{module.__name__}.png")


def write_own(suites: list[dict], out: Path) -> None:
    """Write results.md for your own runs, with figures."""
    parts = ["# Results"]
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for suite in suites:
        name, cells = suite["suite"], list_cells(suite)
        picture = f"![Learning curves](figures/{name}.png)" * draw(suite, out / "figures" / f"{name}.png")
        parts += [
            f"## {name}",
            describe_machines(cells),
            picture,
            make_comparison(cells),
            LEGEND,
        ]
    common.write_atomically(out / "results.md", "\n\n".join(filter(None, parts)) + "\n")


def merge(old: dict, new: dict) -> None:
    """Add to `new` the committed runs of its seeds that it lacks; ResultsError for runs with uncommitted changes."""
    for name, cell in new["cells"].items():
        for run in cell["runs"]:
            message = f"{new['suite']}: {name}, seed {run['seed']} ran with uncommitted changes: run it again"
            require("dirty" not in str(run["machine"]), message)
    for name, before in old["cells"].items():
        cell = new["cells"].setdefault(name, before)
        seeds = {entry["seed"] for entry in cell["runs"] + cell["missing"]}  # of the suite
        runs = {run["seed"]: run for run in before["runs"] + cell["runs"] if run["seed"] in seeds}
        cell["runs"] = [*runs.values()]
        lost = cell["missing"]
        cell["missing"] = [m for m in lost if m["seed"] not in runs or m["error"] != records.NOT_RUN]
        cell["headline"] = cell["headline"] or before["headline"]


def main(argv: list[str] | None = None) -> None:
    """Write the pages, their figures and the results."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    require(args.runs.is_dir() or args.runs == Args.runs, f"--runs {args.runs}: no such folder")
    suites = [records.collect(path.parent) for path in sorted(args.runs.glob("*/suite.json"))]
    suites = [suite for suite in suites if any(cell["runs"] for cell in list_cells(suite))]
    if args.out:
        require(suites, f"--runs {args.runs}: no runs to report")
        write_own(suites, args.out)
        return
    published = records.load_published()
    for suite in suites:
        name = suite["suite"]
        if (common.SUITES / f"{name}.toml").exists() and name not in UNPUBLISHED:
            merge(published.get(name, {"cells": {}}), suite)
            common.save_results(common.RESULTS / f"{name}.json", suite)
    publish(records.load_published())


if __name__ == "__main__":
    common.run_main(main)
