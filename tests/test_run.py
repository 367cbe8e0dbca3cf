"""The part Run, tried with ppo.py: test_contract.py shows that it is the same in all scripts."""

import io
import os
import random
import signal
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
from scripts import CASES, copy_script, find_run, load, read_progress, run_main, run_quick, start_and_kill
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from algos import ppo

SCORE = {"eval/episodic_length": 1.0, "eval/episodic_return_std": 0.0}
SHORT = "--num-envs 8 --num-steps 32 --total-timesteps 1024 --eval-episodes 2"


def start(*command, **options) -> subprocess.CompletedProcess:
    """Run a program as from a shell."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, **options)


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


def test_a_best_is_to_beat_if_the_checkpoint_was_never_evaluated(tmp_path):
    """As after a kill between the first best.pt and the checkpoint after it."""
    path = start_and_kill(ppo, 1, tmp_path, SHORT, "--eval-interval 2")
    checkpoint = (path / "checkpoint.pt").read_bytes()
    ppo.main(["--resume", str(path / "checkpoint.pt")])
    best = load(path / "best.pt")
    best["progress"]["best_score"] = 10_000.0
    torch.save(best, path / "best.pt")
    (path / "checkpoint.pt").write_bytes(checkpoint)
    assert read_progress(path)["score_name"] == ""
    before = (path / "best.pt").read_bytes()
    ppo.main(["--resume", str(path / "checkpoint.pt")])
    assert (path / "best.pt").read_bytes() == before and read_progress(path)["best_score"] == 10_000.0


def test_a_finished_run_that_was_scored_is_not_scored_again(done, monkeypatch, capsys):
    monkeypatch.setattr(ppo, "evaluate", lambda *_: pytest.fail("it evaluates"))
    before = read_scalars(done)
    ppo.main(["--resume", str(done / "checkpoint.pt")])
    assert "2048 of 2048 steps done\n" in capsys.readouterr().out
    assert read_scalars(done) == before


def test_a_resume_with_fewer_steps_than_were_done_is_at_its_end(tmp_path, capsys):
    """Its last policy is scored, and nothing is trained."""
    path = start_and_kill(ppo, 3, tmp_path, SHORT)
    step = read_progress(path)["step"]
    capsys.readouterr()
    ppo.main(["--resume", str(path / "checkpoint.pt"), "--total-timesteps", str(step // 2)])
    assert f", {step // 2} of {step // 2} steps done\n" in capsys.readouterr().out
    progress = read_progress(path)
    assert (progress["iteration"], progress["step"]) == (3, step) and progress["last_score"] is not None


def test_a_checkpoint_of_another_version_is_refused(tmp_path, capsys):
    """Whose settings or progress have a name that this version does not know."""
    path = start_and_kill(ppo, 1, tmp_path, SHORT)
    for key in ("args", "progress"):
        checkpoint = load(path / "checkpoint.pt")
        checkpoint[key]["other"] = 1
        torch.save(checkpoint, path / "other.pt")
        for flag in ("--resume", "--evaluate"):
            line = fail_with(capsys, ppo.main, [flag, str(path / "other.pt")])
            assert "other.pt: missing, or not a checkpoint of this version of the script" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_ten_times_a_second_or_in_a_file_twice_a_minute(is_terminal, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda number: is_terminal and number == 2)
    monkeypatch.setattr(ppo, "tqdm", lambda **options: options)
    assert ppo.make_bar("steps")["mininterval"] == (0.1 if is_terminal else 30)


def test_each_line_is_written_at_once(monkeypatch):
    """Also into a pipe or a file, where a user waits for the first line of a long run."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file))
    for i in range(1, 3):
        ppo.print_line("line")
        assert file.getvalue() == b"line\n" * i


def test_the_last_line_tells_the_best_score_from_the_last_one(tmp_path, monkeypatch):
    scores = iter([7.0, 5.0])
    monkeypatch.setattr(ppo, "evaluate", lambda *_: SCORE | {"eval/episodic_return": next(scores)})
    out = run_main(ppo, tmp_path, SHORT, "--eval-interval 3").out
    assert out.endswith(": episodic return of best.pt 7, of the last policy 5\n")


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
    """And not closer without an evaluation. Here a rollout takes four minutes, and nothing else takes any."""
    saved, save, collect_rollout, clock = [], ppo.Run.save, ppo.collect_rollout, [1e9]

    def collect(*rest):
        clock[0] += 240
        return collect_rollout(*rest)

    fake = SimpleNamespace(time=lambda: clock[0], process_time=time.process_time, time_ns=time.time_ns)
    monkeypatch.setattr(ppo, "time", fake)
    monkeypatch.setattr(ppo, "collect_rollout", collect)
    monkeypatch.setattr(ppo.Run, "save", lambda run: saved.append(run.iteration) or save(run))
    path = run_quick("ppo", tmp_path, "--eval-episodes", 0, "--eval-interval", 10**6).path
    last = read_progress(path)["iteration"]
    assert saved == sorted({*range(0, last + 1, 3), last}) and last > 6


