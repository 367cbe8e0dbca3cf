"""The benchmark harness: suites, runs on Ray, report and comparison."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import scipy.stats
from conftest import ENVIRONMENT, ROOT
from tqdm import tqdm

sys.path.append(str(ROOT / "benchmark"))
import common
import compare
import records
import report
import run
import suite as suites
from suite import SuiteError, read_suite

SHORT = "python algos/ppo.py --num-envs 8 --total-timesteps 2560 --eval-episodes 4"
LONG = "python algos/ppo.py --total-timesteps 50000000 --eval-episodes 4"
SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))
SCRIPTS = {p.stem for p in (ROOT / "algos").glob("*.py")}
WITHOUT_ABLATIONS = {"ppo_change_detection"}  # what is compared there are rivals, by a benchmark of its own


def write_suite(path, seeds, **commands):
    """A suite of a cell for each setting=command, on CartPole-v1."""
    cells = [
        f'[[cells]]\ntask = "CartPole-v1"\nsetting = "{s}"\ncommand = "{c}"\n' for s, c in commands.items()
    ]
    start = f'seeds = {seeds}\nheadline = {{ ppo = "eval/episodic_return" }}\n'
    path.write_text(start + "".join(cells))
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


def list_done(runs):
    """Run folders of processes that have ended with exit code 0."""
    paths = [path for path in runs.rglob("process.json") if json.loads(path.read_text())["exit_code"] == 0]
    return [folder for path in paths for folder in common.find_run_folders(path.parent)]


def count_results(runs):
    """Number of results of each cell."""
    return Counter(str(path.parents[1].relative_to(runs)) for path in list_done(runs))


# ---- Suites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_parse_against_the_scripts(path):
    cells, _ = read_suite(path)
    if path.stem in ("smoke", "cpu", "gpu", "ablations"):
        assert {cell.script for cell in cells} >= SCRIPTS - (
            WITHOUT_ABLATIONS if path.stem == "ablations" else set()
        )
    assert {cell.curve for cell in cells} - {None} <= records.CURVES.keys()  # which pictures name in words
    if path.stem == "cpu":
        assert all(n >= 5 for n in Counter(cell.name for cell in cells).values())


def test_seeds_take_turns_so_that_what_is_compared_runs_side_by_side(tmp_path):
    cells, _ = read_suite(write_suite(tmp_path / "a.toml", [1, 2], a=SHORT, b=f"{SHORT} --gamma 0.9"))
    assert [(cell.setting, cell.seed) for cell in cells] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


CELL = '[[cells]]\ntask = "T"\nsetting = "s"\ncommand = "python algos/ppo.py"\nheadline = "eval/x"\n'
PEER = (
    CELL.replace('"s"', '"p"').replace("algos/ppo", "benchmark/peers/elkai_lkh") + 'environment = "elkai"\n'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [1", "not TOML"),
        ("seeds = [1]\n", "no cells"),
        ("seeds = [1]\ncells = []\n", "no cells"),
        ("seeds = [1]\ncells = [1, 2]\n", r"cells = \[1, 2\]: they are tables, \[\[cells\]\]"),
        ("seeds = [1]\nratios = [3]\n" + CELL, r"ratios = \[3\]: they are tables"),
        ("seeds = [1]\n" + CELL.replace("algos/ppo", "benchmark/peers/peer"), "peer.py cannot be used: "),
        (
            "seeds = [1]\n" + CELL.replace("algos/ppo", "benchmark/peers/go_engine"),
            "go_engine.py cannot be used: ",
        ),
        ("seeds = [1]\n" + CELL + "gpus = nan\n", "gpus a fraction"),
        (CELL, "cell 1: seeds = None: write seeds = "),
        ("seeds = [1, 1]\n" + CELL, "duplicate cells ppo/T/s and ppo/T/s, seed 1"),
        ("seeds = [1]\n" + CELL + CELL, "duplicate cells ppo/T/s"),
        ("seeds = [1]\n" + CELL + CELL.replace('"s"', '"t"'), "duplicate cells ppo/T/s and ppo/T/t"),
        ("seeds = [1]\n" + CELL.replace("algos/ppo", "algos/dqn"), "unknown script algos/dqn.py"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --no-such-flag 1"), "no-such-flag"),
        ("seeds = [1]\n" + CELL.replace("ppo.py", "ppo.py --gamma high"), "--gamma"),
        (
            "seeds = [1]\n" + CELL.replace("headline", "# "),
            "no headline, the tag that algos/ppo.py is judged by",
        ),
        ("seeds = [1]\n" + PEER.replace("headline", "# "), "no headline, the tag that .*/elkai_lkh.py is"),
        ("seeds = [1]\nheadline = { ppo = 3 }\n" + CELL.replace("headline", "# "), "headline = 3 has to be"),
        ("seeds = [1]\nheadline = 'x'\n" + CELL, "headline = 'x' has to be dict"),
        ("seeds = [1]\n" + CELL + "score_best = 'x'\n", "score_best = 'x' has to be bool"),
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
        ("seeds = [1]\nratios = 3\n" + CELL, "ratios = 3 has to be list"),
        ("seeds = [1]\n" + CELL.replace("[[cells]]", "[cells]"), "cells = .* has to be list"),
        (
            "seeds = [1]\n" + CELL + CELL.replace("ppo.py", " ppo.py ").replace(" ppo", "ppo"),
            "duplicate cells",
        ),
        ("seeds = [1]\n" + CELL + "curv = 'x'\n", "unknown key curv"),
        ("seeds = [1]\n" + CELL + "cpus = 'two'\n", "cpus = 'two' has to be int"),
        ("seeds = [1]\n" + CELL + "cpus = 0\n", "cpus and in_a_row are 1 or more"),
        ("seeds = [1]\n" + CELL + "in_a_row = 0\n", "cpus and in_a_row are 1 or more"),
        ("seeds = [1]\n" + CELL + "better = 'more'\n", "neither"),
        ("seeds = [1]\n" + CELL + "environment = 'nobody'\n", "no benchmark/peers/requirements-nobody.txt"),
        ("seed = [1]\n" + CELL, "unknown key seed "),
        ("seeds = [1]\n" + CELL.replace('setting = "s"\n', ""), "no setting"),
        (
            "seeds = [1]\n"
            + CELL
            + '[[ratios]]\ntitle = "t"\nquantity = "q"\nbetter = "lower"\nours = "ppo/T/s"\n'
            'peer = "sb3/T/s"\n',
            "peer = sb3/T/s is no cell",
        ),
        ("seeds = [1]\n" + CELL + "[[tables]]\npage = 'ppo'\n", "table 1: no section"),
        (
            "seeds = [1]\n" + CELL + "[[tables]]\npage = 'p'\nsection = 's'\ncolumns = 3\n",
            "columns = 3 has to be dict",
        ),
        ("seeds = [1]\nsummary = 'a {ppo/T/t x .2f}'\n" + CELL, "summary: ppo/T/t is no cell"),
        ("seeds = [1]\nsummary = 3\n" + CELL, "summary = 3 has to be str"),
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
    with pytest.raises(SuiteError, match="no such cell"):
        run.main([str(suite), "--only", "r2d2*"])
    for runs in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(SuiteError, match=r"--runs: .* cannot be made"):
            run.SuiteRun(suite, runs).lock()
    for flags, message in (
        ([tmp_path / "missing.toml"], "cannot be read"),
        ([suite, "--runs", tmp_path / "runs", "--address", "127.0.0.1:1"], "no Ray cluster"),
    ):
        process = start_harness(*flags)
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("run.py: ")]
        assert process.returncode == 2 and len(lines) == 1 and message in lines[0], output
        assert "Traceback" not in output and not (tmp_path / "runs").exists()


def test_a_cell_that_no_machine_has_room_for_is_refused(monkeypatch):
    small = {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}}
    dead = {"Alive": False, "Resources": {"CPU": 64.0}}
    monkeypatch.setattr("ray.nodes", lambda: [dead, small])
    run.check_resources([suites.Cell("T", "s", "python algos/ppo.py", 1, cpus=4, gpus=1)])
    for cpus, gpus in ((5, 0), (1, 2)):
        with pytest.raises(SuiteError, match=f"needs {cpus} CPUs and {gpus} GPUs on one machine"):
            run.check_resources([suites.Cell("T", "s", "python algos/ppo.py", 1, cpus=cpus, gpus=gpus)])


def test_an_address_that_never_answers_is_one_line_in_seconds(tmp_path):
    """Something listens there and says nothing, and Ray itself would wait and warn for minutes."""
    suite = write_suite(tmp_path / "a.toml", [1], a=SHORT)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        process = start_harness(suite, "--runs", tmp_path / "runs", "--address", address)
        lines = process.communicate(timeout=100)[0].splitlines()
    lines = [line for line in lines if not line.startswith("note: changes that no commit holds")]
    assert process.returncode == 2 and lines[0] == "a: 1 cells, 0 done before", lines
    assert lines[1:] == [f"run.py: --address {address}: no Ray cluster answers there"]
    assert not (tmp_path / "runs").exists()
    assert run.SECONDS_TO_CONNECT <= 5  # with a connection that hangs before, ten in all


def test_machines_without_the_shared_folders_are_told(tmp_path):
    import ray

    ray.init(
        "local", num_cpus=1, log_to_driver=False, include_dashboard=False, object_store_memory=100 * 2**20
    )
    try:
        run.check_folders([ROOT, tmp_path])
        with pytest.raises(
            SuiteError, match=f" does not see {tmp_path}/none: they have to be on a file system that"
        ):
            run.check_folders([ROOT, tmp_path / "none"])
    finally:
        ray.shutdown()


# ---- Cells -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(tmp_path):
    """A cell and its folder."""
    (cell,), _ = read_suite(write_suite(tmp_path / "a.toml", [1], a=SHORT))
    (tmp_path / "cell").mkdir()
    return cell, tmp_path / "cell"


def run_python(cell, code, attempt=1):
    cell, folder = cell
    return run.run_cell(
        cell, cell.hash(), folder / f"try_{attempt}", [sys.executable, "-c", code, str(folder)]
    )


def test_a_cell_that_never_writes_a_result_is_an_error(cell):
    assert run_python(cell, "print('hello')") == "ended without a run folder"
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


def write_run(folder, tags, num_points=3, program="", **args):
    """What a run of the script that the name of `folder` has leaves when it has ended."""
    write_log(folder, tags, num_points)
    write_text(folder, program, **args)


def test_a_cell_that_has_not_logged_its_curve_has_failed(cell, tmp_path):
    """One line names the tag and those there are; with one of them in the suite, the same run counts."""
    import dataclasses

    write_log(tmp_path / "run", ["charts/other", "eval/episodic_return"])
    code = f"import shutil, sys; shutil.copytree({str(tmp_path / 'run')!r}, sys.argv[1] + '/try_1/run')"
    absent = dataclasses.replace(cell[0], curve="charts/nothing")
    error = run_python((absent, cell[1]), code)
    assert error.startswith("no curve charts/nothing in ") and error.startswith(run.NO_RETRY)
    assert (
        error.endswith("(there are: charts/other, eval/episodic_return, charts/cpu_seconds)")
        and "\n" not in error
    )
    result = cell[1] / "try_1" / "run"
    other = dataclasses.replace(cell[0], curve="charts/other")
    assert records.find_run(cell[1], dataclasses.asdict(absent)) is None
    assert records.find_run(cell[1], dataclasses.asdict(other))["curve"][-1] == [300, 6.0, 30.0]
    assert run.find_flaw(other, cell[1] / "try_1") is None
    with pytest.raises(
        records.ResultsError, match=r"no curve charts/nothing in .* \(there are: charts/other, "
    ):
        records.read_run(
            {"curve": "charts/nothing", "threshold": None, "headline": "eval/episodic_return"}, result
        )
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no curve charts/episodic_return in .* \(there are: none\)"):
        common.read_points(tmp_path / "empty", "charts/episodic_return")


def write_text(folder, program="", **args):
    """The flags of a run and the version of its program, as scripts and peers log them."""
    from torch.utils.tensorboard import SummaryWriter

    rows = "".join(f"|{name}|{value}|\n" for name, value in args.items())
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        if program:
            writer.add_text("program", program)


def copy_run(folder, end=""):
    """Code of a cell whose process leaves a copy of `folder` as its run folder, and then does `end`."""
    return f"import shutil, sys; shutil.copytree({str(folder)!r}, sys.argv[1] + '/try_1/run'); {end}"


def test_a_run_is_read_from_its_events(cell, tmp_path):
    """Its metrics are the last values of evaluations; it is done when its process has ended well."""
    import dataclasses

    tags = "charts/episodic_return", "eval/episodic_return", "best/length", "losses/x"
    write_log(tmp_path / "run", tags, num_points=20)
    write_text(tmp_path / "run", seed=1)
    ours = dataclasses.asdict(dataclasses.replace(cell[0], curve="eval/episodic_return", threshold=150))
    code = copy_run(tmp_path / "run", "sum(range(30_000_000))")
    assert run_python(cell, code) is None
    found = records.find_run(cell[1], ours)
    assert found["headline"] == "eval/episodic_return" and found["value"] == 200.0 and found["seed"] == 1
    assert found["metrics"] == {"eval/episodic_return": 200.0, "best/length": 200.0}
    assert found["env_steps"] == 2000 and found["device"] == "cpu" and found["wall_seconds"] >= 0
    assert found["steps_to_threshold"] == 1500 and found["seconds_to_threshold"] == pytest.approx(30)
    assert (
        found["steps_per_second"] == pytest.approx(50) and found["final_return"] == 195.0
    )  # steps 1900 and 2000
    process = records.read_process(cell[1] / "try_1" / "run")
    assert process["exit_code"] == 0 and found["cpu_seconds"] == process["cpu_seconds"] > 0.2
    assert found["torch"] == found["machine"]["torch"] and found["commit"] == found["machine"]["commit"]
    on_gpu = records.read_run(ours | {"gpus": 0.5}, cell[1] / "try_1" / "run")
    assert on_gpu["device"] == "gpu" and on_gpu["seconds_to_threshold"] <= on_gpu["wall_seconds"] < 30


@pytest.mark.parametrize(
    ("tag", "end", "error"),
    [
        ("eval/episodic_return", "sys.exit('why')", "exit code 1: why"),
        (
            "eval/other",
            "",
            "no headline eval/episodic_return in .*/run .there are: eval/other, charts/cpu_seconds.$",
        ),
    ],
)
def test_a_run_that_ended_badly_or_without_its_headline_has_failed(cell, tmp_path, tag, end, error):
    """And so has one whose end nobody has seen."""
    import dataclasses
    import re

    write_log(tmp_path / "run", [tag])
    found = run_python(cell, copy_run(tmp_path / "run", end))
    assert re.match(error, found) and "\n" not in found
    assert found.startswith(run.NO_RETRY) == (not end)  # a crash may have been bad luck
    ours = dataclasses.asdict(cell[0])
    assert records.find_run(cell[1], ours) is None
    if not end:
        assert records.find_run(cell[1], ours | {"headline": tag})["value"] == 30.0
    (cell[1] / "try_1" / "process.json").unlink()
    assert records.find_run(cell[1], ours | {"headline": tag}) is None


SCORES = "{'eval/episodic_return': 500.0, 'eval/episodic_length': 7}"


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (f"print('hello'); print({SCORES!r})", None),
        ("sys.exit('broken')", "--evaluate best.pt: exit code 1: broken"),
        ("print('no numbers')", "--evaluate best.pt: ended without scores: no numbers"),
    ],
)
def test_best_is_scored_after_the_run_where_the_cell_asks_for_it(tmp_path, monkeypatch, end, error):
    """By the script itself; its seconds are not those of the run."""
    import dataclasses

    write_log(tmp_path / "left", ["eval/x"])
    (tmp_path / "left" / "best.pt").write_text("")
    (tmp_path / "algos").mkdir()
    train = "shutil.copytree('left', sys.argv[sys.argv.index('--run-dir') + 1] + '/run')"
    code = (
        f"import shutil, sys, time\nprint(sys.argv)\nif '--evaluate' not in sys.argv:\n    {train}\nelse:\n"
    )
    (tmp_path / "algos" / "x.py").write_text(f"{code}    sum(range(60_000_000)); {end}\n")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    cell = suites.Cell("T", "s", "python algos/x.py --gamma 0.9", 4, headline="eval/x", score_best=True)
    path = tmp_path / "cell" / "try_1"
    path.parent.mkdir()
    assert run.run_cell(cell, cell.hash(), path, run.make_command(cell, {}, path)) == error
    flags = [
        "algos/x.py",
        "--evaluate",
        str(path / "run" / "best.pt"),
        "--eval-episodes",
        "100",
        "--seed",
        "4",
    ]
    assert (path / "best.txt").read_text().startswith(f"{flags}\n")
    found = records.find_run(path.parent, dataclasses.asdict(cell))
    if error:
        assert found is None and error.startswith(run.NO_RETRY)
        return
    assert found["metrics"] == {"eval/x": 30.0, "best/episodic_return": 500.0, "best/episodic_length": 7}
    start = time.process_time()
    sum(range(30_000_000))  # half as long
    assert found["cpu_seconds"] < time.process_time() - start


def test_ours_and_peers_stand_side_by_side_in_a_suite(tmp_path):
    """A peer's version is in its events."""
    cells = []
    for name in ("ours", "peer"):
        path = tmp_path / name / "try_1"
        write_run(
            path / "run", ["eval/x", "charts/episodic_return"], 3, "elkai 2.0.1" * (name == "peer"), seed=1
        )
        (path / "process.json").write_text(
            json.dumps({"exit_code": 0, "machine": {"commit": "abc", "torch": "2"}})
        )
        cell = {
            "name": f"ppo/T/{name}",
            "folder": name,
            "seed": 1,
            "curve": None,
            "threshold": None,
            "task": "T",
        }
        cell |= {"setting": name, "script": "ppo", "command": "c", "better": "higher", "headline": "eval/x"}
        cells.append(cell)
    content = {"suite": "a", "cells": cells, "errors": []}
    (tmp_path / "suite.json").write_text(json.dumps(content))
    found = records.collect(tmp_path)["cells"].values()
    assert not any(cell["missing"] for cell in found)
    assert [cell["headline"] for cell in found] == ["eval/x"] * 2
    assert [cell["runs"][0]["value"] for cell in found] == [30.0] * 2
    assert [cell["runs"][0]["commit"] for cell in found] == ["abc", "elkai 2.0.1"]
    assert [cell["runs"][0]["final_return"] for cell in found] == [30.0] * 2
    assert [cell["runs"][0]["cpu_seconds"] for cell in found] == [6.0] * 2


