"""The position of a Debezium message in its database's log, for each connector."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from everstate.sources.cdc.rows import SourcePosition

SourceBlock = Mapping[str, Any]

_NUMBERS: Final = re.compile(r"\d+")
_HEX: Final = re.compile(r"(?:0x)?([0-9a-f]+)", re.IGNORECASE)


def position_of(connector: str, source: SourceBlock) -> SourcePosition:
    """Position of a message's source block, by scheme; empty if the block has none.

    For an unknown connector the fields of the block decide how it is read.
    """
    own = _BY_CONNECTOR.get(connector)
    if own is not None:
        return own(source) or {}
    found = (way(source) for way in _BY_FIELDS)
    return next((position for position in found if position is not None), {})


def stream_place(connector: str, source: SourceBlock, order: int = 0) -> bytes | None:
    """A row's place in the stream that its connector writes, as sortable bytes; ``None``: unknown.

    PostgreSQL's log positions (LSNs) are not enough for that order: transactions are emitted in
    the order of their commits, while their rows were logged interleaved. The LSN of the last
    commit before a row, followed by the row's own LSN, gives the order, and both are the same when
    the row is read again. In a binlog, file, position and row give the order. ``order``: number of
    the row in its transaction, as this run of the connector counts; see :func:`lacks_position`.
    """
    if connector == "postgresql":
        if source.get("lsn") is None:
            return None
        before = _commit_before(source.get("sequence"))
        return _PAIR(before, int(source["lsn"]))
    number = last_number(source.get("file"))
    if number is None or source.get("pos") is None:
        return None
    return _BINLOG.pack(number, int(source["pos"]), int(source.get("row") or 0), order)


def lacks_position(place: bytes, here: bytes) -> bool:
    """Whether a row at ``here``, directly behind one at ``place``, is a new one nevertheless.

    MariaDB from 11.4 on writes the events of a transaction without their positions, unless
    `binlog_legacy_event_pos` is on. Then all rows of a transaction seem to be at one position, and
    each event counts its rows from 0 again. The connector counts on: no row was read between.
    """
    if len(place) != _BINLOG.size or len(here) != _BINLOG.size:
        return False
    *before, _, last = _BINLOG.unpack(place)
    *after, _, order = _BINLOG.unpack(here)
    return after == before and last > 0 and order == last + 1


def binlog_place(place: bytes) -> tuple[int, int] | None:
    """Number of the file and position in it, if this is a place in a binlog."""
    if len(place) != _BINLOG.size:
        return None
    file, position, _, _ = _BINLOG.unpack(place)
    return file, position


_PAIR: Final = struct.Struct(">QQ").pack
_BINLOG: Final = struct.Struct(">QQQQ")


def _commit_before(sequence: Any) -> int:
    """The first part of ``["<commit>","<position>"]``; 0 for null: none was read yet."""
    text = str(sequence)
    end = text.find('"', 2)
    return int(text[2:end]) if text.startswith('["') and end > 2 else 0


def _postgresql(source: SourceBlock) -> SourcePosition | None:
    lsn = source.get("lsn")
    return None if lsn is None else {"lsn": (int(lsn),)}


def _binlog(source: SourceBlock) -> SourcePosition | None:
    file, at = source.get("file"), source.get("pos")
    number = last_number(file)
    if at is None or number is None:
        return None
    place = (number, int(at), int(source.get("row") or 0))
    writer, sequence = _gtid(source.get("gtid"))
    if writer is None:
        return {"binlog": place}
    # Not part of the scheme: the server that is read. A replica continues the primary's GTIDs.
    position = {f"gtid {writer}": (sequence, *place)}
    # A server of MySQL that takes over numbers under its own name, in a binlog of its own. Rows
    # of two servers cannot be compared then: a place in the binlog would tell a wrong order.
    return {**position, "binlog": place} if writer.isdigit() else position


def _lsn(*names: str) -> Callable[[SourceBlock], SourcePosition | None]:
    def place(source: SourceBlock) -> SourcePosition | None:
        if source.get(names[0]) is None:
            return None
        found = tuple(part for name in names for part in _parts(source.get(name)))
        return {names[0]: found}

    return place


def _parts(text: Any) -> tuple[int, ...]:
    """Numbers of an LSN: hexadecimal groups with colons, or one decimal number."""
    base = 16 if ":" in str(text) else 10
    try:
        return tuple(int(part, base) for part in str(text).split(":"))
    except ValueError:
        return (0,)


def _oracle(source: SourceBlock) -> SourcePosition | None:
    scn = source.get("scn")
    if scn is None:
        return None
    record = [int(part, 16) for part in _HEX.findall(source.get("rs_id") or "")]
    return {"scn": (int(scn), *[*record, 0, 0, 0][:3], int(source.get("ssn") or 0))}


def _mongodb(source: SourceBlock) -> SourcePosition | None:
    if source.get("ord") is None or source.get("ts_ms") is None:
        return None
    return {"oplog": (int(source["ts_ms"]) // 1000, int(source["ord"]))}


def _cassandra(source: SourceBlock) -> SourcePosition | None:
    number = last_number(source.get("file"))
    if number is None or source.get("pos") is None:
        return None
    # Each write also has its own time, which is what Cassandra itself orders by.
    return {"commitlog": (int(source.get("ts_us") or 0), number, int(source["pos"]))}


def _gtid(text: Any) -> tuple[str | None, int]:
    """Who numbers the transaction (MariaDB's domain, MySQL's server), and its number.

    Of a MySQL range (``uuid:1-68``) it is the last number; a set of several GTIDs has no order.
    """
    if not text or "," in str(text):
        return None, 0
    if ":" in str(text):
        writer, _, numbers = str(text).rpartition(":")
        number = numbers.rpartition("-")[2]
        return (writer, int(number)) if number.isdigit() else (None, 0)
    parts = str(text).split("-")
    return (parts[0], int(parts[2])) if len(parts) == 3 and parts[2].isdigit() else (None, 0)


def last_number(text: Any) -> int | None:
    """The last number in a text, such as that of a file of the binlog; ``None``: it has none."""
    found = _NUMBERS.findall(str(text)) if text else None
    return int(found[-1]) if found else None


_sqlserver = _lsn("commit_lsn", "change_lsn", "event_serial_no")
_BY_CONNECTOR: Final = {
    "postgresql": _postgresql,
    "mysql": _binlog,
    "mariadb": _binlog,
    "oracle": _oracle,
    "sqlserver": _sqlserver,
    "db2": _lsn("commit_lsn", "change_lsn"),
    "mongodb": _mongodb,
    "cassandra": _cassandra,
}
_BY_FIELDS: Final = (_postgresql, _sqlserver, _oracle, _binlog, _mongodb)
