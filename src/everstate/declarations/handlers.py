"""Declaring a handler: a function that a project's own code runs on each accepted change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isasyncgenfunction, isgeneratorfunction
from math import inf
from threading import Event
from typing import Any, Final, Literal, get_args
from uuid import NAMESPACE_URL, UUID, uuid5

from everstate.changes import Change, EntityType
from everstate.changes.keys import NAME
from everstate.changes.tokens import parse_since
from everstate.changes.triggers import Trigger
from everstate.config import Config
from everstate.errors import InvalidHandler

_CALLS: Final = uuid5(NAMESPACE_URL, "urn:everstate:handler")
LANES: Final = 16
"""Most keys of a partition that are handled at once, and the number of its stored positions."""
OnParked = Literal["wait", "pass"]
"""What later changes of an entity do while one of its changes is parked."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler is given beside the change."""

    _connection: Any = field(repr=False)
    _used: Event = field(repr=False)
    _id: Callable[[], UUID] = field(repr=False)
    attempt: int
    """1, and one more at each retry."""
    json: bytes = field(repr=False)
    """The change as it is in the log."""

    @property
    def id(self) -> UUID:
        """The same at each call for the same change: receivers recognise a repeated call by it."""
        return self._id()

    @property
    def connection(self) -> Any:
        """A psycopg connection in the transaction that also stores the handler's position."""
        self._used.set()
        return self._connection


Function = Callable[[Change[dict[str, Any]], Context], Any]
"""``function(change, context)``, sync or async; its result is ignored."""


class Prepared(ABC):
    """What is called in each process that runs a handler, and returns its function."""

    @abstractmethod
    def __call__(self, config: Config, handler: Handler) -> Function:
        """The function; raises InvalidConfig and others for what ends the start."""


@dataclass(frozen=True, kw_only=True)
class Handler:
    """A function, the group that it belongs to, and the changes on which it is called."""

    entity_type: EntityType
    group: str
    name: str
    function: Function | Prepared = field(repr=False)
    when: Trigger | None = None
    """It is called only for changes that fire this trigger."""
    start: str = "now"
    """Where it begins when it never ran: ``"beginning"``, ``"now"``, a token, or a time."""
    concurrency: int = 1
    """For how many keys one process calls it at once."""
    retries: int = 10
    """How often a failed call is repeated: after 1 s, and then after twice the last pause."""
    pause_max_s: float = 300.0
    """Longest of these pauses."""
    timeout_s: float = 30.0
    """A longer call counts as failed."""
    on_parked: OnParked = "wait"
    dsn: str | None = field(default=None, repr=False)
    """Database of ``context.connection`` and of the position; default: that of the views."""

    def __post_init__(self) -> None:
        for reason, holds in {
            f"group and name must match {NAME.pattern}.": all(
                isinstance(each, str) and NAME.fullmatch(each) for each in (self.group, self.name)
            ),
            "it must decorate a function, and no generator.": callable(self.function)
            and not isgeneratorfunction(self.function)
            and not isasyncgenfunction(self.function),
            f"concurrency must be between 1 and {LANES}.": 1 <= self.concurrency <= LANES,
            "retries and timeout_s must be positive and finite, and pause_max_s at least 1 s.": (
                self.retries >= 0 and 0 < self.timeout_s < inf and 1 <= self.pause_max_s < inf
            ),
            "on_parked must be wait or pass.": self.on_parked in get_args(OnParked),
        }.items():
            if not holds:
                raise InvalidHandler(self.title, reason)
        parse_since(self.start)
        if self.when is not None:
            self.when.check(self.entity_type)

    @property
    def title(self) -> str:
        """Its group and name, such as ``billing.welcome``."""
        return f"{self.group}.{self.name}"

    def id_of(self, change_id: UUID) -> UUID:
        """Id of the call for a change."""
        return uuid5(_CALLS, f"{self.title}\n{change_id}")

    def pause_s(self, attempts: int) -> float | None:
        """Pause after a number of failed calls; ``None``: it is not called again by itself."""
        if attempts > self.retries:
            return None
        return min(self.pause_max_s, 2 ** (attempts - 1)) if attempts else 0


def handlers_of(handlers: Mapping[str, Handler], group: str) -> list[Handler]:
    """The handlers of a group, or the one of that title; raises InvalidHandler."""
    found = [each for each in handlers.values() if group in (each.group, each.title)]
    if not found:
        known = ", ".join(handlers) or "none"
        raise InvalidHandler(group, f"it is not declared (declared: {known}).")
    return found
