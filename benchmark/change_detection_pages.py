"""Tables and pictures of benchmark/studies/change_detection.py, whose rows are in
benchmark/results/change_detection.json.

The criterion there has two numbers: `MARGIN`, how far the F1 may be below that of the oracle, and
`MOST_SECONDS`, the CPU-seconds of a run.
"""

import math
import statistics
from pathlib import Path

import torch

from algos import ppo_change_detection as cd
from benchmark import common, machines, markdown
from benchmark.code import mark
from benchmark.intervals import find_half_width
from benchmark.studies.change_detection import SHARE, STUDIES, calculate_lead, load_agent
from envs_shared import change_pairs

PAGE = "ppo_change_detection"
CHECKPOINT = common.BENCHMARK / "checkpoints" / "haze.pt"  # of haze, for pictures
METHODS = {
    "ppo": "PPO, best.pt",
    "last": "PPO, last policy",
    "nowhere": "nowhere",
    "everywhere": "everywhere",
    "threshold": "threshold on the coarse map",
    "all": "predicted gain of all looks",
    "oracle": "oracle",
}
EARNERS = {
    "ppo": "PPO, best.pt",
    "last": "PPO, last policy",
    "nowhere": "nowhere",
    "everywhere": "everywhere",
    "threshold_own": "threshold on the coarse map",
    "all_own": "predicted gain of all looks (look-ahead)",
}
MARGIN, MOST_SECONDS = 0.03, 60


def get_studies(results: dict) -> dict[str, list[dict]]:
    """Return the runs of each study that has some, by its name."""
    rows = {study: [row for row in results["rows"] if row["study"] == study] for study in STUDIES}
    return {study: found for study, found in rows.items() if found}


def get_value(row: dict, method: str, metric: str, group: str = "best") -> float:
    """Return f1, looks, return or net (F1 less the price of looks) of a method in a row; `last` is a policy,
    too."""
    if method == "last":
        return get_value(row, "ppo", metric, "last")
    if metric == "net":
        f1, looks = (row[group][f"{method}_{key}"] for key in ("f1", "looks"))
        return f1 - row["cost"] / (2 * SHARE) * looks
    return row[group][f"{method}_{metric}"]


def show_lead(rows: list[dict], method: str, group: str, metric: str = "f1", least_decimals: int = 3) -> str:
    """Write PPO's mean lead over `method`, half of its 95 % interval (Student's t), and PPO's wins."""
    leads = [get_value(row, "ppo", metric) - get_value(row, method, metric, group) for row in rows]
    lead = round(statistics.mean(leads), least_decimals) + 0.0  # -0.0 becomes 0.0
    half = find_half_width(leads)
    num_decimals = 1 - math.floor(math.log10(half)) if half > 1e-9 else 0  # two significant digits
    wins = sum(lead > 0 for lead in leads)
    return f"{lead:+.{least_decimals}f} ± {half:.{num_decimals}f} ({wins} of {len(rows)})"


def judge(rows: list[dict]) -> dict[str, float]:
    """Compare best.pt and the last policy with the criterion, and find the longest run.

    "best" and "last" are numbers of seeds. The leads are mean differences to looking everywhere.
    """
    found = {}
    for group in ("best", "last"):
        gaps = [row[group]["oracle_f1"] - row[group]["ppo_f1"] for row in rows]
        found[group] = sum(gap <= MARGIN + 1e-9 for gap in gaps)
        leads = [row[group]["ppo_f1"] - row["best"]["everywhere_f1"] for row in rows]
        found[f"{group}_lead"] = statistics.mean(leads)
    return found | {"seconds": max(row["seconds"] for row in rows)}


def get_mean(rows: list[dict], method: str, metric: str, group: str = "best") -> float:
    """Return the mean of a metric of a method over runs."""
    return statistics.mean(get_value(row, method, metric, group) for row in rows)


def count_seconds(rows: list[dict], method: str, group: str) -> str:
    """Write median CPU-seconds of training: of the whole run or the detector, plus a rival's regression."""
    base = "detector_seconds" if group == "control" else "seconds"
    return markdown.show(
        statistics.median(row[base] + row[group].get(f"{method}_seconds", 0.0) for row in rows)
    )


def make_table(rows: list[dict]) -> str:
    """Make the Markdown table of all methods at equal looks, on PPO's network and, if measured, on the
    detector's."""
    lines = []
    has_control = all("control" in row for row in rows)
    for method, title in METHODS.items():
        line, is_ppo = [title], method in ("ppo", "last")
        for group in ("best", "control") if has_control else ("best",):
            if is_ppo and group == "control":
                line += [""] * 4
                continue
            line += [f"{get_mean(rows, method, key, group):.3f}" for key in ("f1", "looks")]
            line += [count_seconds(rows, method, group), "" if is_ppo else show_lead(rows, method, group)]
        lines.append(line)
    head = "method | F1: | looks: | CPU-s: | PPO's lead:"
    if has_control:
        head += " | F1 without PPO: | looks: | CPU-s: | PPO's lead:"
    return markdown.make_table(head, lines)


