"""Deletes without a row of their own: after a TRUNCATE, and of rows that a first snapshot lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from clean_cases import CONFIG, ITEM, UNAVAILABLE, Cleaner, Numbered, Person, capture_of
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, Table
from everstate.log.consumer import Consumer
from everstate.log.record import Record
from everstate.sources.cdc.columns import Rows
from everstate.sources.cdc.composing import RawPlace
from everstate.sources.cdc.gone import AbsentRows, read_absent, too_many
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.states import States
from everstate.sources.cdc.stream import EndedSnapshot

ENTITIES = {"person": EntityType("person", Person, "id"), "item": ITEM}
PLACE = RawPlace("raw", 0, 5)


class Waiting(Numbered):
    """Persons who wait for their boss, an item that is not in the log."""

    def __init__(self) -> None:
        people = Table(entity="person", parents={"boss_id": "item"}, truncate="delete")
        tables = {"s.people": people, "s.items": Table(entity="item")}
        capture = Capture(name="shop", kind="mariadb", tables=tables, parents_first=True)
        super().__init__(RawReader(capture, ENTITIES), CONFIG)

    def row(self, op: str, pos: int) -> Rows:
        """The row of person 1, or a TRUNCATE (``t``), at a position of the binlog."""
        source = {"connector": "mariadb", "file": "b.1", "pos": pos}
        after = None if op == "t" else {"id": 1, "boss_id": 9}
        value = json.dumps({"op": op, "after": after, "source": source}).encode()
        return self.read(("people", None if op == "t" else b'{"id":1}', value))

    @property
    def kinds(self) -> list[str]:
        return [one.kind.value for one in self.changes]


def test_a_truncation_deletes_rows_that_wait_and_no_later_ones() -> None:
    rig = Waiting()
    added = [rig.run(rig.row(op, pos)).added.total() for op, pos in (("c", 10), ("t", 9))]
    assert added == [0, 0], "it was before the row"
    added = [rig.run(rig.row(*at)).added.total() for at in (("t", 20), ("c", 30), ("t", 20))]
    assert added == [1, 0, 0], "the last one is read again"
    for _ in range(2):
        rig.run(rig.read(), 100.0)
    assert (rig.kinds, rig.held) == (["created", "deleted", "created"], {})


def test_a_truncation_ends_the_wait_for_a_state_that_is_not_known() -> None:
    cleaner = Cleaner(capture_of("debezium", table={"truncate": "delete"}))
    source = {"connector": "postgresql", "snapshot": "false", "lsn": 10}
    after = {"id": 1, "name": "a", "amount": 1, "note": UNAVAILABLE}
    cleaner.take([({"id": 1}, {"op": "u", "after": after, "source": source})])
    assert len(cleaner.held) == 1
    cleaner.take([({}, {"op": "t", "source": {**source, "lsn": 20}})])
    assert (cleaner.changes, cleaner.held) == ([], {})


def test_a_row_that_waits_and_is_not_in_a_first_snapshot_taken_again_is_deleted() -> None:
    rig = Waiting()
    rig.run(rig.row("c", 10))
    assert rig.numbering is not None
    for there, added in ({"1"}, 0), (set[str](), 1):
        position = b'{"snapshot binlog":[1,30,0]}'
        absent = AbsentRows({"s.people": "person"}, {"person": there}, position, PLACE, None)
        batch = rig.numbering.delete_absent(absent, States(rig.copy), 2.0)
        assert (batch.added.total(), batch.changes) == (added, 0)
    rig.run(rig.read(), 100.0)
    assert (rig.kinds, rig.held) == (["created", "deleted"], {})


@pytest.mark.parametrize(
    ("lacks", "percent", "may_delete", "is_kept"),
    [(5, 50, 0, False), (6, 50, 0, True), (6, 50, 5, True), (6, 50, 6, False), (10, 100, 0, False)],
)
def test_entities_stay_when_a_snapshot_lacks_too_many_of_them(
    lacks: int, percent: int, may_delete: int, is_kept: bool
) -> None:
    class Known:
        def alive(self, _entity: str, _after: str) -> Iterator[str]:
            return map(str, range(10))

    there = {"item": set(map(str, range(lacks, 10)))}
    absent = AbsentRows({"s.items": "item"}, there, b"{}", PLACE, None)
    states, limits = cast(States, Known()), {"percent": percent, "may_delete": may_delete}
    kept = too_many("shop", absent, states, {}, **limits)
    said = f"lacks {lacks} of 10 entities, more than {percent} % (capture.deletes_max_percent)"
    command = f"`everstate cdc snapshot shop --new-epoch --yes {lacks}` deletes them"
    assert [said in one and command in one for one in kept.values()] == [True] * is_kept
    assert list(absent.tables) == ([] if is_kept else ["s.items"])


def test_no_entity_of_two_tables_is_absent_while_one_of_them_has_its_row() -> None:
    tables = {"public.a": Table(entity="item"), "public.b": Table(entity="item")}
    capture = Capture(name="shop", kind="postgresql", dsn="postgresql://u@h/d", tables=tables)

    class Log:
        def read(self, *_: Any) -> Iterator[Record]:
            for number, table in enumerate("ab", 1):
                source = {"connector": "postgresql", "snapshot": "true", "lsn": 9}
                source |= {"schema": "public", "table": table}
                after = {"id": number, "name": "", "amount": None, "note": None}
                value = json.dumps({"op": "r", "after": after, "source": source}).encode()
                yield Record("raw", 0, number, 0, json.dumps({"id": number}).encode(), value, ())

    ended = EndedSnapshot(b"{}", 1, 3)
    absent = read_absent(RawReader(capture, ENTITIES), cast(Consumer, Log()), ended, PLACE)
    assert absent.keys == {"item": {"1", "2"}}
