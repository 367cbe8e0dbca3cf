"""The arithmetic of the studies and of matches is right."""

import numpy as np
import pytest
import torch
from helpers import ROOT

from algos import ppo_change_detection as cd
from benchmark import change_detection_pages
from benchmark.peers import go_engine
from benchmark.studies import change_detection
from envs_shared import change_pairs


def test_the_criterion_of_change_detection_counts_seeds():
    """The F1 of the policy is at most 0.03 below that of the oracle."""
    rows = []
    for i in range(5):
        scores = [{"oracle_f1": 0.5, "ppo_f1": 0.5 - x * i, "everywhere_f1": 0.5} for x in (0.01, 0.02)]
        rows.append({"best": scores[0], "last": scores[1], "seconds": 40.0})
    found = change_detection_pages.judge(rows)
    assert (found["best"], found["last"]) == (4, 2)


@pytest.mark.parametrize("num_dates", [2, 3])
def test_returns_by_calculation_are_those_of_drawn_pairs(num_dates):
    """An ideal detector plays on haze as it is drawn; its first looks of a roof earn nothing."""
    cost, share = 0.02, 0.25
    pairs, is_roof, is_hazy = change_pairs.draw_haze(5_000, 32, num_dates, 1)
    is_changed = pairs[:, -1, ::8, ::8] == 1
    is_clear = is_roof & ~is_hazy.any(0)
    hits, total = (is_changed & is_clear).sum(), is_changed.sum()
    quiet, loud = 2 * hits / (hits + total), 2 * total / (hits + (is_roof & ~is_clear).sum() + total)
    f1 = max(quiet, loud)
    loss = 0.1 * np.where(is_changed, np.log(share), np.log(1 - share))
    before = loss + (share > f1 / 2) * (2 * is_changed - f1)
    gain = np.where(is_clear, is_changed * (2 - f1) - before, 0)
    looks = is_roof * (1 + (~is_hazy).cumprod(0).sum(0))
    found = change_detection.calculate_returns(cost, num_dates)
    assert found["f1"] == pytest.approx(f1, rel=0.02)
    assert found["all"] == pytest.approx((gain - num_dates * cost * is_roof).mean(), abs=0.002)
    assert found["best"] == pytest.approx(max(0, (gain - cost * looks).mean()), abs=0.002)


def test_the_lead_is_widest_where_the_page_says():
    prices = np.linspace(0, 0.15, 301)
    leads = [change_detection.calculate_lead(cost) for cost in prices]
    assert prices[np.argmax(leads)] == pytest.approx(0.0975)
    assert [2 * change_detection.SHARE * cd.Args.cost] == pytest.approx(change_detection.STUDIES["haze"][1])


def test_rules_look_as_often_as_the_policy(monkeypatch):
    """Levels are found by bisection."""
    scores = torch.linspace(0, 1, 1001)

    monkeypatch.setattr(cd, "predict", lambda agent, args, pairs, rule: (None, 2.0 * rule(pairs), None))
    rule = change_detection.tune_rule(lambda row: row.square(), None, None, scores, 0.5)
    assert (2.0 * rule(scores)).mean() == pytest.approx(0.5, abs=0.003)


def test_the_oracle_looks_at_roofs_until_there_is_haze():
    """For the parts of a set in their order, and again for the next set of the same pairs."""
    rng = np.random.default_rng(0)
    roofs, haze = rng.random((6, 2, 2)) < 0.5, rng.random((2, 6, 2, 2)) < 0.5
    oracle = change_detection.Oracle(roofs, haze)
    for part in 2 * [slice(0, 4), slice(4, 6)]:
        size = part.stop - part.start
        for step in range(3):
            row = {"step_indices": torch.full((size,), step), "is_active": torch.ones(size, 2, 2)}
            assert (oracle(row).numpy() == (roofs[part] & ~haze[:step, part].any(0))).all()
    few = change_detection.Oracle(np.ones((500, 4, 4), bool), np.zeros((1, 500, 4, 4), bool), num_looks=0.5)
    assert few.is_roof.float().mean() == pytest.approx(0.25, abs=0.01)  # as each roof takes two looks


def test_matches_count_draws():
    rows = [([12], 25.0, True), ([12], 25.0, False), ([13], 0.0, True), ([12], 25.0, True)]
    found = go_engine.summarize(*zip(*rows, strict=True), 0.0)
    assert found["ours_win_rate"] == 0.5 and found["mean_margin"] == 0 and found["distinct_games"] == 3
    assert found["ours_points"] == found["peer_points"] == 1.5 and found["ours_win_rate_black"] == 0.75
    assert found["ours_win_rate_black_high"] == go_engine.compute_interval(0.75, 2)[1]
    half = go_engine.summarize([[]], [-25.0], [False], 0.5)
    assert half["mean_margin"] == 25.5  # the whole board for white, and komi


def test_the_looks_of_the_shipped_policy_are_those_of_its_page():
    """Twice at clear roofs, never at the ground."""
    agent, args, test, is_roof, is_hazy = change_detection_pages.read_checkpoint_pairs()
    looks = cd.predict(agent, args, test)[1].numpy()
    assert (looks[~is_roof] == 0).all() and (looks[is_roof & ~is_hazy] == 2).all()
    share = (looks[is_roof & is_hazy] == 1).mean()
    text = " ".join((ROOT / "docs" / "ppo_change_detection.md").read_text().split())
    assert f"once at {100 * share:.0f} % of the roofs with haze and twice at the others" in text
