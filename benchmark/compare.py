"""Two sets of results, cell by cell: did a change make the headline metric worse beyond noise?

    python benchmark/compare.py benchmark/results/cpu.json runs/benchmark/cpu

BASE and NEW are each the folder of a suite's runs (RUNS/SUITE) or a JSON file of benchmark/results. The interval of
the difference of the means is Welch's, at 95 %. The probability of improvement is that of a run of NEW being better
than one of BASE, ties half (Mann-Whitney's U over the number of pairs). A cell is worse where a one-sided Welch test
says so at 5 %, after Benjamini and Hochberg's correction for the number of cells. Exit code: 0 when none is worse, 1
when one is or fails in NEW, 2 when there is nothing to compare.
"""

import argparse
import sys
import warnings
from pathlib import Path

import numpy as np
import records
from scipy import stats

LEVEL = 0.05


def compare_cell(base: list[float], new: list[float], better: str) -> dict:
    """Difference of the means (NEW - BASE), its interval, probability of improvement, p value of being worse."""
    sign = 1.0 if better == "higher" else -1.0
    found = {"base": float(np.mean(base)), "new": float(np.mean(new)), "interval": None, "p": None}
    found["seeds"] = f"{len(base)}, {len(new)}"
    found["difference"] = found["new"] - found["base"]
    wins = stats.mannwhitneyu(sign * np.array(new), sign * np.array(base)).statistic
    found["improvement"] = float(wins) / (len(base) * len(new))
    if not np.isfinite(base).all():
        return found  # nothing to hold NEW against
    if not np.isfinite(new).all():
        return found | {"p": 0.0}
    if min(len(base), len(new)) < 2:
        return found  # nothing is known of the noise
    if np.isclose(base, base[0]).all() and np.isclose(new, new[0]).all():  # no noise: Welch's test would divide by zero
        is_worse = sign * found["difference"] < 0 and not np.isclose(found["base"], found["new"], rtol=1e-6, atol=0)
        return found | {"interval": (found["difference"],) * 2, "p": float(not is_worse)}
    with warnings.catch_warnings():  # scipy's, where one of the two is constant: its variance of zero is right
        warnings.filterwarnings("ignore", "Precision loss")
        test = stats.ttest_ind(new, base, equal_var=False)
        p = stats.ttest_ind(new, base, equal_var=False, alternative="less" if sign > 0 else "greater").pvalue
    return found | {"interval": tuple(map(float, test.confidence_interval(0.95))), "p": float(p)}


def compare(base: dict, new: dict) -> tuple[list[dict], list[str]]:
    """Rows of the cells that both have, and lines on those that fail in NEW or are missing in it."""
    rows, notes = [], []
    for name, cell in base["cells"].items():
        other = new["cells"].get(name)
        failed = [m for m in other["missing"] if m["error"] != records.NOT_RUN] if other else []
        if failed:
            notes.append(f"failed in NEW: {name}, seed {failed[0]['seed']}: {failed[0]['error']}")
        if other is None or not other["runs"] or not cell["runs"]:
            notes.append(f"missing in {'NEW' if cell['runs'] else 'BASE'}: {name}")
            continue
        if (cell["headline"], cell["better"]) != (other["headline"], other["better"]):
            notes.append(f"not comparable: {name}: {cell['headline']} and {other['headline']}")
            continue
        values = [records.get_values(c, "headline") for c in (cell, other)]
        rows.append({"name": name, "metric": cell["headline"]} | compare_cell(*values, cell["better"]))
    tested = [row for row in rows if row["p"] is not None]
    adjusted = stats.false_discovery_control([row["p"] for row in tested]) if tested else []
    for row, p in zip(tested, adjusted, strict=True):
        row["worse"] = bool(p < LEVEL)
    return rows, notes


def make_table(rows: list[dict]) -> str:
    """Markdown table, a line a cell."""
    lines = ["| cell | metric | seeds | base | new | difference | 95 % interval | probability of improvement | |"]
    lines.append("|--|--|--:|--:|--:|--:|--|--:|--|")
    for row in rows:
        interval = "{:+.4g} to {:+.4g}".format(*row["interval"]) if row["interval"] else "-"
        verdict = {True: "**worse**", False: "", None: "cannot be told from one seed"}[row.get("worse")]
        numbers = f"{row['base']:.4g} | {row['new']:.4g} | {row['difference']:+.4g} | {interval}"
        start = f"| {row['name']} | {row['metric']} | {row['seeds']}"
        lines.append(f"{start} | {numbers} | {row['improvement']:.0%} | {verdict} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("base", "new"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="folder of a suite's runs, or a JSON file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; returns the exit code."""
    args = make_parser().parse_args(argv)
    rows, notes = compare(records.load(args.base), records.load(args.new))
    if not rows and not any(note.startswith("failed") for note in notes):
        raise records.ResultsError(f"{args.base} and {args.new} have no results of the same cell")
    print(make_table(rows))
    print("\n".join(notes), end="\n" if notes else "")
    num_worse = sum(bool(row.get("worse")) for row in rows)
    num_failed = sum(note.startswith("failed") for note in notes)
    num_untold = sum("worse" not in row for row in rows)
    print(f"{len(rows)} compared: {num_worse} worse beyond noise, {num_untold} cannot be told", end="")
    print(f"; {num_failed} failed in NEW, {sum(note.startswith('missing') for note in notes)} missing")
    return 1 if num_worse or num_failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except records.ResultsError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)
