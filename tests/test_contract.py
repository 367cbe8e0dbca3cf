"""The contract of every script, held against each one in SCRIPTS by running it, by its entry in CASES."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import probe_envs
import pytest
import torch
from helpers import ENVIRONMENT, ROOT, SCRIPTS, fail_with, read_scalars, start_process, wait_for
from scripts import (
    BAD_FILES,
    CASES,
    NOT_DIVISIBLE,
    call_main,
    check_no_step_is_logged_twice,
    copy_script,
    each_script,
    find_run,
    get_module,
    load,
    longer,
    read_files,
    read_losses,
    read_progress,
    read_scores,
    run_copy,
    run_quick,
)

# Copied alone


@pytest.fixture(scope="module")
def resumed(script, tmp_path_factory):
    """A run of a copy alone that is killed and resumed, with its checkpoint and its log before that."""
    case, folder = CASES[script], tmp_path_factory.mktemp("alone") / "copy"
    log, file = folder.with_suffix(".log"), copy_script(script, folder) / f"{script}.py"
    # The fourth one is written between the log of an iteration and its evaluation
    process = start_process(log, "kill_at", file, 4, *case.quick.split())
    assert wait_for([process]) == [-signal.SIGKILL], log.read_text()
    path = find_run(folder / "runs")
    before, logged = read_progress(path), read_scalars(path)[case.tags[1]]
    time.sleep(1.1)  # TensorBoard orders event files by the second they were made in
    total = longer(path, case)
    out = run_copy(folder, script, "--resume", path / "checkpoint.pt", case.length, total)
    return SimpleNamespace(folder=folder, path=path, before=before, logged=logged, out=out)


@each_script
def test_a_killed_run_of_a_copy_is_resumed_where_it_was(script, resumed):
    """No iteration is logged twice, none is missing, and those before the checkpoint are as they were."""
    # R2D2 does not save after an evaluation, so that its fourth save is two iterations later
    killed_in = 6 if script == "r2d2_lstm" else 4
    before, after = resumed.before["iteration"], read_progress(resumed.path)["iteration"]
    assert (before, len(resumed.logged)) == (killed_in - 2, killed_in)
    losses = check_no_step_is_logged_twice(resumed.path)[CASES[script].tags[1]]
    assert len(losses) == after > killed_in
    assert losses[:before] == resumed.logged[:before]


@each_script
def test_the_counters_of_a_killed_and_resumed_run_are_those_of_its_log(script, resumed):
    """Steps, CPU-seconds and steps of evaluations, before and after."""
    before, after = resumed.before, read_progress(resumed.path)
    scalars = check_no_step_is_logged_twice(resumed.path)
    for progress in (before, after):
        last = progress["iteration"] - 1
        assert scalars[CASES[script].tags[1]][last][0] == progress["step"]
        assert scalars["charts/cpu_seconds"][last][1] == pytest.approx(progress["cpu_seconds"])
    seconds = [x for _, x in scalars["charts/cpu_seconds"]]
    assert seconds == sorted({*seconds})
    # An evaluation has four episodes, instances or pairs, or four games with so many moves in all
    lengths = {
        "ppo": "eval/episodic_length",
        "r2d2_lstm": "eval/episodic_length",
        "alphazero_go": "eval/moves",
    }
    found = dict.fromkeys(scalars[lengths.get(script, CASES[script].tags[0])])
    sizes = {"ppo": lambda x: 4 * x, "r2d2_lstm": lambda x: 4 * x, "alphazero_go": lambda x: x}
    size = sizes.get(script, lambda x: 4)
    assert sum(size(x) for _, x in found) == pytest.approx(after["eval_steps"])
    # The checkpoint before the kill holds one evaluation, that of the second iteration
    assert size(next(iter(found))[1]) == pytest.approx(before["eval_steps"])


@each_script
def test_a_run_of_a_copy_writes_into_its_folder_alone(script, resumed):
    """And few lines of the bar into a file."""
    folder = {x.name for x in resumed.folder.iterdir()} - {"envs_shared", "__pycache__"}
    assert folder == {f"{script}.py", "runs"}
    assert re.fullmatch(rf"\S+__{script}__1__\d+", resumed.path.name)
    names = {"events" if "events" in x.name else x.name.removesuffix(".tmp") for x in resumed.path.iterdir()}
    assert names == {"events", "checkpoint.pt", "best.pt"}
    assert 1 <= resumed.out.count("%|") < 10


@each_script
def test_a_copy_evaluates_its_best_policy_and_writes_nothing(script, resumed):
    files = read_files(resumed.folder)
    flags = "--evaluate", resumed.path / "best.pt", "--eval-episodes", 3
    scores = read_scores(run_copy(resumed.folder, script, *flags))  # which are all that it prints
    assert scores and np.isfinite([*scores.values()]).all() and read_files(resumed.folder) == files


others = [pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS if script != "ppo"]


@pytest.mark.parametrize("script", ["ppo", *others])
def test_a_copy_runs_under_torchrun(script, tmp_path):
    """As a user starts it. One process talks, logs, and writes to Weights & Biases."""
    case, folder = CASES[script], copy_script(script, tmp_path / "copy")
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {script}.py"
    command = [*launcher.split(), *case.quick.split(), "--no-cuda", "--track"]
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    options = {"cwd": folder, "env": env | {"WANDB_MODE": "offline"}, "capture_output": True, "text": True}
    run = subprocess.run(command, timeout=480, **options)
    assert run.returncode == 0, run.stderr
    path = find_run(folder / "runs")
    assert run.stdout.count(f"runs/{path.name}: ") == 2 and len(list(path.glob("events*"))) == 1
    assert len(read_scalars(path)[case.tags[1]]) == read_progress(path)["iteration"]
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert path.name in log.name and all(tag.encode() in log.read_bytes() for tag in case.tags)


# Whole runs in this process


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run from its beginning to its end."""
    return run_quick(script, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def never(script, tmp_path_factory):
    """A run that is never evaluated."""
    return run_quick(script, tmp_path_factory.mktemp("never"), "--eval-episodes", 0)


@each_script
def test_evaluations_change_nothing_that_is_trained(script, whole, never):
    """To the last bit. A run without evaluations writes checkpoints, but no best.pt.

    Each iteration has random numbers of its own, whatever was drawn before it.
    """
    first, second = (load(x.path / "checkpoint.pt")["agent"] for x in (whole, never))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert read_losses(whole.path) == read_losses(never.path) != {}
    assert {*CASES[script].tags, "charts/SPS", "charts/cpu_seconds"} <= read_scalars(whole.path).keys()
    assert not any(tag.startswith("eval/") for tag in read_scalars(never.path))
    assert not (never.path / "best.pt").exists()
    checkpoint, best = load(whole.path / "checkpoint.pt"), load(whole.path / "best.pt")
    assert {"args", "progress", "agent", "optimizer"} <= best.keys() <= checkpoint.keys()
    num_iterations = checkpoint["progress"]["iteration"]
    seeds, earlier = never.seeds[-num_iterations:], never.seeds[:-num_iterations]
    assert len({*seeds}) == num_iterations > 4 and not {*seeds} & {*earlier}


@pytest.mark.parametrize(
    "script", ["ppo", "r2d2_lstm", "reinforce_tsp_attention"], indirect=True, scope="module"
)
def test_evaluate_draws_other_numbers_than_those_that_chose_the_policy(script, whole, never):
    """With the episodes of the checkpoint, or if these are none, ten episodes or 1,000 instances."""
    out, seeds = call_main(get_module(script), f"--evaluate {never.path / 'checkpoint.pt'}")
    assert np.isfinite([*read_scores(out).values()]).all()
    # Those of the first weights are the same
    assert len({*seeds}) == 2 and len({*seeds} & {*whole.seeds}) == 1


@each_script
def test_evaluations_come_at_tenths_and_wait_while_they_took_more_than_a_fifth(script, tmp_path):
    """At each tenth of the run, unless those so far had more than a fifth of the steps; and at the end."""
    case = CASES[script]
    flags, size = case.even
    path = run_quick(script, tmp_path, "--eval-interval 0", flags).path
    scalars, args = read_scalars(path), load(path / "checkpoint.pt")["args"]
    steps = [step for step, _ in scalars["charts/SPS"]]
    sizes = dict(scalars.get("eval/moves", []))  # Go's matches differ in length
    expected, used, num_waits, tenth, is_due = [], 0, 0, 0, False
    for i, step in enumerate(steps):
        position, length = i + 1, len(steps)
        if case.length == "--total-timesteps":
            position, length = step, args["total_timesteps"]
        before, tenth = tenth, min(10 * position // length, 10)
        is_due = is_due or tenth > before
        is_affordable = used <= step / 5
        num_waits += is_due and not is_affordable
        if tenth == 10 or (is_due and is_affordable):
            expected.append(step)
            used += sizes.get(step, size)
            is_due = False
    assert [step for step, _ in scalars[case.tags[0]]] == expected
    assert num_waits > 0 and len(expected) > 2


@each_script
def test_an_interval_sets_the_iterations_of_evaluations(script, tmp_path):
    """Whatever they take, and at the end."""
    case = CASES[script]
    flags, _ = case.even
    scalars = read_scalars(run_quick(script, tmp_path, flags, "--eval-interval 3").path)
    steps = [step for step, _ in scalars["charts/SPS"]]
    expected = [step for i, step in enumerate(steps) if (i + 1) % 3 == 0 or i + 1 == len(steps)]
    assert [step for step, _ in scalars[case.tags[0]]] == expected and len(expected) > 2


@each_script
def test_bad_input_is_one_line_and_exit_code_2(script, whole, tmp_path, monkeypatch, capsys):
    """And nothing is written."""
    module = get_module(script)
    monkeypatch.chdir(tmp_path)
    Path("garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"weights": torch.zeros(2)}, "weights.pt")
    shutil.copy(whole.path / "best.pt", "good.pt")
    torch.save(load("good.pt") | {"code": Path("a class that is not a tensor's")}, "pickle.pt")
    files = read_files(tmp_path)
    for flags, words in (BAD_FILES | CASES[script].bad).items():
        monkeypatch.setattr(module, "WORLD_SIZE", 2 if words == NOT_DIVISIBLE else 1)
        assert words in fail_with(capsys, module.main, flags.split()), flags
    assert read_files(tmp_path) == files and not Path("runs").exists()


@each_script
def test_numbers_outside_their_range_are_refused(script, tmp_path, monkeypatch, capsys):
    """All that are negative or not finite, and counts and shares."""
    module = get_module(script)
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("it trains"))
    numbers = [x for x in fields(module.Args) if re.search("float|int", str(x.type))]
    settings = CASES[script].ranges.split()
    settings += [f"{x.name}=-1" for x in numbers if x.name not in ("komi", "cost", "log_std")]
    settings += [f"{x.name}={y}" for x in numbers for y in ("nan", "inf", "-inf") if "float" in str(x.type)]
    assert len(settings) > 20
    for name, value in (x.split("=") for x in settings):
        flag = f"--{name.replace('_', '-')}"
        line = fail_with(capsys, module.main, [f"{flag}={value}", f"--run-dir={tmp_path / 'runs'}"])
        assert re.search(rf"{flag} \({value}(\.0)?\) must be", line)
    assert "is empty" in fail_with(capsys, module.main, ["--resume="])
    assert not (tmp_path / "runs").exists()


# Flags of runs whose state is all the script's own; the best policy of the baseline changes between the cuts
EXACT = {
    "reinforce_tsp_attention": "--env-id tsp6-uniform --seed 4 --num-epochs 4 --baseline rollout"
    " --baseline-instances 40 --baseline-level 0.5",
    "alphazero_go": "--num-epochs 4 --pretrain-search-epochs 1 --epsilon-start 0.9 --epsilon-end 0.9",
    "ppo_change_detection": "--ppo-iterations 3",
}


@pytest.mark.parametrize("script", EXACT)
def test_a_run_that_is_cut_and_resumed_is_the_uninterrupted_one(script, tmp_path, monkeypatch):
    """To the last bit, and in the log, from the checkpoints of several iterations."""
    replace = os.replace

    def keep(source, target):
        replace(source, target)
        if target.name == "checkpoint.pt":
            number = read_progress(target.parent)["iteration"]
            shutil.copytree(target.parent, tmp_path / str(number), dirs_exist_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", keep)
        whole = run_quick(script, tmp_path / "whole", "--eval-interval 1", EXACT[script]).path
    scalars = read_scalars(whole)
    if script == "reinforce_tsp_attention":
        assert [x for _, x in scalars["charts/baseline_updates"]][:2] == [1, 1]
    for left in (tmp_path / number for number in "123"):
        call_main(get_module(script), f"--resume {left / 'checkpoint.pt'}")
        for name in ("checkpoint.pt", "best.pt"):
            ends = [load(path / name) for path in (whole, left)]
            for end in ends:
                del end["args"], end["progress"]["cpu_seconds"]
            names = [end["progress"].pop("score_name") for end in ends]
            assert names[0] == names[1] != ""
            torch.testing.assert_close(*ends, rtol=0, atol=0, equal_nan=True)
        for tag, values in read_scalars(left).items():
            if not tag.endswith(("seconds", "SPS")):
                assert values == scalars[tag][-len(values) :], tag


# What an evaluation returns whose score is x, where more is better
RETURNS = {"eval/episodic_length": 1.0, "eval/episodic_return_std": 0.0}
SCORES = [
    ("ppo", lambda x: RETURNS | {"eval/episodic_return": x}),
    ("r2d2_lstm", lambda x: RETURNS | {"eval/episodic_return": x}),
    ("reinforce_tsp_attention", lambda x: ({"eval/greedy_length": -x}, None)),
    (
        f"reinforce_tsp_attention --data {ROOT}/tests/data/tsp/tsp20-uniform.txt",  # with optimal tours
        lambda x: ({"eval/greedy_length": x, "eval/greedy_gap": -x}, None),
    ),
    ("ppo_change_detection", lambda x: {"eval/threshold": 0.5, "eval/f1_less_price": x}),
]  # AlphaZero plays matches


@pytest.mark.parametrize(("script", "make_scores"), SCORES)
def test_the_best_of_all_evaluations_is_kept(script, make_scores, tmp_path, monkeypatch):
    """Of equal ones the later."""
    script, *flags = script.split()
    module, numbers = get_module(script), itertools.chain([-5.0, -3.0, -4.0, -3.0], itertools.repeat(-6.0))
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: make_scores(next(numbers)))
    monkeypatch.setattr(module, "compare_rules", lambda *_: "nowhere", raising=False)
    path = run_quick(script, tmp_path, "--eval-interval 1", *flags).path
    best, last = (load(path / name)["progress"] for name in ("best.pt", "checkpoint.pt"))
    assert [abs(x) for x in (best["best_score"], last["best_score"], last["last_score"])] == [3.0, 3.0, 6.0]
    assert best["iteration"] == 4 < last["iteration"]


NOT_FINITE = [
    ("ppo", "--env-id probe_envs:NotFiniteobs-v0", "v0: an observation of environment 1 is not finite"),
    ("ppo", "--env-id probe_envs:NotFinitereward-v0", "v0: a reward of environment 1 is not finite"),
    ("ppo", "--learning-rate 1e30", "is (nan|inf) at step"),
    ("r2d2_lstm", "--env-id probe_envs:NotFiniteobs-v0", "observation of environment 1 in step 3"),
    ("r2d2_lstm", "--env-id probe_envs:NotFinitereward-v0", "reward of environment 1 in step 3"),
    ("ppo_change_detection", "--learning-rate 1e30", "is (nan|inf) at step"),
]


@pytest.mark.parametrize(("script", "flags", "words"), NOT_FINITE)
def test_what_is_not_finite_ends_a_run_with_one_line(script, flags, words, tmp_path, capsys):
    """The last checkpoint is of finite losses, and its weights are finite as well."""
    probe_envs.Fixed.made = 0
    flags = f"{CASES[script].quick} --eval-interval 1 --eval-episodes 0 {flags} --run-dir {tmp_path}"
    found = fail_with(capsys, get_module(script).main, flags.split())
    assert re.search(words, found)
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# What users do


@each_script
def test_a_frozen_layer_and_an_unused_parameter_train_on(script, tmp_path):
    """What is frozen stays, what no loss uses stays, and the rest is trained."""
    found, to = [], torch.nn.Module.to

    def edit(network, *args, **options):
        if not found:
            found.extend((name, x.detach().clone()) for name, x in network.named_parameters())
            next(network.parameters()).requires_grad_(False)
            network.unused = torch.nn.Parameter(torch.ones(3))
        return to(network, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", edit)
        path = run_quick(script, tmp_path, "--eval-episodes", 0).path
    agent = load(path / "checkpoint.pt")["agent"]
    stays = [torch.equal(agent[name], x) for name, x in found]
    assert stays[0] and sum(stays) <= len(stays) / 2 and torch.equal(agent["unused"], torch.ones(3))


@each_script
def test_a_run_that_was_killed_in_an_evaluation_makes_up_for_it(script, tmp_path):
    """The checkpoint before the evaluation is of the same iteration."""
    module = get_module(script)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(module, "evaluate", lambda *args, **kwargs: 1 / 0)
        run_quick(script, tmp_path)
    path = find_run(tmp_path)
    progress = read_progress(path)
    assert progress["iteration"] == 2 and not (path / "best.pt").exists()
    call_main(module, f"--resume {path / 'checkpoint.pt'}")
    assert read_scalars(path)[CASES[script].tags[0]][0][0] == progress["step"]


def resume_and_score(script: str, run: Path, *flags) -> tuple:
    """Resume a run; returns the best score of best.pt, and the best and last ones of checkpoint.pt."""
    call_main(get_module(script), " ".join(("--resume", str(run / "checkpoint.pt"), *flags)))
    progress = read_progress(run)
    return load(run / "best.pt")["progress"]["best_score"], progress["best_score"], progress["last_score"]


@each_script
def test_a_finished_run_that_was_not_evaluated_is_evaluated(script, whole, never, tmp_path):
    """Or whose best.pt is missing."""
    unscored = shutil.copytree(never.path, tmp_path / "never")
    assert read_progress(unscored)["best_score"] is None and not (unscored / "best.pt").exists()
    missing = shutil.copytree(whole.path, tmp_path / "missing")
    (missing / "best.pt").unlink()
    for run, flags in ((unscored, ["--eval-episodes", "4"]), (missing, [])):
        kept, best, last = resume_and_score(script, run, *flags)
        assert kept == best == last and last is not None


def source(script: str) -> str:
    return (ROOT / "algos" / f"{script}.py").read_text()


@each_script
def test_common_flags_come_first_and_are_spelled_alike(script):
    """As those of ppo.py. Some scripts film nothing."""
    common, found = ([(x.name, x.type) for x in fields(get_module(x).Args)] for x in ("ppo", script))
    common = [x for x in common[:13] if x in found or x[0] != "capture_video"]
    assert found[: len(common)] == common and common[-1] == ("eval_episodes", int)


def read_run(script: str) -> str:
    """The part Run of a script without what may differ: Progress and main."""
    _, ruler, text = source(script).partition(f"# ---- Run {'-' * 99}\n")
    for start in ("@dataclass\nclass Progress", "def main"):
        text = re.sub(rf"^{start}.*?\n\n\n(?=\S)", "", text, flags=re.M | re.S)
    assert ruler and text.count("\ndef ") > 6 and "class Run" in text
    return text


@each_script
def test_the_part_run_is_that_of_all_scripts(script):
    """Byte by byte."""
    assert read_run(script) == read_run("ppo")
