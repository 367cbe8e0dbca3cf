"""What the recipes for PPO must bring about."""

import sys

import gymnasium as gym
import numpy as np
import torch
from conftest import read_scalars
from gymnasium.spaces import Box, Discrete
from probe_envs import Task
from recipe_checks_ppo_device import DEVICE_CHECKS
from test_contract import load, run_edited


def read_returns(run):
    return [value for _, value in read_scalars(run.path)["eval/episodic_return"]]


class Masked(Task):
    """Three numbers and a mask of four actions, of which two are allowed: 1 for the one with the smaller index."""

    observation_space, action_space, length = Box(-np.inf, np.inf, (7,)), Discrete(4), 5

    def observe(self):
        self.last_mask = getattr(self, "mask", None)
        self.mask = np.zeros(4, np.float32)
        self.mask[self.np_random.choice(4, 2, replace=False)] = 1
        return np.concatenate((self.np_random.normal(50, 9, 3), self.mask)).astype(np.float32)

    def score(self, action):
        assert self.last_mask[action], "a forbidden action"
        return float(action == self.last_mask.argmax())


def check_cnn(path, folder):
    """The brighter quarter of an image is named: 1 at best, 0.25 at random."""
    flags = "--env-id probe_envs:Quarters-v0 --learning-rate 1e-3 --num-steps 32 --total-timesteps 1500"
    done, module = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.9
    assert load(done.path / "best.pt")["agent"]["actor.0.weight"].shape == (16, 1, 3, 3)


def check_atari(path, folder):
    """Pong is played to its end, an evaluated return is a difference of points, and all weights are trained."""
    flags = "--env-id ALE/Pong-v5 --num-envs 2 --num-steps 8 --total-timesteps 16 --eval-episodes 1 --no-norm-reward"
    done, module = run_edited(path, flags)
    (returns,) = read_returns(done)
    assert -21 <= returns <= 21 and returns == int(returns)
    agent = load(done.path / "best.pt")["agent"]
    assert agent["actor.0.weight"].shape == (32, 4, 8, 8) and agent["critic.9.weight"].shape == (1, 512)
    images = torch.full((1, 4, 84, 84), 255.0)
    envs = module.make_envs(module.Args(env_id="ALE/Pong-v5"), 1)
    assert module.Agent(envs, False).normalize(images).max() == 1


def check_masks(path, folder):
    """No forbidden action is ever taken, and the best allowed one is learned, with normalized observations."""
    gym.register("Masked-v0", Masked)
    done, _ = run_edited(path, "--env-id Masked-v0 --norm-obs --total-timesteps 12000 --eval-episodes 20")
    assert read_returns(done)[-1] >= 4.9  # of 5; at random 2.5


def check_frozen(path, folder):
    """The encoder is that of the file to the end, and the rest is trained."""
    torch.manual_seed(3)
    encoder = torch.nn.Linear(4, 64)
    torch.save(encoder.state_dict(), folder / "encoder.pt")
    done, _ = run_edited(path, "--num-envs 8 --num-steps 32 --total-timesteps 1024 --eval-episodes 0")
    agent = load(done.path / "checkpoint.pt")["agent"]
    assert torch.equal(agent["actor.1.weight"], encoder.weight)
    assert agent["actor.5.bias"].abs().max() > 0 and agent["critic.1.bias"].abs().max() > 0


def check_frames(path, folder):
    """The card of three steps ago is named in nearly every step: 1 at best, -0.5 at random."""
    flags = "--env-id popgym:popgym-RepeatPreviousEasy-v0 --gamma 0.5 --total-timesteps 40000"
    done, _ = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.9


def check_acting(path, folder):
    """The lines give the action that the policy of best.pt finds most likely."""
    done, module = run_edited(path, "--num-envs 8 --num-steps 32 --total-timesteps 1024 --eval-episodes 2")
    (done.path / "best.pt").rename(folder / "best.pt")
    sys.modules["ppo"] = module
    names = {}
    exec((folder / "recipe.py").read_text(), names)
    weights = load(folder / "best.pt")["agent"]
    x = torch.tensor([0.0, 0.1, 0.02, -0.1])
    for i in (1, 3, 5):
        x = weights[f"actor.{i}.weight"] @ x + weights[f"actor.{i}.bias"]
        x = x.tanh() if i < 5 else x
    assert names["actions"].tolist() == [x.argmax().item()]


CHECKS = {
    "A CNN for image grids": check_cnn,
    "Atari with the usual preprocessing": check_atari,
    "Action masks": check_masks,
    "A frozen, pretrained encoder": check_frozen,
    "Stacked frames": check_frames,
    "Acting without an environment": check_acting,
    **DEVICE_CHECKS,
}
