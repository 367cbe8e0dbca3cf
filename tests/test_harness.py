"""The benchmark harness: suites, guarded cells, runs, report and comparison."""

import dataclasses
import hashlib
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
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import psutil
import pytest
import tyro
from conftest import ENVIRONMENT, ROOT

sys.path += [str(ROOT / "benchmark"), str(ROOT / "benchmark" / "peers")]
import common
import compare
import environment
import records
import report
import run
import suite as suites
from common import ResultsError
from suite import read_suite

SHORT = "python algos/ppo.py --num-envs 8 --total-timesteps 2560 --eval-episodes 4"
LONG = "python algos/ppo.py --total-timesteps 50000000 --eval-episodes 4"
SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))
SCRIPTS = {p.stem for p in (ROOT / "algos").glob("*.py")}
WITHOUT_ABLATIONS = {"ppo_change_detection"}  # its rivals are compared by a study


def write_suite(path, seeds, **commands):
    """Write a suite with a cell for each setting=command, on CartPole-v1."""
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


def find_processes(word):
    """List the processes that have `word` in their command line, and have not ended, without this one."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        if is_alive and any(str(word) in text for text in words):
            found.append(process)
    return found


def list_done(runs):
    """List the run folders of processes that have ended with exit code 0."""
    paths = [path for path in runs.rglob("process.json") if json.loads(path.read_text())["exit_code"] == 0]
    return [folder for path in paths for folder in common.find_run_folders(path.parent)]


def count_results(runs):
    """Count the results of each cell."""
    return Counter(str(path.parents[1].relative_to(runs)) for path in list_done(runs))


# ---- Suites ----------------------------------------------------------------------------------------------------------


def check_flags(cell):
    """Let the script's own parser, and torchrun's, read the command of a cell."""
    words = cell.words
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        assert get_args_parser().parse_args(words[1:]).training_script == cell.path
    flags = words[words.index(cell.path) + 1 :]
    if cell.path.startswith("algos/"):
        tyro.cli(importlib.import_module(f"algos.{cell.script}").Args, args=flags)
    else:
        module = importlib.import_module(cell.script)
        module.make_parser().parse_args([*flags, "--seed", "1", "--run-dir", "runs"])


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_parse_against_the_scripts(path):
    """The scripts take the flags, and what the pages show names cells that are there."""
    cells, shown = read_suite(path)
    for cell in {cell.name: cell for cell in cells}.values():
        check_flags(cell)
        assert cell.gpus <= 1 or cell.gpus % 1 == 0
        assert not cell.environment or (common.PEERS / f"requirements-{cell.environment}.txt").exists()
    names = {cell.name for cell in cells}
    for found in report.SUMMARY_NUMBER.findall(shown["summary"]):
        assert names.issuperset(found[0].split(":"))
    for ratio in shown["ratios"]:
        keys = {"title", "quantity", "better", "ours", "peer"}
        assert keys <= ratio.keys() <= keys | {"peer_quantity"} and ratio["better"] in ("higher", "lower")
        assert {ratio["ours"], ratio["peer"]} <= names
    for table in shown["tables"]:
        assert {"page", "section"} <= table.keys() <= {"page", "section", "columns"}
    if path.stem in ("smoke", "cpu", "gpu", "ablations"):
        without = WITHOUT_ABLATIONS if path.stem == "ablations" else set()
        assert {cell.script for cell in cells} >= SCRIPTS - without
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
        ("seeds = [1", "cannot be read as TOML"),
        ("seeds = [1]\n", "no cells"),
        (CELL, r"cell 1: seeds = \[\]: write seeds = "),
        ("seeds = 5\n" + CELL, r"cell 1: seeds = 5: write seeds = "),
        ("seeds = [1, 1]\n" + CELL, "two cells .*ppo/T/s', 1"),
        ("seeds = [1]\n" + CELL + CELL, "two cells .*ppo/T/s', 1"),
        ("seeds = [1]\n" + CELL.replace("algos/ppo", "algos/dqn"), "command = 'python algos/dqn.py' has to"),
        ("seeds = [1]\n" + CELL.replace("headline", "# "), "cell 1: headline = None has to be str"),
        ("seeds = [1]\nheadline = { ppo = 3 }\n" + CELL.replace("headline", "# "), "headline = 3 has to be"),
        ("seeds = [1]\n" + CELL + "score_best = 'x'\n", "score_best = 'x' has to be bool"),
        ("seeds = [1]\n" + CELL.replace("python algos/ppo.py", "rm -rf x"), "has to be python or torchrun"),
        ("seeds = [1]\n" + CELL.replace('"T"', '"../T"'), "'../T' is not a name"),
        ("seeds = [1]\n" + CELL.replace("python", "python -m pdb"), "has to be python or torchrun"),
        ("seeds = [1]\n" + CELL.replace("python", "torchrun --nproc-per-node 2"), "torchrun --standalone"),
        ("seeds = [1]\n" + CELL + "threshold = 3\n", "a threshold needs the tag of its curve"),
        ("seeds = [1]\n" + CELL + "curv = 'x'\n", "unexpected keyword argument 'curv'"),
        ("seeds = [1]\n" + CELL + "cpus = 'two'\n", "cpus = 'two' has to be int"),
        ("seeds = [1]\n" + CELL + "better = 'more'\n", "better is neither"),
        ("seeds = [1]\n" + CELL.replace('setting = "s"\n', ""), "missing 1 required .*'setting'"),
    ],
)
def test_what_is_wrong_with_a_suite_is_one_line(tmp_path, text, message):
    path = tmp_path / "suite.toml"
    path.write_text(text)
    with pytest.raises(ResultsError, match=message) as error:
        read_suite(path)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(path))


def test_a_suite_names_headlines_by_script(tmp_path):
    path = tmp_path / "a.toml"
    plain = CELL.replace('headline = "eval/x"\n', "").replace('"s"', '"t"')
    path.write_text(f"seeds = [1]\nheadline = {{ ppo = 'eval/y' }}\n{CELL}{plain}")
    assert [cell.headline for cell in read_suite(path)[0]] == ["eval/x", "eval/y"]


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
    """A repository of small files, and what makes a cell of a command there."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "PEERS", tmp_path / "benchmark" / "peers")

    def make(command, **keys):
        table = {"task": "T", "setting": "s", "headline": "eval/x", "command": command}
        return suites.make_cell(table | keys, {}, "here")

    return make


def test_the_hash_is_of_the_command_and_of_all_files_it_uses(tree, tmp_path):
    """Of the script and its sibling, of files that a peer or a flag names, of a peer's packages; of no neighbours."""
    ours = tree("python algos/ppo.py --gamma 0.9")
    match = tree("python benchmark/peers/match.py --net algos/net.pt", environment="x")
    before = ours.hash(), match.hash()
    assert before == (ours.hash(), match.hash())
    assert tree(ours.command, setting="t").hash() == dataclasses.replace(ours, seed=2).hash() == before[0]
    assert tree("python algos/ppo.py --gamma 0.8").hash() != before[0]
    changed = {}
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"{text}#")
        changed[name] = tuple(a != b for a, b in zip(before, (ours.hash(), match.hash()), strict=True))
        (tmp_path / name).write_text(text)
    named = tree("python algos/ppo.py --env-id envs_shared.own:T-v0")
    before = named.hash()
    (tmp_path / "envs_shared" / "own.py").write_text("c = 2\n")
    assert named.hash() != before
    both = {"algos/ppo.py", "envs_shared/a.py", "envs_shared/__init__.py"}
    peers = {"benchmark/peers/match.py", "benchmark/peers/shared.py", "benchmark/peers/requirements-x.txt"}
    peers |= {"benchmark/data/r.txt", "algos/net.pt"}
    assert {name for name, found in changed.items() if found == (True, True)} == both
    assert {name for name, found in changed.items() if found == (False, True)} == peers


def test_the_hash_stays_what_it_was(tree):
    """Cells that are done stay done: command, then each file's name and text, by name."""
    names = ("algos/ppo.py", "envs_shared/__init__.py", "envs_shared/a.py")
    text = "python algos/ppo.py  --gamma 0.9" + "".join(f"\n{name}\n{FILES[name]}" for name in names)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert tree("python algos/ppo.py  --gamma 0.9").hash() == digest


