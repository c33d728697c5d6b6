"""Declaring a process manager: which changes it reads, and the commands that follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal
from uuid import NAMESPACE_URL, UUID, uuid5

from pydantic import BaseModel

from everstate.changes import Change
from everstate.changes.keys import NAME
from everstate.errors import InvalidEntityType

_COMMANDS: Final = uuid5(NAMESPACE_URL, "urn:everstate:process")

ProcessStart = Literal["beginning", "oldest", "end"]
"""Where a process manager that never ran starts: at the first change that ever was, at the oldest
that the log still has, or after the newest. With ``oldest`` it also continues when the log has
dropped changes while it was down; otherwise it raises DataLoss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A command that follows a change; ``delay`` counts from the change's ``recordedAt``."""

    entity: str
    key: str
    command: BaseModel
    delay: timedelta = timedelta(0)
    expected_version: int | None = None


React = Callable[[Change[dict[str, Any]]], Iterable[Effect] | None]
"""``react(change)`` → the commands that follow; pure."""


@dataclass(frozen=True)
class ProcessManager:
    """Reacts to changes with commands, by a pure function of a change.

    The id of a command is derived from process, change and index in the result: a change that is
    read again gives the same commands, which are decided once. When a version of an entity is
    published again, however late, the process manager does not react again.
    """

    name: str
    on: Sequence[str]
    react: React
    start: ProcessStart = "beginning"

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidEntityType(f"process manager {self.name!r} must match {NAME.pattern}")

    def effects(self, change: Change[dict[str, Any]]) -> list[tuple[UUID, Effect]]:
        """The commands that follow a change, with their ids."""
        found = self.react(change) or ()
        return [(self.id_of(change.id, at), effect) for at, effect in enumerate(found, 1)]

    def id_of(self, change_id: UUID, index: int) -> UUID:
        """Id of the ``index``-th command that follows a change."""
        return uuid5(_COMMANDS, f"{self.name}\n{change_id}\n{index}")
