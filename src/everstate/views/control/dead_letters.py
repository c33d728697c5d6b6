"""The table of dead changes, and the batches in which they are published (C19).

The keeper records a dead change in the transaction that moves the position; a sender publishes
the records in numbered batches. A batch keeps its number until it is published, so that after a
kill the progress in the log shows whether it was published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
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

    def unpublished(self, limit: int) -> list[DeadChange]:
        """All dead changes of the oldest numbered batch that is not known to be published.

        Where there is none: at most ``limit`` that belong to no batch yet, oldest first.
        """
        numbered = "batch = (SELECT min(batch) FROM {dead} WHERE published_at IS NULL)"
        return self._read_dead(numbered) or self._read_dead("batch IS NULL", limit)

    def number(self, ids: Sequence[int], above: int) -> int:
        """Put dead changes into a batch, before it is published; returns its number.

        It is above every number in the table, and above the one given.
        """
        query = "SELECT 1 + greatest(%s, max(batch)) FROM {dead}"
        batch: int = self.value(query, (above,))
        self.run("UPDATE {dead} SET batch = %s WHERE id = ANY(%s)", (batch, list(ids)))
        return batch

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

    def _read_dead(self, condition: str, limit: int | None = None) -> list[DeadChange]:
        found = []
        for row in self.run(
            "SELECT "
            + _COLUMNS
            + " FROM {dead} WHERE published_at IS NULL AND "
            + condition
            + " ORDER BY id LIMIT %s",
            (limit,),
        ):
            place, names, values, batch = row[:9], row[9], row[10], row[11]
            headers = tuple(zip(names, values, strict=True))
            found.append(DeadChange(*(*place, headers, batch)))
        return found
