"""AlphaZero for Go: the search against a plain recursive one, its workers, the pool, the losses, self-play."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import read_scalars

from algos import alphazero_go as az
from envs_shared.go import LEGAL_PLANE, Go
from envs_shared.go_gtp import set_up

Args = functools.partial(az.Args, score_weight=0.0)  # the references here count won games alone
CPU = torch.device("cpu")


class HashEvaluator:
    """Logits and values that are fixed functions of the position, as a network's would be."""

    def __init__(self, go, sharpness=1.0):
        self.go, self.sharpness = go, sharpness
        generator = torch.Generator().manual_seed(5)
        self.weights = torch.randn(9 * go.num_points, go.num_points + 2, generator=generator)

    def __call__(self, boards, legal):
        planes = self.go.planes(boards, legal).flatten(1).to(self.weights.dtype)
        # Row by row, as a product of matrices may round a row otherwise if there are others
        out = torch.stack([row @ self.weights for row in planes]).sin() * self.sharpness
        return out[:, :-1], out[:, -1].sigmoid()


def make_search(go, evaluator, boards, num_simulations, args, scores=az.puct_scores, num_workers=1):
    workers = [az.Worker(evaluator, CPU) for _ in range(num_workers)]
    return az.Search(go, workers, boards, num_simulations, args, scores)


class PlainSearch:
    """One game, one leaf at a time, as nested dictionaries of Python numbers in float64: eq. 1 to 3 to the letter."""

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

            def score(m, node=node):
                n, w, p = node["edges"][m]
                return (w / n if n else node["v"]) + self.args.c_puct * math.sqrt(node["n"]) / (n + 1) * p

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


def make_boards(go, num_games, num_moves):
    torch.manual_seed(0)
    boards = go.new(num_games)
    for _ in range(num_moves):
        boards = go.play(boards, go.draw_moves(boards, go.legal_moves(boards)))
    return boards


def draw(go, text, to_play=1):
    """Boards [1] of a picture: X black, O white, rows from the top."""
    return set_up(go, [{".": 0, "X": 1, "O": -1}[c] for c in text.replace(" ", "")], to_play)


def assert_same_tree(search, plain, game):
    """All visits, values and priors below the root, node by node; returns the number of nodes."""
    stack, count = [(0, plain.root)], 0
    while stack:
        number, node = stack.pop()
        count += 1
        visits, q, prior = (x[game, number].double() for x in (search.N, search.Q, search.P))
        assert 1 + visits.sum() == node["n"] and abs(search.value[game, number] - node["v"]) < 1e-6
        for move, (n, w, p) in node["edges"].items():
            assert visits[move] == n and abs(prior[move] - p) < 1e-6
            assert abs(q[move] - (w / n if n else node["v"])) < 1e-5
        for move, child in node["children"].items():
            if not child["over"]:
                stack.append((int(search.child[game, number, move]), child))
    return count


@pytest.fixture
def dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, torch.float32), (3, torch.float32), (5, torch.float32), (9, torch.float64)],
    indirect=["dtype"],
)
def test_one_worker_is_the_serial_search(size, dtype):
    """Trees of many games at once, of small boards where games end and superko bites; a search may be continued.

    With 82 moves some scores are so close that float32 orders them in another way.
    """
    go, args = Go(size), Args(komi=0.0, c_puct=2.0)
    evaluator, num_games = HashEvaluator(go), 6
    boards = make_boards(go, num_games, 2 if size == 2 else 4)
    search = make_search(go, evaluator, boards, 120, args)
    plain = [PlainSearch(go, evaluator, boards.pick(torch.tensor([g])), args) for g in range(num_games)]
    for num_simulations in (80, 40):
        search.run(num_simulations)
        for g in range(num_games):
            for _ in range(num_simulations):
                plain[g].simulate()
            assert assert_same_tree(search, plain[g], g) > num_simulations / 8
    assert torch.equal(search.N[:, 0].sum(1), torch.full((num_games,), 120.0))
    roots = [p.root for p in plain]
    totals = [p["v"] + sum(w for _, w, _ in p["edges"].values()) for p in roots]
    assert search.root_values().tolist() == pytest.approx(
        [t / p["n"] for t, p in zip(totals, roots, strict=True)], abs=1e-5
    )
    for g, root in enumerate(roots):
        policy = {m: n / 120 for m, (n, _, _) in root["edges"].items()}
        assert search.policy()[g].tolist() == pytest.approx([policy.get(m, 0) for m in range(size**2 + 1)])
        most = max(n for n, _, _ in root["edges"].values())
        best = max((m for m, e in root["edges"].items() if e[0] == most), key=lambda m: root["edges"][m][1])
        assert search.best_moves()[g] == best
    search.run(10**6)  # no tree has room for more nodes
    assert (search.num_nodes <= 121).all()


def test_moves_without_visits_may_begin_at_zero():
    """As in the source: then moves that were tried are preferred, as nearly all values are larger."""
    go, shares = Go(5), []
    for first_q in ("value", "zero"):
        search = make_search(go, HashEvaluator(go), go.new(4), 60, Args(first_q=first_q))
        legal = search.P[:, 0] > 0
        start = search.value[:, :1].expand(-1, 26) if first_q == "value" else torch.zeros(4, 26)
        assert torch.equal(search.Q[:, 0][legal], start[legal])
        search.run(60)
        shares.append((search.N[:, 0] > 0).float().mean())
        assert search.root_values().tolist() == pytest.approx([0.5] * 4, abs=0.2)
    assert shares[1] < 0.7 * shares[0]


