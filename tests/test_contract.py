"""The contract of every script, held against each one in SCRIPTS by running it, by its entry in CASES."""

import ast
import importlib
import importlib.util
import io
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import probe_envs
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, fail_with, read_scalars, start_process, wait_for
from packaging.requirements import Requirement

from benchmark.common import read_text

COMMON_FLAGS = """exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video
run_dir resume evaluate eval_interval eval_episodes""".split()
MAX_TOKENS = {
    "algos/ppo.py": 6050,
    "algos/r2d2_lstm.py": 7400,
    "algos/reinforce_tsp_attention.py": 5950,
    "envs_shared/tsplib.py": 1600,
    "algos/alphazero_go.py": 9550,
    "envs_shared/go.py": 2600,
    "envs_shared/go_gtp.py": 4500,
    "algos/ppo_change_detection.py": 6500,
    "envs_shared/change_pairs.py": 2100,
    "envs_shared/change_folders.py": 1800,
}
OPTIONAL = {"ale_py", "minigrid"}  # packages that are imported for some tasks only


@dataclass
class Case:
    """How the tests run a script."""

    quick: str  # flags of a run of seconds, about eight iterations
    length: str  # the flag that sets how long a run is,
    more: int  # and by how much of it the tests extend a run
    even: tuple[str, int]  # more flags, with which every evaluation takes this number of steps
    tags: tuple[str, str]  # of a score and a loss
    bad: dict[str, str]  # flags of bad input, and words of the one line that answers them
    other_tasks: tuple[str, ...]  # flags of other tasks that a checkpoint fits, with worse scores
    sibling: str | None = None  # the file of envs_shared/ that a copy takes along
    reader: str | None = None  # the file of envs_shared/ that it imports to read a rarer format
    num_saves: int = 2  # times that an evaluation writes checkpoint.pt: before it and, if small, after it


