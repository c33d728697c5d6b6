"""The parts of a role: each runs in a thread, fails alone, and says why where people look.

A role (`everstate run --only pipeline`) does several independent jobs: it keeps views, archives
each entity type, cleans each capture. :func:`run_parts` runs each job in a thread of its own. A
part that fails stops alone; its reason is written to the role's state file, and the part is
started again after a while. The state file is what `everstate status` and `everstate run` show.

A part that waits for a server by itself says so with :func:`waits`, and :func:`works` when it goes
on. Both write to the state file of the part whose thread calls them, and do nothing elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from everstate.errors import EverstateError, Fenced
from everstate.private import private_folder, write_private

log = logging.getLogger(__name__)

PartState = Literal["running", "waiting", "stopped"]
"""``waiting``: it failed and is tried again at ``retry_at``; ``stopped``: it is not."""

Health = Literal["running", "not answering", "ended", "killed"]
"""``not answering``: its process is there, and has written nothing for a while; ``killed``: its
process is gone, and no part of it says why."""

_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
_STEADY_S: Final = 60.0
_JOIN_S: Final = 60.0
_BEAT_S: Final = 5.0
_SILENT_S: Final = 30.0
_START_TOLERANCE_S: Final = 1.5

Run = Callable[[threading.Event], None]


@dataclass(frozen=True, slots=True)
class Part:
    """How one part of a role is."""

    state: PartState
    since: float
    """Seconds since the epoch."""
    reason: str | None = None
    advice: str | None = None
    retry_at: float | None = None
    """Seconds since the epoch; ``None``: it runs, or is not started again."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """How one role is: its process, and each of its parts."""

    role: str
    pid: int
    started: float
    beat: float
    """When the role last said that it is alive, in seconds since the epoch."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    doing: str | None = None
    """What the role does before its parts run, such as `starting Spark`."""
    address: str | None = None
    """Where the role serves its API."""
    figures: str | None = None
    """Where the role serves its figures for Prometheus."""

    @property
    def health(self) -> Health:
        """How the role's process is now; asks the system whether it is there."""
        if not _is_there(self.pid, self.started):
            ended = any(part.state == "stopped" for part in self.parts.values())
            return "ended" if ended else "killed"
        return "running" if time.time() - self.beat < _SILENT_S else "not answering"


_figures: str | None = None
"""Where this process serves its figures."""


def figures_at(address: str | None) -> None:
    """This process serves its figures there; journals that are begun from now on say so."""
    global _figures
    _figures = address


