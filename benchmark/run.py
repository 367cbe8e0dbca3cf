"""Run every cell (script x task x setting x seed) of a suite, on this machine or on a Ray cluster.

    python -m benchmark.run benchmark/suites/smoke.toml                 # two minutes, all five scripts
    python -m benchmark.run benchmark/suites/cpu.toml                   # an hour, part of docs/results.md
    python -m benchmark.run benchmark/suites/cpu.toml --only 'ppo/*'    # some of the cells
    python -m benchmark.run benchmark/suites/cpu.toml --address auto    # on the Ray cluster of this machine

Each cell runs in RUNS/SUITE/SCRIPT/TASK/SETTING/seedN-HASH/, with its attempts in try_1, try_2, ..., and is
done when an attempt has ended with exit code 0 and has logged the cell's headline and curve. The hash is of
the command and the files it uses, so that the same call again runs what is missing, and a changed script runs
again beside its old results. Cells compute with OMP_NUM_THREADS=1, and see no GPU but those they ask for. A
cell that crashes or is lost starts over, twice at most. Exit code: 0 when all cells are done, 1 when some
failed, 2 for errors before anything has run, 130 after Ctrl-C. On a cluster, RUNS, this repository and the
environments in benchmark/peers are on a file system that all machines share.
"""

import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from benchmark import common  # first: it says what to install

# isort: split
from tyro.conf import Positional

from benchmark.code import hash_scripts
from benchmark.common import ResultsError, require
from benchmark.machines import describe_machine
from benchmark.peers import environment
from benchmark.runs import Outcome, find_run
from benchmark.suite import Cell, read_suite

TRIES = 3  # attempts at a cell that crashes or is lost


@dataclass
class Args:
    """Command line."""

    suite: Positional[Path]  # TOML file
    runs: Path = Path("runs/benchmark")  # folder of all results
    only: str = "*"  # cells whose SCRIPT/TASK/SETTING fits, as in 'ppo/*'
    address: str | None = None  # Ray cluster to run on, instead of this machine


# ---- One cell ----------------------------------------------------------------------------------------------


def make_command(cell: Cell, python: str, run_dir: Path):
    """Return what is executed: the cell's command with --seed and --run-dir, our scripts by the peers'
    clock."""
    launcher, *words = shlex.split(cell.command)
    if cell.program == [cell.path]:  # no peer
        words.insert(words.index(cell.path), "benchmark/peers/clock.py")
    if launcher == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    return [python, *words, "--seed", f"{cell.seed}", "--run-dir", f"{run_dir}"]


def run_cell(cell: Cell, folder: Path, python: str, gpus: str = ""):
    """Run a cell, and again if it crashes, TRIES times at most. Returns the outcome of the last attempt.

    An attempt leaves log, run and process.json in a new folder.
    """
    for _ in range(TRIES):
        require(folder.name.endswith(cell.hash()), f"{cell.path} has changed since the suite was started")
        path = folder / f"try_{1 + len([*folder.glob('try_*')])}"
        path.mkdir(parents=True)
        # With the commit of the script that starts now
        process = {"machine": describe_machine(), "code": hash_scripts(cell.find_files())}
        process |= execute(make_command(cell, python, path), cell, path / "log.txt", gpus)
        if cell.score_best and process["exit_code"] == 0:
            process["best"] = score_best(cell, path, python, gpus)
        common.write_atomically(path / "process.json", json.dumps(process))
        outcome = find_run(folder, cell)
        if outcome.run:
            return outcome
        if outcome.is_final:
            break
    return replace(outcome, error=f"{outcome.error} (log: {path}/log.txt)")


def score_best(cell: Cell, path: Path, python: str, gpus: str):
    """Score the best.pt of a run by the script's --evaluate, which prints a line a score; empty if that
    fails."""
    best = next(path.glob("*/best.pt"), "best.pt")
    flags = ["--evaluate", best, "--eval-episodes", "100", "--seed", f"{cell.seed}"]
    execute([python, *cell.program, *flags], cell, path / "best.txt", gpus)
    scores = re.findall(r"^eval/(\w+): (\S+)$", (path / "best.txt").read_text(), re.M)
    found = {f"best/{name}": float(score) for name, score in scores}
    return found if all(math.isfinite(score) for score in found.values()) else {}


