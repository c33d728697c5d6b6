"""Values of both databases, by snapshot and by stream: as the database prints them, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import pytest
from pydantic import create_model

from capture_cases import (
    CONNECTED,
    OF_MYSQL,
    MariaSource,
    PostgresSource,
    Source,
    eventually,
    maria_source,
    raw_count,
    raw_records,
    removed,
    source_of,
)
from column_table import MARIADB, MYSQL, NULL, POSTGRES, REFUSED, Column
from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed
from everstate.log.record import Record
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.convert import may_have_java_names
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.printed import FORMS, of_two_forms
from everstate.sources.cdc.quick import QuickReader
from everstate.sources.cdc.reading import RawReader, RefusedRow

pytestmark = CONNECTED

TABLES = {"postgresql": POSTGRES, "mariadb": MARIADB, "mysql": MYSQL}
SHAPES = "bit geometry point linestring polygon multipoint multilinestring multipolygon".split()
NOT_COMPARED = {
    "postgresql": {
        *"bit money interval hstore char tstzrange point path polygon lseg box circle line".split(),
        *"hstore[] json[] jsonb[] tstzrange[] macaddr8[]".split(),
    },
    "mariadb": {*SHAPES, "geometrycollection"},
    "mysql": {*SHAPES, "geomcollection", "json"},
}
"""Types whose values `drift check` does not compare."""


@pytest.fixture(params=["postgresql", "mariadb", OF_MYSQL])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    """An empty database of each kind."""
    for found in source_of(request):
        if request.param == "postgresql":
            found.run(
                "CREATE TYPE mood AS ENUM ('sad', 'ok')",
                "CREATE TYPE pair AS (a int, b text)",
                "CREATE DOMAIN moody AS mood", "CREATE DOMAIN whole AS int",
                "CREATE DOMAIN wholes AS int[]",
                "CREATE EXTENSION citext", "CREATE EXTENSION ltree", "CREATE EXTENSION hstore",
            )  # fmt: skip
        yield found


def entity_of(columns: Mapping[str, Column]) -> EntityType:
    fields: dict[str, Any] = {name: (each.field | None, None) for name, each in columns.items()}
    return EntityType("item", create_model("Item", id=(int, ...), **fields), "id")


def made(name: str, column: Column) -> str:
    """The column in a CREATE TABLE; MariaDB's first timestamp is NOT NULL unless it says so."""
    default = "" if column.default is None else f" DEFAULT {column.default}"
    check = "" if column.check is None else f" CHECK ({column.check})"
    return f"{name} {column.type}{' NULL' if NULL in column.values else ''}{default}{check}"


def test_every_value_arrives_as_the_database_prints_it_or_is_refused(
    config: Config, source: Source
) -> None:
    columns = TABLES[source.kind]
    cases = [(name, value) for name, each in columns.items()
             for value in (*each.values, *each.dead)]  # fmt: skip
    listed = ", ".join(made(name, each) for name, each in columns.items())
    source.run(f"CREATE TABLE items (id int PRIMARY KEY, {listed})")
    if source.kind == "postgresql":
        # Long values of arrays are in the log of such a table only.
        source.run("ALTER TABLE items REPLICA IDENTITY FULL")

    def insert(first: int) -> None:
        source.run(
            *(
                f"INSERT INTO items (id, {name}) VALUES ({number}, {value})"
                for number, (name, value) in enumerate(cases, first)
            )
        )

    insert(0)
    types = {name: each.types for name, each in columns.items() if each.types is not None}
    capture = Capture(
        name="shop", kind=source.kind, dsn=source.dsn,
        tables={f"{source.schema}.items": Table(entity="item", types=types)},
    )  # fmt: skip
    entities = {"item": entity_of(columns)}
    with removed(Capturing(config, capture, local=True, entities=entities)) as capturing:
        capturing.add()
        assert eventually(lambda: raw_count(config, "items") == len(cases), 60), capturing.status()
        insert(1000)
        has_all = eventually(lambda: raw_count(config, "items") == 2 * len(cases), 60)
        assert has_all, capturing.status()
        records = [record for _, record in raw_records(config)]
        assert unlike_debezium(records, cases, source, capturing) == []
    texts = texts_in(source, columns)
    reader, quick = RawReader(capture, entities), QuickReader.of(RawReader(capture, entities))
    assert quick is not None
    wrong, left = [], []
    for record in records:
        (row,) = reader.read("", record.key, record.value)
        assert isinstance(row, CleanRow | RefusedRow)
        name, value = cases[int(row.key or "") % 1000]
        column, told = columns[name], f"{name} {value} by {row.op}"
        if isinstance(row, RefusedRow):
            if value not in column.dead or not row.reason.startswith(f"{name}: "):
                wrong.append(f"{told}: refused, {row.reason}")
            continue
        text = texts[int(row.key)][name]
        wanted = None if text is None else column.of_text(text)
        found = json.loads(row.state or b"", parse_float=float)[name]
        if value in column.dead or found != wanted:
            wrong.append(f"{told}: {found!r} and not {wanted!r}")
        quickly = quick.read(record.key, record.value)
        assert quickly is None or quickly[3] == row.state
        if quickly is None and not may_have_java_names(record.value or b""):
            left.append(f"{told}: {record.value!r}")
    assert wrong == []
    assert left == [], "rows that the quick reader left to the normal one"


