"""The messages of PostgreSQL's own decoder of the WAL (pgoutput, protocol version 1).

Only what a stream of inserts and logical messages consists of; what else there is (types,
origins, truncates) is passed over. Source: PostgreSQL's documentation, "Logical Replication
Message Formats".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

from everstate.errors import ReplicationFailed

_BEGIN: Final = struct.Struct("!QqI")
_COMMIT: Final = struct.Struct("!BQQq")
_MESSAGE: Final = struct.Struct("!BQ")
_LENGTH: Final = struct.Struct("!i")
_COUNT: Final = struct.Struct("!H")
_OID: Final = struct.Struct("!I")
_COLUMN_TAIL: Final = struct.Struct("!Ii")


@dataclass(frozen=True, slots=True)
class Begin:
    """A committed transaction begins; its changes follow, then its commit."""

    xid: int
    """The low 32 bits."""


@dataclass(frozen=True, slots=True)
class Commit:
    """It ends; ``end_lsn`` is the position behind its commit record."""

    end_lsn: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as the rows that follow have it."""

    schema: str
    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    """A row; values as text in UTF-8, ``None`` is null."""

    relation: Relation
    values: tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What `pg_logical_emit_message` wrote."""

    is_transactional: bool
    lsn: int
    prefix: str
    content: bytes


Message: TypeAlias = Begin | Commit | Insert | LogicalMessage


class Decoder:
    """Decodes the messages of one stream, in their order: rows refer to tables told before."""

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}

    def decode(self, payload: bytes) -> Message | None:
        """One message; ``None`` for what is passed over.

        Raises ReplicationFailed for bytes that are none, and for a row of an unknown table.
        """
        try:
            return self._decode(payload)
        except (struct.error, IndexError, KeyError, ValueError) as cause:
            raise ReplicationFailed(
                f"a message {payload[:1]!r} of {len(payload)} bytes cannot be read: {cause!r}"
            ) from cause

    def _decode(self, payload: bytes) -> Message | None:
        kind = payload[:1]
        if kind == b"I":
            return self._insert(payload)
        if kind == b"B":
            return Begin(_BEGIN.unpack_from(payload, 1)[2])
        if kind == b"C":
            return Commit(_COMMIT.unpack_from(payload, 1)[2])
        if kind == b"M":
            flags, lsn = _MESSAGE.unpack_from(payload, 1)
            prefix, at = _text(payload, 1 + _MESSAGE.size)
            content, _ = _bytes(payload, at)
            return LogicalMessage(bool(flags & 1), lsn, prefix, content)
        if kind == b"R":
            self._learn(payload)
            return None
        if kind in (b"O", b"Y", b"T"):
            return None
        raise ValueError("unknown kind")

    def _learn(self, payload: bytes) -> None:
        (oid,) = _OID.unpack_from(payload, 1)
        schema, at = _text(payload, 5)
        name, at = _text(payload, at)
        (count,) = _COUNT.unpack_from(payload, at + 1)  # one byte of replica identity before it
        at += 1 + _COUNT.size
        columns = []
        for _ in range(count):
            column, at = _text(payload, at + 1)  # one byte of flags before it
            at += _COLUMN_TAIL.size
            columns.append(column)
        if at != len(payload):
            raise ValueError("bytes are left over")
        self._relations[oid] = Relation(schema, name, tuple(columns))

    def _insert(self, payload: bytes) -> Insert:
        (oid,) = _OID.unpack_from(payload, 1)
        relation = self._relations[oid]
        if payload[5:6] != b"N":
            raise ValueError("an insert without a new row")
        (count,) = _COUNT.unpack_from(payload, 6)
        at = 6 + _COUNT.size
        values: list[bytes | None] = []
        for _ in range(count):
            kind = payload[at : at + 1]
            if kind == b"n":
                values.append(None)
                at += 1
            elif kind == b"t":
                value, at = _bytes(payload, at + 1)
                values.append(value)
            else:
                # 'u', a large value that did not change, is in no insert; 'b' was not asked for.
                raise ValueError(f"a column of kind {kind!r}")
        if count != len(relation.columns):
            raise ValueError("another number of columns than the table has")
        return Insert(relation, tuple(values))


def _text(payload: bytes, at: int) -> tuple[str, int]:
    end = payload.index(b"\x00", at)
    return payload[at:end].decode(), end + 1


def _bytes(payload: bytes, at: int) -> tuple[bytes, int]:
    (length,) = _LENGTH.unpack_from(payload, at)
    at += _LENGTH.size
    value = payload[at : at + length]
    if length < 0 or len(value) != length:
        raise ValueError("a value is cut short")
    return value, at + length
