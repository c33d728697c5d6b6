"""subscribers: 500 changes a second, for readers of one key (200, then 1,000) and 10 of everything.

Each subscription is a connection of Server-Sent Events to `everstate serve`. The readers of
everything are disconnected at random, and continue by `Last-Event-ID`; at the end each must have
had every change once, and the readers of one key exactly the changes of their key.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import orjson
import psutil

from bench import data
from bench.freshness import WARM_SECONDS, running_pipeline
from bench.over_http import everstate_serve, get, seconds_of, served
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import Topics

RATE = 500
SECONDS = 60
OF_A_KEY = (200, 1_000)
OF_ALL = 10
_PATIENCE_S = 60.0
_HERE = Path(__file__).parents[1]


@dataclass
class _Reader:
    """One subscriber: what it received, by key and version, and when."""

    key: str | None
    received: list[tuple[str, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    last_id: str | None = None
    task: asyncio.Task[None] | None = None
    disconnects: int = 0
    ended: int = 0
    """How often the server ended its stream."""


def run(session: Session) -> list[Result]:
    return [line for of_a_key in OF_A_KEY for line in _run(session, of_a_key)]


def _run(session: Session, of_a_key: int) -> list[Result]:
    config, seconds = session.fresh(), SECONDS if not session.quick else 8
    with Topics(config) as topics:
        topics.ensure([data.ENTITY])
    count = RATE * (WARM_SECONDS + seconds)
    with (
        running_pipeline(config, "bench.project:elsewhere"),
        served(everstate_serve("bench.project:elsewhere"), config, _HERE) as (port, pid),
    ):
        _await_views(port)
        before = psutil.Process(pid).memory_info().rss
        readers, sent = asyncio.run(_follow(config, port, count, of_a_key))
        after = psutil.Process(pid).memory_info().rss
    _check(readers, sent)
    begin = min(sent.values()) + WARM_SECONDS
    of_all, of_a_key_only = (
        [
            1000 * (at - sent[each])
            for r in readers
            if (r.key is None) is is_of_all
            for each, at in zip(r.received, r.times, strict=True)
            if sent[each] >= begin
        ]
        for is_of_all in (True, False)
    )
    session.drop(config)
    name = f"{of_a_key:,} readers of a key and {OF_ALL} of everything"
    cut, ended = sum(r.disconnects for r in readers), sum(r.ended for r in readers)
    mib, late = 2**20, Reach(value_max=1000)
    lags = {
        f"of everything, {RATE} changes/s, {cut} disconnects": of_all,
        "of a key": of_a_key_only,
    }
    cuts = {which: quantiles(each, n=100) for which, each in lags.items()}
    events = float(len(of_all) + len(of_a_key_only))
    return [
        *(
            result("subscribers", f"{name}: those {which}, {cut_name}", "ms", [at], reach=reach)
            for which, each in cuts.items()
            for cut_name, at, reach in (("p50", each[49], None), ("p99", each[98], late))
        ),
        result("subscribers", f"{name}: events", "events", [events]),
        result("subscribers", f"{name}: streams that the server ended", "streams", [float(ended)]),
        result("subscribers", f"{name}: memory of the server", "MiB", [after / mib]),
        result("subscribers", f"{name}: memory before", "MiB", [before / mib]),
    ]


def _await_views(port: int) -> None:
    """Wait until the pipeline has made its views: a stream reads what they have accepted."""
    deadline = time.monotonic() + 2 * _PATIENCE_S
    while True:
        try:
            asyncio.run(seconds_of(port, [get(f"/query/v1/{data.ENTITY}?limit=1")], 1))
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _check(readers: list[_Reader], sent: dict[tuple[str, int], float]) -> None:
    """Raise AssertionError unless a reader had exactly its changes, those of a key in order."""
    for reader in readers:
        expected = {each for each in sent if reader.key in (None, each[0])}
        doubled = [each for each, times in Counter(reader.received).items() if times > 1]
        missed = expected - set(reader.received)
        assert not doubled, f"{reader.key or 'all'}: twice: {doubled[:5]}"
        assert not missed, f"{reader.key or 'all'}: missed {len(missed)}: {sorted(missed)[:5]}"
        others = set(reader.received) - expected
        assert not others, f"{reader.key or 'all'}: not its own: {sorted(others)[:5]}"
        newest: dict[str, int] = {}
        for key, version in reader.received:
            assert version > newest.get(key, 0), f"{key}: {version} after {newest[key]}"
            newest[key] = version


async def _follow(
    config: Config, port: int, count: int, of_a_key: int
) -> tuple[list[_Reader], dict[tuple[str, int], float]]:
    places = [data.place(index) for index in range(count)]
    named = sorted({data.key_of(place.number) for place in places})
    rng = random.Random(2)
    readers = [_Reader(key) for key in rng.sample(named, min(of_a_key, len(named)))]
    readers += [_Reader(None) for _ in range(OF_ALL)]
    live = [asyncio.Event() for _ in readers]
    for reader, is_live in zip(readers, live, strict=True):
        reader.task = asyncio.create_task(_read(port, reader, is_live))
    async with asyncio.timeout(_PATIENCE_S):
        for reader, is_live in zip(readers, live, strict=True):
            assert reader.task is not None
            waiting = asyncio.ensure_future(is_live.wait())
            await asyncio.wait({waiting, reader.task}, return_when=asyncio.FIRST_COMPLETED)
            if reader.task.done():
                await reader.task
    sent: dict[tuple[str, int], float] = {}
    thread = threading.Thread(target=_send, args=(config, count, sent), daemon=True)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        reader = rng.choice(readers[-OF_ALL:] if rng.random() < 0.7 else readers)
        assert reader.task is not None
        reader.task.cancel()
        reader.disconnects += 1
        reader.task = asyncio.create_task(_read(port, reader, asyncio.Event()))
    counts: Counter[str | None] = Counter(key for key, _ in sent)
    counts[None] = count
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and any(
        len(reader.received) < counts[reader.key] for reader in readers
    ):
        await asyncio.sleep(0.2)
    await asyncio.sleep(1)
    for reader in readers:
        assert reader.task is not None
        if reader.task.done():
            await reader.task
        reader.task.cancel()
    return readers, sent


def _send(config: Config, count: int, sent: dict[tuple[str, int], float]) -> None:
    topic = changes_topic(config)
    with Producer(config) as producer:
        began = time.perf_counter()
        for index in range(count):
            key, value, headers = data.message(index)
            place = data.place(index)
            due = began + index / RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            sent[data.key_of(place.number), place.step + 1] = due
            producer.send_raw(topic, key, value, headers)


async def _read(port: int, reader: _Reader, live: asyncio.Event) -> None:
    """Receive events until cancelled; where the server ends a stream, come back as browsers do."""
    while True:
        try:
            await _read_stream(port, reader, live)
        except (asyncio.IncompleteReadError, ConnectionError):
            reader.ended += 1
            await asyncio.sleep(0.2)


async def _read_stream(port: int, reader: _Reader, live: asyncio.Event) -> None:
    """Receive the events of one stream; an event counts when its id has come with it."""
    wanted = "" if reader.key is None else f"?key={reader.key}"
    head = (
        f"GET /stream/v1/{data.ENTITY}{wanted} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    )
    if reader.last_id is not None:
        head += f"Last-Event-ID: {reader.last_id}\r\n"
    stream, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        writer.write(f"{head}\r\n".encode())
        answer = await stream.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{answer!r} {await stream.read(1_000)!r}")
        while True:
            piece = await stream.readuntil(b"\n\n")
            # Between two events stands the end of one HTTP chunk and the length of the next one.
            event = dict(
                line.split(b": ", 1) for line in piece.splitlines() if line.partition(b": ")[2]
            )
            if event.get(b"event") == b"live":
                live.set()
            elif event.get(b"event") == b"change":
                change = orjson.loads(event[b"data"])
                reader.received.append((change["key"], change["version"]))
                reader.times.append(time.perf_counter())
            if b"id" in event:
                reader.last_id = event[b"id"].decode()
    finally:
        writer.close()
