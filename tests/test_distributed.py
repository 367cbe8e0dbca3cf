"""Several processes: each script's run, with what each rank holds, and its update, shared by two."""

import torch
from helpers import start_process, wait_for
from scripts import CASES, check_no_step_is_logged_twice, each_script, load


@each_script
def test_two_processes_train_as_one(script, tmp_path):
    """Both hold equal weights and statistics and other random numbers, also in a resumed run.

    An update that two processes share is that of one on all rows. If a script allows it, their parts differ
    in size.
    """
    case = CASES[script]
    flags = f"{case.quick} {case.length} {case.more} {case.statistics} --eval-episodes 0"
    words, logs = (script, tmp_path, flags, f"{case.length} {2 * case.more}"), [tmp_path / x for x in "01"]
    exit_codes = wait_for([start_process(log, "share", log.name, *words) for log in logs])
    output = "".join(log.read_text() for log in logs)
    assert exit_codes == [0, 0], output
    assert output.count("not evaluated") == 2  # one process talks, in both runs
    ranks, iterations = [load(tmp_path / f"kept_{rank}.pt") for rank in range(2)], []
    for name in ("whole", "resumed"):
        first, second = (kept[name] for kept in ranks)
        (path,) = tmp_path.glob(f"{name}/**/checkpoint.pt")
        for other in (second, load(path)):
            torch.testing.assert_close(first["agent"], other["agent"], rtol=0, atol=0)
        assert not torch.equal(first["rng"], second["rng"])
        iterations.append(load(path)["progress"]["iteration"])
    assert iterations[0] < iterations[1]
    check_no_step_is_logged_twice(tmp_path / "resumed")
    update, other = (kept["update"] for kept in ranks)
    torch.testing.assert_close(update[1], other[1], rtol=0, atol=0)
    for kind in ("gradients", "weights", "numbers"):
        alone, together = (found[kind] for found in update)
        assert any(x.abs().max() > 0 for x in alone)
        for i, (x, y) in enumerate(zip(alone, together, strict=True)):
            atol = 1e-6 * max(1.0, x.abs().max().item())
            torch.testing.assert_close(y, x, rtol=1e-4, atol=atol, msg=f"{kind} {i}: {x} {y}")
