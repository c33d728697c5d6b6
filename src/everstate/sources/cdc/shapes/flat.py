"""Maxwell, Canal, Oracle GoldenGate and AWS DMS: messages that give what changed, and a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

from everstate.sources.cdc.rows import Op, RawMessage, SourcePosition, SourceRow, Unreadable, key_in
from everstate.sources.cdc.shapes.places import position_of

_decode = msgspec.json.Decoder(float_hook=Decimal).decode
"""Numbers with a fraction keep all their digits."""
_ROWS: Final = frozenset({"data", "old", "before", "after", "mysqlType", "sqlType"})
"""Fields of a message that are no facts of its source."""
_MAXWELL: Final[Mapping[str, Op]] = {
    "insert": "c",
    "update": "u",
    "delete": "d",
    "bootstrap-insert": "r",
}
_CANAL: Final[Mapping[str, Op]] = {"INSERT": "c", "UPDATE": "u", "DELETE": "d", "TRUNCATE": "t"}
_GOLDENGATE: Final[Mapping[str, Op]] = {"I": "c", "U": "u", "K": "u", "D": "d", "T": "t"}
_DMS: Final[Mapping[str, Op]] = {
    "insert": "c",
    "update": "u",
    "delete": "d",
    "load": "r",
    "truncate-table": "t",
}


def read(
    form: Callable[[RawMessage, dict[str, Any]], list[SourceRow]], message: RawMessage
) -> list[SourceRow]:
    """The rows of a message by one of the forms below; a tombstone has none. Raises Unreadable."""
    if message.value is None:
        return []
    try:
        found = _decode(message.value)
    except msgspec.DecodeError as cause:
        raise Unreadable(f"not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise Unreadable("not a JSON object")
    return form(message, found)


def maxwell(message: RawMessage, found: dict[str, Any]) -> list[SourceRow]:
    """Maxwell: ``data`` is the row after (before, for a delete), ``old`` what it was before.

    With a minimal binlog row image both hold changed columns only.
    """
    kind = str(found.get("type"))
    if kind in ("bootstrap-start", "bootstrap-complete"):
        return []
    op = _op(_MAXWELL, kind)
    data = _columns(found, "data")
    position: SourcePosition = {}
    if found.get("position"):
        file, _, at = str(found["position"]).rpartition(":")
        position = position_of("mysql", {"file": file, "pos": at, "gtid": found.get("gtid")})
        # Rows of one binlog event share its position; xoffset, their place in the transaction,
        # distinguishes them.
        inner = int(found.get("xoffset") or 0)
        position = {scheme: (*place, inner) for scheme, place in position.items()}
    transaction = str(found["xid"]) if found.get("xid") else None
    shared = _shared(message, "maxwell", found, _micros(found.get("ts"), 1_000_000))
    shared |= {"position": position, "transaction": transaction}
    return [_image(op, data, found.get("old"), found.get("primary_key_columns"), shared)]


def canal(message: RawMessage, found: dict[str, Any]) -> list[SourceRow]:
    """Canal's flat message: a list of rows after (before, for deletes), and of changed columns.

    It has no position that could be compared. ``id`` counts batches of many messages and restarts
    with Canal; ``es`` is the start time of a statement, which does not follow the order of
    commits. So rows are taken in the topic's order, which is the source's order for each key.
    """
    kind = str(found.get("type"))
    if found.get("isDdl") and kind != "TRUNCATE":
        return []
    op = _op(_CANAL, kind)
    rows = found.get("data") or []
    olds = found.get("old") or [None] * len(rows)
    if not isinstance(rows, list) or len(olds) != len(rows):
        raise Unreadable("data and old are not lists of one length")
    if not rows and op != "t":
        raise Unreadable(f"{kind} without rows: data is {found.get('data')!r}")
    shared = _shared(message, "canal", found, _micros(found.get("es"), 1_000))
    if op == "t":
        return [SourceRow(op="t", **shared)]
    return [
        _image(op, row, old, found.get("pkNames"), shared)
        for row, old in zip(rows, olds, strict=True)
    ]


def goldengate(message: RawMessage, found: dict[str, Any]) -> list[SourceRow]:
    """Oracle GoldenGate's JSON: ``before`` and ``after`` with all columns, or changed ones."""
    op = _op(_GOLDENGATE, str(found.get("op_type")))
    at = str(found.get("pos") or "")
    place = (int(at),) if at.isdigit() else ()
    shared = _shared(message, "goldengate", found, _text_time(found.get("op_ts")))
    shared["position"] = {"pos": place} if place else {}
    if op == "t":
        return [SourceRow(op="t", **shared)]
    before, after = found.get("before"), found.get("after")
    if op == "d" and isinstance(before, dict):
        return [_row("d", before, None, found.get("primary_keys"), shared)]
    if not isinstance(after, dict):
        raise Unreadable("it has no row after")
    names = found.get("primary_keys")
    if op == "u":
        # Only changed columns, unless supplemental logging gives all; a row does not show which.
        before = before if isinstance(before, dict) else None
        return [_row("u", before, after, names, shared)]
    return [_row(op, None, after, names, shared, is_whole=True)]


