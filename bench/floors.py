"""The floors: the least that the drivers take for the same work, written by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import confluent_kafka
import orjson

from everstate.config import Config

Message = tuple[bytes, bytes, list[tuple[str, bytes]]]


def producer(config: Config) -> confluent_kafka.Producer:
    """A bare producer with the settings that make ours safe."""
    return confluent_kafka.Producer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": config.log.linger_ms,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": config.log.queue_messages_max,
        }
    )


def connected(config: Config, topic: str) -> confluent_kafka.Producer:
    """A bare producer that has its id and its connections: what the first record waits for."""
    client = producer(config)
    client.produce(topic, b"first", b"first")
    client.flush()
    return client


def native(plain: dict[str, Any]) -> dict[str, Any]:
    """The dict with its id and times as Python values, as a program that makes changes has them."""
    return {
        **plain,
        "id": UUID(plain["id"]),
        "occurredAt": datetime.fromisoformat(plain["occurredAt"]),
        "recordedAt": datetime.fromisoformat(plain["recordedAt"]),
    }


def produce_native(config: Config, topic: str, dicts: Sequence[dict[str, Any]]) -> float:
    """Changes a second from dicts with UUID and datetime values, until all are acknowledged."""
    client = connected(config, topic)
    began = time.perf_counter()
    for index, each in enumerate(dicts):
        headers = [
            ("ce_specversion", b"1.0"),
            ("ce_id", str(each["id"]).encode()),
            ("ce_source", each["provenance"]["serviceName"].encode()),
            ("ce_type", f"{each['entity']}.{each['kind']}".encode()),
            ("ce_time", each["recordedAt"].isoformat().replace("+00:00", "Z").encode()),
            ("ce_subject", each["key"].encode()),
            ("content-type", b"application/json"),
        ]
        value = orjson.dumps(each, option=orjson.OPT_UTC_Z)
        _queue(client, topic, each["key"].encode(), value, headers, index)
    client.flush()
    return len(dicts) / (time.perf_counter() - began)


def produce_plain(config: Config, topic: str, dicts: Sequence[dict[str, Any]]) -> float:
    """Changes a second from dicts whose ids and times are text already."""
    client = connected(config, topic)
    began = time.perf_counter()
    for index, each in enumerate(dicts):
        headers = [
            ("ce_specversion", b"1.0"),
            ("ce_id", each["id"].encode()),
            ("ce_source", each["provenance"]["serviceName"].encode()),
            ("ce_type", f"{each['entity']}.{each['kind']}".encode()),
            ("ce_time", each["recordedAt"].encode()),
            ("ce_subject", each["key"].encode()),
            ("content-type", b"application/json"),
        ]
        _queue(client, topic, each["key"].encode(), orjson.dumps(each), headers, index)
    client.flush()
    return len(dicts) / (time.perf_counter() - began)


def produce_encoded(config: Config, topic: str, messages: Sequence[Message]) -> float:
    """Messages a second when key, value and headers are ready."""
    client = connected(config, topic)
    began = time.perf_counter()
    for index, (key, value, headers) in enumerate(messages):
        _queue(client, topic, key, value, headers, index)
    client.flush()
    return len(messages) / (time.perf_counter() - began)


def _queue(
    client: confluent_kafka.Producer,
    topic: str,
    key: bytes,
    value: bytes,
    headers: list[Any],
    index: int,
) -> None:
    while True:
        try:
            client.produce(topic, value, key, headers=headers)
            break
        except BufferError:
            client.poll(0.5)
    if index % 1000 == 0:
        client.poll(0)
