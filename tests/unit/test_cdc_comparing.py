"""Rows as a database prints them beside the newest states in the log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.changes.drift import What
from everstate.declarations.captures import Capture, DatabaseKind, Table, Translation
from everstate.errors import InvalidQuery
from everstate.sources.cdc.comparing import TableRows, difference
from everstate.sources.cdc.completion import Known
from everstate.sources.cdc.connectors import SourceColumn, TableShape
from everstate.sources.cdc.mapping import CleanRow, TableMapping

T = "public.orders"
KINDS = {"order_no": "int8", "total": "numeric", "day": "date", "at": "timestamptz", "note": "text"}


class Order(BaseModel):
    order_no: int
    total: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    day: date | None = None
    at: datetime | None = None
    note: str | None = None


PRINTED = ("7", "1.50", "2026-01-02", "2026-01-02 03:04:05.5+00", "é")
STATE: dict[str, Any] = {
    "order_no": 7,
    "total": "1.50",
    "day": "2026-01-02",
    "at": "2026-01-02T03:04:05.500000Z",
    "note": "é",
}


def rows(kinds: dict[str, str] = KINDS, kind: DatabaseKind = "postgresql", **options: Any) -> Any:
    """The rows of a table of these columns, and their mapping."""
    entity = EntityType("order", Order, "order_no")
    table = Table(entity="order", **options)
    capture = Capture(name="shop", kind=kind, dsn="postgresql://h/d", tables={T: table})
    mapping = TableMapping(capture, T, table, entity)
    columns = tuple(SourceColumn(name, kind=each) for name, each in kinds.items())
    return TableRows(mapping, TableShape(columns, ("order_no",))), mapping


def found(
    state: dict[str, Any] | None,
    printed: Sequence[str | None] = PRINTED,
    kinds: dict[str, str] = KINDS,
    **options: Any,
) -> tuple[What, str] | None:
    """How a state in the log differs from a row; ``None``: it has no such entity."""
    table, mapping = rows(kinds, **options)
    key, row = table.row(printed)
    assert key == "7"
    known = None if state is None else Known(3, json.dumps(state).encode(), False)
    return difference(known, row, mapping)


def encoded() -> dict[str, Any]:
    """The state of the row, as cleaning encodes it."""
    _, row = rows()[0].row(PRINTED)
    assert isinstance(row, CleanRow)
    assert row.state is not None
    told: dict[str, Any] = json.loads(row.state)
    return told


def test_a_row_as_the_database_prints_it_is_the_state_that_its_captured_row_made() -> None:
    state = encoded()
    assert (state["order_no"], Decimal(str(state["total"])), state["note"]) == (
        7,
        Decimal("1.5"),
        "é",
    )
    assert datetime.fromisoformat(state["at"]) == datetime.fromisoformat(STATE["at"])
    assert found(state) is None
    assert found({name: state[name] for name in KINDS if state[name] is not None}) is None
    assert found({**state, "field of another release": 1}) is None


@pytest.mark.parametrize(
    ("column", "printed"),
    [(1, "1.51"), (2, None), (3, "2026-01-02 03:04:05.500001+00"), (4, "e"), (4, "")],
)
def test_each_field_that_differs_is_named(column: int, printed: str | None) -> None:
    given: list[str | None] = list(PRINTED)
    given[column] = printed
    assert found(encoded(), given) == ("different", f"other values of {[*KINDS][column]}")


def test_an_entity_that_the_log_lacks_or_has_deleted_is_missing() -> None:
    assert found(None) == ("missing", "the log has no version of it")
    table, mapping = rows()
    _, row = table.row(PRINTED)
    deleted = Known(4, json.dumps(encoded()).encode(), True)
    assert difference(deleted, row, mapping) == ("missing", "the log has it deleted")


@pytest.mark.parametrize(
    ("column", "printed", "reason"),
    [(2, "infinity", "day: "), (3, "0044-03-15 12:00:00+00 BC", "at: "), (1, "1.505", "total: ")],
)
def test_a_row_of_which_no_entity_can_be_made_is_told_with_the_reason(
    column: int, printed: str, reason: str
) -> None:
    given = list(PRINTED)
    given[column] = printed
    for state, what in ((encoded(), "different"), (None, "missing")):
        told = found(state, given)
        assert told is not None
        assert told[0] == what
        assert told[1].startswith(f"no entity can be made of its row: {reason}")


def test_a_column_that_is_not_compared_is_named_and_has_the_value_of_the_log() -> None:
    kinds = {**KINDS, "note": "hstore"}
    assert rows(kinds)[0].not_compared == {"note": "its type is hstore"}
    printed = PRINTED[:4]
    assert found({**encoded(), "note": "anything"}, printed, kinds) is None
    other = found({**encoded(), "note": "anything", "total": 2}, printed, kinds)
    assert other == ("different", "other values of total")
    assert found(None, printed, kinds) == ("missing", "the log has no version of it")
    codes = {"NOTE": Translation(entity="order", field="note")}
    assert rows(translations=codes)[0].not_compared.keys() == {"note"}
    maria = {"order_no": "int", "total": "decimal", "at": "timestamp", "note": "timestamp"}
    told = {"note": "its type is timestamp, and its field has no times"}
    assert rows(maria, kind="mariadb")[0].not_compared == told
    with pytest.raises(InvalidQuery, match="cannot be compared by its order_no: its type is box"):
        rows({**KINDS, "order_no": "box"})


def test_columns_without_a_field_are_not_read() -> None:
    kinds = {**KINDS, "secret": "text", "shape": "polygon"}
    table = rows(kinds)[0]
    assert [each.name for each in table.columns] == [*KINDS]
    assert table.not_compared == {}
    assert [each.name for each in rows(kinds, drop=("note",))[0].columns] == [*KINDS][:4]
