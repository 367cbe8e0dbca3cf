"""The GTP engine: its answers, clocks, analysis and games, and SGF files as other programs write them."""

import functools
import io
import math
import random
import shutil
import sys
import time
from dataclasses import asdict

import pytest
import torch
from conftest import ROOT

from algos import alphazero_go as az
from envs_shared import go_gtp
from envs_shared.go import Go


def make_network(size=5, **options):
    torch.manual_seed(0)
    args = az.Args(env_id=f"Go-{size}x{size}", blocks=1, channels=8, score_weight=0.0, **options)
    return az.Agent(size, args), args


def make_engine(size=5, komi=0.5, num_simulations=16):
    agent, args = make_network(size, simulations_end=num_simulations, komi=komi)
    go = Go(size)
    make_search = functools.partial(az.Search, go, az.make_workers(go, agent, args))
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
    names = ask(engine, "list_commands")[0][2:].split("\n")
    wanted = "protocol_version name version known_command list_commands boardsize clear_board komi play genmove undo"
    wanted += " showboard final_score time_settings time_left loadsgf quit lz-analyze"
    assert set(wanted.split()) <= set(names)
    assert ask(engine, "  # a comment", "", "\t4\tkomi\t6.5 # another", "boardsize 5") == ["=4", "="]
    assert ask(engine, "play b C3", "play WHITE d4", "play b pass") == ["=", "=", "="]
    board = ask(engine, "showboard")[0].splitlines()
    assert board[3] == " 4 . . . O . 4" and board[4] == " 3 . . X . . 3"
    assert ask(engine, "final_score") == ["= W+6.5"] and ask(engine, "komi -3", "final_score") == [
        "=",
        "= B+3",
    ]
    assert ask(engine, "undo", "undo", "undo", "undo") == ["=", "=", "=", "? cannot undo"]
    assert ask(engine, "clear_board", "showboard")[1].count(".") == 25
    for wrong, answer in (
        ("play b Z9", "invalid vertex"),
        ("play b I5", "invalid vertex"),
        ("play green C3", "'green' is no colour"),
        ("play b", "wrong number of arguments"),
        ("genmove", "wrong number of arguments"),
        ("boardsize 19", "unacceptable size"),
        ("boardsize five", "'five' is no number"),
        ("komi nan", "'nan' is no number"),
        ("sing", "unknown command"),
        ("7", "unknown command"),
        ("quit now", "wrong number of arguments"),
        (f"time_left b 10 1{400 * '0'}", f"'1{400 * '0'}' is no number"),
        ("lz-genmove_analyze green", "unknown argument 'green'"),
        ("lz-analyze b w", "one colour and one interval at most"),
        ("lz-analyze interval", "'' is no number"),
        ("komi 1_0", "'1_0' is no number"),
        ("boardsize \u0665", "'\u0665' is no number"),  # an Arabic five
        ("play b A01", "invalid vertex"),
        ("fixed_handicap 2", "invalid number of stones"),
        ("set_free_handicap A1 A1", "bad vertex list"),
        ("set_free_handicap A1 pass", "bad vertex list"),
        ("loadsgf /nowhere.sgf", "cannot load file"),
        ("time_settings -1 0 0", "times are not negative"),
        ("lz-analyze often", "unknown argument 'often'"),
    ):
        (found,) = ask(engine, wrong)
        assert found == (f"?7 {answer}" if wrong == "7" else f"? {answer}"), (wrong, found)
    assert ask(engine, "play b C3", "play w C3") == ["=", "? illegal move"]
    assert int(engine.boards.to_play) == -1 and len(engine.positions) == 2  # what was wrong changed nothing


def test_a_turn_left_out_is_forgotten_by_undo():
    engine = make_engine()
    ask(engine, "play b A1", "play b B1", "undo")
    assert int(engine.boards.to_play) == -1  # as after the first move
    ask(engine, "genmove b", "undo")
    assert int(engine.boards.to_play) == -1 and int(engine.boards.num_moves) == 1
    assert ask(engine, "lz-genmove_analyze 10 b")[0].count("play ") == 1 and int(engine.boards.to_play) == -1


def test_goes_on_beyond_the_moves_that_a_search_knows():
    """Both sides fill and capture on 2 x 2 points and pass in between: 8 moves are the search's limit."""
    engine, reference = make_engine(2), Go(2)
    history = []
    for i in range(20):
        wanted = ("A1", "B2", "A2", "B1", "pass") if i % 3 else ("pass",)
        vertex = next(vertex for vertex in wanted if ask(engine, f"play {'bw'[i % 2]} {vertex}") == ["="])
        stones = tuple(engine.boards.stones[0, reference.cells].tolist())
        assert vertex == "pass" or stones not in history  # superko, over all moves
        history.append(stones)
    assert int(engine.boards.num_moves) == 20 and ask(engine, "genmove b") == ["= pass"]
    assert ask(engine, "final_score")[0].startswith("= ")


