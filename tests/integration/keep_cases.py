"""One entity type's log, database and archive, for the tests of the keeper."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count
from typing import Annotated, Any

import psycopg
from psycopg import sql
from pydantic import BaseModel, Field
from pyspark.sql import SparkSession

from everstate.app import App
from everstate.changes import ChangeCodec, Provenance
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord, Record
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.archiving.archiver import Archiver
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.keep import Keeper, KeptBatch
from everstate.pipeline.keeping.refresh import Refresher
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.proof.verify import verify_views
from everstate.pipeline.reports import ViewReport
from everstate.testing.log_checker import read_topic
from kit.changes import change_of
from log_cases import forget

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
HOW = "SELECT version, status, published FROM view WHERE name = 'by_country' ORDER BY version"
CHANGED = "SELECT country, count(*) AS orders, sum(parts) AS parts FROM ordr GROUP BY country"
WHO = Provenance(api_version="v1", service_name="test", identifier="t")


class Order(BaseModel):
    order_id: str
    country: str | None
    amount: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    parts: int = 1


def orders_app(*more: tuple[str, str]) -> App:
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    app.view(
        "by_country",
        sql="SELECT country, count(*) AS orders, sum(amount) AS amount, avg(amount) AS mean "
        "FROM ordr GROUP BY country",
    )
    app.view("large", sql="SELECT country, amount FROM ordr WHERE amount >= 100")
    for name, text in more:
        app.view(name, sql=text)
    return app


class Together(Keeper):
    """A keeper that also builds and lets views catch up, all in the thread of the test."""

    def __init__(self, spark: SparkSession, config: Config, app: App) -> None:
        super().__init__(spark, config, app)
        self.builder = Builder(spark, config, app)
        self.trailer = Trailer(spark, config, app)
        self.refresher = Refresher(config, app)

    def close(self) -> None:
        self.builder.close()
        self.trailer.close()
        self.refresher.close()
        super().close()

    def step(self) -> KeptBatch | None:
        batch = super().step()
        built, passed = self.builder.step(), self.trailer.step()
        passed += self.refresher.step()
        if batch is None and (built is not None or passed):
            return KeptBatch()
        return batch


@dataclass
class World:
    """One test's log, database and archive."""

    config: Config
    spark: SparkSession
    app: App = field(default_factory=orders_app)
    entity: str = "ordr"
    who: Provenance = WHO
    """Who writes the changes that are made from here on."""
    occurred_hours: float = 0.0
    """When they happened, from `NOW`."""

    def __post_init__(self) -> None:
        self.codec = ChangeCodec(self.app.entity_type(self.entity))
        self.topic = TopicNames(self.config.log.prefix).changes(self.entity)
        self.states: dict[str, tuple[int, BaseModel | None]] = {}
        with Topics(self.config) as topics:
            topics.ensure([self.entity])

    def keeper(self, **pipeline: Any) -> Together:
        """A prepared keeper with its builder and trailing views; with other settings."""
        changed = self.config.pipeline.model_copy(update=pipeline)
        config = self.config.model_copy(update={"pipeline": changed})
        keeper = Together(self.spark, config, self.app)
        try:
            keeper.prepare()
        except BaseException:
            keeper.close()
            raise
        return keeper

    def change(self, key: str, order: BaseModel | None) -> OutRecord:
        version, before = self.states.get(key, (0, None))
        self.states[key] = (version + 1, order)
        occurred = NOW + timedelta(hours=self.occurred_hours)
        made = change_of(
            self.entity, key, version + 1, order, before, who=self.who, at=NOW, occurred_at=occurred
        )
        return OutRecord(self.topic, *self.codec.encode(made))

    def put(self, key: str, country: str | None, amount: str, parts: int = 1) -> OutRecord:
        order = Order(order_id=key, country=country, amount=Decimal(amount), parts=parts)
        return self.change(key, order)

    def send(self, *records: OutRecord) -> None:
        with Producer(self.config) as producer:
            producer.send_many(records)
            producer.flush(30)

    def archive(self) -> None:
        with Offsets(self.config) as offsets, Topics(self.config) as topics:
            entity_type = self.app.entity_type(self.entity)
            Archiver(
                self.spark, self.config, entity_type, offsets=offsets, topics=topics
            ).catch_up()

    def forget(self, offsets: dict[int, int]) -> None:
        """Let the log delete what lies before these offsets, as its retention does."""
        forget(self.config, self.topic, offsets)

    def ends(self) -> dict[int, int]:
        """Where each partition of the log ends."""
        with Offsets(self.config) as offsets:
            found = offsets.stable_ends([self.topic])
        return {partition: end for (_, partition), end in found.items()}

    def letters(self) -> list[Record]:
        """The dead letters."""
        return read_topic(self.config, TopicNames(self.config.log.prefix).dead(self.entity))

    def wrong(self) -> list[str]:
        """Tables that are not what a plain fold of the log comes to; no Spark has a part in it.

        The log must be readable but for records that are no JSON, and every view one of ours.
        """
        found = {}
        for name, columns in {"ordr_latest": _LATEST, **_COLUMNS}.items():
            if name == "ordr_latest" or name in self.app.views:
                found[name] = sorted(map(repr, self.rows(f"SELECT {columns} FROM {name}")))
        wanted = folded(self.log(), found)
        return [name for name in found if found[name] != wanted[name]]

    def log(self) -> list[dict[str, Any]]:
        """The readable messages of the log, partition by partition."""
        messages = []
        with Consumer(self.config) as consumer:
            for record in consumer.read_topic(self.topic):
                with suppress(ValueError):
                    messages.append(json.loads(record.value or b"", parse_float=Decimal))
        return messages

    def verify(self) -> dict[str, ViewReport]:
        self.archive()
        return {r.name: r for r in self.proofs()}

    def proofs(self) -> list[ViewReport]:
        """The proofs with the archive as it is."""
        return verify_views(self.spark, self.config, self.app)

    def proof(self, name: str) -> ViewReport:
        """The proof of one view, with the archive as it is."""
        (report,) = verify_views(self.spark, self.config, self.app, [name])
        return report

    def change_tables(self, statement: str) -> None:
        """Spoil the tables of the views with a statement of PostgreSQL."""
        with psycopg.connect(self.config.views_dsn, autocommit=True) as connection:
            connection.execute("SET search_path TO everstate_views")
            connection.execute(statement.encode())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.config.views_dsn) as connection:
            schema = sql.SQL("SET search_path TO {}").format(
                sql.Identifier(self.config.views.schema_name)
            )
            connection.execute(schema)
            done = connection.execute(sql.SQL(query))
            return done.fetchall() if done.description else []


