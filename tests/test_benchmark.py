"""The pages follow from the committed results, and the arithmetic of the studies is right."""

import re
import statistics

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_contract import SCRIPTS
from test_harness import make_cell, make_machine, make_solved

from algos import ppo_change_detection as cd
from benchmark import common, compare, pictures, records, report
from benchmark.peers import go_engine
from benchmark.studies import change_detection, helpers, learned, tsp_networks
from envs_shared import change_pairs

STUDIES = {*report.STUDIES}


def test_the_pages_follow_from_the_committed_results():
    """The report would change nothing in the pages, and it draws each picture that they show."""
    published = records.load_published()
    written = report.make_pages(published)
    for path, text in written.items():
        assert path.read_text() == text, path.name
    assert {path.stem for path in written} == {*SCRIPTS, "README", "scaling", "results", "stacked_frames"}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"figures/(\w+)\.png", page.read_text())}
    assert len(shown) >= 8
    for name in shown:
        assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert name in {*STUDIES, "change_task", *learned.PICTURES} or published[name]["tables"]


def test_every_file_of_results_is_shown():
    """None is of a program that is gone or of a tree with changes, and each suite says on which page it stands."""
    published = records.load_published()
    names = {path.stem for path in common.RESULTS.glob("*.json")}
    assert published.keys() <= names <= published.keys() | STUDIES
    for name, results in published.items():
        assert results["tables"] or name == "ablations"
        for run in (run for cell in results["cells"].values() for run in cell["runs"]):
            assert "dirty" not in run["machine"]["commit"]
    for name in names & STUDIES:
        assert not any("dirty" in row["machine"]["commit"] for row in common.load_results(name)["rows"])


def test_how_many_deviations_slower_learning_is():
    """What benchmark/README.md says of the committed cells: of steps to a threshold, and of half the speed.

    Half the speed is found in each of our cells. Equal results are not worse.
    """
    steps, speed, num_found = [], [], 0
    for cell in (cell for found in records.load_published().values() for cell in found["cells"].values()):
        if len(cell["runs"]) > 2:
            losses = compare.find_losses(cell)["steps_per_second"]
            speed.append(np.std(losses, ddof=1))
            if records.is_ours(cell):
                slower = losses + np.log(2 / compare.SLOWER)
                assert compare.find_p_worse(losses, slower, True) < 0.01, cell["setting"]
                num_found += 1
            values = np.log(records.get_values(cell, "steps_to_threshold"))
            if np.isfinite(values).all() and np.std(values):
                steps.append(np.std(values, ddof=1))
    text = " ".join((ROOT / "benchmark" / "README.md").read_text().split())
    low, median, high = np.quantile(np.log(3) / np.array(steps), [0.1, 0.5, 0.9])
    assert f"{low:.1f} to {high:.1f} standard deviations in four of five" in text
    assert f"in the median {median:.1f}." in text
    low, median = np.log(2 / compare.SLOWER) / np.quantile(speed, [0.9, 0.5])
    assert f"at least {low:.1f} standard deviations in nine of ten cells, {median:.1f} in the median" in text
    assert num_found >= 20 and compare.main(compare.Args(*[common.RESULTS / "cpu.json"] * 2)) == 0


def test_ratios_count_runs_that_never_got_there():
    steps = {"a": [100, 300, None], "b": [None, 600, None], "c": [200, 300, 400], "d": [1000, 1100, 1200]}
    cells = {name: make_solved(values) for name, values in steps.items()}
    cells["e"] = make_cell([], "gnugo/Go/match", missing=[{"seed": 1, "error": "why"}])
    base = {"title": "t", "quantity": "steps_to_threshold"}
    ratios = [base | {"ours": ours, "peer": peer} for ours, peer in ("ab", "ac", "ae", "cd")]
    ratios += [base | {"ours": "a", "peer": "c", "quantity": "steps_per_second"}]
    lines = report.make_ratio_table({"cells": cells, "ratios": ratios}).splitlines()[2:]
    assert lines[0] == "| t | - | 300 (2 of 3) | - (1 of 3) | 3 / 3 | abc |"
    assert lines[1] == "| t | 1.00 | 300 (2 of 3) | 300 | 3 / 3 | abc |"
    assert lines[2] == "| t | why | 300 (2 of 3) | - | 3 / 0 | gnugo |"
    low, high = map(common.show, records.find_ratio(steps["c"], steps["d"])[1])
    assert lines[3] == f"| t | **0.273** ({low} to {high}) | 300 | 1,100 | 3 / 3 | abc |"
    assert lines[4] == "| t | 1.00 (0.898 to 1.11) | 1,050 | 1,050 | 3 / 3 | abc |"


