from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer as KafkaProducer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from everstate.config import Config
from everstate.errors import DataLoss, LogError, Unavailable
from everstate.log.client import READ_UNCOMMITTED
from everstate.log.consumer import Consumer
from everstate.log.lag import Lag, ReaderPosition
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord, Record
from everstate.log.topics import Topics
from kit.waiting import until
from running_stack import RunningStack

pytestmark = pytest.mark.settings(database=False)

# From Kafka's own UtilsTest: the hash of the Java client.
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.fixture
def topic(config: Config) -> Iterator[str]:
    name = f"{config.log.prefix}-records"
    with Topics(config) as topics:
        topics.create(name, 12, {})
        yield name
        topics.delete([name])


def wait_for_stable_end(offsets: Offsets, topic: str, end: int) -> None:
    """A decided transaction is visible when its markers are written, some milliseconds later."""
    until(lambda: offsets.stable_ends([topic])[topic, 0] >= end, 10, 0.01)
    assert offsets.stable_ends([topic])[topic, 0] == end


def test_partitions_are_those_of_the_java_client(config: Config, topic: str) -> None:
    with Producer(config) as producer:
        producer.send_many(OutRecord(topic, key, b"") for key in MURMUR2)
    with Consumer(config) as consumer:
        found = {record.key: record.partition for record in consumer.read_topic(topic)}
    assert found == {key: (h & 0x7FFFFFFF) % 12 for key, h in MURMUR2.items()}


def test_records_are_read_byte_exact(config: Config, topic: str) -> None:
    headers = [("a", b"\xff\x00"), ("a", None), ("é", b""), ("z", "ü".encode())]
    sent = [
        OutRecord(topic, b"\x00\xff", b"\xfe value", headers, partition=3, timestamp_ms=1_000),
        OutRecord(topic, None, b"no key", (), partition=3, timestamp_ms=1_001),
        OutRecord(topic, b"tombstone", None, (("h", b"1"),), partition=3, timestamp_ms=1_002),
        OutRecord(topic, b"", b"", (), partition=3, timestamp_ms=1_003),
    ]
    with Producer(config) as producer:
        producer.send_many(sent)
    with Consumer(config) as consumer:
        found = list(consumer.read(topic, 3, 0, 4))
    assert [
        (r.topic, r.partition, r.offset, r.key, r.value, r.headers, r.timestamp_ms) for r in found
    ] == [
        (topic, 3, offset, r.key, r.value, tuple(r.headers), r.timestamp_ms)
        for offset, r in enumerate(sent)
    ]
    assert {record.timestamp_type for record in found} == {0}


def test_a_range_is_read_from_start_to_end_and_no_further(config: Config, topic: str) -> None:
    with Producer(config) as producer:
        producer.send_many(OutRecord(topic, b"k", b"%d" % i, partition=0) for i in range(100))
    with Consumer(config) as consumer:
        assert [r.offset for r in consumer.read(topic, 0, 10, 20)] == list(range(10, 20))
        assert [r.offset for r in consumer.read(topic, 0, 0, 1)] == [0]
        assert list(consumer.read(topic, 0, 5, 5)) == []
        assert list(consumer.read(topic, 0, 100, 100)) == []
        first = next(iter(consumer.read(topic, 0, 7, 100)))
        assert first.value == b"7"


def test_c5_an_aborted_transaction_is_invisible_to_every_reader(config: Config, topic: str) -> None:
    producer = Producer(config, transactional_id=f"{topic}-aborter")
    producer.init()
    producer.begin()
    producer.send_many(OutRecord(topic, b"k", b"aborted", partition=0) for _ in range(3))
    producer.flush()
    with Offsets(config) as offsets, Consumer(config, timeout_s=2) as consumer:
        assert offsets.stable_ends([topic])[topic, 0] == 0
        assert offsets.high_watermarks([topic])[topic, 0] == 3
        assert list(consumer.read_topic(topic)) == []
        producer.abort()
        wait_for_stable_end(offsets, topic, 4)
        # The tail holds nothing that is served; the read ends nevertheless.
        assert list(consumer.read_topic(topic)) == []
        assert list(consumer.read(topic, 0, 0, 4)) == []
        assert list(consumer.tail([topic], from_end=False, idle_s=0.5)) == []
        producer.begin()
        producer.send(OutRecord(topic, b"k", b"committed", partition=0))
        producer.commit()
        wait_for_stable_end(offsets, topic, 6)
        assert [r.offset for r in consumer.read_topic(topic)] == [4]
        with Lag(config) as measure:
            rows = measure.rows(
                [ReaderPosition("g", topic, 0, 0), ReaderPosition("g", topic, 0, 5)]
            )
        assert [(row.end, row.lag_changes) for row in rows] == [(6, 6), (6, 0)]
    with Consumer(config, isolation=READ_UNCOMMITTED) as audit:
        assert [r.value for r in audit.read_topic(topic)] == [b"aborted"] * 3 + [b"committed"]
        assert [r.value for r in audit.read_topic(topic, last=4)] == [b"aborted", b"committed"]
    producer.discard()


