"""Run every cell (script x task x setting x seed) of a suite on Ray, on this machine or on a cluster.

    python benchmark/run.py benchmark/suites/smoke.toml                 # two minutes, all five scripts
    python benchmark/run.py benchmark/suites/cpu.toml                   # an hour, part of docs/results.md
    python benchmark/run.py benchmark/suites/cpu.toml --only 'ppo/*'    # some of the cells
    python benchmark/run.py benchmark/suites/gpu.toml --address auto    # on the Ray cluster of this machine

Each cell runs in RUNS/SUITE/SCRIPT/TASK/SETTING/seedN-HASH/, an attempt each in try_1, try_2, ..., and is done when an
attempt has ended with exit code 0 and has logged the cell's headline and curve. The hash is that of the command and of
the script, so that the same call again runs what is missing, and a changed script runs anew beside its old results.
Cells compute with OMP_NUM_THREADS=1, and see no GPU but those they ask for. One that crashed or was lost starts over,
twice at most. Exit code: 0 when all cells are done, 1 when some failed, 2 for what is wrong before anything has run,
130 after Ctrl-C. On a cluster, RUNS, this repository and the environments in benchmark/peers are on a file system that
all machines share.
"""

import argparse
import ast
import contextlib
import fcntl
import fnmatch
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import common
import records
from records import find_run
from suite import Cell, SuiteError, read_suite
from tqdm import tqdm

RETRIES = 2  # of a cell that crashed or was lost
SECONDS_TO_CONNECT = 5.0  # to a Ray cluster: one that is there answers within one
NO_RETRY = (
    "exit code 2",
    "not done after",
    "another version",
    "no curve",
    "no headline",
    "--evaluate",
)  # would be the same again
# Starts a command when told to, in its own place; nothing starts where whoever should tell it is gone
GATE = 'read -r go && exec "$@" < /dev/null'
MARK = "BENCHMARK_CELL"  # environment variable of a cell's processes, by which they are found
# Kills all processes that have a mark when its own stdin closes, which happens when whoever started both is gone. It
# leaves its parent, a Ray worker, whose children Ray kills before they can do anything
WATCHDOG = """
import contextlib, os, psutil, sys, time
if os.fork():
    os._exit(0)
sys.stdin.read()

def list_marked():
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(sys.argv[1]) == sys.argv[2]:
                yield process

while marked := list(list_marked()):
    for process in marked:
        with contextlib.suppress(psutil.Error):
            process.kill()
    time.sleep(0.02)
"""


def make_command(cell: Cell, pythons: dict[str, str], run_dir: Path) -> list[str]:
    """What is executed: the cell's command with --seed and --run-dir."""
    words = cell.words
    python = pythons.get(cell.environment, sys.executable)
    start = [python] if words[0] == "python" else [python, "-m", "torch.distributed.run"]
    return [*start, *words[1:], "--seed", str(cell.seed), "--run-dir", str(run_dir)]


def run_cell(cell: Cell, digest: str, path: Path, command: list[str]) -> str | None:
    """One attempt at a cell, in a Ray worker: run `command`, log into the new folder `path`; returns what failed."""
    if cell.hash() != digest:
        return f"another version of {cell.path} is on {platform.node()} than when the suite was started"
    path.mkdir()
    process = {"machine": common.describe_machine()}  # its commit is that of the script which starts now
    exit_code, process["cpu_seconds"] = execute(command, path, cell, "log.txt")
    process["exit_code"] = exit_code
    error = describe_end(exit_code, cell, path / "log.txt")
    if cell.score_best and not error:
        process["best"], error = score_best(cell, path, command[0])
    common.write_atomically(path / "process.json", json.dumps(process, indent=1))
    return error or find_flaw(cell, path)


