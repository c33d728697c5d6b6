"""What breaks a capture of MariaDB from outside: `doctor` and `cdc status` tell the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from test_cdc_doctor import ENTITIES, as_role, failed

from capture_cases import (
    MariaSource,
    capture_of,
    make_tables,
    maria_source,
)
from everstate.sources.cdc.capturing import Capturing
from running_stack import RunningStack

PASSWORD = "only-for-this-test"


class Breakage(NamedTuple):
    """Statements of the administrator, what they make the doctor find, and what undoes them.

    ``{db}``, ``{user}`` and ``{own}`` are the database, the connector's user and our table.
    """

    sql: tuple[str, ...]
    finding: str
    reason: str
    undo: tuple[str, ...] = ()


NOTES = "CREATE TABLE notes (id int PRIMARY KEY, {} varchar(80), body text)"
BROKEN = {
    "statements are logged": Breakage(
        ("SET GLOBAL binlog_format = 'STATEMENT'",), "binlog_format", "STATEMENT, wanted ROW",
        ("SET GLOBAL binlog_format = 'ROW'",)),
    "the log lacks columns": Breakage(
        ("SET GLOBAL binlog_row_image = 'MINIMAL'",), "binlog_row_image", "MINIMAL, wanted FULL",
        ("SET GLOBAL binlog_row_image = 'FULL'",)),
    "a table was dropped": Breakage(
        ("DROP TABLE notes",), "table {db}.notes", "there is none of that name"),
    "a table was renamed": Breakage(
        ("RENAME TABLE notes TO remarks",), "table {db}.notes", "there is none of that name"),
    "a table was made anew": Breakage(
        ("DROP TABLE notes", NOTES.format("heading")), "columns of {db}.notes", "title"),
    "the key is gone": Breakage(
        ("ALTER TABLE notes DROP PRIMARY KEY",), "key of {db}.notes", "there is no primary key"),
    "a column was renamed": Breakage(
        ("ALTER TABLE notes RENAME COLUMN title TO heading",), "columns of {db}.notes", "title"),
    "a column was dropped": Breakage(
        ("ALTER TABLE notes DROP COLUMN title",), "columns of {db}.notes", "title"),
    "it may not read a table": Breakage(
        ("REVOKE SELECT ON {db}.* FROM {user}",), "rights on {db}.notes", "lacks SELECT"),
    "it may not read the log": Breakage(
        ("REVOKE BINLOG MONITOR, REPLICATION SLAVE ON *.* FROM {user}",), "rights",
        "lacks REPLICATION SLAVE, BINLOG MONITOR"),
    "the password was changed": Breakage(
        ("ALTER USER {user} IDENTIFIED BY 'another'",), "connection", "Access denied"),
    "the user is locked": Breakage(
        ("ALTER USER {user} ACCOUNT LOCK",), "connection", "account is locked"),
    "the database was dropped": Breakage(
        ("DROP DATABASE {db}",), "connection", "Unknown database", ("CREATE DATABASE {db}",)),
    "the signals are gone": Breakage(
        ("DROP TABLE {own}",), "table {own}", "there is none"),
}  # fmt: skip


@pytest.fixture
def maria(mariadb: str) -> Iterator[MariaSource]:
    yield from maria_source(mariadb)


@pytest.mark.full
@pytest.mark.parametrize("case", BROKEN)
def test_status_and_doctor_see_what_breaks_a_capture_of_mariadb_from_outside(
    stack: RunningStack, topic_prefix: str, mariadb: str, maria: MariaSource, case: str
) -> None:
    log = stack.config.log.model_copy(update={"prefix": topic_prefix})
    config = stack.config.model_copy(update={"log": log})
    make_tables(maria)
    reader = f"reader_{topic_prefix}"
    user = f"{reader}@'127.0.0.1'"
    maria.run(
        f"CREATE USER {user} IDENTIFIED BY '{PASSWORD}'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {maria.schema}.* TO {user}",
        f"GRANT RELOAD, SHOW DATABASES, REPLICATION SLAVE, BINLOG MONITOR ON *.* TO {user}",
    )
    source = MariaSource(as_role(maria.dsn, reader))
    capturing = Capturing(config, capture_of(source), local=True, entities=ENTITIES)
    own = f"{maria.schema}.everstate_signals_{capturing.names.identifier}"
    named = {"db": maria.schema, "user": user, "own": own}
    with Capturing(config, capture_of(maria), local=True).database() as opened:
        opened.prepare()
    broken = BROKEN[case]
    try:
        assert (failed(capturing.check()), capturing.status().problems) == ({}, ())
        maria.run(*(each.format(**named) for each in broken.sql))
        found = failed(capturing.check())
        assert broken.reason in found[broken.finding.format(**named)].found
        status = capturing.status()
        told = {
            f"{each.name}: {each.found}" for name, each in found.items() if name != "connection"
        }
        assert told == set(status.problems)
        assert "connection" not in found or found["connection"].found in str(status.reason)
        assert PASSWORD not in f"{found} {status}"
    finally:
        MariaSource(mariadb).run(
            *(each.format(**named) for each in broken.undo), f"DROP USER {user}"
        )
