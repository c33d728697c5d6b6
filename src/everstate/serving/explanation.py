"""Explains the origin of one version of an entity, and where it was archived and applied."""

from __future__ import annotations

from everstate.archive.commits import ArchiveLog
from everstate.archive.reader import ArchiveReader
from everstate.config import Config
from everstate.log.topics import TopicNames
from everstate.serving.answers import AppliedBy, ArchivedAt, Explanation, Version
from everstate.serving.connection import ReadConnection


def explain(config: Config, connection: ReadConnection, version: Version) -> Explanation:
    """Follow a version to its record in the log, its file in the lake, and the views' positions.

    Raises Unavailable or ArchiveError when one of them cannot be read. Cost: one statement, and
    reading the lake table's statistics.
    """
    topics = TopicNames(config.log.prefix)
    return Explanation(
        version=version,
        topic=topics.changes(version.entity, version.place.generation),
        archived=_archived(config, version),
        applied_by=_applied_by(config, connection, version),
    )


def _archived(config: Config, version: Version) -> ArchivedAt | None:
    if not ArchiveLog(config, version.entity).exists():
        return None
    place = version.place
    found = ArchiveReader(config, version.entity).locate(
        place.generation, place.partition, place.offset
    )
    if found is None:
        return None
    file, row = found
    return ArchivedAt(file, row.commit_version, row.committed_at)


def _applied_by(
    config: Config, connection: ReadConnection, version: Version
) -> tuple[AppliedBy, ...]:
    control = connection.standings(config.views.schema_name)
    published = {(row.name, row.version) for row in control.versions() if row.published}
    place = version.place
    return tuple(
        AppliedBy(found.view, found.next_offset, found.next_offset > place.offset)
        for found in control.positions(version.entity)
        if (found.generation, found.partition) == (place.generation, place.partition)
        and (found.view, found.version) in published
    )
