"""Maps Arrow types to PostgreSQL types, and converts values for COPY."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from everstate.changes.moments import FIRST_US, LAST_US, OUT_OF_RANGE
from everstate.views.json_texts import json_texts

_PLAIN: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.large_string(): "text",
    pa.date32(): "date",
    pa.null(): "text",
}


def postgres_type(kind: pa.DataType) -> str | None:
    """PostgreSQL's type for an Arrow type, ``None`` when it has none; nested values are jsonb."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    return "jsonb" if pa.types.is_nested(kind) else None


def copied(values: pa.Array) -> pa.Array:
    """Values in the form that PostgreSQL's COPY reads: nested ones as JSON text.

    Raises ArrowInvalid for a time out of Python's range.
    """
    kind = values.type
    if pa.types.is_nested(kind):
        return json_texts(values)
    check_range(values)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # Arrow writes times with a zone fifteen times slower; a session's zone is UTC, as Arrow's.
        return values.cast(pa.timestamp(kind.unit))
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pc.cast(values, pa.string())
    return values


def check_range(values: pa.Array) -> None:
    """Raise ArrowInvalid for a year that Python does not have, where Spark computed one."""
    if not (pa.types.is_timestamp(values.type) or pa.types.is_date(values.type)):
        return
    microseconds = pc.cast(pc.cast(values, pa.timestamp("us")), pa.int64())
    bounds = pc.min_max(microseconds).as_py()
    if (bounds["min"] or 0) < FIRST_US or (bounds["max"] or 0) > LAST_US:
        raise pa.ArrowInvalid(OUT_OF_RANGE)
