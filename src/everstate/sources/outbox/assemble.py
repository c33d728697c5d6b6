"""From the payloads of a replication stream to whole transactions of outbox rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from everstate.errors import ReplicationFailed
from everstate.sources.outbox.compose import OutboxRow
from everstate.sources.outbox.pending import Pending, Transaction
from everstate.sources.outbox.pgoutput import (
    Begin,
    Commit,
    Decoder,
    Insert,
    LogicalMessage,
    Relation,
)
from everstate.sources.outbox.schema import SCHEMA

PREFIX: Final = "everstate"
"""Of the logical messages that are ours."""


class _Fact(msgspec.Struct, frozen=True):
    """The content of a logical message, as `everstate_store.emit_event` writes it."""

    xid: str
    entity: str
    key: str
    change_id: UUID
    schema_version: int
    occurred_at: str
    recorded_at: datetime
    provenance: str
    event: str | None
    after: str


_decode_fact = msgspec.json.Decoder(_Fact).decode


@dataclass(frozen=True, slots=True)
class Refused:
    """A message under our prefix that is no fact."""

    lsn: int
    content: bytes
    reason: str


@dataclass(slots=True)
class Streamed:
    """One committed transaction as the WAL has it; its changes in the order of writing.

    Changes that stand in no outbox (facts) have ids below zero.
    """

    transaction: Transaction
    rows: dict[int, OutboxRow] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    is_large: bool = False
    """Its rows were not kept: they stand in the outbox table too. Its facts are here."""
    end_lsn: int = 0
    """Position behind its commit."""

    @property
    def facts(self) -> list[OutboxRow]:
        """Its changes that stand in the WAL only."""
        return [row for number, row in self.rows.items() if number < 0]


class Assembler:
    """Puts the payloads of one stream together; a new stream needs a new one.

    Of a transaction with more rows or bytes than these only the facts are kept.
    """

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._bytes = 0
        self._decoder = Decoder()
        self._open: Streamed | None = None
        self._fact_ids = itertools.count(-1, -1)
        self._places: tuple[Relation | None, Sequence[int]] = (None, ())

    @property
    def is_between(self) -> bool:
        """Whether no transaction is half read."""
        return self._open is None

    def feed(self, payload: bytes) -> Streamed | None:
        """Take a payload; gives the transaction that it ends.

        Raises ReplicationFailed for what is no stream of outbox rows.
        """
        message = self._decoder.decode(payload)
        if isinstance(message, Begin):
            self._open, self._bytes = Streamed(Transaction("")), 0
        elif self._open is None:
            # A message outside of transactions is nobody's promise.
            return None
        elif isinstance(message, Insert):
            self._add(self._open, self._row(message))
        elif isinstance(message, LogicalMessage):
            self._take(self._open, message)
        elif isinstance(message, Commit):
            done, self._open = self._open, None
            done.end_lsn = message.end_lsn
            return done
        return None

    def _add(self, streamed: Streamed, row: OutboxRow) -> None:
        size = len(row.before or "") + len(row.after or "")
        streamed.transaction.xid = row.xid
        self._bytes += size
        if len(streamed.rows) >= self._rows_max or self._bytes > self._bytes_max:
            streamed.is_large = True
            streamed.transaction.rows.clear()
            streamed.rows = {number: each for number, each in streamed.rows.items() if number < 0}
        if streamed.is_large and row.id > 0:
            return
        streamed.transaction.rows.append(Pending(row.id, row.xid, row.entity, row.key, size))
        streamed.rows[row.id] = row

    def _take(self, streamed: Streamed, message: LogicalMessage) -> None:
        if message.prefix != PREFIX:
            return
        try:
            fact = _decode_fact(message.content)
        except (msgspec.DecodeError, ValueError) as cause:
            streamed.refused.append(Refused(message.lsn, message.content, str(cause)))
            return
        self._add(
            streamed,
            OutboxRow(
                id=next(self._fact_ids),
                xid=fact.xid,
                entity=fact.entity,
                key=fact.key,
                version=1,
                kind="event",
                change_id=fact.change_id,
                schema_version=fact.schema_version,
                occurred_at=fact.occurred_at,
                recorded_at=fact.recorded_at,
                provenance=fact.provenance,
                event=fact.event,
                before=None,
                after=fact.after,
            ),
        )

    def _row(self, insert: Insert) -> OutboxRow:
        relation = insert.relation
        if self._places[0] is not relation:
            self._places = (relation, _places(relation))
        cells = [insert.values[place] for place in self._places[1]]
        text = [None if cell is None else cell.decode() for cell in cells]
        try:
            return OutboxRow(
                int(_given(text[0])),
                _given(text[1]),
                _given(text[2]),
                _given(text[3]),
                int(_given(text[4])),
                _given(text[5]),
                UUID(_given(text[6])),
                int(_given(text[7])),
                _given(text[8]),
                datetime.fromisoformat(_given(text[9])),
                _given(text[10]),
                *text[11:],
            )
        except ValueError as cause:
            raise ReplicationFailed(f"an outbox row of the WAL cannot be read: {cause}") from cause


def _places(relation: Relation) -> list[int]:
    if (relation.schema, relation.name) != (SCHEMA, "outbox"):
        raise ReplicationFailed(
            f"the publication has rows of {relation.schema}.{relation.name}, which is no outbox"
        )
    try:
        return [relation.columns.index(name) for name in OutboxRow._fields]
    except ValueError as cause:
        raise ReplicationFailed(f"the outbox lacks a column: {cause}") from cause


def _given(text: str | None) -> str:
    if text is None:
        raise ValueError("a column is null")
    return text
