"""throttle: how fresh live changes are while an import of 200,000 runs beside them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass
from statistics import quantiles

import psycopg

from bench import data
from bench.freshness import RATE, Sender, running_pipeline
from bench.project import SHOWN, throttled, unthrottled
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.app import App
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import Topics
from everstate.pipeline.proof.verify import verify_views
from everstate.pipeline.reports import failing
from everstate.postgres import connect_views
from everstate.views.control import Control

IMPORTED = 200_000
IMPORT_RATE = 10_000
"""Changes a second of the import, as a store with its relay publishes them beside a pipeline."""
_FIRST_KEY = 50_000_000
WARM_S = 50
IDLE_S = 15
AFTER_S = 8
"""Seconds that still count as beside the import, when its last change is sent."""
PATIENCE_S = 400.0


@dataclass(frozen=True)
class Times:
    """99th of a hundred, in milliseconds, before and beside the import."""

    idle: float
    beside: float


def run(session: Session) -> list[Result]:
    spared = [_live(session, throttled, "throttled") for _ in range(session.repeat)]
    whole = [_live(session, unthrottled, "unthrottled") for _ in range(session.repeat)]
    idle = "live changes without an import"
    return [
        result(
            "throttle",
            f"live p99 beside an import of {session.size(IMPORTED):,}, throttled",
            "ms",
            [each.beside for each in spared],
            floors=[each.idle for each in spared],
            floor_is=idle,
            reach=Reach(ratio_max=2),
        ),
        result(
            "throttle",
            "the same without a policy",
            "ms",
            [each.beside for each in whole],
            floors=[each.idle for each in whole],
            floor_is=idle,
        ),
    ]


def _live(session: Session, app: App, name: str) -> Times:
    """One run: warm up, live changes alone, then beside the import; and the proofs."""
    config = session.fresh()
    with Topics(config) as topics:
        topics.ensure([data.ENTITY])
    imported = session.size(IMPORTED)
    import_s = imported / IMPORT_RATE + AFTER_S
    config = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"driver_memory": "2g"})}
    )
    with running_pipeline(config, f"bench.project:{name}"):
        table = f"{config.views.schema_name}.{SHOWN}__v1"
        with psycopg.connect(config.store_dsn, autocommit=True) as connection:
            _until_made(connection, table)
            count = int((WARM_S + IDLE_S + import_s) * RATE)
            sender = Sender(config, 0, count)
            given = (config, imported, time.time() + WARM_S + IDLE_S)
            beside = multiprocessing.get_context("spawn").Process(target=_import, args=given)
            beside.start()
            live = threading.Thread(target=sender.run, daemon=True)
            live.start()
            times = sender.watch(connection, table)
            live.join()
            beside.join()
            assert beside.exitcode == 0, "the import ended with an error"
        _prove(session, config, app, waits=app is throttled)
        if app is throttled:
            _until_taken(config)
            _prove(session, config, app, waits=False)
    session.drop(config)
    begun, ended = WARM_S * RATE, (WARM_S + IDLE_S) * RATE
    found = Times(_p99(times[begun:ended]), _p99(times[ended:]))
    session.say(f"[dim]  {name}: idle {found.idle:.0f} ms, beside {found.beside:.0f} ms[/dim]")
    return found


def _import(config: Config, count: int, start_at: float) -> None:
    """New purchases, at an even rate, from who imports; a process of its own."""
    records = []
    for number in range(count):
        key, value, headers = data.message(4 * (_FIRST_KEY + number))
        records.append(
            (key, value.replace(b'"serviceName":"shop"', b'"serviceName":"importer"'), headers)
        )
    topic = changes_topic(config)
    time.sleep(max(0.0, start_at - time.time()))
    with Producer(config) as producer:
        began = time.perf_counter()
        for number, record in enumerate(records):
            if number % 100 == 0:
                time.sleep(max(0.0, began + number / IMPORT_RATE - time.perf_counter()))
            producer.send_raw(topic, *record)


def _p99(times: list[float]) -> float:
    return 1000 * quantiles(times, n=100)[98]


def _prove(session: Session, config: Config, app: App, *, waits: bool) -> None:
    """Every view equals its batch at its own position, with what waits beside it left out."""
    if waits:
        assert _waiting(config) > 0, "nothing waits any more: the proof would show nothing"
    reports = verify_views(session.spark, config, app)
    assert not failing(reports), failing(reports)


def _waiting(config: Config) -> int:
    with connect_views(config.views_dsn) as connection:
        counts = Control(connection, config.views.schema_name).deferred()
    return sum(changes for here in counts.values() for changes, _ in here.values())


def _until_taken(config: Config) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := _waiting(config):
        assert time.monotonic() < deadline, f"{left:,} changes wait still"
        time.sleep(1.0)


def _until_made(connection: psycopg.Connection, table: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        row = connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
        if row is not None and row[0] is not None:
            return
        assert time.monotonic() < deadline, f"{table} is not made"
        time.sleep(0.3)