def test_a_suite_names_headlines_by_script(tmp_path):
    path = tmp_path / "a.toml"
    plain = (
        CELL.replace('headline = "eval/x"\n', "")
        .replace('"s"', '"t"')
        .replace("ppo.py", "ppo.py --gamma 0.9")
    )
    path.write_text(f"seeds = [1]\nheadline = {{ ppo = 'eval/y' }}\n{CELL}{plain}")
    assert [cell.headline for cell in read_suite(path)[0]] == ["eval/x", "eval/y"]


def test_exit_codes_and_signals_are_told(cell, monkeypatch):
    """The reason is the last line written, whatever the environment says of buffers."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import sys; print('|##| 1/1\\r|###| 2/2'); sys.exit('why it ended')"
    assert run_python(cell, code) == "exit code 1: why it ended"
    assert run.read_end(cell[1] / "try_1" / "log.txt") == ["|###| 2/2", "why it ended"]
    assert run_python(cell, "import os; os.kill(os.getpid(), 9)", 2) == "killed by Killed"


def test_a_cell_that_hangs_is_killed_with_its_children(cell):
    import dataclasses

    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '4711']); time.sleep(4711)"
    found = run_python((dataclasses.replace(cell[0], hours=2 / 3600), cell[1]), code)
    assert found.startswith("not done after")
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4711"]]


def test_a_cell_sees_the_gpus_that_it_was_given_and_no_others(cell, monkeypatch):
    import dataclasses

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray does in its worker
    code = "import os; print('GPUs:', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
    run_python(cell, code, 1)
    run_python((dataclasses.replace(cell[0], gpus=0.5), cell[1]), code, 2)
    assert [(cell[1] / f"try_{i}" / "log.txt").read_text() for i in (1, 2)] == ["GPUs:  1\n", "GPUs: 3 1\n"]


@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
def test_what_a_cell_leaves_running_ends_with_it(cell, end):
    """However it ends, and in whatever session it has started others."""
    start = "import subprocess; [subprocess.Popen(['sleep', '4713'], start_new_session=new) for new in (False, True)]"
    assert run_python(cell, f"{start}; {end}")
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4713"]]


def test_commands_get_seed_and_folder_and_nothing_else(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        f"seeds = [7]\n{CELL}{PEER}"
        + CELL.replace('"s"', '"t"').replace("python", "torchrun --standalone --nproc-per-node 2")
    )
    a, c, b = (run.make_command(x, {"elkai": "/peer/python"}, tmp_path) for x in read_suite(path)[0])
    rest = ["--seed", "7", "--run-dir", str(tmp_path)]
    assert a == [sys.executable, "algos/ppo.py", *rest]
    assert b[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert b[6:] == ["algos/ppo.py", *rest]
    assert c == ["/peer/python", "benchmark/peers/elkai_lkh.py", *rest]


def test_a_peer_that_cannot_be_installed_is_told_with_the_reason(tmp_path, monkeypatch):
    def fail(peer):
        raise subprocess.CalledProcessError(1, "pip", stderr="WARNING: x\nERROR: No matching distribution\n")

    monkeypatch.setattr(common, "make_peer_environment", fail)
    path = tmp_path / "a.toml"
    path.write_text(f"seeds = [1]\n{CELL}{PEER}")
    suite = run.SuiteRun(path, tmp_path / "runs")
    with suite.lock():
        assert suite.prepare_peers(suite.cells) == {}
        suite.save()
        with pytest.raises(SuiteError, match=r"another run\.py is at work"):
            run.SuiteRun(path, tmp_path / "runs").lock()
    run.SuiteRun(path, tmp_path / "runs").lock().close()
    ours, peer = records.collect(suite.root)["cells"].values()
    assert ours["missing"] == [{"seed": 1, "error": records.NOT_RUN}]
    error = "peer elkai cannot be installed: ERROR: No matching distribution"
    assert peer["missing"] == [{"seed": 1, "error": error}]


def test_a_run_is_read_from_its_folder(tmp_path):
    """Steps, CPU-seconds and clock of each point, the threshold, and speed up to the last point."""
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "try_1" / "run"
    with SummaryWriter(str(folder)) as writer:
        for step, value in ((100, 1.0), (200, 3.0), (400, 2.0)):
            writer.add_scalar("charts/cpu_seconds", step / 50, step)
            writer.add_scalar("curve", value, step)
        writer.add_scalar("m", 2.5, 400)
    process = {"exit_code": 0, "machine": {"cpu": "x", "commit": "abc-dirty"}}
    (tmp_path / "try_1" / "process.json").write_text(json.dumps(process))
    cell = {"curve": "curve", "threshold": 2.5, "better": "higher", "headline": "m"}
    found = records.read_run(cell, folder)
    assert found["curve"] == [[100, 2.0, 1.0], [200, 4.0, 3.0], [400, 8.0, 2.0]] and found["value"] == 2.5
    assert (found["steps_to_threshold"], found["seconds_to_threshold"], found["steps_per_second"]) == (
        200,
        4.0,
        50.0,
    )
    assert found["machine"] == process["machine"]
    assert found["commit"] == "abc-dirty"  # the harness knows that of our scripts, peers say their version
    (tmp_path / "try_1" / "process.json").write_text('{"exit_code": 0}')
    assert records.read_run(cell, folder)["commit"] == "unknown"
    assert records.read_run(cell | {"in_a_row": 2}, folder)["steps_to_threshold"] is None
    without = cell | {"curve": None, "threshold": None}
    assert records.read_run(without, folder)["steps_per_second"] == 50.0


def test_seconds_on_a_gpu_are_those_of_training_where_a_run_logs_them(tmp_path):
    write_log(tmp_path / "run", ["curve"], wall_seconds=0.5)
    (tmp_path / "process.json").write_text('{"exit_code": 0}')
    cell = {"curve": "curve", "threshold": 20, "better": "higher", "headline": "curve", "gpus": 1}
    found = records.read_run(cell, tmp_path / "run")
    assert (found["steps_to_threshold"], found["seconds_to_threshold"]) == (200, 100.0)
    assert found["steps_per_second"] == 2.0 and found["curve"][-1] == [300, 150.0, 30.0]
    assert common.read_points(tmp_path / "run", "curve")[0] == pytest.approx([100, 2.0, 50.0, 10.0])


def test_another_version_of_the_script_on_a_machine_is_told(cell):
    assert run.run_cell(cell[0], "0" * 12, cell[1] / "try_1", ["true"]).startswith("another version")
    assert not list(cell[1].iterdir())


def run_python_without_a_guard(cell, code):
    """The worker hangs when it has started the cell, and is about to start what guards it."""
    start = subprocess.Popen

    def start_first(command, **options):
        return time.sleep(4711) if run.WATCHDOG in command else start(command, **options)

    subprocess.Popen = start_first
    run_python(cell, code)


@pytest.mark.parametrize("run_worker", [run_python, run_python_without_a_guard])
def test_a_cell_dies_with_its_worker(cell, tmp_path, run_worker):
    """However the worker ends, and whenever: here by SIGKILL."""
    import multiprocessing

    code = f"import time; {str(tmp_path)!r}; time.sleep(4712)"
    worker = multiprocessing.get_context("spawn").Process(target=run_worker, args=(cell, code))
    worker.start()

    def find():
        return [
            process for process in psutil.process_iter(["cmdline"]) if code in (process.info["cmdline"] or [])
        ]

    wait_until(find)
    worker.kill()
    worker.join(60)
    wait_until(lambda: not find())
    assert not worker.is_alive()
    assert not list(cell[1].rglob("process.json"))  # it was cut off, and had no end of its own


def test_a_cell_that_is_killed_before_it_starts_is_one_that_was_killed(cell, monkeypatch):
    start = subprocess.Popen
    started = []

    def kill_first(command, **options):
        if run.WATCHDOG in command:
            started[-1].kill()
            os.waitid(os.P_PID, started[-1].pid, os.WEXITED | os.WNOWAIT)  # until it is dead
        started.append(start(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", kill_first)
    assert run_python(cell, "print('hello')") == "killed by Killed"
    assert run.read_end(cell[1] / "try_1" / "log.txt") == []


def test_the_hash_is_of_the_command_and_of_all_files_it_uses(tmp_path, monkeypatch):
    """Of what the script imports in turn, not of its neighbours; of files that it names, of packages.

    And of the module of an environment that a flag names.
    """
    files = {
        "algos/ppo.py": "from envs_shared.tasks import a\nimport numpy\n",
        "envs_shared/__init__.py": "",
        "envs_shared/tasks/a.py": "import envs_shared.tasks.b as b\n",
        "envs_shared/tasks/b.py": "b = 1\n",
        "envs_shared/tasks/c.py": "c = 1\n",
        "envs_shared/own.py": "c = 1\n",
        "benchmark/peers/match.py": "import shared\nENGINE = 'algos/ppo.py'\nDATA = 'benchmark/data/r.txt'\n",
        "benchmark/data/r.txt": "3.85\n",
        "benchmark/data/s.txt": "3.85\n",
        "benchmark/peers/shared.py": "'of algos/none.py and others'\n",
        "benchmark/peers/requirements-x.txt": "x==1\n",
        "net.pt": "weights",
        "algos/net.pt": "weights",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "PEERS", tmp_path / "benchmark" / "peers")
    ours = suites.Cell("T", "s", "python algos/ppo.py --gamma 0.9", 1)
    match = suites.Cell("T", "s", "python benchmark/peers/match.py --net algos/net.pt", 1, environment="x")
    before = ours.hash(), match.hash()
    assert before == (ours.hash(), match.hash())
    assert suites.Cell("T", "t", ours.command, 2).hash() == before[0]
    assert suites.Cell("T", "s", "python algos/ppo.py --gamma 0.8", 1).hash() != before[0]
    changed = {}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}#")
        changed[name] = tuple(a != b for a, b in zip(before, (ours.hash(), match.hash()), strict=True))
        (tmp_path / name).write_text(text)
    named = suites.Cell("T", "s", "python algos/ppo.py --env-id envs_shared.own:T-v0", 1)
    before = named.hash()
    (tmp_path / "envs_shared" / "own.py").write_text("c = 2\n")
    assert named.hash() != before
    both = {"algos/ppo.py", "envs_shared/tasks/a.py", "envs_shared/tasks/b.py"}
    peers = {"benchmark/peers/match.py", "benchmark/peers/shared.py", "benchmark/peers/requirements-x.txt"}
    peers.add("benchmark/data/r.txt")
    assert {name for name, found in changed.items() if found == (True, True)} == both
    assert {name for name, found in changed.items() if found == (False, True)} == peers | {"algos/net.pt"}


def test_what_a_script_uses_is_what_it_imports():
    """Those of the real ones, against a list by hand."""
    script = ROOT / "algos" / "ppo_change_detection.py"
    found = {str(path.relative_to(ROOT)) for path in suites.find_used_files(script)}
    assert found - {"envs_shared/change_folders.py"} == {
        "algos/ppo_change_detection.py",
        "envs_shared/__init__.py",
        "envs_shared/change_pairs.py",
    }
    alone = ROOT / "algos" / "r2d2_lstm.py"
    assert suites.find_used_files(alone) == {alone}
    found = {
        str(p.relative_to(ROOT))
        for p in suites.find_used_files(ROOT / "benchmark" / "peers" / "gnugo_match.py")
    }
    assert found > {"benchmark/peers/go_engine.py", "benchmark/peers/peer.py", "algos/alphazero_go.py"}
    assert {"benchmark/checkpoints/go5x5.pt", "envs_shared/go.py", "envs_shared/go_gtp.py"} < found
    found = suites.find_used_files(ROOT / "benchmark" / "peers" / "elkai_lkh.py")
    assert ROOT / "benchmark" / "data" / "tsp" / "tsp20_uniform_500.txt" in found
    attention = ROOT / "algos" / "reinforce_tsp_attention.py"
    assert suites.find_used_files(attention) >= {attention, ROOT / "envs_shared" / "tsplib.py"}


# ---- Runs on Ray -----------------------------------------------------------------------------------------------------


def test_a_failing_cell_and_a_killed_one_take_no_other_down(tmp_path):
    """One cell always fails, one is killed once, one lacks its curve, one is well; then only the first is left."""
    runs = tmp_path / "runs"
    suite = write_suite(
        tmp_path / "a.toml", [1], good=SHORT, bad=f"{SHORT} --env-id Nothing-v0",
        killed="python algos/ppo.py --num-envs 8 --total-timesteps 5120 --eval-episodes 4",
        other=f"{SHORT} --gamma 0.9",
    )  # fmt: skip
    text = suite.read_text()
    suite.write_text(text + 'curve = "charts/nothing"\n')  # of the last cell
    process = start_harness(suite, "--runs", runs)
    (victim,) = wait_until(lambda: [p for p in find_processes(runs) if "5120" in p.info["cmdline"]])
    victim.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "again: ppo/CartPole-v1/killed, seed 1: killed by Killed" in output
    assert "failed: ppo/CartPole-v1/bad, seed 1: exit code 2: ppo.py: error: --env-id Nothing-v0" in output
    assert (
        "failed: ppo/CartPole-v1/other, seed 1: no curve charts/nothing in " in output and "again: " in output
    )
    assert "again: ppo/CartPole-v1/other" not in output and "2 of 4 cells done" in output
    report.main(["--runs", str(runs), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert (
        "other, seeds 1: **failed**: no curve charts/nothing in " in page and "| CartPole-v1, good |" in page
    )
    counts = count_results(runs)
    assert len(counts) == 3 and set(counts.values()) == {1}
    assert [path for path in list_done(runs) if path.parent.name == "try_2" and "killed" in str(path)]
    for path in list_done(runs):
        process = json.loads((path.parent / "process.json").read_text())
        assert process["machine"]["commit"] == common.describe_machine()["commit"]
        assert process["cpu_seconds"] > common.read_points(path, "charts/cpu_seconds")[-1][1]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")}
    suite.write_text(text + 'curve = "charts/episodic_return"\n')
    again = run.SuiteRun(suite, runs)
    assert [cell.setting for cell in again.cells if not again.is_done(cell)] == ["bad"]
    again.save()
    results = records.collect(runs / "a")
    (missing,) = results["cells"]["ppo/CartPole-v1/bad"]["missing"]
    assert missing["seed"] == 1 and "--env-id Nothing-v0" in missing["error"]
    assert f"CartPole-v1, bad, seeds 1: **failed**: {missing['error']}" in report.render_own([results])
    process = start_harness(suite, "--runs", runs, "--only", "*/good")  # forgets nothing of the others
    assert (
        process.communicate(timeout=60) and process.returncode == 0 and records.collect(runs / "a") == results
    )
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")} == before


@pytest.mark.parametrize(("error", "num_tries"), [("exit code 1: a crash", 3), ("exit code 2: bad flags", 1)])
def test_a_cell_that_crashes_starts_over_twice(tmp_path, monkeypatch, error, num_tries):
    """With a Ray that calls at once: one that crashed is tried three times in all, one with bad flags once."""
    suite, tries = run.SuiteRun(write_suite(tmp_path / "a.toml", [1], a=SHORT), tmp_path / "runs"), []

    class Task:
        def options(self, **options):
            return self

        def remote(self, cell, digest, path, command):
            path.mkdir()
            tries.append(path.name)
            return path

    ray = SimpleNamespace(remote=lambda **options: lambda function: Task(), get=lambda future: error)
    ray.wait, ray.exceptions = lambda futures, timeout: (futures, []), SimpleNamespace(RayError=OSError)
    monkeypatch.setitem(sys.modules, "ray", ray)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    run.run_on_ray(suite, suite.cells, {}, tqdm(disable=True))
    assert tries == [f"try_{i + 1}" for i in range(num_tries)] and suite.errors == {suite.cells[0]: error}


@pytest.mark.slow
def test_ctrl_c_leaves_finished_cells_and_nothing_running(tmp_path):
    runs = tmp_path / "runs"
    suite = write_suite(tmp_path / "a.toml", [1], a=SHORT, long=LONG)
    process = start_harness(suite, "--runs", runs)
    wait_until(lambda: list_done(runs) and list(runs.rglob("long/*/try_1/*/checkpoint.pt")))
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: what was finished is kept" in output, output
    assert "Traceback" not in output
    wait_until(lambda: not find_processes(runs))
    process = start_harness(suite, "--runs", runs, "--only", "*/a")
    assert "1 cells, 1 done before" in process.communicate(timeout=60)[0] and process.returncode == 0
    assert list(count_results(runs).values()) == [1]


def suspend_cells(runs):
    """Processes of cells that have begun to train, which stand still from now on."""
    cells = find_processes(runs)
    begun = [cell for cell in cells if list(Path(cell.info["cmdline"][-1]).rglob("checkpoint.pt"))]
    for cell in begun:
        cell.suspend()
    return begun


@pytest.mark.slow
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
        wait_until(lambda: len(suspend_cells(runs)) == 2, 300)  # neither is done before the node is gone
        cluster.remove_node(node, allow_graceful=False)
        (cell,) = wait_until(lambda: len(cells := find_processes(runs)) == 1 and cells)
        cell.resume()
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
    cell = {
        "task": task,
        "setting": setting,
        "command": f"python algos/{script}.py",
        "curve": "c",
        "threshold": 475,
    }
    cell |= {"better": "higher", "cpus": 1, "gpus": 0, "environment": None, "script": script, "hash": "0"}
    return cell | {"headline": "eval/episodic_return", "runs": runs, "missing": []} | changes


def make_run(seed, value):
    run = {"seed": seed, "metrics": {"eval/episodic_return": value}, "env_steps": 10, "wall_seconds": 2.0}
    run |= {
        "cpu_seconds": 1.0,
        "device": "cpu",
        "torch": "2",
        "commit": "abc",
        "value": value,
        "machine": None,
    }
    run |= {"steps_per_second": 1000.0, "curve": [[0, 0.0, 1.0], [10, 1.0, value]]}
    return run | {"steps_to_threshold": 10 * seed, "seconds_to_threshold": 1.0 * seed}


def make_results(*cells, ratios=(), suite="a"):
    names = [f"{c['script']}/{c['task']}/{c['setting']}" for c in cells]
    results = {"suite": suite, "cells": dict(zip(names, cells, strict=True)), "ratios": list(ratios)}
    return records.SHOWN_KEYS | results


def test_statistics_over_seeds():
    low, high = records.find_interval((list(np.random.default_rng(1).normal(5.0, 1.0, 400)),), np.mean)
    assert low < 5.0 < high and high - low == pytest.approx(2 * 1.96 / 400**0.5, rel=0.1)
    assert records.find_interval(([1.0],), np.mean) is None
    ratio, (low, high) = records.find_ratio([2.0, 2.1, 1.9], [4.0, 4.1, 3.9])
    assert ratio == 0.5 and 0.45 < low < 0.5 < high < 0.55
    assert records.find_ratio([1.0], [-1.0]) is None and records.find_ratio([1.0], [float("inf")]) is None
    assert records.find_ratio([1.0], [float("nan")]) is None
    assert records.find_ratio([1.0, 1.0], [2.0, float("inf"), 2.0]) == (0.5, None)
    a, b = [6.0, 5.0, 4.0, 3.0], [3.0, 2.5, 2.0, 1.5]  # twice as much in every run
    assert records.find_ratio(a, b, paired=True) == (2.0, (2.0, 2.0))
    assert records.find_ratio(a, b)[1][1] > 2.2


def test_quantities_count_with_and_without_the_prefix_of_evaluations():
    """Older results of peers have none, and are held against newer ones."""
    old, new = make_cell([1.0], headline="ours_elo"), make_cell([1.0], headline="eval/ours_elo")
    old["runs"][0]["metrics"], new["runs"][0]["metrics"] = {"ours_elo": 5.0}, {"eval/ours_elo": 5.0}
    old["runs"][0]["final_return"] = 3.0
    for cell in (old, new):
        assert records.get_values(cell, "ours_elo") == records.get_values(cell, "eval/ours_elo") == [5.0]
    assert records.get_values(old, "final_return") == [3.0] and np.isnan(
        records.get_values(new, "final_return")
    )
    rows, notes = compare.compare(make_results(old), make_results(new))
    assert rows and not notes["not comparable"]
    assert compare.compare(make_results(old), make_results(new | {"headline": "eval/x"}))[1]["not comparable"]


def test_threshold_is_the_first_point_at_it_in_the_right_direction():
    curve = [[1, 0.1, 3.0], [2, 0.2, 5.0], [3, 0.3, 2.0], [4, 0.4, 4.0], [5, 0.5, 5.0]]
    assert common.find_threshold(curve, 4) == [2, 0.2, 5.0]
    assert (
        common.find_threshold(curve, 3, "lower")[0] == 1
        and common.find_threshold(curve, 2.5, "lower")[0] == 3
    )
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
    ratios.append(ratios[0] | {"title": "loss", "better": "lower"})
    page = report.render_own([make_results(make_cell([400.0, 500.0]), peer, lost, ratios=ratios)])
    assert "| return | abc | 450 | 150 | **3.00** (2.00 to 5.00) |" in page
    assert "| loss | abc | 450 | 150 | *3.00* (2.00 to 5.00) |" in page
    assert "| return | gnugo | - | - | cannot be installed |" in page
    assert "| CartPole-v1, default | return | 450 (400 to 500) | 1.50, to reach 475 | 2 |" in page
    assert "| CartPole-v1, tuned | return | 150 (100 to 200) | over 1.00 (1 of 2), to reach 475 | 2 |" in page
    close = make_results(
        make_cell([1.0012]), make_cell([1.0], "sb3_ppo/CartPole-v1/tuned"), ratios=ratios[:1]
    )
    assert "1.0012" in report.make_ratio_table([close])
    assert "Go, match, seeds 1: **failed**: cannot be installed" in page


def test_ablations_hold_each_cell_against_the_first_of_its_task():
    first = make_cell([1.0, 2.0, 3.0], command="python algos/ppo.py --norm-obs --gamma 0.9")
    better = make_cell(
        [11.0, 12.0, 13.0], "ppo/CartPole-v1/b", command="python algos/ppo.py --norm-obs --gamma 0.99"
    )
    other = make_cell(
        [2.0, 1.0, 3.0], "ppo/CartPole-v1/c", command="python algos/ppo.py --gamma 0.9 --seeds 1 2"
    )
    alone = make_cell([], "ppo/Acrobot-v1/d", headline=None, missing=[{"seed": 1, "error": "killed"}])
    ((script, text),) = report.make_ablations(make_results(first, better, other, alone)).items()
    assert script == "ppo" and "**CartPole-v1**, return, higher is better, 3 seeds" in text
    assert "| default | `--norm-obs --gamma 0.9` | 2.00 |  |  | 1.00 |" in text
    half = 2.776 * (1 / 3 + 1 / 3) ** 0.5  # Student's t of four degrees of freedom, deviations of 1
    assert (
        f"| b | `--gamma 0.99` | 12.0 | **+10.0** ({10 - half:.2f} to {10 + half:.1f}) | 100% | 1.00 |"
        in text
    )
    assert "| c | `--seeds 1 2`, without `--norm-obs` | 2.00 | 0 (-2.27 to 2.27) | 50% | 1.00 |" in text
    assert "| d |  | killed |" in text


def test_numbers_are_shown_as_people_write_them():
    shown = {
        0.0: "0",
        8.9e-16: "0",
        -8.9e-16: "0",
        -0.4961: "-0.496",
        0.0653: "0.0653",
        0.98 - 0.97: "0.0100",
        4.567: "4.57",
        123.4: "123",
        52822.0: "52,822",
    }
    assert {x: common.show(x) for x in shown} == shown
    assert common.show(None) == common.show(float("nan")) == common.show(float("inf")) == "-"


SUITE_A = """seeds = [1, 2, 3]
[[cells]]
task = "CartPole-v1"
setting = "default"
command = "python algos/ppo.py"
"""


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A repository with a suite `a` that has two runs in benchmark/results, and a folder of runs of it."""
    for name, path in (("RESULTS", "results"), ("SUITES", "suites"), ("FIGURES", "figures")):
        monkeypatch.setattr(common, name, tmp_path / path)
        (tmp_path / path).mkdir()
    (tmp_path / "suites" / "a.toml").write_text(SUITE_A)
    (tmp_path / "results" / "a.json").write_text(json.dumps(make_results(make_cell([1.0, 2.0]))))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "suite.json").write_text("")
    monkeypatch.setattr(report, "publish", lambda published: None)

    def report_runs(cell, *flags):
        monkeypatch.setattr(records, "collect", lambda folder: make_results(cell))
        report.main(["--runs", str(tmp_path / "runs"), *flags])
        return json.loads((tmp_path / "results" / "a.json").read_text())["cells"]["ppo/CartPole-v1/default"][
            "runs"
        ]

    return report_runs


