"""What PostgreSQL's errors say about a write: whose fault it is, and which change's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import psycopg
import pyarrow as pa

from everstate.views.batch import Batch

MET_ANOTHER: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""The transaction is begun again, and no view is blamed."""
OF_THE_DATA: Final = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    pa.ArrowException,
    # A message that Spark's parser can read and the cutting of its images cannot.
    msgspec.MsgspecError,
    RecursionError,
)
"""The change's own fault, so that the change can be found by halving the batch."""
# Disk full, shutdown, connection lost: the server's trouble, not the view's.
_OF_THE_SERVER: Final = ("08", "53", "57P", "58")
Write = Callable[[Batch], None]


def is_of_a_view(cause: BaseException) -> bool:
    """Whether an error of a write is the view's own, so that the others can go on without it."""
    if isinstance(cause, OF_THE_DATA):
        return True
    if isinstance(cause, MET_ANOTHER) or not isinstance(cause, psycopg.Error):
        return False
    state = cause.sqlstate or ""
    return bool(state) and not state.startswith(_OF_THE_SERVER)


def culprit(write: Write, batch: Batch, rollback: Callable[[], None]) -> tuple[int, str] | None:
    """Offset and key of the change that a write refuses, found by halving (C19).

    ``rollback`` takes back what a try has written. ``None``: it refuses an empty batch too.
    """

    def refuses(part: Batch) -> bool:
        rollback()
        try:
            write(part)
        except OF_THE_DATA:
            return True
        return False

    good, bad = 0, batch.changes.num_rows
    if refuses(Batch(batch.changes.slice(0, 0), {})):
        return None
    while bad - good > 1:
        middle = (good + bad) // 2
        if refuses(batch.first(middle)):
            bad = middle
        else:
            good = middle
    found = batch.changes.slice(bad - 1, 1)
    return found["offset"][0].as_py(), found["key"][0].as_py()


def reason_of(cause: BaseException) -> str:
    """An error in one line."""
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
