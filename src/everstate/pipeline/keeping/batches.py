"""How many changes the keeper's next batch reads: more, while there is a backlog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST: Final = 2_000
"""Changes of a first batch: the memory that each takes is not known yet, and may be megabytes."""
LEAST: Final = 50_000
"""Changes of every later batch, unless their memory allows fewer."""
CAREFUL: Final = 200_000
"""Most changes of a batch that is judged record by record: it holds several copies of each."""
BYTES: Final = 2**30
"""Most memory that the changes of one batch take, in bytes, over all partitions."""
_GROWTH: Final = 8
_SECONDS: Final = 10.0
"""Longest planned time of a batch: its changes become visible only when it ends."""


@dataclass(slots=True)
class _Seen:
    changes: int = FIRST
    bytes_each: float = 0.0


class BatchSizes:
    """Sizes of the next batches, by entity type.

    Large batches cost less per change: one row is written for each key in them. The size grows
    after each full batch, as long as the next one is expected to end within ten seconds and, at
    the memory per change of the last one, to stay below `BYTES`.
    """

    def __init__(self, changes_max: int) -> None:
        self._changes_max = changes_max
        self._seen: dict[str, _Seen] = {}

    def next(self, entity: str, *, careful: bool) -> int:
        """Most changes of an entity type's next batch."""
        seen = self._seen.get(entity, _Seen())
        size = min(seen.changes, self._changes_max)
        if seen.bytes_each:
            size = min(size, int(BYTES / seen.bytes_each))
        return max(1, min(size, CAREFUL) if careful else size)

    def took(self, entity: str, changes: int, held_bytes: int, seconds: float) -> None:
        """Record the size of a batch; ``held_bytes``: the memory that its changes took."""
        seen = self._seen.setdefault(entity, _Seen())
        if not changes:
            return
        if held_bytes:
            seen.bytes_each = held_bytes / changes
        within = int(changes / max(seconds, 0.001) * _SECONDS)
        if changes >= seen.changes:
            seen.changes = min(_GROWTH * seen.changes, self._changes_max)
        seen.changes = max(LEAST, min(seen.changes, within))

    def failed(self, entity: str) -> None:
        """Start small again: the size of the batch may have been the cause of the failure."""
        self._seen.pop(entity, None)
