"""Draw the learning curves of a suite: the mean over the seeds and its interval."""

import math
import re
import textwrap
from collections import defaultdict

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmark.intervals import find_half_width

METRICS = {  # in words
    "eval/episodic_return": "return",
    "charts/episodic_return": "return",
    "eval/greedy_gap": "gap of greedy tours, %",
    "eval/win_rate": "games won against plain MCTS",
}
COLUMNS = {"steps": [0], "seconds": [1], "both": [0, 1]}  # of a curve, by a suite's picture.by
# Line and marker tell curves apart without colours. The colours are those of Okabe and Ito, which differ for
# the colour-blind too; the ninth curve has the colour and the line of the first one, and another marker
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999999")
LINES = ("-", "--", "-.", ":")
MARKERS = "os^DvPX*"
STYLES = [
    {"color": COLORS[i % 8], "ls": LINES[i % 4], "marker": MARKERS[(i + i // 8) % 8]}
    for i in range(len(COLORS) * len(MARKERS))
]
# Of known values of others: if two are equal, the thin line lies on the wide one
LEVELS = ({"color": "0.75", "lw": 6}, {"color": "0", "lw": 1.5, "ls": (0, (3, 2))})


def find_label(cell: dict):
    """Return the label of a cell in legends; an empty one leaves the cell out."""
    label = cell.get("label")  # runs of earlier versions have no such key
    return f"{cell['script']}, {cell['setting']}" if label is None else label


def find_band(curves, reach, column):
    """Return 60 x, the mean of curves [3, n] there, and half of its 95 % interval (Student's t), nan for one
    curve.

    A curve has steps, seconds and values. All are read at the same 60 steps; x are these (column 0) or the
    mean seconds at them (1). A value is first averaged with `reach` others on either side, and with fewer
    near the ends.
    """
    steps = np.linspace(max(curve[0, 0] for curve in curves), min(curve[0, -1] for curve in curves), 60)
    # [seeds, 3, 60]
    points = np.array([[np.interp(steps, curve[0], row) for row in curve] for curve in curves])
    values = points[:, 2]
    near = [slice(i - min(reach, i), i + min(reach, i) + 1) for i in range(60)]
    values = np.stack([values[:, part].mean(1) for part in near], 1)
    return points[:, column].mean(0), values.mean(0), find_half_width(values)


def draw_task(axes, cells, column, styles, levels, is_logarithmic):
    """Draw the cells of a task by steps (column 0) or seconds (1): the mean of the seeds, its interval, its
    end.

    `styles` are those of the labels so far. `levels` are known values of others by task and name, as
    horizontal lines.
    """
    task = cells[0]["task"]
    for (label, level), style in zip(levels.get(task, {}).items(), LEVELS, strict=False):
        axes.axhline(level, label=None if label in styles else label, **style)
        styles[label] = style
    for cell in cells:
        curves = [np.array(run["curve"]).T for run in cell["runs"] if run["curve"]]
        reach = 4 if cell["curve"].startswith("charts/") else 0  # training episodes are few and noisy
        x, mean, half = find_band(curves, reach, column)
        label = find_label(cell)
        # The legend of the figure has each label once
        shown = None if label in styles else label
        num_curves = sum("marker" in style for style in styles.values())
        style = styles.setdefault(label, STYLES[num_curves % len(STYLES)])
        if len(curves) > 2:  # the interval of two values fills the panel
            axes.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.2, lw=0)
        axes.plot(x, mean, **style, lw=2.5, ms=9, mfc="none", mew=2.5, markevery=[-1], label=shown)
    title = re.sub("popgym-|-v[0-9]|-1M", "", task).replace("-", " ")
    axes.set_title(textwrap.fill(title, 22), fontsize="medium" if len(title) < 18 else "small")
    axes.locator_params(axis="y", nbins=4)
    if is_logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.locator_params(axis="x", nbins=3)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    axes.spines[["top", "right"]].set_visible(False)


def draw(results, path):
    """Draw the learning curves of each task by steps and by seconds, or as the suite's `picture` says;
    returns whether there are any."""
    tasks = defaultdict(list)
    for cell in results["cells"].values():
        if any(run["curve"] for run in cell["runs"]) and find_label(cell):
            tasks[cell["task"], cell["curve"]].append(cell)
    picture = results.get("picture", {"by": "both", "logarithmic": False})
    columns = COLUMNS[picture["by"]]
    panels = [(cells, column) for cells in tasks.values() for column in columns]
    # Panels side by side: two if there are two a task, or if three would leave places empty
    width = 2 if len(columns) == 2 or (len(panels) % 3 and len(panels) % 2 == 0) else 3
    height = math.ceil(len(panels) / width)
    styles = {}
    with rc_context({"font.size": 11 + 2 * width}):  # to be read on a phone
        figure = Figure(figsize=(9, 3.3 * height + 0.5), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.12)  # inches: a title is nearer to its own panel
        for i, (cells, column) in enumerate(panels):
            axes = figure.add_subplot(height, width, i + 1)
            is_logarithmic = column == 1 and picture["logarithmic"]
            draw_task(axes, cells, column, styles, results.get("levels", {}), is_logarithmic)
            if i >= len(panels) - width:
                axes.set_xlabel("steps" if column == 0 else "seconds" if cells[0]["gpus"] else "CPU-seconds")
            if i % width == 0:
                axes.set_ylabel(METRICS.get(cells[0]["curve"], cells[0]["curve"]))
        if len(styles) > 1:
            num_columns = 2 if len(styles) > 3 else 3
            figure.legend(loc="outside upper center", ncols=num_columns, frameon=False, handlelength=3)
        if panels:
            figure.savefig(path, dpi=150)
    return bool(panels)
