"""Choices in algos/alphazero_go.py, matched against the default with the same seed, on 5x5.

python benchmark/run.py benchmark/suites/ablations.toml    # trains the networks
python benchmark/studies/go_ablations.py                   # plays the matches, minutes
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (0, 1, 2)]
import common
import records

sys.path.append(str(common.PEERS))
from go_engine import load_network
from tqdm import tqdm

TASK, NUM_GAMES = "Go-5x5", 200


def find_checkpoints(folder: Path) -> dict[str, dict[int, Path]]:
    """Checkpoints of the suite in `folder` by setting and seed, the default first; ResultsError where one lacks."""
    found = {}
    for cell in records.read_suite_file(folder)["cells"]:
        if cell["task"] == TASK:
            path = records.find_result(folder / cell["folder"])
            if path is None or not (path.parent / "checkpoint.pt").exists():
                raise common.ResultsError(f"{folder / cell['folder']}: no finished run with its checkpoint")
            found.setdefault(cell["setting"], {})[cell["seed"]] = path.parent / "checkpoint.pt"
    if next(iter(found), None) != "default":
        raise common.ResultsError(f"{folder}: the first cell of {TASK} is not the default")
    return found


def play(checkpoint: Path, default: Path, seed: int) -> dict:
    """The network of `checkpoint` against the default's, in equal search."""
    from envs_shared.go_tasks.match import play_match

    players = []
    for path in (checkpoint, default):
        az, args, network = load_network(path)
        go, plain = az.Go(az.get_size(args)), az.Args(simulations_end=args.simulations_end, komi=args.komi)
        players.append(az.make_player(go, az.make_evaluators(network, go, NUM_GAMES, plain), plain))
    result = play_match(go, players, NUM_GAMES, args.komi, seed)
    return {key: round(result[key], 4) for key in ("win_rate", "margin", "distinct_games")}


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """What the pages show of the results: each setting against the default, mean over seeds and each of them."""
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["setting"] == setting]
        rates = ", ".join(f"{row['win_rate']:.0%}" for row in rows)
        mean = {key: statistics.mean(row[key] for row in rows) for key in ("win_rate", "margin")}
        lines.append([setting, f"**{mean['win_rate']:.0%}** ({rates})", f"{mean['margin']:+.1f}", len(rows)])
    table = common.make_table("setting | wins against the default | margin: | seeds:", lines)
    machine = common.machine_line([row["machine"] for row in results["rows"]])
    text = f"\n{NUM_GAMES} games a match, from random openings with colours exchanged.\n\n{table}\n\n{machine}\n"
    return {("alphazero_go", "go_ablations"): text}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="what run.py has written")
    return parser


def main() -> None:
    """All settings against the default, seed by seed."""
    found = find_checkpoints(make_parser().parse_args().runs / "ablations")
    pairs = [(setting, seed) for setting in found if setting != "default" for seed in found[setting]]
    for setting, seed in tqdm(pairs, unit="match"):
        row = {"setting": setting, "seed": seed} | play(found[setting][seed], found["default"][seed], seed)
        common.save_rows("go_ablations", [row], ("setting", "seed"))


if __name__ == "__main__":
    try:
        main()
    except common.ResultsError as error:
        common.exit_with("go_ablations.py", error)
