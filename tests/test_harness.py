"""The benchmark harness: suites, guarded cells, runs, report and comparison."""

import importlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
import tyro
from conftest import ENVIRONMENT, ROOT
from torch.distributed.run import get_args_parser
from torch.utils.tensorboard import SummaryWriter

sys.path += [str(ROOT / "benchmark"), str(ROOT / "benchmark" / "peers")]
import common
import compare
import records
import report
import run
import suite as suites
from common import ResultsError
from suite import read_suite

SHORT = "python algos/ppo.py --num-envs 8 --total-timesteps 2560 --eval-episodes 4"
SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))
SCRIPTS = {path.stem for path in (ROOT / "algos").glob("*.py")}
WITHOUT_ABLATIONS = {"ppo_change_detection"}  # a study compares its rivals


def define_cell(command="python algos/ppo.py", **keys):
    """Make a cell as a suite does."""
    table = {"task": "T", "setting": "s", "headline": "eval/x", "command": command}
    return suites.make_cell(table | keys, {}, "here")


def write_suite(path, seeds=(1,), **commands):
    """Write a suite on CartPole-v1 with a cell for each setting=command."""
    text = f'seeds = {list(seeds)}\nheadline = {{ ppo = "eval/episodic_return" }}\n'
    for setting, command in commands.items():
        text += f'[[cells]]\ntask = "CartPole-v1"\nsetting = "{setting}"\ncommand = "{command}"\n'
    path.write_text(text)
    return path


def start_harness(*flags):
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes)


def wait_until(find, seconds=120):
    deadline = time.time() + seconds
    while not (found := find()):
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def find_processes(word):
    """List the living processes that have `word` in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if is_alive and any(str(word) in text for text in process.info["cmdline"] or []):
            found.append(process)
    return found


def find_cells(word):
    """List the living processes with `word` that are scripts, not guards."""
    return [p for p in find_processes(word) if "guard.py" not in " ".join(p.info["cmdline"])]


def list_done(runs):
    """List the attempts whose process has ended with exit code 0."""
    paths = [path for path in runs.rglob("process.json") if json.loads(path.read_text())["exit_code"] == 0]
    return [path.parent for path in paths]


# ---- Suites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_parse_against_the_scripts(path):
    """The parsers of scripts, peers and torchrun take the flags, and what the pages show names cells."""
    cells, shown = read_suite(path)
    by_name = {cell.name: cell for cell in cells}
    for cell in by_name.values():
        split = cell.words.index(cell.path)
        flags = [*cell.words[split + 1 :], "--seed", "1", "--run-dir", "runs"]
        if cell.words[0] == "torchrun":
            assert get_args_parser().parse_args(cell.words[1:]).training_script == cell.path
        if cell.path.startswith("algos/"):
            tyro.cli(importlib.import_module(f"algos.{cell.script}").Args, args=flags)
        else:
            importlib.import_module(cell.script).make_parser().parse_args(flags)
        assert not cell.environment or (common.PEERS / f"requirements-{cell.environment}.txt").exists()
    shown_names = {name for ratio in shown["ratios"] for name in (ratio["ours"], ratio["peer"])}
    for names, *_ in report.SUMMARY_NUMBER.findall(shown["summary"]):
        shown_names |= set(names.split(":"))
    assert by_name.keys() >= shown_names
    if path.stem in ("smoke", "cpu", "gpu", "ablations"):
        without = WITHOUT_ABLATIONS if path.stem == "ablations" else set()
        assert {cell.script for cell in cells} >= SCRIPTS - without


CELL = '[[cells]]\ntask = "T"\nsetting = "s"\ncommand = "python algos/ppo.py"\n'


def test_a_suite_lists_its_cells_seed_by_seed(tmp_path):
    """Compared runs follow one another. A cell's own headline precedes that of its script."""
    two = CELL.replace('"s"', '"t"').replace("python", "torchrun --standalone --nproc-per-node 2")
    start = "seeds = [1, 7]\nheadline = { ppo = 'eval/y' }\n"
    (tmp_path / "a.toml").write_text(f"{start}{CELL}headline = 'eval/x'\n{two}")
    cells, _ = read_suite(tmp_path / "a.toml")
    found = [(cell.setting, cell.seed, cell.headline) for cell in cells]
    assert found == [("s", 1, "eval/x"), ("t", 1, "eval/y"), ("s", 7, "eval/x"), ("t", 7, "eval/y")]
    *_, one, two = (run.make_command(cell, "/its/python", tmp_path) for cell in cells)
    rest = ["algos/ppo.py", "--seed", "7", "--run-dir", str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert one == ["/its/python", *rest] and two == ["/its/python", *launcher, *rest]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [1]", "seeds = [1", "cannot be read as TOML"),
        (CELL, "", "no cells"),
        ("seeds = [1]", "seeds = 5", r"cell 1: seeds = 5: write seeds = "),
        ("seeds = [1]", "seeds = [1, 1]", "two cells .*ppo/T/s', 1"),
        ("algos/ppo", "algos/dqn", "command = 'python algos/dqn.py' has to be python or torchrun"),
        ("python", "torchrun --nproc-per-node 2", "torchrun --standalone"),
        ("'eval/x'", "3", "cell 1: headline = 3 has to be str"),
        ('"T"', '"../T"', "'../T' is not a name"),
        ('setting = "s"', "", "missing 1 required .*'setting'"),
        ('setting = "s"', 'setting = "s"\ncurv = "x"', "unexpected keyword argument 'curv'"),
        ('setting = "s"', 'setting = "s"\nthreshold = 3', "a threshold needs the tag of its curve"),
        ('setting = "s"', 'setting = "s"\nbetter = "more"', "better is neither"),
    ],
)
def test_what_is_wrong_with_a_suite_is_one_line(tmp_path, old, new, message):
    path = tmp_path / "suite.toml"
    path.write_text(f"seeds = [1]\nheadline = {{ ppo = 'eval/x' }}\n{CELL}".replace(old, new))
    with pytest.raises(ResultsError, match=message) as error:
        read_suite(path)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(path))


