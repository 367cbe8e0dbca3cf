"""The part Run, tried with ppo.py: test_contract.py shows that it is the same in all scripts."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ENVIRONMENT, ROOT, fail_with, read_scalars
from scripts import CASES, call_main, copy_script, find_run, load, read_progress, run_main, run_quick

from algos import ppo

SCORE = {"eval/episodic_length": 1.0, "eval/episodic_return_std": 0.0}
SHORT = "--num-envs 8 --num-steps 32 --total-timesteps 1024 --eval-episodes 2"


def start(*command, **options) -> subprocess.CompletedProcess:
    """Run a program as from a shell."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """The folder of a whole run, which no test changes."""
    return run_quick("ppo", tmp_path_factory.mktemp("done")).path


@pytest.fixture
def copied(done, tmp_path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(done, tmp_path / "runs" / done.name))


def resume(path, *flags):
    """Let the run of a checkpoint, of 2,048 steps, go on for 1,024 more."""
    ppo.main(["--resume", str(path), "--total-timesteps", "3072", *flags])


# Evaluations


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_score_that_is_not_finite_ends_the_run_with_one_line(value, tmp_path, monkeypatch, capsys):
    """The checkpoint before it stays, and so does best.pt."""
    scores = iter([7.0, value])
    monkeypatch.setattr(ppo, "evaluate", lambda *_: SCORE | {"eval/episodic_return": next(scores)})
    flags = f"{CASES['ppo'].quick} --run-dir {tmp_path}".split()
    line = fail_with(capsys, ppo.main, flags)
    step = read_progress(find_run(tmp_path))["step"]
    words = f"eval/episodic_return is {value} at step {step}"
    assert line.endswith(f"error: {words}")
    best, last = (load(find_run(tmp_path) / name)["progress"] for name in ("best.pt", "checkpoint.pt"))
    assert best["iteration"] == 2 < last["iteration"] == 4 and last["best_score"] == 7.0


@pytest.mark.parametrize(
    ("env_id", "length", "num_episodes"), [("Shifted", 1, 4), ("Fixed", 5, 4), ("Fixed", 5, 50)]
)
def test_a_run_is_evaluated_at_each_tenth_if_that_takes_a_fifth_of_the_steps(
    env_id, length, num_episodes, tmp_path
):
    """However long the iterations are; the last evaluation takes what it takes."""
    flags = "--num-envs 2 --num-steps 8 --total-timesteps 2000 --update-epochs 1 --num-minibatches 1"
    flags += f" --env-id probe_envs:{env_id}-v0 --eval-episodes {num_episodes}"
    scalars = read_scalars(run_main(ppo, tmp_path, flags).path)
    expected = []
    for tenth in range(1, 11):
        step = min(s for s, _ in scalars["charts/SPS"] if s >= 200 * tenth)
        if num_episodes * length * (len(expected) + 1) <= step / 5 or tenth == 10:
            expected.append(step)
    assert [step for step, _ in scalars["eval/episodic_length"]] == expected
    assert len(expected) == (10 if num_episodes == 4 else 2)


# Resuming


def test_a_resume_through_a_link_writes_where_the_file_is(copied, tmp_path, capsys):
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "latest.pt").symlink_to(copied / "checkpoint.pt")
    resume(tmp_path / "link" / "latest.pt")
    assert capsys.readouterr().out.startswith(f"{copied}: ")
    assert os.listdir(tmp_path / "link") == ["latest.pt"] and read_progress(copied)["step"] >= 3072


def test_a_resume_in_the_runs_own_folder_has_its_name(copied, monkeypatch):
    """W&B gets that name."""
    found = []
    fake = SimpleNamespace(init=lambda **kwargs: found.append(kwargs), finish=lambda: None, Error=ValueError)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.chdir(copied)
    resume("checkpoint.pt", "--track")
    assert found[0]["id"] == found[0]["name"] == copied.name and found[0]["resume"] == "allow"


def test_a_resume_of_best_says_what_it_does_before_it_does_it(copied, monkeypatch, capsys):
    before = (copied / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(ppo, "collect_rollout", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(copied / "best.pt")
    assert "Continues from best.pt; next states go to checkpoint.pt\n" in capsys.readouterr().out
    assert (copied / "checkpoint.pt").read_bytes() == before


def test_a_newer_best_is_the_one_to_beat(copied):
    """As after a kill between best.pt and checkpoint.pt: a worse policy does not replace it."""
    best = load(copied / "best.pt")
    best["progress"]["best_score"] = 10_000.0
    torch.save(best, copied / "best.pt")
    before = (copied / "best.pt").read_bytes()
    resume(copied / "checkpoint.pt")
    assert (copied / "best.pt").read_bytes() == before and read_progress(copied)["best_score"] == 10_000.0


@pytest.mark.parametrize(
    ("flags", "rate"), [("", 1e-5), ("--learning-rate 4e-3", 4e-3), ("--anneal-lr", None)]
)
def test_an_adapted_learning_rate_survives_unless_the_flag_is_given(flags, rate, tmp_path, monkeypatch):
    """A copy that adapts the rate sets the tensor; with --anneal-lr the formula holds."""
    log = ppo.Run.log

    def adapt(run, *rest):
        run.parts["optimizer"].param_groups[0]["lr"].fill_(1e-5)
        log(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ppo.Run, "log", adapt)
        path = run_main(ppo, tmp_path, SHORT, "--no-anneal-lr").path
    call_main(ppo, f"--resume {path / 'checkpoint.pt'} --total-timesteps 2048 {flags}")
    found = [x for step, x in read_scalars(path)["charts/learning_rate"] if step > 1024 + 256]
    if rate:
        assert found == pytest.approx([rate] * len(found), rel=1e-6)
    else:
        assert 0 < found[-1] < found[0] < 1e-5


# The folder and the log


def test_names_with_slashes_make_one_folder(tmp_path):
    path = run_main(ppo, tmp_path, SHORT, "--exp-name a/b\\c --env-id probe_envs:Fixed-v0").path
    assert path.name.startswith("probe_envs-Fixed-v0__a-b-c__1__")


def test_weights_and_biases_without_a_login_is_one_line(tmp_path, monkeypatch, capsys):
    def init(**_):
        raise fake.Error("api_key not configured (no-tty).\nMore lines")

    fake = SimpleNamespace(init=init, Error=type("Error", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    line = fail_with(capsys, ppo.main, ["--track", "--run-dir", str(tmp_path / "runs")])
    assert "--track: Weights & Biases did not start; try `wandb login`, or WANDB_MODE=offline" in line
    assert not (tmp_path / "runs").exists()


def test_two_tracked_runs_in_one_process_are_two(tmp_path, monkeypatch):
    """With the library itself, also if the first one is interrupted: each has its own curves and settings."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    log, names = ppo.Run.log, []

    def interrupt(run, *rest):
        log(run, *rest)
        names.append((run.path.name, wandb.run.id, wandb.run.config["seed"]))
        if run.args.seed == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ppo.Run, "log", interrupt)
    flags = f"{SHORT} --track --eval-episodes 0 --seed".split()
    with pytest.raises(SystemExit, match="130"):
        ppo.main([*flags, "1"])
    ppo.main([*flags, "2"])
    assert wandb.run is None
    assert [path == name for path, name, _ in names] == [True] * len(names)
    assert [seed for *_, seed in names] == [1] + [2] * (len(names) - 1) and len(names) > 3
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 2