def test_tables_say_what_is_not_equal():
    """Processors if there are several, and sides at different commits."""
    ours, peer = make_cell([1.0]), make_cell([1.0], "sb3_ppo/CartPole-v1/zoo")
    ours["runs"][0]["machine"] = make_machine(commit="abc")
    peer["runs"][0] |= {"commit": "sb3", "machine": make_machine(commit="b")}
    columns = {"result": "headline"}
    found = report.describe_machines([ours, peer])
    assert "a; commit abc, b; a. Others: sb3. Not interleaved, as " in found
    assert "Not interleaved" not in report.describe_machines([peer])  # such as a match
    assert "processor" not in report.make_cell_table([ours, peer], columns)
    peer["runs"][0]["machine"] = make_machine(commit="abc", cpu="B")
    assert report.describe_machines([ours, peer]).endswith("; commit abc; a. Others: sb3.")
    assert "| CartPole-v1, zoo | 1.00 | B | 1.00 | 1 |" in report.make_cell_table([ours, peer], columns)
    ratio = {"title": "t", "quantity": "steps_per_second", "ours": "a", "peer": "b"}
    table = report.make_ratio_table({"cells": {"a": ours, "b": peer}, "ratios": [ratio]})
    assert table.endswith("\n| t | 1.00 | 1,000 | 1,000 | 1 / 1 | sb3 | B, a |")


def test_a_match_shows_its_own_interval():
    cell = make_cell([1.0])
    cell["runs"][0]["metrics"] = {"eval/a": 1.0, "eval/a_low": 0.5, "eval/a_high": 1.5}
    assert "| CartPole-v1, default | 1.00 (0.500 to 1.50) |" in report.make_cell_table([cell], {"A": "a"})


def test_summaries_take_medians_of_times_and_means_of_metrics():
    cells = {"x/a": make_solved([100, 300, 800]), "x/b": make_cell([1.0, 2.0, 6.0])}
    summary = "{x/a seconds_to_threshold .1f} s, {x/a steps_to_threshold ,.0f} steps, {x/b headline .0%}"
    assert report.fill_summary({"cells": cells, "summary": summary}) == "3.0 s, 300 steps, 300%"


def test_bands_of_pictures_are_intervals_of_the_mean():
    """At equal steps, whether they are shown by steps or by seconds: a fast run does not end a slow one."""
    curves = [np.array([[0.0, 100.0], [0.0, 5 * a], [a, a + 10]]) for a in (1.0, 2.0, 6.0)]
    x, mean, half = pictures.find_band(curves, 4, 0)
    assert (x[0], x[-1], mean[0]) == (0, 100, 3) and mean[30] == pytest.approx(3 + x[30] / 10)
    seconds, by_seconds, _ = pictures.find_band(curves, 4, 1)
    assert seconds == pytest.approx(x * 15 / 100) and (by_seconds == mean).all()
    assert half == pytest.approx(4.3027 * np.std([1, 2, 6], ddof=1) / 3**0.5, rel=1e-4)


def test_curves_of_a_picture_differ_without_colours():
    assert len({(style["ls"], style["marker"]) for style in pictures.STYLES[:8]}) == 8
    assert len({tuple(style.values()) for style in pictures.STYLES}) == 64


def test_studies_that_have_not_run_say_so():
    """Gaps that are zero but for rounding have no sign."""
    for study in report.STUDIES.values():
        assert all("not run yet" in text.lower() for text in study.make_sections(None).values())
    assert tsp_networks.show_gap(-1e-9) == "0.00"


