"""What the docs say is there is there: command lines, flags, files, links, formulas, and the site that they
make."""

import argparse
import functools
import html
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
import yaml
from helpers import ROOT
from pages import FENCE, get_anchors
from PIL import Image
from scripts import SCRIPTS, each_script, get_module, load, read_progress, run_main, run_quick
from torch.distributed.run import get_args_parser

from docs import hooks, recipe
from envs_shared import change_pairs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # all but the first are the site's
BENCHMARK = [ROOT / "benchmark" / folder / "README.md" for folder in ("", "checkpoints", "peers")]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", *BENCHMARK, ROOT / "CHANGELOG.md"]
FOLDERS = ("algos", "benchmark", "benchmark/studies")
PROGRAMS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("[!_]*.py"))]
PROGRAMS.append(ROOT / "docs" / "recipe.py")
OTHER_FLAGS = {"--nproc-per-node", "--standalone", "--max-restarts"}  # of torchrun
FILE = "(algos|benchmark|envs_shared|tests|docs)/"
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FORMULA = re.compile(r"\$`([^`]+)`\$|^```math\n(.*?)^```$", re.M | re.S)
each_page = pytest.mark.parametrize("page", TEXTS[:-2], ids=lambda page: str(page.relative_to(ROOT)))
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def load_parser(path: Path):
    """Return the flags of a program, and a function that exits for arguments that it does not take."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if args := getattr(module, "Args", None):
        names = [name.replace("_", "-") for name in args.__dataclass_fields__]
        flags = {f"--{no}{name}" for name in names for no in ("", "no-")} | {"--help"}
        return flags, lambda words: tyro.cli(args, args=words)
    parser = module.make_parser() if hasattr(module, "make_parser") else argparse.ArgumentParser()
    parser.allow_abbrev = False
    return {*parser._option_string_actions}, parser.parse_args


def takes(path: Path, flags: list[str]) -> bool:
    try:
        load_parser(path)[1](flags)
    except SystemExit as stop:
        return not stop.code  # --help ends with 0
    return True


def split_commands(code: str) -> list[list[str]]:
    """The words of each command in lines of a shell, without comments and assignments to variables."""
    parts = re.split(r"&&|[;|\n]", re.sub(r"\\\n|(^|\s)#.*", " ", code))
    commands = [[x for x in shlex.split(part) if not re.match(r"[A-Z_]+=", x)] for part in parts]
    return [command for command in commands if command]


def check_command(command: list[str]) -> str | None:
    """What is wrong with a command, None if nothing is. Nothing is run."""
    program, *words = command
    if missing := [x for x in words if re.match(FILE + "[^{]+$", x) and not (ROOT / x).exists()]:
        return f"{shlex.join(command)}: {', '.join(missing)} missing"
    if program not in ("uv", "python", "torchrun"):
        return None
    if program == "uv":
        words = words[words.index("run") + 1 :]
        words = words[2 * (words[0] == "--with") :]  # a package
    if program == "torchrun":
        launch = get_args_parser().parse_args(words)
        words = [launch.training_script, *launch.training_script_args]
    if words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    # A name alone is that of a copied script
    path = ROOT / ("" if "/" in words[0] else "algos") / words[0]
    if not path.is_file():
        return f"{shlex.join(command)}: no such script"
    return None if takes(path, words[1:]) else f"{words[0]} does not take {shlex.join(words[1:])}"


def find_commands(text: str) -> list[list[str]]:
    blocks = [code for language, code in FENCE.findall(text) if language == "bash"]
    start = re.compile(r"([A-Z_]+=\S+ )?(python|torchrun|uv run) ")
    inline = [code for code in CODE.findall(FENCE.sub("", text)) if start.match(code)]
    return [command for code in blocks + inline for command in split_commands(code)]


@each_page
def test_commands_flags_and_files_of_a_page_exist(page):
    """On the page of a script, flags are those of the script; elsewhere, of any program."""
    text = page.read_text()
    problems = [problem for command in find_commands(text) if (problem := check_command(command))]
    paths = [ROOT / "algos" / f"{page.stem}.py"] if page.stem in SCRIPTS else PROGRAMS
    flags = OTHER_FLAGS.union(*(load_parser(path)[0] for path in paths))
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
    assert not problems, "\n".join(problems)


def test_a_column_of_the_readme_is_of_one_script():
    """Its page, its picture, which leads there, one sentence, and the script."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| [PPO]"))
    rows = [re.split(r" ?\| ?", line.strip("| ")) for line in lines[start : start + 5]]
    columns = {re.search(r"\(algos/(\w+)\.py\)", cells[-1])[1]: cells for cells in zip(*rows, strict=True)}
    assert {*columns} == {*SCRIPTS}
    for script, (page, _, picture, sentence, _) in columns.items():
        assert f"(docs/{script}.md)" in page and picture.endswith(f'">](docs/{script}.md)')
        assert len(re.split(r"\s|&nbsp;", sentence)) <= 12


