"""Throughput of each script with one process and with two (gloo) on the two cores of one machine.

    python benchmark/studies/scaling.py    # about six minutes on two free cores

Both do the same work in all, with one thread a process, and take turns. What counts are the iterations after the first
ones: neither imports nor the evaluation at the end, which one process does alone. On the clock, two processes can only
be faster where nobody else wants the second core; therefore the CPU-seconds of the first process stand beside it: they
show how much of the work the second one has taken over, messages included, on a busy machine too.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

NUM_SKIPPED = 2  # iterations: what is done once only, and the opening games of Go, which all end late
CASES = {  # unit and flags; --num-slots 1 keeps Go's search on one core a process
    "ppo": ("environment steps", "--total-timesteps 100000"),
    "reinforce_tsp_attention": ("instances", "--num-epochs 8 --steps-per-epoch 10"),
    "r2d2_lstm": ("environment steps", "--total-timesteps 50000 --learning-starts 1000"),
    "ppo_change_detection": (
        "pairs",
        "--num-train-pairs 512 --eval-episodes 4 --coarse-iterations 0 --refine-iterations 0 --ppo-iterations 7",
    ),
    "alphazero_go": (
        "moves of self-play",
        "--num-games 16 --pool-size 16384 --simulations-start 16 --simulations-end 16 --num-epochs 8 "
        "--eval-interval 1000",
    ),
}


def measure_run(script: str, num_processes: int) -> dict[str, float]:
    """Steps in all, seconds on the clock and CPU-seconds of the first process, after the first iterations."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_processes]
    start = [sys.executable, *(launcher if num_processes > 1 else []), common.ROOT / "algos" / f"{script}.py"]
    with tempfile.TemporaryDirectory() as folder:
        flags = (*CASES[script][1].split(), "--checkpoint-interval", 0, "--eval-episodes", 2)
        path = common.run_command(folder, *start, *flags)
        first, *_, last = common.read_points(path, "charts/cpu_seconds")[NUM_SKIPPED - 1 :]
    steps, cpu_seconds, wall_seconds = (b - a for a, b in zip(first[:3], last[:3], strict=True))
    found = {"script": script, "processes": num_processes, "steps": steps}
    return found | {"wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds}


def summarize(rows: list[dict], script: str) -> dict[str, list[float]]:
    """By kind of seconds: what one process takes for 1000 steps, what two take, and the ratio with its extremes."""
    found = {}
    for kind in ("wall_seconds", "cpu_seconds"):
        sides = [
            [1000 * r[kind] / r["steps"] for r in rows if (r["script"], r["processes"]) == (script, n)] for n in (1, 2)
        ]
        ratios = [a / b for a, b in zip(*sides, strict=True)]
        found[kind] = [*map(statistics.median, (*sides, ratios)), min(ratios), max(ratios)]
    return found


def make_table(rows: list[dict]) -> str:
    """Markdown table, a line a script."""
    lines = []
    for script in dict.fromkeys(row["script"] for row in rows):
        found = summarize(rows, script)
        rates = " and ".join(f"{1000 / s:,.{0 if s < 10 else 1}f}" for s in found["wall_seconds"][:2])
        seconds = " and ".join(f"{x:.3g}" for x in found["cpu_seconds"][:2])
        wall, cpu = (f"**{ratio:.2f}** ({low:.2f} to {high:.2f})" for *_, ratio, low, high in found.values())
        lines.append([f"`{script}`", CASES[script][0], rates, wall, seconds, cpu])
    head = "script | unit | per second, 1 and 2 processes: | ratio: | CPU-s of the first per 1000: | ratio:"
    return common.make_table(head, lines)


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """What the pages show of the results, by page and section."""
    rows = results["rows"]
    scripts = list(dict.fromkeys(row["script"] for row in rows))
    flags = "\n".join(f"- `{script}`: `{CASES[script][1]}`" for script in scripts)
    repeats = len(rows) // (2 * len(scripts))
    note = f"Ratios above 1 speak for two processes. Medians of {repeats} runs; ratios of neighbours, and their range."
    machine = common.machine_line([row["machine"] for row in rows])
    return {("scaling", "scaling"): f"\n{make_table(rows)}\n\n{note} Flags:\n\n{flags}\n\n{machine}\n"}


def make_parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main() -> None:
    """Every script, one process and two in turn, so that both see the machine alike."""
    args = make_parser().parse_args()
    if args.repeats < 1:
        make_parser().error(f"--repeats must be at least 1, not {args.repeats}")
    runs = [(script, n) for _ in range(args.repeats) for script in CASES for n in (1, 2)]
    common.save_rows("scaling", [measure_run(*run) for run in tqdm(runs, unit="run")], ("script",))


if __name__ == "__main__":
    main()
