"""Measure the speed of the rules and of the search of algos/alphazero_go.py.

    python -m benchmark.studies.go_search           # minutes on two free cores
    python -m benchmark.studies.go_search --cuda    # on a GPU
    python -m benchmark.studies.go_search --rollouts    # only plain MCTS, ours and OpenSpiel's in C++
    python -m benchmark.studies.go_search --pgx         # only with networks: ours, and pgx and mctx in JAX

Results are medians over repeats, in which one worker and two take turns. CPU-seconds, of all threads, say
what a simulation costs. A second worker saves wall-clock time only if a second core, or the GPU, is idle.

OpenSpiel has a search in Python and one in C++. The suite `cpu` measures the one in Python, with a network
without cost. Python cannot give the one in C++ a network, so this study measures it as plain MCTS. On both
sides, a value is the result of one game of uniformly random moves, passes included.
"""

import statistics
import tempfile
import time
from functools import partial

import torch

from algos import alphazero_go as az
from benchmark import common, machines, markdown, runs
from benchmark.code import mark
from benchmark.peers import environment
from benchmark.peers.go_engine import load_network, play_random_moves, set_up_torch
from benchmark.peers.our_go_search import evaluate_nothing, measure_search
from benchmark.studies import helpers
from envs_shared.go import Go

NETWORKS = ("go5x5", "go7x7", "go9x9")  # of benchmark/checkpoints
COLUMNS = [
    f"{workers}, {clock}" for workers in ("one worker", "two workers") for clock in ("of CPU", "wall-clock")
]


def measure_rules(size: int, num_games: int, device) -> tuple[float, float]:
    """Return random moves per CPU-second and per wall-clock second, including the search for legal moves."""
    go = Go(size, device)
    boards = go.new(num_games)
    start = time.process_time(), time.perf_counter()
    for _ in range(30):
        boards = go.play(boards, torch.multinomial(go.legal_moves(boards).float(), 1).squeeze(1))
        if (over := boards.is_over).any():  # this also waits for a GPU
            boards.put(over, go.new(int(over.sum())))
    return 30 * num_games / (time.process_time() - start[0]), 30 * num_games / (
        time.perf_counter() - start[1]
    )


