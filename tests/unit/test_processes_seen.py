"""A run is the parent of what lost its own parent, and counts the servers that tests start."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import psutil

from processes_seen import kill_for_good, kind_of

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


class Running:
    """A process as the system lists it."""

    def __init__(self, *words: str, below: Running | None = None) -> None:
        self._words, self._below = list(words), below

    def name(self) -> str:
        return self._words[0]

    def cmdline(self) -> list[str]:
        return self._words

    def parent(self) -> Running | None:
        return self._below


def test_a_session_of_postgresql_is_no_server_before_it_has_a_title() -> None:
    """The server forks, so for a moment its session has the server's own words."""
    server = Running("postgres", "-D", "data", below=Running("python"))
    for process, kind in (
        (server, "postgres"),
        (Running("postgres", "-D", "data", below=server), None),
    ):
        assert kind_of(cast(psutil.Process, process)) == kind
