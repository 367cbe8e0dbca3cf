"""The GTP engine: its answers, clocks and trees, and SGF files as other programs write them."""

import functools
import io
import math
import re
import sys
import time

import pytest
import torch
from helpers import ROOT

from algos import alphazero_go as az
from envs_shared import go_gtp
from envs_shared.go import Go


def make_engine(size=5, num_simulations=16):
    torch.manual_seed(0)
    sizes = {"blocks": 1, "channels": 8, "simulations_end": num_simulations}
    go, args = Go(size), az.Args(env_id=f"Go-{size}x{size}", score_weight=0.0, **sizes)
    make_search = functools.partial(az.Search, go, az.make_evaluator(go, az.Agent(go, args)))
    return go_gtp.Engine(go, make_search, args, io.StringIO())


def ask(engine, *lines):
    """Answers to commands, without the blank lines."""
    engine.out.seek(0)
    engine.out.truncate()
    for line in lines:
        engine.answer(line)
    text = engine.out.getvalue()
    assert text == "" or text.endswith("\n\n")
    return text.strip("\n").split("\n\n")


def test_answers():
    engine = make_engine()
    assert ask(engine, "protocol_version", "12 name", "version") == ["= 2", "=12 alphazero_go", "= 1"]
    assert ask(engine, "  # a comment", "", "\t4\tkomi\t6.5 # another", "boardsize 5") == ["=4", "="]
    assert ask(engine, "play b C3", "play WHITE d4", "play b pass") == ["=", "=", "="]
    rows = ask(engine, "showboard")[0].splitlines()
    assert rows[3] == " 4 . . . O . 4" and rows[4] == " 3 . . X . . 3"
    assert ask(engine, "final_score", "komi -3", "final_score") == ["= W+6.5", "=", "= B+3"]
    # A game that is over may be taken up again, and a side may move twice in a row
    assert ask(engine, "play w pass", "genmove b", "undo", "play b A1") == ["=", "= pass", "=", "="]
    assert ask(engine, "play b B1", "undo") == ["=", "="] and int(engine.boards.to_play) == -1
    assert ask(engine, "clear_board", "undo") == ["=", "? cannot undo"]
    assert ask(engine, "set_free_handicap a1 B2") == ["="] and int(engine.boards.to_play) == -1


def test_it_searches_what_is_on_the_board():
    """A tree is kept only for the same stones, side to move and komi."""
    engine, trees = make_engine(3), []
    for command in ("komi 1", "play w B2", "play w A1", "undo", "komi 2", "clear_board", "play w B2"):
        ask(engine, command)
        for stone in (-1, 1, -1):  # the first is the last one before the command
            tree = engine.search(stone, math.inf, 8)
            assert engine.search(stone, math.inf, 8) is tree and tree.N[0, 0].sum() == 16
            assert not any(tree is x for x in trees) and tree.args.komi == engine.args.komi
            root, boards = tree.boards.pick((torch.tensor([0]), torch.tensor([0]))), engine.look_from(stone)
            assert int(root.to_play) == stone and torch.equal(root.stones, boards.stones)
            assert torch.equal(root.history, boards.history)
            trees.append(tree)


def test_thinks_no_longer_than_the_clock_allows():
    engine = make_engine(num_simulations=10_000)  # which take minutes
    ask(engine, "time_settings 4 0 0")
    start = time.monotonic()
    ask(engine, "genmove b")
    seconds = time.monotonic() - start
    # Its clock runs where nobody sends time_left
    assert seconds < 10 and 4 - seconds <= engine.time_left[1][0] < 3.95
    for command, budget in (
        ("time_settings 4 0 0", 0.8 * 4 / 12 - 0.1),
        ("time_left w 3 2", 0.8 * 3 / 2 - 0.1),
        ("time_left w 0 0", 0.05),
        ("time_settings 0 20 5", 0.8 * 4 - 0.1),  # five moves in 20 seconds
        ("time_settings 6 20 5", 0.8 * (6 / 12 + 4) - 0.1),
        ("time_settings 0 1 0", math.inf),  # by the protocol: no limits
    ):
        ask(engine, command)
        assert engine.budget(-1) == pytest.approx(budget)


