"""Read results of suites, from run folders or from one JSON file, and compute statistics over their seeds."""

import json
import math
import re
import warnings
from pathlib import Path

import numpy as np
from scipy import stats

from benchmark import common
from benchmark.common import ResultsError, require
from benchmark.suite import read_suite

warnings.simplefilter(
    "ignore", RuntimeWarning
)  # about samples of one run or without noise, which show as dashes

NUM_POINTS = 60  # kept of a learning curve in the JSON file
NOT_RUN = "not run yet"
# What torchrun adds to a log when a script has failed
TORCHRUN = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.M)
# The one line on bad input of our scripts, and the first line in tyro's frame
BAD_INPUT = re.compile(r"^\w+\.py: error: .+|(?<=^│ ).+?(?= +│$)", re.M)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def find_threshold(curve: list, cell: dict):
    """Return the last of the first `in_a_row` successive points at the threshold or beyond; None if there are none."""
    sign = 1 if cell["better"] == "higher" else -1
    num_beyond = 0
    for point in curve:
        is_beyond = sign * point.value >= sign * cell["threshold"]
        num_beyond = num_beyond + 1 if is_beyond else 0
        if num_beyond == cell["in_a_row"]:
            return point
    return None


def read_run(path: Path, cell: dict, process: dict):
    """Read what is kept of the run in the folder `path`; ResultsError if it lacks the cell's headline or curve.

    `process` is what run.py has recorded of it.
    """
    events = common.read_events(path)
    tags = events.Tags()["scalars"]
    for tag in (cell["headline"], cell["curve"], "charts/cpu_seconds"):
        require(tag in tags or tag is None, f"no {tag} in {path} (there are: {', '.join(tags)})")
    shown = [tag for tag in tags if tag.startswith(("eval/", "best/")) or tag == cell["headline"]]
    metrics = {tag: events.Scalars(tag)[-1].value for tag in sorted(shown)}
    clock = events.Scalars("charts/cpu_seconds")
    last = clock[-1]
    steps = [point.step for point in clock]
    seconds = [point.value for point in clock]
    start = events.FirstEventTimestamp()

    def find_seconds(point):
        """Return the seconds of training until a point: of the clock for GPUs, else CPU-seconds without evaluations."""
        if cell["gpus"]:
            return point.wall_time - start
        return float(np.interp(point.step, steps, seconds))

    run = {
        "seed": cell["seed"],
        "metrics": metrics | process.get("best", {}),
        "env_steps": last.step,
        "wall_seconds": last.wall_time - start,
        "cpu_seconds": process["cpu_seconds"],
        "machine": process["machine"],
        # Peers log their version
        "commit": common.read_text(path, "program") or process["machine"]["commit"],
        "steps_per_second": last.step / max(find_seconds(last), 1e-9),
    }
    curve = events.Scalars(cell["curve"]) if cell["curve"] else []
    if late := [point.value for point in curve if point.step > 0.9 * last.step]:
        run["final_return"] = float(np.mean(late))
    if cell["threshold"] is not None:
        point = find_threshold(curve, cell)
        run["steps_to_threshold"] = point and point.step
        run["seconds_to_threshold"] = point and find_seconds(point)
    # Every so many points, from the last one backwards
    stride = math.ceil(len(curve) / NUM_POINTS) or 1
    run["curve"] = [
        [point.step, float(f"{find_seconds(point):.5g}"), float(f"{point.value:.5g}")]
        for point in curve[::-stride][::-1]
    ]
    return run


def read_end(log: Path):
    """Read from a log why a script ended: its line on bad input, else the last line or state of a progress bar."""
    text = log.read_text(errors="replace") if log.exists() else ""
    own = TORCHRUN.split(text)[0]
    found = BAD_INPUT.search(own)
    return found[0] if found else own.strip().split("\n")[-1].strip()


def read_attempt(process_path: Path, cell: dict):
    """Read the run of an attempt at a cell, from its process.json; ResultsError with the reason if it has no result."""
    attempt = process_path.parent
    process = json.loads(process_path.read_text())
    code = process["exit_code"]
    require(code is not None, f"not done after {cell['hours']:g} hours")
    require(code == 0, f"exit code {code}: {read_end(attempt / 'log.txt')}")
    is_scored = process.get("best") or not cell["score_best"]
    require(is_scored, f"no scores of best.pt: {read_end(attempt / 'best.txt')}")
    folders = common.find_run_folders(attempt)
    require(folders, "no run folder")
    return read_run(folders[0], cell, process)


def find_run(folder: Path, cell: dict):
    """Return the run of the first successful attempt at a cell, else the seed and the error of the last failed one."""
    error = NOT_RUN
    for path in sorted(folder.glob("try_*/process.json")):  # an attempt that nobody has seen end has none
        try:
            return read_attempt(path, cell)
        except ResultsError as failure:
            error = str(failure)
    return {"seed": cell["seed"], "error": error}


# ---- Suites ----------------------------------------------------------------------------------------------------------


def group(rows: list, runs: list):
    """Group the cells of a suite, one for each seed, by name, each with its run or with the error of a missing run."""
    cells = {}
    for row, run in zip(rows, runs, strict=True):
        cell = cells.setdefault(row["name"], row | {"runs": [], "missing": []})
        cell.pop("seed", None)  # each run has its own
        cell["missing" if "error" in run else "runs"].append(run)
    return cells


def collect(folder: Path):
    """Read the results of the suite whose runs are in `folder`, which benchmark/run.py has made."""
    suite = json.loads((folder / "suite.json").read_text())
    runs = [find_run(folder / row.pop("folder"), row) for row in suite["cells"]]
    return suite | {"cells": group(suite["cells"], runs)}


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
        if results := common.load_results(path.stem):
            old = {
                (cell["command"], *get_criterion(cell), run["seed"]): run
                for cell in results["cells"].values()
                for run in cell["runs"]
            }
            cells, content = read_suite(path)
            rows = [vars(cell) for cell in cells]
            runs = [
                old.get(
                    (row["command"], *get_criterion(row), row["seed"]),
                    {"seed": row["seed"], "error": NOT_RUN},
                )
                for row in rows
            ]
            published[path.stem] = content | {"suite": path.stem, "cells": group(rows, runs)}
    return published


def is_ours(cell: dict):
    """Return whether the cell runs a program of ours, and not a peer."""
    return not re.search(r"peers\.(?!our_)", cell["command"])


# ---- Over seeds ------------------------------------------------------------------------------------------------------


def get_values(cell: dict, quantity: str):
    """Return a quantity of each run of a cell, by seed: infinite if a threshold was not reached, nan if unknown.

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


def find_interval(values, others=(0, 0)):
    """Return Welch's 95 % interval of the mean of `values` minus that of `others`: Student's if these have no noise.

    None if a sample has one value, or infinite or unknown ones; nan at both ends if there is no noise at all.
    """
    if min(len(values), len(others)) < 2 or not np.isfinite([*values, *others]).all():
        return None
    return tuple(stats.ttest_ind(values, others, equal_var=False).confidence_interval())


def find_ratio(ours: list, peer: list):
    """Return the ratio of the medians, and a 95 % interval of the ratio from the logarithms of both samples.

    The interval is for the ratio of the geometric means. If values are not positive, infinite or unknown, what cannot
    be computed is nan or None.
    """
    if not min(*ours, *peer) > 0:
        return math.nan, None
    ratio = np.median(ours) / np.median(peer) or math.nan
    interval = find_interval(np.log(ours), np.log(peer))
    return ratio, interval and tuple(np.exp(interval))
