"""What the docs say is there is there: command lines, flags, files, links, formulas, and the site that they make."""

import argparse
import ast
import functools
import html
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import tyro
from conftest import ENVIRONMENT, ROOT
from test_contract import CASES, SCRIPTS, SECTIONS, SHARED, each_script
from torch.distributed.run import get_args_parser

sys.path += [str(ROOT), str(ROOT / "benchmark"), str(ROOT / "benchmark" / "peers"), str(ROOT / "docs")]
import go_engine
import hooks
import peer

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STUDIES = sorted((ROOT / "benchmark" / "studies").glob("*.py"))
PROGRAMS = [*sorted((ROOT / "algos").glob("*.py")), *sorted((ROOT / "benchmark").glob("*.py")), *STUDIES]
HEADINGS = ["Usage", "Equations", "Implementation details", "Logged metrics", "Results", "Ablations", "Speed"]
OTHER_PROGRAMS = set("pip git mkdir cp cd pytest tensorboard mkdocs sbatch".split())
OTHER_FLAGS = {"--nproc-per-node", "--standalone", "--max-restarts"}  # of torchrun
FILE = "(algos|benchmark|envs_shared|tests|docs)/"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FORMULA = re.compile(r"\$`([^`]+)`\$|^```math\n(.*?)^```$", re.M | re.S)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def forbid_abbreviations(parser: argparse.ArgumentParser):
    parser.allow_abbrev = False
    return parser.parse_args


@functools.cache
def load_parser(path: Path):
    """A function from arguments to nothing, or to SystemExit where the program at `path` would not take them."""
    if path.parent.name == "algos":
        module = importlib.import_module(f"algos.{path.stem}")
        return lambda flags: tyro.cli(module.Args, args=flags)
    if path.parent.name == "peers":  # what they import is in environments of their own
        (function,) = (n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == "make_parser")
        names = {"argparse": argparse, "peer": peer, "go_engine": go_engine, "__doc__": ""}
        exec(compile(ast.Module([function], []), path, "exec"), names)
        return forbid_abbreviations(names["make_parser"]())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return forbid_abbreviations(module.make_parser() if hasattr(module, "make_parser") else argparse.ArgumentParser())


def takes(path: Path, flags: list[str]) -> bool:
    try:
        load_parser(path)(flags)
    except SystemExit as stop:
        return not stop.code  # --help ends with 0
    return True


def get_flags(path: Path) -> set[str]:
    if path.parent.name != "algos":
        return set(load_parser(path).__self__._option_string_actions)
    names = importlib.import_module(f"algos.{path.stem}").Args.__dataclass_fields__
    return {f"--{no}{name.replace('_', '-')}" for name in names for no in ("", "no-")} | {"--help"}


def split_commands(code: str) -> list[list[str]]:
    """The words of each command in lines of a shell, without comments and assignments to variables."""
    commands = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if set(word) <= set(";&|"):
                commands.append([])
            elif commands[-1] or not re.match(r"[A-Z_]+=", word):
                commands[-1].append(word)
    return [command for command in commands if command]


def check_command(command: list[str]) -> str | None:
    """What is wrong with a command, None if nothing is. Nothing is run."""
    program, *words = command
    files = [words[i + 1] for i, word in enumerate(words) if word == "-r" and program == "pip"]
    files += [word for word in words if re.match(FILE + "[^{]+$", word)]
    if missing := sorted({path for path in files if not (ROOT / path).exists()}):
        return f"{shlex.join(command)}: {', '.join(missing)} missing"
    if program in ("uv", "python", "torchrun"):
        if program == "uv":
            words = words[words.index("run") + 1 :]
        if program == "torchrun":
            launch = get_args_parser().parse_args(words)
            words = [launch.training_script, *launch.training_script_args]
        path = ROOT / words[0] if "/" in words[0] else ROOT / "algos" / words[0]  # a copy of the script, by its name
        if not path.is_file():
            return f"{shlex.join(command)}: no such script"
        return None if takes(path, words[1:]) else f"{words[0]} does not take {shlex.join(words[1:])}"
    return None if program in OTHER_PROGRAMS else f"{program}: no program that this test knows"


def find_commands(text: str) -> list[list[str]]:
    blocks = [code for language, code in FENCE.findall(text) if language == "bash"]
    start = re.compile(r"([A-Z_]+=\S+ )?(python|torchrun|uv run) ")
    inline = [code for code in CODE.findall(FENCE.sub("", text)) if start.match(code)]
    return [command for code in blocks + inline for command in split_commands(code)]


