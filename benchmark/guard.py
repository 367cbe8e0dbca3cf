"""Run one command and make sure that nothing of it keeps running; benchmark/run.py starts a guard for each
cell.

    python guard.py SECONDS REPORT COMMAND...   # REPORT: {"exit_code": ..., "cpu_seconds": ...}

The command ends when its time is up, and when the guard's stdin closes: the harness holds the other end, so
that this happens however the harness dies. Then too, the guard writes REPORT. On Linux, processes whose
parent has ended become children of the guard (prctl calls it a child subreaper), whatever session they are
in. The guard kills and reaps its children until it has none. Elsewhere it kills the process group of the
command, which misses processes that have left the group.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
IS_LINUX = sys.platform == "linux"


def end_all(leader: int):
    """Kill and reap what is left of the command that began with the process `leader`."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):  # there are none left
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # A negative number means a process group
                for pid in children.read_text().split() if IS_LINUX else [-leader]:
                    os.kill(int(pid), signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.01)


def main():
    """Run the command, and write how it ended."""
    if os.fork():
        os._exit(0)  # the guard is nobody's child: Ray kills the children of a worker that has died
    if IS_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline = time.monotonic() + float(sys.argv[1])
    process = subprocess.Popen(
        sys.argv[3:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    while process.poll() is None and time.monotonic() < deadline and not select.select([0], [], [], 0.1)[0]:
        pass
    exit_code = process.poll()  # None if its time was up
    end_all(process.pid)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {"cpu_seconds": used.ru_utime + used.ru_stime, "exit_code": exit_code}
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
