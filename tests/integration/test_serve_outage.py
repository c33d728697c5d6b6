"""Kafka and PostgreSQL are killed under `serve`: it says so, and goes on when they are back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from test_subscriptions import Subscriber, faults
from test_view_rows_http import api, some_orders

from kit.waiting import until
from reading_cases import Orders
from running_stack import RunningStack

__all__ = ["api"]

VIEWED = (
    "/v1/order/o%2F7/history",
    "/v1/order/o%2F7/diff?from=1",
    "/v1/order/o%2F7/explain",
    "/v1/order/o%2F7/provenance",
    "/query/v1/order",
    "/query/v1/order/changes",
    "/views/v1/by_region",
    "/views/v1/order/rows/o%2F7",
)
PATIENCE_S = 120.0

pytestmark = [
    pytest.mark.settings(api={"port": 0, "page_max": 100}),
    pytest.mark.full,
    pytest.mark.timeout(600),
]


def answers(api: httpx.Client, paths: Sequence[str]) -> dict[str, tuple[int, Any]]:
    """Status and body by path; 503 says why and when to ask again."""
    found = {}
    for path in paths:
        answer = api.get(path)
        if answer.status_code == 503:
            assert answer.headers["Retry-After"] == "1", path
            assert answer.json()["detail"], path
        found[path] = (answer.status_code, answer.json())
    return found


def test_readers_get_503_while_a_server_is_away_and_go_on_when_it_is_back(
    stack: RunningStack, orders: Orders, api: httpx.Client
) -> None:
    some_orders(orders)
    feed = api.get("/feed/v1/order", headers={"Accept": "application/json"}).json()
    heads = [each["current"] for each in feed["feeds"]]
    subscriber = Subscriber(str(api.base_url).rstrip("/"), since="beginning")
    try:
        assert subscriber.is_live.wait(PATIENCE_S)
        before = answers(api, VIEWED)
        assert {status for status, _ in before.values()} == {200}

        stack.servers.kill("kafka")
        away = {api.get(head).status_code for head in heads}
        known = {path for path, (status, _) in answers(api, VIEWED).items() if status == 200}
        stack.servers.restart("kafka")
        assert away <= {200, 503}
        needless = {path for path in VIEWED if "explain" not in path}
        assert known >= needless, "what the views have needs no log"
        orders.send(orders.change("after", quantity=1, status="open"))
        orders.keep()
        until(lambda: any(each["key"] == "after" for each in subscriber.changes), PATIENCE_S)
    finally:
        subscriber.stop()
    assert faults(subscriber.changes, dict.fromkeys(orders.versions, 0)) == []
    assert {api.get(head).status_code for head in heads} == {200}

    before = answers(api, VIEWED)
    assert {status for status, _ in before.values()} == {200}
    stack.servers.kill("postgres")
    assert {status for status, _ in answers(api, VIEWED).values()} == {503}
    assert "store" in api.get("/ready").text
    stack.servers.restart("postgres")
    until(lambda: api.get("/ready").status_code == 200, PATIENCE_S)
    assert answers(api, VIEWED) == before
