"""Parses one raw record into what cleaning needs of it; pure, so that Spark's tasks can run it."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final, Literal

import msgspec

from everstate.changes import EntityType
from everstate.declarations.captures import Capture
from everstate.sources.cdc.convert import may_have_java_names, refuse_java_name
from everstate.sources.cdc.mapping import CleanRow, TableMapping, mapping_of
from everstate.sources.cdc.placeholders import setting_of
from everstate.sources.cdc.rows import (
    FACTS,
    KIND,
    MESSAGE,
    SCHEMA,
    SOURCE,
    TRANSACTION,
    RawMessage,
    SourceRow,
    TransactionProvenance,
    Unreadable,
    moved,
    position_in,
)
from everstate.sources.cdc.shapes import READERS, debezium


class RefusedRow(msgspec.Struct, array_like=True, tag=True, kw_only=True, gc=False):
    """A record that no row can be made of; ``key`` is the entity's, if it could be read."""

    table: str
    reason: str
    key: str | None = None
    columns: dict[str, Any] = {}
    transaction: str | None = None
    op: str | None = None
    position: dict[str, list[int | str]] = {}
    place: bytes | None = None
    time_us: int | None = None


class RawFact(msgspec.Struct, frozen=True, gc=False):
    """What a record says by one name, and which is no row of a declared table."""

    what: Literal["ended", "undeclared", "unknown"]
    """A transaction ended; a row of our own connector is of a table that is not declared (any
    more); or the connector does not know the columns of the table that took a captured name, so
    that rows which follow are read by the columns of the former table."""
    name: str
    """Id of the transaction; the table as the source names it; or its declared name."""


class Fingerprint(msgspec.Struct, array_like=True, frozen=True):
    """What a captured table is made of; only whether it is another than before has a meaning."""

    columns: str
    """Digest of the columns that a field reads: number, type, labels of an enum."""
    generated: str
    """Digest of the names of those that are generated and are not in the log."""
    parts: dict[str, str]
    """Id of the table and of each of its partitions → its file; none after it was truncated."""


