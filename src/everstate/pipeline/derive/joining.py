"""Earlier states of entities, to be joined to the records of another stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from psycopg import sql

from everstate.changes.derived import Joined
from everstate.views.control import Control
from everstate.views.tables import history_of

WantedStates = Sequence[tuple[str, datetime] | None]
"""Key and time of each record's entity; ``None``: the record names none."""


def history_vector(control: Control, entity: str) -> Mapping[int, int]:
    """The position of the published history; empty: no history is published yet."""
    name = history_of(entity)
    row = next((row for row in control.versions(name) if row.published), None)
    return {} if row is None else control.vector(name, row.version)


def entities_as_of(control: Control, entity: str, wanted: WantedStates) -> list[Joined | None]:
    """Each entity as it was at its time: the newest version with an as-of time not later than it.

    Only versions in the history count; the caller holds one snapshot, in which the history's
    position is read too. Cost: one look-up in the history's index for each.
    """
    position = tuple(sorted(history_vector(control, entity).items()))
    asked = [(number, *each) for number, each in enumerate(wanted) if each is not None]
    found: list[Joined | None] = [None] * len(wanted)
    if not asked:
        return found
    query = sql.SQL(
        "SELECT asked.number, kept.version, kept.state::text "
        "FROM unnest(%s::int[], %s::text[], %s::timestamptz[]) AS asked(number, key, at) "
        "LEFT JOIN LATERAL (SELECT version, state FROM {} AS past WHERE past.key = asked.key "
        "AND past.as_of <= asked.at ORDER BY past.version DESC LIMIT 1) AS kept "
        "ON true"
    ).format(control.table(history_of(entity)))
    lists = [list(column) for column in zip(*asked, strict=True)]
    for number, version, state in control.connection.execute(query, lists):
        text = b"null" if state is None else state.encode()
        found[number] = Joined(version or 0, text, position)
    return found
