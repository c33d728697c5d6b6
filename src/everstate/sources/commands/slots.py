"""Which handler of this machine this process is: a numbered place with a folder of its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from pathlib import Path
from typing import Final

from everstate.errors import LocalStackError
from everstate.private import private_folder

_SLOTS_MAX: Final = 256


class Slot:
    """A folder that one process holds; the next process takes the first that is free.

    A process that is killed and started again finds its former folder, and is known to the log
    by the same name, so that it takes over from itself at once.
    """

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        for number in range(_SLOTS_MAX):
            file = os.open(folder / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                continue
            self._file = file
            self.path = folder / str(number)
            where = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
            self.name = f"{platform.node() or 'host'}-{where}-{number}"
            return
        raise LocalStackError(f"{folder}: all {_SLOTS_MAX} places are taken.")

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the place up."""
        os.close(self._file)
