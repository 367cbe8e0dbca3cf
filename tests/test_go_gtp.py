"""The GTP engine: its answers, clocks, analysis and games, and SGF files as other programs write them."""

import functools
import io
import math
import random
import re
import shutil
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
    assert ask(engine, "known_command genmove", "known_command sing") == ["= true", "= false"]
    assert {"genmove", "lz-analyze"} <= {*ask(engine, "list_commands")[0][2:].split("\n")}
    assert ask(engine, "  # a comment", "", "\t4\tkomi\t6.5 # another", "boardsize 5") == ["=4", "="]
    assert ask(engine, "play b C3", "play WHITE d4", "play b pass") == ["=", "=", "="]
    rows = ask(engine, "showboard")[0].splitlines()
    assert rows[3] == " 4 . . . O . 4" and rows[4] == " 3 . . X . . 3"
    assert ask(engine, "final_score", "komi -3", "final_score") == ["= W+6.5", "=", "= B+3"]
    assert ask(engine, "undo", "undo", "undo", "undo") == ["=", "=", "=", "? cannot undo"]
    assert ask(engine, "clear_board", "showboard")[1].count(".") == 25
    ask(engine, "play b A1", "play b B1", "undo")
    assert int(engine.boards.to_play) == -1  # as after the first move


WRONG = """
play b Z9 | play green C3 | play b | quit now | boardsize 19 | boardsize \u0665 | komi nan | komi 1_0
time_settings -1 0 0 | lz-genmove_analyze green | lz-analyze b w | lz-analyze interval | sing | 7 | undo
fixed_handicap 2 | set_free_handicap A1 A1 | set_free_handicap A1 pass | loadsgf /nowhere.sgf
"""  # among them is an Arabic five


def test_wrong_commands_are_answered_and_change_nothing():
    engine = make_engine()
    for wrong in [*WRONG.strip().replace("\n", "|").split("|"), f"time_left b 10 1{400 * '0'}"]:
        (answer,) = ask(engine, wrong)
        assert re.match(r"\?7? .", answer) and len(engine.positions) == 1 and not engine.time_left, wrong
    assert ask(engine, "play b C3", "play w C3") == ["=", "? illegal move"]
    assert int(engine.boards.to_play) == -1 and len(engine.positions) == 2


def test_goes_on_beyond_the_moves_that_a_search_knows():
    """Both sides fill and capture on 2 x 2 points and pass in between: 8 moves are the search's limit."""
    engine, history = make_engine(2), []
    for i in range(20):
        wanted = ("A1", "B2", "A2", "B1", "pass") if i % 3 else ("pass",)
        vertex = next(vertex for vertex in wanted if ask(engine, f"play {'bw'[i % 2]} {vertex}") == ["="])
        stones = tuple(engine.boards.stones[0, engine.go.cells].tolist())
        assert vertex == "pass" or stones not in history  # superko, over all moves
        history.append(stones)
    assert int(engine.boards.num_moves) == 20 and ask(engine, "genmove b") == ["= pass"]
    assert ask(engine, "final_score")[0].startswith("= ")


def test_handicap():
    engine = make_engine(9)
    assert ask(engine, "fixed_handicap 5") == ["= C3 G7 C7 G3 E5"] and int(engine.boards.to_play) == -1
    assert ask(engine, "fixed_handicap 2") == ["? board not empty"]
    answers = ask(engine, "clear_board", "set_free_handicap a1 B2 j9", "showboard", "genmove w")
    assert answers[1] == "=" and answers[2].count("X") == 3 and answers[3].startswith("= ")


def test_a_game_that_is_over_may_be_taken_up_again():
    engine = make_engine(3)
    assert ask(engine, "play w pass", "play b pass", "genmove w", "undo") == ["=", "=", "= pass", "="]
    assert engine.boards.is_over and ask(engine, "play b C1") == ["="]
    vertex = ask(engine, "genmove b")[0]  # twice in a row
    assert vertex.startswith("= ") and int(engine.boards.to_play) == -1


