"""Several processes: each script under torchrun, with what each rank holds; and its update, alone and shared
by two."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import ENVIRONMENT, ROOT, start_process, wait_for
from scripts import CASES, SCRIPTS, check_no_step_is_logged_twice, each_script, load
from torch.distributed.run import get_args_parser

PAGE = ROOT / "docs" / "scaling.md"


@each_script
def test_two_processes_train_as_one(script, tmp_path):
    """Both hold equal weights and statistics and other random numbers, also in a resumed run.

    An update that two processes share is that of one on all rows. If a script allows it, their parts differ
    in size.
    """
    case = CASES[script]
    flags = f"{case.quick} {case.length} {case.more} {case.statistics} --eval-episodes 0"
    words, logs = (script, tmp_path, flags, f"{case.length} {2 * case.more}"), [tmp_path / x for x in "01"]
    exit_codes = wait_for([start_process(log, "share", log.name, *words) for log in logs])
    output = "".join(log.read_text() for log in logs)
    assert exit_codes == [0, 0], output
    assert output.count("not evaluated") == 2  # one process talks, in both runs
    ranks, iterations = [load(tmp_path / f"kept_{rank}.pt") for rank in range(2)], []
    for name in ("whole", "resumed"):
        first, second = (kept[name] for kept in ranks)
        (path,) = tmp_path.glob(f"{name}/**/checkpoint.pt")
        for other in (second, load(path)):
            torch.testing.assert_close(first["agent"], other["agent"], rtol=0, atol=0)
        assert not torch.equal(first["rng"], second["rng"])
        iterations.append(load(path)["progress"]["iteration"])
    assert iterations[0] < iterations[1]
    check_no_step_is_logged_twice(tmp_path / "resumed")
    update, other = (kept["update"] for kept in ranks)
    torch.testing.assert_close(update[1], other[1], rtol=0, atol=0)
    for kind in ("gradients", "weights", "numbers"):
        alone, together = (found[kind] for found in update)
        assert any(x.abs().max() > 0 for x in alone)
        for i, (x, y) in enumerate(zip(alone, together, strict=True)):
            atol = 1e-6 * max(1.0, x.abs().max().item())
            torch.testing.assert_close(y, x, rtol=1e-4, atol=atol, msg=f"{kind} {i}: {x} {y}")


def run_job(folder, flags, job_id, stand_ins, **env):
    """Run docs/slurm/train.sbatch as Slurm does, with stand-ins for commands; runs go to `folder`/runs."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"scontrol": "echo localhost; echo node2", **stand_ins}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(job_id)}
    job |= {"SLURM_JOB_NODELIST": "node[1-2]", "RUNS": str(folder / "runs"), "PATH": path, **env}
    command = ["bash", "docs/slurm/train.sbatch", "algos/ppo.py", *flags.split()]
    options = {"cwd": ROOT, "env": ENVIRONMENT | job, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=240, **options)


def test_a_slurm_job_that_starts_again_resumes_its_run(tmp_path):
    """A job looks in the one folder of its id that has a checkpoint, and ends with the exit code of srun."""
    folder = tmp_path / "runs" / "job-7"
    make = f"mkdir -p {folder}/killed-early {folder}/run; touch {folder}/run/checkpoint.pt; exit 3"
    stand_ins = {"srun": f'echo "$*" | sed "s/.*ppo.py //"; {make}'}
    runs = [run_job(tmp_path, "--seed 2", job_id, stand_ins) for job_id in (7, 7, 8)]
    assert [run.returncode for run in runs] == [3, 3, 3], runs[0].stderr
    first, second, other = (run.stdout.strip() for run in runs)
    assert first == f"--seed 2 --run-dir {folder}"
    assert second == f"{first} --resume {folder}/run/checkpoint.pt"
    assert other == f"--seed 2 --run-dir {tmp_path}/runs/job-8"
    for flags in ("--run-dir x", "--run_dir=x"):
        run = run_job(tmp_path, flags, 9, stand_ins)
        assert run.returncode == 2 and "set RUNS=folder" in run.stderr and not run.stdout


@pytest.mark.parametrize("time", ["2026-01-02T03:04:05", "None"])
def test_a_preempted_slurm_job_waits_for_its_end(tmp_path, time):
    """If it ended by itself, Slurm would not start it again."""
    show = f'[ "$2" = hostnames ] || echo "PreemptEligibleTime=2026-01-02T03:04:05 PreemptTime={time}"'
    run = run_job(tmp_path, "", 7, {"scontrol": show, "srun": "kill $$", "sleep": 'echo "sleep $*"'})
    assert run.returncode == 128 + signal.SIGTERM
    assert run.stdout == ("" if time == "None" else "sleep infinity\n")


@pytest.mark.slow
def test_two_nodes_under_slurm(tmp_path):
    """`srun` starts two launchers here, which meet: one of their two processes talks.

    SIGTERM ends the first start after its first evaluation, and the second start resumes its run.
    """
    preempt = "until ls $RUNS/*/*/best.pt > /dev/null 2>&1; do sleep 0.1; done; kill $first $second"
    srun = '"$@" & first=$!; "$@" & second=$!; eval "$PREEMPT"; '
    srun += "wait $first; code=$?; wait $second; exit $((code | $?))"
    flags, job_id = f"--no-cuda {CASES['ppo'].quick} --total-timesteps", os.getpid()
    run = run_job(tmp_path, f"{flags} 9000000", job_id, {"srun": srun}, PREEMPT=preempt)
    (path,) = (tmp_path / "runs" / f"job-{job_id}").iterdir()
    steps = load(path / "checkpoint.pt")["progress"]["step"]
    assert run.returncode == 1 and run.stdout.count(f"{path}: ") == 1 and steps > 0, run.stderr
    run = run_job(tmp_path, f"{flags} {steps + 1024}", job_id, {"srun": srun})
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"{path}: ") == 2 and [*path.parent.iterdir()] == [path]
    assert load(path / "checkpoint.pt")["progress"]["step"] >= steps + 1024
    check_no_step_is_logged_twice(path)


def test_the_commands_of_the_page_are_real(monkeypatch):
    """The scripts take their flags, and totals are divisible by the number of processes."""
    empty = {"args": {}, "progress": {}}
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {**empty})  # what --resume names
    blocks, named = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S), set()
    for line in "".join(blocks).splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "sbatch":
            words = ["--nnodes", "2", "--nproc-per-node", "4", *words[1:]]
        launcher = get_args_parser().parse_args(words)
        script = Path(launcher.training_script)
        module = importlib.import_module(f"algos.{script.stem}")
        size = int(launcher.nnodes.split(":")[0]) * int(launcher.nproc_per_node)
        with mock.patch.multiple(module, WORLD_SIZE=size, train=lambda *args: None):
            module.main(launcher.training_script_args)
        assert program in ("torchrun", "sbatch") and (ROOT / script).exists()
        named.add(script.stem)
    assert named == {*SCRIPTS}
