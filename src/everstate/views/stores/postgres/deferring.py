"""Deferred (throttled) changes of a view: stored with its position, and applied later.

A part of them is applied in a transaction of its own. It locks the core's position row first, as
the core itself does, so that the core waits for it and no rider is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa

from everstate.views.batch import Batch
from everstate.views.control import Control
from everstate.views.control.verdicts import unpacked
from everstate.views.gate import Bools, Keys
from everstate.views.policies import deferred, taken
from everstate.views.tables import KeptTable, planned_columns

DEFERRED_MAX: Final = 2_000_000
"""Most deferred changes of a view; with more, the view is behind until there is room."""
PART_CHANGES: Final = 2_000
"""Most changes that are applied in one transaction, for which the core may have to wait."""
_NEEDED: Final = ("offset", "key", "version", "occurred_at", "recorded_at")
_APPENDED: Final = (*_NEEDED, "id", "kind", "schema_version", "raw_value")
"""Columns of changes that merges read besides the planned columns of the view."""
_IPC: Final = pa.ipc.IpcWriteOptions(compression="lz4")
_OFFSETS: Final = pa.ipc.IpcReadOptions(included_fields=[_NEEDED.index("offset")])


class DeferredFull(psycopg.DatabaseError):
    """No more changes may be deferred: only this view is behind, as when a write is refused."""

    sqlstate = psycopg.errors.ProgramLimitExceeded.sqlstate


@dataclass(frozen=True, slots=True)
class Deferred:
    """The deferred changes of one version of a view in one partition."""

    control: Control
    table: KeptTable
    generation: int
    partition: int

    @property
    def _place(self) -> tuple[str, int, int, int]:
        return (self.table.view, self.table.version, self.generation, self.partition)

    def pass_on(self, batch: Batch) -> Batch:
        """The changes that the view applies now; the others are stored, in the same transaction."""
        batch = taken(self.table, batch)
        later = deferred(self.table, batch, self._waits)
        if not later.any():
            return batch
        own = _APPENDED if self.table.merge == "append" else _NEEDED
        kept = batch.changes.select([*own, *planned_columns(self.table)]).filter(pa.array(later))
        self._defer(kept, batch.keys.hashes[batch.keys.by_row[later]])
        return Batch(batch.changes.filter(pa.array(~later)), batch.floors)

    def _waits(self, keys: Keys) -> Bools:
        """Whether each key has a deferred change, or, rarely, the same hash as such a key."""
        marks = self._marks()
        if not len(marks):
            return np.zeros(len(keys), dtype=np.bool_)
        return np.isin(keys.hashes, marks)

    def _marks(self) -> npt.NDArray[np.uint32]:
        """Hashes of all keys with deferred changes; those of known parts are cached."""
        parts = self.control.deferred_parts(self._place)
        schema = (self.control.connection.info.dsn, self.control.schema_name)
        known = _SEEN.setdefault((*schema, *self._place), {})
        for gone in known.keys() - set(parts):
            del known[gone]
        missing = [part for part in parts if part not in known]
        if missing:
            for part, keys in self.control.deferred_keys(missing).items():
                known[part] = np.frombuffer(keys, dtype=np.uint32)
        if not parts:
            return np.empty(0, dtype=np.uint32)
        return np.concatenate([known[part] for part in parts])

    def _defer(self, changes: pa.Table, marks: npt.NDArray[np.uint32]) -> None:
        """Store changes; ``marks`` has the hash of each one's key."""
        waiting = self.control.deferred_count(self.table.view, self.table.version)
        if waiting + changes.num_rows > DEFERRED_MAX:
            raise DeferredFull(
                f"{waiting:,} throttled changes are waiting already, and at most {DEFERRED_MAX:,} "
                "can wait; the view continues when some of them have been applied"
            )
        for start in range(0, changes.num_rows, PART_CHANGES):
            part = changes.slice(start, PART_CHANGES)
            keys = np.unique(marks[start : start + PART_CHANGES]).tobytes()
            self.control.defer(self._place, part.num_rows, _first(part), keys, _packed(part))

    def oldest(self) -> tuple[int, Batch] | None:
        """The oldest part: its number, and its planned changes."""
        found = self.control.oldest_deferred(self._place)
        return None if found is None else (found[0], Batch(unpacked(found[1]), {}))

    def applied(self, part: int, changes: pa.Table, count: int) -> None:
        """Forget the first ``count`` changes of a part, because they were applied."""
        if count < changes.num_rows:
            rest = changes.slice(count)
            self.control.cut_deferred(part, rest.num_rows, _first(rest), _packed(rest))
        else:
            self.control.forget_deferred(part)


def deferred_offsets(
    control: Control, view: str, version: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Generation, partition and offsets of each deferred part; call it in a transaction."""
    for generation, partition, rows in control.deferred_rows(view, version):
        with pa.ipc.open_stream(rows, options=_OFFSETS) as reader:
            yield generation, partition, reader.read_all()["offset"].to_pylist()


def _first(changes: pa.Table) -> int:
    offset: int = changes["offset"][0].as_py()
    return offset


_SEEN: Final[dict[tuple[Any, ...], dict[int, npt.NDArray[np.uint32]]]] = {}
"""Hashes of the keys of parts, cached by place in this process; a part never changes."""


def _packed(changes: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changes.schema, options=_IPC) as writer:
        writer.write_table(changes)
    return bytes(sink.getvalue())