def test_it_searches_what_is_on_the_board():
    """Stones, side to move and komi at the root of the tree, whatever was played, searched and taken back
    before."""
    engine, rng, num_kept = make_engine(3), random.Random(1), 0
    for _ in range(80):
        move = f"{rng.choice('bw')} {rng.choice('ABC')}{rng.randint(1, 3)}"
        commands = [f"play {move}", f"play {move[0]} pass", f"genmove {move[0]}", "undo", f"komi {move[-1]}"]
        ask(engine, rng.choice(commands))
        stone, kept = rng.choice([1, -1]), engine.searched[1]
        if not engine.can_search():
            ask(engine, "clear_board")
            continue
        tree = engine.search(stone, math.inf, 8)
        num_kept += tree is kept
        num_visits = tree.N[0, 0].sum()
        assert engine.search(stone, math.inf, 8) is tree and tree.N[0, 0].sum() == num_visits + 8
        root, boards = tree.boards.pick((torch.tensor([0]), torch.tensor([0]))), engine.look_from(stone)
        assert int(root.to_play) == stone and torch.equal(root.stones, boards.stones)
        assert int(root.num_passes) == int(boards.num_passes) and tree.args.komi == engine.args.komi
        assert torch.equal(root.history[:, : tree.boards.history.shape[2]], boards.history)
    assert num_kept > 2


def test_thinks_no_longer_than_the_clock_allows():
    engine = make_engine(num_simulations=10_000)  # which take minutes
    assert engine.budget(1) == math.inf
    ask(engine, "time_settings 4 0 0")
    assert engine.budget(1) == pytest.approx(0.8 * 4 / 12 - 0.1)
    start = time.monotonic()
    ask(engine, "genmove b")
    seconds = time.monotonic() - start
    assert (
        seconds < 10 and 4 - seconds <= engine.time_left[1][0] < 3.95
    )  # its clock runs where nobody sends time_left
    for commands, budget in (
        (["time_left w 3 2"], 0.8 * 3 / 2 - 0.1),
        (["time_left w 0 0"], 0.05),
        (["time_settings 0 20 5"], 0.8 * 4 - 0.1),  # five moves in 20 seconds
        (["time_settings 6 20 5"], 0.8 * (6 / 12 + 4) - 0.1),
        (["time_settings 0 0 0", "time_left w 6 3"], 0.8 * 2 - 0.1),  # a clock that nobody has announced
        (["time_settings 0 1 0"], math.inf),  # by the protocol: no limits
    ):
        ask(engine, *commands)
        assert engine.budget(-1) == pytest.approx(budget)


def test_analysis():
    engine = make_engine()
    ask(engine, "play b C3")
    engine.answer("lz-genmove_analyze w 10")
    text = engine.out.getvalue().split("=\n")[-1].splitlines()
    assert text[0].startswith("info move ") and " pv " in text[0] and text[1].startswith("play ")
    first = text[0].split(" info ")[0].split()
    fields = dict(zip(first[1::2], first[2::2], strict=False))
    assert fields["move"] == text[1].split()[1] == first[first.index("pv") + 1] and fields["order"] == "0"
    assert 0 <= int(fields["winrate"]) <= 10_000 and int(fields["visits"]) > 0


# SGF


