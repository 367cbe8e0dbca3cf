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

import math
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

from algos import ppo_change_detection as cd
from benchmark import records
from benchmark.studies import helpers
from envs_shared import change_pairs

SCRIPTS = ("algos/ppo_change_detection.py",)
SEEDS = range(71001, 71011)
SHARE = 0.1  # of changed pixels in haze: a price in reward is 2 x SHARE x --cost
STUDIES = {
    "haze": ("", (0.06,)),
    "five prices": ("", (0.05, 0.07, 0.09, 0.0975, 0.115)),
    "haze-3": ("--env-id haze-3 --num-steps 3", (0.04, 0.06)),
}  # flags, prices of a look, each about 0.92 of that of the widest lead by calculation
# Without PPO, and with as many CPU-seconds as a run with it
DETECTOR = "--ppo-iterations 0 --detector-iterations 54"
RIVALS = ("nowhere", "everywhere", "threshold", "all", "oracle")  # that are measured beside PPO
NUM_HEAD_STEPS = 8000  # gradient steps of a regression, on 1,024 patches each: as many CPU-seconds as PPO
NUM_HEAD_BATCHES = 64  # batches of 64 pairs that a regression learns from
# Levels of the rules that are tuned to earn most
LEVELS = {"threshold": np.linspace(0, 1, 11) ** 3, "all": np.linspace(-0.1, 0.2, 16)}


def run_script(*flags) -> tuple[Path, float]:
    """Run the script; returns its folder and the CPU-seconds of the whole process."""
    start = sum(os.times()[2:4])  # of processes that have ended
    words = " ".join(map(str, flags)).split()
    path = helpers.run_command(tempfile.mkdtemp(), sys.executable, cd.__file__, *words)
    return path, sum(os.times()[2:4]) - start


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


def measure_seed(study: str, seed: int, cost: float) -> dict:
    """Run the script with a seed and a price, and score all methods on its network."""
    path, seconds = run_script(STUDIES[study][0], "--seed", seed, "--cost", round(cost / (2 * SHARE), 6))
    row = {"study": study, "seed": seed, "cost": cost, "seconds": round(seconds, 1)}
    row["best"] = measure_methods(*load_agent(path / "best.pt"), ["ppo", *RIVALS])
    row["last"] = measure_methods(*load_agent(path / "checkpoint.pt"), ["ppo", "oracle"])
    return row


def measure_control(row: dict) -> dict:
    """Train a detector without PPO, and score the rivals on it; returns the row with their scores."""
    flags, cost = STUDIES[row["study"]][0], row["cost"]
    detector, seconds = run_script(flags, DETECTOR, "--seed", row["seed"])
    agent, args = load_agent(detector / "checkpoint.pt")
    args.cost = cost / (2 * SHARE)
    agent.changed_share.fill_(SHARE)
    _, val, _ = cd.load_pairs(args, torch.device("cpu"))
    f1 = cd.evaluate(agent, args, val, None, look_everywhere)["eval/f1"]
    agent.running_f1.fill_(f1)  # F of eq. 2, which PPO measures while it trains
    control = measure_methods(agent, args, RIVALS, row["best"]["val_looks"])
    return row | {"control": control, "detector_seconds": round(seconds, 1)}


def measure(studies: list[str], seeds: list[int], parts: list[str]) -> None:
    """Do the runs of `studies` that have no result yet; save each as it ends."""
    torch.set_num_threads(1)
    keys = ("study", "seed", "cost")
    for part, study, seed in product(parts, studies, seeds):
        for cost in STUDIES[study][1]:
            results = records.load_results("change_detection") or {"rows": []}
            rows = {tuple(row[name] for name in keys): row for row in results["rows"]}
            row = rows.get((study, seed, cost))
            if part == "ppo" and row is None:
                row = measure_seed(study, seed, cost)
            elif part == "control" and row is not None and "control" not in row:
                row = measure_control(row)
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


def make_parser():
    """Make the parser of the command line's flags."""
    parser = helpers.start_parser(__doc__)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=["haze"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--parts", nargs="+", choices=("ppo", "control"), default=["ppo", "control"])
    return parser


if __name__ == "__main__":
    options = make_parser().parse_args()
    measure(options.studies, options.seeds, options.parts)
