"""Whole rows from what sources give: one row of an entity against what is known of it. Pure.

Nothing is ever invented: a field that neither the row nor our own latest state knows holds the
row back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from everstate.changes import Kind
from everstate.sources.cdc.declaration import Translation
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.rows import is_after, is_same

_decode = msgspec.json.decode

READ_BEFORE: Final = "read before"
UNCHANGED: Final = "nothing of the entity changed"
NEVER_SEEN: Final = "deleted, and never seen before"
DELETED_BEFORE: Final = "deleted already"
SUPERSEDED: Final = "superseded by a whole row while held"
TRUNCATED: Final = "truncated: a delete of each entity that is known stands for it"
PRIOR_UNKNOWN: Final = "the state before is unknown"
WAITS_PARENT: Final = "waits for its parent"
WAITS_CODE: Final = "waits for the name of a code"


class Known(msgspec.Struct, frozen=True, gc=False):
    """Our newest state of an entity, as `.state` has it."""

    version: int
    image: bytes
    """Its state; when ``is_deleted``, the last one it had."""
    is_deleted: bool
    position: Mapping[str, list[int | str]]
    """Source place of its newest change; empty when the source did not tell."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """One change to be made of a row."""

    kind: Kind
    current: bytes | None
    original: bytes | None
    is_baseline: bool
    """Whether it makes known what was there before the capture, not what was just created."""


class Completed(msgspec.Struct, frozen=True, gc=False):
    """The changes of a row, in order."""

    steps: tuple[Step, ...]


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """The row changes nothing, and why."""

    reason: str


class Held(msgspec.Struct, frozen=True, gc=False):
    """The row has to wait, and for what."""

    reason: str
    entity: str | None = None
    key: str | None = None
    """The entity waited for."""


Lookup = Callable[[str, str], Known | None]
Outcome = Completed | Skipped | Held


def complete(
    row: CleanRow,
    known: Known | None,
    mapping: TableMapping,
    lookup: Lookup,
    *,
    is_unsure: bool = False,
    parents_first: bool = False,
    is_overdue: bool = False,
) -> Outcome:
    """What becomes of a row, given our newest state of its entity.

    ``is_unsure``: a row of the entity was refused, so only a whole row tells its state again.
    ``is_overdue``: it has waited long enough for parents and names. ``lookup`` finds other
    entities. Raises Unreadable when the completed state is not valid.
    """
    if known is not None and row.position and known.position:
        later = is_after(row.position, known.position)  # type: ignore[arg-type]
        if later is False and not is_same(row.position, known.position):  # type: ignore[arg-type]
            return Skipped(READ_BEFORE)
    if row.op == "d":
        return _deleted(row, known)
    if parents_first and not is_overdue and not row.is_snapshot:
        for entity, key in row.parents:
            parent = lookup(entity, key)
            if parent is None or parent.is_deleted:
                return Held(WAITS_PARENT, entity, key)
    after = row.state
    if after is None:
        found = _completed(row, known, mapping, lookup, is_unsure, is_overdue)
        if not isinstance(found, bytes):
            return found
        after = found
    return _changed(row, known, after)


def is_settling(row: CleanRow) -> bool:
    """Whether a row makes its entity known whatever was before."""
    return row.op == "d" or row.state is not None or row.covers or row.before is not None


def _deleted(row: CleanRow, known: Known | None) -> Outcome:
    if known is None:
        if row.before is None:
            return Skipped(NEVER_SEEN)
        return Completed(
            (
                Step(Kind.CREATED, row.before, None, True),
                Step(Kind.DELETED, None, row.before, False),
            )
        )
    if known.is_deleted:
        return Skipped(DELETED_BEFORE)
    return Completed((Step(Kind.DELETED, None, known.image, False),))


def _changed(row: CleanRow, known: Known | None, after: bytes) -> Outcome:
    if known is not None and not known.is_deleted:
        if known.image == after:
            return Skipped(UNCHANGED)
        return Completed((Step(Kind.UPDATED, after, known.image, False),))
    if known is None and row.op == "u" and row.before is not None and row.before != after:
        return Completed(
            (
                Step(Kind.CREATED, row.before, None, True),
                Step(Kind.UPDATED, after, row.before, False),
            )
        )
    return Completed((Step(Kind.CREATED, after, None, row.op != "c"),))


def _completed(
    row: CleanRow,
    known: Known | None,
    mapping: TableMapping,
    lookup: Lookup,
    is_unsure: bool,
    is_overdue: bool,
) -> bytes | Held:
    """The whole state after, from the fields the row knows and the state before."""
    assert row.known is not None
    fields: Mapping[str, Any] = row.known
    if not row.covers:
        base = _base(row, known, lookup, mapping.entity_type.name, is_unsure)
        if base is None and row.moved_from is not None:
            return Held(PRIOR_UNKNOWN, mapping.entity_type.name, row.moved_from)
        if base is None:
            return Held(PRIOR_UNKNOWN)
        fields = {**_decode(base), **fields}
    if row.codes:
        named = dict(fields)
        for field, code in row.codes.items():
            translation = mapping.translation(field)
            name = lookup(translation.entity, str(code))
            if name is not None and not name.is_deleted:
                named[field] = _decode(name.image).get(translation.field)
            elif translation.missing == "wait" and not is_overdue:
                return Held(WAITS_CODE, translation.entity, str(code))
            else:
                named[field] = _without_name(translation, code)
        fields = named
    return mapping.encode(fields, row.key)


def _without_name(translation: Translation, code: Any) -> Any:
    return None if translation.missing == "null" else code


def _base(
    row: CleanRow, known: Known | None, lookup: Lookup, entity: str, is_unsure: bool
) -> bytes | None:
    """The state that what the row does not know is taken from."""
    if row.moved_from is not None:
        # The row had another key. Only once that one's end was taken is its last state known.
        old = lookup(entity, row.moved_from)
        if old is None or not old.is_deleted:
            return None
        if is_after(old.position, row.position):  # type: ignore[arg-type]
            return None
        return old.image
    if row.before is not None:
        return row.before
    if known is None or known.is_deleted or is_unsure:
        return None
    return known.image
