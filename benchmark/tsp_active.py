"""Active search (Hottung et al. 2022) against the decodings of algos/reinforce_tsp_attention.py at equal CPU time.

    python benchmark/tsp_active.py                  # two minutes on one core
    python benchmark/tsp_active.py --report-only    # table from benchmark/results/tsp_active.json

Active search goes on with REINFORCE on the instance itself: each step samples a tour from every node and moves the
instance's keys of eq. 7, by Adam, and nothing else. Sampling takes as many tours without moving anything.
"""

import argparse
import sys
import time
from functools import partial

import common

sys.path.append(str(common.ROOT))
import torch
from tqdm import tqdm

from algos import reinforce_tsp_attention as am

NETWORKS = {"tsp20": 100, "tsp50": 30}  # of benchmark/checkpoints: instances of its size
STEPS = (4, 16)
LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)  # the best one of each cell is shown, which favours active search
CPU = torch.device("cpu")


def sample_tours(agent, num_steps: int, points: torch.Tensor):
    """Yield sampled tours [B, N, N] from every node, `num_steps` times."""
    nodes = agent(points)
    starts = torch.arange(points.shape[1]).expand(points.shape[:2])
    for _ in range(num_steps):
        yield am.construct_tours(points, nodes, points.shape[1], starts, sample=True)[0]


def search_actively(agent, num_steps: int, learning_rate: float, points: torch.Tensor):
    """Yield sampled tours [B, N, N] from every node, each time after a step of REINFORCE on the keys of eq. 7."""
    num_nodes = points.shape[1]
    nodes = agent(points)
    starts = torch.arange(num_nodes).expand(points.shape[:2])
    keys = nodes.logit_k.clone().requires_grad_()
    optimizer = torch.optim.Adam([keys], learning_rate)
    nodes = nodes._replace(logit_k=keys)
    for _ in range(num_steps):
        tours, lengths = am.construct_tours(points, nodes, num_nodes, starts, sample=True)
        yield tours
        with torch.enable_grad():
            log_likelihood, _ = am.score_tours(nodes, tours)
            loss = am.reinforce_loss(lengths, lengths.mean(1, keepdim=True), log_likelihood)
        (keys.grad,) = torch.autograd.grad(loss, keys)  # Adam does not care that it is the mean over instances
        optimizer.step()
    yield am.construct_tours(points, nodes, num_nodes, starts)[0]


def measure() -> dict:
    """Gap and CPU-milliseconds of an instance, of every network and way to search."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    rows = []
    for network, num_instances in tqdm(NETWORKS.items()):
        checkpoint = am.load_checkpoint(str(common.ROOT / "benchmark" / "checkpoints" / f"{network}.pt"))
        agent = am.AttentionModel(checkpoint["args"].num_layers).eval()
        agent.load_state_dict(checkpoint["agent"])
        args = am.Args(env_id=f"{network}-uniform", eval_episodes=num_instances)
        _, instances = am.load_points(args)
        ways = {d: [partial(am.propose_tours, agent, d)] for d in ("multistart", "multistart_x8")}
        ways |= {f"sampling, {n} times": [partial(sample_tours, agent, n)] for n in STEPS}
        for n in STEPS:
            ways[f"active search, {n} steps"] = [partial(search_actively, agent, n, lr) for lr in LEARNING_RATES]
        for name, candidates in tqdm(ways.items(), leave=False):
            found = []
            for propose in candidates:
                torch.manual_seed(1)
                start = time.process_time()
                with torch.no_grad():
                    tours = am.tsp.find_shortest(propose, instances, CPU)
                seconds = time.process_time() - start
                gap = am.tsp.summarize({"x": tours}, instances)["eval/x_gap"]
                found.append({"gap": gap, "milliseconds": 1e3 * seconds / num_instances})
            best = min(found, key=lambda row: row["gap"])
            rows.append({"network": network, "instances": num_instances, "way": name} | best)
    return {"machine": common.describe_machine(), "rows": rows}


def make_table(results: dict) -> str:
    """Markdown table: a line for each way, gap and time for each network."""
    networks = list(dict.fromkeys(row["network"] for row in results["rows"]))
    lines = ["| tours of an instance |" + "".join(f" {n}: gap, % | CPU-ms |" for n in networks)]
    lines.append("|--|" + "--:|--:|" * len(networks))
    for way in dict.fromkeys(row["way"] for row in results["rows"]):
        rows = {row["network"]: row for row in results["rows"] if row["way"] == way}
        cells = [rows[network] for network in networks]
        lines.append(f"| {way} |" + "".join(f" {c['gap']:.2f} | {c['milliseconds']:.0f} |" for c in cells))
    return "\n".join(lines)


def sections(results: dict) -> dict[str, str]:
    """What the docs show of the results, by the name of its section."""
    return {"tsp_active": f"\n{make_table(results)}\n\nMeasured on {common.machine_line(results['machine'])}\n"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report-only", action="store_true")
    if not parser.parse_args().report_only:
        common.save_results("tsp_active", measure())
    results = common.load_results("tsp_active")
    common.write_report(sections(results), "reinforce_tsp_attention")
    print(make_table(results))


if __name__ == "__main__":
    main()
