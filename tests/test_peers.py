"""Other people's programs, side by side with ours: their flags, the result they leave, and a short real run of each."""

import argparse
import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, read_result, read_scalars

from envs_shared.go_tasks.rules import Go

PEERS = ROOT / "benchmark" / "peers"
sys.path += [str(ROOT / "benchmark"), str(PEERS)]
import common
import gnugo_match
import go_engine
import peer

SCRIPTS = {  # file -> its environment (None: the main one), short runs, metrics, tags
    "sb3_ppo": (
        "sb3",
        (
            "--total-timesteps 2048 --settings tuned --eval-interval 1",
            "--total-timesteps 4096 --settings equal",
        ),
        "eval/episodic_return eval/episodic_return_std eval/episodic_length",
        "charts/return_last_20 charts/cpu_seconds",
    ),
    "cleanrl_ppo": (
        "cleanrl",
        ("--total-timesteps 1024", "--total-timesteps 4096 --settings ours"),
        "steps_per_cpu_second",
        "",
    ),
    "sb3_recurrent_ppo": (
        "sb3",
        ("--total-timesteps 2048 --env-id TMaze10-v0",),
        "eval/episodic_return eval/episodic_return_std eval/episodic_length",
        "charts/return_last_20 charts/cpu_seconds",
    ),
    "rl4co_attention": (
        "rl4co",
        ("--num-epochs 2 --steps-per-epoch 2 --batch-size 4",),
        "eval/greedy_length eval/greedy_gap eval/greedy_gap_std eval/greedy_ms instances_per_cpu_second",
        "eval/greedy_gap charts/cpu_seconds",
    ),
    "openspiel_mcts": (
        "openspiel",
        ("--simulations 16 --repeats 1", "--work match --simulations 4 --games 2 --simulations-end 8"),
        None,
        "",
    ),
    "our_go_search": (None, ("--simulations 16 --repeats 1",), "simulations_per_cpu_second", ""),
    "gnugo_match": (
        None,
        ("--games 2 --simulations-end 8",),
        "ours_win_rate ours_win_rate_low ours_win_rate_high ours_win_rate_black ours_win_rate_black_low "
        "ours_win_rate_black_high ours_win_rate_white ours_win_rate_white_low ours_win_rate_white_high ours_points "
        "ours_elo peer_points mean_margin distinct_games",
        "",
    ),
    "elkai_lkh": ("elkai", ("",), "length gap gap_std ms", ""),
}
RUNS = [(script, flags) for script, (_, runs, _, _) in SCRIPTS.items() for flags in runs]


def find_python(script):
    """Python of a peer's environment; skips the test where the peer is not installed."""
    environment = SCRIPTS[script][0]
    if script == "gnugo_match" and gnugo_match.find_gnugo() is None:
        pytest.skip("GNU Go is not installed: apt-get install gnugo")
    if environment is None:
        return sys.executable
    folder = PEERS / f".venv-{environment}"
    if not (folder / "requirements.sha256").exists():
        pytest.skip(f"the environment of {script}.py is not made: benchmark/peers/README.md says how")
    return folder / "bin" / "python"


