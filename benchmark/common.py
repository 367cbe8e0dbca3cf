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
    import scipy  # noqa: F401  # which programs that import this file first need
    import tyro
except ImportError as error:
    print(f"{error}: pip install -r benchmark/requirements.txt", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "benchmark"
RESULTS = BENCHMARK / "results"
SUITES = BENCHMARK / "suites"
PEERS = BENCHMARK / "peers"
FIGURES = ROOT / "docs/figures"


class ResultsError(ValueError):
    """One line that says what is wrong with a suite, its runs or its results."""


def require(is_right: object, message: str):
    """Raise ResultsError with `message` unless `is_right`."""
    if not is_right:
        raise ResultsError(message)


def run_main(main, args_type: type, description: str):
    """Run a program on its command line; an error of its input or of the disk is one line and exit code 2."""
    name = Path(sys.argv[0]).name
    program = f"python -m benchmark.{name.removesuffix('.py')}"
    args = tyro.cli(args_type, prog=program, description=description)
    try:
        sys.exit(main(args))
    except (ResultsError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def find_run_folders(folder: Path):
    """List the folders with TensorBoard events in `folder`."""
    return sorted({path.parent for path in folder.glob("*/events.out.tfevents*")})


@functools.cache
def read_events(run_path: Path):
    """Read everything that a finished run has logged: `Scalars(tag)` lists points with step, wall_time and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_path), size_guidance={"scalars": 0}).Reload()


def read_text(run_path: Path, tag: str):
    """Read a text that a run has logged; empty if there is none."""
    events = read_events(run_path)
    name = f"{tag}/text_summary"
    if name not in events.Tags()["tensors"]:
        return ""
    return events.Tensors(name)[0].tensor_proto.string_val[0].decode()


# ---- Machines --------------------------------------------------------------------------------------------------------


def describe_machine():
    """Describe processor, cores, versions, commit and day, for the record."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text() if info.exists() else "")  # ARM has none
    git = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "cpu": found[1] if found else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "gymnasium": metadata.version("gymnasium"),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": f"{date.today()}",
    }


def machine_line(machines: list):
    """Write one sentence for the docs on what was measured where, when and at which commits."""
    hardware = {
        f"{m['cores']} cores of {m['cpu']}, Python {m['python']}, torch {m['torch']}, gymnasium {m['gymnasium']}"
        for m in machines
    }
    commits = {m["commit"] for m in machines}
    dates = [m["date"] for m in machines]
    days = " to ".join(sorted({min(dates), max(dates)}))
    return f"Measured on {'; '.join(sorted(hardware))}; commit {', '.join(sorted(commits))}; {days}."


# ---- Results ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str):
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def save_results(path: Path, results: dict):
    """Write a results file, with each point of a curve in one line."""
    number = r"\s+([-\d.e]+)"
    text = re.sub(rf"\[{number},{number},{number}\s+\]", r"[\1, \2, \3]", json.dumps(results, indent=1))
    write_atomically(path, f"{text}\n")


def load_results(name: str):
    """Read benchmark/results/`name`.json; None if it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# ---- Pages -----------------------------------------------------------------------------------------------------------


def show(value: float):
    """Write a number with three significant digits or as a whole number; a dash if it is not finite."""
    if not math.isfinite(value):
        return "-"
    # Below 1e-9, a value is zero but for rounding
    if abs(value) < 1e-9 or abs(value) >= 100:
        return f"{value:z,.0f}"
    return f"{value:#.3g}".rstrip(".")


def make_table(head: str, rows: list):
    """Write a Markdown table; columns of `head` that end in a colon are aligned to the right."""
    columns = head.split(" | ")
    names = [column.removesuffix(":") for column in columns]
    rulers = ["--:" if column.endswith(":") else "--" for column in columns]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (names, rulers, *rows))


def replace_section(text: str, name: str, content: str):
    """Replace what is between <!-- name --> and <!-- /name --> in `text`; ResultsError if the marks are missing."""
    pattern = f"(?s)(?<=<!-- {name} -->).*?(?=<!-- /{name} -->)"
    text, count = re.subn(pattern, lambda _: content, text)
    require(count, f"no <!-- {name} --> section")
    return text
