"""What readers see of an entity type under its own name: live entities, each field in its type."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from kit.view_postgres import install_entity

SCHEMA = "readers"


class Colour(Enum):
    RED = "red"


class Part(BaseModel):
    name: str
    price: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]


class Thing(BaseModel):
    """One field of each kind that an entity type may have."""

    thing_id: str
    count: int
    weight: float
    price: Annotated[Decimal, Field(max_digits=30, decimal_places=10)]
    good: bool
    day: date
    moment: datetime
    colour: Colour
    size: Literal["s", "m"]
    owner: UUID
    part: Part
    parts: list[Part]
    tags: dict[str, int]
    note: str | None = None
    more: int | None = None


THING = EntityType("thing", Thing, "thing_id")
FULL = Thing(
    thing_id="a",
    count=2**62,
    weight=0.1,
    price=Decimal("12345678901234567890.0123456789"),
    good=False,
    day=date(2013, 2, 8),
    moment=datetime(2013, 2, 8, 18, 0, 0, 123456, tzinfo=timezone(timedelta(hours=-5))),
    colour=Colour.RED,
    size="m",
    owner=UUID(int=7),
    part=Part(name="née \"x\" \\", price=Decimal("1.50")),
    parts=[Part(name="p", price=Decimal("2.00"))],
    tags={"b": 2, "a": 1},
    note="",
)  # fmt: skip


@pytest.fixture
def connection(database: str) -> Any:
    with psycopg.connect(database, autocommit=True, options="-c TimeZone=UTC") as connection:
        install_entity(connection, SCHEMA, THING)
        yield connection


def insert(connection: psycopg.Connection[Any], key: str, state: Thing | None) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    text = None if state is None else THING.encode(state).decode()
    connection.execute(
        f"INSERT INTO {SCHEMA}.thing_latest__v1 (key, version, change_id, kind, as_of, "
        'occurred_at, recorded_at, generation, partition, "offset", provenance, state) '
        "VALUES (%s, 3, %s, 'updated', %s, %s, %s, 1, 0, 5, '{}', %s)",
        (key, UUID(int=1), now, now, now, text),
    )


def test_every_kind_of_field_comes_back_in_its_type(connection: psycopg.Connection[Any]) -> None:
    insert(connection, "a", FULL)
    cursor = connection.execute(f"SELECT * FROM {SCHEMA}.thing")
    names = [column.name for column in cursor.description or ()]
    (row,) = cursor.fetchall()
    found = dict(zip(names, row, strict=True))
    assert names == [*Thing.model_fields, "_key", "_version", "_as_of", "_recorded_at"]
    part = found.pop("part"), found.pop("parts")
    assert part == ({"name": 'née "x" \\', "price": "1.50"}, [{"name": "p", "price": "2.00"}])
    wanted = {
        **FULL.model_dump(exclude={"part", "parts"}),
        "moment": FULL.moment,
        "colour": "red",
        "owner": str(FULL.owner),
        "_key": "a",
        "_version": 3,
        "_as_of": datetime(2026, 1, 1, tzinfo=UTC),
        "_recorded_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    assert found == wanted
    assert isinstance(found["price"], Decimal)


def test_readers_filter_and_sum_in_the_types_and_see_no_deleted_entity(
    connection: psycopg.Connection[Any],
) -> None:
    insert(connection, "a", FULL)
    insert(connection, "b", FULL.model_copy(update={"thing_id": "b", "more": 4, "note": None}))
    insert(connection, "gone", None)
    query = (
        f"SELECT count(*), sum(price), count(note), sum(more) FROM {SCHEMA}.thing "
        "WHERE day < '2013-02-09' AND NOT good AND moment = '2013-02-08 18:00:00.123456-05' "
        "AND (tags ->> 'b')::int = 2"
    )
    assert connection.execute(query.encode()).fetchone() == (
        2,
        Decimal("24691357802469135780.0246913578"),
        1,
        4,
    )


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_a_time_is_the_same_moment_for_readers_in_every_zone(
    connection: psycopg.Connection[Any], zone: str
) -> None:
    """A time without an offset is one of UTC, as the views of Spark take it."""
    written = (
        ("with", "2013-02-08T18:00:00-05:00"),
        ("z", "2013-02-08T23:00:00Z"),
        ("without", "2013-02-08T23:00:00"),
    )
    for key, text in written:
        insert(connection, key, FULL.model_copy(update={"thing_id": key}))
        connection.execute(
            f"UPDATE {SCHEMA}.thing_latest__v1 "
            "SET state = jsonb_set(state, '{moment}', to_jsonb(%s::text)) WHERE key = %s",
            (text, key),
        )
    connection.execute(f"SET TimeZone TO '{zone}'".encode())
    moments = f"SELECT DISTINCT (moment AT TIME ZONE 'UTC')::text FROM {SCHEMA}.thing"
    assert connection.execute(moments.encode()).fetchall() == [("2013-02-08 23:00:00",)]
