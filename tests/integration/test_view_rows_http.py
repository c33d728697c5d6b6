"""Views read over HTTP: the rows are those of SQL, at one position of one version."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import date
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from test_subscriptions import served

from everstate.archive import table_path
from everstate.changes.tokens import parse_token
from everstate.errors import NotFound
from everstate.log.consumer import Consumer
from reading_cases import Orders

pytestmark = pytest.mark.settings(api={"port": 0, "page_max": 100})

VIEWS = ("by_region", "totals", "open_orders", "order", "order_latest", "order_history")


@pytest.fixture
def api(orders: Orders) -> Iterator[httpx.Client]:
    with served(orders) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def got(api: httpx.Client, path: str, status: int = 200, **parameters: Any) -> Any:
    answer = api.get(path, params=parameters)
    assert answer.status_code == status, answer.text
    return answer.json()


def pages(api: httpx.Client, view: str, **parameters: Any) -> list[dict[str, Any]]:
    """All rows of a view, page by page, by the links."""
    rows: list[dict[str, Any]] = []
    path: str | None = str(httpx.URL(f"/views/v1/{view}", params=parameters))
    while path is not None:
        answer = api.get(path)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        rows += page["items"]
        assert ("next" in answer.links) == (page["after"] is not None)
        path = answer.links["next"]["url"] if page["after"] else None
    return rows


def by_sql(orders: Orders, query: str) -> list[dict[str, Any]]:
    """Rows of a query as JSON has them."""
    cursor = orders.kept.connection.execute(query.encode())
    names = [column.name for column in cursor.description or ()]
    return as_json([dict(zip(names, row, strict=True)) for row in cursor])


def as_json(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of SQL in the form in which an answer has them."""

    def text(value: Any) -> str:
        return value.isoformat() if isinstance(value, date) else str(value)

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not isfinite(value) else value

    whole = [{name: plain(value) for name, value in row.items()} for row in rows]
    found: list[dict[str, Any]] = json.loads(json.dumps(whole, default=text))
    return found


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[Any]:
    """Rows that one of both lacks: the checker of these tests."""
    left, right = ([json.dumps(row, sort_keys=True) for row in rows]
                   for rows in (expected, found))  # fmt: skip
    missing = [row for row in left if left.count(row) > right.count(row)]
    return missing + [row for row in right if right.count(row) > left.count(row)]


def some_orders(orders: Orders) -> None:
    random, records = Random(5), []
    for place in range(40):
        region = random.choice(["north", "south", "a;b", None])
        amount = random.choice(["1.50", "20.00", None])
        fields = {"region": region, "amount": amount, "quantity": place % 7}
        records.append(orders.change(f"o/{place}", **fields))
    orders.send(*records, orders.change("o/3"))
    orders.keep()


def test_every_view_has_the_rows_of_sql_on_pages_of_any_size(
    orders: Orders, api: httpx.Client
) -> None:
    some_orders(orders)
    for view in VIEWS:
        expected = by_sql(orders, f'SELECT * FROM "{view}"')
        assert len(expected) > 3 or view == "totals"
        for limit in (1, 3, 100):
            found = pages(api, view, limit=limit)
            assert differences(expected, found) == [], (view, limit)
    # The planted defects: a row that is there twice, and one that is not there.
    assert differences(expected, [*expected, expected[0]])
    assert differences(expected, expected[1:])


@pytest.mark.parametrize("order", ["", "-quantity"])
def test_a_row_that_stays_is_on_one_page_while_others_come_and_go(
    orders: Orders, api: httpx.Client, order: str
) -> None:
    some_orders(orders)
    staying = {row["order_id"] for row in pages(api, "order")}
    seen: list[str] = []
    path: str | None = str(httpx.URL("/views/v1/order", params={"limit": 6, "order": order}))
    while path is not None:
        answer = api.get(path)
        page = [row["order_id"] for row in answer.json()["items"]]
        seen += page
        path = answer.links["next"]["url"] if answer.json()["after"] else None
        gone = f"o/{len(seen)}"
        staying.discard(gone)
        # One row goes, on a page before or after; one comes before all rows, one behind all.
        orders.send(
            *([orders.change(gone)] if orders.versions.get(gone, (0, None))[1] else []),
            orders.change(f"a{len(seen)}", quantity=99, region="north"),
            orders.change(f"z{len(seen)}", quantity=0, region="north"),
        )
        orders.keep()
        if len(seen) > 200:
            break
    assert [each for each in staying if seen.count(each) != 1] == []


