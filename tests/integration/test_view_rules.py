"""Triggers and policies of views on real servers, each proved with its own rule."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import partial
from random import Random

import psycopg
import pyarrow as pa
import pytest
from keep_cases import WHO, Together, World, drain, orders_app
from psycopg import sql
from pyspark.sql import SparkSession

from capture_cases import eventually
from everstate.changes.tokens import parse_token
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.errors import NotCaughtUp, ThrottledChangesWait
from everstate.pipeline.keeping.releasing import Releaser
from everstate.postgres import connect_views
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control, deferring
from everstate.views.control.deferring import deferred_offsets
from everstate.views.policies import DEFERRED, ignore, throttle
from everstate.views.tables import KeptTable, rule_column
from kit.view_contract import TOTALS
from kit.view_orders import HISTORY, orders
from kit.view_postgres import PostgresKeptOrders

pytestmark = pytest.mark.settings(log={"partitions": 2}, archive={"trigger_s": 1})

IMPORT = replace(WHO, service_name="importer")
TO_DE = when("country").changes(to="DE")


@pytest.fixture
def world(config: Config, spark: SparkSession) -> World:
    app = orders_app()
    app.view("arrivals", sql="SELECT country, count(*) AS n FROM ordr GROUP BY country", when=TO_DE)
    app.view("arrived", sql="SELECT order_id, amount FROM ordr", when=TO_DE)
    app.view(
        "manual",
        sql="SELECT order_id, amount FROM ordr",
        policies=[ignore(service_name="importer")],
    )
    slow = throttle(service_name="importer", per_second=10)
    app.view(
        "slow_sums",
        sql="SELECT country, count(*) AS n, sum(amount) AS amount FROM ordr GROUP BY country",
        policies=[slow],
    )
    app.view("slow_rows", sql="SELECT order_id, country, amount FROM ordr", policies=[slow])
    return World(config, spark, app)


@pytest.fixture
def kinds(world: World) -> World:
    """The same with rules of views of other kinds."""
    view, manual = world.app.view, ignore(service_name="importer")
    slow = throttle(service_name="importer", per_second=10)
    most = "SELECT country, max(amount) AS most, count(DISTINCT amount) AS n FROM ordr"
    view("most", sql=f"{most} GROUP BY country ORDER BY most DESC LIMIT 2", when=TO_DE)
    changes = "SELECT kind, count(*) AS n, max(current.amount) AS most FROM ordr_changes"
    view("manual_changes", sql=f"{changes} GROUP BY kind", policies=[manual])
    each = "SELECT key, version, kind, amount FROM ordr_changes"
    view("slow_changes", sql=each, policies=[slow])
    view("slow_cache", sql="SELECT order_id FROM ordr", ttl="1 hour", policies=[slow])
    return world


RULED = ("arrivals", "arrived", "manual", "slow_sums", "slow_rows")
KINDS = ("most", "manual_changes", "slow_changes", "slow_cache")
PROVED = (
    "equal",
    "not compared: it has no SQL definition",
    "not compared: its SQL is not all of its definition",
)


def check(world: World) -> None:
    for report in world.verify().values():
        assert report.holds, report
        assert report.as_read in PROVED, report


def waiting(world: World, version: int = 1) -> int:
    with connect_views(world.config.views_dsn) as connection:
        counts = Control(connection, world.config.views.schema_name).deferred()
    mine = [here for (_, of), here in counts.items() if of == version]
    return sum(changes for here in mine for changes, _ in here.values())


def some(world: World, random: Random, count: int) -> None:
    records = []
    for _ in range(count):
        key = f"o{random.randrange(12)}"
        world.who = IMPORT if random.random() < 0.5 else WHO
        if random.random() < 0.1 and world.states.get(key, (0, None))[1] is not None:
            records.append(world.change(key, None))
        else:
            country = random.choice(("AT", "DE", None))
            records.append(world.put(key, country, str(random.randrange(200))))
    world.send(*records)


@pytest.mark.full
def test_views_with_rules_equal_their_batch_while_changes_wait_and_after(kinds: World) -> None:
    random, world = Random(5), kinds
    keeper: Together = world.keeper()
    releaser = Releaser(world.config, world.app)
    for _ in range(3):
        some(world, random, 40)
        drain(keeper)
        releaser.step(0.05)
    assert waiting(world) > 0
    check(world)
    # A version that is built has everything; the one before goes on with what waits.
    with connect_views(world.config.views_dsn) as connection:
        control = Control(connection, world.config.views.schema_name)
        for name in (*RULED, *KINDS):
            ask_rebuild(control, name)
    drain(keeper)
    check(world)
    some(world, random, 30)
    drain(keeper)
    while releaser.step(60.0):
        pass
    # The versions that were replaced stand still, with what waits beside them.
    assert waiting(world, 2) == 0
    check(world)
    assert world.rows("SELECT n, amount FROM slow_sums ORDER BY 1, 2") == world.rows(
        "SELECT orders, amount FROM by_country ORDER BY 1, 2"
    )
    releaser.close()
    keeper.close()


def test_live_changes_pass_an_import_and_a_key_keeps_its_order(world: World) -> None:
    keeper: Together = world.keeper()
    world.who = IMPORT
    imported = [world.put(f"i{n}", "AT", "1") for n in range(600)]
    world.who = WHO
    live = [world.put("live", "DE", "7"), world.put("i5", "DE", "9")]
    world.send(*imported, *live)
    drain(keeper)
    # `i5` was imported, so its live change waits behind that.
    assert world.rows("SELECT order_id, amount FROM slow_rows") == [("live", Decimal(7))]
    assert world.rows("SELECT country, n FROM slow_sums") == [("DE", 1)]
    assert waiting(world) == 2 * 601
    # No token says what the rows have, and a read that waits for a throttled write has it.
    written = world.app.token("ordr", "i5", 1)
    read = partial(world.app.snapshot, "slow_rows", config=world.config)
    assert [row["order_id"] for row in read().records()] == ["live"]
    with pytest.raises(ThrottledChangesWait):
        _ = read().token
    with pytest.raises(NotCaughtUp, match="offsets"):
        read(wait_for=written, wait_s=0.1)
    releaser = Releaser(world.config, world.app)
    # Ten a second, of each view: they are applied at once, and made up for.
    before = waiting(world)
    releaser.step(0.1)
    first = before - waiting(world)
    assert first == 2 * 10
    assert releaser.step(0.1) == waiting(world) == before - first
    while releaser.step(1000.0):
        pass
    assert world.rows("SELECT amount FROM slow_rows WHERE order_id = 'i5'") == [(Decimal(9),)]
    assert parse_token(read(wait_for=written).token).positions
    check(world)
    releaser.close()
    keeper.close()


def test_a_part_is_made_up_for_and_a_view_that_is_refused_stops_no_other(world: World) -> None:
    keeper: Together = world.keeper()
    releaser = Releaser(world.config, world.app)
    world.who = IMPORT
    world.send(*[world.put("a", "AT", str(n)) for n in range(1, 21)])
    drain(keeper)
    # Ten a second: ten at once take the allowance of a second, also when no more wait.
    assert releaser.step(0.1) == 20
    assert world.rows("SELECT amount FROM slow_rows") == [(Decimal(10),)]
    assert releaser.step(0.1) == 20
    assert releaser.step(0.9) == 0
    world.send(*[world.put("a", "AT", str(n)) for n in range(21, 41)])
    drain(keeper)
    assert releaser.step(0.1) == 40
    with connect_views(world.config.views_dsn) as connection:
        control = Control(connection, world.config.views.schema_name)
        table = sql.Identifier(control.schema_name, "slow_rows__v1")
        refused = sql.SQL("ALTER TABLE {} ADD CONSTRAINT refused CHECK (false) NOT VALID")
        connection.execute(refused.format(table))
        assert releaser.step(2.0) == 30
        errors = {row.name: row.error for row in control.versions()}
        assert "refused" in (errors["slow_rows"] or "")
        assert errors["slow_sums"] is None
        assert world.rows("SELECT amount FROM slow_sums") == [(Decimal(30),)]
        assert world.rows("SELECT amount FROM slow_rows") == [(Decimal(20),)]
        check(world)
        connection.execute(sql.SQL("ALTER TABLE {} DROP CONSTRAINT refused").format(table))
        assert eventually(lambda: releaser.step(2.0) == 0)
        assert {row.error for row in control.versions()} == {None}
    assert world.rows("SELECT amount FROM slow_rows") == [(Decimal(40),)]
    releaser.close()
    keeper.close()


@pytest.mark.full
def test_facts_are_counted_once_and_never_taken_away(world: World) -> None:
    keeper: Together = world.keeper()
    world.send(
        world.put("a", "DE", "1"),
        world.put("a", "AT", "2"),
        world.put("a", "DE", "3"),
        world.put("a", "DE", "4"),
        world.change("a", None),
        world.put("b", "AT", "5"),
    )
    drain(keeper)
    assert world.rows("SELECT country, n FROM arrivals") == [("DE", 2)]
    assert world.rows("SELECT order_id, amount FROM arrived") == [("a", Decimal(3))]
    check(world)
    keeper.close()


PLANTED = {
    "slow_sums": "DELETE FROM deferred WHERE view = 'slow_sums'",
    "arrivals": "UPDATE arrivals__v1 SET n = n + 1",
    "manual": "DELETE FROM manual__v1",
}


def test_planted_defects_are_found_by_the_proof(world: World) -> None:
    keeper: Together = world.keeper()
    records = [world.put("first", "DE", "3")]
    world.who = IMPORT
    records += [world.put(f"i{n}", "AT", "1") for n in range(3)]
    world.send(*records)
    drain(keeper)
    for defect in PLANTED.values():
        world.change_tables(defect)
    assert {name for name, report in world.verify().items() if not report.holds} == PLANTED.keys()
    keeper.close()


def test_what_waits_goes_with_its_version(world: World) -> None:
    keeper: Together = world.keeper()
    world.who = IMPORT
    world.send(*[world.put(f"i{n}", "AT", "1") for n in range(5)])
    drain(keeper)
    with connect_views(world.config.views_dsn) as connection:
        control = Control(connection, world.config.views.schema_name)
        control.close_positions("slow_rows", 1)
        assert ("slow_rows", 1) not in control.deferred()
        assert ("slow_sums", 1) in control.deferred()
    keeper.close()


def throttled_changes(table: KeptTable, start: int, end: int) -> pa.Table:
    """Changes of six orders, all of them throttled for a view."""
    found = orders(6).between(start, end)
    treated = pa.array([DEFERRED] * found.num_rows, pa.int8())
    return found.append_column(rule_column(table), treated)


def test_throttled_changes_wait_while_the_core_writes(kept: PostgresKeptOrders) -> None:
    slow = replace(TOTALS, has_rules=True)
    core, changes = kept.core([HISTORY, slow]), throttled_changes(slow, 0, 3)
    assert kept.apply(0, 0, 3, changes, core=core).failures == ()
    with psycopg.connect(kept.dsn) as writing:
        query = sql.SQL("SELECT FROM {}.position FOR NO KEY UPDATE")
        writing.execute(query.format(sql.Identifier(kept.schema_name)))
        assert kept.under_test.take_deferred(core, slow, 9, waits=False) == 0
    assert kept.under_test.take_deferred(core, slow, 9, waits=False) == 3
    assert kept.tables().totals == [(3, 0 + 1 + 2)]


def test_the_oldest_part_comes_first_and_a_partition_that_is_written_is_passed_over(
    kept: PostgresKeptOrders,
) -> None:
    slow = replace(TOTALS, has_rules=True)
    kept.reset(2)
    core, older = kept.core([HISTORY, slow]), throttled_changes(slow, 0, 2)
    assert kept.apply(1, 0, 2, older, core=core).failures == ()
    newer = throttled_changes(slow, 2, 5)
    column = newer.schema.get_field_index("offset")
    newer = newer.set_column(column, "offset", pa.array(range(3), pa.int64()))
    assert kept.apply(0, 0, 3, newer, core=core).failures == ()
    with psycopg.connect(kept.dsn) as writing:
        query = sql.SQL("SELECT FROM {}.position WHERE partition = 1 FOR NO KEY UPDATE")
        writing.execute(query.format(sql.Identifier(kept.schema_name)))
        assert kept.under_test.take_deferred(core, slow, 1, waits=False) == 1
    assert kept.under_test.take_deferred(core, slow, 9) == 2, "those of partition 1 are older"
    with psycopg.connect(kept.dsn) as changing:
        query = sql.SQL("UPDATE {}.position SET fingerprint = 'other' WHERE view = {}")
        changing.execute(query.format(sql.Identifier(kept.schema_name), slow.view))
    assert kept.under_test.take_deferred(core, slow, 9) == 0, "the position is of another plan"


def test_a_stored_part_is_applied_in_pieces(kept: PostgresKeptOrders) -> None:
    """No more than a second's changes of a slow view at once; a proof leaves out the others."""
    slow = replace(TOTALS, has_rules=True)
    core, changes = kept.core([HISTORY, slow]), throttled_changes(slow, 0, 3)
    assert kept.apply(0, 0, 3, changes, core=core).failures == ()
    for taken, waiting in ((0, [0, 1, 2]), (1, [1, 2]), (3, [])):
        with connect_views(kept.dsn) as connection, connection.transaction():
            control = Control(connection, kept.schema_name)
            found = list(deferred_offsets(control, slow.view, slow.version))
            first = control.deferred(slow.view).get((slow.view, slow.version), {})
        assert [o for *_, offsets in found for o in offsets] == waiting
        assert first == ({(1, 0): (len(waiting), waiting[0])} if waiting else {})
        assert kept.tables().totals == [(taken, sum(range(taken)) if taken else None)]
        kept.under_test.take_deferred(core, slow, 1 if taken == 0 else 2)


def test_a_view_beside_which_no_more_may_wait_is_behind_alone(
    kept: PostgresKeptOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferring, "DEFERRED_MAX", 3)
    slow = replace(TOTALS, has_rules=True)
    changes = partial(throttled_changes, slow)
    core = kept.core([HISTORY, slow])
    assert kept.apply(0, 0, 3, changes(0, 3), core=core).failures == ()
    (failure,) = kept.apply(0, 3, 6, changes(3, 6), core=core).failures
    assert "3 throttled changes are waiting already" in failure.reason
    assert (kept.vector(), kept.vector(slow), kept.vector(HISTORY)) == ({0: 6}, {0: 3}, {0: 6})
    assert kept.under_test.take_deferred(core, slow, 9) == 3
    assert kept.tables().totals == [(3, 0 + 1 + 2)]
    kept.trail(slow, 0, 3, 6, changes(3, 6), meets=True)
    assert kept.under_test.take_deferred(core, slow, 9) == 3
    assert kept.under_test.take_deferred(core, slow, 9) == 0
    assert kept.tables().totals == [(6, 15)]
