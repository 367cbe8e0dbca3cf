"""What the tests of all scripts share."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with a GPU runs the same tests
import torch

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restore_precision():
    """What the `main` of one script sets does not reach the tests of another."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def script(request):
    """The script that a test is about, of those that its mark names."""
    return request.param


@pytest.fixture
def run_script(tmp_path):
    """Run a script in a process of its own, in `tmp_path`: run_script("ppo", "--seed", 3) -> CompletedProcess."""

    def run(script, *flags, launcher=(sys.executable,), timeout=240, **env):
        command = [*launcher, str(ROOT / "algos" / f"{script}.py"), *map(str, flags)]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT | env, capture_output=True, text=True, timeout=timeout
        )

    return run


def start_process(log, env, name, *args):
    """A process that does what ranks.py calls `name`, and prints into `log`.

    Its parent is a server that has imported torch and the scripts once, for all the processes that are started so.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(
        ["ranks", *(f"algos.{path.stem}" for path in (ROOT / "algos").glob("*.py"))]
    )
    process = server.Process(target=start_here, args=(str(log), env, name, *map(str, args)), daemon=True)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        process.start()
    return process


def start_here(log, env, name, *args):
    os.environ.update(env)
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import ranks

    ranks.ACTIONS[name](*args)


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