def test_a_report_keeps_committed_runs_that_a_folder_has_not_run_yet(published):
    """But not where the folder's own run has failed; and `run.py --missing` leaves them out."""
    not_run = {"seed": 2, "error": records.NOT_RUN}
    assert [run["value"] for run in published(make_cell([5.0], missing=[not_run]))] == [5.0, 2.0]
    with pytest.raises(records.ResultsError, match="lacks 1 runs"):
        published(make_cell([5.0], missing=[not_run | {"error": "exit code 1"}]))


def test_cells_with_committed_runs_can_be_left_out(published, tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(run, "connect", lambda address: None)
    monkeypatch.setattr(run, "check_resources", lambda cells: chosen.extend(cell.seed for cell in cells))
    monkeypatch.setattr(run, "run_on_ray", lambda *args: None)
    monkeypatch.setattr(run, "read_suite", lambda path: records.read_suite(path, check=lambda *args: None))
    suite = str(tmp_path / "suites" / "a.toml")
    for flags, seeds in (([], [1, 2, 3]), (["--missing"], [3])):
        chosen.clear()
        run.main([suite, "--runs", str(tmp_path / "other"), *flags])
        assert chosen == seeds


def test_a_report_loses_no_committed_run(published, tmp_path, monkeypatch):
    with pytest.raises(records.ResultsError, match="lacks 1 runs"):
        published(make_cell([1.0]))
    assert len(published(make_cell([1.0, 2.0, 3.0]))) == 3
    assert len(published(make_cell([1.0]), "--out", str(tmp_path / "out"))) == 3
    assert (tmp_path / "out" / "results.md").exists() and (tmp_path / "out" / "figures" / "a.png").exists()
    assert json.loads((tmp_path / "out" / "results" / "a.json").read_text()) == make_results(make_cell([1.0]))
    (tmp_path / "nothing").mkdir()
    monkeypatch.setattr(common, "ROOT", tmp_path / "root")
    monkeypatch.setattr(common, "BENCHMARK", tmp_path / "root" / "benchmark")
    for flags, message in (
        (["--runs", tmp_path / "nothing", "--out", tmp_path / "out"], "no runs to report"),
        (["--runs", tmp_path / "missing"], "missing: no such folder"),
        (["--runs", tmp_path / "runs", "--out", tmp_path / "root" / "docs"], "has files of this repository"),
        (
            ["--runs", tmp_path / "runs", "--out", tmp_path / "x/../root/benchmark"],
            "has files of this repository",
        ),
    ):
        with pytest.raises(records.ResultsError, match=message):
            report.main([str(flag) for flag in flags])


def test_results_of_other_forms_are_told(tmp_path):
    """The list of cells of a run folder."""
    (tmp_path / "suite.json").write_text(json.dumps({"suite": "a", "cells": [], "errors": []}))
    with pytest.raises(
        records.ResultsError, match=r"suite.json: not the results of a suite; give the folder"
    ):
        records.load(tmp_path / "suite.json")


def test_published_are_the_cells_of_the_suite_of_today(published, tmp_path):
    """A cell that left the suite leaves the pages, and its runs may be lacking; a new one is not run yet."""
    old = make_cell([1.0, 2.0]), make_cell([1.0, 2.0], setting="gone")
    (tmp_path / "results" / "a.json").write_text(json.dumps(make_results(*old)))
    (tmp_path / "suites" / "a.toml").write_text(
        SUITE_A
        + SUITE_A.replace("default", "new").replace("ppo.py", "ppo.py --gamma 0.8").partition("]\n")[2]
    )
    cells = records.load_published()["a"]["cells"]
    assert list(cells) == ["ppo/CartPole-v1/default", "ppo/CartPole-v1/new"]
    assert len(cells["ppo/CartPole-v1/default"]["runs"]) == 2 and not cells["ppo/CartPole-v1/new"]["runs"]
    assert [m["seed"] for m in cells["ppo/CartPole-v1/new"]["missing"]] == [1, 2, 3]
    for table in (
        report.make_script_table(list(cells.values())),
        report.make_column_table({"cells": cells}, {}),
    ):
        assert "- CartPole-v1, new, seeds 1, 2, 3: not run yet" in table
    assert len(published(make_cell([1.0, 2.0]))) == 2  # without those of `gone`
    (tmp_path / "suites" / "a.toml").write_text(
        SUITE_A.replace("ppo.py", "ppo.py --gamma 0.9")
    )  # another command
    assert not records.load_published()["a"]["cells"]["ppo/CartPole-v1/default"]["runs"]


def test_runs_of_a_tree_with_changes_are_not_published(published, tmp_path):
    """Neither ours nor a peer's, whose commit is its version; what was published before is marked."""
    machine = common.describe_machine()
    for commit, command in (
        ("abc-dirty", "python algos/ppo.py"),
        ("abc-dirty", "python benchmark/peers/sb3_ppo.py"),
    ):
        cell = make_cell([1.0, 2.0, 3.0], command=command)
        cell["runs"][2] |= {"machine": machine | {"commit": commit}, "commit": "sb3 1.0"}
        with pytest.raises(
            records.ResultsError, match=r"1 runs of a tree with changes .*default, seed 3: commit"
        ):
            published(cell)
        assert len(records.load(common.RESULTS / "a.json")["cells"]["ppo/CartPole-v1/default"]["runs"]) == 2
        assert "abc-dirty" in report.describe_machines([make_results(cell)])
        cell["runs"][2]["machine"] |= {"commit": "abc"}
    assert len(published(cell)) == 3


def make_run_folders(runs):
    """Two seeds of a script, one not done, one of another script by that name, one without a curve, a suite."""
    tags = "charts/episodic_return", "eval/episodic_return"
    mine = {"env_id": "T-v0", "exp_name": "mine", "total_timesteps": 300}
    write_run(runs / "a__ppo__1__0", tags, 6, "x", seed=1, **mine)
    write_run(runs / "b__ppo__2__0", tags, 3, seed=2, **mine)
    write_log(runs / "c__ppo__3__0", tags)
    write_log(runs / "a__ppo__1__0" / "wandb" / "files", tags)
    write_run(runs / "d__alphazero_go__1__0", ["eval/win_rate_best"], **mine)
    write_run(runs / "e__gnugo__1__0", ["eval/x"], env_id="Go")
    attempt = runs / "benchmark" / "a" / "cell" / "try_1"
    write_run(attempt / "run", ["eval/x"], seed=3)
    (attempt / "process.json").write_text('{"exit_code": 0}')
    cell = {"name": "ppo/T/s", "folder": "cell", "seed": 3, "curve": None, "threshold": None, "task": "T"}
    cell |= {"setting": "s", "script": "ppo", "command": "python algos/ppo.py", "better": "higher"}
    content = {"suite": "a", "cells": [cell | {"headline": "eval/x"}], "ratios": [], "errors": []}
    (runs / "benchmark" / "a" / "suite.json").write_text(json.dumps(content))


def test_any_folder_of_runs_has_its_curves_drawn(tmp_path, monkeypatch):
    """By script, task and name, beside suites."""
    from matplotlib.figure import Figure

    drawn = {}
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, dpi: (drawn.update({path.name: self}), save(self, path))
    )
    make_run_folders(tmp_path / "runs")
    report.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "## Suite `a`" in page and "| T, s | x | 30.0 | 6.00 | 1 |" in page
    assert "| T-v0, mine | return | 45.0 (30.0 to 60.0) | 9.00 | 2 |" in page
    assert "| T-v0, mine | win rate best | 30.0 |" in page and "| Go, gnugo | x | 30.0 |" in page
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == {"runs.png"} == drawn.keys()
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in drawn["runs.png"].axes]
    won, returns = "games won against the best network before", "return of the greedy policy"
    steps = drawn["runs.png"].axes[labels.index(("environment steps", returns))]
    assert set(labels) - {("environment steps", returns)} == {
        ("CPU-seconds", returns), ("moves of self-play", won), ("CPU-seconds", won)
    }  # fmt: skip
    lines = [line.get_xdata() for line in steps.lines if line.get_alpha()]  # thin: a seed each
    assert sorted(map(len, lines)) == [3, 6]
    one = records.collect_folders(tmp_path / "runs" / "a__ppo__1__0")  # one run alone
    assert list(one["cells"]) == ["ppo/T-v0/mine"]


