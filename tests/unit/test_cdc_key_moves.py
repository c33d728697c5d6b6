"""Updates of keys, in every form: the old entity ends, and the new one has the row's state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clean_cases import Cleaner, capture_of
from everstate.declarations.captures import CaptureForm
from everstate.sources.cdc.columns import ENDED
from everstate.sources.cdc.states import older_rows_of

ROW = {"id": 1, "name": "a", "amount": 1, "note": "n"}
NOW = {**ROW, "id": 2, "name": "b"}
SOURCE = {"connector": "mariadb", "file": "b.000001", "snapshot": "false"}
ABOUT = {"record-type": "data", "table-name": "item"}
MOVED: dict[str, tuple[CaptureForm, Any, Any]] = {
    "maxwell by default": (
        "maxwell",
        {"type": "insert", "table": "item", "data": ROW},
        {"type": "update", "table": "item", "data": NOW, "old": {"id": 1, "name": "a"}},
    ),
    "canal without pkNames": (
        "canal",
        {"type": "INSERT", "table": "item", "data": [ROW]},
        {"type": "UPDATE", "table": "item", "data": [NOW], "old": [{"id": 1, "name": "a"}]},
    ),
    "goldengate without primary_keys": (
        "goldengate",
        {"op_type": "I", "table": "S.ITEM", "after": ROW},
        {"op_type": "U", "table": "S.ITEM", "before": {"id": 1, "name": "a"},
         "after": {"id": 2, "name": "b"}},
    ),
    "dms": (
        "dms",
        {"data": ROW, "metadata": {**ABOUT, "operation": "insert"}},
        {"data": NOW, "before-image": {"id": 1, "name": "a"},
         "metadata": {**ABOUT, "operation": "update"}},
    ),
    "debezium with another key": (
        "debezium",
        {"op": "c", "after": ROW, "source": {**SOURCE, "pos": 10}},
        {"op": "u", "before": ROW, "after": NOW, "source": {**SOURCE, "pos": 20}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVED)
def test_declared_key_columns_decide_also_when_the_key_changes(case: str) -> None:
    form, inserted, updated = MOVED[case]
    cleaner = Cleaner(capture_of(form))
    cleaner.take([({}, inserted)])
    cleaner.take([({}, updated)])
    states = {one.key: json.loads(one.current or b"null") for one in cleaner.changes}
    assert states == {"1": None, "2": NOW}
    assert not cleaner.held


class Statement:
    """A transaction of PostgreSQL over a table with a deferred key and whole rows in its log."""

    def __init__(self, *, is_ours: bool = True, restarts: bool = False, **table: Any) -> None:
        capture = capture_of("debezium", table=table)
        self.cleaner = Cleaner(capture, restarts=restarts, is_trusted=is_ours)
        self.log: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
        self.lsn, self.transaction, self.has_ids = 100, 7, False

    def source(self) -> dict[str, Any]:
        self.lsn += 10
        source = {"connector": "postgresql", "snapshot": "false", "lsn": self.lsn}
        source |= {"txId": self.transaction, "ts_us": 9 + self.transaction}
        block = {"id": f"{self.transaction}:{self.lsn}"} if self.has_ids else None
        return {"source": source, "transaction": block}

    def add(self, key: int, name: str) -> None:
        message = {"op": "c", "before": None, "after": row_of(key, name), **self.source()}
        self.log.append(({"id": key}, message))

    def delete(self, key: int, name: str) -> None:
        message = {"op": "d", "before": row_of(key, name), "after": None, **self.source()}
        self.log.append(({"id": key}, message))

    def move(self, key: int, to: int, name: str) -> None:
        """As Debezium writes an update of the key: both records at one position."""
        self.delete(key, name)
        self.lsn -= 10
        self.add(to, name)

    @property
    def stored(self) -> list[str]:
        """The states that are stored of rows whose key another row has."""
        stored = [json.loads(value)["state"]["name"] for value in older_rows_of(self.cleaner.copy)]
        return sorted(stored)

    def commit(self, *cuts: int) -> dict[str, str]:
        """Clean it, in batches of these sizes and the rest; out: key and name of each row."""
        for size in (*cuts, len(self.log)):
            self.cleaner.take(self.log[:size])
            del self.log[:size]
        self.transaction += 1
        states = {one.key: json.loads(one.current or b"null") for one in self.cleaner.changes}
        return {key: state["name"] for key, state in states.items() if state is not None}


def row_of(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name, "amount": None, "note": None}


@pytest.mark.parametrize("names", ["abc", "aaa"], ids=["different rows", "equal rows"])
@pytest.mark.parametrize("cuts", [(), (1, 1, 1, 1), (3,)])
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (2, 1, 3)])
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("restarts", [False, True])
def test_keys_that_all_rows_of_a_statement_pass_on_lose_no_row(
    names: str, cuts: tuple[int, ...], order: tuple[int, ...], is_ours: bool, restarts: bool
) -> None:
    """`UPDATE t SET id = id + 1`, whatever the order in which the rows are stored.

    Also when clean is restarted in the middle of it.
    """
    statement = Statement(is_ours=is_ours, restarts=restarts)
    for key, name in enumerate(names, 1):
        statement.add(key, name)
    statement.commit()
    for key in order:
        statement.move(key, key + 1, names[key - 1])
    assert statement.commit(*cuts) == {str(key): name for key, name in enumerate(names, 2)}
    assert statement.stored == []
    statement.delete(3, names[1])
    assert statement.commit() == {"2": names[0], "4": names[2]}


def test_of_two_rows_with_one_key_the_deleted_one_goes() -> None:
    statement = Statement()
    statement.add(1, "old")
    statement.commit()
    statement.add(1, "new")
    statement.delete(1, "old")
    assert statement.commit() == {"1": "new"}
    statement.add(1, "never")
    statement.delete(1, "never")
    assert statement.commit() == {"1": "new"}
    statement.add(1, "newer")
    statement.delete(1, "newer")
    statement.delete(1, "new")
    assert statement.commit() == {}


def test_of_three_rows_with_one_key_each_goes_where_it_goes() -> None:
    statement = Statement()
    for key, name in enumerate("abc", 1):
        statement.add(key, name)
    statement.commit()
    statement.move(1, 3, "a")
    statement.move(2, 3, "b")
    statement.move(3, 9, "a")
    statement.move(3, 8, "c")
    assert statement.commit() == {"3": "b", "9": "a", "8": "c"}


@pytest.mark.parametrize("is_ours", [True, False])
def test_of_three_rows_with_one_key_each_is_known_after_any_restart(is_ours: bool) -> None:
    statement = Statement(is_ours=is_ours, restarts=True)
    for key, name in enumerate("abc", 1):
        statement.add(key, name)
    statement.commit()
    statement.move(1, 3, "a")
    statement.move(2, 3, "b")
    images = {"before": row_of(3, "a"), "after": row_of(3, "A")}
    statement.log.append(({"id": 3}, {"op": "u", **images, **statement.source()}))
    statement.move(3, 9, "b")
    statement.move(3, 8, "c")
    assert statement.commit(1, 1, 1, 1, 1, 1, 1, 1) == {"3": "A", "9": "b", "8": "c"}
    assert statement.stored == []


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("passed_by", ["end", "later row", "truncation"])
def test_what_a_statement_leaves_is_forgotten_once_it_has_passed(
    passed_by: str, restarts: bool
) -> None:
    """As after a TRUNCATE that was refused: all rows are created once more."""
    statement = Statement(restarts=restarts, truncate="delete")
    statement.has_ids = passed_by == "end"
    for _ in range(2):
        for key, name in enumerate("abc", 1):
            statement.add(key, name)
        statement.commit()
    assert statement.stored == ["a", "b", "c"]
    cleaner = statement.cleaner
    read = {"op": "r", "after": row_of(7, "g"), "source": {"snapshot": "incremental"}}
    cleaner.take([({"id": 7}, {**read, "ts_ms": 10**12})])
    assert len(statement.stored) == 3, "a snapshot reads within a transaction"
    if passed_by == "end":
        rows = cleaner.read(("item", b"{}", b"{}"))
        rows.what, rows.tx, rows.table = [ENDED], ["8"], [-1]
        cleaner.run(rows)
    elif passed_by == "later row":
        statement.add(9, "z")
        statement.commit()
    else:
        statement.transaction -= 1
        emptied = {"op": "t", "before": None, "after": None, **statement.source()}
        cleaner.take([({}, emptied)])
    assert statement.stored == []


def test_a_row_of_an_earlier_transaction_that_is_read_again_lets_nothing_be_forgotten() -> None:
    """A connector that restarts within a transaction writes the rows before it once more."""
    statement = Statement(is_ours=False, restarts=True)
    statement.add(1, "a")
    statement.add(2, "b")
    again = list(statement.log)
    statement.commit()
    statement.move(1, 2, "a")
    rest = [*again, *statement.log]
    statement.cleaner.take(statement.log)
    statement.cleaner.take(again)
    statement.log = rest
    statement.move(2, 3, "b")
    assert statement.commit(2, 1) == {"2": "a", "3": "b"}


def test_rows_that_swap_their_keys_stay_both() -> None:
    statement = Statement()
    statement.add(1, "a")
    statement.add(2, "b")
    statement.commit()
    statement.move(1, 2, "a")
    statement.move(2, 1, "b")
    assert statement.commit() == {"1": "b", "2": "a"}


@pytest.mark.parametrize("name", ["old", "new"])
def test_an_update_of_one_of_two_rows_with_one_key_is_known_by_the_row_before(name: str) -> None:
    statement = Statement()
    statement.add(1, "old")
    statement.commit()
    statement.add(1, "new")
    images = {"before": row_of(1, name), "after": row_of(1, "changed")}
    statement.log.append(({"id": 1}, {"op": "u", **images, **statement.source()}))
    other = "new" if name == "old" else "old"
    statement.delete(1, "changed")
    assert statement.commit() == {"1": other}


def test_a_row_that_was_missed_is_no_second_row_with_its_key() -> None:
    """As after a TRUNCATE that was refused: without a full identity no key is deferred."""
    statement = Statement()
    statement.add(1, "stale")
    statement.commit()
    statement.add(1, "new")
    images = {"before": None, "after": row_of(1, "newer")}
    statement.log.append(({"id": 1}, {"op": "u", **images, **statement.source()}))
    assert statement.commit() == {"1": "newer"}
    statement.add(1, "again")
    statement.delete(1, "")
    assert statement.commit() == {}


def test_a_truncation_deletes_both_rows_with_one_key() -> None:
    statement = Statement(truncate="delete")
    statement.add(1, "old")
    statement.commit()
    statement.add(1, "new")
    emptied = {"op": "t", "before": None, "after": None, **statement.source()}
    statement.log.append(({}, emptied))
    assert statement.commit() == {}
