"""How the views stand: rows, position, lag, on a real log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import psycopg
import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.config import Config, load
from everstate.errors import InvalidQuery, NotFound, UnknownView
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.serving import Reader
from everstate.serving.words import cell, value_text
from kit.view_postgres import install_entity
from log_cases import forget

pytestmark = pytest.mark.settings(log={"partitions": 1})

SCHEMA = "everstate_views"


def hotel() -> App:
    app = App("hotel")

    @app.entity("guest", key="guest_id")
    class Guest(BaseModel):
        guest_id: str
        name: str

    return app


def publish(config: Config, count: int) -> None:
    topics = Topics(config)
    topics.ensure(["guest"])
    topics.close()
    topic = TopicNames(config.log.prefix).changes("guest")
    producer = Producer(config)
    producer.send_many(OutRecord(topic, b"k", b"v") for _ in range(count))
    producer.flush(30)
    producer.close()


def test_each_view_tells_its_position_and_how_far_it_is_behind(config: Config) -> None:
    publish(config, 5)
    app = hotel()
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        install_entity(connection, SCHEMA, app.entity_type("guest"), {0: 3})
    with Reader(config, app) as reader:
        rows = reader.views()
    assert [(row.name, row.kind, row.rows) for row in rows] == [
        ("guest_history", "history", 0),
        ("guest_latest", "latest", 0),
    ]
    assert rows[0].position == {"1/0": 3}
    assert rows[0].lag_changes == 2
    assert rows[0].lag_seconds is not None
    assert rows[0].lag_seconds > 0
    assert (rows[0].status, rows[0].verified_at) == ("live", None)


def test_lag_is_unknown_while_the_log_is_away(config: Config) -> None:
    app = hotel()
    away = load(
        store={"dsn": config.store_dsn},
        log={"bootstrap_servers": "127.0.0.1:1", "prefix": config.log.prefix},
    )
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        install_entity(connection, SCHEMA, app.entity_type("guest"), {0: 3})
    with Reader(away, app) as reader:
        assert {row.lag_changes for row in reader.views()} == {None}


def test_a_log_that_was_trimmed_or_removed_hides_no_other_view(config: Config) -> None:
    publish(config, 5)
    app = hotel()
    topic = TopicNames(config.log.prefix).changes("guest")
    forget(config, topic, {0: 4})
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        control = install_entity(connection, SCHEMA, app.entity_type("guest"), {0: 3})
        control.open_positions("former_latest", 1, "former", "", {0: 0})
    with Reader(config, app) as reader:
        rows = reader.views()
    assert [row.lag_changes for row in rows] == [2, 2]


def test_a_view_of_one_column_has_rows_to_show(config: Config) -> None:
    app = hotel()
    app.view("guests_count", sql="SELECT count(*) AS n FROM guest")
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())
        connection.execute(f"CREATE VIEW {SCHEMA}.guests_count AS SELECT 7 AS n".encode())
    with Reader(config, app) as reader:
        assert reader.rows("guests_count") == (("n",), [(7,)])


@pytest.fixture
def view_of(config: Config) -> Iterator[Callable[[str], Reader]]:
    """Readers of a view `shown` that has the rows of a query of PostgreSQL."""
    app = hotel()
    app.view("shown", sql="SELECT name, count(*) AS guests FROM guest GROUP BY name")
    with (
        psycopg.connect(config.views_dsn, autocommit=True) as connection,
        Reader(config, app) as reader,
    ):
        connection.execute(f"CREATE SCHEMA {SCHEMA}".encode())

        def made(query: str) -> Reader:
            connection.execute(f"CREATE VIEW {SCHEMA}.shown AS {query}".encode())
            return reader

        yield made


def test_pages_of_rows_that_are_alike_in_two_columns_skip_and_double_none(
    view_of: Callable[[str], Reader],
) -> None:
    reader = view_of("SELECT n / 1000 AS x, n / 900 AS y, n AS z FROM generate_series(1, 400) n")
    found = [
        row
        for offset in range(0, 400, 50)
        for row in reader.rows("shown", limit=50, offset=offset)[1]
    ]
    assert len(set(found)) == 400


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2013-02-08 18:00:00+00", "timestamptz"),
        ("2013-02-08 18:00:00.5", "timestamp"),
        ("2013-02-08", "date"),
        ("-0.10", "numeric"),
        ("1e+22", "float8"),
        ("NaN", "float8"),
        ("12", "bigint"),
        ("true", "boolean"),
        (" a ", "text"),
        ('{"a": [1, 2.5]}', "jsonb"),
    ],
)
def test_rows_are_found_by_the_text_that_is_shown_of_their_first_column(
    view_of: Callable[[str], Reader], value: str, kind: str
) -> None:
    reader = view_of(f"SELECT '{value}'::{kind} AS first UNION ALL SELECT NULL")
    columns, (row, none) = reader.rows("shown")
    assert (columns, none) == (("first",), (None,))
    text = value_text(cell(row[0]))
    assert len(reader.rows("shown", first=text)[1]) == 1


def test_a_text_that_a_column_cannot_have_is_refused_with_the_reason(
    view_of: Callable[[str], Reader],
) -> None:
    reader = view_of("SELECT 1 AS n")
    with pytest.raises(InvalidQuery, match='integer: "one"'):
        reader.rows("shown", first="one")


def test_where_no_history_is_kept_a_key_is_looked_up_in_the_lake_and_a_list_is_refused(
    config: Config,
) -> None:
    app = App("hotel")

    @app.entity("room", key="room_id", history=False)
    class Room(BaseModel):
        room_id: str

    now = datetime.now(UTC)
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        install_entity(connection, SCHEMA, app.entity_type("room"), history=False)
    with Reader(config, app) as reader:
        for ask in (
            lambda: reader.get("room", "1"),
            lambda: reader.get("room", "1", at=now),
            lambda: reader.get("room", "1", version=1),
            lambda: reader.history("room", "1"),
            lambda: reader.explain("room", "1"),
        ):
            with pytest.raises(NotFound, match="views have no"):
                ask()
        with pytest.raises(InvalidQuery, match="no history is kept of room"):
            reader.list("room", at=now)
        assert [row.name for row in reader.views()] == ["room_latest"]


def test_a_view_of_another_name_is_refused_with_those_there_are(config: Config) -> None:
    with Reader(config, hotel()) as reader, pytest.raises(UnknownView, match="guest_history"):
        reader.rows("guests")
