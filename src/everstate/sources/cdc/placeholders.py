"""How Debezium writes a value that it does not know, in columns of each type.

PostgreSQL's log does not contain a long (TOASTed) value that did not change. Debezium then writes
a placeholder, which is a setting of the connector.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final
from uuid import UUID

from everstate.declarations.captures import Capture

DEFAULT_SETTING: Final = "__debezium_unavailable_value"
"""Debezium's default; a text in the database may be equal to it."""
OWN_SETTING: Final = "hex:00" + b"__everstate_unavailable_value".hex()
"""The setting of our connectors to PostgreSQL: it begins with NUL, which no text there can have."""
_compact: Final = partial(json.dumps, separators=(",", ":"))
NAME: Final = "unavailable.value.placeholder"
"""Name of the connector's setting."""


class Placeholder:
    """All forms of one placeholder."""

    def __init__(self, setting: str) -> None:
        is_hex = setting.startswith("hex:")
        raw = bytes.fromhex(setting.removeprefix("hex:")) if is_hex else setting.encode()
        self.text = raw.decode(errors="replace")
        """Its form in a text column."""
        encoded = base64.b64encode(raw).decode()
        self._texts = {self.text, encoded, _compact({self.text: self.text})}
        # In an array of numbers: one number per byte, signed as in Java.
        numbers = [byte - 256 if byte > 127 else byte for byte in raw]
        # In an array of UUIDs: the result of Java's UUID.nameUUIDFromBytes.
        digest = hashlib.md5(raw, usedforsecurity=False).digest()
        uuid = str(UUID(bytes=digest, version=3))
        self._lists = ([self.text], [encoded], numbers, [uuid])
        self._encoded = encoded
        # Only the start of the base64 form: some writers of JSON escape the equals sign at its end.
        plain = self.text.lstrip("\0").encode()
        self._marks = (
            plain,
            encoded[:16].encode(),
            _compact(numbers)[1:-1].encode(),
            uuid.encode(),
        )

    def may_be_in(self, message: bytes) -> bool:
        """Whether a message's text has one of the forms anywhere; a quick look."""
        text, encoded, numbers, uuid = self._marks
        # Asked of each row: any() with a generator would cost four times as much.
        return text in message or encoded in message or numbers in message or uuid in message

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


def setting_of(capture: Capture) -> str:
    """The setting with which a capture's connector writes unknown values.

    It is the declared one, or ours where `everstate cdc add` makes the connector. Of a connector
    that somebody else runs it is Debezium's default, unless ``settings`` has another.
    """
    is_ours = capture.kind == "postgresql" and capture.dsn is not None
    return capture.settings.get(NAME, OWN_SETTING if is_ours else DEFAULT_SETTING)


@lru_cache(maxsize=16)
def placeholder_of(setting: str) -> Placeholder:
    """Placeholder of a connector with this setting."""
    return Placeholder(setting)
