"""An engine that programs and boards can talk to by the Go Text Protocol, version 2 (Farneback 2002)."""

import contextlib
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
    list_handicap,
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
    board, until the time.monotonic() `until` at the latest, and returns an Analysis. Where the best move's value is
    less than `resign_below`, the engine resigns.
    """

    def __init__(self, think, name: str, size: int, komi: float, out=None, resign_below: float = 0.0):
        self.think, self.name, self.komi, self.resign_below = think, name, komi, resign_below
        self.go, self.out = Go(size), out or sys.stdout
        self.lines: queue.Queue = queue.Queue()
        self.main_time, self.byo_time, self.byo_stones = 0.0, 0.0, 0
        self.time_left: dict[
            int, tuple[float, int]
        ] = {}  # by colour, seconds and the moves they are for (0: all)
        self.turned: tuple[Boards, Boards] | None = (
            None  # a position, and what it is with the other side to move
        )
        self.commands = {
            n[4:].replace("lz_", "lz-"): getattr(self, n) for n in dir(self) if n.startswith("cmd_")
        }
        self.cmd_clear_board()

    def serve(self, lines) -> None:
        """Answer the commands in `lines`, a file or an iterable, until `quit`, the end, or nobody listens any more."""

        def read() -> None:
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
        """Answer one line; whether to go on."""
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", line.split("#")[0]).replace("\t", " ").strip()
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
        if int(self.boards.to_play) == stone:
            return self.boards
        if (
            self.turned is None or self.turned[0] is not self.boards
        ):  # the same object as before keeps its tree
            self.turned = (
                self.boards,
                self.boards._replace(to_play=torch.full_like(self.boards.to_play, stone)),
            )
        return self.turned[1]

    def play_move(self, stone: int, move: int) -> None:
        """Play a legal move, also after the game was over, by passes or by its number of moves."""
        boards = self.look_from(stone)
        boards = boards._replace(num_passes=boards.num_passes.clamp(max=1))
        if int(boards.num_moves) == boards.history.shape[1] - 1:
            boards = boards._replace(history=torch.cat((boards.history, torch.zeros_like(boards.history)), 1))
        if not self.go.legal_moves(boards)[0, move]:
            raise GtpError("illegal move")
        self.positions.append(self.go.play(boards, torch.tensor([move])))

    def budget(self, stone: int) -> float:
        """Seconds for this move, by the clock; infinite without time control."""
        if stone not in self.time_left:
            return math.inf
        seconds, stones = self.time_left[stone]
        moves_left = stones or max(10, (self.go.num_points - int(self.boards.num_moves)) // 2)
        extra = self.byo_time / self.byo_stones if not stones and self.byo_stones else 0.0
        return max(0.05, 0.8 * (seconds / moves_left + extra) - 0.1)

    def start_clocks(self) -> None:
        """Both clocks as time_settings says; none with overtime for no stones, which by the protocol is no limit."""
        is_limited = self.byo_stones > 0 if self.byo_time else self.main_time > 0
        first = (self.main_time, 0) if self.main_time else (self.byo_time, self.byo_stones)
        self.time_left = {1: first, -1: first} if is_limited else {}

    def spend(self, stone: int, seconds: float) -> None:
        """Take a move off the clock of `stone`, which counts where no time_left comes."""
        if stone not in self.time_left:
            return
        left, stones = self.time_left[stone]
        left -= seconds
        is_overtime = stones > 0
        if self.byo_stones and (stones == 1 if is_overtime else left <= 0):  # the next period
            left, stones = self.byo_time, self.byo_stones
        elif is_overtime:
            stones -= 1
        self.time_left[stone] = max(0.0, left), stones

    def can_search(self) -> bool:
        """Whether the game still goes on: it ends by two passes, and for the search after 2 n^2 moves too."""
        return not self.boards.is_over and int(self.boards.num_moves) < self.go.max_moves

    def search(self, stone: int, until: float, num_simulations: int | None) -> Analysis:
        """Analysis for the side `stone`; the same position as before, where it is its turn, goes on with its tree."""
        return self.think([*self.positions[:-1], self.look_from(stone)], self.komi, until, num_simulations)

    def choose_move(self, stone: int, report=None) -> str:
        """Play the most visited move, or pass where there is nothing to search any more; returns its vertex.

        Or resigns, which leaves the board as it is. `report` is called with the Analysis first.
        """
        move = self.go.num_points
        start = time.monotonic()
        if self.can_search():
            analysis = self.search(stone, start + self.budget(stone), None)
            if report:
                report(analysis)
            move = max(range(len(analysis.visits)), key=lambda m: (analysis.visits[m], analysis.prior[m]))
            self.spend(stone, time.monotonic() - start)
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
        self.start_clocks()

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
        self.start_clocks()

    def cmd_time_left(self, colour: str, seconds: str, stones: str) -> None:
        self.time_left[parse_colour(colour)] = (
            max(0.0, parse_number(seconds, float)),
            parse_number(stones, int),
        )

    def cmd_fixed_handicap(self, num_stones: str) -> str:
        moves = list_handicap(self.go.size, parse_number(num_stones, int))
        vertices = [go_files.format_vertex(move, self.go.size) for move in moves]
        self.cmd_set_free_handicap(*vertices)
        return " ".join(vertices)

    def cmd_set_free_handicap(self, *vertices: str) -> None:
        if len(self.positions) > 1 or self.boards.history.any():
            raise GtpError("board not empty")
        moves = {parse_move(vertex, self.go.size) for vertex in vertices}
        if (
            len(moves) < max(2, len(vertices))
            or len(moves) == self.go.num_points
            or self.go.num_points in moves
        ):
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
            has_handicap = bool(game["setup"]) and all(stone == 1 for stone, _ in game["setup"])
            first = game["moves"][0][0] if game["moves"] else -1 if has_handicap else 1
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
