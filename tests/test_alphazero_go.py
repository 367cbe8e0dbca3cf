"""AlphaZero: the search against a plain one of one worker and of two, pool, losses, self-play, matches."""

import functools
import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import fail_with, read_scalars
from scripts import copy_script, import_file, load, run_main

from algos import alphazero_go as az
from envs_shared.go import Boards, Go
from envs_shared.go_gtp import set_up

Args = functools.partial(az.Args, score_weight=0.0)  # most references here count won games alone
FixedShapes = functools.partial(Go, fixed_shapes=True)


def make_evaluator(go, sharpness=1.0):
    """Make logits and values that are fixed functions of the position, as a network's would be."""
    weights = torch.randn(9 * go.num_points, go.num_points + 2, generator=torch.Generator().manual_seed(5))

    def evaluate(boards, legal):
        planes = go.planes(boards, legal).flatten(1).to(weights.dtype)
        # Row by row, as a product of matrices may round a row otherwise if there are others
        out = torch.stack([row @ weights for row in planes]).sin() * sharpness
        return out[:, :-1], out[:, -1].sigmoid()

    return evaluate


class TwiceInARow(Go):
    """Go in which the side of a move follows no parity: black moves twice, then white twice, and so on."""

    def play(self, boards, moves):
        after = super().play(boards, moves)
        return after._replace(to_play=torch.where(after.num_moves % 4 < 2, 1, -1).to(torch.int8))


def make_boards(go, num_games, num_moves):
    torch.manual_seed(0)
    boards = go.new(num_games)
    for _ in range(num_moves):
        boards = go.play(boards, go.random_moves(boards, go.legal_moves(boards)))
    return boards


def stage(num_simulations=8, epsilon=0.0, value_coef=0.2, scores=az.puct_scores):
    return az.Stage("", 0, scores, num_simulations, value_coef, epsilon, 0.3, 1e-2)


# The search


def make_node(go, evaluate, boards, args):
    """Make a node of a plain search in Python numbers; its edges are [visits, Q, prior, child,
    pseudo-visits]."""
    if boards.is_over:
        z = az.compute_result(go.score(boards), args, go.num_points).item()  # see test_results
        return {"boards": boards, "v": z if int(boards.to_play) == 1 else 1 - z, "edges": {}}
    legal = go.legal_moves(boards)
    logits, value = evaluate(boards, legal)
    prior = logits.double().masked_fill(~legal, -math.inf).softmax(1)[0].tolist()
    first_q = value.item() if args.first_q == "value" else 0.0
    edges = {move: [0, first_q, prior[move], None, 0] for move in legal[0].nonzero()[:, 0].tolist()}
    return {"boards": boards, "v": value.item(), "edges": edges}


def choose(node, args):
    """Choose the edge of largest score, eq. 1; pseudo-visits do not count in N(s)."""
    parent_visits = 1 + sum(edge[0] for edge in node["edges"].values())

    def score(move):
        n, q, p, _, pseudo = node["edges"][move]
        return q + args.c_puct * p * math.sqrt(parent_visits) / (n + pseudo + 1)

    return max(node["edges"], key=score)


def back_up(path, leaf):
    """Update the edges of a path by eq. 2."""
    for node, move in path:
        edge = node["edges"][move]
        v = leaf["v"] if node["boards"].to_play == leaf["boards"].to_play else 1 - leaf["v"]
        edge[0] += 1
        edge[1] += (v - edge[1]) / edge[0]


def grow(go, evaluate, root, num_simulations, args):
    """Grow the tree of one game as workers do that take turns; returns how many paths collided."""
    left, slots, num_collided = num_simulations, [None] * args.num_workers, 0

    def request():
        """Find a leaf, which is pending, and then evaluated by its worker; returns its path and those that
        collided."""
        nonlocal left, num_collided
        collided = []
        for _ in range(8):
            node, path = root, []
            while node and node["edges"] and len(path) < args.max_depth:
                path.append((node, choose(node, args)))
                node = node["edges"][path[-1][1]][3]
            if node is None:
                parent, move = path[-1]
                boards = go.play(parent["boards"], torch.tensor([move]))
                node = {"boards": boards, "edges": {}}
                if boards.is_over:
                    node = make_node(go, evaluate, boards, args)
                parent["edges"][move][3] = node
            elif "v" not in node:  # it is pending
                # A pseudo-visit for each edge, if all of them at the root are at most k N(root)
                visits, pseudo = (1 + sum(edge[i] for edge in root["edges"].values()) for i in (0, 4))
                if pseudo > args.pseudo_limit * visits:
                    break
                for parent, move in path:
                    parent["edges"][move][4] += 1
                collided.append(path)
                num_collided += 1
                continue
            left -= 1
            if "v" in node:  # the end of a game needs no evaluation
                back_up(path, node)
                return None, None, collided
            return path, node, collided
        return None, None, collided

    while left or any(slots):
        for i, slot in enumerate(slots):
            if slot:
                path, leaf, collided = slot
                if leaf:
                    leaf |= make_node(go, evaluate, leaf["boards"], args)
                    back_up(path, leaf)
                for parent, move in itertools.chain(*collided):
                    parent["edges"][move][4] -= 1
            slots[i] = request() if left else None
    return num_collided


