"""Raw and clean side by side, for sample rows: nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.log.consumer import Consumer
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.outbox_reading import RoutedReader
from everstate.sources.cdc.reading import RawReader, RefusedRow

_LOOK_BACK = 20
"""Records of the one raw log that are read for each row that is wanted of each table."""


@dataclass(frozen=True, slots=True)
class Previewed:
    """One raw record and its own contents, which cleaning completes from the newest state."""

    table: str
    partition: int
    offset: int
    raw: str
    """The record's value as it is; empty for a tombstone."""
    outcome: str
    """``whole``, ``partial``, ``deleted``, ``all are deleted``, ``refused: …`` or ``nothing``."""
    key: str | None
    clean: Mapping[str, Any]
    """Fields that the record contains."""


def preview(
    config: Config, capture: Capture, entities: Mapping[str, EntityType], rows: int
) -> list[Previewed]:
    """The newest ``rows`` rows of each table, as they would be cleaned.

    Of the one raw log only the newest records are read, so that a table that is rarely written
    may show fewer rows. Raises LogError when there is no raw topic yet.
    """
    reader = (RawReader if capture.outbox is None else RoutedReader)(capture, entities)
    names = TopicNames(config.log.prefix)
    parts = {"": ""} if capture.is_ours else capture.by_topic()
    found: dict[str, list[Previewed]] = {table: [] for table in capture.tables}
    with Consumer(config, client_id="everstate-preview") as consumer:
        for part in parts:
            topic = names.raw(capture.name, part) if part else names.raw_prefix(capture.name)
            count = rows if part else _LOOK_BACK * rows * len(capture.tables)
            # Tombstones and transaction markers take offsets too: read a little further back.
            newest = consumer.read_topic(topic, last=2 * count + 2)
            for record in sorted(newest, key=lambda one: (one.timestamp_ms, one.offset)):
                header_map = dict(record.headers)
                headers = [header_map.get(name) for name in reader.header_names]
                value = (part, record.key, record.value, headers, record.timestamp_ms)
                for one in _previewed(parts[part], record, reader.read(*value)):
                    found.setdefault(one.table, []).append(one)
    return [one for listed in found.values() for one in listed[-rows:]]


def _previewed(table: str, record: Record, parsed: Sequence[Any]) -> Iterator[Previewed]:
    """The previews of one record; ``table``: the table of its topic, "" in the one raw log."""
    raw = "" if record.value is None else record.value.decode(errors="replace")
    place = (record.partition, record.offset, raw)
    if not parsed and table:
        yield Previewed(table, *place, "nothing", None, {})
    for one in parsed:
        if isinstance(one, RefusedRow):
            yield Previewed(one.table, *place, f"refused: {one.reason}", one.key, {})
        elif isinstance(one, CleanRow):
            fields = one.known or {}
            if one.state is not None:
                fields = msgspec.json.decode(one.state)
            yield Previewed(one.table, *place, _outcome(one), one.key, fields)


def _outcome(row: CleanRow) -> str:
    whole = "whole" if row.state is not None or row.covers else "partial"
    return {"t": "all are deleted", "d": "deleted"}.get(row.op, whole)
