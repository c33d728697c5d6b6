"""States with former names, read by Spark, PostgreSQL, stores and a project that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

import psycopg
import pytest
from keep_cases import NOW, World, drain
from psycopg.types.json import Jsonb
from pydantic import BaseModel, Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from test_parse_reasons import records

from everstate import Formerly, when
from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.cli.plan import planned
from everstate.config import Config
from everstate.errors import InvalidChange
from everstate.log.record import OutRecord
from everstate.pipeline.archiving.audit import audit
from everstate.pipeline.spark.parse import parse
from everstate.pipeline.spark.states import state_read
from everstate.serving import Reader
from everstate.serving.predicates import condition, field_of
from everstate.sources.outbox import Installation, emit, install_outbox
from everstate.sources.stores.postgres import EntityStore, install
from everstate.views.kinds import LatestPlan
from everstate.views.stores.postgres.tables import latest_readers
from everstate.views.tables import physical
from formerly_cases import CASES, CLASHES, GUEST, WAS, WHO, text
from kit.changes import change_of
from kit.served_redis import ServedRedis

STATES = {name: (text(case.was), text(case.now)) for name, case in CASES.items()}


def messages(spark: SparkSession, states: list[bytes]) -> DataFrame:
    codec = ChangeCodec(GUEST)
    made = (codec.encode(change_of("guest", "a", 2, each, each, who=WHO))[:2] for each in states)
    return records(spark, list(made))


@pytest.mark.parametrize("unjudged", [None, "unjudged"])
def test_spark_reads_todays_names(spark: SparkSession, unjudged: str | None) -> None:
    found = [
        parse(messages(spark, [both[side] for both in STATES.values()]), GUEST, unjudged=unjudged)
        .select("reason", "current", "original", "misfits")
        .collect()
        for side in (0, 1)
    ]
    assert [row.reason for row in found[0]] == [None] * len(STATES)
    assert dict(zip(STATES, found[0], strict=True)) == dict(zip(STATES, found[1], strict=True))
    assert found[0][list(CASES).index("in a list")].current.lines[0].amount == Decimal("2.50")


def test_spark_counts_clashing_names_as_misfits(spark: SparkSession) -> None:
    states = [text(each.was) for each in CLASHES.values()]
    rows = parse(messages(spark, states), GUEST).select("current", "misfits").collect()
    misfits = {
        "in a list": ["lines"],
        "in a mapping": ["homes"],
        "a field": ["city"],
        "in an object": ["address.place"],
        "two former names": ["address.place"],
    }
    assert {name: row.misfits for name, row in zip(CLASHES, rows, strict=True)} == misfits
    for name, row in zip(CLASHES, rows, strict=True):
        value: Any = row.current
        for part in misfits[name][0].split("."):
            value = value[part]
        assert value is None
    (row,) = parse(messages(spark, states[:1]), GUEST, unjudged="unjudged").collect()
    assert row.reason == "unjudged"
    given = spark.createDataFrame([(each.decode(),) for each in states], "state string")
    message = F.concat(F.lit('{"state":'), F.col("state"), F.lit("}"))
    read = given.select(state_read(message, "state", GUEST).alias("read")).collect()
    assert [row.read for row in read] == [row.current for row in rows]


def test_spark_tells_a_former_value_that_is_inexact_or_of_another_type(spark: SparkSession) -> None:
    odd: list[dict[str, Any]] = [
        {"price": "1.005"},
        {"lines": [{"sum": "1.005"}]},
        {"home": "x"},
        {"homes": {"x": {"street": "s", "town": "t"}, "y": 5}},
    ]
    rows = parse(messages(spark, [text(each) for each in odd]), GUEST).select("misfits").collect()
    assert [row.misfits for row in rows] == [["paid"], ["lines"], ["address"], ["homes"]]


@pytest.fixture
def typed(database: str) -> Iterator[Any]:
    """The entity type's own relation over given states, as PostgreSQL reads them."""
    relation = latest_readers("public", GUEST)[GUEST.name]
    table = physical(LatestPlan.of(GUEST.name).name)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            f'CREATE TABLE public."{table}" (key text, version bigint, as_of timestamptz,'
            " recorded_at timestamptz, state jsonb)".encode()
        )

        def read(states: list[bytes]) -> list[tuple[Any, ...]]:
            connection.execute(f'TRUNCATE public."{table}"'.encode())
            for n, state in enumerate(states):
                row = (f"{n:03}", Jsonb(json.loads(state)))
                insert = f'INSERT INTO public."{table}" VALUES (%s, 1, now(), now(), %s)'
                connection.execute(insert.encode(), row)
            return connection.execute(f"{relation} ORDER BY key".encode()).fetchall()

        yield read


