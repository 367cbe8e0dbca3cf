"""Read suites, the TOML files that benchmark/README.md describes."""

import ast
import hashlib
import re
import shlex
import tomllib
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from benchmark import common
from benchmark.common import ResultsError, require

DEFAULTS = {  # of the keys of a file
    "defaults": {},
    "settings": {},
    "cells": [],
    "ratios": [],
    "tables": [],
    "summary": "",
    "levels": {},
    "picture": {},
}
FLAGS = " {flags}"  # its place in a command; without one, flags are put at the end
NAME = re.compile(r"\w+(/[A-Za-z0-9][A-Za-z0-9._+=-]{0,79}){2}")  # SCRIPT/TASK/SETTING
COMMAND = re.compile(
    r"(?:(?:python|torchrun --standalone.*) (algos/\w+\.py)|python -m (benchmark\.peers\.\w+))(?: .*)?"
)
# Strings of a program that name files of this repository: "benchmark/checkpoints/d.pt",
# "envs_shared.b:Task-v0"
NAMED_FILE = re.compile(r"(?:algos|benchmark)/[\w./-]+")
NAMED_TASK = re.compile(r"([\w.]+):")


@dataclass(frozen=True)
class Cell:
    """One run: a command and a seed."""

    name: str  # SCRIPT/TASK/SETTING, the same for all seeds
    script: str
    path: str  # of the script
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
    label: str | None = None  # in legends, else SCRIPT, SETTING; an empty one leaves the cell out

    @property
    def program(self):
        """Return the words of the command that name the script: its path, or of a peer its module."""
        if self.path.startswith("algos/"):
            return [self.path]
        return ["-m", get_module(self.path)]

    def hash(self):
        """Hash the command and the files it uses, as they are now: a result counts while they stay the
        same."""
        digest = hashlib.sha256(self.command.encode())
        for path in self.find_files():
            digest.update(f"\n{path}\n".encode() + (common.ROOT / path).read_bytes())
        return digest.hexdigest()[:12]

    def find_files(self):
        """List the files of this repository that the command uses."""
        words = shlex.split(self.command)
        modules = [get_path(word.split(":")[0]) for word in words]  # after -m and --env-id
        packages = f"benchmark/peers/requirements-{self.environment}.txt"
        return find_used_files([*words, *modules, packages, "benchmark/peers/clock.py"])


CELL_KEYS = Cell.__annotations__.keys() - {"name", "script", "path", "seed"} | {"seeds", "flags"}  # in TOML


@dataclass(frozen=True)
class Ratio:
    """A line of a table: a quantity of our cell divided by that of a peer's."""

    title: str
    quantity: str
    ours: str  # name of a cell
    peer: str
    peer_quantity: str | None = None  # if the peer has another


@dataclass(frozen=True)
class Table:
    """A table on a page of docs/."""

    page: str
    section: str
    columns: dict | None = None  # quantities by their titles; None: the table has the suite's ratios
    differences: str | None = None  # quantity whose differences, ours minus the peer's, the table has instead


@dataclass(frozen=True)
class Picture:
    """How the learning curves of a suite are drawn."""

    by: str = "both"  # "steps" or "seconds": one panel a task; "both": a panel for each
    logarithmic: bool = False  # seconds of programs that differ by factors of 10 to 100


@dataclass(frozen=True)
class Suite:
    """What a TOML file says. Cells are listed seed by seed, so that runs that are compared follow one
    another."""

    cells: list[Cell]
    ratios: list[Ratio]
    tables: list[Table]
    summary: str  # for the pages that have its mark
    levels: dict[str, dict]  # known values of others by task and name, which the picture shows
    picture: Picture


def find_used_files(names: list):
    """List the files among `names`, and the scripts, networks and data of this repository that these use in
    turn."""
    found = set()
    todo = [*map(Path, names)]
    while todo:
        path = todo.pop()
        if path in found or not (common.ROOT / path).is_file():
            continue
        found.add(path)
        if path.suffix != ".py":
            continue
        for name in find_names(ast.parse((common.ROOT / path).read_text())):
            todo += [Path(name), path.parent / name]
    return sorted(found)


def find_names(tree: ast.Module):
    """List the paths that a program may mean by its imports and its strings, whether they exist or not."""
    names = []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if NAMED_FILE.fullmatch(node.value):
                names.append(node.value)
            if match := NAMED_TASK.match(node.value):
                modules = [match[1]]
        for module in modules:
            names += [get_path(module), get_path(f"{module}.__init__")]
    return names


def get_path(module: str):
    """Return the path of a module."""
    return f"{module.replace('.', '/')}.py"


def get_module(path: str):
    """Return the module of a path."""
    return path.removesuffix(".py").replace("/", ".")


def check_keys(table: dict, known, where: str):
    """Raise ResultsError for a key that the harness would not read."""
    for key in table:
        require(key in known, f"{where}: unknown key {key}; there are {', '.join(sorted(known))}")


def make(kind, table: dict, where: str):
    """Make a dataclass from a TOML table; ResultsError for a field that is missing or of another type."""
    fields = kind.__annotations__
    made = kind(**{key: None for key in fields if not hasattr(kind, key)} | table)
    for key, types in fields.items():
        value = getattr(made, key)
        is_right = isinstance(value, types)
        require(is_right, f"{where}: {key} = {value!r} has to be {getattr(types, '__name__', types)}")
    return made


