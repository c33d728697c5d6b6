"""`emit` in plain SQL takes no state that readers of the log would refuse."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any

import psycopg
import pytest
from psycopg.types.json import Json
from pydantic import BaseModel, Field, NaiveDatetime
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from everstate.changes import EntityType
from everstate.pipeline.spark.parse import state_fault
from everstate.sources.outbox import Installation, install_outbox

PROVENANCE = {"apiVersion": "v1", "serviceName": "shop", "identifier": "psql"}
EMIT = "SELECT version FROM everstate_store.emit('thing', %s, NULL, %s::json, %s)"


class Part(BaseModel):
    """A nested model."""

    size: int
    name: str | None = None


class Thing(BaseModel):
    """A field of each type."""

    id: str
    flag: bool | None = None
    count: int | None = None
    share: float | None = None
    price: Annotated[Decimal, Field(max_digits=6, decimal_places=2)] | None = None
    day: date | None = None
    at: datetime | None = None
    local: NaiveDatetime | None = None
    part: Part | None = None
    parts: list[Part] = []
    tags: dict[str, int] = {}


THING = EntityType("thing", Thing, "id")
TAKEN = [
    "flag:true",
    'id:"a\\"b"',
    "count:-9223372036854775808",
    "count:0",
    "share:1",
    "share:-1.5e300",
    "price:9999.99",
    'price:"12.5"',
    "price:null",
    'day:"2024-02-29"',
    'at:"2026-01-01T23:59:59.123456+02:00"',
    'at:"2026-01-01T10:00:00Z"',
    'at:"2026-01-01T10:00:00"',
    'local:"2026-01-01T10:00:00.5"',
    'part:{"size":1,"name":7}',
    'parts:[{"size":1},null]',
    'tags:{"a":1,"b":null}',
    "unknown:[1,2]",
]
REFUSED = [
    'flag:"true"',
    "flag:1",
    'count:"4"',
    "count:4.0",
    "count:4e2",
    "count:9223372036854775808",
    'share:"1.5"',
    "share:1e999",
    "price:10000",
    'price:"x"',
    "price:true",
    'day:"2023-02-29"',
    'day:"2024-02-29T00:00:00Z"',
    "day:20240229",
    'at:"yesterday"',
    'at:"2026-01-01T24:00:00Z"',
    'at:"0001-01-01T00:00:00+12:00"',
    'at:"2026-01-01"',
    'local:"2026-01-01T10:00:00Z"',
    "part:[1]",
    "part:{}",
    'part:{"size":"1"}',
    'parts:{"size":1}',
    'parts:[{"size":null}]',
    'parts:[{"size":1.5}]',
    "tags:[1]",
    'tags:{"a":"1"}',
]


def state(case: str) -> str:
    """The state of a thing with this field."""
    field, _, value = case.partition(":")
    whole = {"id": '"a"', "parts": "[]", "tags": "{}", field: value}
    return "{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}"


@pytest.fixture
def service(database: str) -> Any:
    with psycopg.connect(database, autocommit=True) as connection:
        install_outbox(connection, Installation(entity_types=[THING]))
        yield connection


def test_what_sql_may_emit_readers_take_and_wrong_types_are_refused(
    service: psycopg.Connection[Any], spark: SparkSession
) -> None:
    taken, refused = list[str](), dict[str, tuple[Any, Any]]()
    for number, case in enumerate(TAKEN + REFUSED):
        try:
            service.execute(EMIT, [f"k{number}", state(case), Json(PROVENANCE)])
            taken.append(case)
        except psycopg.Error as error:
            refused[case] = (error.diag.sqlstate, error.diag.column_name)
    assert taken == TAKEN
    for case, (code, column) in refused.items():
        assert code == "EV001", case
        assert str(column).startswith(f"after.{case.partition(':')[0]}"), case
    rows = spark.createDataFrame(
        [(case, state(case)) for case in TAKEN], "name string, text string"
    )
    faults = rows.select("name", state_fault(F.col("text"), THING).alias("fault")).collect()
    assert [tuple(row) for row in faults if row["fault"] is not None] == []


def test_a_lost_change_is_added_only_with_a_before_of_the_right_type(
    service: psycopg.Connection[Any],
) -> None:
    mend = (
        "SELECT version FROM everstate_store.emit('thing', 'a', %s::json, %s::json, %s,"
        " chain => 'mend')"
    )
    with pytest.raises(psycopg.Error) as caught:
        service.execute(mend, [state('count:"1"'), state("count:2"), Json(PROVENANCE)])
    assert (caught.value.diag.sqlstate, caught.value.diag.column_name) == ("EV001", "before.count")


def test_an_outbox_of_an_earlier_release_learns_the_types_when_it_is_installed_again(
    service: psycopg.Connection[Any],
) -> None:
    service.execute("ALTER TABLE everstate_store.registered DROP COLUMN shape")
    install_outbox(service, Installation(entity_types=[THING]))
    with pytest.raises(psycopg.Error, match="count"):
        service.execute(EMIT, ["a", state('count:"1"'), Json(PROVENANCE)])
    shape = service.execute("SELECT shape FROM everstate_store.registered").fetchone()
    assert shape is not None
    assert shape[0] == json.loads(json.dumps(THING.shape))