def test_scores_are_eq_1_and_classic_ucb():
    q, n, p = torch.tensor([0.2, 0.5, 0.0]), torch.tensor([3.0, 0.0, 8.0]), torch.tensor([0.5, 0.3, 0.2])
    found = az.puct_scores(q, n, p, torch.tensor([12.0]), 1.5)
    expected = [0.2 + 1.5 * 12**0.5 / 4 * 0.5, 0.5 + 1.5 * 12**0.5 * 0.3, 1.5 * 12**0.5 / 9 * 0.2]
    assert found.tolist() == pytest.approx(expected)
    found = az.ucb_scores(q, n, p, torch.tensor([12.0]), 1.5).tolist()
    assert found[0] == pytest.approx(0.2 + 1.5 * (math.log(12) / 3) ** 0.5) and found[1] > 1e5
    n = torch.tensor([0.0, 2.0, 0.0])  # what was not tried comes first, by the prior and not by its place
    assert az.ucb_scores(q, n, torch.tensor([0.1, 0.8, 0.2]), torch.tensor([3.0]), 1.5).argmax() == 2


def test_noise_is_of_a_dirichlet_distribution_and_added():
    torch.manual_seed(0)
    prior = torch.tensor([0.0, 0.5, 0.3, 0.2]).expand(20_000, 4)
    noise = az.dirichlet_noise(prior, 0.3)
    assert (noise.sum(1) - 1).abs().max() < 1e-5 and not noise[:, 0].any()  # illegal
    # of a Dirichlet of three entries: mean 1/3, variance (1/3)(2/3)/(3 a + 1)
    assert noise[:, 1:].mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert noise[:, 1:].var(0).tolist() == pytest.approx([2 / 9 / 1.9] * 3, abs=0.005)
    assert torch.isfinite(az.dirichlet_noise(prior[:, 1:], 1e-3)).all()
    go = Go(3)
    search = make_search(go, HashEvaluator(go), go.new(50), 2, Args(noise_weight=0.25))
    before = search.P.clone()
    search.add_noise()
    assert (search.P[:, 0].sum(1) - 1.25).abs().max() < 1e-5 and not (before > search.P).any()
    assert torch.equal(search.P[:, 1:], before[:, 1:]) and (search.P[:, 0] - before[:, 0]).std(0).min() > 0.01


# Two workers


def test_two_workers_leave_no_pseudo_visits_and_hardly_fail_once_under_way():
    go, args = Go(7), Args(komi=0.5, c_puct=2.0)
    boards = make_boards(go, 16, 8)
    search = make_search(go, HashEvaluator(go), boards, 400, args, num_workers=2)
    request, finish, most, asked, sent = search.request, search.finish, [], [], []

    def watch(worker, games):
        done = request(worker, games)
        num_pseudo, num_visits = search.pseudo[:, 0].sum(1), 1 + search.N[:, 0].sum(1)
        assert (num_pseudo <= args.pseudo_limit * num_visits).all() and len(done.unique()) == len(done)
        pending = (search.status == az.PENDING).sum(1)
        assert (pending <= 2).all() and (pending[done] >= 0).all()
        edges = [e for w in search.workers for e in w.pseudo_edges]
        assert num_pseudo.sum() == sum((e[1] == 0).sum() for e in edges)
        most.append(int(num_pseudo.max()))
        asked.append(len(games))
        sent.append(len(done))
        return done

    def check_finish(worker):
        finish(worker)
        if not any(w.job or w.pseudo_edges for w in search.workers):
            assert not search.pseudo.any()

    search.request, search.finish = watch, check_finish
    rates = []
    for num_simulations in (50, 350):
        asked.clear()
        sent.clear()
        search.run(num_simulations)
        rates.append(1 - sum(sent) / sum(asked))
    search.finish(search.workers[0]), search.finish(search.workers[1])
    assert not search.pseudo.any() and (search.status != az.PENDING).all()
    assert (search.N[:, 0].sum(1) == 400).all()
    assert max(most) > 0  # there were collisions
    assert 0.05 < rates[0] < 0.3 and rates[1] < 0.02
    # N(s) is 1 and the visits of its edges, those of an edge are the visits of its child, and Q is eq. 2
    game, node, move = (search.child >= 0).nonzero(as_tuple=True)
    child = search.child[game, node, move]
    is_open = search.status[game, child] == az.OPEN
    visits = 1 + search.N.sum(2)
    assert torch.equal(search.N[game, node, move][is_open], visits[game, child][is_open])
    q = (search.value + (search.N * search.Q).sum(2)) / visits
    assert (1 - q[game, child] - search.Q[game, node, move])[is_open].abs().max() < 1e-4


def test_a_search_of_two_workers_leaves_nothing_for_the_next_one():
    """Near the ends of games a worker may only collide while the other one finds the last leaf, which is an end."""
    go, args = Go(2), Args(komi=0.5, pseudo_limit=0.5)
    workers = [az.Worker(HashEvaluator(go), CPU) for _ in range(2)]
    torch.manual_seed(3)
    for num_moves in range(60):
        boards = go.new(20)
        for _ in range(num_moves % 6):
            boards = go.play(boards, go.draw_moves(boards, go.legal_moves(boards)))
        search = az.Search(go, workers, boards, 20, args)
        search.run(20)
        assert not any(w.job or w.pseudo_edges for w in workers) and not search.pseudo.any()