def load(engine, path, text, *more):
    """What loadsgf answers to a file of this content."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ask(engine, " ".join(["loadsgf", str(path), *more]))[0]


def board(engine):
    """Stones of the position by vertex."""
    points = engine.boards.stones[0, engine.go.cells].tolist()
    return {go_gtp.format_vertex(i, engine.go.size): x for i, x in enumerate(points) if x}


def test_main_lines_of_files(tmp_path):
    """As other programs write: variations, comments, moves set up, lower-case letters in names, tt for the
    pass."""
    engine, path = make_engine(), tmp_path / "game.sgf"
    text = "(;GM[1]FF[3]AB[aa:ab][cc]SiZe[5]\n C[a [b\\] c]AW[dd];W[tt] ;B [ba](;W[ee];B[ed])(;W[eb]))"
    path.write_text(text)
    stones = [("set", 1, [0, 5]), ("set", 1, [12]), ("set", -1, [18])]
    moves = [("play", -1, [25]), ("play", 1, [1]), ("play", -1, [24]), ("play", 1, [19])]
    assert go_gtp.read_sgf(path) == (5, None, stones + moves)
    engine.args.komi = 1.5
    assert load(engine, path, text) == "= white" and engine.args.komi == 1.5  # the file does not say
    assert board(engine) == {"A5": 1, "A4": 1, "C3": 1, "D2": -1, "B5": 1, "E1": -1, "E2": 1}
    for number, colour, num_moves in ((1, "white", 0), (3, "white", 2), (2, "black", 1), (99, "white", 4)):
        assert load(engine, path, text, str(number)) == f"= {colour}"
        assert int(engine.boards.num_moves) == num_moves


FOUR = {"B4": -1, "B3": -1, "C4": -1, "C3": -1}
FILES = [
    ("(;SZ[5]AB[aa]PL[B]KM[2])", "black", {"A5": 1}),
    ("(;SZ[5:5]AW[bb:cc])", "black", FOUR),
    ("junk (of a mail) ( ;SZ[5];B[ bc])(;B[aa])", "white", {"B3": 1}),
    # A turn is said, and stones are set up after a move, which captures what was set up around it
    ("(;SZ[5];B[cc];W[bb]PL[B];B[dd])", "white", {"C3": 1, "B4": -1, "D2": 1}),
    ("(;SZ[5]AB[]AW[]AE[];B[cc])", "white", {"C3": 1}),  # nothing is set up
    ("(;SZ[5];B[cc];AB[aa]AW[bb]AE[cc];W[ba])", "black", {"A5": 1, "B4": -1, "B5": -1}),
    ("(;SZ[5];B[aa];AW[ba];W[ab])", "black", {"B5": -1, "A4": -1}),
    # Encodings: one whose second byte is a backslash, no UTF-8, UTF-16, and a mark that says it better
    ("(;CA[Big5]SZ[5]PB[\u8a31];B[cc])".encode("big5"), "white", {"C3": 1}),
    ("(;SZ[5]PB[\xe9];B[cc])".encode("latin-1"), "white", {"C3": 1}),
    ("(;CA[UTF-16]SZ[5]PB[\u5d5d];B[cc])".encode("utf-16"), "white", {"C3": 1}),
    ("(;CA[Big5]SZ[5]PB[\u5d61];B[cc])".encode("utf-8-sig"), "white", {"C3": 1}),
]


def test_files_of_other_programs(tmp_path):
    engine = make_engine()
    for data, colour, stones in FILES:
        assert load(engine, tmp_path / "game.sgf", data) == f"= {colour}" and board(engine) == stones, data
    assert engine.args.komi == 2


BAD_FILES = """
no sgf | (;SZ[5];B[zz]) | (;SZ[x]) | (;SZ[9];B[aa]) | (;SZ[5];B[aa];W[aa]) | (;SZ[99])
(;SZ[5]AW[aa]AB[ab][ba]) | (;SZ[5]AW[aa:ee]) | (;SZ[5]AB[ff]) | (;GM[2]SZ[5];B[aa]) | (;SZ[5:7])
(;SZ[5];B[aa:bb]) | (;SZ[5];B) | (;SZ[5];B[aa
"""


def test_bad_files_change_nothing(tmp_path):
    engine = make_engine()
    for wrong in ["", *BAD_FILES.replace("\n", "|").split("|")]:
        before = engine.positions
        assert load(engine, tmp_path / "x.sgf", wrong.strip()).startswith("? ") and engine.positions is before


def test_vertices():
    for move in range(19 * 19 + 1):
        assert go_gtp.parse_vertex(go_gtp.format_vertex(move, 19).lower(), 19) == move
    assert go_gtp.format_vertex(0, 19) == "A19" and go_gtp.format_vertex(8, 19) == "J19"  # no column I
    for wrong in ("A0", "A01", "A6", "F1", "", "11", "I1"):
        with pytest.raises(go_gtp.GtpError):
            go_gtp.parse_vertex(wrong, 5)


# Games with another program

gnugo = shutil.which("gnugo") or shutil.which("/usr/games/gnugo")
GNUGO = f"{gnugo} --mode gtp --chinese-rules --positional-superko --capture-all-dead --never-resign --level"


@pytest.mark.skipif(gnugo is None, reason="GNU Go is not installed: apt install gnugo")
def test_games_against_gnugo():
    """Whole games of two programs: each takes the other's moves for legal, and both count the same score.

    Where there are dead stones at the end, GNU Go takes them off before it counts.
    """
    checkpoint = ROOT / "benchmark" / "checkpoints" / "go5x5.pt"
    command = f"{sys.executable} {ROOT / 'algos' / 'alphazero_go.py'} --gtp {checkpoint} --simulations-end 16"
    num_compared = 0
    with go_gtp.Client(command) as mine, go_gtp.Client(f"{GNUGO} 1 --seed 1") as other:
        for players in ((mine, other), (other, mine)):
            for player in players:
                for line in ("boardsize 5", "clear_board", "komi 0.5", "play b C3"):
                    player.send(line)
            vertices = ["C3"]
            while vertices[-2:] != ["PASS", "PASS"]:
                turn = len(vertices) % 2
                vertices.append(players[turn].send(f"genmove {'bw'[turn]}").upper())
                players[1 - turn].send(f"play {'bw'[turn]} {vertices[-1]}")
            assert len(vertices) > 4
            if other.send("final_status_list dead") == "":
                assert mine.send("final_score") == other.send("final_score")
                num_compared += 1
        assert num_compared > 0 and mine.send("quit") == ""
        with pytest.raises(go_gtp.GtpError, match="invalid"):
            other.send("play b Z9")
