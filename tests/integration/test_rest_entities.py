"""The routes of entities on a real PostgreSQL: verbs, conditions, answers once, provenance."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row
from rest_cases import DESK, EVA, MERGE, PATCH, client, hotel

from callers import caller_entry
from everstate.config import Config
from kit.settings import altered

_OUTBOX = "SELECT * FROM everstate_store.outbox ORDER BY id"
PROBLEM = "application/problem+json"


@pytest.fixture
def api(config: Config) -> Iterator[httpx.Client]:
    with client(config, hotel()) as made:
        yield made


def outbox(config: Config) -> list[dict[str, Any]]:
    with psycopg.connect(config.store_dsn, row_factory=dict_row) as connection:
        return connection.execute(_OUTBOX).fetchall()


def test_an_entity_is_made_read_changed_and_deleted(api: httpx.Client, config: Config) -> None:
    made = api.post("/v1/guest", json=EVA, headers=DESK)
    assert (made.status_code, made.headers["ETag"]) == (201, '"1"')
    assert made.headers["Location"] == "/v1/guest/g1"
    assert made.json() == EVA
    assert api.get("/v1/guest/g1").json() == EVA

    put = api.put("/v1/guest/g1", json={**EVA, "nights": 2}, headers=DESK)
    assert (put.status_code, put.headers["ETag"]) == (200, '"2"')
    same = api.put("/v1/guest/g1", json={**EVA, "nights": 2}, headers=DESK)
    assert (same.status_code, same.headers["ETag"]) == (200, '"2"')
    assert "Everstate-Change-Id" not in same.headers
    merged = api.patch("/v1/guest/g1", content='{"city": null, "nights": 3}', headers=MERGE)
    assert merged.json() == {**EVA, "city": None, "nights": 3}
    operations = [
        {"op": "test", "path": "/nights", "value": 3},
        {"op": "replace", "path": "/city", "value": "Graz"},
    ]
    patched = api.patch("/v1/guest/g1", content=json.dumps(operations), headers=PATCH)
    assert (patched.json()["city"], patched.headers["ETag"]) == ("Graz", '"4"')
    gone = api.delete("/v1/guest/g1", headers=DESK)
    assert (gone.status_code, gone.content) == (204, b"")
    assert gone.headers["Everstate-Version"] == "5"
    answer = api.get("/v1/guest/g1")
    assert (answer.status_code, answer.json()["version"]) == (410, 5)
    assert api.delete("/v1/guest/g1", headers=DESK).status_code == 404
    again = api.put("/v1/guest/g1", json=EVA, headers=DESK)
    assert (again.status_code, again.headers["ETag"]) == (201, '"6"')

    changes = outbox(config)
    assert [change["version"] for change in changes] == [1, 2, 3, 4, 5, 6]
    assert [change["kind"] for change in changes] == [
        "created",
        *["updated"] * 3,
        "deleted",
        "created",
    ]
    assert made.headers["Everstate-Change-Id"] == str(changes[0]["change_id"])


def test_conditions_guard_every_write_and_412_has_the_present_version(
    api: httpx.Client, config: Config
) -> None:
    place = "/v1/guest/g1"
    assert api.put(place, json=EVA, headers={**DESK, "If-Match": "*"}).status_code == 412
    only_new = {**DESK, "If-None-Match": "*"}
    assert api.put(place, json=EVA, headers=only_new).status_code == 201
    refused = api.put(place, json=EVA, headers=only_new)
    assert (refused.status_code, refused.json()["version"]) == (412, 1)
    assert refused.headers["Content-Type"] == PROBLEM
    assert api.post("/v1/guest", json=EVA, headers=DESK).json()["version"] == 1

    first = {"If-Match": '"1"'}
    assert api.put(place, json={**EVA, "nights": 1}, headers={**DESK, **first}).status_code == 200
    for refused in (
        api.put(place, json=EVA, headers={**DESK, **first}),
        api.patch(place, content='{"nights": 9}', headers={**MERGE, **first}),
        api.delete(place, headers={**DESK, **first}),
        api.get(place, headers=first),
        api.put(place, json=EVA, headers={**DESK, "If-None-Match": '"2"'}),
        api.put(place, json=EVA, headers={**DESK, "If-Match": 'W/"2"'}),
    ):
        assert (refused.status_code, refused.json()["version"]) == (412, 2)
    assert api.get(place, headers={"If-None-Match": '"2"'}).status_code == 304
    assert api.get(place, headers={"If-None-Match": '"1"'}).status_code == 200
    assert api.delete(place, headers={**DESK, "If-Match": '"1", "2"'}).status_code == 204
    # The grave has version 3, and no ETag matches what is not there.
    assert api.put(place, json=EVA, headers={**DESK, "If-Match": '"3"'}).status_code == 412
    assert len(outbox(config)) == 3


def test_a_repeated_request_is_answered_as_before_and_written_once(
    api: httpx.Client, config: Config
) -> None:
    key = {**DESK, "Idempotency-Key": "k-1"}
    first = api.post("/v1/guest", json=EVA, headers=key)
    api.put("/v1/guest/g1", json={**EVA, "nights": 7}, headers=DESK)
    second = api.post("/v1/guest", json=EVA, headers=key)
    assert (second.status_code, second.content) == (201, first.content)
    assert _own(second) == _own(first)
    other = api.post("/v1/guest", json={**EVA, "guest_id": "g2"}, headers=key)
    assert other.status_code == 422
    assert other.json()["type"] == "urn:everstate:error:IdempotencyKeyReused"
    # Another caller's key is another key.
    theirs = {**key, "Everstate-Identifier": "clerk-8"}
    assert api.post("/v1/guest", json=EVA, headers=theirs).status_code == 409

    patch = {**MERGE, "Idempotency-Key": "k-2", "If-Match": '"2"'}
    for _ in range(2):
        answer = api.patch("/v1/guest/g1", content='{"nights": 8}', headers=patch)
        assert (answer.status_code, answer.headers["ETag"]) == (200, '"3"')
    for _ in range(2):
        gone = api.delete("/v1/guest/g1", headers={**DESK, "Idempotency-Key": "k-3"})
        assert (gone.status_code, gone.content) == (204, b"")
    assert [change["version"] for change in outbox(config)] == [1, 2, 3, 4]


def test_the_same_request_at_the_same_time_is_written_once(
    api: httpx.Client, config: Config
) -> None:
    """Eight of a kind; with If-Match, so that a late one would be refused."""
    api.post("/v1/guest", json=EVA, headers=DESK)

    def send(_: int) -> tuple[int, bytes]:
        headers = {**MERGE, "Idempotency-Key": "k-1", "If-Match": '"1"'}
        answer = api.patch("/v1/guest/g1", content='{"nights": 5}', headers=headers)
        return answer.status_code, answer.content

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(send, range(8)))
    assert len(answers) == 1
    assert answers.pop()[0] == 200
    assert len(outbox(config)) == 2


def test_a_patch_without_a_condition_is_never_lost(api: httpx.Client, config: Config) -> None:
    """It reads and writes again when somebody else was first."""
    order = {"order_id": "o-1", "guest_id": "g1", "items": []}
    api.post("/v1/order", json=order, headers=DESK)
    item = {"op": "add", "path": "/items/-", "value": {"article": "tea", "price": "2.50"}}

    def send(_: int) -> int:
        answer = api.patch("/v1/order/o-1", content=json.dumps([item]), headers=PATCH)
        return int(answer.status_code)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(send, range(30))) == {200}
    found = api.get("/v1/order/o-1")
    assert len(found.json()["items"]) == 30
    assert found.headers["ETag"] == '"31"'


def test_every_change_says_who_made_it_and_a_write_without_is_refused(
    api: httpx.Client, config: Config
) -> None:
    for missing in DESK:
        headers = {name: value for name, value in DESK.items() if name != missing}
        refused = api.post("/v1/guest", json=EVA, headers=headers)
        assert (refused.status_code, refused.json()["problems"][0]["field"]) == (422, missing)
        assert api.delete("/v1/guest/g1", headers=headers).status_code == 422
        guarded = {**headers, "If-Match": "*"}
        assert api.delete("/v1/guest/g1", headers=guarded).status_code == 422
    api.post(
        "/v1/guest",
        json=EVA,
        headers={
            **{name.encode(): value.encode() for name, value in DESK.items()},
            b"Everstate-Actor": "Zoë".encode(),
            b"Everstate-Reason": b"walk-in",
            b"Everstate-Correlation-Id": b"c-1",
            b"Everstate-Occurred-At": b"2026-01-02T03:04:05+01:00",
        },
    )
    (change,) = outbox(config)
    assert json.loads(change["provenance"]) == {
        "api_version": "v1",
        "service_name": "desk",
        "identifier": "clerk-7",
        "actor": "Zoë",
        "reason": "walk-in",
        "correlation_id": "c-1",
        "causation_id": None,
    }
    assert change["occurred_at"] == "2026-01-02T03:04:05+01:00"


def test_with_tokens_the_token_is_the_caller_and_without_one_nothing_is_read(
    config: Config,
) -> None:
    entry = caller_entry("a-long-enough-token", "web", "w-1")
    secured = altered(config, api={"tokens": {"web": entry}})
    token = {"Authorization": "Bearer a-long-enough-token"}
    with client(secured, hotel()) as api:
        for headers in ({}, DESK, {"Authorization": "Bearer a-long-enough-tokem"}):
            for refused in (
                api.post("/v1/guest", json=EVA, headers=headers),
                api.get("/v1/guest/g1", headers=headers),
                api.get("/v1/guest", headers=headers),
            ):
                assert refused.status_code == 401
                assert refused.headers["WWW-Authenticate"] == "Bearer"
        claimed = api.post("/v1/guest", json=EVA, headers={**token, **DESK})
        assert claimed.status_code == 403
        assert "the claim of service 'desk'" in claimed.json()["detail"]
        assert api.post("/v1/guest", json=EVA, headers=token).status_code == 201
        assert api.get("/v1/guest/g1", headers=token).status_code == 200
        assert api.get("/ready").status_code == 200
        described = api.get("/openapi.json").json()
        assert described["paths"]["/v1/guest"]["post"]["security"] == [{"token": []}]
    (change,) = outbox(config)
    assert json.loads(change["provenance"])["service_name"] == "web"


def test_a_list_is_paged_and_filtered(api: httpx.Client) -> None:
    for number in range(7):
        city = "Wien" if number % 2 else None
        guest = {"guest_id": f"g{number}", "name": "x", "city": city, "nights": number}
        api.post("/v1/guest", json=guest, headers=DESK)
    keys, cursor = [], None
    while True:
        page = api.get("/v1/guest", params={"limit": 3, **({"cursor": cursor} if cursor else {})})
        keys += [item["key"] for item in page.json()["items"]]
        cursor = page.json()["next"]
        if cursor is None:
            break
    assert keys == [f"g{number}" for number in range(7)]

    def found(**filters: str) -> list[str]:
        return [item["key"] for item in api.get("/v1/guest", params=filters).json()["items"]]

    assert found(city="Wien") == ["g1", "g3", "g5"]
    assert found(city="null", nights="4") == ["g4"]
    item = api.get("/v1/guest", params={"nights": "3"}).json()["items"][0]
    assert (item["version"], item["state"]["city"]) == (1, "Wien")
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"colour": "red"}, {"nights": "many"}):
        assert api.get("/v1/guest", params=wrong).status_code == 400


BAD: list[tuple[str, str, dict[str, str], Any, int, str | None]] = [
    ("POST", "/v1/guest", {}, "{", 400, "InvalidRequest"),
    ("POST", "/v1/guest", {}, '"\ud800"'.encode("utf-8", "surrogatepass"), 400, None),
    ("POST", "/v1/guest", {}, "[]", 422, "InvalidBody"),
    ("POST", "/v1/guest", {}, '{"guest_id": "g1"}', 422, "InvalidBody"),
    ("POST", "/v1/guest", {}, json.dumps({**EVA, "nights": "3"}), 422, "InvalidBody"),
    ("POST", "/v1/guest", {}, json.dumps({**EVA, "name": "a\0"}), 422, "InvalidBody"),
    ("POST", "/v1/guest", {}, "[" * 20_000, 400, "InvalidRequest"),
    ("POST", "/v1/guest", {}, " " * 1_100_000, 413, "RequestTooLarge"),
    ("POST", "/v1/guest", {"Content-Type": "text/plain"}, "{}", 415, None),
    ("POST", "/v1/guest", {"Idempotency-Key": "x" * 256}, json.dumps(EVA), 400, None),
    ("POST", "/v1/guest", {"Everstate-Occurred-At": "now"}, json.dumps(EVA), 400, None),
    (
        "POST",
        "/v1/guest",
        {"Everstate-Occurred-At": "0001-01-01T00:00:00+12:00"},
        json.dumps(EVA),
        400,
        None,
    ),
    ("PUT", "/v1/guest/g2", {}, json.dumps(EVA), 422, "InvalidBody"),
    ("PUT", "/v1/guest/g1", {"If-Match": "1"}, json.dumps(EVA), 400, "InvalidRequest"),
    ("PATCH", "/v1/guest/g1", {}, "{}", 404, "NotFound"),
    ("PATCH", "/v1/guest/g0", {"Content-Type": "application/json"}, "{}", 415, None),
    ("PATCH", "/v1/guest/g0", {}, "[" * 20_000, 400, "InvalidRequest"),
    ("PATCH", "/v1/guest/g0", {}, '{"guest_id": "g9"}', 422, "InvalidBody"),
    ("PATCH", "/v1/guest/g0", {}, '{"name": null}', 422, "InvalidBody"),
    ("PATCH", "/v1/guest/g0", {}, "3", 422, "InvalidBody"),
    ("PATCH", "/v1/guest/g0", {}, '{"name":' * 900 + "1" + "}" * 900, 400, "InvalidRequest"),
    ("GET", "/v1/guest/none", {}, "", 404, "NotFound"),
    ("GET", "/v1/guest/", {}, "", 404, None),
    ("GET", "/v1/guest/a%00b", {}, "", 422, "InvalidChange"),
    ("GET", "/v1/guest/%ff%fe", {}, "", 404, None),
    ("GET", "/v1/nothing", {}, "", 404, "UnknownEntity"),
    ("GET", "/nothing", {}, "", 404, None),
]


def test_bad_input_is_a_problem_that_says_why(api: httpx.Client) -> None:
    api.post("/v1/guest", json={**EVA, "guest_id": "g0"}, headers=DESK)
    for method, path, headers, body, status, kind in BAD:
        said = "application/merge-patch+json" if method == "PATCH" else "application/json"
        given = {**DESK, "Content-Type": said, **headers}
        answer = api.request(method, path, headers=given, content=body)
        where = f"{method} {path} {headers} {str(body)[:60]}: {answer.text}"
        assert answer.status_code == status, where
        assert answer.headers["Content-Type"] == PROBLEM, where
        found = answer.json()
        assert (found["status"], bool(found["detail"])) == (status, True)
        assert kind is None or found["type"] == f"urn:everstate:error:{kind}", where


def test_a_method_that_is_not_there_is_405_with_those_that_are(api: httpx.Client) -> None:
    for path, allowed in (
        ("/v1/guest", "GET, HEAD, POST"),
        ("/v1/guest/g1", "GET, HEAD, PUT, PATCH, DELETE"),
        ("/v1/event", "POST"),
        ("/v1/event/e1", "GET, HEAD"),
    ):
        refused = api.request("PROPFIND", path)
        assert (refused.status_code, refused.headers["Allow"]) == (405, allowed)
        assert refused.headers["Content-Type"] == PROBLEM


def test_a_key_with_a_slash_is_found_at_its_location(config: Config) -> None:
    from pydantic import BaseModel

    from everstate.app import App

    app = App("paths")

    @app.entity("file", key="path")
    class File(BaseModel):
        path: str

    with client(config, app) as api:
        for path in ("a/b", "ä ö", "100%", "a?b#c"):
            made = api.post("/v1/file", json={"path": path}, headers=DESK)
            assert api.get(made.headers["Location"]).json() == {"path": path}


def test_a_store_that_is_away_is_503_and_the_process_lives(config: Config) -> None:
    with client(config, hotel()) as api:
        api.post("/v1/guest", json=EVA, headers=DESK)
        name = config.store_dsn.rpartition("/")[2]
        root = config.store_dsn.rpartition("/")[0] + "/postgres"
        with psycopg.connect(root, autocommit=True) as connection:
            connection.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false')
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
            )
            for path in ("/v1/guest/g1", "/ready"):
                time.sleep(1.0)  # what /ready found holds for a second
                away = api.get(path)
                assert away.status_code == 503, away.text
                assert not re.search(r"127\.0\.0\.1|postgresql:|\*\*\*|t[0-9a-f]{12}", away.text)
                assert away.headers["Retry-After"] == "1"
                assert away.headers["Content-Type"] == PROBLEM
            assert api.get("/health").status_code == 200
            connection.execute(f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')
        assert api.get("/v1/guest/g1").json() == EVA


def _own(answer: Any) -> dict[str, str]:
    names = ("etag", "location", "everstate-change-id", "content-type")
    return {name: answer.headers[name] for name in names if name in answer.headers}
