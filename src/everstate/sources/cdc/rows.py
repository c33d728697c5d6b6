"""The neutral source row that every message shape is read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from everstate.sources.cdc.placeholders import DEFAULT_SETTING

Op = Literal["c", "u", "d", "r", "t", "m"]
"""Created, updated, deleted, read by a snapshot, table truncated, logical message."""
Position = Mapping[str, tuple[int | str, ...]]
"""Place in the source's log, by scheme; two places are compared by the first scheme they share."""


class Unreadable(Exception):
    """A message that no source row can be made of; its text is the reason."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One record of a raw topic, as far as a shape needs it."""

    table: str
    """Table as the declaration names it, from the topic; the message may say it more exactly."""
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes | None]
    placeholder: str = DEFAULT_SETTING
    """The connector's setting ``unavailable.value.placeholder``."""


class RowTransaction(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The source's transaction of a row: ``order`` is its 1-based place, ``None`` when untold."""

    id: str
    order: int | None = None


class SourceRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one message says about one row, and no more than that.

    ``before`` and ``after`` hold the columns that the message knows the values of; a column that
    is missing there is unknown, not null. ``None``: nothing is known of that side.
    """

    table: str
    op: Op
    key: Mapping[str, Any] | None = None
    """Key columns and their values; ``None``: to be taken from the images."""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    is_whole: bool = False
    """Whether ``after`` lacks no column of the table."""
    moved_from: Mapping[str, Any] | None = None
    """Key columns the row had before an update of its key."""
    position: Position = msgspec.field(default_factory=dict)
    order: tuple[int, ...] = ()
    """For sorting rows of one source by their places; empty: as the neighbours in the topic."""
    transaction: RowTransaction | None = None
    time_us: int | None = None
    """When the source committed it, microseconds since 1970 UTC."""
    is_snapshot: bool = False
    source: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Other facts of the source: connector, user, query, …"""
    types: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Column → conversion (:data:`declaration.Convert`'s names), where the message tells it."""


class TransactionEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a source transaction, and how many rows it had: in all tables, and in each."""

    id: str
    count: int
    counts: Mapping[str, int] | None = None


class TransactionMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A logical message of a transaction: its prefix, and its content."""

    transaction: str
    prefix: str
    content: bytes


def is_after(new: Position, old: Position) -> bool | None:
    """Whether ``new`` is later in the source's log; ``None``: they cannot be compared."""
    for scheme, place in new.items():
        known = old.get(scheme)
        if known is not None:
            return tuple(place) > tuple(known)
    return None


def is_same(new: Position, old: Position) -> bool:
    """Whether both are one place in the source's log."""
    for scheme, place in new.items():
        known = old.get(scheme)
        if known is not None:
            return tuple(place) == tuple(known)
    return False


def behind(places: Iterable[Mapping[str, list[int | str]]]) -> dict[str, list[int | str]]:
    """A place right behind the last of these: after each, and before any that is later yet."""
    last: dict[str, list[int | str]] = {}
    for position in places:
        for scheme, place in position.items():
            if scheme not in last or place > last[scheme]:
                last[scheme] = place
    return {scheme: [*place, 1] for scheme, place in last.items()}
