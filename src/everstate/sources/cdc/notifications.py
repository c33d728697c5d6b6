"""A connector's notifications about its snapshots, and ours about tables that were given up."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from everstate.config import Config
from everstate.errors import LogError
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord, Record
from everstate.sources.cdc.names import CaptureNames

INITIAL: Final = "Initial Snapshot"
_INCREMENTAL: Final = "Incremental Snapshot"
GIVEN_UP: Final = "GIVEN_UP"
"""Status of a table that was taken out of a snapshot because it could not be read."""
_READ: Final = frozenset({"SUCCEEDED", "EMPTY"})


@dataclass(frozen=True, slots=True)
class Notification:
    """One step of a snapshot, as the connector reports it."""

    id: str
    kind: str
    """``Initial Snapshot`` or ``Incremental Snapshot``."""
    state: str
    """``STARTED``, ``IN_PROGRESS``, ``TABLE_SCAN_COMPLETED``, ``COMPLETED``, ``ABORTED``, …"""
    tables: tuple[str, ...]
    table: str | None
    rows: int | None
    """Rows read so far (of a table that is completed: its rows)."""
    status: str | None
    """Of a completed table: ``SUCCEEDED``, ``EMPTY``, ``SQL_EXCEPTION``, …"""
    sent_ms: int
    """Timestamp of the record."""
    reason: str | None = None
    """Why a table was given up; notifications of the connector itself have none."""


@dataclass(frozen=True, slots=True)
class FirstSnapshot:
    """State of the first snapshot of a capture."""

    state: str | None
    """Last reported state, such as ``IN_PROGRESS`` or ``COMPLETED``; None: none was reported."""
    interrupted: bool
    """It was begun more than once with one slot, and its tables were not read again since."""

    @property
    def under_way(self) -> bool:
        """Rows are being read, by the last notification."""
        return self.state in ("STARTED", "IN_PROGRESS", "TABLE_SCAN_COMPLETED")


def unread_of(steps: Iterable[Notification]) -> dict[str, str]:
    """Tables whose last incremental snapshot failed → why, after these steps, oldest first."""
    found: dict[str, str] = {}
    for each in steps:
        if each.kind == INITIAL or each.table is None or each.status is None:
            continue
        if each.status in _READ:
            found.pop(each.table, None)
        else:
            found[each.table] = each.reason or each.status
    return found


def tell_given_up(config: Config, names: CaptureNames, table: str, reason: str) -> None:
    """Write into the topic that a table was taken out of an incremental snapshot, and why."""
    more = {"scanned_collection": table, "status": GIVEN_UP, "reason": reason}
    value = {
        "id": f"everstate-gave-up-{time.time_ns()}",
        "aggregate_type": _INCREMENTAL,
        "type": "ABORTED",
        "additional_data": more,
        "timestamp": time.time_ns() // 1_000_000,
    }
    with Producer(config, client_id="everstate-cdc") as producer:
        record = OutRecord(names.notifications, None, json.dumps(value).encode())
        producer.send(record)
        producer.flush()


def first_of(steps: Iterable[Notification], tables: int) -> FirstSnapshot:
    """State of the first snapshot after these steps, which are given oldest first.

    ``tables``: how many the capture has; an incremental snapshot of all of them is a whole one.
    """
    state, starts, asked = None, 0, False
    for each in steps:
        if each.kind == INITIAL:
            if each.state == "STARTED":
                # After one that was completed it is another one, with a slot of its own.
                starts = 1 if state == "COMPLETED" else starts + 1
            state = each.state
        elif each.state == "STARTED":
            asked = not each.tables or len(each.tables) >= tables
        elif each.state == "COMPLETED" and asked:
            starts = 0
    return FirstSnapshot(state, starts > 1)


def ended_snapshots(
    steps: Iterable[Notification], tables: Collection[str]
) -> list[tuple[int, bool]]:
    """When first snapshots ended, in milliseconds, and whether all these tables had no row.

    ``steps``: the notifications, oldest first. The times are those at which Kafka's producer sent
    the last notification of each snapshot; rows that it sent later have no earlier time.
    """
    found: list[tuple[int, bool]] = []
    scanned: dict[str, int] = {}
    for each in steps:
        if each.kind != INITIAL:
            continue
        if each.state == "STARTED":
            scanned.clear()
        elif each.state == "TABLE_SCAN_COMPLETED" and each.table and each.status in _READ:
            scanned[each.table] = each.rows or 0
        elif each.state == "COMPLETED":
            found.append((each.sent_ms, all(scanned.get(table) == 0 for table in tables)))
            scanned.clear()
    return found


def notifications(config: Config, names: CaptureNames) -> list[Notification]:
    """All notifications that the topic still has, oldest first."""
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
    listed = (name.strip() for name in more.get("data_collections", "").split(","))
    table = more.get("scanned_collection") or more.get("current_collection_in_progress")
    return Notification(
        id=str(value.get("id")),
        kind=str(value.get("aggregate_type")),
        state=str(value.get("type")),
        tables=tuple(filter(None, listed)),
        table=table,
        rows=None if rows is None else int(rows),
        status=more.get("status"),
        sent_ms=record.timestamp_ms,
        reason=more.get("reason"),
    )