def run_peer(script, *flags, python=sys.executable):
    command = [str(python), str(PEERS / f"{script}.py"), *map(str, flags)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_every_peer_is_tested_and_in_the_readme():
    files = {path.stem for path in PEERS.glob("*.py") if "def make_parser():" in path.read_text()}
    assert files == SCRIPTS.keys()
    readme = (PEERS / "README.md").read_text()
    for script, (environment, _, _, _) in SCRIPTS.items():
        assert f"| `{script}.py` |" in readme
        for line in (
            (PEERS / f"requirements-{environment}.txt").read_text().splitlines() if environment else ()
        ):
            assert re.fullmatch(r"[\w-]+==[\w.]+", line), line
    assert "non-commercial" in readme


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_can_be_read_with_the_standard_library_alone(script):
    """Python without site-packages imports the file and makes the parser."""
    code = f"import sys; sys.path.insert(0, {str(PEERS)!r}); import {script} as m; m.make_parser().parse_args([])"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_flags_are_one_line_and_exit_code_2(script, tmp_path):
    for flags, message in (
        ("--no-such-flag 1", "--no-such-flag"),
        ("--seed x", "--seed"),
        ("--see 1", "--see"),
    ):
        run = run_peer(script, *flags.split(), "--run-dir", tmp_path / "runs")
        (line,) = run.stderr.splitlines()
        assert run.returncode == 2 and message in line and line.startswith(f"{script}.py: error: ")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_unknown_tasks_are_one_line_and_exit_code_2(script, tmp_path):
    run = run_peer(
        script, "--env-id", "Nothing-v0", "--run-dir", tmp_path / "runs", python=find_python(script)
    )
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and "--env-id Nothing-v0" in line and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script, flags", RUNS)
def test_a_short_run_leaves_a_result_as_our_scripts_do(script, flags, tmp_path):
    environment, _, metrics, tags = SCRIPTS[script]
    run = run_peer(script, *flags.split(), "--seed", 3, "--run-dir", tmp_path, python=find_python(script))
    assert run.returncode == 0, run.stderr
    path, result = read_result(tmp_path)
    assert re.fullmatch(rf"{result['env_id']}__{script}__3__\d+", path.name)
    keys = "script env_id seed headline metrics env_steps wall_seconds cpu_seconds device torch commit args".split()
    assert (
        list(result) == keys and result["script"] == script and result["args"]["seed"] == result["seed"] == 3
    )
    if script == "openspiel_mcts":
        metrics = SCRIPTS["gnugo_match"][2] if "match" in flags else "simulations_per_cpu_second"
    assert result["metrics"].keys() == set(metrics.split())
    assert all(isinstance(value, (int, float)) for value in result["metrics"].values())
    assert result["headline"] in result["metrics"] and result["env_steps"] > 0 and result["cpu_seconds"] > 0
    if environment:
        package, number = result["commit"].split()
        requirements = (PEERS / f"requirements-{environment}.txt").read_text().split()
        assert f"{package}=={number}" in requirements
    scalars = read_scalars(path) if tags else {}
    tags += " eval/episodic_return" if "--eval-interval" in flags else ""
    assert (
        scalars.keys() == set(tags.split()) and len({tuple(s for s, _ in x) for x in scalars.values()}) <= 1
    )
    assert {p.name.split(".")[0] for p in path.iterdir()} == {"result"} | ({"events"} if tags else set())
    assert str(path) in run.stdout.splitlines()[-1] and "%|" in run.stderr  # a line of summary, and tqdm
    check_values(script, flags, result)


def check_values(script, flags, result):
    """What is known of the numbers of a short run."""
    found = result["metrics"]
    if script == "elkai_lkh":
        assert abs(found["gap"]) < 1e-4 and result["env_steps"] == 100  # LKH finds what Concorde found
    elif script == "rl4co_attention":
        assert found["eval/greedy_gap"] > 0 and result["env_steps"] == 16
    elif "win" in result["headline"]:
        assert found["ours_win_rate"] * 2 == found["ours_points"] == 2 - found["peer_points"]
        assert -25.5 <= found["mean_margin"] <= 25.5
    elif script == "cleanrl_ppo":
        assert result["env_steps"] == int(flags.split()[1])
        assert found["steps_per_cpu_second"] == pytest.approx(
            result["env_steps"] / result["cpu_seconds"], rel=0.2
        )
    elif script == "sb3_ppo":
        assert found["eval/episodic_return"] == found["eval/episodic_length"] >= 8
        assert result["env_steps"] == int(flags.split()[1])
    elif script == "sb3_recurrent_ppo":
        assert -1 <= found["eval/episodic_return"] <= 1


def test_a_result_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peer.time, "time", lambda: 1e9)
    args = argparse.Namespace(env_id="a/b:c", seed=1, run_dir=str(tmp_path))
    run = peer.Run(args, "some_peer")
    assert run.path.name == "a-b-c__some_peer__1__1000000000"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):

        def kill(*paths):
            raise OSError("killed")

        patch.setattr(peer.os, "replace", kill)
        run.finish("x", {"x": 1.5}, 1, "p 1")
    assert not list(tmp_path.glob("*/result.json"))
    run.finish("x", {"x": 1.5}, 7, "p 1")
    result = json.loads((run.path / "result.json").read_text())
    assert result["env_steps"] == 7 and result["metrics"] == {"x": 1.5} and result["commit"] == "p 1"
    assert [path.name for path in run.path.iterdir()] == ["result.json"]
    assert "x 1.5" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    args.run_dir = str(tmp_path / "file")
    with pytest.raises(SystemExit) as error:
        peer.Run(args, "some_peer")
    assert error.value.code == 2 and "--run-dir" in capsys.readouterr().err


