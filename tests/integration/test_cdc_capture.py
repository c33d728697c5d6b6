"""Captures of real databases from first to last; tests/acceptance has those that are killed."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from secrets import token_hex
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel, Field, NaiveDatetime

from capture_cases import (
    CONNECTED,
    LONG,
    OF_MYSQL,
    UNAVAILABLE,
    PostgresSource,
    Source,
    capture_of,
    eventually,
    make_tables,
    raw_count,
    raw_records,
    raw_rows,
    removed,
    settled,
    source_of,
    table_rows,
    without_nulls,
)
from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture, Table
from everstate.errors import CaptureFailed, InvalidCapture, InvalidConfig, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.topics import Topics
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.notifications import Notification
from everstate.sources.cdc.placeholders import DEFAULT_SETTING
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.rest import Connect
from everstate.sources.cdc.restarting import Restarter
from everstate.sources.cdc.snapshots import signal_keys, snapshot
from everstate.sources.cdc.status import CaptureStatus

pytestmark = CONNECTED

KINDS = ("postgresql", "mariadb", OF_MYSQL)
OF_POSTGRES = pytest.mark.parametrize("source", ["postgresql"], indirect=True)


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    """An empty database of each kind."""
    yield from source_of(request)


@pytest.fixture
def capturing(config: Config, source: Source) -> Iterator[Capturing]:
    """A capture of the three tables, removed with all that it made."""
    make_tables(source)
    with removed(Capturing(config, capture_of(source), local=True)) as capturing:
        yield capturing


def is_near(status: CaptureStatus) -> bool:
    return status.behind_s is not None and status.behind_s < 10


def test_a_capture_from_first_to_last(config: Config, source: Source, capturing: Capturing) -> None:
    for number in range(1, 31):
        source.run(("INSERT INTO customers (id, name) VALUES (%s, 'x')", (number,)))
    assert capturing.status().state == "absent"
    added = capturing.add()
    assert added.changed
    assert not capturing.add().changed, "the same again changes nothing"
    assert settled(config, source) == without_nulls(table_rows(source))
    assert eventually(lambda: capturing.status().snapshot == "COMPLETED", 30)
    status = capturing.status()
    assert status.well
    assert eventually(lambda: is_near(capturing.status()), 30), capturing.status()

    told: list[Notification] = []
    whole = snapshot(config, capturing, table="customers", progress=told.append)
    assert whole.rows == 30
    assert {each.state for each in told} >= {"STARTED", "COMPLETED"}
    ranged = snapshot(config, capturing, table="customers", where="id BETWEEN 5 AND 9")
    assert ranged.rows == 5
    assert snapshot(config, capturing, table="customers", key=["7"]).rows == 1
    with pytest.raises(InvalidCapture, match=r"the key of .*customers is id"):
        snapshot(config, capturing, table="customers", key=["7", "8"])
    assert eventually(lambda: raw_count(config, "customers") == 30 + 30 + 5 + 1, 20)
    keys: list[dict[str, Any]] = [{"id": 5}, {"id": "none's"}, {"id": 9}]
    asked = signal_keys(capturing, f"{source.schema}.customers", keys)
    assert list(asked.refused) == [1]
    assert eventually(lambda: raw_count(config, "customers") == 30 + 30 + 5 + 1 + 2, 20)
    with Topics(config) as topics:
        assert not [name for name in topics.existing() if "signals" in name]

    capturing.pause()
    assert capturing.status().state == "PAUSED"
    source.run("DELETE FROM customers WHERE id = 3")
    with pytest.raises(CaptureFailed, match="does not read now"):
        snapshot(config, capturing, table="customers")
    capturing.resume()
    assert settled(config, source) == without_nulls(table_rows(source))
    with Topics(config) as topics:
        assert topics.partitions(capturing.names.raw_log) == 1
    deleted = [r.key for _, r in raw_records(config) if json.loads(r.value or b"")["op"] == "d"]
    assert deleted == [b'{"id":3}']
    with Consumer(config) as consumer:
        records = list(consumer.read_topic(capturing.names.raw_log))
    assert all(r.value is not None for r in records), "deletes leave no tombstone"


def test_a_removed_capture_goes_on_where_it_was(
    config: Config, source: Source, capturing: Capturing
) -> None:
    source.run("INSERT INTO customers (id, name) VALUES (1, 'a')")
    capturing.add()
    assert settled(config, source) == without_nulls(table_rows(source))
    capturing.remove()
    source.run("INSERT INTO customers (id, name) VALUES (2, 'b')")
    capturing.add()
    assert settled(config, source) == without_nulls(table_rows(source))
    assert raw_count(config, "customers") == 2, "the first row was not read again"


def test_columns_out_of_line_are_told_by_a_placeholder_or_whole(
    config: Config, source: Source, capturing: Capturing
) -> None:
    source.run(("INSERT INTO notes (id, title, body) VALUES (1, 'a', %s)", ("x" * LONG,)))
    capturing.add()
    source.run("UPDATE notes SET title = 'b' WHERE id = 1")
    assert eventually(lambda: raw_count(config, "notes") == 2, 30)
    *_, (_, last) = raw_records(config)
    after = json.loads(last.value or b"")["after"]
    assert after["body"] == (UNAVAILABLE if source.kind == "postgresql" else "x" * LONG)
    assert raw_rows(config)["notes"]["1"]["body"] == "x" * LONG


class Note(BaseModel):
    """A row of a table with columns of many types."""

    id: int
    title: str
    body: str | None = None
    numbers: list[int] | None = None
    ids: list[UUID] | None = None
    tags: dict[str, str] | None = None
    blob: str | None = None
    blobs: list[str] | None = None
    price: str | None = None
    exact: Annotated[Decimal, Field(max_digits=9, decimal_places=2)] | None = None
    at: datetime | None = None
    local_at: NaiveDatetime | None = None
    day: date | None = None


def test_values_that_postgres_does_not_tell_are_told_from_those_that_look_like_it(
    config: Config, database: str
) -> None:
    source = PostgresSource(database)
    source.run(
        "CREATE EXTENSION hstore",
        "CREATE TABLE notes (id int PRIMARY KEY, title text, body text, numbers bigint[], "
        "ids uuid[], tags hstore, blob bytea, blobs bytea[], price numeric, exact numeric, "
        "at timestamptz, local_at timestamp, day date)",
        "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL, ALTER numbers SET STORAGE EXTERNAL, "
        "ALTER ids SET STORAGE EXTERNAL, ALTER tags SET STORAGE EXTERNAL, "
        "ALTER blob SET STORAGE EXTERNAL, ALTER blobs SET STORAGE EXTERNAL",
        "INSERT INTO notes (id, title, body, numbers, ids, tags, blob, blobs) SELECT 1, 'a', "
        "repeat('x', 9000), array_agg(n), array_agg(gen_random_uuid()), "
        "hstore('a', repeat('y', 9000)), repeat('z', 9000)::bytea, array_agg(n::text::bytea) "
        "FROM generate_series(1, 2000) n",
    )
    table = Table(entity="note", types={"price": "numeric"})
    capture = Capture(
        name="shop", kind="postgresql", dsn=source.dsn, tables={"public.notes": table}
    )
    entity = EntityType("note", Note, "id")
    with removed(Capturing(config, capture, local=True, entities={"note": entity})) as capturing:
        capturing.add()
        source.run(
            "UPDATE notes SET title = 'b'",
            f"UPDATE notes SET body = '{DEFAULT_SETTING}'",
            "INSERT INTO notes (id, title, price) VALUES (2, 'p', 'NaN')",
            "INSERT INTO notes (id, title, exact) VALUES (3, 'p', 'NaN')",
            "INSERT INTO notes (id, title, at) VALUES (4, 'p', 'infinity')",
            "INSERT INTO notes (id, title, local_at) VALUES (5, 'p', '-infinity')",
            "INSERT INTO notes (id, title, day) VALUES (6, 'p', 'infinity')",
        )
        assert eventually(lambda: raw_count(config, "notes") == 8, 60)
        reader = RawReader(capture, {"note": entity})
        records = [record for _, record in raw_records(config)]
    read = [reader.read("", r.key, r.value)[0] for r in records]
    rows = [row for row in read if isinstance(row, CleanRow)]
    assert [row.key for row in rows] == ["1", "1", "1", "2"], read
    inserted, titled, texted, priced = rows
    long = {"body", "numbers", "ids", "tags", "blob", "blobs"}
    assert json.loads(inserted.state or b"")["blob"] == b64encode(b"z" * 9000).decode()
    assert titled.known is not None
    assert set(Note.model_fields) - titled.known.keys() == long
    assert texted.known is not None
    assert texted.known["body"] == DEFAULT_SETTING
    assert set(Note.model_fields) - texted.known.keys() == long - {"body"}
    assert json.loads(priced.state or b"")["price"] == "NaN"
    refused = {row.key: row.reason for row in read if isinstance(row, RefusedRow)}
    assert refused.keys() == {"3", "4", "5", "6"}
    assert refused["3"].startswith("exact: ")
    assert refused["4"].startswith("at: ")
    for key in "456":
        assert "infinity" in refused[key], refused


def test_values_are_written_the_same_whatever_role_and_database_set(
    config: Config, database: str
) -> None:
    """Each setting changes what a session without settings of its own reads."""
    source = PostgresSource(database)
    source.run(
        "CREATE TABLE customers (id int PRIMARY KEY, b bytea, i interval, r float4, d float8, "
        "at timestamptz, m money)"
    )
    row = (
        "'xxcafe', '1 mon -2 days 03:04:05', 1.2345678, 0.1::float8 + 0.2, "
        "'2026-03-04 05:06Z', 1234.5"
    )
    name, user = urlsplit(database).path[1:], urlsplit(database).username
    odd = {
        "bytea_output": "escape",
        "intervalstyle": "sql_standard",
        "extra_float_digits": "-5",
        "datestyle": "German",
    }
    source.run(
        *(f"ALTER DATABASE {name} SET {key} = {value}" for key, value in odd.items()),
        f"ALTER ROLE {user} IN DATABASE {name} SET bytea_output = 'escape'",
        f"INSERT INTO customers VALUES (1, {row})",
    )
    assert source.rows("SELECT b::text FROM customers") == [("xxcafe",)]
    tables = {"public.customers": Table(entity="customer")}
    capture = Capture(name="shop", kind="postgresql", tables=tables, dsn=database)
    capturing = Capturing(config, capture, local=True)
    try:
        capturing.add()
        assert eventually(lambda: raw_count(config, "customers") == 1, 30)
        source.run(f"INSERT INTO customers VALUES (2, {row})")
        assert eventually(lambda: raw_count(config, "customers") == 2, 30), capturing.status()
        for _, record in raw_records(config):
            after = json.loads(record.value or b"")["after"]
            del after["id"]
            assert after == {
                "b": b64encode(b"xxcafe").decode(),
                "i": "P0Y1M-2DT3H4M5S",
                "r": 1.2345678,
                "d": 0.1 + 0.2,
                "at": "2026-03-04T05:06:00.000000Z",
                "m": "1234.50",
            }
    finally:
        capturing.remove(drop=True, topics=True)
        source.run(f"ALTER ROLE {user} IN DATABASE {name} RESET ALL")


def test_a_password_is_shown_nowhere(config: Config, source: Source, capturing: Capturing) -> None:
    password = source.dsn.split(":")[2].split("@")[0]
    capturing.add()
    url = f"{config.capture.connect_url}/connectors/{capturing.names.connector}"
    for path in ("", "/config", "/status", "/offsets"):
        with urllib.request.urlopen(url + path) as answer:
            assert password not in answer.read().decode(), path
    assert password not in str(dataclasses.asdict(capturing.status()))
    folder = config.project.data_dir
    assert password not in (folder / "logs" / "connect.log").read_text()
    assert password not in (folder / "connect" / "connect.properties").read_text()
    secret = folder / "connect" / "secrets" / "shop.properties"
    assert secret.stat().st_mode & 0o077 == 0


def test_a_cluster_of_your_own_needs_a_reference_for_the_password(
    config: Config, source: Source
) -> None:
    make_tables(source)
    foreign = Capturing(config, capture_of(source), local=False)
    with pytest.raises(InvalidConfig, match="password_reference"):
        foreign.add()
    foreign.remove(drop=True, topics=True)


@pytest.mark.parametrize("source", ["postgresql", "mariadb"], indirect=True)
def test_a_connector_that_fails_says_why(config: Config, source: Source) -> None:
    """At a wrong setting of MySQL's connector (3.6.1) Connect fails itself, and names none."""
    make_tables(source)
    wrong = capture_of(source, settings={"snapshot.mode": "sometimes"})
    capturing = Capturing(config, wrong, local=True)
    with pytest.raises(CaptureFailed, match=r"snapshot\.mode"):
        capturing.add()
    capturing.remove(drop=True, topics=True)


