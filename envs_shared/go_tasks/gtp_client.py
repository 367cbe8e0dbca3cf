"""Games with other programs that speak the Go Text Protocol."""

import shlex
import subprocess

import torch

from envs_shared.go_tasks import files as go_files
from envs_shared.go_tasks.gtp_words import GtpError, parse_move
from envs_shared.go_tasks.rules import Go


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
