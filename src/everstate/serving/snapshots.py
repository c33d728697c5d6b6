"""Reads the rows of a view together with their position in the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from everstate.changes.tokens import LogPosition, Token
from everstate.config import Config
from everstate.errors import (
    MissingColumn,
    MissingTable,
    NotFound,
    ThrottledChangesWait,
    Unavailable,
    UnknownView,
)
from everstate.postgres import Connection, identifier, one_snapshot
from everstate.serving.connection import WAIT_S, pooled
from everstate.serving.places import check_here, position_of, published
from everstate.serving.waiting import wait_until
from everstate.views.control import ViewStatuses, ViewVersion
from everstate.views.project import Project, known_views
from everstate.views.tables import latest_of

T = TypeVar("T")

_TRIES_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of a view, and the token from which the changes of its entity type continue.

    No change is missing between the two, and none is in both.
    """

    view: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    position: str | None
    """The token; ``None`` while throttled changes wait, which its rows lack."""

    @property
    def token(self) -> str:
        """The token; raises ThrottledChangesWait if there is none."""
        if self.position is None:
            raise ThrottledChangesWait(self.view)
        return self.position

    def records(self) -> list[dict[str, Any]]:
        """The rows as mappings of column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def read_snapshot(
    config: Config,
    project: Project,
    view: str,
    *,
    wait_for: str | None = None,
    wait_s: float = WAIT_S,
) -> Snapshot:
    """All rows of a view and its position, in one snapshot of the database.

    It blocks no writer and leaves nothing on the server; any number of readers may read at once.
    ``wait_for``: the rows are at least as new as this token; raises NotCaughtUp after ``wait_s``.
    Raises UnknownView, NotFound while the view does not exist, Unavailable. Cost: the rows in
    memory.
    """
    known = known_views(project)
    if view not in known:
        raise UnknownView(view, known)
    schema = config.views.schema_name

    def read(connection: Connection, standpoint: Standpoint) -> Snapshot:
        check_here(standpoint.version)
        query = f"SELECT * FROM {identifier(schema, view)}".encode()
        # A prepared statement would fail once the name is pointed to a version with other columns.
        cursor = connection.execute(query, prepare=False, binary=True)
        names = tuple(column.name for column in cursor.description or ())
        return Snapshot(view, names, cursor.fetchall(), standpoint.token)

    return at_one_position(config, project, view, read, wait_for=wait_for, wait_s=wait_s)


@dataclass(frozen=True, slots=True)
class Standpoint:
    """The version of a view that was read, and its position."""

    version: ViewVersion
    position: Mapping[str, LogPosition]
    """By entity type."""
    has_deferred: bool
    """Whether throttled changes before the position are not in the rows yet."""

    @property
    def token(self) -> str | None:
        """The position as a token; ``None``: no token says which changes the rows have."""
        return None if self.has_deferred else str(Token(self.position))


def at_one_position(
    config: Config,
    project: Project,
    view: str,
    read: Callable[[Connection, Standpoint], T],
    *,
    wait_for: str | None = None,
    wait_s: float = WAIT_S,
) -> T:
    """What ``read`` makes of a view, in one snapshot of the database with the view's position.

    ``read`` gets the connection and the position, and may be called again: when another version was
    published meanwhile. Raises as :func:`read_snapshot`; the caller checks that the
    view is declared.
    """
    if wait_for is not None:
        wait_until(config, project, view, wait_for, wait_s)
    for _ in range(_TRIES_MAX):
        try:
            with pooled(config.views_dsn) as connection:
                control = ViewStatuses(connection, config.views.schema_name)
                with one_snapshot(connection):
                    before = published(control, project, view)
                    position = position_of(control, before)
                    deferred = (before.name, before.version) in control.deferred(before.name)
                    found = read(connection, Standpoint(before, position, deferred))
                # The name may have been pointed to another version after the snapshot was taken:
                # PostgreSQL resolves names outside the snapshot. Then rows and position do not
                # match.
                after = published(control, project, view)
        except MissingTable as cause:
            raise NotFound(
                f"view {view} does not exist yet.", advice="`everstate run` creates it."
            ) from cause
        except MissingColumn:
            # The name was pointed to another version after its columns were read.
            continue
        if (before.version, before.published_at) == (after.version, after.published_at):
            return found
    raise Unavailable(f"view {view} is published too often now; try again later.")


def read_live(
    config: Config,
    project: Project,
    entity: str,
    take: Callable[[Iterator[tuple[str, int, Any]]], None],
) -> LogPosition:
    """Give key, version and state of each live entity to ``take``; returns their position.

    ``take`` may be called again, and then begins again. A thousand rows are in memory at a time.
    Raises NotFound and Unavailable as :func:`read_snapshot`.
    """
    name = identifier(config.views.schema_name, latest_of(entity))
    query = f"SELECT key, version, state FROM {name} WHERE state IS NOT NULL".encode()

    def read(connection: Connection, standpoint: Standpoint) -> LogPosition:
        with connection.cursor("live", binary=True) as cursor:
            cursor.itersize = 1_000
            take(iter(cursor.execute(query)))
        return standpoint.position[entity]

    return at_one_position(config, project, latest_of(entity), read)
