"""ingest: `put_many` and a relay in a process of its own, until the log has every change."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import psycopg
from pydantic import BaseModel

from bench import data, realfiles
from bench.postgres_floors import copy_and_produce
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.changes import EntityType
from everstate.config import Config
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import Relay
from everstate.sources.stores.postgres import EntityStore
from everstate.testing.log_checker import read_topic

COUNT = 200_000
CHUNK = 5_000
_POLL_S = 0.02


def run(session: Session) -> list[Result]:
    count = max(20_000, session.size(COUNT))
    states = [each.current for each in data.changes(0, count) if each.current is not None]
    messages = [data.message(index) for index in range(count)]

    def ours() -> float:
        config = session.fresh()
        try:
            return ingest(config, data.PURCHASE, states)
        finally:
            session.drop(config)

    def floor() -> float:
        config = session.fresh()
        try:
            with Topics(config) as topics:
                topics.ensure([data.ENTITY])
            return copy_and_produce(config, changes_topic(config), messages)
        finally:
            session.drop(config)

    values, beneath = session.alternate(floor, ours, warm=0)
    results = [
        result(
            "ingest",
            "put_many + relay → log",
            "changes/s",
            values,
            floors=beneath,
            floor_is="COPY of the same rows + raw produce",
            reach=Reach(ratio_min=0.25, value_min=10_000),
        )
    ]
    results += [_real(session, each) for each in realfiles.found(session.data_dir)]
    return results


def _real(session: Session, file: realfiles.RealFile) -> Result:
    states = file.states(session.size(250_000))
    values = []
    for _ in range(session.repeat):
        config = session.fresh()
        values.append(ingest(config, file.entity_type, states))
        session.drop(config)
    return result("ingest", f"{file.path.name}, {len(states):,} changes", "changes/s", values)


def ingest(config: Config, entity_type: EntityType, states: Sequence[BaseModel]) -> float:
    """Changes a second from states in memory to the log, the relay running beside."""
    with Topics(config) as topics:
        topics.ensure([entity_type.name])
    with EntityStore(config, entity_type) as store:
        store.install()
        with relaying(config, entity_type):
            store.put_many(states[:1], provenance=data.PROVENANCE)
            _until(lambda: _drained(config))
            began = time.perf_counter()
            for start in range(1, len(states), CHUNK):
                store.put_many(states[start : start + CHUNK], provenance=data.PROVENANCE)
            _until(lambda: _drained(config))
            took = time.perf_counter() - began
    topic = TopicNames(config.log.prefix).changes(entity_type.name)
    found = len(read_topic(config, topic))
    assert found == len(states), f"{found:,} of {len(states):,} changes are in the log"
    return (len(states) - 1) / took


@contextmanager
def relaying(config: Config, entity_type: EntityType) -> Iterator[None]:
    """A relay in another process for the time of the block, as `everstate run` has it."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    process = spawn.Process(target=_relay, args=(config, entity_type, stop), daemon=True)
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(30)


def _relay(config: Config, entity_type: EntityType, stop: Event) -> None:
    ended = threading.Event()

    def wait() -> None:
        stop.wait()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    with Relay(config, [entity_type]) as relay:
        relay.run(ended)


def _drained(config: Config) -> bool:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        query = "SELECT NOT EXISTS (SELECT FROM everstate_store.outbox_pending)"
        found = connection.execute(query).fetchone()
    return found is not None and bool(found[0])


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(_POLL_S)
