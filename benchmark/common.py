"""What the benchmark scripts share: running a script, reading its curve, describing the machine, writing results."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmark" / "results", ROOT / "docs" / "figures"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run_script(script: str, *flags) -> dict:
    """Run algos/`script`.py in its own process: result.json plus `curve` = [[step, CPU-s, return], ...]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "algos" / f"{script}.py"), *map(str, flags), "--run-dir", folder]
        subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (path,) = Path(folder).glob("*/result.json")
        events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
        events.Reload()
        seconds = {e.step: e.value for e in events.Scalars("charts/cpu_seconds")}
        curve = [[e.step, seconds[e.step], e.value] for e in events.Scalars("charts/return_last_20")]
        return json.loads(path.read_text()) | {"curve": curve}


def describe_machine() -> dict:
    """Processor, cores, versions, commit and day, for the record."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[1]
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    ).stdout.strip()
    import gymnasium
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "gymnasium": gymnasium.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), **versions, "commit": commit, "date": date.today().isoformat()}


def machine_line(machine: dict) -> str:
    """One sentence for the docs."""
    return (
        f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, torch {machine['torch']}, "
        f"gymnasium {machine['gymnasium']}, commit {machine['commit']}, {machine['date']}."
    )


def save_results(name: str, results: dict) -> None:
    """Write benchmark/results/`name`.json, a list item a line."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2, \3]", text)
    (RESULTS / f"{name}.json").write_text(text + "\n")


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
