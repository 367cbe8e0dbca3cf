"""Shared by the programs of the benchmark: paths, run folders, machines, results and pages."""

import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

try:
    import numpy as np
    import scipy  # noqa: F401  # and tyro: of the programs that import this file first
    import tyro  # noqa: F401
except ImportError as error:
    print(f"{error}: pip install -r benchmark/requirements.txt", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "benchmark"
RESULTS, FIGURES, SUITES = BENCHMARK / "results", ROOT / "docs" / "figures", BENCHMARK / "suites"
PEERS = BENCHMARK / "peers"


class ResultsError(ValueError):
    """One line that says what is wrong with a suite, its runs or its results."""


def require(is_right: object, message: str) -> None:
    """Raise ResultsError with `message` unless `is_right`."""
    if not is_right:
        raise ResultsError(message)


def run_main(main) -> None:
    """Run a program; an error of its input or of the disk prints one line and exits with code 2."""
    try:
        sys.exit(main())
    except (ResultsError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def find_run_folders(folder: str | Path) -> list[Path]:
    """List the folders with TensorBoard events in `folder`."""
    return sorted({path.parent for path in Path(folder).glob("*/events.out.tfevents*")})


@functools.cache
def read_events(run_path: Path):
    """Read everything that a finished run has logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_path), size_guidance={"scalars": 0}).Reload()


def read_text(run_path: Path, tag: str) -> str:
    """Read a text that a run has logged; empty if there is none."""
    events, name = read_events(run_path), f"{tag}/text_summary"
    has_text = name in events.Tags()["tensors"]
    return events.Tensors(name)[0].tensor_proto.string_val[0].decode() if has_text else ""


def read_points(run_path: Path, tag: str) -> list[list[float]]:
    """Read [[step, CPU-s, seconds, value], ...] of a logged `tag`; ResultsError if it is not there.

    CPU-seconds leave out evaluations; seconds count from the first event of the run.
    """
    events = read_events(run_path)
    tags = events.Tags()["scalars"]
    for needed in (tag, "charts/cpu_seconds"):
        require(needed in tags, f"no {needed} in {run_path} (there are: {', '.join(tags)})")
    points, start = events.Scalars(tag), events.FirstEventTimestamp()
    clock = np.array([(point.step, point.value) for point in events.Scalars("charts/cpu_seconds")])
    seconds = np.interp([point.step for point in points], *clock.T).tolist()
    return [[p.step, s, p.wall_time - start, p.value] for p, s in zip(points, seconds, strict=True)]


# ---- Machines --------------------------------------------------------------------------------------------------------


def describe_machine() -> dict:
    """Describe processor, cores, versions, commit and day, for the record."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text() if info.exists() else "")  # ARM has none
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "cpu": found[1] if found else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "gymnasium")},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": date.today().isoformat(),
    }


def machine_line(machines: list[dict], gpus=()) -> str:
    """Write one sentence for the docs on what was measured where, when and at which commits."""
    hardware = {
        f"{m['cores']} cores of {m['cpu']}, Python {m['python']}, torch {m['torch']}, gymnasium {m['gymnasium']}"
        for m in machines
    }
    commits, dates = ({m[key] for m in machines} for key in ("commit", "date"))
    days = " to ".join(sorted({min(dates), max(dates)}))
    parts = [
        *sorted(hardware),
        *sorted(gpus),
        f"commit {', '.join(sorted(commits))}",
        days,
    ]
    return f"Measured on {'; '.join(parts)}."


# ---- Results ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def save_results(path: Path, results: dict) -> None:
    """Write a results file, with each point of a curve in one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = r"\s+([-\d.e]+)"
    text = re.sub(rf"\[{number},{number},{number}\s+\]", r"[\1, \2, \3]", json.dumps(results, indent=1))
    write_atomically(path, f"{text}\n")


def load_results(name: str) -> dict | None:
    """Read benchmark/results/`name`.json; None if it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# ---- Pages -----------------------------------------------------------------------------------------------------------


def show(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` significant digits or as a whole number; a dash if it is not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    value = float(f"{value:.{digits - 1}e}") if abs(value) < 1 else value  # 0.00999999 has the digits of 0.01
    if abs(value) < 1e-9 or abs(value) >= 10 ** (digits - 1):  # the first are zero but for rounding
        return f"{value:z,.0f}"
    return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}"


def make_table(head: str, rows: list[list]) -> str:
    """Write a Markdown table; columns of `head` that end in a colon are aligned to the right."""
    columns = [column.strip() for column in head.split("|")]
    names = [column.removesuffix(":") for column in columns]
    rulers = ["--:" if column.endswith(":") else "--" for column in columns]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (names, rulers, *rows))


def replace_section(text: str, name: str, content: str) -> str:
    """Replace what is between <!-- name --> and <!-- /name --> in `text`; ResultsError if the marks are missing."""
    pattern = f"(?s)(?<=<!-- {name} -->).*?(?=<!-- /{name} -->)"
    text, count = re.subn(pattern, lambda _: content, text)
    require(count, f"no <!-- {name} --> section")
    return text
