"""The way of a change on one page: each step with its lag, and what needs attention, first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

import orjson

from everstate.app import App
from everstate.attention.conditions import Concern, WayStep
from everstate.attention.looking import Looking, SeenProject
from everstate.config import Config
from everstate.console.pages import PLACE, view_url
from everstate.declarations.source import Source
from everstate.parts import RoleState
from everstate.serving.log_state import ARCHIVE
from everstate.serving.words import duration_text
from everstate.views.control import BUILDING, LIVE, WAITING

Level = Literal["good", "warn", "bad"]


@dataclass(slots=True)
class Stage:
    """One step of the way of a change."""

    name: str
    word: str = "ok"
    level: Level = "good"
    facts: list[tuple[str, str]] = field(default_factory=list)
    url: str | None = None
    """The page with more of it."""

    def worse(self, level: Level, word: str) -> None:
        """Mark the step; a worse mark stays."""
        if self.level == "good" or (self.level == "warn" and level == "bad"):
            self.level, self.word = level, word


@dataclass(frozen=True, slots=True)
class Overview:
    """What the first page shows, at one moment."""

    at: datetime
    steps: tuple[Stage, ...]
    wrong: tuple[Concern, ...]
    roles: tuple[RoleState, ...]

    def url(self, condition: Concern) -> str | None:
        """The page about what a condition is about; ``None``: there is none."""
        return None if condition.view is None else view_url(condition.view)

    def as_json(self) -> bytes:
        """The conditions for a program: the same list as `everstate status --json` has."""
        return orjson.dumps({"at": self.at, "attention": self.wrong})


def overview(look: Looking, config: Config, app: App) -> Overview:
    """Look at the whole project; its cost is that of :meth:`Looking.look`."""
    seen = look.look()
    before = (_ways_in(seen, app), _log(seen), _archive(seen), _views(seen))
    steps = (*before, _ways_out(seen, config, app))
    return Overview(seen.at, steps, tuple(seen.conditions), seen.roles)


def _stage(seen: SeenProject, name: str, step: WayStep, page: str) -> Stage:
    """A step with the worst of its conditions."""
    stage = Stage(name, url=f"{PLACE}/{page}")
    for each in seen.conditions:
        if each.step == step:
            stage.worse(each.level, each.word)
    return stage


def _ways_in(seen: SeenProject, app: App) -> Stage:
    step = _stage(seen, "Ways in", "ways in", "sources")
    for source, name in _SOURCES.items():
        if found := app.entities_from(source):
            step.facts.append((name, _listed([each.name for each in found])))
    if seen.waiting_s is not None:
        step.facts.append(("oldest unpublished change", duration_text(seen.waiting_s)))
    if app.captures:
        step.facts.append(("captures", _listed(list(app.captures))))
    return step


def _log(seen: SeenProject) -> Stage:
    step = _stage(seen, "Log", "log", "log")
    if seen.topics is None:
        return step
    changes = [topic for topic in seen.topics if ".changes.g" in topic.name]
    dead = sum(topic.offsets for topic in seen.topics if topic.name.endswith(".dead"))
    kept_s = [topic.retention_s for topic in changes if topic.retention_s is not None]
    step.facts += [
        ("changes in it", _at_most(sum(topic.offsets for topic in changes))),
        ("topics", f"{len(seen.topics):,}"),
        ("keeps changes", duration_text(min(kept_s)) if kept_s else "for ever"),
        ("dead letters", _at_most(dead)),
    ]
    return step


def _at_most(offsets: int) -> str:
    """How many records so many offsets have: the markers of transactions take offsets, too."""
    return f"at most {offsets:,}" if offsets else "none"


def _archive(seen: SeenProject) -> Stage:
    step = _stage(seen, "Archive", "archive", "log")
    if seen.readers is None:
        step.worse("warn", "not known")
        return step
    mine = [each for each in seen.readers if each.reader == ARCHIVE]
    if not mine:
        step.worse("warn", "nothing yet")
        step.facts.append(("entity types", "nothing is archived yet"))
        return step
    late_s = max(each.lag_seconds for each in mine)
    changes = sum(each.lag_changes for each in mine)
    step.facts += [("behind", f"{changes:,} changes"), ("oldest", duration_text(late_s))]
    return step


def _views(seen: SeenProject) -> Stage:
    step = _stage(seen, "Views", "views", "views")
    if seen.views is None:
        return step
    live = [r for r in seen.views if r.part_of is None and r.status in (LIVE, "behind")]
    late_s = max((row.lag_seconds or 0.0 for row in live), default=0.0)
    lag = max((row.lag_changes or 0 for row in live), default=0)
    step.facts += [
        ("live", f"{len(live):,}"),
        ("greatest lag", f"{lag:,} changes, {duration_text(late_s)}"),
    ]
    for row in seen.views:
        if row.status in (BUILDING, WAITING):
            step.facts.append((f"{row.name}, version {row.version}", row.standing))
    if any(row.lag_changes is None for row in live):
        step.worse("warn", "lag not known")
    return step


def _ways_out(seen: SeenProject, config: Config, app: App) -> Stage:
    step = Stage("Readers")
    addresses = [state.address for state in seen.roles if state.address is not None]
    step.facts.append(("REST and streams", _listed(addresses) if addresses else "this server"))
    step.facts.append(("SQL", f"schema {config.views.schema_name}"))
    if app.derivations:
        step.facts.append(("derived topics", _listed(list(app.derivations))))
    if seen.views is None:
        step.worse("bad", "views do not answer")
    return step


def _listed(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_SOURCES: Final[Mapping[Source, str]] = {
    "store": "PostgreSQL and its outbox",
    "cassandra": "Cassandra",
    "log": "events",
    "commands": "commands",
    "capture": "captured databases",
}
