"""What the pages of the console are made of: addresses, texts, fields, and facts that are kept."""

from __future__ import annotations

import asyncio
import html
import re
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from pydantic import create_model

from callers import caller_entry
from everstate.api.application import create_api
from everstate.api_config import ApiConfig, Right
from everstate.app import App
from everstate.attention.looking import Looking, SeenProject
from everstate.changes.json_numbers import JsonNumber
from everstate.config import Config, StoreConfig
from everstate.console.access import path_within
from everstate.console.dead import content_of, letters
from everstate.console.entities import FIELDS_MAX, EntityPage, explained, state_fields
from everstate.console.fresh import FreshValue
from everstate.console.overview import overview
from everstate.console.pages import Pages, entity_url, view_url
from everstate.console.routes import described_routes
from everstate.console.servers import ShownCapture, naming_server
from everstate.console.views import ShownView, ViewsPage, shown_to
from everstate.declarations.captures import Table
from everstate.errors import InvalidQuery, NotFound, Unavailable
from everstate.http.callers import Caller
from everstate.log.dead_letters import DeadLetter
from everstate.parts import Part, RoleState
from everstate.postgres import unavailable
from everstate.serving import ABSENT, Place, Reader, Version, differences
from everstate.serving.answers import Explanation, ViewRow
from everstate.serving.log_state import PartitionState, TopicState
from everstate.serving.troubles import troubles
from everstate.serving.words import duration_text
from everstate.sources.cdc.balance import Balance

START = datetime(2026, 1, 1, tzinfo=UTC)


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
        ("/console", "/console"),
        ("/console?from=a", "/console?from=a"),
        ("/console.evil.example", "/"),
        ("/consoles", "/"),
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
        ({"l": [1]}, {"l": [1.0]}, {"l": ([1], [1.0], "changed")}),
        (
            {"prices": {"a": 1, "a.b": 2}},
            {"prices": {"a": 5, "a.b": 2}},
            {"prices.a": (1, 5, "changed"), "prices.a.b": (2, 2, "")},
        ),
        (
            {"prices": {"a": 1, "a.b": {"c": 2}}},
            {"prices": {"a": 1}},
            {"prices.a": (1, 1, ""), "prices.a.b.c": (2, ABSENT, "removed")},
        ),
    ],
)
def test_fields_are_shown_side_by_side(before: Any, after: Any, shown: dict[str, Any]) -> None:
    fields = state_fields(version(before, after))
    assert {each.path: (each.before, each.after, each.sign) for each in fields} == shown


@pytest.mark.parametrize("character", ["ab", '"', "\U0001f3e8", "\u202e", "<&>", "."])
def test_the_page_of_an_entity_is_small_whatever_its_fields_are_named(character: str) -> None:
    whole = character * 3_000
    before = {f"{whole}{number}": whole for number in range(900)}
    shown = version(before, {name: f"{value}x" for name, value in before.items()})
    fields = state_fields(shown)
    page = EntityPage("guest", "g", shown, 9, fields[:FIELDS_MAX], 700, (shown,) * 12)
    made = Pages("hotel", has_login=True).page("entity.html", page=page, entity="guest", at="")
    assert len(bytes(made.body)) < 300_000
    assert page.explain_url(7) == "?explain=1&version=2&nth=7"


def test_null_a_missing_field_and_a_text_that_says_so_look_unlike() -> None:
    shown = version({"gone": None, "text": "not there"}, {"made": None, "text": "null"})
    page = EntityPage("guest", "g", shown, 9, state_fields(shown), 0, (shown,))
    made = Pages("hotel", has_login=True).page("entity.html", page=page, entity="guest", at="")
    text = bytes(made.body).decode()
    absent = '<span class="dim">not there</span>'
    assert f'<span class="old"><em>null</em></span></td>\n<td><strong class="new">{absent}' in text
    assert f'<span class="old">{absent}</span></td>\n<td><strong class="new"><em>null</em>' in text
    assert '<span class="old">not there</span></td>\n<td><strong class="new">null<' in text


def test_a_field_of_a_short_name_is_explained_by_its_name() -> None:
    shown = version(None, {"p": {"ä": 1}})
    page = EntityPage("guest", "g", shown, 9, state_fields(shown), 0, ())
    assert page.explain_url(0) == "?explain=1&version=2&field=p.%C3%A4"


def test_a_field_of_a_long_name_is_explained_by_its_number_in_the_version() -> None:
    long = "n" * 3_000
    shown = version(None, {"a": 1, long: 2})
    stub = SimpleNamespace(
        version=lambda *_: shown,
        newest_first=lambda *_, before: iter([shown]),
        explain=lambda _entity, _key, number: number,
    )
    reader = cast(Reader, stub)
    found: Any = explained(reader, "guest", "g", {"version": "2", "nth": "1"})
    assert found == (2, long)
    with pytest.raises(NotFound, match="no field number 2"):
        explained(reader, "guest", "g", {"version": "2", "nth": "2"})
    with pytest.raises(InvalidQuery, match="nth is '-1'"):
        explained(reader, "guest", "g", {"version": "2", "nth": "-1"})


