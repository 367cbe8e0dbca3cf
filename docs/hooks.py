"""Hooks of mkdocs.yml: formulas become MathML, and the files that pages link to outside docs/ become pages too."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
INLINE = re.compile(r"\$<code>(.+?)</code>\$", re.S)
BLOCK = re.compile(r'<pre class="math"><code>(.+?)</code></pre>', re.S)
FUNCTION = re.compile(r"(<mi>(?:log|exp|tanh)</mi>)(?=<m[isr])")
PAGE = "---\ntitle: {0}\nsearch:\n  exclude: true\n---\n\n# {0}\n\n~~~~~~ {1}\n{2}\n~~~~~~\n"


def to_mathml(latex: str, display: str) -> str:
    """MathML of a formula, with the space after names of functions that browsers leave out."""
    return FUNCTION.sub(r'\1<mspace width="0.167em" />', convert(latex.strip(), display=display))


def on_files(files, config):
    """Add a page with the text of each file, or the names in each folder, that a page links to."""
    root = Path(config.config_file_path).parent
    for path in sorted({path for page in files.documentation_pages() for path in LINK.findall(page.content_string)}):
        source = root / path
        text = "\n".join(sorted(p.name for p in source.iterdir())) if source.is_dir() else source.read_text()
        content = PAGE.format(path, source.suffix[1:] or "text", text)
        files.append(File.generated(config, f"source/{path}.md", content=content))
    return files


def on_page_markdown(markdown, **_):
    """Lead links out of docs/ to those pages."""
    return LINK.sub(r"source/\1.md", markdown)


def on_page_content(content, **_):
    """Replace $`inline`$ and ```math formulas, which GitHub renders itself."""
    for pattern, display in ((BLOCK, "block"), (INLINE, "inline")):
        content = pattern.sub(lambda m, display=display: to_mathml(html.unescape(m[1]), display), content)
    return content
