"""The contract of every script, held against each one in SCRIPTS by running it, by its entry in CASES."""

import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, read_scalars, start_process, wait_for
from packaging.requirements import Requirement

SCRIPTS = ["ppo", "r2d2_lstm", "reinforce_tsp_attention", "alphazero_go", "ppo_change_detection"]
COMMON_FLAGS = (
    "exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video run_dir resume "
    "evaluate eval_interval eval_episodes"
).split()
SECTIONS = [
    "Networks",
    "Environments",
    "Storage",
    None,
    "Evaluation",
    "Training",
]  # None: the algorithm's own name
SHARED = "fail average seed_everything".split()  # functions that are equal in all scripts that have them
PACKAGES = {"PIL": "pillow"}  # of a module, where its name is another


@dataclass
class Case:
    """How the tests run a script, and how large it may be."""

    quick: str  # flags of a run of seconds, about eight iterations
    length: str  # the flag that says how long a run is,
    more: int  # and by how much of it the tests extend a run
    counter: int  # where the checkpoint's `progress` counts in that unit
    even: tuple[str, int]  # more flags, with which an evaluation has a known number of steps: this one
    resume: str  # flags that make a run of half that length go on
    tags: tuple[str, str]  # of a score and a loss
    max_tokens: int
    max_lines: int
    total: str  # the flag that must divide among the processes
    bad: dict[str, str]  # bad input: flags, and words of the one line that answers them
    sibling: str | None = None  # the file of envs_shared/ that a copy takes along
    max_sibling_tokens: int = 0
    reader: str | None = None  # and one that it imports if a flag names a file in a rarer format
    max_reader_tokens: int = 0
    has_environments: bool = True  # a section of them
    groups: frozenset[str] = frozenset()  # of tags, beside charts, losses and eval
    evaluated: str | None = None  # the score that --evaluate prints, if it is not that of the log
    states: frozenset[str] = frozenset()  # what checkpoint.pt and best.pt hold beside what all scripts have
    training_states: frozenset[str] = frozenset()  # and what is in checkpoint.pt alone
    optional: frozenset[str] = frozenset()  # packages that are needed and imported for some tasks only
    table: int = 0  # lines of a table that a run prints before its last line


