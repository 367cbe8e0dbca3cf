"""What the recipes for the attention model must bring about, by brute force over all tours of six nodes."""

import itertools

import numpy as np
import torch
from test_contract import load, run_edited

TOURS = np.array(list(itertools.permutations(range(6))))  # [720, 6]


def train(path, flags=""):
    """Train the edited copy in this process; returns its module and its network."""
    flags = f"--env-id tsp6-uniform --num-epochs 4 --steps-per-epoch 25 --batch-size 16 --eval-episodes 10 {flags}"
    done, module = run_edited(path, flags)
    agent = module.AttentionModel().eval()
    agent.load_state_dict(load(done.path / "checkpoint.pt")["agent"])
    return module, agent


def check_costs(module, agent, points, costs, limits):
    """Costs [M, 720] of all tours are those of the copy; gaps in percent of the trained network are below the limits.

    Returns the gaps.
    """
    tours = torch.from_numpy(TOURS).expand(len(points), -1, -1)
    np.testing.assert_allclose(module.tour_length(points, tours), costs, rtol=1e-9)
    instances = module.Instances(points, None, module.tour_length)
    scores, _ = module.evaluate(agent, instances, torch.device("cpu"))
    optimum = costs.min(1).mean()
    gaps = [100 * (scores[f"eval/{x}_length"] / optimum - 1) for x in module.DECODINGS]
    assert all(-1e-9 < gap < limit for gap, limit in zip(gaps, limits, strict=True)), gaps


def check_open_path(path, folder):
    module, agent = train(path)
    points = torch.rand(60, 6, 2, generator=torch.Generator().manual_seed(1)).double()
    edges = np.diff(points.numpy()[:, TOURS], axis=2)  # [60, 720, 5, 2]
    check_costs(module, agent, points, np.hypot(*edges.transpose(3, 0, 1, 2)).sum(-1), (8.0, 2.0, 0.2))


def check_prizes(path, folder):
    """Also, the probabilities of all that a policy can do sum to one."""
    module, agent = train(path)
    torch.manual_seed(1)
    points = module.draw_points("tsp6-uniform", 60).double()
    assert (points[:, 0, 2] == -1).all() and (points[:, 1:, 2] > 0).all()
    costs = np.zeros((60, 720))
    for (m, xyz), (i, tour) in itertools.product(enumerate(points.numpy()), enumerate(TOURS.tolist())):
        end = tour.index(0) + 1
        stops = xyz[tour[:end], :2]
        costs[m, i] = np.hypot(*(stops - np.roll(stops, 1, 0)).T).sum() + xyz[tour[end:], 2].sum()
    is_skipping = TOURS[costs.argmin(1), -1] != 0
    assert 10 < is_skipping.sum() < 60
    check_costs(module, agent, points, costs, (15.0, 4.0, 0.5))
    prefixes = {tuple(tour[: tour.index(0) + 1]): i for i, tour in enumerate(TOURS.tolist())}
    kept = torch.from_numpy(TOURS[[*prefixes.values()]]).expand(60, -1, -1)
    with torch.no_grad():
        log_likelihood, start = module.score_tours(agent(points), kept)
    p = (log_likelihood + start.gather(1, kept[:, :, 0])).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(60))
    images = module.apply_symmetries(points)
    assert len(images) == 8 and all(torch.equal(x[..., 2], points[..., 2]) for x in images)


CHECKS = {"An open path": check_open_path, "Prizes for cities that may be skipped": check_prizes}
