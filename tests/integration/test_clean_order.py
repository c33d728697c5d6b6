"""Three tables of one shop in one raw log: transactions, parents, provenance, other offers."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from pyspark.sql import SparkSession

from clean_cases import DSN
from everstate.app import App
from everstate.changes import Change, ChangeCodec, DomainEvent
from everstate.config import Config
from everstate.declarations.captures import ProvenanceFrom, Table
from everstate.errors import LogIdentityChanged, TopicResized
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.pipeline.wire import DebeziumForm
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.preview import preview
from everstate.sources.cdc.rows import RawMessage
from everstate.sources.cdc.shapes import READERS
from everstate.testing.log_checker import read_topic
from kit.settings import cleaning
from log_cases import grow

pytestmark = cleaning(log={"partitions": 2})


def order_event(before: Any, after: Any) -> DomainEvent | None:
    if before and after and after["status"] == "paid" != before["status"]:
        return DomainEvent(type="OrderPaid", data={"order_id": after["id"]})
    return None


def shop(**options: Any) -> App:
    app = App("shop")

    @app.entity("customer", key="id", source="capture")
    class Customer(BaseModel):
        id: int
        name: str

    @app.entity("orders", key="id", source="capture")
    class Order(BaseModel):
        id: int
        customer_id: int
        status: str

    @app.entity("line", key="id", source="capture")
    class Line(BaseModel):
        id: int
        order_id: int
        amount: int

    @app.entity("order_event", key="id", source="capture")
    class OrderEvent(BaseModel):
        id: str
        order_id: int

    orders = Table(
        entity="orders",
        parents={"customer_id": "customer"},
        provenance=ProvenanceFrom(message_prefix="everstate"),
        event=order_event,
        events="order_event",
        partials=True,
    )
    app.capture(
        "shop",
        kind="postgresql",
        dsn=DSN,
        tables={
            "public.lines": Table(entity="line", parents={"order_id": "orders"}, truncate="delete"),
            "public.orders": orders,
            "public.customers": Table(entity="customer"),
        },
        **options,
    )
    return app


class Rig:
    """Writes transactions into the raw log as Debezium does."""

    def __init__(self, config: Config, app: App, spark: SparkSession) -> None:
        self.config, self.app, self.spark = config, app, spark
        self.names = TopicNames(config.log.prefix)
        self.lsn = self.commit = 1000
        self.now_s = 1_000_000.0
        self.open()

    def open(self, **options: Any) -> None:
        cleaning = cleaning_of(self.config, self.app, "shop")
        cleaning._clock = lambda: self.now_s
        self.cleaner = Cleaner(self.config, cleaning, session=lambda: self.spark, **options)
        self.cleaner.open()

    def row(self, table: str, tx: int, order: int, after: Any, before: Any = None) -> Any:
        self.lsn += 8
        op = "c" if before is None else "u"
        block = {"id": f"{tx}:{self.lsn}", "total_order": order, "data_collection_order": 1}
        source = {
            "connector": "postgresql", "schema": "public", "table": table, "lsn": self.lsn,
            "sequence": f'["{self.commit}","{self.lsn}"]', "txId": tx, "snapshot": "false",
            "ts_us": self.commit * 1_000,
        }  # fmt: skip
        body = {"op": op, "before": None, "after": after, "source": source, "transaction": block}
        return None, {"id": after["id"]}, body

    def truncation(self, table: str, tx: int, order: int) -> Any:
        kind, _, body = self.row(table, tx, order, {"id": 0})
        return kind, {}, {**body, "op": "t", "after": None}

    def end(self, tx: int, **counts: int) -> Any:
        self.lsn += 8
        self.commit = self.lsn
        listed = [{"data_collection": f"public.{n}", "event_count": c} for n, c in counts.items()]
        body = {
            "status": "END", "id": f"{tx}:{self.lsn}", "event_count": sum(counts.values()),
            "data_collections": listed,
        }  # fmt: skip
        return "transaction", {"id": str(tx)}, body

    def message(self, tx: int, **fields: str) -> Any:
        content = b64encode(json.dumps(fields).encode()).decode()
        self.lsn += 8
        source = {"txId": tx, "lsn": self.lsn, "sequence": f'["{self.commit}","{self.lsn}"]'}
        body = {
            "op": "m", "source": source, "message": {"prefix": "everstate", "content": content},
        }  # fmt: skip
        return "message", {"prefix": "everstate"}, body

    def send(self, *messages: Any) -> None:
        with Producer(self.config) as producer:
            topic = self.names.raw_prefix("shop")
            for kind, key, body in messages:
                headers = [] if kind is None else [("kind", kind.encode())]
                value = json.dumps(body).encode()
                producer.send_raw(topic, json.dumps(key).encode(), value, headers)

    def clean(self) -> None:
        self.cleaner.catch_up()

    def changes(self, entity: str) -> list[Change[dict[str, Any]]]:
        codec = ChangeCodec(self.app.entity_type(entity))
        return [codec.decode(r.value) for r in self.records(self.names.changes(entity))]

    def records(self, topic: str) -> list[Any]:
        return read_topic(self.config, topic)


@pytest.fixture
def rig(config: Config, spark: SparkSession) -> Iterator[Rig]:
    rig = Rig(config, shop(parents_first=True, parent_wait_s=20.0), spark)
    yield rig
    rig.cleaner.close()


def test_changes_carry_their_transaction_and_what_was_told_of_their_writer(rig: Rig) -> None:
    customer = rig.row("customers", 7, 1, {"id": 1, "name": "Ann"})
    order = rig.row("orders", 7, 2, {"id": 10, "customer_id": 1, "status": "open"})
    said = rig.message(7, actor="ann", serviceName="webshop")
    line = rig.row("lines", 7, 3, {"id": 100, "order_id": 10, "amount": 5})
    rig.send(customer, order, said)
    rig.clean()
    assert rig.changes("customer") == []
    rig.send(line, rig.end(7, customers=1, orders=1, lines=1))
    rig.clean()
    blocks = []
    for entity in ("customer", "orders", "line"):
        (change,) = rig.changes(entity)
        assert change.transaction is not None
        blocks.append((change.transaction.id, change.transaction.index, change.transaction.count))
        assert change.provenance.service_name == "webshop"
        assert change.provenance.identifier == "pg:7"
        assert change.provenance.correlation_id is None
    assert blocks == [("pg:7", 1, 3), ("pg:7", 2, 3), ("pg:7", 3, 3)]


def test_children_wait_for_parents_that_come_later_and_not_for_ever(rig: Rig) -> None:
    order = rig.row("orders", 8, 1, {"id": 20, "customer_id": 2, "status": "open"})
    orphan = rig.row("lines", 8, 2, {"id": 200, "order_id": 77, "amount": 1})
    line = rig.row("lines", 8, 3, {"id": 201, "order_id": 20, "amount": 2})
    rig.send(order, orphan, line, rig.end(8, orders=1, lines=2))
    rig.clean()
    assert (rig.changes("orders"), rig.changes("line")) == ([], [])
    late = rig.row("customers", 9, 1, {"id": 2, "name": "Bob"})
    rig.send(late, rig.end(9, customers=1))
    rig.clean()
    (waited,) = rig.changes("orders")
    assert waited.transaction is not None
    assert (waited.key, waited.transaction.index, waited.transaction.count) == ("20", 1, 3)
    assert [change.key for change in rig.changes("line")] == ["201"]
    rig.now_s += 21.0
    rig.clean()
    assert sorted(change.key for change in rig.changes("line")) == ["200", "201"]


def test_a_transaction_without_end_goes_on_after_a_while_without_a_block(rig: Rig) -> None:
    rig.send(rig.row("customers", 5, 1, {"id": 3, "name": "Cy"}))
    rig.clean()
    assert rig.changes("customer") == []
    rig.now_s += 301.0
    rig.clean()
    (change,) = rig.changes("customer")
    assert change.transaction is None
    assert change.provenance.correlation_id == "pg:5"


def blocks_of(changes: list[Any]) -> dict[str, list[tuple[int, int]]]:
    """Transaction → index and count of each of its changes."""
    found: dict[str, list[tuple[int, int]]] = {}
    for change in changes:
        block = change.transaction
        assert block is not None
        found.setdefault(block.id, []).append((block.index, block.count))
    return {name: sorted(told) for name, told in found.items()}


def test_a_backlog_keeps_blocks_and_provenance_whatever_is_killed(rig: Rig) -> None:
    transactions, lines, log = 60, 4, []
    for tx in range(1, transactions + 1):
        log.append(rig.row("customers", tx, 1, {"id": tx, "name": f"c{tx}"}))
        log.append(rig.message(tx, serviceName=f"s{tx}"))
        order = {"id": tx, "customer_id": tx, "status": "open"}
        log.append(rig.row("orders", tx, 2, order))
        for number in range(lines):
            line = {"id": tx * lines + number, "order_id": tx, "amount": number}
            log.append(rig.row("lines", tx, 3 + number, line))
        log.append(rig.end(tx, customers=1, orders=1, lines=lines))
    # The connector was killed twice: what it had not noted comes again, from within transactions.
    rig.send(*log[:200], *log[150:333], *log[321:])
    for _ in range(3):
        rig.cleaner.close()
        rig.open(step_records=50)
        for _ in range(2):
            rig.cleaner.step(1.0)
    rig.clean()
    found = [change for entity in ("customer", "orders", "line") for change in rig.changes(entity)]
    assert len(found) == len({change.id for change in found}) == transactions * (2 + lines)
    assert all(change.version == 1 for change in found)
    wanted = [(index, 2 + lines) for index in range(1, 3 + lines)]
    assert blocks_of(found) == {f"pg:{tx}": wanted for tx in range(1, transactions + 1)}
    for change in found:
        assert change.transaction is not None
        assert change.provenance.service_name == f"s{change.transaction.id.partition(':')[2]}"


def test_a_large_transaction_goes_out_in_cuts_with_its_block_whole_over_restarts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.cleaning._CUT_ROWS", 60)
    log = [rig.row("customers", 7, 1, {"id": 0, "name": "before"}), rig.end(7, customers=1)]
    for n in range(1, 401):
        log.append(rig.row("customers", 8, n, {"id": n, "name": f"c{n}"}))
        if n == 148:
            log.append(rig.message(8, serviceName="loader"))
    ended = [*log, rig.end(8, customers=400)]
    rig.cleaner.close()
    rig.open(step_records=100)
    rig.send(*log[:300])
    for _ in range(8):
        rig.cleaner.step(0.2)
    assert [change.key for change in rig.changes("customer")] == ["0"], "it has not ended"
    rig.send(*ended[280:])
    for turn in range(4):
        for _ in range(3 + turn):
            rig.cleaner.step(0.2)
        rig.cleaner.close()
        rig.open(step_records=100)
    last = rig.row("customers", 9, 1, {"id": 900, "name": "after"})
    rig.send(last, rig.end(9, customers=1))
    rig.clean()
    found = rig.changes("customer")
    assert len(found) == len({change.id for change in found}) == 402
    blocks = blocks_of(found)
    assert blocks["pg:8"] == [(index, 400) for index in range(1, 401)]
    assert (blocks["pg:7"], blocks["pg:9"]) == ([(1, 1)], [(1, 1)])
    loaded = [change for change in found if change.key not in ("0", "900")]
    services = {change.provenance.service_name for change in loaded}
    assert services == {"loader"}


def test_the_deletes_of_a_truncation_go_out_in_cuts_before_the_rows_behind_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.gone._DELETES_MAX", 3)
    customer = rig.row("customers", 7, 1, {"id": 1, "name": "Ann"})
    order = rig.row("orders", 7, 2, {"id": 10, "customer_id": 1, "status": "open"})
    amounts = range(1, 9)
    lines = [rig.row("lines", 7, 2 + n, {"id": n, "order_id": 10, "amount": n}) for n in amounts]
    rig.send(customer, order, *lines, rig.end(7, customers=1, orders=1, lines=8))
    rig.clean()
    gone = rig.truncation("lines", 8, 1)
    new = rig.row("lines", 8, 2, {"id": 3, "order_id": 10, "amount": 33})
    rig.send(gone, new, rig.end(8, lines=2))
    later = rig.row("lines", 9, 1, {"id": 3, "order_id": 10, "amount": 34}, {"id": 3})
    rig.cleaner.close()
    rig.open(step_records=2)
    for _ in range(2):
        rig.cleaner.step(0.2)
    rig.send(later, rig.end(9, lines=1))
    rig.clean()
    found = rig.changes("line")
    assert len({change.id for change in found}) == len(found) == 8 + 8 + 2
    kinds = {key: [one.kind for one in found if one.key == str(key)] for key in amounts}
    assert kinds.pop(3) == ["created", "deleted", "created", "updated"]
    assert set(map(tuple, kinds.values())) == {("created", "deleted")}
    blocks = blocks_of(found)
    assert (blocks["pg:8"], blocks["pg:9"]) == ([(1, 2)] * 8 + [(2, 2)], [(1, 1)])


def test_no_row_has_a_block_where_a_transaction_without_end_is_cut_by_a_restart(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.cdc.gone._DELETES_MAX", 3)
    customer = rig.row("customers", 7, 1, {"id": 1, "name": "Ann"})
    order = rig.row("orders", 7, 2, {"id": 10, "customer_id": 1, "status": "open"})
    lines = [
        rig.row("lines", 7, 2 + n, {"id": n, "order_id": 10, "amount": n}) for n in (1, 2, 3, 4)
    ]
    rig.send(customer, order, *lines, rig.end(7, customers=1, orders=1, lines=4))
    rig.clean()
    rig.send(rig.row("customers", 8, 1, {"id": 2, "name": "Bob"}), rig.truncation("lines", 8, 2))
    rig.clean()
    rig.now_s += 301.0
    rig.cleaner.step(0.2)
    rig.cleaner.close()
    rig.send(rig.row("lines", 8, 3, {"id": 5, "order_id": 10, "amount": 5}))
    rig.send(rig.end(8, customers=1, lines=2))
    rig.open()
    rig.clean()
    found = [*rig.changes("customer"), *rig.changes("line")]
    later = [one for one in found if one.key in ("2", "5") or one.kind == "deleted"]
    assert [(one.entity, one.key) for one in later if one.transaction is not None] == [
        ("line", "2")
    ], "the line that transaction 7 created"
    assert len(later) == 1 + 1 + 4 + 1


def test_a_transaction_does_not_go_on_early_because_the_one_before_it_had_as_many_rows(
    rig: Rig,
) -> None:
    # Each wait is shorter than the 300 s of `transaction_wait_s`, and both together are longer.
    rig.send(rig.row("customers", 7, 1, {"id": 1, "name": "Ann"}))
    rig.clean()
    rig.now_s += 200.0
    rig.send(rig.end(7, customers=1), rig.row("customers", 8, 1, {"id": 2, "name": "Bob"}))
    rig.clean()
    rig.now_s += 200.0
    rig.cleaner.step(0.2)
    rig.send(rig.end(8, customers=1))
    rig.clean()
    found = rig.changes("customer")
    blocks = [one.transaction and (one.transaction.index, one.transaction.count) for one in found]
    assert blocks == [(1, 1), (1, 1)]


def paid_order(rig: Rig) -> None:
    customer = rig.row("customers", 4, 1, {"id": 1, "name": "Ann"})
    first = rig.row("orders", 4, 2, {"id": 10, "customer_id": 1, "status": "open"})
    before = {"id": 10}
    second = rig.row("orders", 4, 3, {"id": 10, "customer_id": 1, "status": "paid"}, before)
    rig.send(customer, first, second, rig.end(4, customers=1, orders=2))
    rig.clean()


def test_three_offers_stand_side_by_side(rig: Rig) -> None:
    paid_order(rig)
    created, updated = rig.changes("orders")
    assert (created.event, updated.event) == (
        None,
        DomainEvent(type="OrderPaid", data={"order_id": 10}),
    )
    partials = [json.loads(r.value) for r in rig.records(rig.names.partials("orders"))]
    assert partials[1]["changedFields"] == {"status": "paid"}
    assert [p["version"] for p in partials] == [1, 2]
    (event,) = rig.changes("order_event")
    assert (event.kind, event.version, event.event) == ("event", 1, updated.event)
    assert event.current == {"id": event.key, "order_id": 10}


def in_debezium_form(rig: Rig) -> list[Any]:
    """Records of the orders in Debezium's form; published once, however often it is asked."""
    form = DebeziumForm(rig.config, rig.app.entity_type("orders"))
    left = len(rig.records(rig.names.changes("orders")))
    while left := left - form.step():
        pass
    form.close()
    again = DebeziumForm(rig.config, rig.app.entity_type("orders"))
    assert again.step() == 0
    again.close()
    return rig.records(rig.names.debezium("orders"))