BAD_FILES = {
    "--resume missing.pt": "missing.pt: not a checkpoint",
    "--evaluate missing.pt": "missing.pt: not a checkpoint",
    "--resume garbage.pt": "garbage.pt: not a checkpoint",
    "--evaluate weights.pt": "weights.pt: not a checkpoint",
    "--resume other.pt": "other.pt: not a checkpoint",
}  # for all scripts
CASES = {
    "ppo": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2",
        length="--total-timesteps",
        more=1024,
        counter=1,
        even=("--env-id probe_envs:Fixed-v0 --total-timesteps 8192 --eval-episodes 80", 400),
        resume="--total-timesteps 2048",
        tags=("eval/episodic_return", "losses/value_loss"),
        max_tokens=4300,
        max_lines=450,
        total="--num-envs",
        bad={
            "--env-id NoSuch-v0": "--env-id NoSuch-v0: Environment `NoSuch` doesn't exist",
            "--env-id no_such_module:Task-v0": "--env-id no_such_module:Task-v0: No module named 'no_such_module'",
            "--env-id bad_envs:Image-v0": "must flatten to at most 10,000 numbers, not Box(0, 255, (84, 84, 3)",
            "--env-id bad_envs:DictOfImages-v0": "must flatten to at most 10,000 numbers, not Dict('camera': Box(",
            "--env-id bad_envs:Sequence-v0": "must flatten to at most 10,000 numbers, not Sequence(",
            "--env-id bad_envs:MultiBinary-v0": "actions must be Box or Discrete, not MultiBinary(3)",
            "--env-id bad_envs:MultiDiscrete-v0": "actions must be Box or Discrete, not MultiDiscrete([2 3])",
            "--env-id bad_envs:SameStep-v0": "the autoreset mode must be NEXT_STEP",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: does not fit --env-id or --norm-obs",
            "--env-id Acrobot-v1 --evaluate good.pt": "good.pt: does not fit --env-id or --norm-obs",
            "--norm-obs --evaluate good.pt": "good.pt: does not fit --env-id or --norm-obs",
            "--env-id bad_envs:Image-v0 --evaluate good.pt": "observations must",
        },
    ),
    "r2d2_lstm": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2"
        " --learning-starts 0 --learn-length 8 --batch-size 128 --buffer-size 100 --replay-ratio 1 --hidden-size 16",
        length="--total-timesteps",
        more=1024,
        counter=1,
        even=("--env-id probe_envs:Fixed-v0 --total-timesteps 8192 --eval-episodes 80", 400),
        resume="--total-timesteps 2048",
        tags=("eval/episodic_return", "losses/q_loss"),
        max_tokens=5800,
        max_lines=600,
        total="--num-envs",
        bad={
            "--env-id NoSuch-v0": "--env-id NoSuch-v0: Environment `NoSuch` doesn't exist",
            "--env-id no_such_module:Task-v0": "--env-id no_such_module:Task-v0: No module named 'no_such_module'",
            "--env-id bad_envs:Sequence-v0": "needs arrays to observe and Discrete actions, not Sequence(",
            "--env-id bad_envs:MultiBinary-v0": "needs arrays to observe and Discrete actions, not Box(-1.0, 1.0,",
            "--env-id bad_envs:MultiDiscrete-v0": "MultiDiscrete([2 3])",
            "--env-id Pendulum-v1": "float32), Box(-2.0, 2.0, (1,), float32)",
            "--env-id bad_envs:SameStepDiscrete-v0": "Expected autoreset_mode to be NEXT_STEP or DISABLED",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: does not fit the environment or flags",
            "--hidden-size 9 --evaluate good.pt": "good.pt: does not fit the environment or flags",
            "--no-recurrent --evaluate good.pt": "good.pt: does not fit the environment or flags",
            "--env-id Pendulum-v1 --evaluate good.pt": "needs arrays to observe and Discrete actions",
        },
        states=frozenset({"target"}),
        training_states=frozenset({"replay", "num_added"}),
        optional=frozenset({"ale_py", "minigrid"}),
    ),
    "reinforce_tsp_attention": Case(
        quick="--env-id tsp5-uniform --num-epochs 8 --steps-per-epoch 2 --batch-size 8 --eval-episodes 4"
        " --eval-interval 2",
        length="--num-epochs",
        more=8,
        counter=0,
        even=("--num-epochs 40 --eval-episodes 30", 30),
        resume="--num-epochs 8",
        tags=("eval/greedy_length", "losses/policy_loss"),
        max_tokens=4800,
        max_lines=500,
        total="--batch-size",
        bad={
            "--env-id tsp20": "--env-id tsp20: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes",
            "--env-id tsp2-uniform --evaluate good.pt": "--env-id tsp2-uniform: must be",
            "--optimizer adam --resume good.pt": "good.pt: does not fit --optimizer",
            "--data missing.txt --evaluate good.pt": "missing.txt: ",
            "--train-path garbage.pt": "garbage.pt: could not convert",
            "--solve tours --evaluate good.pt": "--solve tours: must be a new folder",
        },
        reader="tsplib.py",
        max_reader_tokens=1200,
        states=frozenset({"best_policy", "muon"}),
    ),
    "alphazero_go": Case(
        quick="--env-id Go-2x2 --num-games 4 --blocks 1 --channels 8 --simulations-start 4 --simulations-end 4"
        " --num-epochs 8 --pool-size 256 --batch-size 16 --eval-episodes 4 --eval-interval 2",
        length="--num-epochs",
        more=8,
        counter=0,
        even=("--num-epochs 20 --eval-episodes 2", 4),
        resume="--num-epochs 8",
        tags=("eval/win_rate_best", "losses/value_loss"),
        max_tokens=7800,
        max_lines=850,
        total="--num-games",
        bad={
            "--env-id Go-9x8": "--env-id Go-9x8: must be Go-2x2 to Go-19x19",
            "--env-id Go-1x1": "--env-id Go-1x1: must be Go-2x2 to Go-19x19",
            "--env-id Go-20x20": "--env-id Go-20x20: must be Go-2x2 to Go-19x19",
            "--env-id Chess --evaluate good.pt": "--env-id Chess: must be Go-2x2 to Go-19x19",
            "--env-id Go-3x3 --resume good.pt": "good.pt: does not fit the board, network",
            "--blocks 2 --evaluate good.pt": "good.pt: does not fit the board, network",
            "--gtp good.pt": "--gtp needs envs_shared/go_gtp.py",
            "--gtp missing.pt": "missing.pt: not a checkpoint",
        },
        sibling="go.py",
        max_sibling_tokens=2600,
        reader="go_gtp.py",
        max_reader_tokens=4500,
        has_environments=False,
        states=frozenset({"best"}),
        training_states=frozenset({"games", "pool"}),
        groups=frozenset({"pool"}),
        evaluated="eval/win_rate",
    ),
    "ppo_change_detection": Case(
        quick="--num-train-pairs 32 --image-size 16 --batch-size 4 --num-envs 8 --num-minibatches 2"
        " --detector-iterations 2 --ppo-iterations 6 --eval-episodes 4 --eval-interval 2",
        length="--ppo-iterations",
        more=4,
        counter=0,
        even=("--detector-iterations 10 --ppo-iterations 10 --eval-episodes 40", 40),
        resume="--ppo-iterations 8",
        tags=("eval/f1", "losses/cross_entropy"),
        max_tokens=5400,
        max_lines=560,
        total="--num-envs",
        bad={
            "--env-id fog": "--env-id fog: must be one of haze, haze-3, haze-4",
            "--data-dir nothing": "train/A, B and label need equal names",
            "--patch-size 6": "--image-size must be divisible by --patch-size",
            "--predict a.png b.png": "--predict needs --evaluate",
            "--predict a.png b.png --evaluate good.pt": "a.png: cannot be read as a picture",
            "--pretrained missing.pt": "missing.pt: does not fit the flags",
            "--patch-size 16 --evaluate good.pt": "good.pt: does not fit the flags",
            "--env-id haze-3 --resume good.pt": "good.pt: does not fit the flags",
        },
        sibling="change_pairs.py",
        max_sibling_tokens=1600,
        reader="change_folders.py",
        max_reader_tokens=1800,
        table=4,
    ),
}
assert list(CASES) == SCRIPTS
assert {*SCRIPTS} == {path.stem for path in (ROOT / "algos").glob("*.py")}

