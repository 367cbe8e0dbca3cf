"""What the bare algorithm and the recipes for environments on the device must bring about."""

import contextlib
import io
import re
from functools import partial
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from brute_force import compare_rollout
from device_runs import check_recorded, play
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import ROOT
from probe_envs import Ledger, OtherForm
from scripts import import_file, load, read_losses, read_returns, run_main

from algos import ppo
from docs import recipe

TEXTS = dict(recipe.read_recipes("ppo").values())
ON_DEVICE = "An environment on the device"


def check_bare(path, folder):
    """Losses, weights and scores are those of the whole script to the last bit; its run is gone."""
    names = r"\bRun\b|RANK|WORLD_SIZE|\btotal\(|\brun\.|gradients\(|fail\(|tqdm|bar\.|wandb|SummaryWriter"
    names += r"|\bprocess(es)?\b|checkpoint|evaluate:"
    assert not re.search(names, path.read_text())
    bare = import_file("bare_copy", path)
    common = "--num-envs 8 --num-steps 32 --total-timesteps 2000 --eval-episodes 3 --norm-obs --seed 66"
    more = " --env-id Pendulum-v1 --clip-vloss --ent-coef 0.01 --target-kl 0.02 --no-anneal-lr"
    for i, flags in enumerate((common, common + more)):
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            mock.patch.object(bare, "evaluate", wraps=bare.evaluate) as evaluate,
        ):
            bare.train(bare.tyro.cli(bare.Args, args=flags.split()))
        *lines, last, _, _ = out.getvalue().splitlines()
        weights = evaluate.call_args.args[0].state_dict()
        whole = run_main(ppo, folder / f"whole_{i}", flags)
        torch.testing.assert_close(dict(weights), load(whole.path / "checkpoint.pt")["agent"], rtol=0, atol=0)
        score = float(last.removeprefix("eval/episodic_return: "))
        assert np.isclose(score, read_returns(whole)[-1], rtol=1e-4)
        losses = read_losses(whole.path)
        assert len(lines) == 8
        for j, line in enumerate(lines):
            printed = {name: float(x) for name, x in re.findall(r"(losses/\w+) ([^,]+)", line)}
            expected = {name: values[j][1] for name, values in losses.items()}
            torch.testing.assert_close(printed, expected, rtol=1e-3, atol=1e-8)


# Environments on the device


class OnDevice(OtherForm):
    """Vector environments of tensors, whose last observations are NaN where no episode ended."""

    device = "cpu"

    def step(self, actions):
        *outcome, infos = super().step(actions.numpy())
        final_obs = torch.full((self.num_envs, 3), torch.nan)
        for b in np.flatnonzero(infos.get("_final_obs", [])):
            final_obs[b] = torch.as_tensor(infos["final_obs"][b])
        return *outcome, {"final_obs": final_obs}


def make_ledgers(mode, num_envs, **_):
    return OnDevice(SyncVectorEnv([Ledger] * num_envs, autoreset_mode=AutoresetMode(mode)), mode)


for mode in ("NextStep", "SameStep"):
    gym.register(f"Device{mode}Ledger-v0", vector_entry_point=partial(make_ledgers, mode))


def check_transitions(module, mode):
    """Rows, sums of episodes and advantages of rollouts follow from what the environments recorded."""
    args = module.Args(env_id=f"Device{mode}Ledger-v0", num_envs=5, num_steps=40, norm_reward=False)
    args.gamma, args.gae_lambda = 0.9, 0.8
    envs = module.make_envs(args, args.num_envs)
    module.seed_everything(0)
    agent, storage = module.Agent(envs, False), module.RolloutStorage(envs, args.num_steps)
    assert all(isinstance(x, torch.Tensor) for x in vars(storage).values())
    storage.obs[-1], _ = envs.reset(seed=0)
    num_ends = 0
    for _ in range(2):
        act = partial(module.sample_actions, agent)
        module.collect_rollout(agent, act, envs, storage, args.gamma, "cpu")
        module.check_finite(args.env_id, storage.obs, storage.rewards)
        batch = module.compute_batch(agent, storage, args, "cpu")
        assert (len(batch.obs) == 200) == (mode == "SameStep")
        for b, env in enumerate(envs.unwrapped.envs):
            num_ends += compare_rollout(agent, storage, batch, b, [*chain(*env.episodes)])
    assert num_ends > 40


