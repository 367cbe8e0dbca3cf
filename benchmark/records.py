"""Read results of suites, from run folders or from one JSON file, and compute statistics over their seeds."""

import json
import math
import re
import warnings
from pathlib import Path

import common
import numpy as np
from common import ResultsError, require
from scipy import stats
from suite import SHOWN, read_suite

NUM_POINTS = 60  # kept of a learning curve in the JSON file
NOT_RUN = "not run yet"
# What torchrun adds to a log when a script has failed, with its exit codes, of which the last is the first to have come
TORCHRUN = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.M)
EXIT_CODE = re.compile(r"^  exitcode  : (\S+)", re.M)
# The one line on bad input of our scripts, and the first line in tyro's frame
BAD_INPUT = re.compile(r"^\w+\.py: error: .+|(?<=^│ ).+?(?= +│$)", re.M)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def find_threshold(curve: list[list[float]], threshold: float, better: str = "higher", in_a_row: int = 1):
    """Return the last of the first `in_a_row` successive points at the threshold or beyond; None if there are none."""
    sign, num_beyond = 1 if better == "higher" else -1, 0
    for point in curve:
        num_beyond = num_beyond + 1 if sign * point[-1] >= sign * threshold else 0
        if num_beyond == in_a_row:
            return point
    return None


def read_run(path: Path, cell: dict, process: dict) -> dict:
    """Read what is kept of the run in the folder `path`; ResultsError if it lacks the cell's headline or curve.

    `process` is what run.py has recorded of it.
    """
    tags = common.read_events(path).Tags()["scalars"]
    headline = cell["headline"]
    shown = [tag for tag in tags if tag.startswith(("eval/", "best/"))]
    values = {tag: common.read_points(path, tag)[-1][-1] for tag in sorted({headline, *shown})}
    last = common.read_points(path, "charts/cpu_seconds")[-1]
    machine, clock = process["machine"], 2 if cell["gpus"] else 1
    version = common.read_text(path, "program")  # logged by peers
    run = {
        "seed": cell["seed"],
        "headline": headline,
        "value": values[headline],
        "metrics": values | process.get("best", {}),
        "env_steps": last[0],
        "wall_seconds": last[2],
        "cpu_seconds": process["cpu_seconds"],
        "machine": machine,
        "commit": version or machine["commit"],
        "steps_per_second": last[0] / max(last[clock], 1e-9),
    }
    if "charts/episodic_return" in tags:
        returns = common.read_points(path, "charts/episodic_return")
        if late := [point[-1] for point in returns if point[0] > 0.9 * last[0]]:
            run["final_return"] = float(np.mean(late))
    curve = common.read_points(path, cell["curve"]) if cell["curve"] else []
    if cell["threshold"] is not None:
        point = find_threshold(curve, cell["threshold"], cell["better"], cell["in_a_row"])
        run |= {"steps_to_threshold": point and point[0], "seconds_to_threshold": point and point[clock]}
    rare = curve[:: -math.ceil(len(curve) / NUM_POINTS) or 1][::-1]  # keeps the last point
    points = [[point[0], float(f"{point[clock]:.5g}"), float(f"{point[3]:.5g}")] for point in rare]
    return run | {"curve": points}


def read_end(log: Path) -> tuple[str, list[str]]:
    """Read from a log why a script ended, and the exit codes of its processes if torchrun tells them.

    That is its line on bad input, else the last line or the last state of a progress bar.
    """
    text = log.read_bytes().decode(errors="replace") if log.exists() else ""
    own = TORCHRUN.split(text)[0]
    found = BAD_INPUT.search(own)
    return found[0] if found else re.split("[\r\n]", own.strip())[-1].strip(), EXIT_CODE.findall(text)


def read_attempt(attempt: Path, cell: dict) -> dict:
    """Read the run in the folder of an attempt at a cell; ResultsError with the reason if it has no result."""
    try:
        process = json.loads((attempt / "process.json").read_text())
    except (OSError, ValueError):  # it is still running, or the harness was killed
        raise ResultsError(NOT_RUN) from None
    code = process["exit_code"]
    require(code is not None, f"not done after {cell.get('hours', 0):g} hours")
    line, codes = read_end(attempt / "log.txt")
    require(code == 0, f"exit code {[code, *codes][-1]}: {line}")
    is_scored = process.get("best") or not cell.get("score_best")
    require(is_scored, f"no scores of best.pt: {read_end(attempt / 'best.txt')[0]}")
    for path in common.find_run_folders(attempt):
        return read_run(path, cell, process)
    raise ResultsError("no run folder")


