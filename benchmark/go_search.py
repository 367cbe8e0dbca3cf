"""What two slots cost and gain in the search of algos/alphazero_go.py, and a picture of them at work.

python benchmark/go_search.py --checkpoint runs/.../checkpoint.pt    # a minute on two cores
python benchmark/go_search.py --report-only                          # tables from benchmark/results/go_search.json

Positions are from the middle of games of the checkpoint's own board. Failures: share of the turns of a slot in which a
game found no leaf that was free. Distortion: total variation between the visit counts of one slot and of two.
Two slots take the clock's time of one only where a second core is idle; CPU-seconds say what they cost.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import common

sys.path.append(str(common.ROOT))
LIMITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
STEPS = (50, 100, 200, 400, 800)


def make_boards(go, num_games: int):
    """Positions after random moves on a quarter of the board."""
    import torch

    from envs_shared.go_tasks.match import play_random_moves

    return play_random_moves(go, num_games, go.num_points // 4, torch.Generator().manual_seed(0))[0]


def load_network(path: str | Path):
    """The script's module, a checkpoint's settings and its network."""
    import torch

    from algos import alphazero_go as az

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    checkpoint = az.load_checkpoint(path)
    args = checkpoint["args"]
    args.bf16 = False
    agent = az.Agent(az.get_size(args), args).eval()
    agent.load_state_dict(checkpoint["agent"])
    return az, args, agent.fold_into(az.make_network(az.get_size(args), args, torch.device("cpu")))


def measure(path: str, num_games: int = 64) -> dict:
    """Failures and distortion by limit k and simulations, and seconds of one slot and two for one game and many."""
    from envs_shared.go_tasks.rules import Go

    az, args, network = load_network(path)
    go = Go(az.get_size(args))
    boards = make_boards(go, num_games)
    visits, rows = {}, []

    def search(num_slots: int, limit: float):
        args.num_slots, args.pseudo_limit = num_slots, limit
        tree = az.Search(go, az.make_evaluators(network, go, num_games, args), num_games, max(STEPS), args)
        tree.reset(boards)
        return tree

    tree = search(1, 0.0)
    for before, after in zip((0, *STEPS), STEPS, strict=False):
        tree.run(after - before)
        visits[after] = tree.visit_counts() / after
    for limit in LIMITS:
        tree = search(2, limit)
        for before, after in zip((0, *STEPS), STEPS, strict=False):
            tree.counts = dict.fromkeys(tree.counts, 0)
            tree.run(after - before)
            counts, own = tree.counts, tree.visit_counts() / after
            distance = ((own - visits[after]).abs().sum(1) / 2).mean().item()
            same = (own.argmax(1) == visits[after].argmax(1)).float().mean().item()
            row = {"limit": limit, "simulations": after, "fails": round(1 - counts["sent"] / counts["turns"], 4)}
            rows.append(row | {"distortion": round(distance, 4), "same_move": round(same, 3)})
    seconds = {}
    for games in (1, num_games):
        part = make_boards(go, games)
        for _ in range(7):
            for num_slots in (1, 2):
                args.num_slots, args.pseudo_limit = num_slots, 0.1
                tree = az.Search(go, az.make_evaluators(network, go, games, args), games, 200, args)
                tree.reset(part)
                start = time.perf_counter(), time.process_time()
                tree.run(200)
                passed = time.perf_counter() - start[0], time.process_time() - start[1]
                seconds.setdefault(f"{games} games, {num_slots} slots", []).append(passed)
    for name, pairs in seconds.items():  # on the clock, and of CPU
        seconds[name] = [round(statistics.median(x), 4) for x in zip(*pairs, strict=True)]
    return {"board": args.env_id, "games": num_games, "rows": rows, "seconds": seconds}


def draw_timeline(path: str, figure_path: Path, num_games: int = 64) -> None:
    """A stretch of a search as it happened: what the master and the two workers did when."""
    from matplotlib.figure import Figure

    from envs_shared.go_tasks.rules import Go

    az, args, network = load_network(path)
    args.num_slots, events = 2, []

    def watch(owner: str, what: str, fn):
        def timed(*inputs):
            start = time.perf_counter()
            result = fn(*inputs)
            events.append((owner, what, start, time.perf_counter()))
            return result

        return timed

    go = Go(az.get_size(args))
    evaluators = az.make_evaluators(network, go, num_games, args)
    workers = [watch(f"worker {name}", f"evaluate {name}", e) for name, e in zip("AB", evaluators, strict=True)]
    tree = az.Search(go, workers, num_games, 100, args)
    for slot, name in zip(tree.slots, "AB", strict=True):
        slot.wait = watch("master", f"wait {name}", slot.wait)
    request, backup = tree.request, tree.backup
    tree.request = lambda slot, games: watch("master", f"select {'AB'[tree.slots.index(slot)]}", request)(slot, games)
    tree.backup = lambda slot, *rest: watch("master", f"update {'AB'[tree.slots.index(slot)]}", backup)(slot, *rest)
    tree.reset(make_boards(go, num_games))
    tree.run(60)
    events.clear()
    tree.run(40)
    middle = sorted(events, key=lambda e: e[2])[len(events) // 2][2]
    span = 12 * statistics.mean(e[3] - e[2] for e in events if e[1].startswith("evaluate"))
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots()
    colours = {"select": "#93c47d", "update": "#6fa8dc", "wait": "#eeeeee", "evaluate": "#f6b26b"}
    lanes = {"worker B": 0, "worker A": 1, "master": 2}
    for owner, what, start, end in events:
        if end < middle or start > middle + span:
            continue
        kind, name = what.split()
        hatch = "//" if name == "B" else None
        left, width = 1e3 * (start - middle), 1e3 * (end - start)
        axes.barh(
            lanes[owner],
            width,
            left=left,
            height=0.7,
            color=colours[kind],
            edgecolor="#444444",
            hatch=hatch,
            linewidth=0.5,
        )
    for kind, colour in colours.items():
        axes.barh(0, 0, color=colour, edgecolor="#444444", label=kind)
    axes.barh(0, 0, color="white", edgecolor="#444444", hatch="//", label="of slot B")
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set(xlim=(0, 1e3 * span), xlabel=f"milliseconds, {num_games} games of {args.env_id} on the CPU")
    figure.legend(loc="outside upper center", ncols=5, fontsize=8)
    figure.savefig(figure_path, dpi=110)


def draw(results: dict, path: Path) -> None:
    """Failure rate and distortion by simulations, a line for each limit k."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"fails": "turns that fail", "distortion": "total variation from one slot"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for limit in LIMITS:
            rows = [row for row in results["rows"] if row["limit"] == limit]
            axes.plot([r["simulations"] for r in rows], [r[key] for r in rows], marker="o", label=f"k = {limit:g}")
        axes.set(xscale="log", xlabel="simulations", ylabel=title)
        axes.set_xticks(STEPS, STEPS)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)


