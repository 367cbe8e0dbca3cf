"""The rules of Go against games of OpenSpiel and GNU Go, brute force and known counts."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from check_game import check_game

from envs_shared.go import Go, make_game
from envs_shared.go_gtp import set_up

DATA = Path(__file__).parent / "data" / "go"


def read_games(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def get_points(go, boards):
    return boards.stones[:, go.cells]


@pytest.mark.parametrize("size", [9, 19])
def test_openspiel_games(size):
    """All games of a size side by side: legal moves before each move, final board and area score."""
    games, go = [game for game in read_games("openspiel.jsonl") if game["size"] == size], Go(size)
    boards = go.new(len(games))
    for i in range(max(len(game["moves"]) for game in games)):
        index = [j for j, game in enumerate(games) if i < len(game["moves"])]
        moves = torch.tensor([games[j]["moves"][i] for j in index])
        part = boards.pick(torch.tensor(index))
        legal = go.legal_moves(part)
        assert legal.sum(1).tolist() == [games[j]["legal_counts"][i] for j in index]
        assert legal[torch.arange(len(index)), moves].all()
        boards.put(torch.tensor(index), go.play(part, moves))
    assert get_points(go, boards).tolist() == [game["final_board"] for game in games]
    assert boards.is_over.all()  # after two passes or too many moves
    scores = [game["score"] for game in games]
    assert go.score(boards).tolist() == Go(size, "cpu", True).score(boards).tolist() == scores


@pytest.mark.parametrize("size", [2, 5, 6, 9, 19])
def test_scores_in_fixed_time_reach_the_end_of_long_ways(size):
    """Black's stone at the top sees all points of a way in serpentines, between white walls with gaps."""
    points = torch.zeros(size, size, dtype=torch.int64)
    points[1::2] = -1
    points[1::4, -1] = points[3::4, 0] = 0
    points[0, 0] = 1
    boards = set_up(Go(size), points.flatten().tolist(), 1)
    found = [Go(size, "cpu", fixed).score(boards).item() for fixed in (False, True)]
    assert found == [1 - int((points == -1).sum())] * 2  # all empty points see both colours


def test_gnugo_games_with_superko():
    for game in read_games("gnugo.jsonl"):
        go = Go(game["n"])
        boards = go.new(1)
        for move, count in zip(game["moves"], game["legal_counts_no_pass"], strict=True):
            boards.num_passes.zero_()  # they go on after two passes
            if int(boards.num_moves) >= 2 * go.num_points:
                break
            legal = go.legal_moves(boards)[0]
            assert legal[:-1].sum() == count and legal[move]
            boards = go.play(boards, torch.tensor([move]))
        else:
            assert get_points(go, boards)[0].tolist() == game["final_board"]


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
def test_number_of_sequences(size, fixed_shapes):
    expected, go = json.loads((DATA / "perft.json").read_text())[str(size)], Go(size, "cpu", fixed_shapes)
    boards = go.new(1)
    for i, count in enumerate(expected):
        legal = go.legal_moves(boards)
        assert legal.sum() == count
        if i + 1 < len(expected):
            parent, moves = legal.nonzero(as_tuple=True)
            boards = go.play(boards.pick(parent), moves)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 57), (3, 12675)])
def test_number_of_legal_positions(size, count):
    """Tromp and Farneback 2007, "Combinatorics of Go": those made by putting stones down one by one."""
    go = Go(size)
    points = torch.tensor(list(itertools.product((-1, 0, 1), repeat=size * size)), dtype=torch.int8)
    boards, is_legal = go.new(len(points)), torch.ones(len(points), dtype=torch.bool)
    for move in range(size * size):
        rows = (points[:, move] != 0).nonzero()[:, 0]
        part = boards.pick(rows)._replace(to_play=points[rows, move])
        is_legal[rows] &= go.legal_moves(part)[:, move]
        boards.put(rows, go.play(part, torch.full_like(rows, move)))
    assert (is_legal & (get_points(go, boards) == points).all(1)).sum() == count


