"""What all programs of the benchmark share: paths, errors of one line, and the command line."""

import sys
from pathlib import Path

try:
    import scipy  # noqa: F401  # which programs that import this file first need
    import tyro
except ImportError as error:
    print(f"{error}: pip install -r benchmark/requirements.txt", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "benchmark"
RESULTS = BENCHMARK / "results"
SUITES = BENCHMARK / "suites"
PEERS = BENCHMARK / "peers"
FIGURES = ROOT / "docs/figures"


class ResultsError(ValueError):
    """One line that says what is wrong with a suite, its runs or its results."""


def require(is_right: object, message: str):
    """Raise ResultsError with `message` unless `is_right`."""
    if not is_right:
        raise ResultsError(message)


def run_main(main, args_type: type, description: str):
    """Run a program on its command line; an error of its input or of the disk is one line and exit code 2."""
    name = Path(sys.argv[0]).name
    program = f"python -m benchmark.{name.removesuffix('.py')}"
    args = tyro.cli(args_type, prog=program, description=description)
    try:
        sys.exit(main(args))
    except (ResultsError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


def write_atomically(path: Path, text: str):
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