def find_run(folder: Path, cell: dict) -> tuple[dict | None, str]:
    """Return the run of the first successful attempt at a cell, or None, and the error of the last failed one."""
    error = NOT_RUN
    for attempt in sorted(folder.glob("try_*")):
        try:
            return read_attempt(attempt, cell), ""
        except ResultsError as failure:
            error = str(failure)
    return None, error


# ---- Suites ----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict:
    """Read a file that run.py or report.py has made of a suite; ResultsError for anything else."""
    try:
        content = SHOWN | json.loads(path.read_text())
        content["suite"], content["cells"]
    except (OSError, ValueError, TypeError, KeyError):
        raise ResultsError(f"{path}: no results of a suite") from None
    return content


def add_run(cells: dict, name: str, cell: dict, run: dict | None, missing: dict) -> None:
    """Add a run, or the entry of a missing one, to the cell with the name."""
    entry = cells.setdefault(name, {"headline": None} | cell | {"runs": [], "missing": []})
    if run:
        entry["headline"] = run.pop("headline")
    entry["runs" if run else "missing"].append(run or missing)


def collect(folder: Path) -> dict:
    """Read the results of the suite whose runs are in `folder`, which benchmark/run.py has made."""
    suite, cells = read_json(folder / "suite.json"), {}
    for cell in suite["cells"]:
        run, error = find_run(folder / cell.pop("folder"), cell)
        name, seed = cell.pop("name"), cell.pop("seed")
        add_run(cells, name, cell, run, {"seed": seed, "error": error})
    return suite | {"cells": cells}


def load(path: Path) -> dict:
    """Read the results of a suite from its run folder or its JSON file."""
    results = collect(path) if path.is_dir() else read_json(path)
    require(isinstance(results["cells"], dict), f"{path}: give the folder that it is in")
    return results


def load_published() -> dict[str, dict]:
    """Read benchmark/results by suite, with the cells, tables and ratios that the suite has now.

    A cell that is new in the suite, or has another command now, counts as not run yet.
    """
    found = {}
    for path in sorted(common.SUITES.glob("*.toml")):
        if results := common.load_results(path.stem):
            new, shown = read_suite(path)
            cells = {}
            for cell in new:
                old = results["cells"].get(cell.name, {"command": ""})
                if old["command"].split() == cell.command.split():
                    cells[cell.name] = old
                else:
                    add_run(cells, cell.name, vars(cell), None, {"seed": cell.seed, "error": NOT_RUN})
            found[path.stem] = results | shown | {"cells": cells}
    return found


def is_ours(cell: dict) -> bool:
    """Return whether the cell runs a program of ours, and not a peer."""
    return not re.search("peers/(?!our_)", cell["command"])


# ---- Over seeds ------------------------------------------------------------------------------------------------------


def get_values(cell: dict, quantity: str) -> list[float]:
    """Return a quantity of each run of a cell, by seed: infinite if a threshold was not reached, nan if unknown.

    Metrics may be named with or without `eval/`.
    """
    values, name = [], quantity.removeprefix("eval/")
    for run in sorted(cell["runs"], key=lambda run: run["seed"]):
        known = run | run["metrics"] | {"headline": run["value"]}
        value = known.get(name, known.get(f"eval/{name}", math.nan))
        values.append(math.inf if value is None else value)
    return values


def find_interval(*samples) -> tuple[float, float] | None:
    """Return Student's 95 % interval of a mean, or Welch's of the first mean minus the second.

    None if a sample has one value, or infinite or unknown ones; nan at both ends if there is no noise.
    """
    if min(map(len, samples)) < 2 or not np.isfinite(np.concatenate(samples)).all():
        return None
    with warnings.catch_warnings():  # about samples without noise
        warnings.simplefilter("ignore", RuntimeWarning)
        one = len(samples) == 1
        test = stats.ttest_1samp(*samples, 0) if one else stats.ttest_ind(*samples, equal_var=False)
        return tuple(map(float, test.confidence_interval()))


def find_ratio(ours: list[float], peer: list[float]) -> tuple:
    """Return the ratio of the medians, and a 95 % interval of the ratio from the logarithms of both samples.

    The interval is for the ratio of the geometric means. If values are not positive, infinite or unknown, what cannot
    be computed is nan or None.
    """
    if not min(*ours, *peer) > 0:
        return math.nan, None
    interval = find_interval(np.log(ours), np.log(peer))
    return float(np.median(ours) / np.median(peer)) or math.nan, interval and tuple(map(math.exp, interval))
