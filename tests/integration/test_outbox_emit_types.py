"""`emit` in plain SQL takes no state that readers of the log would refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Json
from pydantic import BaseModel, Field, NaiveDatetime
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from everstate.changes import EntityType, Provenance
from everstate.errors import InvalidChange
from everstate.pipeline.drift.tasks import state_fault
from everstate.pipeline.spark.states import fitted_state, state_schema
from everstate.sources.outbox import Installation, emit, install_outbox
from everstate.sources.outbox.emit import Chain
from type_table import FIELD_TYPES, TYPE, entity_of, same_value

PROVENANCE = {"apiVersion": "v1", "serviceName": "shop", "identifier": "psql"}
EMIT = "SELECT version FROM everstate_store.emit('thing', %s, NULL, %s::json, %s)"


AFTER = "SELECT after FROM everstate_store.outbox WHERE key = %s"


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
    "count:-9223372036854775808",
    "count:0",
    "share:1",
    "share:-1.5e300",
    "share:0.30000000000000004",
    "share:5e-324",
    "price:9999.99",
    'price:"12.5"',
    'price:"1E+3"',
    'price:"1E-2"',
    'price:"0E-10"',
    "price:null",
    'day:"2024-02-29"',
    'at:"2026-01-01T23:59:59.123456+02:00"',
    'at:"2026-01-01T10:00:00Z"',
    'at:"2026-01-01T10:00:00"',
    'local:"2026-01-01T10:00:00.5"',
    'part:{"size":1,"name":7}',
    'parts:[{"size":1},null]',
    'tags:{"a":1,"b":null}',
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
    "share:1e-400",
    "share:9007199254740993",
    "share:12345678901234567890.12",
    "price:10000",
    'price:"x"',
    'price:"1E"',
    'price:"1E-3"',
    'price:"1E+999"',
    'price:"1E+9999"',
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
    "unknown:[1,2]",
    'part:{"size":1,"unknown":2}',
    'parts:[{"size":1,"unknown":2}]',
    'id:"another"',
]


def state(case: str, key: str = "a") -> str:
    """The state of a thing with this field."""
    field, _, value = case.partition(":")
    whole = {"id": json.dumps(key), "parts": "[]", "tags": "{}", field: value}
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
            service.execute(EMIT, [f'k"{number}', state(case, f'k"{number}'), Json(PROVENANCE)])
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
    message = F.concat(F.lit('{"state":'), "text", F.lit("}"))
    read = F.from_json(message, StructType([StructField("state", state_schema(THING))]))["state"]
    fitted = fitted_state(message, "state", read, THING, F.lit(True))
    found = rows.select(
        "name", F.filter(fitted["misfits"], lambda each: each.isNotNull())
    ).collect()
    assert [tuple(row) for row in found if row[1] != []] == []
    assert [case for case in TAKEN if state_fault(THING.arrow_schema, state(case))] == []


def test_every_value_of_the_table_of_types_is_emitted_equal_or_refused(
    service: psycopg.Connection[Any],
) -> None:
    wrong = []
    named = {f"value{number}": kind for number, kind in enumerate(FIELD_TYPES)}
    types = [replace(entity_of(kind), name=name) for name, kind in named.items()]
    install_outbox(service, Installation(entity_types=types))
    for name, kind in named.items():
        emit = EMIT.replace("'thing'", f"'{name}'")
        for given in kind.given:
            reason, found = given.reason("SQL emit"), None
            state = given.state.replace('"a"', json.dumps(key := str(uuid4())), 1)
            try:
                service.execute(emit, [key, state, Json(PROVENANCE)])
                found = service.execute(AFTER, [key]).fetchone()
            except (psycopg.Error, UnicodeError) as error:
                if reason is None or (reason is not TYPE and reason not in str(error)):
                    wrong.append(f"{kind.name} {given.text}: {error}")
            else:
                is_equal = found is not None and same_value(kind, given.text, found[0].encode())
                if reason is not None or not is_equal:
                    wrong.append(f"{kind.name} {given.text}: emitted as {found}")
    assert wrong == []


@pytest.mark.parametrize("price", ["1000", "0.01", "0.00", "1E+3", "0E-10"])
def test_python_emits_a_decimal_however_it_was_normalised(
    service: psycopg.Connection[Any], price: str
) -> None:
    who = Provenance(api_version="v1", service_name="shop", identifier="till")
    for number, value in enumerate((Decimal(price), Decimal(price).normalize())):
        thing = Thing(id=str(number), price=value)
        written = emit(service, THING, before=None, after=thing, provenance=who)
        found = service.execute(AFTER, [written.key]).fetchone()
        assert found is not None
        assert THING.validate_json(found[0]) == thing


def test_equal_values_are_no_change_whatever_their_text(service: psycopg.Connection[Any]) -> None:
    emit = "SELECT version, kind FROM everstate_store.emit('thing', 'a', %s::json, %s::json, %s)"
    first = state('price:"2.5"')[:-1] + ',"at":"2026-01-01T10:00:00Z"}'
    same = state("price:2.50")[:-1] + ',"at":"2026-01-01T11:00:00.000+01:00"}'
    other = state('price:"2.51"')
    found = [
        service.execute(emit, [before, after, Json(PROVENANCE)]).fetchone()
        for before, after in ((None, first), (first, same), (same, other))
    ]
    assert found == [(1, "created"), (1, None), (2, "updated")]


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


class WrappedPart(Part):
    gift: bool = False


class NewThing(Thing):
    vip: str | None = None
    part: WrappedPart | None = None
    parts: list[WrappedPart] = []  # type: ignore[assignment]
    by_shop: dict[str, WrappedPart] = {}


class OldThing(Thing):
    by_shop: dict[str, Part] = {}


GIFT = {"size": 1, "gift": True}


@pytest.mark.parametrize("chain", ["strict", "mend"])
@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("vip", {}),
        ("part.gift", {"part": GIFT}),
        ("parts.gift", {"parts": [GIFT]}),
        ("by_shop.gift", {"by_shop": {"x": GIFT}}),
    ],
)
def test_an_older_release_emits_over_no_field_that_it_does_not_know(
    service: psycopg.Connection[Any], field: str, given: dict[str, Any], chain: Chain
) -> None:
    who = Provenance(api_version="v1", service_name="shop", identifier="till")
    newer, older = (EntityType("thing", each, "id") for each in (NewThing, OldThing))
    first = NewThing.model_validate({"id": "a", "count": 1, "vip": "gold", **given})

    def installed(entity_type: EntityType) -> None:
        install_outbox(service, Installation(entity_types=[entity_type]))

    installed(newer)
    emit(service, newer, before=None, after=first, provenance=who)
    if field != "vip":
        older = replace(older, removed=("vip",))
        installed(older)
    before = OldThing.model_validate(first.model_dump(exclude={"vip"}))
    for known in (before, before.model_copy(update={"count": 2})):
        with pytest.raises(InvalidChange, match="outbox install") as refused:
            emit(service, older, before=known, after=None, provenance=who, chain=chain)
        assert refused.value.field == f"before.{field}"
    # The newer release knows it, and the older one need not when it was removed on purpose.
    installed(newer)
    other = first.model_copy(update={"count": 3})
    emit(service, newer, before=other, after=first, provenance=who, chain="mend")
    older = replace(older, removed=("vip", "part.gift", "parts.gift", "by_shop.gift"))
    installed(older)
    assert (
        emit(service, older, before=before, after=None, provenance=who, chain="mend").version == 5
    )
