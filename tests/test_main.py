"""What `main` of every script returns and prints, with --evaluate too, and what Ctrl-C leaves."""

import re
import shlex
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import read_scalars
from scripts import CASES, each_script, find_run, get_module, load, read_progress, read_scores
from tqdm import tqdm

# The first line of --evaluate, after the file, and the number of units of its bars, from the printed scores
EVALUATIONS = {
    "ppo": (
        "4 episodes of CartPole-v1 with the most likely actions",
        lambda scores: ("steps", 4 * scores["eval/episodic_length"]),
    ),
    "r2d2_lstm": (
        "4 episodes of popgym:popgym-RepeatFirstEasy-v0 with greedy actions",
        lambda scores: ("steps", 4 * scores["eval/episodic_length"]),
    ),
    "reinforce_tsp_attention": (
        "4 instances of tsp5-uniform, tours by greedy, multistart, multistart_x8",
        lambda scores: ("instances", 3 * 4),
    ),
    "alphazero_go": (
        "4 games of Go-2x2 against plain MCTS",
        lambda scores: ("moves", scores["eval/moves"] - 2 * 4),  # two moves open each game
    ),
    "ppo_change_detection": (
        r"\d+ test pairs at the threshold 0\.\d+ of probability",
        lambda scores: ("pairs", 4),
    ),
}


@pytest.fixture(autouse=True)
def no_bars_of_other_tests():
    close_bars()


@pytest.fixture(scope="module")
def done(script, tmp_path_factory):
    """The folder of a whole run, and what `main` returned."""
    folder = tmp_path_factory.mktemp("done")
    returned = get_module(script).main([*CASES[script].quick.split(), "--run-dir", str(folder)])
    return SimpleNamespace(path=find_run(folder), returned=returned)


@each_script
def test_main_returns_the_best_score(script, done):
    """So that a sweep can use it; the progress of both checkpoints holds it."""
    best = load(done.path / "best.pt")["progress"]["best_score"]
    assert isinstance(done.returned, float) and done.returned == best
    assert done.returned == read_progress(done.path)["best_score"]
    name = read_progress(done.path)["score_name"]
    assert torch.tensor(best).float() in torch.tensor([x for _, x in read_scalars(done.path)[name]])


@each_script
def test_main_returns_none_if_nothing_is_trained_or_scored(script, done, tmp_path):
    main = get_module(script).main
    assert main(["--evaluate", str(done.path / "best.pt"), "--eval-episodes", "2"]) is None
    flags = f"{CASES[script].quick} --eval-episodes 0 --run-dir {tmp_path}"
    assert main(flags.split()) is None


@each_script
def test_evaluate_says_first_what_it_plays_and_shows_a_bar(script, done, monkeypatch, capsys):
    """The bar has a named unit, appears only if there are seconds to wait, and counts all that is played."""
    module, bars = get_module(script), []
    make_bar = module.make_bar
    monkeypatch.setattr(
        module, "make_bar", lambda *a, **b: bars.append((a, b, make_bar(*a, **b))) or bars[-1][2]
    )
    capsys.readouterr()
    module.main(["--evaluate", str(done.path / "best.pt")])
    out, err = capsys.readouterr()
    words, count = EVALUATIONS[script]
    file, _, first = out.splitlines()[0].partition(": ")
    assert file == str(done.path / "best.pt") and re.fullmatch(words, first)
    unit, length = count(read_scores(out))
    assert len(bars) == 1 and err == ""
    for (name,), options, bar in bars:
        assert name == unit and bar.unit == f" {unit}" and (options["leave"], options["delay"]) == (False, 2)
        assert bar.n == pytest.approx(length, rel=1e-4)
        assert bar.total in (None, bar.n)


def interrupt_at(module, is_hit, monkeypatch):
    """Press Ctrl-C when a bar moves whose options are a hit, in training for the second time.

    All bars show at once.
    """
    make_bar = module.make_bar

    def make_and_watch(unit, **options):
        bar = make_bar(unit, **options | {"delay": 0})
        bar.mininterval = 0
        update, moves = bar.update, []

        def update_or_interrupt(n=1):
            update(n)
            moves.append(n)
            if is_hit(options) and len(moves) == (1 if "leave" in options else 2):
                signal.raise_signal(signal.SIGINT)

        bar.update = update_or_interrupt
        return bar

    monkeypatch.setattr(module, "make_bar", make_and_watch)


def interrupt(module, flags):
    """Call `main`, which interrupt_at stops; return the exit code."""
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stop:
        module.main(flags)
    assert stop.type is SystemExit
    close_bars()
    return stop.value.code


def close_bars():
    """As when the memory of a function that was interrupted is freed."""
    for bar in list(tqdm._instances):
        bar.close()


def read_terminal(text):
    """The lines, not empty, that a terminal shows after `text`."""
    rows, row, column = [[]], 0, 0
    for sign in re.findall(r"\x1b\[A|.", text, re.S):
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row, column = row + 1, 0
            rows += [[]] * (row == len(rows))
        elif sign == "\x1b[A":
            row -= 1
        else:
            rows[row][column : column + 1] = [" "] * (column - len(rows[row])) + [sign]
            column += 1
    lines = ["".join(signs).rstrip() for signs in rows]
    return [line for line in lines if line]


@each_script
@pytest.mark.parametrize("where", ["training", "an evaluation of a run"])
def test_ctrl_c_in_a_run_ends_with_the_command_that_resumes(script, where, tmp_path, monkeypatch, capsys):
    """In a line of its own, the last one, and with exit code 130."""
    module, is_evaluation = get_module(script), where != "training"
    interrupt_at(module, lambda options: (options.get("leave") is False) == is_evaluation, monkeypatch)
    flags = f"{CASES[script].quick} --run-dir {tmp_path}"
    assert interrupt(module, flags.split()) == 130
    path, err = find_run(tmp_path), capsys.readouterr().err
    command = shlex.join(("python", module.__file__, "--resume", f"{path}/checkpoint.pt"))
    *_, last = read_terminal(err)
    assert last == f"{path}: interrupted; to resume: {command}" and "Traceback" not in err
    assert (read_progress(path)["iteration"] > 0) == is_evaluation


@each_script
def test_ctrl_c_in_evaluate_ends_with_exit_code_130(script, done, monkeypatch, capsys):
    """After the line that says what is played. No traceback is shown, and no scores."""
    module = get_module(script)
    interrupt_at(module, lambda options: True, monkeypatch)
    capsys.readouterr()
    assert interrupt(module, ["--evaluate", str(done.path / "best.pt")]) == 130
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and out.startswith(f"{done.path / 'best.pt'}: ")
    assert f"{script}.py: interrupted\n" in err and "Traceback" not in err


@each_script
def test_ctrl_c_in_evaluate_leaves_one_line_on_a_terminal(script, done, monkeypatch, capsys):
    module = get_module(script)
    interrupt_at(module, lambda options: True, monkeypatch)
    capsys.readouterr()
    interrupt(module, ["--evaluate", str(done.path / "best.pt")])
    assert read_terminal(capsys.readouterr().err) == [f"{script}.py: interrupted"]
