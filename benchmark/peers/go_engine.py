"""What the peers that play Go share: board sizes, and a match against our engine, algos/alphazero_go.py."""

import argparse
import os
import re
from pathlib import Path

import peer

CHECKPOINT = "benchmark/checkpoints/go5x5.pt"


def parse_size(env_id: str) -> int:
    """Lines of the board of Go-NxN; exits with code 2 where it is none from 9x9, as smaller ones are full too soon."""
    match = re.fullmatch(r"Go-(9|1[0-9])x\1", env_id)
    if not match:
        peer.fail(f"--env-id {env_id}: Go-9x9 to Go-19x19")
    return int(match[1])


def add_match_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a match against our engine."""
    checkpoint = os.path.relpath(peer.ROOT / CHECKPOINT)
    parser.add_argument("--checkpoint", default=checkpoint, help="of our engine, for the board of --env-id")
    parser.add_argument("--simulations-end", type=peer.count, default=100, help="of our engine, for a move")
    parser.add_argument("--komi", type=float, default=0.5)
    parser.add_argument("--games", type=peer.count, default=20, help="half of them with each colour")


def set_up_torch(seed: int) -> None:
    """One thread, and the settings of alphazero_go.py."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.manual_seed(seed)


def load_network(path: str | Path):
    """The script's module, a checkpoint's settings, without bfloat16, and its network."""
    from algos import alphazero_go as az

    checkpoint = az.load_checkpoint(path)
    args = checkpoint["args"]
    args.bf16 = False
    agent = az.Agent(az.get_size(args), args)
    agent.load_state_dict(checkpoint["agent"])
    return az, args, az.make_network(agent, args)


def load_engine(args: argparse.Namespace):
    """Go on the board of --env-id, and a function from boards [R] to the moves [R] of the network of --checkpoint."""
    if not Path(args.checkpoint).is_file():
        peer.fail(f"--checkpoint {args.checkpoint}: no such file")
    set_up_torch(args.seed)
    az, settings, network = load_network(args.checkpoint)
    if settings.env_id != args.env_id:
        peer.fail(f"--env-id {args.env_id}: {args.checkpoint} plays {settings.env_id}")
    settings.simulations_end = args.simulations_end
    settings.komi = args.komi
    go = az.Go(az.get_size(settings))
    return go, az.make_player(go, az.make_evaluators(network, go, args.games, settings), settings)


def play(go, player, others: list, seed: int) -> tuple[list[list[int]], list[float], list[bool]]:
    """A game of `player` with each of `others`, side by side: moves, black's margins on the board, if we were black.

    `player` is a function from boards [R] to moves [R], black in the first half of the games; each of the others is one
    from all moves of its game so far to the next. The second half begins with the same pairs of random moves as the
    first. Raises ValueError where a program plays an illegal move.
    """
    import torch
    from tqdm import tqdm

    from envs_shared.go_tasks import match

    num_games = len(others)
    num_pairs = (num_games + 1) // 2
    boards, opening = match.draw_openings(go, num_pairs, 2, torch.Generator().manual_seed(seed))
    pair = torch.arange(num_games) % num_pairs
    boards = boards.pick(pair)
    games = torch.stack(opening, 1)[pair].tolist()
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
                boards.replace_rows(rows, go.play(at_turn, moves))
            bar.update(int(boards.is_over.sum()) - bar.n)
    return games, go.score(boards).tolist(), is_black.tolist()


def summarize(games: list[list[int]], scores: list[float], is_black: list[bool], komi: float) -> dict:
    """Metrics of a match over distinct games, from what `play` gives: points are won games, a draw is half a point.

    Elo is above the other program's; margins are points over komi, from our side; rates have Wilson's intervals, and
    stand for each colour too.
    """
    from envs_shared.go_tasks.match import compute_elo, score_match

    margins = [score - komi for score in scores]
    metrics = {}
    for end, colours in (("_black", (True,)), ("_white", (False,)), ("", (True, False))):
        chosen = [row for row in zip(games, margins, is_black, strict=True) if row[2] in colours]
        if chosen:
            found = score_match(*zip(*chosen, strict=True))
            metrics |= {
                f"ours_win_rate{end}{limit}": found[f"win_rate{limit}"] for limit in ("", "_low", "_high")
            }
    num_games = found["distinct_games"]
    metrics |= {"mean_margin": found["margin"], "distinct_games": num_games}
    metrics["ours_elo"] = compute_elo(found["win_rate"], num_games)
    metrics["ours_points"] = found["win_rate"] * num_games
    return metrics | {"peer_points": num_games - metrics["ours_points"]}


def play_match(args: argparse.Namespace, script: str, program: str, go, player, others: list) -> None:
    """Play `player` against `others`, which are `program`, and log the result."""
    run = peer.Run(args, script, program)
    games, scores, is_black = play(go, player, others, args.seed)
    metrics = summarize(games, scores, is_black, args.komi)
    run.finish(sum(map(len, games)), metrics)