def dms(message: RawMessage, found: dict[str, Any]) -> list[SourceRow]:
    """AWS DMS: ``data`` is the row after (before, for a delete), ``metadata`` has the rest.

    ``data`` may lack columns: by default those that are NULL or empty, and those that the source's
    log does not have. So it is not known to be whole, and tells nothing of what a before image
    lacks, which by default has the key only.
    """
    about = found.get("metadata") or {}
    kind = str(about.get("operation"))
    if about.get("record-type") == "control" and kind != "truncate-table":
        return []
    op = _op(_DMS, kind)
    time_us = _text_time(about.get("timestamp"))
    shared = _shared(message, "dms", about, time_us, about.get("table-name"))
    if about.get("transaction-id") is not None:
        shared["transaction"] = str(about["transaction-id"])
    if op == "t":
        return [SourceRow(op="t", **shared)]
    data, before = _columns(found, "data"), found.get("before-image")
    if op == "d":
        return [_row(op, data, None, None, shared)]
    before = before if op == "u" and isinstance(before, dict) else None
    return [_row(op, before, data, None, shared)]


def _shared(
    message: RawMessage,
    connector: str,
    found: Mapping[str, Any],
    time_us: int | None,
    table: Any = None,
) -> dict[str, Any]:
    """What all rows of a message have in common."""
    facts = {name: value for name, value in found.items() if name not in _ROWS}
    return {
        "table": _table(message, found.get("table") if table is None else table),
        "time_us": time_us,
        "source": {"connector": connector, **facts},
    }


def _table(message: RawMessage, name_in_message: Any) -> str:
    """Table of a message, as declared; Unreadable when the message is of another table.

    The part before the last dot is not compared: it may be a database, a schema or both.
    """
    name = str(name_in_message or "")
    if name and message.table and _last(name) != _last(message.table):
        raise Unreadable(f"it is of table {name}, and its topic is for rows of {message.table}")
    return message.table or name


def _last(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _op(ops: Mapping[str, Op], kind: str) -> Op:
    if kind not in ops:
        raise Unreadable(f"operation {kind!r} is none of {', '.join(ops)}")
    return ops[kind]


def _image(
    op: Op, data: Any, old: Any, names: list[str] | None, shared: Mapping[str, Any]
) -> SourceRow:
    """Row of forms that give the row after and the former values of the changed columns."""
    if not isinstance(data, dict):
        raise Unreadable("a row has no columns")
    if op == "d":
        return _row("d", data, None, names, shared)
    if op != "u":
        return _row(op, None, data, names, shared, is_whole=True)
    if not isinstance(old, dict):
        return _row("u", None, data, names, shared)
    unknown = tuple(column for column in old if column not in data)
    return _row("u", {**data, **old}, data, names, shared, unknown=unknown)


def _row(
    op: Op,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    names: list[str] | None,
    shared: Mapping[str, Any],
    *,
    is_whole: bool = False,
    unknown: tuple[str, ...] = (),
) -> SourceRow:
    image = after if after is not None else before
    return SourceRow(
        op=op,
        key=key_in(names, image),
        before=before,
        after=after,
        is_whole=is_whole,
        unknown=unknown,
        is_snapshot=op == "r",
        **shared,
    )


def _columns(found: Mapping[str, Any], name: str) -> Any:
    columns = found.get(name)
    if not isinstance(columns, dict):
        raise Unreadable(f"{name} is no row")
    return columns


def _micros(value: Any, per_unit: int) -> int | None:
    return int(value) * per_unit if isinstance(value, int) else None


def _text_time(text: Any) -> int | None:
    """Microseconds of a time as text; UTC where it names no offset."""
    if not isinstance(text, str):
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
