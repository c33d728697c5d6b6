"""A view's SQL gives one row for one image, whenever and however often it is asked (C16)."""

from __future__ import annotations

from datetime import datetime

import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.errors import InvalidView


class Order(BaseModel):
    order_id: str
    amount: int
    due: datetime | None = None
    tags: list[str] = []


def orders() -> App:
    app = App("shop")
    app.entity("ordr", key="order_id")(Order)
    return app


@pytest.mark.parametrize(
    "text",
    """rand() randn() uuid() randstr(5) uniform(1,9) shuffle(tags) seq4() now() current_timestamp()
    current_date systimestamp() utc_timestamp() utc_date() localtimestamp() unix_timestamp()
    current_user() session_user() current_role() current_version() current_transaction()
    current_timezone() ai_generate(order_id) cast('now'as/**/timestamp) date'today'
    timestamp'yesterday' to_timestamp('tomorrow') monotonically_increasing_id()
    input_file_name() aes_encrypt(order_id,order_id) java_method('a','b')""".split(),
)
def test_c16_what_changes_without_a_change_is_refused(text: str) -> None:
    with pytest.raises(InvalidView):
        orders().view("v", sql=f"SELECT {text} AS x FROM ordr")
    with pytest.raises(InvalidView):
        orders().view("v", sql=f"SELECT count({text}) AS x FROM ordr")


@pytest.mark.parametrize(
    "text", ["sort_array(tags)", "cast('2026-01-01' AS timestamp)", "unix_timestamp(order_id)"]
)
def test_c16_what_does_not_is_kept(text: str) -> None:
    assert orders().view("v", sql=f"SELECT {text} AS x FROM ordr").kind == "row"
