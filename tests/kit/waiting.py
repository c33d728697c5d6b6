"""Processes of a test, and waiting for what they, threads or servers do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from everstate.config import Config


def until(
    holds: Callable[..., object],
    within_s: float = 120.0,
    every_s: float = 0.05,
    *,
    what: Callable[[], object] = str,
) -> None:
    """Return when it holds; a test that waits longer fails, and tells ``what`` there is instead."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what() or f"not within {within_s:.0f} s"
        time.sleep(every_s)


def started(script: Path, config: Config) -> subprocess.Popen[bytes]:
    """A process of a script that reads its settings from its input."""
    child = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(config.model_dump_json().encode())
    child.stdin.close()
    return child
