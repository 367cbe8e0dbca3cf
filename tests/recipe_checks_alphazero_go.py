"""What the recipes for AlphaZero must bring about."""

import sys
from collections import Counter

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


def play_all(go, side=0, player=None, num_moves=None):
    """Play all games in which `side` moves by `player`; without it, both sides make any moves.

    Returns the winners, and the numbers of those first, second, ... moves, up to `num_moves`.
    """
    boards, winners, counts = go.new(1), [], []
    while len(boards.to_play):
        own = boards.pick(boards.to_play == side)
        other = boards.pick(boards.to_play != side)
        games, moves = go.legal_moves(other).nonzero().T
        counts.append(len(moves))
        if len(counts) == num_moves:
            break
        parts = [go.play(other.pick(games), moves)]
        if len(own.to_play):
            parts.append(go.play(own, player(own)))
        boards = type(boards)(*map(torch.cat, zip(*parts)))
        winners += go.score(boards).sign()[boards.is_over].tolist()
        boards = boards.pick(~boards.is_over)
    return winners, counts


def check_tic_tac_toe(path, folder):
    """All games are counted right, and a network that has learned loses to no moves whatever."""
    flags = "--env-id TicTacToe-3x3 --pool-size 40000 --num-epochs 15"
    game, go, players = train(path, folder, flags)
    check_game(game.make_game, "TicTacToe-3x3")
    check_game(game.make_game, "Gomoku-6x6", 8)
    assert Counter(play_all(go)[0]) == {1: 131184, -1: 77904, 0: 46080}
    assert len(game.make_game("Gomoku-15x15").lines) == 2 * 15 * 11 + 2 * 11 * 11
    lost = [play_all(go, side, player)[0].count(-side) for player in players for side in (1, -1)]
    assert sum(lost[:2]) >= 10 and sum(lost[2:]) == 0  # without and with training


def find_wins(go, num_games):
    """Positions of random games in which a move wins at once, and a mask of these moves."""
    boards, found, wins = go.new(num_games), [], []
    while len(boards.to_play):
        legal = go.legal_moves(boards)
        games, moves = legal.nonzero().T
        after = go.play(boards.pick(games), moves)
        is_win = torch.zeros_like(legal)
        is_win[games, moves] = go.score(after) == boards.to_play[games]
        found.append(boards.pick(is_win.any(1)))
        wins.append(is_win[is_win.any(1)])
        boards = go.play(boards, go.random_moves(boards, legal))
        boards = boards.pick(~boards.is_over)
    return type(boards)(*map(torch.cat, zip(*found))), torch.cat(wins)


def check_connect_four(path, folder):
    """Lines in all directions win, games are counted right, and a trained network sees wins at once."""
    flags = "--env-id ConnectFour-4x5 --pool-size 10000 --num-epochs 8 --batch-size 64 --simulations-end 24"
    game, go, players = train(path, folder, flags, num_simulations=2)
    for env_id in ("ConnectFour-6x7", "ConnectFour-4x5"):
        check_game(game.make_game, env_id, 16)
    whole = game.make_game("ConnectFour-6x7")
    assert len(whole.lines) == 69
    games = [
        ([0, 0, 1, 1, 2, 2, 3], 1),  # across
        ([6, 0, 5, 0, 5, 0, 5, 0], -1),  # up
        ([0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3], 1),  # diagonal
        ([6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3], 1),  # the other one
    ]
    for columns, winner in games:
        boards = whole.new(1)
        for column in columns:
            assert whole.score(boards) == 0
            boards = whole.play(boards, torch.tensor([column]))
        assert whole.score(boards) == winner
    assert play_all(whole, num_moves=7)[1] == [7, 49, 343, 2401, 16807, 117649, 823536]
    torch.manual_seed(1)
    boards, wins = find_wins(go, 60)
    shares = [wins.gather(1, player(boards).unsqueeze(1)).float().mean().item() for player in players]
    assert shares[1] > 0.8 > shares[0]


def check_othello(path, folder):
    """Games are counted right. White, which wins 4x4, wins with the network whatever black does."""
    flags = "--env-id Othello-4x4 --pool-size 40000 --num-epochs 12"
    game, go, players = train(path, folder, flags)
    check_game(game.make_game, "Othello-4x4")
    check_game(game.make_game, "Othello-6x6", 8)
    assert play_all(game.make_game("Othello-8x8"), num_moves=5)[1] == [4, 12, 56, 244, 1396]
    assert Counter(play_all(go)[0]) == {1: 24632, -1: 30116, 0: 5312}
    untrained, trained = (play_all(go, -1, player)[0] for player in players)
    assert {*untrained} > {*trained} == {-1}


