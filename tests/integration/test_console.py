"""The web console by HTTP: what its pages show, and what keeps strangers and scripts out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb
from rest_cases import client

from callers import caller_entry
from console_cases import (
    ODD_KEYS,
    SCRIPT,
    START,
    Guest,
    fill,
    fill_handler,
    fill_log,
    greeting_hotel,
    hotel,
)
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.config import Config
from everstate.console.fresh import FRESH_S
from everstate.declarations.captures import Table
from everstate.log.topics import Topics
from hand_archive import HandArchive
from kit.settings import altered
from kit.tls_door import copy_both_ways
from kit.waiting import until

TOKEN = "a token with ünicode; and more"
HTML = {"Accept": "text/html"}


@pytest.fixture
def console(config: Config) -> Iterator[httpx.Client]:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        fill(connection)
    with client(config, hotel(), headers=HTML) as made:
        yield made


def page(console: httpx.Client, path: str, status: int = 200, **given: Any) -> str:
    """A page, asked for again while its servers have not answered yet, as its script does."""
    deadline = time.monotonic() + 60.0
    while "data-loading" in (answer := console.get(path, params=given or None)).text:
        assert time.monotonic() < deadline, answer.text
        time.sleep(1.0)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert len(answer.content) < 300_000
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "<script>" not in answer.text, "no script in a page"
    assert " style=" not in answer.text
    return answer.text


def at(hours: float) -> str:
    return (START + timedelta(hours=hours)).isoformat()


def test_an_entity_is_shown_as_it_is_now_with_who_and_why(console: httpx.Client) -> None:
    now = page(console, "/console/guest/eva")
    assert "This is the state now" in now
    for shown in ("Eva Maria", "address.city", "clerk-4", "Frau Huber", "guest asked", "visit-4"):
        assert shown in now
    assert 'max="4"' in now
    older = page(console, "/console/guest/eva", version=3)
    assert "of the past" in older
    assert '<span class="old">Wien</span>' in older
    assert '<strong class="new">Graz</strong>' in older
    part = page(console, "/console/guest/eva", version=2, part=1)
    assert "<html" not in part
    assert '<strong class="new">2</strong>' in part
    assert console.get("/console/guest/eva", params={"version": 1, "format": "json"}).json() == {
        "guest_id": "eva",
        "name": "Eva",
        "nights": 0,
        "address": {"city": "Wien", "street": "Ring 1"},
    }


def test_states_that_are_not_there_are_told(console: httpx.Client) -> None:
    assert "Deleted</strong> by desk at version 2" in page(console, "/console/guest/tom")
    before = page(console, "/console/guest/eva", 404, at=at(0))
    assert "did not exist at 2026-01-01T00:00:00+00:00" in before
    assert 'max="4"' in before, "the versions can still be chosen"
    assert "deleted by desk at version 2" in page(console, "/console/guest/ada", 404, at=at(5.5))
    assert "it has 1 to 4" in page(console, "/console/guest/eva", 404, version=9)
    assert "the views have no" in page(console, "/console/guest/nobody", 404)
    assert "there can be no" in page(console, "/console/guest/no%00body", 404)
    assert "unknown entity type" in page(console, "/console/gust/eva", 404)
    assert "cannot be read" in page(console, "/console/guest/eva", 400, at="yesterday")
    assert "whole number" in page(console, "/console/guest/eva", 400, version="x")


def test_the_version_of_a_time_is_found(console: httpx.Client) -> None:
    assert 'id="chosen" for="version">2<' in page(console, "/console/guest/eva", at=at(2.5))


def test_a_field_leads_to_its_last_writer(console: httpx.Client) -> None:
    city = page(console, "/console/guest/eva", explain=1, field="address.city")
    assert "guest eva, version 3" in city
    then = page(console, "/console/guest/eva", explain=1, field="address.city", version=2)
    assert "guest eva, version 1" in then
    assert "no field" in page(console, "/console/guest/eva", 404, explain=1, field="colour")


@pytest.mark.parametrize("key", ODD_KEYS)
def test_any_key_is_found_and_shown_as_text(console: httpx.Client, key: str) -> None:
    found = console.get("/console/guest", params={"key": key}, follow_redirects=True)
    assert found.status_code == 200
    assert "This is the state now" in found.text
    assert "&lt;b&gt;bold&lt;/b&gt;" in found.text
    assert SCRIPT not in found.text
    if key not in (".", ".."):
        assert found.url.raw_path.decode() == f"/console/guest/{quote(key, safe='')}"
    before = console.get(found.url, params={**dict(found.url.params), "version": 1})
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in before.text


def test_keys_are_listed_from_what_was_typed(console: httpx.Client) -> None:
    listed = page(console, "/console/guest")
    assert "&lt;script&gt;" in listed
    missed = page(console, "/console/guest", key="n")
    assert "The views have no" in missed
    assert "tom" in missed
    assert "eva" not in missed
    assert "guest" in page(console, "/console")


def test_programs_still_get_json_at_the_root(console: httpx.Client) -> None:
    assert console.get("/", headers={"Accept": "*/*"}).json()["name"] == "hotel"
    paths = console.get("/openapi.json").json()["paths"]
    assert not [path for path in paths if path.startswith("/console")]


def test_nothing_can_be_written_by_the_console(console: httpx.Client) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert console.request(method, "/console/guest/eva").status_code == 405


def test_static_files_are_served_and_nothing_else(console: httpx.Client) -> None:
    for name, kind in (("console.css", "text/css"), ("console.js", "text/javascript")):
        answer = console.get(f"/console/-/static/{name}")
        assert answer.headers["content-type"].startswith(kind)
    assert console.get("/console/-/static/README.md").status_code == 404
    assert console.get("/console/-/static/..%2F__init__.py").status_code == 404


@pytest.fixture
def secured(config: Config) -> Iterator[httpx.Client]:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        fill(connection)
    desk = caller_entry(TOKEN)
    api = ApiConfig(tokens={"desk": desk})
    with client(config.model_copy(update={"api": api}), hotel(), headers=HTML) as made:
        yield made


PATHS = ("/", "/console", "/console/guest", "/console/guest/eva", "/console/guest/eva?part=1")


def log_in(console: httpx.Client, token: str, **headers: str) -> httpx.Response:
    form = {"token": token, "next": "/console/guest/eva"}
    return console.post("/console/-/login", data=form, headers=headers)


def test_with_tokens_nothing_is_shown_before_a_login(secured: httpx.Client) -> None:
    for path in PATHS:
        answer = secured.get(path)
        assert answer.status_code == 401, path
        assert "Token of the API" in answer.text
        assert "eva" not in answer.text.replace("/console/guest/eva", "")
    assert log_in(secured, "a wrong token of some length").status_code == 401
    assert secured.cookies.get("everstate_token") is None
    done = log_in(secured, TOKEN)
    assert (done.status_code, done.headers["location"]) == (303, "/console/guest/eva")
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    for path in PATHS:
        assert secured.get(path).status_code == 200, path
    out = secured.post("/console/-/logout")
    assert out.status_code == 303
    assert secured.get("/console/guest/eva").status_code == 401


def test_the_cookie_does_not_open_the_api(secured: httpx.Client) -> None:
    assert log_in(secured, TOKEN).status_code == 303
    assert secured.get("/console/guest/eva").status_code == 200
    assert secured.get("/v1/guest/eva").status_code == 401
    assert secured.get("/query/v1/guest").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(secured: httpx.Client, headers: dict[str, str]) -> None:
    refused = log_in(secured, TOKEN, **headers)
    assert refused.status_code == 400
    assert "set-cookie" not in refused.headers
    assert log_in(secured, TOKEN).status_code == 303
    assert secured.post("/console/-/logout", headers=headers).status_code == 400


@pytest.mark.parametrize("place", ["https://evil.example/", "//evil.example", "/\\evil.example"])
def test_a_login_leads_to_no_other_site(secured: httpx.Client, place: str) -> None:
    form = {"token": TOKEN, "next": place}
    assert secured.post("/console/-/login", data=form).headers["location"] == "/"


@pytest.mark.parametrize("cookie", ["", "%%%", "YQ", "YQ==", "/" * 9000, "w7w="])
def test_a_cookie_that_is_no_token_is_refused(secured: httpx.Client, cookie: str) -> None:
    answer = secured.get("/console/guest/eva", headers={"Cookie": f"everstate_token={cookie}"})
    assert answer.status_code == 401


@pytest.fixture
def full(config: Config, console: httpx.Client) -> httpx.Client:
    """The console of a project whose log has changes and dead letters."""
    fill_log(config)
    return console


@pytest.mark.parametrize("part", [None, 1])
def test_the_overview_shows_each_step_and_what_is_wrong(full: httpx.Client, part: Any) -> None:
    told = page(full, "/console/-/overview", part=part) if part else page(full, "/")
    for shown in ("Ways in", "Log", "Archive", "Views", "Readers", "dead letters", "nothing yet"):
        assert shown in told
    assert "does not run in this project&#39;s folder" in told
    assert "2 changes, " in told, "the lag of the views"
    assert ("<html" in told) is (part is None)


def test_views_are_listed_and_their_rows_are_paged(full: httpx.Client) -> None:
    listed = page(full, "/console/-/views")
    assert "guest_latest" in listed
    assert "never" in listed
    rows = page(full, "/console/-/views/guest_history")
    assert "0: 3" in rows, "the position"
    assert "&lt;b&gt;bold&lt;/b&gt;" in rows
    one = page(full, "/console/-/views/guest_history", first="eva")
    assert one.count(">eva</a>") == 4
    assert "No row has key nobody" in page(full, "/console/-/views/guest_history", first="nobody")
    assert "no row on this page" in page(full, "/console/-/views/guest_history", page=2)
    assert "expected 1 to" in page(full, "/console/-/views/guest_history", 400, page="0")
    assert "unknown view" in page(full, "/console/-/views/nothing", 404)
    for shown in ("SELECT name, count(*) AS guests", "reading the archive 40%", 'value="0.4"'):
        assert shown in listed
    assert "no version of the view is published yet" in page(full, "/console/-/views/by_city")
    assert "by_city, version 1" in page(full, "/"), "a build is shown on the overview"


def test_a_view_of_many_rows_has_pages(full: httpx.Client, config: Config) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        names = "version, change_id, kind, as_of, occurred_at, recorded_at, generation, partition"
        connection.execute(
            f"""INSERT INTO everstate_views.guest_latest__v1
            (key, {names}, "offset", provenance, state)
            SELECT 'k' || to_char(n, 'FM000'), {names}, "offset", provenance, state
            FROM everstate_views.guest_latest__v1, generate_series(1, 120) AS n
            WHERE key = 'eva'""".encode()
        )
    first = page(full, "/console/-/views/guest_latest")
    assert 'rel="next"' in first
    second = page(full, "/console/-/views/guest_latest", page=2)
    assert 'rel="prev"' in second
    assert "k001" not in second
    keys = page(full, "/console/guest?from=k")
    assert "k050" in keys
    assert "k051" not in keys.replace("from=k051", "")
    assert "from=k051" in keys


def test_the_log_tells_how_long_it_holds_what_is_unread(full: httpx.Client, config: Config) -> None:
    told = page(full, "/console/-/log")
    assert f"{config.log.prefix}.guest.changes.g1" in told
    assert "0: 0 … 5" in told
    assert "guest_latest" in told
    assert "holds for 3.0 days" in told


def test_the_archive_is_a_reader_whose_unread_records_may_expire(
    full: httpx.Client, config: Config
) -> None:
    archive = HandArchive(config, "guest")
    archive.begin({0: 0})
    archive.append([], {0: 4})
    told = page(full, "/console/-/log")
    assert '<th scope="row">archive</th>' in told
    assert "1 changes" in page(full, "/"), "the archive lacks one of five"
    with Topics(config) as topics:
        topics.set_config(topics.names.changes("guest"), {"retention.ms": "1000"})
    # The brokers pass the setting on by and by, and may drop the records at any moment after that.
    late, deadline = "", time.monotonic() + 60
    while "log expires" not in late and "log expired" not in late:
        assert time.monotonic() < deadline, late
        time.sleep(FRESH_S)
        late = page(full, "/")
    expires = "the log holds what it has not read for 0 s only" in late
    assert expires or "the log dropped 1 offsets that it had not read" in late


def test_dead_letters_are_shown_by_reason_with_their_bytes(full: httpx.Client) -> None:
    told = page(full, "/console/-/dead")
    assert "name: Field &lt;b&gt;required&lt;/b&gt;" in told
    assert "no JSON" in told
    reason = "name: Field <b>required</b>"
    listed = page(full, "/console/-/dead/reason", entity="guest", reason=reason)
    assert listed.count("/console/-/dead/letter?entity=guest") == 3
    letter = "/console/-/dead/letter?entity=guest&partition=0&offset="
    script = page(full, f"{letter}0")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in script
    binary = page(full, f"{letter}1")
    assert "ff fe 00" in binary
    page(full, f"{letter}99", 404)
    page(full, f"{letter}x", 400)
    unknown = page(full, "/console/-/dead/letter", partition=0, offset=0)
    assert "no JSON" in unknown


def test_handlers_are_shown_with_the_changes_whose_calls_failed(
    full: httpx.Client, config: Config
) -> None:
    assert "declares no handler" in page(full, "/console/-/handlers")
    with client(config, greeting_hotel(), headers=HTML) as made:
        assert "never ran" in page(made, "/console/-/handlers")
        fill_handler(config)
        until(lambda: "no address" in page(made, "/console/-/handlers"), 30)
        told = page(made, "/console/-/handlers", part=1)
        assert "ValueError: &lt;script&gt;alert(1)&lt;/script&gt;" in told
        assert told.count("/console/guest/") == 2, "one waits only"
        assert 'href="/console/guest/eva?version=3"' in told
        assert "handlers show mail.greet" in page(made, "/")


def test_sources_are_shown_and_a_project_without_captures_says_so(full: httpx.Client) -> None:
    told = page(full, "/console/-/sources")
    assert "declares no capture" in told
    assert "another system" in told


def test_captures_that_nobody_runs_are_shown_as_they_are(config: Config) -> None:
    app = hotel()
    app.capture("others", kind="postgresql", tables={"public.guests": Table(entity="guest")})
    app.entity("room", key="guest_id", source="capture")(Guest)
    rooms = {"public.rooms": Table(entity="room")}
    app.capture(
        "own", kind="postgresql", tables=rooms, dsn="postgresql://u:secret@127.0.0.1:1/none"
    )
    with client(config, app, headers=HTML) as made:
        told = page(made, "/console/-/sources")
        assert "run by another system" in told
        assert "knows no Kafka Connect" in told
        assert "secret" not in told
        assert "others, own" in page(made, "/")


def test_an_empty_project_has_pages_too(config: Config) -> None:
    with client(config, App("empty"), headers=HTML) as made:
        for path in (
            "/",
            "/console",
            *(f"/console/-/{name}" for name in ("log", "sources", "handlers")),
        ):
            page(made, path)
        assert "No record was rejected" in page(made, "/console/-/dead")
        assert "do not exist yet" in page(made, "/console/-/views", 404)


def test_a_server_that_is_down_is_named_and_the_rest_is_shown(config: Config) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        fill(connection)
    away = altered(config, log={"bootstrap_servers": "127.0.0.1:1"})
    with client(away, hotel(), headers=HTML) as made:
        told = page(made, "/")
        assert "<strong>the log (Kafka)</strong> does not answer" in told
        assert "(PostgreSQL)" not in told
        for path in ("log", "dead"):
            assert "does not answer" in page(made, f"/console/-/{path}", 503)
        assert "This is the state now" in page(made, "/console/guest/eva")
    nowhere = altered(config, store={"dsn": "postgresql://everstate:secret@127.0.0.1:1/none"})
    with client(nowhere, hotel(), headers=HTML) as made:
        told = page(made, "/")
        assert "(PostgreSQL)</strong> does not answer" in told
        assert "(Kafka)" not in told
        gone = page(made, "/console/guest/eva", 503)
        assert "A server does not answer" in gone
        assert "secret" not in told + gone
        assert "127.0.0.1:1" not in gone


def test_a_server_that_comes_back_is_shown_again(config: Config) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        fill(connection)
    real = urlsplit(config.store_dsn)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    dsn = real._replace(netloc=real.netloc.replace(str(real.port), str(port))).geturl()
    with client(altered(config, store={"dsn": dsn}), hotel(), headers=HTML) as made:
        assert "(PostgreSQL)</strong> does not answer" in page(made, "/")
        with forwarding(port, real.port or 0):
            until(lambda: "(PostgreSQL)" not in page(made, "/console/-/overview", part=1), 30)
            assert "This is the state now" in page(made, "/console/guest/eva")


@contextmanager
def forwarding(port: int, to: int) -> Iterator[None]:
    """Connections to a port lead to another one during the block."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=_accept, args=(listener, to), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, to: int) -> None:
    while True:
        try:
            here, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_connect, args=(here, to), daemon=True).start()


def _connect(here: socket.socket, to: int) -> None:
    """Copy between both until either ends."""
    with here, socket.create_connection(("127.0.0.1", to)) as there:
        copy_both_ways(here, there)


def test_a_large_state_still_makes_a_small_page(console: httpx.Client, config: Config) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        state = {f"field {number} <&>": '"<' * 500 for number in range(900)}
        for view in ("latest", "history"):
            update = f"UPDATE everstate_views.guest_{view}__v1 SET state = %s WHERE key = 'eva'"
            connection.execute(update.encode(), [Jsonb(state)])
    assert "700 more fields" in page(console, "/console/guest/eva", version=2)
    page(console, "/console/-/views/guest_history")
    page(console, "/console/guest/eva", explain=1)
