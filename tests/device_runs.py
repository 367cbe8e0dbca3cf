"""Runs on the simulated GPU, and what they leave."""

from pathlib import Path
from unittest import mock

import torch
from pretend_cuda import is_same, pretend_cuda
from scripts import find_run, load, read_losses
from torch.utils._pytree import keystr, tree_leaves_with_path


def named_tensors(x):
    """The tensors in dictionaries, lists and tuples, by the way to them."""
    leaves = tree_leaves_with_path(x)
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


class DeviceRun:
    """What a run leaves, and how often the host waited in each call of a watched function."""

    def __init__(self, path: Path, waits=None, num_replays: int = 0):
        self.path, self.waits, self.num_replays = path, waits, num_replays
        self.checkpoint = load(path / "checkpoint.pt")
        self.tensors = named_tensors(self.checkpoint)


def play(module, flags: str, folder: Path, watched, **patches) -> DeviceRun:
    """Run a script, with patches, on the simulated GPU; count the waits in each call of watched functions."""
    waits = {name: [] for name in watched}

    def watch(name):
        function = patches.get(name, getattr(module, name))

        def call(*args, **options):
            before = gpu.num_waits
            returned = function(*args, **options)
            waits[name].append(gpu.num_waits - before)
            return returned

        return call

    patches |= {name: watch(name) for name in watched}
    with mock.patch.multiple(module, **patches), pretend_cuda() as gpu:
        module.main([*flags.split(), "--run-dir", str(folder)])
        assert gpu.num_waits > 20 and (gpu.replays == 0 or module.CUDA_GRAPHS)
    return DeviceRun(find_run(folder), waits, gpu.replays)


def check_recorded(graphs: DeviceRun, eager: DeviceRun) -> None:
    """Compare tensors of checkpoints, and losses, to the last bit; without graphs nothing is replayed."""
    assert graphs.num_replays > 1 and eager.num_replays == 0
    x, y = graphs.tensors, eager.tensors
    names = [name for name in x.keys() | y.keys() if "time" not in name]  # no seconds of gymnasium
    assert [name for name in names if name not in x or name not in y or not is_same(x[name], y[name])] == []
    assert len(names) > 20
    assert read_losses(graphs.path) == read_losses(eager.path) != {}
