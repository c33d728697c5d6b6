"""Rows as a database prints them beside the newest states in the log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.changes.drift import DriftReport, What
from everstate.closing import Closing
from everstate.config import load
from everstate.declarations.captures import Capture, DatabaseKind, Table, Translation
from everstate.errors import InvalidQuery, LogError
from everstate.sources.cdc import comparing
from everstate.sources.cdc.comparing import TableRows, difference
from everstate.sources.cdc.completion import Known
from everstate.sources.cdc.connectors import SourceColumn, TableShape
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.printed import FORMS
from everstate.sources.cdc.states import state_row
from kit.settings import altered

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


def test_a_computed_field_gets_its_own_column_as_a_captured_row_has_it() -> None:
    trimmed = {"note": lambda state: state["note"].strip()}
    printed = (*PRINTED[:4], " é ")
    assert found(encoded(), printed, computed=trimmed) is None
    assert found(encoded(), (*PRINTED[:4], "e"), computed=trimmed) == (
        "different",
        "other values of note",
    )
    table, mapping = rows({**KINDS, "at": "interval"}, computed=trimmed)
    assert [*table.not_compared, *table.not_compared_fields] == ["at", "note"]
    _, row = table.row((*PRINTED[:3], "x"))
    known = Known(3, json.dumps(encoded()).encode(), False)
    assert difference(known, row, mapping) == ("different", "other values of note")
    assert difference(known, row, mapping, table.not_compared_fields) is None


@pytest.mark.parametrize(
    ("kind", "printed", "written"),
    [
        ("float8", "NaN", "NaN"),
        ("float4", "-Infinity", "-Infinity"),
        ("float8", "5e-324", 5e-324),
        ("numeric", "NaN", "NAN"),
        ("numeric", "-Infinity", "NEGATIVE_INFINITY"),
        ("numeric[]", "[1.10, NaN, null]".replace("NaN", '"NaN"'), ["1.10", "NAN", None]),
        ("timestamp", "2026-01-02 03:04:05.5", 1767323045500000),
        ("bool[]", "[true, false]", [True, False]),
    ],
)
def test_a_value_is_what_debezium_writes(kind: str, printed: str, written: Any) -> None:
    assert repr(FORMS["postgresql"][kind](printed)) == repr(written)


class Databases:
    """A database with one table, whose position the connector has passed."""

    def __init__(self, printed: list[Sequence[str | None]], *, is_there: bool = True) -> None:
        self.printed, self.is_there = printed, is_there

    def shapes(self, _: object) -> dict[str, TableShape]:
        columns = tuple(SourceColumn(name, kind=kind) for name, kind in KINDS.items())
        return {T: TableShape(columns, ("order_no",))} if self.is_there else {}

    def printed_rows(self, *_: object) -> Any:
        return iter(self.printed)

    def log_place(self) -> int:
        return 1

    def has_passed(self, offset: dict[str, Any], place: int) -> bool:
        return bool(offset.get("lsn", 0) >= place)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Compares rows with the states of a log that nothing is written to."""

    class Nowhere(Closing):
        def __init__(self, *_: object) -> None: ...

        def close(self) -> None: ...

        def stable_ends(self, topics: list[str]) -> dict[tuple[str, int], int]:
            return dict.fromkeys(((topic, 0) for topic in topics), 5)

        def existing(self) -> set[str]:
            return set()

    def run(
        printed: list[Sequence[str | None]],
        *,
        logged: Sequence[str] | None = (),
        held: Sequence[HeldEntity] = (),
        position: dict[str, Any] | None = None,
        is_there: bool = True,
        unread: Any = lambda *_: None,
        cleaned: Any = lambda _: 5,
    ) -> DriftReport:
        tables = {T: Table(entity="order")}
        capture = Capture(name="shop", kind="postgresql", dsn="postgresql://h/d", tables=tables)
        config = altered(load(), project={"data_dir": tmp_path})
        capturing: Any = SimpleNamespace(
            capture=capture,
            entities={"order": EntityType("order", Order, "order_no")},
            names=SimpleNamespace(raw_log="raw"),
            database=lambda: nullcontext(Databases(printed, is_there=is_there)),
            nudge=lambda: None,
            runs=lambda: True,
            running_position=lambda: {"lsn": 2} if position is None else position,
        )

        def read_log(one: Any, _: object, starts: object, __: object) -> dict[str, int]:
            if starts is None:
                state = state_row(Known(3, json.dumps(encoded()).encode(), False))
                one.copy.write({key.encode(): b"s" + state for key in logged or ()})
            return {"": 1}

        monkeypatch.setattr(comparing, "Offsets", Nowhere)
        monkeypatch.setattr(comparing, "_POLL_S", 0.01)
        monkeypatch.setattr(comparing, "Topics", Nowhere)
        monkeypatch.setattr(comparing, "read_held", lambda *_: unread() or held)
        monkeypatch.setattr("everstate.sources.cdc.balance.read_progress", unread)
        if logged is not None:
            monkeypatch.setattr(comparing._Comparison, "_read_log", read_log)
        monkeypatch.setattr(comparing._Comparison, "_cleaned", cleaned)
        return comparing.compare_with_table(config, capturing, "order", wait_s=0.05)

    return run


