"""Several processes: each script under torchrun, with what each rank holds; and its update, alone and shared by two."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, start_process, wait_for
from test_contract import CASES, SCRIPTS, check_no_step_is_logged_twice, each_script, load
from torch.distributed.run import get_args_parser

PAGE = ROOT / "docs" / "scaling.md"
RANKS = ROOT / "tests" / "ranks.py"

# Flags of runs that keep statistics, if a script has any
WITH_STATISTICS = {
    "ppo": "--env-id Pendulum-v1 --norm-obs",
    "r2d2_lstm": "--env-id probe_envs:Ledger-v0",
    "reinforce_tsp_attention": "--baseline rollout --baseline-instances 20 --baseline-level 0.5",
    "alphazero_go": "--pretrain-value-epochs 1 --pretrain-search-epochs 1",
    "ppo_change_detection": "",
}


def launch(*command, cwd=None):
    """Run a command that must end with exit code 0 within four minutes; return what it prints."""
    environment = ENVIRONMENT | {"WANDB_MODE": "offline"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = list(map(str, command))
    process = subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    return output


def start_two_ranks(folder, *words):
    """Run two processes that begin as torchrun's do, but sooner; return what they print."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    logs = [folder / f"log_{rank}" for rank in range(2)]
    ranks = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    exit_codes = wait_for([start_process(log, env, *words) for log, env in zip(logs, ranks, strict=True)])
    output = "".join(log.read_text() for log in logs)
    assert exit_codes == [0, 0], output
    return output


def load_ranks(folder, name):
    return [load(folder / f"{name}_{rank}.pt") for rank in range(2)]


@each_script
def test_two_processes_train_as_one(script, tmp_path):
    """Both hold equal weights and statistics and other random numbers, also in a resumed run.

    An update that two processes share is that of one on all rows. If a script allows it, their parts differ in size.
    """
    case = CASES[script]
    flags = f"{case.quick} {case.length} {case.more} {WITH_STATISTICS[script]} --eval-episodes 0"
    output = start_two_ranks(tmp_path, "share", script, tmp_path, flags, f"{case.length} {2 * case.more}")
    assert output.count("not evaluated") == 2  # one process talks, in both runs
    assert len(list((tmp_path / "whole").iterdir())) == 1
    iterations = []
    for name in ("whole", "resumed"):
        first, second = load_ranks(tmp_path, name)
        (path,) = tmp_path.glob(f"{name}/**/checkpoint.pt")
        for other in (second, load(path)):
            torch.testing.assert_close(first["agent"], other["agent"], rtol=0, atol=0)
        assert not torch.equal(first["rng"], second["rng"])
        iterations.append(load(path)["progress"][0])
    assert iterations[0] < iterations[1]
    check_no_step_is_logged_twice(tmp_path / "resumed")
    update, other = load_ranks(tmp_path, "update")
    torch.testing.assert_close(update[1], other[1], rtol=0, atol=0)
    for kind in ("gradients", "weights", "numbers"):
        alone, together = (found[kind] for found in update)
        assert any(x.abs().max() > 0 for x in alone)
        for i, (x, y) in enumerate(zip(alone, together, strict=True)):
            atol = 1e-6 * max(1.0, x.abs().max().item())
            torch.testing.assert_close(y, x, rtol=1e-4, atol=atol, msg=f"{kind} {i}: {x} {y}")


@pytest.mark.slow
def test_two_nodes_under_slurm(tmp_path):
    """In docs/slurm/train.sbatch, `srun` starts two launchers here, which meet at the address that they are given."""
    stand_ins = {"scontrol": "echo localhost; echo node2", "srun": '"$@" & other=$!; "$@" && wait $other'}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = f"SLURM_NNODES=2 SLURM_CPUS_PER_TASK=1 SLURM_JOB_ID={os.getpid()} SLURM_JOB_NODELIST=node[1-2]"
    batch = ROOT / "docs" / "slurm" / "train.sbatch"
    launch("env", f"PATH={path}", *job.split(), "bash", batch, RANKS, "meet", tmp_path)
    assert load_ranks(tmp_path, "meet") == [2, 2]


def test_the_commands_of_the_page_are_real(monkeypatch):
    """The programs, scripts and flags of docs/scaling.md exist, and totals are divisible by the number of processes."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    commands = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines()]
    for program, *words in commands:
        if program == "sbatch":
            batch, *command = words
            assert (ROOT / batch).exists()
            words = ["--nnodes", "2", "--nproc-per-node", "4", *command]
        launcher = get_args_parser().parse_args(words)
        module = importlib.import_module(f"algos.{Path(launcher.training_script).stem}")
        size = int(launcher.nnodes.split(":")[0]) * int(launcher.nproc_per_node)
        monkeypatch.setattr(module, "WORLD_SIZE", size)
        monkeypatch.setattr(module, "train", lambda *args: None)
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {"args": {}})  # what --resume names
        module.main(launcher.training_script_args)
        assert program in ("torchrun", "sbatch") and (ROOT / launcher.training_script).exists()
    named = {Path(word).stem for words in commands for word in words if word.endswith(".py")}
    assert named == {*SCRIPTS}
