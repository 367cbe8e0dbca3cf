"""Write numbers, tables and sections of Markdown pages."""

import math
import re

from benchmark.common import require


def show(value: float):
    """Write a number with three significant digits or as a whole number; a dash if it is not finite."""
    if not math.isfinite(value):
        return "-"
    # Below 1e-9, a value is zero but for rounding
    if abs(value) < 1e-9 or abs(value) >= 100:
        return f"{value:z,.0f}"
    return f"{value:#.3g}".rstrip(".")


def make_table(head: str, rows: list):
    """Write a Markdown table; columns of `head` that end in a colon are aligned to the right."""
    columns = head.split(" | ")
    names = [column.removesuffix(":") for column in columns]
    rulers = ["--:" if column.endswith(":") else "--" for column in columns]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (names, rulers, *rows))


def replace_section(text: str, name: str, content: str):
    """Replace what is between <!-- name --> and <!-- /name --> in `text`; ResultsError if the marks are
    missing."""
    pattern = f"(?s)(?<=<!-- {name} -->).*?(?=<!-- /{name} -->)"
    text, count = re.subn(pattern, lambda _: content, text)
    require(count, f"no <!-- {name} --> section")
    return text
