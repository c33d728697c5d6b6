"""A MariaDB service's outbox through Debezium's outbox router: the log equals what it committed."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest
from pydantic import BaseModel

from capture_cases import CONNECTED, MariaSource, eventually, maria_source, raw_count
from clean_role import CleanRole, PlainCleaner
from everstate.app import App
from everstate.changes import Provenance
from everstate.config import Config
from everstate.declarations.captures import Aggregate, Outbox
from everstate.log.consumer import Consumer
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.holding import read_held
from everstate.sources.cdc.preview import preview
from everstate.sources.cdc.rows import AGGREGATE
from everstate.sources.cdc.snapshots import snapshot

pytestmark = CONNECTED

KEYS = 7
SAID = {"apiVersion": "v1", "serviceName": "shop", "identifier": "web-3", "actor": "eva"}
TILL = Provenance(api_version="v1", service_name="till", identifier="till-2")
State = dict[str, Any] | None


class Order(BaseModel):
    """What is sold."""

    id: str
    total: int
    note: str | None = None


class Payment(BaseModel):
    """A fact."""

    id: str
    amount: int


def app_of(source: MariaSource) -> App:
    app = App("shop")
    app.entity("order", key="id", source="capture")(Order)
    app.entity("payment", key="id", source="capture")(Payment)
    aggregates = {
        "Order": Aggregate(entity="order"),
        "Payment": Aggregate(entity="payment", facts=True, provenance=TILL),
    }
    outbox = Outbox(table=f"{source.schema}.outbox", aggregates=aggregates)
    app.capture("shop", kind="mariadb", dsn=source.dsn, outbox=outbox)
    return app


@dataclass
class Service:
    """Writes orders and their outbox rows in one transaction each; every fifth is rolled back."""

    source: MariaSource
    committed: dict[str, list[tuple[State, State]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Key → states before and after of each committed version."""
    payments: list[str] = field(default_factory=list)
    transactions: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _failed: list[BaseException] = field(default_factory=list)
    _chance: random.Random = field(default_factory=lambda: random.Random(5))

    def make_tables(self) -> None:
        self.source.run(
            "CREATE TABLE orders (id varchar(20) PRIMARY KEY, version int NOT NULL, state json)",
            "CREATE TABLE outbox (id char(36) PRIMARY KEY, aggregatetype varchar(60) NOT NULL, "
            "aggregateid varchar(60) NOT NULL, type varchar(60) NOT NULL, payload json NOT NULL)",
        )

    def connect(self) -> Any:
        parts = urlsplit(self.source.dsn)
        return pymysql.connect(
            host=parts.hostname or "",
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=self.source.schema,
            charset="utf8mb4",
        )

    def write(self, connection: Any, number: int) -> None:
        key, fact = f"o-{self._chance.randrange(KEYS)}", None
        with connection.cursor() as cursor:
            cursor.execute("INSERT IGNORE INTO orders VALUES (%s, 0, NULL)", (key,))
            cursor.execute("SELECT version, state FROM orders WHERE id = %s FOR UPDATE", (key,))
            version, state = cursor.fetchone()
            before = None if state is None else json.loads(state)
            after: State = {"id": key, "total": number, "note": f"čaj {number}"}
            if before is not None and number % 7 == 0:
                after = None
            cursor.execute(
                "UPDATE orders SET version = version + 1, state = %s WHERE id = %s",
                (None if after is None else json.dumps(after), key),
            )
            message = {
                "version": version + 1,
                "originalEntityState": before,
                "currentEntityState": after,
                "provenance": SAID,
            }
            if before is not None or after is not None:
                self._emit(cursor, "Order", key, "OrderWritten", message)
            if number % 3 == 0:
                fact = self._emit(cursor, "Payment", key, "Paid", {"id": key, "amount": number})
        if number % 5 == 0:
            connection.rollback()
            return
        connection.commit()
        self.transactions += 1
        self.committed[key].append((before, after))
        if fact is not None:
            self.payments.append(fact)

    def _emit(self, cursor: Any, kind: str, key: str, event: str, payload: Any) -> str:
        row_id = str(uuid.uuid4())
        cursor.execute(
            "INSERT INTO outbox VALUES (%s, %s, %s, %s, %s)",
            (row_id, kind, key, event, json.dumps(payload)),
        )
        return row_id

    def run(self, pause_s: float) -> None:
        connection, number = self.connect(), 1_000
        try:
            while not self._stop.wait(pause_s):
                number += 1
                self.write(connection, number)
        except BaseException as error:
            self._failed.append(error)
        finally:
            connection.close()

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, args=(0.03,), name="service")
        self._thread.start()

    def wait(self, more: int) -> None:
        goal = self.transactions + more
        assert eventually(lambda: self.transactions >= goal or bool(self._failed), 60)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed:
            raise self._failed[0]


