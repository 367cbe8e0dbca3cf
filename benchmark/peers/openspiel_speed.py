"""OpenSpiel's Monte-Carlo tree search on 9x9 Go, in an environment of its own: simulations per CPU-second as JSON."""

import json
import random
import sys
import time

import numpy as np
import pyspiel
from open_spiel.python.algorithms import mcts


class NullEvaluator(mcts.Evaluator):
    """The same prior for all legal moves and a value of nothing, as cheap as can be."""

    def evaluate(self, state):
        return np.zeros(2)

    def prior(self, state):
        legal = state.legal_actions()
        return [(move, 1 / len(legal)) for move in legal]


def measure(make_bot, state, num_simulations: int, num_repeats: int) -> list[float]:
    """Simulations per CPU-second, by repeat."""
    rates = []
    for _ in range(num_repeats):
        bot = make_bot(num_simulations)
        start = time.process_time()
        bot.step(state)
        rates.append(num_simulations / (time.process_time() - start))
    return rates


game = pyspiel.load_game("go(board_size=9,komi=7.5)")
state, generator = game.new_initial_state(), random.Random(0)
for _ in range(20):
    state.apply_action(generator.choice(state.legal_actions()[:-1]))
rollouts = pyspiel.RandomRolloutEvaluator(1, 0)


def make_python(n):
    return mcts.MCTSBot(game, 1.25, n, NullEvaluator(), child_selection_fn=mcts.SearchNode.puct_value)


def make_cpp(n):
    return pyspiel.MCTSBot(game, rollouts, 1.25, n, 1000, False, 0, False)


repeats = int(sys.argv[1])
results = {}
for n in (64, 800):
    results[f"python, {n}"] = measure(make_python, state, n, repeats * 2000 // n)
    results[f"C++ with rollouts, {n}"] = measure(make_cpp, state, n, repeats * 2000 // n)

# Steps of games with the legal moves of every position: the rules alone
results["rules"] = []
for _ in range(repeats):
    start, count = time.process_time(), 0
    while count < 5000:
        position = game.new_initial_state()
        while not position.is_terminal():
            position.apply_action(generator.choice(position.legal_actions()))
            count += 1
    results["rules"].append(count / (time.process_time() - start))
print(json.dumps(results))
