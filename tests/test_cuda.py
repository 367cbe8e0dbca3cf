"""The CUDA paths of the scripts on a pretend GPU, end to end, and planted faults that it has to find.

The constant CUDA_GRAPHS of R2D2 switches its graphs. The other scripts record none.
"""

import ast
import copy
import functools
import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import read_scalars
from pretend_cuda import is_same, pretend_cuda
from test_contract import load

from algos import alphazero_go as az
from algos import r2d2_lstm as r2d2
from algos import reinforce_tsp_attention as tsp

PPO = "--num-envs 4 --num-steps 4 --update-epochs 2 --num-minibatches 2 --total-timesteps 96 --eval-interval 1000"
PPO += " --eval-episodes 2"
TSP = "--env-id tsp5-uniform --num-epochs 3 --steps-per-epoch 2 --batch-size 2 --eval-interval 3 --eval-episodes 2"
R2D2 = "--num-envs 2 --num-steps 8 --burn-in 2 --learn-length 4 --batch-size 16 --buffer-size 40"
R2D2 += " --learning-starts 8 --target-interval 3 --total-timesteps 128 --replay-ratio 2 --eval-interval 1000"
R2D2 += " --eval-episodes 2 --hidden-size 8"
CHANGE = "--num-train-pairs 8 --image-size 16 --batch-size 2 --num-envs 4 --num-minibatches 2 --detector-iterations 2"
CHANGE += " --ppo-iterations 3 --eval-episodes 2 --eval-interval 5"
GO = "--env-id Go-2x2 --num-games 2 --blocks 1 --channels 4 --simulations-start 4 --simulations-end 4 --num-workers 2"
GO += " --pseudo-limit 0.5 --num-epochs 3 --pool-size 128 --batch-size 16 --eval-interval 1 --eval-episodes 2"
GO += " --pretrain-value-epochs 1 --pretrain-search-epochs 1 --komi 1"
RUNS = {
    "ppo cartpole": PPO,
    "ppo pendulum": f"{PPO} --env-id Pendulum-v1 --norm-obs --clip-vloss --ent-coef 0.01 --eval-episodes 0",
    "ppo kl": f"{PPO} --kl-coef 1 --target-kl 9",
    "r2d2_lstm vectors": R2D2,
    "r2d2_lstm same-step": f"{R2D2} --env-id probe_envs:SameStepLedger-v0 --n-step 3",
    "r2d2_lstm images": f"{R2D2} --env-id probe_envs:PictureHWC-v0 --last-window overlap",
    "r2d2_lstm no-memory": f"{R2D2} --no-recurrent --last-window null --state-init zero",
    "reinforce_tsp_attention pomo": TSP,
    "reinforce_tsp_attention rollout": f"{TSP} --baseline rollout --baseline-instances 8 --baseline-level 0.5"
    " --optimizer adam",
    "alphazero_go": GO,
    "ppo_change_detection": CHANGE,
}
CUTS = [
    ("reinforce_tsp_attention", f"{TSP} --num-epochs 2 --eval-interval 1 --eval-episodes 0", 3),
    ("alphazero_go", GO, 2),
]  # runs that end before the update of this number
R2D2_RUNS = [name for name in RUNS if name.startswith("r2d2")]
# The update and the other functions of each script in which waits of the host are counted, and its loss
WATCHED = {
    "ppo": ("update_minibatch", "collect_rollout"),
    "r2d2_lstm": ("update_network", "collect_steps"),
    "reinforce_tsp_attention": ("update_weights",),
    "alphazero_go": ("train_epoch",),
    "ppo_change_detection": ("take_step", "ppo_loss", "detector_loss"),
}
LOSSES = {
    "ppo": "ppo_loss",
    "r2d2_lstm": "r2d2_loss",
    "reinforce_tsp_attention": "compute_loss",
    "ppo_change_detection": "ppo_loss",
}
TOLERANCES = {
    "ppo": (1e-4, 1e-6),
    "reinforce_tsp_attention": (1e-4, 1e-5),
    "alphazero_go": (1e-2, 1e-2),
}  # relative and absolute, of device and host


class Interrupted(Exception):
    """Ends a run early."""


class AtOnce:
    """Replaces AlphaZero's threads and works when a job is submitted, as the pretend GPU sees one thread alone."""

    def __init__(self, num_threads, initializer, initargs):
        pass

    def submit(self, function, *args):
        output = function(*args)
        return SimpleNamespace(result=lambda: output)


@pytest.fixture(autouse=True, scope="module")
def without_threads():
    with mock.patch.object(az, "ThreadPoolExecutor", AtOnce):
        yield


def get_module(script: str):
    return importlib.import_module(f"algos.{script}")


