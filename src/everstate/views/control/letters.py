"""The table of dead changes, and which of them go out together (C19).

The keeper records a dead change in the transaction that moves the position; a sender publishes
the records in numbered batches. A batch keeps its number until it is published, so that after a
kill the log's progress says whether it went out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from psycopg import sql

from everstate.views.control.schema import Schema

_COLUMNS: Final = (
    'id, topic, generation, partition, "offset", entity, reason, raw_key, raw_value, '
    "header_names, header_values, batch"
)


@dataclass(frozen=True, slots=True)
class DeadChange:
    """A record that could not be read or applied, byte-exact, with its place and reason."""

    id: int
    topic: str
    generation: int
    partition: int
    offset: int
    entity: str
    reason: str
    raw_key: bytes | None
    raw_value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    batch: int | None


class Letters(Schema):
    """The table of dead changes, which is their outbox."""

    def views_id(self) -> UUID:
        """Which views database this is: batch numbers of another one mean nothing here."""
        query = sql.SQL("SELECT views_id FROM {}").format(self.table("identity"))
        row = self.connection.execute(query).fetchone()
        assert row is not None
        found: UUID = row[0]
        return found

    def numbered(self) -> list[DeadChange]:
        """The oldest batch that has a number and is not known to be published, whole."""
        return self._read_dead(
            "batch = (SELECT min(batch) FROM {table} WHERE published_at IS NULL) "
            "AND published_at IS NULL ORDER BY id",
        )

    def unnumbered(self, limit: int) -> list[DeadChange]:
        """Dead changes that belong to no batch yet, oldest first."""
        condition = "batch IS NULL AND published_at IS NULL ORDER BY id LIMIT %s"
        return self._read_dead(condition, limit)

    def last_batch(self) -> int:
        """Highest batch number that was given, 0 before the first."""
        query = sql.SQL("SELECT coalesce(max(batch), 0) FROM {}").format(self.table("dead"))
        row = self.connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def number(self, batch: int, ids: Sequence[int]) -> None:
        """Put dead changes into a numbered batch, before it is published (D4)."""
        query = sql.SQL("UPDATE {} SET batch = %s WHERE id = ANY(%s)").format(self.table("dead"))
        self.connection.execute(query, (batch, list(ids)))

    def dissolve(self, batch: int) -> None:
        """Take a batch apart that the log refused; its changes are unnumbered again."""
        query = sql.SQL("UPDATE {} SET batch = NULL WHERE batch = %s AND published_at IS NULL")
        self.connection.execute(query.format(self.table("dead")), (batch,))

    def mark_published(self, batch: int) -> int:
        """Note that a batch was published; returns how many changes it had."""
        query = sql.SQL(
            "UPDATE {} SET published_at = now() WHERE batch = %s AND published_at IS NULL"
        ).format(self.table("dead"))
        return self.connection.execute(query, (batch,)).rowcount

    def mark_refused(self, dead: int, reason: str) -> None:
        """Note that no topic takes this one: it stays in the table, with both reasons."""
        query = sql.SQL(
            "UPDATE {} SET published_at = now(), reason = reason || '; not sent: ' || %s "
            "WHERE id = %s"
        ).format(self.table("dead"))
        self.connection.execute(query, (reason, dead))

    def _read_dead(self, condition: str, *parameters: Any) -> list[DeadChange]:
        query = sql.SQL("SELECT " + _COLUMNS + " FROM {table} WHERE " + condition)
        found = []
        for row in self.connection.execute(query.format(table=self.table("dead")), parameters):
            place, names, values, batch = row[:9], row[9], row[10], row[11]
            headers = tuple(zip(names, values, strict=True))
            found.append(DeadChange(*(*place, headers, batch)))
        return found