def test_rows_replace_those_of_the_same_keys(tmp_path, monkeypatch):
    """And those of a program are all of the commit it began with, though the first results have changed the tree."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    helpers.describe_machine_once.cache_clear()
    helpers.save_rows("x", [{"a": 1, "b": 1}, {"a": 2, "b": 1}], ("a",))
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: pytest.fail("git is asked again"))
    helpers.save_rows("x", [{"a": 2, "b": 7}], ("a",))
    assert [(row["a"], row["b"]) for row in common.load_results("x")["rows"]] == [(1, 1), (2, 7)]


def test_a_missing_section_is_an_error_not_a_silent_no_op():
    assert common.replace_section("a<!-- x -->old<!-- /x -->b", "x", "new") == "a<!-- x -->new<!-- /x -->b"
    with pytest.raises(ValueError, match="no <!-- y -->"):
        common.replace_section("a", "y", "new")


def test_leads_of_ppo_are_paired():
    values = ((0.8, 0.7), (0.7, 0.72), (0.9, 0.8), (0.8, 0.75))
    looks = {"ppo_looks": 0.5, "threshold_looks": 1.0}
    rows = [
        {"cost": 0.06, "best": looks | {"ppo_f1": a, "threshold_f1": b}, "control": {"threshold_f1": b - 0.1}}
        for a, b in values
    ]
    lead, interval, wins = change_detection.compare(rows, "threshold")
    assert lead == pytest.approx(0.0575) and wins == 3
    assert interval == pytest.approx(3.182 * statistics.stdev((0.1, -0.02, 0.1, 0.05)) / 2, rel=1e-3)
    assert change_detection.compare(rows, "threshold", "control")[0] == pytest.approx(0.1575)
    # Half a look at a price of 0.3 in F1
    assert change_detection.compare(rows, "threshold", metric="net")[0] == pytest.approx(0.0575 + 0.15)
    assert np.isnan(change_detection.compare(rows[:1], "threshold")[1])


def test_the_criterion_of_change_detection_counts_seeds():
    best, last = ([{"oracle_f1": 0.5, "ppo_f1": 0.5 - step * i} for i in range(5)] for step in (0.01, 0.02))
    rows = [
        {"best": best[i] | {"everywhere_f1": 0.47}, "last": last[i], "seconds": 40.0 + i} for i in range(5)
    ]
    found = change_detection.judge(rows)
    assert found == {"best": 4, "last": 2, "seconds": 44.0} | {
        "best_lead": pytest.approx(0.01),
        "last_lead": pytest.approx(-0.01),
    }


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
    change_detection.measure(
        ["haze-3"], [1], f"{tiny} --ppo-iterations 2 --eval-episodes 4", ["ppo", "control"]
    )
    (row,) = common.load_results("change_detection")["rows"]
    assert {"ppo_f1", "oracle_f1", "threshold_own_f1", "all_seconds", "all_own_return"} <= row["best"].keys()
    assert {"all_f1", "oracle_f1"} <= row["control"].keys() and row["detector_seconds"] > 0
    assert change_detection.make_sections({"rows": [row]})


def test_the_looks_of_the_shipped_policy_are_those_of_its_page():
    """Twice at clear roofs, never at the ground; of the pairs in the picture, only changes without haze are found."""
    agent, args, test, is_roof, is_hazy = change_detection.read_checkpoint_pairs()
    probability, looks, _ = cd.predict(agent, args, test)
    assert (looks.numpy()[~is_roof] == 0).all() and (looks.numpy()[is_roof & ~is_hazy] == 2).all()
    share = (looks.numpy()[is_roof & is_hazy] == 1).mean()
    text = " ".join((ROOT / "docs" / "ppo_change_detection.md").read_text().split())
    assert f"once at {100 * share:.0f} % of the roofs with haze and twice at the others" in text
    chosen = change_detection.find_mixed_pairs(test, is_hazy)[:2]
    is_found = probability[chosen, 4::8, 4::8] > 0.44  # the threshold of the checkpoint
    assert torch.equal(is_found, (test[chosen, -1, 4::8, 4::8] == 1) & ~torch.from_numpy(is_hazy[chosen]))


def test_rules_look_as_often_as_the_policy(monkeypatch):
    """Levels are found by bisection."""
    scores = torch.linspace(0, 1, 1001)

    def predict(agent, args, pairs, rule):
        return None, 2.0 * rule(pairs), None

    monkeypatch.setattr(change_detection.cd, "predict", predict)
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