def unlike_debezium(
    records: Sequence[Record],
    cases: Sequence[tuple[str, str]],
    source: Source,
    capturing: Capturing,
) -> list[str]:
    """Values that `drift check` would take for others than those that the connector wrote."""
    forms, table = FORMS[source.kind], f"{source.schema}.items"
    with capturing.database() as database:
        columns = database.shapes({})[table].columns
        read = [each for each in columns if each.kind in forms]
        printed = {int(row[0] or 0): row for row in database.printed_rows(table, read)}
    assert {each.kind for each in columns} - forms.keys() == NOT_COMPARED[source.kind]
    wrong = []
    for record in records:
        after = json.loads(record.value or b"")["after"]
        name, value = cases[after["id"] % 1000]
        if value in TABLES[source.kind][name].dead or TABLES[source.kind][name].types == "numeric":
            continue
        for column, text in zip(read, printed[after["id"]], strict=True):
            made = None if text is None else forms[column.kind](text)
            wrote = after[column.name]
            if forms[column.kind] is of_two_forms and wrote is not None:
                wrote = datetime.fromisoformat(wrote).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            if repr(made) != repr(wrote):
                told = f"{column.name}: {made!r} of {text!r}, and not {wrote!r}"
                wrong.append(f"{name} {value}: {told}")
    return wrong


def texts_in(source: Source, columns: Mapping[str, Column]) -> dict[int, dict[str, str | None]]:
    """Of each row the texts of its values, as the database prints them."""
    kind = "text" if source.kind == "postgresql" else "char"
    cast = f"CAST({{}} AS {kind})"
    listed = ", ".join((each.printed or cast).format(name) for name, each in columns.items())
    rows = source.rows(f"SELECT id, {listed} FROM items")
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}


def test_a_field_that_cannot_have_its_columns_values_is_refused_before_anything_is_made(
    config: Config, source: Source
) -> None:
    name = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL"}[source.kind]
    columns = {f"c{number}": kind for number, kind in enumerate(REFUSED[name])}
    listed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    source.run(f"CREATE TABLE items (id int PRIMARY KEY, {listed})")
    if source.kind == "postgresql":
        source.run("ALTER TABLE items REPLICA IDENTITY FULL")
    fields: dict[str, Any] = dict.fromkeys(columns, (list[str] | None, None))
    entity = EntityType("item", create_model("Item", id=(int, ...), **fields), "id")
    capture = Capture(
        name="shop", kind=source.kind, dsn=source.dsn,
        tables={f"{source.schema}.items": Table(entity="item")},
    )  # fmt: skip
    with pytest.raises(CaptureFailed) as caught:
        Capturing(config, capture, local=True, entities={"item": entity}).add()
    lines = str(caught.value).split("\n")
    for column, kind in columns.items():
        (line,) = [line for line in lines if f".items.{column}:" in line]
        assert REFUSED[name][kind] in line


def test_a_field_of_a_timetz_is_refused_before_anything_is_made(
    config: Config, database: str
) -> None:
    source = PostgresSource(database)
    source.run(
        "CREATE DOMAIN hour AS timetz",
        "CREATE DOMAIN late_hour AS hour",
        "CREATE TABLE items (id int PRIMARY KEY, word late_hour, day date)",
        "INSERT INTO items (id, day) VALUES (1, '0044-03-15 BC')",
    )
    capture = Capture(
        name="shop", kind=source.kind, dsn=source.dsn,
        tables={"public.items": Table(entity="item")},
    )  # fmt: skip
    entities = {"item": entity_of({name: POSTGRES[name] for name in ("word", "day")})}
    with pytest.raises(CaptureFailed, match="word: Debezium writes a timetz in UTC") as caught:
        Capturing(config, capture, local=True, entities=entities).add()
    assert "items.day: a row has a day before the year 1" in str(caught.value)
    assert source.rows("SELECT pubname FROM pg_publication") == []


