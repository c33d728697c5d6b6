"""What breaks a capture of MariaDB from outside: `doctor` and `cdc status` tell the same."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel
from pyspark.sql import SparkSession
from test_cdc_doctor import ENTITIES, as_role, failed

from capture_cases import (
    MariaSource,
    capture_config,
    capture_of,
    eventually,
    make_tables,
    maria_source,
    raw_records,
)
from clean_role import CleanRole, PlainCleaner, changelog
from everstate.app import App
from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import TableMisread, TableReplaced
from everstate.log.consumer import Consumer
from everstate.log.topics import Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.columns import PREPARED
from everstate.sources.cdc.holding import read_held
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.mariadb import MariaDatabase
from everstate.sources.cdc.misread import difference, known_columns, real_column
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.restarting import restarters_of
from everstate.sources.cdc.snapshots import snapshot
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


class Item(BaseModel):
    """A row with a moment."""

    id: int
    at: str | None


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_time_zone_of_mariadb_changes_no_moment(
    connect: RunningStack, topic_prefix: str, mariadb: str, maria: MariaSource
) -> None:
    """Rows that are read again have the moments that the log had."""
    config = capture_config(connect.config, topic_prefix)
    maria.run(
        "CREATE TABLE items (id int PRIMARY KEY, at timestamp NULL)",
        "SET time_zone = '+00:00'",
        "INSERT INTO items VALUES (1, '2026-01-01 12:00:00')",
    )
    table = f"{maria.schema}.items"
    capture = Capture(
        name="shop", kind="mariadb", dsn=maria.dsn, tables={table: Table(entity="item")}
    )
    entities = {"item": EntityType("item", Item, "id")}
    capturing = Capturing(config, capture, local=True, entities=entities)
    try:
        capturing.add()
        assert eventually(lambda: rows(config) == {1: "2026-01-01T12:00:00Z"}, 60)
        maria.run(
            "SET GLOBAL time_zone = '+05:30'",
            "SET SESSION time_zone = '+00:00'",
            "INSERT INTO items VALUES (50, '2026-01-01 12:00:00')",
        )
        assert eventually(lambda: capturing.status().well, 60), capturing.status()
        assert failed(capturing.check()) == {}
        maria.run("SET time_zone = '+00:00'", "INSERT INTO items VALUES (60, '2026-06-01 00:00')")
        snapshot(config, capturing, table=table)
        wanted = {
            int(key): f"{at.replace(' ', 'T')}Z"
            for key, at in maria.rows("SELECT id, CAST(CONVERT_TZ(at, @@session.time_zone, "
                                      "'+00:00') AS char) FROM items")
        }  # fmt: skip
        assert eventually(lambda: rows(config) == wanted, 60), (rows(config), wanted)
    finally:
        MariaSource(mariadb).run("SET GLOBAL time_zone = 'SYSTEM'")
        capturing.remove(drop=True, topics=True)


def rows(config: Config) -> dict[int, str | None]:
    """The newest moment of each row in the raw log."""
    messages = [json.loads(record.value or b"") for _, record in raw_records(config)]
    return {each["after"]["id"]: each["after"]["at"] for each in messages}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_table_that_is_made_anew_with_the_same_columns_is_noticed(
    connect: RunningStack, topic_prefix: str, maria: MariaSource
) -> None:
    """Its old rows are gone without a delete of their own; status and doctor see no difference."""
    config = capture_config(connect.config, topic_prefix)
    make = "CREATE TABLE items (id int PRIMARY KEY, at timestamp NULL)"
    maria.run(make, "INSERT INTO items VALUES (1, NULL)")
    table = f"{maria.schema}.items"
    declared = {table: Table(entity="item")}
    capture = Capture(name="shop", kind="mariadb", dsn=maria.dsn, tables=declared)
    entities = {"item": EntityType("item", Item, "id")}
    capturing = Capturing(config, capture, local=True, entities=entities)
    try:
        capturing.add()
        assert eventually(lambda: rows(config) == {1: None}, 60)
        maria.run(make.replace("TABLE", "TABLE IF NOT EXISTS"))  # a start of many an application
        maria.run("ALTER TABLE items ADD COLUMN more int", "DROP TABLE items", make)
        maria.run("INSERT INTO items VALUES (2, NULL)", "RENAME TABLE items TO others")
        maria.run(make, "INSERT INTO items VALUES (3, NULL)")
        maria.run(
            "RENAME TABLE items TO older, others TO items", "INSERT INTO items VALUES (4, NULL)"
        )
        assert eventually(lambda: rows(config).keys() == {1, 2, 3, 4}, 60)
        found = read_by(RawReader(capture, entities), config)
        told = [each.reason.split(", ")[0] for each in found if isinstance(each, RefusedRow)]
        assert told == [
            f"the table was {how}" for how in ("dropped", *["made anew"] * 2, "renamed")
        ]
        assert {each.table for each in found} == {table}
    finally:
        capturing.remove(drop=True, topics=True)


class Pair(BaseModel):
    id: int
    a: int | None = None
    b: int | None = None


@pytest.mark.full
def test_rows_of_an_earlier_table_under_a_captured_name_are_not_read_by_the_columns_of_the_former(
    connect: RunningStack, topic_prefix: str, maria: MariaSource, spark: SparkSession
) -> None:
    config = capture_config(connect.config, topic_prefix)
    maria.run(
        "CREATE TABLE items (id int PRIMARY KEY, a int, b int)",
        "CREATE TABLE fresh (id int PRIMARY KEY, b int, a int)",
        *("INSERT INTO items VALUES (1, 1, 2)", "INSERT INTO fresh (id, a, b) VALUES (1, 3, 4)"),
    )
    app = App("shop")
    app.entity("item", key="id", source="capture")(Pair)
    table = f"{maria.schema}.items"
    app.capture("shop", kind="mariadb", dsn=maria.dsn, tables={table: Table(entity="item")})
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    with Topics(config) as topics:
        topics.ensure(app.entities)

    def states() -> list[Any]:
        return [each["currentEntityState"] for each in changelog(config, "item")]

    try:
        capturing.add()
        role = CleanRole(lambda: Cleaner(config, cleaning_of(config, app, "shop")))
        assert eventually(lambda: len(states()) == 1, 60)
        maria.run("RENAME TABLE items TO old, fresh TO items")
        maria.run("INSERT INTO items (id, a, b) VALUES (2, 10, 20)")
        assert eventually(lambda: not role.runs, 60)
        with pytest.raises(TableReplaced, match=f"gave the name {table}"):
            role.end()
        assert states() == [{"id": 1, "a": 1, "b": 2}]
        capturing.begin_epoch()
        role.begin()
        assert eventually(lambda: len(states()) == 3, 60)
        role.end()
        newest = {each["id"]: (each["a"], each["b"]) for each in states()}
        assert newest == {1: (3, 4), 2: (10, 20)}
    finally:
        capturing.remove(drop=True, topics=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE fresh RENAME TO items", "column 2 is a, and b in the table"),
        ("ALTER TABLE other RENAME TO items", "column a is unsigned, and another type"),
    ],
)
def test_a_table_that_alter_table_gave_a_captured_name_is_noticed_and_put_right(
    connect: RunningStack,
    topic_prefix: str,
    maria: MariaSource,
    spark: SparkSession,
    statement: str,
    said: str,
) -> None:
    config = capture_config(connect.config, topic_prefix)
    maria.run(
        "CREATE TABLE items (id int PRIMARY KEY, a int unsigned, b int)",
        "CREATE TABLE fresh (id int PRIMARY KEY, b int, a int unsigned)",
        "CREATE TABLE other (id int PRIMARY KEY, a int, b int)",
        "INSERT INTO items VALUES (1, 1, 2)",
    )
    app = App("shop")
    app.entity("item", key="id", source="capture")(Pair)
    table = f"{maria.schema}.items"
    app.capture("shop", kind="mariadb", dsn=maria.dsn, tables={table: Table(entity="item")})
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    (restarter,) = restarters_of({"shop": app.capture_of("shop")}, {}, lambda: config)
    with Topics(config) as topics:
        topics.ensure(app.entities)

    def newest() -> dict[int, tuple[int, int]]:
        states = [each["currentEntityState"] for each in changelog(config, "item")]
        return {each["id"]: (each["a"], each["b"]) for each in states}

    def is_noticed() -> bool:
        restarter.step()
        return capturing.status().state == "PAUSED"

    try:
        capturing.add()
        role = CleanRole(lambda: Cleaner(config, cleaning_of(config, app, "shop")))
        # A statement that the connector sees is none of these.
        maria.run("ALTER TABLE items ADD COLUMN c text, ADD COLUMN d enum('x','y')")
        maria.run("INSERT INTO items (id, a, b) VALUES (2, 3, 4)")
        assert eventually(lambda: newest() == {1: (1, 2), 2: (3, 4)}, 60)
        assert not eventually(is_noticed, 20)
        maria.run("ALTER TABLE items DROP COLUMN c, DROP COLUMN d")
        maria.run("ALTER TABLE items RENAME TO old", statement)
        assert eventually(is_noticed, 60)
        (problem,) = capturing.status().problems
        assert said in problem
        maria.run("INSERT INTO items (id, a, b) VALUES (3, 10, 20)")
        with pytest.raises(TableMisread, match="RENAME TO of another table"):
            capturing.resume()
        capturing.begin_epoch()
        assert eventually(lambda: newest().get(3) == (10, 20), 60)
        assert not eventually(is_noticed, 20)
        role.end()
    finally:
        capturing.remove(drop=True, topics=True)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_the_connector_does_not_see_or_cannot_read_is_told_and_put_right(
    connect: RunningStack, topic_prefix: str, maria: MariaSource
) -> None:
    """What a session may do whatever the settings of the server are."""
    config = capture_config(connect.config, topic_prefix)
    maria.run("CREATE TABLE items (id int PRIMARY KEY, a int, b int)")
    maria.run("INSERT INTO items VALUES (1, 1, 2)")
    app = App("shop")
    app.entity("item", key="id", source="capture")(Pair)
    table = f"{maria.schema}.items"
    app.capture("shop", kind="mariadb", dsn=maria.dsn, tables={table: Table(entity="item")})
    capture = app.capture_of("shop")
    capturing = Capturing(config, capture, local=True, entities=app.entities)
    (restarter,) = restarters_of({"shop": capture}, {}, lambda: config)
    with Topics(config) as topics:
        topics.ensure(app.entities)

    def newest() -> dict[int, tuple[int, int]]:
        found = {each["key"]: each["currentEntityState"] for each in changelog(config, "item")}
        return {each["id"]: (each["a"], each["b"]) for each in found.values() if each}

    def told() -> str:
        restarter.step()
        status = capturing.status()
        return str([*status.problems, status.reason if status.task == "FAILED" else ""])

    def heals(rows: dict[int, tuple[int, int]], problem: str) -> None:
        command = "`everstate cdc snapshot shop --new-epoch`"
        assert eventually(lambda: bool(re.search(f"{problem}.*{command}", told())), 60), told()
        capturing.begin_epoch()
        assert eventually(lambda: newest() == rows, 60), (newest(), told())
        assert eventually(lambda: capturing.status().well, 30), told()

    image = "SET SESSION binlog_row_image = {}".format
    try:
        capturing.add()
        role = CleanRole(lambda: PlainCleaner(config, cleaning_of(config, app, "shop")))
        maria.run("INSERT INTO items VALUES (5, 3, 4)")
        assert eventually(lambda: 5 in newest(), 90), "cleaning runs"
        by_statement = "SET SESSION binlog_format = STATEMENT", "SET SESSION foreign_key_checks = 0"
        maria.run(*by_statement, "INSERT INTO items VALUES (3, 7, 8)")
        rows = {1: (1, 2), 5: (3, 4), 3: (7, 8)}
        heals(rows, f"{table}: a session wrote in the format STATEMENT")
        maria.run(image("MINIMAL"), "UPDATE items SET a = 9 WHERE id = 1", image("FULL"))
        rows[1] = (9, 2)
        heals(rows, "binlog_row_image was not FULL")
        role.end()
    finally:
        capturing.remove(drop=True, topics=True)


def prepare(maria: MariaSource, name: str, statement: str) -> None:
    with maria.session() as cursor:
        for each in (f"XA START {name}", statement, f"XA END {name}", f"XA PREPARE {name}"):
            cursor.execute(each)


def end(maria: MariaSource, *statements: str) -> None:
    maria.run("SET autocommit = 1", *statements)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_prepared_transaction_is_published_when_it_is_committed_and_not_when_it_is_rolled_back(
    connect: RunningStack, topic_prefix: str, maria: MariaSource
) -> None:
    config = capture_config(connect.config, topic_prefix)
    maria.run("CREATE TABLE items (id int PRIMARY KEY, a int, b int)")
    maria.run("INSERT INTO items VALUES (1, 1, 2), (3, 1, 2), (9, 1, 2)")
    app = App("shop")
    app.entity("item", key="id", source="capture")(Pair)
    table = f"{maria.schema}.items"
    app.capture("shop", kind="mariadb", dsn=maria.dsn, tables={table: Table(entity="item")})
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    with Topics(config) as topics:
        topics.ensure(app.entities)

    def states(key: int) -> list[int | None]:
        found = [each for each in changelog(config, "item") if each["key"] == str(key)]
        return [(each["currentEntityState"] or {}).get("a") for each in found]

    def waiting() -> dict[str, str]:
        return {one.key: one.reason for one in read_held(config, "shop")}

    role = None
    try:
        capturing.add()
        role = CleanRole(lambda: PlainCleaner(config, cleaning_of(config, app, "shop")), capturing)
        assert eventually(lambda: states(1) == [1], 90), "cleaning runs"
        prepare(maria, "'kept'", "INSERT INTO items VALUES (2, 5, 6)")
        prepare(maria, "'undone'", "INSERT INTO items VALUES (4, 5, 6)")
        prepare(maria, "'changed'", "UPDATE items SET a = 7 WHERE id = 3")
        prepare(maria, "'gone'", "DELETE FROM items WHERE id = 9")
        maria.run("INSERT INTO items VALUES (5, 3, 4)")
        assert eventually(lambda: states(5) == [3], 30), "other rows are not late"
        assert eventually(lambda: waiting() == dict.fromkeys("2439", PREPARED), 30), waiting()
        snapshot(config, capturing, table=table)
        time.sleep(12)
        assert [states(key) for key in (2, 4, 3, 9)] == [[], [], [1], [1]]
        role.end()
        role.begin()
        end(maria, "XA COMMIT 'kept'", "UPDATE items SET a = 8 WHERE id = 2")
        settings = "SET SESSION foreign_key_checks = 0", "SET SESSION unique_checks = 0"
        end(maria, *settings, "XA ROLLBACK 'undone'", "INSERT INTO items VALUES (4, 1, 1)")
        end(maria, *settings, "XA COMMIT 'changed'")
        end(maria, "XA ROLLBACK 'gone'", "UPDATE items SET a = 2 WHERE id = 9")
        wanted = [[5, 8], [1], [1, 7], [1, 2]]
        assert eventually(lambda: [states(key) for key in (2, 4, 3, 9)] == wanted, 60), waiting()
        assert eventually(lambda: waiting() == {}, 20), waiting()
        connect.servers.kill("connect")
        connect.servers.start()
        prepare(maria, "'late'", "INSERT INTO items VALUES (6, 5, 6)")
        end(maria, "XA ROLLBACK 'late'", "INSERT INTO items VALUES (7, 5, 6)")
        assert eventually(lambda: states(7) == [5], 90), capturing.status()
        assert states(6) == []
        assert eventually(lambda: capturing.status().well, 30), capturing.status()
        prepare(maria, "'over'", "INSERT INTO items VALUES (8, 5, 6)")
        assert eventually(lambda: waiting() == {"8": PREPARED}, 30), waiting()
        capturing.begin_epoch()
        assert eventually(lambda: capturing.status().well, 60), capturing.status()
        assert eventually(lambda: waiting() == {}, 30), waiting()
        end(maria, "XA COMMIT 'over'")
        assert eventually(lambda: "prepared before" in str(capturing.status().problems), 60)
        capturing.begin_epoch()
        assert eventually(lambda: states(8) == [5], 60), changelog(config, "item")
        assert [states(key) for key in (2, 4, 3, 9, 6)] == [*wanted, []]
    finally:
        if role is not None:
            role.end()
        for *_, name in maria.rows("XA RECOVER"):
            end(maria, f"XA ROLLBACK '{name}'")
        capturing.remove(drop=True, topics=True)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_table_that_the_connector_does_not_see_right_is_left_out_and_the_others_go_on(
    connect: RunningStack, topic_prefix: str, maria: MariaSource
) -> None:
    config = capture_config(connect.config, topic_prefix)
    maria.run(*(f"CREATE TABLE {t} (id int PRIMARY KEY, a int, b int)" for t in ("items", "rest")))
    maria.run("INSERT INTO items VALUES (1, 1, 2)")
    app = App("shop")
    for name in ("item", "rest"):
        app.entity(name, key="id", source="capture")(Pair)
    items, rest = f"{maria.schema}.items", f"{maria.schema}.rest"
    tables = {items: Table(entity="item"), rest: Table(entity="rest")}
    app.capture("shop", kind="mariadb", dsn=maria.dsn, tables=tables)
    capture = app.capture_of("shop")
    capturing = Capturing(config, capture, local=True, entities=app.entities)
    (restarter,) = restarters_of({"shop": capture}, {}, lambda: config)

    def read(table: str) -> dict[int, tuple[int, int]]:
        messages = [json.loads(record.value or b"{}") for _, record in raw_records(config)]
        found = [each["after"] for each in messages if each.get("after")
                 and f"{maria.schema}.{each['source']['table']}" == table]  # fmt: skip
        return {each["id"]: (each["a"], each["b"]) for each in found}

    def arrives(table: str, key: int, row: tuple[int, int]) -> bool:
        return eventually(lambda: read(table).get(key) == row, 60)

    def is_left_out() -> bool:
        capturing.nudge()
        restarter.step()
        problems = capturing.status().problems
        return [each.startswith(f"{items}: it is left out") for each in problems] == [True]

    insert = "INSERT INTO {} (id, a, b) VALUES ({}, 5, 6)".format
    image = "SET SESSION binlog_row_image = {}".format
    breaks = {
        "binlog_row_image": (image("MINIMAL"), "UPDATE items SET a = 9", image("FULL")),
        "columns": ("ALTER TABLE items CHANGE a b int, CHANGE b a int",),
    }
    try:
        capturing.add()
        for key, (reason, statements) in enumerate(breaks.items(), 2):
            maria.run(*statements, insert("items", key), insert("rest", key))
            assert eventually(is_left_out, 90), capturing.status()
            (problem,) = capturing.status().problems
            assert reason in problem
            maria.run(f"UPDATE rest SET a = 7 WHERE id = {key}")
            assert arrives(rest, key, (7, 6))
            assert capturing.status().reads
            capturing.begin_epoch()
            assert arrives(items, key, (5, 6))
            assert eventually(lambda: capturing.status().well, 30), capturing.status()
        assert read(items)[1] == (2, 9)
    finally:
        capturing.remove(drop=True, topics=True)


TYPES = """bool; boolean; tinyint unsigned; int1; int2 unsigned; middleint; int4; int8; dec unsigned
integer zerofill; dec(9,2); fixed; real; double precision unsigned; float(7,4)
bit(7); mediumtext; date; time(3); datetime(6); year; timestamp NULL; datetime DEFAULT now()
char; character varying(9); national char(3); nchar(3); nvarchar(5); national varchar(5); long
varchar(9) CHARACTER SET latin1; long varchar; varchar(9) binary; text CHARACTER SET utf8; json
varchar(3) COLLATE latin1_bin; binary(3); varbinary(9); blob; enum('a,b', 'it''s', 'unsigned')
set('year','date'); datetime ON UPDATE now()
bigint signed; int AS (id + 1) STORED; int AS (id + 1) VIRTUAL; int INVISIBLE"""


@pytest.mark.full
def test_columns_of_every_type_are_known_as_they_are_however_they_came(
    connect: RunningStack, topic_prefix: str, maria: MariaSource
) -> None:
    config = capture_config(connect.config, topic_prefix)
    made = ", ".join(f"`c{at}` {kind}" for at, kind in enumerate(re.split("[;\n] ?", TYPES)))
    maria.run(f"CREATE TABLE items (id int PRIMARY KEY, {made})")
    maria.run("CREATE TABLE later (id int PRIMARY KEY)")
    tables = {f"{maria.schema}.{name}": Table(entity="item") for name in ("items", "later")}
    capture = Capture(name="shop", kind="mariadb", dsn=maria.dsn, tables=tables)
    capturing = Capturing(config, capture, local=True)
    with Topics(config) as topics:
        topics.ensure(capture.entities)

    def differences() -> dict[str, str | None]:
        with Consumer(config) as consumer:
            history = [each.value for each in consumer.read_topic(capturing.names.schema_history)]
        known = known_columns(value for value in history if value is not None)
        with closing(MariaDatabase(capture, capturing.names, maria.dsn)) as database:
            columns = {
                table: [real_column(row) for row in database.columns(table)] for table in tables
            }
        return {table: difference(known.get(table, []), columns[table]) for table in tables}

    try:
        capturing.add()
        assert eventually(lambda: differences() == dict.fromkeys(tables), 30), (
            differences(),
            capturing.failure(),
        )
        for at, kind in enumerate(re.split("[;\n] ?", TYPES)):
            maria.run(f"ALTER TABLE later ADD COLUMN `c{at}` {kind}")
        assert eventually(lambda: differences() == dict.fromkeys(tables), 30), (
            differences(),
            capturing.failure(),
        )
    finally:
        capturing.remove(drop=True, topics=True)


def read_by(reader: RawReader, config: Config) -> list[Any]:
    """What a reader of captures makes of the raw log."""
    found = []
    with Consumer(config) as consumer:
        for record in consumer.read_topic(f"{config.log.prefix}.raw.shop"):
            headers = dict(record.headers)
            wanted = [headers.get(name) for name in reader.header_names]
            found += reader.read("", record.key, record.value, wanted)
    return [each for each in found if isinstance(each, CleanRow | RefusedRow)]
