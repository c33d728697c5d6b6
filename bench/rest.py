"""rest: requests a second of `everstate serve`, beside a bare HTTP server with a fixed answer."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.over_http import CONNECTIONS, everstate_serve, seconds_of, served
from bench.report import Result, result
from bench.session import Session

REQUESTS = 8_000
_HOTEL = Path(__file__).parents[1] / "examples" / "hotel"
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
    rows = []
    with (
        served(bare, config, _HOTEL) as (floor_port, _),
        served(everstate_serve("hotel:app"), config, _HOTEL) as (port, _),
    ):
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
                return _rate(at, requests)

            if method == "GET":
                _rate(port, [_request("PUT", path, n, 0) for n in range(count)])
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
    head = f"{method} {path.format(number=number)} HTTP/1.1\r\nHost: localhost\r\n{_WHO}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def _rate(port: int, requests: list[bytes]) -> float:
    """Requests a second over all connections."""
    began = time.perf_counter()
    asyncio.run(seconds_of(port, requests))
    return len(requests) / (time.perf_counter() - began)