def find_problems(text: str, script: str | None) -> list[str]:
    """What is wrong with the commands, flags and files that a page names; `script` is the one whose page it is."""
    problems = [problem for command in find_commands(text) if (problem := check_command(command))]
    paths = [ROOT / "algos" / f"{script}.py"] if script else PROGRAMS
    flags = set.union(*map(get_flags, paths), OTHER_FLAGS)
    for code in CODE.findall(FENCE.sub("", text)):
        code = html.unescape(code).replace("\\|", "|")
        if re.match(FILE + r"[\w./-]*$", code) and not (ROOT / code).exists():
            problems.append(f"{code} does not exist")
        if not code.startswith("--"):
            continue
        problems += [f"no flag {flag}" for flag in re.findall(r"(?<!\S)--[\w-]+", code) if flag not in flags]
        words = shlex.split(code)
        if len(words) > 1 and "..." not in words and not any(takes(path, words) for path in paths):
            problems.append(f"nothing takes {code}")
    return problems


@each_page
def test_commands_flags_and_files_of_a_page_exist(page):
    problems = find_problems(page.read_text(), page.stem if page.stem in SCRIPTS else None)
    assert not problems, "\n".join(problems)


def test_commands_are_found_wherever_the_docs_write_them():
    text = "a `WANDB_MODE=offline python algos/ppo.py --track` b\n"
    text += "```bash\nA=1 uv run algos/ppo.py --seed \\\n  7  # c\n"
    text += "torchrun --nproc-per-node 2 algos/ppo.py --seed 1 && pip install x; cd y\n```\n```\npython none.py\n```\n"
    assert [" ".join(command) for command in find_commands(text)] == [
        "uv run algos/ppo.py --seed 7",
        "torchrun --nproc-per-node 2 algos/ppo.py --seed 1",
        "pip install x",
        "cd y",
        "python algos/ppo.py --track",
    ]
    assert not find_problems(text, "ppo")


@pytest.mark.parametrize(
    "code",
    [
        *("python algos/none.py", "python ppo2.py", "python algos/ppo.py --sed 1", "python algos/ppo.py --seed x"),
        *("uv run algos/ppo.py --vectorization no", "torchrun --nproc-per-node 2 algos/ppo.py --burn-in 4"),
        *("python benchmark/compare.py a", "python benchmark/studies/r2d2_windows.py --report-only"),
        *("python benchmark/peers/sb3_ppo.py --settings best", "python benchmark/peers/tsp_step.py ours 20 low"),
        *("algos/none.py", "benchmark/none/", "--burn-in", "--seed x", "--seed 1 --burn-in 4"),
    ],
)
def test_what_does_not_exist_is_a_problem(code):
    assert find_problems(f"a `{code}` b", "ppo")


def test_parsers_of_benchmarks_and_peers_take_their_flags():
    for line in (
        *("python benchmark/studies/change_detection.py --studies buildings", "python benchmark/speed.py go --cuda"),
        *("python benchmark/studies/r2d2_windows.py", "python benchmark/peers/sb3_ppo.py --seed 1"),
        "python benchmark/peers/tsp_step.py ours 20 medium",
    ):
        assert not find_problems(f"`{line}`", None)
    assert not find_problems("`--repeats 3` and `--studies buildings`", None)
    assert find_problems("`--report-none`", None) and find_problems("`--studies short`", None)
    for line in ("pip install -r none.txt", "cp algos/none.py x", "make all"):
        assert find_problems(f"```bash\n{line}\n```\n", None)


def get_anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", FENCE.sub("", page.read_text())))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        is_there = target.exists() and ROOT in (target, *target.parents)
        if not is_there or (anchor and anchor not in get_anchors(target)):
            broken.append(link)
    assert not broken


def test_pages_of_scripts_have_the_same_headings():
    for script in SCRIPTS:
        text = FENCE.sub("", (ROOT / "docs" / f"{script}.md").read_text())
        assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS, script


def test_the_layout_described_is_that_of_the_scripts():
    layout, same = (ROOT / "docs" / "reading.md").read_text().split("\n## ")[1:3]
    parts = re.findall(r"^\| (.+?) \|", layout, re.M)
    assert parts[-6:] == [title or "the algorithm, by its name" for title in SECTIONS]
    assert set(CODE.findall(FENCE.sub("", same))) - {"Args"} == set(SHARED)


