"""The benchmark harness: suites, guarded cells, runs, report and comparison."""

import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import tyro
from conftest import ENVIRONMENT, ROOT
from scipy import stats
from torch.distributed.run import get_args_parser
from torch.utils.tensorboard import SummaryWriter

from benchmark import common, compare, records, report, run
from benchmark import suite as suites
from benchmark.common import ResultsError
from benchmark.suite import read_suite

SHORT = "python algos/ppo.py --num-envs 8 --total-timesteps 2560 --eval-episodes 4"
SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))
SCRIPTS = {path.stem for path in (ROOT / "algos").glob("*.py")}


def define_cell(command="python algos/ppo.py", **keys):
    """Make a cell as a suite does."""
    table = {"task": "T", "setting": "s", "headline": "eval/x", "command": command}
    seed = keys.pop("seed", 0)
    return replace(suites.make_cell(table | keys, {}, "here"), seed=seed)


def write_suite(path, seeds=(1,), **commands):
    """Write a suite on CartPole-v1 with a cell for each setting=command."""
    text = f'seeds = {list(seeds)}\nheadline = {{ ppo = "eval/episodic_return" }}\n'
    for setting, command in commands.items():
        text += f'[[cells]]\ntask = "CartPole-v1"\nsetting = "{setting}"\ncommand = "{command}"\n'
    path.write_text(text)
    return path


def start_harness(*flags):
    command = [sys.executable, "-m", "benchmark.run", *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Shells start jobs in the background with Ctrl-C ignored
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes)


