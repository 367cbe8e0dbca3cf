"""Speed of the scripts and of their parts, beside others where there are any.

    python benchmark/speed.py                 # all cases, a quarter of an hour on two cores
    python benchmark/speed.py r2d2 change     # some of them; the results of the others are kept
    python benchmark/speed.py go --cuda       # on a GPU, where the script has one
    python benchmark/report.py                # the tables in the docs, from benchmark/results/speed.json

CPU-seconds of one thread, on a GPU seconds on the clock; medians over the repeats.
"""

import argparse
import copy
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import common
from common import show

sys.path += [str(common.ROOT), str(common.PEERS)]
PRECISIONS = {"MKL": "highest", "oneDNN": "medium"}  # what torch computes float32 products with on the CPU
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**60), "MALLOC_MMAP_MAX_": "0"}  # as the script has glibc do
R2D2_RUN = "--env-id CartPole-v1 --burn-in 2 --learn-length 40 --n-step 2 --replay-ratio 16 --batch-size 2560"
SHARE = 0.4  # of the queries that look
GO_NETWORKS = {"go5x5": "5x5", "go7x7": "7x7"}  # of benchmark/checkpoints


def make_clock(cuda: bool) -> Callable[[], float]:
    """CPU-seconds of this process; on a GPU, seconds on the clock when it is done."""

    def wait_and_read() -> float:
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    return wait_and_read if cuda else time.process_time


def time_calls(functions: dict[str, Callable], num_repeats: int, clock, num_warmup: int = 2) -> list[dict]:
    """Rows of the median milliseconds of a call of each function."""
    rows = []
    for name, function in functions.items():
        times = []
        for _ in range(num_warmup + num_repeats):
            start = clock()
            function()
            times.append(clock() - start)
        rows.append({"what": name, "column": "ms", "value": 1e3 * statistics.median(times[num_warmup:])})
    return rows


def measure_change(num_repeats: int, cuda: bool) -> list[dict]:
    """The parts of a classification, and the updates, on synthetic pairs of 64 queries."""
    import torch

    from algos import ppo_change_detection as cd

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(1)
    device = torch.device("cuda" if cuda else "cpu")
    args = cd.Args(num_train_pairs=128, eval_episodes=1)
    train = cd.change_data.load_pairs(args, cd.fail)["train"]
    agent = cd.Agent(args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-9, device=device), fused=True)
    batch = cd.change_data.draw_batch(train, args, device, args.num_envs)
    rollout, _ = cd.collect_rollout(agent, *batch, args)
    images, labels = (x[:32] for x in batch)
    query = agent.encode(images).detach()
    step = torch.zeros(32, dtype=torch.long, device=device)
    chosen = torch.randperm(query[..., 0].numel(), device=device)
    some = chosen[: int(SHARE * len(chosen))].sort().values
    rows = torch.arange(args.num_envs // args.num_minibatches, device=device)

    def update_detector(num_steps: int) -> None:
        cd.update_detector(agent, optimizer, num_steps, args, images[:16], labels[:16])

    parts = {
        "coarse pictures, backbone, class head": lambda: agent.classify(agent.encode(images)),
        "stop and value heads": lambda: agent.decide(query, step),
        "a look everywhere, of whole pictures": lambda: agent.look(images, query, step),
        f"a look at {SHARE:.0%} of the queries, window by window": lambda: agent.look(images, query, step, some),
        "drawing a batch, with crops and jitter": lambda: cd.change_data.draw_batch(train, args, device, 32),
    }
    updates = {
        "update of the coarse stage, 16 pairs": lambda: update_detector(0),
        "update of the refiner, 16 pairs": lambda: update_detector(1),
        "rollout, 128 pairs": lambda: cd.collect_rollout(agent, *batch, args),
        "update of PPO, 32 pairs": lambda: cd.update_minibatch(agent, optimizer, rollout, args, rows),
    }
    with torch.no_grad():
        found = time_calls(parts, 3 * num_repeats, make_clock(cuda))
    return found + time_calls(updates, 3 * num_repeats, make_clock(cuda))


def measure_r2d2(num_repeats: int, cuda: bool) -> list[dict]:
    """The update of 64 windows of 42 steps of CartPole and its parts, and whole runs with their evaluation."""
    import torch

    from algos import r2d2_lstm as r2d2

    torch.set_num_threads(1)
    torch.manual_seed(1)
    args = r2d2.Args(env_id="CartPole-v1", burn_in=2, learn_length=38, n_step=2, hidden_size=64, batch_size=64 * 38)
    device = torch.device("cuda" if cuda else "cpu")
    envs = r2d2.make_envs(args, args.num_envs, args.seed)
    agent = r2d2.QNetwork(envs, args).to(device)
    target = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, fused=True)
    actor, replay = r2d2.Actor(envs, args, device), r2d2.SequenceReplay(envs, args, device)
    act = functools.partial(actor.act, agent, torch.full((args.num_envs,), 0.1, device=device))
    extra, _ = r2d2.collect_steps(act, actor, envs, replay, 400)
    reward_stats, rewards = r2d2.RunningMeanStd(), extra[..., r2d2.REWARD]
    reward_stats.update(rewards, rewards != 0)
    index, weights = replay.sample(64)
    windows = replay.read_windows(index)
    windows["rewards"] = windows["last_reward"] / reward_stats.get_rms()
    count = windows["is_learned"].sum()

    def unroll_target() -> None:
        with torch.no_grad():
            r2d2.unroll(target, windows, args)

    def compute_loss():
        return r2d2.r2d2_loss(agent, target, windows, weights, count, args)[0]

    @functools.cache
    def get_loss():  # after the updates, which change the weights in place
        return compute_loss()

    update = functools.partial(
        r2d2.update_network, agent, target, optimizer, replay, reward_stats, r2d2.r2d2_loss, args
    )
    parts = {
        "update": update,
        "sample windows": lambda: replay.sample(64),
        "read windows": lambda: replay.read_windows(index),
        "target network": unroll_target,
        "loss, target network included": compute_loss,
        "gradients": lambda: get_loss().backward(retain_graph=True),
        "clipping": lambda: torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm),
        "Adam": optimizer.step,
    }
    rows = time_calls(parts, 10 * num_repeats, make_clock(cuda))
    times = []
    for seed in range(1, 4):
        with tempfile.TemporaryDirectory() as folder:
            flags = f"{R2D2_RUN} --total-timesteps 100000 --seed {seed}".split()
            path = common.run_command(folder, sys.executable, common.ROOT / "algos" / "r2d2_lstm.py", *flags)
            result = json.loads((path / "result.json").read_text())
            times.append(1e6 * result["cpu_seconds"] / result["env_steps"])
    return [*rows, {"what": "whole runs, a thousand steps", "column": "ms", "value": statistics.median(times)}]


