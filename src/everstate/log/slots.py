"""Numbers the processes of a role on one machine: each holds a slot with a folder of its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from pathlib import Path
from typing import Final

from everstate.closing import Closing
from everstate.errors import LocalStackError
from everstate.private import private_folder

_SLOTS_MAX: Final = 256


class Slot(Closing):
    """A folder that one process holds; the next process takes the first that is free.

    A process that is killed and restarted gets its former folder and the same client name, so that
    it takes over from its former instance at once.
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
        raise LocalStackError(
            f"{folder}: {_SLOTS_MAX} processes use this folder already, which is the most allowed."
        )

    def close(self) -> None:
        """Release the slot."""
        os.close(self._file)