def test_ctrl_c_ends_with_the_command_that_resumes(tmp_path, monkeypatch, capsys):
    """As the last line, with exit code 130."""
    monkeypatch.setattr(ppo, "collect_rollout", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="130"):
        ppo.main([*SHORT.split(), "--run-dir", str(tmp_path)])
    command = f"python {ppo.__file__} --resume {find_run(tmp_path)}/checkpoint.pt"
    assert capsys.readouterr().err.endswith(f": interrupted; to resume: {command}\n")


def test_a_resume_of_best_says_what_it_does_before_it_does_it(done, monkeypatch, capsys):
    before = (done / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(ppo, "collect_rollout", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(done / "best.pt")
    assert "Continues from best.pt; next states go to checkpoint.pt\n" in capsys.readouterr().out
    assert (done / "checkpoint.pt").read_bytes() == before


def test_a_seed_seeds_all_generators_and_each_stream_is_another():
    """The seed has room for the number of an environment below 2 ** 31."""
    draw = {}
    for stream in ((1,), (1, 1), (1, 2), (2, 1), (1, 1, 3), (2**40, 1)):
        seed = ppo.seed_everything(*stream)
        draw[stream] = seed, random.random(), np.random.rand(), torch.rand(1).item()
        assert ppo.seed_everything(*stream) == seed < 2**30
        assert draw[stream][1:] == (random.random(), np.random.rand(), torch.rand(1).item())
    assert all(len({*column}) == len(draw) for column in zip(*draw.values(), strict=True))


def test_the_log_holds_all_settings_as_they_were_given(tmp_path):
    path = run_main(ppo, tmp_path, SHORT, "--gamma 0.97 --norm-obs").path
    events = EventAccumulator(str(path)).Reload()
    (text,) = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val
    rows = dict(line.strip("|").split("|") for line in text.decode().splitlines()[2:])
    assert rows == {name: str(value) for name, value in load(path / "checkpoint.pt")["args"].items()}
    assert (rows["gamma"], rows["norm_obs"], rows["run_dir"]) == ("0.97", "True", str(tmp_path))


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_deterministic_kernels_are_those_of_the_flag(is_deterministic, tmp_path):
    flag = "" if is_deterministic else "--no-torch-deterministic"
    with torch.backends.cudnn.flags(deterministic=not is_deterministic):
        run_main(ppo, tmp_path, SHORT, flag)
        assert torch.backends.cudnn.deterministic is is_deterministic


def test_one_thread_unless_the_shell_sets_their_number(tmp_path, monkeypatch):
    """By OMP_NUM_THREADS, which torch has read itself."""
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run_main(ppo, tmp_path / "set", SHORT)
    assert counts == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    run_main(ppo, tmp_path / "unset", SHORT)
    assert counts == [1]


def test_numbers_are_printed_with_five_digits_or_all_before_the_point(capsys):
    numbers = [272121, 3.8512, 1e-7, -123456.7, 99999.4, 0.0, 0.123456, -1200.25, 3e20]
    ppo.print_scores({f"eval/{i}": x for i, x in enumerate(numbers)})
    shown = ["272121", "3.8512", "1e-07", "-123457", "99999", "0", "0.12346", "-1200.2", "3e+20"]
    assert capsys.readouterr().out.splitlines() == [f"eval/{i}: {x}" for i, x in enumerate(shown)]


def test_a_number_that_is_rounded_to_a_hundred_thousand_has_all_its_digits():
    assert [ppo.show_number(x) for x in (99999.6, -99999.6)] == ["100000", "-100000"]


def test_the_last_line_shows_large_scores_with_all_their_digits(tmp_path, monkeypatch, capsys):
    """And so does the bar."""
    scores = SCORE | {"eval/episodic_return": 272121.4}
    monkeypatch.setattr(ppo, "evaluate", lambda *_: scores)
    ppo.main([*SHORT.split(), "--run-dir", str(tmp_path)])
    out, err = capsys.readouterr()
    assert ", episodic return 272121]" in err
    assert out.endswith(": episodic return of best.pt 272121, of the last policy 272121\n")


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


def test_modules_beside_the_script_are_found_with_safe_path(tmp_path):
    """`python -P` leaves the folder of the script out; the task is found there, and in the current folder."""
    folder = copy_script("ppo", tmp_path / "copy")
    (folder / "beside.py").write_text((ROOT / "tests" / "probe_envs.py").read_text())
    (tmp_path / "current.py").write_text("import beside")
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    flags = [*SHORT.split(), "--env-id", "current:Fixed-v0"]
    run = start(sys.executable, "-P", folder / "ppo.py", *flags, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr


def test_a_closed_stderr_and_a_reader_that_is_gone_stop_nothing(tmp_path):
    command = f"set -o pipefail; {sys.executable} algos/ppo.py {SHORT} --run-dir {tmp_path} 2>&- | head -n 1"
    run = start("bash", "-c", command, cwd=ROOT, env=ENVIRONMENT)
    assert run.returncode == 0 and "environments, cpu" in run.stdout
    assert read_progress(find_run(tmp_path))["last_score"] is not None
