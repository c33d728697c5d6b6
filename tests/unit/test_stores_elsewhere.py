"""What the pipeline does about stores besides PostgreSQL; the control tables are in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pyarrow as pa
import pytest

from everstate.app import App
from everstate.config import Config
from everstate.errors import PositionMoved, ViewFailed, ViewRowsMissing
from everstate.pipeline.keeping import elsewhere, publish
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.elsewhere import drop_elsewhere, show_elsewhere
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.kept import EntityViews, KeptView
from everstate.pipeline.keeping.publish import ViewPublisher
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.proof import verify
from everstate.retrying import Retries
from everstate.views import changing
from everstate.views.control import BUILDING, DROPPED, KEPT, LIVE, ViewVersion
from everstate.views.control.positions import Positions, ViewPosition
from everstate.views.control.registry import Registry as ControlRegistry
from everstate.views.publishing import stands_with_core
from everstate.views.stores import versioned
from everstate.views.stores.versioned import VersionedStore
from everstate.views.tables import HOME, Core, KeptTable, attempt_text
from kit.row_store_contract import AttemptingMemory, RowsKept, told
from kit.rows_in_memory import RowsInMemory

NAME = "opened"


def version_of(number: int, status: str, **more: Any) -> ViewVersion:
    built = {"attempt": f"0{number}", **more.pop("built", {})}
    row = ViewVersion(NAME, number, "order", "row", {"store": "memory"}, (), "f", status)
    return replace(row, built=built, **more)


class Registry:
    """The control tables, as far as publishing and dropping need them."""

    schema_name = "views"
    closed = False

    def __init__(self, *rows: ViewVersion) -> None:
        self.rows = list(rows)
        self.tables = {(row.name, row.version, "memory", row.attempt) for row in rows}
        self.vectors: dict[tuple[str, int], int] = {}
        self.in_transaction = False
        self.connection = self
        self.process, self.held = "this", dict[str, str]()
        """The process that asks, and which one has a duty."""
        self.waited = list[str]()
        self.emptied = set[tuple[str, int]]()
        """Versions of which a build was begun and did not end."""

    @contextmanager
    def transaction(self, *, force_rollback: bool = False) -> Iterator[None]:
        self.in_transaction, before = True, self.rows
        try:
            yield
        finally:
            self.in_transaction = False
            if force_rollback:
                self.rows = before

    @contextmanager
    def duty(self, name: str, *, waits: bool = False) -> Iterator[bool]:
        is_first = name not in self.held
        is_mine = self.held.setdefault(name, self.process) == self.process
        if waits and not is_mine:
            self.waited.append(name)
        yield is_mine or waits
        if is_first:
            del self.held[name]

    def writing(self, view: str, version: int, partition: int | None = None, **waits: bool) -> Any:
        return Positions.writing(cast(Positions, self), view, version, partition, **waits)

    def versions(self, name: str | None = None) -> list[ViewVersion]:
        return [row for row in self.rows if name in (None, row.name)]

    def positions(self, _entity: str) -> list[ViewPosition]:
        places = ((*place, at) for place, at in self.vectors.items())
        return [ViewPosition(v, n, "order", 1, 0, at, None) for v, n, at in places]  # type: ignore[arg-type]

    def swap_published(self, name: str, old: int | None, new: int) -> bool:
        def swapped(row: ViewVersion) -> ViewVersion:
            if row.version == new:
                return replace(row, status=LIVE, published=True)
            return replace(row, status=KEPT, published=False) if row.version == old else row

        self.rows = [swapped(row) for row in self.rows]
        return True

    def left_tables(self) -> list[tuple[str, int, str, str]]:
        kept = [row for row in self.rows if row.status != DROPPED]
        places = {(row.name, row.version, "memory", row.attempt) for row in kept}
        return sorted(self.tables - places)

    def remove_table(self, name: str, version: int, attempt: str) -> None:
        self.tables.discard((name, version, "memory", attempt))

    def remove_dropped(self) -> None:
        there = {each[:2] for each in self.tables}
        gone = [r for r in self.rows if r.status == DROPPED and (r.name, r.version) not in there]
        self.rows = [row for row in self.rows if row not in gone]

    def is_emptied(self, name: str, version: int) -> bool:
        return (name, version) in self.emptied

    def record(self, name: str, version: int, **facts: Any) -> None:
        same = (name, version)
        facts.pop("met_at", None)
        self.rows = [replace(r, **facts) if (r.name, r.version) == same else r for r in self.rows]


class Watched(RowsInMemory):
    """A store that is called while nothing of the control tables is locked."""

    locked: Any = staticmethod(lambda: False)
    is_away = False

    def drop(self, name: str) -> None:
        if self.is_away:
            raise OSError("away")
        super().drop(name)

    def publish(self, view: str, name: str) -> None:
        assert not self.locked()
        super().publish(view, name)

    def write(self, *given: Any) -> None:
        assert not self.locked()
        super().write(*given)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Watched:
    kept = Watched()
    kept.tables = {f"{NAME}__v{n}_0{n}": {} for n in (1, 2)}

    def store(_config: Config, _view: str, name: str, attempt: str = "") -> VersionedStore:
        return VersionedStore(name, AttemptingMemory(), kept, attempt)

    monkeypatch.setattr(publish, "versioned_store", store)
    monkeypatch.setattr(elsewhere, "versioned_store", store)
    return kept


CONFIG: Any = None


def test_a_publication_that_comes_late_is_made_good(rows: Watched) -> None:
    """An undo was followed by the call that published the version before it."""
    control: Any = Registry(version_of(1, LIVE, published=True), version_of(2, KEPT))
    rows.publish(NAME, f"{NAME}__v2_02")
    show_elsewhere(control, CONFIG, "memory")
    assert rows.names == {NAME: f"{NAME}__v1_01"}
    control.rows = [replace(row, published=False) for row in control.rows]
    show_elsewhere(control, CONFIG, "memory")
    assert rows.names == {}


def test_a_view_without_changes_is_seen_to_be_missing_in_its_store(rows: Watched) -> None:
    """Its store was emptied; and again when the store is the right one again."""
    control: Any = Registry(version_of(1, LIVE, published=True))
    table = rows.table

    def missing(view: str, name: str) -> Any:
        raise ViewRowsMissing(view, name)

    for there, said in ((missing, "does not have the table"), (table, "")):
        rows.table = there  # type: ignore[method-assign]
        show_elsewhere(control, CONFIG, "memory")
        assert said in (control.rows[0].waits_for or "")
    assert control.rows[0].waits_for is None


def test_publishing_calls_no_other_store_in_a_transaction(rows: Watched) -> None:
    seen, row = version_of(1, LIVE, published=True), version_of(2, BUILDING)
    control: Any = Registry(seen, row)
    control.vectors = {("order_latest", 1): 7, (NAME, 1): 7, (NAME, 2): 7}
    rows.locked = lambda: control.in_transaction
    plan: Any = None
    assert ViewPublisher(control, CONFIG).point(seen, row, plan)
    assert rows.names == {NAME: f"{NAME}__v2_02"}


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_readers_see_the_old_version_when_another_process_was_first(
    rows: Watched, answers: list[bool]
) -> None:
    """It was first before the trial, or between the trial and the publication."""
    rows.names = {NAME: f"{NAME}__v1_01"}
    seen, row = version_of(1, LIVE, published=True), version_of(2, BUILDING)
    control: Any = Registry(seen, row)
    control.vectors = {("order_latest", 1): 7, (NAME, 1): 7, (NAME, 2): 7}
    given = iter(answers)
    control.swap_published = lambda *_given: next(given)
    plan: Any = None
    assert not ViewPublisher(control, CONFIG).point(seen, row, plan)
    assert rows.names == {NAME: f"{NAME}__v1_01"}


def test_tables_of_ended_attempts_and_of_dropped_versions_are_dropped(rows: Watched) -> None:
    """Later, while the store does not answer."""
    control: Any = Registry(version_of(1, DROPPED), version_of(2, LIVE, published=True))
    control.tables.add((NAME, 2, "memory", "0a"))
    rows.tables = {
        f"{NAME}__v{n}_{attempt}": {} for n, attempt in ((1, "01"), (2, "02"), (2, "0a"))
    }
    rows.is_away = True
    drop_elsewhere(control, CONFIG, "memory")
    assert (len(rows.tables), len(control.rows)) == (3, 2)
    assert "away" in (control.rows[0].error or "")
    rows.is_away = False
    drop_elsewhere(control, CONFIG, "memory")
    assert list(rows.tables) == [f"{NAME}__v2_02"]
    assert [row.version for row in control.rows] == [2]


def test_attempts_have_names_that_no_restored_registry_gives_again() -> None:
    assert attempt_text(UUID("5f2b7c1e-0000-4000-8000-000000000000")) == "5f2b7c1e"
    assert KeptTable("a", 2, "f", "row", attempt="5f2b7c1e").name == "a__v2_5f2b7c1e"
    assert KeptTable("a", 2, "f", "row").name == "a__v2"


def test_each_store_with_rows_of_a_view_has_a_builder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that the project does not name any more, and one that came while it runs."""
    left, here = version_of(1, KEPT), replace(version_of(2, BUILDING, built={}), definition={})
    control, tried, found = Registry(left, replace(here, built=None)), [], list[str]()
    for store in (HOME, "memory", None):
        builder: Any = object.__new__(Builder)
        builder._store, builder._on_store = store, found.append
        builder._database = SimpleNamespace(connected=lambda: nullcontext(control))
        builder._project = SimpleNamespace(entities={"order": None})
        builder._retries, builder._cleaned_at = Retries(), time.monotonic()
        monkeypatch.setattr(
            builder, "_try", lambda _c, row, of=store: tried.append((of, row.version))
        )
        builder.step()
    assert found == ["memory"] * 3
    assert tried == [(HOME, 2), (None, 2)]


