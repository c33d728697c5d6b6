"""What tests of the store in Cassandra share: a keyspace of their own, and what was committed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from everstate.config import Config
from everstate.sources.stores.cassandra import CassandraStore, Database
from everstate.sources.stores.cassandra.schema import table_of
from everstate.testing.store_contract import ORDER
from kit.settings import altered

OWN_TABLES = ("unpublished", "published", "answered", "published_to")


class Committed(NamedTuple):
    """A change as Cassandra has it."""

    change_id: str
    entity: str
    key: str
    version: int
    kind: str
    before: str | None
    after: str | None
    block: None
    event: str | None
    occurred_at: str


@contextmanager
def own_keyspace(config: Config) -> Iterator[Config]:
    """Settings with a keyspace that nobody else has; its tables are made, and dropped after it."""
    own = altered(config, cassandra={"keyspace": f"t{uuid.uuid4().hex[:12]}"})
    with CassandraStore(own, ORDER) as store:
        store.install()
    try:
        yield own
    finally:
        with Database(own) as database:
            database.define(f"DROP KEYSPACE {database.keyspace}")


def empty(database: Database) -> None:
    """Empty every table of the keyspace."""
    for table in (*OWN_TABLES, f"e_{ORDER.name}"):
        database.define(f"TRUNCATE {database.keyspace}.{table}")


def committed(database: Database, entity: str = ORDER.name) -> list[Committed]:
    """Every change, key by key in the order of versions."""
    query = (
        "SELECT key, version, change_id, kind, after, before, chained, event, occurred_at"
        f" FROM {table_of(database.keyspace, entity)}"
    )
    rows: list[Any] = [row for row in database.execute(query) if row.version is not None]
    found, below = list[Committed](), dict[str, str | None]()
    for row in sorted(rows, key=lambda row: (row.key, row.version)):
        before = below.get(row.key) if row.chained else row.before
        below[row.key] = row.after
        found.append(
            Committed(
                str(row.change_id),
                entity,
                row.key,
                row.version,
                row.kind,
                before,
                row.after,
                None,
                row.event,
                row.occurred_at,
            )
        )
    return found
