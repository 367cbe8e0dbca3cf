"""Learning rates and options of optimizers, in whole and resumed runs, and with what users add to a copy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import read_scalars
from scripts import (
    CASES,
    call_main,
    each_script,
    edit_script,
    find_run,
    get_module,
    import_file,
    load,
    run_main,
    start_and_kill,
    watch_optimizers,
)

# Eight iterations of 16 steps in which no episode of Pendulum ends, so that each iteration has as many steps
SHORT = "--env-id Pendulum-v1 --num-envs 4 --num-steps 4 --num-minibatches 1 --update-epochs 2"
SHORT += " --total-timesteps 128 --eval-episodes 0"
# The lines of ppo.py that a user changes
OPTIMIZER = """    optimizer = torch.optim.Adam(
        agent.parameters(), learning_rate, eps=1e-5, fused=True, capturable=device.type == "cuda"
    )
"""
LOAD = "    run.load(optimizer=optimizer)\n"
STEP = "        run.iteration += 1\n"
SCHEDULER_STEP = f"        scheduler.step()\n{STEP}"
RATE = """        rate = args.learning_rate
        if args.anneal_lr:
            rate *= 1 - run.step / args.total_timesteps
        learning_rate.fill_(rate)
"""


def train(module, folder, flags=SHORT):
    """Run a script once whole, and once killed after its third iteration and resumed.

    Returns the options of the optimizer in each step of the whole run from the fourth iteration on, of the
    resumed run, and of the whole run.
    """
    with watch_optimizers() as whole:
        run_main(module, folder / "whole", flags)
    with watch_optimizers() as before:
        path = start_and_kill(module, 3, folder / "killed", flags)
    assert whole[: len(before)] == before
    with watch_optimizers() as resumed:
        call_main(module, f"--resume {path / 'checkpoint.pt'}")
    return SimpleNamespace(rest=whole[len(before) :], resumed=resumed, whole=whole)


def get_rates(steps, group=0):
    return [groups[group]["lr"] for groups in steps]


# The rate of each script


@each_script
def test_the_rate_falls_by_its_formula_before_and_after_a_resume(script, tmp_path):
    """In all steps of an optimizer, and in the log. A resumed run goes on at its iteration's rate."""
    module, quick = get_module(script), f"{CASES[script].quick} --eval-episodes 0"
    log, start_of_iteration, found = module.Run.log, [0], []

    def log_rates(run, scalars):
        rates = {tuple(group["lr"] for group in groups) for groups in steps}
        found.append((run.iteration - 1, start_of_iteration[-1], rates))
        steps.clear()
        start_of_iteration.append(run.step)
        log(run, scalars)

    with watch_optimizers() as steps, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Run, "log", log_rates)
        path = start_and_kill(module, 3, tmp_path, quick)
        call_main(module, f"--resume {path / 'checkpoint.pt'}")
    args = module.Args(**load(path / "checkpoint.pt")["args"])
    formulas = {
        "ppo": lambda i, step: 1 - step / args.total_timesteps,
        "r2d2_lstm": lambda i, step: 1 - step / args.total_timesteps,
        "reinforce_tsp_attention": lambda i, step: (1 + math.cos(math.pi * i / args.num_epochs)) / 2,
        "alphazero_go": lambda i, step: 1 + (0.01 - 1) * i / (args.num_epochs - 1),
        "ppo_change_detection": lambda i, step: 1 - i / (args.detector_iterations + args.ppo_iterations),
    }
    expected = []
    for i, step, _ in found:
        is_detector = script == "ppo_change_detection" and i < args.detector_iterations
        expected.append((args.detector_lr if is_detector else args.learning_rate) * formulas[script](i, step))
    logged = [rate for _, rate in read_scalars(path)["charts/learning_rate"]]
    assert logged == pytest.approx(expected, rel=1e-6) and len(logged) > 5
    num_iterations = 0
    for rate, (*_, rates) in zip(expected, found, strict=True):
        both = (rate, args.head_lr_scale * rate) if script == "ppo_change_detection" else (rate,)
        if rates:  # an update was due
            num_iterations += 1
            assert [*rates] == [pytest.approx(both, rel=1e-6)]
    assert num_iterations > 5


# Options


