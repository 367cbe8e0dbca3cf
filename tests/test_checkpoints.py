"""The trained networks in benchmark/checkpoints give what they gave when tests/data/checkpoints.json was
written.

`python tests/test_checkpoints.py` writes that file, with what the networks give now.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from algos import alphazero_go as az
from algos import ppo_change_detection as cd
from algos import reinforce_tsp_attention as am
from envs_shared import change_pairs

FILES = sorted((ROOT / "benchmark" / "checkpoints").glob("*.pt"))
STORED = ROOT / "tests" / "data" / "checkpoints.json"
# Of both sides in turn, from the empty board
MOVES = {5: [12, 7, 6, 8, 17], 7: [24, 17, 16, 18, 31, 9, 40], 9: [40, 22, 24, 56, 58]}


@torch.no_grad()
def describe(path):
    """A few numbers that a trained network gives."""
    checkpoint = torch.load(path, weights_only=True)
    kind = re.match("tsp|haze|go", path.stem)[0]
    return {"tsp": describe_tsp, "haze": describe_haze, "go": describe_go}[kind](checkpoint)


def describe_tsp(checkpoint):
    """Greedy lengths of tours through three sets of as many points as it was trained on."""
    agent = am.AttentionModel().eval()
    agent.load_state_dict(checkpoint["agent"])
    num_points = am.draw_points(am.Args(**checkpoint["args"]).env_id, 1).shape[1]
    steps = torch.arange(1, 3 * num_points + 1, dtype=torch.float64)
    points = torch.stack((steps * 2**0.5 % 1, steps * 3**0.5 % 1), -1).view(3, num_points, 2).float()
    _, lengths = am.construct_tours(points, agent(points))
    return {"greedy_lengths": lengths.squeeze(1).tolist()}


def describe_haze(checkpoint):
    """Its probability of change and its looks, on average over pairs, and at the patches of the first one."""
    args = cd.Args(**checkpoint["args"])
    agent = cd.Agent(args)
    agent.load_state_dict(checkpoint["agent"])
    pairs = torch.from_numpy(change_pairs.draw_haze(8, args.image_size, 2, 1)[0])
    probability, looks, _ = cd.predict(agent.eval(), args, pairs)
    means = {"mean_probability": probability.mean().item(), "mean_looks": looks.mean().item()}
    return means | {"looks": looks[0].flatten().tolist()}


def describe_go(checkpoint):
    """Its policy over all moves and its value for the side to move, after MOVES, in float32."""
    args = az.Args(**checkpoint["args"])
    go, args.bf16 = az.make_game(args.env_id), False
    agent, boards = az.Agent(go, args), go.new(1)
    agent.load_state_dict(checkpoint["agent"])
    for move in MOVES[go.size]:
        boards = go.play(boards, torch.tensor([move]))
    logits, value = agent.eval()(go.planes(boards, go.legal_moves(boards)))
    return {"policy": logits.softmax(-1)[0].tolist(), "value": value.item()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_trained_network_gives_what_it_gave(path):
    found, stored = describe(path), json.loads(STORED.read_text())[path.stem]
    assert found.keys() == stored.keys()
    for name in stored:
        assert found[name] == pytest.approx(stored[name], rel=1e-3, abs=1e-5), name


if __name__ == "__main__":
    lines = [f"{json.dumps(path.stem)}: {json.dumps(describe(path))}" for path in FILES]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
