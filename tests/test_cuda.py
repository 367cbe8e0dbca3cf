"""The CUDA paths of the scripts on a pretend GPU, end to end, and planted faults that it has to find.

The constant CUDA_GRAPHS of R2D2 switches its graphs. The other scripts record none.
"""

import ast
import copy
import functools
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
from algos import ppo
from algos import ppo_change_detection as cd
from algos import r2d2_lstm as r2d2
from algos import reinforce_tsp_attention as tsp


def evaluate_on_both(script, capsys, *flags):
    """What --evaluate with more flags prints, on the pretend GPU and on the CPU."""
    printed = []
    for device in ("--cuda", "--no-cuda"):
        capsys.readouterr()
        with pretend_cuda() as gpu:
            script.main(["--evaluate", *map(str, flags), device])
        assert (gpu.launches > 0) == (device == "--cuda")
        printed.append(ast.literal_eval(capsys.readouterr().out))
    return printed


PPO = (
    "--num-envs 4 --num-steps 4 --update-epochs 2 --num-minibatches 2 --total-timesteps 96 --eval-interval 3"
)
PPO += " --eval-episodes 2"
PPO_RUNS = {
    "cartpole": PPO,
    "pendulum": f"{PPO} --env-id Pendulum-v1 --norm-obs --clip-vloss --ent-coef 0.01 --eval-episodes 0",
    "kl": f"{PPO} --kl-coef 1 --target-kl 9",
}
TSP = "--env-id tsp5-uniform --num-epochs 3 --steps-per-epoch 2 --batch-size 2 --eval-interval 3 --eval-episodes 2"
TSP_RUNS = {
    "pomo": TSP,
    "rollout": f"{TSP} --baseline rollout --baseline-instances 8 --baseline-level 0.5 --optimizer adam",
}
R2D2 = (
    "--num-envs 2 --num-steps 8 --burn-in 2 --learn-length 4 --batch-size 16 --buffer-size 40 --hidden-size 8"
)
R2D2 += " --learning-starts 8 --target-interval 3 --total-timesteps 128 --replay-ratio 2 --eval-interval 1000"
R2D2 += " --eval-episodes 2"
R2D2_RUNS = {
    "vectors": R2D2,
    "same-step": f"{R2D2} --env-id probe_envs:SameStepLedger-v0 --n-step 3",
    "images": f"{R2D2} --env-id probe_envs:PictureHWC-v0 --last-window overlap",
    "no-memory": f"{R2D2} --no-recurrent --last-window null --state-init zero",
}
CHANGE = "--num-train-pairs 8 --image-size 16 --batch-size 2 --num-envs 4 --num-minibatches 2 --detector-iterations 2"
CHANGE += " --ppo-iterations 3 --eval-episodes 2 --eval-interval 5"
GO = "--env-id Go-2x2 --num-games 2 --blocks 1 --channels 4 --simulations-start 4 --simulations-end 4 --num-workers 2"
GO += " --pseudo-limit 0.5 --num-epochs 3 --pool-size 128 --batch-size 16 --eval-interval 1 --eval-episodes 2"
GO += " --pretrain-value-epochs 1 --pretrain-search-epochs 1 --komi 1"


class Interrupted(Exception):
    """A run was to end before its time."""


def named_tensors(x, name=""):
    """The tensors below dictionaries and lists, with the way to them."""
    if isinstance(x, torch.Tensor):
        yield name, x
    elif isinstance(x, (list, tuple)):
        x = dict(enumerate(x))
    if isinstance(x, dict):
        for key, item in x.items():
            yield from named_tensors(item, f"{name}/{key}")


def find_differences(first, second) -> list[str]:
    """Names of the tensors of two checkpoints that are not equal to the last bit."""
    x, y = first.tensors, second.tensors
    names = {name for name in x.keys() | y.keys() if "time" not in name}  # seconds of gymnasium's episodes
    return [name for name in names if name not in x or name not in y or not is_same(x[name], y[name])]


# R2D2


@dataclass
class Iterations:
    """What a run of r2d2_lstm.py leaves, and what is counted in each iteration after the first."""

    path: Path
    tensors: dict[str, torch.Tensor]  # of checkpoint.pt
    waits: list[int]
    windows: list[int]  # stored in the replay
    update_waits: list[int]  # in each update that is not a replayed graph
    replays: int