def test_rows_are_filtered_and_sorted_as_sql_does(orders: Orders, api: httpx.Client) -> None:
    some_orders(orders)
    asked = {
        ("order", "quantity>=3;region!=south", "-quantity;region"): "quantity >= 3 AND "
        "region IS DISTINCT FROM 'south' ORDER BY quantity DESC, region NULLS LAST, _key",
        ("order", 'region="a;b";quantity>=3', "order_id"): "region = 'a;b' AND quantity >= 3 "
        "ORDER BY order_id",
        ("order", "region=null", "order_id"): "region IS NULL ORDER BY order_id",
        ("order", "amount=1.5", "-amount"): "amount = 1.5 ORDER BY amount DESC, _key",
        ("order", "", "-amount;-order_id"): "true ORDER BY amount DESC NULLS LAST, _key DESC",
        ("open_orders", "_key<=o/20", "-region"): "_key <= 'o/20' ORDER BY region DESC NULLS LAST, "
        "_key",
        ("by_region", "orders>5", "total"): "orders > 5 ORDER BY total NULLS LAST, region",
        ("order_history", "kind=deleted", ""): "kind = 'deleted'",
    }
    for (view, where, order), condition in asked.items():
        expected = by_sql(orders, f'SELECT * FROM "{view}" WHERE {condition}')
        assert expected, condition
        for limit in (2, 100):
            found = pages(api, view, where=where, order=order, limit=limit)
            assert found == expected, (view, where, order)
    for view, parameters, status, said in (
        ("order", {"where": "regoin=north"}, 400, "Did you mean region?"),
        ("order", {"where": "quantity=many"}, 400, "a whole number"),
        ("order", {"where": "region= north"}, 400, "begins with a blank"),
        ("order", {"where": "quantity=1_0"}, 400, "digits"),
        ("order", {"where": "region=a\x00b"}, 400, "NUL"),
        ("order_latest", {"where": "state=1"}, 400, "jsonb"),
        ("order", {"order": "nothing"}, 400, "nothing"),
        ("order", {"limit": 101}, 400, "1 to 100"),
        ("order", {"after": "e30"}, 422, "earlier page"),
        ("order", {"q": "words"}, 422, "cannot be searched"),
        ("by_region", {"at": "2026-01-01T00:00:00Z"}, 422, "only its present rows"),
        ("nothing", {}, 404, "unknown view"),
    ):
        answer = api.get(f"/views/v1/{view}", params=parameters)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert got(api, "/views/v1/order", where="quantity=" + "9" * 40)["items"] == []
    everything = got(api, "/views/v1/order", limit=3)["items"]
    assert got(api, "/views/v1/order", limit=3, where="quantity<" + "9" * 40)["items"] == everything
    after = got(api, "/views/v1/order", limit=2, order="-quantity")["after"]
    refused = got(api, "/views/v1/order", 422, after=after)
    assert "another order" in refused["detail"]


def test_one_row_is_read_by_its_key(orders: Orders, api: httpx.Client) -> None:
    some_orders(orders)
    (expected,) = by_sql(orders, "SELECT * FROM by_region WHERE region = 'north'")
    assert got(api, "/views/v1/by_region/rows/north") == expected
    assert got(api, "/views/v1/by_region/rows/a%3Bb")["region"] == "a;b"
    assert got(api, "/views/v1/order/rows/o%2F7")["order_id"] == "o/7"
    (past,) = by_sql(orders, "SELECT * FROM order_history WHERE key = 'o/3' AND version = 2")
    assert got(api, "/views/v1/order_history/rows/o%2F3/2") == past
    for path, said in (
        ("order/rows/o%2F3", "has no row"),
        ("order/rows/o/7", "is _key"),
        ("order_history/rows/o%2F3/two", "has no row"),
        ("order_history/rows/o%2F3/%202%20", "has no row"),
        ("order_history/rows/o%2F3/%EF%BC%92", "has no row"),
        ("order_history/rows/o%2F3/" + "9" * 30, "has no row"),
        ("order/rows/a%00b", "has no row"),
        ("order/rows/%FF", "UTF-8"),
        ("totals/rows/x", "one row"),
    ):
        answer = api.get(f"/views/v1/{path}")
        assert (answer.status_code, said in answer.text) == (404, True), answer.text


