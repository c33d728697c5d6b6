"""cdc: a backlog of a captured PostgreSQL table into changes, and commit → `.changes`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

import psycopg

from bench.project import CAPTURED, CAPTURED_DSN, captured
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.local import Stack
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.rest import Connect

ROWS = 200_000
ROWS_MIN = 20_000
RATE = 100
SECONDS = 30
SECONDS_QUICK = 10
TABLE, ENTITY = "parcels", "parcel"
PATIENCE_S = 300.0
_POLL_S = 0.05
_TRANSACTION_ROWS = 10
LOAD_S = 30
LOAD_QUICK_S = 5
_TABLE = (
    "CREATE TABLE parcels (id bigint PRIMARY KEY, country text NOT NULL, status text NOT NULL, "
    "weight_g int NOT NULL, total numeric(12, 2) NOT NULL, note text)"
)
_BARE = {
    "max.batch.size": "2048",
    "max.queue.size": "8192",
    "max.queue.size.in.bytes": "0",
    "poll.interval.ms": "500",
    "provide.transaction.metadata": "false",
    "heartbeat.interval.ms": "0",
    "extended.headers.enabled": "true",
    "transforms": "",
    "predicates": "",
}
"""Debezium's own defaults, against what a capture of ours sets."""

_TOML = """
[project]
app = "bench.project:captured"
[log]
bootstrap_servers = "{servers}"
prefix = "{prefix}"
[store]
dsn = "{dsn}"
[archive]
path = "{archive}"
[pipeline]
driver_memory = "2g"
"""


def run(session: Session) -> list[Result]:
    count = max(ROWS_MIN, session.size(ROWS))
    seconds = SECONDS_QUICK if session.quick else SECONDS
    servers = Stack(session.config, also=("connect",))
    session.config = servers.start()
    try:
        again: list[float] = []
        bare_again: list[float] = []
        rates, bare = session.alternate(
            lambda: _bare_rate(session, count, bare_again), lambda: _rate(session, count, again)
        )
        copies = [_copy_rate(session, count) for _ in range(session.repeat)]
        delays = [_delays(session, seconds) for _ in range(session.repeat)]
        load_s = LOAD_QUICK_S if session.quick else LOAD_S
        loads = [_load(session, load_s) for _ in range(session.repeat)]
    finally:
        servers.stop(("connect",))
    return [
        result(
            "cdc",
            f"{count:,} rows of a backlog → .changes",
            "rows/s",
            rates,
            floors=bare,
            floor_is="Debezium with its defaults → raw topic",
            reach=Reach(ratio_min=0.8),
        ),
        result(
            "cdc",
            f"the next {count:,} rows, cleaned by the same role",
            "rows/s",
            again[-len(rates) :],
            floors=bare_again[-len(rates) :],
            floor_is="Debezium with its defaults → raw topic",
        ),
        result(
            "cdc",
            f"the first {count:,} rows",
            "rows/s",
            rates,
            floors=copies,
            floor_is="our capture → raw topic, copied bare to .changes and .state",
        ),
        result(
            "cdc",
            f"{RATE} transactions/s, commit → .changes, p50",
            "ms",
            [run[0] for run in delays],
            reach=Reach(value_max=1500),
        ),
        result("cdc", "the same, p99", "ms", [run[1] for run in delays]),
        result(
            "cdc",
            f"one writer as fast as it can for {load_s} s",
            "rows/s",
            [run[0] for run in loads],
        ),
        result(
            "cdc",
            "the same, until all its rows are in .changes",
            "× the load's length",
            [run[1] for run in loads],
            reach=Reach(value_max=1.3),
        ),
    ]


def _bare_rate(session: Session, count: int, again: list[float]) -> float:
    """Rows a second of the connector alone, as people set it up; ``again`` gets the second rate."""
    with _captured(session, _BARE) as (config, capturing):
        topic = TopicNames(config.log.prefix).raw(CAPTURED, f"public.{TABLE}")
        with Topics(config) as topics:
            topics.ensure_raw([topic], partitions=config.log.partitions, settings={})
        first = _backlog(config, capturing, topic, count)
        again.append(_backlog(config, capturing, topic, count, behind=count))
        return first


