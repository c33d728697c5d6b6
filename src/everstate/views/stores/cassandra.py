"""Views in Cassandra: a table for each version, and a row that names it for readers.

A row or deletion is written with its version as its timestamp. So Cassandra itself keeps the newest
one, and a deletion beats each write up to its version, in whatever order they come. A row has all
its columns in each write, so that a null beats an older value, too. Cassandra has neither aliases
nor views whose table can be changed: readers read a row of the table that has the name of the
views' schema, and then the table that is named there. That row is written by conditional writes,
which have one order: with timestamps of clocks, an earlier one could win.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.types as types

from everstate.cassandra import Database
from everstate.config import CassandraConfig, Config
from everstate.errors import InvalidView, SourceError, ViewRowsMissing
from everstate.views.stores.postgres.types import check_range
from everstate.views.tables import KeptTable, Merge

_KEYS: Final[Mapping[Merge, tuple[str, ...]]] = {
    "row": ("_key",),
    "append": ("_key", "_version"),
}
"""The columns by which a row is found: the first one chooses the partition."""
_NAME_CHARACTERS_MAX: Final = 48
"""Characters of a table's name in Cassandra."""
_PAGE_ROWS: Final = 200
"""A page with 100,000 tombstones is refused, and a null is one of them."""
_DELETED_S: Final = 10 * 24 * 3600
"""How long deletions and nulls are kept: longer than a task of the pipeline may live."""
_TEXT: Final = pa.string()
_TYPES: Final[Mapping[pa.DataType, str]] = {
    _TEXT: "text",
    pa.large_string(): "text",
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
}
_TABLES: Final = (
    "SELECT gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?"
)
_CONNECTED: Final[dict[CassandraConfig, Database]] = {}
"""The connections of this process; its threads and calls share them."""
_LOCK: Final = threading.Lock()


