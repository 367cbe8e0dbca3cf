"""Hooks and fixtures of all tests."""

import signal

import pytest
import torch
from helpers import SCRIPTS

# A shell starts `pytest &` with Ctrl-C ignored, and the programs that tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_cmdline_main(config):
    """With `-n 2`, tests go to processes by their groups; --pdb needs one process."""
    if config.option.numprocesses and config.option.dist == "no":
        config.option.dist = "loadgroup"


def pytest_collection_modifyitems(items):
    """One process runs all tests of a file, or those of it about one script, as they share what is made.

    Files that name the simulated GPU get its mark: .ci/run runs them on a second build of torch too.
    """
    for item in items:
        if "pretend_cuda" in item.path.read_text():
            item.add_marker(pytest.mark.simulated_gpu)
        params = item.callspec.params if hasattr(item, "callspec") else {}
        name = params.get("script") or params.get("name")
        word = f"{name} ".split(" ")[0]  # "ppo" of the run "ppo cartpole"
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{word if word in SCRIPTS else ''}"))


@pytest.fixture(autouse=True)
def restore_precision():
    """What the `main` of one script sets does not reach the tests of another."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def script(request):
    """The script that a test is about, of those that its mark names."""
    return request.param
