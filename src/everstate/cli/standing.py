"""Notes about changes that an answer lacks, when views lag or have stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from everstate.app import App
from everstate.cli.results import Aside
from everstate.config import Config
from everstate.errors import EverstateError, NotFound
from everstate.serving import ColdRead, Reader

_LATE_S = 2.0
"""A smaller lag is not reported: a view that follows the log always lags some milliseconds."""


def freshness(reader: Reader, view: str) -> Iterator[Aside]:
    """How far the view lags behind the log, and why it has stopped."""
    # Imported here: it loads the client of the log.
    from everstate.serving.overview import standing

    with suppress(EverstateError):
        found = standing(reader.config, reader.connection, view)
        if found is None:
            return
        row, lag = found
        if row.why is not None:
            yield note(f"{view} is {row.shown}, and may lag: {row.why}")
        if lag is None:
            yield note(f"Kafka does not answer: the lag of {view} is not known")
        elif lag.changes and lag.seconds > _LATE_S:
            yield note(
                f"{lag.changes:,} changes in the log are not in {view} yet; "
                f"the oldest is {lag.seconds:,.0f} s old"
            )


def cold_read(read: ColdRead | None) -> Iterator[Aside]:
    """That an answer is from the lake, and its cost."""
    if read is None:
        return
    log = f", and {read.from_log:,} changes of the log" if read.from_log else ""
    yield note(
        f"from the archive, as the views do not have it: {read.files_read:,} of {read.files:,} "
        f"files read{log}, in {read.seconds * 1000:,.0f} ms"
    )


def waiting(config: Config, app: App, entity: str) -> Iterator[Aside]:
    """That changes of the store are not in the log yet."""
    if app.source_of(entity) != "store":
        return
    # Imported here: a look-up of another source needs no store.
    from everstate.sources.outbox.marks import oldest_waiting_s

    with suppress(EverstateError):
        waiting_s = oldest_waiting_s(config)
        if waiting_s is not None and waiting_s > _LATE_S:
            yield note(
                f"changes in the store are not in the log yet; the oldest is {waiting_s:,.0f} s old"
            )


def ahead_of_views(config: Config, app: App, reader: Reader, entity: str, key: str) -> int | None:
    """The version that the store has committed, if it is newer than that of the views.

    ``None`` if it is not newer, if the store does not answer, and if no store of everstate is the
    entity type's source of truth.
    """
    source = app.source_of(entity)
    if source not in ("store", "cassandra"):
        return None
    with suppress(EverstateError):
        if source == "cassandra":
            from everstate.sources.stores.cassandra.store import version_of
        else:
            from everstate.sources.stores.postgres.store import version_of
        stored = version_of(config, entity, key)
        if stored is not None and stored > (reader.newest_version(entity, key) or 0):
            return stored
    return None


def newer_version(entity: str, key: str, stored: int | None) -> Iterator[Aside]:
    """That the store has a newer version than the answer; ``None``: it has not."""
    if stored is not None:
        what = f"the store has {entity} {key!r} at version {stored}"
        yield note(f"{what}, which is not in the views yet")


@contextmanager
def or_not_yet(config: Config, app: App, reader: Reader, entity: str, key: str) -> Iterator[None]:
    """Say of an entity that the block does not find when the store has it already."""
    try:
        yield
    except NotFound as error:
        stored = ahead_of_views(config, app, reader, entity, key)
        if stored is None:
            raise
        raise NotFound(
            f"the store has {entity} {key!r} at version {stored}, which is not in the views yet.",
            advice="`everstate run` applies it to the views; `everstate status` shows the roles.",
        ) from error


def note(text: str) -> Aside:
    """A line about an answer."""
    return Aside(f"note: {text}", "yellow")