def test_what_a_script_uses_is_what_it_imports():
    """Those of the real ones, against a list by hand."""

    def find(name):
        return {str(path.relative_to(ROOT)) for path in suites.find_used_files(ROOT / name)}

    sibling = {"envs_shared/__init__.py", "envs_shared/change_folders.py", "envs_shared/change_pairs.py"}
    assert find("algos/ppo_change_detection.py") == {"algos/ppo_change_detection.py"} | sibling
    assert find("algos/r2d2_lstm.py") == {"algos/r2d2_lstm.py"}
    found = find("benchmark/peers/gnugo_match.py")
    assert found > {"benchmark/peers/go_engine.py", "benchmark/peers/peer.py", "algos/alphazero_go.py"}
    assert {"benchmark/checkpoints/go5x5.pt", "envs_shared/go.py", "envs_shared/go_gtp.py"} < found
    assert "benchmark/data/tsp/tsp20_uniform_500.txt" in find("benchmark/peers/elkai_lkh.py")
    assert find("algos/reinforce_tsp_attention.py") >= {"envs_shared/tsplib.py"}


def test_bad_input_exits_with_2_and_leaves_nothing(tmp_path):
    suite = write_suite(tmp_path / "a.toml", [1], a=SHORT)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="no such cell"):
        run.main([str(suite), "--only", "r2d2*"])
    for runs in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(ResultsError, match="file"):
            run.main([str(suite), "--runs", str(runs)])
    for flags, message in (
        ([tmp_path / "missing.toml"], "cannot be read"),
        ([suite, "--runs", tmp_path / "runs", "--address", "127.0.0.1:1"], "no Ray cluster"),
    ):
        process = start_harness(*flags)
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("run.py: ")]
        assert process.returncode == 2 and len(lines) == 1 and message in lines[0], output
        assert "Traceback" not in output and not (tmp_path / "runs").exists()


def test_an_address_that_never_answers_is_one_line_in_seconds(tmp_path):
    """Something listens there and says nothing, and Ray itself would wait and warn for minutes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ResultsError, match=f"--address {address}: no Ray cluster answers there"):
            run.start_on_ray(address)


def test_no_program_imports_ray_unless_it_has_an_address():
    code = "import sys; sys.path.insert(0, 'benchmark'); import run, report, compare; print('ray' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert found.stdout == "False\n", found.stderr


# ---- Cells -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(tmp_path):
    """A cell and its folder."""
    (cell,), _ = read_suite(write_suite(tmp_path / "a.toml", [1], a=SHORT))
    folder = tmp_path / f"seed1-{cell.hash()}"
    folder.mkdir()
    return cell, folder


def run_python(cell, code, attempt=1, *gpus):
    """Run code as an attempt at a cell; returns what failed, None for a result."""
    cell, folder = cell
    path = folder / f"try_{attempt}"
    run.run_cell(cell, path, [sys.executable, "-c", code, str(folder)], *gpus)
    try:
        records.read_attempt(path, vars(cell))
    except ResultsError as error:
        return str(error)
    return None


def test_a_cell_that_never_writes_a_result_is_an_error(cell):
    assert run_python(cell, "print('hello')") == "no run folder"
    assert records.read_end(cell[1] / "try_1" / "log.txt") == "hello"


def write_log(folder, tags, num_points=3, **clocks):
    """Write TensorBoard scalars at the steps 100, 200, ...; a clock is seconds a step."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(100, 100 * num_points + 1, 100):
            for tag in tags:
                writer.add_scalar(tag, step / 10, step)
            for name, seconds in ({"cpu_seconds": 0.02} | clocks).items():
                writer.add_scalar(f"charts/{name}", step * seconds, step)


def write_text(folder, program="", **args):
    """Write the flags of a run and the version of its program, as scripts and peers log them."""
    from torch.utils.tensorboard import SummaryWriter

    rows = "".join(f"|{name}|{value}|\n" for name, value in args.items())
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        if program:
            writer.add_text("program", program)


def write_run(folder, tags, num_points=3, program="", **args):
    """Write what a run of the script that the name of `folder` has leaves when it has ended."""
    write_log(folder, tags, num_points)
    write_text(folder, program, **args)


def copy_run(folder, end=""):
    """Code of a cell whose process leaves a copy of `folder` as its run folder, and then does `end`."""
    return f"import shutil, sys; shutil.copytree({str(folder)!r}, sys.argv[1] + '/try_1/run'); {end}"


def test_a_cell_that_has_not_logged_its_curve_has_failed(cell, tmp_path):
    """One line names the tag and those there are; with one of them in the suite, the same run counts."""
    write_log(tmp_path / "run", ["charts/other", "eval/episodic_return"])
    absent = dataclasses.replace(cell[0], curve="charts/nothing")
    error = run_python((absent, cell[1]), copy_run(tmp_path / "run"))
    assert error.startswith("no charts/nothing in ") and error.startswith(run.SAME_AGAIN)
    assert error.endswith("(there are: charts/other, eval/episodic_return, charts/cpu_seconds)")
    assert "\n" not in error
    other = dataclasses.replace(cell[0], curve="charts/other")
    assert records.find_run(cell[1], vars(absent)) == (None, error)
    found, error = records.find_run(cell[1], vars(other))
    assert found["curve"][-1] == [300, 6.0, 30.0] and not error
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no charts/episodic_return in .* \(there are: none\)"):
        common.read_points(tmp_path / "empty", "charts/episodic_return")


def test_a_run_is_read_from_its_events(cell, tmp_path):
    """Its metrics are the last values of evaluations; it is done when its process has ended well."""
    tags = "charts/episodic_return", "eval/episodic_return", "best/length", "losses/x"
    write_log(tmp_path / "run", tags, num_points=20)
    write_text(tmp_path / "run", seed=1)
    ours = vars(dataclasses.replace(cell[0], curve="eval/episodic_return", threshold=150))
    assert run_python(cell, copy_run(tmp_path / "run", "sum(range(30_000_000))")) is None
    found, _ = records.find_run(cell[1], ours)
    assert found["headline"] == "eval/episodic_return" and found["value"] == 200.0 and found["seed"] == 1
    assert found["metrics"] == {"eval/episodic_return": 200.0, "best/length": 200.0}
    assert found["env_steps"] == 2000 and found["device"] == "cpu" and found["wall_seconds"] >= 0
    assert found["steps_to_threshold"] == 1500 and found["seconds_to_threshold"] == pytest.approx(30)
    assert found["steps_per_second"] == pytest.approx(50)
    assert found["final_return"] == 195.0  # of the steps 1900 and 2000
    process = json.loads((cell[1] / "try_1" / "process.json").read_text())
    assert process["exit_code"] == 0 and found["cpu_seconds"] == process["cpu_seconds"] > 0.2
    assert process["machine"].keys() == {"cpu", "cores", "python", "torch", "gymnasium", "commit", "date"}
    assert found["machine"] == process["machine"] and found["commit"] == found["machine"]["commit"]
    on_gpu = records.read_attempt(cell[1] / "try_1", ours | {"gpus": 0.5})
    assert on_gpu["device"] == "gpu" and on_gpu["seconds_to_threshold"] <= on_gpu["wall_seconds"] < 30


def test_curves_are_thinned_and_keep_their_last_point(tmp_path):
    write_log(tmp_path / "run", ["c", "eval/x"], num_points=500)
    curve = records.read_run(tmp_path / "run", {"curve": "c"}, {})["curve"]
    assert 30 <= len(curve) <= records.NUM_POINTS and curve[-1] == [50_000, 1000.0, 5000.0]
    assert set(np.diff([step for step, _, _ in curve])) == {900}