def test_handicap():
    engine = make_engine(9)
    assert ask(engine, "fixed_handicap 5") == ["= C3 G7 C7 G3 E5"] and int(engine.boards.to_play) == -1
    assert ask(engine, "fixed_handicap 2") == ["? board not empty"]
    assert ask(engine, "play w E4", "clear_board", "fixed_handicap 7") == ["=", "=", "= C3 G7 C7 G3 C5 G5 E5"]
    assert ask(engine, "clear_board", "set_free_handicap a1 B2 j9", "showboard")[1] == "="
    assert ask(engine, "showboard")[0].count("X") == 3 and ask(engine, "genmove w")[0].startswith("= ")
    assert make_engine(8).answer("fixed_handicap 5") and ask(make_engine(7), "fixed_handicap 4") == [
        "= C3 E5 C5 E3"
    ]


def test_keeps_the_rules():
    engine = make_engine(3)
    for move in ("b A2", "w C3", "b B1"):
        assert ask(engine, f"play {move}") == ["="]
    assert ask(engine, "play w A1") == ["? illegal move"]  # suicide
    assert ask(engine, "play w pass", "play b pass") == ["=", "="]
    assert ask(engine, "genmove w", "undo") == ["= pass", "="] and engine.boards.is_over  # the game is over
    assert ask(engine, "genmove w") == ["= pass"]
    assert ask(engine, "play b C1") == ["="]  # but may be taken up again
    vertex = ask(engine, "genmove b")[0]  # twice in a row
    assert vertex.startswith("= ") and int(engine.boards.to_play) == -1


def test_games_are_legal_and_a_position_keeps_its_tree():
    engine = make_engine(num_simulations=80)
    for i in range(12):
        assert ask(engine, f"genmove {'bw'[i % 2]}")[0].startswith("= ")
    if engine.can_search():
        stone = int(engine.boards.to_play)
        tree = engine.search(stone, math.inf, 10)
        assert engine.search(stone, math.inf, 10) is tree and tree.N[0, 0].sum() == 20
        ask(engine, "komi 3")
        assert engine.search(stone, math.inf, 10) is not tree
        other = engine.search(-stone, math.inf, 10)  # a side whose turn it is not
        assert engine.search(-stone, math.inf, 10) is other and other.N[0, 0].sum() == 20
    else:
        pytest.fail("the game was over too soon")


def test_it_searches_what_is_on_the_board():
    """Stones, side to move and komi at the root of the tree, whatever was played, searched and taken back before."""
    engine, rng, num_kept = make_engine(3), random.Random(1), 0
    for _ in range(80):
        move = f"{rng.choice('bw')} {rng.choice('ABC')}{rng.randint(1, 3)}"
        ask(
            engine,
            rng.choice([f"play {move}", f"play {move[0]} pass", f"genmove {move[0]}", "undo", "komi 2"]),
        )
        stone, kept = rng.choice([1, -1]), engine.searched[1]
        if not engine.can_search():
            ask(engine, "clear_board")
            continue
        tree = engine.search(stone, math.inf, 8)
        num_kept += tree is kept
        root, boards = tree.boards.pick((torch.tensor([0]), torch.tensor([0]))), engine.look_from(stone)
        assert int(root.to_play) == stone and torch.equal(root.stones, boards.stones)
        assert int(root.num_passes) == int(boards.num_passes) and tree.args.komi == engine.args.komi
        assert torch.equal(root.history[:, : tree.boards.history.shape[2]], boards.history)
    assert num_kept > 2


