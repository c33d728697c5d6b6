"""Whole rows from what sources give: any operations, forms, re-reads and batches (C10)."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from clean_cases import (
    CONFIG,
    FORMS,
    ITEM,
    UNAVAILABLE,
    Cleaner,
    Database,
    Numbered,
    broken_laws,
    capture_of,
)
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, Table
from everstate.sources.cdc import completion, numbering
from everstate.sources.cdc.completion import PRIOR_UNKNOWN
from everstate.sources.cdc.holding import doubt_all
from everstate.sources.cdc.reading import RawReader
from tiers import counted

EXAMPLES = counted(25, full=500)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["", "a", "b"]),
        "amount": st.sampled_from([None, 0, 1]),
        "note": st.sampled_from([None, "", "long"]),
    },
)
WRITES = st.lists(st.tuples(st.integers(1, 3), st.none() | VALUES), min_size=1, max_size=25)
CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=40)
REWINDS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=4)


def form_of(name: str) -> Any:
    return name.partition(",")[0]


def whole_before(name: str) -> dict[str, Any]:
    return {"table": {"before": "whole"}} if name == "debezium, full" else {}


def with_rewinds(log: list[Any], rewinds: list[tuple[int, int]]) -> list[Any]:
    """The log as a capture that was killed gives it: pieces of it again, from an earlier place."""
    found: list[Any] = []
    for index, message in enumerate(log):
        found.append(message)
        for at, back in rewinds:
            if at == index:
                found += log[max(0, index + 1 - back) : index + 1]
    return found


def cleaned(log: list[Any], cuts: list[int], form: str) -> Cleaner:
    cleaner = Cleaner(capture_of(form_of(form), **whole_before(form)))
    rest = iter(log)
    for size in itertools.chain(cuts, itertools.repeat(7)):
        batch = list(itertools.islice(rest, size))
        if not batch:
            break
        cleaner.take(batch)
    return cleaner


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(writes=WRITES, cuts=CUTS, rewinds=REWINDS)
def test_every_state_is_there_once_whatever_the_form_the_batches_and_the_rereads(
    form: str, writes: list[Any], cuts: list[int], rewinds: list[tuple[int, int]]
) -> None:
    database = Database(form)
    for key, values in writes:
        database.write(key, values)
    cleaner = cleaned(with_rewinds(database.log, rewinds), cuts, form)
    # Canal tells no place, so what it sends again after a restart looks the same as a change.
    may_repeat = form == "canal"
    assert broken_laws(cleaner.changes, database.history, may_repeat=may_repeat) == []
    assert not cleaner.held


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(earlier=WRITES, later=WRITES, cuts=CUTS)
def test_a_capture_that_begins_late_never_invents_and_is_right_after_a_snapshot(
    form: str, earlier: list[Any], later: list[Any], cuts: list[int]
) -> None:
    database = Database(form)
    for key, values in earlier:
        database.write(key, values)
    database.log.clear()
    for key, values in later:
        database.write(key, values)
    cleaner = cleaned(database.log, cuts, form)
    assert broken_laws(cleaner.changes, database.history, is_whole=False) == []
    if form.startswith("debezium"):
        asked = [one for one in cleaner.held.values() if one.needs_snapshot]
        assert len(asked) == len(cleaner.held)
        database.log.clear()
        for one in asked:
            database.read(int(one.key))
        cleaner.take(database.log)
        assert broken_laws(cleaner.changes, database.history, is_whole=False) == []
        assert not cleaner.held


def test_an_update_of_a_row_never_seen_is_held_and_asks_for_a_snapshot_of_its_key() -> None:
    database = Database("debezium, default")
    database.write(1, {"name": "a", "note": "long"})
    database.log.clear()
    database.write(1, {"name": "b"})
    database.write(1, {"amount": 7})
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(database.log)
    assert cleaner.changes == []
    held = cleaner.held["item", "1"]
    assert (held.reason, held.columns, held.needs_snapshot) == (PRIOR_UNKNOWN, {"id": 1}, True)
    database.log.clear()
    database.read(1)
    database.write(1, {"name": "c"})
    cleaner.take(database.log)
    assert [one.kind for one in cleaner.changes] == ["created", "updated"]
    assert broken_laws(cleaner.changes, database.history, is_whole=False) == []


def test_what_a_default_identity_says_of_a_deleted_row_is_not_believed() -> None:
    database = Database("debezium, default")
    database.write(1, {"name": "a"})
    database.log.clear()
    database.write(1, None)
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(database.log)
    assert cleaner.changes == []
    assert cleaner.batches[0].skipped == {completion.NEVER_SEEN: 1}


def taken(cleaner: Cleaner, *messages: dict[str, Any]) -> list[tuple[int, str]]:
    """Versions and names of the item 1, after these messages, each of a batch of its own."""
    for message in messages:
        cleaner.take([({"id": 1}, message)])
    return [(one.version, json.loads(one.current or b"{}")["name"]) for one in cleaner.changes]


def event(op: str, name: str, connector: str, **source: Any) -> dict[str, Any]:
    """Debezium's event of the item 1."""
    row = {"id": 1, "name": name, "amount": 1, "note": None}
    return {"op": op, "after": row, "source": {"connector": connector, **source}}


