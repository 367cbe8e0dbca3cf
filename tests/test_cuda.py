"""The CUDA paths of the scripts on a pretend GPU, end to end.

The constant CUDA_GRAPHS of a script switches its graphs.
"""

import functools
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from device_runs import DeviceRun, check_recorded, play
from helpers import read_scalars
from pretend_cuda import pretend_cuda
from scripts import find_run, get_module, read_scores

from algos import alphazero_go as az

PPO = "--num-envs 4 --num-steps 4 --update-epochs 2 --num-minibatches 2 --total-timesteps 96"
PPO += " --eval-interval 1000 --eval-episodes 2"
TSP = "--env-id tsp5-uniform --num-epochs 2 --steps-per-epoch 3 --batch-size 2 --eval-interval 3"
TSP += " --eval-episodes 2"
R2D2 = "--num-envs 2 --num-steps 8 --burn-in 2 --learn-length 4 --batch-size 16 --buffer-size 40"
R2D2 += " --learning-starts 8 --target-interval 3 --total-timesteps 128 --replay-ratio 2 --eval-interval 1000"
R2D2 += " --eval-episodes 2 --hidden-size 8"
CHANGE = "--num-train-pairs 8 --image-size 16 --batch-size 2 --num-envs 4 --num-minibatches 2"
CHANGE += " --detector-iterations 2 --ppo-iterations 3 --eval-episodes 2 --eval-interval 5"
GO = "--env-id Go-2x2 --num-games 2 --blocks 1 --channels 4 --simulations-start 4 --simulations-end 4"
GO += " --num-workers 2 --pseudo-limit 0.5 --num-epochs 3 --pool-size 128 --batch-size 16 --komi 1"
GO += " --eval-interval 3 --eval-episodes 2 --pretrain-value-epochs 1 --pretrain-search-epochs 1"
# Learning rate, number of simulations and network change from epoch to epoch
GO_GRAPHS = f"{GO} --num-workers 1 --simulations-start 2 --num-games 4 --pretrain-value-epochs 0"
GO_GRAPHS += " --eval-episodes 0 --pretrain-search-epochs 0 --pool-size 512 --generate-fraction 0.2"
GO_GRAPHS += " --train-fraction 0.1"
RUNS = {
    "ppo cartpole": PPO,
    "ppo pendulum": f"{PPO} --env-id Pendulum-v1 --norm-obs --clip-vloss --ent-coef 0.01 --eval-episodes 0",
    "r2d2_lstm vectors": R2D2,
    "r2d2_lstm ledger": f"{R2D2} --env-id probe_envs:Ledger-v0 --n-step 3",
    "reinforce_tsp_attention pomo": TSP,
    "reinforce_tsp_attention rollout": f"{TSP} --baseline rollout --baseline-instances 8 --baseline-level 0.5"
    " --optimizer adam",
    "alphazero_go": GO,
    "alphazero_go graphs": GO_GRAPHS,
    "ppo_change_detection": CHANGE,
}
GRAPHS_OF_GO = "alphazero_go graphs"
ON_HOST = [name for name in RUNS if name not in ("alphazero_go", GRAPHS_OF_GO)]
RECORDED = [name for name in RUNS if name not in ("alphazero_go", "ppo_change_detection")]
RESUMED = {
    "ppo pendulum": "--total-timesteps 160",
    "r2d2_lstm ledger": "--total-timesteps 192",
    "reinforce_tsp_attention rollout": "--num-epochs 3",
    GRAPHS_OF_GO: "--num-epochs 4",
}  # some of those that are recorded, for longer
# The functions of each script's update, in which waits of the host are counted
WATCHED = {
    "ppo": ("update_minibatch",),
    "r2d2_lstm": ("update_network",),
    "reinforce_tsp_attention": ("update_weights",),
    "alphazero_go": ("train_epoch",),
    "ppo_change_detection": ("take_step", "ppo_loss", "detector_loss"),
}


