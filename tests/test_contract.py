"""The contract of every script, held against each one in SCRIPTS by running it, by its entry in CASES."""

import ast
import importlib
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
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, read_scalars, start_process, wait_for
from packaging.requirements import Requirement

from benchmark.common import read_text

COMMON_FLAGS = """exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video
run_dir resume evaluate eval_interval eval_episodes""".split()
# The algorithm's own name stands for None. A script may have no section of environments
SECTIONS = ["Networks", "Environments", "Storage", None, "Evaluation", "Training"]
MAX_TOKENS = {
    "algos/ppo.py": 5200,
    "algos/r2d2_lstm.py": 6600,
    "algos/reinforce_tsp_attention.py": 5400,
    "envs_shared/tsplib.py": 1200,
    "algos/alphazero_go.py": 8900,
    "envs_shared/go.py": 2600,
    "envs_shared/go_gtp.py": 4500,
    "algos/ppo_change_detection.py": 5900,
    "envs_shared/change_pairs.py": 2000,
    "envs_shared/change_folders.py": 900,
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
    sibling: str | None = None  # the file of envs_shared/ that a copy takes along
    reader: str | None = None  # the file of envs_shared/ that it imports to read a rarer format
    num_saves: int = (
        2  # times that checkpoint.pt is written at an evaluation: before it and, if small, after it
    )
    other_task: str | None = None  # flags of another task that a checkpoint fits


NOT_DIVISIBLE = "must be divisible by the number of processes (2)"
BAD_FILES = {
    "--resume missing.pt": "missing.pt: missing, or not a checkpoint of this version",
    "--resume garbage.pt": "garbage.pt: missing, or not a checkpoint of this version",
    "--evaluate weights.pt": "weights.pt: missing, or not a checkpoint of this version",
    "--resume other.pt": "other.pt: missing, or not a checkpoint of this version",
    "--evaluate pickle.pt": "pickle.pt: missing, or not a checkpoint of this version",
    "--run-dir garbage.pt": "cannot be written to (Not a directory)",
    "--seed -1": "--seed (-1) must be at least 0",
    "--eval-episodes -1": "--eval-episodes (-1) must be at least 0",
}  # for all scripts
CASES = {
    "ppo": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2",
        length="--total-timesteps",
        more=1024,
        even=("--env-id probe_envs:Fixed-v0 --total-timesteps 8192 --eval-episodes 80", 400),
        tags=("eval/episodic_return", "losses/value_loss"),
        bad={
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id NoSuch-v0": "--env-id NoSuch-v0: Environment `NoSuch` doesn't exist",
            "--env-id no_such_module:Task-v0": "--env-id no_such_module:Task-v0: No module named 'no_such_module'",
            "--env-id bad_envs:Image-v0": "must flatten to at most 10,000 numbers, not Box(0, 255, (84, 84, 3)",
            "--env-id bad_envs:Sequence-v0": "must flatten to at most 10,000 numbers, not Sequence(",
            "--env-id bad_envs:MultiDiscrete-v0": "must be Discrete or a Box of floats, not MultiDiscrete([2 3])",
            "--env-id bad_envs:Integers-v0": "must be Discrete or a Box of floats, not Box(0, 3, (2,), int64)",
            "--env-id bad_envs:Empty-v0": "must be Discrete or a Box of floats, not Box(",
            "--env-id probe_envs:SameStepLedger-v0": "the autoreset mode must be NEXT_STEP",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: not the network of --env-id, --norm-obs",
            "--norm-obs --evaluate good.pt": "good.pt: not the network of --env-id, --norm-obs",
            "--num-envs 0": "--num-envs (0) must be at least 1",
            "--learning-rate -0.1": "--learning-rate (-0.1) must be at least 0",
            "--num-minibatches 100000": "--num-minibatches (100000) must divide the 2048 steps",
            "--capture-video --env-id probe_envs:Fixed-v0": "--capture-video: probe_envs:Fixed-v0 has no render",
        },
        other_task="--env-id probe_envs:Pole-v0",
    ),
    "r2d2_lstm": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2"
        " --learning-starts 0 --learn-length 8 --batch-size 128 --buffer-size 100 --replay-ratio 1 --hidden-size 16",
        length="--total-timesteps",
        more=1024,
        even=("--env-id probe_envs:Fixed-v0 --total-timesteps 8192 --eval-episodes 80", 400),
        tags=("eval/episodic_return", "losses/q_loss"),
        bad={
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id NoSuch-v0": "--env-id NoSuch-v0: Environment `NoSuch` doesn't exist",
            "--env-id no_such_module:Task-v0": "--env-id no_such_module:Task-v0: No module named 'no_such_module'",
            "--env-id bad_envs:Sequence-v0": "observations must be a fixed number of numbers, not Sequence(",
            "--env-id bad_envs:MultiDiscrete-v0": "actions must be Discrete, not MultiDiscrete([2 3])",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: not the network of --env-id",
            "--hidden-size 17 --evaluate good.pt": "good.pt: not the network of --env-id, --hidden-size",
            "--no-recurrent --resume good.pt": "good.pt: not the network of --env-id, --hidden-size, --recurrent",
            "--learn-length 0": "--learn-length (0) must be at least 1",
            "--n-step 0 --resume good.pt": "--n-step (0) must be at least 1",
            "--burn-in -1": "--burn-in (-1) must be at least 0",
            "--memory-span 0.5": "--memory-span (0.5) must be at least 1",
            "--learning-rate nan": "--learning-rate (nan) must be at least 0",
            "--buffer-size 1000000000000": "--buffer-size (1000000000000) must be smaller",
        },
        num_saves=1,
        other_task="--env-id popgym:popgym-RepeatPreviousMedium-v0",
    ),
    "reinforce_tsp_attention": Case(
        quick="--env-id tsp5-uniform --num-epochs 8 --steps-per-epoch 2 --batch-size 8 --eval-episodes 4"
        " --eval-interval 2",
        length="--num-epochs",
        more=4,
        even=("--num-epochs 40 --eval-episodes 30", 30),
        tags=("eval/greedy_length", "losses/policy_loss"),
        bad={
            "--batch-size 7": NOT_DIVISIBLE,
            "--env-id tsp20": "--env-id tsp20: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes",
            "--env-id tsp2-uniform --evaluate good.pt": "--env-id tsp2-uniform: must be",
            "--optimizer adam --resume good.pt": "good.pt: does not fit --optimizer",
            "--data missing.txt --evaluate good.pt": "missing.txt: No such file",
            "--train-path garbage.pt": "garbage.pt:1: must be `x y x y x y`",
            "--solve tours --evaluate good.pt": "--solve needs --evaluate and --data",
            "--data some.TSP": "some.TSP: needs envs_shared/tsplib.py; copy it",
            "--baseline-instances 0": "--baseline-instances (0) must be at least 1",
            "--weight-decay -1": "--weight-decay (-1.0) must be at least 0",
        },
        reader="tsplib.py",
        other_task="--env-id tsp6-uniform",
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
            "--env-id Go-3x3 --resume good.pt": "good.pt: not the network or the games of --env-id",
            "--gtp good.pt": "--gtp needs envs_shared/go_gtp.py",
            "--batch-size 7": NOT_DIVISIBLE,
            "--eval-episodes 0 --evaluate good.pt": "--evaluate needs --eval-episodes",
            "--num-games 0": "--num-games (0) must be at least 1",
            "--train-fraction -1": "--train-fraction (-1.0) must be at least 0",
            "--generate-fraction 0": "--generate-fraction (0.0) must be greater than 0",
            "--q-weight-end 1.5": "--q-weight-end (1.5) must be at most 1",
            "--pool-size 1000": "--pool-size (1000) must be at least eight times --batch-size (128)",
        },
        sibling="go.py",
        reader="go_gtp.py",
        other_task="--komi 3",
    ),
    "ppo_change_detection": Case(
        quick="--num-train-pairs 32 --image-size 16 --batch-size 4 --num-envs 8 --num-minibatches 2"
        " --detector-iterations 2 --ppo-iterations 6 --eval-episodes 4 --eval-interval 2",
        length="--ppo-iterations",
        more=4,
        even=("--detector-iterations 10 --ppo-iterations 10 --eval-episodes 40", 40),
        tags=("eval/f1", "losses/cross_entropy"),
        bad={
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id fog": "--env-id fog: must be one of haze, haze-3, haze-4",
            "--data-dir nothing": "nothing: not {train,val,test}/{A,B,label} with equal names",
            "--patch-size 6": "--image-size must be divisible by --patch-size",
            "--predict a.png b.png": "--predict needs --evaluate",
            "--predict a.png b.png --evaluate good.pt": "a.png: cannot be read as a picture",
            "--pretrained missing.pt": "missing.pt: missing, or not a checkpoint",
            "--env-id haze-3 --resume good.pt": "good.pt: not the network of --env-id (",
            "--patch-size 0": "--patch-size (0) must be at least 1",
            "--learning-rate -1": "--learning-rate (-1.0) must be at least 0",
        },
        sibling="change_pairs.py",
    ),
}
SCRIPTS = list(CASES)
assert {*SCRIPTS} == {path.stem for path in (ROOT / "algos").glob("*.py")}

