"""Several processes: each script under torchrun, with what each rank holds; and its update, alone and shared by two."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from conftest import ENVIRONMENT, ROOT, read_result, read_scalars, start_process, wait_for
from test_contract import CASES as MOVED_CASES
from test_contract import MOVED, load
from test_old_contract import CASES, assert_no_step_twice, run_main
from test_old_contract import each_script as each_old_script
from torch.distributed.run import get_args_parser

PAGE = ROOT / "docs" / "scaling.md"
RANKS = ROOT / "tests" / "ranks.py"
TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS)

WITH_STATISTICS = {
    "ppo": "--env-id Pendulum-v1 --norm-obs --total-timesteps 1024",
    "r2d2_lstm": "--env-id probe_envs:Ledger-v0 --total-timesteps 1024",
    "reinforce_tsp_attention": "--num-epochs 4 --baseline rollout --baseline-instances 20 --baseline-level 0.5",
    "alphazero_go": "--num-epochs 4 --pretrain-value-epochs 1 --pretrain-search-epochs 1",
}  # flags of runs of half the length, that keep some
STATISTICS = re.compile(r"running_|num_batches_tracked")  # which are gathered whatever the rate
MOVES_NOTHING = {
    "ppo_change_detection": "--supervised-lr 1e-30",
}  # beside the flags of all

TOTALS = {
    "ppo_change_detection": "num-envs batch-size",
}


def launch(*command):
    """What a command prints, which ends within four minutes with exit code 0; else none of its processes goes on."""
    environment = ENVIRONMENT | {"WANDB_MODE": "offline"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True, **pipes)
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


@pytest.fixture(scope="module")
def ranks(script, tmp_path_factory):
    """What two processes do and hold: in a run, in one that goes on from half-way, and in an update."""
    out = tmp_path_factory.mktemp("ranks")
    # They begin new episodes: with a learning rate that moves nothing, the weights show what went on
    more = f"--learning-rate 1e-30 --no-anneal-lr {MOVES_NOTHING[script]}"
    output = start_two_ranks(out, "train", script, out, CASES[script].short, more)
    path, result = read_result(out / "whole")
    held = {name: load_ranks(out, name) for name in ("whole", "resumed", "update")}
    return SimpleNamespace(out=out, output=output, path=path, result=result, **held)


@each_old_script
def test_two_processes_train_as_one(script, ranks):
    """One run folder, one log, equal weights, other random numbers in each; so in the run that goes on, too."""
    assert (
        ranks.output.count("run folder") == 4
    )  # at the start and in the summary of two runs: one process talks
    assert list((ranks.out / "whole").iterdir()) == [ranks.path]
    assert len(list(ranks.path.glob("events*"))) == 1
    for name, path in (("whole", ranks.path), ("resumed", ranks.out / "resumed")):
        first, second = getattr(ranks, name)
        torch.testing.assert_close(first["held"], second["held"], rtol=0, atol=0)
        assert not torch.equal(first["torch_rng"], second["torch_rng"])
        saved = load(path / "checkpoint.pt")["agent"]
        assert all(torch.equal(x, saved[key]) for key, x in second["held"]["agent"].items())


@each_old_script
def test_a_run_of_two_processes_goes_on(script, ranks):
    """Weights, optimizer and counters go on. In one process too."""
    half, whole, resumed = (
        load(p / "checkpoint.pt") for p in (ranks.out / "half", ranks.path, ranks.out / "resumed")
    )
    assert half["iteration"] < whole["iteration"] == resumed["iteration"]
    assert_no_step_twice(read_scalars(ranks.out / "resumed"))
    weights = [{k: x for k, x in end["agent"].items() if not STATISTICS.search(k)} for end in (resumed, half)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)
    steps = [{float(state["step"]) for state in x["optimizer"]["state"].values()} for x in (whole, resumed)]
    num_stages = {"ppo_change_detection": 4}.get(script, 1)  # that train other parts of the network
    assert len(steps[0]) == len(steps[1]) == num_stages
    assert steps[0] == steps[1]
    alone = ranks.out / "half"
    run_main(script, "--resume", alone / "checkpoint.pt")
    assert load(alone / "checkpoint.pt")["iteration"] == whole["iteration"]
    assert read_scalars(alone).keys() == read_scalars(ranks.path).keys()


@pytest.mark.slow
def test_torchrun_and_wandb_offline(tmp_path):
    """torchrun itself, where the run that went on was logged to Weights & Biases, by one process."""
    script = "ppo_change_detection"
    more = f"--track --learning-rate 1e-30 {MOVES_NOTHING[script]}"
    output = launch(*TWO_RANKS, "train", script, tmp_path, CASES[script].short, more)
    assert output.count("run folder") == 4
    (log,) = (tmp_path / "resumed" / "wandb").glob("offline-run-*/run-*.wandb")
    content = log.read_bytes()
    assert all(tag.encode() in content for tag in CASES[script].tags)


@pytest.mark.parametrize("script", MOVED, indirect=True)
def test_two_processes_of_a_script_that_has_moved(script, tmp_path):
    """Equal weights and statistics in both, other random numbers, also in a resumed run; an update is the joint one.

    If a script allows it, the two parts of a batch have different numbers of rows.
    """
    flags = f"{MOVED_CASES[script].quick} {WITH_STATISTICS[script]} --eval-episodes 0"
    output = start_two_ranks(tmp_path, "share", script, tmp_path, flags, MOVED_CASES[script].resume)
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
    assert_no_step_twice(read_scalars(tmp_path / "resumed"))
    compare_updates(load_ranks(tmp_path, "update"))


@each_old_script
def test_two_processes_update_as_one(script, ranks):
    """The script's own update, on a whole batch in one process and on half of it in each of two."""
    compare_updates(ranks.update)


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
        if module.__name__.split(".")[-1] in MOVED:
            monkeypatch.setattr(module, "train", lambda *args: None)
            monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {"args": {}})  # what --resume names
            module.main(launcher.training_script_args)
        else:
            module.check_args(tyro.cli(module.Args, args=launcher.training_script_args))
        assert program in ("torchrun", "sbatch") and (ROOT / launcher.training_script).exists()
    assert {Path(word).stem for words in commands for word in words if word.endswith(".py")} == {
        *CASES,
        *MOVED,
    }


@each_old_script
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
