"""Raw records in, Arrow columns out: what a Spark task makes of a slice of a capture's raw log.

A plain row is a handful of columns, with its state as encoded bytes. Rarer records (a partial row,
a refused one, a logical message) are encoded in one column, ``rest``. Pure: the same function runs
in tests without Spark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

import msgspec
import pyarrow as pa

from everstate.log.record import RawRecord
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.packing import packed, unpacker
from everstate.sources.cdc.quick import QuickReader
from everstate.sources.cdc.reading import RawReader, RefusedRow, SourceIdentity
from everstate.sources.cdc.rows import TransactionProvenance

WHOLE: Final = 0
"""A row whose state after is whole, or that was deleted; all of it is in plain columns."""
OTHER: Final = 1
"""A row that does not fit into plain columns: ``rest`` has the CleanRow."""
REFUSED: Final = 2
"""No row can be made of it: ``rest`` has the reason and the record's bytes."""
ENDED: Final = 3
"""The end of a source transaction."""
NOTE: Final = 4
"""Provenance of a transaction, from a logical message."""
SOURCE: Final = 5
"""The database that the capture reads from here on."""
STOPPED: Final = 6
"""The slice has too many bytes: it was read up to this offset, exclusive."""
NOWHERE: Final = b"{}"
"""Position of a first snapshot without rows: no record of the raw log has it."""
EMPTY: Final = 7
"""A first snapshot that found no row in any table ended before this offset."""
UNDECLARED: Final = 8
"""A row of a table that the capture does not declare: ``key`` has the table's name."""
UNKNOWN: Final = 9
"""The connector does not know the columns of the table that took the name ``key``: its rows are not
to be read."""

SCHEMA: Final = pa.schema({
    "part": pa.int32(), "offset": pa.int64(), "what": pa.int8(), "table": pa.int16(),
    "op": pa.string(), "key": pa.string(), "state": pa.binary(), "before": pa.binary(),
    "rest": pa.binary(), "tx": pa.string(), "place": pa.binary(), "position": pa.binary(),
    "time_us": pa.int64(), "who": pa.binary(), "parents": pa.binary(),
})  # fmt: skip
"""One row for each source row and each of the other facts, in the order of the raw log.

``part``: number of the raw partition in the read; ``place``: the row's place in the stream that its
connector writes, as sortable bytes; ``position``: its position as JSON, without the epoch;
``who``: provenance from the row, as JSON; ``parents``: entity types and keys, as JSON.
"""
_NAMES: Final = SCHEMA.names
_SLICE_BYTES_MAX: Final = 32 * 1_048_576
"""Bytes of states in one slice; a larger slice is cut, and the next step reads the rest."""

PREPARED: Final = "waits for XA COMMIT"
"""Fate of a transaction that may be prepared only: its rows are held until it has ended."""
_encode = msgspec.json.Encoder().encode
decode_row = unpacker(CleanRow)
_Refusal = tuple[RefusedRow, bytes | None, bytes | None]
decode_refusal: Callable[[bytes], _Refusal] = unpacker(_Refusal)  # type: ignore[arg-type]
decode_note = unpacker(TransactionProvenance)
decode_source = unpacker(SourceIdentity)


class Block(msgspec.Struct, omit_defaults=True):
    """The facts of a source transaction that its rows need; all its rows share one object."""

    id: str
    count: int | None = None
    """How many rows it has; ``None``: unknown, so that its changes carry no block."""
    done: int = 0
    """Of these, how many are published, where its rows are published in several batches."""
    notes: Mapping[str, str] = {}
    """Provenance of all its rows."""
    fate: str = ""
    """:data:`PREPARED`, or why its rows are skipped; "": they are published."""


@dataclass
class Rows:
    """Columns of :data:`SCHEMA` as lists, with what the driver adds to each row."""

    part: list[int]
    offset: list[int]
    what: list[int]
    table: list[int]
    op: list[str | None]
    key: list[str | None]
    state: list[bytes | None]
    before: list[bytes | None]
    rest: list[bytes | None]
    tx: list[str | None]
    place: list[bytes | None]
    position: list[bytes | None]
    time_us: list[int | None]
    who: list[bytes | None]
    parents: list[bytes | None]
    index: list[int | None] = field(default_factory=list)
    """A row's place in its transaction, from 1; ``None``: it has none."""
    block: list[Block | None] = field(default_factory=list)
    """Its transaction; ``None``: it has none, or the capture has no one raw log."""

    @classmethod
    def of(cls, table: pa.Table | pa.RecordBatch) -> Rows:
        """The rows that tasks returned."""
        return cls(*(table.column(name).to_pylist() for name in _NAMES))

    @classmethod
    def none(cls) -> Rows:
        """No rows."""
        return cls(*([] for _ in _NAMES))

    def __len__(self) -> int:
        return len(self.offset)

    def extend(self, other: Rows) -> None:
        """Append rows."""
        for mine, more in zip(self._lists(), other._lists(), strict=True):
            mine += more

    def split(self, count: int) -> Rows:
        """Remove the first rows and return them."""
        lists = self._lists()
        if count < len(self):
            first = Rows(*(values[:count] for values in lists))
            for values in lists:
                del values[:count]
            return first
        for name in _FIELDS:
            setattr(self, name, [])
        return Rows(*lists)

    def insert_snapshot_end(self, offset: int, *, is_empty: bool) -> None:
        """Insert the end of a first snapshot before the record at ``offset``.

        ``is_empty``: it had no rows, so that the end is the only sign of it.
        """
        at = bisect_left(self.offset, offset)
        plain: dict[str, object] = {"part": 0, "offset": offset, "table": -1}
        read = plain | {"what": EMPTY, "op": "r", "position": NOWHERE}
        inserted = [*([read] if is_empty else []), plain | {"what": ENDED}]
        for name in _NAMES:
            getattr(self, name)[at:at] = [row.get(name) for row in inserted]

    def undeclared(self) -> Counter[str]:
        """Number of rows of each table that the capture does not declare."""
        named = zip(self.what, self.key, strict=True)
        return Counter(table or "" for what, table in named if what == UNDECLARED)

    def where(self, mask: Sequence[bool]) -> Rows:
        """The rows for which ``mask`` is true."""
        return Rows(*(list(compress(values, mask)) for values in self._lists()))

    def _lists(self) -> list[list[Any]]:
        return [getattr(self, name) for name in _FIELDS]


