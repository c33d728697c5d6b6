"""Reading the views over HTTP: a state of the past, histories, differences, who wrote what."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import psycopg
import pytest
from rest_cases import client
from serving_cases import Guest, fill

from console_cases import SCHEMA, START
from everstate.app import App
from everstate.config import load


@pytest.fixture
def api(database: str) -> Iterator[httpx.Client]:
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
        rename(connection, "ada", "ada/history")
    config = load(store={"dsn": database}, api={"page_max": 100})
    app = App("hotel")
    app.entity("guest", key="guest_id", source="capture")(Guest)
    with client(config, app) as made:
        yield made


def rename(connection: psycopg.Connection[Any], old: str, new: str) -> None:
    for view in ("latest", "history"):
        query = f"UPDATE {SCHEMA}.guest_{view}__v1 SET key = %s WHERE key = %s"
        connection.execute(query.encode(), (new, old))


def at(hours: float) -> str:
    return (START + timedelta(hours=hours)).isoformat()


def got(api: httpx.Client, path: str, **parameters: Any) -> Any:
    answer = api.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(api: httpx.Client, path: str, **parameters: Any) -> tuple[int, str]:
    answer = api.get(path, params=parameters)
    return answer.status_code, answer.json()["detail"]


def test_an_entity_that_others_write_is_read_from_the_views(api: httpx.Client) -> None:
    answer = api.get("/v1/guest/eva")
    assert (answer.status_code, answer.json()["name"]) == (200, "Eva Maria")
    assert answer.headers["ETag"] == '"3"'
    assert answer.headers["Everstate-As-Of"] == at(2)
    seen = api.get("/v1/guest/eva", headers={"If-None-Match": '"3"'})
    assert (seen.status_code, seen.content) == (304, b"")


def test_a_state_of_the_past_is_asked_for_by_time_or_version(api: httpx.Client) -> None:
    assert got(api, "/v1/guest/eva", at=at(1.5))["name"] == "Eva"
    assert got(api, "/v1/guest/eva", version=2)["nights"] == 2
    recorded = (START + timedelta(days=1, hours=1)).isoformat()
    assert got(api, "/v1/guest/eva", recorded_at=recorded)["nights"] == 2


@pytest.mark.parametrize(
    ("path", "parameters", "status", "said"),
    [
        ("eva", {"at": "yesterday"}, 400, "'yesterday' cannot be read"),
        ("eva", {"at": "2026-01-01T00:00"}, 400, "no UTC offset"),
        ("eva", {"version": "0"}, 400, "version is '0'"),
        ("eva", {"version": "1" * 30}, 400, "version is"),
        ("eva", {"version": 1, "at": at(1)}, 422, "one of at"),
        ("eva", {"version": ["1", "2"]}, 400, "version is given twice"),
        ("eva", {"vresion": 1}, 400, "no parameter 'vresion'"),
        ("eva", {"version": 9}, 404, "it has 1 to 3"),
        ("tom", {"at": at(5)}, 410, "deleted by desk at version 2"),
        ("ada%2Fhistory", {}, 410, "deleted by desk at version 2"),
        ("ada%2Fhistory", {"version": 2}, 410, "deleted by desk at version 2"),
        ("tom", {"at": at(0.5)}, 404, f"first seen {at(1)}"),
        ("eve", {}, 404, "views have no"),
        ("e%00e", {}, 404, "there can be no"),
        ("eva/history", {"limit": 101}, 400, "1 to 100"),
        ("eva/history", {"order": "best"}, 400, "expected oldest or newest"),
        ("eva/history", {"diff": "text"}, 400, "expected fields or patch"),
        ("eva/history", {"changed": "colour"}, 400, "colour"),
        ("eva/history", {"kind": "made"}, 400, "kind is 'made'"),
        ("eva/history", {"since": "soon"}, 400, "'soon' cannot be read"),
        ("eve/history", {"before": 2}, 404, "views have no"),
        ("eve/history", {"service": "desk"}, 404, "views have no"),
        ("eva/diff", {}, 400, "from is missing"),
        ("eva/diff", {"from": 1, "to": "soon"}, 400, "'soon' cannot be read"),
        ("eva/explain/colour", {}, 404, "no field 'colour'"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(
    api: httpx.Client, path: str, parameters: dict[str, Any], status: int, said: str
) -> None:
    found = refused(api, f"/v1/guest/{path}", **parameters)
    assert found[0] == status
    assert said in found[1]


def test_a_deleted_entity_is_gone_and_names_its_last_version(api: httpx.Client) -> None:
    gone = api.get("/v1/guest/ada%2Fhistory")
    assert (gone.status_code, gone.json()["version"]) == (410, 2)
    assert gone.json()["type"].endswith(":Deleted")


def test_a_local_time_that_comes_twice_is_refused_with_both(api: httpx.Client) -> None:
    for path in ("eva", "eva/diff"):
        name = "from" if path.endswith("diff") else "at"
        answer = api.get(f"/v1/guest/{path}", params={name: "2024-11-03 01:45 America/New_York"})
        assert answer.status_code == 400
        advice = answer.json()["advice"]
        assert advice == "Write 2024-11-03T01:45:00-04:00 or 2024-11-03T01:45:00-05:00."


@pytest.mark.parametrize(
    "path",
    [
        "/v1/guest/eva",
        "/v1/guest/eva/history",
        "/v1/guest/eva/history?changed=nights",
        "/v1/guest/eva/diff?from=1",
        "/v1/guest/eva/explain",
        "/v1/guest/eva/explain/name",
        "/v1/guest/eva/provenance",
        "/query/v1/guest",
        "/query/v1/guest/deleted",
        "/query/v1/guest/changes?service=desk",
    ],
)
def test_who_has_an_answer_already_gets_304_and_head_has_no_body(
    api: httpx.Client, path: str
) -> None:
    whole = api.get(path)
    assert whole.status_code == 200, whole.text
    tag = whole.headers["ETag"]
    head = api.head(path)
    assert (head.status_code, head.content, head.headers["ETag"]) == (200, b"", tag)
    same = api.get(path, headers={"If-None-Match": f'"other", {tag}'})
    assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", tag)
    assert api.get(path, headers={"If-None-Match": '"other"'}).content == whole.content


def versions(api: httpx.Client, key: str, **parameters: Any) -> list[int]:
    page = got(api, f"/v1/guest/{key}/history", **parameters)
    return [each["version"] for each in page["items"]]


def test_a_history_is_chosen_by_field_writer_kind_and_time(api: httpx.Client) -> None:
    assert versions(api, "eva", changed="name") == [1, 3]
    assert versions(api, "eva", changed="born") == [1, 2], (
        "created with null, as its differences say"
    )
    assert versions(api, "eva", service="desk", identifier="clerk") == [1, 2, 3]
    assert versions(api, "eva", service="web") == []
    assert versions(api, "eva", actor="nobody") == []
    assert versions(api, "tom", kind="created") == [1]
    middle = got(api, "/v1/guest/eva/history")["items"][1]["recorded_at"]
    assert versions(api, "eva", since=middle) == [2, 3]
    assert versions(api, "eva", until=middle) == [1]
    assert versions(api, "eva", changed="name", order="newest") == [3, 1]


def test_pages_of_a_chosen_history_lead_to_all_of_it(
    api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few versions a page reads: it names where the next one begins."""
    monkeypatch.setattr("everstate.serving.listing._PAGE", 2)
    path, asked = "/v1/guest/tom/history", {"service": "desk", "limit": 1}
    for name, begin in (("after", 0), ("before", 4)):
        found, place = list[int](), begin
        while place is not None:
            page = got(api, path, **asked, **{name: place})
            found += [each["version"] for each in page["items"]]
            place = page[name]
        assert sorted(found) == [1, 2, 3], name


