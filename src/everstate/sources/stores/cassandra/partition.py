"""One entity's partition: its head (newest version), and the only way to advance it (C9)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import UUID, uuid4

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_random_exponential

from everstate.cassandra import UNKNOWN, Database, unless_null
from everstate.changes import Kind
from everstate.errors import Unavailable
from everstate.sources.stores.cassandra.schema import CassandraStatements, IndexStatements
from everstate.sources.stores.rows import PreparedRow

BUCKET_S: Final = 1
_PAUSE_S_MAX: Final = 0.25


@dataclass(frozen=True, slots=True)
class Head:
    """An entity's newest version; version 0 and no state when it was never written."""

    version: int = 0
    change_id: UUID | None = None
    fence: UUID | None = None
    state: str | None = None
    recorded_at: str = ""
    """When it was recorded, as it is stored: texts of UTC, which have the order of their times."""


class WriteStep(NamedTuple):
    """One change to be written; ``before`` is stored unless it is the state of the row below."""

    version: int
    kind: Kind
    row: PreparedRow
    before: str | None
    chained: bool = True


Plan = Callable[[Head], Sequence[WriteStep]]
"""Returns the steps to write after a head, or none; if it raises, nothing is written."""


class Partitions:
    """Reads and advances the heads of one entity type's partitions."""

    def __init__(self, database: Database, entity: str, schema_version: int) -> None:
        self._database = database
        self._entity, self._schema_version = entity, schema_version
        self._patience_s = database.settings.write_patience_s
        self._sql = CassandraStatements(database.keyspace, entity)
        self._index = IndexStatements(database.keyspace)
        self._until_written = Retrying(
            retry=retry_if_result(lambda moved: moved is None),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.002, max=_PAUSE_S_MAX),
            retry_error_callback=lambda _: None,
        )

    def head(self, key: str, *, serial: bool = False) -> Head:
        """The committed head; a ``serial`` read first settles a write in progress."""
        rows = self._database.execute(self._sql.head, [key], serial=serial)
        if not rows or rows[0].head_version is None:
            return Head(fence=rows[0].fence if rows else None)
        found = rows[0]
        return Head(
            found.head_version, found.head_change_id, found.fence, found.after, found.recorded_at
        )

    def version_of(
        self, key: str, change_id: UUID, since: int
    ) -> tuple[int, Kind, str | None] | None:
        """Version and kind of a change of this key, and its state; ``None``: there is no such one.

        Cost: reads each change with a version after ``since``.
        """
        rows = self._database.execute(self._sql.version_of, [key, since, change_id])
        return (rows[0].version, Kind(rows[0].kind), rows[0].after) if rows else None

    def move(self, key: str, plan: Plan) -> tuple[Head, Sequence[WriteStep]]:
        """Write the steps of a plan; returns the head before them, and the steps.

        When another writer comes first, it plans again on the new head. Raises Unavailable when
        this failed for ``cassandra.write_patience_s``, or when the outcome was unknown for that
        long: the write is announced then, so that the publisher finds it if it was done.
        """
        deadline = time.monotonic() + self._patience_s

        def attempt() -> tuple[Head, Sequence[WriteStep]] | None:
            head = self.head(key)
            steps = plan(head)
            if not steps:
                return head, ()
            # After the head was read and before the write: if the publisher's fence discards this
            # announcement, it then also makes this write fail (see Publisher).
            self.announce(key, steps[-1].version)
            return (head, steps) if self._compare_and_set(key, head, steps, deadline) else None

        moved = self._until_written(attempt)
        if moved is None:
            reason = f"{self._entity} {key!r}: every attempt conflicted with other writers for "
            reason = f"{reason}{self._patience_s:g} s; nothing was written."
            raise Unavailable(reason, public=reason)
        return moved

    def announce(self, key: str, version: int, again_from: int | None = None) -> None:
        """Announce that the log may lack changes of this key up to a version.

        ``again_from``: publish the changes from that version on, even if the log has them.
        """
        bucket = int(time.time()) // BUCKET_S
        values = [bucket, uuid4(), self._entity, key, version, unless_null(again_from)]
        self._database.execute(self._index.announce, values)

    def _compare_and_set(
        self, key: str, head: Head, steps: Sequence[WriteStep], deadline: float
    ) -> bool:
        """Whether the steps were written; ``False``: another write came first.

        When the outcome is unknown, a SERIAL read of the head settles it. A write that was not done
        is repeated with the same id and the same condition, so it is done at most once.
        """
        batch, last, repeated = self._batch(key, head, steps), steps[-1], False
        while True:
            try:
                if self._database.execute_if(batch)[0]:
                    return True
                # A repeated write is refused when its first attempt was done.
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
                # The outcome is still unknown: read again until the deadline.
                time.sleep(_PAUSE_S_MAX)
            if time.monotonic() > deadline:
                reason = f"{self._entity} {key!r}: Cassandra does not say whether version "
                reason = f"{reason}{last.version} was written"
                raise Unavailable(
                    f"{reason} ({type(unknown).__name__}).",
                    advice="Read the entity, or repeat the call: an equal state is no change.",
                    public=f"{reason}.",
                ) from unknown

    def _is_there(self, key: str, step: WriteStep) -> bool:
        rows = self._database.execute(self._sql.change_id, [key, step.version], serial=True)
        return bool(rows) and rows[0].change_id == step.row.change_id

    def _batch(
        self, key: str, head: Head, steps: Sequence[WriteStep]
    ) -> list[tuple[str, Sequence[object]]]:
        last = steps[-1]
        expected = head.version or None
        moved = [last.version, last.row.change_id, key, expected, head.fence]
        # The last version may come from a writer whose clock is ahead: time must not run back.
        recorded_at = max(head.recorded_at, datetime.now(UTC).isoformat(timespec="microseconds"))
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
