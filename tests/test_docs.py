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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
import yaml
from helpers import ENVIRONMENT, ROOT
from mkdocs.exceptions import PluginError
from pages import FENCE, get_anchors
from PIL import Image
from scripts import CASES, SCRIPTS, each_script, get_module, load, read_progress, run_main, run_quick
from torch.distributed.run import get_args_parser

from docs import hooks
from envs_shared import change_pairs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]  # all but the first are the site's
BENCHMARK = [ROOT / "benchmark" / folder / "README.md" for folder in ("", "checkpoints", "peers")]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", *BENCHMARK, ROOT / "CHANGELOG.md"]
FOLDERS = ("algos", "benchmark", "benchmark/studies")
PROGRAMS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("[!_]*.py"))]
PROGRAMS.append(ROOT / "docs" / "recipe.py")
OTHER_PROGRAMS = "pip git mkdir cp cd source python3 pytest tensorboard mkdocs sbatch ruff playwright wandb"
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
    files = [words[i + 1] for i, word in enumerate(words) if word == "-r" and program == "pip"]
    files += [word for word in words if re.match(FILE + "[^{]+$", word)]
    if missing := sorted({path for path in files if not (ROOT / path).exists()}):
        return f"{shlex.join(command)}: {', '.join(missing)} missing"
    if program in ("uv", "python", "torchrun"):
        if program == "uv":
            words = words[words.index("run") + 1 :]
            if words[0] == "--with":  # a package
                words = words[2:]
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
    return None if program in OTHER_PROGRAMS.split() else f"{program}: no program that this test knows"


def find_commands(text: str) -> list[list[str]]:
    blocks = [code for language, code in FENCE.findall(text) if language == "bash"]
    start = re.compile(r"([A-Z_]+=\S+ )?(python|torchrun|uv run) ")
    inline = [code for code in CODE.findall(FENCE.sub("", text)) if start.match(code)]
    return [command for code in blocks + inline for command in split_commands(code)]


def find_problems(text: str, script: str | None) -> list[str]:
    """What is wrong with the commands, flags and files that a page names; `script` is the one whose page it
    is."""
    problems = [problem for command in find_commands(text) if (problem := check_command(command))]
    paths = [ROOT / "algos" / f"{script}.py"] if script else PROGRAMS
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
    return problems


@each_page
def test_commands_flags_and_files_of_a_page_exist(page):
    problems = find_problems(page.read_text(), page.stem if page.stem in SCRIPTS else None)
    assert not problems, "\n".join(problems)


WRONG = """
python algos/none.py
python algos/ppo.py --sed 1
uv run algos/ppo.py --vectorization no
torchrun --nproc-per-node 2 algos/ppo.py --burn-in 4
python -m benchmark.compare a
algos/none.py
--burn-in
--seed 1 --seed x
"""


def test_what_does_not_exist_is_a_problem():
    for code in WRONG.strip().splitlines():
        assert find_problems(f"a `{code}` b", "ppo"), code
    assert not find_problems("`python -m benchmark.studies.go_search --repeats 3 --cuda`", None)
    for lines in ("pip install -r none.txt", "cp algos/none.py y", "A=1 make x # b", "cd \\\nx; cq && cd y"):
        assert find_problems(f"```bash\n{lines}\n```\n", None), lines


