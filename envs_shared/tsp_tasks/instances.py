"""The travelling salesman problem: environment, random instances, reference tours, gaps and pictures.

Tours are rows of node numbers from 0, without the return to the first node. Files are read by files.py.
"""

import importlib.util
import math
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from envs_shared.tsp_tasks.files import (
    DISTANCES,
    Instance,
    check_new_folder,
    format_ml4co,
    read_files,
    read_instances,
    write_tours,
)

__all__ = ["Instance", "check_new_folder", "format_ml4co", "read_files", "read_instances", "write_tours"]

REFERENCE_FOLDER = Path(__file__).with_name("reference")


def tour_length(points: torch.Tensor, tours: torch.Tensor, metric: str = "EUCLIDEAN") -> torch.Tensor:
    """Lengths [B, ...] of closed tours [B, ..., N] through points [B, N, 2], in the units of the points."""
    index = tours.flatten(1).unsqueeze(-1).expand(-1, -1, 2)
    stops = points.gather(1, index).view(*tours.shape, 2)
    return DISTANCES[metric](stops, stops.roll(-1, -2)).sum(-1)


# ---- The environment ----


@dataclass
class StepState:
    """What a policy sees while it builds tours; a leading shape [B] or [B, P] for P tours of each instance."""

    nodes: list[torch.Tensor]  # t times [B, ...], the nodes so far
    log_mask: torch.Tensor  # [B, ..., N] 0 where a node may still be visited, else -inf: add it to the logits

    @property
    def tours(self) -> torch.Tensor:
        """The nodes so far, [B, ..., t]."""
        return torch.stack(self.nodes, -1) if self.nodes else self.log_mask[..., :0].long()


class TspEnv:
    """Builds tours node by node, many at once, on the device of the points."""

    def reset(self, points: torch.Tensor, num_tours: int | None = None) -> StepState:
        """Start `num_tours` P empty tours (None: one, without a dimension for it) of each of the points [B, N, 2]."""
        shape = points.shape[:1] if num_tours is None else (len(points), num_tours)
        self.points, self.state = (
            points,
            StepState([], torch.zeros(*shape, points.shape[1], device=points.device)),
        )
        return self.state

    def step(self, node: torch.Tensor) -> tuple[StepState, torch.Tensor | None, bool]:
        """Visit `node` [B, ...] next: the state, minus the closed tour's length once it is complete, and whether it is.

        The state is the same object, changed. That no node is visited twice is for the policy to see to (`log_mask`):
        nothing here waits for the device.
        """
        self.state.nodes.append(node)
        self.state.log_mask.scatter_(-1, node.unsqueeze(-1), -math.inf)
        done = len(self.state.nodes) == self.points.shape[1]
        return self.state, -tour_length(self.points, self.state.tours) if done else None, done


def parse_env_id(env_id: str) -> tuple[str, int]:
    """Distribution and number of nodes of an id such as tsp20-uniform; ValueError where it is not of that form."""
    match = re.fullmatch(r"tsp(\d{1,5})-(uniform|gaussian)", env_id)
    if not match or int(match[1]) < 3:
        raise ValueError("instances are named tsp<number of nodes, from 3>-uniform or tsp<number>-gaussian")
    return match[2], int(match[1])


def generate_points(env_id: str, num_instances: int, device=None, generator=None) -> torch.Tensor:
    """Random points [B, N, 2]: uniform in the unit square, or standard normal on both axes."""
    distribution, num_nodes = parse_env_id(env_id)
    draw = torch.rand if distribution == "uniform" else torch.randn
    return draw(num_instances, num_nodes, 2, device=device, generator=generator)


def draw_points(
    env_id: str, training_points: np.ndarray | None, size: int, *seed: int, distinct=False
) -> torch.Tensor:
    """Points [size, N, 2] that depend on `seed` alone: fresh ones, or some of `training_points` [M, N, 2].

    None of the latter is drawn twice before each has been drawn once; with `distinct` not even then, so that there are
    M at most.
    """
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    if training_points is None:
        return generate_points(env_id, size, generator=generator)
    size = min(size, len(training_points)) if distinct else size
    passes = math.ceil(size / len(training_points))
    orders = [torch.randperm(len(training_points), generator=generator) for _ in range(passes)]
    return torch.from_numpy(training_points[torch.cat(orders)[:size].numpy()]).float()


