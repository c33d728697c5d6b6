"""Which versions of views a keeper keeps: new, changed, left out, put back; two apps at once."""

from __future__ import annotations

from contextlib import closing
from decimal import Decimal

import psycopg
import pytest
from keep_cases import NOW, WHO, Order, World, drain, orders_app

from everstate.app import App
from everstate.changes import ChangeCodec
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.pipeline.keeping import keep
from everstate.pipeline.keeping.keep import Keeper
from everstate.views.control import Control
from kit.changes import change_of

PARTS = ("parts", "SELECT sum(parts) AS parts, count(*) AS orders FROM ordr")
HOW = "SELECT version, status, published FROM view WHERE name = "


def without_history() -> App:
    app = App("orders")
    app.entity("ordr", key="order_id", history=False)(Order)
    return app


def differing(world: World) -> list[str]:
    return [report.name for report in world.verify().values() if not report.holds]


def test_c15_what_was_left_out_and_comes_back_has_missed_nothing(world: World) -> None:
    """A view and the history: readers see them as they were, and they catch up when they return."""
    world.app = orders_app(PARTS)
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00", parts=2) for n in range(10)])
    drain(keeper)
    keeper.close()
    world.app = without_history()
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "BE", "6.00", parts=3) for n in range(5, 20)])
    drain(keeper)
    assert world.rows(HOW + "'parts'") == [(1, "retired", True)]
    assert world.rows(HOW + "'ordr_history'") == [(1, "retired", True)]
    assert world.rows("SELECT parts, orders FROM parts") == [(20, 10)]
    keeper.close()
    world.app = orders_app(PARTS)
    keeper = world.keeper()
    world.send(world.put("o-1", "NL", "7.00", parts=4))
    drain(keeper)
    assert world.rows("SELECT DISTINCT version, status FROM view") == [(1, "live")]
    assert world.rows("SELECT parts, orders FROM parts") == [(4 * 2 + 4 + 15 * 3, 20)]
    assert world.rows("SELECT count(*) FROM ordr_history") == [(26,)]
    assert differing(world) == []
    keeper.close()


def other_views() -> App:
    """One view of `orders_app` less, and new ones around the one that stays."""
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    app.view("counted", sql="SELECT count(*) AS orders FROM ordr")
    app.view("by_country", sql=orders_app().views["by_country"].sql)
    app.view(PARTS[0], sql=PARTS[1])
    return app


def test_c14_what_waits_is_let_go_though_views_came_and_left_meanwhile(world: World) -> None:
    keeper = world.keeper()
    first, lost, third, fourth = (world.put("o-1", "NL", f"{n}.00", parts=n) for n in range(1, 5))
    world.send(first, third)
    assert drain(keeper) == (1, 0, 1, 0)
    keeper.close()
    world.app = other_views()
    keeper = world.keeper()
    world.send(lost, fourth)
    drain(keeper)
    assert world.rows("SELECT orders, amount FROM by_country") == [(1, Decimal("4.00"))]
    assert world.rows("SELECT parts, orders FROM parts") == [(4, 1)]
    assert world.rows("SELECT count(*) FROM held WHERE released_at IS NULL") == [(0,)]
    assert world.rows("SELECT name, version FROM view WHERE status = 'building'") == []
    assert world.wrong() == []
    keeper.close()


