"""Other people's programs, side by side with ours: their flags, what they log, and a short real run of each."""

import argparse
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, read_scalars
from scipy.stats import binomtest

from envs_shared.go import Go

PEERS = ROOT / "benchmark" / "peers"
sys.path += [str(ROOT / "benchmark"), str(ROOT / "benchmark" / "studies"), str(PEERS)]
import common
import gnugo_match
import go_engine
import peer
import records
import sb3_ppo

RETURNS = "charts/episodic_return eval/episodic_return eval/episodic_return_std eval/episodic_length"
MATCH = """eval/ours_win_rate eval/ours_win_rate_low eval/ours_win_rate_black_high eval/ours_win_rate_white
    eval/ours_points eval/peer_points eval/mean_margin eval/distinct_games"""
SPEED = "eval/simulations_per_cpu_second"
SCRIPTS = {  # the environment of each (None: the main one), and what it logs, or some of it
    "sb3_ppo": ("sb3", RETURNS),
    "cleanrl_ppo": ("cleanrl", "charts/episodic_return charts/learning_rate charts/SPS losses/value_loss"),
    "sb3_recurrent_ppo": ("sb3", RETURNS),
    "rl4co_attention": ("rl4co", "eval/greedy_length eval/greedy_gap eval/instances_per_cpu_second"),
    "openspiel_mcts": ("openspiel", SPEED),
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
rl4co_attention --num-epochs 2 --steps-per-epoch 2 --batch-size 4 --baseline-instances 20
openspiel_mcts --simulations 16 --repeats 1
openspiel_mcts --work match --simulations 4 --games 2 --simulations-end 8
our_go_search --simulations 16 --repeats 1
gnugo_match --games 2 --simulations-end 8
elkai_lkh
"""


def find_python(script):
    """Python of a peer's environment; skips the test where the peer is not installed."""
    environment, _ = SCRIPTS[script]
    if script == "gnugo_match" and gnugo_match.find_gnugo() is None:
        pytest.skip("GNU Go is not installed: apt-get install gnugo")
    if environment is None:
        return sys.executable
    folder = PEERS / f".venv-{environment}"
    if not (folder / "requirements.sha256").exists():
        pytest.skip(f"the environment of {script}.py is not made: benchmark/peers/README.md says how")
    return folder / "bin" / "python"


def run_peer(script, *flags):
    command = [str(find_python(script)), str(PEERS / f"{script}.py"), *map(str, flags)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_every_peer_is_tested_and_in_the_readme():
    files = {path.stem for path in PEERS.glob("*.py") if "def make_parser():" in path.read_text()}
    assert files == SCRIPTS.keys() == {line.split()[0] for line in RUNS.strip().splitlines()}
    readme = (PEERS / "README.md").read_text()
    assert all(f"| `{script}.py` |" in readme for script in SCRIPTS) and "non-commercial" in readme
    for path in PEERS.glob("requirements-*.txt"):
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in path.read_text().splitlines()), path


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_flags_are_one_line_and_exit_code_2(script):
    """Python without site-packages can make the parser."""
    code = (
        f"import sys; sys.path.insert(0, {str(PEERS)!r}); import {script} as m; m.make_parser().parse_args()"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    subprocess.run(command, check=True)
    for flags in (["--no-such-flag", "1"], ["--seed", "x"], ["--see", "1"]):
        found = subprocess.run([*command, *flags], capture_output=True, text=True)
        (line,) = found.stderr.splitlines()
        assert found.returncode == 2 and flags[0] in line


@pytest.mark.parametrize("script", SCRIPTS)
def test_unknown_tasks_are_one_line_and_exit_code_2(script, tmp_path):
    run = run_peer(script, "--env-id", "Nothing-v0", "--run-dir", tmp_path / "runs")
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and line.startswith(f"{script}.py: error: ") and "--env-id Nothing-v0" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", RUNS.strip().splitlines())
def test_a_short_run_leaves_events_with_its_metrics_flags_and_version(command, tmp_path):
    script, *flags = command.split()
    run = run_peer(script, *flags, "--seed", 3, "--run-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    assert {p.name.split(".")[0] for p in path.iterdir()} == {"events"}
    environment, tags = SCRIPTS[script]
    scalars = read_scalars(path)
    assert scalars.keys() >= {*(MATCH if "match" in flags else tags).split()}
    last = scalars["charts/cpu_seconds"][-1][0]
    assert all(points[-1][0] == last for tag, points in scalars.items() if tag.startswith("eval/"))
    result, flags_logged = records.read_run(path, {}, {}), common.read_text(path, "hyperparameters")
    name = re.search(r"^\|env_id\|(.*)\|$", flags_logged, re.M)[1].replace(":", "-")
    assert re.fullmatch(rf"{name}__{script}__3__\d+", path.name) and "|seed|3|" in flags_logged
    assert result["env_steps"] == last > 0 and result["cpu_seconds"] > 0
    if environment:
        package, number = result["commit"].split()[:2]
        requirements = (PEERS / f"requirements-{environment}.txt").read_text().split()
        assert f"{package}=={number}" in requirements
    assert str(path) in run.stdout.splitlines()[-1] and "%|" in run.stderr  # a line of summary, and tqdm
    found = {name.removeprefix("eval/"): value for name, value in result["metrics"].items()}
    if "--total-timesteps" in flags:
        assert last >= int(flags[1])
    if script == "elkai_lkh":
        assert abs(found["gap"]) < 1e-4 and last == 500  # LKH finds what Concorde found
    elif script == "rl4co_attention":
        assert found["greedy_gap"] > 0 and [step for step, _ in scalars["eval/greedy_gap"]] == [8, 16]
    elif "ours_win_rate" in found:
        assert found["ours_win_rate"] * 2 == found["ours_points"] == 2 - found["peer_points"]
        assert -25.5 <= found["mean_margin"] <= 25.5


def test_a_peer_logs_metrics_flags_version_and_the_seconds_of_training(tmp_path, monkeypatch, capsys):
    """The seconds leave out evaluations."""
    now = [100.0]
    monkeypatch.setattr(peer.time, "process_time", lambda: now[0])
    args = argparse.Namespace(env_id="a/b:c", seed=1, run_dir=str(tmp_path))
    run = peer.Run(args, "some_peer", "p 1")
    assert run.path.name.startswith("a-b-c__some_peer__1__") and not list(run.path.iterdir())
    now[0] = 107.0
    run.log(1, {"z": 1.0})
    run.evaluation_seconds += 3.0
    now[0] = 111.0
    run.finish(7, {"x": 1.5, "best/y": 2.0})
    scalars = {"z": [(1, 1.0)], "eval/x": [(7, 1.5)], "best/y": [(7, 2.0)]}
    assert read_scalars(run.path) == scalars | {"charts/cpu_seconds": [(1, 7.0), (7, 8.0)]}
    assert "|seed|1|" in common.read_text(run.path, "hyperparameters")
    assert records.read_run(run.path, {}, {})["commit"] == "p 1" and "p 1: x 1.5" in capsys.readouterr().out
    args.run_dir = str(next(run.path.iterdir()))  # a file
    with pytest.raises(SystemExit) as error:
        peer.Run(args, "some_peer", None)
    assert error.value.code == 2 and "--run-dir" in capsys.readouterr().err


def test_settings_of_sb3_are_the_defaults_of_cleanrl():
    """Against the fields of CleanRL's own Args, with the 1/2 that SB3's value loss lacks."""
    find_python("cleanrl_ppo")
    (path,) = (PEERS / ".venv-cleanrl").glob("lib/*/site-packages/cleanrl/ppo.py")
    fields = re.findall(r'"--([\w-]+)".*?default=([\d.e-]+)', path.read_text())
    theirs = {name.replace("-", "_"): float(value) for name, value in fields}
    names = {"n_steps": "num_steps", "n_epochs": "update_epochs", "clip_range": "clip_coef"}
    names |= {"clip_range_vf": "clip_coef"}
    names |= {x: x for x in ("gamma", "gae_lambda", "learning_rate", "ent_coef", "max_grad_norm")}
    expected = {ours: theirs[name] for ours, name in names.items()}
    batch_size = theirs["num_envs"] * theirs["num_steps"] / theirs["num_minibatches"]
    expected |= {"vf_coef": theirs["vf_coef"] / 2, "batch_size": batch_size, "normalize_advantage": True}
    assert sb3_ppo.CLEANRL.arguments == expected and sb3_ppo.CLEANRL.num_envs == theirs["num_envs"]
    assert sb3_ppo.CLEANRL.falling == ("learning_rate",)


def test_tours_are_read_and_scored(tmp_path, capsys):
    """The square and its two diagonals: a tour that crosses is longer by 2 (sqrt(2) - 1) of 4."""
    texts = {"a": "0 0 1 0 1 1 0 1 output 1 2 3 4 1\n0 0 3 0 3 3 0 3 output 1 2 3 4 1\n"}
    texts |= {"b": "0 0 1 0 1 1\n", "c": "0 0 1 0 1 1 output 1 2 2 1\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    points, references = peer.read_ml4co(str(tmp_path / "a.txt"), 4)
    assert points.tolist()[1] == [[0, 0], [3, 0], [3, 3], [0, 3]]
    assert references.tolist() == [[0, 1, 2, 3]] * 2
    scores = peer.score_tours(points, np.array([[0, 1, 2, 3], [0, 2, 1, 3]]), references)
    crossing = 50 * (2**0.5 - 1)
    assert scores["length"] == pytest.approx((4 + 6 + 6 * 2**0.5) / 2)
    assert [scores["gap"], scores["gap_std"]] == pytest.approx([crossing / 2] * 2)
    points, references = peer.read_ml4co(str(tmp_path / "b.txt"), 3)
    assert points.shape == (1, 3, 2) and references is None
    for name, message in (
        ("none", "No such file"),
        ("b", "a line has 6 numbers"),
        ("c", "visit each node once"),
    ):
        with pytest.raises(SystemExit) as error:
            peer.read_ml4co(str(tmp_path / f"{name}.txt"), 4 if name == "b" else 3)
        (line,) = capsys.readouterr().err.splitlines()
        assert error.value.code == 2 and f"--data {tmp_path / name}.txt: " in line and message in line


def test_lkh_makes_tours_where_a_file_has_none(tmp_path):
    """And never writes over a file."""
    rows = np.random.default_rng(1).random((3, 16))
    np.savetxt(tmp_path / "a.txt", rows)
    flags = ("--env-id", "tsp8-uniform", "--data", tmp_path / "a.txt", "--output", tmp_path / "b.txt")
    run = run_peer("elkai_lkh", *flags, "--run-dir", tmp_path / "runs")
    assert run.returncode == 0, run.stderr
    points, tours = peer.read_ml4co(str(tmp_path / "b.txt"), 8)
    assert points.reshape(3, 16).tolist() == rows.tolist()
    others = [np.array([0, *order]) for order in itertools.permutations(range(1, 8))]
    for x, tour in zip(points, tours, strict=True):
        best = min(peer.score_tours(x[None], other[None])["length"] for other in others)
        assert peer.score_tours(x[None], tour[None])["length"] == pytest.approx(best, rel=1e-6)
    again = run_peer("elkai_lkh", *flags, "--run-dir", tmp_path / "runs")
    assert again.returncode == 2 and "--output" in again.stderr


def test_a_match_refuses_what_it_cannot_play(tmp_path):
    missing, other = tmp_path / "no.pt", ROOT / "benchmark" / "checkpoints" / "go7x7.pt"
    for flags, message in (
        (["--checkpoint", missing], "no such file"),
        (["--checkpoint", other], "--env-id Go-5x5: .*go7x7.pt plays Go-7x7"),
        (["--level", 11], "--level"),
    ):
        run = run_peer("gnugo_match", *flags, "--run-dir", tmp_path / "runs")
        (line,) = run.stderr.splitlines()
        assert run.returncode == 2 and re.search(message, line), line
    assert not (tmp_path / "runs").exists()


def test_colours_and_openings_of_a_match_are_balanced():
    """Ours fills the board and the other side passes, from openings that both have played."""
    go = Go(5)

    def player(boards):
        return go.draw_moves(boards, go.legal_moves(boards))

    games, scores, is_black = go_engine.play(go, player, [lambda moves: go.num_points] * 8, seed=1)
    assert is_black == 4 * [True] + 4 * [False] and scores == 4 * [25.0] + 4 * [-25.0]
    openings = [tuple(moves[:2]) for moves in games]
    assert openings[:4] == openings[4:] and len(set(openings)) == 4
    with pytest.raises(ValueError, match="the last move is illegal"):
        go_engine.play(go, player, [lambda moves: moves[0]] * 2, seed=1)


def test_openings_of_a_match_are_no_images_of_each_other():
    """Turned and mirrored by numpy. If there are not so many, openings differ in their moves."""

    def count(size, num_openings):
        """Return how many openings differ, as images and as moves."""
        boards, openings = go_engine.draw_openings(Go(size), num_openings, 2)
        orders = np.zeros((num_openings, size * size), int)
        np.put_along_axis(orders, np.array(openings), [[1, 2]], 1)
        assert ((boards.stones[:, Go(size).cells] != 0).numpy() == (orders > 0)).all()
        squares = orders.reshape(-1, size, size)
        images = {min(tuple(np.rot90(y, k).flat) for y in (x, x.T) for k in range(4)) for x in squares}
        return len(images), len(set(map(tuple, openings)))

    torch.manual_seed(1)
    assert count(5, 30) == (30, 30) and count(3, 40) == (12, 40)  # there are 12 and 72 on 3x3


def test_intervals_of_win_rates_are_wilsons():
    for wins, n in ((50, 100), (50, 50), (0, 7), (73, 100)):
        expected = binomtest(wins, n).proportion_ci(method="wilson")
        assert go_engine.compute_interval(wins / n, n) == pytest.approx([*expected], abs=1e-5)


def test_returns_and_evaluations_of_sb3(tmp_path):
    """All episodes of CartPole that ended fit into the steps so far. Evaluations do not change what is learned."""
    metrics = []
    for interval in (0, 2):
        flags = ("--seed", 2, "--total-timesteps", 1024, "--eval-interval", interval)
        run = run_peer("sb3_ppo", *flags, "--run-dir", tmp_path / str(interval))
        assert run.returncode == 0, run.stderr
        (path,) = (tmp_path / str(interval)).iterdir()
        steps, seconds, _, returns = zip(*common.read_points(path, "charts/episodic_return"), strict=True)
        assert steps == (256, 512, 768, 1024) and sorted(seconds) == list(seconds)
        assert all(8 <= mean <= step for step, mean in zip(steps, returns, strict=True))
        evaluated = [point[0] for point in common.read_points(path, "eval/episodic_return")]
        assert evaluated == ([512, 1024] if interval else [1024])
        metrics.append(records.read_run(path, {}, {})["metrics"])
    assert metrics[0] == metrics[1]