@pytest.mark.parametrize(
    ("tag", "end", "error"),
    [
        ("eval/episodic_return", "sys.exit('why')", "exit code 1: why"),
        (
            "eval/other",
            "",
            "no eval/episodic_return in .*/run .there are: eval/other, charts/cpu_seconds.$",
        ),
    ],
)
def test_a_run_that_ended_badly_or_without_its_headline_has_failed(cell, tmp_path, tag, end, error):
    """And one whose end nobody has seen has not run yet."""
    write_log(tmp_path / "run", [tag])
    found = run_python(cell, copy_run(tmp_path / "run", end))
    assert re.match(error, found) and "\n" not in found
    assert found.startswith(run.SAME_AGAIN) == (not end)  # a crash may have been bad luck
    assert records.find_run(cell[1], vars(cell[0]))[0] is None
    if not end:
        assert records.find_run(cell[1], vars(cell[0]) | {"headline": tag})[0]["value"] == 30.0
    (cell[1] / "try_1" / "process.json").unlink()
    assert records.find_run(cell[1], vars(cell[0]) | {"headline": tag}) == (None, records.NOT_RUN)


SCORES = "{'eval/episodic_return': 500.0, 'eval/episodic_length': 7}"


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (f"print('hello'); print({SCORES!r})", ""),
        ("sys.exit('broken')", "no scores of best.pt: broken"),
        ("print('no numbers')", "no scores of best.pt: no numbers"),
    ],
)
def test_best_is_scored_after_the_run_where_the_cell_asks_for_it(tree, tmp_path, end, error):
    """By the script itself; its seconds are not those of the run."""
    write_log(tmp_path / "left", ["eval/x"])
    (tmp_path / "left" / "best.pt").write_text("")
    train = "shutil.copytree('left', sys.argv[sys.argv.index('--run-dir') + 1] + '/run')"
    code = (
        f"import shutil, sys, time\nprint(sys.argv)\nif '--evaluate' not in sys.argv:\n    {train}\nelse:\n"
    )
    (tmp_path / "algos" / "x.py").write_text(f"{code}    sum(range(60_000_000)); {end}\n")
    cell = dataclasses.replace(tree("python algos/x.py --gamma 0.9", score_best=True), seed=4)
    path = tmp_path / f"seed4-{cell.hash()}" / "try_1"
    run.run_cell(cell, path, run.make_command(cell, sys.executable, path))
    flags = ["--evaluate", str(path / "run" / "best.pt"), "--eval-episodes", "100", "--seed", "4"]
    assert (path / "best.txt").read_text().startswith(f"{['algos/x.py', *flags]}\n")
    found, failed = records.find_run(path.parent, vars(cell))
    assert failed == error
    if error:
        assert found is None and error.startswith(run.SAME_AGAIN)
        return
    assert found["metrics"] == {"eval/x": 30.0, "best/episodic_return": 500.0, "best/episodic_length": 7}
    start = time.process_time()
    sum(range(30_000_000))  # half as long
    assert found["cpu_seconds"] < time.process_time() - start


def test_exit_codes_and_signals_are_told(cell, monkeypatch):
    """The reason is the last line written, whatever the environment says of buffers."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import sys; print('|##| 1/1\\r|###| 2/2'); sys.exit('why it ended')"
    assert run_python(cell, code) == "exit code 1: why it ended"
    assert run_python(cell, "print('|##| 1/1\\r|###| 2/2', end=''); exit(3)", 2) == "exit code 3: |###| 2/2"
    assert run_python(cell, "import os; os.kill(os.getpid(), 9)", 3) == "exit code -9: "


def test_a_cell_has_no_stdin_and_one_thread(cell):
    run_python(cell, "import os, sys; print(repr(sys.stdin.read()), os.environ['OMP_NUM_THREADS'])")
    assert (cell[1] / "try_1" / "log.txt").read_text() == "'' 1\n"


def test_cpu_seconds_are_those_of_all_processes_of_a_cell(cell):
    """Of children too, for which nobody waits."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(30_000_000))'])"
    run_python(cell, f"{child}; {child.replace('run', 'Popen', 1)}")
    start = time.process_time()
    sum(range(30_000_000))
    process = json.loads((cell[1] / "try_1" / "process.json").read_text())
    assert process["cpu_seconds"] > 0.8 * (time.process_time() - start)


