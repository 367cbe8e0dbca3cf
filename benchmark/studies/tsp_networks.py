"""Measure gaps and times of trained networks of algos/reinforce_tsp_attention.py and of LKH, on stored
instances.

    python -m benchmark.studies.tsp_networks      # three minutes on one free core

Each network of benchmark/checkpoints is scored on the instances of its size in benchmark/data/tsp, whose
tours are optimal. LKH is benchmark/peers/elkai_lkh.py on the same files, with one run for each instance and
with the best of ten, which is the default of the package elkai. CPU-milliseconds are per instance,
of one thread. The published gaps are copied from the papers, table 1 of Kool et al. 2019 (arXiv:1803.08475)
and table 2 of Kwon et al. 2020 (arXiv:2010.16011), with the numbers of instances that their sections 5 state.
"""

import tempfile
import time
from pathlib import Path

import torch

from algos import reinforce_tsp_attention as am
from benchmark import common, machines, markdown, runs
from benchmark.code import mark
from benchmark.peers import environment
from benchmark.studies import helpers

PAGE = "reinforce_tsp_attention"
DATA = {20: "tsp20_uniform_500", 50: "tsp50_uniform_500", 100: "tsp100_uniform_100"}
# Network, tours of an instance, instances it was trained on, gaps in percent for 20, 50 and 100 nodes
PUBLISHED = (
    ("Kool et al. 2019", "one, greedy", "128 million", "0.34", "1.76", "4.53"),
    ("Kool et al. 2019", "1,280, sampled", "128 million", "0.08", "0.52", "2.26"),
    ("Kool et al. 2019, trained again by Kwon et al.", "one, greedy", "not stated", "0.19", "1.21", "3.51"),
    ("POMO, Kwon et al. 2020", "one, greedy", "up to 200 million", "0.12", "0.64", "1.07"),
    ("POMO, Kwon et al. 2020", "N, greedy", "up to 200 million", "0.04", "0.21", "0.46"),
    ("POMO, Kwon et al. 2020", "8 N, greedy", "up to 200 million", "0.00", "0.03", "0.14"),
)
TRAINED_ON = "1.12, 2.90 and 3.50 million"  # benchmark/checkpoints/README.md says how
OURS = {"greedy": "one, greedy", "multistart": "N, greedy", "multistart_x8": "8 N, greedy"}
LKH_RUNS = {"lkh_1": 1, "lkh": 10}


def load_network(size: int):
    """Load the network for `size` nodes."""
    agent = am.AttentionModel()
    weights = torch.load(common.BENCHMARK / "checkpoints" / f"tsp{size}.pt", weights_only=True)["agent"]
    agent.load_state_dict(weights)
    return agent


def measure_network(size: int, path: Path) -> list[dict]:
    """Score each decoding of the network for `size` nodes on the file `path`."""
    agent, instances, rows = load_network(size), am.read_instances(str(path)), []
    for decoding in am.DECODINGS:
        start = time.process_time()
        scores, tours = am.evaluate(agent, instances, torch.device("cpu"), (decoding,))
        row = {"cpu_ms": 1e3 * (time.process_time() - start) / len(tours)}
        row |= {name: scores[f"eval/{decoding}_{name}"] for name in ("gap", "gap_std")}
        rows.append(row | {"size": size, "way": decoding, "num_instances": len(tours)})
    return rows


def measure_lkh(size: int, path: Path, way: str) -> dict:
    """Score LKH, with the runs of `way`, on the file `path`."""
    command = [environment.make_environment("elkai"), "-m", "benchmark.peers.elkai_lkh", "--data", path]
    command += ["--env-id", f"tsp{size}-uniform", "--runs", LKH_RUNS[way]]
    folder = helpers.run_command(tempfile.mkdtemp(), *command)
    events = runs.read_events(folder)
    row = {name: events.Scalars(f"eval/{name}")[-1].value for name in ("gap", "gap_std", "cpu_ms")}
    return row | {"size": size, "way": way, "num_instances": events.Scalars("eval/gap")[-1].step}


def measure() -> list[dict]:
    """Return a row for each network and decoding, and for LKH on each file."""
    torch.set_num_threads(1)
    rows = []
    for size, name in DATA.items():
        path = common.BENCHMARK / "data" / "tsp" / f"{name}.txt"
        rows += measure_network(size, path)
        rows += [measure_lkh(size, path, way) for way in LKH_RUNS]
    return rows


def show_with_error(row: dict) -> str:
    """Write the gap with as many digits as the papers give, and its standard error over the instances."""
    return f"{row['gap']:z.2f} ({row['gap_std'] / row['num_instances'] ** 0.5:.2f})"


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """Make what the page shows: published gaps and ours, and the times."""
    rows = {(row["way"], row["size"]): row for row in results["rows"]}
    gaps, times = [list(line) for line in PUBLISHED], []
    for way in (*OURS, *LKH_RUNS):
        cells = [rows[way, size] for size in DATA]
        if way in OURS:
            name = mark("ours", cells)
            network, what = (name, OURS[way], TRAINED_ON), f"{name}, {OURS[way]}"
        else:
            what = "LKH, one run" if LKH_RUNS[way] == 1 else f"LKH, the best of {LKH_RUNS[way]} runs"
            network = (what, "one", "-")
        gaps.append([*network, *map(show_with_error, cells)])
        times.append([what, *(markdown.show(cell["cpu_ms"]) for cell in cells)])
    head = "gap, % | tours of an instance | training instances | TSP20: | TSP50: | TSP100:"
    text = markdown.make_table(head, gaps) + "\n\n"
    text += markdown.make_table("CPU-milliseconds an instance | TSP20: | TSP50: | TSP100:", times)
    return {(PAGE, "tsp_networks"): f"\n{text}\n\n{machines.machine_line(results['rows'])}\n"}


# ---- Pictures ----


def draw_median(axes, size: int) -> float:
    """Draw the greedy tour of the instance with the median gap over the optimal one; returns the gap in
    percent."""
    instances = am.read_instances(str(common.BENCHMARK / "data" / "tsp" / f"{DATA[size]}.txt"))
    points, optima, _ = instances
    _, tours = am.evaluate(load_network(size), instances, torch.device("cpu"), ("greedy",))
    lengths = am.tour_length(points, torch.stack((tours, optima), 1))
    gaps = 100 * (lengths[:, 0] / lengths[:, 1] - 1)
    gap, i = gaps.median(0)
    for nodes, style, label in (
        (optima[i], {"color": "0.75", "lw": 5}, "optimal tour"),
        (tours[i], {"color": "#0072B2", "lw": 1.5}, "greedy tour of the network"),
    ):
        axes.plot(*points[i][torch.cat((nodes, nodes[:1]))].T, label=label, **style)
    axes.plot(*points[i].T, "k.", ms=4)
    axes.set(aspect="equal", xticks=[], yticks=[], xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    return gap.item()


def draw(path: Path) -> None:
    """Draw the instance with the median gap of each file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, size in zip(figure.subplots(1, 3), DATA, strict=True):
        gap = draw_median(axes, size)
        axes.set_title(f"{size} nodes, {gap:z.2f} % longer", fontsize=15)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, fontsize=15)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    helpers.start_parser(__doc__).parse_args()
    helpers.save_rows("tsp_networks", measure(), ("size", "way"), ("algos/reinforce_tsp_attention.py",))
