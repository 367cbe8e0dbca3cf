"""Statistics, tables and comparisons of results; and the pages follow from the committed results."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, SCRIPTS
from results import NAME, SPEEDS, STEPS, make_cell, make_results, make_solved, write_suite
from scipy import stats

from benchmark import common, compare, machines, pictures, records, report
from benchmark.code import LEGEND, hash_code, hash_file
from benchmark.common import ResultsError
from benchmark.intervals import choose_center, find_interval, find_p_worse, find_ratio
from benchmark.runs import NOT_RUN, find_threshold
from benchmark.studies import learned

STUDIES = {*report.STUDIES}


def test_the_pages_follow_from_the_committed_results():
    """The report would change nothing in the pages, and it draws each picture that they show."""
    published = records.load_published()
    written = report.make_pages(published)
    for path, text in written.items():
        assert path.read_text() == text, path.name
    assert {path.stem for path in written} == {
        *SCRIPTS,
        "README",
        "index",
        "scaling",
        "results",
        "stacked_frames",
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"figures/(\w+)\.png", page.read_text())}
    assert len(shown) >= 8
    for name in shown - {*STUDIES, "change_task", *learned.PICTURES}:
        assert published[name]["tables"]


def test_every_file_of_results_is_shown():
    """None is of a program that is gone or of a tree with changes."""
    published = records.load_published()
    names = {path.stem for path in common.RESULTS.glob("*.json")}
    assert published.keys() <= names <= published.keys() | STUDIES
    assert not any('-dirty"' in path.read_text() for path in common.RESULTS.glob("*.json"))


def test_rows_of_earlier_code_are_marked(monkeypatch):
    """Comments, docstrings and blank lines are no code; the place of a statement is."""
    code = 'def f(x):\n    for _ in range(3):\n        x += 1\n    return "# %s" % x\n'
    same = '"""Of a file."""\n# a\ndef f(x):  # b\n    """Of a\n    function."""\n\n    for _ in range(3):\n'
    same += '        x += 1\n    return "# %s" % x\n'
    moved = code.replace("        x", "    x").replace("range(3):", "range(3): pass")
    assert hash_code(same) == hash_code(code) != hash_code(moved)
    assert hash_code(code.replace("# %s", "#")) != hash_code(code)

    machine = {
        "cpu": "c",
        "cores": 2,
        "python": "3",
        "torch": "2",
        "gymnasium": "1",
        "commit": "a",
        "date": "d",
    }
    old, new, peer = make_cell([1.0]), make_cell([1.0], "ppo/T/new"), make_cell([1.0], "sb3_ppo/T/s")
    for cell, found in (
        (old, {"algos/ppo.py": "0"}),
        (new, {"algos/ppo.py": hash_file("algos/ppo.py")}),
        (peer, {}),
    ):
        cell["runs"][0] |= {"code": found, "cpu_seconds": 1.0, "machine": machine, "commit": "a"}
    for cells, is_marked in (([old, new, peer], True), ([new, peer], False)):
        table = report.make_cell_table(cells, {"x": "headline"})
        names = [line.split(" | ")[0] for line in table.splitlines()[2:]]
        assert [name.endswith(" †") for name in names] == [cell is old for cell in cells]
        assert report.describe_machines(cells).startswith(LEGEND) == is_marked
    monkeypatch.setattr(machines, "list_processors", lambda runs: "c")
    results = make_results(old, new, peer)
    results["ratios"] = [
        {"title": "t", "quantity": "headline", "ours": f"ppo/{name}", "peer": "sb3_ppo/T/s"}
        for name in (NAME.partition("/")[2], "T/new")
    ]
    lines = report.make_ratio_table(results).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| t †", "| t"]
    lines = report.make_difference_table(results, "headline").splitlines()[2:]
    assert ["†" in line for line in lines] == [True, False]


# ---- Statistics --------------------------------------------------------------------------------------------


def test_ratios_are_those_of_geometric_means_with_an_interval_by_logarithms():
    """The ratio is in the middle of its interval. Medians stand for samples with values that are not
    finite."""
    ours, peer = [2.0, 8.0, 2.0], [4.0, 4.0, 5.0]
    ratio, (low, high) = find_ratio(ours, peer)
    assert ratio == pytest.approx((32 / 80) ** (1 / 3)) and low < ratio < high
    assert low * high == pytest.approx(ratio**2)
    assert choose_center(ours, peer)(ours) == pytest.approx(32 ** (1 / 3))
    assert choose_center(ours, [math.inf])([1.0, 3.0, math.inf]) == 3
    assert find_ratio([1.0], [math.inf])[1] is find_ratio([1.0], [-1.0])[1] is None
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


@pytest.mark.parametrize(
    ("threshold", "better", "in_a_row", "step"),
    [
        (4, "higher", 1, 2),
        (2.5, "lower", 1, 3),
        (4, "higher", 2, 5),  # one alone is forgotten
        (6.1, "higher", 1, 6),  # as TensorBoard keeps it: 6.099999904632568
    ],
)
def test_threshold_is_the_first_point_at_it_in_the_right_direction(threshold, better, in_a_row, step):
    values = map(float, np.float32([3.0, 5.0, 2.0, 4.0, 5.0, 6.1]))
    curve = [SimpleNamespace(step=i, value=x) for i, x in enumerate(values, 1)]
    cell = SimpleNamespace(threshold=threshold, better=better, in_a_row=in_a_row)
    assert getattr(find_threshold(curve, cell), "step", None) == step


# ---- Report ------------------------------------------------------------------------------------------------


@pytest.fixture
def suites(tmp_path, monkeypatch):
    """The folder of a test's own suites and results."""
    monkeypatch.setattr(common, "SUITES", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def test_a_report_adds_new_runs_to_the_committed_ones(suites):
    """They replace those of their seeds, and failed ones replace none."""
    command = "python algos/ppo.py"
    write_suite(suites / "a.toml", seeds=(1, 2, 3), default=command)

    def add(values, **changes):
        """Add the runs of a cell; returns the values that are published then."""
        keys = {"command": command, "curve": None, "threshold": None} | changes
        report.add_runs(make_results(make_cell(values, **keys)))
        return records.get_values(records.load_published()["a"]["cells"][NAME], "headline")

    assert add([1.0, 2.0]) == [1.0, 2.0]
    assert add([5.0], missing=[{"seed": 2, "error": "exit code 1"}]) == [5.0, 2.0]
    assert add([5.0, 6.0, 7.0]) == [5.0, 6.0, 7.0]
    assert add([9.0], command="of before") == [5.0, 6.0, 7.0]
    changed = make_cell([1.0])
    changed["runs"][0]["machine"]["commit"] += "-dirty"
    with pytest.raises(ResultsError, match=r"/default, seed 1 ran with uncommitted changes: run it again"):
        report.add_runs(make_results(changed))


def test_pages_show_the_cells_and_seeds_that_a_suite_has_now(suites):
    """Not a run of another command or criterion, nor of a seed that the suite has no more."""
    commands = {name: f"python algos/ppo.py --gamma 0.{name}" for name in "789"}
    write_suite(suites / "a.toml", seeds=(2, 3), **commands)
    changes = {"7": {}, "8": {"command": "python algos/ppo.py"}, "9": {"threshold": 475}}
    old = []
    for name, command in commands.items():
        keys = {"command": command, "curve": None, "threshold": None} | changes[name]
        old.append(make_cell([1.0, 2.0], f"ppo/CartPole-v1/{name}", **keys))
    records.save_results(suites / "a.json", make_results(*old))
    found = records.load_published()["a"]["cells"].values()
    assert [[run["seed"] for run in cell["runs"]] for cell in found] == [[2], [], []]
    assert next(iter(found))["missing"] == [{"seed": 3, "error": NOT_RUN}]


def test_bands_of_pictures_are_intervals_of_the_mean():
    """At equal steps, whether they are shown by steps or by seconds: a fast run does not end a slow one."""
    curves = [np.array([[0.0, 100.0], [0.0, 5 * a], [a, a + 10]]) for a in (1.0, 2.0, 6.0)]
    x, mean, half = pictures.find_band(curves, 4, 0)
    assert (x[0], x[-1], mean[0]) == (0, 100, 3) and mean[30] == pytest.approx(3 + x[30] / 10)
    seconds, by_seconds, _ = pictures.find_band(curves, 4, 1)
    assert seconds == pytest.approx(x * 15 / 100) and (by_seconds == mean).all()
    assert half == pytest.approx(4.3027 * np.std([1, 2, 6], ddof=1) / 3**0.5, rel=1e-4)


def test_a_picture_is_drawn_as_its_suite_says_now(suites, monkeypatch):
    """Labels and panels are those of the TOML file, whatever the stored results had. A cell with an empty
    label is left out."""
    commands = {name: f"python algos/ppo.py --gamma 0.{name}" for name in "789"}
    write_suite(suites / "a.toml", **commands)
    keys = {"curve": "c", "threshold": None}
    old = [make_cell([1.0], f"ppo/CartPole-v1/{x}", command=commands[x], **keys) for x in "789"]
    for cell in old:
        cell["runs"][0]["curve"] = [[0, 0, 0], [10, 1, 2]]
    records.save_results(suites / "a.json", make_results(*old))
    drawn = []

    def note(axes, cells, column, styles, levels, is_logarithmic):
        drawn.append(([pictures.find_label(cell) for cell in cells], column, is_logarithmic))

    monkeypatch.setattr(pictures, "draw_task", note)
    text = (suites / "a.toml").read_text().replace("[defaults]", '[defaults]\ncurve = "c"')
    settings = '[settings]\n7 = { label = "seven" }\n8 = { label = "" }\n'
    for more, expected in (
        ("", [(["ppo, 7", "ppo, 8", "ppo, 9"], 0, False), (["ppo, 7", "ppo, 8", "ppo, 9"], 1, False)]),
        (settings, [(["seven", "ppo, 9"], 0, False), (["seven", "ppo, 9"], 1, False)]),
        (f'{settings}[picture]\nby = "steps"\n', [(["seven", "ppo, 9"], 0, False)]),
        (
            f"{settings}[picture]\nlogarithmic = true\n",
            [(["seven", "ppo, 9"], 0, False), (["seven", "ppo, 9"], 1, True)],
        ),
    ):
        (suites / "a.toml").write_text(more + text)
        drawn.clear()
        assert pictures.draw(records.load_published()["a"], suites / "a.png")
        assert drawn == expected


@pytest.mark.parametrize(
    ("values", "effect"), [([-2.0, 3.0], "- (values are not all positive)"), ([2.0, 8.0], "1.00")]
)
def test_a_ratio_says_if_values_are_not_positive(values, effect):
    """They have no logarithm."""
    ours, peer = make_cell(values), make_cell([4.0], "sb3_ppo/T/s")
    for run in ours["runs"] + peer["runs"]:
        run |= {"commit": "a", "machine": {"cpu": "c", "cores": 2}}
    results = make_results(ours, peer)
    results["ratios"] = [{"title": "t", "quantity": "headline", "ours": NAME, "peer": "sb3_ppo/T/s"}]
    assert report.make_ratio_table(results).splitlines()[2].startswith(f"| t | {effect} |")


def test_a_long_table_has_the_points_of_all_curves(suites, monkeypatch, capsys):
    """Of the committed results, or of the runs in a folder. Nothing else is written."""
    command = "python algos/ppo.py"
    write_suite(suites / "a.toml", seeds=(1, 2), default=command)
    cell = make_cell([1.0, 2.0], command=command, curve=None, threshold=None)
    for run in cell["runs"]:
        run["curve"] = [[100, 0.5, 7.0 * run["seed"]], [200, 1.25, 9.0]]
    records.save_results(suites / "a.json", make_results(cell))
    before = sorted(suites.iterdir())
    assert report.main(report.Args(csv=suites / "points.csv")) == 0
    assert sorted(suites.iterdir()) == sorted([*before, suites / "points.csv"])
    assert capsys.readouterr().out == f"{suites / 'points.csv'}: 4 points\n"
    assert (suites / "points.csv").read_text().splitlines() == [
        "suite,script,task,setting,seed,step,seconds,score",
        "a,ppo,CartPole-v1,default,1,100,0.5,7.0",
        "a,ppo,CartPole-v1,default,1,200,1.25,9.0",
        "a,ppo,CartPole-v1,default,2,100,0.5,14.0",
        "a,ppo,CartPole-v1,default,2,200,1.25,9.0",
    ]
    (suites / "runs" / "s").mkdir(parents=True)
    (suites / "runs" / "s" / "suite.json").write_text("")
    monkeypatch.setattr(records, "collect", lambda folder: make_results(cell) | {"suite": folder.name})
    report.main(report.Args(runs=suites / "runs", csv=suites / "points.csv"))
    assert (suites / "points.csv").read_text().count("\ns,ppo,CartPole-v1,default,") == 4
    with pytest.raises(ResultsError, match="--csv writes nothing but its file: leave out --check and --out"):
        report.main(report.Args(csv=suites / "points.csv", check=True))


# ---- Comparison --------------------------------------------------------------------------------------------


def compare_cells(base, new):
    """Return what is worse in a comparison of two cells, and what has failed."""
    rows, notes = compare.compare(make_results(base), make_results(new))
    return [row[1:4] for row in rows if row[-1] == compare.WORSE], notes


BASE, NAN = [480.0, 490.0, 500.0, 470.0, 500.0], [math.nan] * 5


@pytest.mark.parametrize(
    ("base", "new", "better", "code"),
    [
        (BASE, [485.0, 470.0, 500.0, 495.0, 480.0], "higher", 0),
        (BASE, [300.0, 310.0, 320.0, 290.0, 305.0], "higher", 1),
        (BASE, [x + 300 for x in BASE], "higher", 0),
        (BASE, [x + 300 for x in BASE], "lower", 1),
        ([500.0] * 3, [499.0] * 3, "higher", 1),  # no noise at all
        ([0.3] * 3, [0.1 + 0.2] * 3, "lower", 0),  # rounding is no noise
        ([500.0], [1.0], "higher", 0),  # one seed cannot tell
        (BASE, [x - 10 for x in BASE], "higher", 1),  # on each seed, though seeds differ by more
        (BASE, NAN, "higher", 1),
    ],
)
def test_comparison_fails_if_a_headline_got_worse_beyond_noise(base, new, better, code):
    worse, _ = compare_cells(make_cell(base, better=better), make_cell(new, better=better))
    assert [quantity for quantity, *_ in worse] == ["headline"] * code


@pytest.mark.parametrize(
    ("steps", "speeds", "worse"),
    [
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
    peer, others = "sb3_ppo/CartPole-v1/zoo", [make_cell(BASE, f"ppo/T{i}/s") for i in range(2)]
    new = make_results(make_solved(slow, name=peer), others[0])
    rows, notes = compare.compare(make_results(make_solved(STEPS, name=peer), *others), new)
    assert {name for name, *_ in rows} == {"ppo/T0/s"}
    assert [note.split(": ")[:2] for note in notes] == [["not compared", "ppo/T1/s"]]
    assert not compare_cells(make_solved(STEPS), make_solved(slow, threshold=400))[0]
    assert not compare_cells(make_cell(BASE), make_cell(NAN, headline="x"))[0]
    lost = make_cell(BASE[:4], missing=[{"seed": 5, "error": "exit code 1"}])
    assert compare_cells(make_cell(BASE), lost)[1] == [f"failed: {NAME}: exit code 1"]


@pytest.mark.parametrize(("seeds", "worse"), [([1, 2, 3, 4, 5], ["headline"]), ([2, 3, 4, 5, 6], [])])
def test_the_test_of_pairs_takes_the_runs_of_a_seed_in_any_order(seeds, worse):
    """Each run is worse by 10 than that of its seed in BASE. Other seeds make no pairs."""
    base, new = make_cell(BASE), make_cell([x - 10 for x in BASE])
    for run, seed in zip(new["runs"], seeds, strict=True):
        run["seed"] = seed
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        new["runs"] = [new["runs"][i] for i in order]
        assert [quantity for quantity, *_ in compare_cells(base, new)[0]] == worse


def test_one_seed_on_each_side_is_not_tested(tmp_path, capsys):
    """A line names the cell, and other cells are tested as if it were not there. One more seed is enough."""
    bad = [300.0, 310.0, 320.0, 290.0, 305.0]
    one = make_cell([500.0], "ppo/T/one"), make_cell([1.0], "ppo/T/one")
    base, new = (make_results(make_cell(x), y) for x, y in zip((BASE, bad), one, strict=True))
    rows, notes = compare.compare(base, new)
    assert [(row[0], row[-1]) for row in rows if row[1] == "headline"] == [
        (NAME, "**worse**"),
        ("ppo/T/one", "not tested"),
    ]
    assert notes == ["not tested: ppo/T/one: one seed on each side cannot tell"]
    assert not compare_cells(make_cell([500.0, 500.0]), make_cell([499.0]))[1]
    paths = [tmp_path / "base.json", tmp_path / "new.json"]
    for path, cell in zip(paths, one, strict=True):
        records.save_results(path, make_results(cell))
    with pytest.raises(ResultsError, match=r"^no cell could be tested: run more seeds$"):
        compare.main(compare.Args(*paths))
    assert "\n0 cells compared: 0 worse beyond noise, 0 failed\n" in capsys.readouterr().out


def test_what_a_comparison_finds_and_how_often_it_cries_wolf():
    """The figures of benchmark/README.md."""
    rng = np.random.default_rng(4)

    def simulate(num, *shifts):
        """Tell what is worse in comparisons [num, 20] of twenty cells with five seeds.

        In NEW, the headline, steps and speed of cell 0 are worse by `shifts`, in standard deviations of the
        seeds.
        """
        found = np.zeros((num, 20), bool)
        for is_worse in found:
            steps, end, speed = rng.standard_normal((3, 2, 20, 5))
            base, new = np.stack([0.3 * steps + 0.95 * end, steps, speed], 1)
            new[:, 0] += np.array(shifts)[:, None]
            p = find_p_worse(base, new, True).ravel()
            is_worse |= (stats.false_discovery_control(p) <= compare.LEVEL).reshape(3, 20).any(0)
        return found

    assert simulate(500, 0, 0, 0).any(1).mean() <= 0.08
    shifts = (3, 0, 0), (4, 0, 0), (0, 4, 0), (0, 0, 5), (3, 3, 0)
    found = [simulate(150, *shift)[:, 0].mean() for shift in shifts]
    assert (np.array(found) > [0.33, 0.7, 0.7, 0.88, 0.6]).all(), found
