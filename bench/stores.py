"""stores: a view in each other store, caught up from the archive and then from the log.

The floor is a bare bulk client: the same rows to the same server, by as many connections as the
pipeline has tasks that write. Its rows are in memory before its clock starts; a view's rows are
read from the archive or the log, judged and computed within the time.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
from cassandra.cluster import Cluster
from cassandra.concurrent import execute_concurrent_with_args
from confluent_kafka import Producer as KafkaProducer
from deltalake import write_deltalake
from redis import Redis

from bench import data
from bench.archive import archiving
from bench.keep import kept
from bench.kinds import check_kept
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.app import App
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.topics import Topics
from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.trail import Trailer

# The servers are those of the tests: everstate itself starts no OpenSearch.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kit.opensearch import OpenSearchServer
from kit.served_cassandra import ServedCassandra
from kit.served_kafka import ServedKafka
from kit.served_lake import ServedLake
from kit.served_redis import ServedRedis
from kit.served_store import ServedStore

COUNT = 200_000
"""Changes in the archive, and as many after them in the log."""
VIEW = "mirrored"
_SQL = f"SELECT id, country, status, total FROM {data.ENTITY}"
_REDIS_PIECE = 500
_BULK_ROWS = 5_000
_INDEX = "bare"
_TEXTS = ("id", "country", "status")

Row: TypeAlias = dict[str, Any]
"""Columns and `_version` by name, values as the store has them."""


def redis_bare(url: str, rows: Sequence[Row]) -> None:
    """HSET in pipelines of some hundred."""
    with Redis.from_url(url, decode_responses=True) as client:
        for piece in _pieces(rows, _REDIS_PIECE):
            with client.pipeline(transaction=False) as pipe:
                for row in piece:
                    pipe.hset(f"{_INDEX}:{row['id']}", mapping=row)
                pipe.execute()


def opensearch_bare(url: str, rows: Sequence[Row]) -> None:
    """Bulk requests of some thousand documents, into an index like that of a view."""
    keyword, kind = {"type": "keyword"}, {"Content-Type": "application/x-ndjson"}
    texts = {name: {"type": "text", "fields": {"keyword": keyword}} for name in _TEXTS}
    properties = {**texts, "_key": keyword, "total": {"type": "double"}}
    with httpx.Client(base_url=url, timeout=120) as client:
        client.put(f"/{_INDEX}", json={"mappings": {"properties": properties}})
        for piece in _pieces(rows, _BULK_ROWS):
            shown = [{**row, "_key": row["id"]} for row in piece]
            for row in shown:
                del row["_version"]
            lines = [
                f"{json.dumps({'index': {'_id': row['id']}})}\n{json.dumps(row)}\n" for row in shown
            ]
            answer = client.post(f"/{_INDEX}/_bulk", content="".join(lines), headers=kind)
            assert answer.json()["errors"] is False


def cassandra_bare(url: str, rows: Sequence[Row]) -> None:
    """The driver's own helper, 100 statements at a time, into a table like that of a view."""
    with _cluster(url) as cluster:
        session = cluster.connect()
        session.execute(
            f"CREATE KEYSPACE IF NOT EXISTS {_INDEX} WITH replication = "
            "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        )
        columns = ("key", *_TEXTS, "total", "version")
        session.execute(
            f"CREATE TABLE IF NOT EXISTS {_INDEX}.rows (key text PRIMARY KEY, id text,"
            " country text, status text, total decimal, version bigint)"
        )
        insert = session.prepare(
            f"INSERT INTO {_INDEX}.rows ({', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?)"
        )
        given = [
            (row["id"], *(row[name] for name in _TEXTS), Decimal(row["total"]), row["_version"])
            for row in rows
        ]
        execute_concurrent_with_args(session, insert, given)


def lake_bare(url: str, rows: Sequence[Row]) -> None:
    """Appends of some thousand rows to one Delta table."""
    for piece in _pieces(rows, _BULK_ROWS):
        write_deltalake(f"{url}/{_INDEX}", pa.Table.from_pylist(piece), mode="append")


def kafka_bare(url: str, rows: Sequence[Row]) -> None:
    """An idempotent producer with the settings of everstate's, to a topic like that of a view."""
    with _topics(url) as topics:
        topics.ensure_raw([_INDEX], partitions=4, settings={"cleanup.policy": "compact"})
    sent = {"enable.idempotence": True, "compression.type": "lz4", "linger.ms": 25}
    sent |= {"queue.buffering.max.messages": 1_000_000, "partitioner": "murmur2_random"}
    producer = KafkaProducer({"bootstrap.servers": url, **sent})
    for piece in _pieces(rows, _BULK_ROWS):
        for row in piece:
            producer.produce(_INDEX, json.dumps({"_key": row["id"], **row}), row["id"])
        producer.poll(0)
    assert producer.flush(60) == 0


def _forget_kafka(url: str) -> None:
    with _topics(url) as topics:
        topics.delete([_INDEX])


def _topics(url: str) -> Topics:
    return Topics(Config().replaced("log", bootstrap_servers=url))


def _cluster(url: str) -> Cluster:
    place = urlsplit(url)
    return Cluster([place.hostname], place.port, protocol_version=5)


def _forget_cassandra(url: str) -> None:
    with _cluster(url) as cluster:
        cluster.connect().execute(f"DROP KEYSPACE {_INDEX}", timeout=60)


def _pieces(rows: Sequence[Row], most: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), most):
        yield rows[start : start + most]


