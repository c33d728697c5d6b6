"""The least that cleaning could cost: raw records copied to `.changes` and `.state`, no more.

``python -m bench.copying SERVERS RAW CHANGES STATE`` runs until it is stopped.
"""

from __future__ import annotations

import sys

import confluent_kafka
from confluent_kafka import TopicPartition

_BATCH = 10_000
_HEADERS: list[tuple[str, str | bytes | None]] = [
    ("ce_specversion", b"1.0"),
    ("ce_id", b"0199c8a2-0000-7000-8000-000000000000"),
    ("ce_source", b"depot"),
    ("ce_type", b"parcel.created"),
    ("ce_time", b"2026-01-01T00:00:00.000000Z"),
    ("ce_subject", b"12345"),
    ("content-type", b"application/json"),
]


def copy(servers: str, raw: str, changes: str, state: str) -> None:
    """Copy in transactions of some thousand records, with as many headers as a change has."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": raw, "enable.auto.commit": False}
        | {"fetch.wait.max.ms": 10}
    )
    count = len(consumer.list_topics(raw, 10).topics[raw].partitions)
    consumer.assign([TopicPartition(raw, partition, 0) for partition in range(count)])
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": servers, "transactional.id": raw, "compression.type": "lz4"}
        | {"linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.messages": 200_000}
        | {"partitioner": "murmur2_random"}
    )
    producer.init_transactions()
    while True:
        messages = [m for m in consumer.consume(_BATCH, 0.05) if m.error() is None]
        if not messages:
            continue
        producer.begin_transaction()
        for message in messages:
            if any(header[0] == "kind" for header in message.headers() or ()):
                continue  # the end of a transaction, a heartbeat
            value, key = message.value(), message.key()
            producer.produce(changes, value, key, headers=_HEADERS)
            producer.produce(state, value, key, headers=_HEADERS)
        producer.poll(0)
        producer.commit_transaction()


if __name__ == "__main__":
    copy(*sys.argv[1:5])
