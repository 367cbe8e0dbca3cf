"""What needs packages that not everybody has: MuJoCo, MiniGrid, Atari, and a policy run by onnxruntime."""

import numpy as np
import pytest
import torch
from helpers import read_scalars
from scripts import CASES, load, read_progress, run_main

from algos import ppo
from algos import r2d2_lstm as r2d2
from docs import recipe

pytestmark = pytest.mark.slow
R2D2 = CASES["r2d2_lstm"].quick


@pytest.mark.parametrize("env_id", ["probe_envs:FarAim-v0", "probe_envs:Shifted-v0"])
def test_onnxruntime_gives_the_actions_of_the_agent(env_id, tmp_path, monkeypatch):
    """The recipe's program exports it: actions scaled to a Box, and discrete ones that start at -1."""
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs pip install {name}")
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "ppo", ppo)
    args = ppo.Args(env_id=env_id, norm_obs=True)
    envs = ppo.make_envs(args, 1)
    torch.manual_seed(0)
    agent = ppo.Agent(envs, args.norm_obs).eval()
    shape = envs.single_observation_space.shape
    agent.normalize.update(torch.randn(50, *shape) * 3 + 2)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)  # so that actions differ from row to row
    torch.save({"args": {"env_id": env_id, "norm_obs": True}, "agent": agent.state_dict()}, "best.pt")
    bodies = {title: body for title, body in recipe.read_recipes("ppo").values()}
    program = recipe.find_block(bodies["Export to ONNX and TorchScript"], "python")
    exec(program, {"__name__": "export"})
    session = onnxruntime.InferenceSession("policy.onnx")
    for num_rows in (1, 7):  # the program traced two
        obs = torch.randn(num_rows, *shape) * 3 + 2
        (found,) = session.run(["actions"], {"obs": obs.numpy()})
        expected = agent.to_env(agent.get_distribution(agent.normalize(obs)).mode)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.unique(found).size > 1


def test_ppo_trains_on_mujoco(tmp_path):
    """For some steps: 17 numbers in, six components of actions out; losses are finite, as the run ends."""
    pytest.importorskip("mujoco")
    flags = "--env-id HalfCheetah-v5 --norm-obs --num-envs 2 --num-steps 64 --total-timesteps 512"
    path = run_main(ppo, tmp_path, flags, "--eval-episodes 1").path
    agent = load(path / "checkpoint.pt")["agent"]
    assert agent["normalize.mean"].shape == (17,) and agent["actor_logstd"].shape == (6,)
    assert agent["normalize.count"] == read_progress(path)["step"] == 512  # no episode ends before step 1,000
    scalars = read_scalars(path)
    assert [step for step, _ in scalars["charts/SPS"]] == [128, 256, 384, 512]
    assert scalars["eval/episodic_length"][-1][1] == 1000


def run_r2d2(folder, env_id):
    """Run R2D2 for some steps; return its folder and the line that the run begins with."""
    flags = f"--env-id {env_id} --num-envs 2 --total-timesteps 200 --eval-episodes 0 --batch-size 16"
    run = run_main(r2d2, folder, R2D2, flags)
    assert read_progress(run.path)["num_updates"] > 0
    return run.path, run.out.splitlines()[0]


def test_r2d2_reads_the_cells_of_minigrid(tmp_path):
    """As bytes of ones and zeros: one object, color and state of each of 7 x 7 cells, and one direction."""
    pytest.importorskip("minigrid")
    path, line = run_r2d2(tmp_path, "envs_shared.minigrid_one_hot:OneHot-MiniGrid-MemoryS7-v0")
    assert "observations (984,) as vectors" in line
    replay = load(path / "checkpoint.pt")["replay"]
    obs = replay["obs"][: replay["num_added"]]
    assert obs.dtype == torch.uint8 and obs.shape[2:] == (4 + 7 * 7 * 20,)
    assert (obs[..., :4].sum(-1) == 1).all() and (obs[..., 4:].sum(-1) == 7 * 7 * 3).all() and obs.max() == 1
    assert len(obs.flatten(0, 1).unique(dim=0)) > 10  # the views differ


def test_r2d2_reads_the_images_of_atari(tmp_path):
    """Small grey ones of bytes, four at a time without the recipe, which go through the convolutions."""
    pytest.importorskip("ale_py")
    path, line = run_r2d2(tmp_path, "ale_py:ALE/Pong-v5")
    assert "observations (4, 84, 84) as images" in line
    checkpoint = load(path / "checkpoint.pt")
    replay = checkpoint["replay"]
    obs = replay["obs"][: replay["num_added"]]
    assert obs.dtype == torch.uint8 and obs.shape[2:] == (4, 84, 84) and len(obs.unique()) > 3
    assert checkpoint["agent"]["encoder.0.weight"].shape == (32, 4, 8, 8)
