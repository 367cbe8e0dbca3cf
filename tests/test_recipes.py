"""The recipes of docs/recipes_*.md: each diff is applied to a copy of its script, run, and checked.

The checks of a script's recipes are in recipe_checks_<script>.py: {title: check(path of the edited copy, its
folder)}. Some recipes have a slow check too, in SLOW_CHECKS.
"""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from scripts import SCRIPTS, copy_script

from docs import recipe

RECIPES = {(x, title): body for x in SCRIPTS for title, body in recipe.read_recipes(x).values()}
CHECKS, SLOW_CHECKS = {}, {}
for script in SCRIPTS:
    if (Path(__file__).parent / f"recipe_checks_{script}.py").exists():
        module = importlib.import_module(f"recipe_checks_{script}")
        CHECKS |= {(script, title): check for title, check in module.CHECKS.items()}
        slow_checks = getattr(module, "SLOW_CHECKS", {})
        SLOW_CHECKS |= {(script, title): check for title, check in slow_checks.items()}


def test_each_recipe_has_a_check_and_is_in_the_table_with_its_lines():
    """Lines that are added or, without a diff, written; blank ones do not count."""
    assert CHECKS.keys() == RECIPES.keys()
    counts = {}
    for (name, title), body in RECIPES.items():
        added = re.findall(r"^\+.*\S.*$", recipe.find_block(body, "diff") or "", re.M)
        written = re.findall(r"^(?!import|from).*\S.*$", recipe.find_block(body, "python") or "", re.M)
        counts[name, title.lower()] = len(added) or len(written)
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\|.*?\| \[(.+?)\]\(recipes_(\w+)\.md#.+?\) \| (\d+) \|", text, re.M)
    assert counts == {(name, title.lower()): int(count) for title, name, count in rows}


def find_marks(title):
    marks = [pytest.mark.slow] * (title == "Another game: tic-tac-toe")
    is_on_device = title.startswith("An environment on the device") or title == "A recurrent network"
    return marks + [pytest.mark.simulated_gpu] * is_on_device


PARAMS = [pytest.param(*x, CHECKS.get(x), marks=find_marks(x[1]), id=": ".join(x)) for x in RECIPES]
PARAMS += [
    pytest.param(*x, check, marks=pytest.mark.slow, id=f"{': '.join(x)}, long")
    for x, check in SLOW_CHECKS.items()
]


@pytest.fixture
def edited(script, title, tmp_path, monkeypatch):
    """The path of a script that a recipe has changed, in a folder of its own, as for a user."""
    path = copy_script(script, tmp_path / "copy") / f"{script}.py"
    body = RECIPES[script, title]
    if diff := recipe.find_block(body, "diff"):
        patch = recipe.make_patch(script, diff)
        subprocess.run(["git", "apply"], cwd=path.parent, input=patch, text=True, check=True)
        assert path.read_text() == recipe.apply_diff((ROOT / "algos" / path.name).read_text(), diff)
    if not diff or recipe.find_block(body, "python"):
        block = recipe.find_block(body, "python") or ""
        name = re.match(r"# (\S+\.py)\n", block)  # of a whole file
        (path.parent / (name[1] if name else "recipe.py")).write_text(block)
    shutil.copy(ROOT / "tests" / "probe_envs.py", path.parent)
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    return path


@pytest.mark.parametrize(("script", "title", "check"), PARAMS)
def test_a_recipe_does_what_it_says(script, title, check, edited):
    """What it must bring about, the check of the recipe asserts; a slow one, in a long run."""
    check(edited, edited.parent)
