"""The source of truth in PostgreSQL: each write is one transaction with its change beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from psycopg.errors import UndefinedTable
from pydantic import BaseModel

from everstate.changes import DomainEvent, EntityType, Kind, Provenance, new_change_id
from everstate.changes.keys import check_key
from everstate.config import Config
from everstate.errors import ChangeTooLarge, NotFound, VersionConflict
from everstate.log.collector import collector_paused
from everstate.sources.outbox import marks
from everstate.sources.outbox.database import (
    Connection,
    Connections,
    InsertedMeanwhile,
    connect,
    retried,
    translated,
)
from everstate.sources.outbox.rows import (
    Entity,
    OneOrEach,
    Row,
    event_text,
    moment_text,
    prepare,
    provenance_text,
)
from everstate.sources.outbox.schema import install
from everstate.sources.outbox.statements import (
    COPY_INCOMING,
    ENVELOPE_BYTES,
    FORGET_INCOMING,
    INCOMING,
    INCOMING_TYPES,
    KEY_FACTOR,
    Statements,
)

W = TypeVar("W")


class Versioned(NamedTuple):
    """An entity as it is now, and its version."""

    entity: BaseModel
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one write did. ``change_id`` and ``kind`` are ``None`` when nothing changed."""

    key: str
    version: int
    kind: Kind | None = None
    change_id: UUID | None = None

    @property
    def changed(self) -> bool:
        """Whether there is a new change; an equal state is none."""
        return self.change_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMany:
    """What a set-based write did."""

    changes: int
    keys: int
    """Entities that have a new version."""
    unchanged: int
    """Entities of the call that were equal to what was there."""


def version_of(config: Config, entity: str, key: str) -> int | None:
    """The version that is committed of an entity, also when it was deleted; ``None``: never any.

    On a connection of its own. Raises Unavailable.
    """
    doing = "reading the store"
    with translated(config.store_dsn, doing), connect(config.store_dsn, "everstate-get") as used:
        try:
            found = used.execute(Statements(entity).get, [check_key(entity, key)]).fetchone()
        except UndefinedTable:
            return None  # nothing was ever written
    return None if found is None else int(found[0])


def oldest_unpublished_s(config: Config) -> float | None:
    """Age of the oldest change that is not in the log; ``None``: there is none.

    On a connection of its own. Raises Unavailable.
    """
    doing = "reading the outbox"
    with translated(config.store_dsn, doing), connect(config.store_dsn, "everstate-get") as used:
        try:
            return marks.oldest_unpublished_s(used)
        except UndefinedTable:
            return None  # nothing was ever written


