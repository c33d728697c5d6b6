"""What a store is that is a source of truth, in any database: writes, reads, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypedDict, TypeVar, Unpack
from uuid import UUID

from pydantic import BaseModel

from everstate.changes import DomainEvent, EntityType, Kind, Provenance

T = TypeVar("T")
GivenEntity: TypeAlias = BaseModel | Mapping[str, Any]
OneOrEach: TypeAlias = T | Sequence[T]
"""One value for all entities of a call, or a sequence with one for each."""
Scalar: TypeAlias = str | int | float | bool | Decimal | None
"""A value of an attribute: a Decimal, or another one in its JSON form."""


class Versioned(NamedTuple):
    """An entity's present state, and its version."""

    entity: BaseModel
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of one write. ``change_id`` and ``kind`` are ``None`` when nothing changed."""

    key: str
    version: int
    kind: Kind | None = None
    change_id: UUID | None = None
    entity: BaseModel | None = None
    """The state that is stored, when a :class:`Once` finds that its write was done before."""

    @property
    def changed(self) -> bool:
        """Whether there is a new change; writing an equal state makes none."""
        return self.change_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMany:
    """Result of a set-based write."""

    changes: int
    keys: int
    """Entities that have a new version."""
    unchanged: int
    """Entities of the call that were equal to the stored ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A write that may be requested repeatedly: done once, with the same answer each time.

    ``id`` is unique among all callers (caller and Idempotency-Key); ``fingerprint`` shows whether
    the request is the same one. ``answer`` makes the text to keep from the result of the write; it
    is pure, so a store that finds the write done but no answer kept may make it again.
    """

    id: str
    fingerprint: str
    answer: Callable[[Written], str]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store keeps of a finished :class:`Once`: its fingerprint and its answer."""

    fingerprint: str
    answer: str


PAGE_BYTES_MAX: Final = 16 * 1_048_576
"""Size of the states on one page, unless its first entity alone is larger."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entities of one page; pass ``cursor`` to the next call, ``None``: this was the last one.

    A page may be short, even empty, and still have a cursor: a call reads a bounded number of rows,
    however rare the matching ones are, and returns a bounded number of bytes.
    """

    entities: Sequence[Versioned]
    cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One write of one entity, as it is asked for.

    ``entity`` is created or updated; with ``key`` alone the entity of that key is deleted.
    ``expected_version`` 0: it must not exist (a deleted one does not, and its version continues);
    n: its version must be n; ``None``: no condition. ``occurred_at`` ``None``: now. With ``force``
    an equal state is a new version too.
    """

    entity: GivenEntity | None = None
    key: str | None = None
    provenance: Provenance
    expected_version: int | None = None
    occurred_at: datetime | None = None
    event: DomainEvent | None = None
    force: bool = False
    once: Once | None = None


class WriteOptions(TypedDict, total=False):
    """The fields of a :class:`Write` that may be left out."""

    expected_version: int | None
    occurred_at: datetime | None
    event: DomainEvent | None
    once: Once | None


class AnsweredBefore(Exception):
    """The id of a :class:`Once` is taken: nothing was written, ``answered`` returns the answer."""


class Store(Protocol):
    """The source of truth of one entity type: dense versions, every write with its change.

    Guarantees: a write that returned is durable, the next ``get`` of any process returns it, and
    its change reaches the log exactly once. A write that raised any error but ``Unavailable``
    stored nothing. After ``Unavailable`` the outcome is unknown, and the call may be repeated: an
    equal state makes no change, and a :class:`Once` is done once. Before a store raises it, it
    tries to resolve the outcome by reading. Threads share a store.
    """

    entity_type: EntityType
    """Type of the entities in this store."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: str) -> Versioned | None:
        """The committed entity; ``None``: it never existed, or was deleted."""

    def deleted_version(self, key: str) -> int | None:
        """The version that deleted the entity; ``None``: it exists, or never did."""

    def page(
        self, *, limit: int, cursor: str | None = None, equal: Mapping[str, Scalar] | None = None
    ) -> Page:
        """At most ``limit`` entities whose attributes are ``equal``, in a stable order.

        Attributes are scalar fields of the model by their JSON name, values in JSON form; ``None``
        is null, a Decimal is equal to each text and number with its value (1.5 and "1.50"), and a
        state that is older than an attribute has its default. An entity that exists
        while all pages are read is returned exactly once. Raises InvalidQuery when the cursor is
        not one of this store.
        """

    def write(self, write: Write) -> Written:
        """Create, update or delete an entity; an equal state writes nothing, unless forced.

        Raises VersionConflict, InvalidChange, MissingProvenance, ChangeTooLarge and Unavailable;
        NotFound when there is nothing to delete; AnsweredBefore when the id of ``once`` is taken,
        even if the write has another error too.
        """

    def put(
        self,
        entity: GivenEntity,
        *,
        provenance: Provenance,
        force: bool = False,
        **options: Unpack[WriteOptions],
    ) -> Written:
        """Create or update an entity: a :class:`Write` of it, with the same fields."""
        return self.write(Write(entity=entity, provenance=provenance, force=force, **options))

    def delete(
        self, key: str, *, provenance: Provenance, **options: Unpack[WriteOptions]
    ) -> Written:
        """Delete an entity; its version is kept, and continues if it is created again (C7)."""
        return self.write(Write(key=key, provenance=provenance, **options))

    def put_many(
        self,
        entities: Iterable[GivenEntity],
        *,
        provenance: OneOrEach[Provenance],
        occurred_at: OneOrEach[datetime] | None = None,
        event: OneOrEach[DomainEvent | None] = None,
        force: bool = False,
    ) -> WrittenMany:
        """Create or update many entities; several states of one key in their order.

        Provenance, time and event are one value for all, or a sequence with one for each. There
        are no expected versions. Everything is checked before anything is written.
        """

    def answered(self, once_id: str) -> Kept | None:
        """The kept answer of a finished :class:`Once`; ``None``: not finished, or expired."""

    def answer_of(self, once: Once, key: str) -> Kept | None:
        """The answer of a :class:`Once` that wrote this key; ``None``: not done, or expired.

        A store that keeps answers after their writes also finds a write whose process ended before
        the answer was kept, and keeps it now.
        """
        return self.answered(once.id)

    def install(self) -> None:
        """Create the tables; idempotent."""

    def close(self) -> None:
        """Close the connections."""
