"""Reading and checking suites, the TOML files that benchmark/README.md describes."""

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib
import io
import re
import shlex
import sys
import tomllib
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path

import common

SUMMARY_NUMBER = re.compile(
    r"{([^\s}]+) ([^\s}]+) ([^\s}]+)}"
)  # {CELL QUANTITY FORMAT}, {CELL:CELL ...} for a ratio
SET_BY_HARNESS = ("--seed", "--run-dir", "--resume", "--evaluate", "--track")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}")
FILE = r"(algos|benchmark)/[\w./-]+"
SCRIPT = r"(algos|benchmark/peers)/\w+\.py"
sys.path += [str(common.ROOT), str(common.PEERS)]


class SuiteError(common.ResultsError):
    """What is wrong with a suite, in one line."""


@dataclass(frozen=True)
class Cell:
    """One run: a command and a seed."""

    task: str
    setting: str
    command: str
    seed: int
    headline: str | None = None
    curve: str | None = None
    threshold: int | float | None = None
    in_a_row: int = 1
    better: str = "higher"
    cpus: int = 1
    gpus: int | float = 0
    hours: int | float = 24
    environment: str | None = None
    score_best: bool = False

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
        modules = [
            f"{word.split(':')[0].replace('.', '/')}.py" for word in self.flags if ":" in word
        ]  # of --env-id
        paths = [common.ROOT / word for word in [*self.flags, *modules] if "/" in word]
        files |= {path for path in paths if path.is_file()}
        if self.environment:
            files.add(common.PEERS / f"requirements-{self.environment}.txt")
        digest = hashlib.sha256(self.command.encode())
        for path in sorted(files):
            digest.update(f"\n{path.relative_to(common.ROOT)}\n".encode() + path.read_bytes())
        return digest.hexdigest()[:12]


@functools.cache  # where a file begins to use another one, it has changed itself
def find_used_files(script: Path) -> set[Path]:
    """A script and, in turn, what it imports of this repository or names as a path, the engine of a match, say."""
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
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(FILE, node.value)
            ):
                names.add(node.value)
        used = [
            folder / f"{name}{end}"
            for folder in (common.ROOT, script.parent)
            for name in names
            for end in ("", ".py", "/__init__.py")
        ]
        todo += [path for path in used if path.is_file() and path not in found]
    return found


SUITE_TYPES = {
    "seeds": list,
    "headline": dict,
    "cells": list,
    "ratios": list,
    "tables": list,
    "summary": str,
}
CELL_TYPES = {field.name: field.type for field in fields(Cell) if field.name != "seed"}
RATIO_KEYS = ("title", "quantity", "better", "ours", "peer")
RATIO_TYPES = dict.fromkeys((*RATIO_KEYS, "peer_quantity"), str)
TABLE_TYPES = {"page": str, "section": str, "columns": dict}


def parse_torchrun(words: list[str]) -> argparse.Namespace:
    """torchrun's own reading of a command; SystemExit where it refuses it."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(words[1:])


def parse_flags(cell: Cell) -> None:
    """Let the script's own parser read the flags; SystemExit where it refuses them."""
    if not cell.path.startswith("algos/"):
        module = importlib.import_module(cell.script)
        module.make_parser().parse_args([*cell.flags, "--seed", "1", "--run-dir", "runs"])
        return
    import tyro

    module = importlib.import_module(f"algos.{cell.script}")
    tyro.cli(module.Args, args=cell.flags)


