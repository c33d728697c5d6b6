"""A captured database and its changelog: equal row by row at the end, versions dense all along."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from capture_cases import (
    PostgresSource,
    Source,
    Writer,
    capture_of,
    eventually,
    make_tables,
    maria_source,
    raw_rows,
    table_rows,
    without_nulls,
)
from everstate.changes import EntityType
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import Cleaning
from everstate.sources.cdc.restarting import Restarter, keep_running
from everstate.sources.cdc.snapshots import snapshot

ENTITY_OF = {"customers": "customer", "orders": "order", "notes": "note"}


class Customer(BaseModel):
    """Who buys."""

    id: int
    name: str
    email: str | None = None
    phone: str | None = None


class Order(BaseModel):
    """What they bought."""

    id: int
    customer_id: int
    amount: str


class Note(BaseModel):
    """What was said."""

    id: int
    title: str | None = None
    body: str | None = None


ENTITIES = {
    name: EntityType(name, model, "id")
    for name, model in (("customer", Customer), ("order", Order), ("note", Note))
}


KINDS = ["postgresql", *(["mariadb"] if os.environ.get("EVERSTATE_FULL") else [])]
"""MariaDB's connector goes the same ways; with EVERSTATE_FULL=1 it is disturbed too."""


@pytest.fixture(params=KINDS)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    if request.param == "postgresql":
        yield PostgresSource(request.getfixturevalue("database"))
    else:
        yield from maria_source(request.getfixturevalue("mariadb"))


@pytest.fixture
def config(connect: Any, topic_prefix: str) -> Config:
    base: Config = connect.config
    log = base.log.model_copy(update={"prefix": topic_prefix, "partitions": 2})
    capture = base.capture.model_copy(update={"heartbeat_s": 1.0})
    return base.model_copy(update={"log": log, "capture": capture})


class CleanRole:
    """The clean role in threads, which can be ended and begun again as a process is."""

    def __init__(self, config: Config, capturing: Capturing) -> None:
        self._config, self._capturing = config, capturing
        self._restarters = [Restarter(capturing.capture.name, lambda: capturing)]
        self._failed: list[BaseException] = []
        self._begin()

    def _begin(self) -> None:
        self._stop = threading.Event()
        cleaning = Cleaning(self._config, self._capturing.capture, ENTITIES)
        self._cleaner = Cleaner(self._config, cleaning, bulk_records=10**9)
        self._thread = threading.Thread(target=self._run, name="clean")
        self._watching = threading.Thread(
            target=keep_running, args=(self._restarters, self._stop), name="restart-captures"
        )
        self._thread.start()
        self._watching.start()

    def _run(self) -> None:
        try:
            self._cleaner.run(self._stop)
        except BaseException as error:
            self._failed.append(error)
        finally:
            self._cleaner.close()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._watching.join()
        if self._failed:
            raise self._failed[0]

    def begin_again(self) -> None:
        self.end()
        self._begin()


def changelog(config: Config, entity: str) -> list[dict[str, Any]]:
    """All changes of an entity type, those of a key in the order of the log."""
    with Consumer(config) as consumer:
        records = consumer.read_topic(TopicNames(config.log.prefix).changes(entity))
        return [json.loads(record.value or b"") for record in records]


def broken_laws(changes: list[dict[str, Any]]) -> list[str]:
    """What breaks the laws: versions dense from 1, the chain of states, no id twice."""
    broken, versions, states = [], Counter[str](), dict[str, Any]()
    ids = Counter(change["id"] for change in changes)
    broken += [f"id {each} is there {count} times" for each, count in ids.items() if count > 1]
    for change in changes:
        key, where = change["key"], f"{change['entity']} {change['key']} v{change['version']}"
        versions[key] += 1
        if change["version"] != versions[key]:
            broken.append(f"{where}: expected version {versions[key]}")
        if change["originalEntityState"] != states.get(key):
            broken.append(f"{where}: its original is not the state before")
        states[key] = change["currentEntityState"]
    return broken


def latest(config: Config) -> dict[str, dict[str, dict[str, Any]]]:
    """Table → key → state, as the changelog says."""
    found = {}
    for table, entity in ENTITY_OF.items():
        states = {c["key"]: c["currentEntityState"] for c in changelog(config, entity)}
        found[table] = {key: state for key, state in states.items() if state is not None}
    return found


def test_the_checker_sees_a_hole_a_double_and_a_broken_chain() -> None:
    def change(version: int, original: object, current: object) -> dict[str, Any]:
        return {
            "id": f"{version}", "entity": "e", "key": "k", "version": version,
            "originalEntityState": original, "currentEntityState": current,
        }  # fmt: skip

    good = [change(1, None, {"a": 1}), change(2, {"a": 1}, {"a": 2}), change(3, {"a": 2}, None)]
    assert broken_laws(good) == []
    assert len(broken_laws([good[0], good[2]])) == 2
    assert len(broken_laws([*good, good[2]])) == 3
    assert broken_laws([good[0], change(2, {"a": 9}, None)])


@pytest.mark.timeout(600)
def test_the_changelog_equals_the_tables_whatever_is_killed(
    connect: Any, stack: Any, config: Config, source: Source
) -> None:
    make_tables(source)
    capturing = Capturing(config, capture_of(source), local=True)
    with Topics(config) as topics:
        topics.ensure(ENTITIES)
    with Writer(source, pause_s=0.03) as writer:
        writer.wait(40)
        capturing.add()
        role = CleanRole(config, capturing)
        try:
            break_things(connect, stack, source, writer, role, capturing)
            writer.stop()
            snapshot(config, capturing, table="customers", where="id <= 10")
            wanted = without_nulls(table_rows(source))
            eventually(lambda: without_nulls(latest(config)) == wanted, 120, every_s=2.0)
            assert without_nulls(latest(config)) == wanted
            assert without_nulls(raw_rows(config)) == wanted, "the raw topics say the same"
        finally:
            role.end()
            capturing.remove(drop=True, topics=True)
    assert writer.transactions > 200
    assert 0 <= len(wanted["customers"]) - writer.transactions <= writer.unanswered
    for entity in ENTITIES:
        changes = changelog(config, entity)
        assert broken_laws(changes) == []
        assert all(change["provenance"]["serviceName"] for change in changes)


def break_things(
    connect: Any, stack: Any, source: Source, writer: Writer, role: CleanRole, capturing: Capturing
) -> None:
    """Everything that the acceptance names, while the writer writes."""
    writer.wait(40)
    source.run("ALTER TABLE customers ADD COLUMN phone varchar(20)")
    source.run("UPDATE customers SET phone = 'p' WHERE id < 20")
    writer.wait(20)
    connect.servers.kill("connect")
    writer.wait(40)
    connect.servers.start()
    writer.wait(20)
    role.begin_again()
    writer.wait(20)
    servers = stack.servers
    name = "postgres" if source.kind == "postgresql" else "mariadb"
    if name == "mariadb":
        servers = type(servers)(stack.given, also=("mariadb",))
    servers.stop((name,))
    assert eventually(lambda: capturing.status().connected is None, 20)
    assert not capturing.status().well, "RUNNING does not mean connected"
    servers.start()
    writer.wait(40)
    assert eventually(lambda: capturing.status().well, 60), capturing.status()
