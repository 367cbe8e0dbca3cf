"""Measure one gradient step of algos/ppo.py on a CPU, by number of rows, as it is and by torch.compile.

    python -m benchmark.studies.ppo_update      # two minutes on one free core

Each case times two forms of the step in turn, in a process of its own with an empty cache. What grows with
the rows is arithmetic; the rest is calls: Python, dispatch and small tensors. torch.compile makes C++ of
`ppo_loss` with its gradient, or of what it can of `update_minibatch`. CPU-seconds are those of one thread,
and for the compilation of the compiler too.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from algos import ppo
from benchmark import common, machines, markdown
from benchmark.code import mark
from benchmark.studies import helpers

# Two forms each, as form and rows: minibatches of CleanRL's settings and of our defaults, and a large one
CASES = {
    "rows": (("eager", 128), ("eager", 8192)),
    "loss, 128": (("eager", 128), ("loss", 128)),
    "update, 128": (("eager", 128), ("update", 128)),
}
TITLES = {"loss": "`ppo_loss` compiled", "update": "`update_minibatch` compiled"}
NUM_CALLS, NUM_REPEATS = 50, 10
EAGER_LOSS = ppo.ppo_loss


def prepare(form: str, num_rows: int):
    """Return a function that takes a gradient step on random rows of CartPole's shapes."""
    args = ppo.Args(ent_coef=0.01, clip_vloss=True, norm_reward=False)
    envs = ppo.make_envs(args, 4)
    agent = ppo.Agent(envs, args.norm_obs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-6, eps=1e-5)
    numbers = {name: torch.randn(num_rows) for name in ("log_probs", "values", "advantages", "returns")}
    actions = torch.as_tensor([envs.single_action_space.sample() for _ in range(num_rows)])[:, None]
    batch = ppo.Batch(obs=torch.randn(num_rows, 4), actions=actions, **numbers)
    loss = torch.compile(EAGER_LOSS) if form == "loss" else EAGER_LOSS
    update = torch.compile(ppo.update_minibatch) if form == "update" else ppo.update_minibatch

    def step():
        ppo.ppo_loss = loss
        update(agent, optimizer, args, batch)

    return step


def measure(case: str) -> dict:
    """Time the two forms of a case in turn."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    steps = [prepare(*form) for form in CASES[case]]
    first = []
    for step in steps:
        start = sum(os.times()[:4])  # CPU-seconds, also of the compilers that it has run
        for _ in range(5):
            step()
        first.append(sum(os.times()[:4]) - start)
    times = [[], []]
    for _ in range(NUM_REPEATS):
        for step, found in zip(steps, times, strict=True):
            start = time.process_time()
            for _ in range(NUM_CALLS):
                step()
            found.append(1e6 * (time.process_time() - start) / NUM_CALLS)
    medians = [statistics.median(found) for found in times]
    return {"case": case, "cpu_us": medians, "first_seconds": first[1]}


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """Make the table of PPO's page."""
    found = {row["case"]: row for row in results["rows"]}
    lines = []
    for case, (_, (form, num_rows)) in CASES.items():
        if form != "eager":
            eager, compiled = found[case]["cpu_us"]
            shown = map(markdown.show, (eager, compiled, eager / compiled, found[case]["first_seconds"]))
            lines.append([mark(f"{TITLES[form]}, {num_rows} rows", results["rows"]), *shown])
    head = "a gradient step | CPU-µs as it is: | compiled: | ratio: | CPU-seconds to compile:"
    (_, few), (_, many) = CASES["rows"]
    time_few, time_many = found["rows"]["cpu_us"]
    arithmetic = few * (time_many - time_few) / (many - few)
    text = (
        f"A step on {few} rows takes {markdown.show(time_few)} CPU-µs, and one on {many:,} rows "
        f"{markdown.show(time_many)}. So about {markdown.show(arithmetic)} of the {markdown.show(time_few)} "
        "grow with the rows, which is the arithmetic; the rest is the cost of calls."
    )
    line = machines.machine_line(results["rows"])
    return {("ppo", "ppo_update"): f"\n{markdown.make_table(head, lines)}\n\n{text}\n\n{line}\n"}


def make_parser():
    """Make the parser of the command line's flags."""
    parser = helpers.start_parser(__doc__)
    parser.add_argument("--one", choices=CASES, help="measure this case alone and print it as JSON")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure all cases, each in a process of its own."""
    args = make_parser().parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
            env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, "-m", "benchmark.studies.ppo_update", "--one", case]
            done = subprocess.run(
                command, cwd=common.ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
            )
        row = json.loads(done.stdout.splitlines()[-1])
        print(row, flush=True)
        helpers.save_rows("ppo_update", [row], ("case",), ("algos/ppo.py",))


if __name__ == "__main__":
    main()