def measure_go(num_repeats: int, cuda: bool) -> list[dict]:
    """Moves and simulations per second of the rules and of the search, one slot and two in turn, and of OpenSpiel."""
    import torch
    from go_engine import load_network
    from our_go_search import NullEvaluator, measure_search, set_up_torch

    from algos import alphazero_go as az
    from envs_shared.go_tasks.match import choose_random_moves, play_random_moves

    set_up_torch(0)
    device, clock = torch.device("cuda" if cuda else "cpu"), make_clock(cuda)
    num_games, rates = (4096 if cuda else 256), {}
    for size in (5, 9, 19):
        go = az.Go(size, device)
        boards = go.new(num_games)
        for _ in range(num_repeats):
            start = clock()
            for _ in range(30):
                legal = go.legal_moves(boards)
                boards = go.play(boards, choose_random_moves(go, boards, legal))
                if (over := boards.is_over).any():
                    boards.replace_rows(over, go.new(int(over.sum())))
            rates.setdefault((f"rules, {size}x{size}", "ours"), []).append(30 * num_games / (clock() - start))

    networks = {}
    for kind in ("", " in bfloat16"):
        args = az.Args(env_id="Go-9x9", blocks=6, channels=64, bf16=kind != "")
        network = az.make_network(az.Agent(9, args).to(device), args)
        networks[f"tree and network 6x64{kind}, 9x9"] = (args, network)
    for name, board in GO_NETWORKS.items():
        _, args, network = load_network(common.BENCHMARK / "checkpoints" / f"{name}.pt")
        networks[f"tree and trained network {args.blocks}x{args.channels}, {board}"] = (args, network.to(device))

    def search(name, go, boards, evaluators, num_simulations):
        for num_slots, column in ((1, "ours"), (2, "ours, two slots")):
            rate = measure_search(go, boards, evaluators[:num_slots], num_simulations, clock)
            rates.setdefault((f"{name}, {num_simulations} simulations", column), []).append(rate)

    go = az.Go(9, device)
    boards, _ = play_random_moves(go, num_games, 20)
    for _ in range(num_repeats):
        for num_simulations in (64, 800):
            for kind, sharpness in (("", 0.0), (", peaked prior", 3.0)):
                search(f"tree{kind}, 9x9", go, boards, [NullEvaluator(device, sharpness)] * 2, num_simulations)
        for name, (args, network) in networks.items():
            args.num_slots = 2
            small = az.Go(az.get_size(args), device)
            positions, _ = play_random_moves(small, num_games, small.num_points // 4)
            search(name, small, positions, az.make_evaluators(network, small, num_games, args), 64)
    rows = [{"what": what, "column": c, "value": round(statistics.median(v))} for (what, c), v in rates.items()]
    return rows if cuda else rows + measure_openspiel(num_repeats)


def measure_openspiel(num_repeats: int) -> list[dict]:
    """The same of OpenSpiel, in an environment of its own."""
    python, rows = common.make_peer_environment("openspiel"), {}
    for n in (64, 800):
        with tempfile.TemporaryDirectory() as folder:
            flags = ("--simulations", n, "--repeats", num_repeats)
            path = common.run_command(folder, python, common.PEERS / "openspiel_mcts.py", *flags)
            metrics = json.loads((path / "result.json").read_text())["metrics"]
        rows[f"tree, 9x9, {n} simulations"] = metrics["simulations_per_cpu_second"]
        rows[f"tree in C++ with rollouts, 9x9, {n} simulations"] = metrics["rollout_simulations_per_cpu_second"]
        rows["rules, 9x9"] = metrics["moves_per_cpu_second"]
    return [{"what": what, "column": "OpenSpiel", "value": round(rate)} for what, rate in rows.items()]


def measure_tsp(num_repeats: int, cuda: bool) -> list[dict]:
    """A training step and greedy decoding of ours and of rl4co in turns, with both libraries for float32 products."""
    if cuda:
        raise common.ResultsError("--cuda: the case tsp is for the CPU")
    pythons = {"ours": sys.executable, "rl4co": common.make_peer_environment("rl4co")}
    times = {}
    for _ in range(max(1, num_repeats // 2)):
        for num_nodes in (20, 50, 100):
            for library, precision in PRECISIONS.items():
                for side, python in pythons.items():
                    command = [python, common.PEERS / "tsp_step.py", side, num_nodes, precision]
                    env = common.ENVIRONMENT | KEEP_MEMORY
                    run = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, env=env)
                    for what, seconds in json.loads(run.stdout.splitlines()[-1]).items():
                        key = (f"TSP{num_nodes}, {what}", f"{side}, {library}")
                        times.setdefault(key, []).append(1e3 * seconds)
    return [{"what": what, "column": c, "value": statistics.median(v)} for (what, c), v in times.items()]


@dataclass(frozen=True)
class Case:
    """What is measured for which page."""

    page: str
    title: str
    measure: Callable[[int, bool], list[dict]]


CASES = {
    "change": Case("ppo_change_detection", "part, of 32 pairs where not said otherwise", measure_change),
    "r2d2": Case("r2d2_lstm", "part", measure_r2d2),
    "go": Case("alphazero_go", "per second: 256 games side by side, OpenSpiel one", measure_go),
    "tsp": Case("reinforce_tsp_attention", "CPU-ms", measure_tsp),
}


def make_case_table(rows: list[dict], title: str) -> str:
    """Markdown table, a column for each that the rows have; ratios of the best of rl4co's and of ours."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    has_peer = any(column.startswith("rl4co") for column in columns)
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        values = {row["column"]: row["value"] for row in rows if row["what"] == what}
        lines.append([what, *(show(values[column]) if column in values else "" for column in columns)])
        if has_peer:
            best = [min(v for c, v in values.items() if c.startswith(side)) for side in ("rl4co", "ours")]
            lines[-1].append(f"**{best[0] / best[1]:.2f}**")
    head = f"{title} | {': | '.join(columns)}:" + (" | rl4co / ours, the best of each:" if has_peer else "")
    return common.make_table(head, lines)


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """What the pages show of the results, by page and section."""
    sections = {}
    for name, case in CASES.items():
        rows = [row for row in results["rows"] if row["case"] == name]
        if rows:
            machine = common.machine_line([row["machine"] for row in rows])
            sections[case.page, f"{name}_speed"] = f"\n{make_case_table(rows, case.title)}\n\n{machine}\n"
    return sections


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cuda", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    for name in args.cases:
        if name not in CASES:
            raise common.ResultsError(f"{name} is no case (there are: {', '.join(CASES)})")
    if args.repeats < 1:
        raise common.ResultsError(f"--repeats {args.repeats}: has to be 1 or more")
    for name in args.cases or CASES:
        rows = CASES[name].measure(args.repeats, args.cuda)
        device = ""
        if args.cuda:
            import torch

            device = f", {torch.cuda.get_device_name()}"
        rows = [row | {"case": name, "column": row["column"] + device} for row in rows]
        common.save_rows("speed", rows, ("case", "what", "column"))
        print(make_case_table(rows, CASES[name].title))


if __name__ == "__main__":
    try:
        main()
    except common.ResultsError as error:
        common.exit_with("speed.py", error)
