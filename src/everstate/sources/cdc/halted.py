"""Incremental snapshots that halt half-way and would block every later one.

Debezium reads the tables of all signals one after the other. If it cannot read a chunk, for another
reason than an SQL error of the database, it logs the reason, continues to stream, and never reads a
chunk again: no later snapshot begins. After a restart its task fails with that reason every time.
The tables that it still has to read are a part of the source position that Kafka Connect stores;
here are pure functions of that position.
:class:`~everstate.sources.cdc.restarting.Restarter` acts on their results.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

_PART: Final = "incremental_snapshot_"
_TABLES: Final = f"{_PART}collections"
_TABLE: Final = f"{_TABLES}_id"
_PLACE: Final = (f"{_PART}primary_key", f"{_PART}maximum_key")
_READING: Final = "snapshot.incremental."
"""Java package that is in the stack trace of a task that failed while it read a chunk."""
_PARSING: Final = ".TableIdParser"
_AHEAD_S: Final = 5.0
"""Seconds by which the database's clock may be ahead of ours."""

SILENT_S: Final = 30.0
"""Seconds without progress of a snapshot until its connector is examined."""

CaptureProgress = Literal["goes on", "silent", "halted"]


def tables_to_read(position: Mapping[str, Any]) -> tuple[str, ...]:
    """Tables that an incremental snapshot has still to read, by a stored source position."""
    try:
        listed = json.loads(position.get(_TABLES) or "[]")
        # No captured table has a quotation mark in its name.
        return tuple(str(each[_TABLE]).replace('"', "") for each in listed)
    except (ValueError, TypeError, KeyError):
        return ()


def collection_name(table: str) -> str:
    """The name of a table as Debezium parses it in a signal, or in a stored snapshot."""
    parts = (part.replace('"', '""') for part in table.split(".", 1))
    return ".".join(part if re.fullmatch(r"[\w$]+", part) else f'"{part}"' for part in parts)


def with_quoted_names(position: Mapping[str, Any]) -> dict[str, Any]:
    """The position with names that Debezium parses.

    It stores them without quotation marks, and so it fails at a name with a blank at each start,
    until its incremental snapshot is over.
    """
    listed = json.loads(position[_TABLES])
    names = map(collection_name, tables_to_read(position))
    quoted = [{**each, _TABLE: name} for each, name in zip(listed, names, strict=True)]
    return {**position, _TABLES: json.dumps(quoted)}


def without_first_table(position: Mapping[str, Any]) -> dict[str, Any]:
    """The position without the table that is being read; the others are read from their start."""
    rest = json.loads(position[_TABLES])[1:]
    if not rest:
        return {name: value for name, value in position.items() if not name.startswith(_PART)}
    kept = {name: value for name, value in position.items() if name not in _PLACE}
    return {**kept, _TABLES: json.dumps(rest)}


def has_failed_reading(trace: str | None) -> bool:
    """Whether a task failed while it read a chunk of an incremental snapshot."""
    return trace is not None and _READING in trace


def has_failed_parsing(trace: str | None) -> bool:
    """Whether a task failed at the name of a table in its stored position."""
    return trace is not None and _PARSING in trace


def source_time_s(position: Mapping[str, Any]) -> float | None:
    """When the source wrote the change at the stored position, in seconds since 1970."""
    if "ts_usec" in position:
        return float(position["ts_usec"]) / 1e6
    return float(position["ts_sec"]) if "ts_sec" in position else None


class SnapshotWatch:
    """Detects an incremental snapshot without progress whose connector still reads changes.

    The thread that streams also reads the chunks. So a connector that has read a change that the
    source wrote after the snapshot's last step is reading no chunk, however slow the database is.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._part: dict[str, Any] = {}
        self._since_s = 0.0
        self._wait_s = SILENT_S

    def look(self, position: Mapping[str, Any]) -> CaptureProgress:
        """Judge a stored position; ``silent``: no change of the source was read since, either."""
        part = {name: value for name, value in position.items() if name.startswith(_PART)}
        now_s = self._clock()
        if part != self._part:
            self._part, self._since_s, self._wait_s = part, now_s, SILENT_S
        if not tables_to_read(position) or now_s - self._since_s < self._wait_s:
            return "goes on"
        read_s = source_time_s(position)
        if read_s is None or read_s < self._since_s + _AHEAD_S:
            return "silent"
        # Judged again later: a connector that was restarted needs a while to read its chunk.
        self._since_s, self._wait_s = now_s, self._wait_s * 2
        return "halted"
