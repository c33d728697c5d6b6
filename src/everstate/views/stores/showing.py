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
from everstate.views.stores import VersionedStore, versioned_store
from everstate.views.stores.store import HEADLINE, RANK
from everstate.views.tables import KeptTable, Row


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
    table, known, store = _stored(config, row, entity_types)
    columns = ("key", *(column for _, column in table.outputs), "version")
    schema = pa.schema([(name, known[name]) for name in dict.fromkeys(columns)])
    found = (
        tuple(stored[column] for column in columns)
        for batch in store.read(table, schema)
        for stored in batch.to_pylist(maps_as_pydicts="strict")
    )
    return ("_key", *(output for output, _ in table.outputs), "_version"), found


def found_rows(
    config: Config,
    row: ViewVersion,
    entity_types: Mapping[str, EntityType],
    words: str,
    limit: int,
    *,
    fresh: bool,
) -> tuple[tuple[str, ...], list[Row]]:
    """Names of columns, and the rows of a built version with some words, best first.

    The last four columns are key, version, rank and headline. ``fresh``: all rows up to the
    position that was read before the call. Raises as `stored_rows`, and ContradictoryQuery for a
    store without a search.
    """
    table, known, store = _stored(config, row, entity_types)
    outputs = [(output, known[column]) for output, column in table.outputs]
    schema = pa.schema([*outputs, ("_key", pa.string()), ("_version", pa.int64())])
    found = store.search(table, schema, words, limit, fresh=fresh)
    rows = [tuple(each.values()) for each in found.to_pylist(maps_as_pydicts="strict")]
    return (*schema.names, RANK, HEADLINE), rows


def _stored(
    config: Config, row: ViewVersion, entity_types: Mapping[str, EntityType]
) -> tuple[KeptTable, dict[str, pa.DataType], VersionedStore]:
    """The table of a built version, the types of its columns, and its store."""
    types = pa.ipc.read_schema(pa.py_buffer(b64decode((row.built or {})["types"])))
    known = {"key": pa.string(), "version": pa.int64(), **{each.name: each.type for each in types}}
    table = plan_of(row, entity_types).ruled_table(row.version)
    return table, known, versioned_store(config, row.name, row.store, row.attempt)
