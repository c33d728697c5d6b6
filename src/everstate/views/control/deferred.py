"""Deferred changes: planned changes of a view that wait because they are throttled."""

from __future__ import annotations

from collections.abc import Iterator

from everstate.views.control.schema import Schema


class DeferredChanges(Schema):
    """The table of deferred parts of planned changes; see :class:`~.deferring.Deferred`."""

    def deferred_counts(self) -> dict[tuple[str, int], dict[int, int]]:
        """How many changes are deferred, by view and version, and by partition."""
        rows = self.run(
            "SELECT view, version, partition, sum(changes)::bigint FROM {deferred} "
            "GROUP BY view, version, partition ORDER BY view, version, partition"
        )
        found: dict[tuple[str, int], dict[int, int]] = {}
        for view, version, partition, changes in rows:
            found.setdefault((view, version), {})[partition] = changes
        return found

    def deferred_first(self, view: str, version: int) -> dict[tuple[int, int], int]:
        """The first offset that a version has deferred, by generation and partition."""
        rows = self.run(
            "SELECT generation, partition, min(first_offset) FROM {deferred} WHERE view = %s "
            "AND version = %s GROUP BY generation, partition",
            (view, version),
        )
        return {(generation, partition): first for generation, partition, first in rows}

    def deferred_rows(self, view: str, version: int) -> Iterator[tuple[int, int, bytes]]:
        """Generation, partition and rows of each deferred part; call it in a transaction.

        The server sends a few parts at a time.
        """
        query = self.statement(
            "SELECT generation, partition, rows FROM {deferred} WHERE view = %s AND version = %s "
            "ORDER BY id"
        )
        with self.connection.cursor(name="deferred_rows") as cursor:
            cursor.itersize = 20
            yield from cursor.execute(query, (view, version))
