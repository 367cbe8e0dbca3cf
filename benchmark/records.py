"""Results of suites: read from run folders or from one JSON file, and what is computed over their seeds."""

import contextlib
import json
import re
import warnings
from dataclasses import asdict
from pathlib import Path

import common
import numpy as np
from common import ResultsError
from scipy import stats
from suite import Cell, read_suite

NUM_POINTS = 60  # of a learning curve, in the JSON file
RESAMPLES = 9999
RESULT_KEYS = "seed headline metrics env_steps wall_seconds cpu_seconds device torch".split()
SHOWN_KEYS = {"ratios": [], "tables": [], "summary": ""}  # of a suite: what the pages say of its results
NOT_RUN = "not run yet"
OF_A_RUN = (
    "exp_name seed run_dir resume track wandb_project_name wandb_entity".split()
)  # options that change no result
CURVES = {  # in words; the first one that was logged is the learning curve
    "eval/episodic_return": "return of the greedy policy",
    "eval/greedy_gap": "gap of greedy tours, %",
    "charts/episodic_return": "return of training episodes",
    "eval/f1": "F1 of changed pixels, on val",
    "eval/win_rate_best": "games won against the best network before",
    "eval/greedy_length": "length of greedy tours",
}


def read_process(path: Path) -> dict:
    """What run.py has seen of the process of the run in the folder `path`; nothing if it was not run.py's."""
    try:
        return json.loads((path.parent / "process.json").read_text())
    except (OSError, ValueError):  # also if the harness was killed right after the run
        return {}


def read_result(path: Path, headline: str | None = None) -> dict:
    """Read what the run in the folder `path` has found: of tags of evaluations, the last values.

    Raises ResultsError if it has not logged its `headline`.
    """
    tags = common.read_events(path).Tags()["scalars"]
    headline = headline or next((tag for tag in tags if tag.startswith("eval/")), "charts/episodic_return")
    common.read_points(path, headline, "headline")
    shown = {headline, *(tag for tag in tags if tag.startswith(("eval/", "best/")))}
    step, cpu_seconds, wall_seconds, _ = common.read_points(path, "charts/cpu_seconds")[-1]
    args = dict(re.findall(r"^\|(\w+)\|(.*)\|$", common.read_text(path, "hyperparameters"), re.M))
    process = read_process(path)
    return {
        "seed": int(args.get("seed", 0)),
        "headline": headline,
        "metrics": {tag: common.read_points(path, tag)[-1][-1] for tag in sorted(shown)},
        "env_steps": step,
        "wall_seconds": wall_seconds,
        "cpu_seconds": process.get("cpu_seconds", cpu_seconds),
        "device": "cpu",
        "torch": process.get("machine", {}).get("torch"),
        "commit": common.read_text(path, "program"),
        "args": args,
        "env_id": args.get("env_id"),
        "script": path.name.split("__")[-3:][0],
    }


def find_run(folder: Path, cell: dict) -> dict | None:
    """What is kept of the first attempt at a cell that is done; None if there is none."""
    for path in common.find_run_folders(folder, "try_*/*"):
        with contextlib.suppress(ResultsError):
            return read_run(cell, path)
    return None


def read_run(cell: dict, path: Path) -> dict:
    """What is kept of the run in the folder `path`; ResultsError if it has not ended, or lacks what the cell needs."""
    process = read_process(path)
    if process.get("exit_code") != 0:
        raise ResultsError(f"{path} has not ended")
    if cell.get("score_best") and not process.get("best"):
        raise ResultsError(f"no score of best.pt of {path}")
    return make_run(cell, path, read_result(path, cell.get("headline")), process)


