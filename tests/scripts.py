"""How the tests run each script: its flags, copies of it, and whole runs in this process."""

import contextlib
import importlib
import importlib.util
import io
import itertools
import math
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT, SCRIPTS, read_scalars, start_process, wait_for
from torch.optim.optimizer import register_optimizer_step_pre_hook


@dataclass
class Case:
    """How the tests run a script."""

    quick: str  # flags of a run of seconds, about eight iterations
    length: str  # the flag that sets how long a run is,
    more: int  # and by how much of it the tests extend a run
    even: tuple[str, int]  # more flags, with which every evaluation takes this number of steps
    tags: tuple[str, str]  # of a score and a loss
    bad: dict[str, str]  # flags of bad input, and words of the one line that answers them
    ranges: str  # counts and shares with numbers outside their range
    other_tasks: tuple[str, ...]  # flags of other tasks that a checkpoint fits
    shared: str = ""  # more flags of a run by two processes: of all that they share, if a script has any
    sibling: str | None = None  # the file of envs_shared/ that a copy takes along


NOT_DIVISIBLE = "must be divisible by the number of processes (2)"
BAD_FILES = {
    "--resume garbage.pt": "garbage.pt: missing, or not a checkpoint of this version",
    "--evaluate weights.pt": "weights.pt: missing, or not a checkpoint of this version",
    "--resume good.pt --evaluate good.pt": "exclude each other",
    "--evaluate pickle.pt": "pickle.pt: missing, or not a checkpoint of this version",
    "--run-dir garbage.pt": "cannot be written to (Not a directory)",
}  # for all scripts
NO_TASK = {"--env-id NoSuch-v0": "--env-id NoSuch-v0: Environment `NoSuch` doesn't exist"}  # of gymnasium
CASES = {
    "ppo": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2",
        length="--total-timesteps",
        more=1024,
        even=("--env-id probe_envs:Fixed-v0 --eval-episodes 20", 100),
        tags=("eval/episodic_return", "losses/value_loss"),
        ranges="num_envs=0 total_timesteps=0 num_minibatches=0 update_epochs=0 num_steps=1 num_steps=0"
        " gamma=99 gae_lambda=1.2",
        shared="--env-id probe_envs:Fixed-v0 --norm-obs",
        bad=NO_TASK
        | {
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id probe_envs:TwoActions-v0": "must be Discrete or a Box of floats, not Multi",
            "--env-id probe_envs:SameStepLedger-v0": "metadata['autoreset_mode'] must be NEXT_STEP",
            "--env-id probe_envs:UndeclaredLedger-v0": "must be NEXT_STEP, not None",
            "--env-id probe_envs:EightLedger-v0 --num-envs 8": "always has 8 environments",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: does not fit --env-id, --norm-obs",
            "--num-steps 3 --num-minibatches 5 --total-timesteps 90": "(5) must divide the 96 steps of a",
            "--num-envs 1 --num-steps 32 --num-minibatches 32": "--norm-adv needs minibatches of at least 2",
        },
        other_tasks=("--env-id probe_envs:Pole-v0",),
    ),
    "r2d2_lstm": Case(
        quick="--num-envs 8 --num-steps 32 --total-timesteps 2048 --eval-episodes 4 --eval-interval 2"
        " --learning-starts 0 --learn-length 8 --batch-size 128 --buffer-size 100 --replay-ratio 1"
        " --hidden-size 16",
        length="--total-timesteps",
        more=1024,
        even=("--env-id probe_envs:Fixed-v0 --eval-episodes 20", 100),
        tags=("eval/episodic_return", "losses/q_loss"),
        ranges="learn_length=0 memory_span=0.5 gamma=1.5 epsilon=40 eta=2 alpha=2",
        shared="--env-id probe_envs:Fixed-v0",
        bad=NO_TASK
        | {
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id probe_envs:TwoActions-v0": "actions must be Discrete, not MultiDiscrete([2 3])",
            "--env-id probe_envs:SameStepLedger-v0": "metadata['autoreset_mode'] must be NEXT_STEP",
            "--env-id probe_envs:UndeclaredLedger-v0": "must be NEXT_STEP, not None",
            "--env-id probe_envs:EightLedger-v0 --num-envs 16": "always has 8 environments",
            "--env-id probe_envs:BytesAndFloats-v0": "a wrapper must scale bytes that stand beside other",
            "--env-id Acrobot-v1 --resume good.pt": "good.pt: does not fit --env-id",
            "--n-step 0 --resume good.pt": "--n-step (0) must be from 1 to",
            "--batch-size 25": "--batch-size (25) must be at least 26",
            "--buffer-size 1000000000000": "--buffer-size (1000000000000) must be smaller",
        },
        other_tasks=("--env-id popgym:popgym-RepeatPreviousMedium-v0",),
    ),
    "reinforce_tsp_attention": Case(
        quick="--env-id tsp5-uniform --num-epochs 8 --steps-per-epoch 2 --batch-size 8 --eval-episodes 4"
        " --eval-interval 2",
        length="--num-epochs",
        more=4,
        even=("--num-epochs 20 --eval-episodes 15", 15),
        tags=("eval/greedy_length", "losses/policy_loss"),
        ranges="baseline_instances=0 baseline_level=5",
        shared="--baseline rollout --baseline-instances 20 --baseline-level 0.5",
        bad={
            "--batch-size 7": NOT_DIVISIBLE,
            "--env-id tsp20": "--env-id tsp20: must be tspN-uniform or tspN-gaussian, with N >= 3 nodes",
            "--optimizer adam --resume good.pt": "good.pt: does not fit --optimizer",
            "--baseline-instances 1": "--baseline-instances (1) must be at least 2 for each process",
        },
        other_tasks=("--env-id tsp6-uniform", "--seed 8"),
    ),
    "alphazero_go": Case(
        quick="--env-id Go-2x2 --num-games 4 --blocks 1 --channels 8 --simulations-start 4"
        " --simulations-end 4 --num-epochs 8 --pool-size 256 --batch-size 16 --eval-episodes 4"
        " --eval-interval 2",
        length="--num-epochs",
        more=4,
        even=("--num-epochs 20 --eval-episodes 2", 4),
        tags=("eval/win_rate_best", "losses/value_loss"),
        ranges="num_games=0 generate_fraction=0 q_weight_end=1.5 draw_moves=30",
        shared="--pretrain-value-epochs 1 --pretrain-search-epochs 1 --generate-fraction 0.6",
        bad={
            "--num-games 7": NOT_DIVISIBLE,
            "--env-id Go-9x8": "--env-id Go-9x8: must be Go-2x2 to Go-19x19",
            "--env-id Go-3x3 --resume good.pt": "good.pt: does not fit --env-id, --blocks, --channels",
            "--pool-size 1000": "--pool-size (1000) must be at least 8 x --batch-size (128)",
        },
        sibling="go.py",
        other_tasks=("--komi 3",),
    ),
    "ppo_change_detection": Case(
        quick="--num-train-pairs 32 --image-size 16 --batch-size 4 --num-envs 8 --num-minibatches 2"
        " --detector-iterations 2 --ppo-iterations 6 --eval-episodes 4 --eval-interval 2",
        length="--ppo-iterations",
        more=4,
        even=("--detector-iterations 10 --ppo-iterations 10 --eval-episodes 40", 40),
        tags=("eval/f1", "losses/cross_entropy"),
        ranges="patch_size=0 gamma=1.5 val_share=2",
        other_tasks=("--cost 9",),
        bad={
            "--num-envs 7": NOT_DIVISIBLE,
            "--env-id fog": "--env-id fog: must be one of haze, haze-3, haze-4",
            "--patch-size 6": "--image-size must be divisible by --patch-size",
            "--env-id haze-3 --resume good.pt": "good.pt: does not fit --env-id (",
            "--cell-size 8 --image-size 8": "--cell-size",
        },
        sibling="change_pairs.py",
    ),
}
assert {*CASES} == {*SCRIPTS}

