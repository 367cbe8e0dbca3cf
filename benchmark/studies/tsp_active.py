"""Active search (Hottung et al. 2022) against the decodings of algos/reinforce_tsp_attention.py at equal CPU time.

    python benchmark/studies/tsp_active.py    # two minutes on one core

Active search goes on with REINFORCE on the instance itself: each step samples a tour from every node and moves the
instance's keys of eq. 7, by Adam, and nothing else. Sampling takes as many tours without moving anything.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]
import common

NETWORKS = {"tsp20": 100, "tsp50": 30}  # of benchmark/checkpoints: instances of its size
STEPS = (4, 16)
LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)  # the best one of each cell is shown, which favours active search


def sample_tours(am, agent, num_steps: int, points):
    """Yield sampled tours [B, N, N] from every node, `num_steps` times."""
    nodes = agent(points)
    starts = am.torch.arange(points.shape[1]).expand(points.shape[:2])
    for _ in range(num_steps):
        yield am.construct_tours(points, nodes, points.shape[1], starts, sample=True)[0]


def search_actively(am, agent, num_steps: int, learning_rate: float, points):
    """Yield sampled tours [B, N, N] from every node, each time after a step of REINFORCE on the keys of eq. 7."""
    num_nodes = points.shape[1]
    nodes = agent(points)
    starts = am.torch.arange(num_nodes).expand(points.shape[:2])
    keys = nodes.logit_k.clone().requires_grad_()
    optimizer = am.torch.optim.Adam([keys], learning_rate)
    nodes = nodes._replace(logit_k=keys)
    for _ in range(num_steps):
        tours, lengths = am.construct_tours(points, nodes, num_nodes, starts, sample=True)
        yield tours
        with am.torch.enable_grad():
            log_likelihood, _ = am.score_tours(nodes, tours)
            loss = am.reinforce_loss(lengths, lengths.mean(1, keepdim=True), log_likelihood)
        (keys.grad,) = am.torch.autograd.grad(loss, keys)  # Adam does not care that it is the mean over instances
        optimizer.step()
    yield am.construct_tours(points, nodes, num_nodes, starts)[0]


def measure() -> list[dict]:
    """Gap and CPU-milliseconds of an instance, of every network and way to search."""
    import torch
    from tqdm import tqdm

    from algos import reinforce_tsp_attention as am

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    rows = []
    for network, num_instances in tqdm(NETWORKS.items()):
        checkpoint = am.load_checkpoint(str(common.BENCHMARK / "checkpoints" / f"{network}.pt"))
        agent = am.AttentionModel(checkpoint["args"].num_layers).eval()
        agent.load_state_dict(checkpoint["agent"])
        args = am.Args(env_id=f"{network}-uniform", eval_episodes=num_instances)
        _, instances = am.load_points(args)
        ways = {d: [partial(am.propose_tours, agent, d)] for d in ("multistart", "multistart_x8")}
        ways |= {f"sampling, {n} times": [partial(sample_tours, am, agent, n)] for n in STEPS}
        for n in STEPS:
            ways[f"active search, {n} steps"] = [partial(search_actively, am, agent, n, lr) for lr in LEARNING_RATES]
        for name, candidates in tqdm(ways.items(), leave=False):
            found = []
            for propose in candidates:
                torch.manual_seed(1)
                start = time.process_time()
                with torch.no_grad():
                    tours = am.tsp.find_shortest(propose, instances, torch.device("cpu"))
                seconds = time.process_time() - start
                gap = am.tsp.summarize({"x": tours}, instances)["eval/x_gap"]
                found.append({"gap": gap, "milliseconds": 1e3 * seconds / num_instances})
            best = min(found, key=lambda row: row["gap"])
            rows.append({"network": network, "instances": num_instances, "way": name} | best)
    return rows


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """What the pages show of the results: a line for each way, gap and time for each network."""
    networks = list(dict.fromkeys(row["network"] for row in results["rows"]))
    lines = []
    for way in dict.fromkeys(row["way"] for row in results["rows"]):
        rows = {row["network"]: row for row in results["rows"] if row["way"] == way}
        cells = [rows[network] for network in networks]
        lines.append([way, *(x for c in cells for x in (f"{c['gap']:.2f}", f"{c['milliseconds']:.0f}"))])
    head = " | ".join(["tours of an instance", *(f"{n}: gap, %: | CPU-ms:" for n in networks)])
    machine = common.machine_line([row["machine"] for row in results["rows"]])
    page = "reinforce_tsp_attention"
    return {(page, "tsp_active"): f"\n{common.make_table(head, lines)}\n\n{machine}\n"}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    common.save_rows("tsp_active", measure(), ("network", "way"))
