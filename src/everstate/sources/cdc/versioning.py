"""One batch of rows, in source order, against our newest states: changes, held rows, refusals.

Works on a :class:`LocalState` and on what is held, and touches nothing else; the caller publishes
what comes out and commits both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from everstate.changes import Kind
from everstate.errors import HeldOverflow
from everstate.sources.cdc.balance import DEAD, PUBLISHED, SKIPPED, Outcomes
from everstate.sources.cdc.completion import (
    PRIOR_UNKNOWN,
    SUPERSEDED,
    TRUNCATED,
    Completed,
    Held,
    Known,
    Skipped,
    Step,
    complete,
    is_settling,
)
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.rows import Unreadable, behind, is_after

Entity = tuple[str, str]
"""Entity type and key."""


class RawPlace(NamedTuple):
    """Where a record of a raw topic is."""

    topic: str
    partition: int
    offset: int


class Versioned(msgspec.Struct, frozen=True, gc=False):
    """One change of a row, with its version."""

    row: CleanRow
    entity: str
    key: str
    version: int
    step: Step
    part: int
    """Its place among the changes of its row, from 0."""
    place: RawPlace


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A record that no change is made of, and why."""

    entity: str | None
    reason: str
    place: RawPlace


@dataclass(slots=True)
class Batch:
    """What one batch of rows came to."""

    changes: list[Versioned] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    outcomes: Outcomes = field(default_factory=Counter)
    """What became of each row, by table; rows that wait have none yet."""
    made: Counter[str] = field(default_factory=Counter)
    """Rows that stand for one truncation, by table."""
    overdue: int = 0
    """Rows that went on without their parent, or with a code instead of its name."""
    touched: set[Entity] = field(default_factory=set)
    """Entities with a newer state."""
    held_changed: set[Entity] = field(default_factory=set)

    def publish(self, table: str, changes: Sequence[Versioned]) -> None:
        """A row became these changes."""
        self.changes += changes
        self.outcomes[table, PUBLISHED] += 1

    def skip(self, table: str, reason: str, rows: int = 1) -> None:
        """So many rows say nothing new."""
        self.skipped[reason] += rows
        self.outcomes[table, SKIPPED] += rows

    def refuse(self, table: str, entity: str | None, reason: str, place: RawPlace) -> None:
        """A row becomes a dead letter."""
        self.refused.append(Refused(entity, reason, place))
        self.outcomes[table, DEAD] += 1


