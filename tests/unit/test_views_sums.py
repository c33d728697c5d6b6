"""What a batch adds to a linear view: numbers do not wrap, equal groups are one group (C16)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from everstate.pipeline.proof.as_read import read_differently
from everstate.views.stores.postgres.types import copied
from everstate.views.sums import sum_deltas
from everstate.views.tables import KeptTable, planned_column

VIEW = KeptTable(
    *("v", 1, "", "sum"),
    images=("original", "current"),
    groups=("g0",),
    sums=(("n", "count"), ("a0", "sum")),
)
LOW, HIGH = -(2**63), 2**63 - 1


def deltas(
    kind: pa.DataType, changes: list[tuple[tuple[Any, Any] | None, tuple[Any, Any] | None]]
) -> list[dict[str, Any]]:
    """Sums of changes, each of an original and a current image: a group and a number."""
    image = pa.struct([("g0", kind), ("a0", pa.int64())])
    sides: dict[str, list[Any]] = {"original": [], "current": []}
    for change in changes:
        for side, worth in zip(sides, change, strict=True):
            sides[side].append(None if worth is None else {"g0": worth[0], "a0": worth[1]})
    columns = {
        planned_column(VIEW, "original"): pa.array(sides["original"], image),
        planned_column(VIEW, "current"): pa.array(sides["current"], image),
    }
    found: list[dict[str, Any]] = sum_deltas(VIEW, pa.table(columns)).to_pylist()
    return found


@pytest.mark.parametrize("number", [LOW, HIGH])
def test_c16_a_sum_goes_beyond_64_bits_and_back(number: int) -> None:
    added = deltas(pa.string(), [(None, ("a", number))] * 3)
    assert [(row["n"], int(row["a0"])) for row in added] == [(3, 3 * number)]
    taken = deltas(pa.string(), [(("a", number), None)] * 3)
    assert [(row["n"], int(row["a0"])) for row in taken] == [(-3, -3 * number)]
    assert deltas(pa.string(), [(("a", number), ("a", number))]) == []


def test_c16_zero_is_one_group_and_so_is_not_a_number() -> None:
    """-0.0 and 0.0 are equal to PostgreSQL, which takes each row of a statement once."""
    nan = float("nan")
    found = deltas(pa.float64(), [(None, (value, 1)) for value in (0.0, -0.0, nan, -nan)])
    assert [(str(row["g0"]), row["n"]) for row in found] == [("0.0", 2), ("nan", 2)]
    nested = pa.list_(pa.float64())
    found = deltas(nested, [(None, ([value], 1)) for value in (0.0, -0.0, nan, -nan)])
    assert [(row["g0"], row["n"]) for row in found] == [("[0.0]", 2), ('["NaN"]', 2)]


def test_floats_without_a_form_in_json_are_their_words() -> None:
    values = pa.array([[1.5, float("inf"), float("-inf")], None], pa.list_(pa.float64()))
    assert copied(values).to_pylist() == ['[1.5,"Infinity","-Infinity"]', None]


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date32()])
def test_a_time_that_no_reader_could_be_given_is_refused_when_it_is_written(
    kind: pa.DataType,
) -> None:
    """PostgreSQL would take it, and every answer with that row would then be an error."""
    day_us = 86_400_000_000

    def of(microseconds: int) -> pa.Array:
        is_date = pa.types.is_date(kind)
        whole = [microseconds // day_us if is_date else microseconds, None]
        return pa.array(whole, pa.int32() if is_date else pa.int64()).cast(kind)

    first, last = -62_135_596_800_000_000, 253_402_300_799_999_999
    for kept in (of(first), of(last)):
        assert len(copied(kept)) == len(copied(pa.ListArray.from_arrays([0, 1, 2], kept))) == 2
    for outside in (of(first - 1), of(last + 1)):
        for values in (outside, pa.ListArray.from_arrays([0, 1, 2], outside)):
            with pytest.raises(pa.ArrowInvalid, match="years 1 to 9999"):
                copied(values)


def test_sums_of_more_digits_than_python_counts_with_are_compared() -> None:
    large = Decimal(10) ** 30
    assert read_differently([("a", large)], [("a", large)]) == []
    assert len(read_differently([("a", large)], [("a", 2 * large)])) == 1
