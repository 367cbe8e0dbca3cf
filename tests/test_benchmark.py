"""The pages follow from the committed results, and the arithmetic of the studies is right."""

import json
import statistics
import sys

import numpy as np
import pytest
from conftest import ROOT

from envs_shared.go_tasks.match import compute_interval

sys.path += [str(ROOT / "benchmark"), str(ROOT / "benchmark" / "studies"), str(ROOT / "benchmark" / "peers")]
import change_detection
import common
import go_ablations
import go_engine
import r2d2_windows
import records
import report
import scaling
import speed


def test_the_pages_follow_from_the_committed_results():
    """Writing the report anew changes nothing in the pages and README.md, and each picture that they show is there."""
    published = records.load_published()
    for path, text in report.make_pages(published).items():
        assert path.read_text() == text, path.name
    sections = report.make_sections(published)
    assert {page for page, _ in sections} == {*report.SCRIPTS, "README", "scaling"} and len(sections) >= 20
    names = {*report.list_drawn(published), "change_detection", "go_search"}
    assert names == {"go_default", "ppo_tasks", "r2d2_memory", "tsp_gaps", "change_detection", "go_search"}
    for name in names:
        assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_file_of_results_is_shown():
    """None is of a program that is gone or of a tree with changes, and each suite says on which page it stands."""
    published = records.load_published()
    names = {path.stem for path in common.RESULTS.glob("*.json")}
    assert names == published.keys() | set(report.MEASURED)
    for name, results in published.items():
        assert results["tables"] or results["ratios"] or name == "ablations"
        assert not records.list_dirty(results)
    for name in set(report.MEASURED):
        assert not any("dirty" in row["machine"]["commit"] for row in common.load_results(name)["rows"])


def test_how_many_deviations_three_times_the_steps_are():
    """What benchmark/README.md says of the committed cells whose runs all got to the threshold, not all at once."""
    found = []
    for cell in (cell for results in records.load_published().values() for cell in results["cells"].values()):
        if cell["threshold"] is not None and len(cell["runs"]) > 1:
            deviation = np.std(np.log(records.get_values(cell, "steps_to_threshold")), ddof=1)
            found += [np.log(3) / deviation] if deviation > 0 and np.isfinite(deviation) else []
    low, median, high = np.quantile(found, [0.1, 0.5, 0.9])
    text = (ROOT / "benchmark" / "README.md").read_text().replace("\n", " ")
    assert f"are {low:.1f} to {high:.1f} standard deviations in four of five" in text
    assert f"in the median {median:.1f}." in text


def make_cell(setting, steps, **changes):
    """A cell of a task whose runs solved it after `steps`, or never, in a hundredth of that in seconds."""
    runs = [
        {"seed": seed, "metrics": {"a": 1.0 + seed}, "value": 500.0, "curve": [[10, 0.1, 0.0], [400, 4.0, 500.0]]}
        | {"steps_to_threshold": x, "seconds_to_threshold": x and x / 100, "commit": "abc", "machine": None}
        | {"device": "cpu", "torch": "2", "steps_per_second": 100.0 + seed, "cpu_seconds": 60.0}
        for seed, x in enumerate(steps)
    ]
    cell = {"task": "CartPole-v1", "setting": setting, "command": f"python {setting}.py --a  1", "threshold": 475.0}
    return cell | {"runs": runs, "missing": [], "script": setting, "better": "higher"} | changes


def test_ratios_count_runs_that_never_got_there():
    cells = {"a": make_cell("ours", [100, 300, None]), "b": make_cell("b", [None, 600, None])}
    cells |= {"c": make_cell("c", [200, 300, 400]), "d": make_cell("d", [1000, 1100, 1200])}
    base = {"title": "t", "quantity": "steps_to_threshold", "better": "lower", "ours": "a"}
    lines = [report.make_ratio_line(base | {"peer": peer}, cells) for peer in "bc"]
    assert lines[0] == ["t", "abc", "300 (2 of 3)", "over 400 (1 of 3)", "-"]
    assert lines[1] == ["t", "abc", "300 (2 of 3)", "300", "1.00 (-)"]
    ours = base | {"ours": "c", "peer": "d"}
    assert report.make_ratio_line(ours, cells)[-1].startswith("**0.273** (0.1")  # ours is better, whatever the draw
    assert report.make_ratio_line(ours | {"better": "higher"}, cells)[-1].startswith("0.273 (0.1")


