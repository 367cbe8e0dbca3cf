"""Run every cell (script x task x setting x seed) of a suite on Ray, on this machine or on a cluster.

    python benchmark/run.py benchmark/suites/smoke.toml                 # two minutes, all five scripts
    python benchmark/run.py benchmark/suites/cpu.toml                   # the results of docs/results.md
    python benchmark/run.py benchmark/suites/cpu.toml --only 'ppo/*'    # some of the cells
    python benchmark/run.py benchmark/suites/gpu.toml --address auto    # on the Ray cluster of this machine

Each cell runs in RUNS/SUITE/SCRIPT/TASK/SETTING/seedN-HASH/, an attempt each in try_1, try_2, ..., and is done when an
attempt holds a result.json and has logged the cell's curve. The hash is that of the command and of the script, so that
the same call again runs what is missing, and a changed script runs anew beside its old results. Cells compute with
OMP_NUM_THREADS=1, and see no GPU but those they ask for. Exit code: 0 when all cells are done, 1 when some failed, 2
for what is wrong before anything has run, 130 after Ctrl-C. On a cluster, RUNS, this repository and the environments in
benchmark/peers are on a file system that all machines share.
"""

import argparse
import contextlib
import fcntl
import fnmatch
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import common
import records
from records import find_result
from suite import Cell, SuiteError, read_suite
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0  # where stderr is no terminal
SECONDS_TO_CONNECT = 5.0  # to a Ray cluster: one that is there answers within one
NO_RETRY = ("exit code 2", "not done after", "another version", "no curve")  # would be the same again
# Kills a process and all it has started when its own stdin closes, which happens when whoever started both is gone
WATCHDOG = """
import os, psutil, signal, sys
sys.stdin.read()
leader = int(sys.argv[1])
family = [leader]
if psutil.pid_exists(leader):
    family += [process.pid for process in psutil.Process(leader).children(recursive=True)]
for kill, pid in [(os.kill, pid) for pid in family] + [(os.killpg, leader)]:
    try:
        kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


def make_command(cell: Cell, pythons: dict[str, str], run_dir: Path, track: bool) -> list[str]:
    """What is executed: the cell's command with --seed, --run-dir and, for our scripts, --track."""
    words = cell.words
    python = pythons.get(cell.environment, sys.executable)
    start = [python] if words[0] == "python" else [python, "-m", "torch.distributed.run"]
    tracked = ["--track"] if track and cell.path.startswith("algos/") else []
    return [*start, *words[1:], "--seed", str(cell.seed), "--run-dir", str(run_dir), *tracked]


def run_cell(cell: Cell, digest: str, folder: Path, command: list[str], attempt: int) -> dict:
    """One attempt at a cell, in a Ray worker: run `command` and tell how it ended."""
    host, path = platform.node(), folder / f"try_{attempt}"
    if not folder.exists():
        return {"error": f"{host} does not see {folder}: --runs has to be on a file system that all machines share"}
    if not shutil.which(command[0]):
        return {"error": f"{host} does not see {command[0]}"}
    if cell.hash() != digest:
        return {"error": f"another version of {cell.path} is on {host} than when the suite was started"}
    path.mkdir()
    machine = common.describe_machine()  # its commit is that of the script which starts now
    # Ray has chosen the GPUs in it; a log in the order of writing, whole where the cell is killed
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if not cell.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
    error = None
    with open(path / "log.txt", "wb") as log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command, cwd=common.ROOT, env=env, start_new_session=True, **streams)
    guard = [sys.executable, "-c", WATCHDOG, str(process.pid)]
    guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
    try:
        process.wait(3600 * cell.hours)
    except subprocess.TimeoutExpired:
        error = f"not done after {cell.hours:g} hours"
    guard.stdin.close()  # the cell, or what it has left running, ends
    guard.wait()
    returncode = process.wait()
    if returncode and not error:
        error = f"exit code {returncode}" if returncode > 0 else f"killed by {signal.strsignal(-returncode)}"
        lines = read_end(path / "log.txt", 1)
        error += f": {lines[0]}" if lines and returncode > 0 else ""
    if not error:
        error = find_flaw(cell, folder)
    report = {"error": error, "machine": machine}
    common.write_atomically(path / "process.json", json.dumps(report, indent=1))
    return report


