"""Shared by the studies: runs of other programs, and rows of results."""

import argparse
import functools
import os
import subprocess
from pathlib import Path

from benchmark import common, machines, records, runs
from benchmark.code import hash_scripts

# Called once, since written results make the tree dirty, though later rows come from the same commit
describe_machine_once = functools.cache(machines.describe_machine)


def start_parser(description: str):
    """Make a parser without flags, whose --help shows a program's docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter)


def run_command(folder: str | Path, *command) -> Path:
    """Run a program silently and with one thread; returns its run folder, below the empty `folder`.

    ResultsError with the program's last line if it fails.
    """
    command = [*map(str, command), "--run-dir", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=common.ROOT, env=env, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or ["no output"]
    common.require(done.returncode == 0, f"{' '.join(command)}: {lines[-1]}")
    (path,) = runs.find_run_folders(Path(folder))
    return path


def save_rows(name: str, new: list[dict], keys: tuple[str, ...], scripts: tuple[str, ...]) -> None:
    """Add rows to benchmark/results/`name`.json, in place of those with the same `keys`.

    Each gets its machine, and the code of `scripts`, such as algos/ppo.py, with which it was measured.
    """
    rows = {
        tuple(row[key] for key in keys): row for row in (records.load_results(name) or {"rows": []})["rows"]
    }
    for row in new:
        key = tuple(row[name] for name in keys)
        rows.pop(key, None)  # a new row comes last
        rows[key] = row | {"machine": describe_machine_once(), "code": hash_scripts(scripts)}
    records.save_results(common.RESULTS / f"{name}.json", {"rows": [*rows.values()]})
