"""Several processes: each script's run by two, compared with one process that has what both have."""

import os
import re
import shutil
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, SCRIPTS, read_scalars, start_process, wait_for
from ranks import take_notes
from scripts import (
    CASES,
    check_no_step_is_logged_twice,
    copy_script,
    each_script,
    find_run,
    get_module,
    import_file,
    load,
    read_progress,
    read_scores,
    run_main,
)

# More flags of the runs here. In both tasks of environments, episodes have an equal number of steps
MORE = {
    "ppo": "--env-id probe_envs:Fixed-v0 --norm-obs",
    "r2d2_lstm": "--env-id probe_envs:Fixed-v0",
    "alphazero_go": "--pretrain-value-epochs 1 --pretrain-search-epochs 1 --generate-fraction 0.6",
    "reinforce_tsp_attention": "--baseline rollout --baseline-instances 20 --baseline-level 0.5",
    "ppo_change_detection": "",
}


@pytest.fixture(scope="module")
def alone(script, tmp_path_factory):
    """A run of one process, and what it shares with none."""
    module, folder = get_module(script), tmp_path_factory.mktemp("alone")
    with take_notes(script, module, 8) as notes:
        path = run_main(module, folder, CASES[script].quick, MORE[script], "--eval-episodes 3").path
    return SimpleNamespace(path=path, notes=notes)


@pytest.fixture(scope="module")
def shared(script, alone, tmp_path_factory):
    """The same run by two processes, then resumed for longer, and an update that they share."""
    case, folder = CASES[script], tmp_path_factory.mktemp("shared")
    flags = f"{case.quick} {MORE[script]} --eval-episodes 3"
    longer = (
        read_progress(alone.path)["step" if case.length == "--total-timesteps" else "iteration"] + case.more
    )
    logs = [folder / name for name in ("0.log", "1.log")]
    words = script, folder, flags, f"{case.length} {longer}"
    exit_codes = wait_for([start_process(log, "share", rank, *words) for rank, log in enumerate(logs)])
    output = [log.read_text() for log in logs]
    assert exit_codes == [0, 0], "".join(output)
    ranks = [load(folder / f"kept_{rank}.pt") for rank in range(2)]
    paths = {name: find_run(folder / name) for name in ("whole", "resumed")}
    return SimpleNamespace(output=output, ranks=ranks, paths=paths, longer=longer)


@each_script
def test_two_processes_hold_one_network_and_draw_other_numbers(script, shared):
    """Weights and statistics, also in a resumed run, and in checkpoint.pt."""
    for name, path in shared.paths.items():
        first, second = (kept[name] for kept in shared.ranks)
        for other in (second["agent"], load(path / "checkpoint.pt")["agent"]):
            torch.testing.assert_close(first["agent"], other, rtol=0, atol=0)
        assert not torch.equal(first["rng"], second["rng"])
    check_no_step_is_logged_twice(shared.paths["resumed"])


@each_script
def test_an_update_that_two_processes_share_is_that_of_one_on_all_rows(script, shared):
    """If a script allows it, their parts differ in size."""
    update, other = (kept["update"] for kept in shared.ranks)
    torch.testing.assert_close(update[1], other[1], rtol=0, atol=0)
    for kind in ("gradients", "weights", "numbers"):
        alone, together = (found[kind] for found in update)
        assert any(x.abs().max() > 0 for x in alone)
        for i, (x, y) in enumerate(zip(alone, together, strict=True)):
            atol = 1e-6 * max(1.0, x.abs().max().item())
            torch.testing.assert_close(y, x, rtol=1e-4, atol=atol, msg=f"{kind} {i}: {x} {y}")


@each_script
def test_one_of_two_processes_talks(script, shared):
    """And only once: about the run's begin and its end, with the scores."""
    first, second = shared.output
    assert second == ""
    for path in shared.paths.values():
        words = rf"^\S*{path.name}: .*of best\.pt .*of the last policy"
        assert len(re.findall(words, first, re.M)) == 2  # of the whole run, and of the resumed one
        assert len(re.findall(rf"^\S*{path.name}: .* done$", first, re.M)) == 2
        assert len(list(path.glob("events*"))) == (2 if path == shared.paths["resumed"] else 1)