def test_tables_of_metrics_show_mean_and_range_or_the_interval_of_the_only_run():
    results = {"cells": {"a": make_cell("a", [1, 2]), "b": make_cell("b", [1], task="other")}}
    results["cells"]["b"]["runs"][0]["metrics"] |= {"a_low": 0.5, "a_high": 1.5}
    table = report.make_column_table(results, {"A": "a"})
    assert "| CartPole-v1, a | 1.50 (1.00 to 2.00) | 60.0 | 2 |" in table
    assert "| other, b | 1.00 (0.500 to 1.50) | 60.0 | 1 |" in table
    assert table.endswith("- CartPole-v1, a: `python a.py --a 1`\n- other, b: `python b.py --a 1`")


def test_summaries_take_medians_of_times_and_means_of_metrics():
    cells = {"x/a": make_cell("a", [100, 300, 800]), "x/b": make_cell("b", [600, 600, 600])}
    summary = "{x/a seconds_to_threshold .1f} s, {x/b:x/a steps_to_threshold .2f}x, {x/a a .0%}"
    assert report.fill_summary({"cells": cells, "summary": summary}) == "3.0 s, 2.00x, 200%"


def test_speed_ratio_is_of_the_best_setting_of_each():
    rows = [{"what": "step", "column": c, "value": v} for c, v in (("ours, A", 5), ("ours, B", 2), ("rl4co, A", 8))]
    rows.append({"what": "decode", "column": "rl4co, A", "value": 3})
    rows.append({"what": "decode", "column": "ours, B", "value": 4})
    table = speed.make_case_table(rows, "t")
    assert "| t | ours, A | ours, B | rl4co, A | rl4co / ours, the best of each |" in table
    assert "| step | 5.00 | 2.00 | 8.00 | **4.00** |" in table and "| decode |  | 4.00 | 3.00 | **0.75** |" in table


