"""`everstate handlers`: how far handlers are, and what becomes of their parked changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from everstate.cli.console import AppSession, err
from everstate.cli.results import Result, Verbs, records
from everstate.declarations.handlers import handlers_of
from everstate.handling.tables import HandlerTables, handler_states
from everstate.handling.worker import begin
from everstate.postgres import Connection

handlers = Verbs(no_args_is_help=True, help="List handlers; retry, skip or reset their changes.")

GroupName = Annotated[str, typer.Argument(help="Group, or one of its handlers: billing.welcome.")]
ParkedIds = Annotated[
    list[int] | None, typer.Argument(help="Ids of `handlers show`, or use --all.")
]
AllParked = Annotated[bool, typer.Option("--all", help="All parked changes of the group.")]


@handlers.command("list")
def list_(session: AppSession) -> Result:
    """List the handlers of the app: how far each is, and how many changes are parked."""
    config, app = session.connected()
    columns = ("handler", "lag_changes", "lag_seconds", "parked", "waiting", "problem")
    return records(columns, handler_states(config, app.handlers.values()))


@handlers.command("show")
def show(session: AppSession, group: GroupName) -> Result:
    """Show the changes whose calls failed, the oldest first, and why."""
    columns = ("handler", "id", "key", "version", "calls", "next_call", "reason")
    found = ((t, row) for t, c in _each(session, group) for row in t.run(c, "failed", None))
    return records(columns, [(t.handler.title, *row) for t, row in found])


@handlers.command("retry")
def retry(
    session: AppSession, group: GroupName, ids: ParkedIds = None, all_: AllParked = False
) -> None:
    """Call the function again for parked changes, now."""
    _change(session, group, ids, all_, "retry", "are called again")


@handlers.command("skip")
def skip(
    session: AppSession, group: GroupName, ids: ParkedIds = None, all_: AllParked = False
) -> None:
    """Drop parked changes: they are never handled, and those behind them are called."""
    _change(session, group, ids, all_, "skip", "are skipped")


@handlers.command("reset")
def reset(
    session: AppSession,
    group: GroupName,
    to: Annotated[
        str, typer.Option("--to", help="beginning, now, a token, or a time (yesterday 18:00).")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
) -> Result:
    """Move handlers to another position, from which they go on; show what runs again."""
    config, app = session.connected()
    moves = [
        (tables, tables.positions(connection), *begin(config, app, tables.handler, to))
        for tables, connection in _each(session, group)
    ]
    rows = list[tuple[Any, ...]]()
    for tables, before, spots, log in moves:
        for number, (new, _) in spots.items():
            old, _ = before.get(number, (None, 0))
            again = max(0, (old or 0) - new)
            rows.append((tables.handler.title, number, old, new, again))
        if not dry_run:
            tables.place(spots, log, again=True)
    columns = ("handler", "partition", "position", "new_position", "runs_again")
    return records(columns, rows)


def _each(session: AppSession, group: str) -> Iterator[tuple[HandlerTables, Connection]]:
    config, app = session.connected()
    for handler in handlers_of(app.handlers, group):
        tables = HandlerTables(config, handler)
        with tables.connected() as connection:
            yield tables, connection


def _change(
    session: AppSession, group: str, ids: list[int] | None, all_: bool, name: str, said: str
) -> None:
    if bool(ids) == all_:
        raise typer.BadParameter("give either ids or --all")
    given = None if all_ else ids
    count = sum(t.run(c, name, given, given).rowcount for t, c in _each(session, group))
    err.print(f"{count} changes {said}")