def read_steps(path, tag="charts/SPS"):
    return read_scalars(path)[tag]


@each_script
def test_two_processes_count_the_steps_of_both(script, alone, shared):
    """As one process that has all environments, if the steps of an iteration are known."""
    steps = [step for step, _ in read_scalars(shared.paths["whole"])["charts/SPS"]]
    if script != "alphazero_go":  # where games are of any length
        assert steps == [step for step, _ in read_scalars(alone.path)["charts/SPS"]]
    counts = [kept["whole"]["notes"].get("steps") for kept in shared.ranks]
    if script in ("ppo", "alphazero_go"):
        assert steps == np.cumsum(np.sum(counts, 0)).tolist()
    progress = read_progress(shared.paths["whole"])
    assert progress["step"] == steps[-1] and progress["iteration"] == len(steps)
    resumed = read_progress(shared.paths["resumed"])
    counter = "step" if CASES[script].length == "--total-timesteps" else "iteration"
    assert shared.longer <= resumed[counter] < shared.longer + progress[counter] / progress["iteration"]


@each_script
def test_two_processes_share_the_updates_of_one(script, alone, shared):
    """Equally many gradient steps, on half as many rows each."""
    rows = [kept["whole"]["notes"]["rows"] for kept in shared.ranks]
    assert len(rows[0]) > 8
    if script == "alphazero_go":  # where a minibatch may be smaller while the pool is small
        assert len(rows[0]) == len(rows[1]) == len(alone.notes["rows"])
        assert max(map(max, rows)) == max(alone.notes["rows"]) / 2
    else:
        assert np.sum(rows, 0).tolist() == alone.notes["rows"] and rows[0] == rows[1]


@each_script
def test_processes_see_other_data(script, alone, shared):
    """Their first observations, or what their first update is made of; half as much each."""
    first, second = (kept["whole"]["notes"]["data"][0] for kept in shared.ranks)
    assert not any(torch.equal(x, y) for x in first for y in second)
    if script != "alphazero_go":
        assert len(first) == len(second) == len(alone.notes["data"][0]) / 2


@each_script
def test_statistics_become_the_means_of_those_of_both_processes(script, shared):
    """In each iteration."""
    notes = [kept["whole"]["notes"] for kept in shared.ranks]
    num_iterations = read_progress(shared.paths["whole"])["iteration"]
    assert len(notes[0]["before"]) == len(notes[1]["before"]) >= num_iterations
    differs = 0
    for own, other, *after in zip(
        notes[0]["before"], notes[1]["before"], notes[0]["after"], notes[1]["after"]
    ):
        means = [(x + y) / 2 for x, y in zip(own, other, strict=True)]
        differs += sum(not torch.equal(x, y) for x, y in zip(own, other, strict=True))
        for found in after:
            torch.testing.assert_close(found, means, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(*after, rtol=0, atol=0)
    assert (differs > 0) == (script in ("alphazero_go", "reinforce_tsp_attention"))  # which have batch norms


@pytest.mark.parametrize("script", ["reinforce_tsp_attention"], indirect=True, scope="module")
def test_the_rollout_baseline_is_tested_with_the_statistics_of_both_processes(script, shared):
    notes = [kept["whole"]["notes"] for kept in shared.ranks]
    tested, other = (x["tested"] for x in notes)
    assert len(tested) == read_progress(shared.paths["whole"])["iteration"]
    torch.testing.assert_close(tested, other, rtol=0, atol=0)
    before, after = (notes[0][name] for name in ("before", "after"))
    # The statistics that an iteration tests are means: those of process 0 itself come before them
    for found in tested:
        assert any(all(map(torch.equal, found, x)) for x in after)


@pytest.mark.parametrize("script", ["alphazero_go"], indirect=True, scope="module")
def test_two_processes_share_a_pool_of_the_size_of_one(script, alone, shared):
    sizes = [kept["whole"]["notes"]["pool"][-1] for kept in shared.ranks]
    assert sizes == [128, 128] and alone.notes["pool"][-1] == 256
