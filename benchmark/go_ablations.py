"""Choices in algos/alphazero_go.py, matched against the default with the same seed, on 5x5.

python benchmark/run.py benchmark/suites/ablations.toml    # trains the networks
python benchmark/go_ablations.py                           # plays the matches, minutes
python benchmark/go_ablations.py --report-only             # table in the docs from benchmark/results/go_ablations.json
"""

import argparse
import statistics
import sys
from pathlib import Path

import common
import records
from tqdm import tqdm

sys.path.append(str(common.ROOT))
TASK, NUM_GAMES = "Go-5x5", 200


def find_checkpoints(folder: Path) -> dict[str, dict[int, Path]]:
    """Checkpoints of the suite in `folder` by setting and seed, the default first; ResultsError where one lacks."""
    found = {}
    for cell in records.read_suite_file(folder)["cells"]:
        if cell["task"] == TASK:
            path = records.find_result(folder / cell["folder"])
            if path is None or not (path.parent / "checkpoint.pt").exists():
                raise records.ResultsError(f"{folder / cell['folder']}: no finished run with its checkpoint")
            found.setdefault(cell["setting"], {})[cell["seed"]] = path.parent / "checkpoint.pt"
    if next(iter(found), None) != "default":
        raise records.ResultsError(f"{folder}: the first cell of {TASK} is not the default")
    return found


def play(checkpoint: Path, default: Path, seed: int) -> dict:
    """The network of `checkpoint` against the default's, in equal search."""
    import go_search

    from envs_shared.go_tasks.match import play_match
    from envs_shared.go_tasks.rules import Go

    players = []
    for path in (checkpoint, default):
        az, args, network = go_search.load_network(path)
        go, plain = Go(az.get_size(args)), az.Args(simulations_end=args.simulations_end, komi=args.komi)
        players.append(az.make_player(go, az.make_evaluators(network, go, NUM_GAMES, plain), plain))
    result = play_match(go, players, NUM_GAMES, args.komi, seed)
    return {"win_rate": round(result["win_rate"], 4), "margin": round(result["margin"], 2)} | {
        "distinct_games": result["distinct_games"]
    }


def measure(folder: Path) -> dict:
    """All settings against the default, seed by seed."""
    machine, found = common.describe_machine(), find_checkpoints(folder)
    pairs = [(setting, seed) for setting in found if setting != "default" for seed in found[setting]]
    rows = [
        {"setting": setting, "seed": seed} | play(found[setting][seed], found["default"][seed], seed)
        for setting, seed in tqdm(pairs, unit="match")
    ]
    return {"machine": machine, "rows": rows}


def make_table(results: dict) -> str:
    """Markdown table: each setting against the default, mean over seeds and each of them."""
    lines = ["| setting | wins against the default | margin | seeds |", "|--|--|--:|--:|"]
    for setting in dict.fromkeys(row["setting"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["setting"] == setting]
        rates = ", ".join(f"{row['win_rate']:.0%}" for row in rows)
        mean = {key: statistics.mean(row[key] for row in rows) for key in ("win_rate", "margin")}
        lines.append(f"| {setting} | **{mean['win_rate']:.0%}** ({rates}) | {mean['margin']:+.1f} | {len(rows)} |")
    return "\n".join(lines)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    text = f"\n{NUM_GAMES} games a match, from random openings with colours exchanged.\n\n{make_table(results)}\n\n"
    return {"go_ablations": f"{text}Measured on {common.machine_line(results['machine'])}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="what run.py has written")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        common.save_results("go_ablations", measure(args.runs / "ablations"))
    results = common.load_results("go_ablations")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    try:
        main()
    except records.ResultsError as error:
        print(f"go_ablations.py: {error}", file=sys.stderr)
        sys.exit(2)
