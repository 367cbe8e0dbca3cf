"""Each flag of each script changes something: what is computed, written, printed, or asked of a library.

An entry of FLAGS has the part of a run that must change, the flag with another value, and flags that are
given on both sides. A flag of a script without an entry fails a test.
"""

import contextlib
import functools
import io
import re
import shutil
import sys
from dataclasses import fields
from unittest import mock

import pytest
import torch
from helpers import read_scalars
from scripts import SCRIPTS, each_script, get_module, load
from test_change_files import save_pair, save_set

EVALUATED = "--eval-episodes 2"
TRACKED = "--track"
# The first flags of all scripts. `made` is a folder with a run of the script
COMMON = {
    "exp_name": ("files", "--exp-name other"),
    "seed": ("weights", "--seed 2"),
    "torch_deterministic": ("device", "--no-torch-deterministic"),
    "cuda": ("device", "--no-cuda"),
    "track": ("wandb", TRACKED),
    "wandb_project_name": ("wandb", "--wandb-project-name other", TRACKED),
    "wandb_entity": ("wandb", "--wandb-entity other", TRACKED),
    "run_dir": ("files", "--run-dir elsewhere"),
    "resume": ("files", "--resume made/checkpoint.pt"),
    "evaluate": ("said", "--evaluate made/best.pt"),
    "eval_interval": ("log", "--eval-interval 2", EVALUATED),
    "eval_episodes": ("log", "--eval-episodes 4", EVALUATED),
}


def change_weights(flags: str, given="") -> dict:
    """Return an entry for each of several flags that change the trained weights."""
    entries = {}
    for flag in re.findall(r"--\S+(?: [^-\s]\S*)?", flags):
        name = re.match(r"--(?:no-)?([\w-]+)", flag)[1].replace("-", "_")
        entries[name] = ("weights", flag, given)
    return entries