class EntityStore:
    """The entities of one type, their versions, and the outbox of their changes.

    Every write is one transaction: version check, row, outbox row. A write that is refused leaves
    nothing behind. ``put`` of a state equal to the stored one writes nothing and returns the
    present version (so imports and retries can be repeated); ``force`` writes it all the same.
    With ``connection`` the write takes part in the caller's transaction on the same database, and
    the caller commits; otherwise deadlocks and lost races are retried here.

    Threads may share a store. Close it, or use it as a context manager.
    """

    def __init__(
        self, config: Config, entity_type: EntityType, *, connections_max: int = 8
    ) -> None:
        self.entity_type = entity_type
        self._dsn = config.store_dsn
        self._limit = config.log.message_bytes_max
        self._ahead_hours = config.log.occurred_ahead_hours
        self._sql = Statements(entity_type.name)
        self._connections = Connections(
            self._dsn, connections_max, f"everstate-store-{entity_type.name}"
        )

    def __enter__(self) -> EntityStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connections."""
        self._connections.close()

    def install(self) -> None:
        """Make the store's tables; idempotent."""
        with self._connected("installing the store") as connection:
            install(connection, [self.entity_type])

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction for several writes, of this store or others on the same database.

        It commits at the end of the block, and rolls back on an error.
        """
        with self._connected("writing") as connection, connection.transaction():
            yield connection

    def get(self, key: str, *, connection: Connection | None = None) -> Versioned | None:
        """The entity as committed now; ``None`` when there is none, or it was deleted."""
        with self._using(connection, "reading") as used:
            found = used.execute(self._sql.get, [check_key(self.entity_type.name, key)]).fetchone()
        if found is None or found[1] is None:
            return None
        return Versioned(self.entity_type.validate_json(found[1]), found[0])

    def put(
        self,
        entity: Entity,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        force: bool = False,
        connection: Connection | None = None,
    ) -> Written:
        """Create or update an entity.

        ``expected_version`` 0: it must not exist; n: it must be at n; ``None``: whatever is
        there. ``occurred_at`` ``None``: now. Raises VersionConflict, InvalidChange,
        MissingProvenance, ChangeTooLarge (all before anything is committed), and Unavailable. If
        that came from the commit, the write may be there: repeating the call is safe, since an
        equal state is no change; give the expected version when others write the entity too.
        """
        recorded_at = datetime.now(UTC)
        moment = occurred_at or recorded_at
        rows = prepare(
            self.entity_type,
            [entity],
            provenance=provenance,
            occurred_at=moment,
            event=event,
            ahead_hours=self._ahead_hours,
        )
        return self._write(next(iter(rows)), expected_version, recorded_at, force, connection)

    def delete(
        self,
        key: str,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        connection: Connection | None = None,
    ) -> Written:
        """Delete an entity; its version is kept, and goes on if it is created again (C7).

        Raises NotFound when there is none, and else as ``put``.
        """
        name, recorded_at = self.entity_type.name, datetime.now(UTC)
        row = Row(
            check_key(name, key),
            None,
            new_change_id(),
            moment_text(name, key, occurred_at or recorded_at, self._ahead_hours),
            provenance_text(name, key, provenance),
            None if event is None else event_text(name, key, event),
        )
        return self._write(row, expected_version, recorded_at, False, connection)

    def put_many(
        self,
        entities: Iterable[Entity],
        *,
        provenance: OneOrEach[Provenance],
        occurred_at: OneOrEach[datetime] | None = None,
        event: OneOrEach[DomainEvent | None] = None,
        force: bool = False,
        connection: Connection | None = None,
    ) -> WrittenMany:
        """Create or update many entities in one transaction, in their order.

        A key may come several times: each state is a version. Provenance, time and event are one
        for all, or a sequence with one for each. No expected versions here. Raises as ``put``
        does, and nothing was written then; a call that ended in Unavailable may be repeated, but
        writes again what has several states of one key. Cost: about 40 µs each in calls of 5,000;
        all rows of a call are held in memory, and go to the log in one transaction.
        """
        recorded_at = datetime.now(UTC)
        with collector_paused():
            rows = prepare(
                self.entity_type,
                entities if isinstance(entities, list) else list(entities),
                provenance=provenance,
                occurred_at=recorded_at if occurred_at is None else occurred_at,
                event=event,
                ahead_hours=self._ahead_hours,
            )
            return self.write_rows(list(rows), recorded_at, force=force, connection=connection)

    def write_rows(
        self,
        rows: list[Row],
        recorded_at: datetime,
        *,
        force: bool = False,
        connection: Connection | None = None,
    ) -> WrittenMany:
        """Write rows that were prepared before; the second half of ``put_many``."""
        if not rows:
            return WrittenMany(changes=0, keys=0, unchanged=0)

        def attempt() -> WrittenMany:
            with self._using(connection, "writing") as used, used.transaction():
                return self._attempt_many(used, rows, recorded_at, force)

        return self._tried(attempt, connection)

    def _write(
        self,
        row: Row,
        expected: int | None,
        recorded_at: datetime,
        force: bool,
        connection: Connection | None,
    ) -> Written:
        def attempt() -> Written:
            with self._using(connection, "writing") as used, used.transaction():
                return self._attempt(used, row, expected, recorded_at, force)

        return self._tried(attempt, connection)

    def _attempt(
        self,
        connection: Connection,
        row: Row,
        expected: int | None,
        recorded_at: datetime,
        force: bool,
    ) -> Written:
        name = self.entity_type.name
        version, before = connection.execute(self._sql.lock, [row.key]).fetchone() or (0, None)
        free = expected == 0 and before is None
        if expected is not None and expected != version and not free:
            raise VersionConflict(name, row.key, expected, version)
        if before is None and row.state is None:
            raise NotFound(f"{name} {row.key!r} does not exist; there is nothing to delete.")
        if before == row.state and not force:
            return Written(key=row.key, version=version)
        size = max(_bytes(before), _bytes(row.state)) + _bytes(row.provenance) + _bytes(row.event)
        size += ENVELOPE_BYTES + KEY_FACTOR * _bytes(row.key)
        if size > self._limit:
            raise ChangeTooLarge(name, row.key, size, self._limit)
        kind = Kind.CREATED if before is None else Kind.UPDATED
        kind = Kind.DELETED if row.state is None else kind
        values: dict[str, Any] = {
            "key": row.key,
            "version": version + 1,
            "after": row.state,
            "before": before,
            "change_id": row.change_id,
            "recorded_at": recorded_at,
            "entity": name,
            "kind": kind.value,
            "schema_version": self.entity_type.schema_version,
            "occurred_at": row.occurred_at,
            "provenance": row.provenance,
            "event": row.event,
        }
        if connection.execute(self._sql.write, values).rowcount != 1:
            raise InsertedMeanwhile
        return Written(key=row.key, version=version + 1, kind=kind, change_id=row.change_id)

    def _attempt_many(
        self, connection: Connection, rows: list[Row], recorded_at: datetime, force: bool
    ) -> WrittenMany:
        connection.execute(INCOMING)
        connection.execute(FORGET_INCOMING)
        with connection.cursor().copy(COPY_INCOMING) as copy:
            copy.set_types(INCOMING_TYPES)
            for n, row in enumerate(rows):
                copy.write_row((n, *row))
        connection.execute(self._sql.lock_many)
        values = {
            "entity": self.entity_type.name,
            "schema_version": self.entity_type.schema_version,
            "recorded_at": recorded_at,
            "force": force,
            "envelope_bytes": ENVELOPE_BYTES,
            "key_factor": KEY_FACTOR,
        }
        found = connection.execute(self._sql.write_many, values).fetchone()
        assert found is not None
        changes, keys, stored, largest_key, largest_bytes = found
        if stored != keys:
            raise InsertedMeanwhile
        if changes and largest_bytes > self._limit:
            raise ChangeTooLarge(self.entity_type.name, largest_key, largest_bytes, self._limit)
        return WrittenMany(changes=changes, keys=keys, unchanged=len(rows) - changes)

    @contextmanager
    def _connected(self, doing: str) -> Iterator[Connection]:
        doing = f"{self.entity_type.name}: {doing}"
        with translated(self._dsn, doing), self._connections.lend() as connection:
            yield connection

    @contextmanager
    def _using(self, connection: Connection | None, doing: str) -> Iterator[Connection]:
        """The caller's connection as it is, or one of ours with its errors translated."""
        if connection is not None:
            yield connection
            return
        with self._connected(doing) as ours:
            yield ours

    def _tried(self, attempt: Callable[[], W], connection: Connection | None) -> W:
        doing = f"{self.entity_type.name}: writing"
        return retried(attempt, doing, in_callers_transaction=connection is not None)


def _bytes(text: str | None) -> int:
    return 0 if text is None else len(text.encode())
