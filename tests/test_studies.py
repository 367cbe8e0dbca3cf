"""The arithmetic of the studies and of matches is right."""

import numpy as np
import pytest
import torch
from helpers import ROOT

from algos import ppo_change_detection as cd
from benchmark import common, machines, records, report
from benchmark.peers import go_engine
from benchmark.studies import change_detection, helpers, tsp_networks
from envs_shared import change_pairs


def test_studies_that_have_not_run_say_so():
    """Gaps that are zero but for rounding have no sign."""
    for study in report.STUDIES.values():
        assert all("not run yet" in text.lower() for text in study.make_sections(None).values())
    assert tsp_networks.show_gap(-1e-9) == "0.00"


def test_rows_replace_those_of_the_same_keys(tmp_path, monkeypatch):
    """And those of a program are all of the commit it began with, though the first results have changed the
    tree."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    helpers.describe_machine_once.cache_clear()
    helpers.save_rows("x", [{"a": 1, "b": 1}, {"a": 2, "b": 1}], ("a",))
    monkeypatch.setattr(machines.subprocess, "run", lambda *_, **__: pytest.fail("git is asked again"))
    helpers.save_rows("x", [{"a": 2, "b": 7}], ("a",))
    assert [(row["a"], row["b"]) for row in records.load_results("x")["rows"]] == [(1, 1), (2, 7)]


def test_the_criterion_of_change_detection_counts_seeds():
    """The F1 of the policy is at most 0.03 below that of the oracle."""
    rows = []
    for i in range(5):
        best, last = (
            {"oracle_f1": 0.5, "ppo_f1": 0.5 - step * i, "everywhere_f1": 0.5} for step in (0.01, 0.02)
        )
        rows.append({"best": best, "last": last, "seconds": 40.0})
    found = change_detection.judge(rows)
    assert (found["best"], found["last"]) == (4, 2)


@pytest.mark.parametrize("num_dates", [2, *(pytest.param(x, marks=pytest.mark.slow) for x in (3, 4))])
def test_returns_by_calculation_are_those_of_drawn_pairs(num_dates):
    """An ideal detector plays on haze as it is drawn; its first looks of a roof earn nothing."""
    cost, share = 0.02, 0.25
    pairs, is_roof, is_hazy = change_pairs.draw_haze(20_000, 32, num_dates, 1)
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


@pytest.mark.slow
def test_the_study_of_change_detection_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(change_detection, "NUM_HEAD_STEPS", 20)
    tiny = "--num-train-pairs 16 --batch-size 4 --num-envs 8 --num-minibatches 2 --detector-iterations 1"
    tiny += " --ppo-iterations 2 --eval-episodes 4"
    change_detection.measure(["haze-3"], [1], tiny, ["ppo", "control"])
    row, other = records.load_results("change_detection")["rows"]
    assert [row["cost"], other["cost"]] == [0.04, 0.06]
    assert {"ppo_f1", "oracle_f1", "threshold_own_f1", "all_seconds", "all_own_return"} <= row["best"].keys()
    assert {"all_f1", "oracle_f1"} <= row["control"].keys() and row["detector_seconds"] > 0
    assert change_detection.make_sections({"rows": [row]})


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
    for _ in range(2):
        for part in (slice(0, 4), slice(4, 6)):
            for step in range(3):
                size = part.stop - part.start
                row = {"step_indices": torch.full((size,), step), "is_active": torch.ones(size, 2, 2)}
                found = oracle(row).numpy()
                assert (found == (roofs[part] & ~haze[:step, part].any(0))).all()
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
    """Twice at clear roofs, never at the ground; of the pairs in the picture, only changes without haze are
    found."""
    agent, args, test, is_roof, is_hazy = change_detection.read_checkpoint_pairs()
    probability, looks, _ = cd.predict(agent, args, test)
    assert (looks.numpy()[~is_roof] == 0).all() and (looks.numpy()[is_roof & ~is_hazy] == 2).all()
    share = (looks.numpy()[is_roof & is_hazy] == 1).mean()
    text = " ".join((ROOT / "docs" / "ppo_change_detection.md").read_text().split())
    assert f"once at {100 * share:.0f} % of the roofs with haze and twice at the others" in text
    chosen = change_detection.find_mixed_pairs(test, is_hazy)[:2]
    is_found = probability[chosen, 4::8, 4::8] > 0.44  # the threshold of the checkpoint
    assert torch.equal(is_found, (test[chosen, -1, 4::8, 4::8] == 1) & ~torch.from_numpy(is_hazy[chosen]))
