"""What the benchmark scripts share: running a script, reading its curve, describing the machine, writing results."""

import fcntl
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from datetime import date
from importlib import metadata
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmark" / "results", ROOT / "docs" / "figures"
PEERS = ROOT / "benchmark" / "peers"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run_script(script: str, *flags, curve: str = "charts/return_last_20") -> dict:
    """Run algos/`script`.py in its own process: result.json plus `curve` = [[step, CPU-s, value], ...] of that tag."""
    with tempfile.TemporaryDirectory() as folder:
        path = run_in_folder(folder, script, *flags)
        return json.loads((path / "result.json").read_text()) | {"curve": read_curve(path, curve)}


def run_in_folder(folder: str, script: str, *flags, num_processes: int = 1) -> Path:
    """Run algos/`script`.py with one thread a process; returns the run folder, below the empty `folder`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_processes]
    launcher = launcher if num_processes > 1 else []
    return run_file(folder, sys.executable, *launcher, ROOT / "algos" / f"{script}.py", *flags)


def run_peer(environment: str, peer: str, *flags, curve: str | None = None) -> dict:
    """Run benchmark/peers/`peer`.py in its environment: result.json plus `curve` of a tag, None for peers without."""
    python = make_peer_environment(environment)
    with tempfile.TemporaryDirectory() as folder:
        path = run_file(folder, python, PEERS / f"{peer}.py", *flags)
        return json.loads((path / "result.json").read_text()) | {"curve": curve and read_curve(path, curve)}


def run_file(folder: str, *command) -> Path:
    """Run a script silently and with one thread; returns its run folder below `folder`."""
    command = [*map(str, command), "--run-dir", str(folder)]
    subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (path,) = Path(folder).glob("*/result.json")
    return path.parent


def read_events(run_path: Path):
    """What a run has logged, all of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_path), size_guidance={"scalars": 0}).Reload()


def read_points(run_path: Path, tag: str) -> list[list[float]]:
    """[[step, CPU-s, seconds, value], ...] of a logged `tag`; ValueError where it was not logged.

    Neither kind of seconds counts evaluations where the run logs both; else the seconds are those of the events.
    """
    events = read_events(run_path)
    tags = events.Tags()["scalars"]
    for needed in (tag, "charts/cpu_seconds"):
        if needed not in tags:
            raise ValueError(f"no curve {needed} in {run_path} (there are: {', '.join(tags) or 'none'})")

    points, start = events.Scalars(tag), events.FirstEventTimestamp()
    steps = [point.step for point in points]

    def read_clock(name: str):
        clock = events.Scalars(name)
        return np.interp(steps, [c.step for c in clock], [c.value for c in clock])

    cpu_seconds, seconds = read_clock("charts/cpu_seconds"), [point.wall_time - start for point in points]
    if "charts/wall_seconds" in tags:
        seconds = read_clock("charts/wall_seconds")
    return [[p.step, float(c), float(s), p.value] for p, c, s in zip(points, cpu_seconds, seconds, strict=True)]


def read_curve(run_path: Path, tag: str) -> list[list[float]]:
    """[[step, CPU-s, value], ...] of a logged `tag`; ValueError where it was not logged."""
    return [[step, seconds, value] for step, seconds, _, value in read_points(run_path, tag)]


def find_threshold(curve: list[list[float]], threshold: float, better: str = "higher", in_a_row: int = 1):
    """The point [step, seconds, ..., value] that ends the first `in_a_row` at the threshold or beyond; None if none."""
    sign, num_beyond = 1 if better == "higher" else -1, 0
    for point in curve:
        num_beyond = num_beyond + 1 if sign * point[-1] >= sign * threshold else 0
        if num_beyond == in_a_row:
            return point
    return None


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
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    ).stdout.strip()
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in ("torch", "gymnasium")}
    return {"cpu": cpu, "cores": os.cpu_count(), **versions, "commit": commit, "date": date.today().isoformat()}


def machine_line(machine: dict) -> str:
    """One sentence for the docs."""
    return (
        f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, torch {machine['torch']}, "
        f"gymnasium {machine['gymnasium']}, commit {machine['commit']}, {machine['date']}."
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def show(value: float | None, digits: int = 3) -> str:
    """A number as people write it."""
    if value is None or not math.isfinite(value):
        return "-"
    value = float(f"{value:.{digits - 1}e}") if abs(value) < 1 else value  # 0.00999999 has the digits of 0.01
    if abs(value) < 1e-9 or abs(value) >= 10 ** (digits - 1):  # rounding aside, the first are zero
        return f"{value:,.0f}"
    return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}"


def to_json(results: dict) -> str:
    """Text of a results file, a list item a line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2, \3]", text) + "\n"


def save_results(name: str, results: dict) -> None:
    """Write benchmark/results/`name`.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(to_json(results))


def load_results(name: str) -> dict:
    """Read benchmark/results/`name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def replace_section(text: str, name: str, content: str) -> str:
    """`text` with what stands between <!-- name --> and <!-- /name --> replaced; ValueError where they are not."""
    pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"no <!-- {name} --> section")
    return pattern.sub(lambda m: m[1] + content + m[2], text)


def write_section(path: Path, name: str, content: str) -> None:
    """Replace the section `name` of the file at `path`."""
    path.write_text(replace_section(path.read_text(), name, content))


def write_report(sections: dict[str, str], script: str) -> None:
    """Write each section into docs/`script`.md or README.md, where it is; ValueError where it is in neither."""
    for name, content in sections.items():
        paths = [ROOT / "docs" / f"{script}.md", ROOT / "README.md"]
        for path in [path for path in paths if f"<!-- {name} -->" in path.read_text()] or paths[:1]:
            write_section(path, name, content)
