"""What the recipes for AlphaZero must bring about."""

import sys

import pytest
import torch
from check_game import check_game
from scripts import import_file, load, run_edited

QUICK = (
    "--komi 0 --score-weight 0 --num-games 64 --draw-moves 1 --dirichlet-alpha 1 --c-puct 1 --eval-episodes 0"
)


def train(path, folder, flags, num_simulations=48):
    """Run the edited copy with the game of its folder; returns its module, the rules, and two players.

    A player is a function from boards to moves, by a network without training and by the trained one.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("envs_shared.go", "edited_copy"):
            patch.setitem(sys.modules, name, None)
        game = import_file("envs_shared.go", folder / "envs_shared" / "go.py")
        torch.manual_seed(0)
        done, module = run_edited(path, f"{QUICK} {flags}")
    checkpoint = load(done.path / "checkpoint.pt")
    args, players = module.Args(**checkpoint["args"]), []
    go = game.make_game(args.env_id)
    torch.manual_seed(0)
    for state in (None, checkpoint["agent"]):
        agent = module.Agent(go, args)
        agent.load_state_dict(state or agent.state_dict())
        players.append(module.make_player(go, module.make_evaluator(go, agent), num_simulations, args))
    return game, go, players


def count_games(go):
    """Games of all possible moves, by their winner: black, white, nobody."""
    boards, counts = go.new(1), torch.zeros(3).long()
    while len(boards.to_play):
        games, moves = go.legal_moves(boards).nonzero().T
        boards = go.play(boards.pick(games), moves)
        winner = go.score(boards).sign()[boards.is_over]
        counts += torch.stack([(winner == x).sum() for x in (1, -1, 0)])
        boards = boards.pick(~boards.is_over)
    return counts.tolist()


def play_all(go, player, side):
    """Results for a side that moves by `player`, in all games by the moves of the other side."""
    boards, results = go.new(1), []
    while len(boards.to_play):
        own = boards.pick(boards.to_play == side)
        other = boards.pick(boards.to_play != side)
        games, moves = go.legal_moves(other).nonzero().T
        parts = [go.play(other.pick(games), moves)]
        if len(own.to_play):
            parts.append(go.play(own, player(own)))
        boards = type(boards)(*map(torch.cat, zip(*parts)))
        results += (side * go.score(boards).sign())[boards.is_over].tolist()
        boards = boards.pick(~boards.is_over)
    return results


def check_tic_tac_toe(path, folder):
    """All games are counted right, and a network that has learned never loses: not to minimax, nor to any
    other."""
    flags = "--env-id TicTacToe-3x3 --pool-size 40000 --num-epochs 15"
    game, go, players = train(path, folder, flags)
    check_game(game.make_game, "TicTacToe-3x3")
    check_game(game.make_game, "Gomoku-6x6", 8)
    assert count_games(go) == [131184, 77904, 46080]
    assert len(game.make_game("Gomoku-15x15").lines) == 2 * 15 * 11 + 2 * 11 * 11
    results = [[x for side in (1, -1) for x in play_all(go, player, side)] for player in players]
    assert results[0].count(-1) >= 10 and results[1].count(-1) == 0  # without and with training


def count_sequences(go, num_moves):
    """The numbers of sequences of 1, 2, ... moves; no game may end before the last of them."""
    boards, counts = go.new(1), []
    for _ in range(num_moves):
        games, moves = go.legal_moves(boards).nonzero().T
        boards = go.play(boards.pick(games), moves)
        counts.append(len(moves))
    return counts


def score_columns(go, columns):
    boards = go.new(1)
    for column in columns:
        boards = go.play(boards, torch.tensor([column]))
    return go.score(boards).item()


def find_wins(go, num_games):
    """Positions of random games in which a move wins at once, and a mask of these moves."""
    boards, found, wins = go.new(num_games), [], []
    while len(boards.to_play):
        legal = go.legal_moves(boards)
        is_win = torch.zeros_like(legal)
        for move in range(go.num_actions):
            rows = legal[:, move].nonzero().squeeze(1)
            after = go.play(boards.pick(rows), torch.full_like(rows, move))
            is_win[rows, move] = go.score(after) == boards.to_play[rows]
        found.append(boards.pick(is_win.any(1)))
        wins.append(is_win[is_win.any(1)])
        boards = go.play(boards, go.random_moves(boards, legal))
        boards = boards.pick(~boards.is_over)
    return type(boards)(*map(torch.cat, zip(*found))), torch.cat(wins)


def check_connect_four(path, folder):
    """Lines in all directions win, games are counted right, and a network that has learned sees wins at
    once."""
    flags = "--env-id ConnectFour-4x5 --pool-size 10000 --num-epochs 8 --batch-size 64 --simulations-end 24"
    game, go, players = train(path, folder, flags, num_simulations=2)
    for env_id in ("ConnectFour-6x7", "ConnectFour-4x5"):
        check_game(game.make_game, env_id, 16)
    whole = game.make_game("ConnectFour-6x7")
    assert len(whole.lines) == 69
    games = {
        "across": ([0, 0, 1, 1, 2, 2, 3], 1),
        "up": ([6, 0, 5, 0, 5, 0, 5, 0], -1),
        "diagonal": ([0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3], 1),
        "other diagonal": ([6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3], 1),
    }
    for name, (columns, winner) in games.items():
        assert score_columns(whole, columns) == winner and score_columns(whole, columns[:-1]) == 0, name
    assert count_sequences(whole, 7) == [7, 49, 343, 2401, 16807, 117649, 823536]
    torch.manual_seed(1)
    boards, wins = find_wins(go, 60)
    shares = [wins.gather(1, player(boards).unsqueeze(1)).float().mean().item() for player in players]
    assert shares[1] > 0.8 > shares[0]


def check_othello(path, folder):
    """Known numbers of sequences. White, which wins 4x4 by perfect play, wins with the network whatever black
    does."""
    flags = "--env-id Othello-4x4 --pool-size 40000 --num-epochs 12"
    game, go, players = train(path, folder, flags)
    check_game(game.make_game, "Othello-4x4")
    check_game(game.make_game, "Othello-6x6", 8)
    assert count_sequences(game.make_game("Othello-8x8"), 5) == [4, 12, 56, 244, 1396]
    assert count_games(go) == [24632, 30116, 5312]
    results = [play_all(go, player, -1) for player in players]
    assert results[0].count(1) < len(results[0]) and results[1].count(1) == len(results[1])


def check_transformer(path, folder):
    """The network has no convolution but that of the heads, it gets all moves right, and it learns."""
    flags = "--env-id Go-3x3 --num-games 32 --pool-size 8000 --batch-size 64 --num-epochs 8 --eval-episodes 0"
    done, module = run_edited(path, flags)
    checkpoint = load(done.path / "checkpoint.pt")
    agent = module.Agent(module.make_game("Go-3x3"), module.Args(**checkpoint["args"]))
    agent.load_state_dict(checkpoint["agent"])
    assert sum(isinstance(x, torch.nn.Conv2d) for x in agent.modules()) == 1
    assert sum(isinstance(x, torch.nn.MultiheadAttention) for x in agent.modules()) == 3
    pool = module.Records(*checkpoint["games"]["pool"].values())
    stage = module.get_stage(7, 10, module.Args())
    untrained = module.Agent(module.make_game("Go-3x3"), module.Args(**checkpoint["args"]))
    losses = [module.compute_losses(x, pool, stage).mean() for x in (untrained, agent)]
    assert losses[1] < 0.8 * losses[0], losses


CHECKS = {
    "Another game: tic-tac-toe": check_tic_tac_toe,
    "Another game: Connect Four": check_connect_four,
    "Another game: Othello": check_othello,
    "A transformer as the network": check_transformer,
}
