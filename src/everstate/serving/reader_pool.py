"""A pool of readers for the requests of one process; each reader has a connection of its own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from everstate.config import Config
from everstate.serving.masking import Masks
from everstate.serving.reader import Reader
from everstate.views.project import Project


class ReaderPool:
    """Lends each question a reader of its own, and keeps it for the next one. Threads share it."""

    def __init__(self, config: Config, project: Project) -> None:
        self.config, self.project = config, project
        self._idle: queue.LifoQueue[Reader] = queue.LifoQueue()

    @contextmanager
    def lent(self, masks: Masks) -> Iterator[Reader]:
        """A reader for the block; it must not be used after it.

        ``masks``: of the caller for whom it reads; :func:`~everstate.serving.masking.no_masks` for
        the server itself.
        """
        try:
            reader = self._idle.get_nowait()
        except queue.Empty:
            reader = Reader(self.config, self.project)
        reader.masks = masks
        try:
            yield reader
        finally:
            self._idle.put(reader)

    def close(self) -> None:
        """Close the connections; no reader may be lent."""
        while not self._idle.empty():
            self._idle.get_nowait().close()
