"""The codec: what decodes, encodes to the same; what must not get in, is refused by name."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from everstate.changes import (
    Change,
    ChangeCodec,
    DomainEvent,
    EntityType,
    Kind,
    Provenance,
    SourceTransaction,
    derived_change_id,
    new_change_id,
)
from everstate.errors import ChangeTooLarge, InvalidChange, MissingProvenance
from kit.changes import change_of


class Status(Enum):
    OPEN = "open"
    PAID = "paid"


class Line(BaseModel):
    sku: str
    quantity: int
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


class Order(BaseModel):
    order_id: str
    status: Status = Status.OPEN
    lines: list[Line] = []
    note: str | None = None
    weight: float | None = None
    tags: dict[str, int] = {}
    day: date | None = None
    placed: datetime | None = None


ORDER = EntityType("order", Order, "order_id")
CODEC = ChangeCodec(ORDER)
NOW = datetime(2026, 11, 21, 8, 0, 0, 123456, tzinfo=UTC)
WHO = Provenance(api_version="v1", service_name="shop", identifier="user:1")

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
prices = st.decimals("-9999999", "9999999", places=2)
lines = st.builds(Line, sku=text, quantity=numbers, price=prices)
FIRST, LAST = datetime(1900, 1, 1), datetime(2200, 1, 1)  # noqa: DTZ001
moments = st.datetimes(min_value=FIRST, max_value=LAST, timezones=st.just(UTC))
orders = st.builds(
    Order,
    order_id=text.filter(lambda key: key not in ("", ".", "..")),
    status=st.sampled_from(Status),
    lines=st.lists(lines, max_size=3),
    note=st.none() | text,
    weight=st.none() | floats,
    tags=st.dictionaries(text, numbers, max_size=3),
    day=st.none() | st.dates(),
    placed=st.none() | moments,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)


def change(**fields: Any) -> Change[Any]:
    given: dict[str, Any] = {"key": "o-1", "version": 1, "current": Order(order_id="o-1")}
    return change_of("order", **{"who": WHO, "at": NOW, "kind": Kind.CREATED, **given, **fields})


@given(
    current=orders,
    original=orders,
    occurred_at=moments,
    event=st.none() | st.builds(DomainEvent, type=text.filter(bool), data=json_values),
    block=st.none() | st.builds(SourceTransaction, id=text, index=numbers, count=numbers),
    extra=st.dictionaries(text.map("x-{}".format), json_values, max_size=2),
)
def test_a_change_survives_the_round_trip_with_fields_it_does_not_know(
    current: Order,
    original: Order,
    occurred_at: datetime,
    event: DomainEvent | None,
    block: SourceTransaction | None,
    extra: dict[str, Any],
) -> None:
    sent = change(
        kind=Kind.UPDATED,
        version=2,
        key=current.order_id,
        current=current,
        original=original,
        occurred_at=occurred_at,
        event=event,
        transaction=block,
        extra=extra,
    )
    key, value, _ = CODEC.encode(sent)
    read = CODEC.decode(value)
    assert key.decode() == sent.key
    assert ORDER.validate(read.current or {}) == current
    assert ORDER.validate(read.original or {}) == original
    for field in ("id", "key", "version", "kind", "occurred_at", "event", "transaction", "extra"):
        assert getattr(read, field) == getattr(sent, field)
    assert CODEC.encode(read)[1] == value


def test_headers_are_cloudevents() -> None:
    sent = change(event=DomainEvent(type="OrderPlaced", data={"recordedAt": "x"}))
    _, value, headers = CODEC.encode(sent)
    wire = json.loads(value)
    assert dict(headers) == {
        "ce_specversion": b"1.0",
        "ce_id": str(sent.id).encode(),
        "ce_source": b"shop",
        "ce_type": b"OrderPlaced",
        "ce_time": wire["recordedAt"].encode(),
        "ce_subject": b"o-1",
        "content-type": b"application/json",
    }
    assert dict(CODEC.encode(change())[2])["ce_type"] == b"order.created"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_c16_nan_and_infinity_are_refused_by_field(value: float) -> None:
    with pytest.raises(InvalidChange, match="weight: NaN"):
        CODEC.encode(change(current=Order(order_id="o-1", weight=value)))


def test_c19_nul_characters_are_refused_but_an_escaped_backslash_is_not() -> None:
    with pytest.raises(InvalidChange, match="NUL"):
        CODEC.encode(change(current=Order(order_id="o-1", note="a\x00b")))
    CODEC.encode(change(current=Order(order_id="o-1", note="a\\u0000b")))


@pytest.mark.parametrize("field", ["api_version", "service_name", "identifier"])
def test_empty_provenance_is_refused_by_field(field: str) -> None:
    names = {"api_version": "v1", "service_name": "s", "identifier": "i", field: ""}
    with pytest.raises(MissingProvenance, match=field):
        CODEC.encode(change(provenance=Provenance(**names)))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"current": None}, "current: must be required when created"),
        ({"original": Order(order_id="o-1")}, "original: must be empty when created"),
        ({"kind": Kind.DELETED}, "current: must be empty when deleted"),
        ({"kind": Kind.UPDATED}, "original: must be required when updated"),
        ({"kind": Kind.EVENT, "original": Order(order_id="o-1")}, "original: must be empty"),
        ({"version": 0}, "versions start at 1"),
        ({"occurred_at": datetime(2026, 1, 1)}, "occurredAt: the time has no UTC offset"),  # noqa: DTZ001
        ({"event": DomainEvent(type="T" * 20_000)}, "key, service and event type have 20,0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidChange, match=word):
        CODEC.encode(change(**fields))


def test_a_change_over_the_limit_names_the_limit() -> None:
    small = ChangeCodec(ORDER, message_bytes_max=2000)
    with pytest.raises(ChangeTooLarge, match=r"log\.message_bytes_max is 2,000"):
        small.encode(change(current=Order(order_id="o-1", note="x" * 2000)))


def test_of_the_states_before_and_after_only_the_larger_one_counts() -> None:
    small = ChangeCodec(ORDER, message_bytes_max=2000)
    before, after = Order(order_id="o-1", note="x" * 1200), Order(order_id="o-1", note="y" * 1200)
    _, created, _ = small.encode(change(current=before))
    _, updated, _ = small.encode(change(kind=Kind.UPDATED, original=before, current=after))
    _, deleted, _ = small.encode(change(kind=Kind.DELETED, original=after, current=None))
    assert len(created) < 2000 < len(updated)
    assert len(deleted) < 2000
    larger = Order(order_id="o-1", note="z" * 1800)
    with pytest.raises(ChangeTooLarge, match="the larger of its two states counts"):
        small.encode(change(kind=Kind.UPDATED, original=before, current=larger))


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"[]", b'"x"', b"{}", b'{"id": 1}', b"\xff\xfe"],
)
def test_malformed_messages_are_refused(value: bytes) -> None:
    with pytest.raises(InvalidChange):
        CODEC.decode(value)


@pytest.mark.parametrize("field", ["occurredAt", "recordedAt"])
def test_a_time_that_would_be_rounded_is_refused(field: str) -> None:
    """Go and Java write nanoseconds; a finer zero changes nothing."""
    message = json.loads(CODEC.encode(change())[1])
    message[field] = "2026-11-21T08:00:00.123456000Z"
    read = CODEC.decode(json.dumps(message).encode())
    assert NOW in (read.occurred_at, read.recorded_at)
    message[field] = "2026-11-21T08:00:00.9999999Z"
    with pytest.raises(InvalidChange, match=f"{field}: it has parts of a microsecond"):
        CODEC.decode(json.dumps(message).encode())


def test_a_change_of_another_entity_is_refused() -> None:
    value = CODEC.encode(change())[1].replace(b'"entity":"order"', b'"entity":"guest"')
    with pytest.raises(InvalidChange, match="guest"):
        CODEC.decode(value)


def test_a_source_row_read_twice_gives_the_same_id() -> None:
    first = derived_change_id("pg.shop", "0/16B3748", 0)
    assert first == derived_change_id("pg.shop", "0/16B3748", 0)
    assert first != derived_change_id("pg.shop", "0/16B3748", 1)
    assert isinstance(new_change_id(), UUID)
    assert new_change_id().version == 7


@pytest.mark.parametrize("event", [b'"text"', b"5", b"{}", b'{"type":7}', b"[]"])
def test_an_event_without_a_type_is_told(event: bytes) -> None:
    _, value, _ = CODEC.encode(change())
    broken = value.replace(b'"event":null', b'"event":' + event)
    assert broken != value
    with pytest.raises(InvalidChange, match="event: it has no type"):
        CODEC.decode(broken)