def assert_same_tree(search, game, node, number=0):
    """Compare all visits, values and priors below a node."""
    for move, (n, q, p, child, pseudo) in node["edges"].items():
        assert search.N[game, number, move] == n and pseudo == 0
        assert abs(search.Q[game, number, move] - q) < 1e-9 and abs(search.P[game, number, move] - p) < 1e-9
        next_number = int(search.child[game, number, move])
        assert (next_number == 0) == (child is None)
        if child:
            assert abs(search.value[game, next_number] - child["v"]) < 1e-9
            assert_same_tree(search, game, child, next_number)


TWO = {"num_workers": 2}
SEARCHES = [
    (Go, 2, 1.0, {}),
    (TwiceInARow, 3, 1.0, {"score_weight": 0.4}),
    (FixedShapes, 3, 1.0, {"score_weight": 0.4}),
    (FixedShapes, 5, 1e6, {"first_q": "zero", "max_depth": 50}),  # one good move each: long paths
    (Go, 5, 1e6, {"max_depth": 3}),
    (FixedShapes, 3, 1.0, {"max_depth": 2}),
    (Go, 2, 1.0, TWO | {"pseudo_limit": 0.5}),
    (TwiceInARow, 3, 1.0, TWO | {"pseudo_limit": 0.3, "first_q": "zero"}),
    # The prior is sharp: paths of two workers end at one leaf again and again, and the limit decides
    (Go, 3, 6.0, TWO | {"pseudo_limit": 0.1}),
    (Go, 3, 6.0, TWO | {"pseudo_limit": 0.1, "max_depth": 2}),
]


@pytest.mark.parametrize(("make_go", "size", "sharpness", "options"), SEARCHES)
def test_a_search_is_the_plain_one(make_go, size, sharpness, options, request):
    """For several games at once, on small boards where games end and superko bites, and if continued.

    With fixed shapes, rows without work leave nothing behind. Trees begin again in used memory.
    """
    # Some scores are so close that float32 may order them in another way
    torch.set_default_dtype(torch.float64)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    go, args = make_go(size), Args(komi=0.0, c_puct=1.5, **options)
    evaluator, boards = make_evaluator(go, sharpness), make_boards(go, 6, 2 if size == 2 else 4)
    search = az.Search(go, evaluator, make_boards(go, 6, 1), 120, args)
    search.run(120)
    search.start(boards)
    roots = [make_node(go, evaluator, boards.pick(torch.tensor([game])), args) for game in range(6)]
    num_collided = 0
    for num_simulations in (3, 77, 40):
        search.run(num_simulations)
        for game, root in enumerate(roots):
            num_collided += grow(go, evaluator, root, num_simulations, args)
            assert_same_tree(search, game, root)
            edges = root["edges"]
            n = sum(edge[0] for edge in edges.values())
            visits = [edges.get(move, [0])[0] / n for move in range(go.num_actions)]
            assert search.policy()[game].tolist() == pytest.approx(visits)
            value = (root["v"] + sum(edge[0] * edge[1] for edge in edges.values())) / (1 + n)
            assert search.root_values()[game].item() == pytest.approx(value, abs=1e-9)
            best = max(edges, key=lambda move: edges[move][:2])  # ties by the values
            assert search.best_moves()[game] == best
    assert torch.equal(search.num_nodes, 1 + (search.child > 0).sum((1, 2)))
    assert num_collided > 20 if "num_workers" in options else num_collided == 0
    with pytest.raises(ValueError, match="more simulations than the trees have room for"):
        search.run(1)


def test_scores_are_classic_ucb():
    q, n, p = torch.tensor([0.2, 0.5, 0.0]), torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.8, 0.1, 0.2])
    found = az.ucb_scores(q, n, p, torch.tensor([12.0]), 1.5).tolist()
    assert found[0] == pytest.approx(0.2 + 1.5 * (math.log(12) / 3) ** 0.5)
    assert found[2] > found[1] > 1e5  # unvisited moves come first, by their prior


