"""The benchmark's reports follow from the committed results, and its arithmetic is right."""

import json
import statistics
import sys

import pytest
from conftest import ROOT

from envs_shared.go_tasks.match import compute_interval

sys.path.append(str(ROOT / "benchmark"))
import change_detection
import change_speed
import common
import go_ablations
import go_default
import go_matches
import go_search
import go_speed
import ppo_tasks
import r2d2_memory
import r2d2_speed
import r2d2_windows
import records
import scaling
import tsp_active
import tsp_gaps
import tsp_speed

DOCS = {
    change_detection: "ppo_change_detection",
    change_speed: "ppo_change_detection",
    go_ablations: "alphazero_go",
    go_default: "alphazero_go",
    go_matches: "alphazero_go",
    go_search: "alphazero_go",
    go_speed: "alphazero_go",
    ppo_tasks: "ppo",
    r2d2_memory: "r2d2_lstm",
    r2d2_speed: "r2d2_lstm",
    scaling: "scaling",
    tsp_active: "reinforce_tsp_attention",
    tsp_gaps: "reinforce_tsp_attention",
    tsp_speed: "reinforce_tsp_attention",
}


@pytest.mark.parametrize("benchmark", DOCS)
def test_the_docs_follow_from_the_committed_results(benchmark):
    """Writing the report anew changes nothing in the script's page or README.md."""
    name = benchmark.__name__
    found = {}
    for path in (ROOT / "docs" / f"{DOCS[benchmark]}.md", ROOT / "README.md"):
        text = path.read_text()
        for section, content in benchmark.sections(common.load_results(name)).items():
            if f"<!-- {section} -->" in text:
                found[section] = common.replace_section(text, section, content) == text
    assert found.keys() == benchmark.sections(common.load_results(name)).keys() and all(found.values()), found
    if hasattr(benchmark, "draw"):
        assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def make_cell(setting, steps, **changes):
    """A cell of a task whose runs solved it after `steps`, or never, in a hundredth of that in seconds."""
    runs = [
        {"seed": seed, "metrics": {}, "value": 500.0, "curve": [[10, 0.1, 0.0], [400, 4.0, 500.0]]}
        | {"steps_to_threshold": x, "seconds_to_threshold": x and x / 100, "commit": "abc", "machine": None}
        | {"device": "cpu", "torch": "2", "steps_per_second": 100.0 + seed}
        for seed, x in enumerate(steps)
    ]
    cell = {"task": "CartPole-v1", "setting": setting, "command": f"python {setting}.py --a  1", "threshold": 475.0}
    return cell | {"runs": runs, "script": setting} | changes


def test_tables_of_tasks_count_runs_that_never_got_there():
    cells = {"a": make_cell("ours", [100, 300, None]), "b": make_cell("b", [None, 600, None])}
    cells |= {"c": make_cell("c", [200, 300, 400])}
    ratios = [{"quantity": "seconds_to_threshold", "ours": "a", "peer": peer} for peer in "bc"]
    ratios += [{"quantity": "steps_per_second", "ours": "a", "peer": "c", "title": "t, both with equal settings"}]
    results = {"cells": cells, "ratios": ratios}
    table = ppo_tasks.make_table(results)
    assert "| CartPole-v1 | 475 | 300 (2 of 3) | over 400 (1 of 3) | - | 3.00 (2 of 3) | over 4.00 (1 of 3) |" in table
    assert "| 300 (2 of 3) | 300 | **1.0** (-) | 3.00 (2 of 3) | 3.00 | **1.0** (-) |" in table
    assert "- CartPole-v1: `python ours.py --a 1`" in table
    assert "| equal settings | 101 | 101 | **1.00** (" in ppo_tasks.make_speed_table(results)
    assert "CartPole-v1 solved in 3.0 CPU-seconds (median of 3" in ppo_tasks.sections(results)["ppo_tasks_cell"]


def test_speed_ratio_is_of_medians_and_of_the_best_setting_of_each():
    def side(seconds):
        return {"train_step": seconds, "greedy_decode": 2 * seconds, "operations": 1, "views": 1}

    cells = (("highest", 4, 8), ("highest", 5, 9), ("highest", 90, 8), ("medium", 2, 12), ("medium", 2, 12))
    rows = [{"num_nodes": 20, "precision": p, "ours": side(a), "rl4co": side(b)} for p, a, b in cells]
    (cell,) = tsp_speed.summarize({"rows": rows}).values()
    assert cell["train_step", "ours", "highest"] == 5 and cell["train_step", "rl4co", "medium"] == 12
    assert cell["train_step", "ratio"] == 4 and cell["greedy_decode", "ratio"] == 4


def test_scaling_compares_neighbouring_runs_by_the_step():
    def runs(script, *pairs):
        for pair in pairs:
            for n, (steps, wall, cpu) in enumerate(pair, 1):
                yield {"script": script, "processes": n, "steps": steps, "wall_seconds": wall, "cpu_seconds": cpu}

    pairs = [((1000, 4, 4), (2000, 4, 4)), ((1000, 6, 4), (1000, 2, 1)), ((1000, 8, 8), (1000, 8, 2))]
    rows = [row for script in scaling.CASES for row in runs(script, *pairs)]
    assert scaling.summarize(rows, "ppo") == {"wall_seconds": [6, 2, 2, 1, 3], "cpu_seconds": [4, 2, 4, 2, 4]}
    table = scaling.make_table({"rows": rows})
    assert "| `ppo` | environment steps | 167 | 500 | **2.00** (1.00 to 3.00) | 4 | 2 | **4.00** (2.00" in table


