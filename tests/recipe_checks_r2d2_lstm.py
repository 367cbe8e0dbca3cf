"""What the recipes for R2D2 must bring about."""

from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from probe_envs import OneStep
from scripts import import_file, load, read_returns, run_edited, run_main

RECALL = "--env-id probe_envs:Recall-v0 --num-steps 4 --hidden-size 32 --target-interval 20 --burn-in 2"
RECALL += " --buffer-size 2000 --total-timesteps 16000 --batch-size 96 --replay-ratio 4 --eval-episodes 100"
RECALL += " --learning-starts 500 --learn-length 3 --n-step 2"


def check_memory(path, state_size, *flags):
    """It remembers a cue that only stored states hold: 1 at best, 0 by guessing. Returns the module.

    The best of six evaluations counts, as a GRU may lose the cue again at this learning rate.
    """
    done, module = run_edited(path, RECALL, *flags)
    assert max(read_returns(done)) >= 0.98
    assert load(done.path / "checkpoint.pt")["replay"]["state"].shape == (2000, state_size, 32)
    return module


def make_network(module, **settings):
    args = module.Args(env_id="probe_envs:Recall-v0", **settings)
    torch.manual_seed(1)
    return module.QNetwork(module.make_envs(args, 1), args)


def check_gru(path, folder):
    """The memory holds with one vector as the state."""
    check_memory(path, 1)


def check_transformer(path, folder):
    """A step sees the newest 60 inputs, and neither older nor later ones; one at a time gives the same."""
    network = make_network(check_memory(path, 60, "--learning-rate 1e-3"), hidden_size=8)
    inputs = obs, *rest = torch.randn(2, 70, 2), torch.randint(-1, 2, (2, 70)), torch.randn(2, 70)
    state, steps = torch.zeros(2, 60, 8), []
    with torch.no_grad():
        q, _ = network(*inputs, state)
        for t in range(70):
            q_of_step, state = network(*(x[:, t : t + 1] for x in inputs), state)
            steps.append(q_of_step)
    torch.testing.assert_close(torch.cat(steps, 1), q, rtol=1e-4, atol=1e-5)
    for changed in (0, 40):
        other = obs.clone()
        other[:, changed] += 3
        with torch.no_grad():
            differs = (network(other, *rest, torch.zeros(2, 60, 8))[0] != q).any(2).any(0)
        assert differs.nonzero().flatten().tolist() == [*range(changed, min(changed + 60, 70))]


def check_layer_norm(path, folder):
    """The cell is torch's where the norms do nothing; forget gates open as promised."""
    network = make_network(check_memory(path, 2), hidden_size=3, memory_span=100.0)
    bias = network.core.from_input[1].bias
    torch.testing.assert_close(bias[3:6].sigmoid(), torch.tensor([1 / 2, 10 / 11, 100 / 101]))
    core, cell = network.core, torch.nn.LSTM(6, 3, batch_first=True)
    for norms in (core.from_input, core.from_state):
        norms[1] = torch.nn.Identity()
    core.norm = torch.nn.Identity()
    for linear, name in ((core.from_input[0], "ih"), (core.from_state[0], "hh")):
        linear.weight, linear.bias = getattr(cell, f"weight_{name}_l0"), getattr(cell, f"bias_{name}_l0")
    x, state = torch.randn(2, 5, 6), torch.randn(2, 2, 3)
    expected, (h, c) = cell(x, tuple(state.unsqueeze(1)))
    found, found_state = core(x, tuple(state))
    torch.testing.assert_close((found, *found_state), (expected, h[0], c[0]))


class Both(OneStep):
    """1 for naming whether the picture is bright, or the contrary if the vector says so; optimum 1."""

    observation_space = Dict(picture=Box(0, 255, (1, 36, 40), np.uint8), vector=Box(-1, 1, (2,)))

    def draw(self):
        self.bits = self.np_random.integers(2, size=2)
        pixels = self.np_random.integers(0, 100, (1, 36, 40)) + 100 * self.bits[0]
        return {"picture": pixels.astype(np.uint8), "vector": np.float32([self.bits[1], 0])}

    def score(self, action):
        return float(action == self.bits[0] ^ self.bits[1])


gym.register("Both-v0", Both, disable_env_checker=True)


def check_dict(path, folder):
    """Both parts are needed: 1 at best, 0.5 with one of them."""
    flags = "--env-id Both-v0 --num-steps 4 --learning-starts 300 --buffer-size 2000 --burn-in 0"
    flags += " --total-timesteps 4000 --learn-length 1 --n-step 1 --replay-ratio 4 --batch-size 32"
    flags += " --target-interval 20 --hidden-size 32 --eval-episodes 100 --learning-rate 1e-3 --gamma 0"
    done, _ = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.97


def check_epsilon(path, folder):
    """It falls from --epsilon to 0.05 in the first half; evaluations have 0."""
    module, found = import_file("edited_copy", path), []
    step = module.Player.step
    with mock.patch.object(module.Player, "step", lambda x: found.append(x.epsilons.tolist()) or step(x)):
        flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --total-timesteps 1000 --epsilon 1"
        flags += " --buffer-size 99 --eval-episodes 2 --hidden-size 8 --eval-interval 10000"
        run_main(module, path.parent / "runs", flags)
    values = np.array([x for x in found if len(x) == 4])
    assert all(x == [0.0] * 2 for x in found if len(x) == 2)
    # An iteration has 16 steps in each environment, of which each sixth one only resets it
    share_left = (1 - np.arange(len(values)) // 16 * 16 / 150).clip(0)
    np.testing.assert_allclose(values, np.tile(0.05 + 0.95 * share_left, (4, 1)).T, atol=0.02)


CHECKS = {
    "A GRU in place of the LSTM": check_gru,
    "A causal transformer in place of the LSTM": check_transformer,
    "An LSTM with layer norm": check_layer_norm,
    "Dict observations with a picture": check_dict,
    "One falling epsilon": check_epsilon,
}
