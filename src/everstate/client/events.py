"""Server-Sent Events: the lines of a stream become events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from everstate.changes.json_numbers import decode

_END: Final = re.compile(rb"\r\n|\n|\r")
"""The ends of lines in Server-Sent Events. Text may have others, such as U+2028: JSON keeps them as
they are, and ``str.splitlines`` would split there."""


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
class Lines:
    """Takes bytes as they come, and gives the lines that they complete."""

    _rest: list[bytes] = field(default_factory=list)
    """Pieces of the line whose end is yet to come: joined only once, since a line may be long."""
    _is_after_cr: bool = False

    def take(self, chunk: bytes) -> list[str]:
        """Take some bytes; out: the lines that end in them, without their ends."""
        if not chunk:
            return []
        if self._is_after_cr:
            chunk = chunk.removeprefix(b"\n")  # The other half of CR LF.
        self._is_after_cr = chunk.endswith(b"\r")
        *ended, rest = _END.split(chunk)
        if ended:
            ended[0] = b"".join([*self._rest, ended[0]])
            self._rest.clear()
        self._rest.append(rest)
        return [line.decode() for line in ended]


@dataclass(slots=True)
class Parser:
    """Makes events of the bytes or the lines of a stream."""

    token: str | None = None
    """Id of the last event that was complete, also of one without data."""
    _name: str = ""
    _data: list[str] = field(default_factory=list)
    _id: str | None = None
    _lines: Lines = field(default_factory=Lines)

    def take(self, chunk: bytes) -> Iterator[Event]:
        """Take some bytes; out: the events that they complete, each when it is asked for."""
        for line in self._lines.take(chunk):
            event = self.line(line)
            if event is not None:
                yield event

    def line(self, text: str) -> Event | None:
        """Take one line without its end; out: the event that it completes."""
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
        elif not text:
            return self._ended()
        return None

    def _ended(self) -> Event | None:
        """The event that an empty line ends; only now is its id that of the last event."""
        self.token = self.token if self._id is None else self._id
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return Event(name, decode("\n".join(data)), self.token) if data else None
