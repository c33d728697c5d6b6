"""`everstate log size` on a real broker, with records of the last hours and readers that lag."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

import confluent_kafka
import psycopg
import pytest
from confluent_kafka import TopicPartition

from console_cases import fill
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.sources.cdc.balance import CaptureNote, encode_note, publisher_name
from kit.verbs import verbs
from running_stack import RunningStack

pytestmark = pytest.mark.settings(log={"partitions": 2, "changes_retention_hours": 10})

HOUR_S = 3_600
MODULE = """
from console_cases import hotel
from everstate.declarations.captures import Table

app = hotel()
app.capture("desk", kind="postgresql", tables={"public.guests": Table(entity="guest")})
"""


def write(config: Config, topic: str, hours: float, count: int, now_s: float) -> None:
    """Records of 300 bytes that cannot be compressed, evenly over the last hours."""
    with Producer(config) as producer:
        for number in range(count):
            at_s = now_s - hours * HOUR_S * (1 - number / count)
            part = number % 2 if ".raw." not in topic else 0
            producer.send(
                OutRecord(
                    topic, b"g", os.urandom(300), partition=part, timestamp_ms=int(at_s * 1000)
                )
            )
        producer.flush()


def commit(config: Config, group: str, topic: str, at: Mapping[int, int]) -> None:
    """What a member of a consumer group commits."""
    settings = {"bootstrap.servers": config.bootstrap_servers, "group.id": group}
    member = confluent_kafka.Consumer({**settings, "enable.auto.commit": False})
    places = [TopicPartition(topic, part, offset) for part, offset in at.items()]
    member.commit(offsets=places, asynchronous=False)
    member.close()


def publish_note(config: Config, name: str, note: bytes) -> None:
    with OncePublisher(config, name) as publisher:
        publisher.open()
        publisher.publish(1, [], note)


def file_bytes(stack: RunningStack, topic: str) -> int:
    """Bytes of the broker's files of records: the truth that it is asked for."""
    folder = stack.given.project.data_dir / "kafka" / "data"
    return sum(file.stat().st_size for file in folder.glob(f"{topic}-*/*.log"))


def test_rates_sizes_and_readers_are_those_that_were_planted(
    config: Config, stack: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = TopicNames(config.log.prefix)
    changes, raw = names.changes("guest"), names.raw("desk", "public.guests")
    now_s = time.time()
    with Topics(config) as topics:
        topics.ensure(["guest"])
        topics.ensure_raw([raw], partitions=1, settings={"retention.ms": str(8 * HOUR_S * 1000)})
    write(config, changes, 6, 3_600, now_s)
    write(config, raw, 4, 400, now_s)
    # Each has read up to a record of the given age.
    commit(config, f"{config.log.prefix}.commands", changes, {0: 300, 1: 300})  # 5 h
    commit(config, f"{config.log.prefix}.commands.process.welcome", changes, {0: 1_800, 1: 1_200})
    commit(config, "billing", changes, {0: 1_800})
    note = CaptureNote({"public.guests": {0: 100}}, {"public.guests": "unused"})
    publish_note(config, publisher_name("desk"), encode_note(note))  # 3 h

    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        fill(connection)
    run = verbs(config, monkeypatch, app="sized:app", code=MODULE)
    code, out, err = run("log", "size", "--json")
    assert code == 0, err
    assert err == ""
    shown = json.loads(out)
    found = {each["name"]: each for each in shown["topics"]}[changes]
    assert found["changes_per_s"] == pytest.approx(3_600 / (6 * HOUR_S), rel=0.03)
    assert found["holds_s"] == pytest.approx(6 * HOUR_S, rel=0.02)
    assert found["bytes"] == file_bytes(stack, changes) > 3_600 * 300
    assert found["day_bytes"] == pytest.approx(4 * found["bytes"], rel=0.03)
    assert (found["keeps_s"], found["partitions"]) == (10 * HOUR_S, 2)
    (disk,) = shown["disks"]
    assert disk["usable_bytes"] > 0
    assert disk["full_in_s"] is None
    readers = {each["reader"]: each for each in shown["readers"]}
    lags = {name: (each["topic"], round(each["share"], 1)) for name, each in readers.items()}
    assert lags == {
        f"group {config.log.prefix}.commands": (changes, 0.5),
        f"group {config.log.prefix}.commands.process.welcome": (changes, 0.2),
        "group billing": (changes, 0.0),
        "clean desk": (raw, 0.4),
        "guest_history": (changes, 0.6),
        "guest_latest": (changes, 0.6),
    }
    code, out, err = run("log", "size")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["guest.changes.g1"] == [row[0] for row in rows if "10.0" in row and "MB" in row]
    assert [row[1] for row in rows if "50%" in row] == [f"{config.log.prefix}.commands"]
    assert f"commands of {changes}: the log holds what it has not read for 5.0 h only" in out
    assert "free, never full at this rate" in out
