"""What the bare algorithm and the recipes for environments on the device must bring about."""

import contextlib
import io
import re
import subprocess
import sys
from collections import namedtuple
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from brute_force import compare_rollout
from device_runs import check_recorded, play
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from helpers import ROOT
from pretend_cuda import pretend_cuda
from scripts import import_file, load, read_losses, read_returns, run_edited, run_main

from algos import ppo
from docs import recipe

CPU = torch.device("cpu")
ON_DEVICE = "An environment on the device"
SAME_STEP = f"{ON_DEVICE} that resets in the same step"
TEXTS = dict(recipe.read_recipes("ppo").values())


# The bare algorithm


def train_bare(module, flags):
    """Train a bare copy as its last line does; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        module.train(module.tyro.cli(module.Args, args=flags.split()))
    return out.getvalue()


def check_bare(path, folder):
    """Losses, weights and scores are those of the whole script to the last bit; its run is gone."""
    names = r"\bRun\b|RANK|WORLD_SIZE|\btotal\(|\brun\.|gradients\(|fail\(|tqdm|wandb|SummaryWriter"
    assert not re.search(names, path.read_text())
    unused = "ruff check --isolated --select F".split()  # imports and variables
    subprocess.run([sys.executable, "-m", *unused, path], check=True)
    bare = import_file("bare_copy", path)
    flags = vars(bare.Args()).keys()
    assert all(re.search(rf"\bargs\.{flag}\b", path.read_text()) for flag in flags) and len(flags) > 15
    defaults = vars(ppo.Args())
    assert vars(bare.Args()) == {flag: defaults[flag] for flag in flags}
    common = "--num-envs 8 --num-steps 32 --total-timesteps 2000 --eval-episodes 3 --norm-obs --seed 66"
    more = " --env-id Pendulum-v1 --clip-vloss --ent-coef 0.01 --target-kl 0.02 --no-anneal-lr"
    for i, flags in enumerate((common, common + more)):
        check_bare_run(bare, flags, folder / f"whole_{i}")
    # As a program of its own, and with graphs on the simulated GPU
    short = "--num-envs 4 --num-steps 8 --num-minibatches 2 --total-timesteps 160 --eval-episodes 2"
    done = subprocess.run([sys.executable, path, *short.split()], capture_output=True, text=True, check=True)
    assert done.stdout == train_bare(bare, short)
    outs = []
    for has_graphs in (True, False):
        with mock.patch.object(bare, "CUDA_GRAPHS", has_graphs), pretend_cuda() as gpu:
            outs.append(train_bare(bare, short))
            assert (gpu.replays > 0) == has_graphs
    assert outs[0] == outs[1]


def check_bare_run(bare, flags, folder):
    """Compare the weights, and the printed losses and score, of both with the same flags."""
    with mock.patch.object(bare, "evaluate", wraps=bare.evaluate) as evaluate:
        *lines, last, _, _ = train_bare(bare, flags).splitlines()
    whole = run_main(ppo, folder, flags)
    weights = evaluate.call_args.args[0].state_dict()
    torch.testing.assert_close(dict(weights), load(whole.path / "checkpoint.pt")["agent"], rtol=0, atol=0)
    losses = read_losses(whole.path)
    for i, line in enumerate(lines):
        printed = dict(re.findall(r"(losses/\w+) ([^,]+)", line))
        assert printed.keys() == losses.keys() and line.startswith(f"step {losses['losses/entropy'][i][0]}: ")
        for name, value in printed.items():
            assert np.isclose(float(value), losses[name][i][1], rtol=1e-3)
    assert len(lines) == len(losses["losses/entropy"]) == 8
    assert np.isclose(float(last.removeprefix("eval/episodic_return: ")), read_returns(whole)[-1], rtol=1e-4)


# Environments on the device


Step = namedtuple("Step", "obs action reward next_obs terminated truncated")


class TorchLedger(VectorEnv):
    """Random rewards and endings; keeps a ledger of its true transitions and of the steps that only reset."""

    single_observation_space = Box(-np.inf, np.inf, (3,))

    def __init__(self, num_envs, device="cpu", is_same_step=False, actions=None):
        self.single_action_space, self.is_same_step = actions or Discrete(4, start=-1), is_same_step
        mode = AutoresetMode.SAME_STEP if is_same_step else AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.device = num_envs, torch.device(device)
        self.obs = torch.zeros(num_envs, 3, device=device)
        self.is_done = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.steps = [
            [] for _ in range(num_envs)
        ]  # of each environment, one after the other; None for a mere reset

    def reset(self, seed=None, options=None):
        self.obs.normal_()
        self.is_done.zero_()
        return self.obs.clone(), {}

    def step(self, actions):
        before, was_done = self.obs.clone(), self.is_done.clone()
        self.obs.normal_()
        rewards = torch.randn(self.num_envs, device=self.device) * ~was_done
        terminated, truncated = (torch.rand(2, self.num_envs, device=self.device) < 0.15) & ~was_done
        self.is_done.copy_(terminated | truncated)
        final_obs = self.obs.clone()
        for b in range(self.num_envs if self.device.type == "cpu" else 0):
            step = Step(before[b], actions[b], rewards[b], final_obs[b], terminated[b], truncated[b])
            self.steps[b].append(None if was_done[b] else Step(*(x.numpy().copy() for x in step)))
        if not self.is_same_step:
            return final_obs, rewards, terminated, truncated, {}
        self.obs.copy_(torch.where(self.is_done[:, None], torch.randn_like(self.obs), self.obs))
        # Where no episode ended, nothing may depend on this
        infos = {"final_obs": torch.where(self.is_done[:, None], final_obs, torch.nan)}
        self.is_done.zero_()
        return self.obs.clone(), rewards, terminated, truncated, infos


box = Box(np.float32([[-1], [0]]), np.float32([[1], [10]]))  # two dimensions, each with bounds of its own
for form, actions in (("", None), ("Box", box)):
    for mode, is_same_step in (("", False), ("SameStep", True)):
        kwargs = {"is_same_step": is_same_step, "actions": actions}
        gym.register(f"Torch{mode}{form}Ledger-v0", vector_entry_point=TorchLedger, kwargs=kwargs)


def check_transitions(module, env_id):
    """Rows, sums of episodes and advantages of rollouts follow from what the environments recorded."""
    args = module.Args(env_id=env_id, num_envs=5, num_steps=40, gamma=0.9, gae_lambda=0.8, norm_reward=False)
    envs = module.make_envs(args, args.num_envs)
    module.seed_everything(0)
    agent, storage = module.Agent(envs, False), module.RolloutStorage(envs, args.num_steps)
    assert all(isinstance(x, torch.Tensor) for x in vars(storage).values())
    storage.obs[-1], _ = envs.reset()
    seen = []  # observations that the policy acts on

    def act(obs):
        seen.append(obs.clone())
        return module.sample_actions(agent, obs)

    num_ends = num_resets = 0
    for _ in range(2):
        module.collect_rollout(agent, act, envs, storage, args.gamma, CPU)
        module.check_rollout(storage, env_id)
        assert torch.equal(torch.stack(seen[-40:]), storage.obs[:-1])
        batch = module.compute_batch(agent, storage, args, CPU)
        for b, steps in enumerate(envs.unwrapped.steps):
            is_reset = [step is None for step in steps[-40:]]
            assert (batch.weights[b::5] == 0).tolist() == is_reset
            num_resets += sum(is_reset)
            num_ends += compare_rollout(agent, storage, batch, b, [step for step in steps if step])
    is_same_step = "SameStep" in env_id
    assert num_ends > 40 and (num_resets == 0 if is_same_step else num_resets > 40)
    # The other autoreset mode is refused
    other, mode = ("TorchLedger-v0", "SAME_STEP") if is_same_step else ("TorchSameStepLedger-v0", "NEXT_STEP")
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
        module.make_envs(module.Args(env_id=other), 2)
    assert f"autoreset_mode'] must be {mode}" in err.getvalue()


def play_copy(path, folder, flags, has_graphs):
    module = import_file("edited_copy", path)
    return play(module, flags, folder / f"{has_graphs}", ("collect_rollout",), CUDA_GRAPHS=has_graphs)


DEVICE_FLAGS = "--num-envs 4 --num-steps 16 --update-epochs 2 --num-minibatches 2 --total-timesteps 384"
DEVICE_FLAGS += " --eval-episodes 2 --norm-obs --env-id "


def check_recording(path, folder, env_id, is_whole=True):
    """Recorded and eager runs are equal to the last bit, and the host waits in no rollout."""
    folder = folder / f"{env_id.replace(':', '-')}_{is_whole}"
    graphs, eager = (play_copy(path, folder, f"{DEVICE_FLAGS}{env_id}", x) for x in (True, False))
    check_recorded(graphs, eager)
    num_iterations = eager.checkpoint["progress"]["iteration"]
    waits = graphs.waits["collect_rollout"]
    assert num_iterations >= 6 and {*waits, *eager.waits["collect_rollout"]} == {0}
    # If a graph holds a whole rollout, its function runs twice: once eagerly, once to be recorded
    assert len(waits) == (2 if is_whole else num_iterations) and graphs.num_replays >= num_iterations


def check_dynamics(env_id):
    """In float64, states, rewards and ends are those of gymnasium's CartPole, and starts are in its range."""
    num_envs, is_same_step = 16, "SameStep" in env_id
    torch.manual_seed(66)
    envs = gym.make_vec(env_id, num_envs)
    envs.unwrapped.state = envs.unwrapped.state.double()
    obs, _ = envs.reset()
    twins = [gym.make("CartPole-v1") for _ in range(num_envs)]
    starts, num_ends = [], np.zeros(2, int)
    is_new, must_reset = np.ones(num_envs, bool), np.zeros(num_envs, bool)
    for _ in range(1100):
        for b in np.flatnonzero(is_new):
            twins[b].reset()
            twins[b].unwrapped.state = obs[b].tolist()
            starts.append(obs[b].tolist())
        # Half of the environments push against the pole's fall, half at random
        lean = (obs[:, 2] + obs[:, 3] > 0).long()
        actions = torch.where(torch.arange(num_envs) % 2 == 0, lean, torch.randint(2, (num_envs,)))
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        last_obs = infos["final_obs"] if is_same_step else obs
        for b, twin in enumerate(twins):
            found = [rewards[b].item(), terminated[b].item(), truncated[b].item()]
            if must_reset[b]:  # this step did nothing else
                assert found == [0, False, False]
                continue
            _, reward, *ends, _ = twin.step(actions[b].item())
            np.testing.assert_allclose(last_obs[b], twin.unwrapped.state, rtol=1e-9, atol=1e-12)
            assert found == [reward, *ends]
            num_ends += ends
        is_done = (terminated | truncated).numpy()
        is_new = is_done if is_same_step else must_reset
        must_reset = is_done & (not is_same_step)
    assert num_ends[0] > 200 and num_ends[1] >= 10
    starts = np.array(starts)
    assert np.abs(starts).max() < 0.05 and np.abs(starts.std(0) - 0.1 / 12**0.5).max() < 0.003