FILES = {
    "algos/ppo.py": "from envs_shared import a\nimport numpy\n",
    "envs_shared/__init__.py": "",
    "envs_shared/a.py": "a = 1\n",
    "envs_shared/b.py": "b = 1\n",
    "envs_shared/own.py": "c = 1\n",
    "benchmark/peers/match.py": 'import shared\nENGINE = "algos/ppo.py"\nDATA = "benchmark/data/r.txt"\n',
    "benchmark/data/r.txt": "3.85\n",
    "benchmark/data/s.txt": "3.85\n",
    "benchmark/peers/shared.py": "'of algos/none.py and others'\n",
    "benchmark/peers/requirements-x.txt": "x==1\n",
    "net.pt": "weights",
    "algos/net.pt": "weights",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository of small files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "PEERS", tmp_path / "benchmark" / "peers")
    return tmp_path


def test_the_hash_is_of_the_command_and_of_all_files_it_uses(tree):
    """A script's sibling, the files that a peer or a flag names, a peer's packages; no neighbours."""
    ours = define_cell("python algos/ppo.py --gamma 0.9")
    named = define_cell("python algos/ppo.py --env-id envs_shared.own:T-v0")
    match = define_cell("python benchmark/peers/match.py --net algos/net.pt", environment="x")
    cells, changed = (ours, named, match), defaultdict(set)
    before = [cell.hash() for cell in cells]
    for name, text in FILES.items():
        (tree / name).write_text(f"{text}#")
        for cell, old in zip(cells, before, strict=True):
            changed[cell] |= {name} if cell.hash() != old else set()
        (tree / name).write_text(text)
    assert changed[ours] == {"algos/ppo.py", "envs_shared/a.py", "envs_shared/__init__.py"}
    assert changed[named] == changed[ours] | {"envs_shared/own.py"}
    peers = {f"benchmark/peers/{name}" for name in ("match.py", "shared.py", "requirements-x.txt")}
    assert changed[match] == changed[ours] | peers | {"benchmark/data/r.txt", "algos/net.pt"}
    assert define_cell(ours.command, setting="t", seed=2).hash() == ours.hash() == before[0]
    assert define_cell("python algos/ppo.py --gamma 0.8").hash() != before[0]


def test_what_a_script_uses_is_what_it_imports():
    """The files that real programs use, beside lists by hand."""
    for script, used in (
        ("algos/r2d2_lstm", []),
        ("algos/ppo_change_detection", ["__init__", "change_folders", "change_pairs"]),
        ("benchmark/peers/our_go_search", ["go", "go_gtp"]),
    ):
        found = {str(path.relative_to(ROOT)) for path in suites.find_used_files(ROOT / f"{script}.py")}
        assert {name for name in found if "envs_shared" in name} == {
            f"envs_shared/{name}.py" for name in used
        }
        assert f"{script}.py" in found and ("algos/alphazero_go.py" in found) == ("go_search" in script)


def test_bad_input_is_one_line(tmp_path):
    """Also an address at which something listens and says nothing: Ray itself would wait for minutes."""
    suite = write_suite(tmp_path / "a.toml", a=SHORT)
    (tmp_path / "file").write_text("")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        for flags, message in (
            ([tmp_path / "none.toml"], "cannot be read"),
            ([suite, "--only", "r2d2*"], "no such cell"),
            ([suite, "--runs", tmp_path / "file"], "file"),
            ([suite, "--address", "127.0.0.1:1"], "no Ray cluster answers there"),
            ([suite, "--address", f"127.0.0.1:{server.getsockname()[1]}"], "no Ray cluster answers there"),
        ):
            with pytest.raises(ResultsError, match=message) as error:
                run.main(["--runs", str(tmp_path / "runs"), *map(str, flags)])
            assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_no_program_imports_ray_unless_it_has_an_address():
    code = "import sys, run, report, compare; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmark", check=True)


# ---- Cells -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_python(tmp_path):
    """Run code as a cell with these keys. Returns the folder of the attempt, the run or None, and the error."""
    numbers = count()

    def run_code(code, given=None, **keys):
        cell = define_cell(**keys)
        path = tmp_path / f"cell{next(numbers)}" / f"seed-{cell.hash()}" / "try_1"
        run.run_cell(cell, path, [sys.executable, "-c", code, str(path)], given)
        return path, *records.find_run(path.parent, vars(cell))

    return run_code


def write_run(folder, tags, num_points=3, program=""):
    """Log step / 10 under each tag at the steps 100, 200, ... of a run that takes 0.02 CPU-seconds a step."""
    with SummaryWriter(str(folder)) as writer:
        for step in range(100, 100 * num_points + 1, 100):
            for tag in tags:
                writer.add_scalar(tag, step / 10, step)
            writer.add_scalar("charts/cpu_seconds", step * 0.02, step)
        if program:
            writer.add_text("program", program)


def copy_run(folder, end=""):
    """Return the code of a cell that leaves a copy of `folder` as its run folder, and then does `end`."""
    return f"import os, shutil, sys; shutil.copytree({str(folder)!r}, sys.argv[1] + '/run'); {end}"


def test_a_run_is_read_from_its_events(run_python, tmp_path):
    """Metrics are the last values of evaluations. Seconds are those of the training, or of the clock for GPUs."""
    tags = "charts/episodic_return", "eval/x", "best/length", "losses/x"
    write_run(tmp_path / "left", tags, num_points=20)
    keys = {"curve": "eval/x", "threshold": 150, "seed": 3}
    path, found, _ = run_python(copy_run(tmp_path / "left"), **keys)
    assert found["headline"] == "eval/x" and found["value"] == 200.0 and found["seed"] == 3
    assert found["metrics"] == {"eval/x": 200.0, "best/length": 200.0}
    assert found["steps_to_threshold"] == 1500 and found["seconds_to_threshold"] == pytest.approx(30)
    assert found["env_steps"] == 2000 and found["steps_per_second"] == pytest.approx(50)
    assert found["final_return"] == 195.0  # of the steps 1900 and 2000
    assert found["curve"][0] == [100, 2.0, 10.0] and found["curve"][-1] == [2000, 40.0, 200.0]
    process = json.loads((path / "process.json").read_text())
    assert process["machine"].keys() == {"cpu", "cores", "python", "torch", "gymnasium", "commit", "date"}
    assert found["cpu_seconds"] == process["cpu_seconds"] and found["machine"] == process["machine"]
    assert found["commit"] == process["machine"]["commit"] == common.describe_machine()["commit"]
    on_gpu = records.read_attempt(path, vars(define_cell(gpus=1, **keys)))
    assert on_gpu["device"] == "gpu" and on_gpu["seconds_to_threshold"] <= on_gpu["wall_seconds"] < 30