def limit_records(config: Config, topic: str, size: int) -> None:
    """Let the broker refuse records of a topic that are longer."""
    with Topics(config) as topics:
        topics.set_config(topic, {"max.message.bytes": str(size)})


def test_a_connector_that_failed_is_started_again_and_reads_what_it_missed(
    config: Config, source: Source, capturing: Capturing
) -> None:
    topic = capturing.add().topic
    restarter = Restarter("shop", lambda: capturing)
    source.run("INSERT INTO notes (id, title) VALUES (1, 'a')")
    assert settled(config, source) == without_nulls(table_rows(source))
    limit_records(config, topic, 1_000)
    source.run(("INSERT INTO notes (id, title, body) VALUES (2, 'b', %s)", (token_hex(20_000),)))
    assert eventually(lambda: capturing.failure() is not None, 60), capturing.status()
    assert capturing.status().state == "RUNNING", "as Connect tells of a task that reads nothing"
    limit_records(config, topic, 1_000_000)
    assert restarter.step()
    source.run("INSERT INTO notes (id, title) VALUES (3, 'c')")
    assert settled(config, source) == without_nulls(table_rows(source))
    assert capturing.failure() is None
    assert not restarter.step()


@OF_POSTGRES
def test_a_connector_is_not_started_again_behind_a_hole(
    config: Config, source: Source, capturing: Capturing
) -> None:
    capturing.add()
    source.run("INSERT INTO notes (id, title) VALUES (1, 'a')")
    assert eventually(lambda: bool(capturing.status().position), 30)
    assert config.capture.connect_url is not None
    Connect(config.capture.connect_url).stop(capturing.names.connector)
    assert eventually(lambda: capturing.status().connected is False, 30)
    source.run(f"SELECT pg_drop_replication_slot('{capturing.names.identifier}')")
    for way in (capturing.restart_failed, capturing.resume, capturing.add):
        with pytest.raises(CaptureFailed, match="there is no slot") as error:
            way()
        assert "--new-epoch" in str(error.value.advice)
    assert "--new-epoch" in str(capturing.status().reason)
    capturing.begin_epoch()
    assert settled(config, source) == without_nulls(table_rows(source))
    assert eventually(lambda: capturing.status().snapshot == "COMPLETED", 30)
    assert capturing.status().reason is None, "that was no interrupted snapshot"