def test_two_workers_evaluate_at_the_same_time_in_threads_of_their_own():
    """Each thread has the number of threads that the main one has; all threads are gone after the search."""
    go, running, seen, have_met = Go(3), set(), [], threading.Event()
    evaluate, main_thread, num_before = make_evaluator(go), threading.get_ident(), threading.active_count()

    def watch(boards, legal):
        thread = threading.get_ident()
        running.add(thread)
        if len(running) == 2:
            have_met.set()
        elif thread != main_thread:
            have_met.wait(0.2)  # until they have met once; a worker that found no leaf does not come
        seen.append((thread, torch.get_num_threads()))
        running.remove(thread)
        return evaluate(boards, legal)

    az.Search(go, watch, go.new(4), 40, Args(pseudo_limit=0.5, num_workers=2)).run(40)
    threads, num_threads = zip(*seen, strict=True)
    assert threads[0] == main_thread and len({*threads[1:]} - {main_thread}) == len({*threads[1:]}) == 2
    assert have_met.is_set() and {*num_threads} == {torch.get_num_threads()}
    assert threading.active_count() == num_before


def test_noise_is_of_a_dirichlet_distribution():
    """One of three entries has mean 1/3 and variance (1/3)(2/3)/(3 alpha + 1). It changes first moves."""
    torch.manual_seed(0)
    prior = torch.tensor([0.0, 0.5, 0.3, 0.2]).expand(20_000, 4)
    noise = az.dirichlet_noise(prior, 0.3)
    assert (noise.sum(1) - 1).abs().max() < 1e-5 and not noise[:, 0].any()  # illegal
    assert noise[:, 1:].mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert noise[:, 1:].var(0).tolist() == pytest.approx([2 / 9 / 1.9] * 3, abs=0.005)
    assert torch.isfinite(az.dirichlet_noise(prior[:, 1:], 1e-3)).all()
    search = az.Search(Go(5), make_evaluator(Go(5)), Go(5).new(40), 1, Args(noise_weight=1.5))
    search.add_noise()
    search.run(1)
    first = search.N[:, 0].argmax(1)
    assert torch.equal(first, search.P[:, 0].argmax(1)) and len(first.unique()) > 8


@pytest.mark.parametrize(("to_play", "expected"), [(1, [0, 1, 1]), (-1, [1, 0, 0])])
def test_values_of_random_games(to_play, expected):
    """Black gets six points, and has none, ten of 25, or at least ten where the game takes longer."""
    go, top, bottom = Go(5), [0, 1, 0, *[1] * 7], [*[-1] * 5, 0, -1, 0, *[-1] * 7]
    points = [-1] * 10 + bottom, top + bottom, top + [0] * 15
    boards = Boards(*map(torch.cat, zip(*(set_up(go, x, to_play) for x in points), strict=True)))
    _, values = az.evaluate_rollouts(go, -6.0, boards, go.legal_moves(boards))
    assert values.tolist() == expected


# Network and losses


def make_agent(size=5, **options):
    torch.manual_seed(0)
    args = Args(env_id=f"Go-{size}x{size}", **{"blocks": 2, "channels": 8, **options})
    return az.Agent(Go(size), args).eval(), args


@torch.no_grad()
def test_an_evaluator_is_the_network_in_evaluation_mode():
    """In parts, whose boards do not depend on each other, and whatever becomes of the network."""
    agent, go = make_agent()[0], Go(5)
    boards = make_boards(go, 300, 6)
    legal = go.legal_moves(boards)
    planes = go.planes(boards, legal)
    agent.train()(planes)
    evaluator, expected = az.make_evaluator(go, agent), agent.eval()(planes)
    agent.train()(planes)
    torch.testing.assert_close(evaluator(boards, legal), expected, rtol=1e-4, atol=1e-5)


def make_records(num_records, size=2, seed=0):
    """Make records whose pi is on legal moves, each with its own loss."""
    generator = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.rand, generator=generator)
    planes = rand(num_records, 9, size, size) > 0.5
    legal = rand(num_records, size**2 + 1) > 0.5
    legal[:, -1] = True
    policy = rand(num_records, size**2 + 1) * legal
    policy = (policy / policy.sum(1, keepdim=True)).half()
    q, z, loss = rand(3, num_records)
    turn = torch.arange(num_records) % 8
    return az.Records(planes, legal, policy, q, z.round(), loss, torch.zeros_like(turn), turn)


