"""Notes about changes that an answer lacks, when views lag or have stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from everstate.app import App
from everstate.cli.results import Aside
from everstate.config import Config
from everstate.errors import EverstateError, NotFound
from everstate.serving import ColdRead, Reader

_LATE_S = 2.0
"""A smaller lag is not reported: a view that follows the log always lags some milliseconds."""


def freshness(reader: Reader, view: str) -> Iterator[Aside]:
    """How far the view lags behind the log, and why it has stopped."""
    with suppress(EverstateError):
        found = reader.standing(view)
        if found is None:
            return
        if found.reason is not None:
            yield note(f"{view} is {found.status}, and may lag: {found.reason}")
        if found.lag_changes and (found.lag_seconds or 0.0) > _LATE_S:
            yield note(
                f"{found.lag_changes:,} changes in the log are not in {view} yet; "
                f"the oldest is {found.lag_seconds:,.0f} s old"
            )
        elif found.lag_changes is None:
            yield note(f"Kafka does not answer: the lag of {view} is not known")


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
        stored = _version_of(source)(config, entity, key)
        if stored is not None and stored > (reader.newest_version(entity, key) or 0):
            return stored
    return None


def _version_of(source: str) -> Callable[[Config, str, str], int | None]:
    if source == "cassandra":
        from everstate.sources.stores.cassandra.store import version_of as of_cassandra

        return of_cassandra
    from everstate.sources.stores.postgres.store import version_of as of_postgres

    return of_postgres


def newer_version(entity: str, key: str, stored: int | None) -> Iterator[Aside]:
    """That the store has a newer version than the answer; ``None``: it has not."""
    if stored is not None:
        what = f"the store has {entity} {key!r} at version {stored}"
        yield note(f"{what}, which is not in the views yet")


def not_yet(entity: str, key: str, stored: int) -> NotFound:
    """The error for an entity that the store has and the views do not have yet."""
    return NotFound(
        f"the store has {entity} {key!r} at version {stored}, which is not in the views yet.",
        advice="`everstate run` applies it to the views; `everstate status` shows the roles.",
    )


def note(text: str) -> Aside:
    """A line about an answer."""
    return Aside(f"note: {text}", "yellow")
