"""What a server of the stack is: how it is made ready, launched, asked and ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everstate.local.artifacts import Artifact

Ports = Mapping[str, int]
"""Name of the port → number."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to start, with the whole environment it gets."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path


class Server(Protocol):
    """One server; its data, configuration and marker lie in its own folder."""

    name: str
    port_names: tuple[str, ...]
    stop_signal: signal.Signals
    artifacts: tuple[Artifact, ...]
    marker: str
    """An argument of its process that no other process has."""

    def prepare(self, ports: Ports) -> Launch:
        """Write its configuration, make its data when new. May take seconds."""

    def probe(self, ports: Ports) -> None:
        """Ask it by its own protocol; raises OSError while it does not answer."""

    def settle(self, ports: Ports) -> None:
        """Do what is needed once it answers; idempotent."""