def test_a_cell_sees_the_gpus_that_it_was_given_and_no_others(cell, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray does in its worker
    code = "import os; print('GPUs:', os.environ['CUDA_VISIBLE_DEVICES'])"
    on_gpu = dataclasses.replace(cell[0], gpus=0.5), cell[1]
    run_python(cell, code, 1)
    run_python(on_gpu, code, 2)
    run_python(on_gpu, code, 3, "1,2")
    run_python(cell, code, 4, "")
    logs = [(cell[1] / f"try_{i}" / "log.txt").read_text() for i in (1, 2, 3, 4)]
    assert logs == ["GPUs: \n", "GPUs: 3\n", "GPUs: 1,2\n", "GPUs: \n"]


def test_a_script_that_changes_while_a_suite_runs_is_told(cell):
    other = cell[1].parent / f"seed1-{'0' * 12}"
    with pytest.raises(ResultsError, match=r"algos/ppo.py has changed since") as error:
        run.run_cell(cell[0], other / "try_1", ["true"])
    assert str(error.value).startswith(run.SAME_AGAIN) and not other.exists()


def test_commands_get_seed_and_folder_and_nothing_else(tmp_path):
    path = tmp_path / "a.toml"
    two = CELL.replace('"s"', '"t"').replace("python", "torchrun --standalone --nproc-per-node 2")
    path.write_text(f"seeds = [7]\n{CELL}{two}")
    a, b = (run.make_command(cell, "/its/python", tmp_path) for cell in read_suite(path)[0])
    rest = ["--seed", "7", "--run-dir", str(tmp_path)]
    assert a == ["/its/python", "algos/ppo.py", *rest]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert b == ["/its/python", *launcher, "algos/ppo.py", *rest]


# ---- Guards ----------------------------------------------------------------------------------------------------------

# Starts a child, one in a session of its own and a daemon, deaf to what can be ignored, all marked by the last argument
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path

child = "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('up'); time.sleep(600)"
command = [sys.executable, "-uc", child, sys.argv[-1]]
for new in (False, True):
    subprocess.Popen(command, start_new_session=new)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(command[0], command)
    os._exit(0)
os.wait()
while Path(sys.argv[-2]).read_text().count("up") < 3:
    time.sleep(0.05)
print("ready")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, guards kill the process group alone")
@pytest.mark.parametrize(
    ("end", "hours", "error"),
    [
        ("", 1, "no run folder"),
        ("sys.exit('why')", 1, "exit code 1: why"),
        ("os.kill(os.getpid(), 9)", 1, "exit code -9: ready"),
        ("time.sleep(600)", 20 / 3600, "not done after 0.00555556 hours"),
    ],
)
def test_what_a_cell_leaves_running_ends_with_it(cell, tmp_path, end, hours, error):
    """However it ends: children, others in sessions of their own, daemons; and none is left as a zombie."""
    ours = dataclasses.replace(cell[0], hours=hours)
    word = f"family-of-{tmp_path.name}-{os.getpid()}"
    path = cell[1] / "try_1"
    run.run_cell(ours, path, [sys.executable, "-c", FAMILY + end, str(path / "log.txt"), word])
    assert not find_processes(word)
    with pytest.raises(ResultsError) as found:
        records.read_attempt(path, vars(ours))
    assert str(found.value) == error and "ready" in (path / "log.txt").read_text()


def run_family_here(cell, path, word):
    run.run_cell(cell, path, [sys.executable, "-c", FAMILY + "time.sleep(600)", str(path / "log.txt"), word])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, guards kill the process group alone")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_cell_dies_with_its_harness(cell, tmp_path, number):
    """However the harness ends; the attempt has no end of its own."""
    import multiprocessing

    word, path = f"family-of-{tmp_path.name}-{os.getpid()}", cell[1] / "try_1"
    harness = multiprocessing.get_context("spawn").Process(target=run_family_here, args=(cell[0], path, word))
    harness.start()
    wait_until(lambda: (path / "log.txt").exists() and "ready" in (path / "log.txt").read_text())
    assert len(find_processes(word)) >= 5  # with the guard
    os.kill(harness.pid, number)
    harness.join(60)
    wait_until(lambda: not find_processes(word))
    assert harness.exitcode and not list(cell[1].rglob("process.json"))


def test_a_guard_that_is_killed_is_a_crash(cell):
    killer = "import os, time; os.kill(os.getppid(), 9); time.sleep(600)"
    assert run_python(cell, killer) == "exit code -9: "
    for process in find_processes("os.kill(os.getppid(), 9)"):  # without a guard, it goes on
        process.kill()


# ---- Runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Cells of this machine that run until they are told to end, by what makes cells and starts them."""
    ends = {}

    def wait_for_end(cell, path, command, gpus):
        ends[cell.setting] = threading.Event(), gpus
        ends[cell.setting][0].wait(60)

    monkeypatch.setattr(run, "run_cell", wait_for_end)
    monkeypatch.setattr(run.os, "cpu_count", lambda: 3)
    yield ends
    for event, _ in ends.values():
        event.set()


def make_cell_of(setting, **keys):
    table = {"task": "T", "setting": setting, "command": "python algos/ppo.py", "headline": "x"}
    return suites.make_cell(table | keys, {}, "here")


def finish(started, future, setting):
    wait_until(lambda: setting in started)
    started[setting][0].set()
    future.result(60)


def test_cells_take_the_cores_that_they_ask_for(started):
    cells = [make_cell_of(name, cpus=cpus) for name, cpus in (("a", 2), ("b", 2), ("c", 1), ("d", 9))]
    submit = run.start_here(cells)
    a, b, c, d = ((cell, Path(), []) for cell in cells)
    first = submit(*a)
    assert first and submit(*b) is None and submit(*d) is None
    third = submit(*c)
    assert third and submit(*c) is None
    finish(started, first, "a")
    assert submit(*d) is None
    second = submit(*b)
    finish(started, third, "c")
    finish(started, second, "b")
    last = submit(*d)  # more than there is: alone
    assert last and submit(*c) is None
    finish(started, last, "d")


def test_cells_take_the_gpus_that_they_ask_for(started, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(run.os, "cpu_count", lambda: 16)
    wanted = {"one": 1, "other": 1, "third": 1, "both": 2, "none": 0}
    cells = {name: make_cell_of(name, gpus=gpus) for name, gpus in wanted.items()}
    submit = run.start_here([*cells.values()])
    futures = {name: submit(cell, Path(), []) for name, cell in cells.items()}
    given = {name for name, future in futures.items() if future}
    assert given == {"one", "other", "none"}
    wait_until(lambda: started.keys() == given)
    assert {name: gpus for name, (_, gpus) in started.items()} == {"one": "4", "other": "7", "none": ""}
    for name in given:
        finish(started, futures[name], name)
    both = submit(cells["both"], Path(), [])
    finish(started, both, "both")
    assert started["both"][1] == "4,7"


def end_at_once(error=None):
    future = Future()
    future.set_exception(error) if error else future.set_result(None)
    return future


def test_a_cell_that_needs_gpus_which_are_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cell = make_cell_of("a", gpus=1)
    assert run.run_cells({cell: tmp_path}, run.start_here([cell])) == {cell: "this machine lacks the GPUs"}


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [
        ("exit code 1: a crash", 3),
        ("exit code 2: bad flags", 1),
        ("no eval/x", 1),
        ("not done after 24 hours", 1),
        ("exit code -9: ", 3),
    ],
)
def test_a_cell_that_crashes_starts_over_twice(tmp_path, monkeypatch, capsys, error, num_tries):
    """One that crashed is tried three times in all, one that would fail in the same way again once."""
    cell, tries = make_cell_of("a"), []

    def submit(cell, path, command):
        path.mkdir(parents=True)
        tries.append(path.name)
        return end_at_once()

    monkeypatch.setattr(records, "find_run", lambda folder, cell: (None, error))
    assert run.run_cells({cell: tmp_path / "cell"}, submit) == {cell: error}
    assert tries == [f"try_{i + 1}" for i in range(num_tries)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["again"] * (num_tries - 1) + ["failed"]


def test_a_cell_whose_worker_is_lost_starts_over(tmp_path, monkeypatch):
    cell, ends = make_cell_of("a"), [end_at_once(RuntimeError("a node died\nsomewhere")), end_at_once()]
    found = [(None, records.NOT_RUN), ({"headline": "x", "value": 1.0}, "")]
    monkeypatch.setattr(records, "find_run", lambda folder, cell: found.pop(0))
    assert run.run_cells({cell: tmp_path}, lambda *args: ends.pop(0)) == {} and not ends and not found


def test_a_peer_that_cannot_be_installed_is_told_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "requirements-x.txt").write_text("no-such-package==0\n")
    monkeypatch.setattr(environment, "PEERS", tmp_path)
    monkeypatch.setattr(environment.venv, "create", lambda folder, **options: folder.mkdir())
    answer = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(environment.subprocess, "run", lambda *args, **options: answer)
    with pytest.raises(OSError, match=r"peer x cannot be installed .*: ERROR: No matching distribution$"):
        environment.make_environment("x")
    assert not (tmp_path / ".venv-x" / "requirements.sha256").exists()


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
    (victim,) = wait_until(
        lambda: [p for p in find_processes("5120") if str(runs) in " ".join(p.info["cmdline"]) and is_cell(p)]
    )
    victim.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "again: ppo/CartPole-v1/killed, seed 1: exit code -9: " in output
    assert "failed: ppo/CartPole-v1/bad, seed 1: exit code 2: ppo.py: error: --env-id Nothing-v0" in output
    assert "failed: ppo/CartPole-v1/other, seed 1: no charts/nothing in " in output
    assert "again: ppo/CartPole-v1/other" not in output and "2 of 4 cells done" in output
    report.main(["--runs", str(runs), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "other, seeds 1: no charts/nothing in " in page and "| CartPole-v1, good |" in page
    counts = count_results(runs)
    assert len(counts) == 3 and set(counts.values()) == {1}
    assert [path for path in list_done(runs) if path.parent.name == "try_2" and "killed" in str(path)]
    for path in list_done(runs):
        found = json.loads((path.parent / "process.json").read_text())
        assert found["machine"]["commit"] == common.describe_machine()["commit"]
        assert found["cpu_seconds"] > common.read_points(path, "charts/cpu_seconds")[-1][1]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")}
    suite.write_text(text + 'curve = "charts/episodic_return"\n')  # which all have logged
    process = start_harness(suite, "--runs", runs, "--only", "*/other")
    assert "1 of 1 cells done" in process.communicate(timeout=60)[0] and process.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")} == before
    results = records.collect(runs / "a")["cells"]  # it forgets nothing of the others
    (missing,) = results["ppo/CartPole-v1/bad"]["missing"]
    assert missing["seed"] == 1 and "--env-id Nothing-v0" in missing["error"]
    assert [len(cell["runs"]) for cell in results.values()] == [1, 0, 1, 1]


def is_cell(process):
    """Return whether a process is the script of a cell, and no guard."""
    return "guard.py" not in " ".join(process.info["cmdline"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_harness_that_is_stopped_leaves_finished_cells_and_nothing_running(tmp_path, number):
    """With a cell of two processes under torchrun; the next call has nothing to do for what was finished."""
    runs = tmp_path / "runs"
    two = LONG.replace("python", "torchrun --standalone --nproc-per-node 2")
    suite = write_suite(tmp_path / "a.toml", [1], a=SHORT, long=two)
    process = start_harness(suite, "--runs", runs)
    wait_until(lambda: list_done(runs) and list(runs.rglob("long/*/try_1/*/checkpoint.pt")))
    assert len(find_processes(runs / "a")) >= 4  # guard, torchrun and its two
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    output, _ = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130 and "interrupted: what was finished is kept" in output, output
        assert "Traceback" not in output
    wait_until(lambda: not find_processes(runs / "a"))
    process = start_harness(suite, "--runs", runs, "--only", "*/a")
    assert "1 cells, 1 done before" in process.communicate(timeout=60)[0] and process.returncode == 0
    assert list(count_results(runs).values()) == [1]


def suspend_cells(runs):
    """Suspend the cells that have begun to train, and return their processes."""
    cells = [process for process in find_processes(runs / "a") if is_cell(process)]
    begun = [cell for cell in cells if list(Path(cell.info["cmdline"][-1]).rglob("checkpoint.pt"))]
    for cell in begun:
        cell.suspend()
    return begun


@pytest.mark.slow
def test_a_node_that_dies_half_way_costs_no_cell_and_repeats_none(tmp_path):
    """Two nodes on this machine, one killed while its cell runs: all cells are done in the end, none twice."""
    pytest.importorskip("ray")
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
        (cell,) = wait_until(
            lambda: len(cells := list(filter(is_cell, find_processes(runs / "a")))) == 1 and cells
        )
        cell.resume()
        output, _ = process.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert process.returncode == 0, output
    assert "again: ppo/CartPole-v1/a" in output
    assert set(count_results(runs).values()) == {1} and len(count_results(runs)) == len(seeds)
    assert len(list(runs.rglob("try_2"))) == 1 and not find_processes(runs / "a")


# ---- Report and comparison -------------------------------------------------------------------------------------------


def test_ours_and_peers_stand_side_by_side_in_a_suite(tmp_path):
    """A peer's version is in its events; the harness knows the commit of our scripts."""
    cells = []
    for name in ("ours", "peer"):
        path = tmp_path / name / "try_1"
        write_run(
            path / "run", ["eval/x", "charts/episodic_return"], 3, "elkai 2.0.1" * (name == "peer"), seed=1
        )
        machine = {"commit": "abc", "torch": "2"}
        (path / "process.json").write_text(json.dumps({"exit_code": 0, "machine": machine}))
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
    (tmp_path / "suite.json").write_text(json.dumps({"suite": "a", "cells": cells, "errors": []}))
    found = records.collect(tmp_path)["cells"].values()
    assert not any(cell["missing"] for cell in found)
    assert [cell["headline"] for cell in found] == ["eval/x"] * 2
    assert [cell["runs"][0]["value"] for cell in found] == [30.0] * 2
    assert [cell["runs"][0]["commit"] for cell in found] == ["abc", "elkai 2.0.1"]
    assert [cell["runs"][0]["final_return"] for cell in found] == [30.0] * 2
    assert [cell["runs"][0]["cpu_seconds"] for cell in found] == [6.0] * 2


def test_a_run_is_read_from_its_folder(tmp_path):
    """Steps, CPU-seconds and clock of each point, the threshold, and speed up to the last point."""
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "try_1" / "run"
    with SummaryWriter(str(folder)) as writer:
        for step, value in ((100, 1.0), (200, 3.0), (400, 2.0)):
            writer.add_scalar("charts/cpu_seconds", step / 50, step)
            writer.add_scalar("curve", value, step)
        writer.add_scalar("late", 1.0, 300)  # between two points of the clock
        writer.add_scalar("m", 2.5, 400)
    process = {"exit_code": 0, "machine": {"cpu": "x", "commit": "abc-dirty"}}
    cell = {"curve": "curve", "threshold": 2.5, "better": "higher", "headline": "m"}
    found = records.read_run(folder, cell, process)
    assert found["curve"] == [[100, 2.0, 1.0], [200, 4.0, 3.0], [400, 8.0, 2.0]] and found["value"] == 2.5
    reached = found["steps_to_threshold"], found["seconds_to_threshold"], found["steps_per_second"]
    assert reached == (200, 4.0, 50.0) and found["machine"] == process["machine"]
    assert found["commit"] == "abc-dirty"
    assert common.read_points(folder, "late")[0][:2] == [300, 6.0]
    assert records.read_run(folder, cell, {})["commit"] == "unknown"
    assert records.read_run(folder, cell | {"in_a_row": 2}, {})["steps_to_threshold"] is None
    assert records.read_run(folder, {"headline": "m"}, {})["steps_per_second"] == 50.0


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
    cell |= {"better": "higher", "cpus": 1, "gpus": 0, "environment": None, "script": script}
    return cell | {"headline": "eval/episodic_return", "runs": runs, "missing": []} | changes


def make_run(seed, value):
    run = {"seed": seed, "metrics": {"eval/episodic_return": value}, "env_steps": 10, "wall_seconds": 2.0}
    run |= {"cpu_seconds": 1.0, "device": "cpu", "commit": "abc", "value": value, "machine": None}
    run |= {"steps_per_second": 1000.0, "curve": [[0, 0.0, 1.0], [10, 1.0, value]]}
    return run | {"steps_to_threshold": 10 * seed, "seconds_to_threshold": 1.0 * seed}


def make_results(*cells, ratios=(), tables=(), suite="a"):
    names = [f"{c['script']}/{c['task']}/{c['setting']}" for c in cells]
    results = {"suite": suite, "cells": dict(zip(names, cells, strict=True)), "ratios": list(ratios)}
    return suites.SHOWN | results | {"tables": list(tables)}


def test_intervals_are_students_and_welchs():
    a, b = [1.0, 2.0, 3.0], [2.0, 3.0, 10.0]
    half = 4.303 / 3**0.5  # Student's t of two degrees of freedom, a deviation of 1
    assert records.find_interval(a) == pytest.approx((2 - half, 2 + half), rel=1e-3)
    low, high = records.find_interval(b, a)
    assert (low + high) / 2 == pytest.approx(3.0)
    errors = np.var(a, ddof=1) / 3, np.var(b, ddof=1) / 3
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / 2 + errors[1] ** 2 / 2)
    assert freedom == pytest.approx(2.21, abs=0.01)  # 3.93 in tables, between 4.303 and 3.182
    assert (high - low) / 2 == pytest.approx(3.93 * sum(errors) ** 0.5, rel=0.01)
    assert records.find_interval([1.0]) is None and records.find_interval([1.0, math.inf]) is None
    assert records.find_interval(a, [1.0]) is None
    low, high = records.find_interval([499.0, 498.0, 500.0], [500.0] * 3)  # one side may have no noise
    assert (low, high) == pytest.approx((-1 - half, -1 + half), rel=1e-3)


def test_ratios_are_those_of_medians_with_an_interval_by_logarithms():
    ratio, (low, high) = records.find_ratio([2.0, 2.1, 1.9], [4.0, 4.1, 3.9])
    assert ratio == 0.5 and 0.44 < low < 0.5 < high < 0.56
    assert low * high == pytest.approx(
        math.exp(2 * np.mean(np.log([2.0, 2.1, 1.9]) - np.log([4.0, 4.1, 3.9])))
    )
    for ours, peer in (
        ([1.0], [-1.0]),
        ([1.0], [math.inf]),
        ([1.0], [math.nan]),
        ([0.0], [1.0]),
        ([math.inf], [1.0]),
    ):
        assert (
            not 0 < records.find_ratio(ours, peer)[0] < math.inf and records.find_ratio(ours, peer)[1] is None
        )
    assert records.find_ratio([1.0, 1.0], [2.0, math.inf, 2.0]) == (0.5, None)
    a, b = [6.0, 5.0, 4.0, 3.0], [3.1, 2.4, 2.0, 1.5]  # about twice as much in every run
    assert records.find_ratio(a, b, paired=True)[1][1] < 2.2 < records.find_ratio(a, b)[1][1]


@pytest.mark.parametrize("num", [3, 5, 10])
def test_intervals_cover_what_they_say(num):
    """Of 95 % intervals, 95 hold the truth: of means and of differences, and of ratios of skewed values.

    A percentile bootstrap covers 74, 81 and 86 % for means of 3, 4 and 5 values, and 90 % for ten.
    """
    rng, found = np.random.default_rng(num), np.zeros(3)
    for _ in range(600):
        a, b = rng.normal(5.0, 1.0, (2, num))
        intervals = records.find_interval(a), records.find_interval(a, b)
        (low, high) = records.find_ratio(np.exp(a), 2 * np.exp(b))[1]
        found += [
            intervals[0][0] < 5 < intervals[0][1],
            intervals[1][0] < 0 < intervals[1][1],
            low < 0.5 < high,
        ]
    assert (abs(found / 600 - 0.95) < 0.035).all(), (
        found / 600
    )  # four standard deviations; Welch's is a bit wide


def test_ratios_that_are_published_lie_in_their_intervals():
    """As the ratio is that of the medians, and its interval that of the geometric means."""
    checked = 0
    for results in records.load_published().values():
        for ratio in results["ratios"]:
            sides = [results["cells"][ratio[side]] for side in ("ours", "peer")]
            if all(cell["runs"] for cell in sides):
                quantities = ratio["quantity"], ratio.get("peer_quantity", ratio["quantity"])
                value, interval = records.find_ratio(*map(records.get_values, sides, quantities))
                assert not interval or interval[0] < value < interval[1], ratio
                checked += bool(interval)
    assert checked >= 10


def test_quantities_count_with_and_without_the_prefix_of_evaluations():
    cell = make_cell([1.0], headline="eval/ours_elo")
    cell["runs"][0]["metrics"] = {"eval/ours_elo": 5.0}
    assert records.get_values(cell, "ours_elo") == records.get_values(cell, "eval/ours_elo") == [5.0]
    assert np.isnan(records.get_values(cell, "final_return"))
    cell["runs"][0] |= {"final_return": 3.0, "steps_to_threshold": None}
    assert records.get_values(cell, "final_return") == [3.0]
    assert records.get_values(cell, "steps_to_threshold") == [math.inf]


def test_threshold_is_the_first_point_at_it_in_the_right_direction():
    curve = [[1, 0.1, 3.0], [2, 0.2, 5.0], [3, 0.3, 2.0], [4, 0.4, 4.0], [5, 0.5, 5.0]]
    find = records.find_threshold
    assert find(curve, 4) == [2, 0.2, 5.0]
    assert find(curve, 3, "lower")[0] == 1 and find(curve, 2.5, "lower")[0] == 3
    assert find(curve, 6) is None and find([], 0) is None
    assert find(curve, 4, in_a_row=2)[0] == 5  # one alone is forgotten
    assert find(curve, 4, in_a_row=3) is None


def test_tables_say_what_the_results_say():
    peer = make_cell([100.0, 200.0], "sb3_ppo/CartPole-v1/tuned", command="python benchmark/peers/sb3_ppo.py")
    lost = make_cell([], "gnugo/Go/match", command="python benchmark/peers/gnugo.py", headline=None)
    lost["missing"] = [{"seed": seed, "error": "exit code 1: why"} for seed in (1, 2)]
    base = {"title": "return", "quantity": "headline", "better": "higher", "ours": "ppo/CartPole-v1/default"}
    ratios = [base | {"peer": "sb3_ppo/CartPole-v1/tuned"}, base | {"peer": "gnugo/Go/match"}]
    ours = make_cell([400.0, 410.0, 420.0])
    table = report.make_ratio_table(make_results(ours, peer, lost, ratios=ratios))
    low, high = records.find_ratio([400.0, 410.0, 420.0], [100.0, 200.0])[1]
    assert low < 1 < high
    line = f"| return | abc | 410 | 150 | 2.73 ({common.show(low)} to {common.show(high)}) |"
    assert line in table and "| return | gnugo | - | - | exit code 1: why |" in table
    close = make_cell([100.0, 101.0], "sb3_ppo/CartPole-v1/tuned")
    found = report.make_ratio_table(make_results(ours, close, lost, ratios=ratios))
    assert "| return | abc | 410 | 100 | **4.08** (3.86 to 4.31)" in found  # bold, as one is outside
    table = report.make_cell_table([ours, peer, lost], report.RESULT)
    assert "| CartPole-v1, default | return | 410 (400, 410, 420) | 1.00 | 3 |" in table
    assert "| CartPole-v1, tuned | return | 150 (100, 200) | 1.00 | 2 |" in table
    assert table.endswith("\n\n- Go, match, seeds 1, 2: exit code 1: why")
    six = make_cell([400.0, 410.0, 420.0] * 2)
    low, high = records.find_interval([400.0, 410.0, 420.0] * 2)
    shown = f"| 410 ({common.show(low)} to {common.show(high)}) | 1.00 | 6 |"
    assert shown in report.make_cell_table([six], report.RESULT)


def test_a_comparison_holds_each_cell_against_the_first_of_its_task():
    first = make_cell([1.0, 2.0, 3.0])
    better = make_cell([11.0, 12.0, 13.0], "ppo/CartPole-v1/b")
    other = make_cell([2.0, 1.0, 3.0], "ppo/CartPole-v1/c")
    alone = make_cell([], "ppo/Acrobot-v1/d", missing=[{"seed": 1, "error": "killed"}])
    text = report.make_comparison([first, better, other, alone])
    assert "| CartPole-v1, default | return | 2.00 (1.00, 2.00, 3.00) |  | 1.00 | 3 |" in text
    half = 2.776 * (1 / 3 + 1 / 3) ** 0.5  # Student's t of four degrees of freedom, deviations of 1
    assert f"12.0 (11.0, 12.0, 13.0) | **10.0** ({10 - half:.2f} to {10 + half:.1f}) | 1.00 | 3 |" in text
    assert "| CartPole-v1, c | return | 2.00 (2.00, 1.00, 3.00) | 0 (-2.27 to 2.27) |" in text
    assert "- Acrobot-v1, d, seeds 1: killed" in text


def test_numbers_are_shown_as_people_write_them():
    shown = {
        0.0: "0",
        8.9e-16: "0",
        -8.9e-16: "0",
        -0.4961: "-0.496",
        0.0653: "0.0653",
        0.98 - 0.97: "0.0100",
    }
    shown |= {4.567: "4.57", 123.4: "123", 52822.0: "52,822"}
    assert {x: common.show(x) for x in shown} == shown
    assert common.show(None) == common.show(float("nan")) == common.show(float("inf")) == "-"


SUITE_A = """seeds = [1, 2, 3]
[[cells]]
task = "CartPole-v1"
setting = "default"
command = "python algos/ppo.py"
headline = "eval/episodic_return"
[[tables]]
page = "ppo"
section = "a"
"""


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A repository with a suite `a` that has two runs in benchmark/results, and a folder of runs of it."""
    for name, path in (("RESULTS", "results"), ("SUITES", "suites"), ("FIGURES", "figures")):
        monkeypatch.setattr(common, name, tmp_path / path)
        (tmp_path / path).mkdir()
    (tmp_path / "suites" / "a.toml").write_text(SUITE_A)
    (tmp_path / "results" / "a.json").write_text(json.dumps(make_results(make_cell([1.0, 2.0]))))
    for name in ("a", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "suite.json").write_text("")
    monkeypatch.setattr(report, "publish", lambda published: None)

    def report_runs(*cells, **flags):
        def collect(folder):
            return make_results(*cells, suite=folder.name, tables=[{"page": "ppo", "section": "a"}])

        monkeypatch.setattr(records, "collect", collect)
        report.main(["--runs", str(tmp_path / "runs"), *(f"--{key}={value}" for key, value in flags.items())])
        assert not (tmp_path / "results" / "other.json").exists()  # no suite of this repository
        found = json.loads((tmp_path / "results" / "a.json").read_text())["cells"]
        return found["ppo/CartPole-v1/default"]

    return report_runs


def test_a_report_keeps_committed_runs_that_a_folder_lacks(published, tmp_path):
    """New runs take the place of those of their seeds; one that has failed is listed beside the committed one."""
    not_run = {"seed": 2, "error": records.NOT_RUN}
    found = published(make_cell([5.0], missing=[not_run]))
    assert [run["value"] for run in found["runs"]] == [5.0, 2.0] and not found["missing"]
    failed = not_run | {"error": "exit code 1"}
    found = published(make_cell([6.0], missing=[failed]))
    assert [run["value"] for run in found["runs"]] == [6.0, 2.0] and found["missing"] == [failed]
    other = make_cell([5.0], "ppo/CartPole-v1/other")
    assert [run["value"] for run in published(other)["runs"]] == [6.0, 2.0]  # a folder without the cell
    assert len(published(make_cell([1.0, 2.0, 3.0]))["runs"]) == 3
    assert len(published(make_cell([1.0]), out=tmp_path / "out")["runs"]) == 3  # which leaves results alone
    assert (tmp_path / "out" / "results.md").exists() and (tmp_path / "out" / "figures" / "a.png").exists()
    saved = json.loads((tmp_path / "out" / "results" / "a.json").read_text())
    assert saved["cells"] == make_results(make_cell([1.0]))["cells"]


def test_a_folder_without_runs_is_one_line(tmp_path):
    (tmp_path / "nothing").mkdir()
    for name, message in (("nothing", "no runs to report"), ("missing", "missing: no such folder")):
        with pytest.raises(ResultsError, match=message):
            report.main(["--runs", str(tmp_path / name), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_results_of_other_forms_are_told(tmp_path):
    """The list of cells of a run folder."""
    (tmp_path / "suite.json").write_text(json.dumps({"suite": "a", "cells": [], "errors": []}))
    with pytest.raises(ResultsError, match=r"suite.json: give the folder that it is in"):
        records.load(tmp_path / "suite.json")


def test_published_are_the_cells_that_a_suite_has_now(published, tmp_path):
    """A cell that left the suite leaves the pages, and its runs may be lacking; a new one is not run yet."""
    old = make_cell([1.0, 2.0]), make_cell([1.0, 2.0], setting="gone")
    (tmp_path / "results" / "a.json").write_text(json.dumps(make_results(*old)))
    new = SUITE_A.replace("default", "new").replace("ppo.py", "ppo.py --gamma 0.8")
    text = SUITE_A.replace("[[tables]]", new.partition("]\n")[2].partition("[[tables]]")[0] + "[[tables]]")
    (tmp_path / "suites" / "a.toml").write_text(text)
    cells = records.load_published()["a"]["cells"]
    assert list(cells) == ["ppo/CartPole-v1/default", "ppo/CartPole-v1/new"]
    assert len(cells["ppo/CartPole-v1/default"]["runs"]) == 2 and not cells["ppo/CartPole-v1/new"]["runs"]
    assert [m["seed"] for m in cells["ppo/CartPole-v1/new"]["missing"]] == [1, 2, 3]
    table = report.make_cell_table(list(cells.values()), {})
    assert "- CartPole-v1, new, seeds 1, 2, 3: not run yet" in table
    (tmp_path / "suites" / "a.toml").write_text(SUITE_A.replace("ppo.py", "ppo.py --gamma 0.9"))
    assert not records.load_published()["a"]["cells"]["ppo/CartPole-v1/default"]["runs"]  # of another command


def test_runs_of_a_tree_with_changes_are_not_published(published):
    """Neither ours nor a peer's, whose commit is its version."""
    machine = common.describe_machine()
    for command in ("python algos/ppo.py", "python benchmark/peers/sb3_ppo.py"):
        cell = make_cell([1.0, 2.0, 3.0], command=command)
        cell["runs"][2] |= {"machine": machine | {"commit": "abc-dirty"}, "commit": "sb3 1.0"}
        with pytest.raises(ResultsError, match=r"default, seed 3 ran with uncommitted changes: run it again"):
            published(cell)
        assert len(records.load(common.RESULTS / "a.json")["cells"]["ppo/CartPole-v1/default"]["runs"]) == 2
        assert "abc-dirty" in report.describe_machines([cell])
        cell["runs"][2]["machine"] |= {"commit": "abc"}
    assert len(published(cell)["runs"]) == 3


def test_suites_that_have_run_are_shown_with_their_curves(tmp_path, monkeypatch):
    """A line for each seed and their mean, by steps and by seconds; a folder that is no suite is left out."""
    from matplotlib.figure import Figure

    drawn, save, runs = {}, Figure.savefig, tmp_path / "runs"
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, dpi: (drawn.update({path.name: self}), save(self, path))
    )
    shared = {"curve": "c", "threshold": None, "better": "higher", "task": "T", "headline": "eval/x"}
    shared |= {"setting": "s", "script": "ppo", "command": "python algos/ppo.py", "name": "ppo/T/s"}
    cells = []
    for seed, num_points in ((1, 6), (2, 3), (3, 3)):
        attempt = runs / "a" / f"cell{seed}" / "try_1"
        write_run(attempt / "run", ["eval/x", "c"], num_points)
        (attempt / "process.json").write_text('{"exit_code": 0}')
        cells.append(shared | {"folder": f"cell{seed}", "seed": seed})
    write_run(runs / "own" / "run", ["eval/x"])
    (runs / "a" / "suite.json").write_text(json.dumps({"suite": "a", "cells": cells}))
    report.main(["--runs", str(runs), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "results.md").read_text()
    assert "## a" in page and "| T, s | eval/x | 40.0 (60.0, 30.0, 30.0) |  | 6.00 | 3 |" in page
    assert page.count("## ") == 1 and json.loads((tmp_path / "out" / "results" / "a.json").read_text())
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == {"a.png"} == drawn.keys()
    axes = drawn["a.png"].axes
    assert [(x.get_xlabel(), x.get_ylabel()) for x in axes] == [("steps", "c"), ("CPU-seconds", "c")]
    lines = [line for line in axes[0].lines if line.get_alpha()]  # thin: a seed each
    assert sorted(len(line.get_xdata()) for line in lines) == [3, 3, 6]
    assert axes[1].lines[0].get_xdata()[-1] == pytest.approx(12)


def run_compare(tmp_path, base, new):
    for name, cells in (("base", base), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(make_results(*cells)))
    return compare.main([str(tmp_path / "base.json"), str(tmp_path / "new.json")])


def test_comparison_fails_where_a_headline_metric_got_worse_beyond_noise(tmp_path, capsys):
    base = [480.0, 490.0, 500.0, 470.0, 500.0]
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([485.0, 470.0, 500.0, 495.0, 480.0])]) == 0
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([300.0, 310.0, 320.0, 290.0, 305.0])]) == 1
    assert "| headline | 488 | 305 | **worse** |" in capsys.readouterr().out
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([x + 300 for x in base])]) == 0
    higher = [x + 300 for x in base]
    assert run_compare(tmp_path, [make_cell(base, better="lower")], [make_cell(higher, better="lower")]) == 1
    assert run_compare(tmp_path, [make_cell([500.0] * 3)], [make_cell([499.0] * 3)]) == 1  # no noise at all
    assert run_compare(tmp_path, [make_cell([500.0] * 3)], [make_cell([500.0] * 3)]) == 0
    assert run_compare(tmp_path, [make_cell([500.0])], [make_cell([1.0])]) == 0  # one seed cannot tell
    for values in ([0.3] * 3, [0.1 + 0.2] * 3), ([0.1 + 0.2] * 3, [0.3] * 3):  # rounding is no noise
        assert run_compare(tmp_path, *([make_cell(side)] for side in values)) == 0
    assert run_compare(tmp_path, [make_cell(base)], [make_cell([float("nan")] * 5)]) == 1
    assert run_compare(tmp_path, [make_cell([float("nan")] * 5)], [make_cell(base)]) == 0
    failing = make_cell(base[:4], missing=[{"seed": 5, "error": "exit code 1"}])
    assert run_compare(tmp_path, [make_cell(base)], [failing]) == 1
    assert "failed: ppo/CartPole-v1/default: exit code 1" in capsys.readouterr().out
    assert run_compare(tmp_path, [failing | {"runs": []}], [failing | {"runs": []}]) == 1  # whatever BASE did
    with pytest.raises(ResultsError, match="no results of the same cell"):
        run_compare(tmp_path, [make_cell(base)], [make_cell(base, "ppo/CartPole-v1/other")])


