"""Draw the learning curves of a suite: the mean over the seeds and its interval."""

import math
import re
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy import stats

METRICS = {  # in words
    "eval/episodic_return": "return",
    "charts/episodic_return": "return of training episodes",
    "eval/greedy_gap": "gap of greedy tours, %",
    "eval/f1": "F1 of changed pixels, on val",
    "eval/win_rate": "games won against plain MCTS",
}
SETTINGS = {  # names of cells in legends; others are SCRIPT, SETTING
    "ppo/ours": "ours",
    "ppo/default": "ours",
    "cleanrl_ppo/cleanrl": "CleanRL",
    "sb3_ppo/sb3": "SB3",
    "sb3_ppo/zoo": "Stable-Baselines3",
    "r2d2_lstm/default": "R2D2",
    "sb3_recurrent_ppo/ours": "RecurrentPPO",
    "sb3_recurrent_ppo/zoo": "RecurrentPPO, as in RL Zoo",
    "r2d2_lstm/lstm": "R2D2",
    "r2d2_lstm/no-memory": "R2D2 without memory",
    "r2d2_lstm/last-overlaps": "last window overlaps",
    "r2d2_lstm/null-steps": "null steps at the end",
    "reinforce_tsp_attention/default": "default run",
    "reinforce_tsp_attention/short": "short run",
}
# Pictures with one panel a task, in a row of three: their axis, and cells that are left out
ROWS = {
    "ppo_equal": ("seconds", ("ours-vector-form",)),
    "popgym": ("steps", ()),
    "r2d2_memory": ("steps", ()),
}
GRU, BEST = "paper, GRU, 15M steps", "paper, best memory"
LEVELS = {  # table 3 of Morad et al. 2023, arXiv:2303.01859, as docs/r2d2_lstm.md shows it
    "RepeatPreviousEasy-1M": {GRU: 1.00, BEST: 1.00},
    "RepeatPreviousMedium-1M": {GRU: -0.315, BEST: 0.789},
    "RepeatPreviousHard-1M": {GRU: -0.428, BEST: 0.191},
    "RepeatFirstEasy-1M": {GRU: 1.00, BEST: 1.00},
    "CountRecallEasy-1M": {GRU: 0.177, BEST: 0.509},
    "AutoencodeEasy-1M": {GRU: -0.283, BEST: -0.283},
}


def find_band(curves: list[np.ndarray], reach: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 60 x, the mean of curves [2, n] there, and half of its 95 % interval (Student's t), 0 for one curve.

    A point of a curve is first averaged with `reach` others on either side, and with fewer near the ends.
    """
    x = np.linspace(max(curve[0, 0] for curve in curves), min(curve[0, -1] for curve in curves), 60)
    values = np.array([np.interp(x, *curve) for curve in curves])  # [seeds, 60]
    near = [slice(i - min(reach, i), i + min(reach, i) + 1) for i in range(60)]
    values = np.stack([values[:, part].mean(1) for part in near], 1)
    if len(values) == 1:
        return x, values[0], x * 0
    return x, values.mean(0), stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def draw_task(axes, cells: list[dict], column: int, colors: dict[str, str]) -> None:
    """Draw the cells of a task by steps (column 0) or seconds (1): the mean of the seeds, its interval, its end."""
    for cell in cells:
        curves = [np.array(run["curve"])[:, [column, 2]].T for run in cell["runs"] if run["curve"]]
        reach = 4 if cell["curve"].startswith("charts/") else 0  # training episodes are few and noisy
        name = f"{cell['script']}/{cell['setting']}"
        label = SETTINGS.get(name, name.replace("/", ", "))
        color = colors.setdefault(label, f"C{len(colors)}")
        x, mean, half = find_band(curves, reach)
        axes.fill_between(x, mean - half, mean + half, color=color, alpha=0.2, lw=0)
        axes.plot(x, mean, color=color, lw=2.5, label=label)
        axes.plot(x[-1], mean[-1], "o", color=color, ms=8)
    levels = LEVELS.get(cells[0]["task"], {})
    for (label, level), style in zip(levels.items(), (":", "--"), strict=False):
        axes.axhline(level, color="0.3", ls=style, lw=1.5, label=label)
    title = re.sub("popgym-|-v[0-9]|-1M", "", cells[0]["task"]).replace("-", " ")
    axes.set_title(textwrap.fill(title, 22), fontsize="medium" if len(title) < 18 else "small")
    axes.locator_params(axis="x", nbins=3)
    axes.locator_params(axis="y", nbins=4)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: dict, path: Path) -> bool:
    """Draw the learning curves of each task by steps and by seconds, or as ROWS says; returns whether there are any."""
    axis, left_out = ROWS.get(results["suite"], ("", ()))
    tasks = {}
    for cell in results["cells"].values():
        if any(run["curve"] for run in cell["runs"]) and cell["setting"] not in left_out:
            tasks.setdefault((cell["task"], cell["curve"]), []).append(cell)
    if not tasks:
        return False
    shape = (math.ceil(len(tasks) / 3), 3) if axis else (len(tasks), 2)
    panels = [
        (cells, column) for cells in tasks.values() for column in ([axis == "seconds"] if axis else (0, 1))
    ]
    colors = {}
    with rc_context({"font.size": 17 if axis else 14}):  # to be read on a phone
        figure = Figure(figsize=(9, (3.6 if axis else 3.0) * shape[0] + 0.5), layout="constrained")
        grid = list(figure.subplots(*shape, squeeze=False).flat)
        for i, axes in enumerate(grid):
            if i >= len(panels):
                axes.axis("off")
                continue
            cells, column = panels[i]
            draw_task(axes, cells, column, colors)
            seconds = "seconds" if cells[0]["gpus"] else "CPU-seconds"
            is_left, is_lowest = i % shape[1] == 0, i >= len(panels) - shape[1]
            axes.set_xlabel(("steps", seconds)[column] if is_lowest else "")
            label = METRICS.get(cells[0]["curve"], cells[0]["curve"])
            axes.set_ylabel(label.removesuffix(" of training episodes" * bool(axis)) if is_left else "")
        labels = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels())}
        if len(labels) > 1:
            lengths, room = [len(label) + 6 for label in labels], 62 if axis else 66  # letters in a line
            num_columns = len(labels) if sum(lengths) <= room else max(1, room // max(lengths))
            place = {"loc": "outside upper center", "ncols": num_columns, "frameon": False}
            figure.legend(labels.values(), labels, **place)
        figure.savefig(path, dpi=150)
    return True
