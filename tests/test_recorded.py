"""The class Recorded by itself, and an edited copy that uses it, on the simulated GPU.

test_cuda.py compares the whole runs of all scripts.
"""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from device_runs import check_recorded, play
from pretend_cuda import is_same, pretend_cuda
from scripts import call_main, edit_script, find_run, import_file, load, start_and_kill

from algos import ppo

Pair = namedtuple("Pair", "first second")


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU as a script sets it up: on a stream of its own."""
    with pretend_cuda() as gpu:
        gpu.device = ppo.set_up_device(ppo.Args())
        yield gpu


def make_adder(gpu, args=None):
    """Make a function that adds its input to a sum on the device, with the number of its Python calls."""
    adder = SimpleNamespace(sum=torch.zeros(2, device=gpu.device), num_calls=0)

    def add(x):
        adder.num_calls += 1
        adder.sum += x * (args.scale if args else 1)
        return adder.sum + 0.5

    adder.add = add
    return adder


def make_input(gpu, *numbers):
    return torch.tensor([float(x) for x in numbers], device=gpu.device)


def test_the_first_call_is_ordinary_the_second_one_records_and_all_from_it_replay(gpu):
    """A recording computes nothing: each of five calls adds its input once."""
    adder = make_adder(gpu)
    recorded, found, counts = ppo.Recorded(adder.add, gpu.device), [], []
    for i in range(1, 6):
        found.append(recorded(make_input(gpu, i, 10 * i)).tolist())
        counts.append((adder.num_calls, gpu.replays))
    assert found == [[x + 0.5, 10 * x + 0.5] for x in (1, 3, 6, 10, 15)]
    assert adder.sum.tolist() == [15, 150]
    assert counts == [(1, 0), (2, 1), (2, 2), (2, 3), (2, 4)]


def test_inputs_are_read_when_the_function_is_called_and_do_not_change(gpu):
    """The recording has a memory of its own, whatever happens to the tensors that it was recorded with."""
    adder = make_adder(gpu)
    recorded, x = ppo.Recorded(adder.add, gpu.device), make_input(gpu, 1, 2)
    for _ in range(3):
        recorded(x)
    y = make_input(gpu, 5, 5)
    recorded(y)
    assert (x.tolist(), y.tolist(), adder.sum.tolist()) == ([1, 2], [5, 5], [8, 11])
    x.fill_(100)
    recorded(y)
    assert adder.sum.tolist() == [13, 16]


def test_a_replay_overwrites_the_output_of_the_one_before(gpu):
    adder = make_adder(gpu)
    recorded = ppo.Recorded(adder.add, gpu.device)
    first, second, third = (recorded(make_input(gpu, 1, 1)) for _ in range(3))
    assert first.tolist() == [1.5, 1.5] and second is third and third.tolist() == [3.5, 3.5]


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), ()])
def test_an_input_of_another_shape_raises(shape, gpu):
    """Also one that could be broadcast to the shape of the recording. The sum stays."""
    adder = make_adder(gpu)
    recorded = ppo.Recorded(adder.add, gpu.device)
    for _ in range(2):
        recorded(make_input(gpu, 1, 2))
    with pytest.raises(AssertionError, match="inputs of a recorded function must keep their shapes"):
        recorded(torch.zeros(shape, device=gpu.device))
    assert adder.sum.tolist() == [2, 4]


def test_inputs_may_be_named_tuples_and_outputs_dictionaries(gpu):
    """Each field is that of the call."""

    def combine(pair, shift):
        assert isinstance(pair, Pair)
        return {"difference": pair.first - pair.second, "sum": pair.first + pair.second + shift}

    recorded = ppo.Recorded(combine, gpu.device)
    for i in range(4):
        pair = Pair(second=make_input(gpu, i, 2), first=make_input(gpu, 10, 20 * i))
        found = recorded(pair, make_input(gpu, 100 * i))
        expected = {"difference": [10 - i, 20 * i - 2], "sum": [10 + 101 * i, 2 + 120 * i]}
        assert {name: x.tolist() for name, x in found.items()} == expected
    assert gpu.replays == 3


def test_a_function_without_inputs_is_recorded(gpu):
    counter = torch.zeros((), device=gpu.device)
    recorded = ppo.Recorded(lambda: counter.add_(1), gpu.device)
    for _ in range(4):
        recorded()
    assert counter.item() == 4 and gpu.replays == 3


def test_an_optimizer_creates_its_state_in_the_ordinary_call(gpu):
    """Recorded steps equal ordinary ones to the last bit, with a rate that is a tensor and changes."""
    found = []
    for is_recorded in (True, False):
        torch.manual_seed(1)
        network = torch.nn.Linear(3, 2).to(gpu.device)
        rate = torch.tensor(0.1, device=gpu.device)
        optimizer = torch.optim.Adam(network.parameters(), rate, fused=True, capturable=True)

        def update(x, network=network, optimizer=optimizer):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()

        call = ppo.Recorded(update, gpu.device) if is_recorded else update
        for i in range(5):
            rate.fill_(0.1 / (i + 1))
            call(torch.full((4, 3), float(i + 1), device=gpu.device))
        found.append([*network.parameters()])
    assert all(is_same(x.detach().host, y.detach().host) for x, y in zip(*found, strict=True))
    assert gpu.replays == 4


@pytest.mark.parametrize("reason", ["CUDA_GRAPHS is False", "two processes", "a CPU"])
def test_nothing_is_recorded_where_graphs_cannot_be(reason, gpu, monkeypatch):
    """All calls are ordinary ones, of inputs of any shape."""
    device = gpu.device
    if reason == "CUDA_GRAPHS is False":
        monkeypatch.setattr(ppo, "CUDA_GRAPHS", False)
    elif reason == "two processes":
        monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    else:
        device = torch.device("cpu")
    adder = make_adder(gpu)
    recorded = ppo.Recorded(adder.add, device)
    for i in range(4):
        recorded(make_input(gpu, *[1] * (1 + i % 2)))
    assert adder.num_calls == 4 and gpu.replays == 0 and not gpu.graphs
    assert adder.sum.tolist() == [4, 4]


def test_a_setting_that_changes_is_recorded_again_and_nothing_else_is(gpu):
    """Not if it gets an equal value, and not if a tensor changes. Each call counts once."""
    args = SimpleNamespace(scale=1.0, other="word")
    adder = make_adder(gpu, args)
    recorded, expected, num_calls = ppo.Recorded(adder.add, gpu.device, args), 0.0, []
    for args.scale in (1.0, 1.0, 1.0, 0.5, 0.5, 1 / 2, 0.25, 1.0, 1.0):
        expected += 3 * args.scale
        recorded(make_input(gpu, 3, 3))
        num_calls.append(adder.num_calls)
        assert adder.sum.tolist() == [expected, expected]
    assert num_calls == [1, 2, 2, 3, 3, 3, 4, 5, 5]
    args.other = "another word"
    recorded(make_input(gpu, 3, 3))
    assert adder.num_calls == 6 and gpu.replays == 9


def test_a_setting_is_frozen_in_a_recording_that_does_not_get_the_settings(gpu):
    """As the docstring says."""
    args = SimpleNamespace(scale=1.0)
    adder = make_adder(gpu, args)
    recorded = ppo.Recorded(adder.add, gpu.device)
    for args.scale in (1.0, 1.0, 9.0):
        recorded(make_input(gpu, 1, 1))
    assert adder.sum.tolist() == [3, 3]


# A setting that a user's loop changes

SHORT = "--env-id Pendulum-v1 --num-envs 4 --num-steps 4 --update-epochs 2 --num-minibatches 2"
SHORT += " --total-timesteps 128 --eval-episodes 0 --norm-obs"
RATE = "        rate = args.learning_rate\n"
ANNEALED = "        args.ent_coef = start * (1 - run.step / args.total_timesteps)\n"
LOOP = "    while True:\n"


@pytest.fixture
def annealed(tmp_path):
    """A copy of ppo.py whose loop anneals the entropy coefficient by writing into `args`."""
    changes = (LOOP, f"    start = args.ent_coef\n{LOOP}"), (RATE, f"{ANNEALED}{RATE}")
    return import_file("edited_copy", edit_script("ppo", tmp_path / "copy", *changes))


def test_a_setting_that_the_loop_anneals_is_not_frozen_in_the_recording(annealed, tmp_path):
    """Weights and losses equal those without graphs, to the last bit; those without annealing are others."""
    flags = f"{SHORT} --ent-coef 0.5"
    graphs = play(annealed, flags, tmp_path / "graphs", (), CUDA_GRAPHS=True)
    eager = play(annealed, flags, tmp_path / "eager", (), CUDA_GRAPHS=False)
    check_recorded(graphs, eager)
    constant = play(ppo, flags, tmp_path / "constant", (), CUDA_GRAPHS=True)
    name = "['agent']['actor_logstd']"
    assert not is_same(constant.tensors[name], graphs.tensors[name])


def test_a_setting_that_the_loop_anneals_resumes_from_the_flags_value(annealed, tmp_path, monkeypatch):
    """Not from the annealed value. Both checkpoints hold the flag's."""
    found, ppo_loss = [], annealed.ppo_loss
    monkeypatch.setattr(annealed, "ppo_loss", lambda *a: found.append(a[-1].ent_coef) or ppo_loss(*a))
    flags = f"{SHORT} --ent-coef 0.01 --eval-episodes 1 --eval-interval 1 --no-cuda"
    path = start_and_kill(annealed, 4, tmp_path / "runs", flags)
    assert [load(path / name)["args"]["ent_coef"] for name in ("checkpoint.pt", "best.pt")] == [0.01] * 2
    call_main(annealed, f"--resume {path / 'checkpoint.pt'}")
    # Iterations of 16 of 128 steps with four updates each
    assert found == [0.01 * (1 - i / 8) for i in range(8) for _ in range(4)]
    assert load(find_run(tmp_path / "runs") / "checkpoint.pt")["args"]["ent_coef"] == 0.01