# Beside the copied script, as a user's own module would be
BAD_ENVS = """
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Task(gym.Env):
    def __init__(self, obs, actions):
        self.observation_space, self.action_space = obs, actions


def register(name, obs, actions):
    gym.register(f"{name}-v0", lambda **kwargs: Task(obs, actions))


image, flat = Box(0, 255, (84, 84, 3), np.uint8), Box(-1, 1, (2,))
register("Image", image, Discrete(2))
register("DictOfImages", Dict(camera=image), Discrete(2))
register("Sequence", Sequence(flat), Discrete(2))
register("MultiBinary", flat, MultiBinary(3))
register("MultiDiscrete", flat, MultiDiscrete([2, 3]))


def register_same_step(name, env_id):
    def make(num_envs, **kwargs):
        return SyncVectorEnv([lambda: gym.make(env_id)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    gym.register(f"{name}-v0", vector_entry_point=make)


register_same_step("SameStep", "CartPole-v1")
register_same_step("SameStepDiscrete", "FrozenLake-v1")
"""

# Run a test for each of the scripts, with what is made once for all tests of a script
each_script = pytest.mark.parametrize("script", SCRIPTS, indirect=True, scope="module")


# Copied alone


def copy_script(script: str, folder: Path) -> Path:
    """Copy the script, and the one file of envs_shared/ that it needs, into `folder`."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "algos" / f"{script}.py", folder)
    if sibling := CASES[script].sibling:
        (folder / "envs_shared").mkdir()
        shutil.copy(ROOT / "envs_shared" / sibling, folder / "envs_shared")
    return folder


def start_copy(folder: Path, log: str, script: str, *flags, launcher=(), **more_env) -> subprocess.Popen:
    """Start the copied script as a user does, without this repository on its path; errors go to a file."""
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"} | more_env
    with open(folder / f"{log}.out", "w") as out, open(folder / f"{log}.err", "w") as err:
        command = [sys.executable, *launcher, f"{script}.py", *map(str, flags)]
        return subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=err)


def run_copy(folder: Path, log: str, script: str, *flags, **kwargs) -> tuple[str, str]:
    """What the copied script prints, on stdout and stderr; it must end well within eight minutes."""
    process = start_copy(folder, log, script, *flags, **kwargs)
    try:
        exit_code = process.wait(480)
    finally:
        process.kill()
    out, err = ((folder / f"{log}.{kind}").read_text() for kind in ("out", "err"))
    assert exit_code == 0, err
    return out, err


def find_run(run_dir: Path) -> Path:
    """The one run folder in `run_dir`."""
    (path,) = Path(run_dir).iterdir()
    return path


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def get_count(script: str, path: Path) -> int:
    """How far the run of a checkpoint was, in the unit of the script's flag `length`."""
    return load(path)["progress"][CASES[script].counter]


