"""Cells of suites, runs and stored results, made for the tests of the benchmark."""

from dataclasses import replace
from pathlib import Path

from scripts import SCRIPTS
from torch.utils.tensorboard import SummaryWriter

from benchmark import suite as suites

NAME = "ppo/CartPole-v1/default"
STEPS, SPEEDS = [1000, 1300, 900, 1200, 1100], [1000.0, 1100.0, 1050.0, 900.0, 950.0]


def define_cell(command="python algos/ppo.py", **keys):
    """Make a cell as a suite does."""
    table = {"task": "T", "setting": "s", "headline": "eval/x", "command": command}
    seed = keys.pop("seed", 0)
    return replace(suites.make_cell(table | keys, "here"), seed=seed)


def write_suite(path: Path, seeds=(1,), **commands):
    """Write a suite on CartPole-v1 with a cell for each setting=command."""
    text = f'[defaults]\nseeds = {list(seeds)}\nheadline = "eval/episodic_return"\n'
    for setting, command in commands.items():
        text += f'[[cells]]\ntask = "CartPole-v1"\nsetting = "{setting}"\ncommand = "{command}"\n'
    path.write_text(text)
    return path


def write_run(folder: Path, tags, num_points=3):
    """Log step / 10 under each tag at the steps 100, 200, ... of a run that takes 0.02 CPU-seconds a step."""
    with SummaryWriter(str(folder)) as writer:
        for step in range(100, 100 * num_points + 1, 100):
            for tag in tags:
                writer.add_scalar(tag, step / 10, step)
            writer.add_scalar("charts/cpu_seconds", step * 0.02, step)


def make_cell(values, name=NAME, **changes):
    """Return a cell of stored results, with a run for each value of the headline."""
    script, task, setting = name.split("/")
    command = f"python algos/{script}.py" if script in SCRIPTS else f"python -m benchmark.peers.{script}"
    cell = {"task": task, "setting": setting, "script": script, "command": command}
    cell |= {"headline": "eval/episodic_return", "curve": "c", "threshold": 475, "in_a_row": 1}
    cell |= {"better": "higher"} | changes
    run = {"machine": {"commit": "abc"}, "env_steps": 9000, "steps_per_second": 1000.0}
    runs = [
        run | {"seed": seed, "steps_to_threshold": 10 * seed, "metrics": {cell["headline"]: value}}
        for seed, value in enumerate(values, 1)
    ]
    return {"runs": runs, "missing": []} | cell


def make_solved(steps, speeds=SPEEDS, name=NAME, **changes):
    """Return a cell whose runs end at 500, and reached the threshold after these steps (None: never)."""
    cell = make_cell([500.0] * len(steps), name, **changes)
    for run, step, speed in zip(cell["runs"], steps, speeds, strict=False):
        run |= {"steps_to_threshold": step, "steps_per_second": speed}
    return cell


def make_results(*cells):
    """Return the results of a suite, as report.py stores them."""
    names = [f"{cell['script']}/{cell['task']}/{cell['setting']}" for cell in cells]
    return {"suite": "a", "cells": dict(zip(names, cells, strict=True)), "levels": {}}
