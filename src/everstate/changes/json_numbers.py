"""JSON whose numbers keep all their digits. Pure.

A float has some 16 digits, so most JSON readers change `12345678901234567890.12` silently. Here a
number that a float would change is a :class:`JsonNumber`, and is written again as it was read.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Self

import msgspec
import orjson

from everstate.changes.depth import bounded

_SHORT: Final = 16
"""Characters of a number without an exponent that a float always holds: 15 digits and a point."""


class JsonNumber(Decimal):
    """A JSON number that no float is equal to."""

    __slots__ = ()


class WrittenNumber(JsonNumber):
    """A JSON number that knows its text; raises ValueError for one that is too large or small."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        """The number of a JSON text."""
        try:
            number = super().__new__(cls, text)
        except InvalidOperation as cause:
            raise ValueError(f"the number {text[:40]} is too large or too small") from cause
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def number_of(text: str) -> float | JsonNumber:
    """The value of a JSON number that has a fraction or an exponent; raises ValueError."""
    if len(text) <= _SHORT and "e" not in text and "E" not in text:
        return float(text)
    value = float(text)
    try:
        exact = JsonNumber(text)
    except InvalidOperation as cause:
        raise ValueError(f"the number {text[:40]} is too large or too small") from cause
    return value if Decimal(repr(value)) == exact else exact


_MAY_BE_CHANGED: Final = re.compile(rb"\d[\d.]{15}|\d[eE][-+\d]")


def may_be_changed(text: bytes) -> bool:
    """Whether JSON text may have a number that a float changes; finds each, and few others."""
    return _MAY_BE_CHANGED.search(text) is not None


_decode: Final = bounded(msgspec.json.Decoder(float_hook=number_of).decode)


def decode(text: bytes | str) -> Any:
    """Any JSON value of a text; raises msgspec.DecodeError."""
    # A function of its own, since a driver would make new classes at each connection for a closure.
    return _decode(text)


decode_as_written: Final = bounded(msgspec.json.Decoder(float_hook=WrittenNumber).decode)
"""As :func:`decode`, but every number with a fraction or an exponent keeps its text."""


def _written(value: Any) -> Any:
    if isinstance(value, JsonNumber):
        return msgspec.Raw(str(value).encode())
    raise TypeError(f"{type(value).__name__} has no JSON form here")


encode: Final = msgspec.json.Encoder(enc_hook=_written).encode
"""The JSON text of a value that :data:`decode` returned."""
encode_sorted: Final = msgspec.json.Encoder(enc_hook=_written, order="sorted").encode
"""The same for equal values, whatever the order of their members."""


def sorted_text(text: bytes | str) -> bytes:
    """JSON text with sorted members and all digits of its numbers; raises ValueError.

    Cost: that of orjson, where no number may be changed by a float.
    """
    written = text.encode() if isinstance(text, str) else text
    if may_be_changed(written):
        return encode_sorted(decode(written))
    return orjson.dumps(orjson.loads(written), option=orjson.OPT_SORT_KEYS)


def orjson_default(value: Any) -> Any:
    r"""The JSON of values that orjson does not know: a number as it was read, others as text.

    Bytes are PostgreSQL's text of them, such as ``\x00ff``.
    """
    if isinstance(value, JsonNumber):
        return orjson.Fragment(str(value))
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)
