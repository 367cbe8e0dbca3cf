"""Run algos/r2d2_lstm.py with a causal transformer in place of the LSTM: the recipe of
docs/recipes_r2d2_lstm.md.

Flags are those of the script, and --state-size: how many inputs a step can attend to, its own among them. An
evaluation takes that from the checkpoint. It runs by the clock of the peers.
"""

import torch

from benchmark.peers import our_recipe, peer


def make_parser():
    """Make the parser of the one flag that the script does not have, and of one that it has."""
    parser = peer.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--state-size", type=peer.count, default=60)
    parser.add_argument("--evaluate")
    return parser


def main() -> None:
    """Apply the recipe to a copy of the script, and run that with the flags of the command line."""
    text = our_recipe.read_edited_script("algos/r2d2_lstm.py", "a-causal-transformer-in-place-of-the-lstm")
    args, flags = make_parser().parse_known_args()
    if args.evaluate:
        args.state_size = len(torch.load(args.evaluate, weights_only=True)["agent"]["age_bias"])
        flags += ["--evaluate", args.evaluate]
    assert text.count("STATE_SIZE = 60") == 1
    text = text.replace("STATE_SIZE = 60", f"STATE_SIZE = {args.state_size}")
    our_recipe.run_script(text, "r2d2_transformer_copy", flags)


if __name__ == "__main__":
    main()