class BinlogLook(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of MariaDB's XA transactions after a look at its binlog (decision 88)."""

    looked: dict[str, int] = {}
    """Domain of GTIDs → number of the last transaction that was looked at."""
    prepared: list[str] = []
    """GTIDs of the transactions with captured rows that are prepared and have not ended."""
    rolled_back: list[str] = []
    """Of those that were rolled back, until the connector cannot write their rows any more."""

    def is_committed(self, gtid: str) -> bool | None:
        """Whether a transaction was committed, or was rolled back; ``None``: not known yet."""
        if gtid in self.rolled_back:
            return False
        domain, _, number = gtid.split("-")
        is_over = int(number) <= self.looked.get(domain, -1) and gtid not in self.prepared
        return True if is_over else None


class SourceIdentity(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The database that the capture reads from here on, in a record that `everstate cdc` wrote.

    With epoch 0 it is none of these: the reader reports by it what a record says of tables.
    """

    identity: str
    """An id that no other database server has."""
    epoch: int = 1
    """Raised each time that the database was restored or replaced by another one."""
    mark: str | None = None
    """The newest mark in that database (``replaced``); ``None``: the one before stays."""
    tables: dict[str, Fingerprint | None] = {}
    """Those that changed since the record before (``fingerprint``); ``None``: truncated."""
    seen: int = 0
    """When these were seen: all older transactions had ended. 0: the one before stays."""
    gone: dict[str, str] = {}
    """Table → what `cdc status` shows of rows that it lost, of which the log says nothing."""
    may_delete: int = 0
    """So many entities of a table may a snapshot of this epoch delete, whatever share they are."""
    look: BinlogLook | None = None
    """Of MariaDB; ``None``: the one before stays."""


Parsed = CleanRow | RefusedRow | RawFact | TransactionProvenance | SourceIdentity
MISSHAPEN: Final = (
    *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError),
    *(msgspec.MsgspecError, struct.error),
)
"""Errors that a reader raises for a message that does not have the declared form."""
_TIMES_US: Final = range(-(2**63), 2**63)
"""Microseconds since 1970 that a column of times can hold."""
_TRUNCATED: Final = "the table was truncated, and its entities stay as they were; "
_TRUNCATED_ALONE: Final = "with truncate='delete' of its Table the next TRUNCATE deletes them"
_TRUNCATED_SHARED: Final = (
    "a TRUNCATE cannot delete them, since {others} {have} the same entity type {entity!r}: use"
    " DELETE, which the log has row by row, or give the table an entity type of its own"
)
_TRUNCATED_OURS: Final = (
    ", and `everstate cdc snapshot {capture} --new-epoch` deletes now each entity whose row is gone"
)
STAY: Final = (
    "{how}, and its entities stay as they were; `everstate cdc snapshot {capture}"
    " --new-epoch` brings them to what the table of that name has now"
)
_LEFT_OUT: Final = (
    "{field}: DMS left out its column, which may be NULL, empty or not changed; with"
    " IncludeNullAndEmpty=true of the Kafka endpoint it writes NULL and empty columns, and a source"
    " that logs whole rows gives it all others"
)
_NOT_AFTER: Final = (
    "{field}: there is its value before, and none after; Maxwell writes a value that became NULL"
    " only with output_nulls=true"
)
_NO_HEADERS: Final[Mapping[str, bytes | None]] = {}
_decode_source = msgspec.json.Decoder(SourceIdentity).decode
encode_source = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class RawReader:
    """Reads the records of one capture's raw topics; can be sent to other processes."""

    capture: Capture
    entities: Mapping[str, EntityType]
    is_bare: bool = False
    """Whether rows get no state, only what is needed to count the rows of a transaction."""

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the caches, which each process makes anew."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _mappings(self) -> dict[str, TableMapping]:
        capture, entities = self.capture, self.entities
        return {t: one for t in capture.tables if (one := mapping_of(capture, t, entities))}

    @cached_property
    def _tables(self) -> dict[str, str]:
        return self.capture.by_topic()

    def mapping(self, table: str) -> TableMapping:
        """Mapping of a declared table."""
        return self._mappings[table]

    @property
    def header_names(self) -> tuple[str, ...]:
        """Headers of a record that :meth:`read` wants, in their order."""
        return (KIND, debezium.OLD_KEY)

    def read(
        self,
        name: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[bytes | None] = (None, None),
        timestamp_ms: int = 0,
    ) -> list[Parsed]:
        """Parse one record of the raw topic ``….<name>``; never fails.

        ``name``: the last part of the topic's name, a table's; "" is the one raw log of a capture.
        ``headers``: values of :attr:`header_names`. The record's timestamp is ignored, since every
        form contains the source's time. A record that cannot be read gives a RefusedRow.
        """
        del timestamp_ms
        kind, old_key = headers
        if kind in FACTS and not name:
            return self._fact(kind, key, value)
        message_headers = _NO_HEADERS if old_key is None else {debezium.OLD_KEY: old_key}
        table = self._tables[name] if name else ""
        message = RawMessage(table, key, value, message_headers, setting_of(self.capture))
        is_odd = self.capture.kind == "postgresql" and may_have_java_names(value or b"")
        try:
            rows = READERS[self.capture.form](message)
            found: list[Parsed] = []
            for row in rows:
                if not name:
                    source = row.source
                    names = source.get("schema") or source.get("db"), source.get("table")
                    table = self.declared(*names)
                    if not table:
                        found.append(RawFact("undeclared", ".".join(map(str, filter(None, names)))))
                        continue
                keys = self.capture.tables[table].key_columns
                found += [self._mapped(table, part, is_odd) for part in moved(row, keys)]
                if row.op == "t" and not name:
                    # All rows that the table has now will come as events.
                    found.append(SourceIdentity(identity="", epoch=0, tables={table: None}))
            if len(found) > 1:
                _number_repeats(found)
            return found
        except (Unreadable, *MISSHAPEN) as cause:
            return [self._refused(table, cause)]

    def declared(self, schema: str | None, table: str | None) -> str:
        """The declared table of that name; "": none is."""
        found = self._named.get((schema, table))
        if found is None:
            whole, tables = f"{schema}.{table}", self.capture.tables
            # MariaDB on some systems folds the names of tables.
            folded = {name.lower(): name for name in tables}
            found = whole if whole in tables else folded.get(whole.lower(), "")
            self._named[schema, table] = found
        return found

    def _mapped(self, table: str, row: SourceRow, is_odd: bool) -> Parsed:
        """The row of the entity type; ``is_odd``: it may have NaN or infinity of PostgreSQL."""
        mapping = self.mapping(table)
        if row.op == "m":
            return RefusedRow(table=table, reason="a logical message, and no row")
        if row.time_us is not None and row.time_us not in _TIMES_US:
            return RefusedRow(table=table, reason=f"its time is {row.time_us:,} µs after 1970")
        try:
            if row.op == "t" and mapping.table.truncate == "refuse":
                raise Unreadable(self._truncated(table))
            if is_odd and row.after and not self.is_bare:
                _refuse_java_names(mapping, row.after)
            if self.is_bare:
                return mapping.named(row)
            found = mapping.map(row)
            if self.capture.form != "debezium":
                _refuse_left_out(self.capture.form, mapping, row, found)
            return found
        except Unreadable as cause:
            key, columns = mapping.key_if_present(row) if row.op != "t" else (None, {})
            return RefusedRow(
                table=table,
                reason=str(cause),
                key=key,
                columns=columns,
                transaction=row.transaction,
                op=row.op,
                position=position_in(row),
                place=row.place,
                time_us=row.time_us,
            )

    def _fact(self, kind: bytes, key: bytes | None, value: bytes | None) -> list[Parsed]:
        """Parse a record that is no row: an END, provenance, a schema change, or the database."""
        try:
            if kind == TRANSACTION:
                ended = debezium.ended_transaction(value)
                return [] if ended is None else [RawFact("ended", ended)]
            if kind == SOURCE:
                return [_decode_source(value or b"")]
            if kind == SCHEMA:
                return self._replaced(value)
            if kind != MESSAGE:
                return []
            note = debezium.read_message(value, self._prefixes)
            return [] if note is None else [note]
        except (Unreadable, *MISSHAPEN) as cause:
            return [self._refused(kind.decode(), cause)]

    def _replaced(self, value: bytes | None) -> list[Parsed]:
        """What a schema change says of declared tables that are another one now, or gone."""
        named = (self.declared(*place) for place in debezium.unknown_tables(value))
        if unknown := [RawFact("unknown", table) for table in named if table]:
            return [*unknown]
        gone = {
            table: STAY.format(how=f"the table was {how}", capture=self.capture.name)
            for database, name, how in debezium.replaced_tables(value)
            if (table := self.declared(database, name))
        }
        refused = [RefusedRow(table=table, reason=reason) for table, reason in gone.items()]
        return [*refused, SourceIdentity(identity="", epoch=0, gone=gone)] if gone else []

    @cached_property
    def _named(self) -> dict[tuple[Any, Any], str]:
        return {}

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        named = (table.provenance.message_prefix for table in self.capture.tables.values())
        return frozenset(filter(None, named))

    def _truncated(self, table: str) -> str:
        """Why a TRUNCATE is refused, with advice that the declaration of the table can follow."""
        tables, how = self.capture.tables, _TRUNCATED_ALONE
        entity = tables[table].entity
        if others := [t for t, one in tables.items() if t != table and one.entity == entity]:
            have = "has" if len(others) == 1 else "have"
            how = _TRUNCATED_SHARED.format(others=", ".join(others), have=have, entity=entity)
        ours = _TRUNCATED_OURS.format(capture=self.capture.name) if self.capture.is_ours else ""
        return f"{_TRUNCATED}{how}{ours}"

    def _refused(self, table: str, cause: Exception) -> RefusedRow:
        if isinstance(cause, Unreadable):
            return RefusedRow(table=table, reason=str(cause))
        why = f"it is not as {self.capture.form} writes it: {type(cause).__name__}: {cause}"
        return RefusedRow(table=table, reason=why)


def _refuse_java_names(mapping: TableMapping, image: Mapping[str, Any]) -> None:
    """Raise Unreadable for a text that may be NaN of a `numeric` column, unless it is declared."""
    declared = {name.lower() for name in mapping.table.types}
    for column, value in image.items():
        field = mapping.field_of(column)
        if field is not None and column.lower() not in declared:
            refuse_java_name(field, value, mapping.model_fields[field].tree)


def _number_repeats(rows: Sequence[Parsed]) -> None:
    """Number the rows of one record that have the key and the operation of an earlier one of it."""
    seen: Counter[tuple[str, str]] = Counter()
    for row in (row for row in rows if isinstance(row, CleanRow)):
        if before := seen[row.key, row.op]:
            row.order = (before,)
        seen[row.key, row.op] += 1


def _refuse_left_out(form: str, mapping: TableMapping, row: SourceRow, found: CleanRow) -> None:
    """Raise Unreadable for a row of a flat form that lacks a value which may have become NULL."""
    if form == "dms" and found.known is not None and not found.covers:
        columns = mapping.sources(tuple(row.after or ()))
        missing = min(field for field, column in columns.items() if column is None)
        raise Unreadable(_LEFT_OUT.format(field=missing))
    for column in row.unknown:
        if row.op != "d" and (field := mapping.field_of(column)) is not None:
            raise Unreadable(_NOT_AFTER.format(field=field))
