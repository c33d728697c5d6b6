"""Processes that tests start: what they use, which servers they are, and what is left of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import psutil
import pytest

KEPT_FOLDERS: Final = pytest.StashKey[list[str]]()
"""Folders whose servers belong to the run: they are never ended as leftovers of one test."""
_LOOK_EVERY_S: Final = 2.0
_YOUNG_S: Final = 20.0
_SUBREAPER: Final = 36
_JVMS: Final = (
    ("kafka.Kafka", "kafka"),
    ("org.apache.kafka.connect.cli.ConnectDistributed", "connect"),
    ("org.apache.cassandra.service.CassandraDaemon", "cassandra"),
    ("org.apache.spark.deploy.SparkSubmit", "spark"),
    ("OpenSearchServer.java", "opensearch"),
)
SERVERS: Final = {"mariadbd", "mysqld", "redis-server", "versitygw"}
"""Programs that are a server whatever their arguments are."""
_LAUNCHER: Final = "org.apache.spark.launcher.Main"
"""Builds the command line of Spark's JVM, and is gone in a moment, as is who asks for a version."""
_NOT_OURS_TO_END: Final = "multiprocessing.resource_tracker"


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they stay in our sums.

    A Linux feature; elsewhere what such processes used is not counted.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def used_cpu_s() -> float:
    """Processor seconds of this process and of all that it started, ended ones included."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return total


class Watch:
    """Looks every two seconds which servers and JVMs have been started below this process."""

    def __init__(self) -> None:
        self._known: set[psutil.Process] = set()
        """Those that need no second look: counted, or too old to become a server."""
        self._new: Counter[str] = Counter()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.kept: set[psutil.Process] = set()
        """Processes of fixtures that live as long as the run."""
        threading.Thread(target=self._run, name="watch-processes", daemon=True).start()

    def started(self) -> dict[str, int]:
        """Kind → how many were started since the last time."""
        with self._lock:
            found, self._new = dict(self._new), Counter()
        return found

    def keep_all(self) -> None:
        """What runs now belongs to the whole run."""
        self.kept.update(psutil.Process().children(recursive=True))
        self._look()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        running = set(psutil.Process().children(recursive=True))
        with self._lock:
            self._known &= running
            for process in running - self._known:
                # A script becomes its server only after a moment.
                kind, age_s = kind_of(process), time.time() - process.create_time()
                if kind is not None:
                    self._new[kind] += 1
                if kind is not None or age_s > _YOUNG_S:
                    self._known.add(process)


def kind_of(process: psutil.Process) -> str | None:
    """Which server or JVM it is; ``None`` for everything else."""
    try:
        name = process.name()
        if name == "java":
            words = process.cmdline()
            if _LAUNCHER in words or "-version" in words:
                return None
            return next((kind for main, kind in _JVMS if main in words), "other JVM")
        if name in SERVERS:
            return name
        # A session of PostgreSQL has its server's title at first, and initdb's helpers have other
        # options.
        if name == "postgres" and process.cmdline()[1:2] == ["-D"]:
            parent = process.parent()
            return None if parent is not None and parent.name() == "postgres" else name
    except psutil.Error:
        return None
    return None


def named(processes: Iterable[psutil.Process], name: str) -> list[psutil.Process]:
    """Those that run a program of this name; a process that has ended meanwhile runs none."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.name() == name:
                found.append(process)
    return found


def end_leftovers(kept: set[psutil.Process], folders: list[str]) -> list[str]:
    """SIGKILL what tests left running; returns the command lines.

    Kept are the processes of the run's own fixtures with all that is below them, servers with one
    of ``folders`` in their command line (a test may have started one of the run's servers again),
    and the JVM of this process' own Spark session.
    """
    ended = []
    for child in psutil.Process().children():
        try:
            words = child.cmdline()
            ours = child in kept or any(f in word for f in folders for word in words)
            own_spark = any("SparkSubmit" in word for word in words)
            if not words or ours or own_spark or _NOT_OURS_TO_END in " ".join(words):
                continue
            for process in [child, *child.children(recursive=True)]:
                process.send_signal(signal.SIGKILL)
            ended.append(" ".join(words)[:200])
        except psutil.Error:
            continue
    return ended


def kill_for_good(pid: int) -> None:
    """SIGKILL a process, and let nothing of it stay, not even a zombie with its number.

    A run is the parent of what lost its own (:func:`adopt_orphans`), so it has to do what init
    does: PostgreSQL does not start while the number in its lock file belongs to anything.
    """
    victim = psutil.Process(pid)
    victim.kill()
    victim.wait()
