"""Run every cell (script x task x setting x seed) of a suite, on this machine or on a Ray cluster.

    python benchmark/run.py benchmark/suites/smoke.toml                 # two minutes, all five scripts
    python benchmark/run.py benchmark/suites/cpu.toml                   # an hour, part of docs/results.md
    python benchmark/run.py benchmark/suites/cpu.toml --only 'ppo/*'    # some of the cells
    python benchmark/run.py benchmark/suites/gpu.toml --address auto    # on the Ray cluster of this machine

Each cell runs in RUNS/SUITE/SCRIPT/TASK/SETTING/seedN-HASH/, with its attempts in try_1, try_2, ..., and is done when
an attempt has ended with exit code 0 and has logged the cell's headline and curve. The hash is of the command and the
files it uses, so that the same call again runs what is missing, and a changed script runs again beside its old results.
Cells compute with OMP_NUM_THREADS=1, and see no GPU but those they ask for. A cell that crashes or is lost starts over,
twice at most. Exit code: 0 when all cells are done, 1 when some failed, 2 for errors before anything has run,
130 after Ctrl-C. On a cluster, RUNS, this repository and the environments in benchmark/peers are on a file system that
all machines share.
"""

import ast
import fnmatch
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import common
import records
import tyro
from common import ResultsError, require
from suite import Cell, read_suite
from tyro.conf import Positional

sys.path.append(str(common.PEERS))
import environment

TRIES = 3  # attempts at a cell that crashes or is lost
# Errors that another attempt would repeat: bad flags, no time, and runs that lack what the suite asks for
SAME_AGAIN = ("exit code 2", "not done", "no ")
# What a gRPC server answers at once: the start of HTTP/2, and empty settings
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


@dataclass
class Args:
    """Command line."""

    suite: Positional[Path]  # TOML file
    runs: Path = Path("runs/benchmark")  # folder of all results
    only: str = "*"  # cells whose SCRIPT/TASK/SETTING fits, as in 'ppo/*'
    address: str | None = None  # Ray cluster to run on, instead of this machine


# ---- One cell --------------------------------------------------------------------------------------------------------


def make_command(cell: Cell, python: str, run_dir: Path) -> list[str]:
    """Return what is executed: the cell's command with --seed and --run-dir, our scripts by the peers' clock."""
    start, *words = cell.words
    if cell.path.startswith("algos/"):
        words.insert(words.index(cell.path), "benchmark/peers/clock.py")
    launcher = ["-m", "torch.distributed.run"] * (start == "torchrun")
    return [python, *launcher, *words, "--seed", str(cell.seed), "--run-dir", str(run_dir)]


def run_cell(cell: Cell, path: Path, command: list[str], gpus: str | None = None) -> None:
    """Try a cell once: run `command` and leave log, run and process.json in the new folder `path`."""
    is_same = path.parent.name.endswith(cell.hash())
    require(is_same, f"no run: {cell.path} has changed since the suite was started")
    path.mkdir(parents=True)
    # With the commit of the script that starts now. The clock is that of benchmark/peers/clock.py
    process = {"machine": common.describe_machine() | {"clock": "all"}}
    process |= execute(command, cell, path / "log.txt", gpus)
    if cell.score_best and process["exit_code"] == 0:
        best = next(path.glob("*/best.pt"), "best.pt")
        flags = ["--evaluate", str(best), "--eval-episodes", "100", "--seed", str(cell.seed)]
        execute([command[0], cell.path, *flags], cell, path / "best.txt", gpus)
        line, _ = records.read_end(path / "best.txt")
        scores = ast.literal_eval(line) if line.startswith("{") else {}
        process["best"] = {name.replace("eval/", "best/"): score for name, score in scores.items()}
    common.write_atomically(path / "process.json", json.dumps(process, indent=1))


