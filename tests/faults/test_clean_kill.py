"""Killing the clean role while rows come, and its local state with it: nothing lost or doubled."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from clean_cases import ITEM, Database, broken_laws, capture_of
from everstate.changes import ChangeCodec
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.cleaning import Cleaning
from kit.settings import altered
from running_stack import RunningStack
from tiers import kills

KILLS = kills(2, full=20)
WRITES = 400
PATIENCE_S = 90.0


DSN = "postgresql://nobody@localhost/shop"
"""Of a database that nobody connects to: the capture is ours, with one raw log."""
LOGS = {"one raw log": DSN, **({"a topic per table": None} if KILLS > 2 else {})}


def clean(config: Config, dsn: str | None) -> None:
    """The role, in a process of its own."""
    cleaning = Cleaning(config, capture_of("debezium", dsn=dsn), {"item": ITEM})
    Cleaner(config, cleaning).run(threading.Event())


def start(config: Config, dsn: str | None) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=clean, args=(config, dsn), daemon=True
    )
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)


class Step:
    """A change that was read, as the checker wants it."""

    def __init__(self, change: Any) -> None:
        self.key, self.version, self.kind, self.step = change.key, change.version, change.kind, self
        self.current = None if change.current is None else json.dumps(change.current)
        self.original = None if change.original is None else json.dumps(change.original)


def changes(config: Config) -> list[Any]:
    codec = ChangeCodec(ITEM)
    topic = TopicNames(config.log.prefix).changes("item")
    with Consumer(config) as consumer:
        return [codec.decode(r.value) for r in consumer.read_topic(topic) if r.value]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dsn", LOGS.values(), ids=LOGS.keys())
def test_c10_a_killed_clean_role_loses_and_doubles_nothing(
    stack: RunningStack, topic_prefix: str, tmp_path: Path, dsn: str | None
) -> None:
    config = altered(
        stack.config, log={"prefix": topic_prefix, "partitions": 3}, project={"data_dir": tmp_path}
    )
    names, database, seed = (
        TopicNames(topic_prefix),
        Database("debezium, default"),
        random.Random(7),
    )
    raw = names.raw("shop", "item") if dsn is None else names.raw_prefix("shop")
    with Topics(config) as topics:
        topics.ensure(["item"])
        topics.ensure_raw([raw], partitions=3 if dsn is None else 1, settings={})
    process, cleaned = start(config, dsn), 0
    with Producer(config) as producer:
        for turn in range(KILLS + 1):
            sent = len(database.log)
            for number in range(WRITES):
                values = {"name": f"n{turn}-{number}"} | ({"note": "long"} if number < 9 else {})
                database.write(seed.randrange(9), None if seed.random() < 0.05 else values)
            for key, value in database.log[max(0, sent - 50) :]:
                producer.send_raw(raw, json.dumps(key).encode(), json.dumps(value).encode())
                if seed.random() < 0.05:
                    producer.flush()
            producer.flush()
            if turn < KILLS:
                aim = cleaned + WRITES / 4
                _until(lambda aim=aim: len(changes(config)) > aim)
                kill(process)
                cleaned = len(changes(config))
                if turn % 2:
                    shutil.rmtree(tmp_path / "clean")
                process = start(config, dsn)
    wanted = sum(map(len, database.history.values()))
    _until(lambda: len(changes(config)) >= wanted)
    found = changes(config)
    kill(process)
    steps: list[Any] = [Step(change) for change in found]
    assert broken_laws(steps, database.history) == []
    assert len({change.id for change in found}) == len(found) == wanted


def _until(done: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, "it did not come so far in time"
        time.sleep(0.2)