def submit(work, *args):
    """Work at once in place of AlphaZero's threads, as the pretend GPU sees one thread alone."""
    output = work(*args)
    return SimpleNamespace(result=lambda: output)


@pytest.fixture(autouse=True, scope="module")
def without_threads_in_full_precision():
    pool = SimpleNamespace(submit=submit, shutdown=lambda: None)
    with (
        mock.patch.object(az, "ThreadPoolExecutor", lambda _: pool),
        mock.patch.object(torch.Tensor, "bfloat16", lambda x: x),
        mock.patch.object(torch, "set_float32_matmul_precision"),
    ):
        yield


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return the function play_once(name, **patches), for a run that all tests share."""

    @functools.cache
    def play_once(name, **patches):
        script, folder = name.split()[0], tmp_path_factory.mktemp("device")
        return play(get_module(script), RUNS[name], folder, WATCHED[script], **patches)

    return play_once


# All scripts


@pytest.mark.parametrize("name", [*ON_HOST, pytest.param("alphazero_go", marks=pytest.mark.slow)])
def test_a_script_gives_on_the_device_what_it_gives_on_the_host(played, tmp_path, capsys, name):
    """Up to rounding: checkpoint, log, and evaluations of best.pt."""
    script, device = name.split()[0], played(name)
    main = get_module(script).main
    main([*RUNS[name].split(), "--no-cuda", "--run-dir", str(tmp_path)])
    host = DeviceRun(find_run(tmp_path))
    if script != "alphazero_go":  # where gradients of some weights are mere rounding, as a norm follows them
        torch.testing.assert_close(device.tensors, host.tensors, rtol=1e-3, atol=1e-4)
    found, expected = (read_scalars(run.path) for run in (device, host))
    assert found.keys() == expected.keys()
    for tag in [tag for tag in found if tag != "charts/SPS" and not tag.endswith("seconds")]:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-3, atol=1e-4, err_msg=tag)
    if (path := device.path / "best.pt").exists():
        capsys.readouterr()
        flags = ["--evaluate", str(path), "--eval-episodes", "2"]
        with pretend_cuda() as gpu:
            main(flags)
        first = read_scores(capsys.readouterr().out)
        main(flags)
        second = read_scores(capsys.readouterr().out)
        assert first == pytest.approx(second, rel=1e-4) and len(first) > 1 and gpu.num_waits > 0


@pytest.mark.parametrize("name", ON_HOST)
def test_the_host_waits_in_no_update(played, name):
    """The functions of WATCHED, recorded or not. AlphaZero's wait to count their records."""
    script = name.split()[0]
    for run in (played(name), played(name, CUDA_GRAPHS=False)) if name in RECORDED else (played(name),):
        for update in WATCHED[script]:
            assert set(run.waits[update]) == {0}, update


@pytest.mark.parametrize("name", RECORDED)
def test_a_script_leaves_the_same_checkpoint_and_log_with_graphs_and_without(played, tmp_path, name):
    """To the last bit, whole or resumed.

    A run that is resumed has the optimizer's step counts on the device, so that its step can be recorded.
    """
    script = name.split()[0]
    graphs, eager = played(name), played(name, CUDA_GRAPHS=False)
    check_recorded(graphs, eager)
    num_updates, num_calls = (len(run.waits[WATCHED[script][0]]) for run in (eager, graphs))
    assert num_updates > 2 and graphs.num_replays >= num_updates - 3  # the first ones are eager, and recorded
    if name != GRAPHS_OF_GO:  # whose function of an epoch is no graph itself
        assert num_calls <= num_updates / 2
    if name in RESUMED:
        resumed = []
        for has_graphs in (True, False):
            path = shutil.copytree(eager.path, tmp_path / str(has_graphs) / "run")
            flags = f"--resume {path / 'checkpoint.pt'} {RESUMED[name]}"
            resumed.append(play(get_module(script), flags, path.parent, (), CUDA_GRAPHS=has_graphs))
        check_recorded(*resumed)
