"""Checkpoints of algos/alphazero_go.py against GNU Go 3.8, over GTP.

apt install gnugo
python benchmark/go_matches.py --name "5x5" --checkpoint benchmark/checkpoints/go5x5.pt --komi 0
python benchmark/go_matches.py --name "7x7" --checkpoint benchmark/checkpoints/go7x7.pt --komi 8.5 --level 10
python benchmark/go_matches.py --report-only      # table in the docs from benchmark/results/go_matches.json

Both sides count by area under the same rules and play to the end. GNU Go gets another random seed in every game, which
hardly changes what it plays: each opening of two random moves is played from both sides, and games of the same moves
count once. All games are played side by side, so that our searches are one batch: minutes on a CPU core.
"""

import argparse
import contextlib
import random
import shutil
import sys

import common
import go_search
from tqdm import tqdm

sys.path.append(str(common.ROOT))
from envs_shared.go_tasks import files as go_files
from envs_shared.go_tasks import gtp_client
from envs_shared.go_tasks import match as go_match
from envs_shared.go_tasks.gtp_words import GtpError, parse_move

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


def draw_openings(size: int, num_games: int, seed: int) -> list[tuple[int, int]]:
    """Two random moves for each game, the same for each two games; no two pairs alike as long as there are others."""
    generator, openings = random.Random(seed), []
    for _ in range((num_games + 1) // 2):
        opening = tuple(generator.sample(range(size * size), 2))
        while opening in openings and len(openings) < size**2 * (size**2 - 1):
            opening = tuple(generator.sample(range(size * size), 2))
        openings.append(opening)
    return [openings[i // 2] for i in range(num_games)]


def play(mine, make_other, size: int, komi: float, num_games: int, seed: int = 0) -> list[dict]:
    """Games of `mine`, black in every other one, with their colour, moves and margin from our side.

    `make_other(i)` is the opponent in game i, which leaves when the game is over.
    """
    rows = []
    for i, opening in enumerate(tqdm(draw_openings(size, num_games, seed), unit="game")):
        is_black = i % 2 == 0
        with make_other(i) as other:
            players = (mine, other) if is_black else (other, mine)
            moves, margin = gtp_client.play_game(*players, size, komi, opening)
        rows.append({"is_black": is_black, "margin": margin if is_black else -margin, "moves": moves})
    return rows


class SideBySide:
    """Games of a network against as many opponents, whose moves all go through one `Search`.

    It thinks as the GTP engine does: so many simulations a move, on top of what the tree of the last move has kept.
    """

    def __init__(self, az, network, args, komi: float, num_simulations: int, others: list, openings: list):
        import torch

        self.az, self.torch, self.num_simulations, self.others = az, torch, num_simulations, others
        self.go = az.Go(az.get_size(args))
        self.moves = [list(opening) for opening in openings]
        self.is_black = torch.arange(len(others)) % 2 == 0
        self.boards = self.go.new(len(others))
        for column in torch.tensor(openings).T:
            self.boards = self.go.play(self.boards, column)
        evaluators = az.make_evaluators(network, self.go, len(others), args)
        self.search = az.Search(self.go, evaluators, len(others), 4 * num_simulations, args, komi=komi)
        for other, opening in zip(others, openings, strict=True):
            commands = [f"boardsize {self.go.size}", "clear_board", f"komi {komi:g}"]
            commands += [f"play {'bw'[k]} {self.format_vertex(move)}" for k, move in enumerate(opening)]
            for command in commands:
                other.send(command)

    def format_vertex(self, move: int) -> str:
        """Name of a move."""
        return go_files.format_vertex(move, self.go.size)

    def find_turns(self, ours: bool) -> list[int]:
        """Games in which it is our turn, or that of the others."""
        is_ours = (self.boards.to_play == 1) == self.is_black
        return (~self.boards.is_over & (is_ours == ours)).nonzero()[:, 0].tolist()

    def move(self, games: list[int], chosen: list[int]) -> None:
        """Play the `chosen` moves in `games`; raises GtpError where one is illegal."""
        index, moves = self.torch.tensor(games), self.torch.tensor(chosen)
        is_legal = self.go.legal_moves(self.boards.pick(index))[self.torch.arange(len(games)), moves]
        for game, move in zip(games, chosen, strict=True):
            self.moves[game].append(move)
        if not is_legal.all():
            wrong = self.moves[games[is_legal.long().argmin()]]
            raise GtpError(f"the last move is illegal: {[self.format_vertex(move) for move in wrong]}")
        self.boards = self.az.Boards(*(x.clone() for x in self.boards))
        self.boards.replace_rows(index, self.go.play(self.boards.pick(index), moves))

    def let_others_move(self, games: list[int]) -> list[int]:
        """Ask the opponents of `games` for their moves and play them."""
        colours = ["bw"[len(self.moves[game]) % 2] for game in games]
        vertices = [self.others[g].send(f"genmove {colour}") for g, colour in zip(games, colours, strict=True)]
        chosen = [parse_move(vertex, self.go.size) for vertex in vertices]
        self.move(games, chosen)
        return chosen

    def advance(self, games: list[int], chosen: list[int]) -> None:
        """Go on in the trees of `games`, in all others begin anew: these are over."""
        moves = self.torch.zeros(len(self.others), dtype=self.torch.int64)
        moves[games] = self.torch.tensor(chosen)
        is_new = self.torch.ones_like(moves, dtype=self.torch.bool)
        is_new[games] = False
        self.search.advance(moves, self.boards, is_new)

    def play(self, komi: float) -> list[dict]:
        """Play to the end of all games; what `play` gives."""
        if games := self.find_turns(False):  # from then on it is our turn in every game
            self.let_others_move(games)
        self.search.reset(self.boards)
        bar = tqdm(total=len(self.others), unit="game")
        while games := self.find_turns(True):
            self.search.run(self.num_simulations)
            prior = self.search.edge_prior[self.search.roots]  # decides between equal counts
            chosen = (self.search.visit_counts() + prior / 2).argmax(1)[games].tolist()
            for game, move in zip(games, chosen, strict=True):
                colour = "bw"[len(self.moves[game]) % 2]
                self.others[game].send(f"play {colour} {self.format_vertex(move)}")
            self.move(games, chosen)
            self.advance(games, chosen)
            if games := self.find_turns(False):
                self.advance(games, self.let_others_move(games))
            bar.update(int(self.boards.is_over.sum()) - bar.n)
        margins = (self.go.score(self.boards) - komi).tolist()
        rows = zip(self.is_black.tolist(), margins, self.moves, strict=True)
        return [{"is_black": black, "margin": m if black else -m, "moves": moves} for black, m, moves in rows]


def play_side_by_side(checkpoint: str, num_simulations: int, make_other, komi: float, num_games: int) -> list[dict]:
    """The same as `play`, for the network of a checkpoint and opponents that never resign."""
    az, args, network = go_search.load_network(checkpoint)
    args.num_slots = 1
    openings = draw_openings(az.get_size(args), num_games, 0)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(make_other(i)) for i in range(num_games)]
        return SideBySide(az, network, args, komi, num_simulations, others, openings).play(komi)


def summarize(row: dict) -> dict[str, float]:
    """MATCH_SCORES over distinct games, for each colour too, and how many of these were won by the whole board."""
    distinct = {(tuple(game["moves"]), game["is_black"]): game for game in row["games"]}.values()
    is_black = [game["is_black"] for game in distinct]
    black_margins = [game["margin"] if game["is_black"] else -game["margin"] for game in distinct]
    games = [game["moves"] for game in distinct]
    scores = go_match.score_match(games, black_margins, is_black)
    for colour in (True, False):
        rows = [row for row in zip(games, black_margins, is_black, strict=True) if row[2] == colour]
        if rows:
            own = go_match.score_match(*zip(*rows, strict=True))
            scores |= {f"{name}_{'black' if colour else 'white'}": x for name, x in own.items() if "rate" in name}
    points = [game["margin"] + (row["komi"] if game["is_black"] else -row["komi"]) for game in distinct]
    return scores | {"whole": points.count(row["size"] ** 2), "games": len(row["games"])}


def make_table(results: dict) -> str:
    """Markdown table, a line for each match."""
    lines = ["| network | simulations | level | komi | games | distinct | wins | as black | as white | margin |"]
    lines[0] += " whole board |"
    lines.append("|--|--:|--:|--:|--:|--:|--|--|--|--:|--:|")
    for row in results["rows"]:
        s = summarize(row)
        wins, *by_colour = (
            f"{s[f'win_rate{end}']:.0%} ({s[f'win_rate_low{end}']:.0%} to {s[f'win_rate_high{end}']:.0%})"
            if f"win_rate{end}" in s
            else ""
            for end in ("", "_black", "_white")
        )
        lines.append(
            f"| {row['name']} | {row['simulations']} | {row['level']} | {row['komi']:g} | {s['games']} | "
            f"{s['distinct_games']} | **{wins}** | {' | '.join(by_colour)} | {s['margin']:+.1f} | {s['whole']} |"
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
    parser.add_argument("--games", type=int, default=100, help="half of them with each colour")
    parser.add_argument("--simulations", type=int, default=100, help="of ours, for a move")
    parser.add_argument("--dry-run", action="store_true", help="play and print, but save nothing")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    path = common.RESULTS / "go_matches.json"
    results = common.load_results("go_matches") if path.exists() else {"rows": []}
    if not args.report_only:
        machine = common.describe_machine()
        size = int(args.name.split("x")[0])
        if find_gnugo() is None:
            sys.exit("GNU Go is not installed: apt install gnugo")
        games = play_side_by_side(
            args.checkpoint, args.simulations, lambda i: make_gnugo(args.level, i + 1), args.komi, args.games
        )
        row = {"name": args.name, "size": size, "komi": args.komi, "level": args.level}
        row |= {"simulations": args.simulations, "commit": machine["commit"], "games": games}
        if args.dry_run:
            return print(f"{make_table({'rows': [row]})}\n{show_game(row)}")
        keys = ("name", "simulations", "komi", "level")
        rows = [old for old in results["rows"] if any(old[k] != row[k] for k in keys)] + [row]
        rows.sort(key=lambda r: [r[k] for k in keys])
        common.save_results("go_matches", {"machine": machine, "rows": rows})
        results = common.load_results("go_matches")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    main()
