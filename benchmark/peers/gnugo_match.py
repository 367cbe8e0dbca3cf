"""Our Go engine, algos/alphazero_go.py, against GNU Go: both count by area and play to the end.

Every two games begin with another two random moves, played from both sides. CPU-seconds are those of the referee,
without the two programs.
"""

import shutil
import subprocess
from pathlib import Path

import go_engine
import peer

FLAGS = "--mode gtp --chinese-rules --positional-superko --capture-all-dead --never-resign"


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "Go-5x5")
    parser.add_argument("--level", type=int, choices=range(1, 11), default=1, metavar="1..10", help="of GNU Go")
    go_engine.add_match_flags(parser)
    return parser


def find_gnugo() -> str | None:
    """Path of GNU Go, where it is installed."""
    return shutil.which("gnugo") or shutil.which("/usr/games/gnugo")


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if (gnugo := find_gnugo()) is None:
        peer.fail("GNU Go is not installed: apt-get install gnugo")
    from envs_shared.go_tasks import gtp_client

    output = subprocess.run([gnugo, "--version"], capture_output=True, text=True, check=True).stdout

    def make_other(i: int):
        seed = 1 + args.seed * args.games + i
        return gtp_client.Client(f"{gnugo} {FLAGS} --level {args.level} --seed {seed}")

    go_engine.play_match(args, Path(__file__).stem, output.splitlines()[0], make_other)


if __name__ == "__main__":
    main()
