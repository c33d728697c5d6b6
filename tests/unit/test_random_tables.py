"""The checker of random tables finds what is wrong with one value, one column or one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from random_columns import SAME
from random_databases import Maria, Postgres
from random_tables import World, differences

WORLD = World(Postgres("postgresql://nobody@localhost/none"), 7, 10)
TABLE = WORLD.tables[0]
PRINTED = {
    key: {"id": key, **{column.field: None for column in TABLE.columns}, "note": note}
    for key, note in (("1", "a"), ("2", None))
}
States = dict[str, dict[str, Any]]


def states() -> States:
    return {key: {**row, "id": int(key)} for key, row in PRINTED.items()}


def default_for_null(found: States) -> None:
    found["2"]["note"] = "MANUAL"


def null_for_value(found: States) -> None:
    found["1"]["note"] = None


def without_column(found: States) -> None:
    del found["1"]["note"]


def without_row(found: States) -> None:
    del found["2"]


def row_too_many(found: States) -> None:
    found["3"] = found["2"]


def other_key(found: States) -> None:
    found["1"]["id"] = 3


@pytest.mark.parametrize(
    "plant",
    [default_for_null, null_for_value, without_column, without_row, row_too_many, other_key],
)
def test_a_planted_defect_is_found(plant: Callable[[States], None]) -> None:
    assert differences(TABLE, PRINTED, states()) == []
    planted = states()
    plant(planted)
    assert len(differences(TABLE, PRINTED, planted)) == 1


@pytest.mark.parametrize(
    ("rule", "printed", "told", "other"),
    [
        ("text", "a ", "a ", "a"),
        ("text", "1.50", "1.50", "1.5"),
        ("instant", "2026-01-01 12:00:00+02", "2026-01-01T10:00:00Z", "2026-01-01T12:00:00Z"),
        ("utc", "2026-01-01 12:00:00", "2026-01-01T12:00:00Z", "2026-01-01T11:00:00Z"),
        ("micros", "00:00:01.5", 1_500_000, 1_500_005),
        ("interval", "P1Y2M-3DT4H5M6.7S", "P1Y2M-3DT4H5M6.7S", "P1Y2M3DT4H5M6.7S"),
        ("hex", "\\x00ff", "AP8=", "/wA="),
        ("bits", "100000000001", "AQg=", "CAE="),
        ("truth", "t", True, False),
    ],
)
def test_values_are_equal_by_the_rule_of_their_type(
    rule: str, printed: str, told: Any, other: Any
) -> None:
    same = SAME[rule]
    assert same.printed(printed) == same.told(told)
    assert same.printed(printed) != same.told(other)


@pytest.mark.parametrize(
    "server",
    [
        Postgres("postgresql://nobody@localhost/none"),
        Maria("mariadb://nobody@localhost/x", "x"),
        Maria("mysql://nobody@localhost/x", "x", "mysql"),
    ],
    ids=["postgresql", "mariadb", "mysql"],
)
def test_one_seed_gives_one_world_and_its_first_tables_are_captured(
    server: Postgres | Maria,
) -> None:
    one, same, other = (World(server, seed, 30) for seed in (3, 3, 4))
    made = [[each.creation(table) for table in each.tables] for each in (one, same, other)]
    assert made[0] == made[1] != made[2]
    assert all(table.refused is None for table in one.tables[: one.sure])
    assert any(table.refused for table in one.tables)