def make_run(cell: dict, path: Path, result: dict, process: dict) -> dict:
    """What is kept of a run, by its result, its events and what run.py has seen of its process."""
    run = {key: result[key] for key in RESULT_KEYS} | {"value": result["metrics"][result["headline"]]}
    run["metrics"] = run["metrics"] | process.get("best", {})
    if cell.get("gpus"):
        run["device"] = "gpu"
    run["machine"] = process.get("machine")
    # peers say their version themselves
    run["commit"] = result.get("commit") or (run["machine"] or {}).get("commit", "unknown")
    clock = 1 if run["device"] == "cpu" else 2  # CPU-seconds, which others on the machine disturb less
    last = common.read_points(path, "charts/cpu_seconds")[-1]
    run["steps_per_second"] = last[0] / last[clock] if last[clock] else None
    with contextlib.suppress(ResultsError):
        returns = common.read_points(path, "charts/episodic_return")
        if late := [point[-1] for point in returns if point[0] > 0.9 * last[0]]:
            run["final_return"] = float(np.mean(late))
    curve = common.read_points(path, cell["curve"]) if cell["curve"] else []
    if cell["threshold"] is not None:
        point = common.find_threshold(curve, cell["threshold"], cell["better"], cell.get("in_a_row", 1))
        run |= {"steps_to_threshold": point and point[0], "seconds_to_threshold": point and point[clock]}
    chosen = sorted({round(i) for i in np.linspace(0, len(curve) - 1, NUM_POINTS)}) if curve else []
    points = [[curve[i][0], *(float(f"{x:.5g}") for x in (curve[i][clock], curve[i][3]))] for i in chosen]
    return run | {"curve": points}


