"""`everstate schema export`: schemas that hold, checked by the published meta-schemas."""

from __future__ import annotations

import copy
import enum
import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema_rs
import pytest
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from everstate import App, Provenance
from everstate.changes.change import Kind
from everstate.changes.codec import WIRE_FIELDS, ChangeCodec, WireChange, WireProvenance
from everstate.changes.schemas import change_schema, state_schema
from everstate.cli import cli
from everstate.cli.asyncapi import command_schema, schema_files
from everstate.declarations.commands import CommandGroup
from everstate.log.topics import TopicNames
from kit.changes import change_of

ASYNCAPI = Path(__file__).with_name("asyncapi-3.0.0.json.gz")
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DESK = Provenance(api_version="v1", service_name="desk", identifier="clerk-7")

app = App("hotel")


class Level(enum.Enum):
    LOW = "low"


class Transaction(BaseModel):
    """A part of the envelope has this name, too."""

    model_config = ConfigDict(extra="forbid")
    amount: Annotated[Decimal, Field(max_digits=8, decimal_places=2)]


@app.entity("guest", key="guest_id", schema_version=3)
class Guest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    guest_id: str
    badge: UUID = UUID(int=1)
    level: Level = Level.LOW
    seen: AwareDatetime = NOW
    paid: list[Transaction] = []
    marks: dict[str, int] = {}
    share: float | None = None
    mood: Literal["good", "bad"] = Field(default="good", alias="Mood")


@app.entity("seat", key="seat_id", source="commands")
class Seat(BaseModel):
    seat_id: str
    guest: str | None = None


class Book(BaseModel):
    guest: str


class Booked(BaseModel):
    guest: str


def decide(state: Seat | None, command: Book) -> Booked:
    return Booked(guest=command.guest)


def evolve(state: Seat | None, fact: Booked) -> Seat:
    return Seat(seat_id="1", guest=fact.guest)


app.commands("seat", decide=decide, evolve=evolve, commands=[Book])
FILES = schema_files(app, TopicNames("hotel"))


class Paying:
    class Item(BaseModel):
        amount: int

    class Pay(BaseModel):
        item: Paying.Item


class Naming:
    class Item(BaseModel):
        name: str

    class Rename(BaseModel):
        item: Naming.Item


Paying.Pay.model_rebuild()
Naming.Rename.model_rebuild()


def test_two_commands_may_nest_different_models_of_one_name() -> None:
    group = CommandGroup(app.entities["seat"], decide, evolve, [Paying.Pay, Naming.Rename])
    schema = jsonschema_rs.validator_for(command_schema(group))
    written = {
        "id": str(UUID(int=1)),
        "entity": "seat",
        "key": "1",
        "occurredAt": NOW.isoformat(),
        "provenance": {},
    }
    pay = {**written, "command": "Pay", "data": {"item": {"amount": 1}}}
    rename = {**written, "command": "Rename", "data": {"item": {"name": "x"}}}
    assert schema.is_valid(pay)
    assert schema.is_valid(rename)
    assert not schema.is_valid({**pay, "data": rename["data"]})


def whole_guest() -> Guest:
    return Guest(guest_id="g1", paid=[Transaction(amount=Decimal("1.50"))], marks={"a": 1})


def message(kind: Kind = Kind.UPDATED) -> dict[str, Any]:
    """A change as the codec writes it."""
    change = change_of(
        "guest",
        "g1",
        2,
        None if kind is Kind.DELETED else whole_guest(),
        None if kind in (Kind.CREATED, Kind.EVENT) else whole_guest(),
        who=DESK,
        at=NOW,
        kind=kind,
        schema_version=3,
    )
    _, value, _ = ChangeCodec(app.entity_type("guest")).encode(change)
    decoded: dict[str, Any] = json.loads(value)
    return decoded


def asyncapi_errors(document: Any) -> list[str]:
    validator = jsonschema_rs.validator_for(json.loads(gzip.decompress(ASYNCAPI.read_bytes())))
    return [error.message for error in validator.iter_errors(document)]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".schema.json")])
def test_each_schema_is_a_schema_of_its_own_dialect(name: str) -> None:
    assert FILES[name]["$schema"].endswith("draft-07/schema#")
    jsonschema_rs.meta.validate(FILES[name])
    broken = {**FILES[name], "type": "no type"}
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.meta.validate(broken)


