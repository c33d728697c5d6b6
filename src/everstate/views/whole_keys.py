"""Calls the function of a Python view with all changes of some keys.

The function gets some keys with all of their changes, ordered by key and version; which keys are in
one call is arbitrary. So the rows of a key may depend only on that key's changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from everstate.changes.arrow import change_columns
from everstate.changes.json_numbers import decode
from everstate.changes.typed import typed_value
from everstate.errors import ViewFailed
from everstate.log.attempt import TookTooLong, within
from everstate.views.tables import PythonTable

PLACE: Final = "place"
"""Column that numbers the rows of a key, from 0."""
CALL_CHANGES: Final = 20_000
"""A call has about so many changes; a key's changes are never divided."""


class FunctionFailed(pa.ArrowInvalid):  # type: ignore[misc]
    """A function raised an error, or returned something other than declared."""


def input_schema(table: PythonTable) -> pa.Schema:
    """The schema of a function's argument."""
    return pa.schema([each for each in change_columns(table.fields) if each.name != "id"])


def called(table: PythonTable, changes: pa.Table) -> pa.Table:
    """Rows that the function returns for whole keys: `key`, `place`, and the declared columns.

    Raises FunctionFailed, and ViewFailed when the function does not end in its time.
    """
    limit_s = table.call_s_max * max(1.0, changes.num_rows / CALL_CHANGES)
    try:
        given = within(limit_s, table.function, changes)
        if isinstance(given, pa.RecordBatch):
            given = pa.Table.from_batches([given])
        if not isinstance(given, pa.Table):
            raise TypeError(f"it returned {type(given).__name__}, not a pyarrow.Table")
        wanted = pa.schema([("key", pa.string()), *table.returned])
        rows = given.select(wanted.names).cast(wanted).combine_chunks()
    except TookTooLong as slow:
        first, last = changes["key"][0].as_py(), changes["key"][-1].as_py()
        reason = f"{slow.reason} for {changes.num_rows:,} changes of the keys {first!r} to {last!r}"
        raise ViewFailed(table.view, reason) from None
    except BaseException as cause:
        # The function is the project's own code, and may raise anything, also SystemExit.
        raise FunctionFailed(f"its function failed: {type(cause).__name__}: {cause}") from cause
    foreign = pc.invert(pc.is_in(rows["key"], pc.unique(changes["key"])))
    if pc.any(foreign, min_count=0).as_py():
        key = rows["key"].filter(foreign)[0].as_py()
        raise FunctionFailed(
            f"its function returned a row of the key {key!r}, which was not in its input"
        )
    # A stable sort: the rows of a key stay in the order in which the function returned them.
    keys = np.asarray(rows["key"].to_pylist(), dtype=object)
    rows = rows.take(pa.array(np.argsort(keys, kind="stable"), pa.int64()))
    return rows.add_column(1, PLACE, _places(rows["key"]))


def _places(keys: pa.ChunkedArray) -> pa.Array:
    """Numbers from 0 within runs of equal keys."""
    if not len(keys):
        return pa.array([], pa.int32())
    codes = keys.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    lengths = np.diff(np.append(starts, len(codes)))
    return pa.array(np.arange(len(codes)) - np.repeat(starts, lengths), pa.int32())


def by_whole_keys(changes: pa.Table) -> Iterator[pa.Table]:
    """Changes that are ordered by key, in parts for one call each: no key is divided."""
    start, keys = 0, changes["key"]
    while start < len(keys):
        end = start + CALL_CHANGES
        if end < len(keys):
            more = pc.index(pc.not_equal(keys.slice(end), keys[end - 1]), True).as_py()
            end = len(keys) if more < 0 else end + more
        yield changes.slice(start, end - start)
        start = end


@dataclass(frozen=True)
class InBatch:
    """Calls a function with the changes of a Spark task, which are ordered by key and version."""

    table: PythonTable

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of all keys of the task; a key is never divided."""
        waiting: list[pa.RecordBatch] = []
        rows = 0
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            if rows < CALL_CHANGES:
                continue
            whole = unpacked(self.table, pa.Table.from_batches(waiting))
            keys = whole["key"]
            end = pc.index(pc.equal(keys, keys[-1]), True).as_py()
            if end:
                yield from called(self.table, whole.slice(0, end)).to_batches()
            rest = pa.Table.from_batches(waiting).slice(end)
            waiting, rows = rest.to_batches(), rest.num_rows
        if rows:
            whole = unpacked(self.table, pa.Table.from_batches(waiting))
            yield from called(self.table, whole).to_batches()


def unpacked(table: PythonTable, changes: pa.Table) -> pa.Table:
    """The argument of a function from planned changes.

    The column `argument` is a struct of what the changes have no column of their own for.
    """
    inside = changes["argument"].combine_chunks()
    columns: dict[str, Any] = {
        name: changes[name] for name in ("key", "version", "kind", "occurred_at", "recorded_at")
    }
    columns |= dict(zip([field.name for field in inside.type], inside.flatten(), strict=True))
    schema = input_schema(table)
    return pa.table([columns[name] for name in schema.names], names=schema.names).cast(schema)


def typed_states(texts: Sequence[str | None], fields: Sequence[pa.Field]) -> pa.Array:
    """Typed states from JSON texts; null for no text, and for a value that does not fit its type.

    A message that was written by an older model may lack a field, or have it with another type.
    """
    kind = pa.struct(list(fields))
    states = [None if text is None else typed_value(kind, decode(text)) for text in texts]
    return pa.array(states, kind)
