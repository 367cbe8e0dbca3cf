"""Run algos/r2d2_lstm.py with a causal transformer in place of the LSTM: the recipe of
docs/recipes_r2d2_lstm.md.

Flags are those of the script, and --state-size: how many inputs a step can attend to, its own among them. An
evaluation takes that from the checkpoint. It runs by the clock of the peers.
"""

import sys
import tempfile
from pathlib import Path

import torch

from benchmark.peers import clock, peer
from docs import recipe

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "algos/r2d2_lstm.py"


def make_parser():
    """Make the parser of the one flag that the script does not have, and of one that it has."""
    parser = peer.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--state-size", type=peer.count, default=60)
    parser.add_argument("--evaluate")
    return parser


def main() -> None:
    """Apply the recipe to a copy of the script, and run that with the flags of the command line."""
    _, body = recipe.read_recipes("r2d2_lstm")["a-causal-transformer-in-place-of-the-lstm"]
    text = recipe.apply_diff((ROOT / SCRIPT).read_text(), recipe.find_block(body, "diff"))
    args, flags = make_parser().parse_known_args()
    if args.evaluate:
        args.state_size = len(torch.load(args.evaluate, weights_only=True)["agent"]["age_bias"])
        flags += ["--evaluate", args.evaluate]
    assert text.count("STATE_SIZE = 60") == 1
    text = text.replace("STATE_SIZE = 60", f"STATE_SIZE = {args.state_size}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, f"{Path(__file__).stem}_copy.py")
        copy.write_text(text)
        sys.argv[1:] = [str(copy), *flags]  # clock.py's own name, the script, its flags
        clock.main()


if __name__ == "__main__":
    main()
