"""Entities that are missing in a first snapshot that a connector took again: they were deleted.

A connector reads all rows a second time when it was stopped before it had stored a position, when
it was removed with its position and added again, and in a new epoch. The raw log has no record of
the deletes that happened meanwhile; of a snapshot that found no row, it has no record at all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import DataLoss, LogError
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets, Range
from everstate.sources.cdc.composing import RawPlace
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.names import names_of
from everstate.sources.cdc.notifications import ended_snapshots, notifications
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.stream import EndedSnapshot

logger = logging.getLogger("everstate.sources.cdc")

_PARTIAL: Final = ("snapshot.include.collection.list", "snapshot.select.statement.overrides")
"""Settings with which a first snapshot may lack rows or tables."""


@dataclass(frozen=True, slots=True)
class AbsentRows:
    """The keys in a snapshot, for the tables of which it certainly has all rows."""

    tables: dict[str, str]
    """Table → entity type; one table for each type."""
    keys: dict[str, set[str]]
    """Entity type → keys in the snapshot."""
    position: bytes
    place: RawPlace
    """Of the snapshot's last row."""
    time_us: int | None


class FirstSnapshots:
    """Finds where first snapshots end, of which only the connector's notifications tell."""

    def __init__(self, config: Config, capture: Capture, offsets: Offsets) -> None:
        self._config, self._tables, self._offsets = config, tuple(capture.tables), offsets
        self._names = names_of(config.log.prefix, capture)
        self._read_to: Ends | None = None
        self._ended: list[tuple[int, bool]] = []
        self._places: dict[int, int] = {}
        """Timestamp → offset of the first record that is not older, once there is one."""

    def ended(self, span: Range) -> list[tuple[int, bool]]:
        """Offsets of the raw log, within these, before which one ended; whether it had no row.

        The connector sends notifications and rows through one producer, in its order. Its rows
        have no later timestamp than the end's notification, and those of the source's log no
        earlier one. Call it after the range was read. Cost: one request, while there is no new
        notification.
        """
        try:
            ends = self._offsets.stable_ends([self._names.notifications])
        except LogError:
            return []  # The connector was not made yet.
        if ends != self._read_to:
            steps = notifications(self._config, self._names)
            self._ended, self._read_to = ended_snapshots(steps, self._tables), ends
        raw = self._names.raw_log
        found = []
        for at_ms, is_empty in self._ended:
            since_ms = at_ms if is_empty else at_ms + 1
            offset = self._places.get(since_ms)
            if offset is None:
                offset = self._offsets.at_time([raw], since_ms)[raw, 0]
                if offset < span.end:
                    self._places[since_ms] = offset
            if span.start <= offset < span.end:
                found.append((offset, is_empty))
        return sorted(found, reverse=True)


def read_absent(
    reader: RawReader, consumer: Consumer, ended: EndedSnapshot, place: RawPlace
) -> AbsentRows:
    """Read the keys of a snapshot from the raw log once more.

    An entity type whose keys cannot all be read is left out, and an error is logged. Cost: one
    pass over the snapshot's records in the raw log, in this process, and its keys in memory.
    """
    capture = reader.capture
    tables = {table.entity: name for name, table in capture.tables.items()}
    keys: dict[str, set[str]] = {entity: set() for entity in tables}
    why: dict[str, str] = {}
    time_us: int | None = None
    if any(name in capture.settings for name in _PARTIAL):
        why = dict.fromkeys(tables, "the capture's settings leave rows out of snapshots")
    try:
        for record in consumer.read(place.topic, place.partition, ended.first, ended.end):
            headers = dict(record.headers)
            header_values = [headers.get(name) for name in reader.header_names]
            for one in reader.read("", record.key, record.value, header_values):
                if isinstance(one, RefusedRow) and (not one.table or one.key is None):
                    refused = capture.tables.get(one.table)
                    for entity in tables if refused is None else (refused.entity,):
                        why[entity] = f"a row has no key that can be read ({one.reason})"
                elif isinstance(one, CleanRow | RefusedRow) and one.op == "r":
                    keys[capture.tables[one.table].entity].add(one.key or "")
                    time_us = one.time_us
    except DataLoss as error:
        why = dict.fromkeys(tables, error.message)
    for entity, reason in why.items():
        logger.error(
            "capture %s: a first snapshot was taken again, and what it lacks of %s cannot be "
            "found: %s. Entities that were deleted meanwhile are still in the log",
            *(capture.name, entity, reason),
        )
    known = {name: entity for entity, name in tables.items() if entity not in why}
    return AbsentRows(known, keys, ended.position, place, time_us)
