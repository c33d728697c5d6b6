"""reading: `GET` of an entity and its past over HTTP, beside bare FastAPI with one indexed SELECT.

One process each, with the same requests; first one connection, for the times, then several, for
the rate.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import quantiles
from urllib.parse import quote

from bench import data
from bench.keep import kept
from bench.over_http import CONNECTIONS, everstate_serve, get, post, seconds_of, served
from bench.project import app
from bench.report import Reach, Result, result
from bench.session import Session

COUNT = 1_000_000
REQUESTS = 2_000
_BATCH = 100
_HERE = Path(__file__).parents[1]
_BARE = """
import asyncio, sys
import psycopg, uvicorn
from contextlib import asynccontextmanager
from fastapi import FastAPI, Response
dsn, port, table = sys.argv[1:]
idle = asyncio.Queue()

@asynccontextmanager
async def lifespan(_):
    for _ in range(16):
        idle.put_nowait(await psycopg.AsyncConnection.connect(dsn, autocommit=True))
    yield

app = FastAPI(lifespan=lifespan)
SELECT = f"SELECT key, version, kind, state::text FROM {table} WHERE key = %s"

@app.get("/health")
async def health():
    return {}

@app.get("/{key}")
async def read(key: str):
    connection = await idle.get()
    try:
        found = await (await connection.execute(SELECT, [key], prepare=True)).fetchone()
    finally:
        idle.put_nowait(connection)
    return Response(found[3], media_type="application/json", headers={"ETag": f'"{found[1]}"'})

print("serving http://127.0.0.1:" + port, file=sys.stderr, flush=True)
uvicorn.run(app, port=int(port), log_level="critical")
"""


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    config = session.fresh(session.filled(count))
    kept(session, config, count, app)
    rng = random.Random(1)
    indexes = [rng.randrange(count) for _ in range(session.size(REQUESTS))]
    keys = [data.key_of(data.place(index).number) for index in indexes]
    # A little after a change of the key: the version at that time is its own.
    moments = {
        key: (data.EPOCH + timedelta(milliseconds=index, microseconds=1)).isoformat()
        for key, index in zip(keys, indexes, strict=True)
    }
    table = f"{config.views.schema_name}.{data.ENTITY}_latest__v1"
    bare = [sys.executable, "-c", _BARE, config.views_dsn, "18098", table]
    place = f"/v1/{data.ENTITY}"
    ways: Sequence[tuple[str, Callable[[str], bytes], Reach | None]] = (
        ("get", lambda key: get(f"{place}/{key}"), Reach(ratio_max=2.0)),
        ("get at a time", lambda key: get(f"{place}/{key}?at={quote(moments[key])}"), None),
        ("history", lambda key: get(f"{place}/{key}/history"), None),
        ("diff", lambda key: get(f"{place}/{key}/diff?from=1"), None),
        ("explain", lambda key: get(f"{place}/{key}/explain"), None),
        (f"{_BATCH} keys at one moment", _batch(keys), None),
    )
    rows = []
    with (
        served(bare, config, _HERE) as (floor_port, _),
        served(everstate_serve("bench.project:elsewhere"), config, _HERE) as (port, _),
    ):
        floor = [get(f"/{key}") for key in keys]
        for name, request, reach in ways:
            requests = [request(key) for key in keys]
            rows += _measured(session, name, (floor_port, floor), (port, requests), reach)
    session.drop(config)
    return rows


def _batch(keys: Sequence[str]) -> Callable[[str], bytes]:
    unique = sorted(set(keys))
    at = {key: number for number, key in enumerate(unique)}

    def request(key: str) -> bytes:
        chosen = {unique[(at[key] + step) % len(unique)] for step in range(_BATCH)}
        body = json.dumps({"keys": sorted(chosen)})
        return post(f"/query/v1/{data.ENTITY}/keys", body)

    return request


def _measured(
    session: Session,
    name: str,
    floor: tuple[int, list[bytes]],
    ours: tuple[int, list[bytes]],
    reach: Reach | None,
) -> list[Result]:
    """Median and 99th of a hundred of one connection, and the rate of several."""
    tails: list[float] = []

    def typical(port: int, requests: list[bytes], tail: list[float]) -> float:
        cuts = quantiles(asyncio.run(seconds_of(port, requests, 1)), n=100)
        tail.append(1000 * cuts[98])
        return 1000 * cuts[49]

    def rate(port: int, requests: list[bytes]) -> float:
        began = time.perf_counter()
        asyncio.run(seconds_of(port, requests))
        return len(requests) / (time.perf_counter() - began)

    floor_is = "bare FastAPI, one indexed SELECT"
    times, floors = session.alternate(lambda: typical(*floor, []), lambda: typical(*ours, tails))
    rates, floor_rates = session.alternate(lambda: rate(*floor), lambda: rate(*ours), warm=0)
    return [
        result(
            "reading",
            f"{name}, one connection, p50",
            "ms",
            times,
            floors=floors,
            floor_is=floor_is,
            reach=reach,
        ),
        result("reading", f"{name}, the same, p99", "ms", tails[-len(times) :]),
        result(
            "reading",
            f"{name}, {CONNECTIONS} connections",
            "requests/s",
            rates,
            floors=floor_rates,
            floor_is=floor_is,
        ),
    ]
