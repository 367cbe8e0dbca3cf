"""Reading and checking suites, the TOML files that benchmark/README.md describes."""

import argparse
import contextlib
import difflib
import functools
import hashlib
import importlib.util
import io
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import common

SET_BY_HARNESS = ("--seed", "--run-dir", "--resume", "--evaluate", "--track")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}")
sys.path.append(str(common.PEERS))  # for what the peers share


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
    in_a_row: int = 1
    better: str = "higher"
    cpus: int = 1
    gpus: float = 0
    hours: float = 24
    environment: str | None = None

    @property
    def words(self) -> list[str]:
        """The command's words."""
        return shlex.split(self.command)

    @functools.cached_property
    def path(self) -> str:
        """The script, as the command names it."""
        if self.words[0] == "python":
            return self.words[1]
        return parse_torchrun(self.words).training_script

    @property
    def flags(self) -> list[str]:
        """What follows the script."""
        return self.words[self.words.index(self.path) + 1 :]

    @property
    def script(self) -> str:
        """The script's name."""
        return Path(self.path).stem

    @property
    def name(self) -> str:
        """SCRIPT/TASK/SETTING, the same for all seeds."""
        return f"{self.script}/{self.task}/{self.setting}"

    def hash(self) -> str:
        """Of the command and of the script's text, as it is now: what has to stay for a result to count."""
        content = f"{self.command}\n".encode() + (common.ROOT / self.path).read_bytes()
        return hashlib.sha256(content).hexdigest()[:12]


CELL_TYPES = {f.name: f.type for f in fields(Cell) if f.name != "seed"}
RATIO_KEYS = ("title", "quantity", "better", "ours", "peer")


def parse_torchrun(words: list[str]) -> argparse.Namespace:
    """torchrun's own reading of a command; SystemExit where it refuses it."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(words[1:])


def list_scripts() -> list[str]:
    """What a cell may run: our scripts, and the programs in benchmark/peers."""
    ours = [f"algos/{path.name}" for path in (common.ROOT / "algos").glob("*.py")]
    peers = [path.name for path in common.PEERS.glob("*.py") if "peer.make_parser(" in path.read_text()]
    return sorted(ours) + [f"benchmark/peers/{name}" for name in sorted(peers)]


@functools.cache
def load_script(path: str):
    """The module of a script."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, common.ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def parse_flags(cell: Cell) -> None:
    """Let the script's own parser read the flags; SystemExit where it refuses them."""
    module = load_script(cell.path)
    if not cell.path.startswith("algos/"):
        module.make_parser().parse_args([*cell.flags, "--seed", "1", "--run-dir", "runs"])
        return
    import tyro

    args = tyro.cli(module.Args, args=cell.flags)
    if cell.words[0] == "python":  # with torchrun, some checks depend on the number of processes
        module.check_args(args)


def check_command(cell: Cell, where: str) -> None:
    """Raise SuiteError where the script would refuse the command of `cell`, or there is no such script."""
    output, is_torchrun = io.StringIO(), cell.words[0] == "torchrun"
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            if is_torchrun and not parse_torchrun(cell.words).standalone:
                raise SuiteError(f"{where}: torchrun needs --standalone, as other cells may run beside it")
            if cell.path not in (known := list_scripts()):
                near = difflib.get_close_matches(cell.path, known, 1, 0.4)
                hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
                raise SuiteError(f"{where}: unknown script {cell.path} ({hint})")
            for flag in cell.flags:
                if flag.split("=")[0].replace("_", "-") in SET_BY_HARNESS:
                    raise SuiteError(f"{where}: {flag} is not for a suite: the harness sets seeds and run folders")
            parse_flags(cell)
        except SystemExit:
            words = re.sub(r"([\s│╭╮╰╯─┃━]|-{5,})+", " ", output.getvalue()).split("error: ")[-1]
            words = words.split(" For full helptext")[0].strip()
            raise SuiteError(f"{where}: command is refused: {words[:300]}") from None


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
    if seeds is None:
        raise SuiteError(f"{where}: no seeds: write seeds = [1, 2, 3] in it, or above all cells")
    if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
        raise SuiteError(f"{where}: seeds = {seeds!r} is not a list of numbers, as in [1, 2, 3]")
    if len(set(seeds)) < len(seeds):
        raise SuiteError(f"{where}: duplicate seeds in {seeds}")
    return seeds


