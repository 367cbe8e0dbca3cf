"""Files of instances of the travelling salesman problem, and of tours.

Two formats are known: TSPLIB (Reinelt 1995, "TSPLIB 95"), in files whose names end in .tsp, and the text of
ML4CO-Kit, one instance on each line: `x y x y x y output 1 3 2 1`, where the tour after `output` may be left
out.

Tours are rows of node numbers from 0, without the return to the first node. If NAME.opt.tour is beside
NAME.tsp, it is read as the reference. Errors are ValueErrors of one line with the file and, if there is one,
the line in it.
"""

import re
from functools import partial
from pathlib import Path

import numpy as np
import torch


def euclidean(a, b):
    """Return the straight-line distances of points [..., 2]."""
    return (a - b).norm(dim=-1)


def to_radians(x):
    """Convert latitudes or longitudes, given as DDD.MM, with the constant of TSPLIB."""
    degrees = x.trunc()
    return 3.141592 * (degrees + 5.0 * (x - degrees) / 3.0) / 180.0


def geographical(a, b):
    """Return whole kilometres between points [..., 2] of latitude and longitude, with constants of TSPLIB."""
    (lat_a, lon_a), (lat_b, lon_b) = to_radians(a).unbind(-1), to_radians(b).unbind(-1)
    q1, q2, q3 = (lon_a - lon_b).cos(), (lat_a - lat_b).cos(), (lat_a + lat_b).cos()
    cosine = 0.5 * ((1.0 + q1) * q2 - (1.0 - q1) * q3)
    return (6378.388 * cosine.clamp(-1.0, 1.0).acos() + 1.0).floor()


DISTANCES = {  # by EDGE_WEIGHT_TYPE; all are whole numbers, and exact in float64
    "EUC_2D": lambda a, b: (euclidean(a, b) + 0.5).floor(),
    "CEIL_2D": lambda a, b: euclidean(a, b).ceil(),
    "ATT": lambda a, b: ((a - b).square().sum(-1) / 10.0).sqrt().ceil(),
    "GEO": geographical,
}