# Beside the copied script, as a user's own module would be
BAD_ENVS = """
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Sequence

class Task(gym.Env):
    def __init__(self, obs, actions, **kwargs):
        self.observation_space, self.action_space = obs, actions

flat, image = Box(-1, 1, (2,)), Box(0, 255, (84, 84, 3), np.uint8)
gym.register("Image-v0", Task, kwargs={"obs": image, "actions": Discrete(2)})
gym.register("Sequence-v0", Task, kwargs={"obs": Sequence(flat), "actions": Discrete(2)})
gym.register("MultiDiscrete-v0", Task, kwargs={"obs": flat, "actions": MultiDiscrete([2, 3])})
gym.register("Integers-v0", Task, kwargs={"obs": flat, "actions": Box(0, 3, (2,), int)})
gym.register("Empty-v0", Task, kwargs={"obs": flat, "actions": Box(-1, 1, (0,))})
"""

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


def run_copy(folder: Path, script: str, *flags, launcher=()) -> tuple[str, str]:
    """Run the copied script as a user does, without this repository on its path; return stdout and stderr."""
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    command = [sys.executable, *launcher, f"{script}.py", *map(str, flags)]
    options = {"cwd": folder, "env": env | {"WANDB_MODE": "offline"}, "capture_output": True, "text": True}
    run = subprocess.run(command, timeout=480, **options)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


