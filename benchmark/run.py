"""Run every cell (script x task x setting x seed) of a suite, on this machine or on a Ray cluster.

    python -m benchmark.run benchmark/suites/smoke.toml                 # two minutes, all five scripts
    python -m benchmark.run benchmark/suites/cpu.toml                   # an hour, part of docs/results.md
    python -m benchmark.run benchmark/suites/cpu.toml --only 'ppo/*'    # some of the cells
    python -m benchmark.run benchmark/suites/cpu.toml --dry-run         # which cells would run, and how long
    python -m benchmark.run benchmark/suites/cpu.toml --old             # the rows that pages mark with †
    python -m benchmark.run benchmark/suites/cpu.toml --address auto    # on the Ray cluster of this machine

Each cell runs in RUNS/SUITE/SCRIPT/TASK/SETTING/seedN-HASH/, with its attempts in try_1, try_2, ..., and is
done when an attempt has ended with exit code 0 and has logged the cell's headline and curve. The hash is of
the command and the files it uses, so that the same call again runs what is missing, and a changed script runs
again beside its old results. Cells compute with OMP_NUM_THREADS=1, and see no GPU but those they ask for. A
cell that crashes or is lost is tried again, twice at most: one of our scripts resumes from its checkpoint, in
the same try_K, and a peer starts over. Exit code: 0 when all cells are done, and of --dry-run, 1 when some
failed, 2 for errors before anything has run, 130 after Ctrl-C. On a cluster, RUNS, this repository and the
environments in benchmark/peers are on a file system that all machines share.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from benchmark import common  # first: it says what to install

# isort: split
from tyro.conf import Positional

from benchmark import records
from benchmark.code import hash_scripts, is_old
from benchmark.common import ResultsError, require
from benchmark.machines import describe_machine
from benchmark.peers import environment
from benchmark.runs import Outcome, find_run, read_attempt
from benchmark.suite import Cell, read_suite

TRIES = 3  # attempts at a cell that crashes or is lost


@dataclass
class Args:
    """Command line."""

    suite: Positional[Path]  # TOML file
    runs: Path = Path("runs/benchmark")  # folder of all results
    only: str = "*"  # cells whose SCRIPT/TASK/SETTING fits, as in 'ppo/*'
    address: str | None = None  # Ray cluster to run on, instead of this machine
    old: bool = False  # only cells of which benchmark/results has no run of today's code
    dry_run: bool = False  # print the cells that would run and their expected times, and do nothing else


# ---- One cell ----------------------------------------------------------------------------------------------


def make_command(cell: Cell, python: str, run_dir: Path):
    """Return what is executed: the cell's command with --seed and --run-dir, our scripts by the peers'
    clock.

    If the run folder in `run_dir` has a checkpoint, the command resumes that run.
    """
    launcher, *words = shlex.split(cell.command)
    if cell.program == [cell.path]:  # no peer
        words.insert(words.index(cell.path), "benchmark/peers/clock.py")
    if launcher == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    words += ["--seed", f"{cell.seed}", "--run-dir", f"{run_dir}"]
    for checkpoint in run_dir.glob("*/checkpoint.pt"):
        words += ["--resume", f"{checkpoint}"]
    return [python, *words]


def choose_folder(folder: Path, cell: Cell):
    """Return the folder of the next attempt at a cell: that of the last attempt to resume its run, or a new
    one."""
    number = len([*folder.glob("try_*")])
    last = folder / f"try_{number}"
    return last if can_resume(last, cell) else folder / f"try_{number + 1}"


def can_resume(attempt: Path, cell: Cell):
    """Return whether an attempt was killed or crashed, and has a checkpoint of one of our scripts."""
    if cell.program != [cell.path] or not any(attempt.glob("*/checkpoint.pt")):
        return False
    process = attempt / "process.json"
    if process.exists() and read_attempt(process, cell).is_final:
        return False
    # All processes of an attempt hold the lock of its log (see `execute`): they may be of another harness
    with (attempt / "log.txt").open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # this file system has no locks
            pass
    return True


def run_cell(cell: Cell, folder: Path, python: str, gpus: str = ""):
    """Run a cell, and again if it crashes, TRIES times at most. Returns the outcome of the last attempt.

    An attempt leaves log, run and process.json in its folder. If it resumes a run, the logs of before are
    log_1.txt, log_2.txt, ..., and process.json has the CPU-seconds of all these attempts.
    """
    start = time.monotonic()
    for _ in range(TRIES):
        require(folder.name.endswith(cell.hash()), f"{cell.path} has changed since the suite was started")
        path = choose_folder(folder, cell)
        path.mkdir(parents=True, exist_ok=True)
        print(f"{cell.name}, seed {cell.seed}: log: {path}/log.txt", flush=True)
        number = 1 + len([*path.glob("log_*.txt")])
        for file in path.glob("log.*"):
            file.rename(path / f"log_{number}{file.suffix}")
        # With the commit of the script that starts now
        process = {"machine": describe_machine(), "code": hash_scripts(cell.find_files())}
        process |= execute(make_command(cell, python, path), cell, path / "log.txt", gpus)
        for report in path.glob("log_*.json"):
            process["cpu_seconds"] += json.loads(report.read_text())["cpu_seconds"]
        if cell.score_best and process["exit_code"] == 0:
            process["best"] = score_best(cell, path, python, gpus)
        common.write_atomically(path / "process.json", json.dumps(process))
        outcome = replace(find_run(folder, cell), seconds=time.monotonic() - start)
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
    report = log.with_suffix(".json")
    guard = [sys.executable, "-I", common.BENCHMARK / "guard.py", f"{3600 * cell.hours}", report, *command]
    with log.open("wb") as output:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)  # all that inherit `output` hold it too
        # The stdin of the guard closes when the harness ends, and its stdout when the guard ends
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
        with subprocess.Popen(guard, cwd=common.ROOT, env=env, start_new_session=True, **pipes) as process:
            process.stdout.read()
    if report.exists():
        return json.loads(report.read_text())
    return {"exit_code": -9, "cpu_seconds": 0}  # somebody killed the guard


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


def show_time(seconds: float):
    """Write a time in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def find_expected(name: str):
    """Return the median wall-clock seconds of the committed runs of a suite, by command.

    The events of some peers begin late, so that their CPU-seconds say more.
    """
    cells = (records.load_results(name) or {"cells": {}})["cells"].values()
    return {
        cell["command"]: statistics.median(
            max(run["wall_seconds"], run["cpu_seconds"] / cell["cpus"]) for run in cell["runs"]
        )
        for cell in cells
        if cell["runs"]
    }


