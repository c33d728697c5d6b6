"""JSON of rows: decimals of a view as text, numbers of a state as they are, of any size."""

from __future__ import annotations

from typing import Any

import orjson

from everstate.changes.json_numbers import orjson_default

_LEAST, _MOST = -(2**63), 2**64 - 1


def row_json(value: Any, *, indented: bool = False) -> bytes:
    """The JSON of a value whose parts may come from the views' database."""
    option = orjson.OPT_INDENT_2 if indented else 0
    try:
        return orjson.dumps(value, default=orjson_default, option=option)
    except TypeError:
        # orjson refuses whole numbers of more than 64 bits, which a state or a row may have.
        return orjson.dumps(_fitting(value), default=orjson_default, option=option)


def _fitting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _fitting(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_fitting(part) for part in value]
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    return value
