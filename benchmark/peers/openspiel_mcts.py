"""OpenSpiel's Monte-Carlo tree search on Go: its speed, or a match against our engine.

--work search: simulations per CPU-second, on one position, of the Python search by PUCT with a network that
does nothing; the counterpart of our_go_search.py.
--work rollouts: the same of the C++ search, which Python cannot give a network: values are of one game of
uniformly random moves each. The counterpart is in benchmark/studies/go_search.py.
--work match: the C++ search with random rollouts and --simulations per move, against algos/alphazero_go.py.
Rules and score of the match are those of envs_shared/go.py.
"""

import math
import random
import statistics
import time
from pathlib import Path

from benchmark.peers import go_engine, peer

C_PUCT, C_UCT = 1.25, 2.0


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_parser(__doc__, None)
    parser.add_argument("--work", choices=("search", "rollouts", "match"), default="search")
    parser.add_argument("--simulations", type=peer.count, default=800, help="per move of OpenSpiel")
    parser.add_argument("--repeats", type=peer.count, default=5, help="repeats of --work search and rollouts")
    go_engine.add_match_flags(parser)
    return parser


def search(args) -> None:
    """Measure the speed of the search, in Python or in C++."""
    import numpy as np
    import pyspiel
    from open_spiel.python.algorithms import mcts
    from tqdm import tqdm

    size, n = go_engine.parse_size(args.env_id), args.simulations
    run = peer.Run(args, Path(__file__).stem, peer.get_version("open_spiel"))

    class NullEvaluator(mcts.Evaluator):
        """The same prior for all legal moves and a value of zero, which is as cheap as possible."""

        def evaluate(self, state):
            return np.zeros(2)

        def prior(self, state):
            legal = state.legal_actions()
            return [(move, 1 / len(legal)) for move in legal]

    game = pyspiel.load_game("go", {"board_size": size, "komi": 7.5})
    state, generator = game.new_initial_state(), random.Random(args.seed)
    for _ in range(20):
        state.apply_action(generator.choice(state.legal_actions()[:-1]))

    def make_bot():
        if args.work == "rollouts":
            rollouts = pyspiel.RandomRolloutEvaluator(1, generator.randrange(2**31))
            return pyspiel.MCTSBot(game, rollouts, C_UCT, n, 1000, False, args.seed, False)
        return mcts.MCTSBot(game, C_PUCT, n, NullEvaluator(), child_selection_fn=mcts.SearchNode.puct_value)

    num_searches, rates = math.ceil(2000 / n), []
    for _ in tqdm(range(args.repeats), unit="repeat"):
        start = time.process_time()
        for _ in range(num_searches):
            make_bot().step(state)
        rates.append(num_searches * n / (time.process_time() - start))
    run.finish(args.repeats * num_searches * n, {"simulations_per_cpu_second": statistics.median(rates)})


def match(args) -> None:
    """Play against our engine."""
    import pyspiel
    import torch

    go, player = go_engine.load_engine(args)
    game = pyspiel.load_game("go", {"board_size": go.size, "komi": args.komi})

    def make_other(seed: int):
        rollouts = pyspiel.RandomRolloutEvaluator(1, seed)
        bot = pyspiel.MCTSBot(game, rollouts, C_UCT, args.simulations, 1000, False, seed, False)

        def choose_move(moves: list[int]) -> int:
            """Return the most visited move that our rules allow; OpenSpiel calls a recurring position a
            draw."""
            state = game.new_initial_state()
            boards = go.new(1)
            for move in moves:  # OpenSpiel counts rows from the other side, which is a symmetry
                state.apply_action(move)
                boards = go.play(boards, torch.tensor([move]))
            legal = go.legal_moves(boards)[0].tolist()
            children = [child for child in bot.mcts_search(state).children if legal[child.action]]
            return max(children, key=lambda child: child.explore_count).action

        return choose_move

    others = [make_other(1 + args.seed * args.games + i) for i in range(args.games)]
    go_engine.play_match(args, Path(__file__).stem, peer.get_version("open_spiel"), go, player, others)


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    args.env_id = args.env_id or ("Go-5x5" if args.work == "match" else "Go-9x9")
    (match if args.work == "match" else search)(args)


if __name__ == "__main__":
    main()