def score_best(cell: Cell, path: Path, python: str) -> tuple[dict | None, str | None]:
    """Metrics of the best.pt that an attempt has left, by the script's --evaluate; or what failed."""
    best = next(path.glob("*/best.pt"), "best.pt")
    flags = ["--evaluate", str(best), "--eval-episodes", "100", "--seed", str(cell.seed)]
    exit_code, _ = execute([python, cell.path, *flags], path, cell, "best.txt")
    if error := describe_end(exit_code, cell, path / "best.txt"):
        return None, f"--evaluate best.pt: {error}"
    (line,) = read_end(path / "best.txt", 1) or [""]
    try:
        scores = ast.literal_eval(line).items()
    except (ValueError, SyntaxError, AttributeError):
        return None, f"--evaluate best.pt: ended without scores: {line}"
    return {name.replace("eval/", "best/"): score for name, score in scores}, None


def execute(command: list[str], path: Path, cell: Cell, log: str) -> tuple[int | None, float]:
    """Run `command` with its output in path/log; exit code, None if it takes longer than the cell may, and CPU-s."""
    # Ray has chosen the GPUs in it; a log in the order of writing, whole where the cell is killed
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: str(path)}
    if not cell.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
    with open(path / log, "wb") as file:
        streams = {"stdin": subprocess.PIPE, "stdout": file, "stderr": file}
        gate = ["sh", "-c", GATE, "sh", *command]
        process = subprocess.Popen(gate, cwd=common.ROOT, env=env, start_new_session=True, **streams)
    guard = [sys.executable, "-c", WATCHDOG, MARK, str(path)]
    guard = subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    guard.wait()  # it goes on in a process of its own
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (
        contextlib.suppress(BrokenPipeError),
        process.stdin as stdin,
    ):  # which is gone where somebody killed the cell
        stdin.write(b"go\n")  # no cell runs without its guard
    exit_code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        exit_code = process.wait(3600 * cell.hours)
    guard.stdin.close()  # the cell, or what it has left running, ends
    guard.stdout.read()  # until the guard has ended
    process.wait()
    end = resource.getrusage(
        resource.RUSAGE_CHILDREN
    )  # of the process and the children that it has waited for
    return exit_code, end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def describe_end(exit_code: int | None, cell: Cell, log: Path) -> str | None:
    """What a process says of its end by its exit code and the last line of its log; None where all is well."""
    if exit_code is None:
        return f"not done after {cell.hours:g} hours"
    if exit_code < 0:
        return f"killed by {signal.strsignal(-exit_code)}"
    return ": ".join([f"exit code {exit_code}", *read_end(log, 1)]) if exit_code else None


def find_flaw(cell: Cell, path: Path) -> str | None:
    """What an attempt that has ended lacks to be a result; None where it is whole."""
    folders = common.find_run_folders(path)
    if not folders:
        return "ended without a run folder"
    try:
        records.read_run(asdict(cell), folders[0])
    except common.ResultsError as error:
        return str(error)
    return None


def read_end(log: Path, num_lines: int = 8) -> list[str]:
    """The last lines of a log, of progress bars the last state."""
    text = log.read_bytes().decode(errors="replace") if log.exists() else ""
    return (
        [line.split("\r")[-1].strip() for line in text.strip().split("\n")][-num_lines:]
        if text.strip()
        else []
    )


