"""Logging: one line a record on stderr, fields as `key=value`, never a secret."""

from __future__ import annotations

import logging
import re
import sys


def without_secret(address: str) -> str:
    """Connection string or URL with its password struck out, fit for logs and messages."""
    # A URL may name the user in front of the host, and the password behind it all the same.
    address = re.sub(r"(://[^:/@\s]*):[^@\s]+@", r"\1:***@", address)
    return re.sub(r"(password\s*=\s*)('[^']*'|[^\s&]+)", r"\1***", address, flags=re.IGNORECASE)


def configure_logging(level: int = logging.INFO) -> None:
    """Send our records to stderr; called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("everstate")
    root.handlers = [handler]
    root.setLevel(level)
    root.propagate = False
