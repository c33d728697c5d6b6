"""A model that changes on a project that runs: archive, views and proofs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

import pytest
from keep_cases import Order, World, drain, orders_app
from pydantic import BaseModel, Field, model_validator

from everstate import Formerly
from everstate.app import App
from everstate.archive import table_path
from everstate.changes import Kind
from everstate.cli.plan import planned
from everstate.errors import InvalidModelChange
from everstate.log.record import OutRecord
from everstate.pipeline.archiving.audit import audit
from everstate.pipeline.batch.accepted import REVIVED, accepted_changes
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.spark.archived import read_archive
from everstate.postgres import connect_views
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control

Amount = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


def app_of(model: type[BaseModel], *views: str) -> App:
    app = App("orders")
    app.entity("ordr", key="order_id")(model)
    field = "country" if "country" in model.model_fields else "land"
    for name in views or ("by_country", "large"):
        app.view(name, sql=orders_app().views[name].sql.replace("country", field))
    return app


def begun(world: World) -> None:
    with closing(world.keeper()) as keeper:
        world.send(*[world.put(f"o-{n}", "NL", "150.00", parts=n) for n in range(10)])
        drain(keeper)
        world.archive()


def go_on(world: World, model: type[BaseModel], app: App, *orders: BaseModel) -> list[str]:
    """Keep and archive with another model; the views whose proof does not hold."""
    world.app = app
    states = world.states
    world.__post_init__()
    # What is read back from before has the fields of the new model that it had.
    world.states = {
        key: (version, model.model_validate(before.model_dump()))
        for key, (version, before) in states.items()
        if before is not None
    }
    with closing(world.keeper()) as keeper:
        world.send(*[world.change(str(order.model_dump()["order_id"]), order) for order in orders])
        drain(keeper)
        world.archive()
        drain(keeper)
    return [report.name for report in world.verify().values() if not report.holds]


def audited(world: World) -> list[str]:
    """What the audit of the archive finds, by the model that the app has now."""
    entity_type = world.app.entity_type("ordr")
    report = audit(world.spark, world.config, "ordr", against_log=False, entity_type=entity_type)
    return [problem.message for problem in report.problems]


class WithNote(Order):
    note: str | None = None


class WithoutParts(BaseModel):
    order_id: str
    country: str | None
    amount: Amount


class PartsAsText(BaseModel):
    order_id: str
    country: str | None
    amount: Amount
    parts: str = "1"


class WithMust(Order):
    must: str


class NarrowAmount(Order):
    amount: Annotated[Decimal, Field(max_digits=9, decimal_places=2)]


class OtherKey(Order):
    number: str | None = None


@pytest.mark.full
def test_an_optional_field_is_added(world: World) -> None:
    begun(world)
    app = app_of(WithNote)
    app.view("notes", sql="SELECT note, count(*) AS orders FROM ordr GROUP BY note")
    one = WithNote(order_id="o-1", country="BE", amount=Decimal(200), note="x")
    assert go_on(world, WithNote, app, one) == []
    assert sorted(world.rows("SELECT orders FROM notes")) == [(1,), (9,)]
    assert world.rows("SELECT count(*) FROM view WHERE version > 1") == [(0,)]


@pytest.mark.full
def test_a_field_that_no_view_uses_is_removed(world: World) -> None:
    begun(world)
    one = WithoutParts(order_id="o-1", country="BE", amount=Decimal(200))
    assert go_on(world, WithoutParts, app_of(WithoutParts), one) == []
    assert audited(world) == []
    assert sorted(world.rows("SELECT country, orders FROM by_country")) == [("BE", 1), ("NL", 9)]


def test_the_type_of_a_field_that_a_view_uses_is_changed(world: World) -> None:
    world.app = orders_app(("parts", "SELECT parts, count(*) AS orders FROM ordr GROUP BY parts"))
    begun(world)
    app = app_of(PartsAsText)
    app.view("parts", sql="SELECT parts, count(*) AS orders FROM ordr GROUP BY parts")
    world.states = {}
    one = PartsAsText(order_id="n-1", country="BE", amount=Decimal(200), parts="seven")
    assert go_on(world, PartsAsText, app, one) == []
    assert ("seven", 1) in world.rows("SELECT parts, orders FROM parts")
    assert world.rows("SELECT version FROM view WHERE name = 'parts' AND published") == [(2,)]


class WithPhones(Order):
    phone: str | None = None
    mobile: str | None = None


def test_the_audit_finds_a_value_that_has_moved_to_another_field(world: World) -> None:
    world.app = app_of(WithPhones)
    world.__post_init__()
    one = WithPhones(order_id="o-1", country="BE", amount=Decimal(1), phone="7")
    two = one.model_copy(update={"order_id": "o-2"})
    world.send(*(world.change(each.order_id, each) for each in (one, two, two)))
    world.archive()
    assert audited(world) == []
    world.states["o-1"] = (1, one.model_copy(update={"phone": None, "mobile": "7"}))
    world.send(world.change("o-1", one))
    world.archive()
    assert audited(world) == [
        "the original state of version 2 is not the current state of version 1"
    ]


class Renamed(Order):
    """`country` is called `land` from now on; who writes fills it from what was there."""

    land: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _land_is_country(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("land") is None:
            return {**given, "land": given.get("country")}
        return given


class Declared(BaseModel):
    """`country` is called `land` from now on, and the model says so."""

    order_id: str
    land: Annotated[str | None, Formerly("country")]
    amount: Amount
    parts: int = 1


class WithWiderAmount(Order):
    amount: Annotated[Decimal, Field(max_digits=16, decimal_places=3)]


REFUSED: dict[type[BaseModel], str] = {
    WithMust: "must: states from before do not have it: give it a default",
    NarrowAmount: "amount: old values may not fit decimal.9, 2.",
    OtherKey: "number: keys would not be those of before",
}


def test_what_old_changes_cannot_be_read_by_is_refused_and_nothing_is_changed(
    world: World,
) -> None:
    begun(world)
    before = world.rows("SELECT name, version, status, error FROM view ORDER BY 1, 2")
    for model, said in REFUSED.items():
        app = App("orders")
        app.entity("ordr", key="number" if model is OtherKey else "order_id")(model)
        keeper = Keeper(world.spark, world.config, app)
        with closing(keeper), pytest.raises(InvalidModelChange, match=said):
            keeper.prepare()
        assert world.rows("SELECT name, version, status, error FROM view ORDER BY 1, 2") == before


@pytest.mark.full
def test_a_field_is_renamed_by_filling_the_new_one_from_the_old(world: World) -> None:
    begun(world)
    app = app_of(Renamed, "large")
    app.view(
        "by_country",
        sql="SELECT coalesce(land, country) AS land, count(*) AS orders FROM ordr GROUP BY 1",
    )
    one = Renamed(order_id="o-1", country="BE", amount=Decimal(200))
    assert one.land == "BE"
    assert go_on(world, Renamed, app, one) == []
    assert sorted(world.rows("SELECT land, orders FROM by_country")) == [("BE", 1), ("NL", 9)]


@pytest.mark.full
def test_a_type_is_widened(world: World) -> None:
    begun(world)
    _, plan = planned(world.config, app_of(WithWiderAmount))
    assert {(step.view, step.why) for step in plan.views} == {
        ("by_country", "amount is decimal(16, 3)"),
        ("large", "amount is decimal(16, 3)"),
    }
    (field,) = plan.models
    assert (field.what, field.before, field.views) == (
        "widened",
        "decimal(12, 2)",
        ("by_country", "large"),
    )
    one = WithWiderAmount(order_id="o-1", country="NL", amount=Decimal("1.125"))
    assert go_on(world, WithWiderAmount, app_of(WithWiderAmount), one) == []
    assert audited(world) == []
    assert world.rows("SELECT orders, amount FROM by_country") == [(10, Decimal("1351.125"))]


def with_value(record: OutRecord, old: bytes, new: bytes) -> OutRecord:
    """A record with other JSON in its message."""
    value = (record.value or b"").replace(old, new)
    assert value != record.value
    return OutRecord(record.topic, record.key, value, record.headers)


def test_a_state_that_does_not_fit_is_accepted_and_counted_and_a_later_model_reads_it(
    world: World,
) -> None:
    begun(world)
    odd = with_value(world.put("n-1", "BE", "9.00"), b'"parts":1', b'"parts":"seven"')
    short = with_value(world.put("n-2", "BE", "9.00"), b'"amount":"9.00",', b"")
    world.send(odd, short, world.put("o-1", "BE", "7.00"))
    with closing(world.keeper()) as keeper:
        _, _, held, dead = drain(keeper)
    assert (held, dead) == (0, 0)
    written = "SELECT state->>'parts', state->>'amount' FROM ordr_latest WHERE key LIKE 'n-%'"
    assert sorted(world.rows(written)) == [("1", None), ("seven", "9.00")]
    typed = "SELECT parts, amount FROM ordr WHERE order_id LIKE 'n-%'"
    assert sorted(world.rows(typed), key=str) == [(1, None), (None, Decimal("9.00"))]
    assert sorted(world.rows("SELECT country, orders, amount FROM by_country")) == [
        ("BE", 3, Decimal("16.00")),
        ("NL", 9, Decimal("1350.00")),
    ]
    assert world.rows("SELECT field, schema_version, count FROM misfit ORDER BY 1") == [
        ("amount", 1, 1),
        ("parts", 1, 1),
    ]
    for report in world.verify().values():
        assert report.holds
        assert [text.partition(" (")[0] for text in report.misfits] == [
            "ordr: amount does not fit the model in 1 state of schema version 1",
            "ordr: parts does not fit the model in 1 state of schema version 1",
        ]
    world.states = {}
    app = app_of(PartsAsText)
    app.view("parts", sql="SELECT parts, count(*) AS orders FROM ordr GROUP BY parts")
    assert go_on(world, PartsAsText, app) == []
    assert ("seven", 1) in world.rows("SELECT parts, orders FROM parts")
    assert world.rows("SELECT count(*) FROM dead") == [(0,)]


class WithStars(BaseModel):
    """A field with a default, and not at the end."""

    order_id: str
    stars: int = 0
    country: str | None
    amount: Amount
    parts: int = 1


def test_a_field_with_a_default_is_added_and_the_old_writer_goes_on(world: World) -> None:
    """Older states lack it, as those of a writer that is not updated yet do."""
    begun(world)
    older = World(world.config, world.spark, world.app)
    older.states = dict(world.states)
    app = app_of(WithStars)
    app.view("stars", sql="SELECT stars, count(*) AS orders FROM ordr GROUP BY stars")
    world.send(older.put("n-1", "BE", "9.00"), older.put("o-2", "BE", "8.00"))
    world.states = {"o-1": world.states["o-1"]}
    one = WithStars(order_id="o-1", country="BE", amount=Decimal(200), stars=3)
    assert go_on(world, WithStars, app) == []
    # A source of truth sends the state before as it is stored: without the field.
    world.send(with_value(world.change("o-1", one), b'"stars":0,', b""))
    world.send(older.put("n-2", "BE", "9.00"), older.put("o-3", "BE", "8.00"))
    with closing(world.keeper()) as keeper:
        assert drain(keeper)[2:] == (0, 0)
        control_of(world, lambda control: ask_rebuild(control, "stars"))
        drain(keeper)
        world.archive()
        drain(keeper)
    assert sorted(world.rows("SELECT stars, orders FROM stars"), key=str) == [(3, 1), (None, 11)]
    assert [report.name for report in world.verify().values() if not report.holds] == []
    assert world.rows("SELECT count(*) FROM misfit") == [(0,)]


MODELS_NOW: dict[str, tuple[type[BaseModel], str]] = {
    "optional": (WithNote, "note"),
    "default, in the middle": (WithStars, "stars"),
    "removed": (WithoutParts, "country"),
    "renamed": (Renamed, "coalesce(land, country)"),
    "declared": (Declared, "land"),
    "retyped": (PartsAsText, "parts"),
}


@pytest.mark.full
@pytest.mark.parametrize("change", MODELS_NOW)
def test_old_writers_a_backlog_a_rebuild_and_a_repair_stay_right_while_a_model_changes(
    world: World, change: str
) -> None:
    """The matrix of issue 28; what no old change can be read by is refused (above)."""
    model, field = MODELS_NOW[change]
    begun(world)
    newer = World(world.config, world.spark, app_of(model))
    stored = {
        key: json.loads(before.model_dump_json())
        for key, (_, before) in world.states.items()
        if before is not None
    }
    more = {"note": "x", "stars": 3, "country": "BE", "land": "BE", "parts": 4}
    if model is PartsAsText:
        more["parts"] = "4"

    def put(writer: World, key: str) -> OutRecord:
        """A state as a writer knows it, after the state that is stored, whoever wrote that."""
        kind = model if writer is newer else Order
        known = {name: value for name, value in more.items() if name in kind.model_fields}
        if writer is world:
            known |= {"country": "NL", "parts": 1}
        version, _ = world.states.get(key, (0, None))
        writer.states[key] = (version, None)
        record = writer.change(key, kind.model_validate({"order_id": key, "amount": 8, **known}))
        world.states[key] = (version + 1, None)
        message = json.loads(record.value or b"")
        message["originalEntityState"] = stored.get(key)
        if key in stored:
            message["kind"] = Kind.UPDATED.value
        stored[key] = message["currentEntityState"]
        return OutRecord(record.topic, record.key, json.dumps(message).encode(), record.headers)

    world.send(put(world, "n-1"), put(world, "o-2"))
    world.app = app_of(model)
    world.app.view("field", sql=f"SELECT {field} AS f, count(*) AS n FROM ordr GROUP BY 1")
    with closing(world.keeper()) as keeper:
        world.send(put(world, "n-2"), put(world, "o-3"))
        world.send(*[put(newer, key) for key in ("o-1", "o-3", "n-1", "n-3")])
        world.send(put(world, "o-1"), put(world, "n-3"))
        assert drain(keeper)[2:] == (0, 0)
        world.archive()
        ((version,),) = world.rows("SELECT version FROM view WHERE name = 'field' AND published")
        world.change_tables(f"UPDATE field__v{version} SET n = n + 7")
        for view in ("field", "ordr_history"):
            control_of(world, partial(ask_rebuild, name=view))
        world.send(put(world, "o-4"), put(newer, "o-5"))
        assert drain(keeper)[2:] == (0, 0)
        world.archive()
        drain(keeper)
    stored_as = "coalesce(land, country)" if model is Declared else field
    written = re.sub(r"(\w+)(?=[,)]|$)", r"state->>'\1'", stored_as)
    wanted = f"SELECT {written}, count(*) FROM ordr_latest WHERE state IS NOT NULL GROUP BY 1"
    found = world.rows("SELECT f::text, n FROM field")
    assert sorted(found, key=str) == sorted(world.rows(wanted), key=str)
    how = "SELECT status FROM view WHERE name = 'field' AND version > 1 AND published"
    assert world.rows(how) == [("live",)]
    assert [report.name for report in world.verify().values() if not report.holds] == []
    assert world.rows("SELECT count(*) FROM misfit") == [(0,)]
    assert world.rows("SELECT count(*) FROM dead") == [(0,)]


def control_of(world: World, ask: Callable[[Control], object]) -> None:
    with connect_views(world.config.views_dsn) as connection:
        ask(Control(connection, world.config.views.schema_name))


def test_v5_what_the_core_noted_as_dead_stays_dead_when_it_can_be_read(world: World) -> None:
    """As an earlier release did with states that did not fit the model."""
    begun(world)
    entity_type = world.app.entity_type("ordr")
    archive = read_archive(world.spark, world.config, entity_type)
    ends = {(1, partition): offset for partition, offset in world.ends().items()}
    ((partition, offset),) = archive.where("key = 'o-1'").select("partition", "offset").collect()
    found = accepted_changes(archive, ends, {(1, partition): [offset]})
    rows = found.select("key", "reason").collect()
    assert {row.reason for row in rows if row.key is None} == {REVIVED}
    assert len(rows) == 10
    assert "o-1" not in {row.key for row in rows}


@pytest.mark.full
def test_states_that_an_older_model_has_archived_have_the_fields_that_it_did_not_know(
    world: World,
) -> None:
    """Who writes has the new model first; the pipeline with the old one archives that."""
    begun(world)
    newer = World(world.config, world.spark, app_of(WithNote))
    version, before = world.states["o-1"]
    assert before is not None
    newer.states["o-1"] = (version, WithNote.model_validate(before.model_dump()))
    note = WithNote(order_id="o-1", country="NL", amount=Decimal(7), note="x")
    world.send(newer.change("o-1", note))
    world.states["o-1"] = newer.states["o-1"]
    with closing(world.keeper()) as keeper:
        drain(keeper)
        world.archive()
    app = app_of(WithNote)
    app.view("notes", sql="SELECT note, count(*) AS orders FROM ordr GROUP BY note")
    plain = WithNote(order_id="o-1", country="NL", amount=Decimal(7))
    assert go_on(world, WithNote, app, plain) == []
    assert world.rows("SELECT note, orders FROM notes") == [(None, 10)]


@pytest.mark.full
def test_v5_a_build_ends_where_the_core_accepted_what_nobody_can_read_and_a_proof_names_it(
    world: World,
) -> None:
    """No model can bring that about; here the archive has been damaged."""
    begun(world)
    table = f"delta.`{table_path(world.config, 'ordr')}`"
    spoilt = "raw_value = cast('{' AS binary), model = 'another'"
    world.spark.sql(f"UPDATE {table} SET {spoilt} WHERE key = 'o-1'")
    world.app = app_of(Order)
    world.app.view("more", sql="SELECT count(*) AS n, sum(parts) AS parts FROM ordr")
    with closing(world.keeper()) as keeper:
        drain(keeper)
    ((status, reason),) = world.rows("SELECT status, error FROM view WHERE name = 'more'")
    assert status == "building"
    assert "a change that the core accepted cannot be read (malformed)" in reason
    report = world.proof("by_country")
    assert any(
        "the core accepted it, and the present model cannot read it" in said
        for said in report.not_compared
    )
