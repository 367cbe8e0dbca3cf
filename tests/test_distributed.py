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
import tyro
from conftest import ENVIRONMENT, ROOT, read_result
from test_contract import CASES, assert_same_weights, each_script, load
from torch.distributed.run import get_args_parser

PAGE = ROOT / "docs" / "scaling.md"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TWO_RANKS = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(ROOT / "tests" / "ranks.py"))

TOTALS = {
    "alphazero_go": "num-games pool-size batch-size",
    "ppo": "num-envs",
    "ppo_change_detection": "num-envs batch-size",
    "r2d2_lstm": "num-envs batch-size",
    "reinforce_tsp_attention": "batch-size",
}


def launch(*command):
    """What a command prints, which ends within four minutes with exit code 0; else none of its processes goes on."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(list(map(str, command)), env=ENVIRONMENT, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    return output


def load_ranks(folder):
    return [load(folder / f"{rank}.pt") for rank in range(2)]


@each_script
def test_two_processes_train_as_one(script, tmp_path):
    """One run folder, one log, equal weights, other random numbers in each, an exact resume, and one in one process."""
    case, found = CASES[script], {}
    flags = [*case.short.split(), *case.constant.split(), "--checkpoint-interval", "0"]
    double = [case.length, case.double]
    for name in ("half", "whole", "resumed"):
        more = [] if name == "half" else double
        more = [*more, "--resume", found["half"][0] / "checkpoint.pt"] if name == "resumed" else more
        output = launch(*TWO_RANKS, "run", script, tmp_path, *flags, "--run-dir", tmp_path / name, *more)
        assert output.count("run folder") == 2  # one process talks: at the start and in the summary
        assert len(list((tmp_path / name).iterdir())) == 1
        ranks, found[name] = load_ranks(tmp_path), read_result(tmp_path / name)
        torch.testing.assert_close(*ranks, rtol=0, atol=0)
        saved = load(found[name][0] / "checkpoint.pt")["agent"]
        assert all(torch.equal(x, saved[key]) for key, x in ranks[1]["agent"].items())
    half, whole, resumed = (path for path, _ in found.values())
    states = load(half / "checkpoint.pt")["ranks"]
    assert len(states) == 2 and not torch.equal(states[0]["torch_rng"], states[1]["torch_rng"])
    assert_same_weights(whole, resumed)
    assert_same_weights(half, whole, same=False)
    alone = ["--resume", half / "checkpoint.pt", *double, "--run-dir", tmp_path / "alone"]
    importlib.import_module(f"algos.{script}").main(list(map(str, alone)))
    path, result = read_result(tmp_path / "alone")
    assert result["env_steps"] > found["half"][1]["env_steps"] and len(load(path / "checkpoint.pt")["ranks"]) == 1


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """What the two ranks found, of all scripts at once: importing torch takes longer than the updates."""
    folder = tmp_path_factory.mktemp("updates")
    launch(*TWO_RANKS, "update", folder)
    return load_ranks(folder)


@each_script
def test_two_processes_update_as_one(script, updates):
    """The script's own update, on a whole batch in one process and on half of it in each of two."""
    torch.testing.assert_close(*(rank[script][1] for rank in updates), rtol=0, atol=0)
    for kind in ("gradients", "weights", "numbers"):
        alone, together = (found[kind] for found in updates[0][script])
        assert any(x.abs().max() > 0 for x in alone)
        for i, (x, y) in enumerate(zip(alone, together, strict=True)):
            atol = 1e-6 * max(1.0, x.abs().max().item())
            torch.testing.assert_close(y, x, rtol=1e-4, atol=atol, msg=lambda m, i=i, kind=kind: f"{kind} {i}: {m}")


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
    command = ["env", f"PATH={path}", *settings, "bash", ROOT / "docs" / "slurm" / "train.sbatch"]
    driver = [ROOT / "tests" / "ranks.py", "run", "ppo", tmp_path, *CASES["ppo"].short.split()]
    launch(*command, *driver, "--run-dir", tmp_path / "runs")
    torch.testing.assert_close(*load_ranks(tmp_path), rtol=0, atol=0)
    (path,) = (tmp_path / "runs").iterdir()
    assert (path / "result.json").exists() and len(load(path / "checkpoint.pt")["ranks"]) == 2


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
        monkeypatch.setattr(module, "WORLD_SIZE", int(launcher.nnodes.split(":")[0]) * int(launcher.nproc_per_node))
        module.check_args(tyro.cli(module.Args, args=launcher.training_script_args))
        assert program in ("torchrun", "sbatch") and (ROOT / launcher.training_script).exists()
    assert {Path(word).stem for words in commands for word in words if word.endswith(".py")} == set(CASES)


@each_script
def test_totals_over_all_processes_must_divide_among_them(script, monkeypatch, capsys):
    module = importlib.import_module(f"algos.{script}")
    monkeypatch.setattr(module, "WORLD_SIZE", 2)
    for name in TOTALS[script].split():
        odd = getattr(module.Args, name.replace("-", "_")) + 1
        with pytest.raises(SystemExit) as error:
            module.main([f"--{name}", str(odd)])
        assert error.value.code == 2
        assert f"--{name} {odd} does not divide among 2 processes" in capsys.readouterr().err
        (row,) = re.findall(rf"^\| `{script}` \|([^|]*--[^|]*)\|", PAGE.read_text(), re.M)
        assert f"`--{name}`" in row
