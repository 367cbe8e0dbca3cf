"""Run one of our scripts by the peers' clock: `python -m benchmark.peers.clock algos/ppo.py --seed 1`.

Started by itself, a script logs the CPU-seconds of its loop as `charts/cpu_seconds`. Here they are, as in
`peer.Run`, all CPU-seconds of the process since its imports and flags, without evaluations: set-up, logging
and checkpoints count. Checkpoints hold them too, so that a resumed run continues counting.
"""

import importlib
import os
import sys
import time

import torch._dynamo  # noqa: F401  # what torch.optim imports on first use: kept out, as in the peers


def main() -> None:
    """Run the script that the command line names, with its flags."""
    del sys.argv[0]
    folder, file = os.path.split(sys.argv[0])
    sys.path[0] = folder
    script = importlib.import_module(file.removesuffix(".py"))
    train, evaluate = script.train, script.evaluate
    uncounted = 0.0  # CPU-seconds
    current = None  # the script's Run

    def start_clock(args, run):
        nonlocal uncounted, current
        current = run
        uncounted = time.process_time() - run.cpu_seconds  # those of a run that is resumed, else 0
        return train(args, run)

    def stop_clock(*args, **options):
        nonlocal uncounted
        start = time.process_time()
        scores = evaluate(*args, **options)
        uncounted += time.process_time() - start
        return scores

    class Writer(script.SummaryWriter):
        def add_scalar(self, tag, value, step):
            if tag == "charts/cpu_seconds":
                value = current.cpu_seconds = time.process_time() - uncounted
            super().add_scalar(tag, value, step)

    script.train, script.evaluate, script.SummaryWriter = start_clock, stop_clock, Writer
    script.main()
    if script.RANK > 0:
        os._exit(0)  # as the script itself ends


if __name__ == "__main__":
    main()