def cleaner(config: Config, app: App) -> Cleaner:
    return Cleaner(config, cleaning_of(config, app, "shop"))


@pytest.fixture
def source(mariadb: str) -> Iterator[MariaSource]:
    yield from maria_source(mariadb)


def messages(config: Config, topic: str) -> list[dict[str, Any]]:
    with Consumer(config) as consumer:
        return [json.loads(record.value or b"null") for record in consumer.read_topic(topic)]


def by_key(changes: list[dict[str, Any]]) -> dict[str, list[tuple[State, State]]]:
    """Key → states of its changes in the order of the log; their versions are dense from 1."""
    found: dict[str, list[tuple[State, State]]] = defaultdict(list)
    for each in changes:
        states = found[each["key"]]
        states.append((each["originalEntityState"], each["currentEntityState"]))
        assert each["version"] == len(states), each
    return found


def send(config: Config, value: Any, row_id: str, key: bytes = b"o-1") -> None:
    """One routed record, as a connector of somebody else's writes it."""
    with Producer(config) as producer:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        topic = TopicNames(config.log.prefix).raw_prefix("shop")
        headers = [("id", row_id.encode()), ("eventType", b"W"), (AGGREGATE, b"Order")]
        producer.send_raw(topic, key, body, headers)


def change_of(version: int, before: int | None, after: int | None) -> dict[str, Any]:
    def state(total: int | None) -> State:
        return None if total is None else {"id": "o-1", "total": total}

    return {
        "version": version,
        "originalEntityState": state(before),
        "currentEntityState": state(after),
        "provenance": SAID,
    }


