"""One entity's partition: its head, and the one way in which it moves (C9)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from everstate.changes import Kind
from everstate.errors import Unavailable
from everstate.sources.crud.stores.cassandra.schema import IndexStatements, Statements
from everstate.sources.crud.stores.cassandra.session import UNKNOWN, Database, unless_null
from everstate.sources.outbox.rows import Row

BUCKET_S: Final = 1
_PAUSE_S: Final = 0.002
_PAUSE_S_MAX: Final = 0.25


@dataclass(frozen=True, slots=True)
class Head:
    """An entity as its partition has it; version 0 and no state when it was never written."""

    version: int = 0
    change_id: UUID | None = None
    fence: UUID | None = None
    state: str | None = None


class Step(NamedTuple):
    """One change to be written. ``before`` is kept when it is not the state of the row below."""

    version: int
    kind: Kind
    row: Row
    before: str | None
    chained: bool = True


Plan = Callable[[Head], Sequence[Step]]
"""What to write on top of a head; nothing: leave it. May raise, and nothing is written then."""


class Partitions:
    """Reads and moves the heads of one entity type's partitions."""

    def __init__(self, database: Database, entity: str, schema_version: int) -> None:
        self._database = database
        self._entity, self._schema_version = entity, schema_version
        self._patience_s = database.settings.write_patience_s
        self._sql = Statements(database.keyspace, entity)
        self._index = IndexStatements(database.keyspace)

    def head(self, key: str, *, serial: bool = False) -> Head:
        """The head as committed now; ``serial`` settles a write that is under way first."""
        rows = self._database.execute(self._sql.head, [key], serial=serial)
        if not rows or rows[0].head_version is None:
            return Head(fence=rows[0].fence if rows else None)
        found = rows[0]
        return Head(found.head_version, found.head_change_id, found.fence, found.after)

    def version_of(self, key: str, change_id: UUID, since: int) -> tuple[int, Kind] | None:
        """Version and kind of a change of this key; ``None``: there is no such change.

        Cost: a look at each change with a version after ``since``.
        """
        rows = self._database.execute(self._sql.version_of, [key, since, change_id])
        return (rows[0].version, Kind(rows[0].kind)) if rows else None

    def move(self, key: str, plan: Plan) -> tuple[Head, Sequence[Step]]:
        """Write the steps of a plan; the head they stand on, and the steps themselves.

        Lost races are planned again on the new head. Raises Unavailable when that went on for
        ``cassandra.write_patience_s``, or the outcome could not be told for so long: the write is
        announced then, so that the publisher finds it if it was done.
        """
        deadline, pause_s = time.monotonic() + self._patience_s, _PAUSE_S
        while True:
            head = self.head(key)
            steps = plan(head)
            if not steps:
                return head, ()
            # Before the write, and after its head was read: a fence that forgets this
            # announcement then also makes this write fail (see Publisher).
            self.announce(key, steps[-1].version)
            if self._compare_and_set(key, head, steps, deadline):
                return head, steps
            if time.monotonic() > deadline:
                said = f"{self._entity} {key!r}: lost against other writers for "
                said = f"{said}{self._patience_s:g} s; nothing was written."
                raise Unavailable(said, public=said)
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(_PAUSE_S_MAX, pause_s * 2)

    def announce(self, key: str, version: int, again_from: int | None = None) -> None:
        """Say that the log may lack changes of this key up to a version.

        ``again_from``: send the changes from that version on, whether the log has them or not.
        """
        bucket = int(time.time()) // BUCKET_S
        values = [bucket, uuid4(), self._entity, key, version, unless_null(again_from)]
        self._database.execute(self._index.announce, values)

    def _compare_and_set(
        self, key: str, head: Head, steps: Sequence[Step], deadline: float
    ) -> bool:
        """Whether the steps were written; ``False``: another write came first.

        When that is unknown the head is read with SERIAL, which settles it; a write that was not
        done is done again with the same id and the same condition, and so at most once.
        """
        batch, last, repeated = self._batch(key, head, steps), steps[-1], False
        while True:
            try:
                if self._database.execute_if(batch)[0]:
                    return True
                # A repeated write is refused where its first attempt was done.
                return repeated and self._is_there(key, last)
            except UNKNOWN as cause:
                unknown: BaseException = cause
            repeated = True
            try:
                now = self.head(key, serial=True)
                if now.version >= last.version:
                    return self._is_there(key, last)
                if now != head:
                    return False
            except Unavailable:
                # Not to be told now: asked again until the patience ends.
                time.sleep(_PAUSE_S_MAX)
            if time.monotonic() > deadline:
                said = f"{self._entity} {key!r}: Cassandra does not say whether version "
                said = f"{said}{last.version} was written"
                raise Unavailable(
                    f"{said} ({type(unknown).__name__}).",
                    advice="Read the entity, or repeat the call: an equal state is no change.",
                    public=f"{said}.",
                ) from unknown

    def _is_there(self, key: str, step: Step) -> bool:
        rows = self._database.execute(self._sql.change_id, [key, step.version], serial=True)
        return bool(rows) and rows[0].change_id == step.row.change_id

    def _batch(
        self, key: str, head: Head, steps: Sequence[Step]
    ) -> list[tuple[str, Sequence[object]]]:
        last = steps[-1]
        expected = head.version or None
        moved = [last.version, last.row.change_id, key, expected, head.fence]
        recorded_at = datetime.now(UTC).isoformat(timespec="microseconds")
        batch: list[tuple[str, Sequence[object]]] = [(self._sql.move_head, moved)]
        for version, kind, row, before, chained in steps:
            values = [
                key,
                version,
                row.change_id,
                kind.value,
                self._schema_version,
                row.occurred_at,
                recorded_at,
                row.provenance,
                unless_null(row.event),
                unless_null(row.state),
                unless_null(None if chained else before),
                chained,
            ]
            batch.append((self._sql.add, values))
        return batch
