"""Compare two sets of results, cell by cell: did a change make learning worse beyond noise?

    python -m benchmark.compare benchmark/results/cpu.json runs/benchmark/cpu

BASE and NEW are each the folder of a suite's runs (RUNS/SUITE) or a JSON file of benchmark/results.
benchmark/README.md says what is compared, by which test, and how often a change is found. One seed on each
side cannot tell: such cells are shown, but not tested. Exit code: 0 when nothing is worse, 1 when something
is worse or has failed in NEW, 2 when there is nothing to compare or to test.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmark import common  # first: it says what to install

# isort: split
import numpy as np
from scipy import stats
from tyro.conf import Positional

from benchmark import records
from benchmark.intervals import find_p_worse
from benchmark.markdown import make_table, show
from benchmark.records import get_values
from benchmark.runs import NOT_RUN

LEVEL = 0.05  # false alarms of a whole comparison, at most
NEVER = 2.0  # a run that never gets to the threshold counts as this many times its steps
WORSE = "**worse**"
SLOWER = 1.25  # CPU-seconds per step may grow by this factor, as the machine alone may cause it


@dataclass
class Args:
    """Command line."""

    base: Positional[Path]  # folder of a suite's runs, or a JSON file
    new: Positional[Path]  # the same, after the change


def find_losses(cell):
    """Return quantities of each run, where higher is worse; of steps and speed, the logarithms."""
    sign = -1 if cell["better"] == "higher" else 1
    given = NEVER * np.array(get_values(cell, "env_steps"))
    return {
        "headline": sign * np.array(get_values(cell, "headline")),
        "steps_to_threshold": np.log(np.minimum(get_values(cell, "steps_to_threshold"), given)),
        "steps_per_second": -np.log(get_values(cell, "steps_per_second")),
    }


def compare_cells(cell: dict, other: dict):
    """Return [quantity, its median in BASE and in NEW, p value of being no worse] of a cell that both have.

    The p value is nan if no test is possible: with one seed on each side.
    """
    rows = []
    losses = find_losses(other)
    seeds, others = ({run["seed"] for run in side["runs"]} for side in (cell, other))
    for quantity, old in find_losses(cell).items():
        now = losses[quantity]
        if not np.isfinite(old).all():  # nothing to compare with, such as a cell without a threshold
            continue
        if quantity == "steps_per_second":
            old = old + np.log(SLOWER)
        p = 0.0
        if np.isfinite(now).all():
            is_possible = len(old) + len(now) > 2
            p = float(find_p_worse(old, now, seeds == others)) if is_possible else np.nan
        medians = [show(np.median(get_values(side, quantity))) for side in (cell, other)]
        rows.append([quantity, *medians, p])
    return rows


def compare(base, new):
    """Return a row for each quantity of each cell of ours that both have, and notes on what failed or is not
    compared.

    A row has name, quantity, its median in BASE and in NEW, and whether it is worse or not tested.
    """
    rows, notes = [], []
    for name, cell in base["cells"].items():
        other = new["cells"].get(name, {"runs": [], "missing": []})
        errors = [lost["error"] for lost in other["missing"] if lost["error"] != NOT_RUN]
        notes += [f"failed: {name}: {error}" for error in errors[:1]]
        if not records.is_ours(cell) or not cell["runs"]:
            continue
        if other["runs"] and records.get_criterion(cell) == records.get_criterion(other):
            found = compare_cells(cell, other)
            rows += [[name, *row] for row in found]
            if any(np.isnan(row[-1]) for row in found):
                notes.append(f"not tested: {name}: one seed on each side cannot tell")
        else:
            notes.append(f"not compared: {name}: NEW has no runs by this criterion")
    # By the method of Benjamini and Hochberg
    tested = [row for row in rows if not np.isnan(row[-1])]
    adjusted = stats.false_discovery_control([row[-1] for row in tested])
    for row in rows:
        row[-1] = "not tested"
    for row, p in zip(tested, adjusted, strict=True):
        row[-1] = WORSE if p <= LEVEL else ""
    return rows, notes


def main(args: Args):
    """Print the comparison; returns the exit code."""
    rows, notes = compare(records.load(args.base), records.load(args.new))
    num_failed = sum(note.startswith("failed") for note in notes)
    common.require(rows or num_failed, f"{args.base} and {args.new} have no results of the same cell")
    print(make_table("cell | quantity | BASE: | NEW: | ", rows), *notes, sep="\n")
    num_worse = len({name for name, *_, verdict in rows if verdict == WORSE})
    num_cells = len({name for name, *_, verdict in rows if verdict != "not tested"})
    print(f"{num_cells} cells compared: {num_worse} worse beyond noise, {num_failed} failed")
    common.require(num_cells or num_failed, "no cell could be tested: run more seeds")
    return 1 if num_worse or num_failed else 0


if __name__ == "__main__":
    common.run_main(main, Args, __doc__)
