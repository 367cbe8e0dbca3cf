"""The contract of the scripts that are not in MOVED of test_contract.py, held against each of them by running it.

For each script there is one whole run, one that is killed and resumed, and a few that go on from copies of the former;
from them the tests read what they hold.
"""

import ast
import contextlib
import importlib
import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import tomllib
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, read_scalars, start_process, wait_for
from packaging.requirements import Requirement
from test_contract import MOVED
from torch.utils.tensorboard import SummaryWriter

SCRIPTS = sorted({p.stem for p in (ROOT / "algos").glob("*.py")} - set(MOVED))
KILLED_AT = 6  # the number of the checkpoint at which a run is killed; the first is of before the training


@dataclass
class Case:
    """How the tests run a script."""

    short: str  # flags that make it end within seconds, after about eight iterations, with evaluations on the way
    rarely: str  # other flags of when to evaluate and to write checkpoints
    length: str  # the flag that says how long a run is,
    extended: int  # and a value of it that goes a little beyond
    progress: tuple[str, str]  # words of the progress bar
    tags: tuple[str, str]  # logged tags
    score: tuple[str, int] | None = (
        None  # tag that the best is chosen by, if not the headline; 1 for max, -1 for min
    )
    groups: tuple[str, ...] = ()  # of tags, beside charts, losses and eval


CASES = {
    "ppo_change_detection": Case(
        "--num-train-pairs 16 --image-size 32 --batch-size 4 --num-envs 8 --coarse-iterations 1 --refine-iterations 1"
        " --ppo-iterations 6 --eval-episodes 4 --checkpoint-interval 1 --eval-interval 2",
        *("--eval-interval 100 --checkpoint-interval 0", "--ppo-iterations", 7),
        progress=("return=", "iteration"),
        tags=("charts/episodic_return", "losses/value_loss"),
        score=("eval/val_score", 1),
    ),
}
TIMES = re.compile(r"SPS|per_second|_seconds|_ms$|_idle$")  # metrics that no two runs have in common
# What the section Run holds, the same to the letter in every script
SHARED = (
    "fail setup_device seed_everything read_clock sum_over_ranks sum_gradients save_checkpoint load_checkpoint "
    "open_run CudaGraph"
).split()
COMMON_FLAGS = (
    "exp_name seed torch_deterministic cuda torch_threads run_dir track wandb_project_name wandb_entity capture_video "
    "resume evaluate checkpoint_interval eval_interval eval_episodes compile cuda_graphs"
).split()
SECTIONS = ["Networks", "Storage", None, "Evaluation", "Run", "Training"]  # None: the algorithm's name


# Run a test for each of the scripts, with what is made once for all tests of a script
each_script = pytest.mark.parametrize("script", SCRIPTS, indirect=True, scope="module")


# Runs that many tests read


@dataclass
class Run:
    """What a run leaves: its folder, what it printed, and the names of what it replaced, with "flush" for its log."""

    path: Path
    out: str
    err: str
    written: list[str]