def test_runs_are_shown_when_they_have_ended(tmp_path):
    """Their flags are in their events, and their script is in the name of the folder."""
    for i, (seed, steps) in enumerate([(1, 300), (2, 300), (3, 900)]):
        write_log(tmp_path / f"T__ppo__{i}__0", ["charts/episodic_return", "eval/episodic_return", "eval/x"])
        write_text(tmp_path / f"T__ppo__{i}__0", exp_name="ppo", env_id="T", seed=seed, total_timesteps=steps)
    write_log(tmp_path / "T__sb3_ppo__1__0", ["eval/x"])
    write_text(tmp_path / "T__sb3_ppo__1__0", "sb3 1", env_id="T", seed=1, run_dir="x")
    cells = records.collect_folders(tmp_path)["cells"]
    assert list(cells) == ["ppo/T/ppo", "sb3_ppo/T/sb3_ppo"]
    ours, peer = cells.values()
    assert sorted(found["seed"] for found in ours["runs"]) == [1, 2] and peer["runs"][0]["commit"] == "sb3 1"
    assert ours["headline"] == "eval/episodic_return" and ours["curve"] == "eval/episodic_return"


def test_runs_of_one_name_with_other_flags_are_no_seeds_of_each_other(tmp_path):
    """Each set of flags is a row of its own, named by what differs; seeds and folders do not count."""
    for i, (seed, lr) in enumerate([(1, 0.1), (2, 0.1), (1, 0.2)]):
        args = {"exp_name": "mine", "seed": seed, "learning_rate": lr, "gamma": 0.9, "run_dir": f"runs{i}"}
        write_run(tmp_path / f"T__ppo__{seed}__{i}", ["eval/x"], **args)
    write_run(tmp_path / "T__ppo__1__3", ["eval/x"], exp_name="other", seed=1, learning_rate=0.3)
    cells = records.collect_folders(tmp_path)["cells"].values()
    found = {cell["setting"]: sorted(run["seed"] for run in cell["runs"]) for cell in cells}
    assert found == {"mine learning_rate=0.1": [1, 2], "mine learning_rate=0.2": [1], "other": [1]}