def expand(table: dict, where: str):
    """List the tables that a TOML table with lists stands for; ResultsError for lists of unequal lengths.

    The first one has the first value of each list, and so on. All have the values that are not in a list, and
    the whole list of seeds.
    """
    lists = {key: value for key, value in table.items() if isinstance(value, list) and key != "seeds"}
    if not lists:
        return [table]
    lengths = ", ".join(f"{key} has {len(value)}" for key, value in lists.items())
    num_values = {len(value) for value in lists.values()}
    is_right = len(num_values) == 1 and num_values != {0}
    require(is_right, f"{where}: lists need equally many values, at least one ({lengths})")
    return [table | dict(zip(lists, values)) for values in zip(*lists.values())]


def make_all(kind, tables: list, where: str):
    """Make all the dataclasses that TOML tables with lists stand for."""
    made = []
    for table in tables:
        check_keys(table, kind.__annotations__, where)
        made += [make(kind, one, where) for one in expand(table, where)]
    return made


def make_command(table: dict, where: str):
    """Return the command of a cell with its flags."""
    command = str(table.get("command"))
    flags = table.get("flags", "")
    require(isinstance(flags, str), f"{where}: flags = {flags!r} has to be a str")
    if FLAGS not in command:
        command += FLAGS
    return command.replace(FLAGS, f" {flags}" if flags else "")


def make_cell(table: dict, where: str):
    """Make a cell from a TOML table; ResultsError for what the harness cannot run or judge."""
    command = make_command(table, where)
    match = COMMAND.fullmatch(command)
    path = match and (match[1] or get_path(match[2]))
    require(
        match and (common.ROOT / path).is_file(),
        f"{where}: command = {command!r} has to be python or torchrun --standalone and a script of algos/, "
        "or python -m and a module of benchmark.peers",
    )
    script = Path(path).stem
    name = f"{script}/{table.get('task')}/{table.get('setting')}"
    fields = {key: value for key, value in table.items() if key not in ("seeds", "flags")}
    cell = make(Cell, fields | {"command": command, "path": path, "script": script, "name": name}, where)
    require(
        NAME.fullmatch(name), f"{where}: task and setting of {name!r} are not of letters, digits and ._+=-"
    )
    require(cell.better in ("higher", "lower"), f"{where}: better is neither higher nor lower")
    has_curve = cell.curve or cell.threshold is None
    require(has_curve, f"{where}: a threshold needs the tag of its curve, curve = ...")
    return cell


def expand_cell(table: dict, where: str):
    """List the tables of the cells that a TOML table of [[cells]] stands for."""
    check_keys(table, CELL_KEYS, where)
    flags = table.get("flags")
    if isinstance(flags, dict):  # by setting
        require("setting" not in table, f"{where}: [cells.flags] names the settings: leave out setting = ...")
        misplaced = ", ".join(sorted(CELL_KEYS & flags.keys()))
        require(not misplaced, f"{where}: {misplaced} has to be above [cells.flags]")
        table = table | {"setting": [*flags], "flags": [*flags.values()]}
    return expand(table, where)


def make_cells(content: dict, path: Path):
    """Make the cells of a suite: a list for each, which has one for each seed."""
    defaults, settings = content["defaults"], content["settings"]
    shared = CELL_KEYS - {"task", "setting", "flags"}
    check_keys(defaults, shared, f"{path}, defaults")
    for setting, table in settings.items():
        require(isinstance(table, dict), f"{path}: settings.{setting} = {table!r} has to be a dict")
        check_keys(table, shared, f"{path}, settings.{setting}")
    rows = []
    used = set()
    for number, entry in enumerate(content["cells"], 1):
        where = f"{path}, cell {number}"
        for own in expand_cell(entry, where):
            setting = str(own.get("setting"))
            used.add(setting)
            table = defaults | settings.get(setting, {}) | own
            cell = make_cell(table, where)
            seeds = table.get("seeds")
            has_seeds = isinstance(seeds, list) and seeds
            require(has_seeds, f"{where}: seeds = {seeds!r}: write seeds = [1, 2, 3] in it, or in [defaults]")
            rows.append([replace(cell, seed=seed) for seed in seeds])
    unused = ", ".join(sorted(settings.keys() - used))
    require(not unused, f"{path}, settings: no cell has the setting {unused}")
    return rows


def read_suite(path: Path):
    """Read the TOML file at `path`; ResultsError for what is wrong."""
    try:
        content = DEFAULTS | tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: cannot be read as TOML ({error})") from None
    check_keys(content, DEFAULTS, path)
    for key, value in content.items():
        kind = type(DEFAULTS[key])
        require(type(value) is kind, f"{path}: {key} = {value!r} has to be a {kind.__name__}")
    ratios = make_all(Ratio, content["ratios"], f"{path}, ratios")
    tables = make_all(Table, content["tables"], f"{path}, tables")
    check_keys(content["picture"], Picture.__annotations__, f"{path}, picture")
    picture = make(Picture, content["picture"], f"{path}, picture")
    is_known = picture.by in ("steps", "seconds", "both")
    require(is_known, f"{path}, picture: by = {picture.by!r} has to be steps, seconds or both")
    rows = make_cells(content, path)
    cells = [cell for turn in zip_longest(*rows) for cell in turn if cell]
    names = {(cell.name, cell.seed) for cell in cells}
    require(len(names) == len(cells), f"{path}: two cells have the same script, task, setting and seed")
    for ratio in ratios:
        are_known = {ratio.ours, ratio.peer} <= {name for name, _ in names}
        require(are_known, f"{path}, ratios: ours and peer have to name cells, not as in {ratio}")
    return Suite(cells, ratios, tables, content["summary"], content["levels"], picture)