def test_the_readme_shows_lines_of_ppo():
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert textwrap.indent(code, "    ") in (ROOT / "algos" / "ppo.py").read_text()


@each_text
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", FENCE.sub("", page.read_text())))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        is_there = target.exists() and ROOT in (target, *target.parents)
        if not is_there or (anchor and target.suffix == ".md" and anchor not in get_anchors(target)):
            broken.append(link)
    assert not broken


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_pages_of_the_site_have_their_formulas_and_sources(site, page):
    text = (site / f"{page.stem}.html").read_text()
    # A comma and \quad divide a formula into parts, which stand below each other on a narrow screen
    written = [inline or block for inline, block in FORMULA.findall(page.read_text())]
    parts = [part for formula in written for part in formula.split(r", \quad")]
    formulas = re.findall("<math .*?</math>", text)
    assert len(formulas) == len(parts)
    for formula in formulas:  # what latex2mathml does not know it passes on with its backslash
        words = "".join(ElementTree.fromstring(formula).itertext())
        assert not re.search(r"[\\&{}^_]", words), words
    boxes = re.findall(r'<details class="source" data-search-exclude.*?>(.*?)</details>', text, re.S)
    markers = hooks.MARKER.findall(page.read_text())
    for box, (name, path) in zip(boxes, dict.fromkeys(markers), strict=True):
        code = re.search(r"<code>(.*?)</code>", box, re.S)[1]
        code = html.unescape(re.sub(r'<span class="linenos".*?</span>|<[^>]+>', "", code))
        assert f'id="{name}"' in box
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        found = inspect.getsource(functools.reduce(getattr, name.split("."), module))
        assert code.splitlines() == textwrap.dedent(found).splitlines()


def test_the_site_shows_the_bare_file(site):
    """As a page of its own, which the recipe links to; its code is what the recipe makes of the script."""
    text = (site / "bare_ppo.html").read_text()
    code = html.unescape(re.sub("<[^>]+>", "", re.search(r"<pre>.*?<code>(.*?)</code>", text, re.S)[1]))
    (_, body) = recipe.read_recipes("ppo")["the-bare-algorithm"]
    bare = recipe.apply_diff(recipe.read_script("ppo"), recipe.find_block(body, "diff"))
    assert code.splitlines() == bare.splitlines()
    assert 'href="bare_ppo.html"' in (site / "recipes_ppo.html").read_text().split("<article")[1]


# ---- Settings of a sweep, and an environment of one's own --------------------------------------------------


def read_block(page: str, language: str) -> str:
    """The first code block of a language on a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return next(code for found, code in FENCE.findall(text) if found == language)


def test_a_sweep_names_flags_of_its_script():
    sweep = yaml.safe_load(read_block("tracking.md", "yaml"))
    flags, _ = load_parser(ROOT / sweep["program"])
    assert {f"--{name.replace('_', '-')}" for name in sweep["parameters"]} <= flags


@pytest.mark.parametrize("script", ["ppo", pytest.param("r2d2_lstm", marks=pytest.mark.slow)])
def test_the_environment_of_the_docs_is_learned(script, tmp_path, monkeypatch):
    """By the page's command line. The best return is 1; at random, most episodes end without a reward.

    The last policy of R2D2 need not be the best one.
    """
    code = read_block("environments.md", "python")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / re.match(r"# (\S+)\n", code)[1]).write_text(code)
    monkeypatch.syspath_prepend(folder)
    commands = [x for x in split_commands(read_block("environments.md", "bash")) if x[1] == f"{script}.py"]
    run = run_main(get_module(script), tmp_path / "runs", *commands[0][2:])
    progress = read_progress(run.path)
    assert progress["best_score"] == 1
    assert script != "ppo" or progress["last_score"] == 1


# ---- Lines that use a saved policy -------------------------------------------------------------------------


def check_ppo(run_page, module, monkeypatch):
    """The actions are those of the script's own evaluation from the same start."""
    taken, to_env = [], module.Agent.to_env
    monkeypatch.setattr(module.Agent, "to_env", lambda *args: taken.append(to_env(*args)) or taken[-1])
    names = run_page()
    monkeypatch.setattr(module, "seed_everything", lambda *stream: 7)
    names["args"].eval_episodes = 1
    module.evaluate(names["agent"], names["args"], "cpu", 2, Path())
    actions = np.concatenate(taken).tolist()
    here, there = actions[:200], actions[200:]
    assert here[: len(there)] == there[:200] and {*there} == {0, 1}


