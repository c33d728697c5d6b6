"""`everstate down`: stop the local stack."""

from __future__ import annotations

from everstate.cli.console import Session
from everstate.cli.results import Result
from everstate.local import Stack


def down(session: Session) -> Result:
    """Stop the servers of this project; their data is kept."""
    stopped = Stack(session.config).stop_all()
    said = f"stopped {' and '.join(stopped)}" if stopped else "no server was running"
    return Result({"stopped": stopped}, said)