def make_table(results: dict) -> str:
    """Markdown tables: failures and distortion, and the speed-up of the second slot."""
    head = " | ".join(f"{n}" for n in STEPS)
    lines = [f"| k | measure | {head} |", f"|--:|--|{'--:|' * len(STEPS)}"]
    for limit in LIMITS:
        rows = {row["simulations"]: row for row in results["rows"] if row["limit"] == limit}
        for key, title in (
            ("fails", "turns that fail since the last column"),
            ("distortion", "total variation"),
            ("same_move", "same best move"),
        ):
            cells = " | ".join(f"{rows[n][key]:.1%}" for n in STEPS)
            lines.append(f"| {limit:g} | {title} | {cells} |")
    seconds = results["seconds"]
    lines += ["", "| games | seconds | one slot | two slots | ratio |", "|--:|--|--:|--:|--:|"]
    for games in (1, results["games"]):
        both = (seconds[f"{games} games, {n} slots"] for n in (1, 2))
        for clock, one, two in zip(("on the clock", "of CPU"), *both, strict=True):
            lines.append(f"| {games} | {clock} | {one:.3f} | {two:.3f} | **{one / two:.2f}** |")
    return "\n".join(lines)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    text = f"{results['board']}, {results['games']} games side by side; columns are simulations."
    return {
        "go_search": f"\n{text}\n\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--report-only", action="store_true")
    return parser


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    if not args.report_only:
        common.save_results("go_search", {"machine": common.describe_machine(), **measure(args.checkpoint)})
        draw_timeline(args.checkpoint, common.FIGURES / "go_timeline.png")
    results = common.load_results("go_search")
    draw(results, common.FIGURES / "go_search.png")
    common.write_report(sections(results), "alphazero_go")
    print(make_table(results))


if __name__ == "__main__":
    main()
