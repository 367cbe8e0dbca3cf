"""Instances of the travelling salesman problem: their distances, and readers and writers of two file formats.

Tours are rows of node numbers from 0, without the return to the first node. Errors in files are ValueErrors of one line
that name the file and the line.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch


@dataclass
class Instance:
    """One problem: `points` [N, 2] float64, its `metric`, the `tour` [N] it came with, if any, and its file's name."""

    name: str
    points: np.ndarray
    tour: np.ndarray | None = None
    metric: str = "EUCLIDEAN"
    file: str = ""


# Distances of two points [..., 2] each: plain, and TSPLIB's (Reinelt 1995, "TSPLIB 95", section 2). All but the first
# are whole numbers, and exact in float64.


def euclidean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Straight-line distance."""
    return torch.linalg.vector_norm(a - b, dim=-1)


def euc_2d(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Straight-line distance, rounded to the nearest whole number, halves up."""
    return (euclidean(a, b) + 0.5).floor()


def ceil_2d(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Straight-line distance, rounded up."""
    return euclidean(a, b).ceil()


def att(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Pseudo-Euclidean distance of the ATT instances: the distance over sqrt(10), rounded up."""
    return ((a - b).square().sum(-1) / 10.0).sqrt().ceil()


def geo(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Kilometres between latitudes and longitudes given as DDD.MM, with TSPLIB's constants and rounding."""

    def radians(x):
        degrees = x.trunc()
        return 3.141592 * (degrees + 5.0 * (x - degrees) / 3.0) / 180.0

    (lat_a, lon_a), (lat_b, lon_b) = radians(a).unbind(-1), radians(b).unbind(-1)
    q1, q2, q3 = (lon_a - lon_b).cos(), (lat_a - lat_b).cos(), (lat_a + lat_b).cos()
    cosine = 0.5 * ((1.0 + q1) * q2 - (1.0 - q1) * q3)
    return (6378.388 * cosine.clamp(-1.0, 1.0).acos() + 1.0).floor()


DISTANCES = {"EUCLIDEAN": euclidean, "EUC_2D": euc_2d, "CEIL_2D": ceil_2d, "ATT": att, "GEO": geo}


def check_tour(nodes: list[int], num_nodes: int) -> np.ndarray:
    """Nodes from 1, with or without the return to the first, as a tour [N] from 0; ValueError where it is none."""
    if len(nodes) == num_nodes + 1 and nodes[0] == nodes[-1]:
        nodes = nodes[:-1]
    if len(nodes) != num_nodes:
        raise ValueError(f"the tour has {len(nodes)} nodes, the instance {num_nodes}")
    if sorted(nodes) != list(range(1, num_nodes + 1)):
        raise ValueError(f"the tour does not visit each of the nodes 1 to {num_nodes} once")
    return np.array(nodes) - 1


def parse_points(numbers: list[str]) -> np.ndarray:
    """Coordinates "x y x y ..." as points [N, 2] float64; ValueError where they are not finite, not paired, or none."""
    points = np.array([float(x) for x in numbers])
    if len(points) % 2 or not len(points):
        raise ValueError(f"{len(points)} coordinates, where an even number is needed")
    if not (np.abs(points) <= 1e100).all():
        raise ValueError("a coordinate is not finite, or beyond 1e100")
    return points.reshape(-1, 2)


def read_lines(path: Path) -> list[str]:
    """Lines of a text file; ValueError where it cannot be read."""
    try:
        return Path(path).read_text("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def read_ml4co(path: Path) -> list[Instance]:
    """Instances of the ml4co text format, one a line: `x y x y ... output 1 5 3 ... 1` (the tour may be left out)."""
    instances = []
    for i, line in enumerate(read_lines(path), 1):
        coordinates, separator, tour = line.partition("output")
        if not line.strip():
            continue
        try:
            points = parse_points(coordinates.split())
            tour = check_tour([int(x) for x in tour.split()], len(points)) if separator else None
        except ValueError as error:
            raise ValueError(f"{path}:{i}: {error}") from None
        instances.append(Instance(f"{path}:{i}", points, tour, file=Path(path).stem))
    if not instances:
        raise ValueError(f"{path}: no instances")
    return instances


def format_ml4co(instances: list[Instance]) -> str:
    """The ml4co text of instances; coordinates read back to the last bit."""
    lines = []
    for instance in instances:
        line = " ".join(repr(float(x)) for x in instance.points.ravel())
        if instance.tour is not None:
            line += " output " + " ".join(str(node + 1) for node in [*instance.tour, instance.tour[0]])
        lines.append(line + "\n")
    return "".join(lines)


def read_tsplib_sections(path: Path) -> tuple[dict[str, str], dict[str, list[tuple[int, list[str]]]]]:
    """Header entries and sections (line number and words of each line) of a TSPLIB file."""
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
            raise ValueError(f"{path}:{i}: neither `KEY : value` nor part of a section")
    return header, sections


def read_tsplib(path: Path) -> Instance:
    """A TSPLIB instance with coordinates; its tour is read from NAME.opt.tour beside it, where there is one."""
    header, sections = read_tsplib_sections(path)
    metric = header.get("EDGE_WEIGHT_TYPE", "missing")
    if header.get("TYPE", "TSP").split()[:1] != ["TSP"]:
        raise ValueError(f"{path}: TYPE is {header['TYPE']}, only TSP can be read")
    if metric not in DISTANCES or metric == "EUCLIDEAN":
        raise ValueError(
            f"{path}: EDGE_WEIGHT_TYPE is {metric}, only {', '.join(list(DISTANCES)[1:])} can be read"
        )
    numbers, coordinates = [], []
    for i, words in sections.get("NODE_COORD_SECTION", []):
        try:
            number, *point = words
            numbers.append(int(number))
            coordinates += parse_points(point)[0].tolist() if len(point) == 2 else float("none")
        except ValueError:
            raise ValueError(f"{path}:{i}: not a node number and two finite coordinates") from None
    if "FIXED_EDGES_SECTION" in sections:
        raise ValueError(f"{path}: fixed edges are not supported")
    if header.get("DIMENSION", "").lstrip("0") != str(len(numbers)) or not numbers:
        dimension = header.get("DIMENSION", "missing")
        raise ValueError(f"{path}: DIMENSION is {dimension}, NODE_COORD_SECTION has {len(numbers)} nodes")
    if sorted(numbers) != list(range(1, len(numbers) + 1)):
        raise ValueError(f"{path}: the nodes are not numbered from 1 to {len(numbers)}")
    points = np.array(coordinates).reshape(-1, 2)[np.argsort(numbers)]
    tour_path = Path(path).with_suffix(".opt.tour")
    tour = read_tsplib_tour(tour_path, len(points)) if tour_path.exists() else None
    return Instance(str(path), points, tour, metric, Path(path).stem)


def read_tsplib_tour(path: Path, num_nodes: int) -> np.ndarray:
    """The tour [N] of a TSPLIB tour file."""
    _, sections = read_tsplib_sections(path)
    nodes = []
    for i, words in sections.get("TOUR_SECTION", []):
        try:
            nodes += [int(word) for word in words]
        except ValueError:
            raise ValueError(f"{path}:{i}: not a node number") from None
    try:
        return check_tour(nodes[: nodes.index(-1)] if -1 in nodes else nodes, num_nodes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def format_tsplib_tour(name: str, tour: np.ndarray) -> str:
    """The text of a TSPLIB tour file (Reinelt 1995, section 1)."""
    nodes = "".join(f"{node + 1}\n" for node in tour)
    return f"NAME : {name}.tour\nTYPE : TOUR\nDIMENSION : {len(tour)}\nTOUR_SECTION\n{nodes}-1\nEOF\n"


def check_new_folder(folder: str) -> None:
    """ValueError where `folder` exists or cannot be made; leaves nothing."""
    try:
        Path(folder).mkdir()
        Path(folder).rmdir()
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None


def write_tours(folder: str, instances: list[Instance], tours: list[np.ndarray]) -> None:
    """Write tours to a new folder: NAME.tour for an instance of TSPLIB, NAME.txt in ml4co text for those of NAME.

    The folder appears at once with all that is in it. OSError where it exists.
    """
    texts = {}
    for instance, tour in zip(instances, tours, strict=True):
        if instance.metric == "EUCLIDEAN":
            name = f"{instance.file}.txt"
            texts[name] = texts.get(name, "") + format_ml4co([replace(instance, tour=tour)])
        else:
            texts[f"{instance.file}.tour"] = format_tsplib_tour(instance.file, tour)
    with TemporaryDirectory(prefix=".unfinished_", dir=Path(folder).parent) as unfinished:
        written = Path(unfinished, "tours")
        written.mkdir()
        for name, text in texts.items():
            (written / name).write_text(text)
        written.rename(folder)


def read_files(paths: tuple[str, ...]) -> list[Instance]:
    """Instances of several files; ValueError where two of them have the same name."""
    if len({Path(path).stem for path in paths}) < len(paths):
        raise ValueError(f"two of the files have the same name: {' '.join(paths)}")
    return [instance for path in paths for instance in read_instances(path)]


def read_instances(path: str | Path) -> list[Instance]:
    """Instances of a file: TSPLIB where its name ends in .tsp, else the ml4co text format."""
    return [read_tsplib(Path(path))] if str(path).lower().endswith(".tsp") else read_ml4co(Path(path))
