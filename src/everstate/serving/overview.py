"""How the views stand: versions, rows, position, lag, proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from psycopg import sql

from everstate.config import Config
from everstate.errors import LogError, Unavailable
from everstate.log.lag import Lag, LagRow, Position, is_reachable
from everstate.log.topics import TopicNames
from everstate.serving.answers import Standing, ViewRow
from everstate.serving.connection import ReadConnection
from everstate.views.control import KEPT, ViewPosition, ViewVersion
from everstate.views.project import Project
from everstate.views.tables import history_of, latest_of

_Place = tuple[str, int]


def views(config: Config, connection: ReadConnection, project: Project) -> list[ViewRow]:
    """One row for the version of each view that readers see, and for each that is on its way.

    Rows are counted exactly. Lag is ``None`` while the log does not answer, or has no such
    topic. Cost: a count of each view, and one request to the log.
    """
    schema = config.views.schema_name
    control = connection.standings(schema)
    versions = [row for row in control.versions() if row.status != KEPT]
    places = _by_version(control.positions())
    behind = _lags(config, places)
    found = []
    for row in sorted(versions, key=lambda row: (row.entity, row.name, row.version)):
        mine = places.get((row.name, row.version), [])
        lags = behind.get((row.name, row.version))
        found.append(
            ViewRow(
                name=row.name,
                version=row.version,
                kind=_kind(row, project),
                entity=row.entity,
                rows=_count(connection, schema, row.name) if row.published else None,
                position={f"{p.generation}/{p.partition}": p.next_offset for p in mine},
                lag_changes=_changes(lags),
                lag_seconds=_seconds(lags),
                updated_at=max((place.updated_at for place in mine), default=None),
                verified_at=row.verified_at,
                verified=None if row.verified is None else dict(row.verified),
                status=row.shown,
                reason=row.reason,
            )
        )
    return found


def standing(
    config: Config, connection: ReadConnection, project: Project, name: str
) -> Standing | None:
    """How far the version of a view is that readers see; ``None``: there is none."""
    control = connection.standings(config.views.schema_name)
    row = next((row for row in control.versions(name) if row.published), None)
    if row is None:
        return None
    places = _by_version(control.positions(row.entity))
    place = (row.name, row.version)
    lags = _lags(config, {place: places.get(place, [])}).get(place)
    return Standing(
        view=name,
        status=row.shown,
        reason=row.reason,
        lag_changes=_changes(lags),
        lag_seconds=_seconds(lags),
    )


def _by_version(positions: Iterable[ViewPosition]) -> dict[_Place, list[ViewPosition]]:
    found: dict[_Place, list[ViewPosition]] = defaultdict(list)
    for place in positions:
        found[place.view, place.version].append(place)
    return found


def _changes(lags: Sequence[LagRow] | None) -> int | None:
    return None if lags is None else sum(row.lag_changes for row in lags)


def _seconds(lags: Sequence[LagRow] | None) -> float | None:
    return None if lags is None else max((row.lag_seconds for row in lags), default=0.0)


def _lags(
    config: Config, places: Mapping[_Place, Sequence[ViewPosition]]
) -> dict[_Place, list[LagRow]]:
    """Lag rows of each version; one that the log cannot tell of is left out."""
    names = TopicNames(config.log.prefix)
    found: dict[_Place, list[LagRow]] = {}
    if not is_reachable(config):
        return found
    with Lag(config) as measure:
        for version, mine in places.items():
            positions = [
                Position(p.view, names.changes(p.entity, p.generation), p.partition, p.next_offset)
                for p in mine
            ]
            try:
                found[version] = measure.rows(positions)
            except LogError:
                continue  # the topic of an entity type that was removed
            except Unavailable:
                break
    return found


def _kind(row: ViewVersion, project: Project) -> str:
    if row.name in (latest_of(row.entity), history_of(row.entity)):
        return row.name.removeprefix(f"{row.entity}_")
    plan = project.views.get(row.name)
    return "unknown" if plan is None else plan.kind


def _count(connection: ReadConnection, schema: str, name: str) -> int:
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, name))
    row = connection.row(query)
    return int(row[0]) if row is not None else 0