def test_an_event_is_shown_with_the_numbers_that_it_has() -> None:
    event = {"amount": JsonNumber("12345678901234567890.12"), "ratio": float("nan"), "name": "ä"}
    found = Explanation(replace(version(None, {}), event=event), "topic", None, ())
    facts: dict[str, Any] = {"found": found, "lines": [], "field": None, "entity": "guest"}
    text = bytes(Pages("hotel", has_login=True).page("explain.html", **facts).body).decode()
    shown = html.unescape(text)
    assert '"amount": 12345678901234567890.12,' in shown
    assert '"ratio": "NaN"' in shown
    assert '"name": "ä"' in shown


def test_the_newest_dead_letters_are_shown_wherever_they_are_in_their_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hour = timedelta(hours=1)
    times = [START + hour * number for number in (*range(60, 100), *range(60))]
    found = [DeadLetter("guest", 0, n, at, "r", "t", 0, n, None, b"") for n, at in enumerate(times)]
    monkeypatch.setattr("everstate.console.servers.is_reachable", lambda _: True)
    monkeypatch.setattr("everstate.console.dead.read_dead_letters", lambda *_: iter(found))
    _, _, newest = letters(Config(), {"entity": "guest", "reason": "r"})
    assert [each.at for each in newest] == [START + hour * number for number in range(99, 49, -1)]


def test_the_overview_counts_no_marker_of_a_transaction_as_a_record() -> None:
    seen = SeenProject(START, ())
    parts = (PartitionState(0, 0, 2),)
    seen.topics = [
        TopicState("p.guest.dead", parts, None, False),
        TopicState("p.guest.changes.g1", (), None, False),
    ]
    looked = SimpleNamespace(look=lambda: seen)
    shown = overview(cast(Looking, looked), Config(), App("hotel"))
    facts = dict(shown.steps[1].facts)
    assert (facts["changes in it"], facts["dead letters"]) == ("none", "at most 2")


@pytest.mark.parametrize(
    ("balance", "told"),
    [(None, "What became of its rows is not known"), (Balance(), "No row of it was cleaned yet")],
)
def test_a_capture_of_which_nothing_is_known_is_told_from_one_that_has_read_nothing(
    balance: Balance | None, told: str
) -> None:
    app = App("hotel")
    app.entity("guest", key="id", source="capture")(create_model("Guest", id=(str, ...)))
    tables = {"public.guests": Table(entity="guest")}
    app.capture("desk", kind="postgresql", tables=tables)
    shown = ShownCapture(app.captures["desk"], None, balance, ())
    made = Pages("hotel", has_login=True).page("sources_part.html", found=[shown], age_s=0)
    assert told in bytes(made.body).decode()


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ((None, None, None, None, "PostgreSQL is away"), ("not known", "PostgreSQL is away")),
        ((7, 61.0, 2, 1, None), (">parked<", "7 changes, ")),
        ((None, None, 0, 0, None), ("never ran", "– changes, –")),
        ((0, 0.0, 0, 3, None), (">ok<", "<dd>3</dd>")),
    ],
)
def test_a_handler_is_shown_as_it_is(state: Any, told: tuple[str, str]) -> None:
    failed = [(17, "eva", 3, 2, None, "no <address>")] if state[2] else []
    found = [(("mail.greet", *state), "guest", failed)]
    made = Pages("hotel", has_login=True).page("handlers_part.html", found=found, age_s=0)
    text = bytes(made.body).decode()
    assert [each for each in told if each not in text] == []
    if failed:
        assert "no &lt;address&gt;" in text
        assert 'href="/console/guest/eva?version=3"' in text
        assert "handlers show mail.greet" in text, "there may be more"


def test_the_page_of_handlers_is_small_whatever_failed() -> None:
    failed = [(n, '"' * 300, 3, 2, START, "<&>" * 2_000) for n in range(100)]
    found = [(("mail.greet", 0, 0.0, 100, 0, None), "guest", failed)]
    made = Pages("hotel", has_login=True).page("handlers.html", found=found, age_s=0)
    assert len(bytes(made.body)) < 300_000


@pytest.mark.parametrize("key", ["a%0Ab", "%C5%BElu", "a%2Fb", "..%2f", "%3Cb%3E"])
def test_a_login_goes_on_to_the_page_that_was_asked_for(key: str) -> None:
    token = "a token that is long enough"
    app = App("hotel")
    app.entity("guest", key="id", source="capture")(create_model("Guest", id=(str, ...)))
    api = create_api(Config(api=ApiConfig(tokens={"desk": caller_entry(token)})), app)
    for address in ("/console", f"/console/guest/{key}", f"/console/guest/{key}?version=2&x=%0A"):
        asked = ask(api, "GET", address)
        (named,) = re.findall(r'name="next" value="([^"]*)"', asked.text)
        form = {"token": token, "next": html.unescape(named)}
        done = ask(api, "POST", "/console/-/login", data=form)
        assert (done.status_code, done.headers["location"]) == (303, address)


