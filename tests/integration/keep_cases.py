"""One entity type's log, database and archive, for the tests of the keeper."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

import psycopg
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg import sql
from pydantic import BaseModel, Field
from pyspark.sql import SparkSession

from everstate.app import App
from everstate.changes import Change, ChangeCodec, Kind, Provenance, new_change_id
from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.archiver import Archiver
from everstate.pipeline.keep import Keeper
from everstate.pipeline.verify import ViewReport, verify_views

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
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


@dataclass
class World:
    """One test's log, database and archive."""

    config: Config
    spark: SparkSession
    app: App = field(default_factory=orders_app)

    def __post_init__(self) -> None:
        self.codec = ChangeCodec(self.app.entity_type("ordr"))
        self.topic = TopicNames(self.config.log.prefix).changes("ordr")
        self.states: dict[str, tuple[int, Order | None]] = {}
        with Topics(self.config) as topics:
            topics.ensure(["ordr"])

    def keeper(self, **pipeline: Any) -> Keeper:
        """A prepared keeper; with other settings of its section."""
        changed = self.config.pipeline.model_copy(update=pipeline)
        config = self.config.model_copy(update={"pipeline": changed})
        keeper = Keeper(self.spark, config, self.app)
        keeper.prepare()
        return keeper

    def change(self, key: str, order: Order | None) -> OutRecord:
        version, before = self.states.get(key, (0, None))
        kind = Kind.CREATED if before is None else Kind.UPDATED
        self.states[key] = (version + 1, order)
        made: Change[Any] = Change(
            id=new_change_id(),
            entity="ordr",
            schema_version=1,
            key=key,
            version=version + 1,
            kind=Kind.DELETED if order is None else kind,
            occurred_at=NOW,
            recorded_at=NOW,
            provenance=WHO,
            current=order,
            original=before,
        )
        encoded, value, headers = self.codec.encode(made)
        return OutRecord(self.topic, encoded, value, headers)

    def put(self, key: str, country: str | None, amount: str, parts: int = 1) -> OutRecord:
        order = Order(order_id=key, country=country, amount=Decimal(amount), parts=parts)
        return self.change(key, order)

    def send(self, *records: OutRecord) -> None:
        with Producer(self.config) as producer:
            producer.send_many(records)
            producer.flush(30)

    def archive(self) -> None:
        with Offsets(self.config) as offsets, Topics(self.config) as topics:
            entity_type = self.app.entity_type("ordr")
            Archiver(
                self.spark, self.config, entity_type, offsets=offsets, topics=topics
            ).catch_up()

    def forget(self, offsets: dict[int, int]) -> None:
        """Let the log delete what lies before these offsets, as its retention does."""
        admin = AdminClient({"bootstrap.servers": self.config.bootstrap_servers})
        before = [TopicPartition(self.topic, p, offset) for p, offset in offsets.items()]
        for deleted in admin.delete_records(before).values():
            deleted.result(30)

    def ends(self) -> dict[int, int]:
        """Where each partition of the log ends."""
        with Offsets(self.config) as offsets:
            found = offsets.stable_ends([self.topic])
        return {partition: end for (_, partition), end in found.items()}

    def verify(self) -> dict[str, ViewReport]:
        self.archive()
        return {r.name: r for r in verify_views(self.spark, self.config, self.app)}

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.config.views_dsn) as connection:
            schema = sql.SQL("SET search_path TO {}").format(
                sql.Identifier(self.config.views.schema_name)
            )
            connection.execute(schema)
            return connection.execute(sql.SQL(query)).fetchall()


def drain(keeper: Keeper) -> tuple[int, int, int, int]:
    """Step until there is nothing to do; applied, duplicate, held and dead."""
    total = [0, 0, 0, 0]
    while (batch := keeper.step()) is not None:
        for place, count in enumerate((batch.applied, batch.duplicate, batch.held, batch.dead)):
            total[place] += count
    return total[0], total[1], total[2], total[3]
