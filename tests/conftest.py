"""What the tests of all scripts share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
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


def read_result(run_dir):
    """The one run folder below `run_dir` and its result.json."""
    (path,) = Path(run_dir).glob("*/result.json")
    return path.parent, json.loads(path.read_text())


def read_scalars(run_path):
    """TensorBoard scalars of a run folder: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_path), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