def make_earnings(rows: list[dict]) -> str:
    """Make the Markdown table of F1 less price and of return, with rivals whose level was tuned to earn
    most."""
    lines = []
    for method, title in EARNERS.items():
        values = [get_mean(rows, method, key) for key in ("f1", "looks", "net", "return")]
        line = [title, *(f"{x:.3f}" for x in values[:3]), f"{values[3]:.4f}"]
        if method == "ppo":
            line = [*line[:4], "", line[4], ""]
        else:
            net, score = show_lead(rows, method, "best", "net"), show_lead(rows, method, "best", "return", 4)
            line = [*line[:4], net, line[4], score]
        lines.append(line)
    head = "rule | F1: | looks: | F1 less price: | PPO's lead: | return: | PPO's lead:"
    return markdown.make_table(head, lines)


def make_tables(results: dict) -> str:
    """Make the tables of each study and price, each with the number of seeds that fulfil the criterion."""
    parts = []
    for study, runs in get_studies(results).items():
        for cost in sorted({row["cost"] for row in runs}):
            rows = [row for row in runs if row["cost"] == cost]
            found, seeds = judge(rows), ", ".join(str(row["seed"]) for row in rows)
            price = f"`--cost {cost / (2 * SHARE):.4g}` (eq. 1 subtracts {cost})"
            processors = machines.list_processors(rows)
            name = f"**{study}**, {price}, mean of {len(rows)} seeds ({seeds}); on {processors}"
            parts.append(mark(name, rows))
            parts += [make_earnings(rows), "At equal looks:", make_table(rows)]
            parts.append(
                f"At most {MARGIN} below the oracle on the same network: best.pt on {found['best']} of"
                f" {len(rows)} seeds, the last policy on {found['last']}. Mean F1 less that of looking"
                f" everywhere with best.pt's network: best.pt {found['best_lead']:+.4f}, the last policy"
                f" {found['last_lead']:+.4f}. The longest"
                f" run took {found['seconds']:.0f} CPU-seconds; the limit is {MOST_SECONDS}."
            )
    return "\n\n".join(parts)


def make_price_table(results: dict) -> str:
    """Make the table of the five prices: the lead of the best policy by calculation, and what rules earn."""
    rows, lines = get_studies(results).get("five prices", []), []
    for cost in STUDIES["five prices"][1]:
        found = [row for row in rows if row["cost"] == cost]
        line = [f"{cost / (2 * SHARE):.4g}", cost, f"{calculate_lead(cost):.4f}"]
        if found:
            line += [f"{get_mean(found, 'ppo', 'f1'):.3f}", f"{get_mean(found, 'ppo', 'looks'):.2f}"]
            rules = ("ppo", "nowhere", "threshold_own", "all_own")
            line += [f"{get_mean(found, rule, 'net'):.3f}" for rule in rules]
        line[0] = mark(line[0], found)
        lines.append([*line, len(found)] if found else [*line, *[""] * 6, "not run yet"])
    head = (
        "`--cost` | price: | lead by calculation: | F1 of PPO: | looks: | F1 less price of PPO: | nowhere: | "
    )
    head += "threshold: | look-ahead: | seeds:"
    return markdown.make_table(head, lines)