class SuiteRun:
    """The cells of a suite and what became of them, in RUNS/SUITE with suite.json for the report."""

    def __init__(self, path: Path, runs: Path):
        self.cells, self.shown = read_suite(path)
        self.root = runs.resolve() / path.stem
        self.digests = {cell: cell.hash() for cell in self.cells}
        self.folders = {
            cell: self.root / cell.name / f"seed{cell.seed}-{self.digests[cell]}" for cell in self.cells
        }
        self.errors: dict[Cell, str] = {}
        if (self.root / "suite.json").exists():  # what failed before, and is not about to run again
            old = records.read_json(self.root / "suite.json")["errors"]
            errors = {(e["name"], e["seed"]): e["error"] for e in old}
            keys = {cell: (cell.name, cell.seed) for cell in self.cells}
            self.errors = {c: errors[k] for c, k in keys.items() if k in errors and not self.is_done(c)}

    def is_done(self, cell: Cell) -> bool:
        """Whether a result is there."""
        return find_run(self.folders[cell], asdict(cell)) is not None

    def save(self) -> None:
        """suite.json: what the report needs beside the run folders."""
        cells = []
        for cell, folder in self.folders.items():
            names = {"name": cell.name, "script": cell.script, "folder": str(folder.relative_to(self.root))}
            cells.append(asdict(cell) | names | {"hash": self.digests[cell]})
        errors = [
            {"name": cell.name, "seed": cell.seed, "error": error} for cell, error in self.errors.items()
        ]
        content = {"suite": self.root.name, "cells": cells, "errors": errors} | self.shown
        common.write_atomically(self.root / "suite.json", json.dumps(content, indent=1))

    def lock(self):
        """A file that keeps other harnesses out of RUNS/SUITE while it is open; SuiteError where one is in it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = open(self.root / "lock", "w")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SuiteError(f"another run.py is at work in {self.root}") from None
        except OSError as error:
            raise SuiteError(f"--runs: {self.root} cannot be made ({error.strerror})") from None
        return file

    def prepare_peers(self, cells: list[Cell]) -> dict[str, str]:
        """Pythons of the peers' environments; cells of a peer that cannot be installed get an error that says why."""
        pythons = {}
        for peer in sorted({cell.environment for cell in cells if cell.environment}):
            print(f"environment of {peer} ...", file=sys.stderr)
            try:
                pythons[peer] = str(common.make_peer_environment(peer))
            except (OSError, subprocess.CalledProcessError) as error:
                reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
                lost = [cell for cell in cells if cell.environment == peer]
                self.errors |= dict.fromkeys(lost, f"peer {peer} cannot be installed: {reason}")
        return pythons


def run_on_ray(suite: SuiteRun, cells: list[Cell], pythons: dict[str, str], bar: tqdm) -> None:
    """Run `cells` wherever there is room; a lost one again, up to RETRIES times."""
    import ray

    remote = ray.remote(max_retries=0)(run_cell)
    tries, running = dict.fromkeys(cells, 0), {}

    def submit(cell: Cell) -> None:
        folder = suite.folders[cell]
        folder.mkdir(parents=True, exist_ok=True)
        tries[cell] += 1
        path = folder / f"try_{1 + len(list(folder.glob('try_*')))}"
        task = remote.options(num_cpus=cell.cpus, num_gpus=cell.gpus, name=f"{cell.name}/{cell.seed}")
        future = task.remote(cell, suite.digests[cell], path, make_command(cell, pythons, path))
        running[future] = cell, path / "log.txt"

    for cell in cells:
        submit(cell)
    while running:
        bar.set_postfix_str(f"{sum(log.exists() for _, log in running.values())} under way")
        for future in ray.wait(list(running), timeout=1.0)[0]:
            cell, log = running.pop(future)
            name = f"{cell.name}, seed {cell.seed}"
            try:
                error = ray.get(future)
            except ray.exceptions.RayError as lost:
                error = f"its worker was lost ({getattr(lost, 'cause', None) or type(lost).__name__})"
            if found := find_run(suite.folders[cell], asdict(cell)):
                bar.write(f"done: {name}: {found['headline']} {found['value']:.4g}", sys.stderr)
                bar.update()
            elif tries[cell] <= RETRIES and not str(error).startswith(NO_RETRY):
                bar.write(f"again: {name}: {error}", sys.stderr)
                submit(cell)
            else:
                suite.errors[cell] = str(error)
                suite.save()
                bar.write("\n    ".join([f"failed: {name}: {error}", *read_end(log)]), sys.stderr)