def find_flaw(cell: Cell, folder: Path) -> str | None:
    """What the result of a cell that has ended lacks; None where it is whole."""
    path = find_result(folder, cell.curve) or find_result(folder)
    if path is None:
        return "ended without a result.json that can be read"
    try:
        _ = cell.curve and common.read_points(path.parent, cell.curve)
    except ValueError as error:
        return str(error)
    return None


def read_progress(log: Path) -> str:
    """The last state of the progress bar in a log, without the bar: percent, steps, time left, rate, metric."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = re.split(r"[\r\n]+", file.read().decode(errors="replace"))
    bars = [line for line in lines if re.search(r"\d+%\|.*\|", line)]
    return re.sub(r"\|.*\|", "", bars[-1]).strip() if bars else "starting"


def read_end(log: Path, num_lines: int = 8) -> list[str]:
    """The last lines of a log, of progress bars the last state."""
    text = log.read_bytes().decode(errors="replace") if log.exists() else ""
    return [line.split("\r")[-1].strip() for line in text.strip().split("\n")][-num_lines:] if text.strip() else []


class Display:
    """A line for each running cell below a bar of all cells; plain lines where stderr is no terminal."""

    def __init__(self, total: int, num_done: int):
        self.is_terminal, self.lines, self.last_lines = sys.stderr.isatty(), [], time.time()
        self.bar = tqdm(total=total, initial=num_done, unit="cell", disable=not self.is_terminal)

    def write(self, text: str) -> None:
        """A line that stays."""
        tqdm.write(text, file=sys.stderr)

    def show(self, running: dict[str, Path]) -> None:
        """The state of the cells in `running`, by their logs."""
        is_time = time.time() - self.last_lines >= SECONDS_BETWEEN_LINES
        if not self.is_terminal and not is_time:
            return
        states = [f"{name}  {read_progress(log)}" for name, log in running.items()]
        self.last_lines = time.time()
        if not self.is_terminal:
            return self.write("\n".join(states)) if states else None
        while len(self.lines) < len(states):
            self.lines.append(tqdm(bar_format="{desc}", position=len(self.lines) + 1, leave=False))
        for i, line in enumerate(self.lines):
            line.set_description_str(states[i] if i < len(states) else "")
        self.bar.refresh()

    def close(self) -> None:
        """Leave the bar, clear the lines."""
        for line in [*self.lines, self.bar]:
            line.close()


class SuiteRun:
    """The cells of a suite and what became of them, in RUNS/SUITE with suite.json for the report."""

    def __init__(self, path: Path, runs: Path):
        self.cells, self.shown = read_suite(path)
        self.root = runs.resolve() / path.stem
        self.digests = {cell: cell.hash() for cell in self.cells}
        self.folders = {cell: self.root / cell.name / f"seed{cell.seed}-{self.digests[cell]}" for cell in self.cells}
        self.errors: dict[Cell, str] = {}
        if (self.root / "suite.json").exists():  # what failed before, and is not about to run again
            old = records.read_suite_file(self.root)
            if {cell["name"] for cell in old["cells"]}.isdisjoint(cell.name for cell in self.cells):
                raise SuiteError(f"{self.root} has the runs of another suite of that name: use another --runs")
            errors = {(e["name"], e["seed"]): e["error"] for e in old["errors"]}
            keys = {cell: (cell.name, cell.seed) for cell in self.cells}
            self.errors = {c: errors[k] for c, k in keys.items() if k in errors and not self.is_done(c)}

    def is_done(self, cell: Cell) -> bool:
        """Whether a result is there."""
        return find_result(self.folders[cell], cell.curve) is not None

    def save(self) -> None:
        """suite.json: what the report needs beside the run folders."""
        cells = []
        for cell, folder in self.folders.items():
            names = {"name": cell.name, "script": cell.script, "hash": self.digests[cell]}
            cells.append(asdict(cell) | names | {"folder": str(folder.relative_to(self.root))})
        errors = [{"name": cell.name, "seed": cell.seed, "error": error} for cell, error in self.errors.items()]
        content = {"suite": self.root.name, "cells": cells, "errors": errors} | self.shown
        common.write_atomically(self.root / "suite.json", json.dumps(content, indent=1))

    @contextlib.contextmanager
    def lock(self):
        """Keep other harnesses out of RUNS/SUITE for a while; SuiteError where one is in it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = open(self.root / "lock", "w")  # noqa: SIM115
        except OSError as error:
            raise SuiteError(f"--runs: {self.root} cannot be made ({error.strerror})") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SuiteError(f"another run.py is at work in {self.root}") from None
            yield

    def prepare_peers(self, cells: list[Cell]) -> dict[str, str]:
        """Pythons of the peers' environments; cells of a peer that cannot be installed get an error that says why."""
        pythons = {}
        for peer in sorted({cell.environment for cell in cells if cell.environment}):
            print(f"environment of {peer} ...", file=sys.stderr)
            try:
                pythons[peer] = str(common.make_peer_environment(peer))
            except (OSError, subprocess.CalledProcessError) as error:
                lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                reasons = [line for line in lines if line.lower().startswith("error")] or lines
                self.errors |= {
                    cell: f"peer {peer} cannot be installed: {reasons[-1]}"
                    for cell in cells
                    if cell.environment == peer
                }
        return pythons


