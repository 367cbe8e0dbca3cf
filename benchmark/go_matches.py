"""Checkpoints of algos/alphazero_go.py against GNU Go 3.8, over GTP.

apt install gnugo
python benchmark/go_matches.py --name "5x5" --checkpoint runs/.../checkpoint.pt --komi 0 --colours black --level 10
python benchmark/go_matches.py --name "7x7" --checkpoint runs/.../checkpoint.pt --komi 8.5 --level 1 --games 50
python benchmark/go_matches.py --report-only      # table in the docs from benchmark/results/go_matches.json

Both sides count by area under the same rules and play to the end. GNU Go gets another random seed in every game, which
hardly changes what it plays: each game, or each two with both colours, begins with another two random moves, and games
of the same moves count once.
"""

import argparse
import random
import shutil
import sys

import common
from tqdm import tqdm

sys.path.append(str(common.ROOT))
from envs_shared.go_tasks import files as go_files
from envs_shared.go_tasks import gtp_client
from envs_shared.go_tasks import match as go_match

GNUGO = "--mode gtp --chinese-rules --positional-superko --capture-all-dead --never-resign"


def find_gnugo() -> str | None:
    """Path of GNU Go, where it is installed."""
    return shutil.which("gnugo") or shutil.which("/usr/games/gnugo")


def make_engine_command(checkpoint: str, flags: str, python: str = sys.executable) -> str:
    """Command line of alphazero_go.py as a GTP engine."""
    return f"{python} {common.ROOT / 'algos' / 'alphazero_go.py'} --gtp {checkpoint} {flags}"


def make_gnugo(level: int, seed: int) -> gtp_client.Client:
    """GNU Go, started."""
    return gtp_client.Client(f"{find_gnugo()} {GNUGO} --level {level} --seed {seed}")


def play(mine, make_other, size: int, komi: float, num_games: int, colours: str, seed: int = 0) -> list[dict]:
    """Games of `mine` with their colour, moves and margin from our side.

    `make_other(i)` is the opponent in game i, which leaves when the game is over.
    """
    rows, generator, openings = [], random.Random(seed), []
    per_opening = 2 if colours == "both" else 1
    for i in tqdm(range(num_games), unit="game"):
        is_black = colours == "black" or (colours == "both" and i % 2 == 0)
        if i % per_opening == 0:
            opening = tuple(generator.sample(range(size * size), 2))
            while opening in openings and len(openings) < size**2 * (size**2 - 1):
                opening = tuple(generator.sample(range(size * size), 2))
            openings.append(opening)
        with make_other(i) as other:
            players = (mine, other) if is_black else (other, mine)
            moves, margin = gtp_client.play_game(*players, size, komi, opening)
        rows.append({"is_black": is_black, "margin": margin if is_black else -margin, "moves": moves})
    return rows


def summarize(row: dict) -> dict[str, float]:
    """MATCH_SCORES over distinct games, and how many of these were won by the whole board."""
    distinct = {(tuple(game["moves"]), game["is_black"]): game for game in row["games"]}.values()
    is_black = [game["is_black"] for game in distinct]
    black_margins = [game["margin"] if game["is_black"] else -game["margin"] for game in distinct]
    scores = go_match.score_match([game["moves"] for game in distinct], black_margins, is_black)
    points = [game["margin"] + (row["komi"] if game["is_black"] else -row["komi"]) for game in distinct]
    return scores | {"whole": points.count(row["size"] ** 2), "games": len(row["games"])}


def make_table(results: dict) -> str:
    """Markdown table, a line for each match."""
    lines = [
        "| network | level | colour | komi | games | distinct | wins | as black | as white | margin | whole board |",
        "|--|--:|--|--:|--:|--:|--|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        s = summarize(row)
        name = f"{row['name']} (`{row['flags'].strip()}`)" if row["flags"] else row["name"]
        wins = f"**{s['win_rate']:.0%}** ({s['win_rate_low']:.0%} to {s['win_rate_high']:.0%})"
        black, white = (f"{s[key]:.0%}" if key in s else "" for key in ("win_rate_black", "win_rate_white"))
        lines.append(
            f"| {name} | {row['level']} | {row['colours']} | {row['komi']:g} | {s['games']} | {s['distinct_games']} | "
            f"{wins} | {black} | {white} | {s['margin']:+.1f} | {s['whole']} |"
        )
    return "\n".join(lines)


def show_game(row: dict) -> str:
    """The first game in words."""
    moves = [go_files.format_vertex(m, row["size"]) for m in row["games"][0]["moves"]]
    return f"{row['name']}, level {row['level']}: {' '.join(moves)}"


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    commits = sorted({row["commit"] for row in results["rows"]})
    machine = common.machine_line(results["machine"] | {"commit": " and ".join(commits)})
    return {"go_matches": f"\n{make_table(results)}\n\nMeasured on {machine}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--name", help="what the table calls it; the board's size first, such as 7x7")
    parser.add_argument("--komi", type=float, default=0.5)
    parser.add_argument("--level", type=int, default=1, help="of GNU Go, 1 to 10")
    parser.add_argument("--games", type=int, default=20)
    parser.add_argument("--colours", choices=("both", "black", "white"), default="both", help="that our side plays")
    parser.add_argument("--flags", default="", help="more flags of the engine, such as '--simulations-end 400'")
    parser.add_argument("--dry-run", action="store_true", help="play and print, but save nothing")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    path = common.RESULTS / "go_matches.json"
    results = common.load_results("go_matches") if path.exists() else {"rows": []}
    if not args.report_only:
        size = int(args.name.split("x")[0])
        if find_gnugo() is None:
            sys.exit("GNU Go is not installed: apt install gnugo")
        with gtp_client.Client(make_engine_command(args.checkpoint, args.flags)) as mine:
            games = play(mine, lambda i: make_gnugo(args.level, i + 1), size, args.komi, args.games, args.colours)
        machine = common.describe_machine()
        row = {"name": args.name, "size": size, "komi": args.komi, "level": args.level, "colours": args.colours}
        row |= {"flags": args.flags, "commit": machine["commit"], "games": games}
        if args.dry_run:
            return print(f"{make_table({'rows': [row]})}\n{show_game(row)}")
        keys = ("name", "komi", "level", "colours")
        rows = [old for old in results["rows"] if any(old[k] != row[k] for k in keys)] + [row]
        rows.sort(key=lambda r: [r[k] for k in keys])
        common.save_results("go_matches", {"machine": machine, "rows": rows})
        results = common.load_results("go_matches")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    main()
