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
from conftest import ENVIRONMENT, ROOT, read_scalars, start_process, wait_for
from test_contract import CASES, SCRIPTS, each_script, load
from torch.distributed.run import get_args_parser

PAGE = ROOT / "docs" / "scaling.md"
RANKS = ROOT / "tests" / "ranks.py"
TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

WITH_STATISTICS = {
    "ppo": "--env-id Pendulum-v1 --norm-obs --total-timesteps 1024",
    "r2d2_lstm": "--env-id probe_envs:Ledger-v0 --total-timesteps 1024",
    "reinforce_tsp_attention": "--num-epochs 4 --baseline rollout --baseline-instances 20 --baseline-level 0.5",
    "alphazero_go": "--num-epochs 4 --pretrain-value-epochs 1 --pretrain-search-epochs 1",
    "ppo_change_detection": "--ppo-iterations 4",
}  # flags of runs of half the length, that keep some


def launch(*command, cwd=None):
    """What a command prints, which ends within four minutes with exit code 0; else none of its processes goes on."""
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
    """What two processes print, which begin as torchrun's do, but sooner."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    logs = [folder / f"log_{rank}" for rank in range(2)]
    ranks = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    exit_codes = wait_for([start_process(log, env, *words) for log, env in zip(logs, ranks, strict=True)])
    output = "".join(log.read_text() for log in logs)
    assert exit_codes == [0, 0], output
    return output


def load_ranks(folder, name):
    return [load(folder / f"{name}_{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_torchrun_and_wandb_offline(tmp_path):
    """One process writes to Weights & Biases."""
    pytest.importorskip("wandb")
    case, script = CASES["ppo_change_detection"], ROOT / "algos" / "ppo_change_detection.py"
    output = launch(*TWO_RANKS, script, *case.quick.split(), "--no-cuda", "--track", cwd=tmp_path)
    assert output.count("return of best.pt") == 1
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert all(tag.encode() in content for tag in case.tags)


@each_script
def test_two_processes_train_as_one(script, tmp_path):
    """Equal weights and statistics in both, other random numbers, also in a resumed run; an update is the joint one.

    If a script allows it, the two parts of a batch have different numbers of rows.
    """
    flags = f"{CASES[script].quick} {WITH_STATISTICS[script]} --eval-episodes 0"
    output = start_two_ranks(tmp_path, "share", script, tmp_path, flags, CASES[script].resume)
    assert output.count("not evaluated") == 2  # one process talks
    assert len(list((tmp_path / "whole").iterdir())) == 1
    ends = []
    for name in ("whole", "resumed"):
        first, second = load_ranks(tmp_path, name)
        torch.testing.assert_close(first["agent"], second["agent"], rtol=0, atol=0)
        assert not torch.equal(first["rng"], second["rng"])
        (path,) = tmp_path.glob(f"{name}/**/checkpoint.pt")
        ends.append(load(path))
        torch.testing.assert_close(ends[-1]["agent"], second["agent"], rtol=0, atol=0)
    assert ends[0]["progress"][0] < ends[1]["progress"][0]
    for tag, values in read_scalars(tmp_path / "resumed").items():
        steps = [step for step, _ in values]
        assert len(set(steps)) == len(steps), tag
    compare_updates(load_ranks(tmp_path, "update"))


def compare_updates(update):
    """Two processes have left the same, and what one did alone."""
    torch.testing.assert_close(*(found[1] for found in update), rtol=0, atol=0)
    for kind in ("gradients", "weights", "numbers"):
        alone, together = (found[kind] for found in update[0])
        assert any(x.abs().max() > 0 for x in alone)
        for i, (x, y) in enumerate(zip(alone, together, strict=True)):
            atol = 1e-6 * max(1.0, x.abs().max().item())
            torch.testing.assert_close(
                y, x, rtol=1e-4, atol=atol, msg=lambda m, i=i, kind=kind: f"{kind} {i}: {m}"
            )


@pytest.mark.slow
def test_two_nodes_under_slurm(tmp_path):
    """docs/slurm/train.sbatch, where `srun` starts two launchers here: they meet at the address that they are given."""
    stand_ins = {"scontrol": "echo localhost; echo node2", "srun": '"$@" & other=$!; "$@" && wait $other'}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {
        "SLURM_NNODES": 2,
        "SLURM_CPUS_PER_TASK": 1,
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_JOB_NODELIST": "node[1-2]",
    }
    settings = [f"{name}={value}" for name, value in slurm.items()]
    launch(
        "env",
        f"PATH={path}",
        *settings,
        "bash",
        ROOT / "docs" / "slurm" / "train.sbatch",
        RANKS,
        "meet",
        tmp_path,
    )
    assert load_ranks(tmp_path, "meet") == [2, 2]


def test_the_commands_of_the_page_are_real(monkeypatch):
    """Of docs/scaling.md: torchrun, its flags, the scripts and theirs, and that totals divide among the processes."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    commands = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines()]
    for program, *words in commands:
        if program == "sbatch":
            batch, *command = words
            assert (ROOT / batch).exists()
            words = ["--nnodes", "2", "--nproc-per-node", "4", *command]
        launcher = get_args_parser().parse_args(words)
        module = importlib.import_module(f"algos.{Path(launcher.training_script).stem}")
        monkeypatch.setattr(
            module, "WORLD_SIZE", int(launcher.nnodes.split(":")[0]) * int(launcher.nproc_per_node)
        )
        monkeypatch.setattr(module, "train", lambda *args: None)
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {"args": {}})  # what --resume names
        module.main(launcher.training_script_args)
        assert program in ("torchrun", "sbatch") and (ROOT / launcher.training_script).exists()
    named = {Path(word).stem for words in commands for word in words if word.endswith(".py")}
    assert named == {*SCRIPTS}