def make_solved(steps, speeds=(1000.0, 1010.0, 990.0, 1005.0, 995.0), **changes):
    """A cell whose runs end at 500, and got to the threshold after so many steps, None for never, at such speeds."""
    cell = make_cell([500.0] * len(steps), **changes)
    for run_, step, speed in zip(cell["runs"], steps, speeds, strict=True):
        run_ |= {"steps_to_threshold": step, "steps_per_second": speed}
        run_ |= {"curve": [[0, 0, 20.0], [9000, 90, 500.0]]}
    return cell


def test_comparison_fails_where_learning_takes_longer(tmp_path, capsys):
    """Though all runs end at 500; at equal steps too, and where no run gets to the threshold any more."""
    steps, speeds = [1000, 1300, 900, 1200, 1100], [1000.0, 1100.0, 1050.0, 900.0, 950.0]
    base = make_solved(steps, speeds)
    assert run_compare(tmp_path, [base], [make_solved(steps[::-1], speeds[::-1])]) == 0
    assert run_compare(tmp_path, [base], [make_solved([3 * x for x in steps], speeds)]) == 1
    found = capsys.readouterr().out
    assert "| headline | 500 | 500 |  |" in found and "| speed | 997 | 997 |  |" in found
    assert "| steps | 1,091 | 3,272 | **worse** |" in found and "curve" not in found
    assert run_compare(tmp_path, [base], [make_solved(steps, [x / 2 for x in speeds])]) == 1
    assert (
        "| speed | 997 | 499 | **worse** |" in (found := capsys.readouterr().out)
        and found.count("worse*") == 1
    )
    assert (
        run_compare(tmp_path, [base], [make_solved(steps, [x / 1.2 for x in speeds])]) == 0
    )  # may be the machine
    assert run_compare(tmp_path, [base], [make_solved([x / 3 for x in steps], [3 * x for x in speeds])]) == 0
    assert run_compare(tmp_path, [base], [make_solved([None] * 5, speeds)]) == 1
    assert run_compare(tmp_path, [make_solved([None] * 5, speeds)], [base]) == 0
    assert run_compare(tmp_path, [base], [make_solved([*steps[:4], None], speeds)]) == 0  # one is luck
    capsys.readouterr()
    other = make_solved([3 * x for x in steps], [x / 2 for x in speeds], threshold=400)
    assert run_compare(tmp_path, [base], [other]) == 1  # what does not depend on the threshold is compared
    found = capsys.readouterr().out
    assert "| steps |" not in found and "| speed | 997 | 499 | **worse** |" in found


