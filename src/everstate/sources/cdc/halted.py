"""Incremental snapshots that stop half-way and would keep every later one from being read.

Debezium reads the tables of all signals one after the other. When it cannot read a chunk, for a
reason that is no refusal of the database, it logs the reason, streams on, and never reads a chunk
again: no later snapshot begins. Restarted, its task fails with that reason for ever. What it has
still to read is a part of the source position that Connect stores for it; pure functions of that
position are here. :class:`~everstate.sources.cdc.restarting.Restarter` acts on them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

_PART: Final = "incremental_snapshot_"
_TABLES: Final = f"{_PART}collections"
_TABLE: Final = f"{_TABLES}_id"
_PLACE: Final = (f"{_PART}primary_key", f"{_PART}maximum_key")
_READING: Final = "snapshot.incremental."
"""In the trace of a task that failed while it read a chunk: the package of that code."""
_AHEAD_S: Final = 5.0
"""How much the database's clock may be ahead of ours."""

SILENT_S: Final = 30.0
"""How long a snapshot may stay where it is until somebody looks why."""

Progress = Literal["goes on", "silent", "halted"]


def tables_to_read(position: Mapping[str, Any]) -> tuple[str, ...]:
    """Tables that an incremental snapshot has still to read, by a stored source position."""
    try:
        listed = json.loads(position.get(_TABLES) or "[]")
        return tuple(str(each[_TABLE]) for each in listed)
    except (ValueError, TypeError, KeyError):
        return ()


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


def source_time_s(position: Mapping[str, Any]) -> float | None:
    """When the source wrote what is stored as done, in seconds since 1970."""
    if "ts_usec" in position:
        return float(position["ts_usec"]) / 1e6
    if "ts_sec" in position:
        return float(position["ts_sec"])
    return None


class SnapshotWatch:
    """Sees that an incremental snapshot does not go on though its connector does.

    A chunk is read by the thread that streams. So a connector that has read a change of the source
    that is newer than the snapshot's last step is reading no chunk, however slow the database is.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._part: dict[str, Any] = {}
        self._since_s = 0.0
        self._wait_s = SILENT_S

    def look(self, position: Mapping[str, Any]) -> Progress:
        """Judge a stored position; ``silent``: nothing of the source was read since, either."""
        part = {name: value for name, value in position.items() if name.startswith(_PART)}
        now_s = self._clock()
        if part != self._part:
            self._part, self._since_s, self._wait_s = part, now_s, SILENT_S
        if not tables_to_read(position) or now_s - self._since_s < self._wait_s:
            return "goes on"
        read_s = source_time_s(position)
        if read_s is None or read_s < self._since_s + _AHEAD_S:
            return "silent"
        # Asked again later: a connector that was restarted needs a while to read its chunk.
        self._since_s, self._wait_s = now_s, self._wait_s * 2
        return "halted"
