"""Typed Arrow states from JSON texts, as Spark reads the same messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa


def typed_states(texts: Sequence[str | None], fields: Sequence[pa.Field]) -> pa.Array:
    """Typed states from JSON texts; null for no text, and for a value of another type.

    A message that was written by an older model may lack a field, or have it with another type.
    """
    kind = pa.struct(list(fields))
    states = [None if text is None else json.loads(text, parse_float=Decimal) for text in texts]
    return pa.array([_typed(state, kind) for state in states], kind)


def _typed(value: Any, kind: pa.DataType) -> Any:
    """A JSON value in the Python type that Arrow converts to its type."""
    if value is None:
        return None
    try:
        if pa.types.is_struct(kind):
            return {field.name: _typed(value.get(field.name), field.type) for field in kind}
        if pa.types.is_list(kind):
            return [_typed(part, kind.value_type) for part in value]
        if pa.types.is_map(kind):
            return [(name, _typed(part, kind.item_type)) for name, part in value.items()]
        return _plain(value, kind)
    except (ValueError, TypeError, ArithmeticError, AttributeError):
        return None


def _plain(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return value if isinstance(value, bool) else None
    if pa.types.is_integer(kind):
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if pa.types.is_floating(kind):
        return float(value) if isinstance(value, (int, Decimal)) else None
    if pa.types.is_decimal(kind):
        return Decimal(value)
    if pa.types.is_date(kind):
        return date.fromisoformat(value)
    if pa.types.is_timestamp(kind):
        moment = datetime.fromisoformat(value)
        if kind.tz is None:
            return moment.replace(tzinfo=None)
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return value if isinstance(value, str) else None