def _rate(session: Session, count: int, again: list[float]) -> float:
    """Rows a second of the capture and a clean role that was just started, to `.changes`.

    ``again`` gets the rate of a second backlog, for which Java has compiled what it needs.
    """
    with _captured(session, {}) as (config, capturing), _clean(config):
        topic = TopicNames(config.log.prefix).changes(ENTITY)
        first = _backlog(config, capturing, topic, count)
        again.append(_backlog(config, capturing, topic, count, behind=count))
        return first


def _copy_rate(session: Session, count: int) -> float:
    """Rows a second when nothing is cleaned: the same capture, and its records copied."""
    with _captured(session, {}) as (config, capturing):
        names = TopicNames(config.log.prefix)
        raw = names.raw_prefix(CAPTURED)
        with Topics(config) as topics:
            topics.ensure_raw([raw], partitions=1, settings={})
        changes, state = names.changes(ENTITY), names.state(ENTITY)
        argv = [sys.executable, "-m", "bench.copying"]
        process = subprocess.Popen([*argv, config.bootstrap_servers, raw, changes, state])
        try:
            return _backlog(config, capturing, changes, count)
        finally:
            process.terminate()
            process.wait(60)


def _backlog(
    config: Config, capturing: Capturing, topic: str, count: int, *, behind: int = 0
) -> float:
    """Rows a second from the connector's start to the last of ``count`` records in ``topic``.

    ``behind``: how many records it has before. The connector is stopped while they are written: one
    that is only paused decodes on until its queue is full, and the queues differ.
    """
    end = behind + count
    _write(config, behind + 1)
    _until(config, topic, behind + 1)
    _stop(config, capturing)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        for first in range(behind + 2, end + 1, _TRANSACTION_ROWS):
            last = min(end, first + _TRANSACTION_ROWS - 1)
            connection.execute(_INSERT, (first, last))
    began = time.perf_counter()
    capturing.resume()
    return (count - 1) / (_until(config, topic, end) - began)


def _stop(config: Config, capturing: Capturing) -> None:
    """End the connector's task; it goes on from its stored position."""
    assert config.capture.connect_url is not None
    connect, connector = Connect(config.capture.connect_url), capturing.names.connector
    connect.stop(connector)
    deadline = time.monotonic() + PATIENCE_S
    while (status := connect.status(connector))["connector"]["state"] != "STOPPED":
        assert time.monotonic() < deadline, status
        time.sleep(_POLL_S)


_INSERT = (
    "INSERT INTO parcels SELECT n, 'AT', 'packed', n %% 30000, n * 0.01, repeat('x', 200) "
    "FROM generate_series(%s::bigint, %s::bigint) n"
)


def _write(config: Config, number: int) -> None:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        connection.execute(_INSERT, (number, number))


def _until(config: Config, topic: str, count: int) -> float:
    """Wait for that many records; the moment (perf_counter) in which they were all there.

    Markers of transactions count in the ends, so that what is there is read through; that takes
    seconds of its own, which are not the capture's.
    """
    deadline, found, read = time.monotonic() + PATIENCE_S, 0, dict[int, int]()
    with Offsets(config) as offsets:
        while time.monotonic() < deadline:
            asked = time.perf_counter()
            ends = offsets.stable_ends([topic])
            if sum(ends.values()) >= count:
                with Consumer(config) as consumer:
                    for (_, partition), end in ends.items():
                        at = read.get(partition, 0)
                        found += sum(1 for _ in consumer.read(topic, partition, at, end))
                        read[partition] = end
                if found >= count:
                    return asked
            time.sleep(_POLL_S)
    raise TimeoutError(f"{topic} has no {count:,} records after {PATIENCE_S:.0f} s")