def play_r2d2(flags: str, has_graphs: bool, folder: Path, **patches) -> Iterations:
    """Run r2d2_lstm.py on the pretend GPU."""
    marks, update_waits, stored = [], [], []
    update, store = patches.pop("update_network", r2d2.update_network), r2d2.SequenceReplay.store

    class Bar(r2d2.tqdm):
        def update(self, n=1):
            marks.append((gpu.waits.total(), len(stored)))
            return super().update(n)

    def count(*args):
        before = gpu.waits.total()
        metrics = update(*args)
        update_waits.append(gpu.waits.total() - before)
        return metrics

    patches |= {"tqdm": Bar, "update_network": count, "CUDA_GRAPHS": has_graphs}
    with (
        mock.patch.multiple(r2d2, **patches),
        mock.patch.object(r2d2.SequenceReplay, "store", lambda *args: stored.append(store(*args))),
        pretend_cuda() as gpu,
    ):
        r2d2.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.launches > 1000
    (path,) = folder.iterdir()
    tensors = dict(named_tensors(torch.load(path / "checkpoint.pt", weights_only=True)))
    return Iterations(path, tensors, *np.diff(marks, axis=0).T.tolist(), update_waits, gpu.replays)


@pytest.fixture(scope="module")
def r2d2_runs(tmp_path_factory):
    """r2d2_runs(name, has_graphs): a run that is done once for all tests."""
    return functools.cache(
        lambda name, has_graphs: play_r2d2(R2D2_RUNS[name], has_graphs, tmp_path_factory.mktemp(name))
    )


@pytest.mark.parametrize("name", R2D2_RUNS)
def test_r2d2_leaves_the_same_checkpoint_with_graphs_and_without(r2d2_runs, name):
    """The first updates run without graphs, since they make the optimizer's state."""
    graphs, eager = r2d2_runs(name, True), r2d2_runs(name, False)
    num_updates = len(eager.update_waits)
    assert num_updates > 12 and graphs.replays > num_updates and eager.replays == 0
    assert 3 <= len(graphs.update_waits) < num_updates / 2
    assert any(name.startswith("/replay/") for name in eager.tensors)
    assert find_differences(graphs, eager) == []


@pytest.mark.parametrize("name", R2D2_RUNS)
def test_the_host_never_waits_in_an_update_of_r2d2_and_thrice_in_a_step(r2d2_runs, name):
    """And six times for a window that is stored, five times for what is counted and logged, once for a recording."""
    for has_graphs in (True, False):
        found = r2d2_runs(name, has_graphs)
        assert set(found.update_waits) == {0} and sum(found.windows) > 10
        limits = [3 * 8 + 6 * num_windows + 5 for num_windows in found.windows]
        over = sorted(waits - limit for waits, limit in zip(found.waits, limits, strict=True))
        assert over[-1] <= 2 * has_graphs and over[-2] <= 0, over


def test_r2d2_gives_on_the_device_what_it_gives_on_the_host(r2d2_runs, tmp_path):
    """Up to rounding."""
    r2d2.main([*R2D2_RUNS["same-step"].split(), "--no-cuda", "--run-dir", str(tmp_path)])
    (host,) = tmp_path.iterdir()
    device = r2d2_runs("same-step", True)
    expected = dict(named_tensors(torch.load(host / "checkpoint.pt", weights_only=True)))
    assert expected.keys() == device.tensors.keys()
    for name, x in expected.items():
        torch.testing.assert_close(device.tensors[name], x, rtol=1e-3, atol=1e-4, msg=name)
    losses, others = (read_scalars(path)["losses/q_loss"] for path in (host, device.path))
    np.testing.assert_allclose(losses, others, rtol=1e-3)


