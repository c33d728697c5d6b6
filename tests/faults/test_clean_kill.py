"""Killing the clean role while rows come, and its local state with it: nothing lost or doubled."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
from multiprocessing.process import BaseProcess

import pytest

from clean_cases import DSN, ITEM, Database, Made, broken_laws, capture_of
from clean_role import changelog
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.cleaning import Cleaning
from kit.waiting import until
from tiers import kills

KILLS = kills(2, full=20)
WRITES = 400
PATIENCE_S = 90.0


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


@pytest.mark.full
@pytest.mark.settings(log={"partitions": 3}, topics=["item"], database=False)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dsn", LOGS.values(), ids=LOGS.keys())
def test_c10_a_killed_clean_role_loses_and_doubles_nothing(config: Config, dsn: str | None) -> None:
    names, seed = TopicNames(config.log.prefix), random.Random(7)
    database = Database("debezium, default")
    raw = names.raw("shop", "item") if dsn is None else names.raw_prefix("shop")
    with Topics(config) as topics:
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
                until(lambda aim=aim: len(changelog(config, "item")) > aim)
                kill(process)
                cleaned = len(changelog(config, "item"))
                if turn % 2:
                    shutil.rmtree(config.project.data_dir / "clean")
                process = start(config, dsn)
    wanted = sum(map(len, database.history.values()))
    until(lambda: len(changelog(config, "item")) >= wanted)
    found = changelog(config, "item")
    kill(process)
    assert broken_laws(map(Made.of_message, found), database.history) == []
    assert len({change["id"] for change in found}) == len(found) == wanted