def check_command(cell: Cell, where: str) -> None:
    """Raise SuiteError where the script would refuse the command of `cell`, or there is no such script."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            if cell.words[0] == "torchrun" and not parse_torchrun(cell.words).standalone:
                raise SuiteError(f"{where}: torchrun needs --standalone, as other cells may run beside it")
            if not re.fullmatch(SCRIPT, cell.path) or not (common.ROOT / cell.path).is_file():
                raise SuiteError(
                    f"{where}: unknown script {cell.path}: it has to be in algos or benchmark/peers"
                )
            for flag in cell.flags:
                if flag.split("=")[0].replace("_", "-") in SET_BY_HARNESS:
                    raise SuiteError(
                        f"{where}: {flag} is not for a suite: the harness sets seeds and run folders"
                    )
            if not cell.headline:
                raise SuiteError(f"{where}: no headline, the tag that {cell.path} is judged by")
            parse_flags(cell)
        except SystemExit:
            words = re.sub(r"([\s│╭╮╰╯─┃━]|-{5,})+", " ", output.getvalue()).split("error: ")[-1]
            words = words.split(" For full helptext")[0].strip()
            raise SuiteError(f"{where}: command is refused: {words[:300]}") from None
        # A script that is being edited, or a file that is none
        except (SyntaxError, ImportError, AttributeError, TypeError) as error:
            raise SuiteError(
                f"{where}: {cell.path} cannot be used: {type(error).__name__}: {error}"
            ) from None


def check_table(table: dict, types: dict, where: str, required=()) -> None:
    """Raise SuiteError for keys that are missing or unknown and for values that cannot be."""
    for key in required:
        if key not in table:
            raise SuiteError(f"{where}: no {key}")
    for key, value in table.items():
        if key not in types:
            raise SuiteError(f"{where}: unknown key {key} (there are: {', '.join(types)})")
        if not isinstance(value, types[key]):
            raise SuiteError(
                f"{where}: {key} = {value!r} has to be {getattr(types[key], '__name__', types[key])}"
            )
        if key == "better" and value not in ("higher", "lower"):
            raise SuiteError(f'{where}: better = "{value}" is neither "higher" nor "lower"')


def check_cell(cell: Cell, where: str) -> None:
    """Raise SuiteError for values that cannot be."""
    try:
        words = cell.words
    except ValueError as error:
        raise SuiteError(f"{where}: command: {error}") from None
    if len(words) < 2 or words[0] not in ("python", "torchrun"):
        raise SuiteError(
            f"{where}: command = {cell.command!r} does not begin with python or torchrun and a script"
        )
    for key in ("task", "setting"):
        if not WORD.fullmatch(getattr(cell, key)):
            raise SuiteError(
                f"{where}: {key} = {getattr(cell, key)!r} has to be a name of letters, digits and ._+=-"
            )
    if cell.threshold is not None and cell.curve is None:
        raise SuiteError(f"{where}: a threshold is of a curve: give its tag, curve = ...")
    is_share = 0 <= cell.gpus <= 1 or (cell.gpus > 1 and cell.gpus % 1 == 0)
    if min(cell.cpus, cell.in_a_row) < 1 or not is_share or not cell.hours > 0:
        raise SuiteError(
            f"{where}: cpus and in_a_row are 1 or more, gpus a fraction or a whole number, hours above 0"
        )
    if cell.environment and not (common.PEERS / f"requirements-{cell.environment}.txt").exists():
        raise SuiteError(f"{where}: no benchmark/peers/requirements-{cell.environment}.txt")


def check_shown(content: dict, names: set[str], path: Path) -> dict:
    """What the pages say of the results: ratios, tables and a summary; SuiteError for what cannot be."""
    for number, ratio in enumerate(content.get("ratios", []), 1):
        check_table(ratio, RATIO_TYPES, f"{path}, ratio {number}", RATIO_KEYS)
        for side in ("ours", "peer"):
            if ratio[side] not in names:
                raise SuiteError(f"{path}, ratio {number}: {side} = {ratio[side]} is no cell of this suite")
    for number, table in enumerate(content.get("tables", []), 1):
        check_table(table, TABLE_TYPES, f"{path}, table {number}", ("page", "section"))
    summary = content.get("summary", "")
    for name in ":".join(found for found, _, _ in SUMMARY_NUMBER.findall(summary)).split(":"):
        if name and name not in names:
            raise SuiteError(f"{path}: summary: {name} is no cell of this suite")
    return {"ratios": content.get("ratios", []), "tables": content.get("tables", []), "summary": summary}


def read_suite(path: Path, check=check_command) -> tuple[list[Cell], dict]:
    """Cells, seed by seed, and what is shown of them, of the TOML file at `path`; SuiteError for what is wrong.

    `check(cell, where)` looks at the command of each cell.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{path}: not TOML: {error}") from None
    check_table(content, SUITE_TYPES, str(path), ("cells",))
    for key in ("cells", "ratios", "tables"):
        if not all(isinstance(table, dict) for table in content.get(key, [])):
            raise SuiteError(f"{path}: {key} = {content[key]!r}: they are tables, [[{key}]]")
    if not content["cells"]:
        raise SuiteError(f"{path}: no cells")
    rows = []
    for number, table in enumerate(content["cells"], 1):
        where = f"{path}, cell {number}"
        seeds = table.pop("seeds", content.get("seeds"))
        if not isinstance(seeds, list) or not seeds or not all(type(s) is int and s >= 0 for s in seeds):
            raise SuiteError(f"{where}: seeds = {seeds!r}: write seeds = [1, 2, 3] in it, or above all cells")
        check_table(table, CELL_TYPES, where, ("task", "setting", "command"))
        cell = Cell(**table, seed=0)
        check_cell(cell, where)
        headline = cell.headline or content.get("headline", {}).get(cell.script)
        check_table({"headline": headline}, CELL_TYPES, where)
        rows.append([replace(cell, seed=seed, headline=headline) for seed in seeds])
        check(rows[-1][0], where)
    cells = [cell for turn in zip_longest(*rows) for cell in turn if cell]
    seen = {}
    for cell in cells:
        for key in ((cell.name, cell.seed), (*cell.words, cell.seed)):
            if key in seen:
                raise SuiteError(f"{path}: duplicate cells {seen[key]} and {cell.name}, seed {cell.seed}")
            seen[key] = cell.name
    return cells, check_shown(content, {cell.name for cell in cells}, path)
