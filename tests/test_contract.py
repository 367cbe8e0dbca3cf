"""What every script keeps: the contract, held against each script in algos/ by running it."""

import ast
import importlib
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, read_result, read_scalars
from packaging.requirements import Requirement

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

SCRIPTS = sorted(p.stem for p in (ROOT / "algos").glob("*.py"))


@dataclass
class Case:
    """How the tests run a script."""

    short: str  # flags that make it end within seconds, after about ten iterations
    longer: str  # flags that, after those, make a run long enough to be killed half-way
    constant: str  # flag that keeps the learning rate, so that a run does not depend on its length
    length: str  # the flag that says how long a run is,
    extended: int  # a value of it that goes a little beyond a short run,
    double: int  # and one that goes well beyond
    progress: tuple[str, str]  # words of the progress bar
    tags: tuple[str, str]  # logged tags
    max_lines: int = 900
    groups: tuple[str, ...] = ()  # of tags, beside charts, losses and eval


CASES = {
    "alphazero_go": Case(
        "--env-id Go-3x3 --num-games 4 --blocks 1 --channels 8 --simulations-start 4 --simulations-end 4"
        " --num-epochs 10 --pool-size 256 --batch-size 16 --arena-interval 3 --arena-games 4 --eval-episodes 4"
        " --checkpoint-interval 1",
        "--num-epochs 60 --eval-interval 20",
        *("--no-anneal-lr --q-weight-end 0.05", "--num-epochs", 11, 20),
        progress=("elo=", "epoch"),
        tags=("arena/elo", "losses/value_loss"),
        max_lines=1420,  # tree, slots and pool; Thinker for play
        groups=("arena", "pool", "search"),
    ),
    "ppo": Case(
        "--num-envs 8 --total-timesteps 2560 --eval-episodes 4 --checkpoint-interval 1",
        "--total-timesteps 20480 --eval-interval 3",
        *("--no-anneal-lr", "--total-timesteps", 2860, 5120),
        progress=("return=", "step/s"),
        tags=("charts/episodic_return", "losses/value_loss"),
    ),
    "ppo_change_detection": Case(
        "--num-train-pairs 64 --num-eval-pairs 16 --image-size 32 --batch-size 8 --num-envs 8 --num-iterations 8"
        " --pretrain-iterations 1 --warm-iterations 1 --eval-episodes 4 --checkpoint-interval 1",
        "--num-iterations 80 --eval-interval 3",
        *("--no-anneal-lr", "--num-iterations", 9, 16),
        progress=("return=", "iteration"),
        tags=("charts/episodic_return", "losses/value_loss"),
        max_lines=980,  # three stages of training, and MobileNetV2
    ),
    "r2d2_lstm": Case(
        "--num-envs 8 --total-timesteps 2560 --num-steps 32 --learning-starts 256 --buffer-size 100 --batch-size 8"
        " --replay-ratio 1 --eval-episodes 4 --checkpoint-interval 1 --checkpoint-replay",
        "--total-timesteps 10240 --eval-interval 3",
        *("--no-anneal-lr", "--total-timesteps", 2860, 5120),
        progress=("return=", "step/s"),
        tags=("charts/episodic_return", "losses/q_loss"),
        max_lines=901,
    ),
    "reinforce_tsp_attention": Case(
        "--num-epochs 10 --steps-per-epoch 2 --batch-size 4 --eval-episodes 4 --checkpoint-interval 1",
        "--num-epochs 60 --eval-interval 3",
        *("--lr-schedule constant", "--num-epochs", 11, 20),
        progress=("gap=", "instance/s"),
        tags=("charts/greedy_gap", "losses/policy_loss"),
    ),
}
TIMES = re.compile(r"SPS|per_second|cpu_seconds|_ms$|_idle$")  # metrics that no two runs have in common
# Functions that are the same, to the letter, in every script that has them
SHARED = (
    "fail check_range setup_device seed_everything sum_over_ranks sum_gradients make_run_folder make_writer get_commit "
    "plot_learning_curve write_atomically save_checkpoint load_checkpoint capture_graph init_optimizer_state"
).split()
COMMON_FLAGS = (
    "exp_name seed torch_deterministic cuda torch_threads run_dir track wandb_project_name wandb_entity capture_video "
    "resume evaluate checkpoint_interval eval_interval eval_episodes compile cuda_graphs"
).split()
SECTIONS = ["Networks", "Storage", None, "Evaluation and checkpoints", "Training"]  # None: the algorithm's name
each_script = pytest.mark.parametrize("script", SCRIPTS)


