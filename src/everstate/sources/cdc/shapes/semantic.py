"""Conversions of values by their column's type, as far as the message contains the type."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import msgspec

from everstate.sources.cdc.rows import Unreadable

_SEMANTICS: Final = {
    "io.debezium.time.Date": "days",
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    "org.apache.kafka.connect.data.Date": "days",
    "org.apache.kafka.connect.data.Timestamp": "ms",
    "io.debezium.data.Json": "json",
}
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EXTENDED: Final = {
    "$numberLong": int,
    "$numberInt": int,
    "$numberDouble": float,
    "$numberDecimal": str,
    "$oid": str,
}


@lru_cache(maxsize=256)
def conversions(schema: bytes) -> Mapping[str, str]:
    """Column → conversion, of the schema that came with a message (often the same one)."""
    try:
        found = msgspec.json.decode(schema)
    except msgspec.DecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    named: dict[str, str] = {}
    for side in found.get("fields") or ():
        if isinstance(side, dict) and side.get("field") in ("before", "after"):
            for column in side.get("fields") or ():
                kind = _SEMANTICS.get(column.get("name"))
                if column.get("name") == _DECIMAL:
                    kind = f"decimal:{(column.get('parameters') or {}).get('scale', 0)}"
                if kind is not None:
                    named[column["field"]] = kind
    return named


def document(text: str, *, quietly: bool = False) -> Any:
    """A document of MongoDB, its extended JSON made plain; raises Unreadable for other text."""
    try:
        return _plain(msgspec.json.decode(text))
    except msgspec.DecodeError as cause:
        if quietly:
            return None
        raise Unreadable(f"not a document: {cause}") from cause


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        name, inner = next(iter(value.items()))
        if name in _EXTENDED:
            return _EXTENDED[name](inner)
        if name == "$date":
            found = _date(_plain(inner))
            return value if found is None else found
    return {name: _plain(part) for name, part in value.items()}


def _date(value: Any) -> datetime | None:
    """The time of a `$date`, in milliseconds or as text; ``None``: no field can hold it."""
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value)
        return _EPOCH + timedelta(milliseconds=value)
    except (OverflowError, TypeError, ValueError):
        return None
