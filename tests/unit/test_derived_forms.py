"""What a change becomes in a derived topic, without a log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from everstate.app import App
from everstate.changes import Change, ChangeCodec, DomainEvent, EntityType, Provenance
from everstate.changes.derived import (
    Derivation,
    Joined,
    derivation_of,
    joined,
    notices_of,
    patch_of,
    read_message,
)
from everstate.changes.triggers import when
from everstate.errors import InvalidDerivation
from everstate.pipeline.derive.verify import _Asked
from kit.changes import change_of
from kit.models import Guest

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
WHO = Provenance(api_version="v1", service_name="desk", identifier="d", actor="ann")


Percent = Annotated[Decimal, Field(max_digits=6, decimal_places=2)]


class Scan(BaseModel):
    scan_id: str
    guest: str | None = None


GUEST, SCAN = EntityType("guest", Guest, "guest_id"), EntityType("scan", Scan, "scan_id")
TYPES = {"guest": GUEST, "scan": SCAN}


def change(kind: EntityType, original: Any, current: Any, event: str | None = None) -> Change[Any]:
    told = None if event is None else DomainEvent(type=event)
    known = {"id": UUID(int=7), "event": told}
    return change_of(kind.name, "a", 3, current, original, who=WHO, at=NOW, **known)


def message(kind: EntityType, *states: Any) -> Any:
    return read_message(ChangeCodec(kind).encode(change(kind, *states))[1])


ANN, BOB = Guest(guest_id="a", city="Wien"), Guest(guest_id="a", city="Graz")


def test_a_record_says_in_its_headers_which_change_it_is_of() -> None:
    found = dict(Derivation("p", patch_of("guest")).headers(message(GUEST, ANN, BOB), 42))
    assert json.loads(found.pop("everstate_provenance"))["actor"] == "ann"
    assert {name: value.decode() for name, value in found.items()} == {
        "ce_specversion": "1.0",
        "ce_id": str(UUID(int=7)),
        "ce_source": "desk",
        "ce_type": "guest.updated",
        "ce_time": "2026-01-01T12:00:00Z",
        "ce_subject": "a",
        "content-type": "application/json-patch+json",
        "everstate_version": "3",
        "everstate_kind": "updated",
        "everstate_offset": "42",
    }
    moved = message(GUEST, ANN, BOB, "GuestMoved")
    assert dict(Derivation("p", patch_of("guest")).headers(moved, 1))["ce_type"] == b"GuestMoved"


@pytest.mark.parametrize(
    ("original", "current", "patch", "notice"),
    [
        (ANN, BOB, [("replace", "/city", "Graz")], ("Wien", "Graz")),
        (None, ANN, [("replace", "", {"guest_id": "a", "city": "Wien"})], None),
        (ANN, None, [("replace", "", None)], ("Wien", None)),
        (ANN, ANN, [], ("Wien", "Wien")),
    ],
)
def test_forms_of_a_change(original: Any, current: Any, patch: Any, notice: Any) -> None:
    of = message(GUEST, original, current)
    steps = json.loads(patch_of("guest").value(of, None) or b"")
    assert [(step["op"], step["path"], step["value"]) for step in steps] == patch
    told = notices_of("guest").value(of, None)
    if notice is None:
        assert told is None
        return
    read = json.loads(told or b"")
    assert read["key"] == "a"
    assert ((read["old"] or {}).get("city"), (read["new"] or {}).get("city")) == notice


def test_a_joined_record_has_the_entity_and_its_version() -> None:
    form = joined("scan", to="guest", on="guest")
    of = message(SCAN, None, Scan(scan_id="s", guest="a"))
    own_key = form.own_key(TYPES)
    assert form.wanted(own_key, of) == ("a", NOW)
    assert form.wanted(own_key, message(SCAN, None, Scan(scan_id="s"))) is None
    found = json.loads(form.value(of, Joined(2, b'{"city":"Wien"}', ((0, 5), (1, 9)))) or b"")
    assert found == {
        "scan": {"scan_id": "s", "guest": "a"},
        "guest": {"city": "Wien"},
        "joined": {"entity": "guest", "version": 2, "position": {"0": 5, "1": 9}},
    }
    assert json.loads(form.value(of, None) or b"")["joined"] is None


class Rate(BaseModel):
    percent: Percent


class Slot(BaseModel):
    begins: datetime


class Sale(BaseModel):
    sale_id: str
    percent: Percent | None = None
    begins: datetime | None = None
    label: str | None = None
    weight: float | None = None
    tags: list[str] = []


SALE = EntityType("sale", Sale, "sale_id")
SOLD = {
    "sale": SALE,
    "rate": EntityType("rate", Rate, "percent"),
    "slot": EntityType("slot", Slot, "begins"),
    **TYPES,
}


@pytest.mark.parametrize(
    ("to", "on", "sale", "key"),
    [
        ("rate", "percent", {"percent": Decimal("2.50")}, "2.5"),
        ("rate", "label", {"label": "2.50"}, "2.5"),
        ("rate", "label", {"label": "none"}, "none"),
        ("slot", "begins", {"begins": "2026-01-01T13:00:00+01:00"}, "2026-01-01T12:00:00Z"),
        ("guest", "label", {"label": "2.50"}, "2.50"),
    ],
)
def test_a_joined_record_asks_for_the_key_that_the_other_entity_has(
    to: str, on: str, sale: Any, key: str
) -> None:
    form = joined("sale", to=to, on=on)
    of = message(SALE, None, Sale(sale_id="s", **sale))
    own_key = form.own_key(SOLD)
    assert form.wanted(own_key, of) == (key, NOW)
    recorded = ChangeCodec(SALE).encode(change(SALE, None, Sale(sale_id="s", **sale)))[1]
    assert _Asked(form, own_key)(recorded) == key, "the proof asks for the same one"


def test_a_record_has_the_key_that_an_entity_gets_when_it_is_written() -> None:
    at = datetime.fromisoformat("2026-01-01T13:00:00+01:00")
    of = message(SALE, None, Sale(sale_id="s", percent=Decimal("2.50"), begins=at))
    for to, on, entity in (
        ("rate", "percent", Rate(percent=Decimal("2.50"))),
        ("slot", "begins", Slot(begins=at)),
    ):
        form = joined("sale", to=to, on=on)
        assert form.wanted(form.own_key(SOLD), of) == (SOLD[to].key_of(entity), NOW)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (joined("sale", to="sale", on="label"), "the name sale twice"),
        (joined("sale", to="joined", on="label"), "own member 'joined'"),
        (joined("joined", to="sale", on="sale_id"), "own member 'joined'"),
        (joined("sale", to="guest", on="weight"), "weight is a float"),
        (joined("sale", to="guest", on="tags"), "tags is a list"),
    ],
)
def test_a_join_that_loses_a_record_or_finds_none_is_refused(form: Any, reason: str) -> None:
    with pytest.raises(InvalidDerivation, match=reason):
        Derivation("j", form).check({**SOLD, "joined": EntityType("joined", Sale, "sale_id")})


def test_a_definition_that_is_noted_makes_the_same_derivation_again() -> None:
    for made in (
        Derivation("p", patch_of("guest"), True),
        Derivation("n", notices_of("guest"), trigger=when("city").changes(to="Wien")),
        Derivation("j", joined("scan", to="guest", on="guest")),
    ):
        again = derivation_of(made.name, json.loads(json.dumps(made.definition)))
        assert (again, again.fingerprint) == (made, made.fingerprint)
    with pytest.raises(InvalidDerivation, match="not known"):
        derivation_of("x", {"derives": {"totals_of": "guest"}})


@pytest.mark.parametrize(
    ("form", "options", "reason"),
    [
        (patch_of("gust"), {}, "unknown entity type 'gust'"),
        (joined("scan", to="gast", on="guest"), {}, "'gast'"),
        (joined("scan", to="guest", on="gast"), {}, "no field 'gast'"),
        (joined("scan", to="guest", on="guest"), {"raw": True}, "history"),
        (joined("scan", to="bare", on="guest"), {}, "history=False"),
        (patch_of("guest"), {"when": when("town").changes()}, "no field 'town'"),
        (patch_of("guest"), {"when": when("city")}, "when has no condition on a change"),
        ("guest", {}, "is no form of a derived topic"),
        (patch_of(["guest"]), {}, "unknown entity type"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_derived_is_refused_when_it_is_declared(
    form: Any, options: Any, reason: str
) -> None:
    app = App("hotel")
    app.entity("guest", key="guest_id")(Guest)
    app.entity("scan", key="scan_id", source="log")(Scan)
    app.entity("bare", key="guest_id", history=False)(Guest)
    with pytest.raises(InvalidDerivation, match=f"derived topic out: .*{reason}"):
        app.derive("out", form, **options)
    assert not app.derivations
    app.derive("out", patch_of("guest"))
    for name in ("out", "guest", "guest_history", "Out", "a b", "x__v1"):
        with pytest.raises(InvalidDerivation):
            app.derive(name, patch_of("guest"))