def test_curves_are_thinned_and_keep_their_last_point(tmp_path):
    """Seconds are interpolated between points of the clock. The version of a peer is in its events."""
    write_run(tmp_path / "run", ["c", "eval/x"], num_points=500, program="elkai 2.0.1")
    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_scalar("late", 1.0, 150)
    found = records.read_run(tmp_path / "run", {"curve": "c"}, {"machine": {"commit": "abc"}})
    assert found["commit"] == "elkai 2.0.1"
    curve = found["curve"]
    assert 30 <= len(curve) <= records.NUM_POINTS and curve[-1] == [50_000, 1000.0, 5000.0]
    assert set(np.diff([step for step, _, _ in curve])) == {900}
    assert common.read_points(tmp_path / "run", "late")[0][:2] == [150, pytest.approx(3.0)]


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("print('|##| 1/1\\r|###| 2/2'); sys.exit('why it ended')", "exit code 1: why it ended"),
        ("print('|##| 1/1\\r|###| 2/2', end=''); exit(3)", "exit code 3: |###| 2/2"),
        ("os.kill(os.getpid(), 9)", "exit code -9: "),
        ("os.kill(os.getppid(), 9)", "exit code -9: "),  # its guard
    ],
)
def test_a_cell_that_crashed_has_failed_whatever_it_logged(run_python, tmp_path, monkeypatch, end, error):
    """The reason is the last line written, whatever the environment says of buffers."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    write_run(tmp_path / "left", ["eval/x"])
    assert run_python(copy_run(tmp_path / "left", end))[1:] == (None, error)


@pytest.mark.parametrize("key", ["headline", "curve"])
def test_a_run_that_lacks_what_the_suite_asks_for_has_failed(run_python, tmp_path, key):
    """The error lists its tags. If the suite then asks for one of them, the same run counts."""
    write_run(tmp_path / "left", ["eval/x", "charts/y"])
    path, found, error = run_python(copy_run(tmp_path / "left"), **{key: "eval/none"})
    there = "(there are: eval/x, charts/y, charts/cpu_seconds)"
    assert found is None and error == f"no eval/none in {path / 'run'} {there}"
    cell = vars(define_cell(**{key: "charts/y"}))
    assert records.find_run(path.parent, cell)[0]["value"] == 30.0
    (path / "process.json").unlink()  # nobody has seen the end of the run
    assert records.find_run(path.parent, cell) == (None, records.NOT_RUN)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("print('hello'); print({'eval/episodic_return': 500.0, 'eval/x': 7})", ""),
        ("sys.exit('broken')", "no scores of best.pt: broken"),
    ],
)
def test_best_is_scored_after_the_run_if_the_cell_asks_for_it(tree, end, error):
    """The script itself scores it; the seconds are not part of the run's."""
    write_run(tree / "left", ["eval/x"])
    (tree / "left" / "best.pt").write_text("")
    code = "import shutil, sys\nprint(sys.argv)\nif '--evaluate' not in sys.argv:\n"
    code += "    shutil.copytree('left', sys.argv[sys.argv.index('--run-dir') + 1] + '/run')\n"
    (tree / "algos" / "x.py").write_text(f"{code}else:\n    sum(range(60_000_000)); {end}\n")
    cell = define_cell("python algos/x.py --gamma 0.9", score_best=True, seed=4)
    path = tree / f"seed4-{cell.hash()}" / "try_1"
    run.run_cell(cell, path, run.make_command(cell, sys.executable, path))
    flags = ["--evaluate", str(path / "run" / "best.pt"), "--eval-episodes", "100", "--seed", "4"]
    assert (path / "best.txt").read_text().startswith(f"{['algos/x.py', *flags]}\n")
    found, failed = records.find_run(path.parent, vars(cell))
    assert failed == error and bool(found) == (not error)
    if found:
        assert found["metrics"] == {"eval/x": 30.0, "best/episodic_return": 500.0, "best/x": 7}
        assert found["cpu_seconds"] < measure_sum()  # half as long as the scoring


def measure_sum():
    """Return the CPU-seconds of a sum on this machine, now."""
    start = time.process_time()
    sum(range(30_000_000))
    return time.process_time() - start


def test_cpu_seconds_are_those_of_all_processes_of_a_cell(run_python):
    """They include children for which nobody waits."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(30_000_000))'])"
    path, *_ = run_python(f"{child}; {child.replace('run', 'Popen', 1)}")
    assert json.loads((path / "process.json").read_text())["cpu_seconds"] > 0.8 * measure_sum()


def test_a_cell_has_its_gpus_one_thread_and_no_stdin(run_python, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray does in its worker
    names = "('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')"
    code = f"import os, sys; print([os.environ[x] for x in {names}], repr(sys.stdin.read()))"
    for gpus, given, shown in ((0, None, ""), (0, "", ""), (1, None, "3"), (2, "1,2", "1,2")):
        path, *_ = run_python(code, given, gpus=gpus)
        assert (path / "log.txt").read_text() == f"['{shown}', '1'] ''\n"


def test_a_script_that_changes_while_a_suite_runs_is_told(tmp_path):
    path = tmp_path / f"seed1-{'0' * 12}" / "try_1"
    with pytest.raises(ResultsError, match=r"^no run: algos/ppo.py has changed since"):
        run.run_cell(define_cell(), path, ["true"])
    assert not path.parent.exists()


# ---- Guards ----------------------------------------------------------------------------------------------------------

# Starts a child, another in a session of its own, and a daemon. They ignore the signals that can be ignored, and have
# the folder of the attempt, the last argument, in their command lines.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path

deaf = "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('up'); time.sleep(600)"
command = [sys.executable, "-uc", deaf, sys.argv[1]]
start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.Popen(command)
subprocess.Popen(command, start_new_session=True)
subprocess.run([sys.executable, "-c", start, *command])
while Path(sys.argv[1], "log.txt").read_text().count("up") < 3:
    time.sleep(0.05)
print("ready")
"""
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere, guards kill the process group alone"
)


