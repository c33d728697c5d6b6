"""sizes: bytes that a change and an entity take in the log, in the lake, and in the views."""

from __future__ import annotations

import psycopg

from bench import data
from bench.archive import archived
from bench.keep import kept
from bench.project import VIEW, app
from bench.report import Result, result
from bench.session import Session, changes_topic
from everstate.config import Config
from everstate.log.disks import log_disks

COUNT = 500_000


def run(session: Session) -> list[Result]:
    count = session.size(COUNT)
    filled = session.filled(count)
    values = sum(len(data.message(index)[1]) for index in range(10_000)) / 10_000
    topic = changes_topic(filled)
    logged = sum(sum(disk.topics.get(topic, [])) for disk in log_disks(filled))
    _, stored = archived(session, filled, data.PURCHASE, count)
    config = session.fresh(filled)
    kept(session, config, count, app)
    latest, history, view = (
        _bytes(config, name) for name in (f"{data.ENTITY}_latest", f"{data.ENTITY}_history", VIEW)
    )
    with psycopg.connect(config.views_dsn) as connection:
        query = f"SELECT count(*) FROM {config.views.schema_name}.{data.ENTITY}_latest__v1"
        (entities,) = connection.execute(query.encode()).fetchone() or (0,)
    session.drop(config)
    return [
        result("sizes", metric, unit, [value])
        for metric, unit, value in (
            ("the JSON value of a change", "bytes/change", values),
            ("the log, one replica", "bytes/change", logged / count),
            ("the lake", "bytes/change", stored / count),
            ("latest, with its indexes", "bytes/entity", latest / entities),
            ("history, with its indexes", "bytes/change", history / count),
            ("a view of sums, in all", "bytes", view),
        )
    ]


def _bytes(config: Config, view: str) -> float:
    """Bytes of a view's table with its indexes and long values, without what was deleted."""
    name = f"{config.views.schema_name}.{view}__v1"
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        connection.execute(f"VACUUM FULL {name}".encode())
        row = connection.execute("SELECT pg_total_relation_size(%s::regclass)", [name]).fetchone()
    assert row is not None
    return float(row[0])
