"""What the recipe for AlphaZero must bring about."""

import sys

import pytest
import torch
from test_contract import import_file, load, run_edited


def count_games(go):
    """Games of all possible moves, by their winner: black, white, nobody."""
    boards, counts = go.new(1), torch.zeros(3).long()
    while len(boards.to_play):
        games, moves = go.legal_moves(boards).nonzero().T
        boards = go.play(boards.pick(games), moves)
        winner = go.score(boards)[boards.is_over]
        counts += torch.stack([(winner == x).sum() for x in (1, -1, 0)])
        boards = boards.pick(~boards.is_over)
    return counts.tolist()


def play_all(go, player, side):
    """Results for a side that moves by `player`, in all games by the moves of the other side."""
    boards, results = go.new(1), []
    while len(boards.to_play):
        games, moves = go.legal_moves(boards).nonzero().T
        if boards.to_play[0] == side:
            games, moves = slice(None), player(boards)
        boards = go.play(boards.pick(games), moves)
        results += (side * go.score(boards)[boards.is_over]).tolist()
        boards = boards.pick(~boards.is_over)
    return results


def check_tic_tac_toe(path, folder):
    """All games are counted right, and a network that has learned never loses: not to minimax, nor to any other."""
    flags = "--env-id Go-3x3 --komi 0 --score-weight 0 --num-games 64 --pool-size 40000 --num-epochs 15"
    flags += " --draw-moves 1 --dirichlet-alpha 1 --c-puct 1 --eval-episodes 0"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("envs_shared.go", "edited_copy"):
            patch.setitem(sys.modules, name, None)
        go = import_file("envs_shared.go", folder / "envs_shared" / "go.py").Go(3)
        done, module = run_edited(path, flags)
    assert count_games(go) == [131184, 77904, 46080]
    lines = {frozenset(x) for x in go.lines.tolist()}
    for image in go.symmetries.tolist():
        assert {frozenset(image[point] for point in line) for line in lines} == lines and image[9] == 9
    checkpoint = load(done.path / "checkpoint.pt")
    args, lost = module.Args(**checkpoint["args"]), []
    for state in (None, checkpoint["agent"]):
        agent = module.Agent(3, args)
        agent.load_state_dict(state or agent.state_dict())
        player = module.make_player(go, module.make_workers(go, agent, args), args.simulations_end, args)
        lost.append(sum(play_all(go, player, side).count(-1) for side in (1, -1)))
    assert lost[0] >= 10 and lost[1] == 0  # without and with training


CHECKS = {"Another game: tic-tac-toe": check_tic_tac_toe}
