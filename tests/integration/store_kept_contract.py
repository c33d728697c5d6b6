"""Views in another store, on real servers: kept, built, published, proved, undone and dropped.

A store's test classes inherit `StoreKeptContract` and `StoreChangedContract`, and its test file has
the fixture `served`. The second is of the full tier for stores whose own calls differ little: two
stores go through all of it before every landing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import psycopg
import pyarrow as pa
import pytest
from keep_cases import World, drain, orders_app

from dropped_database import restored_later
from everstate.attention.conditions import of_views
from everstate.errors import NotFound, Unavailable
from everstate.pipeline.keeping.elsewhere import upkeep
from everstate.pipeline.keeping.keep import Keeper
from everstate.serving import Reader
from everstate.serving.overview import views
from everstate.serving.view_rows import RowsQuery, read_page
from everstate.views.changing import ask_rebuild, ask_undo, drop, forget_left
from everstate.views.control import Control, ViewVersion
from everstate.views.plan import WAYS
from everstate.views.stores import versioned_store
from kit.served_store import ServedStore
from kit.shouted import SHOUTED, Shouted
from kit.waiting import until

VIEW: Final = "large_elsewhere"
SQL: Final = "SELECT country, amount FROM ordr WHERE amount >= 100"
AWAY_S_MAX: Final = 20
"""At most so much longer than usual it takes to keep the other views although a store is away."""


@dataclass
class Mirrored:
    """A view of large orders in PostgreSQL and in another store, and one of a kind of tests."""

    world: World
    control: Control
    served: ServedStore

    def __post_init__(self) -> None:
        self.settings = self.world.config = self.served.settings(self.world.config)
        self.world.app.view(VIEW, sql=SQL, store=self.served.name)
        self.world.app.declare(Shouted("loud", "ordr", "country", store=self.served.name))

    def here(self) -> list[tuple[Any, ...]]:
        """The rows of the view in PostgreSQL."""
        return sorted(self.world.rows("SELECT country, amount FROM large"))

    def shown(self) -> list[tuple[Any, ...]] | None:
        """The rows that readers of the store see."""
        found = self.served.read(self.settings, VIEW)
        if found is None:
            return None
        return sorted((row["country"], Decimal(row["amount"])) for row in found)

    def read_here(self) -> str:
        """What a reader of PostgreSQL gets of the view."""
        try:
            found = read_page(self.world.config, self.world.app, VIEW, RowsQuery())
        except NotFound as refused:
            return str(refused)
        return f"{len(found.rows)} rows"

    def is_read_by_everstate(self) -> None:
        """A reader gets the rows by the store's client, all of them and in pages."""
        with Reader(self.world.config, self.world.app) as reader:
            columns, rows = reader.rows(VIEW, limit=None)
            assert columns == ("_key", "country", "amount", "_version")
            assert sorted(row[1:3] for row in rows) == self.here()
            assert reader.rows(VIEW, limit=1, offset=4)[1] == [rows[4]]
            assert reader.rows(VIEW, first=rows[4][0])[1] == [rows[4]]

    def row(self) -> ViewVersion:
        """The only version."""
        (row,) = self.control.versions(VIEW)
        return row

    def delete(self, key: str, version: int) -> None:
        """Delete a row in the store, as a change with this version would do."""
        row = self.row()
        table = self.world.app.views[VIEW].ruled_table(row.version)
        store = versioned_store(self.world.config, VIEW, row.store, row.attempt)
        columns = {column: pa.nulls(1, pa.string()) for _, column in table.outputs}
        columns |= {"key": pa.array([key]), "version": pa.array([version], pa.int64())}
        store.write(table, {**columns, "present": pa.array([False])})

    def versions(self) -> dict[int, tuple[str, bool]]:
        return {row.version: (row.status, row.published) for row in self.control.versions(VIEW)}

    @contextmanager
    def connected_again(self) -> Iterator[None]:
        """Use another connection to the registry, whose sessions were ended."""
        with psycopg.connect(self.world.config.views_dsn, autocommit=True) as connection:
            self.control = Control(connection, self.world.config.views.schema_name)
            yield

    def alerts(self) -> list[str]:
        """What the alerts say of the view, as `everstate status` and `views list` do."""
        with Reader(self.world.config, self.world.app) as reader:
            rows = [row for row in views(reader.config, reader.connection) if row.name == VIEW]
        return [each.why for each in of_views(rows, self.world.config.alerts)]

    def upkeep(self) -> None:
        """Do what the pipeline does each minute for the store."""
        upkeep(self.world.config, self.served.name)

    def reach(self, *, is_up: bool) -> None:
        """Let the next keepers find the store, or nobody at its address."""
        self.world.config = self.settings if is_up else self.served.away(self.settings)


