"""Values whose form depends on their column's type: what the message tells of that."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from everstate.sources.cdc.rows import Unreadable

UNAVAILABLE: Final = "__debezium_unavailable_value"
_UNAVAILABLE_BYTES: Final = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
# Of the second so much that it is found quickly; some writers of JSON escape its equals sign.
_MARKS: Final = (UNAVAILABLE.encode(), _UNAVAILABLE_BYTES[:16].encode())
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


def may_lack_values(message: bytes) -> bool:
    """Whether a message's text has the mark of a value that is not told, plain or in base64."""
    return _MARKS[0] in message or _MARKS[1] in message


def without_unavailable(image: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The columns whose values are known: a TOASTed column that did not change is not."""
    if image is None or not any(map(_is_unavailable, image.values())):
        return image
    return {name: value for name, value in image.items() if not _is_unavailable(value)}


def _is_unavailable(value: Any) -> bool:
    kind = value.__class__
    if kind is str:
        return bool(value in (UNAVAILABLE, _UNAVAILABLE_BYTES))
    if kind is list:
        return len(value) == 1 and value[0] in (UNAVAILABLE, _UNAVAILABLE_BYTES)
    if kind is dict:
        return UNAVAILABLE in value or value.get("value") == _UNAVAILABLE_BYTES
    return False


def document(text: str, *, quietly: bool = False) -> Any:
    """A document of MongoDB, its extended JSON made plain; a text that is none is Unreadable."""
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
            return _plain(inner)
    return {name: _plain(part) for name, part in value.items()}
