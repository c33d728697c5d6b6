"""Who calls, what a request says of itself, and what a list may be filtered by."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import AnyUrl, BaseModel, BeforeValidator, Field

from callers import caller_entry
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import EntityType
from everstate.config import load
from everstate.errors import (
    InvalidConfig,
    InvalidEntityType,
    InvalidQuery,
    InvalidRequest,
    MissingProvenance,
    RequestTooLarge,
    Unauthenticated,
    UnsupportedMediaType,
    WrongSource,
)
from everstate.http.answers import HttpRequest, check_length, content_type_of
from everstate.http.callers import (
    Caller,
    Callers,
    idempotency_key_of,
    occurred_at_of,
    provenance_of,
)
from everstate.http.tokens import hash_of
from everstate.sources.crud.filters import Filters

SECRET = "correct-horse-battery"
TOKENS = ApiConfig(
    tokens={
        "desk": caller_entry(SECRET),
        "web": caller_entry("another-long-token", "web", "w"),
    }
)


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Level(IntEnum):
    LOW = 10


class Room(BaseModel):
    number: int
    floor: Annotated[int, Field(ge=0)] | None = None
    size: Size = Size.SMALL
    view: Literal["sea", "yard"] = "sea"
    free: bool = True
    since: date | None = None
    owner: UUID | None = None
    area: float = 1.0
    price: Annotated[Decimal, Field(max_digits=8, decimal_places=2)] = Decimal(0)
    cleaned_at: datetime | None = None
    beds: list[str] = []
    kind: str | None = Field(default=None, alias="roomKind")
    level: Level | None = None
    smokes: Annotated[bool, BeforeValidator(lambda given: given == "oui")] = False


FILTERS = Filters(EntityType("room", Room, "number"))


def test_a_token_names_its_caller_and_no_other_does() -> None:
    callers = Callers(TOKENS)
    assert not callers.local
    found = callers.caller({"authorization": f"Bearer {SECRET}"})
    assert (found.name, found.service, found.identifier) == ("desk", "desk", "clerk-7")
    assert callers.caller({"authorization": "bearer another-long-token"}).service == "web"
    for wrong in ("", f"Basic {SECRET}", SECRET, f"Bearer {SECRET}x", "Bearer ", "Bearer é"):
        with pytest.raises(Unauthenticated):
            callers.caller({"authorization": wrong, "everstate-service": "desk"})


def test_without_tokens_headers_name_the_caller_and_a_write_needs_them() -> None:
    callers = Callers(ApiConfig())
    headers = {"everstate-service": "desk", "everstate-actor": "Zoë".encode().decode("latin-1")}
    caller = callers.caller(headers)
    with pytest.raises(MissingProvenance, match="Everstate-Identifier"):
        provenance_of(headers, caller, api_version="v1", entity="room", key="1")
    caller = callers.caller({**headers, "everstate-identifier": "clerk-7"})
    made = provenance_of(headers, caller, api_version="v1", entity="room", key="1")
    assert (made.service_name, made.identifier, made.actor) == ("desk", "clerk-7", "Zoë")
    with pytest.raises(MissingProvenance, match="Everstate-Service"):
        provenance_of({}, callers.caller({}), api_version="v1", entity="room", key="1")


@pytest.mark.parametrize("value", ["", "  ", "x" * 501, "\xff", "a\x07b"])
def test_a_header_that_is_no_text_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="Everstate-Service"):
        Callers(ApiConfig()).caller({"everstate-service": value})


def test_a_token_is_never_shown(tmp_path: Any) -> None:
    assert SECRET not in repr(TOKENS)
    entry = f'[api.tokens.desk]\ntoken_hash = "{hash_of(SECRET)}"\n'
    (tmp_path / "everstate.toml").write_text(entry)
    with pytest.raises(InvalidConfig) as refusal:
        load(tmp_path)
    assert "service" in str(refusal.value)
    assert hash_of(SECRET) not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_an_idempotency_key_belongs_to_its_caller_and_its_request() -> None:
    def incoming(caller: str = "a", body: bytes = b"1", **headers: str) -> HttpRequest:
        said = {"idempotency-key": "k", **{n.replace("_", "-"): v for n, v in headers.items()}}
        return HttpRequest("PUT", "/v1/room/1", said, Caller("desk", caller), body)

    assert incoming().once_id == incoming(body=b"2").once_id
    assert incoming().once_id != incoming(caller="b").once_id
    assert incoming().fingerprint == incoming().fingerprint
    others = [incoming(body=b"2"), incoming(if_match='"1"'), incoming(if_none_match='"1"')]
    assert len({each.fingerprint for each in [incoming(), *others]}) == 4
    assert idempotency_key_of({"idempotency-key": '"k"'}) == "k"
    with pytest.raises(InvalidRequest):
        idempotency_key_of({"idempotency-key": '""'})


def test_the_time_of_a_request_has_an_offset() -> None:
    at = occurred_at_of({"everstate-occurred-at": "2026-01-01T10:00:00+02:00"})
    assert at is not None
    assert at.utcoffset() is not None
    for wrong in ("yesterday", "2026-01-01T10:00:00"):
        with pytest.raises(InvalidRequest):
            occurred_at_of({"everstate-occurred-at": wrong})


@pytest.mark.parametrize(
    ("declared", "accepted"),
    [
        ("application/json", True),
        ("Application/JSON; charset=UTF-8", True),
        ('application/json; charset="utf-8"; v=1', True),
        ('application/json; title="a;charset=latin-1"', True),
        ("application/json;charset=latin-1", False),
        ("text/plain", False),
        ("", False),
    ],
)
def test_a_body_says_that_it_is_json(declared: str, accepted: bool) -> None:
    headers = {"content-type": declared}
    if accepted:
        assert content_type_of(headers, ("application/json",)) == "application/json"
    else:
        with pytest.raises(UnsupportedMediaType):
            content_type_of(headers, ("application/json",))


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    for length in ("10", "0", "", "0" * 30 + "10"):
        check_length({"content-length": length} if length else {}, 10)
    for length in ("11", "1" * 40, "0" * 30 + "11"):
        with pytest.raises(RequestTooLarge):
            check_length({"content-length": length}, 10)
    with pytest.raises(InvalidRequest):
        check_length({"content-length": "-1"}, 10)


def test_scalar_fields_may_be_filtered_by_their_json_name() -> None:
    assert FILTERS.names == (
        "number",
        "floor",
        "size",
        "view",
        "free",
        "since",
        "owner",
        "area",
        "price",
        "roomKind",
        "level",
        "smokes",
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("number", "7", 7),
        ("floor", "null", None),
        ("size", "l", "l"),
        ("view", "yard", "yard"),
        ("free", "false", False),
        ("since", "2026-01-02", "2026-01-02"),
        ("number", "99999999999999999999", 99999999999999999999),
        ("area", "1.5", 1.5),
        ("area", " 1.50", 1.5),
        ("price", " 1.500", Decimal("1.5")),
        ("level", "10", 10),
        ("smokes", "oui", True),
        ("owner", "0199C8A2-7C11-7D3E-9A55-0D8F2F6B1C77", "0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77"),
        ("roomKind", "null", None),
        ("roomKind", "suite", "suite"),
        ("roomKind", '"null"', "null"),
        ("roomKind", "suite ", "suite "),
        ("roomKind", '"suite', '"suite'),
    ],
)
def test_a_filter_has_the_form_that_states_have(name: str, value: str, wanted: Any) -> None:
    assert FILTERS.parse([(name, value), ("limit", "3")]) == {name: wanted}


@pytest.mark.parametrize(
    "given",
    [
        [("number", "seven")],
        [("number", "null")],
        [("floor", "-1")],
        [("size", "xl")],
        [("area", "nan")],
        [("area", "0.10000000000000000001")],
        [("area", "1_0")],
        [("number", "1_0")],
        [("number", "10.0")],
        [("since", "1360281600")],
        [("since", "20130208")],
        [("free", "yes")],
        [("free", "1")],
        [("level", "1_0")],
        [("price", "1.001")],
        [("price", "nan")],
        [("price", "1_0")],
        [("cleaned_at", "2026-01-02T00:00:00Z")],
        [("colour", "red")],
        [("free", "true"), ("free", "false")],
        [("roomKind", "a\0")],
    ],
)
def test_what_cannot_be_filtered_is_refused(given: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidQuery):
        FILTERS.parse(given)


class Card(BaseModel):
    card_id: str
    limit: int
    cursor: str | None = None
    site: AnyUrl | None = None


def test_a_field_named_as_a_parameter_is_filtered_with_its_place_in_the_answer() -> None:
    filters = Filters(EntityType("card", Card, "card_id"))
    assert filters.names == ("card_id", "state.limit", "state.cursor", "site")
    assert filters.parse([("site", "http://a.b")]) == {"site": "http://a.b/"}
    asked = [("state.limit", "5"), ("state.cursor", "null"), ("state.card_id", "c"), ("limit", "3")]
    assert filters.parse(asked) == {"limit": 5, "cursor": None, "card_id": "c"}
    assert filters.schema("state.limit")["type"] == "integer"
    with pytest.raises(InvalidQuery, match=r"limit is 'many'"):
        filters.parse([("state.limit", "many")])
    with pytest.raises(InvalidQuery) as refused:
        FILTERS.parse([("cleaned_at", "2026-01-02T00:00:00Z")])
    assert "GET /query/v1/room?where=" in str(refused.value)


def test_an_entity_type_has_one_source_of_truth() -> None:
    app = App("hotel")
    app.entity("room", key="number")(Room)
    app.entity("seen", key="number", source="log")(Room)
    assert (app.source_of("room"), app.source_of("seen")) == ("store", "log")
    assert [each.name for each in app.entities_from("log")] == ["seen"]
    with pytest.raises(InvalidEntityType, match="its source of truth is 'store'"):
        app.entity("room", key="number", source="cassandra")(Room)
    with pytest.raises(InvalidEntityType, match="'tape'"):
        app.entity("taped", key="number", source="tape")  # type: ignore[arg-type]
    assert app.check_source("room", "store").name == "room"
    with pytest.raises(WrongSource, match="'log'"):
        app.check_source("seen", "store")
