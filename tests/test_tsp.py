"""The TSP helper: environment, metrics, readers and writers, reference tours and gaps."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from envs_shared.tsp_tasks import files as tsp_files
from envs_shared.tsp_tasks import instances as tsp

TSPLIB = ROOT / "tests" / "data" / "tsplib"
# Coordinates of TSPLIB's smallest GEO instances, whose optima are known
BURMA14 = """16.47 96.10 16.47 94.44 20.09 92.54 22.39 93.37 25.23 97.24 22.00 96.05 20.47 97.02 17.20 96.29 16.30 97.38
14.05 98.12 16.53 97.38 21.52 95.59 19.41 97.13 20.09 94.55"""
ULYSSES16 = """38.24 20.42 39.57 26.15 40.56 25.32 36.26 23.12 33.48 10.54 37.56 12.19 38.42 13.11 37.52 20.44
41.23 9.10 41.17 13.05 36.08 -5.21 38.47 15.13 38.15 15.35 37.51 15.17 35.49 14.32 39.36 19.56"""


def solve_exactly(points, metric="EUCLIDEAN"):
    """Length of the optimal tour by dynamic programming over subsets (Held and Karp 1962), in float64."""
    points = torch.as_tensor(points, dtype=torch.float64)
    d = tsp_files.DISTANCES[metric](points[:, None], points[None]).numpy()
    n = len(points)
    best = np.full((1 << (n - 1), n - 1), np.inf)  # [subset of nodes 1..n-1, last of them]
    for j in range(n - 1):
        best[1 << j, j] = d[0, j + 1]
    for subset in range(1, 1 << (n - 1)):
        inside = [j for j in range(n - 1) if subset >> j & 1]
        outside = [k for k in range(n - 1) if not subset >> k & 1]
        if outside:
            lengths = (best[subset, inside, None] + d[1:, 1:][np.ix_(inside, outside)]).min(0)
            for k, length in zip(outside, lengths, strict=True):
                best[subset | 1 << k, k] = min(best[subset | 1 << k, k], length)
    return (best[-1] + d[1:, 0]).min()


def write(path, text):
    path.write_text(text)
    return path


def test_exact_solution_agrees_with_brute_force():
    points = np.random.default_rng(0).normal(size=(7, 2))
    lengths = [
        tsp.tour_length(torch.from_numpy(points)[None], torch.tensor([[0, *order]])).item()
        for order in itertools.permutations(range(1, 7))
    ]
    assert solve_exactly(points) == pytest.approx(min(lengths), rel=1e-12)


# Environment


@pytest.mark.parametrize("num_tours", [None, 3])
def test_environment_builds_tours_and_rewards_their_length(num_tours):
    generator = torch.Generator().manual_seed(1)
    points = tsp.generate_points("tsp6-uniform", 4, generator=generator).double()
    shape = (4,) if num_tours is None else (4, num_tours)
    tours = torch.rand(*shape, 6, generator=generator).argsort(-1)
    env = tsp.TspEnv()
    state = env.reset(points, num_tours)
    assert state.tours.shape == (*shape, 0) and state.log_mask.eq(0).all()
    for t in range(6):
        state, reward, done = env.step(tours[..., t])
        assert torch.equal(state.tours, tours[..., : t + 1])
        is_left = torch.ones(*shape, 6).scatter(-1, tours[..., : t + 1], 0)
        assert torch.equal(state.log_mask, is_left.log())
        assert done == (t == 5) and (reward is None) == (t < 5)
    p = points.numpy()
    for index in np.ndindex(shape):
        stops = p[index[0]][tours[index].numpy()]
        length = sum(math.dist(stops[i], stops[i - 1]) for i in range(6))
        assert reward[index].item() == pytest.approx(-length, rel=1e-12)


def test_generators():
    uniform = tsp.generate_points("tsp20-uniform", 5000, generator=torch.Generator().manual_seed(0))
    assert uniform.shape == (5000, 20, 2) and uniform.min() >= 0 and uniform.max() <= 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01) and uniform.var().item() == pytest.approx(
        1 / 12, abs=0.01
    )
    gaussian = tsp.generate_points("tsp50-gaussian", 5000, generator=torch.Generator().manual_seed(0))
    assert gaussian.mean().item() == pytest.approx(0, abs=0.01) and gaussian.std().item() == pytest.approx(
        1, abs=0.01
    )


@pytest.mark.parametrize(
    "env_id", ["tsp2-uniform", "tsp20", "tsp20-normal", "cvrp20-uniform", "TSP20-uniform", "tsp-uniform"]
)
def test_bad_env_ids(env_id):
    with pytest.raises(ValueError, match="instances are named"):
        tsp.parse_env_id(env_id)


def test_points_are_drawn_by_seed_and_from_a_file_without_repetition():
    a, b, c = (tsp.draw_points("tsp5-uniform", None, 7, *seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert torch.equal(a, b) and not torch.equal(a, c)
    stored = np.arange(10 * 3 * 2).reshape(10, 3, 2)
    rows = tsp.draw_points("tsp3-uniform", stored, 25, 1)[:, 0, 0] / 6
    for part in (rows[:10], rows[10:20]):
        assert sorted(part.tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:20].tolist() and len(set(rows[20:].tolist())) == 5


# Metrics


def test_rounding_of_the_metrics():
    a, b = (
        torch.tensor([[0.0, 0.0]]).double(),
        torch.tensor([[0.0, 2.5], [0.0, 2.4], [3.0, 4.0], [10.0, 0.0]]).double(),
    )
    assert tsp_files.euc_2d(a, b).tolist() == [3, 2, 5, 10]
    assert tsp_files.ceil_2d(a, b).tolist() == [3, 3, 5, 10]
    # ATT: r = sqrt(d^2 / 10), t = nint(r), and t + 1 where t < r: 0.79 -> 1, 0.76 -> 1, 1.58 -> 2, 3.16 -> 4
    assert tsp_files.att(a, b).tolist() == [1, 1, 2, 4]


@pytest.mark.parametrize(("text", "optimum"), [(BURMA14, 3323), (ULYSSES16, 6859)])
def test_geo_gives_the_known_optimum(text, optimum):
    assert solve_exactly(np.array(text.split(), float).reshape(-1, 2), "GEO") == optimum


@pytest.mark.parametrize(("name", "optimum"), [("berlin52", 7542), ("st70", 675)])
def test_tsplib_instances_have_their_known_optimum(name, optimum):
    (instance,) = tsp.read_instances(TSPLIB / f"{name}.tsp")
    assert instance.metric == "EUC_2D" and instance.file == name
    assert tsp.get_reference_lengths([instance]).tolist() == [optimum]


# Files


@given(
    st.lists(
        st.integers(3, 9).flatmap(
            lambda n: st.tuples(
                st.lists(st.floats(-1e100, 1e100), min_size=2 * n, max_size=2 * n),
                st.one_of(st.none(), st.permutations(range(n))),
            )
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_ml4co_files_read_back_to_the_last_bit(tmp_path_factory, drawn):
    instances = [
        tsp.Instance("", np.array(x).reshape(-1, 2), None if tour is None else np.array(tour))
        for x, tour in drawn
    ]
    path = write(tmp_path_factory.mktemp("tsp") / "x.txt", tsp.format_ml4co(instances))
    for instance, again in zip(instances, tsp.read_instances(path), strict=True):
        assert instance.points.tobytes() == again.points.tobytes()
        assert (instance.tour is None) == (again.tour is None)
        assert instance.tour is None or instance.tour.tolist() == again.tour.tolist()


def test_ml4co_text_is_one_based_and_closed():
    instance = tsp.Instance("", np.array([[0.5, 0.25], [1.0, 2.0], [3.0, 4.0]]), np.array([1, 0, 2]))
    assert tsp.format_ml4co([instance]) == "0.5 0.25 1.0 2.0 3.0 4.0 output 2 1 3 2\n"


def test_tours_may_be_open_or_closed(tmp_path):
    path = write(tmp_path / "x.txt", "0 0 1 0 1 1 output 3 1 2\n\n0 0 1 0 1 1 output 3 1 2 3\n0 0 1 0 1 1\n")
    tours = [instance.tour for instance in tsp.read_instances(path)]
    assert tours[0].tolist() == tours[1].tolist() == [2, 0, 1] and tours[2] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0 1 0 1 output 1 2 3 1", "5 coordinates"),
        (" output 1", "0 coordinates"),
        ("0 0 1 0 1 nan output 1 2 3 1", "not finite"),
        ("0 0 1 0 1 1e101 output 1 2 3 1", "beyond 1e100"),
        ("0 0 1 0 1 x output 1 2 3 1", "could not convert"),
        ("0 0 1 0 1 1 output 1 2 2 1", "does not visit"),
        ("0 0 1 0 1 1 output 0 1 2 0", "does not visit"),
        ("0 0 1 0 1 1 output 1 2 1", "does not visit"),
        ("0 0 1 0 1 1 output 1 2", "the tour has 2 nodes"),
        ("0 0 1 0 1 1 output 1 2 3 2", "the tour has 4 nodes"),
        ("0 0 1 0 1 1 output", "the tour has 0 nodes"),
        ("0 0 1 0 1 1 output 1 2 3.5 1", "invalid literal"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "x.txt", f"0 0 1 0 1 1 output 1 2 3 1\n{line}\n")
    with pytest.raises(ValueError, match=rf"x\.txt:2: .*{message}"):
        tsp.read_instances(path)


def test_tours_are_written_in_the_format_of_their_file(tmp_path):
    tour = np.array([2, 0, 1])
    (tmp_path / "x.tsp").write_text(HEADER.replace("EUC_2D", "GEO") + "1 0 0\n2 1 1\n3 2 1\nEOF\n")
    (tmp_path / "y.txt").write_text("0 0 1 0 1 1\n0 0 2 0 2 2\n")
    instances = tsp.read_files((str(tmp_path / "x.tsp"), str(tmp_path / "y.txt")))
    tsp.write_tours(str(tmp_path / "tours"), instances, [tour] * 3)
    assert tsp_files.read_tsplib_tour(tmp_path / "tours" / "x.tour", 3).tolist() == tour.tolist()
    again = tsp.read_instances(tmp_path / "tours" / "y.txt")
    assert [i.tour.tolist() for i in again] == [tour.tolist()] * 2 and again[1].points.max() == 2
    with pytest.raises(ValueError, match="File exists"):
        tsp.check_new_folder(str(tmp_path / "tours"))


def test_unreadable_files(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "missing.txt", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "binary.txt", "binary.txt:1: could not convert"),
        (write(tmp_path / "empty.txt", "\n"), "no instances"),
    ):
        with pytest.raises(ValueError, match=message):
            tsp.read_instances(path)


HEADER = "NAME: x\nTYPE: TSP\nDIMENSION: 3\nEDGE_WEIGHT_TYPE: EUC_2D\nNODE_COORD_SECTION\n"


def test_tsplib_nodes_in_any_order_and_spaced_headers(tmp_path):
    text = "NAME : x\nTYPE : TSP (M.~Hofmeister)\nDIMENSION : 3\nEDGE_WEIGHT_TYPE : CEIL_2D\nNODE_COORD_SECTION\n"
    path = tmp_path / "x.TSP"
    text = (
        text.replace("DIMENSION : 3", "DIMENSION : 03\nCOMMENT : Caf\xe9") + "2 1.5e1 2\n 1 0 0\n3 4 4\nEOF\n"
    )
    path.write_bytes(b"\xef\xbb\xbf" + text.encode("latin-1"))
    write(tmp_path / "x.opt.tour", "NAME : t\nTYPE : TOUR\nDIMENSION : 3\nTOUR_SECTION\n1 3\n2\n-1\nEOF\n")
    (instance,) = tsp.read_instances(path)
    assert instance.points.tolist() == [[0, 0], [15, 2], [4, 4]] and instance.metric == "CEIL_2D"
    assert instance.tour.tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "1 0 0\n2 1 1\n", "DIMENSION is 3, NODE_COORD_SECTION has 2"),
        (HEADER + "1 0 0\n2 1 1\n2 2 2\n", "not numbered from 1 to 3"),
        (HEADER + "1 0 0\n2 1\n3 2 2\n", r"x\.tsp:7: not a node number"),
        (HEADER + "1 0 0\n2 1 inf\n3 2 2\n", r"x\.tsp:7: not a node number"),
        (HEADER + "1 0 0\n2 1 1 1\n3 2 2\n", r"x\.tsp:7: not a node number"),
        (HEADER.replace("EUC_2D", "EXPLICIT") + "1 0 0\n", "EDGE_WEIGHT_TYPE is EXPLICIT"),
        (HEADER.replace("EDGE_WEIGHT_TYPE: EUC_2D\n", "") + "1 0 0\n", "EDGE_WEIGHT_TYPE is missing"),
        (HEADER.replace("TYPE: TSP", "TYPE: CVRP") + "1 0 0\n", "TYPE is CVRP"),
        ("garbage\n", r"x\.tsp:1: neither"),
        (HEADER + "1 0 0\n2 1 1\n3 2 2\nFIXED_EDGES_SECTION\n1 2\n-1\n", "fixed edges"),
    ],
)
def test_bad_tsplib_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        tsp.read_instances(write(tmp_path / "x.tsp", text))


@pytest.mark.parametrize(
    ("tour", "message"), [("1 2 4", "does not visit"), ("1 2", "2 nodes"), ("1 b 2", ":2: not a")]
)
def test_bad_tsplib_tours(tmp_path, tour, message):
    path = write(tmp_path / "x.tsp", HEADER + "1 0 0\n2 1 1\n3 2 1\nEOF\n")
    write(tmp_path / "x.opt.tour", f"TOUR_SECTION\n{tour}\n-1\n")
    with pytest.raises(ValueError, match=rf"x\.opt\.tour.*{message}"):
        tsp.read_instances(path)


# Reference tours and gaps


@pytest.mark.parametrize("name", ["tsp20-uniform", "tsp20-gaussian", "tsp50-uniform", "tsp100-uniform"])
def test_stored_instances_have_optimal_tours(name):
    """No exchange of two edges shortens any of them, and they are of the distribution they are named after."""
    instances = tsp.make_test_instances(name, 100)
    assert len(instances) == 100 and all(len(i.points) == tsp.parse_env_id(name)[1] for i in instances)
    points = np.stack([i.points for i in instances])
    assert abs(points.mean() - 0.5 * name.endswith("uniform")) < 0.06
    for p, tour in ((i.points, i.tour) for i in instances[:20]):
        stops = p[tour]
        d = np.linalg.norm(stops[:, None] - stops[None], axis=-1)
        following = np.roll(np.arange(len(p)), -1)
        edges = d[np.arange(len(p)), following]
        exchanged = d + d[np.ix_(following, following)]
        assert (exchanged - edges[:, None] - edges[None] + np.diag(np.full(len(p), np.inf)) > -1e-9).all()


def test_the_unit_of_a_training_file_does_not_matter(tmp_path):
    points = np.random.default_rng(0).random((4, 5, 2))
    expected = None
    for i, scale in enumerate((1.0, 2.0**40, 2.0**-40)):
        instances = [tsp.Instance("", (p + 3.0) * scale) for p in points]
        read = tsp.read_points(write(tmp_path / f"{i}.txt", tsp.format_ml4co(instances)), "tsp5-uniform")
        expected = read if expected is None else expected
        np.testing.assert_allclose(read, expected, rtol=1e-12)
    assert expected.max() == 1 and expected.min() == 0
    moved = points[0] - points[0].min(0)
    np.testing.assert_allclose(expected[0] * moved.max(), moved * expected[0].max(), rtol=1e-12)  # one factor


def test_files_of_the_same_name_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    paths = [write(tmp_path / "x.txt", "0 0 1 0 1 1\n"), write(tmp_path / "a" / "x.txt", "0 0 1 0 1 1\n")]
    with pytest.raises(ValueError, match="the same name"):
        tsp.read_files(tuple(map(str, paths)))
    assert [i.file for i in tsp.read_files((str(paths[1]),))] == ["x"]


def test_instances_without_stored_tours_are_always_the_same():
    a, b = (tsp.make_test_instances("tsp9-uniform", 5) for _ in range(2))
    assert all((x.points == y.points).all() and x.tour is None for x, y in zip(a, b, strict=True))
    assert len(tsp.make_test_instances("tsp20-uniform", 150)) == 150


def test_elkai_finds_the_optimum():
    pytest.importorskip("elkai")
    for metric, scale in (("EUCLIDEAN", 1e-3), ("EUCLIDEAN", 1.0), ("EUC_2D", 1000.0), ("GEO", 50.0)):
        points = np.random.default_rng(3).random((9, 2)) * scale
        instance = tsp.Instance("x", points, None, metric)
        assert tsp.add_reference_tours([instance]) == 0
        assert tsp.get_reference_lengths([instance])[0] == pytest.approx(
            solve_exactly(points, metric), rel=1e-6
        )


def test_without_elkai_there_is_no_reference(monkeypatch):
    monkeypatch.setattr(tsp.importlib.util, "find_spec", lambda name: None)
    instances = tsp.make_test_instances("tsp9-uniform", 3)
    assert tsp.add_reference_tours(instances) == 3 and np.isnan(tsp.get_reference_lengths(instances)).all()


def test_summary_is_the_mean_of_ratios_by_file():
    square = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    order, crossed = np.arange(4), np.array([0, 2, 1, 3])
    instances = [tsp.Instance(str(i), square * (1 + 9 * i), order, file="a") for i in range(2)]
    instances += [tsp.Instance("2", square, file="b")]
    lengths = np.array([2 + 2 * math.sqrt(2), 40.0, 5.0])
    metrics = tsp.summarize({"greedy": ([crossed, order, order], lengths, 1.5)}, instances)
    gap = 100 * ((2 + 2 * math.sqrt(2)) / 4 - 1)
    assert metrics["eval/greedy_gap"] == metrics["eval/a/greedy_gap"] == pytest.approx(gap / 2)
    assert metrics["eval/greedy_gap_std"] == pytest.approx(gap / 2)
    assert metrics["eval/greedy_length"] == pytest.approx(lengths.mean()) and metrics["eval/greedy_ms"] == 1.5
    point = tsp.Instance("", np.zeros((3, 2)), np.arange(3))
    assert tsp.summarize({"greedy": ([order], np.zeros(1), 1.0)}, [point])["eval/greedy_gap"] == 0.0
    assert metrics["eval/b/greedy_length"] == 5.0 and "eval/b/greedy_gap" not in metrics
    assert tsp.draw_tours(instances, [crossed, order, order]).axes