FLAGS = {
    "ppo": change_weights(
        """--env-id probe_envs:Endless-v0 --num-envs 8 --total-timesteps 64 --num-steps 16 --gamma 0.5
        --gae-lambda 0.5 --norm-obs --no-norm-reward --learning-rate 1e-3 --no-anneal-lr --num-minibatches 4
        --update-epochs 1 --no-norm-adv --clip-coef 0.001 --ent-coef 0.1 --vf-coef 0.1 --max-grad-norm 0.01
        --target-kl 1e-9"""
    )
    | change_weights("--clip-vloss", given="--clip-coef 0.001")
    | {
        "vectorization": ("said", "--vectorization sync", "--env-id CartPole-v1"),
        "capture_video": ("files", "--capture-video", EVALUATED),
    },
    "r2d2_lstm": change_weights(
        """--env-id probe_envs:Endless-v0 --num-envs 8 --num-steps 4 --total-timesteps 256 --epsilon 0.9
        --epsilon-exponent 2 --no-recurrent --no-last-action-reward --hidden-size 8 --memory-span 9
        --burn-in 1 --learn-length 5 --state-init zero --buffer-size 10 --alpha 0.2 --beta 0.2 --eta 0.1
        --n-step 3 --gamma 0.5 --rescale-epsilon 0.1 --no-norm-reward --target-interval 2
        --learning-starts 100 --replay-ratio 2 --batch-size 32 --learning-rate 1e-3 --no-anneal-lr
        --max-grad-norm 0.01"""
    )
    | {"checkpoint_replay": ("parts", "--no-checkpoint-replay")},
    "reinforce_tsp_attention": change_weights(
        """--env-id tsp6-uniform --train-path tsp.txt --num-epochs 3 --steps-per-epoch 3 --batch-size 8
        --baseline rollout --optimizer adam --learning-rate 1e-4 --no-anneal-lr --weight-decay 1
        --max-grad-norm 0.01"""
    )
    | change_weights("--baseline-level 1", given="--baseline rollout")
    | change_weights("--baseline-instances 2", given="--baseline rollout --baseline-level 0.5")
    | {
        "data": ("log", "--data tsp.txt", EVALUATED),
        "solve": ("files", "--solve tours", "--evaluate made/best.pt --data tsp.txt"),
    },
    "alphazero_go": change_weights(
        """--env-id Go-3x3 --komi 2.5 --score-weight 0 --blocks 2 --channels 8 --bf16 --simulations-start 3
        --simulations-end 9 --max-depth 1 --c-puct 3 --first-q zero --noise-weight 0.9 --dirichlet-alpha 9
        --num-games 4 --epsilon-start 0.9 --epsilon-end 0.9 --draw-moves 0 --num-epochs 5
        --pretrain-value-epochs 0 --pretrain-search-epochs 0 --pool-size 128 --generate-fraction 0.9
        --train-fraction 0.5 --random-fraction 0.25 --batch-size 8 --learning-rate 1e-3
        --no-anneal-lr --weight-decay 1 --value-coef 0.9 --q-weight-start 1 --q-weight-end 1"""
    )
    | change_weights("--num-workers 2", given="--pseudo-limit 0.9")
    | change_weights("--pseudo-limit 0.9", given="--num-workers 2")
    | change_weights("--max-age 1", given="--pretrain-value-epochs 0 --pretrain-search-epochs 0")
    | {
        "evaluate": ("said", "--evaluate made/best.pt --eval-episodes 2"),
        "gtp": ("said", "--gtp made/best.pt"),
        "resign_below": ("said", "--resign-below 1", "--gtp made/best.pt"),
    },
    "ppo_change_detection": change_weights(
        """--env-id haze-3 --data-dir pictures --num-train-pairs 9 --image-size 24 --patch-size 16
        --cell-size 4 --coarse-size 2 --num-steps 1 --cost 2 --beta 1 --pretrained made/best.pt
        --detector-iterations 2 --batch-size 4 --detector-lr 1e-3 --ppo-iterations 2 --num-envs 8
        --learning-rate 1e-3 --head-lr-scale 1 --no-anneal-lr --gamma 0.5 --gae-lambda 0.2
        --num-minibatches 1 --update-epochs 2 --clip-coef 0.001 --vf-coef 0.1 --ent-coef 1 --joint-coef 1
        --log-std=-1 --max-grad-norm 0.01"""
    )
    | change_weights("--ignore-index 0", given="--data-dir pictures")
    | change_weights("--val-share 0.4", given="--data-dir whole --val-share 0.2")
    | {
        "look_above": ("said", "--look-above 0", "--evaluate made/best.pt --look-above 1"),
        "threshold": ("said", "--threshold 0", "--evaluate made/best.pt"),
        "predict": ("files", "--predict pictures/test/A pictures/test/B", "--evaluate made/best.pt"),
        "output": (
            "files",
            "--output other",
            "--evaluate made/best.pt --predict pictures/test/A pictures/test/B",
        ),
    },
}
# Runs of about a tenth of a second, in which each flag has something to do
BASES = {
    "ppo": """--env-id probe_envs:Pole-v0 --num-envs 4 --num-steps 8 --total-timesteps 90 --num-minibatches 2
        --update-epochs 2""",
    "r2d2_lstm": """--env-id probe_envs:Ledger-v0 --num-envs 4 --num-steps 8 --total-timesteps 128 --burn-in 2
        --learning-starts 0 --learn-length 4 --batch-size 16 --buffer-size 40 --replay-ratio 1
        --hidden-size 4 --target-interval 3""",
    "reinforce_tsp_attention": """--env-id tsp5-uniform --num-epochs 2 --steps-per-epoch 2 --batch-size 4
        --baseline-instances 20""",
    "alphazero_go": """--env-id Go-2x2 --num-games 2 --blocks 1 --channels 4 --simulations-start 6
        --simulations-end 6 --num-epochs 4 --pool-size 64 --batch-size 4 --pretrain-value-epochs 1
        --pretrain-search-epochs 1 --generate-fraction 0.4""",
    "ppo_change_detection": """--num-train-pairs 8 --image-size 16 --batch-size 2 --num-envs 4
        --num-minibatches 2 --detector-iterations 1 --ppo-iterations 1""",
}
ENTRIES = {script: COMMON | FLAGS[script] for script in SCRIPTS}
PARAMS = [(script, name) for script in SCRIPTS for name in ENTRIES[script]]


