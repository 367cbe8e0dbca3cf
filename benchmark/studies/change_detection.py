"""Compare algos/ppo_change_detection.py with simpler ways to decide where to look; each seed has pairs of its
own.

    python -m benchmark.studies.change_detection --seeds 71001 71002         # a seed takes two CPU-minutes
    python -m benchmark.studies.change_detection --studies haze-3 --seeds 9724 9725 9726

Runs that are in the results already are left out. Each seed has one run of the script and, with the part
`control`, one of a detector without PPO that takes about as many CPU-seconds. The rivals are scored on PPO's
network, and on the detector's. Thresholds of the probability of change are tuned on val. Scores are those of
test.

    nowhere, everywhere   no patch looks, or all look to the end
    threshold             a patch looks to the end if its coarse map has more change than a level
    all                   a patch looks if the predicted gain of all looks that are left is above a level
    oracle                a patch looks if it is a roof, until it has seen haze

Each level is tuned on val in two ways: to look as often as the policy of best.pt does there, and to have the
largest F1 less price (`own`). The predicted gain is a regression. During training, every patch can be looked
at, so that gains can serve as labels. Its network has the shape of the policy head and reads what the policy
reads, and its training takes about as many CPU-seconds as PPO. The oracle knows where roofs and haze are. If
PPO looks less often than the oracle would, the oracle leaves out roofs at random so as to look as often.

Criterion, set before the first runs and kept, for best.pt and for the last policy: the F1 is at most 0.03
below that of the oracle on the same network on at least 95 % of the seeds, the mean F1 is at most 0.003 below
that of looking everywhere, and each run takes at most 60 CPU-seconds in all. Settings were chosen with the
seeds 201 to 204, 26002, 26005 and 26008.

The price. `calculate_lead` gives the lead of the best policy over two simple ones, nowhere and all looks on
all roofs, in mean return with an ideal detector. It is positive for prices between 0 and 0.13, and widest at
0.0975, where the two are equal. But return is not F1 less price: by that, looking costs as much as it gains
at prices of 0.068 to 0.095, by seed. The default of 0.06 is below all of these.
"""

import argparse
import math
import resource
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import nn

from algos import ppo_change_detection as cd
from benchmark import common, machines, markdown, records
from benchmark.code import mark
from benchmark.studies import helpers
from envs_shared import change_pairs

PAGE = "ppo_change_detection"
SCRIPTS = ("algos/ppo_change_detection.py",)
SEEDS = range(71001, 71011)
CHECKPOINT = common.BENCHMARK / "checkpoints" / "haze.pt"  # of haze, for pictures
SHARE = 0.1  # of changed pixels in haze: a price in reward is 2 x SHARE x --cost
STUDIES = {
    "haze": ("", (0.06,)),
    "five prices": ("", (0.05, 0.07, 0.09, 0.0975, 0.115)),
    "haze-3": ("--env-id haze-3 --num-steps 3", (0.04, 0.06)),
}  # flags, prices of a look, each about 0.92 of that of the widest lead by calculation
# Without PPO, and with as many CPU-seconds as a run with it
DETECTOR = "--ppo-iterations 0 --detector-iterations 54"
METHODS = {
    "ppo": "PPO, best.pt",
    "last": "PPO, last policy",
    "nowhere": "nowhere",
    "everywhere": "everywhere",
    "threshold": "threshold on the coarse map",
    "all": "predicted gain of all looks",
    "oracle": "oracle",
}
RIVALS = ("nowhere", "everywhere", "threshold", "all", "oracle")  # that are measured beside PPO
EARNERS = {
    "ppo": "PPO, best.pt",
    "last": "PPO, last policy",
    "nowhere": "nowhere",
    "everywhere": "everywhere",
    "threshold_own": "threshold on the coarse map",
    "all_own": "predicted gain of all looks (look-ahead)",
}
MARGIN, MOST_SECONDS = 0.03, 60  # of the criterion
NUM_HEAD_STEPS = 8000  # gradient steps of a regression, on 1,024 patches each: as many CPU-seconds as PPO
NUM_HEAD_BATCHES = 64  # batches of 64 pairs that a regression learns from
# Levels of the rules that are tuned to earn most
LEVELS = {"threshold": np.linspace(0, 1, 11) ** 3, "all": np.linspace(-0.1, 0.2, 16)}


