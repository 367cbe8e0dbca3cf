"""Results of suites: read from run folders or from one JSON file, and what is computed over their seeds."""

import json
from pathlib import Path

import common
import numpy as np
from scipy import stats

NUM_POINTS = 60  # of a learning curve, in the JSON file
RESAMPLES = 9999
NOT_RUN = "not run yet"


class ResultsError(ValueError):
    """What is wrong with files of results, in one line."""


def read_curve(run_path: Path, tag: str) -> list[list[float]]:
    """[[step, CPU-seconds, seconds, value], ...] of a logged tag; empty where it was not logged."""
    events = common.read_events(run_path)
    if not {tag, "charts/cpu_seconds"} <= set(events.Tags()["scalars"]):
        return []
    clock, start = events.Scalars("charts/cpu_seconds"), events.FirstEventTimestamp()
    points = events.Scalars(tag)
    seconds = np.interp([p.step for p in points], [c.step for c in clock], [c.value for c in clock])
    return [[p.step, float(s), p.wall_time - start, p.value] for p, s in zip(points, seconds, strict=True)]


def find_threshold(curve: list[list[float]], cell: dict) -> list[float] | None:
    """The first point of the curve at the cell's threshold or beyond."""
    sign = 1 if cell["better"] == "higher" else -1
    return next((p for p in curve if sign * p[3] >= sign * cell["threshold"]), None)


def read_run(cell: dict, result_path: Path) -> dict:
    """What is kept of one run folder."""
    result = json.loads(result_path.read_text())
    keys = "seed metrics env_steps wall_seconds cpu_seconds device torch commit".split()
    run = {key: result[key] for key in keys} | {"headline": result["metrics"][result["headline"]]}
    process = result_path.parents[1] / "process.json"  # missing where the harness was killed right after the run
    run |= json.loads(process.read_text()) if process.exists() else {"peak_memory_mb": None, "machine": None}
    run.pop("error", None)
    curve = read_curve(result_path.parent, cell["curve"]) if cell["curve"] else []
    clock = 1 if run["device"] == "cpu" else 2  # CPU-seconds, which others on the machine disturb less
    last = curve[-1] if curve else [run["env_steps"], run["cpu_seconds"], run["wall_seconds"]]
    run["steps_per_second"] = last[0] / last[clock]
    if cell["threshold"] is not None:
        point = find_threshold(curve, cell)
        run |= {"steps_to_threshold": point and point[0], "seconds_to_threshold": point and point[clock]}
    chosen = sorted({round(i) for i in np.linspace(0, len(curve) - 1, NUM_POINTS)}) if curve else []
    run["curve"] = [[curve[i][0], *(float(f"{x:.5g}") for x in (curve[i][clock], curve[i][3]))] for i in chosen]
    return run


def collect(suite_folder: Path) -> dict:
    """Results of the suite whose runs are in `suite_folder`, which benchmark/run.py has made."""
    try:
        suite = json.loads((suite_folder / "suite.json").read_text())
    except OSError:
        raise ResultsError(f"{suite_folder}: no suite.json: not a folder that benchmark/run.py has made") from None
    cells = {}
    for cell in suite["cells"]:
        name, folder, seed = f"{cell['script']}/{cell['task']}/{cell['setting']}", cell.pop("folder"), cell.pop("seed")
        entry = cells.setdefault(name, cell | {"headline": None, "runs": [], "missing": []})
        if path := min((suite_folder / folder).glob("try_*/*/result.json"), default=None):
            entry["runs"].append(read_run(cell, path))
            entry["headline"] = json.loads(path.read_text())["headline"]
        else:
            errors = [e["error"] for e in suite["errors"] if (e["name"], e["seed"]) == (name, seed)]
            entry["missing"].append({"seed": seed, "error": errors[0] if errors else NOT_RUN})
    return {"suite": suite["suite"], "cells": cells, "ratios": suite["ratios"]}


def load(path: Path) -> dict:
    """Results of a suite from its run folder or its JSON file; ResultsError for anything else."""
    if path.is_dir():
        return collect(path)
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ResultsError(f"{path}: neither a suite's folder nor a readable JSON file") from None
    if not isinstance(results, dict) or "suite" not in results:
        raise ResultsError(f"{path}: not the results of a suite")
    return results


def get_values(cell: dict, quantity: str) -> list[float]:
    """A quantity of each run of a cell, by seed; infinite where a threshold was not reached."""
    values = []
    for run in sorted(cell["runs"], key=lambda run: run["seed"]):
        if quantity not in run and quantity not in run["metrics"]:
            raise ResultsError(f"{quantity} is neither a metric nor a quantity of {cell['script']}/{cell['task']}")
        value = run[quantity] if quantity in run else run["metrics"][quantity]
        values.append(float("inf") if value is None else float(value))
    return values


def find_iqm(values, axis: int = -1):
    """Interquartile mean: of the middle half (Agarwal et al. 2021, arXiv:2108.13264)."""
    return stats.trim_mean(values, 0.25, axis=axis)


def find_interval(samples: tuple[list[float], ...], statistic) -> tuple[float, float] | None:
    """95 % bootstrap interval of a statistic of one or more samples; None for samples of one value or infinite ones."""
    if any(len(sample) < 2 or not np.isfinite(sample).all() for sample in samples):
        return None
    rng = np.random.default_rng(0)
    found = stats.bootstrap(samples, statistic, n_resamples=RESAMPLES, method="percentile", rng=rng, vectorized=True)
    return tuple(map(float, found.confidence_interval))


def find_ratio(ours: list[float], peer: list[float]) -> tuple[float, tuple[float, float] | None] | None:
    """Ratio of the medians and its interval; None where it means nothing (values not positive, or infinite)."""
    if not ours or not peer or min(*ours, *peer) <= 0 or not np.isfinite(np.median(peer) + np.median(ours)):
        return None

    def ratio(a, b, axis=-1):
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    return float(ratio(ours, peer)), find_interval((ours, peer), ratio)
