"""A store and a kind of view that nobody but this file knows: what adding one takes."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest
from pydantic import BaseModel

from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidView, NotFound, ViewFailed, ViewRowsMissing
from everstate.log.positions import Range
from everstate.serving.places import check_here
from everstate.views.plan import WAYS, plan_of
from everstate.views.policies import IGNORED, TAKEN, Rules, ignore, throttle
from everstate.views.stores import versioned_store
from everstate.views.stores.registry import STORES
from everstate.views.stores.showing import stored_rows, types_text
from everstate.views.stores.versioned import VersionedStore
from everstate.views.tables import HOME, Core, KeptTable, Row, rule_column
from everstate.views.trailing import trail_range
from everstate.views.versions import registered
from kit.row_store_contract import AttemptingMemory, RowsKept, RowStoreContract, told
from kit.row_store_planted import PositionFirst, assert_found
from kit.rows_in_memory import RowsInMemory, StoredRow
from kit.settings import altered
from kit.shouted import SHOUTED, Shouted
from kit.view_actors import UNREAD, TwoStores
from kit.view_memory import MemoryDatabase, MemoryStore, MemoryTrailing
from kit.view_orders import ORDER, TABLES, Logged, ViewedOrder, planned
from kit.view_simulation import Simulation, Wrong
from tiers import counted


def kept_in(
    rows: RowsInMemory, merge: str, store: type[VersionedStore] = VersionedStore
) -> RowsKept:
    return RowsKept(rows, rows.read, merge, store_class=store)


class TestRowsInMemory(RowStoreContract):
    histories = counted(10, full=200)

    @pytest.fixture(params=["row", "append"])
    def kept(self, request: pytest.FixtureRequest) -> RowsKept:
        return kept_in(RowsInMemory(), request.param)


# How a store comes to an app


class NamedPlace(BaseModel):
    name: str


def app_of(**view: Any) -> App:
    app = App("orders")
    app.entity("order", key="order_id")(ViewedOrder)
    app.entity("place", key="name")(NamedPlace)
    app.view("opened", **{"sql": "SELECT region FROM order", "store": "memory", **view})
    return app


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES, "memory", "kit.rows_in_memory:RowsInMemory")


@pytest.mark.usefixtures("memory")
def test_a_view_is_declared_in_a_store_that_is_registered_in_a_line() -> None:
    plan = app_of().views["opened"]
    assert (plan.store, plan.rides) == ("memory", False)
    assert plan.definition["store"] == "memory"
    row = registered(plan, 1)
    assert plan_of(row, {"order": ORDER}).fingerprint == plan.fingerprint
    here = app_of(store="postgresql").views["opened"]
    assert here.rides
    assert here.fingerprint != plan.fingerprint
    assert here == app_of(store=HOME).views["opened"]
    assert "store" not in here.definition


@pytest.mark.usefixtures("memory")
def test_readers_of_postgresql_are_told_where_the_rows_are() -> None:
    """By what is published: a view that moves is served from where it was until then."""
    elsewhere = registered(app_of().views["opened"], 1)
    here = registered(app_of(store=HOME).views["opened"], 2)
    with pytest.raises(NotFound, match="the rows of opened are in the store memory"):
        check_here(elsewhere)
    check_here(here)


class Shelf(RowsInMemory):
    """Tables that all clients of this process share, like those of a server."""

    shelves: ClassVar[dict[str, dict[Any, tuple[int, StoredRow | None]]]] = {}

    def __init__(self, _config: Config) -> None:
        super().__init__()
        self.tables = self.shelves


def test_rows_are_shown_in_the_types_that_they_were_built_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the registry alone: whoever shows a view has no Spark."""
    monkeypatch.setitem(STORES, "memory", f"{__name__}:Shelf")
    monkeypatch.setattr(Shelf, "shelves", {})
    app = app_of(sql="SELECT region, amount, order_id, order_id AS again FROM order")
    plan, config = app.views["opened"], altered(Config(), store={"dsn": "host=nowhere"})
    types = {"c0": pa.string(), "c1": pa.decimal128(38, 2)}
    built = {"attempt": "0a", "types": types_text(types)}
    row = replace(registered(plan, 3), built=json.loads(json.dumps(built)))
    store = versioned_store(config, "opened", "memory", "0a")
    with pytest.raises(ViewRowsMissing):
        list(stored_rows(config, row, app.entities)[1])
    store.install(plan, 3, types)
    columns = {
        "key": ["a", "b"],
        "version": [7, 9],
        "c0": ["north", None],
        "c1": [Decimal(1), None],
    }
    schema = pa.schema([("key", pa.string()), ("version", pa.int64()), *types.items()])
    written = pa.table(columns, schema)
    store.write(plan.ruled_table(3), dict(zip(schema.names, written.columns, strict=True)))
    names, rows = stored_rows(config, row, app.entities)
    assert names == ("_key", "region", "amount", "order_id", "again", "_version")
    assert sorted(rows) == [
        ("a", "north", Decimal("1.00"), "a", "a", 7),
        ("b", None, None, "b", "b", 9),
    ]


