"""SIGKILL of what keeps a derived topic, at any moment: each accepted change is there once.

The checker reads the log and the topic with a bare consumer and applies the patches one after the
other; it shares no code with what it checks. ``--kills`` sets how many kills, FAULT_SEED
repeats their moments.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import jsonpatch
import psycopg
import pytest
from confluent_kafka import TopicPartition
from derive_child import Crate, app
from pyspark.sql import SparkSession

from everstate.changes import ChangeCodec, Provenance
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.pipeline.keeping.keep import Keeper
from kit.changes import change_of
from kit.waiting import started, until
from tiers import kills

KILLS = kills(2, full=10)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
moments = random.Random(SEED)
WHO = Provenance(api_version="v1", service_name="faults", identifier="load")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
Read = list[tuple[int, bytes | None, bytes | None, dict[str, bytes]]]

pytestmark = [
    pytest.mark.settings(log={"partitions": 2}, archive={"trigger_s": 1}),
    pytest.mark.slow,
    pytest.mark.timeout(120 + 40 * KILLS),
]


class Load:
    """Sends changes; some twice, some before the version that they follow."""

    def __init__(self, config: Config) -> None:
        self._config, self._codec = config, ChangeCodec(app.entity_type("crate"))
        self._states: dict[str, tuple[int, Crate | None]] = {}
        self._random = random.Random(SEED + 1)

    def record(self) -> tuple[bytes, bytes, Any]:
        key = f"c{self._random.randrange(60)}"
        version, before = self._states.get(key, (0, None))
        after: Crate | None = Crate(
            crate_id=key,
            place=self._random.choice(("dock", "ship", None)),
            parts=[self._random.randrange(9) for _ in range(self._random.randrange(4))],
        )
        if before is not None and self._random.random() < 0.1:
            after = None
        self._states[key] = (version + 1, after)
        change = change_of("crate", key, version + 1, after, before, who=WHO, at=NOW)
        return self._codec.encode(change)

    def run(self, stop: threading.Event) -> None:
        topic = f"{self._config.log.prefix}.crate.changes.g1"
        with Producer(self._config) as producer:
            while not stop.is_set():
                records = [self.record() for _ in range(20)]
                records.insert(self._random.randrange(20), records[3])
                records.append(records.pop(self._random.randrange(20)))
                for key, value, headers in records:
                    producer.send_raw(topic, key, value, headers)
                producer.flush(30)
                stop.wait(0.02)


def read(config: Config, topic: str) -> Read:
    """Committed records of a topic, partition by partition."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "derive-checker",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    found: Read = []
    for partition in consumer.list_topics(topic, timeout=30).topics[topic].partitions:
        consumer.assign([TopicPartition(topic, partition, 0)])
        while True:
            message = consumer.poll(30)
            assert message is not None
            if message.error() is not None:
                break
            headers: Any = dict(message.headers() or [])
            found.append((partition, message.key(), message.value(), headers))
    consumer.close()
    return found


def problems(log: Read, topic: Read) -> list[str]:
    """What is lost, doubled, out of order, elsewhere or not right."""
    versions: dict[str, dict[int, Any]] = defaultdict(dict)
    home: dict[str, int] = {}
    for partition, _, value, _ in log:
        message = json.loads(value or b"")
        versions[message["key"]].setdefault(message["version"], message)
        home[message["key"]] = partition
    wanted = {
        key: [of_key[n] for n in range(1, next(n for n in range(1, 10**9) if n not in of_key))]
        for key, of_key in versions.items()
    }
    found: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    wrong = []
    for partition, name, value, headers in topic:
        crate = (name or b"").decode()
        found[crate].append((int(headers["everstate_version"]), json.loads(value or b"")))
        if home.get(crate) != partition:
            wrong.append(f"{crate} is in partition {partition}")
    for crate in wanted.keys() | found.keys():
        numbers = [version for version, _ in found[crate]]
        if numbers != [message["version"] for message in wanted.get(crate, [])]:
            wrong.append(f"{crate}: versions {numbers}, accepted {len(wanted.get(crate, []))}")
            continue
        state: Any = None
        for message, (version, patch) in zip(wanted[crate], found[crate], strict=True):
            state = jsonpatch.JsonPatch(patch).apply(state)
            if state != message["currentEntityState"]:
                wrong.append(f"{crate} version {version}: the patches come to {state}")
                break
    return wrong


def behind(config: Config) -> bool:
    """Whether the topic lacks what the core has judged, or the core what the log has."""
    query = (
        "SELECT count(DISTINCT next_offset) > 1 FROM everstate_views.position "
        "GROUP BY partition HAVING count(DISTINCT next_offset) > 1"
    )
    with psycopg.connect(config.views_dsn) as connection:
        return connection.execute(query).fetchone() is not None


@pytest.fixture
def kept(config: Config, spark: SparkSession) -> Iterator[threading.Event]:
    """The core, kept by a thread; set the event to end it."""
    stop = threading.Event()
    keeper = Keeper(spark, config, app)
    keeper.prepare()
    thread = threading.Thread(target=keeper.run, args=(stop,))
    thread.start()
    yield stop
    stop.set()
    thread.join(60)
    keeper.close()


@pytest.mark.full
def test_whatever_is_killed_each_accepted_change_is_in_the_topic_once(
    config: Config, kept: threading.Event
) -> None:
    print(f"FAULT_SEED={SEED}")
    ended = threading.Event()
    load_of_changes = threading.Thread(target=Load(config).run, args=(ended,))
    load_of_changes.start()
    start = partial(started, Path(__file__).with_name("derive_child.py"), config)
    topic = f"{config.log.prefix}.derived.crate_patches.v1"

    for _ in range(KILLS):
        child = start()
        time.sleep(1.0 + 4.0 * moments.random())
        assert child.poll() is None
        child.kill()
        child.wait()
    ended.set()
    load_of_changes.join(30)
    child = start()
    time.sleep(3)
    until(lambda: not behind(config), 90, 0.3)
    child.kill()
    child.wait()
    log = read(config, f"{config.log.prefix}.crate.changes.g1")
    found = read(config, topic)
    assert len(found) > 100
    assert problems(log, found)[:10] == []
    # The checker sees: one that is lost, one that is doubled, two in the wrong order.
    assert problems(log, found[1:])
    assert problems(log, [*found, found[-1]])
    key = found[0][1]
    first, second = [n for n, record in enumerate(found) if record[1] == key][:2]
    turned = list(found)
    turned[first], turned[second] = turned[second], turned[first]
    assert problems(log, turned)
