"""What the two sides of benchmark/tsp_speed.py share: CPU-seconds of a function, and its dispatched operations."""

import statistics
import time

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """Counts dispatched operations: those that launch work, and views, which do not."""

    def __init__(self):
        super().__init__()
        self.operations = self.views = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        self.views += is_view
        self.operations += not is_view
        return func(*args, **(kwargs or {}))


def measure(train_step, decode, repeats: int) -> dict[str, float]:
    """Median CPU-seconds of a call of each, after three calls, and the operations of a training step."""
    result = {}
    for name, fn in (("train_step", train_step), ("greedy_decode", decode)):
        times = []
        for i in range(repeats + 3):
            start = time.process_time()
            fn()
            if i >= 3:
                times.append(time.process_time() - start)
        result[name] = statistics.median(times)
    with CountOperations() as counter:
        train_step()
    return result | {"operations": counter.operations, "views": counter.views}
