"""Hooks of mkdocs.yml: formulas become MathML, functions show their source, files that pages link to are
pages too.

Recipes become files for `git apply`, and the recipe for the bare algorithm a page with the changed script.
"""

import ast
import html
import re
import sys
import textwrap
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from docs import recipe

LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)")
MARKER = re.compile(r"\[`((?![\w.]+\.py`)[\w.]+)`\]\(\.\./([\w/]+\.py)\)")  # [`name`](../file.py)
INLINE = re.compile(r"\$<code>(.+?)</code>\$", re.S)
BLOCK = re.compile(r'<pre class="math"><code>(.+?)</code></pre>', re.S)
SPACE = '<mspace width="0.167em" />'
AFTER = re.compile(r"(<mi>(?:log|exp|tanh)</mi>)(?=<m[isr])")
BEFORE = re.compile(r"(</m[in]>|&#x(?:02207|00029);</mo>)(?=<mi>(?:log|exp|tanh)</mi>|<mo>(?:min|max)</mo>)")
LIMIT = re.compile(r"<mo>(min|max)</mo>(?=<mo)")
SIGN = re.compile(r"(&#x0003D;</mo>|&#x00028;</mo>|&#x0002C;</mo>|<math[^>]*><mrow>)<mo>(?=&#x02212;)")
PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mi>(&#x02032;)</mi></msup>")
FLAG = re.compile(r"(?<![\w-])-[\w-]+")
CODE = re.compile(r"(?<!</span>)<code>([^<\n]+)</code>")  # in running text
RECIPES = re.compile(r"recipes_(\w+)\.md")
PATCH = (
    "\n[`{name}.diff`]({path}) is this diff as a file: beside `{script}.py`, run `git apply {name}.diff`.\n"
)
BARE = "the-bare-algorithm"  # recipe for ppo.py whose result is a page of its own, with this above the code
ABOVE = (
    "This is [`algos/ppo.py`](source/algos/ppo.py.md) without its part `Run`, made by the recipe "
    "[the bare algorithm](recipes_ppo.md#the-bare-algorithm). It learns the same to the last bit.\n\n"
)
WHOLE = '\n**[The changed file](bare_ppo.md)** is a page of its own.\n\n??? abstract "The diff"\n\n{}\n'
PAGE = "---\ntitle: {0}\nsearch:\n  exclude: true\n---\n\n# {0}\n\n{1}~~~~~~ {2}\n{3}\n~~~~~~\n"


def to_mathml(latex: str, display: str) -> str:
    """MathML of a formula, with the space around names of functions as TeX has it, and primes of full
    size."""
    mathml = AFTER.sub(rf"\1{SPACE}", convert(latex.strip(), display=display))
    mathml = BEFORE.sub(rf"\1{SPACE}", mathml)
    mathml = LIMIT.sub(r"<mi>\1</mi>", mathml)  # as an operator it has space before its bracket
    mathml = SIGN.sub(r'\1<mo form="prefix">', mathml)
    return PRIME.sub(r'\1<mo lspace="0" rspace="0">\2</mo>', mathml)


def find_source(path: str, name: str) -> tuple[int, str]:
    """First line and text of a function, class or `Class.method` in a file; LookupError if there is none."""
    if not (ROOT / path).is_file():
        raise LookupError(f"{path}: no such file")
    text = (ROOT / path).read_text()
    node = ast.parse(text)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise LookupError(f"{path}: defines no {name}")
        node = found[-1]
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return start, "\n".join(text.splitlines()[start - 1 : node.end_lineno])


def show_source(path: str, name: str) -> str:
    """Markdown of a closed box with the source of a function, less the indentation that all lines share."""
    start, text = find_source(path, name)
    lines = text.splitlines()
    shared = len(lines[0]) - len(lines[0].lstrip())
    code = [line[shared:] for line in lines]
    where = f"{path}, lines {start} to {start + len(lines) - 1}"
    box = [f'??? source "{name} ({where})"', f'<a id="{name}"></a>', ""]
    box += [f'~~~~~~ {{ .python linenums="{start}" }}', *code, "~~~~~~"]
    return "\n".join([box[0], *(f"    {line}".rstrip() for line in box[1:])])


def add_sources(markdown: str) -> str:
    """`markdown` with its formulas, and each function's source beneath the first paragraph that names it."""
    shown, blocks, boxes = set(), [], []
    for block in re.split(r"\n{2,}(?=\S)", markdown):
        if not block.startswith("```math"):
            blocks += boxes
            boxes = []
        blocks.append(MARKER.sub(r"[`\1`](#\1)", block))
        for name, path in MARKER.findall(block):
            if name not in shown:
                shown.add(name)
                boxes.append(show_source(path, name))
    return "\n\n".join(blocks + boxes)


def make_patches(script: str) -> dict[str, tuple[str, str]]:
    """The diff on the page and the patch of each recipe for a script as it is, by the path of the patch's
    file."""
    patches = {}
    for name, (_, body) in recipe.read_recipes(script).items():
        diff = recipe.find_block(body, "diff")
        if diff and "--copy" not in body:  # which says that the copy must have been changed before
            patches[f"patches/{script}/{name}.diff"] = diff, recipe.make_patch(script, diff)
    return patches


def add_patches(markdown: str, script: str) -> str:
    """`markdown` of a page of recipes with a link to its file beneath each diff."""
    for path, (diff, _) in make_patches(script).items():
        block = f"```diff\n{diff}```\n"
        name = Path(path).stem
        shown = block
        if name == BARE:  # its diff goes into a closed box
            shown = WHOLE.format(textwrap.indent(block, "    ", lambda line: True))
        link = PATCH.format(name=name, path=path, script=script)
        markdown = markdown.replace(block, shown + link)
    return markdown


def make_bare_page() -> str:
    """The page with the script that the recipe for the bare algorithm makes of algos/ppo.py."""
    _, body = recipe.read_recipes("ppo")[BARE]
    code = recipe.apply_diff(recipe.read_script("ppo"), recipe.find_block(body, "diff"))
    return PAGE.format("The bare PPO", ABOVE, "python", code.rstrip())


def on_files(files, config):
    """Add the patches and the bare PPO of recipes, and pages with the texts of files, or names in folders,
    that pages link to."""
    for page in files.documentation_pages():
        if found := RECIPES.fullmatch(page.src_uri):
            try:
                for path, (_, patch) in make_patches(found[1]).items():
                    files.append(File.generated(config, path, content=patch))
                if found[1] == "ppo":
                    files.append(File.generated(config, "bare_ppo.md", content=make_bare_page()))
            except ValueError as error:
                raise PluginError(f"{page.src_uri}: {error}") from error
    for path in sorted(
        {path for page in files.documentation_pages() for path in LINK.findall(page.content_string)}
    ):
        source = ROOT / path
        text = "\n".join(sorted(p.name for p in source.iterdir())) if source.is_dir() else source.read_text()
        content = PAGE.format(path, "", source.suffix[1:] or "text", text)
        files.append(File.generated(config, f"source/{path}.md", content=content))
    return files


def on_page_markdown(markdown, page, **_):
    """Show the sources of functions, and lead links out of docs/ to the pages of files."""
    if page.file.generated_by is not None:
        return markdown
    if page.file.src_uri == "theory.md":
        page.meta["search"] = {"boost": 2}  # above recipes, whose code has words such as lambda
    if found := RECIPES.fullmatch(page.file.src_uri):
        markdown = add_patches(markdown, found[1])
    try:
        markdown = add_sources(markdown)
    except LookupError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    return LINK.sub(r"source/\1.md", markdown)


def make_formula(latex: str) -> str:
    """HTML of a formula on lines of its own. Its parts, divided by ", \\quad", may stand below each other."""
    parts = re.split(r"(?<=,) \\quad\s", latex)
    return f'<div class="formula">{"".join(to_mathml(part, "block") for part in parts)}</div>'


def on_page_content(content, **_):
    """Replace $`inline`$ and ```math formulas, which GitHub renders itself; the search skips sources."""
    content = content.replace('<details class="source">', '<details class="source" data-search-exclude>')
    content = BLOCK.sub(lambda m: make_formula(html.unescape(m[1])), content)
    content = INLINE.sub(lambda m: to_mathml(html.unescape(m[1]), "inline"), content)
    return CODE.sub(lambda m: FLAG.sub(r'<span class="flag">\g<0></span>', m[0]), content)
