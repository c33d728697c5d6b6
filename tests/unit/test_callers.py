"""Who a token names, until when, what it permits, and what its caller may say of itself."""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from callers import caller_entry
from everstate.api.events import EventBatches, StreamEvent, while_valid
from everstate.api_config import ApiConfig, ClaimsConfig, Right
from everstate.cli import cli
from everstate.config import load
from everstate.errors import InvalidBody, InvalidRequest, NotPermitted, Unauthenticated
from everstate.http.callers import EVERY, REASON, Caller, Callers, provenance_of, text
from everstate.http.etags import etag, parse_condition
from everstate.http.masks import MASKED, Mask
from everstate.http.tokens import PREFIX, hash_of, new_token
from everstate.serving.answers import Place, Version
from everstate.serving.differences import differences
from everstate.serving.masking import masked_version

TOKEN = "es_a-token-for-a-test"
HEADER = {"authorization": f"Bearer {TOKEN}"}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def caller(**given: Any) -> Caller:
    """The caller of a table of `[api.tokens]`."""
    return Callers(ApiConfig(tokens={"desk": caller_entry(TOKEN, **given)})).caller(HEADER)


def test_tokens_are_long_and_random_and_settings_have_only_their_hash() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(each.startswith(PREFIX) and len(each) == len(PREFIX) + 43 for each in made)
    assert TOKEN not in caller_entry(TOKEN).model_dump_json()
    assert len(hash_of(TOKEN)) == 64


def test_a_token_is_valid_until_it_expires() -> None:
    clock = [NOW]
    entry = caller_entry(TOKEN, expires=NOW + timedelta(hours=1))
    callers = Callers(ApiConfig(tokens={"desk": entry}), lambda: clock[0])
    assert callers.caller(HEADER).name == "desk"
    clock[0] += timedelta(minutes=59)
    assert callers.caller(HEADER).name == "desk"
    clock[0] += timedelta(minutes=1)
    with pytest.raises(Unauthenticated, match=r"expired at 2026-01-01T01:00:00\+00:00"):
        callers.caller(HEADER)


@pytest.mark.parametrize(
    ("permissions", "permitted", "refused"),
    [
        ({"*": ["read"]}, [("guest", "read"), (EVERY, "read")], [("guest", "write")]),
        ({"guest": ["read"]}, [("guest", "read")], [("visit", "read"), (EVERY, "read")]),
        (
            {"*": ["read"], "guest": []},
            [("visit", "read")],
            [("guest", "read"), (EVERY, "read")],
        ),
        (
            {"*": ["operate"], "guest": ["read", "operate"]},
            [(EVERY, "operate"), ("guest", "read")],
            [("visit", "read")],
        ),
        ({}, [], [("guest", "read"), (EVERY, "operate")]),
    ],
)
def test_the_entry_of_an_entity_type_counts_before_that_of_all(
    permissions: dict[str, Any],
    permitted: list[tuple[str, Right]],
    refused: list[tuple[str, Right]],
) -> None:
    found = caller(permissions=permissions)
    for entity, right in permitted:
        found.require(entity, right)
    for entity, right in refused:
        with pytest.raises(NotPermitted, match=f"caller desk .* lacks `{right}` on"):
            found.require(entity, right)


def test_who_may_only_write_sees_nothing() -> None:
    mask = caller(permissions={"*": ("write",)}).mask("guest")
    assert mask.state({"name": "Eva"}) == MASKED
    with pytest.raises(NotPermitted, match="`read` on guest"):
        mask.refuse(("name",), "a filter on")
    mask.check_written({"name": "Eva"})


def test_without_tokens_everything_is_permitted() -> None:
    local = Callers(ApiConfig()).caller({})
    assert local.may("guest", "write")
    assert local.may(EVERY, "operate")
    assert not local.mask("guest")


def claimed(found: Caller, **headers: str) -> tuple[str, str, str | None]:
    """Service, identifier and actor of a write."""
    given = {f"everstate-{name}": value for name, value in headers.items()}
    made = provenance_of(given, found, api_version="v1", entity="guest", key="g1")
    return made.service_name, made.identifier, made.actor


def test_a_caller_is_its_own_service_and_may_say_for_whom_it_writes() -> None:
    found = caller()
    assert claimed(found) == ("desk", "clerk-7", None)
    assert claimed(found, service="desk", identifier="clerk-7") == ("desk", "clerk-7", None)
    assert claimed(found, actor="Frau Huber") == ("desk", "clerk-7", "Frau Huber")
    for wrong in ({"service": "billing"}, {"identifier": "clerk-8"}):
        with pytest.raises(NotPermitted, match="the claim of"):
            claimed(found, **wrong)