def test_pseudo_visits_stay_until_the_batch_that_collided_is_backed_up():
    """On a path of passes, which the second worker comes upon; N(root) is 20, so that there may be two."""
    go = Go(5)

    def evaluate(boards, legal):
        logits = torch.full(legal.shape, -50.0)
        logits[:, -1] = 50.0
        return logits, torch.full((len(legal),), 0.5)

    search = make_search(go, evaluate, go.new(1), 40, Args(pseudo_limit=0.1), num_workers=2)
    first, second = search.workers
    games = torch.tensor([0])
    for _ in range(19):
        search.N[0, 0, 25] += 1  # as if it had been searched
    assert search.request(first, games).tolist() == [0]
    path = search.status[0] == az.PENDING
    assert search.request(second, games).tolist() == [] and search.pseudo[0, 0, 25] == 2 and path.sum() == 1
    search.finish(first)
    assert search.pseudo[0, 0, 25] == 2  # of the second worker, which has found nothing
    search.finish(second)
    assert not search.pseudo.any()


def test_a_request_descends_a_bounded_number_of_times():
    """With a prior that leaves one move to play, each descent ends at the leaf that the other worker has."""

    def evaluate(boards, legal):
        logits = torch.full(legal.shape, -50.0)
        logits[:, -1] = 50.0  # the pass
        return logits, torch.full((len(legal),), 0.5)

    go = Go(5)
    search = make_search(go, evaluate, go.new(4), 400, Args(pseudo_limit=0.5), num_workers=2)
    descend, request, num_descents, most = search.descend, search.request, [], []

    def watch_request(worker, games):
        num_descents.clear()
        sent = request(worker, games)
        most.append(len(num_descents))
        return sent

    search.descend = lambda games: num_descents.append(len(games)) or descend(games)
    search.request = watch_request
    search.run(200)
    assert max(most) == az.MAX_DESCENTS == 8 and (search.N[:, 0].sum(1) == 200).all()


def test_without_room_for_pseudo_visits_two_workers_are_the_serial_search():
    """k = 0: whoever collides waits, and a second request without pseudo visits always runs into the first."""
    go, args = Go(5), Args(komi=0.5, pseudo_limit=0.0)
    boards, evaluator, counts = make_boards(go, 8, 4), HashEvaluator(go), []
    for num_workers in (1, 2):
        search = make_search(go, evaluator, boards, 200, args, num_workers=num_workers)
        search.run(200)
        counts.append(search.N[:, 0])
    assert torch.equal(*counts)


def test_two_workers_stay_close_to_the_serial_search():
    go, args = Go(7), Args(komi=0.5, c_puct=1.25)
    boards, evaluator, counts = make_boards(go, 16, 8), HashEvaluator(go), []
    for num_workers in (1, 2):
        search = make_search(go, evaluator, boards, 300, args, num_workers=num_workers)
        search.run(300)
        counts.append(search.policy())
    distance = (counts[0] - counts[1]).abs().sum(1) / 2
    assert 0 < distance.mean() < 0.15  # values that are random numbers, the worst case


# What a search finds


def area_evaluator(go, komi):
    """Perfect values where every stone on the board lives: who is ahead wins, whatever is played."""

    def evaluate(boards, legal):
        z = ((go.score(boards) - komi).sign() + 1) / 2
        return torch.zeros_like(legal, dtype=torch.float32), torch.where(boards.to_play == 1, z, 1 - z)

    return evaluate


def test_a_game_that_is_over_is_not_searched():
    go = Go(5)
    boards = go.new(2)
    boards = go.play(boards, torch.tensor([25, 12]))
    boards = go.play(boards, torch.tensor([25, 25]))  # the first game is over
    search = make_search(go, HashEvaluator(go), boards, 50, Args(komi=0.5))
    search.run(50)
    assert search.value[0, 0] == 0  # black to move, nothing on the board, half a point of komi
    assert search.N[:, 0].sum(1).tolist() == [0, 50]


def test_a_won_game_is_not_hurried():
    """Where all moves win, ending the game at once is worth no more than going on."""
    go, komi = Go(3), -20.0
    boards = go.play(
        draw(go, "X.X XXX .X.", -1), torch.tensor([9])
    )  # white passed: a pass of black wins at once
    search = make_search(go, area_evaluator(go, komi), boards, 300, Args(komi=komi))
    search.run(300)
    is_legal = search.P[0, 0] > 0
    counts, q = search.N[0, 0, is_legal], search.Q[0, 0, is_legal]
    assert len(counts) == 4 and (q == 1).all() and counts.tolist() == [75] * 4  # equal priors, equal visits


def test_score_weight_prefers_larger_wins():
    """White's last stone is in atari: passing wins by less than capturing it."""
    go, visits = Go(3), []
    boards = go.play(draw(go, "XX. X.. XXO", -1), torch.tensor([9]))
    for score_weight in (0.0, 0.9):
        args = Args(komi=0.5, score_weight=score_weight)
        search = make_search(go, area_evaluator(go, 0.5), boards, 200, args)
        search.run(200)
        visits.append(search.policy()[0, 9])
    assert visits[1] < visits[0]


