"""What the docs say is there is there: command lines, flags, files, links, formulas, and the site that they make."""

import argparse
import ast
import functools
import html
import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT
from mkdocs.exceptions import PluginError
from PIL import Image
from test_contract import CASES, SCRIPTS, SECTIONS, each_script
from torch.distributed.run import get_args_parser

sys.path += [str(ROOT / name) for name in ("benchmark", "benchmark/peers", "benchmark/studies", "docs")]
import hooks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # all but the first are the site's
BENCHMARK = [ROOT / "benchmark" / folder / "README.md" for folder in ("", "checkpoints", "peers")]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", *BENCHMARK, ROOT / "CHANGELOG.md"]
STUDIES = sorted((ROOT / "benchmark" / "studies").glob("*.py"))
PROGRAMS = [*sorted((ROOT / "algos").glob("*.py")), *sorted((ROOT / "benchmark").glob("*.py")), *STUDIES]
HEADINGS = ["Usage", "Equations", "Implementation details", "Logged metrics", "Results", "Ablations", "Speed"]
OTHER_PROGRAMS = set("pip git mkdir cp cd pytest tensorboard mkdocs sbatch ruff playwright".split())
OTHER_FLAGS = {"--nproc-per-node", "--standalone", "--max-restarts"}  # of torchrun
FILE = "(algos|benchmark|envs_shared|tests|docs)/"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
FORMULA = re.compile(r"\$`([^`]+)`\$|^```math\n(.*?)^```$", re.M | re.S)
each_page = pytest.mark.parametrize("page", TEXTS[:-2], ids=lambda page: str(page.relative_to(ROOT)))
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def load_args(path: Path):
    """Return the dataclass of a program's flags; None for programs with a parser of argparse."""
    if path.parent.name not in ("algos", "benchmark"):
        return None
    return getattr(importlib.import_module(f"{path.parent.name}.{path.stem}"), "Args", None)


@functools.cache
def load_parser(path: Path):
    """Return a function that raises SystemExit for arguments that the program at `path` does not take."""
    if args := load_args(path):
        return lambda flags: tyro.cli(args, args=flags)
    parser = argparse.ArgumentParser()
    if "def make_parser(" in path.read_text():
        parser = importlib.import_module(path.stem).make_parser()
    parser.allow_abbrev = False
    return parser.parse_args


def takes(path: Path, flags: list[str]) -> bool:
    try:
        load_parser(path)(flags)
    except SystemExit as stop:
        return not stop.code  # --help ends with 0
    return True


def get_flags(path: Path) -> set[str]:
    args = load_args(path)
    if args is None:
        return set(load_parser(path).__self__._option_string_actions)
    names = args.__dataclass_fields__
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
        path = (
            ROOT / ("" if "/" in words[0] else "algos") / words[0]
        )  # the name alone is a copy of the script
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


WRONG = """
python algos/none.py
python ppo2.py
python algos/ppo.py --sed 1
python algos/ppo.py --seed x
uv run algos/ppo.py --vectorization no
torchrun --nproc-per-node 2 algos/ppo.py --burn-in 4
python benchmark/compare.py a
python benchmark/studies/go_search.py --report-only
python benchmark/peers/sb3_ppo.py --settings best
python benchmark/peers/elkai_lkh.py --size 20
algos/none.py
benchmark/none/
--burn-in
--seed x
--seed 1 --burn-in 4
"""


RIGHT = """
python benchmark/studies/change_detection.py --studies haze-3 --seeds 1 2
python benchmark/studies/go_search.py --repeats 3 --cuda
python benchmark/peers/sb3_ppo.py --seed 1
--repeats 3
--studies haze
"""


@pytest.mark.parametrize(("codes", "script"), [(WRONG, "ppo"), (RIGHT, None)])
def test_what_does_not_exist_is_a_problem(codes, script):
    for code in codes.strip().splitlines():
        assert bool(find_problems(f"a `{code}` b", script)) == (codes is WRONG), code
    for code in ("--report-none", "--studies short"):
        assert find_problems(f"`{code}`", None)
    for line in ("pip install -r none.txt", "cp algos/none.py x", "make all"):
        assert find_problems(f"```bash\n{line}\n```\n", None)


def get_anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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


