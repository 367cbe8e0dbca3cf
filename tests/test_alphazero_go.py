"""AlphaZero for Go: the search against a plain recursive one, its slots, the pool, the losses, the engine."""

import functools
import io
import math
import random
import shutil
import sys
import time

import pytest
import torch
from conftest import ROOT, read_result, read_scalars

from algos import alphazero_go as az
from envs_shared.go_tasks import files as go_files
from envs_shared.go_tasks import gtp, gtp_client, gtp_words
from envs_shared.go_tasks.match import (
    RolloutEvaluator,
    choose_random_moves,
    compute_elo,
    compute_interval,
    draw_openings,
    play_match,
    play_random_moves,
    score_match,
)
from envs_shared.go_tasks.rules import LEGAL_PLANE, Go

Args = functools.partial(az.Args, score_weight=0.0)  # the references here count won games alone

CPU, OPEN = torch.device("cpu"), az.OPEN


class HashEvaluator:
    """Logits and values that are fixed functions of the position, as a network's would be."""

    def __init__(self, go, sharpness=1.0):
        self.go, self.sharpness = go, sharpness
        generator = torch.Generator().manual_seed(5)
        self.weights = torch.randn(3, 9 * go.num_points, go.num_points + 2, generator=generator)

    def __call__(self, boards, legal):
        planes = self.go.planes(boards, legal).flatten(1).float()
        out = (
            planes @ self.weights[0]
        ).sin() * self.sharpness  # the matrix product of a row depends on that row alone
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

    def simulate(self, root_move=None):
        node, path = self.root, []
        while True:

            def score(m, node=node):
                n, w, p = node["edges"][m]
                return (w / n if n else node["v"]) + self.args.c_puct * math.sqrt(node["n"]) / (n + 1) * p

            move = max(node["edges"], key=score) if root_move is None or path else root_move
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


def make_boards(go, num_games, num_moves):
    return play_random_moves(go, num_games, num_moves, torch.Generator().manual_seed(0))[0]


def set_up(go, text, to_play=1):
    """Boards [1] of a picture: X black, O white, rows from the top."""
    points = torch.tensor([[".XO".index(c) for c in text.replace(" ", "")]])
    return go.set_up(torch.where(points == 2, -1, points).to(torch.int8), torch.tensor([to_play]))


def assert_same_tree(search, plain, game):
    """All visits and values below the root, node by node."""
    stack = [(int(search.roots[game]), plain.root)]
    count = 0
    while stack:
        number, node = stack.pop()
        count += 1
        visits, q, prior = (
            x[number].double() for x in (search.edge_visits, search.edge_q, search.edge_prior)
        )
        assert search.node_visits[number] == node["n"]
        for move, (n, w, p) in node["edges"].items():
            assert visits[move] == n and abs(prior[move] - p) < 1e-6
            if n:
                assert abs(q[move] - w / n) < 1e-5
        for move, child in node["children"].items():
            if not child["over"]:
                stack.append((int(search.edge_child[number, move]), child))
    return count


def test_plan_of_sequential_halving():
    """Visits of the moves of 4 in 16 and of 16 in 32 simulations; one move alone, and fewer simulations than moves."""
    for num_moves, num_simulations, expected in (
        (4, 16, [6, 6, 2, 2]),
        (16, 32, 4 * [4] + 4 * [2] + 8 * [1]),
        (1, 5, [5]),
        (2, 5, [3, 2]),
        (16, 4, 4 * [1] + 12 * [0]),
    ):
        counts = num_moves * [0]
        for visits in az.plan_halving(num_moves, num_simulations):
            counts[counts.index(visits)] += 1  # the first of those whose turn it is has the highest score
        assert counts == expected


@pytest.mark.parametrize("num_slots", [1, 2])
def test_gumbel_roots_are_the_serial_search(num_slots):
    """Eq. 8 and the search below it, against numbers of Python, on new trees and on trees that are kept."""
    go, num_games = Go(3), 8
    args = Args(komi=0.0, gumbel_moves=5, num_slots=num_slots)
    evaluator, boards = HashEvaluator(go), make_boards(go, num_games, 3)
    search = az.Search(go, [evaluator] * num_slots, num_games, 60, args)
    search.reset(boards)
    plain = [PlainSearch(go, evaluator, boards.pick(torch.tensor([g])), args) for g in range(num_games)]
    torch.manual_seed(0)
    for num_simulations in (24, 13):
        search.begin_halving(num_simulations)
        if num_slots == 2:  # its trees are others; what the plan says of the roots holds all the same
            search.run(num_simulations)
            assert (search.root_requests.sum(1) == num_simulations).all()
            counts = search.root_requests.sort(1, descending=True).values[:, :6].tolist()
            assert counts == num_games * [
                [11, 10, 1, 1, 1, 0] if num_simulations == 24 else [5, 5, 1, 1, 1, 0]
            ]
            continue
        for g in range(num_games):
            assert_gumbel_root(search, plain[g], g, num_simulations, args)
        search.run(num_simulations)
        for g in range(num_games):
            assert_same_tree(search, plain[g], g)
            edges, value = plain[g].root["edges"], plain[g].root["v"]
            logits = improve(edges, value)
            total = sum(map(math.exp, logits.values()))
            policy = search.policy()[g]
            assert policy.sum().item() == pytest.approx(1, abs=1e-5)
            for move, x in logits.items():
                assert policy[move].item() == pytest.approx(math.exp(x) / total, rel=1e-3, abs=1e-6)
            assert search.best_moves()[g] == plain[g].best


def improve(edges, value):
    """l of eq. 8 by move, for edges [N, W, P], less its largest."""
    seen = [(n, w / n, p) for n, w, p in edges.values() if n]
    mixed = value
    if seen:
        num_visits = sum(n for n, _, _ in seen)
        mean = sum(q * p for _, q, p in seen) / sum(p for _, _, p in seen)
        mixed = (value + num_visits * mean) / (1 + num_visits)
    scale = 50 + max(n for n, _, _ in edges.values())
    logits = {m: math.log(p) + scale * (w / n if n else mixed) for m, (n, w, p) in edges.items()}
    return {m: x - max(logits.values()) for m, x in logits.items()}


