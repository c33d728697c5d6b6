"""All views that a project declares: columns, key, version, position, lag and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from everstate.errors import NotFound
from everstate.serving.answers import ViewRow
from everstate.serving.overview import views
from everstate.serving.reader import Reader
from everstate.serving.view_columns import ViewColumn, columns_of, key_of
from everstate.views.control import ViewVersion
from everstate.views.project import entities_of, known_views
from everstate.views.tables import latest_of

_NOT_BUILT: Final = "not built"


def listed_views(reader: Reader) -> list[dict[str, Any]]:
    """One record for each view, by name; raises Unavailable.

    Version, columns and position are those that readers see; ``next``: a version that is built or
    waits. Lag is ``None`` while the log does not answer. Cost: four statements, and a request to
    the log.
    """
    project = reader.project
    names = sorted({*known_views(project), *project.refused_views})
    try:
        rows = views(reader.config, reader.connection, is_counted=False)
        versions = reader.connection.standings(reader.schema).versions()
        columns = columns_of(reader.connection, reader.schema, None)
    except NotFound:
        rows, versions, columns = [], [], {}
    registered = {(each.name, each.version): each for each in versions}
    found = []
    for name in names:
        kept_as = latest_of(name) if name in project.entities else name
        mine = [row for row in rows if row.name == kept_as]
        seen = next((r for r in mine if registered[r.name, r.version].published), None)
        later = [row for row in mine if seen is None or row.version > seen.version]
        if name in project.refused_views:
            entities = sorted({row.entity for row in mine})
        else:
            entities = list(entities_of(project, name))
        record: dict[str, Any] = {"name": name, "entities": entities, **_standing(seen, later)}
        version = None if seen is None else registered[seen.name, seen.version]
        record |= _columns(reader, name, version, columns.get(name, []))
        found.append(record)
    return found


def _standing(seen: ViewRow | None, later: Sequence[ViewRow]) -> Mapping[str, Any]:
    """The version that readers see, and one that is built or waits."""
    following = {"version": later[-1].version, "state": later[-1].standing} if later else None
    if seen is None:
        kind = later[-1].kind if later else None
        return {"kind": kind, "version": None, "state": _NOT_BUILT, "next": following}
    return {
        "kind": seen.kind,
        "version": seen.version,
        "state": seen.status,
        "status_reason": seen.status_reason,
        "error": seen.error,
        "waits_for": seen.waits_for,
        "progress": seen.progress,
        "next": following,
        "position": seen.position,
        "updated_at": seen.updated_at,
        "lag_changes": seen.lag_changes,
        "lag_seconds": seen.lag_seconds,
        "verified_at": seen.verified_at,
    }


def _columns(
    reader: Reader, name: str, version: ViewVersion | None, columns: Sequence[ViewColumn]
) -> Mapping[str, Any]:
    if version is None:
        return {"columns": [], "key": None}
    key = key_of(reader.project, name, version, columns)
    return {
        "columns": [{"name": each.name, "type": each.type} for each in columns],
        "key": None if key is None else [each.name for each in key],
    }