def check_actions(module):
    """Actions in a Box, which has bounds of its own in each dimension, are those of the script."""
    box = Box(np.float32([[-1], [0]]), np.float32([[1], [np.inf]]))
    envs, actions = SimpleNamespace(single_action_space=box, single_observation_space=box), torch.randn(9, 2)
    found, expected = (x.Agent(envs, False).to_env(actions) for x in (module, ppo))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def check_recording(module, folder, env_id):
    """Recorded and eager runs are equal to the last bit, and the host waits in no rollout."""
    flags = "--num-envs 4 --num-steps 16 --update-epochs 2 --num-minibatches 2 --total-timesteps 384"
    flags += f" --eval-episodes 2 --norm-obs --env-id {env_id}"
    watched = ("collect_rollout",)
    runs = [play(module, flags, folder / f"{x}", watched, CUDA_GRAPHS=x) for x in (True, False)]
    check_recorded(*runs)
    waits, eager_waits = (x.waits["collect_rollout"] for x in runs)
    assert {*waits, *eager_waits} == {0}
    # A graph holds a whole rollout: its function runs twice, once eagerly, once to be recorded
    assert len(waits) == 2 < 6 <= len(eager_waits)


def check_dynamics(env_id):
    """In float64, a step from any state is that of gymnasium's CartPole; then episodes begin near 0."""
    torch.manual_seed(66)
    envs, twin = gym.make_vec(env_id, 200).unwrapped, gym.make("CartPole-v1").unwrapped
    twin.reset()
    envs.reset()
    envs.state = torch.randn(200, 4).double() / 5
    before, actions = envs.state.clone(), torch.randint(2, (200,))
    obs, rewards, terminated, truncated, infos = envs.step(actions)
    last_obs = infos.get("final_obs", obs)
    for b in range(200):
        twin.state, twin.steps_beyond_terminated = before[b].tolist(), None
        _, *expected = twin.step(actions[b].item())
        np.testing.assert_allclose(last_obs[b], twin.state, rtol=1e-9, atol=1e-12)
        assert [rewards[b], terminated[b], truncated[b]] == expected[:3]
    if "SameStep" not in env_id:
        obs, rewards, *_ = envs.step(actions)  # which does nothing else where an episode ended
        assert torch.equal(rewards == 0, terminated)
    assert obs[terminated].abs().max() <= 0.05 and 10 < terminated.sum() < 190


def check_all(path, folder, cartpole, mode):
    """CartPole is right and learned; rollouts hold the truth; a recorded rollout equals an eager one."""
    module = import_file("edited_copy", path)
    done = run_main(module, folder / "learned", f"--env-id {cartpole} --seed 66001")
    assert 475 <= read_returns(done)[-1] <= 500
    check_dynamics(cartpole)
    check_transitions(module, mode)
    check_actions(module)
    check_recording(module, folder, cartpole)


def check_device(path, folder):
    check_all(path, folder, "torch_cartpole:TorchCartPole-v0", "NextStep")


def check_same_step(path, folder):
    """After both diffs, true last observations are bootstrapped from."""
    text = (ROOT / "algos" / "ppo.py").read_text()
    for title in (ON_DEVICE, f"{ON_DEVICE} that resets in the same step"):
        text = recipe.apply_diff(text, recipe.find_block(TEXTS[title], "diff"))
    path.write_text(text)
    (folder / "torch_cartpole.py").write_text(recipe.find_block(TEXTS[ON_DEVICE], "python"))
    check_all(path, folder, "same_step_cartpole:SameStepCartPole-v0", "SameStep")
