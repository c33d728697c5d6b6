"""What names may be: those that an app declares, and the keys of entities. One rule for all."""

from __future__ import annotations

import re
from typing import Final

from everstate.errors import InvalidChange

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names that an app declares (entity types, views, captures, process managers): `fullmatch` it."""

_PATH_STEPS: Final = (".", "..")
KEY_BYTES_MAX: Final = 2048
"""PostgreSQL's indexes end at some 2,700 bytes a row, and a view's row has more than the key."""


def check_key(entity: str, key: str) -> str:
    """The key, when PostgreSQL, Kafka and a URL can hold it; raises InvalidChange.

    `.` and `..` are steps in a path: clients take them out of an address before they send it,
    also when they are escaped, so no request could ever name such an entity.
    """
    if not key:
        raise InvalidChange(entity, None, "key", "the key is empty")
    if key in _PATH_STEPS:
        raise InvalidChange(entity, key, "key", "no address can name it: it is a step in a path")
    if "\x00" in key:
        raise InvalidChange(entity, key, "key", "NUL characters are refused")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as cause:
        raise InvalidChange(entity, ascii(key), "key", "it is no Unicode text") from cause
    if size > KEY_BYTES_MAX:
        reason = f"it has {size:,} bytes, and {KEY_BYTES_MAX:,} are the most that can be kept"
        raise InvalidChange(entity, f"{key[:40]}…", "key", reason)
    return key