def test_thinks_no_longer_than_the_clock_allows():
    engine = make_engine(num_simulations=10_000)
    assert engine.budget(1) == math.inf
    ask(engine, "time_settings 4 0 0")
    assert engine.budget(1) == pytest.approx(0.8 * 4 / 12 - 0.1)
    start = time.monotonic()
    ask(engine, "genmove b")
    seconds = time.monotonic() - start
    assert seconds < 10  # all of them take minutes
    assert 4 - seconds <= engine.time_left[1][0] < 3.95  # its clock runs where nobody sends time_left
    ask(engine, "time_left w 3 2")
    assert engine.budget(-1) == pytest.approx(0.8 * 3 / 2 - 0.1)
    ask(engine, "time_left w 0 0")
    assert engine.budget(-1) == 0.05
    ask(engine, "time_settings 0 20 5")  # five moves in 20 seconds
    assert engine.budget(1) == pytest.approx(0.8 * 4 - 0.1)
    engine.spend(1, 8.0)
    assert engine.time_left == {1: (12.0, 4), -1: (20.0, 5)}
    for _ in range(4):
        engine.spend(1, 2.0)
    assert engine.time_left[1] == (20.0, 5)  # the next five moves
    ask(engine, "time_settings 5 20 2")
    engine.spend(-1, 4.0)
    assert engine.time_left[-1] == (1.0, 0)
    engine.spend(-1, 4.0)
    assert engine.time_left[-1] == (20.0, 2)  # main time is over
    ask(engine, "time_settings 0 0 0", "time_left b 6 3")  # a clock that nobody has announced
    assert engine.budget(1) == pytest.approx(0.8 * 2 - 0.1) and engine.budget(-1) == math.inf
    ask(engine, "time_settings 0 1 0")  # by the protocol: no limits
    assert engine.budget(1) == math.inf


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

    def slow_lines(interval):
        yield f"3 lz-analyze b {interval}\n"
        time.sleep(1.0)
        yield "name\n"

    for interval in (10, 10_000):  # analyses until the next line comes, which is heard at once
        engine.out.seek(0)
        engine.out.truncate()
        start = time.monotonic()
        engine.serve(slow_lines(interval))
        seconds = time.monotonic() - start
        assert seconds < 30
        analysis, name = engine.out.getvalue().split("\n\n")[:2]
        most = 100 * seconds / interval  # an interval is in hundredths of a second
        assert min(1, int(most)) <= analysis.count("\ninfo move ") <= most
        assert analysis.startswith("=3") and name == "= alphazero_go"


def test_resigns_where_it_is_told_to():
    engine = make_engine()
    assert ask(engine, "genmove b")[0] != "= resign"  # never, by default
    engine.args.resign_below = 1.0
    before = engine.positions[:]
    assert ask(engine, "genmove w") == ["= resign"] and engine.positions == before
    assert ask(engine, "lz-genmove_analyze w")[0].endswith("play resign")


def test_quit_ends_an_analysis_at_once():
    engine = make_engine()
    asked = []

    def lines():
        yield "lz-analyze 10000"
        time.sleep(0.5)
        asked.append(time.monotonic())
        yield "quit"

    engine.serve(lines())
    assert (
        time.monotonic() - asked[0] < 10
    )  # a slice of search, and no wait for the next line of the analysis


def test_analysis_of_a_full_tree_waits(monkeypatch):
    monkeypatch.setattr(go_gtp, "MAX_TREE", 30)
    engine = make_engine()

    def lines():
        yield "lz-analyze 20"
        time.sleep(1.0)
        yield "quit"

    start = time.monotonic()
    engine.serve(lines())
    assert engine.searched[1].N[0, 0].sum() == 30
    assert 1 <= engine.out.getvalue().count("\ninfo move ") <= (time.monotonic() - start) / 0.2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_time_it_plays_by_the_prior_and_survives_broken_input(monkeypatch):
    engine = make_engine()
    ask(engine, "play b A5")
    monkeypatch.setattr(engine, "budget", lambda colour: -1.0)
    assert ask(engine, "genmove w")[0].startswith("= ")
    tree = engine.searched[1]
    assert not tree.N[0, 0].any() and engine.boards.last_move == tree.P[0, 0].argmax()

    def broken():
        yield "name"
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    engine.out.truncate(0)
    engine.serve(broken())  # ends, and answers what was asked alone
    assert engine.out.getvalue().strip("\0") == "= alphazero_go\n\n"
    time.sleep(0.1)


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
    """As other programs write: variations, comments, moves set up, lower-case letters in names, tt for the pass."""
    engine, path = make_engine(), tmp_path / "game.sgf"
    text = "(;GM[1]FF[3]AB[aa:ab][cc]SiZe[5]\n C[a [b\\] c]AW[dd];W[tt] ;B [ba](;W[ee];B[ed])(;W[eb]))"
    path.write_text(text)
    assert go_gtp.read_sgf(path) == (
        5,
        None,
        [
            *[("set", 1, [0, 5]), ("set", 1, [12]), ("set", -1, [18])],
            *[("play", -1, [25]), ("play", 1, [1]), ("play", -1, [24]), ("play", 1, [19])],
        ],
    )
    engine.args.komi = 1.5
    assert load(engine, path, text) == "= white" and engine.args.komi == 1.5  # the file does not say
    assert board(engine) == {"A5": 1, "A4": 1, "C3": 1, "D2": -1, "B5": 1, "E1": -1, "E2": 1}
    for number, colour, num_moves in (
        ("1", "white", 0),
        ("3", "white", 2),
        ("2", "black", 1),
        ("99", "white", 4),
    ):
        assert load(engine, path, text, number) == f"= {colour}" and int(engine.boards.num_moves) == num_moves
    for text, colour in (
        ("AB[aa]PL[B]KM[2]", "black"),
        ("AB[aa]KM[]", "white"),
        ("AB[aa]AW[ee]KM[2,0]", "black"),
        ("AB[aa]PL[]", "white"),
    ):
        assert load(engine, path, f"(;SZ[5]{text})") == f"= {colour}" and engine.args.komi == 2
    assert load(engine, path, "(;SZ[5:5]AW[dd:cc])") == "= black" and sum(board(engine).values()) == -4
    assert load(engine, path, "junk (of a mail) ( ;SZ[5];B[ bc])(;B[aa])") == "= white" and board(engine) == {
        "B3": 1
    }
    for wrong in (
        *("", "no sgf", "(;SZ[5];B[zz])", "(;SZ[x])", "(;SZ[9];B[aa])", "(;SZ[5];B[aa];W[aa])", "(;SZ[99])"),
        *(
            "(;SZ[5]AW[aa]AB[ab][ba])",
            "(;SZ[5]AW[aa:ee])",
            "(;SZ[5]AB[ff])",
            "(;GM[2]SZ[5];B[aa])",
            "(;SZ[5:7])",
        ),
        *("(;SZ[5];B[aa:bb])", "(;SZ[5];B)", "(;SZ[5];B[aa"),
    ):
        before = engine.positions
        assert load(engine, path, wrong).startswith("? ") and engine.positions is before, wrong


