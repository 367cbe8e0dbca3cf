"""What the recipes for the attention model must bring about, by brute force over all orders of six nodes."""

import io
import itertools
from contextlib import redirect_stderr

import numpy as np
import pytest
import torch
from helpers import read_scalars
from scripts import import_file, load, run_edited, run_main

CPU = torch.device("cpu")
ORDERS = np.array(list(itertools.permutations(range(6))))  # [720, 6]


def train(path, flags=""):
    """Train the edited copy in this process; returns its module and its network."""
    base = "--env-id tsp6-uniform --num-epochs 4 --steps-per-epoch 25 --batch-size 16 --eval-episodes 10"
    done, module = run_edited(path, base, flags)
    agent = module.AttentionModel().eval()
    agent.load_state_dict(load(done.path / "checkpoint.pt")["agent"])
    return module, agent


def draw(module, num_instances=60, env_id="tsp6-uniform"):
    """Points of the copy in float64."""
    torch.manual_seed(1)
    return module.draw_points(env_id, num_instances).double()


def measure_closed(stops):
    """Lengths of closed tours along stops [..., N, 2], by numpy."""
    return np.linalg.norm(stops - np.roll(stops, 1, -2), axis=-1).sum(-1)


@torch.no_grad()
def find_log_p(module, agent, points, orders):
    """Log-probabilities [M, P] of orders [P, 6]."""
    nodes = iter(torch.from_numpy(orders).expand(len(points), -1, -1).unbind(-1))
    return module.rollout(points, agent(points), lambda _: next(nodes))[1]


def check_gaps(module, agent, points, optimum, limits):
    """Check that mean gaps in percent of all decodings to the optima [M] are below limits; returns them."""
    instances = module.Instances(points, None, module.tour_length)
    scores, _ = module.evaluate(agent, instances, CPU)
    gaps = {x: 100 * (scores[f"eval/{x}_length"] / optimum.mean() - 1) for x in module.DECODINGS}
    assert all(-1e-4 < gap < limit for gap, limit in zip(gaps.values(), limits, strict=True)), gaps
    return gaps


def check_costs(module, agent, points, costs, limits):
    """Costs [M, 720] of all orders are those of the copy."""
    orders = torch.from_numpy(ORDERS).expand(len(points), -1, -1)
    np.testing.assert_allclose(module.tour_length(points, orders), costs, rtol=1e-6)
    check_gaps(module, agent, points, costs.min(1), limits)


def check_open_path(path, folder):
    module, agent = train(path)
    points = draw(module)
    edges = np.diff(points.numpy()[:, ORDERS], axis=2)  # [60, 720, 5, 2]
    check_costs(module, agent, points, np.hypot(*edges.transpose(3, 0, 1, 2)).sum(-1), (8.0, 2.0, 0.2))


def check_prizes(path, folder):
    """Also, the probabilities of all that a policy can do sum to 1, and the prizes keep with their cities."""
    module, agent = train(path)
    points = draw(module)
    assert (points[:, 0, 2] == -1).all() and (points[:, 1:, 2] > 0).all()
    costs = np.zeros((60, 720))
    for (m, xyz), (i, order) in itertools.product(enumerate(points.numpy()), enumerate(ORDERS.tolist())):
        end = order.index(0) + 1
        costs[m, i] = measure_closed(xyz[order[:end], :2]) + xyz[order[end:], 2].sum()
    is_skipping = ORDERS[costs.argmin(1), -1] != 0
    assert 10 < is_skipping.sum() < 60
    check_costs(module, agent, points, costs, (15.0, 4.0, 1.0))
    prefixes = {tuple(order[: order.index(0) + 1]): i for i, order in enumerate(ORDERS.tolist())}
    p = find_log_p(module, agent, points, ORDERS[[*prefixes.values()]]).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(60))
    images = module.augment_x8(points)
    assert len(images) == 8 and all(torch.equal(x[..., 2], points[..., 2]) for x in images)


def split_best(points, order):
    """The least length of routes that serve customers in this order, each within the capacity."""
    lengths = []
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        routes = np.split(order, np.flatnonzero(cuts) + 1)
        if max(points[route, 2].sum() for route in routes) <= 1 + 2e-7:
            lengths.append(sum(measure_closed(points[[0, *route], :2]) for route in routes))
    return min(lengths)