def test_a_checkpoint_of_r2d2_is_evaluated_and_resumed_on_the_device(r2d2_runs, tmp_path, capsys):
    """A resumed run has the optimizer's step counts on the device, so that its step can be recorded."""
    path = shutil.copytree(r2d2_runs("same-step", True).path, tmp_path / "run")
    printed = evaluate_on_both(r2d2, capsys, str(path / "best.pt"))
    assert printed[0] == pytest.approx(printed[1], rel=1e-4)
    finished = []
    for has_graphs in (True, False):
        copied = shutil.copytree(path, tmp_path / str(has_graphs))
        with mock.patch.object(r2d2, "CUDA_GRAPHS", has_graphs), pretend_cuda() as gpu:
            r2d2.main(["--resume", str(copied / "checkpoint.pt"), "--total-timesteps", "192"])
        assert (gpu.replays > 10) == has_graphs
        finished.append(SimpleNamespace(tensors=dict(named_tensors(load(copied / "checkpoint.pt")))))
    assert find_differences(*finished) == []


def test_a_wait_in_the_update_of_r2d2_is_found(tmp_path):
    def wait(*args):
        metrics = update(*args)
        metrics.sum().item()
        return metrics

    update = r2d2.update_network
    with pytest.raises(RuntimeError, match="capturing: local_scalar_dense at test_cuda"):
        play_r2d2(R2D2, True, tmp_path / "graphs", update_network=wait)
    assert set(play_r2d2(R2D2, False, tmp_path / "eager", update_network=wait).update_waits) == {1}


def test_a_tensor_of_the_host_in_the_loss_of_r2d2_is_found(tmp_path):
    def add(*args):
        loss, *rest = r2d2_loss(*args)
        return (loss + torch.zeros(2)).sum(), *rest

    r2d2_loss = r2d2.r2d2_loss
    with pytest.raises(RuntimeError, match="at least two devices"):
        play_r2d2(R2D2, False, tmp_path, r2d2_loss=add)


def test_a_graph_whose_tensor_was_freed_is_found(tmp_path):
    def replace(player, act, replay, args):
        replay.data["priority"] = replay.data["priority"].clone()
        return collect_steps(player, act, replay, args)

    collect_steps = r2d2.collect_steps
    with pytest.raises(RuntimeError, match="memory has been freed"):
        play_r2d2(R2D2, True, tmp_path, collect_steps=replace)


def test_a_tensor_that_only_a_graph_still_uses_is_found(r2d2_runs, tmp_path):
    def replace(player, act, replay, args):
        old.append(replay.data["priority"])
        replay.data["priority"] = replay.data["priority"].clone()
        return collect_steps(player, act, replay, args)

    old, collect_steps = [], r2d2.collect_steps  # without graphs the fault changes nothing
    graphs = play_r2d2(R2D2, True, tmp_path, collect_steps=replace)
    assert any(name.startswith("/agent/") for name in find_differences(graphs, r2d2_runs("vectors", False)))


def test_a_number_frozen_into_a_graph_is_found(tmp_path):
    def set_rate(agent, target, optimizer, *args):
        optimizer.num_calls = getattr(optimizer, "num_calls", 0) + 1
        optimizer.param_groups[0]["lr"] = 0.01 / optimizer.num_calls
        return update(agent, target, optimizer, *args)

    update = r2d2.update_network
    graphs, eager = (play_r2d2(R2D2, x, tmp_path / str(x), update_network=set_rate) for x in (True, False))
    assert any(name.startswith("/agent/") for name in find_differences(graphs, eager))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", R2D2_RUNS)
def test_graphs_of_r2d2_equal_eager_on_a_real_gpu(tmp_path, name):
    found = []
    for has_graphs in (True, False):
        with mock.patch.object(r2d2, "CUDA_GRAPHS", has_graphs):
            r2d2.main([*R2D2_RUNS[name].split(), "--run-dir", str(tmp_path / str(has_graphs))])
        (path,) = (tmp_path / str(has_graphs)).iterdir()
        found.append(torch.load(path / "checkpoint.pt", weights_only=True, map_location="cpu")["agent"])
    for tensor, x in found[0].items():
        torch.testing.assert_close(x, found[1][tensor], rtol=1e-3, atol=1e-4, msg=tensor)


# PPO, without graphs


