"""Where in its database's log a Debezium message was, for each connector."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from everstate.sources.cdc.rows import Position

Source = Mapping[str, Any]
Place = tuple[Position, tuple[int, ...]]

_NUMBERS: Final = re.compile(r"\d+")


def place_of(connector: str, source: Source, order_in_transaction: int | None) -> Place:
    """Position and sort order of a message's source block; empty where it does not tell.

    A connector that is not known is read as the fields it has say.
    """
    own = _BY_CONNECTOR.get(connector)
    if own is not None:
        return own(source, order_in_transaction or 0) or ({}, ())
    for way in _BY_FIELDS:
        place = way(source, order_in_transaction or 0)
        if place is not None:
            return place
    return {}, ()


def _postgresql(source: Source, order: int) -> Place | None:
    lsn = source.get("lsn")
    if lsn is None:
        return None
    place = (int(lsn), order)
    return {"lsn": place}, place


def _binlog(source: Source, order: int) -> Place | None:
    file, at = source.get("file"), source.get("pos")
    number = _last_number(file)
    if at is None or number is None:
        return None
    place = (number, int(at), int(source.get("row") or 0))
    position: dict[str, tuple[int | str, ...]] = {}
    writer, sequence = _gtid(source.get("gtid"))
    if writer is not None:
        # The server that is read is no part of it: a replica goes on where the primary stopped.
        position[f"gtid {writer}"] = (sequence, order, *(() if order else place))
    return {**position, "binlog": place}, place


def _lsn(*names: str) -> Callable[[Source, int], Place | None]:
    def place(source: Source, order: int) -> Place | None:
        del order
        if source.get(names[0]) is None:
            return None
        found = tuple(part for name in names for part in _parts(source.get(name)))
        return {names[0]: found}, found

    return place


def _parts(text: Any) -> tuple[int, ...]:
    """Numbers of an LSN: hexadecimal groups with colons, or one decimal number."""
    if text is None:
        return (0,)
    base = 16 if ":" in str(text) else 10
    try:
        return tuple(int(part, base) for part in str(text).split(":"))
    except ValueError:
        return (0,)


def _oracle(source: Source, order: int) -> Place | None:
    del order
    scn = source.get("scn")
    if scn is None:
        return None
    record = [int(part, 16) for part in re.findall(r"[0-9a-fA-F]+", source.get("rs_id") or "")]
    place = (int(scn), *[*record, 0, 0, 0][:3], int(source.get("ssn") or 0))
    return {"scn": place}, place


def _mongodb(source: Source, order: int) -> Place | None:
    del order
    if source.get("ord") is None or source.get("ts_ms") is None:
        return None
    place = (int(source["ts_ms"]) // 1000, int(source["ord"]))
    return {"oplog": place}, place


def _cassandra(source: Source, order: int) -> Place | None:
    del order
    number = _last_number(source.get("file"))
    if number is None or source.get("pos") is None:
        return None
    # Each write also has its own time, which is what Cassandra itself orders by.
    time_us = int(source.get("ts_us") or 0)
    place = (time_us, number, int(source["pos"]))
    return {"commitlog": place}, place


def _vitess(source: Source, order: int) -> Place | None:
    text, shard = source.get("vgtid"), source.get("shard")
    if not text:
        return None
    for one in msgspec.json.decode(text):
        if shard is None or one.get("shard") == shard:
            writer, sequence = _gtid(str(one.get("gtid")).partition("/")[2])
            if writer is not None:
                return {f"vgtid {shard} {writer}": (sequence, order)}, (sequence, order)
    return None


def _spanner(source: Source, order: int) -> Place | None:
    del order
    if source.get("ts_us") is None or source.get("server_transaction_id") is None:
        return None
    sequence = _last_number(source.get("sequence")) or 0
    place = (int(source["ts_us"]), sequence, int(source.get("mod_number") or 0))
    return {"commit": place}, place


def _cockroachdb(source: Source, order: int) -> Place | None:
    del order
    clock = source.get("ts_hlc")
    if not clock:
        return None
    numbers = tuple(int(part) for part in _NUMBERS.findall(str(clock)))
    return {"hlc": numbers}, numbers


def _gtid(text: Any) -> tuple[str | None, int]:
    """Who numbers the transaction (MariaDB's domain, MySQL's server), and its number.

    Of a range of MySQL (``uuid:1-68``) it is the last one; sets of several tell no order.
    """
    if not text or "," in str(text):
        return None, 0
    if ":" in str(text):
        writer, _, numbers = str(text).rpartition(":")
        number = numbers.rpartition("-")[2]
        return (writer, int(number)) if number.isdigit() else (None, 0)
    parts = str(text).split("-")
    return (parts[0], int(parts[2])) if len(parts) == 3 and parts[2].isdigit() else (None, 0)


def _last_number(text: Any) -> int | None:
    found = _NUMBERS.findall(str(text)) if text else None
    return int(found[-1]) if found else None


_yashandb = _lsn("position_scn", "group_lsn", "group_offset", "batch_row_id")
_sqlserver = _lsn("commit_lsn", "change_lsn", "event_serial_no")
_BY_CONNECTOR: Final = {
    "postgresql": _postgresql,
    "mysql": _binlog,
    "mariadb": _binlog,
    "oracle": _oracle,
    "sqlserver": _sqlserver,
    "db2": _lsn("commit_lsn", "change_lsn"),
    "informix": _lsn("commit_lsn", "change_lsn"),
    "mongodb": _mongodb,
    "cassandra": _cassandra,
    "vitess": _vitess,
    "spanner": _spanner,
    "cockroachdb": _cockroachdb,
    "yashandb": _yashandb,
}
_BY_FIELDS: Final = (_postgresql, _sqlserver, _oracle, _binlog, _mongodb, _vitess, _yashandb)
