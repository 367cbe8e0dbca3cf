"""The benchmark harness: suites, runs on Ray, report and comparison."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import psutil
import pytest
from conftest import ENVIRONMENT, ROOT

sys.path.append(str(ROOT / "benchmark"))
import common
import compare
import records
import report
import run
import run_folders
from suite import SuiteError, read_suite

SHORT = "python algos/ppo.py --num-envs 8 --total-timesteps 2560 --eval-episodes 4"
LONG = "python algos/ppo.py --total-timesteps 50000000 --eval-episodes 4"
SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))
SCRIPTS = {p.stem for p in (ROOT / "algos").glob("*.py")}
WITHOUT_ABLATIONS = {"ppo_change_detection"}  # what is compared there are rivals, by a benchmark of its own


def write_suite(path, seeds, **commands):
    """A suite of a cell for each setting=command, on CartPole-v1."""
    cells = [f'[[cells]]\ntask = "CartPole-v1"\nsetting = "{s}"\ncommand = "{c}"\n' for s, c in commands.items()]
    path.write_text(f"seeds = {seeds}\n" + "".join(cells))
    return path


def start_harness(*flags, **env):
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT | env, start_new_session=True, **pipes)


def wait_until(is_time, seconds=120):
    deadline = time.time() + seconds
    while not (found := is_time()):
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def find_processes(folder):
    """Processes of cells that run below `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--run-dir" in words and words[words.index("--run-dir") + 1].startswith(str(folder)):
            found.append(process)
    return found


def count_results(runs):
    """Number of results of each cell."""
    return Counter(str(path.parents[2].relative_to(runs)) for path in runs.rglob("result.json"))


# ---- Suites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_parse_against_the_scripts(path):
    cells, _ = read_suite(path)
    if not path.stem.startswith("ppo_"):
        assert {cell.script for cell in cells} >= SCRIPTS - (WITHOUT_ABLATIONS if path.stem == "ablations" else set())
    assert {cell.curve for cell in cells} - {None} <= run_folders.CURVES.keys()  # which pictures name in words
    if path.stem == "cpu":
        assert all(n >= 5 for n in Counter(cell.name for cell in cells).values())


def test_seeds_take_turns_so_that_what_is_compared_runs_side_by_side(tmp_path):
    cells, _ = read_suite(write_suite(tmp_path / "a.toml", [1, 2], a=SHORT, b=f"{SHORT} --gamma 0.9"))
    assert [(cell.setting, cell.seed) for cell in cells] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


CELL = '[[cells]]\ntask = "T"\nsetting = "s"\ncommand = "python algos/ppo.py"\n'
PEER = CELL.replace('"s"', '"p"').replace("algos/ppo", "benchmark/peers/elkai_lkh") + 'environment = "elkai"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [1", "not TOML"),
        ("seeds = [1]\n", r"no \[\[cells\]\]"),
        (CELL, "cell 1: no seeds"),
        ("seeds = [1, 1]\n" + CELL, "duplicate seeds"),
        ("seeds = [1]\n" + CELL + CELL, "duplicate cells ppo/T/s"),
        ("seeds = [1]\n" + CELL + CELL.replace('"s"', '"t"'), "duplicate cells ppo/T/s and ppo/T/t"),
        ("seeds = [1]\n" + CELL.replace("algos/ppo", "algos/dqn"), "unknown script algos/dqn.py"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --no-such-flag 1"), "no-such-flag"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --gamma high"), "--gamma"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --gamma 1.5"), "--gamma 1.5: has to be from 0 to 1"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --seed 4"), "the harness sets seeds"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --run-dir=x"), "the harness sets seeds"),
        ("seeds = [1]\n" + CELL.replace("python algos/ppo.py", "rm -rf x"), "does not begin with python"),
        ("seeds = [1]\n" + CELL.replace('"T"', '"../T"'), "has to be a name"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --run_dir x"), "the harness sets seeds"),
        ("seeds = [1]\n" + CELL.replace("python", "python -m pdb"), "unknown script -m"),
        ("seeds = [1]\n" + CELL.replace("python", "torchrun --nproc-per-node 2"), "needs --standalone"),
        (
            "seeds = [1]\n" + CELL.replace("python", "torchrun --standalone --nonsense 2"),
            "is refused: .*: --nonsense",
        ),
        ("seeds = [1]\n" + CELL + "threshold = 3\n", "a threshold is of a curve"),
        ("seeds = [1]\n" + CELL + "gpus = 1.5\n", "gpus a fraction"),
        ("seeds = [1]\n" + CELL + "hours = nan\n", "hours above 0"),
        ("seeds = [1]\nratios = 3\n" + CELL, r"ratios is not a list of tables \[\[ratios\]\]"),
        ("seeds = [1]\ncells = [3]\n", "cells is not a list of tables"),
        ("seeds = [1]\n" + CELL + CELL.replace("ppo.py", " ppo.py ").replace(" ppo", "ppo"), "duplicate cells"),
        ("seeds = [1]\n" + CELL + "curv = 'x'\n", "unknown key curv"),
        ("seeds = [1]\n" + CELL + "cpus = 'two'\n", "cpus = 'two' is not a number"),
        ("seeds = [1]\n" + CELL + "cpus = 0\n", "cpus is 1 or more"),
        ("seeds = [1]\n" + CELL + "in_a_row = 0\n", "in_a_row is 1 or more"),
        ("seeds = [1]\n" + CELL + "better = 'more'\n", "neither"),
        ("seeds = [1]\n" + CELL + "environment = 'nobody'\n", "no benchmark/peers/requirements-nobody.txt"),
        ("seed = [1]\n" + CELL, "unknown key seed "),
        ("seeds = [1]\n" + CELL.replace('setting = "s"\n', ""), "no setting"),
        (
            "seeds = [1]\n" + CELL + '[[ratios]]\ntitle = "t"\nquantity = "q"\nbetter = "lower"\nours = "ppo/T/s"\n'
            'peer = "sb3/T/s"\n',
            "peer = sb3/T/s is no cell",
        ),
        (
            "seeds = [1]\n" + CELL + '[[ratios]]\ntitle = "t"\nquantity = "seconds_to_threshold"\nbetter = "lower"\n'
            'ours = "ppo/T/s"\npeer = "ppo/T/s"\n',
            "ppo/T/s has no threshold",
        ),
    ],
)
def test_what_is_wrong_with_a_suite_is_one_line(tmp_path, text, message):
    path = tmp_path / "suite.toml"
    path.write_text(text)
    with pytest.raises(SuiteError, match=message) as error:
        read_suite(path)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(path))


def test_bad_input_exits_with_2_and_leaves_nothing(tmp_path):
    suite = write_suite(tmp_path / "a.toml", [1], a=SHORT)
    (tmp_path / "file").write_text("")
    big = tmp_path / "big.toml"
    big.write_text("seeds = [1]\n" + CELL + "cpus = 4096\n")
    for flags, message in (
        ([tmp_path / "missing.toml"], "cannot be read"),
        ([suite, "--only", "r2d2*"], "no such cell"),
        ([suite, "--retries", "-1"], "--retries -1"),
        ([suite, "--runs", tmp_path / "file"], "is not a folder"),
        ([suite, "--runs", tmp_path / "file" / "runs"], "is not a folder"),
        ([suite, "--runs", tmp_path / "runs", "--address", "127.0.0.1:1"], "no Ray cluster"),
        ([big, "--runs", tmp_path / "runs"], "needs 4096 CPUs"),
    ):
        process = start_harness(*flags)
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("run.py: ")]
        assert process.returncode == 2 and len(lines) == 1 and message in lines[0], output
        assert "Traceback" not in output and not (tmp_path / "runs").exists()


# ---- Cells -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(tmp_path):
    """A cell and its folder."""
    (cell,), _ = read_suite(write_suite(tmp_path / "a.toml", [1], a=SHORT))
    (tmp_path / "cell").mkdir()
    return cell, tmp_path / "cell"


def run_python(cell, code, attempt=1):
    cell, folder = cell
    return run.run_cell(cell, cell.hash(), folder, [sys.executable, "-c", code, str(folder)], attempt)


def test_a_cell_that_never_writes_a_result_is_an_error(cell):
    assert run_python(cell, "print('hello')")["error"] == "ended without a result.json that can be read"
    assert run.read_end(cell[1] / "try_1" / "log.txt") == ["hello"]


def write_log(folder, tags, num_points=3, **clocks):
    """TensorBoard scalars at the steps 100, 200, ...; a clock is seconds a step."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(100, 100 * num_points + 1, 100):
            for tag in tags:
                writer.add_scalar(tag, step / 10, step)
            for name, seconds in ({"cpu_seconds": 0.02} | clocks).items():
                writer.add_scalar(f"charts/{name}", step * seconds, step)


def write_result(folder, **changes):
    """A result.json as our scripts write it."""
    result = {"script": "ppo", "env_id": "T", "seed": 1, "headline": "eval/x", "metrics": {"eval/x": 2.5}}
    result |= {"env_steps": 300, "wall_seconds": 8.0, "cpu_seconds": 7.0, "device": "cpu", "torch": "2", "args": {}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result | changes))


def test_a_cell_that_has_not_logged_its_curve_has_failed(cell, tmp_path):
    """One line names the tag and those there are; with one of them in the suite, the same run counts."""
    import dataclasses

    write_log(tmp_path / "run", ["charts/other"])
    write_result(tmp_path / "run")
    code = f"import shutil, sys; shutil.copytree({str(tmp_path / 'run')!r}, sys.argv[1] + '/try_1/run')"
    absent = dataclasses.replace(cell[0], curve="charts/nothing")
    error = run_python((absent, cell[1]), code)["error"]
    assert error.startswith("no curve charts/nothing in ") and error.startswith(run.NO_RETRY)
    assert error.endswith("(there are: charts/other, charts/cpu_seconds)") and "\n" not in error
    result = cell[1] / "try_1" / "run" / "result.json"
    assert json.loads((cell[1] / "try_1" / "process.json").read_text())["error"] == error
    assert run.find_result(cell[1], absent.curve) is None and run.find_result(cell[1]) == result
    other = dataclasses.replace(cell[0], curve="charts/other")
    assert run.find_result(cell[1], other.curve) == result and run.find_flaw(other, cell[1]) is None
    with pytest.raises(records.ResultsError, match=r"no curve charts/nothing in .* \(there are: charts/other, "):
        records.read_run({"curve": "charts/nothing", "threshold": None}, result)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no curve charts/return_last_20 in .* \(there are: none\)"):
        common.read_curve(tmp_path / "empty", "charts/return_last_20")


def test_exit_codes_and_signals_are_told(cell):
    code = "import sys; print('|##| 1/1\\r|###| 2/2'); sys.exit('why it ended')"
    assert run_python(cell, code)["error"] == "exit code 1: why it ended"
    assert run.read_end(cell[1] / "try_1" / "log.txt") == ["|###| 2/2", "why it ended"]
    assert run_python(cell, "import os; os.kill(os.getpid(), 9)", 2)["error"] == "killed by Killed"
    assert run.find_attempt(cell[1]) == 3


def test_a_cell_that_hangs_is_killed_with_its_children(cell):
    import dataclasses

    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '4711']); time.sleep(4711)"
    found = run_python((dataclasses.replace(cell[0], hours=2 / 3600), cell[1]), code)
    assert found["error"].startswith("not done after")
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4711"]]


def test_a_cell_sees_the_gpus_that_it_was_given_and_no_others(cell, monkeypatch):
    import dataclasses

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray does in its worker
    code = "import os; print('GPUs:', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
    run_python(cell, code, 1)
    run_python((dataclasses.replace(cell[0], gpus=0.5), cell[1]), code, 2)
    assert [(cell[1] / f"try_{i}" / "log.txt").read_text() for i in (1, 2)] == ["GPUs:  1\n", "GPUs: 3 1\n"]


def test_what_a_cell_leaves_running_ends_with_it(cell):
    assert run_python(cell, "import subprocess; subprocess.Popen(['sleep', '4713'])")["error"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4713"]]


def test_commands_get_seed_and_folder_and_nothing_else(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        f"seeds = [7]\n{CELL}{PEER}"
        + CELL.replace('"s"', '"t"').replace("python", "torchrun --standalone --nproc-per-node 2")
    )
    a, c, b = (run.make_command(x, {"elkai": "/peer/python"}, tmp_path, True) for x in read_suite(path)[0])
    rest = ["--seed", "7", "--run-dir", str(tmp_path)]
    assert a == [sys.executable, "algos/ppo.py", *rest, "--track"]
    assert b[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert b[6:] == ["algos/ppo.py", *rest, "--track"]
    assert c == ["/peer/python", "benchmark/peers/elkai_lkh.py", *rest]


def test_a_peer_that_cannot_be_installed_is_told_with_the_reason(tmp_path, monkeypatch):
    def fail(peer):
        raise subprocess.CalledProcessError(
            1, "pip", stderr="WARNING: x\nERROR: No matching distribution\n[notice] y\n"
        )

    monkeypatch.setattr(common, "make_peer_environment", fail)
    path = tmp_path / "a.toml"
    path.write_text(f"seeds = [1]\n{CELL}{PEER}")
    suite = run.SuiteRun(path, tmp_path / "runs")
    with suite.lock():
        assert suite.prepare_peers(suite.cells) == {}
        suite.save()
        with (
            pytest.raises(SuiteError, match=r"another run\.py is at work"),
            run.SuiteRun(path, tmp_path / "runs").lock(),
        ):
            pass
    ours, peer = records.collect(suite.root)["cells"].values()
    assert ours["missing"] == [{"seed": 1, "error": records.NOT_RUN}]
    error = "peer elkai cannot be installed: ERROR: No matching distribution"
    assert peer["missing"] == [{"seed": 1, "error": error}]
    (tmp_path / "b").mkdir()
    with pytest.raises(SuiteError, match="has the runs of another suite"):
        run.SuiteRun(write_suite(tmp_path / "b" / "a.toml", [1], other=SHORT), tmp_path / "runs")
    (tmp_path / "b" / "a.toml").write_text(path.read_text())  # the same suite at another place
    run.SuiteRun(tmp_path / "b" / "a.toml", tmp_path / "runs")


@pytest.mark.parametrize("broken", ["", "{}", "[]", '"metrics"', None])
def test_a_result_that_cannot_be_read_is_none(tmp_path, broken):
    folder = tmp_path / "try_1" / "run"
    folder.mkdir(parents=True)
    whole = dict.fromkeys(records.RESULT_KEYS, 1) | {"headline": "a", "metrics": {"a": 1.0}}
    text = json.dumps(whole | {"metrics": {"a": None}}) if broken is None else broken
    (folder / "result.json").write_text(text)
    assert records.find_result(tmp_path) is None
    (folder / "result.json").write_text(json.dumps(whole))
    assert records.find_result(tmp_path) == folder / "result.json"


def test_a_run_is_read_from_its_folder(tmp_path):
    """Steps, CPU-seconds and clock of each point, the threshold, and speed up to the last point."""
    from torch.utils.tensorboard import SummaryWriter

    folder, start = tmp_path / "try_1" / "run", time.time()
    with SummaryWriter(str(folder)) as writer:
        for step, value in ((100, 1.0), (200, 3.0), (400, 2.0)):
            writer.add_scalar("charts/cpu_seconds", step / 50, step, walltime=start + step)
            writer.add_scalar("curve", value, step, walltime=start + step)
    result = {"seed": 3, "headline": "m", "metrics": {"m": 2.5}, "env_steps": 400, "wall_seconds": 500.0}
    result |= {"cpu_seconds": 20.0, "device": "cpu", "torch": "2"}
    (folder / "result.json").write_text(json.dumps(result))
    process = {"error": None, "peak_memory_mb": 5, "machine": {"cpu": "x", "commit": "abc-dirty"}}
    (tmp_path / "try_1" / "process.json").write_text(json.dumps(process))
    cell = {"curve": "curve", "threshold": 2.5, "better": "higher"}
    found = records.read_run(cell, folder / "result.json")
    assert found["curve"] == [[100, 2.0, 1.0], [200, 4.0, 3.0], [400, 8.0, 2.0]] and found["value"] == 2.5
    assert (found["steps_to_threshold"], found["seconds_to_threshold"], found["steps_per_second"]) == (200, 4.0, 50.0)
    assert found["peak_memory_mb"] == 5 and found["machine"] == process["machine"]
    assert found["commit"] == "abc-dirty"  # the harness knows that of our scripts, peers say their version
    (folder / "result.json").write_text(json.dumps(result | {"commit": "elkai 2.0.1"}))
    assert records.read_run(cell, folder / "result.json")["commit"] == "elkai 2.0.1"
    (folder / "result.json").write_text(json.dumps(result | {"device": "NVIDIA"}))  # by the clock there
    (tmp_path / "try_1" / "process.json").write_text("")
    found = records.read_run(cell, folder / "result.json")
    assert found["seconds_to_threshold"] == pytest.approx(200.0, abs=3)
    assert found["steps_per_second"] == pytest.approx(1.0, abs=0.01)
    assert found["peak_memory_mb"] is None and found["commit"] == "unknown"
    assert records.read_run(cell | {"in_a_row": 2}, folder / "result.json")["steps_to_threshold"] is None
    without = cell | {"curve": None, "threshold": None}
    assert records.read_run(without, folder / "result.json")["steps_per_second"] == 400 / 500


def test_seconds_on_a_gpu_are_those_of_training_where_a_run_logs_them(tmp_path):
    write_log(tmp_path / "run", ["curve"], wall_seconds=0.5)
    write_result(tmp_path / "run", device="NVIDIA")
    found = records.read_run({"curve": "curve", "threshold": 20, "better": "higher"}, tmp_path / "run" / "result.json")
    assert (found["steps_to_threshold"], found["seconds_to_threshold"]) == (200, 100.0)
    assert found["steps_per_second"] == 2.0 and found["curve"][-1] == [300, 150.0, 30.0]
    assert common.read_points(tmp_path / "run", "curve")[0] == pytest.approx([100, 2.0, 50.0, 10.0])


def test_peak_memory_is_that_of_the_process(cell):
    found = run_python(cell, "import time; x = bytearray(300_000_000); time.sleep(2.5)")
    assert 300 < found["peak_memory_mb"] < 400


def test_another_version_of_the_script_on_a_machine_is_told(cell):
    digest = cell[0].hash()
    assert run.run_cell(cell[0], "0" * 12, cell[1], ["true"], 1)["error"].startswith("another version")
    assert "does not see" in run.run_cell(cell[0], digest, cell[1] / "x", ["true"], 1)["error"]
    assert "does not see /nobody" in run.run_cell(cell[0], digest, cell[1], ["/nobody/python"], 1)["error"]
    assert not list(cell[1].iterdir())


def test_a_cell_dies_with_its_worker(cell, tmp_path):
    """However the worker ends: here by SIGKILL."""
    import multiprocessing

    worker = multiprocessing.get_context("spawn").Process(
        target=run_python, args=(cell, "import time; time.sleep(4712)")
    )
    worker.start()

    def find():
        return [
            p for p in psutil.process_iter(["cmdline"]) if "import time; time.sleep(4712)" in (p.info["cmdline"] or [])
        ]

    wait_until(find)
    worker.kill()
    wait_until(lambda: not find(), 10)
    assert not worker.is_alive() and not find()
    assert not list(cell[1].rglob("process.json"))  # it was cut off, and had no end of its own


def test_progress_is_read_from_the_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("run folder x\n")
    assert run.read_progress(log) == "starting"
    bars = [f"{p}%|{'#' * p}{' ' * (10 - p)}| {p}/10 [00:0{p}<00:05, 2.0step/s, return={p}]" for p in (1, 5)]
    log.write_text("x\n" * 9000 + "\r".join(bars) + "\nsolved: at last\n")
    assert run.read_progress(log) == "5% 5/10 [00:05<00:05, 2.0step/s, return=5]"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_each_running_cell_has_a_line(tmp_path, monkeypatch, is_terminal):
    class Terminal(io.StringIO):
        isatty = lambda self: is_terminal  # noqa: E731

    log = tmp_path / "log.txt"
    log.write_text("5%|# | 5/100 [00:05<01:35, 2.0step/s, return=7]")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    display = run.Display(3, 1)
    display.last_lines -= run.SECONDS_BETWEEN_LINES - 1
    display.show({"a/1": log})
    assert ("a/1" in stream.getvalue()) == is_terminal  # in a log not more often than need be
    display.last_lines -= 1
    display.show({"a/1": log, "b/2": log})
    display.write("done: c")
    display.close()
    text = stream.getvalue()
    assert all(f"{name}  5% 5/100 [00:05<01:35, 2.0step/s, return=7]" in text for name in ("a/1", "b/2"))
    assert "done: c" in text and ("1/3" in text) == is_terminal and ("\x1b" in text) == is_terminal


def test_the_hash_is_of_the_command_and_of_the_script(tmp_path, monkeypatch):
    (tmp_path / "algos").mkdir()
    (tmp_path / "algos" / "ppo.py").write_text("a = 1\n")
    (a, b), _ = read_suite(write_suite(tmp_path / "a.toml", [1], a=SHORT, b=f"{SHORT} --gamma 0.9"))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    first = a.hash()
    assert a.hash() == first != b.hash()
    (tmp_path / "algos" / "ppo.py").write_text("a = 2\n")
    assert a.hash() != first


# ---- Runs on Ray -----------------------------------------------------------------------------------------------------


def test_a_failing_cell_and_a_killed_one_take_no_other_down(tmp_path):
    """One cell always fails, one is killed once, one lacks its curve, one is well; then only the first is left."""
    runs = tmp_path / "runs"
    suite = write_suite(
        tmp_path / "a.toml", [1], good=SHORT, bad=f"{SHORT} --env-id Nothing-v0",
        killed="python algos/ppo.py --total-timesteps 100352 --eval-episodes 4", other=f"{SHORT} --gamma 0.9",
    )  # fmt: skip
    text = suite.read_text()
    suite.write_text(text + 'curve = "charts/nothing"\n')  # of the last cell
    process = start_harness(suite, "--runs", runs, "--track", WANDB_MODE="offline")
    (victim,) = wait_until(lambda: [p for p in find_processes(runs) if "100352" in p.info["cmdline"]])
    victim.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "again: ppo/CartPole-v1/killed, seed 1: killed by Killed" in output
    assert "failed: ppo/CartPole-v1/bad, seed 1: exit code 2: ppo.py: error: --env-id Nothing-v0" in output
    assert "failed: ppo/CartPole-v1/other, seed 1: no curve charts/nothing in " in output and "again: " in output
    assert "again: ppo/CartPole-v1/other" not in output and "2 of 4 cells done" in output
    with pytest.raises(records.ResultsError, match=r"no curve charts/nothing in .*charts/return_last_20"):
        report.main(["--runs", str(runs), "--out", str(tmp_path / "out")])
    counts = count_results(runs)
    assert len(counts) == 3 and set(counts.values()) == {1}
    assert list(runs.rglob("killed/*/try_2/*/result.json"))
    for path in runs.rglob("result.json"):  # --track reached every script
        (log,) = (path.parent / "wandb").glob("offline-run-*/run-*.wandb")
        assert b"charts/episodic_return" in log.read_bytes()
        machine = json.loads((path.parents[1] / "process.json").read_text())["machine"]
        assert machine["commit"] == common.describe_machine()["commit"]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")}
    suite.write_text(text + 'curve = "charts/return_last_20"\n')
    process = start_harness(suite, "--runs", runs)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "4 cells, 3 done before" in output
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("result.json")} == before
    results = records.collect(runs / "a")
    (missing,) = results["cells"]["ppo/CartPole-v1/bad"]["missing"]
    assert missing["seed"] == 1 and "--env-id Nothing-v0" in missing["error"]
    assert f"CartPole-v1, bad, seeds 1: **failed**: {missing['error']}" in report.render(results)
    process = start_harness(suite, "--runs", runs, "--only", "*/good")  # forgets nothing of the others
    assert process.communicate(timeout=60) and process.returncode == 0 and records.collect(runs / "a") == results


def test_ctrl_c_leaves_finished_cells_and_nothing_running(tmp_path):
    runs = tmp_path / "runs"
    suite = write_suite(tmp_path / "a.toml", [1], a=SHORT, long=LONG)
    process = start_harness(suite, "--runs", runs)
    wait_until(lambda: list(runs.rglob("result.json")) and list(runs.rglob("long/*/try_1/*/checkpoint.pt")))
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: finished cells are kept" in output, output
    assert "Traceback" not in output
    wait_until(lambda: not find_processes(runs), 15)
    process = start_harness(suite, "--runs", runs, "--only", "*/a")
    assert "1 cells, 1 done before" in process.communicate(timeout=60)[0] and process.returncode == 0
    assert list(count_results(runs).values()) == [1]


def test_a_node_that_dies_half_way_costs_no_cell_and_repeats_none(tmp_path):
    """Two nodes on this machine, one killed while its cell runs: all cells are done in the end, none twice."""
    from ray.cluster_utils import Cluster

    runs, seeds = tmp_path / "runs", [1, 2, 3]
    command = "python algos/ppo.py --total-timesteps 100352 --eval-interval 99 --eval-episodes 4"
    suite = write_suite(tmp_path / "a.toml", seeds, a=command)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    try:
        process = start_harness(suite, "--runs", runs, "--address", cluster.address)
        wait_until(lambda: len(find_processes(runs)) == 2 and len(list(runs.rglob("checkpoint.pt"))) == 2)
        cluster.remove_node(node, allow_graceful=False)
        output, _ = process.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert process.returncode == 0, output
    assert "its worker was lost" in output
    assert set(count_results(runs).values()) == {1} and len(count_results(runs)) == len(seeds)
    assert len(list(runs.rglob("try_2"))) == 1 and not find_processes(runs)


# ---- Report and comparison -------------------------------------------------------------------------------------------


def make_cell(values, name="ppo/CartPole-v1/default", **changes):
    script, task, setting = name.split("/")
    runs = [make_run(seed, value) for seed, value in enumerate(values, 1)]
    cell = {"task": task, "setting": setting, "command": f"python algos/{script}.py", "curve": "c", "threshold": 475}
    cell |= {"better": "higher", "cpus": 1, "gpus": 0, "environment": None, "script": script, "hash": "0"}
    return cell | {"headline": "eval/episodic_return", "runs": runs, "missing": []} | changes


def make_run(seed, value):
    run = {"seed": seed, "metrics": {"eval/episodic_return": value}, "env_steps": 10, "wall_seconds": 2.0}
    run |= {"cpu_seconds": 1.0, "device": "cpu", "torch": "2", "commit": "abc", "value": value, "machine": None}
    run |= {"peak_memory_mb": 100.0 + seed, "steps_per_second": 1000.0, "curve": [[0, 0.0, 1.0], [10, 1.0, value]]}
    return run | {"steps_to_threshold": 10 * seed, "seconds_to_threshold": 1.0 * seed}


def make_results(*cells, ratios=(), suite="a"):
    names = [f"{c['script']}/{c['task']}/{c['setting']}" for c in cells]
    return {"suite": suite, "cells": dict(zip(names, cells, strict=True)), "ratios": list(ratios)}


def test_the_page_follows_from_the_committed_results():
    """docs/results.md is what report.py writes of benchmark/results, and so never edited by hand."""
    committed = report.read_committed()
    assert (ROOT / "docs" / "results.md").read_text() == report.render_page([committed[k] for k in sorted(committed)])
    for results in committed.values():
        assert (ROOT / "docs" / "figures" / report.figure_name(results)).read_bytes().startswith(b"\x89PNG")
    pages = report.make_ablations(committed["ablations"])
    assert pages.keys() == SCRIPTS - WITHOUT_ABLATIONS
    for script, text in pages.items():
        page = (ROOT / "docs" / f"{script}.md").read_text()
        assert common.replace_section(page, "ablations", text) == page
    cpu = committed["cpu"]["cells"]
    cells, _ = read_suite(ROOT / "benchmark" / "suites" / "cpu.toml")
    assert cpu.keys() == {cell.name for cell in cells} - {"ppo_change_detection/buildings/default"}  # has a new form
    assert all(len(cell["runs"]) >= 5 for cell in cpu.values() if not cell["missing"])


def test_statistics_over_seeds():
    values = [0.0, 10.0, 20.0, 30.0, 1000.0]
    assert records.find_iqm(values) == 20.0  # one of five cut off at each end
    low, high = records.find_interval((list(np.random.default_rng(1).normal(5.0, 1.0, 400)),), records.find_iqm)
    assert low < 5.0 < high and high - low == pytest.approx(2 * 1.96 * (1.09 / 400) ** 0.5, rel=0.25)
    assert records.find_interval(([1.0],), records.find_iqm) is None
    ratio, (low, high) = records.find_ratio([2.0, 2.1, 1.9], [4.0, 4.1, 3.9])
    assert ratio == 0.5 and 0.45 < low < 0.5 < high < 0.55
    assert records.find_ratio([1.0], [-1.0]) is None and records.find_ratio([1.0], [float("inf")]) is None
    assert records.find_ratio([1.0], [float("nan")]) is None
    assert records.find_ratio([1.0, 1.0], [2.0, float("inf"), 2.0]) == (0.5, None)
    a, b = [6.0, 5.0, 4.0, 3.0], [3.0, 2.5, 2.0, 1.5]  # twice as much in every run
    assert records.find_ratio(a, b, paired=True) == (2.0, (2.0, 2.0))
    assert records.find_ratio(a, b)[1][1] > 2.2


def test_threshold_is_the_first_point_at_it_in_the_right_direction():
    curve = [[1, 0.1, 3.0], [2, 0.2, 5.0], [3, 0.3, 2.0], [4, 0.4, 4.0], [5, 0.5, 5.0]]
    assert common.find_threshold(curve, 4) == [2, 0.2, 5.0]
    assert common.find_threshold(curve, 3, "lower")[0] == 1
    assert common.find_threshold(curve, 6) is None and common.find_threshold([], 0) is None
    assert common.find_threshold(curve, 4, in_a_row=2)[0] == 5  # one alone is forgotten
    assert common.find_threshold(curve, 4, in_a_row=3) is None


def test_the_page_says_what_the_results_say():
    peer = make_cell([100.0, 200.0], "sb3_ppo/CartPole-v1/tuned", command="python benchmark/peers/sb3_ppo.py")
    peer["runs"][1] |= {"seconds_to_threshold": None, "steps_to_threshold": None}
    lost = make_cell([], "gnugo/Go/match", command="python benchmark/peers/gnugo.py", headline=None)
    lost["missing"] = [{"seed": 1, "error": "cannot be installed"}]
    base = {"title": "return", "quantity": "headline", "better": "higher", "ours": "ppo/CartPole-v1/default"}
    ratios = [base | {"peer": "sb3_ppo/CartPole-v1/tuned"}, base | {"peer": "gnugo/Go/match"}]
    page = report.render_page([make_results(make_cell([400.0, 500.0]), peer, lost, ratios=ratios)])
    assert "| return | abc | 450 | 150 | **3.00** | 2.00 to 5.00 | higher |" in page
    assert "| return | gnugo | - | - | not run: cannot be installed | - | higher |" in page
    assert "| CartPole-v1 | default | 2 | episodic_return | 450 | **450** | 400 to 500 | 475 | 1.50 | 15 |" in page
    assert "| 475 | - (1 of 2) | - (1 of 2) | 1,000 | 102 MB |" in page
    assert "Go, match, seeds 1: **failed**: cannot be installed" in page


def test_ablations_hold_each_cell_against_the_first_of_its_task():
    first = make_cell([1.0, 2.0, 3.0], command="python algos/ppo.py --norm-obs --gamma 0.9")
    better = make_cell([11.0, 12.0, 13.0], "ppo/CartPole-v1/b", command="python algos/ppo.py --norm-obs --gamma 0.99")
    other = make_cell([2.0, 1.0, 3.0], "ppo/CartPole-v1/c", command="python algos/ppo.py --gamma 0.9 --seeds 1 2")
    alone = make_cell([], "ppo/Acrobot-v1/d", headline=None, missing=[{"seed": 1, "error": "killed"}])
    ((script, text),) = report.make_ablations(make_results(first, better, other, alone)).items()
    assert script == "ppo" and "**CartPole-v1**, episodic_return, higher is better" in text
    assert "| default | `--norm-obs --gamma 0.9` | 3 | 2.00 |  |  |  | 10 | 1 |" in text
    half = 2.776 * (1 / 3 + 1 / 3) ** 0.5  # Student's t of four degrees of freedom, deviations of 1
    assert f"| b | `--gamma 0.99` | 3 | 12.0 | **+10.0** | {10 - half:.2f} to {10 + half:.1f} | 100% | 10 | 1 |" in text
    assert "| c | `--seeds 1 2`, without `--norm-obs` | 3 | 2.00 | 0 | -2.27 to 2.27 | 50% | 10 | 1 |" in text
    assert "| d |  | 0 | killed |" in text


def test_numbers_are_shown_as_people_write_them():
    shown = {
        0.0: "0",
        8.9e-16: "0",
        -0.4961: "-0.496",
        0.0653: "0.0653",
        0.98 - 0.97: "0.0100",
        4.567: "4.57",
        123.4: "123",
        52822.0: "52,822",
    }
    assert {x: report.show(x) for x in shown} == shown
    assert report.show(None) == report.show(float("nan")) == report.show(float("inf")) == "-"


def test_a_report_loses_no_committed_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(make_results(make_cell([1.0, 2.0]))))
    monkeypatch.setattr(records, "collect", lambda folder: make_results(make_cell([1.0])))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "suite.json").write_text("")
    with pytest.raises(records.ResultsError, match="no runs to report"):  # a suite of somebody is not published
        report.main(["--runs", str(tmp_path / "runs")])
    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "benchmark" / "suites").mkdir(parents=True)
    (tmp_path / "benchmark" / "suites" / "a.toml").write_text("")
    with pytest.raises(records.ResultsError, match="lacks 1 runs"):
        report.main(["--runs", str(tmp_path / "runs")])
    assert not (tmp_path / "docs").exists()
    report.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "results.md").exists() and (tmp_path / "out" / "figures" / "results_a.png").exists()
    assert json.loads((tmp_path / "out" / "results" / "a.json").read_text()) == make_results(make_cell([1.0]))
    with pytest.raises(records.ResultsError, match="no runs to report"):
        report.main(["--runs", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")])


def make_run_folders(runs):
    """Two seeds of a script, one not done, one of another script by the same name, a game without a curve, a suite."""
    import torch

    tags = "charts/episodic_return", "charts/return_last_20", "eval/episodic_return"
    write_log(runs / "T-v0__mine__2__5", tags, num_points=6)
    write_result(runs / "T-v0__mine__2__5", headline=tags[2], metrics={"best/a": 7.0, tags[2]: 123.4}, commit="x")
    write_log(runs / "T-v0__mine__10__4", tags[:2])
    torch.save({"script": "ppo", "agent": torch.zeros(3)}, runs / "T-v0__mine__10__4" / "checkpoint.pt")
    write_log(runs / "T-v0__mine__2__5" / "wandb" / "files", tags)
    write_log(runs / "T-v0__mine__1__6", ["eval/elo"])
    write_result(runs / "T-v0__mine__1__6", script="alphazero_go")
    write_result(runs / "Go__gnugo__1__7", script="gnugo")
    (runs / "benchmark" / "a").mkdir(parents=True)
    write_result(runs / "benchmark" / "a" / "cell" / "try_1" / "run", seed=3)
    cell = {"name": "ppo/T/s", "folder": "cell", "seed": 3, "curve": None, "threshold": None, "task": "T"}
    cell |= {"setting": "s", "script": "ppo", "command": "python algos/ppo.py", "better": "higher"}
    content = {"suite": "a", "cells": [cell], "ratios": [], "errors": []}
    (runs / "benchmark" / "a" / "suite.json").write_text(json.dumps(content))


def test_any_folder_of_runs_has_its_curves_drawn(tmp_path, capsys):
    """By script, task and name, runs that are not done too, beside suites."""
    make_run_folders(tmp_path / "runs")
    report.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "## Suite `a`" in page and "| T | s | 1 | x | 2.50 |" in page
    start = page.index("### T-v0, ppo, mine")
    end = page.index("\n- ", start)
    assert page[start:end].splitlines()[4:] == [
        "| | seed 2 | seed 10, not done |",
        "|--|--:|--:|",
        "| eval/episodic_return | 123 | - |",
        "| best/a | 7.00 | - |",
        "| env_steps | 300 | - |",
        "| cpu_seconds | 7.00 | - |",
        "| wall_seconds | 8.00 | - |",
    ]
    assert "### T-v0, alphazero_go, mine" in page and "### Go, gnugo\n\nNo learning curve yet." in page
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert figures == {"ppo__T-v0__mine.png", "alphazero_go__T-v0__mine.png"}
    assert all(f"figures/{name})" in page for name in figures)


def test_the_first_panel_is_of_training_and_the_second_of_evaluation(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    make_run_folders(tmp_path)
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: seen.append(self))
    groups = run_folders.collect(tmp_path)
    run_folders.draw(groups["ppo__T-v0__mine"], tmp_path / "x.png")
    left, right = seen[0].axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("environment steps", "return, last 20 episodes")
    assert [len(line.get_xdata()) for line in left.lines] == [6, 3]
    assert right.get_ylabel() == "return of the greedy policy" and right.lines[0].get_ydata()[-1] == 60.0
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["seed 2", "seed 10, not done"]
    run_folders.draw(groups["alphazero_go__T-v0__mine"], tmp_path / "x.png")
    (axes,) = seen[1].axes
    assert axes.get_xlabel() == "moves of self-play" and axes.get_ylabel().startswith("Elo")
    assert run_folders.find_curves(groups["gnugo__Go__gnugo"]) == []
    assert run_folders.collect(tmp_path / "T-v0__mine__2__5").keys() == {"ppo__T-v0__mine"}  # one run alone


def run_compare(tmp_path, base, new):
    for name, cells in (("base", base), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(make_results(*cells)))
    return compare.main([str(tmp_path / "base.json"), str(tmp_path / "new.json")])


def test_comparison_fails_where_a_headline_metric_got_worse_beyond_noise(tmp_path, capsys):
    base = [480.0, 490.0, 500.0, 470.0, 500.0]
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([485.0, 470.0, 500.0, 495.0, 480.0])]) == 0
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([300.0, 310.0, 320.0, 290.0, 305.0])]) == 1
    assert "**worse**" in capsys.readouterr().out
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([x + 300 for x in base])]) == 0
    assert (
        run_compare(tmp_path, [make_cell(base, better="lower")], [make_cell([x + 300 for x in base], better="lower")])
        == 1
    )
    assert run_compare(tmp_path, [make_cell([500.0] * 3)], [make_cell([499.0] * 3)]) == 1  # no noise at all
    assert run_compare(tmp_path, [make_cell([500.0] * 3)], [make_cell([500.0] * 3)]) == 0
    assert run_compare(tmp_path, [make_cell([500.0])], [make_cell([1.0])]) == 0
    assert "cannot be told from one seed" in capsys.readouterr().out
    assert run_compare(tmp_path, [make_cell([0.3] * 3)], [make_cell([0.1 + 0.2] * 3)]) == 0  # rounding is no noise
    assert run_compare(tmp_path, [make_cell([0.1 + 0.2] * 3)], [make_cell([0.3] * 3)]) == 0
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([float("nan")] * 5)]) == 1
    assert run_compare(tmp_path, [make_cell([float("nan")] * 5)], [make_cell(base)]) == 0
    failing = make_cell(base[:4], missing=[{"seed": 5, "error": "exit code 1"}])
    assert run_compare(tmp_path, [make_cell(base)], [failing]) == 1
    assert run_compare(tmp_path, [failing | {"runs": []}], [failing | {"runs": []}]) == 1  # whatever BASE did
    unfinished = make_cell(base[:4], missing=[{"seed": 5, "error": records.NOT_RUN}])
    assert run_compare(tmp_path, [make_cell(base)], [unfinished]) == 0
    with pytest.raises(records.ResultsError, match="no results of the same cell"):
        run_compare(tmp_path, [make_cell(base)], [make_cell(base, "ppo/CartPole-v1/other")])


def test_stored_results_are_read(capsys):
    """Those of older scripts, which said their commit themselves, as those of today."""
    for name in ("cpu", "ablations"):
        assert compare.main([str(common.RESULTS / f"{name}.json")] * 2) == 0
        assert "commit unknown" not in report.render(common.load_results(name))


def test_difference_interval_and_probability_of_improvement():
    found = compare.compare_cell([1.0, 2.0, 3.0], [2.0, 3.0, 10.0], "higher")
    assert found["difference"] == 3.0
    pairs = [(b, n) for b in (1.0, 2.0, 3.0) for n in (2.0, 3.0, 10.0)]
    assert found["improvement"] == np.mean([(n > b) + 0.5 * (n == b) for b, n in pairs])
    a, b = np.random.default_rng(2).normal(0, 1, (2, 50))
    low, high = compare.compare_cell(list(a), list(b), "higher")["interval"]
    error = (a.var(ddof=1) / 50 + b.var(ddof=1) / 50) ** 0.5
    assert (high - low) / 2 == pytest.approx(1.984 * error, rel=0.01)


@pytest.mark.filterwarnings("error")
def test_one_side_may_have_no_noise():
    found = compare.compare_cell([500.0] * 3, [499.0, 498.0, 500.0], "higher")
    assert found["interval"] == pytest.approx((-1 - 4.303 / 3**0.5, -1 + 4.303 / 3**0.5), rel=1e-3)
    assert compare.compare_cell([1.0, 1.0000001], [1.0000001, 1.0000002], "lower")["p"] == 1.0  # rounding is no noise


def test_equal_programs_are_seldom_called_worse(tmp_path):
    """Twenty cells of five seeds from one distribution: fewer than one comparison in ten cries wolf."""
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(100):
        sides = [
            make_results(*[make_cell(list(rng.normal(100, 10, 5)), f"ppo/T{i}/s") for i in range(20)]) for _ in range(2)
        ]
        wrong += any(row["worse"] for row in compare.compare(*sides)[0])
    assert wrong < 10


def test_results_that_are_none_are_one_line(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "suite.json").write_text('{"suite": "a", "cells": [{}], "ratios": [], "errors": []}')
    for name in ("", "missing.json", "bad.json", "other.json", "runs"):
        path = tmp_path / name
        command = [sys.executable, str(ROOT / "benchmark" / "compare.py"), str(path), str(path)]
        found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert found.returncode == 2 and found.stderr.startswith("compare.py: ") and found.stderr.count("\n") == 1
