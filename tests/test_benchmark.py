"""Statistics, tables and comparisons of results; and the pages follow from the committed results."""

import json
import math
import re
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, SCRIPTS
from results import NAME, SPEEDS, STEPS, make_cell, make_machine, make_results, make_solved, write_suite
from scipy import stats

from benchmark import common, compare, pictures, records, report
from benchmark.common import ResultsError
from benchmark.intervals import choose_center, find_interval, find_p_worse, find_ratio
from benchmark.markdown import replace_section, show
from benchmark.runs import NOT_RUN, find_threshold
from benchmark.studies import learned

STUDIES = {*report.STUDIES}
SLOW = partial(pytest.param, marks=pytest.mark.slow)


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
    """None is of a program that is gone or of a tree with changes, and each suite says on which page it
    stands."""
    published = records.load_published()
    names = {path.stem for path in common.RESULTS.glob("*.json")}
    assert published.keys() <= names <= published.keys() | STUDIES
    for name, results in published.items():
        assert results["tables"] or name == "ablations"
        for run in (run for cell in results["cells"].values() for run in cell["runs"]):
            assert "dirty" not in run["machine"]["commit"]
    for name in names & STUDIES:
        assert not any("dirty" in row["machine"]["commit"] for row in records.load_results(name)["rows"])


# ---- Statistics --------------------------------------------------------------------------------------------


def test_ratios_are_those_of_geometric_means_with_an_interval_by_logarithms():
    """The ratio is in the middle of its interval. Medians stand for samples with values that are not
    finite."""
    ours, peer = [2.0, 8.0, 2.0], [4.0, 4.0, 5.0]
    ratio, (low, high) = find_ratio(ours, peer)
    assert ratio == pytest.approx((32 / 80) ** (1 / 3)) and low < ratio < high
    assert low * high == pytest.approx(ratio**2)
    assert choose_center(ours, peer)(ours) == pytest.approx(32 ** (1 / 3))
    for other in (math.inf, math.nan, 0.0, -1.0):
        assert choose_center(ours, [other])([1.0, 3.0, math.inf]) == 3
    for one, other in ((1.0, -1.0), (1.0, math.inf), (1.0, math.nan), (0.0, 1.0), (math.inf, 1.0)):
        ratio, interval = find_ratio([one], [other])
        assert not 0 < ratio < math.inf and interval is None
    assert find_ratio([1.0, 1.0], [2.0, math.inf, 2.0]) == (0.5, None)


@pytest.mark.parametrize("num", [3, 5, 10])
def test_intervals_cover_what_they_say(num):
    """Of 95 % intervals, 95 hold the truth: of means, of differences, and of ratios of skewed values.

    A percentile bootstrap covers 74, 81 and 86 % for means of 3, 4 and 5 values, and 90 % for ten. A pooled
    variance would not do here, as the larger sample has less noise.
    """
    rng, found = np.random.default_rng(num), np.zeros(3)
    for _ in range(600):
        a, b = rng.normal(5.0, 1.0, num), rng.normal(5.0, 0.5, 2 * num)
        ratio = find_ratio(np.exp(a), 2 * np.exp(b))[1]
        intervals = find_interval(a), find_interval(a, b), ratio
        found += [low < x < high for x, (low, high) in zip((5, 0, 0.5), intervals, strict=True)]
    assert (abs(found / 600 - 0.95) < 0.035).all(), found  # four standard deviations; Welch's is a bit wide
    assert find_interval([1.0]) is find_interval([1.0, math.inf]) is None
    low, high = find_interval([499.0, 498.0, 500.0], [500.0] * 3)  # one side may have no noise
    assert (low, high) == pytest.approx((-1 - 4.303 / 3**0.5, -1 + 4.303 / 3**0.5), rel=1e-3)


def test_threshold_is_the_first_point_at_it_in_the_right_direction():
    curve = [SimpleNamespace(step=i + 1, value=x) for i, x in enumerate((3.0, 5.0, 2.0, 4.0, 5.0))]

    def find(threshold, better="higher", in_a_row=1):
        cell = SimpleNamespace(threshold=threshold, better=better, in_a_row=in_a_row)
        return getattr(find_threshold(curve, cell), "step", None)

    assert find(4) == 2
    assert find(3, "lower") == 1 and find(2.5, "lower") == 3
    assert find(6) is None
    assert find(4, in_a_row=2) == 5  # one alone is forgotten
    assert find(4, in_a_row=3) is None
    curve[0].value = float(np.float32(0.9))  # as TensorBoard keeps it: 0.8999999761581421
    assert find(0.9) == 1


