"""The rule for valid names: names that an app declares, and keys of entities."""

from __future__ import annotations

import re
from typing import Final

from everstate.errors import InvalidChange

EntityKey = tuple[str, str]
"""Entity type and key."""

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names that an app declares (entity types, views, captures, process managers): `fullmatch` it."""

_PATH_STEPS: Final = (".", "..")
KEY_BYTES_MAX: Final = 2048
"""PostgreSQL's index rows have at most some 2,700 bytes, and a view's has more than the key."""


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
