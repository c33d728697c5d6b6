"""Waits until a view has reached a token."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from everstate.changes.tokens import Claim, Partition, Spot, Token, parse_token
from everstate.config import Config
from everstate.errors import InvalidToken, NotCaughtUp, NotFound
from everstate.postgres import Connection
from everstate.serving.connection import pooled
from everstate.serving.places import applied_of, check_log, mark_of, published, spots_of
from everstate.views.control import ViewStatuses
from everstate.views.project import Project

_PAUSE_S_MIN: Final = 0.005
_PAUSE_S_MAX: Final = 0.1


def wait_until(config: Config, project: Project, view: str, token: str, wait_s: float) -> None:
    """Wait until readers of a view see everything that a token covers for its entity types.

    Positions: until the view has applied everything before them, also what it throttles. Claims:
    until the core has accepted the version, and the view has applied everything before the core's
    position at that time. Other entity types in the token are ignored. It also waits for a view
    that is not built yet; the caller must check that the view is declared. Raises InvalidToken,
    NotCaughtUp after ``wait_s``, Unavailable. Cost: two or three statements every 5 to 100 ms, on
    a connection that is held only for them.
    """
    waiting = _Waiting(config, project, view, parse_token(token))
    deadline, pause = time.monotonic() + wait_s, _PAUSE_S_MIN
    while True:
        with pooled(config.views_dsn) as connection:
            missing = waiting.missing(connection)
        if missing is None:
            return
        if time.monotonic() > deadline:
            raise NotCaughtUp(view, missing, wait_s)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _PAUSE_S_MAX)


class _Waiting:
    """The positions and claims that are still waited for."""

    def __init__(self, config: Config, project: Project, view: str, token: Token) -> None:
        if token.claims and token.project != project.name:
            raise InvalidToken(f"it is of project {token.project!r}, and this is {project.name!r}")
        self._schema, self._project, self._view = config.views.schema_name, project, view
        self._token = token
        self._claims: list[Claim] | None = None
        self._wanted: dict[str, dict[Partition, int]] = {}
        """Positions that the view must reach, by entity type."""

    def missing(self, connection: Connection) -> str | None:
        """What the view lacks, in words; ``None``: nothing is missing."""
        control = ViewStatuses(connection, self._schema)
        try:
            row = published(control, self._project, self._view)
        except NotFound as cause:
            # Its first version may be built during the wait.
            return cause.message
        if self._claims is None:
            self._begin(control, list(spots_of(control, row)))
        return self._claimed(control) or _behind(self._wanted, applied_of(control, row))

    def _begin(self, control: ViewStatuses, entities: Sequence[str]) -> None:
        self._claims = [claim for claim in self._token.claims if claim.entity in entities]
        for entity in entities:
            position = self._token.positions.get(entity)
            if position is not None:
                check_log(entity, position, mark_of(control, entity))
                wanted = {at: spot.covered_by for at, spot in position.spots.items()}
                self._wanted[entity] = wanted

    def _claimed(self, control: ViewStatuses) -> str | None:
        """Turn accepted claims into positions; returns why one is not accepted yet, in words."""
        for claim in list(self._claims or ()):
            found = control.accepted(claim.entity, claim.key)
            version, generation, partition, offset = found or (0, 0, 0, 0)
            if version < claim.version:
                has = f"version {version}" if version else "no version of it"
                return (
                    f"{claim.entity} {claim.key!r} version {claim.version} is not accepted yet, "
                    f"the views have {has}"
                )
            at = (generation, partition)
            wanted = self._wanted.setdefault(claim.entity, {})
            wanted[at] = max(offset, wanted.get(at, 0))
            assert self._claims is not None, "there is one in it"
            self._claims.remove(claim)
        return None


def _behind(
    wanted: Mapping[str, Mapping[Partition, int]], spots: Mapping[str, Mapping[Partition, Spot]]
) -> str | None:
    for entity, places in wanted.items():
        for at, offset in places.items():
            has = spots.get(entity, {}).get(at, Spot(0)).next_offset
            if has < offset:
                return (
                    f"in partition {at[1]} it is at {has:,}, and {offset:,} is awaited "
                    f"({offset - has:,} offsets)"
                )
    return None