def test_reading_past_the_stable_end_waits_and_then_says_so(config: Config, topic: str) -> None:
    with Producer(config) as producer:
        producer.send(OutRecord(topic, b"k", b"v", partition=0))
    found: list[Record] = []
    with (
        Consumer(config, timeout_s=1) as consumer,
        pytest.raises(Unavailable, match="did not answer"),
    ):
        found.extend(consumer.read(topic, 0, 0, 2))


def test_c8_a_range_that_is_gone_is_data_loss(config: Config, topic: str) -> None:
    with Producer(config) as producer:
        producer.send_many(OutRecord(topic, b"k", b"v", partition=0) for _ in range(10))
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topic, 0, 6)]).values():
        future.result()
    with Consumer(config) as consumer:
        with pytest.raises(DataLoss, match=rf"{topic}\[0\]"):
            list(consumer.read(topic, 0, 0, 10))
        assert [r.offset for r in consumer.read(topic, 0, 6, 10)] == [6, 7, 8, 9]
    with Offsets(config) as offsets:
        assert offsets.beginnings([topic])[topic, 0] == 6


def test_a_tail_follows_every_partition_from_where_it_was_called(
    config: Config, topic: str
) -> None:
    with Producer(config) as producer, Consumer(config) as consumer:
        producer.send(OutRecord(topic, b"k", b"before", partition=1))
        producer.flush()
        tail = consumer.tail([topic], idle_s=1)
        producer.send_many(OutRecord(topic, b"k", b"after", partition=p) for p in range(12))
        producer.flush()
        assert sorted((r.partition, r.value) for r in tail) == [(p, b"after") for p in range(12)]
        whole = consumer.tail([topic], from_end=False, idle_s=1)
        assert len(list(whole)) == 13


def test_offsets_by_time(config: Config, topic: str) -> None:
    with Producer(config) as producer:
        producer.send_many(
            OutRecord(topic, b"k", b"v", partition=0, timestamp_ms=1_000 + i) for i in range(5)
        )
    with Offsets(config) as offsets:
        assert offsets.at_time([topic], 1_003)[topic, 0] == 3
        assert offsets.at_time([topic], 9_000)[topic, 0] == 5
        assert offsets.at_time([topic], 1_003)[topic, 1] == 0


def test_an_unknown_topic_has_no_offsets(config: Config) -> None:
    with Offsets(config) as offsets, pytest.raises(LogError, match="nowhere"):
        offsets.stable_ends([f"{config.log.prefix}-nowhere"])


def test_lag_is_told_in_changes_and_in_seconds(config: Config, topic: str) -> None:
    ago_ms = int(time.time() * 1000) - 10_000
    with Producer(config) as producer:
        producer.send_many(
            OutRecord(topic, b"k", b"v", partition=0, timestamp_ms=ago_ms + i * 1_000)
            for i in range(5)
        )
    with Lag(config) as measure:
        rows = measure.rows(
            [
                ReaderPosition("order", topic, 0, 0),
                ReaderPosition("order/totals", topic, 0, 3),
                ReaderPosition("order", topic, 1, 0),
                ReaderPosition("archive", topic, 0, 5),
            ]
        )
    assert [(r.reader, r.partition, r.position, r.end, r.lag_changes) for r in rows] == [
        ("order", 0, 0, 5, 5),
        ("order/totals", 0, 3, 5, 2),
        ("order", 1, 0, 0, 0),
        ("archive", 0, 5, 5, 0),
    ]
    assert rows[0].lag_seconds >= 10
    assert [row.lag_seconds for row in rows[2:]] == [0, 0]
    assert rows[0].lag_seconds - rows[1].lag_seconds == pytest.approx(3, abs=0.5)


def test_a_flipped_bit_on_the_disk_of_a_broker_is_an_error_of_the_reader(
    config: Config, stack: RunningStack, topic: str
) -> None:
    wanted = b"a value that the disk changes"
    producer = KafkaProducer(
        {"bootstrap.servers": config.bootstrap_servers, "compression.type": "none"}
    )
    producer.produce(topic, wanted, b"k", partition=0)
    assert producer.flush(30) == 0
    folder = stack.config.project.data_dir
    (segment,) = [file for file in folder.rglob(f"{topic}-0/*.log") if wanted in file.read_bytes()]
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().index(wanted) + 2)
        file.write(b"V")
    with Consumer(config) as consumer:
        with pytest.raises(LogError, match=rf"reading {topic}\[0\]: .*CRC"):
            list(consumer.read(topic, 0, 0, 1))