def test_the_page_of_an_entity_names_the_server_that_does_not_answer() -> None:
    app = App("hotel")
    app.entity("guest", key="id", source="capture")(create_model("Guest", id=(str, ...)))
    config = Config(store=StoreConfig(dsn="postgresql://u:secret@127.0.0.1:1/none"))
    for path in ("/console/guest/eva", "/console/guest", "/console/-/views?part=1"):
        gone = ask(create_api(config, app), "GET", path)
        assert gone.status_code == 503
        assert "database (PostgreSQL) does not answer" in gone.text
        assert "127.0.0.1:1" not in gone.text


def test_the_page_of_a_view_waits_a_moment_for_the_log_and_says_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, answers = App("hotel"), threading.Event()
    app.entity("guest", key="id", source="capture")(create_model("Guest", id=(str, ...)))
    seen = SimpleNamespace(project=app, rows=lambda *_, **__: (("key", "n"), [("eva", 7)]))

    def views_page(_: object) -> ViewsPage:
        answers.wait(20)  # as Kafka does that takes connections and does not answer
        return ViewsPage((), {})

    monkeypatch.setattr("everstate.console.router._WAIT_S", 0.05)
    monkeypatch.setattr("everstate.console.views.views_page", views_page)
    monkeypatch.setattr(Reader, "seen_by", lambda *_: seen)
    begun = time.monotonic()
    try:
        told = ask(create_api(Config(), app), "GET", "/console/-/views/guest_latest").text
        assert time.monotonic() - begun < 10
    finally:
        answers.set()
    assert "The state of its versions is not known: a server takes long to answer." in told
    assert '<div class="cell">7</div>' in told


@pytest.mark.parametrize(
    ("is_up", "told"), [(False, "the log (Kafka) does not answer."), (True, "")]
)
def test_a_log_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, is_up: bool, told: str
) -> None:
    monkeypatch.setattr("everstate.console.servers.is_reachable", lambda _: is_up)
    error = Unavailable("reading t: Kafka does not answer.")
    assert naming_server(Config(), error).public == (told or Unavailable.fallback_message)
    views = unavailable("postgresql://u:pw@h/d", psycopg.OperationalError("refused"))
    named = "the views' database (PostgreSQL) does not answer."
    assert naming_server(Config(), views).public == named
    said = Unavailable("no", public="the store does not answer.")
    assert naming_server(Config(), said) is said


def ask(api: FastAPI, method: str, path: str, **more: Any) -> httpx.Response:
    """The answer of an API to a browser."""

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={"Accept": "text/html"}, **more)

    return asyncio.run(once())


def test_bytes_are_shown_as_text_and_in_hexadecimal() -> None:
    binary = content_of(b"\xff\x00a")
    assert (binary.text, binary.size) == (None, 3)
    assert binary.hexadecimal.startswith("000000  ff 00 61")
    assert binary.hexadecimal.endswith("··a")
    assert content_of(b'{"a": 1}').text == '{"a": 1}'
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


def test_an_error_of_a_question_is_told_for_a_moment_and_then_the_next_one_is_asked() -> None:
    answers: list[Any] = [ValueError("down"), 7]

    async def next_answer() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    async def look() -> None:
        value = FreshValue(next_answer)
        for _ in range(2):
            with pytest.raises(ValueError, match="down"):
                await value.look(1)
        value._fresh_s = 0.0
        assert await value.look(1) == 7

    asyncio.run(look())


@pytest.mark.parametrize("fresh_s", [0.0, 2.0])
def test_an_error_that_came_while_nobody_waited_is_told_to_who_looks_next(fresh_s: float) -> None:
    async def look() -> None:
        answer_now, answered = asyncio.Event(), asyncio.Event()

        async def down() -> int:
            answered.clear()
            await answer_now.wait()
            answer_now.clear()
            answered.set()
            raise ValueError("down")

        value = FreshValue(down, fresh_s)
        assert await value.look(0) is None
        answer_now.set()
        await answered.wait()
        with pytest.raises(ValueError, match="down"):
            await value.look(0)

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
    groups, schemas = described_routes(openapi), openapi["components"]["schemas"]
    shown = {(method.lower(), path) for each in groups.values() for method, path, _ in each}
    wanted = {(method, path) for path, said in openapi["paths"].items() for method in said}
    assert shown == wanted
    assert ("get", "/views/v1/{view}") in wanted
    page = Pages("hotel", has_login=True).page("routes.html", groups=groups, schemas=schemas)
    text = bytes(page.body).decode()
    assert all(f"<code>{method.upper()} {path}</code>" in text for method, path in wanted)
    assert {"Guest", "Problem"} <= set(schemas)
    assert "Only versions that changed this field" in text
    assert re.findall(r"""(?:src|href)=["'](?!/)""", text.replace('href="#main"', "")) == []
