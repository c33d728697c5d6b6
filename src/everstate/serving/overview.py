"""How the views stand: rows, position, lag, proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from psycopg import sql

from everstate.config import Config
from everstate.errors import LogError, Unavailable
from everstate.log.lag import Lag, LagRow, Position
from everstate.log.topics import TopicNames
from everstate.serving.answers import ViewRow
from everstate.serving.connection import ReadConnection
from everstate.views.project import Project, kept_always


class _Place(NamedTuple):
    """One position row of a view group."""

    view_group: str
    entity: str
    generation: int
    partition: int
    next_offset: int
    updated_at: datetime


class _Registered(NamedTuple):
    """One row of the table of views."""

    name: str
    entity: str
    view_group: str
    status: str
    reason: str | None
    verified_at: datetime | None
    verified: dict[str, Any] | None


def views(config: Config, connection: ReadConnection, project: Project) -> list[ViewRow]:
    """One row a view, those of an entity type together.

    Rows are counted exactly. Lag is ``None`` while the log does not answer, or has no such
    topic. Cost: a count of each
    view, and one request to the log.
    """
    schema = config.views.schema_name
    places = [_Place(*row) for row in connection.rows(_positions(schema))]
    behind = _lags(config, places)
    found = []
    for view in _registered(connection, schema, project):
        mine = [place for place in places if place.view_group == view.view_group]
        lags = behind.get(view.view_group)
        found.append(
            ViewRow(
                name=view.name,
                kind=_kind(view.name, view.entity, project),
                entity=view.entity,
                view_group=view.view_group,
                rows=_count(connection, schema, view.name),
                position={f"{p.generation}/{p.partition}": p.next_offset for p in mine},
                lag_changes=None if lags is None else sum(row.lag_changes for row in lags),
                lag_seconds=None
                if lags is None
                else max((row.lag_seconds for row in lags), default=0.0),
                updated_at=max((place.updated_at for place in mine), default=None),
                verified_at=view.verified_at,
                verified=view.verified,
                status=view.status,
                reason=view.reason,
            )
        )
    return found


def _registered(connection: ReadConnection, schema: str, project: Project) -> list[_Registered]:
    """Registered views and, of every entity type, those that need no registration."""
    rows = {view.name: view for view in map(_Registered._make, connection.rows(_views(schema)))}
    for entity in project.entities:
        for name in (f"{entity}_{kept}" for kept in kept_always(project, entity)):
            rows.setdefault(name, _Registered(name, entity, entity, "live", None, None, None))
    return sorted(rows.values(), key=lambda view: (view.entity, view.name))


def _lags(config: Config, places: Iterable[_Place]) -> dict[str, list[LagRow]]:
    """Lag rows of each view group; a group that the log cannot tell of is left out."""
    names = TopicNames(config.log.prefix)
    by_group: dict[str, list[Position]] = defaultdict(list)
    for p in places:
        topic = names.changes(p.entity, p.generation)
        by_group[p.view_group].append(Position(p.view_group, topic, p.partition, p.next_offset))
    found: dict[str, list[LagRow]] = {}
    with Lag(config) as measure:
        for group, positions in by_group.items():
            try:
                found[group] = measure.rows(positions)
            except LogError:
                continue  # the topic of an entity type that was removed
            except Unavailable:
                break
    return found


def _kind(name: str, entity: str, project: Project) -> str:
    if name in (f"{entity}_latest", f"{entity}_history"):
        return name.removeprefix(f"{entity}_")
    plan = project.views.get(name)
    return "unknown" if plan is None else plan.kind


def _count(connection: ReadConnection, schema: str, name: str) -> int:
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, name))
    row = connection.row(query)
    return int(row[0]) if row is not None else 0


def _positions(schema: str) -> sql.Composed:
    return sql.SQL(
        "SELECT view_group, entity, generation, partition, next_offset, updated_at FROM {} "
        "ORDER BY view_group, generation, partition"
    ).format(sql.Identifier(schema, "position"))


def _views(schema: str) -> sql.Composed:
    return sql.SQL(
        "SELECT name, entity, view_group, status, reason, verified_at, verified FROM {} "
        "ORDER BY entity, name"
    ).format(sql.Identifier(schema, "view"))
