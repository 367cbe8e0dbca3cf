"""Hooks of mkdocs.yml: formulas become MathML, functions show their source, files that pages link to are
pages too."""

import ast
import functools
import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
MARKER = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#([\w.]+)\)")  # [`name`](../file.py#name)
INLINE = re.compile(r"\$<code>(.+?)</code>\$", re.S)
BLOCK = re.compile(r'<pre class="math"><code>(.+?)</code></pre>', re.S)
FUNCTION = re.compile(r"(<mi>(?:log|exp|tanh)</mi>)(?=<m[isr])")
PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mi>(&#x02032;)</mi></msup>")
PAGE = "---\ntitle: {0}\nsearch:\n  exclude: true\n---\n\n# {0}\n\n~~~~~~ {1}\n{2}\n~~~~~~\n"


def to_mathml(latex: str, display: str) -> str:
    """MathML of a formula, with the space after names of functions that browsers leave out, and primes of
    full size."""
    mathml = FUNCTION.sub(r'\1<mspace width="0.167em" />', convert(latex.strip(), display=display))
    return PRIME.sub(r'\1<mo lspace="0" rspace="0">\2</mo>', mathml)


@functools.lru_cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def find_source(path: str, name: str) -> tuple[int, str]:
    """First line and text, with decorators, of the function, class or `Class.method` in a file; LookupError
    if none."""
    if not (ROOT / path).is_file():
        raise LookupError(f"{path}: no such file")
    text = (ROOT / path).read_text()
    node = parse(text)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise LookupError(f"{path}: defines no {name}")
        node = found[-1]
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return start, "\n".join(text.splitlines()[start - 1 : node.end_lineno])


def show_source(path: str, name: str) -> str:
    """Markdown of a closed box with the source of a function, indented as in the file less what all lines
    share."""
    start, text = find_source(path, name)
    lines = text.splitlines()
    shared = len(lines[0]) - len(lines[0].lstrip())
    code = [line[shared:] for line in lines]
    where = f"{path}, lines {start} to {start + len(lines) - 1}"
    box = [f'??? source "{name} ({where})"', f'<a id="{name}"></a>', ""]
    box += [f'~~~~~~ {{ .python linenums="{start}" }}', *code, "~~~~~~"]
    return "\n".join([box[0], *(f"    {line}".rstrip() for line in box[1:])])


def add_sources(markdown: str) -> str:
    """`markdown` with each function's source beneath the first paragraph whose marker names it, and its
    formulas."""
    shown, blocks, boxes = set(), [], []
    for block in re.split(r"\n{2,}(?=\S)", markdown):
        if not block.startswith("```math"):
            blocks += boxes
            boxes = []
        blocks.append(MARKER.sub(r"[`\1`](#\3)", block))
        for _, path, name in MARKER.findall(block):
            if name not in shown:
                shown.add(name)
                boxes.append(show_source(path, name))
    return "\n\n".join(blocks + boxes)


def on_files(files, config):
    """Add a page with the text of each file, or the names in each folder, that a page links to."""
    for path in sorted(
        {path for page in files.documentation_pages() for path in LINK.findall(page.content_string)}
    ):
        source = ROOT / path
        text = "\n".join(sorted(p.name for p in source.iterdir())) if source.is_dir() else source.read_text()
        content = PAGE.format(path, source.suffix[1:] or "text", text)
        files.append(File.generated(config, f"source/{path}.md", content=content))
    return files


def on_page_markdown(markdown, page, **_):
    """Show the sources of functions, and lead links out of docs/ to the pages of files."""
    if page.file.generated_by is not None:
        return markdown
    try:
        markdown = add_sources(markdown)
    except LookupError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    return LINK.sub(r"source/\1.md", markdown)


def on_page_content(content, **_):
    """Replace $`inline`$ and ```math formulas, which GitHub renders itself; the search passes over
    sources."""
    content = content.replace('<details class="source">', '<details class="source" data-search-exclude>')
    content = BLOCK.sub(
        lambda m: f'<div class="formula">{to_mathml(html.unescape(m[1]), "block")}</div>', content
    )
    return INLINE.sub(lambda m: to_mathml(html.unescape(m[1]), "inline"), content)
