"""The second wire form: a change in Debezium's format, for readers of Debezium topics."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import msgspec

from everstate.changes.change import Kind
from everstate.changes.codec import WireChange, decode_wire
from everstate.errors import InvalidChange

_OPS: Final = {Kind.CREATED: "c", Kind.UPDATED: "u", Kind.DELETED: "d", Kind.EVENT: "c"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_encode = msgspec.json.Encoder().encode


class _Source(msgspec.Struct):
    version: str
    connector: str
    name: str
    ts_ms: int
    ts_us: int
    snapshot: str
    db: str
    table: str
    change_id: str
    entity_version: int
    identifier: str
    actor: str | None
    reason: str | None


class _Transaction(msgspec.Struct):
    id: str
    total_order: int
    data_collection_order: int | None = None


class _Envelope(msgspec.Struct):
    before: msgspec.Raw
    after: msgspec.Raw
    source: _Source
    op: str
    ts_ms: int
    ts_us: int
    transaction: _Transaction | None


def debezium_records(
    value: bytes, key_field: str, database: str
) -> list[tuple[bytes, bytes | None]]:
    """Key and value of a change in Debezium's form; a delete is followed by a tombstone.

    ``key_field`` names the key's column, ``database`` is the value of ``source.db``. Raises
    InvalidChange. Only the key is parsed out of the states.
    """
    try:
        wire = decode_wire(value)
    except msgspec.DecodeError as cause:
        raise InvalidChange("change", None, "message", str(cause)) from cause
    key = _encode({key_field: _key(wire, key_field)})
    records: list[tuple[bytes, bytes | None]] = [(key, _encode(_envelope(wire, database)))]
    if wire.kind is Kind.DELETED:
        records.append((key, None))
    return records


def _key(wire: WireChange, field: str) -> Any:
    """The key's value in the state; the key's text when the state has no such field."""
    absent = wire.kind is Kind.DELETED
    state = wire.original_entity_state if absent else wire.current_entity_state
    return getattr(_key_decoder(field).decode(state), "key", None) or wire.key


@lru_cache(maxsize=256)
def _key_decoder(field: str) -> msgspec.json.Decoder[Any]:
    kept = msgspec.defstruct("Key", [("key", Any, None)], rename={"key": field})
    return msgspec.json.Decoder(kept)


def _envelope(wire: WireChange, database: str) -> _Envelope:
    occurred_us, recorded_us = _micros(wire.occurred_at), _micros(wire.recorded_at)
    source = wire.provenance
    block = source.transaction
    return _Envelope(
        before=wire.original_entity_state,
        after=wire.current_entity_state,
        source=_Source(
            version=source.api_version,
            connector="everstate",
            name=source.service_name,
            ts_ms=occurred_us // 1000,
            ts_us=occurred_us,
            snapshot="false",
            db=database,
            table=wire.entity,
            change_id=str(wire.id),
            entity_version=wire.version,
            identifier=source.identifier,
            actor=source.actor,
            reason=source.reason,
        ),
        op=_OPS[wire.kind],
        ts_ms=recorded_us // 1000,
        ts_us=recorded_us,
        transaction=None if block is None else _Transaction(block.id, block.index),
    )


def _micros(at: Any) -> int:
    since: int = (at - _EPOCH) // _US
    return since
