"""algos/ppo_change_detection.py against simpler ways to decide where to look, on seeds that each have own pairs.

python benchmark/studies/change_detection.py                              # ten seeds, some 20 CPU-minutes
python benchmark/studies/change_detection.py --seeds 201 202 203 204      # those that settings were chosen with
python benchmark/studies/change_detection.py --studies "five prices"

Each seed has one default run of the script, and one of its detector alone. The rivals decide on both networks: on
the one that PPO leaves (best.pt), and on the detector that was trained without PPO. Each rule is tuned on val to look
as often as the policy of best.pt does there, and so is each threshold of the probability of change; scores are of test.

The supervised rivals learn by regression what a look gains (eq. 1): the next look alone, or all looks that are left.
While training, every query can be looked at, so that gains are labels like any others. Their network has the shape of
the policy head and reads what the policy reads. The oracle knows where roofs are, and which dates that were looked at
are hazy. It looks at roofs until it has seen haze.

Criterion, set before the ten seeds were run: best.pt has an F1 of at most 0.03 below the oracle's, which looks as often
or more often, on at least 9 of 10 seeds, and checkpoint.pt on at least 8.
"""

import argparse
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from scipy import stats
from torch import nn

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]
import common

from algos import ppo_change_detection as cd
from envs_shared import change_pairs

PAGE = "ppo_change_detection"
SEEDS = range(211, 221)  # settings were chosen with 201 to 204
STUDIES = {
    "haze": ("", (0.08,)),
    "five prices": ("", (0.04, 0.06, 0.08, 0.1, 0.12)),
}  # flags, prices of a look
METHODS = {
    "ppo": "PPO, best.pt",
    "last": "PPO, last policy",
    "nowhere": "nowhere",
    "everywhere": "everywhere",
    "threshold": "threshold on the coarse map",
    "next": "predicted gain of the next look",
    "all": "predicted gain of all looks",
    "oracle": "oracle",
}
NUM_HEAD_STEPS = 400  # gradient steps of a regression, on 1,024 queries each


def run_script(*flags) -> tuple[Path, float]:
    """Run the script; returns its folder and CPU-seconds."""
    words = " ".join(map(str, flags)).split()
    path = common.run_command(tempfile.mkdtemp(), sys.executable, cd.__file__, *words)
    return path, common.read_points(path, "losses/cross_entropy")[-1][1]


