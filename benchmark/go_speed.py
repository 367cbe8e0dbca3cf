"""Speed of envs_shared/go_tasks/rules.py and of the search of algos/alphazero_go.py, with OpenSpiel's in the same run.

python benchmark/go_speed.py                   # some minutes on two cores; --cuda on a GPU
python benchmark/go_speed.py --report-only     # tables in the docs from benchmark/results/go_speed.json

CPU-seconds of all threads, on a GPU seconds on the clock; one slot and two are measured in turn. Medians over repeats.
The tree is measured with equal logits, which make it shallow, and with those of a peaked prior. The networks are those
of benchmark/checkpoints, of which that for 5x5 has the default's size, and a larger one that knows nothing yet.
"""

import argparse
import statistics
import sys
import time

import common
import go_search
import torch

sys.path.append(str(common.ROOT))
from algos import alphazero_go as az
from envs_shared.go_tasks.match import choose_random_moves, play_random_moves
from envs_shared.go_tasks.rules import Go


class NullEvaluator:
    """Normal logits of deviation `sharpness`, equal ones for 0, and values near 1/2."""

    def __init__(self, device: torch.device, sharpness: float = 0.0):
        self.device = device
        self.sharpness = sharpness

    def __call__(self, boards, legal):
        noise = torch.rand(len(legal), device=self.device)
        if self.sharpness == 0:
            return torch.zeros(legal.shape, device=self.device), 0.49 + 0.02 * noise
        return self.sharpness * torch.randn(legal.shape, device=self.device), 0.49 + 0.02 * noise


def set_up_torch(seed: int) -> None:
    """One thread, and the settings of alphazero_go.py."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.manual_seed(seed)


def measure_search(go: Go, boards, evaluators: list, num_simulations: int, clock=time.process_time) -> float:
    """Simulations per second of `clock` of a search of all `boards` at once, a slot for each evaluator."""
    num_games = len(boards.to_play)
    tree = az.Search(go, evaluators, num_games, num_simulations, az.Args(komi=7.5))
    tree.reset(boards)
    start = clock()
    tree.run(num_simulations)
    return num_games * num_simulations / (clock() - start)


def measure(num_repeats: int, cuda: bool) -> dict:
    """Board steps and simulations per second, by what was measured."""
    set_up_torch(0)
    device = torch.device("cuda" if cuda else "cpu")
    num_games = 4096 if cuda else 256

    def clock():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if cuda else time.process_time()

    rates = {}
    for size in (5, 9, 19):
        go = Go(size, device)
        boards = go.new(num_games)
        for _ in range(num_repeats):
            start = clock()
            for _ in range(30):
                legal = go.legal_moves(boards)
                boards = go.play(boards, choose_random_moves(go, boards, legal))
                if (over := boards.is_over).any():
                    boards.replace_rows(over, go.new(int(over.sum())))
            rates.setdefault(f"rules, {size}x{size}", []).append(30 * num_games / (clock() - start))

    def search(name, go, boards, evaluators, num_simulations):
        for num_slots in (1, 2):
            rate = measure_search(go, boards, evaluators[:num_slots], num_simulations, clock)
            rates.setdefault(f"{name}, {num_slots} slot{'s' * (num_slots - 1)}", []).append(rate)

    networks = {}
    for kind in ("", " in bfloat16"):
        args = az.Args(env_id="Go-9x9", blocks=6, channels=64, bf16=kind != "")
        network = az.Agent(9, args).to(device).eval().fold_into(az.make_network(9, args, device))
        networks[f"tree and network 6x64{kind}, 9x9"] = (args, network)
    for name in ("go5x5", "go7x7"):
        _, args, network = go_search.load_network(common.ROOT / "benchmark" / "checkpoints" / f"{name}.pt")
        networks[f"tree and trained network {args.blocks}x{args.channels}, {name[2:]}"] = (args, network.to(device))

    go = Go(9, device)
    boards, _ = play_random_moves(go, num_games, 20)
    for _ in range(num_repeats):
        for n in (64, 800):
            for kind, sharpness in (("", 0.0), (", peaked prior", 3.0)):
                search(f"tree, 9x9, {n} simulations{kind}", go, boards, [NullEvaluator(device, sharpness)] * 2, n)
        for name, (args, network) in networks.items():
            args.num_slots = 2
            small = Go(az.get_size(args), device)
            positions, _ = play_random_moves(small, num_games, small.num_points // 4)
            search(f"{name}, 64 simulations", small, positions, az.make_evaluators(network, small, num_games, args), 64)
    name = torch.cuda.get_device_name() if cuda else "cpu"
    return {"device": name, "games": num_games, "rates": {k: round(statistics.median(v)) for k, v in rates.items()}}


def measure_peer(num_repeats: int) -> dict[str, int]:
    """The same of OpenSpiel, in an environment of its own."""
    rates = {}
    for n in (64, 800):
        flags = "--simulations", n, "--repeats", num_repeats
        metrics = common.run_peer("openspiel", "openspiel_mcts", *flags)["metrics"]
        rates[f"python, {n}"] = round(metrics["simulations_per_cpu_second"])
        rates[f"C++ with rollouts, {n}"] = round(metrics["rollout_simulations_per_cpu_second"])
        rates["rules"] = round(metrics["moves_per_cpu_second"])
    return rates


def make_table(results: dict) -> str:
    """Markdown table of all rates."""
    lines = ["| what | device | per second of one core or of the GPU |", "|--|--|--:|"]
    for run in results["runs"]:
        device = f"{run['device']}, {run['games']} games"
        lines += [f"| {name} | {device} | {rate:,} |" for name, rate in run["rates"].items()]
    for name, rate in results["openspiel"].items():
        what = "rules, 9x9" if name == "rules" else f"tree of {name} simulations, 9x9"
        lines.append(f"| OpenSpiel: {what} | cpu, one game | {rate:,} |")
    return "\n".join(lines)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    return {"go_speed": f"\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        path = common.RESULTS / "go_speed.json"
        runs = common.load_results("go_speed")["runs"] if path.exists() else []
        peer, run = measure_peer(args.repeats), measure(args.repeats, args.cuda)
        runs = [old for old in runs if old["device"] != run["device"]] + [run]
        results = {"machine": common.describe_machine(), "runs": runs, "openspiel": peer}
        common.save_results("go_speed", results)
    results = common.load_results("go_speed")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    main()
