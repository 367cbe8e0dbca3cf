"""Other people's programs, side by side with ours: their flags, what they log, and a short real run of
each."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import ENVIRONMENT, ROOT, read_scalars

from benchmark.peers import clock, gnugo_match, go_engine
from benchmark.runs import read_events, read_run, read_text
from benchmark.suite import Cell
from envs_shared.go import Go

PEERS = ROOT / "benchmark" / "peers"

RETURNS = "charts/episodic_return eval/episodic_return eval/episodic_return_std eval/episodic_length"
MATCH = """eval/ours_win_rate eval/ours_win_rate_low eval/ours_win_rate_black_high eval/ours_win_rate_white
    eval/ours_points eval/peer_points eval/mean_margin eval/distinct_games"""
SPEED = "eval/simulations_per_cpu_second"
SCRIPTS = {  # the environment of each (None: the main one), and what it logs, or some of it
    "sb3_ppo": ("sb3", RETURNS),
    "cleanrl_ppo": ("cleanrl", "charts/episodic_return charts/learning_rate charts/SPS losses/value_loss"),
    "sb3_recurrent_ppo": ("sb3", RETURNS),
    "purejaxrl_ppo": (
        "purejaxrl",
        "charts/episodic_return eval/steps_per_second_compiled eval/compile_cpu_seconds",
    ),
    "torchrl_ppo": ("torchrl", "charts/episodic_return charts/num_updates"),
    "tianshou_ppo": ("tianshou", "charts/episodic_return charts/num_updates"),
    "skrl_ppo": ("skrl", "charts/episodic_return charts/num_updates"),
    "rl4co_attention": ("rl4co", "eval/greedy_length eval/greedy_gap"),
    "openspiel_mcts": ("openspiel", SPEED),
    "pgx_mctx": ("pgx", f"{SPEED} eval/first_cpu_seconds"),
    "our_go_search": (None, SPEED),
    "gnugo_match": (None, MATCH),
    "elkai_lkh": ("elkai", "eval/length eval/gap eval/gap_std eval/ms eval/cpu_ms"),
}
RUNS = """
sb3_ppo --total-timesteps 2048 --settings tuned
sb3_ppo --total-timesteps 4096 --settings equal
sb3_ppo --total-timesteps 1024 --settings cleanrl
cleanrl_ppo --total-timesteps 1024
cleanrl_ppo --total-timesteps 4096 --settings ours
sb3_recurrent_ppo --total-timesteps 2048 --settings ours --env-id envs_shared.memory_tasks:TMaze10-v0
sb3_recurrent_ppo --total-timesteps 512 --settings zoo
sb3_recurrent_ppo --total-timesteps 512 --settings zoo-untuned
purejaxrl_ppo --total-timesteps 1024
purejaxrl_ppo --total-timesteps 4096 --settings ours
torchrl_ppo --total-timesteps 1024
tianshou_ppo --total-timesteps 1024
skrl_ppo --total-timesteps 1024
rl4co_attention --num-epochs 2 --steps-per-epoch 2 --batch-size 4 --baseline-instances 20
openspiel_mcts --simulations 16 --repeats 1
openspiel_mcts --work rollouts --simulations 16 --repeats 1
openspiel_mcts --work match --simulations 4 --games 2 --simulations-end 8
pgx_mctx --simulations 8 --games 4 --blocks 1 --channels 8 --repeats 1
our_go_search --simulations 16 --repeats 1
gnugo_match --games 2 --simulations-end 8
elkai_lkh
"""


def find_python(script):
    """Python of a peer's environment; skips the test where the peer is not installed."""
    environment, _ = SCRIPTS[script]
    if script == "gnugo_match" and gnugo_match.find_gnugo() is None:
        pytest.skip("GNU Go is not installed: apt-get install gnugo")
    if script == "purejaxrl_ppo" and "PUREJAXRL" not in os.environ:
        pytest.skip("PUREJAXRL does not name a checkout of github.com/luchris429/purejaxrl")
    if environment is None:
        return sys.executable
    folder = PEERS / f".venv-{environment}"
    if not (folder / "requirements.sha256").exists():
        pytest.skip(f"the environment of {script}.py is not made: benchmark/peers/README.md says how")
    return folder / "bin" / "python"


