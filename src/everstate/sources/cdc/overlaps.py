"""Rows of one transaction that have one key for a while, as a deferred unique key allows. Pure.

`UPDATE … SET id = id + 1` gives the row of key 1 the key 2 before the row that had it goes on to 3.
So the delete of key 2 comes after the new row of key 2, and it is the delete of the other row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from everstate.changes.keys import EntityKey
from everstate.sources.cdc.columns import ENDED, OTHER, Rows
from everstate.sources.cdc.completion import OVERTAKEN, Known, Skipped
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.rows import exact_number, is_after
from everstate.sources.cdc.stream import SEEN

_decode: Final = msgspec.json.Decoder(dict[str, Any] | None, float_hook=exact_number).decode


class Older(msgspec.Struct, rename="camel"):
    """A row whose key a newer row of the same transaction has.

    Each is a record of the held topic: those of one key together may be larger than a record.
    """

    entity: str
    key: str
    index: int
    """Its place among the older rows of its key, the oldest first."""
    transaction: str | int
    time_us: int | None
    part: tuple[str, int]
    """Topic and partition of the raw log that has its rows."""
    state: msgspec.Raw

    def is_before(self, transaction: str | int | None, time_us: int | None) -> bool:
        """Whether a row is of a later transaction, so that this one has ended.

        A connector that restarts writes rows of earlier transactions once more.
        """
        is_later = time_us is None or self.time_us is None or time_us > self.time_us
        return transaction != self.transaction and is_later


_encode_older: Final = msgspec.json.Encoder().encode
_decode_older: Final = msgspec.json.Decoder(Older).decode


class Overlaps:
    """The rows whose key another row got within one transaction, until they are deleted.

    A transaction may be cleaned in several batches. What is known after one of them is committed
    with it (:meth:`records`), so that a new process continues with it.
    """

    def __init__(self, stored: Iterable[bytes] = (), *, is_trusted: bool) -> None:
        """``stored``: the values of the records.

        ``is_trusted``: no row is read twice, so that a created row is always a new one.
        """
        self._is_trusted = is_trusted
        self._older: dict[EntityKey, list[Older]] = {}
        for one in sorted(map(_decode_older, stored), key=lambda one: one.index):
            self._older.setdefault((one.entity, one.key), []).append(one)
        self._changed: set[EntityKey] = set()
        self._stored = {entity: len(older) for entity, older in self._older.items()}
        """How many records there are of each entity."""

    def records(self) -> dict[bytes, bytes | None]:
        """Key and value of each record that changed since the last call; ``None``: it is gone."""
        found: dict[bytes, bytes | None] = {}
        for entity in sorted(self._changed):
            older = self._older.get(entity, [])
            for index, one in enumerate(older):
                one.index = index
                found[_record_key(entity, index)] = _encode_older(one)
            for index in range(len(older), self._stored.pop(entity, 0)):
                found[_record_key(entity, index)] = None
            if older:
                self._stored[entity] = len(older)
        self._changed.clear()
        return found

    def forget(self, entity_type: str) -> None:
        """Called when a table is truncated: all its rows are deleted, older and newest ones."""
        for entity in [entity for entity in self._older if entity[0] == entity_type]:
            self._drop(entity)

    def close(self, rows: Rows, parts: Sequence[tuple[str, int]]) -> None:
        """Forget the rows of each transaction that ended in these rows of the log.

        It did if its END record is there, or if the last row there is of a later transaction.
        ``parts``: topic and partition of each number in ``rows.part``.
        """
        if not self._older:
            return
        ended = {tx for what, tx in zip(rows.what, rows.tx, strict=True) if what == ENDED}
        last: dict[tuple[str, int], tuple[str | int, int | None]] = {}
        columns = zip(
            *(rows.what, rows.op, rows.part, rows.tx, rows.time_us, rows.block), strict=True
        )
        for what, op, part, tx, time_us, block in columns:
            name = time_us if tx is None else tx
            # Rows that a snapshot reads may be within a transaction of others.
            if what <= OTHER and op != "r" and block is not SEEN and name is not None:
                last[parts[part]] = name, time_us
        for entity, (one, *_) in list(self._older.items()):
            row = last.get(one.part, (one.transaction, None))
            if one.transaction in ended or one.is_before(*row):
                self._drop(entity)

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
        assert row.at is not None
        older = [one for one in self._older.get(entity, []) if one.transaction == name]
        state, part = msgspec.Raw(known.image), row.at[:2]
        older.append(Older(*entity, len(older), name, row.time_us, part, state))
        self._older[entity] = older
        self._changed.add(entity)

    def resolve(
        self, entity: EntityKey, row: CleanRow, known: Known | None, mapping: TableMapping
    ) -> CleanRow | Skipped:
        """What a row means for the state of its entity, which is that of the newest row.

        A change of an older row is skipped; a delete of the newest row brings back the state of
        the one before it. Which row it is, is known by the row before.
        """
        if row.skipped:
            return Skipped(row.skipped)
        if entity not in self._older:
            return row
        name, older = _transaction(row), self._older[entity]
        if known is None or name != older[0].transaction:
            if known is None or older[0].is_before(name, row.time_us):
                self._drop(entity)
            return row
        image, is_full = _before(row, mapping)
        if image is None:
            return row
        states = [bytes(each.state) for each in older]
        at = states.index(image) if image in states else 0
        if image in states and row.op == "u" and row.state is not None:
            older[at].state = msgspec.Raw(row.state)
            self._changed.add(entity)
            return Skipped(OVERTAKEN)
        if row.op != "d":
            return row
        is_newest = image == known.image and image not in states
        if not is_newest and image not in states and not is_full:
            self._drop(entity)
            return row
        state = bytes((older.pop() if is_newest else older.pop(at)).state)
        self._changed.add(entity)
        if not older:
            self._drop(entity)
        if not is_newest:
            return Skipped(OVERTAKEN)
        return msgspec.structs.replace(row, op="u", state=state, before=None, was=None)

    def _drop(self, entity: EntityKey) -> None:
        del self._older[entity]
        self._changed.add(entity)


def _record_key(entity: EntityKey, index: int) -> bytes:
    """Key in the held topic: no key of a held entity begins with a line feed."""
    return f"\n{entity[0]}\n{entity[1]}\n{index}".encode()


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