def kill_at(script: str, number: str, moment: str, folder: Path, *flags) -> Path:
    """Kill a copied script while it writes its checkpoint.pt number `number`; return its run folder."""
    log, path = folder.with_suffix(".out"), copy_script(script, folder) / f"{script}.py"
    process = start_process(log, {}, "kill_at", path, number, moment, *CASES[script].quick.split(), *flags)
    assert wait_for([process]) == [-signal.SIGKILL], log.read_text()
    return find_run(folder / "runs")


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


def check_no_step_is_logged_twice(path: Path) -> dict:
    """Return the scalars of a run folder, in which the steps of each tag must increase."""
    scalars = read_scalars(path)
    assert all(a < b for values in scalars.values() for (a, _), (b, _) in itertools.pairwise(values))
    return scalars


@each_script
def test_a_copy_alone_is_killed_resumed_and_evaluated(script, tmp_path):
    """In the same folder: counters continue, no step is logged twice, none is missing, and nothing else is left."""
    case, folder = CASES[script], tmp_path / "copy"
    path = kill_at(script, "4", "written", folder)  # between its log and its checkpoint
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
        scores = ast.literal_eval(out)
        assert scores and np.isfinite([*scores.values()]).all() and err == ""
        assert all(tag.startswith("eval/") for tag in scores) and read_files(folder) == files


@each_script
def test_a_copy_runs_under_torchrun(script, tmp_path):
    """One process talks, logs, and writes to Weights & Biases."""
    case, launcher = CASES[script], "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    folder, flags = copy_script(script, tmp_path / "copy"), [*case.quick.split(), "--no-cuda"]
    out, _ = run_copy(folder, script, *flags, "--track", launcher=launcher)
    path = find_run(folder / "runs")
    scalars = read_scalars(path)
    assert out.count(f"runs/{path.name}: ") == 2 and len(list(path.glob("events*"))) == 1
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


