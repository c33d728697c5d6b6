"""Several processes, and several stores, at once: which of them waits for which."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from test_stores_elsewhere import NAME, Registry, Watched, version_of

from everstate.app import App
from everstate.config import Config
from everstate.errors import BuildGivenUp, PublishRefused, StoreSilent, ViewFailed
from everstate.log.positions import Range
from everstate.pipeline import application
from everstate.pipeline.keeping import alone, build, elsewhere, publish
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.elsewhere import (
    drop_elsewhere,
    show_elsewhere,
    upkeep,
    upkeep_every_s,
)
from everstate.pipeline.keeping.kept import EntityViews, KeptView, KeptViews
from everstate.pipeline.keeping.publish import ViewPublisher
from everstate.pipeline.keeping.task import ApplyTask
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.proof import verify
from everstate.pipeline.spark import functions
from everstate.pipeline.spark.functions import sharing_slots
from everstate.retrying import Retries
from everstate.views.control import BUILDING, DROPPED, KEPT, LIVE, ViewVersion
from everstate.views.control.schema import Schema
from everstate.views.publishing import stands_with_core
from everstate.views.stores import versioned
from everstate.views.stores.registry import STORES
from everstate.views.stores.versioned import VersionedStore
from everstate.views.tables import HOME, Core, KeptTable, placed
from kit.row_store_contract import AttemptingMemory, RowsKept
from kit.rows_in_memory import RowsInMemory

CONFIG: Any = None
PLAN: Any = None


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Watched:
    kept = Watched()

    def store(_config: Any, _view: str, name: str, attempt: str = "") -> VersionedStore:
        return VersionedStore(name, AttemptingMemory(), kept, attempt)

    monkeypatch.setattr(publish, "versioned_store", store)
    monkeypatch.setattr(elsewhere, "versioned_store", store)
    return kept


def coming(**more: Any) -> Any:
    """A registry with a version that readers see, and one that has caught up."""
    row = version_of(2, BUILDING, **more)
    control: Any = Registry(version_of(1, LIVE, published=True), row)
    control.vectors = {("order_latest", 1): 7, (NAME, 1): 7, (NAME, 2): 7}
    return control


# Two builders of one version


@pytest.mark.parametrize("store", [None, "memory"])
def test_whoever_builds_for_a_store_has_the_same_duty(store: str | None) -> None:
    """A pipeline has a builder for each store; a command has one for all."""
    control: Any = Registry(version_of(1, BUILDING))
    control.held = {"builds in memory": "another"}
    builder: Any = object.__new__(Builder)
    builder._store, builder._build = store, lambda *_given: pytest.fail("two builders")
    assert builder._try(control, control.rows[0]) is None


def test_another_version_is_built_while_another_process_builds_the_first() -> None:
    first, second = (replace(version_of(n, BUILDING), built=None) for n in (1, 2))
    control: Any = Registry(first, replace(second, definition={}))
    control.held, built = {"builds in memory": "another"}, []
    builder: Any = object.__new__(Builder)
    builder._store, builder._on_store, builder._drop_old = (
        None,
        lambda _store: None,
        lambda _c: None,
    )
    builder._database = SimpleNamespace(connected=lambda: nullcontext(control))
    builder._project, builder._retries = SimpleNamespace(entities={"order": None}), Retries()

    def build_one(_control: Any, row: ViewVersion) -> None:
        built.append(row.version)
        raise BuildGivenUp(row.name, row.version)

    builder._build = build_one
    assert builder.step() is None
    assert built == [2]


def test_positions_in_another_store_belong_to_the_table_of_an_attempt() -> None:
    """No task that writes to the table of another attempt moves them."""
    kept: Any = object.__new__(KeptViews)
    plan = SimpleNamespace(ruled_table=lambda n: KeptTable(NAME, n, "f", "row"))
    kept._compiled = {(NAME, 1, "f"): plan}
    here = replace(version_of(1, LIVE), built={})
    for row, fingerprint in ((version_of(1, LIVE), placed("f", "01")), (here, "f")):
        assert kept._view(row, {0: 1}).table.fingerprint == fingerprint
    assert placed("f", "01") not in ("f", placed("f", "02"))


@pytest.mark.parametrize("now", [[], [version_of(2, BUILDING, built={"attempt": "0b"})]])
def test_a_version_that_is_gone_or_built_again_is_not_published(now: list[ViewVersion]) -> None:
    control = coming()
    row = control.rows[1]
    assert stands_with_core(ViewPublisher(control, CONFIG), row)
    control.rows[1:] = now
    assert not stands_with_core(ViewPublisher(control, CONFIG), row)


def test_a_table_in_postgresql_is_made_and_emptied_while_nobody_drops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled build leaves no table, and finds its own."""
    done, is_held = list[tuple[str, bool]](), False

    @contextmanager
    def installing() -> Iterator[None]:
        nonlocal is_held
        is_held = True
        yield
        is_held = False

    def noted(what: str) -> Callable[..., None]:
        return lambda *_given: done.append((what, is_held))

    tables = SimpleNamespace(install=noted("install"), empty=noted("empty"))
    control: Any = SimpleNamespace(
        installing=installing,
        begin_build=lambda *_given: UUID(int=1),
        core_vector=lambda _entity: {0: 0},
        close_positions=noted("close"),
        open_positions=noted("open"),
        end_build=lambda *_given: True,
        connection=SimpleNamespace(transaction=nullcontext),
    )
    monkeypatch.setattr(build, "plan_of", lambda *_given: SimpleNamespace(store=HOME, name=NAME))
    monkeypatch.setattr(build, "column_types", lambda *_given: {})
    monkeypatch.setattr(build, "ViewTables", lambda _control: tables)
    monkeypatch.setattr(build, "store_of", lambda *_given: None)
    builder: Any = object.__new__(Builder)
    builder._spark = builder._config = None
    builder._project = SimpleNamespace(entities={"order": None}, views={})
    archived = SimpleNamespace(vector=lambda _core: {0: 0}, is_whole=True)
    builder._archived = SimpleNamespace(of=lambda _entity: archived)
    builder._build(control, replace(version_of(1, BUILDING), definition={}))
    assert {what for what, _ in done} == {"install", "empty", "close", "open"}
    assert all(held for _, held in done)