def test_headers_say_where_the_rows_stand(orders: Orders, api: httpx.Client) -> None:
    some_orders(orders)
    first = api.get("/views/v1/by_region")
    headers = first.headers
    assert (headers["everstate-view-version"], headers["everstate-lag-changes"]) == ("1", "0")
    token = parse_token(headers["everstate-token"])
    spots = token.positions["order"].spots
    assert {p: spot.next_offset for (_, p), spot in spots.items()} == orders.kept.vector()
    same = api.get("/views/v1/by_region", headers={"If-None-Match": headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["everstate-token"] == headers["everstate-token"]
    orders.send(orders.change("o/99", region="north", amount="1.00", quantity=1))
    behind = api.get("/views/v1/by_region", headers={"If-None-Match": headers["etag"]})
    assert (behind.status_code, behind.headers["everstate-lag-changes"]) == (304, "1")
    assert float(behind.headers["everstate-lag-seconds"]) > 0
    orders.keep()
    after = api.get("/views/v1/by_region", headers={"If-None-Match": headers["etag"]})
    assert (after.status_code, after.headers["everstate-lag-changes"]) == (200, "0")
    waited = {"Everstate-Wait-For": after.headers["everstate-token"]}
    assert api.get("/views/v1/totals", headers=waited).status_code == 200
    assert api.get("/views/v1/totals", headers={"Everstate-Wait-For": "x"}).status_code == 422
    assert api.head("/views/v1/totals").status_code == 200


def test_views_are_listed_with_their_columns(orders: Orders, api: httpx.Client) -> None:
    some_orders(orders)
    listed = {each["name"]: each for each in got(api, "/views/v1")["items"]}
    assert set(listed) == set(VIEWS)
    by_region = listed["by_region"]
    assert by_region["columns"][:2] == [
        {"name": "region", "type": "text"},
        {"name": "orders", "type": "bigint"},
    ]
    assert (by_region["key"], listed["totals"]["key"]) == (["region"], [])
    assert (listed["order"]["key"], listed["open_orders"]["key"]) == (["_key"], ["_key"])
    assert listed["order_history"]["key"] == ["key", "version"]
    told = (by_region["kind"], by_region["version"], by_region["state"], by_region["entities"])
    assert told == ("linear", 1, "live", ["order"])
    assert (by_region["lag_changes"], by_region["next"]) == (0, None)
    assert sum(by_region["position"].values()) == sum(orders.kept.vector().values())
    assert api.get("/").json()["views"] == "/views/v1"


def test_the_origin_of_a_version_is_its_place_in_the_log_its_file_and_its_views(
    orders: Orders, api: httpx.Client
) -> None:
    some_orders(orders)
    path = "/v1/order/o%2F7/explain/quantity"
    before = got(api, path)
    assert (before["topic"], before["archived"]) == (orders.topic, None)
    place = before["version"]["place"]
    with Consumer(orders.config) as consumer:
        offset = place["offset"]
        (record,) = consumer.read(orders.topic, place["partition"], offset, offset + 1)
    assert json.loads(record.value or b"")["id"] == before["version"]["change_id"]
    orders.archive(orders.kept.vector())
    found = got(api, path)["archived"]
    assert (Path(table_path(orders.config, "order")) / found["file"]).is_file()
    assert {each["view"] for each in before["applied_by"] if each["applied"]} >= {"by_region"}


def at_position(orders: Orders, spots: dict[int, int]) -> list[tuple[Any, ...]]:
    """Orders and quantity as the changes before a position make them."""
    newest = "SELECT DISTINCT ON (key) state FROM order_history WHERE "
    places = " OR ".join(f'(partition = {p} AND "offset" < {at})' for p, at in spots.items())
    return orders.kept.query(
        "SELECT count(*), sum((state ->> 'quantity')::bigint) FROM "
        f"({newest}{places} ORDER BY key, version DESC) AS newest WHERE state IS NOT NULL"
    )


def unlike(orders: Orders, seen: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Answers that are not those of the position that they name."""
    found = []
    for token, row in seen:
        spots = parse_token(token).positions["order"].spots
        expected = at_position(orders, {p: spot.next_offset for (_, p), spot in spots.items()})
        if [(row["orders"], int(row["quantity"]))] != [(n, int(q)) for n, q in expected]:
            found.append((token, row, expected))
    return found


def test_no_reader_sees_half_of_a_range(orders: Orders, api: httpx.Client) -> None:
    """Answers while changes are kept are those of exactly the position that they name."""
    random, ended = Random(3), threading.Event()

    def write() -> None:
        while not ended.wait(0.02):
            keys = [f"o/{random.randrange(20)}" for _ in range(random.randint(1, 20))]
            orders.send(*(orders.change(key, quantity=random.randrange(9)) for key in keys))

    orders.send(orders.change("o/0", quantity=1))
    orders.keep()
    seen: list[tuple[str, dict[str, Any]]] = []
    writer = threading.Thread(target=write)
    with orders.keeping():
        writer.start()
        try:
            while len({token for token, _ in seen}) < 10:
                answer = api.get("/views/v1/totals")
                seen.append((answer.headers["everstate-token"], answer.json()["items"][0]))
        finally:
            ended.set()
            writer.join()
        orders.wait_until_kept()
    assert unlike(orders, seen) == []
    # The planted defect: rows with the token of another answer.
    tokens = sorted({token for token, _ in seen})
    assert len(tokens) > 5
    assert unlike(orders, [(token, seen[-1][1]) for token in tokens])


def test_rows_in_another_store_are_answered_with_where_they_are(
    orders: Orders, api: httpx.Client
) -> None:
    """What is published decides, and not the declaration, which may be newer."""
    some_orders(orders)
    orders.kept.control.run(
        "UPDATE {view} SET definition = definition || %s::jsonb WHERE name = 'open_orders'",
        ('{"store": "redis"}',),
    )
    for path in ("", "/rows/o%2F1", "/stream"):
        problem = got(api, f"/views/v1/open_orders{path}", 404)
        assert problem["detail"].startswith("the rows of open_orders are in the store redis.")
    with pytest.raises(NotFound, match="in the store redis"):
        orders.app.snapshot("open_orders", config=orders.config)
    assert got(api, "/views/v1/by_region")["items"]
