"""The proof of a view in another store; the control tables and the rows are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from test_stores_elsewhere import NAME, Registry, version_of

from everstate.errors import PipelineError, StoreSilent, ViewRowsMissing
from everstate.pipeline.proof import compare, verify
from everstate.pipeline.proof.compare import Comparison, RowsElsewhere
from everstate.pipeline.reports import ViewReport
from everstate.views.control import LIVE
from everstate.views.control.positions import ViewPosition
from everstate.views.stores.versioned import VersionedStore
from everstate.views.tables import HOME, KeptTable, Merge
from kit.row_store_contract import AttemptingMemory
from kit.rows_in_memory import RowsInMemory

POSITION = 4
PROVED = {"a": 2, "b": 1, "gone": 2}
"""The newest version of each key at the position; `gone` was deleted."""
JUDGED = {"a": (4, 7), "b": (1, 1), "gone": (2, 3), "back": (3, 6)}
"""What the core has accepted: the newest version of each key, and its offset."""
ARCHIVED = {"a": 4, "b": 2, "new": 3}
"""The newest version of keys behind the position in the archive, when the core was restored."""
SCHEMA = pa.schema([("key", pa.string()), ("version", pa.int64()), ("c0", pa.string())])
Stored = tuple[str, int, str]


class Verifier(verify._Verifier):
    """Compares in memory at a position, while the core is at offset 8."""

    def __init__(self, store: str, proved: dict[str, int], judged: dict[str, Any]) -> None:
        definition = {} if store == HOME else {"store": store}
        self.row = replace(version_of(1, LIVE), definition=definition)
        self.proved = proved
        connection: Any = Registry()
        self._connection, self._config, self._spark = connection, cast(Any, None), cast(Any, None)
        self._project, self.archived = (
            cast(Any, SimpleNamespace(entities={"order": None})),
            dict[str, int](),
        )
        self._published = {NAME: self.row, "order_latest": replace(self.row, name="order_latest")}
        at, when = ((NAME, POSITION), ("order_latest", 8)), datetime(2026, 11, 29, tzinfo=UTC)
        self._places = [ViewPosition(name, 1, "order", 1, 0, n, when) for name, n in at]

        def latest(_query: str, given: Any) -> Iterator[Any]:
            found = ((key, judged[key]) for key in given["keys"] if key in judged)
            return ((key, version, 1, 0, offset) for key, (version, offset) in found)

        self._control = cast(Any, SimpleNamespace(table=lambda name: name, run=latest))

    def _newest(self, _row: Any, changes: Any, _keys: Any) -> dict[str, int]:
        return dict(self.archived if changes == "archived" else self.proved)

    def _compare_as_read(self, *_given: Any) -> Any:
        return "equal", []


def reported(verifier: Verifier, merge: Merge = "row", *, has_rules: bool = False) -> ViewReport:
    table = KeptTable(NAME, 1, "f", merge, outputs=(("region", "c0"),))
    key = ("key",) if merge == "row" else ("key", "version")
    given: dict[str, Any] = {"name": NAME, "store": verifier.row.store, "rules": (), "key": key}
    given["has_times"] = merge == "periods"
    given["replaces_rows"] = merge == "row" and not has_rules
    plan: Any = SimpleNamespace(**given, table=lambda _n: table, ruled_table=lambda _n: table)
    inputs = [SimpleNamespace(changes="proved")]
    return verifier._reported(
        ViewReport(NAME, 1, "order", "holds"), verifier.row, plan, cast(Any, inputs)
    )


@pytest.fixture(autouse=True)
def batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is not there."""
    archive = SimpleNamespace(where=lambda _test: "archived")
    monkeypatch.setattr(verify, "read_archive", lambda *_given: archive)
    monkeypatch.setattr(verify, "before", lambda _position: 0)
    monkeypatch.setattr(verify, "batch_rows", lambda *_given: nullcontext())


