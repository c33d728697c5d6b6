"""Rows as MessagePack, with whole numbers of any length: a `numeric` column may have 38 digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

_T = TypeVar("_T")
_WIDE: Final = 1
"""Code of the extension type for a whole number that MessagePack itself cannot hold."""
_WIDTH: Final = range(-(2**63), 2**64)
_pack = msgspec.msgpack.Encoder().encode


def packed(row: Any) -> bytes:
    """A struct, or a tuple with one, as MessagePack."""
    try:
        return _pack(row)
    except OverflowError:
        return _pack(_widened(row))


def unpacker(kind: type[_T]) -> Callable[[bytes], _T]:
    """The function that reads what :func:`packed` wrote."""
    return msgspec.msgpack.Decoder(kind, ext_hook=_wide).decode


def _wide(code: int, data: memoryview) -> int:
    assert code == _WIDE, code
    return int(bytes(data))


def _widened(value: Any) -> Any:
    if value.__class__ is int and value not in _WIDTH:
        return msgspec.msgpack.Ext(_WIDE, str(value).encode())
    if isinstance(value, dict):
        return {name: _widened(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_widened(each) for each in value]
    if isinstance(value, msgspec.Struct):
        fields = {name: _widened(getattr(value, name)) for name in value.__struct_fields__}
        return type(value)(**fields)
    return value
