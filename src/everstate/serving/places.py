"""Positions of views and cores in the form of tokens; checks that a token is of this log."""

from __future__ import annotations

from everstate.changes.tokens import LogPosition, Partition, Spot, log_mark
from everstate.errors import InvalidToken, NotFound
from everstate.views.control import ViewStatuses, ViewVersion
from everstate.views.project import Project
from everstate.views.tables import HOME, latest_of


def check_here(row: ViewVersion) -> None:
    """Raise NotFound for a version whose rows are not in PostgreSQL."""
    if row.store != HOME:
        raise NotFound(
            f"the rows of {row.name} are in the store {row.store}.",
            advice="Read them with a client of that store; "
            f"`everstate views show {row.name}` prints them.",
        )


def published(control: ViewStatuses, project: Project, name: str) -> ViewVersion:
    """The version that readers of a view see; for an entity type's name, `latest`.

    Raises NotFound while there is none.
    """
    view = latest_of(name) if name in project.entities else name
    row = next((row for row in control.versions(view) if row.published), None)
    if row is None:
        raise NotFound(
            f"view {name} does not exist yet.",
            advice="`everstate views list` shows its build; `everstate run` builds it.",
        )
    return row


def position_of(control: ViewStatuses, row: ViewVersion) -> dict[str, LogPosition]:
    """The position of a version of a view, by entity type."""
    return {
        entity: LogPosition(mark_of(control, entity), spots)
        for entity, spots in spots_of(control, row).items()
    }


def spots_of(control: ViewStatuses, row: ViewVersion) -> dict[str, dict[Partition, Spot]]:
    """The positions of a version of a view, by entity type.

    For a view over other views: their positions, or those stored at its last refresh.
    """
    if not row.inputs:
        return {row.entity: _spots(control, row.entity, row.name, row.version)}
    noted = (row.built or {}).get("positions")
    found: dict[str, dict[Partition, Spot]] = {}
    for each in control.versions():
        if not each.published or each.name not in row.inputs:
            continue
        if noted is None:
            found[each.entity] = _spots(control, each.entity, each.name, each.version)
        else:
            here = noted[each.name].items()
            found[each.entity] = {(1, int(partition)): Spot(at) for partition, at in here}
    return found


def applied_of(control: ViewStatuses, row: ViewVersion) -> dict[str, dict[Partition, Spot]]:
    """Where a version of a view has applied everything before: throttled changes come later."""
    found = spots_of(control, row)
    if row.inputs:
        return found
    here = control.deferred(row.name).get((row.name, row.version), {})
    for at, (_, first) in here.items():
        spots = found[row.entity]
        if at in spots and first < spots[at].next_offset:
            spots[at] = Spot(first)
    return found


def core_position(control: ViewStatuses, entity: str) -> LogPosition:
    """The position of an entity type's core; raises NotFound while it has none."""
    spots = _spots(control, entity, latest_of(entity), 1)
    return LogPosition(mark_of(control, entity), spots)


def _spots(control: ViewStatuses, entity: str, view: str, version: int) -> dict[Partition, Spot]:
    return {
        (place.generation, place.partition): Spot(place.next_offset)
        for place in control.positions(entity)
        if (place.view, place.version) == (view, version)
    }


def mark_of(control: ViewStatuses, entity: str) -> bytes:
    """The mark of the log that the views of an entity type are kept from; raises NotFound."""
    stored = control.stored_topics(entity)
    if not stored:
        raise NotFound(
            f"no changes of {entity} are kept yet.",
            advice="`everstate run` creates the views when it starts.",
        )
    (topic, identity), *_ = stored.items()
    return log_mark(topic, identity.cluster_id, identity.topic_id)


def check_log(entity: str, position: LogPosition, mark: bytes) -> None:
    """Raise InvalidToken when a token's positions belong to a log with another mark."""
    if position.log != mark:
        raise InvalidToken(
            f"its positions of {entity} are of another log: another project, or one that was "
            "begun anew",
            advice="Begin again with a snapshot: its token is of the present log.",
        )