@pytest.mark.parametrize("script", ["reinforce_tsp_attention", "alphazero_go"])
def test_weight_decay_acts_on_a_resumed_run(script, tmp_path):
    """AdamW has the weight decay of the flag in every step, and its first step after the resume decays."""
    module, quick = get_module(script), f"{CASES[script].quick} --eval-episodes 0"
    with watch_optimizers() as steps:
        path = start_and_kill(module, 3, tmp_path, quick, "--weight-decay 0.01")
        decays = [{groups[0].get("weight_decay") for groups in steps}]
        steps.clear()
        call_main(module, f"--resume {path / 'checkpoint.pt'} --weight-decay 0.5")
        decays.append({groups[0].get("weight_decay") for groups in steps})
    assert [{*x} - {None} for x in decays] == [{0.01}, {0.5}]  # Muon has none


def test_weight_decay_shrinks_the_weights_of_a_resumed_run_by_its_formula(tmp_path):
    """With gradients of 0, a step of AdamW multiplies weights by 1 - rate * decay, and does nothing else."""
    adam_w = OPTIMIZER.replace("torch.optim.Adam(", "torch.optim.AdamW(")
    adam_w = adam_w.replace("learning_rate,", "learning_rate, weight_decay=args.weight_decay,")
    setting = ("    anneal_lr: bool", "    weight_decay: float = 0.0  # of AdamW\n    anneal_lr: bool")
    path = edit_script("ppo", tmp_path / "copy", setting, (OPTIMIZER, adam_w))
    module = import_file("edited_copy", path)
    flags = f"{SHORT} --max-grad-norm 0 --no-anneal-lr --learning-rate 0.1 --num-minibatches 2"
    killed = start_and_kill(module, 3, tmp_path / "runs", flags)
    before = load(killed / "checkpoint.pt")["agent"]
    call_main(module, f"--resume {killed / 'checkpoint.pt'} --weight-decay 0.5")
    after = load(killed / "checkpoint.pt")["agent"]
    factor = (1 - 0.1 * 0.5) ** (5 * 2 * 2)  # iterations, epochs, minibatches
    assert factor == pytest.approx(0.358, abs=1e-3)
    for name in ("actor.1.weight", "actor.5.weight", "critic.3.weight"):
        torch.testing.assert_close(after[name], before[name] * factor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("option", "before", "after"),
    [
        ("weight_decay=args.x", 0.2, 0.05),
        ("betas=(0.8, 1 - args.x)", (0.8, 0.8), (0.8, 0.95)),
        ("amsgrad=args.x > 0.1", True, False),
    ],
)
def test_each_option_of_adam_is_that_of_the_flags_after_a_resume(option, before, after, tmp_path):
    """Another resume, without the flag, keeps what it said."""
    optimizer = OPTIMIZER.replace("eps=1e-5", f"eps=args.x, {option}")
    setting = ("    anneal_lr: bool", "    x: float = 0.2  # an option of Adam\n    anneal_lr: bool")
    path = edit_script("ppo", tmp_path / "copy", setting, (OPTIMIZER, optimizer))
    module = import_file("edited_copy", path)
    with watch_optimizers() as steps:
        killed = start_and_kill(module, 3, tmp_path / "runs", SHORT)
        for flags in ("--x 0.05", "--total-timesteps 160"):
            call_main(module, f"--resume {killed / 'checkpoint.pt'} {flags}")
    found = [(groups[0]["eps"], groups[0][option.split("=")[0]]) for groups in steps]
    assert found == [(0.2, before)] * 6 + [(0.05, after)] * 14


GROUPS = {
    "tensor": '{"params": agent.critic.parameters(), "lr": torch.tensor(3e-4), "weight_decay": 0.25}',
    "number": '{"params": agent.critic.parameters(), "lr": 3e-4, "weight_decay": 0.25}',
}  # of the critic, beside the group of all others


def make_groups(kind):
    """An optimizer of two groups, the second with a rate that is a tensor or a number of Python."""
    others = '{"params": [*agent.actor.parameters(), agent.actor_logstd]}'
    return OPTIMIZER, OPTIMIZER.replace("agent.parameters()", f"[{others}, {GROUPS[kind]}]")


@pytest.mark.parametrize("kind", GROUPS)
def test_a_second_group_keeps_its_own_rate_and_options(kind, tmp_path):
    """The first group's rate falls in the meantime."""
    path = edit_script("ppo", tmp_path / "copy", make_groups(kind))
    done = train(import_file("edited_copy", path), tmp_path)
    falling = [4e-3 * (1 - i / 8) for i in range(8) for _ in range(2)]
    assert get_rates(done.whole) == pytest.approx(falling, rel=1e-6)
    assert get_rates(done.whole, 1) == pytest.approx([3e-4] * 16)
    assert done.resumed == done.rest and len(done.rest) == 10
    assert [groups[1]["weight_decay"] for groups in done.resumed] == [0.25] * 10
    assert [groups[0]["weight_decay"] for groups in done.resumed] == [0] * 10