def record_run(script, folder, flags):
    """Call a script's `main` in `folder`; return what its user finds, by parts of the run."""
    module, found = get_module(script), {"wandb": None}
    set_up_device = module.set_up_device
    wandb = mock.Mock()

    def choose_device(args):
        """What it would be on a machine with a GPU; the run is on a CPU."""
        cuda = {"is_available": lambda: True, "device_count": lambda: 1}
        cuda |= {"Stream": mock.Mock(), "set_stream": mock.Mock()}
        before = torch.backends.cudnn.deterministic
        with mock.patch.multiple(torch.cuda, **cuda):
            found["device"] = str(set_up_device(args)), torch.backends.cudnn.deterministic
        torch.backends.cudnn.deterministic = before
        return torch.device("cpu")

    out = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        patch.chdir(folder)
        patch.setitem(sys.modules, "wandb", wandb)
        patch.setattr(module, "set_up_device", choose_device)
        patch.setattr(sys, "stdin", io.StringIO("genmove b\nquit\n"))
        module.main(flags.split())
    hide = functools.partial(re.sub, r"__\d{16}", "")  # the time in the name of a run's folder
    if wandb.init.called:
        options = wandb.init.call_args.kwargs
        found["wandb"] = {name: hide(str(x)) for name, x in options.items() if name != "config"}
    found["said"] = hide(out.getvalue())
    found["files"] = sorted(
        hide(re.sub("events.*", "events", str(path.relative_to(folder)))) for path in folder.rglob("*.*")
    )
    for path in folder.glob("*/*__*/"):  # the run's folder, if there is one
        checkpoint = load(path / "checkpoint.pt")
        found["parts"] = sorted(checkpoint)
        found["weights"] = {name: hash(x.numpy().tobytes()) for name, x in checkpoint["agent"].items()}
        scalars = read_scalars(path)
        found["log"] = {tag: x for tag, x in scalars.items() if not tag.endswith(("seconds", "SPS"))}
    return found


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Return the function record(script, flags): what a run with these flags leaves, made once."""

    @functools.cache
    def make_run(script):
        folder = tmp_path_factory.mktemp("made")
        record_run(script, folder, f"{BASES[script]} --eval-episodes 2")
        (path,) = folder.glob("runs/*")
        return path

    @functools.cache
    def record(script, flags):
        folder = tmp_path_factory.mktemp("flags")
        if " made/" in flags:
            shutil.copytree(make_run(script), folder / "made")
        if " pictures" in flags:
            save_set(folder / "pictures", size=(24, 20))
        if " whole" in flags:
            for i in range(10):
                save_pair(folder / "whole", f"{{kind}}/x{i}", i, (16, 16))
        if " tsp.txt" in flags:
            (folder / "tsp.txt").write_text("0 0 9 0 9 7 0 7 4 1 output 1 5 2 3 4 1\n" * 2)
        return record_run(script, folder, f"{BASES[script]} --eval-episodes 0 {flags}")

    return record


@each_script
def test_each_flag_has_an_entry_of_its_own(script):
    assert ENTRIES[script].keys() == {field.name for field in fields(get_module(script).Args)}
    for name, (_, flag, *_) in ENTRIES[script].items():
        assert re.match(f"--(no-)?{name.replace('_', '-')}\\b", flag)


@each_script
def test_equal_flags_leave_equal_runs(script, tmp_path):
    """So a difference below is a flag's doing."""
    flags, runs = f"{BASES[script]} {EVALUATED} --track", []
    for name in "ab":
        (tmp_path / name).mkdir()
        runs.append(record_run(script, tmp_path / name, flags))
    assert runs[0] == runs[1] and runs[0].keys() >= {"wandb", "device", "said", "files", "weights", "log"}


@pytest.mark.parametrize(("script", "name"), PARAMS)
def test_a_flag_changes_something(script, name, record):
    part, flag, *given = ENTRIES[script][name]
    before, after = record(script, " ".join(given)), record(script, " ".join((*given, flag)))
    assert after[part] != before[part]