def test_a_history_has_json_patches_if_they_are_asked_for(api: httpx.Client) -> None:
    first, *_, last = got(api, "/v1/guest/eva/history", diff="patch")["items"]
    assert "differences" not in last
    assert {"op": "replace", "path": "/nights", "value": 3} in last["patch"]
    assert first["patch"][0]["path"] == "", "it makes the whole state"
    (alone,) = got(api, "/v1/guest/eva/history", diff="patch", limit=1)["items"]
    assert alone["patch"] == last["patch"]
    gone = got(api, "/v1/guest/tom/history", diff="patch", kind="deleted")["items"][0]
    assert gone["patch"] == [{"op": "replace", "path": "", "value": None}]


def test_a_history_is_paged_in_both_directions(api: httpx.Client) -> None:
    whole = got(api, "/v1/guest/eva/history")
    assert [each["version"] for each in whole["items"]] == [1, 2, 3]
    assert (whole["before"], whole["after"]) == (None, None)
    newest = got(api, "/v1/guest/eva/history", limit=1)
    assert [each["version"] for each in newest["items"]] == [3]
    changed = {each["path"]: each["op"] for each in newest["items"][0]["differences"]}
    assert changed == {"name": "replace", "nights": "replace"}
    older = got(api, "/v1/guest/eva/history", limit=1, before=newest["before"])
    assert [each["version"] for each in older["items"]] == [2]
    assert (older["before"], older["after"]) == (2, 2)
    newer = got(api, "/v1/guest/eva/history", limit=1, after=older["after"])
    assert newer["items"] == newest["items"]
    between = got(api, "/v1/guest/eva/history", after=1, before=3)
    assert [each["version"] for each in between["items"]] == [2]
    assert got(api, "/v1/guest/eva/history", after=3)["items"] == []
    assert got(api, "/v1/guest/eva/history", before=1)["items"] == []
    first = got(api, "/v1/guest/tom/history", limit=1, after=1)
    assert [each["state"] for each in first["items"]] == [None], "it was deleted"


