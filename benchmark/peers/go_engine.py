"""What the peers that play Go share: board sizes, and a match against our engine, algos/alphazero_go.py."""

import argparse
import os
import random
import re
import shutil
import sys
from pathlib import Path

import peer

ENGINE, CHECKPOINT = "algos/alphazero_go.py", "benchmark/checkpoints/go5x5.pt"


def parse_size(env_id: str, smallest: int = 5) -> int:
    """Lines of the board of Go-NxN; exits with code 2 where it is none from the `smallest` to 19x19."""
    match = re.fullmatch(r"Go-(\d{1,2})x\1", env_id)
    if not match or not smallest <= int(match[1]) <= 19:
        peer.fail(f"--env-id {env_id}: Go-{smallest}x{smallest} to Go-19x19")
    return int(match[1])


def add_match_flags(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a match against our engine; returns their names."""
    group = parser.add_argument_group("match")
    checkpoint = os.path.relpath(peer.ROOT / CHECKPOINT)
    python = os.environ.get("REFERENCE_PYTHON", sys.executable)
    actions = [
        group.add_argument("--checkpoint", default=checkpoint, help="of our engine, for the board of --env-id"),
        group.add_argument("--simulations-end", type=peer.at_least(1), default=100, help="of our engine, for a move"),
        group.add_argument("--engine-python", default=python, help="Python that runs our engine"),
        group.add_argument("--komi", type=peer.at_least(-361, float), default=0.5),
        group.add_argument("--games", type=peer.at_least(1), default=20, help="half of them with each colour"),
    ]
    return [action.dest for action in actions]


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
    from tqdm import tqdm

    from envs_shared.go_tasks import gtp_client

    rows = []
    for i, opening in enumerate(tqdm(draw_openings(size, num_games, seed), unit="game")):
        is_black = i % 2 == 0
        with make_other(i) as other:
            players = (mine, other) if is_black else (other, mine)
            moves, margin = gtp_client.play_game(*players, size, komi, opening)
        rows.append({"is_black": is_black, "margin": margin if is_black else -margin, "moves": moves})
    return rows


def summarize(games: list[dict], size: int, komi: float) -> dict[str, float]:
    """Metrics of a match over distinct games: points are won games, with half a point for a draw.

    Margins are points on the board, from our side; rates have Wilson's intervals, and stand for each colour too.
    """
    from envs_shared.go_tasks.match import score_match

    distinct = {(tuple(game["moves"]), game["is_black"]): game for game in games}.values()

    def score(chosen: list[dict]) -> dict[str, float]:
        margins = [game["margin"] if game["is_black"] else -game["margin"] for game in chosen]
        return score_match([game["moves"] for game in chosen], margins, [game["is_black"] for game in chosen])

    metrics = {}
    for end, colours in (("", (True, False)), ("_black", (True,)), ("_white", (False,))):
        if chosen := [game for game in distinct if game["is_black"] in colours]:
            found = score(chosen)
            metrics[f"ours_win_rate{end}"] = found["win_rate"]
            metrics[f"ours_win_rate{end}_low"] = found["win_rate_low"]
            metrics[f"ours_win_rate{end}_high"] = found["win_rate_high"]
    points = [game["margin"] + (komi if game["is_black"] else -komi) for game in distinct]
    metrics |= {"ours_points": metrics["ours_win_rate"] * len(distinct), "whole_boards": points.count(size**2)}
    metrics |= {"peer_points": len(distinct) - metrics["ours_points"], "distinct_games": len(distinct)}
    return metrics | {"mean_margin": score(list(distinct))["margin"]}


def play_match(args: argparse.Namespace, script: str, commit: str, make_other) -> None:
    """Play --games games of our engine against `make_other(i)`, and write the result."""
    from envs_shared.go_tasks import gtp_client

    size = parse_size(args.env_id)
    if not Path(args.checkpoint).is_file():
        peer.fail(f"--checkpoint {args.checkpoint}: no such file")
    if shutil.which(args.engine_python) is None:
        peer.fail(f"--engine-python {args.engine_python}: no such program")
    flags = f"--gtp {args.checkpoint} --simulations-end {args.simulations_end}"
    with gtp_client.Client(f"{args.engine_python} {peer.ROOT / ENGINE} {flags}") as mine:
        try:
            mine.send(f"boardsize {size}")
        except gtp_client.GtpError as error:
            peer.fail(f"--checkpoint {args.checkpoint}: {error}")
        run = peer.Run(args, script)
        games = play(mine, make_other, size, args.komi, args.games, args.seed)
    metrics = summarize(games, size, args.komi)
    run.finish("ours_win_rate", metrics, sum(len(game["moves"]) for game in games), commit)
