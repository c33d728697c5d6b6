"""A value of a masked field is in no answer of any route, and no condition can find it out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import httpx
import pytest
from test_access_routes import asked, each_route, made
from test_subscriptions import opened, served

from callers import caller_entry
from everstate.api.application import create_api
from everstate.api_config import ApiConfig
from everstate.errors import InvalidConfig
from everstate.http.masks import MASKED
from reading_cases import Orders

SEES, DOES_NOT, WRITES = "who sees all", "who does not see all", "who writes only"
PLANTED = ("planted-north", "planted-south", "918273.64")
KNOWN = {"Authorization": f"Bearer {SEES}"}
MASKED_CALLER = {"Authorization": f"Bearer {DOES_NOT}"}


@pytest.fixture
def orders(orders: Orders) -> Orders:
    """An order `k1` with planted values, in the store, in the log and in the views."""
    tokens = {
        "sees": caller_entry(SEES),
        "masked": caller_entry(DOES_NOT, permissions={"*": ("read", "write", "operate")}),
        "writes": caller_entry(WRITES, permissions={"*": ("write",)}),
    }
    api = ApiConfig(port=0, tokens=tokens, masks={"order": ("region", "amount")})
    orders.config = orders.config.model_copy(update={"api": api})
    orders.send(
        orders.change("k1", region=PLANTED[0], amount=Decimal(PLANTED[2]), quantity=1),
        orders.change("k1", region=PLANTED[1], amount=Decimal(PLANTED[2]), quantity=2),
        orders.change("k2", region=PLANTED[0], quantity=1),
        orders.change("k2"),
        orders.change("k3", region="elsewhere", quantity=5),
    )
    orders.keep()
    return orders


@contextmanager
def talking(orders: Orders) -> Iterator[httpx.Client]:
    with (
        served(orders) as address,
        httpx.Client(base_url=address, headers=MASKED_CALLER, timeout=60) as client,
    ):
        order = {"order_id": "k1", "region": PLANTED[0], "amount": PLANTED[2], "quantity": 1}
        assert client.post("/v1/order", json=order, headers=KNOWN).status_code == 201
        yield client


QUERIES = {
    "/v1/order/{key}": ["", "?version=1", "?at=2030-01-01T00:00:00Z"],
    "/v1/order/{key}/diff": ["?from=1", "?from=1&to=2"],
    "/v1/order/{key}/explain": ["", "?version=1"],
    "/query/v1/order": ["", "?where=quantity>0&order=-quantity"],
    "/v1/order": ["", "?status=open"],
    "/feed/v1/{entities}": ["?since=beginning", "?since=beginning&thin=true"],
    "/console/{entity}/{key}": [
        *("", "?version=1", "?part=1", "?format=json", "?explain=1", "?explain=1&field=region"),
    ],
}
"""Path of a route → the queries with which it is asked; others are asked without one."""


def paths(orders: Orders, client: httpx.Client) -> Iterator[str]:
    """The addresses of every reading route of the application, with what can be asked of it."""
    feeds = client.get("/feed/v1/order", headers={"Accept": "application/json"}).json()["feeds"]
    names = [each["feed"] for each in feeds if each["position"]]
    assert names
    with made(orders.config, orders.app) as api:
        routes = list(each_route(api.routes))
    for route in routes:
        path: str = route.path_format if hasattr(route, "path_format") else route.path  # type: ignore[attr-defined]
        if "GET" not in (getattr(route, "methods", None) or ()):
            continue
        for query in QUERIES.get(path, [""]):
            for feed in names if "{feed}" in path else [""]:
                is_of_a_view = path.endswith("/views/{name}") or "{view}" in path
                for name in ("order_latest", "by_region") if is_of_a_view else ("",):
                    given = {"entity": "order", "key": "k1", "field": "region", "feed": feed}
                    given |= {"name": name, "view": name, "entities": "order,order"}
                    yield path.format(**given, page="0") + query


def leaks(text: str) -> list[str]:
    """The planted values in an answer."""
    return [value for value in PLANTED if value in text]


@pytest.mark.timeout(300)
def test_no_route_shows_a_hidden_value(orders: Orders) -> None:
    wrong, shown = [], 0
    with talking(orders) as client:
        for path in paths(orders, client):
            if "/stream" in path:
                continue
            for accept in ("application/json", "application/atom+xml", "text/html"):
                answer = client.get(path, headers={"Accept": accept})
                seen = client.get(path, headers={**KNOWN, "Accept": accept})
                assert answer.status_code < 500, answer.text
                shown += bool(leaks(seen.text))
                if leaks(answer.text) or leaks(str(answer.headers)):
                    wrong.append(f"{path} {accept}: {leaks(answer.text)}")
        posted = client.post("/query/v1/order/keys", json={"keys": ["k1"]})
        assert posted.json()["items"]["k1"]["state"]["region"] == MASKED
        assert leaks(posted.text) == []
    assert wrong == []
    assert shown > 20, "the routes show the values to a caller who may see them"


def test_no_subscription_shows_a_hidden_value(orders: Orders) -> None:
    with talking(orders) as client:
        for query in ("current=true", "since=beginning"):
            for headers in (MASKED_CALLER, KNOWN):
                text, address = "", str(client.base_url).rstrip("/")
                with client.stream("GET", f"/stream/v1/order?{query}", headers=headers) as answer:
                    for line in answer.iter_lines():
                        text += line
                        if "live" in line:
                            break
                given = dict([query.split("=")])
                with opened(address, headers, **given) as socket:
                    frame = ""
                    while "live" not in frame:
                        frame = str(socket.recv(60))
                        text += frame
                assert bool(leaks(text)) == (headers is KNOWN)
                assert MASKED in text or headers is KNOWN


def test_writers_get_no_hidden_value_back_and_cannot_write_the_mask(orders: Orders) -> None:
    merge = {"Content-Type": "application/merge-patch+json"}
    with talking(orders) as client:
        once = {**merge, "Idempotency-Key": "k"}
        for _ in range(2):
            patched = client.patch("/v1/order/k1", json={"quantity": 7}, headers=once)
            assert patched.status_code == 200
            assert (patched.json()["quantity"], patched.json()["region"]) == (7, MASKED)
        state = client.get("/v1/order/k1").json()
        for refused in (
            client.put("/v1/order/k1", json=state),
            client.post("/v1/order", json={**state, "order_id": "k9"}),
            client.patch("/v1/order/k1", json={"region": MASKED}, headers=merge),
        ):
            assert refused.status_code == 422
            assert "does not see" in refused.json()["detail"]
        written = client.patch("/v1/order/k1", json={"region": "x"}, headers=merge)
        assert (written.status_code, written.json()["region"]) == (200, MASKED)
        kept = client.get("/v1/order/k1", headers=KNOWN).json()
        assert (kept["region"], kept["quantity"], kept["amount"]) == ("x", 7, PLANTED[2])


@pytest.mark.parametrize(
    "operations",
    [
        [{"op": "test", "path": "/region", "value": PLANTED[0]}],
        [{"op": "test", "path": "", "value": {}}],
        [{"op": "copy", "from": "/region", "path": "/status"}],
        [{"op": "move", "from": "/region", "path": "/status"}],
    ],
)
def test_a_patch_cannot_find_out_a_hidden_value(
    orders: Orders, operations: list[dict[str, Any]]
) -> None:
    patch = {"Content-Type": "application/json-patch+json"}
    with talking(orders) as client:
        content = json.dumps(operations)
        refused = client.patch("/v1/order/k1", content=content, headers=patch)
        assert refused.status_code == 403
        assert "`unmasked` on order" in refused.json()["detail"]
        for wrong in ("/nope/x", "/status/x", "/nope"):
            content = json.dumps([{"op": "remove", "path": wrong}])
            failed = client.patch("/v1/order/k1", content=content, headers=patch)
            assert failed.status_code == 422
            assert leaks(failed.text) == []
            seen = client.patch("/v1/order/k1", content=content, headers={**KNOWN, **patch})
            assert seen.status_code == 422
        fine = json.dumps([{"op": "replace", "path": "/region", "value": "x"}])
        assert client.patch("/v1/order/k1", content=fine, headers=patch).status_code == 200


def test_who_may_only_write_sees_nothing(orders: Orders) -> None:
    patch = {"Authorization": f"Bearer {WRITES}", "Content-Type": "application/json-patch+json"}
    with talking(orders) as client:
        replaced = json.dumps([{"op": "replace", "path": "/quantity", "value": 77}])
        written = client.patch("/v1/order/k1", content=replaced, headers=patch)
        assert (written.status_code, written.json()) == (200, MASKED)
        tested = json.dumps([{"op": "test", "path": "/quantity", "value": 77}])
        refused = client.patch("/v1/order/k1", content=tested, headers=patch)
        assert refused.status_code == 403
        assert "`read` on order" in refused.json()["detail"]
        assert client.get("/v1/order/k1", headers=KNOWN).json()["quantity"] == 77


@pytest.mark.parametrize(
    "path",
    [
        "/v1/order?region=planted-north",
        "/query/v1/order?where=region=planted-north",
        "/query/v1/order?where=amount>3",
        "/query/v1/order?order=-amount",
        "/stream/v1/order?changed=region",
        "/stream/v1/order?becomes=region:planted-north",
        "/console/-/views/by_region",
        "/console/-/views/order_latest?first=k1",
        "/console/-/dead",
        "/console/-/dead/reason?entity=order&reason=x",
        "/console/-/handlers",
    ],
)
def test_a_condition_on_a_hidden_field_is_refused(orders: Orders, path: str) -> None:
    with talking(orders) as client:
        refused = client.get(path)
        assert refused.status_code == 403
        assert "unmasked" in refused.text
        if "/stream" not in path:
            assert client.get(path, headers=KNOWN).status_code == 200


def test_the_etag_of_a_masked_state_is_its_own(orders: Orders) -> None:
    merge = {"Content-Type": "application/merge-patch+json"}
    with talking(orders) as client:
        for path in ("/v1/order/k1", "/v1/order/k1?version=1", "/feed/v1/order/{}"):
            if "{}" in path:
                listed = client.get("/feed/v1/order", headers={"Accept": "application/json"})
                path = path.format(max(listed.json()["feeds"], key=lambda e: e["position"])["feed"])
            own, whole = client.get(path), client.get(path, headers=KNOWN)
            assert own.headers["etag"] != whole.headers["etag"]
            for answer, headers in ((own, {}), (whole, KNOWN)):
                for other in (own, whole):
                    again = client.get(
                        path, headers={**headers, "If-None-Match": other.headers["etag"]}
                    )
                    assert (again.status_code == 304) == (other is answer), path
        tag = client.get("/v1/order/k1").headers["etag"]
        written = client.patch(
            "/v1/order/k1", json={"quantity": 3}, headers={**merge, "If-Match": tag}
        )
        assert written.status_code == 200
        stale = client.patch(
            "/v1/order/k1", json={"quantity": 4}, headers={**merge, "If-Match": tag}
        )
        assert stale.status_code == 412


@pytest.mark.parametrize(
    ("masks", "tokens", "expected"),
    [
        ({"ordr": ("region",)}, True, "entity types of the app: order"),
        ({"order": ("regoin",)}, True, "a field of order"),
        ({"order": ("region.name",)}, True, "a field of order"),
        ({"order": ("order_id",)}, True, "another field than the key"),
        ({"order": ("region",)}, False, "callers with tokens"),
    ],
)
def test_a_mask_that_would_hide_nothing_is_refused_at_the_start(
    orders: Orders, masks: dict[str, tuple[str, ...]], tokens: bool, expected: str
) -> None:
    given = {"a": caller_entry(SEES)} if tokens else {}
    api = ApiConfig(tokens=given, masks=masks)
    with pytest.raises(InvalidConfig, match=expected):
        create_api(orders.config.model_copy(update={"api": api}), orders.app)


def test_a_permission_for_no_entity_type_is_refused_at_the_start(orders: Orders) -> None:
    api = ApiConfig(tokens={"a": caller_entry(SEES, permissions={"ordr": ("read",)})})
    with pytest.raises(InvalidConfig, match="entity types of the app: order"):
        create_api(orders.config.model_copy(update={"api": api}), orders.app)


def test_every_reading_route_was_asked(orders: Orders) -> None:
    """The walk above takes the routes of the application, and so those that come later, too."""
    with talking(orders) as client:
        walked = {path.partition("?")[0] for path in paths(orders, client)}
    with made(orders.config, orders.app) as api:
        routes = asked(api.routes, ("order",))
        assert len(walked) >= len({each.template for each in routes if each.method == "GET"})