# Nothing of the control tables is locked while a store is called


class Home(AttemptingMemory):
    """Counts its open transactions."""

    opened = 0
    is_free = True

    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[Any]:
        with super().trailing(core, table, partition) as opened:
            self.opened += 1
            yield opened
        self.opened -= 1

    @contextmanager
    def attempting(self, table: KeptTable, attempt: UUID) -> Iterator[None]:
        with super().attempting(table, attempt):
            self.opened += 1
            yield
        self.opened -= 1

    @contextmanager
    def writing(self, table: KeptTable, partition: int) -> Iterator[bool]:
        yield self.is_free


def test_no_transaction_is_open_while_rows_are_written() -> None:
    """A start, a command and the core's trimming would wait for that store."""
    rows, home = Watched(), Home()
    kept = RowsKept(rows, rows.read, home=home)
    rows.locked = lambda: home.opened
    log = told("a", "north", "south")
    kept.keep(log)
    kept.check(log)
    kept.install(2, {0: 2, 1: 0})
    kept.load([log.records[1]], 2)
    assert len(rows.calls) == 2


def test_a_task_writes_nothing_while_another_or_a_proof_has_the_version() -> None:
    rows, home = RowsInMemory(), Home()
    kept, log = RowsKept(rows, rows.read, home=home), told("a", "north")
    kept.judge(0, log, 0, 1)
    home.is_free = False
    with pytest.raises(PositionMoved):
        kept.trail(0, log, 0, 1)
    assert (rows.calls, kept.position()) == ([], 0)
    home.is_free = True
    kept.trail(0, log, 0, 1)
    kept.check(log)


