"""What the recipes for R2D2 must bring about."""

from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from helpers import ROOT, read_scalars
from probe_envs import Fixed, OneStep
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


def check_noisy(path, folder):
    """Without random actions, the network explores, and evaluations do not; the task is learned."""
    flags = "--env-id probe_envs:Shifted-v0 --total-timesteps 6000 --epsilon 0 --num-steps 4 --hidden-size 32"
    flags += " --learning-starts 500 --buffer-size 2000 --burn-in 0 --learn-length 1 --replay-ratio 2"
    flags += " --batch-size 32 --target-interval 20 --eval-episodes 100"
    done, module = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.98
    args = module.Args(env_id="probe_envs:Endless-v0", eval_episodes=2)
    agent = module.QNetwork(module.make_envs(args, 1), args)
    inputs = torch.ones(1, 1, 1), torch.zeros(1, 1).long(), torch.zeros(1, 1), torch.zeros(1, 2, 64)
    actions = {agent(*inputs)[0].argmax().item() for _ in range(200)}
    assert actions == {0, 1} and not agent.training
    found = []
    agent.register_forward_hook(lambda *x: found.append(x[2][0]))
    module.evaluate(agent, args, torch.device("cpu"), 2)
    for name, x in agent.named_parameters():
        if name.endswith("_std"):
            x.data.zero_()
    module.evaluate(agent, args, torch.device("cpu"), 2)
    assert len(found) == 20 and module.NoisyLinear.noise == 1
    torch.testing.assert_close(found[:10], found[10:])  # no noise in evaluations


def check_bonus(path, folder):
    """Every observation is new and earns 0.1: in the replay and its scale, in no score and no input."""
    flags = (
        "--env-id probe_envs:Fixed-v0 --num-envs 4 --total-timesteps 600 --buffer-size 400 --hidden-size 8"
    )
    flags += " --learning-starts 100 --burn-in 2 --learn-length 3 --batch-size 30 --eval-episodes 4"
    Fixed.made = 0
    done, _ = run_edited(path, flags)
    checkpoint = load(done.path / "checkpoint.pt")
    num_steps, replay = checkpoint["progress"]["step"], checkpoint["replay"]
    size = replay["num_added"]
    assert 100 < size < 400
    ranks = replay["last_reward"][:size]
    is_real = replay["last_action"][:size] >= 0
    torch.testing.assert_close(replay["reward"][:size], ranks + 0.1 * is_real)
    assert {*ranks[is_real].tolist()} == {0.0, 1.0, 2.0, 3.0}
    expected = num_steps, num_steps / 4 * sum((rank + 0.1) ** 2 for rank in range(4))
    assert replay["reward_sums"].tolist() == pytest.approx(expected, rel=0.02)
    scalars = read_scalars(done.path)
    assert {x for _, x in scalars["charts/episodic_return"]} == {12.5}  # of ranks 2 and 3
    assert all(x % 1.25 == 0 for _, x in scalars["eval/episodic_return"])


def check_atari(path, folder):
    """Grey images of one frame go through convolutions; rewards above 1 are not clipped."""
    flags = (
        "--env-id ale_py:ALE/MsPacman-v5 --num-envs 2 --num-steps 60 --total-timesteps 240 --hidden-size 8"
    )
    flags += " --burn-in 2 --learn-length 4 --batch-size 8 --buffer-size 200 --eval-episodes 0"
    done, module = run_edited(path, flags, "--learning-starts 0 --replay-ratio 1 --epsilon 1")
    replay = load(done.path / "checkpoint.pt")["replay"]
    assert replay["obs"].shape[2:] == (1, 84, 84) and replay["obs"].dtype == torch.uint8
    assert replay["last_reward"].max() == 10
    args = module.Args(env_id="ale_py:ALE/MsPacman-v5")
    agent = module.QNetwork(module.make_envs(args, 1), args)
    assert agent.is_image and agent.encoder[0].in_channels == 1


def check_minigrid(path, folder):
    """One-hot cells and the direction, which a turn changes, as bits. The file of the repository is equal."""
    text = (path.parent / "minigrid_one_hot.py").read_text()
    assert text == (ROOT / "envs_shared" / "minigrid_one_hot.py").read_text()
    flags = (
        "--env-id minigrid_one_hot:OneHot-MiniGrid-MemoryS7-v0 --num-envs 2 --num-steps 40 --hidden-size 8"
    )
    flags += " --total-timesteps 160 --buffer-size 99 --burn-in 2 --learn-length 4 --batch-size 8"
    done, module = run_edited(path, flags, "--eval-episodes 0 --learning-starts 0 --replay-ratio 1")
    replay = load(done.path / "checkpoint.pt")["replay"]
    assert replay["obs"].shape[2:] == (984,) and replay["obs"].dtype == torch.uint8
    env = gym.make("minigrid_one_hot:OneHot-MiniGrid-MemoryS7-v0")
    obs, _ = env.reset(seed=1)
    for _ in range(5):
        direction = env.unwrapped.dir_vec.tolist(), env.unwrapped.agent_dir
        np.testing.assert_array_equal(obs[:4], np.eye(4)[direction[1]])
        plain = env.unwrapped.gen_obs()["image"].reshape(49, 3)
        cells = obs[4:].reshape(49, 20)
        assert (cells.sum(1) == 3).all() and (cells[:, :11].argmax(1) == plain[:, 0]).all()
        obs, *_ = env.step(0)  # to the left


CHECKS = {
    "A GRU in place of the LSTM": check_gru,
    "A causal transformer in place of the LSTM": check_transformer,
    "An LSTM with layer norm": check_layer_norm,
    "Dict observations with a picture": check_dict,
    "One falling epsilon": check_epsilon,
    "Noisy networks": check_noisy,
    "A bonus for rare observations": check_bonus,
    "Atari": check_atari,
    "MiniGrid": check_minigrid,
}
