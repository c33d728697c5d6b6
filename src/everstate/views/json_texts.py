"""Canonical JSON texts of nested values, independent of the engine that made the values."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from everstate.changes.moments import OUT_OF_RANGE

_TO_JSON: Final = msgspec.json.Encoder(decimal_format="number", order="deterministic").encode


def json_texts(values: pa.Array) -> pa.Array:
    """Nested values as JSON texts; raises ArrowInvalid for a time out of Python's range."""
    try:
        listed = values.to_pylist()
    except (OverflowError, ValueError) as cause:
        raise pa.ArrowInvalid(f"{OUT_OF_RANGE} ({cause})") from cause
    texts = [None if v is None else _TO_JSON(_plain(v, values.type)) for v in listed]
    return pa.array(texts, pa.binary()).cast(pa.string())


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A nested value with its maps as objects, which Arrow returns as lists of pairs.

    A float that JSON cannot express (NaN, infinity) becomes a text, and -0.0 becomes 0.0.
    """
    if value is None:
        return None
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else str(Decimal(value))
    if pa.types.is_map(kind):
        return {k: _plain(v, kind.item_type) for k, v in value}
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    return value
