"""What a project remembers of its stack: `stack.json`, and a lock against two starters."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everstate.local.processes import ProcessId


@dataclass(frozen=True, slots=True)
class Remembered:
    """A server that was started here at some time."""

    ports: dict[str, int]
    process: ProcessId | None
    """None: it was stopped on purpose; its ports are kept for the next start."""


class Memory:
    """The file `stack.json` of a data folder; written whole, or not at all."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir
        self._file = data_dir / "stack.json"

    def read(self) -> dict[str, Remembered]:
        """Name of the server → what is known; empty when nothing was ever started."""
        try:
            stored = json.loads(self._file.read_text("utf-8"))
            return {name: _remembered(entry) for name, entry in stored["servers"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # As good as none: strays are found by their marker and ended at the next start.
            return {}

    def write(self, servers: dict[str, Remembered]) -> None:
        """Replace the file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"servers": {name: asdict(server) for name, server in servers.items()}}, indent=1
        )
        part = self._file.with_name(f"stack.json.{os.getpid()}.part")
        part.write_text(text + "\n", "utf-8")
        os.replace(part, self._file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the stack against other processes that start or stop it; waits for its turn."""
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            # Data of the entities and the database's password: nobody else's business.
            self._folder.chmod(0o700)
        with open(self._folder / "stack.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _remembered(entry: dict[str, Any]) -> Remembered:
    process = entry["process"]
    return Remembered(
        ports=dict(entry["ports"]), process=None if process is None else ProcessId(**process)
    )
