"""Supervises the roles of a running project: each is a child process, restarted when it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from everstate.errors import DataLoss, Fenced, InvalidConfig, RoleEnded
from everstate.parts import Journal, Part
from everstate.private import private_folder

logger = logging.getLogger(__name__)

_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0
"""A role that ran this long before it ended is restarted without delay."""
_FINAL = frozenset({InvalidConfig.exit_code, Fenced.exit_code, DataLoss.exit_code})
"""Exit codes after which a role is not restarted: a wrong setting, another process took over the
role (two supervisors must not compete), the log lost records that were not read."""
_PATIENCE_S = 60.0
_POLL_S = 0.2
_BEAT_S = 5.0
_TAIL_BYTES = 16_384
_ADVICE_LINES = 3


@dataclass
class SupervisedRole:
    """One supervised process: its command line, and its state."""

    name: str
    argv: Sequence[str]
    log: Path
    restarts: int = 0
    started_at: float = 0.0
    next_start_at: float = 0.0
    ended: RoleEnded | None = None
    """Why it is not restarted."""
    log_start: int = 0
    """Offset in its log file at which the present or last process began."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def delay_s(self) -> float:
        """How long it waits after it ended soon: the longer, the more often it was restarted."""
        return _BACKOFF_S[min(self.restarts, len(_BACKOFF_S) - 1)]


class Supervisor:
    """Starts the roles, restarts ended ones with growing delay, and stops all of them together.

    A role that ends for a reason that a restart cannot correct stays stopped; the others continue.
    When no role is left, the run ends with the reason of the role that ended first. ``journal`` has
    each role as a part: that it runs, or why it ended and when it is restarted.
    """

    def __init__(
        self, argv_of: Mapping[str, Sequence[str]], log_dir: Path, journal: Journal
    ) -> None:
        private_folder(log_dir)
        self.roles = [
            SupervisedRole(name, argv, log_dir / f"{name}.log") for name, argv in argv_of.items()
        ]
        self._journal = journal
        self._ended: list[RoleEnded] = []

    def run(self, stop: threading.Event, on_poll: Callable[[], None] | None = None) -> None:
        """Supervise until ``stop`` is set; raises RoleEnded when every role has ended for good."""
        beat_due = time.monotonic() + _BEAT_S
        try:
            while not stop.wait(_POLL_S):
                for role in self.roles:
                    self._look_after(role)
                if on_poll is not None:
                    on_poll()
                if len(self._ended) == len(self.roles):
                    raise self._ended[0]
                if time.monotonic() > beat_due:
                    self._journal.beat()
                    beat_due = time.monotonic() + _BEAT_S
        finally:
            started = [role.process for role in self.roles if role.process is not None]
            end_all(started, _PATIENCE_S)

    def _look_after(self, role: SupervisedRole) -> None:
        now = time.monotonic()
        if role.ended is not None:
            return
        if role.process is None:
            if now >= role.next_start_at:
                self._start_or_wait(role)
            return
        code = role.process.poll()
        if code is None:
            return
        role.process = None
        reason, advice = _last_words(role, code)
        advice = f"{advice} Its log is {role.log}.".strip()
        if code in _FINAL:
            role.ended = RoleEnded(role.name, code, reason, str(role.log))
            self._ended.append(role.ended)
            self._journal.note(role.name, Part("stopped", time.time(), reason, advice))
            return
        steady = now - role.started_at > _STEADY_S
        self._wait(role, 0.0 if steady else role.delay_s, reason, advice)
        role.restarts = 0 if steady else role.restarts + 1

    def _wait(self, role: SupervisedRole, delay_s: float, reason: str, advice: str) -> None:
        role.next_start_at = time.monotonic() + delay_s
        retry_at = time.time() + delay_s
        self._journal.note(role.name, Part("waiting", time.time(), reason, advice, retry_at))

    def _start_or_wait(self, role: SupervisedRole) -> None:
        """Start a role; where the system refuses that, it waits as one that ended."""
        try:
            self._start(role)
        except OSError as cause:
            reason = f"it cannot be started: {cause.strerror or cause}"
            self._wait(role, role.delay_s, reason, f"Its log would be {role.log}.")
            role.restarts += 1

    def _start(self, role: SupervisedRole) -> None:
        private_folder(role.log.parent)  # somebody may have deleted it
        with role.log.open("ab") as output:
            role.log_start = output.tell()
            # A session of its own: Ctrl-C reaches only the supervisor, which then stops the role.
            role.process = subprocess.Popen(
                role.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        role.started_at = time.monotonic()
        self._journal.running(role.name)


def end_all(processes: Iterable[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Send SIGTERM to all, wait for them together, and send SIGKILL to those that stay."""
    running = list(processes)
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(role: SupervisedRole, code: int) -> tuple[str, str]:
    """Why a role ended, and its advice: from its printed error, else its last line."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}", ""
    try:
        with role.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A file that was cut since holds only newer lines.
            begun = role.log_start if role.log_start <= size else 0
            file.seek(max(begun, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as cause:
        return f"it ended with code {code}, and its log cannot be read: {cause.strerror}", ""
    said = [line for line in lines if line.strip()]
    errors = [at for at, line in enumerate(said) if line.startswith("error:")]
    if not errors:
        return (said or [f"it ended with code {code}, and printed nothing"])[-1], ""
    after = said[errors[-1] + 1 :]
    return said[errors[-1]].removeprefix("error:").strip(), " ".join(after[:_ADVICE_LINES])


def role_argv(
    roles: Sequence[str], folder: Path, app: str, deployment: int | None = None
) -> list[str]:
    """Command line of a process for roles, run by this interpreter; it ends with its parent."""
    everstate = [sys.executable, "-m", "everstate.cli", "--project", str(folder)]
    only = [word for role in roles for word in ("--only", role)]
    argv = [*everstate, "run", *only, "--with-parent", str(os.getpid()), "--app", app]
    return argv if deployment is None else [*argv, "--deployment", str(deployment)]


def stop_on_signals(parent: int | None = None) -> threading.Event:
    """The event that SIGINT and SIGTERM set, so that current work is finished.

    ``parent``: also set when this process is gone, as for :func:`stop_with_parent`.
    """
    stop = threading.Event()

    def ask(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    if parent is not None:
        stop_with_parent(stop, parent)
    return stop


def stop_with_parent(stop: threading.Event, parent: int) -> None:
    """Set ``stop`` when the parent process is gone, so that roles end with a killed supervisor.

    ``parent``: its number, given by itself, because it may have ended before this call.
    """

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != parent:
                logger.warning("the supervisor ended; stopping")
                stop.set()

    threading.Thread(target=watch, name="with-parent", daemon=True).start()
