"""The way in by captures: raw logs that the pipeline cleans, and connectors that are kept going."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from everstate.changes import EntityType
from everstate.config import Config
from everstate.parts import PartRun
from everstate.sources.way_in import WayIn
from everstate.views.project import Project

if TYPE_CHECKING:
    from everstate.sources.cdc.cleaning import Cleaning


class Captures(WayIn):
    """Captures of other systems' databases; to clean them needs the pipeline's Spark."""

    role = "clean"

    def __init__(self, config: Config, project: Project, *, given: Config | None = None) -> None:
        """``given``: the settings without the addresses of running local servers."""
        super().__init__(config, project)
        self.given = given or config

    @property
    def entity_types(self) -> tuple[EntityType, ...]:
        """Entity types that have a capture."""
        captured = (name for each in self.project.captures.values() for name in each.entities)
        return tuple(self.project.entities[name] for name in captured)

    def cleanings(self) -> Mapping[str, Callable[[], Cleaning]]:
        """Openers of what cleans each capture, by its name."""
        from everstate.sources.cdc.cleaning import cleaning_of

        return {
            name: partial(cleaning_of, self.config, self.project, name)
            for name in self.project.captures
        }

    def parts(self) -> Mapping[str, PartRun]:
        """Parts that restart writers of raw topics: failed connectors, and a Connect that crashed.

        The parts that clean are made of :meth:`cleanings`.
        """
        from everstate.local import keep_running as keep_servers_running
        from everstate.local import resolve
        from everstate.sources.cdc.restarting import keep_running, restarters_of

        captures = self.project.captures
        restarters = restarters_of(captures, self.project.entities, lambda: resolve(self.given))
        parts: dict[str, PartRun] = {"connectors": partial(keep_running, restarters)}
        if self.given.capture.connect_url is None and any(
            capture.dsn is not None and capture.connect_url is None for capture in captures.values()
        ):
            parts["connect"] = partial(keep_servers_running, self.given, ("connect",))
        return parts
