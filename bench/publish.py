"""publish: Change objects, encoded and acknowledged by Kafka."""

from __future__ import annotations

import gc
import time

from bench import data, floors
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.changes import ChangeCodec
from everstate.log.producer import Producer
from everstate.log.topics import Topics

COUNT = 250_000
COUNT_MIN = 50_000


def run(session: Session) -> list[Result]:
    count = max(COUNT_MIN, session.size(COUNT))
    config = session.fresh()
    with Topics(config) as topics:
        topics.ensure([data.ENTITY])
    topic = changes_topic(config)
    changes = list(data.changes(0, count))
    plain = [data.plain(index) for index in range(count)]
    native = [floors.native(each) for each in plain]
    encoded = [data.message(index) for index in range(count)]
    # Objects of a running service are old: the collector does not look at them again and again.
    gc.freeze()

    def ours() -> float:
        codec = ChangeCodec(data.PURCHASE)
        with Producer(config) as producer:
            producer.send_raw(topic, b"first", b"first")
            producer.flush()
            began = time.perf_counter()
            for change in changes:
                key, value, headers = codec.encode(change)
                producer.send_raw(topic, key, value, headers)
            producer.flush()
            return count / (time.perf_counter() - began)

    try:
        values, beneath = session.alternate(
            lambda: floors.produce_native(config, topic, native), ours
        )
        against_text, ready = session.alternate(
            lambda: floors.produce_plain(config, topic, plain), ours, warm=0
        )
        bytes_only = [floors.produce_encoded(config, topic, encoded) for _ in range(session.repeat)]
    finally:
        gc.unfreeze()
        session.drop(config)
    return [
        result(
            "publish",
            "Change objects → acked",
            "changes/s",
            values,
            floors=beneath,
            floor_is="dicts of the same ids and times, orjson + confluent-kafka",
        ),
        result(
            "publish",
            "the same, ids and times of the dicts already text",
            "changes/s",
            against_text,
            floors=ready,
            floor_is="plain dicts of text, orjson + confluent-kafka",
            reach=Reach(ratio_min=0.8),
        ),
        result("publish", "confluent-kafka alone, bytes ready", "changes/s", bytes_only),
    ]
