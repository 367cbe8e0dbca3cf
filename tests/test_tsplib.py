"""Check the reader of TSPLIB: distances by known optima, odd and bad files."""

import numpy as np
import pytest
import torch
from brute_force import solve_exactly
from helpers import ROOT

from envs_shared import tsplib

FOLDER = ROOT / "tests" / "data" / "tsplib"
# Coordinates of an instance of TSPLIB with distances GEO, west and east of Greenwich
ULYSSES16 = """38.24 20.42 39.57 26.15 40.56 25.32 36.26 23.12 33.48 10.54 37.56 12.19 38.42 13.11 37.52 20.44
41.23 9.10 41.17 13.05 36.08 -5.21 38.47 15.13 38.15 15.35 37.51 15.17 35.49 14.32 39.36 19.56"""
HEADER = "NAME: x\nTYPE: TSP\nDIMENSION: 3\nEDGE_WEIGHT_TYPE: EUC_2D\nNODE_COORD_SECTION\n"


def test_rounding_of_the_distances():
    a = torch.tensor([[0.0, 0.0]]).double()
    b = torch.tensor([[0.0, 2.5], [0.0, 2.4], [3.0, 4.0], [10.0, 0.0]]).double()
    assert tsplib.DISTANCES["EUC_2D"](a, b).tolist() == [3, 2, 5, 10]
    assert tsplib.DISTANCES["CEIL_2D"](a, b).tolist() == [3, 3, 5, 10]
    # ATT: r = sqrt(d^2 / 10), t = nint(r), and t + 1 if t < r: 0.79 -> 1, 0.76 -> 1, 1.58 -> 2, 3.16 -> 4
    assert tsplib.DISTANCES["ATT"](a, b).tolist() == [1, 1, 2, 4]


def test_geo_gives_the_known_optimum():
    assert solve_exactly(np.array(ULYSSES16.split(), float).reshape(-1, 2), tsplib.geographical) == 6859
    # With a more exact pi these distances would be 9459 and 2132; angles are in degrees and minutes
    points = np.array([[6.15, 137.46], [79.48, 75.11], [17.52, 51.04], [69.37, 6.10]])
    assert tsplib.geographical(*torch.tensor(points).view(2, 2, 2)).tolist() == [9458, 2133]


@pytest.mark.parametrize(("name", "optimum"), [("berlin52", 7542), ("st70", 675)])
def test_instances_have_their_known_optimum(name, optimum):
    points, tours, measure = tsplib.read_tsplib(str(FOLDER / f"{name}.tsp"))
    assert points.shape == (1, int(name[-2:]), 2) and tours.shape == points.shape[:2]
    lengths = measure(points, torch.stack((tours, tours.roll(3, 1), tours.flip(1)), 1))
    assert lengths.tolist() == [[optimum] * 3]


def test_nodes_in_any_order_and_spaced_headers(tmp_path):
    text = "DIMENSION : 3\nNAME : x\nTYPE : TSP (M.~Hofmeister)\nCOMMENT : Caf\xe9: a: b\n"
    text += "EDGE_WEIGHT_TYPE : CEIL_2D\n\nNODE_COORD_SECTION :\n2 1.5e1 2\n\n 1 0 0\n3 4 4\nEOF\n4 5 5\n"
    (tmp_path / "x.y.tsp").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode("latin-1"))
    tour = "NAME : t\nTYPE : TOUR\nDIMENSION : 3\nTOUR_SECTION\n1 3\n2\n-1\n9\nEOF\n"
    (tmp_path / "x.y.opt.tour").write_text(tour)
    points, tours, measure = tsplib.read_tsplib(str(tmp_path / "x.y.tsp"))
    assert points.tolist() == [[[0, 0], [15, 2], [4, 4]]] and tours.tolist() == [[0, 2, 1]]
    assert measure(points, tours[None]).tolist() == [[6 + 12 + 16]]


def test_a_reference_tour_of_length_0_is_refused(tmp_path):
    """All distances between the three nodes are rounded to 0."""
    (tmp_path / "x.tsp").write_text(HEADER + "1 0 0\n2 0.2 0\n3 0 0.2\n")
    assert tsplib.read_tsplib(str(tmp_path / "x.tsp"))[1] is None
    (tmp_path / "x.opt.tour").write_text("TOUR_SECTION\n1\n2\n3\n-1\n")
    with pytest.raises(ValueError, match=r"x\.opt\.tour: the tour has length 0 in EUC_2D"):
        tsplib.read_tsplib(str(tmp_path / "x.tsp"))


TEXT = "0 0 1 0 1 1 output 1 2 3 1\n"
BAD_FILES = [
    ("x.tsp", HEADER + "1 0 0\n2 1 1\n4 2 2\n", ": nodes must be numbered 1 to DIMENSION (3)"),
    ("x.tsp", HEADER.replace("EUC_2D", "EXPLICIT") + "1 0 0\n", "EUC_2D, CEIL_2D, ATT, GEO, not EXPLICIT"),
    ("x.txt", f"\n{TEXT}0.5,0.25\n", ":3: must be `x y x y x y`"),
    ("x.txt", "0.5 0.25\n1 2\n", ":1: must have 3 or more nodes with finite coordinates"),
    ("x.txt", f"{TEXT}0 0 1 0 1 1\n", ":2: all lines must have as many nodes, and all or none of them a"),
    ("x.txt", f"{TEXT}0 0 1 0 1 nan output 1 2 3 1\n", ":2: must have 3 or more nodes with finite"),
    ("x.txt", "0 0 1 0 1 1 output 2 1 2 3\n", ":1: the tour must visit each node once and return to its"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_bad_files_are_named_with_their_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        tsplib.read_instances(str(path), 2, None)
    line = str(error.value)
    assert line.startswith(f"{path}:") and message in line and "\n" not in line
