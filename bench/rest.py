"""rest: requests a second of `everstate serve`, beside a bare HTTP server with a fixed answer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.report import Result, result
from bench.session import Session
from everstate.config import Config

REQUESTS = 8_000
CONNECTIONS = 16
_START_S = 60
_WHO = "Everstate-Service: bench\r\nEverstate-Identifier: b\r\nContent-Type: application/json\r\n"
_BARE = """
import sys, uvicorn
async def app(scope, receive, send):
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})
print("serving http://127.0.0.1:" + sys.argv[1], file=sys.stderr, flush=True)
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical", lifespan="off")
"""


def run(session: Session) -> list[Result]:
    count = session.size(REQUESTS)
    config = session.fresh()
    bare = [sys.executable, "-c", _BARE, "18099"]
    ours = [sys.executable, "-m", "everstate.cli", "serve", "--port", "0", "--app", "hotel:app"]
    rows = []
    with _served(bare, config) as floor_port, _served(ours, config) as port:
        for name, method, path in (
            ("GET an entity", "GET", "/v1/guest/g{number}"),
            ("PUT an entity (row, change, commit)", "PUT", "/v1/guest/g{number}"),
            ("POST an event (acks=all)", "POST", "/v1/event"),
        ):
            turn = iter(range(1_000_000))

            def load(
                at: int, method: str = method, path: str = path, turn: Iterator[int] = turn
            ) -> float:
                requests = [_request(method, path, n, next(turn)) for n in range(count)]
                return asyncio.run(_rate(at, requests))

            if method == "GET":
                asyncio.run(_rate(port, [_request("PUT", path, n, 0) for n in range(count)]))
            values, floors = session.alternate(
                lambda load=load: load(floor_port),  # type: ignore[misc]
                lambda load=load: load(port),  # type: ignore[misc]
            )
            rows.append(
                result(
                    "rest",
                    f"{name}, {CONNECTIONS} connections, one process",
                    "requests/s",
                    values,
                    floors=floors,
                    floor_is="bare uvicorn, constant answer",
                )
            )
    session.drop(config)
    return rows


def _request(method: str, path: str, number: int, turn: int) -> bytes:
    if method == "POST":
        body = json.dumps(
            {
                "event_id": f"00000000-0000-4000-8000-{turn:012}",
                "session_id": "s1",
                "type": "seen",
                "occurred_at": "2026-01-02T03:04:05Z",
            }
        )
    else:
        guest = {"guest_id": f"g{number}", "name": "Eva", "city": f"c-{turn}", "nights": 3}
        body = "" if method == "GET" else json.dumps(guest)
    head = f"{method} {path.format(number=number)} HTTP/1.1\r\nHost: b\r\n{_WHO}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def _rate(port: int, requests: list[bytes]) -> float:
    """Requests a second over all connections; any answer but 2xx ends the bench."""
    waiting = iter(requests)

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in waiting:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            if not head.startswith(b"HTTP/1.1 2"):
                raise RuntimeError(f"{head!r} {body!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return len(requests) / (time.perf_counter() - began)


@contextmanager
def _served(argv: list[str], config: Config) -> Iterator[int]:
    """A server as a child process; gives its port once it listens."""
    env = {
        **os.environ,
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": config.bootstrap_servers,
        "EVERSTATE_STORE_DSN": config.store_dsn,
        "EVERSTATE_LOG_PREFIX": config.log.prefix,
        "PYTHONPATH": str(Path(__file__).parents[1] / "examples" / "hotel"),
    }
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stderr is not None
        deadline = time.monotonic() + _START_S
        for line in process.stderr:
            found = re.search(r"serving http://127.0.0.1:(\d+)", line)
            if found or time.monotonic() > deadline:
                break
        if not found:
            raise RuntimeError(f"{argv[-1]} did not start")
        port = int(found[1])
        while True:
            try:
                asyncio.run(_rate(port, [b"GET /health HTTP/1.1\r\nHost: b\r\n\r\n"]))
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)
