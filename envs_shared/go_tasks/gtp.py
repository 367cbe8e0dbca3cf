"""The Go Text Protocol, version 2 (Farneback 2002): an engine that programs and boards can talk to, and a client."""

import inspect
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import torch

from envs_shared.go_tasks import files as go_files
from envs_shared.go_tasks.rules import Boards, Go

COLOURS = {"b": 1, "black": 1, "w": -1, "white": -1}


class Analysis(NamedTuple):
    """What a search found about the side to move."""

    visits: list[float]  # [n^2 + 1] of each move
    values: list[float]  # [n^2 + 1] chance of winning after it
    prior: list[float]  # [n^2 + 1]
    lines: dict[int, list[int]]  # moves that are likely to follow, the move itself first, by visited move


class GtpError(ValueError):
    """What is answered with `?`."""


class Engine:
    """Answers GTP commands; nothing else is written to the output.

    `think(positions, komi, until, num_simulations)` searches the last of the game's positions, each a Boards of one
    board, until the time.monotonic() `until` at the latest, and returns an Analysis.
    """

    def __init__(self, think, name: str, version: str, size: int, komi: float, out=None):
        self.think, self.name, self.version, self.komi = think, name, version, komi
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

    def set_to_play(self, stone: int) -> None:
        """Let black (1) or white (-1) move, though it were not its turn."""
        if int(self.boards.to_play) != stone:
            self.positions[-1] = self.boards._replace(to_play=-self.boards.to_play)

    def play_move(self, move: int) -> None:
        """Play a legal move, also after the game was over by passes."""
        boards = self.boards
        if int(boards.num_moves) >= self.go.max_moves:
            raise GtpError(f"the game is over after {self.go.max_moves} moves")
        if boards.is_over:
            boards = self.positions[-1] = boards._replace(num_passes=torch.zeros_like(boards.num_passes))
        if not self.go.legal_moves(boards)[0, move]:
            raise GtpError("illegal move")
        self.positions.append(self.go.play(boards, torch.tensor([move])))

    def budget(self, stone: int) -> float:
        """Seconds for this move, from time_settings and time_left; infinite without time control."""
        if self.byo_time > 0 and self.byo_stones == 0:
            return float("inf")
        if self.main_time + self.byo_time == 0:
            return float("inf")
        seconds, stones = self.time_left.get(
            stone, (self.main_time, 0) if self.main_time else (self.byo_time, self.byo_stones)
        )
        moves_left = stones or max(10, (self.go.num_points - int(self.boards.num_moves)) // 2)
        extra = self.byo_time / self.byo_stones if not stones and self.byo_stones else 0.0
        return max(0.05, 0.8 * (seconds / moves_left + extra) - 0.1)

    def choose_move(self, report=None) -> str:
        """Play the most visited move for the side to move, or pass where the game is over; returns its vertex.

        `report` is called with the Analysis first.
        """
        move = self.go.num_points
        if self.boards.is_over:  # one more pass changes nothing but whose turn it is
            self.positions.append(self.boards._replace(to_play=-self.boards.to_play))
        else:
            until = time.monotonic() + self.budget(int(self.boards.to_play))
            analysis = self.think(self.positions, self.komi, until, None)
            if report:
                report(analysis)
            move = max(range(len(analysis.visits)), key=lambda m: (analysis.visits[m], analysis.prior[m]))
            self.play_move(move)
        return go_files.format_vertex(move, self.go.size)

    # Commands, as the protocol names them

    def cmd_protocol_version(self) -> str:
        return "2"

    def cmd_name(self) -> str:
        return self.name

    def cmd_version(self) -> str:
        return self.version

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
        stone, move = parse_colour(colour), parse_move(vertex, self.go.size)
        before = list(self.positions)
        try:
            self.set_to_play(stone)
            self.play_move(move)
        except GtpError:
            self.positions = before
            raise

    def cmd_genmove(self, colour: str) -> str:
        self.set_to_play(parse_colour(colour))
        return self.choose_move()

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
            for stone, move in game["moves"][:last]:
                self.set_to_play(stone)
                self.play_move(move)
            if last < len(game["moves"]):
                self.set_to_play(game["moves"][last][0])
        except (GtpError, IndexError):
            self.positions = before
            raise GtpError("cannot load file") from None
        self.komi = self.komi if game["komi"] is None else game["komi"]
        return "black" if int(self.boards.to_play) == 1 else "white"

    def cmd_lz_analyze(self, *words: str):
        interval = self.parse_analysis(words)
        return lambda: self.analyze(interval)

    def cmd_lz_genmove_analyze(self, *words: str):
        self.parse_analysis(words)

        def answer() -> None:
            vertex = self.choose_move(lambda analysis: self.write(self.format_analysis(analysis)))
            self.write(f"play {vertex}\n")

        return answer

    def parse_analysis(self, words: tuple[str, ...]) -> float:
        """Seconds of `[colour] [interval] [hundredths of a second]`; lets the colour move."""
        words, stone = list(words), None
        if words and words[0].lower() in COLOURS:
            stone = parse_colour(words.pop(0))
        if words and words[0] == "interval":
            words.pop(0)
        interval = parse_number(words.pop(0), float) / 100 if words else 0.5
        if words:
            raise GtpError(f"{words[0]!r} is not understood")
        if stone:
            self.set_to_play(stone)
        return max(0.05, interval)

    def analyze(self, interval: float) -> None:
        """Write what the search thinks every `interval` seconds, until the next line comes in."""
        shown = time.monotonic()
        while self.lines.empty():
            now = time.monotonic()
            analysis = None
            if not self.boards.is_over:
                analysis = self.think(self.positions, self.komi, now + 0.05, 10**6)
            if analysis and time.monotonic() - shown >= interval:
                self.write(self.format_analysis(analysis))
                shown = time.monotonic()
            time.sleep(max(0.0, now + 0.05 - time.monotonic()))

    def format_analysis(self, analysis: Analysis) -> str:
        """A line of moves by visits, in the words of Leela Zero: chances and priors in hundredths of a percent."""
        order = sorted(analysis.lines, key=lambda m: (-analysis.visits[m], -analysis.prior[m]))
        parts = []
        for place, move in enumerate(order):
            line = " ".join(go_files.format_vertex(m, self.go.size) for m in analysis.lines[move])
            win, prior = (round(1e4 * x[move]) for x in (analysis.values, analysis.prior))
            head = f"info move {go_files.format_vertex(move, self.go.size)} visits {analysis.visits[move]:.0f}"
            parts.append(f"{head} winrate {win} prior {prior} lcb {win} order {place} pv {line}")
        return " ".join(parts) + "\n" if parts else ""


def parse_colour(text: str) -> int:
    """1 for black, -1 for white."""
    if text.lower() not in COLOURS:
        raise GtpError(f"{text!r} is no colour")
    return COLOURS[text.lower()]


def parse_move(text: str, size: int) -> int:
    """Move of a vertex."""
    try:
        return go_files.parse_vertex(text, size)
    except ValueError:
        raise GtpError("invalid vertex") from None


def parse_number(text: str, kind: type):
    """A finite number."""
    try:
        value = kind(text)
    except ValueError:
        raise GtpError(f"{text!r} is no number") from None
    if not abs(value) <= 1e9:
        raise GtpError(f"{text!r} is no number")
    return value


class Client:
    """Another program that speaks GTP; a context manager that ends it."""

    def __init__(self, command: str):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, command: str) -> str:
        """The answer to a command; raises GtpError where the program says `?` or has ended."""
        try:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise GtpError(f"{command}: the program has ended") from None
        lines = []
        while (line := self.process.stdout.readline()).strip() or (line and not lines):
            lines.append(line)
        answer = "".join(lines).strip()
        if not answer.startswith("="):
            raise GtpError(f"{command}: {answer or 'the program has ended'}")
        return answer[1:].strip()


def play_game(black, white, size: int, komi: float, opening: tuple[int, ...] = ()) -> tuple[list[int], float]:
    """A game of two Clients, or whatever has their `send`, under our rules: its moves and black's margin over komi.

    `opening` holds the first moves, black's first. Raises GtpError where a program plays an illegal move.
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
            go_files.format_vertex(opening[len(moves)], size) if is_opening else players[turn].send(f"genmove {colour}")
        )
        if vertex.lower() == "resign":
            return moves, float((1 - 2 * turn) * -size * size)
        move = parse_move(vertex, size)
        if not go.legal_moves(boards)[0, move]:
            raise GtpError(f"{vertex} is illegal after {[go_files.format_vertex(m, size) for m in moves]}")
        boards = go.play(boards, torch.tensor([move]))
        for player in players if is_opening else (players[1 - turn],):
            player.send(f"play {colour} {vertex}")
        moves.append(move)
    return moves, go.score(boards).item() - komi