def find_formulas(text: str) -> list[str]:
    return [inline or block for inline, block in FORMULA.findall(text)]


def test_formulas_become_mathml():
    """What latex2mathml does not know it passes on with its backslash; what GitHub does not know it refuses."""
    formulas = [formula for page in PAGES for formula in find_formulas(page.read_text())]
    assert len(formulas) > 40
    for formula in [*formulas, r"\frac{a}{b}"]:
        mathml = hooks.to_mathml(formula, "inline")
        words = "".join(ElementTree.fromstring(mathml).itertext())
        assert not re.search(r"[\\&{}^_]", words), (formula, words)
        assert r"\operatorname" not in formula and "|" not in formula
        assert formula.count("{") == formula.count("}"), formula


def test_mathml_says_what_the_formula_says():
    def show(formula):
        mathml = re.sub(r' (xmlns|display|stretchy|fence|form)="[^"]*"', "", hooks.to_mathml(formula, "inline"))
        return html.unescape(re.sub(r"</?(math|mrow)>", "", mathml))

    assert show(r"\frac{a_t}{\sqrt{b}}") == "<mfrac><msub><mi>a</mi><mi>t</mi></msub><msqrt><mi>b</mi></msqrt></mfrac>"
    assert show(r"\sum_i p_i^2") == "<msub><mo>∑</mo><mi>i</mi></msub><msubsup><mi>p</mi><mi>i</mi><mn>2</mn></msubsup>"
    functions = show(r"\log p \tanh(q)")
    assert functions.startswith('<mi>log</mi><mspace width="0.167em" /><mi>p</mi><mi>tanh</mi><mo>(</mo>')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_the_site_needs_no_network(site):
    source = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|srcset|href)=[\"']?(?:https?:)?//[^>]*")
    style = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*")
    assert source.search('<link rel=x href="https://a.b">') and style.search("url(//a.b)")
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        found = (source if path.suffix == ".html" else style).findall(path.read_text())
        assert not found, (path.name, found)


def test_pages_of_the_site_have_their_formulas_and_links(site):
    for page in PAGES[1:]:
        path = site / f"{page.stem}.html"
        text = path.read_text()
        assert text.count("<math ") == len(find_formulas(page.read_text())), page.name
        assert "$<code>" not in text and 'class="math"' not in text
        for link in re.findall(r"(?:href|src)=\"?([^\s\">]+)", text):
            target = path.parent / link.split("#")[0]
            assert re.match(r"https?:|data:", link) or target.exists(), (page.name, link)
    assert "compute_gae" in (site / "source" / "algos" / "ppo.py.html").read_text()


def find_needed(path: Path) -> set[Path]:
    """Files of envs_shared/ that a file imports; a folder counts as its __init__.py."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [ROOT / name.replace(".", "/") for name in names if name.split(".")[0] == "envs_shared"]
    files = [path for part in parts for path in (part / "__init__.py", part.with_suffix(".py"))]
    return {path for path in files if path.exists()}


@each_script
def test_a_script_copied_as_the_docs_say_runs(script, tmp_path):
    page = (ROOT / "docs" / "reading.md").read_text()
    (named,) = re.findall(rf"^\| `algos/{script}\.py` \| `envs_shared/(\w+)` \|$", page, re.M)
    needed, todo = set(), {ROOT / "algos" / f"{script}.py"}
    while todo:
        new = find_needed(todo.pop()) - needed
        needed |= new
        todo |= new
    folder = ROOT / "envs_shared"
    assert {path.parent for path in needed} - {folder} == {folder / named}
    assert {path for path in needed if path.parent == folder} <= {folder / "__init__.py"}
    (copying,) = re.findall(rf"^cp algos/{script}\.py my_project\ncp .+$", page, re.M)
    folder = tmp_path / "my_project"
    (folder / "envs_shared").mkdir(parents=True)
    subprocess.run(["bash", "-ec", copying.replace("my_project", shlex.quote(str(folder)))], cwd=ROOT, check=True)
    assert {path.name for path in (folder / "envs_shared").iterdir()} == {"__init__.py", named}
    assert {path.name for path in folder.iterdir()} == {"envs_shared", f"{script}.py"}
    command = [sys.executable, f"{script}.py", *CASES[script].short.split()]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "no gap" not in run.stderr  # the tours to compare with came along
    (result,) = folder.glob("runs/*/result.json")
    assert json.loads(result.read_text())["script"] == script
