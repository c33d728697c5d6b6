"""Names that would meet a table of the store are refused when they are declared."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.declarations.captures import Table
from everstate.errors import InvalidCapture, InvalidEntityType, InvalidView
from everstate.views.control import schema
from everstate.views.names import RESERVED


class Order(BaseModel):
    order_id: str
    amount: int


SQL = "SELECT count(*) AS n FROM ordr"
OURS = [*sorted(RESERVED), "x__v1", "x_history__v12", "x__v1_empty", "position_pkey"]


@pytest.mark.parametrize("name", OURS)
def test_names_of_the_store_are_refused(name: str) -> None:
    app = App("shop")
    with pytest.raises(InvalidEntityType, match="cannot have this name"):
        app.entity(name, key="order_id")(Order)
    app.entity("ordr", key="order_id")(Order)
    with pytest.raises(InvalidView, match="a view cannot have this name"):
        app.view(name, sql=SQL)


@pytest.mark.parametrize("name", ["guest\n", "Guest", "1st", "", "a" * 41, "gäste"])
def test_a_name_that_is_no_name_is_refused_wherever_one_is_declared(name: str) -> None:
    app = App("shop")
    with pytest.raises(InvalidEntityType):
        app.entity(name, key="order_id")(Order)
    app.entity("ordr", key="order_id")(Order)
    app.entity("row", key="order_id", source="capture")(Order)
    with pytest.raises(InvalidView):
        app.view(name, sql=SQL)
    with pytest.raises(InvalidEntityType):
        app.process(name, on=["ordr"], react=lambda change: ())
    with pytest.raises(InvalidCapture):
        app.capture(name, kind="postgresql", tables={"public.row": Table(entity="row")})


@pytest.mark.parametrize("name", ["view_count", "dead_letters", "gate", "x_v1", "held_orders"])
def test_other_names_are_not(name: str) -> None:
    app = App("shop")
    app.entity("ordr", key="order_id")(Order)
    assert app.view(name, sql=SQL).name == name
    app.entity(f"{name}s", key="order_id")(Order)


def test_every_control_table_is_reserved() -> None:
    tables = re.findall(
        r"CREATE (?:TABLE|UNIQUE INDEX|INDEX) IF NOT EXISTS (?:\{s\}\.)?(\w+)", schema._DDL
    )
    assert len(tables) == 22
    assert set(tables) <= RESERVED


@pytest.mark.parametrize("view", ["other", "other_latest", "other_history"])
def test_an_entity_type_meets_no_view_that_was_declared_before(view: str) -> None:
    app = App("shop")
    app.entity("ordr", key="order_id")(Order)
    app.view(view, sql=SQL)
    with pytest.raises(InvalidEntityType, match=f"{view} is there already"):
        app.entity("other", key="order_id")(Order)


def test_an_entity_type_meets_no_table_of_another() -> None:
    app = App("shop")
    app.entity("ordr", key="order_id")(Order)
    with pytest.raises(InvalidEntityType, match="ordr_latest is there already"):
        app.entity("ordr_latest", key="order_id")(Order)
