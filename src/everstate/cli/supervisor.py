"""Keeps the roles of a running project alive: each is a child process, restarted when it dies."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from everstate.errors import DataLoss, Fenced, InvalidConfig, RoleEnded
from everstate.parts import Journal, Part
from everstate.private import private_folder

log = logging.getLogger(__name__)

_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0
"""A role that ran this long before it died starts again without delay."""
_FINAL = frozenset({InvalidConfig.exit_code, Fenced.exit_code, DataLoss.exit_code})
"""Exit codes that starting again does not mend: a wrong setting, another process in the role's
place (two supervisors must not fight), a log that lost what was not read."""
_PATIENCE_S = 60.0
_POLL_S = 0.2
_BEAT_S = 5.0
_TAIL_BYTES = 16_384
_ADVICE_LINES = 3


@dataclass
class Role:
    """One supervised process: how it is started, and how it has been doing."""

    name: str
    argv: Sequence[str]
    log: Path
    restarts: int = 0
    started_at: float = 0.0
    next_start_at: float = 0.0
    ended: RoleEnded | None = None
    """Why it is not started again."""
    log_start: int = 0
    """Where in its log the process that runs, or ran last, began."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        """`running`, `stopped`, or how many seconds until it is started again."""
        if self.process is not None:
            return "running"
        if self.ended is not None:
            return "stopped"
        return f"again in {max(0.0, self.next_start_at - time.monotonic()):.0f} s"


class Supervisor:
    """Starts the roles, restarts what dies with growing delay, and stops all of them together.

    A role that ends for a reason which starting again does not mend stays stopped, alone. When
    no role is left, the run ends with the reason of the role that ended first. ``journal`` has
    each role as a part: that it runs, or why it ended and when it is started again.
    """

    def __init__(
        self, argv_of: Mapping[str, Sequence[str]], log_dir: Path, journal: Journal
    ) -> None:
        private_folder(log_dir)
        self.roles = [Role(name, argv, log_dir / f"{name}.log") for name, argv in argv_of.items()]
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
                self._check_left()
                if time.monotonic() > beat_due:
                    self._journal.beat()
                    beat_due = time.monotonic() + _BEAT_S
        finally:
            self._stop()

    def _look_after(self, role: Role) -> None:
        now = time.monotonic()
        if role.ended is not None:
            return
        if role.process is None:
            if now >= role.next_start_at:
                self._start(role)
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
        delay = 0.0 if steady else _BACKOFF_S[min(role.restarts, len(_BACKOFF_S) - 1)]
        role.restarts = 0 if steady else role.restarts + 1
        role.next_start_at = now + delay
        retry_at = time.time() + delay
        self._journal.note(role.name, Part("waiting", time.time(), reason, advice, retry_at))

    def _check_left(self) -> None:
        if len(self._ended) == len(self.roles):
            raise self._ended[0]

    def _start(self, role: Role) -> None:
        with role.log.open("ab") as output:
            role.log_start = output.tell()
            # A session of its own: Ctrl-C in the terminal is for us, who then stop it in order.
            role.process = subprocess.Popen(
                role.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        role.started_at = time.monotonic()
        self._journal.running(role.name)

    def _stop(self) -> None:
        """SIGTERM to all, wait together, SIGKILL to what stays."""
        running = [role.process for role in self.roles if role.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE_S
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_words(role: Role, code: int) -> tuple[str, str]:
    """Why a role ended, and its advice: what it wrote as its error, else its last line."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}", ""
    with role.log.open("rb") as file:
        file.seek(max(role.log_start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.strip()]
    errors = [at for at, line in enumerate(said) if line.startswith("error:")]
    if not errors:
        return (said or [f"it ended with code {code}, and said nothing"])[-1], ""
    after = said[errors[-1] + 1 :]
    return said[errors[-1]].removeprefix("error:").strip(), " ".join(after[:_ADVICE_LINES])


def role_argv(role: str, folder: Path, app: str) -> list[str]:
    """Command line of one role, run by this interpreter; it ends when its parent is gone."""
    everstate = [sys.executable, "-m", "everstate.cli", "--project", str(folder)]
    return [*everstate, "run", "--only", role, "--with-parent", "--app", app]


def stop_on_signals(stop: threading.Event) -> None:
    """Make SIGINT and SIGTERM set ``stop``, so that work in hand is finished, not cut."""

    def ask(number: int, _frame: FrameType | None) -> None:
        log.info("%s: stopping", signal.Signals(number).name)
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def stop_with_parent(stop: threading.Event) -> None:
    """Set ``stop`` when the parent process is gone, so that a killed supervisor leaves nothing."""
    parent = os.getppid()

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != parent:
                log.warning("the supervisor is gone; stopping")
                stop.set()

    threading.Thread(target=watch, name="with-parent", daemon=True).start()