def test_the_topics_are_a_document_of_asyncapi() -> None:
    document = FILES["asyncapi.json"]
    assert asyncapi_errors(document) == []
    assert {each["address"] for each in document["channels"].values()} == {
        *("hotel.guest.changes.g1", "hotel.guest.state.g1"),
        *("hotel.seat.changes.g1", "hotel.seat.state.g1"),
        *("hotel.seat.commands.g1", "hotel.seat.replies.g1"),
    }
    for part, wrong in (("operations", {"x": {"action": "shout"}}), ("info", {"title": "t"})):
        assert asyncapi_errors({**document, part: wrong}) != [], part


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for each in value.values() for found in references(each)]
    return (
        [found for each in value for found in references(each)] if isinstance(value, list) else []
    )


def test_every_reference_leads_to_something() -> None:
    for name, file in FILES.items():
        for target in references(file):
            there, _, path = target.partition("#")
            place: Any = FILES[there.removeprefix("./")] if there else file
            for step in [step for step in path.split("/") if step]:
                place = place[step]
            assert place, f"{name}: {target}"


@pytest.mark.parametrize("kind", list(Kind))
def test_a_message_that_the_codec_writes_is_valid(kind: Kind) -> None:
    validator = jsonschema_rs.validator_for(FILES["guest.change.schema.json"])
    assert [error.message for error in validator.iter_errors(message(kind))] == []


def planted(at: str, value: Any) -> dict[str, Any]:
    wrong = copy.deepcopy(message())
    *path, last = at.split(".")
    place: Any = wrong
    for step in path:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return wrong


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("version", 0),
        ("kind", "created"),
        ("kind", "renamed"),
        ("entity", "seat"),
        ("recordedAt", None),
        ("recordedAt", "2026-11-21T08:00:00.0000001Z"),
        ("occurredAt", "2026-11-21T08:00:00.1234567+01:00"),
        ("provenance.serviceName", None),
        ("provenance.identifier", ""),
        ("originalEntityState", None),
        ("currentEntityState.guest_id", 7),
        ("currentEntityState.Mood", "mixed"),
        ("currentEntityState.marks", {"a": "many"}),
        ("currentEntityState.paid", [{"amount": True}]),
        ("currentEntityState.guest_id", None),
    ],
)
def test_a_planted_wrong_message_is_refused(at: str, value: Any) -> None:
    validator = jsonschema_rs.validator_for(FILES["guest.change.schema.json"])
    assert not validator.is_valid(planted(at, value))


def test_what_another_version_of_the_model_wrote_is_valid() -> None:
    validator = jsonschema_rs.validator_for(FILES["guest.change.schema.json"])
    assert validator.is_valid(planted("currentEntityState.later", "field"))
    assert validator.is_valid(planted("currentEntityState.level", None))
    assert validator.is_valid(planted("later", "field of the envelope"))
    assert validator.is_valid(planted("occurredAt", "2026-11-21T08:00:00.123456000Z"))


def test_a_command_has_the_data_of_its_own_model() -> None:
    validator = jsonschema_rs.validator_for(FILES["seat.command.schema.json"])
    command = {
        "id": str(UUID(int=5)),
        "entity": "seat",
        "key": "1",
        "command": "Book",
        "data": {"guest": "g1"},
        "occurredAt": NOW.isoformat(),
        "provenance": {},
    }
    assert validator.is_valid(command)
    assert not validator.is_valid({**command, "data": {"guest": 1}})
    assert not validator.is_valid({**command, "command": "Sell"})


def test_the_envelope_has_the_fields_that_the_codec_writes() -> None:
    schema = change_schema(app.entity_type("guest"))
    assert set(schema["properties"]) == {*WIRE_FIELDS, "source"}
    optional = {"event", "currentEntityState", "originalEntityState"}
    assert set(schema["required"]) == WIRE_FIELDS - optional
    provenance = schema["definitions"]["Provenance"]["properties"]
    assert set(provenance) == set(WireProvenance.__struct_encode_fields__)
    assert set(WireChange.__struct_encode_fields__) == WIRE_FIELDS
    assert "amount" in schema["definitions"]["Transaction_"]["properties"]
    assert "index" in schema["definitions"]["Transaction"]["properties"]


def test_the_state_alone_is_described_too() -> None:
    validator = jsonschema_rs.validator_for(state_schema(app.entity_type("guest")))
    assert validator.is_valid(json.loads(app.entity_type("guest").encode(whole_guest())))
    assert not validator.is_valid({"guest_id": 1})


def test_the_verb_writes_the_files(tmp_path: Path) -> None:
    project = tmp_path / "p"
    CliRunner().invoke(cli, ["init", str(project)])
    folder = tmp_path / "out"
    done = CliRunner().invoke(cli, ["-C", str(project), "schema", "export", str(folder)])
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in folder.iterdir()) == [
        "asyncapi.json",
        "parcel.change.schema.json",
        "parcel.state.schema.json",
    ]
    assert asyncapi_errors(json.loads((folder / "asyncapi.json").read_text("utf-8"))) == []
