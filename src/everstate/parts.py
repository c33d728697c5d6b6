"""The parts of a role: each runs in a thread, fails independently, and reports its state.

A role (`everstate run --only pipeline`) does several independent jobs: it keeps views, archives
each entity type, cleans each capture. :func:`run_parts` runs each job in a thread of its own. When
a part fails, the other parts continue; the reason is written to the role's state file, and the part
is started again after a while. `everstate status` and `everstate run` show the state file.

A part that waits for a server by itself reports that with :func:`waits`, and calls :func:`works`
when it continues. Both write to the role's state file for the part whose thread calls them, and do
nothing in other threads.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import psutil

from everstate.errors import EverstateError, Fenced, StatementRefused
from everstate.private import private_folder, write_private
from everstate.process_mark import start_mark
from everstate.retrying import Retries

logger = logging.getLogger(__name__)

PartState = Literal["running", "waiting", "stopped"]
"""``waiting``: it failed and is started again at ``retry_at``; ``stopped``: it is not."""

RoleHealth = Literal["running", "not answering", "ended", "killed"]
"""``not answering``: its process exists, but has not written its state for a while; ``killed``: its
process is gone, and none of its parts has recorded a reason."""

_RETRY_S: Final = (5.0, 15.0, 60.0, 300.0)
_STEADY_S: Final = 60.0
_RECOVERED_S: Final = 10.0
_JOIN_S: Final = 60.0
_BEAT_S: Final = 5.0
_SILENT_S: Final = 30.0
_START_TOLERANCE_S: Final = 1.5

PartRun = Callable[[threading.Event], None]


@dataclass(frozen=True, slots=True)
class Part:
    """State of one part of a role."""

    state: PartState
    since: float
    """Seconds since the epoch."""
    reason: str | None = None
    advice: str | None = None
    retry_at: float | None = None
    """Seconds since the epoch; ``None``: it runs, or is not started again."""


@dataclass(frozen=True, slots=True)
class PartConcern:
    """Something that a part found and that needs attention, while the part itself runs."""

    what: str
    why: str
    advice: str | None = None
    is_bad: bool = True
    """``False``: it was repaired already, or repairs itself."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """State of one role: its process, and each of its parts."""

    role: str
    pid: int
    started: float
    beat: float
    """Time of the role's last sign of life, in seconds since the epoch."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    doing: str | None = None
    """Activity of the role before its parts run, such as `starting Spark`."""
    address: str | None = None
    """Address at which the role serves its API."""
    figures: str | None = None
    """Address at which the role serves its metrics for Prometheus."""
    findings: Mapping[str, PartConcern] = field(default_factory=dict)
    mark: str | None = None
    """:func:`start_mark` of its process; ``None``: this system has none, or an earlier release
    wrote the state."""

    @property
    def health(self) -> RoleHealth:
        """Present state of the role's process; checks whether the process exists."""
        if not self._is_there():
            ended = any(part.state == "stopped" for part in self.parts.values())
            return "ended" if ended else "killed"
        return "running" if time.time() - self.beat < _SILENT_S else "not answering"

    def _is_there(self) -> bool:
        """Whether the process that wrote the state still runs; its pid may be reused."""
        try:
            found = psutil.Process(self.pid)
            is_same = (
                self.mark == start_mark(self.pid)
                if self.mark is not None
                else found.create_time() < self.started + _START_TOLERANCE_S
            )
            return is_same and found.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


_figures: str | None = None
"""Address at which this process serves its metrics."""


def figures_at(address: str | None) -> None:
    """Set the address at which this process serves its metrics, for journals created later."""
    global _figures
    _figures = address


