"""Values as people write them in conditions: `null` is no value, and `"null"` is a text.

A value in double quotes is a JSON string, so every text can be written: also `null`, blanks at its
beginning, and a text that has quotes itself. Between conditions is a `;`; one in such a string is
part of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

import msgspec

_NULL: Final = "null"
_text = msgspec.json.Decoder(str).decode
_BEGIN: Final = r"(\s*[\w.]+\s*(?:<=|>=|!=|<|>|=)\s*)"
_QUOTED: Final = re.compile(rf'{_BEGIN}("(?:[^"\\]|\\.)*"\s*)(?:;|\Z)', re.DOTALL)
_WRITTEN: Final = re.compile(rf"{_BEGIN}(.*)", re.DOTALL)


def unquoted(written: str, *, takes_null: bool = True) -> str | None:
    """The text that is meant; ``None`` for `null`, unless the field cannot be null."""
    if written == _NULL and takes_null:
        return None
    text = _string(written)
    return written if text is None else text  # no JSON string: the quotes are part of it


def conditions_in(text: str) -> list[str]:
    """The conditions of a text that has a `;` between them."""
    found, start = [], 0
    while start < len(text):
        quoted = _QUOTED.match(text, start)
        if quoted is not None and _string(quoted[2]) is not None:
            end = quoted.end(2)
        else:
            end = text.find(";", start)
        end = len(text) if end < 0 else end
        found.append(text[start:end])
        start = end + 1
    return [each for each in found if each]


def order_in(*texts: str) -> list[str]:
    """The fields of an order that has a `;` between them; no field has one in its name."""
    return [each for text in texts for each in text.split(";") if each]


def joined(conditions: Iterable[str]) -> str:
    """The text that has these conditions: a value that would be split is written in quotes."""
    return ";".join(map(_whole, conditions))


def _whole(condition: str) -> str:
    parts = _WRITTEN.fullmatch(condition)
    if parts is None or _string(parts[2]) is not None:
        return condition
    is_whole = ";" not in parts[2] and parts[2][:1] != '"'
    return condition if is_whole else parts[1] + json.dumps(parts[2])


def _string(written: str) -> str | None:
    """The text of a JSON string; ``None``: it is none."""
    if written[:1] != '"':
        return None
    try:
        return _text(written)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
