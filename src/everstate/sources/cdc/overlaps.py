"""Rows of one transaction that have one key for a while, as a deferred unique key allows. Pure.

`UPDATE … SET id = id + 1` gives the row of key 1 the key 2 before the row that had it goes on to 3.
So the delete of key 2 comes after the new row of key 2, and it is the delete of the other row.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from everstate.changes.keys import EntityKey
from everstate.sources.cdc.completion import OVERTAKEN, Known, Skipped
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.rows import is_after

_decode: Final = msgspec.json.Decoder(dict[str, Any] | None).decode


class Overlaps:
    """The rows whose key another row got within one transaction, until they are deleted."""

    def __init__(self, *, is_trusted: bool) -> None:
        """``is_trusted``: no row is read twice, so that a created row is always a new one."""
        self._is_trusted = is_trusted
        self._older: dict[EntityKey, tuple[str | int, list[bytes]]] = {}
        """Entity → its transaction, and the states of these rows, oldest first."""

    def forget(self) -> None:
        """Called when a table is truncated: all its rows are deleted, older and newest ones."""
        self._older.clear()

    def has(self, entity: EntityKey) -> bool:
        """Whether a row of this entity may be of another row with its key."""
        return entity in self._older

    def add(self, entity: EntityKey, row: CleanRow, known: Known | None) -> None:
        """Record the state before a row that was created under a key that a row has."""
        name = _transaction(row)
        if row.op != "c" or name is None or known is None or known.is_deleted:
            return
        if not self._is_trusted and is_after(row.position, known.position) is not True:  # type: ignore[arg-type]
            return
        self._older.setdefault(entity, (name, []))[1].append(known.image)

    def resolve(
        self, entity: EntityKey, row: CleanRow, known: Known | None, mapping: TableMapping
    ) -> CleanRow | Skipped:
        """What a row means for the state of its entity, which is that of the newest row.

        A change of an older row is skipped; a delete of the newest row brings back the state of
        the one before it. Which row it is, is known by the row before.
        """
        if entity not in self._older:
            return row
        name, older = self._older[entity]
        if known is None or name != _transaction(row):
            del self._older[entity]
            return row
        image, is_full = _before(row, mapping)
        if image is None:
            return row
        at = older.index(image) if image in older else 0
        if image in older and row.op == "u" and row.state is not None:
            older[at] = row.state
            return Skipped(OVERTAKEN)
        if row.op != "d":
            return row
        is_newest = image == known.image and image not in older
        if not is_newest and image not in older and not is_full:
            del self._older[entity]
            return row
        state = older.pop() if is_newest else older.pop(at)
        if not older:
            del self._older[entity]
        if not is_newest:
            return Skipped(OVERTAKEN)
        return msgspec.structs.replace(row, op="u", state=state, before=None, was=None)


def _before(row: CleanRow, mapping: TableMapping) -> tuple[bytes | None, bool]:
    """State of the row before, and whether the log certainly has all of it.

    Without a full identity PostgreSQL's log has the key of a deleted row, and empty values else:
    its key cannot be deferred then, and no other row can have it.
    """
    if row.before is not None or row.was is None:
        return row.before, row.before is not None
    image = _decode(row.was) or {}
    is_full = any(value and str(value) not in row.key for value in image.values())
    return mapping.whole(image, {}), is_full


def _transaction(row: CleanRow) -> str | int | None:
    """What the rows of a transaction share: its id, or else its time."""
    return row.time_us if row.transaction is None else row.transaction