_FIELDS: Final = (*_NAMES, "index", "block")


@dataclass(frozen=True)
class Slices:
    """Reads slices of a raw log into columns; can be sent to Spark's tasks."""

    reader: RawReader
    names: Sequence[str]
    """For each part, the last part of its topic's name; "": the one raw log of a capture."""
    tables: Mapping[str, int]
    """Table → its number."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the columns."""
        return SCHEMA

    @property
    def header_names(self) -> Sequence[str]:
        """Headers of a record that are wanted."""
        return self.reader.header_names

    def begin(self) -> SliceReading:
        """Begin a slice."""
        return SliceReading(self)


class SliceReading:
    """Reads one slice, batch by batch; records beyond its size limit are left to the next read."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._quick = QuickReader.of(slices.reader)
        self._size = 0
        self._is_stopped = False

    def columns(self, records: Iterable[RawRecord]) -> pa.RecordBatch:
        """The contents of records, as columns."""
        return as_batch([] if self._is_stopped else list(self._rows(records)))

    def _rows(self, records: Iterable[RawRecord]) -> Iterator[tuple[Any, ...]]:
        slices = self._slices
        read, names, tables = slices.reader.read, slices.names, slices.tables
        is_bare, size, quick = slices.reader.is_bare, self._size, self._quick
        for part, offset, key, value, headers, at_ms in records:
            if size > _SLICE_BYTES_MAX:
                self._is_stopped = True
                yield _plain(part, offset, STOPPED)
                return
            if quick is not None and headers == _PLAIN:
                row = quick.read(key, value)
                if row is not None:
                    table, op, name, state, before, *rest = row
                    size += 100 + len(state or b"")
                    yield (
                        part, offset, WHOLE, tables[table], op, name, state, before, None, *rest
                    )  # fmt: skip
                    continue
            for one in read(names[part], key, value, headers, at_ms):
                size += 100
                if isinstance(one, CleanRow):
                    state, number = one.state, tables[one.table]
                    size += len(state or b"")
                    if one.is_plain or is_bare:
                        yield (
                            part, offset, WHOLE, number, one.op, one.key, state, one.before, None,
                            one.transaction, one.place, _position(one), one.time_us,
                            _encode(who) if (who := one.who) else None,
                            _encode(one.parents) if one.parents else None,
                        )  # fmt: skip
                        continue
                    encoded = packed(one)
                    size += len(encoded)
                    yield _rest(part, offset, OTHER, number, one, encoded)
                elif isinstance(one, RefusedRow):
                    encoded = packed((one, key, value))
                    size += len(encoded)
                    yield _rest(part, offset, REFUSED, tables.get(one.table, -1), one, encoded)
                elif isinstance(one, SourceIdentity):
                    yield _plain(part, offset, SOURCE, rest=packed(one))
                elif isinstance(one, TransactionProvenance):
                    yield _plain(
                        *(part, offset, NOTE),
                        op="m",
                        key=one.prefix,
                        rest=packed(one),
                        tx=one.transaction,
                        place=one.place,
                        time_us=one.time_us,
                    )
                elif one.what == "ended":
                    yield _plain(part, offset, ENDED, tx=one.name)
                else:
                    yield _plain(part, offset, _FACTS[one.what], key=one.name)
        self._size = size


_FACTS: Final = {"undeclared": UNDECLARED, "unknown": UNKNOWN}
_PLAIN: Final = (None, None)
"""Header values of an ordinary row."""


def _plain(part: int, offset: int, what: int, table: int = -1, **columns: Any) -> tuple[Any, ...]:
    """The columns of a record without a state."""
    return (part, offset, what, table, *map(columns.get, _NAMES[4:]))


def _rest(
    part: int, offset: int, what: int, table: int, row: CleanRow | RefusedRow, rest: bytes
) -> tuple[Any, ...]:
    """The columns of a row that is encoded in one of them."""
    return _plain(
        *(part, offset, what, table),
        op=row.op,
        key=row.key,
        rest=rest,
        tx=row.transaction,
        place=row.place,
        position=_position(row),
        time_us=row.time_us,
    )


def _position(row: CleanRow | RefusedRow) -> bytes | None:
    return _encode(row.position) if row.position else None


def as_batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Rows of :data:`SCHEMA` as an Arrow batch."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in _NAMES)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
