"""The oldest versions that the headers of the scripts allow, and short forms of the default commands."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT, SCRIPTS, start_process, wait_for
from scripts import CASES, copy_script, find_run, load

# The oldest versions that are tested. A folder with a virtual environment that has them may be named by the
# environment variable OLDEST_VENV; otherwise the test makes one
OLDEST = {"torch": "2.4.1", "numpy": "1.26.4", "gymnasium": "1.1.1"}
# Flags of runs of two iterations
SHORT = {
    "ppo": "--total-timesteps 400",
    "r2d2_lstm": "--env-id CartPole-v1 --total-timesteps 400",  # whose default task needs popgym
    "reinforce_tsp_attention": "--num-epochs 2",
    "alphazero_go": "--num-epochs 2 --pretrain-value-epochs 0 --pretrain-search-epochs 1",
    "ppo_change_detection": "--detector-iterations 1 --ppo-iterations 1",
}


def read_header(script: str) -> dict:
    """What the header of a script says that it needs (PEP 723)."""
    text = (ROOT / "algos" / f"{script}.py").read_text()
    (block,) = re.findall(r"^# /// script\n(.*?)^# ///$", text, re.M | re.S)
    return tomllib.loads(re.sub("^# ?", "", block, flags=re.M))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_header_names_the_oldest_versions_that_are_tested(script):
    """Of Python, torch and gymnasium; of other packages any version will do."""
    header = read_header(script)
    assert header["requires-python"] == ">=3.11"
    least = {}
    for line in header["dependencies"]:
        name, version = re.fullmatch(r"([\w-]+)(?:\[.*\])?(?:>=(\S+))?", line).groups()
        if version:
            least[name] = version
    uses_gymnasium = "import gymnasium" in (ROOT / "algos" / f"{script}.py").read_text()
    names = {"torch", "gymnasium"} if uses_gymnasium else {"torch"}
    assert least == {name: OLDEST[name].rpartition(".")[0] for name in names}


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    """The Python of a virtual environment with the oldest versions."""
    folder = os.environ.get("OLDEST_VENV")
    if not folder:
        pythons = [sys.executable, *(shutil.which(name) for name in ("python3.11", "python3"))]
        is_oldest = "import sys; sys.exit(sys.version_info[:2] != (3, 11))"
        pythons = [x for x in pythons if x and subprocess.run([x, "-c", is_oldest]).returncode == 0]
        if not pythons:
            pytest.skip("there is no Python 3.11")
        folder = tmp_path_factory.mktemp("oldest") / "venv"
        subprocess.run([pythons[0], "-m", "venv", folder], check=True)
        packages = [f"{name}=={version}" for name, version in OLDEST.items()]
        packages += ["pillow", "tyro", "tensorboard", "wandb", "tqdm"]
        pip = subprocess.run(
            [f"{folder}/bin/pip", "install", "-q", *packages], capture_output=True, text=True
        )
        if "onnection" in pip.stderr and pip.returncode:
            pytest.skip(f"could not be downloaded: {pip.stderr.splitlines()[-1]}")
        assert pip.returncode == 0, pip.stderr
    python = f"{folder}/bin/python"
    show = "import sys, torch, numpy, gymnasium as g; print(sys.version_info[:2])\n"
    show += "print(torch.__version__.split('+')[0], numpy.__version__, g.__version__)"
    found = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["(3, 11)", " ".join(OLDEST.values())]
    return python


def run_old(python: str, path: Path, *flags) -> subprocess.CompletedProcess:
    """Run a copied script in its folder."""
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    command = [python, path.name, *map(str, flags)]
    return subprocess.run(command, cwd=path.parent, env=env, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_copy_runs_with_the_oldest_versions(script, oldest, tmp_path):
    """It trains for two iterations, is resumed and evaluated; torch of today reads its checkpoint."""
    path = copy_script(script, tmp_path / "copy") / f"{script}.py"
    run = run_old(oldest, path, *CASES[script].quick.split(), *SHORT[script].split())
    assert run.returncode == 0, run.stderr
    done = find_run(path.parent / "runs")
    progress = load(done / "checkpoint.pt")["progress"]
    assert progress["iteration"] == 2 and progress["last_score"] is not None
    for flags in (("--resume", done / "checkpoint.pt"), ("--evaluate", done / "best.pt")):
        run = run_old(oldest, path, *flags)
        assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.release
def test_videos_need_a_newer_gymnasium_and_say_so(oldest, tmp_path):
    """In one line, before the run begins."""
    path = copy_script("ppo", tmp_path / "copy") / "ppo.py"
    run = run_old(oldest, path, "--capture-video")
    assert run.returncode == 2 and "--capture-video needs gymnasium 1.2, not 1.1.1" in run.stderr
    assert len(run.stderr.splitlines()) == 1 and not (path.parent / "runs").exists()


# Short forms of the default commands, and the CPU-seconds of training that they may take at most: about four
# times as many as were measured on a busy machine of two cores
BUDGETS = {
    "ppo": ("--total-timesteps 20000", 3),
    "r2d2_lstm": ("--total-timesteps 4000", 2),
    "reinforce_tsp_attention": ("--num-epochs 1 --steps-per-epoch 20 --eval-episodes 50", 6),
    "alphazero_go": (
        "--num-epochs 2 --pretrain-value-epochs 1 --pretrain-search-epochs 1 --pool-size 4000"
        " --eval-episodes 4",
        40,
    ),
    "ppo_change_detection": ("--detector-iterations 2 --ppo-iterations 2 --eval-episodes 20", 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_short_form_of_the_default_command_keeps_to_its_budget(script, tmp_path):
    """In an empty folder. CPU-seconds of training are those that the log counts."""
    flags, budget = BUDGETS[script]
    folder, log = copy_script(script, tmp_path / "copy"), tmp_path / "log"
    process = start_process(log, "run_copy", folder / f"{script}.py", *flags.split())
    assert wait_for([process]) == [0], log.read_text()
    progress = load(find_run(folder / "runs") / "checkpoint.pt")["progress"]
    assert progress["last_score"] is not None and 0 < progress["cpu_seconds"] < budget
