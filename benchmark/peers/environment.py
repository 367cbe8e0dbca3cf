"""Make the virtual environment of a peer, which is apart from the scripts' own packages.

python -m benchmark.peers.environment sb3     # prints the path of its Python
"""

import argparse
import hashlib
import subprocess
import venv
from pathlib import Path

PEERS = Path(__file__).resolve().parent


def make_environment(peer: str) -> Path:
    """Return the Python of a peer's own virtual environment, made again if requirements-`peer`.txt has
    changed."""
    requirements, folder = PEERS / f"requirements-{peer}.txt", PEERS / f".venv-{peer}"
    digest, stamp = hashlib.sha256(requirements.read_bytes()).hexdigest(), folder / "requirements.sha256"
    if not stamp.exists() or stamp.read_text() != digest:
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        packages = requirements.read_text().split()
        # torch first, by its exact version: if a CPU build is at hand, later ranges then accept it. And last
        # what asks for versions from years ago of packages that it runs well with today
        first = [package for package in packages if package.startswith("torch==")]
        last = [package for package in packages if package.startswith("cleanrl==")]
        others = [package for package in packages if package not in last]
        for chosen, flags in ((first, []), (others, []), (last, ["--no-deps", "--ignore-requires-python"])):
            if chosen:
                done = subprocess.run([*pip, *flags, *chosen], capture_output=True, text=True)
                if done.returncode:
                    reason = done.stderr.strip().splitlines()[-1]
                    raise OSError(f"peer {peer} cannot be installed (--only leaves it out): {reason}")
        stamp.write_text(digest)
    return folder / "bin" / "python"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    names = sorted(path.stem.removeprefix("requirements-") for path in PEERS.glob("requirements-*.txt"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="+", choices=names)
    return parser


if __name__ == "__main__":
    for name in make_parser().parse_args().peers:
        print(make_environment(name))
