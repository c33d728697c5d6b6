"""Clients that do not read, send too much, or ask for what costs too much."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from clean_cases import CONFIG
from everstate.api.guards import FewInvalid, timed_protocol
from everstate.cassandra import Database
from everstate.changes import Provenance
from everstate.config import load
from everstate.errors import InvalidQuery, Unavailable
from everstate.parts import Journal, read_states, states_folder
from everstate.runtime import figures as metrics_module
from everstate.runtime.figures import serving_figures
from everstate.sources.crud import events as events_module
from everstate.sources.crud.events import EventLog
from everstate.sources.stores.cassandra import store as cassandra_module
from everstate.sources.stores.cassandra.store import CassandraStore
from everstate.testing.store_contract import ORDER, StoredOrder

TELLER = Provenance(api_version="v1", service_name="shop", identifier="x")
_WAIT_S = 30


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answers end only when the connection does."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        body = b"x" * 1_048_576
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)


async def short(scope: Any, receive: Any, send: Any) -> None:
    """An application with one answer, after which the connection is closed."""
    headers = [(b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * 30_000_000})


class Served:
    """A server on a free port of this machine."""

    def __init__(self, app: Any, send_s: float, connections_max: int = 10) -> None:
        self.state = ServerState()
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        protocol = timed_protocol(60, send_s, connections_max)
        self.made: list[Any] = []

        def make() -> Any:
            self.made.append(protocol(config, self.state, {}, asyncio.get_running_loop()))
            return self.made[-1]

        self._make = make
        self._clients: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Served:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        self._clients.append(made[1])
        return made

    async def until_free(self) -> None:
        while self.state.connections or not self.made:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("app", [endless, short])
def test_a_client_that_does_not_read_its_answer_loses_its_connection(app: Any) -> None:
    async def once() -> None:
        async with Served(app, send_s=0.05) as served:
            _, writer = await served.connect()
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.wait_for(served.until_free(), _WAIT_S)

    asyncio.run(once())


def test_there_are_no_more_connections_than_allowed() -> None:
    async def once() -> None:
        async with Served(short, send_s=60, connections_max=2) as served:
            for _ in range(2):
                await served.connect()
            while len(served.state.connections) < 2:
                await asyncio.sleep(0.01)
            reader, _ = await served.connect()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), _WAIT_S)
            assert len(served.state.connections) == 2

    asyncio.run(once())


def test_a_request_with_two_lengths_is_the_last_of_its_connection() -> None:
    async def answered(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def once(*lengths: bytes) -> bytes:
        lines = b"".join(length + b"\r\n" for length in lengths)
        async with Served(answered, send_s=60) as served:
            reader, writer = await served.connect()
            request = b"POST / HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n0\r\n\r\n"
            writer.write(
                request + b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            return await asyncio.wait_for(reader.read(), _WAIT_S)

    chunked = b"Transfer-Encoding: chunked"
    assert asyncio.run(once(chunked)).count(b"HTTP/1.1 200") == 2
    both = asyncio.run(once(b"Content-Length: 5", chunked))
    assert both.count(b"HTTP/1.1") == 1
    assert b"connection: close" in both.lower()


def test_requests_that_are_not_http_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("uvicorn.error")
    few = FewInvalid()
    logger.addFilter(few)
    try:
        with caplog.at_level(logging.INFO):
            for _ in range(500):
                logger.warning("Invalid HTTP request received.")
            logger.warning("something else")
    finally:
        logger.removeFilter(few)
    assert len(caplog.records) <= 11
    assert caplog.records[-1].message == "something else"


def test_figures_are_for_this_machine_only(tmp_path: Path) -> None:
    with serving_figures(load(tmp_path), "relay"):
        Journal("relay", states_folder(load(tmp_path).project.data_dir))
        (state,) = read_states(load(tmp_path).project.data_dir)
        foreign = urllib.request.Request(state.figures or "", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(foreign, timeout=10)
        refused.value.close()
        assert refused.value.code == 421


def test_a_client_that_asks_for_no_figures_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics_module._Handler.timeout
    monkeypatch.setattr(metrics_module._Handler, "timeout", 0.05)
    with serving_figures(load(tmp_path), "relay"):
        Journal("relay", states_folder(load(tmp_path).project.data_dir))
        (state,) = read_states(load(tmp_path).project.data_dir)
        port = urllib.parse.urlsplit(state.figures or "").port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as silent:
            assert silent.recv(1) == b""


def test_events_that_wait_for_kafka_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_WAITING_BYTES_MAX", 5_000)
    monkeypatch.setattr(EventLog, "sending", True)
    log = EventLog(CONFIG, [ORDER])

    def append(key: str) -> None:
        event = StoredOrder(order_id=key, note="x" * 1_000)
        log.append(ORDER.name, event, provenance=TELLER, occurred_at=None)

    append("a")
    append("b")
    append("c")
    with pytest.raises(Unavailable, match="5,000 bytes"):
        append("d")
    assert log._waiting.qsize() == 3

    class Sender:
        def __len__(self) -> int:
            return 0

        def send_raw(self, *_: Any) -> None: ...

        def flush(self, _timeout_s: float) -> None: ...

    log._done(cast(Any, Sender()), log._take())
    append("d")
    with pytest.raises(queue.Empty):
        [log._waiting.get_nowait() for _ in range(2)]


class Cells:
    """A table in memory: each row has a token of its own."""

    settings = CONFIG.cassandra
    keyspace = "k"

    def __init__(self, count: int, size: int) -> None:
        note = "x" * size
        self.rows = [
            SimpleNamespace(
                place=number, head_version=1, after=f'{{"order_id":"{number}","note":"{note}"}}'
            )
            for number in range(count)
        ]
        self.read = 0

    def stream(self, statement: str, values: Any, rows: int) -> Any:
        token, limit = values
        for row in [each for each in self.rows if each.place >= token][:limit]:
            self.read += 1
            yield row


def test_a_page_of_cassandra_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cassandra_module, "PAGE_BYTES_MAX", 10_000)
    cells = Cells(50, 3_000)
    store = CassandraStore(CONFIG, ORDER, database=cast(Database, cells))
    found, cursor, pages = list[str](), None, 0
    while True:
        page = store.page(limit=30, cursor=cursor)
        found += [ORDER.key_of(each.entity) for each in page.entities]
        assert len(page.entities) <= 4
        cursor, pages = page.cursor, pages + 1
        if cursor is None:
            break
    assert found == [str(number) for number in range(50)]
    assert cells.read < 50 + 3 * pages


def test_a_forged_cursor_reads_no_million_rows() -> None:
    store = CassandraStore(CONFIG, ORDER, database=cast(Database, Cells(1, 1)))
    with pytest.raises(InvalidQuery, match="cursor"):
        store.page(limit=10, cursor="0.999999")