@pytest.mark.parametrize(
    ("data", "vertices"),
    [
        ("(;CA[Big5]SZ[5]PB[\u8a31];B[cc])".encode("big5"), ["C3"]),  # its second byte is a backslash
        ("(;CA[Shift_JIS]SZ[5]PB[\u8868]PW[\u80fd];B[cc];W[bb])".encode("shift_jis"), ["B4", "C3"]),
        ("(;CA[GB18030]SZ[5]PB[\u53e4\u529b];B[cc])".encode("gb18030"), ["C3"]),
        ("(;CA[ISO-8859-1]SZ[5]PB[\xe9];B[cc])".encode("latin-1"), ["C3"]),
        ("(;SZ[5]PB[\xe9];B[cc])".encode("latin-1"), ["C3"]),  # no UTF-8
        ("(;CA[UTF-16]SZ[5]PB[\u5d5d];B[cc])".encode("utf-16"), ["C3"]),
        ("\ufeff(;SZ[5]PB[\u5d5d];B[cc])".encode("utf-16-be"), ["C3"]),
        ("(;SZ[5]PB[\u5d5d];B[cc])".encode("utf-16-le"), ["C3"]),
        ("(;CA[UTF-8]SZ[5]PB[\u5d5d];B[cc])".encode("utf-8-sig"), ["C3"]),
        ("(;CA[Big5]SZ[5]PB[\u5d5d];B[cc])".encode("utf-8-sig"), ["C3"]),  # the mark says it better
        (b"(;CA[no such encoding]SZ[5];B[cc])", ["C3"]),
        (b"(;CA[nosuch]SZ[5];B[cc])", ["C3"]),
        (b"(;CA[UTF-16]SZ[5];B[cc])", ["C3"]),  # which it is not
        (b"(;CA[hex]SZ[5];B[cc])", ["C3"]),
    ],
)
def test_files_are_read_in_the_encoding_that_they_declare(data, vertices, tmp_path):
    engine = make_engine()
    assert load(engine, tmp_path / "game.sgf", data).startswith("= ") and sorted(board(engine)) == vertices


