"""Rows of Cassandra: the driver's named tuples, of one class for each list of columns."""

from __future__ import annotations

from everstate.cassandra import named_rows


def test_rows_have_the_attributes_of_the_driver_and_one_class() -> None:
    (first, second) = named_rows(["[applied]", "key"], [(True, "o-1"), (False, None)])
    assert (first.applied, first.key, second.applied, second.key) == (True, "o-1", False, None)
    (third,) = named_rows(("[applied]", "key"), [(True, "o-2")])
    assert type(first) is type(second) is type(third)
    (other,) = named_rows(["key", "head version"], [("o-1", 3)])
    assert (other.key, other.head_version) == ("o-1", 3)
    assert named_rows(["key"], []) == []
