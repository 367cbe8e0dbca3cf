"""Measure one gradient step of algos/ppo.py on a CPU, by number of rows, as it is and by torch.compile.

    python benchmark/studies/ppo_update.py      # two minutes on one free core

What grows with the rows is arithmetic; the rest is calls: Python, dispatch and small tensors. torch.compile makes C++
of `ppo_loss` with its gradient, or of what it can of `update_minibatch`. CPU-seconds are those of one thread, and for
the compilation of the compiler too. Each form is timed in a process of its own, with an empty cache.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import common
import helpers
import records
import torch

from algos import ppo

# A minibatch of CleanRL's settings, of our defaults, and a large one for the slope
CASES = {"eager": (128, 512, 8192), "loss": (128, 512), "update": (128,)}
TITLES = {"eager": "as it is", "loss": "`ppo_loss` compiled", "update": "`update_minibatch` compiled"}
NUM_CALLS, NUM_REPEATS = 100, 5


def find_cpu_seconds() -> float:
    """Return the CPU-seconds of this process and of the compilers that it has run."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(form: str, num_rows: int) -> dict:
    """Time a gradient step on random rows of CartPole's shapes."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    args = ppo.Args(ent_coef=0.01, clip_vloss=True, norm_reward=False)
    envs = ppo.make_envs(args, 4)
    agent = ppo.Agent(envs, args.norm_obs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-6, eps=1e-5)
    numbers = {name: torch.randn(num_rows) for name in ("log_probs", "values", "advantages", "returns")}
    actions = torch.as_tensor([envs.single_action_space.sample() for _ in range(num_rows)])[:, None]
    weights = torch.ones(num_rows)
    batch = ppo.Batch(obs=torch.randn(num_rows, 4), actions=actions, weights=weights, **numbers)

    if form == "loss":
        ppo.ppo_loss = torch.compile(ppo.ppo_loss)
    update = torch.compile(ppo.update_minibatch) if form == "update" else ppo.update_minibatch
    start = find_cpu_seconds()
    for _ in range(5):
        update(agent, optimizer, args, *batch)
    first = find_cpu_seconds() - start
    times = []
    for _ in range(NUM_REPEATS):
        start = time.process_time()
        for _ in range(NUM_CALLS):
            update(agent, optimizer, args, *batch)
        times.append((time.process_time() - start) / NUM_CALLS)
    step = statistics.median(times)
    return {"form": form, "num_rows": num_rows, "cpu_us": 1e6 * step, "first_seconds": first - 5 * step}


def make_sections(results: dict | None) -> dict[tuple[str, str], str]:
    """Make the table of PPO's page; what was not measured yet says so."""
    if not results:
        return {("ppo", "ppo_update"): f"\n{records.NOT_RUN}\n"}
    found = {(row["form"], row["num_rows"]): row for row in results["rows"]}
    lines = []
    for form, all_rows in CASES.items():
        for num_rows in all_rows:
            row = found[form, num_rows]
            gain = found["eager", num_rows]["cpu_us"] / row["cpu_us"]
            shown = ["", ""] if form == "eager" else map(common.show, (gain, row["first_seconds"]))
            lines.append([f"{TITLES[form]}, {num_rows:,} rows", common.show(row["cpu_us"]), *shown])
    head = "a gradient step | CPU-µs: | times as fast: | CPU-seconds to compile:"
    few, *_, many = CASES["eager"]
    time_few, time_many = (found["eager", num_rows]["cpu_us"] for num_rows in (few, many))
    arithmetic = few * (time_many - time_few) / (many - few)
    text = (
        f"Of the {common.show(time_few)} CPU-µs on {few} rows, {common.show(arithmetic)} are arithmetic, if that is "
        "what grows with the rows; the rest is calls."
    )
    machines = common.machine_line([row["machine"] for row in results["rows"]])
    return {("ppo", "ppo_update"): f"\n{common.make_table(head, lines)}\n\n{text}\n\n{machines}\n"}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=2, metavar=("FORM", "ROWS"), help="measure this and print it as JSON")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure all forms, each in a process of its own."""
    args = make_parser().parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    for form, num_rows in ((form, num_rows) for form, all_rows in CASES.items() for num_rows in all_rows):
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
            env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, __file__, "--one", form, f"{num_rows}"]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print(row, flush=True)
        helpers.save_rows("ppo_update", [row], ("form", "num_rows"))


if __name__ == "__main__":
    main()
