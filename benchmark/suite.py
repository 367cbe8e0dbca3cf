"""Suites: reading and checking the TOML files that say what benchmark/run.py runs.

seeds = [1, 2, 3]                      # of every cell that names none of its own

[[cells]]
task = "CartPole-v1"                   # what is compared with what in the report
setting = "default"
command = "python algos/ppo.py"        # as one would type it; the harness adds --seed and --run-dir
curve = "charts/return_last_20"        # tag of the learning curve
threshold = 475                        # of the curve, for steps and seconds to get there
better = "higher"                      # or "lower": of the curve and of the headline metric
cpus = 1
gpus = 0                               # may be a fraction
hours = 1                              # killed, and reported as failed, after that
environment = "sb3"                    # of a peer: benchmark/peers/requirements-sb3.txt

[[ratios]]                             # a line of the report's headline table
title = "CartPole-v1: CPU-seconds to a return of 475"
quantity = "seconds_to_threshold"      # a quantity of records.QUANTITIES, or a metric of result.json
better = "lower"
ours = "ppo/CartPole-v1/default"
peer = "sb3_ppo/CartPole-v1/tuned"
"""

import contextlib
import hashlib
import importlib
import importlib.util
import io
import re
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import common
import tomllib

OURS, PEERS = common.ROOT / "algos", common.ROOT / "benchmark" / "peers"
SET_BY_HARNESS = ("--seed", "--run-dir", "--resume", "--evaluate", "--track")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


class SuiteError(ValueError):
    """What is wrong with a suite, in one line."""


@dataclass(frozen=True)
class Cell:
    """One run: a command and a seed."""

    task: str
    setting: str
    command: str
    seed: int
    curve: str | None = None
    threshold: float | None = None
    better: str = "higher"
    cpus: int = 1
    gpus: float = 0
    hours: float = 24
    environment: str | None = None

    @property
    def path(self) -> str:
        """The script, as the command names it."""
        return next(word for word in shlex.split(self.command) if word.endswith(".py"))

    @property
    def flags(self) -> list[str]:
        """What follows the script."""
        words = shlex.split(self.command)
        return words[words.index(self.path) + 1 :]

    @property
    def script(self) -> str:
        """The script's name."""
        return Path(self.path).stem

    @property
    def name(self) -> str:
        """SCRIPT/TASK/SETTING, the same for all seeds."""
        return f"{self.script}/{self.task}/{self.setting}"

    def hash(self) -> str:
        """Of the command and of the script's text: what has to stay for a result to count."""
        content = f"{self.command}\n".encode() + (common.ROOT / self.path).read_bytes()
        return hashlib.sha256(content).hexdigest()[:12]


CELL_TYPES = {f.name: f.type for f in fields(Cell) if f.name != "seed"}
RATIO_KEYS = ("title", "quantity", "better", "ours", "peer")


def check_types(table: dict, types: dict, where: str, required: tuple[str, ...]) -> None:
    """Raise SuiteError for keys that are missing or unknown and for values of another type."""
    for key in required:
        if key not in table:
            raise SuiteError(f"{where}: no {key}")
    for key, value in table.items():
        if key not in types:
            raise SuiteError(f"{where}: unknown key {key} (there are: {', '.join(types)})")
        number = (int, float) if "float" in str(types[key]) else int if "int" in str(types[key]) else str
        if not isinstance(value, number) or isinstance(value, bool):
            raise SuiteError(f"{where}: {key} = {value!r} is not a {'text' if number is str else 'number'}")


def check_seeds(seeds, where: str) -> list[int]:
    """`seeds` if it is a list of different numbers; else SuiteError."""
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
        raise SuiteError(f"{where}: seeds = {seeds!r} is not a list of numbers")
    if len(set(seeds)) < len(seeds):
        raise SuiteError(f"{where}: duplicate seeds in {seeds}")
    return seeds


def check_flags(cell: Cell, where: str) -> None:
    """Raise SuiteError where the script would refuse the flags of `cell`."""
    known = {"algos": sorted(p.stem for p in OURS.glob("*.py")), "benchmark/peers": list_peers()}
    folder = str(Path(cell.path).parent)
    if cell.script not in known.get(folder, []):
        scripts = ", ".join(f"{folder}/{name}.py" for folder, names in known.items() for name in names)
        raise SuiteError(f"{where}: unknown script {cell.path} (there are: {scripts})")
    for flag in cell.flags:
        if flag.split("=")[0] in SET_BY_HARNESS:
            raise SuiteError(f"{where}: {flag} is not for a suite: the harness sets seeds and run folders")
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            parse_flags(folder, cell)
    except SystemExit:
        words = re.sub(r"[\s│╭╮╰╯─┃━]+", " ", output.getvalue()).strip()
        raise SuiteError(f"{where}: {cell.path} refuses its flags: {words[:300]}") from None


