"""Deletes of rows of which the log has no delete: after a TRUNCATE, or while nobody captured.

An entity is in the log, or its rows are held: a delete goes behind these, so that the entity is
deleted once they are released.

What was deleted while nobody captured is missing in a first snapshot that is taken again. A
connector reads all rows a second time when it was stopped before it had stored a position, when
it was removed with its position and added again, and in a new epoch. The raw log has no record of
the deletes that happened meanwhile; of a snapshot that found no row, it has no record at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from typing import Final

import msgspec

from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import DataLoss, LogError
from everstate.log.consumer import Consumer
from everstate.log.positions import Ends, Offsets, Range
from everstate.sources.cdc.balance import Cut, NumberedBatch
from everstate.sources.cdc.completion import ABSENT
from everstate.sources.cdc.composing import RawPlace
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.notifications import ended_snapshots, notifications
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.rows import is_after
from everstate.sources.cdc.states import States
from everstate.sources.cdc.stream import EndedSnapshot

logger = logging.getLogger("everstate.sources.cdc")

_PARTIAL: Final = ("snapshot.include.collection.list", "snapshot.select.statement.overrides")
"""Settings with which a first snapshot may lack rows or tables."""
_DELETES_MAX: Final = 50_000
"""Most of these deletes in one batch, which is one transaction of Kafka."""
_TOO_MANY: Final = (
    "a snapshot lacks {lacks:,} of {of:,} entities, more than {percent} % "
    "(capture.deletes_max_percent), so they stay; "
    "`everstate cdc snapshot {capture} --new-epoch --yes {lacks}` deletes them"
)
HeldRows = Mapping[EntityKey, HeldEntity]
_decode: Final = msgspec.json.Decoder(dict[str, list[int | str]]).decode


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
        self._names = CaptureNames(config.log.prefix, capture.name)
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
        raw, found = self._names.raw_log, list[tuple[int, bool]]()
        for at_ms, is_empty in self._ended:
            since_ms = at_ms if is_empty else at_ms + 1
            offset = self._places.get(since_ms)
            if offset is None:
                offset = self._offsets.at_time([raw], since_ms)[raw, 0]
            if offset < span.end:
                self._places[since_ms] = offset
                if span.start <= offset:
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


def truncated(
    row: CleanRow, entity: str, states: States, held: HeldRows, cut: Cut
) -> Iterator[CleanRow]:
    """A delete of each entity of a truncated table whose newest row is before the truncation.

    They come in the order of their keys; those behind the last one before the cut only.
    """
    for key in _keys(entity, states, held, cut.key):
        newest = _newest(entity, key, states, held)
        if is_after(row.position, newest) is not False:  # type: ignore[arg-type]
            yield msgspec.structs.replace(row, op="d", key=key, columns={})


def too_many(
    capture: str,
    absent: AbsentRows,
    states: States,
    held: HeldRows,
    *,
    percent: int,
    may_delete: int,
) -> dict[str, str]:
    """Leave out the tables of whose entities the snapshot lacks more than this share and number.

    Out: what `cdc status` shows of each. Cost: one pass over the entities.
    """
    found = {}
    for table, entity in list(absent.tables.items()):
        keys = [key in absent.keys[entity] for key in _keys(entity, states, held, "")]
        lacks, of = keys.count(False), len(keys)
        if lacks * 100 > of * percent and lacks > may_delete:
            del absent.tables[table]
            found[table] = _TOO_MANY.format(lacks=lacks, of=of, percent=percent, capture=capture)
    return found


def lacking(
    absent: AbsentRows, epoch: int, states: States, held: HeldRows, cut: Cut
) -> Iterator[CleanRow]:
    """A delete of each entity that is missing in a first snapshot that was taken again.

    They come in the order of table and key; those behind the last one before the cut only.
    """
    gone = CleanRow(table="", op="d", key="", columns={}, time_us=absent.time_us, is_snapshot=True)
    gone.position = {name: [epoch, *place] for name, place in _decode(absent.position).items()}
    gone.provenance, gone.at = {"reason": ABSENT}, absent.place
    for table, entity in sorted(absent.tables.items()):
        if table < cut.table:
            continue
        for key in _keys(entity, states, held, cut.key if table == cut.table else ""):
            if key not in absent.keys[entity]:
                yield msgspec.structs.replace(gone, table=table, key=key)


def bounded(gone: Iterable[CleanRow], batch: NumberedBatch, cut: Cut) -> Iterator[CleanRow]:
    """The deletes that this batch may have; it gets their count, and a cut before the others."""
    for row in gone:
        if batch.added.total() >= _DELETES_MAX:
            batch.cut = cut
            return
        batch.added[row.table] += 1
        yield row
        cut = msgspec.structs.replace(cut, table=row.table, key=row.key)


def _keys(entity: str, states: States, held: HeldRows, after: str) -> Iterator[str]:
    """Keys of a type's entities that are in the log and not deleted, or of which rows are held."""
    waiting = [key for (name, key), one in held.items() if name == entity and one.rows]
    behind = sorted(key for key in waiting if key > after)
    for key, _ in groupby(merge(states.alive(entity, after), behind)):
        yield key


def _newest(entity: str, key: str, states: States, held: HeldRows) -> Mapping[str, list[int | str]]:
    """Position of the newest row of an entity; empty if it has none."""
    known, one = states.get(entity, key), held.get((entity, key))
    waiting = [] if one is None else [row.position for row in one.rows if row.position]
    return waiting[-1] if waiting else {} if known is None else known.position
