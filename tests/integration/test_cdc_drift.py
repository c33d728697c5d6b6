"""Captured tables beside the log: what the connector could not see is found, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
from pydantic import BaseModel

from capture_cases import (
    CONNECTED,
    LONG,
    OF_MYSQL,
    Source,
    Writer,
    eventually,
    make_tables,
    removed,
    source_of,
)
from clean_role import CleanRole, PlainCleaner, newest
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.topics import Topics
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.comparing import compare_with_table

pytestmark = CONNECTED


class Customer(BaseModel):
    id: int
    name: str
    email: str | None = None


class Order(BaseModel):
    id: int
    customer_id: int
    amount: str


class Note(BaseModel):
    id: int
    title: str | None = None
    body: str | None = None


@pytest.fixture(params=["postgresql", "mariadb", OF_MYSQL])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    """An empty database of each kind."""
    yield from source_of(request)


@contextmanager
def unseen(source: Source) -> Iterator[list[str]]:
    """Run the statements that are added, so that no connector sees them."""
    statements: list[str] = []
    yield statements
    if source.kind != "postgresql":
        source.run("SET sql_log_bin = 0", *statements)
        return
    with closing(psycopg.connect(source.dsn, autocommit=True)) as connection:
        found = connection.execute("SELECT pubname FROM pg_publication").fetchone()
        assert found is not None
        for each in (
            f'ALTER PUBLICATION "{found[0]}" DROP TABLE customers',
            *statements,
            f'ALTER PUBLICATION "{found[0]}" ADD TABLE customers',
        ):
            connection.execute(each.encode())


@pytest.mark.timeout(300)
def test_what_no_connector_sees_is_found_and_nothing_else_while_others_write(
    config: Config, source: Source
) -> None:
    app = App("shop")
    models: dict[str, type[BaseModel]] = {"customer": Customer, "order": Order, "note": Note}
    for name, model in models.items():
        app.entity(name, key="id", source="capture")(model)
    tables = {f"{source.schema}.{name}s": Table(entity=name) for name in models}
    app.capture("shop", kind=source.kind, dsn=source.dsn, tables=tables)
    make_tables(source)
    source.run(
        *(
            ("INSERT INTO customers (id, name) VALUES (%s, %s)", (number, "é"))
            for number in (-1, -2, -3, -4)
        )
    )
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    with removed(capturing):
        capturing.add()
        role = CleanRole(lambda: PlainCleaner(config, cleaning_of(config, app, "shop")), capturing)
        try:
            assert eventually(lambda: len(newest(config, "customer")) == 4, 60)
            with Writer(source) as writer:
                writer.wait(20)
                for entity in ("order", "note"):
                    found = compare_with_table(config, capturing, entity)
                    assert (found.drifted, found.pending_why, found.not_compared) == (0, None, {})
                writer.wait(20)
            with unseen(source) as statements:
                statements += [
                    "UPDATE customers SET name = 'other' WHERE id = -1",
                    "DELETE FROM customers WHERE id = -2",
                    "INSERT INTO customers (id, name) VALUES (-5, 'new')",
                ]
            found = compare_with_table(config, capturing, "customer")
            assert [(each.key, each.what, each.why) for each in found.keys] == [
                ("-1", "different", "other values of name"),
                ("-2", "extra", "no row has its key"),
                ("-5", "missing", "the log has no version of it"),
            ]
            assert (found.missing, found.different, found.extra, found.pending) == (1, 1, 1, 0)
            assert found.stored > 40
            assert compare_with_table(config, capturing, "note").drifted == 0
            role.end()
            source.run(("UPDATE notes SET body = %s", ("x" * LONG,)))
            found = compare_with_table(config, capturing, "note", wait_s=10)
            assert (found.drifted, found.pending) == (0, found.stored), found
            assert "records of its raw log are not cleaned yet" in str(found.pending_why)
            capturing.pause()
            found = compare_with_table(config, capturing, "note")
            assert (found.drifted, found.pending) == (0, found.stored), found
            assert found.pending_why == "its connector does not run"
            capturing.resume()
            role.begin()
            found = compare_with_table(config, capturing, "note")
            assert (found.drifted, found.pending, found.pending_why) == (0, 0, None), found
        finally:
            role.end()
