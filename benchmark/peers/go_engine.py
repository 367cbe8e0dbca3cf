"""Shared by the peers that play Go: board sizes, and a match against our engine, algos/alphazero_go.py.

Openings differ and are played from both sides, games with the same moves count once, and rates have
intervals.
"""

import argparse
import math
import os
import re
import statistics
from pathlib import Path

from benchmark.peers import peer

CHECKPOINT = "benchmark/checkpoints/go5x5.pt"


def parse_size(env_id: str) -> int:
    """Return N of Go-NxN; exits with code 2 if it is less than 9, as small boards are full after a few
    moves."""
    match = re.fullmatch(r"Go-(9|1[0-9])x\1", env_id)
    if not match:
        peer.fail(f"--env-id {env_id}: must be Go-9x9 to Go-19x19")
    return int(match[1])


def add_match_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a match against our engine."""
    checkpoint = os.path.relpath(peer.ROOT / CHECKPOINT)
    parser.add_argument("--checkpoint", default=checkpoint, help="our network, for the board of --env-id")
    parser.add_argument("--simulations-end", type=peer.count, default=100, help="per move of our engine")
    parser.add_argument("--komi", type=float, default=0.5)
    parser.add_argument("--games", type=peer.count, default=20, help="half of them with each colour")


def set_up_torch(seed: int) -> None:
    """Use one thread, and seed torch's random numbers."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)


def load_network(path: str | Path):
    """Return the rules, settings and network of a checkpoint; bfloat16 is off, since few CPUs have it."""
    import torch

    from algos import alphazero_go as az

    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    settings = az.Args(**checkpoint["args"] | {"bf16": False})
    go = az.make_game(settings.env_id)
    agent = az.Agent(go, settings)
    agent.load_state_dict(checkpoint["agent"])
    return go, settings, agent


def load_engine(args: argparse.Namespace):
    """Return the rules for --env-id, and a function from boards [R] to the moves [R] of the network of
    --checkpoint."""
    if not Path(args.checkpoint).is_file():
        peer.fail(f"--checkpoint {args.checkpoint}: no such file")
    from algos import alphazero_go as az

    set_up_torch(args.seed)
    go, settings, agent = load_network(args.checkpoint)
    if settings.env_id != args.env_id:
        peer.fail(f"--env-id {args.env_id}: {args.checkpoint} plays {settings.env_id}")
    settings.komi = args.komi
    return go, az.make_player(go, az.make_evaluator(go, agent), args.simulations_end, settings)


def play_random_moves(go, num_boards: int, num_moves: int):
    """Return boards after random moves that fill no eyes, and these moves [num_boards, num_moves]."""
    import torch

    boards, moves = go.new(num_boards), torch.zeros(num_boards, 0).long()
    for _ in range(num_moves):
        drawn = go.random_moves(boards, go.legal_moves(boards))
        boards, moves = go.play(boards, drawn), torch.cat((moves, drawn.cpu().unsqueeze(1)), 1)
    return boards, moves


def draw_openings(go, num_openings: int, num_moves: int):
    """Return boards after random moves, and a list of these moves for each of them.

    No two openings are images of each other as long as there are others; after that, no two have the same
    moves.
    """
    boards, moves = play_random_moves(go, 4 * num_openings, num_moves)
    symmetries = go.move_images.tolist()
    by_image, by_moves = {}, {}  # the first row of each kind
    for row, game in enumerate(moves.tolist()):
        by_image.setdefault(min(tuple(image[move] for move in game) for image in symmetries), row)
        by_moves.setdefault(tuple(game), row)
    rows = list(dict.fromkeys([*by_image.values(), *by_moves.values()]))[:num_openings]
    rows = [rows[i % len(rows)] for i in range(num_openings)]
    return boards.pick(rows), moves[rows].tolist()


def play(go, player, others: list, seed: int) -> tuple[list[list[int]], list[float], list[bool]]:
    """Play `player` against each of `others`; returns moves, black's margins on the board, and if we were
    black.

    `player` is a function from boards [R] to moves [R]. It is black in the first half of the games, and the
    second half has the same openings of two moves. Each of the others is a function from all moves of its
    game to the next one. Raises ValueError if a program plays an illegal move.
    """
    import torch
    from tqdm import tqdm

    torch.manual_seed(seed)
    num_games = len(others)
    num_pairs = (num_games + 1) // 2
    boards, openings = draw_openings(go, num_pairs, 2)
    pair = torch.arange(num_games) % num_pairs
    boards, games = boards.pick(pair), [[*openings[i]] for i in pair.tolist()]
    is_black = torch.arange(num_games) < num_pairs
    with tqdm(total=num_games, unit="game") as bar:
        while not boards.is_over.all():
            for is_ours in (True, False):
                is_turn = ((boards.to_play == 1) == is_black) == is_ours
                rows = (~boards.is_over & is_turn).nonzero()[:, 0]
                if len(rows) == 0:
                    continue
                at_turn = boards.pick(rows)
                moves = (
                    player(at_turn) if is_ours else torch.tensor([others[i](games[i]) for i in rows.tolist()])
                )
                for i, move in zip(rows.tolist(), moves.tolist(), strict=True):
                    games[i].append(move)
                is_legal = go.legal_moves(at_turn)[torch.arange(len(rows)), moves]
                if not is_legal.all():
                    raise ValueError(f"the last move is illegal: {games[rows[~is_legal][0]]}")
                boards.put(rows, go.play(at_turn, moves))
            bar.update(int(boards.is_over.sum()) - bar.n)
    return games, go.score(boards).tolist(), is_black.tolist()


def compute_interval(win_rate: float, num_games: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a win rate."""
    z2 = 1.96**2 / num_games
    center = win_rate + z2 / 2
    half = 1.96 * math.sqrt(win_rate * (1 - win_rate) / num_games + z2 / 4 / num_games)
    return (center - half) / (1 + z2), (center + half) / (1 + z2)


def summarize(games: list[list[int]], scores: list[float], is_black: list[bool], komi: float) -> dict:
    """Return the metrics of a match over distinct games, from what `play` returns.

    Points are games won, and a draw is half a point; margins are points over komi, from our side. Rates have
    intervals, also those for one colour.
    """
    rows = zip(games, scores, is_black, strict=True)
    margins = {(tuple(game), black): (score - komi) * (1 if black else -1) for game, score, black in rows}
    metrics = {"mean_margin": statistics.mean(margins.values()), "distinct_games": len(margins)}
    for end, colours in (("_black", (True,)), ("_white", (False,)), ("", (True, False))):
        points = [((x > 0) + (x >= 0)) / 2 for (_, black), x in margins.items() if black in colours]
        if points:
            rate = statistics.mean(points)
            low, high = compute_interval(rate, len(points))
            limits = {"": rate, "_low": low, "_high": high}
            metrics |= {f"ours_win_rate{end}{limit}": x for limit, x in limits.items()}
    return metrics | {"ours_points": sum(points), "peer_points": len(points) - sum(points)}


def play_match(args: argparse.Namespace, script: str, program: str, go, player, others: list) -> None:
    """Play `player` against `others`, which are `program`, and log the result."""
    run = peer.Run(args, script, program)
    games, scores, is_black = play(go, player, others, args.seed)
    run.finish(sum(map(len, games)), summarize(games, scores, is_black, args.komi))
