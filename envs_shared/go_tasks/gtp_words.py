"""The words of the Go Text Protocol, version 2 (Farneback 2002), and of Leela Zero's analysis."""

import math
import re
from typing import NamedTuple

from envs_shared.go_tasks import files as go_files

COLOURS = {"b": 1, "black": 1, "w": -1, "white": -1}


class GtpError(ValueError):
    """What is answered with `?`."""


class Analysis(NamedTuple):
    """What a search found about the side to move."""

    visits: list[float]  # [n^2 + 1] of each move
    values: list[float]  # [n^2 + 1] value after it, in [0, 1]
    prior: list[float]  # [n^2 + 1]
    lines: dict[int, list[int]]  # moves that are likely to follow, the move itself first, by visited move


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
        value = kind(text) if re.fullmatch(r"[-+.0-9eE]+", text) else math.nan
    except ValueError:
        value = math.nan
    if not abs(value) <= 1e9:
        raise GtpError(f"{text!r} is no number")
    return value


def parse_analysis(words: tuple[str, ...]) -> tuple[int | None, float]:
    """Colour (None if not said) and seconds between two lines of `[colour] [[interval] hundredths]`, in any order.

    `minmoves N` and `maxmoves N` are read too, and all moves are shown; GtpError for anything else.
    """
    stones, numbers = [], []
    words = [word.lower() for word in words]
    while words:
        word = words.pop(0)
        if word in COLOURS:
            stones.append(COLOURS[word])
        elif word in ("interval", "minmoves", "maxmoves"):
            number = parse_number(words.pop(0) if words else "", float)
            numbers += [number] * (word == "interval")
        elif word.isalpha():
            raise GtpError(f"unknown argument {word!r}")
        else:
            numbers.append(parse_number(word, float))
    if len(stones) > 1 or len(numbers) > 1:
        raise GtpError("one colour and one interval at most")
    return stones[0] if stones else None, max(0.05, numbers[0] / 100) if numbers else 0.5


def format_analysis(analysis: Analysis, size: int) -> str:
    """A line of moves by visits, in the words of Leela Zero: values and priors in hundredths of a percent."""
    order = sorted(analysis.lines, key=lambda m: (-analysis.visits[m], -analysis.prior[m]))
    parts = []
    for place, move in enumerate(order):
        line = " ".join(go_files.format_vertex(m, size) for m in analysis.lines[move])
        win, prior = (round(1e4 * x[move]) for x in (analysis.values, analysis.prior))
        head = f"info move {go_files.format_vertex(move, size)} visits {analysis.visits[move]:.0f}"
        parts.append(f"{head} winrate {win} prior {prior} lcb {win} order {place} pv {line}")
    return " ".join(parts) + "\n" if parts else ""


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