def run_main(script, *flags):
    """Call the script's `main` where neither wandb nor matplotlib is installed."""
    module, out, err, written = importlib.import_module(f"algos.{script}"), io.StringIO(), io.StringIO(), []
    replace, flush = os.replace, SummaryWriter.flush

    def record(source, target):
        written.append(Path(target).name)
        replace(source, target)

    def record_flush(writer):
        written.append("flush")
        flush(writer)

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name in ("wandb", "matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        patch.setattr(os, "replace", record)
        patch.setattr(SummaryWriter, "flush", record_flush)
        module.main(list(map(str, flags)))
    folder = re.search(r"run folder (\S+)", out.getvalue())
    return Run(Path(folder[1]) if folder else None, out.getvalue(), err.getvalue(), written)


def run_short(script, folder, *flags):
    return run_main(script, *CASES[script].short.split(), "--seed", 3, "--run-dir", folder, *flags)


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run from its beginning to its end."""
    return run_short(script, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def same(script, tmp_path_factory):
    """The same run with hardly any evaluations and checkpoints."""
    return run_short(script, tmp_path_factory.mktemp("same"), *CASES[script].rarely.split())


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of that run's folder, to go on from."""
    return Path(shutil.copytree(whole.path, tmp_path / "copied" / whole.path.name))


@pytest.fixture(scope="module")
def cut(script, tmp_path_factory):
    """The same run, killed in a process of its own while it wrote a checkpoint; as it was left, and resumed."""
    folder = tmp_path_factory.mktemp("cut")
    flags = [*CASES[script].short.split(), "--seed", "3", "--run-dir", str(folder)]
    log = tmp_path_factory.mktemp("log") / "log"
    process = start_process(log, {}, "kill", script, KILLED_AT, *flags)
    assert wait_for([process]) == [-signal.SIGKILL], log.read_text()
    (path,) = folder.iterdir()
    left = Path(shutil.copytree(path, tmp_path_factory.mktemp("left") / path.name))
    time.sleep(1.1)  # TensorBoard orders event files by the second they were made in
    return left, run_main(script, "--resume", path / "checkpoint.pt")


def load(path):
    return torch.load(path, weights_only=True)


read_scalars_once = cache(read_scalars)


def read_json(path):
    return json.loads(path.read_text())


def source(script):
    return (ROOT / "algos" / f"{script}.py").read_text()


def drop_times(metrics):
    return {name: value for name, value in metrics.items() if not TIMES.search(name)}


def are_same_weights(path_a, path_b):
    a, b = load(path_a / "checkpoint.pt")["agent"], load(path_b / "checkpoint.pt")["agent"]
    return all(torch.equal(a[k], b[k]) for k in a)


def assert_no_step_twice(scalars):
    for tag, values in scalars.items():
        steps = [step for step, _ in values]
        assert len(set(steps)) == len(steps), tag


def assert_refuses(script, capsys, flags, *messages):
    """The script ends with exit code 2 and one line that says each of `messages`."""
    with pytest.raises(SystemExit) as error:
        importlib.import_module(f"algos.{script}").main(list(map(str, flags)))
    lines = capsys.readouterr().err.strip().splitlines()
    assert error.value.code == 2 and len(lines) == 1, lines
    assert all(message in lines[0] for message in messages), lines


# What a run leaves


@each_script
def test_run_folder_result_and_checkpoint(script, whole):
    path, result, case = whole.path, read_json(whole.path / "result.json"), CASES[script]
    assert re.fullmatch(rf"{re.escape(result['env_id'])}__{script}__3__\d+", path.name)
    keys = "script env_id seed headline metrics env_steps wall_seconds cpu_seconds device torch args".split()
    assert list(result) == keys
    assert result["script"] == script and result["seed"] == 3 and result["headline"] in result["metrics"]
    assert all(isinstance(v, (int, float)) for v in result["metrics"].values())
    assert result["env_steps"] > 0 and result["wall_seconds"] > 0 and result["cpu_seconds"] > 0
    assert load(path / "checkpoint.pt")["script"] == script
    assert {p.name for p in path.iterdir() if "events" not in p.name} == {
        "checkpoint.pt",
        "best.pt",
        "result.json",
    }
    scalars = read_scalars_once(path)
    assert {tag.split("/")[0] for tag in scalars} == {"charts", "losses", "eval", *case.groups}
    assert set(case.tags) <= scalars.keys()
    assert_no_step_twice(scalars)
    assert str(path) in whole.out.splitlines()[-1]  # one line of summary, with the run folder
    assert all(word in whole.err for word in case.progress)  # tqdm


@each_script
def test_a_checkpoint_before_the_training_and_one_an_iteration(script, whole, cut):
    """By os.replace alone: `cut` shows that a kill before it leaves the checkpoint of before. The log is not behind."""
    last = load(whole.path / "checkpoint.pt")["iteration"]
    assert whole.written.count("checkpoint.pt") == last + 1 > KILLED_AT and whole.written[-1] == "result.json"
    before = [a for a, b in itertools.pairwise(whole.written) if b == "checkpoint.pt"]
    assert before[-last:] == ["flush"] * last
    left, _ = cut
    assert load(left / "checkpoint.pt")["iteration"] == KILLED_AT - 2
    assert not (left / "result.json").exists()


@each_script
def test_the_seed_fixes_everything_and_evaluations_and_checkpoints_change_nothing(
    script, whole, same, tmp_path
):
    other = run_short(script, tmp_path, *CASES[script].rarely.split(), "--seed", 4)
    assert are_same_weights(whole.path, same.path)
    assert not are_same_weights(whole.path, other.path)
    few, many = (
        sum(len(x) for tag, x in read_scalars(run.path).items() if "eval" in tag) for run in (same, whole)
    )
    assert few < many and same.written.count("checkpoint.pt") == 2


@each_script
def test_a_killed_run_resumes_to_the_same_numbers(script, whole, cut):
    left, resumed = cut
    assert (
        resumed.path == Path(load(left / "checkpoint.pt")["args"]["run_dir"]) / left.name
    )  # in its own folder
    ends = [load(path / "checkpoint.pt") for path in (whole.path, resumed.path)]
    for part in ("agent", "optimizer"):
        assert_equal(*(end[part] for end in ends))
    assert_equal(*(load(path / "best.pt")["agent"] for path in (whole.path, resumed.path)))
    a, b = (drop_times(read_json(path / "result.json")["metrics"]) for path in (whole.path, resumed.path))
    assert a == b
    assert read_scalars(left)  # what it had logged is gone on with
    a, b = (drop_times(read_scalars_once(path)) for path in (whole.path, resumed.path))
    assert a.keys() == b.keys()
    for tag in a:
        np.testing.assert_array_equal(a[tag], b[tag], err_msg=tag)  # no step logged twice or not at all
    assert not list(resumed.path.glob("*.tmp"))


def assert_equal(a, b):
    """Two parts of checkpoints are the same, to the bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
    if isinstance(a, (dict, list, tuple)):
        assert len(a) == len(b)
        for key in a if isinstance(a, dict) else range(len(a)):
            assert_equal(a[key], b[key])
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# Writing


def fork(act):
    """Exit code of a process that does `act`; minus the signal that killed it."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        act()
        os._exit(0)
    finally:
        os._exit(1)


@each_script
def test_a_death_at_any_moment_of_writing_leaves_the_old_checkpoint_or_the_new_one(script, tmp_path):
    """Killed before each line of the script that runs then, or out of space after some of the bytes."""
    module, path = importlib.import_module(f"algos.{script}"), tmp_path / "checkpoint.pt"

    def write(x):
        module.save_checkpoint(path, module.Args(), {"x": x}, {"agent": torch.nn.Linear(20, 20)})

    def write_and_die(last_line):
        lines = itertools.count()

        def trace(frame, event, arg):
            if frame.f_code.co_filename != module.__file__:
                return None
            if event == "line" and next(lines) == last_line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        write(2)

    def write_at_most(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        write(2)

    def is_new_after(act, bound):
        write(1)
        status, found = fork(partial(act, bound)), load(path)["x"]
        assert found == 2 if status == 0 else found in (1, 2)
        return found == 2

    found = []
    while found[-3:] != [True] * 3:
        found.append(is_new_after(write_and_die, len(found)))
    assert found.index(True) > 4 and all(found[found.index(True) :])
    size = path.stat().st_size
    assert [is_new_after(write_at_most, n) for n in (0, 1, size // 2, size - 1, size)] == [False] * 4 + [True]


# Going on with finished and unfinished runs


@each_script
def test_a_run_killed_before_its_result_is_finished_by_a_resume(script, whole, copied):
    (copied / "result.json").unlink()
    run = run_main(script, "--resume", copied / "checkpoint.pt")
    again, result = (read_json(path / "result.json")["metrics"] for path in (copied, whole.path))
    assert run.path == copied.resolve() and drop_times(again) == drop_times(result)
    assert are_same_weights(copied, whole.path)


@each_script
def test_a_finished_run_is_extended_in_its_folder(script, whole, copied, capsys):
    """The result of before stays beside the new one."""
    checkpoint, length, before = (
        copied / "checkpoint.pt",
        CASES[script].length,
        (copied / "result.json").read_bytes(),
    )
    files = {p.name for p in copied.iterdir()}
    assert_refuses(script, capsys, ["--resume", checkpoint], length)
    assert {p.name for p in copied.iterdir()} == files
    run = run_main(script, "--resume", checkpoint, length, CASES[script].extended)
    steps = [load(path / "checkpoint.pt")["global_step"] for path in (whole.path, copied)]
    assert run.path == copied and steps[0] < steps[1]
    assert (copied / f"result_{steps[0]}.json").read_bytes() == before
    assert read_json(copied / "result.json")["env_steps"] == steps[1]
    old, new = (read_scalars(path) for path in (whole.path, copied))
    assert_no_step_twice(new)
    assert all(new[tag][: len(old[tag])] == old[tag] for tag in old)  # the log goes on


@each_script
def test_a_run_that_goes_on_from_its_first_checkpoint_logs_no_step_twice(script, tmp_path):
    """What was logged after step 0 is no longer shown."""
    module = importlib.import_module(f"algos.{script}")
    flags = {"run_dir": str(tmp_path)}
    for values in ((1.0, 2.0), (3.0,)):
        path, writer = module.open_run(module.Args(**flags), 0)
        for step, value in enumerate(values, 1):
            writer.add_scalar("losses/x", value, step)
        writer.close()
        flags["resume"] = str(path / "checkpoint.pt")
    assert read_scalars(path)["losses/x"] == [(1, 3.0)]


@each_script
def test_more_processes_than_gpus_are_one_line(script, capsys, monkeypatch):
    module = importlib.import_module(f"algos.{script}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as error:
        module.setup_device(module.Args())
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and "more than 1 GPU(s); --no-cuda" in line


@each_script
def test_runs_started_in_the_same_second_get_folders_of_their_own(script, tmp_path, monkeypatch):
    module, ticks = importlib.import_module(f"algos.{script}"), itertools.count()
    monkeypatch.setattr(module.time, "time", lambda: 1e9 + next(ticks) * 1e-6)
    paths = {run_short(script, tmp_path, CASES[script].length, 1).path for _ in range(2)}
    assert len(paths) == 2 and paths == set(tmp_path.iterdir())


# Evaluation


def evaluate(script, *flags):
    """What --evaluate prints, name to number."""
    return {
        k: float(v)
        for k, v in (line.split() for line in run_main(script, "--evaluate", *flags).out.splitlines())
    }


@each_script
def test_evaluation_prints_the_numbers_of_the_run(script, whole):
    metrics = read_json(whole.path / "result.json")
    metrics = drop_times(metrics["metrics"])
    files = {p: p.read_bytes() for p in whole.path.iterdir()}
    printed = drop_times(evaluate(script, whole.path / "checkpoint.pt"))
    best = drop_times(evaluate(script, whole.path / "best.pt"))
    best = {name.replace("eval/", "best/", 1): value for name, value in best.items()}
    assert printed | best == pytest.approx(metrics, abs=0.006)  # the same episodes, of both
    assert {p: p.read_bytes() for p in whole.path.iterdir()} == files


# Packages that may be missing


@each_script
def test_runs_without_wandb_and_matplotlib(script, same, tmp_path, monkeypatch, capsys):
    """As all runs here do."""
    assert not list(same.path.glob("*.png"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_refuses(script, capsys, ["--track", "--run-dir", tmp_path / "runs"], "pip install wandb")
    assert not (tmp_path / "runs").exists()


# Bad input


@each_script
def test_bad_files_and_folders_are_one_line_and_exit_code_2(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"script": "another", "args": {}}, "another.pt")
    torch.save({"weights": torch.zeros(2)}, "weights.pt")
    torch.save({"script": script, "args": {"old_flag": 1}}, "old.pt")
    torch.save({"script": script, "args": ["--seed", 1]}, "list.pt")
    (tmp_path / "file").write_text("")
    torch.save(Path("unpickled"), "pickle.pt")
    for flags, message in (
        ("--resume missing.pt", "missing.pt: no such checkpoint"),
        ("--resume garbage.pt", "garbage.pt: not a readable checkpoint"),
        ("--evaluate pickle.pt", "pickle.pt: not a readable checkpoint"),
        ("--evaluate another.pt", "another.pt: a checkpoint of another.py"),
        ("--resume weights.pt", "weights.pt: not a "),
        ("--resume old.pt", "old.pt: "),
        ("--resume old.pt --evaluate old.pt", "--resume and --evaluate"),
        ("--run-dir file", "--run-dir file"),
        ("--seed -1", "--seed"),
        ("--torch-threads 0", "--torch-threads"),
        ("--eval-episodes 0", "--eval-episodes"),
        ("--checkpoint-interval -1", "--checkpoint-interval"),
        ("--evaluate list.pt", "list.pt: "),
        ("--resume=", "no such checkpoint"),
    ):
        before = sorted(tmp_path.iterdir())
        assert_refuses(script, capsys, flags.split(), message)
        assert sorted(tmp_path.iterdir()) == before


@each_script
def test_tracking_without_a_login_is_one_line_and_exit_code_2(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))  # where a login is kept
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    assert_refuses(script, capsys, ["--track", "--run-dir", tmp_path / "runs"], "--track", "wandb login")
    assert not (tmp_path / "runs").exists()


@each_script
def test_a_folder_that_cannot_be_written_and_names_that_wandb_refuses(script, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"algos.{script}")
    (tmp_path / "result.json").write_text("{}")
    with monkeypatch.context() as patch:  # root may write everywhere
        patch.setattr(Path, "rename", lambda old, new: (tmp_path / "missing" / "file").touch())
        with pytest.raises(SystemExit) as error:
            module.open_run(module.Args(resume=str(tmp_path / "checkpoint.pt")), 7)
    (line,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and line.endswith(
        f"cannot make or write {tmp_path} (No such file or directory)"
    )
    path, writer = module.open_run(module.Args(run_dir=str(tmp_path / "runs"), exp_name="a/b:c;d,e#f?g'h"), 0)
    writer.close()
    assert path.parent == tmp_path / "runs" and "__a-b-c-d-e-f-g-h__" in path.name


@each_script
def test_the_best_policy_is_the_one_that_scored_best_and_cannot_be_resumed(script, whole, capsys):
    """Of those evaluated on the way; ties go to the later one."""
    best, result = load(whole.path / "best.pt"), read_json(whole.path / "result.json")
    assert best["script"] == script and "optimizer" not in best
    tag, sign = CASES[script].score or (result["headline"], 1)
    found = dict(read_scalars_once(whole.path)[tag])
    assert len(found) > 2 and best["global_step"] == max(found, key=lambda step: (sign * found[step], step))
    assert_refuses(script, capsys, ["--resume", whole.path / "best.pt"], "best.pt", "--resume")


@each_script
def test_settings_that_a_checkpoint_lacks_take_their_defaults(script, whole, tmp_path, monkeypatch):
    """As a checkpoint does that was written before a flag was added."""
    module, checkpoint = importlib.import_module(f"algos.{script}"), load(whole.path / "checkpoint.pt")
    for name in ("eval_episodes", "cuda_graphs", list(checkpoint["args"])[-1]):
        del checkpoint["args"][name]
    torch.save(checkpoint, tmp_path / "old.pt")
    given = []
    monkeypatch.setattr(module, "train", lambda args, checkpoint: given.append(args))
    run_main(script, "--resume", tmp_path / "old.pt")
    lacking = {
        name: getattr(module.Args, name) for name in module.Args.__annotations__.keys() - checkpoint["args"]
    }
    assert len(lacking) == 3 and vars(given[0]) == checkpoint["args"] | lacking | {
        "resume": str(tmp_path / "old.pt")
    }
    metrics = drop_times(read_json(whole.path / "result.json")["metrics"])
    printed = drop_times(evaluate(script, tmp_path / "old.pt", "--eval-episodes", 4))
    assert printed == pytest.approx({k: metrics[k] for k in printed}, abs=0.006)


# The form of a script


def read_fields(script):
    """Fields of Args, [(name, annotation, default, comment), ...], one line each, with a comment there or above."""
    text = source(script)
    (args,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Args")
    lines, found = text.splitlines(), []
    for field in args.body[1:]:  # without the docstring
        assert isinstance(field, ast.AnnAssign) and field.lineno == field.end_lineno, ast.unparse(field)
        comment = lines[field.lineno - 1][field.end_col_offset :] or lines[field.lineno - 2].replace(
            "    ", "  "
        )
        assert re.fullmatch(r"  # \S.*", comment), f"{field.target.id}: {comment}"
        comment = comment[4:]
        found.append((field.target.id, ast.unparse(field.annotation), ast.unparse(field.value), comment))
    return found


@each_script
def test_common_flags_come_first_and_are_the_same_everywhere(script):
    mine = read_fields(script)
    common = [f for f in COMMON_FLAGS if f != "capture_video" or any(f[0] == "capture_video" for f in mine)]
    assert [f[0] for f in mine[: len(common)]] == common
    assert not {f[0] for f in mine[len(common) :]} & set(COMMON_FLAGS)
    theirs = [dict((f[0], f) for f in read_fields(other)) for other in SCRIPTS]
    for field in mine[: len(common)]:
        assert all(other.get(field[0], field) == field for other in theirs)


@each_script
def test_help_shows_every_field_with_its_comment(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        importlib.import_module(f"algos.{script}").main(["--help"])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for name, _, _, comment in read_fields(script):
        assert f"--{name.replace('_', '-')}" in text and " ".join(comment.split()) in text, name


@cache
def find_functions(script):
    """Functions and classes at the top of a script, name to lines; without decorators."""
    text = source(script)
    lines, nodes = text.splitlines(), ast.parse(text).body
    return {
        n.name: lines[n.lineno - 1 : n.end_lineno]
        for n in nodes
        if isinstance(n, (ast.FunctionDef, ast.ClassDef))
    }


@each_script
def test_shared_functions_are_the_same_to_the_letter(script):
    mine, theirs = find_functions(script), [find_functions(other) for other in SCRIPTS]
    for name in SHARED:
        assert any(name in other for other in theirs), name
        assert name not in mine or all(other.get(name, mine[name]) == mine[name] for other in theirs), name
    assert {
        *"fail setup_device seed_everything save_checkpoint load_checkpoint open_run".split()
    } <= mine.keys()


def find_sections(script):
    """Source text under each ruler of a script, by the ruler's words without what stands in parentheses."""
    title = r"^# ---- (.+?)(?: \(.+\))? -+$"
    _, *parts = re.split(title, source(script), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@each_script
def test_sections_are_in_order(script):
    titles = [None if i == 2 else title for i, title in enumerate(find_sections(script))]
    assert titles == SECTIONS


@each_script
def test_section_run_has_nothing_of_its_own(script):
    section = find_sections(script)["Run"]
    names = [getattr(n, "name", None) for n in ast.parse(section).body]
    assert names == [name for name in SHARED if name in names]


def parse_pep723(script):
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source(script), re.M)
    return tomllib.loads(
        "".join(line[2:] if line[1:2] == " " else line[1:] for line in block.splitlines(True))
    )


def find_imports(nodes):
    """Names of the modules that the imports among `nodes` name."""
    nodes = list(nodes)
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return modules | {n.module for n in nodes if isinstance(n, ast.ImportFrom)}


@each_script
def test_pep723_block_fits_requirements_and_imports(script):
    """`uv run` gets the packages that requirements.txt pins, in ranges that admit the pins and older versions."""
    metadata = parse_pep723(script)
    assert metadata["requires-python"] == ">=3.11"
    ranges = {r.name: r.specifier for r in map(Requirement, metadata["dependencies"])}
    pins = {r.name: r.specifier for r in map(Requirement, (ROOT / "requirements.txt").read_text().split())}
    assert ranges.keys() <= pins.keys()
    for name, specifier in ranges.items():
        (pin,) = pins[name]
        assert pin.operator == "==" and specifier.contains(pin.version), name
    assert ranges["torch"].contains("2.11.0")
    tree = ast.parse(source(script))
    modules = find_imports(ast.walk(tree))
    third_party = {m.split(".")[0] for m in modules} - set(sys.stdlib_module_names) - {"envs_shared"}
    used = {{"PIL": "pillow"}.get(m, m) for m in third_party}
    assert used <= ranges.keys()
    # And no more than is used; tensorboard by torch, pillow by it for pictures, matplotlib by helpers
    assert ranges.keys() - used <= {"tensorboard", "pillow", "numpy", "tqdm", "matplotlib"}
    assert not any(m.split(".")[0] in ("algos", "tests", *SCRIPTS) for m in modules)
    assert not {m.split(".")[0] for m in find_imports(tree.body)} & {
        "wandb",
        "matplotlib",
    }  # imported where used


def test_helpers_import_what_may_be_missing_where_they_use_it():
    for path in (ROOT / "envs_shared").rglob("*.py"):
        modules = find_imports(ast.parse(path.read_text()).body)
        assert not {m.split(".")[0] for m in modules} & {"wandb", "matplotlib", "algos", "tests"}, path


def test_every_script_is_in_the_readme_and_has_docs_and_tests():
    readme = (ROOT / "README.md").read_text()
    for script in SCRIPTS:
        assert f"algos/{script}.py`" in readme
        assert (ROOT / "docs" / f"{script}.md").exists() and (ROOT / "tests" / f"test_{script}.py").exists()
