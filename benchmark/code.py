"""Tell whether a result is of today's code: compare scripts without their comments and docstrings."""

import ast
import functools
import hashlib
import io
import tokenize

from benchmark import common

LEGEND = (
    "Rows marked † are of earlier code: comments and docstrings apart, the script has changed since then."
)


def hash_code(text: str):
    """Hash a program without comments, docstrings and blank lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:12]


@functools.cache
def hash_file(path: str):
    """Hash the code of a file of this repository as it is now."""
    return hash_code((common.ROOT / path).read_text())


def hash_scripts(paths):
    """Hash the code of the scripts of algos/ among some paths, by path, as it is now."""
    return {path: hash_file(path) for path in map(str, paths) if path.startswith("algos/")}


def is_old(row: dict):
    """Return whether a run or row of results is of earlier code of one of our scripts."""
    return any(hash_file(path) != code for path, code in row.get("code", {}).items())


def mark(name: str, rows: list):
    """Return the name of a line of a table, with a mark if a row behind it is of earlier code."""
    return f"{name} †" if any(map(is_old, rows)) else name