def test_what_cannot_go_on_is_told_and_goes_on_when_it_is_mended(
    stack: Any, spark: Any, topic_prefix: str, tmp_path: Path
) -> None:
    base: Config = stack.config
    log = base.log.model_copy(update={"prefix": topic_prefix, "partitions": 2})
    project = base.project.model_copy(update={"data_dir": tmp_path})
    config = base.model_copy(update={"log": log, "project": project})
    names, app = TopicNames(topic_prefix), app_of(MariaSource("mariadb://u:p@h/shop"))

    def catch_up() -> None:
        cleaned = cleaning_of(config, app, next(iter(app.captures)))
        with closing(Cleaner(config, cleaned, session=lambda: spark)) as cleaner:
            cleaner.catch_up()

    catch_up()
    before_ms = int(time.time() * 1000)
    send(config, change_of(1, None, 5), "1")
    send(config, b"{", "2")
    send(config, change_of(3, 6, 7), "3")
    catch_up()
    (first,) = messages(config, names.changes("order"))
    recorded_ms = datetime.fromisoformat(first["recordedAt"]).timestamp() * 1000
    assert before_ms <= recorded_ms <= time.time() * 1000
    with Consumer(config) as consumer:
        (dead,) = consumer.read_topic(names.dead("order"))
    assert (dead.key, dead.value) == (b"o-1", b"{")
    told = {name: (value or b"").decode() for name, value in dead.headers}
    assert told["everstate_topic"] == names.raw_prefix("shop")
    assert told["everstate_reason"]
    (held,) = read_held(config, "shop")
    assert (held.key, held.reason, len(held.rows)) == ("o-1", "version 2 is awaited", 1)
    # A new machine: what the log has is enough.
    shutil.rmtree(tmp_path / "clean")
    send(config, change_of(1, None, 5), "1")
    send(config, change_of(2, 5, 6), "2")
    catch_up()
    found = messages(config, names.changes("order"))
    assert [each["version"] for each in found] == [1, 2, 3]
    assert messages(config, names.state("order"))[-1] == found[-1]
    assert read_held(config, "shop") == []
    with Topics(config) as topics:
        topics.delete([each for each in topics.existing() if each.startswith(f"{topic_prefix}.")])


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_log_equals_what_a_service_committed_whatever_is_killed(
    connect: Any, config: Config, source: MariaSource
) -> None:
    app, service = app_of(source), Service(source)
    capture = app.capture_of("shop")
    capturing = Capturing(config, capture, local=True)
    names = TopicNames(config.log.prefix)
    service.make_tables()
    service.start()
    service.wait(30)
    role = None
    try:
        # The rows that are there are read in the order of their ids, which is none.
        capturing.add()
        role = CleanRole(lambda: cleaner(config, app))
        service.wait(30)
        assert eventually(lambda: raw_count(config, "Order") > 40)
        connect.servers.kill("connect")
        service.wait(30)
        connect.servers.start()
        service.wait(30)
        assert eventually(lambda: capturing.status().well, 60)
        assert snapshot(config, capturing).rows > 60, "all rows are read once more"
        role.end()
        service.wait(30)
        # The service's own housekeeping is no loss.
        source.run("DELETE FROM outbox ORDER BY id LIMIT 20")
        source.run("TRUNCATE TABLE outbox")
        role.begin()
        service.wait(30)
        service.stop()
        wanted = sum(len(states) for states in service.committed.values())
        changes = names.changes("order")
        eventually(lambda: len(messages(config, changes)) >= wanted, 90, every_s=1.0)
        status = capturing.status()
        previewed = preview(config, capture, app.entities, 2)
    finally:
        service.stop()
        if role is not None:
            role.end()
        capturing.remove(drop=True)
    assert status.well, status
    assert raw_count(config, "Order") > wanted, "what was read again is in the raw log twice"
    found = messages(config, names.changes("order"))
    assert by_key(found) == service.committed
    assert len({each["id"] for each in found}) == len(found) == wanted
    newest = {each["key"]: each for each in found}
    assert {each["key"]: each for each in messages(config, names.state("order"))} == newest
    assert all(each["provenance"]["actor"] == "eva" for each in found)
    assert {each["event"]["type"] for each in found} == {"OrderWritten"}
    facts = messages(config, names.changes("payment"))
    assert sorted(each["key"] for each in facts) == sorted(service.payments)
    assert {each["kind"] for each in facts} == {"event"}
    assert messages(config, names.dead("order")) == messages(config, names.dead("payment")) == []
    assert read_held(config, "shop") == []
    assert {one.outcome for one in previewed} <= {"whole", "deleted"}
    assert len(previewed) == 4


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_a_prepared_transaction_emitted_is_published_when_it_is_committed_and_never_else(
    config: Config, source: MariaSource
) -> None:
    app = app_of(source)
    capturing = Capturing(config, app.capture_of("shop"), local=True)
    names = TopicNames(config.log.prefix)
    Service(source).make_tables()

    def emit(version: int, before: int | None, after: int) -> tuple[str, tuple[str, ...]]:
        payload = json.dumps(change_of(version, before, after))
        insert = "INSERT INTO outbox VALUES (%s, 'Order', 'o-1', 'OrderWritten', %s)"
        return insert, (str(uuid.uuid4()), payload)

    def totals() -> list[int]:
        return [
            each["currentEntityState"]["total"] for each in messages(config, names.changes("order"))
        ]

    def prepare(row: tuple[str, tuple[str, ...]]) -> None:
        with source.session() as cursor:
            cursor.execute("XA START 'x'")
            cursor.execute(*row)
            cursor.execute("XA END 'x'")
            cursor.execute("XA PREPARE 'x'")

    role = None
    try:
        capturing.add()
        role = CleanRole(lambda: PlainCleaner(config, cleaning_of(config, app, "shop")), capturing)
        source.run(emit(1, None, 5))
        assert eventually(lambda: totals() == [5], 60)
        prepare(emit(2, 5, 6))
        assert eventually(lambda: len(read_held(config, "shop")) == 1, 30)
        source.run("SET autocommit = 1", "XA ROLLBACK 'x'", emit(2, 5, 7))
        assert eventually(lambda: totals() == [5, 7], 60)
        assert eventually(lambda: read_held(config, "shop") == [], 30)
        prepare(emit(3, 7, 8))
        assert eventually(lambda: len(read_held(config, "shop")) == 1, 30)
        role.end()
        role.begin()
        time.sleep(12)
        assert totals() == [5, 7], "it is not committed"
        source.run("SET autocommit = 1", "XA COMMIT 'x'", emit(4, 8, 9))
        assert eventually(lambda: totals() == [5, 7, 8, 9], 60)
        assert eventually(lambda: capturing.status().well, 30), capturing.status()
        assert (read_held(config, "shop"), messages(config, names.dead("order"))) == ([], [])
    finally:
        if role is not None:
            role.end()
        capturing.remove(drop=True, topics=True)