class Versioner:
    """Gives rows their place in the history of their entity.

    ``compose`` makes messages of the changes of one row, or raises Unreadable: then the row is
    refused, and its entity stays as it was.
    """

    def __init__(
        self,
        reader: RawReader,
        state: LocalState,
        held: dict[Entity, HeldEntity],
        *,
        held_max: int = 10_000,
        compose: Callable[[Sequence[Versioned]], None] = lambda changes: None,
    ) -> None:
        self._reader, self._state, self._held = reader, state, held
        self._capture = reader.capture
        self._held_max = held_max
        self._compose = compose
        self._waiting: dict[Entity, set[Entity]] = defaultdict(set)
        for entity, one in held.items():
            if one.waits_for is not None:
                self._waiting[one.waits_for].add(entity)

    def run(
        self,
        rows: Iterable[tuple[RawPlace, CleanRow | RefusedRow]],
        now_s: float,
        read_s: float | None = None,
    ) -> Batch:
        """Take rows in source order; each entity's rows go on, wait, or are refused.

        ``read_s``: all that the capture had written by then has been read; ``None``: by now. What
        waits to be read is not late. Raises HeldOverflow when too many rows wait; then nothing
        may be committed.
        """
        batch = Batch()
        listed = list(rows)
        self._load(listed)
        for place, row in listed:
            if isinstance(row, RefusedRow):
                self._refuse(batch, row, place, now_s)
            elif row.op == "t":
                self._truncate(batch, row, place, now_s)
            else:
                self._take(batch, row, place, now_s)
        self._let_overdue_go(batch, now_s, now_s if read_s is None else read_s)
        self._make_room(batch, now_s)
        return batch

    def _entity(self, row: CleanRow | RefusedRow) -> str:
        return self._capture.tables[row.table].entity

    def _load(self, rows: list[tuple[RawPlace, CleanRow | RefusedRow]]) -> None:
        keys: dict[str, set[str]] = defaultdict(set)
        parents: dict[str, set[str]] = defaultdict(set)
        for _, row in rows:
            if isinstance(row, CleanRow):
                keys[row.table].add(row.key)
                for entity, key in row.parents:
                    parents[entity].add(key)
        for table, wanted in keys.items():
            self._state.load(self._capture.tables[table].entity, wanted)
        for entity, wanted in parents.items():
            self._state.load(entity, wanted)

    def _take(self, batch: Batch, row: CleanRow, place: RawPlace, now_s: float) -> None:
        entity = (self._entity(row), row.key)
        held = self._held.get(entity)
        row.at = place
        if held is None:
            outcome = self._try(batch, row, place, is_unsure=False, is_overdue=False)
            if isinstance(outcome, Held):
                held = HeldEntity(row.table, *entity, row.columns, outcome.reason, now_s, [row])
                self._hold(batch, entity, held, outcome)
                if held.waits_for_other and self._waits_for_itself(entity):
                    self._release(batch, entity, held, now_s, is_overdue=True)
            elif isinstance(outcome, Completed):
                self._wake(batch, entity, now_s)
            elif outcome is None:
                self._doubt(batch, entity, row, now_s)
            return
        held.rows.append(row)
        batch.held_changed.add(entity)
        self._release(batch, entity, held, now_s)

    def _try(
        self,
        batch: Batch,
        row: CleanRow,
        place: RawPlace,
        *,
        is_unsure: bool,
        is_overdue: bool,
    ) -> Completed | Skipped | Held | None:
        """Complete one row and take its changes over; ``None``: it was refused."""
        entity = self._entity(row)
        known = self._state.get(entity, row.key)
        try:
            outcome = complete(
                row,
                known,
                self._reader.mapping(row.table),
                self._state.get,
                is_unsure=is_unsure,
                parents_first=self._capture.parents_first,
                is_overdue=is_overdue,
            )
            if isinstance(outcome, Completed):
                self._apply(batch, entity, row, known, outcome, place)
        except Unreadable as cause:
            batch.refuse(row.table, entity, str(cause), place)
            return None
        if isinstance(outcome, Skipped):
            batch.skip(row.table, outcome.reason)
        return outcome

    def _apply(
        self,
        batch: Batch,
        entity: str,
        row: CleanRow,
        known: Known | None,
        outcome: Completed,
        place: RawPlace,
    ) -> None:
        """Take over the changes of a row; raises Unreadable when they cannot be messages."""
        key, version = row.key, 0 if known is None else known.version
        position = row.position or ({} if known is None else known.position)
        changes = [
            Versioned(row, entity, key, version + 1 + index, step, index, place)
            for index, step in enumerate(outcome.steps)
        ]
        self._compose(changes)
        batch.publish(row.table, changes)
        step = outcome.steps[-1]
        version += len(changes)
        is_deleted = step.kind is Kind.DELETED
        image = step.original if is_deleted else step.current
        assert image is not None
        self._state.put(entity, key, Known(version, image, is_deleted, position))
        batch.touched.add((entity, key))

    def _hold(self, batch: Batch, entity: Entity, held: HeldEntity, why: Held) -> None:
        held.reason = why.reason
        if held.waits_for is not None:
            self._waiting[held.waits_for].discard(entity)
        held.waits_for = None
        if why.entity is not None and why.key is not None:
            held.waits_for = (why.entity, why.key)
            self._waiting[held.waits_for].add(entity)
        self._held[entity] = held
        batch.held_changed.add(entity)

    def _release(
        self,
        batch: Batch,
        entity: Entity,
        held: HeldEntity,
        now_s: float,
        *,
        is_overdue: bool = False,
    ) -> None:
        """Let rows of an entity go on, oldest first, until one has to wait again."""
        while held.rows:
            row = held.rows[0]
            assert row.at is not None
            outcome = self._try(
                batch, row, RawPlace(*row.at), is_unsure=held.is_unsure, is_overdue=is_overdue
            )
            if isinstance(outcome, Held):
                if outcome.reason == PRIOR_UNKNOWN and self._supersede(batch, held):
                    continue
                self._hold(batch, entity, held, outcome)
                is_overdue = held.waits_for_other and self._waits_for_itself(entity)
                if is_overdue:
                    continue
                return
            held.rows.pop(0)
            batch.held_changed.add(entity)
            if outcome is None:
                held.is_unsure = True
            elif isinstance(outcome, Completed) or is_settling(row):
                held.is_unsure = False
            if is_overdue:
                batch.overdue += 1
                is_overdue = False
            if isinstance(outcome, Completed):
                self._wake(batch, entity, now_s)
        if held.is_unsure:
            return
        if held.waits_for is not None:
            self._waiting[held.waits_for].discard(entity)
        self._held.pop(entity, None)

    def _supersede(self, batch: Batch, held: HeldEntity) -> bool:
        """Give up rows before one that makes the entity known by itself.

        A row without a place in the source's log (an incremental snapshot's) gets one right
        behind theirs: should a connector give them again, they are older than what was read.
        """
        for index, row in enumerate(held.rows[1:], 1):
            if is_settling(row):
                if not row.position:
                    row.position = behind([one.position for one in held.rows[:index]])
                for given_up in held.rows[:index]:
                    batch.skip(given_up.table, SUPERSEDED)
                del held.rows[:index]
                return True
        return False

    def _wake(self, batch: Batch, entity: Entity, now_s: float) -> None:
        """Try those again that waited for an entity which has just got a newer state."""
        if not self._waiting:
            return
        for waiting in sorted(self._waiting.pop(entity, ())):
            held = self._held.get(waiting)
            if held is not None:
                self._release(batch, waiting, held, now_s)

    def _refuse(self, batch: Batch, row: RefusedRow, place: RawPlace, now_s: float) -> None:
        table = self._capture.tables.get(row.table)
        entity = None if table is None else table.entity
        batch.refuse(row.table, entity, row.reason, place)
        if entity is None or row.key is None:
            return
        self._doubt(batch, (entity, row.key), row, now_s)

    def _doubt(
        self, batch: Batch, entity: Entity, row: CleanRow | RefusedRow, now_s: float
    ) -> None:
        """Remember that a row of an entity was refused: only a whole row tells its state again."""
        held = self._held.get(entity)
        if held is None:
            held = HeldEntity(row.table, *entity, row.columns, "a row was refused", now_s)
            self._held[entity] = held
        held.is_unsure = True
        batch.held_changed.add(entity)

    def _truncate(self, batch: Batch, row: CleanRow, place: RawPlace, now_s: float) -> None:
        """Every entity of the table that is known and older than the truncation is deleted."""
        entity = self._entity(row)
        batch.skip(row.table, TRUNCATED)
        keys = set(self._state.alive(entity))
        keys |= {key for of, key in batch.touched if of == entity}
        for key in sorted(keys):
            known = self._state.get(entity, key)
            if known is None or known.is_deleted:
                continue
            if row.position and is_after(row.position, known.position) is False:  # type: ignore[arg-type]
                continue
            gone = CleanRow(
                table=row.table,
                op="d",
                key=key,
                columns={},
                position=row.position,
                order=row.order,
                transaction=row.transaction,
                index=row.index,
                time_us=row.time_us,
                provenance=row.provenance,
                user=row.user,
            )
            batch.made[row.table] += 1
            self._take(batch, gone, place, now_s)

    def _let_overdue_go(self, batch: Batch, now_s: float, read_s: float) -> None:
        """Let those go on whose parent, or name of a code, was not written for so long."""
        for entity, held in list(self._held.items()):
            late = read_s - held.since_s > self._capture.parent_wait_s
            if late and held.waits_for_other and entity in self._held:
                self._release(batch, entity, held, now_s, is_overdue=True)

    def _make_room(self, batch: Batch, now_s: float) -> None:
        """Where too many rows wait, let the oldest go on that wait for other entities only."""
        while (waiting := sum(len(one.rows) for one in self._held.values())) > self._held_max:
            can_go = [entity for entity, one in self._held.items() if one.waits_for_other]
            if not can_go:
                raise HeldOverflow(
                    f"capture {self._capture.name}",
                    waiting,
                    self._held_max,
                    why="because the state before is unknown",
                    advice="Raise the limit; then a snapshot of their keys lets them go on "
                    f"(`everstate cdc held {self._capture.name}` shows them).",
                )
            for entity in can_go[: waiting - self._held_max]:
                held = self._held.get(entity)
                if held is not None and held.waits_for_other:
                    self._release(batch, entity, held, now_s, is_overdue=True)

    def _waits_for_itself(self, entity: Entity) -> bool:
        """Whether an entity waits for one that waits for it, so that neither would ever go on."""
        seen, at = {entity}, self._held[entity].waits_for
        while at is not None and at not in seen:
            seen.add(at)
            other = self._held.get(at)
            at = None if other is None else other.waits_for
        return at == entity
