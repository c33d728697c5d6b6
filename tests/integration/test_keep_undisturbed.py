"""What others do at the same time: readers, a damaged archive, a keeper that trims."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import psycopg
import pytest
from keep_cases import CHANGED, HOW, Order, World, begun, changed_app, drain, orders_app
from psycopg import sql

from everstate.app import App
from everstate.archive import table_path
from everstate.pipeline.keeping import trail
from everstate.pipeline.keeping.spans import Archived
from everstate.postgres import connect_views
from everstate.views.control import Control
from everstate.views.kinds import ViewPlan
from everstate.views.stores import ViewTables
from kit.models import Seat


class Noted(Order):
    note: str | None = None


@pytest.mark.full
def test_b9_a_session_that_has_everything_open_holds_back_no_start(world: World) -> None:
    """Though the app has a new field, a changed view and another one, and one is gone."""
    begun(world)
    world.app = App("orders")
    world.app.entity("ordr", key="order_id")(Noted)
    world.app.view("by_country", sql=CHANGED)
    world.app.view("notes", sql="SELECT note, count(*) AS n FROM ordr GROUP BY note")
    relations = "SELECT relname FROM pg_class WHERE relkind IN ('r', 'v') AND relnamespace = "
    everything = world.rows(relations + "'everstate_views'::regnamespace")
    with psycopg.connect(world.config.views_dsn) as reader:
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        for (name,) in everything:
            place = sql.Identifier("everstate_views", name)
            reader.execute(sql.SQL("SELECT FROM {} LIMIT 1").format(place))
        # What waits for the reader fails, instead of waiting for ever.
        database = sql.Identifier(reader.info.dbname)
        with psycopg.connect(world.config.views_dsn, autocommit=True) as other:
            alter = "ALTER DATABASE {} SET lock_timeout = '3s'"
            other.execute(sql.SQL(alter).format(database))
        keeper = world.keeper()
        world.send(world.put("o-99", "NL", "7.00", parts=9))
        assert drain(keeper)[0] == 1
        assert world.rows("SELECT count(*) FROM ordr") == [(21,)]
        assert world.rows(HOW) == [(1, "live", True), (2, "building", False)]
        ((why,),) = world.rows("SELECT waits_for FROM view WHERE name = 'ordr_latest'")
        assert f"(process {reader.info.backend_pid}) holds a lock on it" in why
    keeper._retries.forget("showing ordr")
    keeper.trailer._retries.forget("publishing by_country")
    drain(keeper)
    keeper.close()
    assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
    assert world.rows("SELECT note, n FROM notes") == [(None, 21)]
    assert world.rows("SELECT count(note) FROM ordr") == [(0,)]


@pytest.mark.full
def test_b11_a_reader_in_the_way_is_named_and_the_next_try_waits(
    world: World, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try makes the other readers of the name queue for up to 200 ms."""
    begun(world)
    world.app = changed_app(CHANGED)
    monkeypatch.setattr(trail, "_IN_THE_WAY_S", (600.0,))
    point, tries = ViewTables.point, list[int]()

    def counted(tables: ViewTables, plan: ViewPlan, version: int) -> None:
        tries.append(version)
        point(tables, plan, version)

    monkeypatch.setattr(ViewTables, "point", counted)
    connected = psycopg.connect(world.config.views_dsn, application_name="report")
    with closing(world.keeper()) as keeper, connected as reader:
        reader.execute("SELECT * FROM everstate_views.by_country")
        drain(keeper)
        for _ in range(5):
            keeper.trailer.step()
        assert tries == [2]
        waits = control.versions("by_country")[1].waits_for or ""
        assert f"report (process {reader.info.backend_pid}), which holds a lock" in waits
        reader.commit()
        keeper.trailer._retries.forget("publishing by_country")
        drain(keeper)
        assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]


@pytest.mark.full
def test_b10_a_damaged_archive_stops_the_new_views_of_its_entity_type_alone(world: World) -> None:
    world.app.entity("seat", key="seat_id")(Seat)
    seats = World(world.config, world.spark, world.app, "seat")
    with closing(world.keeper()) as keeper:
        world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(9)])
        seats.send(*[seats.change(str(n), Seat(seat_id=str(n))) for n in range(4)])
        drain(keeper)
    world.archive()
    seats.archive()
    log = Path(table_path(world.config, "ordr"), "_delta_log")
    max(log.glob("*.json")).write_bytes(b"{")
    for checksum in log.glob(".*.crc"):
        checksum.unlink()
    app = orders_app(("more", "SELECT count(*) AS n FROM ordr"))
    app.entity("seat", key="seat_id")(Seat)
    app.view("seated", sql="SELECT count(*) AS n FROM seat")
    world.app = app
    with closing(world.keeper()) as keeper:
        world.send(world.put("o-1", "BE", "5.00"))
        assert drain(keeper)[0] == 1
        seats.send(seats.change("4", Seat(seat_id="4")))
        assert drain(keeper)[0] == 1
    assert world.rows("SELECT n FROM seated") == [(5,)]
    assert world.rows("SELECT country, orders FROM by_country ORDER BY 1") == [("BE", 1), ("NL", 8)]
    ((status, error),) = world.rows("SELECT status, error FROM view WHERE name = 'more'")
    assert (status, "archive of ordr" in error) == ("building", True)
    assert world.rows("SELECT count(*) FROM view WHERE error IS NOT NULL") == [(1,)]


@pytest.mark.full
@pytest.mark.parametrize("is_locked", [True, False], ids=["as it is", "planted: no lock"])
def test_a5_nothing_that_a_build_needs_is_trimmed_while_it_begins(
    world: World, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    """Another process archives and trims between its vector and its positions."""
    first, lost, third = (world.put("o-1", "NL", f"{n}.00", parts=n) for n in (1, 2, 3))
    with closing(world.keeper()) as keeper:
        world.send(first, third, *[world.put(f"x-{n}", "BE", "1.00") for n in range(9)])
        drain(keeper)
        world.archive()
        world.send(lost)
        drain(keeper)
    world.app = changed_app(CHANGED)
    keeper, vector = world.keeper(), Archived.vector
    asks = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    trimmed = list[str]()

    def trim() -> None:
        with connect_views(world.config.views_dsn) as connection:
            keeper._trimmed_at = -inf
            keeper._trim(Control(connection, "everstate_views"), {"ordr": Any})  # type: ignore[dict-item]
        trimmed.append("done")

    trimming = threading.Thread(target=trim)

    def meanwhile(archived: Archived, core: Mapping[int, int]) -> dict[int, int]:
        found = vector(archived, core)
        world.archive()
        trimming.start()
        while trimming.is_alive() and not world.rows(asks):
            time.sleep(0.02)
        assert trimmed == ([] if is_locked else ["done"])
        return found

    monkeypatch.setattr(Archived, "vector", meanwhile)
    if not is_locked:
        lock = Control.lock_installing

        def locked(control: Control) -> None:
            if threading.current_thread() is not trimming:
                lock(control)

        monkeypatch.setattr(Control, "lock_installing", locked)
    with closing(keeper):
        assert keeper.builder.step() is not None
        trimming.join()
        drain(keeper)
        parts = "SELECT parts FROM by_country__v2 WHERE country = 'NL'"
        rows = world.rows(
            "SELECT status, error FROM view WHERE name = 'by_country' AND version = 2"
        )
        if not is_locked:
            assert rows != [("live", None)], parts
            return
        assert rows == [("live", None)]
        assert world.rows(parts.replace("__v2", "")) == [(3,)]
        assert all(report.holds for report in world.verify().values())
