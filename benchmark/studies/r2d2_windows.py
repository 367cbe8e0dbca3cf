"""The picture of the windows in docs/r2d2_lstm.md, drawn from what the replay of algos/r2d2_lstm.py holds.

python benchmark/studies/r2d2_windows.py
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]
import common

BURN_IN, LEARN_LENGTH, N_STEP, EPISODE = 4, 5, 2, 12  # steps
COLOURS = {"burn-in": "#9ecae1", "learned": "#74c476", "targets only": "#fdae6b", "padding": "#eeeeee"}


def fill_replay():
    """A replay that has seen one episode of EPISODE steps that terminated."""
    import torch

    from algos import r2d2_lstm as r2d2

    envs = SimpleNamespace(num_envs=1, obs_dim=1, same_step=False, obs_dtype=torch.float32)
    args = r2d2.Args(burn_in=BURN_IN, learn_length=LEARN_LENGTH, n_step=N_STEP, buffer_size=10)
    actor, replay = (make(envs, args, torch.device("cpu")) for make in (r2d2.Actor, r2d2.SequenceReplay))
    for step in range(EPISODE + 1):
        row = torch.tensor([[step, 1.0, step == EPISODE, 0.0, 0.0, 0.0]])  # observation, then as in columns.py
        replay.add_step(actor, actor.observe(row), row[:, 2] > 0, row[:, 3] > 0)
    return replay


def draw(path: Path) -> None:
    """One line of boxes a window, numbered by the step of the episode."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    replay = fill_replay()
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.add_subplot()
    for line in range(replay.num_added):
        first, end, is_warm = (x[line].item() for x in (replay.first, replay.end, replay.is_warm))
        for p in range(replay.length):
            kind = "targets only" if p >= BURN_IN + LEARN_LENGTH or p == end else "learned"
            if p > end or (p < BURN_IN and not is_warm):
                kind = "padding"
            elif p < BURN_IN:
                kind = "burn-in"
            axes.add_patch(Rectangle((first + p, -line), 0.94, 0.8, facecolor=COLOURS[kind], edgecolor="grey"))
            if kind != "padding":
                axes.text(first + p + 0.47, 0.4 - line, f"{first + p}", ha="center", va="center", fontsize=9)
        start = "stored state" if is_warm else "zero state"
        axes.annotate(
            start,
            (first + (0 if is_warm else BURN_IN), 0.4 - line),
            (-5.9, 0.4 - line),
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "->", "color": "grey"},
        )
    axes.text(EPISODE + 0.1, 1.9 - replay.num_added, "the episode's last observation", fontsize=8)
    axes.set(xlim=(-6, 17), ylim=(0.9 - replay.num_added, 1.1))
    axes.axis("off")
    figure.legend(
        handles=[Patch(facecolor=c, edgecolor="grey", label=k) for k, c in COLOURS.items()],
        loc="outside lower center",
        ncols=4,
        fontsize=8,
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(common.FIGURES / "r2d2_windows.png")
