"""Shared by all peers: common flags, and a run folder with TensorBoard events like those of our scripts.

Imports the standard library alone, so that a peer's flags can be read where the peer is not installed.
"""

import argparse
import hashlib
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]


def fail(message: str) -> NoReturn:
    """Print one line for the user and exit with code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the flags."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def count(text: str) -> int:
    """Parse a whole number above 0, as an argparse type."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def make_parser(description: str, env_id: str | None) -> Parser:
    """Make a parser with the flags that all peers have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=description, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--env-id", default=env_id, help="the task, by the name that our scripts have for it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", default="runs", help="folder that holds the run folders")
    return parser


def make_ppo_parser(description: str) -> Parser:
    """Make a parser with the flags that all peers of ppo.py have."""
    parser = make_parser(description, "CartPole-v1")
    parser.add_argument("--total-timesteps", type=count, default=100_000)
    return parser


def find_file(checkout: str | None, name: str, repository: str, commit: str, sha256: str) -> Path:
    """Return the path of a file in a checkout of a repository on GitHub, whose version has to be that of the
    commit."""
    path = Path(checkout or "", name)
    if not checkout or not path.is_file():
        fail(f"--checkout {checkout}: no {name} in it; git clone https://github.com/{repository}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        fail(f"--checkout {checkout}: its {path.name} is not that of commit {commit}; git checkout {commit}")
    return path.resolve()


def read_ml4co(path: str, num_nodes: int):
    """Read points [M, N, 2], and tours [M, N] from 0 or None, of ML4CO text: `x y x y ... output 1 4 ... 1` a
    line."""
    import numpy as np

    try:
        text = Path(path).read_text()
        rows = np.loadtxt(text.replace("output", "").splitlines(), ndmin=2)
        if rows.shape[1] != (3 * num_nodes + 1 if "output" in text else 2 * num_nodes):
            raise ValueError(f"a line has {rows.shape[1]} numbers")
        points, tours = rows[:, : 2 * num_nodes], rows[:, 2 * num_nodes : -1].astype(int) - 1
        if "output" in text and not (np.sort(tours) == np.arange(num_nodes)).all():
            raise ValueError("a tour does not visit each node once")
    except (OSError, ValueError) as error:
        fail(f"--data {path}: not instances of {num_nodes} nodes in ML4CO text ({error})")
    return points.reshape(-1, num_nodes, 2), tours if "output" in text else None


def score_tours(points, tours, references=None) -> dict[str, float]:
    """Return the mean length of tours [M, N] and, with `references`, mean and standard deviation of gaps in
    %."""
    import numpy as np

    def measure(tours):
        stops = np.take_along_axis(points, tours[..., None], 1)
        return np.linalg.norm(stops - np.roll(stops, -1, 1), axis=-1).sum(1)

    assert (np.sort(tours) == np.arange(points.shape[1])).all()
    scores = {"length": measure(tours).mean().item()}
    if references is not None:
        gaps = 100 * (measure(tours) / measure(references) - 1)
        scores |= {"gap": gaps.mean().item(), "gap_std": gaps.std().item()}
    return scores


def make_mlp(num_inputs: int, num_outputs: int, last_gain: float):
    """Make the network of CleanRL's ppo.py: two tanh layers of 64, orthogonal weights, biases of zero."""
    from torch import nn

    sizes = ((num_inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, num_outputs, last_gain))
    layers = []
    for num_from, num_to, gain in sizes:
        linear = nn.Linear(num_from, num_to)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def get_version(package: str) -> str:
    """Return name and version of an installed package."""
    return f"{package} {version(package)}"


class Run:
    """One run of the peer `script`, which is `program` (name and version, or None for our own code).

    Make it after the peer's imports, since its clocks start at once. The run folder holds the events, with
    the flags and `program` as text.
    """

    def __init__(self, args: argparse.Namespace, script: str, program: str | None):
        import torch.utils.tensorboard  # noqa: F401  # slow: kept out of the timing

        self.args, self.program, self.writer = args, program, None
        name = f"{args.env_id}__{script}__{args.seed}__{int(time.time())}".replace("/", "-").replace(":", "-")
        self.path = Path(args.run_dir) / name
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: cannot create {name} in it ({error.strerror})")
        self.wall_start, self.cpu_start = time.time(), time.process_time()
        self.evaluation_seconds = 0.0  # CPU-seconds of evaluations during training

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU-seconds of this process since its imports."""
        return time.process_time() - self.cpu_start

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Write TensorBoard scalars of a step, and the CPU-seconds of training if they are not among them."""
        seconds = {"charts/cpu_seconds": self.cpu_seconds - self.evaluation_seconds}
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.path))
            rows = "".join(f"|{name}|{value}|\n" for name, value in vars(self.args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
            if self.program:
                self.writer.add_text("program", self.program)
        for name, value in (seconds | scalars).items():
            self.writer.add_scalar(name, value, step)

    def finish(self, step: int, metrics: dict[str, float]) -> None:
        """Write the final metrics, which end the log, and print a line."""
        self.log(step, {name if "/" in name else f"eval/{name}": value for name, value in metrics.items()})
        self.writer.close()
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        seconds = time.time() - self.wall_start
        print(
            f"{self.args.env_id}: {self.program or 'ours'}: {values} in {seconds:.1f} s; "
            f"run folder {self.path}"
        )