def test_a_difference_is_told_as_fields_and_as_a_json_patch(api: httpx.Client) -> None:
    found = got(api, "/v1/guest/eva/diff", **{"from": 1, "to": at(2)})
    assert (found["from"]["version"], found["to"]["version"]) == (1, 3)
    assert [each["path"] for each in found["differences"]] == ["name", "nights", "born"]
    assert {"op": "replace", "path": "/nights", "value": 3} in found["patch"]
    gone = got(api, "/v1/guest/tom/diff", **{"from": 1, "to": 2})
    assert gone["patch"] == [{"op": "replace", "path": "", "value": None}]


def test_a_whole_number_of_any_size_is_a_number(api: httpx.Client, database: str) -> None:
    """JSON, the log and PostgreSQL have no bound of 64 bits."""
    large = 2**70
    with psycopg.connect(database, autocommit=True) as connection:
        for view in ("latest", "history"):
            query = f"UPDATE {SCHEMA}.guest_{view}__v1 SET state = state || %s WHERE key = 'eva'"
            query += " AND version = 3"
            connection.execute(query.encode(), (f'{{"more": {large}}}',))
    for path in ("eva", "eva?version=3", "eva/history", "eva/diff?from=1&to=3", "eva/explain"):
        answer = api.get(f"/v1/guest/{path}")
        assert answer.status_code == 200, answer.text
        assert path == "eva/explain" or f":{large}" in answer.text, answer.text
    posted = api.post("/query/v1/guest/keys", json={"keys": ["eva"]})
    assert posted.json()["items"]["eva"]["state"]["more"] == large


def test_who_last_wrote_each_field_is_told(api: httpx.Client) -> None:
    found = got(api, "/v1/guest/eva/provenance")
    written = {name: each["version"] for name, each in found["fields"].items()}
    assert written == {"guest_id": 1, "name": 3, "nights": 3, "born": 2}
    (desk,) = found["sources"]
    assert (desk["service"], desk["version"], desk["values"]["nights"]) == ("desk", 3, 3)
    assert got(api, "/v1/guest/eva/explain")["version"]["version"] == 3
    assert got(api, "/v1/guest/eva/explain", version=1)["version"]["version"] == 1
    assert got(api, "/v1/guest/eva/explain/born")["version"]["version"] == 2
    again = got(api, "/v1/guest/tom/provenance")
    assert {each["version"] for each in again["fields"].values()} == {3}, "made again"


def test_a_key_that_ends_in_the_name_of_a_route_is_a_key(api: httpx.Client) -> None:
    assert refused(api, "/v1/guest/ada%2Fhistory") == (
        410,
        "guest 'ada/history' was deleted by desk at version 2, 2026-01-01T05:00:00+00:00.",
    )
    assert len(got(api, "/v1/guest/ada%2Fhistory/history")["items"]) == 2


@pytest.mark.parametrize("below", ["", "/history", "/diff?from=1", "/explain", "/provenance"])
def test_every_question_waits_for_a_token(api: httpx.Client, below: str) -> None:
    answer = api.get(f"/v1/guest/eva{below}", headers={"Everstate-Wait-For": "none"})
    assert answer.status_code == 422
    assert answer.json()["type"].endswith("InvalidToken")


def test_another_method_below_a_key_is_refused_with_what_there_is(api: httpx.Client) -> None:
    answer = api.put("/v1/guest/eva/history", json={})
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_the_routes_are_described(api: httpx.Client) -> None:
    paths = got(api, "/openapi.json")["paths"]
    below = [path.rpartition("}")[2] for path in paths if path.startswith("/v1/guest/")]
    assert {"", "/history", "/diff", "/explain", "/provenance"} <= set(below)
    named = [each["name"] for each in paths["/v1/guest/{key}"]["get"]["parameters"]]
    assert {"at", "recorded_at", "version"} <= set(named)
