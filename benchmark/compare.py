"""Compare two sets of results, cell by cell: did a change make learning worse beyond noise?

    python benchmark/compare.py benchmark/results/cpu.json runs/benchmark/cpu

BASE and NEW are each the folder of a suite's runs (RUNS/SUITE) or a JSON file of benchmark/results. benchmark/README.md
says what is compared, by which test, and how often a change is found. Exit code: 0 when nothing is worse, 1 when
something is worse or has failed in NEW, 2 when there is nothing to compare.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np
import records
import tyro
from scipy import stats
from tyro.conf import Positional

LEVEL = 0.05  # false alarms of a whole comparison, at most
NEVER = 2.0  # a run that never gets to the threshold counts as this many times its steps
SLOWER = 1.25  # CPU-seconds per step may grow by this factor, as the machine alone may cause it


@dataclass
class Args:
    """Command line."""

    base: Positional[Path]  # folder of a suite's runs, or a JSON file
    new: Positional[Path]  # the same, after the change


def find_p_worse(base, new, are_paired: bool) -> np.ndarray:
    """Return p values of "losses [..., seeds] are not larger in NEW", by Student's t.

    If both have the same seeds, it is twice the smaller p of the test of pairs and of the test of two samples.
    """
    base, new = np.asarray(base, float), np.asarray(new, float)
    tests = [stats.ttest_ind, stats.ttest_rel][: 1 + are_paired]
    with warnings.catch_warnings():  # about samples without noise
        warnings.simplefilter("ignore", RuntimeWarning)
        p = [test(new, base, axis=-1, alternative="greater").pvalue for test in tests]
    rounding = 1e-12 + 1e-6 * np.abs(base.mean(-1))
    is_larger = new.mean(-1) - base.mean(-1) > rounding
    return np.where(is_larger, np.minimum(1, len(p) * np.min(p, 0)), 1)


def find_worse(p: list[float]) -> np.ndarray:
    """Tell which p values of a whole comparison are significant, by Benjamini and Hochberg."""
    return stats.false_discovery_control(p) <= LEVEL


def find_losses(cell: dict) -> dict[str, np.ndarray]:
    """Return quantities of each run, where higher is worse; of steps and speed, the logarithms."""
    runs = sorted(cell["runs"], key=lambda run: run["seed"])
    sign = -1.0 if cell["better"] == "higher" else 1.0
    losses = {"headline": sign * np.array(records.get_values(cell, "headline"))}
    if all(run["curve"] for run in runs):
        given = NEVER * np.array([run["curve"][-1][0] for run in runs])
        losses["steps_to_threshold"] = np.log(
            np.minimum(records.get_values(cell, "steps_to_threshold"), given)
        )
    return losses | {"steps_per_second": -np.log(records.get_values(cell, "steps_per_second"))}


def find_p(quantity: str, old: np.ndarray, now: np.ndarray, are_paired: bool) -> float:
    """Return the p value of a quantity being no worse; 1 for a single seed, which cannot tell."""
    if not np.isfinite(now).all():
        return 0.0
    margin = np.log(SLOWER) if quantity == "steps_per_second" else 0.0
    return float(find_p_worse(old + margin, now, are_paired)) if min(len(old), len(now)) > 1 else 1.0


def compare_cells(cell: dict, other: dict) -> list[list]:
    """Return [quantity, its median in BASE and in NEW, p value of being no worse] of a cell that both have."""
    rows, losses = [], find_losses(other)
    seeds, others = ({run["seed"] for run in side["runs"]} for side in (cell, other))
    for quantity, old in find_losses(cell).items():
        is_same = quantity != "steps_to_threshold" or cell["threshold"] == other["threshold"]
        if quantity in losses and np.isfinite(old).all() and is_same:
            medians = [common.show(np.median(records.get_values(side, quantity))) for side in (cell, other)]
            rows.append([quantity, *medians, find_p(quantity, old, losses[quantity], seeds == others)])
    return rows


def compare(base: dict, new: dict) -> tuple[list[list], list[str], list[str]]:
    """Return a row for each quantity of each cell of ours that both have, what failed in NEW, and what is gone there.

    A row has name, quantity, its median in BASE and in NEW, and whether it is worse.
    """
    rows, failed, gone = [], [], []
    for name, cell in base["cells"].items():
        other = new["cells"].get(name, cell | {"runs": [], "missing": []})
        errors = [m["error"] for m in other["missing"] if m["error"] != records.NOT_RUN]
        failed += [f"failed: {name}: {error}" for error in errors[:1]]
        if records.is_ours(cell) and cell["runs"]:
            if other["runs"] and cell["headline"] == other["headline"]:
                rows += [[name, *row] for row in compare_cells(cell, other)]
            else:
                gone.append(f"not compared: {name}: NEW has no runs with this headline")
    for row, is_worse in zip(rows, find_worse([row[-1] for row in rows]), strict=True):
        row[-1] = "**worse**" * bool(is_worse)
    return rows, failed, gone


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; returns the exit code."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    rows, failed, gone = compare(records.load(args.base), records.load(args.new))
    common.require(rows or failed, f"{args.base} and {args.new} have no results of the same cell")
    print(common.make_table("cell | quantity | BASE: | NEW: | ", rows), *failed, *gone, sep="\n")
    worse = {name for name, *_, verdict in rows if verdict}
    num_cells = len({row[0] for row in rows})
    print(f"{num_cells} cells compared: {len(worse)} worse beyond noise, {len(failed)} failed")
    return 1 if worse or failed else 0


if __name__ == "__main__":
    common.run_main(main)
