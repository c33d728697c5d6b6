"""Deferred (throttled) changes of a view: stored with its position, and applied later.

A part of them is applied in a transaction of its own. It locks the core's position row first, as
the core itself does, so that the core waits for it and no rider is left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa

from everstate.views.batch import Batch
from everstate.views.control import Control
from everstate.views.gate import Keys
from everstate.views.policies import divided
from everstate.views.tables import KeptTable, planned_columns

DEFERRED_MAX: Final = 2_000_000
"""Most deferred changes of a view; with more, the view is behind until there is room."""
PART_CHANGES: Final = 500
"""Changes that are applied in one transaction, for which the core may have to wait."""
_NEEDED: Final = ("offset", "key", "version", "occurred_at", "recorded_at")
_APPENDED: Final = (*_NEEDED, "id", "kind", "schema_version", "raw_value")
"""Columns of changes that merges read besides the planned columns of the view."""
_IPC: Final = pa.ipc.IpcWriteOptions(compression="lz4")


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
        now, later = divided(self.table, batch, self._pending)
        if later.num_rows:
            self._defer(later)
        return now

    def _pending(self, keys: Keys) -> set[str]:
        """Keys with a deferred change; rarely also a key with the same hash as one of them."""
        marks = self._marks()
        if not len(marks):
            return set()
        names = keys.names.to_pylist()
        waits = np.isin(_marks_of(names), marks)
        return {names[row] for row in np.flatnonzero(waits)}

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

    def _defer(self, changes: pa.Table) -> None:
        waiting = self.control.deferred_count(self.table.view, self.table.version)
        if waiting + changes.num_rows > DEFERRED_MAX:
            raise DeferredFull(
                f"{waiting:,} throttled changes are waiting already, and at most {DEFERRED_MAX:,} "
                "can wait; the view continues when some of them have been applied"
            )
        own = _APPENDED if self.table.merge == "append" else _NEEDED
        kept = changes.select([*own, *planned_columns(self.table)])
        for start in range(0, kept.num_rows, PART_CHANGES):
            part = kept.slice(start, PART_CHANGES).combine_chunks()
            marks = np.unique(_marks_of(part["key"].to_pylist())).tobytes()
            self.control.defer(self._place, part["offset"].to_pylist(), marks, _packed(part))

    def oldest(self) -> tuple[int, Batch] | None:
        """The oldest part: its number, and its planned changes."""
        found = self.control.oldest_deferred(self._place)
        return None if found is None else (found[0], Batch(_unpacked(found[1]), {}))

    def forget(self, part: int) -> None:
        """Delete a part that was applied."""
        self.control.forget_deferred(part)


def _marks_of(keys: Sequence[str]) -> npt.NDArray[np.uint32]:
    """A hash of each key, the same in every process."""
    return np.fromiter((crc32(key.encode()) for key in keys), dtype=np.uint32, count=len(keys))


_SEEN: Final[dict[tuple[Any, ...], dict[int, npt.NDArray[np.uint32]]]] = {}
"""Hashes of the keys of parts, cached by place in this process; a part never changes."""


def _packed(changes: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, changes.schema, options=_IPC) as writer:
        writer.write_table(changes)
    return bytes(sink.getvalue())


def _unpacked(rows: bytes) -> pa.Table:
    with pa.ipc.open_stream(rows) as reader:
        return reader.read_all()
