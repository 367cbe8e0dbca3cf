"""The benchmark harness: suites, guarded cells, runs, report and comparison."""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import tyro
from helpers import ENVIRONMENT, ROOT
from results import define_cell, make_cell, make_results, write_run, write_suite
from torch.distributed.run import get_args_parser
from torch.utils.tensorboard import SummaryWriter

from benchmark import common, records, report, run, runs
from benchmark import suite as suites
from benchmark.code import hash_file
from benchmark.common import ResultsError
from benchmark.machines import describe_machine
from benchmark.runs import Outcome
from benchmark.suite import read_suite

SHORT = "python algos/ppo.py --num-envs 8 --total-timesteps 2560 --eval-episodes 4"
SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))


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


# ---- Suites ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_suites_parse_against_the_scripts(path):
    """The parsers of scripts, peers and torchrun take the flags."""
    for cell in {cell.name: cell for cell in read_suite(path).cells}.values():
        launcher, *words = shlex.split(cell.command)
        flags = [*words[words.index(cell.program[-1]) + 1 :], "--seed", "1", "--run-dir", "runs"]
        if launcher == "torchrun":
            assert get_args_parser().parse_args(words).training_script == cell.path
        module = importlib.import_module(suites.get_module(cell.path))
        if cell.script == "r2d2_transformer":  # an edited copy of a script, whose flags it has, and one more
            flags = module.make_parser().parse_known_args(flags)[1]
            module = importlib.import_module("algos.r2d2_lstm")
        elif cell.script == "our_recipe":
            script, name, *flags = flags
            compile(module.read_edited_script(script, name), name, "exec")
            module = importlib.import_module(suites.get_module(script))
        if hasattr(module, "Args"):
            tyro.cli(module.Args, args=flags)
        else:
            module.make_parser().parse_args(flags)
        assert not cell.environment or (common.PEERS / f"requirements-{cell.environment}.txt").exists()


CELL = '[[cells]]\ntask = "T"\nsetting = "s"\ncommand = "python algos/ppo.py"\n'