def play_ppo(flags: str, folder: Path, **patches) -> tuple[Path, list[int], int]:
    """Run ppo.py on the pretend GPU: its folder, the host's waits in each update, and all waits in an iteration."""
    waits, marks, update = [], [], patches.pop("update_minibatch", ppo.update_minibatch)

    class Bar(ppo.tqdm):
        def update(self, n=1):
            marks.append(gpu.waits.total())
            return super().update(n)

    def count(*args):
        before = gpu.waits.total()
        metrics = update(*args)
        waits.append(gpu.waits.total() - before)
        return metrics

    with mock.patch.multiple(ppo, tqdm=Bar, update_minibatch=count, **patches), pretend_cuda() as gpu:
        ppo.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.launches > 1000 and gpu.replays == 0
    (path,) = folder.iterdir()
    return path, waits, max(np.diff(marks))


@pytest.mark.parametrize("name", PPO_RUNS)
def test_ppo_gives_on_the_device_what_it_gives_on_the_host(tmp_path, name):
    path, waits, _ = play_ppo(PPO_RUNS[name], tmp_path / "device")
    ppo.main([*PPO_RUNS[name].split(), "--no-cuda", "--run-dir", str(tmp_path / "host")])
    (host,) = (tmp_path / "host").iterdir()
    theirs, ours = (
        dict(named_tensors(torch.load(x / "checkpoint.pt", weights_only=True))) for x in (host, path)
    )
    assert (
        ours.keys() == theirs.keys()
        and len(waits) == 4 * torch.load(path / "checkpoint.pt", weights_only=True)["progress"][0]
    )
    for tensor, value in ours.items():
        torch.testing.assert_close(value, theirs[tensor], rtol=1e-4, atol=1e-6, msg=tensor)
    losses, expected = (
        {tag: x for tag, x in read_scalars(folder).items() if "SPS" not in tag and "seconds" not in tag}
        for folder in (path, host)
    )
    assert losses.keys() == expected.keys()
    for tag in losses:
        np.testing.assert_allclose(losses[tag], expected[tag], rtol=1e-3, atol=1e-5, err_msg=tag)


def test_the_host_never_waits_in_an_update_of_ppo(tmp_path):
    """In a step of the environments it does so twice, and 26 times in making the batch and reading the metrics."""
    _, waits, most = play_ppo(f"{PPO_RUNS['pendulum']} --eval-interval 1000", tmp_path)
    assert set(waits) == {0}
    assert most <= 2 * 4 + 26


def test_a_wait_and_a_tensor_of_the_host_in_ppos_update_are_found(tmp_path):
    def wait(*args):
        metrics = update(*args)
        metrics.sum().item()
        return metrics

    def add(*args):
        losses, metrics = ppo_loss(*args)
        return losses + torch.zeros(len(losses)), metrics

    update, ppo_loss = ppo.update_minibatch, ppo.ppo_loss
    _, waits, _ = play_ppo(PPO, tmp_path / "wait", update_minibatch=wait)
    assert set(waits) == {1}
    with pytest.raises(RuntimeError, match="at least two devices"):
        play_ppo(PPO, tmp_path / "add", ppo_loss=add)


def test_a_checkpoint_of_ppo_is_evaluated_on_the_device(tmp_path, capsys):
    path, *_ = play_ppo(PPO, tmp_path)
    printed = evaluate_on_both(ppo, capsys, str(path / "best.pt"))
    assert printed[0] == pytest.approx(printed[1]) and printed[0]["eval/episodic_length"] > 1


# The TSP, without graphs


def play_tsp(flags: str, folder: Path, last_update: int | None = None, **patches) -> tuple[Path, list, list]:
    """Run reinforce_tsp_attention.py on the pretend GPU: its folder, the host's waits in updates and between them."""
    waits, marks, update = [], [], patches.pop("update_weights", tsp.update_weights)

    def count(*args):
        before = gpu.waits.total()
        marks.append(before - sum(waits))
        if len(marks) == last_update:
            raise Interrupted
        metrics = update(*args)
        waits.append(gpu.waits.total() - before)
        return metrics

    with mock.patch.multiple(tsp, update_weights=count, **patches), pretend_cuda() as gpu:
        tsp.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.launches > 1000 and gpu.replays == 0
    (path,) = folder.iterdir()
    return path, waits, np.diff(marks).tolist()


