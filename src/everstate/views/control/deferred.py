"""Deferred changes: planned changes of a view that wait because they are throttled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from psycopg import sql

from everstate.views.control.schema import Schema

DeferredPlace: TypeAlias = tuple[str, int, int, int]
"""View, version, generation and partition."""

_PLACE = "view = %s AND version = %s AND generation = %s AND partition = %s"


class DeferredChanges(Schema):
    """The table of deferred parts of planned changes, in the order in which they were deferred."""

    def deferred_parts(self, place: DeferredPlace) -> list[int]:
        """Numbers of the deferred parts, in the order in which they were deferred."""
        query = sql.SQL("SELECT id FROM {} WHERE " + _PLACE + " ORDER BY id")
        rows = self.connection.execute(query.format(self.table("deferred")), place)
        return [number for (number,) in rows]

    def deferred_keys(self, parts: Sequence[int]) -> dict[int, bytes]:
        """The stored keys of some parts, by the numbers of the parts."""
        query = sql.SQL("SELECT id, keys FROM {} WHERE id = ANY(%s)")
        rows = self.connection.execute(query.format(self.table("deferred")), (list(parts),))
        return dict(rows.fetchall())

    def deferred_count(self, view: str, version: int) -> int:
        """How many changes of a version are deferred."""
        query = sql.SQL(
            "SELECT coalesce(sum(changes), 0)::bigint FROM {} WHERE view = %s AND version = %s"
        ).format(self.table("deferred"))
        row = self.connection.execute(query, (view, version)).fetchone()
        return 0 if row is None else int(row[0])

    def deferred_counts(self) -> dict[tuple[str, int], dict[int, int]]:
        """How many changes are deferred, by view and version, and by partition."""
        query = sql.SQL(
            "SELECT view, version, partition, sum(changes)::bigint FROM {} "
            "GROUP BY view, version, partition ORDER BY view, version, partition"
        ).format(self.table("deferred"))
        found: dict[tuple[str, int], dict[int, int]] = {}
        for view, version, partition, changes in self.connection.execute(query):
            found.setdefault((view, version), {})[partition] = changes
        return found

    def deferred_first(self, view: str, version: int) -> dict[tuple[int, int], int]:
        """The first offset that a version has deferred, by generation and partition."""
        query = sql.SQL(
            "SELECT generation, partition, min(first_offset) FROM {} WHERE view = %s "
            "AND version = %s GROUP BY generation, partition"
        ).format(self.table("deferred"))
        rows = self.connection.execute(query, (view, version))
        return {(generation, partition): first for generation, partition, first in rows}

    def deferred_rows(self, view: str, version: int) -> Iterator[tuple[int, int, bytes]]:
        """Generation, partition and rows of each deferred part; call it in a transaction.

        The server sends a few parts at a time.
        """
        query = sql.SQL(
            "SELECT generation, partition, rows FROM {} WHERE view = %s AND version = %s "
            "ORDER BY id"
        ).format(self.table("deferred"))
        with self.connection.cursor(name="deferred_rows") as cursor:
            cursor.itersize = 20
            yield from cursor.execute(query, (view, version))

    def defer(
        self, place: DeferredPlace, changes: int, first_offset: int, keys: bytes, rows: bytes
    ) -> None:
        """Store a deferred part of planned changes, with its keys."""
        insert = sql.SQL(
            "INSERT INTO {} (view, version, generation, partition, changes, first_offset, keys, "
            "rows) VALUES (%s, %s, %s, %s, %s, %s, %b, %b)"
        ).format(self.table("deferred"))
        self.connection.execute(insert, (*place, changes, first_offset, keys, rows))

    def oldest_deferred(self, place: DeferredPlace) -> tuple[int, bytes] | None:
        """The oldest deferred part: its number and its rows."""
        query = sql.SQL("SELECT id, rows FROM {} WHERE " + _PLACE + " ORDER BY id LIMIT 1")
        found = self.connection.execute(query.format(self.table("deferred")), place).fetchone()
        return None if found is None else (found[0], found[1])

    def cut_deferred(self, part: int, changes: int, first_offset: int, rows: bytes) -> None:
        """Replace a part by its later changes, because the earlier ones were applied.

        Its stored keys stay: the changes of a key that is not in the part any more wait behind it.
        """
        update = sql.SQL(
            "UPDATE {} SET changes = %s, first_offset = %s, rows = %b WHERE id = %s"
        ).format(self.table("deferred"))
        self.connection.execute(update, (changes, first_offset, rows, part))

    def forget_deferred(self, part: int) -> None:
        """Delete a part that was applied."""
        query = sql.SQL("DELETE FROM {} WHERE id = %s").format(self.table("deferred"))
        self.connection.execute(query, (part,))
