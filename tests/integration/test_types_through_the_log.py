"""Every value of the table of types leaves equal: log, lake, views, proof, get, history, REST."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from keep_cases import World, drain
from pydantic import BaseModel, create_model
from pyspark.sql import SparkSession
from rest_cases import client

from everstate.app import App
from everstate.changes.json_numbers import decode
from everstate.changes.row_json import row_json
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.pipeline.spark.archived import read_archive
from everstate.serving import Reader
from kit.changes import state_text
from type_table import FIELD_TYPES, FieldType, Given, arrow_value, lake_value, same_value

pytestmark = pytest.mark.settings(archive={"trigger_s": 1})

FIELDS = {f"f{number}": kind for number, kind in enumerate(FIELD_TYPES)}
NESTED = ("list[…]", "dict[str, …]", "set[str]", "a model")
SHOWN = [name for name, kind in FIELDS.items() if kind.name not in NESTED]
"""Fields that a view can have as columns."""
VIEWS = {"typed view": "value", "SQL view": "seen"}
"""Way out → the view that every entity type has, and one that is declared in SQL."""
CASES: dict[str, tuple[str, FieldType, Given]] = {
    f"{name}-{number}": (name, kind, given)
    for name, kind in FIELDS.items()
    for number, given in enumerate(kind.given)
    if given.reason("REST") is None
}
"""Key of an entity → the field that it has, its type, and the value."""


def values_app() -> App:
    app = App("values")
    fields: Any = {name: (kind.annotation | None, None) for name, kind in FIELDS.items()}
    app.entity("value", key="id", source="capture")(create_model("Value", id=(str, ...), **fields))
    app.view("seen", sql=f"SELECT id, {', '.join(SHOWN)} FROM value")
    return app


@pytest.fixture
def world(config: Config, spark: SparkSession) -> World:
    return World(config, spark, values_app(), "value")


def test_every_value_leaves_equal_in_every_way(world: World, spark: SparkSession) -> None:
    entity_type = world.app.entity_type("value")
    models: dict[str, BaseModel] = {}
    for key, (name, _, given) in CASES.items():
        models[key] = entity_type.accept(decode(f'{{"id": "{key}", "{name}": {given.text}}}'))
    with closing(world.keeper()) as keeper:
        world.send(*(world.change(key, model) for key, model in models.items()))
        assert drain(keeper) == (len(models), 0, 0, 0)
    assert [name for name, report in world.verify().items() if not report.holds] == []
    logged = states_in(world)
    wrong = unequal("log", lambda key: logged[key])
    with Reader(world.config, world.app) as reader:
        wrong += unequal("get", lambda key: row_json(reader.get("value", key).state))
        wrong += unequal("history", lambda key: row_json(reader.history("value", key)[0].state))
    with client(world.config, world.app) as api:
        wrong += unequal("REST", lambda key: api.get(f"/v1/value/{key}").content)

    lake = read_archive(spark, world.config, entity_type).select("key", "current").toArrow()
    rows = {row["key"]: row["current"] for row in lake.to_pylist()}
    kinds = {field.name: field.type for field in entity_type.arrow_schema}
    for key, (name, _, given) in CASES.items():
        wanted = arrow_value(lake_value(getattr(models[key], name)), kinds[name])
        if rows[key][name] != wanted:
            wrong.append(f"lake: {given.text}: {rows[key][name]!r} and not {wanted!r}")
        for way, view in VIEWS.items() if name in SHOWN else ():
            ((shown,),) = world.rows(f"SELECT {name} FROM {view} WHERE id = '{key}'")
            if shown != wanted and str(shown) != str(wanted):
                wrong.append(f"{way}: {given.text}: {shown!r} and not {wanted!r}")
    assert wrong == []


def states_in(world: World) -> dict[str, bytes]:
    """Key → its state as the log has it."""
    found = {}
    with Consumer(world.config) as consumer:
        for record in consumer.read_topic(world.topic):
            found[(record.key or b"").decode()] = state_text(record.value or b"")
    return found


def unequal(way: str, state: Callable[[str], bytes]) -> list[str]:
    """The values whose state, read in this way, does not have them."""
    wrong = []
    for key, (name, kind, given) in CASES.items():
        found = state(key)
        if not same_value(kind, given.text, found, name):
            wrong.append(f"{way}: {given.text}: {found!r}")
    return wrong
