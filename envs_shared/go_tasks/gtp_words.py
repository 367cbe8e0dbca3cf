"""The words of the Go Text Protocol, version 2 (Farneback 2002), and of Leela Zero's analysis."""

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
        value = kind(text)
    except ValueError:
        raise GtpError(f"{text!r} is no number") from None
    if not abs(value) <= 1e9:
        raise GtpError(f"{text!r} is no number")
    return value


def parse_analysis(words: tuple[str, ...]) -> tuple[int | None, float]:
    """Colour (None if not said) and seconds between two lines of `[colour] [interval] [hundredths]`, in any order."""
    stone, interval = None, 0.5
    for word in words:
        if word.lower() in COLOURS:
            stone = parse_colour(word)
        elif word.lower() != "interval":
            interval = parse_number(word, float) / 100
    return stone, max(0.05, interval)


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
