"""Run a script with a recipe: python -m benchmark.peers.our_recipe algos/ppo.py a-recurrent-network --seed 1

The recipe is applied to a copy of the script, which runs with the remaining flags, by the clock of the peers.
`python docs/recipe.py` lists the names of all recipes.
"""

import sys
import tempfile
from pathlib import Path

from benchmark.common import ROOT
from benchmark.peers import clock
from docs import recipe


def read_edited_script(path: str, name: str) -> str:
    """Return the text of a script, such as algos/ppo.py, with the recipe `name` of its page in docs/."""
    _, body = recipe.read_recipes(Path(path).stem)[name]
    return recipe.apply_diff((ROOT / path).read_text(), recipe.find_block(body, "diff"))


def run_script(text: str, name: str, flags: list) -> None:
    """Run a script, given as text, from a file `name`.py, with the flags."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(text)
        sys.argv[1:] = [str(path), *flags]  # clock.py's own name, the script, its flags
        clock.main()


def main() -> None:
    """Run what the command line names."""
    _, path, name, *flags = sys.argv
    run_script(read_edited_script(path, name), f"{Path(path).stem}_with_recipe", flags)


if __name__ == "__main__":
    main()
