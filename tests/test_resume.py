"""What a checkpoint holds, what a resumed run goes on with, and what a kill leaves."""

import io
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT, fail_with, read_scalars
from scripts import (
    CASES,
    Killed,
    call_main,
    each_script,
    edit_script,
    find_run,
    get_module,
    import_file,
    load,
    read_progress,
    run_main,
    start_and_kill,
)

from algos import ppo

# Eight iterations of 32 steps, in which no episode ends, and evaluations of two episodes of 200 steps
SHORT = "--env-id Pendulum-v1 --num-envs 4 --num-steps 8 --num-minibatches 1 --update-epochs 1"
SHORT += " --total-timesteps 256 --eval-episodes 2"


def resume(module, path, *flags):
    """Resume the run in folder `path`; return what it prints."""
    return call_main(module, " ".join(map(str, ("--resume", path / "checkpoint.pt", *flags))))[0]


# What checkpoints hold


def test_numbers_of_numpy_and_torch_in_the_progress_leave_a_checkpoint_that_loads(tmp_path):
    """As of a user's loop that counts with them. The checkpoint holds numbers of Python."""
    count = "        run.iteration += 1\n"
    changes = (
        ("        run.step += int(", "        run.step += np.int64("),
        (count, count.replace("1", "np.int64(1)") + "        run.cpu_seconds += torch.tensor(0.5)\n"),
        ("= args.eval_episodes * scores[", "= np.float32(args.eval_episodes) * scores["),
    )
    module = import_file("edited_copy", edit_script("ppo", tmp_path / "copy", *changes))
    path = start_and_kill(module, 3, tmp_path / "runs", SHORT, "--eval-interval 1")
    progress = read_progress(path)
    assert (progress["step"], progress["iteration"]) == (96, 3) and progress["cpu_seconds"] > 1.5
    assert {type(x) for x in progress.values() if x is not None} == {int, float, str, bool}
    resume(module, path)
    assert (read_progress(path)["step"], read_progress(path)["iteration"]) == (256, 8)
    assert load(path / "best.pt")["progress"]["eval_steps"] in range(400, 3201, 400)


@pytest.mark.parametrize(("script", "part"), [("r2d2_lstm", "replay"), ("alphazero_go", "games")])
def test_large_parts_are_in_checkpoint_pt_alone(script, part, tmp_path):
    path = run_main(get_module(script), tmp_path, CASES[script].quick).path
    assert part in load(path / "checkpoint.pt") and part not in load(path / "best.pt")


def test_without_checkpoint_replay_new_checkpoints_lack_the_replay(tmp_path):
    """From the start, or from a resume on, which still goes on with the replay that was saved before."""
    module, quick, sizes = get_module("r2d2_lstm"), CASES["r2d2_lstm"].quick, []
    path = start_and_kill(module, 3, tmp_path / "never", quick, "--no-checkpoint-replay")
    assert "replay" not in load(path / "checkpoint.pt")
    path = start_and_kill(module, 3, tmp_path / "later", quick)
    before = load(path / "checkpoint.pt")["replay"]["num_added"]
    collect_steps = module.collect_steps

    def watch(player, replay, args):
        sizes.append(int(replay.num_added))
        return collect_steps(player, replay, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "collect_steps", watch)
        resume(module, path, "--no-checkpoint-replay")
    assert "replay" not in load(path / "checkpoint.pt") and sizes[0] == before > 0
    out = resume(module, path, "--total-timesteps 2560")
    assert out.count("has no replay: begins with a new one\n") == 1
    assert "replay" not in load(path / "checkpoint.pt")  # as the flag is part of the settings
    resume(module, path, "--total-timesteps 3072 --checkpoint-replay")
    assert load(path / "checkpoint.pt")["replay"]["num_added"] > 0


@each_script
def test_a_part_that_a_checkpoint_lacks_begins_anew_and_one_line_names_it(script, tmp_path, capsys):
    """Each part in turn. Without the network, the checkpoint is refused."""
    module, case = get_module(script), CASES[script]
    path = start_and_kill(module, 3, tmp_path / "runs", case.quick, case.shared, "--eval-episodes 0")
    whole = load(path / "checkpoint.pt")
    names = [name for name in whole if name not in ("args", "progress", "agent")]
    assert "optimizer" in names
    for name in names:
        torch.save({key: x for key, x in whole.items() if key != name}, path / "checkpoint.pt")
        out = resume(module, path)
        assert [line for line in out.splitlines() if "has no" in line or "begins with" in line] == [
            f"{path / 'checkpoint.pt'} has no {name}: begins with a new one"
        ]
        after = load(path / "checkpoint.pt")
        assert after.keys() == whole.keys() and after["progress"]["iteration"] > 3
    torch.save({key: x for key, x in whole.items() if key != "agent"}, path / "checkpoint.pt")
    line = fail_with(capsys, module.main, ["--resume", str(path / "checkpoint.pt")])
    assert "checkpoint.pt: does not fit --" in line


