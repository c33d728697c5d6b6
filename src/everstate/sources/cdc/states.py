"""The newest states of a capture's entities while a batch is numbered, stored in a StateCopy."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Mapping
from heapq import merge
from typing import Any, Final

import msgspec

from everstate.changes import EntityType
from everstate.log.state_copy import StateCopy
from everstate.sources.cdc.completion import Known

FORM: Final = "clean-1"
"""Version of the format of the rows below; a copy with another version is not used."""
_STATE: Final = b"s"
_HELD: Final = b"h"
_IGNORED: Final = b"o"
_HEAD = struct.Struct(">QBH")


class States:
    r"""Newest states by entity type and key: looked up in batches, written with the transaction.

    A name is ``<entity type>\0<key>``. A state of one of the ``types`` is as its model writes it
    today, so that a row which has only a renamed field makes no change.
    """

    def __init__(self, copy: StateCopy, types: Mapping[str, EntityType] | None = None) -> None:
        self._copy, self._types = copy, types or {}
        self.cache: dict[str, Known | None] = {}
        """States that were looked up or put in this batch."""
        self.changed: set[str] = set()
        """Names of the states that were put."""

    def load(self, names: Iterable[str]) -> None:
        """Look up states in advance, in one query."""
        wanted = sorted(name for name in set(names) if name not in self.cache)
        found = self._copy.get_many([_STATE + name.encode() for name in wanted])
        for name, row in zip(wanted, found, strict=True):
            self.cache[name] = None if row is None else self._today(name, known_row(row))

    def _today(self, name: str, known: Known) -> Known:
        kind = self._types.get(name.partition("\0")[0])
        if kind is None or not kind.former:
            return known
        return msgspec.structs.replace(known, image=kind.restated(known.image))

    def get(self, entity: str, key: str) -> Known | None:
        """Newest state of an entity; ``None``: it was never seen."""
        name = f"{entity}\0{key}"
        if name not in self.cache:
            self.load([name])
        return self.cache[name]

    def put(self, name: str, known: Known) -> None:
        """Set a newer state; `get` returns it at once, the batch's commit stores it."""
        self.cache[name] = known
        self.changed.add(name)

    def alive(self, entity: str, after: str = "") -> Iterator[str]:
        """Sorted keys of a type's entities that are not deleted, with the changes of this batch.

        ``after``: only keys behind this one.
        """
        prefix = f"{entity}\0"
        own = {name[len(prefix) :] for name in self.changed if name.startswith(prefix)}
        # UTF-8 keeps the order of the code points, by which Python compares texts.
        for key in merge(self._stored(prefix, after, own), sorted(own)):
            known = self.cache[prefix + key] if key in own else None
            if key > after and (known is None or not known.is_deleted):
                yield key

    def _stored(self, prefix: str, after: str, own: Container[str]) -> Iterator[str]:
        """Keys of the copy from ``after`` on, of entities that are not deleted there.

        ``own``: keys to leave out.
        """
        first = _STATE + prefix.encode()
        for name, row in self._copy.scan(first, first + after.encode()):
            key = name[len(first) :].decode()
            if key not in own and not _HEAD.unpack_from(row)[1]:
                yield key

    def rows(self) -> dict[bytes, bytes | None]:
        """Rows to store in the copy, for the states that were put."""
        return {
            _STATE + name.encode(): state_row(known)
            for name in self.changed
            if (known := self.cache[name]) is not None
        }


def state_row(known: Known) -> bytes:
    """A state as the copy has it."""
    head = _HEAD.pack(known.version, known.is_deleted, len(known.place))
    return b"%b%b%b" % (head, known.place, known.image)


def state_name(entity: str, key: str) -> bytes:
    """Name of an entity's row in the copy."""
    return _STATE + f"{entity}\0{key}".encode()


def held_name(key: bytes) -> bytes:
    """Name in the copy of a record of the held topic, by its key there.

    Nobody reads the records of earlier versions whose key begins with a line feed.
    """
    return (_IGNORED if key.startswith(b"\n") else _HELD) + key


def held_rows_of(copy: StateCopy) -> Iterator[bytes]:
    """Values of all held entities, as the held topic has them."""
    return (row for _, row in copy.scan(_HELD))


def known_row(row: bytes) -> Known:
    """A state of the copy."""
    version, is_deleted, length = _HEAD.unpack_from(row)
    start = _HEAD.size
    end = start + length
    return Known(version, row[end:], bool(is_deleted), row[start:end])


def encoded_position(position: Any) -> bytes:
    """A source position as JSON; empty for none."""
    return msgspec.json.encode(position) if position else b""