@OF_POSTGRES
def test_changes_that_another_session_took_from_the_slot_are_told_and_read_again(
    config: Config, database: str, source: Source, capturing: Capturing
) -> None:
    """It reads the slot beside an open transaction, so that the slot is not even quite moved on."""
    name = capturing.names.identifier
    capturing.add()
    source.run("INSERT INTO notes (id, title) VALUES (1, 'a'), (2, 'b')")
    assert settled(config, source) == without_nulls(table_rows(source))
    assert config.capture.connect_url is not None
    for _ in range(3):
        # A connector that is stopped in its heartbeats has no hole.
        Connect(config.capture.connect_url).stop(capturing.names.connector)
        assert eventually(lambda: capturing.status().connected is False, 30)
        assert "another session" not in str(capturing.status().reason)
        capturing.resume()
        assert eventually(lambda: capturing.status().connected is True, 30)
    Connect(config.capture.connect_url).stop(capturing.names.connector)
    assert eventually(lambda: capturing.status().connected is False, 30)
    with psycopg.connect(database) as beside:
        beside.execute("INSERT INTO notes (id, title) VALUES (3, 'c')")
        source.run("UPDATE notes SET title = 'z' WHERE id = 1", "DELETE FROM notes WHERE id = 2")
        source.rows(
            f"SELECT count(*) FROM pg_logical_slot_get_binary_changes('{name}', NULL, NULL, "
            f"'proto_version', '1', 'publication_names', '{name}')"
        )
    for way in (capturing.resume, capturing.add):
        with pytest.raises(CaptureFailed, match="another session read the slot"):
            way()
    assert "another session read the slot" in str(capturing.status().reason)
    capturing.begin_epoch()
    source.run("INSERT INTO notes (id, title) VALUES (4, 'd')")
    assert eventually(lambda: raw_rows(config)["notes"].keys() >= set("134"), 30)
    assert raw_rows(config)["notes"]["1"]["title"] == "z"


@OF_POSTGRES
def test_a_slot_that_waits_for_a_prepared_transaction_is_not_connected_and_names_it(
    config: Config, database: str, source: Source, capturing: Capturing
) -> None:
    with psycopg.connect(database, autocommit=True) as other:
        other.execute("BEGIN")
        other.execute("INSERT INTO notes (id, title) VALUES (1, 'a')")
        other.execute("PREPARE TRANSACTION 'for''gotten'")
        waits = "waits for the prepared transaction 'for''gotten'"
        with pytest.raises(Unavailable, match=waits):
            capturing.add(wait_s=5)
        status = capturing.status()
        assert (status.connected, status.reads) == (False, False)
        assert "`ROLLBACK PREPARED 'for''gotten';`" in str(status.reason)
        capturing.remove(drop=True)
        with pytest.raises(Unavailable, match=waits):
            capturing.add(wait_s=5)
        other.execute("COMMIT PREPARED 'for''gotten'")
    assert eventually(lambda: capturing.status().well, 60), capturing.status()
    assert settled(config, source) == without_nulls(table_rows(source))
