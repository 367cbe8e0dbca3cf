"""The trained networks in benchmark/checkpoints give what they gave when they were put there."""

import pytest
import torch
from helpers import ROOT
from scripts import load

from algos import alphazero_go as az
from algos import ppo_change_detection as cd
from algos import reinforce_tsp_attention as am
from envs_shared import change_pairs

STORED = {  # by torch 2.13.0
    "go5x5": [0.13532, 0.20822],
    "go5x5_default_9601": [0.28660, 0.14010],
    "go7x7": [0.59159, 0.72195],
    "go9x9": [0.50772, 0.40285],
    "haze": [0.10822, 0.59375],
    "tsp100": [7.6251, 7.5356, 7.6999],
    "tsp20": [4.3167, 4.3368, 4.3566],
    "tsp50": [6.6746, 6.8804, 6.7627],
}
# Of both sides in turn, from the empty board
MOVES = {5: [12, 7, 6, 8, 17], 7: [24, 17, 16, 18, 31, 9, 40], 9: [40, 22, 24, 56, 58]}


def run_tsp(args, weights):
    """Greedy lengths of tours through three sets of as many points as it was trained on."""
    agent = am.AttentionModel().eval()
    agent.load_state_dict(weights)
    num_points = am.draw_points(args["env_id"], 1).shape[1]
    steps = torch.arange(1, 3 * num_points + 1, dtype=torch.float64)
    points = torch.stack((steps * 2**0.5 % 1, steps * 3**0.5 % 1), -1).view(3, num_points, 2).float()
    tours, _, _ = am.rollout(points, agent(points), am.pick_likeliest)
    return am.tour_length(points, tours).squeeze(1)


def run_haze(args, weights):
    """Its probability of change and its looks, on average over pairs."""
    args = cd.Args(**args)
    agent = cd.Agent(args).eval()
    agent.load_state_dict(weights)
    pairs = torch.from_numpy(change_pairs.draw_haze(8, args.image_size, 2, 1)[0])
    probability, looks, _ = cd.predict(agent, args, pairs)
    return torch.stack((probability.mean(), looks.mean()))


def run_go(args, weights):
    """Its value for the side to move and the probability of its first choice after MOVES, in float32."""
    go, args = az.make_game(args["env_id"]), az.Args(**args | {"bf16": False})
    agent, boards = az.Agent(go, args).eval(), go.new(1)
    agent.load_state_dict(weights)
    for move in MOVES[go.size]:
        boards = go.play(boards, torch.tensor([move]))
    logits, value = agent(go.planes(boards, go.legal_moves(boards)))
    return torch.stack((value[0], logits.softmax(-1).max()))


@torch.no_grad()
@pytest.mark.parametrize("name", STORED)
def test_a_trained_network_gives_what_it_gave(name):
    run = {"t": run_tsp, "h": run_haze, "g": run_go}[name[0]]
    checkpoint = load(ROOT / "benchmark" / "checkpoints" / f"{name}.pt")
    found = run(checkpoint["args"], checkpoint["agent"])
    assert found.tolist() == pytest.approx(STORED[name], rel=1e-3)
