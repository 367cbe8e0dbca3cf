"""Shared by the studies: runs of other programs, and rows of results."""

import functools
import os
import subprocess
from pathlib import Path

import common

# Called once, since written results make the tree dirty, though later rows come from the same commit
describe_machine_once = functools.cache(common.describe_machine)


def run_command(folder: str | Path, *command) -> Path:
    """Run a program silently and with one thread; returns its run folder, below the empty `folder`."""
    command = [*map(str, command), "--run-dir", str(folder)]
    silent = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **silent)
    (path,) = common.find_run_folders(Path(folder))
    return path


def save_rows(name: str, new: list[dict], keys: tuple[str, ...]) -> None:
    """Add rows to benchmark/results/`name`.json, each with its machine, in place of those with the same `keys`."""
    rows = {
        tuple(row[key] for key in keys): row for row in (common.load_results(name) or {"rows": []})["rows"]
    }
    for row in new:
        rows.pop(key := tuple(row[key] for key in keys), None)
        rows[key] = row | {"machine": describe_machine_once()}
    common.save_results(common.RESULTS / f"{name}.json", {"rows": [*rows.values()]})