def test_rows_of_a_mysql_server_that_took_over_are_not_taken_for_older_ones() -> None:
    cleaner = Cleaner(capture_of("debezium", kind="mysql"))
    first = event("c", "a", "mysql", gtid="aaaa:900", file="b.000100", pos=50)
    second = event("u", "b", "mysql", gtid="bbbb:3", file="b.000003", pos=50)
    third = event("u", "c", "mysql", gtid="bbbb:4", file="b.000003", pos=90)
    wanted = [(1, "a"), (2, "b"), (3, "c")]
    assert taken(cleaner, first, second, third, second, third) == wanted
    # A snapshot has no GTID, and a place in the binlog of the server that it was taken from.
    snapshot = {"snapshot": "true", "file": "b.000001", "pos": 4}
    assert taken(cleaner, event("r", "d", "mysql", **snapshot))[3:] == [(4, "d")]


def test_two_updates_in_one_block_of_oracles_redo_are_read_once() -> None:
    cleaner = Cleaner(capture_of("debezium", kind="oracle"))
    log = [
        event("c", "a", "oracle", scn="99", rs_id=" 0x0000e2.0000037c.0010 ", ssn=0),
        event("u", "b", "oracle", scn="99", rs_id=" 0x0000e2.0000037c.01a0 ", ssn=0),
    ]
    assert taken(cleaner, *log, *log) == [(1, "a"), (2, "b")]


def dms(operation: str, row: dict[str, Any], before: Any = None) -> dict[str, Any]:
    """A message of DMS."""
    about = {"record-type": "data", "operation": operation, "table-name": "item"}
    return {"data": row, "metadata": about, **({"before-image": before} if before else {})}


@pytest.mark.parametrize("operation", ["update", "insert", "load"])
def test_a_column_that_dms_does_not_write_is_never_guessed(operation: str) -> None:
    row = {"id": 1, "name": "a", "amount": 5, "note": "x"}
    cleaner = Cleaner(capture_of("dms"))
    part = {"id": 1, "name": "b", "amount": 5}
    assert taken(cleaner, dms("insert", row), dms(operation, part)) == [(1, "a")]
    (refused,) = cleaner.batches[-1].refused
    assert refused.reason.startswith("note: DMS left out its column")
    assert "IncludeNullAndEmpty" in refused.reason
    # The next whole row goes on, with what DMS writes where it writes nulls.
    assert taken(cleaner, dms("update", part | {"note": None}))[1:] == [(2, "b")]
    assert json.loads(cleaner.changes[-1].current or b"")["note"] is None


@pytest.mark.parametrize("key", [1, 2])
def test_a_value_that_maxwell_does_not_write_because_it_is_null_is_never_the_old_one(
    key: int,
) -> None:
    row = {"id": 1, "name": "a", "amount": 5, "note": "x"}
    cleaner = Cleaner(capture_of("maxwell"))
    old = {"note": "x", **({"id": 1} if key == 2 else {})}
    update = {"type": "update", "data": {"id": key, "name": "a", "amount": 5}, "old": old}
    cleaner.take([({}, {"type": "insert", "data": row})])
    cleaner.take([({}, update)])
    (refused,) = cleaner.batches[-1].refused
    assert refused.reason.startswith("note: there is its value before, and none after; Maxwell")
    # Its entity waits for a whole row, since the note is not known.
    update = {"type": "update", "data": {"id": key, "name": "b", "amount": 5}, "old": {"name": "a"}}
    cleaner.take([({}, update)])
    assert cleaner.held["item", str(key)].reason == PRIOR_UNKNOWN
    assert [one.current for one in cleaner.changes[1:]] == [None] * (key - 1)


