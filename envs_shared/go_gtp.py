"""An engine for the Go Text Protocol, version 2 (Farneback 2002), with SGF files and Leela Zero's analysis.

A move is row * n + column from the top left, the pass n * n; its vertex is a name such as C3, or `pass`.
"""

import contextlib
import inspect
import math
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from envs_shared.go import Boards, Go

COLUMNS = "ABCDEFGHJKLMNOPQRST"  # without I
COLOURS = {"b": 1, "black": 1, "w": -1, "white": -1}
MAX_TREE = 10_000  # a tree has room for at least this many simulations


class GtpError(ValueError):
    """An error that is answered with `?`."""


# ---- Words -------------------------------------------------------------------------------------------------
def format_vertex(move: int, size: int) -> str:
    """Return the vertex of a move; A1 is the lower left corner."""
    row, column = divmod(move, size)
    return "pass" if row == size else f"{COLUMNS[column]}{size - row}"


def parse_vertex(text: str, size: int) -> int:
    """Return the move of a vertex in any case; raises GtpError if it is not on the board."""
    names = [format_vertex(move, size).lower() for move in range(size**2 + 1)]
    if text.lower() not in names:
        raise GtpError("invalid vertex")
    return names.index(text.lower())


def parse_colour(text: str) -> int:
    """Return 1 for black and -1 for white."""
    if text.lower() not in COLOURS:
        raise GtpError(f"{text!r} is not a colour")
    return COLOURS[text.lower()]


def parse_number(text: str, kind: type):
    """Return a finite number."""
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"[-+.0-9eE]+", text) and abs(value := kind(text)) <= 1e9:
            return value
    raise GtpError(f"{text!r} is not a valid number")


def parse_analysis(words) -> tuple[int | None, float]:
    """Return the colour (None if not given) and seconds between lines of `[colour] [[interval] hundredths]`.

    `minmoves N` and `maxmoves N` are read, but all moves are shown.
    """
    colours, numbers, words = [], [], [word.lower() for word in words]
    while words:
        word = words.pop(0)
        if word in COLOURS:
            colours.append(COLOURS[word])
        elif word in ("interval", "minmoves", "maxmoves"):
            number = parse_number(words.pop(0) if words else "", float)
            numbers += [number] * (word == "interval")
        elif word.isalpha():
            raise GtpError(f"unknown argument {word!r}")
        else:
            numbers.append(parse_number(word, float))
    if len(colours) > 1 or len(numbers) > 1:
        raise GtpError("one colour and one interval at most")
    return colours[0] if colours else None, max(0.05, numbers[0] / 100) if numbers else 0.5


def list_handicap(size: int, num_stones: int) -> list[int]:
    """Return the points of fixed handicap stones, in the order of the protocol."""
    largest = 0 if size < 7 else 4 if size == 7 or size % 2 == 0 else 9
    if not 2 <= num_stones <= largest:
        raise GtpError("invalid number of stones")
    near, middle = 2 if size < 13 else 3, size // 2
    far = size - 1 - near
    corners = [(far, near), (near, far), (near, near), (far, far)]  # rows from the top
    sides = [(middle, near), (middle, far), (far, middle), (near, middle)]
    points = corners[:num_stones] + sides[: max(0, num_stones - 4) // 2 * 2]
    if num_stones in (5, 7, 9):
        points.append((middle, middle))
    return [row * size + column for row, column in points]


# ---- SGF ---------------------------------------------------------------------------------------------------
def decode_sgf(data: bytes) -> str:
    """Decode a file by its byte order mark, by the encoding that it declares in CA[...], or as UTF-8."""
    wide = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"(\0": "utf-16-le", b"\0(": "utf-16-be"}
    declared = re.search(rb"\bCA\s*\[\s*([\w.:-]+)\s*\]", data)
    encoding = wide.get(data[:2]) or (declared[1].decode() if declared else "utf-8")
    if not data.startswith(b"\xef\xbb\xbf"):  # the mark of UTF-8
        with contextlib.suppress(LookupError):  # no such encoding
            text = data.decode(encoding, errors="replace")
            if "(" in text:  # otherwise the declaration is wrong
                return text
    return data.decode("utf-8", errors="replace")


