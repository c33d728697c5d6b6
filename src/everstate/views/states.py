"""Typed Arrow states from JSON texts, as Spark reads the same messages."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from everstate.changes.json_numbers import decode
from everstate.changes.typed import typed_value


def typed_states(texts: Sequence[str | None], fields: Sequence[pa.Field]) -> pa.Array:
    """Typed states from JSON texts; null for no text, and for a value that does not fit its type.

    A message that was written by an older model may lack a field, or have it with another type.
    """
    kind = pa.struct(list(fields))
    states = [None if text is None else typed_value(kind, decode(text)) for text in texts]
    return pa.array(states, kind)