@pytest.fixture(scope="module")
def killed(script, tmp_path_factory):
    """A copied script's run that was killed in the middle and resumed: its folder, and what it had left."""
    case, folder = CASES[script], copy_script(script, tmp_path_factory.mktemp("copy") / script)
    flags = [*case.quick.split(), case.length, 10**8, "--eval-interval", 1]
    process = start_copy(folder, "killed", script, *flags)
    try:
        deadline = time.monotonic() + 480
        while time.monotonic() < deadline and process.poll() is None:
            saved = list(folder.glob("runs/*/checkpoint.pt"))
            if (
                saved
                and get_count(script, saved[0]) >= case.more // 2
                and (saved[0].parent / "best.pt").exists()
            ):
                break
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, (folder / "killed.err").read_text()
    path = find_run(folder / "runs")
    left = Path(shutil.copytree(path, tmp_path_factory.mktemp("left") / path.name))
    time.sleep(1.1)  # TensorBoard orders event files by the second they were made in
    flags = [
        "--resume",
        path / "checkpoint.pt",
        case.length,
        get_count(script, left / "checkpoint.pt") + case.more,
    ]
    run_copy(folder, "resumed", script, *flags)
    return folder, left


@each_script
def test_a_copy_alone_is_killed_and_resumed(script, killed):
    """In the same folder; the counters go on, no step is logged twice, and none is missing."""
    (folder, left), case = killed, CASES[script]
    path = find_run(folder / "runs")
    before, after = (load(x / "checkpoint.pt") for x in (left, path))
    assert path.name == left.name and before["progress"][0] > 0
    assert all(a > b for a, b in zip(after["progress"][:4], before["progress"][:4], strict=True))
    assert get_count(script, path / "checkpoint.pt") >= get_count(script, left / "checkpoint.pt") + case.more
    scalars = read_scalars(path)
    for tag, values in scalars.items():
        steps = [step for step, _ in values]
        assert steps == sorted(set(steps)), tag
    assert len(scalars[case.tags[1]]) == after["progress"][0]  # one in each iteration of both parts
    kept = before["progress"][0]
    assert scalars[case.tags[1]][:kept] == read_scalars(left)[case.tags[1]][:kept]
    (seconds,) = (dict(scalars[x]) for x in ["charts/cpu_seconds"])
    assert list(seconds.values()) == sorted(seconds.values())


@each_script
def test_what_a_copy_leaves(script, killed):
    """Nothing but its run folder, with events, checkpoint.pt and best.pt; few lines of its bar in a file."""
    folder, _ = killed
    path = find_run(folder / "runs")
    names = {x.name for x in folder.iterdir() if x.suffix not in (".out", ".err")} - {
        "envs_shared",
        "__pycache__",
    }
    assert names == {f"{script}.py", "runs"}
    files = {"events" if "events" in x.name else x.name for x in path.iterdir()}
    assert files == {"events", "checkpoint.pt", "best.pt"}
    assert re.fullmatch(rf"\S+__{script}__1__\d+", path.name)
    first, *table, last = (folder / "resumed.out").read_text().splitlines()
    assert len(table) == CASES[script].table
    assert first.startswith(f"{path}: ") and last.startswith(f"{path}: ")
    assert 1 <= len((folder / "resumed.err").read_text().splitlines()) < 10  # also those that end in \r


@each_script
@pytest.mark.parametrize("name", ["best.pt", "checkpoint.pt"])
def test_a_copy_evaluates_a_policy_of_a_resumed_run(script, killed, name):
    folder, _ = killed
    path = find_run(folder / "runs")
    files = {x: x.read_bytes() for x in path.rglob("*") if x.is_file()}
    out, err = run_copy(folder, "evaluated", script, "--evaluate", path / name, "--eval-episodes", 3)
    scores = ast.literal_eval(out)
    assert (
        err == ""
        and np.isfinite(scores[CASES[script].evaluated or CASES[script].tags[0]])
        and all(x.startswith("eval/") for x in scores)
    )
    assert {x: x.read_bytes() for x in path.rglob("*") if x.is_file()} == files and find_run(
        folder / "runs"
    ) == path


