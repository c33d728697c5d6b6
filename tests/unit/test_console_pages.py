"""What the pages of the console are made of: addresses, texts, fields, and facts that are kept."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import create_model

from callers import caller_entry
from everstate.api.application import create_api
from everstate.api_config import Right
from everstate.app import App
from everstate.config import Config
from everstate.console.access import path_within
from everstate.console.dead import content_of
from everstate.console.entities import state_fields
from everstate.console.fresh import FreshValue
from everstate.console.pages import Pages, entity_url, view_url
from everstate.console.routes import described_routes, schemas_of
from everstate.console.views import ShownView, ViewsPage, shown_to
from everstate.http.callers import Caller
from everstate.parts import Part, RoleState
from everstate.serving import ABSENT, Place, Version, differences
from everstate.serving.answers import ViewRow
from everstate.serving.troubles import troubles
from everstate.serving.words import duration_text


@pytest.mark.parametrize(
    ("key", "address"),
    [
        ("eva", "/console/guest/eva"),
        ("a/b", "/console/guest/a%2Fb"),
        ("ä ?#%", "/console/guest/%C3%A4%20%3F%23%25"),
        ("..", "/console/guest?key=.."),
        ("...", "/console/guest/..."),
    ],
)
def test_any_key_has_an_address(key: str, address: str) -> None:
    assert entity_url("guest", key) == address
    assert entity_url("guest", key, version=2).endswith(("?version=2", "&version=2"))


def test_parameters_without_a_value_are_left_out() -> None:
    assert view_url("by_city", page=2, first=None) == "/console/-/views/by_city?page=2"
    assert view_url("by_city", first="a&b") == "/console/-/views/by_city?first=a%26b"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.42, "0.4 s"),
        (59, "59 s"),
        (300, "5.0 min"),
        (233_280, "2.7 days"),
    ],
)
def test_a_duration_is_told_in_its_largest_unit(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/console/guest/eva?version=2", "/console/guest/eva?version=2"),
        ("", "/"),
        ("//evil.example/console/", "/"),
        ("https://evil.example/console/", "/"),
        ("/console/\\evil.example", "/"),
        ("/console/a\r\nSet-Cookie: x=1", "/"),
    ],
)
def test_a_login_goes_on_within_the_console_only(given: str, path: str) -> None:
    assert path_within(given) == path


def version(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Version:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Version(
        entity="guest",
        key="g",
        version=2,
        kind="updated",
        state=after,
        as_of=now,
        occurred_at=now,
        recorded_at=now,
        change_id=UUID(int=1),
        provenance={},
        event=None,
        transaction=None,
        place=Place(1, 0, 0),
        differences=differences(before, after),
    )


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (None, {"a": 1}, {"a": (ABSENT, 1, "added")}),
        ({"a": 1}, None, {"a": (1, ABSENT, "removed")}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": (1, 1, ""), "b": (2, 3, "changed")}),
        ({"p": {"x": 1}}, {"p": {"x": 2}}, {"p.x": (1, 2, "changed")}),
        (
            {"p": {"x": 1}},
            {"p": None},
            {"p": (ABSENT, None, "added"), "p.x": (1, ABSENT, "removed")},
        ),
        ({"p": {"x": 1}}, {"p": {}}, {"p": (ABSENT, {}, "added"), "p.x": (1, ABSENT, "removed")}),
        ({"a": 1}, {"a": True}, {"a": (1, True, "changed")}),
    ],
)
def test_fields_are_shown_side_by_side(before: Any, after: Any, shown: dict[str, Any]) -> None:
    fields = state_fields(version(before, after))
    assert {each.path: (each.before, each.after, each.sign) for each in fields} == shown


def test_bytes_are_shown_as_text_and_in_hexadecimal() -> None:
    binary = content_of(b"\xff\x00a")
    assert (binary.text, binary.size) == (None, 3)
    assert binary.hexadecimal.startswith("000000  ff 00 61")
    assert binary.hexadecimal.endswith("··a")
    assert content_of(b'{"a": 1}').text == '{\n  "a": 1\n}'
    assert content_of(None).text == "none"
    assert content_of(b"x" * 10_000).is_cut


def test_a_value_is_asked_once_for_many_and_a_slow_answer_is_not_waited_for() -> None:
    asked = []

    async def slowly() -> int:
        asked.append(1)
        await asyncio.sleep(0.2)
        return len(asked)

    async def look() -> None:
        value = FreshValue(slowly)
        assert await asyncio.gather(*(value.look(0.01) for _ in range(5))) == [None] * 5
        assert await asyncio.gather(*(value.look(5) for _ in range(5))) == [1] * 5
        assert await value.look(0) == 1
        assert value.age_s < 5

    asyncio.run(look())
    assert len(asked) == 1


def test_an_error_of_a_question_is_told_and_the_next_one_is_asked_again() -> None:
    answers: list[Any] = [ValueError("down"), 7]

    async def next_answer() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    async def look() -> None:
        value = FreshValue(next_answer)
        with pytest.raises(ValueError, match="down"):
            await value.look(1)
        assert await value.look(1) == 7

    asyncio.run(look())


def test_a_missing_fact_in_a_template_is_an_error_and_not_an_empty_text() -> None:
    from jinja2 import UndefinedError

    pages = Pages("hotel", has_login=False)
    with pytest.raises(UndefinedError):
        pages.page("views_part.html", found=object(), age_s=0)


def test_a_role_that_does_not_run_is_told_with_its_reason() -> None:
    part = Part("waiting", 0, "Kafka is away", "Start it.", None)
    dead = RoleState("pipeline", 0, 0.0, 0.0, {"archive guest": part})
    found = troubles([dead])
    assert [each.who for each in found] == ["pipeline: archive guest", "pipeline"]
    assert "was killed" in found[1].process


def test_a_caller_sees_the_views_of_what_it_may_read() -> None:
    app = App("hotel")
    for name in ("guest", "room"):
        app.entity(name, key="id")(create_model(name.title(), id=(str, ...), size=(int, 0)))
    app.view("sizes", sql="SELECT size, count(*) AS guests FROM guest GROUP BY size")
    names = {"guest_latest": "guest", "room_latest": "room", "sizes": "guest", "gone": "guest"}
    page = ViewsPage(tuple(ShownView(row(*each), None, "") for each in names.items()), {})

    def seen(**permissions: tuple[Right, ...]) -> list[str]:
        given = {"*" if name == "others" else name: rights for name, rights in permissions.items()}
        entry = caller_entry("a token", permissions=given)
        caller = Caller("desk", "d", "desk", entry)
        return [each.row.name for each in shown_to(page, app, caller).views]

    assert seen(guest=("read",)) == ["guest_latest", "sizes"]
    assert seen(room=("read",), guest=("write",)) == ["room_latest"]
    assert seen(others=("read",)) == list(names)
    assert seen(others=("read",), room=()) == ["guest_latest", "sizes"]


def row(name: str, entity: str) -> ViewRow:
    """A version of a view."""
    return ViewRow(name, 1, "sql", entity, None, {}, 0, 0.0, None, None, None, "live")


def test_the_page_of_the_api_has_every_route_and_schema_and_loads_nothing_from_elsewhere() -> None:
    app = App("hotel")
    app.entity("guest", key="guest_id", source="capture")(create_model("Guest", guest_id=str))
    openapi = create_api(Config(), app).openapi()
    groups, schemas = described_routes(openapi), schemas_of(openapi)
    shown = {(each.method.lower(), each.path) for routes in groups.values() for each in routes}
    wanted = {(method, path) for path, said in openapi["paths"].items() for method in said}
    assert shown == wanted
    assert ("get", "/views/v1/{view}") in wanted
    page = Pages("hotel", has_login=True).page("routes.html", groups=groups, schemas=schemas)
    text = bytes(page.body).decode()
    assert all(f"<code>{method.upper()} {path}</code>" in text for method, path in wanted)
    assert {"Guest", "Problem"} <= set(schemas)
    assert "Only versions that changed this field" in text
    assert re.findall(r"""(?:src|href)=["'](?!/)""", text.replace('href="#main"', "")) == []