# ---- Reference tours and pictures ----


def make_test_instances(env_id: str, num_instances: int) -> list[Instance]:
    """Instances that are always the same: stored ones with optimal tours where there are enough, else random ones."""
    stored = REFERENCE_FOLDER / f"{env_id}.txt"
    instances = read_instances(stored)[:num_instances] if stored.exists() else []
    if len(instances) == num_instances:
        return instances
    return make_instances(
        env_id, generate_points(env_id, num_instances, generator=torch.Generator().manual_seed(0))
    )


def make_instances(name: str, points: torch.Tensor) -> list[Instance]:
    """Instances NAME:1, NAME:2, ... of points [B, N, 2]."""
    return [Instance(f"{name}:{i}", x) for i, x in enumerate(points.double().numpy(), 1)]


def load_instances(paths: tuple[str, ...], env_id: str, num_instances: int) -> list[Instance]:
    """Instances of files, else `make_test_instances`, with reference tours where there are any or elkai makes them."""
    instances = read_files(paths) or make_test_instances(env_id, num_instances)
    missing = add_reference_tours(instances)
    if missing:
        print(f"no gap for {missing} instances without a reference tour (pip install elkai)", file=sys.stderr)
    return instances


def read_points(path: str | None, env_id: str) -> np.ndarray | None:
    """Points [M, N, 2] of a file's instances, each moved to the origin, in units of the largest extent of any.

    None without a path. ValueError where an instance has another number of nodes than `env_id` says.
    """
    if path is None:
        return None
    instances, num_nodes = read_instances(path), parse_env_id(env_id)[1]
    for instance in instances:
        if len(instance.points) != num_nodes:
            raise ValueError(f"{instance.name} has {len(instance.points)} nodes, {env_id} has {num_nodes}")
    points = np.stack([instance.points for instance in instances])
    points = points - points.min(1, keepdims=True)
    return points / max(points.max(), np.finfo(np.float64).tiny)


def get_reference_lengths(instances: list[Instance]) -> np.ndarray:
    """Lengths of the tours that the instances have, NaN where there is none."""
    lengths = np.full(len(instances), math.nan)
    for i, instance in enumerate(instances):
        if instance.tour is not None:
            points, tour = torch.from_numpy(instance.points)[None], torch.from_numpy(instance.tour)[None]
            lengths[i] = tour_length(points, tour, instance.metric).item()
    return lengths


def add_reference_tours(instances: list[Instance]) -> int:
    """Give tours by elkai, where it is installed, to the instances that have none; returns how many are left."""
    missing = [instance for instance in instances if instance.tour is None]
    if importlib.util.find_spec("elkai") is None:
        return len(missing)
    for instance in tqdm(missing, "reference tours", unit="instance", leave=False, delay=2.0):
        instance.tour = solve_with_elkai(instance)
    return 0


def solve_with_elkai(instance: Instance) -> np.ndarray:
    """A tour [N] by LKH (Helsgaun 2000), for all but large instances the optimal one; ImportError without elkai.

    elkai is optional: LKH may be used for academic and non-commercial purposes. It takes whole numbers, so plain
    distances are given to it in millionths of the largest.
    """
    import elkai

    if len(instance.points) <= 3:
        return np.arange(len(instance.points))
    points = torch.from_numpy(instance.points)
    distances = DISTANCES[instance.metric](points[:, None], points[None])
    distances.fill_diagonal_(0.0)
    if instance.metric == "EUCLIDEAN":
        distances *= 1e6 / max(distances.max().item(), math.ulp(0.0))
    matrix = distances.round().long().tolist()
    return np.array(elkai.DistanceMatrix(matrix).solve_tsp(runs=10)[:-1])


# ---- Tours and their scores ----


