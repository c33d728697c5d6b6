"""look-up: the library's `get` beside one indexed SELECT, both on a warm connection."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import psycopg

from bench import data
from bench.keep import kept
from bench.project import app
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.serving import Reader

COUNT = 1_000_000
LOOKUPS = 4_000
_WARM = 200


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
    session.drop(config)
    return rows


def _typical(look_up: Callable[[str, Any], object], asked: list[tuple[str, Any]]) -> float:
    """Median microseconds of a look-up."""
    for key, moment in asked[:_WARM]:
        look_up(key, moment)
    times = []
    for key, moment in asked:
        began = time.perf_counter_ns()
        look_up(key, moment)
        times.append(time.perf_counter_ns() - began)
    return median(times) / 1000