@pytest.mark.parametrize("name", TSP_RUNS)
def test_the_tsp_gives_on_the_device_what_it_gives_on_the_host(tmp_path, name):
    """They agree up to rounding in full precision. The host waits in no update, but once for new points."""
    with (
        mock.patch.object(torch.Tensor, "bfloat16", lambda x: x),
        mock.patch.object(torch, "set_float32_matmul_precision"),
    ):
        path, waits, between = play_tsp(TSP_RUNS[name], tmp_path / "device")
        tsp.main([*TSP_RUNS[name].split(), "--no-cuda", "--run-dir", str(tmp_path / "host")])
    (host,) = (tmp_path / "host").iterdir()
    theirs, ours = (dict(named_tensors(load(x / "checkpoint.pt"))) for x in (host, path))
    assert ours.keys() == theirs.keys() and len(waits) == 6
    for tensor, value in ours.items():
        torch.testing.assert_close(value, theirs[tensor], rtol=1e-4, atol=1e-5, msg=tensor)
    found, expected = (
        {tag: x for tag, x in read_scalars(folder).items() if "SPS" not in tag and "seconds" not in tag}
        for folder in (path, host)
    )
    assert found.keys() == expected.keys()
    for tag in found:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-4, atol=1e-5, err_msg=tag)
    assert set(waits) == {0}
    assert between[::2] == [1] * 3 and max(between[1::2]) <= (3 if name == "pomo" else 5), between


def test_a_run_of_the_tsp_is_resumed_and_evaluated_on_the_device(tmp_path, capsys):
    """The resumed run ends with the checkpoint of an uninterrupted one."""
    flags = f"{TSP} --num-epochs 2 --eval-interval 1 --eval-episodes 0"
    whole, *_ = play_tsp(flags, tmp_path / "whole")
    with pytest.raises(Interrupted):
        play_tsp(flags, tmp_path / "cut", last_update=4)
    (path,) = tmp_path.glob("cut/*/checkpoint.pt")
    play_tsp(f"--resume {path}", tmp_path / "cut")
    ends = [SimpleNamespace(tensors=dict(named_tensors(load(x)))) for x in (path, whole / "checkpoint.pt")]
    assert find_differences(*ends) == [] and len(ends[0].tensors) > 200
    printed = evaluate_on_both(tsp, capsys, str(path), "--eval-episodes", "2")
    assert printed[0] == pytest.approx(printed[1], rel=1e-6)


def test_a_wait_and_a_tensor_of_the_host_in_an_update_of_the_tsp_are_found(tmp_path):
    def wait(*args):
        metrics = update(*args)
        metrics.sum().item()
        return metrics

    def add(*args):
        loss, length = compute_loss(*args)
        return (loss + torch.zeros(2)).sum(), length

    update, compute_loss = tsp.update_weights, tsp.compute_loss
    flags = f"{TSP} --num-epochs 2 --steps-per-epoch 1 --eval-episodes 0"
    _, waits, _ = play_tsp(flags, tmp_path / "wait", update_weights=wait)
    assert set(waits) == {1}
    with pytest.raises(RuntimeError, match="at least two devices"):
        play_tsp(flags, tmp_path / "add", compute_loss=add)


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


# AlphaZero, without graphs; its workers are no threads here, as the pretend GPU is seen by one thread alone


class AtOnce:
    """In the place of a thread: what it is to do is done when it is submitted."""

    def __init__(self, num_threads, initializer, initargs):
        pass

    def submit(self, function, *args):
        output = function(*args)
        return SimpleNamespace(result=lambda: output)


def play_go(flags: str, folder: Path, last_epoch: int | None = None, **patches) -> tuple[Path, list[int]]:
    """Run alphazero_go.py on the pretend GPU: its folder, and how often the host waits in each epoch's training."""
    waits, train_epoch = [], az.train_epoch

    def count(*args):
        if len(waits) == last_epoch:
            raise Interrupted
        before = gpu.waits.total()
        metrics = train_epoch(*args)
        waits.append(gpu.waits.total() - before)
        return metrics

    patches = {"train_epoch": count, "ThreadPoolExecutor": AtOnce} | patches
    with mock.patch.multiple(az, **patches), pretend_cuda() as gpu:
        az.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.launches > 1000 and gpu.replays == 0
    (path,) = folder.iterdir()
    return path, waits


