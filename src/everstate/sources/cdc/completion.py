"""Completes a row from the source with our newest state of its entity. Pure.

No value is ever invented: if a field is neither in the row nor in our newest state, the row is
held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from everstate.changes import Kind
from everstate.changes.keys import EntityKey
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.rows import SNAPSHOT, is_after

_decode = msgspec.json.decode
_decode_position = msgspec.json.Decoder(dict[str, list[int | str]]).decode

READ_BEFORE: Final = "read before"
UNCHANGED: Final = "nothing of the entity changed"
NEVER_SEEN: Final = "deleted, and never seen before"
DELETED_BEFORE: Final = "deleted already"
SUPERSEDED: Final = "superseded by a whole row while held"
TRUNCATED: Final = "truncated: a delete of each known entity replaces it"
ABSENT: Final = "its row is gone: a first snapshot that was taken again did not have it"
OVERTAKEN: Final = "a row of another table has got its key in the same transaction"
TWO_ROWS: Final = (
    "another row has got its key in the same transaction, so that it is not known which one is gone"
)
PRIOR_UNKNOWN: Final = "the state before is unknown"
ROLLED_BACK: Final = "of an XA transaction that was rolled back"
NEW_EPOCH: Final = "of an XA transaction that had not ended when a new epoch began"
WAITS_PARENT: Final = "waits for its parent"
WAITS_CODE: Final = "waits for the name of a code"


class Known(msgspec.Struct, frozen=True, gc=False):
    """Our newest state of an entity, as `.state` has it."""

    version: int
    image: bytes
    """Its state; when ``is_deleted``, the last one it had, or empty if that was uncertain."""
    is_deleted: bool
    place: bytes = b""
    """Source position of its newest change, as JSON; empty if the source gave none."""

    @property
    def position(self) -> Mapping[str, list[int | str]]:
        """Source position of its newest change, by scheme."""
        return _decode_position(self.place) if self.place else {}


class ChangeStep(msgspec.Struct, frozen=True, gc=False):
    """One change to be made of a row."""

    kind: Kind
    current: bytes | None
    original: bytes | None
    is_baseline: bool
    """Whether it publishes a row that existed before the capture saw it, not a new row."""


class Completed(msgspec.Struct, frozen=True, gc=False):
    """The changes of a row, in order."""

    steps: tuple[ChangeStep, ...]


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """The row changes nothing, and why."""

    reason: str


class HeldBack(msgspec.Struct, frozen=True, gc=False):
    """The row has to wait, and for what."""

    reason: str
    waits_for: EntityKey | None = None
    """The entity waited for."""


Lookup = Callable[[str, str], Known | None]
Completion = Completed | Skipped | HeldBack


def complete(
    row: CleanRow,
    known: Known | None,
    mapping: TableMapping,
    lookup: Lookup,
    *,
    is_unsure: bool = False,
    parents_first: bool = False,
    is_overdue: bool = False,
) -> Completion:
    """The outcome of a row, given our newest state of its entity: changes, skipped or held.

    ``is_unsure``: a row of the entity was refused, so its state is uncertain until a whole row
    comes; of a row whose key changed, the state under its old key is. ``is_overdue``: the row
    has waited long enough for parents and names of codes.
    ``lookup`` finds other entities. Raises Unreadable when the completed state is not valid.
    """
    if row.skipped is not None:
        return Skipped(row.skipped)
    if known is not None and was_read(row.position, known):
        return Skipped(READ_BEFORE)
    if row.op == "d":
        return _steps(row, known, None)
    if parents_first and not is_overdue and not row.is_snapshot:
        for entity, key in row.parents:
            parent = lookup(entity, key)
            if parent is None or parent.is_deleted:
                return HeldBack(WAITS_PARENT, (entity, key))
    after = row.state
    if after is None:
        found = _completed(row, known, mapping, lookup, is_unsure, is_overdue)
        if not isinstance(found, bytes):
            return found
        after = found
    return _steps(row, known, after)


def was_read(position: Mapping[str, list[int | str]], known: Known) -> bool:
    """Whether our newest state of an entity is newer than a row at this position.

    A row of the log is never older than a state that a snapshot read, since the connector emits it
    after the snapshot.
    """
    if not position or not known.place:
        return False
    newest = known.position
    for scheme, place in position.items():
        if scheme.startswith(SNAPSHOT) and (other := newest.get(scheme[len(SNAPSHOT) :])):
            return place < other
    return is_after(newest, position) is True  # type: ignore[arg-type]


def is_settling(row: CleanRow) -> bool:
    """Whether a row determines the state of its entity without the state before."""
    known = row.state is not None or row.covers or row.before is not None
    return (row.op == "d" or known) and row.skipped is None


def has_settled(row: CleanRow, outcome: Completion) -> bool:
    """Whether the state of an entity is certain after a row, however uncertain it was before."""
    if isinstance(outcome, Skipped):
        return is_settling(row) and outcome.reason not in (READ_BEFORE, OVERTAKEN)
    return isinstance(outcome, Completed)


def step_of(op: str, state: bytes | None, known: Known | None) -> ChangeStep | Skipped:
    """The change that a row with a whole state, or a delete, makes of our newest state."""
    if op == "d":
        if known is None or known.is_deleted:
            return Skipped(NEVER_SEEN if known is None else DELETED_BEFORE)
        return ChangeStep(Kind.DELETED, None, known.image, False)
    if known is None or known.is_deleted:
        return ChangeStep(Kind.CREATED, state, None, op != "c")
    if known.image == state:
        return Skipped(UNCHANGED)
    return ChangeStep(Kind.UPDATED, state, known.image, False)


def _steps(row: CleanRow, known: Known | None, after: bytes | None) -> Completed | Skipped:
    """The changes of a row; a row before that we never saw is one of them."""
    before, steps = row.before, list[ChangeStep]()
    if known is None and before is not None and row.op in ("u", "d") and before != after:
        steps.append(ChangeStep(Kind.CREATED, before, None, True))
        known = Known(0, before, False)
    step = step_of(row.op, after, known)
    return step if isinstance(step, Skipped) else Completed((*steps, step))


def _completed(
    row: CleanRow,
    known: Known | None,
    mapping: TableMapping,
    lookup: Lookup,
    is_unsure: bool,
    is_overdue: bool,
) -> bytes | HeldBack:
    """The whole state after, from the fields the row knows and the state before."""
    assert row.known is not None
    # A row that was held may have been read with the model before.
    fields: Mapping[str, Any] = mapping.entity_type.today(row.known)
    if not row.covers:
        base = _base(row, known, lookup, mapping.entity_type.name, is_unsure)
        if base is None and row.moved_from is not None:
            return HeldBack(PRIOR_UNKNOWN, (mapping.entity_type.name, row.moved_from))
        if base is None:
            return HeldBack(PRIOR_UNKNOWN)
        fields = {**_decode(base), **fields}
    named = {}
    for field, code in row.codes.items():
        translation = mapping.translation(field)
        name = lookup(translation.entity, str(code))
        if name is not None and not name.is_deleted:
            named[field] = _decode(name.image).get(translation.field)
        elif translation.missing == "wait" and not is_overdue:
            return HeldBack(WAITS_CODE, (translation.entity, str(code)))
        else:
            named[field] = None if translation.missing == "null" else code
    return mapping.encode({**fields, **named}, row.key)


def _base(
    row: CleanRow, known: Known | None, lookup: Lookup, entity: str, is_unsure: bool
) -> bytes | None:
    """The state from which the fields that the row lacks are taken; ``None``: there is none."""
    if row.moved_from is not None:
        # The row had another key before. The last state under the old key is known only after the
        # delete of the old key has been applied.
        old = lookup(entity, row.moved_from)
        if old is None or not old.is_deleted or is_unsure:
            return None
        if is_after(old.position, row.position):  # type: ignore[arg-type]
            return None
        return old.image or None
    if row.before is not None:
        return row.before
    if known is None or known.is_deleted or is_unsure:
        return None
    return known.image
