"""The contract of every script, held against each one in SCRIPTS by running it, by its entry in CASES."""

import ast
import io
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tokenize
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import probe_envs
import pytest
import torch
from helpers import ENVIRONMENT, ROOT, SCRIPTS, fail_with, read_scalars, start_process, wait_for
from packaging.requirements import Requirement
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
    run_main,
    run_quick,
)

from benchmark.runs import read_text

COMMON_FLAGS = """exp_name: str, seed: int, torch_deterministic: bool, cuda: bool, track: bool,
wandb_project_name: str, wandb_entity: str | None, capture_video: bool, run_dir: str, resume: str | None,
evaluate: str | None, eval_interval: int, eval_episodes: int""".replace("\n", " ").split(", ")
MAX_TOKENS = {f"algos/{script}.py": case.max_tokens for script, case in CASES.items()} | {
    "envs_shared/tsplib.py": 1600,
    "envs_shared/go.py": 2600,
    "envs_shared/go_gtp.py": 4500,
    "envs_shared/change_pairs.py": 2100,
    "envs_shared/change_folders.py": 1800,
}
SIGNED = {"komi", "cost", "log_std"}  # numbers that may be negative
OPTIONAL = {"ale_py", "minigrid"}  # packages that are imported for some tasks only


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
    out, err = run_copy(folder, script, "--resume", path / "checkpoint.pt", case.length, total)
    assert longer(path, case) >= total + case.more
    return SimpleNamespace(folder=folder, path=path, before=before, logged=logged, out=out, err=err)


@each_script
def test_a_killed_run_of_a_copy_is_resumed_where_it_was(script, resumed):
    """Counters continue, no step is logged twice, and none is missing."""
    before, after = resumed.before, read_progress(resumed.path)
    assert all(after[name] > before[name] for name in ("iteration", "step", "eval_steps", "cpu_seconds"))
    scalars = check_no_step_is_logged_twice(resumed.path)
    losses = scalars[CASES[script].tags[1]]
    assert len(losses) == after["iteration"]  # one in each iteration
    assert losses[: before["iteration"]] == resumed.logged[: before["iteration"]]
    assert len(resumed.logged) > before["iteration"] > 0
    seconds = [value for _, value in scalars["charts/cpu_seconds"]]
    assert seconds == sorted(seconds)


@each_script
def test_a_run_writes_its_folder_alone_and_few_lines(script, resumed):
    folder, path = resumed.folder, resumed.path
    assert {x.name for x in folder.iterdir()} - {"envs_shared", "__pycache__"} == {f"{script}.py", "runs"}
    names = {"events" if "events" in x.name else x.name.removesuffix(".tmp") for x in path.iterdir()}
    assert names == {"events", "checkpoint.pt", "best.pt"}
    assert re.fullmatch(rf"\S+__{script}__1__\d+", path.name)
    first, *_, last = resumed.out.splitlines()
    assert first.startswith(f"{path}: ") and last.startswith(f"{path}: ")
    assert 1 <= len(resumed.err.splitlines()) < 10  # few lines of the bar in a file


@each_script
def test_a_copy_evaluates_its_checkpoints_and_writes_nothing(script, resumed):
    files = read_files(resumed.folder)
    for name in ("best.pt", "checkpoint.pt"):
        out, err = run_copy(resumed.folder, script, "--evaluate", resumed.path / name, "--eval-episodes", 3)
        scores = read_scores(out)
        assert scores and np.isfinite([*scores.values()]).all() and err == ""
        assert all(tag.startswith("eval/") for tag in scores) and read_files(resumed.folder) == files


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
    scalars = read_scalars(path)
    assert run.stdout.count(f"runs/{path.name}: ") == 2 and len(list(path.glob("events*"))) == 1
    assert len(scalars[case.tags[1]]) == read_progress(path)["iteration"] and scalars[case.tags[0]]
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert path.name in log.name
    assert all(tag.encode() in log.read_bytes() for tag in (*case.tags, "wandb_project_name"))


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
    """To the last bit. A run without evaluations writes checkpoints, but no best.pt."""
    first, second = (load(x.path / "checkpoint.pt")["agent"] for x in (whole, never))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert read_losses(whole.path) == read_losses(never.path) != {}
    assert len(read_scalars(whole.path)[CASES[script].tags[0]]) > 2
    assert not any(tag.startswith("eval/") for tag in read_scalars(never.path))
    assert {*never.written} == {"checkpoint.pt"} and len(never.written) > 3 and "best.pt" in whole.written
    assert "not evaluated" in never.out and "not evaluated" not in whole.out