def test_a_speed_that_halves_is_found_in_every_published_cell():
    """At the noise of each cell's own seeds, in a comparison of that cell alone; in steps and seconds it was not."""
    checked = 0
    for results in records.load_published().values():
        for cell in results["cells"].values():
            if len(cell["runs"]) >= 3 and records.is_ours(cell):
                slow = json.loads(json.dumps(cell))
                for run_ in slow["runs"]:
                    run_["steps_per_second"] /= 2
                assert (
                    compare.find_p("speed", *(compare.find_losses(side)["speed"] for side in (cell, slow)))
                    < 0.01
                ), cell["setting"]
                checked += 1
    assert checked >= 20


def test_peers_and_missing_cells_are_not_compared(tmp_path, capsys):
    steps = [1000, 1300, 900, 1200, 1100]
    peer = {"name": "sb3_ppo/CartPole-v1/zoo", "command": "python benchmark/peers/sb3_ppo.py"}
    base, slow = make_solved(steps, **peer), make_solved([3 * x for x in steps], **peer)
    others = [make_cell([500.0] * 5, f"ppo/T{i}/s") for i in range(3)]
    assert run_compare(tmp_path, [base, *others], [slow, others[0]]) == 0
    found = capsys.readouterr().out
    assert found.endswith("\n1 cells compared: 0 worse beyond noise, 0 failed\n") and "sb3" not in found
    names = {"name": "our_go_search/Go/search", "command": "python benchmark/peers/our_go_search.py"}
    fast, half = (make_cell([x, 1.1 * x, 1.2 * x], threshold=None, **names) for x in (1000.0, 500.0))
    assert run_compare(tmp_path, [fast], [half]) == 1  # our own search
    assert run_compare(tmp_path, [fast, others[0]], [fast | {"headline": "eval/x"}, others[0]]) == 0
    unfinished = make_cell([500.0] * 4, missing=[{"seed": 5, "error": records.NOT_RUN}])
    assert run_compare(tmp_path, [make_cell([500.0] * 5)], [unfinished]) == 0