def test_a_checkpoint_of_a_gpu_is_read_on_a_machine_without_one(tmp_path):
    """Its tensors say that they were on cuda:0."""
    path = start_and_kill(ppo, 3, tmp_path, SHORT)
    checkpoint = load(path / "checkpoint.pt")
    with mock.patch.object(torch.serialization, "location_tag", lambda storage: "cuda:0"):
        torch.save(checkpoint, path / "checkpoint.pt")
    with pytest.raises(RuntimeError, match="on a CUDA device"):
        load(path / "checkpoint.pt")
    resume(ppo, path)
    assert read_progress(path)["iteration"] == 8


# Evaluations and the bar


@pytest.mark.parametrize("killed_in", [6, 12])
def test_evaluations_of_a_resumed_run_come_where_those_of_a_whole_run_come(killed_in, tmp_path, monkeypatch):
    """At tenths, of 64 steps; one with 20 steps of its own is due at the second kill, but has to wait."""
    scores = {"eval/episodic_return": 1.0, "eval/episodic_return_std": 0.0, "eval/episodic_length": 10.0}
    monkeypatch.setattr(ppo, "evaluate", lambda *_: scores)
    flags = f"{SHORT} --num-steps 4 --total-timesteps 640"
    whole = run_main(ppo, tmp_path / "whole", flags).path
    path = start_and_kill(ppo, killed_in, tmp_path / "killed", flags)
    assert read_progress(path)["is_due"] == (killed_in == 12)
    resume(ppo, path)
    found = [[step for step, _ in read_scalars(x)["eval/episodic_return"]] for x in (path, whole)]
    assert found[0] == found[1] == [64, 128, 208, 304, 400, 512, 608, 640]


def test_the_bar_of_a_resumed_run_begins_where_the_run_was(tmp_path, capsys):
    path = start_and_kill(ppo, 3, tmp_path, SHORT)
    capsys.readouterr()
    ppo.main(["--resume", str(path / "checkpoint.pt")])
    out, err = capsys.readouterr()
    assert "4 environments, cpu, 96 of 256 steps done\nContinues from checkpoint.pt; next" in out
    assert re.findall(r"(\d+)/256 steps", err)[0] == "96"


# Random numbers


@pytest.mark.parametrize("script", ["ppo", "r2d2_lstm"])
def test_a_resumed_run_draws_the_numbers_of_its_iterations(script, tmp_path):
    """Those that the uninterrupted run draws, but begins with episodes that no other one began with.

    The other scripts resume exactly, which test_contract.py shows.
    """
    module, flags = get_module(script), f"{CASES[script].quick} --eval-episodes 0"
    whole = run_main(module, tmp_path / "whole", flags)
    path = start_and_kill(module, 3, tmp_path / "killed", flags)
    _, seeds = call_main(module, f"--resume {path / 'checkpoint.pt'}")
    # First those of weights and episodes, then one for each iteration; a seed may be read twice
    whole_seeds, seeds = ([*dict.fromkeys(x)] for x in (whole.seeds, seeds))
    assert len(whole_seeds) == 2 + read_progress(whole.path)["iteration"]
    assert len(seeds) == 2 + read_progress(path)["iteration"] - 3
    assert seeds[0] == whole_seeds[0] and seeds[1] != whole_seeds[1]
    num_iterations = min(len(seeds), len(whole_seeds) - 3) - 2
    assert seeds[2:][:num_iterations] == whole_seeds[5:][:num_iterations] and num_iterations > 3


# Kills