@each_script
def test_each_iteration_has_random_numbers_of_its_own(script, whole, never, tmp_path):
    """No other iteration has them, and none of a run with another --seed, which learns something else."""
    other = run_quick(script, tmp_path / "other", "--eval-episodes", 0, "--seed", 2)
    assert read_losses(other.path) != read_losses(whole.path)
    num_iterations = read_progress(whole.path)["iteration"]
    seeds, earlier = never.seeds[-num_iterations:], never.seeds[:-num_iterations]
    assert len({*seeds}) == num_iterations > 4 and not {*seeds} & {*earlier, *other.seeds}


@pytest.mark.parametrize(
    "script", ["ppo", "r2d2_lstm", "reinforce_tsp_attention"], indirect=True, scope="module"
)
def test_evaluate_draws_other_numbers_than_those_that_chose_the_policy(script, whole, never):
    """With the episodes of the checkpoint, or if these are none, ten episodes or 1,000 instances."""
    out, _, seeds = call_main(get_module(script), f"--evaluate {never.path / 'checkpoint.pt'}")
    assert np.isfinite([*read_scores(out).values()]).all()
    # Those of the first weights are the same
    assert len({*seeds}) == 2 and len({*seeds} & {*whole.seeds}) == 1


@each_script
def test_evaluation_takes_at_most_a_fifth_of_the_steps(script, tmp_path):
    """By default, and the one at the end aside."""
    case = CASES[script]
    flags, size = case.even
    scalars = read_scalars(run_quick(script, tmp_path, "--eval-interval 0", flags).path)
    steps = [step for step, _ in scalars[case.tags[0]]]
    assert 3 <= len(steps) <= 10 and steps[-1] == scalars[case.tags[1]][-1][0]
    assert all(size * (i + 1) <= step / 5 for i, step in enumerate(steps[:-1])), steps


@each_script
def test_a_run_leaves_checkpoints_of_one_content_and_a_log(script, whole):
    """All of a checkpoint is plain data and tensors, so that torch loads it without unpickling classes."""
    checkpoint, best = load(whole.path / "checkpoint.pt"), load(whole.path / "best.pt")
    assert {"args", "progress", "agent", "optimizer"} <= best.keys() <= checkpoint.keys()
    args = get_module(script).Args(**checkpoint["args"])
    assert args.run_dir == str(whole.path.parent) and not list(whole.path.glob("*.tmp"))
    assert {*CASES[script].tags, "charts/SPS", "charts/cpu_seconds"} <= read_scalars(whole.path).keys()
    rows = read_text(whole.path, "hyperparameters").splitlines()[2:]
    assert rows == [f"|{name}|{value}|" for name, value in checkpoint["args"].items()]