@pytest.mark.parametrize("reason", ["a\u00a0b", "注\u3000文", "👩\u200d🚀"])
def test_a_header_has_any_text(reason: str) -> None:
    headers = {REASON.lower(): reason.encode().decode("latin-1")}
    assert text(headers, REASON) == reason


@pytest.mark.parametrize("reason", ["a\tb", "a\x1bb", "a\x85b"])
def test_a_header_has_no_control_characters(reason: str) -> None:
    with pytest.raises(InvalidRequest, match="control characters"):
        text({REASON.lower(): reason.encode().decode("latin-1")}, REASON)


def test_claims_are_those_of_the_settings() -> None:
    claims = ClaimsConfig(services=("shop-*",), identifiers=("*",), actors=("robot",))
    found = caller(claims=claims)
    assert claimed(found, service="shop-1", identifier="any") == ("shop-1", "any", None)
    assert claimed(found, actor="robot")[2] == "robot"
    for wrong in ({"service": "shop"}, {"service": "a shop-1"}, {"actor": "Frau Huber"}):
        with pytest.raises(NotPermitted, match="the claim of"):
            claimed(found, **wrong)


def test_a_mask_hides_values_at_every_depth_and_nothing_else() -> None:
    mask = Mask("guest", ("name", "address.street", "visits.price"), "desk")
    state = {
        "id": "g1",
        "name": None,
        "address": {"city": "Wien", "street": "Ring 1"},
        "visits": [{"price": 1, "room": 2}, {"room": 3}],
        "big": 2**70,
    }
    shown = {
        **state,
        "name": MASKED,
        "address": {"city": "Wien", "street": MASKED},
        "visits": [{"price": MASKED, "room": 2}, {"room": 3}],
    }
    assert mask.state(state) == shown
    assert json.loads(mask.json(json.dumps(state).encode())) == shown
    assert mask.state({"address": None}) == {"address": None}
    assert mask.state(None) is None
    assert mask.event({"type": "Renamed", "data": {"to": "Eva"}}) == {
        "type": "Renamed",
        "data": MASKED,
    }
    assert mask.event("Eva") == MASKED
    assert mask.event(None) is None
    assert Mask("guest").state(state) is state


def test_a_change_of_the_log_is_masked_in_both_states_and_its_event() -> None:
    mask = Mask("guest", ("name",))
    change = {
        "key": "g1",
        "event": {"type": "Renamed", "data": {"name": "Eva"}},
        "currentEntityState": {"name": "Eva", "nights": 1},
        "originalEntityState": None,
        "later": 1.50,
    }
    shown = json.loads(mask.change(json.dumps(change).encode()))
    assert "Eva" not in json.dumps(shown)
    assert shown["currentEntityState"] == {"name": MASKED, "nights": 1}
    assert (shown["originalEntityState"], shown["later"]) == (None, 1.5)
    assert mask.change(b"") == b""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [("a", MASKED, MASKED)]),
        ({"a": {"b": 1, "c": 1}}, {"a": {"b": 2, "c": 2}}, [("a", MASKED, MASKED)]),
        ({"d": {"e": 1}}, {"d": {"e": 2}}, [("d.e", MASKED, MASKED)]),
        ({"d": None}, {"d": {"e": 2, "f": 3}}, [("d", None, {"e": MASKED, "f": 3})]),
        ({"g": 1}, {"g": 2}, [("g", 1, 2)]),
        ({"d": {"e.f": 1}}, {"d": {"e.f": 2}}, [("d.e.f", 1, 2)]),
    ],
)
def test_differences_show_that_a_hidden_field_changed_and_not_its_values(
    before: dict[str, Any], after: dict[str, Any], expected: list[tuple[str, Any, Any]]
) -> None:
    version = Version(
        "guest", "g1", 2, "updated", after, NOW, NOW, NOW, None, {}, None, None,  # type: ignore[arg-type]
        Place(1, 0, 0), differences(before, after),
    )  # fmt: skip
    found = masked_version(version, Mask("guest", ("a", "d.e")))
    assert [(each.path, each.before, each.after) for each in found.differences] == expected


@pytest.mark.parametrize(
    "written",
    [{"name": MASKED}, {"address": {"street": MASKED}}, {"visits": [{"price": MASKED}]}],
)
def test_the_mask_is_no_value(written: dict[str, Any]) -> None:
    mask = Mask("guest", ("name", "address.street", "visits.price"))
    with pytest.raises(InvalidBody, match="does not see"):
        mask.check_written(written)
    operations = [
        {"op": "add", "path": f"/{field}", "value": value} for field, value in written.items()
    ]
    with pytest.raises(InvalidBody, match="does not see"):
        mask.check_operations(operations)
    mask.check_written({"city": MASKED, "name": "***!"})


