"""Rows as JSON documents, from which each value is read back exactly.

Decimals and moments are texts with all their digits, and so are NaN and the infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as types

_PLAIN: Final = (
    *(types.is_string, types.is_large_string, types.is_integer, types.is_boolean, types.is_null),
)


def text(value: Decimal | date) -> str:
    """A number with all its digits, or a moment with all its microseconds."""
    return str(value) if isinstance(value, Decimal) else value.isoformat()


def finite(value: Any) -> Any:
    """A value with texts for NaN and the infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def batch(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Documents in the columns of a schema."""
    columns = []
    for each in schema:
        read = reader(each.type)
        columns.append(pa.array([read(row.get(each.name)) for row in rows], each.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """What makes a value of a type from that of a document; raises TypeError if it would differ."""
    if any(is_of(kind) for is_of in _PLAIN):
        return lambda value: value
    read = _reader(kind)
    return lambda value: None if value is None else read(value)


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    if types.is_list(kind) or types.is_large_list(kind):
        each = reader(kind.value_type)
        return lambda values: [each(value) for value in values]
    if types.is_struct(kind):
        fields = {field.name: reader(field.type) for field in kind}
        return lambda value: {name: read(value.get(name)) for name, read in fields.items()}
    if types.is_map(kind) and types.is_string(kind.key_type):
        item = reader(kind.item_type)
        return lambda value: [(name, item(part)) for name, part in value.items()]
    if types.is_decimal(kind):
        return Decimal
    if types.is_floating(kind):
        return float
    if types.is_timestamp(kind) and kind.unit != "ns":
        return datetime.fromisoformat
    if types.is_date32(kind):
        return date.fromisoformat
    raise TypeError(f"{kind} cannot be kept in JSON")
