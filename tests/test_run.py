"""The part Run, tried with ppo.py: test_contract.py shows that it is the same in all scripts."""

import itertools
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import fail_with, read_scalars
from scripts import CASES, find_run, load, read_progress, run_main, run_quick

from algos import ppo

SCORE = {"eval/episodic_length": 1.0, "eval/episodic_return_std": 0.0}
SHORT = "--num-envs 8 --num-steps 32 --total-timesteps 1024 --eval-episodes 2"


@pytest.fixture
def done(tmp_path) -> Path:
    """The folder of a whole run."""
    return run_quick("ppo", tmp_path / "runs").path


def resume(path):
    """Let the run of a checkpoint, of 2,048 steps, go on for 1,024 more."""
    ppo.main(["--resume", str(path), "--total-timesteps", "3072"])


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_score_that_is_not_finite_ends_the_run_with_one_line(value, tmp_path, monkeypatch, capsys):
    """The checkpoint before it stays, and so does best.pt."""
    scores = iter([7.0, value])
    monkeypatch.setattr(ppo, "evaluate", lambda *_: SCORE | {"eval/episodic_return": next(scores)})
    line = fail_with(capsys, ppo.main, f"{CASES['ppo'].quick} --run-dir {tmp_path}".split())
    assert f"error: eval/episodic_return is {value} at step " in line
    best, last = (load(find_run(tmp_path) / name)["progress"] for name in ("best.pt", "checkpoint.pt"))
    assert best["iteration"] == 2 < last["iteration"] == 4 and last["best_score"] == 7.0


def test_a_resume_through_a_link_writes_where_the_file_is(done, tmp_path, capsys):
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "latest.pt").symlink_to(done / "checkpoint.pt")
    resume(tmp_path / "link" / "latest.pt")
    assert capsys.readouterr().out.startswith(f"{done}: ")
    assert os.listdir(tmp_path / "link") == ["latest.pt"] and read_progress(done)["step"] >= 3072


def test_a_newer_best_is_the_one_to_beat(done):
    """As after a kill between best.pt and checkpoint.pt: a worse policy does not replace it."""
    best = load(done / "best.pt")
    best["progress"]["best_score"] = 10_000.0
    torch.save(best, done / "best.pt")
    before = (done / "best.pt").read_bytes()
    resume(done / "checkpoint.pt")
    assert (done / "best.pt").read_bytes() == before and read_progress(done)["best_score"] == 10_000.0


def test_a_logger_without_isatty_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=lambda text: None, flush=lambda: None))
    ppo.main([*SHORT.split(), "--run-dir", str(tmp_path)])
    assert "return of best.pt" in capsys.readouterr().out


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
    saved, save = [], ppo.Run.save
    monkeypatch.setattr(ppo.time, "time", itertools.count(1e9, 60.0).__next__)
    monkeypatch.setattr(ppo.Run, "save", lambda run: saved.append(run.iteration) or save(run))
    run_quick("ppo", tmp_path, "--eval-episodes", 0, "--eval-interval", 10**6)
    assert len(saved) > 3 and saved[0] == 0


def test_ctrl_c_ends_with_the_command_that_resumes(tmp_path, monkeypatch, capsys):
    """As the last line, with exit code 130."""
    monkeypatch.setattr(ppo, "collect_rollout", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        ppo.main([*SHORT.split(), "--run-dir", str(tmp_path)])
    command = f"python {ppo.__file__!r} --resume '{find_run(tmp_path)}/checkpoint.pt'"
    assert capsys.readouterr().err.endswith(f": interrupted; to resume: {command}\n")
