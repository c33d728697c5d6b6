"""Values as people write them in conditions: `null` is no value, and `"null"` is a text.

A value in double quotes is a JSON string, so every text can be written: also `null`, blanks at its
beginning, and a text that has quotes itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

_NULL: Final = "null"
_text = msgspec.json.Decoder(str).decode


def unquoted(written: str, *, takes_null: bool = True) -> str | None:
    """The text that is meant; ``None`` for `null`, unless the field cannot be null."""
    if written == _NULL and takes_null:
        return None
    if written[:1] == '"':
        try:
            return _text(written)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return written  # no JSON string: the quotes are part of it
    return written
