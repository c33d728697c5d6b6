"""The state of the views: versions, rows, position, lag, proof."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from everstate.config import Config
from everstate.postgres import identifier
from everstate.serving.answers import ViewRow
from everstate.serving.connection import ReadConnection
from everstate.serving.freshness import Behind, Freshness
from everstate.views.control import KEPT, ViewPosition, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.reading import overflow_sql
from everstate.views.stores.postgres.tables import Readers
from everstate.views.tables import HOME, latest_of

_Place = tuple[str, int]


def views(
    config: Config,
    connection: ReadConnection,
    plans: Mapping[str, ViewPlan] | None = None,
    *,
    is_counted: bool = True,
) -> list[ViewRow]:
    """One row for each version of a view, but for replaced ones (``kept``); parts of views last.

    Rows are counted exactly, if they are counted; with ``plans`` by name, the declared views, also
    groups in which an output is too large for its CAST. Lag is ``None`` while the log does not
    answer, or has no such topic. Cost: a count of each view, and one request to the log.
    """
    schema = config.views.schema_name
    control = connection.standings(schema)
    stored = control.versions()
    versions = [row for row in stored if row.status != KEPT]
    by_input: dict[str, set[str]] = defaultdict(set)
    for row in stored:
        for name in row.inputs:
            by_input[name].add(row.name)
    places = _by_version(control.positions())
    inputs = {(row.name, row.version): _inputs(row, versions) for row in versions if row.inputs}
    for version, rows in inputs.items():
        places[version] = [place for row in rows for place in places[row.name, row.version]]
    behind = _lags(config, places)
    waiting = control.deferred()
    misfits = control.misfits()
    found = []
    for row in sorted(versions, key=lambda row: (row.is_part, row.entity, row.name, row.version)):
        mine = places.get((row.name, row.version), [])
        lag = behind.get((row.name, row.version))
        told = replace(row, error=row.error or _error(inputs.get((row.name, row.version), ())))
        has_rows = is_counted and row.published and not row.is_topic and row.store == HOME
        plan = None if plans is None or not has_rows else plans.get(row.name)
        found.append(
            ViewRow(
                name=row.name,
                version=row.version,
                kind=row.kind,
                entity=row.entity,
                rows=_count(connection, schema, row.name) if has_rows else None,
                position={_shown(p, row): p.next_offset for p in mine},
                lag_changes=None if lag is None else lag.changes,
                lag_seconds=None if lag is None else lag.seconds,
                updated_at=max((place.updated_at for place in mine), default=None),
                verified_at=row.verified_at,
                verified=None if row.verified is None else dict(row.verified),
                status=told.shown,
                status_reason=told.status_reason,
                error=told.error,
                waits_for=told.waits_for,
                throttled=sum(n for n, _ in waiting.get((row.name, row.version), {}).values()),
                progress=None if row.progress is None else dict(row.progress),
                overflows=dict(overflows(connection, schema, row, plan)),
                misfits=tuple(each for each in misfits if row.name == latest_of(each.entity)),
                part_of=tuple(sorted(by_input[row.name])) if row.is_part else None,
            )
        )
    return found


def standing(
    config: Config, connection: ReadConnection, name: str
) -> tuple[ViewVersion, Behind | None] | None:
    """State and lag of a view's published version; ``None``: there is none.

    Its error may be that of a view that it reads. No lag: the log does not answer.
    """
    control = connection.standings(config.views.schema_name)
    row = next((row for row in control.versions(name) if row.published), None)
    if row is None:
        return None
    versions = [row, *_inputs(row, control.versions())]
    places = _by_version(control.positions())
    mine = [place for each in versions for place in places.get((each.name, each.version), [])]
    lag = _lags(config, {(row.name, row.version): mine})[row.name, row.version]
    return replace(row, error=row.error or _error(versions[1:])), lag


def _inputs(row: ViewVersion, versions: Iterable[ViewVersion]) -> list[ViewVersion]:
    """The published versions that a view reads."""
    return [each for each in versions if each.published and each.name in row.inputs]


def _error(inputs: Iterable[ViewVersion]) -> str | None:
    """Why a view over other views is behind: because one of them is."""
    said = (f"{each.name} is behind: {each.error}" for each in inputs if each.error is not None)
    return next(said, None)


def _shown(place: ViewPosition, row: ViewVersion) -> str:
    """`generation/partition`; for a view over other views, after the name of the input."""
    name = f"{place.generation}/{place.partition}"
    return f"{place.view} {name}" if row.inputs else name


def _by_version(positions: Iterable[ViewPosition]) -> dict[_Place, list[ViewPosition]]:
    found: dict[_Place, list[ViewPosition]] = defaultdict(list)
    for place in positions:
        found[place.view, place.version].append(place)
    return found


def _lags(
    config: Config, places: Mapping[_Place, Sequence[ViewPosition]]
) -> dict[_Place, Behind | None]:
    """The lag of each version; ``None``: it cannot be measured."""
    with Freshness(config) as lag:
        return {
            version: lag.behind_of(
                (place.entity, place.generation, place.partition, place.next_offset)
                for place in mine
            )
            for version, mine in places.items()
        }


def _count(connection: ReadConnection, schema: str, name: str) -> int:
    row = connection.row(f"SELECT count(*) FROM {identifier(schema, name)}".encode())
    return int(row[0]) if row is not None else 0


def overflows(
    connection: ReadConnection, schema: str, row: ViewVersion, plan: ViewPlan | None
) -> Mapping[str, int]:
    """Number of groups in which an output is too large for its CAST, by output; none is left out.

    ``plan``: as the project declares the view; nothing is known where the version is of another
    meaning. Cost: nothing without such a CAST, else one pass over the groups.
    """
    if plan is None or plan.fingerprint != row.fingerprint:
        return {}
    if (computed := plan.computed(Readers(schema, row.version))) is None:
        return {}
    relation, outputs = computed
    conditions = {name: overflow_sql(text) for name, text in outputs if "CAST(" in text}
    names = [name for name, condition in conditions.items() if condition is not None]
    if not names:
        return {}
    counts = ", ".join(f"count(*) FILTER (WHERE {conditions[name]})" for name in names)
    query = f"SELECT {counts} FROM {relation}"
    # It has no parameters, but maybe the operator %.
    found = connection.row(query.replace("%", "%%").encode()) or ()
    return {name: count for name, count in zip(names, found, strict=True) if count}