def run_script(*flags) -> tuple[Path, float]:
    """Run the script; returns its folder and the CPU-seconds of the whole process."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = " ".join(map(str, flags)).split()
    path = helpers.run_command(tempfile.mkdtemp(), sys.executable, cd.__file__, *words)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return path, end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def load_agent(path: Path):
    """Load agent and settings of a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    args = cd.Args(**checkpoint["args"])
    agent = cd.Agent(args)
    agent.load_state_dict(checkpoint["agent"])
    return agent, args


# ---- Rivals ----


def look_nowhere(row):
    """Rule: no patch looks."""
    return torch.zeros_like(row["is_active"])


def look_everywhere(row):
    """Rule: all patches look."""
    return torch.ones_like(row["is_active"])


def is_first(row) -> bool:
    """Tell whether no patch has looked yet."""
    return row["step_indices"][0] == 0


def score_change(row):
    """Score patches [B, h, w] by the share of change on the coarse map; those that looked once look again."""
    return row["cell_logits"].sigmoid().mean(1) if is_first(row) else row["is_active"].float() * 2


def train_gain_head(agent, args, train_pairs):
    """Regress the gain of all looks that are left; returns a score of patches and CPU-seconds."""
    start = time.process_time()
    torch.manual_seed(args.seed)
    states, gains = [], []
    with torch.no_grad():
        for _ in range(NUM_HEAD_BATCHES):
            images, labels = change_pairs.draw_batch(train_pairs, 64, args)
            rollout, _ = cd.play(agent, images, labels, args, rule=look_everywhere)
            states.append(torch.cat((rollout["embedding"], rollout["seen"]), 2).movedim(2, -1))
            gains.append(rollout["rewards"].flip(0).cumsum(0).flip(0))  # [T, B, h, w]
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

    def score(row):
        return head(torch.cat((row["embedding"], row["seen"]), 1).movedim(1, -1)).squeeze(-1)

    return score, time.process_time() - start


class Oracle:
    """Look at roofs, until a date that was looked at has shown haze; call it with all pairs of a set in
    order.

    Roofs are left out at random, so that there are at most `num_looks` looks per patch.
    """

    def __init__(self, is_roof, is_hazy, num_looks: float = float("inf")):
        self.is_roof = torch.from_numpy(is_roof)  # [M, h, w]
        self.is_hazy = torch.from_numpy(is_hazy)  # [V - 1, M, h, w]
        seen_clear = (~self.is_hazy).int().cumprod(0).sum(0)  # looks after the first one
        all_looks = (self.is_roof * (1 + seen_clear)).float().mean()
        generator = torch.Generator().manual_seed(0)
        self.is_roof &= torch.rand(self.is_roof.shape, generator=generator) < num_looks / all_looks
        self.start = self.end = 0

    def __call__(self, row):
        if is_first(row):
            self.start = self.end % len(self.is_roof)
            self.end = self.start + len(row["is_active"])
        part, step = slice(self.start, self.end), int(row["step_indices"][0])
        return self.is_roof[part] & ~self.is_hazy[:step, part].any(0)


def make_rule(score, level: float):
    """Make the rule that a patch looks if `score(row)` is above a level."""
    return lambda row: score(row) > level


def tune_rule(score, agent, args, pairs, num_looks: float):
    """Find the level of `score(row)` above which patches look `num_looks` times on `pairs`; returns the
    rule."""

    low, high = -1.0, 1.5
    for _ in range(14):
        level = (low + high) / 2
        _, looks, _ = cd.predict(agent, args, pairs, make_rule(score, level))
        low, high = (level, high) if looks.mean() > num_looks else (low, level)
    return make_rule(score, high)


def find_best_rule(score, levels, agent, args, pairs):
    """Find the level of `score(row)` with the largest F1 less price on `pairs`; returns the rule."""
    nets = [cd.evaluate(agent, args, pairs, None, make_rule(score, x))["eval/f1_less_price"] for x in levels]
    return make_rule(score, levels[int(np.argmax(nets))])


def score_rule(agent, args, val, test, on_val=None, on_test=None) -> dict[str, float]:
    """Score a rule, or else the policy, on test with the threshold of val."""
    threshold = cd.evaluate(agent, args, val, None, on_val)["eval/threshold"]
    found = cd.evaluate(agent, args, test, threshold, on_test)
    return {"f1": found["eval/f1"], "looks": found["eval/looks"], "return": found["eval/episodic_return"]}