_LATEST = "key, version, state->>'country', state->>'amount'"
_COLUMNS = {
    "by_country": "country, orders, amount",
    "large": "country, amount",
    "parts": "parts::bigint, orders",
    "counted": "orders",
}
"""What is compared of each view that tests declare."""


def folded(log: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, list[str]]:
    """What each view must hold: of every key its versions from 1 without a hole, the newest one."""
    versions: dict[str, dict[int, Any]] = defaultdict(dict)
    for change in log:
        # The first change in the log that claims a version has it.
        versions[change["key"]].setdefault(change["version"], change["currentEntityState"])
    newest: dict[str, tuple[int, Any]] = {}
    for key, states in versions.items():
        last = next(n for n in count(1) if n + 1 not in states)
        if 1 in states:
            newest[key] = (last, states[last])
    live = [state for _, state in newest.values() if state is not None]
    countries: dict[Any, list[Decimal]] = defaultdict(list)
    for state in live:
        countries[state["country"]].append(Decimal(state["amount"]))
    rows: dict[str, list[Any]] = {
        "ordr_latest": [
            (key, version, state and state["country"], state and str(state["amount"]))
            for key, (version, state) in newest.items()
        ],
        "by_country": [(c, len(amounts), sum(amounts)) for c, amounts in countries.items()],
        "large": [
            (state["country"], Decimal(state["amount"]))
            for state in live
            if Decimal(state["amount"]) >= 100
        ],
        "parts": [(sum(state["parts"] for state in live), len(live))],
        "counted": [(len(live),)],
    }
    return {name: sorted(map(repr, rows[name])) for name in names}


def drain(keeper: Keeper) -> tuple[int, int, int, int]:
    """Step until there is nothing to do; applied, duplicate, held and dead."""
    total = [0, 0, 0, 0]
    while (batch := keeper.step()) is not None:
        for place, number in enumerate((batch.applied, batch.duplicate, batch.held, batch.dead)):
            total[place] += number
    return total[0], total[1], total[2], total[3]


def changed_app(sql: str) -> App:
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    app.view("by_country", sql=sql)
    app.view("large", sql=orders_app().views["large"].sql)
    return app


def begun(world: World, orders: int = 20) -> None:
    """Views of some orders, archived; the log has more."""
    with closing(world.keeper()) as keeper:
        world.send(*[world.put(f"o-{n}", "NL", "5.00", parts=2) for n in range(orders)])
        drain(keeper)
        world.archive()
        world.send(*[world.put(f"o-{n}", "BE", "6.00", parts=3) for n in range(orders // 2)])
        drain(keeper)