# Run a test for each of the scripts, with what is made once for all tests of a script
each_script = pytest.mark.parametrize("script", SCRIPTS, indirect=True, scope="module")


def copy_script(script: str, folder: Path) -> Path:
    """Copy the script, and the one file of envs_shared/ that it needs, into `folder`, and return `folder`."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "algos" / f"{script}.py", folder)
    if sibling := CASES[script].sibling:
        (folder / "envs_shared").mkdir()
        shutil.copy(ROOT / "envs_shared" / sibling, folder / "envs_shared")
    return folder


def run_copy(folder: Path, script: str, *flags) -> str:
    """Run the copied script, where this repository is not on the path; return what it prints, errors too."""
    log = folder.with_suffix(".log")
    process = start_process(log, "run_copy", folder / f"{script}.py", *flags)
    assert wait_for([process]) == [0], log.read_text()
    return log.read_text()


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
    """What --evaluate prints after a line that says what it plays: a name and a number in each line."""
    first, *lines = out.splitlines()
    assert re.match(r"\S+\.pt: .*\d", first)
    rows = [re.fullmatch(r"(eval/\w+): (-?[\d.]+(?:e[+-]\d+)?)", line).groups() for line in lines]
    return {name: float(number) for name, number in rows}


def check_no_step_is_logged_twice(path: Path) -> dict:
    """Return the scalars of a run folder, in which the steps of each tag must increase.

    R2D2 does not save its large replay after an evaluation: a resumed run repeats it, with the same scores.
    """
    scalars = read_scalars(path)
    for tag, values in scalars.items():
        if "r2d2_lstm" in path.name and tag.startswith("eval/"):
            values = list(dict.fromkeys(values))
        assert all(a < b for (a, _), (b, _) in itertools.pairwise(values)), tag
    return scalars


def read_returns(run: SimpleNamespace) -> list[float]:
    return [value for _, value in read_scalars(run.path)["eval/episodic_return"]]


def read_losses(path: Path) -> dict:
    return {tag: x for tag, x in read_scalars(path).items() if tag.startswith("losses/")}


def call_main(module: ModuleType, flags: str) -> tuple[str, list[int]]:
    """Call a script's `main`, as if wandb were not installed; return what it prints, and its seeds."""
    out, seeds, seed_everything = io.StringIO(), [], module.seed_everything

    def record_seed(*stream):
        seeds.append(seed_everything(*stream))
        return seeds[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(io.StringIO()):
        patch.setitem(sys.modules, "wandb", None)
        patch.setattr(module, "seed_everything", record_seed)
        module.main(flags.split())
    return out.getvalue(), seeds


def run_main(module: ModuleType, folder: Path, *flags) -> SimpleNamespace:
    """Call a script's `main` for a run in `folder`, with words or lines of flags; return what it leaves."""
    out, seeds = call_main(module, " ".join(map(str, (*flags, "--run-dir", folder))))
    return SimpleNamespace(path=find_run(folder), out=out, seeds=seeds)


def get_module(script: str) -> ModuleType:
    return importlib.import_module(f"algos.{script}")


def run_quick(script: str, folder: Path, *flags) -> SimpleNamespace:
    return run_main(get_module(script), folder, CASES[script].quick, *flags)


def run_edited(path: Path, *flags) -> tuple[SimpleNamespace, ModuleType]:
    """Run a script that a user has edited, as a module of its own; return that too."""
    module = import_file("edited_copy", path)
    return run_main(module, path.parent / "runs", *flags), module


def edit_script(script: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """Copy a script into `folder` and edit it as a user would: each change is a text and its replacement.

    The text must occur once. Returns the path of the copy.
    """
    path = copy_script(script, folder) / f"{script}.py"
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times in {script}.py: {old}"
        text = text.replace(old, new)
    path.write_text(text)
    return path


class Killed(BaseException):
    """What ends a run in the place of a kill. No script handles it."""


def start_and_kill(module: ModuleType, iteration: int, folder: Path, *flags) -> Path:
    """Start a run in `folder`, and end it right after the checkpoint of an iteration; return its path."""
    log = module.Run.log

    def log_and_die(run, scalars):
        run.saved_at = -math.inf  # long ago, so that this iteration is saved
        log(run, scalars)
        if run.iteration == iteration:
            raise Killed

    with mock.patch.object(module.Run, "log", log_and_die), pytest.raises(Killed):
        run_main(module, folder, *flags)
    return find_run(folder)


@contextlib.contextmanager
def watch_optimizers():
    """Record the options of all parameter groups, without their parameters, in each step of an optimizer."""
    steps = []

    def record(optimizer, *_):
        groups = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
        for group in groups:
            group["lr"] = float(group["lr"])
        steps.append(groups)

    handle = register_optimizer_step_pre_hook(record)
    yield steps
    handle.remove()


def import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def longer(path: Path, case: Case) -> int:
    """The value of the flag for the length of a run that trains for a little more."""
    counter = "step" if case.length == "--total-timesteps" else "iteration"
    return read_progress(path)[counter] + case.more
