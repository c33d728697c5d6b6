"""Snapshots: asked for by a signal, told by the connector's notifications."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from uuid_utils.compat import uuid7

from everstate.config import Config
from everstate.errors import CaptureFailed, InvalidCapture, Unavailable
from everstate.log.consumer import Consumer
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.database import CapturedDatabase, Key
from everstate.sources.cdc.declaration import topic_table
from everstate.sources.cdc.notifications import Notification, notification
from everstate.sources.cdc.restarting import Restarter, keep_running

_REFUSED_MAX: Final = 8
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
    """A snapshot of keys that was asked for, and is not waited for."""

    id: str | None
    """Of the signal; ``None``: there was no key to ask for."""
    refused: Mapping[int, str]
    """Place of each key that no condition can be made of, and why."""


Progress = Callable[[Notification], None]


def snapshot(
    config: Config,
    capturing: Capturing,
    *,
    table: str | None = None,
    where: str | None = None,
    key: Key = (),
    wait: bool = True,
    silence_s: float = 120.0,
    progress: Progress = lambda _: None,
) -> SnapshotDone:
    """Read rows again while streaming goes on: all tables, one, a range of it, or one row.

    ``where`` is an SQL condition, run in the captured database as the connector's user; ``key``
    are the values of the row's key. Returns when the last row is in the raw topics; with
    ``wait=False`` when the signal is written. Raises InvalidCapture for a table, key or condition
    that does not fit, CaptureFailed when the connector does not run or a table cannot be read,
    Unavailable when nothing is heard of it for ``silence_s``. While it waits, a connector that
    fails or stops reading is started again.
    """
    capture, names = capturing.capture, capturing.names
    if table is None and (where or key):
        raise InvalidCapture(capture.name, "a condition or key needs its table (--table)")
    if where and key:
        raise InvalidCapture(capture.name, "give a condition or a key, not both")
    tables = list(capture.captured_tables) if table is None else [declared(capturing, table)]
    capturing.require_running()
    signal_id = _signal_id()
    began = time.monotonic()
    with (
        Consumer(config, client_id="everstate-cdc") as consumer,
        # The place is taken before the signal, so that no notification is missed.
        closing(consumer.tail([names.notifications], idle_s=silence_s)) as records,
    ):
        with capturing.database() as database:
            condition = database.condition(tables[0], [key]) if key else where
            if where:
                _check(capture.name, database, tables[0], where)
            _signal(database, signal_id, tables, condition)
        if not wait:
            return SnapshotDone(signal_id, "SIGNALLED", 0, {}, time.monotonic() - began)
        with _tended(capturing):
            done = _follow(signal_id, tables, map(notification, records), progress, began)
    if done is None:
        raise Unavailable(
            f"capture {capture.name}: the connector told nothing of the snapshot for "
            f"{silence_s:g} s.",
            advice=f"`everstate cdc status {capture.name}` says whether it is still under way; the "
            "connector reads the rows when it comes to the signal.",
        )
    return done


def _check(name: str, database: CapturedDatabase, table: str, condition: str) -> None:
    """Raise InvalidCapture when the database cannot run a condition, before a connector must."""
    try:
        database.check_condition(table, condition)
    except CaptureFailed as cause:
        raise InvalidCapture(name, f"the condition cannot be used: {cause.message}") from cause


@contextmanager
def _tended(capturing: Capturing) -> Iterator[None]:
    """Start the connector again, in a thread, when it fails or stops reading, as clean does."""
    stop = threading.Event()
    restarter = Restarter(capturing.capture.name, lambda: capturing)
    thread = threading.Thread(
        target=keep_running, args=([restarter], stop), name="tend-snapshot", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def signal_keys(capturing: Capturing, table: str, keys: Sequence[Mapping[str, Any]]) -> Signalled:
    """Ask in one signal for the rows with these keys: column → value as the raw topics have it.

    The signal is written to the captured database and stays there until a connector reads it, so
    that none needs to run now. Raises Unavailable, CaptureFailed, InvalidCapture.
    """
    with capturing.database() as database:
        conditions, refused = _conditions(database, table, keys)
        if not conditions:
            return Signalled(None, refused)
        signal_id = _signal_id()
        _signal(database, signal_id, [table], " OR ".join(conditions))
    return Signalled(signal_id, refused)


def _conditions(
    database: CapturedDatabase, table: str, keys: Sequence[Mapping[str, Any]]
) -> tuple[list[str], dict[int, str]]:
    """Conditions for all keys but those that do not fit, which halving finds.

    When the first ones all fail, it is the table that does not fit.
    """
    found: list[str] = []
    refused: dict[int, str] = {}
    parts = [list(enumerate(keys))]
    while parts and keys:
        part = parts.pop()
        try:
            found.append(database.condition(table, [key for _, key in part], is_raw=True))
        except (InvalidCapture, CaptureFailed) as error:
            if len(part) == 1 or (not found and len(refused) >= _REFUSED_MAX):
                refused.update(dict.fromkeys((index for index, _ in part), error.message))
                continue
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return found, refused


def _signal_id() -> str:
    return f"everstate-{uuid7()}"


def _signal(
    database: CapturedDatabase, signal_id: str, tables: list[str], condition: str | None
) -> None:
    data: dict[str, Any] = {"data-collections": tables, "type": "INCREMENTAL"}
    if condition:
        # The connector puts AND before it where it reads by chunks.
        filtered = {"data-collection": tables[0], "filter": f"({condition})"}
        data["additional-conditions"] = [filtered]
    database.signal(signal_id, "execute-snapshot", json.dumps(data))


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
    told: Iterable[Notification],
    progress: Progress,
    began: float,
) -> SnapshotDone | None:
    """Follow one snapshot to its end; None when what was told ended first."""
    tables: dict[str, str] = {}
    rows: dict[str, int] = {}
    for each in told:
        if each.is_given_up and each.table in wanted:
            raise CaptureFailed(f"snapshot {signal_id}: {each.table} cannot be read: {each.reason}")
        if each.id != signal_id:
            continue
        progress(each)
        if each.table is not None and each.rows is not None:
            rows[each.table] = each.rows
        if each.state == "TABLE_SCAN_COMPLETED" and each.table is not None:
            tables[each.table] = each.status or "SUCCEEDED"
        if each.state in _ENDS:
            seconds = time.monotonic() - began
            done = SnapshotDone(signal_id, each.state, sum(rows.values()), tables, seconds)
            bad = {t: s for t, s in tables.items() if s not in ("SUCCEEDED", "EMPTY")}
            if each.state == "ABORTED" or bad:
                raise CaptureFailed(f"snapshot {signal_id} ended {each.state}: {bad or 'aborted'}.")
            return done
    return None
