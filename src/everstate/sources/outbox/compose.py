"""Makes the records of the log from outbox rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final, NamedTuple
from uuid import UUID

from psycopg import sql

from everstate.changes import (
    ChangeCodec,
    EntityType,
    SourceTransaction,
)
from everstate.config import Config
from everstate.errors import InvalidChange
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.sources.outbox.pending import Transaction
from everstate.sources.stores.postgres.database import OutboxConnection
from everstate.sources.stores.rows import stored_change

_ROWS: Final = sql.SQL("""
SELECT id, xid::text, entity, key, version, kind, change_id, schema_version, occurred_at,
    recorded_at, provenance, event, before, after
FROM unnest(%s::bigint[], %s::bigint[]) AS run (first, last)
JOIN everstate_store.outbox ON id BETWEEN run.first AND run.last
""")


class OutboxRow(NamedTuple):
    """One change as stored in the outbox."""

    id: int
    xid: str
    entity: str
    key: str
    version: int
    kind: str
    change_id: UUID
    schema_version: int
    occurred_at: str
    recorded_at: datetime
    provenance: str
    event: str | None
    before: str | None
    after: str | None


class Unsendable(Exception):
    """Rows that cannot be made into messages, one for each transaction that must not be sent."""

    def __init__(self, refused: Sequence[tuple[OutboxRow, str]]) -> None:
        self.refused = refused
        super().__init__(f"{refused[0][1]} ({len(refused)} transactions)")


def read_rows(
    connection: OutboxConnection, runs: Sequence[tuple[int, int]]
) -> dict[int, OutboxRow]:
    """Outbox rows in these ranges of ids, by id."""
    firsts, lasts = [run[0] for run in runs], [run[1] for run in runs]
    with connection.cursor(binary=True) as cursor:
        found = cursor.execute(_ROWS, [firsts, lasts]).fetchall()
    return {row[0]: OutboxRow._make(row) for row in found}


def digest_of(change_ids: Iterable[UUID]) -> str:
    """Short hash that identifies these changes, in the order given."""
    return blake2b(b"".join(one.bytes for one in change_ids), digest_size=16).hexdigest()


class Composer:
    """Makes the records of `.changes` and `.state` for the entity types that it knows."""

    def __init__(self, config: Config, entity_types: Iterable[EntityType]) -> None:
        names, limit = TopicNames(config.log.prefix), config.log.message_bytes_max
        self._ways: Mapping[str, tuple[ChangeCodec, str, str]] = {
            each.name: (
                ChangeCodec(each, message_bytes_max=limit),
                names.changes(each.name),
                names.state(each.name),
            )
            for each in entity_types
        }

    def compose(
        self, transactions: Sequence[Transaction], rows: Mapping[int, OutboxRow]
    ) -> list[OutRecord]:
        """Records of transactions, in their order.

        The transaction block of a part counts the changes of the whole transaction. Every change
        goes to `.changes`; the newest of each key also to `.state`, deletions included (C7). Raises
        Unsendable naming, for each failed transaction, the first row that cannot be made into a
        message.
        """
        changes: list[OutRecord] = []
        newest: dict[tuple[str, str], OutRecord] = {}
        refused: list[tuple[OutboxRow, str]] = []
        for transaction in transactions:
            block_id, count = f"pg:{transaction.xid}", transaction.count
            for index, pending in enumerate(transaction.rows, transaction.before + 1):
                row = rows[pending.id]
                block = SourceTransaction(id=block_id, index=index, count=count)
                try:
                    key, value, headers, topic, state_topic = self._message(row, block)
                except (InvalidChange, KeyError, ValueError, RecursionError) as cause:
                    refused.append((row, str(cause)))
                    break
                changes.append(OutRecord(topic, key, value, headers))
                newest[row.entity, row.key] = OutRecord(state_topic, key, value, headers)
        if refused:
            raise Unsendable(refused)
        changes.extend(newest.values())
        return changes

    def _message(
        self, row: OutboxRow, block: SourceTransaction
    ) -> tuple[bytes, bytes, Any, str, str]:
        way = self._ways.get(row.entity)
        if way is None:
            raise ValueError("the app has no entity type of this name")
        codec, topic, state_topic = way
        change = stored_change(row.entity, row.key, row, row.before, row.recorded_at, block)
        return *codec.encode(change), topic, state_topic