def find_current(name: str):
    """Return the commands and seeds of the committed runs of a suite that are of today's code or of peers."""
    cells = (records.load_results(name) or {"cells": {}})["cells"].values()
    return {(cell["command"], run["seed"]) for cell in cells for run in cell["runs"] if not is_old(run)}


def show_expected(seconds: float, num_unknown: int):
    """Write an expected time, and how many cells it leaves out."""
    unknown = f" without {num_unknown} of unknown time" if num_unknown else ""
    return f"about {show_time(seconds)}{unknown}"


def show_rest(waiting: list, started: dict, expected: dict):
    """Write how long the cells will take that wait or have started, after one has ended.

    `started` has their times of start, and `expected` seconds by command.
    """
    seconds = [expected[cell.command] for cell in waiting if cell.command in expected]
    for cell, start in started.items():
        if cell.command in expected:
            seconds.append(max(0, expected[cell.command] - (time.monotonic() - start)))
    # With the cell that has ended, one more than those in `started` ran at once
    rest = max([0, *seconds, sum(seconds) / (len(started) + 1)])
    return show_expected(rest, len(waiting) + len(started) - len(seconds))


def show_plan(cells: list, expected: dict):
    """Write a line for each cell that would run, with its expected time, and a line with their sum."""
    lines = []
    known = []
    for cell in cells:
        text = "unknown time"
        if cell.command in expected:
            known.append(expected[cell.command])
            text = f"about {show_time(known[-1])}"
        lines.append(f"{cell.name}, seed {cell.seed}: {text}")
    total = show_expected(sum(known), len(cells) - len(known))
    return "\n".join([*lines, f"{len(cells)} cells, one after another: {total}"])


def run_cells(folders: dict, submit, expected: dict | None):
    """Run the cells of `folders` when there is room for them. Returns the errors of those that failed, by
    cell.

    `expected` has the seconds of cells by command, as far as they are known before. Without it, nothing is
    said of the time that is left.
    """
    peers = {cell.environment for cell in folders} - {None}
    pythons = {None: sys.executable} | {peer: environment.make_environment(peer) for peer in peers}
    waiting = [*folders]
    running = {}  # cells by their futures
    started = {}  # times by cell
    seconds = {}  # of cells that are done, by command
    errors = {}
    while waiting or running:
        for cell in [*waiting]:
            if future := submit(cell, folders[cell], pythons[cell.environment]):
                running[future] = cell
                started[cell] = time.monotonic()
                waiting.remove(cell)
        for future in wait(running, 1.0, FIRST_COMPLETED).done:
            cell = running.pop(future)
            del started[cell]
            outcome = get_outcome(future)
            if outcome.run:
                end = f"done: {cell.headline} {outcome.run['metrics'][cell.headline]:.4g}"
                seconds.setdefault(cell.command, []).append(outcome.seconds)
            else:
                end = errors[cell] = outcome.error
            rest = f"{len(waiting) + len(running)} left"
            if expected is not None and (waiting or running):
                known = expected | {command: statistics.mean(x) for command, x in seconds.items()}
                rest += f", {show_rest(waiting, started, known)}"
            elapsed = f" after {show_time(outcome.seconds)}" if outcome.seconds else ""
            print(f"{cell.name}, seed {cell.seed}: {end}{elapsed}; {rest}", flush=True)
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
    if args.old:
        current = find_current(root.name)
        chosen = [cell for cell in chosen if (cell.command, cell.seed) not in current]
    missing = {cell: folders[cell] for cell in chosen if not find_run(folders[cell], cell).run}
    expected = find_expected(root.name)
    if args.dry_run:
        print(show_plan([*missing], expected))
        return 0
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
        # A cluster does not say which cells have started
        errors = run_cells(missing, submit, None if args.address else expected)
    except KeyboardInterrupt:
        print("\ninterrupted: what was finished is kept, the same command does the rest", flush=True)
        os._exit(130)  # this also ends all cells, since their guards see this process end
    print(f"{len(chosen) - len(errors)} of {len(chosen)} cells done")
    for cell, error in errors.items():
        print(f"failed: {cell.name}, seed {cell.seed}: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    common.run_main(main, Args, __doc__)