def execute(command: list[str], cell: Cell, log: Path, gpus: str | None) -> dict:
    """Run `command` below a guard, with its output in `log`; returns its exit code and CPU-seconds."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if gpus is not None or not cell.gpus:  # otherwise Ray has chosen them
        env["CUDA_VISIBLE_DEVICES"] = gpus or ""
    guard = [sys.executable, "-I", str(common.BENCHMARK / "guard.py"), str(3600 * cell.hours), *command]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)  # its stdin closes when the harness ends
    with open(log, "wb") as file:
        process = subprocess.Popen(
            guard, cwd=common.ROOT, env=env, stderr=file, start_new_session=True, **pipes
        )
    with process:
        answer = process.stdout.read()
    return json.loads(answer or '{"exit_code": -9, "cpu_seconds": 0}')  # if somebody killed the guard


# ---- All cells -------------------------------------------------------------------------------------------------------


def start_here(cells: list[Cell]):
    """Return a function that starts a cell in a thread if this machine has room for it, and returns its future."""
    # What taskset or a container leaves of the cores; macOS does not tell
    find_cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))
    cores, gpus, running = len(find_cores(0)), [], {}
    pool = ThreadPoolExecutor(cores)
    if any(cell.gpus for cell in cells):
        import torch

        num_gpus = torch.cuda.device_count()  # 0 for NoDevFiles or -1
        ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        gpus = ids.split(",")[:num_gpus]

    def submit(cell: Cell, *args):
        busy = [held for future, held in running.items() if not future.done()]
        taken = {name for _, names in busy for name in names}
        free = [gpu for gpu in gpus if gpu not in taken][: cell.gpus]
        has_cores = not busy or sum(other.cpus for other, _ in busy) + cell.cpus <= cores
        if has_cores and len(free) >= cell.gpus:
            future = pool.submit(run_cell, cell, *args, ",".join(free))
            running[future] = cell, free
            return future

    return submit


def start_on_ray(address: str):
    """Return a function that gives a cell to the Ray cluster at `address`, and returns its future."""
    current = Path("/tmp/ray/ray_current_cluster")  # in which Ray keeps the address of this machine's cluster
    try:  # first, since ray.init waits for minutes
        found = current.read_text() if address == "auto" else address
        host, _, port = found.strip().rpartition("/")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(HELLO)
            connection.recv(1)
        import ray
    except (OSError, ValueError, ImportError) as error:
        raise ResultsError(f"--address {address}: no Ray cluster answers there ({error})") from None
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    remote = ray.remote(max_retries=0)(run_cell)

    def submit(cell: Cell, *args):
        return remote.options(num_cpus=cell.cpus, num_gpus=cell.gpus).remote(cell, *args).future()

    return submit


def run_cells(folders: dict[Cell, Path], submit) -> dict[Cell, str]:
    """Run cells when there is room, at most TRIES times each if they crash or are lost. Returns what failed."""
    peers = {cell.environment for cell in folders} - {None}
    pythons = {None: sys.executable} | {peer: str(environment.make_environment(peer)) for peer in peers}
    waiting, running, tries, errors = [*folders], {}, Counter(), {}
    while waiting or running:
        for cell in [*waiting]:
            path = folders[cell] / f"try_{1 + len([*folders[cell].glob('try_*')])}"
            if future := submit(cell, path, make_command(cell, pythons[cell.environment], path)):
                running[future] = cell, path
                waiting.remove(cell)
        if not running:
            return errors | dict.fromkeys(waiting, "this machine lacks the GPUs")
        for future in wait(running, 1.0, FIRST_COMPLETED).done:
            cell, path = running.pop(future)
            tries[cell] += 1
            result, error = records.find_run(folders[cell], vars(cell))
            if lost := future.exception():  # such as Ray's error when a machine is gone, or a full disk
                error = str(lost).split("\n")[0]
            end = "failed"
            if result:
                end, error = "done", f"{result['headline']} {result['value']:.4g}"
            elif tries[cell] < TRIES and not error.startswith(SAME_AGAIN):
                end = "again"
                waiting.insert(0, cell)
            else:
                errors[cell] = error = f"{error} (log: {path / 'log.txt'})"
            left = len(waiting) + len(running)
            print(f"{end}: {cell.name}, seed {cell.seed}: {error}; {left} left", file=sys.stderr)
    return errors


def main(argv: list[str] | None = None) -> int:
    """Run a suite; returns the exit code."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    cells, shown = read_suite(args.suite)
    root = args.runs.resolve() / args.suite.stem
    require(str(root).isprintable(), f"--runs {args.runs}: TensorBoard needs a folder whose name is UTF-8")
    folders = {cell: root / cell.name / f"seed{cell.seed}-{cell.hash()}" for cell in cells}
    chosen = [cell for cell in cells if fnmatch.fnmatch(cell.name, args.only)]
    require(chosen, f"--only {args.only}: no such cell in {args.suite}")
    missing = {cell: folders[cell] for cell in chosen if not records.find_run(folders[cell], vars(cell))[0]}
    print(f"{root}: {len(chosen)} cells, {len(chosen) - len(missing)} done before", file=sys.stderr)
    if common.describe_machine()["commit"].endswith("-dirty"):
        print("note: uncommitted changes: report.py will not publish these runs", file=sys.stderr)
    submit = start_on_ray(args.address) if args.address else start_here([*missing])
    rows = [vars(cell) | {"folder": str(folder.relative_to(root))} for cell, folder in folders.items()]
    content = {"suite": root.name, "cells": rows} | shown
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        root.mkdir(parents=True, exist_ok=True)
        common.write_atomically(root / "suite.json", json.dumps(content, indent=1))
        errors = run_cells(missing, submit)
    except KeyboardInterrupt:
        print(
            "\ninterrupted: what was finished is kept, the same command does the rest",
            file=sys.stderr,
            flush=True,
        )
        os._exit(130)  # this also ends all cells, since their guards see this process end
    print(f"{len(chosen) - len(errors)} of {len(chosen)} cells done")
    for cell, error in errors.items():
        print(f"failed: {cell.name}, seed {cell.seed}: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    common.run_main(main)
