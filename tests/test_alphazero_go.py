"""AlphaZero for Go: the search against a plain recursive one, its slots, the pool, the losses, the engine."""

import math
from dataclasses import replace

import pytest
import torch

from algos import alphazero_go as az
from envs_shared.go import Go
from envs_shared.go_match import choose_random_moves

CPU = torch.device("cpu")


class HashEvaluator:
    """Logits and values that are fixed functions of the position, as a network's would be."""

    device = CPU

    def __init__(self, go, sharpness=1.0):
        self.go, self.sharpness = go, sharpness
        generator = torch.Generator().manual_seed(5)
        self.weights = torch.randn(3, 9 * go.num_points, go.num_points + 2, generator=generator)

    def __call__(self, boards, legal):
        planes = self.go.planes(boards, legal).flatten(1).float()
        out = (planes @ self.weights[0]).sin() * self.sharpness  # the matrix product of a row depends on that row alone
        return out[:, :-1], out[:, -1].sigmoid()


class PlainSearch:
    """One game, one leaf at a time, as nested dictionaries of Python numbers in float64."""

    def __init__(self, go, evaluator, boards, args):
        self.go, self.evaluator, self.args = go, evaluator, args
        self.root = self.make_node(boards)

    def make_node(self, boards):
        legal = self.go.legal_moves(boards)
        node = {"boards": boards, "n": 1, "children": {}, "over": bool(boards.is_over)}
        if node["over"]:
            margin = self.go.score(boards).item() - self.args.komi
            node["v"] = 0.5 if margin == 0 else float((margin > 0) == (int(boards.to_play) == 1))
            return node
        logits, value = self.evaluator(boards, legal)
        node["v"] = value.item()
        prior = logits.double().masked_fill(~legal, -math.inf).softmax(1)[0].tolist()
        node["edges"] = {m: [0, 0.0, prior[m]] for m in legal[0].nonzero()[:, 0].tolist()}
        return node

    def simulate(self):
        node, path = self.root, []
        while True:
            first = node["v"] if self.args.fpu == "parent" else 0.0

            def score(m, node=node, first=first):
                n, w, p = node["edges"][m]
                return (w / n if n else first) + self.args.c_puct * math.sqrt(node["n"]) / (n + 1) * p

            move = max(node["edges"], key=score)
            path.append((node, move))
            child = node["children"].get(move)
            if child is None:
                child = self.make_node(self.go.play(node["boards"], torch.tensor([move])))
                node["children"][move] = child
                break
            if child["over"]:
                break
            node = child
        value = child["v"]
        for node, move in reversed(path):
            value = 1 - value
            node["n"] += 1
            node["edges"][move][0] += 1
            node["edges"][move][1] += value


def make_boards(go, num_games, num_moves, seed=0):
    generator = torch.Generator().manual_seed(seed)
    boards = go.new(num_games)
    for i in range(num_moves):
        moves = choose_random_moves(go, boards, go.legal_moves(boards), generator, fill_eyes=False)
        moves[: num_games * i // (2 * num_moves)] = (
            go.num_points if i % 2 else moves[: num_games * i // (2 * num_moves)]
        )
        boards = go.play(boards, torch.where(boards.num_passes > 0, moves, moves))
    return boards


def assert_same_tree(search, plain, game):
    """All visits and values below the root, node by node."""
    stack = [(int(search.roots[game]), plain.root)]
    count = 0
    while stack:
        number, node = stack.pop()
        count += 1
        visits, q, prior = search.edges[number].double()
        assert search.visits[number] == node["n"]
        for move, (n, w, p) in node["edges"].items():
            assert visits[move] == n and abs(prior[move] - p) < 1e-6
            if n:
                assert abs(q[move] - w / n) < 1e-5
        for move, child in node["children"].items():
            if not child["over"]:
                stack.append((int(search.child[number, move]), child))
    return count


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("fpu", ["zero", "parent"])
def test_one_slot_is_the_serial_search(size, fpu):
    """Trees of many games at once, of small boards where games end and superko bites, and kept from move to move."""
    go, args = Go(size), az.Args(komi=0.0, fpu=fpu, num_slots=1, c_puct=2.0)
    evaluator, num_games = HashEvaluator(go), 6
    boards = make_boards(go, num_games, 2 if size == 2 else 4)
    search = az.Search(go, [evaluator], num_games, 80, args)
    search.reset(boards)
    plain = [PlainSearch(go, evaluator, boards.pick(torch.tensor([g])), args) for g in range(num_games)]
    for num_simulations in (80, 40, 40):
        search.run(num_simulations)
        for g in range(num_games):
            if not plain[g].root["over"]:
                for _ in range(num_simulations):
                    plain[g].simulate()
                assert assert_same_tree(search, plain[g], g) > num_simulations / 8
        assert (search.visits[search.roots] > num_simulations).logical_or(boards.is_over).all()
        moves = search.visit_counts().argmax(1)
        moves = torch.where(boards.is_over, 0, moves)
        over = boards.is_over
        boards = boards.pick(torch.arange(num_games))
        boards.replace_rows(~over, go.play(boards.pick(~over), moves[~over]))
        search.advance(moves, boards, over)
        for g in range(num_games):
            if over[g]:
                continue
            child = plain[g].root["children"][int(moves[g])]
            plain[g].root = child
