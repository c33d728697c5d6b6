"""Lets the keeper and the trailer of one process take turns, so that a view meets a busy core (V7).

Both run Spark jobs at the same time. A view that is nearly there reaches the position at which its
core was when the view's job was planned. On a busy machine the core's job ends first, again and
again: without turns the view stays one batch behind for as long as changes come in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

STEP_S_MAX: Final = 30.0
"""How long a view waits for the keeper's running step before it goes on without a turn."""
CORES_TURN_S_MAX: Final = 2.0
"""How long a view waits for a core that waited for the last view; the keeper may be away."""


class Turns:
    """The turns of one keeper and one trailer, each in a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._judged = frozenset[str]()
        """Entity types of the keeper's running step."""
        self._met: str | None = None
        """The entity type whose core waits for a view."""
        self._owed: str | None = None
        """The entity type whose core has waited for a view, and has not had its step since."""

    @contextmanager
    def judging(self, entities: Iterable[str]) -> Iterator[frozenset[str]]:
        """Let the keeper step; gives the entity types whose cores need not wait. Never waits."""
        with self._changed:
            free = frozenset(entities) - {self._met}
            if self._met is not None:
                self._owed = self._met
            elif self._owed in free:
                self._owed = None
            self._judged = free
            self._changed.notify_all()
        try:
            yield free
        finally:
            with self._changed:
                self._judged = frozenset()
                self._changed.notify_all()

    @contextmanager
    def meeting(self, entity: str) -> Iterator[None]:
        """Let a core wait during the block, while a view takes its last step to it.

        A core that waited has its own step before it waits again. A step that does not end in
        `STEP_S_MAX` may go on during the block: the view then reaches the core by chance, or later.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._owed != entity, CORES_TURN_S_MAX)
            self._owed, self._met = None, entity
            if not self._changed.wait_for(lambda: entity not in self._judged, STEP_S_MAX):
                self._met = None
        try:
            yield
        finally:
            with self._changed:
                self._met = None
                self._changed.notify_all()
