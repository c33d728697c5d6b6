"""The rule for valid names: names that an app declares, and keys of entities."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final, NamedTuple

from pydantic import RootModel

from everstate.changes.equality import decimal_text, instant_text
from everstate.changes.json_numbers import decode
from everstate.errors import InvalidChange

EntityKey = tuple[str, str]
"""Entity type and key."""

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names that an app declares (entity types, views, captures, process managers): `fullmatch` it."""

_OWN_COLUMNS: Final = frozenset({"_key", "_version", "_joined_key", "__key", "__version"})
_NOT_IN_COLUMNS: Final = re.compile(r"[\s\x00-\x1f,;{}()=.`\"]")
_PATH_STEPS: Final = (".", "..")
KEY_BYTES_MAX: Final = 2048
"""PostgreSQL's index rows have at most some 2,700 bytes, and a view's has more than the key."""


def column_fault(name: str, *, is_inner: bool = False) -> str | None:
    """Why no column can have this name, as an end of a sentence; ``None``: one can.

    ``is_inner``: the column is in a nested object, where everstate adds none of its own.
    """
    if found := _NOT_IN_COLUMNS.search(name):
        what = "a blank" if found[0].isspace() else repr(found[0])
        return f"has {what}, which the lake or SQL cannot have in a name"
    if not is_inner and name.lower() in _OWN_COLUMNS:
        return "is of a column that everstate adds itself"
    return None


def key_text(value: Any) -> str:
    """The key of a value: as JSON writes the value, and the same text for equal values.

    2.5 and 2.50 are the key `2.5`; a time with an offset is written in UTC.
    """
    if isinstance(value, RootModel):
        value = value.root
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return decimal_text(value)
    return instant_text(value) if isinstance(value, datetime) else str(value)


class OwnKey(NamedTuple):
    """The key in a state's JSON: its column, and the JSON type of that."""

    column: str
    type: str
    former: tuple[str, ...] = ()
    """Names that the column had before."""

    def of(self, state: Mapping[str, Any]) -> Any:
        """The key's value in a decoded state; ``None``: it has none, or several under its names."""
        found = [state[n] for n in (self.column, *self.former) if state.get(n) is not None]
        return found[0] if found and all(each == found[0] for each in found) else None

    def text(self, value: Any) -> str:
        """The key that a JSON value names; the text of a value that is no such key."""
        try:
            return key_text(self._read(value))
        except (ValueError, ArithmeticError, TypeError):
            return key_text(value)

    def fault(self, state: str | None, key: str) -> str | None:
        """Why a state is not that of a key; ``None``: it is, or it is no JSON object."""
        try:
            own = key_text(self._read(decode(state or "null")[self.column]))
        except (ValueError, ArithmeticError, TypeError, KeyError):
            return None
        return None if own == key else f"other_key:{own}"

    def _read(self, value: Any) -> Any:
        if self.type == "decimal":
            return Decimal(str(value))
        return datetime.fromisoformat(value) if self.type == "timestamp" else value


def check_key(entity: str, key: str) -> str:
    """The key, when PostgreSQL, Kafka and a URL can hold it; raises InvalidChange.

    `.` and `..` are refused: HTTP clients remove these path segments from a URL before they send
    it, even when escaped, so no request could name such an entity.
    """
    if not key:
        raise InvalidChange(entity, None, "key", "the key is empty")
    if key in _PATH_STEPS:
        raise InvalidChange(entity, key, "key", "'.' and '..' cannot be part of a URL")
    if "\x00" in key:
        raise InvalidChange(entity, key, "key", "NUL characters are refused")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as cause:
        raise InvalidChange(entity, ascii(key), "key", "it is not valid Unicode") from cause
    if size > KEY_BYTES_MAX:
        reason = f"it has {size:,} bytes, and {KEY_BYTES_MAX:,} are the most that can be kept"
        raise InvalidChange(entity, f"{key[:40]}…", "key", reason)
    return key