def check_r2d2_lstm(run_page, module, monkeypatch):
    """The episode has the return and length of an evaluation in the same environment, and others have
    others."""
    names, found = run_page(), []
    names["args"].eval_episodes = 1
    for seed in range(7, 12):
        monkeypatch.setattr(module, "seed_everything", lambda *stream, seed=seed: seed)
        scores = module.evaluate(names["agent"], names["args"], torch.device("cpu"), 2)
        found.append((scores["eval/episodic_return"], scores["eval/episodic_length"]))
    player = names["player"]
    assert (player.returns.item(), player.lengths.item()) == pytest.approx(found[0]) and len({*found}) > 1


def check_reinforce_tsp_attention(run_page, module, monkeypatch):
    """The tour is that of the script's own evaluation, and short."""
    names = run_page()
    instances = module.Instances(names["points"].double(), None, module.tour_length)
    metrics, tours = module.evaluate(names["agent"], instances, torch.device("cpu"), ("greedy",))
    assert names["tours"].tolist() == [tours.tolist()]
    length = names["lengths"].item()
    assert length == pytest.approx(metrics["eval/greedy_length"], rel=1e-6) and length < 6  # at random 10


def check_ppo_change_detection(run_page, module, monkeypatch):
    """The mask is that of --predict."""
    (pair,), *_ = change_pairs.draw_haze(1, 32, 2, 1)
    for name, picture in (("before.png", pair[:3]), ("after.png", pair[3:6])):
        Image.fromarray(picture.transpose(1, 2, 0)).save(name)
    names = run_page()
    args, threshold = names["args"], names["checkpoint"]["progress"]["threshold"]
    args.predict = ("before.png", "after.png")
    module.write_predictions(names["agent"], args, threshold, torch.device("cpu"))
    mask = np.array(Image.open(Path(args.output) / "before_mask.png")) > 0
    assert mask.shape == (32, 32) and 0 < mask.sum() < mask.size
    assert (names["is_changed"].numpy() == mask).all() and 0 < names["looks"].mean() <= args.num_steps


def check_alphazero_go(run_page, module, monkeypatch):
    """The move is the board's middle."""
    assert run_page()["moves"].tolist() == [12]


@each_script
def test_the_lines_that_use_a_saved_policy(script, tmp_path, monkeypatch):
    """The lines under "In your own code", as they stand on the page, do what the script's own evaluation
    does."""
    page = (ROOT / "docs" / f"{script}.md").read_text()
    (code,) = re.findall(r"### In your own code\n\n```python\n(.*?)```", page, re.S)
    (named,) = re.findall(r'torch\.load\("(.+?)"', code)
    module, path = get_module(script), ROOT / named
    if script == "ppo_change_detection":
        path = ROOT / "benchmark" / "checkpoints" / "haze.pt"
    elif named == "runs/.../best.pt":
        path = run_quick(script, tmp_path).path / "best.pt"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, script, module)  # as a copy of the script beside the lines

    def run_page():
        names = {}
        torch.manual_seed(5)
        exec(code.replace(named, str(path)), names)
        agent = load(path)["agent"]
        assert all(torch.equal(x, agent[name]) for name, x in names["agent"].state_dict().items())
        return names

    globals()[f"check_{script}"](run_page, module, monkeypatch)