def draw_dots(axes, title: str, rows: list[dict], methods: dict[str, str], metric: str) -> None:
    """Draw a line of points for each method: a small one for each seed, and a diamond for the mean."""
    ticks = []
    for y, (method, name) in enumerate(methods.items()):
        values = [get_value(row, method, metric) for row in rows]
        color = "#0072B2" if method in ("ppo", "last") else "0.25"
        axes.plot(values, [y] * len(values), "o", color=color, ms=6, alpha=0.3, mew=0)
        axes.plot(statistics.mean(values), y, "D", color=color, ms=11, mfc="none", mew=2)
        ticks.append(f"{name}, {get_mean(rows, method, 'looks'):.2f} looks")
    axes.set_yticks(range(len(ticks)), ticks)
    axes.invert_yaxis()
    axes.set_title(title, fontsize="medium", loc="right")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: dict, path: Path) -> None:
    """Draw the F1 of all rules at equal looks, and F1 less price of rules that are tuned to earn most, of
    `haze`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = get_studies(results)["haze"]
    methods = {
        name: METHODS[name] for name in ("ppo", "last", "oracle", "all", "everywhere", "threshold", "nowhere")
    }
    earners = {
        name: EARNERS[name] for name in ("all_own", "ppo", "last", "threshold_own", "nowhere", "everywhere")
    }
    methods["all"] = earners["all_own"] = "supervised look-ahead"
    with rc_context({"font.size": 14}):
        figure = Figure(figsize=(9, 7.2), layout="constrained")
        top, bottom = figure.subplots(2, 1)
        draw_dots(top, "F1, where threshold, oracle and look-ahead look as often as PPO", rows, methods, "f1")
        draw_dots(bottom, "F1 less the price of the looks, rules tuned to earn most", rows, earners, "net")
        figure.savefig(path, dpi=130)


def read_checkpoint_pairs():
    """Return the policy of CHECKPOINT, its settings and test pairs, and where their roofs and haze are."""
    agent, args = load_agent(CHECKPOINT)
    _, _, test = cd.load_pairs(args, torch.device("cpu"))
    _, is_roof, is_hazy = change_pairs.draw_haze(len(test), args.image_size, 2, args.seed, 2)
    return agent, args, test, is_roof, is_hazy[0]


def find_mixed_pairs(test, is_hazy) -> list[int]:
    """List the pairs with a change on a roof without haze, and one on a roof with haze."""
    is_changed = test[:, -1, :: change_pairs.PATCH, :: change_pairs.PATCH].numpy() == 1
    is_mixed = (is_changed & is_hazy).any((1, 2)) & (is_changed & ~is_hazy).any((1, 2))
    return is_mixed.nonzero()[0].tolist()


def draw_task(path: Path, num_pairs: int = 2) -> None:
    """Draw the first mixed test pairs: both dates, roofs and haze, the changes, and what a policy makes of
    them."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    agent, args, test, is_roof, is_hazy = read_checkpoint_pairs()
    chosen = find_mixed_pairs(test, is_hazy)[:num_pairs]
    pairs = test[chosen]
    probability, looks, _ = cd.predict(agent, args, pairs)
    kinds = (is_roof.astype(int) + is_hazy)[chosen]  # 0 is ground, 1 a clear roof and 2 a hazy one
    colors = {"ground": "#4b5a2f", "roof": "#E69F00", "roof with haze": "#dce6ee"}
    blues = {"no look": "#ffffff", "one look": "#8cc5e3", "two looks": "#0072B2"}
    panels = {
        "first date": (pairs[:, :3].movedim(1, -1), {}),
        "second date": (pairs[:, 3:6].movedim(1, -1), {}),
        "what is there": (kinds, {"cmap": ListedColormap([*colors.values()]), "vmax": 2}),
        "changed (white)": (pairs[:, -1], {"cmap": "gray", "vmax": 1}),
        "looks of the policy": (looks, {"cmap": ListedColormap([*blues.values()]), "vmax": 2}),
        "probability of change": (probability, {"cmap": "gray", "vmax": 1}),
    }
    # Two rows of three panels for each pair, to be seen on a phone
    figure = Figure(figsize=(6.4, 4.6 * num_pairs + 0.8), layout="constrained")
    grid = figure.subplots(2 * num_pairs, 3).reshape(num_pairs, len(panels))
    for column, (title, (pictures, options)) in zip(grid.T, panels.items(), strict=True):
        for number, (axes, picture) in enumerate(zip(column, pictures, strict=True), 1):
            axes.set_title(f"pair {number}: {title}" if title == "first date" else title, fontsize=13)
            axes.imshow(picture, vmin=0, **options)
            axes.set(xticks=[], yticks=[])
    keys = zip([*colors, *blues], [*colors.values(), *blues.values()], strict=True)
    handles = [Patch(facecolor=color, edgecolor="0.4", label=name) for name, color in keys]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=13)
    figure.savefig(path, dpi=110)


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """Make what the pages show of the results, by page and section."""
    rows = get_studies(results)["haze"]
    looks = get_mean(rows, "ppo", "looks") / get_mean(rows, "everywhere", "looks")
    summary = f"F1 {get_mean(rows, 'ppo', 'f1'):.2f} with {looks:.0%} of the looks".replace("%", " %")
    summary += f", and {get_mean(rows, 'everywhere', 'f1'):.2f} with all ({len(rows)} runs)"
    tables = make_tables({"rows": [row for row in results["rows"] if row["study"] != "five prices"]})
    return {
        (PAGE, "change_detection"): f"\n{tables}\n\n{machines.machine_line(results['rows'])}\n",
        (PAGE, "change_prices"): f"\n{make_price_table(results)}\n",
        ("results", "change_detection_cell"): summary,
    }
