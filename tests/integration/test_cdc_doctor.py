"""The doctor of captures: each planted defect is found, and its SQL mends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from capture_cases import (
    MariaSource,
    PostgresSource,
    capture_of,
    drop_role,
    make_tables,
    maria_source,
)
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.database import Finding

ROLE, PASSWORD = "reader", "only-for-this-test"


def failed(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings if each.outcome == "fail"}


def as_role(dsn: str, role: str) -> str:
    """The same database for another user."""
    parts = urlsplit(dsn)
    return f"{parts.scheme}://{role}:{PASSWORD}@{parts.hostname}:{parts.port}{parts.path}"


@pytest.fixture
def config(stack: Any, topic_prefix: str) -> Config:
    base: Config = stack.config
    return base.model_copy(update={"log": base.log.model_copy(update={"prefix": topic_prefix})})


@pytest.fixture
def postgres(database: str, topic_prefix: str) -> Iterator[tuple[PostgresSource, str]]:
    """A database, and a role that may do nothing in it but log in."""
    source, role = PostgresSource(database), f"{ROLE}_{topic_prefix}"
    make_tables(source)
    source.run(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
    yield source, role
    drop_role(database, role)


def test_everything_that_postgres_lacks_is_found_and_mended(
    config: Config, postgres: tuple[PostgresSource, str]
) -> None:
    source, role = postgres
    source.run("ALTER TABLE notes DROP CONSTRAINT notes_pkey")
    source.run("ALTER TABLE orders REPLICA IDENTITY NOTHING")
    reader = PostgresSource(as_role(source.dsn, role))
    capturing = Capturing(config, capture_of(reader), local=True)
    names = capturing.names.identifier
    first = failed(capturing.check())
    assert {
        "replication",
        "rights on public.customers",
        "key of public.notes",
        "identity of public.orders",
        f"publication {names}",
        f"slot {names}",
        f"table everstate_capture.signals_{names}",
        f"table everstate_capture.beats_{names}",
    } <= set(first)
    for _round in range(3):
        for finding in failed(capturing.check()).values():
            for statement in finding.sql:
                mend(source, statement)
    assert set(failed(capturing.check())) == {f"slot {names}"}, "the connector makes its slot"
    source.run(f"ALTER PUBLICATION {names} DROP TABLE public.customers")
    assert "public.customers" in failed(capturing.check())[f"publication {names}"].found
    source.run(f"ALTER PUBLICATION {names} ADD TABLE public.customers")
    source.run(f"ALTER PUBLICATION {names} SET (publish = 'insert')")
    assert "every kind" in failed(capturing.check())[f"publication {names}"].found


def mend(source: PostgresSource | MariaSource, statement: str) -> None:
    """Run one statement; one that an earlier finding's SQL did already is no error."""
    try:
        source.run(statement.rstrip(";"))
    except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject):
        return


def test_a_postgres_slot_that_nobody_reads_is_told_with_what_it_holds(
    config: Config, postgres: tuple[PostgresSource, str]
) -> None:
    source, _role = postgres
    capturing = Capturing(config, capture_of(source), local=True)
    name = capturing.names.identifier
    slot = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
    source.run((slot, (name,)))
    try:
        found = failed(capturing.check())[f"slot {name}"]
        assert "nobody reads it, holds" in found.found
    finally:
        source.run(("SELECT pg_drop_replication_slot(%s)", (name,)))


@pytest.fixture
def maria(mariadb: str) -> Iterator[MariaSource]:
    yield from maria_source(mariadb)


def test_everything_that_mariadb_lacks_is_found_and_mended(
    config: Config, maria: MariaSource, topic_prefix: str
) -> None:
    make_tables(maria)
    role = f"{ROLE}_{topic_prefix}"
    maria.run(f"CREATE USER {role}@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'")
    maria.run("ALTER TABLE notes DROP PRIMARY KEY", "SET GLOBAL binlog_row_image = 'MINIMAL'")
    maria.run(f"GRANT SELECT ON {maria.schema}.orders TO {role}@'127.0.0.1'")
    reader = MariaSource(as_role(maria.dsn, role))
    capturing = Capturing(config, capture_of(reader), local=True)
    own = capturing.names.identifier
    try:
        first = failed(capturing.check())
        assert {
            "rights",
            "binlog_row_image",
            f"rights on {maria.schema}.customers",
            f"rights on {maria.schema}.notes",
            f"rights on {maria.schema}.everstate_signals_{own}",
        } <= set(first)
        assert f"rights on {maria.schema}.orders" not in first
        for _round in range(3):
            for finding in failed(capturing.check()).values():
                for statement in finding.sql:
                    maria.run(statement.rstrip(";"))
        assert failed(capturing.check()) == {}
    finally:
        maria.run("SET GLOBAL binlog_row_image = 'FULL'", f"DROP USER {role}@'127.0.0.1'")


def test_mariadb_tables_whose_rows_would_be_lost_or_have_no_name_are_found(
    config: Config, maria: MariaSource
) -> None:
    maria.run(
        "CREATE TABLE p (id int PRIMARY KEY)",
        "CREATE TABLE c (id int PRIMARY KEY, p int, CONSTRAINT c_to_p FOREIGN KEY (p) "
        "REFERENCES p (id) ON DELETE CASCADE)",
        "CREATE TABLE keyless (code int, a int, b int AS (a * 2) STORED)",
    )

    def looked_at(**tables: Table) -> tuple[dict[str, Finding], Capturing]:
        declared = {f"{maria.schema}.{name}": table for name, table in tables.items()}
        capture = Capture(name="shop", kind="mariadb", tables=declared, dsn=maria.dsn)
        capturing = Capturing(config, capture, local=True)
        with capturing.database() as database:
            found = {each.name.removesuffix(f" {maria.schema}.{name}"): each
                     for name in tables for each in database.check_tables()
                     if each.name.endswith(f".{name}")}  # fmt: skip
        return found, capturing

    found, _ = looked_at(p=Table(entity="p"))
    assert {each.outcome for each in found.values()} == {"ok"}
    found, _ = looked_at(c=Table(entity="c"))
    assert "changed by c_to_p" in found["foreign keys of"].found
    found, capturing = looked_at(keyless=Table(entity="k"))
    assert found["key of"].outcome == "fail"
    with pytest.raises(CaptureFailed, match="nothing was made"):
        capturing.add()
    assert maria.rows(f"SHOW TABLES FROM {maria.schema} LIKE 'everstate%'") == []
    found, capturing = looked_at(keyless=Table(entity="k", key_columns=("code",)))
    assert found["key of"].outcome == "warn"
    with capturing.database() as database:
        table = f"{maria.schema}.keyless"
        assert database.peculiarities().keys == {table: ("code",)}
        assert database.peculiarities().generated == {}, "its binlog has generated columns"
        assert database.condition(table, [{"code": 7}]) == "(`code` = 7)"


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_database_that_is_away_is_a_finding(config: Config, kind: str) -> None:
    dsn = f"{kind}://somebody:secret@127.0.0.1:1/none"
    source = PostgresSource(dsn) if kind == "postgresql" else MariaSource(dsn)
    (finding,) = Capturing(config, capture_of(source), local=True).check()
    assert (finding.name, finding.outcome) == ("connection", "fail")
    assert "secret" not in finding.found