def test_a_command_builds_in_the_store_of_its_view_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another store may not answer, and the command would wait for it."""
    made, done = list[Any](), iter([False, True])

    class Part:
        def __init__(self, *_given: Any, store: str = "none") -> None:
            made.append(store)

        def step(self) -> int:
            return 1

        def close(self) -> None:
            made.append("closed")

    for name in ("Builder", "Trailer", "Refresher"):
        monkeypatch.setattr(alone, name, Part)
    alone.build_until(PLAN, CONFIG, PLAN, "memory", lambda: next(done))
    assert made == ["memory", "memory", "none", "closed", "closed", "closed"]


def test_who_waits_for_a_duty_holds_no_snapshot_meanwhile() -> None:
    """All publications would wait for that snapshot."""
    asked, answers = list[str](), [True, False, False]
    control = Schema(SimpleNamespace(closed=True), "views")  # type: ignore[arg-type]

    def value(text: str, _values: Any) -> bool:
        asked.append(text)
        return answers.pop()

    control.value = value  # type: ignore[method-assign,assignment]
    with control.duty("builds", waits=True) as is_mine:
        assert is_mine
    assert len(asked) == 3
    assert all("pg_try_advisory_lock" in text for text in asked)


# What readers are told


class Failing(Watched):
    """Refuses what it is told about some views."""

    def __init__(self, error: Exception, *views: str) -> None:
        super().__init__()
        self.error, self.views, self.asked = error, views, list[str]()

    def publish(self, view: str, name: str) -> None:
        self.asked.append(view)
        if view in self.views:
            raise self.error
        self.names[view] = name


class TransportError(Exception):
    """A client's own."""


class NoRoute(TransportError):
    """One of them."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError("nobody is there"), ["a"]),
        (TimeoutError("for ever"), ["a"]),
        (NoRoute("to host"), ["a"]),
        (OSError("WRONGTYPE"), ["a", "b", "c"]),
    ],
)
def test_a_view_that_a_store_refuses_does_not_keep_it_from_others(
    error: Exception, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that does not answer is asked once."""
    kept = Failing(error, "a")

    def store(_config: Any, _view: str, name: str, attempt: str = "") -> VersionedStore:
        return VersionedStore(name, AttemptingMemory(), kept, attempt)

    monkeypatch.setattr(elsewhere, "versioned_store", store)
    shown = [replace(version_of(1, LIVE, published=True), name=name) for name in "abc"]
    control: Any = Registry(*shown)
    show_elsewhere(control, CONFIG, "memory")
    assert kept.asked == told
    assert sorted(kept.names) == told[1:]