def named_tensors(x, name=""):
    """The tensors below dictionaries and lists, with the way to them."""
    if isinstance(x, torch.Tensor):
        yield name, x
    elif isinstance(x, (list, tuple)):
        x = dict(enumerate(x))
    if isinstance(x, dict):
        for key, item in x.items():
            yield from named_tensors(item, f"{name}/{key}")


@dataclass
class Run:
    """What a run leaves, and how often the host had waited before and after each call of a watched function."""

    path: Path
    calls: dict[
        str, list[tuple[int, int, object]]
    ]  # by function: (waits before, waits after, what it returned)
    num_replays: int = 0

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(named_tensors(load(self.path / "checkpoint.pt")))

    def count_waits(self, name: str) -> list[int]:
        """Count the waits in each call of a function."""
        return [after - before for before, after, _ in self.calls[name]]

    def find_differences(self, other) -> list[str]:
        """Name the tensors of two checkpoints that are not equal to the last bit."""
        x, y = self.tensors, other.tensors
        names = [
            name for name in x.keys() | y.keys() if "time" not in name
        ]  # seconds of gymnasium's episodes
        return [name for name in names if name not in x or name not in y or not is_same(x[name], y[name])]


def play(script: str, flags: str, folder: Path, max_updates: int | None = None, **patches) -> Run:
    """Run a script on the pretend GPU; patches replace its functions."""
    module, calls = get_module(script), {}

    def watch(name):
        function, found = patches.get(name, getattr(module, name)), calls.setdefault(name, [])

        def call(*args):
            if name == WATCHED[script][0] and len(found) == max_updates:
                raise Interrupted
            before = gpu.waits.total()
            returned = function(*args)
            found.append((before, gpu.waits.total(), returned))
            return returned

        return call

    patches |= {name: watch(name) for name in WATCHED[script]}
    with mock.patch.multiple(module, **patches), pretend_cuda() as gpu:
        module.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.launches > 1000 and (gpu.replays == 0 or script == "r2d2_lstm")
    (path,) = folder.iterdir()
    return Run(path, calls, gpu.replays)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return the function play_once(name, **patches), for a run that all tests share."""

    @functools.cache
    def play_once(name, **patches):
        return play(name.split()[0], RUNS[name], tmp_path_factory.mktemp("device"), **patches)

    return play_once


def evaluate_on_both(script: str, path: Path, capsys) -> list[dict[str, float]]:
    """Return what --evaluate prints on the pretend GPU and on the CPU."""
    printed = []
    for device in ("--cuda", "--no-cuda"):
        capsys.readouterr()
        with pretend_cuda() as gpu:
            get_module(script).main(["--evaluate", str(path), "--eval-episodes", "2", device])
        assert (gpu.launches > 0) == (device == "--cuda")
        printed.append(ast.literal_eval(capsys.readouterr().out))
    return printed


# All scripts


@pytest.mark.parametrize("name", [x for x in RUNS if x not in R2D2_RUNS or x.endswith("same-step")])
def test_a_script_gives_on_the_device_what_it_gives_on_the_host(played, tmp_path, capsys, name):
    """Up to rounding, and in full precision: checkpoint, log, and evaluations of best.pt."""
    script = name.split()[0]
    with (
        mock.patch.object(torch.Tensor, "bfloat16", lambda x: x),
        mock.patch.object(torch, "set_float32_matmul_precision"),
    ):
        device = played(name)
        get_module(script).main([*RUNS[name].split(), "--no-cuda", "--run-dir", str(tmp_path)])
    host = Run(next(tmp_path.iterdir()), {})
    if script == "alphazero_go":  # gradients of some weights are mere rounding, as a norm follows them
        for run in (host, device):
            checkpoint = load(run.path / "checkpoint.pt")
            agent = az.Agent(2, az.Args(**checkpoint["args"])).eval()
            agent.load_state_dict(checkpoint["agent"])
            planes = torch.rand(64, 9, 2, 2, generator=torch.Generator().manual_seed(0)) > 0.5
            run.tensors = dict(named_tensors(agent(planes)))
    assert device.tensors.keys() == host.tensors.keys()
    rtol, atol = TOLERANCES.get(script, (1e-3, 1e-4))
    for tensor, x in host.tensors.items():
        torch.testing.assert_close(device.tensors[tensor], x, rtol=rtol, atol=atol, msg=tensor)
    found, expected = (read_scalars(run.path) for run in (device, host))
    assert found.keys() == expected.keys()
    for tag in found.keys() - {"charts/SPS", "charts/cpu_seconds"}:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-3, atol=1e-4, err_msg=tag)
    best = device.path / "best.pt"
    if best.exists():
        first, second = evaluate_on_both(script, best, capsys)
        assert first == pytest.approx(second, rel=1e-4) and len(first) > 1


def test_the_host_waits_in_no_update_and_seldom_between_updates(played):
    """In a minibatch of Go it waits for the rows that are due alone."""
    ppo = played("ppo pendulum")
    assert set(ppo.count_waits("update_minibatch")) == {0} and len(ppo.calls["update_minibatch"]) == 4 * 6
    # Twice in a step of the environments, and 26 times to make the batch and read the metrics
    assert max(np.diff([before for before, *_ in ppo.calls["collect_rollout"]])) <= 2 * 4 + 26
    for name, most in (("pomo", 3), ("rollout", 5)):
        run = played(f"reinforce_tsp_attention {name}")
        before, after, _ = zip(*run.calls["update_weights"], strict=True)
        between = np.subtract(before[1:], after[:-1]).tolist()
        assert run.count_waits("update_weights") == [0] * 6
        assert between[::2] == [1] * 3 and max(between[1::2]) <= most, between  # once for new points
    assert played("alphazero_go").count_waits("train_epoch") == [2] * 3  # of two minibatches
    change = played("ppo_change_detection")
    assert set(change.count_waits("take_step")) == {0} and len(change.calls["take_step"]) > 3 * 2
    # Once or twice in a step for the queries that look
    assert max(change.count_waits("ppo_loss") + change.count_waits("detector_loss")) <= 4


@pytest.mark.parametrize("script", LOSSES)
def test_a_wait_and_a_tensor_of_the_host_in_an_update_are_found(script, tmp_path):
    module = get_module(script)
    flags = next(flags for name, flags in RUNS.items() if name.split()[0] == script)
    update, compute_loss = (getattr(module, name) for name in (WATCHED[script][0], LOSSES[script]))

    def wait(*args):
        metrics = update(*args)
        metrics.sum().item()
        return metrics

    def add(*args):
        loss, *rest = compute_loss(*args)
        return (loss + torch.zeros(2)).sum(), *rest

    eager = {"CUDA_GRAPHS": False} if script == "r2d2_lstm" else {}
    run = play(script, flags, tmp_path / "wait", **{WATCHED[script][0]: wait}, **eager)
    assert set(run.count_waits(WATCHED[script][0])) == {1}
    with pytest.raises(RuntimeError, match="at least two devices"):
        play(script, flags, tmp_path / "add", **{LOSSES[script]: add}, **eager)
    if script == "r2d2_lstm":
        with pytest.raises(RuntimeError, match="capturing: local_scalar_dense at test_cuda"):
            play(script, flags, tmp_path / "graphs", update_network=wait)


@pytest.mark.parametrize(("script", "flags", "max_updates"), CUTS)
def test_a_cut_run_that_is_resumed_on_the_device_ends_as_a_whole_one(script, flags, max_updates, tmp_path):
    whole = play(script, flags, tmp_path / "whole")
    with pytest.raises(Interrupted):
        play(script, flags, tmp_path / "cut", max_updates)
    (path,) = tmp_path.glob("cut/*/checkpoint.pt")
    resumed = play(script, f"--resume {path}", tmp_path / "cut")
    assert resumed.find_differences(whole) == [] and len(resumed.tensors) > 100


# R2D2 and its graphs


@pytest.mark.parametrize("name", R2D2_RUNS)
def test_r2d2_leaves_the_same_checkpoint_with_graphs_and_without(played, tmp_path, name):
    """The first updates run without graphs, since they make the optimizer's state.

    The host never waits in an update, and thrice in a step; then six times for a window that is stored, five times for
    what is counted and logged, and twice for the recordings.
    """
    graphs, eager = played(name), played(name, CUDA_GRAPHS=False)
    num_updates = len(eager.calls["update_network"])
    assert num_updates > 12 and graphs.num_replays > num_updates and eager.num_replays == 0
    assert 3 <= len(graphs.calls["update_network"]) < num_updates / 2
    assert any(name.startswith("/replay/") for name in eager.tensors)
    assert graphs.find_differences(eager) == []
    for run in (graphs, eager):
        assert set(run.count_waits("update_network")) == {0}
        starts, _, returned = zip(*run.calls["collect_steps"], strict=True)
        windows = [num_windows for _, _, num_windows in returned[:-1]]  # 0 before learning starts
        waits = np.diff(starts).tolist()
        over = sorted(x - (3 * 8 + 6 * n + 5) for x, n in zip(waits, windows, strict=True) if n)
        assert len(over) > 3 and over[-1] <= (2 if run is graphs else 0) and over[-2] <= 0, over


def test_a_checkpoint_of_r2d2_is_resumed_on_the_device(played, tmp_path):
    """A resumed run has the optimizer's step counts on the device, so that its step can be recorded."""
    finished = []
    for has_graphs in (True, False):
        path = shutil.copytree(played("r2d2_lstm same-step").path, tmp_path / str(has_graphs) / "run")
        flags = f"--resume {path / 'checkpoint.pt'} --total-timesteps 192"
        finished.append(play("r2d2_lstm", flags, path.parent, CUDA_GRAPHS=has_graphs))
        assert (finished[-1].num_replays > 10) == has_graphs
    assert finished[0].find_differences(finished[1]) == []


