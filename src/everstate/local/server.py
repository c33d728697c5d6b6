"""The interface of a server of the stack: prepare, launch, probe and end it."""

from __future__ import annotations

import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstate.config import Config
from everstate.local.artifacts import Artifact
from everstate.local.progress import StackProgress

Ports = Mapping[str, int]
"""Name of the port → number."""
LOG4J = """\
status = WARN
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %-5p %c{1}: %m%n
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
"""
"""What a server in Java logs: warnings, to its output."""
_PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to start, with its whole environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path


class Server(ABC):
    """One server; its data, configuration and marker are in its own folder."""

    name: str
    port_names: tuple[str, ...] = ("client",)
    stop_signal = signal.SIGTERM
    artifacts: tuple[Artifact, ...] = ()
    program: str
    """Name of the program that its process runs."""
    marker: str
    """An argument of its process that has the path of its folder."""

    def __init__(self, config: Config) -> None:
        self._config, self._folder = config, config.project.data_dir / self.name

    def obtain(self, progress: StackProgress) -> None:
        """Get what it needs beside its artifacts; may take minutes, and says so."""
        return

    @abstractmethod
    def prepare(self, ports: Ports) -> Launch:
        """Write its configuration; create its data at the first start. May take seconds."""

    @abstractmethod
    def probe(self, ports: Ports) -> None:
        """Send a request in its own protocol; raises OSError while it does not answer."""

    def settle(self, ports: Ports) -> None:
        """Finish the setup once it answers, if there is anything to do; idempotent."""
        return

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its address; unchanged for one that no setting names."""
        return config

    def _dial(self, ports: Ports) -> socket.socket:
        """A connection to it; raises OSError."""
        return socket.create_connection(("127.0.0.1", ports["client"]), timeout=_PROBE_S)