def test_the_readme_counts_the_lines_of_the_scripts():
    """Of the algorithm and of the part Run, to within 5 %; each row names the script, its page and no
    other."""
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| [")]
    rows = {re.search(r"\(algos/(\w+)\.py\)", row)[1]: row for row in rows}
    assert {*rows} == {*SCRIPTS}
    for script, row in rows.items():
        assert f"(docs/{script}.md)" in row
        parts = re.split(r"^# -+ Run -+$", (ROOT / "algos" / f"{script}.py").read_text(), flags=re.M)
        counts = [int(x) for x in re.findall(r"\d+", row.split("|")[-2].replace(",", ""))]
        assert counts == pytest.approx([part.count("\n") for part in parts], rel=0.05), script


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
        flags, _ = load_parser(ROOT / "algos" / f"{script.strip('`')}.py")
        assert set(re.findall(r"(?<!\S)`?(--[\w-]+)", today)) <= flags, script
        assert not today.startswith("removed") or not set(re.findall(r"`(--[\w-]+)", before)) & flags, script
    assert {script.strip("`") for script, *_ in rows} == set(SCRIPTS)


def find_formulas(text: str) -> list[str]:
    return [inline or block for inline, block in FORMULA.findall(text)]


def test_formulas_become_mathml():
    """What latex2mathml does not know it passes on with its backslash; what GitHub does not know it
    refuses."""
    formulas = [formula for page in PAGES for formula in find_formulas(page.read_text())]
    assert len(formulas) > 40
    for formula in formulas:
        mathml = hooks.to_mathml(formula, "inline")
        words = "".join(ElementTree.fromstring(mathml).itertext())
        assert not re.search(r"[\\&{}^_]", words), (formula, words)
        assert r"\operatorname" not in formula and "|" not in formula
        assert formula.count("{") == formula.count("}"), formula
    space = '<mspace width="0.167em" />'
    assert f"<mn>2</mn>{space}<mi>log</mi>{space}<mi>p</mi>" in hooks.to_mathml(r"2 \log p", "inline")
    assert f"<mi>c</mi>{space}<mi>min</mi><mo" in hooks.to_mathml(r"c \min(a, b)", "inline")
    assert '=</mo><mo form="prefix">\u2212' in html.unescape(hooks.to_mathml("x = -y", "inline"))


@pytest.mark.parametrize("path", ["algos/ppo.py", "algos/none.py"])
def test_a_marker_of_nothing_is_refused(path):
    page = SimpleNamespace(file=SimpleNamespace(generated_by=None, src_uri="ppo.md"))
    with pytest.raises(PluginError, match=rf"ppo.md: {path}: "):  # which ends the build
        hooks.on_page_markdown(f"[`Agent.none`](../{path})", page)


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
    parts = [part for formula in find_formulas(page.read_text()) for part in formula.split(r", \quad")]
    assert text.count("<math ") == len(parts)
    boxes = re.findall(r'<details class="source" data-search-exclude.*?>(.*?)</details>', text, re.S)
    markers = hooks.MARKER.findall(page.read_text())
    assert ".py#" not in page.read_text()  # an anchor that GitHub does not know
    for box, (name, path) in zip(boxes, dict.fromkeys(markers), strict=True):
        code = re.search(r"<code>(.*?)</code>", box, re.S)[1]
        code = html.unescape(re.sub(r'<span class="linenos".*?</span>|<[^>]+>', "", code))
        assert f'id="{name}"' in box
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        found = inspect.getsource(functools.reduce(getattr, name.split("."), module))
        assert code.splitlines() == textwrap.dedent(found).splitlines()


def test_the_site_works_from_a_folder_without_a_network(site):
    """The index of its search is a script, as pages of a folder may load no data."""
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {") and "Truncation bootstraps" in index
    assert "advantages[t] = delta[t] + decay[t] * advantages[t + 1]" not in index  # no sources of functions
    assert "assets/iframe-worker.js" in (site / "index.html").read_text()
    loaded = re.compile(r"(<(script|link|img)\b[^>]*\b(src|href)=|url\()[\"']?(https?:)?//")
    assert loaded.search('<link rel=x href="https://a.b">') and loaded.search("url(//a.b)")
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        assert not loaded.search(path.read_text()), path.name
    missing = (site / "404.html").read_text()
    article = missing[missing.index("There is no such page") :]
    names = re.findall(r'href="/(\w+\.html)"', article)
    assert len(names) >= len(SCRIPTS) and all((site / name).exists() for name in names)
    style = site / "assets" / "site.css"
    (font,) = re.findall(r'url\("(.+?)"\)', style.read_text())  # of formulas
    assert (style.parent / font).read_bytes()[:4] == b"wOF2"
    assert "SIL OPEN FONT LICENSE" in (style.parent / f"{Path(font).stem}-OFL.txt").read_text()


@each_script
def test_a_script_is_copied_as_the_docs_say(script, tmp_path):
    """What is copied then runs: test_contract.py shows it."""
    reading = (ROOT / "docs" / "reading.md").read_text()
    (copying,) = re.findall(rf"^cp algos/{script}\.py my_project\n(?:cp .+\n)*", reading, re.M)
    (tmp_path / "my_project" / "envs_shared").mkdir(parents=True)
    subprocess.run(["bash", "-ec", copying.replace("cp ", f"cp {ROOT}/")], cwd=tmp_path, check=True)
    found = {x.relative_to(tmp_path / "my_project").as_posix() for x in tmp_path.rglob("*.*")}
    assert found == {f"{script}.py", *(f"envs_shared/{name}" for name in [CASES[script].sibling] if name)}


# ---- A sweep, and an environment of one's own --------------------------------------------------------------


def read_block(page: str, language: str) -> str:
    """The first code block of a language on a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return next(code for found, code in FENCE.findall(text) if found == language)


def make_sweep_command(sweep: dict, trial: dict) -> list[str]:
    """The words of the command line of a trial, as an agent of W&B writes it."""
    from wandb.sdk.launch.sweeps import utils

    words = utils.create_sweep_command_args({"args": {name: {"value": x} for name, x in trial.items()}})
    words |= {"env": [], "interpreter": [sys.executable], "program": [str(ROOT / sweep["program"])]}
    parts = [words[x[2:-1]] if x.startswith("${") else [x] for x in sweep["command"]]
    return [word for part in parts for word in part]


def test_a_sweep_writes_flags_that_the_script_takes(tmp_path):
    """Each setting arrives, true and false. A trial logs under the sweep's id, and to the sweep's metric."""
    sweep = yaml.safe_load(read_block("tracking.md", "yaml"))
    settings = {
        name: [x["value"]] if "value" in x else x.get("values", [x.get("min"), x.get("max")])
        for name, x in sweep["parameters"].items()
    }
    # Trials with each value, and both ends of each range, at least once
    num_trials = max(map(len, settings.values()))
    trials = [{name: x[i % len(x)] for name, x in settings.items()} for i in range(num_trials)]
    for trial in trials:
        args = vars(tyro.cli(get_module("ppo").Args, args=make_sweep_command(sweep, trial)[2:]))
        assert args["track"]
        for name, value in trial.items():
            setting = not args[name[3:]] if name.startswith("no_") else args[name]
            assert setting == value and type(setting) is type(value), name
    assert {x["norm_obs"] for x in trials} == {x["no_norm_reward"] for x in trials} == {True, False}
    assert not takes(ROOT / sweep["program"], ["--norm_obs=True"])  # the agent's form by default

    trial = trials[0] | {"total_timesteps": 2048}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({name: {"value": x} for name, x in trial.items()}))
    names = {"MODE": "offline", "SWEEP_ID": "sweep123", "RUN_ID": "trial123", "SWEEP_PARAM_PATH": str(path)}
    env = ENVIRONMENT | {f"WANDB_{name}": x for name, x in names.items()}
    command = make_sweep_command(sweep, trial)
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*-trial123/run-trial123.wandb")
    log = path.read_bytes()
    assert all(x.encode() in log for x in (sweep["metric"]["name"], "sweep123", "no_norm_reward"))


@pytest.mark.parametrize("script", ["ppo", pytest.param("r2d2_lstm", marks=pytest.mark.slow)])
def test_the_environment_of_the_docs_is_learned(script, tmp_path, monkeypatch):
    """By the page's command line. The best return is 1; at random, most episodes end without a reward."""
    code = read_block("environments.md", "python")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / re.match(r"# (\S+)\n", code)[1]).write_text(code)
    monkeypatch.syspath_prepend(folder)
    commands = [x for x in split_commands(read_block("environments.md", "bash")) if x[1] == f"{script}.py"]
    run = run_main(get_module(script), tmp_path / "runs", *commands[0][2:])
    progress = read_progress(run.path)
    assert progress["best_score"] == progress["last_score"] == 1


# ---- Lines that use a saved policy -------------------------------------------------------------------------

TRAINED = {
    "alphazero_go": "go5x5.pt",
    "reinforce_tsp_attention": "tsp20.pt",
    "ppo_change_detection": "haze.pt",
}


def make_policy(script: str, folder: Path) -> Path:
    """Return the trained policy of the repository, or best.pt of a quick run, with random weights."""
    if script in TRAINED:
        return ROOT / "benchmark" / "checkpoints" / TRAINED[script]
    path = run_quick(script, folder).path / "best.pt"
    checkpoint = load(path)
    torch.manual_seed(5)
    for name, weights in checkpoint["agent"].items():  # so large that actions differ from step to step
        if name.endswith(("weight", "bias")):
            torch.nn.init.normal_(weights)
    torch.save(checkpoint, path)
    return path


def check_ppo(run_page, module, monkeypatch):
    """The actions are those of the script's own evaluation from the same start."""
    taken, to_env = [], module.Agent.to_env
    monkeypatch.setattr(module.Agent, "to_env", lambda *args: taken.append(to_env(*args)) or taken[-1])
    names = run_page()
    monkeypatch.setattr(module, "seed_everything", lambda *stream: 7)
    names["args"].eval_episodes = 1
    module.evaluate(names["agent"], names["args"], "cpu", 2, Path())
    actions = np.concatenate(taken).tolist()
    assert actions[200:] == actions[: len(actions) - 200] and set(actions[200:]) == {0, 1}


def check_r2d2_lstm(run_page, module, monkeypatch):
    """The episode has the return and length of an evaluation in the same environment, and others have
    others."""
    names, found = run_page(), []
    names["args"].eval_episodes = 1
    for seed in range(7, 12):
        monkeypatch.setattr(module, "seed_everything", lambda *stream, seed=seed: seed)
        scores = module.evaluate(names["agent"], names["args"], torch.device("cpu"), 2)
        found.append((scores["eval/episodic_return"], scores["eval/episodic_length"]))
    envs = names["player"].envs
    assert (envs.returns.item(), envs.lengths.item()) == pytest.approx(found[0]) and len({*found}) > 1


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
    assert named in ("runs/.../best.pt", f"benchmark/checkpoints/{TRAINED.get(script)}")
    path, module = make_policy(script, tmp_path), get_module(script)
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
