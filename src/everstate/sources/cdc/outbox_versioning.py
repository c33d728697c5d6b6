"""One batch of an outbox's rows against our newest states: changes, held rows, refusals (C6, C14).

The service counts the versions; here it is seen to that they reach the log dense, in order and
once. What cannot be published stops its own key only: later versions of it are held.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from everstate.changes import EntityType, Kind
from everstate.errors import HeldOverflow, InvalidChange
from everstate.sources.cdc.completion import READ_BEFORE, Known, Step
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.outbox_reading import POSITION, VERSION, routed
from everstate.sources.cdc.reading import RefusedRow
from everstate.sources.cdc.versioning import Batch, Entity, RawPlace, Versioned

LOGGER: Final = logging.getLogger("everstate.sources.cdc")


class OutboxVersioner:
    """Lets each row go on when the version before it is in the log, and only then.

    Works on a :class:`LocalState` and on what is held, and touches nothing else; the caller
    publishes what comes out and commits both.
    """

    def __init__(
        self,
        capture: Capture,
        entities: Mapping[str, EntityType],
        state: LocalState,
        held: dict[Entity, HeldEntity],
        *,
        held_max: int = 10_000,
    ) -> None:
        self._capture, self._entities = capture, entities
        self._state, self._held, self._held_max = state, held, held_max

    def run(self, rows: Iterable[tuple[RawPlace, CleanRow | RefusedRow]], now_s: float) -> Batch:
        """Take rows in the order of their partitions; each goes on, waits, or is refused.

        Raises HeldOverflow when too many rows wait; then nothing may be committed.
        """
        batch = Batch()
        listed = list(rows)
        self._load(listed)
        for place, row in listed:
            if isinstance(row, RefusedRow):
                self._refuse(batch, row, row.reason, place)
            else:
                self._take(batch, row, place, now_s)
        self._tell(batch)
        waiting = sum(len(one.rows) for one in self._held.values())
        if waiting > self._held_max:
            raise HeldOverflow(
                f"capture {self._capture.name}",
                waiting,
                self._held_max,
                advice="Look for the lost versions in the service's outbox "
                f"(`everstate cdc held {self._capture.name}`), or raise the limit.",
            )
        return batch

    def _load(self, rows: list[tuple[RawPlace, CleanRow | RefusedRow]]) -> None:
        keys: dict[str, set[str]] = defaultdict(set)
        for _, row in rows:
            if isinstance(row, CleanRow):
                keys[self._entity(row)].add(row.key)
        for entity, wanted in keys.items():
            self._state.load(entity, wanted)

    def _entity(self, row: CleanRow | RefusedRow) -> str:
        return self._capture.tables[row.table].entity

    def _take(self, batch: Batch, row: CleanRow, place: RawPlace, now_s: float) -> None:
        entity = (self._entity(row), row.key)
        known = self._state.get(*entity)
        awaited = 1 if known is None else known.version + 1
        row.at = place
        if _version(row) > awaited:
            self._hold(batch, row, place, awaited, now_s)
        elif known is not None and _version(row) < awaited:
            self._again(batch, row, place, known)
        elif self._apply(batch, row, place, known):
            self._release(batch, entity)

    def _again(self, batch: Batch, row: CleanRow, place: RawPlace, known: Known) -> None:
        """A version that the log has: a row that was read again, or another one's (C6).

        Only the newest version's id is remembered; older ones are taken for what was read before.
        """
        newest = known.position.get(POSITION)
        if _version(row) == known.version and newest and newest != row.position[POSITION]:
            reason = f"version {known.version} is in the log already, with the id {newest[0]}"
            self._refuse(batch, row, reason, place)
        else:
            batch.skip(row.table, READ_BEFORE)

    def _apply(self, batch: Batch, row: CleanRow, place: RawPlace, known: Known | None) -> bool:
        """Publish the version that comes next; ``False``: it was refused, and is still awaited."""
        entity, said, version = self._entity(row), routed(row), _version(row)
        before = None if known is None or known.is_deleted else known.image
        if not _is_same(self._entities[entity], before, said.original):
            found = "there was none" if before is None else "it differs"
            reason = (
                f"originalEntityState of version {version} is not the state after version "
                f"{version - 1} ({found})"
            )
            self._refuse(batch, row, reason, place)
            return False
        step = Step(Kind(said.kind), said.current, said.original, is_baseline=False)
        change = Versioned(row, entity, row.key, version, step, 0, place)
        batch.publish(row.table, [change])
        image = said.original if said.current is None else said.current
        assert image is not None
        newer = Known(version, image, said.current is None, row.position)
        self._state.put(entity, row.key, newer)
        batch.touched.add((entity, row.key))
        return True

    def _hold(
        self, batch: Batch, row: CleanRow, place: RawPlace, awaited: int, now_s: float
    ) -> None:
        """Keep a row behind a hole, in the order of the versions."""
        entity = (self._entity(row), row.key)
        held = self._held.get(entity)
        if held is None:
            held = self._held[entity] = HeldEntity(row.table, *entity, {}, "", now_s)
        for other in held.rows:
            if _version(other) == _version(row):
                if other.position == row.position:
                    batch.skip(row.table, READ_BEFORE)
                else:
                    self._refuse(batch, row, f"version {_version(row)} is held already", place)
                return
        held.reason = f"version {awaited} is awaited"
        insort(held.rows, row, key=_version)
        batch.held_changed.add(entity)

    def _release(self, batch: Batch, entity: Entity) -> None:
        """Let held rows go on whose version is the next one."""
        held = self._held.get(entity)
        if held is None:
            return
        batch.held_changed.add(entity)
        while held.rows:
            row, known = held.rows[0], self._state.get(*entity)
            assert known is not None
            if _version(row) != known.version + 1:
                held.reason = f"version {known.version + 1} is awaited"
                return
            held.rows.pop(0)
            assert row.at is not None
            self._apply(batch, row, RawPlace(*row.at), known)
        del self._held[entity]

    def _tell(self, batch: Batch) -> None:
        """One line about the keys that wait since this batch, with one of them as an example."""
        waiting = sorted(entity for entity in batch.held_changed if entity in self._held)
        if waiting:
            LOGGER.warning(
                "capture %s: rows of %d keys are held; of %s %r %s",
                *(self._capture.name, len(waiting), *waiting[0], self._held[waiting[0]].reason),
            )

    def _refuse(
        self, batch: Batch, row: CleanRow | RefusedRow, reason: str, place: RawPlace
    ) -> None:
        batch.refuse(row.table, self._entity(row), reason, place)


def _version(row: CleanRow) -> int:
    return int(row.columns[VERSION])


def _is_same(entity_type: EntityType, known: bytes | None, said: bytes | None) -> bool:
    """Whether two states are equal as the model has them: an older one may lack new fields."""
    if known == said:
        return True
    if known is None or said is None:
        return False
    try:
        return entity_type.encode(entity_type.validate_json(known)) == said
    except InvalidChange:
        return False
