"""What the peers that play Go share: board sizes, and a match against our engine, algos/alphazero_go.py."""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

import peer


def parse_size(env_id: str, smallest: int = 5) -> int:
    """Lines of the board of Go-NxN; exits with code 2 where it is none from the `smallest` to 19x19."""
    match = re.fullmatch(r"Go-(\d{1,2})x\1", env_id)
    if not match or not smallest <= int(match[1]) <= 19:
        peer.fail(f"--env-id {env_id}: Go-{smallest}x{smallest} to Go-19x19")
    return int(match[1])


def add_match_flags(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a match against our engine; returns their names."""
    group = parser.add_argument_group("match")
    checkpoint = os.path.relpath(peer.ROOT / "benchmark" / "checkpoints" / "go5x5.pt")
    python = os.environ.get("REFERENCE_PYTHON", sys.executable)
    actions = [
        group.add_argument("--checkpoint", default=checkpoint, help="of our engine, for the board of --env-id"),
        group.add_argument("--simulations-end", type=peer.at_least(1), default=100, help="of our engine, for a move"),
        group.add_argument("--engine-python", default=python, help="Python that runs our engine"),
        group.add_argument("--komi", type=peer.at_least(-361, float), default=0.5),
        group.add_argument("--games", type=peer.at_least(1), default=20, help="half of them with each colour"),
    ]
    return [action.dest for action in actions]


def play_match(args: argparse.Namespace, script: str, commit: str, make_other) -> None:
    """Play --games games of our engine against `make_other(i)`, and write the result.

    Points are won games, with half a point for a draw; margins are points on the board, from our side.
    """
    import go_matches

    from envs_shared.go_tasks import gtp_client

    size = parse_size(args.env_id)
    if not Path(args.checkpoint).is_file():
        peer.fail(f"--checkpoint {args.checkpoint}: no such file")
    if shutil.which(args.engine_python) is None:
        peer.fail(f"--engine-python {args.engine_python}: no such program")
    flags = f"--simulations-end {args.simulations_end}"
    with gtp_client.Client(go_matches.make_engine_command(args.checkpoint, flags, args.engine_python)) as mine:
        try:
            mine.send(f"boardsize {size}")
        except gtp_client.GtpError as error:
            peer.fail(f"--checkpoint {args.checkpoint}: {error}")
        run = peer.Run(args, script)
        games = go_matches.play(mine, make_other, size, args.komi, args.games, args.seed)
    summary = go_matches.summarize({"games": games, "size": size, "komi": args.komi})
    num_distinct = summary["distinct_games"]
    metrics = {"ours_win_rate": summary["win_rate"], "ours_points": summary["win_rate"] * num_distinct}
    metrics |= {"peer_points": num_distinct - metrics["ours_points"], "mean_margin": summary["margin"]}
    metrics["distinct_games"] = num_distinct
    run.finish("ours_win_rate", metrics, sum(len(game["moves"]) for game in games), commit)
