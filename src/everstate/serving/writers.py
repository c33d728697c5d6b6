"""Who last wrote each field of an entity, and what each service last wrote of it. Pure.

Histories come newest first, so that a caller which reads them in pages need not read all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from everstate.errors import NotFound
from everstate.serving.answers import Version
from everstate.serving.differences import ABSENT, MemberPath, leads_through, leaves


def last_writer(newest_first: Iterable[Version], name: str) -> Version:
    """The version that last wrote a field, or the newest that wrote one of the fields within it.

    In: a history, newest first; none older than the answer is taken from it. A field
    whose first versions are not kept belongs to the oldest version there is. Raises NotFound, with
    the fields that there are, when the newest state does not have it.
    """
    versions = iter(newest_first)
    newest = version = next(versions)
    fields = set(leaves(newest.state))
    within = {path for path in fields if leads_through(path, name)}
    if not within:
        known = ", ".join(sorted(map(".".join, fields)))
        raise NotFound(
            f"{newest.entity} {newest.key!r} has no field {name!r}.",
            advice=f"It has {known}." if fields else "It is deleted.",
        )
    while not any(_written(version, within)):
        older = next(versions, None)
        if older is None:
            break
        version = older
    return version


@dataclass(frozen=True, slots=True)
class WhoWrote:
    """Who wrote an entity."""

    newest: Version
    fields: dict[str, Version]
    """Field of the newest state → the version that gave it its value; nested fields by dots."""
    sources: list[dict[str, Any]]
    """What each service last wrote of each field, in the order in which the services last wrote.
    Fields that a service removed are left out."""


def who_wrote(newest_first: Iterable[Version]) -> WhoWrote:
    """Last writers of each field, and what each service last wrote.

    In: a whole history, newest first, of which no version is kept longer than it is needed. A field
    whose first versions are not kept belongs to the oldest version there is. Cost: one pass over
    the differences.
    """
    versions = iter(newest_first)
    newest = version = next(versions)
    fields, services = set(leaves(newest.state)), dict[str, _Service]()
    found: dict[MemberPath, Version] = {}
    for version in chain((newest,), versions):
        for path in list(_written(version, fields - found.keys())):
            found.setdefault(path, version)
        name = str(version.provenance.get("serviceName"))
        services.setdefault(name, _Service(version)).read(version)
    writers = [(".".join(path), found.get(path, version)) for path in fields]
    # Two fields may be shown by the same text: then the last writer of both stays.
    writers.sort(key=lambda each: (each[0], each[1].version))
    return WhoWrote(
        newest,
        dict(writers),
        [each.source(name) for name, each in services.items()][::-1],
    )


@dataclass(slots=True)
class _Service:
    """What one service last wrote."""

    last: Version
    values: dict[str, Any] = field(default_factory=dict)

    def read(self, version: Version) -> None:
        """Record what the next older version of the service wrote: newer values win."""
        for each in version.differences:
            self.values.setdefault(each.path, each.after)

    def source(self, name: str) -> dict[str, Any]:
        """The answer, without the fields that it removed."""
        return {
            "service": name,
            "version": self.last.version,
            "recorded_at": self.last.recorded_at,
            "provenance": self.last.provenance,
            "values": {path: value for path, value in self.values.items() if value is not ABSENT},
        }


def _written(version: Version, wanted: set[MemberPath]) -> Iterator[MemberPath]:
    """Fields that a version wrote: also those within an object that it added, or emptied."""
    for each in version.differences:
        names = each.names
        if names in wanted:
            yield names
        if isinstance(each.after, Mapping):
            yield from (path for path in wanted if path[: len(names)] == names != path)
        # An object that became empty is written by who removed its last field.
        yield from (path for path in wanted if names[: len(path)] == path != names)
