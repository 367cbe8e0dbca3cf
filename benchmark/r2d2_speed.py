"""Speed of algos/r2d2_lstm.py: its update and the parts of it, and environment steps per second of whole runs.

    python benchmark/r2d2_speed.py                  # two minutes
    python benchmark/r2d2_speed.py --report-only    # table from benchmark/results/r2d2_speed.json

The update is that of 64 windows of 42 steps (burn-in 2, the last 2 for targets only) and 64 hidden units, on CartPole.
The whole run is CartPole-v1 at windows of 2 + 40 steps and 8 updates of 64 windows for every 32 windows collected.
"""

import argparse
import copy
import functools
import statistics
import sys
import time

import common

RUN = "--env-id CartPole-v1 --burn-in 2 --learn-length 40 --n-step 2 --replay-ratio 16 --batch-size 2560"


def measure_update(num_repeats: int = 60) -> dict[str, float]:
    """CPU-seconds of an update and of its parts, one thread, median over `num_repeats`."""
    sys.path.append(str(common.ROOT))
    import torch

    from algos import r2d2_lstm as r2d2

    torch.set_num_threads(1)
    torch.manual_seed(1)
    args = r2d2.Args(env_id="CartPole-v1", burn_in=2, learn_length=38, n_step=2, hidden_size=64, batch_size=64 * 38)
    device = torch.device("cpu")
    envs = r2d2.make_envs(args, args.num_envs, args.seed)
    agent = r2d2.QNetwork(envs, args)
    target = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=True)
    actor, replay = r2d2.Actor(envs, args, device), r2d2.SequenceReplay(envs, args, device)
    act = functools.partial(actor.act, agent, torch.full((args.num_envs,), 0.1))
    extra, _ = r2d2.collect_steps(act, actor, envs, replay, 400)
    reward_stats, rewards = r2d2.RunningMeanStd(), extra[..., r2d2.REWARD]
    reward_stats.update(rewards, rewards != 0)
    seconds = {}

    def timed(name, fn, *inputs):
        start = time.process_time()
        result = fn(*inputs)
        seconds.setdefault(name, []).append(time.process_time() - start)
        return result

    inputs = agent, target, optimizer, replay, reward_stats, r2d2.r2d2_loss, args
    for _ in range(num_repeats):
        timed("update", r2d2.update_network, *inputs)
        index, weights = timed("sample windows", replay.sample, 64)
        windows = timed("read windows", replay.read_windows, index)
        windows["rewards"] = windows["last_reward"] / reward_stats.get_rms()
        count = windows["is_learned"].sum()
        with torch.no_grad():
            timed("target network", r2d2.unroll, target, windows, args)
        loss = timed("loss, target network included", r2d2.r2d2_loss, agent, target, windows, weights, count, args)[0]
        optimizer.zero_grad()
        timed("gradients", loss.backward)
        timed("clipping", torch.nn.utils.clip_grad_norm_, agent.parameters(), args.max_grad_norm)
        timed("Adam", optimizer.step)
    return {name: statistics.median(values[5:]) for name, values in seconds.items()}


def measure_runs(seeds: list[int]) -> list[dict]:
    """Steps and seconds of whole runs, evaluation included."""
    rows = []
    for seed in seeds:
        result = common.run_script("r2d2_lstm", *RUN.split(), "--total-timesteps", 100_000, "--seed", seed)
        rows.append({"steps": result["env_steps"], "cpu_seconds": result["cpu_seconds"]})
    return rows


def make_table(results: dict) -> str:
    """Markdown table of the parts, and a sentence about whole runs."""
    update = results["update"]["update"]
    lines = ["| | CPU-ms | per second |", "|--|--:|--:|"]
    for name, seconds in results["update"].items():
        rate = f"**{1 / seconds:.0f}**" if name == "update" else ""
        lines.append(f"| {name} | {seconds * 1e3:.2f} ({seconds / update:.0%}) | {rate} |")
    rate = statistics.median(row["steps"] / row["cpu_seconds"] for row in results["runs"])
    return (
        "\n".join(lines)
        + f"\n\nWhole runs (`{RUN}`): **{rate:,.0f} environment steps per CPU-second**, evaluation included."
    )


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    return {"r2d2_speed": f"\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    if not make_parser().parse_args().report_only:
        results = {"machine": common.describe_machine(), "update": measure_update(), "runs": measure_runs([1, 2, 3])}
        common.save_results("r2d2_speed", results)
    results = common.load_results("r2d2_speed")
    common.write_report(sections(results), "r2d2_lstm")
    print(make_table(results))


if __name__ == "__main__":
    main()
