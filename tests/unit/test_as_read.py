"""Rows as readers see them against rows of the definition's own SQL."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.errors import InvalidView
from everstate.pipeline.proof.as_read import is_plain, read_differently

ROWS: list[tuple[Any, ...]] = [
    ("NL", 3, Decimal("0.333333"), None),
    ("NL", 3, 0.5, True),
    (None, 0, None, True),
    ("BE", 2**60, 1e12, False),
]


def test_order_types_and_last_places_do_not_matter() -> None:
    kept = [
        ("BE", Decimal(2**60), Decimal("1000000000000.0001"), False),
        (None, 0, None, True),
        ("NL", 3, Decimal("0.5000000000"), True),
        ("NL", Decimal("3.0"), 1 / 3, None),
    ]
    assert read_differently(ROWS, kept) == []


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (0, ("NL", 3, Decimal("0.33"), None)),
        (0, ("NL", 3, None, None)),
        (1, ("NL", 3, 0.5, False)),
        (2, ("", 0, None, True)),
        (3, ("BE", 2**60, 1e12 + 2e6, False)),
        (3, ("BE", "3", 1e12, False)),
    ],
)
def test_a_planted_difference_is_found(row: int, wrong: tuple[Any, ...]) -> None:
    kept = [wrong if place == row else right for place, right in enumerate(ROWS)]
    found = read_differently(ROWS, kept)
    assert found
    assert all(difference.key.startswith("as read: ") for difference in found)


@pytest.mark.parametrize(
    ("expected", "kept"),
    [
        (("Wien", 3_000_000), ("Wien", 3_000_001)),
        (("Wien", 3_000_000), ("Wien", Decimal("3000001.00"))),
        ((10_000_000_001, 5), (10_000_000_002, 5)),
        ((2**60, 5), (2**60 + 1, 5)),
    ],
)
def test_whole_numbers_are_equal_to_the_last_digit(
    expected: tuple[Any, ...], kept: tuple[Any, ...]
) -> None:
    assert len(read_differently([expected], [kept])) == 1


def test_keys_are_equal_to_the_last_digit_unless_they_are_floats() -> None:
    one, other = (Decimal("1000000.01"), 0.5), (Decimal("1000000.02"), 0.5)
    assert read_differently([one], [other]) == []
    assert len(read_differently([one], [other], keys=[0])) == 1
    assert read_differently([(0.10000000149011612,)], [(0.1,)], keys=[0]) == []


def test_missing_extra_and_doubled_rows_are_found() -> None:
    assert [d.what for d in read_differently(ROWS, ROWS[1:])] == ["missing"]
    assert [d.what for d in read_differently(ROWS, [*ROWS, ROWS[0]])] == ["extra"]


def test_nested_columns_are_left_out() -> None:
    assert is_plain(pa.schema({"a": pa.int64(), "b": pa.string()}))
    assert not is_plain(pa.schema({"a": pa.list_(pa.int64())}))


def test_a_cast_to_decimal_says_its_places() -> None:
    class Order(BaseModel):
        order_id: str
        amount: int

    app = App("shop")
    app.entity("ordr", key="order_id")(Order)
    with pytest.raises(InvalidView, match=r"DECIMAL\(10, 0\) in Spark"):
        app.view("v", sql="SELECT CAST(avg(amount) AS DECIMAL) AS mean FROM ordr")
    assert app.view("v", sql="SELECT CAST(avg(amount) AS DECIMAL(9, 3)) AS mean FROM ordr")