# ---- Report ------------------------------------------------------------------------------------------------


def test_tables_say_what_the_pages_do_not_show_now():
    """Cells that have not run, six seeds, sides on two processors, two ratios of a pair, and unusual
    numbers."""
    ours, peer = make_cell([400.0, 410.0, 420.0] * 2), make_cell([1.0], "sb3_ppo/CartPole-v1/zoo")
    peer["runs"][0]["machine"] = make_machine(cpu="B")
    lost = make_cell([], "gnugo/Go/match", missing=[{"seed": x, "error": "exit code 1"} for x in (1, 2)])
    table = report.make_cell_table([ours, lost], {"result": "headline"})
    low, high = map(show, find_interval([400.0, 410.0, 420.0] * 2))
    assert f"| CartPole-v1, default | 410 ({low} to {high}) | 1.00 | 6 |" in table
    assert table.endswith("\n\n- Go, match, seed 1: exit code 1\n- Go, match, seed 2: exit code 1")
    ratio = {"title": "t", "quantity": "steps_per_second", "ours": "a"}
    ratios = [ratio | {"peer": name} for name in "bbc"]
    results = {"cells": {"a": ours, "b": peer, "c": lost}, "ratios": ratios}
    lines = report.make_ratio_table(results).splitlines()
    assert lines[-2:] == [
        "| t | 1.00 | 1,000 | 1,000 | 6 / 1 | abc | B, a |",
        "| t | exit code 1 | 1,000 | - | 6 / 0 | gnugo | a |",
    ]
    assert report.make_difference_table(results, "headline").count("zoo") == 1
    found = [show(x) for x in (0.00999999, 99.96, 1234.5, -1e-12, 5.0, math.inf)]
    assert found == ["0.0100", "100", "1,234", "0", "5.00", "-"]


