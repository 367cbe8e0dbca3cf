"""An engine that programs and boards can talk to by the Go Text Protocol, version 2 (Farneback 2002)."""

import inspect
import math
import queue
import re
import sys
import threading
import time

import torch

from envs_shared.go_tasks import files as go_files
from envs_shared.go_tasks.gtp_words import (
    Analysis,
    GtpError,
    format_analysis,
    parse_analysis,
    parse_colour,
    parse_move,
    parse_number,
)
from envs_shared.go_tasks.rules import Boards, Go

VERSION = "1"  # of the engine, for who asks


class Engine:
    """Answers GTP commands; nothing else is written to the output.

    `think(positions, komi, until, num_simulations)` searches the last of the game's positions, each a Boards of one
    board, until the time.monotonic() `until` at the latest, and returns an Analysis. Where the best move's chance of
    winning is less than `resign_below`, the engine resigns.
    """

    def __init__(self, think, name: str, size: int, komi: float, out=None, resign_below: float = 0.0):
        self.think, self.name, self.komi, self.resign_below = think, name, komi, resign_below
        self.go, self.out = Go(size), out or sys.stdout
        self.lines: queue.Queue = queue.Queue()
        self.main_time, self.byo_time, self.byo_stones = 0.0, 0.0, 0
        self.time_left: dict[int, tuple[float, int]] = {}
        self.commands = {n[4:].replace("lz_", "lz-"): getattr(self, n) for n in dir(self) if n.startswith("cmd_")}
        self.cmd_clear_board()

    def serve(self, lines) -> None:
        """Answer the commands in `lines`, a file or an iterable, until `quit` or the end."""

        def read() -> None:
            try:
                for line in lines:
                    self.lines.put(line)
            finally:
                self.lines.put("quit")

        threading.Thread(target=read, daemon=True).start()
        while self.answer(self.lines.get()):
            pass

    def answer(self, line: str) -> bool:
        """Answer one line; whether to go on."""
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", line.split("#")[0]).replace("\t", " ").strip()
        if not text:
            return True
        number, command = re.fullmatch(r"(\d*)\s*(.*)", text, re.S).groups()
        name, *words = command.split() or [""]
        try:
            if name not in self.commands:
                raise GtpError("unknown command")
            try:
                inspect.signature(self.commands[name]).bind(*words)
            except TypeError:
                raise GtpError("wrong number of arguments") from None
            answer = self.commands[name](*words)
        except ValueError as error:
            self.write(f"?{number} {error}\n\n")
            return True
        if name.startswith("lz-"):  # these write while they run
            self.write(f"={number}\n")
            answer()
            self.write("\n")
        else:
            self.write(f"={number} {answer or ''}".rstrip() + "\n\n")
        return name != "quit"

    def write(self, text: str) -> None:
        """Write to whoever listens."""
        self.out.write(text)
        self.out.flush()

    # The game

    @property
    def boards(self) -> Boards:
        """The position on the board."""
        return self.positions[-1]

    def look_from(self, stone: int) -> Boards:
        """The position on the board with black (1) or white (-1) to move, though it may not be its turn."""
        return self.boards._replace(to_play=torch.full_like(self.boards.to_play, stone))

    def play_move(self, stone: int, move: int) -> None:
        """Play a legal move, also after the game was over, by passes or by its number of moves."""
        if int(self.boards.to_play) != stone:
            self.positions[-1] = Boards(*self.boards)  # another object: no search goes on across a turn left out
        boards = self.look_from(stone)
        boards = boards._replace(num_passes=boards.num_passes.clamp(max=1))
        if int(boards.num_moves) == boards.history.shape[1] - 1:
            boards = boards._replace(history=torch.cat((boards.history, torch.zeros_like(boards.history)), 1))
        if not self.go.legal_moves(boards)[0, move]:
            raise GtpError("illegal move")
        self.positions.append(self.go.play(boards, torch.tensor([move])))

    def budget(self, stone: int) -> float:
        """Seconds for this move, from time_settings and time_left; infinite without time control."""
        if self.byo_time > 0 and self.byo_stones == 0:  # by the protocol: no limits
            return math.inf
        if stone in self.time_left:
            seconds, stones = self.time_left[stone]
        elif self.main_time or self.byo_time:
            seconds, stones = (self.main_time, 0) if self.main_time else (self.byo_time, self.byo_stones)
        else:
            return math.inf
        moves_left = stones or max(10, (self.go.num_points - int(self.boards.num_moves)) // 2)
        extra = self.byo_time / self.byo_stones if not stones and self.byo_stones else 0.0
        return max(0.05, 0.8 * (seconds / moves_left + extra) - 0.1)

    def can_search(self) -> bool:
        """Whether the game still goes on: it ends by two passes, and for the search after 2 n^2 moves too."""
        return not self.boards.is_over and int(self.boards.num_moves) < self.go.max_moves

    def search(self, stone: int, until: float, num_simulations: int | None) -> Analysis:
        """Analysis for the side `stone`; the same position as before, where it is its turn, goes on with its tree."""
        root = self.boards if int(self.boards.to_play) == stone else self.look_from(stone)
        return self.think([*self.positions[:-1], root], self.komi, until, num_simulations)

    def choose_move(self, stone: int, report=None) -> str:
        """Play the most visited move, or pass where there is nothing to search any more; returns its vertex.

        Or resigns, which leaves the board as it is. `report` is called with the Analysis first.
        """
        move = self.go.num_points
        if self.can_search():
            analysis = self.search(stone, time.monotonic() + self.budget(stone), None)
            if report:
                report(analysis)
            move = max(range(len(analysis.visits)), key=lambda m: (analysis.visits[m], analysis.prior[m]))
            if analysis.visits[move] > 0 and analysis.values[move] < self.resign_below:
                return "resign"
        self.play_move(stone, move)
        return go_files.format_vertex(move, self.go.size)

    # Commands, as the protocol names them

    def cmd_protocol_version(self) -> str:
        return "2"

    def cmd_name(self) -> str:
        return self.name

    def cmd_version(self) -> str:
        return VERSION

    def cmd_known_command(self, name: str) -> str:
        return str(name in self.commands).lower()

    def cmd_list_commands(self) -> str:
        return "\n".join(sorted(self.commands))

    def cmd_quit(self) -> None:
        pass

    def cmd_boardsize(self, size: str) -> None:
        if parse_number(size, int) != self.go.size:
            raise GtpError("unacceptable size")
        self.cmd_clear_board()

    def cmd_clear_board(self) -> None:
        self.positions = [self.go.new(1)]
        self.time_left = {}

    def cmd_komi(self, komi: str) -> None:
        self.komi = parse_number(komi, float)

    def cmd_play(self, colour: str, vertex: str) -> None:
        self.play_move(parse_colour(colour), parse_move(vertex, self.go.size))

    def cmd_genmove(self, colour: str) -> str:
        return self.choose_move(parse_colour(colour))

    def cmd_undo(self) -> None:
        if len(self.positions) == 1:
            raise GtpError("cannot undo")
        self.positions.pop()

    def cmd_showboard(self) -> str:
        return "\n" + go_files.format_board(self.boards.stones[0, self.go.cells].tolist(), self.go.size)

    def cmd_final_score(self) -> str:
        return go_files.format_score(self.go.score(self.boards).item() - self.komi)

    def cmd_time_settings(self, main_time: str, byo_time: str, byo_stones: str) -> None:
        times = parse_number(main_time, float), parse_number(byo_time, float), parse_number(byo_stones, int)
        if min(times) < 0:
            raise GtpError("times are not negative")
        self.main_time, self.byo_time, self.byo_stones = times
        self.time_left = {}

    def cmd_time_left(self, colour: str, seconds: str, stones: str) -> None:
        self.time_left[parse_colour(colour)] = max(0.0, parse_number(seconds, float)), parse_number(stones, int)

    def cmd_fixed_handicap(self, num_stones: str) -> str:
        moves = list_handicap(self.go.size, parse_number(num_stones, int))
        vertices = [go_files.format_vertex(move, self.go.size) for move in moves]
        self.cmd_set_free_handicap(*vertices)
        return " ".join(vertices)

    def cmd_set_free_handicap(self, *vertices: str) -> None:
        if len(self.positions) > 1 or self.boards.history.any():
            raise GtpError("board not empty")
        moves = {parse_move(vertex, self.go.size) for vertex in vertices}
        if len(moves) < max(2, len(vertices)) or len(moves) == self.go.num_points or self.go.num_points in moves:
            raise GtpError("bad vertex list")
        points = torch.zeros(1, self.go.num_points, dtype=torch.int8)
        points[0, list(moves)] = 1
        self.positions = [self.go.set_up(points, torch.tensor([-1]))]

    def cmd_loadsgf(self, path: str, move_number: str | None = None) -> str:
        try:
            game = go_files.read_sgf(path)
        except (OSError, ValueError):
            raise GtpError("cannot load file") from None
        if game["size"] != self.go.size:
            raise GtpError("unacceptable size")
        last = len(game["moves"]) if move_number is None else max(0, parse_number(move_number, int) - 1)
        before = self.positions
        try:
            points = torch.zeros(1, self.go.num_points, dtype=torch.int8)
            for stone, move in game["setup"]:
                points[0, move] = stone
            first = game["moves"][0][0] if game["moves"] else -1 if game["setup"] else 1
            self.positions = [self.go.set_up(points, torch.tensor([game["to_play"] or first]))]
            if self.go.has_dead_stones(self.boards):
                raise GtpError("stones without liberties")
            for stone, move in game["moves"][:last]:
                self.play_move(stone, move)
        except (GtpError, IndexError):
            self.positions = before
            raise GtpError("cannot load file") from None
        if last < len(game["moves"]):
            self.positions[-1] = self.look_from(game["moves"][last][0])
        self.komi = self.komi if game["komi"] is None else game["komi"]
        return "black" if int(self.boards.to_play) == 1 else "white"

    def cmd_lz_analyze(self, *words: str):
        stone, interval = parse_analysis(words)
        return lambda: self.analyze(stone or int(self.boards.to_play), interval)

    def cmd_lz_genmove_analyze(self, *words: str):
        stone, _ = parse_analysis(words)

        def report(analysis) -> None:
            self.write(format_analysis(analysis, self.go.size))

        return lambda: self.write(f"play {self.choose_move(stone or int(self.boards.to_play), report)}\n")

    def analyze(self, stone: int, interval: float) -> None:
        """Write what the search thinks every `interval` seconds, until the next line comes in."""
        shown = time.monotonic()
        while self.lines.empty():
            now = time.monotonic()
            analysis = None
            if self.can_search():
                analysis = self.search(stone, now + 0.05, 10**6)
            if analysis and time.monotonic() - shown >= interval:
                self.write(format_analysis(analysis, self.go.size))
                shown = time.monotonic()
            time.sleep(max(0.0, now + 0.05 - time.monotonic()))


def list_handicap(size: int, num_stones: int) -> list[int]:
    """Points of fixed handicap stones, as the protocol places them; GtpError where it does not."""
    largest = 0 if size < 7 else 4 if size == 7 or size % 2 == 0 else 9
    if not 2 <= num_stones <= largest:
        raise GtpError("invalid number of stones")
    near = 2 if size < 13 else 3
    far, middle = size - 1 - near, size // 2
    corners = [(far, near), (near, far), (near, near), (far, far)]  # rows from the top
    sides = [(middle, near), (middle, far), (far, middle), (near, middle)]
    points = corners[:num_stones] + sides[: max(0, num_stones - 4) // 2 * 2]
    if num_stones in (5, 7, 9):
        points.append((middle, middle))
    return [row * size + column for row, column in points]
