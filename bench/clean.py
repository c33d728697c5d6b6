"""clean: raw rows of Debezium become changes, beside bare consume + produce of the same bytes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import confluent_kafka
from confluent_kafka import TopicPartition
from pydantic import BaseModel

from bench import floors
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.app import App
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.declaration import Table

COUNT = 200_000
_KEYS = 50_000
_RATE = 400
_SECONDS = 10.0
_FETCH = 10_000


class Item(BaseModel):
    """Ten columns, as a shop's table has them."""

    id: int
    name: str
    email: str | None
    street: str | None
    city: str
    country: str
    amount: str
    currency: str
    quantity: int
    note: str | None


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    messages = [raw_message(index) for index in range(count)]

    def here() -> float:
        return _measured(session, messages, lambda config: cleaned(config, count))

    def spark() -> float:
        return _measured(
            session, messages, lambda config: cleaned(config, count, lambda: session.spark)
        )

    def floor() -> float:
        return _measured(session, messages, lambda config: consume_and_produce(config, count))

    values, beneath = session.alternate(floor, here)
    results = [
        result(
            "clean",
            "raw → .changes + .state, read here",
            "changes/s",
            values,
            floors=beneath,
            floor_is="bare consume + produce of the same raw messages",
            reach=Reach(value_min=10_000),
        )
    ]
    values, beneath = session.alternate(floor, spark)
    results.append(
        result(
            "clean",
            "raw → .changes + .state, parsed by Spark",
            "changes/s",
            values,
            floors=beneath,
            floor_is="bare consume + produce of the same raw messages",
        )
    )
    config = _filled(session, [])
    late = latencies_ms(config, messages[: int(_RATE * _SECONDS)])
    session.drop(config)
    results.append(result("clean", f"raw → .changes at {_RATE}/s, p50", "ms", [median(late)]))
    worst = sorted(late)[int(len(late) * 0.99)]
    results.append(result("clean", f"raw → .changes at {_RATE}/s, p99", "ms", [worst]))
    return results


def raw_message(index: int) -> tuple[bytes, bytes]:
    """Key and value of one row as Debezium writes it: created, then updated three times.

    Every tenth update leaves a column out, as PostgreSQL does with values that are kept apart.
    """
    key, turn = index % _KEYS, index // _KEYS
    row: dict[str, Any] = {
        "id": key, "name": f"customer {key}", "email": f"c{key}@example.org", "street": f"{key}",
        "city": "Lagos", "country": "NG", "amount": f"{key}.{turn:02}", "currency": "NGN",
        "quantity": turn, "note": "a note that is longer than the rest of it " * 3,
    }  # fmt: skip
    if turn and key % 10 == 0:
        row["note"] = "__debezium_unavailable_value"
    at = 1_770_000_000_000 + index
    source = {
        "version": "3.5.0.Final", "connector": "postgresql", "name": "shop", "ts_ms": at,
        "snapshot": "false", "db": "shop", "sequence": f'["{index}","{index}"]', "schema": "public",
        "table": "items", "txId": index, "lsn": 10_000 + index * 8, "xmin": None,
    }  # fmt: skip
    value = {
        "before": None, "after": row, "source": source, "op": "u" if turn else "c", "ts_ms": at,
        "transaction": None,
    }  # fmt: skip
    return json.dumps({"id": key}).encode(), json.dumps(value).encode()


def capture() -> App:
    """The app that cleans them."""
    app = App("bench")
    app.entity("item", key="id", history=False, source="capture")(Item)
    app.capture("shop", kind="postgresql", tables={"public.items": Table(entity="item")})
    return app


def cleaned(config: Config, count: int, session: Callable[[], Any] | None = None) -> float:
    """Changes a second from the first read to the last commit."""
    cleaning = capture().cleaning(config, "shop")
    bulk = 0 if session is not None else 10**9
    cleaner = Cleaner(config, cleaning, session=session, bulk_records=bulk)
    try:
        if session is not None:
            session()
        cleaning.open()
        began = time.perf_counter()
        cleaner.catch_up(600.0)
        took = time.perf_counter() - began
    finally:
        cleaner.close()
    topic = TopicNames(config.log.prefix).changes("item")
    with Consumer(config) as consumer:
        assert sum(1 for _ in consumer.read_topic(topic)) == count
    return count / took


def consume_and_produce(config: Config, count: int) -> float:
    """The floor: the bare client reads the raw topic and writes the same bytes to another."""
    names = TopicNames(config.log.prefix)
    raw, out = names.raw("shop", "items"), names.changes("item")
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "floor",
            "enable.auto.commit": False,
        }
    )
    with Offsets(config) as offsets:
        places = [TopicPartition(raw, part, 0) for _, part in offsets.beginnings([raw])]
    producer = floors.connected(config, out)
    consumer.assign(places)
    began = time.perf_counter()
    seen = 0
    while seen < count:
        for message in consumer.consume(_FETCH, 0.05):
            if message.error() is None:
                producer.produce(out, message.value(), message.key())
                seen += 1
        producer.poll(0)
    producer.flush()
    took = time.perf_counter() - began
    consumer.close()
    return count / took


def latencies_ms(config: Config, messages: Sequence[tuple[bytes, bytes]]) -> list[float]:
    """From producing a raw row to reading its change, while rows come at an even rate."""
    names = TopicNames(config.log.prefix)
    raw = names.raw("shop", "items")
    sent: dict[int, float] = {}
    stop = threading.Event()
    cleaning = capture().cleaning(config, "shop")
    cleaner = Cleaner(config, cleaning, bulk_records=10**9)
    cleaning.open()
    thread = threading.Thread(target=cleaner.run, args=(stop,), daemon=True)
    thread.start()
    late: list[float] = []
    with Consumer(config) as consumer, Producer(config) as producer:
        changes = consumer.tail([names.changes("item")], idle_s=5.0)

        def read() -> None:
            for record in changes:
                key = record.key
                assert key is not None
                late.append((time.perf_counter() - sent[int(key)]) * 1000)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        began = time.perf_counter()
        for index, (key, value) in enumerate(messages):
            due = began + index / _RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            sent[index] = time.perf_counter()
            producer.send_raw(raw, key, value)
        producer.flush()
        reader.join(60.0)
    stop.set()
    thread.join(30.0)
    cleaner.close()
    return late


def _measured(
    session: Session, messages: Sequence[tuple[bytes, bytes]], of: Callable[[Config], float]
) -> float:
    config = _filled(session, messages)
    try:
        return of(config)
    finally:
        session.drop(config)


def _filled(session: Session, messages: Sequence[tuple[bytes, bytes]]) -> Config:
    config = session.fresh()
    raw = TopicNames(config.log.prefix).raw("shop", "items")
    with Topics(config) as topics:
        topics.ensure(["item"])
        topics.ensure_raw([raw], partitions=config.log.partitions, settings={})
    with Producer(config) as producer:
        for key, value in messages:
            producer.send_raw(raw, key, value)
    return config
