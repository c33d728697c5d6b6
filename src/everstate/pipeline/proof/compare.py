"""Row-by-row and hash comparison of two tables of one shape, done by the executors.

The expected rows are a DataFrame. The kept rows of a bucket are read from PostgreSQL, inside one
exported snapshot, by the task that holds the expected rows of that bucket. The driver gets only
counts, hashes and the first differences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from everstate.pipeline.proof.row_texts import copied_as, fragments, joined, kept_fragments
from everstate.pipeline.reports import DIFFERENCES_MAX, RowDifference
from everstate.pipeline.spark.outcomes import OUTCOME, outcome_rows, outcomes_of
from everstate.postgres import SharedSnapshot
from everstate.views.stores import VersionedStore
from everstate.views.tables import KeptTable

_HASH_BYTES = 8
_MODULUS = 1 << (8 * _HASH_BYTES)
_COPIED_BYTES = 8 << 20
"""Kept rows are read in pieces of about this size."""


class Comparison(NamedTuple):
    """Outcome of one comparison; hashes do not depend on the order of rows."""

    expected_rows: int
    kept_rows: int
    expected_hash: str
    kept_hash: str
    different_rows: int
    differences: tuple[RowDifference, ...]

    @property
    def holds(self) -> bool:
        """Both sides have the same rows, by rows and by hash."""
        return (
            self.different_rows == 0
            and self.expected_rows == self.kept_rows
            and self.expected_hash == self.kept_hash
        )


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Where a task reads the kept rows: a query with key columns first, in one snapshot.

    ``query`` selects the columns of the expected DataFrame in the same order; with ``is_divided``
    the md5 of its first column decides the bucket of a row, else all rows are in one bucket.
    """

    snapshot: SharedSnapshot
    query: str
    is_divided: bool

    def read(self, schema: pa.Schema, bucket: int, buckets: int) -> Iterator[list[pa.Array]]:
        """Texts of the columns of the kept rows of a bucket, some thousand rows at a time."""
        names = [f"c{place}" for place in range(len(schema))]
        columns = [copied_as(c, f.name, f.type) for c, f in zip(names, schema, strict=True)]
        query = f"SELECT {', '.join(columns)} FROM ({self.query}) AS kept({', '.join(names)})"
        if self.is_divided:
            query += f" WHERE ('x' || substr(md5(c0), 1, 4))::bit(16)::int % {buckets} = {bucket}"
        texts = pa.schema([(name, pa.string()) for name in names])
        with self.snapshot.joined() as connection, connection.cursor() as cursor:
            connection.execute("SET LOCAL DateStyle = ISO")
            with cursor.copy(f"COPY ({query}) TO STDOUT (FORMAT csv)".encode()) as rows:
                for table in _tables(rows, texts):
                    yield [
                        kept_fragments(field.name, field.type, column.combine_chunks())
                        for field, column in zip(schema, table.columns, strict=True)
                    ]


@dataclass(frozen=True, slots=True)
class RowsElsewhere:
    """The kept rows of a version in another store, while the caller holds its positions."""

    store: VersionedStore
    table: KeptTable
    is_divided: bool = False

    def read(self, schema: pa.Schema, _bucket: int, _buckets: int) -> Iterator[list[pa.Array]]:
        """Texts of the columns of all rows, some thousand rows at a time."""
        for batch in self.store.read(self.table, schema):
            yield [fragments(f.name, c) for f, c in zip(schema, batch.columns, strict=True)]


def compare(
    expected: DataFrame, kept: KeptRows | RowsElsewhere, *, key_columns: int, buckets: int
) -> Comparison:
    """Compare a batch result with a kept table; one Spark job.

    ``expected`` has its key columns first. Cost: one pass over both sides and one scan of the
    kept table per bucket; a task holds the expected rows of its bucket in memory.
    """
    spark = expected.sparkSession
    columns = expected.columns
    if not kept.is_divided:
        buckets = 1
        bucket = F.lit(0)
    else:
        head = F.conv(F.substring(F.md5(F.col(columns[0])), 1, 4), 16, 10).cast("int")
        bucket = head % buckets
    rows = expected.withColumn("__bucket", bucket)
    # Every bucket needs a task, also one without expected rows: the kept table may have extra ones.
    markers = spark.range(buckets).select(
        *[F.lit(None).cast(field.dataType).alias(field.name) for field in expected.schema],
        F.col("id").cast("int").alias("__bucket"),
    )
    tasks = rows.unionByName(markers).repartition(buckets, "__bucket")

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _compare_task(batches, kept, key_columns, buckets)

    return _merge(outcomes_of(tasks.mapInArrow(run, OUTCOME)))


