"""What two slots cost and gain in the search of algos/alphazero_go.py, and a picture of them at work.

python benchmark/studies/go_search.py --checkpoint benchmark/checkpoints/go7x7.pt    # a minute on two cores

Positions are from the middle of games of the checkpoint's own board. Failures: share of the turns of a slot in which a
game found no leaf that was free. Distortion: total variation between the visit counts of one slot and of two.
Two slots take the clock's time of one only where a second core is idle; CPU-seconds say what they cost.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]
import common

sys.path.append(str(common.PEERS))
from go_engine import load_network

LIMITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
STEPS = (50, 100, 200, 400, 800)


def make_boards(go, num_games: int):
    """Positions after random moves on a quarter of the board."""
    import torch

    from envs_shared.go_tasks.match import play_random_moves

    return play_random_moves(go, num_games, go.num_points // 4, torch.Generator().manual_seed(0))[0]


def measure(path: str, num_games: int = 64) -> list[dict]:
    """Failures and distortion by limit k and simulations, and seconds of one slot and two for one game and many."""
    az, args, network = load_network(path)
    go = az.Go(az.get_size(args))

    def search(num_slots: int, limit: float, boards):
        args.num_slots, args.pseudo_limit = num_slots, limit
        num_games = len(boards.to_play)
        tree = az.Search(go, az.make_evaluators(network, go, num_games, args), num_games, max(STEPS), args)
        tree.reset(boards)
        return tree

    boards, visits, rows = make_boards(go, num_games), {}, []
    tree = search(1, 0.0, boards)
    for before, after in zip((0, *STEPS), STEPS, strict=False):
        tree.run(after - before)
        visits[after] = tree.visit_counts() / after
    for limit in LIMITS:
        tree = search(2, limit, boards)
        for before, after in zip((0, *STEPS), STEPS, strict=False):
            tree.counts = dict.fromkeys(tree.counts, 0)
            tree.run(after - before)
            counts, own = tree.counts, tree.visit_counts() / after
            distance = ((own - visits[after]).abs().sum(1) / 2).mean().item()
            same = (own.argmax(1) == visits[after].argmax(1)).float().mean().item()
            row = {"what": "search", "limit": limit, "simulations": after}
            row |= {"fails": round(1 - counts["sent"] / counts["turns"], 4)}
            rows.append(row | {"distortion": round(distance, 4), "same_move": round(same, 3)})
    for games in (1, num_games):
        part, seconds = make_boards(go, games), {1: [], 2: []}
        for _ in range(7):
            for num_slots in seconds:
                tree = search(num_slots, 0.1, part)
                start = time.perf_counter(), time.process_time()
                tree.run(200)
                seconds[num_slots].append((time.perf_counter() - start[0], time.process_time() - start[1]))
        for num_slots, pairs in seconds.items():
            clock, cpu = (round(statistics.median(x), 4) for x in zip(*pairs, strict=True))
            rows.append({"what": "seconds", "games": games, "slots": num_slots, "clock": clock, "cpu": cpu})
    return [{"board": args.env_id, "games": num_games} | row for row in rows]


def draw_board(path: str, figure_path: Path) -> None:
    """A search in the middle of a game of the network against plain MCTS."""
    az, args, network = load_network(path)
    _, match = az.evaluate(network, args, az.torch.device("cpu"))
    az.draw_search(network, args, az.torch.device("cpu"), match["games"][0]).savefig(figure_path, dpi=120)


def record_search(path: str, num_games: int) -> tuple[str, list[tuple[str, str, float, float]]]:
    """The board, and (who, what, start, end) of what the master and the two workers do in a search."""
    az, args, network = load_network(path)
    args.num_slots, events = 2, []

    def watch(owner: str, what: str, fn):
        def timed(*inputs):
            start = time.perf_counter()
            result = fn(*inputs)
            events.append((owner, what, start, time.perf_counter()))
            return result

        return timed

    go = az.Go(az.get_size(args))
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
    return args.env_id, events


def draw_timeline(path: str, figure_path: Path, num_games: int = 64) -> None:
    """A stretch of a search as it happened: what the master and the two workers did when."""
    from matplotlib.figure import Figure

    board, events = record_search(path, num_games)
    middle = sorted(events, key=lambda e: e[2])[len(events) // 2][2]
    span = 12 * statistics.mean(e[3] - e[2] for e in events if e[1].startswith("evaluate"))
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes = figure.subplots()
    colours = {"select": "#93c47d", "update": "#6fa8dc", "wait": "#eeeeee", "evaluate": "#f6b26b"}
    lanes = {"worker B": 0, "worker A": 1, "master": 2}
    for owner, what, start, end in events:
        if middle <= end and start <= middle + span:
            kind, name = what.split()
            style = {"color": colours[kind], "edgecolor": "#444444", "hatch": "//" if name == "B" else None}
            axes.barh(lanes[owner], 1e3 * (end - start), 0.7, left=1e3 * (start - middle), linewidth=0.5, **style)
    for kind, colour in colours.items():
        axes.barh(0, 0, color=colour, edgecolor="#444444", label=kind)
    axes.barh(0, 0, color="white", edgecolor="#444444", hatch="//", label="of slot B")
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set(xlim=(0, 1e3 * span), xlabel=f"milliseconds, {num_games} games of {board} on the CPU")
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
            rows = [row for row in results["rows"] if row.get("limit") == limit]
            axes.plot([r["simulations"] for r in rows], [r[key] for r in rows], marker="o", label=f"k = {limit:g}")
        axes.set(xscale="log", xlabel="simulations", ylabel=title)
        axes.set_xticks(STEPS, STEPS)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110)


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """What the pages show of the results: failures and distortion, and the speed-up of the second slot."""
    first, lines, speeds = results["rows"][0], [], []
    titles = {"fails": "turns that fail since the last column", "distortion": "total variation"}
    for limit in LIMITS:
        rows = {row["simulations"]: row for row in results["rows"] if row.get("limit") == limit}
        for key, title in (titles | {"same_move": "same best move"}).items():
            lines.append([f"{limit:g}", title, *(f"{rows[n][key]:.1%}" for n in STEPS)])
    for games in (1, first["games"]):
        both = [row for row in results["rows"] if row["what"] == "seconds" and row["games"] == games]
        for clock, title in (("clock", "on the clock"), ("cpu", "of CPU")):
            one, two = (row[clock] for row in sorted(both, key=lambda row: row["slots"]))
            speeds.append([games, title, f"{one:.3f}", f"{two:.3f}", f"**{one / two:.2f}**"])
    text = f"\n{first['board']}, {first['games']} games side by side; columns are simulations.\n\n"
    text += common.make_table(f"k: | measure | {': | '.join(map(str, STEPS))}:", lines) + "\n\n"
    text += common.make_table("games: | seconds | one slot: | two slots: | ratio:", speeds) + "\n\n"
    text += common.machine_line([row["machine"] for row in results["rows"]]) + "\n"
    return {("alphazero_go", "go_search"): text}


def make_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    return parser


def main() -> None:
    """Measure, and draw what a search and a game of the checkpoint look like."""
    path = make_parser().parse_args().checkpoint
    common.save_rows("go_search", measure(path), ("what",))
    draw_timeline(path, common.FIGURES / "go_timeline.png")
    draw_board(path, common.FIGURES / "go_board.png")


if __name__ == "__main__":
    main()
