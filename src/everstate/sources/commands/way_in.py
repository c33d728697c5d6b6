"""The way in by commands: their handler, the process managers, and a route for each command."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from everstate.changes import EntityType
from everstate.errors import InvalidEntityType
from everstate.parts import PartRun
from everstate.runtime.worker import Worker, part_of
from everstate.sources.way_in import Served, Serving, WayIn

if TYPE_CHECKING:
    from everstate.log.bound import Bound, Moved
    from everstate.sources.commands.carrying import Carrying

# The client of Kafka and the web framework are imported when they are used.


class Commands(WayIn):
    """Commands; only entity types whose commands are declared count."""

    role = "commands"

    @property
    def entity_types(self) -> tuple[EntityType, ...]:
        """Entity types that have a handler group."""
        return tuple(group.entity_type for group in self.project.command_groups.values())

    def parts(self) -> Mapping[str, PartRun]:
        """The handler, and each process manager; raises InvalidEntityType without any handler."""
        if not self.is_used:
            raise InvalidEntityType(
                f"app {self.project.name} has no entity type that takes commands",
                advice='Register one with source="commands" and declare app.commands(…) for it.',
            )
        reacting = {
            f"process-{name}": part_of(partial(self._process, name))
            for name in self.project.processes
        }
        return {"handler": part_of(self._handler), **reacting}

    def _handler(self) -> Worker:
        from everstate.sources.commands import CommandHandler

        return CommandHandler(self.config, self.project)

    def _process(self, name: str) -> Worker:
        from everstate.sources.commands import ProcessRunner

        return ProcessRunner(self.config, self.project, name)

    def check_move(self, bound: Bound) -> None:
        """Raise LogError when process managers would react again, or states are not known."""
        if self.is_used:
            with self._carrying() as carrying:
                events = self.project.entities_from("log")
                carrying.check(bound.keys() - {each.name for each in (*self.entity_types, *events)})

    def move(self, bound: Bound) -> Moved:
        """Write what follows from changelogs that were replayed; gives the entity types."""
        if not self.is_used:
            return {}
        with self._carrying() as carrying:
            return {name: ("its changes", bound[name].topic) for name in carrying.carry()}

    def _carrying(self) -> Carrying:
        from everstate.sources.commands.carrying import Carrying

        names = [each.name for each in self.entity_types]
        return Carrying(self.config, names, self.project.processes)

    def serve(self, serving: Serving) -> Served | None:
        """The routes of all commands."""
        from everstate.sources.commands.serving import ServedCommands

        if not self.is_used:
            return None
        return ServedCommands(self.config, self.project, serving.desk)
