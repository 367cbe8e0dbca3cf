"""What all tests share: paths, processes of their own, logs, and errors of one line."""

import multiprocessing
import os
from pathlib import Path
from unittest import mock

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with a GPU runs the same tests
import torch
from tensorboard.summary.writer import event_file_writer

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
SCRIPTS = sorted(path.stem for path in (ROOT / "algos").glob("*.py"))
torch.set_num_threads(1)
# TensorBoard reads the log files of a run in the order of their names, which end with this number: let all
# have one length, so that those made in one second are in order too
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)


def start_process(log, name, *args):
    """Start what ranks.py calls `name`; it prints into `log`.

    Its parent is a server that has imported torch and the scripts once, for all such processes.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["ranks", *(f"algos.{script}" for script in SCRIPTS)])
    Path(log).unlink(missing_ok=True)
    process = server.Process(target=start_here, args=(log, name, *map(str, args)), daemon=True)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        process.start()
    return process


def start_here(log, name, *args):
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import ranks

    getattr(ranks, name)(*args)


def wait_for(processes):
    """Exit codes of processes that end within four minutes; else none of them goes on."""
    for process in processes:
        process.join(240)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, "took longer than four minutes"
    return [process.exitcode for process in processes]


def read_scalars(run_path):
    """TensorBoard scalars of a run folder: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_path), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def fail_with(capsys, function, *args):
    """Call a function that must exit with code 2; returns the one line that it writes about it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function(*args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stop.value.code == 2 and ".py: error: " in line
    return line
