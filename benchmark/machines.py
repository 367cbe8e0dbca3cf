"""Describe the machines of runs, for the record and for pages."""

import os
import platform
import re
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

from benchmark.code import LEGEND, is_old
from benchmark.common import ROOT


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


def machine_line(rows: list, more: str = ""):
    """Write for the docs what the mark † means and, folded, what was measured where, when and at which
    commits."""
    machines = [row["machine"] for row in rows]
    hardware = {
        f"{m['cores']} cores of {m['cpu']}, Python {m['python']}, torch {m['torch']}, "
        f"gymnasium {m['gymnasium']}"
        for m in machines
    }
    commits = {m["commit"] for m in machines}
    dates = [m["date"] for m in machines]
    days = " to ".join(sorted({min(dates), max(dates)}))
    line = f"{'; '.join(sorted(hardware))}; commit {', '.join(sorted(commits))}; {days}.{more}"
    folded = f"<details><summary>Measured on</summary>{line}</details>"
    return f"{LEGEND}\n\n{folded}" if any(map(is_old, rows)) else folded


def list_processors(rows: list):
    """Name the processors of rows or runs of results, without the words that say nothing."""
    names = {row["machine"]["cpu"] for row in rows}
    return ", ".join(sorted(re.sub(r"\((?:R|TM)\)| Processor", "", name) for name in names))
