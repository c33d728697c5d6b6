"""JSON of rows: decimals of a view as text, numbers of a state as they are, of any size."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any, Final

import orjson

from everstate.changes.json_numbers import orjson_default
from everstate.changes.values import storable

_LEAST, _MOST = -(2**63), 2**64 - 1
_OPTION: Final = orjson.OPT_NON_STR_KEYS


def row_json(value: Any, *, indented: bool = False) -> bytes:
    """The JSON of a value whose parts may come from the views' database.

    Numbers that JSON does not have are texts, as in PostgreSQL: ``"NaN"``, ``"Infinity"``.
    """
    option = _OPTION | (orjson.OPT_INDENT_2 if indented else 0)
    try:
        text = orjson.dumps(value, default=orjson_default, option=option)
    except TypeError:
        # orjson refuses whole numbers of more than 64 bits, which a state or a row may have.
        return orjson.dumps(_fitting(value), default=orjson_default, option=option)
    if b"null" in text and not storable(value):
        return orjson.dumps(_fitting(value), default=orjson_default, option=option)
    return text


def _fitting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _fitting(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_fitting(part) for part in value]
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    if isinstance(value, float) and not isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if is_dataclass(value):
        return {each.name: _fitting(getattr(value, each.name)) for each in fields(value)}
    return value