def load_agent(path: Path):
    """Load agent and settings of a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    args = cd.Args(**checkpoint["args"])
    agent = cd.Agent(args)
    agent.load_state_dict(checkpoint["agent"])
    return agent, args


# ---- Rivals ----


def is_first(env) -> bool:
    """Whether nobody has looked yet."""
    return env.obs["step_indices"][0] == 0


def score_change(env):
    """Score queries [B, h, w] by the share of change on the coarse map; whoever looked once looks again."""
    return env.final_logits.sigmoid().mean(1) if is_first(env) else env.is_active.float() * 2


def train_gain_head(agent, args, train_pairs, looks_ahead: bool):
    """Regress the gain of the next look, or of all looks that are left; returns a score of queries and CPU-seconds."""
    start = time.process_time()
    torch.manual_seed(args.seed)
    states, gains = [], []
    with torch.no_grad():
        for _ in range(16):
            images, labels = change_pairs.draw_batch(train_pairs, 64, args)
            _, buffer = cd.play(agent, images, labels, args, lambda env, logits: logits == logits)
            states.append(torch.cat((buffer.data["query"], buffer.data["seen"]), 2).movedim(2, -1))
            rewards = buffer.data["rewards"]  # [T, B, h, w]
            gains.append(rewards.flip(0).cumsum(0).flip(0) if looks_ahead else rewards)
    states, gains = torch.cat(states, 1), torch.cat(gains, 1)  # [T, B, h, w, D + E] and [T, B, h, w]
    states, gains = states.flatten(0, -2), gains.flatten()
    head = nn.Sequential(nn.Linear(states.shape[1], 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(head.parameters(), 3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, NUM_HEAD_STEPS)
    for _ in range(NUM_HEAD_STEPS):
        index = torch.randint(len(states), (1024,))
        loss = (head(states[index]).squeeze(-1) - gains[index]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    def score(env):
        return head(torch.cat((env.obs["query"], env.obs["seen"]), 1).movedim(1, -1)).squeeze(-1)

    return score, time.process_time() - start


class Oracle:
    """Look at roofs, until a date that was looked at has shown haze; for all pairs of a set in their order."""

    def __init__(self, is_roof, is_hazy):
        self.is_roof, self.is_hazy = (
            torch.from_numpy(is_roof),
            torch.from_numpy(is_hazy),
        )  # [M, h, w], [V - 1, ...]
        self.start = self.end = 0

    def __call__(self, env, logits):
        if is_first(env):
            self.start, self.end = self.end % len(self.is_roof), self.end % len(self.is_roof) + len(logits)
        part, step = slice(self.start, self.end), int(env.obs["step_indices"][0])
        return self.is_roof[part] & ~self.is_hazy[:step, part].any(0)


def tune_rule(score, agent, args, pairs, num_looks: float):
    """Find the level of `score(env)` above which `num_looks` of a query are taken on `pairs`; returns the rule."""

    def make_rule(level: float):
        return lambda env, logits: score(env) > level

    low, high = -1.0, 1.5
    for _ in range(14):
        level = (low + high) / 2
        _, looks, _ = cd.classify(agent, args, pairs, make_rule(level))
        low, high = (level, high) if looks.mean() > num_looks else (low, level)
    return make_rule(high)


def measure_methods(agent, args, num_looks: float | None) -> dict[str, float]:
    """Score rules on a network, at `num_looks` of a query on val, or else at the looks of its own policy."""
    train_pairs, val, test = cd.load_pairs(args, torch.device("cpu"))
    truth = {}
    for i, pairs in enumerate((val, test), 1):
        _, is_roof, is_hazy = change_pairs.draw_haze(
            len(pairs), args.image_size, agent.num_dates, args.seed, i
        )
        truth[i] = Oracle(is_roof, is_hazy)
    rules = {
        "nowhere": lambda env, logits: logits != logits,
        "everywhere": lambda env, logits: logits == logits,
    }
    if num_looks is None:
        rules["ppo"], num_looks = None, cd.evaluate(agent, args, val)["eval/looks"]
    metrics, scores = {}, {"threshold": score_change}
    for name in ("next", "all"):
        scores[name], metrics[f"{name}_seconds"] = train_gain_head(agent, args, train_pairs, name == "all")
    rules |= {name: tune_rule(score, agent, args, val, num_looks) for name, score in scores.items()}
    for name in (*rules, "oracle"):
        on_val, on_test = (truth[1], truth[2]) if name == "oracle" else 2 * (rules[name],)
        f1, looks = score_rule(agent, args, val, test, on_val, on_test)
        metrics |= {f"{name}_f1": f1, f"{name}_looks": looks}
    return {name: round(value, 4) for name, value in metrics.items()}


def score_rule(agent, args, val, test, on_val=None, on_test=None) -> tuple[float, float]:
    """Score a rule, or else the policy, on test with the threshold of val; returns F1 and looks of a query."""
    threshold = cd.evaluate(agent, args, val, None, on_val)["eval/threshold"]
    found = cd.evaluate(agent, args, test, threshold, on_test)
    return found["eval/f1"], found["eval/looks"]


# ---- Runs ----


def measure(studies: list[str], seeds: list[int]) -> None:
    """Do the runs of `studies`; each is saved as it ends, in place of the same run of earlier times."""
    torch.set_num_threads(1)
    for study, seed in product(studies, seeds):
        flags, prices = STUDIES[study]
        detector, detector_seconds = run_script(flags, "--ppo-iterations 0 --seed", seed)
        for cost in prices:
            path, seconds = run_script(flags, "--seed", seed, "--cost", cost)
            agent, args = load_agent(path / "best.pt")
            metrics = measure_methods(agent, args, None)
            _, val, test = cd.load_pairs(args, torch.device("cpu"))
            last = score_rule(load_agent(path / "checkpoint.pt")[0], args, val, test)
            metrics |= {"last_f1": round(last[0], 4), "last_looks": round(last[1], 4)}
            control = load_agent(detector / "checkpoint.pt")[0]
            row = {"study": study, "seed": seed, "cost": cost, "metrics": metrics}
            row["control"] = measure_methods(control, args, metrics["ppo_looks"])
            row |= {"seconds": round(seconds, 1), "detector_seconds": round(detector_seconds, 1)}
            common.save_rows("change_detection", [row], ("study", "seed", "cost"))
            print(row, flush=True)


# ---- Report ----


def get_studies(results: dict) -> dict[str, list[dict]]:
    """Return the runs of each study that has some, by its name."""
    rows = {study: [row for row in results["rows"] if row["study"] == study] for study in STUDIES}
    return {study: found for study, found in rows.items() if found}


def compare(rows: list[dict], method: str, group: str = "metrics") -> tuple[float, float, int]:
    """Return the mean lead of PPO's F1 over `method`, half of its 95 % interval (Student's t), and PPO's wins."""
    leads = [row["metrics"]["ppo_f1"] - row[group][f"{method}_f1"] for row in rows]
    interval = stats.t.ppf(0.975, len(leads) - 1) * stats.sem(leads)
    return statistics.mean(leads), interval, sum(lead > 0 for lead in leads)