@pytest.fixture
def suites(tmp_path, monkeypatch):
    """The folder of a test's own suites and results."""
    monkeypatch.setattr(common, "SUITES", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def test_a_report_adds_new_runs_to_the_committed_ones(suites, capsys):
    """They replace those of their seeds. A suite that is not in benchmark/suites is left alone."""
    ours = "python algos/ppo.py"
    write_suite(suites / "a.toml", seeds=(1, 2, 3), default=ours, other=f"{ours} --gamma 0.9")

    def add(values, name=NAME, suite="a", **changes):
        """Add the runs of a cell; returns the number that is new, and all values of the default cell."""
        keys = {"command": ours, "curve": None, "threshold": None} | changes
        report.add_runs(make_results(make_cell(values, name, **keys), suite=suite))
        cell = records.load_published()["a"]["cells"][NAME]
        return capsys.readouterr().out.split(" new runs in")[0], records.get_values(cell, "headline")

    assert add([1.0, 2.0]) == ("a: 2", [1.0, 2.0])
    for num_new, error in ((1, NOT_RUN), (0, "exit code 1")):
        assert add([5.0], missing=[{"seed": 2, "error": error}]) == (f"a: {num_new}", [5.0, 2.0])
    assert add([5.0, 6.0, 7.0]) == ("a: 2", [5.0, 6.0, 7.0])
    other = "ppo/CartPole-v1/other"
    assert add([9.0], other, command=f"{ours} --gamma 0.9") == ("a: 1", [5.0, 6.0, 7.0])
    assert add([9.0], command="of before") == ("a: 0", [5.0, 6.0, 7.0])
    assert add([9.0], suite="own")[0] == "own: not published; --out FOLDER shows it\n"
    assert not (suites / "own.json").exists()
    changed = make_cell([1.0, 2.0])
    changed["runs"][1] |= {"machine": make_machine(commit="abc-dirty"), "commit": "sb3 1.0"}
    with pytest.raises(ResultsError, match=r"/default, seed 2 ran with uncommitted changes: run it again"):
        report.add_runs(make_results(changed))


def test_pages_show_the_cells_and_seeds_that_a_suite_has_now(suites):
    """Not a run of another command or criterion, nor of a seed that the suite has no more."""
    # Of each cell: its command in the suite, and what differs in the results
    cells = {"default": ("--gamma 0.9", {}), "command": ("--gamma 0.8", {"command": "python algos/ppo.py"})}
    cells |= {"criterion": ("--gamma 0.7", {"threshold": 475})}
    commands = {name: f"python algos/ppo.py {flags}" for name, (flags, _) in cells.items()}
    write_suite(suites / "a.toml", seeds=(2, 3), **commands)
    old = []
    for name, (_, changes) in cells.items():
        keys = {"command": commands[name], "curve": None, "threshold": None} | changes
        old.append(make_cell([1.0, 2.0], f"ppo/CartPole-v1/{name}", **keys))
    records.save_results(suites / "a.json", make_results(*old))
    found = records.load_published()["a"]["cells"]
    seeds = [[run["seed"] for run in cell["runs"]] for cell in found.values()]
    assert [*found] == [f"ppo/CartPole-v1/{name}" for name in cells] and seeds == [[2], [], []]
    assert found["ppo/CartPole-v1/default"]["missing"] == [{"seed": 3, "error": NOT_RUN}]


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


def test_a_missing_section_is_an_error_not_a_silent_no_op():
    assert replace_section("a<!-- x -->old<!-- /x -->b", "x", "new") == "a<!-- x -->new<!-- /x -->b"
    with pytest.raises(ValueError, match="no <!-- y -->"):
        replace_section("a", "y", "new")


# ---- Comparison --------------------------------------------------------------------------------------------


def compare_cells(base, new):
    """Return what is worse in a comparison of two cells, and what has failed."""
    rows, notes = compare.compare(make_results(base), make_results(new))
    return [row[1:4] for row in rows if row[-1]], notes


BASE, NAN = [480.0, 490.0, 500.0, 470.0, 500.0], [math.nan] * 5


@pytest.mark.parametrize(
    ("base", "new", "better", "code"),
    [
        (BASE, [485.0, 470.0, 500.0, 495.0, 480.0], "higher", 0),
        (BASE, [300.0, 310.0, 320.0, 290.0, 305.0], "higher", 1),
        (BASE, [x + 300 for x in BASE], "higher", 0),
        (BASE, [x + 300 for x in BASE], "lower", 1),
        ([500.0] * 3, [499.0] * 3, "higher", 1),  # no noise at all
        ([500.0] * 3, [500.0] * 3, "higher", 0),
        ([500.0], [1.0], "higher", 0),  # one seed cannot tell
        ([0.3] * 3, [0.1 + 0.2] * 3, "lower", 0),  # rounding is no noise
        (BASE, [x - 10 for x in BASE], "higher", 1),  # on each seed, though seeds differ by more
        (BASE, NAN, "higher", 1),
        (NAN, BASE, "higher", 0),
    ],
)
def test_comparison_fails_if_a_headline_got_worse_beyond_noise(base, new, better, code):
    worse, _ = compare_cells(make_cell(base, better=better), make_cell(new, better=better))
    assert [quantity for quantity, *_ in worse] == ["headline"] * code


@pytest.mark.parametrize(
    ("steps", "speeds", "worse"),
    [
        (STEPS[::-1], SPEEDS[::-1], []),
        ([3 * x for x in STEPS], SPEEDS, [["steps_to_threshold", "1,100", "3,300"]]),
        ([None] * 5, SPEEDS, [["steps_to_threshold", "1,100", "-"]]),
        ([*STEPS[:4], None], SPEEDS, []),  # one is luck
        (STEPS, [x / 2 for x in SPEEDS], [["steps_per_second", "1,000", "500"]]),
        (STEPS, [x / 1.2 for x in SPEEDS], []),  # may be the machine
        ([x / 3 for x in STEPS], [3 * x for x in SPEEDS], []),
    ],
)
def test_comparison_fails_if_learning_takes_longer(steps, speeds, worse):
    """All runs end at 500."""
    assert compare_cells(make_solved(STEPS), make_solved(steps, speeds)) == (worse, [])


def test_only_equal_things_of_ours_are_compared():
    """No peers, missing cells, other thresholds or other headlines."""
    slow = [3 * x for x in STEPS]
    peer, others = "sb3_ppo/CartPole-v1/zoo", [make_cell(BASE, f"ppo/T{i}/s") for i in range(3)]
    new = make_results(make_solved(slow, name=peer), others[0])
    rows, notes = compare.compare(make_results(make_solved(STEPS, name=peer), *others), new)
    assert {name for name, *_ in rows} == {"ppo/T0/s"}
    assert [note.split(": ")[:2] for note in notes] == [["not compared", f"ppo/T{i}/s"] for i in (1, 2)]
    search = [make_cell([x, 1.1 * x, 1.2 * x], "our_go_search/Go/s", threshold=None) for x in (1000.0, 500.0)]
    assert compare_cells(*search)[0]  # a program of ours among the peers
    assert not compare_cells(make_solved(STEPS), make_solved(slow, threshold=400))[0]
    assert not compare_cells(make_solved(STEPS), make_solved(slow, in_a_row=2))[0]
    assert not compare_cells(make_cell(BASE), make_cell(NAN, headline="x"))[0]


NOISE = {
    "normal": np.random.Generator.standard_normal,
    "skewed": lambda rng, shape: (rng.lognormal(0, 0.5, shape) - 1.133) / 0.604,
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape) / 2**0.5,
}