NOT_DIVISIBLE = "must be divisible by the number of processes (2)"
BAD_FILES = {
    "--resume missing.pt": "missing.pt: missing, or not a checkpoint of this version",
    "--resume garbage.pt": "garbage.pt: missing, or not a checkpoint of this version",
    "--evaluate weights.pt": "weights.pt: missing, or not a checkpoint of this version",
    "--resume other.pt": "other.pt: missing, or not a checkpoint of this version",
    "--evaluate pickle.pt": "pickle.pt: missing, or not a checkpoint of this version",
    "--run-dir garbage.pt": "cannot be written to (Not a directory)",
    "--seed -1": "--seed (-1) must be",
    "--eval-episodes -1": "--eval-episodes (-1) must be",
}  # for all scripts
BAD_TASKS = {
    "--env-id NoSuch-v0": "--env-id NoSuch-v0: Environment `NoSuch` doesn't exist",
    "--env-id no_such_module:Task-v0": "--env-id no_such_module:Task-v0: No module named 'no_such_module'",
    "--env-id probe_envs:BadSequence-v0": ", not Sequence(",
}  # of gymnasium
CASES = {
    "ppo": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2",
        length="--total-timesteps",
        more=1024,
        even=("--env-id probe_envs:Fixed-v0 --eval-episodes 20", 100),
        tags=("eval/episodic_return", "losses/value_loss"),
        bad=BAD_TASKS
        | {
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id probe_envs:BadImage-v0": "must flatten to at most 10,000 numbers, not Box(0, 255, (84, 84, 3)",
            "--env-id probe_envs:BadMultiDiscrete-v0": "must be Discrete or a Box of floats, not MultiDiscrete([2 3])",
            "--env-id probe_envs:BadIntegers-v0": "must be Discrete or a Box of floats, not Box(0, 3, (2,), int64)",
            "--env-id probe_envs:BadEmpty-v0": "must be Discrete or a Box of floats, not Box(",
            "--env-id probe_envs:SameStepLedger-v0": "metadata['autoreset_mode'] must be NEXT_STEP",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: not the network of --env-id, --norm-obs",
            "--norm-obs --evaluate good.pt": "good.pt: not the network of --env-id, --norm-obs",
            "--num-envs 0": "--num-envs (0) must be from 1 to",
            "--learning-rate -0.1": "--learning-rate (-0.1) must be from 0 to",
            "--learning-rate inf": "--learning-rate (inf) must be from 0 to",
            "--gamma 99": "--gamma (99.0) must be from 0 to 1",
            "--gae-lambda 1.2": "--gae-lambda (1.2) must be from 0 to 1",
            "--clip-coef nan": "--clip-coef (nan) must be from 0 to",
            "--num-envs 1 --num-steps 32 --num-minibatches 32": "--norm-adv needs minibatches of at least 2 steps",
            "--evaluate good.pt --resume good.pt": "--resume and --evaluate exclude each other",
            "--num-minibatches 100000": "--num-minibatches (100000) must divide the 2048 steps",
            "--capture-video --env-id probe_envs:Fixed-v0": "--capture-video: probe_envs:Fixed-v0 has no render",
        },
        other_tasks=("--env-id probe_envs:Pole-v0",),
    ),
    "r2d2_lstm": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2"
        " --learning-starts 0 --learn-length 8 --batch-size 128 --buffer-size 100 --replay-ratio 1 --hidden-size 16",
        length="--total-timesteps",
        more=1024,
        even=("--env-id probe_envs:Fixed-v0 --eval-episodes 20", 100),
        tags=("eval/episodic_return", "losses/q_loss"),
        bad=BAD_TASKS
        | {
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id probe_envs:BadMultiDiscrete-v0": "actions must be Discrete, not MultiDiscrete([2 3])",
            "--env-id probe_envs:NoResetLedger-v0": "must be NEXT_STEP or SAME_STEP, not Disabled",
            "--env-id probe_envs:BadBytes-v0": "a wrapper must scale bytes that stand beside other numbers, as in Dict",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: not the network of --env-id",
            "--hidden-size 17 --evaluate good.pt": "good.pt: not the network of --env-id, --hidden-size",
            "--no-recurrent --resume good.pt": "good.pt: not the network of --env-id, --hidden-size, --recurrent",
            "--learn-length 0": "--learn-length (0) must be from 1 to",
            "--n-step 0 --resume good.pt": "--n-step (0) must be from 1 to",
            "--burn-in -1": "--burn-in (-1) must be from 0 to",
            "--memory-span 0.5": "--memory-span (0.5) must be from 1 to",
            "--learning-rate nan": "--learning-rate (nan) must be from 0 to",
            "--gamma 1.5": "--gamma (1.5) must be from 0 to 1",
            "--epsilon 40": "--epsilon (40.0) must be from 0 to 1",
            "--eta -0.1": "--eta (-0.1) must be from 0 to 1",
            "--alpha 2": "--alpha (2.0) must be from 0 to 1",
            "--batch-size 25": "--batch-size (25) must be at least 26",
            "--buffer-size 1000000000000": "--buffer-size (1000000000000) must be smaller",
        },
        num_saves=1,
        other_tasks=("--env-id popgym:popgym-RepeatPreviousMedium-v0",),
    ),
    "reinforce_tsp_attention": Case(
        quick="--env-id tsp5-uniform --num-epochs 8 --steps-per-epoch 2 --batch-size 8 --eval-episodes 4"
        " --eval-interval 2",
        length="--num-epochs",
        more=4,
        even=("--num-epochs 20 --eval-episodes 15", 15),
        tags=("eval/greedy_length", "losses/policy_loss"),
        bad={
            "--batch-size 7": NOT_DIVISIBLE,
            "--env-id tsp20": "--env-id tsp20: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes",
            "--env-id tsp2-uniform --evaluate good.pt": "--env-id tsp2-uniform: must be",
            "--optimizer adam --resume good.pt": "good.pt: not the network of --optimizer",
            "--data some.txt --evaluate good.pt": "some.txt: needs envs_shared/tsplib.py; copy it",
            "--train-path some.txt": "some.txt: needs envs_shared/tsplib.py; copy it",
            "--solve tours --evaluate good.pt": "--solve needs --evaluate and --data",
            "--data some.TSP": "some.TSP: needs envs_shared/tsplib.py; copy it",
            "--baseline-instances 0": "--baseline-instances (0) must be from 1 to",
            "--baseline-instances 1": "--baseline-instances (1) must be at least 2 for each process",
            "--baseline-level 5": "--baseline-level (5.0) must be from 0 to 1",
            "--weight-decay -1": "--weight-decay (-1.0) must be from 0 to",
            "--learning-rate inf": "--learning-rate (inf) must be from 0 to",
        },
        reader="tsplib.py",
        other_tasks=("--env-id tsp6-uniform", "--seed 8"),
    ),
    "alphazero_go": Case(
        quick="--env-id Go-2x2 --num-games 4 --blocks 1 --channels 8 --simulations-start 4 --simulations-end 4"
        " --num-epochs 8 --pool-size 256 --batch-size 16 --eval-episodes 4 --eval-interval 2",
        length="--num-epochs",
        more=4,
        even=("--num-epochs 20 --eval-episodes 2", 4),
        tags=("eval/win_rate_best", "losses/value_loss"),
        bad={
            "--num-games 7": NOT_DIVISIBLE,
            "--env-id Go-9x8": "--env-id Go-9x8: must be Go-2x2 to Go-19x19",
            "--env-id Go-20x20 --evaluate good.pt": "--env-id Go-20x20: must be Go-2x2 to Go-19x19",
            "--env-id Go-3x3 --resume good.pt": "good.pt: not the network of --env-id, --blocks, --channels",
            "--gtp good.pt": "--gtp needs envs_shared/go_gtp.py",
            "--batch-size 7": NOT_DIVISIBLE,
            "--eval-episodes 0 --evaluate good.pt": "--evaluate needs --eval-episodes",
            "--num-games 0": "--num-games (0) must be from 1 to",
            "--train-fraction -1": "--train-fraction (-1.0) must be from 0 to",
            "--generate-fraction 0": "--generate-fraction (0.0) must be greater than 0",
            "--q-weight-end 1.5": "--q-weight-end (1.5) must be from 0 to 1",
            "--learning-rate inf": "--learning-rate (inf) must be from 0 to",
            "--num-epochs 2": "--num-epochs (2) must be greater than --pretrain-value-epochs (2)",
            "--gtp good.pt --resume good.pt": "--resume, --evaluate and --gtp exclude each other",
            "--draw-moves 30": "--draw-moves (30.0) must be from 0 to 1",
            "--komi nan": "--komi (nan) must be",
            "--pool-size 1000": "--pool-size (1000) must be at least 8 times --batch-size (128)",
        },
        sibling="go.py",
        reader="go_gtp.py",
        other_tasks=("--komi 3",),
    ),
    "ppo_change_detection": Case(
        quick="--num-train-pairs 32 --image-size 16 --batch-size 4 --num-envs 8 --num-minibatches 2"
        " --detector-iterations 2 --ppo-iterations 6 --eval-episodes 4 --eval-interval 2",
        length="--ppo-iterations",
        more=4,
        even=("--detector-iterations 10 --ppo-iterations 10 --eval-episodes 40", 40),
        tags=("eval/f1", "losses/cross_entropy"),
        other_tasks=("--cost 9",),  # at which every score is lower
        bad={
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id fog": "--env-id fog: must be one of haze, haze-3, haze-4",
            "--data-dir nothing": "--data-dir and --predict need envs_shared/change_folders.py",
            "--patch-size 6": "--image-size must be divisible by --patch-size",
            "--predict a.png b.png": "--predict needs --evaluate",
            "--predict a.png b.png --evaluate good.pt": "need envs_shared/change_folders.py beside change_pairs.py",
            "--pretrained missing.pt": "missing.pt: missing, or not a checkpoint",
            "--env-id haze-3 --resume good.pt": "good.pt: not the network of --env-id (",
            "--patch-size 0": "--patch-size (0) must be from 1 to",
            "--learning-rate -1": "--learning-rate (-1.0) must be from 0 to",
            "--cost nan": "--cost (nan) must be from -1.8e+308 to",
            "--log-std -inf": "--log-std (-inf) must be from",
            "--gamma 1.5": "--gamma (1.5) must be from 0 to 1",
            "--val-share 2": "--val-share (2.0) must be from 0 to 1",
            "--cell-size 8 --image-size 8": "--cell-size",
            "--num-steps -1": "--num-steps (-1) must be from 1 to",
            "--detector-iterations 0 --ppo-iterations 0": "are both 0",
            "--predict a.png --evaluate good.pt": "--predict needs two pictures or two folders",
            "--env-id haze-3 --pretrained good.pt": "good.pt: not the network of --env-id (",
        },
        sibling="change_pairs.py",
        reader="change_folders.py",
    ),
}
SCRIPTS = list(CASES)
assert {*SCRIPTS} == {path.stem for path in (ROOT / "algos").glob("*.py")}