def run_main(module: ModuleType, folder: Path, *flags) -> Run:
    """Call a script's `main`, as if wandb were not installed, for a run in `folder`."""
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
        module.main([*map(str, flags), "--run-dir", str(folder)])
    return Run(find_run(folder), out.getvalue(), written, seeds)


def run_quick(script: str, folder: Path, *flags) -> Run:
    return run_main(importlib.import_module(f"algos.{script}"), folder, *CASES[script].quick.split(), *flags)


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run from its beginning to its end."""
    return run_quick(script, tmp_path_factory.mktemp("whole"))


@each_script
def test_the_seed_alone_fixes_a_run_and_evaluations_change_nothing(script, whole, tmp_path):
    """To the last bit.

    Each iteration has random numbers that no other iteration has, and none that a run with another --seed has.
    """
    never = run_quick(script, tmp_path / "never", "--eval-episodes", 0)
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
        with redirect_stdout(io.StringIO()) as out:
            importlib.import_module(f"algos.{script}").main(["--evaluate", str(never.path / "checkpoint.pt")])
        assert np.isfinite([*ast.literal_eval(out.getvalue()).values()]).all()


@each_script
def test_evaluation_takes_at_most_a_fifth_of_the_steps(script, tmp_path):
    """By default, and the one at the end aside."""
    case = CASES[script]
    flags, size = case.even
    scalars = read_scalars(run_quick(script, tmp_path, "--eval-interval", 0, *flags.split()).path)
    steps = [step for step, _ in scalars[case.tags[0]]]
    assert 3 <= len(steps) <= 10 and steps[-1] == scalars[case.tags[1]][-1][0]
    assert all(size * (i + 1) <= step / 5 for i, step in enumerate(steps[:-1])), steps


@each_script
def test_a_run_leaves_checkpoints_of_one_content_and_a_log(script, whole):
    """All of a checkpoint is plain data and tensors, so that torch loads it without unpickling classes."""
    checkpoint, best = load(whole.path / "checkpoint.pt"), load(whole.path / "best.pt")
    assert {"args", "progress", "agent", "optimizer"} <= best.keys() <= checkpoint.keys()
    args = importlib.import_module(f"algos.{script}").Args(**checkpoint["args"])
    assert args.run_dir == str(whole.path.parent) and not list(whole.path.glob("*.tmp"))
    assert {*CASES[script].tags, "charts/SPS", "charts/cpu_seconds"} <= read_scalars(whole.path).keys()
    rows = read_text(whole.path, "hyperparameters").splitlines()[2:]
    assert rows == [f"|{name}|{value}|" for name, value in checkpoint["args"].items()]


@each_script
def test_bad_input_is_one_line_and_exit_code_2(script, whole, tmp_path):
    """And nothing is written. In processes of their own, because libraries print warnings to stderr."""
    folder, log = copy_script(script, tmp_path / script), tmp_path / "log"
    (folder / "bad_envs.py").write_text(BAD_ENVS)
    shutil.copy(ROOT / "tests" / "probe_envs.py", folder)
    (folder / "garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"weights": torch.zeros(2)}, folder / "weights.pt")
    torch.save({"args": {"flag_of_another_script": 1}, "progress": (0,)}, folder / "other.pt")
    torch.save({"args": {}, "code": Path("a class that is not a tensor's")}, folder / "pickle.pt")
    shutil.copy(whole.path / "best.pt", folder / "good.pt")
    files = read_files(folder)
    for flags, words in (BAD_FILES | CASES[script].bad).items():
        env = {"WORLD_SIZE": "2"} if words == NOT_DIVISIBLE else {}
        process = start_process(log, env, "run_copy", folder / f"{script}.py", *flags.split())
        exit_codes, lines = wait_for([process]), log.read_text().splitlines()
        assert exit_codes == [2] and len(lines) == 1, (flags, lines)
        assert lines[0].startswith(f"{script}.py: error: ") and words in lines[0], (flags, lines)
        assert read_files(folder) == files and not (folder / "runs").exists(), flags


@each_script
@pytest.mark.parametrize("at", "1-replaced 2-half 2-written 2-replaced 4-half 4-written 4-replaced".split())
def test_a_kill_while_a_checkpoint_is_written_leaves_one_that_loads(script, tmp_path, at):
    """The first is written before training. Later a best.pt is there as well, and it loads too."""
    number, moment = at.split("-")
    path = kill_at(script, number, moment, tmp_path, "--eval-interval", "1")
    checkpoint, progress = load(path / "checkpoint.pt"), read_progress(path)
    num_written = int(number) - (moment != "replaced")
    iteration = progress["iteration"]
    assert iteration == math.ceil((num_written - 1) / CASES[script].num_saves)
    assert (iteration == 0) == (progress["step"] == 0) == (checkpoint["optimizer"]["state"] == {})
    for best in path.glob("best.pt"):
        assert load(best)["progress"]["iteration"] > 0


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
    module = importlib.import_module(f"algos.{script}")
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
    module = importlib.import_module(f"algos.{script}")
    monkeypatch.setattr(module.time, "time", itertools.count(1e9, 60.0).__next__)
    written = run_quick(script, tmp_path, "--eval-episodes", 0, "--eval-interval", 10**6).written
    assert written.count("checkpoint.pt") > 3


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
    command = re.escape(f"{script}.py --resume {name}/checkpoint.pt")
    assert re.fullmatch(rf"{re.escape(name)}: interrupted; to resume: python \S*{command}", line), line
    step = read_progress(path)["iteration"] + 1
    if case.length == "--total-timesteps":
        step = read_progress(path)["step"] + 1
    run_copy(folder, script, *line.split(".py ")[1].split(), case.length, str(step))


@each_script
def test_a_resumed_run_without_a_best_score_evaluates(script, whole, tmp_path):
    """If best.pt is missing, if there was no evaluation, or if the task is another one: the next one is the best."""
    case, module = CASES[script], importlib.import_module(f"algos.{script}")

    def resume(run, *flags):
        out = io.StringIO()
        with redirect_stdout(out):
            module.main(["--resume", str(run / "checkpoint.pt"), *flags])
        assert load(run / "best.pt")["progress"]["best_score"] == read_progress(run)["best_score"] is not None
        return out.getvalue()

    never = run_quick(script, tmp_path / "never", "--eval-episodes", 0).path
    assert not (never / "best.pt").exists()
    out = resume(never, "--eval-episodes", "4")
    assert f"raise {case.length} to train on" in out and "not evaluated" not in out
    finished = shutil.copytree(whole.path, tmp_path / "finished")
    before = read_files(finished)
    module.main(["--resume", str(finished / "checkpoint.pt"), case.length, "1"])
    after = read_files(finished)
    assert all(after[finished / name] == before[finished / name] for name in ("checkpoint.pt", "best.pt"))
    missing = shutil.copytree(whole.path, tmp_path / "missing")
    (missing / "best.pt").unlink()
    resume(missing)
    if case.other_task:
        other = shutil.copytree(whole.path, tmp_path / "other")
        before = load(other / "best.pt")["progress"]["iteration"]
        resume(other, *case.other_task.split(), case.length, str(longer(whole.path, case)))
        assert load(other / "best.pt")["progress"]["iteration"] > before


def longer(path: Path, case: Case) -> int:
    """The value of the flag for the length of a run that trains for a little more."""
    counter = "step" if case.length == "--total-timesteps" else "iteration"
    return read_progress(path)[counter] + case.more


BROKEN_ENVS = """
import gymnasium as gym
import numpy as np

