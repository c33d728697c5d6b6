"""Looks at a whole project: what each server knows, and what needs attention, at one moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, TypeVar

from everstate.app import App
from everstate.attention.conditions import (
    Area,
    Concern,
    WayStep,
    all_concerns,
    concern,
    of_capture,
    of_dead_letters,
    of_handlers,
    of_readers,
    of_roles,
    of_views,
)
from everstate.config import Config
from everstate.errors import EverstateError, Unavailable
from everstate.handling.tables import handler_states
from everstate.log.dead_letters import recent_dead_letters
from everstate.log.groups import GROUP, group_positions
from everstate.log.lag import is_reachable
from everstate.parts import RoleState, read_states
from everstate.serving import Reader
from everstate.serving.answers import ViewRow
from everstate.serving.log_size import LogSize, log_size
from everstate.serving.log_state import LogReader, TopicState, log_readers, topic_states
from everstate.serving.overview import views
from everstate.serving.words import duration_text
from everstate.sources.cdc.status import CaptureStatus
from everstate.views.control import ViewStatuses

T = TypeVar("T")

_CAPTURES_FRESH_S: Final = 15.0
_SIZES_FRESH_S: Final = 300.0
_HOUR_MS: Final = 3_600_000
_UP: Final = "Nothing needs to be done here when it answers again."


@dataclass(slots=True)
class SeenProject:
    """What was seen of a project; ``None``: the server did not answer, or the app has no such."""

    at: datetime
    roles: tuple[RoleState, ...]
    conditions: list[Concern] = field(default_factory=list)
    """What needs attention; the worst first."""
    unknown: set[Area] = field(default_factory=set)
    """Areas that were not seen: their conditions may hold or not."""
    views: Sequence[ViewRow] | None = None
    topics: Sequence[TopicState] | None = None
    size: LogSize | None = None
    """The last that was measured, every five minutes."""
    readers: Sequence[LogReader] | None = None
    waiting_s: float | None = None
    """Age of the oldest change of the store that is not in the log; 0: there is none."""
    captures: Sequence[CaptureStatus] = ()


def all_readers(
    config: Config,
    app: App,
    control: ViewStatuses,
    topics: Iterable[TopicState],
    size: LogSize,
    groups: Iterable[str] | None = None,
) -> list[LogReader]:
    """Who reads the log and stores a position: :func:`log_readers`, clean, and consumer groups.

    ``groups``: only these of the cluster. Raises Unavailable. Cost: a request for each group, and a
    search in `.progress` for each capture.
    """
    # A topic with `retention.bytes` may keep a record for a shorter time than `retention.ms`.
    keeps = {name: each.keeps_s for name, each in size.topics.items()}
    known = [
        each
        if each.retention_bytes is None
        else replace(each, retention_s=keeps.get(each.name, each.retention_s))
        for each in topics
    ]
    stored = group_positions(config, {each.name for each in known}, groups)
    for capture in app.captures.values():
        # Imported here: an app without captures needs none of it.
        from everstate.sources.cdc.balance import clean_positions

        stored += clean_positions(config, capture)
    return log_readers(config, control, known, app.entities, stored)


class Looking:
    """Looks at the servers of a project; one that does not answer leaves the rest as it is."""

    def __init__(self, config: Config, app: App, reader: Reader) -> None:
        self._config, self._app, self._reader = config, app, reader
        self._captures: tuple[float, list[CaptureStatus]] | None = None
        self._size: LogSize | None = None
        self._sized_s = 0.0
        self._groups: set[str] | None = None
        """Consumer groups that read a topic of the project, when the sizes were measured."""

    def look(self) -> SeenProject:
        """Look at every server, one after the other.

        Cost: one request to the views' database, a few to the brokers, the archive's newest commit
        of each entity type, and every 15 s a request to Kafka Connect and to the database of each
        capture. A server that is down costs its time-out.
        """
        limits = self._config.alerts
        roles = tuple(read_states(self._config.project.data_dir))
        seen = SeenProject(datetime.now(UTC), roles, [*of_roles(roles)])
        seen.conditions += self._refused()
        seen.views = self._asked("the views' database (PostgreSQL)", "views", seen, self._views)
        if seen.views is not None:
            found = [*of_views(seen.views, limits)]
            seen.conditions = all_concerns(seen.conditions, found)
        seen.topics = self._asked("the log (Kafka)", "log", seen, self._topics)
        dead = None
        if seen.topics is not None:
            dead = self._asked("the dead letters", "log", seen, self._recent_dead_letters)
        seen.conditions += of_dead_letters(dead or (), limits.dead_letters_hours)
        if seen.views is not None and (topics := seen.topics) is not None:
            asked = self._asked("the archive", "readers", seen, lambda: self._lags(topics))
            seen.readers, seen.size = asked, self._size
        if seen.readers is None:
            seen.unknown.add("readers")
        seen.conditions += of_readers(seen.readers or (), limits)
        if handlers := self._app.handlers.values():
            states = self._asked(
                "the log (Kafka)", "handlers", seen, lambda: handler_states(self._config, handlers)
            )
            seen.conditions += of_handlers(states or (), limits)
        if self._app.entities_from("store"):
            seen.waiting_s = self._asked("the store (PostgreSQL)", "store", seen, self._waiting)
            seen.conditions += self._unpublished(seen.waiting_s)
        seen.captures = self._asked("the captures", "captures", seen, self._seen_captures) or ()
        for each in seen.captures:
            seen.conditions += of_capture(each, limits)
        seen.conditions.sort(key=lambda each: each.level == "warn")
        return seen

    def _asked(
        self, server: str, area: Area, seen: SeenProject, question: Callable[[], T]
    ) -> T | None:
        """The answer of a server; ``None``: it gave none, which is recorded."""
        step, key = _STEPS[area], f"no-answer:{area}"
        try:
            return question()
        except Unavailable as error:
            told = (f"{area}: no answer", server, "does not answer.", error.public_advice or _UP)
            seen.conditions.append(Concern(key, "always", step, *told))
        except EverstateError as error:
            why = (f"{area}: not known", server, error.message, error.advice)
            seen.conditions.append(Concern(key, "always", step, *why, level="warn"))
        seen.unknown.add(area)
        return None

    def _refused(self) -> list[Concern]:
        return [
            concern(
                *("view-refused", name, "view refused", f"view {name}"),
                *(refusal.message, refusal.advice),
            )
            for name, refusal in self._app.refused_views.items()
        ]

    def _views(self) -> list[ViewRow]:
        return views(self._config, self._reader.connection, is_counted=False)

    def _topics(self) -> list[TopicState]:
        if not is_reachable(self._config):
            raise Unavailable("no broker accepts a connection.")
        return topic_states(self._config)

    def _recent_dead_letters(self) -> list[str | None]:
        before_ms = int(self._config.alerts.dead_letters_hours * _HOUR_MS)
        return recent_dead_letters(self._config, int(time.time() * 1000) - before_ms)

    def _lags(self, topics: Sequence[TopicState]) -> list[LogReader]:
        if self._size is None or time.monotonic() - self._sized_s > _SIZES_FRESH_S:
            self._size, self._sized_s = log_size(self._config, topics), time.monotonic()
            self._groups = None
        control = self._reader.connection.standings(self._config.views.schema_name)
        found = all_readers(self._config, self._app, control, topics, self._size, self._groups)
        if self._groups is None:
            names = {each.reader for each in found if each.reader.startswith(GROUP)}
            self._groups = {name.removeprefix(GROUP) for name in names}
        return found

    def _waiting(self) -> float:
        # Imported here: an app without a store needs no outbox.
        from everstate.sources.outbox.marks import oldest_waiting_s

        return oldest_waiting_s(self._config) or 0.0

    def _unpublished(self, waiting_s: float | None) -> list[Concern]:
        if waiting_s is None or waiting_s <= self._config.alerts.publish_behind_s:
            return []
        late = f"{duration_text(waiting_s)} behind"
        why = f"its oldest change that is not in the log is {duration_text(waiting_s)} old."
        advice = "`everstate outbox status` shows what blocks it."
        return [concern("outbox-late", "store", late, "the outbox:", why, advice)]

    def _seen_captures(self) -> list[CaptureStatus]:
        """The captures that this project runs, as `everstate cdc status` knows them."""
        known = self._captures
        if known is not None and time.monotonic() - known[0] < _CAPTURES_FRESH_S:
            return known[1]
        # Imported here: an app without captures needs none of it.
        from everstate.local import resolve
        from everstate.sources.cdc.capturing import Capturing

        config = self._config
        with suppress(EverstateError):
            config = resolve(config, needs=())  # a local Connect may have been started since
        found = [
            Capturing(config, each, local=False, entities=self._app.entities).status()
            for each in self._app.captures.values()
            if each.dsn is not None
        ]
        self._captures = time.monotonic(), found
        return found


_STEPS: Final[Mapping[Area, WayStep]] = {
    "views": "views",
    "log": "log",
    "readers": "archive",
    "store": "ways in",
    "captures": "ways in",
    "handlers": "log",
}
