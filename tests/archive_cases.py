"""A small changelog to archive: orders whose every change can be told apart."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from deltalake import DeltaTable
from pydantic import BaseModel
from pyspark.sql import SparkSession

from everstate.archive import table_path
from everstate.archive.layout import options_of
from everstate.archive.sums import filesystem_of
from everstate.changes import Change, ChangeCodec, EntityType, Kind, Provenance
from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from everstate.pipeline.archiving.archiver import Archiver
from kit.served_s3 import LakeOfTest
from kit.settings import altered

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
WHO = Provenance(api_version="v1", service_name="shop", identifier="till:1", actor="ann")


class Order(BaseModel):
    order_id: str
    amount: int
    note: str | None = None


ORDER = EntityType("order", Order, "order_id")


def change(key: str, version: int, kind: Kind = Kind.UPDATED, **extra: Any) -> Change[Order]:
    """Version ``version`` of an order; its amount is its version."""
    if version == 1:
        kind = Kind.CREATED
    now = Order(order_id=key, amount=version, note="ü" * (version % 3))
    before = Order(order_id=key, amount=version - 1, note="ü" * ((version - 1) % 3))
    values: dict[str, Any] = {
        "id": uuid.uuid5(uuid.NAMESPACE_OID, f"{key}/{version}"),
        "entity": "order",
        "schema_version": 1,
        "key": key,
        "version": version,
        "kind": kind,
        "occurred_at": BEGIN + timedelta(seconds=version),
        "recorded_at": BEGIN + timedelta(seconds=version, microseconds=7),
        "provenance": WHO,
        "current": None if kind is Kind.DELETED else now,
        "original": None if kind in (Kind.CREATED, Kind.EVENT) else before,
    }
    return Change(**{**values, **extra})


@dataclass
class Shop:
    """One entity type's log and archive, for one test."""

    config: Config
    spark: SparkSession
    offsets: Offsets
    topics: Topics
    lake: LakeOfTest

    @property
    def folder(self) -> Path:
        """The folder of the table's files, which an object store has on disk too."""
        return self.lake.folder / "order"

    def table(self) -> DeltaTable:
        """The archive's table as another program opens it."""
        path = table_path(self.config, "order")
        return DeltaTable(path, storage_options=options_of(path))

    def replace(self, name: str, old: bytes, new: bytes) -> None:
        """Replace bytes in a file of the table, as another client of its store does."""
        content, path = (self.folder / name).read_bytes(), table_path(self.config, "order")
        if path.options is None:
            (self.folder / name).write_bytes(content.replace(old, new))
            return
        with filesystem_of(path).open_output_stream(name) as file:
            file.write(content.replace(old, new))

    @property
    def topic(self) -> str:
        return self.topics.names.changes("order")

    def archiver(self, **config: Any) -> Archiver:
        settings = self.config
        if config:
            settings = altered(settings, archive=config)
        return Archiver(self.spark, settings, ORDER, offsets=self.offsets, topics=self.topics)

    def record(self, made: Change[Order], **fields: Any) -> OutRecord:
        key, value, headers = ChangeCodec(ORDER).encode(made)
        return msgspec.structs.replace(OutRecord(self.topic, key, value, headers), **fields)

    def write(self, records: Sequence[OutRecord]) -> None:
        producer = Producer(self.config)
        producer.send_many(records)
        producer.flush(30)

    def write_orders(self, keys: int, versions: int, *, first: int = 1) -> int:
        """``versions`` changes of each of ``keys`` orders, beginning at version ``first``."""
        self.write(
            [
                self.record(change(f"o{key}", version))
                for version in range(first, first + versions)
                for key in range(keys)
            ]
        )
        return keys * versions

    def transact(self, records: Sequence[OutRecord], *, commit: bool) -> None:
        """Write in one transaction, which ends committed or aborted."""
        producer = Producer(self.config, transactional_id=f"t-{uuid.uuid4().hex}")
        producer.init()
        producer.begin()
        producer.send_many(records)
        if commit:
            producer.commit()
        else:
            producer.flush(30)
            producer.abort()


@contextmanager
def open_shop(config: Config, spark: SparkSession, prefix: str, lake: LakeOfTest) -> Iterator[Shop]:
    config = altered(config, log={"prefix": prefix, "partitions": 3}, archive=lake.settings)
    with Topics(config) as topics, Offsets(config) as offsets:
        topics.ensure(["order"])
        try:
            yield Shop(config, spark, offsets, topics, lake)
        finally:
            topics.delete([topics.names.changes("order"), topics.names.state("order")])