def test_a_tensor_that_only_a_graph_still_uses_is_found(played, tmp_path):
    def replace(player, act, replay, args):
        old.append(replay.data["priority"])
        replay.data["priority"] = replay.data["priority"].clone()
        return collect_steps(player, act, replay, args)

    old, collect_steps = [], r2d2.collect_steps  # without graphs the fault changes nothing
    graphs = play("r2d2_lstm", R2D2, tmp_path, collect_steps=replace)
    eager = played("r2d2_lstm vectors", CUDA_GRAPHS=False)
    assert any(name.startswith("/agent/") for name in graphs.find_differences(eager))


def test_a_number_frozen_into_a_graph_is_found(tmp_path):
    def set_rate(agent, target, optimizer, *args):
        optimizer.num_calls = getattr(optimizer, "num_calls", 0) + 1
        optimizer.param_groups[0]["lr"] = 0.01 / optimizer.num_calls
        return update(agent, target, optimizer, *args)

    update = r2d2.update_network
    graphs, eager = (
        play("r2d2_lstm", R2D2, tmp_path / str(x), update_network=set_rate, CUDA_GRAPHS=x)
        for x in (True, False)
    )
    assert any(name.startswith("/agent/") for name in graphs.find_differences(eager))


# A real GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", R2D2_RUNS)
def test_graphs_of_r2d2_equal_eager_on_a_real_gpu(tmp_path, name):
    for form, has_graphs in (("graphs", True), ("eager", False)):
        with mock.patch.object(r2d2, "CUDA_GRAPHS", has_graphs):
            r2d2.main([*RUNS[name].split(), "--run-dir", str(tmp_path / form)])
    paths = [next(tmp_path.glob(f"{form}/*/checkpoint.pt")) for form in ("graphs", "eager")]
    agents = [torch.load(path, weights_only=True, map_location="cpu")["agent"] for path in paths]
    torch.testing.assert_close(*agents, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_of_the_tsp_on_a_real_gpu_is_that_of_the_host():
    """Both score the same tours. Tours that the GPU samples are permutations."""
    torch.manual_seed(0)
    agent, points = tsp.AttentionModel().eval(), torch.rand(64, 50, 2)
    tours = torch.rand(64, 4, 50).argsort(-1)
    on_gpu = copy.deepcopy(agent).cuda()
    found = []
    for model, device in ((agent, "cpu"), (on_gpu, "cuda")):
        log_likelihood, start = tsp.score_tours(model(points.to(device)), tours.to(device))
        (log_likelihood.mean() + start[:, 0].mean()).backward()
        found.append([p.grad.cpu() for p in model.parameters()] + [log_likelihood.detach().cpu()])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-2, atol=1e-3 * x.abs().max().item())
    with torch.no_grad():
        points = torch.rand(512, 200, 2, device="cuda")
        tours, _ = tsp.construct_tours(points, on_gpu(points), sample=True)
    assert torch.equal(tours.sort(-1).values, torch.arange(200, device="cuda").expand_as(tours))