def test_c8_the_debezium_form_does_not_go_on_with_a_topic_made_again(rig: Rig) -> None:
    paid_order(rig)
    sent = len(in_debezium_form(rig))
    source = rig.names.changes("orders")
    again = [(record.key, record.value) for record in rig.records(source)]
    with Topics(rig.config) as topics:
        topics.delete([source])
        topics.ensure(["orders"])
    with Producer(rig.config) as producer:
        for key, value in [*again, *again]:
            producer.send_raw(source, key, value)
        producer.flush(30)
    form = DebeziumForm(rig.config, rig.app.entity_type("orders"))
    with pytest.raises(LogIdentityChanged, match="Nothing was read"):
        form.step()
    form.close()
    assert len(rig.records(rig.names.debezium("orders"))) == sent


def test_c8_the_debezium_form_ends_when_its_topic_grows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the partitions that there were: records of another would never be published."""
    monkeypatch.setattr("everstate.log.positions._COUNT_AGAIN_S", 0.0)
    paid_order(rig)
    source = rig.names.changes("orders")
    with Topics(rig.config) as topics:
        partitions = topics.partitions(source)
    form = DebeziumForm(rig.config, rig.app.entity_type("orders"))
    form.step()
    grow(rig.config, source, partitions + 1)
    with pytest.raises(TopicResized, match=f"has {partitions + 1} partitions"):
        form.step()
    form.close()


def test_a_reader_of_debezium_reads_our_changes_as_those_of_a_database(rig: Rig) -> None:
    paid_order(rig)
    rows = []
    for record in in_debezium_form(rig):
        # The reader of captures knows nothing of this form: it reads what Debezium writes.
        rows += READERS["debezium"](RawMessage("orders", record.key, record.value, {}))
    assert [(row.op, row.key, row.before, row.after) for row in rows] == [
        ("c", {"id": 10}, None, {"id": 10, "customer_id": 1, "status": "open"}),
        (
            "u",
            {"id": 10},
            {"id": 10, "customer_id": 1, "status": "open"},
            {"id": 10, "customer_id": 1, "status": "paid"},
        ),
    ]
    assert [row.transaction for row in rows] == ["pg:4", "pg:4"]


@pytest.mark.timeout(600)
def test_an_unmodified_spark_query_over_debezium_reads_our_changes(
    rig: Rig, spark: SparkSession
) -> None:
    paid_order(rig)
    row = "struct<id:int,customer_id:int,status:string>"
    ddl = f"before {row}, after {row}, op string, ts_ms bigint, source struct<table:string>"
    values = [(record.value.decode(),) for record in in_debezium_form(rig)]
    frame = spark.createDataFrame(values, "value string")
    read = frame.selectExpr(f"from_json(value, '{ddl}') AS m").select("m.*").collect()
    assert [(m.op, m.before and m.before.status, m.after.status) for m in read] == [
        ("c", None, "open"),
        ("u", "open", "paid"),
    ]
    assert {(m.source.table, m.after.id) for m in read} == {("orders", 10)}
    assert all(m.ts_ms > 0 for m in read)


def test_a_preview_shows_raw_and_clean_and_writes_nothing(rig: Rig) -> None:
    broken = rig.row("customers", 4, 2, {"id": 2})
    rig.send(rig.row("customers", 4, 1, {"id": 1, "name": "Ann"}), broken)
    capture = rig.app.capture_of("shop")
    found = sorted(preview(rig.config, capture, rig.app.entities, 5), key=lambda one: str(one.key))
    assert [(one.table, one.key, one.outcome) for one in found] == [
        ("public.customers", "1", "whole"),
        ("public.customers", "2", "refused: name: public.customers has no column for this field"),
    ]
    assert found[0].clean == {"id": 1, "name": "Ann"}
    assert rig.changes("customer") == []