def test_a_store_that_is_not_registered_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(InvalidView, match=r"no store 'memory' \(known: .*postgresql"):
        app_of()


def test_a_store_whose_package_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES, "memory", "no_such_module:Rows")
    with pytest.raises(InvalidView, match="cannot be loaded: No module named 'no_such_module'"):
        app_of()


def test_a_store_whose_module_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be broken in any way; all other views are kept."""

    def fail(_point: EntryPoint) -> Any:
        raise RuntimeError("this client needs another release of Python")

    monkeypatch.setitem(STORES, "memory", "somewhere:Rows")
    monkeypatch.setattr(EntryPoint, "load", fail)
    with pytest.raises(InvalidView, match="cannot be loaded: this client needs another release"):
        app_of()


REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "sums": (
        {"sql": "SELECT count(*) AS n FROM order"},
        r"sums are kept in PostgreSQL\. .*Client\.follow_view can copy the groups",
    ),
    "all states": (
        {"sql": "SELECT region FROM order_history"},
        r'all states are kept in the lake\. Write store="lake"\.',
    ),
    "a join": (
        {"sql": "SELECT region FROM order JOIN place ON order.region = place.name"},
        "computed from other views",
    ),
    "an order": ({"sql": "SELECT region FROM order ORDER BY region"}, "ORDER BY"),
    "the first": ({"sql": "SELECT region FROM order ORDER BY region LIMIT 3"}, "LIMIT"),
    "the last of each": (
        {
            "sql": "SELECT region, amount FROM order QUALIFY row_number() OVER "
            "(PARTITION BY region ORDER BY amount) <= 2"
        },
        "kind last",
    ),
    "words": ({"search": "region"}, "kind search"),
    "indexes": ({"indexes": ["region"]}, "indexes"),
    "a cache": ({"ttl": "1 hour"}, "rows that expire are kept in PostgreSQL"),
    "a throttle": ({"policies": [throttle(per_second=1, actor="x")]}, "throttled changes"),
}


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_store_cannot_keep_is_refused_when_it_is_declared(what: str) -> None:
    options, reason = REFUSED[what]
    with pytest.raises(InvalidView, match=reason):
        app_of(**options)


def test_a_package_brings_a_store_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed as pip does it: a module, and a folder with what it says about itself."""
    info = tmp_path / "rows_for_all-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rows-for-all\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[everstate.stores]\nfor_all = rows_for_all:Rows\n")
    module = (
        "from kit.rows_in_memory import RowsInMemory\n\n\nclass Rows(RowsInMemory):\n    pass\n"
    )
    (tmp_path / "rows_for_all.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert app_of(store="for_all").views["opened"].store == "for_all"
    with pytest.raises(InvalidView, match=r"known: .*for_all, .*postgresql"):
        app_of()


def test_a_kind_comes_with_a_way_to_declare_it_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its views may be in a store that comes in a line, too."""
    monkeypatch.setitem(STORES, "memory", "kit.rows_in_memory:RowsInMemory")
    monkeypatch.setitem(WAYS, "shouted", SHOUTED)
    app = app_of()
    plan = app.declare(Shouted("loud", "order", "region", store="memory"))
    assert (plan.kind, plan.store, plan.defined) == ("shouted", "memory", ("region",))
    assert app.views["loud"] == plan
    assert plan_of(registered(plan, 3), app.entities) == plan
    monkeypatch.delitem(WAYS, "shouted")
    with pytest.raises(InvalidView, match="with this release of everstate"):
        plan_of(registered(plan, 3), app.entities)


# How errors of a store are reported


class Hangs(RowsInMemory):
    call_s_max = 0.1

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        threading.Event().wait(10)


def test_a_store_that_hangs_is_given_up_after_its_time() -> None:
    kept = kept_in(Hangs(), "row")
    log = told("a", "north")
    kept.judge(0, log, 0, 1)
    with pytest.raises(ViewFailed, match=r"the store tested failed: .* within 0\.1 s"):
        kept.trail(0, log, 0, 1)
    assert kept.position() == 0


def test_ignored_changes_are_not_written() -> None:
    """A view with rules gets the changes that it takes."""
    kept = kept_in(RowsInMemory(), "row")
    kept.plan = replace(kept.plan, rules=Rules.of(None, [ignore(actor="x")]))
    log = told("a", "north", "south")
    kept.judge(0, log, 0, 2)
    ruled = pa.array([TAKEN, IGNORED])
    changes = kept.planned(log, 0, 2).append_column(rule_column(kept.table()), ruled)
    given = (Core("order", "orders"), kept.table(), 0, Range(0, 2), changes)
    trail_range(kept.store, *given, meets=False)
    assert [row[2] for row in kept.rows()] == ["north"]


# Planted defects


class ForgetsDeletions(RowsInMemory):
    """A key that was deleted has no version any more."""

    def put(self, table: KeptTable, key: str, version: int, row: StoredRow | None) -> None:
        super().put(table, key, version, row)
        if row is None:
            self.tables[table.name].pop(key, None)


class OlderWins(RowsInMemory):
    """The last write wins, and not the highest version."""

    def put(self, table: KeptTable, key: str, version: int, row: StoredRow | None) -> None:
        place = key if table.merge == "row" else (key, version)
        self.tables[table.name][place] = (version, row)


def test_a_planted_defect_of_a_store_is_found() -> None:
    assert_found("a forgotten deletion", kept_in(ForgetsDeletions(), "row"))
    assert_found("an older version wins", kept_in(OlderWins(), "row"))
    assert_found("an older version wins", kept_in(OlderWins(), "append"))
    assert_found("the position before the rows", kept_in(RowsInMemory(), "row", PositionFirst))


# Schedules of all actors, with a view in this store


class Home(AttemptingMemory):
    """The core's database, as a store elsewhere uses it."""

    def __init__(self, world: TwoStores) -> None:
        self.world = world

    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[MemoryTrailing]:
        with TwoStores.trailing(self.world, core, table, partition) as opened:
            yield opened


class WithRows(TwoStores):
    """The store of a simulation: rows of `FOREIGN_ROWS` are in a store of rows in memory."""

    versioned_class: ClassVar[type[VersionedStore]] = VersionedStore

    def __init__(self) -> None:
        super().__init__()
        self.rows = RowsInMemory()
        self.versioned = self.versioned_class("memory", Home(self), self.rows)

    def light(self, records: Iterable[tuple[int, Logged]]) -> pa.Table:
        """Whole changes: this store is given rows, and not numbers of rows."""
        whole = planned(records)
        return whole.select([name for name in whole.column_names if name not in UNREAD])

    def images(self, changes: pa.Table, column: str) -> list[Any]:
        return MemoryStore.images(self, changes, column)

    @contextmanager
    def trailing(self, core: Core, table: KeptTable, partition: int) -> Iterator[Any]:
        if table.view != FOREIGN_ROWS.view:
            with super().trailing(core, table, partition) as opened:
                yield opened
            return
        self.between("rows")
        with self.versioned.trailing(core, table, partition) as rows:
            yield rows


_OUTPUTS: Final = (("region", "c0"), ("amount", "c1"))
FOREIGN_ROWS: Final = replace(TABLES["open_orders"], view="mirrored_rows", outputs=_OUTPUTS)


class WithRowsElsewhere(Simulation):
    """Its positions are restored with the core's database, and its rows are not (V11)."""

    store_class = WithRows
    foreign = FOREIGN_ROWS
    store: WithRows

    @property
    def foreign_positions(self) -> MemoryDatabase:
        return self.database

    def _begin(self) -> None:
        super()._begin()
        self.store.rows.install(self.foreign, pa.schema([]))
        self.store.rows.publish(self.foreign.view, self.foreign.name)

    def foreign_rows(self) -> list[Row]:
        """The rows at the end; tasks of processes that were given up have written late."""
        for given in self.random.sample(self.store.rows.calls, len(self.store.rows.calls) // 3):
            self.store.rows.write(*given)
        return self.store.rows.read(self.foreign.view) or []


def test_no_schedule_loses_or_doubles_a_row_of_a_view_in_this_store() -> None:
    happened: Counter[str] = Counter()
    for seed in range(counted(500, full=2_000)):
        simulation = WithRowsElsewhere(seed)
        simulation.run()
        happened += simulation.happened
    assert happened["restored"]


class FirstHere(WithRows):
    versioned_class = PositionFirst


@pytest.mark.parametrize("planted", ["position", "deletions", "older"])
def test_a_planted_defect_is_seen_in_a_schedule(planted: str) -> None:
    class Planted(WithRowsElsewhere):
        store_class = FirstHere if planted == "position" else WithRows

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            kinds = {"deletions": ForgetsDeletions, "older": OlderWins}
            self.store.rows.__class__ = kinds.get(planted, RowsInMemory)

    for seed in range(400):
        try:
            Planted(seed).run()
        except (Wrong, AssertionError):
            return
    pytest.fail(f"{planted} was not seen in 400 schedules")