def get_chunk_size(num_nodes: int, device: torch.device) -> int:
    """How many instances to solve at once, so that a few tensors of N x N numbers for each fit into memory."""
    return max(1, 2 ** (24 if device.type == "cuda" else 18) // num_nodes**2)


def find_shortest(propose, instances: list[Instance], device: torch.device) -> tuple:
    """The shortest of proposed tours: tours [N] of each instance, their lengths [M], milliseconds per instance.

    `propose` gets points [B, N, 2] and yields tours [B, P, N], several times if it likes.
    """
    groups = defaultdict(list)  # what can be solved together
    for i, instance in enumerate(instances):
        groups[len(instance.points), instance.metric].append(i)
    tours = [None] * len(instances)
    lengths = np.full(len(instances), math.inf)
    bar = tqdm(total=len(instances), unit="instance", leave=False, delay=2.0)
    start = time.perf_counter()
    for (num_nodes, metric), members in groups.items():
        chunk = get_chunk_size(num_nodes, device)
        for part in (members[i : i + chunk] for i in range(0, len(members), chunk)):
            points = torch.from_numpy(np.stack([instances[i].points for i in part])).to(device)
            for candidates in propose(points):
                found, index = tour_length(points, candidates, metric).min(1)
                shortest = (
                    candidates.take_along_dim(index[:, None, None], 1).squeeze(1).cpu().numpy()
                )  # [B, N]
                for i, tour, length in zip(part, shortest, found.tolist(), strict=True):
                    if length < lengths[i]:
                        tours[i], lengths[i] = tour, length
            bar.update(len(part))
    bar.close()
    return tours, lengths, 1e3 * (time.perf_counter() - start) / len(instances)


def choose_shortest(found: dict[str, tuple]) -> list[np.ndarray]:
    """The shortest tour [N] of each instance, of those that `found` holds by decoding (`summarize`)."""
    choices = list(found.values())
    shortest = np.argmin([lengths for _, lengths, _ in choices], 0)
    return [choices[k][0][i] for i, k in enumerate(shortest)]


def summarize(found: dict[str, tuple], instances: list[Instance]) -> dict[str, float]:
    """Metrics of tours that `found` holds by decoding: tours, lengths [M], and milliseconds per instance.

    Mean length and time; gap, the mean over instances of length / reference - 1 in percent, and its deviation, where
    there are reference tours. With instances of several files of each file too.
    """
    files = np.array([instance.file for instance in instances])
    reference, metrics = get_reference_lengths(instances), {}
    for file in ("", *dict.fromkeys(files)) if len(set(files)) > 1 else ("",):
        rows, prefix = (files == file, f"eval/{file}") if file else (slice(None), "eval")
        for decoding, (_, lengths, milliseconds) in found.items():
            metrics[f"{prefix}/{decoding}_length"] = float(lengths[rows].mean())
            with np.errstate(invalid="ignore"):
                gaps = np.where(lengths == reference, 0.0, 100.0 * (lengths / reference - 1.0))[rows]
            if len(gaps := gaps[~np.isnan(gaps)]):
                metrics[f"{prefix}/{decoding}_gap"] = float(gaps.mean())
                metrics[f"{prefix}/{decoding}_gap_std"] = float(gaps.std())
            if not file:
                metrics[f"{prefix}/{decoding}_ms"] = milliseconds
    return metrics


def draw_tours(instances: list[Instance], tours: list[np.ndarray]):
    """A matplotlib figure of the first four tours above the reference ones; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture of the tours: pip install matplotlib")
    instances, tours = instances[:4], tours[:4]
    found = get_reference_lengths(
        [Instance(i.name, i.points, t, i.metric) for i, t in zip(instances, tours, strict=True)]
    )
    figure = Figure(figsize=(3 * len(instances), 6.4), layout="constrained")
    rows = [
        ("found", tours, found),
        ("reference", [i.tour for i in instances], get_reference_lengths(instances)),
    ]
    rows = rows if any(i.tour is not None for i in instances) else rows[:1]
    panels = figure.subplots(len(rows), len(instances), squeeze=False)
    for axes_row, (name, row, lengths) in zip(panels, rows, strict=True):
        for axes, instance, tour, length in zip(axes_row, instances, row, lengths, strict=True):
            axes.set_axis_off()
            if tour is not None:
                axes.plot(*instance.points[[*tour, tour[0]]].T, "-o", ms=4, lw=1.2)
                axes.set_title(f"{name}: {length:.5g}", fontsize=10)
                axes.set_aspect("equal")
    return figure
