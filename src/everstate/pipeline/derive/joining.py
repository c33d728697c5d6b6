"""Earlier states of entities, to be joined to the records of another stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from everstate.changes.derived import Joined
from everstate.views.control import Control
from everstate.views.tables import covers, history_of

WantedStates = Sequence[tuple[str, datetime] | None]
"""Key and time of each record's entity; ``None``: the record names none."""


class JoinGate:
    """Which records of a stream may be joined: those for which the other history is far enough.

    It must have what its log had when the record was in the stream's own log. A new requirement is
    made only when the records of the last one are taken: raised with each record, it might never be
    met under load.
    """

    def __init__(
        self, own: Callable[[], Mapping[int, int]], ends: Callable[[], Mapping[int, int]]
    ) -> None:
        """The present ends of the stream's own log, and of the other entity's log."""
        self._own, self._ends = own, ends
        self._upto: Mapping[int, int] = {}
        self._needed: Mapping[int, int] = {}

    def look(self, read: Mapping[int, int], taken: Mapping[int, int]) -> None:
        """Require the present ends for all records that the stream's own log has now.

        Call it when records were read; does nothing while earlier ones wait.
        """
        if covers(taken, self._upto) and read != taken:
            self._upto, self._needed = self._own(), self._ends()

    def upto(self, history: Mapping[int, int]) -> Mapping[int, int]:
        """The offsets below which records may be joined, when the history has this position."""
        return self._upto if covers(history, self._needed) else {}


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
    query = (
        "SELECT asked.number, kept.version, kept.state::text "
        "FROM unnest(%s::int[], %s::text[], %s::timestamptz[]) AS asked(number, key, at) "
        f"LEFT JOIN LATERAL (SELECT version, state FROM {control.table(history_of(entity))} "
        "AS past WHERE past.key = asked.key AND past.as_of <= asked.at "
        "ORDER BY past.version DESC LIMIT 1) AS kept ON true"
    )
    lists = [list(column) for column in zip(*asked, strict=True)]
    for number, version, state in control.run(query, lists):
        text = b"null" if state is None else state.encode()
        found[number] = Joined(version or 0, text, position)
    return found