def test_flags_of_the_changelog_are_todays():
    """Removed flags are no longer taken."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    rows = [row for row in rows if len(row) == 4]
    for script, before, today, _ in rows:
        flags = get_flags(ROOT / "algos" / f"{script.strip('`')}.py")
        assert set(re.findall(r"(?<!\S)`?(--[\w-]+)", today)) <= flags, script
        assert not today.startswith("removed") or not set(re.findall(r"`(--[\w-]+)", before)) & flags, script
    assert {script.strip("`") for script, *_ in rows} == set(SCRIPTS)


def test_the_formatter_before_commits_is_the_one_of_the_project():
    (pinned,) = re.findall(r"^ruff==\S+$", (ROOT / "requirements-dev.txt").read_text(), re.M)
    assert set(re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text())) == {pinned}


def test_pages_describe_the_scripts_in_one_layout():
    for script in SCRIPTS:
        text = FENCE.sub("", (ROOT / "docs" / f"{script}.md").read_text())
        headings = re.findall(r"^## (.+)$", text, re.M)
        assert headings in (HEADINGS, HEADINGS[:-1]), script  # Speed is optional
    layout = (ROOT / "docs" / "reading.md").read_text().split("\n## ")[1]
    parts = re.findall(r"^\| (.+?) \|", layout, re.M)
    assert parts[-6:] == [title or "the algorithm, by its name" for title in SECTIONS]


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
    mathml = hooks.to_mathml(r"\frac{a_t}{\sqrt{b}} \log p", "inline")
    shown = re.sub(r"</?(math|mrow)[^>]*>", "", mathml)
    root = "<mfrac><msub><mi>a</mi><mi>t</mi></msub><msqrt><mi>b</mi></msqrt></mfrac>"
    assert shown == root + '<mi>log</mi><mspace width="0.167em" /><mi>p</mi>'


def list_markers(page: Path) -> list[tuple[str, str, str]]:
    return hooks.MARKER.findall(page.read_text())


def test_functions_that_pages_name_beside_equations_are_there():
    """Fails where a function is renamed; and what a page calls it is its name."""
    for page in PAGES:
        assert len(re.findall(r"\]\([^)]*\.py#", page.read_text())) == len(list_markers(page)), page.name
        for shown, path, name in list_markers(page):
            assert shown == name, page.name
            _, source = hooks.find_source(path, name)
            (node,) = ast.parse(textwrap.dedent(source)).body
            assert node.name == name.split(".")[-1], page.name


def test_every_script_shows_the_functions_of_its_equations():
    for script in SCRIPTS:
        equations = (ROOT / "docs" / f"{script}.md").read_text().split("\n## ")[2]
        named = {path for _, path, _ in hooks.MARKER.findall(equations)}
        assert equations.startswith("Equations") and named == {f"algos/{script}.py"}
        blocks = [block for block in equations.split("\n\n**")[1:] if re.match(r"\(\d+\)", block)]
        named = [hooks.MARKER.search(block) or re.search(r"same\sfunction", block) for block in blocks]
        assert len(blocks) >= 4 and all(named), script


@pytest.mark.parametrize(
    "marker", ["algos/ppo.py#none", "algos/ppo.py#Agent.none", "algos/none.py#compute_gae"]
)
def test_a_marker_of_nothing_is_refused(marker):
    text = f"[`{marker.split('#')[1]}`](../{marker})"
    page = SimpleNamespace(file=SimpleNamespace(generated_by=None, src_uri="ppo.md"))
    with pytest.raises(PluginError, match=r"ppo.md: algos/\w+.py: "):  # which ends the build
        hooks.on_page_markdown(text, page)


def test_sources_stand_beneath_the_formulas_of_their_paragraph():
    text = "a [`compute_gae`](../algos/ppo.py#compute_gae) b\n\n```math\nx\n```\n\nc [`f`](../algos/ppo.py#compute_gae)"
    before, after = hooks.add_sources(text).split("??? source")
    assert before == "a [`compute_gae`](#compute_gae) b\n\n```math\nx\n```\n\n"
    assert after.endswith("c [`f`](#compute_gae)") and "    def compute_gae(" in after
    start, source = hooks.find_source("algos/ppo.py", "compute_batch")
    assert source.startswith("@torch.no_grad()\n") and source.splitlines()[-1].startswith("    return Batch")
    assert (ROOT / "algos" / "ppo.py").read_text().splitlines()[start - 1] == "@torch.no_grad()"
    _, source = hooks.find_source("algos/ppo.py", "Agent.to_env")
    assert source.startswith("    def to_env(self, actions):\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_the_site_needs_no_network(site):
    source = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|srcset|href)=[\"']?(?:https?:)?//[^>]*"
    )
    style = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*")
    assert source.search('<link rel=x href="https://a.b">') and style.search("url(//a.b)")
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        found = (source if path.suffix == ".html" else style).findall(path.read_text())
        assert not found, (path.name, found)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_pages_of_the_site_have_their_formulas_links_and_sources(site, page):
    text = (site / f"{page.stem}.html").read_text()
    assert text.count("<math ") == len(find_formulas(page.read_text()))
    assert "$<code>" not in text and 'class="math"' not in text
    for link in re.findall(r"(?:href|src)=\"?([^\s\">]+)", text):
        assert re.match(r"https?:|data:", link) or (site / link.split("#")[0]).exists(), link
    boxes = re.findall(r'<details class="source" data-search-exclude.*?>(.*?)</details>', text, re.S)
    markers = dict.fromkeys((path, name) for _, path, name in list_markers(page))
    for box, (path, name) in zip(boxes, markers, strict=True):
        code = re.search(r"<code>(.*?)</code>", box, re.S)[1]
        code = html.unescape(re.sub(r'<span class="linenos".*?</span>|<[^>]+>', "", code))
        assert f'id="{name}"' in box
        assert code.splitlines() == textwrap.dedent(hooks.find_source(path, name)[1]).splitlines()


def test_the_search_of_the_site_works_from_a_folder(site):
    """Its index is a script, as pages of a folder may load no data, and so is what stands in for a worker."""
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {") and "Truncation bootstraps" in index
    assert "advantages[t] = delta[t] + decay[t] * advantages[t + 1]" not in index  # no sources of functions
    assert "assets/iframe-worker.js" in (site / "index.html").read_text()
    assert (site / "assets" / "iframe-worker.js").exists()
    assert "compute_gae" in (site / "source" / "algos" / "ppo.py.html").read_text()


@each_script
def test_a_script_is_copied_as_the_docs_say(script, tmp_path):
    """What is copied then runs: test_contract.py shows it."""
    reading = (ROOT / "docs" / "reading.md").read_text()
    (copying,) = re.findall(rf"^cp algos/{script}\.py my_project\n(?:cp .+\n)*", reading, re.M)
    folder = tmp_path / "my_project"
    (folder / "envs_shared").mkdir(parents=True)
    command = copying.replace("my_project", shlex.quote(str(folder)))
    subprocess.run(["bash", "-ec", command], cwd=ROOT, check=True)
    expected = {f"{script}.py"} | {f"envs_shared/{name}" for name in [CASES[script].sibling] if name}
    assert {x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()} == expected


# ---- Lines that use a saved policy -----------------------------------------------------------------------------------

TRAINED = {
    "alphazero_go": "benchmark/checkpoints/go5x5.pt",
    "reinforce_tsp_attention": "benchmark/checkpoints/tsp20.pt",
}
SMALL = {"ppo_change_detection": {"image_size": 32}, "r2d2_lstm": {"hidden_size": 16}}
MAKERS = {  # of the network, as `main` of the script makes it for --evaluate
    "alphazero_go": lambda module, args: module.Agent(5, args),
    "ppo": lambda module, args: module.Agent(module.make_envs(args, 1), args.norm_obs),
    "ppo_change_detection": lambda module, args: module.Agent(args),
    "r2d2_lstm": lambda module, args: module.QNetwork(module.make_envs(args, 1), args),
    "reinforce_tsp_attention": lambda module, args: module.AttentionModel(),
}


def save_policy(script: str, module, folder: Path) -> Path:
    """Return a small best.pt of the script, with random weights, or the trained one of the repository."""
    if script in TRAINED:
        return ROOT / TRAINED[script]
    torch.manual_seed(3)
    args = module.Args(**SMALL.get(script, {}))
    agent = MAKERS[script](module, args)
    only = agent.heads[-1:] if script == "ppo_change_detection" else agent  # looks at some queries
    for weights in only.parameters():  # so large that actions differ from step to step
        torch.nn.init.normal_(weights)
    progress = (0, 0, 0, 0.0, 0.0, 0.0, 0.45)  # the last is the threshold of change detection
    checkpoint = {"args": asdict(args), "progress": progress, "agent": agent.state_dict(), "optimizer": {}}
    torch.save(checkpoint, folder / "best.pt")
    return folder / "best.pt"


def check_ppo(names, module, args, agent, monkeypatch):
    """The first action is that of the script's own evaluation at the same observation, and others are as well."""
    taken, to_env = [], module.Agent.to_env
    envs = module.make_envs(args, 1)
    reset = envs.reset
    monkeypatch.setattr(envs, "reset", lambda seed: reset(seed=7))
    monkeypatch.setattr(module, "make_envs", lambda *args: envs)
    monkeypatch.setattr(module.Agent, "to_env", lambda *args: taken.append(to_env(*args)) or taken[-1])
    args.eval_episodes = 1
    module.evaluate(agent, args, "cpu", 2, Path())
    assert names["actions"].tolist() == taken[0].tolist()
    several = torch.randn(100, 4)
    params = [x.get_policy_params(several) for x in (names["agent"], agent)]
    assert torch.equal(*params) and 0 < params[0].argmax(-1).sum() < 100


