"""The vector environments: saved states that continue exactly, and errors of one line."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from envs_shared import gym_vector
from envs_shared.gym_vector import make_vec


def play(envs, num_steps, seed):
    """Rows [num_steps, B, columns] under random actions."""
    rng = np.random.default_rng(seed)
    space = envs.single_action_space
    rows = []
    for _ in range(num_steps):
        if isinstance(space, gym.spaces.Box):
            actions = rng.uniform(-2, 2, (envs.num_envs, *space.shape))
        else:
            actions = rng.integers(0, space.n, (envs.num_envs, 1))
        rows.append(envs.step(torch.tensor(actions)).clone())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [
        ("CartPole-v1", "auto"),
        ("CartPole-v1", "sync"),
        ("CartPole-v1", "torch"),
        ("Pendulum-v1", "auto"),
        ("Acrobot-v1", "auto"),
        ("MountainCarContinuous-v0", "auto"),
        ("probe_envs:SameStepFixed-v0", "auto"),
    ],
)
def test_a_saved_state_continues_bit_for_bit(tmp_path, env_id, vectorization):
    envs, _ = make_vec(env_id, 3, 1, vectorization)
    play(envs, 60, seed=1)
    torch.save({"envs": envs.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "state.pt")
    expected = play(envs, 300, seed=2)
    assert expected.std(0).sum() > 0
    other, _ = make_vec(env_id, 3, 99, vectorization)
    play(other, 7, seed=3)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(saved["envs"])
    torch.set_rng_state(saved["rng"])
    torch.testing.assert_close(play(other, 300, seed=2), expected, rtol=0, atol=0)


def test_state_that_is_not_plain_data_is_reported_not_guessed():
    assert make_vec("probe_envs:Opaque-v0", 2, 1)[0].state_dict() is None
    assert make_vec("CartPole-v1", 2, 1, "async")[0].state_dict() is None
    assert make_vec("probe_envs:Views-v0", 2, 1)[0].state_dict() is None


def test_saving_is_a_copy():
    envs, _ = make_vec("CartPole-v1", 2, 1)
    state = envs.state_dict()["env"]["state"].clone()
    kept = envs.state_dict()
    play(envs, 5, 1)
    torch.testing.assert_close(kept["env"]["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v9", "CartPole"),
        ("NoSuchTask-v0", "NoSuchTask"),
        ("a_missing_module:Task-v0", "pip install a_missing_module"),
        ("ALE/Pong-v5", "pip install ale-py"),
        ("Ant-v3", "gymnasium-robotics"),
        ("probe_envs:NeedsMissing-v0", "pip install a_package_that_is_missing"),
        ("probe_envs:Unsupporteddict-v0", "Dict observations"),
        ("probe_envs:Unsupportedimage-v0", "image observations"),
        ("probe_envs:Unsupportedmultibinary-v0", "MultiBinary actions"),
        ("probe_envs:DisabledAutoreset-v0", "DISABLED"),
    ],
)
def test_what_cannot_be_made_is_one_clear_error(env_id, message):
    with pytest.raises(ValueError, match=message):
        make_vec(env_id, 2, 1)


def test_vectorizations_agree():
    """The same seeds and actions give the same rows one after another and in subprocesses."""
    rows = [play(make_vec("Pendulum-v1", 3, 5, mode)[0], 210, 1) for mode in ("auto", "sync", "async")]
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=0)
    torch.testing.assert_close(rows[0], rows[2], rtol=0, atol=0)
    assert (rows[0][:, :, 3 + gym_vector.EPISODE_LENGTH] == 200).sum() == 3


def test_the_torch_port_refuses_other_tasks():
    with pytest.raises(ValueError, match="CartPole-v1 alone"):
        make_vec("Pendulum-v1", 2, 1, "torch")
