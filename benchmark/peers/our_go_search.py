"""Measure the search of algos/alphazero_go.py with a network that does nothing.

The result is simulations per CPU-second in --games parallel games, from positions after 20 random moves,
including the time to make the trees. The counterpart, openspiel_mcts.py, searches one game.
"""

import statistics
import time
from pathlib import Path

from benchmark.peers import go_engine, peer


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_parser(__doc__, "Go-9x9")
    parser.add_argument("--simulations", type=peer.count, default=800, help="simulations per move")
    parser.add_argument("--games", type=peer.count, default=256, help="that are searched side by side")
    parser.add_argument("--repeats", type=peer.count, default=5)
    return parser


def evaluate_nothing(boards, legal, sharpness: float = 0.0):
    """Return normal logits with a standard deviation of `sharpness`, and values near 1/2."""
    import torch

    noise = torch.rand(len(legal), device=legal.device)
    return sharpness * torch.randn(legal.shape, device=legal.device), 0.49 + 0.02 * noise


def measure_search(go, boards, evaluator, num_simulations: int, num_workers=1, c_puct=0.5, **options):
    """Return simulations per CPU-second and per wall-clock second of one search of all `boards`.

    `options` are those of Search, such as the scores.
    """
    import torch

    from algos import alphazero_go as az

    start = time.process_time(), time.perf_counter()
    args = az.Args(komi=7.5, c_puct=c_puct, num_workers=num_workers)
    az.Search(go, evaluator, boards, num_simulations, args, **options).run(num_simulations)
    if go.device.type == "cuda":
        torch.cuda.synchronize()
    total = len(boards.to_play) * num_simulations
    return total / (time.process_time() - start[0]), total / (time.perf_counter() - start[1])


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    size = go_engine.parse_size(args.env_id)
    from tqdm import tqdm

    from algos import alphazero_go as az

    run = peer.Run(args, Path(__file__).stem, None)
    go_engine.set_up_torch(args.seed)
    go = az.make_game(f"Go-{size}x{size}")
    boards, _ = go_engine.play_random_moves(go, args.games, 20)
    rates = []
    for _ in tqdm(range(args.repeats), unit="repeat"):
        rates.append(measure_search(go, boards, evaluate_nothing, args.simulations)[0])
    num_simulations = args.games * args.simulations * args.repeats
    run.finish(num_simulations, {"simulations_per_cpu_second": statistics.median(rates)})


if __name__ == "__main__":
    main()
