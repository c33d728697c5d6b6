"""Generated changes: purchases with nested lines, up to four changes each, about 610 bytes.

A shop that has been open for a while: every fourth change places a purchase, the others pay,
pack and ship ones that were placed 20,000, 240,000 and 480,000 changes before. The last two lie
further apart than a keeper's batch, and the keys are in no order, so that a view's rows are
really updated, all over the table, and the state grows with the log. What a log would owe to
purchases from before its begin are placed purchases that nothing follows: of its first million
changes 56 % are updates, of its fourth all but a quarter.

The same data in three forms, which a unit test holds equal: ``changes`` (objects, for the ways
in), ``plain`` (dicts, for orjson's floor) and ``messages`` (text formatted directly, fast enough
to fill logs of millions). Everything follows from the index alone: no randomness, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, Field

from everstate.changes import Change, EntityType, Kind, Provenance

CHANGES_PER_KEY = 4
STEPS = ("placed", "paid", "packed", "shipped")
COUNTRIES = ("AT", "BE", "CH", "DE", "ES", "FR", "GB", "IE", "IT", "NL", "PL", "SE")
ENTITY = "purchase"
PLACED_BEFORE = (0, 5_000, 60_000, 120_000)
"""How many purchases were placed between a purchase and each of its steps."""
_FOLLOWED_BY_NOTHING = 500_000_000
_KEYS = 1_000_000_000
_SHUFFLE = 387_420_489
"""Coprime to the number of keys: numbers times this are keys in no order, each once."""

Money = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


class Line(BaseModel):
    """One line of a purchase."""

    sku: str
    qty: int


class Purchase(BaseModel):
    """A purchase: the model that all benches write and keep."""

    id: str
    country: str
    status: str
    total: Money
    lines: list[Line]


PURCHASE = EntityType(ENTITY, Purchase, "id", 1)
PROVENANCE = Provenance(api_version="v1", service_name="shop", identifier="till")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_STEP = timedelta(milliseconds=1)
_ID_BASE = UUID("0199c8a2-0000-7000-8000-000000000000").int


@dataclass(frozen=True, slots=True)
class Place:
    """Which key and which of its steps the n-th change is."""

    number: int
    step: int


def place(index: int) -> Place:
    """The key's number and the step (0 to 3) of the change at an index of the log."""
    placed, step = divmod(index, CHANGES_PER_KEY)
    number = placed - PLACED_BEFORE[step]
    return Place(number, step) if number >= 0 else Place(_FOLLOWED_BY_NOTHING + index, 0)


def key_of(number: int) -> str:
    """Key of a purchase; neighbours in number are far apart in the order of keys."""
    return f"P{number * _SHUFFLE % _KEYS:09d}"


def purchase(number: int, step: int) -> Purchase:
    """State of a purchase after a step; one line in packed and shipped ones is dearer."""
    return Purchase.model_construct(
        id=key_of(number),
        country=COUNTRIES[number % len(COUNTRIES)],
        status=STEPS[step],
        total=Decimal(cents_of(number, step)).scaleb(-2),
        lines=[Line.model_construct(sku=f"S{number % 9973:04d}", qty=1 + number % 5)],
    )


def cents_of(number: int, step: int) -> int:
    """Total of a purchase after a step."""
    return 1_000 + number * 7 % 90_000 + (250 if step >= 2 else 0)


def change(index: int) -> Change[Purchase]:
    """The change at an index of the log."""
    at = place(index)
    moment = EPOCH + index * _STEP
    return Change(
        id=UUID(int=_ID_BASE + index),
        entity=ENTITY,
        schema_version=1,
        key=key_of(at.number),
        version=at.step + 1,
        kind=Kind.UPDATED if at.step else Kind.CREATED,
        occurred_at=moment,
        recorded_at=moment,
        provenance=PROVENANCE,
        current=purchase(at.number, at.step),
        original=purchase(at.number, at.step - 1) if at.step else None,
    )


def changes(start: int, end: int) -> Iterator[Change[Purchase]]:
    """The changes of ``[start, end)`` as objects; about 100,000 a second."""
    return map(change, range(start, end))


def plain(index: int) -> dict[str, Any]:
    """The change at an index as a dict of plain JSON values, in the order of the wire."""
    at = place(index)
    moment = _text(index)
    return {
        "id": str(UUID(int=_ID_BASE + index)),
        "entity": ENTITY,
        "schemaVersion": 1,
        "key": key_of(at.number),
        "version": at.step + 1,
        "kind": "updated" if at.step else "created",
        "occurredAt": moment,
        "recordedAt": moment,
        "event": None,
        "provenance": {
            "apiVersion": PROVENANCE.api_version,
            "serviceName": PROVENANCE.service_name,
            "identifier": PROVENANCE.identifier,
            "actor": None,
            "reason": None,
            "correlationId": None,
            "causationId": None,
            "transaction": None,
        },
        "currentEntityState": purchase(at.number, at.step).model_dump(mode="json"),
        "originalEntityState": purchase(at.number, at.step - 1).model_dump(mode="json")
        if at.step
        else None,
    }


_PROVENANCE_TEXT = (
    '{"apiVersion":"v1","serviceName":"shop","identifier":"till","actor":null,"reason":null,'
    '"correlationId":null,"causationId":null,"transaction":null}'
)


def message(index: int) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    """Key, value and headers of the change at an index, formatted directly."""
    at = place(index)
    key = key_of(at.number)
    original = state_text(key, at.number, at.step - 1) if at.step else None
    current = state_text(key, at.number, at.step)
    return key.encode(), *written(_ID_BASE + index, key, at.step + 1, index, current, original)


def written(
    change_id: int, key: str, version: int, index: int, current: str, original: str | None
) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Value and headers of a change with these states, given as JSON texts."""
    code, moment = f"{change_id:032x}", _text(index)
    code = f"{code[:8]}-{code[8:12]}-{code[12:16]}-{code[16:20]}-{code[20:]}"
    kind = "created" if original is None else "updated"
    value = (
        f'{{"id":"{code}","entity":"{ENTITY}","schemaVersion":1,"key":"{key}",'
        f'"version":{version},"kind":"{kind}","occurredAt":"{moment}","recordedAt":"{moment}",'
        f'"event":null,"provenance":{_PROVENANCE_TEXT},'
        f'"currentEntityState":{current},"originalEntityState":{original or "null"}}}'
    )
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", code.encode()),
        ("ce_source", b"shop"),
        ("ce_type", f"{ENTITY}.{kind}".encode()),
        ("ce_time", moment.encode()),
        ("ce_subject", key.encode()),
        ("content-type", b"application/json"),
    ]
    return value.encode(), headers


def state_text(key: str, number: int, step: int, cents: int | None = None) -> str:
    """State of a purchase as JSON; ``cents``: another total than the step's."""
    cents = cents_of(number, step) if cents is None else cents
    return (
        f'{{"id":"{key}","country":"{COUNTRIES[number % len(COUNTRIES)]}",'
        f'"status":"{STEPS[step]}","total":"{cents // 100}.{cents % 100:02d}",'
        f'"lines":[{{"sku":"S{number % 9973:04d}","qty":{1 + number % 5}}}]}}'
    )


def _text(index: int) -> str:
    """RFC 3339 of a change's moment, as the codec writes it: no fraction when it is zero."""
    moment = (EPOCH + index * _STEP).replace(tzinfo=None)
    return moment.isoformat() + "Z"