TOKEN = re.compile(r"\s*(?:([();])|([A-Za-z]+)((?:\s*\[(?:\\.|[^\\\]])*\])+))", re.S)
VALUE = re.compile(r"\[((?:\\.|[^\\\]])*)\]", re.S)


def read_sgf(path: str):
    """Return size, komi (None if not given) and events of the main line of the first game of an SGF file.

    An event is (kind, colour, points): "play" a move, "set" points to 1 black, -1 white or 0 empty, or the
    "turn" of a colour. Raises ValueError if the file holds no game of Go on a square board of up to 19 lines.
    """
    text = decode_sgf(Path(path).read_bytes())
    start, properties = re.search(r"\(\s*;", text), []
    if not start:
        raise ValueError(f"{path}: not an SGF file")
    position = start.start()
    while (match := TOKEN.match(text, position)) and match[1] != ")":  # the first variation is the main line
        position = match.end()
        if match[2]:
            key = "".join(c for c in match[2] if c.isupper())
            values = (re.sub(r"\\(.)", r"\1", value, flags=re.S) for value in VALUE.findall(match[3]))
            properties += [(key, value.strip()) for value in values]
    values = dict(reversed(properties))  # the first one of each
    rows, _, columns = values.get("SZ", "19").partition(":")
    size = int(rows)
    if (not match and text[position:].strip()) or values.get("GM", "1") != "1":
        raise ValueError(f"no game of Go at {text[position : position + 20]!r}")
    if not 1 <= size <= 19 or columns not in ("", rows):
        raise ValueError(f"no board of {rows}:{columns or rows} lines")
    komi = re.fullmatch(r"[-+]?[0-9]{1,9}([.,][0-9]*)?", values.get("KM", ""))  # some write none, or a comma
    events = []
    for key, value in properties:
        if key in ("B", "W"):
            is_pass = value in ("", "tt")  # the latter on boards up to 19 lines
            events.append(("play", COLOURS[key.lower()], [size**2] if is_pass else parse_points(value, size)))
        elif key in ("AB", "AW", "AE") and value:
            events.append(("set", COLOURS.get(key[1].lower(), 0), parse_points(value, size)))
        elif key == "PL" and value[:1].lower() in COLOURS:
            events.append(("turn", COLOURS[value[:1].lower()], []))
    return size, float(komi[0].replace(",", ".")) if komi else None, events


def parse_points(text: str, size: int) -> list[int]:
    """Return the moves of an SGF point, or of a rectangle of points such as aa:cc."""
    numbers = [ord(letter) - ord("a") for letter in text.replace(":", "")]
    if not re.fullmatch(r"[a-s]{2}(:[a-s]{2})?", text) or max(numbers) >= size:
        raise ValueError(f"no point {text!r} on {size} lines")
    columns, rows = (range(min(x), max(x) + 1) for x in (numbers[::2], numbers[1::2]))
    return [row * size + column for row in rows for column in columns]


def set_up(go: Go, points: list[int], to_play: int) -> Boards:
    """Return a position [1] of stones, 1 black and -1 white, without history; GtpError for dead stones."""
    boards = go.new(1)
    # In any order: stones that all live in the end have a liberty after each move
    for move, colour in enumerate(points):
        if colour:
            boards = boards._replace(to_play=torch.full_like(boards.to_play, colour))
            if not go.legal_moves(boards)[0, move]:
                raise GtpError("stones without liberties")
            boards = go.play(boards, torch.tensor([move], device=go.device))
    if boards.stones[0, go.cells].tolist() != points:
        raise GtpError("stones without liberties")
    fresh, position = go.new(1), boards.history[0, boards.num_moves[0]]
    fresh.history[:, 0] = position
    is_turn = torch.full_like(boards.to_play, to_play)
    return fresh._replace(
        stones=boards.stones, groups=boards.groups, in_atari=boards.in_atari, to_play=is_turn
    )