def test_a_turn_may_be_said_and_stones_set_up_after_a_move(tmp_path):
    engine, path = make_engine(), tmp_path / "game.sgf"
    assert load(engine, path, "(;SZ[5];B[cc];W[bb]PL[B];B[dd])") == "= white"
    assert board(engine) == {"C3": 1, "B4": -1, "D2": 1}
    assert load(engine, path, "(;SZ[5];B[cc];PL[B])") == "= black"
    assert load(engine, path, "(;SZ[5];B[cc];AB[aa]AW[bb]AE[cc];W[ba])") == "= black"
    assert board(engine) == {"A5": 1, "B4": -1, "B5": -1}
    assert load(engine, path, "(;SZ[5];B[aa];AW[ba];W[ab])") == "= black"  # captures what was set up around
    assert board(engine) == {"B5": -1, "A4": -1}
    before = engine.positions
    assert load(engine, path, "(;SZ[5];B[aa];AW[ba][ab])").startswith("?") and engine.positions is before
    assert load(engine, path, "(;SZ[5];B[aa];AW[ee];B[bb];W[cc])", "2") == "= black"  # before the second move
    assert board(engine) == {"A5": 1, "E1": -1}


def test_vertices():
    for size in (5, 19):
        for move in range(size * size + 1):
            assert go_gtp.parse_vertex(go_gtp.format_vertex(move, size).lower(), size) == move
    assert go_gtp.format_vertex(0, 19) == "A19" and go_gtp.format_vertex(8, 19) == "J19"  # no column I
    for wrong in ("A0", "A6", "F1", "", "11", "I1"):
        with pytest.raises(go_gtp.GtpError):
            go_gtp.parse_vertex(wrong, 5)


# Games with another program

gnugo = shutil.which("gnugo") or shutil.which("/usr/games/gnugo")
GNUGO = f"{gnugo} --mode gtp --chinese-rules --positional-superko --capture-all-dead --never-resign --level"


def play_game(black, white, size: int, komi: float, opening: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """A game of two Clients, or whatever has their `send`, under our rules: its moves and black's margin over komi.

    `opening` holds the first moves, black's first. Raises go_gtp.GtpError where a program plays an illegal move.
    """
    go, moves, players = Go(size), [], (black, white)
    boards = go.new(1)
    for player in players:
        for command in (f"boardsize {size}", "clear_board", f"komi {komi:g}"):
            player.send(command)
    while not boards.is_over:
        turn = len(moves) % 2
        colour = "bw"[turn]
        is_opening = len(moves) < len(opening)
        vertex = (
            go_gtp.format_vertex(opening[len(moves)], size)
            if is_opening
            else players[turn].send(f"genmove {colour}")
        )
        if vertex.lower() == "resign":
            return moves, float((1 - 2 * turn) * -size * size)
        move = go_gtp.parse_vertex(vertex, size)
        if not go.legal_moves(boards)[0, move]:
            raise go_gtp.GtpError(
                f"{vertex} is illegal after {[go_gtp.format_vertex(m, size) for m in moves]}"
            )
        boards = go.play(boards, torch.tensor([move]))
        for player in players if is_opening else (players[1 - turn],):
            player.send(f"play {colour} {vertex}")
        moves.append(move)
    return moves, go.score(boards).item() - komi


def format_score(margin):
    """As GTP and SGF have it."""
    return "0" if margin == 0 else f"{'B' if margin > 0 else 'W'}+{abs(margin):g}"


@pytest.mark.skipif(gnugo is None, reason="GNU Go is not installed: apt install gnugo")
def test_games_against_gnugo(tmp_path):
    """Whole games between two programs over GTP: every move legal for both, and both count the same score.

    Where a network that knows nothing passes too early, GNU Go takes dead stones off before it counts.
    """
    agent, args = make_network(simulations_end=16)
    weights = agent.state_dict()
    optimizer = torch.optim.AdamW(agent.parameters()).state_dict()
    checkpoint = {"args": asdict(args), "progress": (0, 0, 0, 0.0, 0.0), "agent": weights, "best": weights}
    torch.save(checkpoint | {"optimizer": optimizer}, tmp_path / "best.pt")
    command = f"{sys.executable} {ROOT / 'algos' / 'alphazero_go.py'} --gtp {tmp_path / 'best.pt'}"
    num_compared = 0
    with go_gtp.Client(command) as mine, go_gtp.Client(f"{GNUGO} 1 --seed 1") as other:
        for players in ((mine, other), (other, mine)):
            moves, margin = play_game(*players, 5, 0.5, opening=(12,))
            assert len(moves) > 4
            assert mine.send("final_score") == format_score(margin)
            if other.send("final_status_list dead") == "":
                assert other.send("final_score") == format_score(margin)
                num_compared += 1
            assert (
                mine.send("showboard").count("X") == other.send("showboard").count("X") - 1
            )  # its caption has one
        assert num_compared > 0
        with pytest.raises(go_gtp.GtpError, match="illegal move"):
            mine.send("clear_board")
            mine.send("play b A1")
            mine.send("play w A1")
        assert mine.send("quit") == ""
