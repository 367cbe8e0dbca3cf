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
LABELS = {  # of cells in legends; others are SCRIPT, SETTING, and those without a label are left out
    "ppo/ours": "ours",
    "ppo/default": "ours",
    "ppo/ours-vector-form": "",
    "cleanrl_ppo/cleanrl": "CleanRL",
    "sb3_ppo/sb3": "SB3",
    "sb3_ppo/zoo": "Stable-Baselines3",
    "r2d2_lstm/default": "R2D2",
    "r2d2_lstm/lstm": "R2D2",
    "r2d2_lstm/no-memory": "R2D2 without memory",
    "r2d2_lstm/last-overlaps": "last window overlaps",
    "r2d2_lstm/null-steps": "null steps at the end",
    "sb3_recurrent_ppo/ours": "RecurrentPPO",
    "sb3_recurrent_ppo/zoo": "RecurrentPPO, as in RL Zoo",
    "reinforce_tsp_attention/default": "default run",
    "reinforce_tsp_attention/short": "short run",
}
ROWS = {
    "ppo_equal": (1,),
    "popgym": (0,),
    "r2d2_memory": (0,),
}  # one panel a task: by steps (0) or seconds (1)
LEVELS = {  # of PPO with a GRU and with the best memory: table 3 of Morad et al. 2023, arXiv:2303.01859
    "RepeatPreviousEasy-1M": (1.00, 1.00),
    "RepeatPreviousMedium-1M": (-0.315, 0.789),
    "RepeatPreviousHard-1M": (-0.428, 0.191),
    "RepeatFirstEasy-1M": (1.00, 1.00),
    "CountRecallEasy-1M": (0.177, 0.509),
    "AutoencodeEasy-1M": (-0.283, -0.283),
}
LEVEL_STYLES = {"paper, GRU, 15M steps": ":", "paper, best memory": "--"}


def find_label(cell: dict) -> str:
    """Return the label of a cell in legends."""
    name = f"{cell['script']}/{cell['setting']}"
    return LABELS.get(name, name.replace("/", ", "))


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
        x, mean, half = find_band(curves, reach)
        label = find_label(cell)
        color = colors.setdefault(label, f"C{len(colors)}")
        axes.fill_between(x, mean - half, mean + half, color=color, alpha=0.2, lw=0)
        axes.plot(x, mean, color=color, lw=2.5, label=label)
        axes.plot(x[-1], mean[-1], "o", color=color, ms=8)
    task = cells[0]["task"]
    for level, (label, style) in zip(LEVELS.get(task, ()), LEVEL_STYLES.items(), strict=False):
        axes.axhline(level, color="0.3", ls=style, lw=1.5, label=label)
    title = textwrap.fill(re.sub("popgym-|-v[0-9]|-1M", "", task).replace("-", " "), 22)
    axes.set_title(title, fontsize="medium" if len(title) < 18 else "small")
    axes.locator_params(axis="x", nbins=3)
    axes.locator_params(axis="y", nbins=4)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: dict, path: Path) -> bool:
    """Draw the learning curves of each task by steps and by seconds, or as ROWS says; returns whether there are any."""
    tasks = {}
    for cell in results["cells"].values():
        if any(run["curve"] for run in cell["runs"]) and find_label(cell):
            tasks.setdefault((cell["task"], cell["curve"]), []).append(cell)
    if not tasks:
        return False
    columns = ROWS.get(results["suite"], (0, 1))
    panels = [(cells, column) for cells in tasks.values() for column in columns]
    width = 4 - len(columns)  # panels side by side
    height = math.ceil(len(panels) / width)
    colors = {}
    with rc_context({"font.size": 11 + 2 * width}):  # to be read on a phone
        figure = Figure(figsize=(9, 3.3 * height + 0.5), layout="constrained")
        for i, (cells, column) in enumerate(panels):
            axes = figure.add_subplot(height, width, i + 1)
            draw_task(axes, cells, column, colors)
            if i >= len(panels) - width:
                axes.set_xlabel("steps" if column == 0 else "seconds" if cells[0]["gpus"] else "CPU-seconds")
            if i % width == 0:
                axes.set_ylabel(
                    METRICS.get(cells[0]["curve"], cells[0]["curve"]).removesuffix(" of training episodes")
                )
        found = [axes.get_legend_handles_labels() for axes in figure.axes]
        labels = {
            label: handle for handles, names in found for handle, label in zip(handles, names, strict=True)
        }
        if len(labels) > 1:
            place = {"loc": "outside upper center", "ncols": 2 if len(labels) > 3 else 3, "frameon": False}
            figure.legend(labels.values(), labels, **place)
        figure.savefig(path, dpi=150)
    return True
