"""Go games as people and programs pass them around: vertices, SGF files, boards as text and as pictures."""

import re
from pathlib import Path

COLUMNS = "ABCDEFGHJKLMNOPQRST"  # without I
LETTERS = "abcdefghijklmnopqrs"


def format_vertex(move: int, size: int) -> str:
    """Name of move row * n + column, rows from the top: A1 is the lower left corner, the pass is `pass`."""
    if move == size * size:
        return "pass"
    row, column = divmod(move, size)
    return f"{COLUMNS[column]}{size - row}"


def parse_vertex(text: str, size: int) -> int:
    """Move of a vertex in any case; raises ValueError where it is not on the board."""
    if text.lower() == "pass":
        return size * size
    match = re.fullmatch(r"([A-HJ-Ta-hj-t])([1-9][0-9]?)", text)
    column, row = (COLUMNS.index(match[1].upper()), size - int(match[2])) if match else (-1, -1)
    if not (0 <= row < size and 0 <= column < size):
        raise ValueError(f"{text!r} is no point of a {size}x{size} board")
    return row * size + column


def format_score(margin: float) -> str:
    """Result as in SGF: B+3.5, W+0.5 or 0 for a draw, from black's points less white's, komi included."""
    return "0" if margin == 0 else f"{'B' if margin > 0 else 'W'}+{abs(margin):g}"


