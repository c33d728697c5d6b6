"""A model that changes on a project that runs: archive, views and proofs."""

from __future__ import annotations

from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from keep_cases import Order, World, drain, orders_app
from pydantic import BaseModel, Field
from pyspark.sql import SparkSession

from everstate.app import App
from everstate.config import Config, load

Amount = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


@pytest.fixture
def world(
    stack_config: Config,
    stack: Any,
    topic_prefix: str,
    database: str,
    spark: SparkSession,
    tmp_path: Path,
) -> World:
    config = load(
        tmp_path,
        log={"bootstrap_servers": stack.bootstrap_servers, "prefix": topic_prefix},
        store={"dsn": database},
        archive={"trigger_s": 1},
        pipeline=stack_config.pipeline.model_dump(),
    )
    return World(config, spark)


def app_of(model: type[BaseModel], *views: str) -> App:
    app = App("orders")
    app.entity("ordr", key="order_id")(model)
    for name in views or ("by_country", "large"):
        app.view(name, sql=orders_app().views[name].sql)
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


def test_an_optional_field_is_added(world: World) -> None:
    begun(world)
    app = app_of(WithNote)
    app.view("notes", sql="SELECT note, count(*) AS orders FROM ordr GROUP BY note")
    one = WithNote(order_id="o-1", country="BE", amount=Decimal(200), note="x")
    assert go_on(world, WithNote, app, one) == []
    assert sorted(world.rows("SELECT orders FROM notes")) == [(1,), (9,)]
    assert world.rows("SELECT count(*) FROM view WHERE version > 1") == [(0,)]


def test_a_field_that_no_view_uses_is_removed(world: World) -> None:
    begun(world)
    one = WithoutParts(order_id="o-1", country="BE", amount=Decimal(200))
    assert go_on(world, WithoutParts, app_of(WithoutParts), one) == []
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


def test_a_required_field_is_added(world: World) -> None:
    begun(world)
    world.states = {}
    one = WithMust(order_id="n-1", country="BE", amount=Decimal(200), must="m")
    assert go_on(world, WithMust, app_of(WithMust), one) == []
