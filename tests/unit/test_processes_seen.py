"""A run is the parent of what lost its own parent."""

from __future__ import annotations

import subprocess
import sys

import psutil

from processes_seen import kill_for_good

_LEAVES_ONE = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL, start_new_session=True)
print(left.pid, flush=True)
sys.stdin.read()
"""


def test_of_an_orphan_that_is_killed_not_even_its_number_stays() -> None:
    """As `everstate up` leaves a server; a zombie's number would keep its lock file valid."""
    with subprocess.Popen(
        (sys.executable, "-c", _LEAVES_ONE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        left = int(parent.stdout.readline())
        # The orphan waits for a pipe whose other end nobody holds after its parent.
        psutil.Process(left).suspend()
        parent.kill()
    kill_for_good(left)
    assert not psutil.pid_exists(left)
