"""Updates of keys, in every form: the old entity ends, and the new one has the row's state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clean_cases import Cleaner, capture_of
from everstate.declarations.captures import CaptureForm, Table
from everstate.sources.cdc.completion import OVERTAKEN, TWO_ROWS

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
    """A transaction of PostgreSQL whose rows may have one key for a while, and its log."""

    def __init__(self, *, is_ours: bool = True, has_other: bool = False, **table: Any) -> None:
        """``has_other``: the table ``old`` has the same entity type."""
        capture = capture_of("debezium", table=table)
        if has_other:
            old = Table(entity="item", key_columns=("id",))
            capture = replace(capture, tables={**capture.tables, "public.old": old})
        self.cleaner = Cleaner(capture, restarts=False, is_trusted=is_ours)
        self.log: list[tuple[str, bytes, bytes]] = []
        self.lsn, self.transaction = 100, 7

    def write(self, op: str, key: int, table: str = "item", **images: Any) -> None:
        self.lsn += 10
        source = {"connector": "postgresql", "snapshot": "false", "lsn": self.lsn}
        source |= {"txId": self.transaction, "ts_us": 9 + self.transaction}
        if op == "r":
            source = {"snapshot": "incremental"}
        message = {"op": op, "before": None, "after": None, **images, "source": source}
        row = (table, json.dumps({"id": key}).encode(), json.dumps(message).encode())
        self.log.append(row)

    def add(self, key: int, name: str, table: str = "item") -> None:
        self.write("c", key, table, after=row_of(key, name))

    def delete(self, key: int, name: str, table: str = "item") -> None:
        self.write("d", key, table, before=row_of(key, name))

    def move(self, key: int, to: int, name: str) -> None:
        """As Debezium writes an update of the key: both records at one position."""
        self.delete(key, name)
        self.lsn -= 10
        self.add(to, name)

    def commit(self, *cuts: int) -> dict[str, str]:
        """Clean it, in batches of these sizes and the rest; out: key and name of each row."""
        for size in (*cuts, len(self.log)):
            self.cleaner.run(self.cleaner.read(*self.log[:size]))
            del self.log[:size]
        self.transaction += 1
        states = {one.key: json.loads(one.current or b"null") for one in self.cleaner.changes}
        return {key: state["name"] for key, state in states.items() if state is not None}

    @property
    def told(self) -> list[str]:
        """Why rows are dead letters."""
        return [one.reason for batch in self.cleaner.batches for one in batch.refused]

    @property
    def unsure(self) -> list[str]:
        """Keys of the entities whose states are uncertain, as `everstate cdc held` lists them."""
        return sorted(key for (_, key), one in self.cleaner.held.items() if one.needs_snapshot)


def row_of(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name, "amount": None, "note": None}


@pytest.mark.parametrize("names", ["abc", "aaa"], ids=["different rows", "equal rows"])
@pytest.mark.parametrize("cuts", [(), (1, 1, 1, 1), (3,)])
@pytest.mark.parametrize(
    ("order", "unsure"),
    [((1, 2, 3), ["2", "3"]), ((3, 2, 1), []), ((2, 3, 1), ["3"]), ((2, 1, 3), ["3"])],
)
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_key_that_all_rows_of_a_statement_pass_on_loses_no_row_and_is_told(
    names: str, cuts: tuple[int, ...], order: tuple[int, ...], unsure: list[str], is_ours: bool
) -> None:
    """`UPDATE t SET id = id + 1` of a table that `cdc add` refuses, as its key is deferrable.

    The key may have become so later, or nothing keeps the declared key columns unique.
    """
    statement = Statement(is_ours=is_ours)
    for key, name in enumerate(names, 1):
        statement.add(key, name)
    statement.commit()
    for key in order:
        statement.move(key, key + 1, names[key - 1])
    assert statement.commit(*cuts) == {str(key): name for key, name in enumerate(names, 2)}
    assert statement.told == [TWO_ROWS] * len(unsure)
    assert statement.unsure == unsure
    statement.delete(3, names[1])
    assert statement.commit() == {"2": names[0], "4": names[2]}
    assert statement.unsure == [key for key in unsure if key != "3"]


def test_which_of_two_rows_with_one_key_is_deleted_is_never_guessed() -> None:
    statement = Statement()
    statement.add(1, "old")
    statement.commit()
    statement.add(1, "never")
    statement.delete(1, "never")
    assert statement.commit() == {"1": "never"}, "a dead letter says that this may be wrong"
    assert statement.told == [TWO_ROWS]
    assert statement.unsure == ["1"]
    statement.write("r", 1, after=row_of(1, "old"))
    assert statement.commit() == {"1": "old"}
    assert statement.unsure == []


def test_a_row_that_goes_to_another_table_of_its_entity_stays() -> None:
    """`INSERT INTO old SELECT * FROM item; DELETE FROM item` in one transaction."""
    statement = Statement(has_other=True)
    statement.add(1, "a")
    statement.commit()
    statement.add(1, "a", "old")
    statement.delete(1, "a")
    assert statement.commit() == {"1": "a"}
    assert statement.cleaner.batches[-1].skipped[OVERTAKEN] == 1
    assert statement.told == []
    statement.delete(1, "a", "old")
    assert statement.commit() == {}


def test_a_row_of_a_later_transaction_is_deleted_also_where_one_was_created_twice() -> None:
    """As after a TRUNCATE that was refused: all rows are created once more."""
    statement = Statement()
    for name in "ab":
        statement.add(1, name)
        statement.commit()
    statement.delete(1, "b")
    assert statement.commit() == {}
    assert statement.told == []


def test_rows_that_a_connector_writes_again_are_no_other_rows() -> None:
    statement = Statement(is_ours=False)
    statement.add(1, "a")
    statement.log *= 2
    statement.delete(1, "a")
    assert statement.commit() == {}
    assert statement.told == []


def test_a_truncation_deletes_both_rows_with_one_key() -> None:
    statement = Statement(truncate="delete")
    statement.add(1, "old")
    statement.commit()
    statement.add(1, "new")
    statement.write("t", 1)
    assert statement.commit() == {}
    assert statement.told == []