class Journal:
    """The state file of one role, rewritten when a part changes and every five seconds.

    Each process has a file of its own, so that one that is ending does not remove its successor's.
    """

    def __init__(self, role: str, folder: Path) -> None:
        """``folder``: where the state files of a project are (:func:`states_folder`)."""
        now = time.time()
        pid = os.getpid()
        self._state = RoleState(role, pid, now, now, figures=_figures, mark=start_mark(pid))
        self._path = folder / f"{role}-{pid}.json"
        self._lock = threading.Lock()
        self._retried: dict[str, tuple[float, Part]] = {}
        """Parts that were started again: when (monotonic time), and the state of their failure."""
        for path, former in _states(folder):
            if former.role == role and former.health in ("killed", "ended"):
                self._state = replace(self._state, findings=former.findings)
                path.unlink(missing_ok=True)
        self._write()

    @property
    def state(self) -> RoleState:
        """The state that was written last."""
        return self._state

    def running(self, part: str) -> None:
        """Record that the part is running."""
        self.note(part, Part("running", time.time()))

    def failed(self, part: str, error: BaseException, retry_s: float | None) -> None:
        """Record that the part ended with ``error``; ``retry_s`` ``None``: it is not restarted."""
        now = time.time()
        message = error.message if isinstance(error, EverstateError) else repr(error)
        advice = error.advice if isinstance(error, EverstateError) else None
        retry_at = None if retry_s is None else now + retry_s
        kind: PartState = "stopped" if retry_s is None else "waiting"
        self.note(part, Part(kind, now, message, advice, retry_at))

    def retried(self, part: str) -> None:
        """Record that the part is started again: it is running when its state stays as it is."""
        with self._lock:
            self._retried[part] = (time.monotonic(), self._state.parts[part])

    def note(self, name: str, part: Part | None) -> None:
        """Record the state of a part; ``None``: it is gone.

        ``since`` stays when only ``retry_at`` changes.
        """
        with self._lock:
            before = self._state.parts.get(name)
            if part is None:
                others = {key: each for key, each in self._state.parts.items() if key != name}
                self._replace(parts=others)
                return
            if before is not None and replace(before, since=0, retry_at=None) == replace(
                part, since=0, retry_at=None
            ):
                part = replace(part, since=before.since)
            if part == before:
                return
            parts = {**self._state.parts, name: part}
            self._replace(parts=parts)

    def found(self, name: str, finding: PartConcern | None) -> None:
        """Record what a part found; ``None``: it is not there any more."""
        with self._lock:
            others = {key: each for key, each in self._state.findings.items() if key != name}
            findings = others if finding is None else {**others, name: finding}
            if findings != self._state.findings:
                self._replace(findings=findings)

    def doing(self, text: str | None) -> None:
        """Record what the role does before its parts run; ``None``: they run."""
        with self._lock:
            self._replace(doing=text)

    def serves(self, address: str) -> None:
        """Record that the role answers requests at ``address``."""
        with self._lock:
            self._replace(address=address)

    def beat(self) -> None:
        """Record a sign of life, and which parts have not failed again since they were retried."""
        with self._lock:
            parts = dict(self._state.parts)
            for name, (at, failed) in self._retried.items():
                if parts.get(name) == failed and time.monotonic() - at >= _RECOVERED_S:
                    parts[name] = Part("running", time.time())
            self._replace(parts=parts)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Record a sign of life every five seconds, and remove the file at the end."""
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
        """Remove the state file, because the role ended normally."""
        with self._lock:
            self._path.unlink(missing_ok=True)

    def _replace(self, **changed: Any) -> None:
        self._state = replace(self._state, beat=time.time(), **changed)
        self._write()

    def _write(self) -> None:
        """Replace the file atomically; a full disk must not end the role."""
        try:
            private_folder(self._path.parent)
            write_private(self._path, msgspec.json.encode(self._state).decode())
        except OSError as error:
            logger.warning("the state of %s is not written: %s", self._state.role, error)


_own = threading.local()
"""``journal`` and ``part`` of the part that this thread runs, and ``begin``, which begins more."""


def begins(name: str, run: PartRun) -> None:
    """Run one more part of this thread's role until the role ends; once for each name."""
    if hasattr(_own, "begin"):
        _own.begin(name, run)