class Journal:
    """The state file of one role, rewritten when a part changes and every five seconds.

    Each process has a file of its own, so that one that is ending does not remove its successor's.
    """

    def __init__(self, role: str, folder: Path) -> None:
        """``folder``: where the state files of a project are (:func:`states_folder`)."""
        now = time.time()
        self._state = RoleState(role, os.getpid(), now, now, figures=_figures)
        self._path = folder / f"{role}-{os.getpid()}.json"
        self._lock = threading.Lock()
        for path, former in _states(folder):
            if former.role == role and former.health in ("killed", "ended"):
                path.unlink(missing_ok=True)
        self._write()

    @property
    def state(self) -> RoleState:
        """What was written last."""
        return self._state

    def running(self, part: str) -> None:
        """The part works."""
        self.note(part, Part("running", time.time()))

    def failed(self, part: str, error: BaseException, retry_s: float | None) -> None:
        """The part ended with ``error``; it is started again in ``retry_s``, or not."""
        now = time.time()
        message = error.message if isinstance(error, EverstateError) else repr(error)
        advice = error.advice if isinstance(error, EverstateError) else None
        retry_at = None if retry_s is None else now + retry_s
        kind: PartState = "stopped" if retry_s is None else "waiting"
        self.note(part, Part(kind, now, message, advice, retry_at))

    def note(self, name: str, part: Part) -> None:
        """The part is as ``part`` says; ``since`` stays while only the time of retry changes."""
        with self._lock:
            before = self._state.parts.get(name)
            if before is not None and replace(before, since=0, retry_at=None) == replace(
                part, since=0, retry_at=None
            ):
                part = replace(part, since=before.since)
            if part == before:
                return
            parts = {**self._state.parts, name: part}
            self._replace(parts=parts)

    def doing(self, text: str | None) -> None:
        """What the role does before its parts run; ``None``: they run."""
        with self._lock:
            self._replace(doing=text)

    def serves(self, address: str) -> None:
        """The role answers requests at ``address``."""
        with self._lock:
            self._replace(address=address)

    def beat(self) -> None:
        """The role is alive."""
        with self._lock:
            self._replace()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Say every five seconds that the role is alive, and remove the file at the end."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(_BEAT_S):
                self.beat()

        threading.Thread(target=beat, name="beat", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            self.remove()

    def remove(self) -> None:
        """The role ended in order: nothing is left to say of it."""
        with self._lock:
            self._path.unlink(missing_ok=True)

    def _replace(self, **changed: Any) -> None:
        self._state = replace(self._state, beat=time.time(), **changed)
        self._write()

    def _write(self) -> None:
        """Replace the file in one step; a full disk must not end the role."""
        try:
            private_folder(self._path.parent)
            write_private(self._path, json.dumps(asdict(self._state)))
        except OSError as error:
            log.warning("the state of %s is not written: %s", self._state.role, error)


_own = threading.local()
"""``journal`` and ``part`` of the part that this thread runs."""


def waits(error: EverstateError, pause_s: float) -> None:
    """The part of this thread tries again in ``pause_s``, because of ``error``."""
    if hasattr(_own, "journal"):
        _own.journal.failed(_own.part, error, pause_s)


def works() -> None:
    """The part of this thread works: what it waited for is there."""
    if hasattr(_own, "journal") and _own.journal.state.parts[_own.part].state != "running":
        _own.journal.running(_own.part)


def note(name: str, part: Part) -> None:
    """Say how something is that the part of this thread looks after, such as one view."""
    if hasattr(_own, "journal"):
        _own.journal.note(name, part)


def states_folder(data_dir: Path) -> Path:
    """Where the roles of a project write their state files."""
    return data_dir / "roles"


def read_states(data_dir: Path) -> list[RoleState]:
    """The state files of a project's roles, by name; what cannot be read is left out.

    A role that was killed leaves its file: see :attr:`RoleState.health`. It counts only while no
    other process has the role.
    """
    by_role: dict[str, list[RoleState]] = {}
    for _, state in _states(states_folder(data_dir)):
        by_role.setdefault(state.role, []).append(state)
    found = []
    for states in by_role.values():
        there = [state for state in states if state.health in ("running", "not answering")]
        found += there or [max(states, key=lambda state: state.started)]
    return found


def _states(folder: Path) -> list[tuple[Path, RoleState]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            told: dict[str, Any] = json.loads(path.read_text("utf-8"))
            parts = {name: Part(**part) for name, part in told.pop("parts").items()}
            found.append((path, RoleState(**told, parts=parts)))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return found


def _is_there(pid: int, since: float) -> bool:
    """Whether the process runs that wrote a file at ``since``; its pid may be another's by now."""
    try:
        found = psutil.Process(pid)
        is_same = found.create_time() < since + _START_TOLERANCE_S
        return is_same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_parts(
    journal: Journal,
    parts: Mapping[str, Run],
    stop: threading.Event,
    *,
    fatal: tuple[type[BaseException], ...] = (),
    retry_s: tuple[float, ...] = _RETRY_S,
) -> None:
    """Run each part in a thread of its own until ``stop`` is set.

    A part that raises is started again after ``retry_s`` (the last pause is repeated; after a
    minute of work the pauses begin anew), and the others go on. One that is fenced is not started
    again: another process has its place. An error of a class in ``fatal`` ends all parts and is
    raised: starting a part again would not mend it, but a new process may. When every part is
    fenced, Fenced is raised.
    """
    failures: list[BaseException] = []
    fenced: dict[str, Fenced] = {}

    def supervised(name: str, run: Run) -> None:
        attempt = 0
        _own.journal, _own.part = journal, name
        while not stop.is_set():
            begun = time.monotonic()
            journal.running(name)
            try:
                run(stop)
                return
            except fatal as error:
                failures.append(error)
                journal.failed(name, error, None)
                log.error("%s ended: %s", name, error)
                stop.set()
                return
            except Fenced as error:
                journal.failed(name, error, None)
                log.error("%s ended: %s", name, error)
                fenced[name] = error
                if len(fenced) == len(parts):
                    failures.append(error)
                    stop.set()
                return
            except BaseException as error:
                if time.monotonic() - begun > _STEADY_S:
                    attempt = 0
                pause = retry_s[min(attempt, len(retry_s) - 1)]
                attempt += 1
                journal.failed(name, error, pause)
                traceback = None if isinstance(error, EverstateError) else error
                log.error(
                    "%s stopped and is started again in %.0f s: %s",
                    *(name, pause, error),
                    exc_info=traceback,
                )
                stop.wait(pause)

    journal.doing(None)
    threads = [
        threading.Thread(target=supervised, args=(name, run), name=name, daemon=True)
        for name, run in parts.items()
    ]
    for thread in threads:
        thread.start()
    while not stop.wait(_BEAT_S):
        journal.beat()
    for thread in threads:
        thread.join(_JOIN_S)
    if failures:
        raise failures[0]
    journal.remove()