def get_mean(rows: list[dict], metric: str, group: str = "metrics") -> float:
    """Return the mean of a metric over runs."""
    return statistics.mean(row[group][metric] for row in rows)


def make_tables(results: dict) -> str:
    """Make Markdown tables: means and PPO's lead over each method, on both networks, for each study and price."""
    lines = []
    for study, runs in get_studies(results).items():
        for cost in sorted({row["cost"] for row in runs}):
            rows, table = [row for row in runs if row["cost"] == cost], []
            for method, title in METHODS.items():
                cells = [title]
                for group in ("metrics", "control"):
                    if f"{method}_f1" in rows[0][group]:
                        cells += [f"{get_mean(rows, f'{method}_{x}', group):.3f}" for x in ("f1", "looks")]
                    else:
                        cells += ["", ""]
                if method not in ("ppo", "last"):
                    lead, interval, wins = compare(rows, method)
                    cells.append(f"{lead:+.3f} ± {interval:.3f} ({wins} of {len(rows)})")
                table.append(cells)
            head = "method | F1: | looks: | F1 without PPO: | looks: | PPO's F1 is higher by:"
            title = f"**{study}**, a look costs {cost}, mean of {len(rows)} seeds"
            lines += [
                title,
                "",
                common.make_table(head, [[*row, *[""] * (6 - len(row))] for row in table]),
                "",
            ]
    return "\n".join(lines)


def list_lines(results: dict) -> list[list]:
    """List the lines of the short table of the script in docs/results.md."""
    lines = []
    for study, rows in get_studies(results).items():
        if study == "haze":
            lead, interval, _ = compare(rows, "threshold")
            metric = f"F1 at {get_mean(rows, 'ppo_looks'):.2f} looks a query (lead over a tuned threshold)"
            value = f"{get_mean(rows, 'ppo_f1'):.3f} ({lead:+.3f} ± {interval:.3f})"
            seconds = statistics.median(row["seconds"] for row in rows)
            lines.append([study, metric, value, common.show(seconds), len(rows)])
    return lines


def draw(results: dict, path: Path) -> None:
    """Draw F1 by looks per query: a point for each run, and for each method a line over the prices."""
    from matplotlib.figure import Figure

    studies = get_studies(results)
    figure = Figure(figsize=(5 * max(len(studies), 1), 4.5), layout="constrained")
    for place, (study, rows) in enumerate(studies.items(), 1):
        axes = figure.add_subplot(1, len(studies), place)
        for i, (method, title) in enumerate(METHODS.items()):
            points = sorted(
                (row["metrics"][f"{method}_looks"], row["metrics"][f"{method}_f1"]) for row in rows
            )
            axes.plot(*zip(*points, strict=True), "*" if method == "ppo" else ".", color=f"C{i}", label=title)
        axes.set(title=study, xlabel="looks per query", ylabel="F1 of changed pixels")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """Make what the pages show of the results, by page and section."""
    machine = common.machine_line([row["machine"] for row in results["rows"]])
    summary = ""
    for rows in list(get_studies(results).values())[:1]:
        lead, interval, _ = compare(rows, "threshold")
        summary = (
            f"F1 with PPO's looks over a tuned threshold with as many: {lead:+.3f} ± {interval:.3f} on haze"
        )
    page = f"\n{make_tables(results)}\n{machine}\n"
    return {(PAGE, "change_detection"): page, ("README", "change_detection_cell"): summary}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    measure(options.studies, options.seeds)
