"""Learning curves and final metrics of run folders as the scripts leave them, {env_id}__{exp_name}__{seed}__{time}."""

import json
from dataclasses import dataclass
from pathlib import Path

import common

CURVES = {  # in words; the first one that was logged is the learning curve
    "charts/return_last_20": "return, last 20 episodes",
    "eval/episodic_return": "return of the greedy policy",
    "eval/greedy_gap": "gap of greedy tours, %",
    "charts/episodic_return": "return of training episodes",
    "eval/elo": "Elo, from matches with itself before",
    "eval/greedy_length": "length of greedy tours",
}
STEPS = {
    "reinforce_tsp_attention": "instances",
    "rl4co_attention": "instances",
    "ppo_change_detection": "pairs of all stages",
    "alphazero_go": "moves of self-play",
}


def name_curve(tag: str) -> str:
    """A tag in words, for an axis."""
    return CURVES.get(tag, tag.split("/")[-1].replace("_", " "))


def name_steps(script: str) -> str:
    """What a script counts, for an axis."""
    return STEPS.get(script, "environment steps")


@dataclass(frozen=True)
class Run:
    """A run folder: what its name says, result.json where the run has ended, {tag: ([step, ...], [value, ...])}."""

    path: Path
    script: str
    env_id: str
    exp_name: str
    seed: str
    result: dict | None
    curves: dict[str, tuple[list[int], list[float]]]


def read_run(path: Path) -> Run:
    """A run that has ended, still goes on or was killed."""
    env_id, exp_name, seed = [*path.name.rsplit("__", 3), "", ""][:3]
    try:
        result = json.loads((path / "result.json").read_text())
        script, _ = result["script"], result["metrics"][result["headline"]]
    except (OSError, ValueError, LookupError, TypeError):
        result, script = None, read_script(path / "checkpoint.pt") or exp_name
    events = common.read_events(path)
    curves = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    curves = {tag: ([p.step for p in points], [p.value for p in points]) for tag, points in curves.items()}
    return Run(path, script, env_id, exp_name, seed, result, curves)


def read_script(checkpoint: Path) -> str | None:
    """The script that has written a checkpoint; None where there is none."""
    import torch

    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["script"]
    except Exception:  # whatever is wrong with it: the run has curves all the same
        return None


def collect(folder: Path) -> dict[str, list[Run]]:
    """Runs in `folder` by script, task and name: {SCRIPT__ENV_ID__EXP_NAME: runs, by seed}."""
    patterns = ("events.out.tfevents.*", "*/events.out.tfevents.*", "*/result.json")
    paths = {path.parent for pattern in patterns for path in folder.glob(pattern)}
    groups = {}
    for run in sorted(map(read_run, paths), key=lambda run: (run.env_id, run.exp_name, len(run.seed), run.path.name)):
        groups.setdefault(f"{run.script}__{run.env_id}__{run.exp_name}", []).append(run)
    return groups


def find_curves(runs: list[Run]) -> list[str]:
    """Tags to draw: the learning curve, and the headline metric where it was evaluated on the way."""
    tags = [tag for tag in CURVES if any(tag in run.curves for run in runs)][:1]
    headline = next((run.result["headline"] for run in runs if run.result), "eval/episodic_return")
    is_on_the_way = any(len(run.curves[headline][0]) > 1 for run in runs if headline in run.curves)
    return tags + [headline] * (is_on_the_way and headline not in tags)


def name_group(runs: list[Run]) -> str:
    """Task, script and the name that the user has given, where there is one."""
    return ", ".join(dict.fromkeys(filter(None, (runs[0].env_id, runs[0].script, runs[0].exp_name))))


def name_run(run: Run) -> str:
    """A run among those of its group."""
    return f"seed {run.seed}" if run.result else f"seed {run.seed}, not done"


def draw(runs: list[Run], path: Path) -> None:
    """Learning curves of a group by steps, a line a run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    tags = find_curves(runs)
    figure = Figure(figsize=(6 * len(tags), 3.6), layout="constrained")
    figure.suptitle(name_group(runs))
    for axes, tag in zip(figure.subplots(1, len(tags), sharex=True, squeeze=False)[0], tags, strict=True):
        for i, run in enumerate(runs):
            steps, values = run.curves.get(tag, ([], []))
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=f"C{i}", lw=1.2, marker=marker, label=name_run(run))
        axes.set(xlabel=name_steps(runs[0].script), ylabel=name_curve(tag))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    if len(runs) <= 10:
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def render(groups: dict[str, list[Run]]) -> str:
    """Chapter of a page: of each group the picture, where there is one, and the final metrics, a column a run."""
    lines = ["## Runs", ""]
    for name, runs in groups.items():
        lines += [f"### {name_group(runs)}", ""]
        lines += [f"![Learning curves](figures/{name}.png)" if find_curves(runs) else "No learning curve yet.", ""]
        rows = {}
        for i, run in enumerate(runs):
            result = run.result or {"metrics": {}}
            numbers = {result.get("headline"): 0.0} | result["metrics"]  # the headline first
            numbers |= {key: result.get(key) for key in ("env_steps", "cpu_seconds", "wall_seconds")}
            for key, value in numbers.items():
                rows.setdefault(key, ["-"] * len(runs))[i] = common.show(value)
        rows.pop(None, None)
        lines += [f"| | {' | '.join(map(name_run, runs))} |", "|--|" + "--:|" * len(runs)]
        lines += [f"| {key} | {' | '.join(values)} |" for key, values in rows.items()]
        lines += ["", *(f"- {name_run(run)}: `{run.path}`" for run in runs), ""]
    return "\n".join(lines)
