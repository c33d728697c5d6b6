"""Allows one `everstate run` per project: a second one is refused at its start."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from everstate.config import Config
from everstate.errors import Fenced
from everstate.parts import states_folder
from everstate.private import private_folder


@contextmanager
def claimed(config: Config) -> Iterator[None]:
    """Hold the project's supervisor lock during the block; raises Fenced when it is taken.

    The operating system releases the lock when the process ends, however it ends.
    """
    folder = states_folder(config.project.data_dir)
    private_folder(folder)
    with open(folder / "run.lock", "a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            file.seek(0)
            pid = file.read().strip()
            raise Fenced(
                f"`everstate run` runs already in {config.folder} (process {pid}).",
                advice=f"`everstate status` shows it; stop it with Ctrl-C in its terminal, or "
                f"`kill {pid}`.",
            ) from cause
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