def test_readers_are_told_what_the_registry_says_at_that_moment(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version was published after all versions were read, and before its view was told."""
    other = replace(version_of(1, LIVE, published=True), name="a")
    control: Any = Registry(other, version_of(1, BUILDING))

    def tell(view: str, name: str) -> None:
        rows.names[view] = name
        control.rows = [replace(row, status=LIVE, published=True) for row in control.rows]
        rows.names[NAME] = f"{NAME}__v1_01"

    monkeypatch.setattr(rows, "publish", tell)
    show_elsewhere(control, CONFIG, "memory")
    assert rows.names[NAME] == f"{NAME}__v1_01"


def test_a_process_waits_while_another_tells_the_store(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has read the registry before would win, if its call were the last."""
    control = coming()
    control.rows[0] = version_of(1, KEPT)

    def tell(view: str) -> None:
        control.process = "another"
        assert ViewPublisher(control, CONFIG).point(None, control.rows[1], PLAN)
        control.process = "this"

    rows.tables[f"{NAME}__v2_02"] = {}
    monkeypatch.setattr(rows, "unpublish", tell)
    show_elsewhere(control, CONFIG, "memory")
    assert control.waited == [f"readers of {NAME} in memory"] * 2  # also to make it good
    assert rows.names == {NAME: f"{NAME}__v2_02"}


def test_postgresql_shows_a_view_until_its_new_store_does(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = coming()

    def refuse(_view: str, _name: str) -> None:
        raise OSError("read only")

    monkeypatch.setattr(rows, "publish", refuse)
    seen, row = control.rows
    with pytest.raises(ViewFailed, match="read only"):
        ViewPublisher(control, CONFIG).point(seen, row, PLAN)
    assert [row.published for row in control.rows] == [True, False]


def test_readers_are_shown_nothing_that_postgresql_refuses_and_the_pauses_grow(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view moves from PostgreSQL, where another one is made from its name."""
    control, told = coming(), list[str]()
    control.rows[0] = replace(control.rows[0], definition={}, fingerprint="other", built=None)

    def refuse(_name: str) -> None:
        raise PublishRefused(NAME, ["of_mine"], is_dropped=True)

    tables = SimpleNamespace(drop_reader=refuse, holders=lambda _name: [])
    monkeypatch.setattr(publish, "ViewTables", lambda _control: tables)
    monkeypatch.setattr(rows, "publish", lambda view, _name: told.append(view))
    trailer: Any = object.__new__(Trailer)
    trailer._retries, trailer._config = Retries(), CONFIG
    trailer._publish(control, control.rows[1], PLAN)
    assert told == []
    assert "of_mine" in (control.rows[1].waits_for or "")
    assert not trailer._retries.is_due(f"publishing {NAME}")


# Tables that nobody needs


def dropping(control: Any) -> None:
    drop_elsewhere(control, CONFIG, "memory")


def test_readers_are_told_while_a_version_is_built_in_their_store(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build takes hours; what nobody needs is dropped after it."""
    control: Any = Registry(version_of(1, LIVE, published=True), version_of(2, DROPPED))
    control.held = {"builds in memory": "another"}
    rows.tables = {f"{NAME}__v{n}_0{n}": {} for n in (1, 2)}
    monkeypatch.setattr(elsewhere, "opened_control", lambda _config: nullcontext(control))
    upkeep(CONFIG, "memory")
    assert rows.names == {NAME: f"{NAME}__v1_01"}
    assert len(rows.tables) == 2
    control.held = {}
    upkeep(CONFIG, "memory")
    assert list(rows.tables) == [f"{NAME}__v1_01"]


def test_each_store_is_tended_by_a_part_that_builds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, config = dict[str, Any](), Config()
    unused = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(application, "Offsets", lambda _config: unused)
    monkeypatch.setattr(application, "Topics", lambda _config: unused)
    monkeypatch.setattr(application, "part_of", lambda make, **_after: make)
    monkeypatch.setattr(application, "begins", found.__setitem__)
    tended = list[tuple[Any, str]]()
    monkeypatch.setattr(application, "upkeep", lambda *given: tended.append(given))
    spark: Any = None
    with application.pipeline_parts(spark, config, App("shop"), {}) as parts:
        builds: Any = parts["builds"]
        builds.keywords["on_store"]("memory")
    assert sorted(found) == ["builds-memory", "readers-memory", "store-memory"]
    found["readers-memory"]().step()
    assert tended == [(config, "memory")]


def test_a_call_that_publishes_a_table_while_it_is_dropped_is_made_good(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given up long ago, and is carried out just before the table is gone."""
    control: Any = Registry(version_of(1, DROPPED))
    table = f"{NAME}__v1_01"
    rows.tables = {table: {}}
    drop = rows.drop

    def late(name: str) -> None:
        rows.publish(NAME, name)
        drop(name)

    monkeypatch.setattr(rows, "drop", late)
    dropping(control)
    assert (rows.names, rows.tables, control.rows) == ({}, {}, [])


def test_the_last_row_of_a_view_goes_after_its_name(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    control: Any = Registry(version_of(1, DROPPED))
    rows.tables, rows.names = {f"{NAME}__v1_01": {}}, {NAME: f"{NAME}__v1_01"}

    def refuse(_view: str) -> None:
        raise OSError("read only")

    with monkeypatch.context() as until_writable:
        until_writable.setattr(rows, "unpublish", refuse)
        dropping(control)
        assert (len(rows.names), len(rows.tables), len(control.rows)) == (1, 1, 1)
    dropping(control)
    assert (rows.names, rows.tables, control.rows) == ({}, {}, [])


def test_a_table_whose_version_another_release_removed_is_dropped_with_its_name(
    rows: Watched,
) -> None:
    control: Any = Registry(version_of(1, LIVE))
    control.rows, begun = [], list[str]()
    rows.tables, rows.names = {f"{NAME}__v1_01": {}}, {NAME: f"{NAME}__v1_01"}
    builder: Any = object.__new__(Builder)
    builder._store, builder._on_store, builder._cleaned_at = "memory", begun.append, -1e9
    builder._drop_old(control)
    dropping(control)
    assert begun == ["memory"]
    assert (rows.names, rows.tables, control.tables) == ({}, {}, set())


def test_no_table_is_dropped_while_a_proof_reads_it(
    rows: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = version_of(1, LIVE, published=True)
    control: Any = Registry(seen)
    control.positions = list
    rows.tables = {f"{NAME}__v1_01": {}}
    monkeypatch.setattr(verify, "opened_control", lambda _config: nullcontext(control))
    control.process = "proof"
    with verify._held(CONFIG, [NAME]) as held:
        assert held == {(NAME, 1)}
        control.process = "builder"
        control.rows = [version_of(1, DROPPED)]
        dropping(control)
        assert len(rows.tables) == len(control.rows) == 1
    dropping(control)
    assert (rows.tables, control.rows) == ({}, [])


# A store that does not answer


class Hanging:
    """The store of a view that does not answer, or that refuses a range."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    @contextmanager
    def trailing(self, *_given: Any) -> Iterator[Any]:
        self.calls += 1
        raise self.error
        yield


@pytest.mark.parametrize(
    ("error", "calls"), [(StoreSilent(NAME, "away"), 1), (ViewFailed(NAME, "too large"), 3)]
)
def test_a_task_calls_a_store_that_does_not_answer_once(error: Exception, calls: int) -> None:
    """And no partition passes for one without records."""
    store: Any = Hanging(error)
    spans = {n: Range(0, 1) for n in range(3)}
    task = ApplyTask("", "", Core("order", "o"), spans, KeptTable(NAME, 1, "f", "row"), store)
    changes = pa.RecordBatch.from_pydict({"partition": pa.array([0, 1, 2], pa.int32())})
    (outcomes,) = task([changes])
    found = [json.loads(text) for text in outcomes["outcome"].to_pylist()]
    assert [row["partition"] for row in found] == [0, 1, 2]
    assert [row["failure"] for row in found] == [str(error)] * 3
    assert store.calls == calls


def frame(slots: int) -> Any:
    spark = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=slots))
    return SimpleNamespace(sparkSession=spark, coalesce=lambda tasks: tasks)


@pytest.mark.parametrize(
    ("slots", "kinds", "shares"),
    [
        *((8, "bttt", (3, 2, 1, 1)), (8, "bbtt", (3, 2, 1, 1)), (8, "ttbb", (3, 2, 1, 1))),
        *((4, "ttb", (1, 1, 1)), (4, "btt", (1, 1, 1)), (3, "tb", (1, 1)), (2, "tb", (1, 1))),
    ],
)
def test_all_jobs_that_call_other_stores_leave_a_slot(
    slots: int, kinds: str, shares: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds leave one to those that let views catch up, and these to builds; others wait."""
    monkeypatch.setattr(functions, "_taken", [])
    entered = threading.Event()
    jobs = [sharing_slots(frame(slots), is_long=kind == "b") for kind in kinds]
    found = [int(job.__enter__()) for job in jobs]  # type: ignore[call-overload]
    assert tuple(found) == shares

    def last() -> None:
        with sharing_slots(frame(slots), is_long=kinds[-1] == "b"):
            entered.set()

    waiting = threading.Thread(target=last, daemon=True)
    waiting.start()
    assert not entered.wait(0.2)
    jobs[-1].__exit__(None, None, None)
    assert entered.wait(5)
    waiting.join(5)
    for job in jobs[:-1]:
        job.__exit__(None, None, None)
    assert functions._taken == []


def test_a_proof_that_reads_another_store_takes_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task calls the store; the rows to compare are computed in all slots, and take hours."""
    monkeypatch.setattr(functions, "_taken", [])
    store = SimpleNamespace(read=lambda *_given: iter(()))
    monkeypatch.setattr(verify, "versioned_store", lambda *_given: store)
    rows, shares = frame(4), list[Any]()

    def compared(given: Any, *_given: Any, **_named: Any) -> Any:
        with sharing_slots(frame(4)) as one, sharing_slots(frame(4)) as another:
            shares.extend([one, another])
        return given

    monkeypatch.setattr(verify, "compare", compared)
    verifier: Any = object.__new__(verify._Verifier)
    verifier._config = CONFIG
    table = KeptTable(NAME, 1, "f", "row")
    plan: Any = SimpleNamespace(store="memory", name=NAME, key=(), ruled_table=lambda _n: table)
    assert verifier._compare(plan, version_of(1, LIVE), rows) is rows
    assert shares == [1, 1]


def columns(count: int) -> Mapping[str, pa.Array]:
    return {
        "key": pa.array([f"k{n}" for n in range(count)]),
        "version": pa.array([1] * count, pa.int64()),
        "c0": pa.array(["north"] * count),
        "c1": pa.array([Decimal(1)] * count, pa.decimal128(12, 2)),
    }


class Timed(RowsInMemory):
    """Takes a while for each call, by its own clock."""

    call_s_max = 100.0
    pause_s = now_s = 0.0

    def write(self, *given: Any) -> None:
        self.now_s += self.pause_s
        super().write(*given)


def test_calls_grow_again_after_writes_that_were_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow minute of a store must not leave calls of a row for ever."""
    sizes = {"tested": 1_250}
    monkeypatch.setattr(versioned, "_SLICES", sizes)
    rows = Timed()
    monkeypatch.setattr(versioned, "time", SimpleNamespace(monotonic=lambda: rows.now_s))
    kept = RowsKept(rows, rows.read)
    kept.store.write(kept.table(), columns(10))
    assert sizes["tested"] == 1_250  # nothing is known of larger calls
    rows.pause_s = 30.0
    kept.store.write(kept.table(), columns(1_250))
    assert sizes["tested"] == 1_250  # twice as many may take too long
    rows.pause_s = 0.0
    for size in (2_500, 5_000, 5_000):
        kept.store.write(kept.table(), columns(6_000))
        assert sizes["tested"] == size


@pytest.mark.parametrize(("store", "jobs"), [("memory", 1), (HOME, 2)])
def test_no_job_runs_for_a_view_while_it_is_proved(store: str, jobs: int) -> None:
    """Its tasks could write nothing; a view in PostgreSQL is proved in a snapshot."""
    control: Any = Registry()
    ran = list[str]()
    plan: Any = SimpleNamespace(store=store, rides=False)
    table = KeptTable(NAME, 1, "f", "row")
    view = KeptView(version_of(1, LIVE), table, plan, {0: 0})
    views = EntityViews("order", {0: 9}, (view,), None)
    trailer: Any = object.__new__(Trailer)
    trailer._retries, trailer._begun = Retries(), {}
    trailer._config = SimpleNamespace(pipeline=SimpleNamespace(batch_changes_max=10))

    def apply(*_given: Any) -> tuple[None, int]:
        ran.append(NAME)
        return None, 9

    trailer._apply = apply
    with control.writing(NAME, 1):
        control.process = "the pipeline"
        trailer._catch_up(control, views, view)
    assert trailer._catch_up(control, views, view) == 9
    assert len(ran) == jobs


def test_readers_of_a_store_are_shown_its_views_as_often_as_its_class_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STORES, "memory", "kit.rows_in_memory:RowsInMemory")
    monkeypatch.setitem(STORES, "gone", "no_such_module:Rows")
    assert [upkeep_every_s(store) for store in ("lake", "memory", "gone")] == [10, 60, 60]