# The process


def test_a_logger_without_isatty_and_a_closed_stderr_stop_nothing(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stream = SimpleNamespace(write=lambda text: None, flush=lambda: None)
        patch.setattr(sys, "stderr", stream)
        ppo.main([*SHORT.split(), "--run-dir", str(tmp_path / "logger")])
    assert "return of best.pt" in capsys.readouterr().out
    command = f"{sys.executable} algos/ppo.py {SHORT} --run-dir {tmp_path / 'closed'} 2>&-"
    run = start("bash", "-c", command, cwd=ROOT, env=ENVIRONMENT)
    assert run.returncode == 0 and "return of best.pt" in run.stdout


def test_a_reader_of_stdout_that_is_gone_stops_nothing(tmp_path):
    command = f"set -o pipefail; {sys.executable} algos/ppo.py {SHORT} --run-dir {tmp_path} | head -n 1"
    run = start("bash", "-c", command, cwd=ROOT, env=ENVIRONMENT)
    assert run.returncode == 0 and "Traceback" not in run.stderr and "Broken" not in run.stderr
    assert read_progress(find_run(tmp_path))["last_score"] is not None


def test_modules_beside_the_script_are_found_with_safe_path(tmp_path):
    """`python -P` leaves the folder of the script out; the task is found there, and in the current folder."""
    folder = copy_script("ppo", tmp_path / "copy")
    (folder / "beside.py").write_text((ROOT / "tests" / "probe_envs.py").read_text())
    (tmp_path / "current.py").write_text("import beside")
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    flags = [*SHORT.split(), "--env-id", "current:Fixed-v0"]
    run = start(sys.executable, "-P", folder / "ppo.py", *flags, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr


def test_one_process_evaluates_under_torchrun(copied):
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 algos/ppo.py"
    flags = f"--no-cuda --evaluate {copied / 'best.pt'} --eval-episodes 2"
    run = start(*launcher.split(), *flags.split(), cwd=ROOT, env=ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assert sorted(line.split(":")[0] for line in run.stdout.splitlines()) == [
        "eval/episodic_length",
        "eval/episodic_return",
        "eval/episodic_return_std",
    ]


def test_seconds_of_an_evaluation_do_not_count(tmp_path, monkeypatch):
    """In charts/SPS and charts/cpu_seconds. Here a rollout takes one second, an evaluation 1000."""
    clock = 0.0

    def advance(seconds, function, *rest):
        nonlocal clock
        clock += seconds
        return function(*rest)

    fake = SimpleNamespace(time=lambda: clock, process_time=lambda: clock, time_ns=time.time_ns)
    monkeypatch.setattr(ppo, "time", fake)
    for name, seconds in (("collect_rollout", 1.0), ("evaluate", 1000.0)):
        monkeypatch.setattr(ppo, name, partial(advance, seconds, getattr(ppo, name)))
    path = run_main(ppo, tmp_path, SHORT, "--eval-interval 1").path
    scalars = read_scalars(path)
    steps, speeds = zip(*scalars["charts/SPS"], strict=True)
    assert speeds == pytest.approx(np.diff(steps, prepend=0))
    assert scalars["charts/cpu_seconds"][-1][1] == len(steps) == read_progress(path)["cpu_seconds"] > 1


def test_checkpoints_are_at_most_ten_minutes_apart(tmp_path, monkeypatch):
    """Here each call of the clock is a minute later."""
    monkeypatch.setattr(ppo.time, "time", itertools.count(1e9, 60.0).__next__)
    written = run_quick("ppo", tmp_path, "--eval-episodes", 0, "--eval-interval", 10**6).written
    assert written.count("checkpoint.pt") > 3


def test_ctrl_c_of_an_evaluation_says_nothing_of_resuming(done, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "evaluate", interrupt)
    with pytest.raises(SystemExit, match="130"):
        ppo.main(["--evaluate", str(done / "best.pt")])
    assert not capsys.readouterr().err
