"""The recorded state of a project's stack: `stack.json`, and a lock against concurrent starts."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstate.local.files import writing
from everstate.local.processes import ProcessId
from everstate.private import private_folder, write_private


@dataclass(frozen=True, slots=True)
class Remembered:
    """A server that was started in this project before."""

    ports: dict[str, int]
    process: ProcessId | None
    """None: it was stopped on purpose; its ports are kept for the next start."""


_decode = msgspec.json.Decoder(dict[str, dict[str, Remembered]]).decode


class Memory:
    """The file `stack.json` of a data folder; written whole, or not at all."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir
        self._file = data_dir / "stack.json"

    def read(self) -> dict[str, Remembered]:
        """Name of the server → its record; empty when none was ever started."""
        try:
            return _decode(self._file.read_bytes())["servers"]
        except (FileNotFoundError, ValueError, KeyError):
            # Treated as missing: the next start finds stray servers by their marker and ends them.
            return {}

    def write(self, servers: dict[str, Remembered]) -> None:
        """Replace the file; raises LocalStackError when it cannot be written."""
        text = msgspec.json.format(msgspec.json.encode({"servers": servers}), indent=1).decode()
        with writing(self._file):
            private_folder(self._folder)
            write_private(self._file, text + "\n")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the stack against other processes that start or stop it; waits for the lock."""
        place = self._folder / "stack.lock"
        with ExitStack() as opened:
            with writing(place):
                private_folder(self._folder)
                file = opened.enter_context(open(place, "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
