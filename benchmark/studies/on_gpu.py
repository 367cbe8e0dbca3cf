"""Measure the five scripts on a GPU and on one CPU core of the same machine: speed first, then whole default
runs.

    python -m benchmark.studies.on_gpu              # eight minutes on one GPU; pip install ale-py too

Rows of speed run one after another on the GPU and, at the same time, on one CPU core. They report the median
speed of the last iterations of a short run, in the script's own steps per second; those of Go also moves per
second of self-play, and the seconds of collecting and of training apart. Rows of learning run side by side on
the GPU, so their seconds say little; they report the score at the end. A row that fails keeps the last line
that it printed.
"""

import argparse
import concurrent.futures
import itertools
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmark import common, machines, markdown, runs
from benchmark.code import mark
from benchmark.studies import helpers

PREVIOUS = "r2d2_lstm --env-id popgym:popgym-RepeatPreviousEasy-v0 --learn-length 16"
R2D2 = f"{PREVIOUS} --total-timesteps 24000 --eval-episodes 0"
# Without the recipe for Atari, ALE stacks four frames and clips rewards
PONG = """r2d2_lstm --env-id ale_py:ALE/Pong-v5 --hidden-size 512 --burn-in 40 --learn-length 40 --n-step 5
    --gamma 0.997 --learning-rate 1e-4 --buffer-size 5000 --batch-size 2560
    --no-checkpoint-replay --eval-episodes 0 --total-timesteps 24000"""
TSP = "reinforce_tsp_attention --eval-episodes 0 --num-epochs 4"
GO5 = "alphazero_go --num-games 128 --num-epochs 8 --eval-episodes 0"
GO9 = """alphazero_go --env-id Go-9x9 --komi 7.5 --blocks 6 --channels 64 --pool-size 100000 --eval-episodes 0
    --pretrain-value-epochs 1 --pretrain-search-epochs 0 --num-epochs 4 --dirichlet-alpha 0.12
    --num-games 1024"""
GO9_16 = f"{GO9} --simulations-start 16 --simulations-end 16"
CHANGE = "ppo_change_detection --eval-episodes 0 --detector-iterations 8 --ppo-iterations 12"
# Name, command, kind: "cpu" also runs on the CPU, "no graphs" runs without CUDA graphs
SPEED = (
    ("CartPole, default", "ppo --total-timesteps 40000 --eval-episodes 0", "cpu"),
    ("RepeatPreviousEasy", R2D2, "cpu"),
    ("RepeatPreviousEasy, without CUDA graphs", R2D2, "no graphs"),
    ("Pong, hidden 512, batch of 2,560 steps", PONG, ""),
    ("Pong, without CUDA graphs", PONG, "no graphs"),
    ("TSP20, batch 32, default; an instance is 20 tours", TSP, "cpu"),
    (
        "TSP50, batch 512; an instance is 50 tours",
        f"{TSP} --env-id tsp50-uniform --batch-size 512 --steps-per-epoch 30",
        "",
    ),
    (
        "TSP100, batch 128; an instance is 100 tours",
        f"{TSP} --env-id tsp100-uniform --batch-size 128 --steps-per-epoch 20",
        "",
    ),
    (
        "TSP100, batch 512; an instance is 100 tours",
        f"{TSP} --env-id tsp100-uniform --batch-size 512 --steps-per-epoch 20",
        "",
    ),
    ("Go 5x5, 128 games, 32 to 48 simulations", GO5, "cpu"),
    ("Go 5x5, 128 games, 32 to 48 simulations, two workers", f"{GO5} --num-workers 2", ""),
    ("Go 5x5, 1,024 games, 32 to 48 simulations", f"{GO5} --num-games 1024 --pool-size 800000", ""),
    ("Go 9x9, 1,024 games, 16 simulations", GO9_16, ""),
    ("Go 9x9, 1,024 games, 16 simulations, bf16", f"{GO9_16} --bf16", ""),
    ("Go 9x9, 1,024 games, 16 simulations, bf16, two workers", f"{GO9_16} --bf16 --num-workers 2", ""),
    ("Go 9x9, 1,024 games, 64 simulations", f"{GO9} --simulations-start 64 --simulations-end 64", ""),
    ("haze, default", CHANGE, "cpu"),
)
LEARNING = (
    ("CartPole, default", "ppo"),
    ("RepeatPreviousEasy", PREVIOUS),
    ("TSP20, default", "reinforce_tsp_attention --data benchmark/data/tsp/tsp20_uniform_500.txt"),
    ("Go 5x5, default", "alphazero_go"),
    ("haze, default", "ppo_change_detection"),
)
SCORES = {
    "eval/episodic_return": "return",
    "eval/greedy_gap": "percent above the optimum: greedy",
    "eval/multistart_gap": "multi-start",
    "eval/win_rate": "win rate",
    "eval/f1": "F1",
    "eval/looks": "looks per patch",
}
SPLIT = ("charts/moves", "charts/collect_seconds", "charts/train_seconds")  # of an epoch, which Go alone logs