EYE_OF_THREE = ".X.XX XXXXX OOOOO O...O OOOOO"  # white lives or dies at C2, black lives


@pytest.mark.parametrize(
    ("text", "to_play", "komi", "move", "num_games", "num_workers"),
    [
        (EYE_OF_THREE, 1, 0.5, 17, 1, 1),
        (EYE_OF_THREE, -1, 0.5, 17, 1, 2),
        ("... ... ...", 1, 8.5, 4, 16, 2),  # the centre, and only it, wins the board
    ],
)
def test_plain_mcts_finds_forced_wins(text, to_play, komi, move, num_games, num_workers):
    """The only moves that win, for searches that know nothing but the rules and the results of random games.

    On the empty board one search in five still prefers another move after 400 simulations: 16 of them vote.
    """
    go = Go(len(text.split()))
    torch.manual_seed(1)
    boards = draw(go, text, to_play).pick(torch.zeros(num_games, dtype=torch.int64))
    evaluate = functools.partial(az.evaluate_rollouts, go, komi)
    search = make_search(go, evaluate, boards, 100, Args(komi=komi), az.ucb_scores, num_workers)
    search.run(100)
    assert int(search.N[:, 0].sum(0).argmax()) == move


def test_rollouts_are_fair():
    """On the empty board random games know no colour; a board of black stones with two eyes is black's."""
    go = Go(5)
    boards = go.new(400)
    torch.manual_seed(0)
    logits, values = az.evaluate_rollouts(go, 0.0, boards, go.legal_moves(boards))
    assert 0.45 < values.mean() < 0.75  # the first move is worth something
    assert len(logits.argmax(1).unique()) > 20  # and which one is tried first is left to chance
    boards = draw(go, ".X.XX XXXXX XXXXX X...X XXXXX", -1)
    assert az.evaluate_rollouts(go, 0.5, boards, go.legal_moves(boards))[1].item() == 0.0


# Network and losses


def make_agent(size=5, **options):
    """A network whose batch norms have statistics of their own."""
    torch.manual_seed(0)
    args = Args(env_id=f"Go-{size}x{size}", **{"blocks": 2, "channels": 8, **options})
    agent = az.Agent(size, args)
    for _ in range(3):
        agent.train()(torch.rand(64, 9, size, size) > 0.5)
    return agent.eval(), args


def test_a_network_evaluates_as_it_is_in_parts_and_in_bfloat16():
    agent, args = make_agent()
    go = Go(5)
    boards = make_boards(go, 300, 6)
    legal = go.legal_moves(boards)
    with torch.no_grad():
        expected = agent(go.planes(boards, legal))
        (worker,) = az.make_workers(go, agent.train(), args)
        worker.submit(boards, legal)  # the network as it is now, in evaluation mode
        for x in agent.parameters():
            x.zero_()
        for x, y in zip(worker.wait(), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    agent, args = make_agent(bf16=True)
    with torch.no_grad():
        for x, y in zip(agent(go.planes(boards, legal)), expected, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x, y, rtol=0.1, atol=0.05)


def make_records(num_records, size=2, seed=0):
    """Records whose pi is on legal moves, with a loss of their own each."""
    generator = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.rand, generator=generator)
    planes = rand(num_records, 9, size, size) > 0.5
    legal = torch.cat((planes[:, LEGAL_PLANE].flatten(1), torch.ones(num_records, 1, dtype=torch.bool)), 1)
    policy = rand(num_records, size**2 + 1) * legal
    policy = (policy / policy.sum(1, keepdim=True)).half()
    zeros = torch.zeros(num_records, dtype=torch.int64)
    turn = torch.arange(num_records) % 8
    return az.Records(
        planes, policy, rand(num_records), rand(num_records).round(), rand(num_records), zeros, turn
    )


def stage(scores=az.puct_scores, num_simulations=8, epsilon=0.0, q_weight=0.3, value_coef=0.2):
    return az.Stage(scores, num_simulations, epsilon, q_weight, value_coef)


def test_losses_in_float64():
    """Eq. 4 to 6 by hand, with the legal moves that the planes hold, and the gradient of eq. 4 in closed form."""
    records = make_records(12)
    records.policy[0] = torch.eye(5)[4].half()
    torch.manual_seed(0)
    logits, values = torch.randn(12, 5, requires_grad=True), torch.rand(12)
    loss, policy_loss, value_loss = az.alphazero_loss(lambda planes: (logits, values), records, stage())
    for i in range(12):
        legal = [*records.planes[i, LEGAL_PLANE].flatten().tolist(), True]
        x = [math.exp(a) if ok else 0.0 for a, ok in zip(logits[i].tolist(), legal, strict=True)]
        pi, p = records.policy[i].tolist(), [a / sum(x) for a in x]
        divergence = sum(a * math.log(a / b) for a, b in zip(pi, p, strict=True) if a > 0)
        target = 0.3 * records.q[i].item() + 0.7 * records.z[i].item()
        error = (values[i].item() - target) ** 2
        assert policy_loss[i].item() == pytest.approx(divergence, rel=1e-4, abs=1e-6)
        assert value_loss[i].item() == pytest.approx(error, rel=1e-5, abs=1e-7)
        assert loss[i].item() == pytest.approx(
            0.2 * error / 0.25 + 0.8 * divergence / math.log(5), rel=1e-4, abs=1e-6
        )
    policy_loss.sum().backward()
    legal = torch.nn.functional.pad(records.planes[:, LEGAL_PLANE].flatten(1), (0, 1), value=True)
    softmax = logits.detach().masked_fill(~legal, -torch.inf).softmax(1)
    policy = records.policy.float()
    torch.testing.assert_close(logits.grad, softmax * policy.sum(1, keepdim=True) - policy)


