"""Processes that outlive this one: identified by pid and start, started detached."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from everstate.process_mark import start_mark

_START_TOLERANCE_S = 1.5
_POLL_S = 0.05
_LOG_BYTES_MAX = 20_000_000
_PORTS = range(20_000, 32_000)
"""Below the range of ephemeral ports that systems use for outgoing connections."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Child processes of this one, kept so that an ended one can be reaped."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Unambiguous identity of a process: a pid may have been reused for another one since."""

    pid: int
    started: float
    """Seconds since the epoch."""
    mark: str | None = None
    """:func:`start_mark`; ``None`` in a record of an earlier release, or without /proc."""

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        """The identity of a process that runs; raises psutil.Error when it does not."""
        return cls(process.pid, process.create_time(), start_mark(process.pid))

    def is_of(self, process: psutil.Process) -> bool:
        """Whether the process with this pid is still the one that had it."""
        if self.mark is not None:
            return self.mark == start_mark(process.pid)
        return bool(abs(process.create_time() - self.started) < _START_TOLERANCE_S)


def spawn(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> ProcessId:
    """Start ``argv`` in a session of its own, its output appended to ``log``.

    It does not end with this process or its terminal. A log over 20 MB is renamed first.
    """
    if log.exists() and log.stat().st_size > _LOG_BYTES_MAX:
        os.replace(log, log.with_name(log.name + ".1"))
    with open(log, "ab") as output:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[child.pid] = child
    try:
        return ProcessId.of(psutil.Process(child.pid))
    except psutil.NoSuchProcess:
        return ProcessId(child.pid, time.time())


def is_alive(process: ProcessId) -> bool:
    """True while exactly that process runs (a zombie does not).

    A killed process whose first thread is a zombie while other threads still exit counts as
    running, because it still holds its ports.
    """
    child = _children.get(process.pid)
    if child is not None and child.poll() is not None:
        del _children[process.pid]
        return False
    try:
        found = psutil.Process(process.pid)
        gone = found.status() == psutil.STATUS_ZOMBIE and found.num_threads() <= 1
        return process.is_of(found) and not gone
    except psutil.NoSuchProcess:
        return False


def send(process: ProcessId, signal_number: signal.Signals) -> None:
    """Send a signal to exactly that process, or to none."""
    if is_alive(process):
        try:
            os.kill(process.pid, signal_number)
        except ProcessLookupError:
            return


def end(process: ProcessId, how: signal.Signals, *, patience_s: float) -> bool:
    """End a process and wait until it is gone: ``how`` first, SIGKILL after ``patience_s``.

    True when it ended without SIGKILL.
    """
    send(process, how)
    if wait_gone(process, patience_s):
        return True
    send(process, signal.SIGKILL)
    wait_gone(process, patience_s)
    return False


def wait_gone(process: ProcessId, patience_s: float) -> bool:
    """Wait until the process is gone; False when it still runs after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def strays(marker: str, program: str, folder: Path) -> list[ProcessId]:
    """Servers with ``marker`` (a path) as an argument, which a killed run did not record.

    Only processes whose command is ``program`` and that work in ``folder``: a user's own program
    (``du``, ``tar``, a tool of Kafka) may have the path as an argument, too.
    """
    found = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
            is_server = marker in arguments and Path(arguments[0]).name == program
            if not is_server or works_elsewhere(process, folder, marker):
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(ProcessId.of(process))
        except psutil.Error:
            continue
    return found


def works_elsewhere(process: psutil.Process, folder: Path, marker: str) -> bool:
    """Whether the working directory of a process is outside of ``folder``.

    It follows a folder that is moved, and not one that is copied. A process of another user (in a
    container, PostgreSQL runs as ``nobody``) does not show it: then the path among the arguments
    decides. False for a process that is ending.
    """
    try:
        place = process.cwd()
    except psutil.AccessDenied:
        return marker not in process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return bool(place) and not Path(place).is_relative_to(folder.resolve())


def in_folder(folder: Path) -> list[int]:
    """Numbers of the processes that have ``folder`` as their working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder.resolve()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def resident_bytes(process: ProcessId) -> int | None:
    """Memory of the process and its children in bytes; None when it is gone."""
    try:
        found = psutil.Process(process.pid)
        total: int = found.memory_info().rss
        for child in found.children(recursive=True):
            total += child.memory_info().rss
    except psutil.Error:
        return None
    return total


def is_free(port: int) -> bool:
    """True when a server could listen on ``port`` of 127.0.0.1 now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port(taken: set[int]) -> int:
    """A free port that is not in ``taken``; adds it to ``taken``.

    It is chosen at random, so that two projects that start together rarely collide.
    """
    while True:
        port = secrets.choice(_PORTS)
        if port not in taken and is_free(port):
            taken.add(port)
            return port