def test_a_task_writes_nothing_when_another_was_first() -> None:
    """Exceptions that all views have passed may be trimmed before this task reads them."""
    rows, home = RowsInMemory(), Home()
    kept, log = RowsKept(rows, rows.read, home=home), told("a", "north", "south")
    kept.judge(0, log, 0, 2)

    def between(call: str) -> None:
        if call == "exceptions":
            home.between = lambda _call: None
            kept.trail(0, log, 0, 1)

    home.between = between
    with pytest.raises(PositionMoved):
        kept.trail(0, log, 0, 2)
    assert (len(rows.calls), kept.position()) == (1, 1)


def test_the_core_does_not_wait_for_a_start_to_trim() -> None:
    asked = []

    @contextmanager
    def installing(*, waits: bool = True) -> Iterator[bool]:
        asked.append(waits)
        yield False

    reader = SimpleNamespace(archived=lambda _entity: {0: 1})
    keeper: Any = SimpleNamespace(_trimmed_at=-1e9, _reader=reader)
    control: Any = SimpleNamespace(installing=installing)  # and no call to trim
    Keeper._trim(keeper, control, {"order": None})  # type: ignore[dict-item]
    assert asked == [False]


# Calls of a bounded size


class Slow(RowsInMemory):
    """Takes a moment for each row."""

    call_s_max = 0.25

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        if rows.num_rows + gone.num_rows > 2_600:
            threading.Event().wait(1)
        super().write(table, rows, gone)


