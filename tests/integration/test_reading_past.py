"""Entities, changes and views as they were: read(), read_changes() and `views query`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count, takewhile
from random import Random
from typing import Any

import msgspec
import pytest
from keep_cases import WHO, Order, World, drain
from pyspark.sql import SparkSession

import everstate
from everstate.changes import Change, Kind
from everstate.config import Config
from everstate.errors import InvalidQuery, InvalidToken, UnknownView
from everstate.log.record import OutRecord
from everstate.pipeline.requests.answers import Answers
from everstate.pipeline.requests.moment import Moment
from everstate.pipeline.requests.query import Queries, QueryResult
from everstate.serving.connection import close_pools
from kit.changes import change_of
from kit.verbs import verbs

pytestmark = pytest.mark.settings(log={"partitions": 2}, archive={"trigger_s": 1})

BEGIN = datetime(2026, 5, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def at(hours: float) -> datetime:
    return BEGIN + timedelta(hours=hours)


class History(World):
    """A log whose changes happen and are reported at times of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[Change[Any]] = []
        self.middle: tuple[dict[str, Any], str] = ({}, "")
        """Orders by country while the log was kept up to its middle, and the token of that."""

    def then(self, key: str, happened: float, recorded: float, amount: str | None) -> OutRecord:
        version, before = self.states.get(key, (0, None))
        country = "at" if key < "k3" else "de"
        now = (
            None if amount is None else Order(order_id=key, country=country, amount=Decimal(amount))
        )
        self.states[key] = (version + 1, now)
        times = {"occurred_at": at(happened), "recorded_at": at(recorded)}
        change = change_of(self.entity, key, version + 1, now, before, who=WHO, **times)
        self.told.append(change)
        return OutRecord(self.topic, *self.codec.encode(change))

    def accepted(self, key: str) -> list[Change[Any]]:
        """A plain fold: the versions of a key from 1 without a hole, the first told of each."""
        told: dict[int, Change[Any]] = {}
        for change in self.told:
            if change.key == key:
                told.setdefault(change.version, change)
        return [told[version] for version in takewhile(told.__contains__, count(1))]

    def states_at(self, moment: datetime, by: str = "as_of") -> dict[str, tuple[int, Order]]:
        """A plain fold: of each key the newest version that counts at a moment."""
        found: dict[str, tuple[int, Order]] = {}
        for key in {change.key for change in self.told}:
            mine = self.accepted(key)
            times = [c.occurred_at if by == "as_of" else c.recorded_at for c in mine]
            if by == "as_of":
                times = [max(times[: n + 1]) for n in range(len(times))]
            counted = [c for c, time in zip(mine, times, strict=True) if time <= moment]
            if counted and counted[-1].current is not None:
                found[key] = (counted[-1].version, counted[-1].current)
        return found

    def by_country(self, moment: datetime, by: str = "as_of") -> dict[str, tuple[int, Decimal]]:
        found: dict[str, tuple[int, Decimal]] = {}
        for _, order in self.states_at(moment, by).values():
            count, amount = found.get(str(order.country), (0, Decimal(0)))
            found[str(order.country)] = (count + 1, amount + order.amount)
        return found


@pytest.fixture
def world(config: Config, spark: SparkSession) -> Iterator[History]:
    made = History(config, spark)
    random = Random(3)
    records = []
    for number in range(40):
        amount = None if random.random() < 0.15 and number > 12 else str(random.randint(1, 200))
        key = f"k{random.randrange(6)}"
        if amount is None and made.states.get(key, (0, None))[1] is None:
            amount = "1"
        happened = number + random.choice((0, 0, -6, 3))
        records.append(made.then(key, happened, number + 8, amount))
    with closing(made.keeper()) as keeper:
        made.send(*records[:20], records[4])
        drain(keeper)
        made.middle = snapshot(made)
        made.send(*records[20:])
        drain(keeper)
    made.archive()
    yield made
    close_pools()


def snapshot(world: History) -> tuple[dict[str, Any], str]:
    found = world.app.snapshot("by_country", config=world.config)
    return {row["country"]: row["orders"] for row in found.records()}, found.token


def shown(found: QueryResult) -> dict[str, tuple[int, Decimal]]:
    rows = found.head(99).to_pylist()
    return {row["country"]: (row["orders"], row["amount"]) for row in rows}


def rows_of(found: Any) -> dict[str, tuple[int, Decimal]]:
    return {row.country: (row.orders, row.amount) for row in found.collect()}


