"""`everstate psql`: the views in SQL, by the psql of this machine or by one statement."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict

from everstate.cli.console import READING, JsonOption, config_of, print_json, table
from everstate.cli.views import cell
from everstate.config import Config
from everstate.errors import InvalidQuery, LocalStackError
from everstate.local import connect
from everstate.telemetry import without_secret
from everstate.views.database import connect_views, views_errors

_ENVIRONMENT = {
    "host": "PGHOST",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
}


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("psql")(psql)


def psql(
    context: typer.Context,
    command: Annotated[
        str | None, typer.Option("-c", "--command", help="Run one statement and print its rows.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Ask the views in SQL: one statement with -c, else psql, where it is installed."""
    config = connect(config_of(context), needs=READING)
    if command is None:
        _open(config)
        return
    names, rows = ask(config, command)
    if json:
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        table(names, [[cell(value) for value in row] for row in rows])


def ask(config: Config, command: str) -> tuple[list[str], list[tuple[object, ...]]]:
    """Column names and rows of one statement that only reads; raises InvalidQuery, Unavailable."""
    options = f"-c search_path={config.views.schema_name} -c default_transaction_read_only=on"
    dsn = config.views_dsn
    with (
        views_errors(dsn),
        connect_views(dsn, options=options, application_name="everstate psql") as connection,
    ):
        try:
            found = connection.execute(command.encode())
            names = [column.name for column in found.description or ()]
            return names, found.fetchall() if names else []
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.InternalError) as cause:
            reason = str(cause).splitlines()[0]
            raise InvalidQuery(
                f"PostgreSQL refused the statement: {reason}.",
                advice="Every view is a table of its name; `everstate views list` shows them.",
            ) from cause


def _open(config: Config) -> None:
    """Become psql; the connection goes by the environment, which `ps` does not show."""
    program = shutil.which("psql")
    if program is None:
        raise LocalStackError(
            "psql is not installed on this machine.",
            advice='Ask with `everstate psql -c "SELECT …"`, or connect any client to '
            f"{without_secret(config.views_dsn)}, schema {config.views.schema_name}.",
        )
    given = conninfo_to_dict(config.views_dsn)
    for name, value in given.items():
        if name in _ENVIRONMENT:
            os.putenv(_ENVIRONMENT[name], str(value))
    os.putenv("PGOPTIONS", f"-c search_path={config.views.schema_name} -c TimeZone=UTC")
    os.execv(program, ["psql"])