def test_rows_are_written_in_calls_that_become_smaller_until_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versioned, "_SLICES", {})
    rows = Slow()
    kept = RowsKept(rows, rows.read)
    columns = {
        "key": pa.array([f"k{n}" for n in range(6_000)]),
        "version": pa.array([1] * 6_000, pa.int64()),
        "c0": pa.array(["north"] * 6_000),
        "c1": pa.array([Decimal(1)] * 6_000, pa.decimal128(12, 2)),
        "present": pa.array([n % 3 > 0 for n in range(6_000)]),
    }
    for _ in range(2):  # a batch is tried again
        with pytest.raises(ViewFailed, match="did not answer"):
            kept.store.write(kept.table(), columns)
    kept.store.write(kept.table(), columns)
    assert len(kept.rows()) == 4_000
    written = [given.num_rows for _, given, _ in rows.calls[-4:]]
    assert written == [1_250] * 3 + [250]


# Statements of the registry


class Asked(Registry):
    def __init__(self) -> None:
        super().__init__()
        self.asked = list[tuple[str, Any]]()
        self.rowcount = 1

    def run(self, text: str, values: Any) -> Any:
        self.asked.append((text, values))
        return self

    run_one = ControlRegistry.run_one


def test_a_build_in_another_store_ends_when_its_version_is_dropped() -> None:
    control: Any = Asked()
    assert ControlRegistry.leave_to_store(control, NAME, 2)
    assert "attempt = NULL" in control.asked[0][0]


def test_only_a_version_that_is_to_be_published_is_published() -> None:
    """An operator may have cancelled it while the other store was told."""
    control: Any = Asked()
    ControlRegistry.swap_published(control, NAME, 1, 2)
    text, values = control.asked[-1]
    assert "status = %s OR" in text
    assert values[-1] == BUILDING


def test_a_table_without_a_version_is_forgotten_with_those_of_dropped_versions() -> None:
    control: Any = Asked()
    control.fetchall = lambda: [("memory", 2, "0a")]
    assert ControlRegistry.forget_left(control, NAME) == [("memory", 2, "0a")]
    ((text, values),) = control.asked
    assert "made USING gone" not in text
    assert "NOT EXISTS (SELECT FROM {view}" in text
    assert values == {"name": NAME, "dropped": DROPPED}


def test_a_start_takes_no_step_for_a_dropped_version_that_waits_for_its_store() -> None:
    project = App("shop")
    control: Any = Registry(version_of(1, DROPPED))
    control.numbers = lambda: {NAME: 1}
    config: Any = SimpleNamespace(views=SimpleNamespace(on_change="rebuild"))
    found = changing.steps_of(config, control, project, "order")
    assert NAME not in {step.name for step in found}


# When a version is published


def reached(row: ViewVersion, mine: int, core: int, store: str = "memory") -> bool:
    seen = replace(version_of(1, LIVE, published=True), definition={"store": store})
    control: Any = Registry(seen, row)
    control.vectors = {("order_latest", 1): core, (NAME, 1): 0, (NAME, 2): mine}
    return stands_with_core(ViewPublisher(control, CONFIG), row)


def test_a_version_is_published_when_it_has_reached_what_it_was_asked_for() -> None:
    """Near the core alone is nowhere, while the core has judged little."""
    row = version_of(2, BUILDING, built={"core": {"0": 5_000}})
    assert not reached(row, 4_999, 5_000)
    assert reached(row, 5_000, 5_000)
    assert reached(row, 5_000, 6_000)
    assert reached(row, 5_000, 500_000)  # readers of that store see an older version
    assert not reached(row, 5_000, 500_000, store="another")


