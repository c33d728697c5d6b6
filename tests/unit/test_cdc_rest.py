"""Requests to Kafka Connect: repeated during a rebalance, and refused with its reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from everstate.errors import CaptureFailed, Unavailable
from everstate.sources.cdc.rest import Connect, NoSuchConnector


@contextmanager
def answering(*answers: tuple[int, object]) -> Iterator[tuple[Connect, list[str]]]:
    """Connect that gives these answers in turn, and the paths that it was asked for."""
    left, asked = list(answers), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, answer = left.pop(0)
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Connect(f"http://127.0.0.1:{server.server_port}/"), asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_request_during_a_rebalance_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _seconds: None)
    rebalance = (409, {"message": "Cannot complete request because of a rebalance"})
    with answering(rebalance, rebalance, (200, {"name": "orders"})) as (connect, asked):
        assert connect.config("orders") == {"name": "orders"}
    assert asked == ["/connectors/orders/config"] * 3


@pytest.mark.parametrize(
    ("status", "message", "error", "said"),
    [
        (404, "Connector orders not found", NoSuchConnector, "/connectors"),
        (400, "Connector configuration is invalid", CaptureFailed, "configuration is invalid"),
        (500, "Request timed out", Unavailable, "Request timed out"),
        (500, "NullPointerException", CaptureFailed, "NullPointerException"),
    ],
)
def test_any_other_refusal_is_told_at_once(
    status: int, message: str, error: type[Exception], said: str
) -> None:
    with (
        answering((status, {"message": message})) as (connect, asked),
        pytest.raises(error, match=said),
    ):
        connect.config("orders")
    assert len(asked) == 1


def test_a_connect_that_is_away_is_unavailable() -> None:
    with answering() as (connect, _):
        pass
    with pytest.raises(Unavailable, match="does not answer"):
        connect.config("orders")
