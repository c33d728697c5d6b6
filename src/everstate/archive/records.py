"""Rows of an archive as the parts of the log's records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

RecordParts: TypeAlias = tuple[
    int, int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int
]
"""Partition, offset, milliseconds since 1970, key, value, headers, type of the timestamp."""


def record_parts(rows: pa.RecordBatch | pa.Table) -> Iterator[RecordParts]:
    """The parts of each row's record, from the columns in `RECORD_COLUMNS`.

    A timestamp is a number, because Kafka stores times that Python's dates do not reach.
    """
    millis = pc.divide(pc.cast(rows["timestamp"], pa.int64()), 1_000)
    columns: list[list[Any]] = [
        *(rows[name].to_pylist() for name in ("partition", "offset")),
        millis.to_pylist(),
        *(rows[name].to_pylist() for name in ("raw_key", "raw_value", "raw_headers")),
        rows["timestamp_type"].to_pylist(),
    ]
    for partition, offset, moment, key, value, headers, kind in zip(*columns, strict=True):
        named = tuple((header["key"], header["value"]) for header in headers or ())
        yield partition, offset, moment, key, value, named, kind
