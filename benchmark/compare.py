"""Two sets of results, cell by cell: did a change make learning worse beyond noise?

    python benchmark/compare.py benchmark/results/cpu.json runs/benchmark/cpu

BASE and NEW are each the folder of a suite's runs (RUNS/SUITE) or a JSON file of benchmark/results. benchmark/README.md
says what is compared, by which test, and what that finds. Exit code: 0 when nothing is worse, 1 when something is worse
or has failed in NEW, 2 when there is nothing to compare.
"""

import argparse
from pathlib import Path

import common
import numpy as np
import records
from common import ResultsError, show
from scipy import stats

LEVEL = 0.05  # false alarms of a whole comparison, at most
QUANTITIES = {
    "headline": "headline",
    "steps_to_threshold": "steps",
    "seconds_to_threshold": "seconds",
    "area": "curve",
}
NEVER = 2.0  # times what a run was given, where it never got to the threshold


def find_p_worse(base, new):
    """One-sided p of NEW having more losses [..., seeds] than BASE, by Student's t; 0 or 1 where there is no noise."""
    base, new = np.asarray(base, float), np.asarray(new, float)
    num_base, num_new = base.shape[-1], new.shape[-1]
    freedom = num_base + num_new - 2
    difference = new.mean(-1) - base.mean(-1)
    squares = base.var(-1) * num_base + new.var(-1) * num_new
    error = np.sqrt(squares / freedom * (1 / num_base + 1 / num_new))
    rounding = 1e-12 + 1e-6 * np.maximum(np.abs(base.mean(-1)), np.abs(new.mean(-1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        p = stats.t.sf(difference / error, freedom)
    return np.where(error > rounding, p, np.where(difference > rounding, 0.0, 1.0))


def find_worse(p_values: dict[str, list[float]]) -> dict[str, list[bool]]:
    """By family, which of its p values are significant: each family has an equal share of LEVEL."""
    share = LEVEL / len(p_values)
    return {
        name: list(stats.false_discovery_control(p) <= share) if len(p) else []
        for name, p in p_values.items()
    }


def find_losses(cell: dict, quantity: str) -> np.ndarray | None:
    """A quantity of each run, higher is worse; None where the cell has none of it."""
    sign = -1.0 if cell["better"] == "higher" else 1.0
    if quantity == "headline":
        return sign * np.array(records.get_values(cell, quantity))
    runs = sorted(cell["runs"], key=lambda run: run["seed"])
    if not all(run["curve"] for run in runs):
        return None
    if quantity == "area":
        return sign * np.array([find_area(run["curve"]) for run in runs])
    if cell["threshold"] is None:
        return None
    column = 0 if quantity.startswith("steps") else 1
    given = np.array([run["curve"][-1][column] for run in runs])
    values = np.array(records.get_values(cell, quantity))
    return np.log(np.where(np.isfinite(values), values, NEVER * given).clip(1e-9))


def find_area(curve: list[list[float]]) -> float:
    """Mean height of a learning curve over its steps."""
    steps, _, values = np.array(curve).T
    return float(np.trapezoid(values, steps) / np.ptp(steps)) if np.ptp(steps) else float(values[-1])


def is_peer_speed(cell: dict, quantity: str) -> bool:
    """Whether a quantity says how fast somebody else's program ran on the machine."""
    is_rate = quantity == "headline" and "per_cpu_second" in cell["headline"]
    is_other = not records.is_ours(cell) and not cell["script"].startswith("our_")
    return is_other and (is_rate or quantity == "seconds_to_threshold")


def compare_cell(name: str, base: dict, new: dict) -> list[dict]:
    """A row for each quantity that both cells have, with what it is on both sides, and p of being worse or None."""
    rows = []
    for quantity, title in QUANTITIES.items():
        if quantity.endswith("_to_threshold") and base["threshold"] != new["threshold"]:
            continue
        losses = [find_losses(cell, quantity) for cell in (base, new)]
        if any(values is None or not len(values) or not np.isfinite(losses[0]).all() for values in losses):
            continue  # nothing to hold NEW against
        row = {"name": name, "quantity": title, "p": None, "is_peer_speed": is_peer_speed(base, quantity)}
        if quantity.endswith("_to_threshold"):
            row["change"] = f"{show(float(np.exp(losses[1].mean() - losses[0].mean())))}x"
        else:
            sign = -1.0 if base["better"] == "higher" else 1.0
            row["change"] = f"{show(sign * losses[0].mean())} to {show(sign * losses[1].mean())}"
        if not np.isfinite(losses[1]).all():
            row["p"] = 0.0
        elif min(map(len, losses)) > 1:
            row["p"] = float(find_p_worse(*losses))
        rows.append(row)
    return rows


def name_headline(cell: dict) -> tuple[str, str]:
    """The metric that a cell is judged by, which older results of peers name without `eval/`, and what is better."""
    return cell["headline"].removeprefix("eval/"), cell["better"]


def compare(base: dict, new: dict) -> tuple[list[dict], dict[str, list[str]]]:
    """Rows of all cells that both have, with their verdicts, and lines on the others, by kind."""
    rows, notes = (
        [],
        {"failed": [], "missing": [], "unfinished": [], "not comparable": [], "speed of a peer": []},
    )
    for name, cell in base["cells"].items():
        other = new["cells"].get(name)
        absent = other["missing"] if other else []
        failed = [m for m in absent if m["error"] != records.NOT_RUN]
        if failed:
            notes["failed"].append(f"{name}, seed {failed[0]['seed']}: {failed[0]['error']}")
        if other is None or not other["runs"] or not cell["runs"]:
            notes["missing"].append(f"{name}, in {'NEW' if cell['runs'] else 'BASE'}")
        elif name_headline(cell) != name_headline(other):
            notes["not comparable"].append(f"{name}: {cell['headline']} and {other['headline']}")
        else:
            if cell["threshold"] != other["threshold"]:
                notes["not comparable"].append(
                    f"{name}: thresholds {cell['threshold']} and {other['threshold']}"
                )
            rows += compare_cell(name, cell, other)
            if len(absent) > len(failed):
                notes["unfinished"].append(f"{name}: {len(absent) - len(failed)} seeds are missing in NEW")
    families = {"headline": [], "learning": []}
    for row in rows:
        if row["p"] is not None and not row["is_peer_speed"]:
            families["headline" if row["quantity"] == "headline" else "learning"].append(row)
        elif row["p"] is not None and row["p"] < LEVEL / 2:
            notes["speed of a peer"].append(
                f"{row['name']}: {row['quantity']} {row['change']}: a busier machine?"
            )
    verdicts = find_worse({name: [row["p"] for row in family] for name, family in families.items()})
    for name, family in families.items():
        for row, is_worse in zip(family, verdicts[name], strict=True):
            row["worse"] = bool(is_worse)
    return rows, notes


def make_table(rows: list[dict]) -> str:
    """Markdown table, a line a cell: what each quantity was and is, and what of it is worse."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        found = {row["quantity"]: row for row in rows if row["name"] == name}
        worse = [title for title, row in found.items() if row.get("worse")]
        is_untold = all("worse" not in row and not row["is_peer_speed"] for row in found.values())
        verdict = f"**worse: {', '.join(worse)}**" if worse else "cannot be told from one seed" * is_untold
        changes = [found[title]["change"] if title in found else "" for title in QUANTITIES.values()]
        lines.append([name, *changes, verdict])
    return common.make_table(f"cell | {': | '.join(QUANTITIES.values())}: | ", lines)


def make_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("base", "new"):
        parser.add_argument(
            name, type=Path, metavar=name.upper(), help="folder of a suite's runs, or a JSON file"
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; returns the exit code."""
    args = make_parser().parse_args(argv)
    base = records.load(args.base)
    rows, notes = compare(base, records.load(args.new))
    if not rows and not notes["failed"]:
        raise ResultsError(f"{args.base} and {args.new} have no results of the same cell")
    print(make_table(rows))
    for kind, lines in notes.items():
        print("".join(f"{kind}: {line}\n" for line in lines), end="")
    worse = {row["name"] for row in rows if row.get("worse")}
    num_compared = len({row["name"] for row in rows})
    print(f"{num_compared} of {len(base['cells'])} cells compared: {len(worse)} worse beyond noise", end="")
    print(f", {len(notes['failed'])} failed in NEW, {len(notes['missing'])} missing")
    return 1 if worse or notes["failed"] else 0


if __name__ == "__main__":
    common.run_main(main)