def check_direction(better: str, where: str) -> None:
    """Raise SuiteError unless `better` is a direction."""
    if better not in ("higher", "lower"):
        raise SuiteError(f'{where}: better = "{better}" is neither "higher" nor "lower"')


def check_cell(cell: Cell, where: str) -> None:
    """Raise SuiteError for values that cannot be."""
    try:
        words = cell.words
    except ValueError as error:
        raise SuiteError(f"{where}: command: {error}") from None
    if len(words) < 2 or words[0] not in ("python", "torchrun"):
        raise SuiteError(f"{where}: command = {cell.command!r} does not begin with python or torchrun and a script")
    for key in ("task", "setting"):
        if not WORD.fullmatch(getattr(cell, key)):
            raise SuiteError(f"{where}: {key} = {getattr(cell, key)!r} has to be a name of letters, digits and ._+=-")
    check_direction(cell.better, where)
    if cell.threshold is not None and cell.curve is None:
        raise SuiteError(f"{where}: a threshold is of a curve: give its tag, curve = ...")
    if cell.in_a_row < 1:
        raise SuiteError(f"{where}: in_a_row is 1 or more")
    if cell.cpus < 1 or not cell.hours > 0 or not (0 <= cell.gpus <= 1 or cell.gpus % 1 == 0 < cell.gpus):
        raise SuiteError(f"{where}: cpus is 1 or more, gpus a fraction or a whole number, hours above 0")
    if cell.environment and not (common.PEERS / f"requirements-{cell.environment}.txt").exists():
        raise SuiteError(f"{where}: no benchmark/peers/requirements-{cell.environment}.txt")
    check_command(cell, where)


def check_ratio(ratio: dict, cells: dict[str, Cell], where: str) -> None:
    """Raise SuiteError for a ratio of what the cells do not have."""
    check_types(ratio, dict.fromkeys((*RATIO_KEYS, "peer_quantity"), "str"), where, RATIO_KEYS)
    check_direction(ratio["better"], where)
    for side, quantity in (("ours", ratio["quantity"]), ("peer", ratio.get("peer_quantity", ratio["quantity"]))):
        if ratio[side] not in cells:
            raise SuiteError(f"{where}: {side} = {ratio[side]} is no cell of this suite")
        if quantity.endswith("_to_threshold") and cells[ratio[side]].threshold is None:
            raise SuiteError(f"{where}: {quantity}: {ratio[side]} has no threshold")


def read_tables(content: dict, key: str, path: Path) -> list[dict]:
    """The tables [[key]] of a file; SuiteError where they are something else."""
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SuiteError(f"{path}: {key} is not a list of tables [[{key}]]")
    return tables


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
    rows = []
    for number, table in enumerate(read_tables(content, "cells", path), 1):
        where = f"{path}, cell {number}"
        seeds = check_seeds(table.pop("seeds", content.get("seeds")), where)
        check_types(table, CELL_TYPES, where, ("task", "setting", "command"))
        rows.append([Cell(**table, seed=seed) for seed in seeds])
        check_cell(rows[-1][0], where)
    if not rows:
        raise SuiteError(f"{path}: no [[cells]]")
    cells = [row[i] for i in range(max(map(len, rows))) for row in rows if i < len(row)]
    seen = {}
    for cell in cells:
        for key in ((cell.name, cell.seed), (*cell.words, cell.seed)):
            if key in seen:
                raise SuiteError(f"{path}: duplicate cells {seen[key]} and {cell.name}, seed {cell.seed}")
            seen[key] = cell.name
    ratios = read_tables(content, "ratios", path)
    for number, ratio in enumerate(ratios, 1):
        check_ratio(ratio, {cell.name: cell for cell in cells}, f"{path}, ratio {number}")
    return cells, ratios
