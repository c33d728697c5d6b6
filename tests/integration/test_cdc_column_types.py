"""Each type of PostgreSQL, with a long value and through a connector: told as it is, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from capture_cases import CONNECTED, PostgresSource, eventually, raw_records, removed
from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.placeholders import OWN_SETTING, placeholder_of

pytestmark = CONNECTED


class Row(BaseModel):
    """A row of each table here."""

    id: int
    n: int


LONG = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 3000) i)"
WORDS = "(SELECT string_agg(md5(i::text), ' ') FROM generate_series(1, 3000) i)"
DIGITS = (
    "('1' || (SELECT string_agg((i * 7919 % 9973)::text, '') FROM generate_series(1, 20000) i))"
)
BITS = "(SELECT string_agg((i * 7919 % 9973)::bit(14)::text, '') FROM generate_series(1, 6000) i)"
POINTS = "(SELECT string_agg('(' || i || ',' || i * 7 || ')', ',') FROM generate_series(1, 2000) i)"
PAIRS = (
    "(SELECT hstore(array_agg(i::text), array_agg(md5(i::text))) FROM generate_series(1, 999) i)"
)


def many(element: str) -> str:
    """An array of so many elements that it is stored apart."""
    return f"(SELECT array_agg({element}) FROM generate_series(1, 9000) i)"


MADE = (
    "CREATE EXTENSION hstore", "CREATE EXTENSION citext", "CREATE EXTENSION ltree",
    "CREATE TYPE mood AS ENUM ('happy', 'sad')", "CREATE TYPE pair AS (a int, b text)",
    "CREATE TYPE empty AS ENUM ()", "CREATE DOMAIN moody AS mood",
    "CREATE DOMAIN a_text AS text", "CREATE DOMAIN a_bytea AS bytea",
    "CREATE DOMAIN a_json AS jsonb", "CREATE DOMAIN a_number AS numeric",
    "CREATE DOMAIN a_citext AS citext",
    "CREATE DOMAIN an_xml AS xml", "CREATE DOMAIN a_vector AS tsvector",
    "CREATE DOMAIN an_hstore AS hstore", "CREATE DOMAIN texts AS text[]",
)  # fmt: skip
"""An enum without labels and a domain over an enum are there too: they stop no connector."""
TYPES = {
    "text": LONG, "varchar": LONG, "varchar(200000)": LONG, "char(99999)": LONG,
    "citext": f"{LONG}::citext", "xml": f"('<a>' || {LONG} || '</a>')::xml",
    "bytea": f"{LONG}::bytea", "json": f"to_json({LONG})", "jsonb": f"to_jsonb({LONG})",
    "numeric": f"{DIGITS}::numeric", "tsvector": f"{WORDS}::tsvector",
    "numrange": f"numrange(0, {DIGITS}::numeric)", "hstore": PAIRS,
    "ltree": f"replace({WORDS}, ' ', '.')::ltree",
    "bit varying": f"{BITS}::bit varying", "bit(70000)": f"{BITS}::bit(70000)",
    "path": f"('[' || {POINTS} || ']')::path", "polygon": f"('(' || {POINTS} || ')')::polygon",
    "int4multirange": "(SELECT range_agg(int4range(i * 9, i * 9 + 5)) "
    "FROM generate_series(1, 999) i)",
    "jsonpath": f"('$.a' || replace({WORDS}, ' ', '.a'))::jsonpath",
    "pair": f"ROW(1, {LONG})::pair",
    "a_text": LONG, "a_bytea": f"{LONG}::bytea", "a_json": f"to_jsonb({LONG})",
    "a_number": f"{DIGITS}::numeric", "a_citext": f"{LONG}::citext", "an_hstore": PAIRS,
    "an_xml": f"('<a>' || {LONG} || '</a>')::xml", "a_vector": f"{WORDS}::tsvector",
    "texts": many("md5(i::text)"), "a_text[]": many("md5(i::text)::a_text"),
    "mood[]": many("'sad'::mood"), "text[]": many("md5(i::text)"),
    "varchar(40)[]": many("md5(i::text)"), "char(40)[]": many("md5(i::text)"),
    "citext[]": many("md5(i::text)::citext"), "ltree[]": many("md5(i::text)::ltree"),
    "hstore[]": many("hstore('a', i::text)"), "bytea[]": many("md5(i::text)::bytea"),
    "json[]": many("to_json(i)"), "jsonb[]": many("to_jsonb(i)"), "xml[]": many("'<a/>'::xml"),
    "smallint[]": many("(i % 99)::smallint"), "int[]": many("i"), "bigint[]": many("i::bigint"),
    "oid[]": many("i::oid"), "real[]": many("i::real"), "float8[]": many("i * 1.5::float8"),
    "numeric[]": many("i * 1.7"), "numeric(10,2)[]": many("i * 1.7"), "bool[]": many("i % 3 = 0"),
    "date[]": many("date '2020-01-01' + i"), "uuid[]": many("md5(i::text)::uuid"),
    "timestamp[]": many("timestamp '2020-01-01' + i * interval '1 min'"),
    "timestamptz[]": many("timestamptz '2020-01-01' + i * interval '1 min'"),
    "time[]": many("time '00:00' + i * interval '1 s'"),
    "timetz[]": many("timetz '00:00Z' + i * interval '1 s'"),
    "interval[]": many("i * interval '1 min'"), "inet[]": many("'10.0.0.0'::inet + i"),
    "macaddr[]": many("'08:00:2b:01:02:03'::macaddr"), "money[]": many("i::numeric::money"),
    "point[]": many("point(i, i)"), "bit(8)[]": many("(i % 256)::bit(8)"),
    "int4range[]": many("int4range(i, i + 1)"), "name[]": many("md5(i::text)::name"),
}  # fmt: skip


NULLS = {"event.converting.failure.handling.mode": "warn"}
"""Shows null for a value that stops a connector otherwise."""


@pytest.fixture
def tables(database: str) -> tuple[PostgresSource, dict[str, str]]:
    """A table for each type; table → type."""
    source = PostgresSource(database)
    source.run(*MADE)
    named = {f"t{number}": kind for number, kind in enumerate(TYPES)}
    for table, kind in named.items():
        storage = "MAIN" if kind in ("numeric", "a_number") else "EXTERNAL"
        source.run(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int, v {kind})",
            f"ALTER TABLE {table} ALTER v SET STORAGE {storage}",
            f"INSERT INTO {table} SELECT 1, 1, {TYPES[kind]}",
        )
    return source, named


class Values:
    """What a connector tells of the column `v` of each table."""

    def __init__(
        self,
        config: Config,
        source: PostgresSource,
        name: str,
        tables: list[str],
        settings: dict[str, str] | None = None,
        entities: dict[str, EntityType] | None = None,
    ) -> None:
        """Without entities no column is left out."""
        declared = {f"public.{table}": Table(entity="row") for table in tables}
        capture = Capture(
            name=name, kind="postgresql", dsn=source.dsn, tables=declared, settings=settings or {}
        )
        self._capturing = Capturing(config, capture, local=True, entities=entities)
        self._config, self._source, self._tables = config, source, tables
        self.read: dict[str, Any] = {}
        """In the first snapshot."""
        self.updated: dict[str, Any] = {}
        """After an update of another column."""

    def take(self) -> None:
        with removed(self._capturing):
            self._capturing.add(wait_s=120.0)
            self._source.run(*(f"UPDATE {table} SET n = n + 1" for table in self._tables))
            assert eventually(self._has_all, 120, every_s=1.0), self._capturing.status().reason

    def _has_all(self) -> bool:
        for table, record in raw_records(self._config, self._capturing.capture.name):
            message = json.loads(record.value or b"")
            told = self.read if message["op"] == "r" else self.updated
            told[table] = message["after"].get("v", "no column")
        return self.updated.keys() == set(self._tables)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_long_value_that_did_not_change_is_marked_or_its_type_is_known_not_to_be(
    config: Config, tables: tuple[PostgresSource, dict[str, str]]
) -> None:
    source, named = tables
    capture = Capture(
        name="shop", kind="postgresql", dsn=source.dsn,
        tables={f"public.{table}": Table(entity="row") for table in named},
    )  # fmt: skip
    with Capturing(config, capture, local=True).database() as opened:
        found = opened.shapes({})
    columns = {t: {c.name: c for c in found[f"public.{t}"].columns}["v"] for t in named}
    carried = [table for table in named if columns[table].absent is None]
    marked = [table for table in carried if columns[table].unmarked is None]

    unread = Values(
        config, source, "unread", list(named), entities={"row": EntityType("row", Row, "id")}
    )
    unread.take()
    left_out = {table for table, value in unread.updated.items() if value == "no column"}
    assert {table for table in carried if table not in marked} <= left_out
    assert left_out & set(marked) == set()

    default = Values(config, source, "plain", list(named), settings=NULLS)
    default.take()
    placeholder = placeholder_of(OWN_SETTING)
    told: dict[str, str] = {}
    for table, value in default.updated.items():
        is_known = placeholder.without({"v": value}) == {"v": value}
        told[table] = "a value" if is_known and value is not None else str(value and "marked")
    told |= {t: "no column" for t, value in default.updated.items() if value == "no column"}
    wrong = {named[t]: told[t] for t in named if (told[t] == "marked") is not (t in marked)}
    assert wrong == {}, "types that are marked, and those that are said to be"
    left_out = {named[t] for t in named if default.read[t] in ("no column", None)}
    assert left_out == {named[t] for t in named if t not in carried}

    required = [f"ALTER TABLE {table} ALTER v SET NOT NULL" for table in marked]
    source.run(*required)
    strict = Values(config, source, "required", marked)
    strict.take()
    assert strict.updated == {table: default.updated[table] for table in marked}

    source.run(*(f"ALTER TABLE {table} REPLICA IDENTITY FULL" for table in named))
    full = Values(config, source, "whole", carried)
    full.take()
    assert {named[t] for t in carried if full.updated[t] != full.read[t]} == set()
    assert {named[t] for t in carried if full.updated[t] != default.read[t]} == set()