def test_planes_are_what_the_side_to_move_sees():
    go = Go(3)
    boards = go.new(1)
    for move in (0, 1, 4):  # black A3, white B3, black B2: A3 and B3 have one liberty left
        boards = go.play(boards, torch.tensor([move]))
    legal = go.legal_moves(boards)
    planes = go.planes(boards, legal)[0].flatten(1).int().tolist()
    own, other, own_atari, other_atari, is_legal, last, passed, is_black, ones = planes
    assert own == own_atari == [0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert other == [1, 0, 0, 0, 1, 0, 0, 0, 0] and other_atari == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert is_legal == legal[0, :-1].int().tolist() and last == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert passed == is_black == [0] * 9 and ones == [1] * 9
    planes = go.planes(go.play(boards, torch.tensor([9])), legal)[0].flatten(1).int().tolist()
    assert planes[0] == other and planes[5] == [0] * 9 and planes[6] == planes[7] == [1] * 9


def test_random_moves_are_legal_and_fill_no_eyes():
    """A side that could fill eyes alone passes."""
    go = Go(4)
    points = [0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, -1, -1, 0, -1]
    boards = set_up(go, points, 1).pick(torch.zeros(2000, dtype=torch.int64))
    legal = go.legal_moves(boards)
    torch.manual_seed(0)
    assert legal[0].nonzero()[:, 0].tolist() == [0, 3, 6, 14, 16]
    assert go.random_moves(boards, legal).unique().tolist() == [14]
    boards = boards._replace(to_play=-boards.to_play)  # nor can white live at 14
    assert go.random_moves(boards, go.legal_moves(boards)).unique().tolist() == [16]


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_superko_forbids_all_earlier_positions(fixed_shapes):
    """However long ago: moves whose position was on the board before are illegal, on 2x2 and 3x3."""
    gaps = []
    for size in (2, 3):
        go = Go(size, "cpu", fixed_shapes)
        torch.manual_seed(size)
        boards, past = go.new(200), []
        past.append(get_points(go, boards).clone())
        while not boards.is_over.all():
            legal = go.legal_moves(boards)
            for move in range(go.num_points):
                is_empty = get_points(go, boards)[:, move] == 0
                after = get_points(go, go.play(boards, torch.full_like(boards.num_moves, move)))
                was_there = torch.stack([(x == after).all(1) for x in past])  # [positions, games]
                is_again = was_there.any(0) & is_empty & ~boards.is_over
                assert not legal[is_again, move].any()
                last = was_there.long().cumsum(0).argmax(0)  # the last time that it was there
                gaps += (len(past) - last)[is_again].tolist()
            weights = legal.float()
            weights[:, -1] = torch.where(boards.is_over, 1.0, 0.1)  # games that are over pass
            boards = go.play(boards, torch.multinomial(weights, 1).squeeze(1))
            past.append(get_points(go, boards).clone())
    assert sum(gap > 9 for gap in gaps) > 5


# The checker of rules that docs/recipes_alphazero_go.md recommends for games of one's own


@pytest.mark.parametrize("env_id", ["Go-2x2", "Go-5x5"])
def test_the_checker_finds_nothing_in_the_rules_of_go(env_id):
    torch.manual_seed(0)
    check_game(make_game, env_id)


class OtherScore(Go):
    """With fixed shapes, a score of another sign."""

    def score(self, boards):
        return -super().score(boards) if self.fixed_shapes else super().score(boards)


class OtherMoves(Go):
    """The last point is legal only beside other boards."""

    def legal_moves(self, boards):
        legal = super().legal_moves(boards)
        if len(legal) == 1:
            legal[:, self.num_points - 1] = False
        return legal


class OtherPlay(Go):
    """A board that is alone forgets what was played last."""

    def play(self, boards, moves):
        after = super().play(boards, moves)
        return after._replace(last_move=after.last_move * 0) if len(moves) == 1 else after


FAULTS = [
    (OtherScore, "fixed shapes give another score"),
    (OtherMoves, "legal_moves of a board depend on the others beside it"),
    (OtherPlay, "a board depends on the others beside it"),
]


@pytest.mark.parametrize(("rules", "words"), FAULTS)
def test_the_checker_finds_faults(rules, words):
    def make_faulty(env_id, device="cpu", fixed_shapes=False):
        return rules(make_game(env_id).size, device, fixed_shapes)

    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=words):
        check_game(make_faulty, "Go-3x3")
