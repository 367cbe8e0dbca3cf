"""algos/ppo.py on further tasks, several seeds each: results, table and learning curves.

python benchmark/ppo_control.py                  # about an hour on one core; needs gymnasium[mujoco]
python benchmark/ppo_control.py --report-only    # table and figure from benchmark/results/ppo_control.json
"""

import argparse
import statistics
from pathlib import Path

import common
from tqdm import tqdm

MUJOCO = (
    "--norm-obs --norm-reward --total-timesteps 1000000 --num-envs 8 --num-steps 256 --num-minibatches 32 "
    "--update-epochs 10 --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95 --eval-episodes 20"
)
TASKS = {
    "Acrobot-v1": "--total-timesteps 200000",
    "Pendulum-v1": "--norm-obs --norm-reward --total-timesteps 300000",
    "HalfCheetah-v5": MUJOCO,
    "Hopper-v5": MUJOCO,
}


def measure(seeds: list[int]) -> dict:
    """Run every task on every seed."""
    rows = []
    for seed, env_id in tqdm([(s, e) for s in seeds for e in TASKS], unit="run"):
        result = common.run_script("ppo", "--env-id", env_id, "--seed", seed, *TASKS[env_id].split())
        curve = result["curve"][:: max(1, len(result["curve"]) // 100)]
        row = {"env_id": env_id, "seed": seed, "return": result["metrics"]["eval/episodic_return"], "curve": curve}
        rows.append(row | {"steps": result["env_steps"], "cpu_seconds": result["cpu_seconds"]})
    return {"machine": common.describe_machine(), "rows": rows}


def make_table(results: dict) -> str:
    """Markdown table over the tasks."""
    lines = [
        "| task | steps | CPU-s | return of the final policy, a seed each | mean | flags |",
        "|--|--:|--:|--|--:|--|",
    ]
    for env_id, flags in TASKS.items():
        rows = [r for r in results["rows"] if r["env_id"] == env_id]
        returns = [r["return"] for r in rows]
        seconds = statistics.median(r["cpu_seconds"] for r in rows)
        cells = ", ".join(f"{x:.0f}" for x in returns)
        mean = statistics.mean(returns)
        lines.append(f"| {env_id} | {rows[0]['steps']:,} | {seconds:.0f} | {cells} | **{mean:.0f}** | `{flags}` |")
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    """Learning curves by steps, a panel a task and a line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    for axes, env_id in zip(figure.subplots(2, 2).flat, TASKS, strict=True):
        for row in (r for r in results["rows"] if r["env_id"] == env_id):
            steps, _, returns = zip(*row["curve"], strict=True)
            axes.plot([s / 1000 for s in steps], returns, label=f"seed {row['seed']}")
        axes.set_title(env_id)
        axes.set_xlabel("thousand environment steps")
        axes.set_ylabel("return, last 20 episodes")
        axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    return {"ppo_control": f"\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        common.save_results("ppo_control", measure(args.seeds))
    results = common.load_results("ppo_control")
    draw(results, common.FIGURES / "ppo_control.png")
    common.write_report(sections(results), "ppo")
    print(make_table(results))


if __name__ == "__main__":
    main()