def test_losses_in_float64():
    """Compute eq. 4 to 6 by hand, and the gradient of eq. 4 in closed form."""
    records = make_records(12)
    records.policy[0] = torch.eye(5)[4].half()
    torch.manual_seed(0)
    logits, values = torch.randn(12, 5, requires_grad=True), torch.rand(12)
    found = az.alphazero_loss(lambda planes: (logits, values), records, stage())
    p = logits.detach().double().masked_fill(~records.legal, -torch.inf).softmax(1)
    policy, q, z = (x.double() for x in (records.policy, records.q, records.z))
    divergence = (policy * (policy / p).log()).nansum(1)  # 0 log 0 is 0
    error = (values - 0.3 * q - 0.7 * z) ** 2
    expected = 0.2 * error / 0.25 + 0.8 * divergence / math.log(5), divergence, error
    for name, x in zip(("loss", "policy_loss", "value_loss"), expected, strict=True):
        torch.testing.assert_close(found[name].double(), x, rtol=1e-4, atol=1e-6)
    found["policy_loss"].sum().backward()
    torch.testing.assert_close(logits.grad.double(), p * policy.sum(1, keepdim=True) - policy)


def test_results():
    score = torch.tensor([25, 3, 0, -4])
    assert az.compute_result(score, Args(komi=3.0), 25).tolist() == [1, 0.5, 0, 0]
    mixed = az.compute_result(score, Args(komi=3.0, score_weight=0.4), 25).tolist()
    assert mixed == pytest.approx([0.6 + 0.4 * 0.94, 0.5, 0.4 * (0.5 - 3 / 50), 0.4 * (0.5 - 7 / 50)])


# Pool


def test_the_pool_drops_the_smallest_losses_and_the_old():
    """As sorting does, over many epochs."""
    pool, kept = None, []
    for epoch in range(12):
        new = make_records(80, seed=epoch)
        new = new._replace(epoch=torch.full((80,), epoch), q=new.q + 100 * epoch)
        pool = az.refill_pool(pool, new, 200, epoch - 4)
        kept += zip([epoch] * 80, new.loss.tolist(), new.q.tolist(), strict=True)
        kept = sorted(kept, key=lambda r: (epoch - r[0] <= 4, r[1]))[-200:]
        found = zip(pool.epoch.tolist(), pool.loss.tolist(), pool.q.tolist(), strict=True)
        assert sorted(found) == sorted(kept)


def test_minibatches_are_those_of_the_largest_loss_and_others_at_random():
    pool = make_records(800)
    torch.manual_seed(0)
    for turn, share in itertools.product((3, 2), (0.0, 0.25, 1.0)):
        index = az.sample_pool(pool, turn, 20, share)
        assert len(index.unique()) == 20 and (pool.turn[index] == turn).all()
        rows = (pool.turn == turn).nonzero()[:, 0]
        best = rows[pool.loss[rows].argsort(descending=True)]
        num_ranked = round(20 * (1 - share))
        assert set(best[:num_ranked].tolist()) <= set(index.tolist())
    drawn = torch.cat([az.sample_pool(pool, 0, 20, 0.5) for _ in range(2000)])
    counts = torch.bincount(drawn, minlength=800)[0::8].sort(descending=True).values
    assert (counts[:10] == 2000).all()  # ranked; each of the other 90 by chance
    assert ((counts[10:] - 20000 / 90) ** 2 / (20000 / 90)).sum() < 140  # chi-squared, 89 degrees, 0.05 %
    assert len(az.sample_pool(az.pick(pool, [0, 8]), 1, 20, 0.5)) == 2  # none has the turn: any will do


def test_symmetric_records_are_what_the_turned_game_looks_like():
    """Each has the loss of its own planes, and the epoch that made it."""
    go, agent = Go(5), make_agent()[0]
    torch.manual_seed(1)
    moves, boards = [], go.new(4)
    for _ in range(12):
        moves.append(go.random_moves(boards, go.legal_moves(boards)))
        boards = go.play(boards, moves[-1])
    legal = go.legal_moves(boards)
    planes, policy = go.planes(boards, legal), torch.rand(4, 26).half()
    positions = az.Positions(planes, legal, policy, torch.arange(4.0), torch.rand(4))
    images = az.make_records(positions, agent, go, stage(), 7)
    assert (images.epoch == 7).all() and len(images.loss.unique()) == 32
    torch.testing.assert_close(images.loss, az.compute_losses(agent, images, stage()))
    assert len(set(map(tuple, go.move_images.tolist()))) == 8
    for k, symmetry in enumerate(go.move_images):
        where, again = symmetry.argsort(), go.new(4)  # move m becomes where[m]
        for move in moves:
            again = go.play(again, where[move])
        rows = slice(4 * k, 4 * k + 4)
        assert torch.equal(images.planes[rows], go.planes(again, go.legal_moves(again)))
        assert torch.equal(images.legal[rows], go.legal_moves(again))
        assert torch.equal(images.policy[rows][:, where], policy)
        assert images.q[rows].tolist() == [0, 1, 2, 3] and torch.equal(images.z[rows], positions.z)
    for position in range(4):  # no two images of it can be in one minibatch, and each has its turn
        assert sorted(images.turn[position::4].tolist()) == list(range(8))


