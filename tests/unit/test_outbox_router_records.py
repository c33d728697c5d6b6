"""Records of Debezium's outbox router, in the shapes in which they were recorded."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from everstate.changes import ChangeCodec, EntityType, Kind, Provenance
from everstate.errors import CorruptRecord
from everstate.log.record import Record
from everstate.sources.outbox.router_records import RouterReader
from everstate.testing.store_contract import ORDER, StoredOrder

ROW_ID = "4d47e190-0402-4048-bc2c-89dd54343cdc"
SAID = {"apiVersion": "v1", "serviceName": "shop", "identifier": "web-3", "actor": "eva"}
SHOP = Provenance(api_version="v0", service_name="shop", identifier="maria/shop.outbox")
FACTS = EntityType("payment", StoredOrder, "order_id")

UPDATE: dict[str, Any] = {
    "version": 2,
    "originalEntityState": {"order_id": "1", "note": "new"},
    "currentEntityState": {"order_id": "1", "note": "paid"},
    "provenance": SAID,
    "occurredAt": "2026-11-21T08:00:00+01:00",
}
READER = RouterReader(ORDER, "maria/shop.outbox")


def record(value: Any, *, key: bytes | None = b'"1"', headers: Any = None) -> Record:
    given = {"id": ROW_ID, "eventType": "OrderPaid"} if headers is None else headers
    encoded = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    listed = tuple((name, text.encode()) for name, text in given.items())
    return Record("events.order", 0, 7, 1_556_890_294_484, key, encoded, listed)


def refusal(reader: RouterReader, given: Record) -> str:
    with pytest.raises(CorruptRecord) as caught:
        reader.read(given)
    assert (caught.value.topic, caught.value.offset) == ("events.order", 7)
    return caught.value.reason


def test_an_expanded_payload_is_a_change_under_the_rows_id() -> None:
    change = READER.read(record(UPDATE))
    assert change is not None
    assert (change.id, change.key, change.version) == (UUID(ROW_ID), "1", 2)
    assert change.kind is Kind.UPDATED
    assert change.event is not None
    assert change.event.type == "OrderPaid"
    assert change.occurred_at.isoformat() == "2026-11-21T08:00:00+01:00"
    assert change.provenance.actor == "eva"
    key, value, _ = ChangeCodec(ORDER).encode(change)
    assert key == b"1"
    assert json.loads(value)["currentEntityState"]["note"] == "paid"


class Bill(BaseModel):
    bill_id: str
    amount: Annotated[Decimal, Field(max_digits=38, decimal_places=10)]


def test_a_decimal_that_is_a_json_number_keeps_all_its_digits() -> None:
    amount = "12345678901234567890.1234567890"
    state = f'{{"bill_id": "1", "amount": {amount}}}'
    payload = f'{{"version": 1, "originalEntityState": null, "currentEntityState": {state}}}'
    bills = EntityType("bill", Bill, "bill_id")
    change = RouterReader(bills, "maria/shop.outbox", SHOP).read(record(payload.encode()))
    assert change is not None
    assert f'"amount":"{amount}"'.encode() in ChangeCodec(bills).encode(change)[1]


@pytest.mark.parametrize(
    ("value", "key", "header"),
    [
        (json.dumps(UPDATE), b"1", ROW_ID),
        (json.dumps(UPDATE), b'"1"', f'"{ROW_ID}"'),
        ({"schema": {"type": "string"}, "payload": json.dumps(UPDATE)}, b'"1"', ROW_ID),
        ({"schema": None, "payload": UPDATE}, b'{"schema":null,"payload":"1"}', ROW_ID),
    ],
    ids=["string, bare key", "string, quoted", "schemas, string", "schemas, object"],
)
def test_every_converters_shape_is_the_same_change(value: Any, key: bytes, header: str) -> None:
    plain = READER.read(record(UPDATE))
    given = record(value, key=key, headers={"id": header, "eventType": "OrderPaid"})
    assert READER.read(given) == plain


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [(False, True, Kind.CREATED), (True, True, Kind.UPDATED), (True, False, Kind.DELETED)],
)
def test_the_kind_follows_from_the_states(before: bool, after: bool, kind: Kind) -> None:
    given = {
        **UPDATE,
        "originalEntityState": UPDATE["originalEntityState"] if before else None,
        "currentEntityState": UPDATE["currentEntityState"] if after else None,
    }
    change = READER.read(record(given))
    assert change is not None
    assert change.kind is kind


def test_a_row_id_that_is_no_uuid_gives_the_same_id_when_it_is_read_again() -> None:
    headers = {"id": "4711", "eventType": "OrderPaid"}
    first, again = (READER.read(record(UPDATE, headers=headers)) for _ in range(2))
    other = RouterReader(ORDER, "maria/other.outbox").read(record(UPDATE, headers=headers))
    assert first is not None
    assert again is not None
    assert other is not None
    assert first.id == again.id != other.id


def test_any_other_payload_is_a_fact_under_the_rows_id() -> None:
    reader = RouterReader(FACTS, "maria/shop.outbox", SHOP, is_event=True)
    change = reader.read(record({"order_id": "1", "weight": 10.5}))
    assert change is not None
    assert (change.kind, change.key, change.version) == (Kind.EVENT, ROW_ID, 1)
    assert change.original is None
    assert change.provenance == SHOP
    assert change.occurred_at.timestamp() == 1_556_890_294.484
    ChangeCodec(FACTS).encode(change)


def test_a_payload_without_provenance_takes_the_sources_or_is_refused() -> None:
    silent = {name: part for name, part in UPDATE.items() if name != "provenance"}
    change = RouterReader(ORDER, "maria", SHOP).read(record(silent))
    assert change is not None
    assert change.provenance == SHOP
    assert "provenance" in refusal(READER, record(silent))


def test_a_tombstone_says_nothing_more() -> None:
    assert READER.read(record(None)) is None


@pytest.mark.parametrize(
    ("value", "key", "headers", "reason"),
    [
        ({**UPDATE, "version": None}, b'"1"', None, "version"),
        ({**UPDATE, "version": 0}, b'"1"', None, "versions start at 1"),
        ({"total": 10.5}, b'"1"', None, "version"),
        ({**UPDATE, "currentEntityState": {"note": "x"}}, b'"1"', None, "order_id"),
        ({**UPDATE, "currentEntityState": [1]}, b'"1"', None, "JSON object"),
        ({**UPDATE, "provenance": {**SAID, "identifier": ""}}, b'"1"', None, "identifier"),
        ({**UPDATE, "provenance": "me"}, b'"1"', None, "provenance"),
        ({**UPDATE, "occurredAt": "2026-11-21T08:00:00"}, b'"1"', None, "UTC offset"),
        ({**UPDATE, "occurredAt": "yesterday"}, b'"1"', None, "yesterday"),
        (UPDATE, b'"2"', None, "it is of '1'"),
        (UPDATE, None, None, "no key"),
        (UPDATE, b'"1"', {"eventType": "OrderPaid"}, "headers.id"),
        (b"{", b'"1"', None, "truncated"),
        (b'"\\u0000"', b'"1"', None, "NUL"),
        (b"[]", b'"1"', None, "no JSON object"),
    ],
)
def test_what_is_no_change_is_refused_with_place_and_reason(
    value: Any, key: bytes | None, headers: Any, reason: str
) -> None:
    assert reason in refusal(READER, record(value, key=key, headers=headers))


def test_a_payload_that_leaves_a_state_out_is_refused() -> None:
    for field in ("originalEntityState", "currentEntityState"):
        partial = {name: part for name, part in UPDATE.items() if name != field}
        assert field in refusal(READER, record(partial))


class Parcel(BaseModel):
    parcel_id: str
    qty: int = 0
    weight: float | None = None
    at: datetime | None = None
    day: date | None = None


PARCELS = EntityType("parcel", Parcel, "parcel_id")
CHANGED_VALUES = [
    ("weight", "9007199254740993"),
    ("at", "1700000000"),
    ("at", '"2026"'),
    ("at", '"2026-01-02T03:04:00.1234567Z"'),
    ("day", "86400"),
    ("qty", '"1_000"'),
]


def parcel_change(before: str, after: str) -> Record:
    states = f'"originalEntityState": {before}, "currentEntityState": {after}'
    return record(f'{{"version": 2, {states}}}'.encode())


@pytest.mark.parametrize(
    ("field", "value"), [*CHANGED_VALUES, ("qty", "true"), ("qtty", "5")], ids=str
)
def test_a_state_that_the_model_would_change_is_refused(field: str, value: str) -> None:
    plain, changed = '{"parcel_id": "1"}', f'{{"parcel_id": "1", "{field}": {value}}}'
    reader = RouterReader(PARCELS, "maria/shop.outbox", SHOP)
    assert reader.read(parcel_change(plain, plain)) is not None
    assert f"{field}: " in refusal(reader, parcel_change(plain, changed))
    facts = RouterReader(PARCELS, "maria/shop.outbox", SHOP, is_event=True)
    assert f"{field}: " in refusal(facts, record(changed.encode()))


@pytest.mark.parametrize(("field", "value"), CHANGED_VALUES, ids=str)
def test_a_state_before_that_the_model_would_change_is_refused(field: str, value: str) -> None:
    plain, changed = '{"parcel_id": "1"}', f'{{"parcel_id": "1", "{field}": {value}}}'
    reader = RouterReader(PARCELS, "maria/shop.outbox", SHOP)
    assert f"{field}: " in refusal(reader, parcel_change(changed, plain))


def test_a_state_before_may_have_a_field_of_an_older_model() -> None:
    older = '{"parcel_id": "1", "colour": "red"}'
    reader = RouterReader(PARCELS, "maria/shop.outbox", SHOP)
    change = reader.read(parcel_change(older, '{"parcel_id": "1"}'))
    assert change is not None
    assert change.original == Parcel(parcel_id="1")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2026-01-01T00:00:00.1234567Z", "parts of a microsecond"),
        ("2026-W01-1T00:00:00Z", "RFC 3339"),
        (1700000000, "RFC 3339"),
    ],
)
def test_a_time_of_a_change_is_rfc_3339_and_is_not_cut(text: Any, reason: str) -> None:
    found = refusal(READER, record({**UPDATE, "occurredAt": text}))
    assert "occurredAt" in found
    assert reason in found
