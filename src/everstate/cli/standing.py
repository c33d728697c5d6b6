"""What an answer may lack: notes on stderr when the views are behind, or do not go on."""

from __future__ import annotations

from contextlib import suppress

from everstate.app import App
from everstate.cli.console import err
from everstate.config import Config
from everstate.errors import EverstateError, NotFound
from everstate.serving import Reader

_LATE_S = 2.0
"""A view that follows is some milliseconds behind; that is no news."""


def say_how_far(reader: Reader, view: str) -> None:
    """Note on stderr what the view lacks that the log has, and why it does not go on."""
    with suppress(EverstateError):
        found = reader.standing(view)
        if found is None:
            return
        if found.reason is not None:
            _note(f"{view} is {found.status}, and may be behind: {found.reason}")
        if found.lag_changes and (found.lag_seconds or 0.0) > _LATE_S:
            _note(
                f"{found.lag_changes:,} changes in the log are not in {view} yet; "
                f"the oldest is {found.lag_seconds:,.0f} s old"
            )
        elif found.lag_changes is None:
            _note(f"Kafka does not answer: how far {view} is behind the log is not known")


def say_what_waits(config: Config, app: App, entity: str) -> None:
    """Note on stderr that changes of the store are not in the log yet."""
    if app.source_of(entity) != "store":
        return
    # Imported here: a look-up of another source needs no store.
    from everstate.sources.outbox.store import oldest_unpublished_s

    with suppress(EverstateError):
        waiting_s = oldest_unpublished_s(config)
        if waiting_s is not None and waiting_s > _LATE_S:
            _note(
                f"changes in the store are not in the log yet; the oldest is {waiting_s:,.0f} s old"
            )


def ahead_of_views(config: Config, app: App, reader: Reader, entity: str, key: str) -> int | None:
    """The version that the store has committed, when it is newer than that of the views.

    ``None`` when it is not, when it cannot be asked, and when PostgreSQL is not the entity type's
    source of truth.
    """
    if app.source_of(entity) != "store":
        return None
    from everstate.sources.outbox.store import version_of

    with suppress(EverstateError):
        stored = version_of(config, entity, key)
        if stored is not None and stored > (reader.newest_version(entity, key) or 0):
            return stored
    return None


def say_newer(entity: str, key: str, stored: int) -> None:
    """Note on stderr that the store has a newer version than the answer can be of."""
    _note(f"the store has {entity} {key!r} at version {stored}, which is not in the views yet")


def not_yet(entity: str, key: str, stored: int) -> NotFound:
    """The error for what the store has and the views have not."""
    return NotFound(
        f"the store has {entity} {key!r} at version {stored}, which is not in the views yet.",
        advice="`everstate run` brings it there; `everstate status` shows what does not run.",
    )


def _note(text: str) -> None:
    err.print(f"note: {text}", style="yellow", highlight=False)
