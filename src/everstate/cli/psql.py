"""`everstate psql`: read the views with SQL, by this machine's psql or with one statement."""

from __future__ import annotations

import os
import shutil
from typing import Annotated, Final, NoReturn
from urllib.parse import quote, urlencode

import typer

from everstate.changes.json_numbers import decode
from everstate.cli.console import READING, JsonOption, Session
from everstate.cli.results import Result, records
from everstate.config import Config
from everstate.errors import InvalidQuery, LocalStackError, StatementRefused
from everstate.local import resolve
from everstate.postgres import connect_views, libpq_variables, read_json_by, settings_of

_AS_TEXT: Final = ("interval", "timetz")
"""Types whose values Python would change: a month has no number of days, and a time of day no
offset that JSON has."""
_PORT: Final = "5432"


def psql(
    session: Session,
    command: Annotated[
        str | None, typer.Option("-c", "--command", help="Run one statement and print its rows.")
    ] = None,
    url: Annotated[
        bool,
        typer.Option("--url", help="Print the connection string, with its password, for a client."),
    ] = False,
    json: JsonOption = False,
) -> Result:
    """Query the views in SQL: one statement with -c, or interactively if psql is installed."""
    if url and (json or command is not None):
        raise InvalidQuery("--url takes neither -c nor --json.")
    if json and command is None:
        raise InvalidQuery("--json needs a statement.", advice='Add -c "SELECT …".')
    config = resolve(session.config, needs=READING)
    if url:
        return Result(None, url_of(config))
    if command is None:
        _open(config)
    names, rows = ask(config, command)
    if json:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidQuery(
                f"two columns of the statement are called {twice[0]}, which JSON cannot have.",
                advice="Give each column a name of its own: SELECT … AS other_name.",
            )
    return records(names, rows)


def ask(config: Config, command: str) -> tuple[list[str], list[tuple[object, ...]]]:
    """Column names and rows of one read-only statement; raises InvalidQuery, Unavailable."""
    options = f"-c search_path={config.views.schema_name} -c default_transaction_read_only=on"
    dsn = config.views_dsn
    try:
        with connect_views(dsn, options=options, application_name="everstate psql") as connection:
            read_json_by(connection, decode, _AS_TEXT)
            # After a query a transaction cannot become one that writes, and a prepared statement is
            # only one: no COMMIT can come before another.
            connection.execute("BEGIN READ ONLY")
            connection.execute("SELECT 1")
            found = connection.execute(command.encode(), prepare=True)
            names = [column.name for column in found.description or ()]
            return names, found.fetchall() if names else []
    except StatementRefused as refused:
        raise InvalidQuery(
            f"PostgreSQL refused the statement: {refused.message}.",
            advice="Every view is a table with its name; `everstate views list` shows them.",
        ) from refused


def url_of(config: Config) -> str:
    """Connection string of the views, for clients that use libpq.

    The views' schema is in the search path, and the time zone is UTC.
    """
    given = settings_of(config.views_dsn)
    own = f"{given.pop('options', '')} -c search_path={config.views.schema_name} -c TimeZone=UTC"
    user, password = given.pop("user", ""), given.pop("password", "")
    places = _places(str(given.pop("host", "127.0.0.1")), str(given.pop("port", _PORT)))
    name = given.pop("dbname", "")
    login = quote(str(user), safe="") + (f":{quote(str(password), safe='')}" if password else "")
    options = urlencode({**given, "options": own.strip()}, quote_via=quote)
    return f"postgresql://{login}@{places}/{quote(str(name), safe='')}?{options}"


def _places(hosts: str, ports: str) -> str:
    """Each host with its port, as a URL has them; one port is that of all hosts."""
    each_host, each_port = hosts.split(","), ports.split(",")
    if len(each_port) == 1:
        each_port *= len(each_host)
    return ",".join(
        f"[{host}]:{port or _PORT}" if ":" in host else f"{quote(host, safe='')}:{port or _PORT}"
        for host, port in zip(each_host, each_port, strict=True)
    )


def _open(config: Config) -> NoReturn:
    """Replace this process by psql; pass the connection in the environment, hidden from `ps`."""
    program = shutil.which("psql")
    if program is None:
        raise LocalStackError(
            "psql is not installed on this machine.",
            advice='Run `everstate psql -c "SELECT …"`, or connect any client: `everstate '
            "psql --url` prints the connection string.",
        )
    for name, value in environment_of(config).items():
        os.putenv(name, value)
    os.execv(program, ["psql"])


def environment_of(config: Config) -> dict[str, str]:
    """The environment in which psql connects to the views; read-only unless the user changes it."""
    variables = libpq_variables()
    given = settings_of(config.views_dsn)
    options = f"{given.pop('options', '')} -c search_path={config.views.schema_name}"
    options += " -c TimeZone=UTC -c default_transaction_read_only=on"
    return {
        **{variables[name]: str(value) for name, value in given.items() if name in variables},
        "PGOPTIONS": options.strip(),
    }