def draw_truth(args, val, test, num_looks: float) -> tuple[Oracle, Oracle]:
    """Return the oracles of val and test, drawing their roofs and haze again."""
    sizes, oracles = (args.image_size, change_pairs.ENV_IDS[args.env_id]), []
    for i, pairs in enumerate((val, test), 1):
        _, *truth = change_pairs.draw_haze(len(pairs), *sizes, args.seed, i)
        oracles.append(Oracle(*truth, num_looks))
    return tuple(oracles)


def measure_methods(agent, args, names, num_looks: float | None = None) -> dict[str, float]:
    """Score methods on a network, at `num_looks` looks per patch on val, or else at those of its own
    policy."""
    train_pairs, val, test = cd.load_pairs(args, torch.device("cpu"))
    if num_looks is None:
        num_looks = cd.evaluate(agent, args, val)["eval/looks"]
    rules = {"nowhere": look_nowhere, "everywhere": look_everywhere}
    metrics = {"val_looks": num_looks}
    for name in names:
        rule = rules.get(name)
        if name in ("threshold", "all"):
            score, metrics[f"{name}_seconds"] = score_change, 0.0
            if name == "all":
                score, metrics[f"{name}_seconds"] = train_gain_head(agent, args, train_pairs)
            rule = tune_rule(score, agent, args, val, num_looks)
            earning = find_best_rule(score, LEVELS[name], agent, args, val)
            scores = score_rule(agent, args, val, test, earning, earning)
            metrics |= {f"{name}_own_{key}": value for key, value in scores.items()}
        pair = draw_truth(args, val, test, num_looks) if name == "oracle" else (rule, rule)
        scores = score_rule(agent, args, val, test, *pair)
        metrics |= {f"{name}_{key}": value for key, value in scores.items()}
    return {name: round(value, 4) for name, value in metrics.items()}


# ---- Runs ----


def measure_seed(study: str, seed: int, cost: float, more: str) -> dict:
    """Run the script with a seed and a price, and score all methods on its network."""
    path, seconds = run_script(
        STUDIES[study][0], more, "--seed", seed, "--cost", round(cost / (2 * SHARE), 6)
    )
    row = {"study": study, "seed": seed, "cost": cost, "seconds": round(seconds, 1)}
    row["best"] = measure_methods(*load_agent(path / "best.pt"), ["ppo", *RIVALS])
    row["last"] = measure_methods(*load_agent(path / "checkpoint.pt"), ["ppo", "oracle"])
    return row


def measure_control(row: dict, more: str) -> dict:
    """Train a detector without PPO, and score the rivals on it; returns the row with their scores."""
    flags, cost = STUDIES[row["study"]][0], row["cost"]
    detector, seconds = run_script(flags, DETECTOR, more, "--seed", row["seed"])
    agent, args = load_agent(detector / "checkpoint.pt")
    args.cost = cost / (2 * SHARE)
    agent.changed_share.fill_(SHARE)
    _, val, _ = cd.load_pairs(args, torch.device("cpu"))
    f1 = cd.evaluate(agent, args, val, None, look_everywhere)["eval/f1"]
    agent.running_f1.fill_(f1)  # F of eq. 2, which PPO measures while it trains
    control = measure_methods(agent, args, RIVALS, row["best"]["val_looks"])
    return row | {"control": control, "detector_seconds": round(seconds, 1)}


def measure(studies: list[str], seeds: list[int], more: str, parts: list[str]) -> None:
    """Do the runs of `studies` that have no result yet; save each as it ends."""
    torch.set_num_threads(1)
    keys = ("study", "seed", "cost")
    for part, study, seed in product(parts, studies, seeds):
        for cost in STUDIES[study][1]:
            results = records.load_results("change_detection") or {"rows": []}
            rows = {tuple(row[name] for name in keys): row for row in results["rows"]}
            row = rows.get((study, seed, cost))
            if part == "ppo" and row is None:
                row = measure_seed(study, seed, cost, more)
            elif part == "control" and row is not None and "control" not in row:
                row = measure_control(row, more)
            else:
                continue
            helpers.save_rows("change_detection", [row], keys, SCRIPTS)
            print(row, flush=True)