def test_gap_table_shows_mean_and_range_over_seeds():
    metrics = [{f"{d}_gap": gap for d in tsp_gaps.DECODINGS} for gap in (1.0, 2.0)]
    base = {"task": "default", "instances": 10, "cpu_seconds": 60.0, "num_evaluated": 5}
    rows = [base | {"seed": i, "metrics": m, "curve": [[1, 1.0, 5.0]]} for i, m in enumerate(metrics)]
    assert "| 2 | 10 | 60 | **1.50** (1.00 to 2.00)" in tsp_gaps.make_table({"rows": rows}, ["default", "long"])


def test_figures_are_drawn(tmp_path):
    for benchmark in (go_default, go_search, ppo_tasks, r2d2_memory, tsp_gaps):
        path = tmp_path / f"{benchmark.__name__}.png"
        benchmark.draw(common.load_results(benchmark.__name__), path)
        assert path.stat().st_size > 20_000


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
        with pytest.raises(records.ResultsError, match=f"{setting}: no finished run"):
            go_ablations.find_checkpoints(tmp_path)
        path = tmp_path / setting / "try_1" / "run"
        path.mkdir(parents=True)
        (path / "result.json").write_text(json.dumps(result))
        (path / "checkpoint.pt").write_text("")
    found = go_ablations.find_checkpoints(tmp_path)
    assert found == {s: {1: tmp_path / s / "try_1" / "run" / "checkpoint.pt"} for s in ("default", "noise")}
    write_suite("noise", "default")
    with pytest.raises(records.ResultsError, match="not the default"):
        go_ablations.find_checkpoints(tmp_path)


def test_table_of_go_ablations_shows_mean_and_each_seed():
    rows = [{"setting": "a", "seed": seed, "win_rate": rate, "margin": 2.0} for seed, rate in ((1, 0.5), (2, 0.7))]
    assert "| a | **60%** (50%, 70%) | +2.0 | 2 |" in go_ablations.make_table({"rows": rows})


def test_memory_table_has_a_line_for_each_variant_measured():
    base = {"task": "TMaze20-v0", "cpu_seconds": 60.0, "steps": 10, "curve": [[1, 1.0, 0.5]], "best_return": 0.97}
    rows = [
        base | {"variant": v, "seed": s, "return": r}
        for v, s, r in (("LSTM", 1, 1.0), ("LSTM", 2, 0.9), ("no memory", 1, 0.1))
    ]
    table = r2d2_memory.make_table({"rows": rows})
    assert "| TMaze20-v0 | LSTM | 1.00, 0.90 | **0.95** | 0.97 | 60 |" in table
    assert "| TMaze20-v0 | no memory | 0.10 | **0.10** | 0.97 | 60 |" in table and "burn-in" not in table
    assert r2d2_memory.summarize({"rows": rows}) == ""
    rows = [row | {"task": "RepeatPreviousEasy-v0"} for row in rows]
    assert r2d2_memory.summarize({"rows": rows}) == "RepeatPrevious easy 0.95 (without memory 0.1)"


def test_a_missing_section_is_an_error_not_a_silent_no_op():
    assert common.replace_section("a<!-- x -->old<!-- /x -->b", "x", "new") == "a<!-- x -->new<!-- /x -->b"
    with pytest.raises(ValueError, match="no <!-- y -->"):
        common.replace_section("a", "y", "new")


def test_each_run_of_the_memory_tasks_is_saved_as_it_ends(tmp_path, monkeypatch):
    def run(task, variant, seed):
        if seed == 2:
            raise RuntimeError("killed")
        return {"task": task, "variant": variant, "seed": seed, "return": 1.0}

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(r2d2_memory, "measure_run", run)
    old = {"task": "TMaze20-v0", "variant": "LSTM", "return": 0.5}
    with pytest.raises(RuntimeError, match="killed"):
        r2d2_memory.measure(["TMaze20-v0"], ["LSTM"], [old | {"seed": 1}, old | {"seed": 2}], 1)
    rows = common.load_results("r2d2_memory")["rows"]
    assert [(row["seed"], row["return"]) for row in rows] == [(2, 0.5), (1, 1.0)]
    assert rows[1]["commit"] == common.describe_machine()["commit"]


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
    games = [{"is_black": True, "margin": 25.0, "moves": [12]}, {"is_black": False, "margin": -25.0, "moves": [12]}]
    games += [{"is_black": True, "margin": 0.0, "moves": [13]}, games[0]]
    row = {"name": "5x5", "size": 5, "komi": 0.0, "level": 1, "simulations": 100, "games": games}
    found = go_matches.summarize(row)
    assert found["win_rate"] == 0.5 and found["whole"] == 1 and found["games"] == 4 and found["margin"] == 0
    assert go_matches.show_game(row) == "5x5, level 1: C3"
    assert found["win_rate_black"] == 0.75 and found["win_rate_high_black"] == compute_interval(0.75, 2)[1]
    assert "| 5x5 | 100 | 1 | 0 | 4 | 3 | **50% (" in go_matches.make_table({"rows": [row]})
    half = row | {"komi": 0.5, "games": [{"is_black": False, "margin": 25.5, "moves": []}]}
    assert go_matches.summarize(half)["whole"] == 1  # the whole board for white, and komi