def run_compare(tmp_path, base, new):
    for name, cells in (("base", base), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(make_results(*cells)))
    return compare.main([str(tmp_path / "base.json"), str(tmp_path / "new.json")])


def test_comparison_fails_where_a_headline_metric_got_worse_beyond_noise(tmp_path, capsys):
    base = [480.0, 490.0, 500.0, 470.0, 500.0]
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([485.0, 470.0, 500.0, 495.0, 480.0])]) == 0
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([300.0, 310.0, 320.0, 290.0, 305.0])]) == 1
    assert "**worse: headline, curve**" in capsys.readouterr().out
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([x + 300 for x in base])]) == 0
    higher = [x + 300 for x in base]
    assert run_compare(tmp_path, [make_cell(base, better="lower")], [make_cell(higher, better="lower")]) == 1
    assert run_compare(tmp_path, [make_cell([500.0] * 3)], [make_cell([499.0] * 3)]) == 1  # no noise at all
    assert run_compare(tmp_path, [make_cell([500.0] * 3)], [make_cell([500.0] * 3)]) == 0
    assert run_compare(tmp_path, [make_cell([500.0])], [make_cell([1.0])]) == 0
    assert "cannot be told from one seed" in capsys.readouterr().out
    assert (
        run_compare(tmp_path, [make_cell([0.3] * 3)], [make_cell([0.1 + 0.2] * 3)]) == 0
    )  # rounding is no noise
    assert run_compare(tmp_path, [make_cell([0.1 + 0.2] * 3)], [make_cell([0.3] * 3)]) == 0
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([float("nan")] * 5)]) == 1
    assert run_compare(tmp_path, [make_cell([float("nan")] * 5)], [make_cell(base)]) == 0
    failing = make_cell(base[:4], missing=[{"seed": 5, "error": "exit code 1"}])
    assert run_compare(tmp_path, [make_cell(base)], [failing]) == 1
    assert run_compare(tmp_path, [failing | {"runs": []}], [failing | {"runs": []}]) == 1  # whatever BASE did
    with pytest.raises(records.ResultsError, match="no results of the same cell"):
        run_compare(tmp_path, [make_cell(base)], [make_cell(base, "ppo/CartPole-v1/other")])


