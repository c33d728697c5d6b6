"""Tables of unusual shape from the database to the changelog, and what may halt their capture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from capture_cases import (
    CONNECTED,
    MariaSource,
    PostgresSource,
    eventually,
    maria_source,
    raw_records,
    removed,
)
from clean_role import newest, running
from everstate.app import App
from everstate.cli import cli
from everstate.config import Config
from everstate.declarations.captures import Capture, DatabaseKind, Table
from everstate.errors import CaptureFailed, InvalidCapture
from everstate.log.topics import Topics
from everstate.sources.cdc import halted
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.rest import Connect
from everstate.sources.cdc.snapshots import snapshot
from running_stack import RunningStack

pytestmark = CONNECTED


class Reading(BaseModel):
    """A row of a partitioned table."""

    id: int
    day: date
    level: int


class Payment(BaseModel):
    """A row of one of two tables that inherit from a third."""

    id: int
    amount: int


class Line(BaseModel):
    """A row of a table whose total the database computes."""

    id: int
    price: int
    pieces: int
    total: int


class Tag(BaseModel):
    """A row of a table that has a unique index and no primary key."""

    code: str
    text: str


class Mark(BaseModel):
    """A row of a table that has neither."""

    number: int
    text: str


PAYMENT = Table(entity="payment")
TABLES = {
    "readings": Table(entity="reading", key_columns=("id",)),
    "payments_1": PAYMENT,
    "payments_2": PAYMENT,
    "lines": Table(
        entity="line", computed={"total": lambda state: state["price"] * state["pieces"]}
    ),
    "tags": Table(entity="tag", key_columns=("code",)),
    "marks": Table(entity="mark", key_columns=("number",)),
}
ORACLE: dict[str, tuple[str, type[BaseModel]]] = {
    "reading": ("SELECT id::text, id, day::text, level FROM readings", Reading),
    "payment": ("SELECT id::text, id, amount FROM payments", Payment),
    "line": ("SELECT id::text, id, price, pieces, total FROM lines", Line),
    "tag": ("SELECT code, code, text FROM tags", Tag),
    "mark": ("SELECT number::text, number, text FROM marks", Mark),
}


def app_of(dsn: str) -> App:
    app = App("shop")
    for name, (_, model) in ORACLE.items():
        key = {"tag": "code", "mark": "number"}.get(name, "id")
        app.entity(name, key=key, source="capture")(model)
    tables = {f"public.{name}": table for name, table in TABLES.items()}
    app.capture("shop", kind="postgresql", dsn=dsn, tables=tables)
    return app


@pytest.fixture
def source(database: str) -> PostgresSource:
    found = PostgresSource(database)
    found.run(
        "CREATE TABLE readings (id int, day date, level int NOT NULL, PRIMARY KEY (id, day)) "
        "PARTITION BY RANGE (day)",
        "CREATE TABLE readings_1 PARTITION OF readings "
        "FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')",
        "CREATE TABLE readings_2 PARTITION OF readings "
        "FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
        "CREATE TABLE payments (id int PRIMARY KEY, amount int NOT NULL)",
        "CREATE TABLE payments_1 (PRIMARY KEY (id)) INHERITS (payments)",
        "CREATE TABLE payments_2 (PRIMARY KEY (id)) INHERITS (payments)",
        "CREATE TABLE lines (id int PRIMARY KEY, price int NOT NULL, pieces int NOT NULL, "
        "total int GENERATED ALWAYS AS (price * pieces) STORED)",
        "CREATE TABLE tags (code text NOT NULL UNIQUE, text text NOT NULL)",
        "ALTER TABLE tags REPLICA IDENTITY USING INDEX tags_code_key",
        "CREATE TABLE marks (number int, text text NOT NULL)",
        "ALTER TABLE marks REPLICA IDENTITY FULL",
        "INSERT INTO readings SELECT n, date '2026-01-01' + n, n FROM generate_series(1, 40) n",
        "INSERT INTO payments_1 SELECT n, n FROM generate_series(1, 10) n",
        "INSERT INTO payments_2 SELECT n, n FROM generate_series(11, 20) n",
        "INSERT INTO lines (id, price, pieces) SELECT n, n, 2 FROM generate_series(1, 10) n",
        "INSERT INTO tags SELECT 'c' || n, 't' FROM generate_series(1, 10) n",
        "INSERT INTO marks SELECT n, 't' FROM generate_series(1, 10) n",
    )
    return found


@pytest.fixture
def capturing(config: Config, source: PostgresSource) -> Iterator[Capturing]:
    app = app_of(source.dsn)
    found = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    with removed(found):
        yield found


@pytest.fixture
def maria(mariadb: str) -> Iterator[MariaSource]:
    yield from maria_source(mariadb)


def states(config: Config) -> dict[str, dict[str, Any]]:
    """Entity type → key → state, as the changelog says."""
    return {name: newest(config, name) for name in ORACLE}


def rows(source: PostgresSource) -> dict[str, dict[str, Any]]:
    """The tables as they are: the oracle."""
    return {
        name: {
            str(key): dict(zip(model.model_fields, values, strict=True))
            for key, *values in source.rows(query)
        }
        for name, (query, model) in ORACLE.items()
    }


def change_all(source: PostgresSource) -> None:
    """Updates, deletes, inserts, and a row that goes to another partition."""
    source.run(
        "UPDATE readings SET level = level + 100 WHERE id % 2 = 0",
        "UPDATE readings SET day = day + 28 WHERE id = 3",
        "DELETE FROM readings WHERE id = 4",
        "CREATE TABLE readings_3 PARTITION OF readings "
        "FOR VALUES FROM ('2026-03-01') TO ('2026-04-01')",
        "INSERT INTO readings VALUES (77, '2026-03-07', 7)",
        "UPDATE payments SET amount = amount * 2 WHERE id % 3 = 0",
        "DELETE FROM payments WHERE id IN (5, 15)",
        "UPDATE lines SET pieces = 9 WHERE id % 2 = 0",
        "INSERT INTO lines (id, price, pieces) VALUES (88, 8, 8)",
        "UPDATE tags SET text = 'new' WHERE code < 'c5'",
        "DELETE FROM tags WHERE code = 'c9'",
        "UPDATE marks SET text = 'new' WHERE number < 5",
        "DELETE FROM marks WHERE number = 9",
    )


@pytest.mark.timeout(300)
def test_every_shape_of_a_table_comes_to_its_rows_also_when_connect_is_killed(
    connect: RunningStack,
    config: Config,
    source: PostgresSource,
    capturing: Capturing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = app_of(source.dsn)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add()
    assert not capturing.add().changed, "the same again changes nothing"
    assert eventually(lambda: capturing.status().well, 30), capturing.status()
    change_all(source)
    for table in TABLES:
        count = len(source.rows(f"SELECT FROM {table}"))
        assert snapshot(config, capturing, table=table).rows == count
    signals = f"everstate_capture.signals_{capturing.names.identifier}"
    assert source.rows(f"SELECT * FROM {signals} WHERE id <> 'mark'") == []

    connect.servers.kill("connect")
    assert capturing.status().state == "unreachable"
    source.run("UPDATE readings SET level = 0 WHERE id = 6", "DELETE FROM lines WHERE id = 2")
    (tmp_path / "shop_of_shapes.py").write_text(
        "from everstate.app import App\n"
        "from everstate.declarations.captures import Table\nfrom pydantic import BaseModel\n"
        "app = App('shop')\n\n@app.entity('tag', key='code', source='capture')\n"
        "class Tag(BaseModel):\n    code: str\n\n"
        "app.capture('shop', kind='postgresql', dsn='$SHOP_DSN',\n"
        "    tables={'public.tags': Table(entity='tag', key_columns=('code',))})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SHOP_DSN", source.dsn)
    monkeypatch.setenv("EVERSTATE_LOG_PREFIX", config.log.prefix)
    monkeypatch.setenv("EVERSTATE_PROJECT_DATA_DIR", str(config.project.data_dir))
    words = ["-C", str(tmp_path), "cdc", "status", "--app", "shop_of_shapes:app"]
    told = CliRunner().invoke(cli, words)
    assert told.exit_code == 6, told.output
    assert "the local connect crashed" in told.output
    assert "`everstate run` restarts it" in told.output

    with running(config, app, given=connect.given):
        assert eventually(lambda: capturing.status().well, 90), capturing.status()
        wanted = rows(source)
        assert eventually(lambda: states(config) == wanted, 60, every_s=1.0), states(config)
    assert len(wanted["reading"]) == 40


@pytest.mark.timeout(300)
def test_a_table_that_a_snapshot_cannot_read_is_told_and_blocks_no_other(
    config: Config,
    source: PostgresSource,
    capturing: Capturing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(halted, "SILENT_S", 3.0)
    capturing.add()
    with pytest.raises(InvalidCapture, match='column "nonsense" does not exist'):
        snapshot(config, capturing, table="tags", where="nonsense = 1")
    # As a capture of an older version: it does not know that the log lacks a column.
    assert config.capture.connect_url is not None
    worker, name = Connect(config.capture.connect_url), capturing.names.connector
    worker.put(name, {**worker.config(name), "column.exclude.list": ""})
    source.run("UPDATE lines SET price = 3")
    assert eventually(
        lambda: "public.lines.total: it is generated" in str(capturing.status().problems)
    )
    with pytest.raises(CaptureFailed, match=r"public\.lines cannot be read: SQL_EXCEPTION"):
        snapshot(config, capturing, table="lines")
    reason = capturing.status().reason
    assert reason is not None
    assert "the last snapshot of public.lines failed" in reason
    assert snapshot(config, capturing, table="tags").rows == 10, "the next one is read"
    again = capturing.add()
    assert again.changed, "now it is left out"
    assert [each.partition(":")[0] for each in again.left_out] == ["public.lines.total"]
    assert snapshot(config, capturing, table="lines").rows == 10
    assert capturing.status().well
    assert capturing.status().reason is None

    source.run("ALTER TABLE tags REPLICA IDENTITY DEFAULT")
    with pytest.raises(psycopg.Error, match="does not have a replica identity"):
        source.run("UPDATE tags SET text = 'never'")
    status = capturing.status()
    assert status.reads, "the others are captured"
    assert not status.well
    assert "UPDATE and DELETE of public.tags fail" in str(status.problems)
    capturing.remove()
    source.run("UPDATE tags SET text = 'written'")
    with pytest.raises(CaptureFailed, match="nothing was made"):
        capturing.add()
    source.run("ALTER TABLE tags REPLICA IDENTITY FULL")
    (late,) = [step for step in capturing.add().steps if step.note is not None]
    assert "everstate cdc snapshot shop --table public.tags" in str(late.note)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_snapshot_of_a_name_with_a_blank_goes_on_when_its_connector_starts_again(
    config: Config, request: pytest.FixtureRequest, kind: DatabaseKind
) -> None:
    source: PostgresSource | MariaSource
    if kind == "postgresql":
        source, schema, quote = PostgresSource(request.getfixturevalue("database")), "public", '"'
    else:
        source = request.getfixturevalue("maria")
        schema, quote = source.schema, "`"
    names = ("more", "order lines")
    for name in names:
        table = f"{quote}{name}{quote}"
        source.run(f"CREATE TABLE {table} (id int PRIMARY KEY)", f"INSERT INTO {table} VALUES (1)")
    tables = {f"{schema}.{name}": Table(entity=name.replace(" ", "_")) for name in names}
    capturing = Capturing(
        config, Capture(name="shop", kind=kind, tables=tables, dsn=source.dsn), local=True
    )
    assert config.capture.connect_url is not None
    worker, connector = Connect(config.capture.connect_url), capturing.names.connector
    with removed(capturing):
        capturing.add()
        assert eventually(lambda: len(list(raw_records(config))) == 2)
        worker.stop(connector)
        assert eventually(lambda: capturing.status().state == "STOPPED"), capturing.status()
        # As Debezium stores it while it reads the rows again.
        listed = [{"incremental_snapshot_collections_id": each} for each in reversed(tables)]
        halfway = {"incremental_snapshot_collections": json.dumps(listed)}
        worker.alter_offset(connector, {**worker.offset(connector), **halfway})
        worker.resume(connector)
        assert eventually(lambda: capturing.failure() is not None), capturing.status()
        assert capturing.restart_failed() is None, "no table is given up"
        assert eventually(lambda: len(list(raw_records(config))) == 4), capturing.failure()
        assert capturing.status().well
        assert [name for name, _ in raw_records(config)][2:] == ["order lines", "more"]


def test_mariadb_needs_no_hand_but_a_declared_key_also_over_tls(
    config: Config, maria: MariaSource
) -> None:
    user, address = f"u_{maria.schema}", maria.dsn.partition("@")[2]
    maria.run(
        f"CREATE USER {user}@'127.0.0.1' IDENTIFIED BY 'only-over-tls' REQUIRE SSL",
        f"GRANT ALL ON *.* TO {user}@'127.0.0.1'",
    )
    encrypted = f"mariadb://{user}:only-over-tls@{address}?ssl-mode=trust"
    maria.run(
        "CREATE TABLE computed (id int PRIMARY KEY, a int, b int AS (a * 2) STORED, "
        "c int AS (a * 3) VIRTUAL)",
        "CREATE TABLE parted (id int PRIMARY KEY, a int) PARTITION BY HASH (id) PARTITIONS 3",
        "CREATE TABLE keyless (code int, a int)",
        "INSERT INTO computed (id, a) VALUES (1, 1), (2, 2)",
        "INSERT INTO parted VALUES (1, 1), (2, 2)",
        "INSERT INTO keyless VALUES (1, 1), (2, 2)",
    )
    names = ("computed", "parted", "keyless")
    keys = {"keyless": ("code",)}
    tables = {
        f"{maria.schema}.{name}": Table(entity=name, key_columns=keys.get(name, ()))
        for name in names
    }
    plain = Capture(name="shop", kind="mariadb", tables=tables, dsn=encrypted.partition("?")[0])
    with pytest.raises(CaptureFailed, match="Access denied"):
        Capturing(config, plain, local=True).add()
    capturing = Capturing(config, replace(plain, dsn=encrypted), local=True)
    try:
        assert [each.name for each in capturing.add().warnings] == [
            f"key of {maria.schema}.keyless"
        ]
        for name in names:
            maria.run(f"UPDATE {name} SET a = 7 WHERE a = 1", f"DELETE FROM {name} WHERE a = 2")

        def rows_of(name: str) -> dict[str, Any]:
            """Key of each message → the row it left."""
            found: dict[str, Any] = {}
            for table, record in raw_records(config):
                if table == name:
                    after = json.loads(record.value or b"")["after"]
                    found[(record.key or b"").decode()] = after
            return found

        row = {"id": 1, "a": 7}
        wanted = {
            "computed": {'{"id":1}': {**row, "b": 14, "c": 21}, '{"id":2}': None},
            "parted": {'{"id":1}': row, '{"id":2}': None},
            "keyless": {'{"code":1}': {"code": 1, "a": 7}, '{"code":2}': None},
        }
        assert eventually(lambda: {name: rows_of(name) for name in names} == wanted, 30)
        assert snapshot(config, capturing, table="keyless", key=["1"]).rows == 1
    finally:
        capturing.remove(drop=True, topics=True)
        maria.run(f"DROP USER {user}@'127.0.0.1'")