def drain_again(keeper: Keeper) -> None:
    """Drain, as the role does after an error: copies of a database end the workers' sessions."""

    def is_drained() -> bool:
        try:
            drain(keeper)
        except Unavailable:
            return False
        return True

    until(is_drained)


class _ViewElsewhere:
    @pytest.fixture
    def mirrored(
        self,
        world: World,
        control: Control,
        served: ServedStore,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[Mirrored]:
        monkeypatch.setitem(WAYS, "shouted", SHOUTED)
        mirrored = Mirrored(world, control, served)
        yield mirrored
        served.clean(mirrored.settings)


class StoreKeptContract(_ViewElsewhere):
    """A view is kept, built, proved and undone; its store is away."""

    def test_a_view_is_kept_proved_rebuilt_and_undone(self, mirrored: Mirrored) -> None:
        world = mirrored.world
        with closing(world.keeper()) as keeper:
            world.send(*[world.put(f"o-{n}", "NL", f"{90 + n}.25") for n in range(30)])
            drain(keeper)
            assert mirrored.versions() == {1: ("live", True)}
            assert mirrored.shown() == mirrored.here() != []
            mirrored.is_read_by_everstate()
            world.archive()
            world.send(
                *[world.put(f"o-{n}", "BE", f"{80 + n}.00") for n in range(5, 25)],
                *[world.change(f"o-{n}", None) for n in range(25, 28)],
            )
            drain(keeper)
            assert mirrored.shown() == mirrored.here()
            assert [name for name, report in world.verify().items() if not report.holds] == []
            ask_rebuild(mirrored.control, VIEW)
            drain(keeper)
            assert mirrored.versions() == {1: ("kept", False), 2: ("live", True)}
            assert mirrored.shown() == mirrored.here()
            world.send(world.put("o-late", "FR", "500.00"))
            ask_undo(mirrored.control, VIEW)
            drain(keeper)
            assert mirrored.versions() == {1: ("live", True), 2: ("kept", False)}
            assert mirrored.shown() == mirrored.here()
            world.archive()
            assert world.proof(VIEW).holds
        mirrored.served.spoil(mirrored.settings, VIEW, "o-late", "country", "XX")
        report = world.proof(VIEW)
        assert (report.outcome, report.different_rows) == ("differs", 1)

    def test_a_store_that_is_away_or_killed_stops_its_own_views_with_the_reason(
        self, mirrored: Mirrored
    ) -> None:
        """Neither a start nor the other views wait for it; it catches up by itself."""
        world, served = mirrored.world, mirrored.served
        mirrored.reach(is_up=False)
        with closing(world.keeper()) as keeper:
            world.send(*[world.put(f"o-{n}", "NL", "150.00") for n in range(5)])
            drain(keeper)
            row = mirrored.row()
            assert (row.status, row.published) == ("building", False)
            assert f"the store {served.name} failed: " in (row.error or "")
            assert str(row.error) in mirrored.alerts()[0]
            assert len(mirrored.here()) == 5
        mirrored.reach(is_up=True)
        with closing(world.keeper()) as keeper:
            began = time.monotonic()
            drain(keeper)
            usual_s = time.monotonic() - began
            before = mirrored.shown()
            assert before == mirrored.here()
            served.kill()
            try:
                world.send(*[world.change(f"o-{n}", None) for n in range(2)])
                began = time.monotonic()
                drain(keeper)
                took_s = time.monotonic() - began
                assert f"the store {served.name} failed: " in (mirrored.row().error or "")
                assert len(mirrored.here()) == 3
                assert took_s < AWAY_S_MAX + usual_s
            finally:
                served.start()
            assert mirrored.shown() == before
        with closing(world.keeper()) as keeper:

            def has_caught_up() -> bool:
                """A server that accepts connections may not serve requests yet."""
                drain(keeper)
                return mirrored.row().error is None

            until(has_caught_up)
        assert mirrored.shown() == mirrored.here()
        assert mirrored.alerts() == []
        world.archive()
        assert world.proof(VIEW).holds


class StoreChangedContract(_ViewElsewhere):
    """Store or registry are not what they were: restored, emptied, spoilt, moved or gone."""

    def test_a_store_is_ahead_of_a_postgresql_that_was_restored_until_the_view_has_caught_up(
        self, mirrored: Mirrored
    ) -> None:
        """V11: nothing that came after the backup is lost, written twice, or deleted.

        Readers go back to the version that the registry has, although another one was built since.
        """
        world = mirrored.world
        with closing(world.keeper()) as keeper:
            world.send(*[world.put(f"o-{n}", "NL", "150.00") for n in range(5)])
            drain(keeper)
        with restored_later(world.config.views_dsn) as restore, mirrored.connected_again():
            with closing(world.keeper()) as keeper:
                world.send(world.put("o-1", "BE", "160.00"), world.put("o-9", "FR", "170.00"))
                world.send(world.change("o-0", None))
                drain_again(keeper)
                world.archive()
                ask_rebuild(mirrored.control, VIEW)
                drain(keeper)
            assert mirrored.versions()[2] == ("live", True)
            ahead = mirrored.shown()
            assert ahead == mirrored.here()
            restore()
            assert mirrored.here() != ahead
            assert mirrored.shown() == ahead
            report = world.proof(VIEW)
            assert (report.outcome, report.different_rows) == ("not compared", 0)
            mirrored.upkeep()
            assert mirrored.shown() == ahead
            with closing(world.keeper()) as keeper:
                drain_again(keeper)
                assert mirrored.shown() == mirrored.here() == ahead
                world.send(world.put("o-0", "DE", "180.00"))
                drain(keeper)
            assert mirrored.shown() == mirrored.here() != ahead
            world.archive()
            assert world.proof(VIEW).holds

    def test_a_store_that_was_emptied_takes_no_rows_until_the_view_is_built_again(
        self, mirrored: Mirrored
    ) -> None:
        """Else readers would find the rows that changed since, and none of the others."""
        world, served = mirrored.world, mirrored.served
        with closing(world.keeper()) as keeper:
            world.send(world.put("o-1", "NL", "150.00"))
            drain(keeper)
            assert mirrored.shown() == mirrored.here() != []
            served.clean(mirrored.settings)
            world.send(world.put("o-2", "NL", "250.00"))
            drain(keeper)
            assert f"everstate views rebuild {VIEW}" in (mirrored.row().error or "")
            assert served.left(mirrored.settings) == []
            world.archive()
            report = world.proof(VIEW)
            assert report.outcome == "differs"
            assert "does not have the table" in str(report.not_compared)
            ask_rebuild(mirrored.control, VIEW)
            drain(keeper)
            assert mirrored.versions()[2] == ("live", True)
            assert mirrored.shown() == mirrored.here()
            assert world.proof(VIEW).holds

    def test_rows_that_are_lost_while_the_log_goes_on_are_found(self, mirrored: Mirrored) -> None:
        """The view is behind its core, and a killed task may have left rows of later changes."""
        world = mirrored.world
        with closing(world.keeper()) as keeper:
            world.send(*[world.put(f"o-{n}", "NL", "150.00") for n in range(5)])
            drain(keeper)
        mirrored.reach(is_up=False)
        with closing(world.keeper()) as keeper:
            world.send(world.change("o-0", None), world.put("o-1", "BE", "160.00"))
            drain(keeper)
            assert len(mirrored.here()) == 4
        mirrored.reach(is_up=True)
        world.archive()
        assert world.proof(VIEW).holds
        mirrored.delete("o-0", 2)
        report = world.proof(VIEW)
        assert (report.outcome, "since" in str(report.not_compared)) == ("not compared", True)
        mirrored.delete("o-2", 2)
        report = world.proof(VIEW)
        assert (report.outcome, report.different_rows) == ("differs", 2)
        with closing(world.keeper()) as keeper:
            drain(keeper)
        assert world.proof(VIEW).different_rows == 1

    def test_a_view_moves_between_stores_and_is_dropped_in_each(self, mirrored: Mirrored) -> None:
        """Readers find it under its name where it is declared, and nowhere else."""
        world, control, elsewhere = mirrored.world, mirrored.control, mirrored.world.app
        with closing(world.keeper()) as keeper:
            world.send(*[world.put(f"o-{n}", "NL", "150.00") for n in range(5)])
            drain(keeper)
            world.archive()
        world.app = here = orders_app((VIEW, SQL))
        assert f"in the store {mirrored.served.name}" in mirrored.read_here()
        with closing(world.keeper()) as keeper:
            drain(keeper)
            mirrored.upkeep()
        assert mirrored.versions() == {1: ("kept", False), 2: ("live", True)}
        assert mirrored.shown() is None
        world.app = elsewhere
        assert mirrored.read_here() == "5 rows"
        world.app = here
        with closing(world.keeper()) as keeper:
            ask_undo(control, VIEW)
            drain(keeper)
        assert mirrored.shown() == mirrored.here()
        assert world.rows(f"SELECT to_regclass('everstate_views.{VIEW}')::text") == [(None,)]
        world.app = orders_app()
        mirrored.reach(is_up=False)
        with closing(world.keeper()) as keeper:
            drain(keeper)
            for name in (VIEW, "loud"):
                drop(control, name)
            mirrored.upkeep()
            assert set(mirrored.versions().values()) == {("dropped", False)}
        mirrored.reach(is_up=True)
        mirrored.upkeep()
        assert mirrored.versions() == {}
        assert mirrored.served.left(mirrored.settings) == []

    def test_what_was_dropped_in_a_store_that_is_gone_is_forgotten(
        self, mirrored: Mirrored
    ) -> None:
        world, control, name = mirrored.world, mirrored.control, mirrored.served.name
        with closing(world.keeper()) as keeper:
            world.send(world.put("o-1", "NL", "150.00"))
            drain(keeper)
        with pytest.raises(NotFound, match=f"no dropped version of {VIEW}"):
            forget_left(control, VIEW)
        world.app = orders_app()
        mirrored.reach(is_up=False)
        with closing(world.keeper()) as keeper:
            drain(keeper)
            drop(control, VIEW)
            mirrored.upkeep()
        row = mirrored.row()
        assert f"the store {name} failed: " in (row.error or "")
        assert f"everstate views drop {VIEW} --forget" in (row.status_reason or "")
        (left,) = forget_left(control, VIEW)
        assert left["store"] == name
        assert control.versions(VIEW) == []
        assert VIEW not in {view for view, *_ in control.left_tables()}
        assert mirrored.shown() is not None
        control.add_table(VIEW, 9, name, "0a")  # its version was removed by an older release
        assert forget_left(control, VIEW) == [{"store": name, "table": f"{VIEW}__v9_0a"}]
        assert VIEW not in {view for view, *_ in control.left_tables()}
