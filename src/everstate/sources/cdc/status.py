"""State of a capture: what Kafka Connect and the database report about its connector."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from everstate.sources.cdc.database import ConnectorStanding, Finding, verdict
from everstate.sources.cdc.halted import source_time_s

_UNFIT: Final = r"Error processing row in (.+?), internal schema size (\d+), but row size (\d+)"
DISCARDED: Final = "its position was discarded, and no snapshot has begun"
"""Of a connector that a new epoch has stopped, and that was not started again."""
_TOLD: Final = {
    r"DDL statement couldn't be parsed\..*? with the statement '(.*?)'$": (
        "Debezium cannot read the statement {}; {again}, and goes on after it"
    ),
    _UNFIT: (
        "the binlog has rows of {0} with {2} columns where Debezium knows {1}: a session's "
        "binlog_row_image was not FULL, or a statement changed the columns in a way that Debezium "
        "does not follow; {again}, and goes on after them"
    ),
    "this is no longer available on the server": (
        "the server no longer has the log after the stored position; {again}"
    ),
}
"""What is in a trace of Debezium → the sentence that is told instead."""


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """State of one capture: what Kafka Connect and the database report about its connector."""

    capture: str
    state: str
    """Connector state as Connect reports it, ``absent``, or ``unreachable`` when Connect is."""
    task: str | None
    connected: bool | None
    """A session reads the database's log; None: the database cannot be asked."""
    behind_s: float | None
    """Seconds since the source wrote the change at the stored position. Heartbeats write to an idle
    PostgreSQL, so this stays near `capture.heartbeat_s`; an idle MariaDB has 0."""
    behind_bytes: int | None
    held_bytes: int | None
    reason: str | None
    """First line of the error."""
    snapshot: str | None = None
    """Last reported state of the first snapshot, such as ``IN_PROGRESS``; None: none reported."""
    reads_snapshot: bool = False
    reads_again: tuple[str, ...] = ()
    """Tables that an incremental snapshot has still to read."""
    position: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """Problems because of which rows of the captured tables are lost or cannot be written."""

    @property
    def reads(self) -> bool:
        """Running, and connected or reading its first snapshot."""
        running = self.state == "RUNNING" and self.task == "RUNNING"
        return running and (self.connected is True or self.reads_snapshot)

    @property
    def well(self) -> bool:
        """It reads, and every table of it can be captured correctly."""
        return self.reads and not self.problems


def why_not(capture: str, reason: str | None, standing: ConnectorStanding | None) -> str | None:
    """The reason of a status: a log that is lost first, then that of the connector itself."""
    note = None if standing is None else standing.note
    if standing is not None and standing.is_lost:
        return f"{note or reason}; {reads_anew(capture)}"
    return reason or note


def reads_anew(capture: str) -> str:
    """The advice for a position at which no connector can go on."""
    return f"`everstate cdc snapshot {capture} --new-epoch` reads all rows as they are now"


def told_by(status: CaptureStatus, findings: Iterable[Finding]) -> list[Finding]:
    """What a status tells beyond these findings: whether the connector reads, other problems."""
    advice = f"`everstate cdc status {status.capture}` shows more."
    found = f"{status.state}, task {status.task}, connected: {status.connected}"
    found += f": {status.reason}" if status.reason else ""
    said = "it reads" if status.reads else found
    told = [verdict("connector", said, status.reads, advice=advice)]
    known = {text for each in findings for text in (each.found, f"{each.name}: {each.found}")}
    for problem in status.problems:
        if problem not in known:
            name, _, found = problem.partition(": ")
            told.append(Finding(name, "fail", found or problem, advice=advice))
    return told


def states_of(status: Mapping[str, Any], capture: str) -> tuple[str, str | None, str | None]:
    """State of the connector, state of its task, and one line with the cause of a failure."""
    tasks = status.get("tasks") or []
    trace, task = trace_of(status), tasks[0]["state"] if tasks else None
    cause = None if trace is None else _cause(trace, capture)
    return str(status["connector"]["state"]), task, cause


def trace_of(status: Mapping[str, Any]) -> str | None:
    """Java's stack trace of a failed connector or task; ``None``: neither has failed."""
    parts = [status["connector"], *(status.get("tasks") or [])]
    return next((str(part["trace"]) for part in parts if part.get("trace")), None)


def unfit_table(trace: str | None, tables: Iterable[str]) -> str | None:
    """The captured table at whose rows a connector of MariaDB failed; ``None``: it is not known."""
    # Debezium names it without its database.
    unfit = re.search(_UNFIT, trace or "")
    named = [table for table in tables if unfit and table.partition(".")[2] == unfit[1]]
    return named[0] if len(named) == 1 else None


def _cause(trace: str, capture: str) -> str:
    """The innermost reason of a Java trace that says anything, in one line."""
    for known, sentence in _TOLD.items():
        found = re.search(known, trace, re.DOTALL | re.MULTILINE)
        if found is not None:
            parts = (" ".join(part.split()) for part in found.groups())
            return sentence.format(*parts, again=reads_anew(capture))
    lines = [line.strip() for line in trace.splitlines()]
    causes = [line for line in lines if line.startswith("Caused by: ")] or lines[:1]
    reasons = [each.removeprefix("Caused by: ") for each in causes]
    return ([each for each in reasons if ": " in each] or reasons)[-1]


def age_s(offset: Mapping[str, Any], now_s: float) -> float | None:
    """Seconds since the source wrote the change at the stored position."""
    written_s = source_time_s(offset)
    return None if written_s is None else max(0.0, now_s - written_s)
