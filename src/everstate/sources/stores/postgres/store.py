"""The source of truth in PostgreSQL: each write stores entity and change in one transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any, Final, TypeVar, Unpack

import msgspec
from psycopg.errors import UndefinedTable

from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.changes.keys import check_key
from everstate.config import Config
from everstate.errors import ChangeTooLarge, InvalidQuery, Unavailable
from everstate.log.collector import collector_paused
from everstate.postgres import Connections
from everstate.sources.stores.postgres.database import (
    InsertedMeanwhile,
    OutboxConnection,
    connect,
    retried,
    translated,
)
from everstate.sources.stores.postgres.schema import install
from everstate.sources.stores.postgres.statements import (
    ANSWER,
    ANSWERED,
    COPY_INCOMING,
    FORGET,
    FORGET_INCOMING,
    INCOMING,
    INCOMING_TYPES,
    KEEP,
    SET_STATES,
    Statements,
)
from everstate.sources.stores.rows import (
    ENVELOPE_BYTES,
    KEY_FACTOR,
    PreparedRow,
    Settle,
    carried,
    check_expected,
    kind_of,
    prepare,
    row_of,
    shown_for_missing,
)
from everstate.sources.stores.store import (
    PAGE_BYTES_MAX,
    AnsweredBefore,
    GivenEntity,
    Kept,
    OneOrEach,
    Page,
    Scalar,
    Store,
    Versioned,
    Write,
    WriteOptions,
    Written,
    WrittenMany,
)

_FORGET_EVERY_S: Final = 600.0
_FORGET_ROWS: Final = 10_000

W = TypeVar("W")


def version_of(config: Config, entity: str, key: str) -> int | None:
    """Committed version of an entity, also of a deleted one; ``None``: it never existed.

    Uses a connection of its own. Raises Unavailable.
    """
    doing = "reading the store"
    with translated(config.store_dsn, doing), connect(config.store_dsn, "everstate-get") as used:
        try:
            found = used.execute(Statements(entity).get, [check_key(entity, key)]).fetchone()
        except UndefinedTable:
            return None  # nothing was ever written
    return None if found is None else int(found[0])


class EntityStore(Store):
    """The entities of one type, their versions, and the outbox of their changes.

    Every write is one transaction: version check, row, outbox row. A refused write stores nothing.
    ``put`` of a state equal to the stored one writes nothing and returns the present version (so
    imports and retries can be repeated); with ``force`` it writes a new version. With
    ``connection`` the write takes part in the caller's transaction on the same database, and the
    caller commits; otherwise the store retries after deadlocks and concurrent inserts.

    An answer is stored in the transaction of its write. The Idempotency-Key is inserted first, so
    that an equal concurrent request waits, and then finds the answer.

    Threads may share a store. Close it, or use it as a context manager.
    """

    def __init__(
        self, config: Config, entity_type: EntityType, *, connections_max: int = 8
    ) -> None:
        self.entity_type = entity_type
        self._dsn = config.store_dsn
        self._limit = config.log.message_bytes_max
        self._ahead_hours = config.log.occurred_ahead_hours
        self._scan_rows = config.api.scan_rows_max
        self._keep_s = config.api.idempotency_keep_hours * 3600
        self._forget_at = time.monotonic() + _FORGET_EVERY_S
        self._forgetting = threading.Lock()
        self._sql = Statements(entity_type.name)
        opened = partial(connect, self._dsn, f"everstate-store-{entity_type.name}")
        self._connections = Connections(opened, connections_max)

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def install(self) -> None:
        """Create the store's tables; idempotent."""
        with self._connected("installing the store") as connection:
            install(connection, [self.entity_type], answers=True)

    @contextmanager
    def transaction(self) -> Iterator[OutboxConnection]:
        """A transaction for several writes, of this store or others on the same database.

        It commits at the end of the block, and rolls back on an error.
        """
        with self._connected("writing") as connection, connection.transaction():
            yield connection

    def get(self, key: str, *, connection: OutboxConnection | None = None) -> Versioned | None:
        """The committed entity; ``None`` when it never existed or was deleted."""
        version, state = self._present(key, connection) or (0, None)
        return None if state is None else Versioned(self.entity_type.validate_json(state), version)

    def deleted_version(self, key: str) -> int | None:
        """The version that deleted the entity; ``None``: it exists, or never did."""
        version, state = self._present(key) or (None, None)
        return version if state is None else None

    def _present(
        self, key: str, connection: OutboxConnection | None = None
    ) -> tuple[int, str | None] | None:
        """Version and state of a key; the state of a deleted entity is ``None``."""
        with self._using(connection, "reading") as used:
            return used.execute(self._sql.get, [check_key(self.entity_type.name, key)]).fetchone()

    def page(
        self, *, limit: int, cursor: str | None = None, equal: Mapping[str, Scalar] | None = None
    ) -> Page:
        """A page in key order. Cost: at most `api.scan_rows_max` rows, fewer without filters."""
        shown = shown_for_missing(self.entity_type.model, equal or {})
        fields = [each for each in self.entity_type.columns if each.written in (equal or {})]
        former = [(each.written, was) for each in fields for was in each.former]
        numbers = {name: one for name, one in (equal or {}).items() if isinstance(one, Decimal)}
        others = {name: one for name, one in (equal or {}).items() if name not in numbers}
        values: dict[str, Any] = {
            "after": _key_of(cursor),
            # Deleted entities have rows as well, so a page without filters may be short too.
            "scan": self._scan_rows if equal else limit,
            "limit": limit,
            "bytes": PAGE_BYTES_MAX,
            "equal": msgspec.json.encode(others).decode(),
            "numbers": msgspec.json.encode(numbers).decode(),
            "missing": msgspec.json.encode(shown).decode(),
            "former": msgspec.json.encode(former).decode(),
        }
        with self._connected("reading") as connection:
            *rows, (last, looked, matching) = connection.execute(self._sql.page, values).fetchall()
        validate = self.entity_type.validate_json
        entities = [Versioned(validate(state), version) for _, version, state in rows]
        if len(rows) == limit or len(rows) < int(matching):
            return Page(entities, rows[-1][0])
        return Page(entities, last if looked == values["scan"] else None)

    def put(
        self,
        entity: GivenEntity,
        *,
        provenance: Provenance,
        force: bool = False,
        connection: OutboxConnection | None = None,
        **options: Unpack[WriteOptions],
    ) -> Written:
        """Create or update an entity.

        The options are those of :class:`~everstate.sources.stores.store.Write`:
        ``expected_version`` 0: it must not exist; n: its version must be n; ``None``: no
        condition. ``occurred_at`` ``None``: now. Raises VersionConflict, InvalidChange,
        MissingProvenance, ChangeTooLarge (all before anything is committed), and Unavailable. If
        the commit raised Unavailable, the write may have been committed: repeating the call is
        safe, since an equal state makes no change; give the expected version when others write the
        entity too.
        """
        write = Write(entity=entity, provenance=provenance, force=force, **options)
        return self.write(write, connection=connection)

    def delete(
        self,
        key: str,
        *,
        provenance: Provenance,
        connection: OutboxConnection | None = None,
        **options: Unpack[WriteOptions],
    ) -> Written:
        """Delete an entity; its version is kept, and continues if it is created again (C7).

        Raises NotFound when it does not exist, and otherwise as ``put``.
        """
        return self.write(Write(key=key, provenance=provenance, **options), connection=connection)

    def write(self, write: Write, *, connection: OutboxConnection | None = None) -> Written:
        """Create, update or delete, in one transaction with the change and the kept answer."""
        recorded_at, once = datetime.now(UTC), write.once
        # A taken id is reported before any other error of the same write.
        row = None if once else self._row(write, recorded_at)

        def attempt() -> Written:
            with self._using(connection, "writing") as used, used.transaction():
                if once and used.execute(KEEP, [once.id, once.fingerprint]).rowcount != 1:
                    raise AnsweredBefore(once.id)
                ready = row or self._row(write, recorded_at)
                written = self._attempt(used, ready, write, recorded_at)
                if once:
                    used.execute(ANSWER, [once.answer(written), once.id])
                return written

        written = self._tried(attempt, connection)
        if once:
            self._forget_sometimes()
        return written

    def answered(self, once_id: str) -> Kept | None:
        """The kept answer, for `api.idempotency_keep_hours`. Cost: one row by its key."""
        with self._connected("reading") as connection:
            found = connection.execute(ANSWERED, [once_id]).fetchone()
        return None if found is None else Kept(*found)

    def forget_old(self) -> int:
        """Delete expired answers, at most 10,000; returns how many."""
        with self._connected("forgetting answers") as connection:
            return connection.execute(FORGET, [self._keep_s, _FORGET_ROWS]).rowcount

    def _forget_sometimes(self) -> None:
        """Delete expired answers every ten minutes, in the first thread that calls this."""
        if time.monotonic() < self._forget_at or not self._forgetting.acquire(blocking=False):
            return
        try:
            self._forget_at = time.monotonic() + _FORGET_EVERY_S
            with suppress(Unavailable):
                self.forget_old()
        finally:
            self._forgetting.release()

    def put_many(
        self,
        entities: Iterable[GivenEntity],
        *,
        provenance: OneOrEach[Provenance],
        occurred_at: OneOrEach[datetime] | None = None,
        event: OneOrEach[DomainEvent | None] = None,
        force: bool = False,
        connection: OutboxConnection | None = None,
    ) -> WrittenMany:
        """Create or update many entities in one transaction, in their order.

        A key may occur several times: each state is a version. Provenance, time and event are one
        value for all, or a sequence with one for each. There are no expected versions. Raises as
        ``put`` does, and nothing was written then; a call that raised Unavailable may be repeated,
        but it writes keys with several states again. Cost: about 40 µs each in calls of 5,000; all
        rows of a call and the stored states of their keys are held in memory, and the changes are
        published in one transaction.
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
        rows: list[PreparedRow],
        recorded_at: datetime,
        *,
        force: bool = False,
        connection: OutboxConnection | None = None,
        settle: Settle | None = None,
        also: Callable[[OutboxConnection], None] | None = None,
    ) -> WrittenMany:
        """Write rows that :func:`prepare` made; the second half of ``put_many``.

        ``settle`` may give rows other states, by what is stored; otherwise a state that is equal to
        the one before it is no change. ``also`` is done in the same transaction.
        """
        if not rows:
            return WrittenMany(changes=0, keys=0, unchanged=0)

        def attempt() -> WrittenMany:
            with self._using(connection, "writing") as used, used.transaction():
                written = self._attempt_many(used, rows, recorded_at, force, settle)
                if also is not None:
                    also(used)
                return written

        return self._tried(attempt, connection)

    def _row(self, write: Write, recorded_at: datetime) -> PreparedRow:
        return row_of(self.entity_type, write, recorded_at, self._ahead_hours)

    def _attempt(
        self, connection: OutboxConnection, row: PreparedRow, write: Write, recorded_at: datetime
    ) -> Written:
        name = self.entity_type.name
        version, before = connection.execute(self._sql.lock, [row.key]).fetchone() or (0, None)
        check_expected(name, row, before, version, write.expected_version)
        row = carried(self.entity_type, row, before)
        kind = kind_of(self.entity_type, row, before, force=write.force, limit=self._limit)
        if kind is None:
            return Written(key=row.key, version=version)
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
        self,
        connection: OutboxConnection,
        rows: list[PreparedRow],
        recorded_at: datetime,
        force: bool,
        settle: Settle | None,
    ) -> WrittenMany:
        connection.execute(INCOMING)
        connection.execute(FORGET_INCOMING)
        with connection.cursor().copy(COPY_INCOMING) as copy:
            copy.set_types(INCOMING_TYPES)
            for n, row in enumerate(rows):
                copy.write_row((n, *row))
        (locked,) = connection.execute(self._sql.lock_many).fetchone() or (0,)
        stored = dict(connection.execute(self._sql.before_many).fetchall()) if locked else {}
        if texts := self._settled(stored, rows, force, settle):
            connection.execute(SET_STATES, [list(texts), list(texts.values())])
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
        changes, keys, written, existing, largest_key, largest_bytes = found
        if (written, existing) != (keys, locked):
            raise InsertedMeanwhile
        if changes and largest_bytes > self._limit:
            raise ChangeTooLarge(self.entity_type.name, largest_key, largest_bytes, self._limit)
        return WrittenMany(changes=changes, keys=keys, unchanged=len(rows) - changes)

    def _settled(
        self,
        stored: Mapping[str, str],
        rows: Sequence[PreparedRow],
        force: bool,
        settle: Settle | None,
    ) -> dict[int, str]:
        """The states that are written instead of those of their rows, each after the one before.

        A state that is equal to the one before it gets the text of that.
        """
        texts = {} if settle is None else settle(stored, rows)
        if not stored and not self.entity_type.has_many_texts:
            return texts
        before = dict(stored)
        for n, given in enumerate(rows):
            old = before.get(given.key)
            row = given if n not in texts else given._replace(state=texts[n])
            state = carried(self.entity_type, row, old).state or ""
            if old is not None and not force and self.entity_type.is_equal(old, state):
                state = old
            before[given.key] = state
            if state != given.state:
                texts[n] = state
        return texts

    @contextmanager
    def _connected(self, doing: str) -> Iterator[OutboxConnection]:
        doing = f"{self.entity_type.name}: {doing}"
        with translated(self._dsn, doing), self._connections.lend() as connection:
            yield connection

    @contextmanager
    def _using(self, connection: OutboxConnection | None, doing: str) -> Iterator[OutboxConnection]:
        """The caller's connection as it is, or one of the store's with its errors translated."""
        if connection is not None:
            yield connection
            return
        with self._connected(doing) as ours:
            yield ours

    def _tried(self, attempt: Callable[[], W], connection: OutboxConnection | None) -> W:
        doing = f"{self.entity_type.name}: writing"
        return retried(attempt, doing, in_callers_transaction=connection is not None)


def _key_of(cursor: str | None) -> str:
    """The key after which a page starts: a cursor holds the last key that was read."""
    if cursor is None:
        return ""
    if not cursor or "\x00" in cursor:
        raise InvalidQuery("cursor: expected the cursor of an earlier page.")
    return cursor
