"""Processor seconds by where they are spent: Spark's JVM, its Python workers, servers, driver."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import psutil

_LOOK_S = 0.25
PARTS = ("jvm", "workers", "postgres", "kafka", "driver")


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor seconds by part, and the workers' memory at the moment of asking."""

    seconds: Mapping[str, float]
    workers_mib: float = 0.0

    @property
    def total(self) -> float:
        """Over all parts."""
        return sum(self.seconds.values())

    def since(self, before: Spent) -> Spent:
        """What was spent after another moment."""
        gained = {name: self.seconds[name] - before.seconds[name] for name in self.seconds}
        return Spent(gained, self.workers_mib)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{self.total:.1f} s of processors: {parts}; workers {self.workers_mib:,.0f} MiB"


@dataclass
class Highest:
    """The most memory that the Python workers had while a block ran; looks each quarter second."""

    servers: Mapping[str, int]
    workers_mib: float = 0.0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.workers_mib = max(self.workers_mib, spent(self.servers).workers_mib)


def spent(servers: Mapping[str, int]) -> Spent:
    """What this process, its Spark and some servers have spent until now.

    ``servers``: process of each server by name. A worker that ended is counted by its parent.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    resident = 0
    me = psutil.Process(os.getpid())
    seconds["driver"] = _own(me)
    for child in me.children(recursive=True):
        try:
            if child.pid in servers.values():
                continue  # started by this process, and counted below
            if child.name() == "java":
                seconds["jvm"] += _own(child)
            elif "pyspark" in " ".join(child.cmdline()):
                seconds["workers"] += _own(child) + _of_ended(child)
                resident += child.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    for name, pid in servers.items():
        server = psutil.Process(pid)
        seconds[name] = _own(server) + _of_ended(server)
        for child in server.children(recursive=True):
            try:
                seconds[name] += _own(child)
            except psutil.NoSuchProcess:
                continue
    return Spent(seconds, resident / 2**20)


def _own(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _of_ended(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.children_user + times.children_system)
