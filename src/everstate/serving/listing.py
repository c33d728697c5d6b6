"""Lists over an entity type: many keys at one moment, who wrote what, what was deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final

from everstate.changes import EntityType
from everstate.errors import InvalidQuery
from everstate.serving import statements
from everstate.serving.answers import Entity, Version
from everstate.serving.differences import Difference, leads_through
from everstate.serving.masking import masked_entity, masked_version
from everstate.serving.reader import Reader, entity_of, version_of
from everstate.views.tables import Row

KEYS_MAX: Final = 1_000
_PAGE: Final = 100
ChangesCursor = tuple[datetime, str, int]
"""Where a page of changes ends: recorded at, key and version of its last change."""

WRITERS: Final = {
    "service": "serviceName",
    "identifier": "identifier",
    "actor": "actor",
    "correlation": "correlationId",
}
"""Name of a filter → member of the provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBy:
    """Which changes of an entity type are wanted."""

    provenance: Mapping[str, str] = field(default_factory=dict)
    """``service``, ``identifier``, ``actor`` or ``correlation`` → its value."""
    kind: str | None = None
    since: datetime | None = None
    """Recorded at this time or later."""
    until: datetime | None = None
    """Recorded before this time."""
    changed: str | None = None
    """Of one entity: a field that they change, or one within it; dots separate nested fields."""

    def has(self, version: Version) -> bool:
        """Whether a version is wanted."""
        return (
            all(
                version.provenance.get(WRITERS[name]) == value
                for name, value in self.provenance.items()
            )
            and self.kind in (None, version.kind)
            and (self.since is None or version.recorded_at >= self.since)
            and (self.until is None or version.recorded_at < self.until)
            and (self.changed is None or any(map(self._concerns, version.differences)))
        )

    def _concerns(self, difference: Difference) -> bool:
        assert self.changed is not None
        is_part = leads_through(difference.names, self.changed)
        return is_part or self.changed.startswith(f"{difference.path}.")


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One key of a list of keys."""

    key: str
    version: int
    kind: str
    as_of: datetime
    is_deleted: bool


def keys_from(reader: Reader, entity: str, start: str, *, limit: int) -> list[ListedKey]:
    """Keys of an entity type from ``start`` on, in order, deleted entities included.

    Raises UnknownEntity. Cost: an index range of the newest versions.
    """
    reader.entity_type(entity)
    rows = reader.connection.rows(statements.keys_from(reader.schema, entity), (start, limit))
    return [ListedKey(*row) for row in rows]


def many(
    reader: Reader, entity: str, keys: Sequence[str], *, at: datetime | None = None
) -> dict[str, Entity]:
    """Entities by key, all at one moment: now, or ``at`` a world time; others are left out.

    One statement, so that no change comes between two of them. Raises InvalidQuery for more than
    1,000 keys. Cost: one row by index for each key.
    """
    kind = reader.entity_type(entity)
    if len(keys) > KEYS_MAX:
        raise InvalidQuery(f"{len(keys):,} keys were given; at most {KEYS_MAX:,} are read at once.")
    if at is None:
        rows = reader.connection.rows(statements.now_of(reader.schema, entity), (list(keys),))
    else:
        query = statements.at_of(reader.schema, entity)
        rows = reader.connection.rows(query, (list(keys), statements.aware(at)))
    mask = reader.masks(entity)
    return {row[0]: masked_entity(entity_of(kind, row), mask) for row in rows if row[3] is not None}


def deleted(
    reader: Reader, entity: str, *, after: str | None = None, limit: int = 100
) -> list[Version]:
    """Entities that are deleted now, in the order of their keys, each as its deleting version.

    The state before is in its differences. ``after``: only keys after this one. Cost: a pass over
    the entities up to the end of the page.
    """
    kind = reader.entity_type(entity)
    keeps_history = reader.project.keeps_history(entity)
    query = statements.deleted(reader.schema, entity, keeps_history=keeps_history)
    rows = reader.connection.rows(query, (after, after, limit))
    return [_after(reader, kind, row) for row in rows]


def written(
    reader: Reader,
    entity: str,
    wanted: WrittenBy,
    *,
    after: ChangesCursor | None = None,
    limit: int = 100,
) -> list[Version]:
    """Changes by who wrote them and when, in the order of their recording.

    Raises InvalidQuery for an entity type without a history. Cost: a pass over the history.
    """
    kind = reader.entity_type(entity)
    if not reader.project.keeps_history(entity):
        raise InvalidQuery(
            f"{entity} has no history in the views.",
            advice="`everstate replay` finds changes by their provenance in the archive.",
        )
    conditions: list[str] = []
    parameters: list[Any] = []
    for name, value in wanted.provenance.items():
        conditions.append(f"provenance ->> '{WRITERS[name]}' = %s")
        parameters.append(value)
    for text, given in (
        ("kind = %s", wanted.kind),
        ("recorded_at >= %s", wanted.since),
        ("recorded_at < %s", wanted.until),
    ):
        if given is not None:
            conditions.append(text)
            parameters.append(statements.aware(given) if isinstance(given, datetime) else given)
    if after is not None:
        conditions.append("(recorded_at, key, version) > (%s, %s, %s)")
        parameters += after
    query = statements.written(reader.schema, entity, conditions)
    rows = reader.connection.rows(query, [*parameters, limit])
    return [_after(reader, kind, row) for row in rows]


def _after(reader: Reader, kind: EntityType, row: Row) -> Version:
    """The version of a row whose last column is the state before it."""
    found = version_of(kind, row, (None, None, None, row[14]))
    return masked_version(found, reader.masks(kind.name))


def chosen_versions(
    reader: Reader,
    entity: str,
    key: str,
    wanted: WrittenBy,
    *,
    limit: int,
    scan: int,
    before: int | None = None,
    after: int | None = None,
) -> tuple[Sequence[Version], int, int]:
    """At most ``limit`` of the versions that are wanted, of at most ``scan`` that are read.

    Out: they, oldest first; the oldest and the newest version that was read, 0 for none. They are
    the newest of them; ``after`` a version: the oldest after that one. ``before``: only older ones.
    Raises NotFound when the key was never seen. Cost: the history up to the end of the page.
    """
    if after is None:
        versions = reader.newest_first(entity, key, before=before)
    else:
        versions = _oldest_first(reader, entity, key, before, after)
    found: list[Version] = []
    read: list[int] = []
    for version in islice(versions, scan):
        read.append(version.version)
        if wanted.has(version):
            found.append(version)
        if len(found) == limit:
            break
    found.sort(key=lambda version: version.version)
    return found, min(read, default=0), max(read, default=0)


def _oldest_first(
    reader: Reader, entity: str, key: str, before: int | None, after: int
) -> Iterator[Version]:
    page = reader.history(entity, key, limit=_PAGE, before=before, after=after)
    while page:
        yield from page
        if len(page) < _PAGE:
            return
        page = reader.history(entity, key, limit=_PAGE, before=before, after=page[-1].version)