def waits(error: EverstateError, pause_s: float) -> None:
    """Record that this thread's part waits ``pause_s`` before a retry, because of ``error``."""
    if hasattr(_own, "journal"):
        _own.journal.failed(_own.part, error, pause_s)


def works() -> None:
    """Record that this thread's part is running again after it waited."""
    if hasattr(_own, "journal") and _own.journal.state.parts[_own.part].state != "running":
        _own.journal.running(_own.part)


def tries() -> None:
    """Record that this thread's part still looks whether the reason of its failure has passed."""
    if hasattr(_own, "journal") and _own.journal.state.parts[_own.part].state != "running":
        _own.journal.retried(_own.part)


def stopped(error: EverstateError) -> None:
    """Record that this thread's part has stopped, because of ``error``; the others continue."""
    if hasattr(_own, "journal"):
        _own.journal.failed(_own.part, error, None)


def note(name: str, part: Part | None) -> None:
    """Record the state of something that this thread's part manages, such as one view.

    ``None``: it is not there any more.
    """
    if hasattr(_own, "journal"):
        _own.journal.note(name, part)


def found(name: str, finding: PartConcern | None) -> None:
    """Record what this thread's part found; ``None``: it is not there any more."""
    if hasattr(_own, "journal"):
        _own.journal.found(name, finding)


def states_folder(data_dir: Path) -> Path:
    """Folder of the state files of a project's roles."""
    return data_dir / "roles"


def read_states(data_dir: Path) -> list[RoleState]:
    """The states of a project's roles; unreadable state files are left out.

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
            found.append((path, msgspec.json.decode(path.read_bytes(), type=RoleState)))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def run_parts(
    journal: Journal,
    parts: Mapping[str, PartRun],
    stop: threading.Event,
    *,
    fatal: tuple[type[BaseException], ...] = (),
    retry_s: tuple[float, ...] = _RETRY_S,
) -> None:
    """Run each part in a thread of its own until ``stop`` is set.

    A part that raises is started again after ``retry_s`` (the last pause is repeated; after a
    minute of work the pauses start from the first), and the others continue. Its reason stays in
    the state file until it :func:`works`, or has run for ten seconds. A fenced part is not started
    again: another process has taken over. An error of a class in ``fatal`` ends all parts and is
    raised: only a new process may recover from it. Raises Fenced when every part is fenced.
    """
    failures: list[BaseException] = []
    fenced: set[str] = set()
    retries = Retries(steady_s=_STEADY_S)

    def supervised(name: str, run: PartRun) -> None:
        _own.journal, _own.part, _own.begin = journal, name, begin
        journal.running(name)
        while not stop.is_set():
            try:
                run(stop)
                return
            except BaseException as error:
                if isinstance(error, Fenced):
                    fenced.add(name)
                is_fatal = isinstance(error, fatal) or len(fenced) == len(parts)
                if is_fatal or name in fenced:
                    journal.failed(name, error, None)
                    logger.error("%s ended: %s", name, error)
                    if is_fatal:
                        failures.append(error)
                        stop.set()
                    return
                pause = retries.failed(name, retry_s)
                journal.failed(name, error, pause)
                is_plain = isinstance(error, EverstateError)
                traceback = None if is_plain and not isinstance(error, StatementRefused) else error
                text = "%s stopped and is started again in %.0f s: %s"
                logger.error(text, name, pause, error, exc_info=traceback)
                stop.wait(pause)
                journal.retried(name)

    threads = dict[str, threading.Thread]()

    def begin(name: str, run: PartRun) -> None:
        if name not in threads:
            given = (name, run)
            threads[name] = threading.Thread(target=supervised, args=given, name=name, daemon=True)
            threads[name].start()

    journal.doing(None)
    for name, run in parts.items():
        begin(name, run)
    while not stop.wait(_BEAT_S):
        journal.beat()
    for thread in list(threads.values()):
        thread.join(_JOIN_S)
    if failures:
        raise failures[0]
    journal.remove()
