"""Incremental snapshots: requested by a signal, followed by the connector's notifications."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from everstate.config import Config
from everstate.declarations.captures import topic_table
from everstate.errors import CaptureFailed, InvalidCapture, Unavailable
from everstate.log.consumer import Consumer
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.database import Key, signal_snapshot
from everstate.sources.cdc.inexact import check_values
from everstate.sources.cdc.notifications import GIVEN_UP, Notification, notification
from everstate.sources.cdc.refusing import refuse_failed
from everstate.sources.cdc.restarting import Restarter, keep_running

_ENDS: Final = frozenset({"COMPLETED", "ABORTED", "SKIPPED"})


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    """How an incremental snapshot ended."""

    id: str
    state: str
    rows: int
    tables: Mapping[str, str]
    """Table → how its scan ended."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Signalled:
    """A snapshot of keys that was requested, without waiting for it."""

    id: str | None
    """Id of the signal; ``None``: none was sent, as no key could be requested."""
    refused: Mapping[int, str]
    """Index of each key for which no SQL condition can be made → why."""


OnNotification = Callable[[Notification], None]


def snapshot(
    config: Config,
    capturing: Capturing,
    *,
    table: str | None = None,
    where: str | None = None,
    key: Key = (),
    wait: bool = True,
    silence_s: float = 120.0,
    progress: OnNotification = lambda _: None,
) -> SnapshotDone:
    """Read rows again while streaming goes on: all tables, one, a range of it, or one row.

    ``where`` is an SQL condition, run in the captured database as the connector's user; ``key``
    are the values of the row's key. Returns when the last row is in the raw topics; with
    ``wait=False`` when the signal is written. Raises InvalidCapture for a table, key or condition
    that does not fit, CaptureFailed when the connector does not run, or a table cannot be read or,
    where whole tables are read, has values that a snapshot would change,
    Unavailable when ``silence_s`` seconds pass without a notification. While it waits, a connector
    that fails or stops reading is restarted.
    """
    capture, names = capturing.capture, capturing.names
    if table is None and (where or key):
        raise InvalidCapture(capture.name, "a condition or key needs its table (--table)")
    if where and key:
        raise InvalidCapture(capture.name, "give a condition or a key, not both")
    tables = list(capture.captured_tables) if table is None else [declared(capturing, table)]
    capturing.require_running()
    capturing.refuse_left_out(tables)
    began = time.monotonic()
    with (
        Consumer(config, client_id="everstate-cdc") as consumer,
        # The offset to read from is taken before the signal, so that no notification is missed.
        closing(consumer.tail([names.notifications], idle_s=silence_s)) as records,
    ):
        with capturing.database() as database:
            condition = database.condition(tables[0], key) if key else where
            if condition:
                try:
                    database.check_condition(tables[0], condition)
                except CaptureFailed as cause:
                    reason = f"the condition cannot be used: {cause.message}"
                    raise InvalidCapture(capture.name, reason) from cause
            else:
                # Snapshots write some days as others.
                refuse_failed(capture, check_values(capture, capturing.entities, database))
            signal_id = signal_snapshot(database, tables, condition)
        if not wait:
            return SnapshotDone(signal_id, "SIGNALLED", 0, {}, time.monotonic() - began)
        with _tended(capturing):
            done = _follow(signal_id, tables, map(notification, records), progress, began)
    if done is None:
        raise Unavailable(
            f"capture {capture.name}: the connector has reported nothing about the snapshot for "
            f"{silence_s:g} s.",
            advice=f"`everstate cdc status {capture.name}` says whether it is still under way; the "
            "connector reads the rows when it comes to the signal.",
        )
    return done


@contextmanager
def _tended(capturing: Capturing) -> Iterator[None]:
    """Restart the connector, in a thread, when it fails or stops reading, as the clean role."""
    stop, restarter = threading.Event(), Restarter(capturing.capture.name, lambda: capturing)
    given = [restarter], stop
    thread = threading.Thread(target=keep_running, args=given, name="tend-snapshot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def signal_keys(capturing: Capturing, table: str, keys: Sequence[Mapping[str, Any]]) -> Signalled:
    """Request in one signal the rows with these keys: column → value as the raw topics have it.

    The signal stays in the captured database's log until the connector reads it, so the connector
    need not run now. Raises Unavailable, CaptureFailed, InvalidCapture.
    """
    conditions, refused, signal_id = list[str](), dict[int, str](), None
    with capturing.database() as database:
        for index, key in enumerate(keys):
            try:
                condition = database.condition(table, key, is_raw=True)
                # The connector would fail at a value that does not fit its column.
                database.check_condition(table, condition)
                conditions.append(condition)
            except (InvalidCapture, CaptureFailed) as error:
                refused[index] = error.message
        if conditions:
            signal_id = signal_snapshot(database, [table], " OR ".join(conditions))
    return Signalled(signal_id, refused)


def declared(capturing: Capturing, table: str) -> str:
    """The table as declared, by its whole or its short name; raises InvalidCapture."""
    capture = capturing.capture
    name = {topic_table(each): each for each in capture.captured_tables}.get(table, table)
    if name not in capture.captured_tables:
        known = ", ".join(capture.captured_tables)
        raise InvalidCapture(capture.name, f"{table} is no table of it (declared: {known})")
    return name


def _follow(
    signal_id: str,
    wanted: Sequence[str],
    notifications: Iterable[Notification],
    progress: OnNotification,
    began: float,
) -> SnapshotDone | None:
    """Follow one snapshot to its end; None when the notifications end first."""
    tables: dict[str, str] = {}
    rows: dict[str, int] = {}
    for each in notifications:
        if each.status == GIVEN_UP and each.table in wanted:
            raise CaptureFailed(f"snapshot {signal_id}: {each.table} cannot be read: {each.reason}")
        if each.id != signal_id:
            continue
        progress(each)
        if each.table is not None and each.rows is not None:
            rows[each.table] = each.rows
        if each.state == "TABLE_SCAN_COMPLETED" and each.table is not None:
            tables[each.table] = each.status or "SUCCEEDED"
        if each.state in _ENDS:
            bad = {t: s for t, s in tables.items() if s not in ("SUCCEEDED", "EMPTY")}
            if why := "; ".join(f"{table} cannot be read: {s}" for table, s in bad.items()):
                advice = "The log of Connect has the cause."
                raise CaptureFailed(f"snapshot {signal_id}: {why}.", advice=advice)
            if each.state == "ABORTED":
                raise CaptureFailed(f"snapshot {signal_id} ended ABORTED.")
            seconds = time.monotonic() - began
            return SnapshotDone(signal_id, each.state, sum(rows.values()), tables, seconds)
    return None
