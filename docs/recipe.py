"""Print a recipe of the pages docs/recipes_*.md as a diff for `git apply`.

    python docs/recipe.py                                         # the names of all recipes
    python docs/recipe.py ppo action-masks --output masks.diff   # then, beside ppo.py: git apply masks.diff
    python docs/recipe.py ppo action-masks --copy my/ppo.py       # for a copy that other recipes have changed
    python docs/recipe.py ppo the-bare-algorithm --whole --output bare_ppo.py   # the changed script itself

A page shows a recipe as a diff without line numbers. Lines `@@` separate its places, of which each one fits
exactly one place of the script. The line `-...` stands for all lines up to the next one that the diff shows.
"""

import argparse
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_recipes(script: str) -> dict[str, tuple[str, str]]:
    """Title and text of each recipe for a script, by its anchor on the page docs/recipes_<script>.md."""
    page = ROOT / "docs" / f"recipes_{script}.md"
    text = page.read_text("utf-8") if page.exists() else ""
    parts = [part.partition("\n") for part in re.split(r"^## ", text, flags=re.M)[1:]]
    return {
        re.sub(r"[^\w -]", "", title).replace(" ", "-").lower(): (title, body) for title, _, body in parts
    }


def find_block(body: str, kind: str) -> str | None:
    """The first code block of a kind, such as diff or python, in a recipe's text."""
    found = re.findall(rf"^```{kind}\n(.*?)^```", body, re.M | re.S)
    return found[0] if found else None


def apply_diff(text: str, diff: str) -> str:
    """Apply a diff of a page to a script; ValueError if one of its places does not fit exactly once."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        pattern = ""
        old = ""
        new = ""
        for line in hunk.splitlines():
            if line == "-...":
                pattern += re.escape(old) + "(?:.*\n)*?"
                old = ""
            elif line[:1] not in ("", " ", "+", "-"):
                raise ValueError(f"{line!r}: does not begin with a blank, a plus or a minus")
            if line[:1] != "+" and line != "-...":
                old += f"{line[1:]}\n"
            if line[:1] != "-":
                new += f"{line[1:]}\n"
        found = [*re.finditer(f"^{pattern}{re.escape(old)}", text, re.M)]
        if len(found) != 1 or not (pattern + old).strip():
            raise ValueError(f"{len(found)} places fit\n{hunk}")
        text = text[: found[0].start()] + new + text[found[0].end() :]
    return text


def read_script(script: str, copy: Path | None = None) -> str:
    """The text of the script, or of a copy of it."""
    return (copy or ROOT / "algos" / f"{script}.py").read_text("utf-8")


def make_patch(script: str, diff: str, copy: Path | None = None) -> str:
    """The unified diff, from `a/<script>.py` to `b/<script>.py`, of a diff of a page for the script or its
    copy."""
    old = read_script(script, copy)
    names = f"a/{script}.py", f"b/{script}.py"
    lines = difflib.unified_diff(old.splitlines(True), apply_diff(old, diff).splitlines(True), *names)
    return "".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description="Print a recipe as a diff for `git apply`, or all names.")
    parser.add_argument("script", nargs="?", help="such as ppo")
    parser.add_argument("name", nargs="?", help="the recipe's name, as in the address of its page")
    parser.add_argument("--copy", type=Path, help="the copy to change, if it is not equal to the script")
    parser.add_argument("--whole", action="store_true", help="the changed script, not the diff")
    parser.add_argument("--output", type=Path, help="write it into this file")
    return parser


def main(argv=None):
    """Print the diff of the recipe that the command line names, or the names of all recipes."""
    args = make_parser().parse_args(argv)
    scripts = sorted(path.stem for path in (ROOT / "algos").glob("*.py"))
    recipes = {(script, name): body for script in scripts for name, (_, body) in read_recipes(script).items()}
    diffs = {key: diff for key, body in recipes.items() if (diff := find_block(body, "diff"))}
    if not args.script:
        print("\n".join(f"{script} {name}" for script, name in diffs))
        return
    if (args.script, args.name) not in diffs:
        sys.exit(
            f"recipe.py: error: {args.script} {args.name} is not among the recipes; no argument lists them"
        )
    diff = diffs[args.script, args.name]
    if args.whole:
        text = apply_diff(read_script(args.script, args.copy), diff)
    else:
        text = make_patch(args.script, diff, args.copy)
    if args.output:
        args.output.write_text(text, "utf-8", newline="\n")  # lines end as git expects, on Windows too
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
