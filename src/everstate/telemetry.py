"""Logging: one line a record on stderr, never a secret, and text that is safe to show."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from typing import Final

_PASSWORD: Final = re.compile(
    r"(password\s*=\s*)(?:'(?:\\.|[^'\\])*'?|(?:\\.|[^\s&\\])+)", re.IGNORECASE | re.DOTALL
)


def without_secret(address: str) -> str:
    """Connection string or URL with its password struck out, fit for logs and messages."""
    # A password may hold an @ itself: all goes up to the last one. A URL may name the user in
    # front of the host, and the password behind it all the same.
    address = re.sub(r"(://[^:/@\s]*):\S+@", r"\1:***@", address)
    return _PASSWORD.sub(r"\1***", address)


_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters; ESC begins a terminal's commands
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that show text in another order
    "\u2028\u2029\ud800-\udfff]"  # line separators; what no encoding can write
)


def safe_text(text: str) -> str:
    """``text`` with each character that a terminal obeys written in JSON's escapes.

    Values and keys come from anybody who may write. Newlines and tabs stay.
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _SafeFormatter(logging.Formatter):
    """Writes records safely; further lines of one are indented, so none looks like a record."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_text(super().format(record)).replace("\n", "\n    ")


class Sparingly:
    """Logs at most ten lines a minute, and says how many it left out.

    For what anybody can cause: a log that somebody else can fill is of no use.
    """

    _LINES_MAX: Final = 10
    _WINDOW_S: Final = 60.0

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger, self._level = logger, level
        self._lock = threading.Lock()
        self._begun, self._lines = 0.0, 0

    def log(self, message: str, *arguments: object) -> None:
        """Log a line, unless there were too many."""
        now = time.monotonic()
        with self._lock:
            left_out = 0
            if now - self._begun >= self._WINDOW_S:
                left_out = max(0, self._lines - self._LINES_MAX)
                self._begun, self._lines = now, 0
            self._lines += 1
            wanted = self._lines <= self._LINES_MAX
        if left_out:
            self._logger.log(self._level, "%d more lines like the next were left out", left_out)
        if wanted:
            self._logger.log(self._level, message, *arguments)


def configure_logging(level: int = logging.INFO) -> None:
    """Send our records to stderr; called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("everstate")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False