def test_pretraining_on_values_freezes_the_policy_head():
    agent, _ = make_agent(2)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=1e-2, fused=True)
    records = make_records(64)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    losses = [
        az.update_network(agent, optimizer, records, stage(value_coef=1.0))[2].item() for _ in range(60)
    ]
    for name, x in agent.state_dict().items():
        if "num_batches" not in name and "running" not in name:
            assert torch.equal(before[name], x) == name.startswith("policy_head"), name
    assert losses[-1] < 0.7 * losses[0]
    az.update_network(agent, optimizer, records, stage())
    assert not torch.equal(before["policy_head.weight"], agent.state_dict()["policy_head.weight"])


def test_results():
    score = torch.tensor([25, 3, 0, -4])
    assert az.compute_result(score, Args(komi=3.0), 25).tolist() == [1, 0.5, 0, 0]
    mixed = az.compute_result(score, Args(komi=3.0, score_weight=0.4), 25).tolist()
    assert mixed == pytest.approx([0.6 + 0.4 * 0.94, 0.5, 0.4 * (0.5 - 3 / 50), 0.4 * (0.5 - 7 / 50)])


# Pool


def test_the_pool_drops_the_smallest_losses_and_the_old():
    """Against sorting, over many epochs."""
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
    for turn, share in ((3, 0.0), (11, 0.25), (2, 1.0)):
        index = az.sample_pool(pool, turn, 20, share)
        assert len(index.unique()) == 20 and (pool.turn[index] == turn % 8).all()
        rows = (pool.turn == turn % 8).nonzero()[:, 0]
        best = rows[pool.loss[rows].argsort(descending=True)]
        num_ranked = round(20 * (1 - share))
        assert set(best[:num_ranked].tolist()) <= set(index.tolist())
    drawn = torch.cat([az.sample_pool(pool, 0, 20, 0.5) for _ in range(2000)])
    counts = torch.bincount(drawn, minlength=800)[0::8].sort(descending=True).values
    assert (counts[:10] == 2000).all()  # ranked; each of the other 90 by chance
    assert ((counts[10:] - 20000 / 90) ** 2 / (20000 / 90)).sum() < 140  # chi-squared, 89 degrees, 0.05 %
    few = az.sample_pool(pool.pick(slice(40)), 0, 20, 0.5)
    assert sorted(few.tolist()) == [0, 8, 16, 24, 32]  # all that there are


def test_images_are_what_the_turned_game_looks_like():
    go = Go(5)
    torch.manual_seed(1)
    moves, boards = [], go.new(4)
    for _ in range(12):
        moves.append(go.draw_moves(boards, go.legal_moves(boards)))
        boards = go.play(boards, moves[-1])
    planes, policy = go.planes(boards, go.legal_moves(boards)), torch.rand(4, 26).half()
    records = az.Records(planes, policy, torch.arange(4.0), torch.rand(4), *torch.zeros(3, 4))
    images = az.make_images(records, go.symmetries, 7)
    assert len(set(map(tuple, go.symmetries.tolist()))) == 8 and images.epoch.tolist() == [7] * 32
    assert torch.equal(go.symmetries[0], torch.arange(26))
    for k, symmetry in enumerate(go.symmetries):
        where = torch.empty(26, dtype=torch.int64).scatter_(
            0, symmetry, torch.arange(26)
        )  # m becomes where[m]
        again = go.new(4)
        for move in moves:
            again = go.play(again, where[move])
        rows = slice(4 * k, 4 * k + 4)
        assert torch.equal(images.planes[rows], go.planes(again, go.legal_moves(again)))
        assert torch.equal(images.policy[rows][:, where], policy)
        assert images.q[rows].tolist() == [0, 1, 2, 3] and torch.equal(images.z[rows], records.z)
    for position in range(4):  # no two images of it can be in one minibatch, and each has its turn
        assert sorted(images.turn[position::4].tolist()) == list(range(8))


def test_what_an_epoch_trained_on_is_ranked_again(monkeypatch):
    agent, args = make_agent(2, pool_size=400, train_fraction=0.12, batch_size=16, random_fraction=0.0)
    pool = make_records(400)
    ranked, sampled = pool.loss.clone(), []
    sample = az.sample_pool
    monkeypatch.setattr(az, "sample_pool", lambda *a: sampled.append(sample(*a)) or sampled[-1])
    optimizer = torch.optim.AdamW(agent.parameters(), 1e-2)
    metrics = az.train_epoch(agent, optimizer, pool, stage(), args)
    index = torch.cat(sampled)
    assert len(sampled) == 3 and len(index.unique()) == 48  # 12 % of 400
    assert [int(x[0]) % 8 for x in sampled] == [0, 1, 2]
    is_new = pool.loss != ranked
    assert set(is_new.nonzero()[:, 0].tolist()) == set(index.tolist())
    loss = az.rank_records(agent, pool, stage())
    last = sampled[-1]
    torch.testing.assert_close(pool.loss[last], loss[last])
    before = torch.stack([ranked[x].mean() for x in sampled]).mean()
    after = torch.stack([pool.loss[x].mean() for x in sampled]).mean()
    assert metrics[-2:].tolist() == pytest.approx([before.item(), after.item()], rel=1e-5)


