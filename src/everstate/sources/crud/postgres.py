"""PostgreSQL as source of truth for the REST routes: the store of the outbox, pages, answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from typing import Any, Final

import msgspec
from psycopg import sql
from pydantic import BaseModel

from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.config import Config
from everstate.errors import InvalidQuery, Unavailable
from everstate.sources.crud.store import AnsweredBefore, Kept, Once, Page, Scalar
from everstate.sources.outbox import EntityStore, Versioned, Written
from everstate.sources.outbox.database import Connection, retried
from everstate.sources.outbox.schema import table_of

_INSTALL_LOCK: Final = 0x65766572_72657374  # "everrest"
_FORGET_EVERY_S: Final = 600.0
_FORGET_ROWS: Final = 10_000

# A page looks at no more than so many rows; of these it takes those that are wanted. The last key
# looked at comes along, because the next page begins there even when nothing was found.
_PAGE: Final = sql.SQL("""
WITH looked AS MATERIALIZED (
    SELECT key, version, state FROM {table}
    WHERE key > %(after)s ORDER BY key LIMIT %(scan)s
), wanted AS (
    SELECT key, version, state FROM looked
    WHERE state IS NOT NULL AND (%(equal)s::jsonb = '{{}}' OR state::jsonb @> %(equal)s::jsonb)
    ORDER BY key LIMIT %(limit)s
)
SELECT key, version, state FROM wanted
UNION ALL
SELECT max(key), count(*), NULL FROM looked
""")
_KEEP: Final = sql.SQL(
    "INSERT INTO everstate_store.answered (id, fingerprint) VALUES (%s, %s) ON CONFLICT DO NOTHING"
)
_ANSWER: Final = sql.SQL("UPDATE everstate_store.answered SET answer = %s WHERE id = %s")
_ANSWERED: Final = sql.SQL(
    "SELECT fingerprint, answer FROM everstate_store.answered WHERE id = %s AND answer IS NOT NULL"
)
_FORGET: Final = sql.SQL("""
DELETE FROM everstate_store.answered WHERE id IN (
    SELECT id FROM everstate_store.answered
    WHERE answered_at < now() - make_interval(secs => %s)
    ORDER BY answered_at LIMIT %s FOR UPDATE SKIP LOCKED
)
""")


class PostgresStore:
    """A :class:`~everstate.sources.crud.store.Store` in PostgreSQL.

    An answer is kept in the transaction of its write. The Idempotency-Key is taken first, so that
    the same request at the same time waits, and then finds the answer.
    """

    def __init__(
        self, config: Config, entity_type: EntityType, *, connections_max: int = 8
    ) -> None:
        self._store = EntityStore(config, entity_type, connections_max=connections_max)
        self._page_query = _PAGE.format(table=table_of(entity_type.name))
        self._scan_rows = config.api.scan_rows_max
        self._keep_s = config.api.idempotency_keep_hours * 3600
        self._forget_at = time.monotonic() + _FORGET_EVERY_S
        self._forgetting = threading.Lock()

    @property
    def entity_type(self) -> EntityType:
        """The type whose entities are here."""
        return self._store.entity_type

    def install(self) -> None:
        """Make the tables; idempotent."""
        self._store.install()
        script = files(__package__).joinpath("schema.sql").read_bytes()
        with self._store.transaction() as connection:
            # IF NOT EXISTS alone fails when two processes install at once.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_INSTALL_LOCK])
            connection.execute("SET LOCAL client_min_messages = warning")
            connection.execute(script)

    def close(self) -> None:
        """Give up the connections."""
        self._store.close()

    def get(self, key: str) -> Versioned | None:
        """The entity as committed now. Cost: one row by its key."""
        return self._store.get(key)

    def page(
        self, *, limit: int, cursor: str | None = None, equal: Mapping[str, Scalar] | None = None
    ) -> Page:
        """A page by key. Cost: at most `api.scan_rows_max` rows, fewer without filters."""
        values: dict[str, Any] = {
            "after": _key_of(cursor),
            # Graves are among the rows, so without filters a page may be short too.
            "scan": self._scan_rows if equal else limit,
            "limit": limit,
            "equal": msgspec.json.encode(dict(equal or {})).decode(),
        }
        with self._store.transaction() as connection:
            *rows, (last, looked, _) = connection.execute(self._page_query, values).fetchall()
        validate = self.entity_type.validate_json
        entities = [Versioned(validate(state), version) for _, version, state in rows]
        if len(rows) == limit:
            return Page(entities, rows[-1][0])
        return Page(entities, last if looked == values["scan"] else None)

    def put(
        self,
        entity: BaseModel | Mapping[str, Any],
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        once: Once | None = None,
    ) -> Written:
        """Create or update, in one transaction with the change and the kept answer."""

        def write(connection: Connection | None) -> Written:
            return self._store.put(
                entity,
                provenance=provenance,
                expected_version=expected_version,
                occurred_at=occurred_at,
                event=event,
                connection=connection,
            )

        return write(None) if once is None else self._once(once, write)

    def delete(
        self,
        key: str,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        once: Once | None = None,
    ) -> Written:
        """Delete, in one transaction with the change and the kept answer."""

        def write(connection: Connection | None) -> Written:
            return self._store.delete(
                key,
                provenance=provenance,
                expected_version=expected_version,
                occurred_at=occurred_at,
                event=event,
                connection=connection,
            )

        return write(None) if once is None else self._once(once, write)

    def answered(self, once_id: str) -> Kept | None:
        """What was kept, for `api.idempotency_keep_hours`. Cost: one row by its key."""
        with self._store.transaction() as connection:
            found = connection.execute(_ANSWERED, [once_id]).fetchone()
        return None if found is None else Kept(found[0], found[1])

    def _once(self, once: Once, write: Callable[[Connection], Written]) -> Written:
        def attempt() -> Written:
            with self._store.transaction() as connection:
                if connection.execute(_KEEP, [once.id, once.fingerprint]).rowcount != 1:
                    raise AnsweredBefore(once.id)
                written = write(connection)
                connection.execute(_ANSWER, [once.answer(written), once.id])
            return written

        doing = f"{self.entity_type.name}: writing"
        written = retried(attempt, doing, in_callers_transaction=False)
        self._forget_sometimes()
        return written

    def forget_old(self) -> int:
        """Delete answers that were kept long enough, at most 10,000; says how many."""
        with self._store.transaction() as connection:
            return connection.execute(_FORGET, [self._keep_s, _FORGET_ROWS]).rowcount

    def _forget_sometimes(self) -> None:
        """Every ten minutes, in whichever thread comes first."""
        if time.monotonic() < self._forget_at or not self._forgetting.acquire(blocking=False):
            return
        try:
            self._forget_at = time.monotonic() + _FORGET_EVERY_S
            with suppress(Unavailable):
                self.forget_old()
        finally:
            self._forgetting.release()


def _key_of(cursor: str | None) -> str:
    """The key after which a page begins: a cursor is the last key that was looked at."""
    if cursor is None:
        return ""
    if not cursor or "\x00" in cursor:
        raise InvalidQuery("cursor: expected the cursor of an earlier page.")
    return cursor
