"""Deferred (throttled) changes of a view: stored with its position, and applied later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa

from everstate.postgres import Connection
from everstate.views.batch import Batch
from everstate.views.control.schema import Schema
from everstate.views.control.verdicts import packed, unpacked
from everstate.views.policies import deferred, taken
from everstate.views.tables import KeptTable, planned_columns

DEFERRED_MAX: Final = 2_000_000
"""Most deferred changes of a view; with more, the view is behind until there is room."""
PART_CHANGES: Final = 2_000
"""Most changes that are applied in one transaction, for which the core may have to wait."""
_NEEDED: Final = ("offset", "key", "version", "occurred_at", "recorded_at")
"""Columns of changes that merges read besides the planned columns of the view."""
_PLACE: Final = "view = %s AND version = %s AND generation = %s AND partition = %s"
_COMPRESSION: Final = "lz4"
_OFFSETS: Final = pa.ipc.IpcReadOptions(included_fields=[_NEEDED.index("offset")])


class DeferredFull(psycopg.DatabaseError):
    """No more changes may be deferred: only this view is behind, as when a write is refused."""

    sqlstate = psycopg.errors.ProgramLimitExceeded.sqlstate


class Deferred(Schema):
    """The deferred changes of one version of a view in one partition, in parts."""

    def __init__(
        self,
        connection: Connection,
        schema_name: str,
        table: KeptTable,
        generation: int,
        partition: int,
    ) -> None:
        super().__init__(connection, schema_name)
        self._kept = table
        self._place = (table.view, table.version, generation, partition)

    def pass_on(self, batch: Batch) -> Batch:
        """The changes that the view applies now; the others are stored, in the same transaction."""
        batch = taken(self._kept, batch)
        later = deferred(self._kept, batch, lambda keys: np.isin(keys.hashes, self._marks()))
        if not later.any():
            return batch
        needed = batch.changes.select([*_NEEDED, *planned_columns(self._kept)])
        self._defer(needed.filter(pa.array(later)), batch.keys.hashes[batch.keys.by_row[later]])
        return Batch(batch.changes.filter(pa.array(~later)), batch.floors)

    def _marks(self) -> npt.NDArray[np.uint32]:
        """Hashes of all keys with deferred changes; those of known parts are cached."""
        rows = self.run("SELECT id FROM {deferred} WHERE " + _PLACE, self._place)
        parts = {part for (part,) in rows}
        place = (self.connection.info.dsn, self.schema_name, *self._place)
        known = _SEEN.setdefault(place, {})
        for gone in known.keys() - parts:
            del known[gone]
        if missing := list(parts - known.keys()):
            for part, keys in self.run(
                "SELECT id, keys FROM {deferred} WHERE id = ANY(%s)", (missing,)
            ):
                known[part] = np.frombuffer(keys, dtype=np.uint32)
        return np.concatenate([np.empty(0, dtype=np.uint32), *known.values()])

    def _defer(self, changes: pa.Table, marks: npt.NDArray[np.uint32]) -> None:
        """Store changes; ``marks`` has the hash of each one's key."""
        waiting: int = self.value(
            "SELECT coalesce(sum(changes), 0)::bigint FROM {deferred} "
            "WHERE view = %s AND version = %s",
            self._place[:2],
        )
        if waiting + changes.num_rows > DEFERRED_MAX:
            raise DeferredFull(
                f"{waiting:,} throttled changes are waiting already, and at most {DEFERRED_MAX:,} "
                "can wait; the view continues when some of them have been applied"
            )
        for start in range(0, changes.num_rows, PART_CHANGES):
            part = changes.slice(start, PART_CHANGES)
            keys = np.unique(marks[start : start + PART_CHANGES]).tobytes()
            self.run(
                "INSERT INTO {deferred} (view, version, generation, partition, changes, "
                "first_offset, keys, rows) VALUES (%s, %s, %s, %s, %s, %s, %b, %b)",
                (*self._place, part.num_rows, _first(part), keys, packed(part, _COMPRESSION)),
            )

    def oldest(self) -> tuple[int, Batch] | None:
        """The oldest part: its number, and its planned changes."""
        query = "SELECT id, rows FROM {deferred} WHERE " + _PLACE + " ORDER BY id LIMIT 1"
        found = self.run(query, self._place).fetchone()
        return None if found is None else (found[0], Batch(unpacked(found[1]), {}))

    def applied(self, part: int, changes: pa.Table, count: int) -> None:
        """Forget the first ``count`` changes of a part, because they were applied.

        The keys of a part that is cut stay: later changes of these keys wait behind it.
        """
        if count >= changes.num_rows:
            self.run("DELETE FROM {deferred} WHERE id = %s", (part,))
            return
        rest = changes.slice(count)
        self.run(
            "UPDATE {deferred} SET changes = %s, first_offset = %s, rows = %b WHERE id = %s",
            (rest.num_rows, _first(rest), packed(rest, _COMPRESSION), part),
        )


def deferred_offsets(
    control: Schema, view: str, version: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Generation, partition and offsets of each deferred part; call it in a transaction."""
    query = control.statement(
        "SELECT generation, partition, rows FROM {deferred} WHERE view = %s AND version = %s "
        "ORDER BY id"
    )
    with control.connection.cursor(name="deferred_rows") as cursor:
        cursor.itersize = 20  # the server sends a few parts at a time
        for generation, partition, rows in cursor.execute(query, (view, version)):
            with pa.ipc.open_stream(rows, options=_OFFSETS) as reader:
                yield generation, partition, reader.read_all()["offset"].to_pylist()


def _first(changes: pa.Table) -> int:
    offset: int = changes["offset"][0].as_py()
    return offset


_SEEN: Final[dict[tuple[Any, ...], dict[int, npt.NDArray[np.uint32]]]] = {}
"""Hashes of the keys of parts, cached by place in this process; a part never changes."""