# Self-play


@pytest.mark.parametrize("num_workers", [1, 2])
def test_records_are_the_games(num_workers, monkeypatch):
    """Every record against the game replayed from its moves: planes, pi, Q, and the result from the mover's side."""
    go, searches, played = Go(3), [], [[] for _ in range(8)]
    args = Args(komi=0.5, num_games=8, draw_moves=0.3)
    games, workers = az.Games(go, 8), [az.Worker(HashEvaluator(go), CPU) for _ in range(num_workers)]
    run = az.Search.run
    monkeypatch.setattr(az.Search, "run", lambda self, n: searches.append(self) or run(self, n))
    torch.manual_seed(0)
    num_finished = 0
    for _ in range(40):
        found = az.play_moves(games, go, workers, stage(num_simulations=12, epsilon=0.1), args)
        search = searches[-1]
        assert (search.N[:, 0].sum(1) == 12).all() and search.P[:, 0].sum(1).mean() == pytest.approx(1.25)
        rows = zip(search.policy(), search.root_values().tolist(), strict=True)
        for game, (policy, q) in enumerate(rows):
            ended = int(games.boards.num_moves[game]) == 0
            played[game].append((policy, q, None if ended else int(games.boards.last_move[game])))
        expected = []
        for game in range(8):
            if games.boards.num_moves[game] > 0:
                continue
            boards = search.boards.pick((torch.tensor([game]), torch.tensor([0])))  # before its last move
            assert int(boards.num_moves) == len(played[game]) - 1
            replayed, moves = go.new(1), [move for _, _, move in played[game]]
            planes = []
            for move in moves:
                planes.append(go.planes(replayed, go.legal_moves(replayed))[0])
                if move is not None:
                    replayed = go.play(replayed, torch.tensor([move]))
            assert torch.equal(replayed.stones, boards.stones)
            # The last move is not known: it was a pass, as two of them end a game, unless it is the 18th
            if len(moves) < 18:
                z = float(go.score(boards).item() > 0.5)
                for i, ((policy, q, _), plane) in enumerate(zip(played[game], planes, strict=True)):
                    expected.append((plane, policy, q, z if i % 2 == 0 else 1 - z))
                    num_finished += i == 0
            else:
                expected += [
                    (plane, p, q, None) for (p, q, _), plane in zip(played[game], planes, strict=True)
                ]
            played[game] = []
        assert len(found.z) == len(expected)
        for i, (planes, policy, q, z) in enumerate(expected):
            assert torch.equal(found.planes[i], planes) and found.q[i].item() == pytest.approx(q)
            assert (found.policy[i] - policy).abs().max() < 1e-3
            assert z is None or found.z[i] == z
    assert num_finished > 10