@each_script
def test_bad_input_is_one_line_and_exit_code_2(script, whole, tmp_path):
    """And nothing is written. In a process of its own, because libraries print warnings to stderr."""
    folder, log = copy_script(script, tmp_path / script), tmp_path / "log"
    shutil.copy(ROOT / "tests" / "probe_envs.py", folder)
    (folder / "garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"weights": torch.zeros(2)}, folder / "weights.pt")
    torch.save({"args": {"flag_of_another_script": 1}, "progress": (0,)}, folder / "other.pt")
    torch.save({"args": {}, "code": Path("a class that is not a tensor's")}, folder / "pickle.pt")
    shutil.copy(whole.path / "best.pt", folder / "good.pt")
    files = read_files(folder)
    bad = BAD_FILES | CASES[script].bad
    runs = [f"{2 if words == NOT_DIVISIBLE else 1} {flags}" for flags, words in bad.items()]
    process = start_process(log, "fail_each", folder / f"{script}.py", *runs)
    exit_codes, lines = wait_for([process]), log.read_text().splitlines()
    assert exit_codes == [0] and len(lines) == 2 * len(runs), lines
    for flags, words, line, exit_code in zip(bad, bad.values(), lines[::2], lines[1::2], strict=True):
        assert line.startswith(f"{script}.py: error: ") and words in line, (flags, line)
        assert exit_code == "exit code 2", flags
    assert read_files(folder) == files and not (folder / "runs").exists()


@each_script
def test_numbers_outside_their_range_are_refused(script, tmp_path, monkeypatch, capsys):
    """All that are negative or not finite, and counts and shares."""
    module = get_module(script)
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("it trains"))
    numbers = [x for x in fields(module.Args) if re.search("float|int", str(x.type))]
    settings = CASES[script].ranges.split()
    settings += [f"{x.name}=-1" for x in numbers if x.name not in SIGNED]
    settings += [f"{x.name}={y}" for x in numbers for y in ("nan", "inf", "-inf") if "float" in str(x.type)]
    assert len(settings) > 20
    for name, value in (x.split("=") for x in settings):
        flag = f"--{name.replace('_', '-')}"
        line = fail_with(capsys, module.main, [f"{flag}={value}", f"--run-dir={tmp_path / 'runs'}"])
        assert re.search(rf"{flag} \({value}(\.0)?\) must be", line)
    for name in ("resume", "evaluate", "run_dir"):
        line = fail_with(capsys, module.main, [f"--{name.replace('_', '-')}="])
        assert "is empty, perhaps because a variable of the shell is not set" in line
    assert not (tmp_path / "runs").exists()


@each_script
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(script, tmp_path, monkeypatch):
    """The first is written before training. Later a best.pt is there as well, and it loads too."""
    replace, written, iterations = os.replace, [], []

    def replace_and_look(source, target):
        replace(source, target)
        written.append(target.name)
        checkpoint = load(target.parent / "checkpoint.pt")
        progress, num_written = checkpoint["progress"], written.count("checkpoint.pt")
        iterations.append(progress["iteration"])
        if num_written < 8:  # before the end of the run, whose policy is evaluated later
            assert iterations[-1] == math.ceil((num_written - 1) / CASES[script].num_saves)
        assert (iterations[-1] == 0) == (progress["step"] == 0) == (checkpoint["optimizer"]["state"] == {})
        if "best.pt" in written:
            assert load(target.parent / "best.pt")["progress"]["iteration"] > 0

    monkeypatch.setattr(os, "replace", replace_and_look)
    run_quick(script, tmp_path, "--eval-interval", 1)
    assert {0, 1, 2, 3, 4} <= {*iterations} and written[0] == "checkpoint.pt" and "best.pt" in written


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
    ("reinforce_tsp_attention", lambda x: ({"eval/greedy_length": x, "eval/greedy_gap": -x}, None)),
    ("ppo_change_detection", lambda x: {"eval/threshold": 0.5, "eval/net": x}),
]  # AlphaZero plays matches