def check_r2d2_lstm(names, module, args, agent, monkeypatch):
    """The episode has the return and length of an evaluation in the same environment, and others have others."""
    args.eval_episodes, found = 1, []
    for seed in range(7, 12):
        monkeypatch.setattr(module, "seed_everything", lambda *stream, seed=seed: seed)
        scores = module.evaluate(agent, args, torch.device("cpu"), 2)
        found.append((scores["eval/episodic_return"], scores["eval/episodic_length"]))
    player = names["player"]
    assert (player.returns.item(), player.lengths.item()) == pytest.approx(found[0])
    assert len(set(found)) > 1 and player.state.abs().sum() > 0


def check_reinforce_tsp_attention(names, module, args, agent, monkeypatch):
    """The tour is that of the script's own evaluation, and short."""
    instances = module.Instances(names["points"].double(), None, module.tour_length)
    metrics, tours = module.evaluate(agent, instances, torch.device("cpu"), ("greedy",))
    assert names["tours"].tolist() == [tours.tolist()]
    length = names["lengths"].item()
    assert length == pytest.approx(metrics["eval/greedy_length"], rel=1e-6) and length < 6  # at random 10


def check_ppo_change_detection(names, module, args, agent, monkeypatch):
    """The mask is that of --predict."""
    monkeypatch.setattr(args, "predict", ("before.png", "after.png"))
    module.write_predictions(agent, args, 0.45, torch.device("cpu"))
    mask = np.array(Image.open(Path(args.output) / "before_mask.png")) > 0
    assert mask.shape == (32, 32) and 0 < mask.sum() < mask.size
    assert (names["is_changed"].numpy() == mask).all() and 0 < names["looks"].mean() < args.num_steps


