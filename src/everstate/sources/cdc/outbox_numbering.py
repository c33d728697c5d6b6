"""Checks outbox rows against our newest states: makes changes, holds or refuses rows (C6, C14).

The service assigns the versions; this module ensures that each version reaches the log once, in
order and without gaps. A row that cannot be published blocks only its own key: later versions of
that key are held.
"""

from __future__ import annotations

import logging
from bisect import insort

from everstate.changes import EntityType, Kind
from everstate.changes.codec import headers_of
from everstate.changes.keys import EntityKey
from everstate.errors import InvalidChange
from everstate.log.record import OutRecord
from everstate.sources.cdc.balance import PUBLISHED, NumberedBatch
from everstate.sources.cdc.columns import PREPARED, Rows, decode_row
from everstate.sources.cdc.completion import READ_BEFORE, Known
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.numbering import Numbering, RawPartitions, place_of
from everstate.sources.cdc.outbox_reading import FACT, POSITION, VERSION, routed, under_another_key
from everstate.sources.cdc.states import encoded_position

logger = logging.getLogger("everstate.sources.cdc")


class OutboxNumbering(Numbering):
    """Publishes each row only when the version before it is in the log; until then it is held.

    A row that cannot be read, or whose state before differs from our newest state, becomes a dead
    letter; its version is then awaited from a corrected row. Versions, not positions, decide what
    is new. A batch is never cut.
    """

    why_held = "behind version gaps"
    how_to_go_on = (
        "Look for the lost versions in the service's outbox (`everstate cdc held {capture}`), or "
        "raise the limit."
    )

    def delete_absent(self, *_: object) -> NumberedBatch:
        """An empty batch: a row missing in the outbox does not mean that its entity is deleted."""
        return NumberedBatch()

    def _clean(self, rows: Rows, at: int, parts: RawPartitions) -> CleanRow:
        row, block = decode_row(rows.rest[at] or b""), rows.block[at]
        row.at = place_of(rows, at, parts)
        row.prepared = block.id if block is not None and block.fate == PREPARED else None
        return row

    def _take(self, batch: NumberedBatch, row: CleanRow) -> None:
        if row.prepared is not None:
            self._hold_prepared(batch, row, row.prepared)
            return
        entity = (self._entity(row.table), row.key)
        known = self._states.get(*entity)
        if row.op == FACT and known is not None and not self._is_of(known, row):
            row = under_another_key(row)
            entity = (entity[0], row.key)
            known = self._states.get(*entity)
        awaited = 1 if known is None else known.version + 1
        if _version(row) > awaited:
            self._wait(batch, row, awaited)
        elif known is not None and _version(row) < awaited:
            self._again(batch, row, known)
        elif self._apply(batch, row, known):
            self._release_next(batch, entity)

    def _again(self, batch: NumberedBatch, row: CleanRow, known: Known) -> None:
        """Handle a version that the log has already: a re-read, or a second row with it (C6).

        Only the id of the newest version is known; rows of older versions are skipped as re-reads.
        """
        newest = known.position.get(POSITION)
        if _version(row) == known.version and newest and not self._is_of(known, row):
            another = f"the id {newest[0]}"
            if newest == row.position[POSITION]:
                another = "another state, of an earlier row with the same id"
            reason = f"version {known.version} is in the log already, with {another}"
            batch.refuse_row(row, self._entity(row.table), reason)
        else:
            batch.skip(row.table, READ_BEFORE)

    def _is_of(self, known: Known, row: CleanRow) -> bool:
        """Whether a version that the log has is of this row, and not of one with the same number.

        A fact's hash is of its row, so that it says enough; those of earlier releases have none.
        """
        newest, own = known.position.get(POSITION, []), row.position[POSITION]
        if newest[:1] != own[:1]:
            return False
        if len(newest) == len(own) > 1:
            return newest == own
        change = routed(row)
        image = change.original if change.current is None else change.current
        return _is_same(self._reader.entities[self._entity(row.table)], known.image, image)

    def _apply(self, batch: NumberedBatch, row: CleanRow, known: Known | None) -> bool:
        """Publish the version that comes next; ``False``: it was refused, and is still awaited."""
        entity, change, version = self._entity(row.table), routed(row), _version(row)
        before = None if known is None or known.is_deleted else known.image
        if not _is_same(self._reader.entities[entity], before, change.original):
            found = "there was none" if before is None else "it differs"
            reason = f"originalEntityState of version {version} is not the state after version "
            batch.refuse_row(row, entity, f"{reason}{version - 1} ({found})")
            return False
        self._add(row)
        batch.changes += 1
        batch.outcomes[row.table, PUBLISHED] += 1
        image = change.original if change.current is None else change.current
        assert image is not None
        position = encoded_position(row.position)
        newer = Known(version, image, Kind(change.kind) is Kind.DELETED, position)
        self._states.put(f"{entity}\0{row.key}", newer)
        return True

    def _add(self, row: CleanRow) -> None:
        """Add the records of a row, whose values are the message that RoutedReader made."""
        change, key = routed(row), row.key.encode()
        target = self._composer.targets[self._names.index(row.table)]
        headers = headers_of(
            target.entity,
            change.id,
            row.key,
            change.kind,
            change.recorded_at,
            change.provenance.service_name,
            None if change.event is None else change.event.type,
        )
        topics = target.state, target.changes
        made = [OutRecord(topic, key, row.state, headers) for topic in topics]
        self._composer.take(target, row.key, made)

    def _wait(self, batch: NumberedBatch, row: CleanRow, awaited: int) -> None:
        """Hold a row while an earlier version is missing, in the order of the versions."""
        entity = (self._entity(row.table), row.key)
        held = self._held_of(row, entity, "")
        for other in held.rows:
            if _version(other) == _version(row):
                if other.position == row.position:
                    batch.skip(row.table, READ_BEFORE)
                else:
                    batch.refuse_row(row, entity[0], f"version {_version(row)} is held already")
                return
        held.reason = f"version {awaited} is awaited"
        insort(held.rows, row, key=_version)
        batch.held_changed.add(entity)

    def _hold_prepared(self, batch: NumberedBatch, row: CleanRow, gtid: str) -> None:
        """Hold a row of a prepared transaction, apart from rows that wait for a version.

        If it is rolled back, another row has its version.
        """
        entity = (self._entity(row.table), f"{row.key} ({gtid})")
        self._held_of(row, entity, PREPARED).append(row)
        batch.held_changed.add(entity)

    def _held_of(self, row: CleanRow, entity: EntityKey, reason: str) -> HeldEntity:
        new = HeldEntity(row.table, *entity, {}, reason, self._now_s)
        return self._held.setdefault(entity, new)

    def _release(
        self, batch: NumberedBatch, entity: EntityKey, *, is_overdue: bool = False
    ) -> None:
        """Process rows of a prepared transaction that has ended."""
        del is_overdue
        batch.held_changed.add(entity)
        for row in self._held.pop(entity).rows:
            if row.skipped is None:
                self._take(batch, row)
            else:
                batch.skip(row.table, row.skipped)

    def _release_next(self, batch: NumberedBatch, entity: EntityKey) -> None:
        """Process held rows as long as their version is the next one."""
        held = self._held.get(entity)
        if held is None:
            return
        batch.held_changed.add(entity)
        while held.rows:
            row, known = held.rows[0], self._states.get(*entity)
            assert known is not None
            if _version(row) != known.version + 1:
                held.reason = f"version {known.version + 1} is awaited"
                return
            held.rows.pop(0)
            self._apply(batch, row, known)
        del self._held[entity]

    def _make_room(self, batch: NumberedBatch) -> None:
        """Log one line about the keys that this batch holds, with one of them as an example."""
        held = {entity: self._held[entity] for entity in batch.held_changed & self._held.keys()}
        waiting = sorted(entity for entity, one in held.items() if one.reason != PREPARED)
        if waiting:
            logger.warning(
                "capture %s: rows of %d keys are held; of %s %r %s",
                *(self._capture.name, len(waiting), *waiting[0], self._held[waiting[0]].reason),
            )
        super()._make_room(batch)


def _version(row: CleanRow) -> int:
    assert row.known is not None
    return int(row.known[VERSION])


def _is_same(entity_type: EntityType, known: bytes | None, original: bytes | None) -> bool:
    """Whether two states are equal by the model: our older state may lack fields added since."""
    if known == original:
        return True
    if known is None or original is None:
        return False
    try:
        return entity_type.encode(entity_type.validate_json(known), "stored") == original
    except InvalidChange:
        return False
