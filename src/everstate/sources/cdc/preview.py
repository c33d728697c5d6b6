"""Raw and clean side by side, for sample rows: nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from everstate.changes import EntityType
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.outbox_reading import RoutedReader
from everstate.sources.cdc.reading import RawReader, RefusedRow


@dataclass(frozen=True, slots=True)
class Previewed:
    """One raw record and what it says by itself; clean completes it from the newest state."""

    table: str
    partition: int
    offset: int
    raw: str
    """The record's value as it is; empty for a tombstone."""
    outcome: str
    """``whole``, ``partial``, ``deleted``, ``refused: …`` or ``nothing``."""
    key: str | None
    clean: Mapping[str, Any]
    """Fields that the record knows."""


def preview(
    config: Config, capture: Capture, entities: Mapping[str, EntityType], rows: int
) -> list[Previewed]:
    """The newest ``rows`` records of each table's raw topic, as they would be cleaned.

    Raises LogError when a table has no raw topic yet. Cost: those records are read.
    """
    reader = (RawReader if capture.outbox is None else RoutedReader)(capture, entities)
    names = TopicNames(config.log.prefix)
    found: list[Previewed] = []
    with Consumer(config, client_id="everstate-preview") as consumer:
        for part, table in capture.by_topic().items():
            topic = names.raw(capture.name, part)
            records = sorted(_newest(config, consumer, topic, rows), key=_age)[-rows:]
            for record in records:
                parsed = reader.read(
                    part, record.key, record.value, record.headers, record.timestamp_ms
                )
                found += _previewed(table, record, parsed)
    return found


def _age(record: Record) -> tuple[int, int]:
    return record.timestamp_ms, record.offset


def _newest(config: Config, consumer: Consumer, topic: str, rows: int) -> Iterator[Record]:
    with Offsets(config) as offsets:
        starts, ends = offsets.beginnings([topic]), offsets.stable_ends([topic])
    for (_, partition), end in ends.items():
        # Tombstones and markers take offsets, too: look a little further back.
        start = max(starts[topic, partition], end - 2 * rows - 2)
        yield from consumer.read(topic, partition, start, end)


def _previewed(table: str, record: Record, parsed: list[Any]) -> Iterator[Previewed]:
    raw = "" if record.value is None else record.value.decode(errors="replace")
    place = (table, record.partition, record.offset, raw)
    if not parsed:
        yield Previewed(*place, "nothing", None, {})
    for one in parsed:
        if isinstance(one, RefusedRow):
            yield Previewed(*place, f"refused: {one.reason}", one.key, {})
        elif isinstance(one, CleanRow):
            yield Previewed(*place, _outcome(one), one.key, _fields(one))


def _outcome(row: CleanRow) -> str:
    if row.op == "t":
        return "all are deleted"
    if row.op == "d":
        return "deleted"
    return "whole" if row.state is not None or row.covers else "partial"


def _fields(row: CleanRow) -> Mapping[str, Any]:
    if row.state is not None:
        found: dict[str, Any] = msgspec.json.decode(row.state)
        return found
    return row.known or {}