def wait_until(find, seconds=120):
    deadline = time.time() + seconds
    while not (found := find()):
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def find_processes(word, but="\n"):
    """List the living processes that have `word` in their command line, and not `but`."""
    lines = {process: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
    return [process for process, line in lines.items() if str(word) in line and but not in line]


# ---- Suites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_parse_against_the_scripts(path):
    """The parsers of scripts, peers and torchrun take the flags."""
    cells, _ = read_suite(path)
    for cell in {cell.name: cell for cell in cells}.values():
        launcher, *words = shlex.split(cell.command)
        flags = [*words[words.index(cell.program[-1]) + 1 :], "--seed", "1", "--run-dir", "runs"]
        if launcher == "torchrun":
            assert get_args_parser().parse_args(words).training_script == cell.path
        module = importlib.import_module(suites.get_module(cell.path))
        if cell.script == "r2d2_transformer":  # an edited copy has the flags of its script
            module = importlib.import_module("algos.r2d2_lstm")
        if hasattr(module, "Args"):
            tyro.cli(module.Args, args=flags)
        else:
            module.make_parser().parse_args(flags)
        assert not cell.environment or (common.PEERS / f"requirements-{cell.environment}.txt").exists()
    if path.stem in ("smoke", "cpu", "gpu", "ablations"):
        studied = {"ppo_change_detection"} if path.stem == "ablations" else set()  # beside its rivals
        assert {cell.script for cell in cells} >= SCRIPTS - studied


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
    rest = ["benchmark/peers/clock.py", "algos/ppo.py", "--seed", "7", "--run-dir", str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert one == ["/its/python", *rest] and two == ["/its/python", *launcher, *rest]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [1]", "seeds = [1", "cannot be read as TOML"),
        ("seeds = [1]", "seeds = 5", "seeds = 5 has to be a list"),
        ('"T"', '"T"\nseeds = 5', "cell 1: seeds = 5: write seeds = "),
        ("{ ppo = 'eval/x' }", "'eval/x'", "headline = 'eval/x' has to be a dict"),
        ("seeds = [1]", "seeds = [1, 1]", "two cells have the same script, task, setting and seed"),
        ("algos/ppo", "algos/dqn", "command = 'python algos/dqn.py' has to be python or torchrun"),
        ("python", "torchrun --nproc-per-node 2", "torchrun --standalone"),
        ("'eval/x'", "3", "cell 1: headline = 3 has to be str"),
        ('"T"', '"../T"', "task and setting of 'ppo/../T/s' are not of letters"),
        ('setting = "s"', 'setting = "s"\ncurv = "x"', "1: unknown key curv; there are better, command, "),
        ('setting = "s"\n', "", "cell 1: setting = None has to be str"),
        ("[[cells]]", "[[tables]]\npag = 'ppo'\n[[cells]]", "tables: unknown key pag; there are columns"),
        ("[[cells]]", "[[ratios]]\nours = 'ppo/T/s'\n[[cells]]", "ratios: ours and peer have to name cells"),
        (
            "seeds = [1]",
            "seed = [1]",
            "unknown key seed; there are cells, headline, levels, ratios, seeds, summary",
        ),
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
    "algos/ppo.py": "if True:\n    from envs_shared import a\nimport numpy\n",
    "envs_shared/__init__.py": "",
    "envs_shared/a.py": "a = 1\n",
    "envs_shared/b.py": "b = 1\n",
    "envs_shared/own.py": "c = 1\n",
    "envs_shared/task.py": "d = 1\n",
    "benchmark/peers/match.py": 'from benchmark.peers import clock, shared\nENGINE = "algos/ppo.py"\n'
    'DATA = "benchmark/data/r.txt"\nTASK = "envs_shared.task:T-v0"\n',
    "benchmark/data/r.txt": "3.85\n",
    "benchmark/peers/clock.py": "",
    "benchmark/peers/shared.py": "'of algos/none.py and others'\n",
    "benchmark/peers/requirements-x.txt": "x==1\n",
    "algos/net.pt": "weights",
}


def test_the_hash_is_of_the_command_and_of_all_files_it_uses(tmp_path, monkeypatch):
    """A script's sibling, files and tasks that a peer or a flag names, a peer's packages; no neighbours."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "PEERS", tmp_path / "benchmark" / "peers")
    ours = define_cell("python algos/ppo.py --gamma 0.9")
    named = define_cell("python algos/ppo.py --env-id envs_shared.own:T-v0")
    match = define_cell("python -m benchmark.peers.match --net algos/net.pt", environment="x")
    changed = {ours: set(), named: set(), match: set()}
    before = {cell: cell.hash() for cell in changed}
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"{text}#")
        for cell, names in changed.items():
            names |= {name} if cell.hash() != before[cell] else set()
        (tmp_path / name).write_text(text)
    clock = "benchmark/peers/clock.py"
    assert changed[ours] == {"algos/ppo.py", "envs_shared/a.py", "envs_shared/__init__.py", clock}
    assert changed[named] == changed[ours] | {"envs_shared/own.py"}
    assert changed[match] == FILES.keys() - {"envs_shared/b.py", "envs_shared/own.py"}
    assert define_cell(ours.command, setting="t", seed=2).hash() == before[ours] == ours.hash()
    assert define_cell("python algos/ppo.py --gamma 0.8").hash() != before[ours]


def test_bad_input_is_one_line(tmp_path):
    """Also an address at which nothing listens: Ray itself would wait for minutes."""
    suite = write_suite(tmp_path / "a.toml", a=SHORT)
    lacking = write_suite(tmp_path / "b.toml", a=SHORT)
    lacking.write_text(lacking.read_text() + "gpus = 99\n")
    (tmp_path / "file").write_text("")
    for path, flags, message in (
        (tmp_path / "none.toml", {}, "cannot be read"),
        (suite, {"only": "r2d2*"}, "no such cell"),
        (suite, {"runs": tmp_path / "file"}, "file"),
        (suite, {"address": "127.0.0.1:1"}, "no Ray cluster answers there"),
        (suite, {"address": "somewhere"}, "no Ray cluster answers there"),
        (lacking, {}, "this machine lacks the GPUs of ppo/CartPole-v1/a"),
    ):
        with pytest.raises((ResultsError, OSError), match=message) as error:
            run.main(run.Args(path, **({"runs": tmp_path / "runs"} | flags)))
        assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


# ---- Cells -----------------------------------------------------------------------------------------------------------


def write_run(folder, tags, num_points=3):
    """Log step / 10 under each tag at the steps 100, 200, ... of a run that takes 0.02 CPU-seconds a step."""
    with SummaryWriter(str(folder)) as writer:
        for step in range(100, 100 * num_points + 1, 100):
            for tag in tags:
                writer.add_scalar(tag, step / 10, step)
            writer.add_scalar("charts/cpu_seconds", step * 0.02, step)


@pytest.fixture
def run_python(tmp_path, monkeypatch):
    """Run code as a cell, and log a run in its name. Returns the folder, and the run or its error."""

    def run_code(code, given="", tags=("eval/x",), num_points=3, **keys):
        cell = define_cell(**keys)
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}-{cell.hash()}"
        monkeypatch.setattr(run, "TRIES", 1)
        monkeypatch.setattr(run, "make_command", lambda cell, python, path: [python, "-c", code, str(path)])
        run.run_cell(cell, folder, sys.executable, given)
        write_run(folder / "try_1" / "run", tags, num_points)
        return folder / "try_1", records.find_run(folder, vars(cell))

    return run_code


def test_a_run_is_read_from_its_events(run_python):
    """Metrics are the last values of evaluations. Seconds are those of training, or of the clock for GPUs.

    Curves are thinned and keep their last point.
    """
    tags = "charts/episodic_return", "eval/x", "best/length", "losses/x"
    keys = {"curve": "eval/x", "threshold": 150, "seed": 3}
    path, found = run_python("", tags=tags, num_points=500, **keys)
    assert found["seed"] == 3
    assert found["metrics"] == {"eval/x": 5000.0, "best/length": 5000.0}
    assert found["steps_to_threshold"] == 1500 and found["seconds_to_threshold"] == pytest.approx(30)
    assert found["env_steps"] == 50_000 and found["steps_per_second"] == pytest.approx(50)
    assert found["final_return"] == pytest.approx(4755)  # of the steps 45,100 to 50,000
    steps = [step for step, _, _ in found["curve"]]
    assert 30 <= len(steps) <= records.NUM_POINTS and set(np.diff(steps)) == {900}
    assert found["curve"][-1] == [50_000, 1000.0, 5000.0]
    process = json.loads((path / "process.json").read_text())
    assert found["cpu_seconds"] == process["cpu_seconds"] and found["machine"] == process["machine"]
    assert found["machine"] == common.describe_machine()
    assert found["commit"] == found["machine"]["commit"]
    on_gpu = records.find_run(path.parent, vars(define_cell(gpus=1, **keys)))
    assert on_gpu["seconds_to_threshold"] <= on_gpu["wall_seconds"] < 30


def test_a_run_that_lacks_what_the_suite_asks_for_has_failed(run_python):
    """The error lists its tags. If the suite then asks for one of them, the same run counts.

    Nor does a run count that has no folder, whose end nobody has seen, or whose guard was killed.
    """
    path, found = run_python("", tags=("eval/x", "charts/y"), curve="eval/none", seed=3)
    there = "(there are: eval/x, charts/y, charts/cpu_seconds)"
    assert found == {"seed": 3, "error": f"no eval/none in {path / 'run'} {there}"}
    cell = vars(define_cell(headline="charts/y"))
    assert records.find_run(path.parent, cell)["metrics"] == {"charts/y": 30.0, "eval/x": 30.0}
    (path / "run").rename(path.parent / "run")
    assert records.find_run(path.parent, cell)["error"] == "no run folder"
    (path / "process.json").unlink()
    assert records.find_run(path.parent, cell)["error"] == records.NOT_RUN
    assert run_python("import os; os.kill(os.getppid(), 9)")[1]["error"] == "exit code -9: "


@pytest.mark.parametrize(
    ("end", "error", "best"),
    [
        ("eval/x: 7\neval/y: -1.5e-05", "", {"best/x": 7, "best/y": -1.5e-5}),
        ("broken", "no scores of best.pt: broken", {}),
        ("eval/x: nan", "no scores of best.pt: eval/x: nan", {}),
    ],
)
def test_best_is_scored_after_the_run_if_the_cell_asks_for_it(tmp_path, monkeypatch, end, error, best):
    """By the script itself. The seconds are not part of the run's."""
    commands = []

    def execute(command, cell, log, gpus):
        commands.append(command)
        log.write_text(f"hello\n{end}\n")
        return {"exit_code": 0, "cpu_seconds": len(commands)}

    monkeypatch.setattr(run, "execute", execute)
    cell = define_cell("python algos/ppo.py --gamma 0.9", score_best=True, seed=4)
    folder = tmp_path / f"seed4-{cell.hash()}"
    run.run_cell(cell, folder, "python")
    first, second = commands
    assert first == run.make_command(cell, "python", folder / "try_1")
    flags = ["--evaluate", "best.pt", "--eval-episodes", "100", "--seed", "4"]
    assert second == ["python", "algos/ppo.py", *flags]
    process = json.loads((folder / "try_1" / "process.json").read_text())
    assert process["best"] == best and process["cpu_seconds"] == 1
    write_run(folder / "try_1" / "run", ["eval/x"])
    found = records.find_run(folder, vars(cell))
    assert found.get("error", "") == error
    if best:
        assert found["metrics"] == {"eval/x": 30.0} | best


def test_cpu_seconds_are_those_of_all_processes_of_a_cell(run_python):
    """They include a child for which nobody waits."""
    child = "[sys.executable, '-c', 'while True: pass']"
    path, _ = run_python(f"import subprocess, sys, time; subprocess.Popen({child}); time.sleep(4)")
    assert json.loads((path / "process.json").read_text())["cpu_seconds"] > 0.5


def test_a_cell_has_its_gpus_one_thread_and_no_stdin(run_python, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray does in its worker
    names = "('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')"
    code = f"import os, sys; print([os.environ[x] for x in {names}], repr(sys.stdin.read()))"
    for num_gpus, given, shown in ((0, "", ""), (1, "", "3"), (2, "1,2", "1,2")):
        path, _ = run_python(code, given, gpus=num_gpus)
        assert (path / "log.txt").read_text() == f"['{shown}', '1'] ''\n"


# Starts a daemon in a session of its own that ignores signals, and has the folder of the attempt, the last
# argument, in its command line.
DAEMON = """
import os, subprocess, sys, time
from pathlib import Path

deaf = "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('up'); time.sleep(600)"
start = "import subprocess as s, sys; s.Popen([sys.executable, '-uc', *sys.argv[1:]], start_new_session=True)"
subprocess.run([sys.executable, "-c", start, deaf, sys.argv[1]])
while "up" not in Path(sys.argv[1], "log.txt").read_text():
    time.sleep(0.05)
print("ready")
"""
SLOW = partial(pytest.param, marks=pytest.mark.slow)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="guards kill the process group alone")


@on_linux
@pytest.mark.parametrize(
    ("end", "hours", "error"),
    [
        ("", 1, ""),
        ("print('|##| 1/1\\r|###| 2/2'); sys.exit('why it ended')", 1, "exit code 1: why it ended"),
        ("print('|##| 1/1\\r|###| 2/2', end=''); exit(3)", 1, "exit code 3: |###| 2/2"),
        ("os.kill(os.getpid(), 9)", 1, "exit code -9: ready"),
        ("print('╭─ Bad ─╮\\n│ --x: no  │\\n│ ─── │\\n╰─────╯'); exit(2)", 1, "exit code 2: --x: no"),
        ("time.sleep(90)", 20 / 3600, "not done after 0.00555556 hours"),
    ],
)
def test_what_a_cell_leaves_running_ends_with_it(run_python, monkeypatch, end, hours, error):
    """However the cell ends. What crashed has failed, whatever it has logged.

    The reason is the last line written, whatever the environment says of buffers, or the first in tyro's frame.
    """
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    path, found = run_python(DAEMON + end, hours=hours)
    assert not find_processes(path)
    assert found.get("error", "") == error and "ready" in (path / "log.txt").read_text()


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_cells_take_the_cores_and_gpus_that_they_ask_for(monkeypatch):
    """On a machine with three cores and two GPUs."""
    given, ends = {}, {name: threading.Event() for name in "abcdefghi"}

    def run_cell(cell, gpus):
        given[cell.setting] = gpus
        assert ends[cell.setting].wait(60)

    monkeypatch.setattr(run, "run_cell", run_cell)
    for names in ("NoDevFiles", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        with pytest.raises(ResultsError, match="lacks the GPUs"):
            run.start_here([define_cell(gpus=1)])
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    sizes = {"a": (2, 0), "b": (2, 0), "c": (1, 0), "d": (9, 0)}  # cores and GPUs
    sizes |= {"e": (1, 1), "f": (1, 1), "g": (1, 1), "h": (1, 2), "i": (1, 0)}
    cells = {name: define_cell(setting=name, cpus=x, gpus=y) for name, (x, y) in sizes.items()}
    start_cell, futures = run.start_here([*cells.values()]), {}

    def start(names, ended=""):
        """Return which of the cells start when those of `ended` have ended."""
        for name in ended:
            ends[name].set()
            futures[name].result(60)
        futures.update({name: start_cell(cells[name]) for name in names})
        return "".join(name for name in names if futures[name])

    assert start("abdc") == "ac"
    assert start("db", ended="a") == "b"
    assert start("da", ended="bc") == "d"  # more cores than there are: alone
    assert start("efghi", ended="d") == "efi"
    assert start("h", ended="efi") == "h"
    start("", ended="h")
    assert given == dict.fromkeys("abcdi", "") | {"e": "4", "f": "7", "h": "4,7"}


AGAIN = ["exit code 1: a crash", "exit code -9: "]


@pytest.mark.parametrize(
    "error",
    [*AGAIN, "exit code 2: x", "exit code 1: ppo.py: error: x", "no eval/x", "not done after 24 hours"],
)
def test_a_cell_that_crashes_starts_over_twice(tmp_path, monkeypatch, error):
    """A cell that would fail in the same way again is not repeated."""
    cell = define_cell()
    folder = tmp_path / cell.hash()
    monkeypatch.setattr(run, "execute", lambda *_: {"exit_code": 1})
    monkeypatch.setattr(records, "find_run", lambda *_: {"seed": 0, "error": error})
    found = run.run_cell(cell, folder, "python")
    tries = ["try_1", "try_2", "try_3"][: 3 if error in AGAIN else 1]
    assert sorted(path.name for path in folder.iterdir()) == tries
    assert found == f"{error} (log: {folder / tries[-1] / 'log.txt'})"


def test_what_a_worker_raises_fails_its_cell_in_one_line(tmp_path):
    """Such as an error of Ray when a machine is gone, a full disk, or a script that was edited during the suite."""

    def submit(cell, *_):
        future = Future()
        future.set_exception(error)
        return future

    cell = define_cell()
    error = RuntimeError("a node died\nsomewhere")
    assert run.run_cells({cell: tmp_path}, submit) == {cell: "a node died"}
    error.cause = OSError("a full disk")  # what Ray's error was raised for
    assert run.run_cells({cell: tmp_path}, submit) == {cell: "a full disk"}
    with pytest.raises(ResultsError, match=r"^algos/ppo.py has changed since the suite was started$"):
        run.run_cell(cell, tmp_path / "seed0-of-another-hash", "python")


def test_a_failing_cell_and_a_killed_one_take_no_other_down(tmp_path):
    """One cell always fails, one is killed once, one lacks its curve. The next call repeats nothing that is done."""
    runs = tmp_path / "runs"
    bad = SHORT.replace("python", "torchrun --standalone --nproc-per-node 2").replace("8", "3")
    commands = {"good": SHORT, "bad": f"{bad} --no-cuda"}
    commands |= {"killed": SHORT.replace("2560", "5120"), "other": f"{SHORT} --gamma 0.9"}
    suite = write_suite(tmp_path / "a.toml", **commands)
    text = suite.read_text()
    suite.write_text(text + 'curve = "charts/nothing"\n')  # of the last cell
    harness = start_harness(suite, "--runs", runs)
    (victim,) = wait_until(lambda: find_processes(runs / "a" / "ppo" / "CartPole-v1" / "killed", "guard.py"))
    victim.kill()
    output, _ = harness.communicate(timeout=240)
    assert harness.returncode == 1 and "2 of 4 cells done" in output, output
    reason = "exit code 1: ppo.py: error: --num-envs (3) must be divisible by the number of processes (2)"
    assert f"failed: ppo/CartPole-v1/bad, seed 1: {reason} (log: {runs}/a/ppo/CartPole-v1/bad/seed1" in output
    assert "failed: ppo/CartPole-v1/other, seed 1: no charts/nothing in " in output
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")}
    assert len(before) == 5  # two of the cell that was killed
    levels = "[levels.CartPole-v1]\nmaximum = 500\n"
    suite.write_text(f'{text}curve = "charts/episodic_return"\n{levels}')  # which all have logged
    harness = start_harness(suite, "--runs", runs, "--only", "*/[gko]*")
    assert "3 of 3 cells done" in harness.communicate(timeout=240)[0] and harness.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")} == before
    report.main(report.Args(runs, tmp_path / "out"))  # it forgets nothing of the others
    page = (tmp_path / "out" / "results.md").read_text()
    assert all(f"| CartPole-v1, {name} |" in page for name in ("good", "killed", "other"))
    assert f"- CartPole-v1, bad, seed 1: {reason}\n" in page and report.LEGEND in page
    assert records.collect(runs / "a")["levels"] == {"CartPole-v1": {"maximum": 500}}  # of the picture


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, *map(SLOW, (signal.SIGTERM, signal.SIGKILL))])
def test_a_harness_that_is_stopped_leaves_nothing_running(tmp_path, number):
    """The cell has two processes under torchrun, and does not count as ended."""
    command = "torchrun --standalone --nproc-per-node 2 algos/ppo.py --total-timesteps 5000000"
    suite = write_suite(tmp_path / "a.toml", long=command)
    harness = start_harness(suite, "--runs", tmp_path)
    wait_until(lambda: list(tmp_path.rglob("try_1/*/checkpoint.pt")))
    assert len(find_processes(tmp_path / "a" / "ppo")) >= 4  # guard, torchrun and its two
    (os.kill if number == signal.SIGKILL else os.killpg)(harness.pid, number)
    output, _ = harness.communicate(timeout=240)
    assert harness.returncode == (-9 if number == signal.SIGKILL else 130), output
    assert ("interrupted: what was finished is kept" in output) == (number != signal.SIGKILL)
    wait_until(lambda: not find_processes(tmp_path / "a" / "ppo"))
    assert "Traceback" not in output and not list(tmp_path.rglob("process.json"))


# ---- Statistics ------------------------------------------------------------------------------------------------------


NAME = "ppo/CartPole-v1/default"


def make_machine(**changes):
    """Describe a machine, as a stored run does."""
    return dict.fromkeys(("cores", "python", "torch", "gymnasium", "date", "cpu", "commit"), "a") | changes


def make_cell(values, name=NAME, **changes):
    """Return a cell of stored results, with a run for each value of the headline."""
    script, task, setting = name.split("/")
    command = f"python algos/{script}.py" if script in SCRIPTS else f"python -m benchmark.peers.{script}"
    cell = {"task": task, "setting": setting, "script": script, "command": command}
    cell |= {
        "headline": "eval/episodic_return",
        "curve": "c",
        "threshold": 475,
        "in_a_row": 1,
        "better": "higher",
        "gpus": 0,
    }
    cell |= changes
    run = {"commit": "abc", "machine": make_machine(), "cpu_seconds": 1.0, "steps_per_second": 1000.0}
    run |= {"env_steps": 9000, "curve": [[0, 0.0, 20.0], [9000, 90.0, 500.0]]}
    runs = []
    for seed, value in enumerate(values, 1):
        runs.append(
            run | {"seed": seed, "steps_to_threshold": 10 * seed, "metrics": {cell["headline"]: value}}
        )
    return {"runs": runs, "missing": []} | cell


STEPS, SPEEDS = [1000, 1300, 900, 1200, 1100], [1000.0, 1100.0, 1050.0, 900.0, 950.0]


def make_solved(steps, speeds=SPEEDS, name=NAME, **changes):
    """Return a cell whose runs end at 500, and reached the threshold after these steps (None: never)."""
    cell = make_cell([500.0] * len(steps), name, **changes)
    for run_, step, speed in zip(cell["runs"], steps, speeds, strict=False):
        run_ |= {"steps_to_threshold": step, "seconds_to_threshold": step and step / 100}
        run_["steps_per_second"] = speed
    return cell


def make_results(*cells, suite="a", **keys):
    """Return the results of a suite, as report.py stores them."""
    names = [f"{c['script']}/{c['task']}/{c['setting']}" for c in cells]
    return {"suite": suite, "cells": dict(zip(names, cells, strict=True))} | keys


def test_ratios_are_those_of_medians_with_an_interval_by_logarithms():
    ours, peer = [2.0, 2.1, 1.9], [4.0, 4.1, 3.9]
    ratio, (low, high) = records.find_ratio(ours, peer)
    assert ratio == 0.5 and 0.44 < low < 0.5 < high < 0.56
    assert low * high == pytest.approx(math.exp(2 * np.mean(np.log(ours) - np.log(peer))))
    for one, other in ((1.0, -1.0), (1.0, math.inf), (1.0, math.nan), (0.0, 1.0), (math.inf, 1.0)):
        ratio, interval = records.find_ratio([one], [other])
        assert not 0 < ratio < math.inf and interval is None
    assert records.find_ratio([1.0, 1.0], [2.0, math.inf, 2.0]) == (0.5, None)


@pytest.mark.parametrize("num", [3, 5, 10])
def test_intervals_cover_what_they_say(num):
    """Of 95 % intervals, 95 hold the truth: of means, of differences, and of ratios of skewed values.

    A percentile bootstrap covers 74, 81 and 86 % for means of 3, 4 and 5 values, and 90 % for ten. A pooled
    variance would not do here, as the larger sample has less noise.
    """
    rng, found = np.random.default_rng(num), np.zeros(3)
    for _ in range(600):
        a, b = rng.normal(5.0, 1.0, num), rng.normal(5.0, 0.5, 2 * num)
        ratio = records.find_ratio(np.exp(a), 2 * np.exp(b))[1]
        intervals = records.find_interval(a), records.find_interval(a, b), ratio
        found += [low < x < high for x, (low, high) in zip((5, 0, 0.5), intervals, strict=True)]
    assert (abs(found / 600 - 0.95) < 0.035).all(), found  # four standard deviations; Welch's is a bit wide
    assert records.find_interval([1.0]) is records.find_interval([1.0, math.inf]) is None
    low, high = records.find_interval([499.0, 498.0, 500.0], [500.0] * 3)  # one side may have no noise
    assert (low, high) == pytest.approx((-1 - 4.303 / 3**0.5, -1 + 4.303 / 3**0.5), rel=1e-3)


def test_threshold_is_the_first_point_at_it_in_the_right_direction():
    curve = [
        SimpleNamespace(step=step, value=value) for step, value in enumerate((3.0, 5.0, 2.0, 4.0, 5.0), 1)
    ]

    def find(threshold, better="higher", in_a_row=1):
        cell = {"threshold": threshold, "better": better, "in_a_row": in_a_row}
        return getattr(records.find_threshold(curve, cell), "step", None)

    assert find(4) == 2
    assert find(3, "lower") == 1 and find(2.5, "lower") == 3
    assert find(6) is None
    assert find(4, in_a_row=2) == 5  # one alone is forgotten
    assert find(4, in_a_row=3) is None


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_tables_say_what_the_results_say():
    lost = make_cell([], "gnugo/Go/match")
    lost["missing"] = [{"seed": seed, "error": "exit code 1: why"} for seed in (1, 2)]
    columns = {"result": "headline"}
    table = report.make_cell_table([make_cell([400.0, 410.0, 420.0]), lost], columns)
    assert "| CartPole-v1, default | 410 (400, 410, 420) | 1.00 | 3 |" in table
    assert table.endswith("\n\n- Go, match, seed 1: exit code 1: why\n- Go, match, seed 2: exit code 1: why")
    six = [400.0, 410.0, 420.0] * 2
    low, high = map(common.show, records.find_interval(six))
    assert f"| 410 ({low} to {high}) | 1.00 | 6 |" in report.make_cell_table([make_cell(six)], columns)
    assert "| CartPole-v1, default | return | 410 (400, 410, 420) |  | 1.00 | 3 |" in report.make_comparison(
        [make_cell([400.0, 410.0, 420.0])]
    )
    found = [common.show(x) for x in (0.00999999, 99.96, 1234.5, -1e-12, 5.0, math.inf)]
    assert found == ["0.0100", "100", "1,234", "0", "5.00", "-"]


def test_a_comparison_holds_each_cell_against_the_first_of_its_task():
    better, other = make_cell([11.0, 12.0, 13.0]), make_cell([2.0, 1.0, 3.0])
    text = report.make_comparison([make_cell([1.0, 2.0, 3.0]), better, other])
    half = 2.776 * (1 / 3 + 1 / 3) ** 0.5  # Student's t of four degrees of freedom, standard deviations of 1
    assert f"12.0 (11.0, 12.0, 13.0) | **10.0** ({10 - half:.2f} to {10 + half:.1f}) | 1.00 | 3 |" in text
    assert "2.00 (1.00, 2.00, 3.00) |  |" in text and "2.00 (2.00, 1.00, 3.00) | 0 (-2.27 to 2.27) |" in text


def test_a_report_keeps_committed_runs_that_a_folder_lacks():
    """New runs replace those of their seeds."""

    def merge(cell, name=NAME):
        """Return the values that are published then."""
        old, new = make_results(make_cell([1.0, 2.0])), make_results(cell)
        report.merge(old, new)
        found = new["cells"][name]
        assert not found["missing"]
        return records.get_values(found, "headline")

    for error in (records.NOT_RUN, "exit code 1"):
        assert merge(make_cell([5.0], missing=[{"seed": 2, "error": error}])) == [5.0, 2.0]
    assert merge(make_cell([5.0, 6.0, 7.0])) == [5.0, 6.0, 7.0]
    assert merge(make_cell([5.0], "ppo/T/other")) == [1.0, 2.0]  # a folder without the cell
    assert merge(make_cell([5.0]) | {"command": "of before"}) == [1.0, 2.0]
    peer = make_cell([1.0, 2.0], "sb3_ppo/T/s")
    peer["runs"][1] |= {"machine": make_machine(commit="abc-dirty"), "commit": "sb3 1.0"}
    with pytest.raises(ResultsError, match=r"T/s, seed 2 ran with uncommitted changes: run it again"):
        merge(peer)


def test_pages_show_the_cells_and_seeds_that_a_suite_has_now(tmp_path, monkeypatch):
    """Not a run of another command or criterion, nor of a seed that the suite has no more."""
    monkeypatch.setattr(common, "SUITES", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    names = {name: f"ppo/CartPole-v1/{name}" for name in ("default", "command", "criterion")}
    commands = {name: f"python algos/ppo.py --exp-name {name}" for name in names}
    write_suite(tmp_path / "a.toml", seeds=(2, 3), **commands)
    same = {"curve": None, "threshold": None}
    old = [
        make_cell([1.0, 2.0], names["default"], command=commands["default"], **same),
        make_cell([7.0, 8.0, 9.0], names["command"], **same),
        make_cell([7.0, 8.0, 9.0], names["criterion"], command=commands["criterion"]),
    ]
    common.save_results(tmp_path / "a.json", make_results(*old))
    cells = records.load_published()["a"]["cells"]
    assert [run_["seed"] for run_ in cells[names["default"]]["runs"]] == [2]
    assert cells[names["default"]]["missing"] == [{"seed": 3, "error": records.NOT_RUN}]
    for name in ("command", "criterion"):
        assert not cells[names[name]]["runs"] and len(cells[names[name]]["missing"]) == 2


# ---- Comparison ------------------------------------------------------------------------------------------------------


def compare_cells(base, new):
    """Return what is worse in a comparison of two cells, and what has failed."""
    rows, notes = compare.compare(make_results(base), make_results(new))
    return [row[1:4] for row in rows if row[-1]], notes


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
        (BASE, [x - 10 for x in BASE], "higher", 1),  # on each seed, though seeds differ by more
        (BASE, NAN, "higher", 1),
        (NAN, BASE, "higher", 0),
    ],
)
def test_comparison_fails_if_a_headline_got_worse_beyond_noise(base, new, better, code):
    worse, _ = compare_cells(make_cell(base, better=better), make_cell(new, better=better))
    assert [quantity for quantity, *_ in worse] == ["headline"] * code


