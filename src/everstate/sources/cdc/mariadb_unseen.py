"""Finds in MariaDB's binlog what its connector does not see: writes, and how XA transactions end.

A session may write in the format STATEMENT, whatever the server's global setting is: Debezium skips
such a statement. The mark that everstate writes into the database (``replaced``) has it, and `cdc
status` shows it until a new epoch. And Debezium sends the rows of an XA transaction when it is
prepared. Cleaning holds them until the records with the mark say how the transaction ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from everstate.declarations.captures import Capture
from everstate.sources.cdc.database import CapturedDatabase
from everstate.sources.cdc.mariadb import REMOVED, BinlogEvent, MariaDatabase
from everstate.sources.cdc.replaced import Mark
from everstate.sources.cdc.status import reads_anew

_LOOKED_MAX: Final = 100_000
"""Events of one look, which take two seconds; the next look goes on behind them."""
_AHEAD: Final = 2_000
"""Events of transactions that cleaning has not read, among which a look seeks one that it has."""
_REPORTED_MAX: Final = 100
"""Most tables that a mark names: its column has 64 KB, and a new epoch reads all tables."""
_USE: Final = re.compile(r"(?:use `((?:[^`]|``)*)`; )?(?:set [\w=, ]+; )?", re.IGNORECASE)
"""What SHOW BINLOG EVENTS puts before a statement: its database, and settings of its session."""
_GTIDS: Final = ("Gtid", "Gtid_tagged_log_event", "Anonymous_Gtid")
"""Kinds of an event that begins a transaction."""
_GTID: Final = re.compile(r"GTID ((\d+)-\d+-(\d+))")
_BEGUN: Final = re.compile(r"(?:BEGIN|XA START .*) GTID (\d+)-\d+-(\d+)")
"""The GTID of a transaction with rows; one of a statement, or of XA COMMIT, is alone."""
_XA: Final = re.compile(rf"{_USE.pattern}XA (START|COMMIT|ROLLBACK) (X'\w*',X'\w*',\d+)")
_NAME: Final = re.compile(r"""(`[^`]*`|"[^"]*"|[\w$]+)(?:\s*\.\s*(`[^`]*`|"[^"]*"|[\w$]+))?""")
_WRITES: Final = re.compile(
    r"\s*(?>/\*.*?\*/\s*|set\s+statement\s.*?\sfor\s+)*+"
    r"(?:(?:insert|replace)\b(.*?)(?:\(|\bselect\b|\bvalues?\b|\bset\b|$)"
    r"|update\b(.*?)\bset\b|delete\b(.*?)(?:\bwhere\b|$)|load\s+data\b(.*))",
    re.IGNORECASE | re.DOTALL,
)
"""Groups: what a statement names before its values and conditions."""
_STATEMENT: Final = "a session wrote in the format STATEMENT ({}), and its rows are not in the log"
_EARLIER: Final = (
    "an XA transaction was committed ({}) that was prepared before the rows were read, and may "
    "have rows that are not in the log"
)
_PUBLISHED: Final = "published"
"""In place of the GTID of an XA transaction in MySQL, whose rows are not held (decision 108)."""
_PARTIAL: Final = "a session changed parts of JSON ({}), and the connector skips such changes"
_ROLLED_BACK: Final = "an XA transaction was rolled back ({}), and its rows were published before"
_GONE: Final = (
    "the server removed its binlog from {} on before everstate had looked at it for writes that "
    "the connector does not see"
)


def look_at(
    capture: Capture,
    database: CapturedDatabase,
    offset: Mapping[str, Any],
    mark: Mark,
    passed: Mapping[str, int] | None = None,
) -> Mark:
    """Look at the events of the binlog since the last look; out: the mark with what was found.

    ``offset``: the connector's position, from which a mark of an earlier version is looked at.
    ``passed``: what cleaning has read whole (``StreamStanding``); ``None``: everything.
    """
    place = mark.looked_at
    if place is None and "file" in offset and not offset.get("snapshot"):
        place = f"{offset['file']}:{offset.get('pos', 4)}"
    if place is None or not isinstance(database, MariaDatabase):
        return mark
    return judged(capture, mark, place, _passed(database.events(place), passed))