@pytest.mark.parametrize("pointer", ["/visits/0/price", "/visits/-", "/visits", ""])
def test_an_operation_that_reads_a_hidden_value_is_refused(pointer: str) -> None:
    mask = Mask("guest", ("visits.price",))
    for operation in (
        {"op": "test", "path": pointer, "value": 1},
        {"op": "copy", "from": pointer, "path": "/note"},
    ):
        with pytest.raises(NotPermitted):
            mask.check_operations([operation])
    mask.check_operations([{"op": "test", "path": "/visits/0/room", "value": 1}])


def test_a_tag_of_a_masked_state_names_its_version_to_its_own_caller_only() -> None:
    mask, other = Mask("guest", ("name",)), Mask("guest", ("city",))
    tag = etag(3, mask.tag)
    assert mask.tag != other.tag

    def known(name: str, given: str, variant: str) -> frozenset[int]:
        found = parse_condition(name, given, variant)
        assert found is not None
        return found.strong

    for name in ("If-Match", "If-None-Match"):
        assert known(name, tag, mask.tag) == {3}
        assert known(name, tag, other.tag) == known(name, tag, "") == frozenset()
    assert known("If-Match", '"3"', mask.tag) == {3}
    assert known("If-None-Match", '"3"', mask.tag) == frozenset()


def told(folder: Path, *arguments: str) -> str:
    """What `everstate token` prints to stdout."""
    found = CliRunner().invoke(cli, ["-C", str(folder), "token", *arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_lines_of_a_new_token_are_settings_and_open_the_api(tmp_path: Path) -> None:
    made, _, lines = told(tmp_path, "new", "front-desk", "--days", "30").partition("\n")
    tomllib.loads(lines)
    (tmp_path / "everstate.toml").write_text(lines)
    callers = Callers(load(tmp_path).api)
    found = callers.caller({"authorization": f"Bearer {made}"})
    assert (found.name, found.service) == ("front-desk", "front-desk")
    assert found.may("guest", "read")
    assert not found.may("guest", "write")
    assert not found.may("guest", "unmasked")
    assert os.listdir(tmp_path) == ["everstate.toml"]
    late = Callers(load(tmp_path).api, lambda: datetime.now(UTC) + timedelta(days=31))
    with pytest.raises(Unauthenticated, match="expired"):
        late.caller({"authorization": f"Bearer {made}"})


def test_callers_are_listed_with_their_state_and_without_their_hash(tmp_path: Path) -> None:
    made = json.loads(told(tmp_path, "new", "desk", "--json"))
    assert hash_of(made["token"]) == made["token_hash"]
    text = "".join(
        f"[api.tokens.{name}]\ntoken_hash = '{made['token_hash']}'\nexpires = {expires}\n"
        "service = 's'\nidentifier = 'i'\npermissions = { guest = ['read', 'write'], '*' = [] }\n"
        for name, expires in (("old", "2020-01-01T00:00:00Z"), ("new", "2999-01-01T00:00:00Z"))
    )
    (tmp_path / "everstate.toml").write_text(text)
    listed = json.loads(told(tmp_path, "list", "--json"))
    assert [(each["name"], each["state"]) for each in listed] == [
        ("old", "expired"),
        ("new", "valid"),
    ]
    assert listed[0]["permissions"] == {"guest": ["read", "write"], "*": []}
    shown = told(tmp_path, "list")
    assert "guest: read, write; *: –" in shown
    assert made["token_hash"] not in shown + json.dumps(listed)


def test_a_name_that_is_no_name_of_a_table_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["-C", str(tmp_path), "token", "new", "a.b"])
    assert refused.exit_code == 2


def test_a_token_as_json_needs_no_settings(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_text("this is no TOML")
    assert json.loads(told(tmp_path, "new", "desk", "--json"))["name"] == "desk"
    refused = CliRunner().invoke(cli, ["-C", str(tmp_path), "token", "new", "desk"])
    assert refused.exit_code == 2


def test_a_subscription_ends_when_its_token_expires() -> None:
    closed: list[bool] = []

    async def events() -> EventBatches:
        try:
            yield [StreamEvent("live")]
            await asyncio.sleep(60)
            yield [StreamEvent("change")]
        finally:
            closed.append(True)

    async def seen(expires: datetime) -> list[StreamEvent]:
        return [event async for batch in while_valid(events(), expires) for event in batch]

    live, ended = asyncio.run(seen(datetime.now(UTC) + timedelta(seconds=0.5)))
    assert (live.name, ended.name) == ("live", "error")
    assert isinstance(ended.failure, Unauthenticated)
    assert closed == [True]


def test_a_subscription_with_a_token_that_never_expires_ends_with_its_events() -> None:
    async def events() -> EventBatches:
        yield [StreamEvent("live")]

    async def seen() -> list[str]:
        return [event.name async for batch in while_valid(events(), None) for event in batch]

    assert asyncio.run(seen()) == ["live"]
