"""Several processes: each script's run, with what each rank holds, and its update, shared by two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ENVIRONMENT, ROOT, start_process, wait_for
from scripts import CASES, check_no_step_is_logged_twice, each_script, load, read_progress


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


def run_job(folder, flags, srun, **env):
    """Run docs/slurm/train.sbatch as Slurm does, with stand-ins for commands; runs go to `folder`/runs."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"scontrol": "echo localhost; echo node2", "srun": srun}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": str(os.getpid())}
    job |= {"SLURM_JOB_NODELIST": "node[1-2]", "RUNS": str(folder / "runs"), "PATH": path, **env}
    command = ["bash", "docs/slurm/train.sbatch", "algos/ppo.py", "--no-cuda", *flags.split()]
    options = {"cwd": ROOT, "env": ENVIRONMENT | job, "capture_output": True, "text": True}
    return subprocess.run(command, timeout=240, **options)


@pytest.mark.slow
def test_two_nodes_under_slurm(tmp_path):
    """`srun` starts two launchers here, which meet: one of their two processes talks.

    SIGTERM ends the first start after its first evaluation, and the second start resumes its run.
    """
    preempt = "until ls $RUNS/*/*/best.pt > /dev/null 2>&1; do sleep 0.1; done; kill $first $second"
    srun = '"$@" & first=$!; "$@" & second=$!; eval "$PREEMPT"; '
    srun += "wait $first; code=$?; wait $second; exit $((code | $?))"
    flags = f"{CASES['ppo'].quick} --total-timesteps"
    run = run_job(tmp_path, f"{flags} 9000000", srun, PREEMPT=preempt)
    (path,) = tmp_path.glob("runs/job-*/*")
    steps = read_progress(path)["step"]
    assert run.returncode == 1 and run.stdout.count(f"{path}: ") == 1 and steps > 0, run.stderr
    run = run_job(tmp_path, f"{flags} {steps + 1024}", srun)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"{path}: ") == 2 and [*tmp_path.glob("runs/job-*/*")] == [path]
    assert read_progress(path)["step"] >= steps + 1024
    check_no_step_is_logged_twice(path)
