"""The recipes of docs/recipes_*.md: each diff is applied to a copy of its script, run for seconds, and
checked.

The checks of a script's recipes are in recipe_checks_<script>.py: {title: check(path of the edited copy, its
folder)}.
"""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from pages import get_anchors
from scripts import SCRIPTS, copy_script

from docs import hooks, recipe

RECIPES = {(x, title): body for x in SCRIPTS for title, body in recipe.read_recipes(x).values()}
CHECKS = {}
for script in SCRIPTS:
    if (Path(__file__).parent / f"recipe_checks_{script}.py").exists():
        checks = importlib.import_module(f"recipe_checks_{script}").CHECKS
        CHECKS |= {(script, title): check for title, check in checks.items()}


def test_each_recipe_is_in_the_table_with_its_lines():
    """Lines that are added or, without a diff, written; blank ones do not count. Each recipe has a check."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\|.*?\| \[(.+?)\]\(recipes_(\w+)\.md#(.+?)\) \| (\d+) \|", text, re.M)
    counts = {}
    for (name, title), body in RECIPES.items():
        added = re.findall(r"^\+.*\S.*$", recipe.find_block(body, "diff") or "", re.M)
        written = re.findall(r"^(?!import|from).*\S.*$", recipe.find_block(body, "python") or "", re.M)
        counts[name, title.lower()] = len(added) or len(written)
    assert counts == {(name, title.lower()): int(count) for title, name, _, count in rows}
    for _, name, anchor, _ in rows:
        assert anchor in recipe.read_recipes(name).keys() & get_anchors(ROOT / "docs" / f"recipes_{name}.md")
    assert CHECKS.keys() == RECIPES.keys()


def test_a_place_that_is_missing_or_not_the_only_one_is_an_error():
    text = "a\nb\na\nc\n"
    assert recipe.apply_diff(text, " b\n-a\n+d\n@@\n-c\n") == "a\nb\nd\n"
    assert recipe.apply_diff(text, " b\n-...\n c\n") == "a\nb\nc\n"
    assert recipe.apply_diff(text, "+0\n a\n-b\n-...\n") == "0\na\na\nc\n"
    for diff in ("-a\n", "-x\n", "+x\n", " a\n", "b\n"):
        with pytest.raises(ValueError):
            recipe.apply_diff(text, diff)


def test_the_site_has_each_diff_as_a_file_for_git_apply():
    """A recipe for a copy that has been changed before is not among them."""
    for script in SCRIPTS:
        page = (ROOT / "docs" / f"recipes_{script}.md").read_text()
        shown = hooks.add_patches(page, script)
        diffs = {
            name: recipe.find_block(body, "diff") for name, (_, body) in recipe.read_recipes(script).items()
        }
        needed = {name for name, diff in diffs.items() if diff and not name.endswith("in-the-same-step")}
        patches = hooks.make_patches(script)
        assert {Path(path).stem for path in patches} == needed
        for path, (diff, patch) in patches.items():
            assert shown.count(f"{diff}```\n\n[`{Path(path).name}`]({path})") == 1
            assert patch == recipe.make_patch(script, diff) and patch.startswith(f"--- a/{script}.py\n")


LEARNS_LONG = ("alphazero_go", "Another game: tic-tac-toe")
ON_SIMULATED_GPU = ["The bare algorithm"]
ON_SIMULATED_GPU += [title for _, title in RECIPES if title.startswith("An environment on the device")]


def find_marks(script, title):
    marks = [pytest.mark.slow] if (script, title) == LEARNS_LONG else []
    return marks + [pytest.mark.simulated_gpu] * (title in ON_SIMULATED_GPU)


PARAMS = [pytest.param(*x, marks=find_marks(*x), id=": ".join(x)) for x in RECIPES]


@pytest.mark.parametrize(("script", "title"), PARAMS)
def test_a_recipe_does_what_it_says(script, title, tmp_path, monkeypatch):
    """In a folder of its own, as for a user. What it must bring about, the check of the recipe asserts."""
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
    CHECKS[script, title](path, path.parent)