def columns_of(rows: Sequence[Stored]) -> pa.RecordBatch:
    named = [dict(zip(SCHEMA.names, row, strict=True)) for row in rows]
    return pa.RecordBatch.from_pylist(named, schema=SCHEMA)


def compared(wanted: Sequence[Stored], rows: Sequence[Stored], merge: Merge) -> Comparison:
    """Compare what is wanted with what a store has, as Spark's task does."""
    memory = RowsInMemory()
    table = KeptTable(NAME, 1, "f", merge, outputs=(("region", "c0"),))
    memory.tables = {table.name: {}}
    kept = RowsElsewhere(VersionedStore("memory", AttemptingMemory(), memory), table)
    kept.store.write(table, dict(zip(SCHEMA.names, columns_of(rows).columns, strict=True)))
    expected, keys = compare._Expected(), 1 if merge == "row" else 2
    expected.add(compare._texts(SCHEMA, columns_of(wanted).columns, keys))
    outcome = compare._compare_bucket(expected, kept.read(SCHEMA, 0, 1), keys)
    return compare._merge([outcome])


A, B = ("a", 2, "north"), ("b", 1, "north")
OLD = ("a", 1, "east")


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([A, B], "holds"),
        # Rows of a task that was killed before it moved the position
        ([("a", 3, "south"), B], "not compared"),
        ([("a", 4, "south"), B], "not compared"),
        ([B], "not compared"),
        ([A, B, ("back", 3, "south")], "not compared"),
        ([("a", 4, "south"), B, ("back", 1, "south")], "not compared"),
        # No task leaves these
        ([A], "differs"),
        ([], "differs"),
        ([A, ("b", 2, "south")], "differs"),
        ([A, ("b", 1, "south")], "differs"),
        ([OLD, B], "differs"),
        ([("a", 2, "south"), B], "differs"),
        ([("a", 9, "south"), B], "differs"),
        ([A, B, ("gone", 1, "south")], "differs"),
        ([A, B, ("gone", 3, "south")], "differs"),
        ([A, B, ("nobody", 1, "south")], "differs"),
        ([("a", 4, "south")], "differs"),
    ],
)
def test_only_rows_whose_keys_have_changed_since_may_be_newer(
    rows: list[Stored], outcome: str
) -> None:
    """A log with traffic: the view is behind its core, as it nearly always is."""
    verifier: Any = Verifier("memory", PROVED, JUDGED)
    verifier._compare = lambda *_given: compared([A, B], rows, "row")
    report = reported(verifier)
    assert report.outcome == outcome
    assert bool(report.not_compared) is (outcome == "not compared")


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([("a", 4, "south"), ("b", 2, "south"), ("new", 1, "south")], "not compared"),
        ([], "not compared"),
        ([A, ("b", 1, "south")], "differs"),
        ([OLD, B], "differs"),
        ([A, ("b", 3, "south")], "differs"),
        ([A, B, ("gone", 1, "south")], "differs"),
    ],
)
def test_rows_that_may_be_newer_than_their_position_do_not_differ(
    rows: list[Stored], outcome: str
) -> None:
    """PostgreSQL was restored to the past: the core is behind the archive, as the view is."""
    verifier: Any = Verifier("memory", PROVED, {"a": (3, 5), "b": (1, 1), "gone": (2, 3)})
    verifier.archived = ARCHIVED
    verifier._compare = lambda *_given: compared([A, B], rows, "row")
    assert reported(verifier).outcome == outcome


def test_a_change_before_the_position_that_cannot_be_read_makes_no_row_newer() -> None:
    """The present model cannot read what the core has accepted with another one."""
    verifier: Any = Verifier("memory", PROVED, {**JUDGED, "b": (2, 1)})
    verifier._compare = lambda *_given: compared([A, B], [A], "row")
    assert reported(verifier).outcome == "differs"


