"""Checks outbox rows against our newest states: makes changes, holds or refuses rows (C6, C14).

The service assigns the versions; this module ensures that each version reaches the log once, in
order and without gaps. A row that cannot be published blocks only its own key: later versions of
that key are held.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

from everstate.changes import EntityType, Kind
from everstate.changes.codec import headers_of
from everstate.changes.keys import EntityKey
from everstate.declarations.captures import Capture
from everstate.errors import HeldOverflow, InvalidChange
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.sources.cdc.balance import PUBLISHED, Cut, NumberedBatch
from everstate.sources.cdc.columns import (
    OTHER,
    PREPARED,
    REFUSED,
    SOURCE,
    Rows,
    decode_refusal,
    decode_row,
    decode_source,
)
from everstate.sources.cdc.completion import READ_BEFORE, Known
from everstate.sources.cdc.composing import RawPlace
from everstate.sources.cdc.holding import HeldEntity, end_prepared, limited
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.outbox_reading import (
    FACT,
    POSITION,
    VERSION,
    routed,
    under_another_key,
)
from everstate.sources.cdc.reading import SourceIdentity
from everstate.sources.cdc.states import States, encoded_position

logger = logging.getLogger("everstate.sources.cdc")


class RoutedRecords:
    """Collects the records of a batch; their values are the messages that RoutedReader made."""

    coverage_percent = 100.0
    """Percent of the changes for which the source gave provenance: each row has it."""

    def __init__(self, names: TopicNames) -> None:
        self._names = names
        self.begin()

    def begin(self, now_s: float = 0.0) -> None:
        """Begin a batch; its rows have the time at which they were recorded."""
        del now_s
        self._changes: list[OutRecord] = []
        self._newest: dict[EntityKey, OutRecord] = {}

    def add(self, entity: str, row: CleanRow) -> None:
        """Add the records of a row."""
        change, key = routed(row), row.key.encode()
        headers = headers_of(
            entity,
            change.id,
            row.key,
            change.kind,
            change.recorded_at,
            change.provenance.service_name,
            None if change.event is None else change.event.type,
        )
        self._changes.append(OutRecord(self._names.changes(entity), key, row.state, headers))
        state = OutRecord(self._names.state(entity), key, row.state, headers)
        self._newest[entity, row.key] = state

    def records(self) -> list[OutRecord]:
        """Records of `.changes` in order, then the newest of each entity for `.state` (C2)."""
        return [*self._changes, *self._newest.values()]


class OutboxNumbering:
    """Publishes each row only when the version before it is in the log; until then it is held.

    A row that cannot be read, or whose state before differs from our newest state, becomes a dead
    letter; its version is then awaited from a corrected row. This modifies only :class:`States` and
    the held entities; the caller publishes the records and commits both.
    """

    def __init__(
        self,
        capture: Capture,
        entities: Mapping[str, EntityType],
        records: RoutedRecords,
        held: dict[EntityKey, HeldEntity],
        *,
        held_max: int = 10_000,
        epoch: int = 1,
        **options: object,
    ) -> None:
        """``options``: those of `Numbering`; versions, not positions, decide what is new."""
        self._epoch = epoch
        del options
        self._capture, self._entities, self._records = capture, entities, records
        self._held, self._held_max = held, held_max
        self._states: States
        self._names = list(capture.tables)

    def run(
        self,
        rows: Rows,
        parts: Sequence[tuple[str, int]],
        states: States,
        now_s: float,
        cut: Cut | None = None,
        *,
        has_read_all: bool = True,
    ) -> NumberedBatch:
        """Process rows in partition order; each is published, skipped, held or refused.

        A batch is never cut. Raises HeldOverflow when too many rows are held; then nothing may be
        committed.
        """
        del cut, has_read_all
        batch, self._states, self._now_s = NumberedBatch(), states, now_s
        self._load(rows)
        for at, what in enumerate(rows.what):
            block = rows.block[at] if rows.block else None
            place = RawPlace(*parts[rows.part[at]], rows.offset[at])
            if what == OTHER:
                row = decode_row(rows.rest[at] or b"")
                row.at = place
                if block is not None and block.fate == PREPARED:
                    self._hold_prepared(batch, row, block.id)
                elif block is not None and block.fate:
                    batch.skip(row.table, block.fate)
                else:
                    self._take(batch, row)
            elif what == SOURCE:
                source = decode_source(rows.rest[at] or b"")
                self._end_prepared(batch, source)
                self._epoch = max(self._epoch, source.epoch)
            elif what == REFUSED:
                bad, key, value = decode_refusal(rows.rest[at] or b"")
                is_known = bad.table in self._capture.tables
                entity = self._entity(bad.table) if is_known else None
                table = bad.table if is_known else ""
                batch.refuse(table, entity, bad.reason, place, (key, value))
        read = Counter(
            number for number, what in zip(rows.table, rows.what, strict=True) if what <= REFUSED
        )
        for number, count in read.items():
            batch.read[self._names[number] if number >= 0 else ""] += count
        self._tell(batch)
        waiting = limited(self._held)
        if waiting > self._held_max:
            raise HeldOverflow(
                f"capture {self._capture.name}",
                waiting,
                self._held_max,
                advice="Look for the lost versions in the service's outbox "
                f"(`everstate cdc held {self._capture.name}`), or raise the limit.",
            )
        return batch

    def delete_absent(self, *_: object) -> NumberedBatch:
        """An empty batch: a row missing in the outbox does not mean that its entity is deleted."""
        return NumberedBatch()

    def _load(self, rows: Rows) -> None:
        entities = [self._entity(name) for name in self._names]
        self._states.load(
            f"{entities[table]}\0{key}"
            for table, key in zip(rows.table, rows.key, strict=True)
            if table >= 0 and key is not None
        )

    def _entity(self, table: str) -> str:
        return self._capture.tables[table].entity

    def _take(self, batch: NumberedBatch, row: CleanRow) -> None:
        entity = (self._entity(row.table), row.key)
        known = self._states.get(*entity)
        if row.op == FACT and known is not None and not self._is_of(known, row):
            row = under_another_key(row)
            entity = (entity[0], row.key)
            known = self._states.get(*entity)
        awaited = 1 if known is None else known.version + 1
        if _version(row) > awaited:
            self._hold(batch, row, awaited)
        elif known is not None and _version(row) < awaited:
            self._again(batch, row, known)
        elif self._apply(batch, row, known):
            self._release(batch, entity)

    def _again(self, batch: NumberedBatch, row: CleanRow, known: Known) -> None:
        """Handle a version that the log has already: a re-read, or a second row with it (C6).

        Only the id of the newest version is known; rows of older versions are skipped as re-reads.
        """
        newest = known.position.get(POSITION)
        if _version(row) == known.version and newest and not self._is_of(known, row):
            reason = f"version {known.version} is in the log already, with the id {newest[0]}"
            if newest == row.position[POSITION]:
                reason = f"version {known.version} is in the log already, with another state, of an"
                reason += " earlier row with the same id"
            self._refuse(batch, row, reason)
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
        return _is_same(self._entities[self._entity(row.table)], known.image, image)

    def _apply(self, batch: NumberedBatch, row: CleanRow, known: Known | None) -> bool:
        """Publish the version that comes next; ``False``: it was refused, and is still awaited."""
        entity, change, version = self._entity(row.table), routed(row), _version(row)
        before = None if known is None or known.is_deleted else known.image
        if not _is_same(self._entities[entity], before, change.original):
            found = "there was none" if before is None else "it differs"
            reason = (
                f"originalEntityState of version {version} is not the state after version "
                f"{version - 1} ({found})"
            )
            self._refuse(batch, row, reason)
            return False
        self._records.add(entity, row)
        batch.changes += 1
        batch.outcomes[row.table, PUBLISHED] += 1
        image = change.original if change.current is None else change.current
        assert image is not None
        position = encoded_position(row.position)
        newer = Known(version, image, Kind(change.kind) is Kind.DELETED, position)
        self._states.put(f"{entity}\0{row.key}", newer)
        return True

    def _hold(self, batch: NumberedBatch, row: CleanRow, awaited: int) -> None:
        """Hold a row while an earlier version is missing, in the order of the versions."""
        entity = (self._entity(row.table), row.key)
        held = self._held.get(entity)
        if held is None:
            held = self._held[entity] = HeldEntity(row.table, *entity, {}, "", self._now_s)
        for other in held.rows:
            if _version(other) == _version(row):
                if other.position == row.position:
                    batch.skip(row.table, READ_BEFORE)
                else:
                    self._refuse(batch, row, f"version {_version(row)} is held already")
                return
        held.reason = f"version {awaited} is awaited"
        insort(held.rows, row, key=_version)
        batch.held_changed.add(entity)

    def _hold_prepared(self, batch: NumberedBatch, row: CleanRow, gtid: str) -> None:
        """Hold a row of a prepared transaction, apart from rows that wait for a version.

        If it is rolled back, another row has its version.
        """
        row.prepared = gtid
        entity = (self._entity(row.table), f"{row.key} ({gtid})")
        if (held := self._held.get(entity)) is None:
            held = HeldEntity(row.table, *entity, {}, PREPARED, self._now_s)
            self._held[entity] = held
        held.append(row)
        batch.held_changed.add(entity)

    def _end_prepared(self, batch: NumberedBatch, source: SourceIdentity) -> None:
        for entity in end_prepared(self._held, source, self._epoch):
            batch.held_changed.add(entity)
            for row in self._held.pop(entity).rows:
                if row.skipped is None:
                    self._take(batch, row)
                else:
                    batch.skip(row.table, row.skipped)

    def _release(self, batch: NumberedBatch, entity: EntityKey) -> None:
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

    def _tell(self, batch: NumberedBatch) -> None:
        """Log one line about the keys that this batch holds, with one of them as an example."""
        held = {entity: self._held[entity] for entity in batch.held_changed & self._held.keys()}
        waiting = sorted(entity for entity, one in held.items() if one.reason != PREPARED)
        if waiting:
            logger.warning(
                "capture %s: rows of %d keys are held; of %s %r %s",
                *(self._capture.name, len(waiting), *waiting[0], self._held[waiting[0]].reason),
            )

    def _refuse(self, batch: NumberedBatch, row: CleanRow, reason: str) -> None:
        assert row.at is not None
        batch.refuse(row.table, self._entity(row.table), reason, RawPlace(*row.at))


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