def test_what_an_epoch_trained_on_is_ranked_again(monkeypatch):
    agent, args = make_agent(2, pool_size=400, train_fraction=0.12, batch_size=16, random_fraction=0.0)
    pool = make_records(400)
    ranked, sampled, sample = pool.loss.clone(), [], az.sample_pool
    monkeypatch.setattr(az, "sample_pool", lambda *a: sampled.append(sample(*a)) or sampled[-1])
    optimizer = torch.optim.AdamW(agent.parameters(), 1e-2)
    moves_of_bar = []
    bar = SimpleNamespace(update=moves_of_bar.append)
    metrics = az.train_epoch(agent, optimizer, pool, 3, 8, stage(), args, bar)
    assert sum(moves_of_bar) == pytest.approx(0.5) and len(moves_of_bar) == 3
    assert [int(x[0]) % 8 for x in sampled] == [0, 1, 2]  # a turn each
    index = torch.cat(sampled)
    is_new = torch.zeros(400, dtype=torch.bool).index_fill(0, index, True)
    assert torch.equal(pool.loss != ranked, is_new) and len(index.unique()) == 48
    loss = az.compute_losses(agent, pool, stage())
    torch.testing.assert_close(pool.loss[sampled[-1]], loss[sampled[-1]])
    expected = [ranked[index].mean().item(), pool.loss[index].mean().item()]  # before and after the steps
    found = [metrics["sampled_loss"].item(), metrics["sampled_loss_after"].item()]
    assert found == pytest.approx(expected, rel=1e-5)


# Self-play


def test_more_moves_than_the_game_says_are_one_line(capsys):
    go = Go(3)
    go.new = Go(3).new  # boards with room for more
    go.max_moves = 5
    games = az.SelfPlay(go, 4)
    with pytest.raises(SystemExit, match="2"):
        for _ in range(9):
            az.play_moves(games, go, None, stage(scores=None), Args())
    assert "a game takes more than its max_moves (5)" in capsys.readouterr().err


def test_records_are_the_games():
    """Compare planes, pi, Q, and the result from the mover's side with what was seen during the games.

    Whoever's turn it is, not the number of the move, says whose result is stored.
    """
    go, scores, history = TwiceInARow(3), [], [[] for _ in range(8)]
    args, games = Args(komi=0.5, num_games=8, draw_moves=0.3), az.SelfPlay(go, 8)
    search = az.Search(go, make_evaluator(go), games.boards, 12, args)
    play, num_finished = go.play, 0
    go.play = lambda *x: scores.append(go.score(boards := play(*x))) or boards
    torch.manual_seed(0)
    for _ in range(40):
        planes, sides = go.planes(games.boards, go.legal_moves(games.boards)), games.boards.to_play.tolist()
        ended, found = az.play_moves(games, go, search, stage(num_simulations=12, epsilon=0.1), args)
        assert ended.tolist() == (games.boards.num_moves == 0).nonzero()[:, 0].tolist()
        assert (search.N[:, 0].sum(1) == 12).all() and search.P[:, 0].sum(1).mean() == pytest.approx(1.25)
        expected, legal = [], search.P[:, 0] > 0
        rows = zip(planes, legal, search.policy(), search.root_values(), sides, strict=True)
        for game, row in enumerate(rows):
            history[game].append(row)
            if games.boards.num_moves[game] == 0:  # the game has ended
                z = float(scores[-1][game] > 0.5)
                expected += [(*row[:4], z if row[4] == 1 else 1 - z) for row in history[game]]
                history[game], num_finished = [], num_finished + 1
        assert len(found.z) == len(expected)
        for i, (plane, legal, policy, q, z) in enumerate(expected):
            assert torch.equal(found.planes[i], plane) and torch.equal(found.legal[i], legal)
            assert (found.policy[i] - policy).abs().max() < 1e-3
            assert found.q[i] == q and found.z[i] == z
    assert num_finished > 10


