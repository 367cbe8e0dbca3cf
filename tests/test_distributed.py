"""Several processes: each script's run by two, compared with one process that has what both have."""

import os
import re
import shutil
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import probe_envs
import pytest
import torch
from helpers import fail_with, read_scalars, start_process, wait_for
from ranks import take_notes
from scripts import (
    CASES,
    call_main,
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

from algos import ppo


@pytest.fixture(scope="module")
def alone(script, tmp_path_factory):
    """A run of one process, and what it shares with none."""
    module, folder = get_module(script), tmp_path_factory.mktemp("alone")
    with take_notes(script, module, 8) as notes:
        path = run_main(module, folder, CASES[script].quick, CASES[script].shared, "--eval-episodes 3").path
    return SimpleNamespace(path=path, notes=notes)


@pytest.fixture(scope="module")
def shared(script, alone, tmp_path_factory):
    """The same run by two processes, then resumed for longer, and an update that they share."""
    case, folder = CASES[script], tmp_path_factory.mktemp("shared")
    flags = f"{case.quick} {case.shared} --eval-episodes 3"
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


@each_script
def test_each_iteration_of_each_process_has_a_seed_of_its_own(script, shared):
    """One that the other process never draws. Process 1 does not evaluate: its last ones are those."""
    for name, path in shared.paths.items():
        first, second = (kept[name]["seeds"] for kept in shared.ranks)
        assert first[0] == second[0]  # of the weights
        num_iterations = read_progress(path)["iteration"]
        if name == "resumed":
            num_iterations -= read_progress(shared.paths["whole"])["iteration"]
        seeds = {*second[-num_iterations:]}
        assert len(seeds) == num_iterations > 2 and not seeds & {*first}


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
    goal = shared.longer + 2 * (script == "ppo_change_detection")  # iterations that train the detector
    assert goal <= resumed[counter] < goal + progress[counter] / progress["iteration"]


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
    assert not torch.equal(first, second)
    if script != "alphazero_go":  # where all games begin alike
        assert not any(torch.equal(x, y) for x in first for y in second)
        assert len(first) == len(second) == len(alone.notes["data"][0]) / 2


def check_means(kept, path):
    """Check that statistics become means in each iteration; return how often the two had other ones."""
    first, second = (x["notes"] for x in kept)
    num_iterations = read_progress(path)["iteration"]
    assert len(first["before"]) == len(second["before"]) >= num_iterations > 4
    num_other = 0
    for i, pair in enumerate(zip(first["before"], second["before"], strict=True)):
        means = [(x + y) / 2 for x, y in zip(*pair, strict=True)]
        num_other += sum(not torch.equal(x, y) for x, y in zip(*pair, strict=True))
        torch.testing.assert_close(first["after"][i], means, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(first["after"][i], second["after"][i], rtol=0, atol=0)
    return num_other


@each_script
def test_statistics_become_the_means_of_those_of_both_processes(script, shared):
    """Those of batch norms; others are sums over processes already, and stay."""
    num_other = check_means([kept["whole"] for kept in shared.ranks], shared.paths["whole"])
    assert (num_other > 0) == (script in ("alphazero_go", "reinforce_tsp_attention"))


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


@pytest.mark.parametrize("script", ["r2d2_lstm"], indirect=True, scope="module")
def test_two_processes_share_the_probabilities_of_random_actions(script, alone, shared):
    """Those of one process are large and small in both."""
    first, second = (kept["whole"]["notes"]["epsilons"][0] for kept in shared.ranks)
    assert torch.equal(torch.stack((first, second), 1).flatten(), alone.notes["epsilons"][0])


def test_other_processes_print_nothing(capsys):
    for rank in (1, 0):
        with mock.patch.multiple(ppo, RANK=rank):
            ppo.print_line(f"a line of process {rank}")
            ppo.print_scores({f"eval/score_{rank}": 2.5})
    assert capsys.readouterr().out == "a line of process 0\neval/score_0: 2.5\n"


def test_batch_norms_that_a_user_adds_give_both_processes_one_policy(tmp_path):
    """In all states, and it is what checkpoint.pt holds."""
    folder = copy_script("ppo", tmp_path / "copy")
    path, line = folder / "ppo.py", "        nn.Linear(num_inputs, 64),\n"
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, f"{line}        nn.BatchNorm1d(64),\n"))
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    flags = f"{CASES['ppo'].quick} --eval-episodes 2 --run-dir {folder / 'runs'}"
    exit_codes = wait_for([start_process(log, "share_copy", i, path, flags) for i, log in enumerate(logs)])
    assert exit_codes == [0, 0], "".join(log.read_text() for log in logs)
    kept, done = [load(folder / f"kept_{rank}.pt") for rank in range(2)], find_run(folder / "runs")
    assert check_means(kept, done) > 0
    agent = load(done / "checkpoint.pt")["agent"]
    assert sum(name.endswith("running_mean") for name in agent) == 2
    for x in kept:
        torch.testing.assert_close(x["agent"], agent, rtol=0, atol=0)
    torch.testing.assert_close(kept[0]["logits"], kept[1]["logits"], rtol=0, atol=0)
    module, states = import_file("edited_copy", path), torch.randn(500, 4, generator=torch.manual_seed(0))
    args = module.Args()
    saved = module.Agent(module.make_envs(args, 1), args.norm_obs).eval()
    saved.load_state_dict(agent)
    torch.testing.assert_close(saved.actor(states).log_softmax(-1), kept[0]["logits"], rtol=1e-5, atol=1e-6)