@each_script
def test_a_copy_runs_under_torchrun(script, tmp_path):
    case, launcher = CASES[script], "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    folder = copy_script(script, tmp_path / "copy")
    out, _ = run_copy(folder, "ranks", script, *case.quick.split(), "--no-cuda", launcher=launcher)
    path = find_run(folder / "runs")
    scalars = read_scalars(path)
    assert (
        len(out.splitlines()) == 2 + case.table and len(list(path.glob("events*"))) == 1
    )  # one process talks
    assert len(scalars[case.tags[1]]) == load(path / "checkpoint.pt")["progress"][0] and scalars[case.tags[0]]


@pytest.fixture(scope="module")
def with_bad_files(script, killed, tmp_path_factory):
    """A folder with a copy of the script and files that it cannot use."""
    folder = copy_script(script, tmp_path_factory.mktemp("bad") / script)
    (folder / "bad_envs.py").write_text(BAD_ENVS)
    (folder / "garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"weights": torch.zeros(2)}, folder / "weights.pt")
    torch.save({"args": {"flag_of_another_script": 1}, "progress": (0,)}, folder / "other.pt")
    shutil.copy(killed[1] / "best.pt", folder / "good.pt")
    return folder


@each_script
def test_bad_input_is_one_line_and_exit_code_2(script, with_bad_files):
    """And nothing is written. In processes of their own, as what warns says so on stderr."""
    folder, bad = with_bad_files, BAD_FILES | CASES[script].bad
    odd = f"{CASES[script].total} 7"
    files, logs = sorted(folder.rglob("*")), folder.parent / "logs"
    logs.mkdir()
    inputs = [(flags, words, {}) for flags, words in bad.items()]
    inputs.append((odd, "must be divisible by the number of processes (2)", {"WORLD_SIZE": "2"}))
    for i, (flags, words, env) in enumerate(inputs):
        process = start_process(logs / str(i), env, "run_copy", folder / f"{script}.py", *flags.split())
        exit_codes, lines = wait_for([process]), (logs / str(i)).read_text().splitlines()
        assert exit_codes == [2] and len(lines) == 1, (flags, lines)
        assert lines[0].startswith(f"{script}.py: error: ") and words in lines[0], (flags, lines)
        found = [x for x in sorted(folder.rglob("*")) if "__pycache__" not in str(x)]
        assert found == files, flags


# Whole runs in this process


@dataclass
class Run:
    """What a run leaves: its folder, what it printed, and the names of the files that it replaced."""

    path: Path
    out: str
    err: str
    written: list[str]

    @property
    def weights(self) -> dict:
        return load(self.path / "checkpoint.pt")["agent"]

    def read_losses(self) -> dict:
        return {tag: x for tag, x in read_scalars(self.path).items() if tag.startswith("losses/")}


def run_main(module: ModuleType, folder: Path, *flags) -> Run:
    """Call a script's `main`, where wandb is not installed, for a run in `folder`."""
    out, err, written, replace = io.StringIO(), io.StringIO(), [], os.replace

    def record(source, target):
        written.append(Path(target).name)
        replace(source, target)

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setitem(sys.modules, "wandb", None)
        patch.setattr(os, "replace", record)
        module.main([*map(str, flags), "--run-dir", str(folder)])
    return Run(find_run(folder), out.getvalue(), err.getvalue(), written)


def run_quick(script: str, folder: Path, *flags) -> Run:
    return run_main(importlib.import_module(f"algos.{script}"), folder, *CASES[script].quick.split(), *flags)


def assert_same(first: Run, second: Run):
    """Weights and losses of two runs are the same to the last bit."""
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(x, second.weights[name]) for name, x in first.weights.items())
    assert first.read_losses() == second.read_losses() != {}


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run from its beginning to its end."""
    return run_quick(script, tmp_path_factory.mktemp("whole"))


@each_script
def test_the_seed_fixes_everything(script, whole, tmp_path):
    assert_same(whole, run_quick(script, tmp_path / "same"))
    other = run_quick(script, tmp_path / "other", "--seed", 2)
    assert other.read_losses() != whole.read_losses()


@each_script
def test_evaluations_change_nothing_and_can_be_switched_off(script, whole, tmp_path):
    """Then checkpoint.pt is written at the same points."""
    never = run_quick(script, tmp_path, "--eval-episodes", 0)
    assert_same(whole, never)
    assert len(read_scalars(whole.path)[CASES[script].tags[0]]) > 2
    assert not any(tag.startswith("eval/") for tag in read_scalars(never.path))
    count = whole.written.count("checkpoint.pt")
    assert never.written == ["checkpoint.pt"] * count and count > 3 and "best.pt" in whole.written
    assert "not evaluated" in never.out and "not evaluated" not in whole.out


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
def test_a_checkpoint_has_one_content(script, whole):
    """All of it is plain data and tensors, so that torch loads it without unpickling classes."""
    checkpoint, best = load(whole.path / "checkpoint.pt"), load(whole.path / "best.pt")
    module = importlib.import_module(f"algos.{script}")
    common = {"args", "progress", "agent", "optimizer"} | CASES[script].states
    assert best.keys() == common and checkpoint.keys() == common | CASES[script].training_states
    assert module.Args(**checkpoint["args"]).run_dir == str(whole.path.parent)
    assert not list(whole.path.glob("*.tmp"))
    assert best["agent"].keys() == checkpoint["agent"].keys()


@each_script
def test_hyperparameters_are_in_the_log(script, whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole.path))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    (text,) = events.Tensors(tag)[0].tensor_proto.string_val
    rows = [line.split("|")[1:-1] for line in text.decode().splitlines()[2:]]
    args = load(whole.path / "checkpoint.pt")["args"]
    assert rows == [[name, str(value)] for name, value in args.items()]


@each_script
def test_the_log_has_its_tags(script, whole):
    scalars = read_scalars(whole.path)
    assert {tag.split("/")[0] for tag in scalars} == {"charts", "losses", "eval"} | CASES[script].groups
    assert {*CASES[script].tags, "charts/SPS", "charts/cpu_seconds"} <= scalars.keys()


# Writing checkpoints


@each_script
@pytest.mark.parametrize("moment", ["half", "written", "replaced"])
@pytest.mark.parametrize("number", [2, 4])
def test_a_kill_while_a_checkpoint_is_written_leaves_one_that_loads(script, tmp_path, moment, number):
    """At the third writing and later a best.pt is there as well; the first is of before any training."""
    flags = [*CASES[script].quick.split(), "--eval-interval", "1", "--run-dir", str(tmp_path / "runs")]
    process = start_process(tmp_path / "log", {}, "kill_at", script, number, moment, *flags)
    assert wait_for([process]) == [-signal.SIGKILL], (tmp_path / "log").read_text()
    path = find_run(tmp_path / "runs")
    # Writings: checkpoint.pt at step 0, then in each iteration best.pt where the score is no worse, checkpoint.pt
    iteration = load(path / "checkpoint.pt")["progress"][0]
    assert iteration == number - 1 - (moment != "replaced")
    for best in path.glob("best.pt"):
        assert load(best)["progress"][0] > 0


@each_script
def test_there_is_a_checkpoint_before_any_training(script, tmp_path):
    process = start_process(
        tmp_path / "log", {}, "kill_at", script, 1, "replaced", "--run-dir", tmp_path / "runs"
    )
    assert wait_for([process]) == [-signal.SIGKILL], (tmp_path / "log").read_text()
    checkpoint = load(find_run(tmp_path / "runs") / "checkpoint.pt")
    assert checkpoint["progress"][:2] == (0, 0) and checkpoint["optimizer"]["state"] == {}


@each_script
def test_what_was_logged_after_the_checkpoint_is_not_shown_twice(script, tmp_path):
    """Of a run that was killed between the writing of its log and that of its checkpoint, and resumed."""
    flags = [*CASES[script].quick.split(), "--run-dir", str(tmp_path / "runs")]
    process = start_process(tmp_path / "log", {}, "kill_at", script, 4, "written", *flags)
    assert wait_for([process]) == [-signal.SIGKILL], (tmp_path / "log").read_text()
    path, tag = find_run(tmp_path / "runs"), CASES[script].tags[1]
    done = load(path / "checkpoint.pt")["progress"][0]
    logged = read_scalars(path)[tag]
    assert len(logged) == done + 2
    time.sleep(1.1)  # TensorBoard orders event files by the second they were made in
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(f"algos.{script}").main(["--resume", str(path / "checkpoint.pt")])
    scalars = read_scalars(path)
    assert len(scalars[tag]) == load(path / "checkpoint.pt")["progress"][0] > done + 2
    assert scalars[tag][:done] == logged[:done]
    for tag, values in scalars.items():
        steps = [step for step, _ in values]
        assert steps == sorted(set(steps)), tag


# Weights & Biases


@each_script
def test_weights_and_biases_offline(script, tmp_path):
    pytest.importorskip("wandb")
    folder = copy_script(script, tmp_path / "copy")
    run_copy(folder, "tracked", script, *CASES[script].quick.split(), "--track", WANDB_MODE="offline")
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert find_run(folder / "runs").name in log.name
    content = log.read_bytes()
    assert all(tag.encode() in content for tag in (*CASES[script].tags, "wandb_project_name"))


# The form of a script


def source(script: str) -> str:
    return (ROOT / "algos" / f"{script}.py").read_text()


def count_tokens(text: str) -> int:
    """Names, numbers, strings and operators; an f-string is one, also where Python's tokenizer splits it."""
    kinds = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}
    count, open_strings = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if open_strings == 0 and (token.type in kinds or kind == "FSTRING_START"):
            count += 1
        open_strings += {"FSTRING_START": 1, "FSTRING_END": -1}.get(kind, 0)
    return count


