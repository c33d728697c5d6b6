"""A captured MySQL: what only it has, in the doctor, in the binlog, and in its connector's rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, create_model
from test_cdc_doctor import PASSWORD, ROLE, as_role, failed

from capture_cases import (
    CONNECTED,
    MariaSource,
    capture_of,
    eventually,
    make_tables,
    maria_source,
    raw_count,
    raw_records,
    removed,
)
from clean_role import CleanRole, PlainCleaner, changelog
from everstate.app import App
from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed
from everstate.log.topics import Topics
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of

pytestmark = [*CONNECTED, pytest.mark.full]

SETTINGS = {
    "binlog_row_image": ("MINIMAL", "FULL"),
    "binlog_row_value_options": ("PARTIAL_JSON", ""),
    "binlog_transaction_compression": ("ON", "OFF"),
}
"""Settings of the server by which rows would be lost, and what the doctor sets instead."""


class Item(BaseModel):
    id: int
    doc: dict[str, int] | None = None


@pytest.fixture
def source(mysql: str) -> Iterator[MariaSource]:
    yield from maria_source(mysql, "mysql")


def test_everything_that_mysql_lacks_is_found_and_mended(
    config: Config, source: MariaSource, topic_prefix: str
) -> None:
    make_tables(source)
    role = f"{ROLE}_{topic_prefix}"
    user = f"{role}@'127.0.0.1'"
    source.run(f"CREATE USER {user} IDENTIFIED BY '{PASSWORD}'")
    source.run(
        "ALTER TABLE notes DROP PRIMARY KEY", f"GRANT SELECT ON {source.schema}.orders TO {user}",
        *(f"SET GLOBAL {name} = '{bad}'" for name, (bad, _) in SETTINGS.items()),
    )  # fmt: skip
    reader = MariaSource(as_role(source.dsn, role), "mysql")
    capturing = Capturing(config, capture_of(reader), local=True)
    try:
        first = failed(capturing.check())
        rights = [f"rights on {source.schema}.{name}" for name in ("customers", "notes")]
        assert {*SETTINGS, "rights", *rights} <= set(first)
        assert f"rights on {source.schema}.orders" not in first
        for _round in range(3):
            for finding in failed(capturing.check()).values():
                for statement in finding.sql:
                    source.run(statement.rstrip(";"))
        assert list(failed(capturing.check())) == ["connector"], "there is none yet"
        # Capturing needs no right to drop tables; only the end of this test does.
        source.run(f"GRANT DROP ON {source.schema}.* TO {user}")
        with removed(capturing):
            capturing.add()
            assert eventually(lambda: failed(capturing.check()) == {}, 30)
            source.run("INSERT INTO customers (id, name) VALUES (1, 'x')")
            assert eventually(lambda: raw_count(config, "customers") == 1, 60), capturing.status()
    finally:
        source.run(*(f"SET GLOBAL {name} = '{good}'" for name, (_, good) in SETTINGS.items()))
        source.run(f"DROP USER {user}")


def end(source: MariaSource, *statements: str) -> None:
    source.run("SET autocommit = 1", *statements)


@pytest.mark.timeout(300)
def test_what_the_connector_skips_or_publishes_too_early_is_reported_until_a_new_epoch(
    config: Config, source: MariaSource
) -> None:
    source.run("CREATE TABLE items (id int PRIMARY KEY, doc json)")
    source.run("""INSERT INTO items VALUES (1, '{"a": 1}')""")
    app = App("shop")
    app.entity("item", key="id", source="capture")(Item)
    table = f"{source.schema}.items"
    app.capture("shop", kind="mysql", dsn=source.dsn, tables={table: Table(entity="item")})
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    with Topics(config) as topics:
        topics.ensure(app.entities)

    def states(key: int) -> list[Any]:
        found = [each for each in changelog(config, "item") if each["key"] == str(key)]
        return [each["currentEntityState"] for each in found]

    def problems() -> str:
        return "\n".join(capturing.status().problems)

    role = None
    with removed(capturing):
        try:
            capturing.add()
            role = CleanRole(
                lambda: PlainCleaner(config, cleaning_of(config, app, "shop")), capturing
            )
            assert eventually(lambda: len(states(1)) == 1, 90), "cleaning runs"
            source.run(
                "SET SESSION binlog_row_value_options = PARTIAL_JSON",
                "UPDATE items SET doc = JSON_SET(doc, '$.a', 2)",
            )
            assert eventually(lambda: "changed parts of JSON" in problems(), 60), problems()
            with source.session() as cursor:
                for each in ("XA START 'x'", "INSERT INTO items (id) VALUES (2)", "XA END 'x'"):
                    cursor.execute(each)
                cursor.execute("XA PREPARE 'x'")
            assert eventually(lambda: len(states(2)) == 1, 30), "it is published when prepared"
            end(source, "XA ROLLBACK 'x'")
            assert eventually(lambda: "XA transaction was rolled back" in problems(), 60)
            capturing.begin_epoch()
            assert eventually(lambda: states(1)[1:] == [{"id": 1, "doc": {"a": 2}}], 60)
            assert eventually(lambda: states(2)[1:] == [None], 60), states(2)
            assert eventually(lambda: capturing.status().well, 60), capturing.status()
        finally:
            if role is not None:
                role.end()
            for *_, name in source.rows("XA RECOVER"):
                end(source, f"XA ROLLBACK '{name}'")


def test_a_generated_key_captures_a_table_and_a_text_of_json_needs_its_type(
    config: Config, source: MariaSource
) -> None:
    source.run(
        "SET SESSION sql_generate_invisible_primary_key = ON",
        "CREATE TABLE items (doc json, hidden int INVISIBLE)",
        """INSERT INTO items (doc, hidden) VALUES ('{"b": 1.50}', 7)""",
    )
    made = create_model("Item", my_row_id=(int, ...), doc=(str, ...), hidden=(int, ...))
    entities = {"item": EntityType("item", made, "my_row_id")}

    def capturing_of(**options: Any) -> Capturing:
        tables = {f"{source.schema}.items": Table(entity="item", **options)}
        capture = Capture(name="shop", kind="mysql", dsn=source.dsn, tables=tables)
        return Capturing(config, capture, local=True, entities=entities)

    with pytest.raises(CaptureFailed, match=r"items\.doc: .* types=\{'doc': 'json'\}"):
        capturing_of().add()
    with removed(capturing_of(types={"doc": "json"})) as capturing:
        capturing.add()
        assert eventually(lambda: raw_count(config, "items") == 1, 60), capturing.status()
        source.run("""INSERT INTO items (doc, hidden) VALUES ('{"b": 2}', 8)""")
        assert eventually(lambda: raw_count(config, "items") == 2, 60), capturing.status()
        rows = [json.loads(record.value or b"")["after"] for _, record in raw_records(config)]
    assert [(each["my_row_id"], each["hidden"]) for each in rows] == [(1, 7), (2, 8)]