def parse_winrates(text):
    """Win rates by vertex from a line of analysis."""
    found = re.findall(r"info move (\w+) visits \d+ winrate (\d+)", text)
    return {vertex: int(winrate) for vertex, winrate in found}


def test_analysis_shows_the_win_rate_of_the_side_that_moves():
    """Here the network finds that black wins nine of ten games; winrates are in 1/10,000."""
    engine = make_engine(3)

    def evaluate(boards, legal):
        return torch.zeros(legal.shape), torch.where(boards.to_play == 1, 0.9, 0.1)

    engine.make_search = functools.partial(az.Search, engine.go, evaluate)
    for colour, low, high in ((1, 8500, 9500), (-1, 500, 1500)):
        engine.out.seek(0)
        engine.out.truncate()
        tree = engine.search(colour, math.inf, 12)
        engine.show(tree)
        winrates = parse_winrates(engine.out.getvalue())
        assert len(winrates) > 3 and low < min(winrates.values()) <= max(winrates.values()) < high


def test_it_resigns_below_a_value():
    for resign_below, answer in ((0.0, r"= [A-E][1-5]|= pass"), (1.0, "= resign")):
        engine = make_engine()
        engine.args.resign_below = resign_below
        assert re.fullmatch(answer, ask(engine, "genmove b")[0])


def test_komi_decides_who_wins_in_the_search():
    """After a pass on the empty board, another pass ends the game with a margin of minus komi."""
    engine = make_engine(3, num_simulations=60)
    for komi, expected in ((3, 1), (-3, 0)):  # white wins, black wins
        ask(engine, "clear_board", f"komi {komi}", "play b pass")
        tree = engine.search(-1, math.inf, 60)
        node = int(tree.child[0, 0, 9])
        assert node and tree.boards.is_over[0, node]
        value = tree.value[0, node].item()  # for the side to move after the pass of white: black
        assert value == 1 - expected


def test_a_game_of_more_moves_than_training_allows_goes_on():
    """Beyond 2 n^2 moves the engine passes, and other moves are still played and checked."""
    engine = make_engine(2)
    for _ in range(5):
        assert ask(engine, "play b pass", "play w pass") == ["=", "="]
    assert int(engine.boards.num_moves) == 10 > 2 * 2**2
    assert ask(engine, "genmove b", "play w A1", "play b A1") == ["= pass", "=", "? illegal move"]
    for _ in range(10):
        ask(engine, "play b pass", "play w pass")
    assert ask(engine, "genmove b", "final_score") == ["= pass", "= W+4.5"]


def test_white_begins_after_a_handicap():
    engine = make_engine(7)
    assert ask(engine, "fixed_handicap 2") == ["= C3 E5"] and int(engine.boards.to_play) == -1
    assert int(engine.boards.stones[0, engine.go.cells].sum()) == 2  # black stones
    assert engine.answer("genmove w") and int(engine.boards.to_play) == 1


# SGF


