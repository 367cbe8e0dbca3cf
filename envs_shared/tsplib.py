"""Files of TSPLIB (Reinelt 1995, "TSPLIB 95"): instances with coordinates, their distances, and tours.

Tours are rows of node numbers from 0, without the return to the first node. If NAME.opt.tour is beside NAME.tsp,
it is read as the reference. Errors are ValueErrors of one line with the file and, if there is one, the line in it.
"""

import re
from functools import partial
from pathlib import Path

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


def read_sections(path: Path) -> tuple[dict, dict]:
    """Read the header {key: value} and the sections {name: [(line number, words)]} of a file."""
    header, sections, section = {}, {}, None
    try:
        lines = path.read_text("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    for i, line in enumerate(lines, 1):
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
    """Read an instance: points [1, N, 2] in float64, its tour [1, N] or None, and a function that measures tours."""
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
    tour_path = Path(path).with_suffix(".opt.tour")
    tours = read_tour(tour_path, num_nodes).unsqueeze(0) if tour_path.exists() else None
    return points.unsqueeze(0), tours, partial(measure_tours, DISTANCES[metric])


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
