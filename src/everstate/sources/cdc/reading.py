"""One raw record becomes what clean needs of it; pure, so that Spark's tasks can do it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec

from everstate.changes import EntityType
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.rows import Message, SourceRow, Unreadable
from everstate.sources.cdc.shapes import READERS, debezium

TRANSACTIONS: Final = "transaction"
MESSAGES: Final = "message"
"""Last parts of the names of the two raw topics that are no tables."""

_PROVENANCE: Final = {
    name: name.replace("_", "").lower()
    for name in (
        "service_name",
        "identifier",
        "actor",
        "reason",
        "correlation_id",
        "causation_id",
        "api_version",
    )
}


class RefusedRow(msgspec.Struct, array_like=True, tag=True, kw_only=True, gc=False):
    """A record that no row can be made of; ``key`` is the entity's, when it could be told."""

    table: str
    reason: str
    key: str | None = None
    columns: dict[str, Any] = {}
    transaction: str | None = None


class EndedTransaction(msgspec.Struct, array_like=True, tag=True, kw_only=True, gc=False):
    """The end of a source transaction.

    ``count`` is the number of its rows in all tables, ``expected`` of those in captured ones;
    ``None``: it does not tell.
    """

    id: str
    count: int
    expected: int | None


class NotedProvenance(msgspec.Struct, array_like=True, tag=True, kw_only=True, gc=False):
    """Provenance of all rows of a transaction, from a logical message."""

    transaction: str
    prefix: str
    fields: dict[str, str]


Parsed = CleanRow | RefusedRow | EndedTransaction | NotedProvenance
_MISSHAPEN: Final = (
    *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError),
    msgspec.MsgspecError,
)
"""What code meets in a message that is another one than its form says."""
_NO_HEADERS: Final[Mapping[str, bytes | None]] = {}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Parsed]).decode


class ParsedCodec:
    """How what was read crosses from one process to another."""

    def encode(self, parsed: list[Parsed]) -> bytes:
        """As bytes; about 1 µs a row."""
        return _encode(parsed)

    def decode(self, value: bytes) -> list[Parsed]:
        """From bytes."""
        return _decode(value)


@dataclass(frozen=True)
class RawReader:
    """Reads the records of one capture's raw topics; can be sent to other processes."""

    capture: Capture
    entities: Mapping[str, EntityType]
    _mappings: dict[str, TableMapping] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made anew in each process."""
        return {"capture": self.capture, "entities": dict(self.entities)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "capture", state["capture"])
        object.__setattr__(self, "entities", state["entities"])
        object.__setattr__(self, "_mappings", {})

    @cached_property
    def _tables(self) -> dict[str, str]:
        return self.capture.by_topic()

    def mapping(self, table: str) -> TableMapping:
        """Mapping of a declared table."""
        found = self._mappings.get(table)
        if found is None:
            declared = self.capture.tables[table]
            entity_type = self.entities[declared.entity]
            found = TableMapping(self.capture, table, declared, entity_type)
            self._mappings[table] = found
        return found

    def read(
        self,
        name: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp_ms: int = 0,
    ) -> list[Parsed]:
        """What one record of the raw topic ``….<name>`` says; never fails.

        ``name`` is the topic's last part: a table's, or one of the two that are no tables. The
        record's own time is not looked at: every form tells the source's.
        """
        if name == TRANSACTIONS or name == MESSAGES:
            return self._about(name, key, value)
        table = self._tables[name]
        told = dict(headers) if headers else _NO_HEADERS
        message = Message(table, key, value, told, self.capture.placeholder)
        try:
            rows = READERS[self.capture.form](message)
            return [self._mapped(table, row) for row in rows]
        except Unreadable as cause:
            return [RefusedRow(table=table, reason=str(cause))]
        except _MISSHAPEN as cause:
            return [RefusedRow(table=table, reason=self._misshapen(cause))]

    def _mapped(self, table: str, row: SourceRow) -> Parsed:
        mapping = self.mapping(table)
        transaction = None if row.transaction is None else row.transaction.id
        if row.op == "m":
            return RefusedRow(table=table, reason="a logical message, and no row")
        if row.op == "t" and mapping.table.truncate == "refuse":
            return RefusedRow(
                table=table,
                reason="the table was truncated; declare truncate='delete', or take a snapshot",
                transaction=transaction,
            )
        try:
            return mapping.map(row)
        except Unreadable as cause:
            key, columns = mapping.key_if_told(row)
            return RefusedRow(
                table=table,
                reason=str(cause),
                key=key,
                columns=columns,
                transaction=transaction,
            )

    def _about(self, name: str, key: bytes | None, value: bytes | None) -> list[Parsed]:
        message = Message("", key, value, {})
        try:
            if name == TRANSACTIONS:
                return self._ended(message)
            note = debezium.read_message(message)
            if note is None:
                return []
            fields = _provenance_fields(note.content)
        except Unreadable as cause:
            return [RefusedRow(table=name, reason=str(cause))]
        except _MISSHAPEN as cause:
            return [RefusedRow(table=name, reason=self._misshapen(cause))]
        return [NotedProvenance(transaction=note.transaction, prefix=note.prefix, fields=fields)]

    def _misshapen(self, cause: Exception) -> str:
        form = self.capture.form
        return f"it is not as {form} writes it: {type(cause).__name__}: {cause}"

    def _ended(self, message: Message) -> list[Parsed]:
        end = debezium.read_transaction(message)
        if end is None:
            return []
        expected = None
        if end.counts is not None:
            expected = sum(n for name, n in end.counts.items() if self._is_captured(name))
        key = debezium.transaction_key(end.id)
        return [EndedTransaction(id=key, count=end.count, expected=expected)]

    def _is_captured(self, collection: str) -> bool:
        return any(
            table == collection
            or table.endswith(f".{collection}")
            or collection.endswith(f".{table}")
            for table in self.capture.tables
        )


def _provenance_fields(content: bytes) -> dict[str, str]:
    """Fields of provenance of a message's JSON, in snake or camel case."""
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError as cause:
        raise Unreadable(f"a provenance message is not JSON: {cause}") from cause
    if not isinstance(found, dict):
        raise Unreadable("a provenance message is not a JSON object")
    plain = {name.replace("_", "").lower(): value for name, value in found.items()}
    return {
        name: str(plain[short])
        for name, short in _PROVENANCE.items()
        if plain.get(short) not in (None, "")
    }
