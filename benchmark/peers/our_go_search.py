"""The search of algos/alphazero_go.py with a network that does nothing.

Simulations per CPU-second of 256 games side by side, from positions after 20 random moves; the counterpart of
openspiel_mcts.py, which searches one game.
"""

import statistics
import time
from pathlib import Path

import go_engine
import peer

NUM_GAMES = 256


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, "Go-9x9")
    parser.add_argument("--simulations", type=peer.at_least(1), default=800, help="for a move")
    parser.add_argument("--repeats", type=peer.at_least(1), default=5)
    return parser


def set_up_torch(seed: int) -> None:
    """One thread, and the settings of alphazero_go.py."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    torch.manual_seed(seed)


class NullEvaluator:
    """Normal logits of deviation `sharpness`, equal ones for 0, and values near 1/2."""

    def __init__(self, device, sharpness: float = 0.0):
        self.device = device
        self.sharpness = sharpness

    def __call__(self, boards, legal):
        import torch

        noise = torch.rand(len(legal), device=self.device)
        logits = self.sharpness * torch.randn(legal.shape, device=self.device)
        return logits if self.sharpness else torch.zeros_like(logits), 0.49 + 0.02 * noise


def measure_search(go, boards, evaluators: list, num_simulations: int, num_slots: int = 1) -> tuple[float, float]:
    """Simulations per CPU-second and per second of the clock of a search of all `boards` at once."""
    import torch

    from algos import alphazero_go as az

    tree = az.Search(go, evaluators[:num_slots], len(boards.to_play), num_simulations, az.Args(komi=7.5))
    tree.reset(boards)
    start = time.process_time(), time.perf_counter()
    tree.run(num_simulations)
    if go.device.type == "cuda":
        torch.cuda.synchronize()
    total = len(boards.to_play) * num_simulations
    return total / (time.process_time() - start[0]), total / (time.perf_counter() - start[1])


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    size = go_engine.parse_size(args.env_id, 9)  # smaller boards are full too soon
    from tqdm import tqdm

    from algos import alphazero_go as az
    from envs_shared.go_tasks.match import play_random_moves

    run = peer.Run(args, Path(__file__).stem)
    set_up_torch(args.seed)
    go = az.Go(size)
    boards, _ = play_random_moves(go, NUM_GAMES, 20)
    rates = []
    for _ in tqdm(range(args.repeats), unit="repeat"):
        rates.append(measure_search(go, boards, [NullEvaluator(go.device)], args.simulations)[0])
    metrics = {"simulations_per_cpu_second": statistics.median(rates)}
    run.finish(next(iter(metrics)), metrics, NUM_GAMES * args.simulations * args.repeats, None)


if __name__ == "__main__":
    main()