def test_a_suite_lists_its_cells_seed_by_seed(tmp_path):
    """Compared runs follow one another. A cell's own headline precedes that of the file."""
    two = CELL.replace('"s"', '"t"').replace("python", "torchrun --standalone --nproc-per-node 2")
    start = "[defaults]\nseeds = [1, 7]\nheadline = 'eval/y'\n"
    path = tmp_path / "a.toml"
    path.write_text(f"{start}{CELL}headline = 'eval/x'\n{two}")
    cells = read_suite(path).cells
    found = [(cell.setting, cell.seed, cell.headline) for cell in cells]
    assert found == [("s", 1, "eval/x"), ("t", 1, "eval/y"), ("s", 7, "eval/x"), ("t", 7, "eval/y")]
    *_, one, two = (run.make_command(cell, "/its/python", tmp_path) for cell in cells)
    rest = ["benchmark/peers/clock.py", "algos/ppo.py", "--seed", "7", "--run-dir", str(tmp_path)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert one == ["/its/python", *rest] and two == ["/its/python", *launcher, *rest]
    path.write_text(f"{start}{CELL}treshold = 475\n")
    with pytest.raises(ResultsError, match="cell 1: unknown key treshold; there are better, command,"):
        read_suite(path)


SHARED = """
[defaults]
seeds = [1]
command = "python algos/ppo.py {flags} --eval-episodes 0"
headline = "eval/x"
curve = "c"
threshold = 5
[settings.peer]
command = "python -m benchmark.peers.sb3_ppo"
environment = "sb3"
threshold = 6
[[cells]]
task = "A"
setting = ["ours", "peer"]
flags = "--gamma 0"
[[cells]]
task = ["B", "C"]
setting = "peer"
seeds = [3]
threshold = [7, 8]
[[cells]]
task = "D"
[cells.flags]
plain = ""
two-flags = "--clip-vloss --no-anneal-lr"
[[ratios]]
title = ["speed", "steps"]
quantity = ["steps_per_second", "env_steps"]
ours = "ppo/A/ours"
peer = "sb3_ppo/A/peer"
[[tables]]
page = ["p", "q"]
section = "s"
"""


def test_an_entry_of_a_suite_takes_defaults_and_stands_for_several_cells(tmp_path):
    """A cell's own keys precede those of its setting, which precede the defaults. Flags are put at their
    place in the command, or at its end."""
    path = tmp_path / "a.toml"
    path.write_text(SHARED)
    suite = read_suite(path)
    peer = "python -m benchmark.peers.sb3_ppo"
    found = [
        (cell.name, cell.seed, cell.command, cell.threshold, cell.environment, cell.headline, cell.curve)
        for cell in suite.cells
    ]
    assert found == [
        ("ppo/A/ours", 1, "python algos/ppo.py --gamma 0 --eval-episodes 0", 5, None, "eval/x", "c"),
        ("sb3_ppo/A/peer", 1, f"{peer} --gamma 0", 6, "sb3", "eval/x", "c"),
        ("sb3_ppo/B/peer", 3, peer, 7, "sb3", "eval/x", "c"),
        ("sb3_ppo/C/peer", 3, peer, 8, "sb3", "eval/x", "c"),
        ("ppo/D/plain", 1, "python algos/ppo.py --eval-episodes 0", 5, None, "eval/x", "c"),
        (
            "ppo/D/two-flags",
            1,
            "python algos/ppo.py --clip-vloss --no-anneal-lr --eval-episodes 0",
            5,
            None,
            "eval/x",
            "c",
        ),
    ]
    assert suite.ratios == [
        suites.Ratio("speed", "steps_per_second", "ppo/A/ours", "sb3_ppo/A/peer"),
        suites.Ratio("steps", "env_steps", "ppo/A/ours", "sb3_ppo/A/peer"),
    ]
    assert suite.tables == [suites.Table("p", "s"), suites.Table("q", "s")]
    assert suite.picture == suites.Picture("both", False)


def test_the_suite_in_the_readme_is_one(tmp_path):
    """It has the cells that its comments promise."""
    text = (ROOT / "benchmark" / "README.md").read_text()
    path = tmp_path / "a.toml"
    path.write_text(re.search(r"```toml\n(.*?)```", text, re.S)[1])
    suite = read_suite(path)
    assert [(cell.name, cell.command) for cell in suite.cells if cell.seed == 3] == [
        ("sb3_ppo/CartPole-v1/tuned", "python -m benchmark.peers.sb3_ppo"),
        ("ppo/CartPole-v1/default", "python algos/ppo.py"),
        ("ppo/CartPole-v1/no-anneal", "python algos/ppo.py --no-anneal-lr"),
        ("ppo/CartPole-v1/long", "python algos/ppo.py --total-timesteps 200000"),
        ("ppo/Acrobot-v1/default", "python algos/ppo.py --env-id Acrobot-v1 --norm-obs"),
        ("sb3_ppo/Acrobot-v1/tuned", "python -m benchmark.peers.sb3_ppo --env-id Acrobot-v1"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('curve = "c"', 'curv = "c"', "defaults: unknown key curv; there are better, command, cpus,"),
        ('curve = "c"', 'task = "c"', "defaults: unknown key task;"),
        ("environment", "enviroment", "settings.peer: unknown key enviroment;"),
        ("[settings.peer]", "[settings.pear]", "settings: no cell has the setting pear"),
        (SHARED, 'settings.peer = "sb3"', "settings.peer = 'sb3' has to be a dict"),
        ("[7, 8]", "[7]", r"cell 2: lists need .* at least one \(task has 2, threshold has 1\)"),
        ("[7, 8]", "[]", r"cell 2: lists need .* \(task has 2, threshold has 0\)"),
        ('["ours", "peer"]', "[]", r"cell 1: lists need .* \(setting has 0\)"),
        ('["speed", "steps"]', '["speed"]', r"ratios: lists need .* \(title has 1, quantity has 2\)"),
        ('task = "D"', 'task = "D"\nsetting = "s"', r"cell 3: \[cells.flags\] names the settings"),
        ("two-flags", "curve", r"cell 3: curve has to be above \[cells.flags\]"),
        ('"--gamma 0"', "0", "cell 1: flags = 0 has to be a str"),
        ("seeds = [1]", "", "cell 1: seeds = None: write seeds"),
        ("seeds = [3]", "seeds = []", r"cell 2: seeds = \[\]: write seeds"),
        ("[defaults]", "[picture]\nx = 1\n[defaults]", "picture: unknown key x; there are by, logarithmic"),
        ("[defaults]", 'picture.by = "step"\n[defaults]', "picture: by = 'step' has to be steps, seconds or"),
        ("[defaults]", "[headline]\nppo = 'x'\n[defaults]", "unknown key headline; there are cells, def"),
    ],
)
def test_a_suite_that_is_not_understood_is_refused(tmp_path, old, new, message):
    """The line names the file, the entry and the key."""
    path = tmp_path / "a.toml"
    assert SHARED.count(old) == 1
    path.write_text(SHARED.replace(old, new))
    with pytest.raises(ResultsError, match=rf"^{path}[:,] {message}"):
        read_suite(path)


def test_the_hash_is_of_the_command_and_of_all_files_it_uses(tmp_path, monkeypatch):
    """A script's siblings, a task that a flag names, a network that a peer plays with; no neighbours.

    A script that is edited while its suite runs stops its cell.
    """
    ours = {"algos/alphazero_go.py", "envs_shared/go.py", "envs_shared/go_gtp.py"}
    assert {*map(str, suites.find_used_files(["algos/alphazero_go.py"]))} == ours
    peer = {*map(str, suites.find_used_files(["benchmark/peers/gnugo_match.py"]))}
    assert peer >= ours | {"benchmark/checkpoints/go5x5.pt", "benchmark/peers/go_engine.py"}

    monkeypatch.setattr(common, "ROOT", tmp_path)
    (tmp_path / "algos").mkdir()
    hashes = []
    for file, text, flags in (
        ("algos/ppo.py", "", ""),
        ("algos/ppo.py", "#", ""),
        ("algos/ppo.py", "", " --env-id tasks:T-v0"),
        ("tasks.py", "", " --env-id tasks:T-v0"),
        ("algos/ppo.py", "", ""),
    ):
        (tmp_path / file).write_text(text)
        cell = define_cell(f"python algos/ppo.py{flags}", setting=f"s{len(hashes)}", seed=1)
        hashes.append(cell.hash())
    assert len({*hashes}) == 4 and hashes[0] == hashes[-1]
    with pytest.raises(ResultsError, match=r"^algos/ppo.py has changed since the suite was started$"):
        run.run_cell(cell, tmp_path / "seed0-of-another-hash", "python")


# ---- Cells -------------------------------------------------------------------------------------------------


@pytest.fixture
def run_python(tmp_path, monkeypatch):
    """Run code as a cell, and log a run in its name. Returns the folder and the outcome."""

    def run_code(code, given="", tags=("eval/x",), num_points=3, **keys):
        cell = define_cell(**keys)
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}-{cell.hash()}"
        monkeypatch.setattr(run, "TRIES", 1)
        monkeypatch.setattr(run, "make_command", lambda cell, python, path: [python, "-c", code, str(path)])
        run.run_cell(cell, folder, sys.executable, given)
        write_run(folder / "try_1" / "run", tags, num_points)
        return folder / "try_1", runs.find_run(folder, cell)

    return run_code