def test_stored_results_are_read(capsys):
    """Those of other programs alone, such as matches against GNU Go, are not compared."""
    for name, results in records.load_published().items():
        if any(records.is_ours(cell) for cell in results["cells"].values()):
            assert compare.main([str(common.RESULTS / f"{name}.json")] * 2) == 0
        assert "unknown" not in report.describe_machines(report.list_cells(results))


def test_run_folders_of_earlier_versions_are_read(tmp_path):
    """With an error list in suite.json, a hash and no name or path in a cell."""
    folder = tmp_path / "ppo" / "T" / "s" / "seed1-0123456789ab"
    write_run(folder / "try_1" / "T__ppo__1__5", ["eval/x"], seed=1)
    machine = {
        "cpu": "c",
        "cores": 2,
        "python": "3",
        "torch": "2",
        "gymnasium": "1",
        "commit": "abc",
        "date": "d",
    }
    process = {"machine": machine, "cpu_seconds": 7.5, "exit_code": 0}
    (folder / "try_1" / "process.json").write_text(json.dumps(process))
    cell = {"task": "T", "setting": "s", "command": "python algos/ppo.py", "seed": 1, "headline": "eval/x"}
    cell |= {
        "curve": None,
        "threshold": None,
        "in_a_row": 1,
        "better": "higher",
        "cpus": 1,
        "gpus": 0,
        "hours": 24,
    }
    cell |= {
        "environment": None,
        "score_best": False,
        "name": "ppo/T/s",
        "script": "ppo",
        "hash": folder.name[-12:],
    }
    cell |= {"folder": str(folder.relative_to(tmp_path))}
    other = cell | {"seed": 2, "folder": "ppo/T/s/seed2-0123456789ab"}
    errors = [{"name": "ppo/T/s", "seed": 2, "error": "exit code 1: x"}]
    content = {
        "suite": "a",
        "cells": [cell, other],
        "errors": errors,
        "ratios": [],
        "tables": [],
        "summary": "",
    }
    (tmp_path / "suite.json").write_text(json.dumps(content))
    (found,) = records.collect(tmp_path)["cells"].values()
    (run_,) = found["runs"]
    assert run_["cpu_seconds"] == 7.5 and run_["machine"] == machine and run_["value"] == 30.0
    assert found["missing"] == [{"seed": 2, "error": records.NOT_RUN}]


