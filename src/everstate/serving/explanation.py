"""Where one version of an entity comes from and where it went."""

from __future__ import annotations

from psycopg import sql

from everstate.archive.commits import ArchiveLog
from everstate.archive.reader import ArchiveReader
from everstate.config import Config
from everstate.log.topics import TopicNames
from everstate.serving.answers import AppliedBy, ArchivedAt, Explanation, Version
from everstate.serving.connection import ReadConnection


def explain(config: Config, connection: ReadConnection, version: Version) -> Explanation:
    """Follow a version to its record in the log, its file in the lake, and the views' positions.

    Raises Unavailable or ArchiveError when one of them cannot be read. Cost: one statement, and a
    look into the lake table's statistics.
    """
    place = version.place
    topic = TopicNames(config.log.prefix).changes(version.entity, place.generation)
    return Explanation(
        version=version,
        topic=topic,
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
    return ArchivedAt(found.file, found.commit_version, found.committed_at)


def _applied_by(
    config: Config, connection: ReadConnection, version: Version
) -> tuple[AppliedBy, ...]:
    schema = config.views.schema_name
    query = sql.SQL(
        "SELECT p.view_group, p.next_offset, coalesce(array_agg(v.name ORDER BY v.name) "
        "FILTER (WHERE v.name IS NOT NULL), '{{}}') "
        "FROM {} AS p LEFT JOIN {} AS v USING (view_group) "
        "WHERE p.entity = %s AND p.generation = %s AND p.partition = %s "
        "GROUP BY p.view_group, p.next_offset ORDER BY p.view_group"
    ).format(sql.Identifier(schema, "position"), sql.Identifier(schema, "view"))
    place = version.place
    rows = connection.rows(query, (version.entity, place.generation, place.partition))
    return tuple(
        AppliedBy(group, tuple(views), position, position > place.offset)
        for group, position, views in rows
    )
