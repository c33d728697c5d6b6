"""Rows of one table that wait for each other, as those of a tree that is written leaves first."""

from __future__ import annotations

import json

from pydantic import BaseModel

from clean_cases import CONFIG, Numbered
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, Table
from everstate.sources.cdc.columns import Rows
from everstate.sources.cdc.reading import RawReader


class Person(BaseModel):
    id: int
    boss_id: int


class People(Numbered):
    """Persons who wait for their boss."""

    def __init__(self) -> None:
        tables = {"s.people": Table(entity="person", parents={"boss_id": "person"})}
        capture = Capture(name="shop", kind="mariadb", tables=tables, parents_first=True)
        super().__init__(RawReader(capture, {"person": EntityType("person", Person, "id")}), CONFIG)

    def take(self, *persons: tuple[int, int], now_s: float = 0.0) -> list[int]:
        """One batch with a new row of each person and boss; whom it published, in order."""
        rows = Rows.none()
        for person, boss in persons:
            value = {"op": "c", "after": {"id": person, "boss_id": boss}, "source": {}}
            key = json.dumps({"id": person}).encode()
            rows.extend(self.read(("people", key, json.dumps(value).encode())))
        self.changes = []
        self.run(rows, now_s)
        return [int(one.key) for one in self.changes]


def test_a_tree_that_comes_leaves_first_goes_on_however_deep_it_is() -> None:
    people = People()
    assert people.take(*((n, n - 1) for n in range(3000, 1, -1))) == []
    assert len(people.held) == 2999
    assert people.take((1, 1)) == [*range(1, 3001)]
    assert not people.held


def test_those_who_waited_for_one_come_directly_behind_and_in_the_order_of_their_keys() -> None:
    people = People()
    assert people.take((7, 4), (5, 4), (6, 5), (4, 2), (3, 2)) == []
    assert people.take((2, 1), (8, 8)) == [8]
    assert people.take((1, 1)) == [1, 2, 3, 4, 5, 6, 7]


def test_rows_above_which_there_is_a_cycle_go_on_with_it() -> None:
    people = People()
    assert people.take((3, 2), (2, 1)) == []
    assert people.take((1, 3)) == [1, 2, 3]
    assert not people.held