def test_a_run_is_read_from_its_events(run_python):
    """Metrics are the last values of evaluations. Seconds are those of training, or of the clock for GPUs."""
    tags = "charts/episodic_return", "eval/x", "best/length", "losses/x"
    keys = {"curve": "eval/x", "threshold": 150, "seed": 3}
    path, outcome = run_python("", tags=tags, num_points=500, **keys)
    found, process = outcome.run, json.loads((path / "process.json").read_text())
    assert found["seed"] == 3 and found["metrics"] == {"eval/x": 5000.0, "best/length": 5000.0}
    assert found["env_steps"] == 50_000 and found["steps_per_second"] == pytest.approx(50)
    assert found["steps_to_threshold"] == 1500 and found["seconds_to_threshold"] == pytest.approx(30)
    assert found["final_return"] == pytest.approx(4755)  # of the steps 45,100 to 50,000
    assert found["cpu_seconds"] == process["cpu_seconds"] and found["machine"] == describe_machine()
    assert found["code"] == {"algos/ppo.py": hash_file("algos/ppo.py")}
    steps = [step for step, _, _ in found["curve"]]  # thinned, but for the last point and the threshold's
    assert [1500, 30.0, 150.0] in found["curve"]
    steps.remove(1500)
    assert 30 <= len(steps) <= runs.NUM_POINTS and set(np.diff(steps)) == {900}
    assert found["curve"][-1] == [50_000, 1000.0, 5000.0]
    on_gpu = runs.find_run(path.parent, define_cell(gpus=1, **keys)).run
    assert on_gpu["seconds_to_threshold"] <= on_gpu["wall_seconds"] < 30