def list_searches(num_games: int, device):
    """Yield what is searched, its rules, positions, evaluator and the number of simulations."""
    go = Go(9, device)
    boards, _ = play_random_moves(go, num_games, 20)
    for num_simulations in (64, 800):
        for kind, sharpness in (("", 0.0), (", peaked prior", 3.0)):
            evaluate = partial(evaluate_nothing, sharpness=sharpness)
            yield f"tree{kind}, 9x9, {num_simulations} simulations", go, boards, evaluate, num_simulations
    for name in NETWORKS:
        go, args, agent = load_network(common.BENCHMARK / "checkpoints" / f"{name}.pt")
        go = Go(go.size, device)
        boards, _ = play_random_moves(go, num_games, go.num_points // 4)
        evaluate = az.make_evaluator(go, agent.to(device))
        board = args.env_id.removeprefix("Go-")
        what = f"tree and network {args.blocks}x{args.channels}, {board}, 64 simulations"
        yield what, go, boards, evaluate, 64


class UniformGo(Go):
    """Rules whose random moves are uniform over all legal ones, as OpenSpiel's are."""

    def random_moves(self, boards, legal):
        return torch.multinomial(legal.float(), 1).squeeze(1)


def measure_rollouts(num_repeats: int, num_games: int) -> list[dict]:
    """Return rows of simulations per second of plain MCTS on 9x9, ours and that of OpenSpiel in C++."""
    set_up_torch(0)
    go, rates = Go(9), {}
    uniform = UniformGo(9)
    for _ in range(num_repeats):
        for n, name in ((num_games, ""), (1, ", one game")):
            boards, _ = play_random_moves(go, n, 20)
            evaluate = partial(az.evaluate_rollouts, uniform, 7.5)
            # OpenSpiel's c of 2, for values from -1 to 1
            rate = measure_search(go, boards, evaluate, 64, c_puct=1.0, scores=az.ucb_scores)
            rates.setdefault(f"tree and random games, 9x9, 64 simulations{name}", []).append(rate)
    python = environment.make_environment("openspiel")
    command = [python, "-m", "benchmark.peers.openspiel_mcts", "--work", "rollouts"]
    folder = helpers.run_command(tempfile.mkdtemp(), *command, "--simulations", 64, "--repeats", num_repeats)
    rate = runs.read_events(folder).Scalars("eval/simulations_per_cpu_second")[-1].value
    what = f"the same, one game, OpenSpiel's search in C++ ({runs.read_text(folder, 'program')})"
    return [
        {"what": what, "column": column, "value": round(statistics.median(values))}
        for what, repeats in (rates | {what: [(rate,)]}).items()
        for column, values in zip(COLUMNS[:1], zip(*repeats, strict=True), strict=False)
    ]


def measure_pgx(num_repeats: int, num_games: int) -> list[dict]:
    """Return rows of simulations per CPU-second with networks of one size, ours and that of mctx on Go of
    pgx.

    Both sides take turns. What JAX needs to compile its search is a row of its own, in CPU-seconds.
    """
    set_up_torch(0)
    rates, first = {}, {}
    for _ in range(num_repeats):
        for name in ("go5x5", "go9x9"):
            go, args, agent = load_network(common.BENCHMARK / "checkpoints" / f"{name}.pt")
            boards, _ = play_random_moves(go, num_games, go.num_points // 4)
            what = f"network {args.blocks}x{args.channels}, {args.env_id.removeprefix('Go-')}, 64 simulations"
            rate = measure_search(go, boards, az.make_evaluator(go, agent), 64)[0]
            rates.setdefault(f"beside pgx: tree and {what}", []).append(rate)
            python = environment.make_environment("pgx")
            flags = f"--env-id {args.env_id} --blocks {args.blocks} --channels {args.channels}"
            flags += f" --simulations 64 --games {num_games} --repeats 3"
            command = [python, "-m", "benchmark.peers.pgx_mctx", *flags.split()]
            folder = helpers.run_command(tempfile.mkdtemp(), *command)
            events, program = runs.read_events(folder), runs.read_text(folder, "program")
            for tag, values in (("simulations_per_cpu_second", rates), ("first_cpu_seconds", first)):
                values.setdefault(f"{what}, {program}", []).append(events.Scalars(f"eval/{tag}")[-1].value)
    rates |= {f"CPU-seconds of the first search, which compiles: {what}": x for what, x in first.items()}
    return [
        {"what": what, "column": COLUMNS[0], "value": round(statistics.median(values))}
        for what, values in rates.items()
    ]


def measure(num_repeats: int, cuda: bool) -> list[dict]:
    """Return rows of moves and simulations per second of the rules and of the search."""
    set_up_torch(0)
    device, num_games, rates = torch.device("cuda" if cuda else "cpu"), (4096 if cuda else 256), {}
    searches = list(list_searches(num_games, device))
    for _ in range(num_repeats):
        for size in (5, 9, 19):
            rates.setdefault(f"moves of the rules, {size}x{size}", []).append(
                measure_rules(size, num_games, device)
            )
        for what, go, boards, evaluate, num_simulations in searches:
            one, two = (measure_search(go, boards, evaluate, num_simulations, n) for n in (1, 2))
            rates.setdefault(what, []).append((*one, *two))
    name = f", {torch.cuda.get_device_name()}" if cuda else ""
    return [
        {"what": what, "column": column + name, "value": round(statistics.median(values))}
        for what, repeats in rates.items()
        for column, values in zip(COLUMNS, zip(*repeats, strict=True), strict=False)
    ]


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """Return what the page shows: a line for each measurement, a column for each way."""
    rows = results["rows"]
    columns = list(dict.fromkeys(row["column"] for row in rows))
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        measured = [row for row in rows if row["what"] == what]
        values = {row["column"]: markdown.show(row["value"]) for row in measured}
        processors = machines.list_processors(measured)
        lines.append([mark(what, measured), *(values.get(column, "") for column in columns), processors])
    head = f"simulations per second (rules: moves) | {': | '.join(columns)}: | processor"
    table = markdown.make_table(head, lines)
    machine = machines.machine_line(rows)
    return {("alphazero_go", "go_search"): f"\n{table}\n\n{machine}\n"}


def make_parser():
    """Make the parser of the command line's flags."""
    parser = helpers.start_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--rollouts", action="store_true", help="measure only plain MCTS, on the CPU")
    parser.add_argument(
        "--pgx", action="store_true", help="measure only what is compared with pgx, on the CPU"
    )
    return parser


if __name__ == "__main__":
    args = make_parser().parse_args()
    if args.pgx:
        rows = measure_pgx(args.repeats, 256)
    else:
        rows = [] if args.cuda else measure_rollouts(args.repeats, 256)
        if not args.rollouts:
            rows = [*measure(args.repeats, args.cuda), *rows]
    helpers.save_rows("go_search", rows, ("what", "column"), ("algos/alphazero_go.py",))