# The pretend GPU itself


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "new": lambda x: x.new_tensor([1.0]),
    "copy": lambda x: x.copy_(torch.ones(3)),
    "mask": lambda x: x[x > 0],
    "put": lambda x: x.index_put_((x > 0,), x + 1),
    "index": lambda x: x[torch.tensor([0])],
    "nonzero": lambda x: x.nonzero(),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


def test_waits_are_counted_and_refused_in_a_capture():
    for name, wait in WAITS.items():
        with pretend_cuda() as gpu:
            x = torch.ones(3).cuda()
            gpu.waits.clear()
            wait(x)
            assert gpu.waits.total() == 1, name
            with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                wait(x)


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
        assert set(gpu.waits) == set() and x.grad.device == x.device
    assert not torch.cuda.is_available()
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


def test_modules_copies_and_autocast_stay_on_the_device():
    """An optimizer that is not capturable is refused in a capture."""
    with pretend_cuda():
        layer = torch.nn.Linear(2, 2).to("cuda")
        other, x = copy.deepcopy(layer), torch.rand(3, 2, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        layer(x).sum().backward()
        assert {y.device.type for y in (layer.weight, layer.weight.grad, other.weight, layer(x))} == {"cuda"}
        optimizer = torch.optim.Adam(layer.parameters(), fused=True)
        with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