def test_rows_replace_those_of_the_same_keys(tmp_path, monkeypatch):
    """And those of a program are all of the commit it began with, though the first results have changed the tree."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.describe_machine_once.cache_clear()
    common.save_rows("x", [{"a": 1, "b": 1}, {"a": 2, "b": 1}], ("a",))
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: pytest.fail("git is asked again"))
    common.save_rows("x", [{"a": 2, "b": 7}], ("a",))
    monkeypatch.undo()
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["a"], row["b"]) for row in rows] == [(1, 1), (2, 7)]
    assert {row["machine"]["commit"] for row in rows} == {common.describe_machine()["commit"]}


def test_scaling_compares_neighbouring_runs_by_the_step():
    def runs(script, *pairs):
        for pair in pairs:
            for n, (steps, wall, cpu) in enumerate(pair, 1):
                yield {"script": script, "processes": n, "steps": steps, "wall_seconds": wall, "cpu_seconds": cpu}

    pairs = [((1000, 4, 4), (2000, 4, 4)), ((1000, 6, 4), (1000, 2, 1)), ((1000, 8, 8), (1000, 8, 2))]
    rows = [row for script in scaling.CASES for row in runs(script, *pairs)]
    assert scaling.summarize(rows, "ppo") == {"wall_seconds": [6, 2, 2, 1, 3], "cpu_seconds": [4, 2, 4, 2, 4]}
    table = scaling.make_table(rows)
    assert "| `ppo` | environment steps | 167 and 500 | **2.00** (1.00 to 3.00) | 4 and 2 | **4.00** (2.00" in table


def test_window_figure_shows_what_the_replay_holds(tmp_path):
    replay = r2d2_windows.fill_replay()
    assert replay.first[:3].tolist() == [-4, 1, 6] and replay.end[:3].tolist() == [10, 10, 6]
    assert replay.num_added == 3 and replay.terminated[:3].tolist() == [False, False, True]
    r2d2_windows.draw(tmp_path / "windows.png")
    assert (tmp_path / "windows.png").stat().st_size > 5_000


def test_go_ablations_take_the_checkpoints_of_finished_runs(tmp_path):
    def write_suite(*settings):
        cells = [{"task": "Go-5x5", "name": s, "setting": s, "seed": 1, "folder": s} for s in settings]
        cells.append(cells[0] | {"task": "another", "folder": "nowhere"})
        (tmp_path / "suite.json").write_text(json.dumps({"suite": "a", "ratios": [], "errors": [], "cells": cells}))

    write_suite("default", "noise")
    result = dict.fromkeys(records.RESULT_KEYS, 0) | {"headline": "x", "metrics": {"x": 1.0}}
    for setting in ("default", "noise"):
        with pytest.raises(common.ResultsError, match=f"{setting}: no finished run"):
            go_ablations.find_checkpoints(tmp_path)
        path = tmp_path / setting / "try_1" / "run"
        path.mkdir(parents=True)
        (path / "result.json").write_text(json.dumps(result))
        (path / "checkpoint.pt").write_text("")
    found = go_ablations.find_checkpoints(tmp_path)
    assert found == {s: {1: tmp_path / s / "try_1" / "run" / "checkpoint.pt"} for s in ("default", "noise")}
    write_suite("noise", "default")
    with pytest.raises(common.ResultsError, match="not the default"):
        go_ablations.find_checkpoints(tmp_path)


def test_table_of_go_ablations_shows_mean_and_each_seed():
    machine = common.describe_machine()
    rows = [{"setting": "a", "seed": seed, "win_rate": rate, "margin": 2.0} for seed, rate in ((1, 0.5), (2, 0.7))]
    (text,) = go_ablations.make_sections({"rows": [row | {"machine": machine} for row in rows]}).values()
    assert "| a | **60%** (50%, 70%) | +2.0 | 2 |" in text


def test_a_missing_section_is_an_error_not_a_silent_no_op():
    assert common.replace_section("a<!-- x -->old<!-- /x -->b", "x", "new") == "a<!-- x -->new<!-- /x -->b"
    with pytest.raises(ValueError, match="no <!-- y -->"):
        common.replace_section("a", "y", "new")


def test_gains_of_ppo_are_paired_and_averaged_within_data_seeds():
    values = ((1, 0.8, 0.7), (1, 0.7, 0.72), (2, 0.9, 0.8), (3, 0.8, 0.75))
    rows = [{"data_seed": d, "metrics": {"ppo_f1": a, "threshold_f1": b}} for d, a, b in values]
    gain, interval, wins = change_detection.compare(rows, "threshold")
    assert gain == pytest.approx(0.0575) and wins == 3
    assert interval == pytest.approx(4.303 * statistics.stdev((0.04, 0.1, 0.05)) / 3**0.5, rel=1e-3)
    assert change_detection.compare(rows[:2], "threshold")[1] == pytest.approx(
        12.71 * statistics.stdev((0.1, -0.02)) / 2**0.5, rel=1e-3
    )
    assert change_detection.compare(rows[:1], "threshold")[1] is None


def test_levels_of_rules_are_found_by_bisection():
    level = change_detection.find_level(lambda level: 2 * (1 - level) ** 2, 0.5, 0.0, 1.0, 30)
    assert level == pytest.approx(0.5, abs=1e-6)


def test_matches_count_draws_and_whole_boards():
    rows = [([12], 25.0, True), ([12], 25.0, False), ([13], 0.0, True), ([12], 25.0, True)]
    found = go_engine.summarize(*zip(*rows, strict=True), 5, 0.0)
    assert found["ours_win_rate"] == 0.5 and found["whole_boards"] == 1 and found["mean_margin"] == 0
    assert found["distinct_games"] == 3 and found["ours_points"] == found["peer_points"] == 1.5
    assert found["ours_win_rate_black"] == 0.75
    assert found["ours_win_rate_black_high"] == compute_interval(0.75, 2)[1]
    half = go_engine.summarize([[]], [-25.0], [False], 5, 0.5)
    assert half["whole_boards"] == 1 and half["mean_margin"] == 25.5  # the whole board for white, and komi