def make_solved(steps, seconds, **changes):
    """A cell whose runs end at 500, and got to the threshold after so many steps and seconds; None where never."""
    cell = make_cell([500.0] * len(steps), **changes)
    for run_, step, second in zip(cell["runs"], steps, seconds, strict=True):
        run_ |= {
            "steps_to_threshold": step,
            "seconds_to_threshold": second,
            "curve": [[0, 0, 20.0], [9000, 90, 500.0]],
        }
    return cell


def test_comparison_fails_where_learning_takes_longer(tmp_path, capsys):
    """Though all runs end at 500; of equal steps too, and where no run gets to the threshold any more."""
    steps, seconds = [1000, 1300, 900, 1200, 1100], [10.0, 14.0, 8.0, 13.0, 10.0]
    base = make_solved(steps, seconds)
    assert run_compare(tmp_path, [base], [make_solved(steps[::-1], seconds[::-1])]) == 0
    assert run_compare(tmp_path, [base], [make_solved([3 * x for x in steps], seconds)]) == 1
    assert "| 500 to 500 | 3.00x | 1.00x | 260 to 260 | **worse: steps** |" in capsys.readouterr().out
    assert run_compare(tmp_path, [base], [make_solved(steps, [3 * x for x in seconds])]) == 1
    assert "**worse: seconds**" in capsys.readouterr().out
    assert run_compare(tmp_path, [base], [make_solved([x / 3 for x in steps], [x / 3 for x in seconds])]) == 0
    assert run_compare(tmp_path, [base], [make_solved([None] * 5, [None] * 5)]) == 1
    assert run_compare(tmp_path, [make_solved([None] * 5, [None] * 5)], [base]) == 0
    assert (
        run_compare(tmp_path, [base], [make_solved([*steps[:4], None], [*seconds[:4], None])]) == 0
    )  # one is luck
    flat = make_solved(steps, seconds)
    for i, run_ in enumerate(flat["runs"]):
        run_["curve"] = [[0, 0, 20.0], [8000, 80, 30.0 + i], [9000, 90, 500.0]]
    assert run_compare(tmp_path, [base], [flat]) == 1
    assert "| 1.00x | 1.00x | 260 to" in (found := capsys.readouterr().out) and "**worse: curve**" in found
    assert (
        run_compare(tmp_path, [base], [flat | {"threshold": 400}]) == 1
    )  # what does not hang on it is compared
    found = capsys.readouterr().out
    assert "not comparable: ppo/CartPole-v1/default: thresholds 475 and 400" in found
    assert "| 500 to 500 |  |  |" in found


