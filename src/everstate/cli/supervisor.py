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

log = logging.getLogger(__name__)

_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0
"""A role that ran this long before it died starts again without delay."""
_FINAL = frozenset({InvalidConfig.exit_code, Fenced.exit_code, DataLoss.exit_code})
"""Exit codes that starting again does not mend: a wrong setting or view, another process in the
role's place (two supervisors must not fight), a log that lost what was not read."""
_PATIENCE_S = 60.0
_POLL_S = 0.2
_TAIL_BYTES = 16_384


@dataclass
class Role:
    """One supervised process: how it is started, and how it has been doing."""

    name: str
    argv: Sequence[str]
    log: Path
    restarts: int = 0
    started_at: float = 0.0
    next_start_at: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        """`running`, or how many seconds until it is started again."""
        if self.process is not None:
            return "running"
        return f"again in {max(0.0, self.next_start_at - time.monotonic()):.0f} s"


class Supervisor:
    """Starts the roles, restarts what dies with growing delay, and stops all of them together.

    A role that ends for a reason which starting again does not mend ends all of them, and the
    reason is told.
    """

    def __init__(self, argv_of: Mapping[str, Sequence[str]], log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.roles = [Role(name, argv, log_dir / f"{name}.log") for name, argv in argv_of.items()]

    def run(self, stop: threading.Event, on_poll: Callable[[], None] | None = None) -> None:
        """Supervise until ``stop`` is set; raises RoleEnded with what the role said last."""
        try:
            while not stop.wait(_POLL_S):
                for role in self.roles:
                    self._look_after(role)
                if on_poll is not None:
                    on_poll()
        finally:
            self._stop()

    def _look_after(self, role: Role) -> None:
        now = time.monotonic()
        if role.process is None:
            if now >= role.next_start_at:
                self._start(role)
            return
        code = role.process.poll()
        if code is None:
            return
        role.process = None
        if code in _FINAL:
            raise RoleEnded(role.name, code, _last_error(role.log), str(role.log))
        steady = now - role.started_at > _STEADY_S
        delay = 0.0 if steady else _BACKOFF_S[min(role.restarts, len(_BACKOFF_S) - 1)]
        role.restarts = 0 if steady else role.restarts + 1
        role.next_start_at = now + delay
        log.warning("%s ended with code %s; starting it again in %.0f s", role.name, code, delay)

    def _start(self, role: Role) -> None:
        with role.log.open("ab") as output:
            role.process = subprocess.Popen(
                role.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        role.started_at = time.monotonic()

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


def _last_error(log: Path) -> str:
    """What a role said last of why it ended: its line of error, else its last line."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.strip()]
    errors = [line for line in said if line.startswith("error:")]
    return (errors or said or ["it said nothing"])[-1].removeprefix("error:").strip()


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