def test_moves_of_self_play():
    """At random with probability epsilon, drawn from pi at first, the best ones later; and random games."""
    go = Go(5)
    boards = go.new(300)
    workers = [az.Worker(HashEvaluator(go, 3.0), CPU)]
    for epsilon, draw_moves, low, high in ((0.5, 0.0, 0.4, 0.65), (0.0, 0.0, 1, 1), (0.0, 0.33, 0.05, 0.6)):
        torch.manual_seed(0)
        games = az.Games(go, 300)
        args = Args(komi=0.5, noise_weight=0.0, draw_moves=draw_moves)
        az.play_moves(games, go, workers, stage(num_simulations=20, epsilon=epsilon), args)
        policy = games.policy[:, 0]
        chosen = policy.gather(1, games.boards.last_move[:, None])[:, 0]
        assert low <= (chosen == policy.amax(1)).float().mean() <= high
    expected = policy[0].float() * 300  # as the first position of all is the same
    counts = torch.bincount(games.boards.last_move, minlength=26)
    assert ((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum() < 50
    games.boards = boards._replace(num_moves=torch.full_like(boards.num_moves, 9))  # no longer early
    az.play_moves(games, go, workers, stage(num_simulations=20), args)
    assert len(games.boards.last_move.unique()) == 1
    games = az.Games(go, 8)
    records = [az.play_moves(games, go, None, stage(scores=None), Args(komi=0.5)) for _ in range(60)]
    q, z = torch.cat([r.q for r in records]), torch.cat([r.z for r in records])
    assert len(z) > 100 and torch.equal(q, z) and set(z.tolist()) == {0.0, 1.0}


def test_stages_and_schedules():
    """From the first value to the last, and what the stages change."""
    args = Args(num_epochs=5, pretrain_value_epochs=1, pretrain_search_epochs=1, value_coef=0.15)
    args = replace(args, simulations_start=2, simulations_end=6, epsilon_start=0.8, epsilon_end=0.4)
    args = replace(args, q_weight_start=0.1, q_weight_end=0.9)
    scores, sims, epsilons, q_weights, coefs = zip(*(az.get_stage(k, 5, args) for k in range(5)), strict=True)
    assert scores == (None, az.ucb_scores, *[az.puct_scores] * 3)
    assert sims == (2, 6, 4, 5, 6)  # classic UCB tries all five moves before it chooses
    assert epsilons == pytest.approx((0.8, 0.7, 0.6, 0.5, 0.4)) and coefs == (1.0, *[0.15] * 4)
    assert q_weights == pytest.approx((0.1, 0.3, 0.5, 0.7, 0.9))
    args = replace(args, num_epochs=1, pretrain_value_epochs=0, pretrain_search_epochs=0)
    assert az.get_stage(0, 5, args) == (az.puct_scores, 2, 0.8, 0.1, 0.15)


TINY = (
    "--env-id Go-2x2 --num-games 4 --blocks 1 --channels 4 --pool-size 256 --batch-size 16 --eval-episodes 4"
    " --eval-interval 1 --num-epochs 5 --simulations-start 2 --simulations-end 6 --komi 1"
)


def test_epochs_of_a_training(tmp_path, monkeypatch):
    """Five percent of the pool are new, in images of eight; a new kind of games begins with an empty pool."""
    played, sizes, rates, trained = [], [], [], []
    collect, refill, train = az.collect_images, az.refill_pool, az.train_epoch

    def watch_collect(games, go, workers, num_positions, epoch, stage, args):
        played.append((epoch, num_positions, stage.scores, bool(games.boards.history.any())))
        images, num_moves = collect(games, go, workers, num_positions, epoch, stage, args)
        assert len(images.z) >= 8 * num_positions and set(images.epoch.tolist()) == {epoch}
        return images, num_moves

    def watch_refill(pool, new, capacity, oldest):
        sizes.append(len(pool.z) if pool else 0)
        assert capacity == 256 and oldest == len(sizes) - 1 - 3
        return refill(pool, new, capacity, oldest)

    def watch_train(agent, optimizer, pool, stage, args):
        rates.append(optimizer.param_groups[0]["lr"])
        trained.append(stage)
        return train(agent, optimizer, pool, stage, args)

    monkeypatch.setattr(az, "collect_images", watch_collect)
    monkeypatch.setattr(az, "refill_pool", watch_refill)
    monkeypatch.setattr(az, "train_epoch", watch_train)
    flags = f"{TINY} --pretrain-value-epochs 1 --pretrain-search-epochs 1 --learning-rate 0.01 --max-age 3"
    az.main([*flags.split(), "--run-dir", str(tmp_path)])
    assert [row[:3] for row in played] == [(k, 2, s.scores) for k, s in enumerate(trained)]
    assert [row[3] for row in played][:3] == [False] * 3
    assert rates == pytest.approx([0.01 * (1 - 0.99 * k / 5) for k in range(5)])
    assert sizes[:3] == [0, 0, 0] and 0 < sizes[3] < sizes[4]
    assert [s.scores for s in trained] == [None, az.ucb_scores, *[az.puct_scores] * 3]


def test_a_resume_without_work_keeps_the_checkpoint(tmp_path):
    """What is in the file stays until there is something newer."""
    az.main([*TINY.split(), "--run-dir", str(tmp_path)])
    (path,) = tmp_path.glob("*/checkpoint.pt")
    before = path.read_bytes()
    az.main(["--resume", str(path), "--komi", "3.5"])
    assert path.read_bytes() == before


def test_a_resumed_run_is_the_whole_run(tmp_path, monkeypatch):
    """To the last bit: weights, pool, boards and records, also in the middle of games."""
    flags = f"{TINY} --pretrain-value-epochs 1 --pretrain-search-epochs 1 --pool-size 512".split()
    az.main([*flags, "--run-dir", str(tmp_path / "whole")])
    train_epoch, calls = az.train_epoch, itertools.count(1)

    def die(*args):
        if next(calls) == 5:
            raise RuntimeError("killed")
        return train_epoch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(az, "train_epoch", die)
        with pytest.raises(RuntimeError, match="killed"):
            az.main([*flags, "--run-dir", str(tmp_path / "cut")])
    (whole,), (cut,) = (list((tmp_path / name).iterdir()) for name in ("whole", "cut"))
    half = torch.load(cut / "checkpoint.pt", weights_only=True)
    assert half["progress"][0] == 4 and half["games"]["num_moves"].any() and len(half["pool"]["z"]) > 0
    az.main(["--resume", str(cut / "checkpoint.pt")])
    ends = [torch.load(path / "checkpoint.pt", weights_only=True) for path in (whole, cut)]
    for name in ("agent", "best", "pool", "games"):
        assert ends[0][name].keys() == ends[1][name].keys()
        assert all(torch.equal(x, ends[1][name][key]) for key, x in ends[0][name].items()), name
    assert ends[0]["progress"][:3] == ends[1]["progress"][:3]
    assert ends[0]["progress"][4] == ends[1]["progress"][4]


# Matches


def test_matches_are_balanced():
    go = Go(5)
    asked = []

    def first_legal(boards):
        asked.append(boards)
        return go.legal_moves(boards).long().argmax(1)

    def always_pass(boards):
        return torch.full_like(boards.num_moves, 25)

    torch.manual_seed(0)
    win_rate, num_moves = az.play_match(go, (first_legal, always_pass), 10, 0.5)
    assert 0.5 < win_rate <= 1 and num_moves > 40
    first, second = asked[
        :2
    ]  # black in five games after two moves, then in all ten, which begin in pairs alike
    assert first.to_play.tolist() == [1] * 5 and first.num_moves.tolist() == [2] * 5
    assert second.to_play.tolist() == [1] * 5 + [-1] * 5 and second.num_moves.tolist() == [4] * 5 + [3] * 5
    assert torch.equal(second.history[:5, :3], first.history[:, :3])
    assert torch.equal(second.history[5:, :3], first.history[:, :3])
    losing = az.play_match(go, (always_pass, first_legal), 10, 0.5)[0]
    torch.manual_seed(0)
    assert az.play_match(go, (first_legal, always_pass), 9, 0.5)[1] < num_moves  # an odd number of games
    assert losing < 0.5
    assert az.play_match(Go(2), (lambda b: torch.full_like(b.num_moves, 4),) * 2, 4, 0.0)[0] in (
        0.25,
        0.5,
        0.75,
    )


def test_evaluations_are_of_the_search_against_the_best_network_or_plain_mcts(monkeypatch):
    agent, args = make_agent(5, simulations_end=22, score_weight=1.0, eval_episodes=60)
    players, searches, search = [], [], az.Search
    monkeypatch.setattr(az, "play_match", lambda go, pair, *rest: players.append((pair, rest)) or (0.5, 7))
    monkeypatch.setattr(az, "Search", lambda *a, **k: searches.append(search(*a, **k)) or searches[-1])
    go = Go(5)
    assert az.evaluate(go, agent, None, args, 3) == {"eval/win_rate": 0.5, "eval/moves": 7}
    assert az.evaluate(go, agent, agent, args, 2, 1) == {"eval/win_rate_best": 0.5, "eval/moves": 7}
    assert [rest for _, rest in players] == [(60, 0.5), (40, 0.5)]
    moves = players[0][0][1](go.new(64))
    plain = searches[-1]
    assert len(moves.unique()) > 8 and plain.scores is az.ucb_scores  # fewer simulations than there are moves
    q = plain.Q[:, 0].gather(1, moves[:, None])
    assert (plain.N[:, 0] <= 1).all() and q.mean() > 0.9  # the won ones
    assert plain.args.score_weight == 0 and plain.args.c_puct == 1.25  # as in the rollouts, by however much
    for pair, num_simulations in ((players[0][0][:1], 22), (players[1][0], 6)):
        for player in pair:
            player(go.new(2))
            assert (searches[-1].N[:, 0].sum(1) == num_simulations).all()
            assert searches[-1].scores is az.puct_scores and searches[-1].args.score_weight == 1


def test_the_best_network_stays_until_another_wins_half_of_a_match(tmp_path, monkeypatch):
    rates, matches = [0.1, 0.9, 0.49, 0.5, 0.2], []  # the first one has nothing to replace

    def evaluate(go, agent, best, args, *stream):
        if best is None:
            return {"eval/win_rate": 0.75, "eval/moves": 1}
        matches.append([x.value_head[2].bias.item() for x in (agent, best)] + [stream])
        return {"eval/win_rate_best": rates[len(matches) - 1], "eval/moves": 3}

    monkeypatch.setattr(az, "evaluate", evaluate)
    az.main([*TINY.split(), "--run-dir", str(tmp_path)])
    news, olds, streams = zip(*matches, strict=True)
    assert len({*news, olds[0]}) == 6 and olds[1:] == (news[0], news[1], news[1], news[3])
    assert len(set(streams)) == 5  # other openings each time
    (path,) = tmp_path.iterdir()
    best, last = (torch.load(path / name, weights_only=True) for name in ("best.pt", "checkpoint.pt"))
    assert best["agent"]["value_head.2.bias"].item() == last["best"]["value_head.2.bias"].item() == news[3]
    assert (best["progress"][0], last["progress"][0], last["progress"][4]) == (4, 5, 0.75)
    assert last["progress"][2] == 15 and last["agent"]["value_head.2.bias"].item() == news[4]
    scalars = read_scalars(path)
    assert [x for _, x in scalars["eval/win_rate_best"]] == pytest.approx(rates)
    assert [x for _, x in scalars["eval/win_rate"]] == [0.75]


def test_the_line_with_the_sources_values():
    """Of the script's docstring; it is run in the smoke suite."""
    (line,) = [x for x in az.__doc__.replace("\\\n", "").splitlines() if "--epsilon-start" in x]
    words = line.split("#")[0].split()
    args = az.tyro.cli(az.Args, args=words[2:])
    assert (args.noise_weight, args.dirichlet_alpha, args.score_weight, args.num_workers) == (
        0.25,
        0.03,
        0,
        2,
    )
    assert args.first_q == "zero"
    assert (args.epsilon_start, args.epsilon_end, args.random_fraction, args.draw_moves) == (0.5, 0.001, 0, 0)
    assert (args.q_weight_start, args.q_weight_end, args.value_coef, args.max_age) == (0.05, 0.5, 0.2, 0)
    assert 0.02 <= args.generate_fraction <= 0.05 and 0.1 <= args.train_fraction <= 0.15
    assert 64 <= args.batch_size <= 128 and 100_000 <= args.pool_size <= 500_000 and args.pseudo_limit <= 0.1


@pytest.mark.slow
@pytest.mark.release
def test_the_default_run_beats_plain_search(run_script, tmp_path):
    """More seeds are in benchmark/suites/go_default.toml."""
    run = run_script("alphazero_go", "--seed", 12, "--run-dir", tmp_path, timeout=1800)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    scalars = read_scalars(path)
    assert scalars["eval/win_rate"][-1][1] >= 0.9 and len(scalars["eval/win_rate_best"]) > 2
