"""What all peers share: their common flags, and a run folder with result.json in the form of our scripts.

Imports the standard library alone, so that a peer's flags can be read where the peer is not installed.
"""

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for envs_shared


def fail(message: str) -> NoReturn:
    """Print one line for the user and exit with code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the flags."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def count(text: str) -> int:
    """An argparse type: a whole number above 0."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def make_parser(description: str, env_id: str | None) -> Parser:
    """A parser with the flags that all peers have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=description, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--env-id", default=env_id, help="the task, by the name that our scripts have for it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", default="runs", help="folder that holds the run folders")
    return parser


def get_version(package: str) -> str:
    """Name and version of an installed package."""
    return f"{package} {version(package)}"


class Run:
    """One run of the peer `script`: made once its imports are done, from when on the clocks count."""

    def __init__(self, args: argparse.Namespace, script: str):
        self.wall_start, self.cpu_start = time.time(), time.process_time()
        self.evaluation_seconds = 0.0  # CPU-seconds of evaluations on the way
        self.args, self.script, self.writer = args, script, None
        name = f"{args.env_id}__{script}__{args.seed}__{int(time.time())}".replace("/", "-").replace(":", "-")
        self.path = Path(args.run_dir) / name
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: cannot create {name} in it ({error.strerror})")

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of this process since the imports."""
        return time.process_time() - self.cpu_start

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """TensorBoard scalars of a step, and the CPU-seconds of training up to it."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.path))
        seconds = {"charts/cpu_seconds": self.cpu_seconds - self.evaluation_seconds}
        for name, value in (scalars | seconds).items():
            self.writer.add_scalar(name, value, step)

    def finish(self, headline: str, metrics: dict[str, float], env_steps: int, commit: str | None) -> None:
        """Write result.json and print a line; `commit` is the peer's name and version, None for what is ours."""
        if self.writer is not None:
            self.writer.close()
        result = {"script": self.script, "env_id": self.args.env_id, "seed": self.args.seed, "headline": headline}
        result |= {"metrics": metrics, "env_steps": env_steps, "wall_seconds": time.time() - self.wall_start}
        result |= {"cpu_seconds": self.cpu_seconds, "device": "cpu"}
        result["torch"] = sys.modules["torch"].__version__ if "torch" in sys.modules else "none"
        result |= {"commit": commit, "args": vars(self.args)}
        temporary = self.path / "result.json.tmp"
        temporary.write_text(json.dumps(result, indent=2))
        os.replace(temporary, self.path / "result.json")
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"{self.args.env_id}: {commit or self.script}: {values} in {result['wall_seconds']:.1f} s", end="; ")
        print(f"run folder {self.path}")
