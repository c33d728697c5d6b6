"""States with former names of fields over HTTP: entities of a store, and reading from the views."""

from __future__ import annotations

import json
from datetime import date
from typing import Annotated, Any

import psycopg
from pydantic import BaseModel
from rest_cases import DESK, MERGE, client
from serving_cases import fill
from test_rest_reading import at, got

from everstate import Formerly
from everstate.app import App
from everstate.config import Config, load
from everstate.sources.stores.postgres import EntityStore, install
from formerly_cases import GUEST, WAS, WHO, New


def stored_before(config: Config, *states: dict[str, Any]) -> None:
    """Entities that the release before has written."""
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        install(connection, [WAS], answers=True)
    with EntityStore(config, WAS) as store:
        for state in states:
            store.put(state, provenance=WHO)


def test_entities_of_before_are_read_filtered_and_patched_over_rest(config: Config) -> None:
    app = App("hotel")
    app.entity("guest", key="guest_id")(New)
    stored_before(
        config,
        {"guest_id": "a", "city_name": "Wien", "price": "2.50", "lines": [{"sum": "1.00"}]},
        {"guest_id": "b", "city_name": "Linz"},
    )
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        clash = '{"guest_id":"b","city_name":"Linz","city":"Graz"}'
        connection.execute("UPDATE everstate_store.guest SET state = %s WHERE key = 'b'", [clash])
    with client(config, app) as api:
        found = got(api, "/v1/guest/a")
        assert (found["city"], found["paid"], found["lines"]) == (
            "Wien",
            "2.50",
            [{"amount": "1.00"}],
        )
        page = got(api, "/v1/guest", city="Wien", paid="2.5")
        assert [each["state"] for each in page["items"]] == [found]
        assert api.put("/v1/guest/a", json=found, headers=DESK).headers["ETag"] == '"1"'
        patched = api.patch("/v1/guest/a", content='{"city": "Graz"}', headers=MERGE)
        assert (patched.json(), patched.headers["ETag"]) == ({**found, "city": "Graz"}, '"2"')
        former = api.put("/v1/guest/a", json={"guest_id": "a", "city_name": "x"}, headers=DESK)
        assert (former.status_code, "no field of this name" in former.text) == (422, True)
        refused = api.patch("/v1/guest/b", content='{"city": "Graz"}', headers=MERGE)
        assert (refused.status_code, "another value under a former name" in refused.text) == (
            422,
            True,
        )
        whole = {**json.loads(GUEST.encode(New(guest_id="b", city="Linz")))}
        assert api.put("/v1/guest/b", json=whole, headers=DESK).status_code == 200
        assert got(api, "/v1/guest/b")["city"] == "Linz"
    with psycopg.connect(config.store_dsn) as connection:
        query = "SELECT after FROM everstate_store.outbox WHERE version = 2 ORDER BY key"
        texts = [json.loads(text) for (text,) in connection.execute(query).fetchall()]
    assert ["city_name" in each for each in texts] == [False, False]


class Renamed(BaseModel):
    """Guests of the views that are filled by hand, whose `name` is their `title` now."""

    guest_id: str
    title: Annotated[str, Formerly("name")]
    nights: int | None = None
    born: date | None = None


def test_views_of_before_are_read_by_todays_names(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
    app = App("hotel")
    app.entity("guest", key="guest_id", source="capture")(Renamed)
    with client(load(store={"dsn": database}), app) as api:
        assert got(api, "/v1/guest/eva")["title"] == "Eva Maria"
        assert got(api, "/v1/guest/eva", at=at(1.5))["title"] == "Eva"
        items = got(api, "/query/v1/guest", where='title="Eva Maria"')["items"]
        assert [(each["key"], "name" in each["state"]) for each in items] == [("eva", False)]
        then = got(api, "/query/v1/guest", at=at(3.5), order="-title")["items"]
        assert [each["state"]["title"] for each in then] == ["Tom", "Eva Maria", "Ada"]
        newest = got(api, "/v1/guest/eva/history", diff="patch")["items"][-1]
        assert {each["path"] for each in newest["patch"]} == {"/title", "/nights"}
        changed = got(api, "/v1/guest/eva/history", changed="title")["items"]
        assert [each["version"] for each in changed] == [1, 3]
        assert "title" in got(api, "/v1/guest/eva/provenance")["fields"]
        status = api.get("/query/v1/guest", params={"where": "name=Eva"}).status_code
        assert status == 400