def load(engine, path, text, number=1_000_000):
    """What loadsgf answers to a file of this content."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ask(engine, f"loadsgf {path} {number}")[0]


def board(engine):
    """Stones of the position by vertex."""
    points = engine.boards.stones[0, engine.go.cells].tolist()
    return {go_gtp.format_vertex(i, engine.go.size): x for i, x in enumerate(points) if x}


# As other programs write: variations, comments, lower-case letters in names, tt for the pass
MAIN_LINE = "(;GM[1]FF[3]AB[aa:ab][cc]SiZe[5]\n C[a [b\\] c]AW[dd];W[tt] ;B [ba](;W[ee];B[ed])(;W[eb]))"
FILES = [
    (MAIN_LINE, "white", {"A5": 1, "A4": 1, "C3": 1, "D2": -1, "B5": 1, "E1": -1, "E2": 1}),
    ("(;SZ[5]AB[aa]PL[B]KM[2])", "black", {"A5": 1}),
    # A turn is said, and stones are set up after a move, which captures what was set up around it
    ("(;SZ[5];B[cc];W[bb]PL[B];B[dd])", "white", {"C3": 1, "B4": -1, "D2": 1}),
    ("(;SZ[5];B[aa];AW[ba];W[ab])", "black", {"B5": -1, "A4": -1}),
    # Encodings: one whose second byte is a backslash, UTF-16, and a mark that says it better
    ("(;CA[Big5]SZ[5]PB[\u8a31];B[cc])".encode("big5"), "white", {"C3": 1}),
    ("(;CA[UTF-16]SZ[5]PB[\u5d5d];B[cc])".encode("utf-16"), "white", {"C3": 1}),
    ("(;CA[Big5]SZ[5]PB[\u5d61];B[cc])".encode("utf-8-sig"), "white", {"C3": 1}),
]


def test_files_of_other_programs(tmp_path):
    engine = make_engine()
    for data, colour, stones in FILES:
        assert load(engine, tmp_path / "game.sgf", data) == f"= {colour}" and board(engine) == stones, data
    assert engine.args.komi == 2
    assert load(engine, tmp_path / "game.sgf", MAIN_LINE, 3) == "= white"
    assert int(engine.boards.num_moves) == 2 and "E1" not in board(engine)  # before the third move


WRONG_COMMANDS = """
play b Z9 | play green C3 | play b | quit now | boardsize 19 | komi nan | komi 1_0 | time_settings -1 0 0
lz-analyze b w | lz-analyze interval | sing | 7 | set_free_handicap A1 A1 | loadsgf /nowhere.sgf
"""
WRONG_FILES = """
no sgf | (;SZ[5];B[zz]) | (;SZ[x]) | (;SZ[9];B[aa]) | (;SZ[5];B[aa];W[aa]) | (;SZ[5]AW[aa]AB[ab][ba])
(;GM[2]SZ[5];B[aa]) | (;SZ[5:7]) | (;SZ[5];B[aa:bb]) | (;SZ[5];B) | (;SZ[5];B[aa
"""


def test_wrong_commands_and_files_are_answered_and_change_nothing(tmp_path):
    engine = make_engine()
    before = engine.positions
    for wrong in re.split("[|\n]", WRONG_COMMANDS.strip()):
        assert re.match(r"\?7? .", ask(engine, wrong)[0]), wrong
    for wrong in re.split("[|\n]", WRONG_FILES.strip()):
        assert load(engine, tmp_path / "wrong.sgf", wrong).startswith("? "), wrong
    assert engine.positions is before and len(before) == 1 and not engine.time_left


def test_vertices():
    for move in range(19 * 19 + 1):
        assert go_gtp.parse_vertex(go_gtp.format_vertex(move, 19).lower(), 19) == move
    assert go_gtp.format_vertex(0, 19) == "A19" and go_gtp.format_vertex(8, 19) == "J19"  # no column I
    handicap = [go_gtp.format_vertex(move, 9) for move in go_gtp.list_handicap(9, 5)]
    assert handicap == ["C3", "G7", "C7", "G3", "E5"]  # in the order of the protocol


# As a program


def test_a_program_plays_with_a_saved_network():
    """Over pipes, as a user interface starts it."""
    checkpoint = ROOT / "benchmark" / "checkpoints" / "go5x5.pt"
    script = ROOT / "algos" / "alphazero_go.py"
    with go_gtp.Client(f"{sys.executable} {script} --gtp {checkpoint} --simulations-end 16") as client:
        assert client.send("boardsize 5") == "" and client.send("genmove b") == "C3"
        with pytest.raises(go_gtp.GtpError, match="illegal move"):
            client.send("play w C3")
        assert client.send("final_score") == "B+25" and client.send("quit") == ""