def test_a_match_refuses_what_it_cannot_play(tmp_path):
    missing, other = tmp_path / "no.pt", ROOT / "benchmark" / "checkpoints" / "go7x7.pt"
    python = find_python("gnugo_match")
    for flags, message in (
        (["--checkpoint", missing], "no such file"),
        (["--checkpoint", other], "--env-id Go-5x5: .*go7x7.pt plays Go-7x7"),
        (["--level", 11], "--level"),
    ):
        run = run_peer("gnugo_match", *flags, "--run-dir", tmp_path / "runs", python=python)
        (line,) = run.stderr.splitlines()
        assert run.returncode == 2 and re.search(message, line), line
    assert not (tmp_path / "runs").exists()


def test_colours_and_openings_of_a_match_are_balanced():
    """Black fills the board and white passes: each side wins half, from openings that both have played."""
    go = Go(5)
    asked = []

    def choose_move(moves):
        asked.append(len(moves))
        boards = go.new(1)
        for move in moves:
            boards = go.play(boards, torch.tensor([move]))
        return int(player(boards)[0])

    def player(boards):
        legal = go.legal_moves(boards)
        legal[:, :-1] &= ~go.find_eyes(boards) & (boards.to_play == 1).unsqueeze(1)
        return legal.int().argmax(1)

    games, scores, is_black = go_engine.play(go, player, [choose_move] * 8, seed=1)
    assert is_black == 4 * [True] + 4 * [False] and set(scores) == {25.0}
    openings = [tuple(moves[:2]) for moves in games]
    assert openings[:4] == openings[4:] and len(set(openings)) == 4 and min(asked) == 2
    summary = go_engine.summarize(games, scores, is_black, 0.5)
    assert summary["ours_win_rate"] == 0.5 and summary["mean_margin"] == 0 and summary["distinct_games"] == 8
    assert summary["ours_win_rate_black"] == 1 and summary["ours_win_rate_white"] == 0
    with pytest.raises(ValueError, match="the last move is illegal"):
        go_engine.play(go, player, [lambda moves: moves[0]] * 2, seed=1)


def test_the_harness_reads_a_peer_as_it_reads_our_scripts(tmp_path):
    python = find_python("sb3_ppo")
    command = (python, PEERS / "sb3_ppo.py", "--seed", 2, "--total-timesteps", 1024)
    path = common.run_command(tmp_path / "a", *command)
    steps, seconds, _, returns = zip(*common.read_points(path, "charts/return_last_20"), strict=True)
    assert steps == (256, 512, 768, 1024) and sorted(seconds) == list(seconds) and min(returns) >= 8
    result = json.loads((path / "result.json").read_text())
    assert result["commit"] == "stable-baselines3 2.9.2"
    path = common.run_command(tmp_path / "b", *command, "--eval-interval", 2)
    assert [point[0] for point in common.read_points(path, "eval/episodic_return")] == [512, 1024]
    # evaluation on the way changes nothing in what is learned
    assert json.loads((path / "result.json").read_text())["metrics"] == result["metrics"]


def test_the_clock_of_a_peer_stands_still_in_evaluations(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(peer.time, "process_time", lambda: now[0])
    run = peer.Run(argparse.Namespace(env_id="a", seed=1, run_dir=str(tmp_path)), "some_peer")
    now[0] = 107.0
    run.log(1, {"x": 1.0})
    run.evaluation_seconds += 3.0
    now[0] = 111.0
    run.log(2, {"x": 2.0})
    run.finish("x", {"x": 1.5}, 1, "p 1")
    assert read_scalars(run.path)["charts/cpu_seconds"] == [(1, 7.0), (2, 8.0)]
    assert json.loads((run.path / "result.json").read_text())["cpu_seconds"] == 11.0
