"""The table of dead changes, and the batches in which they are published (C19).

The keeper records a dead change in the transaction that moves the position; a sender publishes
the records in numbered batches. A batch keeps its number until it is published, so that after a
kill the progress in the log shows whether it was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

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


class DeadLetterTable(Schema):
    """The table of dead changes, which is their outbox."""

    def views_id(self) -> UUID:
        """The id of this views database; batch numbers are only valid together with it."""
        found: UUID = self.value("SELECT views_id FROM {identity}")
        return found

    def numbered(self) -> list[DeadChange]:
        """All dead changes of the oldest numbered batch that is not known to be published."""
        return self._read_dead(
            "batch = (SELECT min(batch) FROM {dead} WHERE published_at IS NULL) "
            "AND published_at IS NULL ORDER BY id",
        )

    def unnumbered(self, limit: int) -> list[DeadChange]:
        """Dead changes that belong to no batch yet, oldest first."""
        condition = "batch IS NULL AND published_at IS NULL ORDER BY id LIMIT %s"
        return self._read_dead(condition, limit)

    def last_batch(self) -> int:
        """Highest batch number that was assigned, 0 before the first."""
        return int(self.value("SELECT coalesce(max(batch), 0) FROM {dead}"))

    def number(self, batch: int, ids: Sequence[int]) -> None:
        """Put dead changes into a numbered batch, before it is published."""
        self.run("UPDATE {dead} SET batch = %s WHERE id = ANY(%s)", (batch, list(ids)))

    def dissolve(self, batch: int) -> None:
        """Dissolve a batch that the log refused; its changes have no number again."""
        query = "UPDATE {dead} SET batch = NULL WHERE batch = %s AND published_at IS NULL"
        self.run(query, (batch,))

    def mark_published(self, batch: int) -> int:
        """Mark a batch as published; returns how many changes it had."""
        query = "UPDATE {dead} SET published_at = now() WHERE batch = %s AND published_at IS NULL"
        return self.run(query, (batch,)).rowcount

    def mark_refused(self, dead: int, reason: str) -> None:
        """Mark a dead change that the log refuses: it stays in the table, with both reasons."""
        self.run(
            "UPDATE {dead} SET published_at = now(), reason = reason || '; not sent: ' || %s "
            "WHERE id = %s",
            (reason, dead),
        )

    def _read_dead(self, condition: str, *parameters: Any) -> list[DeadChange]:
        found = []
        for row in self.run("SELECT " + _COLUMNS + " FROM {dead} WHERE " + condition, parameters):
            place, names, values, batch = row[:9], row[9], row[10], row[11]
            headers = tuple(zip(names, values, strict=True))
            found.append(DeadChange(*(*place, headers, batch)))
        return found