@pytest.mark.parametrize(
    "before",
    [
        {"id": 1},
        {"id": 1, "name": "a", "amount": 5},
        {"id": 1, "name": "a", "amount": 5, "note": "x"},
    ],
)
def test_a_before_image_of_dms_is_whole_or_is_not_a_state(before: dict[str, Any]) -> None:
    cleaner = Cleaner(capture_of("dms"))
    now = {"id": 1, "name": "b", "amount": 6, "note": "y"}
    wanted = [(1, "a"), (2, "b")] if "note" in before else [(1, "b")]
    assert taken(cleaner, dms("update", now, before)) == wanted


class Refusing:
    """A table of items many rows of which are refused; at most three doubts are kept one by one."""

    def __init__(self, form: str) -> None:
        self.database = Database(form)
        self.cleaner = Cleaner(capture_of(form_of(form)), held_max=3)

    def write(self, key: int, **values: Any) -> list[Any]:
        """The states that one row of the log makes."""
        self.database.write(key, values)
        return self.take()

    def refuse(self, key: int) -> None:
        """A row of the log whose amount is no number."""
        assert self.write(key, amount=f"{len(self.database.log)} pieces") == []

    def read(self, key: int) -> list[Any]:
        """The states that a row of an incremental snapshot makes, which has no position."""
        self.database.read(key)
        return self.take()

    def take(self) -> list[Any]:
        before = len(self.cleaner.changes)
        self.cleaner.take(self.database.log[-1:])
        return [json.loads(one.current or b"null") for one in self.cleaner.changes[before:]]

    @property
    def held(self) -> list[str]:
        return sorted(key for _, key in self.cleaner.held)


def test_many_refused_rows_become_one_entry_and_newer_states_stay_certain() -> None:
    rig = Refusing("debezium, default")
    for key in range(1, 7):
        rig.write(key, name="a", note="long")
    rig.refuse(1)
    assert rig.write(1, amount=5, note="new")
    for key in range(2, 5):
        rig.refuse(key)
    assert rig.held == ["2", "3", "4"], "what is settled does not count"
    rig.refuse(5)
    assert rig.held == [""]
    assert rig.write(6, name="b"), "its state is newer than each that is in doubt"
    assert rig.write(2, amount=5) == []
    assert rig.held == ["", "2"]
    assert rig.read(2), "a whole row, without a position"
    assert rig.write(2, name="d")
    assert rig.held == [""]


def test_a_refused_row_without_a_position_leaves_other_states_certain() -> None:
    rig = Refusing("debezium, default")
    for key in range(1, 9):
        rig.write(key, name="a", note="long")
    for key in range(1, 5):
        rig.refuse(key)
    rig.database.write(6, {"amount": "many"})
    for _ in range(2):
        assert rig.read(6) == []
    assert rig.held == [""]
    assert rig.write(7, name="b")
    assert rig.write(5, amount=1) == rig.write(6, amount=1) == [], "these are as old"
    assert rig.held == ["", "5", "6"]


def test_doubts_without_positions_are_few_and_end_with_a_whole_row() -> None:
    rig = Refusing("canal")
    for key in range(1, 9):
        rig.write(key, name="a", amount=0, note="n")
    for key in range(1, 5):
        rig.refuse(key)
    for number in range(1, 4):
        assert rig.held == [""]
        assert rig.write(8, name="b") == []
        assert rig.held == ["", "8"]
        assert rig.write(8, name="c", amount=number, note=f"{number}"), "a whole row"
        assert rig.write(8, name="d")
        rig.refuse(8)


def test_many_refused_rows_of_entities_that_are_not_known_leave_the_others_certain() -> None:
    rig = Refusing("debezium, default")
    for key in range(1, 20):
        rig.database.write(key, {"amount": "many"})
        assert rig.read(key) == []
        assert len(rig.held) <= 3
    rig.database.write(20, {"name": "a", "note": "long"})
    assert rig.read(20)
    assert rig.write(20, name="b")
    assert rig.held == [""]
    assert rig.write(1, amount=1) == [], "nothing of it is known"


class Owner(BaseModel):
    id: int


