"""Held rows: they wait for a snapshot of their key, for a parent, or for the name of a code.

All held rows of one entity are one record of a compacted topic, written in the Kafka transaction
that moves the raw position past them. The record also has the key whose snapshot is needed.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.sources.cdc.completion import PRIOR_UNKNOWN, WAITS_CODE, WAITS_PARENT, Known
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.rows import behind, is_after

REFUSED: Final = "a row was refused"
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
    position: dict[str, list[int | str]] = {}


_decode = msgspec.json.Decoder(_Wire).decode


@dataclass(slots=True)
class HeldEntity:
    """The held rows of one entity, oldest first, and why the first one waits.

    Without rows: a row of the entity was refused, and its state is uncertain until a whole row
    comes.
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
    position: dict[str, list[int | str]] = field(default_factory=dict)
    """Only in an entry for a whole table (its key is ""): position of its last refused row."""

    @property
    def needs_snapshot(self) -> bool:
        """Whether a snapshot of its key would make its state certain again."""
        return self.is_unsure or self.reason == PRIOR_UNKNOWN

    @property
    def waits_for_state(self) -> bool:
        """Whether rows of it wait because the state before is unknown, and for nothing else.

        The clean role requests snapshots for these. It requests none for an entity of which a row
        was refused: the snapshot would have the same row.
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
                self.position,
            )
        )

    @classmethod
    def decode(cls, value: bytes) -> HeldEntity:
        """The held entity, from the record's value."""
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
            wire.position,
        )


class Doubts:
    """Entities of which a row was refused: their state is uncertain until a whole row comes.

    Each is a held entry without rows. When a table has too many of them, one entry with the key ""
    replaces them, for all entities whose newest change is older than the last refused row.
    """

    def __init__(self, held: dict[tuple[str, str], HeldEntity], keys_max: int) -> None:
        self._held, self._keys_max = held, max(1, keys_max)
        self._count = Counter(one.table for one in held.values() if not one.rows)
        self._whole = {one.table: one for one in held.values() if not one.key}
        self._tables = {one.entity: one for one in self._whole.values()}

    def is_clear(self, entity: str, key: str) -> bool:
        """Whether nothing of an entity is held, and its table is not in doubt."""
        return (entity, key) not in self._held and entity not in self._tables

    def is_unsure(self, entity: tuple[str, str], known: Known | None) -> bool:
        """Whether the state of an entity without a held entry of its own is uncertain."""
        whole = self._tables.get(entity[0])
        if whole is None or known is None:
            return False
        return is_after(known.position, whole.position) is not True  # type: ignore[arg-type]

    def settled_at(self, table: str, known: Known | None) -> bytes:
        """Position for a state that came without one: after the table's last refused row."""
        place = b"" if known is None else known.place
        whole = self._whole.get(table)
        if whole is None or not whole.position:
            return place
        newer = behind([whole.position, *([known.position] if known else [])])
        return msgspec.json.encode(newer)

    def add(
        self,
        entity: tuple[str, str],
        table: str,
        columns: dict[str, Any],
        position: Mapping[str, list[int | str]],
        now_s: float,
    ) -> set[tuple[str, str]]:
        """Record that a row of an entity was refused; out: the changed held entries."""
        whole = self._whole.get(table)
        if whole is not None and entity not in self._held:
            if position and is_after(position, whole.position) is False:  # type: ignore[arg-type]
                return set()
            whole.position = dict(position)
            return {(whole.entity, "")}
        held = self._held.get(entity)
        if held is None:
            held = HeldEntity(table, *entity, columns, REFUSED, now_s)
            self._held[entity] = held
            self._count[table] += 1
        held.is_unsure = True
        if self._count[table] <= self._keys_max or not position:
            return {entity}
        return self._merge(table, entity[0], position, now_s) | {entity}

    def _merge(
        self, table: str, entity: str, position: Mapping[str, list[int | str]], now_s: float
    ) -> set[tuple[str, str]]:
        """Replace all entries of a table that have no rows by one entry."""
        merged = {e for e, one in self._held.items() if one.table == table and not one.rows}
        for each in merged:
            del self._held[each]
        whole = HeldEntity(table, entity, "", {}, REFUSED, now_s, is_unsure=True)
        whole.position = dict(position)
        self._held[entity, ""] = self._whole[table] = self._tables[entity] = whole
        self._count[table] = 0
        return {*merged, (entity, "")}


def held_key(entity: str, key: str) -> bytes:
    """Key of the record of one entity."""
    return f"{entity}\n{key}".encode()


def read_held(config: Config, source: str) -> list[HeldEntity]:
    """The held entities of a capture, oldest first.

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