def test_entities_changes_and_views_are_as_a_fold_of_the_log_says(world: History) -> None:
    given: dict[str, Any] = {"app": world.app, "config": world.config}
    for hours in (-1.0, 9.0, 17.5, 24.0, 100.0):
        view = everstate.read(world.spark, "by_country", at=at(hours), **given)
        assert rows_of(view) == world.by_country(at(hours)), hours
        orders = everstate.read(world.spark, "ordr", at=at(hours), **given).collect()
        wanted = world.states_at(at(hours))
        assert {row.order_id: row._version for row in orders} == {
            key: version for key, (version, _) in wanted.items()
        }
    seen = everstate.read(world.spark, "by_country", recorded_at=at(20), **given)
    assert rows_of(seen) == world.by_country(at(20), "recorded")
    now = everstate.read(world.spark, "by_country", **given)
    assert rows_of(now) == world.by_country(at(1000))
    changes = everstate.read_changes(world.spark, "ordr", from_=at(5), to=at(20), **given)
    places = {(row.key, row.version): row for row in changes.collect()}
    as_of: dict[str, datetime] = {}
    wanted_places = set()
    for change in world.told:
        as_of[change.key] = max(
            as_of.get(change.key, BEGIN - timedelta(days=9)), change.occurred_at
        )
        if at(5) <= as_of[change.key] < at(20):
            wanted_places.add((change.key, change.version))
    assert places.keys() == wanted_places
    assert all(row.provenance.serviceName == "test" for row in places.values())


def test_a_view_at_a_token_is_what_readers_saw_there_and_a_session_keeps_its_own_tables(
    world: History,
) -> None:
    given: dict[str, Any] = {"app": world.app, "config": world.config}
    mine = world.spark.createDataFrame([(1,)], "mine int")
    mine.createOrReplaceTempView("ordr")
    try:
        assert rows_of(everstate.read(world.spark, "by_country", **given)) == world.by_country(
            at(1000)
        )
        assert world.spark.table("ordr").columns == ["mine"]
    finally:
        world.spark.catalog.dropTempView("ordr")
    rounding = world.spark.newSession()
    rounding.conf.set("spark.sql.decimalOperations.allowPrecisionLoss", "true")
    with pytest.raises(InvalidQuery, match="rounds products of decimals"):
        everstate.read(rounding, "by_country", **given)
    rows, token = world.middle
    found = everstate.read(world.spark, "by_country", position=token, **given)
    assert {row.country: row.orders for row in found.collect()} == rows
    with pytest.raises(InvalidToken, match="no position of ordr"):
        everstate.read(world.spark, "ordr", position=world.app.token("ordr", "k1", 1), **given)
    with pytest.raises(InvalidQuery, match="give exactly one of"):
        everstate.read(world.spark, "ordr", at=at(1), position=token, **given)
    with pytest.raises(UnknownView, match="by_country"):
        everstate.read(world.spark, "nothing", **given)


@pytest.mark.full
def test_changes_of_one_time_count_from_exactly_then(world: History) -> None:
    given: dict[str, Any] = {"app": world.app, "config": world.config}
    queries, instant = Queries(world.config, world.app), timedelta(microseconds=1)
    told = ((5, "1"), (9, "2"), (9, None), (9, "3"), (9, "4"), (12, "5"))
    with closing(world.keeper()) as keeper:
        world.send(*(world.then("k7", happened, 60, amount) for happened, amount in told))
        drain(keeper)
    world.archive()
    for moment, version in {9 * HOUR - instant: 1, 9 * HOUR: 5, 9 * HOUR + instant: 5}.items():
        found = queries.compute(world.spark, "by_country", Moment(at=BEGIN + moment))
        assert shown(found) == world.by_country(BEGIN + moment)
        assert world.states_at(BEGIN + moment)["k7"][0] == version
    for moment in (60 * HOUR - instant, 60 * HOUR):
        found = queries.compute(world.spark, "by_country", Moment(recorded_at=BEGIN + moment))
        assert shown(found) == world.by_country(BEGIN + moment, "recorded")
    for first, end, versions in (
        (9 * HOUR, 12 * HOUR, [2, 3, 4, 5]),
        (9 * HOUR + instant, 12 * HOUR + instant, [6]),
        (9 * HOUR - instant, 9 * HOUR, []),
        (9 * HOUR, 9 * HOUR, []),
    ):
        changes = everstate.read_changes(
            world.spark, "ordr", from_=BEGIN + first, to=BEGIN + end, **given
        )
        mine = changes.where("key = 'k7'").select("version").collect()
        assert sorted(row.version for row in mine) == versions


