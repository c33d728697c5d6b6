"""A way in without routes, to look at what the health of an API makes of it."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter

from everstate.sources.way_in import ReadinessCheck, Served


class WithoutRoutes(Served):
    """It has these checks, and needs the log or not."""

    def __init__(self, *checks: ReadinessCheck, needs_log: bool = False) -> None:
        self._checks, self.needs_log = checks, needs_log

    def routers(self) -> Iterable[APIRouter]:
        return ()

    def checks(self) -> Iterable[ReadinessCheck]:
        return self._checks

    def open(self) -> None: ...

    def close(self) -> None: ...
