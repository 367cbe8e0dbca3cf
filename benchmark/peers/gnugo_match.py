"""Our Go engine, algos/alphazero_go.py, against GNU Go: both count by area and play to the end.

All games are played side by side, so that our searches are one batch, each beginning at the root. Every
opening of two random moves is played from both sides. CPU-seconds are those of our engine and the referee.
"""

import contextlib
import shutil
import subprocess
from pathlib import Path

from benchmark.peers import go_engine, peer

FLAGS = "--mode gtp --chinese-rules --positional-superko --capture-all-dead --never-resign"


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_parser(__doc__, "Go-5x5")
    parser.add_argument(
        "--level", type=int, choices=range(1, 11), default=1, metavar="1..10", help="playing level of GNU Go"
    )
    go_engine.add_match_flags(parser)
    return parser


def find_gnugo() -> str | None:
    """Return the path of GNU Go if it is installed."""
    return shutil.which("gnugo") or shutil.which("/usr/games/gnugo")


class GnuGo:
    """GNU Go in one game: a function from all moves so far to its next one, for `go_engine.play`."""

    def __init__(self, client, size: int, komi: float):
        self.client = client
        self.size = size
        self.num_known = 0  # moves that it has been told, its own included
        for command in (f"boardsize {size}", "clear_board", f"komi {komi:g}"):
            client.send(command)

    def __call__(self, moves: list[int]) -> int:
        """Send the moves that it does not know yet, and ask for its move."""
        from envs_shared.go_gtp import format_vertex, parse_vertex

        for i in range(self.num_known, len(moves)):
            self.client.send(f"play {'bw'[i % 2]} {format_vertex(moves[i], self.size)}")
        self.num_known = len(moves) + 1
        return parse_vertex(self.client.send(f"genmove {'bw'[len(moves) % 2]}"), self.size)


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    if (gnugo := find_gnugo()) is None:
        peer.fail("GNU Go is not installed: apt-get install gnugo")
    from envs_shared.go_gtp import Client

    go, player = go_engine.load_engine(args)
    output = subprocess.run([gnugo, "--version"], capture_output=True, text=True, check=True).stdout
    with contextlib.ExitStack() as stack:
        others = []
        for i in range(args.games):
            command = f"{gnugo} {FLAGS} --level {args.level} --seed {1 + args.seed * args.games + i}"
            others.append(GnuGo(stack.enter_context(Client(command)), go.size, args.komi))
        go_engine.play_match(args, Path(__file__).stem, output.splitlines()[0], go, player, others)


if __name__ == "__main__":
    main()
