"""Reading and checking suites, the TOML files that benchmark/README.md describes."""

import argparse
import ast
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
from dataclasses import dataclass
from pathlib import Path

import common

KEYS = ("seeds", "cells", "ratios", "tables", "summary")
SUMMARY_NUMBER = re.compile(r"{([^\s}]+) ([^\s}]+) ([^\s}]+)}")  # {CELL QUANTITY FORMAT}, {CELL:CELL ...} for a ratio
SET_BY_HARNESS = ("--seed", "--run-dir", "--resume", "--evaluate", "--track")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}")
FILE = r"(algos|benchmark)/[\w./-]+"
sys.path.append(str(common.PEERS))  # for what the peers share


class SuiteError(common.ResultsError):
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
        """Of the command and of all files it uses, as they are now: what has to stay for a result to count."""
        files = {*find_used_files(common.ROOT / self.path)}
        files |= {common.ROOT / word for word in self.flags if "/" in word and (common.ROOT / word).is_file()}
        if self.environment:
            files.add(common.PEERS / f"requirements-{self.environment}.txt")
        digest = hashlib.sha256(self.command.encode())
        for path in sorted(files):
            digest.update(f"\n{path.relative_to(common.ROOT)}\n".encode() + path.read_bytes())
        return digest.hexdigest()[:12]


@functools.cache  # where a file begins to use another one, it has changed itself
def find_used_files(script: Path) -> set[Path]:
    """A script and, in turn, what it imports of this repository or names as a path, the engine of a match, say."""
    folders = (
        [common.ROOT, script.parent, common.ROOT / "benchmark"] if script.parent.name == "peers" else [common.ROOT]
    )
    found, todo = set(), [script]
    while todo:
        path = todo.pop()
        found.add(path)
        if path.suffix != ".py":
            continue
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.replace(".", "/") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                start = node.module.replace(".", "/")
                names |= {start} | {f"{start}/{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(FILE, node.value):
                names.add(node.value)
        used = [folder / f"{name}{end}" for folder in folders for name in names for end in ("", ".py", "/__init__.py")]
        if path.parent.parent == common.ROOT / "envs_shared":  # a folder of helpers, with the data that they read
            used += path.parent.rglob("*.txt")
        todo += [path for path in used if path.is_file() and path not in found]
    return found


CELL_TYPES = dict.fromkeys(("task", "setting", "command", "curve", "better", "environment"), str)
CELL_TYPES |= {"threshold": float, "gpus": float, "hours": float, "in_a_row": int, "cpus": int}
RATIO_KEYS = ("title", "quantity", "better", "ours", "peer")
RATIO_TYPES = dict.fromkeys((*RATIO_KEYS, "peer_quantity"), str)
TABLE_TYPES = {"page": str, "section": str, "columns": dict}


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
        kind = (int, float) if types[key] is float else types[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            name = {str: "text", dict: "table"}.get(kind, "number")
            raise SuiteError(f"{where}: {key} = {value!r} is not a {name}")


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
    check_types(ratio, RATIO_TYPES, where, RATIO_KEYS)
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


def check_shown(content: dict, cells: dict[str, Cell], path: Path) -> dict:
    """What the pages say of the results: ratios, tables and a summary; SuiteError for what cannot be."""
    shown = {key: read_tables(content, key, path) for key in ("ratios", "tables")}
    for number, ratio in enumerate(shown["ratios"], 1):
        check_ratio(ratio, cells, f"{path}, ratio {number}")
    for number, table in enumerate(shown["tables"], 1):
        check_types(table, TABLE_TYPES, f"{path}, table {number}", ("page", "section"))
    summary = content.get("summary", "")
    check_types({"summary": summary}, {"summary": str}, str(path), ())
    for names, _, _ in SUMMARY_NUMBER.findall(summary):
        for name in names.split(":"):
            if name not in cells:
                raise SuiteError(f"{path}: summary: {name} is no cell of this suite")
    return shown | {"summary": summary}


def read_suite(path: Path) -> tuple[list[Cell], dict]:
    """Cells, seed by seed, and what is shown of them, of the TOML file at `path`; SuiteError for what is wrong."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{path}: not TOML: {error}") from None
    if unknown := content.keys() - KEYS:
        raise SuiteError(f"{path}: unknown key {min(unknown)} (there are: {', '.join(KEYS)})")
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
    return cells, check_shown(content, {cell.name: cell for cell in cells}, path)