@pytest.mark.parametrize("kind", ["normal", *map(SLOW, [*NOISE][1:])])
def test_what_a_comparison_finds_and_how_often_it_cries_wolf(kind):
    """The figures of benchmark/README.md; they hold for noise that is skewed or has heavy tails too."""
    rng = np.random.default_rng(4)

    def simulate(num, *shifts):
        """Tell what is worse in comparisons [num, 20] of twenty cells with five seeds.

        In NEW, the headline, steps and speed of cell 0 are worse by `shifts`, in standard deviations of the
        seeds.
        """
        found = np.zeros((num, 20), bool)
        for is_worse in found:
            steps, end, speed = NOISE[kind](rng, (3, 2, 20, 5))
            base, new = np.stack([0.3 * steps + 0.95 * end, steps, speed], 1)
            new[:, 0] += np.array(shifts)[:, None]
            p = find_p_worse(base, new, True).ravel()
            is_worse |= (stats.false_discovery_control(p) <= compare.LEVEL).reshape(3, 20).any(0)
        return found

    assert simulate(500, 0, 0, 0).any(1).mean() <= 0.08
    shifts = (3, 0, 0), (4, 0, 0), (0, 4, 0), (0, 0, 5), (3, 3, 0)
    found = [simulate(150, *shift)[:, 0].mean() for shift in shifts]
    assert (np.array(found) > [0.33, 0.7, 0.7, 0.88, 0.6]).all(), found


def test_a_failed_cell_has_exit_code_1_and_results_that_cannot_be_read_2(tmp_path, monkeypatch, capsys):
    """A missing file, one that is no JSON, one of another form, the list of a run folder, an empty folder."""
    (tmp_path / "runs").mkdir()
    cells = {"base": make_cell(BASE), "apart": make_cell(BASE, "ppo/T/s")}
    cells |= {x: make_cell(BASE[:4], missing=[{"seed": 5, "error": x}]) for x in (NOT_RUN, "exit code 1")}
    contents = {name: json.dumps(make_results(cell)) for name, cell in cells.items()}
    contents |= {"bad": "{", "other": "{}", "list": json.dumps({"suite": "a", "cells": []})}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)

    def compare_with(name):
        monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "base"), str(tmp_path / name)])
        with pytest.raises(SystemExit) as stop:
            common.run_main(compare.main, compare.Args, "")
        return stop.value.code, capsys.readouterr().err

    assert compare_with(NOT_RUN) == (0, "") and compare_with("exit code 1") == (1, "")
    for name, message in {
        "none": f"[Errno 2] No such file or directory: '{tmp_path}/none'",
        "runs": f"[Errno 2] No such file or directory: '{tmp_path}/runs/suite.json'",
        **{name: f"{tmp_path}/{name}: no results of a suite" for name in ("bad", "other", "list")},
        "apart": f"{tmp_path}/base and {tmp_path}/apart have no results of the same cell",
    }.items():
        assert compare_with(name) == (2, f"compare.py: {message}\n")
