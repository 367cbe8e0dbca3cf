"""OpenSpiel's Monte-Carlo tree search on Go: its speed, or a match against our engine.

--work search: simulations per CPU-second on one position, of the Python search by PUCT with a network that does nothing
(the counterpart of our_go_search.py) and of the C++ search with random rollouts; and moves per CPU-second of the rules.
--work match: the C++ search with random rollouts, so many --simulations for a move, against algos/alphazero_go.py.
Rules and score are those of envs_shared/go_tasks/rules.py.
"""

import random
import statistics
import time
from pathlib import Path

import go_engine
import peer

KOMI = 7.5  # of the position that is searched
C_PUCT, C_UCT = 1.25, 2.0


def make_parser():
    """Flags."""
    parser = peer.make_parser(__doc__, None)
    parser.add_argument("--work", choices=("search", "match"), default="search")
    parser.add_argument("--simulations", type=peer.at_least(1), default=800, help="of OpenSpiel, for a move")
    group = parser.add_argument_group("search")
    own = {"search": [group.add_argument("--repeats", type=peer.at_least(1), default=5).dest]}
    own["match"] = go_engine.add_match_flags(parser)
    parser.flags_of_work = own
    return parser


def search(args) -> None:
    """Measure the speed of both searches and of the rules."""
    import numpy as np
    import pyspiel
    from open_spiel.python.algorithms import mcts
    from tqdm import tqdm

    size, n = go_engine.parse_size(args.env_id, 9), args.simulations  # smaller boards are full too soon
    run = peer.Run(args, Path(__file__).stem)

    class NullEvaluator(mcts.Evaluator):
        """The same prior for all legal moves and a value of nothing, as cheap as can be."""

        def evaluate(self, state):
            return np.zeros(2)

        def prior(self, state):
            legal = state.legal_actions()
            return [(move, 1 / len(legal)) for move in legal]

    game = pyspiel.load_game("go", {"board_size": size, "komi": KOMI})
    state, generator = game.new_initial_state(), random.Random(args.seed)
    for _ in range(20):
        state.apply_action(generator.choice(state.legal_actions()[:-1]))
    rollouts = pyspiel.RandomRolloutEvaluator(1, args.seed)

    def search_in_python() -> int:
        mcts.MCTSBot(game, C_PUCT, n, NullEvaluator(), child_selection_fn=mcts.SearchNode.puct_value).step(state)
        return n

    def search_with_rollouts() -> int:
        pyspiel.MCTSBot(game, rollouts, C_PUCT, n, 1000, False, args.seed, False).step(state)
        return n

    def play_at_random() -> int:
        position, count = game.new_initial_state(), 0
        while not position.is_terminal():  # the legal moves of every position are asked for
            position.apply_action(generator.choice(position.legal_actions()))
            count += 1
        return count

    metrics, total = {}, 0
    bar = tqdm(total=3 * args.repeats, unit="repeat")
    for name, function in (
        ("simulations_per_cpu_second", search_in_python),
        ("rollout_simulations_per_cpu_second", search_with_rollouts),
        ("moves_per_cpu_second", play_at_random),
    ):
        rates = []
        for _ in range(args.repeats):
            start, count = time.process_time(), 0
            while count < 2000:
                count += function()
            rates.append(count / (time.process_time() - start))
            total += count
            bar.update()
        metrics[name] = statistics.median(rates)
    bar.close()
    run.finish("simulations_per_cpu_second", metrics, total, peer.get_version("open_spiel"))


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
            """Most visits of the moves that our rules allow: where a position recurs, OpenSpiel calls it a draw."""
            state = game.new_initial_state()
            boards = go.new(1)
            for move in moves:  # rows are counted from the other side there, which is all the same
                state.apply_action(move)
                boards = go.play(boards, torch.tensor([move]))
            legal = go.legal_moves(boards)[0].tolist()
            children = [child for child in bot.mcts_search(state).children if legal[child.action]]
            return max(children, key=lambda child: child.explore_count).action

        return choose_move

    others = [make_other(1 + args.seed * args.games + i) for i in range(args.games)]
    go_engine.play_match(args, Path(__file__).stem, peer.get_version("open_spiel"), go, player, others)


def main() -> None:
    """Command line."""
    parser = make_parser()
    args = parser.parse_args()
    for name in parser.flags_of_work["match" if args.work == "search" else "search"]:
        if getattr(args, name) != parser.get_default(name):
            peer.fail(f"--{name.replace('_', '-')} has no meaning with --work {args.work}")
    args.env_id = args.env_id or {"search": "Go-9x9", "match": "Go-5x5"}[args.work]
    {"search": search, "match": match}[args.work](args)


if __name__ == "__main__":
    main()
