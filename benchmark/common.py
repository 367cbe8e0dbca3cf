"""What all programs here share: places, machines, the peers' environments, the form of results, sections of pages."""

import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import venv
from datetime import date
from importlib import metadata
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "benchmark"
RESULTS, FIGURES, SUITES = BENCHMARK / "results", ROOT / "docs" / "figures", BENCHMARK / "suites"
PEERS = BENCHMARK / "peers"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


class ResultsError(ValueError):
    """What is wrong with results, in one line."""


# ---- Runs ------------------------------------------------------------------------------------------------------------


def run_command(folder: str | Path, *command) -> Path:
    """Run a program silently and with one thread; returns its run folder, below the empty `folder`."""
    command = [*map(str, command), "--run-dir", str(folder)]
    subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (path,) = find_run_folders(folder)
    return path


def find_run_folders(folder: str | Path, pattern: str = "*") -> list[Path]:
    """List the folders with TensorBoard events that fit `pattern` below `folder`."""
    return sorted({path.parent for path in Path(folder).glob(f"{pattern}/events.out.tfevents*")})


@functools.cache
def read_events(run_path: Path):
    """Read everything that a run which has ended has logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_path), size_guidance={"scalars": 0}).Reload()


def read_text(run_path: Path, tag: str) -> str:
    """Read a text that a run has logged; empty if there is none."""
    events, name = read_events(run_path), f"{tag}/text_summary"
    has_text = name in events.Tags()["tensors"]
    return events.Tensors(name)[0].tensor_proto.string_val[0].decode() if has_text else ""


def read_points(run_path: Path, tag: str, role: str = "curve") -> list[list[float]]:
    """Read [[step, CPU-s, seconds, value], ...] of a logged `tag`; ResultsError, with its `role`, if it is not there.

    CPU-seconds leave out evaluations, and so do seconds if the run logs `charts/wall_seconds`; otherwise they are
    those since its first event.
    """
    events = read_events(run_path)
    tags = events.Tags()["scalars"]
    for needed in (tag, "charts/cpu_seconds"):
        if needed not in tags:
            raise ResultsError(f"no {role} {needed} in {run_path} (there are: {', '.join(tags) or 'none'})")

    points = events.Scalars(tag)
    steps = [point.step for point in points]

    def read_clock(name: str) -> list[float]:
        clock = events.Scalars(name)
        return np.interp(steps, [c.step for c in clock], [c.value for c in clock]).tolist()

    seconds = [point.wall_time - events.FirstEventTimestamp() for point in points]
    if "charts/wall_seconds" in tags:
        seconds = read_clock("charts/wall_seconds")
    values = [point.value for point in points]
    return [list(x) for x in zip(steps, read_clock("charts/cpu_seconds"), seconds, values, strict=True)]


def find_threshold(curve: list[list[float]], threshold: float, better: str = "higher", in_a_row: int = 1):
    """The point [step, seconds, ..., value] that ends the first `in_a_row` at the threshold or beyond; None if none."""
    sign, num_beyond = 1 if better == "higher" else -1, 0
    for point in curve:
        num_beyond = num_beyond + 1 if sign * point[-1] >= sign * threshold else 0
        if num_beyond == in_a_row:
            return point
    return None


# ---- Machines and peers ----------------------------------------------------------------------------------------------


def make_peer_environment(peer: str) -> Path:
    """Python of a peer's own virtual environment, made anew when requirements-`peer`.txt has changed."""
    requirements, folder = PEERS / f"requirements-{peer}.txt", PEERS / f".venv-{peer}"
    digest, stamp = hashlib.sha256(requirements.read_bytes()).hexdigest(), folder / "requirements.sha256"
    with open(PEERS / f".venv-{peer}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not stamp.exists() or stamp.read_text() != digest:
            venv.create(folder, with_pip=True, clear=True)
            pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
            packages = requirements.read_text().split()
            # torch first, by its exact version: where a CPU build is at hand, later ranges then accept it
            first = [package for package in packages if package.startswith("torch==")]
            # and last what asks for other versions, of years ago, than those it is run with
            last = [package for package in packages if package.startswith("cleanrl==")]
            others = [package for package in packages if package not in last]
            for flags in (first, others, ["--no-deps", "--ignore-requires-python", *last] if last else []):
                if flags:
                    subprocess.run([*pip, *flags], check=True, capture_output=True, text=True)
            stamp.write_text(digest)
    return folder / "bin" / "python"


def describe_machine() -> dict:
    """Processor, cores, versions, commit and day, for the record."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        cpu = found[1] if found else cpu  # ARM has none
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    versions = {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("torch", "gymnasium")
    }
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        **versions,
        "commit": commit,
        "date": date.today().isoformat(),
    }


def machine_line(machines: list[dict], gpus=()) -> str:
    """One sentence for the docs on what was measured where, when and at which commits."""
    hardware = sorted({f"{m['cores']} cores of {m['cpu']}, Python {m['python']}" for m in machines}) + sorted(
        gpus
    )
    versions = sorted({f"torch {m['torch']}, gymnasium {m['gymnasium']}" for m in machines})
    commits = sorted({m["commit"] for m in machines})
    dates = sorted({m["date"] for m in machines})
    days = " to ".join(sorted({*dates[:1], *dates[-1:]}))
    return f"Measured on {'; '.join([*hardware, *versions, 'commit ' + ', '.join(commits), days])}."


# ---- Results ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def to_json(results: dict) -> str:
    """Text of a results file, a point of a curve a line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2, \3]", text) + "\n"


