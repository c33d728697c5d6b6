"""handlers: an insert for each change of a full log, beside a bare Kafka consumer that inserts.

The log is judged before: the core's positions are written by hand, because how fast the pipeline
judges is measured elsewhere. Both commit up to 200 inserts at once, and read and parse each change.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import confluent_kafka
import orjson
import psycopg

from bench import data
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.app import App
from everstate.config import Config
from everstate.handling.worker import HandlerWorker
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.serving.connection import close_pools
from everstate.views.control import opened_control
from everstate.views.tables import CORE_FINGERPRINT, latest_of

COUNT = 100_000
_PART = 200
_INSERT = "INSERT INTO effect (key, version) VALUES (%s, %s)"


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    config = session.filled(count)
    judged(config)
    rows: list[Result] = []
    for concurrency in (1, 8):
        values, floors = session.alternate(
            partial(timed, config, count, bare),
            partial(timed, config, count, ours(concurrency, count)),
        )
        rows.append(
            result(
                "handlers",
                f"changes handled, one process, concurrency {concurrency}",
                "changes/s",
                values,
                floors=floors,
                floor_is="bare confluent-kafka consumer, the same insert, same transactions",
                reach=Reach(ratio_min=0.6) if concurrency == 1 else None,
            )
        )
    close_pools()
    return rows


def judged(config: Config) -> None:
    """Let the core be at the end of the log, with no exception."""
    topic = changes_topic(config)
    with opened_control(config) as control, Topics(config) as topics, Offsets(config) as offsets:
        control.install()
        control.check_topic_identity(data.ENTITY, topic, topics.identity(topic))
        for (_, partition), end in offsets.stable_ends([topic]).items():
            control.run(
                "INSERT INTO {position} (view, version, entity, generation, partition,"
                " next_offset, fingerprint) VALUES (%s, 1, %s, 1, %s, %s, %s)",
                [latest_of(data.ENTITY), data.ENTITY, partition, end, CORE_FINGERPRINT],
            )


Handle = Callable[[Config, Callable[[], bool]], None]
"""Handles a log until a function says that all effects are there."""


def timed(config: Config, count: int, handle: Handle) -> float:
    """Changes a second, from the first effect to the last one."""
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS effect")
        connection.execute("CREATE TABLE effect (key text, version bigint, at timestamptz)")
        connection.execute("ALTER TABLE effect ALTER at SET DEFAULT clock_timestamp()")

        def is_done() -> bool:
            row = connection.execute("SELECT count(*) FROM effect").fetchone()
            return row is not None and row[0] >= count

        handle(config, is_done)
        query = "SELECT count(*), extract(epoch FROM max(at) - min(at))::float8 FROM effect"
        row = connection.execute(query).fetchone()
    assert row is not None
    assert row[0] == count, f"{row[0]} effects of {count} changes"
    return count / float(row[1])


def ours(concurrency: int, count: int) -> Handle:
    """A handler of its own group. Its effects are counted in the table after its last call only."""

    def handle(config: Config, is_done: Callable[[], bool]) -> None:
        calls, all_called = itertools.count(1), threading.Event()

        def insert(change: Any, context: Any) -> None:
            context.connection.execute(_INSERT, [change.key, change.version])
            if next(calls) >= count:
                all_called.set()

        app = App("shop")
        app.entity(data.ENTITY, key="id")(data.Purchase)
        group = f"g{uuid.uuid4().hex[:10]}"
        app.handler(
            data.ENTITY, group=group, name="insert", start="beginning", concurrency=concurrency
        )(insert)
        (handler,) = app.handlers.values()
        stop = threading.Event()
        with HandlerWorker(config, app, handler) as worker:
            thread = threading.Thread(target=worker.run, args=[stop])
            thread.start()
            assert all_called.wait(600)
            until_done(is_done)
            stop.set()
            thread.join()

    return handle


def bare(config: Config, is_done: Callable[[], bool]) -> None:
    """What a careful user writes: parse, insert, commit the effects, then the offsets."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([changes_topic(config)])
    with psycopg.connect(config.store_dsn) as connection:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            messages = consumer.consume(_PART, 0.3)
            for message in messages:
                change = orjson.loads(message.value() or b"")
                connection.execute(_INSERT, [change["key"], change["version"]])
            connection.commit()
            if messages:
                consumer.commit(asynchronous=False)
            elif is_done():
                break
    consumer.close()


def until_done(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.2)
