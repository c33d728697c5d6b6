"""Debezium's change events, with and without their schemas, of all its connectors."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Container, Mapping
from typing import Any, Final

import msgspec

from everstate.sources.cdc.placeholders import placeholder_of
from everstate.sources.cdc.rows import (
    PROVENANCE,
    Op,
    RawMessage,
    SourceRow,
    TransactionProvenance,
    Unreadable,
    exact_number,
)
from everstate.sources.cdc.shapes.places import position_of, stream_place
from everstate.sources.cdc.shapes.semantic import conversions, document

_OPS: Final[Mapping[str, Op]] = {"c": "c", "u": "u", "d": "d", "r": "r", "t": "t", "m": "m"}
OLD_KEY: Final = "__debezium.oldkey"
"""Header of a row whose key was changed: the key it had."""
_CELL: Final = {"value", "deletion_ts", "set"}
_NO_TYPES: Final[Mapping[str, str]] = {}
_decode = msgspec.json.Decoder(float_hook=exact_number).decode
"""Numbers that a float would change keep all their digits."""
_GTID: Final = re.compile(r"(\d+)-\d+-(\d+)")
"""Of MariaDB; groups: the domain, and the number of the transaction in it."""


class _Event(msgspec.Struct, rename="camel", gc=False):
    """The fields that are read of a change event, and of a record of transaction metadata.

    The rest of the message is not parsed.
    """

    op: str | None = None
    before: Any = None
    after: Any = None
    source: dict[str, Any] | None = None
    transaction: Any = None
    update_description: Any = None
    message: Any = None
    status: str | None = None
    id: Any = None
    ts_us: Any = msgspec.field(default=None, name="ts_us")
    ts_ns: Any = msgspec.field(default=None, name="ts_ns")
    ts_ms: Any = msgspec.field(default=None, name="ts_ms")


class _Envelope(_Event, gc=False):
    """Both forms of an event at once: flat, or with ``payload`` under ``schema``."""

    schema: msgspec.Raw = msgspec.Raw(b"null")
    payload: _Event | None = None


class KnownColumn(msgspec.Struct, rename="camel", gc=False):
    """A column as MariaDB's connector knows it."""

    name: str
    type_name: str = ""
    position: int = 0
    charset_name: str | None = None
    enum_values: list[str] | None = None
    """Labels of an ENUM or SET; of other columns the raw log has null, and the history ``[]``."""


class _Definition(msgspec.Struct, gc=False):
    columns: list[KnownColumn] = []


class _TableChange(msgspec.Struct, gc=False):
    """What a schema change did to a table; its id has quoted names: `"shop"."orders"`."""

    id: str
    type: str = ""
    table: _Definition | None = None


class SchemaChange(msgspec.Struct, rename="camel", gc=False):
    """The fields that are read of a schema change, in the raw log or in the connector's history."""

    source: dict[str, Any] = {}
    ddl: str | None = None
    table_changes: list[_TableChange] | None = None


decode_schema_change = msgspec.json.Decoder(SchemaChange).decode
_HOW: Final = {"DROP": "dropped", "CREATE": "made anew"}
_RENAMED: Final = re.compile(r"\brename\b(?!\s+(?:column|index|key)\b)", re.IGNORECASE)
_PARTED: Final = re.compile(
    r"\b(drop|truncate|exchange|convert)\s+(?:table\b.+?\bto\s+)?partition\b", re.I | re.S
)
"""The clauses of ALTER TABLE that remove rows, or put others in their place, without row events."""
_NAMES: Final = re.compile(r'"((?:[^"]|"")*)"')
_NAME: Final = r"(`(?:[^`]|``)+`|[^\s.,`]+)"
_TO: Final = re.compile(rf"\bTO\s+(?:{_NAME}\s*\.\s*)?{_NAME}", re.IGNORECASE)
"""The new name of a table in RENAME TABLE: its database, if it is there, and the table."""
_decode_envelope = msgspec.json.Decoder(_Envelope, float_hook=exact_number).decode


