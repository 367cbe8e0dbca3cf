"""algos/ppo_change_detection.py against rules that stop by a threshold, over data seeds and training seeds.

python benchmark/change_detection.py --jobs 2                     # about 80 minutes on two cores
python benchmark/change_detection.py --regimes buildings          # some of the runs; the results of the others are kept
python benchmark/change_detection.py --report-only                # tables and figures from benchmark/results
"""

import argparse
import json
import shutil
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from scipy import stats
from tqdm import tqdm

REGIMES = {  # flags, number of data seeds, number of training seeds
    "buildings": ("", 3, 3),
    "buildings-cloudy": ("--env-id buildings-cloudy", 3, 3),
    "buildings, tiles of 2 x 2": ("--tile 2", 1, 3),
    "buildings-cloudy, tiles of 2 x 2": ("--env-id buildings-cloudy --tile 2", 1, 3),
    "buildings, credit by image": ("--credit image", 1, 2),
    "buildings, no evidence": ("--evidence none", 1, 2),
    "buildings, looks cost nothing": ("--cost 0", 1, 1),
    "buildings, looks cost 1": ("--cost 1", 1, 1),
}
FIRST = 11  # first data seed and training seed; the settings were chosen with others
METHODS = {
    "ppo": "PPO",
    "coarse": "nowhere (coarse alone)",
    "everywhere": "everywhere, network of PPO",
    "cross_entropy": "everywhere, cross entropy alone",
    "random": "random looks",
    "confidence": "exit by confidence",
    "band": "one look in a band",
    "threshold": "one look above a threshold",
}
SCORES = "precision recall f1 iou oa kappa looks settled_acc pixel_f1 pixel_iou ms".split()


def measure_run(regime: str, data_seed: int, seed: int) -> dict:
    """What is kept of one run; that of the first seeds also leaves its picture in docs/figures."""
    flags = (*REGIMES[regime][0].split(), "--data-seed", data_seed, "--seed", seed)
    with tempfile.TemporaryDirectory() as folder:
        path = common.run_in_folder(folder, "ppo_change_detection", *flags)
        result = json.loads((path / "result.json").read_text())
        if data_seed == seed == FIRST and regime in ("buildings", "buildings-cloudy"):
            shutil.copy(path / "changes.png", common.FIGURES / f"change_maps_{regime}.png")
    metrics = {name.removeprefix("eval/"): round(value, 4) for name, value in result["metrics"].items()}
    row = {"regime": regime, "data_seed": data_seed, "seed": seed, "wall_seconds": round(result["wall_seconds"], 1)}
    return row | {"cpu_seconds": round(result["cpu_seconds"], 1), "metrics": metrics}


def measure(regimes: list[str], rows: list[dict], jobs: int) -> None:
    """Run `regimes`, `jobs` at a time; each run is saved as it ends, in place of the same run in `rows`."""
    runs = [(r, FIRST + d, FIRST + s) for r in regimes for d in range(REGIMES[r][1]) for s in range(REGIMES[r][2])]
    machine, keys = common.describe_machine(), ("regime", "data_seed", "seed")
    with ThreadPoolExecutor(jobs) as pool:
        for new in tqdm(pool.map(lambda run: measure_run(*run), runs), total=len(runs), unit="run"):
            new |= {"commit": machine["commit"]}
            rows = [row for row in rows if any(row[key] != new[key] for key in keys)] + [new]
            common.save_results("change_detection", {"machine": machine, "rows": rows})


def compare(rows: list[dict], method: str) -> tuple[float, float | None, int]:
    """Mean of F1 of PPO less F1 of `method`, half of its 95 % interval, and the number of runs that PPO wins.

    The interval is Student's t over the means of data seeds, over runs where there is one data seed; None for one run.
    """
    differences = [row["metrics"]["ppo_f1"] - row["metrics"][f"{method}_f1"] for row in rows]
    groups = {}
    for row, difference in zip(rows, differences, strict=True):
        groups.setdefault(row["data_seed"], []).append(difference)
    means = [statistics.mean(group) for group in groups.values()] if len(groups) > 1 else differences
    interval = None
    if len(means) > 1:
        interval = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
    return statistics.mean(differences), interval, sum(d > 0 for d in differences)