def test_a_version_whose_last_try_failed_is_not_published() -> None:
    assert not reached(version_of(2, BUILDING, error="read only"), 6_000, 6_000)


def test_an_undone_version_catches_up_to_the_core_of_that_moment() -> None:
    control: Any = Registry(version_of(1, KEPT))
    control.core_vector = lambda _entity: {0: 8, 1: 9}
    control.set_status = lambda *_given: None
    changing._catch_up(control, control.rows[0], {})
    assert control.rows[0].built == {"attempt": "01", "core": {"0": 8, "1": 9}}


# How a step and a proof end


def test_a_step_ends_between_two_views_when_it_is_to_stop() -> None:
    trailer: Any = object.__new__(Trailer)
    stop, tried = threading.Event(), list[str]()
    plan: Any = SimpleNamespace(store="memory", rides=False)
    behind = [
        KeptView(version_of(n, LIVE), KeptTable(NAME, n, "f", "row"), plan, {0: 0}) for n in (1, 2)
    ]
    views = EntityViews("order", {0: 9}, tuple(behind), None)
    trailer.stop, trailer._failed, trailer._store, trailer._retries = stop, None, None, Retries()
    trailer._database = SimpleNamespace(connected=lambda: nullcontext(None))
    trailer._kept = SimpleNamespace(read=lambda _control: {"order": views})
    trailer._entities = {}

    def catch_up(_control: Any, _views: Any, view: KeptView) -> int:
        tried.append(view.table.name)
        stop.set()
        return 1

    trailer._catch_up = trailer._meet = catch_up
    assert trailer.step() == 1
    assert tried == [f"{NAME}__v1"]


def test_each_name_of_a_column_is_proved() -> None:
    """Also the author's name of the key, which the store has beside its own."""
    rows = RowsInMemory()
    kept = RowsKept(rows, rows.read)
    names = (("order_id", "key"), ("region", "c0"), ("place", "c0"), ("amount", "c1"))
    table = replace(kept.table(), outputs=names)
    columns = {"key": ["a"], "version": [1], "c0": ["north"], "c1": [Decimal(2)]}
    kinds = [pa.string(), pa.int64(), pa.string(), pa.decimal128(12, 2)]
    schema = pa.schema(list(zip(columns, kinds, strict=True)))
    written = pa.table(columns, schema)
    kept.store.write(table, dict(zip(schema.names, written.columns, strict=True)))

    def read() -> list[Any]:
        return [row for batch in kept.store.read(table, schema) for row in batch.to_pylist()]

    right = written.to_pylist()
    assert read() == right
    (row,) = (row for _, row in rows.tables[table.name].values() if row is not None)
    for name in ("order_id", "_key", "region", "place"):
        before, row[name] = row[name], "wrong"
        assert read() != right, name
        row[name] = before


def test_only_the_version_that_is_held_is_proved() -> None:
    """Another one was published between the lock and the snapshot."""
    verifier: Any = object.__new__(verify._Verifier)
    verifier._published = {NAME: version_of(2, LIVE, published=True)}
    verifier._held = {(NAME, 1)}
    (report,) = verifier.reports({NAME: "order"})
    assert report.outcome == "not compared"
    assert "version 2 was published meanwhile" in report.not_compared[0]


class Pausing(RowsInMemory):
    """Gives no second batch of rows."""

    call_s_max = 0.1

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        yield from super().rows(table, schema)
        threading.Event().wait(10)


def test_a_proof_waits_for_each_batch_of_rows_no_longer_than_for_a_call() -> None:
    rows = Pausing()
    kept = RowsKept(rows, rows.read)
    with pytest.raises(ViewFailed, match="did not answer"):
        kept.rows()


@pytest.mark.parametrize("is_mine", [True, False])
def test_tables_are_dropped_by_the_process_that_builds_for_the_store(
    rows: Watched, is_mine: bool
) -> None:
    control: Any = Registry(version_of(1, DROPPED))
    control.held = {} if is_mine else {"builds in memory": "another"}
    rows.tables = {f"{NAME}__v1_01": {}}
    drop_elsewhere(control, CONFIG, "memory")
    assert bool(rows.tables) is not is_mine