def test_a_run_that_lacks_what_the_suite_asks_for_has_failed(run_python):
    """The error lists its tags. If the suite then asks for one of them, the same run counts.

    Nor does a run count whose end nobody has seen, or whose guard was killed.
    """
    path, found = run_python("", tags=("eval/x", "charts/y"), curve="eval/none", seed=3)
    there = "(there are: eval/x, charts/y, charts/cpu_seconds)"
    assert found == Outcome(error=f"no eval/none in {path / 'run'} {there}", is_final=True)
    cell = define_cell(headline="charts/y")
    assert runs.find_run(path.parent, cell).run["metrics"] == {"charts/y": 30.0, "eval/x": 30.0}
    (path / "process.json").unlink()
    assert runs.find_run(path.parent, cell) == Outcome(error=runs.NOT_RUN)
    assert run_python("import os; os.kill(os.getppid(), 9)")[1] == Outcome(error="exit code -9: ")


def test_best_is_scored_after_the_run_if_the_cell_asks_for_it(tmp_path, monkeypatch):
    """By the script itself. The seconds are not part of the run's. A score that is no number is a failure."""
    commands, scores = [], "eval/x: 7\neval/y: -1.5e-05"

    def execute(command, cell, log, gpus):
        commands.append(command)
        log.write_text(f"hello\n{scores}\n")
        return {"exit_code": 0, "cpu_seconds": len(commands)}

    monkeypatch.setattr(run, "execute", execute)
    cell = define_cell("python algos/ppo.py --gamma 0.9", score_best=True, seed=4)
    folder = tmp_path / f"seed4-{cell.hash()}"
    run.run_cell(cell, folder, "python")
    flags = "--evaluate best.pt --eval-episodes 100 --seed 4"
    assert commands[1:] == [["python", "algos/ppo.py", *flags.split()]]
    write_run(folder / "try_1" / "run", ["eval/x"])
    found = runs.find_run(folder, cell).run
    assert found["metrics"] == {"eval/x": 30.0, "best/x": 7, "best/y": -1.5e-5} and found["cpu_seconds"] == 1
    scores = "eval/x: nan"
    found = run.run_cell(cell, tmp_path / cell.hash(), "python")
    assert found.error.startswith("no scores of best.pt: eval/x: nan (log: ") and found.is_final


def test_cpu_seconds_are_those_of_all_processes_of_a_cell(run_python):
    """They include a child for which nobody waits."""
    child = "[sys.executable, '-c', 'while True: pass']"
    path, _ = run_python(f"import subprocess, sys, time; subprocess.Popen({child}); time.sleep(4)")
    assert json.loads((path / "process.json").read_text())["cpu_seconds"] > 0.5


