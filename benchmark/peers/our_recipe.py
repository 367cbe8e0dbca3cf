"""Run a script with a recipe: `python -m benchmark.peers.our_recipe ppo a-recurrent-network --seed 1`.

The recipe is applied to a copy of the script, which runs with the remaining flags, by the clock of the peers.
`python docs/recipe.py` lists the names of all recipes.
"""

import sys
import tempfile
from pathlib import Path

from benchmark.peers import clock
from docs import recipe

ROOT = Path(__file__).resolve().parents[2]


def read_edited_script(script: str, name: str) -> str:
    """Return the text of algos/`script`.py with the recipe `name` of docs/recipes_`script`.md."""
    _, body = recipe.read_recipes(script)[name]
    return recipe.apply_diff((ROOT / "algos" / f"{script}.py").read_text(), recipe.find_block(body, "diff"))


def run_script(text: str, name: str, flags: list) -> None:
    """Run a script, given as text, from a file `name`.py, with the flags."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(text)
        sys.argv[1:] = [str(path), *flags]  # clock.py's own name, the script, its flags
        clock.main()


def main() -> None:
    """Run what the command line names."""
    _, script, name, *flags = sys.argv
    run_script(read_edited_script(script, name), f"{script}_with_recipe", flags)


if __name__ == "__main__":
    main()
