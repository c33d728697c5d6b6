"""After raw rows were lost, the states from before are uncertain until whole rows come."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final

from everstate.changes.keys import EntityKey
from everstate.declarations.captures import Capture
from everstate.log.state_copy import StateCopy
from everstate.sources.cdc.completion import Known
from everstate.sources.cdc.holding import Doubts, HeldEntity
from everstate.sources.cdc.states import known_row, state_name

LOST: Final = "raw rows were deleted before they were cleaned"


def doubt_all(
    held: dict[EntityKey, HeldEntity],
    copy: StateCopy,
    capture: Capture,
    tables: Iterable[str],
    now_s: float,
) -> set[EntityKey]:
    """Record that all states of these tables are uncertain; out: the changed held entries.

    Cost: one pass over these states. Of an outbox none is uncertain: each of its rows is whole.
    """
    # One entry is enough for all entities of a type.
    doubts, changed = Doubts(held, 1), set[EntityKey]()

    def lookup(entity: str, key: str) -> Known | None:
        row = copy.get(state_name(entity, key))
        return None if row is None else known_row(row)

    for table in () if capture.outbox is not None else tables:
        entity = capture.tables[table].entity
        start = state_name(entity, "")
        known = (name[len(start) :].decode() for name, _ in copy.scan(start))
        waiting = [key for (name, key), one in held.items() if name == entity and one.rows]
        for key in chain(waiting, known):
            changed |= doubts.add((entity, key), table, {}, {}, now_s, lookup)
    for one in changed & held.keys():
        if not held[one].rows:
            held[one].reason = LOST
    return changed
