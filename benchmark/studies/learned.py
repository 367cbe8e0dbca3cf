"""Draw what each script learned, from shipped networks and committed results: docs/figures/learned_*.png.

    python -m benchmark.studies.learned      # seconds; benchmark/report.py draws them too

- PPO: returns of CartPole-v1 in the runs of the suite ppo_tasks.
- Attention model: the greedy tour of benchmark/checkpoints/tsp50.pt, on the instance with the median gap.
- R2D2: returns with and without memory in the runs of the suite r2d2_memory.
- Change detection: the looks of benchmark/checkpoints/haze.pt on a test pair (change_detection_pages.py).
- AlphaZero: a position of benchmark/checkpoints/go9x9.pt against itself, and the visits of its search.
"""

from pathlib import Path

import numpy as np
import torch

from algos import alphazero_go as az
from algos import ppo_change_detection as cd
from benchmark import change_detection_pages, common, pictures, records
from benchmark.peers.go_engine import load_network
from benchmark.studies import helpers, tsp_networks

SIZE = (1.75, 1.9)  # of a picture, in inches: 175 by 190 pixels on the page
DPI = 200
NUM_MOVES, NUM_GAME_SIMULATIONS, NUM_SIMULATIONS = 14, 100, 800  # of the Go picture


def draw_curves(axes, cells: list[dict], labels: tuple[str, ...]) -> None:
    """Draw the learning curves of cells by thousand steps, each with its label beside its end."""
    for cell, style, label in zip(cells, pictures.STYLES, labels, strict=False):
        curves = [np.array(run["curve"]).T for run in cell["runs"]]
        reach = 4 if cell["curve"].startswith("charts/") else 0
        steps, mean, half = pictures.find_band(curves, reach, 0)
        line = {name: style[name] for name in ("color", "ls")}
        axes.fill_between(steps / 1000, mean - half, mean + half, color=style["color"], alpha=0.2, lw=0)
        axes.plot(steps / 1000, mean, **line, lw=2)
        axes.annotate(label, (steps[-1] / 1000, mean[-1]), (0, 4), textcoords="offset points", ha="right")
    axes.set_xlabel("thousand steps", labelpad=1)
    axes.spines[["top", "right"]].set_visible(False)


def draw_ppo(axes, published: dict) -> str:
    """Draw returns of CartPole."""
    draw_curves(axes, [published["ppo_tasks"]["cells"]["ppo/CartPole-v1/default"]], ("500, the maximum",))
    axes.set(yticks=(0, 250, 500), ylim=(0, 590), xticks=(0, 50, 100))
    return "CartPole: return"


def draw_r2d2(axes, published: dict) -> str:
    """Draw returns of R2D2's default task with and without memory."""
    cells = published["r2d2_memory"]["cells"]
    names = [f"r2d2_lstm/popgym-RepeatFirstEasy-v0/{setting}" for setting in ("lstm", "no-memory")]
    draw_curves(axes, [cells[name] for name in names], ("with memory", "without"))
    axes.set(yticks=(-1, 0, 1), ylim=(-1, 1.3), xticks=(0, 50, 100))
    return "Recall: return"


def draw_tsp(axes, published: dict) -> str:
    """Draw a tour of 50 cities."""
    gap = tsp_networks.draw_median(axes, 50)
    axes.set_xlabel("grey: the optimal tour")
    return f"50 cities: +{gap:.1f} %"


def draw_changes(axes, published: dict) -> str:
    """Draw the first picture of a pair, where haze hides stripes, and how often the policy looks at each
    patch."""
    agent, args, test, _, is_hazy = change_detection_pages.read_checkpoint_pairs()
    i = change_detection_pages.find_mixed_pairs(test, is_hazy)[0]
    _, looks, _ = cd.predict(agent, args, test[i : i + 1])
    axes.imshow(test[i, :3].movedim(0, -1))
    for y, x in looks[0].nonzero().tolist():
        corner = x * args.patch_size - 0.5, y * args.patch_size - 0.5
        box = {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "none"}
        middle = [place + args.patch_size / 2 for place in corner]
        axes.text(*middle, f"{looks[0, y, x]:.0f}", ha="center", va="center", size=9, weight="bold", bbox=box)
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel("looks at each roof")
    return "Changes: looks"


@torch.no_grad()
def draw_go(axes, published: dict) -> str:
    """Draw a position of a game of the network against itself, and the share of the search's visits of each
    move."""
    go, args, agent = load_network(common.BENCHMARK / "checkpoints" / "go9x9.pt")
    evaluator = az.make_evaluator(go, agent)
    boards = go.new(1)
    player = az.make_player(go, evaluator, NUM_GAME_SIMULATIONS, args)
    for _ in range(NUM_MOVES):
        boards = go.play(boards, player(boards))
    search = az.Search(go, evaluator, boards, NUM_SIMULATIONS, args)
    search.run(NUM_SIMULATIONS)
    axes.set_facecolor("#e8c88a")
    for line in range(go.size):
        axes.plot((0, go.size - 1), (line, line), "0.3", lw=0.5)
        axes.plot((line, line), (0, go.size - 1), "0.3", lw=0.5)
    stones = boards.stones[0, go.cells]
    for colour, value in (("black", 1), ("white", -1)):
        y, x = np.divmod((stones == value).nonzero().flatten(), go.size)
        axes.plot(x, y, "o", color=colour, ms=9, mec="black", mew=0.5)
    for move, share in enumerate(search.policy()[0, : go.num_points].tolist()):
        if share >= 0.01:
            y, x = divmod(move, go.size)
            axes.plot(x, y, "s", color="#0072B2", ms=9 * share**0.5 + 1, mew=0)
    axes.set(aspect="equal", xticks=[], yticks=[], xlim=(-0.6, go.size - 0.4), ylim=(go.size - 0.4, -0.6))
    axes.set_xlabel("squares: search visits")
    return f"Go: {'black' if boards.to_play[0] == 1 else 'white'} to move"


PICTURES = {
    "learned_ppo": draw_ppo,
    "learned_tsp": draw_tsp,
    "learned_r2d2": draw_r2d2,
    "learned_changes": draw_changes,
    "learned_go": draw_go,
}


def draw(published: dict, folder: Path) -> None:
    """Draw all pictures into a folder."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9, "axes.titlesize": 10.5}):
        for name, draw_one in PICTURES.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.add_subplot()
            axes.set_title(draw_one(axes, published))
            figure.savefig(folder / f"{name}.png", dpi=DPI)


if __name__ == "__main__":
    helpers.start_parser(__doc__).parse_args()
    draw(records.load_published(), common.FIGURES)