@pytest.mark.parametrize(("script", "make_scores"), SCORES)
def test_the_best_of_all_evaluations_is_kept(script, make_scores, tmp_path, monkeypatch):
    """Of equal ones the later. A resumed run knows its score."""
    case, module = CASES[script], get_module(script)
    numbers = itertools.chain([-5.0, -3.0, -4.0, -3.0], itertools.repeat(-6.0))
    monkeypatch.setattr(module, "evaluate", lambda *_, **__: make_scores(next(numbers)))
    monkeypatch.setattr(module, "compare_rules", lambda *_: "nowhere", raising=False)
    done = run_quick(script, tmp_path, "--eval-interval 1")
    path, scores = done.path / "checkpoint.pt", []
    numbers = itertools.repeat(-3.5)
    for flags in ("", f"--resume {path} {case.length} {longer(done.path, case)}"):
        written = call_main(module, flags)[1] if flags else done.written
        best, last = (load(done.path / name)["progress"] for name in ("best.pt", "checkpoint.pt"))
        scores.append([abs(x) for x in (best["best_score"], last["best_score"], last["last_score"])])
        assert best["iteration"] == 4 < last["iteration"] and written.count("best.pt") == (0 if flags else 3)
    assert scores == [[3.0, 3.0, 6.0], [3.0, 3.0, 3.5]]


NOT_FINITE = """
ppo --env-id probe_envs:NotFiniteobs-v0 : obs of environment 1 in step 3 of an episode: not a number
ppo --env-id probe_envs:NotFinitereward-v0 : rewards of environment 1 in step 3 of an episode: not a number
ppo --learning-rate 1e30 : is (nan|inf) at step
r2d2_lstm --env-id probe_envs:NotFiniteobs-v0 : observation of environment 1 in step 3 .*: not a number
r2d2_lstm --env-id probe_envs:SameStepNotFiniteobs-v0 : observation of environment 1 in step 3 of an episode
r2d2_lstm --env-id probe_envs:NotFinitereward-v0 : reward of environment 1 in step 3 .*: not a number
r2d2_lstm --learning-rate 1e30 : is (nan|inf) at step
reinforce_tsp_attention --learning-rate 1e30 : is (nan|inf) at step
alphazero_go --learning-rate 1e30 : is (nan|inf) at step
ppo_change_detection --detector-lr 1e30 : is (nan|inf) at step
ppo_change_detection --learning-rate 1e30 : is (nan|inf) at step
"""


@pytest.mark.parametrize("line", NOT_FINITE.strip().splitlines())
def test_what_is_not_finite_ends_a_run_with_one_line(line, tmp_path, capsys):
    """The last checkpoint is of finite losses, and its weights are finite as well."""
    (script, flags), words = line.split(" : ")[0].split(" ", 1), line.split(" : ")[1]
    probe_envs.Fixed.made = 0
    flags = f"{CASES[script].quick} --eval-interval 1 --eval-episodes 0 {flags} --run-dir {tmp_path}"
    found = fail_with(capsys, get_module(script).main, flags.split())
    assert re.search(rf"error: [\w:/-]+:? .*{words}( \d+|.* below 1e18 in size)?$", found)
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
    is_ppo = "detection --learning" in line  # after the iterations of the detector
    assert (checkpoint["progress"]["iteration"] >= 2) == is_ppo


# What users do