def test_a_cell_has_its_gpus_one_thread_and_no_stdin(run_python, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray does in its worker
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'],"
    for num_gpus, given, shown in ((0, "", ""), (1, "", "3"), (2, "1,2", "1,2")):
        path, _ = run_python(f"{code} repr(sys.stdin.read()))", given, gpus=num_gpus)
        assert (path / "log.txt").read_text() == f"{shown} 1 ''\n"


# Starts a daemon in a session of its own that ignores signals, and has the folder of the attempt, the last
# argument, in its command line.
DAEMON = """
import os, subprocess, sys, time
from pathlib import Path

deaf = "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('up'); "
deaf += "time.sleep(600)"
subprocess.Popen([sys.executable, "-uc", deaf, sys.argv[1]], start_new_session=True)
while "up" not in Path(sys.argv[1], "log.txt").read_text():
    time.sleep(0.05)
print("ready")
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="guards kill the process group alone")


@on_linux
@pytest.mark.parametrize(
    ("end", "hours", "error"),
    [
        ("os.kill(os.getpid(), 9)", 1, "exit code -9: ready"),
        ("time.sleep(90)", 10 / 3600, "not done after 0.00277778 hours"),
    ],
)
def test_what_a_cell_leaves_running_ends_with_it(run_python, end, hours, error):
    """What crashed has failed, whatever it has logged. The reason is the last line written."""
    path, found = run_python(DAEMON + end, hours=hours)
    assert not find_processes(path)
    assert found.error == error and "ready" in (path / "log.txt").read_text()


# ---- Runs --------------------------------------------------------------------------------------------------


def test_cells_take_the_cores_and_gpus_that_they_ask_for(monkeypatch):
    """On a machine with three cores and two GPUs."""
    given, end = {}, threading.Event()

    def run_cell(cell, gpus):
        given[cell.setting] = gpus
        assert end.wait(60)

    monkeypatch.setattr(run, "run_cell", run_cell)
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    # Cores and GPUs; what needs more cores than there are runs alone
    sizes = {"a": (1, 1), "b": (1, 2), "c": (3, 0), "d": (2, 1), "alone": (9, 0)}
    cells = [define_cell(setting=name, cpus=x, gpus=y) for name, (x, y) in sizes.items()]
    start = run.start_here(cells)
    futures = [start(cell) for cell in cells]
    assert [future is not None for future in futures] == [True, False, False, True, False]
    end.set()
    assert not futures[0].result(60) and not futures[3].result(60) and not start(cells[-1]).result(60)
    assert given == {"a": "4", "d": "7", "alone": ""}
    with pytest.raises(ResultsError, match="lacks the GPUs of ppo/T/s"):
        run.start_here([define_cell(gpus=3)])


TRAIN = "python algos/reinforce_tsp_attention.py --env-id tsp5-uniform --num-epochs 10 --steps-per-epoch 12"
TRAIN += " --batch-size 64 --eval-episodes 20"


def test_a_killed_cell_resumes_its_run(tmp_path):
    """With a script that resumes exactly, the result is that of a run which nobody killed.

    One kill is of the script, the other of the harness, which is then started again. Curve and clock are
    those of one run, and the CPU-seconds are those of all three attempts.
    """
    suite = write_suite(tmp_path / "a.toml", whole=TRAIN, killed=TRAIN)
    keys = 'headline = "eval/greedy_length"'
    text = re.sub("^headline.*$", keys, suite.read_text(), flags=re.M)
    curve = 'curve = "eval/greedy_length"\nbetter = "lower"\nthreshold = 0\n'
    suite.write_text(text.replace("command", f"{curve}command"))
    root = tmp_path / "runs"
    attempt = root / "a" / "reinforce_tsp_attention" / "CartPole-v1" / "killed"  # the task's name alone

    def find_done():
        for path in attempt.glob("*/try_1/*/checkpoint.pt"):
            return torch.load(path, weights_only=True)["progress"]["iteration"]

    flags = suite, "--runs", root, "--only", "*/killed"
    harness = start_harness(*flags)
    wait_until(lambda: (find_done() or 0) >= 3)
    (script,) = find_processes(attempt, "guard.py")
    script.kill()
    wait_until(lambda: find_done() >= 6)
    harness.kill()
    output, _ = harness.communicate(timeout=60)
    assert output.count(": log: ") == 2 and output.count("try_1/log.txt") == 2
    wait_until(lambda: not find_processes(attempt))
    output, _ = start_harness(suite, "--runs", root).communicate(timeout=240)
    assert "2 of 2 cells done" in output, output

    (path,) = attempt.glob("*/try_1")
    (whole,) = attempt.parent.glob("whole/*/try_1")
    assert len([*path.parent.iterdir()]) == 1
    checkpoints = [torch.load(next(x.glob("*/checkpoint.pt")), weights_only=True) for x in (whole, path)]
    assert all(torch.equal(*pair) for pair in zip(*(x["agent"].values() for x in checkpoints), strict=True))
    cells = records.collect(root / "a")["cells"].values()
    one, other = (cell["runs"][0] for cell in cells)
    assert one["metrics"] == other["metrics"] and one["env_steps"] == other["env_steps"]
    assert [(x, score) for x, _, score in one["curve"]] == [(x, score) for x, _, score in other["curve"]]
    assert len(one["curve"]) == 10
    seconds = [point.value for point in runs.read_events(next(path.glob("*/"))).Scalars("charts/cpu_seconds")]
    assert len(seconds) == 10 and seconds == sorted(seconds)
    reports = [json.loads((path / f"log{x}.json").read_text()) for x in ("_1", "_2", "")]
    assert [report["exit_code"] for report in reports] == [-9, None, 0]
    assert other["cpu_seconds"] == pytest.approx(sum(report["cpu_seconds"] for report in reports))


def test_time_in_which_a_run_stood_still_is_not_its_own(tmp_path, monkeypatch):
    """Nor are points that it repeats counted twice: of 6 points, 2 were lost, and one is of a step again."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for start, steps in ((1000, (100, 200, 300, 400)), (5000, (200, 300, 400))):
        now[0] = start
        with SummaryWriter(str(tmp_path / "run"), purge_step=201) as writer:
            for step in steps:
                now[0] += 10
                writer.add_scalar("eval/x", step, step)
                if (start, step) != (5000, 200):
                    writer.add_scalar("charts/cpu_seconds", step * 0.02, step)
    process = {"cpu_seconds": 9.0, "machine": describe_machine()}
    cell = define_cell(curve="eval/x", threshold=200, in_a_row=2, gpus=1)
    found = runs.read_run(tmp_path / "run", cell, process)
    assert found["curve"] == [[100, 10, 100], [200, 30, 200], [300, 40, 300], [400, 50, 400]]
    assert found["wall_seconds"] == 50 and found["steps_to_threshold"] == 300


def test_a_run_is_resumed_only_if_it_was_killed(tmp_path):
    """Not one that ended, refused its input, has no checkpoint, is of a peer, or still runs."""
    cell = define_cell()
    attempt = tmp_path / "try_1"
    (attempt / "run").mkdir(parents=True)
    assert run.choose_folder(tmp_path, cell) == tmp_path / "try_2"
    (attempt / "run" / "checkpoint.pt").touch()
    (attempt / "log.txt").write_text("ppo.py: error: no\n")
    assert run.choose_folder(tmp_path, cell) == attempt
    assert run.choose_folder(tmp_path, define_cell("python -m benchmark.peers.sb3_ppo")).name == "try_2"
    command = run.make_command(cell, "python", attempt)
    assert command[-2:] == ["--resume", f"{attempt}/run/checkpoint.pt"]
    for exit_code, name in ((-9, "try_1"), (1, "try_1"), (2, "try_2"), (None, "try_2"), (0, "try_2")):
        (attempt / "process.json").write_text(json.dumps({"exit_code": exit_code, "cpu_seconds": 1}))
        assert run.choose_folder(tmp_path, cell).name == name
    (attempt / "process.json").unlink()
    code = "import time; print('up'); time.sleep(5)"
    sleeping = threading.Thread(
        target=run.execute, args=([sys.executable, "-uc", code], cell, attempt / "log.txt", "")
    )
    sleeping.start()
    wait_until(lambda: (attempt / "log.txt").read_text() == "up\n")
    assert run.choose_folder(tmp_path, cell).name == "try_2"
    sleeping.join()
    assert run.choose_folder(tmp_path, cell).name == "try_1"


def test_expected_times_are_those_of_earlier_runs(tmp_path, monkeypatch, capsys):
    """Of the committed ones, whose median counts, and then of earlier seeds in this call."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    suite = write_suite(tmp_path / "a.toml", (1, 2), known=SHORT, other=f"{SHORT} --gamma 0.9")
    cells = read_suite(suite).cells
    cell = make_cell([1.0, 2.0, 3.0], "ppo/CartPole-v1/known", command=SHORT, cpus=2)
    for made, seconds, cpu_seconds in zip(cell["runs"], (60, 7, 600), (60, 240, 60), strict=True):
        made |= {"wall_seconds": seconds, "cpu_seconds": cpu_seconds}
    records.save_results(tmp_path / "a.json", make_results(cell))
    before = sorted(tmp_path.iterdir())
    assert run.main(run.Args(suite, tmp_path / "runs", dry_run=True)) == 0
    assert sorted(tmp_path.iterdir()) == before
    assert capsys.readouterr().out.splitlines() == [
        "ppo/CartPole-v1/known, seed 1: about 2 min",
        "ppo/CartPole-v1/other, seed 1: unknown time",
        "ppo/CartPole-v1/known, seed 2: about 2 min",
        "ppo/CartPole-v1/other, seed 2: unknown time",
        "4 cells, one after another: about 4 min without 2 of unknown time",
    ]
    # With --old, seeds of today's code are left out: here 2, as 1 is of earlier code
    for made, found in zip(cell["runs"], ("0", hash_file("algos/ppo.py")), strict=False):
        made["code"] = {"algos/ppo.py": found}
    records.save_results(tmp_path / "a.json", make_results(cell))
    run.main(run.Args(suite, tmp_path / "runs", "*/known", dry_run=True, old=True))
    assert [line[:31] for line in capsys.readouterr().out.splitlines()] == [
        "ppo/CartPole-v1/known, seed 1: ",
        "1 cells, one after another: abo",
    ]

    class Future:
        def __init__(self, cell):
            metrics = {"metrics": {cell.headline: 7.0}}
            self.outcome = Outcome(metrics, seconds=7200.0 if cell.setting == "other" else 240.0)

        def exception(self):
            return None

        def result(self):
            return self.outcome

    busy = []

    def submit(cell, *_):  # one after another
        if not busy:
            busy.append(Future(cell))
            return busy[0]

    def wait(running, *_):
        return SimpleNamespace(done=[busy.pop()])

    monkeypatch.setattr(run, "wait", wait)
    run.run_cells({cell: tmp_path for cell in cells}, submit, run.find_expected("a"))
    assert [line.partition("7 ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "after 4 min; 3 left, about 4 min without 2 of unknown time",
        "after 2.0 h; 2 left, about 2.1 h",
        "after 4 min; 1 left, about 2.0 h",
        "after 2.0 h; 0 left",
    ]
    one, two, three, _ = cells
    started = {one: time.monotonic() - 100, two: time.monotonic()}
    assert run.show_rest([three], started, {SHORT: 300.0, two.command: 100.0}) == "about 5 min"


BY_TORCHRUN = """why it ended
W1128 11:47:47.2 12 torch/distributed/elastic/api.py:900] Sending process 1 closing signal SIGTERM
E1128 11:47:47.3 12 torch/distributed/elastic/api.py:1002] failed (exitcode: {}) local_rank: 0
more"""


@pytest.mark.parametrize(
    ("exit_code", "log", "error", "num_tries"),
    [
        (25, "|##| 1/1\r|###| 2/2\nwhy it ended", "exit code 25: why it ended", 3),
        (2, "╭─ Bad ─╮\n│ --x: no  │\n│ ─── │\n╰─────╯", "exit code 2: --x: no", 1),
        (1, BY_TORCHRUN.format(2), "exit code 2: why it ended", 1),
    ],
)
def test_a_cell_that_crashes_starts_over_twice(tmp_path, monkeypatch, exit_code, log, error, num_tries):
    """One that would fail in the same way again is not repeated. The reason is the last line or a refusal."""
    cell = define_cell()
    folder = tmp_path / cell.hash()

    def execute(command, cell, path, gpus):
        path.write_text(log)
        return {"exit_code": exit_code, "cpu_seconds": 0}

    monkeypatch.setattr(run, "execute", execute)
    found = run.run_cell(cell, folder, "python")
    tries = [f"try_{i + 1}" for i in range(num_tries)]
    assert sorted(path.name for path in folder.iterdir()) == tries
    assert found.error == f"{error} (log: {folder / tries[-1] / 'log.txt'})"


def test_a_failing_cell_and_a_killed_one_take_no_other_down(tmp_path):
    """One cell always fails, one is killed once, one lacks its curve. The next call repeats nothing that is
    done."""
    runs = tmp_path / "runs"
    commands = {"bad": f"{SHORT} --num-envs 0", "killed": SHORT.replace("2560", "5120"), "other": SHORT}
    suite = write_suite(tmp_path / "a.toml", **commands)
    text = suite.read_text()
    suite.write_text(f'{text}curve = "charts/nothing"\n')  # of the last cell
    harness = start_harness(suite, "--runs", runs)
    (victim,) = wait_until(lambda: find_processes(runs / "a" / "ppo" / "CartPole-v1" / "killed", "guard.py"))
    victim.kill()
    output, _ = harness.communicate(timeout=240)
    assert harness.returncode == 1 and "1 of 3 cells done" in output, output
    assert "failed: ppo/CartPole-v1/bad, seed 1: exit code 2: ppo.py: error: --num-envs (0)" in output
    assert "failed: ppo/CartPole-v1/other, seed 1: no charts/nothing in " in output
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")}
    assert len(before) == 4  # two of the cell that was killed
    text += 'curve = "charts/episodic_return"\nthreshold = 5\n'  # which all have logged
    suite.write_text(text)
    harness = start_harness(suite, "--runs", runs, "--only", "*/[ko]*")
    assert "2 of 2 cells done" in harness.communicate(timeout=240)[0] and harness.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("process.json")} == before
    report.main(report.Args(runs, tmp_path / "out"))  # it forgets nothing of the others
    page = (tmp_path / "out" / "results.md").read_text()
    assert "- CartPole-v1, bad, seed 1: exit code 2" in page and "| CartPole-v1, killed |" in page
    # Steps and seconds to the threshold
    assert re.search(r"^\| CartPole-v1, other \| .* \| \d+ \| 0\.\d+ \| [\d.]+ \| 1 \|$", page, re.M), page


@on_linux
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
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
    (report,) = tmp_path.rglob("try_1/log.json")  # which counts if the run is resumed
    assert json.loads(report.read_text())["cpu_seconds"] > 1


@pytest.mark.slow
def test_cells_run_on_a_ray_cluster(tmp_path, monkeypatch):
    """Here one of this machine. A cell that fails is told as on one machine, and its processes end with
    it."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise it writes a token into the home folder
    monkeypatch.setitem(ENVIRONMENT, "RAY_AUTH_MODE", "disabled")
    missing = SHORT.replace("algos/ppo.py", "algos/ppo.py --env-id NoSuch-v0")
    suite = write_suite(tmp_path / "a.toml", good=SHORT, bad=missing)
    context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        address = context.address_info["gcs_address"]
        harness = start_harness(suite, "--runs", tmp_path / "runs", "--address", address)
        output, _ = harness.communicate(timeout=240)
    finally:
        ray.shutdown()
    assert harness.returncode == 1 and "1 of 2 cells done" in output, output
    assert "bad, seed 1: exit code 2: ppo.py: error: --env-id NoSuch-v0" in output
    (process,) = (tmp_path / "runs").rglob("good/**/process.json")
    assert json.loads(process.read_text())["exit_code"] == 0 and not find_processes(tmp_path, "pytest")