@pytest.mark.parametrize("kind", GROUPS)
def test_a_scheduler_of_two_groups_goes_on_at_the_rates_of_both(kind, tmp_path):
    made = f"{LOAD}    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)\n"
    made += "    run.load(scheduler=scheduler)\n"
    changes = [(LOAD, made), (RATE, "        rate = learning_rate.item()\n"), (STEP, SCHEDULER_STEP)]
    path = edit_script("ppo", tmp_path / "copy", make_groups(kind), *changes)
    done = train(import_file("edited_copy", path), tmp_path)
    for i, rate in enumerate((4e-3, 3e-4)):
        expected = [rate * 0.8**i for i in range(8) for _ in range(2)]
        assert get_rates(done.whole, i) == pytest.approx(expected, rel=1e-5)
        assert get_rates(done.resumed, i) == get_rates(done.rest, i) and len(done.rest) == 10


# Warm-ups and schedulers


def test_a_warm_up_reaches_the_same_peak_after_a_resume(tmp_path):
    """Without annealing. It ends after six iterations, and the kill comes after three."""
    warm_up = RATE.replace(
        "learning_rate.fill_", "rate *= min(1, (run.iteration + 1) / 6)\n        learning_rate.fill_"
    )
    path = edit_script("ppo", tmp_path / "copy", (RATE, warm_up))
    done = train(import_file("edited_copy", path), tmp_path, f"{SHORT} --no-anneal-lr --learning-rate 0.0036")
    expected = [0.0036 * min(1, (i + 1) / 6) for i in range(8) for _ in range(2)]
    assert get_rates(done.whole) == pytest.approx(expected, rel=1e-6)
    assert get_rates(done.resumed) == get_rates(done.rest) and max(get_rates(done.resumed)) == pytest.approx(
        0.0036
    )


# How a scheduler is made, and the rate of iteration i that it then gives
SCHEDULERS = {
    "ExponentialLR(optimizer, 0.8)": lambda i: 4e-3 * 0.8**i,
    "LinearLR(optimizer, 0.1, total_iters=6)": lambda i: 4e-3 * (0.1 + 0.9 * min(i, 6) / 6),
    "CosineAnnealingLR(optimizer, 8)": lambda i: 4e-3 * (1 + math.cos(math.pi * i / 8)) / 2,
    "LambdaLR(optimizer, lambda i: 1 / (1 + i))": lambda i: 4e-3 / (1 + i),
    "MultiStepLR(optimizer, [2, 5], 0.5)": lambda i: 4e-3 * 0.5 ** ((i >= 2) + (i >= 5)),
    "OneCycleLR(optimizer, 0.01, total_steps=9, pct_start=0.5, cycle_momentum=False)": None,
    "CyclicLR(optimizer, 1e-4, 1e-2, 5, cycle_momentum=False)": lambda i: (
        1e-4 + 9.9e-3 * (1 - abs(5 - i) / 5)
    ),
}
ORDERS = {
    "after the optimizer's load": LOAD + "    scheduler = SCHEDULER\n    run.load(scheduler=scheduler)\n",
    "before it": "    scheduler = SCHEDULER\n    run.load(optimizer=optimizer, scheduler=scheduler)\n",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda x: x.partition("(")[0])
def test_a_scheduler_goes_on_at_its_rate_after_a_resume(scheduler, order, tmp_path):
    """As in the run that was not killed, also if the scheduler changes the rate when it is made."""
    made = ORDERS[order].replace("SCHEDULER", f"torch.optim.lr_scheduler.{scheduler}")
    changes = [(LOAD, made), (RATE, "        rate = learning_rate.item()\n")]
    path = edit_script("ppo", tmp_path / "copy", *changes, (STEP, SCHEDULER_STEP))
    done = train(import_file("edited_copy", path), tmp_path)
    assert get_rates(done.resumed) == get_rates(done.rest) and len(done.rest) == 10
    assert len({*get_rates(done.whole)}) > 2
    if SCHEDULERS[scheduler]:
        expected = [SCHEDULERS[scheduler](i) for i in range(8) for _ in range(2)]
        assert get_rates(done.whole) == pytest.approx(expected, rel=1e-5)
    logged = read_scalars(find_run(tmp_path / "killed"))["charts/learning_rate"]
    assert np.repeat([rate for _, rate in logged], 2) == pytest.approx(get_rates(done.whole), rel=1e-6)