def test_missing_cells_and_speeds_of_peers_are_told_and_change_nothing(tmp_path, capsys):
    steps, seconds = [1000, 1300, 900, 1200, 1100], [10.0, 14.0, 8.0, 13.0, 10.0]
    peer = {"name": "sb3_ppo/CartPole-v1/zoo", "command": "python benchmark/peers/sb3_ppo.py"}
    base, slow = make_solved(steps, seconds, **peer), make_solved(steps, [3 * x for x in seconds], **peer)
    others = [make_cell([500.0] * 5, f"ppo/T{i}/s") for i in range(3)]
    assert run_compare(tmp_path, [base, *others], [slow, others[0]]) == 0
    found = capsys.readouterr().out
    assert "speed of a peer: sb3_ppo/CartPole-v1/zoo: seconds 3.00x" in found
    assert "missing: ppo/T1/s, in NEW\nmissing: ppo/T2/s, in NEW\n" in found
    assert found.endswith("2 of 4 cells compared: 0 worse beyond noise, 0 failed in NEW, 2 missing\n")
    assert (
        run_compare(tmp_path, [base], [make_solved([3 * x for x in steps], seconds, **peer)]) == 1
    )  # it learns worse
    rates = {"headline": "simulations_per_cpu_second"}
    for script, code in (("our_go_search", 1), ("openspiel_mcts", 0)):
        names = {"name": f"{script}/Go/search", "command": f"python benchmark/peers/{script}.py"} | rates
        fast, half = (make_cell([x, 1.1 * x, 1.2 * x], threshold=None, **names) for x in (1000.0, 500.0))
        for cell in (fast, half):
            for run_ in cell["runs"]:
                run_["curve"] = []
        assert run_compare(tmp_path, [fast], [half]) == code
    unfinished = make_cell([500.0] * 4, missing=[{"seed": 5, "error": records.NOT_RUN}])
    assert run_compare(tmp_path, [make_cell([500.0] * 5)], [unfinished]) == 0
    assert "unfinished: ppo/CartPole-v1/default: 1 seeds are missing in NEW" in capsys.readouterr().out


