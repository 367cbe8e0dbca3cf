"""The run without flags of algos/alphazero_go.py, over seeds.

python benchmark/go_default.py                   # five minutes a seed on two cores
python benchmark/go_default.py --report-only     # table and curve in the docs from benchmark/results/go_default.json
"""

import argparse
import json
import tempfile
from pathlib import Path

import common
import go_search
from tqdm import tqdm

FIRST, NUM_SEEDS = 11, 3  # the settings were chosen with other seeds


def measure_run(seed: int) -> dict:
    """What is kept of one run; that of the first seed leaves its picture in docs/figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = common.run_in_folder(folder, "alphazero_go", "--seed", seed)
        result, curve = json.loads((path / "result.json").read_text()), common.read_curve(path, "eval/elo")
        if seed == FIRST:
            draw_board(path / "best.pt", common.FIGURES / "go_board.png")
    row = {"seed": seed, "moves": result["env_steps"], "metrics": result["metrics"]}
    row |= {name: round(result[name], 1) for name in ("wall_seconds", "cpu_seconds")}
    return row | {"curve": [[0, 0, 0.0], *curve]}


def draw_board(checkpoint: Path, path: Path) -> None:
    """A search in the middle of a game of the network against plain MCTS."""
    az, args, network = go_search.load_network(checkpoint)
    _, match = az.evaluate(network, args, az.torch.device("cpu"))
    az.draw_search(network, args, az.torch.device("cpu"), match["games"][0]).savefig(path, dpi=120)


def measure() -> None:
    """Run the seeds one after the other; each is saved as it ends."""
    rows, machine = [], common.describe_machine()
    for seed in tqdm(range(FIRST, FIRST + NUM_SEEDS), unit="run"):
        rows.append(measure_run(seed))
        common.save_results("go_default", {"machine": machine, "rows": rows})


def make_table(results: dict) -> str:
    """Markdown table, a line a seed."""
    lines = [
        "| seed | wins against random moves | wins against plain MCTS | Elo of matches | moves | CPU-s | seconds |"
    ]
    lines.append("|--:|--|--|--|--:|--:|--:|")
    for row in results["rows"]:
        m = row["metrics"]
        elo = " ".join(f"{value:+.0f}" for _, _, value in row["curve"][1:])
        low, high = (m[f"eval/win_rate_{end}_mcts"] for end in ("low", "high"))
        mcts = f"**{m['eval/win_rate_mcts']:.0%}** ({low:.0%} to {high:.0%})"
        lines.append(
            f"| {row['seed']} | {m['eval/win_rate_random']:.0%} | {mcts} | {elo} | {row['moves']:,} | "
            f"{row['cpu_seconds']:.0f} | {row['wall_seconds']:.0f} |"
        )
    return "\n".join(lines)


def summarize(results: dict) -> str:
    """One line for README.md."""
    rates = [row["metrics"]["eval/win_rate_mcts"] for row in results["rows"]]
    minutes = max(row["wall_seconds"] for row in results["rows"]) / 60
    return f"5x5 in {minutes:.1f} minutes on two cores: {min(rates):.0%} to {max(rates):.0%} against plain MCTS"


def draw(results: dict, path: Path) -> None:
    """Elo by CPU-seconds, a line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="moves of self-play", ylabel="Elo, from matches with itself before")
    for row in results["rows"]:
        axes.plot([x[0] for x in row["curve"]], [x[2] for x in row["curve"]], marker="o", label=f"seed {row['seed']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    machine = common.machine_line(results["machine"])
    text = "100 games a match, 48 simulations a move on both sides."
    return {
        "go_default": f"\n{text}\n\n{make_table(results)}\n\nMeasured on {machine}\n",
        "go_default_cell": summarize(results),
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    if not make_parser().parse_args().report_only:
        measure()
    results = common.load_results("go_default")
    draw(results, common.FIGURES / "go_default.png")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    main()