def write_sgf(moves: list[int], size: int, komi: float, margin: float, black: str, white: str) -> str:
    """One game as SGF (FF[4]), black and white in turn; text of several may stand one after the other in a file."""
    info = f"(;FF[4]GM[1]CA[UTF-8]RU[Chinese]SZ[{size}]KM[{komi:g}]"
    info += "".join(f"{key}[{escape(text)}]" for key, text in (("PB", black), ("PW", white)))
    points = ["" if m == size * size else LETTERS[m % size] + LETTERS[m // size] for m in moves]
    return (
        f"{info}RE[{format_score(margin)}]\n"
        + "".join(f";{'BW'[i % 2]}[{p}]" for i, p in enumerate(points))
        + ")\n"
    )


def escape(text: str) -> str:
    """Text of an SGF property."""
    return text.replace("\\", "\\\\").replace("]", "\\]")


def read_sgf(path: str) -> dict:
    """Main line of the first game of an SGF file.

    Returns size, komi (None if not said), setup and moves, both lists of (1 black or -1 white, move), in setup also 0
    for a point made empty, and to_play (None if not said). Raises ValueError where the file is no SGF of a square
    board, or stones are set up once the game has begun.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace").rstrip()
    token = re.compile(r"\s*(?:([();])|([A-Za-z]+)((?:\s*\[(?:\\.|[^\\\]])*\])+))", re.S)
    properties, position = [], max(0, text.find("("))
    if text[position : position + 1] != "(":
        raise ValueError(f"{path}: no SGF file")
    while position < len(text):
        match = token.match(text, position)
        if not match:
            raise ValueError(f"{path}: no SGF file (at {text[position : position + 20]!r})")
        position = match.end()
        if match[1] == ")":  # the first variation is the main line
            break
        if match[2]:
            key = "".join(c for c in match[2] if c.isupper())
            for value in re.findall(r"\[((?:\\.|[^\\\]])*)\]", match[3], re.S):
                properties.append((key, re.sub(r"\\(.)", r"\1", value, flags=re.S).strip()))
    key, value = "SZ", next((value for key, value in properties if key == "SZ"), "19")
    game = {"size": 0, "komi": None, "setup": [], "moves": [], "to_play": None}
    colours = {"B": 1, "W": -1, "AB": 1, "AW": -1, "AE": 0}
    try:
        size = game["size"] = int(value)
        if not 1 <= size <= 19:
            raise ValueError
        for key, value in properties:
            if key == "KM":  # some programs write none, or a comma
                is_number = re.fullmatch(r"[-+]?[0-9]{1,9}([.,][0-9]*)?", value)
                game["komi"] = float(value.replace(",", ".")) if is_number else None
            elif key in ("B", "W"):
                game["moves"].append((colours[key], parse_point(value, size)))
            elif key in ("AB", "AW", "AE", "PL") and game["moves"]:
                raise ValueError
            elif key == "PL":
                game["to_play"] = colours[value[:1].upper()] if value[:1].upper() in "BW" else None
            elif key in ("AB", "AW", "AE"):
                game["setup"] += [(colours[key], m) for m in parse_rectangle(value, size)]
    except (ValueError, KeyError):
        raise ValueError(f"{path}: {key}[{value}] is not understood") from None
    return game


def parse_point(text: str, size: int) -> int:
    """Move of an SGF point; empty, or tt on boards up to 19 lines, is the pass."""
    if text in ("", "tt"):
        return size * size
    if len(text) != 2 or not all(c in LETTERS[:size] for c in text):
        raise ValueError(text)
    return LETTERS.index(text[1]) * size + LETTERS.index(text[0])


def parse_rectangle(text: str, size: int) -> list[int]:
    """Moves of a point, or of a rectangle of points such as aa:cc."""
    corners = [divmod(parse_point(x, size), size) for x in (text.split(":") * 2)[:2]]
    rows, columns = (range(min(pair), max(pair) + 1) for pair in zip(*corners, strict=True))
    return [r * size + c for r in rows for c in columns]


def format_board(points: list[int], size: int) -> str:
    """Board of stones (1 black X, -1 white O, 0 empty) as text with coordinates."""
    header = "   " + " ".join(COLUMNS[:size])
    rows = [" ".join(".XO"[p] for p in points[i * size : (i + 1) * size]) for i in range(size)]
    return "\n".join([header, *(f"{size - i:2d} {row} {size - i}" for i, row in enumerate(rows)), header])


def draw_board(points: list[int], size: int, heat: list[float], last_move: int, title: str):
    """Picture of a board, the visits of a search [n^2 + 1] as a heat map; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(4.2, 4.6), layout="constrained")
    axes = figure.add_subplot(title=f"{title}\npass: {heat[-1]:.0%} of the visits")
    axes.set_facecolor("#e3bf7c")
    axes.hlines(range(size), 0, size - 1, color="black", linewidth=0.8, zorder=1)
    axes.vlines(range(size), 0, size - 1, color="black", linewidth=0.8, zorder=1)
    radius = 190 / size
    for move, stone in enumerate(points):
        row, column = divmod(move, size)
        if stone:
            face, mark = ("black", "white") if stone == 1 else ("white", "black")
            axes.plot(
                column, row, "o", markersize=radius, markerfacecolor=face, markeredgecolor="black", zorder=2
            )
            if move == last_move:
                axes.plot(column, row, "s", markersize=radius / 4, color=mark, zorder=3)
        elif heat[move] > 0.005:
            shade = (heat[move] / max(heat)) ** 0.5
            axes.plot(
                column, row, "s", markersize=radius, color="crimson", alpha=shade, markeredgewidth=0, zorder=2
            )
            axes.text(
                column, row, f"{100 * heat[move]:.0f}", ha="center", va="center", fontsize=60 / size, zorder=3
            )
    axes.set(xlim=(-0.7, size - 0.3), ylim=(size - 0.3, -0.7), aspect="equal")
    axes.set_xticks(range(size), COLUMNS[:size])
    axes.set_yticks(range(size), range(size, 0, -1))
    axes.tick_params(length=0)
    return figure


def draw_analysis(go, boards, analysis):
    """Picture of the position of a Boards of one board with what a search found; None where matplotlib is missing."""
    colour = "black" if int(boards.to_play) == 1 else "white"
    best = max(range(len(analysis.visits)), key=lambda move: analysis.visits[move])
    title = f"{colour} to play, {analysis.values[best]:.0%} for it after the best move"
    total = sum(analysis.visits)
    heat = [count / total for count in analysis.visits]
    return draw_board(boards.stones[0, go.cells].tolist(), go.size, heat, int(boards.last_move), title)
