"""Connect is killed while it writes a source transaction: each row once, the block whole (C10).

A connector that starts again begins the transaction anew: it writes a second BEGIN, counts from 1,
and its END counts only the rest. Rows of one COPY share a place in PostgreSQL's log.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from capture_cases import CONNECTED, PostgresSource, eventually, raw_count
from clean_role import CleanRole, broken_laws, changelog
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of

pytestmark = CONNECTED

TABLES = ("items", "lines")
ROWS, LINES = 30_000, 10_000
KILLED_AFTER = 2_000
"""Records of the transaction that are in the raw log when Connect is killed."""


class Item(BaseModel):
    """A row of either table."""

    id: int
    note: str


def shop(dsn: str) -> App:
    app = App("shop")
    for name in ("item", "line"):
        app.entity(name, key="id", source="capture")(Item)
    tables = {f"public.{name}s": Table(entity=name) for name in ("item", "line")}
    app.capture("shop", kind="postgresql", dsn=dsn, tables=tables)
    return app


def insert(source: PostgresSource) -> None:
    """One transaction of many statements over two tables."""
    source.run(
        f"INSERT INTO items SELECT i, 'row ' || i FROM generate_series(1, {ROWS}) i",
        f"INSERT INTO lines SELECT i, 'line ' || i FROM generate_series(1, {LINES}) i",
        "UPDATE items SET note = 'changed' WHERE id <= 1000",
    )


def copy(source: PostgresSource) -> None:
    """One COPY: PostgreSQL logs a page of rows as one record, so that they share their place."""
    with psycopg.connect(source.dsn) as connection, connection.cursor() as cursor:
        with cursor.copy("COPY items FROM STDIN") as rows:
            for number in range(1, ROWS + 1):
                rows.write_row((number, f"row {number}"))


WAYS = {"inside a transaction": (insert, ROWS + LINES + 1000), "inside a COPY": (copy, ROWS)}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_c10_a_connector_that_is_killed_inside_a_transaction_loses_and_doubles_no_row(
    connect: Any, config: Config, database: str, spark: Any, way: str
) -> None:
    write, rows = WAYS[way]
    source = PostgresSource(database)
    source.run(*(f"CREATE TABLE {name} (id int PRIMARY KEY, note text)" for name in TABLES))
    app = shop(source.dsn)
    capturing = Capturing(config, app.capture_of("shop"), local=True)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add()
    # What a first snapshot reads has no transaction, and it is begun again until this is stored.
    assert eventually(lambda: streams(capturing), 60), capturing.status()
    role = CleanRole(
        lambda: Cleaner(config, cleaning_of(config, app, "shop"), session=lambda: spark), capturing
    )
    try:
        raw = (capturing.names.raw_log, 0)
        with Offsets(config) as offsets:
            goal = offsets.stable_ends([raw[0]])[raw] + KILLED_AFTER
            write(source)
            assert eventually(lambda: offsets.stable_ends([raw[0]])[raw] > goal, 60, every_s=0.01)
            connect.servers.kill("connect")
            written = offsets.stable_ends([raw[0]])[raw] - goal + KILLED_AFTER
        connect.servers.start()
        source.run("INSERT INTO lines VALUES (0, 'after')")
        assert eventually(lambda: "0" in keys(config, "line"), 180, every_s=2.0)
        again = raw_count(config, "items") + raw_count(config, "lines") - rows - 1
    finally:
        role.end()
        capturing.remove(drop=True, topics=True)
    assert written < rows, "it was killed inside"
    assert again > 0, "rows came twice"
    found = []
    for entity in ("item", "line"):
        changes = changelog(config, entity)
        assert broken_laws(changes)[:5] == []
        found += changes
    assert len(found) == rows + 1
    newest = {(one["entity"], one["key"]): one["currentEntityState"] for one in found}
    for name in ("item", "line"):
        states = {key: state["note"] for (entity, key), state in newest.items() if entity == name}
        assert states == {str(key): note for key, note in source.rows(f"SELECT * FROM {name}s")}
    blocks = [one["provenance"]["transaction"] for one in found if one["key"] != "0"]
    assert {(one["id"], one["count"]) for one in blocks} == {(blocks[0]["id"], rows)}
    assert sorted(one["index"] for one in blocks) == list(range(1, rows + 1))


def streams(capturing: Capturing) -> bool:
    """Whether the stored position is behind the first snapshot."""
    position = capturing.status().position
    return bool(position) and "snapshot" not in position


def keys(config: Config, entity: str) -> set[str]:
    return {one["key"] for one in changelog(config, entity)}
