"""freshness: 400 changes a second, from `send` to the row that a reader sees."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import quantiles

import psycopg

from bench import data
from bench.postgres_floors import BareKeeper
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import Topics

RATE = 400
BEFORE = 100_000
"""Changes that are kept before the clock runs: the lane is warm, the tables are not empty."""
SECONDS = 30
SECONDS_QUICK = 8
WARM_SECONDS = 45
"""Before what is measured, at the same rate: Java compiles what runs often within that time."""
PATIENCE_S = 180.0
_PAUSE_S = 0.002
_PAUSES = 4
"""Times of a look that pass before the next: looking must not take what is measured."""

_TOML = """
[project]
app = "{app}"
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
    seconds = SECONDS_QUICK if session.quick else SECONDS
    ours: list[tuple[float, float]] = []
    bare: list[tuple[float, float]] = []
    for number in range(session.repeat):
        bare.append(_bare(session, seconds))
        ours.append(_ours(session, seconds))
        session.say(
            f"[dim]  run {number + 1}: p50 {ours[-1][0]:.0f} ms, p99 {ours[-1][1]:.0f} ms beside "
            f"{bare[-1][0]:.0f} and {bare[-1][1]:.0f}[/dim]"
        )
    reaches = (Reach(value_max=350), Reach(value_max=1200))
    return [
        result(
            "freshness",
            f"{RATE} changes/s, send → row visible, {name}",
            "ms",
            [run[at] for run in ours],
            floors=[run[at] for run in bare],
            floor_is="bare consumer → PostgreSQL",
            reach=reaches[at],
        )
        for at, name in enumerate(("p50", "p99"))
    ]


def _ours(session: Session, seconds: int) -> tuple[float, float]:
    """The pipeline as `everstate run --only pipeline` runs it, archive included."""
    config = prepared(session)
    with running_pipeline(config):
        times = sender_of(session, config, seconds).percentiles(latest_table(config))
    session.drop(config)
    return times


def sender_of(session: Session, config: Config, seconds: int) -> Sender:
    """Sends as long as the lane is warmed, and then for some seconds."""
    return Sender(config, session.size(BEFORE), (WARM_SECONDS + seconds) * RATE)


def latest_table(config: Config) -> str:
    """The table of present states, which the core writes."""
    return f"{config.views.schema_name}.{data.ENTITY}_latest__v1"


def _bare(session: Session, seconds: int) -> tuple[float, float]:
    config = prepared(session)
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    process = spawn.Process(target=_keep_bare, args=(config, stop), daemon=True)
    process.start()
    try:
        times = sender_of(session, config, seconds).percentiles("bare_latest")
    finally:
        stop.set()
        process.join(30)
    session.drop(config)
    return times


def _keep_bare(config: Config, stop: Event) -> None:
    keeper = BareKeeper(config, changes_topic(config), config.log.partitions)
    while not stop.is_set():
        keeper.step(0.001)
    keeper.close()


def prepared(session: Session) -> Config:
    """A fresh project whose log holds the changes that come before."""
    config = session.fresh()
    with Topics(config) as topics:
        topics.ensure([data.ENTITY])
    with Producer(config) as producer:
        for index in range(session.size(BEFORE)):
            key, value, headers = data.message(index)
            producer.send_raw(changes_topic(config), key, value, headers)
    return config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"driver_memory": "2g"})}
    )


@contextmanager
def running_pipeline(
    config: Config, app: str = "bench.project:lean", more: str = ""
) -> Iterator[None]:
    """A pipeline of its own process; ``more`` is added to its everstate.toml."""
    folder = Path(config.archive_path).parent / f"{config.log.prefix}-project"
    folder.mkdir(parents=True)
    (folder / "everstate.toml").write_text(
        _TOML.format(
            servers=config.bootstrap_servers,
            prefix=config.log.prefix,
            dsn=config.store_dsn,
            archive=config.archive_path,
            app=app,
        )
        + more,
        "utf-8",
    )
    everstate = [sys.executable, "-m", "everstate.cli", "--project", str(folder)]
    with open(folder / "pipeline.log", "wb") as output:
        process = subprocess.Popen(
            [*everstate, "run", "--only", "pipeline"],
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Sender:
    """Sends changes at an even rate and watches for each to become visible."""

    def __init__(self, config: Config, first: int, count: int) -> None:
        self._config, self.first, self.count = config, first, count
        self.sent: list[float] = []
        """When each change was due, on the clock of ``time.perf_counter``."""

    def percentiles(self, table: str) -> tuple[float, float]:
        """Milliseconds until a row shows its change: at the middle and at the 99th of a hundred."""
        with psycopg.connect(self._config.store_dsn, autocommit=True) as connection:
            _until_kept(connection, table, self.first)
            thread = threading.Thread(target=self.run, daemon=True)
            thread.start()
            times = self.watch(connection, table)
            thread.join()
        return milliseconds(times[WARM_SECONDS * RATE :])

    def run(self) -> None:
        """Send; a change's time is when it was due, so that a late sender flatters nobody."""
        topic = changes_topic(self._config)
        messages = [data.message(self.first + index) for index in range(self.count)]
        with Producer(self._config) as producer:
            began = time.perf_counter()
            for number, (key, value, headers) in enumerate(messages):
                due = began + number / RATE
                time.sleep(max(0.0, due - time.perf_counter()))
                self.sent.append(due)
                producer.send_raw(topic, key, value, headers)

    def watch(self, connection: psycopg.Connection, table: str) -> list[float]:
        """Seconds of each change, in the order of sending."""
        query = f"SELECT key, version FROM {table} WHERE key = ANY(%s)".encode()
        taken = 0
        waiting: dict[str, list[tuple[int, int]]] = {}
        times = [0.0] * self.count
        pause = _PAUSE_S
        left = self.count
        deadline = time.monotonic() + PATIENCE_S
        while left:
            assert time.monotonic() < deadline, f"{left} changes never became visible"
            while taken < len(self.sent):
                at = data.place(self.first + taken)
                waiting.setdefault(data.key_of(at.number), []).append((at.step + 1, taken))
                taken += 1
            if waiting:
                asked = time.perf_counter()
                rows = connection.execute(query, (list(waiting),), prepare=True).fetchall()
                now = time.perf_counter()
                pause = max(_PAUSE_S, _PAUSES * (now - asked))
                for key, version in rows:
                    for wanted, number in [w for w in waiting[key] if w[0] <= version]:
                        times[number] = now - self.sent[number]
                        waiting[key].remove((wanted, number))
                        left -= 1
                    if not waiting[key]:
                        del waiting[key]
            time.sleep(pause)
        return times


def milliseconds(times: Sequence[float]) -> tuple[float, float]:
    """The middle and the 99th of a hundred of some seconds."""
    ordered = quantiles(times, n=100)
    return 1000 * ordered[49], 1000 * ordered[98]


def _until_kept(connection: psycopg.Connection, table: str, count: int) -> None:
    """Wait until the changes that came before are all in the table."""
    # Versions are dense: their sum is the number of changes.
    query = f"SELECT coalesce(sum(version), 0) FROM {table}".encode()
    deadline = time.monotonic() + PATIENCE_S
    found = 0
    while found != count:
        assert time.monotonic() < deadline, f"kept within {PATIENCE_S:.0f} s: {found}"
        time.sleep(0.5)
        try:
            row = connection.execute(query).fetchone()
            found = row[0] if row is not None else 0
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            continue
