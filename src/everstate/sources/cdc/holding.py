"""Rows that wait: for a snapshot of their key, for a parent, for the name of a code.

All that is held of one entity is one record of a compacted topic, written in the transaction
that moves the position past the rows; the record is also the request for a snapshot.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.sources.cdc.completion import PRIOR_UNKNOWN, WAITS_CODE, WAITS_PARENT
from everstate.sources.cdc.mapping import CleanRow

HELD = "held"
"""Last part of the topic's name, ``<prefix>.capture.<source>.held``."""

_encode_row = msgspec.msgpack.Encoder().encode
_decode_row = msgspec.msgpack.Decoder(CleanRow).decode


class _Wire(msgspec.Struct, rename="camel"):
    table: str
    entity: str
    key: str
    columns: dict[str, Any]
    reason: str
    since: str
    rows: list[str]
    waits_for: tuple[str, str] | None = None
    is_unsure: bool = False


_decode = msgspec.json.Decoder(_Wire).decode


@dataclass(slots=True)
class HeldEntity:
    """The rows of one entity that wait, oldest first, and why the first one does.

    No rows: a row of it was refused, so that only a whole row makes its state sure again.
    """

    table: str
    entity: str
    key: str
    columns: dict[str, Any]
    """Key columns, as the source has them."""
    reason: str
    since_s: float
    """Seconds since 1970 when the first row began to wait."""
    rows: list[CleanRow] = field(default_factory=list)
    waits_for: tuple[str, str] | None = None
    is_unsure: bool = False

    @property
    def needs_snapshot(self) -> bool:
        """Whether a snapshot of its key would make its state sure again."""
        return self.is_unsure or self.reason == PRIOR_UNKNOWN

    @property
    def waits_for_state(self) -> bool:
        """Whether rows of it wait because the state before is unknown, and for nothing else.

        For these the clean role asks for snapshots. It does not for an entity of which a row was
        refused: the same row would come again.
        """
        return bool(self.rows) and self.reason == PRIOR_UNKNOWN

    @property
    def waits_for_other(self) -> bool:
        """Whether rows of it wait for a parent or the name of a code, and for nothing else."""
        return bool(self.rows) and self.reason in (WAITS_PARENT, WAITS_CODE)

    def encode(self) -> bytes:
        """The record's value."""
        return msgspec.json.encode(
            _Wire(
                self.table,
                self.entity,
                self.key,
                self.columns,
                self.reason,
                datetime.fromtimestamp(self.since_s, UTC).isoformat(),
                [base64.b64encode(_encode_row(row)).decode() for row in self.rows],
                self.waits_for,
                self.is_unsure,
            )
        )

    @classmethod
    def decode(cls, value: bytes) -> HeldEntity:
        """What was held, from the record's value."""
        wire = _decode(value)
        return cls(
            wire.table,
            wire.entity,
            wire.key,
            wire.columns,
            wire.reason,
            datetime.fromisoformat(wire.since).timestamp(),
            [_decode_row(base64.b64decode(row)) for row in wire.rows],
            wire.waits_for,
            wire.is_unsure,
        )


def held_key(entity: str, key: str) -> bytes:
    """Key of the record of one entity."""
    return f"{entity}\n{key}".encode()


def read_held(config: Config, source: str) -> list[HeldEntity]:
    """What a capture holds now, oldest first: those that ask for a snapshot, and those that wait.

    Cost: the whole compacted topic is read. Raises LogError when the capture was never cleaned.
    """
    found: dict[bytes, HeldEntity] = {}
    with Consumer(config, client_id="everstate-held") as consumer:
        for record in consumer.read_topic(TopicNames(config.log.prefix).capture(source, HELD)):
            if record.key is None:
                continue
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = HeldEntity.decode(record.value)
    return sorted(found.values(), key=lambda held: held.since_s)