def make_table(results: dict) -> str:
    """Markdown tables: the means over the runs of each regime, and PPO against each method."""
    lines = []
    for regime, (flags, *_) in REGIMES.items():
        rows = [row for row in results["rows"] if row["regime"] == regime]
        if not rows:
            continue
        lines += ["", f"**{regime}** (`{flags or 'no flags'}`, mean of {len(rows)} runs)", ""]
        names = [name.replace("_", " ") for name in SCORES]
        lines += [f"| method | {' | '.join(names)} | PPO's F1 is higher by |", f"|--|{'--:|' * len(SCORES)}--:|"]
        for method, title in METHODS.items():
            values = [statistics.mean(row["metrics"][f"{method}_{score}"] for row in rows) for score in SCORES]
            cells = [
                f"{value:.2f}" if name == "ms" else f"{value:.3f}" for name, value in zip(SCORES, values, strict=True)
            ]
            last = ""
            if method != "ppo":
                gain, interval, wins = compare(rows, method)
                last = f"{gain:+.3f} ± {interval:.3f} ({wins} of {len(rows)})" if interval else f"{gain:+.3f}"
            lines.append(f"| {title} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines[1:])


def summarize_regime(results: dict, regime: str) -> dict[str, float]:
    """Shares of F1 kept, looks and times of PPO against looking everywhere, worst run and mean."""
    rows = [row["metrics"] for row in results["rows"] if row["regime"] == regime]
    kept = [m["ppo_f1"] / max(m["everywhere_f1"], m["cross_entropy_f1"]) for m in rows]
    times = [m["ppo_ms"] / m["everywhere_ms"] for m in rows]
    return {
        "f1": statistics.mean(m["ppo_f1"] for m in rows),
        "looks": statistics.mean(m["ppo_looks"] for m in rows),
        "most_looks": max(m["ppo_looks"] for m in rows),
        "kept": statistics.mean(kept),
        "least_kept": min(kept),
        "time": statistics.median(times),
        "most_time": max(times),
    }


def make_summary(results: dict) -> str:
    """Sentences on what was asked of the default set."""
    lines = []
    for regime in ("buildings", "buildings-cloudy"):
        if not any(row["regime"] == regime for row in results["rows"]):
            continue
        s = summarize_regime(results, regime)
        gains = {method: compare([r for r in results["rows"] if r["regime"] == regime], method) for method in METHODS}
        text = f"- {regime}: PPO keeps {100 * s['kept']:.1f} % (worst run {100 * s['least_kept']:.1f} %) of the F1 of "
        text += f"looking everywhere, of the better of the two networks, at {s['looks']:.2f} looks per query (most "
        text += f"{s['most_looks']:.2f}) of 2, in {100 * s['time']:.0f} % of its CPU time (most "
        text += (
            f"{100 * s['most_time']:.0f} %). Against exit by confidence at equal looks {gains['confidence'][0]:+.3f} F1"
        )
        text += f" ± {gains['confidence'][1]:.3f}, against the threshold {gains['threshold'][0]:+.3f} "
        lines.append(text + f"± {gains['threshold'][1]:.3f}.")
    seconds = [row["wall_seconds"] for row in results["rows"]]
    lines.append(f"- A run took {statistics.median(seconds) / 60:.1f} minutes (median), with another beside it.")
    return "\n".join(lines)


def summarize(results: dict) -> str:
    """One line for README.md."""
    s, cloudy = (summarize_regime(results, regime) for regime in ("buildings", "buildings-cloudy"))
    gain = compare([row for row in results["rows"] if row["regime"] == "buildings-cloudy"], "threshold")
    text = f"{100 * s['kept']:.0f} % of the F1 of looking everywhere at {s['looks']:.2f} of 2 looks per query; under "
    return text + f"clouds {gain[0]:+.3f} ± {gain[1]:.3f} F1 against a tuned threshold at {cloudy['looks']:.2f} looks"


def draw(results: dict, path: Path) -> None:
    """F1 by looks per query, a panel a regime, a colour a method, a point a run."""
    from matplotlib.figure import Figure

    regimes = [regime for regime in list(REGIMES)[:4] if any(row["regime"] == regime for row in results["rows"])]
    figure = Figure(figsize=(4.3 * len(regimes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(regimes), squeeze=False)[0]
    for axes, regime in zip(panels, regimes, strict=True):
        rows = [row["metrics"] for row in results["rows"] if row["regime"] == regime]
        for i, (method, title) in enumerate(METHODS.items()):
            points = [(m[f"{method}_looks"], m[f"{method}_f1"]) for m in rows]
            marker = "*" if method == "ppo" else "o"
            axes.scatter(
                *zip(*points, strict=True), s=70 if method == "ppo" else 18, marker=marker, color=f"C{i}", label=title
            )
        axes.set(title=regime, xlabel="looks per query", ylabel="F1 of changed patches")
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def draw_process(path: Path) -> None:
    """The decision process of one query."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    boxes = {  # left, bottom, text, colour
        "coarse": (0.0, 1.5, "coarse pair\n(averaged 4 x 4)", "#dddddd"),
        "backbone": (2.0, 1.5, "backbone\nsmall, all patches", "#cfe2f3"),
        "query": (4.0, 1.5, "query q", "#fff2cc"),
        "policy": (6.0, 1.5, "policy head\nstop?", "#d9ead3"),
        "class": (8.2, 3.0, "class head\nchanged?", "#d9ead3"),
        "glimpse": (8.2, 0.0, "glimpse of its window\nat full resolution\nand transformer block", "#f4cccc"),
        "correction": (4.0, 0.0, "correction\nq + W c,  c ~ N(mean, s)", "#fff2cc"),
    }
    for x, y, text, colour in boxes.values():
        axes.text(
            x + 0.8,
            y + 0.4,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.5", "fc": colour},
        )
    arrow = {"arrowstyle": "->", "color": "#444444"}
    for start, end, label, where in (
        ((1.45, 1.9), (2.1, 1.9), "", None),
        ((3.5, 1.9), (4.35, 1.9), "", None),
        ((5.2, 1.9), (6.15, 1.9), "", None),
        ((7.4, 2.2), (8.5, 3.2), "stop: free", (7.3, 2.95)),
        ((7.4, 1.6), (8.3, 0.95), "go on:\npays the cost", (7.0, 0.9)),
        ((8.0, 0.4), (5.95, 0.4), "", None),
        ((4.8, 0.85), (4.8, 1.5), "next step", (4.15, 1.15)),
    ):
        axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
        if where:
            axes.text(*where, label, fontsize=8, ha="center", va="center")
    axes.set(xlim=(-0.2, 10.2), ylim=(-0.4, 4.0))
    axes.set_axis_off()
    figure.savefig(path, dpi=110)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    commits = sorted({row["commit"] for row in results["rows"]})
    machine = f"Measured on {common.machine_line(results['machine'] | {'commit': ' and '.join(commits)})}"
    tables = f"\n{make_summary(results)}\n\n{make_table(results)}\n\n{machine}\n"
    is_whole = {"buildings", "buildings-cloudy"} <= {row["regime"] for row in results["rows"]}
    return {"change_detection": tables} | ({"change_detection_cell": summarize(results)} if is_whole else {})


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        path = common.RESULTS / "change_detection.json"
        measure(args.regimes, common.load_results("change_detection")["rows"] if path.exists() else [], args.jobs)
    results = common.load_results("change_detection")
    draw(results, common.FIGURES / "change_detection.png")
    draw_process(common.FIGURES / "change_process.png")
    common.write_report(sections(results), "ppo_change_detection")
    print(make_summary(results))


if __name__ == "__main__":
    main()