@pytest.mark.parametrize(
    ("steps", "speeds", "worse"),
    [
        (STEPS[::-1], SPEEDS[::-1], []),
        ([3 * x for x in STEPS], SPEEDS, [["steps_to_threshold", "1,100", "3,300"]]),
        ([None] * 5, SPEEDS, [["steps_to_threshold", "1,100", "-"]]),
        ([*STEPS[:4], None], SPEEDS, []),  # one is luck
        (STEPS, [x / 2 for x in SPEEDS], [["steps_per_second", "1,000", "500"]]),
        (STEPS, [x / 1.2 for x in SPEEDS], []),  # may be the machine
        ([x / 3 for x in STEPS], [3 * x for x in SPEEDS], []),
    ],
)
def test_comparison_fails_if_learning_takes_longer(steps, speeds, worse):
    """All runs end at 500."""
    assert compare_cells(make_solved(STEPS), make_solved(steps, speeds)) == (worse, [])


def test_only_equal_things_of_ours_are_compared():
    """No peers, missing cells, other thresholds or other headlines."""
    slow = [3 * x for x in STEPS]
    peer, others = "sb3_ppo/CartPole-v1/zoo", [make_cell(BASE, f"ppo/T{i}/s") for i in range(3)]
    new = make_results(make_solved(slow, name=peer), others[0])
    rows, notes = compare.compare(make_results(make_solved(STEPS, name=peer), *others), new)
    assert {name for name, *_ in rows} == {"ppo/T0/s"}
    assert [note.split(": ")[:2] for note in notes] == [["not compared", f"ppo/T{i}/s"] for i in (1, 2)]
    search = [make_cell([x, 1.1 * x, 1.2 * x], "our_go_search/Go/s", threshold=None) for x in (1000.0, 500.0)]
    assert compare_cells(*search)[0]  # a program of ours among the peers
    assert not compare_cells(make_solved(STEPS), make_solved(slow, threshold=400))[0]
    assert not compare_cells(make_solved(STEPS), make_solved(slow, in_a_row=2))[0]
    assert not compare_cells(make_cell(BASE), make_cell(NAN, headline="x"))[0]


