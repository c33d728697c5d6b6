"""One pass over a batch of rows, in source order: makes changes with versions, or holds rows.

It modifies only :class:`States` and the held entities; the caller publishes the records and commits
both. Plain rows are numbered directly from their columns; any other row becomes a
:class:`CleanRow` first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from everstate.changes import Kind
from everstate.changes.keys import EntityKey
from everstate.errors import HeldOverflow
from everstate.sources.cdc.balance import PUBLISHED, Cut, NumberedBatch
from everstate.sources.cdc.columns import (
    OTHER,
    PREPARED,
    REFUSED,
    SOURCE,
    WHOLE,
    Rows,
    decode_refusal,
    decode_row,
    decode_source,
)
from everstate.sources.cdc.completion import (
    OVERTAKEN,
    PRIOR_UNKNOWN,
    READ_BEFORE,
    SUPERSEDED,
    TRUNCATED,
    TWO_ROWS,
    UNCHANGED,
    ChangeStep,
    Completed,
    Completion,
    HeldBack,
    Known,
    Skipped,
    complete,
    has_settled,
    is_settling,
    step_of,
    was_read,
)
from everstate.sources.cdc.composing import (
    CaptureComposer,
    Origin,
    RawPlace,
    TableTarget,
    origin_of,
)
from everstate.sources.cdc.gone import AbsentRows, bounded, lacking, truncated
from everstate.sources.cdc.holding import (
    Doubts,
    HeldEntity,
    end_prepared,
    limited,
    waits_for_itself,
)
from everstate.sources.cdc.mapping import USER, CleanRow
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.rows import Unreadable, behind, is_after
from everstate.sources.cdc.states import States, encoded_position

RawPartitions = Sequence[tuple[str, int]]
"""Topic and partition of each part of the raw log."""
_NO_NOTES: Final[Mapping[str, str]] = {}
_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


class Numbering:
    """Turns rows into the next versions of their entities.

    A row that no message can be made of is refused, and its entity stays as it was.
    """

    why_held = "because the state before is unknown, or for the end of XA transactions"
    how_to_go_on = (
        "Raise the limit; then a snapshot of their keys lets the former go on (`everstate cdc held "
        "{capture}` shows them)."
    )

    def __init__(
        self,
        reader: RawReader,
        composer: CaptureComposer,
        held: dict[EntityKey, HeldEntity],
        *,
        held_max: int = 10_000,
        epoch: int = 1,
        is_trusted: bool = False,
    ) -> None:
        """``epoch``: of the positions of the next rows.

        ``is_trusted``: the stream has dropped all re-reads; else the position of each row is
        compared with that of its entity.
        """
        self._reader, self._composer, self._held = reader, composer, held
        self._capture, self._held_max = reader.capture, held_max
        self.epoch, self.is_trusted = epoch, is_trusted
        self._doubts = Doubts(held, held_max)
        self._taken: dict[EntityKey, str] = {}
        """Entity that had a row when another one was created → table of the newer row."""
        self._taken_in: str | int | None = None
        """The transaction in which these were created: its id, or else its time."""
        self._waiting: dict[EntityKey, set[EntityKey]] = defaultdict(set)
        self._names = list(self._capture.tables)
        self._now_s = 0.0
        self._states: States
        for entity, one in held.items():
            if one.waits_for is not None:
                self._waiting[one.waits_for].add(entity)

    def run(
        self,
        rows: Rows,
        parts: RawPartitions,
        states: States,
        now_s: float,
        cut: Cut | None = None,
        *,
        has_read_all: bool = True,
    ) -> NumberedBatch:
        """Process rows in source order; each becomes changes, or is skipped, held or refused.

        ``parts``: topic and partition of each number in ``rows.part``. ``has_read_all``: no record
        is left to read, so that held rows that are overdue are released. ``cut``: where the batch
        before ended. Raises HeldOverflow when too many rows are held; then nothing may be
        committed.
        """
        batch, self._now_s, self._states = NumberedBatch(), now_s, states
        self._load(rows)
        rows.block = rows.block or [None] * len(rows)
        for at, (what, block) in enumerate(zip(rows.what, rows.block, strict=True)):
            fate = "" if block is None else block.fate
            if what <= OTHER and fate and fate != PREPARED:
                batch.skip(self._names[rows.table[at]], fate)
            elif what == WHOLE:
                if fate or not self._quick(batch, rows, at, parts):
                    self._take(batch, self._clean(rows, at, parts))
            elif what == OTHER:
                row = self._clean(rows, at, parts)
                if row.op != "t":
                    self._take(batch, row)
                elif not self._truncate(batch, row, rows.part[at], cut):
                    batch.left = len(rows) - at
                    break
            elif what == REFUSED:
                self._refuse(batch, rows, at, parts)
            elif what == SOURCE:
                source = decode_source(rows.rest[at] or b"")
                for entity in end_prepared(self._held, source, self.epoch):
                    self._release(batch, entity)
                self.epoch = max(self.epoch, source.epoch)
        done = islice(zip(rows.table, rows.what, strict=True), len(rows) - batch.left)
        for table, count in Counter(number for number, what in done if what <= REFUSED).items():
            batch.read[self._names[table] if table >= 0 else ""] += count
        if has_read_all and batch.cut is None:
            for entity, held in list(self._held.items()):
                late = now_s - held.since_s > self._capture.parent_wait_s
                if late and held.waits_for_other and entity in self._held:
                    self._release(batch, entity, is_overdue=True)
        self._make_room(batch)
        return batch

    def _load(self, rows: Rows) -> None:
        """Look up the states of all entities that the rows may need."""
        prefixes = [target.prefix for target in self._composer.targets]
        names = {
            prefixes[table] + key
            for table, key, what in zip(rows.table, rows.key, rows.what, strict=True)
            if what <= OTHER and key is not None
        }
        for encoded in filter(None, rows.parents):
            names.update(f"{entity}\0{key}" for entity, key in _decode(encoded))
        self._states.load(names)

    def _quick(self, batch: NumberedBatch, rows: Rows, at: int, parts: RawPartitions) -> bool:
        """Number a plain row of an entity without held rows; ``False``: it needs :meth:`_take`."""
        key = rows.key[at]
        assert key is not None
        target = self._composer.targets[rows.table[at]]
        if self._held and not self._doubts.is_clear(target.entity, key):
            return False
        op, state, position = rows.op[at] or "", rows.state[at], rows.position[at]
        if op == "d" and (target.entity, key) in self._taken:
            return False
        known = self._states.cache.get(target.prefix + key)
        if position is not None:
            position = position.replace(b"[", b"[%d," % self.epoch)
        if known is not None and not self.is_trusted and position is not None:
            if was_read(_decode(position), known):
                batch.skip(target.name, READ_BEFORE)
                return True
        # A row before that we never saw is a change too; a created row may take the key of another.
        if known is None:
            if rows.before[at] is not None:
                return False
        elif op == "c" and not known.is_deleted:
            return False
        step = step_of(op, state, known)
        if isinstance(step, Skipped):
            batch.skip(target.name, step.reason)
            return True
        if rows.parents[at] is not None and self._is_early(rows.parents[at], op):
            return False
        block = rows.block[at]
        origin = Origin(
            key,
            op,
            None if position is not None else place_of(rows, at, parts),
            position,
            rows.time_us[at],
            rows.tx[at],
            rows.index[at] if rows.index else None,
            None if block is None else block.count,
            rows.who[at],
            _NO_NOTES if block is None else block.notes,
            op == "r",
        )
        try:
            self._publish(batch, target, origin, known, (step,))
        except Unreadable:
            return False  # _take tries it again and records the refusal
        if self._waiting:
            self._go_on(batch, self._woken(batch, (target.entity, key)))
        return True

    def _is_early(self, parents: bytes | None, op: str) -> bool:
        """Whether one of the parents is not in the log; deletes and snapshot rows never wait."""
        if op in ("d", "r") or not self._capture.parents_first:
            return False
        found = (self._states.get(entity, key) for entity, key in _decode(parents or b"[]"))
        return any(parent is None or parent.is_deleted for parent in found)

    def _clean(self, rows: Rows, at: int, parts: RawPartitions) -> CleanRow:
        """The CleanRow of a row, with its place, and the epoch in its position."""
        block, rest = rows.block[at], rows.rest[at]
        row = self._of_columns(rows, at) if rest is None else decode_row(rest)
        row.position = {scheme: [self.epoch, *place] for scheme, place in row.position.items()}
        row.at = place_of(rows, at, parts)
        if block is not None:
            row.index, row.count = rows.index[at], block.count
            row.prepared = block.id if block.fate == PREPARED else None
            if block.notes:
                row.provenance = {**row.provenance, **block.notes}
        return row

    def _of_columns(self, rows: Rows, at: int) -> CleanRow:
        who: dict[str, str] = _decode(rows.who[at] or b"{}")
        user = who.pop(USER, None)
        op = rows.op[at] or ""
        return CleanRow(
            table=self._names[rows.table[at]],
            op=op,
            key=rows.key[at] or "",
            columns={},
            state=rows.state[at],
            before=rows.before[at],
            position=_decode(rows.position[at] or b"{}"),
            transaction=rows.tx[at],
            time_us=rows.time_us[at],
            is_snapshot=op == "r",
            provenance=who,
            user=user,
            parents=[(e, k) for e, k in _decode(rows.parents[at] or b"[]")],
            place=rows.place[at],
        )

    def _entity(self, table: str) -> str:
        return self._capture.tables[table].entity

    def _take(self, batch: NumberedBatch, row: CleanRow) -> None:
        entity = (self._entity(row.table), row.key)
        held = self._held.get(entity)
        if held is None:
            is_unsure = self._doubts.is_unsure(entity, self._states.get(*entity))
            outcome = self._try(batch, row, is_unsure=is_unsure, is_overdue=False)
            if isinstance(outcome, HeldBack):
                held = HeldEntity(
                    row.table, *entity, row.columns, outcome.reason, self._now_s, [row]
                )
                held.is_unsure = is_unsure
                self._hold(batch, entity, held, outcome)
                if held.waits_for_other and waits_for_itself(self._held, entity):
                    self._release(batch, entity, is_overdue=True)
            elif isinstance(outcome, Completed):
                self._go_on(batch, self._woken(batch, entity))
            elif outcome is None:
                self._doubt(batch, entity, row)
            return
        held.append(row)
        batch.held_changed.add(entity)
        self._release(batch, entity)

    def _try(
        self, batch: NumberedBatch, row: CleanRow, *, is_unsure: bool, is_overdue: bool
    ) -> Completed | Skipped | HeldBack | None:
        """Complete one row and apply its changes; ``None``: it was refused."""
        if row.prepared is not None:
            return HeldBack(PREPARED)
        entity = self._entity(row.table)
        known, mapping = self._states.get(entity, row.key), self._reader.mapping(row.table)
        if row.moved_from is not None:  # What it lacks is taken from the state under that key.
            is_unsure = not self._doubts.is_clear(entity, row.moved_from)
        outcome: Completion
        try:
            if row.op == "d" and self._is_overtaken((entity, row.key), row):
                outcome = Skipped(OVERTAKEN)
            else:
                outcome = complete(
                    row,
                    known,
                    mapping,
                    self._states.get,
                    is_unsure=is_unsure,
                    parents_first=self._capture.parents_first,
                    is_overdue=is_overdue,
                )
            if isinstance(outcome, Completed):
                target = self._composer.targets[self._names.index(row.table)]
                origin = origin_of(row, encoded_position(row.position) or None)
                self._publish(batch, target, origin, known, outcome.steps)
        except Unreadable as cause:
            batch.refuse_row(row, entity, str(cause))
            return None
        if row.op == "c" and row.skipped is None and not isinstance(outcome, HeldBack):
            self._note_taken((entity, row.key), row, known)
        if isinstance(outcome, Skipped):
            batch.skip(row.table, outcome.reason)
            if is_unsure and known is not None and outcome.reason == UNCHANGED:
                place_now = encoded_position(row.position)
                place_now = place_now or self._doubts.settled_at((entity, row.key), known)
                settled = msgspec.structs.replace(known, place=place_now)
                self._states.put(f"{entity}\0{row.key}", settled)
        return outcome

    def _is_overtaken(self, entity: EntityKey, row: CleanRow) -> bool:
        """Whether a delete is of a row whose key a row of another table got in its transaction.

        Two rows of one table have one key for a while where the unique key is deferrable, or where
        there is none. Raises Unreadable then: the log does not say which of them is gone.
        """
        newer = self._taken.get(entity) if _transaction(row) == self._taken_in else None
        if newer == row.table:
            raise Unreadable(TWO_ROWS)
        return newer is not None

    def _note_taken(self, entity: EntityKey, row: CleanRow, known: Known | None) -> None:
        """Record that a row was created under a key that a row has."""
        name = _transaction(row)
        if name is None or known is None or known.is_deleted:
            return
        # A row that a connector writes again is no other row.
        if self.is_trusted or is_after(row.position, known.position) is True:  # type: ignore[arg-type]
            if name != self._taken_in:
                self._taken, self._taken_in = {}, name
            self._taken[entity] = row.table

    def _publish(
        self,
        batch: NumberedBatch,
        target: TableTarget,
        origin: Origin,
        known: Known | None,
        steps: Sequence[ChangeStep],
    ) -> None:
        """Make the records of a row's changes and set its state; may raise Unreadable."""
        version, made = 0 if known is None else known.version, []
        for part, step in enumerate(steps):
            version += 1
            made.append(self._composer.make(target, origin, version, step, part))
        for records in made:
            self._composer.take(target, origin.key, records)
        batch.changes += len(made)
        batch.outcomes[target.name, PUBLISHED] += 1
        is_deleted = step.kind is Kind.DELETED
        image = step.original if is_deleted else step.current
        assert image is not None
        place = origin.position or self._doubts.settled_at((target.entity, origin.key), known)
        self._states.put(target.prefix + origin.key, Known(version, image, is_deleted, place))

    def _hold(
        self, batch: NumberedBatch, entity: EntityKey, held: HeldEntity, why: HeldBack
    ) -> None:
        held.reason = why.reason
        self._wait_for(entity, held, why.waits_for)
        self._held[entity] = held
        batch.held_changed.add(entity)

    def _wait_for(self, entity: EntityKey, held: HeldEntity, other: EntityKey | None) -> None:
        """Have a held entity wait for another one, or for none any more."""
        if held.waits_for is not None:
            self._waiting[held.waits_for].discard(entity)
        held.waits_for = other
        if other is not None:
            self._waiting[other].add(entity)

    def _release(
        self, batch: NumberedBatch, entity: EntityKey, *, is_overdue: bool = False
    ) -> None:
        """Process the held rows of an entity, and those that wait for it."""
        self._go_on(batch, [self._releasing(batch, entity, is_overdue=is_overdue)])

    def _go_on(self, batch: NumberedBatch, open_ones: list[Iterator[EntityKey]]) -> None:
        """Release entities, the last one first; those that wait for one directly after its row.

        Without recursion: rows of a tree in one table may wait for each other in a long chain.
        """
        while open_ones:
            changed = next(open_ones[-1], None)
            if changed is None:
                open_ones.pop()
            else:
                open_ones += self._woken(batch, changed)

    def _woken(self, batch: NumberedBatch, entity: EntityKey) -> list[Iterator[EntityKey]]:
        """Releases of the entities that waited for this one, the first one last."""
        waiting = sorted(self._waiting.pop(entity, ()), reverse=True)
        return [self._releasing(batch, each) for each in waiting]

    def _releasing(
        self, batch: NumberedBatch, entity: EntityKey, *, is_overdue: bool = False
    ) -> Iterator[EntityKey]:
        """Process the held rows of an entity, oldest first, until one has to wait again.

        Gives the entity after each row that changes it, and when it stops waiting.
        """
        held = self._held.get(entity)
        if held is None:
            return
        while held.rows:
            held.reach_doubts()
            row = held.rows[0]
            outcome = self._try(batch, row, is_unsure=held.is_unsure, is_overdue=is_overdue)
            if isinstance(outcome, HeldBack):
                if outcome.reason == PRIOR_UNKNOWN and self._supersede(batch, held):
                    continue
                self._hold(batch, entity, held, outcome)
                is_overdue = held.waits_for_other and waits_for_itself(self._held, entity)
                if is_overdue:
                    continue
                return
            held.rows.pop(0)
            batch.held_changed.add(entity)
            if outcome is None:
                self._doubt(batch, entity, row, len(held.rows))
            elif has_settled(row, outcome):
                known = self._states.get(*entity)
                if held.is_unsure and known is not None and known.is_deleted:
                    # A row that gets its key from it is not completed with its last state.
                    unknown = msgspec.structs.replace(known, image=b"")
                    self._states.put(f"{entity[0]}\0{entity[1]}", unknown)
                held.is_unsure = False
            if is_overdue:
                batch.overdue += 1
                is_overdue = False
            if isinstance(outcome, Completed):
                yield entity
        held.reach_doubts()
        self._wait_for(entity, held, None)
        if not held.is_unsure:
            self._held.pop(entity, None)
            yield entity

    def _supersede(self, batch: NumberedBatch, held: HeldEntity) -> bool:
        """Skip held rows that come before a row that determines the entity's state by itself.

        If that row has no position (it is an incremental snapshot's), it gets one directly after
        the skipped rows: if a connector writes these again, they are recognised as older.
        """
        for index, row in enumerate(held.rows[1:], 1):
            if row.prepared is not None:
                break
            if is_settling(row):
                given_up, held.rows = held.rows[:index], held.rows[index:]
                row.position = row.position or behind(one.position for one in given_up)
                for one in given_up:
                    batch.skip(one.table, SUPERSEDED)
                held.is_unsure |= row.op == "d"  # The state that it deletes is not known.
                return True
        return False

    def _refuse(self, batch: NumberedBatch, rows: Rows, at: int, parts: RawPartitions) -> None:
        row, key, value = decode_refusal(rows.rest[at] or b"")
        block = rows.block[at]
        if block is not None and block.fate not in ("", PREPARED):
            batch.skip(row.table, block.fate)
            return
        table = self._capture.tables.get(row.table)
        entity = None if table is None else table.entity
        name = "" if table is None else row.table
        batch.refuse(name, entity, row.reason, place_of(rows, at, parts), (key, value))
        if entity is not None and row.key is not None:
            row.position = {name: [self.epoch, *place] for name, place in row.position.items()}
            self._doubt(batch, (entity, row.key), row)

    def _doubt(
        self, batch: NumberedBatch, entity: EntityKey, row: CleanRow | RefusedRow, newer: int = 0
    ) -> None:
        """Record a refused row: its entity's state is uncertain until a whole row comes."""
        batch.held_changed |= self._doubts.add(entity, row, self._now_s, self._states.get, newer)

    def _truncate(self, batch: NumberedBatch, row: CleanRow, part: int, cut: Cut | None) -> bool:
        """Delete every entity of the table whose newest row is before the truncation.

        ``False``: some are left for the next batch.
        """
        entity = self._entity(row.table)
        self._taken.clear()
        assert row.at is not None
        if cut is None or (cut.part, cut.offset) != (part, row.at[2]):
            cut = Cut(part, row.at[2], row.table)
        for gone in bounded(truncated(row, entity, self._states, self._held, cut), batch, cut):
            self._take(batch, gone)
        if batch.cut is None:
            batch.skip(row.table, TRUNCATED)
        return batch.cut is None

    def delete_absent(
        self, absent: AbsentRows, states: States, now_s: float, cut: Cut | None = None
    ) -> NumberedBatch:
        """Delete every entity that is missing in a first snapshot that was taken again.

        ``cut``: where the batch before ended.
        """
        batch, self._now_s, self._states = NumberedBatch(), now_s, states
        if cut is None or cut.offset != absent.place.offset:
            cut = Cut(0, absent.place.offset)
        for gone in bounded(lacking(absent, self.epoch, states, self._held, cut), batch, cut):
            self._take(batch, gone)
        return batch

    def _make_room(self, batch: NumberedBatch) -> None:
        """While too many rows are held, release the oldest that wait for other entities only."""
        while (waiting := limited(self._held)) > self._held_max:
            can_go = [entity for entity, one in self._held.items() if one.waits_for_other]
            if not can_go:
                name, limit, why = self._capture.name, self._held_max, self.why_held
                advice = self.how_to_go_on.format(capture=name)
                raise HeldOverflow(f"capture {name}", waiting, limit, why=why, advice=advice)
            for entity in can_go[: waiting - self._held_max]:
                held = self._held.get(entity)
                if held is not None and held.waits_for_other:
                    self._release(batch, entity, is_overdue=True)


def _transaction(row: CleanRow) -> str | int | None:
    """What the rows of a transaction share: its id, or else its time."""
    return row.time_us if row.transaction is None else row.transaction


def place_of(rows: Rows, at: int, parts: RawPartitions) -> RawPlace:
    """Where the record of a row is."""
    return RawPlace(*parts[rows.part[at]], rows.offset[at])
