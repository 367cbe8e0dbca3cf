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


def show_median(cell: dict, quantity: str) -> str:
    """Write the median over the seeds, and how many got to the threshold if not all did."""
    values = np.array(records.get_values(cell, quantity))
    num_reached = int(np.isfinite(values).sum())
    return show(np.median(values)) + f" ({num_reached} of {len(values)})" * (num_reached < len(values))


def show_difference(cell: dict, base: dict) -> str:
    """Write by how much the mean headline differs from that of `base`, with Welch's interval; bold if beyond noise."""
    if cell is base or not base["runs"]:
        return ""
    values, others = (records.get_values(side, "headline") for side in (cell, base))
    interval = records.find_interval(values, others)
    mark = "**" * bool(interval and (interval[0] > 0 or interval[1] < 0))
    return f"{mark}{show(np.mean(values) - np.mean(others))}{mark}{show_interval(interval)}"


def make_ratio_table(results: dict) -> str:
    """Write a line for each ratio of ours and others: the medians of both sides, and their ratio with its interval."""
    rows, cells = [], results["cells"]
    for ratio in results["ratios"]:
        sides = cells[ratio["ours"]], cells[ratio["peer"]]
        peer = sides[1]
        line = [ratio["title"], peer["runs"][0]["commit"] if peer["runs"] else peer["script"]]
        lacking = [cell["missing"][0]["error"] for cell in sides if not cell["runs"]]
        if not lacking:
            quantities = ratio["quantity"], ratio.get("peer_quantity", ratio["quantity"])
            line += map(show_median, sides, quantities)
            value, interval = records.find_ratio(*map(records.get_values, sides, quantities))
            low, high = interval or (0.0, math.inf)
            mark = "**" * (low > 1 or high < 1)
            line.append(f"{mark}{show(value)}{mark}{show_interval(interval)}")
        rows.append(line + ["-", "-", *lacking[:1]] * bool(lacking))
    return common.make_table("what | peer | ours: | peer's: | ours / peer, 95 % interval:", rows)


def make_cell_table(cells: list[dict], columns: dict) -> str:
    """Write a table with a line for each cell that has run, and list what is missing.

    A column shows the metric that it names, or what its function says of a cell.
    """
    rows, missing = [], []
    for cell in cells:
        name = f"{cell['task']}, {cell['setting']}"
        if cell["runs"]:
            shown = [find(cell) if callable(find) else show_mean(cell, find) for find in columns.values()]
            rows.append([name, *shown, show_median(cell, "cpu_seconds"), len(cell["runs"])])
        seeds = {}
        for lost in cell["missing"]:
            seeds.setdefault(lost["error"], []).append(str(lost["seed"]))
        missing += [f"- {name}, seeds {', '.join(found)}: {error}" for error, found in seeds.items()]
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
    """Say which machines the runs of cells used, and the versions of other programs."""
    runs = [run for cell in cells for run in cell["runs"] if run["machine"]]
    machines = [run["machine"] for run in runs]
    peers = {run["commit"] for run in runs} - {machine["commit"] for machine in machines}
    others = f" Others: {', '.join(sorted(peers))}." * bool(peers)
    gpus = ["with GPUs"] * any(cell["gpus"] for cell in cells)
    return common.machine_line(machines, gpus) + others if runs else ""


def fill_summary(results: dict) -> str:
    """Fill the numbers into a suite's summary: medians of seconds and steps, means of metrics."""

    def fill(match) -> str:
        name, quantity, form = match.groups()
        average = np.median if re.search("seconds|steps", quantity) else np.mean
        return format(average(records.get_values(results["cells"][name], quantity)), form)

    return SUMMARY_NUMBER.sub(fill, results["summary"])


# ---- Pages -----------------------------------------------------------------------------------------------------------


def list_cells(results: dict) -> list[dict]:
    """List the cells of a suite."""
    return [*results["cells"].values()]


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
            columns = table.get("columns")
            parts = [make_cell_table(cells, columns), LEGEND] if columns else [make_ratio_table(results)]
            add(table["page"], table["section"], cells, *parts)
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
        ]
    common.write_atomically(out / "results.md", "\n\n".join(filter(None, parts)) + "\n")


def merge(old: dict, new: dict) -> None:
    """Add to `new` the committed runs that it lacks; ResultsError for runs made with uncommitted changes."""
    for name, cell in new["cells"].items():
        for run in cell["runs"]:
            where = f"{new['suite']}: {name}, seed {run['seed']}"
            require("dirty" not in str(run["machine"]), f"{where} ran with uncommitted changes: run it again")
    for name, before in old["cells"].items():
        cell = new["cells"].setdefault(name, before)
        runs = {run["seed"]: run for run in before["runs"] + cell["runs"]}
        cell["runs"] = list(runs.values())
        cell["missing"] = [
            m for m in cell["missing"] if m["seed"] not in runs or m["error"] != records.NOT_RUN
        ]
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