def test_tokens_are_counted():
    assert count_tokens("x = f'a{b + f(c)}d' + 'e'  # f\n\n") == 5
    assert count_tokens('"""A.\n\nB."""\nif (x1 >= 1.5):\n    y[0] = -1\n') == 1 + 7 + 7


@each_script
def test_a_script_is_within_its_budget(script):
    case, text = CASES[script], source(script)
    assert count_tokens(text) <= case.max_tokens
    assert len(text.splitlines()) <= case.max_lines
    assert max(map(len, text.splitlines())) <= 110
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= (110 if node.name == "train" else 70), node.name
    for name, most in ((case.sibling, case.max_sibling_tokens), (case.reader, case.max_reader_tokens)):
        assert name is None or count_tokens((ROOT / "envs_shared" / name).read_text()) <= most


@each_script
def test_sections_are_in_order(script):
    lines = source(script).splitlines()
    rulers = [line for line in lines if line.startswith("# --")]
    titles = [re.fullmatch(r"# ---- (\S.*?) -+", line)[1] for line in rulers]
    sections = [x for x in SECTIONS if x != "Environments" or CASES[script].has_environments]
    assert [own or title for own, title in zip(sections, titles, strict=True)] == titles
    assert {len(line) for line in rulers} == {110}
    tree = ast.parse(source(script))
    first = lines.index(rulers[0])
    kinds = [type(n).__name__ for n in tree.body if n.lineno < first]
    assert kinds.count("ClassDef") == 1 and kinds[-1] == "ClassDef"  # Args
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)][-2:] == ["train", "main"]
    assert lines.index("# /// script") < min(n.lineno for n in tree.body if isinstance(n, ast.Import))


