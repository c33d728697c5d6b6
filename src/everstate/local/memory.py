"""The recorded state of a project's stack: `stack.json`, and a lock against concurrent starts."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstate.local.processes import ProcessId
from everstate.private import private_folder, write_private


@dataclass(frozen=True, slots=True)
class Remembered:
    """A server that was started in this project before."""

    ports: dict[str, int]
    process: ProcessId | None
    """None: it was stopped on purpose; its ports are kept for the next start."""


class Memory:
    """The file `stack.json` of a data folder; written whole, or not at all."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir
        self._file = data_dir / "stack.json"

    def read(self) -> dict[str, Remembered]:
        """Name of the server → its record; empty when none was ever started."""
        try:
            stored = json.loads(self._file.read_text("utf-8"))
            return {name: _remembered(entry) for name, entry in stored["servers"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # Treated as missing: the next start finds stray servers by their marker and ends them.
            return {}

    def write(self, servers: dict[str, Remembered]) -> None:
        """Replace the file."""
        private_folder(self._folder)
        text = json.dumps(
            {"servers": {name: asdict(server) for name, server in servers.items()}}, indent=1
        )
        write_private(self._file, text + "\n")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the stack against other processes that start or stop it; waits for the lock."""
        private_folder(self._folder)
        with open(self._folder / "stack.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _remembered(entry: dict[str, Any]) -> Remembered:
    process = entry["process"]
    return Remembered(
        ports=dict(entry["ports"]), process=None if process is None else ProcessId(**process)
    )