# ---- Engine ------------------------------------------------------------------------------------------------
class Engine:
    """Answers commands of GTP; nothing else is written to the output.

    `make_search(boards, num_simulations, args)` makes a tree of alphazero_go.py's search, with room for
    that many simulations. The engine reads komi, simulations_end and resign_below of `args`.
    """

    def __init__(self, go: Go, make_search, args, out=None):
        self.go, self.make_search, self.args, self.out = go, make_search, args, out or sys.stdout
        self.lines: queue.Queue = queue.Queue()
        self.main_time, self.byo_time, self.byo_stones = 0.0, 0.0, 0
        self.turned = None, None  # a position, and the same with the other side to move
        self.searched = None, None  # a position, and its tree
        names = [name for name in dir(self) if name.startswith("cmd_")]
        self.commands = {name[4:].replace("lz_", "lz-"): getattr(self, name) for name in names}
        self.cmd_clear_board()

    def serve(self, lines):
        """Answer the commands in `lines`, an iterable, until `quit`, the last line, or a closed output."""

        def read():
            try:
                for line in lines:
                    self.lines.put(line)
            finally:
                self.lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            while (line := self.lines.get()) is not None and self.answer(line):
                pass

    def answer(self, line: str) -> bool:
        """Answer one line; returns False after `quit`."""
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", line.split("#")[0]).strip()
        if not text:
            return True
        number, command = re.fullmatch(r"([0-9]*)\s*(.*)", text, re.S).groups()
        name, *words = command.split() or [""]
        try:
            if name not in self.commands:
                raise GtpError("unknown command")
            try:
                inspect.signature(self.commands[name]).bind(*words)
            except TypeError:
                raise GtpError("wrong number of arguments") from None
            answer = self.commands[name](*words)
        except GtpError as error:
            self.write(f"?{number} {error}\n\n")
            return True
        if callable(answer):  # an analysis writes while it runs
            self.write(f"={number}\n")
            answer()
            self.write("\n")
        else:
            self.write(f"={number} {answer or ''}".rstrip() + "\n\n")
        return name != "quit"

    def write(self, text: str):
        """Write to the output at once."""
        self.out.write(text)
        self.out.flush()

    @property
    def boards(self) -> Boards:
        """Return the position on the board."""
        return self.positions[-1]

    def look_from(self, colour: int) -> Boards:
        """Return the position with `colour` to move, even if it is not its turn."""
        if int(self.boards.to_play) == colour:
            return self.boards
        if self.turned[0] is not self.boards:  # the same object as before keeps its tree
            self.turned = self.boards, self.boards._replace(to_play=-self.boards.to_play)
        return self.turned[1]

    def play_move(self, colour: int, move: int):
        """Play a legal move, even after passes or the number of moves have ended the game."""
        boards = self.look_from(colour)
        boards = boards._replace(num_passes=boards.num_passes.clamp(max=1))
        if int(boards.num_moves) == boards.history.shape[1] - 1:
            boards = boards._replace(history=torch.cat((boards.history, torch.zeros_like(boards.history)), 1))
        if not self.go.legal_moves(boards)[0, move]:
            raise GtpError("illegal move")
        self.positions.append(self.go.play(boards, torch.tensor([move], device=self.go.device)))

    def budget(self, colour: int) -> float:
        """Return the seconds for this move by the clock; infinite without time control."""
        if colour not in self.time_left:
            return math.inf
        seconds, stones = self.time_left[colour]
        moves_left = stones or max(10, (self.go.num_points - int(self.boards.num_moves)) // 2)
        extra = self.byo_time / self.byo_stones if not stones and self.byo_stones else 0.0
        return max(0.05, 0.8 * (seconds / moves_left + extra) - 0.1)

    def start_clocks(self):
        """Set both clocks as time_settings says; by the protocol, overtime for zero stones means no limit."""
        is_limited = self.byo_stones > 0 if self.byo_time else self.main_time > 0
        first = (self.main_time, 0) if self.main_time else (self.byo_time, self.byo_stones)
        self.time_left = {1: first, -1: first} if is_limited else {}  # seconds, and moves for them (0: all)

    def spend(self, colour: int, seconds: float):
        """Charge a move to a clock; this matters only if the other program sends no time_left."""
        left, stones = self.time_left.get(colour, (math.inf, 0))
        left -= seconds
        if self.byo_stones and (stones == 1 or (stones == 0 and left <= 0)):  # the next period
            left, stones = self.byo_time, self.byo_stones
        elif stones:
            stones -= 1
        if colour in self.time_left:
            self.time_left[colour] = max(0.0, left), stones

    def can_search(self) -> bool:
        """Tell whether there is something to search; for the search, a game also ends after 2 n^2 moves."""
        return not self.boards.is_over and int(self.boards.num_moves) < 2 * self.go.num_points

    def search(self, colour: int, until: float, num_simulations: int):
        """Search for `colour`, at most until time.monotonic() is `until`; a known position keeps its tree."""
        boards = self.look_from(colour)
        if self.searched[0] is not boards:
            self.searched = boards, self.make_search(boards, max(MAX_TREE, num_simulations), self.args)
        tree = self.searched[1]
        most = int(tree.N[0, 0].sum()) + min(num_simulations, tree.num_left)
        while tree.N[0, 0].sum() < most and time.monotonic() < until:
            tree.run(min(8, most - int(tree.N[0, 0].sum())))
        return tree

    def choose_move(self, colour: int, report=None) -> str:
        """Play the best move, or pass if there is nothing to search; returns its vertex, or `resign`."""
        move, start = self.go.num_points, time.monotonic()
        if self.can_search():
            tree = self.search(colour, start + self.budget(colour), self.args.simulations_end)
            if report:
                report(tree)
            move = self.rank_moves(tree)[0]
            self.spend(colour, time.monotonic() - start)
            if tree.N[0, 0, move] > 0 and tree.Q[0, 0, move] < self.args.resign_below:
                return "resign"
        self.play_move(colour, move)
        return format_vertex(move, self.go.size)

    def rank_moves(self, tree) -> list[int]:
        """Return all moves by visits, then by prior."""
        visits, prior = tree.N[0, 0].tolist(), tree.P[0, 0].tolist()
        return sorted(range(len(prior)), key=lambda move: (-visits[move], -prior[move]))

    def show(self, tree):
        """Write moves by visits in a line of Leela Zero's format; values and priors are in 1/10,000."""
        visits, values, prior = (x[0, 0].tolist() for x in (tree.N, tree.Q, tree.P))
        moves, parts = [move for move in self.rank_moves(tree) if visits[move]], []
        for order, move in enumerate(moves):
            line, node = [move], int(tree.child[0, 0, move])
            while tree.N[0, node].any():  # the moves that are likely to follow
                line.append(int(tree.N[0, node].argmax()))
                node = int(tree.child[0, node, line[-1]])
            first, *_ = vertices = [format_vertex(m, self.go.size) for m in line]
            win, share = round(1e4 * values[move]), round(1e4 * prior[move])
            numbers = f"visits {visits[move]:.0f} winrate {win} prior {share} lcb {win} order {order}"
            parts.append(f"info move {first} {numbers} pv {' '.join(vertices)}")
        self.write(" ".join(parts) + "\n" * bool(parts))

    def analyze(self, colour: int, interval: float):
        """Write the search's results every `interval` seconds, until the next line comes in."""
        shown = time.monotonic()
        while self.lines.empty():
            now = time.monotonic()
            if self.can_search():
                tree = self.search(colour, now + 0.05, MAX_TREE)
                if time.monotonic() - shown >= interval:
                    self.show(tree)
                    shown = time.monotonic()
            time.sleep(max(0.0, now + 0.05 - time.monotonic()))

    def cmd_protocol_version(self):
        return "2"

    def cmd_name(self):
        return "alphazero_go"

    def cmd_version(self):
        return "1"

    def cmd_known_command(self, name: str):
        return str(name in self.commands).lower()

    def cmd_list_commands(self):
        return "\n".join(sorted(self.commands))

    def cmd_quit(self):
        pass

    def cmd_boardsize(self, size: str):
        if parse_number(size, int) != self.go.size:
            raise GtpError("unacceptable size")
        self.cmd_clear_board()

    def cmd_clear_board(self):
        self.positions = [self.go.new(1)]
        self.start_clocks()

    def cmd_komi(self, komi: str):
        self.args, self.searched = replace(self.args, komi=parse_number(komi, float)), (None, None)

    def cmd_play(self, colour: str, vertex: str):
        self.play_move(parse_colour(colour), parse_vertex(vertex, self.go.size))

    def cmd_genmove(self, colour: str):
        return self.choose_move(parse_colour(colour))

    def cmd_undo(self):
        if len(self.positions) == 1:
            raise GtpError("cannot undo")
        self.positions.pop()

    def cmd_showboard(self):
        size, points = self.go.size, self.boards.stones[0, self.go.cells].view(self.go.size, -1).tolist()
        rows = (f"{size - i:2d} {' '.join('.XO'[x] for x in row)} {size - i}" for i, row in enumerate(points))
        header = "   " + " ".join(COLUMNS[:size])
        return "\n".join(["", header, *rows, header])

    def cmd_final_score(self):
        margin = self.go.score(self.boards).item() - self.args.komi
        return f"{'B' if margin > 0 else 'W'}+{abs(margin):g}" if margin else "0"

    def cmd_time_settings(self, main_time: str, byo_time: str, byo_stones: str):
        times = parse_number(main_time, float), parse_number(byo_time, float), parse_number(byo_stones, int)
        if min(times) < 0:
            raise GtpError("times are not negative")
        self.main_time, self.byo_time, self.byo_stones = times
        self.start_clocks()

    def cmd_time_left(self, colour: str, seconds: str, stones: str):
        left = max(0.0, parse_number(seconds, float)), parse_number(stones, int)
        self.time_left[parse_colour(colour)] = left

    def cmd_fixed_handicap(self, num_stones: str):
        moves = list_handicap(self.go.size, parse_number(num_stones, int))
        vertices = [format_vertex(move, self.go.size) for move in moves]
        self.cmd_set_free_handicap(*vertices)
        return " ".join(vertices)

    def cmd_set_free_handicap(self, *vertices: str):
        if len(self.positions) > 1 or self.boards.history.any():
            raise GtpError("board not empty")
        moves = {parse_vertex(vertex, self.go.size) for vertex in vertices}
        if (
            len(moves) < max(2, len(vertices))
            or len(moves) == self.go.num_points
            or self.go.num_points in moves
        ):
            raise GtpError("bad vertex list")
        points = [int(move in moves) for move in range(self.go.num_points)]
        self.positions = [set_up(self.go, points, -1)]

    def cmd_loadsgf(self, path: str, move_number: str = "1000000"):
        num_left, before = parse_number(move_number, int) - 1, self.positions
        try:
            size, komi, events = read_sgf(path)
        except (OSError, ValueError):
            raise GtpError("cannot load file") from None
        if size != self.go.size:
            raise GtpError("unacceptable size")
        self.positions, stones, has_turn = [self.go.new(1)], None, False
        try:
            for kind, colour, points in [*events, ("turn", 0, [])]:
                if kind == "set":
                    stones = stones or self.boards.stones[0, self.go.cells].tolist()
                    for move in points:
                        stones[move] = colour
                    continue
                if stones:  # after a first node with nothing but black stones, white begins by default
                    is_first = len(self.positions) == 1
                    is_handicap = is_first and not has_turn and set(stones) == {0, 1}
                    turn = -1 if is_handicap else int(self.boards.to_play)
                    self.positions = [*self.positions[is_first:], set_up(self.go, stones, turn)]
                    stones = None
                if kind == "play" and num_left > 0:
                    (move,), num_left = points, num_left - 1
                    self.play_move(colour, move)
                elif colour:
                    self.positions[-1], has_turn = self.look_from(colour), True
                    if kind == "play":  # the first move that is left out
                        break
        except ValueError:
            self.positions = before
            raise GtpError("cannot load file") from None
        if komi is not None:
            self.cmd_komi(str(komi))
        return "black" if int(self.boards.to_play) == 1 else "white"

    def cmd_lz_analyze(self, *words: str):
        colour, interval = parse_analysis(words)
        return lambda: self.analyze(colour or int(self.boards.to_play), interval)

    def cmd_lz_genmove_analyze(self, *words: str):
        colour, _ = parse_analysis(words)
        return lambda: self.write(f"play {self.choose_move(colour or int(self.boards.to_play), self.show)}\n")


class Client:
    """Another program that speaks GTP; a context manager that ends it."""

    def __init__(self, command: str):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def send(self, command: str) -> str:
        """Return the answer to a command; raises GtpError if the program says `?` or has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline()).strip() or (line and not lines):
            lines.append(line)
        answer = "".join(lines).strip()
        if not answer.startswith("="):
            raise GtpError(f"{command}: {answer or 'the program has ended'}")
        return answer[1:].strip()