def check_resources(cells: list[Cell]) -> None:
    """Raise SuiteError for a cell that no machine of the cluster has room for."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for cell in cells:
        if not any(n.get("CPU", 0) >= cell.cpus and n.get("GPU", 0) >= cell.gpus for n in nodes):
            raise SuiteError(
                f"{cell.name} needs {cell.cpus} CPUs and {cell.gpus:g} GPUs on one machine: none has them"
            )


def connect(address: str | None) -> None:
    """Start Ray on this machine, or join the cluster at `address`; where nothing answers there, exit with one line."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # what is timed does not stand back
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        ray.init("local", object_store_memory=100 * 2**20, include_dashboard=False, **quiet)
        return
    stderr = os.dup(2)

    def give_up() -> None:
        os.write(stderr, f"run.py: --address {address}: no Ray cluster answers there\n".encode())
        os._exit(2)  # the thread that waits for Ray cannot be woken

    timer = threading.Timer(SECONDS_TO_CONNECT, give_up)
    timer.daemon = True
    timer.start()
    try:
        with open(os.devnull, "w") as nowhere:  # for Ray's own warnings
            os.dup2(nowhere.fileno(), 2)
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SuiteError(f"--address {address}: no Ray cluster there ({reason})") from None
    finally:
        timer.cancel()
        os.dup2(stderr, 2)


def check_folders(folders: list[Path]) -> None:
    """Raise SuiteError where a machine of the cluster does not see all of `folders`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def list_unseen() -> list[str]:  # by value: a machine may lack this repository
        return [str(folder) for folder in folders if not os.path.isdir(folder)]

    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, scheduling_strategy=there)(list_unseen)
            answers[node["NodeManagerHostname"]] = task.remote()
    for host, answer in answers.items():
        if unseen := ray.get(answer, timeout=60):
            shared = "a file system that all machines share"
            raise SuiteError(f"{host} does not see {', '.join(unseen)}: they have to be on {shared}")


def make_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path, metavar="SUITE", help="TOML file")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="folder of all results")
    parser.add_argument(
        "--only", metavar="PATTERN", help="cells whose SCRIPT/TASK/SETTING fits, as in 'ppo/*'"
    )
    parser.add_argument(
        "--missing", action="store_true", help="skip cells that benchmark/results has already"
    )
    parser.add_argument("--address", help="Ray cluster to run on, instead of this machine alone")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a suite; returns the exit code."""
    args = make_parser().parse_args(argv)
    suite = SuiteRun(args.suite, args.runs)
    chosen = [cell for cell in suite.cells if fnmatch.fnmatch(cell.name, args.only or "*")]
    if not chosen:
        names = ", ".join(sorted({cell.name for cell in suite.cells}))
        raise SuiteError(f"--only {args.only}: no such cell in {args.suite} (there are: {names})")
    if args.missing:
        published = records.load_published().get(args.suite.stem, {"cells": {}})["cells"]
        have = {(name, run["seed"]) for name, cell in published.items() for run in cell["runs"]}
        chosen = [cell for cell in chosen if (cell.name, cell.seed) not in have]
    missing = [cell for cell in chosen if not suite.is_done(cell)]
    print(
        f"{args.suite.stem}: {len(chosen)} cells, {len(chosen) - len(missing)} done before", file=sys.stderr
    )
    if missing:
        if common.describe_machine()["commit"].endswith("-dirty"):
            print(
                "note: changes that no commit holds: report.py will not publish these runs", file=sys.stderr
            )
        connect(args.address)
        check_resources(missing)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets handlers of its own
        signal.signal(number, signal.default_int_handler)
    with (
        suite.lock(),
        tqdm(total=len(chosen), initial=len(chosen) - len(missing), unit="cell", disable=None) as bar,
    ):
        if missing and args.address:
            check_folders([common.ROOT, suite.root])
        suite.errors = {cell: error for cell, error in suite.errors.items() if cell not in missing}
        suite.save()
        try:
            pythons = suite.prepare_peers(missing)
            run_on_ray(suite, [cell for cell in missing if cell not in suite.errors], pythons, bar)
        finally:
            suite.save()
    num_done = sum(map(suite.is_done, chosen))
    print(f"{args.suite.stem}: {num_done} of {len(chosen)} cells done; {suite.root}")
    for cell in (failed := [cell for cell in chosen if cell in suite.errors]):
        print(f"failed: {cell.name}, seed {cell.seed}: {suite.errors[cell]}")
    return 1 if failed else 0


if __name__ == "__main__":
    common.run_main(main)
