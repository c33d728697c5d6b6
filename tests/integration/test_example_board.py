"""The example's departure board in a real browser: it shows a view's rows, and follows them."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from chromium import browser
from kit.serving import serving
from reading_cases import Orders

pytestmark = pytest.mark.settings(api={"port": 0, "page_max": 100})

__all__ = ["browser"]

PAGE = Path(__file__).parents[2] / "examples" / "board" / "page.py"
GIVEN = 'data-view="departures" data-columns="departs flight destination gate status"'
SHOWN = 'data-view="order" data-columns="order_id region status"'


@contextmanager
def shown(everstate: str) -> Iterator[str]:
    """The board's own server; its page shows the orders of this test."""
    spec = importlib.util.spec_from_file_location("board_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert GIVEN in module.BOARD
    facts = {"everstate": everstate, "board": module.BOARD.replace(GIVEN, SHOWN)}
    pages: Any = type("OrderPages", (module.Pages,), facts)
    with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def expect_rows(page: Page, *rows: str) -> None:
    expect(page.locator("tbody tr")).to_have_text([*rows], timeout=30_000)


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.timeout(120)
def test_the_board_shows_what_comes_changes_and_goes_also_after_the_server_was_away(
    orders: Orders, browser: Browser
) -> None:
    page, faults, port = browser.new_page(), list[str](), free_port()
    page.on("pageerror", lambda error: faults.append(str(error)))
    orders.send(orders.change("a1", region="north", status="open"))
    orders.send(orders.change("b1", region="<b>", status="open"))
    orders.keep()
    with shown(f"http://127.0.0.1:{port}") as place:
        with serving(orders.config, orders.app, port):
            page.goto(place)
            expect(page.get_by_role("status")).to_have_text("Live")
            expect(page.locator("th")).to_have_text(["order_id", "region", "status"])
            expect_rows(page, "a1northopen", "b1<b>open")
            orders.send(orders.change("a1", region="north", status="paid"))
            orders.send(orders.change("a2", region="south", status="open"), orders.change("b1"))
            orders.keep()
            expect_rows(page, "a1northpaid", "a2southopen")
        expect(page.get_by_role("status")).not_to_have_text("Live", timeout=30_000)
        orders.send(orders.change("a3", region="south", status="open"))
        orders.keep()
        with serving(orders.config, orders.app, port):
            expect_rows(page, "a1northpaid", "a2southopen", "a3southopen")
            page.close()
    assert faults == []
