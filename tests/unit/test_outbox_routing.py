"""An outbox capture: declaration, connector, and what is published of its rows (C6, C14)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import pytest
from pydantic import BaseModel
from pyspark.cloudpickle import dumps, loads

from clean_cases import unaccounted
from everstate.app import App
from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.config import load
from everstate.errors import HeldOverflow, InvalidCapture
from everstate.sources.cdc.balance import held_rows
from everstate.sources.cdc.connectors import Address, OwnTables, connector_settings
from everstate.sources.cdc.declaration import Aggregate, Capture, Kind, Outbox, Table
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.local_state import LocalState
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.names import names_of, table_topics
from everstate.sources.cdc.outbox_reading import RoutedReader, routed
from everstate.sources.cdc.outbox_versioning import OutboxVersioner
from everstate.sources.cdc.reading import ParsedCodec, RefusedRow
from everstate.sources.cdc.restoring import known_of
from everstate.sources.cdc.versioning import Batch, RawPlace
from everstate.testing.store_contract import ORDER, Order

SPACE = UUID("4d47e190-0402-4048-bc2c-89dd54343cdc")
SAID = {"apiVersion": "v1", "serviceName": "shop", "identifier": "web-3"}
TILL = Provenance(api_version="v1", service_name="till", identifier="till-2")
PAYMENT = EntityType("payment", Order, "order_id")
ENTITIES = {ORDER.name: ORDER, "payment": PAYMENT}
AT_MS = 1_795_247_000_123
State = dict[str, Any] | None


def capture_of(kind: Kind = "mariadb", **options: Any) -> Capture:
    aggregates = {
        "Order": Aggregate(entity=ORDER.name),
        "Payment": Aggregate(entity="payment", facts=True, provenance=TILL),
    }
    return Capture(
        name="shop", kind=kind, outbox=Outbox(table="shop.outbox", aggregates=aggregates), **options
    )


def payload(version: Any, before: State, after: State) -> dict[str, Any]:
    return {
        "version": version,
        "originalEntityState": before,
        "currentEntityState": after,
        "provenance": SAID,
    }


def state(note: str, key: str = "1") -> dict[str, Any]:
    return {"order_id": key, "note": note}


@dataclass
class Rig:
    """Routed records in, batches out, as the clean role has them; nothing is connected."""

    state: LocalState
    capture: Capture = field(default_factory=capture_of)
    held: dict[tuple[str, str], HeldEntity] = field(default_factory=dict)
    held_max: int = 100
    offset: int = 0
    log: list[tuple[str, int, str]] = field(default_factory=list)
    """Key, version and note of each change that was published."""

    @property
    def reader(self) -> RoutedReader:
        return RoutedReader(self.capture, ENTITIES)

    def row(
        self, value: Any, *, row_id: str | None = None, key: str = "1", name: str = "Order"
    ) -> tuple[RawPlace, CleanRow | RefusedRow]:
        body = json.dumps(value)
        found_id = str(uuid5(SPACE, body)) if row_id is None else row_id
        headers = (("id", found_id.encode()), ("eventType", b"OrderWritten"))
        encoded = json.dumps(body).encode()
        (row,) = self.reader.read(name, key.encode(), encoded, headers, AT_MS)
        assert isinstance(row, CleanRow | RefusedRow)
        self.offset += 1
        return RawPlace(f"p.raw.shop.{name}", 0, self.offset), row

    def run(self, *rows: tuple[RawPlace, CleanRow | RefusedRow]) -> Batch:
        versioner = OutboxVersioner(
            self.capture, ENTITIES, self.state, self.held, held_max=self.held_max
        )
        waiting = held_rows(self.held.values())
        batch = versioner.run(rows, 1_000.0)
        assert unaccounted(rows, batch, waiting, self.held) == {}
        held = {entity: self.held.get(entity) for entity in batch.held_changed}
        values = {entity: None if one is None else one.encode() for entity, one in held.items()}
        self.state.commit(batch.touched, values, {})
        for one in batch.changes:
            current = routed(one.row).current
            note = "" if current is None else json.loads(current)["note"]
            self.log.append((one.key, one.version, note))
        return batch

    def begin_again(self) -> None:
        """As a new process does: what is held comes from the log."""
        self.held = {(e, k): HeldEntity.decode(value) for e, k, value in self.state.held()}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(LocalState(tmp_path / "state.sqlite"))
    yield found
    found.state.close()


FIRST = payload(1, None, state("new"))
SECOND = payload(2, state("new"), state("paid"))
THIRD = payload(3, state("paid"), None)
FOURTH = payload(4, None, state("again"))
ALL = (FIRST, SECOND, THIRD, FOURTH)
LOG = [("1", 1, "new"), ("1", 2, "paid"), ("1", 3, ""), ("1", 4, "again")]


def test_rows_in_order_are_published_as_they_are(rig: Rig) -> None:
    batch = rig.run(*(rig.row(each) for each in ALL))
    assert rig.log == LOG
    assert not batch.refused
    assert not batch.held_changed
    codec = ChangeCodec(ORDER)
    assert batch.changes[1].row.state is not None
    change = codec.decode(batch.changes[1].row.state)
    assert (change.version, change.kind.value, change.provenance.identifier) == (
        *(2, "updated", "web-3"),
    )
    assert change.recorded_at.timestamp() * 1000 == pytest.approx(AT_MS)
    assert change.event is not None
    assert change.extra["source"]["table"] == "shop.outbox"


def test_the_newest_state_and_its_rows_id_come_back_from_the_log(rig: Rig) -> None:
    (_, row) = rig.row(SECOND, row_id="4711")
    assert isinstance(row, CleanRow)
    assert row.state is not None
    key, known = known_of(row.state)
    assert (key, known.version, json.loads(known.image)["note"]) == ("1", 2, "paid")
    assert known.position == row.position == {"outbox": [routed(row).id]}


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_c14_rows_behind_a_hole_wait_and_go_on_in_order(
    rig: Rig, order: tuple[int, ...], is_interrupted: bool
) -> None:
    for number in order:
        rig.run(rig.row(ALL[number]))
        assert [version for _, version, _ in rig.log] == list(range(1, len(rig.log) + 1))
        if is_interrupted:
            rig.begin_again()
    assert rig.log == LOG
    assert rig.held == {}
    assert list(rig.state.held()) == []


def test_what_was_read_before_is_passed_over(rig: Rig) -> None:
    rig.run(rig.row(FIRST), rig.row(SECOND))
    batch = rig.run(rig.row(FIRST), rig.row(SECOND), rig.row(FOURTH), rig.row(FOURTH))
    assert batch.skipped == {"read before": 3}
    assert batch.refused == []
    assert len(rig.log) == 2
    assert rig.held[ORDER.name, "1"].reason == "version 3 is awaited"


def test_c6_another_change_of_the_same_version_is_a_dead_letter(rig: Rig) -> None:
    rig.run(rig.row(FIRST), rig.row(SECOND))
    batch = rig.run(rig.row(payload(2, state("new"), state("other"))), rig.row(FOURTH))
    assert ["in the log already" in one.reason for one in batch.refused] == [True]
    batch = rig.run(rig.row(payload(4, None, state("else"))))
    assert ["held already" in one.reason for one in batch.refused] == [True]
    rig.run(rig.row(THIRD))
    assert rig.log == LOG


def test_a_row_that_does_not_continue_its_entity_is_refused_and_its_version_awaited(
    rig: Rig,
) -> None:
    wrong = payload(2, state("never was"), state("paid"))
    batch = rig.run(rig.row(FIRST), rig.row(wrong), rig.row(THIRD), rig.row(FIRST, key="1"))
    assert [(one.entity, one.place.offset) for one in batch.refused] == [(ORDER.name, 2)]
    assert "originalEntityState of version 2" in batch.refused[0].reason
    batch = rig.run(rig.row(payload(1, state("x", "2"), state("y", "2")), key="2"))
    assert "there was none" in batch.refused[0].reason
    rig.run(rig.row(SECOND))
    assert rig.log == LOG[:3]


def test_a_hole_stops_its_own_key_only_and_never_all_memory(rig: Rig) -> None:
    rig.held_max = 2
    other = payload(1, None, state("other", "2"))
    rig.run(rig.row(SECOND), rig.row(THIRD), rig.row(other, key="2"))
    assert rig.log == [("2", 1, "other")]
    with pytest.raises(HeldOverflow, match="capture shop"):
        rig.run(rig.row(FOURTH))


def test_an_older_state_may_lack_what_the_model_has_now(tmp_path: Path) -> None:
    class Wider(BaseModel):
        order_id: str
        note: str
        colour: str = "red"

    wider = {ORDER.name: EntityType(ORDER.name, Wider, "order_id"), "payment": PAYMENT}
    known = LocalState(tmp_path / "s.sqlite")
    rig = Rig(known)
    rig.run(rig.row(FIRST))
    reader = RoutedReader(rig.capture, wider)
    after = payload(2, {**state("new"), "colour": "red"}, {**state("paid"), "colour": "blue"})
    (row,) = reader.read("Order", b"1", json.dumps(after).encode(), [("id", b"7")], AT_MS)
    assert isinstance(row, CleanRow)
    batch = OutboxVersioner(rig.capture, wider, known, {}).run([(RawPlace("t", 0, 9), row)], 1.0)
    known.close()
    assert [one.version for one in batch.changes] == [2]


def test_facts_are_published_once_under_their_rows_id(rig: Rig) -> None:
    fact = {"order_id": "1", "note": "seen"}
    twice = [rig.row(fact, name="Payment", row_id=str(SPACE)) for _ in range(2)]
    batch = rig.run(*twice)
    assert rig.log == [(str(SPACE), 1, "seen")]
    assert batch.skipped == {"read before": 1}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"order_id": "1"}, "version"),
        (payload(2**70, None, state("x")), "64 bits"),
        (payload(1, None, {"note": "x"}), "order_id"),
        ({**payload(1, None, state("x")), "provenance": {**SAID, "actor": 7}}, "actor"),
        (payload(1, None, state("x" * 2_000_000)), "bytes"),
        ("no object", "JSON"),
    ],
)
def test_what_is_no_change_is_refused_with_its_reason(rig: Rig, value: Any, reason: str) -> None:
    place, row = rig.row(value)
    assert isinstance(row, RefusedRow)
    assert reason in row.reason
    batch = rig.run((place, row))
    assert [(one.entity, one.place) for one in batch.refused] == [(ORDER.name, place)]


def test_a_tombstone_says_nothing(rig: Rig) -> None:
    assert rig.reader.read("Order", b"1", None) == []


def test_the_reader_goes_to_other_processes_with_its_limit(rig: Rig) -> None:
    small = RoutedReader(rig.capture, ENTITIES, message_bytes_max=600)
    there = loads(dumps(small))  # type: ignore[no-untyped-call]
    body = json.dumps(payload(1, None, state("x" * 700))).encode()
    (row,) = there.read("Order", b"1", body, [("id", b"1")], AT_MS)
    assert isinstance(row, RefusedRow)
    (good,) = there.read("Order", b"1", json.dumps(FIRST).encode(), [("id", b"1")], AT_MS)
    codec = ParsedCodec()
    assert codec.encode(codec.decode(codec.encode([good]))) == codec.encode([good])


def test_an_outbox_is_one_table_and_a_raw_topic_for_each_aggregate_type() -> None:
    capture = capture_of()
    assert capture.captured_tables == ("shop.outbox",)
    assert capture.entities == (ORDER.name, "payment")
    assert not capture.transactions
    topics = table_topics(names_of("p", capture), capture)
    assert topics == {"Order": "p.raw.shop.Order", "Payment": "p.raw.shop.Payment"}


def test_its_connector_routes_the_outboxs_rows_and_nothing_else(tmp_path: Path) -> None:
    capture = capture_of(settings={"transforms.route.table.field.event.key": "order_no"})
    made = connector_settings(
        load(tmp_path),
        capture,
        names_of("p", capture),
        Address("db", 3306, "u", "shop", {}),
        OwnTables("shop.everstate_signals_p_shop"),
        password="${file:x:password}",
        brokers="kafka:9092",
    )
    assert made["table.include.list"] == r"shop\.outbox"
    assert made["database.include.list"] == "shop"
    assert made["transforms"] == "own,route"
    assert made["transforms.route.type"] == "io.debezium.transforms.outbox.EventRouter"
    assert made["transforms.route.route.topic.replacement"] == "p.raw.shop.${routedByValue}"
    assert made["predicates.outbox.pattern"] == r"p\.raw\.shop\.shop\.outbox"
    assert made["transforms.route.table.field.event.key"] == "order_no"
    assert made["provide.transaction.metadata"] == "false"
    assert not [name for name in made if name.startswith("transforms.short")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "postgresql"}, "an outbox is read of mariadb or mysql"),
        ({"kind": "mariadb", "form": "maxwell"}, "Debezium's form only"),
        ({"kind": "mariadb", "tables": {"a.b": Table(entity="x")}}, "not both"),
    ],
)
def test_what_is_no_outbox_is_refused(options: Any, reason: str) -> None:
    with pytest.raises(InvalidCapture, match=reason):
        capture_of(**options)


@pytest.mark.parametrize(
    ("aggregates", "reason"),
    [
        ({}, "no table"),
        ({"a.b": Aggregate(entity="x")}, "names a topic"),
        ({"a": Aggregate(entity="x"), "b": Aggregate(entity="x")}, "two aggregate types"),
        ({"held": Aggregate(entity="x")}, "a topic of its own"),
    ],
)
def test_aggregate_types_that_do_not_fit_are_refused(aggregates: Any, reason: str) -> None:
    with pytest.raises(InvalidCapture, match=reason):
        Capture(name="s", kind="mariadb", outbox=Outbox(table="a.o", aggregates=aggregates))


def test_an_outbox_is_the_source_of_truth_of_its_entity_types() -> None:
    app = App("shop")
    outbox = Outbox(table="shop.outbox", aggregates={"Order": Aggregate(entity="order")})
    with pytest.raises(InvalidCapture, match="is not registered"):
        app.capture("shop", kind="mariadb", outbox=outbox)
    app.entity("order", key="order_id")(Order)
    with pytest.raises(InvalidCapture, match="source of truth of order is 'store'"):
        app.capture("shop", kind="mariadb", outbox=outbox)
    other = App("other")
    other.entity("order", key="order_id", source="capture")(Order)
    assert other.capture("shop", kind="mariadb", outbox=outbox).outbox == outbox
