"""The neutral source row that every message shape is read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from everstate.changes.json_numbers import number_of
from everstate.sources.cdc.placeholders import DEFAULT_SETTING

Op = Literal["c", "u", "d", "r", "t", "m"]
"""Created, updated, deleted, read by a snapshot, table truncated, logical message."""
SourcePosition = Mapping[str, tuple[int | str, ...]]
"""Place in the source's log, by scheme; two places are compared by the first scheme they share."""
KIND: Final = "kind"
"""Header of each record of the one raw log that is not a row; its values:"""
TRANSACTION, MESSAGE, HEARTBEAT, SCHEMA = b"transaction", b"message", b"heartbeat", b"schema"
SOURCE: Final = b"source"
"""Value of that header for a record that `everstate cdc` itself writes."""
FACTS: Final = frozenset({TRANSACTION, MESSAGE, HEARTBEAT, SCHEMA, SOURCE})
"""All values of that header; a record with another one is a row with a header of somebody else."""
AGGREGATE: Final = "aggregateType"
"""Header with the aggregate type of a row of an outbox."""
SNAPSHOT: Final = "snapshot "
"""Prefix of the scheme in a snapshot row's position: where the log was when it was taken."""
PROVENANCE: Final = tuple(
    "service_name identifier actor reason correlation_id causation_id api_version".split()
)
"""Fields of provenance that a source may give."""
_NUMBERS: Final = range(-(2**63), 2**64)
"""Numbers that a position may have."""


class Unreadable(Exception):
    """A message that no source row can be made of; its text is the reason."""


def exact_number(text: str) -> float | Decimal:
    """The value of a JSON number; a decimal where a float would change it. Raises ValueError."""
    value = number_of(text)
    return value if value.__class__ is float else Decimal(value)


class RawMessage(msgspec.Struct, frozen=True, gc=False):
    """One record of a raw topic, as far as a shape needs it."""

    table: str
    """Table as declared, from the topic's name; empty: the message itself names its table."""
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes | None]
    placeholder: str = DEFAULT_SETTING
    """The connector's setting ``unavailable.value.placeholder``."""


class SourceRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one message contains about one row, with nothing added.

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
    unknown: tuple[str, ...] = ()
    """Columns of the table that ``after`` lacks because the log left out their values."""
    moved_from: Mapping[str, Any] | None = None
    """Values of the key columns before an update changed the key."""
    position: SourcePosition = msgspec.field(default_factory=dict)
    place: bytes | None = None
    """Its place in the stream that its connector writes, as sortable bytes (``shapes/places``)."""
    transaction: str | None = None
    """Id of its transaction in the source."""
    time_us: int | None = None
    """When the source committed it, microseconds since 1970 UTC."""
    is_snapshot: bool = False
    source: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Other facts of the source: connector, user, query, …"""
    types: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Column → conversion (:data:`declaration.Convert`'s names), from the message's schema."""


class TransactionProvenance(msgspec.Struct, array_like=True, tag=True, kw_only=True, gc=False):
    """Provenance of all rows of a transaction, from a logical message."""

    transaction: str
    prefix: str
    fields: dict[str, str]
    place: bytes | None = None
    time_us: int | None = None


def value_in(image: Mapping[str, Any], name: str) -> Any:
    """Value of a column in an image, or null; an exact name wins over one that differs in case."""
    if (value := image.get(name)) is not None:
        return value
    lower = name.lower()
    others = (one for other, one in image.items() if other.lower() == lower)
    return next((one for one in others if one is not None), None)


def key_in(names: Sequence[str] | None, image: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Values of the key's columns in an image, where it has all of them."""
    if not names or image is None:
        return None
    found = {name: value_in(image, name) for name in names}
    return None if None in found.values() else found


def moved(row: SourceRow, names: Sequence[str]) -> list[SourceRow]:
    """The row itself; of an update that changed one of these columns, the two rows it stands for.

    Debezium itself does this for the key of its messages. Other tools do not, nor does it for key
    columns that only the declaration gives.
    """
    if row.op != "u" or row.before is None:
        return [row]
    names = names or tuple(row.key or ())
    was, key = key_in(names, row.before), key_in(names, row.after)
    if was is None or key is None or was == key:
        return [row]
    gone = replace(row, op="d", key=was, after=None, is_whole=False)
    come = replace(row, op="c", key=key, before=None, moved_from=was)
    return [gone, come]


def position_in(row: SourceRow) -> dict[str, list[int | str]]:
    """Position of a row as a CleanRow has it; see :func:`listed`."""
    return listed(row.position, is_snapshot=row.is_snapshot)


def listed(position: SourcePosition, *, is_snapshot: bool) -> dict[str, list[int | str]]:
    """A position with lists, as a CleanRow has it: without the epoch.

    The schemes of a snapshot's row have names of their own. Raises Unreadable for a number beyond
    64 bits, which no log has.
    """
    found = {scheme: list(place) for scheme, place in position.items()}
    for part in chain.from_iterable(found.values()):
        if isinstance(part, int) and part not in _NUMBERS:
            raise Unreadable(f"its position in the log has the number {part}")
    if is_snapshot:
        # A snapshot has no exact position in the log: a transaction that was open when it was
        # taken is emitted later, with rows that were logged before.
        return {SNAPSHOT + scheme: place for scheme, place in found.items()}
    return found


def is_after(new: SourcePosition, old: SourcePosition) -> bool | None:
    """Whether ``new`` is later in the source's log; ``None``: they cannot be compared."""
    for scheme, place in new.items():
        known = old.get(scheme)
        if known is not None:
            return tuple(place) > tuple(known)
    return None


def behind(places: Iterable[Mapping[str, list[int | str]]]) -> dict[str, list[int | str]]:
    """A position directly after the last of these, and before every later one of the log."""
    last: dict[str, list[int | str]] = {}
    for position in places:
        for scheme, place in position.items():
            if scheme not in last or place > last[scheme]:
                last[scheme] = place
    return {scheme: [*place, 1] for scheme, place in last.items()}