def check_device(path, folder):
    """CartPole is right and learned; rollouts hold the truth; a recorded rollout equals an eager one."""
    module = import_file("edited_copy", path)
    done = run_main(module, folder / "learned", "--env-id torch_cartpole:TorchCartPole-v0 --seed 66001")
    assert read_returns(done)[-1] >= 475
    check_dynamics("torch_cartpole:TorchCartPole-v0")
    for env_id in ("TorchLedger-v0", "TorchBoxLedger-v0"):
        check_transitions(module, env_id)
    for env_id in ("torch_cartpole:TorchCartPole-v0", "TorchLedger-v0", "TorchBoxLedger-v0"):
        check_recording(path, folder, env_id)
    # A simulator that cannot be recorded
    places = recipe.find_block(TEXTS[ON_DEVICE], "diff").split("@@\n")
    path.write_text(recipe.apply_diff((ROOT / "algos" / "ppo.py").read_text(), "@@\n".join(places[:-3])))
    check_recording(path, folder, "TorchLedger-v0", is_whole=False)


def check_same_step(path, folder):
    """After both diffs, in either order, true last observations are bootstrapped from; otherwise as above."""
    alone = path.read_text()
    script = (ROOT / "algos" / "ppo.py").read_text()
    diffs = [recipe.find_block(TEXTS[title], "diff") for title in (ON_DEVICE, SAME_STEP)]
    path.write_text(recipe.apply_diff(script, diffs[0]))
    patch = folder / "same_step.diff"
    (name,) = (name for name, (title, _) in recipe.read_recipes("ppo").items() if title == SAME_STEP)
    assert f"recipe.py ppo {name} --copy my_project/ppo.py" in TEXTS[SAME_STEP]
    recipe.main(["ppo", name, "--copy", str(path), "--output", str(patch)])
    subprocess.run(["git", "apply", patch.name], cwd=folder, check=True)
    assert path.read_text() == recipe.apply_diff(alone, diffs[0])
    (folder / "torch_cartpole.py").write_text(recipe.find_block(TEXTS[ON_DEVICE], "python"))
    env_id = "same_step_cartpole:SameStepCartPole-v0"
    done, module = run_edited(path, f"--env-id {env_id} --seed 66003")
    assert read_returns(done)[-1] >= 475
    check_dynamics(env_id)
    for task in ("TorchSameStepLedger-v0", "TorchSameStepBoxLedger-v0"):
        check_transitions(module, task)
    for task in (env_id, "TorchSameStepLedger-v0"):
        check_recording(path, folder, task)


DEVICE_CHECKS = {
    "The bare algorithm": check_bare,
    ON_DEVICE: check_device,
    SAME_STEP: check_same_step,
}