class Broken(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, where):
        self.where = where
        self.fail_if("init")

    def fail_if(self, where):
        if where == self.where:
            raise ValueError("a fault of the user")

    def reset(self, *, seed=None, options=None):
        self.fail_if("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.fail_if("step")

for where in ("init", "reset", "step"):
    gym.register(f"{where}-v0", Broken, kwargs={"where": where}, disable_env_checker=True)
"""


@pytest.mark.parametrize("script", ["ppo", "r2d2_lstm"])
def test_the_traceback_of_a_users_environment_is_whole(script, tmp_path):
    folder, log = copy_script(script, tmp_path / "copy"), tmp_path / "log"
    (folder / "broken_envs.py").write_text(BROKEN_ENVS)
    for where, line in (("init", "self.fail_if"), ("reset", "self.fail_if"), ("step", "self.fail_if")):
        flags = ("--env-id", f"broken_envs:{where}-v0", "--num-envs", "4")
        process = start_process(log, {}, "run_copy", folder / f"{script}.py", *flags)
        assert wait_for([process]) == [1]
        text = log.read_text()
        assert "broken_envs.py" in text and line in text and "ValueError: a fault of the user" in text
        assert f"{script}.py: error" not in text


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


@each_script
def test_a_script_is_within_its_budget(script):
    """Each of its functions and classes has a docstring that is a sentence."""
    text = source(script)
    assert max(map(len, text.splitlines())) <= 110
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= (150 if node.name == "train" else 70), node.name
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert re.match(r"[A-Z].*\.(\n\n|\Z)", ast.get_docstring(node) or "", re.S), node.name


@pytest.mark.parametrize("path", MAX_TOKENS)
def test_a_file_is_within_its_budget_of_tokens(path):
    assert count_tokens((ROOT / path).read_text()) <= MAX_TOKENS[path]


@each_script
def test_sections_are_in_order(script):
    """The docstring has three to five commands."""
    text, tree = source(script), ast.parse(source(script))
    titles = re.findall(r"^# ---- (\S.*?) -+$", text, re.M)
    sections = [x for x in SECTIONS if x != "Environments" or x in titles]
    assert [own or title for own, title in zip(sections, titles, strict=True)] == titles
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)][-2:] == ["train", "main"]
    lines = ast.get_docstring(tree).splitlines()
    commands = [line.split() for line in lines if re.match(r"    (python|torchrun|uv)\b", line)]
    assert 3 <= len(commands) <= 5 and all(f"{script}.py" in words for words in commands) and len(lines) <= 35


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
    packages = find_imports(ast.walk(tree)) - set(sys.stdlib_module_names) - {"envs_shared"}
    packages = {{"PIL": "pillow"}.get(x, x) for x in packages} | {"tensorboard"}  # of torch.utils
    task = importlib.import_module(f"algos.{script}").Args.env_id
    packages |= {task.split(":")[0]} if ":" in task else set()
    assert packages - OPTIONAL - {"numpy"} == ranges.keys() - {"numpy"}
    assert not find_imports(tree.body) & {"wandb", *OPTIONAL}  # imported only if a flag needs them
    files = [ROOT / "envs_shared" / x for x in (CASES[script].sibling, CASES[script].reader) if x]
    own = set(re.findall(r"envs_shared(?:\.| import )(\w+)", source(script)))
    assert own == {path.stem for path in files}
    others = {"algos", "benchmark", "tests"}
    assert not any(find_imports(ast.walk(ast.parse(path.read_text()))) & others for path in files)
    pins = {r.name: r.specifier for r in map(Requirement, (ROOT / "requirements.txt").read_text().split())}
    for name, specifier in ranges.items():
        (pin,) = pins[name]
        assert pin.operator == "==" and specifier.contains(pin.version), name
    assert ranges["torch"].contains("2.11.0") and metadata["requires-python"] == ">=3.11"


def read_fields(script: str) -> list[tuple[str, str, str]]:
    """Return the fields of Args, each on one line with a comment: [(name, type, comment), ...]."""
    (args,) = re.findall(r"^class Args:\n(.*?)\n\n\n", source(script), re.M | re.S)
    lines = [line for line in args.splitlines()[1:] if line]  # without the docstring
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
        importlib.import_module(f"algos.{script}").main(["--help"])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name, _, comment in fields:
        assert f"--{name.replace('_', '-')}" in text and " ".join(comment.split()) in text, name


SHARED = "fail average average_gradients seed_everything capture set_up_device save_checkpoint load_checkpoint open_run"


@pytest.mark.parametrize("name", SHARED.split())
def test_equal_functions_have_equal_sources(name):
    found = [re.findall(rf"^def {name}\(.*?(?=\n\n\n)", source(script), re.M | re.S) for script in SCRIPTS]
    assert len({text for texts in found for text in texts}) == 1 and sum(map(len, found)) > 1