def save_results(name: str, results: dict) -> None:
    """Write benchmark/results/`name`.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_atomically(RESULTS / f"{name}.json", to_json(results))


def load_results(name: str) -> dict | None:
    """Read benchmark/results/`name`.json; None where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def save_rows(name: str, new: list[dict], keys: tuple[str, ...]) -> None:
    """Add rows to benchmark/results/`name`.json, each with its machine, in place of those with the same `keys`."""
    old = (load_results(name) or {"rows": []})["rows"]
    fresh = {tuple(row[key] for key in keys) for row in new}
    rows = [row for row in old if tuple(row[key] for key in keys) not in fresh]
    machine = describe_machine_once()
    save_results(name, {"rows": rows + [row | {"machine": machine} for row in new]})


# Results that are written change the tree, but not what later rows of the same program are of
describe_machine_once = functools.cache(describe_machine)


# ---- Pages -----------------------------------------------------------------------------------------------------------


def show(value: float | None, digits: int = 3) -> str:
    """A number as people write it."""
    if value is None or not math.isfinite(value):
        return "-"
    value = float(f"{value:.{digits - 1}e}") if abs(value) < 1 else value  # 0.00999999 has the digits of 0.01
    if abs(value) < 1e-9 or abs(value) >= 10 ** (digits - 1):  # rounding aside, the first are zero
        return f"{value:z,.0f}"
    return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}"


def make_table(head: str, rows: list[list]) -> str:
    """Markdown table; of `head`, columns that end in a colon stand to the right."""
    columns = [column.strip() for column in head.split("|")]
    lines = [columns, ["--:" if column.endswith(":") else "--" for column in columns], *rows]
    lines[0] = [column.removesuffix(":") for column in columns]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def replace_section(text: str, name: str, content: str) -> str:
    """`text` with what stands between <!-- name --> and <!-- /name --> replaced; ValueError where they are not."""
    pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"no <!-- {name} --> section")
    return pattern.sub(lambda m: m[1] + content + m[2], text)


def run_main(main) -> None:
    """Run a program; what is wrong with its input is one line and exit code 2, Ctrl-C is 130."""
    try:
        sys.exit(main())
    except ResultsError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted: what was finished is kept, the same command does the rest", file=sys.stderr)
        sys.exit(130)
