"""The clients read and follow views of a real server."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from test_subscriptions import served
from test_view_rows_http import by_sql, differences, some_orders
from test_view_streams import Fold

from everstate.client import AsyncClient, Client, RequestFailed
from kit.waiting import until
from reading_cases import Orders

pytestmark = pytest.mark.settings(api={"port": 0, "page_max": 100})


def test_the_client_reads_the_rows_of_a_view(orders: Orders) -> None:
    some_orders(orders)
    with served(orders) as address, Client(address) as client:
        wanted = by_sql(orders, 'SELECT * FROM "order" ORDER BY quantity DESC, _key')
        assert list(client.view_rows("order", order=["-quantity"])) == wanted
        north = [row for row in wanted if row["region"] == "north" and row["quantity"] > 2]
        found = list(client.view_rows("order", where=["region=north", "quantity>2"]))
        assert differences(north, found) == []
        page = client.view_page("order", limit=5)
        assert (len(page.rows), page.version, page.lag_seconds) == (5, 1, 0.0)
        again = client.view_page("order", after=page.after, wait_for=page.token)
        assert page.rows[-1]["_key"] < again.rows[0]["_key"]
        assert client.view_row("order", "o/7")["order_id"] == "o/7"
        assert client.view_row("order_history", "o/3", 2)["kind"] == "deleted"
        with pytest.raises(RequestFailed, match="has no row"):
            client.view_row("by_region", "nowhere")
        with pytest.raises(RequestFailed, match="cannot be searched"):
            client.view_page("order", words="tea")

        async def ask() -> tuple[list[Any], Any, Any]:
            async with AsyncClient(address) as other:
                rows = [row async for row in other.view_rows("order", order=["-quantity"])]
                events = other.follow_view("totals")
                first = await anext(events)
                return rows, await other.view_row("order", "o/7"), first

        rows, row, first = asyncio.run(ask())
        assert (rows, row["order_id"]) == (wanted, "o/7")
        assert (first.name, len(first.data["rows"])) == ("snapshot", 1)


@pytest.mark.timeout(180)
def test_a_view_is_followed_while_the_server_is_away_for_a_while(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.client.asynchronous.RETRY_S", 0.1)
    fold, api = Fold(), orders.config.api
    some_orders(orders)

    def follow(client: Client) -> None:
        for event in client.follow_view("order"):
            fold.take(event.name, event.data)
            if ("last",) in fold.rows:
                return

    with served(orders) as address:
        port = int(address.rpartition(":")[2])
        orders.config = orders.config.model_copy(
            update={"api": api.model_copy(update={"port": port})}
        )
        client = Client(address)
        follower = threading.Thread(target=follow, args=(client,))
        follower.start()
        until(lambda: bool(fold.rows), 60)
        orders.send(orders.change("o/1", region="west", quantity=1))
        orders.keep()
        until(lambda: fold.rows[("o/1",)]["region"] == "west", 60)
    orders.send(orders.change("o/2"))
    with served(orders):
        orders.send(orders.change("last", region="west", quantity=1))
        orders.keep()
        follower.join(60)
    client.close()
    assert not follower.is_alive()
    assert (fold.reasons, fold.faults) == (["began", "missed"], [])
    assert differences(by_sql(orders, 'SELECT * FROM "order"'), list(fold.rows.values())) == []