# ---- By calculation ----


def calculate_returns(cost: float, num_dates: int = 2, beta: float = cd.Args.beta) -> dict[str, float]:
    """Calculate mean returns of a patch with an ideal detector, which sees roofs on the coarse map.

    "best" looks at roofs until it sees haze, or nowhere; "all" takes all looks on all roofs. F is the F1 of
    "best".
    """
    roofs, changed = 0.4, 0.25  # shares of patches, and of roofs
    clear = 0.5  # share of the roofs that have no haze
    known = roofs * changed * clear  # changes that are seen
    quiet = 2 * known / (known + roofs * changed)  # F1 if nothing else is called a change
    loud = 2 * roofs * changed / (known + roofs * (1 - clear) + roofs * changed)  # F1 if hazy roofs are, too
    f1 = max(quiet, loud)
    entropy = -changed * math.log(changed) - (1 - changed) * math.log(1 - changed)
    before = (changed > f1 / 2) * (2 * changed - f1) - beta * entropy  # worth of a roof, eq. 2
    gain, looks = (
        clear * (changed * (2 - f1) - before),
        sum(clear ** (k / (num_dates - 1)) for k in range(num_dates)),
    )
    return {
        "best": max(0.0, roofs * (gain - looks * cost)),
        "all": roofs * (gain - num_dates * cost),
        "f1": f1,
    }


def calculate_lead(cost: float, num_dates: int = 2) -> float:
    """Calculate the lead in mean return of the best policy over the better of nowhere and all looks on all
    roofs."""
    returns = calculate_returns(cost, num_dates)
    return returns["best"] - max(0.0, returns["all"])


# ---- Report ----


def get_studies(results: dict | None) -> dict[str, list[dict]]:
    """Return the runs of each study that has some, by its name."""
    all_rows = results["rows"] if results else []
    rows = {study: [row for row in all_rows if row["study"] == study] for study in STUDIES}
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


def compare(
    rows: list[dict], method: str, group: str = "best", metric: str = "f1"
) -> tuple[float, float, int]:
    """Return PPO's mean lead over `method`, half of its 95 % interval (Student's t), and PPO's wins."""
    leads = [get_value(row, "ppo", metric) - get_value(row, method, metric, group) for row in rows]
    interval = stats.t.ppf(0.975, len(leads) - 1) * stats.sem(leads) if len(leads) > 1 else math.nan
    return statistics.mean(leads), interval, sum(lead > 0 for lead in leads)


def show_lead(rows: list[dict], method: str, group: str, metric: str = "f1", least_decimals: int = 3) -> str:
    """Write a lead, its interval and the number of wins."""
    lead, interval, wins = compare(rows, method, group, metric)
    lead = round(lead, least_decimals) + 0.0  # -0.0 becomes 0.0
    num_decimals = 1 - math.floor(math.log10(interval)) if interval > 1e-9 else 0  # two significant digits
    return f"{lead:+.{least_decimals}f} ± {interval:.{num_decimals}f} ({wins} of {len(rows)})"


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


def get_mean(rows: list[dict], metric: str, group: str = "best") -> float:
    """Return the mean of a metric over runs."""
    return statistics.mean(row[group][metric] for row in rows)


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
        group, name = ("last", "ppo") if method == "last" else ("best", method)
        line = [title, *(f"{get_mean(rows, f'{name}_{key}', group):.3f}" for key in ("f1", "looks"))]
        line += [count_seconds(rows, name, group)]
        line.append("" if name == "ppo" else show_lead(rows, method, "best"))
        if has_control and name == "ppo":
            line += [""] * 4
        elif has_control:
            line += [f"{get_mean(rows, f'{method}_{key}', 'control'):.3f}" for key in ("f1", "looks")]
            line += [count_seconds(rows, method, "control"), show_lead(rows, method, "control")]
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
        values = [
            statistics.mean(get_value(row, method, key) for row in rows)
            for key in ("f1", "looks", "net", "return")
        ]
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