def _delays(session: Session, seconds: int) -> tuple[float, float]:
    """p50 and p99 from commit to what a reader of `.changes` has, in ms."""
    with _captured(session, {}) as (config, _capturing), _clean(config):
        topic = TopicNames(config.log.prefix).changes(ENTITY)
        _write(config, 1)
        _until(config, topic, 1)
        seen: dict[str, float] = {}
        with Consumer(config) as consumer:
            records = consumer.tail([topic], idle_s=5.0)

            def follow() -> None:
                for record in records:
                    seen[(record.key or b"").decode()] = time.time()

            reader = threading.Thread(target=follow)
            reader.start()
            committed = _paced(config, seconds)
            reader.join()
        delays = [1000 * (seen[key] - at) for key, at in committed.items() if key in seen]
        if len(delays) < len(committed):
            raise TimeoutError(f"{len(committed) - len(delays)} changes did not come")
        cuts = quantiles(delays, n=100)
        return cuts[49], cuts[98]


def _paced(config: Config, seconds: int) -> dict[str, float]:
    """Commit one row at a time at the rate; key → time of its commit."""
    committed = {}
    begin = time.monotonic()
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        for number in range(2, 2 + RATE * seconds):
            time.sleep(max(0.0, begin + (number - 2) / RATE - time.monotonic()))
            connection.execute(_INSERT, (number, number))
            committed[str(number)] = time.time()
    took = time.monotonic() - begin
    assert took < 1.05 * seconds, f"the rows of {seconds} s took {took:.1f} s to commit"
    return committed


def _load(session: Session, seconds: int) -> tuple[float, float]:
    """Rows a second of a writer that waits for nothing, and how long its rows take to `.changes`.

    The second figure is the time from the writer's start until its last row is in `.changes`, in
    lengths of the load: 1 is no lag at its end.
    """
    with _captured(session, {}) as (config, _capturing), _clean(config):
        topic = TopicNames(config.log.prefix).changes(ENTITY)
        _write(config, 1)
        _until(config, topic, 1)
        rows = 1
        began = time.perf_counter()
        with psycopg.connect(config.store_dsn, autocommit=True) as connection:
            while time.perf_counter() - began < seconds:
                connection.execute(_INSERT, (rows + 1, rows + _TRANSACTION_ROWS))
                rows += _TRANSACTION_ROWS
        length = time.perf_counter() - began
        return (rows - 1) / length, (_until(config, topic, rows) - began) / length


@contextmanager
def _captured(session: Session, settings: dict[str, str]) -> Iterator[tuple[Config, Capturing]]:
    """A fresh database with one captured table, and its capture."""
    config = session.fresh()
    with psycopg.connect(config.store_dsn) as connection:
        connection.execute(_TABLE)
    with Topics(config) as topics:
        topics.ensure([ENTITY])
    declared = captured.captures[CAPTURED]
    capture = Capture(
        name=CAPTURED,
        kind="postgresql",
        tables=declared.tables,
        dsn=config.store_dsn,
        settings=settings,
    )
    capturing = Capturing(config, capture, local=True)
    capturing.add(snapshot=False)
    try:
        yield config, capturing
    finally:
        capturing.remove(drop=True, topics=True)
        session.drop(config)


@contextmanager
def _clean(config: Config) -> Iterator[None]:
    """The clean role as `everstate run --only clean` runs it."""
    folder = config.project.data_dir / f"clean-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    (folder / "everstate.toml").write_text(
        _TOML.format(
            servers=config.bootstrap_servers,
            prefix=config.log.prefix,
            dsn=config.store_dsn,
            archive=config.archive_path,
        )
    )
    argv = [sys.executable, "-m", "everstate.cli", "-C", str(folder), "run", "--only", "clean"]
    with open(folder / "clean.log", "wb") as log:
        env = {**os.environ, CAPTURED_DSN: config.store_dsn}
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=Path.cwd(), env=env)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError((folder / "clean.log").read_text()[-2000:])
    finally:
        process.terminate()
        process.wait(60)