def measure_tours(distance, points, tours):
    """Return lengths [B, P] of closed tours [B, P, N] through points [B, N, 2]."""
    stops = points.unsqueeze(1).take_along_dim(tours.unsqueeze(-1), 2)  # [B, P, N, 2]
    return distance(stops, stops.roll(-1, 2)).sum(-1)


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text."""
    try:
        return path.read_text("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def read_sections(path: Path) -> tuple[dict, dict]:
    """Read the header {key: value} and the sections {name: [(line number, words)]} of a file."""
    header, sections, section = {}, {}, None
    for i, line in enumerate(read_lines(path), 1):
        key, separator, value = line.partition(":")
        if line.strip() == "EOF":
            break
        if re.fullmatch(r"[A-Z_0-9]+_SECTION", key.strip()):
            section = sections.setdefault(key.strip(), [])
        elif separator:
            header[key.strip()], section = value.strip(), None
        elif section is not None and line.strip():
            section.append((i, line.split()))
        elif line.strip():
            raise ValueError(f"{path}:{i}: must be `KEY : value` or part of a section")
    return header, sections


def read_tsplib(path: str):
    """Read an instance: points [1, N, 2] in float64, its tour [1, N] or None, and a function that measures
    tours."""
    header, sections = read_sections(Path(path))
    kind, metric = header.get("TYPE", "TSP"), header.get("EDGE_WEIGHT_TYPE", "missing")
    if kind.split()[:1] != ["TSP"] or "FIXED_EDGES_SECTION" in sections:
        raise ValueError(f"{path}: TYPE must be TSP, without fixed edges, not {kind}")
    if metric not in DISTANCES:
        raise ValueError(f"{path}: EDGE_WEIGHT_TYPE must be one of {', '.join(DISTANCES)}, not {metric}")
    nodes = {}
    for i, words in sections.get("NODE_COORD_SECTION", []):
        try:
            number, x, y = int(words[0]), *map(float, words[1:])
            if not abs(x) + abs(y) < 1e100 or number in nodes:
                raise ValueError
        except ValueError:
            raise ValueError(f"{path}:{i}: must be a new node number and two finite coordinates") from None
        nodes[number] = x, y
    num_nodes = len(nodes)
    dimension = header.get("DIMENSION", "missing")
    if dimension != str(num_nodes) or sorted(nodes) != list(range(1, num_nodes + 1)) or num_nodes < 3:
        raise ValueError(f"{path}: nodes must be numbered 1 to DIMENSION ({dimension}), at least 3")
    points = torch.tensor([nodes[number] for number in sorted(nodes)], dtype=torch.float64)
    if (points == points[0]).all():
        raise ValueError(f"{path}: must have nodes at different places; all of its nodes coincide")
    tour_path = Path(path).with_suffix(".opt.tour")
    tours = read_tour(tour_path, num_nodes).unsqueeze(0) if tour_path.exists() else None
    measure = partial(measure_tours, DISTANCES[metric])
    if tours is not None and not measure(points.unsqueeze(0), tours.unsqueeze(1)).all():
        raise ValueError(
            f"{tour_path}: the tour has length 0 in {metric}, so that no gap to it can be computed"
        )
    return points.unsqueeze(0), tours, measure


def read_tour(path: Path, num_nodes: int):
    """Read the tour [N] of a tour file."""
    words = [word for _, words in read_sections(path)[1].get("TOUR_SECTION", []) for word in words]
    words = words[: words.index("-1")] if "-1" in words else words
    if sorted(words) != sorted(map(str, range(1, num_nodes + 1))):
        raise ValueError(f"{path}: the tour must visit each of the nodes 1 to {num_nodes} once")
    return torch.tensor([int(word) - 1 for word in words])


def format_tour(name: str, tour) -> str:
    """Return the text of a tour file for the tour [N] of the instance `name`."""
    nodes = "".join(f"{node + 1}\n" for node in tour.tolist())
    return f"NAME : {name}.tour\nTYPE : TOUR\nDIMENSION : {len(tour)}\nTOUR_SECTION\n{nodes}-1\nEOF\n"


def parse_instance(line: str, place: str, point_dim: int):
    """Parse a line of ML4CO text: points [N, point_dim] and a tour, a list of N nodes from 0 or an empty
    one."""
    coordinates, _, nodes = line.partition("output")
    try:
        points = np.array(coordinates.split(), float).reshape(-1, point_dim)
        tour = [int(node) - 1 for node in nodes.split()]
    except ValueError:
        form = "must be `x y x y x y`, and may go on `output 1 3 2 1`, a tour of nodes from 1"
        raise ValueError(f"{place}: {form}") from None
    if len(points) < 3 or not abs(points).max() < 1e100:
        raise ValueError(f"{place}: must have 3 or more nodes with finite coordinates, `x y x y x y`")
    if (points == points[0]).all():
        raise ValueError(f"{place}: must have nodes at different places; all of its nodes coincide")
    if tour and (sorted(tour[1:]) != list(range(len(points))) or tour[0] != tour[-1]):
        form = "the tour must visit each node once and return to its first one, `output 1 3 2 1`"
        raise ValueError(f"{place}: {form}")
    return points, tour[:-1]


def read_instances(path: str, point_dim: int, tour_length):
    """Read a file: points [M, N, point_dim] in float64, tours [M, N] or None, and a function that measures
    tours.

    This is `tour_length`, but for a file of TSPLIB, whose only instance has its own distances.
    """
    if path.lower().endswith(".tsp"):
        if point_dim != 2:
            raise ValueError(f"{path}: nodes of a .tsp file have 2 coordinates, not {point_dim}")
        return read_tsplib(path)
    rows = []
    for number, line in enumerate(read_lines(Path(path)), 1):
        if not line.strip():
            continue
        points, tour = parse_instance(line, f"{path}:{number}", point_dim)
        rows.append((points, tour))
        if len(points) != len(rows[0][0]) or len(tour) != len(rows[0][1]):
            form = "all lines must have as many nodes, and all or none of them a tour"
            raise ValueError(f"{path}:{number}: {form}")
    if not rows:
        raise ValueError(f"{path}: is empty; each line must be an instance, `x y x y x y output 1 3 2 1`")
    points, tours = zip(*rows, strict=True)
    return torch.tensor(np.stack(points)), torch.tensor(tours) if tours[0] else None, tour_length


def make_folder(path: str) -> None:
    """Make the new folder of --solve."""
    try:
        Path(path).mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--solve {path}: must be a new folder ({error.strerror})") from None


def write_tours(folder: str, data: str, instances, tours) -> None:
    """Write tours [M, N] into the folder, in the format of the file `data`, and beside them their lengths."""
    points, _, measure = instances
    path = Path(folder, Path(data).name)
    if path.suffix.lower() == ".tsp":
        path = path.with_suffix(".tour")
        text = format_tour(path.stem, tours[0])
    else:
        text = ""
        for coordinates, tour in zip(points.flatten(1).tolist(), (tours + 1).tolist(), strict=True):
            closed_tour = [*tour, tour[0]]
            text += f"{' '.join(map(str, coordinates))} output {' '.join(map(str, closed_tour))}\n"
    path.write_text(text, "utf-8", errors="surrogateescape")  # also a name that is not UTF-8
    np.savetxt(f"{path}.lengths", measure(points, tours.unsqueeze(1)), "%.10g")
