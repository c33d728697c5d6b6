"""How deeply JSON may be nested: one limit for all writers, and decoders for all readers.

Python's decoders raise RecursionError at about 1,000 levels, which is no ValueError; pydantic's
stop at 200. A value within the limit is read by all of them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

DEPTH_MAX: Final = 100
"""Levels of arrays and objects in a state, in the data of an event, and in a command. The SQL
function `everstate_store.check_json` has the same limit."""
TOO_DEEP: Final = f"it is nested more than {DEPTH_MAX} levels deep"

_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS: Final = bytes(byte for byte in range(256) if byte not in _STEPS)


def is_too_deep(encoded: bytes) -> bool:
    """Whether JSON text is nested more deeply than the limit.

    Cost: two counts; a pass over the text only if it has more brackets than the limit.
    """
    if encoded.count(b"[") + encoded.count(b"{") <= DEPTH_MAX:
        return False
    brackets = _STRINGS.sub(b"", encoded).translate(None, _OTHERS)
    return any(depth > DEPTH_MAX for depth in accumulate(map(_STEPS.__getitem__, brackets)))


def bounded(decode: Callable[[bytes | str], T]) -> Callable[[bytes | str], T]:
    """The decoder, which raises msgspec.DecodeError also for a value that is nested too deeply."""

    def bounded_decode(value: bytes | str) -> T:
        try:
            return decode(value)
        except RecursionError as cause:
            raise msgspec.DecodeError(TOO_DEEP) from cause

    return bounded_decode