@on_linux
@pytest.mark.parametrize(
    ("end", "hours", "error"),
    [
        ("", 1, "no run folder"),
        ("sys.exit('why')", 1, "exit code 1: why"),
        ("os.kill(os.getpid(), 9)", 1, "exit code -9: ready"),
        ("time.sleep(90)", 20 / 3600, "not done after 0.00555556 hours"),
    ],
)
def test_what_a_cell_leaves_running_ends_with_it(run_python, end, hours, error):
    """However the cell ends, its children and daemons do not keep running."""
    path, _, found = run_python(FAMILY + end, hours=hours)
    assert not find_processes(path)
    assert found == error and "ready" in (path / "log.txt").read_text()


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_cells_take_the_cores_and_gpus_that_they_ask_for(monkeypatch):
    """On a machine with three cores and two GPUs, where cells run until they are told to end."""
    ends, given, futures = defaultdict(threading.Event), {}, {}

    def wait_for_end(cell, path, command, gpus):
        given[cell.setting] = gpus
        assert ends[cell.setting].wait(60)

    monkeypatch.setattr(run, "run_cell", wait_for_end)
    monkeypatch.setattr(run.os, "cpu_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    sizes = {"a": (2, 0), "b": (2, 0), "c": (1, 0), "d": (9, 0)}  # cores and GPUs
    sizes |= {"e": (1, 1), "f": (1, 1), "g": (1, 1), "h": (1, 2), "i": (1, 0)}
    cells = {name: define_cell(setting=name, cpus=x, gpus=y) for name, (x, y) in sizes.items()}
    submit = run.start_here([*cells.values()])

    def start(names):
        """Return which of the cells start."""
        futures.update({name: submit(cells[name], Path(), []) for name in names})
        return "".join(name for name in names if futures[name])

    def end(names):
        for name in names:
            ends[name].set()
            futures[name].result(60)

    assert start("abdc") == "ac"
    end("a")
    assert start("db") == "b"
    end("bc")
    assert start("da") == "d"  # more cores than there are: alone
    end("d")
    assert start("efghi") == "efi"
    end("efi")
    assert start("h") == "h"
    end("h")
    assert given == dict.fromkeys("abcdi", "") | {"e": "4", "f": "7", "h": "4,7"}
    lacking = define_cell(gpus=3)
    assert run.run_cells({lacking: Path()}, submit) == {lacking: "this machine lacks the GPUs"}


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [
        ("exit code 1: a crash", 3),
        ("exit code -9: ", 3),
        ("a node died", 3),
        ("exit code 2: bad flags", 1),
        ("no eval/x", 1),
        ("not done after 24 hours", 1),
    ],
)
def test_a_cell_that_crashes_starts_over_twice(tmp_path, monkeypatch, capsys, error, num_tries):
    """A cell that would fail in the same way again is not repeated."""
    cell, tries = define_cell(), []

    def submit(cell, path, command):
        path.mkdir(parents=True)
        tries.append(path.name)
        future = Future()
        lost = RuntimeError(f"{error}\nsomewhere")  # an error of Ray
        future.set_exception(lost) if error == "a node died" else future.set_result(None)
        return future

    monkeypatch.setattr(records, "find_run", lambda *_: (None, records.NOT_RUN if "node" in error else error))
    assert run.run_cells({cell: tmp_path / "cell"}, submit) == {cell: error}
    assert tries == [f"try_{i + 1}" for i in range(num_tries)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["again"] * (num_tries - 1) + ["failed"]


def test_a_failing_cell_and_a_killed_one_take_no_other_down(tmp_path):
    """One cell always fails, one is killed once, one lacks its curve. The next call repeats nothing that is done."""
    runs = tmp_path / "runs"
    commands = {"good": SHORT, "bad": f"{SHORT} --env-id Nothing-v0"}
    commands |= {"killed": SHORT.replace("2560", "5120"), "other": f"{SHORT} --gamma 0.9"}
    suite = write_suite(tmp_path / "a.toml", **commands)
    text = suite.read_text()
    suite.write_text(text + 'curve = "charts/nothing"\n')  # of the last cell
    harness = start_harness(suite, "--runs", runs)
    (victim,) = wait_until(lambda: find_cells(runs / "a" / "ppo" / "CartPole-v1" / "killed"))
    victim.kill()
    output, _ = harness.communicate(timeout=240)
    assert harness.returncode == 1 and "2 of 4 cells done" in output, output
    assert "again: ppo/CartPole-v1/killed, seed 1: exit code -9: " in output
    assert "failed: ppo/CartPole-v1/bad, seed 1: exit code 2: ppo.py: error: --env-id Nothing-v0" in output
    assert "failed: ppo/CartPole-v1/other, seed 1: no charts/nothing in " in output
    found = {(path.parents[1].name, path.name) for path in list_done(runs)}
    assert found == {("good", "try_1"), ("killed", "try_2"), ("other", "try_1")}
    report.main(["--runs", str(runs), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "other, seeds 1: no charts/nothing in " in page and "| CartPole-v1, good |" in page
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")}
    suite.write_text(text + 'curve = "charts/episodic_return"\n')  # which all have logged
    harness = start_harness(suite, "--runs", runs, "--only", "*/[gko]*")
    assert "3 of 3 cells done" in harness.communicate(timeout=60)[0] and harness.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")} == before
    results = records.collect(runs / "a")["cells"]  # it forgets nothing of the others
    assert [len(cell["runs"]) for cell in results.values()] == [1, 0, 1, 1]
    assert "--env-id Nothing-v0" in results["ppo/CartPole-v1/bad"]["missing"][0]["error"]


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_harness_that_is_stopped_leaves_nothing_running(tmp_path, number):
    """The cell has two processes under torchrun, and does not count as ended."""
    command = "torchrun --standalone --nproc-per-node 2 algos/ppo.py --total-timesteps 50000000"
    suite = write_suite(tmp_path / "a.toml", long=command)
    harness = start_harness(suite, "--runs", tmp_path)
    wait_until(lambda: list(tmp_path.rglob("try_1/*/checkpoint.pt")))
    assert len(find_processes(tmp_path / "a" / "ppo")) >= 4  # guard, torchrun and its two
    (os.kill if number == signal.SIGKILL else os.killpg)(harness.pid, number)
    output, _ = harness.communicate(timeout=60)
    assert harness.returncode == (-9 if number == signal.SIGKILL else 130), output
    assert ("interrupted: what was finished is kept" in output) == (number != signal.SIGKILL)
    try:
        wait_until(lambda: not find_processes(tmp_path / "a" / "ppo"))
    finally:
        for process in find_processes(tmp_path / "a" / "ppo"):
            process.kill()
    assert "Traceback" not in output and not list(tmp_path.rglob("process.json"))


@pytest.mark.slow
def test_a_node_that_dies_half_way_costs_no_cell_and_repeats_none(tmp_path):
    """Two nodes on this machine, one killed while its cell runs: all cells are done in the end, none twice."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    runs = tmp_path / "runs"
    command = "python algos/ppo.py --total-timesteps 100352 --eval-interval 99 --eval-episodes 4"
    suite = write_suite(tmp_path / "a.toml", [1, 2, 3], a=command)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    try:
        harness = start_harness(suite, "--runs", runs, "--address", cluster.address)
        wait_until(lambda: len(list(runs.rglob("checkpoint.pt"))) == 2, 300)
        for cell in find_cells(runs / "a"):
            cell.suspend()  # so that neither is done before the node is gone
        cluster.remove_node(node, allow_graceful=False)
        (cell,) = wait_until(lambda: len(cells := find_cells(runs / "a")) == 1 and cells)
        cell.resume()
        output, _ = harness.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert harness.returncode == 0 and "again: ppo/CartPole-v1/a" in output, output
    assert len({path.parent for path in list_done(runs)}) == len(list_done(runs)) == 3
    assert len(list(runs.rglob("try_2"))) == 1 and not find_processes(runs / "a")


# ---- Statistics ------------------------------------------------------------------------------------------------------


NAME = "ppo/CartPole-v1/default"


def make_cell(values, name=NAME, **changes):
    """Return a cell of stored results, with a run for each value of the headline."""
    script, task, setting = name.split("/")
    folder = "algos" if script in SCRIPTS else "benchmark/peers"
    cell = {"task": task, "setting": setting, "script": script, "command": f"python {folder}/{script}.py"}
    cell |= {"headline": "eval/episodic_return", "curve": "c", "threshold": 475, "better": "higher"}
    run = {"device": "cpu", "commit": "abc", "machine": None, "cpu_seconds": 1.0, "steps_per_second": 1000.0}
    runs = []
    for seed, value in enumerate(values, 1):
        own = {"seed": seed, "value": value, "metrics": {"eval/episodic_return": value}}
        own |= {"steps_to_threshold": 10 * seed, "curve": [[0, 0.0, 1.0], [10, 1.0, value]]}
        runs.append(run | own)
    return cell | {"runs": runs, "missing": []} | changes


STEPS, SPEEDS = [1000, 1300, 900, 1200, 1100], [1000.0, 1100.0, 1050.0, 900.0, 950.0]


def make_solved(steps, speeds=SPEEDS, name=NAME, **changes):
    """Return a cell whose runs end at 500, and reached the threshold after these steps (None: never)."""
    cell = make_cell([500.0] * len(steps), name, **changes)
    for run_, step, speed in zip(cell["runs"], steps, speeds, strict=False):
        run_ |= {"steps_to_threshold": step, "seconds_to_threshold": step and step / 100}
        run_ |= {"steps_per_second": speed, "curve": [[0, 0, 20.0], [9000, 90, 500.0]]}
    return cell


def make_results(*cells, suite="a", **keys):
    """Return the results of a suite, as report.py stores them."""
    names = [f"{c['script']}/{c['task']}/{c['setting']}" for c in cells]
    return suites.SHOWN | {"suite": suite, "cells": dict(zip(names, cells, strict=True))} | keys


def test_intervals_are_students_and_welchs():
    a, b = [1.0, 2.0, 3.0], [2.0, 3.0, 10.0]
    half = 4.303 / 3**0.5  # Student's t of two degrees of freedom; the standard deviation is 1
    assert records.find_interval(a) == pytest.approx((2 - half, 2 + half), rel=1e-3)
    found = records.find_interval([499.0, 498.0, 500.0], [500.0] * 3)  # one side may have no noise
    assert found == pytest.approx((-1 - half, -1 + half), rel=1e-3)
    half = 3.93 * (np.var(a, ddof=1) / 3 + np.var(b, ddof=1) / 3) ** 0.5  # of 2.21 degrees of freedom
    assert records.find_interval(b, a) == pytest.approx((3 - half, 3 + half), rel=0.01)
    assert records.find_interval([1.0]) is records.find_interval(a, [1.0]) is None
    assert records.find_interval([1.0, math.inf]) is None


def test_ratios_are_those_of_medians_with_an_interval_by_logarithms():
    ours, peer = [2.0, 2.1, 1.9], [4.0, 4.1, 3.9]
    ratio, (low, high) = records.find_ratio(ours, peer)
    assert ratio == 0.5 and 0.44 < low < 0.5 < high < 0.56
    assert low * high == pytest.approx(math.exp(2 * np.mean(np.log(ours) - np.log(peer))))
    for one, other in ((1.0, -1.0), (1.0, math.inf), (1.0, math.nan), (0.0, 1.0), (math.inf, 1.0)):
        ratio, interval = records.find_ratio([one], [other])
        assert not 0 < ratio < math.inf and interval is None
    assert records.find_ratio([1.0, 1.0], [2.0, math.inf, 2.0]) == (0.5, None)
    a, b = [6.0, 5.0, 4.0, 3.0], [3.1, 2.4, 2.0, 1.5]  # about twice as much in every run
    assert records.find_ratio(a, b, paired=True)[1][1] < 2.2 < records.find_ratio(a, b)[1][1]


@pytest.mark.parametrize("num", [3, 5, 10])
def test_intervals_cover_what_they_say(num):
    """Of 95 % intervals, 95 hold the truth: of means, of differences, and of ratios of skewed values.

    A percentile bootstrap covers 74, 81 and 86 % for means of 3, 4 and 5 values, and 90 % for ten.
    """
    rng, found = np.random.default_rng(num), np.zeros(3)
    for _ in range(600):
        a, b = rng.normal(5.0, 1.0, (2, num))
        ratio = records.find_ratio(np.exp(a), 2 * np.exp(b))[1]
        intervals = records.find_interval(a), records.find_interval(a, b), ratio
        found += [low < x < high for x, (low, high) in zip((5, 0, 0.5), intervals, strict=True)]
    assert (abs(found / 600 - 0.95) < 0.035).all(), found  # four standard deviations; Welch's is a bit wide


def test_quantities_count_with_and_without_the_prefix_of_evaluations():
    cell = make_cell([1.0])
    cell["runs"][0] |= {"metrics": {"eval/elo": 5.0}, "steps_to_threshold": None}
    quantities = ("elo", "eval/elo", "headline", "cpu_seconds", "steps_to_threshold")
    assert [records.get_values(cell, name) for name in quantities] == [[5.0], [5.0], [1.0], [1.0], [math.inf]]
    assert np.isnan(records.get_values(cell, "final_return"))


def test_threshold_is_the_first_point_at_it_in_the_right_direction():
    curve = [[1, 0.1, 3.0], [2, 0.2, 5.0], [3, 0.3, 2.0], [4, 0.4, 4.0], [5, 0.5, 5.0]]
    find = records.find_threshold
    assert find(curve, 4) == [2, 0.2, 5.0]
    assert find(curve, 3, "lower")[0] == 1 and find(curve, 2.5, "lower")[0] == 3
    assert find(curve, 6) is None and find([], 0) is None
    assert find(curve, 4, in_a_row=2)[0] == 5  # one alone is forgotten
    assert find(curve, 4, in_a_row=3) is None


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_tables_say_what_the_results_say():
    ours = make_cell([400.0, 410.0, 420.0])
    peer = make_cell([100.0, 200.0], "sb3_ppo/CartPole-v1/tuned")
    lost = make_cell([], "gnugo/Go/match")
    lost["missing"] = [{"seed": seed, "error": "exit code 1: why"} for seed in (1, 2)]
    base = {"title": "return", "quantity": "headline", "ours": "ppo/CartPole-v1/default"}
    ratios = [base | {"peer": "sb3_ppo/CartPole-v1/tuned"}, base | {"peer": "gnugo/Go/match"}]
    table = report.make_ratio_table(make_results(ours, peer, lost, ratios=ratios))
    low, high = records.find_ratio([400.0, 410.0, 420.0], [100.0, 200.0])[1]
    assert f"| return | abc | 410 | 150 | 2.73 ({common.show(low)} to {common.show(high)}) |" in table
    assert "| return | gnugo | - | - | exit code 1: why |" in table
    close = make_cell([100.0, 101.0], "sb3_ppo/CartPole-v1/tuned")
    table = report.make_ratio_table(make_results(ours, close, lost, ratios=ratios))
    assert "| return | abc | 410 | 100 | **4.08** (3.86 to 4.31)" in table  # bold: 1 is outside
    table = report.make_cell_table([ours, peer, lost], report.RESULT)
    assert "| CartPole-v1, default | return | 410 (400, 410, 420) | 1.00 | 3 |" in table
    assert "| CartPole-v1, tuned | return | 150 (100, 200) | 1.00 | 2 |" in table
    assert table.endswith("\n\n- Go, match, seeds 1, 2: exit code 1: why")
    six = [400.0, 410.0, 420.0] * 2
    low, high = map(common.show, records.find_interval(six))
    assert f"| 410 ({low} to {high}) | 1.00 | 6 |" in report.make_cell_table([make_cell(six)], report.RESULT)


def test_a_comparison_holds_each_cell_against_the_first_of_its_task():
    first = make_cell([1.0, 2.0, 3.0])
    better = make_cell([11.0, 12.0, 13.0], "ppo/CartPole-v1/b")
    other = make_cell([2.0, 1.0, 3.0], "ppo/CartPole-v1/c")
    alone = make_cell([], "ppo/Acrobot-v1/d", missing=[{"seed": 1, "error": "killed"}])
    text = report.make_comparison([first, better, other, alone])
    assert "| CartPole-v1, default | return | 2.00 (1.00, 2.00, 3.00) |  | 1.00 | 3 |" in text
    half = 2.776 * (1 / 3 + 1 / 3) ** 0.5  # Student's t of four degrees of freedom, standard deviations of 1
    assert f"12.0 (11.0, 12.0, 13.0) | **10.0** ({10 - half:.2f} to {10 + half:.1f}) | 1.00 | 3 |" in text
    assert "| CartPole-v1, c | return | 2.00 (2.00, 1.00, 3.00) | 0 (-2.27 to 2.27) |" in text
    assert "- Acrobot-v1, d, seeds 1: killed" in text


def test_numbers_are_shown_as_people_write_them():
    shown = {-8.9e-16: "0", -0.4961: "-0.496", 0.0653: "0.0653", 0.98 - 0.97: "0.0100", 4.567: "4.57"}
    shown |= {123.4: "123", 52822.0: "52,822", None: "-", math.nan: "-", math.inf: "-"}
    assert {value: common.show(value) for value in shown} == shown


SUITE_A = f'seeds = [1, 2, 3]\n{CELL}headline = "eval/x"\n'


@pytest.fixture
def report_runs(tmp_path, monkeypatch):
    """Report runs of a cell, in a repository whose suite `a` has two committed runs of it."""
    for name, path in (("RESULTS", "results"), ("SUITES", "suites"), ("FIGURES", "figures")):
        monkeypatch.setattr(common, name, tmp_path / path)
        (tmp_path / path).mkdir()
    (tmp_path / "suites" / "a.toml").write_text(SUITE_A)
    (tmp_path / "results" / "a.json").write_text(json.dumps(make_results(make_cell([1.0, 2.0], "ppo/T/s"))))
    for name in ("a", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "suite.json").write_text("")
    monkeypatch.setattr(report, "publish", lambda published: None)

    def report_cell(cell, *flags):
        """Return the values that are published then, and what is missing."""
        monkeypatch.setattr(records, "collect", lambda folder: make_results(cell, suite=folder.name))
        report.main(["--runs", str(tmp_path / "runs"), *flags])
        assert not (tmp_path / "results" / "other.json").exists()  # no suite of this repository
        found = json.loads((tmp_path / "results" / "a.json").read_text())["cells"]["ppo/T/s"]
        return [run_["value"] for run_ in found["runs"]], found["missing"]

    return report_cell


def test_a_report_keeps_committed_runs_that_a_folder_lacks(report_runs, tmp_path):
    """New runs replace those of their seeds. A run that has failed is listed beside the committed one."""
    not_run, failed = ({"seed": 2, "error": error} for error in (records.NOT_RUN, "exit code 1"))
    assert report_runs(make_cell([5.0], "ppo/T/s", missing=[not_run])) == ([5.0, 2.0], [])
    assert report_runs(make_cell([6.0], "ppo/T/s", missing=[failed])) == ([6.0, 2.0], [failed])
    assert report_runs(make_cell([5.0], "ppo/T/other"))[0] == [6.0, 2.0]  # a folder without the cell
    assert report_runs(make_cell([1.0, 2.0, 3.0], "ppo/T/s"))[0] == [1.0, 2.0, 3.0]
    own = make_cell([7.0], "ppo/T/s")
    assert report_runs(own, "--out", str(tmp_path / "out"))[0] == [1.0, 2.0, 3.0]  # results stay as they are
    assert json.loads((tmp_path / "out" / "results" / "a.json").read_text())["cells"] == {"ppo/T/s": own}
    with pytest.raises(ResultsError, match="none: no such folder"):
        report.main(["--runs", str(tmp_path / "none")])


@pytest.mark.parametrize("script", ["ppo", "sb3_ppo"])
def test_runs_of_a_tree_with_changes_are_not_published(report_runs, script):
    """The same holds for a peer, whose commit is its version."""
    cell = make_cell([1.0, 2.0, 3.0], f"{script}/T/s")
    cell["runs"][2] |= {"machine": common.describe_machine() | {"commit": "abc-dirty"}, "commit": "sb3 1.0"}
    with pytest.raises(ResultsError, match=r"T/s, seed 3 ran with uncommitted changes: run it again"):
        report_runs(cell)
    stored = records.load(common.RESULTS / "a.json")["cells"]
    assert list(stored) == ["ppo/T/s"] and len(stored["ppo/T/s"]["runs"]) == 2
    assert "abc-dirty" in report.describe_machines([cell])


def test_published_are_the_cells_that_a_suite_has_now(report_runs, tmp_path):
    """A cell that left the suite leaves the pages. One that is new or has another command is not run yet."""
    new = SUITE_A.replace('"s"', '"new"').partition("\n")[2]
    (tmp_path / "suites" / "a.toml").write_text(SUITE_A + new)
    cells = records.load_published()["a"]["cells"]
    assert {name: len(cell["runs"]) for name, cell in cells.items()} == {"ppo/T/s": 2, "ppo/T/new": 0}
    assert "- T, new, seeds 1, 2, 3: not run yet" in report.make_cell_table(list(cells.values()), {})
    (tmp_path / "suites" / "a.toml").write_text(SUITE_A.replace("ppo.py", "ppo.py --gamma 0.9") + new)
    assert not records.load_published()["a"]["cells"]["ppo/T/s"]["runs"]


def test_suites_that_have_run_are_shown_with_their_curves(tmp_path, monkeypatch):
    """A line for each seed and their mean, by steps and by seconds; a folder that is no suite is left out."""
    from matplotlib.figure import Figure

    figures, save, runs = [], Figure.savefig, tmp_path / "runs"
    monkeypatch.setattr(Figure, "savefig", lambda *args, **keys: figures.append(args) or save(*args, **keys))
    cells = []
    for seed, num_points in ((1, 6), (2, 3), (3, 3)):
        attempt = runs / "a" / f"seed{seed}" / "try_1"
        write_run(attempt / "run", ["eval/x", "c"], num_points)
        (attempt / "process.json").write_text('{"exit_code": 0}')
        cells.append(vars(define_cell(seed=seed, curve="c")) | {"folder": f"seed{seed}"})
    write_run(runs / "own" / "run", ["eval/x"])
    (runs / "a" / "suite.json").write_text(json.dumps({"suite": "a", "cells": cells}))
    report.main(["--runs", str(runs), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "## a" in page and "| T, s | eval/x | 40.0 (60.0, 30.0, 30.0) |  | 6.00 | 3 |" in page
    ((figure, path),) = figures
    assert page.count("## ") == 1 and path == tmp_path / "out" / "figures" / "a.png"
    axes = figure.axes
    assert [(x.get_xlabel(), x.get_ylabel()) for x in axes] == [("steps", "c"), ("CPU-seconds", "c")]
    lines = [line for line in axes[0].lines if line.get_alpha()]  # thin: a seed each
    assert sorted(len(line.get_xdata()) for line in lines) == [3, 3, 6]
    assert axes[1].lines[0].get_xdata()[-1] == pytest.approx(12)


# ---- Comparison ------------------------------------------------------------------------------------------------------


@pytest.fixture
def compare_cells(tmp_path, capsys):
    """Compare two lists of cells. Returns the exit code and what is printed."""

    def compare_files(*sides):
        paths = [tmp_path / "base.json", tmp_path / "new.json"]
        for path, cells in zip(paths, sides, strict=True):
            path.write_text(json.dumps(make_results(*cells)))
        return compare.main([*map(str, paths)]), capsys.readouterr().out

    return compare_files


BASE, NAN = [480.0, 490.0, 500.0, 470.0, 500.0], [math.nan] * 5


@pytest.mark.parametrize(
    ("base", "new", "better", "code"),
    [
        (BASE, [485.0, 470.0, 500.0, 495.0, 480.0], "higher", 0),
        (BASE, [300.0, 310.0, 320.0, 290.0, 305.0], "higher", 1),
        (BASE, [x + 300 for x in BASE], "higher", 0),
        (BASE, [x + 300 for x in BASE], "lower", 1),
        ([500.0] * 3, [499.0] * 3, "higher", 1),  # no noise at all
        ([500.0] * 3, [500.0] * 3, "higher", 0),
        ([500.0], [1.0], "higher", 0),  # one seed cannot tell
        ([0.3] * 3, [0.1 + 0.2] * 3, "lower", 0),  # rounding is no noise
        (BASE, NAN, "higher", 1),
        (NAN, BASE, "higher", 0),
    ],
)
def test_comparison_fails_if_a_headline_got_worse_beyond_noise(compare_cells, base, new, better, code):
    found, text = compare_cells([make_cell(base, better=better)], [make_cell(new, better=better)])
    assert found == code == len(re.findall(r"\| headline .* \| \*\*worse", text))


@pytest.mark.parametrize(
    ("steps", "speeds", "worse"),
    [
        (STEPS[::-1], SPEEDS[::-1], []),
        ([3 * x for x in STEPS], SPEEDS, ["steps | 1,091 | 3,272"]),
        ([None] * 5, SPEEDS, ["steps | 1,091 | 18,000"]),
        ([*STEPS[:4], None], SPEEDS, []),  # one is luck
        (STEPS, [x / 2 for x in SPEEDS], ["speed | 997 | 499"]),
        (STEPS, [x / 1.2 for x in SPEEDS], []),  # may be the machine
        ([x / 3 for x in STEPS], [3 * x for x in SPEEDS], []),
    ],
)
def test_comparison_fails_if_learning_takes_longer(compare_cells, steps, speeds, worse):
    """All runs end at 500."""
    code, text = compare_cells([make_solved(STEPS)], [make_solved(steps, speeds)])
    assert code == bool(worse) and re.findall(r"default \| (.*) \| \*\*worse", text) == worse


def test_only_equal_things_of_ours_are_compared(compare_cells):
    """No peers, missing cells, other thresholds or other headlines; a cell that failed counts as worse."""
    slow = [3 * x for x in STEPS]
    peer, others = "sb3_ppo/CartPole-v1/zoo", [make_cell(BASE, f"ppo/T{i}/s") for i in range(3)]
    code, text = compare_cells(
        [make_solved(STEPS, name=peer), *others], [make_solved(slow, name=peer), others[0]]
    )
    assert (code, text.splitlines()[-1]) == (0, "1 cells compared: 0 worse beyond noise, 0 failed")
    search = [make_cell([x, 1.1 * x, 1.2 * x], "our_go_search/Go/s", threshold=None) for x in (1000.0, 500.0)]
    assert compare_cells(search[:1], search[1:])[0] == 1  # a program of ours among the peers
    assert compare_cells([make_solved(STEPS)], [make_solved(slow, threshold=400)])[0] == 0
    assert compare_cells([make_cell(BASE), others[0]], [make_cell(NAN, headline="x"), others[0]])[0] == 0
    for error, expected in ((records.NOT_RUN, 0), ("exit code 1", 1)):
        lost = make_cell(BASE[:4], missing=[{"seed": 5, "error": error}])
        code, text = compare_cells([make_cell(BASE)], [lost])
        assert code == expected == ("failed: ppo/CartPole-v1/default: exit code 1" in text)
    with pytest.raises(ResultsError, match="no results of the same cell"):
        compare_cells([make_cell(BASE)], others)


def test_a_speed_that_halves_is_found_in_every_published_cell():
    """At the noise of its own seeds, and when it is compared alone. Equal results are not worse."""
    checked = 0
    for name, results in records.load_published().items():
        ours = [cell for cell in results["cells"].values() if records.is_ours(cell)]
        for cell in (cell for cell in ours if len(cell["runs"]) >= 3):
            speed = compare.find_losses(cell)["speed"]
            assert compare.find_p("speed", speed, speed + np.log(2)) < 0.01, cell["setting"]
            checked += 1
        assert not ours or compare.main([str(common.RESULTS / f"{name}.json")] * 2) == 0
    assert checked >= 20


NOISE = {
    "normal": np.random.Generator.standard_normal,
    "skewed": lambda rng, shape: (rng.lognormal(0, 0.5, shape) - 1.133) / 0.604,
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape) / 2**0.5,
}


@pytest.mark.parametrize("kind", NOISE)
def test_what_a_comparison_finds_and_how_often_it_cries_wolf(kind):
    """The figures of benchmark/README.md; they hold for noise that is skewed or has heavy tails too."""
    rng = np.random.default_rng(4)

    def simulate(num, *shifts):
        """Return the shares of comparisons of twenty cells with five seeds that find something, and find cell 0.

        In NEW, the headline, steps and speed of cell 0 are worse by `shifts`, in standard deviations of the seeds.
        """
        found = np.zeros(2)
        for _ in range(num):
            steps, end, speed = NOISE[kind](rng, (3, 2, 20, 5))
            base, new = np.stack([0.3 * steps + 0.95 * end, steps, speed], 1)
            new[:, 0] += np.array(shifts)[:, None]
            worse = compare.find_worse(compare.find_p_worse(base, new).ravel()).reshape(3, 20).any(0)
            found += [worse.any(), worse[0]]
        return found / num

    assert simulate(500, 0, 0, 0)[0] <= 0.08
    shifts = (3, 0, 0), (4, 0, 0), (0, 4, 0), (0, 0, 5), (3, 3, 0)
    found = [simulate(150, *shift)[1] for shift in shifts]
    assert (np.array(found) > [0.42, 0.75, 0.78, 0.88, 0.72]).all(), found


def test_results_that_cannot_be_read_are_one_line_and_exit_code_2(tmp_path):
    """A missing file, one that is no JSON, one of another form, the list of a run folder, an empty folder."""
    for name, text in (("bad", "{"), ("other", "{}"), ("list", '{"suite": "a", "cells": []}')):
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "runs").mkdir()
    for name in ("none.json", "bad.json", "other.json", "list.json", "runs"):
        with pytest.raises(
            ResultsError, match=f"^{tmp_path}.*: (no results of a suite|give the folder that it is in)$"
        ):
            compare.main([str(tmp_path / name)] * 2)
    command = [sys.executable, str(ROOT / "benchmark" / "compare.py"), "none.json", "none.json"]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (found.returncode, found.stderr) == (2, "compare.py: none.json: no results of a suite\n")
