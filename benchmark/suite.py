"""Read suites, the TOML files that benchmark/README.md describes."""

import functools
import hashlib
import re
import shlex
import tomllib
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import common
from common import ResultsError, require

SHOWN = {"ratios": [], "tables": [], "summary": ""}  # keys of a suite that say how pages show its results
DEFAULTS = SHOWN | {"headline": {}, "seeds": [], "cells": []}
SHOWN_KEYS = {
    "ratios": ["title", "quantity", "better", "ours", "peer"],
    "tables": ["page", "section", "columns"],
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}")
COMMAND = re.compile(r"(?:python|torchrun --standalone.*) ((?:algos|benchmark/peers)/\w+\.py)(?: .*)?")
# Files of this repository that a file uses: `import a.b`, `from a.b import c`, "benchmark/checkpoints/d.pt"
USED = re.compile(r'^ *(?:import|from) ([\w.]+)(?: import (\w+))?|"((?:algos|benchmark)/[\w./-]+)"', re.M)


@dataclass(frozen=True)
class Cell:
    """One run: a command and a seed."""

    name: str  # SCRIPT/TASK/SETTING, the same for all seeds
    script: str
    path: str  # of the script, as the command names it
    task: str
    setting: str
    command: str
    headline: str
    seed: int = 0
    curve: str | None = None
    threshold: int | float | None = None
    in_a_row: int = 1
    better: str = "higher"
    cpus: int = 1
    gpus: int = 0
    hours: int | float = 24
    environment: str | None = None
    score_best: bool = False

    @property
    def words(self) -> list[str]:
        """The words of the command."""
        return shlex.split(self.command)

    def hash(self) -> str:
        """Hash the command and the files it uses, as they are now: a result counts while they stay the same."""
        modules = [f"{word.split(':')[0].replace('.', '/')}.py" for word in self.words]  # of --env-id
        files = {common.ROOT / word for word in [*self.words, *modules] if "/" in word}
        files |= find_used_files(common.ROOT / self.path)
        files |= {common.PEERS / f"requirements-{self.environment}.txt", common.PEERS / "clock.py"}
        digest = hashlib.sha256(self.command.encode())
        for path in sorted(filter(Path.is_file, files)):
            digest.update(f"\n{path.relative_to(common.ROOT)}\n".encode() + path.read_bytes())
        return digest.hexdigest()[:12]


@functools.cache  # safe: a new import changes the file, and with it the hash
def find_used_files(script: Path) -> set[Path]:
    """List the files a script uses: itself, its sibling and, for a peer, the scripts, networks and data it needs."""
    found, todo = set(), [script]
    while todo:
        found.add(path := todo.pop())
        for module, member, name in USED.findall(path.read_text()) if path.suffix == ".py" else ():
            start = name or module.replace(".", "/")
            names = [start + end for end in ("", ".py", "/__init__.py", f"/{member}.py")]
            used = [folder / name for folder in (common.ROOT, script.parent) for name in names]
            todo += [path for path in used if path.is_file() and path not in found]
    return found


def check_keys(table: dict, known, where: str) -> None:
    """Raise ResultsError for a key that the harness would not read."""
    for key in table:
        require(key in known, f"{where}: unknown key {key}; there are {', '.join(sorted(known))}")


def make_cell(table: dict, headlines: dict, where: str) -> Cell:
    """Make a cell from a TOML table; ResultsError for what the harness cannot run or judge."""
    command = " ".join(str(table.get("command")).split())
    match = COMMAND.fullmatch(command)
    require(
        match and (common.ROOT / match[1]).is_file(),
        f"{where}: command = {command!r} has to be python or torchrun --standalone, and a script of algos/ or "
        "benchmark/peers/",
    )
    script = Path(match[1]).stem
    named = {"task": None, "setting": None, "headline": headlines.get(script)} | table
    check_keys(named, Cell.__annotations__.keys() - {"name", "script", "path", "seed"} | {"seeds"}, where)
    name = f"{script}/{named['task']}/{named['setting']}"
    cell = Cell(**named | {"path": match[1], "script": script, "name": name})
    for key, kind in Cell.__annotations__.items():
        value = getattr(cell, key)
        require(
            isinstance(value, kind), f"{where}: {key} = {value!r} has to be {getattr(kind, '__name__', kind)}"
        )
    for name in (cell.task, cell.setting):
        require(NAME.fullmatch(name), f"{where}: {name!r} is not a name of letters, digits and ._+=-")
    require(cell.better in ("higher", "lower"), f"{where}: better is neither higher nor lower")
    require(
        cell.threshold is None or cell.curve, f"{where}: a threshold needs the tag of its curve, curve = ..."
    )
    return cell


def read_suite(path: Path) -> tuple[list[Cell], dict]:
    """Read the TOML file at `path`: its cells, seed by seed, and what the pages show; ResultsError for what is wrong.

    Cells are listed seed by seed, so that runs that are compared follow one another.
    """
    try:
        content = DEFAULTS | tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: cannot be read as TOML ({error})") from None
    check_keys(content, DEFAULTS, path)
    for key, known in SHOWN_KEYS.items():
        for table in content[key]:
            check_keys(table, known, f"{path}, {key}")
    rows = []
    for number, table in enumerate(content["cells"], 1):
        where = f"{path}, cell {number}"
        seeds = table.pop("seeds", content["seeds"])
        require(
            isinstance(seeds, list) and seeds,
            f"{where}: seeds = {seeds!r}: write seeds = [1, 2, 3] in it, or above all cells",
        )
        cell = make_cell(table, content["headline"], where)
        rows.append([replace(cell, seed=seed) for seed in seeds])
    require(rows, f"{path}: no cells")
    cells = [cell for turn in zip_longest(*rows) for cell in turn if cell]
    keys = [(cell.name, cell.seed) for cell in cells]
    twice = [key for key in keys if keys.count(key) > 1]
    require(not twice, f"{path}: there are two cells {twice[:1]}")
    return cells, {key: content[key] for key in SHOWN}