@each_script
def test_the_docstring_is_short_and_has_commands(script):
    text = ast.get_docstring(ast.parse(source(script)))
    assert len(text.splitlines()) <= 35
    commands = [line.split() for line in text.splitlines() if re.match(r"    (python|torchrun|uv)\b", line)]
    assert 3 <= len(commands) <= 5 and all(f"{script}.py" in words for words in commands)


def find_imports(nodes) -> set[str]:
    """Names of the modules that the imports among `nodes` name."""
    nodes = list(nodes)
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return modules | {n.module for n in nodes if isinstance(n, ast.ImportFrom)}


@each_script
def test_pep723_block_has_the_packages_that_are_imported(script):
    """And what the default task is made of. Numpy, which gymnasium and torch bring along, may be left out."""
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source(script), re.M)
    metadata = tomllib.loads(
        "".join(line.removeprefix("#").removeprefix(" ") for line in block.splitlines(True))
    )
    assert metadata["requires-python"] == ">=3.11"
    ranges = {r.name: r.specifier for r in map(Requirement, metadata["dependencies"])}
    tree = ast.parse(source(script))
    modules = find_imports(ast.walk(tree))
    brought = {x.split(".")[-1] for x in modules} & {"tensorboard"}  # torch.utils.tensorboard needs it
    packages = {x.split(".")[0] for x in modules} - set(sys.stdlib_module_names) - {"envs_shared"}
    packages, optional = {PACKAGES.get(x, x) for x in packages} | brought, CASES[script].optional
    module, *_ = getattr(importlib.import_module(f"algos.{script}").Args, "env_id", "").split(":")[:-1] or [
        ""
    ]
    packages |= {module} - {""}
    assert optional <= packages
    assert packages - optional - {"numpy"} == ranges.keys() - {"numpy"}
    at_once = {x.split(".")[0] for x in find_imports(tree.body)}
    assert not at_once & {"wandb", *optional}  # imported where --track is given, and for their tasks
    pins = {r.name: r.specifier for r in map(Requirement, (ROOT / "requirements.txt").read_text().split())}
    for name, specifier in ranges.items():
        (pin,) = pins[name]
        assert pin.operator == "==" and specifier.contains(pin.version), name
    assert ranges["torch"].contains("2.11.0")