def test_go_gives_on_the_device_what_it_gives_on_the_host(tmp_path):
    """Up to rounding, from two workers. In a minibatch the host waits for the rows that are due alone."""
    path, waits = play_go(GO, tmp_path / "device")
    with mock.patch.object(az, "ThreadPoolExecutor", AtOnce):
        az.main([*GO.split(), "--no-cuda", "--run-dir", str(tmp_path / "host")])
    (host,) = (tmp_path / "host").iterdir()
    outputs = []  # some weights have no effect before a norm, and gradients that are mere rounding
    for folder in (host, path):
        checkpoint = load(folder / "checkpoint.pt")
        agent = az.Agent(2, az.Args(**checkpoint["args"])).eval()
        agent.load_state_dict(checkpoint["agent"])
        outputs.append(agent(torch.rand(64, 9, 2, 2, generator=torch.Generator().manual_seed(0)) > 0.5))
    torch.testing.assert_close(*outputs, rtol=1e-2, atol=1e-2)
    found, expected = (read_scalars(folder) for folder in (path, host))
    for tag in [x for x in expected if x.split("/")[0] in ("losses", "pool", "eval")]:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-3, atol=1e-4, err_msg=tag)
    assert waits == [2] * 3  # of two minibatches


def test_a_run_of_go_is_resumed_and_evaluated_on_the_device(tmp_path, capsys):
    whole, _ = play_go(GO, tmp_path / "whole")
    with pytest.raises(Interrupted):
        play_go(GO, tmp_path / "cut", last_epoch=2)
    (path,) = tmp_path.glob("cut/*/checkpoint.pt")
    play_go(f"--resume {path}", tmp_path / "cut")
    ends = [SimpleNamespace(tensors=dict(named_tensors(load(x)))) for x in (path, whole / "checkpoint.pt")]
    assert find_differences(*ends) == [] and len(ends[0].tensors) > 100
    with mock.patch.object(az, "ThreadPoolExecutor", AtOnce):
        printed = evaluate_on_both(az, capsys, str(path), "--eval-episodes", "2")
    assert printed[0] == printed[1]


# Change detection, without graphs


def play_change(flags: str, folder: Path, **patches) -> tuple[Path, list[int], list[int]]:
    """Run ppo_change_detection.py on the pretend GPU: its folder, the host's waits in losses, and in gradient steps."""
    loss_waits, step_waits = [], []

    def count(function, waits):
        def counted(*args):
            before = gpu.waits.total()
            found = function(*args)
            waits.append(gpu.waits.total() - before)
            return found

        return counted

    functions = {
        "ppo_loss": cd.ppo_loss,
        "detector_loss": cd.detector_loss,
        "take_step": cd.take_step,
    } | patches
    counted = {
        name: count(function, step_waits if name == "take_step" else loss_waits)
        for name, function in functions.items()
    }
    with mock.patch.multiple(cd, **counted), pretend_cuda() as gpu:
        cd.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.launches > 1000 and gpu.replays == 0
    (path,) = folder.iterdir()
    return path, loss_waits, step_waits


def test_change_detection_gives_on_the_device_what_it_gives_on_the_host(tmp_path, capsys):
    """Also in an evaluation. The host waits in a loss alone, once or twice a step for the queries that look."""
    path, loss_waits, step_waits = play_change(CHANGE, tmp_path / "device")
    cd.main([*CHANGE.split(), "--no-cuda", "--run-dir", str(tmp_path / "host")])
    (host,) = (tmp_path / "host").iterdir()
    theirs, ours = (dict(named_tensors(load(x / "checkpoint.pt"))) for x in (host, path))
    assert ours.keys() == theirs.keys() and len(step_waits) == 2 * cd.DETECTOR_STEPS + 3 * 2
    for tensor, value in ours.items():
        torch.testing.assert_close(value, theirs[tensor], rtol=1e-3, atol=1e-4, msg=tensor)
    found, expected = (
        {tag: x for tag, x in read_scalars(folder).items() if "SPS" not in tag and "seconds" not in tag}
        for folder in (path, host)
    )
    assert found.keys() == expected.keys()
    for tag in found:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-3, atol=1e-4, err_msg=tag)
    assert set(step_waits) == {0} and max(loss_waits) <= 4
    printed = evaluate_on_both(cd, capsys, str(path / "best.pt"))
    assert printed[0] == pytest.approx(printed[1], rel=1e-4)


