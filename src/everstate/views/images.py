"""JSON texts cut out of raw messages, without parsing what is inside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

_NULL: Final = msgspec.Raw(b"null")


class _Cut(msgspec.Struct, rename="camel", gc=False):
    """The parts of an envelope that the store keeps as JSON."""

    provenance: msgspec.Raw
    event: msgspec.Raw = _NULL
    current_entity_state: msgspec.Raw = _NULL


class _Block(msgspec.Struct, gc=False):
    transaction: msgspec.Raw = _NULL


class _State(msgspec.Struct, rename="camel", gc=False):
    current_entity_state: msgspec.Raw = _NULL


_cut = msgspec.json.Decoder(_Cut).decode
_block = msgspec.json.Decoder(_Block).decode
_state = msgspec.json.Decoder(_State).decode


@dataclass(frozen=True, slots=True)
class Images:
    """JSON texts of many changes, one array a column; null where the message has none."""

    provenance: pa.Array
    transaction: pa.Array
    event: pa.Array
    state: pa.Array

    def take(self, rows: pa.Array) -> Images:
        """The texts of some rows, in their order."""
        return Images(
            self.provenance.take(rows),
            self.transaction.take(rows),
            self.event.take(rows),
            self.state.take(rows),
        )


def cut(raw_values: Sequence[bytes]) -> Images:
    """Cut provenance, transaction block, event and current state out of readable messages.

    Cost: about 2 µs a message.
    """
    provenance: list[bytes] = []
    transaction: list[bytes | None] = []
    event: list[bytes | None] = []
    state: list[bytes | None] = []
    for value in raw_values:
        parts = _cut(value)
        source = bytes(parts.provenance)
        provenance.append(source)
        transaction.append(_text(_block(source).transaction) if b"transaction" in source else None)
        event.append(None if parts.event is _NULL else _text(parts.event))
        state.append(_text(parts.current_entity_state))
    return Images(_texts(provenance), _texts(transaction), _texts(event), _texts(state))


def state_text(raw_value: bytes) -> bytes:
    """JSON text of the current state in a readable message; whatever stands around it."""
    return bytes(_state(raw_value).current_entity_state)


def _text(raw: msgspec.Raw) -> bytes | None:
    text = bytes(raw)
    return None if text == b"null" else text


def _texts(values: Sequence[bytes | None]) -> pa.Array:
    return pa.array(values, pa.binary()).cast(pa.string())