@pytest.mark.parametrize("is_changed", [False, True])
def test_published_figures_are_made_again_from_raw_data(
    run_python, tmp_path, monkeypatch, capsys, is_changed
):
    """With their thinned curves. --check names what differs, and writes nothing."""
    monkeypatch.setattr(common, "SUITES", tmp_path)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    path, _ = run_python("", num_points=500, curve="eval/x", seed=3)
    cell = vars(define_cell(curve="eval/x", seed=3)) | {"folder": str(path.parent)}
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    (folder / "suite.json").write_text(json.dumps({"suite": "s", "cells": [cell], "levels": {}}))
    results = records.collect(folder)
    (run_,) = results["cells"][cell["name"]]["runs"]
    if is_changed:
        run_["curve"][7][2] += 0.1
        run_["env_steps"] += 1
    records.save_results(tmp_path / "s.json", results)
    before = (tmp_path / "s.json").read_bytes()
    page = tmp_path / "page.md"
    page.write_text("a")
    monkeypatch.setattr(report, "make_pages", lambda published: {page: "b" if is_changed else "a"})
    capsys.readouterr()
    code = report.main(report.Args(runs=tmp_path / "runs", check=True))
    assert code == is_changed and (tmp_path / "s.json").read_bytes() == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"s: {0 if is_changed else 1} runs have what is published"
    different = [f"s: {cell['name']}, seed 3 has another env_steps, curve", f"{page} is another page"]
    assert lines[1:] == (different if is_changed else []) and page.read_text() == "a"
    with pytest.raises(ResultsError, match="--check writes nothing"):
        report.main(report.Args(runs=tmp_path / "runs", out=tmp_path / "out", check=True))
