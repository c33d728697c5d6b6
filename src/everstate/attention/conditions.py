"""A condition that needs attention, and the conditions that follow from what was seen. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from everstate.handling.tables import HandlerState
from everstate.parts import RoleState
from everstate.sections import AlertsConfig
from everstate.serving.answers import ViewRow
from everstate.serving.log_state import ARCHIVE, LogReader
from everstate.serving.troubles import how_text, troubles
from everstate.serving.words import duration_text
from everstate.sources.cdc.status import CaptureStatus
from everstate.views.control import LIVE

ConcernLevel = Literal["warn", "bad"]
WayStep = Literal["ways in", "log", "archive", "views", "roles"]
Area = Literal["always", "views", "log", "readers", "store", "captures", "handlers"]
"""Which question to a server gives a condition; ``always``: no server is needed."""

_WRITERS: Final = ("relay", "publisher", "commands")
_OBSERVERS: Final = ("serve", "alerts", "handlers")
"""Roles without which changes still advance."""
NO_ROLE: Final = "roles:none"
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Concern:
    """Something that needs attention: what, why, and what to do."""

    key: str
    """Identity: `kind:name`, the same at every look while the condition holds."""
    area: Area
    step: WayStep
    """The step of the way of a change to which it belongs."""
    word: str
    """Two or three words for the step, such as `5 min behind`."""
    what: str
    why: str
    advice: str | None = None
    level: ConcernLevel = "bad"
    view: str | None = None
    """The view that it is about."""

    @property
    def kind(self) -> str:
        """What sort of condition it is: the first part of its key."""
        return self.key.partition(":")[0]

    @property
    def text(self) -> str:
        """What and why, in one sentence."""
        return f"{self.what} {self.why}"


_KINDS: Final[Mapping[str, tuple[Area, WayStep, ConcernLevel]]] = {
    "archive-late": ("readers", "archive", "bad"),
    "capture-problem": ("captures", "ways in", "bad"),
    "capture-stopped": ("captures", "ways in", "bad"),
    "capture-wal": ("captures", "ways in", "warn"),
    "dead-letters": ("log", "log", "warn"),
    "handler-late": ("handlers", "log", "warn"),
    "handler-parked": ("handlers", "log", "bad"),
    "handler-unknown": ("handlers", "log", "bad"),
    "log-expired": ("readers", "archive", "bad"),
    "log-expires": ("readers", "archive", "bad"),
    "misfit": ("views", "views", "warn"),
    "outbox-late": ("store", "ways in", "warn"),
    "view-behind": ("views", "views", "warn"),
    "view-late": ("readers", "views", "warn"),
    "view-not-proved": ("views", "views", "bad"),
    "view-refused": ("always", "views", "warn"),
}


def concern(
    kind: str,
    place: str,
    word: str,
    what: str,
    why: str,
    advice: str | None = None,
    *,
    view: str | None = None,
) -> Concern:
    """A condition of a kind whose area, step and level are always the same."""
    area, step, level = _KINDS[kind]
    return Concern(f"{kind}:{place}", area, step, word, what, why, advice, level, view)


def _late(name: str, late_s: float, changes: int) -> tuple[str, str, str, str]:
    """Word, what, why and advice for a reader that is late."""
    late = f"{duration_text(late_s)} behind"
    why = f"is {late}: {changes:,} changes are not in it yet."
    return late, name, why, "`everstate status` shows whether the pipeline runs."


def of_roles(states: Sequence[RoleState]) -> Iterator[Concern]:
    """Roles and parts that do not run, and what running parts found."""
    for each in troubles(states):
        role = each.who.partition(":")[0]
        step: WayStep = "ways in" if role in _WRITERS else "roles"
        part = each.part
        if part is None:
            key = f"role:{each.who}"
            yield Concern(key, "always", step, f"{role} ended", each.who, each.process)
        else:
            why = f"{how_text(part, of_role=each.is_role)}: {part.reason or 'no reason given'}"
            level: ConcernLevel = "bad" if part.state == "stopped" else "warn"
            word, key = f"{each.who} {part.state}", f"part:{each.who}"
            yield Concern(key, "always", step, word, each.who, why, part.advice, level)
    for state in states:
        # They stay while a role is started again: only a new look at the same thing removes them.
        for name, found in state.findings.items():
            level = "bad" if found.is_bad else "warn"
            key, told = f"found:{name}", (found.what, found.why, found.advice, level)
            yield Concern(key, "always", "log", name, *told)
    if not any(state.role not in _OBSERVERS for state in states):
        why = "does not run in this project's folder: no new change reaches the archive or a view."
        told = ("everstate run", why, "Start `everstate run`.", "warn")
        yield Concern(NO_ROLE, "always", "roles", "does not run", *told)


def of_views(rows: Iterable[ViewRow], limits: AlertsConfig) -> Iterator[Concern]:
    """Views that are behind, late, or whose last proof does not hold."""
    for row in rows:
        name = f"view {row.name}, version {row.version}"
        place = f"{row.name}.{row.version}"
        if row.why is not None:
            yield concern("view-behind", place, row.status, name, row.standing, view=row.name)
        yield from _of_misfits(row, limits)
        if row.status not in (LIVE, "behind"):
            continue
        if row.verified is not None and not row.verified.get("holds"):
            what, why = f"view {row.name}:", "its last proof does not hold."
            advice = f"`everstate views rebuild {row.name}` builds it again."
            yield concern("view-not-proved", place, "not proved", what, why, advice, view=row.name)
        late_s = row.lag_seconds or 0.0
        if late_s > limits.view_behind_s:
            told = _late(name, late_s, row.lag_changes or 0)
            yield concern("view-late", place, *told, view=row.name)


def all_concerns(seen: Iterable[Concern], views: Sequence[Concern]) -> list[Concern]:
    """``seen`` and ``views``, without a part of a role whose view has a concern of its own."""
    named = {each.what for each in views if each.kind == "view-behind"}
    return [*(each for each in seen if each.what.partition(": ")[2] not in named), *views]


def _of_misfits(row: ViewRow, limits: AlertsConfig) -> Iterator[Concern]:
    """Fields whose values do not fit the model, with a new one in the last hours."""
    for each in row.misfits:
        if each.age_s > limits.dead_letters_hours * 3600:
            continue
        place = f"{each.entity}.{each.field}.{each.schema_version}"
        why = f"{each.text}: typed columns have NULL there."
        shows = "`everstate history` shows the state as it was written."
        advice = f"Correct the writer or the model; {shows}"
        yield concern("misfit", place, "misfits", f"{each.entity}:", why, advice, view=row.name)


def of_readers(readers: Iterable[LogReader], limits: AlertsConfig) -> Iterator[Concern]:
    """The archive when it is late; each reader for which the log may expire, or has expired."""
    for each in readers:
        late_s, place = each.lag_seconds, f"{each.reader}:{each.topic}"
        what = f"{each.reader} of {each.topic}:"
        if each.lost_offsets:
            why = f"the log dropped {each.lost_offsets:,} offsets that it had not read."
            advice = (
                "Set the topic's retention.ms higher. `everstate archive verify` names the records "
                "that no file has; a view is built again by `everstate views rebuild`."
            )
            yield concern("log-expired", place, "log expired", what, why, advice)
        if each.reader == ARCHIVE and late_s > limits.archive_behind_s:
            told = _late(f"archive of {each.topic}", late_s, each.lag_changes)
            yield concern("archive-late", each.topic, *told)
        if each.retention_s is not None and late_s > each.retention_s * limits.retention_share:
            why = f"the log holds what it has not read for {duration_text(each.holds_s)} only."
            advice = "Start `everstate run`, or raise the topic's retention.ms."
            yield concern("log-expires", place, "log expires", what, why, advice)


def of_handlers(states: Iterable[HandlerState], limits: AlertsConfig) -> Iterator[Concern]:
    """Handlers that are late, or not known, or have parked changes on which somebody decides."""
    for name, behind, late_s, parked, waiting, problem in states:
        if problem:
            yield concern("handler-unknown", name, "not known", f"handler {name}:", problem, None)
        if parked:
            told = f"{parked:,} changes are parked, and {waiting:,} are called again or wait."
            advice = f"`everstate handlers show {name}` shows the reasons."
            yield concern("handler-parked", name, "parked", f"handler {name}:", told, advice)
        if (late_s or 0.0) > limits.view_behind_s:
            late = f"{duration_text(late_s)} behind"
            told = f"is {late}: {(behind or 0) + (waiting or 0):,} changes are not handled yet."
            advice = f"`everstate handlers show {name}` shows failed calls; or run more processes."
            yield concern("handler-late", name, late, f"handler {name}", told, advice)


def of_dead_letters(recent: Iterable[str | None], hours: float) -> Iterator[Concern]:
    """Entity types with dead letters of the last ``hours``; ``None``: of no known entity type."""
    for entity in recent:
        name = entity or "records of no known entity type"
        why = f"new dead letters in the last {hours:g} h."
        advice = "`everstate dead list` shows the reasons."
        yield concern("dead-letters", entity or "?", "dead letters", f"{name}:", why, advice)


def of_capture(status: CaptureStatus, limits: AlertsConfig) -> Iterator[Concern]:
    """A capture that does not read, loses rows, or holds much WAL."""
    name = f"capture {status.capture}"
    advice = f"`everstate cdc status {status.capture}` shows more."
    if not status.reads:
        why = f"does not read ({status.state}): {status.reason or 'no reason given'}"
        yield concern("capture-stopped", status.capture, "capture stopped", name, why, advice)
    for subject, problems in _by_subject(status.problems).items():
        place, why = f"{status.capture}:{subject}", "; ".join(problems)
        yield concern("capture-problem", place, "rows are lost", name, why, advice)
    held = status.held_bytes or 0
    if held > limits.wal_mib * _MIB:
        why = f"holds {held / _MIB:,.0f} MiB of WAL in its database, which may fill its disk."
        yield concern("capture-wal", status.capture, "holds WAL", name, why, advice)


def _by_subject(problems: Iterable[str]) -> dict[str, list[str]]:
    """The problems of each subject, which stays the same while other problems come and go.

    It is the text before the colon, or a text without a colon, with ``#`` for each number in it.
    """
    found: dict[str, list[str]] = {}
    for problem in problems:
        subject, colon, _ = problem.partition(": ")
        subject = subject if colon else re.sub(r"\d+", "#", problem)
        found.setdefault(subject, []).append(problem)
    return found