def _passed(
    events: Iterable[BinlogEvent], passed: Mapping[str, int] | None
) -> Sequence[BinlogEvent]:
    """The events before the first transaction that cleaning has not read whole.

    So the rows of each transaction that is looked at are held already, and what was written before
    it ended is read. A transaction of which the connector wrote no BEGIN is followed by others.
    """
    found, end = list[BinlogEvent](), None
    for event in events:
        begun = _BEGUN.match(event.info) if event.kind == "Gtid" else None
        if begun is not None and passed is not None:
            if int(begun[2]) <= passed.get(begun[1], -1):
                end = None
            elif end is None:
                end = len(found)
        is_enough = event.kind in _GTIDS and len(found) >= _LOOKED_MAX
        if is_enough or (end is not None and len(found) - end > _AHEAD):
            break
        found.append(event)
    return found[:end]


def judged(capture: Capture, mark: Mark, place: str, events: Iterable[BinlogEvent]) -> Mark:
    """The mark after the events behind ``place``, which is the beginning of a transaction."""
    tables, xa_open, unseen = capture.captured_tables, dict(mark.xa), dict(mark.unseen)
    looked, rolled_back, xid, gtid = dict(mark.looked), list[str](), "", ""
    named: dict[str, str] = {}
    for event in events:
        xa, reason, found = _XA.match(event.info), _STATEMENT, list[str]()
        if event.kind in _GTIDS:
            xid, gtid = "", _PUBLISHED
            if (begun := _GTID.search(event.info)) is not None:
                gtid, looked[begun[2]] = begun[1], int(begun[3])
        if xa is not None and xa[2] == "START":
            # MariaDB has it in the event with the GTID, MySQL in one that follows.
            xid = xa[3]
            xa_open[xid] = ""
        elif event.kind == "Table_map":
            number, _, mapped = event.info.removesuffix(")").partition(" (")
            named[number] = mapped
            if xid and mapped in tables:
                xa_open[xid] = gtid
        elif event.kind == "Update_rows_partial":
            changed = named.get(event.info.partition(" flags")[0])
            found, reason = [each for each in tables if each == changed], _PARTIAL
        elif event.kind == REMOVED:
            found, reason = ["all tables"], _GONE
        elif event.kind in ("Query", "Execute_load_query") and xa is None:
            found = written_tables(event.info, tables)
        elif xa is not None:
            known = xa_open.pop(xa[3], None)
            if known is None and xa[2] == "COMMIT":
                found, reason = ["all tables"], _EARLIER
            elif known == _PUBLISHED and xa[2] == "ROLLBACK":
                found, reason = ["all tables"], _ROLLED_BACK
            elif known and xa[2] == "ROLLBACK":
                rolled_back.append(known)
        for table in found[: max(0, _REPORTED_MAX - len(unseen))]:
            unseen.setdefault(table, f"{reason.format(event.place)}; {reads_anew(capture.name)}")
        place = event.end
    return replace(
        mark, looked_at=place, xa=xa_open, rolled_back=rolled_back, looked=looked, unseen=unseen
    )


def written_tables(statement: str, tables: Sequence[str]) -> list[str]:
    """The captured tables that a statement writes to by name; not by a view or a trigger.

    ``statement``: as SHOW BINLOG EVENTS has it, with the database that it is run in.
    """
    used = _USE.match(statement)
    write = used and _WRITES.match(statement, used.end())
    target = next(filter(None, write.groups()), "") if write else ""
    default = used[1] or "" if used else ""
    parts = (name.groups() if name[2] else (default, name[1]) for name in _NAME.finditer(target))
    named = {".".join(part.strip('`"') for part in each).lower() for each in parts}
    return [table for table in tables if table.lower() in named]