def check_alphazero_go(names, module, args, agent, monkeypatch):
    """The move is that of the script's own matches: the board's middle."""
    go = module.Go(5)
    player = module.make_player(go, module.make_workers(go, agent, args), args.simulations_end, args)
    assert names["moves"].tolist() == player(go.new(1)).tolist() == [12]


@each_script
def test_the_lines_that_use_a_saved_policy(script, tmp_path, monkeypatch):
    """The lines under "In your own code", as they stand on the page, do what the script's own evaluation does."""
    page = (ROOT / "docs" / f"{script}.md").read_text()
    (code,) = re.findall(r"### In your own code\n\n```python\n(.*?)```", page, re.S)
    (named,) = re.findall(r'torch\.load\("(.+?)"', code)
    assert named in ("runs/.../best.pt", TRAINED.get(script))
    module = importlib.import_module(f"algos.{script}")
    path = save_policy(script, module, tmp_path)
    rng = np.random.default_rng(1)
    for name in ("before.png", "after.png"):
        picture = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        picture[:16] = 0
        Image.fromarray(picture).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "algos")  # from which the page imports its copy of the script
    torch.manual_seed(5)
    names = {}
    exec(code.replace(named, str(path)), names)
    checkpoint = torch.load(path, weights_only=True)
    args = module.Args(**checkpoint["args"])
    agent = MAKERS[script](module, args)
    agent.load_state_dict(checkpoint["agent"])
    globals()[f"check_{script}"](names, module, args, agent, monkeypatch)