def test_moves_of_self_play():
    """Moves are random with probability epsilon, drawn from pi at first, and the best ones later."""
    go, args = Go(5), Args(komi=0.5, noise_weight=0.0)
    for epsilon, draw_moves, low, high in ((0.5, 0.0, 0.4, 0.65), (0.0, 0.0, 1, 1), (0.0, 0.33, 0.05, 0.6)):
        torch.manual_seed(0)
        games, args.draw_moves = az.SelfPlay(go, 300), draw_moves
        search = az.Search(go, make_evaluator(go, 3.0), games.boards, 20, args)
        az.play_moves(games, go, search, stage(num_simulations=20, epsilon=epsilon), args)
        policy = games.steps["policy"][:, 0]
        chosen = policy.gather(1, games.boards.last_move[:, None])[:, 0]
        assert low <= (chosen == policy.amax(1)).float().mean() <= high
    expected = policy[0].float() * 300  # as the first position of all is the same
    counts = torch.bincount(games.boards.last_move, minlength=26)
    assert ((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum() < 50
    boards = go.new(300)
    games.boards = boards._replace(num_moves=torch.full_like(boards.num_moves, 9))  # no longer early
    az.play_moves(games, go, search, stage(num_simulations=20), args)
    assert len(games.boards.last_move.unique()) == 1


TINY = (
    "--env-id Go-2x2 --num-games 4 --blocks 1 --channels 4 --pool-size 256 --batch-size 16 --eval-episodes 4"
    " --eval-interval 1 --num-epochs 5 --simulations-start 2 --simulations-end 6 --komi 1"
    " --pretrain-value-epochs 1 --pretrain-search-epochs 1"
)


def test_epochs_of_a_training(tmp_path, monkeypatch):
    """Settings go from the first to the last, and the stages of pretraining change some.

    A new kind of games begins with an empty pool, and with the records of all games that begin together: most
    of those that end first are short. An epoch adds 5 % of the pool and trains on 15 %.
    """

    def watch(name, describe):
        """Record the description of all arguments at each call of a function."""
        function, found = getattr(az, name), []
        monkeypatch.setattr(az, name, lambda *a, **k: found.append(describe(*a, **k)) or function(*a, **k))
        return found

    played = watch("collect_positions", lambda games, *x: (x[2], bool(games.boards.history.any())))
    pools = watch("refill_pool", lambda pool, new, *x: (len(pool.z) if pool else 0, new, *x))
    updates = watch("train_epoch", lambda *x, **k: (x[3], x[1].param_groups[0]["lr"], *x[5]))
    flags = "--epsilon-start 0.8 --epsilon-end 0.4 --q-weight-start 0.1 --q-weight-end 0.9"
    run_main(az, tmp_path, TINY, flags, "--learning-rate 0.01 --max-age 3 --seed 2")
    assert played == [(2, False), (2, False), (2, False), (2, True), (2, True)]
    for number, (size, new, capacity, oldest) in enumerate(pools):
        num_firsts = (new.planes[:, :2].sum((1, 2, 3)) == 0).sum()  # images of the empty board
        assert len(new.z) >= 8 * 2 and (new.epoch == number).all() and (num_firsts >= 8 * 4 or number > 2)
        assert (size > 0) == (number > 2) and (capacity, oldest) == (256, number - 3)
    assert torch.equal(pools[0][1].q, pools[0][1].z)  # of random games
    counts, rates, names, _, scores, num_simulations, coefs, epsilons, q_weights, _ = zip(*updates)
    assert counts == (3,) * 5 and names == ("random games", "search pretraining", *["self-play"] * 3)
    assert rates == pytest.approx([0.01 * (1 - 0.99 * k / 4) for k in range(5)])  # to a hundredth
    assert scores == (None, az.ucb_scores, *[az.puct_scores] * 3)
    assert num_simulations == (2, 6, 4, 5, 6)  # classic UCB tries all five moves before it chooses
    assert epsilons == pytest.approx((0.8, 0.7, 0.6, 0.5, 0.4)) and coefs == (1.0, *[0.2] * 4)
    assert q_weights == pytest.approx((0.1, 0.3, 0.5, 0.7, 0.9))


# Matches


def test_matches_are_balanced():
    """Each opening of two moves is played from both sides."""
    go, asked = Go(5), []

    def first_legal(boards):
        asked.append(boards)
        return go.legal_moves(boards).long().argmax(1)

    players = first_legal, lambda boards: torch.full_like(boards.num_moves, 25)  # who always passes
    torch.manual_seed(0)
    win_rate, margin, num_moves = az.play_match(go, players, 10, 0.5)
    assert 0.5 < win_rate <= 1 and num_moves > 40 and margin > 0
    games = asked[1]  # its second moves as black in five games, and its first ones as white
    assert games.to_play.tolist() == [1] * 5 + [-1] * 5 and games.num_moves.tolist() == [4] * 5 + [3] * 5
    assert torch.equal(games.history[:5, :3], games.history[5:, :3])
    assert az.play_match(go, players[::-1], 10, 0.5)[0] < 0.5
    win_rate, margin, _ = az.play_match(go, players, 2, 100.0)
    assert win_rate == 0.5 and 0 < margin <= 25  # white wins by komi alone


def test_evaluations_are_against_the_best_network_or_plain_mcts(monkeypatch):
    """Plain MCTS is classic UCB of one worker on won games, with random games in place of a network."""
    matches, searches, search = [], [], az.Search
    monkeypatch.setattr(az, "play_match", lambda go, *match: matches.append(match) or (0.5, 1.5, 7))
    monkeypatch.setattr(az, "Search", lambda *a, **k: searches.append(search(*a, **k)) or searches[-1])
    agent, args = make_agent(5, simulations_end=22, score_weight=1.0, num_workers=2, eval_episodes=60)
    for best in (None, agent):
        az.evaluate(Go(5), agent, args, best)
    ((ours, plain), *rest), (pair, *rest_best) = matches
    assert rest == [60, 0.5] and rest_best == [40, 0.5]
    for player, num_simulations in ((ours, 22), (pair[0], 6), (pair[1], 6), (plain, 22)):
        player(Go(5).new(2))
        assert (searches[-1].N[:, 0].sum(1) == num_simulations).all()
        assert (searches[-1].P[:, 0].sum(1) - 1).abs().max() < 1e-5  # no noise
    found = [(x.scores, x.args.score_weight, x.args.c_puct, x.args.num_workers) for x in searches]
    assert found == [(az.puct_scores, 1, 0.5, 2)] * 3 + [(az.ucb_scores, 0, 1.25, 1)]
    assert searches[-1].evaluator.func is az.evaluate_rollouts


def test_the_best_network_stays_until_another_wins_half_of_a_match(tmp_path, monkeypatch):
    """The score is the win rate in the match. best.pt has no games."""
    rates, matches = [0.1, 0.9, 0.49, 0.5, 0.2], []  # the first network has nothing to replace

    def evaluate(go, agent, args, best=None):
        if best is None:
            return {"eval/win_rate": 0.75, "eval/margin": 2.5, "eval/moves": 1}
        matches.append([x.value_head[2].bias.item() for x in (agent, best)])
        return {"eval/win_rate_best": rates[len(matches) - 1], "eval/moves": 3}

    monkeypatch.setattr(az, "evaluate", evaluate)
    path = run_main(az, tmp_path, TINY).path
    news, olds = zip(*matches, strict=True)
    assert len({*news, olds[0]}) == 6 and olds[1:] == (news[0], news[1], news[1], news[3])
    best, last = load(path / "best.pt"), load(path / "checkpoint.pt")
    kept = best["agent"], best["best"], last["best"], last["agent"]
    assert [x["value_head.2.bias"].item() for x in kept] == [news[3], news[3], news[3], news[4]]
    assert best["progress"]["iteration"] == 4 and best["progress"]["best_score"] == 0.5
    found = [last["progress"][name] for name in ("best_score", "last_score", "win_rate", "eval_steps")]
    assert found == [0.5, 0.2, 0.75, 15]
    assert "games" in last and "games" not in best


def test_each_match_has_openings_of_its_own(tmp_path, monkeypatch):
    """The match against plain MCTS too; a resumed run repeats those of the uninterrupted one."""
    seeds = []

    def evaluate(go, agent, args, best=None):
        seeds.append(torch.initial_seed())
        rates = {"eval/win_rate_best": 0.5} if best else {"eval/win_rate": 0.5}
        return rates | {"eval/moves": 3}

    monkeypatch.setattr(az, "evaluate", evaluate)
    run_main(az, tmp_path / "a", TINY)
    assert len(seeds) == len(set(seeds)) == 6
    run_main(az, tmp_path / "b", TINY, "--seed 2")
    assert not set(seeds[:6]) & set(seeds[6:])
    boards = [make_openings(seed) for seed in seeds[:2]]
    assert not torch.equal(*boards)


def make_openings(seed):
    """Return the first stones of a match on 5x5 that begins with this seed."""
    torch.manual_seed(seed)
    asked, go = [], Go(5)

    def play_pass(boards):
        asked.append(boards.stones)
        return torch.full_like(boards.num_moves, 25)

    az.play_match(go, (play_pass, play_pass), 20, 0.5)
    return asked[0]


# Settings


def test_the_learning_rate_falls_to_a_hundredth_or_stays():
    for anneal_lr, last in ((True, 4e-5), (False, 4e-3)):
        args = Args(num_epochs=11, anneal_lr=anneal_lr)
        rates = [az.get_stage(epoch, 26, args).learning_rate for epoch in (0, 5, 10)]
        assert rates == pytest.approx([4e-3, (4e-3 + last) / 2, last])


def test_stages_begin_where_the_pretraining_ends():
    for value_epochs, search_epochs, names in (
        (1, 1, ["random games", "search pretraining", "self-play"]),
        (0, 2, ["search pretraining", "search pretraining", "self-play"]),
        (0, 0, ["self-play"] * 3),
        (2, 0, ["random games", "random games", "self-play"]),
    ):
        args = Args(pretrain_value_epochs=value_epochs, pretrain_search_epochs=search_epochs)
        stages = [az.get_stage(epoch, 26, args) for epoch in range(3)]
        assert [x.name for x in stages] == names
        starts = {x.name: x.start for x in stages}
        assert all(starts[name] == names.index(name) for name in names)


def test_records_never_get_too_old_without_a_maximal_age(tmp_path, monkeypatch):
    refill, oldest = az.refill_pool, []
    monkeypatch.setattr(az, "refill_pool", lambda *x: oldest.append(x[3]) or refill(*x))
    for max_age, expected in ((0, [-5, -4, -3, -2, -1]), (2, [-2, -1, 0, 1, 2])):
        oldest.clear()
        run_main(az, tmp_path / str(max_age), TINY, f"--max-age {max_age} --eval-episodes 0")
        assert oldest == expected  # no epoch is older than 0


@torch.no_grad()
def test_a_network_in_bfloat16_computes_in_it():
    planes, found = torch.rand(3, 9, 5, 5) > 0.5, []
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        agent = make_agent(bf16=bf16)[0]
        types = []
        hook = lambda layer, x, out, types=types: types.append(out.dtype)  # noqa: E731
        agent.stem[0].register_forward_hook(hook)
        agent.value_head[0].register_forward_hook(hook)
        found.append(agent(planes))
        assert types == [dtype] * 2 and {x.dtype for x in found[-1]} == {torch.float32}
    torch.testing.assert_close(*found, atol=0.05, rtol=0.05)
    assert not torch.equal(found[0][0], found[1][0])


def test_random_games_leave_the_last_layer_of_the_policy_alone():
    """It neither learns nor decays; the next stage trains it again."""
    agent, args = make_agent(2, pool_size=400, batch_size=16)
    optimizer = torch.optim.AdamW(agent.parameters(), 1e-2, weight_decay=0.5)
    bar, pool = SimpleNamespace(update=lambda n: None), make_records(400)
    for name, is_frozen in ((az.RANDOM_GAMES, True), ("self-play", False), (az.RANDOM_GAMES, True)):
        before = {key: x.clone() for key, x in agent.state_dict().items()}
        settings = stage(value_coef=1.0 if is_frozen else 0.2)._replace(name=name)
        az.train_epoch(agent, optimizer, pool, 2, 8, settings, args, bar)
        for key, x in agent.named_parameters():
            assert torch.equal(x, before[key]) == (is_frozen and key.startswith("policy_head")), key


def test_a_game_that_ends_early_without_a_result_ends_the_run(tmp_path, capsys):
    """A copy that ends games by an edit of is_over alone gets a loss of NaN, and not a silent draw."""
    path = copy_script("alphazero_go", tmp_path / "copy") / "alphazero_go.py"
    old = "    is_over = boards.is_over\n    z = compute_result"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, old.replace("\n", " | (boards.num_moves >= 2)\n")))
    module = import_file("edited_copy", path)
    line = fail_with(capsys, module.main, [*TINY.split(), "--run-dir", str(tmp_path / "runs")])
    assert "losses/loss is nan" in line