NOISE = {
    "normal": np.random.Generator.standard_normal,
    "skewed": lambda rng, shape: (rng.lognormal(0, 0.5, shape) - 1.133) / 0.604,
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape) / 2**0.5,
}


@pytest.mark.parametrize("kind", ["normal", *map(SLOW, [*NOISE][1:])])
def test_what_a_comparison_finds_and_how_often_it_cries_wolf(kind):
    """The figures of benchmark/README.md; they hold for noise that is skewed or has heavy tails too."""
    rng = np.random.default_rng(4)

    def simulate(num, *shifts):
        """Tell what is worse in comparisons [num, 20] of twenty cells with five seeds.

        In NEW, the headline, steps and speed of cell 0 are worse by `shifts`, in standard deviations of the seeds.
        """
        found = np.zeros((num, 20), bool)
        for is_worse in found:
            steps, end, speed = NOISE[kind](rng, (3, 2, 20, 5))
            base, new = np.stack([0.3 * steps + 0.95 * end, steps, speed], 1)
            new[:, 0] += np.array(shifts)[:, None]
            p = compare.find_p_worse(base, new, True).ravel()
            is_worse |= (stats.false_discovery_control(p) <= compare.LEVEL).reshape(3, 20).any(0)
        return found

    assert simulate(500, 0, 0, 0).any(1).mean() <= 0.08
    shifts = (3, 0, 0), (4, 0, 0), (0, 4, 0), (0, 0, 5), (3, 3, 0)
    found = [simulate(150, *shift)[:, 0].mean() for shift in shifts]
    assert (np.array(found) > [0.33, 0.7, 0.7, 0.88, 0.6]).all(), found