def simulate(num, drop, slow, speed, draw):
    """Shares of `num` comparisons of twenty cells, five seeds each, that find something, and that find cell 0.

    The end of a run hardly goes with its steps, its speed not at all. NEW is worse in cell 0, by so many standard
    deviations of the seeds.
    """
    found = np.zeros(2)
    for _ in range(num):
        sides = []
        for shift in (0.0, 1.0):
            steps, end, own = draw((3, 20, 5))
            losses = np.stack([0.3 * steps + 0.95 * end, steps, own])
            losses[:, 0] += shift * np.array([drop, slow, speed])[:, None]
            sides.append(losses)
        worse = compare.find_worse(compare.find_p_worse(*sides).ravel()).reshape(3, 20).any(0)
        found += [worse.any(), worse[0]]
    return found / num


@pytest.mark.parametrize("kind", ["normal", "skewed", "heavy tails"])
def test_what_a_comparison_finds_and_how_often_it_cries_wolf(kind):
    """The figures of benchmark/README.md; they hold for noise that is skewed or has heavy tails too."""
    rng = np.random.default_rng(4)
    draw = {
        "normal": rng.standard_normal,
        "skewed": lambda shape: (rng.lognormal(0, 0.5, shape) - 1.133) / 0.604,
        "heavy tails": lambda shape: rng.standard_t(4, shape) / 2**0.5,
    }[kind]
    assert simulate(500, 0, 0, 0, draw)[0] <= 0.08
    found = [
        simulate(150, *shifts, draw)[1] for shifts in ((3, 0, 0), (4, 0, 0), (0, 4, 0), (0, 0, 5), (3, 3, 0))
    ]
    assert (np.array(found) > [0.42, 0.75, 0.78, 0.88, 0.72]).all(), found


def test_results_that_are_none_are_one_line(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    for name in ("", "missing.json", "bad.json", "other.json", "runs"):
        path = str(tmp_path / name)
        with pytest.raises(ResultsError) as error:
            compare.main([path, path])
        assert "\n" not in str(error.value)
    command = [sys.executable, str(ROOT / "benchmark" / "compare.py"), path, path]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (found.returncode, found.stderr) == (2, f"compare.py: {error.value}\n")