def check_capacities(path, folder):
    """The cost of an order is that of its best split, by brute force, wherever the tour begins."""
    module, agent = train(path)
    points = draw(module, 40)
    demands = (30 * points[:, 1:, 2]).round()
    assert (points[:, 0, 2] == 0).all() and demands.unique().tolist() == [*range(1, 10)]
    points[:, 1:, 2] *= 2  # so that several routes are needed
    costs = module.tour_length(points, torch.from_numpy(ORDERS).expand(40, -1, -1))
    for order in ORDERS[[7, 50, 119]]:  # begins at the depot
        expected = torch.tensor([split_best(x, order[1:]) for x in points.numpy()])
        turned = [(np.roll(order, k) == ORDERS).all(1).argmax() for k in range(6)]
        torch.testing.assert_close(costs[:, turned], expected[:, None].expand(-1, 6))
    check_gaps(module, agent, points, costs.min(1).values, (12.0, 3.0, 0.5))
    # A load of Q + 1 needs two routes, one of Q does not, also in float32
    xy = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    for demand, routes in ((200_000, 1), (200_001, 2)):
        shares = torch.tensor([0, 100_000, demand - 100_000], dtype=torch.float64) / 200_000
        one = torch.cat((xy, shares.unsqueeze(-1)), -1).unsqueeze(0)
        for x in (one, one.float()):
            assert module.tour_length(x, torch.tensor([[[0, 1, 2]]])).item() == 2 * routes
    # Demands that are not shares are refused in one line
    (folder / "raw.txt").write_text("0 0 0 0 1 7 1 0 1\n")
    with pytest.raises(SystemExit) as stop, redirect_stderr(io.StringIO()) as error:
        module.read_instances(str(folder / "raw.txt"))
    assert stop.value.code == 2
    assert error.getvalue().endswith("raw.txt: demand of node 1 is above 1: divide by the capacity\n")
    assert error.getvalue().count("\n") == 1


def check_pairs(path, folder):
    """Tours of all kinds keep the rule, and the probabilities of all tours that keep it sum to 1."""
    module, agent = train(path)
    points = draw(module)
    time = ORDERS.argsort(1)
    is_kept = (time[:, :3] < time[:, 3:]).all(1)
    costs = np.where(is_kept, measure_closed(points.numpy()[:, ORDERS]), np.inf)
    with torch.no_grad():
        for choose in (module.sample_nodes, module.pick_likeliest):
            tours, _, _ = module.rollout(points, agent(points), choose, multistart=True)
            times = tours.argsort(-1)
            assert (times[..., :3] < times[..., 3:]).all()
    p = find_log_p(module, agent, points, ORDERS[is_kept]).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(60))
    check_gaps(module, agent, points, costs.min(1), (15.0, 6.0, 1.5))


def check_flow_shop(path, folder):
    module, agent = train(path)
    points = draw(module)
    done = np.zeros((60, 720, 3))
    for place, m in itertools.product(range(6), range(3)):
        begin = np.maximum(done[..., m], done[..., m - 1] if m else 0)  # when machine and job are free
        done[..., m] = begin + points.numpy()[:, ORDERS[:, place], m]
    assert [*module.DECODINGS] == ["greedy", "multistart"]
    check_costs(module, agent, points, done[..., -1], (6.0, 2.5))


def check_clusters(path, folder):
    module, agent = train(path, "--env-id tsp6-clustered")
    points = draw(module, 1000, "tsp50-clustered")
    near = torch.cdist(points, points).sort(-1).values
    assert points.shape == (1000, 50, 2) and near[..., 8].mean() < 0.1
    points = draw(module, env_id="tsp6-clustered")
    check_costs(module, agent, points, measure_closed(points.numpy()[:, ORDERS]), (12.0, 3.0, 0.3))


def check_curriculum(path, folder):
    """Epochs have 5, 6, 7 and 9 nodes, and the network learns."""
    module, sizes = import_file("edited_copy", path), []
    update = module.update_weights
    module.update_weights = lambda *inputs: sizes.append(inputs[-1].shape[1]) or update(*inputs)
    flags = "--env-id tsp9-uniform --num-epochs 4 --steps-per-epoch 25 --batch-size 16 --eval-episodes 100"
    done = run_main(module, folder / "runs", flags)
    assert sizes == [5] * 25 + [6] * 25 + [7] * 25 + [9] * 25
    scores = read_scalars(done.path)
    assert scores["eval/multistart_x8_length"][-1][1] < 3.0 and scores["eval/greedy_length"][-1][1] < 3.3


def check_search(path, folder):
    """Beam search with room for all tours finds the most likely one; 2-opt leaves nothing to turn round."""
    module, agent = train(path)
    points = draw(module)
    costs = measure_closed(points.numpy()[:, ORDERS])
    gaps = check_gaps(module, agent, points, costs.min(1), (99.0, 99.0, 99.0, 0.3, 99.0, 0.5))
    assert gaps["beam"] < gaps["greedy"] and gaps["two_opt"] <= gaps["multistart"], gaps
    likely = find_log_p(module, agent, points, ORDERS).argmax(1)
    with torch.no_grad():
        found = module.decode_beam(agent, points, width=720)
        assert found.shape == (60, 720, 6) and torch.equal(found[:, 0], torch.from_numpy(ORDERS)[likely])
        assert len(found[0].unique(dim=0)) == 720
        improved = module.decode_two_opt(agent, points)
    xy = points.numpy()
    for m, tour in itertools.product(range(60), range(6)):
        order = improved[m, tour].numpy()
        length = measure_closed(xy[m][order])
        for i, j in itertools.combinations(range(7), 2):
            turned = np.concatenate((order[:i], order[i:j][::-1], order[j:]))
            assert measure_closed(xy[m][turned]) > length - 1e-5


CHECKS = {
    "An open path": check_open_path,
    "Prizes for cities that may be skipped": check_prizes,
    "Capacities: CVRP by splitting a giant tour": check_capacities,
    "Pickup and delivery": check_pairs,
    "A permutation flow shop": check_flow_shop,
    "Clustered instances": check_clusters,
    "A curriculum over sizes": check_curriculum,
    "Search at test time": check_search,
}
