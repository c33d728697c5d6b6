"""Rows of a version in another store than PostgreSQL, for who reads a view without Spark.

The registry has the types of a version's columns, as Spark gave them when it was built.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping

import pyarrow as pa

from everstate.changes import EntityType
from everstate.config import Config
from everstate.views.control import ViewVersion
from everstate.views.plan import plan_of
from everstate.views.stores import versioned_store
from everstate.views.tables import Row


def types_text(types: Mapping[str, pa.DataType]) -> str:
    """Types by column, as the registry stores them."""
    return b64encode(pa.schema(types.items()).serialize()).decode()


def stored_rows(
    config: Config, row: ViewVersion, entity_types: Mapping[str, EntityType]
) -> tuple[tuple[str, ...], Iterator[Row]]:
    """Names of columns, and all rows of a built version in its store's own order.

    The first column is the key, and the last one the version. Raises InvalidView, also when the
    store cannot be loaded; reading the rows raises ViewFailed. Some thousand rows are in memory.
    """
    table = plan_of(row, entity_types).ruled_table(row.version)
    types = pa.ipc.read_schema(pa.py_buffer(b64decode((row.built or {})["types"])))
    known = {"key": pa.string(), "version": pa.int64(), **{each.name: each.type for each in types}}
    columns = ("key", *(column for _, column in table.outputs), "version")
    schema = pa.schema([(name, known[name]) for name in dict.fromkeys(columns)])
    store = versioned_store(config, row.name, row.store, row.attempt)
    found = (
        tuple(stored[column] for column in columns)
        for batch in store.read(table, schema)
        for stored in batch.to_pylist(maps_as_pydicts="strict")
    )
    return ("_key", *(output for output, _ in table.outputs), "_version"), found