def make_price_table(results: dict | None) -> str:
    """Make the table of the five prices: the lead of the best policy by calculation, and what rules earn."""
    rows, lines = get_studies(results).get("five prices", []), []
    for cost in STUDIES["five prices"][1]:
        found = [row for row in rows if row["cost"] == cost]
        line = [f"{cost / (2 * SHARE):.4g}", cost, f"{calculate_lead(cost):.4f}"]
        if found:
            line += [f"{get_mean(found, 'ppo_f1'):.3f}", f"{get_mean(found, 'ppo_looks'):.2f}"]
            for method in ("ppo", "nowhere", "threshold_own", "all_own"):
                line.append(f"{statistics.mean(get_value(row, method, 'net') for row in found):.3f}")
        line[0] = mark(line[0], found)
        lines.append([*line, len(found)] if found else [*line, *[""] * 6, "not run yet"])
    head = (
        "`--cost` | price: | lead by calculation: | F1 of PPO: | looks: | F1 less price of PPO: | nowhere: | "
    )
    head += "threshold: | look-ahead: | seeds:"
    return markdown.make_table(head, lines)


def draw_dots(axes, rows: list[dict], methods: dict[str, str], metric: str) -> None:
    """Draw a line of points for each method: a small one for each seed, and a diamond for the mean."""
    ticks = []
    for y, (method, title) in enumerate(methods.items()):
        values = [get_value(row, method, metric) for row in rows]
        color = "#0072B2" if method in ("ppo", "last") else "0.25"
        axes.plot(values, [y] * len(values), "o", color=color, ms=6, alpha=0.3, mew=0)
        axes.plot(statistics.mean(values), y, "D", color=color, ms=11, mfc="none", mew=2)
        looks = statistics.mean(get_value(row, method, "looks") for row in rows)
        ticks.append(f"{title}, {looks:.2f} looks")
    axes.set_yticks(range(len(ticks)), ticks)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(results: dict | None, path: Path) -> None:
    """Draw the F1 of all rules at equal looks, and F1 less price of rules that are tuned to earn most, of
    `haze`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = get_studies(results).get("haze")
    if not rows:
        return
    methods = {
        name: METHODS[name] for name in ("ppo", "last", "oracle", "all", "everywhere", "threshold", "nowhere")
    }
    earners = {
        name: EARNERS[name] for name in ("all_own", "ppo", "last", "threshold_own", "nowhere", "everywhere")
    }
    methods["all"] = earners["all_own"] = "supervised look-ahead"
    with rc_context({"font.size": 14}):
        figure = Figure(figsize=(9, 7.2), layout="constrained")
        for axes, names, metric, title in zip(
            figure.subplots(2, 1),
            (methods, earners),
            ("f1", "net"),
            (
                "F1, where threshold, oracle and look-ahead look as often as PPO",
                "F1 less the price of the looks, rules tuned to earn most",
            ),
            strict=True,
        ):
            draw_dots(axes, rows, names, metric)
            axes.set_title(title, fontsize="medium", loc="right")
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


def make_sections(results: dict | None) -> dict[tuple[str, str], str]:
    """Make what the pages show of the results, by page and section; what was not measured yet says so."""
    page, summary, rows = "Not run yet.", "not run yet", get_studies(results).get("haze")
    if rows:
        looks = get_mean(rows, "ppo_looks") / get_mean(rows, "everywhere_looks")
        summary = f"F1 {get_mean(rows, 'ppo_f1'):.2f} with {looks:.0%} of the looks".replace("%", " %")
        summary += f", and {get_mean(rows, 'everywhere_f1'):.2f} with all ({len(rows)} runs)"
    if results:
        tables = make_tables({"rows": [row for row in results["rows"] if row["study"] != "five prices"]})
        page = f"{tables}\n\n{machines.machine_line(results['rows'])}"
    return {
        (PAGE, "change_detection"): f"\n{page}\n",
        (PAGE, "change_prices"): f"\n{make_price_table(results)}\n",
        ("results", "change_detection_cell"): summary,
    }


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=["haze"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--parts", nargs="+", choices=("ppo", "control"), default=["ppo", "control"])
    parser.add_argument("--flags", default="", help="more flags of all runs")
    parser.add_argument(
        "--results", type=Path, default=common.RESULTS, help="folder of change_detection.json"
    )
    return parser


if __name__ == "__main__":
    parser = make_parser()
    options = parser.parse_args()
    if options.flags and options.results == common.RESULTS:
        parser.error("--flags needs --results: published rows are those of the flags of STUDIES")
    common.RESULTS = options.results
    measure(options.studies, options.seeds, options.flags, options.parts)