def test_c15_a_keeper_that_dies_while_a_view_is_declared_leaves_nothing_half(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00", parts=n) for n in range(10)])
    drain(keeper)
    keeper.close()
    world.app = orders_app(PARTS)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("everstate.views.control.Control.add_version", dies)
        half = Keeper(world.spark, world.config, world.app)
        with pytest.raises(KeyboardInterrupt):
            half.prepare()
        half.close()
    assert world.rows(HOW + "'parts'") == []
    keeper = world.keeper()
    drain(keeper)
    assert world.rows("SELECT parts, orders FROM parts") == [(sum(range(10)), 10)]
    keeper.close()


def test_c11_a_keeper_of_an_older_app_keeps_what_a_later_one_declared(world: World) -> None:
    older = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00", parts=n) for n in range(10)])
    drain(older)
    world.app = orders_app(PARTS)
    newer = world.keeper()
    drain(newer)
    world.send(world.put("o-99", "NL", "5.00", parts=99))
    assert drain(older) == (1, 0, 0, 0)
    assert world.rows("SELECT parts, orders FROM parts") == [(sum(range(10)) + 99, 11)]
    older.close()
    newer.close()


def test_an_earlier_deployment_that_starts_again_takes_nothing_back_and_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(keep, "note", lambda name, part: told.append(f"{name}: {part.reason}"))
    earlier, later = world.app, orders_app(PARTS)
    with closing(world.keeper()):
        pass
    with psycopg.connect(world.config.views_dsn, autocommit=True) as connection:
        control = Control(connection, world.config.views.schema_name)
        first, second = (control.begin_deployment("orders", host) for host in ("a", "b"))
    for number, app in ((first, earlier), (second, later), (first, earlier)):
        with closing(Keeper(world.spark, world.config, app, deployment=number)) as keeper:
            keeper.prepare()
    assert world.rows("SELECT status FROM view WHERE name = 'parts'") == [("live",)]
    (reason,) = told
    assert reason.startswith("declarations: orders on b, started 20")
    assert "declares the views; this process updates them as they are declared there" in reason
    # Nor does a process of the later one take back what an operator has asked for since.
    world.change_tables("UPDATE view SET fingerprint = 'gone back' WHERE name = 'parts'")
    with closing(Keeper(world.spark, world.config, later, deployment=second)) as keeper:
        keeper.prepare()
    assert world.rows("SELECT status FROM view WHERE name = 'parts'") == [("live",)]


def test_a_view_that_spark_refuses_waits_alone_with_the_reason(world: World) -> None:
    world.app = orders_app(("odd", "SELECT parts FROM ordr WHERE hour(order_id) = 1"))
    with closing(world.keeper()) as keeper:
        world.send(world.put("o-1", "NL", "5.00"))
        assert drain(keeper) == (1, 0, 0, 0)
    ((status, reason),) = world.rows("SELECT status, status_reason FROM view WHERE name = 'odd'")
    assert (status, reason.startswith("refused: view odd:")) == ("waiting", True)
    assert world.rows("SELECT orders FROM by_country") == [(1,)]


def test_b9_a_name_that_is_taken_ends_no_start_and_is_published_when_it_is_free(
    world: World,
) -> None:
    with closing(world.keeper()):
        world.change_tables("CREATE TABLE parts (of_mine int)")
    world.app = orders_app(PARTS)
    with closing(world.keeper()) as keeper:
        ((status, reason),) = world.rows("SELECT status, waits_for FROM view WHERE name = 'parts'")
        assert (status, '"parts" is not a view' in reason) == ("building", True)
        world.change_tables("DROP TABLE parts")
        world.send(world.put("o-1", "NL", "5.00"))
        assert drain(keeper) == (1, 0, 0, 0)
    how = "SELECT version, status, waits_for FROM view WHERE name = 'parts'"
    assert world.rows(how) == [(1, "live", None)]
    assert world.rows("SELECT count(*) FROM parts") == [(1,)]


def two_types() -> App:
    app = orders_app()
    app.entity("other", key="order_id")(Order)
    return app


def others(world: World, count: int) -> list[OutRecord]:
    """New entities of the second type."""
    codec, found = ChangeCodec(world.app.entity_type("other")), []
    for number in range(count):
        order = Order(order_id=f"x-{number}", country="BE", amount=Decimal(1))
        made = change_of("other", order.order_id, 1, order, who=WHO, at=NOW)
        topic = TopicNames(world.config.log.prefix).changes("other")
        found.append(OutRecord(topic, *codec.encode(made)))
    return found


@pytest.mark.parametrize("trouble", ["too many held", "table gone"])
def test_c14_a_core_that_cannot_go_on_waits_alone_and_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(keep, "_CORE_RETRY_S", (600.0,))
    world.app = two_types()
    first, lost, *held = (world.put("o-1", "NL", f"{n}.00") for n in range(1, 6))
    keeper = world.keeper(held_max=2)
    if trouble == "table gone":
        world.change_tables("ALTER TABLE ordr_latest__v1 RENAME TO elsewhere")
        world.send(first, lost, *held)
    else:
        world.send(first, *held)
    world.send(*others(world, 20))
    drain(keeper)
    assert world.rows("SELECT count(*) FROM other_latest") == [(20,)]
    ((reason,),) = world.rows("SELECT error FROM view WHERE name = 'ordr_latest'")
    assert ("held_max is 2" if trouble == "too many held" else "ordr_latest") in reason
    assert world.rows("SELECT DISTINCT error FROM view WHERE entity = 'other'") == [(None,)]
    if trouble == "table gone":
        world.change_tables("ALTER TABLE elsewhere RENAME TO ordr_latest__v1")
        keeper._retries.forget("ordr_latest")
    else:
        keeper.close()
        keeper = world.keeper()
        drain(keeper)
        world.send(lost)
    drain(keeper)
    assert world.rows("SELECT DISTINCT status, error FROM view") == [("live", None)]
    assert world.rows("SELECT orders, amount FROM by_country") == [(1, Decimal("5.00"))]
    keeper.close()


@pytest.mark.full
@pytest.mark.parametrize("names", [("ordr", "other"), ("other", "ordr")])
def test_a4_a_view_that_moves_to_another_entity_type_keeps_its_rows_until_the_new_are_there(
    world: World, names: tuple[str, str]
) -> None:
    """In whatever order the entity types are prepared; and each start goes on with it."""

    def counting(source: str) -> App:
        app = App("orders")
        for name in names:
            app.entity(name, key="order_id")(Order)
        app.view("counted", sql=f"SELECT count(*) AS n FROM {source}")
        return app

    how = "SELECT version, entity, status, published FROM view WHERE name = 'counted' ORDER BY 1"
    world.app = counting("ordr")
    with closing(world.keeper()) as keeper:
        world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(3)], *others(world, 5))
        drain(keeper)
    world.app = counting("other")
    for number in (3, 4):
        with closing(world.keeper()) as keeper:
            assert world.rows(how) == [(1, "ordr", "live", True), (2, "other", "building", False)]
            world.send(world.put(f"o-{number}", "NL", "5.00"))
            assert Keeper.step(keeper) is not None
            assert world.rows("SELECT n FROM counted") == [(number + 1,)]
    with closing(world.keeper()) as keeper:
        drain(keeper)
    assert world.rows(how) == [(1, "ordr", "kept", False), (2, "other", "live", True)]
    assert world.rows("SELECT n FROM counted") == [(5,)]
    world.app = counting("ordr")
    with closing(world.keeper()) as keeper:
        assert world.rows("SELECT n FROM counted") == [(5,)]
        drain(keeper)
    assert world.rows(how) == [(1, "ordr", "live", True), (2, "other", "kept", False)]
    assert world.rows("SELECT n FROM counted") == [(5,)]