def test_stored_results_are_read(capsys):
    """Those of older scripts, which said their commit themselves, as those of today."""
    for name, results in records.load_published().items():
        assert compare.main([str(common.RESULTS / f"{name}.json")] * 2) == 0
        assert "unknown" not in report.describe_machines([results])


def test_difference_interval_and_probability_of_improvement():
    found = records.compare_means([1.0, 2.0, 3.0], [2.0, 3.0, 10.0], "higher")
    assert found["difference"] == 3.0
    pairs = [(b, n) for b in (1.0, 2.0, 3.0) for n in (2.0, 3.0, 10.0)]
    assert found["improvement"] == np.mean([(n > b) + 0.5 * (n == b) for b, n in pairs])
    a, b = np.random.default_rng(2).normal(0, 1, (2, 50))
    low, high = records.compare_means(list(a), list(b), "higher")["interval"]
    error = (a.var(ddof=1) / 50 + b.var(ddof=1) / 50) ** 0.5
    assert (high - low) / 2 == pytest.approx(1.984 * error, rel=0.01)


@pytest.mark.filterwarnings("error")
def test_one_side_may_have_no_noise():
    found = records.compare_means([500.0] * 3, [499.0, 498.0, 500.0], "higher")
    assert found["interval"] == pytest.approx((-1 - 4.303 / 3**0.5, -1 + 4.303 / 3**0.5), rel=1e-3)
    assert compare.find_p_worse([1.0, 1.0000001], [1.0000001, 1.0000002]) == 1.0  # rounding is no noise
    assert compare.find_p_worse([8.9e-16] * 3, [1.2e-15] * 3) == 1.0
    pooled = compare.find_p_worse([-500.0] * 3, [-499.0, -498.0, -500.0])
    assert pooled == pytest.approx(1 - scipy.stats.t.cdf(1 / (0.5 * 2 / 3) ** 0.5, 4))


def simulate(num, drop, slow, draw):
    """Shares of `num` comparisons of twenty cells, five seeds each, that find something, and that find cell 0.

    Steps, seconds and curve of a run go together, its end hardly with them. NEW is worse in cell 0: its end by `drop`
    standard deviations of the seeds, its steps by `slow`, the other two as much as they follow them.
    """
    found = [0, 0]
    for _ in range(num):
        sides = []
        for shift in (0.0, 1.0):
            noise = draw((4, 20, 5))
            steps = noise[1]
            losses = np.stack([0.3 * steps + 0.95 * noise[0], steps, 0.9 * steps + 0.44 * noise[2]])
            losses = np.concatenate([losses, 0.8 * steps[None] + 0.6 * noise[3][None]])
            losses[:, 0] += shift * np.array([drop, slow, 0.9 * slow, 0.8 * slow])[:, None]
            sides.append(losses)
        p = compare.find_p_worse(*sides)
        worse = compare.find_worse({"headline": list(p[0]), "learning": list(p[1:].ravel())})
        cells = np.array([*worse["headline"], *worse["learning"]]).reshape(4, 20).any(0)
        found[0] += cells.any()
        found[1] += cells[0]
    return [x / num for x in found]


@pytest.mark.parametrize("kind", ["normal", "skewed", "heavy tails"])
def test_what_a_comparison_finds_and_how_often_it_cries_wolf(kind):
    """The figures of benchmark/README.md; they hold for noise that is skewed or has heavy tails too."""
    rng = np.random.default_rng(4)
    draw = {
        "normal": rng.standard_normal,
        "skewed": lambda shape: (rng.lognormal(0, 0.5, shape) - 1.133) / 0.604,
        "heavy tails": lambda shape: rng.standard_t(4, shape) / 2**0.5,
    }[kind]
    assert simulate(500, 0, 0, draw)[0] <= 0.065  # 4.7 % of 6,000 normal ones
    found = [simulate(150, *shifts, draw)[1] for shifts in ((3, 0), (4, 0), (0, 3), (0, 4), (3, 3))]
    assert (np.array(found) > [0.55, 0.82, 0.42, 0.77, 0.72]).all(), found


def test_results_that_are_none_are_one_line(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    for name in ("", "missing.json", "bad.json", "other.json", "runs"):
        path = str(tmp_path / name)
        with pytest.raises(records.ResultsError) as error:
            compare.main([path, path])
        assert "\n" not in str(error.value)
    command = [sys.executable, str(ROOT / "benchmark" / "compare.py"), path, path]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (found.returncode, found.stderr) == (2, f"compare.py: {error.value}\n")
