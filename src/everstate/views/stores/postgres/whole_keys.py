"""Rows of Python views: all rows of a key are replaced when the key has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from everstate.changes import PROVENANCE_FIELDS
from everstate.errors import ViewFailed
from everstate.postgres import identifier
from everstate.views.batch import Batch
from everstate.views.stores.postgres.session import StoreSession
from everstate.views.tables import PythonTable, planned_column
from everstate.views.whole_keys import by_whole_keys, called, input_schema, typed_states, unpacked

_BEFORE: Final = (
    "SELECT kept.key, kept.version, kept.kind, kept.event ->> 'type', kept.occurred_at, "
    "kept.recorded_at, kept.provenance, kept.state::text FROM {} AS kept "
    "JOIN unnest(%s::text[], %s::bigint[]) AS asked(key, first) ON kept.key = asked.key "
    "AND kept.version < asked.first ORDER BY kept.key, kept.version"
)


def rows_of(session: StoreSession, schema_name: str, table: PythonTable, batch: Batch) -> pa.Table:
    """The rows that the function returns for the keys of a batch, from all of their changes.

    Raises FunctionFailed, and ViewFailed when the history lacks changes from before the batch, or
    the function does not end in its time.
    """
    planned = batch.changes
    argument = planned[planned_column(table, "change")]
    now = unpacked(table, planned.append_column("argument", argument))
    before = _before(session, schema_name, table, batch)
    whole = pa.concat_tables([before, now]).sort_by(
        [("key", "ascending"), ("version", "ascending")]
    )
    parts = by_whole_keys(whole.combine_chunks())
    return pa.concat_tables([called(table, part) for part in parts])


def _before(session: StoreSession, schema_name: str, table: PythonTable, batch: Batch) -> pa.Table:
    """Changes of the keys from before the batch, from the history."""
    keys, schema = batch.keys, input_schema(table)
    firsts = keys.versions[keys.firsts].tolist()
    asked = {k: v for k, v in zip(keys.names.to_pylist(), firsts, strict=True) if v > 1}
    if not asked:
        return schema.empty_table()
    query = _BEFORE.format(identifier(schema_name, table.history)).encode()
    given = (list(asked), list(asked.values()))
    rows: list[Any] = session.connection.execute(query, given).fetchall()
    missing = sum(asked.values()) - len(asked) - len(rows)
    if missing:
        raise ViewFailed(
            table.view,
            f"{table.history} lacks {missing:,} earlier changes of these keys; the view waits for "
            "them",
        )
    columns = list(zip(*rows, strict=True))
    states = typed_states(columns[7], table.fields)
    provenance = [
        {name: each.get(name) for name in PROVENANCE_FIELDS.values()} for each in columns[6]
    ]
    arrays = [
        *(pa.array(columns[place], schema.field(place).type) for place in range(6)),
        pa.array(provenance, schema.field("provenance").type),
        states,
        states.take(_places_before(columns[0])),
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _places_before(keys: Sequence[str]) -> pa.Array:
    """Index of the previous version's row; null for a first version."""
    return pa.array(
        [n - 1 if n and keys[n - 1] == key else None for n, key in enumerate(keys)], pa.int64()
    )