# Run a test for each of the scripts, with what is made once for all tests of a script
each_script = pytest.mark.parametrize("script", SCRIPTS, indirect=True, scope="module")


# Copied alone


def copy_script(script: str, folder: Path) -> Path:
    """Copy the script, and the one file of envs_shared/ that it needs, into `folder`, and return `folder`."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "algos" / f"{script}.py", folder)
    if sibling := CASES[script].sibling:
        (folder / "envs_shared").mkdir()
        shutil.copy(ROOT / "envs_shared" / sibling, folder / "envs_shared")
    return folder


def run_copy(folder: Path, script: str, *flags) -> tuple[str, str]:
    """Run the copied script, where this repository is not on the path; return stdout and stderr."""
    out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
    process = start_process(out, {}, "run_copy", folder / f"{script}.py", *flags, errors=err)
    assert wait_for([process]) == [0], err.read_text()
    return out.read_text(), err.read_text()


def find_run(run_dir: Path) -> Path:
    """The one run folder in `run_dir`."""
    (path,) = Path(run_dir).iterdir()
    return path


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def read_progress(path: Path) -> dict:
    """What a run folder's checkpoint.pt says about the run so far."""
    return load(path / "checkpoint.pt")["progress"]


def read_files(folder: Path) -> dict[Path, bytes]:
    return {x: x.read_bytes() for x in folder.rglob("*") if x.is_file() and "__pycache__" not in x.parts}


def read_scores(out: str) -> dict[str, float]:
    """What --evaluate prints: a name and a number of at most five digits in each line."""
    rows = [re.fullmatch(r"(eval/\w+): (-?[\d.]+(?:e[+-]\d+)?)", line).groups() for line in out.splitlines()]
    assert all(len(re.sub(r"e.*|\D", "", number).strip("0")) <= 5 for _, number in rows)
    return {name: float(number) for name, number in rows}


def check_no_step_is_logged_twice(path: Path) -> dict:
    """Return the scalars of a run folder, in which the steps of each tag must increase."""
    scalars = read_scalars(path)
    assert all(a < b for values in scalars.values() for (a, _), (b, _) in itertools.pairwise(values))
    return scalars