@pytest.fixture
def maria(mariadb: str) -> Iterator[MariaSource]:
    yield from maria_source(mariadb)


def test_a_date_of_no_calendar_is_refused_and_an_unsigned_key_is_exact(
    config: Config, maria: MariaSource
) -> None:
    largest = 2**64 - 1
    maria.run(
        "SET sql_mode = ''",
        "CREATE TABLE items (id bigint unsigned PRIMARY KEY, day date NOT NULL)",
        f"INSERT INTO items VALUES ({largest}, '2026-00-15')",
    )
    table = Table(entity="item", types={"id": "text"})
    capture = Capture(
        name="shop", kind="mariadb", dsn=maria.dsn, tables={f"{maria.schema}.items": table}
    )
    entity = EntityType("item", create_model("Item", id=(str, ...), day=(date, ...)), "id")
    capturing = Capturing(config, capture, local=True, entities={"item": entity})
    with pytest.raises(CaptureFailed, match=r"items\.day: a row has a date with month 0 or day 0"):
        capturing.add()
    maria.run("UPDATE items SET day = '2026-01-15'")
    with removed(capturing):
        capturing.add()
        maria.run("SET sql_mode = ''", f"INSERT INTO items VALUES ({largest - 1}, '0000-00-00')")
        assert eventually(lambda: raw_count(config, "items") == 2, 60)
        records = [record for _, record in raw_records(config)]
    reader = RawReader(capture, {"item": entity})
    whole, refused = (reader.read("", each.key, each.value)[0] for each in records)
    assert isinstance(whole, CleanRow)
    assert json.loads(whole.state or b"") == {"id": str(largest), "day": "2026-01-15"}
    assert isinstance(refused, RefusedRow)
    assert refused.key == str(largest - 1)
    assert refused.reason.startswith("day: 0 is 1970-01-01, or a date with month 0 or day 0")


UNREADABLE = (
    "CREATE TABLE visits (id int PRIMARY KEY, ip inet6)",
    "INSERT INTO visits VALUES (1, '::1')",
    "ALTER TABLE visits ADD COLUMN last_ip inet4",
    "CREATE TABLE line_items (ip inet6 DEFAULT '::1')",
    "CREATE DATABASE other_{db} COMMENT 'x'",
    "DROP DATABASE other_{db}",
    "CREATE TABLE stays (a int, s date, e date, PERIOD FOR p (s, e), "
    "UNIQUE (a, p WITHOUT OVERLAPS))",
    "CREATE PROCEDURE look() BEGIN\n DECLARE ip inet6;\n SELECT id FROM items;\nEND",
)


def test_a_statement_that_debezium_cannot_read_stops_no_capture_of_other_tables(
    config: Config, maria: MariaSource
) -> None:
    maria.run("CREATE TABLE before_it (ip inet6)", "CREATE TABLE items (id int PRIMARY KEY)")
    table = f"{maria.schema}.items"
    capture = Capture(
        name="shop", kind="mariadb", dsn=maria.dsn, tables={table: Table(entity="item")}
    )
    capturing = Capturing(config, capture, local=True, entities={"item": entity_of({})})
    with removed(capturing):
        capturing.add()
        maria.run(
            *(each.format(db=maria.schema) for each in UNREADABLE), "INSERT INTO items VALUES (1)"
        )
        assert eventually(lambda: raw_count(config, "items") == 1, 60), capturing.status()
        of_items = "ALTER TABLE items ADD CONSTRAINT IF NOT EXISTS c CHECK (id > 0)"
        maria.run(of_items, "INSERT INTO items VALUES (2)")
        assert eventually(lambda: capturing.status().task == "FAILED", 60)
        assert f"Debezium cannot read the statement {of_items}; " in str(capturing.status().reason)
        capturing.begin_epoch()
        assert eventually(lambda: raw_count(config, "items") == 3, 60), capturing.status()
        assert eventually(lambda: capturing.status().well, 60), capturing.status()
