"""Arrow types and PostgreSQL types: one table, and the JSON text of nested values."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

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
_TO_JSON: Final = msgspec.json.Encoder(decimal_format="number", order="deterministic").encode


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
    """Values as PostgreSQL's COPY reads them from CSV: nested ones as JSON text."""
    kind = values.type
    if pa.types.is_nested(kind):
        texts = [None if v is None else _TO_JSON(_plain(v, kind)) for v in values.to_pylist()]
        return pa.array(texts, pa.binary()).cast(pa.string())
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # Arrow writes zoned times fifteen times slower; a session's zone is UTC, as Arrow's is.
        return values.cast(pa.timestamp(kind.unit))
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pc.cast(values, pa.string())
    return values


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A nested value with its maps as objects, which Arrow gives as lists of pairs."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {k: _plain(v, kind.item_type) for k, v in value}
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    return value
