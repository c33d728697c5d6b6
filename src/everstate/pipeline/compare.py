"""Row-by-row and hash comparison of two tables of one shape, done by the executors.

The expected rows are a DataFrame, the kept rows are read from PostgreSQL by the same task that
holds the expected rows of that bucket, inside one exported snapshot. The driver gets counts,
hashes and the first differences only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson
import pyarrow as pa
from psycopg import sql
from psycopg.types.json import set_json_loads
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from everstate.views.database import connect_views, views_errors
from everstate.views.images import state_text

_HASH_BYTES = 8
_MODULUS = 1 << (8 * _HASH_BYTES)
_FETCH_ROWS = 10_000
RAW = "raw_value"
"""A column of this name is compared by the current state of the message that it holds."""
DIFFERENCES_MAX = 100
"""Most differing rows that one bucket reports; all are counted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that the kept table and the batch do not agree on; ``None``: the row is not there."""

    key: str
    expected: str | None
    kept: str | None

    @property
    def what(self) -> str:
        """`missing`, `extra` or `different`, seen from the kept table."""
        if self.kept is None:
            return "missing"
        return "extra" if self.expected is None else "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of one comparison; hashes do not depend on the order of rows."""

    expected_rows: int
    kept_rows: int
    expected_hash: str
    kept_hash: str
    different_rows: int
    differences: tuple[Difference, ...]

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

    ``query`` selects the columns of the expected DataFrame in its order; ``bucket_key`` is the
    SQL text expression whose md5 decides the bucket, ``None``: the view is one bucket.
    """

    dsn: str
    snapshot: str
    query: str
    bucket_key: str | None


_COUNT: pa.DataType = pa.int64()
_TEXT: pa.DataType = pa.string()
OUTCOME = pa.schema(
    {
        "expected_rows": _COUNT,
        "kept_rows": _COUNT,
        "expected_hash": _TEXT,
        "kept_hash": _TEXT,
        "different_rows": _COUNT,
        "differences": _TEXT,
    }
)
_OUTCOME_DDL = (
    "expected_rows long, kept_rows long, expected_hash string, kept_hash string, "
    "different_rows long, differences string"
)


def compare(expected: DataFrame, kept: KeptRows, *, key_columns: int, buckets: int) -> Comparison:
    """Compare a batch result with a kept table; one Spark job.

    ``expected`` has its key columns first. Cost: one pass over both sides and one scan of the
    kept table per bucket; a task holds the expected rows of its bucket in memory.
    """
    spark = expected.sparkSession
    columns = expected.columns
    if kept.bucket_key is None:
        buckets = 1
        bucket = F.lit(0)
    else:
        head = F.conv(F.substring(F.md5(F.col(columns[0])), 1, 4), 16, 10).cast("int")
        bucket = head % buckets
    rows = expected.withColumn("__bucket", bucket)
    # Every bucket needs a task, also the one that should be empty: it may hold extra rows.
    markers = spark.range(buckets).select(
        *[F.lit(None).cast(field.dataType).alias(field.name) for field in expected.schema],
        F.col("id").cast("int").alias("__bucket"),
    )
    tasks = rows.unionByName(markers).repartition(buckets, "__bucket")

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _compare_task(batches, kept, key_columns, buckets)

    outcomes = tasks.mapInArrow(run, _OUTCOME_DDL).collect()
    return _merge(outcomes)


def _compare_task(
    batches: Iterable[pa.RecordBatch], kept: KeptRows, key_columns: int, buckets: int
) -> Iterator[pa.RecordBatch]:
    """Compare the buckets of one task; each expected row is dropped when its twin is found."""
    waiting: dict[int, dict[str, str]] = {}
    for batch in batches:
        names = batch.schema.names[:-1]
        for row in batch.to_pylist():
            mine = waiting.setdefault(row["__bucket"], {})
            values = [_value(name, row[name]) for name in names]
            if any(value is not None for value in values):
                mine[row_text(values[:key_columns])] = row_text(values)
    outcomes = [_compare_bucket(rows, kept, n, key_columns, buckets) for n, rows in waiting.items()]
    if outcomes:
        yield pa.RecordBatch.from_pylist(outcomes, schema=OUTCOME)


def _value(column: str, value: Any) -> Any:
    """A value of an expected row; a raw message stands for the state inside it."""
    if column == RAW and value is not None:
        return orjson.loads(state_text(value))
    return value


def _compare_bucket(
    expected: dict[str, str], kept: KeptRows, bucket: int, key_columns: int, buckets: int
) -> dict[str, Any]:
    expected_rows = len(expected)
    expected_hash = sum(_hash(text) for text in expected.values()) % _MODULUS
    kept_rows = kept_hash = different = 0
    found: list[tuple[str, str | None, str | None]] = []
    for values in _read_kept(kept, bucket, buckets):
        key, text = row_text(values[:key_columns]), row_text(values)
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
        "expected_hash": f"{expected_hash:016x}",
        "kept_hash": f"{kept_hash % _MODULUS:016x}",
        "different_rows": different,
        "differences": orjson.dumps(found).decode(),
    }


def _read_kept(kept: KeptRows, bucket: int, buckets: int) -> Iterator[Sequence[Any]]:
    query = sql.SQL("SELECT * FROM ({}) kept").format(sql.SQL(kept.query))
    if kept.bucket_key is not None:
        condition = "('x' || substr(md5({}), 1, 4))::bit(16)::int % {} = {}"
        query += sql.SQL(" WHERE ") + sql.SQL(condition).format(
            sql.SQL(kept.bucket_key),
            sql.Literal(buckets),
            sql.Literal(bucket),
        )
    with (
        views_errors(kept.dsn),
        connect_views(kept.dsn) as connection,
        connection.transaction(),
    ):
        set_json_loads(orjson.loads, connection)
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute(
            sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(kept.snapshot))
        )
        with connection.cursor(name="kept") as cursor:
            cursor.itersize = _FETCH_ROWS
            cursor.execute(query)
            yield from cursor


def row_text(values: Sequence[Any]) -> str:
    """One canonical JSON text of a row: equal values give equal text on both sides."""
    return orjson.dumps(
        [canonical(value) for value in values],
        option=orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATETIME,
    ).decode()


def canonical(value: Any) -> Any:
    """A value in the one form that all engines' values are brought to (C16).

    Numbers lose their scale and trailing zeros, times go to UTC, UUIDs to text.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -(2**53) < value < 2**53 else str(value)
    if isinstance(value, float):
        return _number(Decimal(repr(value)))
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, datetime):
        moment = value if value.tzinfo is None else value.astimezone(UTC)
        return moment.replace(tzinfo=None).isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, dict):
        return {str(key): canonical(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(part) for part in value]
    return str(value)


def _number(value: Decimal) -> Any:
    if value == value.to_integral_value() and abs(value) < 2**53:
        return int(value)
    return format(value.normalize(), "f")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest())


def _merge(outcomes: Sequence[Any]) -> Comparison:
    differences = [
        Difference(key, wanted, kept)
        for outcome in outcomes
        for key, wanted, kept in orjson.loads(outcome["differences"])
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
