"""The benchmark's reports follow from the committed results, and its arithmetic is right."""

import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmark"))
import common
import ppo_cartpole
import ppo_control


@pytest.mark.parametrize("benchmark", [ppo_cartpole, ppo_control])
def test_the_docs_follow_from_the_committed_results(benchmark):
    """Writing the report anew changes nothing in docs/ppo.md or README.md."""
    name = benchmark.__name__
    found = {}
    for path in (ROOT / "docs" / "ppo.md", ROOT / "README.md"):
        text = path.read_text()
        for section, content in benchmark.sections(common.load_results(name)).items():
            if f"<!-- {section} -->" in text:
                found[section] = common.replace_section(text, section, content) == text
    assert found and all(found.values()), found
    assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def make_run(seconds, eval_return=500.0):
    return {"solved_step": 1000, "solved_cpu_seconds": seconds, "eval_return": eval_return, "curve": [[1, 1, 1]]}


def test_summary_counts_unsolved_runs_as_infinitely_slow():
    rows = [
        {"seed": s, "ours": make_run(o), "sb3": make_run(p)} for s, (o, p) in enumerate([(2, 20), (4, 30), (None, 40)])
    ]
    rows[0]["ours"]["eval_return"] = 480.0
    summary = ppo_cartpole.summarize({"rows": rows})
    assert summary["ours"] == 4 and summary["sb3"] == 30 and summary["ratio"] == 7.5
    assert summary["in_five_seconds"] == 2 and summary["stays_solved"] == 2 and summary["num_seeds"] == 3
    assert "not in 100k steps" in ppo_cartpole.make_table({"rows": rows})


def test_figures_are_drawn(tmp_path):
    for benchmark in (ppo_cartpole, ppo_control):
        path = tmp_path / f"{benchmark.__name__}.png"
        benchmark.draw(common.load_results(benchmark.__name__), path)
        assert path.stat().st_size > 20_000


def test_a_missing_section_is_an_error_not_a_silent_no_op():
    assert common.replace_section("a<!-- x -->old<!-- /x -->b", "x", "new") == "a<!-- x -->new<!-- /x -->b"
    with pytest.raises(ValueError, match="no <!-- y -->"):
        common.replace_section("a", "y", "new")
