from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from everstate.config import Config
from everstate.errors import DeliveryFailed, RecordRefused, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import Topics
from kit.settings import altered

pytestmark = pytest.mark.settings(database=False)


def changed(config: Config, **fields: Any) -> Config:
    return altered(config, log=fields)


@pytest.fixture
def topic(config: Config) -> Iterator[str]:
    name = f"{config.log.prefix}-produced"
    with Topics(config) as topics:
        topics.create(name, 1, {})
        yield name
        topics.delete([name])


def values(config: Config, topic: str) -> list[bytes | None]:
    with Consumer(config) as consumer:
        return [record.value for record in consumer.read_topic(topic)]


def send_and_flush(producer: Producer, records: Iterable[OutRecord]) -> None:
    producer.send_many(records)
    producer.flush()


def test_a_record_too_large_is_refused_at_once_and_the_rest_goes_on(
    config: Config, topic: str
) -> None:
    with Producer(config) as producer:
        producer.send(OutRecord(topic, b"a", b"before"))
        with pytest.raises(RecordRefused, match=r"'big'.*2,162,688 bytes.*message_bytes_max"):
            producer.send(OutRecord(topic, b"big", b"x" * 3_145_728))
        producer.send(OutRecord(topic, b"b", b"after"))
    assert values(config, topic) == [b"before", b"after"]


def test_a_large_record_works_when_the_limits_are_raised(config: Config) -> None:
    large = os.urandom(4_194_304)
    raised = changed(config, message_bytes_max=3_000_000)
    with Topics(config) as topics, Topics(raised) as second:
        topics.ensure(["order"])
        second.ensure(["order"])
        topic = topics.names.changes("order")
        with Producer(raised) as producer:
            producer.send(OutRecord(topic, b"big", large))
        assert values(raised, topic) == [large]


def test_c4_nothing_overtakes_a_batch_that_the_broker_refuses(config: Config, topic: str) -> None:
    with Topics(config) as topics:
        topics.set_config(topic, {"max.message.bytes": "4000"})
    sent = [os.urandom(100) for _ in range(2_000)]
    sent[1_000] = os.urandom(8_000)
    small_batches = changed(config, options={"batch.num.messages": "10"})
    producer = Producer(small_batches)
    with pytest.raises(RecordRefused, match="larger than Kafka accepts here") as refused:
        send_and_flush(producer, (OutRecord(topic, b"%d" % n, v) for n, v in enumerate(sent)))
    assert refused.value.key is not None
    assert 990 <= int(refused.value.key) <= 1_009
    arrived = values(config, topic)
    assert arrived == sent[: len(arrived)]
    assert len(arrived) <= 1_000
    # The same producer serves a caller that resumes behind the record it gave up.
    rest = sent[len(arrived) : 1_000] + sent[1_001:]
    producer.send_many(OutRecord(topic, b"k", value) for value in rest)
    producer.close()
    assert values(config, topic) == sent[:1_000] + sent[1_001:]


def test_an_unknown_topic_is_a_failed_delivery_with_its_key(
    config: Config, topic_prefix: str
) -> None:
    quick = changed(config, options={"topic.metadata.propagation.max.ms": "100"})
    producer = Producer(quick)
    producer.send(OutRecord(f"{topic_prefix}-none", b"lost", b"v"))
    with pytest.raises(DeliveryFailed, match=r"'lost'.*[Uu]nknown topic"):
        producer.flush()
    producer.discard()
    with Topics(config) as topics:
        names = [topics.names.changes("none"), f"{topic_prefix}-none"]
        topics.delete(names)


def test_a_full_queue_makes_send_wait_and_loses_nothing(config: Config, topic: str) -> None:
    tiny = changed(config, queue_messages_max=10, linger_ms=0)
    sent = [b"%d" % number for number in range(3_000)]
    with Producer(tiny) as producer:
        for value in sent:
            producer.send(OutRecord(topic, b"k", value))
            assert len(producer) <= 20  # librdkafka counts its own events too
    assert values(config, topic) == sent


def test_a_broker_that_is_away_is_waited_for(stack: Any, config: Config, topic: str) -> None:
    broker = stack.servers.pid("kafka")
    tiny = changed(config, queue_messages_max=10, linger_ms=0)
    with Producer(config) as producer, Producer(tiny) as waiting:
        producer.send(OutRecord(topic, b"k", b"before"))
        producer.flush()
        waiting.send(OutRecord(topic, b"k", b"connected"))
        waiting.flush()
        os.kill(broker, signal.SIGSTOP)
        resume = threading.Timer(1.5, os.kill, (broker, signal.SIGCONT))
        try:
            producer.send(OutRecord(topic, b"k", b"during"))
            with pytest.raises(Unavailable, match="1 records within 1 s; they stay buffered"):
                producer.flush(timeout_s=1)
            began = time.monotonic()
            resume.start()
            waiting.send_many(OutRecord(topic, b"k", b"w") for _ in range(30))
            assert time.monotonic() - began > 1
            producer.flush()
        finally:
            resume.cancel()
            os.kill(broker, signal.SIGCONT)
    found = values(config, topic)
    assert sorted(found, key=str) == sorted(
        [b"before", b"connected", b"during", *[b"w"] * 30], key=str
    )


@pytest.mark.full
@pytest.mark.slow
def test_a_killed_broker_comes_back_and_nothing_is_lost_or_doubled(
    stack: Any, config: Config, topic: str
) -> None:
    sent = [b"%d" % number for number in range(20_000)]
    with Producer(config) as producer:
        for number, value in enumerate(sent):
            producer.send(OutRecord(topic, b"k", value))
            if number == 10_000:
                stack.servers.kill("kafka")
                restart = threading.Timer(2, stack.servers.restart, ("kafka",))
                restart.start()
        restart.join()
    assert values(config, topic) == sent
