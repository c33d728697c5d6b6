"""An outbox capture: declaration, connector, and what is published of its rows (C6, C14)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid5

import msgspec
import pytest
from pydantic import BaseModel, Field
from pyspark.cloudpickle import dumps, loads

from clean_cases import CONFIG, MemoryCopy
from everstate.app import App
from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.changes.keys import EntityKey
from everstate.config import load
from everstate.declarations.captures import Aggregate, Capture, DatabaseKind, Outbox, Table
from everstate.errors import HeldOverflow, InvalidCapture
from everstate.log.record import OutRecord, RawRecord
from everstate.log.topics import TopicNames
from everstate.sources.cdc.balance import NumberedBatch, counted, held_rows
from everstate.sources.cdc.columns import Rows, Slices
from everstate.sources.cdc.completion import READ_BEFORE
from everstate.sources.cdc.composing import RawPlace
from everstate.sources.cdc.connectors import Address, OwnTables, connector_settings
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.kinds import kind_of
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.outbox_reading import RoutedReader, routed
from everstate.sources.cdc.reading import RefusedRow
from everstate.sources.cdc.restoring import known_of
from everstate.sources.cdc.states import States, encoded_position, known_row, state_row
from everstate.sources.cdc.stream import SEEN
from everstate.testing.store_contract import ORDER, StoredOrder
from kit.settings import altered

SPACE = UUID("4d47e190-0402-4048-bc2c-89dd54343cdc")
SAID = {"apiVersion": "v1", "serviceName": "shop", "identifier": "web-3"}
TILL = Provenance(api_version="v1", service_name="till", identifier="till-2")
PAYMENT = EntityType("payment", StoredOrder, "order_id")
ENTITIES = {ORDER.name: ORDER, "payment": PAYMENT}
AT_MS = 1_795_247_000_123
RAW = "everstate.raw.shop"
CHANGES = {TopicNames(CONFIG.log.prefix).changes(name) for name in ENTITIES}
State = dict[str, Any] | None


def capture_of(kind: DatabaseKind = "mariadb", **options: Any) -> Capture:
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


class Rig:
    """Routed records in, batches out, as the clean role has them; nothing is connected."""

    def __init__(self, entities: Mapping[str, EntityType] = ENTITIES, **options: Any) -> None:
        self.capture = capture_of(**options)
        self.entities, self.copy = entities, MemoryCopy()
        self.held: dict[EntityKey, HeldEntity] = {}
        self.kept: dict[EntityKey, bytes] = {}
        """What is held, as the log has it."""
        self.offset = 0
        self.log: list[tuple[str, int, str]] = []
        """Key, version and note of each change that was published."""
        self.published: list[OutRecord] = []
        """Of the last batch."""
        self.begin_again()

    @property
    def reader(self) -> RoutedReader:
        assert isinstance(self.kind.reader, RoutedReader)
        return self.kind.reader

    def row(
        self, value: Any, *, row_id: str | None = None, key: str = "1", name: str = "Order"
    ) -> RawRecord:
        body = json.dumps(value)
        found_id = str(uuid5(SPACE, body)) if row_id is None else row_id
        headers = headers_of(found_id, name)
        self.offset += 1
        return 0, self.offset, key.encode(), json.dumps(body).encode(), headers, AT_MS

    def read(self, row: RawRecord) -> Any:
        """What one record says."""
        (one,) = self.reader.read("", *row[2:])
        return one

    def run(self, *records: RawRecord) -> NumberedBatch:
        tables = {name: number for number, name in enumerate(self.capture.tables)}
        rows = Rows.of(Slices(self.reader, [""], tables).begin().columns(records))
        waiting, states = held_rows(self.held.values()), States(self.copy)  # type: ignore[arg-type]
        self.kind.records.begin(1_000.0)
        batch = self.numbering.run(rows, [(RAW, 0)], states, 1_000.0)
        held = held_rows(self.held.values())
        counts = counted({}, batch.read + waiting, batch.added, batch.outcomes, held)
        assert {table: one.vanished for table, one in counts.items() if one.vanished} == {}
        for entity in batch.held_changed:
            self.kept.pop(entity, None)
            if entity in self.held:
                self.kept[entity] = self.held[entity].encode()
        self.copy.settle(states.rows())
        self.published = self.kind.records.records()
        for record in self.published:
            if record.topic in CHANGES:
                value = json.loads(record.value or b"")
                note = (value["currentEntityState"] or {"note": ""})["note"]
                self.log.append((value["key"], value["version"], note))
        return batch

    def begin_again(self, held_max: int = 100) -> None:
        """As a new process does: what is held comes from the log."""
        config = altered(CONFIG, pipeline={"held_max": held_max})
        self.kind = kind_of(config, self.capture, self.entities)
        self.held = {entity: HeldEntity.decode(value) for entity, value in self.kept.items()}
        self.numbering = self.kind.numbering(self.held, epoch=1, is_trusted=True)


def headers_of(row_id: str, name: str = "Order") -> tuple[bytes | None, ...]:
    """Headers of a routed record, as a reader wants them."""
    return None, f'"{name}"'.encode(), row_id.encode(), b"OrderWritten"


@pytest.fixture
def rig() -> Rig:
    return Rig()


FIRST = payload(1, None, state("new"))
SECOND = payload(2, state("new"), state("paid"))
THIRD = payload(3, state("paid"), None)
FOURTH = payload(4, None, state("again"))
ALL = (FIRST, SECOND, THIRD, FOURTH)
LOG = [("1", 1, "new"), ("1", 2, "paid"), ("1", 3, ""), ("1", 4, "again")]


def test_rows_in_order_are_published_as_they_are(rig: Rig) -> None:
    rows = [rig.row(each) for each in ALL]
    batch = rig.run(*rows)
    assert rig.log == LOG
    assert not batch.refused
    assert not batch.held_changed
    written = [one for one in rig.published if one.topic in CHANGES]
    newest = [one for one in rig.published if one.topic not in CHANGES]
    assert [one.value for one in newest] == [written[-1].value]
    change = ChangeCodec(ORDER).decode(written[1].value or b"")
    assert (change.version, change.kind.value, change.provenance.identifier) == (
        *(2, "updated", "web-3"),
    )
    assert change.recorded_at.timestamp() * 1000 == pytest.approx(AT_MS)
    assert str(change.id).encode() == rows[1][4][2], "the row's id"
    assert change.event is not None
    assert change.event.type == "OrderWritten"
    assert change.extra["source"]["table"] == "shop.outbox"


def test_the_newest_state_and_its_rows_id_come_back_from_the_log(rig: Rig) -> None:
    row = rig.read(rig.row(SECOND, row_id="4711"))
    assert isinstance(row, CleanRow)
    assert row.state is not None
    key, known = known_of(row.state)
    assert (key, known.version, json.loads(known.image)["note"]) == ("1", 2, "paid")
    assert known.position == row.position
    assert routed(row).id not in row.position["outbox"], "a number says too little"


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
    assert rig.kept == {}


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
    assert [(one.entity, one.place) for one in batch.refused] == [(ORDER.name, RawPlace(RAW, 0, 2))]
    assert "originalEntityState of version 2" in batch.refused[0].reason
    batch = rig.run(rig.row(payload(1, state("x", "2"), state("y", "2")), key="2"))
    assert "there was none" in batch.refused[0].reason
    rig.run(rig.row(SECOND))
    assert rig.log == LOG[:3]


def test_a_hole_stops_its_own_key_only_and_never_all_memory(rig: Rig) -> None:
    rig.begin_again(held_max=2)
    other = payload(1, None, state("other", "2"))
    rig.run(rig.row(SECOND), rig.row(THIRD), rig.row(other, key="2"))
    assert rig.log == [("2", 1, "other")]
    with pytest.raises(HeldOverflow, match="capture shop"):
        rig.run(rig.row(FOURTH))


def test_an_older_state_may_lack_what_the_model_has_now() -> None:
    class Wider(BaseModel):
        order_id: str
        note: str
        colour: str = "red"

    wider = {ORDER.name: EntityType(ORDER.name, Wider, "order_id"), "payment": PAYMENT}
    rig = Rig()
    rig.run(rig.row(FIRST))
    rig.entities = wider
    rig.begin_again()
    after = payload(2, {**state("new"), "colour": "red"}, {**state("paid"), "colour": "blue"})
    rig.run(rig.row(after))
    assert rig.log == LOG[:2]


def test_facts_are_published_once_under_their_rows_id(rig: Rig) -> None:
    fact = {"order_id": "1", "note": "seen"}
    twice = [rig.row(fact, name="Payment", row_id=str(SPACE)) for _ in range(2)]
    batch = rig.run(*twice)
    assert rig.log == [(str(SPACE), 1, "seen")]
    assert batch.skipped == {"read before": 1}


def test_rows_whose_numbers_begin_again_are_other_rows(rig: Rig) -> None:
    """After a TRUNCATE a table counts from 1 again: no fact is lost, and no two changes are one."""
    rows = []
    for round_ in range(3):
        for number in range(1, 5):
            note = {"order_id": str(number), "note": f"fact {round_}"}
            rows.append(rig.row(note, name="Payment", row_id=str(number)))
    rows.append(rig.row(FIRST, row_id="1"))
    rows.append(rig.row(payload(1, None, state("else", "2")), key="2", row_id="1"))
    rows.append(rig.row(SECOND, row_id="1"))
    batch = rig.run(*rows)
    assert (batch.changes, batch.refused, len(rig.log)) == (15, [], 15)
    facts = [note for key, _, note in rig.log if note.startswith("fact")]
    assert facts == [f"fact {round_}" for round_ in range(3) for _ in range(4)]
    assert [key for key, *_ in rig.log[:4]] == ["1", "2", "3", "4"]
    assert len({(one.topic, one.key) for one in rig.published if one.topic not in CHANGES}) == 14
    written = [json.loads(one.value or b"") for one in rig.published if one.topic in CHANGES]
    assert len({one["id"] for one in written}) == 15
    for one in rig.published:
        ChangeCodec(PAYMENT if "payment" in one.topic else ORDER).decode(one.value or b"")
    rig.begin_again()
    batch = rig.run(*rows)
    assert (batch.skipped, batch.changes, batch.refused) == ({"read before": 15}, 0, [])


def test_facts_of_one_number_and_state_but_of_two_types_are_two(rig: Rig) -> None:
    seen = rig.row(state("x"), name="Payment", row_id="7")
    other = (*seen[:4], (*seen[4][:3], b"Refunded"), AT_MS)
    rig.run(seen, other, seen, other)
    assert len(rig.log) == 2


def test_a_version_of_another_row_with_the_same_number_is_a_dead_letter(rig: Rig) -> None:
    rig.run(rig.row(FIRST, row_id="1"))
    batch = rig.run(rig.row(payload(1, None, state("other")), row_id="1"))
    assert ["an earlier row with the same id" in one.reason for one in batch.refused] == [True]
    assert rig.log == LOG[:1]


def test_what_an_earlier_release_published_of_numbers_is_read_before(rig: Rig) -> None:
    """Its facts have no hash of their row, and its changes an id of the number only."""
    fact = rig.row({"order_id": "1", "note": "seen"}, name="Payment", row_id="1")
    change = rig.row(FIRST, row_id="2")
    rig.run(fact, change)
    for name, stored in rig.copy.rows.items():
        known = known_row(stored)
        place = encoded_position({"outbox": known.position["outbox"][:1]})
        rig.copy.rows[name] = state_row(msgspec.structs.replace(known, place=place))
    batch = rig.run(fact, change)
    assert batch.skipped == {"read before": 2}


def without(field: str) -> dict[str, Any]:
    return {name: part for name, part in FIRST.items() if name != field}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"order_id": "1"}, "version"),
        ({**FIRST, "version": None}, "version"),
        ({**FIRST, "version": 0}, "versions start at 1"),
        (payload(2**70, None, state("x")), "64 bits"),
        (payload(1, None, {"note": "x"}), "order_id"),
        ({**FIRST, "currentEntityState": [1]}, "JSON object"),
        (without("originalEntityState"), "originalEntityState"),
        (without("currentEntityState"), "currentEntityState"),
        (without("provenance"), "provenance"),
        ({**FIRST, "provenance": {**SAID, "actor": 7}}, "actor"),
        ({**FIRST, "provenance": {**SAID, "identifier": ""}}, "identifier"),
        ({**FIRST, "provenance": "me"}, "provenance"),
        ({**FIRST, "occurredAt": "2026-11-21T08:00:00"}, "occurredAt.*UTC offset"),
        ({**FIRST, "occurredAt": "yesterday"}, "yesterday"),
        ({**FIRST, "occurredAt": "2026-01-01T00:00:00.1234567Z"}, "occurredAt.*microsecond"),
        ({**FIRST, "occurredAt": "2026-W01-1T00:00:00Z"}, "occurredAt.*RFC 3339"),
        ({**FIRST, "occurredAt": 1700000000}, "occurredAt.*RFC 3339"),
        (payload(1, None, state("x" * 2_000_000)), "bytes"),
        ("no object", "JSON"),
    ],
)
def test_what_is_no_change_is_refused_with_its_reason(rig: Rig, value: Any, reason: str) -> None:
    row = rig.row(value)
    refused = rig.read(row)
    assert isinstance(refused, RefusedRow)
    assert re.search(reason, refused.reason)
    batch = rig.run(row)
    place = RawPlace(RAW, 0, rig.offset)
    assert [(one.entity, one.place, one.raw) for one in batch.refused] == [
        (ORDER.name, place, (b"1", row[3]))
    ]


@pytest.mark.parametrize(
    ("key", "value", "row_id", "reason"),
    [
        (b'"2"', FIRST, b"7", "it is of '1'"),
        (None, FIRST, b"7", "no key"),
        (b"1", FIRST, None, "headers.id"),
        (b"1", b"{", b"7", "truncated"),
        (b"1", b'"\\u0000"', b"7", "NUL"),
        (b"1", b"[]", b"7", "no JSON object"),
    ],
)
def test_a_record_that_is_no_row_is_refused_with_its_reason(
    rig: Rig, key: bytes | None, value: Any, row_id: bytes | None, reason: str
) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    (refused,) = rig.reader.read("Order", key, body, (None, None, row_id, b"OrderPaid"), AT_MS)
    assert isinstance(refused, RefusedRow)
    assert reason in refused.reason


@pytest.mark.parametrize(
    ("key", "value", "quote"),
    [
        (b"1", json.dumps(SECOND), ""),
        (b'"1"', json.dumps(SECOND), '"'),
        (b'"1"', {"schema": {"type": "string"}, "payload": json.dumps(SECOND)}, ""),
        (b'{"schema":null,"payload":"1"}', {"schema": None, "payload": SECOND}, ""),
    ],
    ids=["string, bare key", "string, quoted", "schemas, string", "schemas, object"],
)
def test_every_converters_shape_is_the_same_change(
    rig: Rig, key: bytes, value: Any, quote: str
) -> None:
    (plain,) = rig.reader.read("", b'"1"', json.dumps(SECOND).encode(), headers_of("7"), AT_MS)
    body = json.dumps(value).encode()
    assert isinstance(plain, CleanRow)
    (found,) = rig.reader.read("", key, body, headers_of(f"{quote}7{quote}"), AT_MS)
    assert isinstance(found, CleanRow)
    assert found.state == plain.state


class Parcel(BaseModel):
    parcel_id: str
    amount: Annotated[Decimal, Field(max_digits=38, decimal_places=10)] = Decimal(0)
    qty: int = 0
    weight: float | None = None
    at: datetime | None = None
    day: date | None = None


PARCEL = EntityType("parcel", Parcel, "parcel_id")
PLAIN = '{"parcel_id": "1"}'
OLDER = [
    ("weight", "9007199254740993"),
    ("at", "1700000000"),
    ("at", '"2026"'),
    ("at", '"2026-01-02T03:04:00.1234567Z"'),
    ("day", "86400"),
    ("qty", '"1_000"'),
]


def parcel(before: str, after: str, **options: Any) -> Any:
    """What becomes of a row with these states, without a provenance of its own."""
    shown = Aggregate(entity="parcel", provenance=TILL, **options)
    outbox = Outbox(table="shop.outbox", aggregates={"Parcel": shown})
    reader = RoutedReader(Capture(name="shop", kind="mariadb", outbox=outbox), {"parcel": PARCEL})
    body = f'{{"version": 2, "originalEntityState": {before}, "currentEntityState": {after}}}'
    body = after if shown.facts else body
    (found,) = reader.read("", b'"1"', body.encode(), headers_of(str(SPACE), "Parcel"), AT_MS)
    return found


@pytest.mark.parametrize(("field", "value"), [*OLDER, ("qty", "true"), ("qtty", "5")], ids=str)
def test_a_state_that_the_model_would_change_is_refused(field: str, value: str) -> None:
    changed = f'{{"parcel_id": "1", "{field}": {value}}}'
    assert isinstance(parcel(PLAIN, PLAIN), CleanRow)
    assert f"{field}: " in parcel(PLAIN, changed).reason
    assert f"{field}: " in parcel(PLAIN, changed, facts=True).reason
    if (field, value) in OLDER:
        assert f"{field}: " in parcel(changed, PLAIN).reason


def test_a_state_before_may_have_a_field_of_an_older_model() -> None:
    found = routed(parcel('{"parcel_id": "1", "colour": "red"}', PLAIN))
    assert found.original == PARCEL.encode(Parcel(parcel_id="1"))
    assert (found.id, found.provenance.service_name) == (str(SPACE), "till")


def test_a_decimal_that_is_a_json_number_keeps_all_its_digits() -> None:
    amount = "12345678901234567890.1234567890"
    found = routed(parcel(PLAIN, f'{{"parcel_id": "1", "amount": {amount}}}'))
    assert f'"amount":"{amount}"'.encode() in (found.current or b"")


def test_a_refused_row_that_the_connector_writes_once_more_is_no_second_dead_letter(
    rig: Rig,
) -> None:
    tables = {name: number for number, name in enumerate(rig.capture.tables)}
    records = [rig.row({"version": 1, "note": "no change"})] * 2
    rows = Rows.of(Slices(rig.reader, [""], tables).begin().columns(records))
    rows.block = [None, SEEN]
    rig.kind.records.begin(1_000.0)
    batch = rig.numbering.run(rows, [(RAW, 0)], States(rig.copy), 1_000.0)  # type: ignore[arg-type]
    assert (len(batch.refused), batch.skipped, batch.read.total()) == (1, {READ_BEFORE: 1}, 2)


@pytest.mark.parametrize("kind", [b"transaction", b"source", b"message", b"other", b"\xff"])
def test_a_record_that_is_said_to_be_no_row_stops_no_capture(rig: Rig, kind: bytes) -> None:
    """Whoever may write to the raw topic may write any header."""
    headers = (kind, None, None, None)
    for value in (b"{", b"7", b"[" * 9_000, None):
        batch = rig.run((0, 1, b"1", value, headers, AT_MS))
        assert [one.entity for one in batch.refused] in ([], [None])
    rig.run(rig.row(FIRST))
    assert len(rig.log) == 1


def test_a_tombstone_says_nothing(rig: Rig) -> None:
    assert rig.reader.read("", b"1", None, headers_of("1")) == []


def test_records_of_a_topic_per_aggregate_type_are_read_by_its_name() -> None:
    rig = Rig(form="debezium")
    assert not rig.capture.is_ours
    body = json.dumps(FIRST).encode()
    (row,) = rig.reader.read("Order", b"1", body, (None, None, b"1", b"W"), AT_MS)
    assert isinstance(row, CleanRow)
    assert row.table == "Order"


def test_the_reader_goes_to_other_processes_with_its_limit(rig: Rig) -> None:
    small = RoutedReader(rig.capture, ENTITIES, message_bytes_max=800)
    there = loads(dumps(small))  # type: ignore[no-untyped-call]
    body = json.dumps(payload(1, None, state("x" * 900))).encode()
    (row,) = there.read("", b"1", body, headers_of("1"), AT_MS)
    assert isinstance(row, RefusedRow)
    (good,) = there.read("", b"1", json.dumps(FIRST).encode(), headers_of("1"), AT_MS)
    assert good == rig.reader.read("", b"1", json.dumps(FIRST).encode(), headers_of("1"), AT_MS)[0]


def test_an_outbox_is_one_table_and_its_aggregate_types_are_those_of_entities() -> None:
    capture = capture_of()
    assert capture.captured_tables == ("shop.outbox",)
    assert capture.entities == (ORDER.name, "payment")
    assert not capture.transactions
    assert list(capture.tables) == ["Order", "Payment"]


def test_its_connector_routes_the_outboxs_rows_and_nothing_else(tmp_path: Path) -> None:
    capture = capture_of(settings={"transforms.route.table.field.event.key": "order_no"})
    made = connector_settings(
        load(tmp_path),
        capture,
        CaptureNames("p", capture.name),
        Address("db", 3306, "u", "shop", {}),
        OwnTables("shop.everstate_signals_p_shop"),
        password="${file:x:password}",
        brokers="kafka:9092",
    )
    assert made["table.include.list"] == r"shop\.outbox"
    assert made["database.include.list"] == "shop"
    assert made["transforms"] == "own,transaction,message,heartbeat,schema,route,one"
    assert made["transforms.route.type"] == "io.debezium.transforms.outbox.EventRouter"
    assert made["transforms.route.route.topic.replacement"] == "p.raw.shop"
    placed = made["transforms.route.table.fields.additional.placement"].split(",")
    assert "aggregatetype:header:aggregateType" in placed
    assert made["predicates.outbox.pattern"] == r"p\.raw\.shop\.shop\.outbox"
    assert made["transforms.route.table.field.event.key"] == "order_no"
    assert made["provide.transaction.metadata"] == "true", "a prepared transaction has no END"


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
    app.entity("order", key="order_id")(StoredOrder)
    with pytest.raises(InvalidCapture, match="source of truth of order is 'store'"):
        app.capture("shop", kind="mariadb", outbox=outbox)
    other = App("other")
    other.entity("order", key="order_id", source="capture")(StoredOrder)
    assert other.capture("shop", kind="mariadb", outbox=outbox).outbox == outbox


@pytest.mark.parametrize("name", ["Order", ""])
def test_a_header_named_kind_of_somebody_else_means_nothing(rig: Rig, name: str) -> None:
    body = json.dumps(FIRST).encode()
    plain = rig.reader.read("", b"1", body, headers_of("1"), AT_MS)
    assert isinstance(plain[0], CleanRow)
    _, *rest = headers_of("1")
    assert rig.reader.read(name, b"1", body, (b"priority", *rest), AT_MS) == plain
    of_others = rig.reader.read("Order", b"1", body, (b"message", *rest), AT_MS)
    assert of_others == plain
