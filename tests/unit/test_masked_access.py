"""What a caller with masks may read: views that are refused, and fields of an earlier model."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from starlette.requests import Request

from callers import caller_entry
from everstate.api.access import check_access
from everstate.api.view_router import admit_to_view
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import Kind
from everstate.config import Config, StoreConfig
from everstate.errors import InvalidBody, InvalidConfig, NotPermitted
from everstate.http.asgi import Desk
from everstate.http.callers import Caller, Callers
from everstate.http.masks import MASKED, Mask
from everstate.serving import Place, Reader, Version, differences
from everstate.serving.masking import masked_version
from everstate.views.declaring import refused_views_recorded

TOKEN = "es_a-token-for-a-test"
WELL = "SELECT guest_id, passport FROM guest"
MISTAKEN = "SELECT guest_id, passport FROM guest WHERE arrived > 1"


class Guest(BaseModel):
    guest_id: str
    passport: str | None = None


def hotel(notes: str) -> App:
    """An app with the view `notes`."""
    app = App("hotel")
    app.entity("guest", key="guest_id")(Guest)
    with refused_views_recorded():
        app.view("notes", sql=notes)
    return app


def reading_desk(permissions: dict[str, Any]) -> Desk:
    """A desk whose caller may read, without `unmasked` where the permissions lack it."""
    entry = caller_entry(TOKEN, permissions=permissions)
    settings = ApiConfig(masks={"guest": ("passport",)}, tokens={"web": entry})
    return Desk(Callers(settings), body_bytes_max=1_000, threads=1)


def request() -> Request:
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "query_string": b""}
    return Request({**scope, "path_params": {"view": "notes"}})


def admitted(app: App, permissions: dict[str, Any]) -> Caller:
    return admit_to_view(reading_desk(permissions), request(), app)


@pytest.mark.parametrize("notes", [WELL, MISTAKEN])
def test_a_view_is_refused_to_a_masked_caller_also_when_its_declaration_has_a_mistake(
    notes: str,
) -> None:
    app = hotel(notes)
    with pytest.raises(NotPermitted, match="`unmasked` on guest, for the rows of view notes"):
        admitted(app, {"*": ("read",)})
    assert admitted(app, {"*": ("read", "unmasked")}).name == "web"
    assert admitted(app, {"*": ("read",), "guest": ("read", "unmasked")}).name == "web"
    with pytest.raises(NotPermitted, match="`read` on"):
        admitted(app, {"room": ("read", "unmasked")})


@pytest.mark.parametrize("notes", [WELL, MISTAKEN])
def test_a_reader_with_masks_shows_no_rows_of_a_refused_view(notes: str) -> None:
    caller = reading_desk({"*": ("read",)}).identify(request())
    config = Config(store=StoreConfig(dsn="host=never.invalid"))
    with Reader(config, hotel(notes)) as reader:
        reader.masks = caller.mask
        with pytest.raises(NotPermitted, match="the rows of view notes"):
            reader.rows("notes")


class RenamedGuest(BaseModel):
    guest_id: str
    passport_no: str | None = None
    visits: list[dict[str, int]] = []


def settings(former: tuple[str, ...]) -> ApiConfig:
    return ApiConfig(
        masks={"guest": ("passport_no",)},
        former_masks={"guest": former},
        tokens={"web": caller_entry(TOKEN, permissions={"*": ("read",)})},
    )


def renamed() -> App:
    app = App("hotel")
    app.entity("guest", key="guest_id", schema_version=2)(RenamedGuest)
    return app


def test_a_field_that_left_the_model_is_masked_in_older_states() -> None:
    given = settings(("passport", "card.number"))
    check_access(given, renamed())
    mask = Callers(given).caller({"authorization": f"Bearer {TOKEN}"}).mask("guest")
    for older in ({"passport": "P-4711"}, {"card": {"number": "4711"}}, {"passport_no": "P-4711"}):
        state = {"guest_id": "g1", **older}
        assert "4711" not in json.dumps(mask.state(state))
        assert b"4711" not in mask.json(json.dumps(state).encode())
    with pytest.raises(NotPermitted):
        mask.refuse(("passport",), "a condition on")


@pytest.mark.parametrize("former", ["passport_no", "guest_id", "", "card..number"])
def test_a_slip_in_the_fields_of_earlier_models_is_refused(former: str) -> None:
    with pytest.raises(InvalidConfig, match=r"api\.former_masks\.guest is"):
        check_access(settings((former,)), renamed())


def test_a_mask_of_a_field_that_the_model_lacks_is_refused_and_says_where_it_belongs() -> None:
    slipped = settings(()).model_copy(update={"masks": {"guest": ("passport",)}})
    with pytest.raises(InvalidConfig, match=r"a field of guest; .* in api\.former_masks"):
        check_access(slipped, renamed())


def test_masks_of_fields_of_earlier_models_need_tokens_too() -> None:
    with pytest.raises(InvalidConfig, match=r"api\.former_masks .* tokens"):
        check_access(ApiConfig(former_masks={"guest": ("passport",)}), renamed())


@pytest.mark.parametrize(
    ("visits", "shown"),
    [
        ([{"price": 4711}, {"room": 3}], [{"price": MASKED}, {"room": 3}]),
        ([[{"price": 4711}], None], [[{"price": MASKED}], None]),
        ({"price": 4711, "room": 3}, {"price": MASKED, "room": 3}),
        ({"a": {"price": 4711}}, MASKED),
        ([{"a": [{"price": 4711}]}], MASKED),
        ('[{"price": 4711}]', MASKED),
        ([{"room": 3}, "4711"], MASKED),
        (4711, MASKED),
        ({"room": {"number": 3}}, {"room": {"number": 3}}),
        (None, None),
        ([], []),
    ],
)
def test_a_value_of_another_form_than_the_mask_expects_is_hidden_as_a_whole(
    visits: Any, shown: Any
) -> None:
    mask = Mask("guest", ("visits.price",))
    state = {"guest_id": "g1", "visits": visits}
    assert mask.state(state) == {"guest_id": "g1", "visits": shown}
    assert json.loads(mask.json(json.dumps(state).encode())) == mask.state(state)
    assert mask.within(("visits",), visits) == shown
    if shown == MASKED:
        with pytest.raises(InvalidBody, match="does not see"):
            mask.check_written(mask.state(state))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": {"price": 1, "d": 1}}, {"a": {"price": 2, "d": 1}}, ("visits", MASKED, MASKED)),
        ({"a": {"b": {"price": 1}}}, {"a": {"b": {"price": 2}}}, ("visits", MASKED, MASKED)),
        ({"a": [{"price": 1}], "d": 1}, {"a": [], "d": 1}, ("visits.a", MASKED, [])),
        ({"price": 1}, {"price": 2}, ("visits.price", MASKED, MASKED)),
        ("1", "2", ("visits", MASKED, MASKED)),
        ({"room": 1}, {"room": 2}, ("visits.room", 1, 2)),
    ],
)
def test_differences_of_a_value_of_another_form_show_no_hidden_value(
    before: Any, after: Any, expected: tuple[str, Any, Any]
) -> None:
    at, place = datetime(2026, 1, 1, tzinfo=UTC), Place(1, 0, 0)
    states = {"visits": before}, {"visits": after}
    version = Version(
        "guest", "g1", 2, Kind.UPDATED, states[1], at, at, at, UUID(int=1), {}, None, None, place,
        differences(*states),
    )  # fmt: skip
    found = masked_version(version, Mask("guest", ("visits.price",)))
    assert [(each.path, each.before, each.after) for each in found.differences] == [expected]


def test_a_change_with_a_number_of_thousands_of_digits_is_masked() -> None:
    digits = "9" * 4_301
    wire = f'{{"currentEntityState":{{"visits":[{{"price":1,"n":{digits}}}]}},"event":{digits}}}'
    shown = Mask("guest", ("visits.price",)).change(wire.encode())
    assert shown.decode() == (
        f'{{"currentEntityState":{{"visits":[{{"price":"***","n":{digits}}}]}},"event":"***"}}'
    )