class Owned(Numbered):
    """Items whose amount is the number of an owner, for whom they wait; rows may be refused."""

    def __init__(self, **options: Any) -> None:
        items = Table(entity="item", key_columns=("id",), parents={"amount": "owner"})
        tables = {"public.item": items, "public.owner": Table(entity="owner", key_columns=("id",))}
        capture = Capture(name="shop", kind="postgresql", tables=tables, parents_first=True)
        entities = {"item": ITEM, "owner": EntityType("owner", Owner, "id")}
        super().__init__(RawReader(capture, entities), CONFIG, **options)
        self.lsn = 0

    def own(self, key: int) -> list[Any]:
        """An owner is created."""
        return self._row("owner", key, "c", {"id": key}, self._next())

    def write(
        self, key: int, op: str = "u", *, was: int | None = None, lsn: int | None = None, **row: Any
    ) -> list[Any]:
        """A row of an item, which lacks the columns that are not given; out: the new states.

        ``was``: the key it had before; ``lsn``: of a row that is read again.
        """
        after = dict.fromkeys(("name", "amount", "note"), UNAVAILABLE) | {"id": key, **row}
        place = self._next() if lsn is None else lsn
        return self._row("item", key, op, None if op == "d" else after, place, was)

    def _next(self) -> int:
        self.lsn += 10
        return self.lsn

    def _row(
        self, table: str, key: int, op: str, after: Any, lsn: int, was: int | None = None
    ) -> list[Any]:
        source: dict[str, Any] = {"connector": "postgresql", "snapshot": "false", "lsn": lsn}
        if op == "r":  # As of an incremental snapshot: without a position.
            source |= {"snapshot": "incremental", "lsn": None}
        value = json.dumps({"op": op, "before": None, "after": after, "source": source}).encode()
        headers = (None, None if was is None else json.dumps({"id": was}).encode())
        before = len(self.changes)
        self.run(self.read((table, json.dumps({"id": key}).encode(), value), headers=headers))
        made = self.changes[before:]
        return [json.loads(one.current or b"null") for one in made if one.entity == "item"]


WHOLE: dict[str, Any] = {"name": "a", "amount": 9, "note": "old"}
REFUSED: dict[str, Any] = {"name": "never", "amount": "many", "note": "never"}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("how", ["refused", "lost"])
def test_rows_held_before_a_refused_or_lost_one_do_not_make_the_state_certain(
    how: str, restarts: bool
) -> None:
    rig = Owned(restarts=restarts)
    assert rig.write(1, "c", **WHOLE) == []
    if how == "refused":
        assert rig.write(1, **REFUSED) == []
    else:
        capture = rig.reader.capture
        assert doubt_all(rig.held, rig.copy, capture, capture.tables, 0.0) == {("item", "1")}
    assert rig.write(1, name="b", amount=9) == []
    assert rig.own(9) == [{"id": 1, **WHOLE}], "what comes after it waits"
    held = rig.held["item", "1"]
    assert (len(held.rows), held.reason, held.needs_snapshot) == (1, PRIOR_UNKNOWN, True)
    assert rig.write(1, name="c", amount=9, note="newer"), "a whole row"
    assert rig.write(1, name="d", amount=9) == [{"id": 1, **WHOLE, "name": "d", "note": "newer"}]
    assert not rig.held


@pytest.mark.parametrize("restarts", [False, True])
def test_of_held_rows_each_is_completed_as_the_refused_rows_between_them_allow(
    restarts: bool,
) -> None:
    rig = Owned(restarts=restarts)
    rig.write(1, "c", **WHOLE, lsn=10)
    rig.write(1, name="b", amount=9, lsn=20)
    for place in (30, 31):
        rig.write(1, **REFUSED, lsn=place)
    rig.write(1, name="c", amount=9, note="c", lsn=40)
    rig.write(1, name="d", amount=9, lsn=50)
    rig.write(1, **REFUSED, lsn=45)
    rig.write(1, name="e", amount=9, lsn=60)
    assert rig.held["item", "1"].doubts == [2, 3]
    made = rig.own(9)
    assert [(one["name"], one["note"]) for one in made] == [("a", "old"), ("b", "old"), ("c", "c")]
    assert len(rig.held["item", "1"].rows) == 2, "these came after the one at 45"


def test_a_refused_row_behind_the_last_held_one_leaves_the_state_uncertain() -> None:
    rig = Owned()
    rig.write(1, "c", **WHOLE)
    rig.write(1, **REFUSED)
    assert rig.own(9)
    held = rig.held["item", "1"]
    assert (held.rows, held.is_unsure, held.waits_for) == ([], True, None)
    assert rig.write(1, name="b", amount=9) == []


