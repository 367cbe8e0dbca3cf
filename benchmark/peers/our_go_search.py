"""The search of algos/alphazero_go.py with a network that does nothing, as benchmark/go_speed.py measures it.

Simulations per CPU-second of 256 games side by side, from positions after 20 random moves; the counterpart of
openspiel_mcts.py, which searches one game.
"""

import statistics
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


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    size = go_engine.parse_size(args.env_id, 9)  # smaller boards are full too soon
    import go_speed
    from tqdm import tqdm

    run = peer.Run(args, Path(__file__).stem)
    go_speed.set_up_torch(args.seed)
    go = go_speed.Go(size)
    boards, _ = go_speed.play_random_moves(go, NUM_GAMES, 20)
    rates = []
    for _ in tqdm(range(args.repeats), unit="repeat"):
        rates.append(go_speed.measure_search(go, boards, [go_speed.NullEvaluator(go.device)], args.simulations))
    metrics = {"simulations_per_cpu_second": statistics.median(rates)}
    commit = go_speed.common.describe_machine()["commit"]
    run.finish(next(iter(metrics)), metrics, NUM_GAMES * args.simulations * args.repeats, commit)


if __name__ == "__main__":
    main()