def read_json(path: Path) -> dict:
    """A file that run.py or report.py has made of a suite; ResultsError for anything else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ResultsError(f"{path}: no JSON file that can be read") from None
    if not isinstance(content, dict) or not {"suite", "cells"} <= content.keys():
        raise ResultsError(f"{path}: not the results of a suite")
    return SHOWN_KEYS | content


def collect(suite_folder: Path) -> dict:
    """Results of the suite whose runs are in `suite_folder`, which benchmark/run.py has made."""
    suite, cells = read_json(suite_folder / "suite.json"), {}
    errors = {(e["name"], e["seed"]): e["error"] for e in suite["errors"]}
    for cell in suite["cells"]:
        name, folder, seed = (cell.pop(key) for key in ("name", "folder", "seed"))
        entry = cells.setdefault(name, {"headline": None} | cell | {"runs": [], "missing": []})
        if run := find_run(suite_folder / folder, cell):
            entry["headline"] = run.pop("headline")
            entry["runs"].append(run)
        else:
            entry["missing"].append({"seed": seed, "error": errors.get((name, seed), NOT_RUN)})
    return {"suite": suite["suite"], "cells": cells} | {key: suite[key] for key in SHOWN_KEYS}


def collect_folders(folder: Path) -> dict:
    """Runs that have ended, in the folders that the scripts leave below `folder`, as a suite `runs`."""
    results, cells = {}, {}
    for path in common.find_run_folders(folder, ".") + common.find_run_folders(folder):
        with contextlib.suppress(ResultsError):
            if common.read_text(path, "hyperparameters"):
                result = read_result(path)
                # CleanRL leaves out a last rollout that is not whole
                if result["env_steps"] >= 0.95 * int(result.get("args", {}).get("total_timesteps", 0)):
                    results[path] = result
    for path, result in results.items():
        script, task, name = describe_run(result)
        alike = [other for other in results.values() if describe_run(other) == (script, task, name)]
        setting = " ".join([name, *list_differences(result, alike)])
        tags = common.read_events(path).Tags()["scalars"]
        cell = {"task": task, "setting": setting, "script": script, "command": "", "threshold": None}
        cell["curve"] = next((tag for tag in CURVES if tag in tags), None)
        entry = cells.setdefault(
            f"{script}/{task}/{setting}", cell | {"better": "higher", "runs": [], "missing": []}
        )
        run = make_run(cell, path, result, {})
        entry["headline"] = run.pop("headline")
        entry["runs"].append(run)
    return {"suite": "runs", "cells": cells} | SHOWN_KEYS


def describe_run(result: dict) -> tuple[str, str, str]:
    """Script, task and the name of the run."""
    return result["script"], result["env_id"], result.get("args", {}).get("exp_name", result["script"])


def list_differences(result: dict, others: list[dict]) -> list[str]:
    """The options of a run in which not all `others` are as it is, seeds and folders aside."""
    args = {name: value for name, value in result.get("args", {}).items() if name not in OF_A_RUN}
    theirs = [other.get("args", {}) for other in others]
    return [
        f"{name}={value}" for name, value in args.items() if any(x.get(name, value) != value for x in theirs)
    ]


def load(path: Path) -> dict:
    """Results of a suite from its run folder or its JSON file."""
    if path.is_dir():
        return collect(path)
    results = read_json(path)
    if not isinstance(results["cells"], dict):
        raise ResultsError(f"{path}: not the results of a suite; give the folder it is in")
    return results


def load_published() -> dict[str, dict]:
    """Results of suites in benchmark/results, by name: of the cells and as the suites of today have them."""
    found = {}
    for path in sorted(common.SUITES.glob("*.toml")):
        if results := common.load_results(path.stem):
            cells, shown = read_suite(path, check=lambda cell, where: None)
            found[path.stem] = results | shown | {"cells": list_cells_of_today(results["cells"], cells)}
    return found


def list_cells_of_today(old: dict[str, dict], cells: list[Cell]) -> dict[str, dict]:
    """The results of `cells` among those of before, or that the command was not run yet."""
    found = {}
    for cell in cells:
        if cell.name in old and old[cell.name]["command"].split() == cell.command.split():
            found[cell.name] = old[cell.name]
        else:
            empty = asdict(cell) | {"script": cell.script, "runs": [], "missing": []}
            found.setdefault(cell.name, empty)["missing"].append({"seed": cell.seed, "error": NOT_RUN})
    return found


def is_ours(cell: dict) -> bool:
    """Whether the cell runs one of our scripts, and not a peer."""
    return "benchmark/peers/" not in cell["command"]


def list_dirty(results: dict) -> list[str]:
    """Runs of a tree that was not that of a commit."""
    return [
        f"{name}, seed {run['seed']}"
        for name, cell in results["cells"].items()
        for run in cell["runs"]
        if str((run["machine"] or {}).get("commit")).endswith("-dirty")
    ]


# ---- Over seeds ------------------------------------------------------------------------------------------------------


def get_values(cell: dict, quantity: str) -> list[float]:
    """A quantity of each run of a cell, by seed: infinite where a threshold was not reached, nan if it has none.

    The names of metrics count with and without `eval/`, which older results of peers lack.
    """
    values = []
    for run in sorted(cell["runs"], key=lambda run: run["seed"]):
        known = run | run["metrics"] | {"headline": run["value"]}
        known = {name.removeprefix("eval/"): value for name, value in known.items()}
        value = known.get(quantity.removeprefix("eval/"), float("nan"))
        values.append(float("inf") if value is None else float(value))
    return values


def find_interval(
    samples: tuple[list[float], ...], statistic, paired: bool = False
) -> tuple[float, float] | None:
    """95 % bootstrap interval of a statistic of one or more samples; None for samples of one value or infinite ones."""
    if any(len(sample) < 2 or not np.isfinite(sample).all() for sample in samples):
        return None
    options = {"n_resamples": RESAMPLES, "method": "percentile", "vectorized": True, "paired": paired}
    found = stats.bootstrap(samples, statistic, rng=np.random.default_rng(0), **options)
    return tuple(map(float, found.confidence_interval))


def compare_means(base: list[float], new: list[float], better: str) -> dict:
    """NEW - BASE of the means with Welch's 95 % interval, and the probability that a run of NEW is the better one."""
    sign = 1.0 if better == "higher" else -1.0
    wins = stats.mannwhitneyu(sign * np.array(new), sign * np.array(base)).statistic  # ties half
    found = {"difference": float(np.mean(new)) - float(np.mean(base)), "interval": None}
    found["improvement"] = float(wins) / (len(base) * len(new))
    if min(len(base), len(new)) < 2 or not np.isfinite([*base, *new]).all():
        return found
    if (
        np.isclose(base, base[0]).all() and np.isclose(new, new[0]).all()
    ):  # no noise: Welch's would divide by zero
        return found | {"interval": (found["difference"],) * 2}
    with (
        warnings.catch_warnings()
    ):  # scipy's, where one of the two is constant: its variance of zero is right
        warnings.filterwarnings("ignore", "Precision loss")
        test = stats.ttest_ind(new, base, equal_var=False)
    return found | {"interval": tuple(map(float, test.confidence_interval(0.95)))}


def find_ratio(ours: list[float], peer: list[float], paired: bool = False):
    """Ratio of the medians and its interval (`paired`: of values of the same runs); None where it means nothing.

    That is where values are not positive, or a median is infinite or not known.
    """
    if (
        not ours
        or not peer
        or not min(*ours, *peer) > 0
        or not np.isfinite(np.median(peer) + np.median(ours))
    ):
        return None

    def ratio(a, b, axis=-1):
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    return float(ratio(ours, peer)), find_interval((ours, peer), ratio, paired)