def find_attempt(folder: Path) -> int:
    """Number of the attempt that comes next."""
    return 1 + max((int(path.name.removeprefix("try_")) for path in folder.glob("try_*")), default=0)


def run_on_ray(suite: SuiteRun, cells: list[Cell], pythons: dict[str, str], display: Display, args) -> None:
    """Run `cells` wherever there is room; a lost one again, up to args.retries times."""
    import ray

    remote = ray.remote(max_retries=0)(run_cell)
    tries, running = dict.fromkeys(cells, 0), {}

    def submit(cell: Cell) -> None:
        folder = suite.folders[cell]
        folder.mkdir(parents=True, exist_ok=True)
        tries[cell] += 1
        attempt = find_attempt(folder)
        command = make_command(cell, pythons, folder / f"try_{attempt}", args.track)
        task = remote.options(num_cpus=cell.cpus, num_gpus=cell.gpus, name=f"{cell.name}/{cell.seed}")
        future = task.remote(cell, suite.digests[cell], folder, command, attempt)
        running[future] = cell, folder / f"try_{attempt}" / "log.txt"

    for cell in cells:
        submit(cell)
    while running:
        for future in ray.wait(list(running), timeout=1.0)[0]:
            cell, log = running.pop(future)
            name = f"{cell.name}, seed {cell.seed}"
            try:
                error = ray.get(future)["error"]
            except ray.exceptions.RayTaskError as failure:
                error = f"{type(failure.cause).__name__}: {failure.cause}"
            except ray.exceptions.RayError as lost:
                error = f"its worker was lost ({type(lost).__name__})"
            if path := find_result(suite.folders[cell], cell.curve):
                result = json.loads(path.read_text())
                display.write(f"done: {name}: {result['headline']} {result['metrics'][result['headline']]:.4g}")
                display.bar.update()
            elif tries[cell] <= args.retries and not str(error).startswith(NO_RETRY):
                display.write(f"again: {name}: {error}")
                submit(cell)
            else:
                suite.errors[cell] = str(error)
                suite.save()
                display.write("\n    ".join([f"failed: {name}: {error}", *read_end(log)]))
        display.show({f"{c.name}/{c.seed}": log for c, log in running.values() if log.exists()})


def check_resources(cells: list[Cell]) -> None:
    """Raise SuiteError for a cell that no machine of the cluster has room for."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for cell in cells:
        if not any(n.get("CPU", 0) >= cell.cpus and n.get("GPU", 0) >= cell.gpus for n in nodes):
            raise SuiteError(f"{cell.name} needs {cell.cpus} CPUs and {cell.gpus:g} GPUs on one machine: none has them")


@contextlib.contextmanager
def limit_wait(address: str):
    """End the program with one line where Ray says nothing for SECONDS_TO_CONNECT, and leave out its own warnings."""
    stderr = os.dup(2)

    def give_up() -> None:
        os.write(stderr, f"run.py: --address {address}: no Ray cluster answers there\n".encode())
        os._exit(2)  # the thread that waits for Ray cannot be woken

    timer = threading.Timer(SECONDS_TO_CONNECT, give_up)
    timer.daemon = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        os.dup2(stderr, 2)
        os.close(stderr)


def connect(address: str | None) -> None:
    """Start Ray on this machine, or join the cluster at `address`; SuiteError where that fails."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # what is timed does not stand back
    try:
        import ray
    except ImportError:
        raise SuiteError("Ray is missing: pip install -r benchmark/requirements.txt") from None
    local = {} if address else {"object_store_memory": 100 * 2**20, "include_dashboard": False}
    host, _, port = (address or "").rpartition(":")
    try:
        if host:
            socket.create_connection((host.removeprefix("ray://"), int(port)), SECONDS_TO_CONNECT).close()
        with limit_wait(address) if address else contextlib.nullcontext():
            ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **local)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"--address {address}: no Ray cluster there" if address else "Ray does not start"
        raise SuiteError(f"{what} ({' '.join(str(error).split())[:200]})") from None


