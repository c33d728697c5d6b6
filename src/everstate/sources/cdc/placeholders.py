"""How Debezium writes a value that it does not know, in columns of each type.

PostgreSQL does not tell a long value (a TOASTed one) that did not change. Debezium then writes a
placeholder, which is a setting of the connector.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

DEFAULT_SETTING: Final = "__debezium_unavailable_value"
"""Debezium's own; a text of the database may be equal to it."""
OWN_SETTING: Final = "hex:00" + b"__everstate_unavailable_value".hex()
"""That of our connectors to PostgreSQL: it begins with NUL, which no text there can have."""
NAME: Final = "unavailable.value.placeholder"
"""The connector's setting."""


class Placeholder:
    """All forms of one placeholder."""

    def __init__(self, setting: str) -> None:
        is_hex = setting.startswith("hex:")
        raw = bytes.fromhex(setting.removeprefix("hex:")) if is_hex else setting.encode()
        self.text = raw.decode(errors="replace")
        """As a text column has it."""
        encoded = base64.b64encode(raw).decode()
        self._texts = {self.text, encoded, _compact({self.text: self.text})}
        # What a column of Java's bytes gives for an array of numbers: one signed byte a number.
        numbers = [byte - 256 if byte > 127 else byte for byte in raw]
        # What UUID.nameUUIDFromBytes gives for an array of UUIDs.
        digest = hashlib.md5(raw, usedforsecurity=False).digest()
        uuid = str(UUID(bytes=digest, version=3))
        self._lists = ([self.text], [encoded], numbers, [uuid])
        self._encoded = encoded
        # Of base64 so much that it is found quickly; some writers of JSON escape its equals sign.
        plain = self.text.lstrip("\0").encode()
        self._marks = (
            plain,
            encoded[:16].encode(),
            _compact(numbers)[1:-1].encode(),
            uuid.encode(),
        )

    def may_be_in(self, message: bytes) -> bool:
        """Whether a message's text has one of the forms anywhere; a quick look."""
        return any(mark in message for mark in self._marks)

    def without(self, image: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The columns of an image whose values are known."""
        if image is None or not any(map(self._stands_for, image.values())):
            return image
        return {name: value for name, value in image.items() if not self._stands_for(value)}

    def _stands_for(self, value: Any) -> bool:
        kind = value.__class__
        if kind is str:
            return value in self._texts
        if kind is list:
            return value in self._lists
        if kind is dict:
            return self.text in value or value.get("value") == self._encoded
        return False


@lru_cache(maxsize=16)
def placeholder_of(setting: str) -> Placeholder:
    """Placeholder of a connector with this setting."""
    return Placeholder(setting)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