def test_a_wait_and_a_tensor_of_the_host_in_an_update_of_change_detection_are_found(tmp_path):
    def wait(*args):
        metrics = take_step(*args)
        metrics.sum().item()
        return metrics

    def add(*args):
        loss, metrics = ppo_loss(*args)
        return (loss + torch.zeros(2)).sum(), metrics

    take_step, ppo_loss = cd.take_step, cd.ppo_loss
    _, _, step_waits = play_change(CHANGE, tmp_path / "wait", take_step=wait)
    assert set(step_waits) == {1}
    with pytest.raises(RuntimeError, match="at least two devices"):
        play_change(CHANGE, tmp_path / "add", ppo_loss=add)


# The pretend GPU itself


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=False),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "new": lambda x: x.new_tensor([1.0]),
    "copy": lambda x: x.copy_(torch.ones(3)),
    "mask": lambda x: x[x > 0],
    "put": lambda x: x.index_put_((x > 0,), x + 1),
    "index": lambda x: x[torch.tensor([0])],
    "nonzero": lambda x: x.nonzero(),
    "multinomial": lambda x: torch.multinomial(x, 1),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted_and_refused_in_a_capture(name):
    with pretend_cuda() as gpu:
        x = torch.ones(3).cuda()
        gpu.waits.clear()
        WAITS[name](x)
        assert gpu.waits.total() == 1
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
        assert set(gpu.waits) == set() and x.grad.device == x.device
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="gone"):
        x + 1


def test_a_capture_runs_nothing_and_a_replay_everything():
    with pretend_cuda():
        x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        graph, rng_state = torch.cuda.CUDAGraph(), torch.get_rng_state()
        with torch.cuda.graph(graph), torch.inference_mode():
            noise = torch.rand(3, device="cuda") + x
            total.add_(noise)
        assert is_same(torch.get_rng_state(), rng_state)
        assert noise.isnan().all() and total.tolist() == [0, 0, 0]
        x.zero_()
        expected = torch.rand(2, 3)
        torch.set_rng_state(rng_state)
        graph.replay()
        assert is_same(noise.cpu(), expected[0])
        graph.replay()
        assert is_same(total.cpu(), expected[0] + expected[1])
        stream = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="non-default"), torch.cuda.graph(graph, stream=stream):
            pass


def test_a_replay_keeps_numbers_and_needs_memory():
    with pretend_cuda():
        x, rate = torch.ones(3, device="cuda"), torch.tensor(2.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * rate
        rate.fill_(5.0)  # on the host, where a graph does not look
        x.fill_(3.0)
        graph.replay()
        assert y.tolist() == [6, 6, 6]
        view = x[1:]
        del x
        graph.replay()
        del view
        with pytest.raises(RuntimeError, match="memory has been freed"):
            graph.replay()


def test_modules_copies_and_autocast_stay_on_the_device():
    with pretend_cuda():
        layer = torch.nn.Linear(2, 2).to("cuda")
        other = copy.deepcopy(layer)
        torch.nn.init.zeros_(other.weight)
        x = torch.rand(3, 2, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        torch.cuda.make_graphed_callables(layer, (x,))(x).sum().backward()
        assert {y.device.type for y in (layer.weight, layer.weight.grad, other.weight, layer(x))} == {"cuda"}
        assert (layer.weight != 0).all()


def test_an_optimizer_that_is_not_capturable_is_refused():
    with pretend_cuda():
        weight = torch.ones(3, device="cuda", requires_grad=True)
        optimizer = torch.optim.Adam([weight], fused=True)
        weight.sum().backward()
        with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_copies_of_pinned_memory_are_under_way_until_a_wait():
    with pretend_cuda() as gpu:
        x, buffer = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
        gpu.waits.clear()
        buffer.copy_(x, non_blocking=True)
        late = x.to("cpu", non_blocking=True)
        assert gpu.waits.total() == 0 and buffer.isnan().all() and late.isnan().all()
        torch.cuda.synchronize()
        assert buffer.tolist() == late.tolist() == [1, 1, 1]
        x.copy_(buffer, non_blocking=True)
        torch.cuda.synchronize()
        buffer += 1
        x.copy_(buffer, non_blocking=True)
        buffer += 1
        with pytest.raises(RuntimeError, match="pinned buffer"):
            torch.cuda.synchronize()
