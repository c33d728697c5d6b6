"""Logging: one line for each record on stderr, without secrets, as text that is safe to show."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Final

from everstate.sections import LoggingConfig

_PASSWORD: Final = re.compile(
    r"(password\s*=\s*)(?:'(?:\\.|[^'\\])*'?|(?:\\.|[^\s&\\])+)", re.IGNORECASE | re.DOTALL
)


def without_secret(address: str) -> str:
    """Connection string or URL with its password masked, for logs and messages."""
    # A password may contain an @: everything up to the last one is masked. A URL may name the user
    # before the host, and still have the password in its query.
    address = re.sub(r"(://[^:/@\s]*):\S+@", r"\1:***@", address)
    return _PASSWORD.sub(r"\1***", address)


_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters; ESC starts a terminal's commands
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that show text in another order
    "\u2028\u2029\ud800-\udfff]"  # line separators; surrogates, which cannot be encoded
)


def safe_text(text: str) -> str:
    """``text`` with each control character for terminals replaced by its JSON escape.

    Values and keys may come from any writer. Newlines and tabs stay.
    """
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _SafeFormatter(logging.Formatter):
    """Formats records safely; further lines of a record are indented, so none looks like one."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_text(super().format(record)).replace("\n", "\n    ")


class _JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line; a traceback is its field ``exception``."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # In JSON unsafe characters occur only in strings, where an escape is equal.
        return safe_text(json.dumps(fields, ensure_ascii=False))


class RateLimitedLogger:
    """Logs at most ten lines a minute, and reports how many it left out.

    For events that any client can cause, so that nobody can flood the log.
    """

    _LINES_MAX: Final = 10
    _WINDOW_S: Final = 60.0

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger, self._level = logger, level
        self._lock = threading.Lock()
        self._begun, self._lines = 0.0, 0

    def log(self, message: str, *arguments: object) -> None:
        """Log a line, unless the limit is reached."""
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


def configure_logging(section: LoggingConfig, role: str) -> None:
    """Send everstate's records to stderr; called once, by the command line.

    ``role``: what this process does, such as `relay`; it is a field of JSON records.
    """
    text = _SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if section.format == "json" else text)
    root = logging.getLogger("everstate")
    root.handlers = [handler]
    root.setLevel(section.level.upper())
    root.propagate = False