def check_transformer(path, folder):
    """The network has no convolution but that of the heads, and it learns."""
    flags = "--env-id Go-3x3 --num-games 32 --pool-size 8000 --batch-size 64 --num-epochs 8 --eval-episodes 0"
    done, module = run_edited(path, flags)
    checkpoint = load(done.path / "checkpoint.pt")
    go, args, losses = module.make_game("Go-3x3"), module.Args(**checkpoint["args"]), []
    pool = module.Records(*checkpoint["games"]["pool"].values())
    for state in (None, checkpoint["agent"]):
        agent = module.Agent(go, args)
        agent.load_state_dict(state or agent.state_dict())
        losses.append(module.compute_losses(agent, pool, module.get_stage(7, 10, args)).mean())
    assert sum(isinstance(x, torch.nn.Conv2d) for x in agent.modules()) == 1
    assert losses[1] < 0.8 * losses[0], losses


def check_playout_caps(path, folder):
    """A quarter of the moves is searched in full, with noise, and recorded; the others are not."""
    flags = "--env-id Go-3x3 --num-games 32 --pool-size 8000 --batch-size 64 --num-epochs 8 --eval-episodes 0"
    done, module = run_edited(path, flags)
    checkpoint = load(done.path / "checkpoint.pt")
    pool, args = module.Records(*checkpoint["games"]["pool"].values()), module.Args(**checkpoint["args"])
    go = module.make_game("Go-3x3")
    agent = module.Agent(go, args)
    agent.load_state_dict(checkpoint["agent"])
    losses = [
        module.compute_losses(x, pool, module.get_stage(7, 10, args)).mean()
        for x in (agent, module.Agent(go, args))
    ]
    assert losses[0] < 0.8 * losses[1] and not pool.policy.isnan().any()
    games, stage = module.SelfPlay(go, 200), module.get_stage(7, 10, args)._replace(num_simulations=20)
    search = module.Search(go, module.make_evaluator(go, agent), games.boards, 20, args)
    kinds, num_recorded, lengths, num_moves = [], 0, torch.zeros(200), 0
    for _ in range(200):
        lengths += 1
        ended, positions = module.play_moves(games, go, search, stage, args)
        num_simulations = int(search.N[0, 0].sum())
        has_noise = bool(search.P[:, 0].sum(1).mean() > 1.1)
        kinds.append((num_simulations, has_noise))
        num_recorded += len(positions.z)
        num_moves += lengths[ended].sum().item()
        lengths[ended] = 0
    counts = Counter(kinds)
    assert counts.keys() == {(20, True), (4, False)} and 25 < counts[20, True] < 75
    assert 0.1 < num_recorded / num_moves < 0.4


def check_resignation(path, folder):
    """Whoever has a low q loses, whatever is on the board; a tenth of the games is played out."""
    module = import_file("edited_copy", path)
    go, args, q = module.make_game("Go-5x5"), module.Args(), torch.full((40,), 0.01)
    q[20:] = 0.5

    def choose_first(boards, legal, *_):
        return legal / legal.sum(1, keepdim=True), q, legal.long().argmax(1)

    module.choose_moves = choose_first
    games, stage = module.SelfPlay(go, 40), module.get_stage(0, 26, args)
    ended, positions = module.play_moves(games, go, None, stage, args)
    assert ended.tolist() == [i for i in range(20) if i % 10]
    assert positions.z.tolist() == [0.0] * 18  # black has resigned
    q[:20], q[20:] = 0.5, 0.01
    ended, positions = module.play_moves(games, go, None, stage, args)
    assert ended.tolist() == [i for i in range(20, 40) if i % 10]
    assert positions.z.tolist() == [1.0, 0.0] * 18  # black's first move, and white's, who has resigned


CHECKS = {
    "Another game: tic-tac-toe": check_tic_tac_toe,
    "Another game: Connect Four": check_connect_four,
    "Another game: Othello": check_othello,
    "A transformer as the network": check_transformer,
    "Playout cap randomization": check_playout_caps,
    "Resignation in self-play": check_resignation,
}
