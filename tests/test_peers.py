"""Other people's programs, side by side with ours: their flags, what they log, and a short real run of
each."""

import os
import re
import subprocess
import sys
import time
from itertools import product

import pytest
from helpers import ENVIRONMENT, ROOT, read_scalars

from benchmark.peers import clock, gnugo_match, go_engine
from benchmark.runs import read_events, read_text
from envs_shared.go import Go

PEERS = ROOT / "benchmark" / "peers"

LEARNING = "charts/episodic_return"
RETURNS = f"{LEARNING} eval/episodic_return eval/episodic_return_std eval/episodic_length"
MATCH = """eval/ours_win_rate eval/ours_win_rate_low eval/ours_win_rate_black_high eval/ours_win_rate_white
    eval/ours_points eval/peer_points eval/mean_margin eval/distinct_games"""
MATCH_SCORES = ("ours_win_rate", "ours_points", "peer_points", "mean_margin")
SPEED = "eval/simulations_per_cpu_second"
SCRIPTS = {  # the environment of each (None: the main one), and what it logs, or some of it
    "sb3_ppo": ("sb3", RETURNS),
    "cleanrl_ppo": ("cleanrl", f"{LEARNING} charts/learning_rate charts/SPS losses/value_loss"),
    "sb3_recurrent_ppo": ("sb3", RETURNS),
    "purejaxrl_ppo": ("purejaxrl", f"{LEARNING} eval/steps_per_second_compiled eval/compile_cpu_seconds"),
    "torchrl_ppo": ("torchrl", f"{LEARNING} charts/num_updates"),
    "tianshou_ppo": ("tianshou", f"{LEARNING} charts/num_updates"),
    "skrl_ppo": ("skrl", f"{LEARNING} charts/num_updates"),
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


def run_peer(folder, script, *flags):
    """Run a peer; returns its run folder and what it printed."""
    command = [find_python(script), "-m", f"benchmark.peers.{script}", *flags, "--run-dir", folder]
    run = subprocess.run(map(str, command), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (path,) = folder.iterdir()
    return path, run


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
    ran = {line.split()[0] for line in RUNS.strip().splitlines()}
    assert files - {"environment"} == SCRIPTS.keys() == ran
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


BAD_FLAGS = (["--no-such-flag", "1"], ["--seed", "x"], ["--see", "1"])
PARSE = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT)!r})
for script in sys.argv[1:]:
    parser = importlib.import_module(f"benchmark.peers.{{script}}").make_parser()
    parser.parse_args([])
    for flags in {BAD_FLAGS}:
        try:
            parser.parse_args(flags)
        except SystemExit as stop:
            print(script, stop.code, file=sys.stderr)
"""


def test_bad_flags_are_one_line_and_exit_code_2():
    """Python without site-packages can make the parsers."""
    command = [sys.executable, "-I", "-S", "-c", PARSE, *SCRIPTS]
    lines = iter(subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines())
    for script, flags in product(SCRIPTS, BAD_FLAGS):
        assert flags[0] in next(lines) and next(lines) == f"{script} 2"
    assert not [*lines]


@pytest.mark.slow
@pytest.mark.parametrize("line", RUNS.strip().splitlines())
def test_a_short_run_leaves_events_with_its_metrics(line, tmp_path):
    """Which end at the last step, and nothing else; its flags and version; and it prints a bar and a
    summary."""
    script, *flags = line.split()
    path, run = run_peer(tmp_path, script, *flags, "--seed", 3)
    scalars = read_scalars(path)
    assert {p.name.split(".")[0] for p in path.iterdir()} == {"events"}
    environment, tags = SCRIPTS[script]
    assert scalars.keys() >= {*(MATCH if "match" in flags else tags).split()}
    last = scalars["charts/cpu_seconds"][-1][0]
    assert all(points[-1][0] == last for tag, points in scalars.items() if tag.startswith("eval/"))
    if "--total-timesteps" in flags:
        assert last >= int(flags[1])
    assert str(path) in run.stdout.splitlines()[-1]
    # skrl writes its bar to stdout; a compiled run says nothing before its end
    assert "%|" in run.stdout + run.stderr or script == "purejaxrl_ppo"

    settings = read_text(path, "hyperparameters")
    name = re.search(r"^\|env_id\|(.*)\|$", settings, re.M)[1].replace(":", "-")
    assert re.fullmatch(rf"{name}__{script}__3__\d+", path.name) and "|seed|3|" in settings
    if environment:
        programs = re.findall(r"([\w-]+) ([\w.]+)", read_text(path, "program"))
        requirements = (PEERS / f"requirements-{environment}.txt").read_text().split()
        assert any(f"{package}=={number}" in requirements for package, number in programs)

    if script == "elkai_lkh":
        ((step, gap),) = scalars["eval/gap"]
        assert step == 500 and abs(gap) < 1e-4  # LKH finds what Concorde found
    elif script == "rl4co_attention":
        assert [step for step, _ in scalars["eval/greedy_gap"]] == [8, 16]
        assert scalars["eval/greedy_gap"][-1][1] > 0
    elif "eval/ours_win_rate" in scalars:
        rate, ours, peers, margin = (scalars[f"eval/{x}"][-1][1] for x in MATCH_SCORES)
        assert rate * 2 == ours == 2 - peers and -25.5 <= margin <= 25.5


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
        path, _ = run_peer(tmp_path / str(interval), "sb3_ppo", *flags)
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
    path, _ = run_peer(tmp_path, "sb3_recurrent_ppo", *flags)
    points = read_events(path).Scalars("eval/episodic_return")
    assert [point.step for point in points] == [256, 512, 520]