def read_rows(message: RawMessage) -> list[SourceRow]:
    """Rows of one record of a table's topic; a tombstone has none.

    Raises Unreadable with the reason.
    """
    if message.value is None:
        return []
    event, types = _event(message.value)
    if event.op is None:
        raise Unreadable("no change event: it has no field op (is it flattened by a transform?)")
    op = _OPS.get(event.op)
    if op is None:
        raise Unreadable(f"op {event.op!r} is none of {', '.join(_OPS)}")
    source = event.source or {}
    connector = str(source.get("connector") or "")
    transaction, order, block = None, 0, event.transaction
    if isinstance(block, dict) and block.get("id"):
        transaction = transaction_of(connector, source, str(block["id"]))
        order = int(block.get("total_order") or 0)
    is_snapshot = op == "r" or _is_snapshot(source)
    written = {"ts_us": event.ts_us, "ts_ns": event.ts_ns, "ts_ms": event.ts_ms}
    before, after = _image(event.before, "before"), _image(event.after, "after")
    is_whole = op != "d" and after is not None
    if connector == "cassandra":
        before, after, is_whole = _cells(op, event.after)
    elif connector == "mongodb":
        after, is_whole = _mongodb(event, after)
    headers = message.headers
    placeholder, unknown = placeholder_of(message.placeholder), ()
    # Rows that PostgreSQL inserts are logged whole, and snapshots read rows whole: a text equal to
    # a placeholder is real text. Of an update of the key Debezium says that the row was created.
    tells_all = connector == "postgresql" and (op == "r" or (op == "c" and OLD_KEY not in headers))
    if placeholder.may_be_in(message.value) and not tells_all:
        known_after = placeholder.without(after)
        unknown = tuple(name for name in after or () if name not in (known_after or ()))
        is_whole = is_whole and not unknown
        before, after = placeholder.without(before), known_after
    if before is None and after is None and message.key is None and op not in ("t", "m"):
        raise Unreadable("it has neither key nor image before or after")
    return [
        SourceRow(
            table=message.table or str(source.get("table") or source.get("collection") or ""),
            op=op,
            key=_key(message.key, connector),
            before=before,
            after=after,
            is_whole=is_whole,
            unknown=unknown,
            moved_from=_key(headers.get(OLD_KEY), connector) if headers else None,
            # Rows of an incremental snapshot have no position in the log.
            position=(
                {} if source.get("snapshot") == "incremental" else position_of(connector, source)
            ),
            # Rows that a snapshot read do not come from the log and have no place in it.
            place=None if is_snapshot else stream_place(connector, source, order),
            transaction=transaction,
            time_us=time_us(source) or time_us(written),
            is_snapshot=is_snapshot,
            source=source,
            types=types,
        )
    ]


def ended_transaction(value: bytes | None) -> str | None:
    """Id of the transaction that an END record closes, for :func:`ends`; ``None``: it closes none.

    A prepared XA transaction of MariaDB gets no END, so a BEGIN with a GTID (``0-1-12``) closes
    those before it: out ``<0-1-12``.
    """
    if value is None:
        return None
    end, _ = _event(value)
    if end.status != "END":
        return f"<{end.id}" if _GTID.fullmatch(str(end.id)) else None
    if end.id is None:
        raise Unreadable("the end of a transaction lacks its id")
    return transaction_key(str(end.id))


def ends(ended: str | None, transaction: str) -> bool:
    """Whether what :func:`ended_transaction` found closes a transaction.

    A connector that restarted writes BEGIN records once more: an earlier one closes nothing.
    """
    if ended == transaction:
        return True
    begun, known = _GTID.fullmatch((ended or "").removeprefix("<")), _GTID.fullmatch(transaction)
    if begun is None or known is None or begun[0] == ended:
        return False
    return begun[1] == known[1] and int(begun[2]) > int(known[2])


def may_be_prepared(transaction: str) -> bool:
    """Whether a transaction that has no END record may be a prepared one: it is of MariaDB."""
    return _GTID.fullmatch(transaction) is not None


def replaced_tables(value: bytes | None) -> list[tuple[str, str, str]]:
    """Database, table and how, of each table whose rows a schema change replaced.

    A table that was renamed is told by its new name, and one that is gone only when it was dropped.
    A snapshot writes the definitions of all tables, and replaces none.
    """
    change = decode_schema_change(value or b"{}")
    if _is_snapshot(change.source):
        return []
    ddl = change.ddl or ""
    altered = "renamed" if _RENAMED.search(ddl) else None
    if (parted := _PARTED.search(ddl)) is not None:
        altered = f"changed by {parted[1].upper()} PARTITION"
    hows = ((each.id, _HOW.get(each.type, altered)) for each in change.table_changes or ())
    return [(*table_in(name), how) for name, how in hows if how]


def table_in(name: str) -> tuple[str, str]:
    """Database and table of the id that a record of a schema change gives a table."""
    database, table = (part.replace('""', '"') for part in _NAMES.findall(name)[-2:])
    return database, table