class CassandraRows:
    """The store `cassandra`: the keyspace in `[cassandra]`, also that of entities."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append"})
    call_s_max: ClassVar[float] = 120.0

    def __init__(self, config: Config) -> None:
        self._config = config
        self._published = config.views.schema_name

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        """Create the table; raises InvalidView for types that Cassandra cannot hold exactly."""
        columns = [f"{_quoted(each.name)} {_stored_type(table.view, each)}" for each in schema]
        key = ", ".join(map(_quoted, _KEYS[table.merge]))
        order = "" if table.merge == "row" else ' AND CLUSTERING ORDER BY ("_version" DESC)'
        database = self._database()
        database.define_keyspace()
        database.define(
            f"CREATE TABLE IF NOT EXISTS {self._place(self._published)}"
            " (name text PRIMARY KEY, table_name text)"
        )
        database.define(
            f"CREATE TABLE IF NOT EXISTS {self._place(table.name)}"
            f" ({', '.join(columns)}, PRIMARY KEY ({key}))"
            f" WITH gc_grace_seconds = {_DELETED_S}{order}"
        )

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write rows and deletions with their versions as timestamps, 64 at a time.

        A row of a change has the time before the epoch that is as far from it as now, so that the
        first write of a row wins as a whole, and a deletion wins over it.
        """
        names, place = rows.column_names, self._place(table.name)
        columns, marks = ", ".join(map(_quoted, names)), ", ".join("?" * len(names))
        stamps = _given(rows["_version"])
        if table.merge == "append":
            stamps = [-(time.time_ns() // 1000)] * rows.num_rows
        keys = _KEYS[table.merge]
        where = " AND ".join(f"{_quoted(name)} = ?" for name in keys)
        with self._must_be_there(table.view, table.name):
            self._database().execute_many(
                f"INSERT INTO {place} ({columns}) VALUES ({marks}) USING TIMESTAMP ?",
                zip(*(_given(rows[name]) for name in names), stamps, strict=True),
            )
            self._database().execute_many(
                f"DELETE FROM {place} USING TIMESTAMP ? WHERE {where}",
                zip(*(_given(gone[name]) for name in ("_version", *keys)), strict=True),
            )

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows, in the order of their tokens, a page of them at a time."""
        # With other names, because the driver makes attributes of them.
        columns = ", ".join(f"{_quoted(name)} AS c{n}" for n, name in enumerate(schema.names))
        query = f"SELECT {columns} FROM {self._place(table.name)}"
        with self._must_be_there(table.view, table.name):
            found = self._database().stream(query, (), _PAGE_ROWS)
            while page := list(islice(found, _PAGE_ROWS)):
                arrays = [
                    _read(values, field.type)
                    for values, field in zip(zip(*page, strict=True), schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def drop(self, name: str) -> None:
        """Drop a table; nothing if there is none."""
        self._database().define(f"DROP TABLE IF EXISTS {self._place(name)}")

    def publish(self, view: str, name: str) -> None:
        """Let the row of a view name a table."""
        if not self._exists(name):
            raise ViewRowsMissing(view, self._place(name))
        stored = _stored_name(name)
        self._database().execute(
            f"UPDATE {self._place(self._published)} SET table_name = ? WHERE name = ?"
            " IF table_name != ?",
            (stored, view, stored),
        )

    def unpublish(self, view: str) -> None:
        """Delete the row of a view."""
        if self._exists(self._published):
            place = self._place(self._published)
            self._database().execute(f"DELETE FROM {place} WHERE name = ? IF EXISTS", (view,))

    def _place(self, name: str) -> str:
        return f"{self._config.cassandra.keyspace}.{_quoted(_stored_name(name))}"

    def _exists(self, name: str) -> bool:
        place = (self._config.cassandra.keyspace, _stored_name(name))
        return bool(self._database().execute(_TABLES, place))

    @contextmanager
    def _must_be_there(self, view: str, name: str) -> Iterator[None]:
        """Raise ViewRowsMissing where a statement was refused because there is no such table."""
        try:
            yield
        except SourceError:
            if self._exists(name):
                raise
            raise ViewRowsMissing(view, self._place(name)) from None

    def _database(self) -> Database:
        if "cassandra" in self._config.stores.servers:
            raise ConnectionError("set the address in [cassandra], not in [stores.cassandra]")
        settings = self._config.cassandra
        if not settings.contact_points:
            raise ConnectionError(
                "cassandra.contact_points is not set, and no local Cassandra was started; set "
                "cassandra.local and run `everstate up`"
            )
        with _LOCK:
            if settings not in _CONNECTED:
                _CONNECTED[settings] = Database(self._config, is_local=True)
            return _CONNECTED[settings]


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _stored_name(name: str) -> str:
    """The name of a table; a digest stands for the end of one that is too long for Cassandra."""
    if len(name) <= _NAME_CHARACTERS_MAX:
        return name
    return f"{name[: _NAME_CHARACTERS_MAX - 17]}_{sha256(name.encode()).hexdigest()[:16]}"


def _stored_type(view: str, field: pa.Field[Any]) -> str:
    """The type in which a column is kept; a time is a text, as Cassandra has no microseconds."""
    kind = field.type
    if types.is_decimal(kind):
        return "decimal"
    if types.is_timestamp(kind):
        return "text"
    if kind not in _TYPES:
        raise InvalidView(
            view,
            f"Cassandra keeps plain values, and its column {field.name!r} is {kind}.",
            advice="Select parts of that value, or leave the store out.",
        )
    return _TYPES[kind]


def _given(values: pa.ChunkedArray) -> list[Any]:
    """Values for the driver; raises ArrowInvalid for a time that Python does not have."""
    check_range(values)
    is_time = types.is_timestamp(values.type)
    found: list[Any] = (values.cast(_TEXT) if is_time else values).to_pylist()
    return found


def _read(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An array of the driver's values."""
    if types.is_timestamp(kind):
        return pa.array(values, _TEXT).cast(kind)
    if types.is_date(kind):
        return pa.array([None if value is None else value.date() for value in values], kind)
    return pa.array(values, kind)