@each_script
def test_a_script_imports_no_other_and_at_most_its_sibling(script):
    """At its top, that is; in a function also the reader of a rarer format. Neither imports others in turn."""
    tree, case = ast.parse(source(script)), CASES[script]
    modules = find_imports(ast.walk(tree))
    scripts = {x.stem for x in (ROOT / "algos").glob("*.py")}
    assert not {x.split(".")[0] for x in modules} & {"algos", "tests", "benchmark", *scripts}
    sibling, reader = (
        f"envs_shared.{x.removesuffix('.py')}" if x else None for x in (case.sibling, case.reader)
    )
    allowed = {sibling, "envs_shared"} if sibling else set()
    for nodes, more in ((tree.body, set()), (ast.walk(tree), {reader})):
        assert {x for x in find_imports(nodes) if x.split(".")[0] == "envs_shared"} <= allowed | more
    for name in filter(None, (case.sibling, case.reader)):  # but a reader may need the sibling
        imported = find_imports(ast.walk(ast.parse((ROOT / "envs_shared" / name).read_text())))
        imported -= {sibling} if name == case.reader else set()
        assert not {x.split(".")[0] for x in imported} & {"algos", "envs_shared", "tests", "benchmark"}


def read_fields(script: str) -> list[tuple[str, str, str, str]]:
    """Fields of Args, [(name, annotation, default, comment), ...], one line each."""
    text = source(script)
    (args,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Args")
    lines, found = text.splitlines(), []
    for field in args.body[1:]:  # without the docstring
        assert isinstance(field, ast.AnnAssign) and field.lineno == field.end_lineno, ast.unparse(field)
        comment = lines[field.lineno - 1][field.end_col_offset :]
        assert re.fullmatch(r"  # \S.*", comment), f"{field.target.id}: {comment}"
        found.append((field.target.id, ast.unparse(field.annotation), ast.unparse(field.value), comment[4:]))
    return found


@each_script
def test_common_flags_come_first_and_are_spelled_alike(script):
    mine = read_fields(script)
    names = [name for name, *_ in mine]
    common = [name for name in COMMON_FLAGS if name != "capture_video" or name in names]
    assert names[: len(common)] == common
    for other in SCRIPTS:
        theirs = {name: kind for name, kind, *_ in read_fields(other)}
        assert all(theirs.get(name, kind) == kind for name, kind, *_ in mine[: len(common)])


@each_script
def test_help_shows_every_field_with_its_comment(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"algos.{script}").main(["--help"])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert stop.value.code == 0
    for name, _, _, comment in read_fields(script):
        assert f"--{name.replace('_', '-')}" in text and " ".join(comment.split()) in text, name


@cache
def find_functions(script: str) -> dict[str, str]:
    """Source of the functions and classes at the top of a script."""
    text = source(script)
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {n.name: ast.get_source_segment(text, n) for n in nodes}


@pytest.mark.parametrize("name", SHARED)
def test_equal_functions_have_equal_sources(name):
    sources = [find_functions(script)[name] for script in SCRIPTS if name in find_functions(script)]
    assert sources and len(set(sources)) == 1


@each_script
def test_every_function_and_class_has_a_docstring_that_is_a_sentence(script):
    tree = ast.parse(source(script))
    for node in ast.walk(tree):
        is_own = isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "save")
        if is_own and not (text := ast.get_docstring(node)):
            assert any(
                node in getattr(x, "body", []) for x in ast.walk(tree) if isinstance(x, ast.ClassDef)
            ), node.name
        elif is_own:
            assert text[0].isupper() and text.split("\n\n")[0].rstrip().endswith("."), node.name


@each_script
def test_the_readme_and_the_docs_have_the_script(script):
    assert f"algos/{script}.py`" in (ROOT / "README.md").read_text()
    assert (ROOT / "docs" / f"{script}.md").exists() and (ROOT / "tests" / f"test_{script}.py").exists()