def read_result(path):
    cell = Cell("x/T/s", "x", "x.py", "T", "s", "python x.py", headline="charts/cpu_seconds", seed=3)
    run = read_run(path, cell, {"machine": {"commit": "abc"}, "cpu_seconds": 1.0})
    run["metrics"].pop("charts/cpu_seconds")
    return run


def run_peer(script, *flags):
    command = [str(find_python(script)), "-m", f"benchmark.peers.{script}", *map(str, flags)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


SCRIPT = """
import time
from torch.utils.tensorboard import SummaryWriter
RANK, spend = 0, lambda seconds: time.seconds.append(seconds)
evaluate, main = lambda: spend(100), lambda: (spend(50), train("events"))
def train(folder):
    spend(2)
    writer = SummaryWriter(folder)
    for step in (1, 2):
        spend(5), writer.add_scalar("charts/cpu_seconds", 0.0, step), evaluate(), spend(1)
    writer.close()
"""


def test_our_scripts_run_by_the_clock_of_the_peers(tmp_path, monkeypatch):
    """Set-up and checkpoints count; imports, flags and evaluations do not."""
    (tmp_path / "tiny.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "seconds", [1000.0], raising=False)
    monkeypatch.setattr(time, "process_time", lambda: sum(time.seconds))
    monkeypatch.setattr(sys, "argv", ["clock.py", f"{tmp_path}/tiny.py"])
    clock.main()
    assert read_scalars(tmp_path / "events")["charts/cpu_seconds"] == [(1, 7.0), (2, 13.0)]


def test_every_peer_is_tested_and_in_the_readme():
    files = {path.stem for path in PEERS.glob("*.py") if "def make_parser():" in path.read_text()}
    assert (
        files - {"environment"} == SCRIPTS.keys() == {line.split()[0] for line in RUNS.strip().splitlines()}
    )
    readme = (PEERS / "README.md").read_text()
    assert all(f"| `{script}.py` |" in readme for script in SCRIPTS) and "non-commercial" in readme


def test_a_package_has_one_version_in_all_requirements():
    """Those of the scripts, the tests, the benchmark, each peer and pre-commit."""
    files = [*ROOT.glob("requirements*.txt"), *ROOT.glob("benchmark/**/requirements*.txt")]
    texts = [path.read_text() for path in files] + [(ROOT / ".pre-commit-config.yaml").read_text()]
    pins = re.findall(r"([\w-]+)(?:\[.*?\])?==([\w.]+)", "\n".join(texts))
    assert len(files) > 8 and len(dict(pins)) == len({*pins}), sorted({*pins})
    for path in PEERS.glob("requirements-*.txt"):
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in path.read_text().splitlines()), path


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_flags_are_one_line_and_exit_code_2(script):
    """Python without site-packages can make the parser."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmark.peers import {script} as peer; "
    code += "peer.make_parser().parse_args()"
    command = [sys.executable, "-I", "-S", "-c", code]
    subprocess.run(command, check=True)
    for flags in (["--no-such-flag", "1"], ["--seed", "x"], ["--see", "1"]):
        found = subprocess.run([*command, *flags], capture_output=True, text=True)
        (line,) = found.stderr.splitlines()
        assert found.returncode == 2 and flags[0] in line


@pytest.fixture(scope="module", params=RUNS.strip().splitlines())
def ran(request, tmp_path_factory):
    """A short run of a peer: its script, flags, run folder, output and scalars."""
    script, *flags = request.param.split()
    folder = tmp_path_factory.mktemp("peer")
    run = run_peer(script, *flags, "--seed", 3, "--run-dir", folder)
    assert run.returncode == 0, run.stderr
    (path,) = folder.iterdir()
    return SimpleNamespace(script=script, flags=flags, path=path, run=run, scalars=read_scalars(path))


@pytest.mark.slow
def test_a_short_run_leaves_events_with_its_metrics(ran):
    """Which end at the last step, and nothing else; and prints a bar and a line of summary."""
    assert {p.name.split(".")[0] for p in ran.path.iterdir()} == {"events"}
    tags = MATCH if "match" in ran.flags else SCRIPTS[ran.script][1]
    assert ran.scalars.keys() >= {*tags.split()}
    last = ran.scalars["charts/cpu_seconds"][-1][0]
    assert all(points[-1][0] == last for tag, points in ran.scalars.items() if tag.startswith("eval/"))
    if "--total-timesteps" in ran.flags:
        assert last >= int(ran.flags[1])
    assert str(ran.path) in ran.run.stdout.splitlines()[-1]
    # skrl writes its bar to stdout; a compiled run says nothing before its end
    assert "%|" in ran.run.stdout + ran.run.stderr or ran.script == "purejaxrl_ppo"


@pytest.mark.slow
def test_a_short_run_leaves_its_flags_and_version(ran):
    flags = read_text(ran.path, "hyperparameters")
    name = re.search(r"^\|env_id\|(.*)\|$", flags, re.M)[1].replace(":", "-")
    assert re.fullmatch(rf"{name}__{ran.script}__3__\d+", ran.path.name) and "|seed|3|" in flags
    environment, _ = SCRIPTS[ran.script]
    if environment:
        programs = re.findall(r"([\w-]+) ([\w.]+)", read_result(ran.path)["commit"])
        requirements = (PEERS / f"requirements-{environment}.txt").read_text().split()
        assert any(f"{package}=={number}" in requirements for package, number in programs)


@pytest.mark.slow
def test_a_short_run_has_scores_that_are_possible(ran):
    found = {name.removeprefix("eval/"): value for name, value in read_result(ran.path)["metrics"].items()}
    if ran.script == "elkai_lkh":
        assert abs(found["gap"]) < 1e-4  # LKH finds what Concorde found
        assert [step for step, _ in ran.scalars["eval/gap"]] == [500]
    elif ran.script == "rl4co_attention":
        assert found["greedy_gap"] > 0 and [step for step, _ in ran.scalars["eval/greedy_gap"]] == [8, 16]
    elif "ours_win_rate" in found:
        assert found["ours_win_rate"] * 2 == found["ours_points"] == 2 - found["peer_points"]
        assert -25.5 <= found["mean_margin"] <= 25.5


def test_colours_and_openings_of_a_match_are_balanced():
    """Ours fills the board and the other side passes, from openings that both have played."""
    go = Go(5)

    def player(boards):
        return go.random_moves(boards, go.legal_moves(boards))

    games, scores, is_black = go_engine.play(go, player, [lambda moves: go.num_points] * 8, seed=1)
    assert is_black == 4 * [True] + 4 * [False] and scores == 4 * [25.0] + 4 * [-25.0]
    openings = [tuple(moves[:2]) for moves in games]
    assert openings[:4] == openings[4:] and len(set(openings)) == 4
    with pytest.raises(ValueError, match="the last move is illegal"):
        go_engine.play(go, player, [lambda moves: moves[0]] * 2, seed=1)


@pytest.mark.slow
def test_returns_and_evaluations_of_sb3(tmp_path):
    """All episodes of CartPole that ended fit into the steps so far. Evaluations do not change what is
    learned."""
    returns = []
    for interval in (0, 2):
        flags = ("--seed", 2, "--total-timesteps", 1024, "--eval-interval", interval)
        run = run_peer("sb3_ppo", *flags, "--run-dir", tmp_path / str(interval))
        assert run.returncode == 0, run.stderr
        (path,) = (tmp_path / str(interval)).iterdir()
        events = read_events(path)
        points = events.Scalars("charts/episodic_return")
        assert [point.step for point in points] == [256, 512, 768, 1024]
        assert all(8 <= point.value <= point.step for point in points)
        seconds = [point.value for point in events.Scalars("charts/cpu_seconds")]
        assert seconds == sorted(seconds)
        evaluated = [point.step for point in events.Scalars("eval/episodic_return")]
        assert evaluated == ([512, 1024] if interval else [1024])
        returns.append([point.value for point in points])
    assert returns[0] == returns[1]


@pytest.mark.slow
def test_a_peer_stops_after_two_evaluations_at_the_return_that_is_asked_for(tmp_path):
    """With the next step of its eight environments; the return of this task is never below -1."""
    flags = ("--settings", "zoo", "--total-timesteps", 4096, "--eval-interval", 1, "--stop-return", -1)
    run = run_peer("sb3_recurrent_ppo", *flags, "--run-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    points = read_events(path).Scalars("eval/episodic_return")
    assert [point.step for point in points] == [256, 512, 520]