def source(script):
    return (ROOT / "algos" / f"{script}.py").read_text()


def run_main(script, *flags):
    importlib.import_module(f"algos.{script}").main([*CASES[script].short.split(), *map(str, flags)])


def drop_times(metrics):
    return {name: value for name, value in metrics.items() if not TIMES.search(name)}


def load(path):
    return torch.load(path, weights_only=True)


def assert_same_weights(path_a, path_b, same=True):
    a, b = load(path_a / "checkpoint.pt")["agent"], load(path_b / "checkpoint.pt")["agent"]
    assert all(torch.equal(a[k], b[k]) for k in a) == same


@each_script
def test_run_folder_result_and_checkpoint(script, tmp_path, capsys):
    run_main(script, "--run-dir", tmp_path, "--seed", 3)
    path, result = read_result(tmp_path)
    assert re.fullmatch(rf"{re.escape(result['env_id'])}__{script}__3__\d+", path.name)
    keys = "script env_id seed headline metrics env_steps wall_seconds cpu_seconds device torch commit args".split()
    assert list(result) == keys
    assert result["script"] == script and result["seed"] == 3 and result["headline"] in result["metrics"]
    assert all(isinstance(v, (int, float)) for v in result["metrics"].values())
    assert result["env_steps"] > 0 and result["wall_seconds"] > 0 and result["cpu_seconds"] > 0
    assert json.loads((path / "args.json").read_text()) == result["args"]
    assert load(path / "checkpoint.pt")["script"] == script
    assert not list(path.glob("*.tmp"))
    png = (path / "learning_curve.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5000
    scalars = read_scalars(path)
    assert {tag.split("/")[0] for tag in scalars} == {"charts", "losses", "eval", *CASES[script].groups}
    output = capsys.readouterr()
    assert str(path) in output.out.splitlines()[-1]  # one line of summary, with the run folder
    assert all(word in output.err for word in CASES[script].progress)  # tqdm


@each_script
def test_the_seed_fixes_everything(script, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_main(script, "--run-dir", tmp_path / name, "--seed", seed)
    a, b, c = (read_result(tmp_path / name)[0] for name in "abc")
    assert_same_weights(a, b)
    assert_same_weights(a, c, same=False)


def kill_when(script, run_dir, is_time):
    """Start a run and kill -9 it once `is_time(checkpoint path)`; returns the checkpoint's path."""
    flags = [*CASES[script].short.split(), *CASES[script].longer.split(), "--run-dir", str(run_dir)]
    command = [sys.executable, str(ROOT / "algos" / f"{script}.py"), *flags]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if (found := list(Path(run_dir).glob("*/checkpoint.pt"))) and is_time(found[0]):
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = Path(run_dir).glob("*/checkpoint.pt")
    return path


@each_script
def test_a_killed_run_resumes_to_the_same_weights(script, tmp_path):
    run_main(script, *CASES[script].longer.split(), "--run-dir", tmp_path / "whole")
    cut = kill_when(script, tmp_path / "cut", lambda path: load(path)["iteration"] >= 2)
    assert not (cut.parent / "result.json").exists()
    time.sleep(1.1)  # TensorBoard orders event files by the second they were made in
    importlib.import_module(f"algos.{script}").main(["--resume", str(cut)])  # goes on in its own folder
    assert_same_weights(read_result(tmp_path / "whole")[0], read_result(tmp_path / "cut")[0])
    whole, cut = (read_scalars(read_result(tmp_path / name)[0]) for name in ("whole", "cut"))
    for tag in (tag for tag in whole if not TIMES.search(tag)):
        np.testing.assert_array_equal(whole[tag], cut[tag], err_msg=tag)  # no step logged twice or not at all


@each_script
def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(script, tmp_path):
    for i, delay in enumerate((0.0, 0.03, 0.11)):
        start = []

        def is_time(path, start=start, delay=delay):
            start.append(time.time())
            return time.time() >= start[0] + delay

        checkpoint = load(kill_when(script, tmp_path / str(i), is_time))
        assert checkpoint["script"] == script


@each_script
def test_evaluation_prints_the_numbers_of_the_run(script, tmp_path, capsys):
    run_main(script, "--run-dir", tmp_path)
    path, result = read_result(tmp_path)
    files = sorted(p.name for p in path.iterdir())
    capsys.readouterr()
    importlib.import_module(f"algos.{script}").main(["--evaluate", str(path / "checkpoint.pt")])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert drop_times({k: v for k, v in result["metrics"].items() if k in printed}) == pytest.approx(
        drop_times({k: float(v) for k, v in printed.items()}), abs=0.006
    )
    assert result["headline"] in printed and sorted(p.name for p in path.iterdir()) == files


@each_script
def test_a_finished_run_is_extended_in_a_new_folder(script, tmp_path, capsys):
    module = importlib.import_module(f"algos.{script}")
    run_main(script, "--run-dir", tmp_path)
    path, _ = read_result(tmp_path)
    before = {p: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(SystemExit) as error:
        module.main(["--resume", str(path / "checkpoint.pt")])
    assert error.value.code == 2 and CASES[script].length in capsys.readouterr().err
    module.main(["--resume", str(path / "checkpoint.pt"), CASES[script].length, str(CASES[script].extended)])
    assert {p: p.read_bytes() for p in path.iterdir()} == before
    assert len(list(tmp_path.glob("*/result.json"))) == 2


@each_script
def test_a_run_killed_before_its_result_is_finished_by_a_resume(script, tmp_path):
    run_main(script, "--run-dir", tmp_path)
    path, result = read_result(tmp_path)
    (path / "result.json").unlink()
    weights = load(path / "checkpoint.pt")["agent"]
    importlib.import_module(f"algos.{script}").main(["--resume", str(path / "checkpoint.pt")])
    path_again, again = read_result(tmp_path)
    assert path_again == path and drop_times(again["metrics"]) == drop_times(result["metrics"])
    assert all(torch.equal(v, load(path / "checkpoint.pt")["agent"][k]) for k, v in weights.items())


@each_script
def test_runs_started_in_the_same_second_get_folders_of_their_own(script, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module(f"algos.{script}").time, "time", lambda: 1e9 + time.monotonic() % 1e-3)
    for _ in range(2):
        run_main(script, "--run-dir", tmp_path)
    assert len(list(tmp_path.glob("*/result.json"))) == 2


@each_script
def test_runs_without_wandb_and_matplotlib(script, tmp_path):
    code = (
        "import sys, runpy; sys.modules['wandb'] = sys.modules['matplotlib'] = None; sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    path = ROOT / "algos" / f"{script}.py"
    command = [sys.executable, "-c", code, str(path), *CASES[script].short.split(), "--run-dir", str(tmp_path)]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "pip install matplotlib" in run.stdout
    read_result(tmp_path)
    run = subprocess.run([*command, "--track"], env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 2 and "pip install wandb" in run.stderr


@each_script
def test_wandb_offline(script, run_script, tmp_path):
    run = run_script(script, *CASES[script].short.split(), "--track", "--run-dir", tmp_path, WANDB_MODE="offline")
    assert run.returncode == 0, run.stderr
    path, _ = read_result(tmp_path)
    (offline,) = (path / "wandb").glob("offline-run-*")
    (log,) = offline.glob("run-*.wandb")
    content = log.read_bytes()
    assert all(tag.encode() in content for tag in CASES[script].tags)


@each_script
def test_bad_files_and_folders_are_one_line_and_exit_code_2(script, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"algos.{script}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.pt").write_bytes(b"not a checkpoint")
    torch.save({"script": "another", "args": {}}, "another.pt")
    torch.save({"weights": torch.zeros(2)}, "weights.pt")
    torch.save({"script": script, "args": {"old_flag": 1}}, "old.pt")
    (tmp_path / "file").write_text("")
    torch.save(Path("unpickled"), "pickle.pt")
    for flags, message in (
        ("--resume missing.pt", "missing.pt: no such checkpoint"),
        ("--resume garbage.pt", "garbage.pt: not a readable checkpoint"),
        ("--evaluate pickle.pt", "pickle.pt: not a readable checkpoint"),
        ("--evaluate another.pt", "another.pt: a checkpoint of another.py"),
        ("--resume weights.pt", "weights.pt: not a checkpoint"),
        ("--resume old.pt", "old.pt: written by a version"),
        ("--resume old.pt --evaluate old.pt", "--resume and --evaluate"),
        ("--run-dir file", "--run-dir file"),
        ("--seed -1", "--seed"),
        ("--torch-threads 0", "--torch-threads"),
        ("--eval-episodes 0", "--eval-episodes"),
        ("--checkpoint-interval -1", "--checkpoint-interval"),
    ):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(SystemExit) as error:
            module.main(flags.split())
        assert error.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and message in lines[0], lines
        assert sorted(tmp_path.iterdir()) == before


@each_script
def test_common_flags_come_first_and_are_the_same_everywhere(script):
    def fields(name):
        (args,) = (n for n in ast.parse(source(name)).body if isinstance(n, ast.ClassDef) and n.name == "Args")
        found = []
        for field, doc in zip(args.body[1::2], args.body[2::2], strict=True):
            assert isinstance(field, ast.AnnAssign) and isinstance(doc.value.value, str), ast.unparse(field)
            found.append((field.target.id, ast.unparse(field.annotation), ast.unparse(field.value), doc.value.value))
        return found

    mine = fields(script)
    has_video = any(f[0] == "capture_video" for f in mine)
    common = [f for f in COMMON_FLAGS if has_video or f != "capture_video"]
    assert [f[0] for f in mine[: len(common)]] == common
    assert mine[: len(common)] == [
        f for f in fields("ppo")[: len(COMMON_FLAGS)] if has_video or f[0] != "capture_video"
    ]


@each_script
def test_shared_functions_are_the_same_to_the_letter(script):
    def functions(name):
        text = source(name)
        nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name in SHARED]
        return {n.name: ast.get_source_segment(text, n) for n in nodes}

    reference, mine = functions("ppo"), functions(script)
    assert set(reference) == set(SHARED)
    assert mine == {name: reference[name] for name in mine}
    assert {"fail", "setup_device", "save_checkpoint", "load_checkpoint", "make_run_folder", "make_writer"} <= set(mine)


@each_script
def test_sections_are_in_order(script):
    titles = re.findall(r"^# ---- (.+) -+$", source(script), re.M)
    assert [None if i == 2 else t for i, t in enumerate(titles)] == SECTIONS
    assert source(script).count("\n") <= CASES[script].max_lines


def parse_pep723(script):
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", source(script), re.M)
    return tomllib.loads("".join(line[2:] if line[1:2] == " " else line[1:] for line in block.splitlines(True)))


@each_script
def test_pep723_block_fits_requirements_and_imports(script):
    """`uv run` gets the packages that requirements.txt pins, in ranges that admit the pins and older Pythons."""
    metadata = parse_pep723(script)
    assert metadata["requires-python"] == ">=3.10"
    ranges = {r.name: r.specifier for r in map(Requirement, metadata["dependencies"])}
    pins = {r.name: r.specifier for r in map(Requirement, (ROOT / "requirements.txt").read_text().split())}
    assert ranges.keys() == pins.keys()
    for name, pin in pins.items():
        (spec,) = pin
        assert spec.operator == "==" and ranges[name].contains(spec.version), name
    assert ranges["torch"].contains("2.11.0")
    packages = {"PIL": "pillow"}
    tree = ast.parse(source(script))
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    third_party = {m.split(".")[0] for m in modules} - set(sys.stdlib_module_names) - {"envs_shared"}
    assert {packages.get(m, m) for m in third_party} <= ranges.keys()
    assert not any(m.split(".")[0] in ("algos", "tests", *SCRIPTS) for m in modules)
    top_level = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    assert not {"wandb", "matplotlib"} & top_level  # imported where they are used


def test_every_script_is_in_the_readme_and_has_docs_and_tests():
    readme = (ROOT / "README.md").read_text()
    for script in SCRIPTS:
        lines = source(script).count("\n")
        row = next(line for line in readme.splitlines() if f"algos/{script}.py`" in line and line.startswith("|"))
        assert abs(int(row.split("|")[-2]) - lines) <= 5, f"README says {row.split('|')[-2]} lines of {script}: {lines}"
        assert (ROOT / "docs" / f"{script}.md").exists() and (ROOT / "tests" / f"test_{script}.py").exists()
