"""table: the present entities of a type read into the memory of a process, from `.state`."""

from __future__ import annotations

import gc
import time
from typing import Any

import confluent_kafka
import msgspec
import psutil
from confluent_kafka import TopicPartition

from bench import data
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.config import Config
from everstate.log.client import consumer_settings
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.serving.table import EntityTable

COUNT = 1_000_000


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    config = session.fresh()
    topic = TopicNames(config.log.prefix).state(data.ENTITY)
    with Topics(config) as topics:
        topics.ensure([data.ENTITY])
    with Producer(config) as producer:
        for number in range(count):
            key, value, headers = data.message(data.CHANGES_PER_KEY * number)
            producer.send_raw(topic, key, value, headers)
        producer.flush()
    values = _bytes_of_states(config, topic)
    beside = list[float]()

    def ours() -> float:
        before, began = _resident(), time.perf_counter()
        with EntityTable(config, "bench", data.PURCHASE) as table:
            took = time.perf_counter() - began
            assert len(table) == count
            beside.append((_resident() - before - values) / count)
        return count / took

    try:
        found, floors = session.alternate(lambda: _bare(config, topic, count), ours, warm=0)
    finally:
        session.drop(config)
    return [
        result(
            "table",
            f"{count:,} entities into memory",
            "entities/s",
            found,
            floors=floors,
            floor_is="confluent-kafka, msgspec into a dict of bytes",
            reach=Reach(ratio_min=0.6, value_min=50_000),
        ),
        result(
            "table", "memory beside the JSON of each", "bytes", beside, reach=Reach(value_max=1_000)
        ),
    ]


class _Change(msgspec.Struct, rename="camel", gc=False):
    key: str
    current_entity_state: msgspec.Raw


def _bare(config: Config, topic: str, count: int) -> float:
    """Entities a second, by a plain consumer that keeps the last state of each key."""
    decode, states = msgspec.json.Decoder(_Change).decode, dict[str, Any]()
    client = confluent_kafka.Consumer(consumer_settings(config, "bench-bare"))
    with Offsets(config) as offsets:
        places = offsets.beginnings([topic])
    began = time.perf_counter()
    client.assign([TopicPartition(*place, offset) for place, offset in places.items()])
    while len(states) < count:
        for message in client.consume(5_000, 0.2):
            if message.error() is None:
                change = decode(message.value() or b"")
                states[change.key] = bytes(change.current_entity_state)
    took = time.perf_counter() - began
    client.close()
    return count / took


def _bytes_of_states(config: Config, topic: str) -> int:
    decode = msgspec.json.Decoder(_Change).decode
    with Consumer(config) as consumer:
        records = consumer.read_topic(topic)
        return sum(len(decode(each.value or b"").current_entity_state) for each in records)


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
