"""Orders whose views are kept by hand on real servers, without Spark, for the tests of reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from everstate.app import App
from everstate.changes import Change, ChangeCodec
from everstate.config import Config
from everstate.errors import InvalidChange
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets, Range
from everstate.log.producer import Producer
from everstate.log.record import OutRecord, Record
from everstate.log.topics import TopicNames, Topics
from everstate.views.core import apply_range
from hand_archive import HandArchive
from kit.changes import change_of
from kit.view_orders import START, TELLER, VIEWS, Logged, ViewedOrder, planned
from kit.view_postgres import PostgresKeptOrders

PARTITIONS = 3


def orders_app(*, history: bool = True) -> App:
    app = App("orders")
    app.entity("order", key="order_id", history=history)(ViewedOrder)
    for plan in VIEWS:
        app.view(plan.name, sql=plan.sql)
    return app


@dataclass
class Orders:
    """A log of orders, and who writes and keeps them."""

    config: Config
    kept: PostgresKeptOrders
    app: App = field(default_factory=orders_app)
    entity: str = "order"
    """Name of the entity type; its model is that of orders."""
    versions: dict[str, tuple[int, ViewedOrder | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.codec = ChangeCodec(self.app.entities[self.entity])
        # One for all: a broker takes half a second to admit a producer.
        self._producer, self._sending = Producer(self.config), threading.Lock()
        self.topic = TopicNames(self.config.log.prefix).changes(self.entity)
        with Topics(self.config) as topics:
            topics.ensure([self.entity])
            self.kept.reset(PARTITIONS)
            self.identity = topics.identity(self.topic)
        self.kept.control.check_topic_identity(self.entity, self.topic, self.identity)

    def change(self, key: str, **fields: Any) -> OutRecord:
        """The next change of an order; without fields it is deleted."""
        version, before = self.versions.get(key, (0, None))
        now = ViewedOrder(order_id=key, **fields) if fields else None
        self.versions[key] = (version + 1, now)
        times = {"occurred_at": START, "recorded_at": START + timedelta(minutes=1)}
        made = change_of(self.entity, key, version + 1, now, before, who=TELLER, **times)
        return OutRecord(self.topic, *self.codec.encode(made))

    def send(self, *records: OutRecord) -> None:
        with self._sending:
            self._producer.send_many(records)
            self._producer.flush(30)

    def keep(self, most: int = 10_000) -> int:
        """Judge what came in each partition, at most so many offsets; how many there were."""
        with Offsets(self.config) as offsets, Consumer(self.config) as consumer:
            return self._keep(offsets, consumer, most)

    def _keep(self, offsets: Offsets, consumer: Consumer, most: int) -> int:
        ends, passed = offsets.stable_ends([self.topic]), 0
        for partition, start in self.kept.vector().items():
            end = min(ends[self.topic, partition], start + most)
            if start == end:
                continue
            records = list(consumer.read(self.topic, partition, start, end))
            changes = planned((record.offset, self.logged(record)) for record in records)
            span = Range(start, end)
            core = replace(self.kept.core(), topic=self.topic)
            apply_range(self.kept.under_test, core, partition, span, changes)
            passed += len(span)
        return passed

    @contextmanager
    def keeping(self, most: int = 40) -> Iterator[None]:
        """A keeper that works beside the block, at most so many offsets of a partition a step."""
        ended, failed = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                with Offsets(self.config) as offsets, Consumer(self.config) as consumer:
                    while not ended.is_set():
                        if not self._keep(offsets, consumer, most):
                            ended.wait(0.005)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="keeper")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if failed:
                # Also where the block failed: most likely because nothing was kept any more.
                raise failed[0]

    def logged(self, record: Record) -> Logged:
        """A record as the pipeline reads it."""
        try:
            change = self.codec.decode(record.value or b"")
        except InvalidChange as error:
            return Logged("", 0, "", "", START, None, None, reason=error.reason)
        current, original = (
            None if state is None else ViewedOrder.model_validate(state).model_dump()
            for state in (change.current, change.original)
        )
        return Logged(
            change.key,
            change.version,
            str(change.id),
            change.kind,
            change.occurred_at,
            original,
            current,
        )

    def archive(self, ends: dict[int, int]) -> HandArchive:
        """An archive of the log up to some offsets."""
        ids = (self.identity.cluster_id, self.identity.topic_id)
        made = HandArchive(self.config, self.entity, ids)
        made.begin(dict.fromkeys(range(PARTITIONS), 0))
        with Consumer(self.config) as consumer:
            records = [r for p, end in ends.items() for r in consumer.read(self.topic, p, 0, end)]
        made.append(records, ends)
        return made

    def wait_until_kept(self) -> None:
        """Wait until the keeper has judged the whole log."""
        deadline = time.monotonic() + 60
        with Offsets(self.config) as offsets:
            while True:
                ends = offsets.stable_ends([self.topic])
                if {(self.topic, p): at for p, at in self.kept.vector().items()} == ends:
                    return
                assert time.monotonic() < deadline
                time.sleep(0.02)


def versions_of(changes: Iterable[Change[Any]]) -> dict[str, list[int]]:
    """The versions of each key in the order in which they came."""
    found: dict[str, list[int]] = {}
    for change in changes:
        found.setdefault(change.key, []).append(change.version)
    return found