def run(command: str, kind: str, timeout: float) -> dict:
    """Run a script; `kind` is "cpu", "no graphs" or "". Returns its seconds, speed and last values, or an
    error."""
    script, *flags = shlex.split(command)
    without_graphs = f"import {script} as script; script.CUDA_GRAPHS = False; script.main()"
    program = ["-c", without_graphs] if kind == "no graphs" else [f"algos/{script}.py"]
    path = os.pathsep.join([str(common.ROOT / "algos"), os.environ.get("PYTHONPATH", "")])
    env, start = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, time.time()
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--run-dir", folder]
        if kind == "cpu":
            flags.append("--no-cuda")
        options = {"cwd": common.ROOT, "env": env, "capture_output": True, "text": True, "timeout": timeout}
        try:
            done = subprocess.run([sys.executable, *program, *flags], **options)
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {timeout} seconds"}
        if done.returncode:
            return {"error": (done.stderr.strip() or str(done.returncode)).splitlines()[-1]}
        events = runs.read_events(runs.find_run_folders(Path(folder))[0])
    points = events.Scalars("charts/cpu_seconds")[-10:]
    if len(points) < 2:
        return {"error": "ended after one iteration"}
    speeds = [(b.step - a.step) / (b.wall_time - a.wall_time) for a, b in itertools.pairwise(points)]
    speed = statistics.median(speeds[len(speeds) // 2 :])
    tags = events.Tags()["scalars"]
    last = {name: events.Scalars(name)[-1].value for name in SCORES if name in tags}
    row = {"seconds": time.time() - start, "sps": speed, "last": last}
    if set(SPLIT) <= set(tags):
        epochs = [[point.value for point in events.Scalars(tag)] for tag in SPLIT]
        moves, *seconds = (statistics.mean(values[len(values) // 2 :]) for values in epochs)
        row |= {"moves": moves / seconds[0], "collect_seconds": seconds[0], "train_seconds": seconds[1]}
    return row


def make_sections(results: dict) -> dict[tuple[str, str], str]:
    """Make the section of docs/results.md: speed on the GPU and on one core, and scores of default runs."""
    rows = {(row["kind"], row["name"]): row for row in results["rows"]}
    speeds, splits, scores = [], [], []
    missing = {"error": runs.NOT_RUN}
    for name, _, kind in SPEED:
        if ("speed on the GPU", name) not in rows:
            continue
        gpu = rows["speed on the GPU", name]
        cpu = rows.get(("speed on the CPU", name), missing) if kind == "cpu" else {}
        shown = [row.get("error") or markdown.show(row.get("sps", math.nan)) for row in (gpu, cpu)]
        has_both = "sps" in gpu and "sps" in cpu
        ratio = markdown.show(gpu["sps"] / cpu["sps"]) if has_both else "-"
        speeds.append([mark(name, [gpu, cpu]), *shown, ratio, gpu.get("gpu", "-")])
        if "moves" in gpu:
            parts = gpu["moves"], gpu["collect_seconds"], gpu["train_seconds"]
            splits.append([mark(name, [gpu]), *map(markdown.show, parts), gpu["gpu"]])
    for name, _ in LEARNING:
        row = rows.get(("learning on the GPU", name), missing)
        last = row.get("last", {})
        found = [f"{SCORES[tag]} {markdown.show(last[tag])}" for tag in SCORES if tag in last]
        score = row.get("error") or ", ".join(found)
        scores.append(
            [mark(name, [row]), score, markdown.show(row.get("seconds", math.nan)), row.get("gpu", "-")]
        )
    head = "training steps a second, one run each | one GPU: | one CPU core: | ratio: | GPU"
    text = markdown.make_table(head, speeds) + "\n\n"
    if splits:
        head = "Go, one run each | moves a second of collecting: | seconds of an epoch, collecting: "
        head += "| training: | GPU"
        text += markdown.make_table(head, splits) + "\n\n"
    head = "whole run on the GPU, one seed each | at its end | seconds: | GPU"
    text += markdown.make_table(head, scores) + "\n\n"
    line = machines.machine_line(results["rows"])
    gpus = "; ".join(sorted({row["gpu"] for row in results["rows"]}))
    text += line.replace("; commit", f"; {gpus}; commit")
    return {("results", "on_gpu"): f"\n{text}\n"}


def make_parser():
    """Make the parser of the command line's flags."""
    parser = helpers.start_parser(__doc__)
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a row is stopped")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--learning", action=argparse.BooleanOptionalAction, default=True)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measure all rows, and save each one as soon as it is measured."""
    args = make_parser().parse_args(argv)
    lock = threading.Lock()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"

    def publish(kind: str, name: str, command: str, row: dict) -> None:
        print(f"{kind}, {name}: {row.get('error') or round(row['sps'], 1)}", flush=True)
        row |= {"kind": kind, "name": name, "command": " ".join(command.split()), "gpu": gpu}
        with lock:
            script = f"algos/{row['command'].split()[0]}.py"
            helpers.save_rows("on_gpu", [row], ("kind", "name"), (script,))

    def measure_speed(device: str) -> None:
        for name, command, kind in SPEED:
            if args.only in name and (device == "GPU" or kind == "cpu"):
                row = run(command, "cpu" if device == "CPU" else kind.replace("cpu", ""), args.timeout)
                publish(f"speed on the {device}", name, command, row)

    if args.speed:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(measure_speed, ("GPU", "CPU")))
    if args.learning:
        rows = [row for row in LEARNING if args.only in row[0]]
        with concurrent.futures.ThreadPoolExecutor(len(LEARNING)) as pool:
            futures = {pool.submit(run, command, "", args.timeout): (name, command) for name, command in rows}
            for future in concurrent.futures.as_completed(futures):
                publish("learning on the GPU", *futures[future], future.result())


if __name__ == "__main__":
    main()
