"""What a run on the simulated GPU leaves."""

from pathlib import Path

import torch
from pretend_cuda import is_same
from scripts import load
from torch.utils._pytree import keystr, tree_leaves_with_path


def named_tensors(x):
    """The tensors in dictionaries, lists and tuples, by the way to them."""
    leaves = tree_leaves_with_path(x)
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


class DeviceRun:
    """What a run leaves, and how often the host waited in each call of a watched function."""

    def __init__(self, path: Path, calls=None, num_replays: int = 0):
        self.path, self.calls, self.num_replays = path, calls, num_replays
        self.checkpoint = load(path / "checkpoint.pt")
        self.tensors = named_tensors(self.checkpoint)

    def count_waits(self, name: str) -> list[int]:
        """Count the waits in each call of a function."""
        return self.calls[name]

    def find_differences(self, other) -> list[str]:
        """Name the tensors of two checkpoints that are not equal to the last bit."""
        x, y = self.tensors, other.tensors
        names = [name for name in x.keys() | y.keys() if "time" not in name]  # no seconds of gymnasium
        return [name for name in names if name not in x or name not in y or not is_same(x[name], y[name])]
