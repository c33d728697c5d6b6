"""What a connector tells of its snapshots, in a topic of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from everstate.config import Config
from everstate.errors import LogError
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.record import Record
from everstate.sources.cdc.names import CaptureNames

INITIAL: Final = "Initial Snapshot"


@dataclass(frozen=True, slots=True)
class Notification:
    """One step of a snapshot, as the connector tells it."""

    id: str
    kind: str
    """``Initial Snapshot`` or ``Incremental Snapshot``."""
    state: str
    """``STARTED``, ``IN_PROGRESS``, ``TABLE_SCAN_COMPLETED``, ``COMPLETED``, ``ABORTED``, …"""
    tables: tuple[str, ...]
    table: str | None
    rows: int | None
    """Rows read so far (of a table that is completed: its rows)."""
    last_key: str | None
    status: str | None
    """Of a completed table: ``SUCCEEDED``, ``EMPTY``, ``SQL_EXCEPTION``, …"""
    at_ms: int


def initial_snapshot(config: Config, names: CaptureNames) -> str | None:
    """State of the first snapshot: what was told last; None when nothing was, or not yet."""
    told = [each for each in notifications(config, names) if each.kind == INITIAL]
    return told[-1].state if told else None


def notifications(config: Config, names: CaptureNames) -> list[Notification]:
    """Everything that the connector told, oldest first, as far as the topic still has it."""
    try:
        with Offsets(config) as offsets:
            offsets.beginnings([names.notifications])
    except LogError:
        return []
    with Consumer(config, client_id="everstate-cdc") as consumer:
        return [notification(record) for record in consumer.read_topic(names.notifications)]


def notification(record: Record) -> Notification:
    """One record of the topic."""
    value = json.loads(record.value or b"{}")
    more: Mapping[str, str] = value.get("additional_data") or {}
    rows = more.get("total_rows_scanned")
    listed = [name.strip() for name in more.get("data_collections", "").split(",")]
    table = more.get("scanned_collection") or more.get("current_collection_in_progress")
    return Notification(
        id=str(value.get("id")),
        kind=str(value.get("aggregate_type")),
        state=str(value.get("type")),
        tables=tuple(name for name in listed if name),
        table=table,
        rows=None if rows is None else int(rows),
        last_key=more.get("last_processed_key"),
        status=more.get("status"),
        at_ms=int(value.get("timestamp") or record.timestamp_ms),
    )