def _compare_task(
    batches: Iterable[pa.RecordBatch],
    kept: KeptRows | RowsElsewhere,
    key_columns: int,
    buckets: int,
) -> Iterator[pa.RecordBatch]:
    """Compare the buckets of one task; an expected row is dropped once it was compared."""
    waiting: dict[int, _Expected] = {}
    schema: pa.Schema | None = None
    for batch in batches:
        schema = batch.schema.remove(len(batch.schema) - 1)
        *columns, numbers = batch.columns
        for number in pc.unique(numbers).to_pylist():
            mine = [column.filter(pc.equal(numbers, number)) for column in columns]
            waiting.setdefault(number, _Expected()).add(_texts(schema, mine, key_columns))
    if schema is None:
        return
    outcomes = []
    for number, rows in waiting.items():
        found = _compare_bucket(rows, kept.read(schema, number, buckets), key_columns)
        outcomes.append(found)
    yield outcome_rows(outcomes)


def _texts(
    schema: pa.Schema, columns: Sequence[pa.Array], key_columns: int
) -> Iterator[tuple[str, str]]:
    """Key and text of each expected row; the markers of buckets, all null, are left out."""
    parts = [fragments(f.name, column) for f, column in zip(schema, columns, strict=True)]
    marker = f"[{','.join(['null'] * len(parts))}]"
    pairs = zip(_keys(parts, key_columns), joined(parts), strict=True)
    return ((key, text) for key, text in pairs if text != marker)


def _keys(parts: Sequence[pa.Array], key_columns: int) -> list[str]:
    """Texts of the keys; without key columns, one text for all (there is one row)."""
    rows = len(parts[0])
    return joined(parts[:key_columns]) if key_columns else ["[]"] * rows


class _Expected:
    """The expected rows of a bucket: text by key, and rows whose key is there already."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self.repeated: list[tuple[str, str]] = []

    def add(self, rows: Iterable[tuple[str, str]]) -> None:
        for key, text in rows:
            if key in self.rows:
                self.repeated.append((key, text))
            else:
                self.rows[key] = text


def _compare_bucket(
    wanted_rows: _Expected, kept: Iterable[list[pa.Array]], key_columns: int
) -> dict[str, Any]:
    expected, repeated = wanted_rows.rows, wanted_rows.repeated
    expected_rows = len(expected) + len(repeated)
    expected_hash = sum(map(_hash, expected.values())) + sum(_hash(text) for _, text in repeated)
    kept_rows = kept_hash = 0
    # No table holds a key twice, so a definition that gives it twice is never equal to one.
    different = len(repeated)
    found: list[tuple[str, str | None, str | None]] = []
    found += [(key, text, None) for key, text in repeated[:DIFFERENCES_MAX]]
    for parts in kept:
        for key, text in zip(_keys(parts, key_columns), joined(parts), strict=True):
            kept_rows += 1
            kept_hash += _hash(text)
            wanted = expected.pop(key, None)
            if wanted != text:
                different += 1
                if len(found) < DIFFERENCES_MAX:
                    found.append((key, wanted, text))
    different += len(expected)
    for key, wanted in expected.items():
        if len(found) >= DIFFERENCES_MAX:
            break
        found.append((key, wanted, None))
    return {
        "expected_rows": expected_rows,
        "kept_rows": kept_rows,
        "expected_hash": f"{expected_hash % _MODULUS:016x}",
        "kept_hash": f"{kept_hash % _MODULUS:016x}",
        "different_rows": different,
        "differences": found,
    }


def _tables(copied: Iterable[Any], texts: pa.Schema) -> Iterator[pa.Table]:
    """Rows of a CSV COPY, one row a chunk, as tables of a bounded size."""
    waiting, size = list[Any](), 0
    for chunk in copied:
        waiting.append(chunk)
        size += len(chunk)
        if size >= _COPIED_BYTES:
            yield _read_csv(waiting, texts)
            waiting, size = [], 0
    if waiting:
        yield _read_csv(waiting, texts)


def _read_csv(chunks: Sequence[Any], texts: pa.Schema) -> pa.Table:
    copied = b"".join(chunks)
    return pyarrow.csv.read_csv(
        pa.BufferReader(copied),
        # One block for all: a row must not be larger than a block.
        read_options=pyarrow.csv.ReadOptions(
            column_names=texts.names, use_threads=False, block_size=len(copied) + 1
        ),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=texts,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest())


def _merge(outcomes: Sequence[Any]) -> Comparison:
    differences = [
        RowDifference(key, wanted, kept)
        for outcome in outcomes
        for key, wanted, kept in outcome["differences"]
    ]

    def total(name: str) -> str:
        return f"{sum(int(outcome[name], 16) for outcome in outcomes) % _MODULUS:016x}"

    return Comparison(
        expected_rows=sum(outcome["expected_rows"] for outcome in outcomes),
        kept_rows=sum(outcome["kept_rows"] for outcome in outcomes),
        expected_hash=total("expected_hash"),
        kept_hash=total("kept_hash"),
        different_rows=sum(outcome["different_rows"] for outcome in outcomes),
        differences=tuple(sorted(differences, key=lambda found: found.key)[:DIFFERENCES_MAX]),
    )
