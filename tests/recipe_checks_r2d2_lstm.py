"""What the recipes for R2D2 must bring about."""

import torch
from conftest import read_scalars
from test_contract import load, run_edited


def check_gru(path, folder):
    """It remembers a cue that only stored states hold: 1 at best, 0 by guessing. Update gates open as promised."""
    flags = "--env-id probe_envs:Recall-v0 --num-steps 4 --hidden-size 32 --target-interval 20 --learning-starts 500"
    flags += (
        " --buffer-size 2000 --total-timesteps 16000 --batch-size 96 --replay-ratio 4 --eval-episodes 100"
    )
    done, module = run_edited(path, flags, "--burn-in 2 --learn-length 3 --n-step 2")
    assert read_scalars(done.path)["eval/episodic_return"][-1][1] >= 0.98
    checkpoint = load(done.path / "checkpoint.pt")
    assert checkpoint["agent"]["core.weight_hh_l0"].shape == (3 * 32, 32)
    assert checkpoint["replay"]["state"].shape == (2000, 1, 32)
    args = module.Args(env_id="probe_envs:Recall-v0", hidden_size=3, memory_span=100.0)
    core = module.QNetwork(module.make_envs(args, 1), args).core
    update_gate = (core.bias_ih_l0 + core.bias_hh_l0)[3:6].sigmoid()
    torch.testing.assert_close(update_gate, torch.tensor([1 / 2, 10 / 11, 100 / 101]))


CHECKS = {"A GRU in place of the LSTM": check_gru}
