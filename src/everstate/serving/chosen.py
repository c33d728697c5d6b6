"""Versions of one entity by who wrote them, when, and which field they changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from everstate.serving.answers import Version
from everstate.serving.listing import WrittenBy
from everstate.serving.reader import Reader

_PAGE: Final = 100


@dataclass(frozen=True, slots=True)
class ChosenVersions:
    """Versions that are wanted, and the range of versions in which they were looked for."""

    versions: Sequence[Version]
    """Oldest first."""
    first: int
    last: int
    """The oldest and the newest version that was read; 0: none was there."""


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
) -> ChosenVersions:
    """At most ``limit`` of the versions that are wanted, of at most ``scan`` that are read.

    The newest of them; ``after`` a version: the oldest after that one. ``before``: only older ones.
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
    return ChosenVersions(found, min(read, default=0), max(read, default=0))


def _oldest_first(
    reader: Reader, entity: str, key: str, before: int | None, after: int
) -> Iterator[Version]:
    page = reader.history(entity, key, limit=_PAGE, before=before, after=after)
    while page:
        yield from page
        if len(page) < _PAGE:
            return
        page = reader.history(entity, key, limit=_PAGE, before=before, after=page[-1].version)
