"""What the REST routes need of a source of truth, whichever database it is in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from pydantic import BaseModel

from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.sources.outbox import Versioned, Written

Scalar: TypeAlias = str | int | float | bool | None
"""A value of an attribute in its JSON form."""

__all__ = ["AnsweredBefore", "Kept", "Once", "Page", "Scalar", "Store", "Versioned", "Written"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A write that may be asked for again: done once, answered equally each time.

    ``id`` is unique among all callers (caller and Idempotency-Key); ``fingerprint`` tells whether
    the request is the same one. ``answer`` makes the text to keep from what was written; it is
    pure, so a store that finds the write done but no answer kept may make it again.
    """

    id: str
    fingerprint: str
    answer: Callable[[Written], str]


@dataclass(frozen=True, slots=True)
class Kept:
    """What is remembered of a :class:`Once` that was done: its fingerprint and its answer."""

    fingerprint: str
    answer: str


@dataclass(frozen=True, slots=True)
class Page:
    """Entities of one page; ``cursor`` goes to the next call, ``None``: this was the last one.

    A page may be short, even empty, and still have a cursor: a call looks at a bounded number of
    rows, however rare the wanted ones are.
    """

    entities: Sequence[Versioned]
    cursor: str | None


class AnsweredBefore(Exception):
    """The id of a :class:`Once` is taken: nothing was written, ``answered`` has the answer."""


class Store(Protocol):
    """The source of truth of one entity type: dense versions, every write with its change.

    The promise: a write that returned is durable, is read back by the next ``get`` of any process,
    and its change reaches the log exactly once; a write that raised anything but ``Unavailable``
    left nothing behind. After ``Unavailable`` the outcome is unknown, and the same call may be
    repeated: an equal state is no change, and a :class:`Once` is done once. A store resolves what
    it can by reading before it says so. Threads share a store.
    """

    @property
    def entity_type(self) -> EntityType:
        """The type whose entities are here."""

    def get(self, key: str) -> Versioned | None:
        """The entity as committed now; ``None``: there is none, or it was deleted."""

    def page(
        self, *, limit: int, cursor: str | None = None, equal: Mapping[str, Scalar] | None = None
    ) -> Page:
        """At most ``limit`` entities whose attributes are ``equal``, in an order that stays.

        Attributes are scalar fields of the model by their JSON name, values in JSON form; ``None``
        is null. An entity that is there during the whole walk comes exactly once. Raises
        InvalidQuery when the cursor is none of this store's.
        """

    def put(
        self,
        entity: BaseModel | Mapping[str, Any],
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        once: Once | None = None,
    ) -> Written:
        """Create or update; an equal state writes nothing and gives the present version.

        ``expected_version`` 0: it must not exist (a deleted one does not, and its version goes
        on); n: it must be at n; ``None``: whatever is there. Raises VersionConflict,
        InvalidChange, MissingProvenance, ChangeTooLarge and Unavailable; AnsweredBefore when
        ``once.id`` is taken, whatever else is wrong with the call.
        """

    def delete(
        self,
        key: str,
        *,
        provenance: Provenance,
        expected_version: int | None = None,
        occurred_at: datetime | None = None,
        event: DomainEvent | None = None,
        once: Once | None = None,
    ) -> Written:
        """Delete; the version is kept (C7). Raises NotFound, and else as ``put``."""

    def answered(self, once_id: str) -> Kept | None:
        """What was kept for a :class:`Once` that was done; ``None``: it was not, or long ago."""

    def install(self) -> None:
        """Make the tables; idempotent."""

    def close(self) -> None:
        """Give up the connections."""