def test_rows_held_behind_one_without_a_position_are_not_taken_for_older_ones() -> None:
    rig = Owned(held_max=3)
    rig.write(1, "c", **WHOLE)
    rig.write(1, "r", **WHOLE | {"name": "b"})
    rig.write(1, "d")
    for key in range(2, 6):
        rig.write(key, "c", **WHOLE | {"amount": None})
        rig.write(key, **REFUSED)
    assert ("item", "") in rig.held, "all older states are uncertain"
    assert [one and one["name"] for one in rig.own(9)] == ["a", "b", None]


def test_a_whole_row_that_was_read_before_makes_no_state_certain() -> None:
    rig = Owned()
    rig.own(9)
    rig.write(1, "c", **WHOLE)
    rig.write(1, **WHOLE | {"name": "b"})
    rig.write(1, **REFUSED)
    assert rig.write(1, "c", **WHOLE, lsn=20) == []
    assert rig.write(1, name="c", amount=9) == []
    assert [row.op for row in rig.held["item", "1"].rows] == ["u"]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("refused", ["one", "many", "behind a delete"])
def test_a_row_with_a_new_key_takes_nothing_from_an_uncertain_state(
    refused: str, restarts: bool
) -> None:
    rig = Owned(restarts=restarts, held_max=2)
    rig.own(9)
    keys = range(1, 5) if refused == "many" else (1,)
    for key in keys:
        rig.write(key, "c", **WHOLE)
    if refused == "behind a delete":
        rig.write(1, "d")
    for key in keys:
        rig.write(key, **REFUSED)
    rig.write(1, "d")
    assert rig.write(7, "c", was=1, name="b", amount=9) == [], "its note is not known"
    held = rig.held["item", "7"]
    assert held.waits_for_state, "clean requests a snapshot"
    rig.run(rig.read(), 100.0)
    assert rig.write(7, name="c", amount=9) == []
    assert rig.write(7, name="d", amount=9, note="new"), "a whole row"
    assert rig.held.keys() == ({("item", "")} if refused == "many" else set())


def test_a_row_with_a_new_key_takes_nothing_from_a_state_that_was_never_completed() -> None:
    rig = Owned()
    rig.own(9)
    rig.write(2, "c", **WHOLE)
    rig.write(2, "d")
    assert rig.write(2, "c", was=1, name="b", amount=9) == [], "nothing is known of key 1"
    rig.write(2, "d")
    assert rig.write(3, "c", was=2, name="b", amount=9) == []
    assert rig.held["item", "3"].waits_for_state


def test_a_row_with_a_new_key_takes_nothing_from_a_later_end_of_its_old_key() -> None:
    rig = Owned()
    rig.own(9)
    for note in ("old", "newer"):
        rig.write(1, "c", **WHOLE | {"note": note})
        rig.write(1, "d")
    assert rig.write(2, "c", was=1, lsn=30, name="b", amount=9) == [], "its note is not known"
    assert rig.held["item", "2"].waits_for_state


@pytest.mark.parametrize("restarts", [False, True])
def test_a_row_with_a_new_key_takes_the_state_of_rows_that_were_held(restarts: bool) -> None:
    rig = Owned(restarts=restarts)
    for key in (5, 1):
        rig.write(key, "c", **WHOLE)
    rig.write(5, "d")
    assert rig.write(3, "c", was=5, name="b", amount=9) == []
    assert {"id": 3, **WHOLE, "name": "b"} in rig.own(9)
    assert not rig.held


def planted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A defect that a plausible first version has."""
    if name == "re-reads are taken for news":
        for module in (completion, numbering):
            monkeypatch.setattr(module, "was_read", lambda _position, _known: False)
    elif name == "an unknown state is filled with nulls":
        nothing = b'{"name":"","amount":null,"note":null}'
        monkeypatch.setattr(completion, "_base", lambda *_: nothing)
    else:
        monkeypatch.setattr(
            completion,
            "_base",
            lambda row, known, *_: (
                None if known is None else _FIRST.setdefault(row.key, known.image)
            ),
        )


_FIRST: dict[str, bytes] = {}


@pytest.mark.parametrize(
    "defect",
    [
        "re-reads are taken for news",
        "an unknown state is filled with nulls",
        "a row is completed from an old state",
    ],
)
def test_the_checker_catches_a_planted_defect(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, defect)
    database = Database("debezium, default")
    database.write(1, {"name": "a", "note": "long"})
    database.write(1, {"name": "b"})
    database.write(1, {"note": "longer"})
    database.write(1, {"name": "c"})
    cleaner = Cleaner(capture_of("debezium"))
    cleaner.take(with_rewinds(database.log, [(2, 2), (3, 3)]))
    assert broken_laws(cleaner.changes, database.history)