def execute(command: list, cell: Cell, log: Path, gpus: str):
    """Run `command` below a guard, with its output in `log`; returns its exit code and CPU-seconds."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cell.gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus or os.environ["CUDA_VISIBLE_DEVICES"]  # else Ray has chosen them
    guard = [sys.executable, "-I", common.BENCHMARK / "guard.py", f"{3600 * cell.hours}", *command]
    # The stdin of the guard closes when the harness ends
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("wb")}
    with subprocess.Popen(guard, cwd=common.ROOT, env=env, start_new_session=True, **pipes) as process:
        answer = process.stdout.read()
    return json.loads(answer or '{"exit_code": -9, "cpu_seconds": 0}')  # if somebody killed the guard


# ---- All cells ---------------------------------------------------------------------------------------------


def start_here(cells: list):
    """Return a function that starts a cell in a thread if this machine has room for it, and returns its
    future."""
    # What taskset or a container leaves of the cores; macOS does not tell
    find_cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))
    free_cores = [*find_cores(0)]
    num_cores = len(free_cores)
    pool = ThreadPoolExecutor(num_cores)
    free_gpus = []
    if any(cell.gpus for cell in cells):
        import torch

        names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
        free_gpus = names[: torch.cuda.device_count()]  # none for NoDevFiles or -1
    for cell in cells:
        require(cell.gpus <= len(free_gpus), f"this machine lacks the GPUs of {cell.name}")

    def submit(cell, *args):
        num_needed = min(cell.cpus, num_cores)  # a cell that needs more runs alone
        if num_needed > len(free_cores) or cell.gpus > len(free_gpus):
            return None
        cores = [free_cores.pop() for _ in range(num_needed)]
        gpus = [free_gpus.pop(0) for _ in range(cell.gpus)]

        def run():
            try:
                return run_cell(cell, *args, ",".join(gpus))
            finally:
                free_cores.extend(cores)
                free_gpus.extend(gpus)

        return pool.submit(run)

    return submit


def start_on_ray(address: str):
    """Return a function that gives a cell to the Ray cluster at `address`, and returns its future."""
    try:
        import ray

        if address != "auto":  # ray.init would wait for minutes
            host, port = address.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, ImportError) as error:
        raise ResultsError(f"--address {address}: no Ray cluster answers there ({error})") from None
    remote = ray.remote(max_retries=TRIES - 1)(run_cell)  # if a machine is lost

    def submit(cell, *args):
        return remote.options(num_cpus=cell.cpus, num_gpus=cell.gpus).remote(cell, *args).future()

    return submit


def run_cells(folders: dict, submit):
    """Run the cells of `folders` when there is room for them. Returns the errors of those that failed, by
    cell."""
    peers = {cell.environment for cell in folders} - {None}
    pythons = {None: sys.executable} | {peer: environment.make_environment(peer) for peer in peers}
    waiting = [*folders]
    running = {}  # cells by their futures
    errors = {}
    while waiting or running:
        for cell in [*waiting]:
            if future := submit(cell, folders[cell], pythons[cell.environment]):
                running[future] = cell
                waiting.remove(cell)
        for future in wait(running, 1.0, FIRST_COMPLETED).done:
            cell = running.pop(future)
            outcome = get_outcome(future)
            if outcome.run:
                end = f"done: {cell.headline} {outcome.run['metrics'][cell.headline]:.4g}"
            else:
                end = errors[cell] = outcome.error
            print(f"{cell.name}, seed {cell.seed}: {end}; {len(waiting) + len(running)} left", flush=True)
    return errors


def get_outcome(future):
    """Return the outcome of a cell from its future, also if its worker raised an error."""
    error = future.exception()  # such as that of a full disk, or of Ray if it loses a machine too often
    if error is None:
        return future.result()
    return Outcome(error=str(getattr(error, "cause", error)).split("\n")[0])


def main(args: Args):
    """Run a suite; returns the exit code."""
    suite = read_suite(args.suite)
    root = args.runs.resolve() / args.suite.stem
    folders = {cell: root / cell.name / f"seed{cell.seed}-{cell.hash()}" for cell in suite.cells}
    chosen = [cell for cell in suite.cells if fnmatch(cell.name, args.only)]
    require(chosen, f"--only {args.only}: no such cell in {args.suite}")
    missing = {cell: folders[cell] for cell in chosen if not find_run(folders[cell], cell).run}
    print(
        f"{root}: {len(chosen)} cells, {len(chosen) - len(missing)} done before, commit "
        f"{describe_machine()['commit']} (report.py does not publish runs of a -dirty one)",
        flush=True,
    )
    submit = start_on_ray(args.address) if args.address else start_here([*missing])
    rows = [asdict(cell) | {"folder": f"{folder.relative_to(root)}"} for cell, folder in folders.items()]
    content = asdict(suite) | {"suite": root.name, "cells": rows}
    for key in ("tables", "summary"):  # of published suites, whose pages follow their files
        del content[key]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        root.mkdir(parents=True, exist_ok=True)
        common.write_atomically(root / "suite.json", json.dumps(content))
        errors = run_cells(missing, submit)
    except KeyboardInterrupt:
        print("\ninterrupted: what was finished is kept, the same command does the rest", flush=True)
        os._exit(130)  # this also ends all cells, since their guards see this process end
    print(f"{len(chosen) - len(errors)} of {len(chosen)} cells done")
    for cell, error in errors.items():
        print(f"failed: {cell.name}, seed {cell.seed}: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    common.run_main(main, Args, __doc__)
