"""Server-Sent Events: the lines of a stream become events. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstate.changes.json_numbers import decode


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a subscription."""

    name: str
    """``current``: a present row (key, version, state); ``change``: a change, as in the log;
    ``live``: everything before the subscription was delivered; ``dropped``: changes were left out,
    since they came too fast; ``error``: the subscription ended. Of a view: ``snapshot``: all rows;
    ``changed``: the rows that differ at a later position, each ``before`` and ``after``."""
    data: Any
    token: str | None
    """Continue after this event with it."""


@dataclass(slots=True)
class Parser:
    """Takes one line after the other."""

    token: str | None = None
    """Id of the last event, also of one without data."""
    _name: str = ""
    _data: list[str] = field(default_factory=list)

    def line(self, text: str) -> Event | None:
        """Take one line without its end; out: the event that it completes."""
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        elif name == "id":
            self.token = value
        elif not text and self._data:
            event = Event(self._name or "message", decode("\n".join(self._data)), self.token)
            self._name, self._data = "", []
            return event
        return None