def list_peers() -> list[str]:
    """Names of the programs in benchmark/peers that the harness may run."""
    return sorted(p.stem for p in PEERS.glob("*.py") if '__name__ == "__main__"' in p.read_text())


def parse_flags(folder: str, cell: Cell) -> None:
    """Let the script's own parser read the flags; SystemExit where it refuses them."""
    if folder == "algos":
        import tyro

        sys.path[:0] = [str(common.ROOT)]
        module = importlib.import_module(f"algos.{cell.script}")
        sys.path.remove(str(common.ROOT))
        args = tyro.cli(module.Args, args=cell.flags)
        if cell.command.startswith("python "):  # with torchrun, some checks depend on the number of processes
            module.check_args(args)
        return
    sys.path[:0] = [str(PEERS)]
    spec = importlib.util.spec_from_file_location(f"peers_{cell.script}", PEERS / f"{cell.script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(PEERS))
    module.make_parser().parse_args([*cell.flags, "--seed", "1", "--run-dir", "runs"])


def read_suite(path: Path) -> tuple[list[Cell], list[dict]]:
    """Cells, seed by seed, and ratios of the TOML file at `path`; SuiteError for what is wrong."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{path}: not TOML: {error}") from None
    if unknown := content.keys() - {"seeds", "cells", "ratios"}:
        raise SuiteError(f"{path}: unknown key {min(unknown)} (there are: seeds, cells, ratios)")
    tables, default_seeds = content.get("cells", []), content.get("seeds")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise SuiteError(f"{path}: no [[cells]]")
    rows = []
    for number, table in enumerate(tables, 1):
        where = f"{path}, cell {number}"
        seeds = check_seeds(table.pop("seeds", default_seeds), where)
        check_types(table, CELL_TYPES, where, ("task", "setting", "command"))
        rows.append([make_cell(table, seed, where) for seed in seeds])
        check_flags(rows[-1][0], where)
    cells = [row[i] for i in range(max(map(len, rows))) for row in rows if i < len(row)]
    seen = {}
    for cell in cells:
        for key in ((cell.name, cell.seed), (cell.command, cell.seed)):
            if key in seen:
                raise SuiteError(f"{path}: duplicate cells {seen[key]} and {cell.name}, seed {cell.seed}")
            seen[key] = cell.name
    names, ratios = {cell.name for cell in cells}, content.get("ratios", [])
    for number, ratio in enumerate(ratios, 1):
        where = f"{path}, ratio {number}"
        check_types(ratio, dict.fromkeys((*RATIO_KEYS, "peer_quantity"), "str"), where, RATIO_KEYS)
        check_choice(ratio["better"], where)
        for side in ("ours", "peer"):
            if ratio[side] not in names:
                raise SuiteError(f"{where}: {side} = {ratio[side]} is no cell of this suite")
    return cells, ratios


def check_choice(better: str, where: str) -> None:
    """Raise SuiteError unless `better` is a direction."""
    if better not in ("higher", "lower"):
        raise SuiteError(f'{where}: better = "{better}" is neither "higher" nor "lower"')


def make_cell(table: dict, seed: int, where: str) -> Cell:
    """The cell of a checked `table`; SuiteError for values that cannot be."""
    cell = Cell(**table, seed=seed)
    try:
        words = shlex.split(cell.command)
    except ValueError as error:
        raise SuiteError(f"{where}: command: {error}") from None
    if len(words) < 2 or words[0] not in ("python", "torchrun") or not any(word.endswith(".py") for word in words):
        raise SuiteError(f"{where}: command = {cell.command!r} does not begin with python or torchrun and a script")
    for key in ("task", "setting"):
        if not WORD.fullmatch(getattr(cell, key)):
            raise SuiteError(f"{where}: {key} = {getattr(cell, key)!r} has to be a name of letters, digits and ._+=-")
    check_choice(cell.better, where)
    if cell.cpus < 1 or cell.gpus < 0 or cell.hours <= 0:
        raise SuiteError(f"{where}: cpus has to be at least 1, gpus at least 0, hours above 0")
    if cell.environment and not (PEERS / f"requirements-{cell.environment}.txt").exists():
        raise SuiteError(f"{where}: no benchmark/peers/requirements-{cell.environment}.txt")
    return cell
