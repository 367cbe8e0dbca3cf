"""Collect the results of suites from run folders, and store, load and publish them as JSON files."""

import json
import math
import re
from dataclasses import asdict, fields
from pathlib import Path

from benchmark import common
from benchmark.common import require
from benchmark.runs import NOT_RUN, Outcome, find_run
from benchmark.suite import Cell, read_suite


def save_results(path: Path, results: dict):
    """Write a results file, with each point of a curve in one line."""
    number = r"\s+([-\d.e]+)"
    text = re.sub(rf"\[{number},{number},{number}\s+\]", r"[\1, \2, \3]", json.dumps(results, indent=1))
    common.write_atomically(path, f"{text}\n")


def load_results(name: str):
    """Read benchmark/results/`name`.json; None if it is not there."""
    path = common.RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def group(cells: list[Cell], outcomes: list[Outcome]):
    """Group the cells of a suite, one for each seed, by name, each with its runs and the errors of missing
    runs."""
    grouped = {}
    for cell, outcome in zip(cells, outcomes, strict=True):
        row = grouped.setdefault(cell.name, asdict(cell) | {"runs": [], "missing": []})
        row.pop("seed", None)  # each run has its own
        if outcome.run:
            row["runs"].append(outcome.run)
        else:
            row["missing"].append({"seed": cell.seed, "error": outcome.error})
    return grouped


def collect(folder: Path):
    """Read the results of the suite whose runs are in `folder`, which benchmark/run.py has made."""
    suite = json.loads((folder / "suite.json").read_text())
    known = {field.name for field in fields(Cell)}
    cells = [Cell(**{key: row[key] for key in known & row.keys()}) for row in suite["cells"]]
    outcomes = [find_run(folder / row["folder"], cell) for row, cell in zip(suite["cells"], cells)]
    return {"ratios": []} | suite | {"cells": group(cells, outcomes)}


def load(path: Path):
    """Read the results of a suite from its run folder or its JSON file; ResultsError for another file."""
    if path.is_dir():
        return collect(path)
    try:
        results = json.loads(path.read_text())
        is_right = isinstance(results["cells"], dict)
    except (ValueError, TypeError, KeyError):
        is_right = False
    require(is_right, f"{path}: no results of a suite")
    return results


def get_criterion(cell: dict):
    """Return what a cell's results are judged by."""
    return [cell[key] for key in ("headline", "curve", "threshold", "in_a_row", "better")]


def load_published():
    """Read benchmark/results by suite, with the cells, seeds, tables and ratios that the suite has now.

    A cell that is new in the suite, or has another command or criterion now, counts as not run yet.
    """
    published = {}
    for path in sorted(common.SUITES.glob("*.toml")):
        results = load_results(path.stem)
        if not results:
            continue
        old = {
            (cell["command"], *get_criterion(cell), run["seed"]): run
            for cell in results["cells"].values()
            for run in cell["runs"]
        }
        suite = read_suite(path)
        outcomes = []
        for cell in suite.cells:
            run = old.get((cell.command, *get_criterion(vars(cell)), cell.seed))
            outcomes.append(Outcome(run, error="" if run else NOT_RUN))
        cells = group(suite.cells, outcomes)
        published[path.stem] = asdict(suite) | {"suite": path.stem, "cells": cells}
    return published


def is_ours(cell: dict):
    """Return whether the cell runs a program of ours, and not a peer."""
    return not re.search(r"peers\.(?!our_)", cell["command"])


def get_values(cell: dict, quantity: str):
    """Return a quantity of each run of a cell, by seed: infinite if a threshold was not reached, nan if
    unknown.

    Metrics may be named with or without `eval/`.
    """
    if quantity == "headline":
        quantity = cell["headline"]
    values = []
    for run in sorted(cell["runs"], key=lambda run: run["seed"]):
        known = run | run["metrics"]
        value = known.get(quantity, known.get(f"eval/{quantity}", math.nan))
        values.append(math.inf if value is None else round(value, 9))  # the last digits are no noise
    return values
