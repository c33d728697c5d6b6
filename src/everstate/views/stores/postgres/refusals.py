"""Classifies PostgreSQL's errors of a write: the cause, and the change that caused it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from everstate.postgres import first_line, refusal
from everstate.views.batch import Batch
from everstate.views.images import text_of

MET_ANOTHER: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""The transaction is retried, and no view is marked as failed."""
OF_THE_DATA: Final = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    pa.ArrowException,
    # A message that Spark's parser can read, but the extraction of its images cannot.
    msgspec.MsgspecError,
    RecursionError,
)
"""Errors that a change causes, so that the change can be found by halving the batch."""
# Cheap tests for texts that jsonb may refuse: a number with a long exponent (parts of a UUID may
# look like one), and escapes that no text can store. PostgreSQL is asked only about the matches.
_EXPONENT: Final = "[eE][+-]?[0-9]{5}"
_LONG_NUMBER: Final = r"[:,\[\s]-?[0-9][0-9.]*[eE][+-]?[0-9]{5}"
_ESCAPE: Final = r"\\u(?:0000|[dD][89a-fA-F])"
_LONG_BYTES: Final = 131_072
# Disk full, shutdown, connection lost: errors of the server, not of the view.
_OF_THE_SERVER: Final = ("08", "53", "57P", "58")
_LIMITS: Final = psycopg.errors.ProgramLimitExceeded
_TOO_LONG: Final = (
    "A value by which the view groups or sorts is too long for an index, which holds about 2,700 "
    "bytes. Use the beginning of the value in the view's SQL, such as left(region, 200): the view "
    "is built again."
)
WriteChanges = Callable[[Batch], None]


def is_of_a_view(cause: BaseException) -> bool:
    """Whether an error of a write belongs to the view, so that the others can continue."""
    if isinstance(cause, OF_THE_DATA):
        return True
    if isinstance(cause, MET_ANOTHER) or not isinstance(cause, psycopg.Error):
        return False
    state = cause.sqlstate or ""
    return bool(state) and not state.startswith(_OF_THE_SERVER)


@contextmanager
def refused_as(error: Callable[[str], Exception]) -> Iterator[None]:
    """Translate what a view, or a core, cannot write; ``error`` gets the reason."""
    try:
        yield
    except (psycopg.Error, *OF_THE_DATA) as cause:
        if not is_of_a_view(cause):
            raise
        raise error(reason_of(cause)) from cause


@contextmanager
def view_refusals() -> Iterator[None]:
    """Translate what belongs to a view in the block to StatementRefused, or a class below it.

    The message says what to do where the definition must change.
    """
    try:
        yield
    except psycopg.Error as cause:
        if not is_of_a_view(cause):
            raise
        raise refusal(cause, reason_of(cause)) from cause


def suspects(changes: pa.Table) -> pa.Table:
    """Changes with a text that jsonb may refuse, by a cheap test. Cost: 0.4 µs per change."""
    signs = [_signs(chunk) for chunk in changes["raw_value"].chunks]
    return changes.filter(pa.chunked_array(signs, pa.bool_()))


def _signs(messages: pa.Array) -> pa.Array:
    signs = pc.greater(pc.binary_length(messages), _LONG_BYTES)
    exponents = pc.match_substring_regex(messages, _EXPONENT)
    if exponents.true_count:
        # Only for the few matches, because this test costs three times as much.
        long = pc.match_substring_regex(messages.filter(exponents), _LONG_NUMBER)
        signs = pc.or_(signs, pc.replace_with_mask(exponents, exponents, long))
    if b"\\" in text_of(messages):
        signs = pc.or_(signs, pc.match_substring_regex(messages, _ESCAPE))
    return signs


def culprit(
    write: WriteChanges, batch: Batch, rollback: Callable[[], None]
) -> tuple[int, str] | None:
    """Offset and key of the change that a write refuses, found by halving (C19).

    ``rollback`` undoes what a try has written. Returns ``None`` when an empty batch fails too.
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
    """The first line of an error, or its type; what to do, where the definition must change."""
    reason = first_line(cause)
    return f"{reason}. {_TOO_LONG}" if isinstance(cause, _LIMITS) else reason
