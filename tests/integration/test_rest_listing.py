"""Reading many entities over HTTP: lists, many keys at once, who wrote what, what was deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest
from rest_cases import client
from serving_cases import Guest, fill
from test_rest_reading import at, got, refused

from everstate.app import App
from everstate.config import load


@pytest.fixture
def api(database: str) -> Iterator[httpx.Client]:
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
    app = App("hotel")
    app.entity("guest", key="guest_id", source="capture")(Guest)
    with client(load(store={"dsn": database}, api={"page_max": 100}), app) as made:
        yield made


def test_many_keys_are_read_at_one_moment(api: httpx.Client) -> None:
    def read(**asked: Any) -> Any:
        answer = api.post("/query/v1/guest/keys", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["items"]

    now = read(keys=["eva", "tom", "nobody", "a\x00b"])
    assert (now["eva"]["version"], now["eva"]["state"]["name"]) == (3, "Eva Maria")
    assert (now["nobody"], now["a\x00b"]) == (None, None)
    then = read(keys=["eva", "tom"], at=at(1.5))
    assert (then["eva"]["version"], then["tom"]["version"]) == (1, 1)
    assert read(keys=["tom"], at=at(5)) == {"tom": None}, "it was deleted then"
    assert read(keys=[]) == {}


def test_entities_are_listed_by_conditions(api: httpx.Client) -> None:
    found = got(api, "/query/v1/guest", where="nights>=1;name!=Ada", order="-nights")["items"]
    assert [(each["key"], each["state"]["nights"]) for each in found] == [("eva", 3), ("tom", 1)]
    assert got(api, "/query/v1/guest", where='name!="a;b";nights=3')["items"] == found[:1]
    then = got(api, "/query/v1/guest", at=at(1.5), order="name")["items"]
    assert [each["state"]["name"] for each in then][:2] == sorted(
        each["state"]["name"] for each in then
    )[:2]


@pytest.mark.parametrize("moment", [{}, {"at": at(3.5)}])
def test_a_list_has_pages_by_key_now_and_at_a_time(
    api: httpx.Client, moment: dict[str, str]
) -> None:
    whole = got(api, "/query/v1/guest", **moment)
    assert whole["after"] is None
    found: list[Any] = []
    after: dict[str, str] | None = {}
    while after is not None:
        page = got(api, "/query/v1/guest", limit=1, **moment, **after)
        found += page["items"]
        after = None if page["after"] is None else {"after": page["after"]}
    assert found == whole["items"]
    assert len(found) == (3 if moment else 2)
    status, said = refused(api, "/query/v1/guest", order="name", after="eva")
    assert (status, "one of after and order" in said) == (422, True)


def test_changes_are_listed_by_who_wrote_them_and_when(api: httpx.Client) -> None:
    whole = got(api, "/query/v1/guest/changes", service="desk")["items"]
    times = [each["recorded_at"] for each in whole]
    assert times == sorted(times)
    assert {each["provenance"]["serviceName"] for each in whole} == {"desk"}
    assert got(api, "/query/v1/guest/changes", service="nobody")["items"] == []
    eva = next(each for each in whole if each["key"] == "eva" and each["version"] == 3)
    assert {each["path"] for each in eva["differences"]} == {"name", "nights"}
    pages: list[Any] = []
    after = None
    while True:
        more: dict[str, str] = {} if after is None else {"after": after}
        page = got(api, "/query/v1/guest/changes", limit=2, service="desk", **more)
        pages += page["items"]
        after = page["after"]
        if after is None:
            break
    assert pages == whole
    middle = whole[len(whole) // 2]["recorded_at"]
    early = got(api, "/query/v1/guest/changes", until=middle)["items"]
    late = got(api, "/query/v1/guest/changes", since=middle)["items"]
    assert len(early) + len(late) == len(whole)
    assert got(api, "/query/v1/guest/changes", kind="deleted")["items"][0]["state"] is None


def test_deleted_entities_are_listed_with_who_deleted_them(api: httpx.Client) -> None:
    page = got(api, "/query/v1/guest/deleted", limit=1)
    (gone,) = page["items"]
    assert (gone["key"], gone["version"], gone["kind"]) == ("ada", 2, "deleted")
    assert (gone["state"], gone["provenance"]["serviceName"]) == (None, "desk")
    assert "name" in {each["path"] for each in gone["differences"]}
    assert {each["op"] for each in gone["differences"]} == {"remove"}
    assert got(api, "/query/v1/guest/deleted", after=page["after"])["items"] == []


@pytest.mark.parametrize(
    ("path", "parameters", "status", "said"),
    [
        ("", {"where": "colour=red"}, 400, "colour"),
        ("", {"where": "nights>many"}, 400, "many"),
        ("", {"where": 'name="a;b";nights>many'}, 400, "many"),
        ("", {"at": "soon"}, 400, "'soon' cannot be read"),
        ("", {"limit": 0}, 400, "1 to 100"),
        ("/changes", {"kind": "made"}, 400, "kind is 'made'"),
        ("/changes", {"after": "x"}, 400, "that of an earlier page"),
        ("/changes", {"since": "2026-01-01T00:00"}, 400, "no UTC offset"),
        ("/changes", {"srvice": "a"}, 400, "no parameter 'srvice'"),
        ("/deleted", {"limit": "many"}, 400, "1 to 100"),
        ("", {"after": "a\x00b"}, 400, "NUL"),
        ("", {"where": "name=a\x00b"}, 400, "NUL"),
        ("/deleted", {"after": "a\x00b"}, 400, "NUL"),
        ("/changes", {"service": "a\x00b"}, 400, "NUL"),
    ],
)
def test_a_list_that_cannot_be_made_says_why(
    api: httpx.Client, path: str, parameters: dict[str, Any], status: int, said: str
) -> None:
    answer = api.get(f"/query/v1/guest{path}", params=parameters)
    told = answer.json()
    assert answer.status_code == status
    assert said in f"{told['detail']} {told.get('advice')}"


@pytest.mark.parametrize("body", ["", "[]", '{"keys": "eva"}', '{"keys": [], "a": 1}', "{"])
def test_a_body_that_is_no_list_of_keys_is_refused(api: httpx.Client, body: str) -> None:
    answer = api.post("/query/v1/guest/keys", content=body)
    assert (answer.status_code, answer.json()["title"]) == (422, "Invalid body")
    many = api.post("/query/v1/guest/keys", json={"keys": ["a"] * 1_001})
    assert (many.status_code, "1,000" in many.text) == (422, True)