def test_postgresql_reads_todays_names(typed: Any) -> None:
    """Columns with one value; those with JSON are as they were written."""
    was, now = (typed([both[side] for both in STATES.values()]) for side in (0, 1))
    plain = [n for n, each in enumerate(GUEST.columns) if each.tree.type == "text" or each.former]
    for name, one, other in zip(STATES, was, now, strict=True):
        for n in plain:
            if GUEST.columns[n].written != "address":
                assert one[n] == other[n], name
    city, address = (GUEST.field_names.index(name) for name in ("city", "address"))
    assert was[list(STATES).index("an object, and a field in it")][address]["town"] == "b"
    clashing = typed([text(each.was) for each in CLASHES.values()])
    assert clashing[0][city] is None


def test_conditions_are_by_todays_names(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(b"CREATE TABLE kept (n int, state jsonb)")
        for n, (was, _) in enumerate(STATES.values()):
            connection.execute(b"INSERT INTO kept VALUES (%s, %s)", (n, Jsonb(json.loads(was))))
        for given, case in (
            ("city=Wien", "a field"),
            ("paid=1234567890123456789012345678.25", "a number with all digits"),
            ("address.place=b", "the first of two former names"),
        ):
            query, values = condition(given, partial(field_of, GUEST)).compose()
            found = connection.execute(f"SELECT n FROM kept WHERE {query}".encode(), values)
            assert list(STATES).index(case) in {n for (n,) in found}


@pytest.fixture
def store(config: Config) -> Iterator[EntityStore]:
    with EntityStore(config, GUEST) as store:
        yield store


def test_a_store_has_states_of_before(config: Config, store: EntityStore) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        install(connection, [WAS])
    with EntityStore(config, WAS) as before:
        before.put({"guest_id": "a", "city_name": "Wien", "price": "2.50"}, provenance=WHO)
        before.put({"guest_id": "b", "city_name": "Linz", "lines": [{"sum": "1"}]}, provenance=WHO)
    found = store.get("a")
    assert found is not None
    assert found.entity.model_dump()["city"] == "Wien"
    for equal in ({"city": "Wien"}, {"paid": Decimal("2.5")}, {"city": "Wien", "address": None}):
        page = store.page(limit=10, equal=equal)
        assert [GUEST.key_of(each.entity) for each in page.entities] == ["a"]
    assert store.put(found.entity, provenance=WHO).version == 1
    assert store.put_many([found.entity], provenance=WHO).changes == 0
    moved = found.entity.model_copy(update={"city": "Graz"})
    assert store.put(moved, provenance=WHO).version == 2
    with psycopg.connect(config.store_dsn) as connection:
        (row,) = connection.execute(
            "SELECT before, after FROM everstate_store.outbox WHERE version = 2"
        ).fetchall()
    assert json.loads(row[0])["city_name"] == "Wien"
    assert "city_name" not in json.loads(row[1])


def test_emit_goes_on_after_a_state_of_before_and_takes_one(database: str) -> None:
    one, two = ({"guest_id": "a", "city_name": name} for name in ("Wien", "Linz"))
    with psycopg.connect(database, autocommit=True) as connection:
        install_outbox(connection, Installation(entity_types=[WAS]))
        emit(connection, WAS, before=None, after=one, provenance=WHO)
        install_outbox(connection, Installation(entity_types=[GUEST]))
        today = {"guest_id": "a", "city": "Wien"}
        assert not emit(connection, GUEST, before=today, after=today, provenance=WHO).changed
        moved = {**today, "city": "Linz"}
        assert emit(connection, GUEST, before=today, after=moved, provenance=WHO).version == 2
        # A service of the older release goes on.
        assert emit(connection, WAS, before=two, after=one, provenance=WHO).version == 3
        clash = {**today, "city_name": "Linz"}
        with pytest.raises(InvalidChange, match="another value under a former name"):
            emit(connection, GUEST, before=clash, after=moved, provenance=WHO)


class Renamed(BaseModel):
    """`country` of an order is its `land` now."""

    order_id: str
    land: Annotated[str | None, Formerly("country")]
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    parts: int = 1


def declared(app: App, field: str) -> App:
    """The same views by the name that the field has."""
    app.view("by_land", sql=f"SELECT {field} AS land, count(*) AS n FROM ordr GROUP BY {field}")
    app.view("large", sql=f"SELECT {field} AS land, amount FROM ordr WHERE amount >= 100")
    app.view("mirror", sql=f"SELECT {field} AS land, amount FROM ordr", store="redis")
    app.view("parts", sql="SELECT sum(parts) AS parts FROM ordr")
    app.view("moved", sql="SELECT parts FROM ordr", when=when(field).changes())
    app.timeline("lands", "ordr", field)
    return app


@pytest.fixture
def old(world: World, redis: ServedRedis) -> World:
    world.config = redis.settings(world.config)
    app = App("orders")
    app.entity("ordr", key="order_id")(world.app.entity_type("ordr").model)
    world.app = declared(app, "country")
    return world


def with_both(record: OutRecord) -> OutRecord:
    """A state as an older release writes it over one of the newer."""
    value = (record.value or b"").replace(b'"land":"NL"', b'"land":"NL","country":"BE"')
    assert value != record.value
    return OutRecord(record.topic, record.key, value, record.headers)


def check_readers(new: World) -> None:
    """`get`, `history` and lists of an order by both of its states."""
    with Reader(new.config, new.app) as reader:
        before, after = reader.history("ordr", "o-3")
        assert (before.state or {})["land"] == "NL"
        assert [each.names for each in after.differences] == [("land",), ("amount",), ("parts",)]
        assert reader.get("ordr", "o-3", at=NOW + timedelta(hours=1)).state["land"] == "NL"
        assert [each.differences for each in reader.history("ordr", "o-5")][1:] == [()]
        assert {each.key for each in reader.list("ordr", where=["land=BE"])} == {
            *("o-1", "o-2", "o-3", "o-4")
        }
        assert {each.key for each in reader.list("ordr", where=["land!=NL"], at=NOW)} == {
            *("o-1", "o-2")
        }


def test_a_field_is_renamed_while_old_and_new_services_write(
    old: World, redis: ServedRedis
) -> None:
    """Old states are in the log, the archive, and in each view."""
    with closing(old.keeper()) as keeper:
        old.send(*[old.put(f"o-{n}", "NL", "150.00", parts=n) for n in range(10)])
        drain(keeper)
        old.archive()
        old.send(old.put("o-1", "BE", "150.00"), old.put("o-2", "BE", "9.00"))  # only in the log
        drain(keeper)
    app = App("orders")
    app.entity("ordr", key="order_id")(Renamed)
    new = World(old.config, old.spark, declared(app, "land"))
    changes, steps = planned(new.config, new.app)
    assert [(c.field, c.what, c.before) for c in changes] == [("land", "renamed", "country")]
    assert {step.view for step in steps.views if step.what == "changed"} == {
        *("by_land", "large", "mirror", "moved", "lands")
    }

    def put(writer: World, key: str, land: str, amount: str, parts: int = 1) -> OutRecord:
        """A state of a service that has one of both models, over whichever is stored."""
        version, stored = old.states.get(key, (0, None))
        if isinstance(stored, BaseModel):
            stored = stored.model_dump_json().encode()  # type: ignore[assignment]
        writer.states[key], writer.occurred_hours = (version, stored), 2
        if writer is old:
            return old.put(key, land, amount, parts)
        order = Renamed(order_id=key, land=land, amount=Decimal(amount), parts=parts)
        record = new.change(key, order)
        old.states[key] = new.states[key]
        return record

    with closing(new.keeper()) as keeper:
        new.send(put(new, "o-3", "BE", "7.00"), put(old, "o-4", "BE", "8.00"))
        new.send(put(new, "n-1", "NL", "500.00"), put(old, "n-2", "NL", "600.00"))
        # One that only renames.
        new.send(put(new, "o-5", "NL", "150.00", parts=5))
        assert drain(keeper)[2:] == (0, 0)
        new.archive()
        drain(keeper)
    assert sorted(new.rows("SELECT land, n FROM by_land")) == [("BE", 4), ("NL", 8)]
    typed = new.rows("SELECT order_id, land, amount FROM ordr ORDER BY 1")
    assert new.rows("SELECT land, amount FROM large ORDER BY 1, 2") == sorted(
        (land, amount) for _, land, amount in typed if amount >= 100
    )
    found = redis.read(new.config, "mirror") or []
    assert sorted((row["_key"], row["land"]) for row in found) == [row[:2] for row in typed]
    assert new.rows("SELECT version FROM view WHERE name = 'parts'") == [(1,)]
    assert [report.name for report in new.verify().values() if not report.holds] == []
    assert new.rows("SELECT count(*) FROM misfit") == [(0,)]
    check_readers(new)
    lands = new.rows("SELECT land, valid_to IS NULL FROM lands WHERE key = 'o-5'")
    assert lands == [("NL", True)]
    kind = new.app.entity_type("ordr")
    report = audit(new.spark, new.config, "ordr", against_log=False, entity_type=kind)
    assert [problem.message for problem in report.problems] == []
    # An older release writes over a state of the newer one, and keeps what it does not know.
    new.send(with_both(put(new, "o-6", "NL", "1.00")))
    with closing(new.keeper()) as keeper:
        assert drain(keeper)[2:] == (0, 0)
    assert new.rows("SELECT field, count FROM misfit") == [("land", 1)]
    assert new.rows("SELECT land FROM ordr WHERE order_id = 'o-6'") == [(None,)]
    assert sorted(new.rows("SELECT land, n FROM by_land"), key=str)[-1] == (None, 1)
    for proof in new.verify().values():
        assert proof.holds
    with Reader(new.config, new.app) as reader:
        shown = reader.get("ordr", "o-6").state
    assert (shown["land"], shown["country"]) == ("NL", "BE")