@each_script
def test_evaluate_under_torchrun_is_that_of_one_process(script, alone, tmp_path):
    """Process 0 prints the scores once, the other process nothing, and both end well."""
    folder = copy_script(script, tmp_path / "copy")
    shutil.copy(probe_envs.__file__, folder)
    path, flags = folder / f"{script}.py", f"--evaluate {alone.path / 'best.pt'} --eval-episodes 4 --no-cuda"
    if "Fixed" in CASES[script].shared:  # where rewards count the environments of a process
        flags += " --env-id probe_envs:Recall-v0"
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    processes = [start_process(log, "run_rank", i, path, *flags.split()) for i, log in enumerate(logs)]
    assert wait_for(processes) == [0, 0], logs[0].read_text()
    expected, _ = call_main(get_module(script), flags)
    assert logs[0].read_text() == expected and read_scores(expected)
    assert logs[1].read_text() == ""
    module = get_module(script)
    with mock.patch.multiple(module, RANK=1, WORLD_SIZE=2, train=lambda *_: pytest.fail("it evaluates, too")):
        assert module.main(flags.split()) is None


def test_a_process_takes_the_gpu_of_its_number_on_the_machine():
    """LOCAL_RANK, where RANK counts the processes of all machines. Its stream is there, too."""
    group, stream, streams = mock.Mock(), mock.Mock(), []
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "Stream": stream,
        "set_stream": streams.append,
    }
    with (
        mock.patch.dict(os.environ, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8"),
        mock.patch.multiple(ppo, RANK=5, WORLD_SIZE=8),
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.distributed, "init_process_group", group),
    ):
        assert ppo.set_up_device(ppo.Args()) == torch.device("cuda", 1)
        assert ppo.set_up_device(ppo.Args(cuda=False)) == torch.device("cpu")
    assert [call.args for call in stream.call_args_list] == [(torch.device("cuda", 1),)]
    assert streams == [stream.return_value]
    assert [call.args for call in group.call_args_list] == [("nccl",), ("gloo",)]
    # The others wait for process 0 while it evaluates
    assert {call.kwargs["timeout"] for call in group.call_args_list} == {timedelta(hours=9)}


def test_a_process_without_a_gpu_of_its_own_is_refused(capsys):
    cuda = {"is_available": lambda: True, "device_count": lambda: 2, "set_stream": None, "Stream": None}
    with (
        mock.patch.dict(os.environ, RANK="2", LOCAL_RANK="2", WORLD_SIZE="3"),
        mock.patch.multiple(ppo, RANK=2, WORLD_SIZE=3),
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.distributed, "init_process_group"),
    ):
        line = fail_with(capsys, ppo.set_up_device, ppo.Args())
    assert line.endswith("more processes than GPUs (2): start fewer, or use --no-cuda")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-minibatches 32", "--num-minibatches (32) must divide the 48 steps of a rollout"),
        ("--num-minibatches 48", "needs minibatches of at least 2 steps, not 48 minibatches of 1"),
    ],
)
def test_minibatches_are_checked_against_the_steps_of_one_process(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(ppo, "train", lambda *_: pytest.fail("it trains"))
    with mock.patch.multiple(ppo, RANK=0, WORLD_SIZE=2):
        assert words in fail_with(capsys, ppo.main, f"--num-envs 6 --num-steps 16 {flags}".split())


def test_a_task_of_a_fixed_size_names_the_total_of_all_processes(capsys):
    args = ppo.Args(env_id="probe_envs:EightLedger-v0")
    with mock.patch.multiple(ppo, RANK=0, WORLD_SIZE=2):
        line = fail_with(capsys, ppo.make_envs, args, 4)
    assert line.endswith("always has 8 environments; use --num-envs 16 and --eval-episodes 8")


@pytest.mark.parametrize("rank", [0, 1])
def test_after_ctrl_c_one_of_two_processes_names_the_command_for_two(rank, tmp_path, capsys):
    """Before and after the run has begun."""
    with mock.patch.multiple(ppo, RANK=rank, WORLD_SIZE=2):
        run = ppo.Run(ppo.Args(run_dir=str(tmp_path)), "task")
        run.say_how_to_resume()
        assert capsys.readouterr().err == "ppo.py: interrupted\n" * (rank == 0)
        run.open("words", 10)
        capsys.readouterr()
        run.say_how_to_resume()
    command = f"torchrun --nproc-per-node 2 {ppo.__file__} --resume {run.path}/checkpoint.pt\n"
    err = capsys.readouterr().err
    assert err.endswith(f"{run.path}: interrupted; to resume: {command}") if rank == 0 else err == ""
