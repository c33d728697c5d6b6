"""All ways in of a project. Who adds one, adds it here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Final

from everstate.changes.drift import Truth
from everstate.config import Config
from everstate.sources.cdc.way_in import Captures
from everstate.sources.commands.way_in import Commands
from everstate.sources.crud.way_in import CassandraCrud, Events, PostgresCrud
from everstate.sources.outbox.way_in import OutboxRelay
from everstate.sources.way_in import Served, Serving, WayIn
from everstate.views.project import Project

WAYS_IN: Final[tuple[type[WayIn], ...]] = (
    PostgresCrud,
    CassandraCrud,
    Events,
    Commands,
    OutboxRelay,
    Captures,
)


def ways_in(config: Config, project: Project) -> tuple[WayIn, ...]:
    """The ways in of a project; opens nothing."""
    return tuple(way_in(config, project) for way_in in WAYS_IN)


def truths_of(config: Config, project: Project) -> dict[str, Truth]:
    """Sources of truth that can be compared with the log, by entity type.

    Opens no connection; raises InvalidConfig while a store has no address.
    """
    return {
        entity: truth
        for way_in in ways_in(config, project)
        for entity, truth in way_in.truths().items()
    }


def serve_ways(ways: Iterable[WayIn], serving: Serving) -> list[Served]:
    """The routes of all ways in; raises Unavailable, after closing what was opened."""
    found: list[Served] = []
    with ExitStack() as opened:
        for way_in in ways:
            if (served := way_in.serve(serving)) is not None:
                opened.callback(served.close)
                found.append(served)
        opened.pop_all()
    return found
