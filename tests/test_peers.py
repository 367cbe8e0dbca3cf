"""Other people's programs beside ours: their flags, what they log, and a short real run of each."""

import os
import re
import subprocess
import sys
import time

import pytest
from helpers import ENVIRONMENT, ROOT, read_scalars

from benchmark.peers import clock, gnugo_match, go_engine
from benchmark.runs import read_text
from envs_shared.go import Go

PEERS = ROOT / "benchmark" / "peers"

LEARNING = "charts/episodic_return"
RETURNS = f"{LEARNING} eval/episodic_return eval/episodic_return_std eval/episodic_length"
MATCH = "eval/ours_win_rate eval/ours_win_rate_low eval/ours_points eval/peer_points eval/mean_margin"
SPEED = "eval/simulations_per_cpu_second"
SEARCH = "--simulations 16 --repeats 1"
EPOCHS = "--num-epochs 2 --steps-per-epoch 2 --batch-size 4 --baseline-instances 20"
SCRIPTS = {  # the environment of each (None: the main one), flags of a short run, and some of what it logs
    "sb3_ppo": ("sb3", "--total-timesteps 4096 --settings equal", RETURNS),
    "cleanrl_ppo": ("cleanrl", "--total-timesteps 4096 --settings ours", f"{LEARNING} losses/value_loss"),
    "sb3_recurrent_ppo": ("sb3", "--total-timesteps 512 --settings zoo", RETURNS),
    "sbx_ppo": ("sbx", "--total-timesteps 1024", f"{RETURNS} eval/steps_per_second_compiled"),
    "purejaxrl_ppo": ("purejaxrl", "--total-timesteps 4096 --settings ours", LEARNING),
    "leanrl_ppo": ("leanrl", "--total-timesteps 6144", f"{LEARNING} eval/steps_per_second_compiled"),
    "torchrl_ppo": ("torchrl", "--total-timesteps 1024", f"{LEARNING} charts/num_updates"),
    "tianshou_ppo": ("tianshou", "--total-timesteps 1024", f"{LEARNING} charts/num_updates"),
    "skrl_ppo": ("skrl", "--total-timesteps 1024", f"{LEARNING} charts/num_updates"),
    "rl4co_attention": ("rl4co", EPOCHS, "eval/greedy_length eval/greedy_gap"),
    "openspiel_mcts": ("openspiel", SEARCH, SPEED),
    "pgx_mctx": ("pgx", f"{SEARCH} --games 4 --blocks 1 --channels 8", f"{SPEED} eval/first_cpu_seconds"),
    "our_go_search": (None, SEARCH, SPEED),
    "gnugo_match": (None, "--games 2 --simulations-end 8", MATCH),
    "elkai_lkh": ("elkai", "", "eval/length eval/gap eval/gap_std eval/ms eval/cpu_ms"),
}


def find_python(script):
    """Python of a peer's environment; skips the test where the peer is not installed."""
    environment, *_ = SCRIPTS[script]
    if script == "gnugo_match" and gnugo_match.find_gnugo() is None:
        pytest.skip("GNU Go is not installed: apt-get install gnugo")
    checkout = script.removesuffix("_ppo").upper()  # the environment variable
    if checkout in ("PUREJAXRL", "LEANRL") and checkout not in os.environ:
        pytest.skip(f"{checkout} does not name a checkout: benchmark/peers/README.md says how")
    if environment is None:
        return sys.executable
    folder = PEERS / f".venv-{environment}"
    if not (folder / "requirements.sha256").exists():
        pytest.skip(f"the environment of {script}.py is not made: benchmark/peers/README.md says how")
    return folder / "bin" / "python"


SCRIPT = """
import time
from torch.utils.tensorboard import SummaryWriter
RANK, spend = 0, lambda seconds: time.seconds.append(seconds)
evaluate, main = lambda: spend(100), lambda: (spend(50), train("events", run))
class run:
    cpu_seconds = {}
def train(folder, run):
    spend(2)
    writer = SummaryWriter(folder)
    for step in (1, 2):
        spend(5), writer.add_scalar("charts/cpu_seconds", 0.0, step), evaluate(), spend(1)
        assert run.cpu_seconds == {} + 6 * step + 1
    writer.close()
"""


@pytest.mark.parametrize("before", [0.0, 30.0])
def test_our_scripts_run_by_the_clock_of_the_peers(tmp_path, monkeypatch, before):
    """Set-up and checkpoints count; imports, flags and evaluations do not. Checkpoints hold the seconds, and
    a resumed run adds to those of its checkpoint."""
    (tmp_path / "tiny.py").write_text(SCRIPT.replace("{}", f"{before}"))
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "seconds", [1000.0], raising=False)
    monkeypatch.setattr(time, "process_time", lambda: sum(time.seconds))
    monkeypatch.setattr(sys, "argv", ["clock.py", f"{tmp_path}/tiny.py"])
    clock.main()
    assert read_scalars(tmp_path / "events")["charts/cpu_seconds"] == [(1, before + 7), (2, before + 13)]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_short_run_leaves_events_with_its_metrics(script, tmp_path):
    """Which end at the last step; its flags and the version of the package."""
    environment, flags, tags = SCRIPTS[script]
    command = [find_python(script), "-m", f"benchmark.peers.{script}", *flags.split()]
    command += ["--seed", "3", "--run-dir", str(tmp_path)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    scalars = read_scalars(path)
    assert scalars.keys() >= {*tags.split()}
    last = scalars["charts/cpu_seconds"][-1][0]
    assert all(points[-1][0] == last for tag, points in scalars.items() if tag.startswith("eval/"))
    assert "|seed|3|" in read_text(path, "hyperparameters")
    if environment:
        programs = re.findall(r"([\w-]+) ([\w.]+)", read_text(path, "program"))
        requirements = (PEERS / f"requirements-{environment}.txt").read_text().split()
        assert any(f"{package}=={number}" in requirements for package, number in programs)
    if script == "elkai_lkh":
        ((step, gap),) = scalars["eval/gap"]
        assert step == 500 and abs(gap) < 1e-4  # LKH finds what Concorde found


def test_colours_and_openings_of_a_match_are_balanced():
    """Ours fills the board and the other side passes, from openings that both have played."""
    go = Go(5)

    def player(boards):
        return go.random_moves(boards, go.legal_moves(boards))

    games, scores, is_black = go_engine.play(go, player, [lambda moves: go.num_points] * 8, seed=1)
    assert is_black == 4 * [True] + 4 * [False] and scores == 4 * [25.0] + 4 * [-25.0]
    openings = [tuple(moves[:2]) for moves in games]
    assert openings[:4] == openings[4:] and len(set(openings)) == 4
