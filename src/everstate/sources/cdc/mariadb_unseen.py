"""Finds in MariaDB's binlog what its connector does not see, or sees although it did not happen.

A session may write in the format STATEMENT, whatever the server's global setting is: Debezium skips
such a statement. And Debezium sends the rows of an XA transaction when it is prepared, so that they
are in the raw log if it is rolled back afterwards. Both are found here. The mark that everstate
writes into the database (``replaced``) has them, and `cdc status` shows them until a new epoch.
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
_REPORTED_MAX: Final = 100
"""Most tables that a mark names: its column has 64 KB, and a new epoch reads all tables."""
_USE: Final = re.compile(r"(?:use `((?:[^`]|``)*)`; )?", re.IGNORECASE)
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
_UNDONE: Final = "an XA transaction that was prepared was rolled back ({}), and "
_IN_LOG: Final = f"{_UNDONE}its rows are in the log"
_PUBLISHED: Final = (
    f"{_UNDONE}what it emitted is published: insert a row with the next version that takes each of "
    "its changes back; then"
)
_EARLIER: Final = (
    "an XA transaction was committed ({}) that was prepared before the rows were read, and may "
    "have rows that are not in the log"
)
_GONE: Final = (
    "the server removed its binlog from {} on before everstate had looked at it for writes that "
    "the connector does not see"
)


def look_at(
    capture: Capture, database: CapturedDatabase, offset: Mapping[str, Any], mark: Mark
) -> Mark:
    """Look at the events of the binlog since the last look; out: the mark with what was found.

    ``offset``: the connector's position, from which a mark of an earlier version is looked at.
    """
    place = mark.looked_at
    if place is None and "file" in offset and not offset.get("snapshot"):
        place = f"{offset['file']}:{offset.get('pos', 4)}"
    if place is None or not isinstance(database, MariaDatabase):
        return mark
    return judged(capture, mark, place, database.events(place))


def judged(capture: Capture, mark: Mark, place: str, events: Iterable[BinlogEvent]) -> Mark:
    """The mark after the events behind ``place``, which is the beginning of a transaction."""
    tables, prepared, unseen = capture.captured_tables, dict(mark.prepared), dict(mark.unseen)
    current: list[str] = []
    for number, event in enumerate(events):
        xa, reason, found = _XA.match(event.info), _STATEMENT, list[str]()
        if event.kind == "Gtid":
            if number >= _LOOKED_MAX:
                break
            current = []
            if xa is not None:
                prepared[xa[3]] = current
        elif event.kind == "Table_map":
            mapped = event.info.partition("(")[2].removesuffix(")")
            current += [mapped] if mapped in tables and mapped not in current else []
        elif event.kind == REMOVED:
            found, reason = ["all tables"], _GONE
        elif event.kind in ("Query", "Execute_load_query") and xa is None:
            found = written_tables(event.info, tables)
        elif xa is not None and xa[2] != "START":
            known = prepared.pop(xa[3], None)
            if known is None and xa[2] == "COMMIT":
                found, reason = ["all tables"], _EARLIER
            elif known is not None and xa[2] == "ROLLBACK":
                found, reason = known, _IN_LOG if capture.outbox is None else _PUBLISHED
        for table in found[: max(0, _REPORTED_MAX - len(unseen))]:
            unseen.setdefault(table, f"{reason.format(event.place)}; {reads_anew(capture.name)}")
        place = event.end
    return replace(mark, looked_at=place, prepared=prepared, unseen=unseen)


def written_tables(statement: str, tables: Sequence[str]) -> list[str]:
    """The captured tables that a statement writes to by name; not by a view or a trigger.

    ``statement``: as SHOW BINLOG EVENTS has it, with the database that it is run in.
    """
    used = _USE.match(statement)
    write = used and _WRITES.match(statement, used.end())
    target = next((part for part in write.groups() if part is not None), "") if write else ""
    default = used[1] or "" if used else ""
    parts = (name.groups() if name[2] else (default, name[1]) for name in _NAME.finditer(target))
    named = {".".join(part.strip('`"') for part in each).lower() for each in parts}
    return [table for table in tables if table.lower() in named]