def test_a_row_that_is_missing_differs_where_the_later_changes_may_be_ignored() -> None:
    """A view with a policy writes no row for a change that it ignores, and so never mends it."""
    verifier: Any = Verifier("memory", PROVED, JUDGED)
    for rows, outcome in (([B], "differs"), ([("a", 4, "south"), B], "not compared")):
        verifier._compare = lambda *_given, rows=rows: compared([A, B], rows, "row")
        assert reported(verifier, has_rules=True).outcome == outcome


def test_a_deleted_row_that_came_back_differs_although_its_key_has_changed_since() -> None:
    verifier: Any = Verifier("memory", {**PROVED, "back": 2}, JUDGED)
    verifier._compare = lambda *_given: compared([A, B], [A, B, ("back", 1, "south")], "row")
    assert reported(verifier).outcome == "differs"


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([OLD, A, B], "holds"),
        ([OLD, A, B, ("a", 4, "south"), ("back", 3, "south")], "not compared"),
        ([A, B], "differs"),
        ([OLD, B], "differs"),
        ([OLD, A, B, ("gone", 1, "south")], "differs"),
        ([OLD, ("a", 2, "south"), B, ("a", 4, "south")], "differs"),
    ],
)
def test_no_later_change_takes_an_appended_row_away(rows: list[Stored], outcome: str) -> None:
    verifier: Any = Verifier("memory", PROVED, JUDGED)
    verifier._compare = lambda *_given: compared([OLD, A, B], rows, "append")
    assert reported(verifier, "append").outcome == outcome


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([OLD, ("a", 2, "ended"), B, ("a", 3, "south")], "not compared"),
        ([OLD, A, ("b", 1, "ended")], "differs"),
        ([("a", 1, "ended"), A, B], "differs"),
        ([OLD, B], "differs"),
    ],
)
def test_a_later_change_ends_the_newest_state(rows: list[Stored], outcome: str) -> None:
    verifier: Any = Verifier("memory", PROVED, JUDGED)
    verifier._compare = lambda *_given: compared([OLD, A, B], rows, "append")
    assert reported(verifier, "periods").outcome == outcome


def test_a_view_in_postgresql_is_never_ahead() -> None:
    verifier: Any = Verifier(HOME, PROVED, JUDGED)
    verifier._compare = lambda *_given: compared([A, B], [B], "row")
    report = reported(verifier)
    assert (report.outcome, report.different_rows, report.not_compared) == ("differs", 1, ())


@pytest.mark.parametrize(("store", "outcome"), [(HOME, "differs"), ("memory", "not compared")])
def test_a_store_that_does_not_answer_does_not_differ(store: str, outcome: str) -> None:
    def away(*_given: Any) -> Any:
        raise PipelineError("the store memory failed: it did not answer within 5 s")

    verifier: Any = Verifier(store, PROVED, JUDGED)
    verifier._compare = away
    report = reported(verifier)
    assert (report.outcome, len(report.not_compared)) == (outcome, 1)


class Failing(RowsInMemory):
    """Has no rows to give."""

    error: Exception = ViewRowsMissing(NAME, f"{NAME}__v1_01")

    def rows(self, table: KeptTable, schema: pa.Schema) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        (ViewRowsMissing(NAME, f"{NAME}__v1_01"), "differs", "does not have the table"),
        (StoreSilent(NAME, "nobody is there"), "not compared", "nobody is there"),
    ],
)
def test_a_table_that_is_gone_differs(
    error: Exception, outcome: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in Spark's task comes back without its class."""
    rows = Failing()
    rows.error = error
    store = VersionedStore("memory", AttemptingMemory(), rows, "01")

    def in_spark(*_given: Any, **_named: Any) -> Any:
        raise PipelineError(str(error))

    monkeypatch.setattr(verify, "versioned_store", lambda *_given: store)
    monkeypatch.setattr(verify, "sharing_slots", nullcontext)
    monkeypatch.setattr(verify, "compare", in_spark)
    report = reported(Verifier("memory", PROVED, JUDGED))
    assert report.outcome == outcome
    assert said in report.not_compared[0]
