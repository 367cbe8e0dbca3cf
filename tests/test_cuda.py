"""The CUDA paths of the scripts on a pretend GPU, end to end, and the pretend GPU itself.

The constant CUDA_GRAPHS of a script switches its graphs.
"""

import functools
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from device_runs import DeviceRun, check_recorded, named_tensors, play
from helpers import read_scalars
from pretend_cuda import is_same, pretend_cuda
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
    "ppo target-kl": f"{PPO} --target-kl 9",
    "r2d2_lstm vectors": R2D2,
    "r2d2_lstm same-step": f"{R2D2} --env-id probe_envs:SameStepLedger-v0 --n-step 3",
    "r2d2_lstm images": f"{R2D2} --env-id probe_envs:PictureHWC-v0",
    "r2d2_lstm no-memory": f"{R2D2} --no-recurrent --state-init zero",
    "reinforce_tsp_attention pomo": TSP,
    "reinforce_tsp_attention rollout": f"{TSP} --baseline rollout --baseline-instances 8 --baseline-level 0.5"
    " --optimizer adam",
    "alphazero_go": GO,
    "alphazero_go graphs": GO_GRAPHS,
    "ppo_change_detection": CHANGE,
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
R2D2_RUNS = ["r2d2_lstm vectors", "r2d2_lstm same-step"]
R2D2_RUNS += [slow("r2d2_lstm images"), slow("r2d2_lstm no-memory")]
TSP_RUNS = ["reinforce_tsp_attention pomo", "reinforce_tsp_attention rollout"]
GRAPHS_OF_GO = "alphazero_go graphs"
# Those that are compared with the host, and those that are recorded, of which some are resumed for longer
ON_HOST = ["ppo cartpole", "ppo pendulum", "ppo target-kl", "r2d2_lstm same-step", *TSP_RUNS]
ON_HOST += ["ppo_change_detection", slow("alphazero_go")]
RECORDED = ["ppo cartpole", "ppo pendulum", *R2D2_RUNS, *TSP_RUNS, GRAPHS_OF_GO]
RESUMED = {
    "ppo pendulum": "--total-timesteps 160",
    "r2d2_lstm same-step": "--total-timesteps 192",
    "reinforce_tsp_attention rollout": "--num-epochs 3",
    GRAPHS_OF_GO: "--num-epochs 4",
}
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
    with (
        mock.patch.object(
            az, "ThreadPoolExecutor", lambda _: SimpleNamespace(submit=submit, shutdown=lambda: None)
        ),
        mock.patch.object(torch.Tensor, "bfloat16", lambda x: x),
        mock.patch.object(torch, "set_float32_matmul_precision"),
    ):
        yield


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return the function play_once(name, **patches), for a run that all tests share."""

    @functools.cache
    def play_once(name, **patches):
        script = name.split()[0]
        return play(
            get_module(script), RUNS[name], tmp_path_factory.mktemp("device"), WATCHED[script], **patches
        )

    return play_once


# All scripts


@pytest.mark.parametrize("name", ON_HOST)
def test_a_script_gives_on_the_device_what_it_gives_on_the_host(played, tmp_path, capsys, name):
    """Up to rounding: checkpoint, log, and evaluations of best.pt."""
    script, device = name.split()[0], played(name)
    main = get_module(script).main
    main([*RUNS[name].split(), "--no-cuda", "--run-dir", str(tmp_path)])
    host, rtol, atol = DeviceRun(find_run(tmp_path)), 1e-3, 1e-4
    if script == "alphazero_go":  # gradients of some weights are mere rounding, as a norm follows them
        rtol = atol = 1e-2
        for run in (host, device):
            args = az.Args(**run.checkpoint["args"])
            agent = az.Agent(az.make_game(args.env_id), args).eval()
            agent.load_state_dict(run.checkpoint["agent"])
            planes = torch.rand(64, 9, 2, 2, generator=torch.Generator().manual_seed(0)) > 0.5
            run.tensors = named_tensors(agent(planes))
    torch.testing.assert_close(device.tensors, host.tensors, rtol=rtol, atol=atol)
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


@pytest.mark.parametrize("name", ["ppo pendulum", *R2D2_RUNS, *TSP_RUNS, "ppo_change_detection"])
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
    assert (
        num_calls <= num_updates / 2 or name == GRAPHS_OF_GO
    )  # whose function of an epoch is no graph itself
    if name in RESUMED:
        resumed = []
        for has_graphs in (True, False):
            path = shutil.copytree(eager.path, tmp_path / str(has_graphs) / "run")
            flags = f"--resume {path / 'checkpoint.pt'} {RESUMED[name]}"
            resumed.append(play(get_module(script), flags, path.parent, (), CUDA_GRAPHS=has_graphs))
        check_recorded(*resumed)


def test_alphazero_trains_in_fixed_shapes_if_each_turn_fills_a_minibatch():
    found, agent = [], torch.nn.Linear(1, 1)
    optimizer, bar = torch.optim.AdamW(agent.parameters()), SimpleNamespace(update=lambda: None)
    with (
        mock.patch.object(
            az, "train_minibatch", lambda *x, **flags: found.append(flags["fixed_shapes"]) or {}
        ),
        pretend_cuda(),
    ):
        for num_records in (8 * 16, 8 * 16 - 1):
            turn = (torch.arange(num_records) % 8).cuda()
            pool = SimpleNamespace(z=turn, turn=turn)
            az.train_epoch(agent, optimizer, pool, 1, 8, None, az.Args(batch_size=16), bar)
    assert found == [True, False]


# The pretend GPU itself


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "new": lambda x: x.new_tensor([1.0]),
    "copy": lambda x: x.copy_(torch.ones(3)),
    "mask": lambda x: x[x > 0],
    "put": lambda x: x.index_put_((x > 0,), x + 1),
    "index": lambda x: x[torch.tensor([0])],
    "number": lambda x: x.__setitem__(torch.arange(2, device="cuda"), 1.0),
    "nonzero": lambda x: x.nonzero(),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted_and_refused_in_a_capture(name):
    with pretend_cuda() as gpu:
        x = torch.ones(3).cuda()
        before = gpu.num_waits
        WAITS[name](x)
        assert gpu.num_waits == before + 1
        with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            WAITS[name](x)


def test_tensors_of_two_devices_do_not_mix():
    with pretend_cuda() as gpu:
        x = torch.ones(3, device="cuda", requires_grad=True)
        assert (x * torch.tensor(2.0)).sum().backward() is None  # a number is no tensor
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices"):
            torch.zeros(()).lerp_(x.detach().mean(), 0.5)  # nor is one that is written
        with pytest.raises(TypeError, match="numpy"):
            x.detach().numpy()
        x.detach()[x > 0] = 0.0  # fills, without a look at how many
        assert gpu.num_waits == 0 and x.grad.device == x.device
    with pytest.raises(RuntimeError, match="gone"):
        x + 1


def test_a_capture_runs_nothing_and_a_replay_everything():
    """A replay draws new random numbers, keeps the host's numbers of the capture, and needs its memory."""
    with pretend_cuda():
        x, total, rate = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), torch.tensor(2.0)
        graph, rng_state = torch.cuda.CUDAGraph(), torch.get_rng_state()
        with torch.cuda.graph(graph), torch.inference_mode():
            noise = torch.rand(3, device="cuda") + x * rate
            total.add_(noise)
        assert is_same(torch.get_rng_state(), rng_state)
        assert noise.isnan().all() and total.tolist() == [0, 0, 0]
        x.fill_(3.0)
        rate.fill_(5.0)
        expected = torch.rand(2, 3) + 3.0 * 2.0
        torch.set_rng_state(rng_state)
        graph.replay()
        assert is_same(noise.cpu(), expected[0])
        view = x[1:]
        del x
        graph.replay()
        assert is_same(total.cpu(), expected[0] + expected[1])
        del view
        with pytest.raises(RuntimeError, match="memory has been freed"):
            graph.replay()
        stream = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="non-default"), torch.cuda.graph(graph, stream=stream):
            pass
