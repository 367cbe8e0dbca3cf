"""Choices in algos/alphazero_go.py, each trained anew and matched against the default with the same seed, on 5x5.

python benchmark/go_ablations.py --jobs 2         # about half an hour on two cores
python benchmark/go_ablations.py --report-only    # table in the docs from benchmark/results/go_ablations.json
"""

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
from tqdm import tqdm

sys.path.append(str(common.ROOT))
BASE = "--num-epochs 16 --simulations-end 64 --arena-interval 0 --eval-episodes 2"
VARIANTS = {
    "default": "",
    "replay order: loss": "--replay-order loss",
    "replay order: uniform": "--replay-order uniform",
    "no noise": "--noise none",
    "additive noise": "--noise additive",
    "first-play value: zero": "--fpu zero",
    "both pretrainings, 2 epochs each": "--pretrain-value-epochs 2 --pretrain-search-epochs 2",
}
FIRST, NUM_SEEDS = 11, 2  # the settings were chosen with other seeds
NUM_GAMES = 200


def measure_run(variant: str, seed: int, folder: str) -> dict:
    """Train a variant; its weights stay in `folder`."""
    path = common.run_in_folder(
        f"{folder}/{variant}/{seed}", "alphazero_go", *BASE.split(), *VARIANTS[variant].split(), "--seed", seed
    )
    result = json.loads((path / "result.json").read_text())
    row = {"variant": variant, "seed": seed, "commit": result["commit"], "moves": result["env_steps"]}
    return row | {"cpu_seconds": round(result["cpu_seconds"], 1), "checkpoint": str(path / "checkpoint.pt")}


def match(row: dict, base: dict) -> dict:
    """The row's network against that of the default with the same seed, in equal search."""
    import go_search

    from envs_shared.go import Go
    from envs_shared.go_match import play_match

    players = []
    for checkpoint in (row["checkpoint"], base["checkpoint"]):
        az, args, network = go_search.load_network(checkpoint)
        go, plain = Go(az.get_size(args)), az.Args(simulations_end=64, komi=args.komi)
        players.append(az.make_player(go, az.make_evaluators(network, go, NUM_GAMES, plain), plain))
    result = play_match(go, players, NUM_GAMES, args.komi, row["seed"])
    return {"win_rate": round(result["win_rate"], 4), "margin": round(result["margin"], 2)}


def measure(variants: list[str], rows: list[dict], jobs: int) -> None:
    """Train and match `variants`; what is done is saved as it ends."""
    machine = common.describe_machine()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for seed in range(FIRST, FIRST + NUM_SEEDS):
            names = ["default", *(v for v in variants if v != "default")]
            for name in names:
                Path(folder, name, str(seed)).mkdir(parents=True)
            new = list(tqdm(pool.map(lambda v, s=seed: measure_run(v, s, folder), names), total=len(names), unit="run"))
            for row in new:
                row |= match(row, new[0]) if row["variant"] != "default" else {"win_rate": 0.5, "margin": 0.0}
            for row in new:
                del row["checkpoint"]
                rows = [old for old in rows if any(old[k] != row[k] for k in ("variant", "seed"))] + [row]
            common.save_results("go_ablations", {"machine": machine, "rows": rows})


def make_table(results: dict) -> str:
    """Markdown table: each variant against the default, mean and range over seeds."""
    lines = ["| variant | wins against the default | margin | CPU-s | seeds |", "|--|--|--:|--:|--:|"]
    for variant, flags in VARIANTS.items():
        rows = [row for row in results["rows"] if row["variant"] == variant]
        if not rows:
            continue
        rates = ", ".join(f"{row['win_rate']:.0%}" for row in rows)
        mean = {k: statistics.mean(row[k] for row in rows) for k in ("win_rate", "margin", "cpu_seconds")}
        wins = "" if variant == "default" else f"**{mean['win_rate']:.0%}** ({rates})"
        name = f"{variant} (`{flags}`)" if flags else variant
        lines.append(f"| {name} | {wins} | {mean['margin']:+.1f} | {mean['cpu_seconds']:.0f} | {len(rows)} |")
    return "\n".join(lines)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    commits = sorted({row["commit"] for row in results["rows"]})
    machine = common.machine_line(results["machine"] | {"commit": " and ".join(commits)})
    text = f"\n`{BASE}`, {NUM_GAMES} games a match, from random openings with colours exchanged.\n\n"
    return {"go_ablations": f"{text}{make_table(results)}\n\nMeasured on {machine}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        path = common.RESULTS / "go_ablations.json"
        measure(args.variants, common.load_results("go_ablations")["rows"] if path.exists() else [], args.jobs)
    results = common.load_results("go_ablations")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    main()