@each_script
def test_a_frozen_layer_and_an_unused_parameter_train_on(script, tmp_path):
    """What is frozen stays, what no loss uses stays, and the rest is trained."""
    found, to = [], torch.nn.Module.to

    def edit(network, *args, **options):
        if not found:
            name, first = next(network.named_parameters())
            first.requires_grad_(False)
            network.unused = torch.nn.Parameter(torch.ones(3))
            found.extend((name, {name: x.clone() for name, x in network.state_dict().items()}, network))
        return to(network, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", edit)
        path = run_quick(script, tmp_path, "--eval-episodes", 0).path
    agent, (name, before, network) = load(path / "checkpoint.pt")["agent"], found
    assert torch.equal(agent[name], before[name]) and torch.equal(agent["unused"], torch.ones(3))
    moved = [not torch.equal(agent[name], before[name]) for name, _ in network.named_parameters()]
    assert sum(moved) >= (len(moved) - 2) / 2


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


@each_script
def test_ctrl_c_ends_with_the_command_that_resumes(script, tmp_path):
    """As the last line, with exit code 130. The command works."""
    case, folder, log = CASES[script], copy_script(script, tmp_path / "copy"), tmp_path / "log"
    flags = [*case.quick.split(), case.length, "1000000"]
    process = start_process(log, "run_copy", folder / f"{script}.py", *flags)
    while process.is_alive() and not list(folder.glob("runs/*/best.pt")):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert wait_for([process]) == [130], log.read_text()
    path = find_run(folder / "runs")
    command = log.read_text().splitlines()[-1].partition(": interrupted; to resume: ")[2].replace("'", "")
    assert command == f"python {folder}/{script}.py --resume runs/{path.name}/checkpoint.pt"
    run_copy(folder, script, *command.split(".py ")[1].split(), case.length, longer(path, case))


def resume_and_score(script: str, run: Path, *flags) -> str:
    """Resume a run, after which best.pt has to hold the best score; return what it prints."""
    out = call_main(get_module(script), " ".join(("--resume", str(run / "checkpoint.pt"), *flags)))[0]
    assert load(run / "best.pt")["progress"]["best_score"] == read_progress(run)["best_score"] is not None
    return out


@each_script
def test_a_finished_run_that_was_not_evaluated_is_evaluated(script, whole, never, tmp_path):
    """Or whose best.pt is missing. One that has all of this is not touched."""
    unknown = shutil.copytree(never.path, tmp_path / "never")
    out = resume_and_score(script, unknown, "--eval-episodes", "4")
    assert re.search(r", (\d+) of \1 done", out) and "not evaluated" not in out
    missing = shutil.copytree(whole.path, tmp_path / "missing")
    (missing / "best.pt").unlink()
    resume_and_score(script, missing)
    finished = shutil.copytree(whole.path, tmp_path / "finished")
    before = read_files(finished)
    resume_and_score(script, finished, CASES[script].length, "1")
    after = read_files(finished)
    assert all(after[finished / name] == before[finished / name] for name in ("checkpoint.pt", "best.pt"))


@each_script
def test_the_first_score_of_another_task_is_the_best(script, whole, tmp_path):
    case = CASES[script]
    for i, flags in enumerate(case.other_tasks):
        other = shutil.copytree(whole.path, tmp_path / str(i))
        before = (other / "best.pt").read_bytes()
        resume_and_score(script, other, flags, case.length, str(longer(whole.path, case)))
        assert (other / "best.pt").read_bytes() != before


@pytest.mark.parametrize("where", ["init", "step"])
@pytest.mark.parametrize("script", ["ppo", "r2d2_lstm"])
def test_the_traceback_of_a_users_environment_is_whole(script, where, tmp_path):
    """The error leaves `main` as it is."""
    module, flags = get_module(script), f"--env-id probe_envs:Broken{where}-v0"
    with pytest.raises(ValueError, match=r"^a fault of the user$") as error:
        run_main(module, tmp_path, flags)
    assert error.traceback[-1].path.name == "probe_envs.py" and error.value.__cause__ is None


# The form of a script


def source(script: str) -> str:
    return (ROOT / "algos" / f"{script}.py").read_text()


@pytest.mark.parametrize("path", MAX_TOKENS)
def test_a_file_is_within_its_budget_of_tokens(path):
    """Names, numbers, strings and operators; an f-string is one, also where Python's tokenizer splits it."""
    text, count, open_strings = (ROOT / path).read_text(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        count += open_strings == 0 and kind in ("NAME", "NUMBER", "STRING", "OP", "FSTRING_START")
        open_strings += {"FSTRING_START": 1, "FSTRING_END": -1}.get(kind, 0)
    assert count <= MAX_TOKENS[path]


def find_imports(nodes) -> set[str]:
    """Packages that the imports among `nodes` name."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", alias.name) for node in imports for alias in node.names}
    return {name.split(".")[0] for name in names}


@each_script
def test_pep723_block_has_the_packages_that_are_imported(script):
    """Also by its files of envs_shared/, and the package of the default task; requirements.txt pins them.

    Numpy, which gymnasium and torch depend on, may be left out.
    """
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source(script), re.M)
    metadata = tomllib.loads(re.sub("^# ?", "", block, flags=re.M))
    ranges = {r.name: r.specifier for r in map(Requirement, metadata["dependencies"])}
    tree = ast.parse(source(script))
    files = [ROOT / "envs_shared" / x for x in (CASES[script].sibling, CASES[script].reader) if x]
    trees = [tree, *(ast.parse(path.read_text()) for path in files)]
    packages = find_imports([node for x in trees for node in ast.walk(x)])
    packages -= {*sys.stdlib_module_names, "envs_shared"}
    packages = {{"PIL": "pillow"}.get(x, x) for x in packages} | {"tensorboard"}  # of torch.utils
    task = get_module(script).Args.env_id
    packages |= {task.split(":")[0]} if ":" in task else set()
    assert packages - OPTIONAL - {"numpy"} == ranges.keys() - {"numpy"}
    assert not find_imports(tree.body) & {"wandb", *OPTIONAL}  # imported only if a flag needs them
    pins = {r.name: r.specifier for r in map(Requirement, (ROOT / "requirements.txt").read_text().split())}
    for name, specifier in ranges.items():
        (pin,) = pins[name]
        assert pin.operator == "==" and specifier.contains(pin.version), name
    assert ranges["torch"].contains("2.11.0") and metadata["requires-python"] == ">=3.11"


@each_script
def test_a_script_imports_one_file_of_this_repository_at_most(script):
    """And a reader of rarer formats, which a copy alone does not need."""
    files = [ROOT / "envs_shared" / x for x in (CASES[script].sibling, CASES[script].reader) if x]
    own = set(re.findall(r"envs_shared(?:\.| import )(\w+)", source(script)))
    assert own == {path.stem for path in files}
    others = {"algos", "benchmark", "tests"}
    assert not any(find_imports(ast.walk(ast.parse(path.read_text()))) & others for path in files)


@each_script
def test_common_flags_come_first_and_are_spelled_alike(script):
    """Each field is on one line with a comment, which tyro shows as its help."""
    (args,) = re.findall(r"^class Args:\n(.*?)\n\n\n", source(script), re.M | re.S)
    # Without docstring and headings
    lines = [x for x in args.splitlines()[1:] if x and not x.startswith("    #")]
    found = [re.fullmatch(r"    (\w+: .+?) = .*  # \S.*", line)[1] for line in lines]
    common = [x for x in COMMON_FLAGS if x != "capture_video: bool" or x in found]
    assert found[: len(common)] == common


def split_at_run(script: str) -> tuple[str, str]:
    """The algorithm of a script, and its part Run without what may differ: Progress, main, and `capture`."""
    first, ruler, second = source(script).partition(f"# ---- Run {'-' * 99}\n")
    assert ruler
    for start in ("@dataclass\nclass Progress", "def capture", "def main"):
        second = re.sub(rf"^{start}.*?\n\n\n(?=\S)", "", second, flags=re.M | re.S)
    return first, second


@each_script
def test_the_part_run_is_that_of_all_scripts(script):
    """Byte by byte, and `capture` too if there is one. The rest writes no files and asks for no process."""
    first, second = split_at_run(script)
    assert second == split_at_run("ppo")[1] and second.count("\ndef ") > 6 and "class Run" in second
    capture = re.compile(r"^def capture.*?\n\n\n", re.M | re.S)
    assert capture.findall(source(script)) in ([], capture.findall(source("ppo")))
    assert not re.search(r"if .*RANK|torch\.save|os\.replace|SummaryWriter\(|wandb\.|lambda: run", first)
    train = first[first.index("\ndef train(") :]
    assert not re.search(r"^    +def ", train, re.M)  # no closures
