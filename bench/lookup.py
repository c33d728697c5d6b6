"""look-up: `get` beside one indexed SELECT; a key in the lake; and the stream of changes.

All over the same kept views: making them is most of the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import psycopg
import pyarrow.parquet as pq
from deltalake import DeltaTable

from bench import data
from bench.archive import archiving
from bench.keep import kept
from bench.project import app
from bench.report import Reach, Result, result
from bench.session import Session, changes_topic
from everstate.archive import ArchiveReader, table_path
from everstate.changes import ChangeCodec
from everstate.config import Config
from everstate.log.consumer import Consumer
from everstate.pipeline.archiving.compact import compact
from everstate.serving import Reader
from everstate.serving.connection import close_pools

COUNT = 1_000_000
LOOKUPS = 4_000
STREAMED = 300_000
COLD = 40
_WARM = 200
_READ = ("generation", "partition", "offset", "raw_value")


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    config = session.fresh(session.filled(count))
    kept(session, config, count, app)
    rng = random.Random(1)
    indexes = [rng.randrange(count) for _ in range(LOOKUPS)]
    keys = [data.key_of(data.place(index).number) for index in indexes]
    # A little after the change at the index: the version at that time is its own.
    moments = [data.EPOCH + timedelta(milliseconds=index, microseconds=1) for index in indexes]
    asked = list(zip(keys, moments, strict=True))
    schema = config.views.schema_name
    columns = "key, version, kind, state, as_of, provenance"
    now_sql = f"SELECT {columns} FROM {schema}.{data.ENTITY}_latest__v1 WHERE key = %s".encode()
    at_sql = (
        f"SELECT {columns} FROM {schema}.{data.ENTITY}_history__v1 WHERE key = %s "
        f"AND as_of <= %s ORDER BY as_of DESC, version DESC LIMIT 1"
    ).encode()
    with (
        Reader(config, app) as reader,
        psycopg.connect(config.views_dsn, autocommit=True) as connection,
    ):
        cursor = connection.cursor()

        def select(query: bytes, *parameters: Any) -> None:
            cursor.execute(query, parameters, prepare=True).fetchone()

        rows = []
        for name, ours, floor in (
            (
                "get now",
                lambda key, _: reader.get(data.ENTITY, key),
                lambda key, _: select(now_sql, key),
            ),
            (
                "get at a time",
                lambda key, moment: reader.get(data.ENTITY, key, at=moment),
                lambda key, moment: select(at_sql, key, moment),
            ),
        ):
            values, floors = session.alternate(
                lambda floor=floor: _typical(floor, asked),  # type: ignore[misc]
                lambda ours=ours: _typical(ours, asked),  # type: ignore[misc]
            )
            rows.append(
                result(
                    "look-up",
                    f"{name}, median, {count:,} changes",
                    "µs",
                    values,
                    floors=floors,
                    floor_is="one indexed SELECT",
                    reach=Reach(ratio_max=2.0),
                )
            )
    rows += _changes(session, config, count)
    rows += _cold(session, config, count, keys)
    session.drop(config)
    return rows


def _changes(session: Session, config: Config, count: int) -> list[Result]:
    """Accepted changes from the beginning of the log, beside reading and decoding its records."""
    read, topic = min(count, STREAMED), changes_topic(config)

    def floor() -> float:
        codec, began, done = ChangeCodec(data.PURCHASE), time.perf_counter(), 0
        with Consumer(config) as consumer:
            for record in consumer.read_topic(topic):
                codec.decode(record.value or b"")
                done += 1
                if done == read:
                    break
        return read / (time.perf_counter() - began)

    def ours() -> float:
        began = time.perf_counter()
        with app.changes(data.ENTITY, since="beginning", config=config) as changes:
            for _, item in zip(range(read), changes, strict=False):
                assert item.change.version
        return read / (time.perf_counter() - began)

    values, floors = session.alternate(floor, ours)
    close_pools()
    return [
        result(
            "look-up",
            "changes(since=beginning), decoded",
            "changes/s",
            values,
            floors=floors,
            floor_is="reading and decoding the log",
            reach=Reach(ratio_min=0.5),
        )
    ]


def _cold(session: Session, config: Config, count: int, keys: list[str]) -> list[Result]:
    """A key's history out of the lake, after clustering, beside reading its row group."""
    with archiving(session, config, data.PURCHASE) as archiver:
        archiver.catch_up()
    compact(session.spark, config, data.ENTITY, cluster=True)
    reader = ArchiveReader(config, data.ENTITY)
    asked, opened = keys[:COLD], []

    def floor() -> float:
        return _typical(lambda key, _: _one_group(config, key), [(key, None) for key in asked])

    def ours() -> float:
        def look_up(key: str, _: Any) -> None:
            opened.append(reader.changes_of(key, _READ).files_read)

        return _typical(look_up, [(key, None) for key in asked])

    values, floors = session.alternate(floor, ours)
    files = len(reader.files())
    return [
        result(
            "look-up",
            f"cold, of {count:,} changes in {files} files, median",
            "µs",
            values,
            floors=floors,
            floor_is="opening the table, and reading the key's row group with pyarrow",
            reach=Reach(ratio_max=2.0),
        ),
        result("look-up", "cold: files read", "files", [float(median(opened))]),
    ]


def _one_group(config: Config, key: str) -> None:
    """What nobody can do without: the table's log, and one row group of one file."""
    table = DeltaTable(table_path(config, data.ENTITY))
    for uri in table.file_uris():
        file = pq.ParquetFile(uri)
        for group in range(file.num_row_groups):
            place = file.schema_arrow.get_field_index("key")
            known = file.metadata.row_group(group).column(place).statistics
            if known is not None and known.min <= key <= known.max:
                file.read_row_group(group, columns=list(_READ))
                return


def _typical(look_up: Callable[[str, Any], object], asked: list[tuple[str, Any]]) -> float:
    """Median microseconds of a look-up."""
    for key, moment in asked[: min(_WARM, len(asked) // 10)]:
        look_up(key, moment)
    times = []
    for key, moment in asked:
        began = time.perf_counter_ns()
        look_up(key, moment)
        times.append(time.perf_counter_ns() - began)
    return median(times) / 1000