def assert_gumbel_root(search, plain, game, num_simulations, args):
    """Simulate `plain` as sequential halving says, and remember the move that is left."""
    noise, edges = search.gumbel[game].tolist(), plain.root["edges"]
    left, requests = min(args.gumbel_moves, len(edges)), dict.fromkeys(edges, 0)
    rounds, sent, visits = math.ceil(math.log2(left)), 0, 0
    while sent < num_simulations:
        for _ in range(max(1, num_simulations // (rounds * left))):
            for _ in range(left):
                if sent < num_simulations:
                    logits = improve(edges, plain.root["v"])
                    turn = [m for m in edges if requests[m] == visits]
                    move = max(turn, key=lambda m: noise[m] + logits[m])
                    plain.simulate(move)
                    requests[move] += 1
                    sent += 1
            visits += 1
        left = max(2, left // 2)
    logits, most = improve(edges, plain.root["v"]), max(requests.values())
    plain.best = max((m for m in edges if requests[m] == most), key=lambda m: noise[m] + logits[m])


def test_gumbel_moves_are_drawn_from_the_prior():
    """Where all values are equal, in shares of 4,000 games, by a chi-squared test with four degrees of freedom."""
    go, num_games = Go(2), 4000
    prior = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.2])

    def evaluate(boards, legal):
        return prior.log().expand(len(legal), -1), torch.full((len(legal),), 0.5)

    search = az.Search(go, [evaluate], num_games, 7, Args(komi=0.0))
    search.reset(go.new(num_games))
    torch.manual_seed(0)
    search.begin_halving(7)
    search.run(7)
    counts = torch.bincount(search.best_moves(), minlength=5)
    assert ((counts - num_games * prior) ** 2 / (num_games * prior)).sum() < 18.5  # 0.1 %
    assert torch.allclose(search.policy(), prior.expand(num_games, -1), atol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_slot_is_the_serial_search(size):
    """Trees of many games at once, of small boards where games end and superko bites, and kept from move to move."""
    go, args = Go(size), Args(komi=0.0, num_slots=1, c_puct=2.0)
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
        assert (search.node_visits[search.roots] > num_simulations).logical_or(boards.is_over).all()
        moves = search.visit_counts().argmax(1)
        moves = torch.where(boards.is_over, 0, moves)
        over = boards.is_over
        boards = boards.pick(torch.arange(num_games))
        boards.replace_rows(~over, go.play(boards.pick(~over), moves[~over]))
        search.advance(moves, boards)
        for g in range(num_games):
            if over[g]:
                continue
            child = plain[g].root["children"][int(moves[g])]
            plain[g].root = child


def test_scores_are_eq_1_and_ucb1():
    q, n, p = (
        torch.tensor([[0.2, 0.5, 0.0]]),
        torch.tensor([[3.0, 0.0, 8.0]]),
        torch.tensor([[0.5, 0.3, 0.2]]),
    )
    found = az.puct_scores(q, n, p, torch.tensor([12.0]), 1.5)[0]
    expected = [0.2 + 1.5 * 12**0.5 / 4 * 0.5, 0.5 + 1.5 * 12**0.5 * 0.3, 1.5 * 12**0.5 / 9 * 0.2]
    assert found.tolist() == pytest.approx(expected)
    at_start = az.puct_scores(q, n * 0, p, torch.tensor([0.0]), 1.5)[0]  # max(N, 1)
    assert at_start.tolist() == pytest.approx((q + 1.5 * p)[0].tolist())
    found = az.ucb1_scores(q, n, p, torch.tensor([12.0]), 1.5)[0].tolist()
    assert found[0] == pytest.approx(0.2 + 1.5 * (math.log(12) / 3) ** 0.5) and found[1] > 1e5
    n = torch.tensor([[0.0, 2.0, 0.0]])  # what was not tried comes first, by the prior and not by its place
    assert (
        az.ucb1_scores(q, n, torch.tensor([[0.1, 0.8, 0.2]]), torch.tensor([3.0]), 1.5).argmax(1).item() == 2
    )


def test_root_noise_in_both_forms():
    torch.manual_seed(0)
    prior = torch.tensor([0.0, 0.5, 0.3, 0.2]).expand(20_000, 4)
    added = az.add_dirichlet_noise(prior, 0.3, 0.25, "additive")
    mixed = az.add_dirichlet_noise(prior, 0.3, 0.25, "convex")
    assert (added.sum(1) - 1.25).abs().max() < 1e-5 and (mixed.sum(1) - 1).abs().max() < 1e-5
    assert not added[:, 0].any() and not mixed[:, 0].any()  # illegal
    noise = (added - prior)[
        :, 1:
    ] / 0.25  # a Dirichlet of three entries: mean 1/3, variance (1/3)(2/3)/(3 a + 1)
    assert noise.mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert noise.var(0).tolist() == pytest.approx([2 / 9 / 1.9] * 3, abs=0.005)
    assert (mixed - 0.75 * prior).mean(0)[1:].tolist() == pytest.approx([0.25 / 3] * 3, abs=0.01)
    assert torch.isfinite(az.add_dirichlet_noise(prior[:, 1:], 1e-3, 0.25, "convex")).all()


def test_two_slots_leave_no_pseudo_visits_and_hardly_fail_once_under_way():
    go, num_games = Go(7), 16
    args, boards = Args(komi=0.5, c_puct=2.0), make_boards(go, num_games, 8)
    search = az.Search(go, [HashEvaluator(go) for _ in range(2)], num_games, 400, args)
    search.reset(boards)
    request, finish, most, asked, sent = search.request, search.finish, [], [], []

    def watch(slot, games):
        done = request(slot, games)
        num_pseudo = search.edge_pseudo[search.roots].sum(1)
        assert (num_pseudo <= args.pseudo_limit * search.node_visits[search.roots]).all()
        assert sum(slot.num_pseudo for slot in search.slots).equal(num_pseudo)
        both = [slot.leaf[slot.games] for slot in search.slots]
        assert len(torch.cat(both).unique()) == sum(map(len, both))  # no leaf is on its way twice
        most.append(int(num_pseudo.max()))
        asked.append(len(games))
        sent.append(len(done))
        return done

    def check_finish(slot):
        finish(slot)
        if not any(len(slot.games) for slot in search.slots):
            assert not search.edge_pseudo.any()

    search.request, search.finish = watch, check_finish
    rates = []
    for num_simulations in (50, 350):
        asked.clear()
        sent.clear()
        search.run(num_simulations)
        rates.append(1 - sum(sent) / sum(asked))
        assert not search.edge_pseudo.any()
    assert (search.node_visits[search.roots] == 401).all()
    assert (search.visit_counts().sum(1) == 400).all()
    assert max(most) > 0  # there were collisions
    assert 0.1 < rates[0] < 0.25 and rates[1] < 0.02


def test_a_request_descends_a_bounded_number_of_times():
    """With a prior that leaves one move to play, each descent ends at the leaf that the other slot has."""

    def evaluate(boards, legal):
        logits = torch.full(legal.shape, -50.0)
        logits[:, -1] = 50.0  # the pass
        return logits, torch.full((len(legal),), 0.5)

    go = Go(5)
    search = az.Search(go, [evaluate] * 2, 4, 400, Args(pseudo_limit=0.5))
    search.reset(go.new(4))
    descend, num_descents, most = search.descend, [], []

    def watch(slot, games):
        num_descents.append(len(games))
        descend(slot, games)

    def watch_request(slot, games, request=search.request):
        num_descents.clear()
        sent = request(slot, games)
        most.append(len(num_descents))
        return sent

    search.descend, search.request = watch, watch_request
    search.run(200)
    assert max(most) == az.MAX_DESCENTS and (search.node_visits[search.roots] == 201).all()
    assert not search.edge_pseudo.any()


def test_subtrees_move_together():
    """Against following every node's parents to the root, for random trees with numbers that are not in use."""
    generator, num_games, num_nodes = torch.Generator().manual_seed(0), 7, 12
    none = num_games * num_nodes
    for _ in range(20):
        parent, new_root = torch.full((none + 1,), none), []
        edge_child = torch.full((none + 1, num_nodes), none, dtype=torch.int32)
        for game in range(num_games):
            first, size = game * num_nodes, int(torch.randint(2, num_nodes + 1, (), generator=generator))
            for i in range(1, size):
                parent[first + i] = first + int(torch.randint(0, i, (), generator=generator))
                edge_child[parent[first + i], i] = first + i
            if game != 3:  # begins anew
                new_root.append(first + int(torch.randint(1, size, (), generator=generator)))
        found, expected = az.move_subtrees(edge_child, torch.tensor(new_root), num_nodes), []
        for game in range(num_games):
            stay = 0
            for node in range(game * num_nodes, (game + 1) * num_nodes):
                ancestors = [node]
                while parent[ancestors[-1]] != none:
                    ancestors.append(int(parent[ancestors[-1]]))
                stays = bool(set(ancestors) & set(new_root))
                expected.append(game * num_nodes + stay if stays else none)
                stay += stays
        assert found.tolist() == [*expected, none]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_visits_add_up_after_50_moves_with_kept_trees(num_slots):
    """Eq. 2 at every node: N(s) is 1 and the visits of its edges, and those of an edge are the visits of its child."""
    go, num_games = Go(6), 3
    args = Args(num_slots=num_slots)
    search = az.Search(
        go, [HashEvaluator(go, 8.0)] * num_slots, num_games, 24, args
    )  # a sharp prior: deep trees
    boards = go.new(num_games)
    search.reset(boards)
    torch.manual_seed(0)
    was_full = False
    for _ in range(50):
        search.run(24)
        was_full |= bool((search.num_nodes > 2 * search.max_nodes // 3).any())
        nodes = (search.node_status[:-1] == OPEN).nonzero()[:, 0]
        first = search.roots[nodes // search.max_nodes]
        nodes = nodes[nodes - first < search.num_nodes[nodes // search.max_nodes]]
        assert torch.equal(search.node_visits[nodes], 1 + search.edge_visits[nodes].sum(1))
        child = search.edge_child[nodes].long()
        is_open = search.node_status[child] == OPEN
        assert torch.equal(search.node_visits[child][is_open], search.edge_visits[nodes][is_open])
        totals = search.node_value + (search.edge_visits * search.edge_q).sum(1)
        q = 1 - totals / search.node_visits  # of each node, for the side that moved there
        assert (q[child] - search.edge_q[nodes])[is_open].abs().max() < 1e-4
        moves = search.visit_counts()[:, :-1].argmax(1)
        boards = go.play(boards, moves)
        over = boards.is_over
        boards.replace_rows(over, go.new(int(over.sum())))
        search.advance(moves, boards)
    assert was_full


def test_without_room_for_pseudo_visits_two_slots_are_the_serial_search():
    """k = 0: whoever collides waits; the other slot's leaf differs from what a serial search would take, or nothing."""
    go, args = Go(5), Args(komi=0.5, pseudo_limit=0.0)
    boards, evaluator, counts, num_failed = make_boards(Go(5), 8, 4), HashEvaluator(Go(5)), [], []
    for num_slots in (1, 2):
        search = az.Search(go, [evaluator] * num_slots, 8, 300, args)
        search.reset(boards)

        def watch(slot, games, request=search.request):
            sent = request(slot, games)
            num_failed.append(len(games) - len(sent))
            return sent

        search.request = watch
        search.run(300)
        counts.append(search.visit_counts())
    assert sum(num_failed) > 0
    assert torch.equal(*counts)  # a second request without pseudo visits always runs into the first


def test_two_slots_stay_close_to_the_serial_search():
    go, args = Go(7), Args(komi=0.5, c_puct=1.25)
    boards, evaluator, counts = make_boards(Go(7), 16, 8), HashEvaluator(Go(7)), []
    for num_slots in (1, 2):
        search = az.Search(go, [evaluator] * num_slots, 16, 400, args)
        search.reset(boards)
        search.run(400)
        counts.append(search.visit_counts() / 400)
    distance = (counts[0] - counts[1]).abs().sum(1) / 2
    assert 0 < distance.mean() < 0.15  # values that are random numbers, the worst case


def test_time_and_games_that_are_over_stop_a_search():
    go = Go(5)
    boards = go.new(2)
    boards = go.play(boards, torch.tensor([25, 12]))
    boards = go.play(boards, torch.tensor([25, 25]))  # the first game is over
    search = az.Search(go, [HashEvaluator(go)], 2, 10_000, Args(komi=0.5))
    search.reset(boards)
    assert (
        search.node_value[search.roots[0]] == 0
    )  # black to move, nothing on the board, half a point of komi
    start = time.monotonic()
    search.run(10_000, start + 0.3)
    assert time.monotonic() - start < 10  # all of them take longer
    visits = search.visit_counts().sum(1)
    assert visits[0] == 0 and 10 < visits[1] < 10_000


class AreaEvaluator:
    """Perfect values where every stone on the board lives: who is ahead wins, whatever is played."""

    def __init__(self, go, komi):
        self.go, self.komi = go, komi

    def __call__(self, boards, legal):
        z = ((self.go.score(boards) - self.komi).sign() + 1) / 2
        return torch.zeros_like(legal, dtype=torch.float32), torch.where(boards.to_play == 1, z, 1 - z)


def test_a_won_game_is_not_hurried():
    """Where all moves win, ending the game at once is worth no more than going on."""
    go, komi = Go(3), -20.0
    boards = go.play(
        set_up(go, "X.X XXX .X.", -1), torch.tensor([9])
    )  # white passed: a pass of black wins at once
    search = az.Search(go, [AreaEvaluator(go, komi)], 1, 300, Args(komi=komi, num_slots=1))
    search.reset(boards)
    search.run(300)
    is_legal = search.edge_prior[0] > 0
    counts, q = search.edge_visits[0, is_legal], search.edge_q[0, is_legal]
    assert len(counts) == 4 and (q == 1).all() and counts.tolist() == [75] * 4  # equal priors, equal visits


def test_score_weight_prefers_larger_wins():
    """White's last stone is in atari: passing wins by less than capturing it."""
    go = Go(3)
    boards = go.play(set_up(go, "XX. X.X XXO", -1), torch.tensor([9]))
    visits = []
    for score_weight in (0.0, 0.9):
        args = Args(komi=0.5, num_slots=1, score_weight=score_weight)
        search = az.Search(go, [AreaEvaluator(go, 0.5)], 1, 200, args)
        search.reset(boards)
        assert search.go.score(search.boards) > 0
        search.run(200)
        visits.append(search.visit_counts()[0, 9] / 200)
    assert visits[1] < visits[0]


EYE_OF_THREE = ".X.XX XXXXX OOOOO O...O OOOOO"  # white lives or dies at C2, black lives


@pytest.mark.parametrize(
    ("text", "to_play", "komi", "move", "num_games", "num_simulations", "num_slots"),
    [
        (EYE_OF_THREE, 1, 0.5, 17, 1, 100, 1),
        (EYE_OF_THREE, -1, 0.5, 17, 1, 100, 2),
        ("... ... ...", 1, 8.5, 4, 16, 100, 2),  # the centre, and only it, wins the board
    ],
)
def test_forced_wins_are_found(text, to_play, komi, move, num_games, num_simulations, num_slots):
    """The only moves that win, for searches that know nothing but the rules and the results of random games.

    On the empty board one search in five still prefers another move after 400 simulations: 16 of them vote.
    """
    go = Go(len(text.split()))
    evaluators = [RolloutEvaluator(go, komi, k) for k in range(num_slots)]
    search = az.Search(go, evaluators, num_games, num_simulations, Args(komi=komi), scores=az.ucb1_scores)
    search.reset(set_up(go, text, to_play).pick(torch.zeros(num_games, dtype=torch.int64)))
    search.run(num_simulations)
    assert int(search.visit_counts().sum(0).argmax()) == move


def make_agent(size=5, **options):
    """A network whose batch norms have statistics of their own."""
    torch.manual_seed(0)
    args = Args(**{"blocks": 2, "channels": 8, **options})
    agent = az.Agent(size, args)
    for _ in range(3):
        agent.train()(torch.rand(64, 9, size, size) > 0.5)
    return agent.eval(), args


def test_folded_network_is_the_network():
    agent, args = make_agent()
    planes = torch.rand(32, 9, 5, 5) > 0.5
    with torch.no_grad():
        expected = agent(planes)
        folded = az.make_network(agent, args)
        for x, y in zip(folded(planes), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        assert (agent.train()(planes)[0] - expected[0]).abs().max() > 1e-3  # the statistics matter
        args.bf16 = True
        for x, y in zip(az.make_network(agent, args)(planes), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0.1, atol=0.05)
            assert x.dtype == torch.float32


@pytest.mark.slow
def test_compiled_network_searches_alike():
    counts, go = [], Go(5)
    for is_compiled in (False, True):
        agent, args = make_agent(compile=is_compiled)
        network = az.make_network(agent, args)
        if is_compiled:
            network.compile(dynamic=True)
        search = az.Search(go, az.make_evaluators(network, go, 70, args), 70, 16, args)
        search.reset(make_boards(go, 70, 4))
        search.run(16)
        counts.append(search.visit_counts())
    assert (counts[0] - counts[1]).abs().sum() <= 0.01 * counts[0].sum()


def test_losses_in_float64():
    """Eq. 4 to 7 by hand, and the gradient of the policy loss in closed form."""
    torch.manual_seed(0)
    logits = torch.randn(6, 10, requires_grad=True)
    legal = torch.rand(6, 10) > 0.4
    legal[:, -1] = True
    visits = torch.rand(6, 10) * legal
    visits /= visits.sum(1, keepdim=True)
    visits[0] = torch.eye(10)[9]
    value, target = torch.rand(6), torch.rand(6)
    policy_loss, value_loss, kl = az.compute_losses(logits, value, legal, visits, target)
    for i in range(6):
        x = [math.exp(a) for a, ok in zip(logits[i].tolist(), legal[i], strict=True) if ok]
        p = [a / sum(x) for a in x]
        pi = [a for a, ok in zip(visits[i].tolist(), legal[i], strict=True) if ok]
        assert policy_loss[i].item() == pytest.approx(
            -sum(a * math.log(b) for a, b in zip(pi, p, strict=True)), rel=1e-5
        )
        divergence = sum(a * math.log(a / b) for a, b in zip(pi, p, strict=True) if a > 0)
        assert kl[i].item() == pytest.approx(divergence, rel=1e-4, abs=1e-6)
        assert value_loss[i].item() == pytest.approx((value[i].item() - target[i].item()) ** 2, rel=1e-5)
    policy_loss.sum().backward()
    softmax = logits.detach().masked_fill(~legal, -torch.inf).softmax(1)
    torch.testing.assert_close(logits.grad, softmax - visits)
    blank = az.mix_losses(torch.tensor(10.0).log(), torch.tensor(0.25), 10, 0.2)
    assert blank.item() == pytest.approx(1.0)  # uniform policy, value 1/2: 1 whatever the weights
    assert az.mix_losses(torch.tensor(1.0), torch.tensor(0.0), 10, 0.2).item() == pytest.approx(
        0.8 / math.log(10)
    )


def test_losses_of_records_in_float64():
    """Each of the three by hand, with the target of eq. 5 and the legal moves that the planes hold."""
    torch.manual_seed(0)
    logits, value, owner = torch.randn(12, 5), torch.rand(12), 2 * torch.rand(12, 4) - 1
    planes = torch.rand(12, 9, 2, 2) > 0.5
    legal = torch.cat((planes[:, LEGAL_PLANE].flatten(1), torch.ones(12, 1, dtype=torch.bool)), 1)
    visits = torch.rand(12, 5).half() * legal
    owners = torch.randint(-1, 2, (12, 4)).to(torch.int8)
    records = az.Records(planes, visits, torch.rand(12), torch.rand(12), owners)
    policy_loss, value_loss, kl, owner_loss = az.record_losses(lambda x: (logits, value, owner), records, 0.3)
    target = 0.3 * records.q.double() + 0.7 * records.z.double()
    torch.testing.assert_close(value_loss.double(), (value.double() - target) ** 2, rtol=1e-5, atol=1e-7)
    log_prob = logits.double().masked_fill(~legal, -torch.inf).log_softmax(1).masked_fill(~legal, 0.0)
    expected = -(visits.double() * log_prob).sum(1)
    torch.testing.assert_close(policy_loss.double(), expected, rtol=1e-5, atol=1e-6)
    entropy = torch.special.entr(visits.double()).sum(1)
    torch.testing.assert_close(kl.double(), expected - entropy, rtol=1e-5, atol=1e-6)
    expected = (owner.double() - owners.double()).square().mean(1)
    torch.testing.assert_close(owner_loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_stages_and_schedules_of_a_training(tmp_path, monkeypatch):
    """What each epoch is played and trained with: from the first value to the last, and what the stages change."""
    played, searched, trained, sizes = [], [], [], []
    play, play_moves = az.SelfPlay.play, az.SelfPlay.play_moves
    train_minibatch, add = az.train_minibatch, az.Pool.add

    def watch_play(self, evaluators, num_positions, num_simulations, epsilon, epoch):
        played.append((epoch, num_positions, num_simulations, round(epsilon, 6)))
        return play(self, evaluators, num_positions, num_simulations, epsilon, epoch)

    def watch_moves(self, search, num_simulations, epsilon):
        searched.append((search and search.compute_scores, num_simulations))
        return play_moves(self, search, num_simulations, epsilon)

    def watch_training(agent, optimizer, pool, args, q_weight, value_coef):
        now = (round(q_weight, 6), value_coef, round(float(optimizer.param_groups[0]["lr"]), 8))
        trained.append(now)
        return train_minibatch(agent, optimizer, pool, args, q_weight, value_coef)

    def watch_pool(self, images, loss, epoch, args):
        sizes.append(self.size)
        add(self, images, loss, epoch, args)

    monkeypatch.setattr(az.SelfPlay, "play", watch_play)
    monkeypatch.setattr(az.SelfPlay, "play_moves", watch_moves)
    monkeypatch.setattr(az, "train_minibatch", watch_training)
    monkeypatch.setattr(az.Pool, "add", watch_pool)
    flags = "--env-id Go-2x2 --num-games 4 --blocks 1 --channels 4 --pool-size 256 --batch-size 16 --eval-episodes 2"
    flags += " --eval-interval 100 --num-epochs 5 --pretrain-value-epochs 1 --pretrain-search-epochs 1"
    flags += " --simulations-start 2 --simulations-end 6 --epsilon-start 0.8 --epsilon-end 0.4"
    flags += " --q-weight-start 0.1 --q-weight-end 0.9 --value-coef 0.3 --learning-rate 0.01"
    az.main([*flags.split(), "--run-dir", str(tmp_path)])
    # 5 % of the pool are new, in images of eight, and 15 % are trained on
    assert played == [(0, 2, 2, 0.8), (1, 2, 3, 0.7), (2, 2, 4, 0.6), (3, 2, 5, 0.5), (4, 2, 6, 0.4)]
    kinds = [(None, 2), (az.ucb1_scores, 6), (az.puct_scores, 4), (az.puct_scores, 5), (az.puct_scores, 6)]
    assert list(dict.fromkeys(searched)) == kinds  # classic UCB tries all five moves before it chooses
    epochs = list(dict.fromkeys(trained))
    assert [trained.count(row) for row in epochs] == [math.ceil(0.15 * 256 / 16)] * 5
    q_weights, value_coefs, learning_rates = zip(*epochs, strict=True)
    assert q_weights == (0.1, 0.3, 0.5, 0.7, 0.9)
    assert value_coefs == (1.0, 0.3, 0.3, 0.3, 0.3)  # the value alone from random games
    assert learning_rates == pytest.approx([0.01 * (1 - 0.99 * k / 5) for k in range(5)], abs=1e-7)
    assert sizes[:3] == [0, 0, 0] and 0 < sizes[3] < sizes[4]  # a new kind of games begins with an empty pool


def test_results():
    score = torch.tensor([25, 3, 0, -4])
    assert az.compute_result(score, 3.0, 0.0, 25).tolist() == [1, 0.5, 0, 0]
    mixed = az.compute_result(score, 3.0, 0.4, 25).tolist()
    assert mixed == pytest.approx([0.6 + 0.4 * 0.94, 0.5, 0.4 * (0.5 - 3 / 50), 0.4 * (0.5 - 7 / 50)])
    assert (
        compute_elo(0.75, 10**6) == pytest.approx(400 * math.log10(3), abs=0.01) and compute_elo(1.0, 10) > 0
    )
    assert compute_interval(0.5, 100) == pytest.approx(
        (0.4038, 0.5962), abs=1e-4
    )  # Wilson's, by R's prop.test
    assert compute_interval(1.0, 20)[0] == pytest.approx(0.8389, abs=1e-4)


def test_images_are_what_the_turned_game_looks_like():
    go, turned = Go(5), Go(5)
    torch.manual_seed(1)
    moves = []
    boards = go.new(4)
    for _ in range(12):
        moves.append(choose_random_moves(go, boards, go.legal_moves(boards), fill_eyes=False))
        boards = go.play(boards, moves[-1])
    legal = go.legal_moves(boards)
    visits = torch.rand(4, 26).half()
    planes = go.planes(boards, legal)
    images = az.make_images(
        az.Records(planes, visits, torch.arange(4.0), torch.rand(4), go.owner(boards)), go.symmetries
    )
    assert go.owner(boards).unique().tolist() == [-1, 0, 1]
    assert len(set(map(tuple, go.symmetries.tolist()))) == 8
    for k, symmetry in enumerate(go.symmetries):
        where = torch.empty(26, dtype=torch.int64).scatter_(
            0, symmetry, torch.arange(26)
        )  # move m becomes where[m]
        again = turned.new(4)
        for move in moves:
            again = turned.play(again, where[move])
        rows = slice(4 * k, 4 * k + 4)
        assert torch.equal(images.planes[rows], turned.planes(again, turned.legal_moves(again)))
        assert torch.equal(images.visits[rows][:, where], visits)
        assert torch.equal(images.owner[rows], turned.owner(again))
        assert images.q[rows].tolist() == [0, 1, 2, 3]


def make_images(num_positions, start=0):
    number = torch.arange(start, start + num_positions).float()
    planes = torch.zeros(8 * num_positions, 9, 2, 2, dtype=torch.bool)
    visits, owner = (
        torch.zeros(8 * num_positions, 5).half(),
        torch.zeros(8 * num_positions, 4, dtype=torch.int8),
    )
    return az.Records(planes, visits, number.repeat(8), number.repeat(8), owner)


def test_pool_evicts_the_smallest_losses_and_the_old():
    """Against sorting, over many epochs."""
    torch.manual_seed(0)
    pool, kept = az.Pool(200, 2, CPU), []
    for epoch in range(12):
        images, loss = make_images(10, 10 * epoch), torch.rand(80)
        pool.add(images, loss, epoch, Args(max_age=4))
        kept += [(epoch, x, q) for x, q in zip(loss.tolist(), images.q.tolist(), strict=True)]
        kept = sorted(kept, key=lambda r: (epoch - r[0] <= 4, r[1]))[-200:]
        assert pool.size == len(kept)
        got = sorted(zip(pool.epoch.tolist(), pool.loss.tolist(), pool.records.q.tolist(), strict=True))[
            -pool.size :
        ]
        assert got == sorted(kept)
        assert (pool.position[: pool.size] == pool.records.q[: pool.size]).all()  # images share their number
    oldest_first = az.Pool(200, 2, CPU)
    for epoch in range(4):
        oldest_first.add(make_images(10), torch.rand(80), epoch, Args(replay_order="uniform"))
    assert sorted(oldest_first.epoch.tolist()) == [1] * 40 + [2] * 80 + [3] * 80


def test_pool_samples_in_its_order():
    torch.manual_seed(0)
    pool = az.Pool(800, 2, CPU)
    loss = torch.rand(800)
    pool.add(make_images(100), loss, 0, Args())
    args = Args(replay_order="loss", loss_clamp=2.0, max_reuse=2)
    index = pool.sample(20, args)
    assert len(index) == 20 == len(pool.position[index].unique())
    best = pool.loss.view(8, 100).amax(0).topk(20).values  # the largest image of each position
    assert pool.loss[index].sort(descending=True).values.tolist() == pytest.approx(best.tolist(), abs=1e-5)
    pool.num_uses[index] = 2  # used up
    assert not set(index.tolist()) & set(pool.sample(20, args).tolist())
    args.loss_clamp = 0.3  # most are equal now: any of them
    drawn = torch.cat([pool.sample(20, args) for _ in range(50)])
    assert len(drawn.unique()) > 300 and (pool.loss[drawn] > 0.29).all()
    pool.num_uses[:] = 0
    counts = {}
    for order in ("mix", "uniform"):
        args.replay_order, args.loss_clamp = order, 0.5
        drawn = torch.cat([pool.sample(10, args) for _ in range(4000)])
        counts[order] = torch.bincount(drawn, minlength=800) / len(drawn)
        pool.num_uses[5:] = 2  # those that are left come first, and used ones fill up
        index = pool.sample(10, args)
        assert len(index) == 10 and set(range(5)) & set(index.tolist())
        pool.num_uses[:] = 0
    assert (counts["uniform"] * 800 - 1).abs().mean() < 0.15
    share = pool.loss.clamp(max=0.5)
    expected = 0.5 * share / share.sum() + 0.5 / 800
    assert (counts["mix"] - expected).abs().sum() < 0.15 < (counts["uniform"] - expected).abs().sum()


def test_what_a_minibatch_trained_on_counts_as_used_and_is_ranked_anew():
    torch.manual_seed(0)
    agent, args = make_agent(2, batch_size=16, max_reuse=1)
    pool = az.Pool(400, 2, CPU)
    images = make_images(50)
    images.planes.bernoulli_()
    images.visits[:, -1] = 1  # pi passes, which is always legal
    pool.add(images._replace(q=images.q / 50, z=1 - images.z / 50), torch.rand(400), 0, args)
    optimizer = torch.optim.AdamW(agent.parameters(), 1e-2)
    ranked = pool.loss.clone()
    for k in range(1, 4):
        metrics = az.train_minibatch(agent, optimizer, pool, args, 0.3, 0.2)
        loss = az.rank_losses(agent.eval(), pool.records, 0.3, 0.2)
        is_new = pool.loss != ranked
        assert is_new.sum() == 16 and torch.allclose(pool.loss[is_new], loss[is_new], atol=1e-6)
        assert metrics[-2:].tolist() == pytest.approx(
            [ranked[is_new].mean().item(), loss[is_new].mean().item()]
        )
        assert (
            pool.num_uses[is_new].tolist() == [1] * 16 and pool.num_uses.sum() == 16 * k
        )  # never one a second time
        ranked = pool.loss.clone()


def test_pool_survives_a_checkpoint():
    pool = az.Pool(100, 2, CPU)
    pool.add(make_images(10), torch.rand(80), 3, Args())
    for capacity in (100, 120):
        again = az.Pool(capacity, 2, CPU)
        again.load_state_dict(pool.state_dict())
        assert again.size == 80 and torch.equal(again.loss[:80], pool.loss[:80])
        assert torch.equal(again.records.q[:80], pool.records.q[:80]) and again.num_positions == 10


@pytest.mark.parametrize("root_selection", ["gumbel", "puct"])
def test_self_play_records_are_the_games(root_selection):
    """Every record against the game replayed from its moves: inputs, result from the mover's side, visits, owners."""
    go = Go(3)
    torch.manual_seed(0)
    args = Args(komi=0.5, num_games=8, root_selection=root_selection)
    play, played = az.SelfPlay(go, 8, args), [[] for _ in range(8)]
    search = az.Search(go, [HashEvaluator(go)], 8, 12, args)
    search.reset(play.boards)
    advance, num_finished = search.advance, 0

    def watch(moves, boards):
        for game, move, visits in zip(played, moves.tolist(), search.policy(), strict=True):
            game.append((move, visits))
        advance(moves, boards)

    search.advance = watch
    for _ in range(60):
        found = play.play_moves(search, 12, 0.0)
        assert (search.boards.num_moves == play.boards.num_moves).all()
        expected = []
        for game in range(8):
            if play.boards.num_moves[game] > 0:
                continue
            boards, rows = go.new(1), []
            for move, visits in played[game]:
                assert not boards.is_over
                rows.append((go.planes(boards, go.legal_moves(boards))[0], visits, int(boards.to_play)))
                boards = go.play(boards, torch.tensor([move]))
            assert boards.is_over
            black_won = go.score(boards).item() > 0.5
            for planes, visits, to_play in rows:
                z = float(black_won == (to_play == 1))
                expected.append((planes, visits, z, to_play * go.owner(boards)[0]))
            played[game], num_finished = [], num_finished + 1
        assert len(found.z) == len(expected)
        for i, (planes, visits, z, owner) in enumerate(expected):
            assert torch.equal(found.planes[i], planes) and found.z[i] == z
            assert torch.equal(found.owner[i], owner)
            assert (found.visits[i] - visits).abs().max() < 1e-3
            assert 0 <= found.q[i] <= 1
    assert num_finished > 20


def test_moves_of_self_play():
    """Epsilon-greedy and by temperature, and random games."""
    go = Go(5)
    torch.manual_seed(0)
    for epsilon, low, high in ((0.5, 0.4, 0.65), (1e-6, 1.0, 1.0), (0.0, 0.05, 0.6)):
        args = Args(komi=0.5, noise_weight=0.0, root_selection="puct")
        play = az.SelfPlay(go, 200, args)
        search = az.Search(go, [HashEvaluator(go, 3.0)], 200, 20, args)
        search.reset(play.boards)
        play.play_moves(search, 20, epsilon)
        chosen = play.visits[:, 0].gather(1, play.boards.last_move[:, None])
        assert low <= (chosen[:, 0] == play.visits[:, 0].amax(1)).float().mean() <= high
    play.boards = play.boards._replace(num_moves=torch.full_like(play.boards.num_moves, 9))  # no longer early
    search.reset(play.boards)
    play.play_moves(search, 20, 0.0)
    chosen = play.visits[:, 9].gather(1, play.boards.last_move.clamp(min=0)[:, None])
    assert (chosen[:, 0] == play.visits[:, 9].amax(1))[play.boards.num_moves > 0].all()
    play = az.SelfPlay(go, 8, Args(komi=0.5))
    records = [play.play_moves(None, 0, 0.0) for _ in range(60)]
    q, z = torch.cat([r.q for r in records]), torch.cat([r.z for r in records])
    assert len(z) > 100 and torch.equal(q, z) and set(z.tolist()) == {0.0, 1.0}


def test_pretraining_on_values_freezes_the_policy_head():
    agent, args = make_agent()
    optimizer = torch.optim.AdamW(agent.parameters(), lr=torch.tensor(1e-2), fused=True)
    go = Go(5)
    play = az.SelfPlay(go, 8, args)
    records = az.Records(
        *map(torch.cat, zip(*(play.play_moves(None, 0, 0.0) for _ in range(60)), strict=True))
    )
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    losses = [
        az.update_network(agent.train(), optimizer, records, args, 0.0, 1.0)[1].item() for _ in range(40)
    ]
    after = agent.state_dict()
    for name in before:
        if "num_batches" not in name and "running" not in name:
            assert torch.equal(before[name], after[name]) == name.startswith("policy"), name
    assert losses[-1] < 0.7 * losses[0]


def test_matches_are_balanced_and_counted():
    go = Go(5)

    def first_legal(boards):
        return go.legal_moves(boards).long().argmax(1)

    def always_pass(boards):
        return torch.full_like(boards.num_moves, 25)

    match = play_match(go, (first_legal, always_pass), 10, 0.5, 0)
    assert match["is_first_black"] == [True] * 5 + [False] * 5
    for i, (game, margin) in enumerate(zip(match["games"], match["margins"], strict=True)):
        boards = go.new(1)
        for move in game:
            assert go.legal_moves(boards)[0, move]
            boards = go.play(boards, torch.tensor([move]))
        assert boards.is_over and go.score(boards).item() - 0.5 == margin
        assert (
            game[:2] == match["games"][i % 5][:2] and 25 not in game[:2]
        )  # the same opening from both sides
        assert all(move == 25 for move in game[(3 if i < 5 else 2) :: 2])
    own = [m if black else -m for m, black in zip(match["margins"], match["is_first_black"], strict=True)]
    assert match["win_rate"] == sum(m > 0 for m in own) / 10 and match["margin"] == pytest.approx(
        sum(own) / 10
    )


def test_games_of_a_match_count_once():
    scores = score_match(
        [[1], [1], [1], [2], [2]], [2.0, 2.0, 2.0, 0.0, -3.0], [True, True, False, True, False]
    )
    assert scores["distinct_games"] == 4 and scores["win_rate"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert scores["win_rate_black"] == 0.75 and scores["win_rate_white"] == 0.5
    assert scores["margin"] == pytest.approx((2 - 2 + 0 + 3) / 4)
    assert (scores["win_rate_low"], scores["win_rate_high"]) == compute_interval(0.625, 4)
    assert "win_rate_white" not in score_match([[1]], [1.0], [True])


def test_openings_differ_as_long_as_there_are_others():
    """Of the 25 * 24 pairs of moves on 5x5, (600 + 4 * 20) / 8 = 85 are not images of each other (Burnside's lemma)."""
    go = Go(5)
    images = go.symmetries.tolist()
    for seed in range(3):
        _, moves = draw_openings(go, 60, 2, torch.Generator().manual_seed(seed))
        pairs = list(zip(*(x.tolist() for x in moves), strict=True))
        assert len(set(pairs)) == 60
        assert len({frozenset((s[a], s[b]) for s in images) for a, b in pairs}) == 60
    _, moves = draw_openings(go, 200, 2, torch.Generator().manual_seed(0))
    pairs = list(zip(*(x.tolist() for x in moves), strict=True))
    assert (
        len(set(pairs)) == 200 and len({frozenset((s[a], s[b]) for s in images) for a, b in pairs[:85]}) == 85
    )
    _, moves = draw_openings(go, 60, 1, torch.Generator().manual_seed(0))
    assert len(set(moves[0].tolist())) == 25
    boards, moves = draw_openings(go, 3, 0, torch.Generator().manual_seed(0))
    assert moves == [] and boards.num_moves.tolist() == [0, 0, 0]


def test_rollouts_are_fair():
    """On the empty board random games know no colour; a board of black stones with two eyes is black's."""
    go = Go(5)
    boards = go.new(400)
    _, values = RolloutEvaluator(go, 0.0, 0)(boards, go.legal_moves(boards))
    assert 0.45 < values.mean() < 0.75  # the first move is worth something
    boards = set_up(go, ".X.XX XXXXX XXXXX X...X XXXXX", -1)
    assert RolloutEvaluator(go, 0.5, 0)(boards, go.legal_moves(boards))[1].item() == 0.0


# ---- Play ------------------------------------------------------------------------------------------------------------


def make_engine(size=5, komi=0.5):
    agent, args = make_agent(size, env_id=f"Go-{size}x{size}", simulations_end=16, komi=komi)
    thinker = az.Thinker(az.make_network(agent, args), args, CPU)
    return gtp.Engine(thinker.think, "alphazero_go", size, komi, io.StringIO())


def ask(engine, *lines):
    """Answers to commands, without the blank lines."""
    engine.out.seek(0)
    engine.out.truncate()
    for line in lines:
        engine.answer(line)
    text = engine.out.getvalue()
    assert text == "" or text.endswith("\n\n")
    return text.strip("\n").split("\n\n")


def test_gtp_answers():
    engine = make_engine()
    assert ask(engine, "protocol_version", "12 name", "version") == ["= 2", "=12 alphazero_go", "= 1"]
    assert ask(engine, "known_command genmove", "known_command sing") == ["= true", "= false"]
    names = ask(engine, "list_commands")[0][2:].split("\n")
    wanted = "protocol_version name version known_command list_commands boardsize clear_board komi play genmove undo"
    wanted += " showboard final_score time_settings time_left loadsgf quit lz-analyze"
    assert set(wanted.split()) <= set(names)
    assert ask(engine, "  # a comment", "", "\t4\tkomi\t6.5 # another", "boardsize 5") == ["=4", "="]
    assert ask(engine, "play b C3", "play WHITE d4", "play b pass") == ["=", "=", "="]
    board = ask(engine, "showboard")[0].splitlines()
    assert board[3] == " 4 . . . O . 4" and board[4] == " 3 . . X . . 3"
    assert ask(engine, "final_score") == ["= W+6.5"] and ask(engine, "komi -3", "final_score") == [
        "=",
        "= B+3",
    ]
    assert ask(engine, "undo", "undo", "undo", "undo") == ["=", "=", "=", "? cannot undo"]
    assert ask(engine, "clear_board", "showboard")[1].count(".") == 25
    for wrong, answer in (
        ("play b Z9", "invalid vertex"),
        ("play b I5", "invalid vertex"),
        ("play green C3", "'green' is no colour"),
        ("play b", "wrong number of arguments"),
        ("genmove", "wrong number of arguments"),
        ("boardsize 19", "unacceptable size"),
        ("boardsize five", "'five' is no number"),
        ("komi nan", "'nan' is no number"),
        ("sing", "unknown command"),
        ("7", "unknown command"),
        ("quit now", "wrong number of arguments"),
        (f"time_left b 10 1{400 * '0'}", f"'1{400 * '0'}' is no number"),
        ("lz-genmove_analyze green", "unknown argument 'green'"),
        ("lz-analyze b w", "one colour and one interval at most"),
        ("lz-analyze interval", "'' is no number"),
        ("komi 1_0", "'1_0' is no number"),
        ("boardsize \u0665", "'\u0665' is no number"),  # an Arabic five
        ("play b A01", "invalid vertex"),
        ("fixed_handicap 2", "invalid number of stones"),
        ("set_free_handicap A1 A1", "bad vertex list"),
        ("set_free_handicap A1 pass", "bad vertex list"),
        ("loadsgf /nowhere.sgf", "cannot load file"),
        ("time_settings -1 0 0", "times are not negative"),
        ("lz-analyze often", "unknown argument 'often'"),
    ):
        (found,) = ask(engine, wrong)
        assert found == (f"?7 {answer}" if wrong == "7" else f"? {answer}"), (wrong, found)
    assert ask(engine, "play b C3", "play w C3") == ["=", "? illegal move"]
    assert int(engine.boards.to_play) == -1 and len(engine.positions) == 2  # what was wrong changed nothing


def test_gtp_a_turn_left_out_is_forgotten_by_undo():
    engine = make_engine()
    ask(engine, "play b A1", "play b B1", "undo")
    assert int(engine.boards.to_play) == -1  # as after the first move
    ask(engine, "genmove b", "undo")
    assert int(engine.boards.to_play) == -1 and int(engine.boards.num_moves) == 1
    assert ask(engine, "lz-genmove_analyze 10 b")[0].count("play ") == 1 and int(engine.boards.to_play) == -1


def test_gtp_goes_on_beyond_the_moves_that_a_search_knows():
    """Both sides fill and capture on 2 x 2 points and pass in between: 8 moves are the search's limit."""
    engine, reference = make_engine(2), Go(2)
    history = []
    for i in range(20):
        wanted = ("A1", "B2", "A2", "B1", "pass") if i % 3 else ("pass",)
        vertex = next(vertex for vertex in wanted if ask(engine, f"play {'bw'[i % 2]} {vertex}") == ["="])
        stones = tuple(engine.boards.stones[0, reference.cells].tolist())
        assert vertex == "pass" or stones not in history  # superko, over all moves
        history.append(stones)
    assert int(engine.boards.num_moves) == 20 and ask(engine, "genmove b") == ["= pass"]
    assert ask(engine, "final_score")[0].startswith("= ")


def test_gtp_handicap():
    engine = make_engine(9)
    assert ask(engine, "fixed_handicap 5") == ["= C3 G7 C7 G3 E5"] and int(engine.boards.to_play) == -1
    assert ask(engine, "fixed_handicap 2") == ["? board not empty"]
    assert ask(engine, "play w E4", "clear_board", "fixed_handicap 7") == ["=", "=", "= C3 G7 C7 G3 C5 G5 E5"]
    assert ask(engine, "clear_board", "set_free_handicap a1 B2 j9", "showboard")[1] == "="
    assert ask(engine, "showboard")[0].count("X") == 3 and ask(engine, "genmove w")[0].startswith("= ")
    assert make_engine(8).answer("fixed_handicap 5") and ask(make_engine(7), "fixed_handicap 4") == [
        "= C3 E5 C5 E3"
    ]


def test_gtp_keeps_the_rules():
    engine = make_engine(3)
    for move in ("b A2", "w C3", "b B1"):
        assert ask(engine, f"play {move}") == ["="]
    assert ask(engine, "play w A1") == ["? illegal move"]  # suicide
    assert ask(engine, "play w pass", "play b pass") == ["=", "="]
    assert ask(engine, "genmove w", "undo") == ["= pass", "="] and engine.boards.is_over  # the game is over
    assert ask(engine, "genmove w") == ["= pass"]
    assert ask(engine, "play b C1") == ["="]  # but may be taken up again
    vertex = ask(engine, "genmove b")[0]  # twice in a row
    assert vertex.startswith("= ") and int(engine.boards.to_play) == -1


def test_gtp_plays_legal_games_and_goes_on_with_its_tree():
    engine = make_engine()
    engine.think.__self__.args.simulations_end = 80
    searches = []
    think = engine.think

    def watch(positions, *rest):
        analysis = think(positions, *rest)
        searches.append((sum(analysis.visits), think.__self__.search))
        return analysis

    engine.think = watch
    for i in range(12):
        answer = ask(engine, f"genmove {'bw'[i % 2]}")[0]
        assert answer.startswith("= ")
    assert len({id(search) for _, search in searches}) == 1 and max(n for n, _ in searches) > 80
    ask(engine, "undo", "undo")
    ask(engine, "genmove b")
    assert searches[-1][1] is not searches[0][1] and searches[-1][0] == 80
    other = -int(engine.boards.to_play)  # a side whose turn it is not
    engine.search(other, math.inf, 10)
    engine.search(other, math.inf, 10)
    assert searches[-1][1] is searches[-2][1] and searches[-1][0] == searches[-2][0] + 10


def test_gtp_searches_what_is_on_the_board():
    """Stones and side to move at the root of the tree, whatever was played, searched and taken back before."""
    engine, rng = make_engine(3), random.Random(1)
    thinker, num_kept = engine.think.__self__, 0
    thinker.args.simulations_end = 16
    for _ in range(80):
        move = f"{rng.choice('bw')} {rng.choice('ABC')}{rng.randint(1, 3)}"
        ask(
            engine,
            rng.choice([f"play {move}", f"play {move[0]} pass", f"genmove {move[0]}", "undo", "komi 2"]),
        )
        stone, kept = rng.choice([1, -1]), getattr(thinker, "search", None)
        if not engine.can_search():
            ask(engine, "clear_board")
            continue
        engine.search(stone, math.inf, 8)
        num_kept += thinker.search is kept
        root = thinker.search.node_boards.pick(thinker.search.roots)
        boards = engine.look_from(stone)
        assert int(root.to_play) == stone and torch.equal(root.stones, boards.stones)
        assert int(root.num_passes) == int(boards.num_passes)
    assert num_kept > 10


def test_the_best_network_stays_until_another_wins_half_of_a_match(tmp_path, monkeypatch):
    """Matches on the way are against the best network, and Elo is counted from its own."""
    rates, matches = [0.1, 0.9, 0.49, 0.5, 0.2], []  # the first one has nothing to replace

    def make_player(go, evaluators, args, scores=None):
        network = getattr(evaluators[0], "network", None)  # plain MCTS has none
        return network and network.value_head[2].bias.item(), args.simulations_end

    def play_match(go, players, num_games, komi, seed):
        matches.append((players, num_games, seed))
        scores = dict.fromkeys(az.MATCH_SCORES, 0.5) | {"win_rate": (rates + 4 * [0.5])[len(matches) - 1]}
        return scores | {"distinct_games": 4, "games": [[0, 1], [2]]}

    monkeypatch.setattr(az, "make_player", make_player)
    monkeypatch.setattr(az, "play_match", play_match)
    flags = "--env-id Go-2x2 --num-games 4 --blocks 1 --channels 4 --pool-size 256 --batch-size 16 --eval-episodes 4"
    flags += " --eval-interval 1 --num-epochs 5 --simulations-start 2 --simulations-end 6"
    az.main([*flags.split(), "--run-dir", str(tmp_path)])
    news, olds = zip(*(players for players, _, _ in matches[:5]), strict=True)
    assert len({*news, olds[0]}) == 6 and olds[1:] == (news[0], news[1], news[1], news[3])
    assert {sims for _, sims in (*news, *olds)} == {2} and {n for _, n, _ in matches} == {4}  # a quarter of 6
    assert len({seed for _, _, seed in matches[:5]}) == 5  # other openings each time
    finals = [players[0][0] for players, _, _ in matches[5:]]
    assert finals == [news[4][0]] * 2 + [news[3][0]] * 2  # the last network, and the best one
    (path,) = tmp_path.iterdir()
    best, last = (torch.load(path / name, weights_only=True) for name in ("best.pt", "checkpoint.pt"))
    gains = [compute_elo(rate, 4) for rate in rates]
    elos = [sum(gains[k] for k in summed) for summed in ([0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4])]
    assert best["elo"] == last["elo"] == pytest.approx(elos[3]) and (
        best["iteration"],
        last["iteration"],
    ) == (4, 5)
    assert [value for _, value in read_scalars(path)["eval/elo"]] == pytest.approx(elos, rel=1e-4)


def test_plain_mcts_tries_moves_in_no_order_and_plays_to_win(monkeypatch):
    agent, args = make_agent(
        5, simulations_end=20, score_weight=1.0, eval_episodes=2
    )  # fewer than there are moves
    players, searches, search = [], [], az.Search
    monkeypatch.setattr(az, "play_match", lambda go, pair, *rest: players.append(pair) or {"win_rate": 0.5})
    monkeypatch.setattr(az, "Search", lambda *a, **k: searches.append(search(*a, **k)) or searches[-1])
    az.evaluate(az.make_network(agent, args), args, CPU)
    moves = players[1][1](az.Go(5).new(64))
    assert len(moves.unique()) > 8 and moves.max() > 19
    q = searches[-1].edge_q[searches[-1].roots]
    assert (searches[-1].visit_counts() <= 1).all() and q.gather(
        1, moves[:, None]
    ).mean() > 0.9  # the won ones
    assert searches[-1].args.score_weight == 0  # and that is all that counts, as in the rollouts


def test_a_first_network_that_loses_is_the_first_again_after_a_kill(tmp_path, monkeypatch):
    """A run that died between its first best.pt and its next checkpoint.pt, against one that did not."""
    flags = "--env-id Go-2x2 --num-games 2 --pool-size 128 --batch-size 8 --num-epochs 2 --eval-interval 1 --blocks 1"
    flags += (
        " --channels 4 --simulations-start 4 --simulations-end 4 --eval-episodes 2 --pretrain-value-epochs 0"
    )
    flags = [*flags.split(), "--pretrain-search-epochs", "0", "--komi", "1"]
    wins = []

    def compete(network, reference, go, args, progress):
        wins.append(0.3 if progress["iteration"] == 1 else 0.4)
        if progress["iteration"] == 2 and wins.count(0.4) == 2:
            raise RuntimeError("killed")
        scores = {"eval/win_rate": wins[-1], "eval/distinct_games": 2, "eval/moves": 4}
        return scores | {"eval/elo": progress["elo"] + az.compute_elo(wins[-1], 2)}

    monkeypatch.setattr(az, "compete", compete)
    az.main([*flags, "--run-dir", str(tmp_path / "whole")])
    with pytest.raises(RuntimeError, match="killed"):
        az.main([*flags, "--run-dir", str(tmp_path / "cut")])
    (cut,) = (tmp_path / "cut").iterdir()
    assert [az.load_checkpoint(cut / name)["iteration"] for name in ("checkpoint.pt", "best.pt")] == [0, 1]
    az.main(["--resume", str(cut / "checkpoint.pt")])
    ends = [az.load_checkpoint(path / "checkpoint.pt") for path in (*(tmp_path / "whole").iterdir(), cut)]
    assert ends[0]["elo"] == ends[1]["elo"] < 0 and ends[0]["eval_steps"] == ends[1]["eval_steps"] == 8
    for name, x in ends[0]["reference"].items():
        torch.testing.assert_close(ends[1]["reference"][name], x, rtol=0, atol=0)


def test_gtp_thinks_no_longer_than_the_clock_allows():
    engine = make_engine()
    engine.think.__self__.args.simulations_end = 100_000
    assert engine.budget(1) == math.inf
    ask(engine, "time_settings 4 0 0")
    assert engine.budget(1) == pytest.approx(0.8 * 4 / 12 - 0.1)
    start = time.monotonic()
    ask(engine, "genmove b")
    seconds = time.monotonic() - start
    assert seconds < 10  # all of them take minutes
    assert 4 - seconds <= engine.time_left[1][0] < 3.95  # its clock runs where nobody sends time_left
    ask(engine, "time_left w 3 2")
    assert engine.budget(-1) == pytest.approx(0.8 * 3 / 2 - 0.1)
    ask(engine, "time_left w 0 0")
    assert engine.budget(-1) == 0.05
    ask(engine, "time_settings 0 20 5")  # five moves in 20 seconds
    assert engine.budget(1) == pytest.approx(0.8 * 4 - 0.1)
    engine.spend(1, 8.0)
    assert engine.time_left == {1: (12.0, 4), -1: (20.0, 5)}
    for _ in range(4):
        engine.spend(1, 2.0)
    assert engine.time_left[1] == (20.0, 5)  # the next five moves
    ask(engine, "time_settings 5 20 2")
    engine.spend(-1, 4.0)
    assert engine.time_left[-1] == (1.0, 0)
    engine.spend(-1, 4.0)
    assert engine.time_left[-1] == (20.0, 2)  # main time is over
    ask(engine, "time_settings 0 0 0", "time_left b 6 3")  # a clock that nobody has announced
    assert engine.budget(1) == pytest.approx(0.8 * 2 - 0.1) and engine.budget(-1) == math.inf
    ask(engine, "time_settings 0 1 0")  # by the protocol: no limits
    assert engine.budget(1) == math.inf


def test_gtp_analysis():
    engine = make_engine()
    ask(engine, "play b C3")
    engine.answer("lz-genmove_analyze w 10")
    text = engine.out.getvalue().split("=\n")[-1].splitlines()
    assert text[0].startswith("info move ") and " pv " in text[0] and text[1].startswith("play ")
    first = text[0].split(" info ")[0].split()
    fields = dict(zip(first[1::2], first[2::2], strict=False))
    assert fields["move"] == text[1].split()[1] == first[first.index("pv") + 1] and fields["order"] == "0"
    assert 0 <= int(fields["winrate"]) <= 10_000 and int(fields["visits"]) > 0

    def slow_lines(interval):
        yield f"3 lz-analyze b {interval}\n"
        time.sleep(1.0)
        yield "name\n"

    for interval in (10, 10_000):  # analyses until the next line comes, which is heard at once
        engine.out.seek(0)
        engine.out.truncate()
        start = time.monotonic()
        engine.serve(slow_lines(interval))
        seconds = time.monotonic() - start
        assert seconds < 30
        analysis, name = engine.out.getvalue().split("\n\n")[:2]
        most = 100 * seconds / interval  # an interval is in hundredths of a second
        assert min(1, int(most)) <= analysis.count("\ninfo move ") <= most
        assert analysis.startswith("=3") and name == "= alphazero_go"


def test_gtp_resigns_where_it_is_told_to():
    engine = make_engine()
    assert ask(engine, "genmove b")[0] != "= resign"  # never, by default
    engine.resign_below = 1.0
    before = engine.positions[:]
    assert ask(engine, "genmove w") == ["= resign"] and engine.positions == before
    assert ask(engine, "lz-genmove_analyze w")[0].endswith("play resign")


def test_gtp_quit_ends_an_analysis_at_once():
    engine = make_engine()
    asked = []

    def lines():
        yield "lz-analyze 10000"
        time.sleep(0.5)
        asked.append(time.monotonic())
        yield "quit"

    engine.serve(lines())
    assert (
        time.monotonic() - asked[0] < 10
    )  # a slice of search, and no wait for the next line of the analysis


def test_gtp_analysis_of_a_full_tree_waits(monkeypatch):
    monkeypatch.setattr(az, "MAX_TREE", 30)
    engine = make_engine()

    def lines():
        yield "lz-analyze 20"
        time.sleep(1.0)
        yield "quit"

    start = time.monotonic()
    engine.serve(lines())
    assert 1 <= engine.out.getvalue().count("info move C3 ") <= (time.monotonic() - start) / 0.2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_gtp_without_time_plays_by_the_prior_and_survives_broken_input():
    engine = make_engine()
    ask(engine, "play b A5")
    engine.think.__self__.search = None

    def think(positions, komi, until, num_simulations):
        prior = torch.rand(26, generator=torch.Generator().manual_seed(0)).tolist()
        prior[0] = 0.0  # taken
        return gtp.Analysis([0.0] * 26, [0.0] * 26, prior, {})

    engine.think = think
    best = max(range(26), key=think(0, 0, 0, 0).prior.__getitem__)
    assert ask(engine, "genmove w")[0] == f"= {go_files.format_vertex(best, 5)}"

    def broken():
        yield "name"
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    engine.out.truncate(0)
    engine.serve(broken())  # ends, and answers what was asked alone
    assert engine.out.getvalue().strip("\0") == "= alphazero_go\n\n"
    time.sleep(0.1)


def test_sgf_there_and_back(tmp_path):
    moves = [12, 25, 0, 24, 7]
    text = go_files.write_sgf(moves, 5, 0.5, 3.5, "a]b", "c\\d")
    path = tmp_path / "game.sgf"
    path.write_text(text)
    assert "PB[a\\]b]" in text and "PW[c\\\\d]" in text and "RE[B+3.5]" in text
    game = go_files.read_sgf(path)
    assert game["moves"] == [(1, 12), (-1, 25), (1, 0), (-1, 24), (1, 7)]
    assert (game["size"], game["komi"], game["setup"], game["to_play"]) == (5, 0.5, [], None)
    engine = make_engine()
    assert ask(engine, f"loadsgf {path}") == ["= white"] and int(engine.boards.num_moves) == 5
    assert ask(engine, f"loadsgf {path} 3") == ["= black"] and int(engine.boards.num_moves) == 2
    # As other programs write: variations, comments, moves set up, lower-case letters in names, tt for the pass
    path.write_text(
        "(;GM[1]FF[3]AB[aa:ab][cc]SiZe[5]\n C[a [b\\] c]AW[dd];W[tt] ;B [ba](;W[ee];B[ed])(;W[eb]))"
    )
    game = go_files.read_sgf(path)
    assert game["setup"] == [(1, 0), (1, 5), (1, 12), (-1, 18)] and game["moves"] == [
        (-1, 25),
        (1, 1),
        (-1, 24),
        (1, 19),
    ]
    engine.komi = 1.5
    assert ask(engine, f"loadsgf {path}") == ["= white"] and engine.komi == 1.5  # the file does not say
    for text, colour in (
        ("AB[aa]PL[B]KM[2]", "black"),
        ("AB[aa]KM[]", "white"),
        ("AB[aa]AW[ee]KM[2,0]", "black"),
    ):
        path.write_text(f"(;SZ[5]{text})")
        assert ask(engine, f"loadsgf {path}") == [f"= {colour}"] and engine.komi == 2
    path.write_text("(;SZ[5]AW[dd:cc])")
    assert ask(engine, f"loadsgf {path}", "showboard")[1].count("O") == 4
    for wrong in (
        *("", "no sgf", "(;SZ[5];B[zz])", "(;SZ[x])", "(;SZ[9];B[aa])", "(;SZ[5];B[aa];W[aa])", "(;SZ[99])"),
        *(
            "(;SZ[5]AW[aa]AB[ab][ba])",
            "(;SZ[5]AW[aa:ee])",
            "(;SZ[5];B[aa];AW[bb])",
            "(;SZ[5]AB[ff])",
        ),
    ):
        path.write_text(wrong)
        before = engine.positions
        assert ask(engine, f"loadsgf {path}")[0].startswith("? ") and engine.positions is before


def test_vertices():
    for size in (5, 19):
        for move in range(size * size + 1):
            assert go_files.parse_vertex(go_files.format_vertex(move, size).lower(), size) == move
    assert go_files.format_vertex(0, 19) == "A19" and go_files.format_vertex(8, 19) == "J19"  # no column I
    for wrong in ("A0", "A6", "F1", "", "11", "I1"):
        with pytest.raises(ValueError):
            go_files.parse_vertex(wrong, 5)


gnugo = shutil.which("gnugo") or shutil.which("/usr/games/gnugo")
GNUGO = f"{gnugo} --mode gtp --chinese-rules --positional-superko --capture-all-dead --never-resign --level"


def play_game(black, white, size: int, komi: float, opening: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """A game of two Clients, or whatever has their `send`, under our rules: its moves and black's margin over komi.

    `opening` holds the first moves, black's first. Raises gtp.GtpError where a program plays an illegal move.
    """
    go, moves, players = Go(size), [], (black, white)
    boards = go.new(1)
    for player in players:
        for command in (f"boardsize {size}", "clear_board", f"komi {komi:g}"):
            player.send(command)
    while not boards.is_over:
        turn = len(moves) % 2
        colour = "bw"[turn]
        is_opening = len(moves) < len(opening)
        vertex = (
            go_files.format_vertex(opening[len(moves)], size)
            if is_opening
            else players[turn].send(f"genmove {colour}")
        )
        if vertex.lower() == "resign":
            return moves, float((1 - 2 * turn) * -size * size)
        move = gtp_words.parse_move(vertex, size)
        if not go.legal_moves(boards)[0, move]:
            raise gtp.GtpError(
                f"{vertex} is illegal after {[go_files.format_vertex(m, size) for m in moves]}"
            )
        boards = go.play(boards, torch.tensor([move]))
        for player in players if is_opening else (players[1 - turn],):
            player.send(f"play {colour} {vertex}")
        moves.append(move)
    return moves, go.score(boards).item() - komi


@pytest.mark.skipif(gnugo is None, reason="GNU Go is not installed: apt install gnugo")
def test_games_against_gnugo(tmp_path):
    """Whole games between two programs over GTP: every move legal for both, and both count the same score.

    Where a network that knows nothing passes too early, GNU Go takes dead stones off before it counts.
    """
    agent, args = make_agent(simulations_end=16)
    checkpoint = tmp_path / "checkpoint.pt"
    az.save_checkpoint(checkpoint, args, {}, {"agent": agent})
    command = f"{sys.executable} {ROOT / 'algos' / 'alphazero_go.py'} --gtp {checkpoint}"
    num_compared = 0
    with gtp_client.Client(command) as mine, gtp_client.Client(f"{GNUGO} 1 --seed 1") as other:
        for players in ((mine, other), (other, mine)):
            moves, margin = play_game(*players, 5, 0.5, opening=(12,))
            assert len(moves) > 4
            assert mine.send("final_score") == go_files.format_score(margin)
            if other.send("final_status_list dead") == "":
                assert other.send("final_score") == go_files.format_score(margin)
                num_compared += 1
            assert (
                mine.send("showboard").count("X") == other.send("showboard").count("X") - 1
            )  # its caption has one
        assert num_compared > 0
        with pytest.raises(gtp.GtpError, match="illegal move"):
            mine.send("clear_board")
            mine.send("play b A1")
            mine.send("play w A1")
        assert mine.send("quit") == ""


def test_bad_settings_are_one_line_to_play_with(tmp_path, capsys):
    torch.save({"script": "ppo", "args": {}}, tmp_path / "other.pt")
    torch.save({"script": "alphazero_go", "args": {}, "agent": {}}, tmp_path / "old.pt")
    agent, args = make_agent()
    az.save_checkpoint(tmp_path / "good.pt", args, {}, {"agent": agent})
    for flags, message in (
        (["--gtp", str(tmp_path / "other.pt")], "a checkpoint of ppo.py"),
        (["--evaluate", str(tmp_path / "old.pt")], "old.pt: its network has no owners of points"),
        (["--gtp", "a", "--evaluate", "b"], "exclude each other"),
        (["--gtp", str(tmp_path / "good.pt"), "--score-weight", "0.2"], "good.pt was trained with 0.0"),
        (["--env-id", "Go-1x1"], "--env-id Go-1x1: Go-2x2 to Go-19x19"),
        (["--env-id", "Go-9x8"], "--env-id"),
        (["--env-id", "Chess"], "--env-id"),
        (["--pool-size", "100"], "--pool-size"),
        (["--pseudo-limit", "1.9"], "--pseudo-limit"),
        (["--noise-weight", "1.5"], "--noise-weight"),
        (["--komi", "99"], "--komi"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--generate-fraction", "inf"], "--generate-fraction inf: not a number above 0"),
        (["--seed", str(2**64)], "--seed"),
    ):
        with pytest.raises(SystemExit) as error:
            az.main([*flags, "--run-dir", str(tmp_path / "runs")])
        assert error.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert message in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.release
def test_the_default_run_beats_plain_search(run_script, tmp_path):
    """More seeds are in benchmark/suites/go_default.toml."""
    run = run_script("alphazero_go", "--seed", 12, "--run-dir", tmp_path, timeout=1800)
    assert run.returncode == 0, run.stderr
    path, result = read_result(tmp_path)
    metrics = result["metrics"]
    assert metrics["eval/win_rate_random"] >= 0.99 and metrics["eval/win_rate_mcts"] >= 0.7
    elo = [value for _, value in read_scalars(path)["eval/elo"]]
    assert len(elo) > 2 and elo[0] > 0 and elo[-1] > elo[0]
    assert metrics["eval/distinct_games_mcts"] >= 95