def test_all_rows_are_compared_also_those_that_do_not_fit_into_one_batch(
    compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(comparing, "_BYTES", 50)
    killed = tmp_path / "drift-order" / "0"
    killed.mkdir(parents=True)
    (killed / "of a run that was killed").write_text("x")
    printed = [(str(number), *PRINTED[1:]) for number in (7, 8, 9)]
    report = compare(printed, logged=("7", "10"))
    assert [(each.key, each.what) for each in report.keys] == [
        ("10", "extra"),
        ("8", "missing"),
        ("9", "missing"),
    ]
    assert (report.stored, report.logged, report.pending) == (3, 2, 0)
    assert [each.name for each in (tmp_path / "drift-order").iterdir()] == ["0.lock"]


def test_an_entity_whose_rows_wait_is_pending_and_the_others_are_drift(compare: Any) -> None:
    waits = [CleanRow(table=T, op="c", key="8", columns={"order_no": 8})]
    held = HeldEntity(T, "order", "8", {"order_no": 8}, "waits", 0.0, rows=waits)
    printed = [(str(number), *PRINTED[1:]) for number in (8, 9)]
    report = compare(printed, held=[held])
    assert [(each.key, each.what) for each in report.keys] == [("8", "pending"), ("9", "missing")]
    assert (report.missing, report.pending) == (1, 1)
    assert "rows of them wait" in report.pending_why


@pytest.mark.parametrize("key", ["7", ""])
def test_a_row_that_was_refused_is_named_and_is_no_drift(compare: Any, key: str) -> None:
    """It was drift, and `cdc snapshot` was advised, which would have refused it again."""
    refused = ("7", "1.505", *PRINTED[2:])
    held = HeldEntity(T, "order", key, {}, "a row was refused", 0.0)
    report = compare([refused], held=[held])
    (listed,) = report.keys
    assert (listed.key, listed.what) == ("7", "refused")
    assert listed.why.startswith("no entity can be made of its row: total: ")
    assert (report.drifted, report.refused_rows, report.share, report.holds) == (0, 1, 0.0, True)
    # Nobody has refused this one: it was never captured.
    assert compare([refused]).missing == 1
    # It was corrected, or deleted, and the log does not have that.
    fits = compare([("7", "1.60", *PRINTED[2:])], logged=["7"], held=[held])
    gone = compare([], logged=["7"], held=[held])
    assert (fits.different, gone.extra, fits.refused_rows + gone.refused_rows) == (1, 1, 0)
    # The whole type is in doubt, but this row could be published, and was not.
    of_type = compare([("8", *PRINTED[1:])], held=[held])
    assert (of_type.missing, of_type.refused_rows) == (1, 0)


def test_a_capture_that_was_never_cleaned_is_told_as_such(
    compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error of Kafka's about a topic that nobody had made."""

    def unknown(*_: object) -> Any:
        raise LogError("the topic does not exist")

    cleaned = comparing._Comparison._cleaned
    report = compare([PRINTED], logged=None, unread=unknown, cleaned=cleaned)
    assert (report.stored, report.logged, report.drifted, report.pending) == (1, 0, 0, 1)
    assert report.pending_why == "5 records of its raw log are not cleaned yet"


def test_what_a_snapshot_reads_now_is_pending(compare: Any) -> None:
    tables = '[{"incremental_snapshot_collections_id": "public.orders"}]'
    reads = {"lsn": 2, "incremental_snapshot_collections": tables}
    for position in (reads, {"lsn": 2, "snapshot": "INITIAL"}, {"lsn": 0}):
        report = compare([PRINTED], position=position)
        assert (report.drifted, report.pending) == (0, 1), position
        assert report.pending_why == "its connector has not come to what its tables have"
    assert compare([PRINTED]).missing == 1


def test_a_table_that_is_gone_is_named_and_its_entities_are_no_drift(compare: Any) -> None:
    with pytest.raises(InvalidQuery, match=r"order cannot be compared: there is no public\.orders"):
        compare([], logged=("7",), is_there=False)