# Several processes


def test_two_equal_processes_are_one_with_half_of_the_games_pool_and_batch(tmp_path, monkeypatch):
    """To the last bit. Sums over both are twice what one has."""
    flags = "--pretrain-value-epochs 1 --pretrain-search-epochs 1 --eval-episodes 0 --no-cuda"
    half = run_main(az, tmp_path / "one", TINY, flags, "--num-games 2 --pool-size 128 --batch-size 8").path
    with monkeypatch.context() as patch:
        patch.setattr(az, "WORLD_SIZE", 2)
        patch.setattr(az, "total", lambda x: x.mul_(2))
        patch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
        both = run_main(az, tmp_path / "two", TINY, flags).path
    one, two = (load(path / "checkpoint.pt") for path in (half, both))
    assert "games" in one and "games" not in two
    torch.testing.assert_close(two["agent"], one["agent"], rtol=0, atol=0)
    assert two["progress"]["step"] == 2 * one["progress"]["step"] > 0
    logs = [read_scalars(path) for path in (half, both)]
    for tag in ("pool/size", "pool/loss", "losses/loss", "losses/grad_norm", "losses/sampled_loss"):
        assert logs[0][tag] and [x for _, x in logs[0][tag]] == [x for _, x in logs[1][tag]], tag


@pytest.mark.slow
@pytest.mark.release
def test_the_default_run_beats_plain_search(tmp_path):
    """More seeds are in benchmark/suites/go_default.toml."""
    scalars = read_scalars(run_main(az, tmp_path, "--seed 12").path)
    assert scalars["eval/win_rate"][-1][1] >= 0.9 and len(scalars["eval/win_rate_best"]) > 2