@each_script
def test_a_copy_alone_is_killed_resumed_and_evaluated(script, tmp_path):
    """In the same folder: counters continue, no step is logged twice, none is missing, and nothing else is left."""
    case, folder = CASES[script], tmp_path / "copy"
    log, file = tmp_path / "log", copy_script(script, folder) / f"{script}.py"
    # The fourth one is written between the log of an iteration and its evaluation
    process = start_process(log, {}, "kill_at", file, 4, *case.quick.split())
    assert wait_for([process]) == [-signal.SIGKILL], log.read_text()
    path = find_run(folder / "runs")
    before, logged = read_progress(path), read_scalars(path)[case.tags[1]]
    time.sleep(1.1)  # TensorBoard orders event files by the second they were made in
    counter = "step" if case.length == "--total-timesteps" else "iteration"
    total = before[counter] + 2 * case.more
    out, err = run_copy(folder, script, "--resume", path / "checkpoint.pt", case.length, total)
    after, scalars = read_progress(path), check_no_step_is_logged_twice(path)
    assert all(after[name] > before[name] for name in ("iteration", "step", "eval_steps", "cpu_seconds"))
    num_before, num_after = before["iteration"], after["iteration"]
    assert len(scalars[case.tags[1]]) == num_after and after[counter] >= total  # one in each iteration
    assert scalars[case.tags[1]][:num_before] == logged[:num_before] and len(logged) > num_before > 0
    seconds = [value for _, value in scalars["charts/cpu_seconds"]]
    assert seconds == sorted(seconds)
    assert {x.name for x in folder.iterdir()} - {"envs_shared", "__pycache__"} == {f"{script}.py", "runs"}
    names = {"events" if "events" in x.name else x.name.removesuffix(".tmp") for x in path.iterdir()}
    assert names == {"events", "checkpoint.pt", "best.pt"}
    assert find_run(folder / "runs") == path and re.fullmatch(rf"\S+__{script}__1__\d+", path.name)
    first, *_, last = out.splitlines()
    assert first.startswith(f"{path}: ") and last.startswith(f"{path}: ")
    assert 1 <= len(err.splitlines()) < 10  # few lines of the bar in a file
    files = read_files(folder)
    for name in ("best.pt", "checkpoint.pt"):
        out, err = run_copy(folder, script, "--evaluate", path / name, "--eval-episodes", 3)
        scores = read_scores(out)
        assert scores and np.isfinite([*scores.values()]).all() and err == ""
        assert all(tag.startswith("eval/") for tag in scores) and read_files(folder) == files


others = [pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS[1:]]


@pytest.mark.parametrize("script", SCRIPTS[:1] + others)
def test_a_copy_runs_under_torchrun(script, tmp_path):
    """As a user starts it. One process talks, logs, and writes to Weights & Biases."""
    case, folder = CASES[script], copy_script(script, tmp_path / "copy")
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {script}.py"
    command = [*launcher.split(), *case.quick.split(), "--no-cuda", "--track"]
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    options = {"cwd": folder, "env": env | {"WANDB_MODE": "offline"}, "capture_output": True, "text": True}
    run = subprocess.run(command, timeout=480, **options)
    assert run.returncode == 0, run.stderr
    path = find_run(folder / "runs")
    scalars = read_scalars(path)
    assert run.stdout.count(f"runs/{path.name}: ") == 2 and len(list(path.glob("events*"))) == 1
    assert len(scalars[case.tags[1]]) == read_progress(path)["iteration"] and scalars[case.tags[0]]
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert path.name in log.name
    assert all(tag.encode() in log.read_bytes() for tag in (*case.tags, "wandb_project_name"))


# Whole runs in this process


@dataclass
class Run:
    """A run's folder, what it printed, the names of the files that it replaced, and its seeds in order."""

    path: Path
    out: str
    written: list[str]
    seeds: list[int]

    def read_losses(self) -> dict:
        return {tag: x for tag, x in read_scalars(self.path).items() if tag.startswith("losses/")}


