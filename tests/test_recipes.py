"""The recipes of docs/recipes.md: each diff is applied to a copy of its script, run for seconds, and checked.

The checks of a script's recipes are in recipe_checks_<script>.py: {title: check(path of the edited copy, its folder)}.
"""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_contract import SCRIPTS, copy_script
from test_docs import get_anchors

PAGE = ROOT / "docs" / "recipes.md"
TEXT = PAGE.read_text()


def read_recipes() -> dict[tuple[str, str], str]:
    """The text of each recipe, by script and title."""
    recipes = {}
    for part in re.split(r"^## ", TEXT, flags=re.M)[1:]:
        (script,) = {x for x in re.findall(r"^python (\w+)\.py", part, re.M)}
        for text in re.split(r"^### ", part, flags=re.M)[1:]:
            title, _, body = text.partition("\n")
            recipes[script, title] = body
    return recipes


RECIPES = read_recipes()
CHECKS = {}
for script in SCRIPTS:
    if (Path(__file__).parent / f"recipe_checks_{script}.py").exists():
        checks = importlib.import_module(f"recipe_checks_{script}").CHECKS
        CHECKS |= {(script, title): check for title, check in checks.items()}


def apply_diff(text: str, diff: str) -> str:
    """Apply the hunks of a diff in the form of the page; each one must fit exactly one place."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.splitlines()
        assert all(line[:1] in (" ", "+", "-", "") for line in lines), hunk
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert text.count(old) == 1 and old.strip(), f"{text.count(old)} places fit\n{hunk}"
        text = text.replace(old, new)
    return text


def find_block(body: str, kind: str) -> str | None:
    found = re.findall(rf"^```{kind}\n(.*?)^```", body, re.M | re.S)
    return found[0] if found else None


def test_each_recipe_is_in_the_table_with_its_lines():
    """Lines that are added or, without a diff, written; blank ones do not count. Each recipe has a check."""
    rows = re.findall(r"^\|.*?\| \[(.+?)\]\(#(.+?)\) \| (\d+) \|", TEXT, re.M)
    counts = {}
    for (_, title), body in RECIPES.items():
        added = re.findall(r"^\+.*\S.*$", find_block(body, "diff") or "", re.M)
        written = re.findall(r"^(?!import|from).*\S.*$", find_block(body, "python") or "", re.M)
        counts[title] = len(added) or len(written)
    listed = {name.lower(): int(count) for name, _, count in rows}
    assert {title.lower(): count for title, count in counts.items()} == listed
    assert {anchor for _, anchor, _ in rows} <= get_anchors(PAGE) and CHECKS.keys() == RECIPES.keys()


LEARNS_LONG = ("alphazero_go", "Another game: tic-tac-toe")
PARAMS = [pytest.param(*x, marks=[pytest.mark.slow] * (x == LEARNS_LONG), id=": ".join(x)) for x in RECIPES]


@pytest.mark.parametrize(("script", "title"), PARAMS)
def test_a_recipe_does_what_it_says(script, title, tmp_path, monkeypatch):
    """In a folder of its own, as for a user. What it must bring about, the check of the recipe asserts."""
    path = copy_script(script, tmp_path / "copy") / f"{script}.py"
    body = RECIPES[script, title]
    if diff := find_block(body, "diff"):
        path.write_text(apply_diff(path.read_text(), diff))
    else:
        block = find_block(body, "python") or ""
        name = re.match(r"# (\S+\.py)\n", block)  # of a whole file
        (path.parent / (name[1] if name else "recipe.py")).write_text(block)
    shutil.copy(ROOT / "tests" / "probe_envs.py", path.parent)
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    CHECKS[script, title](path, path.parent)
