"""`everstate outbox`: the outbox in a service's own database."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from everstate.cli.console import READING, AppSession, Session, out
from everstate.cli.results import Piece, Result, ResultTable, Verbs
from everstate.config import Config, check_dsn
from everstate.errors import InvalidConfig
from everstate.local import resolve
from everstate.sources.outbox import (
    Installation,
    OutboxStatus,
    install_outbox,
    read_emitters,
    read_registered,
    read_status,
)
from everstate.sources.outbox.way_in import OutboxRelay
from everstate.sources.stores.postgres.database import OutboxConnection, connect, translated

outbox = Verbs(no_args_is_help=True, help="Install and inspect the outbox in a service's database.")

_LISTED_MAX = 100

DsnArgument = Annotated[
    str | None, typer.Argument(help="libpq connection string. Default: store.dsn.")
]


@outbox.command("install")
def install(
    session: AppSession,
    dsn: DsnArgument = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            help="Login role that may emit, as the service of its own name, or as SERVICE with "
            "ROLE=SERVICE.",
        ),
    ] = None,
    relay_role: Annotated[
        list[str] | None, typer.Option("--relay-role", help="Login role that runs the relay.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the SQL, and change nothing.")
    ] = False,
) -> None:
    """Create the outbox and its roles in a database, as far as they are missing.

    Afterwards the roles named with --role, now or before, may emit all entity types of the app
    whose source of truth is the store, or the log (those are facts).
    """
    config = session.config
    project_app = session.app()
    relay = OutboxRelay(config, project_app)
    wanted = Installation(
        entity_types=relay.entity_types,
        events=[each.name for each in relay.facts],
        roles=_services(role or ()),
        relay_roles=relay_role or (),
        message_bytes_max=config.log.message_bytes_max,
        ahead_hours=config.log.occurred_ahead_hours,
    )
    if show:
        sys.stdout.write(wanted.script())
        return
    with _database(config, dsn) as database:
        install_outbox(database, wanted)
    names = ", ".join(each.name for each in relay.entity_types)
    out.print(f"installed; may be emitted: {names}", highlight=False)


def _services(given: Sequence[str]) -> dict[str, list[str]]:
    """Services that each role may name: ``ROLE`` or ``ROLE=SERVICE``, repeatable."""
    found: dict[str, list[str]] = {}
    for each in given:
        role, named, service = each.partition("=")
        if not role or (named and not service):
            raise InvalidConfig("--role", each, "ROLE or ROLE=SERVICE")
        found.setdefault(role, []).append(service or role)
    return found


@outbox.command("status")
def status(session: Session, dsn: DsnArgument = None) -> Result:
    """Show registered entity types, and the changes that are not published yet."""
    with _database(session.config, dsn) as database:
        registered = read_registered(database)
        emitters = read_emitters(database)
        moved = read_status(database)
    rows = [(r.entity, r.schema_version, "facts" if r.is_event else "changes") for r in registered]
    may = [(role, ", ".join(services)) for role, services in emitters.items()]
    return Result(
        {"registered": registered, "emitters": emitters, "outbox": moved},
        ResultTable(("entity", "schema version", "kind"), rows),
        *([ResultTable(("role", "may emit as service"), may)] if may else []),
        *_told(moved),
    )


def _told(moved: OutboxStatus) -> Iterator[Piece]:
    counts = (moved.batch, moved.oldest_unpublished_s, moved.blocked_count, moved.parked_count)
    yield ResultTable(
        ("newest batch", "oldest unpublished s", "blocked", "waiting changes"), [counts]
    )
    if moved.blocked:
        rows = [(e.entity, e.key, e.version, e.since, e.reason) for e in moved.blocked]
        columns = ("blocked because of", "key", "version", "since", "reason")
        yield ResultTable(columns, rows[:_LISTED_MAX])
    if moved.blocked_count > _LISTED_MAX:
        yield f"… and {moved.blocked_count - _LISTED_MAX} more"


@contextmanager
def _database(config: Config, dsn: str | None) -> Iterator[OutboxConnection]:
    if dsn is not None:
        check_dsn("DSN", dsn)
    address = dsn or resolve(config, needs=READING).store_dsn
    with (
        translated(address, "the outbox"),
        connect(address, "everstate-outbox") as database,
    ):
        yield database