def call_main(module: ModuleType, flags: str) -> tuple[str, list[str], list[int]]:
    """Call a script's `main`, as if wandb were not installed; return what Run holds of it."""
    out, written, replace = io.StringIO(), [], os.replace
    seeds, seed_everything = [], module.seed_everything

    def record(source, target):
        written.append(Path(target).name)
        replace(source, target)

    def record_seed(*stream):
        seeds.append(seed_everything(*stream))
        return seeds[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(io.StringIO()):
        patch.setitem(sys.modules, "wandb", None)
        patch.setattr(os, "replace", record)
        patch.setattr(module, "seed_everything", record_seed)
        module.main(flags.split())
    return out.getvalue(), written, seeds


def run_main(module: ModuleType, folder: Path, *flags) -> Run:
    """Call a script's `main` for a run in `folder`; flags are words or lines."""
    found = call_main(module, " ".join(map(str, (*flags, "--run-dir", folder))))
    return Run(find_run(folder), *found)


def get_module(script: str) -> ModuleType:
    return importlib.import_module(f"algos.{script}")


def run_quick(script: str, folder: Path, *flags) -> Run:
    return run_main(get_module(script), folder, CASES[script].quick, *flags)


def run_edited(path: Path, *flags) -> tuple[Run, ModuleType]:
    """Run a script that a user has edited, as a module of its own; return that too."""
    module = import_file("edited_copy", path)
    return run_main(module, path.parent / "runs", *flags), module


def import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run from its beginning to its end."""
    return run_quick(script, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def never(script, tmp_path_factory):
    """A run that is never evaluated."""
    return run_quick(script, tmp_path_factory.mktemp("never"), "--eval-episodes", 0)


@each_script
def test_the_seed_alone_fixes_a_run_and_evaluations_change_nothing(script, whole, never, tmp_path):
    """To the last bit.

    Each iteration has random numbers that no other iteration has, and none that a run with another --seed has.
    """
    other = run_quick(script, tmp_path / "other", "--eval-episodes", 0, "--seed", 2)
    first, second = (load(x.path / "checkpoint.pt")["agent"] for x in (whole, never))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert whole.read_losses() == never.read_losses() != {}
    assert other.read_losses() != whole.read_losses()
    num_iterations = read_progress(whole.path)["iteration"]
    seeds, earlier = never.seeds[-num_iterations:], never.seeds[:-num_iterations]
    assert len({*seeds}) == num_iterations > 4 and not {*seeds} & {*earlier, *other.seeds}
    assert len(read_scalars(whole.path)[CASES[script].tags[0]]) > 2
    assert not any(tag.startswith("eval/") for tag in read_scalars(never.path))
    assert {*never.written} == {"checkpoint.pt"} and len(never.written) > 3 and "best.pt" in whole.written
    assert "not evaluated" in never.out and "not evaluated" not in whole.out
    if script in ("ppo", "r2d2_lstm", "reinforce_tsp_attention"):  # ten episodes or 1,000 instances
        out, _, seeds = call_main(get_module(script), f"--evaluate {never.path / 'checkpoint.pt'}")
        assert np.isfinite([*read_scores(out).values()]).all()
        # Other random numbers than those that chose the best policy, but for those of the first weights
        assert len({*seeds}) == 2 and len({*seeds} & {*whole.seeds}) == 1


@each_script
def test_evaluation_takes_at_most_a_fifth_of_the_steps(script, tmp_path):
    """By default, and the one at the end aside."""
    case = CASES[script]
    flags, size = case.even
    scalars = read_scalars(run_quick(script, tmp_path, "--eval-interval 0", flags).path)
    steps = [step for step, _ in scalars[case.tags[0]]]
    assert 3 <= len(steps) <= 10 and steps[-1] == scalars[case.tags[1]][-1][0]
    assert all(size * (i + 1) <= step / 5 for i, step in enumerate(steps[:-1])), steps


@each_script
def test_a_run_leaves_checkpoints_of_one_content_and_a_log(script, whole):
    """All of a checkpoint is plain data and tensors, so that torch loads it without unpickling classes."""
    checkpoint, best = load(whole.path / "checkpoint.pt"), load(whole.path / "best.pt")
    assert {"args", "progress", "agent", "optimizer"} <= best.keys() <= checkpoint.keys()
    args = get_module(script).Args(**checkpoint["args"])
    assert args.run_dir == str(whole.path.parent) and not list(whole.path.glob("*.tmp"))
    assert {*CASES[script].tags, "charts/SPS", "charts/cpu_seconds"} <= read_scalars(whole.path).keys()
    rows = read_text(whole.path, "hyperparameters").splitlines()[2:]
    assert rows == [f"|{name}|{value}|" for name, value in checkpoint["args"].items()]


@each_script
def test_bad_input_is_one_line_and_exit_code_2(script, whole, tmp_path):
    """And nothing is written. In a process of its own, because libraries print warnings to stderr."""
    folder, log = copy_script(script, tmp_path / script), tmp_path / "log"
    shutil.copy(ROOT / "tests" / "probe_envs.py", folder)
    (folder / "garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"weights": torch.zeros(2)}, folder / "weights.pt")
    torch.save({"args": {"flag_of_another_script": 1}, "progress": (0,)}, folder / "other.pt")
    torch.save({"args": {}, "code": Path("a class that is not a tensor's")}, folder / "pickle.pt")
    shutil.copy(whole.path / "best.pt", folder / "good.pt")
    files = read_files(folder)
    bad = BAD_FILES | CASES[script].bad
    runs = [f"{2 if words == NOT_DIVISIBLE else 1} {flags}" for flags, words in bad.items()]
    process = start_process(log, {}, "fail_each", folder / f"{script}.py", *runs)
    exit_codes, lines = wait_for([process]), log.read_text().splitlines()
    assert exit_codes == [0] and len(lines) == 2 * len(runs), lines
    for flags, words, line, exit_code in zip(bad, bad.values(), lines[::2], lines[1::2], strict=True):
        assert line.startswith(f"{script}.py: error: ") and words in line, (flags, line)
        assert exit_code == "exit code 2", flags
    assert read_files(folder) == files and not (folder / "runs").exists()


@each_script
def test_a_kill_while_a_checkpoint_is_written_leaves_one_that_loads(script, tmp_path, monkeypatch):
    """The first is written before training. Later a best.pt is there as well, and it loads too.

    The folder, before and after a written file takes its name, is what a kill leaves at that moment.
    """
    replace, written, iterations = os.replace, [], []

    def look(folder):
        checkpoint = load(folder / "checkpoint.pt")
        progress, num_written = checkpoint["progress"], written.count("checkpoint.pt")
        iterations.append(progress["iteration"])
        if num_written < 8:  # before the end of the run, whose policy is evaluated later
            assert iterations[-1] == math.ceil((num_written - 1) / CASES[script].num_saves)
        assert (iterations[-1] == 0) == (progress["step"] == 0) == (checkpoint["optimizer"]["state"] == {})
        for best in folder.glob("best.pt"):
            assert load(best)["progress"]["iteration"] > 0

    def replace_and_look(source, target):
        if written:
            look(target.parent)
        replace(source, target)
        written.append(target.name)
        look(target.parent)

    monkeypatch.setattr(os, "replace", replace_and_look)
    run_quick(script, tmp_path, "--eval-interval", 1)
    assert {0, 1, 2, 3, 4} <= {*iterations} and written[0] == "checkpoint.pt" and "best.pt" in written


# Flags of runs whose state is all the script's own; the best policy of the baseline changes between the cuts
EXACT = {
    "reinforce_tsp_attention": "--env-id tsp6-uniform --seed 4 --num-epochs 4 --baseline rollout"
    " --baseline-instances 40 --baseline-level 0.5",
    "alphazero_go": "--num-epochs 4 --pretrain-search-epochs 1 --epsilon-start 0.9 --epsilon-end 0.9",
    "ppo_change_detection": "--ppo-iterations 3",
}


@pytest.mark.parametrize("script", EXACT)
def test_a_run_that_is_cut_and_resumed_is_the_uninterrupted_one(script, tmp_path, monkeypatch):
    """To the last bit, and in the log, from the checkpoints of several iterations."""
    replace, numbers = os.replace, (1, 2, 3)

    def keep(source, target):
        replace(source, target)
        if (
            target.name == "checkpoint.pt"
            and (number := read_progress(target.parent)["iteration"]) in numbers
        ):
            shutil.copytree(target.parent, tmp_path / str(number), dirs_exist_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", keep)
        whole = run_quick(script, tmp_path / "whole", "--eval-interval 1", EXACT[script]).path
    scalars = read_scalars(whole)
    if script == "reinforce_tsp_attention":
        assert [x for _, x in scalars["charts/baseline_updates"]][:2] == [1, 1]
    for left in (tmp_path / str(number) for number in numbers):
        call_main(get_module(script), f"--resume {left / 'checkpoint.pt'}")
        for name in ("checkpoint.pt", "best.pt"):
            ends = [load(path / name) for path in (whole, left)]
            for end in ends:
                del end["args"]
                del end["progress"]["cpu_seconds"]
            torch.testing.assert_close(*ends, rtol=0, atol=0, equal_nan=True)
        for tag, values in read_scalars(left).items():
            if not tag.endswith(("seconds", "SPS")):
                assert values == scalars[tag][-len(values) :], tag


# What an evaluation returns whose score is x, where more is better
RETURNS = {"eval/episodic_length": 1.0, "eval/episodic_return_std": 0.0}
SCORES = [
    ("ppo", lambda x: RETURNS | {"eval/episodic_return": x}),
    ("r2d2_lstm", lambda x: RETURNS | {"eval/episodic_return": x}),
    ("reinforce_tsp_attention", lambda x: ({"eval/greedy_length": -x}, None)),
    ("reinforce_tsp_attention", lambda x: ({"eval/greedy_length": x, "eval/greedy_gap": -x}, None)),
    ("ppo_change_detection", lambda x: {"eval/threshold": 0.5, "eval/net": x}),
]  # AlphaZero plays matches


@pytest.mark.parametrize(("script", "make_scores"), SCORES)
def test_the_best_of_all_evaluations_is_kept(script, make_scores, tmp_path, monkeypatch):
    """Of equal ones the later. A resumed run knows its score."""
    case, module = CASES[script], get_module(script)
    numbers = itertools.chain([-5.0, -3.0, -4.0, -3.0], itertools.repeat(-6.0))
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: make_scores(next(numbers)))
    monkeypatch.setattr(module, "compare_rules", lambda *_: "nowhere", raising=False)
    done = run_quick(script, tmp_path, "--eval-interval 1")
    path, scores = done.path / "checkpoint.pt", []
    numbers = itertools.repeat(-3.5)
    for flags in ("", f"--resume {path} {case.length} {longer(done.path, case)}"):
        written = call_main(module, flags)[1] if flags else done.written
        best, last = (load(done.path / name)["progress"] for name in ("best.pt", "checkpoint.pt"))
        scores.append([abs(x) for x in (best["best_score"], last["best_score"], last["last_score"])])
        assert best["iteration"] == 4 < last["iteration"] and written.count("best.pt") == (0 if flags else 3)
    assert scores == [[3.0, 3.0, 6.0], [3.0, 3.0, 3.5]]


NOT_FINITE = """
ppo --env-id probe_envs:NotFiniteobs-v0 : obs of environment 1 in step 3 of an episode: not a number
ppo --env-id probe_envs:NotFinitereward-v0 : rewards of environment 1 in step 3 of an episode: not a number
ppo --learning-rate 1e30 : is (nan|inf) at step
r2d2_lstm --env-id probe_envs:NotFiniteobs-v0 : observation of environment 1 in step 3 of an episode: not a number
r2d2_lstm --env-id probe_envs:SameStepNotFiniteobs-v0 : observation of environment 1 in step 3 of an episode
r2d2_lstm --env-id probe_envs:NotFinitereward-v0 : reward of environment 1 in step 3 of an episode: not a number
r2d2_lstm --learning-rate 1e30 : is (nan|inf) at step
reinforce_tsp_attention --learning-rate 1e30 : is (nan|inf) at step
alphazero_go --learning-rate 1e30 : is (nan|inf) at step
ppo_change_detection --detector-lr 1e30 : is (nan|inf) at step
ppo_change_detection --learning-rate 1e30 : is (nan|inf) at step
"""


@pytest.mark.parametrize("line", NOT_FINITE.strip().splitlines())
def test_what_is_not_finite_ends_a_run_with_one_line(line, tmp_path, capsys):
    """The last checkpoint is of finite losses, and its weights are finite as well."""
    (script, flags), words = line.split(" : ")[0].split(" ", 1), line.split(" : ")[1]
    probe_envs.Fixed.made = 0
    flags = f"{CASES[script].quick} --eval-interval 1 --eval-episodes 0 {flags} --run-dir {tmp_path}"
    found = fail_with(capsys, get_module(script).main, flags.split())
    assert re.search(
        rf"error: [\w:/-]+:? .*{words}( \d+|.* below 1e18 in size)?$",
        found,
    )
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
    is_ppo = "detection --learning" in line  # after the iterations of the detector
    assert (checkpoint["progress"]["iteration"] >= 2) == is_ppo


# What users do


@each_script
def test_a_frozen_layer_and_an_unused_parameter_train_on(script, tmp_path):
    """What is frozen stays, what no loss uses stays, and the rest is trained."""
    found, to = [], torch.nn.Module.to

    def edit(network, *args, **options):
        if not found:
            name, first = next(network.named_parameters())
            first.requires_grad_(False)
            network.unused = torch.nn.Parameter(torch.ones(3))
            found.extend((name, {name: x.clone() for name, x in network.state_dict().items()}, network))
        return to(network, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", edit)
        path = run_quick(script, tmp_path, "--eval-episodes", 0).path
    agent, (name, before, network) = load(path / "checkpoint.pt")["agent"], found
    assert torch.equal(agent[name], before[name]) and torch.equal(agent["unused"], torch.ones(3))
    moved = [not torch.equal(agent[name], before[name]) for name, _ in network.named_parameters()]
    assert sum(moved) >= (len(moved) - 2) / 2


@each_script
def test_an_evaluation_that_fails_loses_nothing(script, tmp_path):
    """The checkpoint before it is of the same iteration, and the run goes on from there."""
    module = get_module(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "evaluate", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_quick(script, tmp_path)
    path = find_run(tmp_path)
    assert read_progress(path)["iteration"] == 2 and not (path / "best.pt").exists()
    module.main(["--resume", str(path / "checkpoint.pt")])
    assert read_progress(path)["iteration"] > 4 and (path / "best.pt").exists()


@each_script
def test_checkpoints_are_at_most_ten_minutes_apart(script, tmp_path, monkeypatch):
    """Here each call of the clock is a minute later."""
    module = get_module(script)
    monkeypatch.setattr(module.time, "time", itertools.count(1e9, 60.0).__next__)
    written = run_quick(script, tmp_path, "--eval-episodes", 0, "--eval-interval", 10**6).written
    assert written.count("checkpoint.pt") > 3


@each_script
def test_ctrl_c_of_an_evaluation_says_nothing_of_resuming(script, whole, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    module = get_module(script)
    monkeypatch.setattr(module, "train", interrupt)
    with pytest.raises(SystemExit, match="130"):
        module.main(["--evaluate", str(whole.path / "best.pt")])
    assert not capsys.readouterr().err


@each_script
def test_ctrl_c_ends_with_the_command_that_resumes(script, tmp_path):
    """As the last line, with exit code 130. The command works."""
    case, folder, log = CASES[script], copy_script(script, tmp_path / "copy"), tmp_path / "log"
    flags = [*case.quick.split(), case.length, "1000000"]
    process = start_process(log, {}, "run_copy", folder / f"{script}.py", *flags)
    while process.is_alive() and not list(folder.glob("runs/*/best.pt")):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert wait_for([process]) == [130], log.read_text()
    path = find_run(folder / "runs")
    line = log.read_text().splitlines()[-1]
    name = f"runs/{path.name}"
    command = line.partition(": interrupted; to resume: ")[2].replace("'", "")
    assert re.fullmatch(re.escape(f"python {folder}/{script}.py --resume {name}/checkpoint.pt"), command), (
        line
    )
    step = read_progress(path)["iteration"] + 1
    if case.length == "--total-timesteps":
        step = read_progress(path)["step"] + 1
    run_copy(folder, script, *command.split(".py ")[1].split(), case.length, str(step))


@each_script
def test_a_resumed_run_without_a_best_score_evaluates(script, whole, never, tmp_path):
    """If best.pt is missing, if there was no evaluation, or if the task is another one: the next one is the best."""
    case, module = CASES[script], get_module(script)

    def resume(run, *flags):
        out = io.StringIO()
        with redirect_stdout(out):
            module.main(["--resume", str(run / "checkpoint.pt"), *flags])
        assert load(run / "best.pt")["progress"]["best_score"] == read_progress(run)["best_score"] is not None
        return out.getvalue()

    unknown = shutil.copytree(never.path, tmp_path / "never")
    assert not (unknown / "best.pt").exists()
    out = resume(unknown, "--eval-episodes", "4")
    assert re.search(r", (\d+) of \1 done", out) and "not evaluated" not in out
    finished = shutil.copytree(whole.path, tmp_path / "finished")
    before = read_files(finished)
    module.main(["--resume", str(finished / "checkpoint.pt"), case.length, "1"])
    after = read_files(finished)
    assert all(after[finished / name] == before[finished / name] for name in ("checkpoint.pt", "best.pt"))
    missing = shutil.copytree(whole.path, tmp_path / "missing")
    (missing / "best.pt").unlink()
    resume(missing)
    for i, flags in enumerate(case.other_tasks):
        other = shutil.copytree(whole.path, tmp_path / str(i))
        before = load(other / "best.pt")["progress"]["iteration"]
        resume(other, *flags.split(), case.length, str(longer(whole.path, case)))
        assert load(other / "best.pt")["progress"]["iteration"] > before


def longer(path: Path, case: Case) -> int:
    """The value of the flag for the length of a run that trains for a little more."""
    counter = "step" if case.length == "--total-timesteps" else "iteration"
    return read_progress(path)[counter] + case.more


@pytest.mark.parametrize("where", ["init", "reset", "step"])
@pytest.mark.parametrize("script", ["ppo", "r2d2_lstm"])
def test_the_traceback_of_a_users_environment_is_whole(script, where, tmp_path):
    """The error leaves `main` as it is."""
    module, flags = get_module(script), f"--env-id probe_envs:Broken{where}-v0"
    with pytest.raises(ValueError, match=r"^a fault of the user$") as error:
        run_main(module, tmp_path, flags)
    assert error.traceback[-1].path.name == "probe_envs.py" and error.value.__cause__ is None


# The form of a script


def source(script: str) -> str:
    return (ROOT / "algos" / f"{script}.py").read_text()


def count_tokens(text: str) -> int:
    """Names, numbers, strings and operators; an f-string is one, also where Python's tokenizer splits it."""
    count, open_strings = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        count += open_strings == 0 and kind in ("NAME", "NUMBER", "STRING", "OP", "FSTRING_START")
        open_strings += {"FSTRING_START": 1, "FSTRING_END": -1}.get(kind, 0)
    return count


@pytest.mark.parametrize("path", MAX_TOKENS)
def test_a_file_is_within_its_budget_of_tokens(path):
    assert count_tokens((ROOT / path).read_text()) <= MAX_TOKENS[path]


def find_imports(nodes) -> set[str]:
    """Packages that the imports among `nodes` name."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", alias.name) for node in imports for alias in node.names}
    return {name.split(".")[0] for name in names}


@each_script
def test_pep723_block_has_the_packages_that_are_imported(script):
    """And the package of the default task. Numpy, which gymnasium and torch depend on, may be left out.

    Of this repository it imports one file at most, and a reader of rarer formats, which a copy alone does not need.
    """
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source(script), re.M)
    metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
    ranges = {r.name: r.specifier for r in map(Requirement, metadata["dependencies"])}
    tree = ast.parse(source(script))
    files = [ROOT / "envs_shared" / x for x in (CASES[script].sibling, CASES[script].reader) if x]
    trees = [tree, *(ast.parse(path.read_text()) for path in files)]
    packages = find_imports([node for x in trees for node in ast.walk(x)])
    packages -= {*sys.stdlib_module_names, "envs_shared"}
    packages = {{"PIL": "pillow"}.get(x, x) for x in packages} | {"tensorboard"}  # of torch.utils
    task = get_module(script).Args.env_id
    packages |= {task.split(":")[0]} if ":" in task else set()
    assert packages - OPTIONAL - {"numpy"} == ranges.keys() - {"numpy"}
    assert not find_imports(tree.body) & {"wandb", *OPTIONAL}  # imported only if a flag needs them
    own = set(re.findall(r"envs_shared(?:\.| import )(\w+)", source(script)))
    assert own == {path.stem for path in files}
    others = {"algos", "benchmark", "tests"}
    assert not any(find_imports(ast.walk(x)) & others for x in trees)
    pins = {r.name: r.specifier for r in map(Requirement, (ROOT / "requirements.txt").read_text().split())}
    for name, specifier in ranges.items():
        (pin,) = pins[name]
        assert pin.operator == "==" and specifier.contains(pin.version), name
    assert ranges["torch"].contains("2.11.0") and metadata["requires-python"] == ">=3.11"


def read_fields(script: str) -> list[tuple[str, str, str]]:
    """Return the fields of Args, each on one line with a comment: [(name, type, comment), ...]."""
    (args,) = re.findall(r"^class Args:\n(.*?)\n\n\n", source(script), re.M | re.S)
    lines = [
        x for x in args.splitlines()[1:] if x and not x.startswith("    #")
    ]  # without docstring and headings
    return [re.fullmatch(r"    (\w+): (.+?) = .*  # (\S.*)", line).groups() for line in lines]


@each_script
def test_common_flags_come_first_and_are_spelled_alike(script, monkeypatch, capsys):
    """And --help shows the comment of each field."""
    fields = read_fields(script)
    names = [name for name, *_ in fields]
    common = [name for name in COMMON_FLAGS if name != "capture_video" or name in names]
    assert names[: len(common)] == common
    types = {name: kind for name, kind, _ in read_fields("ppo")}
    assert all(types[name] == kind for name, kind, _ in fields[: len(common)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        get_module(script).main(["--help"])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name, _, comment in fields:
        assert f"--{name.replace('_', '-')}" in text and " ".join(comment.split()) in text, name


def split_at_run(script: str) -> tuple[str, str]:
    """The algorithm of a script, and its part Run without what may differ: Progress, main, and `capture` or none."""
    first, ruler, second = source(script).partition(f"# ---- Run {'-' * 99}\n")
    assert ruler
    for start in ("@dataclass\nclass Progress", "def capture", "def main"):
        second = re.sub(rf"^{start}.*?\n\n\n(?=\S)", "", second, flags=re.M | re.S)
    return first, second


@each_script
def test_the_part_run_is_that_of_all_scripts(script):
    """Byte by byte; `capture` is equal where it is. The rest of a script writes no files and asks for no process."""
    first, second = split_at_run(script)
    assert second == split_at_run("ppo")[1] and second.count("\ndef ") > 6 and "class Run" in second
    captures = {
        x for name in SCRIPTS for x in re.findall(r"^def capture.*?\n\n\n", source(name), re.M | re.S)
    }
    assert len(captures) == 1
    assert not re.search(r"if .*RANK|torch\.save|os\.replace|SummaryWriter\(|wandb\.|lambda: run", first)
    train = first[first.index("\ndef train(") :]
    assert not re.search(r"^    +def ", train, re.M)  # no closures
