"""The doctor of captures: each planted defect is found, and its SQL mends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from pydantic import BaseModel

from capture_cases import (
    MariaSource,
    PostgresSource,
    capture_of,
    drop_role,
    make_tables,
    maria_source,
    settled,
    table_rows,
    without_nulls,
)
from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.database import Finding
from everstate.sources.cdc.refusing import peculiarities

ROLE, PASSWORD = "reader", "only-for-this-test"


class Customer(BaseModel):
    """A row of the tables that `make_tables` makes."""

    id: int
    name: str
    email: str | None


class Order(BaseModel):
    """What a customer ordered."""

    id: int
    customer_id: int
    amount: str


class Note(BaseModel):
    """A text that is stored apart."""

    id: int
    title: str | None
    body: str | None


ENTITIES = {
    model.__name__.lower(): EntityType(model.__name__.lower(), model, "id")
    for model in (Customer, Order, Note)
}


def failed(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings if each.outcome == "fail"}


def as_role(dsn: str, role: str) -> str:
    """The same database for another user."""
    parts = urlsplit(dsn)
    return f"{parts.scheme}://{role}:{PASSWORD}@{parts.hostname}:{parts.port}{parts.path}"


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


BROKEN: dict[str, tuple[str, str, str]] = {
    "it was dropped": ("DROP PUBLICATION {name}", "publication {name}", "there is none"),
    "it lacks deletes": (
        "ALTER PUBLICATION {name} SET (publish = 'insert, update')",
        "publication {name}", "it does not publish every kind of change"),
    "a table was taken out": (
        "ALTER PUBLICATION {name} DROP TABLE orders", "publication {name}", "lacks public.orders"),
    "a table was swapped": (
        "ALTER TABLE notes RENAME TO old; CREATE TABLE notes (id int PRIMARY KEY, "
        "title varchar(80), body text)", "publication {name}", "lacks public.notes"),
    "a table was dropped": (
        "DROP TABLE notes", "table public.notes", "there is none of that name"),
    "a column list": (
        "ALTER PUBLICATION {name} DROP TABLE notes; ALTER PUBLICATION {name} ADD TABLE notes "
        "(id, body)", "column public.notes.title", "leaves it out, so field title would never"),
    "a row filter": (
        "ALTER PUBLICATION {name} DROP TABLE notes; ALTER PUBLICATION {name} ADD TABLE notes "
        "WHERE (id > 7)", "rows of public.notes", "leaves out those without (id > 7)"),
    "a column was renamed": (
        "ALTER TABLE notes RENAME title TO heading", "columns of public.notes", "title"),
    "a column was dropped": ("ALTER TABLE notes DROP title", "columns of public.notes", "title"),
    "a column has another type": (
        "ALTER TABLE notes ALTER title TYPE float8[] USING NULL",
        "column public.notes.title", "is stored apart from the row of public.notes"),
    "the key is gone": (
        "ALTER TABLE notes DROP CONSTRAINT notes_pkey", "key of public.notes", "no primary key"),
    "the signals are gone": (
        "DROP TABLE everstate_capture.signals_{name}", "table everstate_capture.signals_{name}",
        "there is none"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_status_and_doctor_see_what_breaks_a_capture_of_postgres_from_outside(
    config: Config, database: str, case: str
) -> None:
    source = PostgresSource(database)
    make_tables(source)
    capturing = Capturing(config, capture_of(source), local=True, entities=ENTITIES)
    name = capturing.names.identifier
    with capturing.database() as opened:
        opened.prepare()
    assert capturing.status().problems == ()
    breaking, finding, reason = BROKEN[case]
    source.run(*breaking.format(name=name).split("; "))
    every = failed(capturing.check())
    found = every[finding.format(name=name)]
    assert reason in found.found
    del every[f"slot {name}"]  # A connector makes it, and none is here.
    assert {f"{e.name}: {e.found}" for e in every.values()} == set(capturing.status().problems)
    source.run(*found.sql)
    mended = case not in ("a table was dropped", "a column was renamed", "a column was dropped")
    if mended:
        with capturing.database() as opened:
            opened.prepare()
    assert (capturing.status().problems == ()) is mended


def test_a_publication_that_was_made_again_is_found_and_says_how_to_go_on(
    config: Config, database: str
) -> None:
    source = PostgresSource(database)
    make_tables(source)
    capturing = Capturing(config, capture_of(source), local=True, entities=ENTITIES)
    name = capturing.names.identifier
    with capturing.database() as opened:
        opened.prepare()
    source.run(("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,)))
    try:
        assert capturing.status().problems == ()
        source.run(f"DROP PUBLICATION {name}")
        with capturing.database() as opened:
            opened.prepare()
        found = failed(capturing.check())[f"publication {name}"]
        assert "made anew" in found.found
        assert "--new-epoch" in str(found.advice)
        assert found.found in str(capturing.status().problems)
    finally:
        source.run(("SELECT pg_drop_replication_slot(%s)", (name,)))


def test_a_role_that_owns_nothing_removes_what_it_may_and_names_the_rest(
    config: Config, postgres: tuple[PostgresSource, str]
) -> None:
    source, role = postgres
    with Capturing(config, capture_of(source), local=True).database() as opened:
        opened.prepare()
    source.run(f"GRANT USAGE ON SCHEMA everstate_capture TO {role}")
    reader = Capturing(config, capture_of(PostgresSource(as_role(source.dsn, role))), local=True)
    with reader.database() as opened:
        kept = {step.what: step.note for step in opened.remove() if step.done == "kept"}
    name = reader.names.identifier
    assert set(kept) == {
        f"publication {name}",
        f"table everstate_capture.signals_{name}",
        f"table everstate_capture.beats_{name}",
    }
    for note in kept.values():
        assert "must be owner" in str(note)
        source.run(str(note).partition("runs: ")[2])


@pytest.mark.parametrize("policy", ["USING (id > 1)", "USING (true)"])
def test_a_table_whose_rows_are_hidden_from_the_role_is_refused_until_it_sees_all(
    config: Config, postgres: tuple[PostgresSource, str], policy: str
) -> None:
    source, role = postgres
    source.run(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    capturing = Capturing(config, capture_of(PostgresSource(as_role(source.dsn, role))), local=True)
    name = "row security of public.notes"
    assert name not in failed(capturing.check())
    source.run(
        f"CREATE POLICY hiding ON notes {policy}", "ALTER TABLE notes ENABLE ROW LEVEL SECURITY"
    )
    finding = failed(capturing.check())[name]
    assert f"row security holds for {role}" in finding.found
    assert any(problem.startswith(name) for problem in capturing.status().problems)
    with pytest.raises(CaptureFailed, match=f"(?s)nothing was made.*{name}"):
        capturing.add()
    with pytest.raises(CaptureFailed, match=f"(?s)nothing was made.*{name}"):
        capturing.begin_epoch()
    source.run(*finding.sql)
    assert name not in failed(capturing.check())


def test_a_new_epoch_with_tables_of_another_owner_needs_no_right_that_the_doctor_did_not_ask_for(
    config: Config, connect: Any, postgres: tuple[PostgresSource, str]
) -> None:
    """The doctor's SQL makes them: the connector's role owns nothing."""
    source, role = postgres
    reader = PostgresSource(as_role(source.dsn, role))
    config = config.model_copy(update={"capture": connect.config.capture})
    capturing = Capturing(config, capture_of(reader), local=True)
    for _round in range(3):
        for finding in failed(capturing.check()).values():
            for statement in finding.sql:
                mend(source, statement)
    source.run("INSERT INTO notes (id, title) VALUES (1, 'a')")
    name = capturing.names.identifier
    try:
        capturing.add()
        assert settled(config, source) == without_nulls(table_rows(source))
        source.run(f"ALTER PUBLICATION {name} DROP TABLE notes")
        with pytest.raises(CaptureFailed, match="must be owner of publication"):
            capturing.begin_epoch()
        assert capturing.status().reads, "nothing was removed"
        source.run(f"ALTER PUBLICATION {name} ADD TABLE notes")
        capturing.begin_epoch()
        source.run("INSERT INTO notes (id, title) VALUES (2, 'b')")
        assert settled(config, source) == without_nulls(table_rows(source))
        assert capturing.status().problems == ()
    finally:
        capturing.remove(drop=True, topics=True)
        source.run(f"DROP PUBLICATION {name}", "DROP SCHEMA everstate_capture CASCADE")


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
        "CREATE TABLE named (id int PRIMARY KEY, a uuid, "
        "b uuid DEFAULT '00000000-0000-4000-8000-000000000001', c blob DEFAULT x'', "
        "d binary(2) DEFAULT x'ff27', e blob DEFAULT x'ff27', t text, n int, "
        "UNIQUE KEY by_hash (t), UNIQUE KEY by_start (t(20)), UNIQUE KEY by_tree (n) USING HASH)",
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
    capture = Capture(
        name="shop", kind="mariadb", dsn=maria.dsn,
        tables={f"{maria.schema}.named": Table(entity="n", drop=(*"abcdetn",))},
    )  # fmt: skip
    with Capturing(config, capture, local=True).database() as database:
        stops = failed(database.check_tables())
        defaults = [f"default of {maria.schema}.named.{name}" for name in "bc"]
        assert list(stops) == [*defaults, f"key by_hash of {maria.schema}.named"]
        maria.run(*(statement for each in stops.values() for statement in each.sql))
        assert failed(database.check_tables()) == {}
    found, capturing = looked_at(keyless=Table(entity="k"))
    assert found["key of"].outcome == "fail"
    with pytest.raises(CaptureFailed, match="nothing was made"):
        capturing.add()
    assert maria.rows(f"SHOW TABLES FROM {maria.schema} LIKE 'everstate%'") == []
    found, capturing = looked_at(keyless=Table(entity="k", key_columns=("code",)))
    assert found["key of"].outcome == "warn"
    with capturing.database() as database:
        table = f"{maria.schema}.keyless"
        peculiar = peculiarities(capturing.capture, {}, database.shapes({}))
        assert peculiar.keys == {table: ("code",)}
        assert peculiar.left_out == {table: {}}, "its binlog has generated columns"
        assert database.condition(table, {"code": 7}) == "(`code` = 7)"


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_database_that_is_away_is_a_finding(config: Config, kind: str) -> None:
    dsn = f"{kind}://somebody:secret@127.0.0.1:1/none"
    source = PostgresSource(dsn) if kind == "postgresql" else MariaSource(dsn)
    (finding,) = Capturing(config, capture_of(source), local=True).check()
    assert (finding.name, finding.outcome) == ("connection", "fail")
    assert "secret" not in finding.found