def unknown_tables(value: bytes | None) -> list[tuple[str, str]]:
    """Database and table of each new name of a table that the connector does not know.

    It keeps the columns of tables that are captured, and of all that were made since it was added.
    Of another table that takes a captured name it has no columns, and reads its rows by those of
    the former table. Its record of RENAME TABLE has no definition then.
    """
    change = decode_schema_change(value or b"{}")
    ddl, here = change.ddl or "", str(change.source.get("db"))
    if not ddl.lstrip().lower().startswith("rename"):
        return []
    known = {tuple(_NAMES.findall(each.id)[-2:]) for each in change.table_changes or ()}
    found = [(_unquoted(place or here), _unquoted(table)) for place, table in _TO.findall(ddl)]
    return [place for place in found if place not in known]


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def read_message(value: bytes | None, prefixes: Container[str]) -> TransactionProvenance | None:
    """Provenance in a logical message with one of these prefixes; ``None``: it has none.

    Its content is a JSON object with the fields in snake or camel case.
    """
    if value is None:
        return None
    event, _ = _event(value)
    body, source = event.message, event.source or {}
    if event.op != "m" or not isinstance(body, dict) or source.get("txId") is None:
        return None
    if (prefix := str(body.get("prefix"))) not in prefixes:
        return None
    try:
        found = msgspec.json.decode(base64.b64decode(body.get("content") or "", validate=True))
    except binascii.Error as cause:
        raise Unreadable(f"a logical message's content is not base64: {cause}") from cause
    except msgspec.DecodeError as cause:
        raise Unreadable(f"a provenance message is not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise Unreadable("a provenance message is not a JSON object")
    plain = {name.replace("_", "").lower(): value for name, value in found.items()}
    given = ((name, plain.get(name.replace("_", ""))) for name in PROVENANCE)
    return TransactionProvenance(
        transaction=str(source["txId"]),
        prefix=prefix,
        fields={name: str(one) for name, one in given if one not in (None, "")},
        place=stream_place("postgresql", source),
        time_us=time_us(source),
    )


def transaction_key(text: str) -> str:
    """The part of a transaction's id that all its events share.

    PostgreSQL's ids end with the position of the event: the events of one transaction have
    ``744:26916144``, ``744:26916200``, …. Other connectors' ids are the same for all events, and
    do not consist of two numbers (MariaDB's is a GTID).
    """
    head, _, tail = text.partition(":")
    return head if head.isdigit() and tail.isdigit() else text


def transaction_of(connector: str, source: Mapping[str, Any], block_id: str) -> str:
    """The id that all rows of a row's transaction share."""
    if connector == "postgresql" and source.get("txId") is not None:
        return str(source["txId"])
    return transaction_key(block_id)


def _event(value: bytes) -> tuple[_Event, Mapping[str, str]]:
    """The event of a message, and the conversions that its schema defines."""
    try:
        message = _decode_envelope(value)
    except msgspec.DecodeError as cause:
        raise Unreadable(f"not JSON of Debezium: {cause}") from cause
    if message.payload is not None:
        return message.payload, conversions(bytes(message.schema))
    return message, _NO_TYPES


def _key(key: bytes | None, connector: str) -> Mapping[str, Any] | None:
    if key is None:
        return None
    try:
        found = _decode(key)
    except msgspec.DecodeError as cause:
        raise Unreadable(f"the key is not JSON: {cause}") from cause
    if isinstance(found, dict) and "payload" in found and "schema" in found:
        found = found["payload"]
    if connector == "mongodb" and isinstance(found, dict) and isinstance(found.get("id"), str):
        # MongoDB's key is a document in a string.
        inner = document(found["id"], quietly=True)
        return found if inner is None else {"_id": inner, "id": inner}
    return found if isinstance(found, dict) and found else None


def _image(image: Any, side: str) -> Any:
    """The columns of one side of an event; ``None``: it has no such side."""
    found = document(image) if isinstance(image, str) else image
    if isinstance(found, dict) or image is None:
        return found
    raise Unreadable(f"{side} is no row: {str(image)[:60]!r}")


def _cells(op: Op, after: Any) -> tuple[dict[str, Any] | None, dict[str, Any] | None, bool]:
    """Cassandra's cells: a cell that is null was not written, and is unknown.

    Every write is an upsert of the cells it names, so that no row is ever whole.
    """
    if not isinstance(after, dict):
        raise Unreadable("a row of Cassandra has no cells")
    cells = {
        name: cell.get("value") if cell.get("deletion_ts") is None else None
        for name, cell in after.items()
        if isinstance(cell, dict) and _CELL >= set(cell)
    }
    if op == "d":
        kept = {name: c.get("value") for name, c in after.items() if isinstance(c, dict)}
        return kept, None, False
    return None, cells, False


def _mongodb(
    event: _Event, after: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, bool]:
    """The document after: whole when given, else only the fields that the update changed."""
    if after is not None or event.op == "d":
        return after, after is not None
    update = event.update_description
    if not isinstance(update, dict):
        return None, False
    changed = _image(update.get("updatedFields") or "{}", "updatedFields") or {}
    if any("." in name for name in changed):
        raise Unreadable("an update of a part of a field cannot be completed; capture documents")
    removed = update.get("removedFields") or []
    return {**dict.fromkeys(removed), **changed}, False


def _is_snapshot(source: Mapping[str, Any]) -> bool:
    snapshot = source.get("snapshot")
    return snapshot != "false" and str(snapshot or "false").lower() not in ("false", "none")


def time_us(block: Mapping[str, Any]) -> int | None:
    """Microseconds since 1970 of a block's finest time; ``None``: it has none that is a number."""
    for name, per_us in _TIMES:
        value = block.get(name)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and value > 0:
            found = value * per_us if per_us > 0 else value // -per_us
            # Cassandra's connector writes microseconds where the name says milliseconds.
            return found if found < TIME_US_MAX else found // 1000
    return None


_TIMES: Final = (("ts_us", 1), ("ts_ns", -1_000), ("ts_ms", 1_000), ("ts_sec", 1_000_000))
TIME_US_MAX: Final = 253_402_300_800 * 1_000_000