def test_a_failed_cell_has_exit_code_1_and_results_that_cannot_be_read_2(tmp_path):
    """A missing file, one that is no JSON, one of another form, the list of a run folder, an empty folder."""
    lost = [make_cell(BASE[:4], missing=[{"seed": 5, "error": x}]) for x in (records.NOT_RUN, "exit code 1")]
    contents = {"base": make_results(make_cell(BASE)), "0": make_results(lost[0]), "1": make_results(lost[1])}
    contents |= {
        "apart": make_results(make_cell(BASE, "ppo/T/s")),
        "other": {},
        "list": {"suite": "a", "cells": []},
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "bad").write_text("{")
    (tmp_path / "runs").mkdir()

    def compare_with(name):
        return compare.main(compare.Args(tmp_path / "base", tmp_path / name))

    assert [compare_with(code) for code in "01"] == [0, 1]
    for name, message in {
        "none": "No such file .*none'$",
        "runs": "No such file .*suite.json'$",
        "bad": "no results of a suite$",
        "other": "no results of a suite$",
        "list": "no results of a suite$",
        "apart": "have no results of the same cell$",
    }.items():
        with pytest.raises((ResultsError, OSError), match=message):
            compare_with(name)
    command = [sys.executable, "-m", "benchmark.compare", "none.json", "none.json"]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    message = "compare.py: [Errno 2] No such file or directory: 'none.json'\n"
    assert (found.returncode, found.stderr) == (2, message)