@pytest.mark.full
def test_held_and_dead_changes_count_as_the_core_has_judged_them(world: History) -> None:
    """The change that releases the others was recorded by a clock that is ahead."""
    given: dict[str, Any] = {"app": world.app, "config": world.config}
    queries, seen = Queries(world.config, world.app), Moment(recorded_at=at(60))

    def compare() -> None:
        for moment, by in ((seen, "recorded"), (Moment(at=at(65)), "as_of"), (Moment(), "as_of")):
            until = moment.recorded_at or moment.at or at(1000)
            found = queries.compute(world.spark, "by_country", moment)
            assert shown(found) == world.by_country(until, by)
            orders = everstate.read(
                world.spark, "ordr", at=moment.at, recorded_at=moment.recorded_at, **given
            )
            assert {row.order_id: row._version for row in orders.collect()} == {
                key: version for key, (version, _) in world.states_at(until, by).items()
            }

    times = ((50, 51), (62, 70), (53, 54), (54, 55))
    first, filler, *held = (world.then("k8", *each, str(n)) for n, each in enumerate(times, 1))
    late = world.told.pop(-3)
    other = world.then("k8", 50, 51, "9")
    conflict = world.told[-1] = msgspec.structs.replace(
        world.told[-1], version=1, kind=Kind.CREATED, original=None
    )
    claims = OutRecord(other.topic, *world.codec.encode(conflict))
    with closing(world.keeper()) as keeper:
        world.send(first, claims, OutRecord(world.topic, b"k8", b"no json"), *held)
        assert drain(keeper) == (1, 0, 2, 2)
        world.archive()
        compare()
        assert queries.cached("by_country", seen) is not None
        rows, token = snapshot(world)
        world.told.append(late)
        world.send(filler)
        assert drain(keeper)[0] == 3
        world.archive()
        assert queries.cached("by_country", seen) is None, "a change recorded by then was released"
        compare()
        past = everstate.read(world.spark, "by_country", position=token, **given)
        assert {row.country: row.orders for row in past.collect()} == rows


@pytest.mark.full
def test_a_result_is_kept_until_a_change_comes_that_counts_then(world: History) -> None:
    queries, moment = Queries(world.config, world.app), Moment(at=at(17.5))
    assert queries.cached("by_country", moment) is None
    computed = queries.compute(world.spark, "by_country", moment)
    assert (computed.from_cache, computed.rows) == (False, len(world.by_country(at(17.5))))
    kept = queries.cached("by_country", moment)
    assert kept is not None
    assert kept.head(1).num_rows == 1
    assert kept.head(99).to_pylist() == computed.head(99).to_pylist()
    with closing(world.keeper()) as keeper:
        world.send(world.then("k0", 50, 51, "7"))
        drain(keeper)
        world.archive()
        assert queries.cached("by_country", moment) is not None, "it happened later"
        world.send(world.then("k9", 3, 52, "7"))
        drain(keeper)
        world.archive()
        assert queries.cached("by_country", moment) is None, "a late report"
        token = Moment(position=world.middle[1])
        queries.compute(world.spark, "by_country", token)
        assert queries.cached("by_country", token) is not None


@contextmanager
def answering(world: History) -> Iterator[None]:
    """A pipeline that answers."""
    ended, answers = threading.Event(), Answers(world.spark, world.config, world.app)
    thread = threading.Thread(target=answers.run, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        answers.close()


@pytest.mark.full
def test_the_verb_asks_the_running_pipeline_and_shows_what_was_kept(
    world: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "from keep_cases import orders_app\napp = orders_app()\n"
    run = verbs(world.config, monkeypatch, "views", "query", app="past_shop:app", code=made)

    def query(*words: str, code: int = 0) -> tuple[str, str]:
        done, shown, said = run(*words)
        assert done == code, said
        return shown, said

    with answering(world):
        shown, said = query("by_country", "--at", at(17.5).isoformat(), "--json")
        rows = {row["country"]: row["orders"] for row in json.loads(shown)}
        wanted = {country: count for country, (count, _) in world.by_country(at(17.5)).items()}
        assert rows == wanted
        assert "computed in" in said, "by the pipeline"
        query("by_country", "--at", "2026-05-01T00:00", code=2)
        query("nothing", code=2)
        assert "2 rows" in query("by_country", "--position", world.middle[1])[1]
    again = query("by_country", "--at", at(17.5).isoformat())
    assert "kept from before" in again[1]
