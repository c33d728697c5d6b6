"""Cold reads: one key's history from the lake, when the views do not have it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from everstate.archive import ArchiveLog, ArchiveReader
from everstate.changes.codec import decode_wire
from everstate.changes.json_numbers import decode
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames
from everstate.serving.answers import ColdRead
from everstate.serving.connection import ReadConnection
from everstate.views.control import ViewStatuses
from everstate.views.images import cut
from everstate.views.tables import Core, Row

_COLUMNS: Final = ("generation", "partition", "offset", "raw_value")


@dataclass(frozen=True, slots=True)
class ColdHistory:
    """Rows of a key's accepted versions, oldest first, as in a history; and their cost."""

    rows: list[Row]
    read: ColdRead


def cold_history(
    config: Config, connection: ReadConnection, entity: str, key: str
) -> ColdHistory | None:
    """All accepted versions of a key, from the archive and the part of the log after it.

    ``None``: the core has accepted none. Files that cannot have the key are skipped by their
    statistics; the log after the archive is read only when a version is missing. Raises
    ArchiveError, DataLoss, Unavailable.
    """
    began = time.monotonic()
    names = TopicNames(config.log.prefix)
    control = connection.standings(config.views.schema_name)
    newest = control.accepted(entity, key)
    if newest is None:
        return None
    version, generation, partition, end = newest
    core = Core(entity, names.changes(entity, generation), generation=generation)
    places, archived, files_read, files = _from_archive(config, entity, key)
    # The archive may be ahead of the core, which has not judged those records yet (V6).
    here = (generation, partition)
    places = [place for place in places if place[:2] != here or place[2] < end]
    found = _accepted(control, core, places)[:version]
    from_log = 0
    if len(found) < version:
        start = archived.get(generation, {}).get(partition, 0)
        with Consumer(config, client_id="everstate-cold") as consumer:
            for record in consumer.read(core.topic, partition, start, end):
                if record.key == key.encode() and record.value is not None:
                    places.append((generation, partition, record.offset, record.value))
                    from_log += 1
        found = _accepted(control, core, places)[:version]
    read = ColdRead(files_read, files, from_log, time.monotonic() - began)
    return ColdHistory(_rows(found), read)


_Place = tuple[int, int, int, bytes]


def _from_archive(
    config: Config, entity: str, key: str
) -> tuple[list[_Place], dict[int, dict[int, int]], int, int]:
    """Records of a key in log order, the archive's position, and numbers of files: read and all."""
    if not ArchiveLog(config, entity).exists():
        return [], {}, 0, 0
    reader = ArchiveReader(config, entity)
    position = reader.position()
    found = reader.changes_of(key, _COLUMNS)
    rows = zip(*(found.records[name].to_pylist() for name in _COLUMNS), strict=True)
    return list(rows), position, found.files_read, found.files


def _accepted(control: ViewStatuses, core: Core, places: Sequence[_Place]) -> list[_Place]:
    """The accepted changes among the records of one key, by version.

    Of several records with one version the first counts; versions count as far as they are dense;
    records that the core dead-lettered never count (V5).
    """
    dead = {
        (generation, partition, offset)
        for generation, partition in {place[:2] for place in places}
        for offset in control.dead_among(
            core.entity,
            generation,
            partition,
            [place[2] for place in places if place[:2] == (generation, partition)],
        )
    }
    first: dict[int, _Place] = {}
    for place in sorted(places):
        if place[:3] not in dead:
            first.setdefault(decode_wire(place[3]).version, place)
    dense: list[_Place] = []
    while len(dense) + 1 in first:
        dense.append(first[len(dense) + 1])
    return dense


def _rows(accepted: Sequence[_Place]) -> list[Row]:
    images = cut([place[3] for place in accepted])
    texts = (images.provenance, images.state, images.event, images.transaction)
    decoded = [
        [None if text is None else decode(text) for text in column.to_pylist()] for column in texts
    ]
    rows: list[Row] = []
    as_of: datetime | None = None
    for place, provenance, state, event, transaction in zip(accepted, *decoded, strict=True):
        wire = decode_wire(place[3])
        as_of = wire.occurred_at if as_of is None else max(as_of, wire.occurred_at)
        head = (wire.key, wire.version, wire.kind.value, state, as_of, wire.occurred_at)
        rows.append((*head, wire.recorded_at, wire.id, provenance, *place[:3], event, transaction))
    return rows