def ask_nodes(folders: list[str]) -> dict[str, list[str]]:
    """By machine of the cluster, which of `folders` it does not see."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def list_unseen() -> list[str]:  # by value: a machine may lack this repository
        return [folder for folder in folders if not os.path.isdir(folder)]

    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, scheduling_strategy=there)(list_unseen)
            answers[node["NodeManagerHostname"]] = task.remote()
    return {host: ray.get(answer, timeout=60) for host, answer in answers.items()}


def check_folders(folders: list[Path], ask=ask_nodes) -> None:
    """Raise SuiteError where a machine of the cluster does not see all of `folders`."""
    unseen = {host: missing for host, missing in ask([str(folder) for folder in folders]).items() if missing}
    if unseen:
        lines = [f"{host} does not see {', '.join(missing)}" for host, missing in unseen.items()]
        raise SuiteError(f"{'; '.join(lines)}: they have to be on a file system that all machines share")


def make_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, metavar="SUITE", help="TOML file")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="folder of all results")
    parser.add_argument("--only", metavar="PATTERN", help="cells whose SCRIPT/TASK/SETTING fits, as in 'ppo/*'")
    parser.add_argument("--address", help="Ray cluster to run on, instead of this machine alone")
    parser.add_argument("--retries", type=int, default=2, help="how often a cell that crashed or was lost runs again")
    parser.add_argument("--track", action="store_true", help="our scripts log to Weights & Biases too")
    parser.add_argument("--list", action="store_true", help="show the commands and what is done, and run nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a suite; returns the exit code."""
    args = make_parser().parse_args(argv)
    if args.retries < 0:
        raise SuiteError(f"--retries {args.retries}: has to be 0 or more")
    if args.track and importlib.util.find_spec("wandb") is None:
        raise SuiteError("--track needs Weights & Biases: pip install wandb")
    for path in (args.runs / args.suite.stem, *args.runs.parents, args.runs):
        if path.exists() and not path.is_dir():
            raise SuiteError(f"--runs {args.runs}: {path} is not a folder")
    suite = SuiteRun(args.suite, args.runs)
    names = sorted({cell.name for cell in suite.cells})
    chosen = [cell for cell in suite.cells if fnmatch.fnmatch(cell.name, args.only or "*")]
    if not chosen:
        raise SuiteError(f"--only {args.only}: no such cell in {args.suite} (there are: {', '.join(names)})")
    missing = [cell for cell in chosen if not suite.is_done(cell)]
    if args.list:
        for cell in chosen:
            print(f"{'missing' if cell in missing else 'done   '}  {cell.command} --seed {cell.seed}  # {cell.name}")
        return 0
    print(f"{args.suite.stem}: {len(chosen)} cells, {len(chosen) - len(missing)} done before", file=sys.stderr)
    if missing:
        if common.describe_machine()["commit"].endswith("-dirty"):
            print("note: changes that no commit holds: report.py will not publish these runs", file=sys.stderr)
        connect(args.address)
        check_resources(missing)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets handlers of its own
        signal.signal(number, signal.default_int_handler)
    with suite.lock():
        if missing and args.address:
            check_folders([common.ROOT, suite.root])
        run_missing(suite, missing, Display(len(chosen), len(chosen) - len(missing)), args)
    num_done = sum(map(suite.is_done, chosen))
    print(f"{args.suite.stem}: {num_done} of {len(chosen)} cells done; {suite.root}")
    for cell in (failed := [cell for cell in chosen if cell in suite.errors]):
        print(f"failed: {cell.name}, seed {cell.seed}: {suite.errors[cell]}")
    return 1 if failed else 0


def run_missing(suite: SuiteRun, missing: list[Cell], display: Display, args: argparse.Namespace) -> None:
    """Run the cells that are missing, and keep suite.json up to date, whatever happens."""
    suite.errors = {cell: error for cell, error in suite.errors.items() if cell not in missing}
    suite.save()
    try:
        pythons = suite.prepare_peers(missing)
        if ready := [cell for cell in missing if cell not in suite.errors]:
            run_on_ray(suite, ready, pythons, display, args)
    finally:
        display.close()
        suite.save()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SuiteError, records.ResultsError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted: finished cells are kept, the same command runs the rest", file=sys.stderr)
        sys.exit(130)