@each_script
@pytest.mark.parametrize(("name", "number"), [("checkpoint.pt", 2), ("checkpoint.pt", 3), ("best.pt", 1)])
def test_a_kill_in_the_middle_of_a_save_leaves_the_file_before(script, name, number, tmp_path, monkeypatch):
    """Whole, or none before the first best.pt; the run is then resumed to its end, and scored."""
    module, save, numbers = get_module(script), torch.save, itertools.count(1)

    def save_half(checkpoint, path):
        if not Path(path).name.startswith(name) or next(numbers) < number:
            save(checkpoint, path)
            return
        memory = io.BytesIO()
        save(checkpoint, memory)
        Path(path).write_bytes(memory.getvalue()[: memory.tell() // 2])
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(torch, "save", save_half)
        run_main(module, tmp_path, CASES[script].quick)
    path = find_run(tmp_path)
    assert read_progress(path)["iteration"] in {2: [0], 3: [2], 1: [2]}[number]
    assert not (path / "best.pt").exists() or load(path / "best.pt")["progress"]["iteration"] == 2
    resume(module, path)
    progress = read_progress(path)
    assert progress["last_score"] is not None
    assert load(path / "best.pt")["progress"]["best_score"] == progress["best_score"]


@pytest.mark.parametrize("tag", ["losses/", "eval/"])
def test_the_log_is_flushed_before_each_checkpoint(tag, tmp_path, monkeypatch):
    """A kill loses nothing from before the checkpoint that the run is resumed from."""
    replace, add_scalar, flush = os.replace, ppo.SummaryWriter.add_scalar, ppo.SummaryWriter.flush
    waiting, found = [], []

    def add_and_note(writer, name, *rest):
        waiting.append(name)
        add_scalar(writer, name, *rest)

    def flush_and_note(writer):
        flush(writer)
        waiting.clear()

    def replace_and_note(source, target):
        replace(source, target)
        if Path(target).name == "checkpoint.pt":
            found.append([name for name in waiting if name.startswith(tag)])

    monkeypatch.setattr(ppo.SummaryWriter, "add_scalar", add_and_note)
    monkeypatch.setattr(ppo.SummaryWriter, "flush", flush_and_note)
    monkeypatch.setattr(os, "replace", replace_and_note)
    run_main(ppo, tmp_path, SHORT, "--eval-interval 2")
    assert found == [[]] * 9  # at first, and twice in every second iteration


def test_cpu_seconds_of_a_resumed_run_are_added_to_those_before(tmp_path, monkeypatch):
    """Here a rollout takes one second, and nothing else takes any."""
    clock, collect_rollout = [100.0], ppo.collect_rollout

    def collect(*rest):
        clock[0] += 1
        return collect_rollout(*rest)

    fake = SimpleNamespace(time=time.time, process_time=lambda: clock[0], time_ns=time.time_ns)
    monkeypatch.setattr(ppo, "time", fake)
    monkeypatch.setattr(ppo, "collect_rollout", collect)
    path = start_and_kill(ppo, 3, tmp_path, SHORT)
    assert read_progress(path)["cpu_seconds"] == 3
    clock[0] = 5000.0  # of another process
    resume(ppo, path)
    seconds = [x for _, x in read_scalars(path)["charts/cpu_seconds"]]
    assert seconds == [1 + i for i in range(len(seconds))] and len(seconds) == 8
    assert read_progress(path)["cpu_seconds"] == len(seconds)


def test_a_resumed_run_is_the_same_run_at_weights_and_biases(tmp_path, monkeypatch):
    """By the name of its folder, which W&B takes as its id, and may resume."""
    options = []
    fake = SimpleNamespace(Error=OSError, init=lambda **x: options.append(x), finish=lambda: None)
    path = start_and_kill(ppo, 3, tmp_path, SHORT)

    def call(flags):
        monkeypatch.setitem(sys.modules, "wandb", fake)
        ppo.main(flags.split())

    for _ in range(2):
        call(f"--resume {path / 'checkpoint.pt'} --track")
    call(f"--track --run-dir {tmp_path / 'other'} {SHORT}")
    other = find_run(tmp_path / "other").name
    found = [(x["id"], x["name"], x["resume"], x["sync_tensorboard"]) for x in options]
    assert found == [(name, name, "allow", True) for name in (path.name, path.name, other)]


# Slurm


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Return a function that starts a Slurm job, and gives the script's flags that it would run.

    In the place of srun stands a program that writes its arguments into a file.
    """
    monkeypatch.chdir(tmp_path)
    programs = {"srun": 'printf "%s\\n" "$@" > srun.txt\n', "scontrol": "echo node1\n"}
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1"}

    def start_job(flags, **more):
        command = ["bash", ROOT / "docs" / "slurm" / "train.sbatch", "algos/ppo.py", *flags.split()]
        job = subprocess.run(command, env=os.environ | env | more, capture_output=True, text=True)
        if job.returncode:
            return job
        launcher, _, flags = (tmp_path / "srun.txt").read_text().partition("\nalgos/ppo.py\n")
        assert launcher.startswith("torchrun\n--nnodes\n2\n--nproc-per-node\n1\n")
        return " ".join(flags.split())

    return start_job


def test_a_slurm_job_that_starts_again_resumes_its_run_each_time(submit, tmp_path):
    """From its newest checkpoint, which is not best.pt; a job of another number begins a new run."""
    first = submit(SHORT)
    assert first == f"{SHORT} --run-dir runs/job-7"
    path = start_and_kill(ppo, 3, Path("runs/job-7"), SHORT, "--eval-interval 2")
    assert load(path / "best.pt")["progress"]["iteration"] == 2 < read_progress(path)["iteration"] == 3
    log = ppo.Run.log
    for iteration in (5, 8):
        again = submit(SHORT)
        assert again == f"{SHORT} --run-dir runs/job-7 --resume {path}/checkpoint.pt"

        def log_and_stop(run, scalars, iteration=iteration):
            run.saved_at = 0  # long ago, so that this iteration is saved
            log(run, scalars)
            if run.iteration == iteration:
                raise Killed

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(ppo.Run, "log", log_and_stop)
            call_main(ppo, again)
        assert read_progress(path)["iteration"] == iteration
    assert find_run(tmp_path / "runs" / "job-7").samefile(path)
    assert [step for step, _ in read_scalars(path)["losses/value_loss"]] == [32 * i for i in range(1, 9)]
    assert submit(SHORT, SLURM_JOB_ID="8") == f"{SHORT} --run-dir runs/job-8"
    assert submit(SHORT, RUNS="elsewhere") == f"{SHORT} --run-dir elsewhere/job-7"


def test_a_slurm_job_that_would_begin_anew_at_each_start_is_refused(submit):
    for flags in ("--run-dir mine", "--run_dir=mine", "--resume a/best.pt", "--resume=a/best.pt"):
        job = submit(f"{SHORT} {flags}")
        assert job.returncode == 2 and job.stderr.startswith("train.sbatch: ") and job.stderr.count("\n") == 1
    assert submit("--resume a/checkpoint.pt") == "--resume a/checkpoint.pt --run-dir runs/job-7"


def test_a_copy_of_best_pt_is_resumed_in_a_folder_of_its_own(tmp_path):
    """As the page on Slurm says. The run that it comes from stays, and the first score counts as the best."""
    path = start_and_kill(ppo, 4, tmp_path / "runs", SHORT, "--eval-interval 2")
    iteration = load(path / "best.pt")["progress"]["iteration"]
    (tmp_path / "new").mkdir()
    shutil.copy(path / "best.pt", tmp_path / "new" / "checkpoint.pt")
    before = {file: file.read_bytes() for file in path.iterdir()}
    resume(ppo, tmp_path / "new")
    assert {file: file.read_bytes() for file in path.iterdir()} == before
    assert len(read_scalars(tmp_path / "new")["losses/value_loss"]) == 8 - iteration
    best, last = (load(tmp_path / "new" / name)["progress"] for name in ("best.pt", "checkpoint.pt"))
    assert best["iteration"] > iteration and last["iteration"] == 8


# best.pt


def watch_best(module, patch):
    """Record each score with the best one after it."""
    found, keep = [], module.Run.keep

    def record(run, *args, **options):
        keep(run, *args, **options)
        found.append((run.last_score, run.best_score))

    patch.setattr(module.Run, "keep", record)
    return found


LUCKY = "--env-id probe_envs:Noise-v0 --seed 3 --num-envs 8 --eval-episodes 1 --eval-interval 1"
LUCK = {
    "ppo": f"{LUCKY} --num-steps 8 --total-timesteps 128",
    "r2d2_lstm": f"{LUCKY} --total-timesteps 256 --learning-starts 64 --num-steps 16",
}


@pytest.mark.parametrize("flags", ["--eval-episodes 40", "--seed 4"])
@pytest.mark.parametrize("script", LUCK)
def test_a_score_of_one_lucky_episode_is_no_longer_the_one_to_beat(script, flags, tmp_path, monkeypatch):
    """After a resume with more episodes or another seed, the first score counts as the best."""
    module = get_module(script)
    path = run_main(module, tmp_path, LUCK[script]).path
    lucky = load(path / "best.pt")["progress"]["best_score"]
    found = watch_best(module, monkeypatch)
    resume(module, path, flags, "--eval-interval 4 --total-timesteps 1024")
    scores = [score for score, _ in found]
    assert [best for _, best in found] == [*itertools.accumulate(scores, max)] and len(scores) > 2
    assert lucky > max(scores) + 0.3
    assert (
        load(path / "best.pt")["progress"]["best_score"] == max(scores) == read_progress(path)["best_score"]
    )


@each_script
def test_another_task_seed_or_number_of_episodes_is_another_ruler(script, tmp_path, monkeypatch):
    """The score to beat, which no policy reaches, is forgotten, and the next score is the best.

    With the same settings it stays. Go's networks lose all matches here.
    """
    module, case = get_module(script), CASES[script]
    killed = start_and_kill(module, 3, tmp_path / "runs", case.quick)
    best = load(killed / "best.pt")
    best["progress"]["best_score"] = unbeatable = -1e4 if script == "reinforce_tsp_attention" else 1e4
    torch.save(best, killed / "best.pt")
    found = watch_best(module, monkeypatch)
    if script == "alphazero_go":
        lost = {"eval/win_rate_best": 0.0, "eval/win_rate": 0.0, "eval/moves": 4}
        monkeypatch.setattr(module, "evaluate", lambda *_: lost)
    for i, flags in enumerate(("", "--eval-episodes 3", "--seed 9", *case.other_tasks)):
        path = shutil.copytree(killed, tmp_path / str(i))
        found.clear()
        resume(module, path, flags)
        (first, first_best), *_, (_, last_best) = found
        assert first_best == last_best == unbeatable if not flags else first == first_best != unbeatable
        assert load(path / "best.pt")["progress"]["best_score"] == last_best


def test_a_score_of_another_name_counts_as_the_first(tmp_path, monkeypatch):
    """As after an edit of the line with run.keep. Episodes are 5 steps long, and their returns are larger."""
    flags = "--env-id probe_envs:Fixed-v0 --eval-interval 1"
    path = start_and_kill(ppo, 3, tmp_path / "runs", SHORT, flags)
    progress = read_progress(path)
    assert progress["best_score"] > 5 and progress["score_name"] == "eval/episodic_return"
    name = 'run.keep(scores, "eval/episodic_return"'
    copy = edit_script("ppo", tmp_path / "copy", (name, name.replace("return", "length")))
    module = import_file("edited_copy", copy)
    found = watch_best(module, monkeypatch)
    out = resume(module, path)
    assert found == [(5.0, 5.0)] * len(found) and len(found) > 3
    best = load(path / "best.pt")["progress"]
    assert (best["best_score"], best["score_name"]) == (5.0, "eval/episodic_length")
    assert best["iteration"] == read_progress(path)["iteration"]  # of equal scores the last
    assert "episodic length of best.pt 5, of the last policy 5\n" in out


def test_a_score_is_better_if_it_is_lower_where_the_loop_says_so(tmp_path, monkeypatch):
    """By operator.le, also against the best.pt of a resumed run."""
    change = '"eval/episodic_return", eval_steps', '"eval/episodic_return", eval_steps, operator.le'
    module = import_file("edited_copy", edit_script("ppo", tmp_path / "copy", change))
    scores = iter([7.0, 8.0, 5.0, 6.0, 5.0, 9.0, 4.0, 4.5])
    rest = {"eval/episodic_length": 1.0, "eval/episodic_return_std": 0.0}
    monkeypatch.setattr(module, "evaluate", lambda *_: rest | {"eval/episodic_return": next(scores)})
    found = watch_best(module, monkeypatch)
    path = start_and_kill(module, 4, tmp_path / "runs", SHORT, "--eval-interval 1")
    assert found == [(7.0, 7.0), (8.0, 7.0), (5.0, 5.0)]
    resume(module, path)
    assert found[3:] == [(6.0, 5.0), (5.0, 5.0), (9.0, 5.0), (4.0, 4.0), (4.5, 4.0)]
    assert load(path / "best.pt")["progress"]["iteration"] == 7