@dataclass(frozen=True)
class Measured:
    """A store of the bench."""

    server: type[ServedStore]
    bare: Callable[[str, Sequence[Row]], None]
    forget: Callable[[str], object]
    """Deletes what the bare client wrote."""


STORES = (
    Measured(ServedRedis, redis_bare, lambda url: Redis.from_url(url).flushall()),
    Measured(
        OpenSearchServer, opensearch_bare, lambda url: httpx.delete(f"{url}/{_INDEX}", timeout=60)
    ),
    Measured(ServedCassandra, cassandra_bare, _forget_cassandra),
    Measured(ServedLake, lake_bare, lambda url: shutil.rmtree(f"{url}/{_INDEX}")),
    Measured(ServedKafka, kafka_bare, _forget_kafka),
)


def run(session: Session) -> list[Result]:
    return [row for each in STORES for row in _of_store(session, each)]


def _of_store(session: Session, store: Measured) -> list[Result]:
    ours: list[tuple[float, float]] = []
    bare: list[tuple[float, float]] = []
    name = store.server.name
    with tempfile.TemporaryDirectory(prefix="everstate-bench-") as folder:
        with store.server.alone(Path(folder)) as served:
            for number in range(-1, session.repeat):
                beneath = _bare(session, store, served)
                found = _ours(session, served)
                session.say(
                    f"[dim]  {name}, {'warm-up' if number < 0 else f'run {number + 1}'}: "
                    f"{found[0]:,.0f} and {found[1]:,.0f} beside "
                    f"{beneath[0]:,.0f} and {beneath[1]:,.0f}[/dim]"
                )
                if number >= 0:
                    ours.append(found)
                    bare.append(beneath)
    whats = ((f"the archive → {name}", "rows/s"), (f"the log → {name}", "changes/s"))
    return [
        result(
            "stores",
            f"{what}, a view of rows",
            unit,
            [each[at] for each in ours],
            floors=[each[at] for each in bare],
            floor_is="bare bulk client, same rows",
            reach=Reach(ratio_min=0.5),
        )
        for at, (what, unit) in enumerate(whats)
    ]


def _ours(session: Session, served: ServedStore) -> tuple[float, float]:
    """Rows a second of a build from the archive, and changes a second that follow in the log."""
    half = session.size(COUNT)
    config, app = served.settings(session.fresh()), _app(served.name)
    with Topics(config) as topics:
        topics.ensure([data.ENTITY])
    _send(config, 0, half)
    with archiving(session, config, data.PURCHASE) as archiver:
        archiver.catch_up()
    _send(config, half, 2 * half)
    kept(session, config, 2 * half, app)
    with closing(Builder(session.spark, config, app)) as builder:
        began = time.perf_counter()
        built = builder.step()
        build_s = time.perf_counter() - began
    assert built is not None
    assert built.changes == half
    with closing(Trailer(session.spark, config, app)) as trailer:
        began, passed = time.perf_counter(), 0
        while moved := trailer.step():
            passed += moved
        trail_s = time.perf_counter() - began
    assert passed == half
    check_kept(config)
    assert len(served.read(config, VIEW) or ()) == len(_newest(2 * half))
    served.clean(config)
    session.drop(config)
    return len(_newest(half)) / build_s, half / trail_s


def _app(store: str) -> App:
    made = App("bench")
    made.entity(data.ENTITY, key="id", schema_version=1, history=False)(data.Purchase)
    made.view(VIEW, sql=_SQL, store=store)
    return made


def _send(config: Config, start: int, end: int) -> None:
    topic = changes_topic(config)
    with Producer(config) as producer:
        for index in range(start, end):
            key, value, headers = data.message(index)
            producer.send_raw(topic, key, value, headers)


def _newest(count: int) -> list[int]:
    """The last change of each purchase among the first changes of the log."""
    return list({data.place(index).number: index for index in range(count)}.values())


def _rows_of(indexes: Sequence[int]) -> Iterator[Row]:
    """The view's row after each change."""
    for index in indexes:
        at = data.place(index)
        purchase = data.purchase(at.number, at.step)
        shown = {name: str(getattr(purchase, name)) for name in _TEXTS}
        yield {**shown, "total": str(purchase.total), "_version": at.step + 1}


def _bare(session: Session, store: Measured, served: ServedStore) -> tuple[float, float]:
    """The same two figures of the bare client."""
    half = session.size(COUNT)
    connections = max(1, session.spark.sparkContext.defaultParallelism - 1)
    first, rest = _newest(half), list(range(half, 2 * half))
    found = []
    for indexes in (first, rest):
        with ProcessPoolExecutor(connections, mp_context=get_context("spawn")) as pool:
            parts = [indexes[number::connections] for number in range(connections)]
            spans = list(
                pool.map(_timed, [store.bare] * connections, [served.url] * connections, parts)
            )
        found.append(len(indexes) / (max(end for _, end in spans) - min(s for s, _ in spans)))
    store.forget(served.url)
    return found[0], found[1]


def _timed(
    bare: Callable[[str, Sequence[Row]], None], url: str, indexes: Sequence[int]
) -> tuple[float, float]:
    """When a process began and ended to write its part, on the clock of the machine."""
    rows = list(_rows_of(indexes))
    began = time.time()
    bare(url, rows)
    return began, time.time()
