"""Read runs from their folders: what TensorBoard events, logs and run.py's process.json say."""

import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.common import ResultsError, require
from benchmark.suite import Cell

NUM_POINTS = 60  # kept of a learning curve in the JSON file
NOT_RUN = "not run yet"
# What torchrun adds to a log when a script has failed, and the exit code of the script in it
TORCHRUN = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic", re.M)
EXIT_CODE = re.compile(r"\(exitcode: (-?\d+)\)")
# The one line on bad input of our scripts, and the first line in tyro's frame
BAD_INPUT = re.compile(r"^\w+\.py: error: .+|(?<=^│ ).+?(?= +│$)", re.M)
REFUSED = 2  # exit code of a script that refuses its input


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a cell ended: with a run, or with the reason why there is none."""

    run: dict | None = None  # what is kept of the run
    error: str = ""  # one line
    is_final: bool = False  # whether another attempt would end in the same way
    seconds: float = 0.0  # wall-clock seconds that run.py spent on the cell


def find_run_folders(folder: Path):
    """List the folders with TensorBoard events in `folder`."""
    return sorted({path.parent for path in folder.glob("*/events.out.tfevents*")})


@functools.cache
def read_events(run_path: Path):
    """Read everything that a finished run has logged: `Scalars(tag)` lists points with step, wall_time and
    value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_path), size_guidance={"scalars": 0}).Reload()


def read_text(run_path: Path, tag: str):
    """Read a text that a run has logged; empty if there is none."""
    events = read_events(run_path)
    name = f"{tag}/text_summary"
    if name not in events.Tags()["tensors"]:
        return ""
    return events.Tensors(name)[0].tensor_proto.string_val[0].decode()


def find_threshold(curve: list, cell: Cell):
    """Return the last of the first `in_a_row` successive points at the threshold or beyond; None if there are
    none."""
    sign = 1 if cell.better == "higher" else -1
    threshold = float(np.float32(cell.threshold))  # TensorBoard keeps float32, in which 0.9 is less than 0.9
    num_beyond = 0
    for point in curve:
        is_beyond = sign * point.value >= sign * threshold
        num_beyond = num_beyond + 1 if is_beyond else 0
        if num_beyond == cell.in_a_row:
            return point
    return None


def read_run(path: Path, cell: Cell, process: dict):
    """Read what is kept of the run in the folder `path`; ResultsError if it lacks the cell's headline or
    curve.

    `process` is what run.py has recorded of it.
    """
    events = read_events(path)
    tags = events.Tags()["scalars"]
    for tag in (cell.headline, cell.curve, "charts/cpu_seconds"):
        require(tag in tags or tag is None, f"no {tag} in {path} (there are: {', '.join(tags)})")
    shown = [tag for tag in tags if tag.startswith(("eval/", "best/")) or tag == cell.headline]
    metrics = {tag: events.Scalars(tag)[-1].value for tag in sorted(shown)}
    clock = events.Scalars("charts/cpu_seconds")
    last = clock[-1]
    steps = [point.step for point in clock]
    seconds = [point.value for point in clock]
    start = events.FirstEventTimestamp()
    # When a run was resumed, and how long it had stood still: since the last point that it does not repeat
    pauses = []
    for resumed in sorted(int(file.name.split(".")[3]) for file in path.glob("events.out.tfevents*"))[1:]:
        before = [point.wall_time for point in clock if point.wall_time < resumed]
        pauses.append((resumed, resumed - max(before, default=start)))

    def find_wall_seconds(point):
        """Return the wall-clock seconds of a run until a point, without those in which it stood still."""
        return point.wall_time - start - sum(pause for end, pause in pauses if end <= point.wall_time)

    def find_seconds(point):
        """Return the seconds of training until a point: of the clock for GPUs, else CPU-seconds without
        evaluations."""
        if cell.gpus:
            return find_wall_seconds(point)
        return float(np.interp(point.step, steps, seconds))

    run = {
        "seed": cell.seed,
        "metrics": metrics | process.get("best", {}),
        "env_steps": last.step,
        "wall_seconds": find_wall_seconds(last),
        "cpu_seconds": process["cpu_seconds"],
        "machine": process["machine"],
        "code": process.get("code", {}),  # of our scripts, by path: see code.py
        # Peers log their version
        "commit": read_text(path, "program") or process["machine"]["commit"],
        "steps_per_second": last.step / max(find_seconds(last), 1e-9),
    }
    # A resumed run may repeat the evaluation at its first step: the last point of a step counts
    points = events.Scalars(cell.curve) if cell.curve else []
    curve = [*{point.step: point for point in points}.values()]
    if late := [point.value for point in curve if point.step > 0.9 * last.step]:
        run["final_return"] = float(np.mean(late))
    point = None
    if cell.threshold is not None:
        point = find_threshold(curve, cell)
        run["steps_to_threshold"] = point and point.step
        run["seconds_to_threshold"] = point and find_seconds(point)
    # Every so many points, from the last one backwards, and the one that reached the threshold
    stride = math.ceil(len(curve) / NUM_POINTS) or 1
    kept = [*curve[::-stride], point] if point else curve[::-stride]
    run["curve"] = [
        [point.step, float(f"{find_seconds(point):.5g}"), float(f"{point.value:.5g}")]
        for point in sorted(set(kept), key=lambda point: point.step)
    ]
    return run


def read_end(log: Path, exit_code: int):
    """Read from a log why a script ended: its exit code, which torchrun replaces, and one line.

    The line is that on bad input, else the last line or state of a progress bar.
    """
    text = log.read_text(errors="replace") if log.exists() else ""
    if launcher := TORCHRUN.search(text):
        if own := EXIT_CODE.search(text, launcher.start()):
            exit_code = int(own[1])
        text = text[: launcher.start()]
    found = BAD_INPUT.search(text)
    return exit_code, found[0] if found else text.strip().split("\n")[-1].strip()


def read_attempt(process_path: Path, cell: Cell):
    """Return the outcome of an attempt at a cell, from its process.json."""
    attempt = process_path.parent
    process = json.loads(process_path.read_text())
    if process["exit_code"] is None:
        return Outcome(error=f"not done after {cell.hours:g} hours", is_final=True)
    if process["exit_code"] != 0:
        exit_code, line = read_end(attempt / "log.txt", process["exit_code"])
        return Outcome(error=f"exit code {exit_code}: {line}", is_final=exit_code == REFUSED)
    if cell.score_best and not process.get("best"):
        _, line = read_end(attempt / "best.txt", 0)
        return Outcome(error=f"no scores of best.pt: {line}", is_final=True)
    folders = find_run_folders(attempt)
    if not folders:
        return Outcome(error="no run folder", is_final=True)
    try:
        return Outcome(run=read_run(folders[0], cell, process))
    except ResultsError as failure:
        return Outcome(error=str(failure), is_final=True)


def find_run(folder: Path, cell: Cell):
    """Return the outcome of a cell: that of its first successful attempt, else that of the last failed
    one."""
    outcome = Outcome(error=NOT_RUN)
    for path in sorted(folder.glob("try_*/process.json")):  # an attempt that nobody has seen end has none
        outcome = read_attempt(path, cell)
        if outcome.run:
            break
    return outcome
